"""How many parameters one rank holds, by component: what gradients, optimizer state and memory are counted from.

ROWS is the table: how many tensors of a component a rank holds and how many elements each has, as formulas over the
common symbols (place.py) and those below. Everything else here reads it. What it says in short:

====================  =====================================  ==========================================================
component             elements of one tensor                 where
====================  =====================================  ==========================================================
embedding             V/TP * H                               first stage, and a copy where multi-token prediction is
attention, mlp        one rank's shard of the matrix         layers; mlp only in those without experts
biases                outputs of a column-parallel linear    with add_bias_linear (qkv: add_qkv_bias)
                      over TP, all of a row-parallel one
norms                 H, LayerNorm a weight and a bias       two a layer; final norm behind the last layer
query and key norms   d                                      layers, with qk_layernorm
latent attention      down projections (whole on every rank  layers, with multi_latent_attention
                      or over TP), up projections over TP
router                E * H                                  layers with experts
shared expert         as mlp, of its own width; gate H       layers with experts
experts               an mlp over ETP, E/EP of them          layers with experts
prediction            2*H * H/TP and three norms of H        layers of multi-token prediction, beside a whole layer
output layer          V/TP * H                               last stage, if it is not the embedding itself
tied embedding        V/TP * H                               last stage of several: its own copy of the embedding
====================  =====================================  ==========================================================

Experts are marked apart only where expert parallelism is on: their replicas are then other ranks (role "edp") than those
of everything else (role "dp_cp"). With EP 1 they count as dense. Buffers (expert bias of the router, token counts) are no
parameters: no gradient, no optimizer state.

Source: megatron-core 0.16.1, GPTModel: equal to what every recorded rank counted, and to models built with each option.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from traceanalyzer.expect import versions
from traceanalyzer.expect.formula import parse
from traceanalyzer.expect.place import Place, Symbol, Symbols, is_on, mtp_layers
from traceanalyzer.expect.quantity import Quantity
from traceanalyzer.job import Job

__all__ = [
    "ROWS",
    "Component",
    "Row",
    "chunk_symbols",
    "components",
    "dense",
    "expert",
    "experts_apart",
    "of_layer",
    "sequence_parallel",
    "total",
    "undescribed",
    "whole_model",
]


@dataclass(frozen=True)
class Row:
    """One kind of parameter tensor.

    tensors: how many a rank holds, size: elements of each; formulas. when: condition. expert: an expert's own.
    sequence_parallel: every tensor-parallel rank holds all of it and, under sequence parallelism, sees a part of its
    tokens: its gradient is then summed over the group. matrix: weight of a linear layer, what fp8 parameters are.
    """

    name: str
    tensors: str
    size: str
    when: str = "True"
    expert: bool = False
    sequence_parallel: bool = False
    matrix: bool = False


_MLA = "multi_latent_attention"
_PLAIN = "not multi_latent_attention"
_EMBEDS = "(begins or predictions)"
_EXPERTS = "moe_blocks * E/EP"
_BIASED = "moe_blocks and add_bias_linear"

ROWS: tuple[Row, ...] = (
    Row("embedding", "1", "V/TP * H", "begins"),
    Row("embedding for prediction", "1", "V/TP * H", "predictions and not begins"),
    Row(
        "position embedding",
        "1",
        "max_position_embeddings * H",
        f"{_EMBEDS} and position_embedding_type == 'learned_absolute'",
    ),
    # Attention. With attention_output_gate the query projection is twice as wide (attention.py: SelfAttention).
    Row("attention.qkv", "blocks", "H * (Nh+2*Ng)*d/TP", f"{_PLAIN} and not gated_attention", matrix=True),
    Row("attention.qkv with gate", "blocks", "H * (2*Nh+2*Ng)*d/TP", f"{_PLAIN} and gated_attention", matrix=True),
    Row("attention.qkv bias", "blocks", "(Nh+2*Ng)*d/TP", f"{_PLAIN} and add_qkv_bias and not gated_attention"),
    Row("attention.qkv bias with gate", "blocks", "(2*Nh+2*Ng)*d/TP", f"{_PLAIN} and add_qkv_bias and gated_attention"),
    Row("attention.proj", "blocks", "Nh*d/TP * H", _PLAIN, matrix=True),
    # Multi-latent attention. down: TP or 1, see the symbol. No bias but that of proj.
    Row("attention.q", "blocks", "H * Nh*(qk_head_dim+qk_pos_emb_head_dim)/TP", f"{_MLA} and not q_rank", matrix=True),
    Row("attention.q down", "blocks", "H * q_rank/down", f"{_MLA} and q_rank and down > 1", matrix=True),
    Row(
        "attention.q down, whole",
        "blocks",
        "H * q_rank",
        f"{_MLA} and q_rank and down == 1",
        sequence_parallel=True,
        matrix=True,
    ),
    Row(
        "attention.q up",
        "blocks",
        "q_rank * Nh*(qk_head_dim+qk_pos_emb_head_dim)/TP",
        f"{_MLA} and q_rank",
        matrix=True,
    ),
    Row(
        "attention.kv down",
        "blocks",
        "H * (kv_lora_rank+qk_pos_emb_head_dim)/down",
        f"{_MLA} and down > 1",
        matrix=True,
    ),
    Row(
        "attention.kv down, whole",
        "blocks",
        "H * (kv_lora_rank+qk_pos_emb_head_dim)",
        f"{_MLA} and down == 1",
        sequence_parallel=True,
        matrix=True,
    ),
    Row("attention.kv up", "blocks", "kv_lora_rank * Nh*(qk_head_dim+v_head_dim)/TP", _MLA, matrix=True),
    Row("query latent norm", "W*blocks", "q_rank", f"{_MLA} and q_rank and qk_layernorm", sequence_parallel=True),
    Row("key and value latent norm", "W*blocks", "kv_lora_rank", f"{_MLA} and qk_layernorm", sequence_parallel=True),
    Row("attention.proj", "blocks", "Nh*v_head_dim/TP * H", _MLA, matrix=True),
    Row("attention.proj bias", "blocks", "H", "add_bias_linear", sequence_parallel=True),
    Row("softmax sink", "blocks", "Nh/TP", "softmax_type == 'learnable'"),
    # Layers without experts. fc1 holds gate and up where the activation is gated.
    Row("mlp.fc1", "dense_blocks", "G * H * F/TP", matrix=True),
    Row("mlp.fc2", "dense_blocks", "F/TP * H", matrix=True),
    Row("mlp.fc1 bias", "dense_blocks", "G * F/TP", "add_bias_linear"),
    Row("mlp.fc2 bias", "dense_blocks", "H", "add_bias_linear", sequence_parallel=True),
    Row("norms", "2*W*blocks", "H", sequence_parallel=True),
    Row(
        "query and key norms",
        "2*W*blocks",
        "d",
        f"{_PLAIN} and qk_layernorm and not on('qk_l2_norm')",
        sequence_parallel=True,
    ),
    Row("final norm", "W", "H", "final_norm", sequence_parallel=True),
    # Layers with experts.
    Row("router", "moe_blocks", "E * H", sequence_parallel=True),
    Row("router bias", "moe_blocks", "E", "add_bias_linear and since('router bias')", sequence_parallel=True),
    Row("latent projections", "2*moe_blocks", "H * latent", "latent", sequence_parallel=True, matrix=True),
    Row("latent fc1 bias", "moe_blocks", "latent", "latent and add_bias_linear", sequence_parallel=True),
    Row("latent fc2 bias", "moe_blocks", "H", "latent and add_bias_linear", sequence_parallel=True),
    Row("shared expert.fc1", "moe_blocks", "G * H * Fs/TP", "moe_shared_expert_intermediate_size", matrix=True),
    Row("shared expert.fc2", "moe_blocks", "Fs/TP * H", "moe_shared_expert_intermediate_size", matrix=True),
    Row(
        "shared expert gate",
        "moe_blocks",
        "H",
        "moe_shared_expert_intermediate_size and moe_shared_expert_gate",
        sequence_parallel=True,
    ),
    Row("experts.fc1", _EXPERTS, "G * He * Fe/ETP", "moe_blocks", expert=True, matrix=True),
    Row("experts.fc2", _EXPERTS, "Fe/ETP * He", "moe_blocks", expert=True, matrix=True),
    Row("experts.fc1 bias", _EXPERTS, "G * Fe/ETP", _BIASED, expert=True),
    Row("experts.fc2 bias", _EXPERTS, "He", f"{_BIASED} and transformer_impl != 'local'", expert=True),
    # tensor_parallel/layers.py: RowParallelLinear marks its bias, an expert's too; TransformerEngine's linears do not.
    Row("experts.fc2 bias", _EXPERTS, "He", f"{_BIASED} and transformer_impl == 'local'", True, True),
    # Multi-token prediction (multi_token_prediction.py: MultiTokenPredictionLayer), beside the layers counted above.
    Row("prediction.eh_proj", "predictions", "2*H * H/TP", matrix=True),
    Row("prediction norms", "3*W*predictions", "H", sequence_parallel=True),
    # The output layer has a weight of its own unless it is on the stage of the embedding (gpt_model.py: output_layer).
    Row("output layer", "1", "V/TP * H", "ends and untie_embeddings_and_output_weights"),
    Row("tied embedding", "1", "V/TP * H", "ends and not untie_embeddings_and_output_weights and not begins"),
)


def _latent(job: Job) -> int:
    return job.moe_latent_size or 0


def _down(place: Place) -> int:
    # gpt_layer_specs.py: linear_q_down_proj, linear_kv_down_proj: a column-parallel linear, or TE's "duplicated" one
    whole = place.job.transformer_impl != "local" and place.has("latent attention down projections whole")
    return 1 if whole else place.job.tensor_model_parallel_size


SYMBOLS: dict[str, Symbol] = {
    "G": Symbol(
        "matrices that go into a gated activation: 2, else 1",
        lambda place: 2 if place.job.swiglu or is_on(place.job, "quick_geglu") else 1,
    ),
    "W": Symbol(
        "parameters of a norm for each channel: RMSNorm 1, LayerNorm 2",
        lambda place: 1 if place.job.normalization == "RMSNorm" else 2,
    ),
    "He": Symbol("width of a token at an expert", lambda place: _latent(place.job) or place.need("hidden_size")),
    "latent": Symbol("moe_latent_size, 0 without", lambda place: _latent(place.job)),
    "q_rank": Symbol("q_lora_rank, 0 without", lambda place: place.job.q_lora_rank or 0),
    "down": Symbol("parts of a down projection of latent attention: TP, or 1 where every rank holds it whole", _down),
    "gated_attention": Symbol("attention_output_gate", lambda place: is_on(place.job, "attention_output_gate")),
    "max_position_embeddings": Symbol("learned positions", lambda place: place.need("max_position_embeddings")),
}
"""Symbols of this table beside the common ones. Those of a model chunk are in chunk_symbols."""


def chunk_symbols(place: Place, chunk: int | None) -> dict[str, Any]:
    """Symbols of a model chunk, or with None of all chunks of the stage: see _of_layers for their names."""
    return _of_layers(
        place,
        place.job.layers_on_stage(place.stage, chunk),
        mtp_layers(place.job, place.stage, chunk),
        begins=place.is_first and chunk in (None, 0),
        ends=place.is_last and chunk in (None, place.chunk_count - 1),
    )


def _of_layers(place: Place, layers: tuple[int, ...], predictions: int, *, begins: bool, ends: bool) -> dict[str, Any]:
    """Symbols that depend on the layers at hand.

    blocks: transformer layers, those inside multi-token prediction included; dense_blocks, moe_blocks: without and with
    experts. predictions: layers of multi-token prediction. begins, ends: whether embedding, output layer are here.
    final_norm: whether the norm behind the last decoder layer is here.
    """
    job = place.job
    last_of_all = (job.num_layers or 0) - 1
    if predictions and is_on(job, "mtp_use_repeated_layer"):
        predictions = 1
    # A layer of multi-token prediction is like the last decoder layer of its stage, or of the model if there is none.
    like = layers[-1] if layers else last_of_all
    experts = len(place.moe(layers)) + (predictions if job.is_moe_layer(like) else 0)
    moved = bool(job.mtp_num_layers) and place.has("final norm behind the last decoder layer")
    return {
        "blocks": len(layers) + predictions,
        "moe_blocks": experts,
        "dense_blocks": len(layers) + predictions - experts,
        "predictions": predictions,
        "begins": begins,
        "ends": ends,
        "final_norm": last_of_all in layers if moved else ends,
    }


@dataclass(frozen=True)
class Component:
    """Parameters of one kind on one rank.

    elements: all of them. expert: marked apart, replicated over "edp" instead of "dp_cp". tensors: how many there are,
    of equal size. sequence_parallel, matrix: as in Row.
    """

    name: str
    elements: Quantity
    expert: bool = False
    tensors: int = 1
    sequence_parallel: bool = False
    matrix: bool = False


def dense(job: Job, rank: int, chunk: int | None = None, release: versions.Release | None = None) -> Quantity:
    """Parameters of ``rank`` whose replicas are the ranks of "dp_cp"; of one model chunk, or of all.

    Arguments and errors as in components.
    """
    return total(part for part in components(job, rank, chunk, release) if not part.expert)


def expert(job: Job, rank: int, chunk: int | None = None, release: versions.Release | None = None) -> Quantity:
    """Parameters of ``rank`` whose replicas are the ranks of "edp": 0 with EP 1. Errors as in components."""
    return total(part for part in components(job, rank, chunk, release) if part.expert)


def sequence_parallel(job: Job, rank: int, release: versions.Release | None = None) -> Quantity:
    """Parameters whose gradients the tensor-parallel group sums under sequence parallelism. Errors as in components."""
    return total(part for part in components(job, rank, None, release) if part.sequence_parallel)


def experts_apart(job: Job) -> bool:
    """Whether the experts' parameters are marked apart (their attribute ``allreduce`` is False)."""
    return job.num_experts is not None and job.expert_model_parallel_size > 1


