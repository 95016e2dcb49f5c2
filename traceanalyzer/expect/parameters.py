"""How many parameters one rank holds, by component: what gradients, optimizer state and memory are counted from.

====================  =====================================  ==========================================================
component             elements of one rank                   where
====================  =====================================  ==========================================================
embedding             V/TP * H                               first stage
position embedding    max_position_embeddings * H            first stage, with learned absolute positions
attention, mlp        shapes.weights, one rank's shard       layers; mlp only in those without experts
biases                outputs of a column-parallel linear    layers, with add_bias_linear (qkv: add_qkv_bias)
                      over TP, all of a row-parallel one
norms                 2 * H                                  layers; final norm (H) on the last stage; LayerNorm twice
query and key norms   2 * d                                  layers, with qk_layernorm; LayerNorm twice
router                E * H                                  layers with experts
shared expert         as mlp, of its own width; gate H       layers with experts
experts               E/EP times an mlp over ETP             layers with experts
output layer          V/TP * H                               last stage, if it is not the embedding itself
tied embedding        V/TP * H                               last stage of several: its own copy of the embedding
====================  =====================================  ==========================================================

Experts are marked apart only where expert parallelism is on: their replicas are then other ranks (role "edp") than those
of everything else (role "dp_cp"). With EP 1 they count as dense.

Source: megatron-core 0.16.1, GPTModel: equal to what every recorded rank counted, and to models built with biases,
LayerNorm, learned positions, query and key norms, shared experts, and layers spread unevenly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from traceanalyzer.expect import shapes
from traceanalyzer.expect.quantity import Quantity
from traceanalyzer.job import Job


@dataclass(frozen=True)
class Component:
    """Parameters of one kind on one rank. ``expert``: marked apart, replicated over "edp" instead of "dp_cp"."""

    name: str
    elements: Quantity
    expert: bool = False


def dense(job: Job, rank: int, chunk: int | None = None) -> Quantity:
    """Parameters of ``rank`` whose replicas are the ranks of "dp_cp"; of one model chunk, or of all. Errors: components."""
    return _sum(part.elements for part in components(job, rank, chunk) if not part.expert)


def expert(job: Job, rank: int, chunk: int | None = None) -> Quantity:
    """Parameters of ``rank`` whose replicas are the ranks of "edp": 0 with EP 1. Errors as in components."""
    return _sum(part.elements for part in components(job, rank, chunk) if part.expert)


def experts_apart(job: Job) -> bool:
    """Whether the experts' parameters are marked apart (their attribute ``allreduce`` is False)."""
    return job.num_experts is not None and job.expert_model_parallel_size > 1


def components(job: Job, rank: int, chunk: int | None = None) -> list[Component]:
    """What ``rank`` holds, in the order of the table above; of one model chunk, or of all. Nothing of size 0.

    Raises JobError if the job does not say a size that is needed. See undescribed for models this does not fit.
    """
    stage = job.layout.stage(rank)
    last_stage = job.pipeline_model_parallel_size - 1
    last_chunk = (job.virtual_pipeline_model_parallel_size or 1) - 1
    layers = job.layers_on_stage(stage, chunk)
    experts = sum(job.is_moe_layer(layer) for layer in layers)
    last = stage == last_stage and chunk in (None, last_chunk)
    found: list[Component] = []
    if stage == 0 and chunk in (None, 0):
        found += _first(job)
    found += _attention(job, len(layers))
    found += _mlp(job, len(layers) - experts)
    found += _norms(job, len(layers), last)
    if experts:
        found += _moe(job, experts)
    if last and job.untie_embeddings_and_output_weights:
        found.append(Component("output layer", _vocabulary(job)))
    elif last and last_stage > 0:
        found.append(Component("tied embedding", _vocabulary(job)))
    return [part for part in found if part.elements.value]


def undescribed(job: Job, rank: int) -> list[str]:
    """Why components does not fit the model on this rank: options that add or reshape parameters, unknown sizes."""
    found = [name for name in _OPTIONS if is_on(job, name)]
    stage = job.layout.stage(rank)
    if job.add_bias_linear and any(job.is_moe_layer(layer) for layer in job.layers_on_stage(stage)):
        found.append("add_bias_linear of experts")
    unknown = []
    output = job.untie_embeddings_and_output_weights or job.pipeline_model_parallel_size > 1
    if stage == 0 or (stage == job.pipeline_model_parallel_size - 1 and output):
        unknown.append("padded_vocab_size")
    if stage == 0 and job.position_embedding_type == "learned_absolute":
        unknown.append("max_position_embeddings")
    return found + [f"{name} is unknown" for name in unknown if getattr(job, name) is None]


# -- components ------------------------------------------------------------------------------------------------------


def _product(*factors: tuple[str, int]) -> Quantity:
    """The product of factors, each with its symbol."""
    return Quantity(
        " * ".join(symbol for symbol, _ in factors),
        " * ".join(str(number) for _, number in factors),
        prod(number for _, number in factors),
    )


def _sum(terms: Iterable[Quantity]) -> Quantity:
    terms = list(terms)
    return Quantity(
        " + ".join(term.symbols for term in terms) or "0",
        " + ".join(term.numbers for term in terms) or "0",
        sum(term.value for term in terms),
    )


