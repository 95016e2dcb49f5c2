"""Where a call was made, by the order of the calls around it: for recordings without marks.

Everything here is an inference from traffic alone; it fills in only what neither a hook nor a mark said, and only where the
count of the calls confirms it:

* The direction of a pipeline message is its phase: to the next stage forward, to the one before backward. With two stages
  and interleaving both neighbours are the same rank, and the schedule must say it.
* Messages of one direction carry the micro-batches in order, so the n-th message is micro-batch n.
* With interleaving and a job the schedule says what the n-th send and the n-th receive of a stage carry, if there are as
  many as it makes. Passes are its passes if there are as many, in the same order, with as many messages before each.
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

from traceanalyzer import axes, schedule_order
from traceanalyzer.attribute.roles import layout_of
from traceanalyzer.errors import JobError
from traceanalyzer.job import Job
from traceanalyzer.run import Run
from traceanalyzer.schedule_order import Action, Exchange, Message, Schedule

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
    peer: int | None = None
    """Stage of the other side of a pipeline message. None: not recorded."""
    message: bool = False
    """Whether it carries activations or gradients between stages."""


class Place(NamedTuple):
    """What the order says of a call; None: nothing."""

    phase: str | None = None
    microbatch: int | None = None
    layer: int | None = None
    chunk: int | None = None


class Pass(NamedTuple):
    """Work of one direction (F, B) between messages, and how many were sent and received before it in the step."""

    way: str
    sends: int
    recvs: int


class ScheduleConflict(NamedTuple):
    """Pipeline messages of one stage in one step that are not as many as the declared schedule makes."""

    op: str
    stage: int
    declared: int
    observed: int

    @property
    def sentence(self) -> str:
        """The conflict in words."""
        done = "sends" if self.op == "send" else "receives"
        return (
            f"declared a pipeline schedule in which stage {self.stage} {done} {self.declared} messages a step, observed "
            f"{self.observed}"
        )


def schedules(job: Job) -> list[Schedule]:
    """The schedules a job may run, by release; one of one stage without a pipeline; [] if it does not determine one."""
    try:
        if job.pipeline_model_parallel_size == 1:
            (count,) = job.require("num_microbatches")
            return [Schedule(kind="1f1b", stages=1, microbatches=count, forward_only=job.forward_only)]
        found = [schedule_order.of_job(job, warm_up_at_pp=early) for early in (False, True)]
    except JobError:
        return []
    return list(dict.fromkeys(s for s in found if s is not None))


def expected_passes(schedule: Schedule, stage: int) -> list[tuple[Pass, tuple[int, int]]]:
    """The passes of a stage in order, each with its micro-batch and chunk."""
    sends = recvs = 0
    found: list[tuple[Pass, tuple[int, int]]] = []
    for step in schedule_order.program(schedule, stage):
        if isinstance(step, Action):
            found.append((Pass(step.kind, sends, recvs), (step.microbatch, step.chunk)))
        else:
            sends += sum(m.op == "send" for m in step.messages)
            recvs += sum(m.op == "recv" for m in step.messages)
    return found


def passes_of(job: Job, rank: int, seen: Sequence[Pass]) -> list[tuple[int, int]] | None:
    """Micro-batch and chunk of each pass seen on a rank in one step; None unless they are exactly those of its schedule."""
    layout = layout_of(job)
    if layout is None or rank >= layout.world_size:
        return None
    fitting: set[tuple[tuple[int, int], ...]] = set()
    for schedule in schedules(job):
        listed = expected_passes(schedule, layout.stage(rank))
        if [p for p, _ in listed] == list(seen):
            fitting.add(tuple(which for _, which in listed))
    return list(fitting.pop()) if len(fitting) == 1 else None


def of_schedule(
    calls: Sequence[Call], stage: int, plans: Sequence[Schedule]
) -> tuple[dict[int, Place], list[ScheduleConflict]]:
    """Phase, micro-batch and chunk of one rank's calls of one step by the schedules the job may run.

    The n-th message sent (received) is the n-th that the schedule sends (receives). {} and the conflict where they are not
    as many, {} where a peer is another or two schedules say different things.
    """
    options: list[dict[int, Place]] = []
    conflicts: list[ScheduleConflict] = []
    for schedule in plans:
        made: list[Message] = []
        for step in schedule_order.program(schedule, stage):
            if isinstance(step, Exchange):
                made += step.messages
        found: dict[int, Place] | None = {}
        for op in ("send", "recv"):
            declared = [m for m in made if m.op == op]
            observed = [c for c in calls if c.message and c.op == op]
            if len(declared) != len(observed):
                conflicts.append(ScheduleConflict(op, stage, len(declared), len(observed)))
                found = None
            elif any(c.peer not in (None, m.peer) for c, m in zip(observed, declared, strict=True)):
                found = None
            if found is not None:
                for c, m in zip(observed, declared, strict=True):
                    phase = "forward" if m.content == "activation" else "backward"
                    found[c.call_id] = Place(phase, m.microbatch, None, m.chunk)
        if found is not None and found not in options:
            options.append(found)
    if len(options) != 1:
        return {}, [] if options else list(dict.fromkeys(conflicts))
    return options[0] | _within_passes(calls, stage, plans), []


def _within_passes(calls: Sequence[Call], stage: int, plans: Sequence[Schedule]) -> dict[int, Place]:
    """Micro-batch and chunk of calls inside passes, if these are exactly those of one schedule."""
    seen: list[Pass] = []
    members: list[list[int]] = []
    sends = recvs = 0
    for c in calls:
        if c.message:
            sends, recvs = sends + (c.op == "send"), recvs + (c.op == "recv")
        elif c.role in ACTIVATION_ROLES and c.phase in ("forward", "backward", "recompute"):
            now = Pass("F" if c.phase == "forward" else "B", sends, recvs)
            if not seen or seen[-1] != now:
                seen.append(now)
                members.append([])
            members[-1].append(c.call_id)
    options: list[dict[int, Place]] = []
    for schedule in plans:
        listed = expected_passes(schedule, stage)
        if [p for p, _ in listed] == seen:
            found = {
                number: Place(None, microbatch, None, chunk)
                for (_, (microbatch, chunk)), part in zip(listed, members, strict=True)
                for number in part
            }
            if found not in options:
                options.append(found)
    return options[0] if len(options) == 1 else {}


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
SELECT c.rank, c.step, c.call_id, c.op, CASE WHEN c.axis = 'PP' THEN 'pp' ELSE c.role END, c.phase, c.payload_bytes, c.peer,
       CASE WHEN c.role = 'pp' THEN g.ranks END, c.dtype, c.step_evidence
FROM comm c
LEFT JOIN (SELECT rank, group_id, any_value(ranks) AS ranks FROM process_group GROUP BY ALL) g
  ON g.rank = c.rank AND g.group_id = c.group_id
WHERE c.rank IS NOT NULL AND c.op IS NOT NULL AND c.step_complete AND c.recorded_microbatch IS NULL
ORDER BY c.rank, c.step, coalesce(c.t_issue_ns, c.start_ns), c.call_id
"""


