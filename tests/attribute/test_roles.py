"""Which role a group plays, and where observed groups contradict the declared layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from traceanalyzer.attribute import attach
from traceanalyzer.attribute.roles import (
    GroupConflict,
    Look,
    Signature,
    by_pattern,
    layout_of,
    of_groups,
    same_phase,
    shared_pattern,
)
from traceanalyzer.axes import role_of_description
from traceanalyzer.job import Job
from traceanalyzer.run import Run


def group(name: str, ranks: list[int] | None, description: str | None = None, rank: int = 0) -> dict[str, Any]:
    """One group as one rank knows it."""
    size = None if ranks is None else len(ranks)
    return {"rank": rank, "group_id": name, "description": description, "group_size": size, "ranks": ranks}


TP = "TENSOR_MODEL_PARALLEL_GROUP"


def test_description_then_layout_then_candidates(open_run: Callable[..., Run], job: Callable[..., Job]) -> None:
    groups = [
        group("a", [0, 1, 2, 3], TP),
        group("b", [0, 4], "undefined"),
        group("c", list(range(8))),
        group("d", [0, 1]),
        group("e", None),
        group("f", list(range(8)), "default_pg"),
    ]
    table, conflicts = of_groups(open_run({"process_group": groups}), job())
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        (0, "a", "tp", "description", None),
        (0, "b", None, None, ["cp", "dp_cp", "edp"]),
        (0, "c", None, None, ["tp_cp", "tp_dp_cp", "dist_opt", "world"]),
        (0, "d", None, None, []),
        (0, "e", None, None, None),
        (0, "f", "world", "description", None),
    ]
    assert conflicts == []


def test_ranks_that_fit_one_role_are_enough(open_run: Callable[..., Run], job: Callable[..., Job]) -> None:
    one = job(
        context_parallel_size=1,
        expert_tensor_parallel_size=1,
        expert_model_parallel_size=4,
        num_experts=4,
        sequence_parallel=True,
    )
    table, _ = of_groups(open_run({"process_group": [group("b", [0, 4])]}), one)
    assert table.to_pylist()[0]["candidates"] == ["dp_cp", "edp", "dp"]
    pipeline = job(
        context_parallel_size=1, pipeline_model_parallel_size=2, num_layers=2, untie_embeddings_and_output_weights=True
    )
    table, _ = of_groups(open_run({"process_group": [group("b", [0, 4])]}), pipeline)
    assert table.to_pylist() == [
        {"rank": 0, "group_id": "b", "role": "pp", "role_evidence": "layout", "candidates": ["pp"]}
    ]


@pytest.mark.parametrize("known", [None, Job(tensor_model_parallel_size=4)])
def test_without_a_layout_nothing_can_be_compared(open_run: Callable[..., Run], known: Job | None) -> None:
    """A job without a world size has no layout."""
    assert layout_of(known) is None
    table, conflicts = of_groups(open_run({"process_group": [group("a", [0, 1], TP), group("b", [0, 1])]}), known)
    assert [(r["role"], r["candidates"]) for r in table.to_pylist()] == [("tp", None), (None, None)]
    assert conflicts == []


@pytest.mark.parametrize(
    ("groups", "sentences"),
    [
        pytest.param([group("a", [0, 1, 2, 3], TP)], [], id="agrees"),
        pytest.param(
            [group("a", list(range(8)), TP), group("a", list(range(8)), TP, rank=1)],
            ["declared tp groups of 4 ranks, observed groups of 8"],
            id="another size, said once",
        ),
        pytest.param(
            [group("a", [0, 2, 4, 6], TP), group("a", [1, 3, 5, 7], TP, rank=1)],
            ["declared a tp group of ranks 0, 1, 2, 3, observed 0, 2, 4, 6"],
            id="other ranks, one example",
        ),
        pytest.param(
            [group("a", [0, 1], "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0")],
            ["declared no intra_edp groups, observed groups of 2 ranks"],
            id="no such groups",
        ),
        pytest.param([group("a", [0, 1, 2], "EMBEDDING_GROUP")], [], id="sizes that vary"),
        pytest.param([group("a", None, TP)], [], id="unknown ranks"),
        pytest.param([group("a", [6, 7, 8, 9], TP)], [], id="ranks beyond the declared world"),
    ],
)
def test_conflicts_of_described_groups(
    open_run: Callable[..., Run], job: Callable[..., Job], groups: list[dict[str, Any]], sentences: list[str]
) -> None:
    _, conflicts = of_groups(open_run({"process_group": groups}), job())
    assert [c.sentence for c in conflicts] == sentences


def test_groups_of_callers_are_compared_too(open_run: Callable[..., Run], job: Callable[..., Job]) -> None:
    """The trace names no group: its size shows in what an all-gather gives."""
    path = ["LinearWithGradAccumulationAndAsyncCommunication"]
    common = {"rank": 0, "op": "all_gather", "dtype": "bfloat16", "call_path": path, "completeness": "full"}
    calls = [
        {**common, "call_id": 0, "in_elems": 8, "out_elems": 64},
        {**common, "call_id": 1, "in_elems": 8, "out_elems": 32},
        {**common, "call_id": 2, "in_elems": 8, "out_elems": 63},
        {**common, "call_id": 3, "op": "all_reduce", "in_elems": 8, "out_elems": 8, "group_size": 2},
        {**common, "call_id": 4, "op": "reduce_scatter", "in_elems": 64, "out_elems": 8, "call_path": ["other"]},
    ]
    found = attach(open_run({"comm_record": calls}), job())
    assert found.conflicts == [GroupConflict("tp", 4, 2), GroupConflict("tp", 4, 8)]


NORM = Signature("all_reduce", "float32", 1, 1, "optimizer", 4, "mp", 1)
FLAG = NORM._replace(role="dist_opt")
LOSS = NORM._replace(in_elems=16, out_elems=16, phase="forward", role="tp", calls=3)


@pytest.mark.parametrize(
    ("look", "calls", "expected", "role"),
    [
        pytest.param(Look("all_reduce", "float32", 1, 1, "optimizer", 4), 1, [NORM, LOSS], "mp", id="fits one"),
        pytest.param(Look("all_reduce", "float32", 1, 1, "other", None), 1, [NORM, LOSS], "mp", id="outside autograd"),
        pytest.param(Look("all_reduce", None, 16, None, None, None), 3, [NORM, LOSS], "tp", id="little recorded"),
        pytest.param(Look("all_reduce", "float32", 1, 1, "optimizer", 4), 2, [NORM], None, id="another count"),
        pytest.param(Look("all_reduce", "float32", 2, 2, "optimizer", 4), 1, [NORM], None, id="another size"),
        pytest.param(Look("all_reduce", "int32", 1, 1, "optimizer", 4), 1, [NORM], None, id="another type"),
        pytest.param(Look("all_reduce", "float32", 1, 1, "forward", 4), 1, [NORM], None, id="another phase"),
        pytest.param(Look("all_reduce", "float32", 1, 1, "optimizer", 2), 1, [NORM], None, id="another group size"),
        pytest.param(Look("broadcast", "float32", 1, 1, "optimizer", 4), 1, [NORM], None, id="another operation"),
        pytest.param(Look("all_reduce", "float32", 1, 1, "other", 4), 1, [NORM, FLAG], None, id="fits two roles"),
        pytest.param(Look("all_reduce", "float32", 1, 1, "other", 4), 1, [NORM, NORM], "mp", id="twice the same role"),
    ],
)
def test_patterns(look: Look, calls: int, expected: list[Signature], role: str | None) -> None:
    assert by_pattern({look: calls}, expected) == ({} if role is None else {look: role})


def test_two_looks_that_could_be_the_same_calls_settle_nothing() -> None:
    """Each fits the gradient norm, and only one of them can be it."""
    inside = Look("all_reduce", "float32", 1, 1, "optimizer", 4)
    outside = inside._replace(phase="other")
    loss = Look("all_reduce", "float32", 16, 16, "forward", None)
    assert by_pattern({inside: 1, outside: 1, loss: 3}, [NORM, LOSS]) == {loss: "tp"}


ACTIVATIONS = Signature("send", "bfloat16", 64, 64, "forward", 4, "pp", 8)
MESSAGE = Look("send", "bfloat16", 64, 64, None, None)


def test_kinds_of_one_role_that_look_alike_are_summed() -> None:
    kinds = [ACTIVATIONS, ACTIVATIONS._replace(phase="backward", calls=4)]
    assert by_pattern({MESSAGE: 12}, kinds) == {MESSAGE: "pp"}
    assert by_pattern({MESSAGE: 11}, kinds) == {}
    assert by_pattern({MESSAGE: 12}, [*kinds, ACTIVATIONS._replace(role="world", calls=12)]) == {}


def test_of_two_phases_outside_autograd_the_nearer_one_is_meant() -> None:
    """A gather in the forward pass and one behind the optimizer, both once; the forward one was seen as such."""
    behind = Signature("all_gather", "bfloat16", 8, 16, "optimizer", 2, "dp_cp", 1)
    ahead = behind._replace(phase="forward")
    seen = Look("all_gather", "bfloat16", 8, 16, "forward", None)
    outside = seen._replace(phase="other")
    assert by_pattern({seen: 1, outside: 1}, [behind, ahead]) == {seen: "dp_cp", outside: "dp_cp"}


def test_kinds_of_several_roles_share_what_looks_alike() -> None:
    outside = Look("all_reduce", "float32", 1, 1, "other", None)
    assert shared_pattern({outside: 2}, [NORM, FLAG, LOSS]) == {outside: (NORM, FLAG)}
    assert shared_pattern({outside: 3}, [NORM, FLAG, LOSS]) == {}
    assert shared_pattern({outside: 1}, [NORM, LOSS]) == {}
    inside = outside._replace(phase="optimizer")
    assert shared_pattern({outside: 2, inside: 2}, [NORM, FLAG]) == {}


def test_phases_that_can_be_the_same() -> None:
    assert same_phase("other", "optimizer")
    assert same_phase("other", "forward", "dp_cp")
    assert not same_phase("other", "forward", "tp")
    assert not same_phase("other", "backward", "dp_cp")
    assert not same_phase("optimizer", "other")
    assert not same_phase(None, "other")


def test_undefined_is_no_description() -> None:
    assert role_of_description("undefined") is None
