"""The training steps of each rank: where they begin and end, by the first evidence that is there.

In order: steps that a hook recorded with its calls; ``ProfilerStep#N`` ranges; our own marks ``ta:step N``; optimizer steps,
by their host ranges or, where no host work was recorded, by their kernels (of one the recording is the step, several divide
it); without host work, long gaps between stretches of the same kernels; nothing (then the recording is one step, and the
evidence says so). Steps that optimizers or gaps divide are numbered from 0.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traceanalyzer.run import Run

_MARK = re.compile(r"^(?P<kind>ProfilerStep#|ta:step )(?P<number>\d+)$")
_EVIDENCE = {"ProfilerStep#": "profiler_step", "ta:step ": "mark"}
_END = 2**63 - 1


@dataclass(frozen=True)
class Step:
    """One step of one rank.

    number: None where the recording does not number it. complete: False for the last step of a file that was cut, for
    one whose end was not recorded, for one in which a hook lost calls, for the first and the last of those that optimizers
    divide, and for all that gaps divide.
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
    optimizers = _optimizers(run)
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
            steps += _divided(run, rank, start, cut, optimizers.get(rank, []))
        for i, (number, low, high, evidence) in enumerate(ranges):
            whole = high is not None and not (cut and i == len(ranges) - 1)
            steps.append(Step(rank, number, low, _END if high is None else high, evidence, whole))
    return steps


_OPTIMIZERS = """
WITH host AS (
  SELECT coalesce(rank, -1)::INTEGER AS rank_key, name, start_ns, start_ns + coalesce(dur_ns, 0) AS end_ns, sequence_nr
  FROM cpu_op WHERE start_ns IS NOT NULL
  UNION ALL
  SELECT coalesce(rank, -1)::INTEGER, name, start_ns, start_ns + coalesce(dur_ns, 0), NULL FROM span
  WHERE category IS DISTINCT FROM 'gpu_user_annotation' AND start_ns IS NOT NULL
),
optimizer AS (FROM host WHERE starts_with(name, 'Optimizer.step#')),
backward AS (FROM host WHERE starts_with(name, 'autograd::engine::evaluate_function')),
-- what may begin a step: work that autograd records, new data, gradients set to zero
opening AS (
  FROM host WHERE sequence_nr IS NOT NULL OR starts_with(name, 'Optimizer.zero_grad#')
    OR starts_with(name, 'enumerate(DataLoader)')
),
-- optimizers without backward work between them step together
together AS (
  SELECT o.rank_key, b.start_ns AS after_ns, min(o.start_ns) AS start_ns, max(o.end_ns) AS end_ns
  FROM optimizer o ASOF LEFT JOIN backward b ON b.rank_key = o.rank_key AND o.start_ns >= b.start_ns
  GROUP BY ALL
)
SELECT t.rank_key, t.start_ns, t.end_ns, f.start_ns AS opening_ns
FROM together t ASOF LEFT JOIN opening f ON f.rank_key = t.rank_key AND t.end_ns <= f.start_ns
ORDER BY t.rank_key, t.start_ns
"""


def _optimizers(run: Run) -> dict[int | None, list[tuple[int, int, int | None]]]:
    """Optimizer steps of each rank by their host ranges: start, end, and when what may begin the next step does."""
    found: dict[int | None, list[tuple[int, int, int | None]]] = {}
    if not run.value(
        """SELECT EXISTS (SELECT 1 FROM span WHERE starts_with(name, 'Optimizer.step#'))
           OR EXISTS (SELECT 1 FROM cpu_op WHERE starts_with(name, 'Optimizer.step#'))"""
    ):
        return found
    for rank_key, start, end, opening in run.tuples(_OPTIMIZERS):
        found.setdefault(None if rank_key < 0 else rank_key, []).append((start, end, opening))
    return found


