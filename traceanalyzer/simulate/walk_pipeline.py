"""The messages between pipeline stages, and which order of passes a job has.

After megatron-core 0.16.1: pipeline_parallel/p2p_communication.py and schedules.py (get_forward_backward_func).
"""

from __future__ import annotations

from collections.abc import Callable

from traceanalyzer.simulate.program import Ints
from traceanalyzer.simulate.schedules import Await, Exchange, Message, Order
from traceanalyzer.simulate.walk_tape import Sizes, Tape


def order(sizes: Sizes) -> Order:
    """The order that Megatron runs for a job."""
    job = sizes.job
    (microbatches,) = job.require("num_microbatches")
    stages = job.pipeline_model_parallel_size
    if stages == 1:
        return Order(kind="none", microbatches=microbatches, forward_only=job.forward_only)
    batched = bool(job.batch_p2p_comm)
    chunks = job.virtual_pipeline_model_parallel_size
    if chunks is None:
        return Order(
            kind="1f1b", stages=stages, microbatches=microbatches, forward_only=job.forward_only, batched=batched
        )
    return Order(
        kind="interleaved",
        stages=stages,
        microbatches=microbatches,
        chunks=chunks,
        group=job.microbatch_group_size_per_vp_stage or stages,
        forward_only=job.forward_only,
        batched=batched,
        overlapped=job.overlap_p2p_comm and not batched,
        early=job.overlap_p2p_comm_warmup_flush,
        combined=job.overlap_moe_expert_parallel_comm,
    )


class Messenger:
    """Writes the exchanges of one stage. ``rank_at`` gives the global rank at a stage for each rank of the program.

    apart: sends and receives of a pair of ranks do not wait for each other.
    """

    def __init__(self, tape: Tape, stage: int, rank_at: Callable[[int], Ints], *, apart: bool = False) -> None:
        self.tape, self.stage, self.rank_at, self.apart = tape, stage, rank_at, apart
        self.elems = tape.sizes.shard * tape.sizes.hidden
        self.handles: dict[int, int | None] = {}

    def exchange(self, exchange: Exchange) -> None:
        tape = self.tape
        number = tape.new_coalesced() if exchange.batched else None
        varying = tape.sizes.job.variable_seq_lengths or tape.sizes.job.mtp_standalone
        if varying:
            self._shapes(exchange)
        for message in exchange.messages:
            gradient = message.content == "gradient"
            with tape.at("backward" if gradient else "forward", microbatch=message.microbatch, chunk=message.chunk):
                handle = tape.call(
                    self._role(message, exchange.batched),
                    message.op,
                    self.elems,
                    component="gradients" if gradient else "activations",
                    peer=self.rank_at(message.peer),
                    overlap=message.handle is not None,
                    coalesce=number,
                    stream=None if exchange.batched else self._stream(message),
                )
            if message.handle is not None:
                self.handles[message.handle] = handle
        if exchange.batched:
            tape.sync()  # batch_p2p_sync

    def wait(self, await_: Await) -> None:
        self.tape.wait(self.handles.pop(await_.handle))

    def _role(self, message: Message, batched: bool) -> str:
        """_p2p_ops: of two stages, what the odd one sends goes over the default group, so that both ways can overlap."""
        stages = self.tape.sizes.job.pipeline_model_parallel_size
        ucc = self.tape.sizes.job.pipeline_model_parallel_comm_backend == "ucc"
        if batched or stages != 2 or ucc:
            return "pp"
        sender = self.stage if message.op == "send" else message.peer
        return "world" if sender % 2 else "pp"

    def _stream(self, message: Message) -> str:
        """Single messages run on a stream of their pair of ranks."""
        role = self._role(message, False)
        return f"comm:{role} {message.op} {message.toward}" if self.apart else f"comm:{role} {message.toward}"

    def _shapes(self, exchange: Exchange) -> None:
        """_communicate_shapes: what follows is announced by its three sizes, always batched."""
        tape = self.tape
        number = tape.new_coalesced()
        order = {("send", "previous"): 0, ("recv", "previous"): 1, ("send", "next"): 2, ("recv", "next"): 3}
        for message in sorted(exchange.messages, key=lambda one: order[one.op, one.toward]):
            gradient = message.content == "gradient"
            with tape.at("backward" if gradient else "forward"):
                tape.call(
                    "pp",
                    message.op,
                    3,
                    dtype="int64",
                    component=f"shapes of {'gradients' if gradient else 'activations'}",
                    peer=self.rank_at(message.peer),
                    coalesce=number,
                )
        tape.sync()
