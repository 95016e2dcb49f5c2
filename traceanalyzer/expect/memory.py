"""Memory of one rank in bytes: parameters, gradients, optimizer state, activations; beside it what Megatron estimates.

STATE and ACTIVATIONS are the tables, their bytes are formulas over the common symbols (place.py), those of the parameters
(parameters.py) and those below. In short, with P parameters of a rank, N ranks that share their optimizer state (dense
DP*CP, experts EDP, each over the optimizer instances), w and g bytes of a parameter and a gradient:

===================================  ===========  ==================  ==================================================
sharding                             parameters   gradients           optimizer state (Adam, main parameters fp32)
===================================  ===========  ==================  ==================================================
none                                 w*P          g*P                 12*P, without main parameters (fp32 model) 8*P
distributed optimizer                w*P          g*P                 12*P/N, P with the padding of its buffers
Megatron-FSDP: optim                 w*P          g*P                 12*P/N
Megatron-FSDP: optim_grads           w*P          g*P/N               12*P/N
Megatron-FSDP: optim_grads_params    w*P/N        g*P/N               12*P/N, and two gathered layers
===================================  ===========  ==================  ==================================================

Activations of a layer and micro-batch, in bytes: S*B*H*(34 + 5*Nh*S/H)/TP with sequence parallelism, attention that keeps
its scores, MHA, F = 4*H, a plain activation and dropout; the same without the second term where core attention is fused
or recomputed: S*B*H*(18 + 4*F/H)/TP. The parts are named, so that grouped queries, gated activations, experts, context
parallelism (S/CP everywhere) and each recomputed module change only their own. They are multiplied by the micro-batches
that the schedule has in flight when it holds most.

Sizes are those of the tensors, not what an allocator makes of them: NOT_COUNTED says what is missing.

Source: reference section 5; Korthikanti et al., arXiv 2205.05198, table 2; megatron-core 0.16.1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

from traceanalyzer import traffic
from traceanalyzer.errors import JobError
from traceanalyzer.expect import buckets, parameters, schedule, versions
from traceanalyzer.expect.formula import parse
from traceanalyzer.expect.model import Evidence
from traceanalyzer.expect.place import Place, Symbol, Symbols, is_on
from traceanalyzer.expect.quantity import Quantity
from traceanalyzer.job import Job

Kind = Literal["parameters", "gradients", "optimizer", "activations", "buffers", "host"]

KINDS: tuple[Kind, ...] = ("parameters", "gradients", "optimizer", "activations", "buffers")
"""What a device holds, in the order of the tables; "host" is kept in the memory of the host instead."""


@dataclass(frozen=True)
class Row:
    """One part of the memory.

    bytes: of the part, a formula; of one layer and micro-batch where ``times`` is set. times: symbol for how many the
    rank holds at its peak. when: condition. expert: belongs to the experts that expert parallelism distributes.
    """

    name: str
    kind: Kind
    bytes: str
    evidence: Evidence
    when: str = "True"
    times: str = ""
    expert: bool = False
    note: str = ""


@dataclass(frozen=True)
class Part:
    """Memory of one kind on one rank: bytes with their formula, and why they are believed. expert: as in Row."""

    name: str
    kind: Kind
    bytes: Quantity
    evidence: Evidence
    expert: bool = False
    note: str = ""


@dataclass(frozen=True)
class MegatronEstimate:
    """What Megatron-LM 0.16.1 itself prints for a job (training/theoretical_memory_usage.py), in bytes.

    weights_and_optimizer: of the fullest stage; elsewhere: of the others (None with one stage). activations: of the first
    stage. It divides the optimizer state by the data-parallel size only, knows neither context nor expert parallelism nor
    uneven stages; its activations know no experts, grouped queries or gated activation, and without sequence parallelism
    or selective recomputation no width of the MLP but 4*H.
    """

    weights_and_optimizer: Fraction
    elsewhere: Fraction | None
    activations: Fraction

    @property
    def total(self) -> Fraction:
        """Weights and optimizer of the fullest stage, and activations."""
        return self.weights_and_optimizer + self.activations


@dataclass(frozen=True)
class Memory:
    """Memory of one rank.

    parts: see Part; nothing of size 0. not_counted: what comes on top, in words. megatron: see MegatronEstimate; None
    where Megatron has none either.
    """

    stage: int
    parts: tuple[Part, ...]
    not_counted: tuple[str, ...]
    megatron: MegatronEstimate | None

    def total(self, kind: Kind | None = None, expert: bool | None = None) -> int:
        """Bytes of one kind, or of all that the device holds; of experts, of everything else, or both."""
        return sum(
            part.bytes.value
            for part in self.parts
            if part.kind in ((kind,) if kind else KINDS) and expert in (None, part.expert)
        )


# -- state -----------------------------------------------------------------------------------------------------------

_DDP = Evidence(
    "run",
    "megatron-core 0.16.1 recorded: dp2_distopt, tp2ep2_sp_alltoall; distributed/param_and_grad_buffer.py: "
    "_ParamAndGradBuffer",
)
_ADAM = Evidence(
    "source",
    "optimizer/optimizer.py: Float16OptimizerWithFloat16Params, FP32Optimizer; optimizer/distrib_optimizer.py: "
    "_build_model_and_main_param_groups; optimizer/optimizer_config.py: exp_avg_dtype, store_param_remainders",
)
_OFFLOAD = Evidence("source", "optimizer/cpu_offloading/hybrid_optimizer.py: HybridDeviceOptimizer")
_FSDP = Evidence(
    "run",
    "megatron-core 0.16.1 run with two real processes, sizes of the buffers but for their padding: DP2, Megatron-FSDP, every "
    "data_parallel_sharding_strategy; distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py: ParamAndGradBuffer",
)
_GATHERED = Evidence("inferred", "reference section 5: Megatron-FSDP keeps about two gathered units")
_FSDP2 = Evidence("inferred", "distributed/torch_fully_sharded_data_parallel.py: fully_shard of every layer")

_FP8 = Evidence(
    "source", "TransformerEngine 2.13, tensor/float8_tensor.py: one byte an element; fp8_utils.py: is_float8tensor"
)


_MARKS: tuple[tuple[bool, dict[str, str]], ...] = (
    (False, {"{P}": "P", "{B}": "Pb", "{Q}": "P8", "{N}": "N", "{O}": "No"}),
    (True, {"{P}": "Pe", "{B}": "Peb", "{Q}": "Pe8", "{N}": "Ne", "{O}": "Noe"}),
)
"""Whether of experts, and the symbols for: parameters, those with padding, those in fp8, ranks that share them."""


def _both(name: str, kind: Kind, size: str, evidence: Evidence, when: str, note: str = "") -> Iterator[Row]:
    """A row for everything but experts, and one for experts."""
    for expert, symbols in _MARKS:
        text = size
        for mark, symbol in symbols.items():
            text = text.replace(mark, symbol)
        here = f"({when}) and {symbols['{P}']} > 0"
        yield Row(f"expert {name}" if expert else name, kind, text, evidence, here, expert=expert, note=note)


_PLAIN = "sharding == 'none'"
_ZERO1 = "sharding == 'distributed optimizer'"
_WHOLE = "sharding in ('no_shard', 'optim', 'optim_grads')"
_CUT = "sharding == 'optim_grads_params'"
_ANY_FSDP = "sharding in ('no_shard', 'optim', 'optim_grads', 'optim_grads_params')"
_TORCH = "sharding == 'torch FSDP2'"


def _optimizer(name: str, width: str, when: str) -> Iterator[Row]:
    """Rows of one optimizer tensor with ``width`` bytes an element, for every way to share it; and its part on the host."""
    for elements, evidence, sharded in (
        ("{P}", _ADAM, _PLAIN),
        ("{B}/{N}", _ADAM, _ZERO1),
        ("ceil({P}/{O})", _FSDP, _ANY_FSDP),
        ("ceil({P}/{N})", _FSDP2, _TORCH),
    ):
        condition = f"training and {sharded} and {width} > 0 and {when}"
        yield from _both(name, "optimizer", f"{width} * {elements}", evidence, f"{condition} and not offloaded")
        on_device = f"ceil((1 - offloaded) * {width} * {elements})"
        on_host = f"{width} * {elements} - ceil((1 - offloaded) * {width} * {elements})"
        yield from _both(name, "optimizer", on_device, _OFFLOAD, f"{condition} and offloaded")
        yield from _both(name, "host", on_host, _OFFLOAD, f"{condition} and offloaded")


STATE: tuple[Row, ...] = (
    *_both("parameters", "parameters", "w * {P}", _DDP, f"{_PLAIN} and not fp8_param_gather"),
    *_both("parameters", "parameters", "w * {B}", _DDP, f"{_ZERO1} and not fp8_param_gather", "padded buffer"),
    *_both("parameters", "parameters", "w * ({B}-{Q})", _FP8, f"({_PLAIN} or {_ZERO1}) and fp8_param_gather"),
    *_both("fp8 parameters", "parameters", "{Q}", _FP8, f"({_PLAIN} or {_ZERO1}) and fp8_param_gather"),
    *_both("parameters", "parameters", "w * {P}", _FSDP, _WHOLE),
    *_both("parameters", "parameters", "w * ceil({P}/{N})", _FSDP, _CUT),
    *_both("parameters", "parameters", "w * ceil({P}/{N})", _FSDP2, _TORCH),
    *_both("gradients", "gradients", "g * {P}", _DDP, f"training and {_PLAIN}"),
    *_both("gradients", "gradients", "g * {B}", _DDP, f"training and {_ZERO1}", "padded buffer"),
    *_both("gradients", "gradients", "g * {P}", _FSDP, "training and sharding in ('no_shard', 'optim')"),
    *_both(
        "gradients",
        "gradients",
        "g * ceil({P}/{N})",
        _FSDP,
        "training and sharding in ('optim_grads', 'optim_grads_params')",
    ),
    *_both("gradients", "gradients", "w * ceil({P}/{N})", _FSDP2, f"training and {_TORCH}"),
    *_optimizer("main parameters", "main", "True"),
    *_optimizer("first moment", "first_moment", "True"),
    *_optimizer("second moment", "second_moment", "True"),
    Row("gathered parameters", "buffers", "2 * w * unit", _GATHERED, _CUT, note="this layer and the next"),
    Row("gathered parameters", "buffers", "w * unit", _FSDP2, _TORCH, note="one layer"),
)

# -- activations -----------------------------------------------------------------------------------------------------

_TABLE = Evidence(
    "source",
    "Korthikanti et al., arXiv 2205.05198, table 2; Megatron-LM training/theoretical_memory_usage.py: "
    "compute_activation_memory",
)
_SAVED = Evidence(
    "run",
    "megatron-core 0.16.1 run on a fake process group, tensors saved for the backward pass counted: TP2, SP, GPT, with and "
    "without experts (EP2, ETP 2 and 1, shared expert), latent attention; not what TransformerEngine keeps",
)
_SHAPES = Evidence("inferred", "shapes of what the layer keeps for its backward pass; reference section 5")
_CHECKPOINT = Evidence(
    "run",
    "megatron-core 0.16.1 run on a fake process group: TP2, SP, full recompute; tensor_parallel/random.py: "
    "CheckpointFunction; transformer/transformer_block.py: _checkpointed_forward",
)
_LOSS = Evidence(
    "run", _SAVED.where + "; tensor_parallel/cross_entropy.py: _VocabParallelCrossEntropy keeps the fp32 softmax"
)
_P2P = Evidence(
    "inferred", "pipeline_parallel/p2p_communication.py: one message of each gradient; activations are kept anyway"
)


def _kept(name: str, size: str, times: str, when: str = "True", evidence: Evidence = _TABLE, note: str = "") -> Row:
    return Row(name, "activations", size, evidence, when, times, note=note)


_MLA = "multi_latent_attention"
_NOT_MLA = "not multi_latent_attention"
_LOCAL = "transformer_impl == 'local'"

ACTIVATIONS: tuple[Row, ...] = (
    # t, ts: tokens of a micro-batch in and between tensor-parallel regions. a: bytes of an activation, r: of the residual.
    _kept("attention norm input", "r * ts * H", "held"),
    # A norm inside a linear layer of TransformerEngine cannot be recomputed by itself (transformer_layer.py:
    # recompute_input_layernorm, recompute_pre_mlp_layernorm); one inside a recomputed MLP goes with it.
    _kept("attention input", "a * ts * H", "held", f"not (recomputes('layernorm') and ({_LOCAL} or {_MLA}))", _SAVED),
    _kept("query, key, value", "a * t * (Nh+2*Ng)*d/TP", "held", _NOT_MLA, _SAVED),
    _kept(
        "rest of qkv output",
        "a * t * (Nh+Ng)*d/TP",
        "held",
        f"{_NOT_MLA} and {_LOCAL} and position_embedding_type == 'rope'",
        _SAVED,
        "value is a view of it, the rotation made new queries and keys",
    ),
    _kept("attention gate", "a * t * Nh*d/TP", "held", f"{_NOT_MLA} and gated_attention", _SHAPES),
    _kept("query latent", "a * ts * (1+normed)*q_rank", "held", f"{_MLA} and q_rank", _SAVED),
    _kept("key and value latent", "a * ts * ((1+normed)*kv_lora_rank+qk_pos_emb_head_dim)", "held", _MLA, _SAVED),
    _kept(
        "query, key, value",
        "a * t * Nh*(2*qk_head_dim+2*qk_pos_emb_head_dim+v_head_dim)/TP",
        "held",
        f"{_MLA} and not recomputes('mla_up_proj')",
        _SAVED,
    ),
    _kept("attention softmax", "a * t * S * Nh/TP", "held", "unfused and not recomputes('core_attn')"),
    _kept(
        "attention dropout",
        "(a+1) * t * S * Nh/TP",
        "held",
        "unfused and not recomputes('core_attn') and attention_dropout > 0",
        note="mask and result",
    ),
    _kept("softmax statistics", "4 * t * Nh/TP", "held", "not unfused and not recomputes('core_attn')", _SHAPES),
    _kept("attention output", "a * t * Nh*d/TP", "held", _NOT_MLA, _SAVED),
    _kept("attention output", "a * t * Nh*v_head_dim/TP", "held", _MLA, _SAVED),
    _kept("attention dropout mask", "ts * H", "held", "hidden_dropout > 0"),
    _kept("mlp norm input", "r * ts * H", "held"),
    _kept("mlp input", "a * ts * H", "held_dense", f"not recomputes('layernorm' if {_LOCAL} else 'mlp')", _SAVED),
    _kept("mlp input of experts", "a * ts * H", "held_moe", "not recomputes('layernorm')", _SAVED),
    _kept("mlp.fc1 output", "a * t * G*F/TP", "held_dense", "not recomputes('mlp')", _SAVED),
    _kept("mlp.fc2 input", "a * t * F/TP", "held_dense", "not recomputes('mlp')", _SAVED),
    _kept("mlp dropout mask", "ts * H", "held", "hidden_dropout > 0"),
    _kept(
        "router", "ts * ((rb+1)*E + 20*k)", "held_moe", "not recomputes('moe')", _SAVED, "probabilities, map, indices"
    ),
    _kept("experts.fc1 input", "a * R * He", "held_moe", "not recomputes('moe')", _SAVED, "with balanced routing"),
    _kept(
        "experts.fc1 output", "a * R * G*Fe/ETP", "held_moe", "not recomputes('moe')", _SAVED, "with balanced routing"
    ),
    _kept(
        "experts.fc2 input",
        "a * R * Fe/ETP",
        "held_moe",
        "not recomputes('moe') and not recomputes('moe_act')",
        _SAVED,
        "with balanced routing",
    ),
    _kept(
        "experts.fc2 output",
        "a * ts * k * He",
        "held_moe",
        "not recomputes('moe') and not since('weighted at the experts')",
        _SHAPES,
        "multiplied by the probabilities on its return",
    ),
    _kept("latent fc2 input", "a * ts * latent", "held_moe", "latent and not recomputes('moe')", _SHAPES),
    _kept("shared expert.fc1 output", "a * t * G*Fs/TP", "held_moe", "shares_expert", _SAVED),
    _kept("shared expert.fc2 input", "a * t * Fs/TP", "held_moe", "shares_expert", _SAVED),
    _kept("checkpoints", "a * tc * H", "checkpoints", evidence=_CHECKPOINT, note="inputs of recomputed layers"),
    # First and last stage.
    _kept("token ids", "8 * t", "begun", "begins", _SAVED),
    _kept("position ids", "8 * t", "begun", "begins and position_embedding_type == 'learned_absolute'", _SHAPES),
    _kept("embedding dropout mask", "ts * H", "begun", "begins and hidden_dropout > 0"),
    _kept(
        "prediction input",
        "(2*r+4*a) * ts * H",
        "predicted",
        "predictions",
        _SHAPES,
        "two norms and their outputs, joined",
    ),
    _kept("final norm input", "r * ts * H", "losses", "ends"),
    _kept("output layer input", "a * ts * H", "losses", "ends", _SAVED),
    _kept("logits", "4 * t * V/TP", "losses", "ends", _LOSS, "softmax in fp32"),
    # Messages of the pipeline beside the activations that are kept anyway.
    Row("gradient received", "buffers", "r * ts * H", _P2P, "training and PP > 1 and not last"),
    Row("gradient to send", "buffers", "r * ts * H", _P2P, "training and PP > 1 and not first"),
)

NOT_COUNTED: tuple[str, ...] = (
    "fragmentation and rounding of the caching allocator",
    "CUDA context, NCCL buffers, cuBLAS and attention workspaces",
    "tensors that live for one layer only (gathered inputs, logits before fp32, gradients of activations)",
    "storage that a view keeps alive (TransformerEngine), statistics of norms, rotary tables, attention mask, targets",
    "parts of activations and softmax that are kept twice where their fusion is off",
)
"""What comes on top of every estimate; estimate adds what the job's own options bring."""

