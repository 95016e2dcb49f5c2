"""Roles of calls whose group is not named, and pipeline messages on the default group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from traceanalyzer.attribute import attach
from traceanalyzer.job import Job
from traceanalyzer.run import Run

OpenRun = Callable[[Mapping[str, Sequence[Mapping[str, Any]]]], Run]

DESCRIPTIONS = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "cp": "CONTEXT_PARALLEL_GROUP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
}


def rows(sizes: Mapping[str, int], *calls: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Rank 0 with groups of these sizes and calls, one after another."""
    return {
        "comm_record": [
            {"rank": 0, "call_id": i, "t_issue_ns": 10 + i, "dtype": "bfloat16", "completeness": "full", **call}
            for i, call in enumerate(calls)
        ],
        "process_group": [
            {"rank": 0, "group_id": str(i), "description": DESCRIPTIONS[role], "ranks": list(range(n)), "group_size": n}
            for i, (role, n) in enumerate(sizes.items(), 1)
        ],
        "rank": [{"rank": 0, "window_start_ns": 0, "window_end_ns": 1000}],
    }


CALLS = ({"op": "send"}, {"op": "recv"}, {"op": "all_to_all"}, {"op": "all_reduce"}, {"op": "send", "group_id": "odd"})
PP = ("pp", "pattern", "PP")
EP = ("ep", "pattern", "EP")
NO = (None, None, None)


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ({"tp": 1, "cp": 1, "pp": 2, "ep": 2}, [PP, PP, EP, NO, NO]),
        ({"tp": 2, "cp": 1, "pp": 2, "ep": 2}, [PP, PP, NO, NO, NO]),  # an older dispatcher uses tensor-parallel groups
        ({"tp": 1, "cp": 2, "pp": 2, "ep": 2}, [NO] * 5),  # attention may send and exchange too
        ({"tp": 1, "pp": 2, "ep": 2}, [NO] * 5),  # whether it is spread is not known
        ({"tp": 1, "cp": 1, "pp": 1, "ep": 1}, [NO] * 5),
    ],
)
def test_operations_of_one_role_alone(
    open_run: OpenRun, sizes: dict[str, int], found: list[tuple[str | None, ...]]
) -> None:
    run = open_run(rows(sizes, *CALLS))
    attach(run, None)
    assert run.tuples("SELECT role, role_evidence, axis FROM comm ORDER BY call_id") == found


def test_the_layout_says_it_too(open_run: OpenRun) -> None:
    run = open_run(rows({}, *CALLS))
    attach(run, Job(world_size=4, pipeline_model_parallel_size=2, num_layers=2))
    assert run.tuples("SELECT role FROM comm ORDER BY call_id") == [("pp",), ("pp",), (None,), (None,), (None,)]


def test_a_gather_that_is_larger_than_the_described_group_is_not_its(open_run: OpenRun) -> None:
    """The expert dispatcher gathers counts with the function of sequence parallelism, on another group of 2."""
    gather = {"op": "all_gather", "in_elems": 4, "call_path": ["_GatherFromSequenceParallelRegion"]}
    run = open_run(rows({"tp": 1}, {**gather, "out_elems": 8}, {**gather, "out_elems": 4}))
    found = attach(run, None)
    assert run.tuples("SELECT role FROM comm ORDER BY call_id") == [(None,), ("tp",)]
    assert found.conflicts == []


def test_messages_on_the_default_group_are_the_pipelines(open_run: OpenRun) -> None:
    """Of two stages Megatron sends one way on the default group: the role stays the group's, the axis is PP."""
    content = rows({"pp": 2}, {"op": "send", "group_id": "1"}, {"op": "recv", "group_id": "0"})
    content["comm_record"].append(
        {"rank": 0, "call_id": 2, "t_issue_ns": 20, "op": "barrier", "group_id": "0", "completeness": "full"}
    )
    content["process_group"].append({"rank": 0, "group_id": "0", "description": "default_pg", "ranks": [0, 1]})
    run = open_run(content)
    attach(run, None)
    assert run.tuples("SELECT role, axis FROM comm ORDER BY call_id") == [
        ("pp", "PP"),
        ("world", "PP"),
        ("world", "other"),
    ]
