"""How DistributedDataParallel lays parameters out in buffers and cuts the buffers into buckets.

A buffer holds the parameters of one model chunk that are reduced over the same ranks and have the same types: dense
ones, experts' apart from them, fp8 weights apart from the rest. It is filled in reverse order of the model's parameters
(the order in which the backward pass finishes them). With the distributed optimizer

* every parameter starts at a multiple of 64 elements,
* every bucket ends at a multiple of lcm(shards, 128), or lcm(shards, 128, 65536) with
  ddp_pad_buckets_for_high_nccl_busbw; shards: ranks that the buffer is cut over,
* a tied embedding (pipeline stages > 1) is a bucket of its own.

A bucket closes when it reaches the limit; without a limit a buffer is one bucket. The limit holds with overlap_grad_reduce,
on the first pipeline stage and for the first model chunk only: ddp_bucket_size, or parameters of the rank //
ddp_num_buckets, or max(40e6, 1e6 * replicas).

The order of parameters was run for megatron-core's own layers; for those of TransformerEngine it was read. It matters only
where a buffer has several buckets.

Source: megatron-core core_v0.9.0 ... core_v0.19.0, distributed/param_and_grad_buffer.py, distributed_data_parallel.py
(0.19: optimizer/distrib_optimizer.py, _compute_per_buffer_param_layout); order of parameters: models/gpt/gpt_model.py,
transformer/transformer_layer.py and the modules it builds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from traceanalyzer.errors import JobError
from traceanalyzer.expect import parameters, versions
from traceanalyzer.expect.place import Place
from traceanalyzer.job import Job

PARAMETER_ALIGNMENT = 64
"""Elements: 128 bytes of 16-bit values."""

_BUCKET_ALIGNMENT = 128
_BUS_ALIGNMENT = 1 << 16
_SMALLEST_DEFAULT_LIMIT = 40_000_000
_DEFAULT_LIMIT_PER_REPLICA = 1_000_000


@dataclass(frozen=True)
class Parameter:
    """One parameter tensor of a rank. expert: replicated over "edp". tied: copy of it on another pipeline stage. matrix:
    weight of a linear layer, which fp8_param_gather stores in fp8."""

    name: str
    elements: int
    expert: bool = False
    tied: bool = False
    matrix: bool = False


@dataclass(frozen=True)
class Bucket:
    """Elements of one bucket, and how many of them are padding."""

    elements: int
    padding: int = 0


# -- order of a model's parameters -----------------------------------------------------------------------------------


def _order(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split("|"))


# Names as in parameters.py; each stands for one tensor, a norm for its weight and (LayerNorm) its bias. What a job does not
# have is skipped. Modules list their parameters in the order in which they were built, their own before those of
# submodules: hence proj before qkv, and the shared expert's gate before its matrices. TransformerEngine keeps a norm inside
# the linear layer behind it.
_QKV = (
    "attention.qkv | attention.qkv with gate | attention.qkv bias | attention.qkv bias with gate "
    "| query and key norms | query and key norms"
)
_ATTENTION = {
    "transformer_engine": _order(f"attention.proj | attention.proj bias | norms | {_QKV}"),
    "local": _order(f"norms | attention.proj | attention.proj bias | {_QKV}"),
}
_LATENT_ATTENTION = {
    "transformer_engine": _order(
        "norms | attention.proj | attention.proj bias | attention.q | attention.q down | attention.q down, whole "
        "| query latent norm | attention.q up | attention.kv down | attention.kv down, whole "
        "| key and value latent norm | attention.kv up"
    ),
    "local": _order(
        "norms | attention.proj | attention.proj bias | attention.q | attention.q down | attention.q down, whole "
        "| attention.q up | attention.kv down | attention.kv down, whole | attention.kv up "
        "| query latent norm | key and value latent norm"
    ),
}
_MLP = _order("norms | mlp.fc1 | mlp.fc1 bias | mlp.fc2 | mlp.fc2 bias")
_ROUTER = _order(
    "norms | router | router bias | latent projections | latent fc1 bias | latent projections | latent fc2 bias"
)
_SHARED_EXPERT = _order("shared expert gate | shared expert.fc1 | shared expert.fc2")
_ONE_EXPERT = _order("experts.fc1 | experts.fc1 bias | experts.fc2 | experts.fc2 bias")
_NORMS = frozenset(
    _order(
        "norms | query and key norms | final norm | prediction norms | query latent norm | key and value latent norm"
    )
)


def parameter_list(job: Job, stage: int, chunk: int, release: versions.Release) -> tuple[Parameter, ...]:
    """The parameters of one model chunk of a stage, in the model's order.

    Raises JobError if the job does not say a size, and if the model has parameters whose place is not known.
    """
    place = Place(job, stage, release)
    left: Counter[str] = Counter()
    kinds: dict[str, parameters.Component] = {}
    for part in parameters.components(job, place.rank, chunk, release):
        left[part.name] += part.tensors
        kinds[part.name] = part
    found: list[Parameter] = []
    for name, fused in _names(job, stage, chunk):
        if left[name] == 0:
            continue
        part = kinds[name]
        tensors = fused or (2 if name in _NORMS and job.normalization != "RMSNorm" else 1)
        one = part.elements.value // part.tensors
        left[name] -= tensors
        sizes = [one * tensors] if fused else [one] * tensors
        found += [Parameter(name, size, part.expert, _is_tied(job, name), part.matrix) for size in sizes]
    over = sorted(name for name, number in left.items() if number)
    if over:
        raise JobError(f"order of the model's parameters: no place for {', '.join(over)}")
    return tuple(found)


def _is_tied(job: Job, name: str) -> bool:
    """language_module.py: setup_embeddings_and_output_layer (attribute shared_embedding)."""
    if job.pipeline_model_parallel_size == 1:
        return False
    if name == "embedding":
        return not job.untie_embeddings_and_output_weights or bool(job.mtp_num_layers)
    return name == "embedding for prediction" or (name == "tied embedding" and not job.mtp_num_layers)


def _names(job: Job, stage: int, chunk: int) -> Iterator[tuple[str, int]]:
    """Names in the model's order; the number says how many tensors are one (0: as many as the name stands for)."""
    for name in ("embedding", "embedding for prediction", "position embedding"):
        yield name, 0
    for layer in job.layers_on_stage(stage, chunk):
        yield from _layer(job, job.is_moe_layer(layer))
    yield "final norm", 0
    for _ in range(job.mtp_layers_on_stage(stage, chunk)):
        for name in ("prediction norms", "prediction norms", "prediction.eh_proj"):
            yield name, 0
        yield from _layer(job, job.num_layers is not None and job.is_moe_layer(job.num_layers - 1))
        yield "prediction norms", 0
    yield "output layer", 0
    yield "tied embedding", 0