_OPTIONS: tuple[tuple[str, str], ...] = (
    ("fp8", "fp8: inputs of linear layers kept in one byte, cached and transposed weights, scaling state"),
    ("fp4", "fp4: inputs of linear layers kept in half a byte, cached weights"),
    ("cpu_offloading", "cpu_offloading: activations moved to the host are counted as if they stayed"),
    (
        "fine_grained_activation_offloading",
        "fine_grained_activation_offloading: activations moved to the host are counted as if they stayed",
    ),
    ("moe_enable_deepep", "moe_enable_deepep: buffers of DeepEP"),
    (
        "use_megatron_fsdp",
        "use_megatron_fsdp: padding, gathered parameters outside layers, gradients before their reduction",
    ),
    ("nccl_ub", "nccl_ub: registered buffers"),
    ("optimizer_cpu_offload", "optimizer_cpu_offload: whole tensors are moved, so that the split is not exact"),
    ("cross_entropy_loss_fusion", "cross_entropy_loss_fusion: logits may be kept in the type of the activations"),
    (
        "defer_embedding_wgrad_compute",
        "defer_embedding_wgrad_compute: inputs and gradients of the output layer of all micro-batches",
    ),
    ("delay_wgrad_compute", "delay_wgrad_compute: inputs of linear layers kept for the later weight gradient"),
    ("enable_cuda_graph", "enable_cuda_graph: static buffers of the graphs"),
)


