"""The tensor-parallel chapter: what one rank sends on its tensor-parallel group (role "tp") in one step.

LINEARS is the table of the linear layers that communicate; every rule about them is made from a row of it by the same
few forms. [s, B, W] being the gathered input or output of width W (s = S/CP, mostly W = H) and [s', B, W] the shard
(s' = S/(CP*TP)):

==================  ===================================  ========================================================
place               without sequence parallelism         with sequence parallelism
==================  ===================================  ========================================================
column-parallel     backward: all-reduce [s, B, W]       forward: all-gather; backward: all-gather of the input
(qkv, fc1, output)                                       again, for the weight gradient, then reduce-scatter
row-parallel        forward: all-reduce [s, B, H]        forward: reduce-scatter; backward: all-gather
(proj, fc2)
word embedding      forward: all-reduce [B, s, H]        as row-parallel; with learned absolute positions (and before
                                                         0.8) forward all-reduce and slice, backward all-gather
loss                3 all-reduces [s, B] float32, also   the same
                    on a group of one rank
once a step         query and key norm gradients         gradients of everything that is replicated
==================  ===================================  ========================================================

Attention with fewer query groups than ranks gathers the mixed QKV [s, B, (Nh+2Ng)d/TP]. Multi-latent attention has a
column-parallel linear for the query (or a down and an up projection of rank q_lora_rank) and one up for keys and values;
its down projections are whole on every rank with TransformerEngine's layers since 0.14 (then only the positions of the
keys are gathered, [s', B, qk_pos_emb_head_dim]), else column-parallel with their output gathered.

A layer of multi-token prediction has everything of a layer, and a word embedding, a projection [.., 2H] -> [.., H] whose
output is gathered, an output layer and a loss of its own, on the stage where they are; under context parallelism tokens,
positions, labels and mask are shifted over the border of the ranks' parts by messages on the default group.

An MoE layer has no calls of this group around its experts, only around a shared expert. Middle stages have layers only;
the embedding belongs to the first chunk of the first stage, output layer and loss to the last chunk of the last.

Under fp8 the inputs that TransformerEngine's linears gather are bytes: Float8 (delayed, tensorwise) the data only, MXFP8
data and scales in one coalesced call; reductions stay in the type of the activations, and so do embedding, output layer
and loss. tp_comm_overlap moves calls of layers into userbuffers, which torch.distributed does not carry.

What changes nothing: async_tensor_model_parallel_allreduce and CUDA_DEVICE_MAX_CONNECTIONS (only when the host waits);
delay_wgrad_compute and overlap_moe_expert_parallel_comm (the input is gathered before the weight gradient is put off;
TransformerEngine 2.13 module/linear.py: wgrad_store.put), which change the order; sft (samples are padded to seq_length).

Phases: recompute is the forward work that a checkpoint repeats inside the backward pass; the gradient all-reduce of
the replicated parameters runs after the last backward and outside autograd, in finalize_model_grads: "other".

Source: reference of Megatron's traffic, sections 2.1, 2.2, 2.10 and 2.11; each row carries its own evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from traceanalyzer.expect import parameters, versions
from traceanalyzer.expect.formula import parse
from traceanalyzer.expect.model import Evidence, NotModelled
from traceanalyzer.expect.place import Place, Symbol, Symbols, is_on, mtp_layers
from traceanalyzer.expect.quantity import Quantity
from traceanalyzer.expect.rules import Avoid, Chapter, Gap, Rule
from traceanalyzer.job import Job

ROLE = "tp"

_RUN = "megatron-core 0.16.1 recorded: "
_FAKE = "megatron-core 0.16.1 run on a fake process group: "
_TE = "TransformerEngine 2.13 pytorch/"
_LINEAR = "tensor_parallel/layers.py: LinearWithGradAccumulationAndAsyncCommunication"
_WITH_SP = Evidence("run", f"{_RUN}tp2_sp, w1024_dense_tp4pp4_m8; {_LINEAR}, RowParallelLinear")
_WITHOUT_SP = Evidence("run", f"{_RUN}tp2, tp2pp2_nosp; {_LINEAR}, tensor_parallel/mappings.py: _reduce")
_REGATHER = Evidence("run", f"{_RUN}tp2_sp, w1024_dense_tp4pp4_m8; {_LINEAR}.backward")
_RECOMPUTED = Evidence(
    "run",
    f"{_RUN}tp2_recompute_full, tp2_sp_recompute_full, tp2_sp_recompute_selective_mlp; "
    "tensor_parallel/random.py: CheckpointFunction.backward",
)
_SHARED = Evidence("run", f"{_FAKE}shared experts; transformer/moe/shared_experts.py: SharedExpertMLP")
_EMBEDDING = Evidence("run", f"{_RUN}tp2_sp, tp2; tensor_parallel/layers.py: VocabParallelEmbedding.forward")
_OLD_EMBEDDING = Evidence("source", "Megatron-LM core_v0.7.0 tensor_parallel/layers.py: VocabParallelEmbedding.forward")
_POSITIONS = Evidence(
    "run",
    f"{_FAKE}learned_absolute; models/common/embeddings/language_model_embedding.py: "
    "LanguageModelEmbedding (reduce_scatter_embeddings, scatter_to_sequence_parallel_region)",
)
_FEW_GROUPS = Evidence(
    "run",
    f"{_FAKE}TP4 with 2 query groups; transformer/attention.py: SelfAttention.get_query_key_value_tensors",
)
_LATENT = Evidence(
    "run",
    f"{_FAKE}multi_latent_attention, with and without q_lora_rank, sequence parallelism and recomputation, down projections "
    "column-parallel and, in TELinear's place, whole; transformer/multi_latent_attention.py: "
    "MLASelfAttention.get_query_key_value_tensors",
)
_PREDICTION = Evidence(
    "run",
    f"{_FAKE}mtp_num_layers 1 and 2, one and two stages, with and without sequence parallelism, recomputed, and 0.12 to "
    "0.19 with one; run on four gloo processes: pipeline layout Ettm|L; "
    "transformer/multi_token_prediction.py: MultiTokenPredictionLayer, models/gpt/gpt_model.py: GPTModel._postprocess",
)
_ROLL = Evidence(
    "run",
    f"{_FAKE}mtp_num_layers 1, CP2, and 0.14 to 0.19 with CP4; transformer/multi_token_prediction.py: roll_tensor",
)
_ACCEPTANCE = Evidence(
    "run",
    "megatron-core 0.19.0 run on a fake process group: mtp_num_layers 1; transformer/multi_token_prediction.py: "
    "_vocab_parallel_argmax",
)
_LOSS = Evidence("run", f"{_RUN}tp2_sp, dp2; tensor_parallel/cross_entropy.py: _VocabParallelCrossEntropy.forward")
_FUSED_LOSS = Evidence(
    "run", f"{_RUN}r2_tp2_sp_fused_ce; fusions/fused_cross_entropy.py: _VocabParallelCrossEntropy.forward"
)
_TE_LOSS = Evidence("source", f"{_TE}triton/cross_entropy.py: cross_entropy_forward")
_NORMS = Evidence(
    "run",
    f"{_RUN}tp2_sp, tp2ep2_sp_alltoall; distributed/finalize_model_grads.py: "
    "_allreduce_non_tensor_model_parallel_grads",
)
_SAVED = Evidence(
    "run",
    f"{_FAKE}distribute_saved_activations; tensor_parallel/random.py: CheckpointFunction.backward, "
    "tensor_parallel/utils.py: gather_split_1d_tensor",
)
_DEFERRED = Evidence(
    "source", "Megatron-LM core_v0.16.1 core/utils.py: drain_embedding_wgrad_compute; tensor_parallel/layers.py"
)
_OVERLAP = Evidence(
    "source",
    f"{_TE}module/layernorm_linear.py, module/linear.py (ub_overlap_ag, ub_overlap_rs, ub_bulk_dgrad, ub_bulk_wgrad); "
    "Megatron-LM core_v0.16.1 extensions/transformer_engine.py: TELinear",
)
_FLOAT8 = Evidence("source", f"{_TE}distributed.py: _all_gather_fp8; module/base.py: grad_output_preprocess")
_MXFP8 = Evidence(
    "source", f"{_TE}distributed.py: _all_gather_mxfp8; tensor/mxfp8_tensor.py: MXFP8Quantizer.make_empty"
)
_TENSORWISE = Evidence(
    "source", f"{_TE}module/linear.py: _customize_quantizers_float8_current_scaling; csrc/quantizer.cpp"
)
_DELAYED = Evidence(
    "inferred",
    f"{_TE}quantization.py: reduce_and_update_fp8_tensors at the end of the outermost autocast, and in the backward pass "
    "of its first module; module/base.py: set_meta_tensor; Megatron-LM core_v0.16.1 fp8_utils.py: get_fp8_context",
)

# -- texts that many rules share -------------------------------------------------------------------------------------

_SP = "TP > 1 and sequence_parallel"
_NO_SP = "TP > 1 and not sequence_parallel"
_LATENT_ATTENTION = "multi_latent_attention"
_REPEATS = "training and recompute_granularity == 'full'"
_NOT_THERE = "not in the document"
_FULL = Avoid("recompute_repeats_collectives", "recompute_granularity selective")


def _all_of(*conditions: str) -> str:
    """The conditions joined by "and"; those that always hold are left out."""
    parts = [part for part in conditions if part not in ("", "True")]
    return " and ".join(f"({part})" if " or " in part or " if " in part else part for part in parts) or "True"


def _shard(width: str) -> str:
    return f"S/(CP*TP) * B * {width}"


def _whole(width: str) -> str:
    return f"S/CP * B * {width}"


# -- linear layers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A linear layer that communicates: column-parallel ones at their input, row-parallel ones at their output.

    layers: how many of the stage's layers have it, a symbol (others count the recomputed ones and those in bf16:
    recomputed_..., ..._bf16). width: features at the communicating side. modules: of recompute_modules, those that repeat
    its forward pass, each with a condition. buffer: its name in userbuffers, "" for none. checkpointed: of a linear that is
    fused with a norm, layers whose forward pass runs without gradients, a symbol. own: whether it communicates itself, and
    not the code around it; only then fp8 gathers bytes and userbuffers serve it; "False" for one that is not
    TransformerEngine's. regathers: whether its input is gathered again in the backward pass. recomputes: whether full
    recomputation repeats it. deferred: gathers that wait for the flush, a symbol. document: as in Rule. What is whether is a
    condition.
    """

    component: str
    kind: Literal["column", "row"]
    layers: str
    when: str = "True"
    width: str = "H"
    modules: tuple[tuple[str, str], ...] = ()
    buffer: str = ""
    checkpointed: str = ""
    own: str = "True"
    regathers: str = "True"
    evidence: Evidence | None = None
    recomputes: bool = True
    deferred: str = ""
    document: str = ""


