"""The training steps of each rank: where they begin and end, by the first evidence that is there.

In order: steps that a hook recorded with its calls; ``ProfilerStep#N`` ranges; our own marks ``ta:step N``; one recorded
optimizer step (then the recording is one step); nothing (then too, and the evidence says so).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pyarrow as pa

from traceanalyzer.run import Run

_MARK = re.compile(r"^(?P<kind>ProfilerStep#|ta:step )(?P<number>\d+)$")
_EVIDENCE = {"ProfilerStep#": "profiler_step", "ta:step ": "mark"}
_END = 2**63 - 1


@dataclass(frozen=True)
class Step:
    """One step of one rank.

    number: None where the recording does not number it. complete: False for the last step of a file that was cut, for
    one whose end was not recorded, and for one in which a hook lost calls.
    """

    rank: int | None
    number: int | None
    start_ns: int
    end_ns: int
    evidence: str
    complete: bool


def of_ranks(run: Run) -> list[Step]:
    """The steps of every rank, in order of time."""
    recorded = run.tuples(
        """SELECT rank, recorded_step, min(coalesce(t_issue_ns, start_ns)), max(coalesce(t_issue_ns, start_ns)) + 1
           FROM recorded_comm WHERE recorded_step IS NOT NULL GROUP BY ALL ORDER BY rank, 3"""
    )
    spans = run.tuples(
        """SELECT rank, recorded_step, start_ns, start_ns + dur_ns, completeness = 'full' FROM span
           WHERE source = 'hook' AND category = 'step' AND recorded_step IS NOT NULL AND start_ns IS NOT NULL
           ORDER BY rank, start_ns"""
    )
    marks = run.tuples(
        """SELECT rank, name, start_ns, start_ns + dur_ns FROM span
           WHERE category IS DISTINCT FROM 'gpu_user_annotation'
             AND (starts_with(name, 'ProfilerStep#') OR starts_with(name, 'ta:step '))
           UNION ALL
           SELECT rank, name, start_ns, start_ns + dur_ns FROM cpu_op
           WHERE starts_with(name, 'ProfilerStep#') OR starts_with(name, 'ta:step ')
           ORDER BY rank, start_ns"""
    )
    optimizers = dict(
        run.tuples(
            """SELECT rank, count(*) FROM (
                 SELECT rank, name FROM span WHERE starts_with(name, 'Optimizer.step#')
                   AND category IS DISTINCT FROM 'gpu_user_annotation'
                 UNION ALL SELECT rank, name FROM cpu_op WHERE starts_with(name, 'Optimizer.step#')) GROUP BY rank"""
        )
    )
    ranks = run.tuples(
        """SELECT rank, least(min(window_start_ns), min(host_start_ns)), bool_or(import_status = 'partial') FROM rank
           GROUP BY rank ORDER BY rank NULLS FIRST"""
    )
    steps: list[Step] = []
    for rank, start, cut in ranks:
        told = [
            Step(r, n, low, _END if high is None else high, "recorded", bool(w and high))
            for r, n, low, high, w in spans
            if r == rank
        ]
        if told:
            # a step without a span of its own: its end was not recorded
            named = {step.number for step in told}
            told += [
                Step(r, n, low, high, "recorded", False)
                for r, n, low, high in recorded
                if r == rank and n not in named and low
            ]
            steps += sorted(told, key=lambda step: step.start_ns)
            continue
        ranges = [(n, low, high, "recorded") for r, n, low, high in recorded if r == rank and low is not None]
        ranges = ranges or _marked([(name, low, high) for r, name, low, high in marks if r == rank])
        if not ranges and start is not None:
            evidence = "optimizer" if optimizers.get(rank) == 1 else "window"
            steps.append(Step(rank, None, start, _END, evidence, not cut))
        for i, (number, low, high, evidence) in enumerate(ranges):
            whole = high is not None and not (cut and i == len(ranges) - 1)
            steps.append(Step(rank, number, low, _END if high is None else high, evidence, whole))
    return steps


def _marked(marks: list[tuple[str, int, int | None]]) -> list[tuple[int, int, int | None, str]]:
    """Number, start, end and evidence of the marks that name a step and can hold a call; the profiler's own, if any."""
    named = [
        (found["kind"], int(found["number"]), low, high)
        for name, low, high in marks
        if (found := _MARK.match(name)) and high != low
    ]
    kind = next((k for k in _EVIDENCE if any(n[0] == k for n in named)), None)
    return [(number, low, high, _EVIDENCE[k]) for k, number, low, high in named if k == kind]


def as_table(steps: list[Step]) -> pa.Table:
    """The steps as the table step_range."""
    ordered = sorted(steps, key=lambda s: (-1 if s.rank is None else s.rank, s.start_ns))
    return pa.table(
        {
            "rank_key": pa.array([-1 if s.rank is None else s.rank for s in ordered], pa.int32()),
            "step": pa.array([0 if s.number is None else s.number for s in ordered], pa.int64()),
            "step_start_ns": pa.array([s.start_ns for s in ordered], pa.int64()),
            "step_end_ns": pa.array([s.end_ns for s in ordered], pa.int64()),
            "step_evidence": pa.array([s.evidence for s in ordered], pa.string()),
            "step_complete": pa.array([s.complete for s in ordered], pa.bool_()),
        }
    )