# -- symbols ---------------------------------------------------------------------------------------------------------


def _bytes_of(dtype: str) -> int:
    size = traffic.tensor_bytes(1, traffic.normalise_dtype(dtype) or dtype)
    if size is None:
        raise JobError(f"unknown element type {dtype}")
    return int(size)


def _activation_bytes(place: Place) -> int:
    return _bytes_of(place.job.activation_dtype)


def _sharding(place: Place) -> str:
    job = place.job
    if job.use_torch_fsdp2:
        return "torch FSDP2"
    if job.use_megatron_fsdp or is_on(job, "use_custom_fsdp"):
        return job.data_parallel_sharding_strategy
    return "distributed optimizer" if job.use_distributed_optimizer else "none"


def _is_fsdp(place: Place) -> bool:
    return _sharding(place) not in ("none", "distributed optimizer", "torch FSDP2")


def _is_precision_aware(place: Place) -> bool:
    return place.job.use_precision_aware_optimizer


def _main(place: Place) -> int:
    """Bytes of a main parameter: 0 where the parameters themselves are fp32."""
    job = place.job
    if _is_fsdp(place):
        return 4 if job.preserve_fp32_weights else 0
    if job.params_dtype == "float32":
        return 0
    if not _is_precision_aware(place):
        return 4
    main = _bytes_of(job.main_params_dtype)
    held_outside = main == 4 and bool(job.fp8) and job.fp8_recipe != "delayed"
    # The upper half of an fp32 main parameter is the bf16 parameter itself.
    return 2 if main == 4 and job.bf16 and job.store_param_remainders and not held_outside else main