_UP = (("mla_up_proj", "True"),)
_MLP = (("mlp", "True"),)
_EXPERT = (("moe", "True"), ("shared_experts", "not moe_shared_expert_overlap"))


def _layer(prefix: str, component: str) -> tuple[Linear, ...]:
    """The linears of transformer layers; prefix: begins the symbols that count them, component: their names."""
    layers, dense = f"{prefix}layers", f"{prefix}dense_layers"
    evidence = _PREDICTION if prefix else None
    buffers = ("", "", "", "") if prefix else ("qkv", "proj", "fc1", "fc2")
    latent = f"{component}attention."
    document = _NOT_THERE if prefix else ""
    mla = Linear(
        component="", kind="column", layers=layers, when=_LATENT_ATTENTION, evidence=_LATENT, document=_NOT_THERE
    )
    return (
        Linear(
            component=f"{component}attention.qkv",
            kind="column",
            layers=layers,
            when=f"not {_LATENT_ATTENTION}",
            buffer=buffers[0],
            checkpointed="recomputed_layers",
            evidence=evidence,
            document=document,
        ),
        replace(mla, component=f"{latent}q", when=f"{_LATENT_ATTENTION} and not q_lora_rank", modules=_UP),
        replace(mla, component=f"{latent}q down", when=f"{_LATENT_ATTENTION} and q_lora_rank and not whole_down"),
        replace(mla, component=f"{latent}kv down", when=f"{_LATENT_ATTENTION} and not whole_down"),
        replace(
            mla,
            component=f"{latent}q up",
            width="q_lora_rank",
            when=f"{_LATENT_ATTENTION} and q_lora_rank",
            modules=_UP,
        ),
        replace(mla, component=f"{latent}kv up", width="kv_lora_rank", modules=_UP),
        Linear(component=f"{component}attention.proj", kind="row", layers=layers, buffer=buffers[1], evidence=evidence),
        Linear(
            component=f"{component}mlp.fc1",
            kind="column",
            layers=dense,
            modules=_MLP,
            buffer=buffers[2],
            checkpointed="checkpointed_mlps",
            evidence=evidence,
            document=document,
        ),
        Linear(
            component=f"{component}mlp.fc2",
            kind="row",
            layers=dense,
            modules=_MLP,
            buffer=buffers[3],
            evidence=evidence,
            document=document,
        ),
    )


def _shared_expert(prefix: str, component: str) -> tuple[Linear, ...]:
    """The linears of shared experts. With overlap their input is kept, and gathered without TransformerEngine."""
    fc1 = Linear(
        component=f"{component}shared expert.fc1",
        kind="column",
        layers=f"{prefix}moe_layers",
        when="moe_shared_expert_intermediate_size is not None",
        modules=_EXPERT,
        buffer="" if prefix else "fc1",
        own="not moe_shared_expert_overlap",
        regathers="not moe_shared_expert_overlap",
        evidence=_SHARED,
        document="the document has no shared experts",
    )
    fc2 = replace(fc1, component=f"{component}shared expert.fc2", kind="row", buffer="" if prefix else "fc2")
    return fc1, replace(fc2, regathers="True")


