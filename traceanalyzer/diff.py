"""Expected against measured traffic: cells, each with a verdict, a cause and its bytes.

Every complete step of every rank is judged by itself: matching.py lays its calls beside the expectation. Cells that come
out alike on several ranks and steps are shown once, with those ranks and steps; calls and bytes are per rank and step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from traceanalyzer import attribute, axes, causes, intervals, schema, traffic
from traceanalyzer.attribute import places, roles
from traceanalyzer.display import Tabular
from traceanalyzer.errors import InputError, JobError
from traceanalyzer.expect import expected, versions
from traceanalyzer.expect.model import Expectation, ExpectedCall, NotModelled, RuleSet
from traceanalyzer.job import Job, conflicts
from traceanalyzer.matching import (
    DIFFERS,
    REPLAYED,
    Cell,
    Figures,
    Measured,
    Spread,
    StepMatch,
    times_of,
    total,
    with_patterns,
)
from traceanalyzer.run import Run

Steps = dict[tuple[int, int], list[Measured]]
"""Measured calls by (rank, step)."""


@dataclass(frozen=True)
class Unattributed:
    """Communication kernels that no call of known role explains, by name."""

    name: str
    kernels: int
    time_ns: int
    why: str


@dataclass(frozen=True)
class Coverage:
    """How much of the recorded communication the diff can speak about. Shares are 0 to 1; None: nothing to take it of.

    ``attributed``: share whose role is known, the lowest of bytes and, where bytes are unknown, kernels and their time (or
    calls, without kernels). ``judged``: share whose cells have a verdict other than unknown, of payload bytes and, where
    bytes are unknown, of calls. Calls on groups of one rank move nothing and count as attributed.
    """

    ranks_present: tuple[int, ...]
    ranks_declared: int | None
    steps: tuple[int, ...]
    step_evidence: tuple[str, ...]
    calls: int
    calls_outside_steps: int
    kernels: int
    kernels_attributed: int
    kernels_before_window: int
    bytes_known: int
    bytes_attributed: int
    calls_of_unknown_bytes: int
    kernel_time_ns: int
    kernel_time_attributed_ns: int
    role_evidence: tuple[tuple[str, int], ...]
    attributed: float | None
    judged: float | None
    unattributed: tuple[Unattributed, ...]
    import_status: str | None


@dataclass(frozen=True)
class JobConflict:
    """One thing about the job on which two sources disagree; ``captured`` is what the run says."""

    field: str
    intended: Any
    captured: Any
    sentence: str


@dataclass(frozen=True)
class ReleaseApart:
    """Releases of megatron-core that fit less well than the best, and the cells that tell them apart.

    The cells are those that differ or are unknown under these releases only.
    """

    releases: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Diff(Tabular):
    """The whole comparison. ``verdict``: match, differs, cannot be judged.

    ``version``: the releases of megatron-core that fit the run best, out of ``versions_tried``; ``versions_apart``: what
    tells the others apart. ``first_step``: the step that was judged as the first after start or evaluation, because the
    expectation of such a step fits it better; None: none.
    """

    source: str
    job: Job
    job_used: str
    rules: RuleSet
    version: str
    versions_tried: tuple[str, ...]
    cells: tuple[Cell, ...]
    coverage: Coverage
    job_conflicts: tuple[JobConflict, ...]
    not_in_window: tuple[str, ...]
    verdict: str
    min_coverage: float
    tolerance: float
    versions_apart: tuple[ReleaseApart, ...] = ()
    first_step: int | None = None

    @property
    def exit_code(self) -> int:
        """3 cannot be judged, else 1 if any cell differs, else 0."""
        return {"match": 0, "differs": 1, "cannot be judged": 3}[self.verdict]

    def count(self, verdict: str) -> int:
        """Cells of one verdict."""
        return sum(c.verdict == verdict for c in self.cells)


def diff(
    run: Run,
    job: Job | None = None,
    *,
    rules: RuleSet = "megatron",
    tolerance: float = 0.0,
    min_coverage: float = 0.99,
) -> Diff:
    """Compares a run with what its job should communicate.

    ``job`` is the intended job; without it the one in the run's metadata is used, intended before captured. ``tolerance``
    is relative, on calls and bytes. Raises InputError if the run holds no communication or no job is known, JobError if
    the job lacks a size that is needed.
    """
    captured = _job_of(run, schema.META_JOB_CAPTURED)
    intended = job or _job_of(run, schema.META_JOB_INTENDED)
    declared = intended or captured
    if declared is None:
        raise InputError(
            f"{run.source}: no job is known for this run, so nothing can be expected of it. Give --job FILE (TOML, YAML, a "
            "Megatron log or command line)."
        )
    _refuse_ranks_twice(run)
    used, world, problems = _in_the_runs_world(run, declared)
    found = attribute.attach(run, used)
    if captured is not None and intended is not None:
        problems += [_captured_conflict(c.field, c.intended, c.captured) for c in conflicts(captured, intended)]
    problems += [JobConflict(_field_of(c), c.declared, c.observed, c.sentence) for c in found.conflicts]
    measured, outside = _measure(run, used.layout)
    _add_silent_steps(measured, found.steps)
    if not measured and not run.value("SELECT count(*) FROM rank WHERE rank IS NOT NULL"):
        raise InputError(
            f"{run.source}: no rank is known in it, so nothing can be expected of it. Import the trace with --rank N."
        )
    apart = frozenset(c.role for c in found.conflicts if isinstance(c, roles.GroupConflict))
    judged = _judge(run, used, captured if intended is not None else None, measured, rules, tolerance, apart)
    coverage = _coverage(run, judged.measured, outside, found, judged.cells, world)
    return Diff(
        source=run.source,
        job=used,
        job_used="intended" if intended is not None else "captured",
        rules=rules,
        version=judged.version,
        versions_tried=judged.versions_tried,
        cells=judged.cells,
        coverage=coverage,
        job_conflicts=tuple(problems),
        not_in_window=judged.left_out,
        verdict=_verdict(judged.cells, coverage, min_coverage) if measured else "cannot be judged",
        min_coverage=min_coverage,
        tolerance=tolerance,
        versions_apart=judged.versions_apart,
        first_step=judged.first_step,
    )


class _Judged(NamedTuple):
    """The cells of a run, and what they rest on; ``measured`` with the roles that patterns settled."""

    cells: tuple[Cell, ...]
    measured: Steps
    version: str
    versions_tried: tuple[str, ...]
    left_out: tuple[str, ...]
    versions_apart: tuple[ReleaseApart, ...] = ()
    first_step: int | None = None


def _judge(
    run: Run,
    job: Job,
    captured: Job | None,
    measured: Steps,
    rules: RuleSet,
    tolerance: float,
    apart: frozenset[str] = frozenset(),
) -> _Judged:
    """Every complete step against the releases that come into question; without such a step, none could be tried.

    apart: roles whose recorded groups are not those of the job's layout.
    """
    if not measured:
        return _Judged((), measured, "none could be tried", (), ())
    present = sorted({rank for rank, _ in measured})
    _check_ranks(job, present)
    seen = places.phases_seen(run)
    recorded = _in_window(job, seen)
    tried = _expect(recorded, present, rules)
    megatron = _megatron_rows(recorded, present, rules)
    compare = _Comparison(measured, megatron, seen, job.layout, tolerance, apart)
    outcomes = [(words, compare.release(wanted)) for words, wanted in tried]
    # the newest of those that leave the least open
    best = min(reversed(outcomes), key=lambda outcome: outcome[1].open)[1]
    _settle(run, best.measured)
    facts = causes.Facts(job, captured, rules, megatron, _kernels_outside(run))
    return _Judged(
        cells=tuple(_explain(_order(_with_kernels(run, best.cells)), facts)),
        measured=best.measured,
        version=", ".join(words for words, outcome in outcomes if outcome.open == best.open),
        versions_tried=tuple(words for words, _ in tried),
        left_out=best.left_out,
        versions_apart=tuple(
            ReleaseApart(words, _apart(outcome.cells, best.cells))
            for words, outcome in outcomes
            if outcome.open != best.open
        ),
        first_step=best.first_step,
    )


def _apart(cells: Sequence[Cell], best: Sequence[Cell]) -> tuple[Cell, ...]:
    """The cells that are no match, without those that are none under the best releases either."""

    def bare(cell: Cell) -> Cell:
        return replace(cell, time_ns=None, exposed_ns=None)

    known = {bare(cell) for cell in best}
    return tuple(_order([cell for cell in cells if cell.verdict != "match" and bare(cell) not in known]))


# -- the job and the run's world -------------------------------------------------------------------------------------


def _job_of(run: Run, key: str) -> Job | None:
    text = run.job_text(key)
    return None if text is None else Job.from_json(text)


def _in_the_runs_world(run: Run, job: Job) -> tuple[Job, int | None, list[JobConflict]]:
    """The job with the run's world size where it states none, the world size, and where the two contradict."""
    recorded = run.world_size
    if recorded is None or job.world_size in (None, recorded):
        return attribute.in_world_of(run, job), recorded or job.world_size, []
    sentence = f"world_size: the job says {job.world_size}, the run recorded {recorded} (the diff uses the job's)"
    return job, job.world_size, [JobConflict("world_size", job.world_size, recorded, sentence)]


