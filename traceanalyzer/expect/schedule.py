"""Pipeline schedules: who computes and sends what in which order, what stays in memory, and how long a stage idles.

Pure functions of a Schedule, that is of a few whole numbers; ``of_job`` makes one from a Job. Stages, micro-batches and
model chunks count from 0. A stage of an interleaved pipeline holds ``chunks`` (v) parts of the model; chunk c of the
last stage is followed by chunk c+1 of the first, so that stages form a ring.

===========  ===============================  ====================================  ===================================
kind         forward passes before the        activations in flight at stage p,     idle time of a stage
             first backward (warm-up)         in chunks (micro-batches times v)
===========  ===============================  ====================================  ===================================
gpipe        M                                M                                     (PP-1) * (t_f+t_b+t_w)
1f1b         min(M, PP-1-p)                   min(M, PP-p)                          (PP-1) * (t_f+t_b+t_w)
interleaved  min(v*M, 2(PP-1-p)+(v-1)G+x)     min(v*M, 2(PP-1-p)+(v-1)G+x+1)        (PP-1) * (t_f+t_b+t_w) / v
zb-h1        min(M, PP-1-p)                   min(M, PP)                            (PP-1) * (t_f+t_b-t_w)
===========  ===============================  ====================================  ===================================

PP stages, M micro-batches, G micro-batches that run through one chunk before the next
(microbatch_group_size_per_vp_stage, PP by default), x = 1 with overlap_moe_expert_parallel_comm, else 0. On stage 0
interleaving with G = PP holds 1 + (PP-1)/(PP*v) times what 1F1B holds. An activation is in flight from its forward pass
to the end of the backward pass (zb-h1: of the weight gradient's) that frees it. The idle time of zb-h1 holds for M >= PP
and t_w <= t_f, t_b; the others always, interleaved also with larger groups and with micro-batches left over.

Time: t_f, t_b, t_w are the forward pass, the gradient of the input and the gradient of the weights of one micro-batch
through all chunks of a stage, the same for every stage and chunk; messages take no time. The window is the pipeline's,
from the earliest start to the latest end of any pass on any stage, and the same for every stage; so is the idle time.
"Of total" is idle / window, "of ideal" is idle / busy: 27.3 % and 37.5 % for PP = 4, M = 8, the same schedule.

gpipe and zb-h1 are no schedules of megatron-core. GPipe runs the backward passes in the opposite order of the forward
ones. ZB-H1 puts stage p's gradients of weights p micro-batches behind those of its inputs.

Sources: megatron-core 0.16.1, pipeline_parallel/schedules.py: get_pp_rank_microbatches, get_schedule_table,
forward_backward_pipelining_with_interleaving and ..._without_interleaving; p2p_communication.py. ZB-H1: Qi et al.,
arXiv 2401.10241. Reference sections 2.4 and 5, seed chapter 2 with errata E9, E10, E13, E29 and E31.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from traceanalyzer import schedule_order
from traceanalyzer.errors import JobError
from traceanalyzer.expect import versions
from traceanalyzer.expect.formula import parse
from traceanalyzer.job import Job
from traceanalyzer.schedule_order import (
    KINDS,
    Action,
    Content,
    Exchange,
    Kind,
    Message,
    Schedule,
    actions,
    check,
    exchanges,
    order_of_passes,
    program,
    warm_up,
)

__all__ = [
    "KINDS",
    "MESSAGES",
    "Action",
    "Bubble",
    "Content",
    "Exchange",
    "Kind",
    "Message",
    "Schedule",
    "Time",
    "actions",
    "bubble",
    "exchanges",
    "in_flight",
    "message_counts",
    "of_job",
    "on_default_group",
    "order_of_passes",
    "peak_in_flight",
    "peak_in_microbatches",
    "program",
    "warm_up",
]

Time = int | Fraction

MESSAGES: Mapping[tuple[str, Content, str], str] = {
    ("send", "activation", "next"): "M * (v - last)",
    ("recv", "activation", "previous"): "M * (v - first)",
    ("send", "gradient", "previous"): "M * (v - first)",
    ("recv", "gradient", "next"): "M * (v - last)",
}
"""Messages of a stage in one step by operation, content and neighbour: formulas over M, v, first and last, which are 1
on that stage and 0 elsewhere. Nothing goes into the first chunk of the first stage or out of the last of the last."""


# -- counts ----------------------------------------------------------------------------------------------------------


def message_counts(schedule: Schedule, stage: int) -> dict[tuple[str, Content, str], int]:
    """Messages of ``stage`` in one step by (operation, content, neighbour), from MESSAGES; none with a count of 0."""
    check(schedule, stage)
    symbols = {
        "M": schedule.microbatches,
        "v": schedule.chunks,
        "first": int(stage == 0),
        "last": int(stage == schedule.stages - 1),
    }
    found = {
        key: parse(text).whole(symbols)
        for key, text in MESSAGES.items()
        if key[1] == "activation" or not schedule.forward_only
    }
    return {key: count for key, count in found.items() if count}


def on_default_group(*, stages: int, stage: int, op: str, batched: bool) -> bool:
    """Whether ``stage`` makes its messages of one operation over the default process group, not the pipeline's.

    With two stages and exchanges that are not batched, what odd stages send does, so that both directions can overlap:
    an even stage receives on the default group and an odd one sends on it (p2p_communication.py: _p2p_ops). Holds since
    0.8 for a backend other than ucc.
    """
    return stages == 2 and not batched and (op == "recv") == (stage % 2 == 0)


# -- memory ----------------------------------------------------------------------------------------------------------


def in_flight(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """Activations (of one chunk each) that ``stage`` holds after each of its passes, counted from their order.

    Without backward passes nothing is held: all 0.
    """
    if schedule.forward_only:
        return (0,) * schedule.passes
    frees = "W" if schedule.kind == "zb-h1" else "B"
    held, found = 0, []
    for action in actions(schedule, stage):
        held += (action.kind == "F") - (action.kind == frees)
        found.append(held)
    return tuple(found)


def peak_in_flight(schedule: Schedule, stage: int) -> int:
    """The most activations (of one chunk each) that ``stage`` holds at once, by the closed formula."""
    check(schedule, stage)
    if schedule.forward_only:
        return 0
    if schedule.kind == "zb-h1":
        return min(schedule.microbatches, schedule.stages)
    return min(schedule.passes, warm_up(schedule, stage) + 1)


def peak_in_microbatches(schedule: Schedule, stage: int) -> Fraction:
    """peak_in_flight in micro-batches through the whole stage, its chunks taken as equal parts."""
    return Fraction(peak_in_flight(schedule, stage), schedule.chunks)


# -- time ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bubble:
    """Time of one stage in the pipeline's window, in the unit of the times given. busy: its passes. idle: the rest."""

    idle: Fraction
    busy: Fraction

    @property
    def total(self) -> Fraction:
        """The pipeline's window."""
        return self.idle + self.busy

    @property
    def of_total(self) -> Fraction:
        """idle / window, the "bubble fraction"."""
        return self.idle / self.total

    @property
    def of_ideal(self) -> Fraction:
        """idle / busy, the form of the zero-bubble papers."""
        return self.idle / self.busy