def _moment(place: Place, dtype: str, second: bool) -> int:
    job = place.job
    if job.optimizer == "sgd":
        return 0 if second else 4 * (job.extra.get("sgd_momentum", 0.9) not in (0, 0.0))
    if job.optimizer != "adam":
        return 0
    return _bytes_of(dtype) if _is_precision_aware(place) else 4


def _sharers(role: str, outer: bool) -> Any:
    def size(place: Place) -> int:
        instances = place.job.num_distributed_optimizer_instances
        inner = place.job.layout.group_size(role) // instances
        whole = outer and _is_fsdp(place) and place.job.outer_dp_sharding_strategy == "optim"
        if _sharding(place) == "no_shard" or _sharding(place) == "none":
            return 1
        return inner * instances if whole else inner

    return size


def _rows_at_experts(place: Place) -> int:
    job, symbols = place.job, place.symbols
    tokens = parse("S/(CP*SP) * B").whole(symbols)
    routed, ranks = tokens * symbols["k"], symbols["ETP"]
    factor = job.moe_expert_capacity_factor
    if factor is None:
        return int(routed * ranks)
    if job.moe_pad_expert_input_to_capacity:
        return int(math.ceil(Fraction(str(factor)) * routed / symbols["E"]) * symbols["E"] * ranks)
    return int(min(routed, math.ceil(Fraction(str(factor)) * routed / symbols["E"]) * symbols["E"]) * ranks)


