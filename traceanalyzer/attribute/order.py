"""Where a call was made, by the order of the calls around it: for recordings without marks.

Everything here is an inference from traffic alone; it fills in only what neither a hook nor a mark said, and only where the
count of the calls confirms it:

* The direction of a pipeline message is its phase: to the next stage forward, to the one before backward. With two stages
  and interleaving both neighbours are the same rank, and nothing is said.
* Messages of one direction carry the micro-batches in order, so the n-th message is micro-batch n.
* Other calls of a forward (backward) pass belong to the micro-batch whose message of that direction comes next on a stage
  that sends it on, or came last on one that only receives it. Without a pipeline, passes alternate: the n-th run of forward
  calls and the run of backward calls behind it are micro-batch n.
* The calls of a forward pass on the tensor-parallel group repeat layer by layer: with the layers of the stage known, the
  place in the repetition is the layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import pyarrow as pa

from traceanalyzer import axes
from traceanalyzer.errors import JobError
from traceanalyzer.job import Job
from traceanalyzer.run import Run

ACTIVATION_ROLES: frozenset[str] = frozenset({"tp", "cp", "cp_l0", "cp_l1", "hybrid_cp", "ep", "etp", "tp_ep"})
"""Roles whose forward and backward calls are those of one micro-batch each."""


class Call(NamedTuple):
    """One call of a rank and step, in order of issue. direction: of a pipeline message, forward or backward."""

    call_id: int
    op: str
    role: str | None
    phase: str | None
    direction: str | None
    size: int | None


class Place(NamedTuple):
    """What the order says of a call; None: nothing."""

    phase: str | None = None
    microbatch: int | None = None
    layer: int | None = None


def direction_of(op: str, stage: int, peer: int | None, stages: int, interleaved: bool | None) -> str | None:
    """Phase of a pipeline message between ``stage`` and the stage ``peer``; None: it cannot be told.

    peer None: not recorded. interleaved None: not known. The ends of a pipeline that is not interleaved have one neighbour.
    """
    sends = op == "send"
    if peer is None or stages == 2:
        if interleaved is not False or stages < 2 or 0 < stage < stages - 1:
            return None
        return "forward" if sends == (stage == 0) else "backward"
    if peer == (stage + 1) % stages:
        return "forward" if sends else "backward"
    if peer == (stage - 1) % stages:
        return "backward" if sends else "forward"
    return None


def places(
    calls: Sequence[Call], stage: int, stages: int, microbatches: int | None, *, forward_only: bool = False
) -> dict[int, Place]:
    """Phase and micro-batch of one rank's calls of one complete step, without interleaving.

    ``microbatches`` None: not known; then the messages themselves say, if every direction has as many.
    """
    found: dict[int, Place] = {c.call_id: Place(phase=c.direction) for c in calls if c.direction is not None}
    messages: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for c in calls:
        if c.direction is not None:
            messages[c.direction, c.op].append(c)
    counts = {len(m) for m in messages.values()}
    if stages > 1:
        # sent and received in every pass: both on a middle stage, one of the two at an end
        kinds = (1 if stage in (0, stages - 1) else 2) * (1 if forward_only else 2)
        whole = len(counts) == 1 and len(messages) == kinds and (microbatches is None or counts == {microbatches})
        unclear = any(c.direction is None and c.role in ("pp", None) and c.op in ("send", "recv") for c in calls)
        if not whole or unclear:
            return found
        for ordered in messages.values():
            for i, c in enumerate(ordered):
                found[c.call_id] = Place(phase=c.direction, microbatch=i)
        found.update(_between_messages(calls))
    else:
        found.update(_alternating(calls, microbatches, forward_only))
    return found


def _between_messages(calls: Sequence[Call]) -> dict[int, Place]:
    """Micro-batches of the calls of passes, by the messages issued before them."""
    sent = {c.direction for c in calls if c.op == "send"}
    passed: dict[str, int] = {"forward": 0, "backward": 0}
    found: dict[int, Place] = {}
    for c in calls:
        if c.direction is not None:
            if c.op == ("send" if c.direction in sent else "recv"):
                passed[c.direction] += 1
        elif c.role in ACTIVATION_ROLES and c.phase is not None:
            way = "backward" if c.phase in ("backward", "recompute") else c.phase
            if way in passed:
                number = passed[way] - (0 if way in sent else 1)
                if number >= 0:
                    found[c.call_id] = Place(microbatch=number)
    return found


def _alternating(calls: Sequence[Call], microbatches: int | None, forward_only: bool) -> dict[int, Place]:
    """Micro-batches by the runs of forward and backward calls; {} unless every pass has both, or there is one pass alone."""
    passes = [c for c in calls if c.role in ACTIVATION_ROLES and c.phase in ("forward", "backward", "recompute")]
    runs = [(way, list(part)) for way, part in groupby(passes, key=lambda c: c.phase == "forward")]
    if forward_only and microbatches == 1 and all(way for way, _ in runs):
        return {c.call_id: Place(microbatch=0) for c in passes}
    if len(runs) % 2 or not runs or not runs[0][0]:
        return {}
    if microbatches is not None and len(runs) != 2 * microbatches:
        return {}
    return {c.call_id: Place(microbatch=i // 2) for i, (_, part) in enumerate(runs) for c in part}


def layers(calls: Sequence[Call], ids: Sequence[int], *, first: bool, last: bool) -> dict[int, int]:
    """Layer of the tensor-parallel calls of one forward pass of a stage, by call.

    ``calls`` in order; ``ids``: the layers of the stage; ``first``, ``last``: the embedding, whose one call comes before, and
    the output layer and loss, whose calls come behind, are on it. {} unless operations and sizes repeat once a layer and
    nothing is left over, and for one layer, which repeats nothing.
    """
    before = 1 if first else 0
    looks = [(c.op, c.size) for c in calls][before:]
    if len(ids) < 2 or (not last and len(looks) % len(ids)):
        return {}
    period = len(looks) // len(ids)
    while period:
        block = looks[:period]
        if all(looks[i * period : (i + 1) * period] == block for i in range(len(ids))):
            inside = calls[before : before + len(ids) * period]
            return {c.call_id: ids[i // period] for i, c in enumerate(inside)}
        if not last:
            return {}
        period -= 1
    return {}


_CALLS = """
SELECT c.rank, c.step, c.call_id, c.op, c.role, c.phase, c.payload_bytes, c.peer, g.ranks
FROM comm c
LEFT JOIN (SELECT rank, group_id, any_value(ranks) AS ranks FROM process_group GROUP BY ALL) g
  ON g.rank = c.rank AND g.group_id = c.group_id