def _matrix(
    name: str, copies: tuple[tuple[str, int], ...], symbols: tuple[str, str], weight: shapes.Weight
) -> Component:
    """``copies`` times one rank's shard of ``weight``, whose (inputs, outputs) are written ``symbols``."""
    return Component(name, _product(*copies, *zip(symbols, weight.shard, strict=True)))


def _vocabulary(job: Job) -> Quantity:
    job.require("padded_vocab_size")
    return _product(*zip(("V/TP", "H"), shapes.weights(job)["embedding"].shard, strict=True))


def _first(job: Job) -> list[Component]:
    found = [Component("embedding", _vocabulary(job))]
    if job.position_embedding_type == "learned_absolute":
        positions, hidden = job.require("max_position_embeddings", "hidden_size")
        found.append(Component("position embedding", _product(("max_position_embeddings", positions), ("H", hidden))))
    return found


def _attention(job: Job, layers: int) -> list[Component]:
    weights = shapes.weights(job)
    qkv, proj = weights["attention.qkv"], weights["attention.proj"]
    count = ("layers", layers)
    width = "(Nh+2*Ng)*d/TP"
    found = [
        _matrix("attention.qkv", (count,), ("H", width), qkv),
        _matrix("attention.proj", (count,), ("Nh*d/TP", "H"), proj),
    ]
    if job.add_qkv_bias:
        found.append(Component("attention.qkv bias", _product(count, (width, qkv.shard[1]))))
    if job.add_bias_linear:
        found.append(Component("attention.proj bias", _product(count, ("H", proj.shard[1]))))
    return found


def _mlp(job: Job, layers: int) -> list[Component]:
    weights = shapes.weights(job)
    inner, fc2 = weights["mlp.gate" if job.swiglu else "mlp.fc1"], weights["mlp.fc2"]
    count = ("dense layers", layers)
    found = [
        _matrix("mlp.fc1", (count, *_gated(job)), ("H", "F/TP"), inner),
        _matrix("mlp.fc2", (count,), ("F/TP", "H"), fc2),
    ]
    if job.add_bias_linear:
        found.append(Component("mlp.fc1 bias", _product(count, *_gated(job), ("F/TP", inner.shard[1]))))
        found.append(Component("mlp.fc2 bias", _product(count, ("H", fc2.shard[1]))))
    return found


def _gated(job: Job) -> tuple[tuple[str, int], ...]:
    """With swiglu, fc1 holds gate and up."""
    return (("2", 2),) if job.swiglu else ()


def _norms(job: Job, layers: int, final: bool) -> list[Component]:
    hidden, channels = job.require("hidden_size", "kv_channels")
    of_norm = () if job.normalization == "RMSNorm" else (("2", 2),)
    found = [Component("norms", _product(*of_norm, ("2", 2), ("layers", layers), ("H", hidden)))]
    if job.qk_layernorm:
        elements = _product(*of_norm, ("2", 2), ("layers", layers), ("d", channels))
        found.append(Component("query and key norms", elements))
    if final:
        found.append(Component("final norm", _product(*of_norm, ("H", hidden))))
    return found


def _moe(job: Job, layers: int) -> list[Component]:
    number, hidden, width = job.require("num_experts", "hidden_size", "moe_ffn_hidden_size")
    ranks = job.expert_tensor_parallel_size or job.tensor_model_parallel_size
    count = ("MoE layers", layers)
    found = [Component("router", _product(count, ("E", number), ("H", hidden)))]
    shared = job.moe_shared_expert_intermediate_size
    if shared is not None:
        tp = job.tensor_model_parallel_size
        fc1, fc2 = shapes.column_parallel(hidden, shared, tp), shapes.row_parallel(shared, hidden, tp)
        found.append(_matrix("shared expert.fc1", (count, *_gated(job)), ("H", "Fs/TP"), fc1))
        found.append(_matrix("shared expert.fc2", (count,), ("Fs/TP", "H"), fc2))
        if job.moe_shared_expert_gate:
            found.append(Component("shared expert gate", _product(count, ("H", hidden))))
    local = (count, ("E/EP", number // job.expert_model_parallel_size))
    fc1, fc2 = shapes.column_parallel(hidden, width, ranks), shapes.row_parallel(width, hidden, ranks)
    apart = experts_apart(job)
    for part in (
        _matrix("experts.fc1", (*local, *_gated(job)), ("H", "Fe/ETP"), fc1),
        _matrix("experts.fc2", local, ("Fe/ETP", "H"), fc2),
    ):
        found.append(Component(part.name, part.elements, expert=apart))
    return found


# -- what is not counted ---------------------------------------------------------------------------------------------

# Options that add parameters or give them other shapes.
_OPTIONS: tuple[str, ...] = (
    "multi_latent_attention",
    "mtp_num_layers",
    "moe_latent_size",
    "attention_output_gate",
    "experimental_attention_variant",
    "softmax_type",
    "quick_geglu",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "heterogeneous_layers_config_path",
    "use_legacy_models",
    "gtp_weight_remat_size",
    "tensor_parallel_num_weight_shards",
)


def is_on(job: Job, name: str) -> bool:
    """Whether an option is set to more than its default; looked up in Job.extra if Job has no field of that name."""
    value = getattr(job, name) if hasattr(job, name) else job.extra.get(name)
    off = {
        "softmax_type": "vanilla",
        "gtp_weight_remat_size": 1,
        "tensor_parallel_num_weight_shards": job.tensor_model_parallel_size,
    }
    return bool(value) and value not in ("None", "False") and value != off.get(name)
