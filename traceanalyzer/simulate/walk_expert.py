"""Layers with experts: router, dispatcher, experts, shared expert; and where the router sends tokens.

After megatron-core 0.16.1, transformer/moe: moe_layer.py, router.py, token_dispatcher.py, experts.py, shared_experts.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from traceanalyzer.errors import JobError
from traceanalyzer.job import Job
from traceanalyzer.simulate import walk_kernels as kernels
from traceanalyzer.simulate.program import Ints, PerRank
from traceanalyzer.simulate.walk_tape import Sizes, Tape
from traceanalyzer.simulate.walk_tensor import add, feed_forward, norm


@dataclass(frozen=True)
class Draw:
    """One routing decision to be made: of all ranks of a stage, for one layer and micro-batch."""

    stage: int
    layer: int
    microbatch: int
    ranks: tuple[int, ...]
    tokens: int
    """Tokens that each rank routes."""
    experts: int
    topk: int
    random: np.random.Generator


Routing: TypeAlias = Literal["even", "random"] | Callable[[Draw], Ints]
"""Rows by rank and expert: as even as whole rows allow, drawn around that, or what a function says."""


def even(draw: Draw) -> Ints:
    """tokens x topk rows over the experts; where they do not divide, each rank gives the rest to other experts."""
    rows = draw.tokens * draw.topk
    ranks = np.arange(len(draw.ranks))[:, None]
    order = (np.arange(draw.experts)[None, :] - ranks) % draw.experts
    found: Ints = rows // draw.experts + (order < rows % draw.experts).astype(np.int64)
    return found


def scattered(draw: Draw) -> Ints:
    """Drawn: experts differ in popularity by a tenth or so, ranks by chance."""
    return drawn(draw, draw.random.dirichlet(np.full(draw.experts, 100.0)))


def drawn(draw: Draw, popularity: NDArray[np.float64]) -> Ints:
    """Drawn from the shares of the experts; no expert gets a token twice, and what is too much goes to the others."""
    rows = draw.tokens * draw.topk
    found: Ints = draw.random.multinomial(rows, popularity, size=len(draw.ranks)).astype(np.int64)
    while (over := np.maximum(found - draw.tokens, 0)).any():
        found -= over
        room = np.maximum(draw.tokens - found, 0)
        for rank in np.flatnonzero(over.sum(axis=1)):
            share = room[rank] / room[rank].sum()
            found[rank] += draw.random.multinomial(int(over[rank].sum()), share)
    return found


@dataclass
class Router:
    """Decides for a stage once for each layer and micro-batch, the same when it is asked again (recomputation)."""

    job: Job
    sizes: Sizes
    stage: int
    ranks: tuple[int, ...]
    """All ranks of the stage."""
    routing: Routing
    seed: int

    def __post_init__(self) -> None:
        self._decided: dict[tuple[int, int], Splits] = {}
        layout = self.job.layout
        place = {rank: index for index, rank in enumerate(self.ranks)}
        ep_groups = [layout.group_of("ep", rank) or (rank,) for rank in self.ranks]
        etp_groups = [layout.group_of("etp", rank) or (rank,) for rank in self.ranks]
        self.ep: Ints = np.array([[place[one] for one in group] for group in ep_groups], np.int64)
        self.etp: Ints = np.array([[place[one] for one in group] for group in etp_groups], np.int64)
        self.position: Ints = np.array(
            [group.index(rank) for group, rank in zip(ep_groups, self.ranks, strict=True)], np.int64
        )

    def rows(self, layer: int, microbatch: int) -> Splits:
        """Rows of every rank of the stage."""
        key = layer, microbatch
        if key not in self._decided:
            self._decided[key] = self._decide(layer, microbatch)
        return self._decided[key]

    def _decide(self, layer: int, microbatch: int) -> Splits:
        experts, topk = self.job.require("num_experts", "moe_router_topk")
        random = np.random.default_rng([self.seed, self.stage, layer, microbatch])
        draw = Draw(self.stage, layer, microbatch, self.ranks, self.sizes.shard, experts, topk, random)
        decide = {"even": even, "random": scattered}[self.routing] if isinstance(self.routing, str) else self.routing
        counts = np.asarray(decide(draw), np.int64)
        if counts.shape != (len(self.ranks), experts):
            raise JobError(f"routing gave {counts.shape}, not one row for each of {len(self.ranks)} ranks x {experts}")
        limit = capacity(self.job, draw.tokens)
        if limit is not None:
            counts = np.minimum(counts, limit)
        ep = self.ep.shape[1]
        sent = counts.reshape(len(self.ranks), ep, experts // ep).sum(axis=2)
        # What a peer sends here is what it has for the experts of this rank's place in their common group.
        received = sent[self.ep, self.position[:, None]]
        arrived = received.sum(axis=1)
        return Splits(sent, received, sent.sum(axis=1), arrived, arrived[self.etp].sum(axis=1))


def capacity(job: Job, tokens: int) -> int | None:
    """Rows that an expert takes from one rank at most; None: any number (moe_utils.py: get_capacity)."""
    factor = job.moe_expert_capacity_factor
    if factor is None or factor < 0:
        return None
    experts, topk = job.require("num_experts", "moe_router_topk")
    return math.ceil(tokens * topk / experts * factor)


@dataclass(frozen=True)
class Splits:
    """Rows of every rank: to and from each peer of the expert-parallel group, their sums, and what the ranks of the
    expert tensor-parallel group have together."""

    sent: Ints
    received: Ints
    routed: Ints
    arrived: Ints
    gathered: Ints
    _wide: dict[int, Splits] = field(default_factory=dict, repr=False, compare=False)

    def of(self, chosen: NDArray[np.intp] | slice) -> Splits:
        """Of some ranks."""
        return Splits(
            self.sent[chosen], self.received[chosen], self.routed[chosen], self.arrived[chosen], self.gathered[chosen]
        )

    def widened(self, width: int) -> Splits:
        """In elements, for rows of ``width``."""
        if width == 1:
            return self
        if width not in self._wide:
            self._wide[width] = Splits(
                self.sent * width,
                self.received * width,
                self.routed * width,
                self.arrived * width,
                self.gathered * width,
            )
        return self._wide[width]


def moe(tape: Tape) -> None:
    """The half of a layer that has experts."""
    job = tape.sizes.job
    norm(tape, "mlp norm")
    whole = job.moe_layer_recompute or (job.recompute_granularity == "selective" and "moe" in job.recompute_modules)
    if whole:
        tape.checkpoint(lambda: _layer(tape))
    else:
        _layer(tape)
    add(tape, None)


def _layer(tape: Tape) -> None:
    job = tape.sizes.job
    shared = job.moe_shared_expert_intermediate_size
    if shared and not job.moe_shared_expert_overlap:
        if job.recompute_granularity == "selective" and "shared_experts" in job.recompute_modules:
            tape.checkpoint(lambda: _shared(tape, shared))
        else:
            _shared(tape, shared)
    _router(tape)
    if job.moe_token_dispatcher_type == "allgather":
        _all_gather_dispatcher(tape)
    elif job.moe_token_dispatcher_type == "alltoall":
        _AllToAll(tape).run()
    else:
        _flex_dispatcher(tape)


def _shared(tape: Tape, width: int) -> None:
    feed_forward(tape, "shared expert", width, fc1=("shared fc1",), fc2="shared fc2")
    _shared_gate(tape)


def _shared_gate(tape: Tape) -> None:
    sizes = tape.sizes
    if sizes.job.moe_shared_expert_gate:
        elems = sizes.shard * sizes.hidden
        tape.uses("shared gate")
        kernels.elementwise(tape, "shared expert", elems, "sigmoid_gate")

        def backward() -> None:
            kernels.elementwise(tape, "shared expert", elems, "sigmoid_gate_backward")
            tape.ready("shared gate")

        tape.owes(backward)


def _router(tape: Tape) -> None:
    sizes, job = tape.sizes, tape.sizes.job
    (experts,) = job.require("num_experts")
    tape.uses("router")
    kernels.gemm(tape, "router", sizes.shard, sizes.hidden, experts)
    kernels.softmax(tape, "router", sizes.shard * experts)
    kernels.topk(tape, "router", sizes.shard, experts)
    if tape.grad:  # TopKRouter.routing: only where gradients are wanted
        wanted = auxiliary_losses(job)
        for kind, role in (("aux_loss", "tp_cp"), ("seq_aux_loss", "tp_cp"), ("global_aux_loss", "tp_dp_cp")):
            if kind in wanted and job.layout.group_size(role) > 1:
                elems = experts * sizes.batch if kind == "seq_aux_loss" else experts
                tape.call(role, "all_reduce", elems, dtype="int64", component="router.load")

    def backward() -> None:
        kernels.softmax(tape, "router", sizes.shard * experts, backward=True)
        kernels.gemm(tape, "router", sizes.shard, experts, sizes.hidden, "dgrad")
        kernels.gemm(tape, "router", sizes.shard, sizes.hidden, experts, "wgrad")
        tape.ready("router")

    tape.owes(backward)


def auxiliary_losses(job: Job) -> frozenset[str]:
    """Load-balancing losses that have a coefficient."""
    kinds = job.moe_router_load_balancing_type
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    coefficients = job.moe_aux_loss_coeff
    each = coefficients if isinstance(coefficients, tuple) else (coefficients,) * len(kinds)
    return frozenset(kind for kind, weight in zip(kinds, each, strict=False) if weight > 0)


def _expert_gemms(tape: Tape, rows: PerRank) -> None:
    """The experts of this rank on the rows that came."""
    sizes, job = tape.sizes, tape.sizes.job
    experts, width = job.require("num_experts", "moe_ffn_hidden_size")
    local = experts // job.expert_model_parallel_size
    width //= job.expert_tensor_parallel_size or 1
    factor = 2 if job.swiglu else 1
    tape.uses("expert fc1")
    kernels.grouped_gemm(tape, "experts", rows, sizes.hidden, factor * width, local)
    kernels.elementwise(tape, "experts", rows * width, "swiglu" if job.swiglu else "gelu", factor + 1)
    tape.uses("expert fc2")
    kernels.grouped_gemm(tape, "experts", rows, width, sizes.hidden, local)

    def backward() -> None:
        kernels.grouped_gemm(tape, "experts", rows, sizes.hidden, width, local, "dgrad")
        tape.weights(lambda: kernels.grouped_gemm(tape, "experts", rows, width, sizes.hidden, local, "wgrad"))
        tape.weights(lambda: tape.ready("expert fc2"))
        kernels.elementwise(tape, "experts", rows * width, "swiglu" if job.swiglu else "gelu", 2 * factor + 1)
        kernels.grouped_gemm(tape, "experts", rows, factor * width, sizes.hidden, local, "dgrad")
        tape.weights(lambda: kernels.grouped_gemm(tape, "experts", rows, sizes.hidden, factor * width, local, "wgrad"))
        tape.weights(lambda: tape.ready("expert fc1"))

    tape.owes(backward)


def _probability_type(tape: Tape) -> str:
    return {None: tape.sizes.dtype, "fp32": "float32", "fp64": "float64"}[tape.sizes.job.moe_router_dtype]


def _splits(tape: Tape) -> Splits:
    assert tape.router is not None
    assert tape.layer is not None
    assert tape.microbatch is not None
    return tape.router(tape.layer, tape.microbatch)


def _all_gather_dispatcher(tape: Tape) -> None:
    """Every rank of ETP x EP gets all tokens, and sums what the experts made of them."""
    sizes, job = tape.sizes, tape.sizes.job
    (experts,) = job.require("num_experts")
    ranks = job.layout.group_size("tp_ep")
    probability = _probability_type(tape)
    hidden, chances = sizes.shard * sizes.hidden, sizes.shard * experts
    if ranks > 1:
        tape.call("tp_ep", "all_gather", chances, chances * ranks, dtype="bool", component="experts.routing map")
        tape.call(
            "tp_ep",
            "all_gather",
            chances,
            chances * ranks,
            dtype=probability,
            component="experts.gather probabilities",
        )
        tape.call("tp_ep", "all_gather", hidden, hidden * ranks, component="experts.gather")

        def backward() -> None:
            tape.call("tp_ep", "reduce_scatter", hidden * ranks, hidden, component="experts.gather")
            tape.call(
                "tp_ep",
                "reduce_scatter",
                chances * ranks,
                chances,
                dtype=probability,
                component="experts.gather probabilities",
            )

        tape.owes(backward)
    rows = _splits(tape).gathered
    tape.sync()  # the host needs the number of rows
    kernels.permute(tape, "experts", rows * sizes.hidden)
    tape.owes(lambda: kernels.permute(tape, "experts", rows * sizes.hidden, back=True))
    _expert_gemms(tape, rows)
    kernels.permute(tape, "experts", rows * sizes.hidden, back=True)
    tape.owes(lambda: kernels.permute(tape, "experts", rows * sizes.hidden))
    if ranks > 1:
        tape.call("tp_ep", "reduce_scatter", hidden * ranks, hidden, dtype=probability, component="experts.scatter")
        tape.owes(
            lambda: tape.call(
                "tp_ep", "all_gather", hidden, hidden * ranks, dtype=probability, component="experts.scatter"
            )
        )


def _flex_dispatcher(tape: Tape) -> None:
    """DeepEP over ETP x EP (fused_a2a.py): kernels of its own, no call of torch.distributed.

    Bytes are one copy for each row; DeepEP sends fewer where two experts of a token are on one rank.
    """
    sizes, job = tape.sizes, tape.sizes.job
    rows = _splits(tape)
    moved = rows.routed * sizes.hidden * sizes.itemsize
    nodes = job.layout.group_size("tp_ep") > 8

    def kernel(component: str, word: str, size: PerRank = 0) -> None:
        kernels.deep_ep(tape, f"experts.{component}", word, size, nodes=nodes)

    kernel("dispatch", "get_dispatch_layout")
    kernel("dispatch", "notify_dispatch")
    kernel("dispatch", "dispatch", moved)
    tape.sync()  # the host waits for the number of rows

    def dispatch_backward() -> None:
        kernel("dispatch", "cached_notify_combine")
        kernel("dispatch", "combine", moved)

    tape.owes(dispatch_backward)
    kernels.permute(tape, "experts", rows.gathered * sizes.hidden)
    tape.owes(lambda: kernels.permute(tape, "experts", rows.gathered * sizes.hidden, back=True))
    _expert_gemms(tape, rows.gathered)
    kernels.permute(tape, "experts", rows.gathered * sizes.hidden, back=True)
    tape.owes(lambda: kernels.permute(tape, "experts", rows.gathered * sizes.hidden))
    kernel("combine", "cached_notify_combine")
    kernel("combine", "combine", moved)

    def combine_backward() -> None:
        kernel("combine", "cached_notify_dispatch")
        kernel("combine", "dispatch", moved)

    tape.owes(combine_backward)


class _AllToAll:
    """MoEAlltoAllTokenDispatcher around the experts, for one layer and micro-batch."""

    def __init__(self, tape: Tape) -> None:
        sizes, job = tape.sizes, tape.sizes.job
        self.tape, self.sizes, self.job = tape, sizes, job
        self.hidden = sizes.hidden
        self.ep = job.expert_model_parallel_size
        self.etp = job.expert_tensor_parallel_size or 1
        self.probability = _probability_type(tape)
        self.padded = job.moe_pad_expert_input_to_capacity
        (self.experts,) = job.require("num_experts")
        self.rows = _splits(tape)
        self.shared = job.moe_shared_expert_intermediate_size if job.moe_shared_expert_overlap else None
        if self.padded:
            limit = capacity(job, sizes.shard) or 0
            each = np.full_like(self.rows.sent, limit * self.experts // self.ep)
            total = each.sum(axis=1)
            self.rows = Splits(each, each, total, total, total * self.etp)

    def run(self) -> None:
        tape, hidden = self.tape, self.hidden
        if not self.padded and self.ep * self.etp > 1:
            total = self.experts * self.ep * self.etp
            tape.call("tp_ep", "all_gather", self.experts, total, dtype="int64", component="experts.counts")
        if self.shared:
            self.shared_before()
        if not self.padded:
            tape.sync()
        kernels.permute(tape, "experts", self.rows.routed * hidden)
        tape.owes(lambda: kernels.permute(tape, "experts", self.rows.routed * hidden, back=True))
        self.exchange("experts.dispatch", hidden, self.sizes.dtype)
        self.exchange("experts.dispatch probabilities", 1, self.probability)
        if self.shared:
            self.shared_middle(self.shared)
        if self.etp > 1:
            self.gather("experts.gather", hidden, self.sizes.dtype)
            self.gather("experts.gather probabilities", 1, self.probability)
        local = self.experts // self.ep
        if local > 1:
            kernels.permute(tape, "experts", self.rows.gathered * hidden)
            tape.owes(lambda: kernels.permute(tape, "experts", self.rows.gathered * hidden, back=True))
        _expert_gemms(tape, self.rows.gathered)
        if local > 1:
            kernels.permute(tape, "experts", self.rows.gathered * hidden, back=True)
            tape.owes(lambda: kernels.permute(tape, "experts", self.rows.gathered * hidden))
        if self.etp > 1:
            self.scatter()
        self.exchange("experts.combine", hidden, self.sizes.dtype, back=True)
        if self.shared:
            self.shared_after(self.shared)
        kernels.permute(tape, "experts", self.rows.routed * hidden, back=True)
        tape.owes(lambda: kernels.permute(tape, "experts", self.rows.routed * hidden))

    def exchange(self, component: str, width: int, dtype: str, *, back: bool = False) -> None:
        """Rows to the ranks of their experts, or back; the gradients go the other way."""
        if self.ep == 1:
            return

        def send(back: bool) -> None:
            rows = self.rows.widened(width)
            ends = (rows.arrived, rows.routed) if back else (rows.routed, rows.arrived)
            splits = (rows.received, rows.sent) if back else (rows.sent, rows.received)
            uneven = not self.padded
            self.tape.call(
                "ep",
                "all_to_all",
                *ends,
                dtype=dtype,
                component=component,
                in_splits=splits[0] if uneven else None,
                out_splits=splits[1] if uneven else None,
                row_elems=width,
            )

        send(back)
        self.tape.owes(lambda: send(not back))

    def gather(self, component: str, width: int, dtype: str) -> None:
        rows = self.rows.widened(width)
        self.tape.call("etp", "all_gather", rows.arrived, rows.gathered, dtype=dtype, component=component)
        self.tape.owes(
            lambda: self.tape.call(
                "etp", "reduce_scatter", rows.gathered, rows.arrived, dtype=dtype, component=component
            )
        )

    def scatter(self) -> None:
        rows, kind = self.rows.widened(self.hidden), self.probability
        component = "experts.scatter"
        self.tape.call("etp", "reduce_scatter", rows.gathered, rows.arrived, dtype=kind, component=component)
        self.tape.owes(
            lambda: self.tape.call("etp", "all_gather", rows.arrived, rows.gathered, dtype=kind, component=component)
        )

    # The shared expert on a stream of its own, its parts between those of the dispatcher.

    def shared_before(self) -> None:
        tape, sizes = self.tape, self.sizes
        shard, whole = sizes.shard * self.hidden, sizes.tokens * self.hidden
        component = "shared expert.fc1"
        if sizes.sp:
            tape.call("tp", "all_gather", shard, whole, component=component)

        def backward() -> None:
            if sizes.sp:
                tape.call("tp", "reduce_scatter", whole, shard, component=component)
            elif sizes.tp > 1:
                tape.call("tp", "all_reduce", whole, component=component)

        tape.owes(backward)

    def shared_middle(self, width: int) -> None:
        tape, sizes = self.tape, self.sizes
        factor = 2 if self.job.swiglu else 1
        part = width // sizes.tp
        tape.uses("shared fc1")
        kernels.gemm(tape, "shared expert.fc1", sizes.tokens, self.hidden, factor * part)
        kernels.elementwise(tape, "shared expert", sizes.tokens * part, "swiglu", factor + 1)

        def backward() -> None:
            kernels.elementwise(tape, "shared expert", sizes.tokens * part, "swiglu", 2 * factor + 1)
            kernels.gemm(tape, "shared expert.fc1", sizes.tokens, factor * part, self.hidden, "dgrad")
            kernels.gemm(tape, "shared expert.fc1", sizes.tokens, self.hidden, factor * part, "wgrad")
            tape.ready("shared fc1")

        tape.owes(backward)

    def shared_after(self, width: int) -> None:
        tape, sizes = self.tape, self.sizes
        part = width // sizes.tp
        shard, whole = sizes.shard * self.hidden, sizes.tokens * self.hidden
        component = "shared expert.fc2"
        tape.uses("shared fc2")
        kernels.gemm(tape, component, sizes.tokens, part, self.hidden)
        if sizes.sp:
            tape.call("tp", "reduce_scatter", whole, shard, component=component)
        elif sizes.tp > 1:
            tape.call("tp", "all_reduce", whole, component=component)

        def backward() -> None:
            if sizes.sp:
                tape.call("tp", "all_gather", shard, whole, component=component)
            kernels.gemm(tape, component, sizes.tokens, self.hidden, part, "dgrad")
            kernels.gemm(tape, component, sizes.tokens, part, self.hidden, "wgrad")
            tape.ready("shared fc2")

        tape.owes(backward)
        _shared_gate(tape)
