"""Queries over ranks: tiny runs whose figures are worked out by hand, and the splits of real traces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.importers import import_traces
from traceanalyzer.run import Run

OpenRun = Callable[..., Run]
NewRows = Callable[[], Any]


def late(rows: Any) -> Any:
    """Ranks 0 and 1 of one tensor-parallel group on one host, 4 all-reduces of 1000 float32 in step 3. Rank 1 comes 100 ns
    late by itself to all but the first; every transfer takes 40. Both make a call that the other has not.

    call:   0        1        2        3
    rank 0  100-140  200-340  400-540  600-740
    rank 1  100-140  300-340  500-540  700-740
    """
    size = {"dtype": "float32", "in_elems": 1000, "out_elems": 1000, "group_size": 2, "ranks": [0, 1]}
    for rank in (0, 1):
        rows.rank(rank, host="node0")
        rows.step(rank, 3, 0, 1000)
        for i, end in enumerate((140, 340, 540, 740)):
            start = end - 40 if rank == 1 or i == 0 else end - 140
            rows.call(rank, "tp", "all_reduce", start, end, start - 5, seq=i, **size)
    rows.call(0, "tp", "all_gather", 800, 850, 790, seq=9, **size)
    return rows


def test_matched_and_unmatched_calls(open_run: OpenRun, new_rows: NewRows) -> None:
    run = open_run(late(new_rows()))
    found = run.query("matched_calls").rows()
    assert found[1] == {
        "match_id": 1,
        "evidence": "seq",
        "op": "all_reduce",
        "role": "tp",
        "step": 3,
        "dtype": "float32",
        "group_size": 2,
        "payload_bytes": 4000,
        "member_ranks": [0, 1],
        "timed": 2,
        "complete": True,
        "shared": False,
        "hosts": 1,
    }
    assert [r["match_id"] for r in found] == [0, 1, 2, 3]
    assert run.query("unmatched_calls").rows() == [
        {
            "rank": 0,
            "role": "tp",
            "op": "all_gather",
            "reason": "no other rank recorded its number",
            "calls": 1,
            "first_call_id": 4,
        }
    ]


def test_clocks_and_end_spreads(open_run: OpenRun, new_rows: NewRows) -> None:
    """Rank 1 is 7 ns ahead; with 4 calls no drift is fitted."""
    rows = late(new_rows())
    for row in rows["comm_record"]:
        row["start_ns"] += 7 * row["rank"]
    run = open_run(rows)
    same = {"reference_rank": 0, "base_ns": 140, "drift_ppb": None, "calls": 4, "host": "node0"}
    none_left = {"residual_median_ns": 0, "residual_p95_ns": 0, "residual_max_ns": 0}
    assert run.query("clocks").rows() == [
        {"rank": 0, **same, "offset_ns": 0, **none_left},
        {"rank": 1, **same, "offset_ns": 7, **none_left},
    ]
    assert run.query("end_spreads").rows() == [
        {
            "role": "tp",
            "op": "all_reduce",
            "calls": 4,
            "recorded_median_ns": 7,
            "recorded_max_ns": 7,
            "aligned_median_ns": 0,
            "aligned_p95_ns": 0,
            "aligned_max_ns": 0,
        }
    ]


def test_arrival_skew(open_run: OpenRun, new_rows: NewRows) -> None:
    common = {"step": 3, "role": "tp", "op": "all_reduce", "calls": 4, "transfer_ns": 160, "residual_ns": 0}
    assert open_run(late(new_rows())).query("arrival_skew").rows() == [
        {
            **common,
            "rank": 0,
            "last_calls": 1,
            "late_ns": 0,
            "median_late_ns": 0,
            "own_ns": 0,
            "inherited_ns": 0,
            "dur_ns": 460,
            "waiting_ns": 300,
        },
        {
            **common,
            "rank": 1,
            "last_calls": 3,
            "late_ns": 300,
            "median_late_ns": 100,
            "own_ns": 300,
            "inherited_ns": 0,
            "dur_ns": 160,
            "waiting_ns": 0,
        },
    ]


def test_stragglers(open_run: OpenRun, new_rows: NewRows) -> None:
    """Rank 0 waits 100 ns three times, and rank 1 owns all of it."""
    found = open_run(late(new_rows())).query("stragglers").rows()
    assert found == [
        {
            "step": 3,
            "role": "tp",
            "member_ranks": [0, 1],
            "owner_rank": 1,
            "calls": 3,
            "caused_waiting_ns": 300,
            "share_of_waiting": 1.0,
            "slow": True,
            "finding": "rank 1 comes late by itself",
        }
    ]


def test_stages_are_not_compared_with_each_other(open_run: OpenRun, new_rows: NewRows) -> None:
    """The same on a pipeline's group: its ranks do other work."""
    rows = late(new_rows())
    for row in rows["comm_record"] + rows["process_group"]:
        row["group_id"] = "pp"
        if "description" in row:
            row["description"] = "PIPELINE_MODEL_PARALLEL_GROUP"
    assert open_run(rows).query("stragglers").rows() == []


