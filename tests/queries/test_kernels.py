"""Kernels by class and phase, by name, and the bounds of the passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.importers import import_traces
from traceanalyzer.run import Run

OpenRun = Callable[..., Run]
NewRows = Callable[[], Any]


def a_step(rows: Any, rank: int = 0) -> Any:
    """Forward on thread 1, backward with a checkpoint on thread 2, an optimizer; each kernel is launched 10 ns before."""
    rows.rank(rank)
    rows.step(rank, 4, 0, 1000)
    rows.range(rank, "nn.Module: GPTModel_0", 100, 200, 1)
    rows.add(
        "cpu_op", rank=rank, name="aten::mul", category="cpu_op", start_ns=220, dur_ns=10, tid=1, sequence_nr=5
    )  # fmt: skip
    rows.range(rank, "autograd::engine::evaluate_function: CheckpointFunctionBackward", 300, 400, 2)
    rows.range(rank, "CheckpointFunctionBackward", 300, 400, 2)
    rows.range(rank, "autograd::engine::evaluate_function: AddmmBackward0", 350, 400, 2)
    rows.range(rank, "Optimizer.step#Adam.step", 500, 600, 1)
    for what, launch, tid in (
        ("gemm", 110, 1),
        ("gemm", 190, 1),
        ("elementwise", 225, 1),  # in an operator that autograd recorded
        ("elementwise", 250, 1),  # outside of everything
        ("gemm", 310, 2),
        ("gemm", 360, 2),
        ("gemm", 110, 2),  # another thread, which does nothing yet
        ("optimizer", 510, 1),
    ):
        rows.kernel(rank, what, launch + 10, launch + 13, launch, tid)
    rows.kernel(rank, "gemm", 700, 709)
    rows.kernel(rank, "copy", 1010, 1020, 1005)
    return rows


def test_kernel_classes(open_run: OpenRun, new_rows: NewRows) -> None:
    found = open_run(a_step(new_rows())).query("kernel_classes").rows()
    assert [
        (r["rank"], r["device"], r["step"], r["kernel_class"], r["phase"], r["kernels"], r["dur_ns"]) for r in found
    ] == [
        (0, 0, 4, "elementwise", "forward", 1, 3),
        (0, 0, 4, "elementwise", "other", 1, 3),
        (0, 0, 4, "gemm", "backward", 1, 3),
        (0, 0, 4, "gemm", "forward", 2, 6),
        (0, 0, 4, "gemm", "other", 1, 3),
        (0, 0, 4, "gemm", "recompute", 1, 3),
        (0, 0, 4, "gemm", None, 1, 9),
        (0, 0, 4, "optimizer", "optimizer", 1, 3),
        (0, 0, None, "copy", "other", 1, 10),
    ]


def test_a_communication_kernel_has_the_phase_of_its_call(open_run: OpenRun, new_rows: NewRows) -> None:
    rows = new_rows()
    rows.rank(0)
    rows.step(0, 1, 0, 100)
    rows.call(0, "tp", "all_reduce", 20, 30, 10, recorded_phase="backward")
    found = open_run(rows).query("kernel_classes").rows()
    assert [(r["kernel_class"], r["phase"]) for r in found] == [("comm", "backward")]


def test_pass_bounds(open_run: OpenRun, new_rows: NewRows) -> None:
    assert open_run(a_step(new_rows())).query("pass_bounds").rows() == [
        {
            "rank": 0,
            "step": 4,
            "first_forward_ns": 120,
            "last_forward_end_ns": 238,
            "first_backward_ns": 320,
            "last_backward_end_ns": 373,
        }
    ]


def test_top_kernels(open_run: OpenRun, new_rows: NewRows) -> None:
    rows = new_rows()
    rows.rank(0)
    for name, dur in (("b", 30), ("a", 20), ("a", 40), ("c", 10), ("d", 30), ("e", None)):
        rows.add("kernel", rank=0, name=name, kernel_class="gemm", device=0, start_ns=0, dur_ns=dur)
    run = open_run(rows)

    def row(place: int, name: str, kernels: int, dur: int | None, longest: int | None) -> dict[str, Any]:
        return {
            "rank": 0,
            "place": place,
            "name": name,
            "kernel_class": "gemm",
            "kernels": kernels,
            "dur_ns": dur,
            "longest_ns": longest,
            "share": None if dur is None else dur / 130,
        }

    every = [row(1, "a", 2, 60, 40), row(2, "b", 1, 30, 30), row(3, "d", 1, 30, 30), row(4, "c", 1, 10, 10)]
    assert run.query("top_kernels").rows() == [*every, row(5, "e", 1, None, None)]
    assert run.query("top_kernels", top=2).rows() == every[:2]


@pytest.mark.shared
def test_backward_work_of_a_real_trace_is_found(shared: Callable[[str], Path], tmp_path: Path) -> None:
    """DDP on one of two A100: kernels of forward, backward and optimizer in each of three steps; all have a launch."""
    import_traces([shared("traces/hta_nccl_metadata_a100_x2")], tmp_path / "run.parquet")
    with Run.open(tmp_path / "run.parquet") as run:
        found = run.query("kernel_classes").rows()
        bounds = run.query("pass_bounds").rows()
    for step in (4, 5, 6):
        phases = {r["phase"] for r in found if r["step"] == step}
        assert phases >= {"forward", "backward", "optimizer"}, step
    for b in bounds:
        assert b["first_forward_ns"] < b["last_forward_end_ns"] <= b["first_backward_ns"] < b["last_backward_end_ns"]
