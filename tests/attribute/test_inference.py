"""The layout that groups and traffic imply, without a job and against one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.attribute import Attribution, attach, inference
from traceanalyzer.axes import ROLES, Layout
from traceanalyzer.importers import import_traces
from traceanalyzer.job import Job
from traceanalyzer.run import Run

OpenRun = Callable[..., Run]
RANK = {"rank": 0, "window_start_ns": 0, "window_end_ns": 1000}


def described(layout: Layout, ranks: range | list[int], *roles: str) -> list[dict[str, Any]]:
    """These ranks' groups of these roles, with their descriptions."""
    return [
        {
            "rank": rank,
            "group_id": f"{role}{members[0]}",
            "description": ROLES[role].descriptions[0],
            "group_size": len(members),
            "ranks": list(members),
        }
        for rank in ranks
        for role in roles
        if (members := layout.group_of(role, rank)) is not None
    ]


def infer(run: Run, job: Job | None = None) -> Attribution:
    return attach(run, job)


def values(found: inference.Inference) -> dict[str, tuple[int | str | None, str]]:
    return {f.name: (f.value, f.sure) for f in found.facts}


def test_descriptions_prove_every_axis(open_run: OpenRun) -> None:
    layout = Layout(16, tp=2, cp=2, pp=2, ep=2, etp=1)
    groups = described(layout, [0, 5], "world", "tp", "cp", "pp", "dp", "ep", "etp")
    found = infer(open_run({"process_group": groups, "rank": [RANK]})).inferred
    assert values(found) == {
        "world_size": (16, "proven"),
        "tp": (2, "proven"),
        "cp": (2, "proven"),
        "pp": (2, "proven"),
        "ep": (2, "proven"),
        "etp": (1, "proven"),
        "dp": (2, "proven"),
        "order": ("tp-cp-ep-dp-pp", "proven"),
        "vpp": (None, "unknown"),
        "num_microbatches": (None, "unknown"),
        "sequence_parallel": (None, "unknown"),
    }
    assert found.words == "TP2 x CP2 x PP2 x DP2 (EP2, ETP1)"
    assert found.fact("tp").reason == "group tp0 is described as such and has 2 ranks"


def test_an_axis_that_no_group_shows_follows_from_the_others(open_run: OpenRun) -> None:
    """8 ranks, TP 2 and DP-with-CP 4: whether those 4 are DP or CP is open; PP is 1."""
    groups = described(Layout(8, tp=2), [0], "world", "tp", "dp_cp")
    found = infer(open_run({"process_group": groups, "rank": [RANK]})).inferred
    got = values(found)
    assert (got["tp"], got["pp"]) == ((2, "proven"), (1, "proven"))
    assert (got["cp"], got["dp"]) == ((1, "likely"), (4, "likely"))
    assert (got["ep"], got["etp"]) == ((1, "likely"), (2, "likely"))
    assert found.fact("cp").reason == "3 layouts fit, with cp 1, 2, 4; the one with the fewest axes is shown"


def test_the_pipeline_before_data_order(open_run: OpenRun) -> None:
    layout = Layout(8, tp=2, pp=2, order="tp-cp-ep-pp-dp")
    groups = described(layout, [0], "world", "tp", "pp", "dp")
    found = infer(open_run({"process_group": groups, "rank": [RANK]})).inferred
    assert values(found)["order"] == ("tp-cp-ep-pp-dp", "proven")


def bare(name: str, ranks: list[int]) -> dict[str, Any]:
    return {"rank": ranks[0], "group_id": name, "description": None, "group_size": len(ranks), "ranks": ranks}


