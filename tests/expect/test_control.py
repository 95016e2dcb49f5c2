"""The scalars of a step against recorded traffic, and by framework and release."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from traceanalyzer import axes, expect
from traceanalyzer.expect.model import ExpectedCall
from traceanalyzer.job import Job

# role, op, type, elements, group size
Scalar = tuple[str, str, str, int, int]


def _scalars(job: Job, rank: int = 0) -> list[ExpectedCall]:
    return [row for row in expect.expected(job, rank).calls if row.rule.startswith("control")]


def _counts(job: Job, rank: int = 0) -> Counter[Scalar]:
    found: Counter[Scalar] = Counter()
    for row in _scalars(job, rank):
        found[row.role, row.op, row.dtype, row.in_elems, row.group_size] += row.calls
    return found


def _table(job: Job, rank: int = 0) -> dict[str, tuple[str, str, int, int]]:
    """Role, type, elements and calls by component."""
    return {row.component: (row.role, row.dtype, row.in_elems, row.calls) for row in _scalars(job, rank)}


def test_recorded_scalars(recording: Any) -> None:
    """Every call of one element that bare megatron-core makes in a step, on every group."""
    for rank in recording.ranks:
        measured: Counter[Scalar] = Counter()
        for row in recording.rows:
            if int(row["rank"]) == rank and row["nelems_in"] == "1" and row["op"] in ("all_reduce", "broadcast"):
                role = axes.role_of_description(row["group_desc"]) or row["group_desc"]
                measured[role, row["op"], row["dtype"], 1, int(row["group_size"])] += int(row["count"])
        assert _counts(recording.job, rank) == measured, f"rank {rank}"


# -- optimizer -------------------------------------------------------------------------------------------------------

EXPERTS: dict[str, Any] = {"world_size": 8, "num_experts": 4, "expert_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("options", "norms"),
    [
        ({}, {("mp", 2): 1}),
        ({"world_size": 8, "pipeline_model_parallel_size": 2}, {("mp", 4): 1}),
        (EXPERTS, {("mp", 2): 1, ("tp_ep_pp", 4): 1}),
        ({**EXPERTS, "expert_model_parallel_size": 1}, {("mp", 2): 1}),
        ({**EXPERTS, "use_distributed_optimizer": True}, {("dist_opt", 8): 1}),
        (
            {**EXPERTS, "use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2},
            {("dist_opt", 4): 1},
        ),
        ({**EXPERTS, "use_distributed_optimizer": True, "megatron_core_version": "0.12.3"}, {("world", 8): 1}),
        ({**EXPERTS, "use_distributed_optimizer": True, "megatron_core_version": "0.11.0"}, {("world", 8): 2}),
        ({"use_torch_fsdp2": True, "world_size": 8}, {("dp_cp", 4): 1, ("mp", 2): 1}),
        ({"extra": {"clip_grad": 0.0}}, {("mp", 2): 1}),
        ({"extra": {"clip_grad": 0.0}, "megatron_core_version": "0.11.0"}, {}),
    ],
)
def test_gradient_norm(tiny: Callable[..., Job], options: dict[str, Any], norms: dict[tuple[str, int], int]) -> None:
    found = [row for row in _scalars(tiny(**options)) if row.component == "gradient norm"]
    assert {(row.role, row.group_size): row.calls for row in found} == norms
    assert {(row.op, row.dtype, row.in_elems, row.phase) for row in found} <= {
        ("all_reduce", "float32", 1, "optimizer")
    }


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, {}),
        ({"bf16": False, "fp16": True}, {"mp": 1}),
        ({"loss_scale": 1024.0}, {"mp": 1}),
        ({**EXPERTS, "bf16": False, "fp16": True}, {"mp": 1, "tp_ep_pp": 1}),
        ({**EXPERTS, "bf16": False, "fp16": True, "use_distributed_optimizer": True}, {"dist_opt": 2}),
    ],
)
def test_overflow_flag(tiny: Callable[..., Job], options: dict[str, Any], flags: dict[str, int]) -> None:
    found = [row for row in _scalars(tiny(**options)) if row.component == "overflow flag"]
    assert {row.role: row.calls for row in found} == flags


@pytest.mark.parametrize(
    ("options", "zeros"),
    [
        ({}, {}),
        ({"log_num_zeros_in_grad": True}, {"mp": 1}),
        ({**EXPERTS, "log_num_zeros_in_grad": True}, {"mp": 1, "tp_ep_pp": 1}),
        ({**EXPERTS, "use_distributed_optimizer": True, "log_num_zeros_in_grad": True}, {"dist_opt": 1}),
        # megatron-core 0.12.3 on a fake process group: counted in any case where the optimizers share a group.
        ({"megatron_core_version": "0.12.3"}, {"mp": 1}),
        ({**EXPERTS, "megatron_core_version": "0.12.3"}, {}),
        ({**EXPERTS, "use_distributed_optimizer": True, "megatron_core_version": "0.12.3"}, {"world": 1}),
        ({"megatron_core_version": "0.13.1"}, {}),
        ({"megatron_core_version": "0.11.0"}, {}),
        (
            {
                **EXPERTS,
                "use_distributed_optimizer": True,
                "log_num_zeros_in_grad": True,
                "megatron_core_version": "0.11.0",
            },
            {"world": 2},
        ),
    ],
)
def test_zero_count(tiny: Callable[..., Job], options: dict[str, Any], zeros: dict[str, int]) -> None:
    found = [row for row in _scalars(tiny(**options)) if row.component == "zero count"]
    assert {row.role: row.calls for row in found} == zeros
    assert {(row.op, row.dtype, row.in_elems, row.phase) for row in found} <= {
        ("all_reduce", "float32", 1, "optimizer")
    }


def test_one_optimizer_more_with_the_first_chunk_apart(tiny: Callable[..., Job]) -> None:
    """megatron-core 0.16.1 on a fake process group, PP2 VPP2: three optimizers share one norm; each has a flag."""
    job = tiny(
        world_size=8,
        num_layers=4,
        num_microbatches=4,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        overlap_param_gather_with_optimizer_step=True,
        loss_scale=1024.0,
    )
    assert _table(job) == {
        "overflow flag": ("dist_opt", "float32", 1, 2),
        "gradient norm": ("dist_opt", "float32", 1, 1),
    }


def test_norm_groups_are_looked_for_once_since_0_19(tiny: Callable[..., Job]) -> None:
    """Real processes, megatron-core 0.19, EP2 with the distributed optimizer: a flag of each optimizer in the first step."""

    def groups(**options: Any) -> dict[str, tuple[str, int, str]]:
        job = tiny(**{**EXPERTS, "megatron_core_version": "0.19.0", **options})
        rows = expect.expected(job, 0, first_step=True).calls
        return {row.role: (row.dtype, row.calls, row.phase) for row in rows if row.component == "gradient norm groups"}

    assert groups(use_distributed_optimizer=True) == {"dist_opt": ("int32", 2, "optimizer")}
    assert groups() == {"mp": ("int32", 1, "optimizer"), "tp_ep_pp": ("int32", 1, "optimizer")}
    assert groups(clip_grad=0.0) == {}
    assert groups(megatron_core_version="0.18.0") == {}
    later = expect.expected(tiny(megatron_core_version="0.19.0"), 0).calls
    assert "gradient norm groups" not in {row.component for row in later}


# -- Megatron-LM's training loop -------------------------------------------------------------------------------------


def _loop(tiny: Callable[..., Job], version: str, **options: Any) -> Job:
    """TP2 PP2 CP2 DP2, four micro-batches, run by Megatron-LM."""
    return tiny(
        **{
            "framework": "megatron-lm",
            "megatron_core_version": version,
            "world_size": 16,
            "pipeline_model_parallel_size": 2,
            "context_parallel_size": 2,
            "num_microbatches": 4,
            **options,
        }
    )


LAST = 8  # first rank of the last stage


def test_loop_of_the_newest_releases(tiny: Callable[..., Job]) -> None:
    assert _table(_loop(tiny, "0.16.1"), LAST) == {
        "loss average": ("dp_cp", "float32", 2, 1),
        "rerun state": ("world", "int32", 1, 1),
        "gradient norm": ("mp", "float32", 1, 1),
        "success of the step": ("mp", "int32", 1, 1),
        "gradient norm for the log": ("mp", "float32", 1, 1),
        "learning rate for the log": ("mp", "float32", 1, 1),
    }


def test_loop_before_the_rerun_engine_was_on(tiny: Callable[..., Job]) -> None:
    assert "rerun state" not in _table(_loop(tiny, "0.13.0"))
    assert "rerun state" in _table(_loop(tiny, "0.13.0", rerun_mode="validate_results"))
    assert "rerun state" not in _table(_loop(tiny, "0.16.1", rerun_mode="disabled"))


def test_loop_of_0_12(tiny: Callable[..., Job]) -> None:
    assert _table(_loop(tiny, "0.12.0"), LAST) == {
        "loss over the sequence": ("cp", "float32", 2, 4),
        "loss average": ("dp", "float32", 2, 4),
        "gradient norm": ("mp", "float32", 1, 1),
        "zero count": ("mp", "float32", 1, 1),
        "success of the step": ("mp", "int32", 1, 1),
        "gradient norm for the log": ("mp", "float32", 1, 1),
        "learning rate for the log": ("mp", "float32", 1, 1),
    }


def test_loop_of_0_10_and_0_6(tiny: Callable[..., Job]) -> None:
    assert set(_table(_loop(tiny, "0.10.0"), LAST)) == {"loss over the sequence", "loss average", "gradient norm"}
    assert _table(_loop(tiny, "0.6.0"), LAST)["loss average"] == ("dp", "float32", 1, 4)
    assert _table(_loop(tiny, "0.6.0", context_parallel_size=1), LAST) == {
        "loss average": ("dp", "float32", 1, 4),
        "gradient norm": ("mp", "float32", 1, 1),
    }


def test_loss_average_is_on_the_last_stage_only(tiny: Callable[..., Job]) -> None:
    assert "loss average" not in _table(_loop(tiny, "0.16.1"), 0)


@pytest.mark.parametrize(
    ("version", "loss"), [("0.16.1", ("dp_cp", "float32", 2, 1)), ("0.5.0", ("dp", "float32", 1, 4))]
)
def test_forward_only_averages_the_loss_and_nothing_else(
    tiny: Callable[..., Job], version: str, loss: tuple[str, str, int, int]
) -> None:
    job = _loop(tiny, version, forward_only=True, context_parallel_size=1, fp16=True, bf16=False)
    assert _table(job, LAST) == {"loss average": loss}


def test_bare_library_has_no_loop(tiny: Callable[..., Job]) -> None:
    job = _loop(tiny, "0.16.1", framework="megatron-core")
    assert set(_table(job, LAST)) == {"gradient norm"}
    assert not [entry for entry in expect.expected(job, LAST).not_modelled if "training loop" in entry.what]


def test_unknown_framework_leaves_the_loop_unknown(tiny: Callable[..., Job]) -> None:
    job = _loop(tiny, "0.16.1", framework="megatron-something")
    assert set(_table(job, LAST)) == {"gradient norm"}
    (entry,) = [entry for entry in expect.expected(job, LAST).not_modelled if "training loop" in entry.what]
    assert entry.what == "training loop: framework unknown"
    assert {"mp", "dp", "dp_cp"} <= set(entry.roles)
    assert entry.phases == ("other",)  # the optimizer's norm on mp stays known


def test_parameter_norm(tiny: Callable[..., Job]) -> None:
    """Over DP x CP, over TP x PP, and over ETP x EP x PP where those are other ranks."""

    def roles(**options: Any) -> dict[str, tuple[str, int, int, str]]:
        rows = _scalars(_loop(tiny, "0.16.1", log_params_norm=True, **options), LAST)
        found = [row for row in rows if row.component == "parameter norm"]
        return {row.role: (row.dtype, row.in_elems, row.calls, row.phase) for row in found}

    one = ("float32", 1, 1, "other")
    assert roles() == {"dp_cp": one, "mp": one}
    assert roles(num_experts=4, expert_model_parallel_size=2) == {"dp_cp": one, "mp": one, "tp_ep_pp": one}
    assert roles(framework="megatron-core") == {}


def test_zeros_for_the_log(tiny: Callable[..., Job]) -> None:
    table = _table(_loop(tiny, "0.16.1", log_num_zeros_in_grad=True), LAST)
    assert table["zeros for the log"] == table["zero count"] == ("mp", "float32", 1, 1)
    assert "zeros for the log" not in _table(_loop(tiny, "0.16.1"), LAST)


def test_token_count(tiny: Callable[..., Job]) -> None:
    job = _loop(tiny, "0.16.1", framework="megatron-core", calculate_per_token_loss=True)
    counts = {key: number for key, number in _counts(job).items() if key[2] == "int32"}
    assert counts == {("pp", "broadcast", "int32", 1, 2): 1, ("dp_cp", "all_reduce", "int32", 1, 4): 1}


# -- without a rule --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "what", "role"),
    [
        ({"log_params_norm": True, "megatron_core_version": "0.13.0"}, "log_params_norm", "mp"),
        ({"log_params_norm": True, "use_megatron_fsdp": True}, "log_params_norm", "dp_cp"),
        ({"timing_log_level": 1}, "timing_log_level", "world"),
        ({"sft": True}, "sft: loss average", "dp_cp"),
        ({"extra": {"mtp_detach_heads": True}}, "mtp_detach_heads", "mp"),
        ({"extra": {"log_max_attention_logit": True}}, "log_max_attention_logit", "dp_cp"),
        ({"extra": {"optimizer": "dist_muon"}}, "optimizer dist_muon", "mp"),
        ({"extra": {"exit_duration_in_mins": 230}}, "exit_duration_in_mins", "world"),
        ({"extra": {"qk_clip": True}}, "qk_clip", "dp_cp"),
        (
            {"num_experts": 4, "expert_model_parallel_size": 2, "use_megatron_fsdp": True},
            "use_megatron_fsdp with experts",
            "dist_opt",
        ),
        ({}, "interval logging", "world"),
    ],
)
def test_scalars_without_a_rule(tiny: Callable[..., Job], options: dict[str, Any], what: str, role: str) -> None:
    entries = expect.expected(_loop(tiny, "0.16.1", **options), LAST).not_modelled
    assert role in {role for entry in entries if entry.what == what for role in entry.roles}


def test_flags_that_are_off_are_not_named(tiny: Callable[..., Job]) -> None:
    extra = {"exit_duration_in_mins": None, "qk_clip": False, "optimizer": "adam", "log_straggler": "False"}
    job = tiny(extra=extra, timing_log_level=1, barrier_with_L1_time=False)
    assert {entry.what for entry in expect.expected(job, 0).not_modelled} == set()


@pytest.mark.parametrize(("release", "role", "ranks"), [("0.12.3", "dp", 2), ("0.13.1", "dp_cp", 4)])
def test_group_of_the_token_count(tiny: Callable[..., Job], release: str, role: str, ranks: int) -> None:
    """megatron-core 0.11.0, 0.12.3 and 0.13.1: finalize_model_grads takes the data-parallel group without CP up to 0.12."""
    sizes = {"world_size": 4, "tensor_model_parallel_size": 1, "context_parallel_size": 2}
    job = tiny(**sizes, megatron_core_version=release, calculate_per_token_loss=True)
    rows = [row for row in expect.expected(job, 0).calls if row.component == "token count" and row.op == "all_reduce"]
    assert [(row.role, row.group_size, row.dtype, row.calls) for row in rows] == [(role, ranks, "int32", 1)]


@pytest.mark.parametrize(("release", "dtype"), [("0.16.1", "float32"), ("0.17.0", "int64"), ("0.19.0", "int64")])
def test_zeros_are_whole_numbers_since_0_17(tiny: Callable[..., Job], release: str, dtype: str) -> None:
    job = tiny(megatron_core_version=release, log_num_zeros_in_grad=True, framework="megatron-lm")
    rows = {row.component: row.dtype for row in expect.expected(job, 0).calls if "zero" in row.component}
    assert rows == {"zero count": dtype, "zeros for the log": "float32"}