def _field_of(
    found: attribute.roles.Conflict | attribute.inference.LayoutConflict | attribute.order.ScheduleConflict,
) -> str:
    """What of the job a conflict with the observed groups or messages is about."""
    if isinstance(found, attribute.inference.LayoutConflict):
        return "layout"
    if isinstance(found, attribute.order.ScheduleConflict):
        return "schedule"
    return f"groups of role {found.role}"


def _captured_conflict(name: str, intended: Any, captured: Any) -> JobConflict:
    return JobConflict(
        name, intended, captured, f"{name}: intended {intended}, captured {captured} (the diff uses intended)"
    )


def _refuse_ranks_twice(run: Run) -> None:
    """Two recordings of one rank by one kind of source would count its traffic twice."""
    twice = run.tuples(
        """SELECT rank, list_sort(list(coalesce(source_file, 'an unnamed file'))) FROM rank WHERE rank IS NOT NULL
           GROUP BY rank, source HAVING count(*) > 1 ORDER BY rank"""
    )
    if twice:
        rank, files = twice[0]
        more = f" (and {len(twice) - 1} other ranks)" if len(twice) > 1 else ""
        raise InputError(
            f"{run.source}: rank {rank} was recorded more than once, in {' and '.join(map(str, files))}{more}, so its "
            "traffic would count twice. Open the files of one recording only."
        )


def _check_ranks(job: Job, present: Sequence[int]) -> None:
    if job.world_size is not None and present[-1] >= job.world_size:
        raise JobError(
            f"world_size={job.world_size}: the run holds rank {present[-1]}. Correct the job file's world_size or degrees."
        )


# -- what was measured -----------------------------------------------------------------------------------------------


