"""When a step's first activity starts, and how late a rank comes to its first call of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from traceanalyzer.run import Run


def test_head_and_first_call(open_run: Callable[..., Run], new_rows: Callable[[], Any]) -> None:
    """Rank 1 begins its step at 110 and comes 60 later than rank 0 to the first all-reduce, and with it to the second."""
    rows = new_rows()
    for rank, start in ((0, 100), (1, 110)):
        rows.rank(rank)
        rows.step(rank, 4, start, 900)
    rows.kernel(0, "gemm", 120, 130, launch=115)
    rows.kernel(1, "copy", 180, 185, launch=175)
    rows.call(0, "tp", "all_reduce", 140, 230, 120, ranks=[0, 1], seq=1)
    rows.call(1, "tp", "all_reduce", 200, 230, 190, ranks=[0, 1], seq=1)
    rows.call(0, "tp", "all_reduce", 300, 330, 240, ranks=[0, 1], seq=2)
    rows.call(1, "tp", "all_reduce", 300, 330, 240, ranks=[0, 1], seq=2)
    assert open_run(rows).query("step_head").rows() == [
        {
            "rank": 0, "device": 0, "step": 4, "start_ns": 100, "first_activity_ns": 120, "head_ns": 20,
            "first_op": "all_reduce", "first_role": "tp", "first_late_ns": 0,
        },
        {
            "rank": 1, "device": 0, "step": 4, "start_ns": 110, "first_activity_ns": 180, "head_ns": 70,
            "first_op": "all_reduce", "first_role": "tp", "first_late_ns": 60,
        },
    ]  # fmt: skip


def test_a_rank_alone_comes_late_to_nobody(open_run: Callable[..., Run], new_rows: Callable[[], Any]) -> None:
    rows = new_rows()
    rows.rank(0)
    rows.step(0, 1, 100, 900)
    rows.kernel(0, "gemm", 150, 160)
    (row,) = open_run(rows).query("step_head").rows()
    assert (row["head_ns"], row["first_op"], row["first_late_ns"]) == (50, None, None)