_PREDICTED = Linear(
    component="prediction.eh_proj",
    kind="column",
    layers="mtp_layers",
    width="2*H",
    evidence=_PREDICTION,
    document=_NOT_THERE,
)
_OUTPUT = Linear(
    component="output layer",
    kind="column",
    layers="last",
    own="False",
    recomputes=False,
    deferred="deferred",
    document=_NOT_THERE,
)
_PREDICTION_OUTPUT = replace(
    _OUTPUT, component="prediction output layer", layers="predictions", evidence=_PREDICTION, deferred=""
)

LINEARS: tuple[Linear, ...] = (
    *_layer("", ""),
    _PREDICTED,
    *_layer("mtp_", "prediction "),
    _PREDICTION_OUTPUT,
    _OUTPUT,
)
"""Linear layers that communicate, in the order of the forward pass; those of shared experts are SHARED_EXPERTS."""

SHARED_EXPERTS: tuple[Linear, ...] = (*_shared_expert("", ""), *_shared_expert("mtp_", "prediction "))


def _count(layers: str) -> str:
    return "M" if layers == "last" else f"{layers} * M"


def _placed(linear: Linear) -> str:
    """Where it is; the cheap and rare condition first."""
    there = (
        "mtp_layers" if linear.layers.startswith("mtp_") else linear.layers if linear.layers == "predictions" else ""
    )
    return _all_of(there, linear.when, "last" if linear.layers == "last" else "")


# What a gathered tensor becomes under fp8. A linear in bf16 (by first_last_layers_bf16, or not TransformerEngine's) keeps
# the type of the activations.
_Usage = Literal["row", "column", "both"]


def _mxfp8(width: str, usage: _Usage, tokens: str) -> str:
    """Bytes of an MXFP8 tensor: data and a byte for 32 elements, along rows or along columns; rows are padded to 128."""
    return f"{'2 * ' if usage == 'both' else ''}{tokens} * B * ({width} + 4*ceil({width}/128))"


def _gathers(linear: Linear, rule: Rule, usage: _Usage, overlapped: str, without_grad: str = "") -> Iterator[Rule]:
    """An all-gather by the linear in each of its forms: as it is, as fp8, inside userbuffers.

    rule: the plain form; its calls are a product of a number of layers and M. overlapped: condition for userbuffers.
    without_grad: layers whose call stays out of userbuffers because it runs without gradients.
    """
    layers = rule.calls.removesuffix(" * M")
    width = linear.width
    if not linear.buffer or not overlapped:
        yield from _precisions(linear, rule, usage, layers)
        return
    yield from _precisions(linear, replace(rule, when=_all_of(f"not ({overlapped})", rule.when)), usage, layers)
    moved = replace(rule, when=_all_of(overlapped, rule.when), outside="userbuffers", evidence=_OVERLAP)
    inside = f"({layers} - {without_grad})" if without_grad else layers
    yield replace(moved, when=_all_of("gathered == 'plain'", moved.when), calls=f"{inside} * M")
    kept = f"{layers}_bf16"
    yield replace(
        moved,
        when=_all_of("gathered != 'plain'", moved.when),
        dtype="uint8",
        calls=f"({layers} - {kept}{f' - {without_grad}' if without_grad else ''}) * M",
        note="fp8 data; userbuffers carry the scales too",
    )
    yield replace(moved, when=_all_of("gathered != 'plain'", moved.when), calls=f"{kept} * M")
    if without_grad:
        left = replace(rule, when=_all_of(overlapped, rule.when), note="userbuffers gather only with gradients enabled")
        yield replace(left, when=_all_of("gathered == 'plain'", left.when), calls=f"{without_grad} * M")
        yield replace(
            left,
            when=_all_of("gathered == 'float8'", left.when),
            dtype="uint8",
            calls=f"{without_grad} * M",
            evidence=_FLOAT8,
        )
        yield replace(
            left,
            when=_all_of("gathered == 'mxfp8'", left.when),
            dtype="uint8",
            sent=_mxfp8(width, usage, "S/(CP*TP)"),
            received=_mxfp8(width, usage, "S/CP"),
            calls=f"{without_grad} * M",
            evidence=_MXFP8,
        )


def _precisions(linear: Linear, rule: Rule, usage: _Usage, layers: str) -> Iterator[Rule]:
    """An all-gather over torch.distributed: plain, as Float8, as MXFP8, and of the layers that stay in bf16."""
    if linear.own == "False":
        yield rule
        return
    own = _all_of(f"gathered == 'plain' or not {linear.own}", rule.when)
    yield replace(rule, when=own if linear.own != "True" else _all_of("gathered == 'plain'", rule.when))
    quantized = _all_of(rule.when, linear.own)
    some = f"({layers} - {layers}_bf16) * M"
    yield replace(rule, when=_all_of("gathered == 'float8'", quantized), dtype="uint8", calls=some, evidence=_FLOAT8)
    yield replace(
        rule,
        when=_all_of("gathered == 'mxfp8'", quantized),
        dtype="uint8",
        sent=_mxfp8(linear.width, usage, "S/(CP*TP)"),
        received=_mxfp8(linear.width, usage, "S/CP"),
        calls=some,
        evidence=_MXFP8,
        note="data and scales in one coalesced call",
    )
    yield replace(
        rule,
        when=_all_of("gathered != 'plain'", quantized),
        calls=f"{layers}_bf16 * M",
        note="a layer that first_last_layers_bf16 keeps in bf16",
    )


def _maximum(linear: Linear, rule: Rule) -> Iterator[Rule]:
    """With the tensorwise recipe every tensor that is quantized for a gather has its maximum reduced first."""
    if linear.own == "False":
        return
    layers = rule.calls.removesuffix(" * M")
    yield replace(
        rule,
        name=f"{rule.name}, maximum",
        op="all_reduce",
        component=f"{linear.component} fp8 maximum",
        dtype="float32",
        sent="1",
        received="",
        when=_all_of("gathered == 'float8' and fp8_recipe == 'tensorwise'", linear.own, rule.when),
        calls=f"({layers} - {layers}_bf16) * M",
        avoid=rule.avoid if rule.phase == "recompute" else None,
        evidence=_TENSORWISE,
        note="one scale for the tensor on all ranks",
        document=_NOT_THERE,
    )


def _disabled(linear: Linear) -> str:
    return f"tp_comm_overlap_disable_{linear.buffer}" if linear.buffer in ("qkv", "fc1") else "False"


