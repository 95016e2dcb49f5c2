"""Ranges of our hooks in a trace: their number ties a call to the log, wherever the range lies in the call's records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def event(name: str, start: float, dur: float, **args: Any) -> dict[str, Any]:
    """A host record. Times in us."""
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": dur, "args": args}


OURS = {"pg": "5", "desc": "DATA_PARALLEL_GROUP", "ranks": "[0, 1]", "size": 2, "seq": 4, "call": 17}
BACKEND = {"Collective name": "allreduce", "In msg nelems": 8, "Out msg nelems": 8, "dtype": "Float"}


@pytest.mark.parametrize(
    "events",
    [
        [event("ta:all_reduce", 0, 9, **OURS), event("c10d::allreduce_", 1, 7)],
        [event("c10d::allreduce_", 0, 9), event("ta:all_reduce", 1, 7, **OURS)],
        [
            event("_c10d_functional::all_reduce", 0, 20),
            event("c10d::allreduce_", 1, 18),
            event("ta:all_reduce", 2, 7, **OURS),
        ],
        [
            event("c10d::allreduce_", 0, 20),
            event("ta:all_reduce", 1, 18, **OURS),
            event("record_param_comms", 2, 7, **BACKEND),
        ],
        [
            event("_c10d_functional::all_reduce", 0, 30),
            event("c10d::allreduce_", 1, 28),
            event("ta:all_reduce", 2, 20, **OURS),
            event("record_param_comms", 3, 7, **BACKEND),
        ],
    ],
    ids=["method", "dispatcher", "functional", "dispatcher-nccl", "functional-nccl"],
)
def test_the_number_reaches_the_call(import_text: Callable[..., Any], events: list[dict[str, Any]]) -> None:
    (row,) = import_text(events).rows("comm_record")
    assert (row["op"], row["hook_call"], row["call_id"], row["group_id"], row["seq"]) == ("all_reduce", 17, 0, "5", 4)


def test_two_calls_of_one_record_keep_their_own_numbers(import_text: Callable[..., Any]) -> None:
    rows = import_text(
        [
            event("_c10d_functional::all_reduce_coalesced", 0, 30),
            event("c10d::allreduce_", 1, 9),
            event("ta:all_reduce", 2, 7, **OURS),
            event("c10d::allreduce_", 12, 9),
            event("ta:all_reduce", 13, 7, **{**OURS, "seq": 5, "call": 18}),
        ]
    ).rows("comm_record")
    assert [(row["hook_call"], row["seq"]) for row in rows] == [(17, 4), (18, 5)]


def test_a_range_may_carry_the_number_alone(import_text: Callable[..., Any]) -> None:
    (row,) = import_text([event("ta:barrier", 0, 9, call=3), event("c10d::barrier", 1, 7)]).rows("comm_record")
    assert (row["op"], row["hook_call"], row["group_id"]) == ("barrier", 3, None)


def test_ranges_without_a_number_are_as_before(import_text: Callable[..., Any]) -> None:
    without = {key: value for key, value in OURS.items() if key != "call"}
    (row,) = import_text([event("ta:all_reduce", 0, 9, **without)]).rows("comm_record")
    assert (row["hook_call"], row["group_id"]) == (None, "5")