def test_names_prove_what_ranks_alone_leave_open(open_run: OpenRun) -> None:
    """The names that a TP 2 x PP 2 job of 8 ranks has with 0.16 and without gloo; ranks alone would leave more open."""
    world = {**bare("0", list(range(8))), "description": "default_pg"}
    groups = [world, bare("1", [0, 2]), bare("19", [0, 1]), bare("23", [0, 4]), bare("17", [0, 1, 4, 5])]
    found = infer(open_run({"process_group": groups, "rank": [RANK]})).inferred
    assert found.basis == "names"
    # CP 2 instead of DP 2 gives these groups the same names
    assert values(found)["dp"] == (2, "likely")
    # the fifth group of either is that of dp: ranks 0 and 2, or rank 0 alone
    found = infer(open_run({"process_group": [*groups, bare("5", [0, 2])], "rank": [RANK]})).inferred
    got = values(found)
    assert [got[a] for a in ("tp", "cp", "pp", "dp")] == [(2, "proven"), (1, "proven"), (2, "proven"), (2, "proven")]


def test_ranks_and_traffic(open_run: OpenRun) -> None:
    """Without names: pairs of neighbours with all-reduces, pairs of distance 4 with messages."""
    groups = [bare("a", [0, 1]), bare("b", [0, 4]), {**bare("w", list(range(8))), "description": "default_pg"}]
    calls = [
        {"rank": 0, "call_id": 0, "op": "all_reduce", "group_id": "a", "t_issue_ns": 1},
        {"rank": 0, "call_id": 1, "op": "send", "group_id": "b", "t_issue_ns": 2, "peer": 4},
    ]
    found = infer(open_run({"process_group": groups, "comm_record": calls, "rank": [RANK]})).inferred
    assert found.basis == "ranks"
    assert {f.sure for f in found.facts if f.name in ("tp", "cp", "pp", "dp")} <= {"likely", "proven"}
    for layout in found.layouts:
        assert (0, 4) in (layout.group_of("pp", 0), layout.group_of("cp", 0))


def test_only_the_default_group(open_run: OpenRun) -> None:
    world = {**bare("0", list(range(8))), "description": "default_pg"}
    call = {"rank": 0, "call_id": 0, "op": "all_reduce", "group_id": "0", "t_issue_ns": 1}
    found = infer(open_run({"process_group": [world], "comm_record": [call], "rank": [RANK]})).inferred
    assert values(found)["dp"] == (8, "likely")
    assert values(found)["tp"] == (None, "unknown")
    assert found.words is None
    experts = {**call, "call_id": 1, "op": "all_to_all"}
    found = infer(open_run({"process_group": [world], "comm_record": [call, experts], "rank": [RANK]})).inferred
    assert values(found)["dp"] == (None, "unknown")


def test_groups_of_no_layout(open_run: OpenRun) -> None:
    strange = {**bare("x", [0, 3]), "description": ROLES["tp"].descriptions[0]}
    groups = [*described(Layout(8, tp=2), [0], "world"), strange]
    found = infer(open_run({"process_group": groups, "rank": [RANK]})).inferred
    assert found.fitting == 0
    assert found.words is None
    assert found.fact("tp").reason == "no layout of Megatron's grid has the observed groups"


@pytest.mark.parametrize(
    ("job", "sentence"),
    [
        (
            {"tensor_model_parallel_size": 4, "context_parallel_size": 2},
            "declared TP4 x CP2, observed groups imply TP8 (proven)",
        ),
        ({"tensor_model_parallel_size": 8}, None),
    ],
)
def test_declared_against_observed(open_run: OpenRun, job: dict[str, int], sentence: str | None) -> None:
    groups = described(Layout(8, tp=8), [0], "world", "tp")
    found = infer(open_run({"process_group": groups, "rank": [RANK]}), Job(world_size=8, **job))  # type: ignore[arg-type]
    layout = [c.sentence for c in found.conflicts if isinstance(c, inference.LayoutConflict)]
    assert layout == ([] if sentence is None else [sentence])


# -- traffic -------------------------------------------------------------------------------------------------------------


def messages(rank: int, ranks: list[int], to: dict[int, int], first: int = 0) -> list[dict[str, Any]]:
    """Sends of one rank: how many to each peer."""
    peers = [peer for peer, calls in to.items() for _ in range(calls)]
    return [
        {"rank": rank, "call_id": first + i, "op": "send", "group_id": "pp", "peer": peer, "t_issue_ns": 10 + i}
        for i, peer in enumerate(peers)
    ]