def _forward_call(
    linear: Linear, phase: str, layers: str, avoid: Avoid | None = None, when: str = ""
) -> Iterator[Rule]:
    """What a linear does in a forward pass; also when a checkpoint repeats it."""
    proven = linear.evidence or _WITH_SP
    if avoid is not None:
        proven = linear.evidence or _RECOMPUTED
    placed = _all_of(when, _placed(linear))
    column = linear.kind == "column"
    rule = Rule(
        name=f"tensor: {linear.component}, {'input' if column else 'output'}",
        role=ROLE,
        op="all_gather" if column else "reduce_scatter",
        phase=phase,
        component=linear.component,
        sent=_shard(linear.width) if column else _whole(linear.width),
        received=_whole(linear.width) if column else _shard(linear.width),
        when=_all_of(placed, _SP),
        calls=_count(layers),
        evidence=proven,
        avoid=avoid,
        document=linear.document or ("the document recomputes nothing" if avoid else ""),
    )
    if column:
        # TransformerEngine's layernorm_linear.py asks for gradients before it takes userbuffers, its linear.py does not
        grad = "training" if linear.checkpointed and phase != "recompute" else ""
        overlapped = _all_of("overlap and tp_comm_overlap_ag", f"not {_disabled(linear)}", grad, linear.own)
        without = "" if phase == "recompute" else linear.checkpointed
        yield from _gathers(linear, rule, "row", overlapped if linear.buffer else "", without)
        yield from _maximum(linear, rule)
        return
    yield from _reductions(linear, rule, _all_of("overlap and tp_comm_overlap_rs", linear.own))
    yield replace(
        rule,
        op="all_reduce",
        received="",
        when=_all_of(placed, _NO_SP),
        evidence=proven if avoid is not None or linear.evidence else _WITHOUT_SP,
    )


def _reductions(linear: Linear, rule: Rule, overlapped: str) -> Iterator[Rule]:
    """A reduce-scatter by the linear, over torch.distributed or inside userbuffers."""
    if not linear.buffer:
        yield rule
        return
    yield replace(rule, when=_all_of(f"not ({overlapped})", rule.when))
    yield replace(rule, when=_all_of(overlapped, rule.when), outside="userbuffers", evidence=_OVERLAP)


def _repeated_calls(linear: Linear) -> Iterator[Rule]:
    """What checkpoints repeat of it: full recomputation, and each module of selective recomputation."""
    if not linear.recomputes:
        return
    yield from _forward_call(linear, "recompute", f"recomputed_{linear.layers}", _FULL, _REPEATS)
    for module, unless in linear.modules:
        avoid = Avoid("recompute_repeats_collectives", f"{module} out of recompute_modules")
        yield from _forward_call(
            linear, "recompute", linear.layers, avoid, _all_of("training", f"{module!r} in modules", unless)
        )


def _backward_call(linear: Linear) -> Iterator[Rule]:
    """What a linear does in the backward pass: the re-gather first, then the reduce-scatter of the input's gradient."""
    column = linear.kind == "column"
    placed = _all_of("training", _placed(linear))
    whole, shard = _whole(linear.width), _shard(linear.width)
    disabled = _disabled(linear)
    rule = Rule(
        name=f"tensor: {linear.component}, gradient",
        role=ROLE,
        op="reduce_scatter" if column else "all_gather",
        phase="backward",
        component=linear.component,
        sent=whole if column else shard,
        received=shard if column else whole,
        when=_all_of(placed, _SP),
        calls=_count(linear.layers),
        evidence=linear.evidence or _WITH_SP,
        document=linear.document,
    )
    if not column:
        overlapped = _all_of("overlap and tp_comm_overlap_ag", linear.own) if linear.buffer else ""
        yield from _maximum(linear, rule)
        yield from _gathers(linear, rule, "both", overlapped)
        return
    again = replace(
        rule,
        name=f"tensor: {linear.component}, input again",
        op="all_gather",
        component=f"{linear.component} input re-gather",
        sent=shard,
        received=whole,
        when=_all_of(rule.when, linear.regathers),
        calls=f"(M - {linear.deferred})" if linear.deferred else rule.calls,
        evidence=linear.evidence or _REGATHER,
        avoid=Avoid("sp_input_regather", ""),
        note="only the shard of the input is saved, and the weight gradient needs all of it",
        document="E34",
    )
    scatters = f"tp_comm_overlap_rs_dgrad and not {disabled}"
    if linear.deferred:
        yield replace(again, when=_all_of(again.when, f"not {linear.deferred}"), calls=rule.calls)
        yield replace(again, when=_all_of(again.when, linear.deferred))
    else:
        yield from _gathers(
            linear, again, "column", _all_of(f"overlap and tp_comm_bulk_dgrad and not ({scatters})", linear.own)
        )
    yield from _reductions(linear, rule, _all_of(f"overlap and (tp_comm_bulk_wgrad or ({scatters}))", linear.own))
    yield replace(
        rule,
        op="all_reduce",
        received="",
        when=_all_of(placed, _NO_SP),
        evidence=linear.evidence or _WITHOUT_SP,
    )


def linear_rules(linears: Iterable[Linear], part: Literal["forward", "recompute", "backward"]) -> tuple[Rule, ...]:
    """The rules of these linears in one phase, in the order given."""
    form: dict[str, Callable[[Linear], Iterator[Rule]]] = {
        "forward": lambda linear: _forward_call(linear, "forward", linear.layers),
        "recompute": _repeated_calls,
        "backward": _backward_call,
    }
    return tuple(rule for linear in linears for rule in form[part](linear))


# -- beside the linears of attention ---------------------------------------------------------------------------------


def _attention(
    name: str,
    component: str,
    op: str,
    phase: str,
    sent: str,
    received: str,
    when: str,
    evidence: Evidence,
    prefix: str,
) -> Iterator[Rule]:
    """A call of every attention; forward ones again where full recomputation repeats the layer."""
    words = "prediction " if prefix else ""
    rule = Rule(
        name=f"tensor: {words}{name}",
        role=ROLE,
        op=op,
        phase=phase,
        component=f"{words}{component}",
        sent=sent,
        received=received,
        when=_all_of("mtp_layers" if prefix else "", "training" if phase == "backward" else "", when),
        calls=f"{prefix}layers * M",
        evidence=evidence,
        document=_NOT_THERE,
    )
    yield rule
    if phase == "forward":
        yield replace(
            rule,
            phase="recompute",
            when=_all_of(_REPEATS, rule.when),
            calls=f"recomputed_{prefix}layers * M",
            avoid=_FULL,
        )


def _attention_calls(prefix: str) -> Iterator[Rule]:
    few = f"TP > 1 and not {_LATENT_ATTENTION} and Ng < TP and since('fewer query groups than TP')"
    part, all_of_it = "S/CP * B * (Nh+2*Ng) * d / TP", "S/CP * B * (Nh+2*Ng) * d"
    for op, phase, sent, received in (
        ("all_gather", "forward", part, all_of_it),
        ("reduce_scatter", "backward", all_of_it, part),
    ):
        yield from _attention(
            "query groups fewer than ranks", "attention.qkv groups", op, phase, sent, received, few, _FEW_GROUPS, prefix
        )
    whole = f"{_SP} and {_LATENT_ATTENTION} and whole_down"
    part, all_of_it = _shard("qk_pos_emb_head_dim"), _whole("qk_pos_emb_head_dim")
    for op, phase, sent, received in (
        ("all_gather", "forward", part, all_of_it),
        ("reduce_scatter", "backward", all_of_it, part),
    ):
        yield from _attention(
            "positions of keys", "attention.key positions", op, phase, sent, received, whole, _LATENT, prefix
        )
    columns = f"TP > 1 and {_LATENT_ATTENTION} and not whole_down"
    for name, rank, latent, more in (
        ("q", "q_lora_rank", "q_lora_rank", "q_lora_rank"),
        ("kv", "(kv_lora_rank+qk_pos_emb_head_dim)", "kv_lora_rank", ""),
    ):
        when = _all_of(columns, more)
        component = f"attention.{name} down output"
        yield from _attention(
            f"{component}",
            component,
            "all_gather",
            "forward",
            f"S/CP * B * {rank} / TP",
            _whole(rank),
            when,
            _LATENT,
            prefix,
        )
        yield from _attention(
            f"{component}, gradient",
            component,
            "all_gather",
            "backward",
            _shard(latent),
            _whole(latent),
            _all_of(when, "sequence_parallel"),
            _LATENT,
            prefix,
        )


