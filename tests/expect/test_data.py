"""Gradients of plain DistributedDataParallel against recorded traffic, by layout, and what has no rule yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from traceanalyzer import axes, expect
from traceanalyzer.expect.model import ExpectedCall
from traceanalyzer.job import Job

# role, op, type, elements, group size
Key = tuple[str, str, str, int, int]

ROLES = ("dp_cp", "edp")


def _rows(job: Job, rank: int = 0) -> list[ExpectedCall]:
    return [row for row in expect.expected(job, rank).calls if row.rule.startswith("data")]


def _table(job: Job, rank: int = 0) -> list[tuple[str, str, int]]:
    return [(row.role, row.component, row.in_elems) for row in _rows(job, rank)]


def _unknown(job: Job, rank: int = 0) -> dict[str, tuple[str, ...]]:
    """Roles by reason, for entries that touch a data-parallel group."""
    entries = expect.expected(job, rank).not_modelled
    return {entry.what: entry.roles for entry in entries if {"dp", *ROLES} & set(entry.roles)}


def test_recorded_traffic(recording: Any) -> None:
    """Every call of a step on both groups, of every rank; where there is no rule yet, that is said and nothing expected."""
    job = recording.job
    options = ("use_distributed_optimizer", "use_megatron_fsdp", "use_torch_fsdp2", "overlap_grad_reduce")
    without_rule = {name for name in options if getattr(job, name)}
    for rank in recording.ranks:
        if without_rule:
            assert not _rows(job, rank)
            assert without_rule & set(_unknown(job, rank))
            continue
        assert not _unknown(job, rank)
        measured: Counter[Key] = Counter()
        for row in recording.rows:
            role = axes.role_of_description(row["group_desc"])
            if int(row["rank"]) == rank and role in ROLES:
                size = int(row["group_size"])
                measured[role, row["op"], row["dtype"], int(row["nelems_in"]), size] += int(row["count"])
        found: Counter[Key] = Counter()
        for call in expect.expected(job, rank).calls:
            if call.role in ROLES:
                found[call.role, call.op, call.dtype, call.in_elems, call.group_size] += call.calls
        assert found == measured, f"rank {rank}"
        assert {call.phase for call in _rows(job, rank)} == {"other"}


# -- by layout -------------------------------------------------------------------------------------------------------

# H 64, F 256, 4 heads, V 256, 4 layers, swiglu, RMSNorm, no biases, RoPE, tied: 139,840 elements on two ranks.
RECORDED: dict[str, Any] = {
    "num_layers": 4,
    "num_attention_heads": 4,
    "padded_vocab_size": 256,
    "swiglu": True,
    "normalization": "RMSNorm",
    "ffn_hidden_size": 256,
}


def test_group_of_one(tiny: Callable[..., Job]) -> None:
    """A job without data parallelism still makes the call."""
    (row,) = _rows(tiny(**RECORDED))
    assert (row.role, row.op, row.phase, row.dtype) == ("dp_cp", "all_reduce", "other", "float32")
    assert (row.in_elems, row.group_size, row.calls) == (139_840, 1, 1)
    assert row.off_rank_bytes == 0


def test_group_is_data_and_context_parallel(tiny: Callable[..., Job]) -> None:
    (row,) = _rows(tiny(**RECORDED, world_size=12, context_parallel_size=2, seq_length=64))
    assert (row.in_elems, row.group_size) == (139_840, 6)
    assert row.off_rank_bytes * 6 == 139_840 * 4 * 2 * 5  # 2(N-1)/N of the bytes


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"grad_reduce_in_bf16": True}, "bfloat16"),
        ({"bf16": False, "fp16": True}, "float16"),
        ({"bf16": False, "fp16": True, "accumulate_allreduce_grads_in_fp32": True}, "float32"),
        ({"bf16": False}, "float32"),
    ],
)
def test_type_of_the_main_gradients(tiny: Callable[..., Job], options: dict[str, Any], dtype: str) -> None:
    assert [row.dtype for row in _rows(tiny(**options))] == [dtype]


def test_one_buffer_for_each_model_chunk(tiny: Callable[..., Job]) -> None:
    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}
    job = tiny(**RECORDED, **sizes, virtual_pipeline_model_parallel_size=2)
    assert _table(job, 0) == [("dp_cp", "gradients", 82_048), ("dp_cp", "gradients", 65_664)]
    assert _table(job, 1) == [("dp_cp", "gradients", 65_664), ("dp_cp", "gradients", 82_112)]


def test_experts_have_a_buffer_of_their_own_with_expert_parallelism(tiny: Callable[..., Job]) -> None:
    """Four experts a layer of 3 * 64 * 256 elements, two of them on a rank, over EP2 of eight ranks without TP."""
    sizes = {"world_size": 8, "tensor_model_parallel_size": 1, "num_experts": 4}
    apart = tiny(**RECORDED, **sizes, expert_model_parallel_size=2)
    assert _table(apart) == [("dp_cp", "gradients", 83_520), ("edp", "expert gradients", 393_216)]
    assert [row.group_size for row in _rows(apart)] == [8, 4]
    assert _table(tiny(**RECORDED, **sizes)) == [("dp_cp", "gradients", 83_520 + 2 * 393_216)]


def test_forward_only_has_no_gradients(tiny: Callable[..., Job]) -> None:
    assert _rows(tiny(forward_only=True)) == []
    assert _unknown(tiny(forward_only=True, use_distributed_optimizer=True)) == {}


def test_overlap_leaves_one_call_behind_the_first_stage(tiny: Callable[..., Job]) -> None:
    """Megatron-LM aligns it with the pipeline; on the first stage, and elsewhere without that, buckets have no rule."""
    options = {"framework": "megatron-lm", "pipeline_model_parallel_size": 2, "overlap_grad_reduce": True}
    job = tiny(**RECORDED | {"tensor_model_parallel_size": 1}, **options)
    assert _table(job, 1) == [("dp_cp", "gradients", 147_776)]
    assert _unknown(job, 1) == {}
    assert _rows(job, 0) == []
    assert _unknown(job, 0) == {"overlap_grad_reduce": ("dp_cp",)}
    for other in (replace(job, align_grad_reduce=False), replace(job, framework="megatron-core")):
        assert _rows(other, 1) == []
        assert _unknown(other, 1) == {"overlap_grad_reduce": ("dp_cp",)}


# -- without a rule --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"use_distributed_optimizer": True}, "use_distributed_optimizer"),
        ({"use_megatron_fsdp": True}, "use_megatron_fsdp"),
        ({"extra": {"use_custom_fsdp": True}}, "use_custom_fsdp"),
        ({"use_torch_fsdp2": True}, "use_torch_fsdp2"),
        ({"overlap_grad_reduce": True}, "overlap_grad_reduce"),
        ({"fp8": "hybrid", "fp8_param_gather": True}, "fp8_param_gather"),
        ({"multi_latent_attention": True}, "multi_latent_attention"),
        ({"padded_vocab_size": None}, "padded_vocab_size is unknown"),
    ],
)
def test_options_without_a_rule(tiny: Callable[..., Job], options: dict[str, Any], what: str) -> None:
    job = tiny(**options)
    assert _rows(job) == []
    assert _unknown(job) == {what: ("dp_cp",)}


def test_reach_of_what_has_no_rule(tiny: Callable[..., Job]) -> None:
    experts = {"world_size": 8, "num_experts": 4, "expert_model_parallel_size": 2}
    distributed = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
    assert _unknown(tiny(**experts, **distributed)) == {"use_distributed_optimizer": ("dp_cp", "edp")}
    instances = tiny(world_size=8, num_distributed_optimizer_instances=2, **distributed)
    assert _unknown(instances) == {"use_distributed_optimizer": ("dp_cp", "intra_dp_cp", "intra_edp", "inter_dist_opt")}


def test_experts_of_older_releases(tiny: Callable[..., Job]) -> None:
    job = tiny(world_size=8, num_experts=4, expert_model_parallel_size=2, megatron_core_version="0.9.0")
    assert [row.role for row in _rows(job)] == ["dp_cp"]
    assert _unknown(job) == {"experts in megatron-core <=0.9": ("edp",)}


def test_averages_of_the_experts_losses_are_the_training_loops(tiny: Callable[..., Job]) -> None:
    what = "averages of the experts' losses"
    assert _unknown(tiny(num_experts=4, framework="megatron-lm"))[what] == ("dp",)
    assert what not in _unknown(tiny(num_experts=4))
    assert what not in _unknown(tiny(framework="megatron-lm"))


def test_the_documents_rules_have_no_data_parallel_chapter_yet(tiny: Callable[..., Job]) -> None:
    found = expect.expected(tiny(), 0, rules="document")
    assert not [row for row in found.calls if row.role in ROLES]
    assert [entry.what for entry in found.not_modelled] == ["data parallel chapter"]
