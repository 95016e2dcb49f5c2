"""The walk of a job and the expectation for it, written apart from each other, say the same: layouts x schedules x flags.

For one rank of every stage: how many calls of each role, operation, element type, payload, phase and component.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from traceanalyzer import expect, kernel_names, traffic
from traceanalyzer.diff import Diff, diff
from traceanalyzer.errors import JobError
from traceanalyzer.job import Job
from traceanalyzer.run import Run
from traceanalyzer.simulate import Collected, simulate
from traceanalyzer.simulate.program import Call, Compute, PerRank, Program
from traceanalyzer.simulate.walk import walk

Options = dict[str, Any]
Key = tuple[str, str, "str | None", "int | None", str, str]

_MODEL: Options = {
    "megatron_core_version": "0.16.1",
    "framework": "megatron-lm",
    "micro_batch_size": 2,
    "num_microbatches": 4,
    "seq_length": 64,
    "max_position_embeddings": 128,
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 8,
    "padded_vocab_size": 256,
    "bf16": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "swiglu": True,
    "normalization": "RMSNorm",
}
_TP2: Options = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
_TP2_NO_SP: Options = {"tensor_model_parallel_size": 2}
_SHARDED: Options = {"use_distributed_optimizer": True}
_OVERLAPPED: Options = {**_SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}
_CHUNKS: Options = {"virtual_pipeline_model_parallel_size": 2, "num_layers": 8, "num_microbatches": 8}
_FULL: Options = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_EXPERTS: Options = {
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 128,
    "moe_token_dispatcher_type": "alltoall",
}
_EP2: Options = {**_TP2, **_EXPERTS, "expert_model_parallel_size": 2}
_EP2_ALLGATHER: Options = {**_EP2, "moe_token_dispatcher_type": "allgather"}


def _cp(kind: str, size: int = 2, **more: Any) -> Options:
    return {"context_parallel_size": size, "cp_comm_type": (kind,), **more}


def _pp(size: int, **more: Any) -> Options:
    return {"pipeline_model_parallel_size": size, **more}


def _selective(*modules: str) -> Options:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


# The seed document's model at its 1,024 ranks, in Megatron's layout.
_SEED: Options = {
    "tensor_model_parallel_size": 4,
    "sequence_parallel": True,
    "pipeline_model_parallel_size": 4,
    "context_parallel_size": 2,
    "expert_model_parallel_size": 8,
    "num_microbatches": 8,
    "seq_length": 8192,
    "max_position_embeddings": 8192,
    "num_layers": 80,
    "hidden_size": 8192,
    "ffn_hidden_size": 32768,
    "num_attention_heads": 64,
    "padded_vocab_size": 32000,
    "untie_embeddings_and_output_weights": True,
    "num_experts": 64,
    "moe_ffn_hidden_size": 32768,
    "moe_layer_freq": tuple(int(layer % 4 == 3) for layer in range(80)),
    "moe_token_dispatcher_type": "alltoall",
    **_SHARDED,
}

JOBS: dict[str, tuple[int, Options]] = {
    "dp1": (1, {}),
    "dp2": (2, {}),
    "dp2 fp32": (2, {"bf16": False}),
    "dp4 sharded": (4, _SHARDED),
    "dp4 sharded fp32": (4, {**_SHARDED, "bf16": False}),
    "dp4 sharded, gradients in bf16": (4, {**_SHARDED, "grad_reduce_in_bf16": True}),
    "dp4 padded for bus bandwidth": (4, {**_SHARDED, "ddp_pad_buckets_for_high_nccl_busbw": True}),
    "dp4 reduce-scatter by all-to-all": (4, {**_SHARDED, "ddp_reduce_scatter_with_fp32_accumulation": True}),
    "dp4 overlapped in buckets": (4, {**_OVERLAPPED, "ddp_bucket_size": 40_000}),
    "dp4 overlapped in a number of buckets": (4, {**_OVERLAPPED, "ddp_num_buckets": 3}),
    "dp4 overlapped all-reduce": (4, {"overlap_grad_reduce": True, "ddp_bucket_size": 30_000}),
    "dp8 in two instances": (8, {**_SHARDED, "num_distributed_optimizer_instances": 2}),
    "dp8 in two instances, overlapped": (
        8,
        {
            **_SHARDED,
            "num_distributed_optimizer_instances": 2,
            "overlap_grad_reduce": True,
            "ddp_bucket_size": 40_000,
        },
    ),
    "dp8 in two instances, aligned": (
        8,
        _pp(2, **_SHARDED, num_distributed_optimizer_instances=2, overlap_grad_reduce=True),
    ),
    "loss scale": (4, {"loss_scale": 1024.0}),
    "fp16": (4, {**_TP2, **_SHARDED, "bf16": False, "fp16": True}),
    "zeros and parameter norm": (
        4,
        {**_TP2, **_SHARDED, "log_num_zeros_in_grad": True, "log_params_norm": True},
    ),
    "tp2": (2, _TP2_NO_SP),
    "tp2 sp": (2, _TP2),
    "tp4 sp": (4, {**_TP2, "tensor_model_parallel_size": 4}),
    "tp8 sp": (8, {**_TP2, "tensor_model_parallel_size": 8}),
    "tp8 sp, 2 query groups": (
        8,
        {**_TP2, "tensor_model_parallel_size": 8, "group_query_attention": True, "num_query_groups": 2},
    ),
    "tp2 sp, 4 query groups": (2, {**_TP2, "group_query_attention": True, "num_query_groups": 4}),
    "tp2 sp, untied": (2, {**_TP2, "untie_embeddings_and_output_weights": True}),
    "tp2 sp, learned positions": (4, {**_TP2, "position_embedding_type": "learned_absolute"}),
    "tp2, learned positions": (4, {**_TP2_NO_SP, "position_embedding_type": "learned_absolute"}),
    "tp2 sp, biases, LayerNorm, gelu": (
        4,
        {**_TP2, "add_bias_linear": True, "normalization": "LayerNorm", "swiglu": False},
    ),
    "tp2 sp, local layers in buckets": (
        4,
        {
            **_TP2,
            **_OVERLAPPED,
            "transformer_impl": "local",
            "add_bias_linear": True,
            "normalization": "LayerNorm",
            "ddp_bucket_size": 20_000,
        },
    ),
    "tp2 sp, fused layers in buckets": (
        4,
        {**_TP2, **_OVERLAPPED, "add_bias_linear": True, "normalization": "LayerNorm", "ddp_bucket_size": 20_000},
    ),
    "tp2 query and key norms": (4, {**_TP2_NO_SP, "qk_layernorm": True}),
    "tp2 sp, full recomputation by two": (4, {**_TP2, **_FULL, "recompute_num_layers": 2}),
    "tp2 sp, full recomputation of one layer": (4, {**_TP2, **_FULL, "recompute_method": "block"}),
    "tp2 sp, recomputed attention": (4, {**_TP2, **_selective("core_attn")}),
    "tp2 sp, recomputed mlp": (4, {**_TP2, **_selective("mlp", "layernorm")}),
    "tp2 saved activations in parts": (4, {**_TP2_NO_SP, **_FULL, "distribute_saved_activations": True}),
    "tp2 sp, fused loss": (4, {**_TP2, "cross_entropy_loss_fusion": True}),
    "tp2 sp, loss of TransformerEngine": (
        4,
        {**_TP2, "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
    ),
    "tp2 sp, forward only": (2, {**_TP2, "forward_only": True}),
    "cp2 ring": (4, _cp("p2p", group_query_attention=True, num_query_groups=4)),
    "cp2 gather": (4, _cp("all_gather", group_query_attention=True, num_query_groups=4)),
    "cp2 heads": (4, _cp("a2a", group_query_attention=True, num_query_groups=4)),
    "cp2 ring, recomputed": (4, {**_cp("p2p"), **_selective("core_attn")}),
    "cp2 gather, recomputed": (4, {**_cp("all_gather"), **_selective("core_attn")}),
    "cp2 heads, recomputed": (4, {**_cp("a2a"), **_FULL}),
    "cp4 ring, tp2 sp": (8, {**_cp("p2p", 4), **_TP2}),
    "cp4 hierarchical": (
        4,
        _cp("a2a+p2p", 4, hierarchical_context_parallel_sizes=(2, 2), transformer_engine_version="2.20.2"),
    ),
    "cp4 hierarchical before 2.15": (
        4,
        _cp("a2a+p2p", 4, hierarchical_context_parallel_sizes=(2, 2), transformer_engine_version="2.13"),
    ),
    "cp4 one kind a layer": (
        4,
        {
            "megatron_core_version": "0.17.0",
            "transformer_engine_version": "2.20.2",
            "context_parallel_size": 4,
            "cp_comm_type": ("p2p", "a2a", "all_gather", "p2p"),
        },
    ),
    "pp2": (2, _pp(2, num_microbatches=6)),
    "pp4": (4, _pp(4, num_microbatches=6)),
    "pp4 with fewer micro-batches": (4, _pp(4, num_microbatches=2)),
    "pp4 untied, sharded": (8, _pp(4, untie_embeddings_and_output_weights=True, **_SHARDED)),
    "pp4 overlapped": (8, _pp(4, ddp_bucket_size=30_000, **_OVERLAPPED)),
    "pp4 overlapped, not aligned": (8, _pp(4, align_grad_reduce=False, **_OVERLAPPED)),
    "pp4 uneven": (
        4,
        {**_pp(4, decoder_first_pipeline_num_layers=1, decoder_last_pipeline_num_layers=1), "num_layers": 8},
    ),
    "pp2 embedding and loss count as layers": (
        4,
        {
            **_pp(2, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True),
            "num_layers": 6,
        },
    ),
    "pp2 loss by token": (4, _pp(2, calculate_per_token_loss=True)),
    "pp2 forward only": (2, _pp(2, forward_only=True)),
    "pp2 interleaved": (2, _pp(2, **_CHUNKS)),
    "pp4 interleaved": (4, _pp(4, **_CHUNKS)),
    "pp4 interleaved, batched": (4, _pp(4, overlap_p2p_comm=False, **_CHUNKS)),
    "pp4 interleaved, early receives": (4, _pp(4, overlap_p2p_comm_warmup_flush=True, **_CHUNKS)),
    "pp4 interleaved in groups of 8": (4, _pp(4, microbatch_group_size_per_vp_stage=8, **_CHUNKS)),
    "pp2 interleaved by a layout": (
        2,
        _pp(2, virtual_pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|t|t|tL"),
    ),
    "pp4 interleaved, overlapped": (8, _pp(4, **_CHUNKS, **_OVERLAPPED)),
    "pp2 interleaved, gathered with the optimizer step": (
        8,
        _pp(2, overlap_param_gather_with_optimizer_step=True, **_CHUNKS, **_OVERLAPPED),
    ),
    "pp4 interleaved, forward only": (4, _pp(4, forward_only=True, **_CHUNKS)),
    "ep4": (4, {**_EXPERTS, "expert_model_parallel_size": 4}),
    "ep1": (2, {**_EXPERTS, "moe_layer_freq": 2}),
    "ep2 tp2": (4, _EP2),
    "ep2 tp2, allgather": (4, _EP2_ALLGATHER),
    "ep2 tp2, experts whole": (4, {**_EP2, "expert_tensor_parallel_size": 1}),
    "ep2 tp2, experts whole, allgather": (4, {**_EP2_ALLGATHER, "expert_tensor_parallel_size": 1}),
    "ep2 tp2, fp32 router, sharded": (8, {**_EP2, **_SHARDED, "moe_router_dtype": "fp32"}),
    "ep2 tp2, fp32 router, allgather": (8, {**_EP2_ALLGATHER, **_SHARDED, "moe_router_dtype": "fp32"}),
    "ep2 tp2, full recomputation, auxiliary loss": (8, {**_EP2, **_FULL, "moe_aux_loss_coeff": 0.01}),
    "ep2 tp2, recomputed experts": (8, {**_EP2, **_selective("moe", "core_attn"), "moe_aux_loss_coeff": 0.01}),
    "ep2 tp2, shared expert": (8, {**_EP2, "moe_shared_expert_intermediate_size": 128}),
    "ep2 tp2, shared expert overlapped, gate": (
        8,
        {
            **_EP2,
            "moe_shared_expert_intermediate_size": 128,
            "moe_shared_expert_overlap": True,
            "moe_shared_expert_gate": True,
        },
    ),
    "ep2 tp2, shared expert recomputed": (
        8,
        {**_EP2, **_selective("shared_experts"), "moe_shared_expert_intermediate_size": 128},
    ),
    "ep2 tp2, all auxiliary losses": (
        8,
        {
            **_EP2,
            "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss"),
            "moe_aux_loss_coeff": (0.01, 0.01, 0.01),
            "moe_z_loss_coeff": 0.001,
        },
    ),
    "ep2 tp2, losses of 0.18": (
        8,
        {
            **_EP2,
            "megatron_core_version": "0.18.0",
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_aux_loss_coeff": 0.01,
            "moe_z_loss_coeff": 0.001,
        },
    ),
    "ep2 tp2, expert bias": (
        8,
        {**_EP2, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
    ),
    "ep2 tp2, capacity": (8, {**_EP2, "moe_expert_capacity_factor": 1.0}),
    "ep2 tp2, padded to capacity": (
        8,
        {**_EP2, "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    ),
    "ep2 overlapped, grouped experts": (
        8,
        {
            **_EXPERTS,
            **_OVERLAPPED,
            "expert_model_parallel_size": 2,
            "ddp_bucket_size": 20_000,
            "moe_grouped_gemm": True,
        },
    ),
    "ep2 overlapped, single experts": (
        8,
        {**_EXPERTS, **_OVERLAPPED, "expert_model_parallel_size": 2, "ddp_bucket_size": 20_000},
    ),
    "ep2 tp2, grouped experts with biases": (
        8,
        {**_EP2, "expert_tensor_parallel_size": 1, "moe_grouped_gemm": True, "add_bias_linear": True},
    ),
    "ep2 tp2, single experts with biases": (
        8,
        {**_EP2, "expert_tensor_parallel_size": 1, "add_bias_linear": True},
    ),
    "ep2 in two instances": (
        8,
        {**_EXPERTS, **_SHARDED, "expert_model_parallel_size": 2, "num_distributed_optimizer_instances": 2},
    ),
    "ep2 pp2, experts on the last stage": (
        8,
        _pp(2, **_EXPERTS, **_SHARDED, expert_model_parallel_size=2, moe_layer_freq=(0, 0, 1, 1)),
    ),
    "ep2 pp2 interleaved, overlapped": (
        8,
        _pp(2, **_CHUNKS, **_EXPERTS, **_OVERLAPPED, expert_model_parallel_size=2, moe_layer_freq=2),
    ),
    "tp2 pp2 cp2 ep2": (16, {**_pp(2, context_parallel_size=2, moe_layer_freq=2), **_EP2, **_SHARDED}),
    "the seed's 1,024 ranks": (1024, _SEED),
    "the seed's 1,024 ranks, overlapped, experts whole": (
        1024,
        {**_SEED, **_OVERLAPPED, "expert_tensor_parallel_size": 1},
    ),
}


def _job(world: int, options: Options) -> Job:
    return Job(**{**_MODEL, "world_size": world, **options})


def _own(value: PerRank, place: int) -> int:
    return int(value[place]) if isinstance(value, np.ndarray) else value


# Transfers that torch.distributed does not make: kernels of TransformerEngine or DeepEP, one for each.
OUTSIDE: dict[str, tuple[int, Options]] = {
    "tp2 userbuffers": (4, {**_TP2, "tp_comm_overlap": True}),
    "tp2 userbuffers by ring": (
        4,
        {**_TP2, "tp_comm_overlap": True, "tp_comm_overlap_rs_dgrad": True, "tp_comm_overlap_disable_qkv": True},
    ),
    "tp2 userbuffers in part": (
        4,
        {**_TP2, "tp_comm_overlap": True, "tp_comm_overlap_ag": False, "tp_comm_bulk_wgrad": False},
    ),
    "tp2 userbuffers, recomputed": (4, {**_TP2, **_FULL, "tp_comm_overlap": True, "tp_comm_bulk_dgrad": False}),
    "ep2 userbuffers, shared expert": (
        8,
        {**_EP2, "tp_comm_overlap": True, "moe_shared_expert_intermediate_size": 128},
    ),
    "ep2 userbuffers, shared expert, recomputed": (
        8,
        {**_EP2, **_FULL, "tp_comm_overlap": True, "moe_shared_expert_intermediate_size": 128},
    ),
    "ep2 deepep": (
        4,
        {
            **_EXPERTS,
            "expert_model_parallel_size": 2,
            "moe_token_dispatcher_type": "flex",
            "moe_router_dtype": "fp32",
        },
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_same_traffic_outside_torch(name: str) -> None:
    """Calls as expected, and as many kernels of a phase and component as it has transfers outside torch.distributed."""
    job = _job(*OUTSIDE[name])
    (program,) = walk(job, routing="even").programs
    inside, outside = Counter[Key](), Counter[tuple[str, str]]()
    for one in expect.expected(job, 0).calls:
        if not one.outside_c10d:
            inside[_key(job, one.role, one.op, one.dtype, one.payload_bytes, one.phase, one.component)] += one.calls
        elif not one.component.endswith("probabilities"):  # they travel with their rows
            outside[one.phase, one.component] += one.calls
    assert outside
    assert _walked(job, program, 0) == +inside
    found = Counter(
        (one.where.phase, one.where.component or "")
        for one in program.instructions
        if isinstance(one, Compute)
        and kernel_names.classify(one.name).op is not None
        and "cached_notify" not in one.name
    )
    assert found == outside


def _walked(job: Job, program: Program, rank: int) -> Counter[Key]:
    place = program.ranks.index(rank)
    found: Counter[Key] = Counter()
    for one in program.instructions:
        if isinstance(one, Call):
            dtype, ranks = traffic.normalise_dtype(one.dtype), job.layout.group_size(one.role)
            ends = _own(one.in_elems, place), _own(one.out_elems, place)
            payload = traffic.payload_bytes(one.op, *ends, dtype, ranks)
            found[_key(job, one.role, one.op, dtype, payload, one.where.phase, one.where.component or "")] += 1
    return found


def _expected(job: Job, rank: int) -> Counter[Key]:
    found: Counter[Key] = Counter()
    for one in expect.expected(job, rank).calls:
        found[_key(job, one.role, one.op, one.dtype, one.payload_bytes, one.phase, one.component)] += one.calls
    return +found


def _key(job: Job, role: str, op: str, dtype: str | None, payload: int | None, phase: str, component: str) -> Key:
    # Parameters that an interleaved schedule gathers (param_sync_func) travel outside of any pass. The expectation counts
    # them to the forward pass they are for, as it does those that a pass waits for.
    if job.align_param_gather and component in ("parameters", "expert parameters") and phase == "other":
        phase = "forward"
    return role, op, dtype, payload, phase, component


@pytest.mark.parametrize("name", JOBS)
def test_same_calls(name: str) -> None:
    job = _job(*JOBS[name])
    for program in walk(job, routing="even").programs:
        rank = program.ranks[-1]
        assert _walked(job, program, rank) == _expected(job, rank), f"rank {rank}"


def _random(rng: random.Random) -> Options:
    """Options drawn without regard to what fits together."""

    def chance(part: float) -> bool:
        return rng.random() < part

    pick = rng.choice
    cp = pick([1, 1, 2, 4])
    found: Options = {
        "megatron_core_version": pick(["0.16.1", "0.17.0", "0.18.0"]),
        "pipeline_model_parallel_size": pick([1, 1, 2, 4]),
        "tensor_model_parallel_size": pick([1, 2, 4]),
        "sequence_parallel": chance(0.7),
        "context_parallel_size": cp,
        "cp_comm_type": (pick(["p2p", "all_gather", "a2a"]),),
        "num_layers": 8,
        "num_microbatches": pick([1, 2, 4, 8]),
        "swiglu": chance(0.5),
        "add_bias_linear": chance(0.2),
        "normalization": pick(["RMSNorm", "LayerNorm"]),
        "position_embedding_type": pick(["rope", "learned_absolute"]),
        "untie_embeddings_and_output_weights": chance(0.5),
        "transformer_impl": "transformer_engine" if cp > 1 else pick(["transformer_engine", "local"]),
        "qk_layernorm": chance(0.2),
        "use_distributed_optimizer": chance(0.7),
        "overlap_grad_reduce": chance(0.5),
        "align_grad_reduce": chance(0.7),
        "grad_reduce_in_bf16": chance(0.2),
        "calculate_per_token_loss": chance(0.2),
        "cross_entropy_loss_fusion": chance(0.2),
        "create_attention_mask_in_dataloader": chance(0.5),
        "ddp_bucket_size": pick([None, 5_000, 20_000, 60_000]),
    }
    found["overlap_param_gather"] = found["use_distributed_optimizer"] and found["overlap_grad_reduce"] and chance(0.5)
    if chance(0.5):
        found |= {"group_query_attention": True, "num_query_groups": pick([2, 4])}
    if found["pipeline_model_parallel_size"] > 1 and chance(0.5):
        found |= {"virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": chance(0.6)}
    if chance(0.2):
        found |= {**_FULL, "recompute_method": pick(["uniform", "block"])}
    elif chance(0.3):
        found |= _selective(*rng.sample(["core_attn", "mlp", "moe", "shared_experts", "layernorm"], 2))
    if chance(0.5):
        found |= {
            **_EXPERTS,
            "expert_model_parallel_size": pick([1, 2, 4]),
            "expert_tensor_parallel_size": pick([None, 1]),
            "moe_token_dispatcher_type": pick(["alltoall", "allgather"]),
            "moe_layer_freq": pick([1, 2, (0, 0, 0, 1, 1, 1, 1, 0)]),
            "moe_router_dtype": pick([None, "fp32"]),
            "moe_grouped_gemm": chance(0.5) and not found["add_bias_linear"],
            "moe_aux_loss_coeff": pick([0.0, 0.01]),
            "moe_router_load_balancing_type": pick(["aux_loss", "seq_aux_loss", "global_aux_loss", "none"]),
            "moe_shared_expert_intermediate_size": pick([None, 128]),
        }
    model = found["pipeline_model_parallel_size"] * found["tensor_model_parallel_size"] * cp
    return {**found, "world_size": model * pick([1, 2, 4])}


def test_same_calls_of_jobs_drawn_at_random() -> None:
    rng = random.Random(6)
    compared = 0
    while compared < 60:
        options = _random(rng)
        try:
            job = Job(**{**_MODEL, **options})
        except JobError:
            continue
        for program in walk(job, routing="even").programs:
            rank = program.ranks[0]
            assert _walked(job, program, rank) == _expected(job, rank), (options, rank)
        compared += 1


# -- through rows and diff ---------------------------------------------------------------------------------------------

# One or two jobs of each kind; the others are slow.
SOON = (
    "dp2 fp32",
    "dp4 sharded, gradients in bf16",
    "dp4 padded for bus bandwidth",
    "dp4 reduce-scatter by all-to-all",
    "dp4 overlapped in buckets",
    "dp4 overlapped all-reduce",
    "dp8 in two instances, overlapped",
    "fp16",
    "zeros and parameter norm",
    "tp2",
    "tp8 sp, 2 query groups",
    "tp2 sp, untied",
    "tp2, learned positions",
    "tp2 sp, local layers in buckets",
    "tp2 query and key norms",
    "tp2 sp, full recomputation of one layer",
    "tp2 sp, recomputed mlp",
    "tp2 saved activations in parts",
    "tp2 sp, loss of TransformerEngine",
    "tp2 sp, forward only",
    "cp2 ring",
    "cp2 gather, recomputed",
    "cp2 heads",
    "cp4 hierarchical",
    "cp4 one kind a layer",
    "pp4 untied, sharded",
    "pp4 overlapped, not aligned",
    "pp4 uneven",
    "pp2 loss by token",
    "pp2 forward only",
    "pp4 interleaved",
    "pp4 interleaved, early receives",
    "pp4 interleaved in groups of 8",
    "pp2 interleaved by a layout",
    "pp4 interleaved, overlapped",
    "pp2 interleaved, gathered with the optimizer step",
    "ep4",
    "ep2 tp2, allgather",
    "ep2 tp2, experts whole",
    "ep2 tp2, full recomputation, auxiliary loss",
    "ep2 tp2, shared expert overlapped, gate",
    "ep2 tp2, padded to capacity",
    "ep2 pp2 interleaved, overlapped",
    "tp2 pp2 cp2 ep2",
)


def _compared(job: Job, path: Path, ranks: list[int] | None = None) -> Diff:
    """The diff of what the hooks recorded of one step."""
    simulate(job, ranks=ranks, collected=Collected(profiled=[])).write(path)
    with Run.open(path, threads=1) as run:
        return diff(run)


def _is_match(found: Diff, ranks: int) -> None:
    assert (found.verdict, found.job_conflicts, found.not_in_window) == ("match", (), ())
    assert len(found.coverage.ranks_present) == ranks
    # what only the log's interval decides is no match
    assert {c.role for c in found.cells if c.verdict != "match"} <= {"world"}
    assert any(c.verdict == "match" and c.calls_measured for c in found.cells)


@pytest.mark.parametrize("name", SOON)
def test_no_difference(name: str, tmp_path: Path) -> None:
    job = _job(*JOBS[name])
    _is_match(_compared(job, tmp_path / "run.parquet"), JOBS[name][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in JOBS if n not in SOON and JOBS[n][0] < 1024])
def test_no_difference_in_the_other_jobs(name: str, tmp_path: Path) -> None:
    job = _job(*JOBS[name])
    _is_match(_compared(job, tmp_path / "run.parquet"), JOBS[name][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in JOBS if JOBS[n][0] == 1024])
def test_no_difference_at_1024_ranks(name: str, tmp_path: Path) -> None:
    """All are simulated; recorded is one tensor-parallel group of each stage and replica of an expert."""
    ranks = [first + tp for first in range(0, 1024, 64) for tp in range(4)]
    _is_match(_compared(_job(*JOBS[name]), tmp_path / "run.parquet", ranks), 64)


def test_what_torch_does_not_carry_is_not_missing(tmp_path: Path) -> None:
    job = _job(*OUTSIDE["tp2 userbuffers"])
    found = _compared(job, tmp_path / "run.parquet")
    assert (found.verdict, found.count("missing"), found.count("unexpected"), found.count("excess")) == (
        "match",
        0,
        0,
        0,
    )
    assert {c.transport for c in found.cells if c.verdict == "unknown"} == {"", "userbuffers"}
