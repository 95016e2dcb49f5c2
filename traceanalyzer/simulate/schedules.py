"""Pipeline orders: what one stage does in a step, pass by pass and message by message.

Written after the functions that Megatron runs (megatron-core 0.16.1, pipeline_parallel/schedules.py and
p2p_communication.py): ``order_of`` goes through a schedule as its code does, with the same handles and waits, and says
every pass, exchange, wait and launch of a gradient or parameter exchange. Two orders that Megatron has not: "gpipe" (all
forward passes, then the backward passes from the last micro-batch to the first) and "zb-h1" (Qi et al., arXiv 2401.10241:
1F1B with the gradient of the weights split off and put off by as many micro-batches as the stage's number, so that no
stage holds more than in 1F1B; messages are single, and sends are waited for at the end).

Nothing here knows what a pass computes or how large a message is.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from traceanalyzer.errors import JobError

Kind: TypeAlias = Literal["none", "1f1b", "interleaved", "gpipe", "zb-h1"]
KINDS: tuple[Kind, ...] = ("none", "1f1b", "interleaved", "gpipe", "zb-h1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The numbers that fix an order.

    kind: "none" for one stage. stages, microbatches, chunks: PP, M, v. group: micro-batches that go through a chunk before
    the next chunk starts; 0: stages. batched: the messages of an exchange are one batch_isend_irecv, and the host waits
    for the device after it. overlapped: interleaved exchanges are waited for where their tensor is needed (overlap_p2p_comm).
    early: then also in warm-up and cool-down (overlap_p2p_comm_warmup_flush). combined: one more pass of warm-up
    (overlap_moe_expert_parallel_comm). all_warm_up: no backward pass before the last forward pass.
    """

    kind: Kind
    stages: int = 1
    microbatches: int
    chunks: int = 1
    group: int = 0
    forward_only: bool = False
    batched: bool = True
    overlapped: bool = False
    early: bool = False
    combined: bool = False
    all_warm_up: bool = False


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a micro-batch through a chunk: F, B, or W where the weights' gradient is a pass of its own.

    last: the last micro-batch of the step for its chunk.
    """

    kind: Literal["F", "B", "W"]
    microbatch: int
    chunk: int
    last: bool


@dataclass(frozen=True, slots=True)
class Message:
    """One tensor to or from a neighbour. ``chunk``: of this stage, which made it or will use it. ``handle``: a number for
    Await; None: waited for with its exchange. ``peer``: the other stage."""

    op: Literal["send", "recv"]
    content: Literal["activation", "gradient"]
    microbatch: int
    chunk: int
    toward: Literal["next", "previous"]
    peer: int
    handle: int | None = None


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages started together, in the order of the code. batched: as one kernel, after which the host waits for the
    device; else each on its own."""

    messages: tuple[Message, ...]
    batched: bool


