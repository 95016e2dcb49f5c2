"""The place of every device activity: the step and phase it was launched in, and the role that its call has.

A kernel has no place of its own. What launched it has: the runtime call with the same correlation id lies on a host thread,
and the ranges open on that thread at that time say the phase, by the same rules as for calls (places.py). A communication
kernel has the role and the phase of its call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import pyarrow as pa

from traceanalyzer.attribute import places
from traceanalyzer.importers.calls import names_a_place
from traceanalyzer.run import Run

OPTIMIZER, CHECKPOINT, BACKWARD, FUNCTION, PLACE = range(5)
"""Kinds of host ranges that decide phases: Optimizer.*, a checkpoint's backward, autograd's backward, one of Megatron's
autograd functions, any other range that says where its work belongs."""

_ATEN = re.compile(r"^(?:aten|c10d|_c10d_functional)::")


def kind_of(name: str) -> int | None:
    """What a host range of this name decides about the phase; None: nothing by its name alone."""
    if name.startswith("Optimizer."):
        return OPTIMIZER
    if places.is_checkpoint(name):
        return CHECKPOINT
    if _ATEN.match(name):
        return None
    if places.is_backward(name):
        return BACKWARD
    if name in places.TENSOR_PARALLEL_FUNCTIONS:
        return FUNCTION
    return PLACE if names_a_place(name) and not places.is_mark(name) else None


def _inside(phase: str | None, kind: int) -> str:
    """The phase inside a range of this kind that lies in a range of that phase (None: in no range)."""
    if kind == OPTIMIZER:
        return "optimizer"
    if kind == CHECKPOINT:
        return "recompute"
    if kind == BACKWARD:
        return "backward"
    if kind == FUNCTION and phase == "backward":
        return "recompute"  # forward work in the backward pass: a checkpoint without a function of its own
    return phase or "forward"


def segments(ranges: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, str | None]]:
    """Times at which the phase of one thread changes, and the phase from then on; None: outside of every range.

    ``ranges``: start, end and kind, ordered by start, an outer range before the inner one that starts with it.
    """
    changes: list[tuple[int, str | None]] = []

    def change(at: int, phase: str | None) -> None:
        if changes and changes[-1][0] == at:
            changes.pop()
        if (changes[-1][1] if changes else None) != phase:
            changes.append((at, phase))

    stack: list[tuple[int, str]] = []
    for start, end, kind in ranges:
        while stack and stack[-1][0] <= start:
            at, _ = stack.pop()
            change(at, stack[-1][1] if stack else None)
        phase = _inside(stack[-1][1] if stack else None, kind)
        change(start, phase)
        stack.append((min(end, stack[-1][0]) if stack else end, phase))
    while stack:
        at, _ = stack.pop()
        change(at, stack[-1][1] if stack else None)
    yield from changes


_NAMES = "SELECT DISTINCT name FROM cpu_op WHERE name IS NOT NULL UNION SELECT DISTINCT name FROM span WHERE name IS NOT NULL"
_RANGES = f"""
WITH host AS (
  SELECT rank, tid, start_ns, dur_ns, name, sequence_nr FROM cpu_op
  UNION ALL
  SELECT rank, tid, start_ns, dur_ns, name, NULL FROM span WHERE category IS DISTINCT FROM 'gpu_user_annotation'
)
SELECT coalesce(h.rank, -1) AS rank_key, h.tid, h.start_ns, h.start_ns + h.dur_ns AS end_ns,
       coalesce(k.range_kind, {PLACE}) AS range_kind
FROM host h LEFT JOIN range_kind k ON k.name = h.name
-- an operator with a sequence number was recorded by autograd: forward work, unless a range around it says otherwise
WHERE (k.range_kind IS NOT NULL OR h.sequence_nr IS NOT NULL)
  AND h.tid IS NOT NULL AND h.start_ns IS NOT NULL AND h.dur_ns > 0