def _add_silent_steps(measured: Steps, found: Iterable[attribute.steps.Step]) -> None:
    """Complete steps of recorded ranks without any call: everything expected in them is missing."""
    for step in found:
        if step.rank is not None and step.complete:
            measured.setdefault((step.rank, step.number or 0), [])


def _call_times(run: Run) -> None:
    """Table call_time: time and exposed time of the kernels of each (rank, coalesce_id), in ns."""
    parts: list[pa.Table] = []
    for (rank,) in run.tuples("SELECT DISTINCT rank FROM kernel ORDER BY rank"):
        table = run.arrow(
            """SELECT start_ns, dur_ns, coalesce_id,
                      coalesce(kernel_class NOT IN ('comm', 'copy', 'memset'), true) AS computes
               FROM kernel WHERE rank IS NOT DISTINCT FROM ? AND start_ns IS NOT NULL AND dur_ns IS NOT NULL""",
            [rank],
        )
        start = table.column("start_ns").to_numpy()
        end = start + table.column("dur_ns").to_numpy()
        compute = table.column("computes").to_numpy()
        tied = table.column("coalesce_id").is_valid().to_numpy()
        hidden = intervals.overlap_each(start[tied], end[tied], *intervals.union(start[compute], end[compute]))
        ids, index = np.unique(table.column("coalesce_id").filter(pa.array(tied)).to_numpy(), return_inverse=True)
        times, exposed = np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64)
        length = (end - start)[tied]
        np.add.at(times, index, length)
        np.add.at(exposed, index, length - hidden)
        columns = [
            pa.array([rank] * len(ids), pa.int32()),
            pa.array(ids, pa.int64()),
            pa.array(times),
            pa.array(exposed),
        ]
        parts.append(pa.table(columns, schema=_CALL_TIME))
    run.table("call_time", pa.concat_tables([_CALL_TIME.empty_table(), *parts]))


_CALL_TIME = pa.schema(
    [("rank", pa.int32()), ("coalesce_id", pa.int64()), ("time_ns", pa.int64()), ("exposed_ns", pa.int64())]
)

_MEASURE = """
WITH first_call AS (
  SELECT rank, coalesce_id, min(call_id) AS call_id FROM recorded_comm
  WHERE rank IS NOT NULL AND coalesce_id IS NOT NULL GROUP BY ALL
),
numbered AS (
  -- a kernel that several calls share counts its time once: on the first of them
  SELECT c.*, t.time_ns AS kernel_ns, t.exposed_ns AS kernel_exposed_ns,
         c.coalesce_id IS NULL OR c.call_id = l.call_id AS first_of_its_kernels
  FROM comm c LEFT JOIN call_time t ON t.rank = c.rank AND t.coalesce_id = c.coalesce_id
  LEFT JOIN first_call l ON l.rank = c.rank AND l.coalesce_id = c.coalesce_id
  WHERE c.rank IS NOT NULL
)
SELECT rank, step, step_complete, role, role_evidence, op, phase, dtype, in_elems, out_elems, group_size, payload_bytes,
       component,
       CASE WHEN op = 'all_to_all' THEN in_splits END AS in_splits,
       CASE WHEN op = 'all_to_all' THEN out_splits END AS out_splits,
       CASE WHEN op = 'all_to_all' THEN group_rank END AS group_rank,
       CASE WHEN op = 'all_to_all' THEN splits_known END AS splits_known,
       CASE WHEN op IN ('send', 'recv') THEN peer END AS peer,
       count(*) AS calls,
       -- with calls outside of every window of the profiler the sums are not those of all calls
       CASE WHEN count(*) = count(time_source) THEN
         sum(CASE WHEN NOT first_of_its_kernels THEN 0 WHEN time_source = 'kernel' THEN kernel_ns ELSE dur_ns END)::BIGINT
       END AS time_ns,
       CASE WHEN count(*) = count(time_source) THEN
         sum(CASE WHEN first_of_its_kernels OR kernel_exposed_ns IS NULL THEN kernel_exposed_ns ELSE 0 END)::BIGINT
       END AS exposed_ns
FROM numbered GROUP BY ALL ORDER BY ALL
"""


def _measure(run: Run, layout: axes.Layout) -> tuple[Steps, int]:
    """Measured calls of each complete (rank, step), and how many calls lie outside such steps."""
    _call_times(run)
    found: Steps = defaultdict(list)
    outside = 0
    for row in run.rows(_MEASURE):
        if row["step"] is None or not row["step_complete"]:
            outside += row["calls"]
        else:
            found[row["rank"], row["step"]].append(_measured(row, layout))
    return found, outside


def _measured(row: Mapping[str, Any], layout: axes.Layout) -> Measured:
    off_rank = None
    if not (row["op"] == "all_to_all" and row["splits_known"] is False):
        off_rank = traffic.off_rank_bytes(
            row["op"],
            row["payload_bytes"],
            row["group_size"],
            dtype=row["dtype"],
            in_elems=row["in_elems"],
            out_elems=row["out_elems"],
            in_splits=row["in_splits"],
            out_splits=row["out_splits"],
            group_rank=row["group_rank"],
        )
    return Measured(
        role=row["role"],
        role_evidence=row["role_evidence"],
        op=row["op"],
        phase=row["phase"],
        dtype=row["dtype"],
        in_elems=row["in_elems"],
        out_elems=row["out_elems"],
        group_size=row["group_size"],
        payload=row["payload_bytes"],
        component=row["component"],
        calls=row["calls"],
        off_rank=off_rank if off_rank is None or row["calls"] == 1 else off_rank * row["calls"],
        time_ns=row["time_ns"],
        exposed_ns=row["exposed_ns"],
        width=traffic.row_elems(row["in_elems"], row["in_splits"], row["out_elems"], row["out_splits"])
        if row["op"] == "all_to_all"
        else None,
        in_splits=None if row["in_splits"] is None else tuple(row["in_splits"]),
        toward=None if row["peer"] is None else _toward(layout, row["rank"], row["peer"]),
    )