def pipeline(open_run: OpenRun, size: int, sends: dict[int, dict[int, int]]) -> inference.Inference:
    ranks = list(range(size))
    groups = [{**bare("pp", ranks), "rank": r, "description": "PIPELINE_MODEL_PARALLEL_GROUP"} for r in ranks] + [
        {**bare("w", ranks), "description": "default_pg"}
    ]
    steps = [
        {"rank": r, "name": "ProfilerStep#1", "category": "user_annotation", "start_ns": 0, "dur_ns": 500}
        for r in ranks
    ]
    calls = [call for rank, to in sends.items() for call in messages(rank, ranks, to)]
    rows = {"process_group": groups, "comm_record": calls, "span": steps, "rank": [{**RANK, "rank": r} for r in ranks]}
    return infer(open_run(rows)).inferred


def test_microbatches_without_interleaving(open_run: OpenRun) -> None:
    """4 stages, 6 micro-batches: the ends send 6, the middle 12."""
    found = pipeline(open_run, 4, {0: {1: 6}, 1: {2: 6, 0: 6}, 2: {3: 6, 1: 6}, 3: {2: 6}})
    assert (found.fact("vpp").value, found.fact("num_microbatches").value) == (1, 6)
    assert found.fact("vpp").reason == "a middle stage sends 12 messages a step, an end of the pipeline 6"


def test_microbatches_with_interleaving(open_run: OpenRun) -> None:
    """4 stages of 2 chunks, 8 micro-batches: the first sends 16 on and 8 back over the end, the middle 16 and 16."""
    found = pipeline(open_run, 4, {0: {1: 16, 3: 8}, 1: {2: 16, 0: 16}})
    assert (found.fact("vpp").value, found.fact("num_microbatches").value) == (2, 8)
    assert found.fact("vpp").sure == "proven"


def test_two_stages_leave_it_open(open_run: OpenRun) -> None:
    found = pipeline(open_run, 2, {0: {1: 12}, 1: {0: 12}})
    assert found.fact("num_microbatches").value is None
    assert found.fact("num_microbatches").reason == (
        "an end of the pipeline sends 12 messages a step, which is (2 x vpp - 1) x micro-batches"
    )


@pytest.mark.parametrize(("op", "found"), [("reduce_scatter", (1, "proven")), ("all_reduce", (0, "likely"))])
def test_sequence_parallelism(open_run: OpenRun, op: str, found: tuple[int, str]) -> None:
    groups = described(Layout(2, tp=2), [0], "world", "tp")
    call = {"rank": 0, "call_id": 0, "op": op, "group_id": "tp0", "t_issue_ns": 1}
    inferred = infer(open_run({"process_group": groups, "comm_record": [call], "rank": [RANK]})).inferred
    assert values(inferred)["sequence_parallel"] == found


@pytest.mark.shared
@pytest.mark.parametrize(
    ("traces", "words"),
    [
        ("nvrx_flight_recorder/gpu_error_1st/_dump_*", "TP2 x PP4 x DP2 (EP4, ETP1)"),
        ("nvrx_flight_recorder/gpu_error_2nd/_dump_*", "TP4 x PP2 x DP2 (EP8, ETP1)"),
    ],
)
def test_real_jobs(shared: Callable[[str], Path], tmp_path: Path, traces: str, words: str) -> None:
    """Other people's jobs of 16 ranks: the layouts that the collection's own description gives."""
    folder, _, pattern = traces.rpartition("/")
    import_traces(sorted(shared(f"traces/{folder}").glob(pattern)), tmp_path / "run.parquet")
    with Run.open(tmp_path / "run.parquet") as run:
        found = attach(run, None).inferred
    assert found.words == words
    assert {f.sure for f in found.facts if f.name in inference.AXES} == {"proven"}