ORDER BY rank_key, h.tid, h.start_ns, end_ns DESC
"""


def _phase_table(run: Run) -> pa.Table:
    """Table thread_phase: when the phase changes on each host thread."""
    kinds = {name: kind for (name,) in run.tuples(_NAMES) if (kind := kind_of(name)) is not None}
    run.table(
        "range_kind",
        pa.table(
            {"name": pa.array(list(kinds), pa.string()), "range_kind": pa.array(list(kinds.values()), pa.int32())}
        ),
    )
    found: list[tuple[int, int, int, str | None]] = []
    thread: tuple[int, int] | None = None
    held: list[tuple[int, int, int]] = []
    for rank_key, tid, start, end, kind in run.tuples(_RANGES):
        if thread is not None and thread != (rank_key, tid):
            found += ((*thread, at, phase) for at, phase in segments(held))
            held = []
        thread = (rank_key, tid)
        held.append((start, end, kind))
    if thread is not None:
        found += ((*thread, at, phase) for at, phase in segments(held))
    return pa.table(
        {
            "rank_key": pa.array([f[0] for f in found], pa.int32()),
            "tid": pa.array([f[1] for f in found], pa.int64()),
            "at_ns": pa.array([f[2] for f in found], pa.int64()),
            "thread_phase": pa.array([f[3] for f in found], pa.string()),
        }
    )


_KERNEL_PLACE = """
CREATE OR REPLACE TABLE kernel_place AS
WITH launch AS (
  SELECT rank, correlation, min(start_ns) AS launched_ns, arg_min(tid, start_ns) AS tid
  FROM cpu_op WHERE correlation IS NOT NULL AND start_ns IS NOT NULL GROUP BY ALL
),
work AS (
  SELECT rank, coalesce_id, CASE WHEN count(DISTINCT coalesce(role, '')) = 1 THEN any_value(role) END AS role,
         CASE WHEN count(DISTINCT coalesce(phase, '')) = 1 THEN any_value(phase) END AS phase
  FROM comm WHERE coalesce_id IS NOT NULL GROUP BY ALL
),
launched AS (
  SELECT k.*, coalesce(k.rank, -1) AS rank_key, coalesce(k.launch_ns, l.launched_ns) AS launched_ns, l.tid,
         coalesce(k.launch_ns, l.launched_ns, k.start_ns) AS placed_ns, w.role, w.phase AS call_phase
  FROM kernel k
  LEFT JOIN launch l ON l.rank IS NOT DISTINCT FROM k.rank AND l.correlation = k.correlation
  LEFT JOIN work w ON w.rank IS NOT DISTINCT FROM k.rank AND w.coalesce_id = k.coalesce_id
)
SELECT k.rank, k.device, k.stream, k.name, k.kernel_class, k.kernel_op, k.start_ns, k.dur_ns, k.coalesce_id,
       k.completeness, k.copy_bytes, k.launched_ns AS launch_ns,
       CASE WHEN k.placed_ns < s.step_end_ns THEN s.step END AS step,
       CASE WHEN k.placed_ns < s.step_end_ns THEN s.step_complete END AS step_complete,
       k.role, a.axis,
       coalesce(k.call_phase, p.thread_phase, CASE WHEN k.tid IS NOT NULL THEN 'other' END) AS phase
FROM launched k
ASOF LEFT JOIN step_range s ON s.rank_key = k.rank_key AND k.placed_ns >= s.step_start_ns
ASOF LEFT JOIN thread_phase p ON p.rank_key = k.rank_key AND p.tid = k.tid AND k.launched_ns >= p.at_ns
LEFT JOIN role_axis a ON a.role = k.role
"""


def of_kernels(run: Run) -> None:
    """Makes the table kernel_place: every row of the view kernel with launch time, step, phase, role and axis.

    Needs an attached run. step: by the launch, or the start where the launch is not known. phase: of its call, else of the
    thread that launched it; null where neither is known. role: null for compute and for communication without a call.
    """
    run.table("thread_phase", _phase_table(run))
    run.connection.execute(_KERNEL_PLACE)
