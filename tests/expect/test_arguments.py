"""Every argument of the reference's section 3.1: it changes a call, or a gap names it, or it is said to move no byte."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from traceanalyzer import expect
from traceanalyzer.errors import JobError
from traceanalyzer.expect.arguments import UNMOVED
from traceanalyzer.job import Job


def _rules_test() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "job_rules_arguments", Path(__file__).parents[1] / "test_job_rules.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ARGUMENTS: list[str] = _rules_test().ARGUMENTS.split()

DENSE: dict[str, Any] = {
    "framework": "megatron-lm",
    "megatron_core_version": "0.16.1",
    "transformer_engine_version": "2.13",
    "world_size": 64,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "context_parallel_size": 2,
    "pipeline_model_parallel_size": 4,
    "micro_batch_size": 2,
    "num_microbatches": 8,
    "seq_length": 256,
    "num_layers": 16,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 8,
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "padded_vocab_size": 2048,
    "bf16": True,
    "use_distributed_optimizer": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
ONE_STAGE = {**DENSE, "pipeline_model_parallel_size": 1}
PLAIN = {**ONE_STAGE, "context_parallel_size": 1, "transformer_impl": "local"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MOE = {
    **DENSE,
    "num_experts": 8,
    "expert_model_parallel_size": 4,
    "expert_tensor_parallel_size": 1,
    "moe_token_dispatcher_type": "alltoall",
}
FLEX = {**MOE, "moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"}
OVERLAP = {**DENSE, "overlap_grad_reduce": True, "overlap_param_gather": True}
FSDP = {
    **OVERLAP,
    "pipeline_model_parallel_size": 1,
    "use_megatron_fsdp": True,
    "data_parallel_sharding_strategy": "optim_grads_params",
}

BASES: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "one stage": ONE_STAGE,
    "plain": PLAIN,
    "without sequence parallelism": {**DENSE, "sequence_parallel": False},
    "plain latent attention": {**PLAIN, "multi_latent_attention": True, "q_lora_rank": 32},
    "experts": MOE,
    "capacity": {**MOE, "moe_expert_capacity_factor": 1.0},
    "sigmoid": {**MOE, "moe_router_score_function": "sigmoid"},
    "shared expert": {**MOE, "moe_shared_expert_intermediate_size": 128},
    "flex": FLEX,
    "interleaved": {**MOE, "num_virtual_stages_per_pipeline_rank": 2},
    "two stages, interleaved": {
        **DENSE,
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
        "framework": "megatron-core",
    },
    "selective": {**DENSE, "recompute_granularity": "selective"},
    "full": {**DENSE, **FULL},
    "block": {**DENSE, **FULL, "recompute_method": "block"},
    "full without sequence parallelism": {**DENSE, **FULL, "sequence_parallel": False},
    "fp8": {**DENSE, "fp8": "hybrid"},
    "fp16": {**DENSE, "bf16": False, "fp16": True},
    "precision-aware": {**DENSE, "use_precision_aware_optimizer": True},
    "userbuffers": {**DENSE, "tp_comm_overlap": True},
    "overlap": OVERLAP,
    "overlap, interleaved": {**OVERLAP, "num_virtual_stages_per_pipeline_rank": 2},
    "buckets": {**OVERLAP, "pipeline_model_parallel_size": 1, "ddp_bucket_size": 10_000},
    "FSDP": FSDP,
    "two instances of FSDP": {**FSDP, "num_distributed_optimizer_instances": 2},
    "latent attention": {**DENSE, "multi_latent_attention": True, "q_lora_rank": 32},
    "all-to-all": {**DENSE, "cp_comm_type": ("a2a",)},
    "hierarchical": {
        **DENSE,
        "context_parallel_size": 4,
        "cp_comm_type": ("a2a+p2p",),
        "hierarchical_context_parallel_sizes": (2, 2),
    },
    "eight in the hierarchy": {
        **DENSE,
        "world_size": 64,
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
        "context_parallel_size": 8,
        "pipeline_model_parallel_size": 1,
        "cp_comm_type": ("a2a+p2p",),
        "hierarchical_context_parallel_sizes": (2, 4),
    },
    "fused loss": {**DENSE, "cross_entropy_loss_fusion": True},
    "untied": {**DENSE, "untie_embeddings_and_output_weights": True, "gradient_accumulation_fusion": True},
    "grouped": {**DENSE, "group_query_attention": True, "num_query_groups": 4},
    "per-token loss": {**ONE_STAGE, "calculate_per_token_loss": True},
    "timers": {**DENSE, "timing_log_level": 1},
}

VALUES: dict[str, Any] = {
    "world_size": 128,
    "tensor_model_parallel_size": 4,
    "context_parallel_size": 1,
    "pipeline_model_parallel_size": 2,
    "micro_batch_size": 1,
    "global_batch_size": 256,
    "seq_length": 512,
    "num_layers": 32,
    "hidden_size": 128,
    "ffn_hidden_size": 256,
    "num_attention_heads": 16,
    "kv_channels": 16,
    "num_query_groups": 2,
    "padded_vocab_size": 4096,
    "vocab_size": 2000,
    "make_vocab_size_divisible_by": 64,
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "transformer_impl": "transformer_engine",
    "virtual_pipeline_model_parallel_size": 2,
    "num_layers_per_virtual_pipeline_stage": 2,
    "num_virtual_stages_per_pipeline_rank": 2,
    "pipeline_model_parallel_layout": "Ettt|tttt|tttt|tttttL",
    "microbatch_group_size_per_vp_stage": 8,
    "cp_comm_type": ("all_gather",),
    "hierarchical_context_parallel_sizes": (4, 2),
    "expert_model_parallel_size": 8,
    "expert_tensor_parallel_size": 2,
    "num_distributed_optimizer_instances": 2,
    "rampup_batch_size": (32, 32, 1000),
    "decoder_seq_length": 128,
    "q_lora_rank": 24,
    "kv_lora_rank": 48,
    "qk_pos_emb_head_dim": 32,
    "mtp_num_layers": 1,
    "decoder_first_pipeline_num_layers": 1,
    "decoder_last_pipeline_num_layers": 1,
    "num_experts": 16,
    "moe_layer_freq": 2,
    "moe_router_topk": 3,
    "moe_ffn_hidden_size": 64,
    "moe_token_dispatcher_type": "allgather",
    "moe_flex_dispatcher_backend": "hybridep",
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "moe_expert_capacity_factor": 1.5,
    "moe_shared_expert_intermediate_size": 256,
    "moe_latent_size": 32,
    "recompute_granularity": "selective",
    "recompute_method": "block",
    "recompute_num_layers": 2,
    "recompute_modules": ("mlp",),
    "bf16": False,
    "params_dtype": "float16",
    "main_grads_dtype": "bfloat16",
    "fp8": "hybrid",
    "fp8_recipe": "mxfp8",
    "fp4": "e2m1",
    "ddp_bucket_size": 20_000,
    "ddp_num_buckets": 3,
    "data_parallel_sharding_strategy": "optim_grads",
    "outer_dp_sharding_strategy": "optim",
    "pipeline_model_parallel_comm_backend": "ucc",
    "cross_entropy_fusion_impl": "te",
    "rerun_mode": "disabled",
    "timing_log_level": 2,
    "log_interval": 1,
    "loss_scale": 128.0,
    "megatron_core_version": "0.12.3",
    "transformer_engine_version": "2.7",
    "torch_version": "2.4",
}

# What must change with an argument, for the job to be possible or for the argument to be asked at all.
TOGETHER: dict[str, dict[str, Any]] = {
    "params_dtype": {"bf16": False},
    "fp16": {"bf16": False},
    "global_batch_size": {"num_microbatches": None},
    "vocab_size": {"padded_vocab_size": None},
    "num_query_groups": {"group_query_attention": True},
    "account_for_embedding_in_pipeline_split": {"num_layers": 15},
    "account_for_loss_in_pipeline_split": {"num_layers": 15},
}


@cache
def _sent(options: tuple[tuple[str, Any], ...]) -> tuple[Any, frozenset[str]] | None:
    """What every stage sends and what has no rule; None for an impossible job."""
    try:
        job = Job(**dict(options))
        found = [expect.expected(job, job.layout.rank_of(pp=s)) for s in range(job.pipeline_model_parallel_size)]
    except JobError:
        return None
    calls = tuple(tuple(call.same for call in one.calls) for one in found)
    return calls, frozenset(gap.what for one in found for gap in one.not_modelled)


def _effects(name: str) -> list[bool]:
    """For each base that takes the argument: whether a call changes or a gap appears."""
    effects = []
    for base in BASES.values():
        current = base.get(name, Job.__dataclass_fields__[name].default)
        value = VALUES.get(name, not current if isinstance(current, bool) else None)
        if value is None or value == current:
            continue
        changed = {**base, **TOGETHER.get(name, {}), name: value}
        before, after = _sent(tuple(sorted(base.items()))), _sent(tuple(sorted(changed.items())))
        if before is not None and after is not None:
            effects.append(before != after)
    return effects


@pytest.mark.parametrize("name", ARGUMENTS)
def test_argument(name: str) -> None:
    effects = _effects(name)
    assert effects, "no base takes it: the test proves nothing"
    assert any(effects) == (name not in UNMOVED)


def test_what_moves_nothing_is_an_argument() -> None:
    assert set(UNMOVED) <= set(ARGUMENTS)
