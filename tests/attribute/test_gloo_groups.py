"""Groups, operations and peers of the 36 labelled cases of a gloo job, by what its recordings hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from traceanalyzer.attribute import attach
from traceanalyzer.importers import import_traces
from traceanalyzer.run import Run

TP, DP, WORLD, ODD, MESH = (
    "TENSOR_MODEL_PARALLEL_GROUP",
    "DATA_PARALLEL_GROUP",
    "default_pg",
    "IRREGULAR_GROUP",
    "mesh_tp",
)
PP_CASES = ("send_recv_pp", "isend_irecv_pp", "batch_isend_irecv_pp")

# The recording script's cases in its order, with what gloo runs for each (a reduce-scatter is an all-reduce) and on which
# group. Messages of a pipeline leave no record in gloo's flight recorder.
CASES: dict[str, list[tuple[str, str]]] = {
    "all_reduce_tp": [("all_reduce", TP)],
    "all_reduce_async_dp": [("all_reduce", DP)],
    "all_reduce_bf16": [("all_reduce", DP)],
    "all_reduce_max_world": [("all_reduce", WORLD)],
    "all_gather_into_tensor_tp": [("all_gather", TP)],
    "reduce_scatter_tensor_tp": [("all_reduce", TP)],
    "all_gather_list_dp": [("all_gather", DP)],
    "reduce_scatter_list_dp": [("all_reduce", DP)] * 2,
    "all_to_all_single_uneven_dp": [("all_to_all", DP)],
    "all_to_all_single_even_world": [("all_to_all", WORLD)],
    "all_to_all_list_dp": [("all_to_all", DP)],
    "broadcast_tp": [("broadcast", TP)],
    "reduce_tp": [("reduce", TP)],
    "gather_tp": [("gather", TP)],
    "scatter_tp": [("scatter", TP)],
    **{case: [] for case in PP_CASES},
    "barrier_world": [("barrier", WORLD)],
    "barrier_tp": [("barrier", TP)],
    "coalescing_manager_all_reduce": [("all_reduce", TP)],
    "coalescing_manager_all_gather": [("all_gather", TP)],
    "coalescing_manager_reduce_scatter": [("all_reduce", TP)] * 2,
    "all_reduce_coalesced": [("all_reduce", TP)],
    "fc_all_reduce": [("all_reduce", TP)],
    "fc_all_gather_tensor": [("all_gather", TP)],
    "fc_reduce_scatter_tensor": [("all_reduce", TP)],
    "fc_all_to_all_single": [("all_to_all", TP)],
    "fc_all_gather_into_tensor_coalesced": [("all_gather", TP)],
    "fc_reduce_scatter_tensor_coalesced": [("all_reduce", TP)] * 2,
    "fc_all_reduce_coalesced": [("all_reduce", TP)],
    "all_gather_object": [("all_gather", TP)] * 2,
    "all_reduce_irregular": [("all_reduce", ODD)],
    "ddp": [("all_reduce", DP)],
    "fsdp2": [("all_gather", WORLD)] * 4 + [("all_reduce", WORLD)] * 2,
    "dtensor": [("scatter", MESH), ("all_gather", MESH), ("all_gather", MESH)],
}
NAMES = {TP: "1122", DP: "3434", WORLD: "0000", ODD: "77-7", MESH: ("10", "10", "11", "11")}
"""Name of the group that each rank has of a kind, by the order in which the script makes them."""


@pytest.mark.shared
def test_groups_of_every_case(shared: Callable[[str], Path], tmp_path: Path) -> None:
    """The last step of each process's flight recorder, call by call: one call is behind it, the barrier at the end."""
    import_traces([shared(f"traces/gloo_torch213/fr{rank}.json.gz") for rank in range(4)], tmp_path / "run.parquet")
    with Run.open(tmp_path / "run.parquet") as run:
        attach(run, None)
        for rank in range(4):
            mine = {case: calls for case, calls in CASES.items() if rank != 2 or case != "all_reduce_irregular"}
            assert len(mine) == (35 if rank == 2 else 36)
            expected = [call for calls in mine.values() for call in calls]
            found = run.tuples(
                """SELECT c.op, g.description, c.group_id, c.role, c.peer FROM comm c
                   JOIN process_group g ON g.rank = c.rank AND g.group_id = c.group_id
                   WHERE c.rank = ? ORDER BY c.call_id""",
                [rank],
            )
            step = found[-1 - len(expected) : -1]
            assert [row[:2] for row in step] == expected
            assert {row[3] for row in step if row[1] == TP} == {"tp"}
            assert {row[3] for row in step if row[1] == DP} == {"dp"}
            assert [row[2] for row in step] == [NAMES[kind][rank] for _, kind in expected]
            assert {row[4] for row in step} == {None}


@pytest.mark.shared
def test_a_gloo_trace_alone_names_no_group_and_no_peer(shared: Callable[[str], Path], tmp_path: Path) -> None:
    """Every case of both steps has its calls, and none has a group, a role or a peer that nobody recorded."""
    import_traces([shared(f"traces/gloo_torch213/rank{rank}.json.gz") for rank in range(4)], tmp_path / "run.parquet")
    with Run.open(tmp_path / "run.parquet") as run:
        attach(run, None)
        assert run.tuples("SELECT count(group_id), count(role), count(peer) FROM comm") == [(0, 0, 0)]
        for rank in range(4):
            paths = run.tuples("SELECT call_path, step, step_evidence FROM comm WHERE rank = ?", [rank])
            cases = {
                (name.removeprefix("case:"), step)
                for path, step, evidence in paths
                for name in path or ()
                if name.startswith("case:") and evidence == "profiler_step"
            }
            # DDP's and FSDP2's backward passes run outside of the range, fsdp2's forward pass inside of it
            everything = {case for case in CASES if rank != 2 or case != "all_reduce_irregular"} - {"ddp"}
            assert {case for case, _ in cases} - {"ddp"} == everything
            assert {step for _, step in cases} == {1, 2}