def components(
    job: Job, rank: int, chunk: int | None = None, release: versions.Release | None = None
) -> list[Component]:
    """What ``rank`` holds, in the order of ROWS; of one model chunk, or of all. Nothing of size 0.

    release: of megatron-core; None takes the job's own or, if unknown, the newest known one. Raises JobError if the job
    does not say a size that is needed, or if a size does not come out whole. See undescribed for models this does not fit.
    """
    return list(_of_stage(job, job.layout.stage(rank), chunk, release or _release(job)))


def of_layer(place: Place, layer: int) -> list[Component]:
    """What a rank of ``place`` holds of one decoder layer (0-based). Raises JobError as components does."""
    here = _of_layers(place, (layer,), 0, begins=False, ends=False) | {"final_norm": False}
    return list(_rows(place, here, experts_apart(place.job)))


def whole_model(job: Job, release: versions.Release | None = None) -> list[Component]:
    """The parameters of the model itself, each once: as a rank would hold them that shares them with no other.

    Raises JobError as components does.
    """
    job.require("num_layers")
    place = Place(job, 0, release or _release(job))
    layers = tuple(range(job.num_layers or 0))
    alone = {"TP": 1, "EP": 1, "ETP": 1, "down": 1}
    return list(_rows(place, alone | _of_layers(place, layers, job.mtp_num_layers or 0, begins=True, ends=True), False))


