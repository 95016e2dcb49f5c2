"""Where steps begin and end, and on what that rests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from traceanalyzer.attribute.steps import Step, as_table, of_ranks
from traceanalyzer.run import Run

END = 2**63 - 1
RANK = {"rank": 0, "window_start_ns": 50, "host_start_ns": 10, "window_end_ns": 900, "import_status": "complete"}


def span(name: str, start: int, dur: int | None, category: str = "user_annotation", rank: int = 0) -> dict[str, Any]:
    """One range."""
    return {"rank": rank, "name": name, "start_ns": start, "dur_ns": dur, "category": category}


@pytest.mark.parametrize(
    ("rows", "steps"),
    [
        pytest.param(
            {
                "span": [
                    span("ProfilerStep#4", 100, 90),
                    span("ProfilerStep#5", 200, 100),
                    span("ProfilerStep#4", 150, 90, "gpu_user_annotation"),
                ]
            },
            [Step(0, 4, 100, 190, "profiler_step", True), Step(0, 5, 200, 300, "profiler_step", True)],
            id="the profiler's, on the host",
        ),
        pytest.param(
            {"cpu_op": [{"rank": 0, "name": "ProfilerStep#7", "start_ns": 1, "dur_ns": 9}]},
            [Step(0, 7, 1, 10, "profiler_step", True)],
            id="recorded as an operator",
        ),
        pytest.param(
            {
                "span": [
                    span("ta:step 1", 100, 50),
                    span("ta:step 2", 150, 50),
                    span("ta:step x", 300, 5),
                    span("ta:step 3", 200, 0),
                ]
            },
            [Step(0, 1, 100, 150, "mark", True), Step(0, 2, 150, 200, "mark", True)],
            id="our marks",
        ),
        pytest.param(
            {"span": [span("ta:step 1", 100, 50), span("ProfilerStep#9", 90, 70)]},
            [Step(0, 9, 90, 160, "profiler_step", True)],
            id="the profiler's before ours",
        ),
        pytest.param(
            {"span": [span("ProfilerStep#1", 100, None)]},
            [Step(0, 1, 100, END, "profiler_step", False)],
            id="a step without an end",
        ),
        pytest.param(
            {"span": [span("Optimizer.step#Adam.step", 700, 50)]},
            [Step(0, None, 10, END, "optimizer", True)],
            id="one optimizer step",
        ),
        pytest.param(
            {
                "span": [
                    span("Optimizer.step#Adam.step", 700, 50),
                    span("Optimizer.step#Adam.step", 710, 50, "gpu_user_annotation"),
                ]
            },
            [Step(0, None, 10, END, "optimizer", True)],
            id="its shadow on the device does not count",
        ),
        pytest.param(
            {"span": [span("Optimizer.step#Adam.step", 300, 50), span("Optimizer.step#Adam.step", 700, 50)]},
            [Step(0, None, 10, END, "optimizer", True)],
            id="two optimizers without backward work between step together",
        ),
        pytest.param({}, [Step(0, None, 10, END, "window", True)], id="nothing"),
        pytest.param(
            {
                "span": [span("ProfilerStep#4", 100, 90)],
                "comm_record": [
                    {"rank": 0, "call_id": 0, "recorded_step": 70, "t_issue_ns": 20},
                    {"rank": 0, "call_id": 1, "recorded_step": 70, "t_issue_ns": 40},
                    {"rank": 0, "call_id": 2, "recorded_step": 71, "t_issue_ns": 60},
                ],
            },
            [Step(0, 70, 20, 41, "recorded", True), Step(0, 71, 60, 61, "recorded", True)],
            id="what a hook recorded comes first",
        ),
    ],
)
def test_steps(open_run: Callable[..., Run], rows: dict[str, Any], steps: list[Step]) -> None:
    assert of_ranks(open_run({"rank": [RANK], **rows})) == steps


def test_the_last_step_of_a_cut_file_is_incomplete(open_run: Callable[..., Run]) -> None:
    cut = {**RANK, "import_status": "partial"}
    marks = [span("ProfilerStep#4", 100, 90), span("ProfilerStep#5", 200, 100)]
    assert [s.complete for s in of_ranks(open_run({"rank": [cut], "span": marks}))] == [True, False]
    assert [s.complete for s in of_ranks(open_run({"rank": [cut]}))] == [False]


def op(name: str, start: int, dur: int = 5, **more: Any) -> dict[str, Any]:
    """One host operator."""
    return {"rank": 0, "name": name, "start_ns": start, "dur_ns": dur, "tid": 1, **more}


ENGINE = "autograd::engine::evaluate_function: AddmmBackward0"
ADAM = "Optimizer.step#Adam.step"


def test_optimizer_steps_divide_a_recording(open_run: Callable[..., Run]) -> None:
    """Three, of which the second has two optimizers; the next step begins with what autograd records, or new data."""
    work = [
        op(ENGINE, 100), op("aten::mm", 205, sequence_nr=4),
        op(ENGINE, 250), op("enumerate(DataLoader)#_X.__next__", 430), op("aten::mm", 440, sequence_nr=5),
        op(ENGINE, 500),
    ]  # fmt: skip
    optimizers = [
        span(ADAM, 150, 50),
        span(ADAM, 300, 50),
        span("Optimizer.step#SGD.step", 360, 40),
        span(ADAM, 600, 50),
    ]
    found = of_ranks(open_run({"rank": [RANK], "cpu_op": work, "span": optimizers}))
    assert found == [
        Step(0, 0, 10, 205, "optimizer", False),
        Step(0, 1, 205, 430, "optimizer", True),
        Step(0, 2, 430, END, "optimizer", False),
    ]


def kernel(what: str, start: int, end: int, name: str | None = None) -> dict[str, Any]:
    """One kernel of this class."""
    return {"rank": 0, "name": name or f"{what}_kernel", "kernel_class": what, "start_ns": start, "dur_ns": end - start}


def optimizer_kernels(*numbers: int) -> list[dict[str, Any]]:
    """Steps of 100 ns: a product, the optimizer's kernels, as many as told, communication and an embedding."""
    rows: list[dict[str, Any]] = []
    for i, number in enumerate(numbers):
        at = 100 * i
        rows += [kernel("embedding", at, at + 5), kernel("gemm", at + 10, at + 20)]
        rows += [kernel("optimizer", at + 30 + 3 * j, at + 32 + 3 * j) for j in range(number)]
        rows.append(kernel("comm", at + 60, at + 70))
    return rows