# -- word embedding --------------------------------------------------------------------------------------------------


def _embedding(component: str, when: str, calls: str, evidence: Evidence | None) -> tuple[tuple[Rule, ...], Rule]:
    """Forward rules and the backward rule of a word embedding."""
    reduced = Rule(
        name=f"tensor: {component}",
        role=ROLE,
        op="all_reduce",
        phase="forward",
        component=component,
        sent="B * S/CP * H",
        when=_all_of(_NO_SP, when),
        calls=calls,
        evidence=evidence or _EMBEDDING,
        document=_NOT_THERE,
    )
    learned = "position_embedding_type == 'learned_absolute'"
    old = "not since('embedding reduce-scatter')"
    forward = (
        reduced,
        replace(
            reduced,
            when=_all_of(_SP, when, old),
            evidence=_OLD_EMBEDDING,
            note="every rank sums all of it and keeps its slice of the sequence",
        ),
        replace(
            reduced,
            when=_all_of(_SP, when, f"not {old}".replace("not not ", ""), learned),
            evidence=_POSITIONS,
            note="learned absolute positions are added to the whole sequence; each rank then keeps its slice",
        ),
        replace(
            reduced,
            op="reduce_scatter",
            sent=_whole("H"),
            received=_shard("H"),
            when=_all_of(_SP, when, "since('embedding reduce-scatter')", f"not {learned}"),
        ),
    )
    backward = replace(
        reduced,
        name=f"tensor: {component}, gradient",
        op="all_gather",
        phase="backward",
        sent=_shard("H"),
        received=_whole("H"),
        when=_all_of("training", _SP, when),
    )
    return forward, backward


_EMBEDDING_FORWARD, _EMBEDDING_BACKWARD = _embedding("embedding", "first", "M", None)
_PREDICTION_FORWARD, _PREDICTION_BACKWARD = _embedding("prediction embedding", "True", "mtp_layers * M", _PREDICTION)

# -- multi-token prediction ------------------------------------------------------------------------------------------

_EH_OUTPUT = Rule(
    name="tensor: prediction.eh_proj output",
    role=ROLE,
    op="all_gather",
    phase="forward",
    component="prediction.eh_proj output",
    sent="S/CP * B * H / TP",
    received=_whole("H"),
    when="TP > 1",
    calls="mtp_layers * M",
    evidence=_PREDICTION,
    note="cut by features, not by tokens",
    document=_NOT_THERE,
)
_EH_OUTPUT_AGAIN = replace(
    _EH_OUTPUT,
    phase="recompute",
    when=_all_of(_REPEATS, "TP > 1"),
    calls="recomputed_mtp_layers * M",
    avoid=_FULL,
)
_EH_GRADIENTS = (
    replace(
        _EH_OUTPUT,
        name="tensor: prediction.eh_proj output, gradient",
        phase="backward",
        sent=_shard("H"),
        received=_whole("H"),
        when=f"training and {_SP}",
        note="the output was cut into parts of the sequence",
    ),
    replace(
        _EH_OUTPUT,
        name="tensor: prediction.eh_proj output, gradient reduced",
        op="reduce_scatter",
        phase="backward",
        sent=_whole("H"),
        received="S/CP * B * H / TP",
        when="training and TP > 1 and not since('prediction gathers without reduction')",
        note="summed although every rank has all of it, a fault of that release",
        evidence=Evidence("run", "megatron-core 0.12.3 run on a fake process group: mtp_num_layers 1"),
    ),
)


def _roll(name: str, dtype: str, when: str, number: str) -> Iterator[Rule]:
    """A shift by one token over the borders of the parts that context-parallel ranks hold: two borders, both ways."""
    for side, there, earlier in (("previous", "cp_rank > 0", True), ("next", "cp_rank < CP - 1", False)):
        for op in ("send", "recv") if earlier else ("recv", "send"):
            yield Rule(
                name=f"tensor: prediction shifts {name}, {op} {side}",
                role="world",
                op=op,
                phase="forward",
                component=f"prediction: shift of {name}",
                dtype=dtype,
                sent="B",
                when=_all_of("CP > 1 and since('prediction under context parallelism')", there, when),
                calls=f"{number} * M",
                peer=side,
                evidence=_ROLL,
                note="a message without a group runs on the default group",
                document=_NOT_THERE,
            )


_ROLLS: tuple[Rule, ...] = (
    *_roll("tokens", "int64", "True", "mtp_layers"),
    *_roll("positions", "int64", "True", "mtp_layers"),
    *_roll("labels", "int64", "True", "predictions"),
    *_roll("loss mask", "float32", "framework == 'megatron-lm'", "predictions"),
    *_roll("loss mask", "int64", "framework != 'megatron-lm'", "predictions"),
)


def _acceptance(name: str, dtype: str) -> Rule:
    return Rule(
        name=f"tensor: prediction accepted, {name}",
        role=ROLE,
        op="all_gather",
        phase="forward",
        component=f"prediction accepted: {name}",
        dtype=dtype,
        sent="S/CP * B",
        received="TP * S/CP * B",
        when="training and TP > 1 and since('predictions are counted')",
        calls="predictions * M",
        evidence=_ACCEPTANCE,
        note="only to count how many predicted tokens would be accepted",
        document=_NOT_THERE,
    )


_ACCEPTED = (_acceptance("largest logit", "activations"), _acceptance("its token", "int64"))

# -- saved activations -----------------------------------------------------------------------------------------------

_SAVED_ACTIVATIONS = Rule(
    name="tensor: saved activations",
    role=ROLE,
    op="all_gather",
    phase="backward",
    component="saved activations",
    sent="S/CP * B * H / TP",
    received=_whole("H"),
    when="training and recompute_granularity == 'full' and distribute_saved_activations and not sequence_parallel",
    calls="checkpoints * M",
    evidence=_SAVED,
    avoid=Avoid("saved_activations_gather", "distribute_saved_activations off"),
    note="the input of every checkpoint was saved in parts",
    document="the document recomputes nothing",
)

# -- loss ------------------------------------------------------------------------------------------------------------


