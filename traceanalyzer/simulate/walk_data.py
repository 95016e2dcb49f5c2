"""Data parallelism: parameters in the order of the model, their buckets, and when gradients and parameters travel.

After megatron-core 0.16.1: distributed/param_and_grad_buffer.py, distributed_data_parallel.py, finalize_model_grads.py,
and the constructors of the modules (order and marks of parameters).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from traceanalyzer import traffic
from traceanalyzer.simulate import walk_kernels as kernels
from traceanalyzer.simulate.program import Ints
from traceanalyzer.simulate.walk_tape import Module, Sizes, Tape


@dataclass(frozen=True)
class Parameter:
    """One weight of a rank. expert: reduced over the replicas of an expert. replicated: the same on all TP ranks, with a
    gradient of its own part of the sequence on each (marked sequence_parallel). tied: shared with another stage."""

    module: Module
    elems: int
    expert: bool = False
    replicated: bool = False
    head_norm: bool = False
    tied: bool = False


def parameters(sizes: Sizes, stage: int, chunk: int) -> list[Parameter]:
    """The parameters of a model chunk on one rank, in the order of named_parameters."""
    job, hidden = sizes.job, sizes.hidden
    last = job.pipeline_model_parallel_size - 1
    top = (job.virtual_pipeline_model_parallel_size or 1) - 1
    first_chunk, last_chunk = stage == 0 and chunk == 0, stage == last and chunk == top
    tied = not job.untie_embeddings_and_output_weights
    found: list[Parameter] = []
    if first_chunk:
        found.append(Parameter((None, "word embedding"), sizes.vocab * hidden, tied=tied and last > 0))
        if job.position_embedding_type == "learned_absolute":
            (length,) = job.require("max_position_embeddings")
            found.append(Parameter((None, "position embedding"), length * hidden))
    for layer in job.layers_on_stage(stage, chunk):
        found += _layer(sizes, layer)
    if last_chunk:
        found += _norm(sizes, (None, "final norm"))
        if not (tied and first_chunk):
            found.append(Parameter((None, "output layer"), sizes.vocab * hidden, tied=tied and last > 0))
    return found


def _norm(sizes: Sizes, module: Module) -> list[Parameter]:
    one = Parameter(module, sizes.hidden, replicated=True)
    return [one] if sizes.job.normalization == "RMSNorm" else [one, one]


def _layer(sizes: Sizes, layer: int) -> Iterator[Parameter]:
    job, hidden, tp = sizes.job, sizes.hidden, sizes.tp
    fused = job.transformer_impl == "transformer_engine"
    if not fused:
        yield from _norm(sizes, (layer, "input norm"))
    yield Parameter((layer, "proj"), sizes.query_width // tp * hidden)
    if job.add_bias_linear:
        yield Parameter((layer, "proj"), hidden, replicated=True)
    if fused:
        yield from _norm(sizes, (layer, "input norm"))
    yield Parameter((layer, "qkv"), hidden * sizes.qkv_width // tp)
    if job.add_qkv_bias:
        yield Parameter((layer, "qkv"), sizes.qkv_width // tp)
    if job.qk_layernorm:
        for name in ("q norm", "k norm"):
            for _ in range(1 if job.normalization == "RMSNorm" else 2):
                yield Parameter((layer, name), sizes.head_width, replicated=True, head_norm=True)
    moe = job.is_moe_layer(layer)
    if moe or not fused:
        yield from _norm(sizes, (layer, "mlp norm"))
    if moe:
        yield from _experts(sizes, layer)
        return
    (width,) = job.require("ffn_hidden_size")
    yield from _mlp(sizes, layer, width, "fc1", "fc2", fused=fused)


def _mlp(sizes: Sizes, layer: int, width: int, fc1: str, fc2: str, *, fused: bool = False) -> Iterator[Parameter]:
    job, hidden, part = sizes.job, sizes.hidden, width // sizes.tp
    factor = 2 if job.swiglu else 1
    if fused:
        yield from _norm(sizes, (layer, "mlp norm"))
    yield Parameter((layer, fc1), hidden * factor * part)
    if job.add_bias_linear:
        yield Parameter((layer, fc1), factor * part)
    yield Parameter((layer, fc2), part * hidden)
    if job.add_bias_linear:
        yield Parameter((layer, fc2), hidden, replicated=True)


def _experts(sizes: Sizes, layer: int) -> Iterator[Parameter]:
    job, hidden = sizes.job, sizes.hidden
    experts, width = job.require("num_experts", "moe_ffn_hidden_size")
    local = experts // job.expert_model_parallel_size
    own = job.expert_model_parallel_size > 1  # else the experts are ordinary parameters
    part = width // (job.expert_tensor_parallel_size or 1)
    factor = 2 if job.swiglu else 1
    yield Parameter((layer, "router"), experts * hidden, replicated=True)
    if job.add_bias_linear:
        yield Parameter((layer, "router"), experts, replicated=True)
    into = [Parameter((layer, "expert fc1"), hidden * factor * part, expert=own)]
    out = [Parameter((layer, "expert fc2"), part * hidden, expert=own)]
    if job.add_bias_linear:
        into.append(Parameter((layer, "expert fc1"), factor * part, expert=own))
        # Layers of single experts mark it as any row-parallel bias. TransformerEngine's grouped one marks it where it
        # has a tensor-parallel group, and is never given one: the dispatcher does all the communication.
        marked = not job.moe_grouped_gemm
        out.append(Parameter((layer, "expert fc2"), hidden, expert=own, replicated=marked))
    if job.moe_grouped_gemm and (job.moe_use_legacy_grouped_gemm or job.transformer_impl == "local"):
        for one in (into[0], out[0]):
            yield Parameter(one.module, local * one.elems, expert=own)
    elif job.moe_grouped_gemm:
        yield from (into[0] for _ in range(local))
        yield from (one for one in into[1:] for _ in range(local))
        yield from (out[0] for _ in range(local))
        yield from (one for one in out[1:] for _ in range(local))
    else:
        for _ in range(local):
            yield from into
            yield from out
    shared = job.moe_shared_expert_intermediate_size
    if shared:
        if job.moe_shared_expert_gate:
            yield Parameter((layer, "shared gate"), hidden, replicated=True)
        yield from _mlp(sizes, layer, shared, "shared fc1", "shared fc2")


# -- buckets -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients travel in one piece of ``elems`` elements, padding included."""

    elems: int
    members: tuple[Parameter, ...]


