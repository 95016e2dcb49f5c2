"""Pipelines: which ranks form one, and the time of each stage in the window of all.

The window of a pipeline in a step runs from the earliest forward start to the latest backward end over its recorded ranks,
by aligned clocks where calls connect them (a rank's clock is shifted by what it is ahead in the step, so that the window is
the same for all to the ns), else as recorded. Each stage's share of it has five parts: before its first forward pass;
warm-up, from there to its first backward pass; steady, to the end of its last forward pass; cool-down, to the end of its last
backward pass; after. Before and after, the host launches nothing because the schedule has nothing for it. Without backward
passes all from the first forward pass to the last is steady.

Where kernels were recorded, a rank without them was not profiled, and is left out. In a run without any (on CPUs, or of
hooks alone) a rank has the ranges that hooks or marks put around its passes: then all between them is bubble, and what a
pass did is not known. Without such ranges, its operators: of a forward pass are those that autograd ran backward later, of a
backward pass autograd's own. Its host then takes the device's place (attribute/time.py), and where no operator runs between
its passes the host does work of its own, which is no bubble.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from traceanalyzer import axes
from traceanalyzer.attribute.time import Window, of_windows
from traceanalyzer.intervals import active, by_mask
from traceanalyzer.run import Run

PARTS: tuple[str, ...] = ("before", "warm_up", "steady", "cool_down", "after")


def stages(run: Run, layout: axes.Layout | None) -> pa.Table:
    """Table rank_stage: rank, pipeline (its lowest rank), stage, stages, evidence (layout, group).

    By the layout; without one by the ranks of the group of role pp. Ranks of which neither is known are left out.
    """
    ranks = [r for (r,) in run.tuples("SELECT DISTINCT rank FROM rank WHERE rank IS NOT NULL ORDER BY rank")]
    rows: list[tuple[int, int, int, int, str]] = []
    if layout is not None:
        for rank in (r for r in ranks if r < layout.world_size):
            group = layout.group_of("pp", rank) or (rank,)
            rows.append((rank, group[0], layout.stage(rank), layout.pp, "layout"))
    else:
        groups = dict(
            run.tuples(
                """SELECT rank, min(ranks) FROM process_group WHERE role = 'pp' AND ranks IS NOT NULL AND rank IS NOT NULL
                   GROUP BY rank HAVING count(DISTINCT ranks) = 1"""
            )
        )
        for rank, group in sorted(groups.items()):
            if rank in group:
                rows.append((rank, group[0], group.index(rank), len(group), "group"))
    names = ("rank", "pipeline", "stage", "stages", "evidence")
    types = (pa.int32(), pa.int32(), pa.int32(), pa.int32(), pa.string())
    return pa.table({n: pa.array([r[i] for r in rows], types[i]) for i, n in enumerate(names)})


def like(run: Run, layout: axes.Layout | None) -> pa.Table:
    """Table rank_like: rank, stage, tp_place, like_id: ranks of one like_id do the same work. Needs rank_stage.

    The same stage and place in the tensor-parallel group; where fewer than 3 recorded ranks have them, the same stage
    (tp_place null). By the layout, else by the groups of roles pp and tp: without any of pp the run has one stage, without
    any of tp no place is known. Ranks whose stage or place is not known where others' is are left out.
    """
    ranks = [r for (r,) in run.tuples("SELECT DISTINCT rank FROM rank WHERE rank IS NOT NULL ORDER BY rank")]
    staged = dict(run.tuples("SELECT rank, stage FROM rank_stage"))
    place: dict[int, int] = {}
    if layout is not None:
        place = {r: layout.coordinates(r).tp for r in ranks if r < layout.world_size}
    else:
        for rank, group in run.tuples(
            "SELECT rank, min(ranks) FROM process_group WHERE role = 'tp' AND ranks IS NOT NULL GROUP BY rank"
        ):
            if rank in group:
                place[rank] = group.index(rank)
    known = [r for r in ranks if (r in staged or not staged) and (r in place or not place)]
    keys = {r: (staged.get(r, 0), place.get(r)) for r in known}
    count = Counter(keys.values())
    few = {stage for (stage, _), n in count.items() if n < 3}
    chosen = {r: (stage, None if stage in few else tp) for r, (stage, tp) in keys.items()}
    number = {key: i for i, key in enumerate(dict.fromkeys(chosen.values()))}
    return pa.table(
        {
            "rank": pa.array(known, pa.int32()),
            "stage": pa.array([chosen[r][0] for r in known], pa.int32()),
            "tp_place": pa.array([chosen[r][1] for r in known], pa.int32()),
            "like_id": pa.array([number[chosen[r]] for r in known], pa.int32()),
        }
    )


_MARKED = """
CREATE OR REPLACE TABLE marked_pass AS
WITH marks AS (
  SELECT rank, recorded_step, start_ns, start_ns + dur_ns AS end_ns,
         CASE WHEN category = 'forward' OR name = 'ta:forward' THEN 'forward'
              WHEN category = 'backward' OR name = 'ta:backward' THEN 'backward' END AS phase
  FROM span WHERE rank IS NOT NULL AND start_ns IS NOT NULL AND dur_ns > 0
),
placed AS (
  SELECT m.rank, coalesce(m.recorded_step, CASE WHEN m.start_ns < r.step_end_ns THEN r.step END) AS step, m.phase, m.start_ns,
         m.end_ns
  FROM marks m ASOF LEFT JOIN step_range r ON r.rank_key = m.rank AND m.start_ns >= r.step_start_ns
  WHERE m.phase IS NOT NULL
)
SELECT * FROM placed WHERE step IS NOT NULL
"""
_OPERATORS = """
CREATE OR REPLACE TABLE host_pass AS
WITH busy AS (SELECT DISTINCT rank FROM kernel WHERE rank IS NOT NULL AND start_ns IS NOT NULL AND dur_ns > 0),
ops AS (
  SELECT o.rank, o.tid, o.sequence_nr, o.start_ns, o.start_ns + o.dur_ns AS end_ns,
         starts_with(o.name, 'autograd::engine::evaluate_function: ') AS backward
  FROM cpu_op o ANTI JOIN busy b ON b.rank = o.rank
  WHERE o.rank IS NOT NULL AND o.start_ns IS NOT NULL AND o.dur_ns >= 0
    AND (o.sequence_nr IS NOT NULL OR starts_with(o.name, 'autograd::engine::evaluate_function: '))
),
backward AS (
  SELECT rank, tid, sequence_nr, start_ns, end_ns,
         max(end_ns) OVER (PARTITION BY rank, tid ORDER BY start_ns ROWS UNBOUNDED PRECEDING) AS reach_ns
  FROM ops WHERE backward
),
-- operators count with the number of the next node of autograd's graph: the last of a number made the node
made AS (
  SELECT o.rank, o.tid, max(o.start_ns) AS start_ns, arg_max(o.end_ns, o.start_ns) AS end_ns
  FROM (SELECT * FROM ops WHERE NOT backward) o
  JOIN (SELECT rank, sequence_nr, min(start_ns) AS undone_ns FROM backward WHERE sequence_nr IS NOT NULL GROUP BY ALL) b
    ON b.rank = o.rank AND b.sequence_nr = o.sequence_nr
  WHERE o.start_ns < b.undone_ns
  GROUP BY o.rank, o.tid, o.sequence_nr
),
passes AS (
  SELECT m.rank, 'forward' AS phase, m.start_ns, m.end_ns
  FROM made m ASOF LEFT JOIN backward b
    ON b.rank = m.rank AND b.tid IS NOT DISTINCT FROM m.tid AND m.start_ns >= b.start_ns
  WHERE b.reach_ns IS NULL OR m.start_ns >= b.reach_ns  -- else it recomputes
  UNION ALL
  SELECT rank, 'backward', start_ns, end_ns FROM backward
)
SELECT p.rank, CASE WHEN p.start_ns < r.step_end_ns THEN r.step END AS step, p.phase, p.start_ns, p.end_ns
FROM passes p ASOF LEFT JOIN step_range r ON r.rank_key = p.rank AND p.start_ns >= r.step_start_ns
"""
_BOUNDS = """
SELECT s.pipeline, b.step, s.stage, s.stages, b.rank, b.evidence, b.first_forward_ns, b.last_forward_end_ns,
       b.first_backward_ns, coalesce(b.last_backward_end_ns, b.last_forward_end_ns)
