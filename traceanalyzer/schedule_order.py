"""The order of a pipeline schedule: which pass of which micro-batch and model chunk a stage does when, and its messages.

Pure functions of a Schedule, that is of a few whole numbers; counts, memory and time are in expect/schedule.py, whose table
says what the kinds are. Stages, micro-batches and model chunks count from 0.

Sources: megatron-core 0.16.1, pipeline_parallel/schedules.py: get_pp_rank_microbatches, get_schedule_table,
forward_backward_pipelining_with_interleaving and ..._without_interleaving; p2p_communication.py. ZB-H1: Qi et al.,
arXiv 2401.10241.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from traceanalyzer.errors import JobError

if TYPE_CHECKING:
    from traceanalyzer.job import Job

Kind = Literal["gpipe", "1f1b", "interleaved", "zb-h1"]
KINDS: tuple[Kind, ...] = ("gpipe", "1f1b", "interleaved", "zb-h1")
Content = Literal["activation", "gradient"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The numbers that fix a schedule.

    stages: PP, at least 1. microbatches: M. chunks: v, 1 unless interleaved. group: G, 0 for the default (stages).
    merged: in the steady state a forward and a backward pass run as one (overlap_moe_expert_parallel_comm), which takes
    one more pass of warm-up. all_warm_up: every forward pass before the first backward. forward_only: no backward pass.
    batched: each exchange is one batch_isend_irecv; else its messages are single isend and irecv. overlapped: of
    interleaved passes each is followed by an exchange of its own (overlap_p2p_comm), else a forward and a backward pass
    share one; None: overlapped unless batched. receive_early: outside the steady state a stage posts the next receive
    before it computes (overlap_p2p_comm_warmup_flush). Raises JobError for numbers that make no schedule.
    """

    kind: Kind
    stages: int
    microbatches: int
    chunks: int = 1
    group: int = 0
    merged: bool = False
    all_warm_up: bool = False
    forward_only: bool = False
    batched: bool = True
    overlapped: bool | None = None
    receive_early: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise JobError(f"schedule {self.kind!r}: must be one of {', '.join(KINDS)}")
        for name in ("stages", "microbatches", "chunks"):
            if getattr(self, name) < 1:
                raise JobError(f"schedule: {name}={getattr(self, name)}, must be at least 1")
        if self.group == 0:
            object.__setattr__(self, "group", self.stages)
        if self.overlapped is None:
            object.__setattr__(self, "overlapped", self.kind == "interleaved" and not self.batched)
        if self.kind != "interleaved":
            if self.chunks > 1:
                raise JobError(
                    f"schedule {self.kind} with {self.chunks} model chunks: only 'interleaved' has more than 1"
                )
            return
        if self.stages < 2:
            raise JobError("schedule interleaved with 1 stage: interleaving needs at least 2")
        if not self.stages <= self.group <= self.microbatches:
            raise JobError(
                f"microbatch_group_size_per_vp_stage={self.group} must be between pipeline_model_parallel_size="
                f"{self.stages} and num_microbatches={self.microbatches}"
            )
        rest = self.microbatches % self.group
        if 0 < rest < self.stages:
            raise JobError(
                f"num_microbatches={self.microbatches} leaves {rest} over microbatch_group_size_per_vp_stage="
                f"{self.group}: it must be 0 or at least pipeline_model_parallel_size={self.stages}"
            )
        if self.batched and self.overlapped:
            raise JobError("overlap_p2p_comm and batch_p2p_comm: at most one of them")
        if self.receive_early and not self.overlapped:
            raise JobError("overlap_p2p_comm_warmup_flush needs overlap_p2p_comm")

    @property
    def passes(self) -> int:
        """Forward passes of a stage in one step: chunks times micro-batches."""
        return self.chunks * self.microbatches


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through one model chunk: "F", "B" or, with split backward (zb-h1), "W".

    "B" is the whole backward pass unless the schedule splits it; then it is the gradient of the input and "W" that of
    the weights.
    """

    kind: Literal["F", "B", "W"]
    microbatch: int
    chunk: int


@dataclass(frozen=True)
class Message:
    """One tensor to or from a neighbour. chunk: this stage's chunk that made it (send) or will use it (recv)."""

    op: Literal["send", "recv"]
    content: Content
    microbatch: int
    chunk: int
    toward: Literal["next", "previous"]
    peer: int