def _layer(job: Job, has_experts: bool) -> Iterator[tuple[str, int]]:
    attention = _LATENT_ATTENTION if job.multi_latent_attention else _ATTENTION
    for name in ("softmax sink", *attention["local" if job.transformer_impl == "local" else "transformer_engine"]):
        yield name, 0
    if not has_experts:
        for name in _MLP:
            yield name, 0
        return
    for name in _ROUTER:
        yield name, 0
    yield from _experts(job)
    for name in _SHARED_EXPERT:
        yield name, 0


def _experts(job: Job) -> Iterator[tuple[str, int]]:
    local = (job.num_experts or 0) // job.expert_model_parallel_size
    if not job.moe_grouped_gemm:
        for _ in range(local):
            for name in _ONE_EXPERT:
                yield name, 0
    elif job.transformer_impl != "local" and not job.moe_use_legacy_grouped_gemm:
        for name in _ONE_EXPERT:
            for _ in range(local):
                yield name, 0
    else:  # experts.py: GroupedMLP, two matrices for all experts of the rank
        yield "experts.fc1", local
        yield "experts.fc2", local


# -- buckets ---------------------------------------------------------------------------------------------------------


def fill(
    found: tuple[Parameter, ...],
    *,
    limit: int | None,
    shards: int,
    distributed: bool,
    bus_bandwidth: bool = False,
) -> list[Bucket]:
    """Buckets of a buffer of these parameters, given in the model's order.

    limit: elements that close a bucket, None: one bucket. shards: ranks that the buffer is cut over. distributed: with the
    distributed optimizer, which pads.
    """
    multiple = math.lcm(shards, _BUCKET_ALIGNMENT, _BUS_ALIGNMENT if bus_bandwidth else 1)
    buckets: list[Bucket] = []
    begin = used = members = 0
    end = 0

    def close(at: int) -> int:
        nonlocal begin, used, members
        padded = _up(at, multiple) if distributed else at
        buckets.append(Bucket(padded - begin, padded - begin - used))
        begin, used, members = padded, 0, 0
        return padded

    for one in reversed(found):
        start = _up(end, PARAMETER_ALIGNMENT) if distributed else end
        alone = distributed and one.tied
        if alone and members:
            start = close(start)
        end = start + one.elements
        used += one.elements
        members += 1
        if alone or (limit is not None and end - begin >= limit):
            end = close(end)
    if members:
        close(end)
    return buckets


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def limit(place: Place, chunk: int) -> int | None:
    """Elements that close a bucket of a model chunk; None: its buffers are one bucket each.

    Megatron-LM's own default counts the replicas over DP and CP (since 0.12), the library's those over DP.
    """
    job = place.job
    if not job.overlap_grad_reduce or place.stage > 0 or chunk > 0 or job.overlap_param_gather_with_optimizer_step:
        return None
    if job.ddp_num_buckets is not None and place.has("number of buckets"):
        held = parameters.total(parameters.components(job, place.rank, None, place.release))
        return held.value // job.ddp_num_buckets
    if job.ddp_bucket_size is not None:
        return job.ddp_bucket_size
    over_cp = job.framework == "megatron-lm" and place.has("bucket limit over CP")
    replicas = job.layout.group_size("dp_cp") if over_cp else job.data_parallel_size
    return max(_SMALLEST_DEFAULT_LIMIT, _DEFAULT_LIMIT_PER_REPLICA * replicas)


@dataclass(frozen=True)
class Placed:
    """A bucket, its model chunk, and whether its parameters are stored in fp8."""

    bucket: Bucket
    chunk: int
    quantized: bool


def of_place(place: Place, *, expert: bool) -> list[Placed]:
    """Buckets of every buffer of a place, dense or experts' ones. Errors as in parameter_list."""
    job = place.job
    instances = job.num_distributed_optimizer_instances
    shards = job.layout.group_size("edp" if expert else "dp_cp") // instances
    found: list[Placed] = []
    for chunk in range(place.chunk_count):
        of_chunk = [one for one in parameter_list(job, place.stage, chunk, place.release) if one.expert == expert]
        for quantized in (True, False) if job.fp8_param_gather else (False,):
            members = tuple(one for one in of_chunk if (one.matrix and job.fp8_param_gather) == quantized)
            if members:
                filled = fill(
                    members,
                    limit=limit(place, chunk),
                    shards=shards,
                    distributed=job.use_distributed_optimizer,
                    bus_bandwidth=job.ddp_pad_buckets_for_high_nccl_busbw and place.has("padding for bus bandwidth"),
                )
                found += [Placed(bucket, chunk, quantized) for bucket in filled]
    return found
