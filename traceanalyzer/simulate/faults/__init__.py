"""Faults on demand: runs in which something known is wrong, to prove that an analysis names it.

Each module holds its faults as ``FAULTS``: traffic (other calls than the job's), timing (the same calls, later), data (what
was recorded of them). ``simulate`` applies them to the plan of a simulation; the truth file lists them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from traceanalyzer.errors import InputError
from traceanalyzer.job import Job
from traceanalyzer.simulate import Simulation, simulate_programs
from traceanalyzer.simulate.costs import Costs
from traceanalyzer.simulate.faults import data, timing, traffic
from traceanalyzer.simulate.faults.plan import Chosen, Fault, Finish, Kind, Option, Plan
from traceanalyzer.simulate.rows import Collected
from traceanalyzer.simulate.walk import walk

__all__ = ["FAULTS", "Chosen", "Fault", "Finish", "Kind", "Option", "Plan", "parse", "planned", "run", "simulate"]

FAULTS: dict[str, Fault] = {fault.name: fault for fault in (*traffic.FAULTS, *timing.FAULTS, *data.FAULTS)}
"""Every fault by name."""


def parse(text: str) -> Chosen:
    """A fault written as name or name:key=value,key=value. Raises InputError, which names what is allowed."""
    name, _, rest = text.partition(":")
    fault = FAULTS.get(name.strip())
    if fault is None:
        raise InputError(f"no such fault: {name.strip()!r}. There are: {', '.join(sorted(FAULTS))}.")
    options: dict[str, Option] = {}
    for part in filter(None, (one.strip() for one in rest.split(","))):
        key, equals, value = (one.strip() for one in part.partition("="))
        allowed = ", ".join(f"{k}={v}" for k, v in fault.defaults.items()) or "it has none"
        if not equals or key not in fault.defaults:
            raise InputError(f"fault {fault.name}: {part!r} is no option of it. There are: {allowed}.")
        default = fault.defaults[key]
        try:
            options[key] = type(default)(value)
        except ValueError:
            raise InputError(
                f"fault {fault.name}: {key}={value} is no {_WORDS[type(default)]}. By default: {allowed}."
            ) from None
    return Chosen(fault, options)


_WORDS: dict[type, str] = {int: "whole number", float: "number", str: "text"}


def planned(plan: Plan, faults: Collection[Chosen]) -> tuple[Plan, list[Plan]]:
    """The plan with all faults, and the plan after each of them (whose ``where`` is that fault's)."""
    stages: list[Plan] = []
    for chosen in faults:
        plan = chosen.apply(plan)
        stages.append(plan)
    return plan, stages


def run(plan: Plan, faults: Collection[Chosen] = (), *, seed: int = 0, first_step: int = 0) -> Simulation:
    """Simulates a plan with faults."""
    plan, stages = planned(plan, faults)
    does = plan.does
    walked = walk(does, changes=plan.changes, seed=seed, routing=plan.routing)
    found = simulate_programs(
        walked,
        steps=plan.steps,
        costs=plan.costs,
        seed=seed,
        ranks=plan.ranks,
        job=plan.job,
        intended=plan.intended,
        collected=plan.collected,
        dtype=does.activation_dtype,
        first_step=first_step,
        allow_hang=plan.allow_hang,
    )
    listed = tuple(chosen.as_truth(stage) for chosen, stage in zip(faults, stages, strict=True))
    return found.with_faults(listed, plan.finish)


def simulate(
    job: Job,
    faults: Collection[Chosen],
    *,
    steps: int = 1,
    costs: Costs | None = None,
    seed: int = 0,
    ranks: Sequence[int] | None = None,
    collected: Collected | None = None,
    first_step: int = 0,
) -> Simulation:
    """Simulates a job with faults; the arguments are those of traceanalyzer.simulate.simulate."""
    plan = Plan(
        job,
        costs=costs or Costs(),
        collected=collected or Collected(),
        steps=steps,
        ranks=None if ranks is None else tuple(ranks),
    )
    return run(plan, faults, seed=seed, first_step=first_step)