def _loss(component: str, when: str, calls: str) -> Iterator[Rule]:
    """The vocabulary-parallel cross entropy; float32 whatever the model's type, and on a group of one rank too."""
    one = Rule(
        name="tensor: loss",
        role=ROLE,
        op="all_reduce",
        phase="forward",
        component="",
        dtype="float32",
        sent="S/CP * B",
        when="",
        calls=calls,
        evidence=_LOSS,
        document="E34",
    )
    unfused = _all_of(when, "not cross_entropy_loss_fusion")
    native = _all_of(when, "cross_entropy_loss_fusion and cross_entropy_fusion_impl != 'te'")
    te = _all_of(when, "cross_entropy_loss_fusion and cross_entropy_fusion_impl == 'te' and TP > 1")
    for part in ("max", "predicted logit", "sum of exponentials"):
        yield replace(one, name=f"tensor: {component}, {part}", component=f"{component}: {part}", when=unfused)
    fused = replace(one, evidence=_FUSED_LOSS, when=native)
    yield replace(fused, name=f"tensor: {component}, fused maximum", component=f"{component}: max")
    yield replace(
        fused,
        name=f"tensor: {component}, fused sums",
        component=f"{component}: predicted logit and sum of exponentials",
        sent="2 * S/CP * B",
    )
    yield replace(
        one,
        name=f"tensor: {component}, all at once",
        op="all_gather",
        component=f"{component}: maximum, logit and sum",
        sent="3 * S/CP * B",
        received="3 * S/CP * B * TP",
        when=te,
        evidence=_TE_LOSS,
    )


# -- once a step -----------------------------------------------------------------------------------------------------

_ONCE: tuple[Rule, ...] = (
    Rule(
        name="tensor: gathers put off until the pipeline has drained",
        role=ROLE,
        op="all_gather",
        phase="other",
        component="output layer input re-gather",
        sent=_shard("H"),
        received=_whole("H"),
        when=f"training and {_SP} and last and defer_embedding_wgrad_compute",
        calls="deferred",
        evidence=_DEFERRED,
        avoid=Avoid("sp_input_regather", ""),
        note="defer_embedding_wgrad_compute: the weight gradient of the output layer waits for the flush",
        document="E34",
    ),
    Rule(
        name="tensor: gradients of replicated parameters",
        role=ROLE,
        op="all_reduce",
        phase="other",
        component="norm gradients",
        dtype="main gradients",
        sent="replicated",
        when="training and TP > 1 and replicated_elements",
        calls="1",
        evidence=_NORMS,
        note="one coalesced call after the last backward: every rank saw its own part of the sequence",
        avoid=Avoid("fp32_reduction", "--grad-reduce-in-bf16", "wide * replicated_elements * 2*(TP-1)/TP * 2"),
        document="E34",
    ),
)


def _amax(role: str, when: str, phase: str, elements: str) -> Rule:
    return Rule(
        name=f"tensor: fp8 maxima, {phase}, {role}",
        role=role,
        op="all_reduce",
        phase=phase,
        component="fp8 maxima",
        dtype="float32",
        sent=elements,
        when=_all_of("delayed_scaling and fp8_modules", when, "training"),
        calls="v * M",
        evidence=_DELAYED,
        note="delayed scaling: maxima of all fp8 tensors of the rank",
        document=_NOT_THERE,
    )


# A group of one rank is left out (get_world_size(group) > 1).
_AMAX: tuple[Rule, ...] = tuple(
    _amax(role, f"{flag} and {size} > 1", phase, elements)
    for role, flag, size in (
        ("tp_dp_cp", "not tp_only_amax_red", "TP*DPCP"),
        ("tp_cp", "tp_only_amax_red", "TP*CP"),
    )
    for phase, elements in (("forward", "3 * fp8_modules"), ("backward", "2 * fp8_modules"))
)

_BEFORE_OUTPUT = tuple(linear for linear in LINEARS if linear not in (_OUTPUT, _PREDICTION_OUTPUT))
_OUTPUTS = (_PREDICTION_OUTPUT, _OUTPUT)

RULES: tuple[Rule, ...] = (
    *_EMBEDDING_FORWARD,
    *linear_rules(_layer("", ""), "forward"),
    *(rule for rule in _attention_calls("") if rule.phase == "forward"),
    *_ROLLS,
    *_PREDICTION_FORWARD,
    *linear_rules((_PREDICTED,), "forward"),
    _EH_OUTPUT,
    *linear_rules(_layer("mtp_", "prediction "), "forward"),
    *(rule for rule in _attention_calls("mtp_") if rule.phase == "forward"),
    *linear_rules(_OUTPUTS, "forward"),
    *_loss("prediction loss", "True", "predictions * M"),
    *_ACCEPTED,
    *_loss("loss", "last", "M"),
    *linear_rules(_BEFORE_OUTPUT, "recompute"),
    *(rule for prefix in ("", "mtp_") for rule in _attention_calls(prefix) if rule.phase == "recompute"),
    _EH_OUTPUT_AGAIN,
    _SAVED_ACTIVATIONS,
    *linear_rules(_OUTPUTS[::-1], "backward"),
    *(rule for rule in _attention_calls("mtp_") if rule.phase == "backward"),
    *linear_rules(_layer("mtp_", "prediction ")[::-1], "backward"),
    *_EH_GRADIENTS,
    *linear_rules((_PREDICTED,), "backward"),
    _PREDICTION_BACKWARD,
    *(rule for rule in _attention_calls("") if rule.phase == "backward"),
    *linear_rules(_layer("", "")[::-1], "backward"),
    _EMBEDDING_BACKWARD,
    *_ONCE,
    *_AMAX,
)

SHARED_EXPERT_RULES: tuple[Rule, ...] = tuple(
    rule for part in ("forward", "recompute", "backward") for rule in linear_rules(SHARED_EXPERTS, part)
)
"""Shared experts of MoE layers: tensor-parallel traffic that belongs to the layer's expert part."""

# -- symbols ---------------------------------------------------------------------------------------------------------


def recompute_modules(job: Job) -> tuple[str, ...]:
    """Modules that selective recomputation repeats; the older option moe_layer_recompute stands for "moe"."""
    older = ("moe",) if is_on(job, "moe_layer_recompute") else ()
    return tuple(dict.fromkeys((*job.recompute_modules, *older)))