def _toward(layout: axes.Layout, rank: int, peer: int) -> str | None:
    """Which neighbour of a rank its peer is, in the ring of stages or of context-parallel ranks.

    None where it is both or neither.
    """
    if not 0 <= rank < layout.world_size:
        return None
    for role in ("pp", "cp"):
        ring = layout.group_of(role, rank) or ()
        if peer in ring and peer != rank:
            ahead = (ring.index(peer) - ring.index(rank)) % len(ring)
            sides = {1: "next", len(ring) - 1: "previous"}
            return None if len(ring) == 2 else sides.get(ahead)
    return None


def _settle(run: Run, measured: Steps) -> None:
    """Shows the roles that patterns settled in the view comm."""
    roles.settle(
        run,
        {
            (rank, step, m.look): m.role
            for (rank, step), rows in measured.items()
            for m in rows
            if m.role is not None and m.role_evidence == "pattern"  # not what several roles share
        },
    )


# -- what is expected ------------------------------------------------------------------------------------------------


def _in_window(job: Job, seen: Mapping[str, bool | None]) -> Job:
    """The job as far as the recording goes: without a backward pass and what follows it, where it holds neither."""
    if seen["backward"] is False and not seen["optimizer"] and not job.forward_only:
        return replace(job, forward_only=True)
    return job


class _Expected(NamedTuple):
    """What each rank is expected to send in a step, and in the first step after start where that is something else."""

    later: dict[int, Expectation]
    first: dict[int, Expectation]


def _expect(job: Job, ranks: Sequence[int], rules: RuleSet) -> list[tuple[str, _Expected]]:
    """For each release that comes into question, oldest first: its words, and every rank's expectation.

    Releases that make all ranks together send the same, in the first step too, count as one.
    """
    if job.megatron_core_version is not None:
        release = versions.parse(job.megatron_core_version)
        return [(versions.label(release), _of_release(job, ranks, rules, None))]
    groups: list[tuple[_Expected, list[versions.Release]]] = []
    known: dict[int, list[Expectation]] = defaultdict(list)
    for release in versions.KNOWN:
        found = _of_release(job, ranks, rules, f"{release[0]}.{release[1]}")
        one = _Expected(_as_known(found.later, known), _as_known(found.first, known))
        same = next((g for g in groups if _same(g[0].later, one.later) and _same(g[0].first, one.first)), None)
        if same is None:
            groups.append((one, [release]))
        else:
            same[1].append(release)
    return [(versions.span(releases), one) for one, releases in groups]


def _of_release(job: Job, ranks: Sequence[int], rules: RuleSet, version: str | None) -> _Expected:
    later = {r: expected(job, r, rules=rules, version=version) for r in ranks}
    first = {r: expected(job, r, rules=rules, version=version, first_step=True) for r in ranks}
    return _Expected(later, {} if _all_alike(later, first) else first)


def _as_known(found: Mapping[int, Expectation], known: dict[int, list[Expectation]]) -> dict[int, Expectation]:
    """Every rank's expectation, as an earlier one that asks for the same calls if there is one in ``known``."""
    settled: dict[int, Expectation] = {}
    out: dict[int, Expectation] = {}
    for rank, expectation in found.items():
        key = id(expectation.calls)  # all ranks of a place share theirs
        if key not in settled:
            settled[key] = next((e for e in known[rank] if _alike(e, expectation)), expectation)
        earlier = known[rank]
        if not any(e.calls is settled[key].calls for e in earlier):
            earlier.append(settled[key])
        out[rank] = settled[key]
    return out


def _same(one: Mapping[int, Expectation], other: Mapping[int, Expectation]) -> bool:
    """Whether expectations that _as_known has gone through ask all ranks for the same."""
    return one.keys() == other.keys() and all(one[r].calls is other[r].calls for r in one)


def _all_alike(one: Mapping[int, Expectation], other: Mapping[int, Expectation]) -> bool:
    """Whether the expectations of all ranks ask for the same calls; ranks of a place share theirs."""
    pairs = {(id(one[r].calls), id(other[r].calls)): r for r in one}
    return all(_alike(one[r], other[r]) for r in pairs.values())


def _alike(one: Expectation, other: Expectation) -> bool:
    """Whether two expectations ask for the same calls."""

    def calls(e: Expectation) -> Counter[tuple[Any, ...]]:
        found: Counter[tuple[Any, ...]] = Counter()
        for c in e.calls:
            key = (c.role, c.op, c.phase, c.component, c.dtype, c.in_elems, c.out_elems, c.varies, c.transport, c.peer)
            found[key] += c.calls
        return found

    return calls(one) == calls(other) and one.not_modelled == other.not_modelled


def _megatron_rows(job: Job, ranks: Sequence[int], rules: RuleSet) -> dict[int, tuple[ExpectedCall, ...]]:
    """What the megatron rules expect of each rank where others are in force: what roles and causes are looked up in."""
    if rules == "megatron":
        return {}
    return {rank: expected(job, rank, rules="megatron").calls for rank in ranks}


