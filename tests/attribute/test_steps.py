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
            [Step(0, None, 10, END, "window", True)],
            id="two optimizer steps settle nothing",
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