def bubble(schedule: Schedule, t_f: Time, t_b: Time, t_w: Time = 0) -> Bubble:
    """Idle and busy time of every stage by the closed formula of the table above.

    t_f, t_b, t_w: forward, backward for the input, backward for the weights of one micro-batch through a whole stage,
    exact numbers of any one unit; a backward pass that is not split takes t_b + t_w. Interleaved: holds for every group
    size, with micro-batches left over and with merged passes. Raises JobError where no closed formula holds: zb-h1 with
    fewer than PP micro-batches or with t_w > min(t_f, t_b); and for times that cannot be.
    """
    times = [Fraction(time) for time in (t_f, t_b, t_w)]
    if times[0] <= 0 or min(times[1:]) < 0:
        raise JobError(f"t_f={t_f}, t_b={t_b}, t_w={t_w}: t_f must be positive, none may be negative")
    forward, for_input, for_weights = times
    others = schedule.stages - 1
    if schedule.forward_only:
        for_input = for_weights = Fraction(0)
    idle = others * (forward + for_input + for_weights)
    if schedule.kind == "interleaved":
        idle /= schedule.chunks
    elif schedule.kind == "zb-h1" and not schedule.forward_only:
        if schedule.microbatches < schedule.stages or for_weights > min(forward, for_input):
            raise JobError(
                f"zb-h1 with M={schedule.microbatches}, PP={schedule.stages}, t_f={t_f}, t_b={t_b}, t_w={t_w}: the "
                f"formula needs M >= PP and t_w <= t_f, t_b"
            )
        idle = others * (forward + for_input - for_weights)
    return Bubble(idle, schedule.microbatches * (forward + for_input + for_weights))


# -- from a job ------------------------------------------------------------------------------------------------------


def of_job(job: Job, release: versions.Release) -> Schedule | None:
    """The schedule that megatron-core runs for a job; None with one pipeline stage.

    Raises JobError if the job does not say its micro-batches, or if its numbers make no schedule.
    """
    return schedule_order.of_job(job, warm_up_at_pp=not versions.since(release, "warm-up also at M = PP"))