# -- step by step ----------------------------------------------------------------------------------------------------


class _Outcome(NamedTuple):
    """All steps against the expectation of one release; ``measured`` with the roles that patterns settled."""

    cells: list[Cell]
    measured: Steps
    left_out: tuple[str, ...]
    first_step: int | None = None

    @property
    def open(self) -> int:
        """How many cells are no match, over all ranks and steps."""
        return sum(c.places for c in self.cells if c.verdict != "match")


class _Matched(NamedTuple):
    """One rank's step: its rows with settled roles, its cells, and the expected phases that the window lacks."""

    rows: list[Measured]
    cells: list[tuple[Cell, Figures]]
    left_out: list[str]


class _Wanted(NamedTuple):
    """The calls of an expectation (``whole``) that a recording can hold, also by role, each with the number of its kind."""

    whole: Sequence[ExpectedCall]
    calls: list[ExpectedCall]
    left_out: list[str]
    of_role: dict[str | None, tuple[int, tuple[ExpectedCall, ...]]]


class _Part(NamedTuple):
    """The rows of one role in a step; equal numbers: alike but for the times. -1: no rows."""

    role: str | None
    rows: list[Measured]
    number: int


class _Comparison:
    """All measured steps against one expectation after the other; what is the same in two of them is matched once."""

    def __init__(
        self,
        measured: Steps,
        megatron: Mapping[int, Sequence[ExpectedCall]],
        seen: Mapping[str, bool | None],
        layout: axes.Layout,
        tolerance: float,
        apart: frozenset[str] = frozenset(),
    ) -> None:
        self._measured = dict(sorted(measured.items()))
        self._apart = apart
        self._megatron = megatron
        self._seen = seen
        self._layout = layout
        self._tolerance = tolerance
        self._done: dict[tuple[int, int, int], _Matched] = {}
        self._wanted_of: dict[tuple[int, frozenset[Any] | None], _Wanted] = {}
        self._number: dict[Any, int] = {}
        self._parts_of: dict[tuple[int, int], tuple[list[Measured], list[_Part]]] = {}
        self._part_done: dict[tuple[Any, ...], list[tuple[Cell, Figures, tuple[int, ...]]]] = {}

    def release(self, wanted: _Expected) -> _Outcome:
        """All steps; the earliest also as a first step after start or evaluation, which it is where that fits better."""
        usual = self._against(wanted.later, {})
        if not wanted.first:
            return usual
        earliest = min(step for _, step in self._measured)
        started = self._against(wanted.later, {earliest: wanted.first})
        return started._replace(first_step=earliest) if started.open < usual.open else usual

    def _against(
        self, expected_of: Mapping[int, Expectation], in_step: Mapping[int, Mapping[int, Expectation]]
    ) -> _Outcome:
        """What each rank is expected to send: ``in_step`` for the steps it names, else ``expected_of``."""
        found: dict[Cell, dict[tuple[int, int], Figures]] = defaultdict(dict)
        same: dict[
            int, dict[tuple[int, int], Figures]
        ] = {}  # by the cell's identity: steps that are alike share theirs
        settled: Steps = {}
        left_out = [phase for phase, sign in self._seen.items() if sign is False and self._seen["backward"] is False]
        for rank, step in self._measured:
            expectation = in_step.get(step, expected_of)[rank]
            matched = self._matched(rank, step, expectation)
            settled[rank, step] = matched.rows
            left_out += matched.left_out
            for cell, figures in matched.cells:
                where = same.get(id(cell))
                if where is None:
                    where = same[id(cell)] = found[cell]
                where[rank, step] = figures
        cells_by_place = [
            one for cell, where in _conserved(found, self._layout, self._apart) for one in _by_place(cell, where)
        ]
        return _Outcome(cells_by_place, settled, tuple(dict.fromkeys(left_out)))

    def _matched(self, rank: int, step: int, expectation: Expectation) -> _Matched:
        """One rank's step, role by role; what another rank's step or another release has done already is taken over."""
        key = rank, step, id(expectation.calls)
        if key not in self._done:
            rows = self._measured[rank, step]
            wanted = self._wanted(expectation.calls, rows)
            if (rank, step) in self._parts_of:
                named, parts = self._parts_of[rank, step]
            else:
                # which group a call is on does not depend on the rules: patterns are those of the real code
                real = self._wanted(self._megatron[rank], rows) if rank in self._megatron else wanted
                named = [self._with_off_rank(m, rank) for m in with_patterns(rows, real.calls)]
                parts = self._parts(named)
                if all(m.role is not None for m in rows):  # then no expectation settles a role
                    self._parts_of[rank, step] = named, parts
            cells = self._match(parts, wanted, expectation.not_modelled, rank)
            self._done[key] = _Matched(named, cells, wanted.left_out)
        return self._done[key]

    def _match(
        self, parts: list[_Part], wanted: _Wanted, gaps: tuple[NotModelled, ...], rank: int
    ) -> list[tuple[Cell, Figures]]:
        """The cells of one rank's step, of each role by itself."""
        stage = self._layout.stage(rank)
        measured = {part.role: part for part in parts}
        nameless = measured[None] if None in measured else _Part(None, [], -1)
        cells: list[tuple[Cell, Figures]] = []
        for role in dict.fromkeys([*wanted.of_role, *measured]):
            number, calls = wanted.of_role.get(role, (-1, ()))
            part = measured.get(role) or _Part(role, [], -1)
            key = role, stage, part.number, number, nameless.number, self._numbered(gaps)
            done = self._part_done.get(key)
            if done is None:
                others = () if role is None else nameless.rows
                match = StepMatch(calls, part.rows, gaps, self._layout, self._tolerance, others)
                place = {id(row): i for i, row in enumerate(part.rows)}
                done = self._part_done[key] = [
                    (cell, figures, tuple(place[id(row)] for row in rows)) for cell, figures, rows in match.cells(stage)
                ]
                cells += [(cell, figures) for cell, figures, _ in done]
            else:
                cells += [(cell, _of_rows(figures, [part.rows[i] for i in rows])) for cell, figures, rows in done]
        return cells

    def _numbered(self, what: Hashable) -> int:
        """A number for everything that equals this: quick to compare."""
        return self._number.setdefault(what, len(self._number))

    def _parts(self, rows: Sequence[Measured]) -> list[_Part]:
        """The rows of a step by role. Steps with a role's rows alike, but for the times, have one number for it.

        The sizes of routed exchanges are no two steps' alike: it is not tried.
        """
        by_role: dict[str | None, list[Measured]] = defaultdict(list)
        for m in rows:
            by_role[m.role].append(m)
        return [
            _Part(
                role,
                part,
                self._numbered(object())
                if any(m.width is not None for m in part)
                else self._numbered(tuple(self._numbered(m.bare) for m in part)),
            )
            for role, part in by_role.items()
        ]

    def _wanted(self, calls: Sequence[ExpectedCall], rows: Sequence[Measured]) -> _Wanted:
        """What of an expectation the recording can hold, by role."""
        looks = _looks(rows) if False in self._seen.values() else None
        key = id(calls), looks
        if key not in self._wanted_of:
            kept, left_out = _of_phases_seen(calls, looks or frozenset(), self._seen)
            by_role: dict[str | None, list[ExpectedCall]] = defaultdict(list)
            for call in kept:
                by_role[call.role].append(call)
            of_role = {role: (self._numbered(tuple(part)), tuple(part)) for role, part in by_role.items()}
            self._wanted_of[key] = _Wanted(calls, kept, left_out, of_role)
        return self._wanted_of[key]

    def _with_off_rank(self, m: Measured, rank: int) -> Measured:
        """An exchange whose group the recording does not name, with its off-rank bytes once its role is known.

        Which of its rows stay is then told by the rank's position in that group of the layout.
        """
        if m.off_rank is not None or not m.in_splits or m.role not in axes.ROLES or m.role == "hybrid_cp":
            return m
        group = self._layout.group_of(m.role, rank) or ()
        if len(group) != len(m.in_splits):
            return m
        off_rank = traffic.off_rank_bytes(
            m.op,
            m.payload,
            len(group),
            dtype=m.dtype,
            in_elems=m.in_elems,
            out_elems=m.out_elems,
            in_splits=m.in_splits,
            group_rank=group.index(rank),
        )
        return replace(m, off_rank=None if off_rank is None else off_rank * m.calls)


