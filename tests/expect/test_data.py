"""Gradients and parameters over the replicas: against recorded traffic, by setting, by release, and what has no rule."""

from __future__ import annotations

import csv
import gzip
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from traceanalyzer import axes, expect, traffic
from traceanalyzer.expect.model import ExpectedCall, NotModelled
from traceanalyzer.job import Job

# role, op, type, input elements, output elements, phase
Key = tuple[str, str, str, int, int, str]

ROLES = ("dp", "dp_cp", "edp", "intra_dp_cp", "intra_edp", "inter_dist_opt")


def _rows(job: Job, rank: int = 0, **options: Any) -> list[ExpectedCall]:
    return [row for row in expect.expected(job, rank, **options).calls if row.rule.startswith("data:")]


def _counts(job: Job, rank: int = 0, **options: Any) -> Counter[Key]:
    found: Counter[Key] = Counter()
    for row in _rows(job, rank, **options):
        found[row.role, row.op, row.dtype, row.in_elems, row.out_elems, row.phase] += row.calls
    return found


def _unknown(job: Job, rank: int = 0) -> dict[str, tuple[str, ...]]:
    """Roles by reason, for entries that touch a data-parallel group."""
    entries = expect.expected(job, rank).not_modelled
    return {entry.what: entry.roles for entry in entries if set(ROLES) & set(entry.roles)}


# -- recordings ------------------------------------------------------------------------------------------------------


def _phase(row: Mapping[str, str]) -> str:
    if row["phase"].endswith(":optimizer"):
        return "optimizer"
    if "start_param_sync" in row["callsite"]:
        return "forward"
    return "backward" if row["direction"] == "backward" else "other"


def _measured(rows: Iterable[Mapping[str, str]], rank: int) -> Counter[tuple[Key, int]]:
    found: Counter[tuple[Key, int]] = Counter()
    for row in rows:
        role = axes.role_of_description(row["group_desc"])
        if int(row["rank"]) == rank and role in ROLES:
            op, sizes = traffic.normalise_op(row["op"]) or row["op"], (int(row["nelems_in"]), int(row["nelems_out"]))
            found[(role, op, row["dtype"], *sizes, _phase(row)), int(row["group_size"])] += int(row["count"])
    return found


def _expected(job: Job, rank: int, **options: Any) -> Counter[tuple[Key, int]]:
    """Every expected call on a data-parallel group, whatever chapter it comes from."""
    found: Counter[tuple[Key, int]] = Counter()
    for row in expect.expected(job, rank, **options).calls:
        if row.role in ROLES:
            key = (row.role, row.op, row.dtype, row.in_elems, row.out_elems, row.phase)
            found[key, row.group_size] += row.calls
    return found


def _as_built(job: Job) -> Job:
    """Recorded without TransformerEngine's layers, but for the attention that context parallelism needs."""
    return replace(job, transformer_impl="local") if job.context_parallel_size == 1 else job


def test_recorded_traffic(recording: Any) -> None:
    """Every call of a step on a data-parallel group, of every rank, with sizes, phase, group size and count."""
    job = _as_built(recording.job)
    if job.use_megatron_fsdp or job.use_torch_fsdp2:
        assert not _rows(job)
        return
    for rank in recording.ranks:
        assert not _unknown(job, rank)
        assert _expected(job, rank) == _measured(recording.rows, rank), f"rank {rank}"


def test_recorded_first_step(recording: Any) -> None:
    """In the first step overlapped reductions all start behind the backward pass; the rest is as in every step."""
    job = _as_built(recording.job)
    if job.use_megatron_fsdp or job.use_torch_fsdp2:
        return
    with gzip.open(recording.path, "rt", newline="") as text:
        first = [row for row in csv.DictReader(text) if row["phase"].startswith("step0:")]
    for rank in recording.ranks:
        assert _expected(job, rank, first_step=True) == _measured(first, rank), f"rank {rank}"


# -- runs of megatron-core on a fake process group --------------------------------------------------------------------