def _divided(
    run: Run, rank: int | None, start: int, cut: bool, optimizers: Sequence[tuple[int, int, int | None]]
) -> list[Step]:
    """The steps of a rank without marks: those that several optimizer steps or gaps divide, else the recording as one."""
    evidence = "optimizer" if optimizers else "window"
    borders = [
        end if opening is None else min(opening, following[0]) for (_, end, opening), following in pairwise(optimizers)
    ]
    if not optimizers:
        evidence, borders = _by_kernels(run, rank)
    edges = [start, *borders, _END]
    if len(edges) == 2:
        return [Step(rank, None, start, _END, evidence, not cut)]
    last = len(edges) - 2
    return [
        Step(rank, i, low, high, evidence, evidence != "gap" and 0 < i < last)
        for i, (low, high) in enumerate(pairwise(edges))
    ]


_KERNELS = """
SELECT start_ns, start_ns + dur_ns AS end_ns, coalesce(name, '') AS name, coalesce(kernel_class, '') AS kernel_class
FROM kernel WHERE coalesce(rank, -1) = {} AND start_ns IS NOT NULL AND dur_ns IS NOT NULL ORDER BY start_ns, end_ns, name
"""
_PRODUCTS = ("gemm", "grouped_gemm", "attention")
_NO_COMPUTE = ("comm", "copy", "memset")
_MOST_GAPS = 256
_LONGER = 4
"""How many times longer than any other gap those between steps are, at least."""


def _by_kernels(run: Run, rank: int | None) -> tuple[str, list[int]]:
    """Evidence and borders of the steps of a rank of which device work alone was recorded.

    Several optimizer steps: they begin with the first computation after the optimizer's kernels, if these are the same each
    time; products lie between. Else gaps: _gaps.
    """
    key = -1 if rank is None else int(rank)
    if run.value(f"SELECT EXISTS (SELECT 1 FROM cpu_op WHERE coalesce(rank, -1) = {key})"):
        return "window", []
    table = run.arrow(_KERNELS.format(key))
    if table.num_rows == 0:
        return "window", []
    starts, ends = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
    names, classes = (table[n].combine_chunks().dictionary_encode() for n in ("name", "kernel_class"))
    codes = names.indices.to_numpy()
    words = classes.dictionary.to_pylist()

    def of(*which: str) -> npt.NDArray[np.bool_]:
        return np.isin(classes.indices.to_numpy(), [i for i, word in enumerate(words) if word in which])

    optimizer = np.flatnonzero(of("optimizer"))
    if len(optimizer):
        products = np.cumsum(of(*_PRODUCTS))[optimizer]
        first = np.flatnonzero(np.append(True, np.diff(products) > 0))
        groups = np.split(optimizer, first[1:])
        if len(groups) == 1:
            return "optimizer_kernel", []
        if len({tuple(sorted(Counter(codes[g].tolist()).items())) for g in groups}) == 1:
            compute = np.flatnonzero(~of("optimizer", *_NO_COMPUTE))
            after = [compute[np.searchsorted(compute, g[-1])] for g in groups[:-1]]
            return "optimizer_kernel", starts[after].tolist()
        return "window", []
    borders = _gaps(starts, ends, codes)
    return ("gap", borders) if borders else ("window", [])


def _gaps(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], codes: npt.NDArray[np.int32]) -> list[int]:
    """Where work begins anew after each of the longest gaps, if it is the same work each time; [] else.

    The gaps between steps are several times longer than any other, at least three, and the kernels between them are the
    same by name and number; what comes before the first and after the last may be a part of that.
    """
    idle = starts[1:] - np.maximum.accumulate(ends)[:-1]
    ordered = np.argsort(-idle, kind="stable")[: _MOST_GAPS + 1]
    lengths = idle[ordered]
    for count in range(3, min(len(lengths), _MOST_GAPS)):
        if lengths[count - 1] <= 0:
            break
        if lengths[count - 1] < _LONGER * max(int(lengths[count]), 1):
            continue
        cuts = np.sort(ordered[:count]) + 1
        kinds = int(codes.max()) + 1
        parts = [np.bincount(codes[low:high], minlength=kinds) for low, high in pairwise(cuts.tolist())]
        if all(np.array_equal(parts[0], part) for part in parts[1:]):
            return [int(t) for t in starts[cuts]]
    return []


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