def buckets(sizes: Sizes, members: Sequence[Parameter], replicas: int, limit: int | None) -> list[Bucket]:
    """_ParamAndGradBuffer: from the last parameter to the first, a new bucket when one has ``limit`` elements."""
    job = sizes.job
    sharded = job.use_distributed_optimizer
    divisor = math.lcm(replicas, 128, 2**16) if job.ddp_pad_buckets_for_high_nccl_busbw else math.lcm(replicas, 128)

    def padded(at: int, multiple: int) -> int:
        return math.ceil(at / multiple) * multiple if sharded else at

    found: list[Bucket] = []
    inside: list[Parameter] = []
    start = at = 0
    for one in reversed(members):
        alone = one.tied and sharded
        at = padded(at, 64)
        if alone and inside:
            end = padded(at, divisor)
            found.append(Bucket(end - start, tuple(inside)))
            start, at, inside = end, end, []
        at += one.elems
        inside.append(one)
        if alone or (limit is not None and at - start >= limit):
            end = padded(at, divisor)
            found.append(Bucket(end - start, tuple(inside)))
            start, at, inside = end, end, []
    if inside:
        found.append(Bucket(padded(at, divisor) - start, tuple(inside)))
    return found


@dataclass
class _BucketGroup:
    """Buckets that travel together (_ParamAndGradBucketGroup)."""

    number: int
    buckets: list[Bucket]
    expert: bool
    waiting: set[Module] = field(default_factory=set)
    reducing: list[int | None] = field(default_factory=list)
    gathering: list[int | None] = field(default_factory=list)
    gathered: bool = False
    following: _BucketGroup | None = None
    """The one whose parameters are used next."""

    @property
    def modules(self) -> set[Module]:
        return {one.module for bucket in self.buckets for one in bucket.members}