def _parameter_count(expert: bool) -> Any:
    return lambda place: sum(part.elements.value for part in _held(place) if part.expert == expert)


def _held(place: Place) -> list[parameters.Component]:
    return parameters.components(place.job, place.rank, None, place.release)


def _padded(expert: bool, quantized: bool = False) -> Any:
    return lambda place: sum(
        placed.bucket.elements for placed in buckets.of_place(place, expert=expert) if placed.quantized or not quantized
    )


def _unit(place: Place) -> int:
    """Parameters of the largest layer: what the fully sharded wrappers gather at once."""
    return max((parameters.total(parameters.of_layer(place, layer)).value for layer in place.layers), default=0)


SYMBOLS: dict[str, Symbol] = {
    **parameters.SYMBOLS,
    "P": Symbol("parameters of the rank, experts apart", _parameter_count(False)),
    "Pe": Symbol("parameters of the rank's experts, where they are apart", _parameter_count(True)),
    "Pb": Symbol("P with the padding of its buffers", _padded(False)),
    "Peb": Symbol("Pe with the padding of its buffers", _padded(True)),
    "P8": Symbol("those of Pb that are weights of linear layers, stored in fp8", _padded(False, True)),
    "Pe8": Symbol("those of Peb that are weights of linear layers, stored in fp8", _padded(True, True)),
    "N": Symbol("ranks that share what is sharded, experts apart", _sharers("dp_cp", False)),
    "Ne": Symbol("ranks that share what is sharded of experts", _sharers("edp", False)),
    "No": Symbol("ranks that share optimizer state under Megatron-FSDP", _sharers("dp_cp", True)),
    "Noe": Symbol("ranks that share optimizer state of experts under Megatron-FSDP", _sharers("edp", True)),
    "sharding": Symbol("how state is shared", _sharding),
    "w": Symbol("bytes of a parameter", lambda place: _bytes_of(place.job.params_dtype or "float32")),
    "g": Symbol("bytes of a gradient", lambda place: _bytes_of(place.job.main_grad_dtype)),
    "main": Symbol("bytes of a main parameter", _main),
    "first_moment": Symbol("bytes of exp_avg", lambda place: _moment(place, place.job.exp_avg_dtype, False)),
    "second_moment": Symbol("bytes of exp_avg_sq", lambda place: _moment(place, place.job.exp_avg_sq_dtype, True)),
    "offloaded": Symbol(
        "part of the optimizer state that is in the host's memory",
        lambda place: Fraction(str(place.job.optimizer_offload_fraction)) if place.job.optimizer_cpu_offload else 0,
    ),
    "unit": Symbol("parameters of a layer", _unit),
    "a": Symbol("bytes of an activation", _activation_bytes),
    "r": Symbol(
        "bytes of an element of the residual stream",
        lambda place: 4 if is_on(place.job, "fp32_residual_connection") else _activation_bytes(place),
    ),
    "rb": Symbol(
        "bytes of a router logit",
        lambda place: _bytes_of(place.job.moe_router_dtype) if place.job.moe_router_dtype else _activation_bytes(place),
    ),
    "t": Symbol(
        "tokens of a micro-batch in tensor-parallel regions", lambda place: parse("S/CP * B").whole(place.symbols)
    ),
    "ts": Symbol("tokens of a micro-batch between them", lambda place: parse("S/(CP*SP) * B").whole(place.symbols)),
    "tc": Symbol(
        "tokens of a checkpoint",
        lambda place: parse("S/(CP*TP) * B" if place.job.distribute_saved_activations else "S/(CP*SP) * B").whole(
            place.symbols
        ),
    ),
    "R": Symbol("rows at the experts of the rank, with balanced routing", _rows_at_experts),
    "normed": Symbol("1 if latents are normalised", lambda place: int(place.job.qk_layernorm)),
    "unfused": Symbol(
        "whether attention keeps its scores",
        lambda place: (
            place.job.context_parallel_size == 1
            and (
                place.job.transformer_impl == "local"
                or str(place.job.extra.get("attention_backend", "")).rsplit(".", 1)[-1] in ("unfused", "local")
            )
        ),
    ),
    "recomputes": Symbol("whether a module is recomputed", lambda place: lambda module: _recomputes(place, module)),
    "shares_expert": Symbol(
        "whether a shared expert keeps something",
        lambda place: (
            place.job.moe_shared_expert_intermediate_size is not None
            and not _recomputes(place, "moe")
            and not _recomputes(place, "shared_experts")
        ),
    ),
}
"""Symbols of these tables beside the common ones; those of the schedule are in _in_flight."""