def _conserved(
    found: Mapping[Cell, dict[tuple[int, int], Figures]], layout: axes.Layout, apart: frozenset[str]
) -> list[tuple[Cell, dict[tuple[int, int], Figures]]]:
    """The cells; those of varying size split by whether the ranks of a group received what they sent in that step.

    That cannot be said of the roles ``apart``, whose groups are others than the layout's.
    """
    known: dict[tuple[Any, ...], Figures] = {}
    for cell, where in found.items():
        if cell.varies:
            known.update({(_exchange(cell), rank, step): figures for (rank, step), figures in where.items()})
    out: list[tuple[Cell, dict[tuple[int, int], Figures]]] = []
    for cell, where in found.items():
        if not cell.varies or cell.role in apart:
            out.append((cell, where))
            continue
        parts: dict[bool | None, dict[tuple[int, int], Figures]] = defaultdict(dict)
        for (rank, step), figures in where.items():
            group = layout.group_of(str(cell.role), rank) or (rank,)
            members = [known.get((_exchange(cell), other, step)) for other in group]
            parts[_balance(str(cell.op), members) if cell.calls_measured else None][rank, step] = figures
        for conserved, part in parts.items():
            verdict = "excess" if conserved is False and cell.verdict == "match" else cell.verdict
            cause = causes.NOT_CONSERVED if verdict != cell.verdict else cell.cause
            out.append((replace(cell, conserved=conserved, verdict=verdict, cause=cause), part))
    return out


def _exchange(cell: Cell) -> tuple[Any, ...]:
    """What a cell of varying size is on every rank of its group."""
    return cell.role, cell.op, cell.phase, cell.stage, cell.dtype, cell.components


def _balance(op: str, members: Sequence[Figures | None]) -> bool | None:
    """Whether a group's ranks received in sum what they sent; None where a rank or a size was not recorded."""
    sides = [(m.sent, m.received) for m in members if m is not None]
    sent = [a for a, _ in sides if a is not None]
    received = [b for _, b in sides if b is not None]
    if not len(members) == len(sent) == len(received):
        return None
    # every rank receives what all send, or sends what all receive
    copies = {"all_gather": (len(members), 1), "reduce_scatter": (1, len(members))}.get(op, (1, 1))
    return sum(sent) * copies[0] == sum(received) * copies[1]


def _of_rows(figures: Figures, rows: Sequence[Measured]) -> Figures:
    """The figures of rows that are alike but for their times."""
    time_ns, exposed_ns = times_of(rows)
    return figures._replace(time_ns=time_ns, exposed_ns=exposed_ns)


