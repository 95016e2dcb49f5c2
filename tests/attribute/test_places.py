"""Phase, role, component and micro-batch from the ranges around a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from traceanalyzer.attribute.places import Place, class_of_component, of_paths, phases_seen, place_of
from traceanalyzer.job import Job
from traceanalyzer.run import Run

ROW = "_ReduceFromModelParallelRegion"
LINEAR = "LinearWithGradAccumulationAndAsyncCommunication"
ENGINE = "autograd::engine::evaluate_function: "
CHECKPOINT = ["CheckpointFunctionBackward", f"{ENGINE}CheckpointFunctionBackward"]
STEP = ["ta:step 3", "ProfilerStep#3"]


@pytest.mark.parametrize(
    ("path", "phase", "evidence", "role"),
    [
        pytest.param(None, "other", "no_path", None, id="nothing encloses it"),
        pytest.param([], "other", "no_path", None, id="empty"),
        pytest.param(["[param|model.weight]", *STEP], "other", "no_path", None, id="marks only"),
        pytest.param(["enumerate(DataLoader)#_Single.__next__"], "other", "no_path", None, id="data loader"),
        pytest.param(["DistributedDataParallel.forward"], "other", "no_path", None, id="ddp range"),
        pytest.param([ROW, *STEP], "forward", "call_path", "tp", id="forward"),
        pytest.param(["nn.Module: GPTModel_0"], "forward", "call_path", None, id="module"),
        pytest.param([ROW, "CheckpointFunction"], "forward", "call_path", "tp", id="inside a checkpoint's forward"),
        pytest.param([f"{LINEAR}Backward", f"{ENGINE}{LINEAR}Backward"], "backward", "call_path", "tp", id="backward"),
        pytest.param(["AllToAllBackward0"], "backward", "call_path", None, id="a node of torch"),
        pytest.param(["SumBackward1"], "backward", "call_path", None, id="an overload of a node"),
        pytest.param([f"{ENGINE}torch::autograd::AccumulateGrad"], "backward", "call_path", None, id="gradient hook"),
        pytest.param([ROW, *CHECKPOINT], "recompute", "call_path", "tp", id="recompute"),
        pytest.param([LINEAR, "_CheckpointFunctionBackward"], "recompute", "call_path", "tp", id="its TE spelling"),
        pytest.param(
            [f"{LINEAR}Backward", f"{ENGINE}{LINEAR}Backward", *CHECKPOINT],
            "backward",
            "call_path",
            "tp",
            id="backward nested in a checkpoint",
        ),
        pytest.param(
            [ROW, f"{ENGINE}MulBackward0"],
            "recompute",
            "call_path",
            "tp",
            id="checkpoint without a function of its own",
        ),
        pytest.param(
            ["FSDP::post_backward_reduce", "FSDP::root_post_backward_callback"],
            "backward",
            "call_path",
            None,
            id="behind the engine's last function",
        ),
        pytest.param(
            ["FSDP::all_gather (embedding)", "FSDP::pre_forward (embedding)"], "forward", "call_path", None, id="fsdp2"
        ),
        pytest.param(["Optimizer.step#Adam.step", *STEP], "optimizer", "call_path", None, id="optimizer"),
        pytest.param(["foo", "Optimizer.step#Adam.step"], "optimizer", "call_path", None, id="in the optimizer"),
    ],
)
def test_phase_and_role(path: list[str] | None, phase: str, evidence: str, role: str | None) -> None:
    found = place_of(path, None, None)
    assert (found.phase, found.phase_evidence, found.role) == (phase, evidence, role)


@pytest.mark.parametrize("name", ["Backwards", "optimizer_step", "Backward_hook"])
def test_near_misses_are_no_phase_of_their_own(name: str) -> None:
    assert place_of([name], None, None) == Place("forward", "call_path")


@pytest.mark.parametrize(
    ("function", "dims", "dense", "experts"),
    [
        ("_GatherFromSequenceParallelRegion", "[[4,2,8]]", "tp", None),
        ("_ReduceScatterToSequenceParallelRegion", "[[16,2,8]]", "tp", None),
        ("_ReduceFromModelParallelRegion", "[[16]]", "tp", None),  # the router's token counts
        ("_ReduceFromModelParallelRegion", "[[16,2,8]]", "tp", "tp"),
        (LINEAR, "[[16,2,8]]", "tp", "tp"),
        ("_AllToAll", "[[16,2,8]]", None, None),
    ],
)
def test_functions_that_experts_use_too(
    job: Callable[..., Job], function: str, dims: str, dense: str | None, experts: str | None
) -> None:
    """With CP 2 a rank has 16 of 32 tokens of a sequence."""
    moe = job(num_experts=8, expert_model_parallel_size=2, num_layers=2, sequence_parallel=True)
    assert place_of([function], dims, job()).role == dense
    assert place_of([function], dims, moe).role == experts
    assert place_of([f"{function}Backward"], dims, moe).role == experts


def test_saved_activations_are_gathered_by_the_checkpoint_itself(job: Callable[..., Job]) -> None:
    spread = job(distribute_saved_activations=True)
    assert place_of(CHECKPOINT, None, spread).phase == "backward"
    assert place_of(CHECKPOINT, None, job()).phase == "recompute"
    assert place_of([ROW, *CHECKPOINT], None, spread).phase == "recompute"


@pytest.mark.parametrize(
    ("path", "dims", "component", "evidence"),
    [
        ([ROW], "[[2,16,8],[]]", "embedding", "call_path and shape"),
        ([ROW], "[[[16,2,8]],[],[]]", "layers", "call_path and shape"),
        ([ROW, *CHECKPOINT], "[[16,2,8]]", "layers", "call_path and shape"),
        ([ROW], "[[3,16,8]]", None, None),
        ([ROW], "[[16,2]]", None, None),
        ([ROW], "not JSON", None, None),
        ([ROW], None, None, None),
        ([f"{ROW}Backward"], "[[16,2,8]]", None, None),
        (["_VocabParallelCrossEntropy"], "[[16,2]]", "loss", "call_path"),
        ([LINEAR], "[[16,2,8]]", None, None),
    ],
)
def test_component(
    job: Callable[..., Job], path: list[str], dims: str | None, component: str | None, evidence: str | None
) -> None:
    found = place_of(path, dims, job())
    assert (found.component, found.component_evidence) == (component, evidence)
    assert found.phase_evidence == "call_path"


def test_equal_lengths_tell_no_component(job: Callable[..., Job]) -> None:
    assert place_of([ROW], "[[16,16,8]]", job(micro_batch_size=16)).component is None


def test_microbatch_is_the_innermost_mark() -> None:
    assert place_of([ROW, "ta:microbatch 3", "ta:microbatch 1"], None, None).microbatch == 3
    assert place_of([ROW, "ta:microbatch x", "ta:microbatching 1"], None, None).microbatch is None


@pytest.mark.parametrize(
    ("component", "name"),
    [
        ("embedding", "embedding"),
        ("loss: max", "loss"),
        ("attention.proj", "layers"),
        ("mlp.fc2", "layers"),
        ("shared expert.fc2", None),
        ("norm gradients", None),
    ],
)
def test_class_of_component(component: str, name: str | None) -> None:
    assert class_of_component(component) == name


def test_every_path_of_a_run_once(open_run: Callable[..., Run]) -> None:
    calls = [
        {"rank": 0, "call_id": 0, "call_path": [ROW, "ta:microbatch 1"], "in_dims": "[[16,2,8]]"},
        {"rank": 1, "call_id": 0, "call_path": [ROW, "ta:microbatch 1"], "in_dims": "[[16,2,8]]"},
        {"rank": 1, "call_id": 1},
    ]
    table = of_paths(open_run({"comm_record": calls}), None)
    assert sorted(table.to_pylist(), key=lambda row: row["call_path"] is None) == [
        {
            "call_path": [ROW, "ta:microbatch 1"],
            "in_dims": "[[16,2,8]]",
            "path_phase": "forward",
            "path_role": "tp",
            "path_component": None,
            "path_microbatch": 1,
            "path_layer": None,
            "path_phase_evidence": "call_path",
            "path_component_evidence": None,
        },
        {
            "call_path": None,
            "in_dims": None,
            "path_phase": "other",
            "path_role": None,
            "path_component": None,
            "path_microbatch": None,
            "path_layer": None,
            "path_phase_evidence": "no_path",
            "path_component_evidence": None,
        },
    ]


@pytest.mark.parametrize(
    ("rows", "seen"),
    [
        ({}, {"backward": None, "optimizer": None}),
        (
            {"cpu_op": [{"name": "aten::mm", "category": "cuda_runtime"}]},
            {"backward": None, "optimizer": None},
        ),
        ({"cpu_op": [{"name": "aten::mm", "category": "cpu_op"}]}, {"backward": False, "optimizer": False}),
        (
            {"cpu_op": [{"name": "aten::mm"}, {"name": f"{ENGINE}MmBackward0"}, {"name": "Optimizer.step#SGD.step"}]},
            {"backward": True, "optimizer": True},
        ),
        (
            {"cpu_op": [{"name": "aten::mm"}], "span": [{"name": "Optimizer.step#SGD.step"}]},
            {"backward": False, "optimizer": True},
        ),
        (
            {"cpu_op": [{"name": "aten::mm"}], "comm_record": [{"call_id": 0, "recorded_phase": "backward"}]},
            {"backward": True, "optimizer": False},
        ),
    ],
)
def test_phases_that_a_recording_holds(
    open_run: Callable[..., Run], rows: dict[str, Any], seen: dict[str, bool | None]
) -> None:
    assert phases_seen(open_run({"rank": [{"rank": 0}], **rows})) == seen