FROM pass_bounds b JOIN rank_stage s ON s.rank = b.rank
WHERE s.stages > 1 AND b.first_forward_ns IS NOT NULL AND b.step IS NOT NULL
ORDER BY s.pipeline, b.step, s.stage
"""
_KEYS = {
    "pipeline": pa.int32(),
    "step": pa.int64(),
    "stage": pa.int32(),
    "stages": pa.int32(),
    "rank": pa.int32(),
    "evidence": pa.string(),
    "window_start_ns": pa.int64(),
    "window_end_ns": pa.int64(),
    "clocks": pa.string(),
    "open_ns": pa.int64(),
    "part": pa.string(),
}


class _Stage(NamedTuple):
    """What one rank of one pipeline did when in one step, by its own clock."""

    pipeline: int
    step: int
    stage: int
    stages: int
    rank: int
    evidence: str
    forward: int
    forward_end: int
    backward: int | None
    last_end: int


def passes_without_kernels(run: Run) -> None:
    """Makes the tables marked_pass and host_pass: rank, step, phase (forward, backward), start_ns, end_ns.

    marked_pass: the ranges that hooks or marks put around passes. host_pass: of ranks without device work, the operators of
    forward passes and autograd's functions, each a row. Needs an attached run.
    """
    run.connection.execute(_MARKED)
    run.connection.execute(_OPERATORS)


def of_parts(run: Run) -> pa.Table:
    """Table pipeline_time: what each stage did in each part of its pipeline's window.

    Columns: those of _KEYS, device, class, roles, dur_ns. window_start_ns, window_end_ns: by the stage's own clock.
    evidence: kernels; operators: the classes are those of the host; marks: then the classes are pass and idle alone. clocks:
    aligned, as recorded, one (stage recorded). open_ns: what aligned clocks leave open at either end of the window; null as
    recorded. Parts and classes of one rank and device sum to the window. Needs the tables kernel_place, rank_stage,
    pass_bounds, marked_pass and clock.
    """
    together: dict[tuple[int, int], list[_Stage]] = {}
    stages = [_Stage(*row) for row in run.tuples(_BOUNDS)]
    profiled = any(stage.evidence == "kernels" for stage in stages)
    for found in stages:
        if profiled and found.evidence != "kernels":
            continue  # its device worked behind its host: the host's ranges say nothing of that
        together.setdefault((found.pipeline, found.step), []).append(found)
    known = _clocks(run)
    keys: list[tuple[object, ...]] = []
    windows: dict[int, list[Window]] = {}
    marked: dict[int, list[Window]] = {}
    for members in together.values():
        clocks, ahead, open_ns = _aligned(members, known)
        low = min(m.forward - ahead[m.rank] for m in members)
        high = max(m.last_end - ahead[m.rank] for m in members)
        for m in members:
            begin, end = low + ahead[m.rank], high + ahead[m.rank]
            first = max(m.forward, m.forward if m.backward is None else m.backward)
            last = max(first, m.forward_end)
            cuts = (begin, m.forward, first, last, max(last, m.last_end), end)
            mine = marked if m.evidence == "marks" else windows
            for part, start, stop in zip(PARTS, cuts, cuts[1:], strict=False):
                mine.setdefault(m.rank, []).append(Window(len(keys), start, stop))
                keys.append((*m[:6], begin, end, clocks, open_ns, part))
    run.table(
        "pipeline_part",
        pa.table(
            {"number": pa.array(range(len(keys)), pa.int64())}
            | {n: pa.array([k[i] for k in keys], kind) for i, (n, kind) in enumerate(_KEYS.items())}
        ),
    )
    run.table("part_class", of_windows(run, windows))
    run.table("part_mark", _of_marks(run, marked))
    return run.arrow(
        f"""SELECT {", ".join(f"p.{n}" for n in _KEYS)}, c.device, c.class, c.roles, c.dur_ns
            FROM (SELECT number, device, class, roles, dur_ns FROM part_class
                  UNION ALL SELECT number, NULL, class, NULL, dur_ns FROM part_mark) c
            JOIN pipeline_part p USING (number)"""
    )


def _clocks(run: Run) -> dict[int, list[tuple[Any, ...]]]:
    """Per rank its clocks that rest on calls or a shared host, by time: since, reference, base, offset, drift, open."""
    found: dict[int, list[tuple[Any, ...]]] = {}
    for rank, *clock in run.tuples(
        """SELECT rank, since_ns, reference_rank, base_ns, offset_ns, coalesce(drift_ppb, 0) / 1e9, open_ns
           FROM clock WHERE calls > 0 OR evidence = 'host' ORDER BY rank, since_ns NULLS FIRST"""
    ):
        found.setdefault(rank, []).append(tuple(clock))
    return found


def _aligned(members: list[_Stage], known: dict[int, list[tuple[Any, ...]]]) -> tuple[str, dict[int, int], int | None]:
    """Which clocks the stages of one window are compared by, how far each is ahead in it, and what that leaves open."""
    if len(members) == 1:
        return "one", {members[0].rank: 0}, 0
    references = {known[m.rank][0][1] if m.rank in known else None for m in members}
    if len(references) > 1 or None in references:
        return "as recorded", {m.rank: 0 for m in members}, None
    ahead: dict[int, int] = {}
    open_ns = 0
    for m in members:
        held = [c for c in known[m.rank] if c[0] is None or c[0] <= m.forward] or known[m.rank][:1]
        _, _, base, offset, drift, left = held[-1]
        ahead[m.rank] = round(offset + drift * (m.forward - base - offset))
        # the shift holds where the first pass begins; the clock drifts on from there
        open_ns = max(open_ns, left + math.ceil(abs(drift) * (m.last_end - m.forward)))
    return "aligned", ahead, open_ns


def _of_marks(run: Run, windows: dict[int, list[Window]]) -> pa.Table:
    """Time in passes and between them: number, class (pass, idle), dur_ns."""
    passes: dict[int, list[tuple[int, int]]] = {}
    for rank, start, end in run.tuples("SELECT rank, start_ns, end_ns FROM marked_pass"):
        passes.setdefault(rank, []).append((start, end))
    rows: list[tuple[int, str, int]] = []
    for rank, mine in windows.items():
        times = np.array(passes[rank], np.int64)
        stretches = active([(times[:, 0], times[:, 1])])
        for window in mine:
            for mask, held in by_mask(*stretches, window.start_ns, window.end_ns).items():
                rows.append((window.number, "pass" if mask else "idle", held))
    return pa.table(
        {
            "number": pa.array([r[0] for r in rows], pa.int64()),
            "class": pa.array([r[1] for r in rows], pa.string()),
            "dur_ns": pa.array([r[2] for r in rows], pa.int64()),
        }
    )
