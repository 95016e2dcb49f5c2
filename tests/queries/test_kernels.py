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
            "evidence": "kernels",
            "first_forward_ns": 120,
            "last_forward_end_ns": 238,
            "first_backward_ns": 320,
            "last_backward_end_ns": 373,
        }
    ]


def host_passes(rows: Any) -> Any:
    """A rank without a device. Number 7 is zero_'s too, but addmm made its node; 20 is recomputed; 21 is never undone."""
    rows.rank(0)
    rows.step(0, 1, 0, 1000)
    backward = "autograd::engine::evaluate_function: "
    for name, start, end, number in (
        ("aten::zero_", 10, 15, 7),
        ("CheckpointFunction", 90, 95, 6),
        ("aten::linear", 100, 150, 7),
        ("aten::addmm", 110, 140, 7),
        ("aten::relu", 160, 170, 8),
        (f"{backward}ReluBackward0", 300, 320, 8),
        (f"{backward}AddmmBackward0", 320, 330, 7),
        (f"{backward}CheckpointFunctionBackward", 340, 400, 6),
        ("aten::mul", 350, 355, 20),
        (f"{backward}MulBackward0", 360, 370, 20),
        ("aten::add", 500, 510, 21),
    ):
        rows.add(
            "cpu_op",
            rank=0,
            name=name,
            category="cpu_op",
            start_ns=start,
            dur_ns=end - start,
            tid=1,
            sequence_nr=number,
        )
    return rows


def test_pass_bounds_without_a_device(open_run: OpenRun, new_rows: NewRows) -> None:
    names = ("step", "evidence", "first_forward_ns", "last_forward_end_ns", "first_backward_ns", "last_backward_end_ns")
    by_operators = open_run(host_passes(new_rows())).query("pass_bounds").rows()
    assert [tuple(r[n] for n in names) for r in by_operators] == [(1, "operators", 90, 170, 300, 400)]
    rows = host_passes(new_rows())
    for name, start, end in (("ta:forward", 80, 190), ("ta:backward", 290, 410), ("ta:forward", 420, 430)):
        rows.add("span", rank=0, name=name, category="user_annotation", start_ns=start, dur_ns=end - start)
    by_marks = open_run(rows).query("pass_bounds").rows()
    assert [tuple(r[n] for n in names) for r in by_marks] == [(1, "marks", 80, 430, 290, 410)]
    rows = host_passes(new_rows())
    rows.kernel(0, "gemm", 115, 130, 112)  # in the forward operator: the rank has a device
    by_kernels = open_run(rows).query("pass_bounds").rows()
    assert [tuple(r[n] for n in names) for r in by_kernels] == [(1, "kernels", 115, 130, None, None)]


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


def test_attribution_coverage(open_run: OpenRun, new_rows: NewRows) -> None:
    """Nine computations of 33 ns, one copy of 10: eight launches known (24 ns), 24 of compute in the one step."""
    found = open_run(a_step(new_rows())).query("attribution_coverage").rows()
    assert [tuple(r[k] for k in ("work", "fact", "evidence", "kernels", "dur_ns", "share")) for r in found] == [
        ("compute", "component", None, 9, 33, 1.0),
        ("compute", "layer", None, 9, 33, 1.0),
        ("compute", "microbatch", None, 9, 33, 1.0),
        ("compute", "phase", "call_path", 6, 18, 18 / 33),
        ("compute", "phase", "no_path", 2, 6, 6 / 33),
        ("compute", "phase", None, 1, 9, 9 / 33),
        ("compute", "served_axis", None, 9, 33, 1.0),
        ("compute", "step", "profiler_step", 9, 33, 1.0),
        ("copy", "component", None, 1, 10, 1.0),
        ("copy", "layer", None, 1, 10, 1.0),
        ("copy", "microbatch", None, 1, 10, 1.0),
        ("copy", "phase", "no_path", 1, 10, 1.0),
        ("copy", "step", None, 1, 10, 1.0),
    ]


def test_the_role_of_communication_is_counted(open_run: OpenRun, new_rows: NewRows) -> None:
    rows = new_rows()
    rows.rank(0)
    rows.step(0, 1, 0, 100)
    rows.call(0, "tp", "all_reduce", 20, 30, 10)
    rows.kernel(0, "comm", 40, 70)
    found = open_run(rows).query("attribution_coverage").rows()
    assert [(r["evidence"], r["kernels"], r["dur_ns"], r["share"]) for r in found if r["fact"] == "role"] == [
        ("call", 1, 10, 0.25),
        (None, 1, 30, 0.75),
    ]
    assert {r["work"] for r in found} == {"communication"}


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