def test_a_difference_within_the_clocks_residual_is_no_finding(open_run: OpenRun, new_rows: NewRows) -> None:
    """Ends differ by up to 400 ns from call to call, rank 1 comes 100 ns later."""
    rows = late(new_rows())
    for row in rows["comm_record"]:
        if row["op"] == "all_reduce" and row["rank"] == 1:
            row["dur_ns"] += 400 if row["seq"] % 2 else -20
    assert open_run(rows).query("stragglers").rows() == []


def test_collective_bandwidth(open_run: OpenRun, new_rows: NewRows) -> None:
    """4000 bytes in 40 ns; a ring of 2 moves 2 x 1/2 of it, so both figures are 100 GB/s."""
    assert open_run(late(new_rows())).query("collective_bandwidth").rows() == [
        {
            "role": "tp",
            "op": "all_reduce",
            "dtype": "float32",
            "group_size": 2,
            "payload_bytes": 4000,
            "span": "intra",
            "calls": 4,
            "min_transfer_ns": 40,
            "median_transfer_ns": 40,
            "max_transfer_ns": 40,
            "algorithm_gb_per_s": 100.0,
            "bus_gb_per_s": 100.0,
        }
    ]


def test_slow_groups(open_run: OpenRun, new_rows: NewRows) -> None:
    """Three pairs of ranks make the same call; that of ranks 4 and 5 takes 60 ns instead of 40."""
    rows = new_rows()
    for rank in range(6):
        rows.rank(rank, host=f"node{rank // 2}")
        taken = 60 if rank >= 4 else 40
        rows.call(
            rank, "tp", "all_reduce", 100, 100 + taken, 90, ranks=[rank // 2 * 2, rank // 2 * 2 + 1], seq=1,
            dtype="float32", in_elems=10, out_elems=10, group_size=2,
        )  # fmt: skip
        # one description, three groups
        rows["comm_record"][-1]["group_id"] = rows["process_group"][-1]["group_id"] = f"tp{rank // 2}"
    found = open_run(rows).query("slow_groups").rows()
    assert [
        (r["member_ranks"], r["median_transfer_ns"], r["usual_transfer_ns"], r["groups"], r["slow"]) for r in found
    ] == [
        ([0, 1], 40, 40, 3, False),
        ([2, 3], 40, 40, 3, False),
        ([4, 5], 60, 40, 3, True),
    ]


def experts(rows: Any, *, ranks: tuple[int, ...] = (0, 2)) -> Any:
    """Peer defects 3 and 4: the group of ranks 0 and 2, each sends 100 rows to the first and 200 to the second."""
    for rank in ranks:
        rows.rank(rank)
        rows.step(rank, 3, 0, 1000)
        rows.call(
            rank, "ep", "all_to_all", 100, 200, 90, ranks=[0, 2], seq=1, dtype="Float8_e4m3fn", in_elems=300, out_elems=300,
            group_size=2, in_splits=[100, 200], out_splits=[100, 100] if rank == 0 else [200, 200], recorded_layer=5,
            recorded_microbatch=1, recorded_phase="forward",
        )  # fmt: skip
    return rows


def test_split_rows(open_run: OpenRun, new_rows: NewRows) -> None:
    """Group index 1 is global rank 2."""
    found = open_run(experts(new_rows())).query("split_rows").rows()
    assert [(r["rank"], r["peer_index"], r["peer_rank"], r["sent_rows"], r["received_rows"]) for r in found] == [
        (0, 0, 0, 100, 100),
        (0, 1, 2, 200, 100),
        (2, 0, 0, 100, 200),
        (2, 1, 2, 200, 200),
    ]
    assert {(r["layer"], r["microbatch"], r["phase"], r["turn"], r["role"]) for r in found} == {
        (5, 1, "forward", 0, "ep")
    }


def test_expert_imbalance(open_run: OpenRun, new_rows: NewRows) -> None:
    """Rank 2 receives 400 rows, rank 0 200: 400 over a mean of 300."""
    assert open_run(experts(new_rows())).query("expert_imbalance").rows() == [
        {
            "match_id": 0,
            "step": 3,
            "role": "ep",
            "phase": "forward",
            "microbatch": 1,
            "layer": 5,
            "turn": 0,
            "group_size": 2,
            "ranks": 2,
            "sent_rows": 600,
            "received_rows": 600,
            "conserved": True,
            "max_received_rows": 400,
            "max_rank": 2,
            "median_received_rows": 200,
            "p95_received_rows": 400,
            "imbalance": pytest.approx(400 / 300),
        }
    ]


def test_a_receiver_that_was_not_recorded_leaves_the_balance_open(open_run: OpenRun, new_rows: NewRows) -> None:
    assert open_run(experts(new_rows(), ranks=(0,))).query("expert_imbalance").rows() == []


@pytest.mark.shared
def test_real_splits(shared: Callable[[str], Path], tmp_path: Path) -> None:
    """An expert-parallel forward pass on two B200, one of them recorded: [4096, 4096] both ways, and the counts before."""
    import_traces(list(shared("traces/torchao_ep_moe_b200").glob("*.json.gz")), tmp_path / "run.parquet", told_rank=0)
    with Run.open(tmp_path / "run.parquet") as run:
        found = run.query("split_rows").rows()
        assert {(r["sent_rows"], r["received_rows"]) for r in found} == {(4096, 4096), (4, 4)}
        assert {(r["peer_index"], r["peer_rank"]) for r in found} == {(0, 0), (1, 1)}
        assert run.query("expert_imbalance").rows() == []
        assert [r["reason"] for r in run.query("unmatched_calls").rows()] == ["no other rank recorded its number"]


@pytest.mark.shared
def test_eight_real_ranks(shared: Callable[[str], Path], tmp_path: Path) -> None:
    """Megatron TP 8 on one A100 node: ranks 0 and 6 own the waiting, and the 64 MiB all-reduces reach 195 GB/s."""
    import_traces(sorted(shared("traces/megatron_tp8_a100").glob("megatron_kineto_*")), tmp_path / "run.parquet")
    with Run.open(tmp_path / "run.parquet") as run:
        assert sorted(r["owner_rank"] for r in run.query("stragglers") if r["slow"]) == [0, 6]
        large = next(r for r in run.query("collective_bandwidth") if r["payload_bytes"] == 67_108_864)
        assert (large["calls"], large["median_transfer_ns"], large["span"]) == (81, 603_000, None)
        assert large["bus_gb_per_s"] == pytest.approx(67_108_864 / 603_000 * 1.75)