def _recomputes(place: Place, module: str) -> bool:
    job = place.job
    if module == "moe" and is_on(job, "moe_layer_recompute"):
        return True
    if job.recompute_granularity != "selective":
        return False
    return module in (job.recompute_modules if place.has("recompute_modules") else ("core_attn",))


# -- what the schedule holds -----------------------------------------------------------------------------------------


_NO_LAYER = Fraction(1, 10**6)


def _chunks_in_flight(place: Place) -> tuple[int, ...]:
    """Micro-batches that each model chunk of the stage holds when the stage holds most layers."""
    if place.job.forward_only:
        return (0,) * place.chunk_count
    plan = schedule.of_job(place.job, place.release)
    if plan is None:
        return (1,)
    sizes = [Fraction(len(layers)) for layers in place.chunks]
    held: Counter[int] = Counter()
    most, peak = Fraction(-1), dict(held)
    for action in schedule.actions(plan, place.stage):
        if action.kind == "F":
            held[action.chunk] += 1
        elif action.kind == "B":
            held[action.chunk] -= 1
        # A chunk without layers still holds its input.
        weight = sum(((sizes[chunk] or _NO_LAYER) * number for chunk, number in held.items()), Fraction(0))
        if weight > most:
            most, peak = weight, dict(held)
    return tuple(peak.get(chunk, 0) for chunk in range(place.chunk_count))