class Wrapped:
    """A model chunk inside DistributedDataParallel.

    ``live``: gradients that are ready start to travel (no_sync is off). ``hooked``: parameters are waited for before
    their module, as in the first pass after the optimizer step.
    """

    def __init__(self, sizes: Sizes, stage: int, chunk: int) -> None:
        job = sizes.job
        layout = job.layout
        self.sizes, self.job = sizes, job
        self.parameters = parameters(sizes, stage, chunk)
        self.instances = job.num_distributed_optimizer_instances
        split = self.instances > 1
        self.roles = {False: "intra_dp_cp" if split else "dp_cp", True: "intra_edp" if split else "edp"}
        self.replicas = {expert: layout.group_size(role) for expert, role in self.roles.items()}
        self.by_optimizer = job.overlap_param_gather_with_optimizer_step and chunk == 0
        self.by_schedule = False
        self.live = False
        self.hooked = False
        self.groups: list[_BucketGroup] = []
        together = chunk > 0 or job.overlap_param_gather_with_optimizer_step
        for expert in (False, True):
            members = [one for one in self.parameters if one.expert == expert]
            limit = None if together or stage > 0 else self._limit()
            made = buckets(sizes, members, self.replicas[expert], limit)
            pieces = [made] if together and made else [[one] for one in made]
            groups = [_BucketGroup(len(self.groups) + index, piece, expert) for index, piece in enumerate(pieces)]
            for index in range(1, len(groups)):
                groups[index].following = groups[index - 1]
            self.groups += groups
        self._group_of: dict[Module, list[_BucketGroup]] = {}
        for group in self.groups:
            for module in group.modules:
                self._group_of.setdefault(module, []).append(group)

    def _limit(self) -> int | None:
        job = self.job
        if not job.overlap_grad_reduce:
            return None
        if job.ddp_num_buckets is not None:
            return sum(one.elems for one in self.parameters) // job.ddp_num_buckets
        replicas = job.layout.group_size("dp_cp") if job.framework == "megatron-lm" else job.layout.group_size("dp")
        return job.ddp_bucket_size or max(40_000_000, 1_000_000 * replicas)

    def elems(self, *, expert: bool) -> int:
        """Elements of the buffers, padding included."""
        return sum(bucket.elems for group in self.groups if group.expert == expert for bucket in group.buckets)

    # -- gradients

    def arm(self) -> None:
        """The backward pass that follows is the last of the step: count what is not ready yet."""
        self.live = True
        for group in self.groups:
            group.waiting = group.modules

    def ready(self, tape: Tape, module: Module) -> None:
        if not self.live:
            return
        for group in self._group_of.get(module, ()):
            if module in group.waiting:
                group.waiting.discard(module)
                if not group.waiting:
                    self._reduce(tape, group)

    def start(self, tape: Tape) -> None:
        """start_grad_sync: the gradients of every bucket."""
        self.by_schedule = True
        for group in self.groups:
            self._reduce(tape, group)

    def finish(self, tape: Tape) -> None:
        """finish_grad_sync: wait for what is under way, or do it now.

        A bucket that only the schedule starts never counts its gradients, and so takes every step for its first one, in
        which it starts here what has no handle yet: with several instances none has, and all is reduced twice.
        """
        again = self.by_schedule and self.instances > 1
        for group in self.groups:
            if again or not self.job.overlap_grad_reduce:
                self._reduce(tape, group)
            for handle in group.reducing:
                tape.wait(handle)
            group.reducing = []

    def _reduce(self, tape: Tape, group: _BucketGroup) -> None:
        job = self.job
        # A bucket has no layer.
        layer, tape.layer = tape.layer, None
        overlap = job.overlap_grad_reduce
        component = "expert gradients" if group.expert else "gradients"
        role, replicas = self.roles[group.expert], self.replicas[group.expert]
        kind = job.main_grad_dtype
        operation = "avg" if job.ddp_average_in_collective else "sum"
        number = tape.new_coalesced() if len(group.buckets) > 1 else None
        # With several instances both reductions are on one stream of their own, the second behind the first.
        stream = "comm:gradients" if self.instances > 1 and overlap else None
        for bucket in group.buckets:
            if not job.ddp_average_in_collective and not job.calculate_per_token_loss:
                kernels.scale(tape, component, bucket.elems, traffic.element_bytes(kind) or 4)
        handles: list[int | None] = []
        for bucket in group.buckets:
            shard = bucket.elems // replicas
            if not job.use_distributed_optimizer:
                op, ends = "all_reduce", (bucket.elems, bucket.elems)
            elif job.ddp_reduce_scatter_with_fp32_accumulation:
                op, ends = "all_to_all", (bucket.elems, bucket.elems)
            else:
                op, ends = "reduce_scatter", (bucket.elems, shard)
            handles.append(
                tape.call(
                    role,
                    op,
                    *ends,
                    dtype=kind,
                    component=component,
                    overlap=overlap,
                    coalesce=number,
                    stream=stream,
                    reduce_op=None if op == "all_to_all" else operation,
                )
            )
        if self.instances > 1 and job.use_distributed_optimizer:
            number = tape.new_coalesced() if len(group.buckets) > 1 else None
            handles = [
                tape.call(
                    "inter_dist_opt",
                    "all_reduce",
                    bucket.elems // replicas,
                    dtype=kind,
                    component=component,
                    overlap=overlap,
                    coalesce=number,
                    stream=stream,
                    reduce_op=operation,
                )
                for bucket in group.buckets
            ]
        group.reducing = handles
        tape.layer = layer

    # -- parameters

    def before(self, tape: Tape, module: Module) -> None:
        if not self.hooked:
            return
        for group in self._group_of.get(module, ()):
            if not group.gathered and not self.by_optimizer:
                self._gather(tape, group)
            if group.gathering:
                for handle in group.gathering:
                    tape.wait(handle)
                group.gathering = []
                skip = self.job.align_param_gather or self.job.overlap_param_gather_with_optimizer_step
                if group.following is not None and not skip and not group.following.gathered:
                    self._gather(tape, group.following)

    def gather(self, tape: Tape, *, force: bool = False) -> None:
        """start_param_sync: the parameters of every bucket, unless the optimizer step has started them."""
        if self.by_optimizer and not force:
            return
        for group in self.groups:
            self._gather(tape, group)

    def _gather(self, tape: Tape, group: _BucketGroup) -> None:
        layer, tape.layer = tape.layer, None
        overlap = self.job.overlap_param_gather
        component = "expert parameters" if group.expert else "parameters"
        role, replicas = self.roles[group.expert], self.replicas[group.expert]
        number = tape.new_coalesced() if len(group.buckets) > 1 else None
        handles = [
            tape.call(
                role,
                "all_gather",
                bucket.elems // replicas,
                bucket.elems,
                component=component,
                overlap=overlap,
                coalesce=number,
            )
            for bucket in group.buckets
        ]
        group.gathering = handles if overlap else []
        group.gathered = True
        tape.layer = layer


