"""Pipelines: which ranks form one, and the time of each stage in the window of all.

The window of a pipeline in a step runs from the earliest forward start to the latest backward end over its recorded ranks,
by their clocks as recorded. Each stage's share of it has five parts: before its first forward pass; warm-up, from there to
its first backward pass; steady, to the end of its last forward pass; cool-down, to the end of its last backward pass; after.
Before and after, the host launches nothing because the schedule has nothing for it. Without backward passes all from the
first forward pass to the last is steady.
"""

from __future__ import annotations

import pyarrow as pa

from traceanalyzer import axes
from traceanalyzer.attribute.time import Window, of_windows
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


_BOUNDS = """
SELECT s.pipeline, b.step, s.stage, s.stages, b.rank, b.first_forward_ns, b.last_forward_end_ns, b.first_backward_ns,
       coalesce(b.last_backward_end_ns, b.last_forward_end_ns) AS last_end_ns,
       min(b.first_forward_ns) OVER w AS window_start_ns,
       max(coalesce(b.last_backward_end_ns, b.last_forward_end_ns)) OVER w AS window_end_ns
FROM pass_bounds b JOIN rank_stage s ON s.rank = b.rank
WHERE s.stages > 1 AND b.first_forward_ns IS NOT NULL AND b.step IS NOT NULL
WINDOW w AS (PARTITION BY s.pipeline, b.step)
ORDER BY s.pipeline, b.step, s.stage
"""


def of_parts(run: Run) -> pa.Table:
    """Table pipeline_time: what each stage did in each part of its pipeline's window.

    Columns: pipeline, step, stage, stages, rank, window_start_ns, window_end_ns, part, device, class, roles, dur_ns. Parts
    and classes of one rank and device sum to the window. Needs the tables kernel_place, rank_stage and pass_bounds.
    """
    keys: list[tuple[object, ...]] = []
    windows: dict[int, list[Window]] = {}
    for pipeline, step, stage, stages, rank, forward, forward_end, backward, last_end, low, high in run.tuples(_BOUNDS):
        first = max(forward, forward if backward is None else backward)
        last = max(first, forward_end)
        cuts = (low, forward, first, last, max(last, last_end), high)
        for part, start, end in zip(PARTS, cuts, cuts[1:], strict=False):
            windows.setdefault(rank, []).append(Window(len(keys), start, end))
            keys.append((pipeline, step, stage, stages, rank, low, high, part))
    names = ("pipeline", "step", "stage", "stages", "rank", "window_start_ns", "window_end_ns", "part")
    types = (pa.int32(), pa.int64(), pa.int32(), pa.int32(), pa.int32(), pa.int64(), pa.int64(), pa.string())
    run.table(
        "pipeline_part",
        pa.table(
            {"number": pa.array(range(len(keys)), pa.int64())}
            | {n: pa.array([k[i] for k in keys], types[i]) for i, n in enumerate(names)}
        ),
    )
    run.table("part_class", of_windows(run, windows))
    return run.arrow(
        f"""SELECT {", ".join(f"p.{n}" for n in names)}, c.device, c.class, c.roles, c.dur_ns
            FROM part_class c JOIN pipeline_part p USING (number)"""
    )
