"""Runs with known answers: a job's programs, run on costs, as rows of the run table, with the truth beside them.

``simulate`` walks the job the way its framework walks the model (walk), gives every instruction its times (engine) and
holds the result; ``Simulation.write`` leaves the run, ``Simulation.truth`` what is true of it. The same arguments give the
same bytes.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from traceanalyzer import schema
from traceanalyzer.job import Job
from traceanalyzer.simulate import engine, rows, truth
from traceanalyzer.simulate.costs import Costs
from traceanalyzer.simulate.engine import DeadlockError, SimulationError
from traceanalyzer.simulate.program import Begin, End, Program, Walked
from traceanalyzer.simulate.rows import META_SIMULATED, Collected
from traceanalyzer.simulate.timeline import Timeline

__all__ = [
    "START_NS",
    "Collected",
    "Costs",
    "DeadlockError",
    "Simulation",
    "SimulationError",
    "simulate",
    "simulate_programs",
]

START_NS = 1_767_225_600_000_000_000
"""Unix time at which simulated runs begin: 2026-01-01 00:00 UTC."""


@dataclass(frozen=True)
class Simulation:
    """A simulated run. job: what it says of itself (captured); intended: what its owner meant, None if nothing else.

    faults: what was put into it, each as the truth file lists it. finish: called one after another with the written file,
    which they change in place; they give the files they add, which end up in ``beside``.
    """

    timeline: Timeline
    job: Job | None
    seed: int
    intended: Job | None = None
    collected: Collected = field(default_factory=Collected)
    faults: tuple[Mapping[str, Any], ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    finish: tuple[Callable[[Path], Sequence[Path]], ...] = ()
    beside: list[Path] = field(default_factory=list, compare=False)
    """Files that the last ``write`` added beside the run."""

    def with_faults(
        self, faults: tuple[Mapping[str, Any], ...], finish: tuple[Callable[[Path], Sequence[Path]], ...]
    ) -> Simulation:
        """The same with faults that were put in."""
        return replace(self, faults=faults, finish=finish)

    def write(self, path: str | Path, *, progress: Callable[[int, int], None] | None = None) -> dict[str, int]:
        """Writes the run table; gives the rows of each kind, before ``finish``. ``progress``: see rows.write_rows."""
        said = {"seed": self.seed, "steps": self.timeline.steps, "faults": [f.get("name") for f in self.faults]}
        metadata = {META_SIMULATED: json.dumps(said), **self.metadata}
        if self.job is not None:
            metadata[schema.META_JOB_CAPTURED] = self.job.to_json()
        if self.intended is not None:
            metadata[schema.META_JOB_INTENDED] = self.intended.to_json()
        written = rows.write_rows(
            self.timeline, Path(path), collected=self.collected, metadata=metadata, progress=progress
        )
        self.beside[:] = [one for change in self.finish for one in change(Path(path))]
        return written

    def truth(self) -> dict[str, Any]:
        """What is true of the run: the JSON document traceanalyzer.truth/1."""
        return truth.document(self.timeline, seed=self.seed, faults=[dict(f) for f in self.faults])

    def write_truth(self, path: str | Path) -> None:
        """Writes the truth as JSON."""
        Path(path).write_text(truth.text(self.truth()), encoding="utf-8")


def simulate_programs(
    walked: Walked,
    *,
    steps: int = 1,
    costs: Costs | None = None,
    seed: int = 0,
    ranks: Sequence[int] | None = None,
    job: Job | None = None,
    intended: Job | None = None,
    collected: Collected | None = None,
    dtype: str = "bfloat16",
    first_step: int = 0,
    allow_hang: bool = False,
) -> Simulation:
    """Runs programs; ``simulate`` says what the arguments are. Every step gets its mark, if the programs have none."""
    marked = Walked([_marked(p) for p in walked.programs], walked.groups)
    timeline = engine.run(
        marked,
        Costs() if costs is None else costs,
        steps=steps,
        seed=seed,
        dtype=dtype,
        keep=ranks,
        start_ns=START_NS,
        first_step=first_step,
        allow_hang=allow_hang,
    )
    return Simulation(timeline, job, seed, intended, collected or Collected())


def simulate(
    job: Job,
    *,
    steps: int = 1,
    costs: Costs | None = None,
    seed: int = 0,
    ranks: Sequence[int] | None = None,
    faults: Collection[Any] = (),
    collected: Collected | None = None,
    first_step: int = 0,
    allow_hang: bool = False,
) -> Simulation:
    """Simulates a job for some steps.

    ``ranks``: those that are recorded, None for all; all are simulated. ``faults``: what simulate.faults makes of names and
    options. ``collected``: what was recorded of them. Raises JobError for a job that does not say enough, SimulationError
    where its ranks cannot go on (``allow_hang``: then the run ends there).
    """
    from traceanalyzer.simulate.walk import walk  # the walk of the whole model is loaded when it is asked for

    if faults:
        # the module of faults builds on this one and is found by its name
        found: Simulation = importlib.import_module("traceanalyzer.simulate.faults").simulate(
            job,
            faults,
            steps=steps,
            costs=costs,
            seed=seed,
            ranks=ranks,
            collected=collected,
            first_step=first_step,
        )
        return found
    return simulate_programs(
        walk(job),
        steps=steps,
        costs=costs,
        seed=seed,
        ranks=ranks,
        job=job,
        collected=collected,
        dtype=job.activation_dtype,
        first_step=first_step,
        allow_hang=allow_hang,
    )


def _marked(program: Program) -> Program:
    if any(isinstance(i, Begin) and i.name.startswith("ta:step ") for i in program.instructions):
        return program
    body = [Begin("ta:step 0"), *program.instructions, End()]
    return Program(program.ranks, body, program.metrics)