WHERE c.rank IS NOT NULL AND c.op IS NOT NULL AND c.step_complete AND c.recorded_microbatch IS NULL
ORDER BY c.rank, c.step, coalesce(c.t_issue_ns, c.start_ns), c.call_id
"""


def of_calls(run: Run, job: Job | None) -> pa.Table:
    """The table order_place: what the order says of calls whose place neither a hook nor a mark gave.

    Needs an attached view comm. Columns rank, call_id, order_phase, order_microbatch, order_layer.
    """
    layout = _layout(job)
    interleaved = None if job is None else (job.virtual_pipeline_model_parallel_size or 1) > 1
    found: list[tuple[int, int, str | None, int | None, int | None]] = []
    for (rank, _), rows in groupby(run.tuples(_CALLS), key=lambda r: (r[0], r[1])):
        listed = list(rows)
        stage, stages = _stage(rank, layout, listed)
        only_pipeline = job is not None and job.context_parallel_size == 1
        calls: list[Call] = []
        for _, _, number, op, role, phase, size, peer, ranks in listed:
            way: str | None = None
            # where attention is not spread, nothing but the pipeline sends messages
            message = op in ("send", "recv") and (role == "pp" or (role is None and only_pipeline))
            if message and stage is not None and stages is not None:
                way = direction_of(op, stage, _stage_of_peer(peer, ranks, layout), stages, interleaved)
            calls.append(Call(number, op, role, phase, way, size))
        # without a job the passes of an interleaved pipeline cannot be told from those of a plain one
        if stage is None or stages is None or (stages > 1 and interleaved is not False):
            at = {c.call_id: Place(phase=c.direction) for c in calls if c.direction is not None}
        else:
            microbatches = None if job is None else job.num_microbatches
            at = places(calls, stage, stages, microbatches, forward_only=job is not None and job.forward_only)
            if job is not None and layout is not None:
                at = _with_layers(at, calls, job, stage)
        found += [(rank, number, p.phase, p.microbatch, p.layer) for number, p in at.items()]
    return _table(found)


def no_places() -> pa.Table:
    """The table order_place without a row: for the view comm that of_calls reads."""
    return _table([])


def _table(found: Sequence[tuple[int, int, str | None, int | None, int | None]]) -> pa.Table:
    return pa.table(
        {
            "rank": pa.array([f[0] for f in found], pa.int32()),
            "call_id": pa.array([f[1] for f in found], pa.int64()),
            "order_phase": pa.array([f[2] for f in found], pa.string()),
            "order_microbatch": pa.array([f[3] for f in found], pa.int32()),
            "order_layer": pa.array([f[4] for f in found], pa.int32()),
        }
    )


def _layout(job: Job | None) -> axes.Layout | None:
    if job is None:
        return None
    try:
        return job.layout
    except JobError:
        return None


def _stage(rank: int, layout: axes.Layout | None, rows: Iterable[tuple[object, ...]]) -> tuple[int | None, int | None]:
    """Pipeline stage of a rank and number of stages: by the layout, else by the ranks of its pipeline group."""
    if layout is not None and rank < layout.world_size:
        return layout.stage(rank), layout.pp
    for row in rows:
        ranks = row[8]
        if row[4] == "pp" and isinstance(ranks, list) and rank in ranks:
            return sorted(ranks).index(rank), len(ranks)
    return None, None


def _stage_of_peer(peer: int | None, ranks: list[int] | None, layout: axes.Layout | None) -> int | None:
    """Stage of the other side of a message; None: not recorded."""
    if peer is not None and layout is not None and peer < layout.world_size:
        return layout.stage(peer)
    if peer is not None and ranks is not None and peer in ranks:
        return sorted(ranks).index(peer)
    return None


def _with_layers(at: dict[int, Place], calls: Sequence[Call], job: Job, stage: int) -> dict[int, Place]:
    """Layers of the forward passes whose micro-batch is known, of a dense model without interleaving."""
    try:
        ids = job.layers_on_stage(stage)
    except JobError:
        return at
    if job.num_experts is not None:
        return at
    passes: dict[int, list[Call]] = defaultdict(list)
    for c in calls:
        number = at.get(c.call_id, Place()).microbatch
        if c.role == "tp" and c.phase == "forward" and number is not None:
            passes[number].append(c)
    last = stage == job.pipeline_model_parallel_size - 1
    for part in passes.values():
        for number, layer in layers(part, ids, first=stage == 0, last=last).items():
            at[number] = at[number]._replace(layer=layer)
    return at