def recomputed_layers(job: Job, chunks: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Layers that full recomputation repeats: all of them, or with "block" the first recompute_num_layers of a chunk."""
    if job.recompute_granularity != "full":
        return ()
    if job.recompute_method == "uniform":
        return tuple(layer for chunk in chunks for layer in chunk)
    (number,) = job.require("recompute_num_layers")
    return tuple(layer for chunk in chunks for layer in chunk[:number])


def _modules(place: Place) -> tuple[str, ...]:
    return recompute_modules(place.job) if place.job.recompute_granularity == "selective" else ()


def _recomputed_predictions(place: Place) -> int:
    # multi_token_prediction.py: _checkpointed_forward does nothing for recompute_method "block"
    job = place.job
    repeats = job.recompute_granularity == "full" and job.recompute_method == "uniform"
    return mtp_layers(job, place.stage) if repeats and place.has("multi-token prediction recomputed") else 0


def _prediction_has_experts(place: Place) -> bool:
    # gpt_layer_specs.py: get_gpt_mtp_block_spec takes the last layer of the stage, or of the model if there is none
    (number,) = place.job.require("num_layers")
    return place.job.is_moe_layer(place.layers[-1] if place.layers else number - 1)


def _in_bf16(place: Place, layers: tuple[int, ...]) -> tuple[int, ...]:
    # fp8_utils.py: is_first_last_bf16_layer
    job = place.job
    if not job.first_last_layers_bf16:
        return ()
    (number,) = job.require("num_layers")
    behind = number - job.num_layers_at_end_in_bf16
    return tuple(layer for layer in layers if layer < job.num_layers_at_start_in_bf16 or layer >= behind)


_Select = Callable[[Place, tuple[int, ...]], tuple[int, ...]]


def _dense(place: Place, layers: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(layer for layer in layers if not place.job.is_moe_layer(layer))


def _every(_: Place, layers: tuple[int, ...]) -> tuple[int, ...]:
    return layers


def _recomputed(place: Place) -> tuple[int, ...]:
    return recomputed_layers(place.job, place.chunks)


def _counts_of(name: str, words: str, select: _Select) -> dict[str, Symbol]:
    """Symbols that count decoder layers of one kind: recomputed ones, and those kept in bf16 under fp8."""
    repeats, keeps = "that full recomputation repeats", "that stay in bf16 under fp8"
    return {
        f"{name}_bf16": Symbol(f"{words} {keeps}", lambda place: len(_in_bf16(place, select(place, place.layers)))),
        f"recomputed_{name}": Symbol(f"{words} {repeats}", lambda place: len(select(place, _recomputed(place)))),
        f"recomputed_{name}_bf16": Symbol(
            f"{words} {repeats} and {keeps}", lambda place: len(_in_bf16(place, select(place, _recomputed(place))))
        ),
    }


def _predicted_counts(name: str, words: str, holds: Callable[[Place], bool]) -> dict[str, Symbol]:
    """The same for layers of multi-token prediction, none of which stays in bf16."""
    words = f"layers of multi-token prediction{words}"
    none = Symbol(f"{words} that stay in bf16 under fp8: none", lambda _: 0)
    found = {
        f"mtp_{name}": Symbol(words, lambda place: mtp_layers(place.job, place.stage) if holds(place) else 0),
        f"recomputed_mtp_{name}": Symbol(
            f"{words} that full recomputation repeats",
            lambda place: _recomputed_predictions(place) if holds(place) else 0,
        ),
        f"mtp_{name}_bf16": none,
        f"recomputed_mtp_{name}_bf16": none,
    }
    if name == "layers":
        del found["mtp_layers"]  # a common symbol
    return found


def _prediction_is_dense(place: Place) -> bool:
    return not _prediction_has_experts(place)


def _checkpoints(place: Place) -> int:
    job = place.job
    (number,) = job.require("recompute_num_layers")
    if job.recompute_method == "uniform":
        return sum(ceil(len(chunk) / number) for chunk in place.chunks) + _recomputed_predictions(place)
    return len(recomputed_layers(job, place.chunks))


def _predictions(place: Place) -> int:
    """Output layers and losses of multi-token prediction: where the last stage has them, before 0.14 with the layers."""
    number = place.job.mtp_num_layers or 0
    if not place.has("prediction under context parallelism"):
        return mtp_layers(place.job, place.stage)
    return number if place.is_last else 0


def _deferred(place: Place) -> int:
    """Gathers of the output layer's input that wait for the flush (layers.py: wgrad_deferral_limit, 0 for all)."""
    job = place.job
    if not job.defer_embedding_wgrad_compute or place.pp == 1:
        return 0
    number = place.need("num_microbatches")
    return min(number, job.wgrad_deferral_limit or number)


def _gathered(place: Place) -> str:
    """What TransformerEngine's linears gather: "plain", "float8", "mxfp8", or "unknown"."""
    job = place.job
    if job.transformer_impl != "transformer_engine" or not (is_on(job, "fp8") or is_on(job, "fp4")):
        return "plain"
    if is_on(job, "fp4"):
        return "unknown"
    return {"delayed": "float8", "tensorwise": "float8", "mxfp8": "mxfp8"}.get(job.fp8_recipe, "unknown")


def _overlap(place: Place) -> bool:
    job = place.job
    return (
        job.tp_comm_overlap
        and job.transformer_impl == "transformer_engine"
        and job.sequence_parallel
        and not job.multi_latent_attention
    )


def _whole_down(place: Place) -> bool:
    whole = place.job.transformer_impl != "local"
    return whole and place.has("latent attention down projections whole")


def _fp8_modules(place: Place) -> int:
    """Linears of the stage that hold fp8 state: four in a layer without experts."""
    return 4 * len(place.layers)


def _plain_dense(job: Job) -> bool:
    """Whether every layer has four linears and runs once, so that the maxima of delayed scaling can be counted."""
    return not (
        job.num_experts is not None
        or job.mtp_num_layers
        or job.multi_latent_attention
        or job.fp8_dot_product_attention
        or job.fp8_multi_head_attention
        or job.recompute_granularity == "full"
        or "mlp" in recompute_modules(job)
    )


def _delayed(job: Job) -> bool:
    return is_on(job, "fp8") and job.fp8_recipe == "delayed" and job.transformer_impl == "transformer_engine"


def replicated_parameters(job: Job, rank: int, release: versions.Release | None = None) -> Quantity:
    """Elements whose gradients are summed over the tensor-parallel group once a step, on this rank's stage.

    With sequence parallelism everything that parameters.ROWS marks so: norms, biases of row-parallel linears, routers,
    gates of shared experts, whole down projections, biases of experts that are no grouped linear. Without it only query
    and key norms, because of their names. 0 for TP 1. release: None takes the job's own or, if unknown, the newest known.
    Raises JobError for sizes the job lacks.
    """
    text = job.megatron_core_version
    release = release or (versions.parse(text) if text else versions.KNOWN[-1])
    return _replicated(Place(job, job.layout.stage(rank), release))


def _replicated(place: Place) -> Quantity:
    job = place.job
    if job.tensor_model_parallel_size == 1:
        return Quantity("0", "0", 0)
    # Without sequence parallelism the names q_layernorm and k_layernorm count; a norm inside a TransformerEngine linear
    # has another name.
    named = {"query and key norms"} | ({"query latent norm"} if job.transformer_impl == "local" else set())
    # Experts one by one (SequentialMLP) are row-parallel linears, whose biases are marked; those of one grouped linear not.
    marked = {row.name for row in parameters.ROWS if row.sequence_parallel}
    if job.moe_grouped_gemm:
        marked.discard("experts.fc2 bias")
    else:
        marked.add("experts.fc2 bias")
    wanted = marked if job.sequence_parallel else named
    symbols = Symbols(place, parameters.SYMBOLS, parameters.chunk_symbols(place, None))
    found: list[Quantity] = []
    for row in parameters.ROWS:
        if row.name not in wanted:
            continue
        if parse(row.when).holds(symbols) and parse(row.tensors).whole(symbols):
            text = row.size if row.tensors == "1" else f"{row.tensors} * {row.size}"
            found.append(parse(text).quantity(symbols))
    return Quantity(
        " + ".join(part.symbols for part in found) or "0",
        " + ".join(part.numbers for part in found) or "0",
        sum(part.value for part in found),
    )


SYMBOLS: dict[str, Symbol] = {
    **_counts_of("layers", "decoder layers", _every),
    **_counts_of("dense_layers", "decoder layers with a dense MLP", _dense),
    **_counts_of("moe_layers", "decoder layers with experts", Place.moe),
    **_predicted_counts("layers", "", lambda _: True),
    **_predicted_counts("dense_layers", " with a dense MLP", _prediction_is_dense),
    **_predicted_counts("moe_layers", " with experts", _prediction_has_experts),
    "predictions": Symbol("output layers and losses of multi-token prediction on the stage", _predictions),
    "modules": Symbol("modules that selective recomputation repeats", _modules),
    "checkpointed_mlps": Symbol(
        "layers whose dense MLP runs under a checkpoint",
        lambda place: len(_dense(place, place.layers if "mlp" in _modules(place) else _recomputed(place))),
    ),
    "checkpoints": Symbol("checkpoints of full recomputation in one micro-batch", _checkpoints),
    "deferred": Symbol("output layer inputs that are gathered after the flush", _deferred),
    "gathered": Symbol("what is gathered: plain, float8, mxfp8 or unknown", _gathered),
    "overlap": Symbol("whether userbuffers carry calls of layers", _overlap),
    "whole_down": Symbol("whether every rank holds the down projections of latent attention whole", _whole_down),
    "fp8_modules": Symbol("linears of the stage with fp8 maxima", _fp8_modules),
    "delayed_scaling": Symbol(
        "whether fp8 maxima are reduced, and can be counted",
        lambda place: _delayed(place.job) and _plain_dense(place.job),
    ),
    "replicated": Symbol("elements that are replicated over the tensor-parallel group", _replicated),
    "replicated_elements": Symbol("the same, as a number", lambda place: _replicated(place).value),
    "cp_rank": Symbol("position in the context-parallel group", lambda place: place.cp),
}

# -- what the rules do not know --------------------------------------------------------------------------------------

_PASSES = ("forward", "backward", "recompute")
_SHARDS = ("all_gather", "reduce_scatter")
_AMAX_ROLES = ("tp_dp_cp", "tp_cp")


def _gap(what: str, when: str = "", phases: tuple[str, ...] = (), ops: tuple[str, ...] = ()) -> Gap:
    return Gap(what=what, roles=(ROLE,), when=_all_of("TP > 1", when or f"on({what!r})"), phases=phases, ops=ops)


def _variable(what: str) -> Gap:
    """Sizes or counts differ between micro-batches or steps: touches the loss too."""
    return Gap(what=what, roles=(ROLE,))


GAPS: tuple[Gap, ...] = (
    *(
        _variable(name)
        for name in (
            "variable_seq_lengths",
            "hybrid_context_parallel",
            "dataloader_inter_document_masking",
            "rampup_batch_size",
            "use_legacy_models",
            "hybrid_layer_pattern",
            "hybrid_override_pattern",
            "heterogeneous_layers_config_path",
        )
    ),
    Gap(what="decoder_seq_length", roles=(ROLE,), when="decoder_seq_length is not None and decoder_seq_length != S"),
    Gap(
        what="fp8 maxima of this model",
        roles=_AMAX_ROLES,
        ops=("all_reduce",),
        when="fp8_maxima_unknown",
    ),
    _gap("fp8 recipe without a rule", "gathered == 'unknown' and on('fp8')", _PASSES, ("all_gather",)),
    _gap("fp4", "", _PASSES, ("all_gather", "all_reduce")),
    _gap("tp_comm_overlap with multi_latent_attention", "tp_comm_overlap and multi_latent_attention", _PASSES, _SHARDS),
    _gap("tp_comm_overlap with mtp_num_layers", "tp_comm_overlap and on('mtp_num_layers')", _PASSES, _SHARDS),
    _gap(
        "tp_comm_overlap with first_last_layers_bf16 and recomputation",
        "overlap and on('first_last_layers_bf16') and (recomputed_layers or checkpointed_mlps)",
        _PASSES,
        ("all_gather",),
    ),
    _gap("attention_output_gate with fewer query groups than TP", "on('attention_output_gate') and Ng < TP"),
    _gap(
        "defer_embedding_wgrad_compute with mtp_num_layers",
        "defer_embedding_wgrad_compute and on('mtp_num_layers')",
        ("backward", "other"),
        ("all_gather",),
    ),
    _gap("fp32_residual_connection", "", _PASSES),
    _gap("experimental_attention_variant"),
    _gap("gtp_weight_remat_size"),
    _gap("tensor_parallel_num_weight_shards"),
    _gap("mla_down_proj_fusion"),
    _gap("mtp_detach_heads", "", ("backward",)),
    _gap("symmetric_ar_type", "", _PASSES, ("all_reduce",)),
    _gap("use_kitchen", "", _PASSES, ("all_gather",)),
    _gap("use_megatron_fsdp", "", ("other",), ("all_reduce",)),
    _gap("use_torch_fsdp2", "", ("other",), ("all_reduce",)),
)


def _by_release(place: Place) -> Iterable[NotModelled]:
    job = place.job
    if job.tensor_model_parallel_size == 1:
        return
    if job.num_experts is not None and not place.has("expert grid"):
        yield NotModelled(f"experts in megatron-core {versions.before('expert grid')}", (ROLE,))
    if job.multi_latent_attention and not place.has("latent attention as read"):
        before = versions.before("latent attention as read")
        yield NotModelled(f"multi_latent_attention in megatron-core {before}", (ROLE,))
    if job.mtp_num_layers and not place.has("multi-token prediction"):
        yield NotModelled(f"mtp_num_layers in megatron-core {versions.before('multi-token prediction')}", (ROLE,))
    groups = job.num_query_groups
    few = groups is not None and groups < job.tensor_model_parallel_size and not job.multi_latent_attention
    if few and not place.has("fewer query groups than TP"):
        before = versions.before("fewer query groups than TP")
        yield NotModelled(f"num_query_groups < tensor_model_parallel_size in megatron-core {before}", (ROLE,))


SYMBOLS["fp8_maxima_unknown"] = Symbol(
    "whether fp8 maxima are reduced, and cannot be counted",
    lambda place: _delayed(place.job) and not _plain_dense(place.job),
)

CHAPTER = Chapter(
    name="tensor",
    title="Tensor parallelism",
    source="reference sections 2.1, 2.2, 2.10 and 2.11",
    rules=(*RULES, *SHARED_EXPERT_RULES),
    gaps=GAPS,
    more_gaps=_by_release,
    symbols=SYMBOLS,
)