def _looks(rows: Sequence[Measured]) -> frozenset[tuple[str | None, int | None]]:
    """Operations and sizes of a step's calls that may be an optimizer's."""
    return frozenset((m.op, m.in_elems) for m in rows if m.phase not in ("forward", "backward", "recompute"))


def _of_phases_seen(
    calls: Iterable[ExpectedCall], looks: frozenset[Any], seen: Mapping[str, bool | None]
) -> tuple[list[ExpectedCall], list[str]]:
    """Expected calls of phases that the recording holds; the phases of the others.

    An optimizer need not leave a trace of its own, so its calls are kept if the step has calls that look like them.
    """
    kept: list[ExpectedCall] = []
    left_out: list[str] = []
    for call in calls:
        sign = seen.get("backward" if call.phase == "recompute" else call.phase)
        if sign is not False or (call.phase == "optimizer" and (call.op, call.in_elems) in looks):
            kept.append(call)
        else:
            left_out.append(call.phase)
    return kept, left_out


def _by_place(cell: Cell, where: Mapping[tuple[int, int], Figures]) -> list[Cell]:
    """The cell for the ranks and steps it was found in: one for each set of steps, so that both lists hold together."""
    steps_of: dict[int, list[int]] = defaultdict(list)
    for rank, step in sorted(where):
        steps_of[rank].append(step)
    ranks_of: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, steps in steps_of.items():
        ranks_of[tuple(steps)].append(rank)
    return [
        _with_figures(
            replace(cell, ranks=tuple(ranks), steps=steps, time_ns=None, exposed_ns=None),
            [where[r, s] for r in ranks for s in steps],
        )
        for steps, ranks in ranks_of.items()
    ]


def _with_figures(cell: Cell, figures: Sequence[Figures]) -> Cell:
    """The cell with the means over its ranks and steps and, where sizes vary, with their spread."""
    cell = replace(cell, time_ns=_mean(f.time_ns for f in figures), exposed_ns=_mean(f.exposed_ns for f in figures))
    if not cell.varies:
        return cell
    off_rank = [f.off_rank for f in figures if f.off_rank is not None]
    rows = [f.rows for f in figures if f.rows is not None]
    balanced = figures[0].balanced
    return replace(
        cell,
        payload_bytes_measured=_mean(f.payload for f in figures),
        off_rank_bytes_measured=total(off_rank) / len(off_rank) if len(off_rank) == len(figures) else None,
        spread=Spread(balanced, min(rows), max(rows))
        if balanced is not None and rows and cell.calls_measured
        else None,
    )