def of_calls(run: Run, job: Job | None) -> tuple[pa.Table, list[ScheduleConflict]]:
    """The table order_place: what the order says of calls whose place neither a hook nor a mark gave; and contradictions.

    Needs an attached view comm. Columns rank, call_id, order_phase, order_microbatch, order_layer, order_chunk.
    """
    layout = layout_of(job)
    interleaved = None if job is None else (job.virtual_pipeline_model_parallel_size or 1) > 1
    plans = schedules(job) if job is not None and interleaved else []
    found: list[tuple[int, int, Place]] = []
    conflicts: dict[ScheduleConflict, None] = {}
    for (rank, _), rows in groupby(run.tuples(_CALLS), key=lambda r: (r[0], r[1])):
        listed = list(rows)
        stage, stages = _stage(rank, layout, listed)
        only_pipeline = job is not None and job.context_parallel_size == 1
        calls: list[Call] = []
        for _, _, number, op, role, phase, size, peer, ranks, dtype, _ in listed:
            way: str | None = None
            # where attention is not spread, nothing but the pipeline sends messages
            message = op in ("send", "recv") and (role == "pp" or (role is None and only_pipeline))
            there = _stage_of_peer(peer, ranks, layout) if message else None
            if message and stage is not None and stages is not None:
                way = direction_of(op, stage, there, stages, interleaved)
            # stages tell each other shapes in int64
            calls.append(Call(number, op, role, phase, way, size, there, message and dtype != "int64"))
        if plans and stage is not None:
            at, broken = of_schedule(calls, stage, plans)
            marked = listed[0][10] in ("recorded", "profiler_step", "mark")
            conflicts |= dict.fromkeys(broken if marked and any(c.message for c in calls) else ())
            if not at:
                at = {c.call_id: Place(phase=c.direction) for c in calls if c.direction is not None}
        elif stage is None or stages is None or (stages > 1 and interleaved is not False):
            # without a job the passes of an interleaved pipeline cannot be told from those of a plain one
            at = {c.call_id: Place(phase=c.direction) for c in calls if c.direction is not None}
        else:
            microbatches = None if job is None else job.num_microbatches
            at = places(calls, stage, stages, microbatches, forward_only=job is not None and job.forward_only)
            if job is not None and layout is not None:
                at = _with_layers(at, calls, job, stage)
        found += [(rank, number, p) for number, p in at.items()]
    return _table(found), list(conflicts)


def no_places() -> pa.Table:
    """The table order_place without a row: for the view comm that of_calls reads."""
    return _table([])


def _table(found: Sequence[tuple[int, int, Place]]) -> pa.Table:
    return pa.table(
        {
            "rank": pa.array([f[0] for f in found], pa.int32()),
            "call_id": pa.array([f[1] for f in found], pa.int64()),
            "order_phase": pa.array([f[2].phase for f in found], pa.string()),
            "order_microbatch": pa.array([f[2].microbatch for f in found], pa.int32()),
            "order_layer": pa.array([f[2].layer for f in found], pa.int32()),
            "order_chunk": pa.array([f[2].chunk for f in found], pa.int32()),
        }
    )


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