@dataclass(frozen=True, slots=True)
class Await:
    """Nothing more is computed before the message with this handle is there or gone."""

    handle: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Where the schedule itself starts the gradient or parameter exchange of a chunk, if it was told to
    (grad_sync_func, param_sync_func), and not the passes."""

    what: Literal["gradients", "parameters"]
    chunk: int


Event: TypeAlias = Pass | Exchange | Await | Launch


def order_of(order: Order, stage: int) -> tuple[Event, ...]:
    """Everything a stage does in one step. Raises JobError for numbers that make no schedule."""
    _check(order)
    if not 0 <= stage < order.stages:
        raise JobError(f"stage {stage}: the schedule has stages 0 to {order.stages - 1}")
    walk = _Stage(order, stage)
    steps = {
        "none": walk.alone,
        "1f1b": walk.one_forward_one_backward,
        "interleaved": walk.interleaved,
        "gpipe": walk.all_then_all,
        "zb-h1": walk.zero_bubble,
    }[order.kind]
    return tuple(steps())


def passes(order: Order, stage: int) -> tuple[Pass, ...]:
    """The passes of a stage, in order."""
    return tuple(event for event in order_of(order, stage) if isinstance(event, Pass))


def _check(order: Order) -> None:
    if order.kind not in KINDS:
        raise JobError(f"schedule {order.kind!r}: must be one of {', '.join(KINDS)}")
    for name in ("stages", "microbatches", "chunks"):
        if getattr(order, name) < 1:
            raise JobError(f"schedule: {name}={getattr(order, name)}, must be at least 1")
    if order.kind != "interleaved":
        if order.chunks > 1:
            raise JobError(f"schedule {order.kind} with {order.chunks} chunks: only 'interleaved' has more than 1")
        if order.kind == "none" and order.stages > 1:
            raise JobError(f"schedule none with {order.stages} stages: it is for 1")
        return
    if order.stages < 2:
        raise JobError("schedule interleaved with 1 stage: it needs at least 2")
    group = order.group or order.stages
    if not order.stages <= group <= order.microbatches:
        raise JobError(
            f"microbatch_group_size_per_vp_stage={group}: must be from pipeline_model_parallel_size={order.stages} to "
            f"num_microbatches={order.microbatches}"
        )
    if 0 < order.microbatches % group < order.stages:
        raise JobError(
            f"num_microbatches={order.microbatches} leaves {order.microbatches % group} over groups of {group}: must be 0 "
            f"or at least pipeline_model_parallel_size={order.stages}"
        )
    if order.batched and order.overlapped:
        raise JobError("overlap_p2p_comm and batch_p2p_comm: at most one of them")
    if order.early and not order.overlapped:
        raise JobError("overlap_p2p_comm_warmup_flush needs overlap_p2p_comm")


Place: TypeAlias = tuple[int, int]
"""Micro-batch and chunk."""


class _Stage:
    """One stage going through a schedule."""

    def __init__(self, order: Order, stage: int) -> None:
        self.order = order
        self.stage = stage
        self.first = stage == 0
        self.final = stage == order.stages - 1
        self.handles = 0
        # zb-h1 has single messages, as sends that are waited for would wait for each other.
        self.batched = order.batched and order.kind != "zb-h1"

    def turn(self, kind: Literal["F", "B", "W"], microbatch: int, chunk: int = 0) -> Pass:
        return Pass(kind, microbatch, chunk, microbatch == self.order.microbatches - 1)

    # -- exchanges

    def exchange(
        self,
        *,
        send_next: Place | None = None,
        send_prev: Place | None = None,
        recv_prev: Place | None = None,
        recv_next: Place | None = None,
        wait: bool = True,
    ) -> Generator[Event, None, dict[str, int]]:
        """P2PCommunicator._communicate: the messages, and the waits if they are waited for here.

        Gives the handles of the messages that were not, by name, as the generator's return value.
        """
        stages, stage = self.order.stages, self.stage
        after, before = (stage + 1) % stages, (stage - 1) % stages
        places = {"send_next": send_next, "send_prev": send_prev, "recv_prev": recv_prev, "recv_next": recv_next}
        if self.batched:
            names = ("send_prev", "recv_prev", "send_next", "recv_next")
        elif stage % 2 == 0:
            names = ("send_next", "recv_prev", "send_prev", "recv_next")
        else:
            names = ("recv_prev", "send_next", "recv_next", "send_prev")
        messages: list[Message] = []
        open_handles: dict[str, int] = {}
        for name in names:
            place = places[name]
            if place is None:
                continue
            handle = None
            if not self.batched:
                handle = open_handles[name] = self.handles
                self.handles += 1
            toward: Literal["next", "previous"] = "next" if name.endswith("next") else "previous"
            messages.append(
                Message(
                    "send" if name.startswith("send") else "recv",
                    "activation" if name in ("send_next", "recv_prev") else "gradient",
                    *place,
                    toward,
                    after if toward == "next" else before,
                    handle,
                )
            )
        if messages:
            yield Exchange(tuple(messages), self.batched)
        if wait:
            for handle in open_handles.values():
                yield Await(handle)
            return {}
        return open_handles

    def recv_forward(self, microbatch: int) -> Iterator[Event]:
        return self.exchange(recv_prev=None if self.first else (microbatch, 0))

    def send_forward(self, microbatch: int) -> Iterator[Event]:
        return self.exchange(send_next=None if self.final else (microbatch, 0))

    def recv_backward(self, microbatch: int) -> Iterator[Event]:
        return self.exchange(recv_next=None if self.final else (microbatch, 0))

    def send_backward(self, microbatch: int) -> Iterator[Event]:
        return self.exchange(send_prev=None if self.first else (microbatch, 0))

    # -- schedules of one chunk

    def alone(self) -> Iterator[Event]:
        for microbatch in range(self.order.microbatches):
            yield self.turn("F", microbatch)
            if not self.order.forward_only:
                yield self.turn("B", microbatch)

    def one_forward_one_backward(self) -> Iterator[Event]:
        total = self.order.microbatches
        warm_up = min(self.order.stages - self.stage - 1, total)
        rest = total - warm_up
        for microbatch in range(warm_up):
            yield from self.recv_forward(microbatch)
            yield self.turn("F", microbatch)
            yield from self.send_forward(microbatch)
        if rest:
            yield from self.recv_forward(warm_up)
        for index in range(rest):
            forward, backward, last = warm_up + index, index, index == rest - 1
            yield self.turn("F", forward)
            if self.order.forward_only:
                yield from self.send_forward(forward)
                if not last:
                    yield from self.recv_forward(forward + 1)
                continue
            if not self.final:
                yield from self.exchange(send_next=(forward, 0), recv_next=(backward, 0))
            yield self.turn("B", backward)
            if last:
                yield from self.send_backward(backward)
            elif not self.first:
                yield from self.exchange(send_prev=(backward, 0), recv_prev=(forward + 1, 0))
        if self.order.forward_only:
            return
        for index in range(warm_up):
            yield from self.recv_backward(rest + index)
            yield self.turn("B", rest + index)
            yield from self.send_backward(rest + index)
        yield Launch("gradients", 0)

    def all_then_all(self) -> Iterator[Event]:
        total = self.order.microbatches
        for microbatch in range(total):
            yield from self.recv_forward(microbatch)
            yield self.turn("F", microbatch)
            yield from self.send_forward(microbatch)
        if self.order.forward_only:
            return
        for microbatch in reversed(range(total)):
            yield from self.recv_backward(microbatch)
            yield Pass("B", microbatch, 0, microbatch == 0)
            yield from self.send_backward(microbatch)
        yield Launch("gradients", 0)

    def zero_bubble(self) -> Iterator[Event]:
        total = self.order.microbatches
        warm_up = total if self.order.forward_only else min(self.order.stages - self.stage - 1, total)
        forwards = iter(range(total))
        weights = 0
        sent: list[int] = []

        def forward() -> Iterator[Event]:
            microbatch = next(forwards, None)
            if microbatch is not None:
                yield from self.recv_forward(microbatch)
                yield self.turn("F", microbatch)
                handles = yield from self.exchange(send_next=None if self.final else (microbatch, 0), wait=False)
                sent.extend(handles.values())

        for _ in range(warm_up):
            yield from forward()
        if self.order.forward_only:
            yield from map(Await, sent)
            return
        for backward in range(total):
            yield from forward()
            yield from self.recv_backward(backward)
            yield self.turn("B", backward)
            handles = yield from self.exchange(send_prev=None if self.first else (backward, 0), wait=False)
            sent += handles.values()
            if backward >= self.stage:
                yield self.turn("W", weights)
                weights += 1
        for microbatch in range(weights, total):
            yield self.turn("W", microbatch)
        yield from map(Await, sent)
        yield Launch("gradients", 0)

    # -- interleaved

    def table(self) -> list[Place]:
        """get_schedule_table: micro-batch and chunk of each forward pass."""
        order, found = self.order, []
        group = order.group or order.stages
        for start in range(0, order.microbatches, group):
            for chunk in range(order.chunks):
                found += [(one, chunk) for one in range(start, min(start + group, order.microbatches))]
        return found

    def interleaved(self) -> Iterator[Event]:
        order = self.order
        chunks, stages, stage = order.chunks, order.stages, self.stage
        top = chunks - 1
        forward_table = self.table()
        backward_table = [(microbatch, top - chunk) for microbatch, chunk in forward_table]
        total = len(forward_table)
        if order.forward_only or order.all_warm_up:
            warm_up = total
        else:
            warm_up = (stages - stage - 1) * 2 + top * (order.group or stages) + order.combined
        warm_up = min(warm_up, total)
        all_in_warm_up = warm_up == total and not order.forward_only
        rest = total - warm_up

        # Tensors arrive in the order in which passes need them.
        activations = iter([p for p in forward_table if not (self.first and p[1] == 0)])
        gradients = iter([p for p in backward_table if not (self.final and p[1] == top)])
        received: list[int] = []  # handles of receives of activations, oldest first
        received_gradients: list[int] = []
        sent: int | None = None
        sent_gradient: int | None = None
        launched: set[int] = set()

        def receives(index: int, forward: bool) -> bool:
            """recv_tensor_from_previous_stage: whether the neighbour sends something while pass ``index`` runs here."""
            leading, end = (self.first, top) if forward else (self.final, 0)
            if not leading:
                return True
            if index < stages - 1:
                return False
            at = forward_table[(index - (stages - 1)) % total][1]
            return (at if forward else top - at) != end

        def forward_pass(index: int) -> Iterator[Event]:
            ahead = index + stage
            if ahead < total and forward_table[ahead][0] == 0:
                chunk = forward_table[ahead][1] + 1
                if 1 < chunk < chunks:
                    yield Launch("parameters", chunk)
            yield self.turn("F", *forward_table[index])

        def backward_pass(index: int) -> Iterator[Event]:
            yield self.turn("B", *backward_table[index])
            behind = index - stage
            if behind >= 0 and forward_table[behind][0] == order.microbatches - 1:
                chunk = backward_table[behind][1]
                launched.add(chunk)
                yield Launch("gradients", chunk)

        def output(index: int) -> Place | None:
            """What a forward pass sends; nothing leaves the last chunk of the last stage."""
            return None if self.final and forward_table[index][1] == top else forward_table[index]

        def input_gradient(index: int) -> Place | None:
            return None if self.first and backward_table[index][1] == 0 else backward_table[index]

        def keep(handles: dict[str, int]) -> Iterator[Event]:
            """After an exchange of activations that is not waited for: the send before it is."""
            nonlocal sent
            if sent is not None:
                yield Await(sent)
            sent = handles.get("send_next")
            if "recv_prev" in handles:
                received.append(handles["recv_prev"])

        def keep_gradients(handles: dict[str, int]) -> Iterator[Event]:
            nonlocal sent_gradient
            if sent_gradient is not None:
                yield Await(sent_gradient)
            sent_gradient = handles.get("send_prev")
            if "recv_next" in handles:
                received_gradients.append(handles["recv_next"])

        yield Launch("parameters", 0)
        yield Launch("parameters", 1)
        if not self.first:
            yield from self.exchange(recv_prev=next(activations))

        for k in range(warm_up):
            at_start = self.first and forward_table[k][1] == 0
            if order.early and not at_start and k:
                yield Await(received.pop(0))
            arrives = receives(k, True) and k != total - 1
            coming = next(activations) if arrives else None
            if order.early and not self.first:
                handles = yield from self.exchange(recv_prev=coming, wait=False)
                received += handles.values()
            yield from forward_pass(k)
            closing = k == warm_up - 1 and not order.forward_only and not all_in_warm_up
            if not order.early:
                if closing and not order.overlapped:
                    yield from self.exchange(
                        send_next=output(k), recv_prev=coming, recv_next=None if self.final else next(gradients)
                    )
                else:
                    yield from self.exchange(send_next=output(k), recv_prev=coming)
            else:
                prefetched = not self.first
                handles = yield from self.exchange(
                    send_next=output(k), recv_prev=None if prefetched else coming, wait=False
                )
                yield from keep(handles)
            if closing and order.overlapped:
                handles = yield from self.exchange(recv_next=None if self.final else next(gradients), wait=False)
                yield from keep_gradients(handles)

        for k in range(rest):
            ahead = k + warm_up
            goes_on = k != rest - 1
            if order.overlapped:
                needs_input = not (self.first and forward_table[ahead][1] == 0)
                needs_gradient = not (self.final and backward_table[k][1] == top)
                if received and needs_input:
                    yield Await(received.pop(0))
                if order.combined and received_gradients and needs_gradient:  # both passes run as one
                    yield Await(received_gradients.pop(0))
                yield from forward_pass(ahead)
                if order.combined:
                    yield from backward_pass(k)
                coming = next(activations) if receives(ahead, True) and goes_on else None
                handles = yield from self.exchange(send_next=output(ahead), recv_prev=coming, wait=False)
                yield from keep(handles)
                if not order.combined:
                    if received_gradients and needs_gradient:
                        yield Await(received_gradients.pop(0))
                    yield from backward_pass(k)
                arriving = next(gradients, None) if receives(k, False) else None
                handles = yield from self.exchange(send_prev=input_gradient(k), recv_next=arriving, wait=False)
                yield from keep_gradients(handles)
            else:
                yield from forward_pass(ahead)
                yield from backward_pass(k)
                coming = next(activations) if receives(ahead, True) and goes_on else None
                arriving = next(gradients, None) if receives(k, False) else None
                yield from self.exchange(
                    send_next=output(ahead), send_prev=input_gradient(k), recv_prev=coming, recv_next=arriving
                )
        if order.forward_only:
            return

        if all_in_warm_up and not self.final:
            yield from self.exchange(recv_next=next(gradients))
        for k in range(rest, total):
            at_end = self.final and backward_table[k][1] == top
            if received_gradients and not at_end and k:
                yield Await(received_gradients.pop(0))
            arrives = receives(k, False) and k != total - 1
            arriving = next(gradients) if arrives else None
            if order.early and not self.final:
                handles = yield from self.exchange(recv_next=arriving, wait=False)
                received_gradients += handles.values()
            yield from backward_pass(k)
            if not order.early:
                yield from self.exchange(send_prev=input_gradient(k), recv_next=arriving)
            else:
                handles = yield from self.exchange(
                    send_prev=input_gradient(k), recv_next=None if not self.final else arriving, wait=False
                )
                yield from keep_gradients(handles)
        if sent_gradient is not None:
            yield Await(sent_gradient)
        for chunk in range(chunks):
            if chunk not in launched:
                yield Launch("gradients", chunk)