def _mean(values: Iterable[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return round(Fraction(sum(known), len(known))) if known else None


# -- traffic outside torch.distributed ---------------------------------------------------------------------------------

_KERNELS_OF = {"userbuffers": "userbuffers", "deepep": "deep_ep::", "hybridep": "hybrid_ep::"}
"""Transport -> what the names of its kernels hold."""


def _kernels_outside(run: Run) -> dict[str, int]:
    """Transport -> communication kernels that no recorded call explains; of CUDA graphs those that name their graph."""
    rows = run.tuples(
        """SELECT lower(name), graph_id IS NOT NULL, count(*) FROM kernel
           WHERE kernel_class = 'comm' AND coalesce_id IS NULL GROUP BY ALL"""
    )
    found = {t: sum(n for name, _, n in rows if word in name) for t, word in _KERNELS_OF.items()}
    found[REPLAYED] = sum(n for _, in_graph, n in rows if in_graph)
    return {transport: number for transport, number in found.items() if number}


def _with_kernels(run: Run, cells: list[Cell]) -> list[Cell]:
    """The cells; those of a transport outside torch.distributed say how many of its kernels the run holds."""
    transports = {c.transport for c in cells if c.transport}
    if not transports:
        return cells
    names = run.tuples("SELECT name, count(*) FROM kernel WHERE kernel_class = 'comm' GROUP BY ALL")
    words: dict[str, str] = {}
    for transport in transports:
        number = sum(n for name, n in names if _KERNELS_OF.get(transport, transport) in name.lower())
        if number:
            words[transport] = f" (the run holds {number:,} kernel{'' if number == 1 else 's'} of it)"
    return [replace(c, reason=f"{c.reason}{words[c.transport]}") if c.transport in words else c for c in cells]


# -- order and causes ------------------------------------------------------------------------------------------------

_WORST_FIRST = {"excess": 0, "missing": 0, "unexpected": 0, "unknown": 1, "match": 2}
_PHASE_ORDER = {"forward": 0, "recompute": 1, "backward": 2, "other": 3, "optimizer": 4}
_ROLE_ORDER = {role: i for i, role in enumerate(axes.ROLES)}


def _order(cells: list[Cell]) -> list[Cell]:
    """Worst verdict first; within a verdict by role, phase, stage, and bytes, the largest first."""

    def key(cell: Cell) -> tuple[Any, ...]:
        size = max(cell.payload_bytes_expected or 0, cell.payload_bytes_measured or 0)
        return (
            _WORST_FIRST[cell.verdict],
            _ROLE_ORDER.get(cell.role or "", len(_ROLE_ORDER)),
            _PHASE_ORDER.get(cell.phase or "", len(_PHASE_ORDER)),
            cell.stage or 0,
            -size,
            cell.op or "",
            cell.components,
            cell.ranks,
            cell.steps,
        )

    return sorted(cells, key=key)


def _explain(cells: list[Cell], facts: causes.Facts) -> list[Cell]:
    """Cells with their causes; cells that one cause joins name each other."""
    views = [
        causes.CellView(
            role=c.role,
            op=c.op,
            phase=c.phase,
            dtype=c.dtype,
            payload=c.payload_bytes_each,
            calls_expected=c.calls_expected or 0,
            calls_measured=c.calls_measured,
            verdict=c.verdict,
            expected=c.expected,
            ranks=c.ranks,
            steps=c.steps,
            transport=c.transport,
            varies=c.varies,
            spread=c.spread,
            stage=c.stage,
        )
        for c in cells
    ]
    found = causes.explain(views, facts)
    return [
        cell if i not in found or cell.cause is not None else replace(cell, cause=found[i][0], related=found[i][1])
        for i, cell in enumerate(cells)
    ]


# -- coverage and verdict --------------------------------------------------------------------------------------------

_KERNELS = """
SELECT k.name, k.completeness IS NOT DISTINCT FROM 'launched_before_window' AS before, k.coalesce_id IS NOT NULL AS tied,
       k.graph_id IS NOT NULL AS in_graph,
       coalesce(c.role IS NOT NULL OR c.group_size = 1, false) AS known, count(*) AS n, sum(k.dur_ns)::BIGINT AS time_ns
FROM kernel k
LEFT JOIN (SELECT rank, coalesce_id, any_value(role) AS role, any_value(group_size) AS group_size
           FROM comm WHERE coalesce_id IS NOT NULL GROUP BY rank, coalesce_id) c
  ON c.rank IS NOT DISTINCT FROM k.rank AND c.coalesce_id = k.coalesce_id
WHERE k.kernel_class = 'comm' GROUP BY ALL ORDER BY time_ns DESC, k.name
"""


def _coverage(
    run: Run,
    measured: Steps,
    outside: int,
    found: attribute.Attribution,
    cells: Sequence[Cell],
    world: int | None,
) -> Coverage:
    rows = [m for step in measured.values() for m in step]
    known = [m for m in rows if m.role is not None or m.group_size == 1]
    total, attributed = _bytes(rows), _bytes(known)
    of_unknown_bytes = sum(m.calls for m in rows if m.payload is None)
    all_kernels = run.rows(_KERNELS)
    kernels = [k for k in all_kernels if not k["before"]]
    n, n_known = sum(k["n"] for k in kernels), sum(k["n"] for k in kernels if k["known"])
    time, time_known = sum(k["time_ns"] for k in kernels), sum(k["time_ns"] for k in kernels if k["known"])
    shares = [attributed / total] if total else []
    if n and (of_unknown_bytes or not total or any(not k["tied"] for k in kernels)):
        shares += [n_known / n, time_known / time if time else 1.0]
    elif rows and (of_unknown_bytes or not total):
        shares.append(sum(m.calls for m in known) / sum(m.calls for m in rows))
    evidence: Counter[str] = Counter()
    for m in rows:
        if m.role_evidence is not None:
            evidence[m.role_evidence] += m.calls
    return Coverage(
        ranks_present=tuple(sorted({r for r, _ in measured})),
        ranks_declared=world,
        steps=tuple(sorted({s for _, s in measured})),
        step_evidence=tuple(sorted({s.evidence for s in found.steps})),
        calls=sum(m.calls for m in rows),
        calls_outside_steps=outside,
        kernels=n,
        kernels_attributed=n_known,
        kernels_before_window=sum(k["n"] for k in all_kernels if k["before"]),
        bytes_known=total,
        bytes_attributed=attributed,
        calls_of_unknown_bytes=of_unknown_bytes,
        kernel_time_ns=time,
        kernel_time_attributed_ns=time_known,
        role_evidence=tuple(evidence.most_common()),
        attributed=min(shares) if shares else None,
        judged=_judged(cells),
        unattributed=_unattributed(kernels),
        import_status=run.import_status,
    )


def _bytes(rows: Iterable[Measured]) -> int:
    return sum(m.payload * m.calls for m in rows if m.payload is not None)


def _unattributed(kernels: Iterable[Mapping[str, Any]]) -> tuple[Unattributed, ...]:
    """What is left over, by name, the longest time first."""
    return tuple(
        Unattributed(
            k["name"],
            k["n"],
            k["time_ns"],
            "role of its group unknown"
            if k["tied"]
            else "a CUDA graph replays it, and no call is recorded"
            if k["in_graph"]
            else "no recorded call explains it",
        )
        for k in kernels
        if not k["known"]
    )


def _judged(cells: Sequence[Cell]) -> float | None:
    """Share of what was measured whose cell has a verdict: of bytes, and where some are unknown of calls; the lower."""
    shares: list[float] = []
    sizes = [(c.verdict != "unknown", (c.payload_bytes_measured or 0) * c.places) for c in cells]
    total = sum(size for _, size in sizes)
    if total:
        shares.append(sum(size for judged, size in sizes if judged) / total)
    calls = [(c.verdict != "unknown", c.calls_measured * c.places) for c in cells]
    if sum(n for _, n in calls) and (not total or any(c.payload_bytes_measured is None for c in cells)):
        shares.append(sum(n for judged, n in calls if judged) / sum(n for _, n in calls))
    return min(shares) if shares else None


def _verdict(cells: Sequence[Cell], coverage: Coverage, min_coverage: float) -> str:
    """What could not be attributed or judged comes first; without any call there is nothing unattributed."""
    lowest = min((s for s in (coverage.attributed, coverage.judged) if s is not None), default=1.0)
    if lowest < min_coverage:
        return "cannot be judged"
    return "differs" if any(c.verdict in DIFFERS for c in cells) else "match"