def _in_flight(place: Place) -> dict[str, Any]:
    """Symbols of what is held at the peak, in layers times micro-batches.

    held, held_dense, held_moe: layers whose activations are kept whole: all, without and with experts; full recomputation
    leaves those that one recomputed block brings back. checkpoints: inputs kept instead. begun, predicted, losses:
    micro-batches of the embedding, layers of multi-token prediction, losses.
    """
    job = place.job
    numbers = _chunks_in_flight(place)
    held: Counter[bool] = Counter()
    checkpoints = 0
    brought_back: Counter[bool] = Counter()
    predictions = 0
    for chunk, number in enumerate(numbers):
        here = parameters.chunk_symbols(place, chunk)
        kinds = [bool(place.moe((layer,))) for layer in place.chunks[chunk]]
        kinds += [here["moe_blocks"] > sum(kinds)] * here["predictions"]
        predictions += here["predictions"]
        kept, inputs, block = _recomputed(job, kinds)
        for kind in kept:
            held[kind] += number
        checkpoints += number * inputs
        if number and len(block) > sum(brought_back.values()):
            brought_back = Counter(block)
    held += brought_back
    at_end = int(not job.forward_only)
    return {
        "held": held.total(),
        "held_dense": held[False],
        "held_moe": held[True],
        "checkpoints": checkpoints,
        "begun": numbers[0],
        "predicted": predictions * at_end,
        "losses": (1 + predictions) * at_end,
    }


def _recomputed(job: Job, kinds: list[bool]) -> tuple[list[bool], int, list[bool]]:
    """Of the layers of a chunk (True: with experts): those kept whole, inputs kept, layers of the largest block."""
    if job.recompute_granularity != "full" or not kinds:
        return kinds, 0, []
    size = job.recompute_num_layers or 1
    if job.recompute_method == "block":
        return kinds[size:], min(size, len(kinds)), [any(kinds[:size])]
    blocks = [kinds[start : start + size] for start in range(0, len(kinds), size)]
    return [], len(blocks), max(blocks, key=lambda block: (len(block), sum(block)))


# -- the estimate ----------------------------------------------------------------------------------------------------


def estimate(job: Job, rank: int, release: versions.Release | None = None) -> Memory:
    """Memory of global ``rank`` at its peak, by part.

    release: of megatron-core; None takes the job's own or, if unknown, the newest known one. All ranks of a stage hold
    the same but for the last elements of a shard; routing is taken as balanced. Raises JobError if the job does not say
    a size that is needed, or for a rank outside the world.
    """
    text = job.megatron_core_version
    release = release or (versions.parse(text) if text else versions.KNOWN[-1])
    return _of_stage(job, job.layout.stage(rank), release)


@lru_cache(maxsize=256)
def _of_stage(job: Job, stage: int, release: versions.Release) -> Memory:
    place = Place(job, stage, release)
    member = {**parameters.chunk_symbols(place, None), **_in_flight(place)}
    symbols = Symbols(place, SYMBOLS, member)
    parts = tuple(_apply((*STATE, *ACTIVATIONS), symbols))
    return Memory(stage, parts, tuple(_not_counted(place)), megatron_estimate(job))


def _apply(rows: Iterable[Row], symbols: Symbols) -> Iterator[Part]:
    for row in rows:
        if row.times and symbols[row.times] == 0:
            continue
        if not parse(row.when).holds(symbols):
            continue
        text = f"{row.times} * {row.bytes}" if row.times else row.bytes
        size = parse(text).quantity(symbols)
        if size.value:
            yield Part(row.name, row.kind, size, row.evidence, row.expert, row.note)


def _not_counted(place: Place) -> Iterator[str]:
    job = place.job
    yield from NOT_COUNTED
    for name, words in _OPTIONS:
        if is_on(job, name):
            yield words
    if job.moe_token_dispatcher_type == "flex" and job.num_experts is not None:
        yield "moe_token_dispatcher_type=flex: buffers of the dispatcher"
    if job.optimizer not in ("adam", "sgd"):
        yield f"optimizer={job.optimizer}: its state, beside the main parameters"
    if job.forward_only:
        yield "forward_only: activations, of which no layer keeps any"
    elif job.num_experts is not None and job.moe_expert_capacity_factor is None:
        yield "routing that is not balanced"
    if job.main_grad_dtype != "float32" and not job.use_precision_aware_optimizer and job.params_dtype != "float32":
        yield "fp32 copies of the gradients during optimizer.step()"
    for reason in parameters.undescribed(job, place.rank, place.release):
        yield f"{reason}: its parameters and activations"


# -- Megatron's own estimate -------------------------------------------------------------------------------------------

_WITH_SP = "sequence_parallel and recompute_granularity == 'selective'"

