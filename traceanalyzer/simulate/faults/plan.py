"""What a fault is: a change of how a run is simulated, and the finding that must name it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from traceanalyzer.errors import InputError
from traceanalyzer.job import Job
from traceanalyzer.simulate.costs import Costs
from traceanalyzer.simulate.rows import Collected
from traceanalyzer.simulate.walk import Changes
from traceanalyzer.simulate.walk_expert import Routing

Kind = Literal["verdict", "avoidable", "conflict", "time", "data"]
"""How a fault shows: in calls that differ from the expectation (verdict), as a known cost of the job's own settings
(avoidable), as two sources that say different things of the job (conflict), in times alone, or in what was recorded."""

Option: TypeAlias = int | float | str
Finish: TypeAlias = Callable[[Path], Sequence[Path]]
"""Changes a written run table in place; gives the files it added beside it."""


@dataclass(frozen=True)
class Plan:
    """What a simulation will use; faults change it one after another.

    job: what the run says of itself (captured). done: the job as the ranks carry it out, None: as it says. intended: what
    its owner meant, None if nothing else. finish: called with the written file, in this order. where: the rank, stage, role,
    op, ... that the finding must name.
    """

    job: Job
    done: Job | None = None
    intended: Job | None = None
    changes: Changes = field(default_factory=Changes)
    costs: Costs = field(default_factory=Costs)
    collected: Collected = field(default_factory=Collected)
    routing: Routing = "random"
    steps: int = 1
    ranks: tuple[int, ...] | None = None
    """Ranks whose times are kept; None: all."""
    allow_hang: bool = False
    finish: tuple[Finish, ...] = ()
    where: Mapping[str, Any] = field(default_factory=dict)

    @property
    def does(self) -> Job:
        """The job as the ranks carry it out."""
        return self.done or self.job

    def with_(self, **changes: Any) -> Plan:
        """The same with other fields."""
        return replace(self, **changes)

    def with_job(self, **fields: Any) -> Plan:
        """The same where the captured job, and what the ranks do, have other fields; as intended remains what it was."""
        return replace(
            self,
            job=replace(self.job, **fields),
            done=None if self.done is None else replace(self.done, **fields),
            intended=self.intended or self.job,
        )

    def with_done(self, **fields: Any) -> Plan:
        """The same where the ranks do what another job says, and the run does not say so."""
        return replace(self, done=replace(self.does, **fields))

    def with_changes(self, **changes: Any) -> Plan:
        """The same with other fields of Changes."""
        return replace(self, changes=replace(self.changes, **changes))

    def after(self, change: Callable[..., Any]) -> Plan:
        """The same with one more change of the programs (Walked -> Walked)."""
        return self.with_changes(after=(*self.changes.after, change))

    def with_costs(self, **changes: Any) -> Plan:
        """The same with other figures of Costs."""
        return replace(self, costs=self.costs.with_changes(**changes))

    def at(self, **where: Any) -> Plan:
        """The same with more of the place that the finding must name."""
        return replace(self, where={**self.where, **where})


@dataclass(frozen=True)
class Fault:
    """A fault that people have. name: as the command line spells it. sentence: what is wrong, for the list of faults.

    finding: code of the finding or cause that must come first. found_as: the same in words, for the table of faults.
    job: fields of a job, of at most 16 ranks, on which the fault makes sense. defaults: options of ``change`` with their
    values where none is given. change: what the fault does to a plan; it raises JobError where it makes no sense in the
    plan's job. rank: place of the finding among the findings, 1 the first.
    """

    name: str
    sentence: str
    kind: Kind
    finding: str
    found_as: str
    job: Mapping[str, Any]
    change: Callable[..., Plan]
    defaults: Mapping[str, Option] = field(default_factory=dict)
    rank: int = 1

    def apply(self, plan: Plan, **options: Option) -> Plan:
        """The plan with the fault. Raises InputError for an option that the fault does not have."""
        strange = sorted(set(options) - set(self.defaults))
        if strange:
            allowed = ", ".join(self.defaults) or "none"
            raise InputError(f"fault {self.name}: no such option: {', '.join(strange)}. There are: {allowed}.")
        return self.change(plan, **{**self.defaults, **options})

    def base(self) -> Job:
        """The job of ``job``."""
        return Job(**self.job)


@dataclass(frozen=True)
class Chosen:
    """A fault with the options it is put in with."""

    fault: Fault
    options: Mapping[str, Option] = field(default_factory=dict)

    def apply(self, plan: Plan) -> Plan:
        """The plan with the fault; its ``where`` is that of this fault alone."""
        return self.fault.apply(replace(plan, where={}), **self.options)

    def as_truth(self, plan: Plan) -> dict[str, Any]:
        """The fault as the truth file lists it; ``plan``: what apply gave."""
        return {
            "name": self.fault.name,
            "options": {**self.fault.defaults, **self.options},
            "kind": self.fault.kind,
            "finding": self.fault.finding,
            "where": dict(plan.where),
            "sentence": self.fault.sentence,
        }
