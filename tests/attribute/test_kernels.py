"""What host ranges decide about the phase of the work that is launched in them."""

from __future__ import annotations

import pytest

from traceanalyzer.attribute.kernels import BACKWARD, CHECKPOINT, FUNCTION, OPTIMIZER, PLACE, kind_of, segments


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Optimizer.step#Adam.step", OPTIMIZER),
        ("CheckpointFunctionBackward", CHECKPOINT),
        ("autograd::engine::evaluate_function: MulBackward0", BACKWARD),
        ("MulBackward0", BACKWARD),
        ("FSDP::post_backward_reduce", BACKWARD),
        ("LinearWithGradAccumulationAndAsyncCommunication", FUNCTION),
        ("nn.Module: ParallelMLP_0", PLACE),
        ("aten::convolution_backward", None),
        ("aten::mm", None),
        ("cudaLaunchKernel", None),
        ("ProfilerStep#3", None),
        ("ta:microbatch 2", None),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", None),
    ],
)
def test_what_a_range_decides(name: str, kind: int | None) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("ranges", "changes"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param(
            [(10, 50, PLACE), (20, 30, FUNCTION), (60, 70, OPTIMIZER)],
            [(10, "forward"), (50, None), (60, "optimizer"), (70, None)],
            id="modules, then the optimizer",
        ),
        pytest.param(
            [(10, 90, BACKWARD), (10, 80, CHECKPOINT), (20, 40, FUNCTION), (50, 70, BACKWARD)],
            [(10, "recompute"), (50, "backward"), (70, "recompute"), (80, "backward"), (90, None)],
            id="a checkpoint repeats its forward work, then goes backward",
        ),
        pytest.param(
            [(10, 40, BACKWARD), (20, 30, FUNCTION)],
            [(10, "backward"), (20, "recompute"), (30, "backward"), (40, None)],
            id="forward work in the backward pass",
        ),
        pytest.param(
            [(10, 20, PLACE), (20, 30, BACKWARD)], [(10, "forward"), (20, "backward"), (30, None)], id="touching"
        ),
        pytest.param([(10, 20, PLACE), (15, 30, PLACE)], [(10, "forward"), (20, None)], id="badly nested: cut"),
    ],
)
def test_phases_of_a_thread(ranges: list[tuple[int, int, int]], changes: list[tuple[int, str | None]]) -> None:
    assert list(segments(ranges)) == changes