@pytest.mark.parametrize(
    ("rows", "steps"),
    [
        pytest.param(
            optimizer_kernels(2, 2, 2),
            [(0, 10, 100, False), (1, 100, 200, True), (2, 200, END, False)],
            id="the same kernels after products",
        ),
        pytest.param(optimizer_kernels(2), [(None, 10, END, True)], id="one"),
    ],
)
def test_optimizer_kernels_divide_a_recording_of_device_work(
    open_run: Callable[..., Run], rows: list[dict[str, Any]], steps: list[tuple[Any, ...]]
) -> None:
    found = of_ranks(open_run({"rank": [RANK], "kernel": rows}))
    assert [(s.number, s.start_ns, s.end_ns, s.complete) for s in found] == steps
    assert {s.evidence for s in found} == {"optimizer_kernel"}


def test_other_optimizer_kernels_each_time_settle_nothing(open_run: Callable[..., Run]) -> None:
    run = open_run({"rank": [RANK], "kernel": optimizer_kernels(2, 3)})
    assert of_ranks(run) == [Step(0, None, 10, END, "window", True)]


def test_a_step_of_host_work_is_not_divided_by_kernels(open_run: Callable[..., Run]) -> None:
    run = open_run({"rank": [RANK], "kernel": optimizer_kernels(2, 2), "cpu_op": [op("aten::mm", 5)]})
    assert of_ranks(run) == [Step(0, None, 10, END, "window", True)]


def between_gaps(gap: int, other: str = "b") -> list[dict[str, Any]]:
    """Two kernels at the end of a step, three times a step of a, b, a with gaps of 5, one kernel of another."""
    rows = [kernel("gemm", 0, 10, "b"), kernel("gemm", 15, 20, "a")]
    at = 20
    for i in range(3):
        at += gap
        for name in ("a", other if i == 1 else "b", "a"):
            rows.append(kernel("gemm", at, at + 10, name))
            at += 15
        at -= 5
    return [*rows, kernel("gemm", at + gap, at + gap + 10, "a")]


def test_long_gaps_between_the_same_work_divide_a_recording_but_no_step_is_whole(open_run: Callable[..., Run]) -> None:
    """40 ns of work and gaps of 100: begins at 120, 260, 400, 540."""
    assert of_ranks(open_run({"rank": [RANK], "kernel": between_gaps(100)})) == [
        Step(0, 0, 10, 120, "gap", False),
        Step(0, 1, 120, 260, "gap", False),
        Step(0, 2, 260, 400, "gap", False),
        Step(0, 3, 400, 540, "gap", False),
        Step(0, 4, 540, END, "gap", False),
    ]


@pytest.mark.parametrize(
    "rows", [between_gaps(19), between_gaps(100, "c")], ids=["gaps hardly longer than others", "other work between two"]
)
def test_gaps_without_such_a_period_settle_nothing(open_run: Callable[..., Run], rows: list[dict[str, Any]]) -> None:
    assert of_ranks(open_run({"rank": [RANK], "kernel": rows})) == [Step(0, None, 10, END, "window", True)]


def test_every_rank_has_its_own(open_run: Callable[..., Run]) -> None:
    ranks = [{"rank": None, "window_start_ns": 5}, RANK, {**RANK, "rank": 1}, {"rank": 2}]
    marks = [span("ProfilerStep#4", 100, 90, rank=1)]
    found = of_ranks(open_run({"rank": ranks, "span": marks}))
    assert found == [
        Step(None, None, 5, END, "window", True),
        Step(0, None, 10, END, "window", True),
        Step(1, 4, 100, 190, "profiler_step", True),
    ]
    assert as_table(found).to_pylist() == [
        {
            "rank_key": rank,
            "step": number,
            "step_start_ns": start,
            "step_end_ns": end,
            "step_evidence": evidence,
            "step_complete": True,
        }
        for rank, number, start, end, evidence in [
            (-1, 0, 5, END, "window"),
            (0, 0, 10, END, "window"),
            (1, 4, 100, 190, "profiler_step"),
        ]
    ]