# H 64, F 256, 4 heads, V 256, 4 layers, swiglu, RMSNorm, no biases, RoPE, tied, layers not of TransformerEngine.
RECORDED: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
    "num_layers": 4,
    "num_microbatches": 4,
    "num_attention_heads": 4,
    "padded_vocab_size": 256,
    "swiglu": True,
    "normalization": "RMSNorm",
    "ffn_hidden_size": 256,
    "transformer_impl": "local",
}
SHARDED = {"use_distributed_optimizer": True}
OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 40_000}
BOTH = {**SHARDED, **OVERLAP, "overlap_param_gather": True}
EXPERTS = {"num_experts": 4, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
STAGES = {"world_size": 4, "pipeline_model_parallel_size": 2, "framework": "megatron-lm"}
CHUNKS = {**STAGES, "virtual_pipeline_model_parallel_size": 2}


def _job(tiny: Callable[..., Job], **options: Any) -> Job:
    return tiny(**{**RECORDED, "world_size": 2, **options})


def _gradients(phase: str, *buckets: tuple[int, int], role: str = "dp_cp") -> dict[Key, int]:
    return {(role, "reduce_scatter", "float32", n, part, phase): 1 for n, part in buckets}


def _parameters(phase: str, *buckets: tuple[int, int], role: str = "dp_cp", calls: int = 1) -> dict[Key, int]:
    return {(role, "all_gather", "bfloat16", part, n, phase): calls for n, part in buckets}


def test_distributed_optimizer_over_three_ranks(tiny: Callable[..., Job]) -> None:
    assert _counts(_job(tiny, world_size=3, **SHARDED)) == {
        **_gradients("other", (279_168, 93_056)),
        **_parameters("optimizer", (279_168, 93_056)),
    }


def test_instances(tiny: Callable[..., Job]) -> None:
    dense = (279_168, 69_792)
    assert _counts(_job(tiny, world_size=8, num_distributed_optimizer_instances=2, **SHARDED)) == {
        **_gradients("other", dense, role="intra_dp_cp"),
        ("inter_dist_opt", "all_reduce", "float32", 69_792, 69_792, "other"): 1,
        **_parameters("optimizer", dense, role="intra_dp_cp"),
    }


def test_instances_with_experts(tiny: Callable[..., Job]) -> None:
    dense, experts = (83_584, 20_896), (393_216, 196_608)
    assert _counts(_job(tiny, world_size=8, num_distributed_optimizer_instances=2, **SHARDED, **EXPERTS)) == {
        **_gradients("other", dense, role="intra_dp_cp"),
        **_gradients("other", experts, role="intra_edp"),
        ("inter_dist_opt", "all_reduce", "float32", 20_896, 20_896, "other"): 1,
        ("inter_dist_opt", "all_reduce", "float32", 196_608, 196_608, "other"): 1,
        **_parameters("optimizer", dense, role="intra_dp_cp", calls=2),
        **_parameters("optimizer", experts, role="intra_edp", calls=2),
    }


def test_reduce_scatter_with_fp32_accumulation(tiny: Callable[..., Job]) -> None:
    job = _job(tiny, world_size=4, ddp_reduce_scatter_with_fp32_accumulation=True, **SHARDED)
    gather = _parameters("optimizer", (279_168, 69_792))
    assert _counts(job) == {("dp_cp", "all_to_all", "float32", 279_168, 279_168, "other"): 1, **gather}
    assert _counts(job, version="0.15.0") == {**_gradients("other", (279_168, 69_792)), **gather}


def test_buckets_padded_for_bus_bandwidth(tiny: Callable[..., Job]) -> None:
    job = _job(tiny, ddp_pad_buckets_for_high_nccl_busbw=True, **SHARDED, **OVERLAP)
    assert _counts(job) == {
        ("dp_cp", "reduce_scatter", "float32", 65_536, 32_768, "backward"): 2,
        ("dp_cp", "reduce_scatter", "float32", 131_072, 65_536, "backward"): 3,
        ("dp_cp", "all_gather", "bfloat16", 32_768, 65_536, "optimizer"): 2,
        ("dp_cp", "all_gather", "bfloat16", 65_536, 131_072, "optimizer"): 3,
    }
    without = replace(job, ddp_pad_buckets_for_high_nccl_busbw=False)
    assert _counts(job, version="0.11.0") == _counts(without, version="0.11.0")


FIRST_STAGE = ((49_152, 24_576), (65_664, 32_832), (16_512, 8_256), (16_384, 8_192))
LAST_STAGE = ((131_456, 65_728), (16_384, 8_192))


@pytest.mark.parametrize("version", ["0.11.0", "0.13.1", "0.16.1", "0.19.0"])
def test_overlap_in_a_pipeline(tiny: Callable[..., Job], version: str) -> None:
    """Behind the first stage there is one bucket beside the tied embedding, and the pipeline starts the reduction."""
    job = _job(tiny, **STAGES, **BOTH, megatron_core_version=version)
    assert _counts(job, 0) == {**_gradients("backward", *FIRST_STAGE), **_parameters("forward", *FIRST_STAGE)}
    assert _counts(job, 2) == {**_gradients("other", *LAST_STAGE), **_parameters("forward", *LAST_STAGE)}


def test_overlap_that_the_pipeline_does_not_align(tiny: Callable[..., Job]) -> None:
    plain = {"overlap_grad_reduce": True, "ddp_bucket_size": 40_000, "align_grad_reduce": False}
    job = _job(tiny, **STAGES, **plain)
    buckets = (49_152, 65_664, 32_896)
    assert _counts(job, 0) == {("dp_cp", "all_reduce", "float32", n, n, "backward"): 1 for n in buckets}
    assert _counts(job, 2) == {("dp_cp", "all_reduce", "float32", 147_776, 147_776, "backward"): 1}


@pytest.mark.parametrize(("aligned", "phase"), [(True, "other"), (False, "backward")])
def test_overlap_in_an_interleaved_pipeline(tiny: Callable[..., Job], aligned: bool, phase: str) -> None:
    first = ((65_664, 32_832), (49_152, 24_576), (16_512, 8_256), (16_384, 8_192))
    last = ((65_664, 32_832), (65_792, 32_896), (16_384, 8_192))
    job = _job(tiny, **CHUNKS, **BOTH, align_grad_reduce=aligned)
    assert _counts(job, 0) == {**_gradients(phase, *first), **_parameters("forward", *first)}
    assert _counts(job, 2) == {**_gradients(phase, *last), **_parameters("forward", *last)}


def test_gathers_with_the_optimizer_step(tiny: Callable[..., Job]) -> None:
    """The first chunk's in the step, the others' in the forward pass; no chunk has several buckets then."""
    job = _job(tiny, **CHUNKS, **BOTH, overlap_param_gather_with_optimizer_step=True)
    assert _counts(job, 0) == {
        ("dp_cp", "reduce_scatter", "float32", 65_664, 32_832, "other"): 2,
        ("dp_cp", "reduce_scatter", "float32", 16_384, 8_192, "other"): 1,
        ("dp_cp", "all_gather", "bfloat16", 32_832, 65_664, "optimizer"): 1,
        ("dp_cp", "all_gather", "bfloat16", 8_192, 16_384, "optimizer"): 1,
        ("dp_cp", "all_gather", "bfloat16", 32_832, 65_664, "forward"): 1,
    }


def test_overlap_with_experts(tiny: Callable[..., Job]) -> None:
    job = _job(tiny, **{**BOTH, "ddp_bucket_size": 100_000}, **EXPERTS, world_size=4)
    assert _counts(job) == {
        **_gradients("backward", (83_584, 20_896)),
        ("edp", "reduce_scatter", "float32", 114_688, 57_344, "backward"): 2,
        ("edp", "reduce_scatter", "float32", 131_072, 65_536, "backward"): 1,
        ("edp", "reduce_scatter", "float32", 32_768, 16_384, "backward"): 1,
        **_parameters("forward", (83_584, 20_896)),
        ("edp", "all_gather", "bfloat16", 57_344, 114_688, "forward"): 2,
        ("edp", "all_gather", "bfloat16", 65_536, 131_072, "forward"): 1,
        ("edp", "all_gather", "bfloat16", 16_384, 32_768, "forward"): 1,
    }


def test_latent_attention_and_uneven_sizes(tiny: Callable[..., Job]) -> None:
    """H 40, F 96, V 100, latent ranks 24 and 20: one bucket of 9000 elements closes in the middle of a layer."""
    job = _job(
        tiny,
        **SHARDED,
        overlap_grad_reduce=True,
        ddp_bucket_size=9_000,
        hidden_size=40,
        ffn_hidden_size=96,
        padded_vocab_size=100,
        multi_latent_attention=True,
        q_lora_rank=24,
        kv_lora_rank=20,
        qk_head_dim=10,
        qk_pos_emb_head_dim=6,
        v_head_dim=10,
    )
    assert _counts(job) == {
        ("dp_cp", "reduce_scatter", "float32", 11_648, 5_824, "backward"): 1,
        ("dp_cp", "reduce_scatter", "float32", 10_752, 5_376, "backward"): 1,
        ("dp_cp", "reduce_scatter", "float32", 9_344, 4_672, "backward"): 4,
        ("dp_cp", "reduce_scatter", "float32", 9_088, 4_544, "backward"): 2,
        ("dp_cp", "all_gather", "bfloat16", 5_824, 11_648, "optimizer"): 1,
        ("dp_cp", "all_gather", "bfloat16", 5_376, 10_752, "optimizer"): 1,
        ("dp_cp", "all_gather", "bfloat16", 4_672, 9_344, "optimizer"): 4,
        ("dp_cp", "all_gather", "bfloat16", 4_544, 9_088, "optimizer"): 2,
    }


def test_multi_token_prediction(tiny: Callable[..., Job]) -> None:
    """Its stage has a copy of the embedding, which is a bucket of its own there; the tied output weight is none."""
    job = _job(tiny, **STAGES, **SHARDED, overlap_grad_reduce=True, ddp_bucket_size=20_000, mtp_num_layers=1)
    first = ((49_152, 24_576), (32_896, 16_448), (32_768, 16_384), (16_512, 8_256), (16_384, 8_192))
    last = ((221_824, 110_912), (16_384, 8_192))
    assert _counts(job, 0) == {**_gradients("backward", *first), **_parameters("optimizer", *first)}
    assert _counts(job, 2) == {**_gradients("other", *last), **_parameters("optimizer", *last)}


# -- twice -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.11.0", "0.12.3", "0.13.1", "0.14.0", "0.16.1", "0.17.0", "0.18.0", "0.19.0"])
def test_parameters_are_gathered_twice_with_experts(tiny: Callable[..., Job], version: str) -> None:
    dense, experts = (83_584, 20_896), (393_216, 196_608)
    job = _job(tiny, world_size=4, **SHARDED, **EXPERTS, megatron_core_version=version)
    assert _counts(job) == {
        **_gradients("other", dense),
        **_gradients("other", experts, role="edp"),
        **_parameters("optimizer", dense, calls=2),
        **_parameters("optimizer", experts, role="edp", calls=2),
    }
    again = [row for row in _rows(job) if row.rule.endswith("again")]
    assert [(row.avoidable.code, row.avoidable.setting) for row in again if row.avoidable] == [
        ("double_param_gather", "--overlap-param-gather")
    ] * 2
    assert [row.avoidable.bytes_per_call for row in again if row.avoidable] == [3 * 20_896 * 2, 196_608 * 2]


def test_without_experts_apart_they_are_gathered_once(tiny: Callable[..., Job]) -> None:
    one = _job(tiny, **SHARDED, num_experts=4)
    assert not [row for row in _rows(one) if row.rule.endswith("again")]
    assert not [row for row in _rows(_job(tiny, world_size=4, **EXPERTS, **BOTH)) if row.phase == "optimizer"]


@pytest.mark.parametrize(("version", "calls"), [("0.13.1", 1), ("0.14.0", 2), ("0.16.1", 2)])
def test_a_stage_without_experts_gathers_twice_since_0_14(tiny: Callable[..., Job], version: str, calls: int) -> None:
    """Real processes, EP2, experts in the last two of four layers: they are all on the second stage."""
    options = {**STAGES, **EXPERTS, **SHARDED, "moe_layer_freq": (0, 0, 1, 1)}
    job = _job(tiny, **options, megatron_core_version=version)
    assert _counts(job, 0) == {
        **_gradients("other", (131_328, 65_664), (16_384, 8_192)),
        **_parameters("optimizer", (131_328, 65_664), (16_384, 8_192), calls=calls),
    }
    assert _counts(job, 2) == {
        **_gradients("other", (33_664, 16_832), (16_384, 8_192)),
        **_gradients("other", (196_608, 196_608), role="edp"),
        **_parameters("optimizer", (33_664, 16_832), (16_384, 8_192), calls=2),
        **_parameters("optimizer", (196_608, 196_608), role="edp", calls=2),
    }


def test_aligned_reductions_of_several_instances_are_sent_twice(tiny: Callable[..., Job]) -> None:
    """megatron-core 0.16.1: what the pipeline starts leaves no handle, so the end of the step starts it again."""
    job = _job(tiny, **{**STAGES, "world_size": 8}, **BOTH, num_distributed_optimizer_instances=2)
    inside = dict.fromkeys(_gradients("other", *LAST_STAGE, role="intra_dp_cp"), 2)
    across = {("inter_dist_opt", "all_reduce", "float32", part, part, "other"): 2 for _, part in LAST_STAGE}
    assert _counts(job, 4) == {**inside, **across, **_parameters("forward", *LAST_STAGE, role="intra_dp_cp")}
    assert {row.phase for row in _rows(job, 0)} == {"backward", "forward"}
    assert max(row.calls for row in _rows(job, 0)) == 1
    again = [row for row in _rows(job, 4) if row.rule.endswith("again")]
    assert {row.avoidable.code for row in again if row.avoidable} == {"repeated_gradient_reduction"}
    assert sum(_counts(job, 4, version="0.15.0").values()) == 6


# -- first step ------------------------------------------------------------------------------------------------------


def test_first_step_of_a_pipeline(tiny: Callable[..., Job]) -> None:
    """Megatron-LM gathers nothing in it, the parameters are whole; since 0.16 nothing is reduced inside the backward."""
    job = _job(tiny, **STAGES, **BOTH)
    assert _counts(job, 0, first_step=True) == _gradients("other", *FIRST_STAGE)
    assert _counts(job, 2, first_step=True) == _gradients("other", *LAST_STAGE)
    assert _counts(job, 0, first_step=True, version="0.11.0") == _gradients("backward", *FIRST_STAGE)
    older = _counts(job, 0, first_step=True, version="0.10.0")
    assert older == {**_gradients("backward", *FIRST_STAGE), **_parameters("forward", *FIRST_STAGE)}


def test_first_step_with_the_optimizer_step(tiny: Callable[..., Job]) -> None:
    job = _job(tiny, **CHUNKS, **BOTH, overlap_param_gather_with_optimizer_step=True)
    gathers = {key: n for key, n in _counts(job, 0, first_step=True).items() if key[1] == "all_gather"}
    assert gathers == _parameters("optimizer", (65_664, 32_832), (16_384, 8_192))


def test_without_overlap_the_first_step_is_like_any_other(tiny: Callable[..., Job]) -> None:
    job = _job(tiny, **STAGES, **SHARDED)
    assert _counts(job, first_step=True) == _counts(job)


# -- by layout and type ----------------------------------------------------------------------------------------------


def test_group_of_one(tiny: Callable[..., Job]) -> None:
    """A job without data parallelism still makes the calls. 139,840 elements on a rank of TP2."""
    job = tiny(**{**RECORDED, "tensor_model_parallel_size": 2, "sequence_parallel": True})
    (row,) = _rows(job)
    assert (row.role, row.op, row.phase, row.dtype) == ("dp_cp", "all_reduce", "other", "float32")
    assert (row.in_elems, row.group_size, row.calls) == (139_840, 1, 1)
    assert row.off_rank_bytes == 0
    assert row.avoidable is None
    assert [row.group_size for row in _rows(replace(job, use_distributed_optimizer=True))] == [1, 1]


def test_group_is_data_and_context_parallel(tiny: Callable[..., Job]) -> None:
    sizes = {"tensor_model_parallel_size": 2, "transformer_impl": "transformer_engine"}
    (row,) = _rows(tiny(**{**RECORDED, **sizes}, world_size=12, context_parallel_size=2, seq_length=64))
    assert (row.in_elems, row.group_size) == (139_840, 6)
    assert row.off_rank_bytes * 6 == 139_840 * 4 * 2 * 5  # 2(N-1)/N of the bytes


@pytest.mark.parametrize(
    ("options", "gradients", "gathered"),
    [
        ({}, "float32", "bfloat16"),
        ({"grad_reduce_in_bf16": True}, "bfloat16", "bfloat16"),
        ({"bf16": False, "fp16": True}, "float16", "float16"),
        ({"bf16": False, "fp16": True, "accumulate_allreduce_grads_in_fp32": True}, "float32", "float16"),
        ({"bf16": False}, "float32", "float32"),
    ],
)
def test_types(tiny: Callable[..., Job], options: dict[str, Any], gradients: str, gathered: str) -> None:
    found = _rows(_job(tiny, **options, **SHARDED))
    assert [(row.op, row.dtype) for row in found] == [("reduce_scatter", gradients), ("all_gather", gathered)]


def test_average_in_the_collective_is_the_same_traffic(tiny: Callable[..., Job]) -> None:
    job = _job(tiny, **SHARDED)
    assert _counts(replace(job, ddp_average_in_collective=True)) == _counts(job)


def test_one_buffer_for_each_model_chunk(tiny: Callable[..., Job]) -> None:
    job = _job(tiny, **CHUNKS)
    sizes = [[row.in_elems for row in _rows(job, rank)] for rank in (0, 2)]
    assert sizes == [[82_048, 65_664], [65_664, 82_112]]


def test_experts_have_a_buffer_of_their_own_with_expert_parallelism(tiny: Callable[..., Job]) -> None:
    """Four experts a layer of 3 * 64 * 256 elements, two of them on a rank, over EP2 of eight ranks."""
    apart = _job(tiny, world_size=8, **EXPERTS)
    found = [(row.role, row.component, row.in_elems, row.group_size) for row in _rows(apart)]
    assert found == [("dp_cp", "gradients", 83_520, 8), ("edp", "expert gradients", 393_216, 4)]
    together = replace(apart, expert_model_parallel_size=1)
    assert [(row.role, row.in_elems) for row in _rows(together)] == [("dp_cp", 83_520 + 2 * 393_216)]


def test_forward_only_has_nothing(tiny: Callable[..., Job]) -> None:
    job = _job(tiny, forward_only=True, **BOTH)
    assert _rows(job) == []
    assert _unknown(job) == {}


# -- fp8 parameters (source only) -------------------------------------------------------------------------------------


def _fp8(tiny: Callable[..., Job], **options: Any) -> Job:
    """Two layers without biases: 2 * (4 * 64 * 64 + 2 * 64 * 256) elements of weights, 8 tensors."""
    sizes = {"world_size": 4, "tensor_model_parallel_size": 1, "sequence_parallel": False, "normalization": "RMSNorm"}
    return tiny(**{**sizes, **SHARDED, "fp8": "hybrid", "fp8_param_gather": True, **options})


def test_fp8_parameters_are_gathered_as_bytes(tiny: Callable[..., Job]) -> None:
    weights, rest = 98_304, 8_192 + 5 * 64 + 64
    assert _counts(_fp8(tiny)) == {
        **_gradients("other", (weights, weights // 4), (rest, rest // 4)),
        ("dp_cp", "all_gather", "uint8", weights // 4, weights, "optimizer"): 1,
        **_parameters("optimizer", (rest, rest // 4)),
        ("dp_cp", "all_reduce", "float32", 8, 8, "optimizer"): 1,
    }
    assert _unknown(_fp8(tiny)) == {}


@pytest.mark.parametrize(
    ("options", "what", "has_rules"),
    [
        ({"fp8_recipe": "blockwise"}, "fp8_param_gather: scales of blockwise", True),
        ({"fp8_recipe": "mxfp8"}, "fp8_param_gather with mxfp8", False),
        (
            {"first_last_layers_bf16": True, "fp8_recipe": "tensorwise"},
            "fp8_param_gather with first_last_layers_bf16",
            False,
        ),
    ],
)
def test_fp8_parameters_without_a_rule(
    tiny: Callable[..., Job], options: dict[str, Any], what: str, has_rules: bool
) -> None:
    job = _fp8(tiny, **options)
    assert _unknown(job) == {what: ("dp_cp",)}
    assert bool(_rows(job)) is has_rules


# -- waste -----------------------------------------------------------------------------------------------------------


def _waste(job: Job) -> list[tuple[str, str, str, int]]:
    return [
        (row.op, row.avoidable.code, row.avoidable.setting, row.avoidable.bytes_per_call)
        for row in _rows(job)
        if row.avoidable
    ]


def test_half_of_an_fp32_reduction_is_avoidable(tiny: Callable[..., Job]) -> None:
    # 279,104 parameters, 279,168 with padding, over two ranks.
    assert _waste(_job(tiny)) == [("all_reduce", "fp32_reduction", "--grad-reduce-in-bf16", 279_104 * 2)]
    assert _waste(_job(tiny, **SHARDED)) == [
        ("reduce_scatter", "fp32_reduction", "--grad-reduce-in-bf16", 279_168),
        ("all_gather", "padding", "", 64),
    ]
    assert _waste(_job(tiny, **SHARDED, grad_reduce_in_bf16=True)) == [
        ("reduce_scatter", "padding", "", 64),
        ("all_gather", "padding", "", 64),
    ]
    assert _waste(_job(tiny, bf16=False)) == []


def test_padding_across_instances(tiny: Callable[..., Job]) -> None:
    options = {"num_distributed_optimizer_instances": 2, "grad_reduce_in_bf16": True}
    assert _waste(_job(tiny, world_size=8, **SHARDED, **options)) == [
        ("reduce_scatter", "padding", "", 64 * 2 * 3 // 4),
        ("all_reduce", "padding", "", 64 // 4 * 2),
        ("all_gather", "padding", "", 64 * 2 * 3 // 4),
    ]


# -- closed forms ----------------------------------------------------------------------------------------------------


def _off_rank(rows: Iterable[ExpectedCall], role: str, op: str) -> Fraction:
    return sum((row.off_rank_bytes * row.calls for row in rows if (row.role, row.op) == (role, op)), Fraction(0))


# The seed's model with experts in every fourth layer: TP4 PP4 CP2 EP8 on 1024 ranks, so DP*CP 64 and EDP 8.
SEED: dict[str, Any] = {
    "world_size": 1024,
    "pipeline_model_parallel_size": 4,
    "context_parallel_size": 2,
    "expert_model_parallel_size": 8,
    "num_experts": 64,
    "moe_ffn_hidden_size": 32768,
    "moe_layer_freq": tuple(int(layer % 4 == 3) for layer in range(80)),
    "num_microbatches": 8,
    "use_distributed_optimizer": True,
}


def test_the_seeds_numbers(document_job: Callable[..., Job]) -> None:
    """Reference 4.2: dense reduce-scatter 17.4 GB (fp32) and all-gather 8.7 GB over 64, experts' 32.2 and 16.1 over 8."""
    job = document_job(**SEED)
    middle = _rows(job, 256)
    assert {(row.role, row.group_size) for row in middle} == {("dp_cp", 64), ("edp", 8)}
    payloads = {(row.role, row.op): row.payload_bytes for row in middle}
    assert payloads == {
        ("dp_cp", "reduce_scatter"): 17_460_101_120,
        ("dp_cp", "all_gather"): 8_730_050_560,
        ("edp", "reduce_scatter"): 32_212_254_720,
        ("edp", "all_gather"): 16_106_127_360,
    }
    assert {row.op: row.calls for row in middle if row.rule.endswith("again")} == {"all_gather": 1}
    assert len([row for row in middle if row.rule.endswith("again")]) == 2
    once = _rows(replace(job, overlap_param_gather=True, overlap_grad_reduce=True, framework="megatron-lm"), 256)
    assert _off_rank(middle, "edp", "all_gather") == 2 * _off_rank(once, "edp", "all_gather")


@pytest.mark.parametrize("sharded", [True, False])
def test_closed_forms(document_job: Callable[..., Job], sharded: bool) -> None:
    """Reference 2.11: (g + p) * P * (n-1)/n with the distributed optimizer, 2g * P * (n-1)/n without."""
    job = document_job(world_size=64, use_distributed_optimizer=sharded)
    (size, *_) = [row.in_elems for row in _rows(job) if row.component == "gradients"]
    total = sum(row.off_rank_bytes * row.calls for row in _rows(job))
    assert total == (4 + 2 if sharded else 2 * 4) * size * Fraction(15, 16)


# -- without a rule --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"extra": {"fp4_param_gather": True}}, "fp4_param_gather"),
        ({"optimizer": "muon"}, "optimizer muon"),
        ({"megatron_core_version": "0.8.0", **SHARDED}, "use_distributed_optimizer in megatron-core <=0.8"),
        ({"megatron_core_version": "0.8.0", "overlap_grad_reduce": True}, "overlap_grad_reduce in megatron-core <=0.8"),
        ({"padded_vocab_size": None}, "padded_vocab_size is unknown"),
        ({"extra": {"hybrid_override_pattern": "M*"}}, "hybrid_override_pattern"),
    ],
)
def test_options_without_a_rule(tiny: Callable[..., Job], options: dict[str, Any], what: str) -> None:
    job = _job(tiny, **options)
    assert _rows(job) == []
    assert _unknown(job) == {what: ("dp_cp",)}


def test_older_releases_without_sharding_or_overlap_have_rules(tiny: Callable[..., Job]) -> None:
    job = _job(tiny, megatron_core_version="0.5.0")
    assert [row.in_elems for row in _rows(job)] == [279_104]
    assert _unknown(job) == {}


@pytest.mark.parametrize("loop", ["megatron-core", "something else"])
def test_overlap_in_a_pipeline_of_an_unknown_loop(tiny: Callable[..., Job], loop: str) -> None:
    """Who starts the reductions is the loop's, and which chunks have buckets; on the first stage of 1F1B nothing is open."""
    what = "overlap_grad_reduce: training loop unknown"

    def entries(job: Job, rank: int) -> list[NotModelled]:
        return [entry for entry in expect.expected(job, rank).not_modelled if entry.what.startswith(what)]

    job = _job(tiny, **{**STAGES, "framework": loop}, **BOTH)
    assert _counts(job, 0) == {**_gradients("backward", *FIRST_STAGE), **_parameters("forward", *FIRST_STAGE)}
    assert entries(job, 0) == []
    # Behind it sizes are certain, the phase of the reductions is not; gathers are.
    assert _counts(job, 2) == {**_gradients("backward", *LAST_STAGE), **_parameters("forward", *LAST_STAGE)}
    reductions = ("all_reduce", "reduce_scatter", "all_to_all")
    assert entries(job, 2) == [NotModelled(what, ("dp_cp",), ("backward", "other"), reductions)]
    interleaved = _job(tiny, **{**CHUNKS, "framework": loop}, **BOTH)
    assert _rows(interleaved, 0) == []
    assert entries(interleaved, 0) == [NotModelled(f"{what}: buckets", ("dp_cp",))]
    assert len(_rows(interleaved, 2)) == 6


@pytest.mark.parametrize(("aligned", "phase"), [(True, "other"), (False, "backward")])
def test_overlap_in_a_pipeline_of_a_loop_that_says_who_starts(
    tiny: Callable[..., Job], aligned: bool, phase: str
) -> None:
    """schedules.py: behind the first stage grad_sync_func, if there is one, starts them after the last backward."""
    told = {"framework": "megatron-core", "align_grad_reduce": aligned, "given": frozenset({"align_grad_reduce"})}
    job = _job(tiny, **{**STAGES, **told}, **BOTH)
    assert _counts(job, 2) == {**_gradients(phase, *LAST_STAGE), **_parameters("forward", *LAST_STAGE)}
    assert _unknown(job, 2) == {}
    # which chunks of an interleaved pipeline have buckets, that does not say
    interleaved = _job(tiny, **{**CHUNKS, **told}, **BOTH)
    assert _unknown(interleaved, 0) == {"overlap_grad_reduce: training loop unknown: buckets": ("dp_cp",)}


def test_reach_of_what_has_no_rule(tiny: Callable[..., Job]) -> None:
    options = {**SHARDED, "extra": {"fp4_param_gather": True}, "world_size": 8}
    assert _unknown(_job(tiny, **options, **EXPERTS)) == {"fp4_param_gather": ("dp_cp", "edp")}
    instances = {"num_distributed_optimizer_instances": 2}
    dense = ("dp_cp", "intra_dp_cp", "inter_dist_opt")
    assert _unknown(_job(tiny, **options, **instances)) == {"fp4_param_gather": dense}
    both = ("dp_cp", "edp", "intra_dp_cp", "intra_edp", "inter_dist_opt")
    assert _unknown(_job(tiny, **options, **instances, **EXPERTS)) == {"fp4_param_gather": both}


def test_experts_of_older_releases(tiny: Callable[..., Job]) -> None:
    job = _job(tiny, world_size=8, **EXPERTS, megatron_core_version="0.9.0")
    assert [row.role for row in _rows(job)] == ["dp_cp"]
    assert _unknown(job) == {"experts in megatron-core <=0.9": ("edp",)}


def test_experts_with_their_own_tensor_parallelism_are_apart_since_0_19(tiny: Callable[..., Job]) -> None:
    """megatron-core 0.18 and 0.19 on a fake process group: TP2, ETP1, EP1, four ranks. Without a rule since 0.19."""
    sizes = {"world_size": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    options = {**sizes, **SHARDED, "num_experts": 4, "expert_tensor_parallel_size": 1}
    job = _job(tiny, **options, megatron_core_version="0.18.0")
    assert [(row.op, row.role, row.in_elems) for row in _rows(job)] == [
        ("reduce_scatter", "dp_cp", 829_056),
        ("all_gather", "dp_cp", 414_528),
    ]
    newer = replace(job, megatron_core_version="0.19.0")
    assert _rows(newer) == []
    assert _unknown(newer)["experts with their own tensor parallelism in megatron-core >=0.19"] == ("dp_cp", "edp")
    same = replace(newer, expert_tensor_parallel_size=2)
    assert [row.role for row in _rows(same)] == ["dp_cp", "dp_cp"]


@pytest.mark.parametrize(
    "options", [{"use_megatron_fsdp": True}, {"use_torch_fsdp2": True}, {"extra": {"use_custom_fsdp": True}}]
)
def test_sharded_parameters_are_another_chapters(tiny: Callable[..., Job], options: dict[str, Any]) -> None:
    assert _rows(_job(tiny, untie_embeddings_and_output_weights=True, **options)) == []