def total(parts: Iterable[Component]) -> Quantity:
    """The sum of components."""
    terms = [part.elements for part in parts]
    return Quantity(
        " + ".join(term.symbols for term in terms) or "0",
        " + ".join(term.numbers for term in terms) or "0",
        sum(term.value for term in terms),
    )


def undescribed(job: Job, rank: int, release: versions.Release | None = None) -> list[str]:
    """Why components does not fit the model on this rank: options that add or reshape parameters, unknown sizes."""
    found = [name for name in _OPTIONS if is_on(job, name)]
    place = Place(job, job.layout.stage(rank), release or _release(job))
    here = chunk_symbols(place, None)
    unknown = []
    if here["begins"] or here["predictions"] or here["ends"]:
        unknown.append("padded_vocab_size")
    if (here["begins"] or here["predictions"]) and job.position_embedding_type == "learned_absolute":
        unknown.append("max_position_embeddings")
    return found + [f"{name} is unknown" for name in unknown if getattr(job, name) is None]


# Options that add parameters or give them other shapes, without a row.
_OPTIONS: tuple[str, ...] = (
    "experimental_attention_variant",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "mtp_hybrid_override_pattern",
    "heterogeneous_layers_config_path",
    "use_legacy_models",
    "spec",
    "gtp_weight_remat_size",
    "tensor_parallel_num_weight_shards",
)


def _release(job: Job) -> versions.Release:
    text = job.megatron_core_version
    return versions.parse(text) if text else versions.KNOWN[-1]


# All ranks of a stage hold the same.
@lru_cache(maxsize=1024)
def _of_stage(job: Job, stage: int, chunk: int | None, release: versions.Release) -> tuple[Component, ...]:
    place = Place(job, stage, release)
    return _rows(place, chunk_symbols(place, chunk), experts_apart(job))


def _rows(place: Place, here: dict[str, Any], apart: bool) -> tuple[Component, ...]:
    """What the rows of the table come to with the symbols ``here``; apart: mark experts."""
    symbols = Symbols(place, SYMBOLS, here)
    found: list[Component] = []
    for row in ROWS:
        if not parse(row.when).holds(symbols):
            continue
        tensors = parse(row.tensors).whole(symbols)
        if tensors == 0:
            continue
        # Each tensor has to come out whole, not only all of them together.
        parse(row.size).whole(symbols)
        text = row.size if row.tensors == "1" else f"{row.tensors} * {row.size}"
        elements = parse(text).quantity(symbols)
        found.append(Component(row.name, elements, row.expert and apart, tensors, row.sequence_parallel, row.matrix))
    return tuple(found)