MEGATRON: tuple[tuple[str, str], ...] = (
    (
        "q_term",
        "q_rank*(H + Nh*(qk_head_dim+qk_pos_emb_head_dim) + W) if q_rank else H*Nh*(qk_head_dim+qk_pos_emb_head_dim)",
    ),
    ("kv_term", "kv_lora_rank*(H + Nh*(qk_head_dim+v_head_dim) + W) + H*qk_pos_emb_head_dim"),
    ("attention", "q_term + kv_term + Nh*v_head_dim*H if multi_latent_attention else 2*H*d*Nh*(1 + Ng/Nh)"),
    ("gated", "3/2 if swiglu else 1"),
    ("dense_layer", "2*H*(F*gated + W) + attention"),
    ("moe_layer", "2*H*(moe_ffn_hidden_size*num_experts*gated + shared*gated + W) + attention if num_experts else 0"),
    ("block", "dense_layer*all_dense + moe_layer*all_moe + W*H"),
    ("mtp_block", "dense_layer*mtp_dense + moe_layer*mtp_moe"),
    ("second", "V*H if untie_embeddings_and_output_weights and PP == 1 else 0"),
    ("fullest", "(block/PP + mtp_block + V*H + second) / TP"),
    ("other", "block/(PP*TP)"),
    ("bytes_per_parameter", "6 + 12/DP if use_distributed_optimizer else 18"),
    ("weights", "fullest * bytes_per_parameter"),
    ("weights_elsewhere", "other * bytes_per_parameter"),
    ("layer", f"S*B*H*(18 + 4*F/H) if {_WITH_SP} else S*B*H*(10 + 24/TP)"),
    ("kept", "layer*num_layers + 8*S*B*PP + S*B*H*PP"),
    ("in_flight", "1 + (PP-1)/(PP*v) if v > 1 else min(1, M/PP) if PP > 1 else 1"),
    ("loss", f"0 if PP > 1 else S*B*H*4*(1 + V/H) if {_WITH_SP} else (S*B*V/TP + S*B*H) * 2"),
    ("activations", f"(kept*in_flight + loss)/TP if {_WITH_SP} else (kept*in_flight + loss) * 105/100"),
)
"""Megatron's formulas, each over the symbols and the lines before it; the last of a name is what it prints, in bytes.

Source: Megatron-LM core_v0.16.1, training/theoretical_memory_usage.py.
"""


def megatron_estimate(job: Job) -> MegatronEstimate | None:
    """What Megatron-LM 0.16.1 would print as theoretical memory footprint.

    None for a hybrid model, as there, and for a job of 0.18 or later, which counts experts another way.

    Raises JobError if the job does not say a size that is needed.
    """
    if is_on(job, "hybrid_override_pattern") or is_on(job, "hybrid_layer_pattern") or is_on(job, "is_hybrid_model"):
        return None
    if job.megatron_core_version and versions.parse(job.megatron_core_version) >= (0, 18):
        return None
    (layers,) = job.require("num_layers")
    place = Place(job, 0, versions.KNOWN[-1])
    experts = sum(job.is_moe_layer(layer) for layer in range(layers))
    predictions = job.mtp_num_layers or 0
    like_experts = job.is_moe_layer(layers - 1)
    values: dict[str, Any] = {
        "all_moe": experts,
        "all_dense": layers - experts,
        "mtp_moe": predictions * like_experts,
        "mtp_dense": predictions * (not like_experts),
        "shared": job.moe_shared_expert_intermediate_size or 0,
    }
    for name, text in MEGATRON:
        values[name] = parse(text).value(Symbols(place, parameters.SYMBOLS, values))
    return MegatronEstimate(
        Fraction(values["weights"]),
        Fraction(values["weights_elsewhere"]) if job.pipeline_model_parallel_size > 1 else None,
        Fraction(values["activations"]),
    )


# -- the document's table --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ZeroMemory:
    """Bytes of one rank by the seed document's table of ZeRO stages: parameters, gradients, optimizer state."""

    parameters: Fraction
    gradients: Fraction
    optimizer: Fraction
    evidence: Evidence

    @property
    def total(self) -> Fraction:
        """All three."""
        return self.parameters + self.gradients + self.optimizer


ZERO: Mapping[int, tuple[str, str, str]] = {
    0: ("2*Psi", "2*Psi", "12*Psi"),
    1: ("2*Psi", "2*Psi", "12*Psi/DP"),
    2: ("2*Psi", "2*Psi/DP", "12*Psi/DP"),
    3: ("2*Psi/DP", "2*Psi/DP", "12*Psi/DP"),
}
"""ZeRO stage (0: plain data parallelism) -> parameters, gradients, optimizer state in bytes; bf16 gradients (5.2)."""


def document_zero_memory(psi: int | Fraction, dp: int, stage: int) -> ZeroMemory:
    """The document's memory of a rank with ``psi`` parameters and ``dp`` data-parallel ranks, exact.

    stage: 0 without ZeRO, 1 optimizer state, 2 also gradients, 3 also parameters. psi is per rank, dense and experts each
    with their own replicas (errata E21, E22). Raises JobError for another stage or a dp below 1.
    """
    if stage not in ZERO:
        raise JobError(f"ZeRO stage {stage}: must be one of {', '.join(map(str, ZERO))}")
    if dp < 1:
        raise JobError(f"dp={dp}: must be at least 1")
    weights, gradients, optimizer = (Fraction(parse(text).value({"Psi": psi, "DP": dp})) for text in ZERO[stage])
    where = Evidence("document", "5.2 (S5.2-1 to S5.2-16), 5.4, 6.9; corrected by E19, E21, E22")
    return ZeroMemory(weights, gradients, optimizer, where)