# -- the end of the backward passes ------------------------------------------------------------------------------------


def finalize(tape: Tape, chunks: Sequence[Wrapped], stage: int, last_rank: Ints) -> None:
    """finalize_model_grads: what is reduced after the last backward pass. last_rank: of the pipeline of each rank."""
    sizes, job = tape.sizes, tape.sizes.job
    kind = job.main_grad_dtype
    for chunk in chunks:
        chunk.finish(tape)
    members = [one for chunk in chunks for one in chunk.parameters]
    if sizes.tp > 1:
        replicated = sum(one.elems for one in members if (one.replicated and sizes.sp) or one.head_norm)
        if replicated:
            kernels.elementwise(tape, "norm gradients", replicated, "cat", 2)
            tape.call("tp", "all_reduce", replicated, dtype=kind, component="norm gradients")
    last = job.pipeline_model_parallel_size - 1
    if last > 0 and not job.untie_embeddings_and_output_weights and stage in (0, last):
        tape.call("embedding", "all_reduce", sizes.vocab * sizes.hidden, dtype=kind, component="word embedding")
    if job.moe_router_enable_expert_bias:
        (experts,) = job.require("num_experts")
        layers = sum(job.is_moe_layer(layer) for layer in job.layers_on_stage(stage))
        if layers:
            tape.call("tp_dp_cp", "all_reduce", layers * experts, component="router.expert bias")
    if job.calculate_per_token_loss:
        tape.call("pp", "broadcast", 1, dtype="int32", component="token count", root=last_rank)
        tape.call("dp_cp", "all_reduce", 1, dtype="int32", component="token count")
        for chunk in chunks:
            elems = sum(chunk.elems(expert=expert) for expert in (False, True))
            kernels.scale(tape, "token count", elems, traffic.element_bytes(kind) or 4)
