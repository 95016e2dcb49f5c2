"""What a training job was told to do: model shape, layout, batch, precision, flags; and the readers that find it.

Fields have the names of Megatron's arguments (attributes of ``args``), defaults are those of Megatron's command line,
and values that Megatron derives are derived the same way (megatron-core 0.16.1: training/arguments.py, validate_args).
Facts that nobody stated and nothing implies stay None: they are unknown, and ``Job.require`` says which and how to give
them.

Readers, all giving a Job:

=======================  ============================================================================================
``read_job``             a file, by suffix and content, as one of the following
``parse_mapping``        TOML or YAML with Megatron's names, flat or in tables; Megatron's own ``--yaml-cfg`` files
``parse_log``            the argument block that Megatron prints on rank 0 (the last complete one)
``parse_command_line``   a launch command
``Job.from_json``        what ``Job.to_json`` wrote (Parquet metadata)
=======================  ============================================================================================
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import itertools
import json
import math
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import yaml

from traceanalyzer import axes, job_rules, traffic
from traceanalyzer.errors import InputError, JobError
from traceanalyzer.job_rules import ratio

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"

_CHOICES: dict[str, tuple[str, ...]] = {
    "position_embedding_type": ("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
    "moe_token_dispatcher_type": ("allgather", "alltoall", "flex"),
    "recompute_granularity": ("full", "selective"),
    "recompute_method": ("uniform", "block"),
    "cross_entropy_fusion_impl": ("native", "te"),
    "data_parallel_sharding_strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "outer_dp_sharding_strategy": ("no_shard", "optim"),
    "cp_comm_type": ("p2p", "all_gather", "a2a", "a2a+p2p"),
    "moe_router_score_function": ("softmax", "sigmoid", "sqrtsoftplus"),
    "moe_token_drop_policy": ("probs", "position"),
    "softmax_type": ("vanilla", "off-by-one", "learnable"),
    "cuda_graph_impl": ("none", "local", "transformer_engine", "full_iteration"),
    "grid": ("megatron", "product"),
}
"""Fields whose value decides which calls are made: any other value is a mistake, not a variant."""

_POSITIVE: tuple[str, ...] = (
    "world_size",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "padded_vocab_size",
    "make_vocab_size_divisible_by",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "num_microbatches",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "num_distributed_optimizer_instances",
    "ddp_bucket_size",
    "ddp_num_buckets",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "max_seqlen_per_dp_cp_rank",
    "suggested_communication_unit_size",
)

_MOST_LAYERS = 100_000

# What a log's "None" does not settle: unknown rather than switched off.
_FACTS: frozenset[str] = frozenset(
    {
        "world_size",
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "vocab_size",
        "padded_vocab_size",
        "seq_length",
        "micro_batch_size",
        "global_batch_size",
        "num_microbatches",
        "megatron_core_version",
        "transformer_engine_version",
        "torch_version",
        "nvte_batch_mha_p2p_comm",
    }
)

_DTYPES: tuple[str, ...] = (
    "main_grads_dtype",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "megatron_fsdp_main_params_dtype",
    "megatron_fsdp_main_grads_dtype",
    "megatron_fsdp_grad_comm_dtype",
)
"""Fields that hold an element type, kept as torch names it."""

# A field that is also stated when all fields of one of these sets are.
_IMPLIED: dict[str, tuple[frozenset[str], ...]] = {
    "virtual_pipeline_model_parallel_size": (
        frozenset({"num_layers_per_virtual_pipeline_stage"}),
        frozenset({"num_virtual_stages_per_pipeline_rank"}),
        frozenset({"pipeline_model_parallel_layout"}),
    ),
    "num_microbatches": (frozenset({"global_batch_size", "micro_batch_size", "world_size"}),),
    "global_batch_size": (frozenset({"num_microbatches", "micro_batch_size", "world_size"}),),
    "padded_vocab_size": (frozenset({"vocab_size"}),),
}


class Conflict(NamedTuple):
    """One field on which the captured job differs from the intended one, both values normalised."""

    field: str
    intended: JsonValue
    captured: JsonValue


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training job. Null is unknown for facts (sizes of model and batch) and "off" for options.

    ``framework``: "megatron-lm" where Megatron-LM's own training script runs, "megatron-core" for another loop around
    the same library. ``forward_only``: no backward pass, no optimizer. ``grid``: see axes.Layout.

    Sizes are counts: layers, elements, tokens, ranks. ``given`` names the fields that the source stated, as opposed to
    defaults and derived values; ``extra`` keeps what the source said beyond these fields (do not change it). A name in
    ``extra`` that is a field counts as that field, unless the field is set: an older program may have stored it there.

    Options that a release does not have yet keep their default, which then means nothing. ``moe_hybridep_num_sms`` and
    ``moe_deepep_num_sms``: None is the release's own number.

    Derived where not stated: ``ffn_hidden_size`` (4 h, with swiglu int(8 h / 3 / 64) x 64), ``kv_channels`` (h /
    heads), ``num_query_groups`` (heads, unless ``group_query_attention``), ``moe_ffn_hidden_size`` (ffn_hidden_size),
    ``padded_vocab_size`` (vocab_size, plus one with NullTokenizer, rounded up to make_vocab_size_divisible_by x TP),
    ``expert_tensor_parallel_size`` (TP), ``virtual_pipeline_model_parallel_size``, ``order``, ``params_dtype``,
    ``num_microbatches`` and ``global_batch_size`` from each other (neither stated: one micro-batch, as
    Megatron's ``validate_args`` has it), ``rerun_mode`` (None while the version is unknown: the default
    changed in 0.14), ``batch_p2p_comm`` (the opposite of ``overlap_p2p_comm``). Set as Megatron sets them:
    ``sequence_parallel`` off at TP 1, ``overlap_p2p_comm`` and ``align_param_gather`` off without interleaving,
    ``add_qkv_bias`` on with ``add_bias_linear``,
    ``accumulate_allreduce_grads_in_fp32`` on for bf16 unless ``grad_reduce_in_bf16``, ``cuda_graph_impl`` from the
    older ``enable_cuda_graph`` and ``external_cuda_graph``, ``cuda_graph_scope`` "full" as empty (both: whole layers).

    Raises JobError, naming field, value and rule with its numbers; job_rules.py holds what Megatron refuses.
    """

    framework: str = "megatron-core"
    megatron_core_version: str | None = None
    transformer_engine_version: str | None = None
    torch_version: str | None = None
    forward_only: bool = False

    # Grid.
    world_size: int | None = None
    order: str | None = None
    grid: Literal["megatron", "product"] = "megatron"
    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    num_virtual_stages_per_pipeline_rank: int | None = None
    microbatch_group_size_per_vp_stage: int | None = None
    context_parallel_size: int = 1
    cp_comm_type: tuple[str, ...] = ("p2p",)
    hierarchical_context_parallel_sizes: tuple[int, ...] = ()
    hybrid_context_parallel: bool = False
    # Tokens of a packed sample that one rank takes at most; only with hybrid_context_parallel.
    max_seqlen_per_dp_cp_rank: int | None = None
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    use_tp_pp_dp_mapping: bool = False
    num_distributed_optimizer_instances: int = 1
    create_all_gather_group: bool = False
    enable_gloo_process_groups: bool = True

    # Batch.
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    num_microbatches: int | None = None
    # Samples: start, increment; and samples over which the batch grows to global_batch_size.
    rampup_batch_size: tuple[int, ...] = ()
    # Rounds the batch down to a multiple of micro_batch_size x DP instead of stopping.
    decrease_batch_size_if_needed: bool = False
    seq_length: int | None = None
    decoder_seq_length: int | None = None
    variable_seq_lengths: bool = False
    create_attention_mask_in_dataloader: bool = True
    sft: bool = False
    dataloader_type: str | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False

    # Model.
    num_layers: int | None = None
    hidden_size: int | None = None
    ffn_hidden_size: int | None = None
    num_attention_heads: int | None = None
    group_query_attention: bool = False
    num_query_groups: int | None = None
    kv_channels: int | None = None
    swiglu: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    normalization: str = "LayerNorm"
    qk_layernorm: bool = False
    qk_clip: bool = False
    attention_output_gate: bool = False
    softmax_type: str = "vanilla"
    experimental_attention_variant: str | None = None
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    fp32_residual_connection: bool = False
    position_embedding_type: str = "learned_absolute"
    max_position_embeddings: int | None = None
    tokenizer_type: str | None = None
    vocab_size: int | None = None
    padded_vocab_size: int | None = None
    make_vocab_size_divisible_by: int = 128
    untie_embeddings_and_output_weights: bool = False
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 32
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    mtp_num_layers: int | None = None
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    # E embedding, t decoder layer, m multi-token prediction layer, L loss, | between stages; chunk by chunk.
    pipeline_model_parallel_layout: str | None = None
    transformer_impl: str = "transformer_engine"

    # Mixture of experts.
    num_experts: int | None = None
    moe_layer_freq: int | tuple[int, ...] = 1
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None
    moe_token_dispatcher_type: str = "allgather"
    moe_flex_dispatcher_backend: str = "deepep"
    moe_enable_deepep: bool = False
    moe_router_dtype: str | None = None
    moe_router_score_function: str = "softmax"
    # Group-limited routing: experts are in num_groups groups, a token goes to at most group_topk of them.
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_padding_for_fp8: bool = False
    moe_router_padding_for_quantization: bool = False
    moe_router_load_balancing_type: str | tuple[str, ...] = "aux_loss"
    moe_aux_loss_coeff: float | tuple[float, ...] = 0.0
    moe_z_loss_coeff: float | None = None
    # Tokens an expert takes at most, as a multiple of the even share; None or negative: no token is dropped.
    moe_expert_capacity_factor: float | None = None
    # Rows a rank's receive buffer holds, as a multiple of the even share (from 0.18).
    moe_expert_rank_capacity_factor: float | None = None
    moe_pad_expert_input_to_capacity: bool = False
    moe_token_drop_policy: str = "probs"
    moe_grouped_gemm: bool = False
    moe_use_legacy_grouped_gemm: bool = False
    moe_deepep_num_sms: int | None = None
    moe_hybridep_num_sms: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_overlap: bool = False
    moe_shared_expert_gate: bool = False
    moe_router_enable_expert_bias: bool = False
    moe_latent_size: int | None = None
    overlap_moe_expert_parallel_comm: bool = False
    ep_overlap_early_attn_memory_release: bool = False
    # Weight gradients in a pass of their own, under the expert communication of another micro-batch.
    delay_wgrad_compute: bool = False

    # Recompute and offload.
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] = ("core_attn",)
    # The older name of recomputing "moe".
    moe_layer_recompute: bool = False
    distribute_saved_activations: bool = False
    cpu_offloading: bool = False
    cpu_offloading_num_layers: int = 0
    fine_grained_activation_offloading: bool = False
    offload_modules: tuple[str, ...] = ()

    # Precision.
    bf16: bool = False
    fp16: bool = False
    params_dtype: str | None = None
    accumulate_allreduce_grads_in_fp32: bool = False
    grad_reduce_in_bf16: bool = False
    main_grads_dtype: str = "float32"
    fp8: str | None = None
    fp8_recipe: str = "delayed"
    fp8_param_gather: bool = False
    fp8_dot_product_attention: bool = False
    fp8_multi_head_attention: bool = False
    fp8_wgrad: bool = True
    fp8_amax_history_len: int = 1
    fp8_amax_compute_algo: str = "most_recent"
    # Reduces fp8 maxima over TP only, not over TP x DP x CP.
    tp_only_amax_red: bool = False
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 1
    num_layers_at_end_in_bf16: int = 1
    fp4: str | None = None
    fp4_recipe: str = "nvfp4"
    fp4_param: bool = False
    reuse_grad_buf_for_mxfp8_param_ag: bool = False

    # Optimizer.
    optimizer: str = "adam"
    # 0: gradients are not clipped, and their norm is not computed for it.
    clip_grad: float = 1.0
    use_precision_aware_optimizer: bool = False
    main_params_dtype: str = "float32"
    exp_avg_dtype: str = "float32"
    exp_avg_sq_dtype: str = "float32"
    # Keeps the 16 bits of a float32 main parameter that the bfloat16 one lacks.
    store_param_remainders: bool = True
    optimizer_cpu_offload: bool = False
    # Share of the optimizer state, 0 to 1; only with optimizer_cpu_offload.
    optimizer_offload_fraction: float = 1.0

    # Data parallel.
    use_distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    overlap_param_gather_with_optimizer_step: bool = False
    align_grad_reduce: bool = True
    align_param_gather: bool = True
    ddp_bucket_size: int | None = None
    ddp_num_buckets: int | None = None
    ddp_pad_buckets_for_high_nccl_busbw: bool = False
    ddp_average_in_collective: bool = False
    ddp_reduce_scatter_with_fp32_accumulation: bool = False
    gradient_accumulation_fusion: bool = True
    gradient_reduce_div_fusion: bool = True
    # Communication buffers registered with NCCL (from 0.13).
    nccl_ub: bool = False
    disable_symmetric_registration: bool = False
    use_megatron_fsdp: bool = False
    data_parallel_sharding_strategy: str = "no_shard"
    outer_dp_sharding_strategy: str = "no_shard"
    enable_full_sharding_in_hsdp: bool = False
    fsdp_double_buffer: bool = False
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    fsdp_manual_registration: bool = False
    # Elements that FSDP communicates at once.
    suggested_communication_unit_size: int | None = None
    keep_fp8_transpose_cache: bool = False
    preserve_fp32_weights: bool = True
    # From 0.17; "auto": the parameter's or the main gradient's own type.
    megatron_fsdp_main_params_dtype: str = "float32"
    megatron_fsdp_main_grads_dtype: str = "auto"
    megatron_fsdp_grad_comm_dtype: str = "auto"
    use_torch_fsdp2: bool = False
    torch_fsdp2_reshard_after_forward: bool = True

    # Overlap and transport.
    tp_comm_overlap: bool = False
    tp_comm_overlap_ag: bool = True
    tp_comm_overlap_rs: bool = True
    tp_comm_overlap_rs_dgrad: bool = False
    tp_comm_bulk_dgrad: bool = True
    tp_comm_bulk_wgrad: bool = True
    tp_comm_overlap_disable_qkv: bool = False
    tp_comm_overlap_disable_fc1: bool = False
    tp_comm_split_ag: bool = True
    tp_comm_split_rs: bool = True
    tp_comm_atomic_ag: bool = False
    tp_comm_atomic_rs: bool = False
    # The file that sets userbuffer methods by layer.
    tp_comm_overlap_cfg: str | None = None
    tp_comm_bootstrap_backend: str = "nccl"
    # All-reduces over symmetric memory, without NCCL: two_shot, one_shot or multimem_all_reduce.
    symmetric_ar_type: str | None = None
    async_tensor_model_parallel_allreduce: bool = True
    overlap_p2p_comm: bool = True
    overlap_p2p_comm_warmup_flush: bool = False
    batch_p2p_comm: bool | None = None
    # Transformer Engine's environment variable NVTE_BATCH_MHA_P2P_COMM; None: not known.
    nvte_batch_mha_p2p_comm: bool | None = None
    pipeline_model_parallel_comm_backend: str | None = None
    cross_entropy_loss_fusion: bool = False
    cross_entropy_fusion_impl: str = "native"
    defer_embedding_wgrad_compute: bool = False
    # Micro-batches whose embedding weight gradient waits for the pipeline flush; 0: all of them.
    wgrad_deferral_limit: int = 0
    calculate_per_token_loss: bool = False

    # CUDA graphs. Up to 0.14: enable_ and external_cuda_graph; from 0.18 modules replace the scope.
    enable_cuda_graph: bool = False
    external_cuda_graph: bool = False
    cuda_graph_impl: str = "none"
    cuda_graph_scope: tuple[str, ...] = ()
    cuda_graph_modules: tuple[str, ...] = ()

    # Control.
    rerun_mode: str | None = None
    timing_log_level: int = 0
    barrier_with_L1_time: bool = True  # noqa: N815 (Megatron's name)
    log_interval: int = 100
    log_num_zeros_in_grad: bool = False
    log_params_norm: bool = False
    loss_scale: float | None = None

    given: frozenset[str] = frozenset()
    extra: Mapping[str, JsonValue] = field(default_factory=dict, hash=False)

    # -- derive and check --------------------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        self._read_extra()
        if self.num_experts == 0:
            self._set("num_experts", None)
        # A size of the batch that was only assumed must not make a job impossible.
        batch_known = (
            self.framework == "megatron-lm" or self.global_batch_size is not None or self.num_microbatches is not None
        )
        self._check_values()
        self._derive_precision()
        self._derive_graphs()
        self._derive_model()
        self._derive_layout()
        self._derive_batch()
        self._derive_control()
        job_rules.check(self, batch_known=batch_known)

    def _read_extra(self) -> None:
        found = {name for name in self.extra if name in _FIELDS and getattr(self, name) == _DEFAULTS[name]}
        for name in found:
            self._set(name, _coerce(name, self.extra[name]))
        self._set("given", self.given | found)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_values(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise JobError(f"{name}={value}: must be at least 1")
        if self.num_layers is not None and self.num_layers > _MOST_LAYERS:
            raise JobError(f"num_layers={self.num_layers}: must be at most {_MOST_LAYERS}")
        self._set("cp_comm_type", tuple(kind.replace("allgather", "all_gather") for kind in self.cp_comm_type))
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            for item in value if isinstance(value, tuple) else (value,):
                if item is not None and item not in choices:
                    raise JobError(f"{name}={item!r}: must be one of {', '.join(choices)}")

    def _derive_precision(self) -> None:
        if self.bf16 and self.fp16:
            raise JobError("bf16=True and fp16=True: at most one of them")
        stated = traffic.normalise_dtype(self.params_dtype)
        if stated == "bfloat16" and not self.fp16:
            self._set("bf16", True)
        if stated == "float16" and not self.bf16:
            self._set("fp16", True)
        derived = "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"
        if stated not in (None, derived):
            raise JobError(f"params_dtype={stated} with bf16={self.bf16}, fp16={self.fp16}: these give {derived}")
        self._set("params_dtype", derived)
        for name in _DTYPES:
            # Megatron's word fp8 is stored as bytes (arguments.py: dtype_map).
            self._set(name, traffic.normalise_dtype(getattr(self, name).replace("fp8", "uint8")))
        if self.bf16 and self.grad_reduce_in_bf16:
            self._set("accumulate_allreduce_grads_in_fp32", False)
        elif self.bf16 and self.main_grads_dtype == "float32":
            self._set("accumulate_allreduce_grads_in_fp32", True)

    def _derive_graphs(self) -> None:
        for name in ("cuda_graph_scope", "cuda_graph_modules"):
            parts = tuple(part.strip() for item in getattr(self, name) for part in item.split(","))
            self._set(name, () if parts == ("full",) else parts)
        if self.cuda_graph_impl == "none" and self.enable_cuda_graph != self.external_cuda_graph:
            self._set("cuda_graph_impl", "local" if self.enable_cuda_graph else "transformer_engine")

    def _derive_model(self) -> None:
        hidden, heads, tp = self.hidden_size, self.num_attention_heads, self.tensor_model_parallel_size
        if self.ffn_hidden_size is None and hidden is not None:
            self._set("ffn_hidden_size", int((4 * hidden * 2 / 3) / 64) * 64 if self.swiglu else 4 * hidden)
        if self.add_bias_linear:
            self._set("add_qkv_bias", True)
        if self.num_experts is not None and self.moe_ffn_hidden_size is None:
            self._set("moe_ffn_hidden_size", self.ffn_hidden_size)
        if heads is not None:
            self._divides("tensor_model_parallel_size", "num_attention_heads")
            if self.kv_channels is None and hidden is not None:
                self._divides("num_attention_heads", "hidden_size")
                self._set("kv_channels", hidden // heads)
        if not self.group_query_attention:
            self._set("num_query_groups", heads)
        elif self.num_query_groups is None:
            # The option's own default; a job that sets the flag alone has one group.
            self._set("num_query_groups", 1)
        groups = self.num_query_groups
        if groups is not None and heads is not None:
            self._divides("num_query_groups", "num_attention_heads")
            if groups % tp and tp % groups:
                raise JobError(
                    f"num_query_groups={groups} is neither a multiple nor a divisor of tensor_model_parallel_size={tp} "
                    f"({ratio(groups, tp)})"
                )
        if self.padded_vocab_size is None and self.vocab_size is not None:
            size = self.vocab_size + (self.tokenizer_type == "NullTokenizer")
            multiple = self.make_vocab_size_divisible_by * tp
            self._set("padded_vocab_size", math.ceil(size / multiple) * multiple)
        elif self.padded_vocab_size is not None:
            self._divides("tensor_model_parallel_size", "padded_vocab_size")
        if isinstance(self.moe_layer_freq, tuple) and self.num_layers not in (None, len(self.moe_layer_freq)):
            raise JobError(
                f"moe_layer_freq lists {len(self.moe_layer_freq)} layers, but num_layers={self.num_layers}: one entry "
                f"for each layer, or one number"
            )

    def _divides(self, divisor_name: str, name: str) -> None:
        divisor, value = getattr(self, divisor_name), getattr(self, name)
        if divisor is not None and value is not None and value % divisor:
            raise JobError(f"{divisor_name}={divisor} does not divide {name}={value} ({ratio(value, divisor)})")

    def _derive_layout(self) -> None:
        if self.order is None:
            self._set("order", axes.PP_BEFORE_DP_ORDER if self.use_tp_pp_dp_mapping else axes.DEFAULT_ORDER)
        elif self.use_tp_pp_dp_mapping and self.order != axes.PP_BEFORE_DP_ORDER:
            raise JobError(f"use_tp_pp_dp_mapping means order={axes.PP_BEFORE_DP_ORDER!r}, not {self.order!r}")
        if self.expert_tensor_parallel_size is None:
            self._set("expert_tensor_parallel_size", self.tensor_model_parallel_size)
        self._derive_chunks()
        if self.tensor_model_parallel_size == 1:
            self._set("sequence_parallel", False)
        if self.virtual_pipeline_model_parallel_size is None:
            self._set("overlap_p2p_comm", False)
            self._set("align_param_gather", False)
        if self.batch_p2p_comm is None or self.framework == "megatron-lm":
            self._set("batch_p2p_comm", not self.overlap_p2p_comm)
        if self.num_experts is not None:
            self._divides("expert_model_parallel_size", "num_experts")
        elif self.expert_model_parallel_size > 1:
            raise JobError(
                f"expert_model_parallel_size={self.expert_model_parallel_size} without num_experts: give num_experts"
            )
        if self.num_layers is not None:
            self._check_cp_comm_type(self.num_layers)
            self._layers  # noqa: B018 (checks the split over stages)
        if self.world_size is not None:
            self.layout  # noqa: B018 (checks the sizes)

    def _check_cp_comm_type(self, layers: int) -> None:
        if len(self.cp_comm_type) not in (1, layers):
            raise JobError(f"cp_comm_type lists {len(self.cp_comm_type)} layers, but num_layers={layers}: one or all")

    def _derive_chunks(self) -> None:
        pp = self.pipeline_model_parallel_size
        chunks: int | None = None
        source = "num_virtual_stages_per_pipeline_rank"
        if self.pipeline_model_parallel_layout is not None:
            source = "pipeline_model_parallel_layout"
            stages = len(_split_layout(self.pipeline_model_parallel_layout))
            if stages % pp:
                raise JobError(
                    f"pipeline_model_parallel_layout={self.pipeline_model_parallel_layout!r} has {stages} stages, no "
                    f"multiple of pipeline_model_parallel_size={pp} ({ratio(stages, pp)})"
                )
            chunks = stages // pp
        elif self.num_virtual_stages_per_pipeline_rank is not None:
            chunks = self.num_virtual_stages_per_pipeline_rank
        elif self.num_layers_per_virtual_pipeline_stage is not None and self.num_layers is not None:
            source = "num_layers_per_virtual_pipeline_stage"
            layers = self._layers_with_ends(self.num_layers)
            per_chunk = self.num_layers_per_virtual_pipeline_stage
            if layers % (pp * per_chunk):
                raise JobError(
                    f"num_layers_per_virtual_pipeline_stage={per_chunk} x pipeline_model_parallel_size={pp} does not "
                    f"divide {layers} layers ({ratio(layers, pp * per_chunk)})"
                )
            chunks = layers // (pp * per_chunk)
        stated = self.virtual_pipeline_model_parallel_size
        if chunks is not None and stated not in (None, chunks):
            raise JobError(f"virtual_pipeline_model_parallel_size={stated}, but {source} gives {chunks}")
        chunks = chunks or stated
        self._set("virtual_pipeline_model_parallel_size", None if chunks == 1 else chunks)
        if self.virtual_pipeline_model_parallel_size is not None and pp == 1:
            raise JobError(f"virtual_pipeline_model_parallel_size={chunks} needs pipeline_model_parallel_size > 1")

    def _derive_batch(self) -> None:
        if self.seq_length is not None:
            cp, tp = self.context_parallel_size, self.tensor_model_parallel_size
            if cp > 1 and self.seq_length % (2 * cp):
                raise JobError(
                    f"seq_length={self.seq_length} is no multiple of 2 x context_parallel_size={cp} "
                    f"({ratio(self.seq_length, 2 * cp)})"
                )
            if self.sequence_parallel and self.seq_length % (cp * tp):
                raise JobError(
                    f"sequence_parallel: seq_length={self.seq_length} is no multiple of context_parallel_size={cp} x "
                    f"tensor_model_parallel_size={tp} = {cp * tp} ({ratio(self.seq_length, cp * tp)})"
                )
        if self.world_size is None or self.micro_batch_size is None:
            return
        ranks = self.data_parallel_size
        part = self.micro_batch_size * ranks
        sizes = f"micro_batch_size {self.micro_batch_size} x DP {ranks} = {part}"
        total = self.global_batch_size
        if total is None and self.num_microbatches is not None:
            total = part * self.num_microbatches
        elif total is None:
            total = part
        if total is None:
            return
        self._set("global_batch_size", total)
        if self.decrease_batch_size_if_needed and total >= part:
            self._set("num_microbatches", total // part)
            return
        if total % part:
            raise JobError(f"global_batch_size={total} is no multiple of {sizes} ({ratio(total, part)})")
        if self.num_microbatches not in (None, total // part):
            raise JobError(
                f"num_microbatches={self.num_microbatches}, but global_batch_size={total} / ({sizes}) = {total // part}"
            )
        self._set("num_microbatches", total // part)

    def _derive_control(self) -> None:
        release = job_rules.release(self.megatron_core_version)
        if self.rerun_mode is None and release is not None:
            self._set("rerun_mode", "validate_results" if release >= (0, 14) else "disabled")

    # -- ask ---------------------------------------------------------------------------------------------------------

    def require(self, *names: str) -> tuple[int, ...]:
        """Values of these integer fields. Raises JobError naming all that are unknown and how to give them.

        ``hidden, sequence = job.require("hidden_size", "seq_length")``
        """
        values = tuple(getattr(self, name) for name in names)
        missing = [name for name, value in zip(names, values, strict=True) if value is None]
        if missing:
            some = ", ".join(f"{name} = ..." for name in missing)
            raise JobError(
                f"the job does not say {' and '.join(missing)}: give it in the job file ({some}), on the command line "
                f"({' '.join('--' + name.replace('_', '-') for name in missing)}), or use a log with Megatron's "
                f"argument block"
            )
        return values

    @cached_property
    def layout(self) -> axes.Layout:
        """Ranks, coordinates and groups. Raises JobError if the world size is unknown or the sizes do not fit."""
        (world_size,) = self.require("world_size")
        return axes.Layout(
            world_size=world_size,
            tp=self.tensor_model_parallel_size,
            cp=self.context_parallel_size,
            pp=self.pipeline_model_parallel_size,
            ep=self.expert_model_parallel_size,
            etp=self.expert_tensor_parallel_size,
            order=self.order or axes.DEFAULT_ORDER,
            vpp=self.virtual_pipeline_model_parallel_size,
            num_distributed_optimizer_instances=self.num_distributed_optimizer_instances,
            embedding_ranks=self._embedding_stages,
            hierarchical_context_parallel_sizes=self.hierarchical_context_parallel_sizes,
            hybrid_context_parallel=self.hybrid_context_parallel,
            grid=self.grid,
        )

    @property
    def _embedding_stages(self) -> tuple[int, ...]:
        # pretrain_gpt.py:get_embedding_ranks, multi_token_prediction.py:get_mtp_ranks
        stages = {0}
        last = self.pipeline_model_parallel_size - 1
        if not self.untie_embeddings_and_output_weights:
            stages.add(last)
        if self.mtp_num_layers is not None and self.pipeline_model_parallel_layout is None:
            stages.add(last)
        elif self.mtp_num_layers is not None and self.pipeline_model_parallel_layout is not None:
            parts = _split_layout(self.pipeline_model_parallel_layout)
            stages |= {index % (last + 1) for index, part in enumerate(parts) if "m" in part}
        return tuple(sorted(stages))

    @property
    def layout_stages(self) -> tuple[str, ...] | None:
        """``pipeline_model_parallel_layout`` as one string of E, t, m, L for each chunk and stage, in pipeline order.

        The model chunk at index i is chunk i // PP of stage i % PP. None without a layout.
        """
        text = self.pipeline_model_parallel_layout
        return None if text is None else tuple(_split_layout(text))

    @property
    def mtp_standalone(self) -> bool:
        """Whether the layout puts multi-token prediction on a stage other than the last, away from the loss.

        Source: pipeline_parallel_layer_layout.py: validate_layer_layout.
        """
        last = self.pipeline_model_parallel_size - 1
        parts = self.layout_stages or ()
        return any("m" in part and index % (last + 1) != last for index, part in enumerate(parts))

    def mtp_layers_on_stage(self, stage: int, chunk: int | None = None) -> int:
        """Number of multi-token prediction layers on a pipeline stage: in all its chunks, or in one.

        Without a layout all are in the last chunk of the last stage (multi_token_prediction.py:
        get_mtp_num_layers_to_build). Raises JobError for a stage or chunk that does not exist.
        """
        wanted = self._chunks(stage, chunk)
        pp, chunks = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size or 1
        parts = self.layout_stages
        if parts is not None:
            return sum(parts[one * pp + stage].count("m") for one in wanted)
        return (self.mtp_num_layers or 0) if stage == pp - 1 and chunks - 1 in wanted else 0

    @property
    def data_parallel_size(self) -> int:
        """Ranks that hold different sequences: world_size / (TP x CP x PP), expert parallelism inside. Needs world_size."""
        layout = self.layout
        return layout.dp * (layout.ep if layout.grid == "product" else 1)

    @property
    def activation_dtype(self) -> str:
        """Type of activations and of pipeline messages, as torch names it: bfloat16, float16 or float32."""
        return self.params_dtype or "float32"

    @property
    def main_grad_dtype(self) -> str:
        """Type in which gradients are accumulated and reduced."""
        return "float32" if self.accumulate_allreduce_grads_in_fp32 else self.activation_dtype

    def is_moe_layer(self, layer: int) -> bool:
        """Whether ``layer`` (0-based) has experts instead of a dense MLP (gpt_layer_specs.py: moe_layer_pattern)."""
        if self.num_experts is None:
            return False
        if isinstance(self.moe_layer_freq, int):
            return layer % self.moe_layer_freq == 0
        return self.moe_layer_freq[layer] == 1

    def cp_comm_type_of(self, layer: int) -> str:
        """How ``layer`` (0-based) exchanges keys and values: p2p, all_gather, a2a or a2a+p2p."""
        return self.cp_comm_type[0] if len(self.cp_comm_type) == 1 else self.cp_comm_type[layer]

    def layers_on_stage(self, stage: int, chunk: int | None = None) -> tuple[int, ...]:
        """The decoder layers (0-based) of a pipeline stage: all of them, or those of one model chunk.

        Needs num_layers. Source: transformer_block.py:get_num_layers_to_build, transformer_layer.py:
        get_transformer_layer_offset. Raises JobError for a stage or chunk that does not exist.
        """
        self.require("num_layers")
        return tuple(layer for one in self._chunks(stage, chunk) for layer in self._layers[one][stage])

    def _chunks(self, stage: int, chunk: int | None) -> Sequence[int]:
        chunks = self.virtual_pipeline_model_parallel_size or 1
        if not 0 <= stage < self.pipeline_model_parallel_size:
            raise JobError(f"stage {stage}: the job has stages 0 to {self.pipeline_model_parallel_size - 1}")
        if chunk is not None and not 0 <= chunk < chunks:
            raise JobError(f"chunk {chunk}: the job has chunks 0 to {chunks - 1}")
        return range(chunks) if chunk is None else (chunk,)

    @cached_property
    def _layers(self) -> tuple[tuple[range, ...], ...]:
        """Layers by chunk and stage. Layers are numbered along the pipeline, chunk by chunk."""
        found: list[tuple[range, ...]] = []
        start = 0
        for counts in self._layer_counts():
            row: list[range] = []
            for count in counts:
                row.append(range(start, start + count))
                start += count
            found.append(tuple(row))
        return tuple(found)

    def _layers_with_ends(self, layers: int) -> int:
        return layers + self.account_for_embedding_in_pipeline_split + self.account_for_loss_in_pipeline_split

    def _layer_counts(self) -> list[list[int]]:
        """Number of decoder layers by chunk and stage."""
        (layers,) = self.require("num_layers")
        stages = self.pipeline_model_parallel_size
        chunks = self.virtual_pipeline_model_parallel_size or 1
        if self.pipeline_model_parallel_layout is not None:
            counts = [part.count("t") for part in _split_layout(self.pipeline_model_parallel_layout)]
            if sum(counts) != layers:
                raise JobError(
                    f"pipeline_model_parallel_layout={self.pipeline_model_parallel_layout!r} places {sum(counts)} "
                    f"decoder layers, but num_layers={layers}"
                )
            return [counts[start : start + stages] for start in range(0, len(counts), stages)]
        first, last = self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers
        if first is not None or last is not None:
            per_stage = self._uneven_stages(layers, stages, first, last)
        else:
            total = self._layers_with_ends(layers)
            if total % stages:
                raise JobError(
                    f"pipeline_model_parallel_size={stages} does not divide {self._layers_text(layers)} "
                    f"({ratio(total, stages)})"
                )
            per_stage = [total // stages] * stages
        for count in per_stage:
            if count % chunks:
                raise JobError(
                    f"virtual_pipeline_model_parallel_size={chunks} does not divide the {count} layers of a stage "
                    f"({ratio(count, chunks)})"
                )
        table = [[count // chunks for count in per_stage] for _ in range(chunks)]
        table[0][0] -= self.account_for_embedding_in_pipeline_split
        table[-1][-1] -= self.account_for_loss_in_pipeline_split
        return table

    def _layers_text(self, layers: int) -> str:
        ends = {
            "embedding": self.account_for_embedding_in_pipeline_split,
            "loss": self.account_for_loss_in_pipeline_split,
        }
        counted = [f" + 1 for the {end}" for end, present in ends.items() if present]
        return f"num_layers={layers}{''.join(counted)}"

    def _uneven_stages(self, layers: int, stages: int, first: int | None, last: int | None) -> list[int]:
        if self.account_for_embedding_in_pipeline_split or self.account_for_loss_in_pipeline_split:
            raise JobError(
                "decoder_first_pipeline_num_layers and decoder_last_pipeline_num_layers exclude account_for_embedding_"
                "in_pipeline_split and account_for_loss_in_pipeline_split"
            )
        rest = layers - (first or 0) - (last or 0)
        middle = stages - (first is not None) - (last is not None)
        if rest < 0 or (middle <= 0 and rest) or (middle > 0 and rest % middle):
            raise JobError(
                f"num_layers={layers} - first stage {first or 0} - last stage {last or 0} = {rest} layers cannot be "
                f"spread evenly over {max(middle, 0)} middle stages (pipeline_model_parallel_size={stages})"
            )
        even = rest // middle if middle > 0 else 0
        per_stage = [even] * stages
        if first is not None:
            per_stage[0] = first
        if last is not None:
            per_stage[-1] = last
        return per_stage

    # -- store -------------------------------------------------------------------------------------------------------

    def likely_typos(self) -> list[tuple[str, str]]:
        """(name in ``extra``, the field it resembles): names that nothing knows but that look like a field.

        Unknown names are kept, not refused, because Megatron has hundreds of arguments that do not matter here; a field
        that is misspelt would silently keep its default.
        """
        known = [*_FIELDS, *_ALIASES]
        near = ((name, difflib.get_close_matches(name, known, n=1, cutoff=0.9)) for name in self.extra)
        return [(name, found[0]) for name, found in near if found and found[0][0] == name[0]]

    def to_json(self) -> str:
        """One JSON object: every field that is not None, ``given`` as a sorted list, ``extra`` as an object."""
        content: dict[str, object] = {}
        for name in _FIELDS:
            value = getattr(self, name)
            if value is not None:
                content[name] = value
        return json.dumps({**content, "given": sorted(self.given), "extra": dict(self.extra)})

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The Job that ``to_json`` wrote. Fields of a newer program go to ``extra``. Raises JobError for other text."""
        try:
            content = json.loads(text)
        except ValueError as error:
            raise JobError(f"a stored job is not JSON: {error}") from None
        if not isinstance(content, dict) or not isinstance(content.get("extra", {}), dict):
            raise JobError("a stored job is a JSON object with an object 'extra'")
        extra = content.pop("extra", {})
        given = content.pop("given", [])
        known = {name: _coerce(name, value) for name, value in content.items() if name in _FIELDS}
        unknown = {name: value for name, value in content.items() if name not in _FIELDS}
        return cls(**known, given=frozenset(given), extra={**extra, **unknown})


def _split_layout(text: str) -> list[str]:
    """A ``--pipeline-model-parallel-layout`` as one string of E, t, m, L for each stage and chunk, in pipeline order.

    Source: pipeline_parallel_layer_layout.py:parse_str_to_list.
    """
    flat = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        flat = re.sub(pattern, lambda match: match.group(1) * int(match.group(2)), flat)
    wrong = sorted(set(flat) - set("EtmL|"))
    if wrong:
        raise JobError(
            f"pipeline_model_parallel_layout={text!r} holds {' '.join(map(repr, wrong))}: E, t, m, L, '|', '(...)*n'"
        )
    return flat.split("|")


def conflicts(captured: Job, intended: Job) -> list[Conflict]:
    """The fields that both jobs state and in which they differ, by name; values as Megatron would end up with.

    A field counts as stated too where others fix it, e.g. num_microbatches by global_batch_size, micro_batch_size and
    world_size. Fields that only one of them states are no conflict.
    """
    both = _stated(captured) & _stated(intended)
    found: list[Conflict] = []
    for name in sorted(both):
        left, right = _as_json(getattr(intended, name)), _as_json(getattr(captured, name))
        if left != right:
            found.append(Conflict(name, left, right))
    return found


def _stated(job: Job) -> frozenset[str]:
    implied = {name for name, sets in _IMPLIED.items() if any(needed <= job.given for needed in sets)}
    return (job.given & _FIELDS.keys()) | implied


# -- values ----------------------------------------------------------------------------------------------------------

_FIELDS: dict[str, frozenset[str]] = {
    one.name: frozenset("str" if part.startswith("Literal") else part for part in str(one.type).split(" | "))
    for one in dataclasses.fields(Job)
    if one.name not in ("given", "extra")
}
"""Name of each field -> the types it takes, as spelled in its annotation."""

_DEFAULTS: dict[str, object] = {one.name: one.default for one in dataclasses.fields(Job) if one.name in _FIELDS}

_LONGEST_LIST = 100_000


def _as_json(value: object) -> JsonValue:
    """``value`` as JSON can hold it: tuples as lists, anything strange (dates, inf) as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    return str(value)


def _evaluate(text: str) -> object:
    """A Python literal, or an expression of lists such as ``([0]*3+[1])*2``. Raises ValueError for anything else."""

    def walk(node: ast.expr) -> object:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=nodes) | ast.Tuple(elts=nodes):
                return [walk(item) for item in nodes]
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                first, second = walk(left), walk(right)
                if isinstance(first, list) and isinstance(second, list):
                    return first + second
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                items, times = walk(left), walk(right)
                if isinstance(items, list) and isinstance(times, int) and len(items) * times <= _LONGEST_LIST:
                    return items * times
        raise ValueError(text)

    try:
        return walk(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(text) from None


def _guess(text: str) -> JsonValue:
    """The value that a text stands for where no type is declared."""
    try:
        return _as_json(_evaluate(text))
    except ValueError:
        return text


_ENUMERATION = re.compile(r"<\w+\.(\w+): [^<>]*>")


def _coerce(name: str, value: object) -> Any:
    """``value`` in the type of field ``name``; text is read as Megatron prints or accepts it. Raises JobError."""
    kinds = _FIELDS[name]
    if value is None or (isinstance(value, str) and value.strip() == "None"):
        return _DEFAULTS[name]
    listed = next((kind for kind in kinds if kind.startswith("tuple")), None)
    if listed is not None:
        item = listed.removeprefix("tuple[").removesuffix(", ...]")
        # Lists of enumerations are printed as [<CudaGraphScope.attn: 2>].
        content = value = _ENUMERATION.sub(r"'\1'", value) if isinstance(value, str) else value
        if isinstance(value, str) and ("[" in value or "(" in value or item != "str"):
            try:
                content = _evaluate(value)
            except ValueError:
                raise JobError(f"{name}={value!r}: expected a list such as [1, 0]") from None
        if isinstance(content, list | tuple):
            values = tuple(_scalar(name, one, item) for one in content)
            return values[0] if len(values) == 1 and item in kinds and name != "moe_layer_freq" else values
        one = _scalar(name, content, item)
        return one if item in kinds else (one,)
    return _scalar(name, value, next(kind for kind in ("bool", "int", "float", "str") if kind in kinds))


_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}


def _scalar(name: str, value: object, kind: str) -> bool | int | float | str:
    text = value.strip() if isinstance(value, str) else None
    match kind:
        case "bool":
            if isinstance(value, bool):
                return value
            if text is not None and text.lower() in ("true", "false"):
                return text.lower() == "true"
        case "int" | "float":
            convert = int if kind == "int" else float
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                number = convert(value)
                if number == value:
                    return number
            if text is not None:
                try:
                    return convert(text)
                except ValueError:
                    pass
        case _:
            if text is not None:
                return text
    raise JobError(f"{name}={value!r}: expected {_WORDS[kind]}")


# -- readers ---------------------------------------------------------------------------------------------------------

_ALIASES: dict[str, str] = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "dp": "data_parallel_size",
    "sp": "sequence_parallel",
    "world": "world_size",
    "layers": "num_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "ffn_hidden_size",
    "vocab": "vocab_size",
    "seq": "seq_length",
    "mbs": "micro_batch_size",
    "gbs": "global_batch_size",
    "microbatches": "num_microbatches",
    "experts": "num_experts",
    "topk": "moe_router_topk",
    # TransformerConfig's names for arguments, met in --yaml-cfg files.
    "num_moe_experts": "num_experts",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "fp8_param": "fp8_param_gather",
    # What users and release notes call them, and spellings that changed with releases.
    "te_version": "transformer_engine_version",
    "overlap_p2p_communication": "overlap_p2p_comm",
    "overlap_p2p_communication_warmup_flush": "overlap_p2p_comm_warmup_flush",
    "fp4_param_gather": "fp4_param",
    "use_nccl_ub": "nccl_ub",
    "NVTE_BATCH_MHA_P2P_COMM": "nvte_batch_mha_p2p_comm",
}

# Words that are no fields of Job and stand for one; see _translate.
_WORDS_FOR_FIELDS = frozenset(
    {"data_parallel_size", "dtype", "activation_func", "recompute_activations", "use_rotary_position_embeddings"}
)

_DTYPE_FLAGS: dict[str, dict[str, bool]] = {
    "bfloat16": {"bf16": True, "fp16": False},
    "float16": {"bf16": False, "fp16": True},
    "float32": {"bf16": False, "fp16": False},
}


def _translate(stated: dict[str, Any]) -> None:
    """Replace the words of _WORDS_FOR_FIELDS in ``stated`` by fields, in place."""
    dtype = stated.pop("dtype", None)
    if dtype is not None:
        flags = _DTYPE_FLAGS.get(traffic.normalise_dtype(str(dtype)) or "")
        if flags is None:
            raise JobError(f"dtype={dtype!r}: must be fp32, fp16 or bf16")
        for name, value in flags.items():
            stated.setdefault(name, value)
    switch = str(stated.get("nvte_batch_mha_p2p_comm"))
    if switch in ("0", "1"):  # as the environment spells it
        stated["nvte_batch_mha_p2p_comm"] = switch == "1"
    if stated.pop("activation_func", None) == "swiglu":
        stated.setdefault("swiglu", True)
    if _scalar("recompute_activations", stated.pop("recompute_activations", False), "bool"):
        stated.setdefault("recompute_granularity", "selective")
    if _scalar("use_rotary_position_embeddings", stated.pop("use_rotary_position_embeddings", False), "bool"):
        stated["position_embedding_type"] = "rope"


def _make(stated: dict[str, Any], extra: dict[str, JsonValue], framework: str = "megatron-core") -> Job:
    """The Job for stated values, in any spelling that _coerce reads."""
    _translate(stated)
    data_parallel = stated.pop("data_parallel_size", None)
    values = {name: _coerce(name, value) for name, value in stated.items()}
    values.setdefault("framework", framework)
    if data_parallel is not None:
        ranks = int(_scalar("data_parallel_size", data_parallel, "int"))
        _apply_data_parallel(values, ranks)
    given = {name for name in values if name in stated or name == "world_size"}
    return Job(**values, given=frozenset(given), extra=extra)


def _apply_data_parallel(values: dict[str, Any], ranks: int) -> None:
    """Turn a stated data-parallel size into the world size, or check it against a stated one."""
    names = ["tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"]
    labels = ["TP", "CP", "PP"]
    if values.get("grid") == "product":
        names.append("expert_model_parallel_size")
        labels.append("EP")
    sizes = [values.get(name, 1) for name in names]
    product = math.prod(sizes) * ranks
    world = values.setdefault("world_size", product)
    if world != product:
        text = " x ".join(f"{label} {size}" for label, size in zip(labels, sizes, strict=True))
        raise JobError(
            f"world_size={world}, but {text} x DP {ranks} = {product}"
            + ("" if "EP" in labels else "; Megatron folds EP into these, it does not multiply it in")
        )


def _flatten(content: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str, object]]:
    """Leaves of nested tables: full dotted name, last part with underscores, value."""
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.")
        else:
            yield name, str(key).rpartition(".")[2].replace("-", "_"), value


def parse_mapping(content: Mapping[str, object]) -> Job:
    """The Job in a parsed TOML or YAML file: Megatron's names or the short aliases, flat or in tables of any name.

    Null means not stated. ``num_query_groups`` without ``group_query_attention`` switches the latter on (in Megatron's
    ``--yaml-cfg`` files always, as TransformerConfig has no such flag). Unknown names go to ``extra``. Raises JobError
    for a name that is stated twice with different values.
    """
    stated: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    extra: dict[str, JsonValue] = {}
    for full, short, value in _flatten(content):
        name = _ALIASES.get(short, short)
        option = _option(short) if name not in _FIELDS and name not in _WORDS_FOR_FIELDS else None
        if option is not None and option[1] is None:
            name = option[0]
        elif option is not None and isinstance(value, bool):  # the command line's own word, such as disable_bias_linear
            name, value = option[0], option[1] if value else not option[1]
        if name not in _FIELDS and name not in _WORDS_FOR_FIELDS:
            extra[full if short in extra else short] = _as_json(value)
        elif value is not None:
            if name in stated and stated[name] != value:
                raise JobError(f"{name} is stated twice: {spelled[name]}={stated[name]}, {full}={value}")
            stated[name], spelled[name] = value, full
    megatron_yaml = "language_model" in content and "model_parallel" in content
    if "num_query_groups" in stated and (megatron_yaml or "group_query_attention" not in stated):
        stated["group_query_attention"] = stated["num_query_groups"] != stated.get("num_attention_heads")
    return _make(stated, extra, "megatron-lm" if megatron_yaml else "megatron-core")


_BLOCK_START = re.compile(r"-{10,} arguments -{10,}\s*$")
_BLOCK_END = re.compile(r"-{10,} end of arguments -{10,}\s*$")
_BLOCK_LINE = re.compile(r"(?:^|(?<=[\s:\]|>]))(?=(?P<name>[A-Za-z_]\w*) (?P<dots>\.*)(?: (?P<value>.*))?$)")
_PADDED_VOCAB = re.compile(r"> padded vocab \(size: \d+\) with \d+ dummy tokens \(new size: (\d+)\)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NAME_WIDTH = 48

_Block: TypeAlias = tuple[dict[str, str], int | None]
"""Names and values of an argument block, and the padded vocabulary printed after it."""


def _block_line(line: str) -> tuple[str, str] | None:
    """Name and value of one line of the argument block, whatever a launcher put before it; None for other lines.

    The number of dots is fixed by the name's length (arguments.py:_print_args), which tells the line from any other.
    """
    for match in _BLOCK_LINE.finditer(line):
        name = match["name"]
        if len(match["dots"]) == max(0, _NAME_WIDTH - len(name)):
            return name, (match["value"] or "").strip()
    return None


def _scan_log(lines: Iterable[str]) -> _Block | int | None:
    """The last complete argument block; without one, the number of the line where a block begins, or None."""
    complete: _Block | None = None
    block: dict[str, str] | None = None
    started: int | None = None
    for number, raw in enumerate(lines, 1):
        line = _COLOUR.sub("", raw.rstrip("\r\n"))
        if _BLOCK_START.search(line):
            block, started = {}, number
        elif block is not None and _BLOCK_END.search(line):
            complete, block = (block, None), None
        elif block is not None:
            found = _block_line(line)
            if found is not None:
                block[found[0]] = found[1]
        elif complete is not None and (padded := _PADDED_VOCAB.search(line)):
            complete = complete[0], int(padded[1])
    return complete if complete is not None else started


def parse_log(lines: Iterable[str] | str) -> Job:
    """The Job that Megatron printed: the last complete argument block of a log, launcher prefixes and all.

    Values there are final, so a printed ``None`` counts as stated ("off"), except for facts such as padded_vocab_size,
    which is taken from its own line. Raises JobError where there is no complete block.
    """
    found = _scan_log(lines.splitlines() if isinstance(lines, str) else lines)
    if found is None:
        raise JobError("no argument block: Megatron prints '---- arguments ----' on rank 0 at the start of the run")
    return _printed_job(found)


def _printed_job(found: _Block | int) -> Job:
    if isinstance(found, int):
        raise JobError(
            f"the argument block that starts on line {found} has no end: the log is cut; give the log of rank 0 up to "
            f"'end of arguments', or the launch command"
        )
    block, padded = found
    stated: dict[str, Any] = {}
    extra: dict[str, JsonValue] = {}
    for printed, text in block.items():
        name = "fp4_param" if printed == "fp4_param_gather" else printed  # its name from 0.18
        if name in _FIELDS or name in _WORDS_FOR_FIELDS:
            if text != "None" or name not in _FACTS:
                stated[name] = text
        else:
            extra[name] = _guess(text)
    if padded is not None:
        stated["padded_vocab_size"] = padded
    return _make(stated, extra, "megatron-lm")


# Options that are not the field's name with dashes: the field, and the value the option sets (None: it takes one).
_OPTIONS: dict[str, tuple[str, object]] = {
    "disable_bias_linear": ("add_bias_linear", False),
    "disable_gloo_process_groups": ("enable_gloo_process_groups", False),
    "no_overlap_p2p_communication": ("overlap_p2p_comm", False),
    "no_barrier_with_level_1_timing": ("barrier_with_L1_time", False),
    "torch_fsdp2_no_reshard_after_forward": ("torch_fsdp2_reshard_after_forward", False),
    "recompute_activations": ("recompute_activations", True),
    "use_rotary_position_embeddings": ("use_rotary_position_embeddings", True),
    "fp8_format": ("fp8", None),
    "fp4_format": ("fp4", None),
    "fp4_param_gather": ("fp4_param", True),
    "use_nccl_ub": ("nccl_ub", True),
    "overlap_p2p_communication": ("overlap_p2p_comm", True),
    "overlap_p2p_communication_warmup_flush": ("overlap_p2p_comm_warmup_flush", True),
    "microbatch_group_size_per_virtual_pipeline_stage": ("microbatch_group_size_per_vp_stage", None),
}


def _option(name: str) -> tuple[str, object] | None:
    """Field and implied value of an option (without ``--``, with underscores); None for an unknown one."""
    if name in _OPTIONS:
        return _OPTIONS[name]
    if name in _FIELDS:
        return name, True if "bool" in _FIELDS[name] else None
    for prefix in ("no_", "disable_"):
        field_name = name.removeprefix(prefix)
        if field_name != name and "bool" in _FIELDS.get(field_name, ()):
            return field_name, False
    return None


def _options(tokens: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Options with the words that follow each: name without dashes in front, with underscores."""
    name: str | None = None
    words: list[str] = []
    for token in tokens:
        if token.startswith("--") and len(token) > 2:
            if name is not None:
                yield name, words
            head, equals, value = token[2:].partition("=")
            name, words = head.replace("-", "_"), [value] if equals else []
        else:
            words.append(token)
    if name is not None:
        yield name, words


def parse_command_line(command: str | Sequence[str]) -> Job:
    """The Job of a launch command: a Megatron script's options, with or without ``torchrun ... script.py`` before them.

    ``world_size`` is nnodes x nproc-per-node of the launcher, where both are numbers, and otherwise unknown. Unknown
    options go to ``extra``. Raises JobError for an option without its value, and for shell variables, which are not
    expanded here.
    """
    if isinstance(command, str):
        try:
            tokens = shlex.split(re.sub(r"\\\r?\n", " ", command), comments=True)
        except ValueError as error:
            raise JobError(f"the command line cannot be split into words: {error}") from None
    else:
        tokens = list(command)
    script = next((index for index, token in enumerate(tokens) if token.endswith(".py")), -1)
    stated: dict[str, Any] = {}
    extra: dict[str, JsonValue] = {}
    world_size = _launched_ranks(tokens[: script + 1])
    if world_size is not None:
        stated["world_size"] = world_size
    arguments = tokens[script + 1 :]
    _refuse_variables("the command", list(itertools.takewhile(lambda word: not word.startswith("--"), arguments)))
    for name, words in _options(arguments):
        dashed = "--" + name.replace("_", "-")
        option = _option(name)
        if option is None:
            _refuse_variables(dashed, words[1:])
            values = [_guess(word) for word in words]
            extra[name] = True if not values else values[0] if len(values) == 1 else values
            continue
        field_name, implied = option
        _refuse_variables(dashed, words)
        if implied is not None:
            stated[field_name] = implied
        elif not words:
            raise JobError(f"{dashed} has no value")
        else:
            many = len(words) > 1 and any(kind.startswith("tuple") for kind in _FIELDS[field_name])
            stated[field_name] = words if many else words[0]
    return _make(stated, extra, "megatron-lm")


def _refuse_variables(where: str, words: Sequence[str]) -> None:
    """An unexpanded variable may hide any option: the job would be read wrong without a sign."""
    for word in words:
        if "$" in word:
            raise JobError(
                f"{where} is followed by {word!r}: shell variables are not expanded here; give the command as it ran "
                f"('ps -ww -ef', or what 'bash -x' prints for the script)"
            )


def _launched_ranks(tokens: Sequence[str]) -> int | None:
    """nnodes x nproc-per-node of a torchrun command; None where that is not stated in numbers."""
    found = {name: words[0] for name, words in _options(tokens) if words}
    nodes, ranks = found.get("nnodes", "1"), found.get("nproc_per_node", "")
    return int(nodes) * int(ranks) if nodes.isdigit() and ranks.isdigit() else None


def _command_in(text: str) -> str | None:
    """The last command of a text that starts a Python script with options, continuation lines joined.

    A text of one line is taken as it is, if it has options of Megatron's.
    """
    lines = [line for line in re.sub(r"\\\r?\n", " ", text).splitlines() if line.strip() and line.lstrip()[0] != "#"]
    for line in reversed(lines):
        if re.search(r"\.py['\"]?\s.*(--num-layers|--tensor-model-parallel-size|\$)", line):
            return line
    return lines[0] if len(lines) == 1 and re.search(r"--(num-layers|tensor-model-parallel-size)\b", lines[0]) else None


def read_job(path: str | PathLike[str]) -> Job:
    """The Job in a file: ``.toml``, ``.yaml`` or ``.yml`` by suffix; else a log with an argument block, or a text with a
    launch command. Logs are read line by line.

    Raises InputError for a file that cannot be read, JobError (with the path in front) for one that holds no valid job.
    """
    file = Path(path)
    suffix = file.suffix.lower()
    try:
        if suffix in (".toml", ".yaml", ".yml"):
            return parse_mapping(_load(file.read_text(encoding="utf-8"), suffix))
        with file.open(encoding="utf-8", errors="replace") as lines:
            found = _scan_log(lines)
            if found is not None:
                return _printed_job(found)
            lines.seek(0)
            command = _command_in(lines.read())
    except OSError as error:
        raise InputError(
            f"{file}: cannot be read ({error.strerror}); give a job file (TOML or YAML), the log of rank 0, or a text "
            f"with the launch command"
        ) from None
    except UnicodeDecodeError as error:
        raise JobError(f"{file}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except JobError as error:
        raise JobError(f"{file}: {error}") from None
    if command is None:
        raise JobError(
            f"{file}: no job in it: neither Megatron's argument block ('---- arguments ----', printed on rank 0) nor a "
            f"command 'script.py --num-layers ... --tensor-model-parallel-size ...'; a job file ends with .toml or .yaml"
        )
    try:
        return parse_command_line(command)
    except JobError as error:
        raise JobError(f"{file}: {error}") from None


def _load(text: str, suffix: str) -> Mapping[str, object]:
    try:
        content = tomllib.loads(text) if suffix == ".toml" else yaml.safe_load(text)
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"not valid TOML: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "unknown"
        raise JobError(f"not valid YAML: {error.problem} (line {line})") from None
    except yaml.YAMLError as error:
        raise JobError(f"not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise JobError("no names in it: expected lines such as num_layers = 32 (TOML) or num_layers: 32 (YAML)")
    return content