@dataclass(frozen=True)
class Exchange:
    """Messages that are started together, in the order in which the code lists them; at least one."""

    messages: tuple[Message, ...]
    batched: bool


def check(schedule: Schedule, stage: int) -> None:
    """Raises JobError for a stage that the schedule does not have."""
    if not 0 <= stage < schedule.stages:
        raise JobError(f"stage {stage}: the schedule has stages 0 to {schedule.stages - 1}")


def warm_up(schedule: Schedule, stage: int) -> int:
    """Forward passes (of one chunk each) of ``stage`` before those that alternate with backward passes.

    Raises JobError for a stage that does not exist, like every function here that takes one.
    """
    check(schedule, stage)
    behind = schedule.stages - 1 - stage
    if schedule.kind == "gpipe" or schedule.forward_only or schedule.all_warm_up:
        return schedule.passes
    if schedule.kind == "interleaved":
        wanted = 2 * behind + (schedule.chunks - 1) * schedule.group + schedule.merged
        return min(schedule.passes, wanted)
    return min(schedule.microbatches, behind)


# -- order -----------------------------------------------------------------------------------------------------------


def order_of_passes(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """(micro-batch, chunk) of every forward pass of a stage, in order; all stages have the same.

    Backward passes have the same micro-batches and the chunks counted from the end. Interleaved: ``group``
    micro-batches through the first chunk, then through the next, and so on; the last group is what remains.
    """
    if schedule.kind != "interleaved":
        return tuple((microbatch, 0) for microbatch in range(schedule.microbatches))
    return tuple(
        (microbatch, chunk)
        for start in range(0, schedule.microbatches, schedule.group)
        for chunk in range(schedule.chunks)
        for microbatch in range(start, min(start + schedule.group, schedule.microbatches))
    )


def program(schedule: Schedule, stage: int) -> tuple[Action | Exchange, ...]:
    """Everything ``stage`` does in one step, passes and exchanges in the order in which it starts them."""
    check(schedule, stage)
    steps = {"1f1b": _Stage.one_forward_one_backward, "interleaved": _Stage.interleaved}.get(
        schedule.kind, _Stage.one_by_one
    )
    return tuple(step for step in steps(_Stage(schedule, stage)) if step is not None)


def actions(schedule: Schedule, stage: int) -> tuple[Action, ...]:
    """The passes of ``stage`` in order."""
    return tuple(step for step in program(schedule, stage) if isinstance(step, Action))


def exchanges(schedule: Schedule, stage: int) -> tuple[Exchange, ...]:
    """The exchanges of ``stage`` in order."""
    return tuple(step for step in program(schedule, stage) if isinstance(step, Exchange))


_Steps = Iterator[Action | Exchange | None]


class _Stage:
    """One stage of a schedule while its program is written down."""

    def __init__(self, schedule: Schedule, stage: int) -> None:
        self.schedule, self.stage = schedule, stage
        self.table = order_of_passes(schedule)
        self.first, self.last = stage == 0, stage == schedule.stages - 1
        self.warm_up = warm_up(schedule, stage)
        self.remaining = schedule.passes - self.warm_up

    def forward(self, k: int) -> Action:
        """The k-th forward pass."""
        return Action("F", *self.table[k])

    def backward(self, k: int) -> Action:
        """The k-th backward pass."""
        microbatch, chunk = self.table[k]
        return Action("B", microbatch, self.schedule.chunks - 1 - chunk)

    def exchange(self, *messages: Message | None) -> Exchange | None:
        """What is left of these messages, in the order in which megatron-core lists them; None if nothing is."""
        batch = ("send previous", "recv previous", "send next", "recv next")
        even = ("send next", "recv previous", "send previous", "recv next")
        odd = ("recv previous", "send next", "recv next", "send previous")
        listed = batch if self.schedule.batched else even if self.stage % 2 == 0 else odd
        some = sorted((one for one in messages if one), key=lambda one: listed.index(f"{one.op} {one.toward}"))
        return Exchange(tuple(some), self.schedule.batched) if some else None

    def _message(self, op: Literal["send", "recv"], content: Content, microbatch: int, chunk: int) -> Message:
        toward: Literal["next", "previous"] = "next" if (op == "send") == (content == "activation") else "previous"
        peer = (self.stage + (1 if toward == "next" else -1)) % self.schedule.stages
        return Message(op, content, microbatch, chunk, toward, peer)

    def after(self, action: Action) -> Message | None:
        """What a pass sends; None at the ends of the model and after a pass for the weights."""
        if action.kind == "F" and not (self.last and action.chunk == self.schedule.chunks - 1):
            return self._message("send", "activation", action.microbatch, action.chunk)
        if action.kind == "B" and not (self.first and action.chunk == 0):
            return self._message("send", "gradient", action.microbatch, action.chunk)
        return None

    def before(self, action: Action) -> Message | None:
        """What a pass needs; None at the ends of the model and for a pass for the weights."""
        if action.kind == "F" and not (self.first and action.chunk == 0):
            return self._message("recv", "activation", action.microbatch, action.chunk)
        if action.kind == "B" and not (self.last and action.chunk == self.schedule.chunks - 1):
            return self._message("recv", "gradient", action.microbatch, action.chunk)
        return None

    # -- not in megatron-core: messages right before and after each pass ---------------------------------------------

    def one_by_one(self) -> _Steps:
        for action in self._gpipe() if self.schedule.kind == "gpipe" else self._zero_bubble():
            yield self.exchange(self.before(action))
            yield action
            yield self.exchange(self.after(action))

    def _gpipe(self) -> Iterator[Action]:
        passes = range(self.schedule.passes)
        yield from (self.forward(k) for k in passes)
        if not self.schedule.forward_only:
            yield from (self.backward(k) for k in reversed(passes))

    def _zero_bubble(self) -> Iterator[Action]:
        yield from (self.forward(k) for k in range(self.warm_up))
        if self.schedule.forward_only:
            return
        waiting: deque[Action] = deque()
        for k in range(self.schedule.passes):
            if k < self.remaining:
                yield self.forward(k + self.warm_up)
            done = self.backward(k)
            yield done
            waiting.append(Action("W", done.microbatch, done.chunk))
            if k >= self.stage:
                yield waiting.popleft()
        yield from waiting

    # -- 1F1B (forward_backward_pipelining_without_interleaving) -----------------------------------------------------

    def one_forward_one_backward(self) -> _Steps:
        # Without backward passes the code keeps its warm-up, which changes nothing about the order of messages.
        for k in range(self.warm_up):
            yield self.exchange(self.before(self.forward(k)))
            yield self.forward(k)
            yield self.exchange(self.after(self.forward(k)))
        if self.schedule.forward_only:
            return
        if self.remaining:
            yield self.exchange(self.before(self.forward(self.warm_up)))
        for k in range(self.remaining):
            ahead, done = self.forward(k + self.warm_up), self.backward(k)
            yield ahead
            yield self.exchange(self.after(ahead), self.before(done))
            yield done
            more = k + 1 < self.remaining
            yield self.exchange(self.after(done), self.before(self.forward(k + 1 + self.warm_up)) if more else None)
        for k in range(self.remaining, self.schedule.passes):
            yield self.exchange(self.before(self.backward(k)))
            yield self.backward(k)
            yield self.exchange(self.after(self.backward(k)))

    # -- interleaved (forward_backward_pipelining_with_interleaving) -------------------------------------------------

    def _next_activation(self, k: int) -> Message | None:
        """What is received while or after the k-th forward pass: mostly the input of the next.

        The first stage follows the last, which is PP - 1 passes behind: it takes what that one finishes meanwhile.
        """
        if k == self.schedule.passes - 1:
            return None
        if not self.first:
            return self.before(self.forward(k + 1))
        there = k - (self.schedule.stages - 1)
        if there < 0 or self.table[there][1] == self.schedule.chunks - 1:
            return None
        microbatch, chunk = self.table[there]
        return self._message("recv", "activation", microbatch, chunk + 1)

    def _next_gradient(self, k: int) -> Message | None:
        """What is received while or after the k-th backward pass; the last stage follows the first."""
        if k == self.schedule.passes - 1:
            return None
        if not self.last:
            return self.before(self.backward(k + 1))
        there = k - (self.schedule.stages - 1)
        if there < 0 or self.backward(there).chunk == 0:
            return None
        done = self.backward(there)
        return self._message("recv", "gradient", done.microbatch, done.chunk - 1)

    def interleaved(self) -> _Steps:
        early = self.schedule.receive_early
        alternates = self.remaining > 0
        yield self.exchange(self.before(self.forward(0)))
        for k in range(self.warm_up):
            ahead, incoming = self.forward(k), self._next_activation(k)
            if early and not self.first:
                yield self.exchange(incoming)
                incoming = None
            yield ahead
            # The first gradient is asked for with the last exchange of the warm-up.
            gradient = self.before(self.backward(0)) if alternates and k == self.warm_up - 1 else None
            if self.schedule.overlapped:
                yield self.exchange(self.after(ahead), incoming)
                yield self.exchange(gradient)
            else:
                yield self.exchange(self.after(ahead), incoming, gradient)
        if self.schedule.forward_only:
            return
        for k in range(self.remaining):
            ahead, done = self.forward(k + self.warm_up), self.backward(k)
            forward_messages = self.after(ahead), self._next_activation(k + self.warm_up)
            backward_messages = self.after(done), self._next_gradient(k)
            yield ahead
            if not self.schedule.overlapped:
                yield done
                yield self.exchange(*forward_messages, *backward_messages)
            elif self.schedule.merged:
                yield done
                yield self.exchange(*forward_messages)
                yield self.exchange(*backward_messages)
            else:
                yield self.exchange(*forward_messages)
                yield done
                yield self.exchange(*backward_messages)
        if not alternates:
            yield self.exchange(self.before(self.backward(0)))
        for k in range(self.remaining, self.schedule.passes):
            done, incoming = self.backward(k), self._next_gradient(k)
            if early and not self.last:
                yield self.exchange(incoming)
                incoming = None
            yield done
            yield self.exchange(self.after(done), incoming)


# -- from a job ----------------------------------------------------------------------------------------------------------


def of_job(job: Job, *, warm_up_at_pp: bool) -> Schedule | None:
    """The schedule that megatron-core runs for a job; None with one pipeline stage.

    warm_up_at_pp: whether the release makes every interleaved forward pass a warm-up where there are as many micro-batches
    as stages. Raises JobError if the job does not say its micro-batches, or if its numbers make no schedule.
    """
    stages = job.pipeline_model_parallel_size
    if stages == 1:
        return None
    (microbatches,) = job.require("num_microbatches")
    batched = bool(job.batch_p2p_comm)
    chunks = job.virtual_pipeline_model_parallel_size
    if chunks is None:
        return Schedule(
            kind="1f1b", stages=stages, microbatches=microbatches, forward_only=job.forward_only, batched=batched
        )
    return Schedule(
        kind="interleaved",
        stages=stages,
        microbatches=microbatches,
        chunks=chunks,
        group=job.microbatch_group_size_per_vp_stage or stages,
        merged=job.overlap_moe_expert_parallel_comm,
        all_warm_up=microbatches == stages and warm_up_at_pp,
        forward_only=job.forward_only,
        batched=batched,
        overlapped=job.overlap_p2p_comm and not batched,
        receive_early=job.overlap_p2p_comm_warmup_flush,
    )
