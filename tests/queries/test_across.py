"""Queries over ranks: tiny runs whose figures are worked out by hand, and the splits of real traces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.importers import import_traces
from traceanalyzer.job import Job
from traceanalyzer.links import Links
from traceanalyzer.queries import Library
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
    same = {"reference_rank": 0, "base_ns": 140, "since_ns": None, "drift_ppb": None, "calls": 4, "host": "node0"}
    same |= {"evidence": "calls"}
    none_left = {"residual_median_ns": 0, "residual_p95_ns": 0, "residual_max_ns": 0, "open_ns": 0}
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
            "share_of_step": 0.3,
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
            "link_time_ns": None,
            "link_bus_gb_per_s": None,
            "link_note": None,
        }
    ]


def test_the_time_at_measured_bandwidths(open_run: OpenRun, new_rows: NewRows) -> None:
    """4000 bytes, half of them twice over a link of 160 GB/s: 25 ns beside the 40 measured."""
    run = open_run(late(new_rows()))
    run.library = Library.of(run, None, Links("links", {("all_reduce", "intra"): ((1000, 160.0), (2000, 160.0))}))
    (found,) = run.query("collective_bandwidth").rows()
    assert (found["median_transfer_ns"], found["link_time_ns"], found["link_bus_gb_per_s"], found["link_note"]) == (
        40, 25, 160.0, "above the table",
    )  # fmt: skip


def test_slow_groups(open_run: OpenRun, new_rows: NewRows) -> None:
    """Three pairs of ranks make the same call three times; that of ranks 4 and 5 takes 60 ns instead of 40."""
    rows = new_rows()
    for rank in range(6):
        rows.rank(rank, host=f"node{rank // 2}")
        taken = 60 if rank >= 4 else 40
        for turn in range(3):
            start = 100 + 100 * turn
            rows.call(
                rank, "tp", "all_reduce", start, start + taken, start - 10, ranks=[rank // 2 * 2, rank // 2 * 2 + 1],
                seq=turn, dtype="float32", in_elems=10, out_elems=10, group_size=2,
            )  # fmt: skip
    found = open_run(rows).query("slow_groups").rows()
    assert [
        (r["member_ranks"], r["median_transfer_ns"], r["usual_transfer_ns"], r["groups"], r["slow"]) for r in found
    ] == [
        ([0, 1], 40, 40, 3, False),
        ([2, 3], 40, 40, 3, False),
        ([4, 5], 60, 40, 3, True),
    ]


def test_slow_links(open_run: OpenRun, new_rows: NewRows) -> None:
    """Rank r on node r sends on to the next of four, three messages of 4000 bytes and as many back. Only those from node 2 to
    node 3 take 90 ns instead of 40; the way back does not."""
    rows = new_rows()
    for rank in range(4):
        rows.rank(rank, host=f"node{rank}")
    size = {"dtype": "float32", "in_elems": 1000, "out_elems": 1000, "group_size": 4, "ranks": [0, 1, 2, 3]}
    for turn in range(9):
        at = 1000 * (turn + 1)
        for rank in range(4):
            rows.call(rank, "mp", "all_reduce", at - 100, at - 50, at - 110, seq=turn, **size)
    for turn in range(3):
        for low in range(3):
            for sender, peer, at in ((low, low + 1, 0), (low + 1, low, 500)):
                start = 20_000 + 10_000 * turn + 1000 * low + at
                end = start + (90 if (sender, peer) == (2, 3) else 40)
                rows.call(sender, "pp", "send", start, end, start - 5, peer=peer, **size)
                rows.call(peer, "pp", "recv", start - 8, end, start - 9, peer=sender, **size)
    found = [r for r in open_run(rows).query("slow_links").rows() if r["op"] == "send"]
    assert {(r["links"], r["calls"], r["usual_transfer_ns"], r["residual_ns"], r["span"]) for r in found} == {
        (6, 3, 40, 0, "inter")
    }
    assert [(r["hosts"], r["median_transfer_ns"]) for r in found if r["slow"]] == [(["node2", "node3"], 90)]
    assert [r["finding"] for r in found if r["slow"]] == ["from node2 to node3 data moves slower than between its like"]


def like(rows: Any, *, slow: int | None = None, factor: int = 100, more: int = 0, launch_late: int = 0) -> Any:
    """Four ranks of one stage and no tensor parallelism: 3 products of 100 ns, an attention of 50, launched 10 before."""
    for rank in range(4):
        rows.rank(rank)
        at = 100
        for what, taken in (
            *(("gemm", 100),) * 3,
            ("attention", 50),
            *(("gemm", 100),) * (more if rank == slow else 0),
        ):
            late = launch_late if rank == slow else 0
            taken = taken * factor // 100 if rank == slow else taken
            rows.kernel(rank, what, at + 10 + late, at + 10 + late + taken, at + late)
            at += 10 + late + taken
        rows.step(rank, 7, 0, at)
    return rows


@pytest.mark.parametrize(
    ("fault", "cause", "finding"),
    [
        (
            {"factor": 120},
            "device",
            "computes slower than its like in several classes of kernels: clock, temperature or power",
        ),
        ({"more": 1}, "work", "runs more kernels than its like"),
        ({"launch_late": 30}, "host", "waits longer than its like for its host to launch work"),
    ],
)
def test_slow_ranks(open_run: OpenRun, new_rows: NewRows, fault: dict[str, int], cause: str, finding: str) -> None:
    found = open_run(like(new_rows(), slow=2, **fault)).query("slow_ranks").rows()
    assert [(r["rank"], r["cause"], r["finding"]) for r in found if r["slow"]] == [(2, cause, f"rank 2 {finding}")]
    assert {(r["like_ranks"], r["usual_compute_ns"], r["usual_kernels"], r["stage"]) for r in found} == {(4, 350, 4, 0)}


def test_a_rank_that_is_slow_in_one_class(open_run: OpenRun, new_rows: NewRows) -> None:
    """Rank 1's attention takes 90 ns instead of 50."""
    rows = like(new_rows())
    for row in rows["kernel"]:
        row["dur_ns"] += 40 if (row["rank"], row["kernel_class"]) == (1, "attention") else 0
    (found,) = [r for r in open_run(rows).query("slow_ranks").rows() if r["slow"]]
    assert (found["rank"], found["compute_ns"], found["cause"]) == (1, 390, "kernel")
    assert (found["longest_class"], found["longest_class_over_ns"], found["classes_over"]) == ("attention", 40, 1)


def test_stages_and_tensor_parallel_places_have_likes_of_their_own(open_run: OpenRun, new_rows: NewRows) -> None:
    """TP 2 x PP 2 x DP 3: the last stage computes longer, and so do the second places. Nobody stands out."""
    rows = new_rows()
    for rank in range(12):
        rows.rank(rank)
        rows.step(rank, 7, 0, 1000)
        rows.kernel(rank, "gemm", 100, 300 + 100 * (rank // 6) + 50 * (rank % 2), 90)
    found = open_run(
        rows, Job(world_size=12, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, num_layers=2)
    )
    ranks = found.query("slow_ranks").rows()
    assert [(r["rank"], r["stage"], r["tp_place"], r["like_ranks"]) for r in ranks] == [
        (rank, rank // 6, rank % 2, 3) for rank in range(12)
    ]
    assert not any(r["slow"] for r in ranks)


def test_a_slow_rank_is_named_alone(open_run: OpenRun, new_rows: NewRows) -> None:
    """TP 2 x PP 2 x DP 2, 4 rounds: tensor-parallel sums, a message to the second stage, its sums, a sum over replicas.

    Rank 1 takes 500 ns longer before each of its tensor-parallel sums. Rank 0 waits there, 2 and 3 for the replicas, 4 to 7
    for the messages: everyone else comes late without a part of its own.
    """
    rows = new_rows()
    groups = {"tp": [[0, 1], [2, 3], [4, 5], [6, 7]], "pp": [[r, r + 4] for r in range(4)],
              "dp_cp": [[0, 2], [1, 3], [4, 6], [5, 7]], "mp": [list(range(8))]}  # fmt: skip
    for rank in range(8):
        rows.rank(rank, 0, 100_000)
    free = [1000] * 8
    turn: dict[str, int] = {}
    size = {"dtype": "float32", "in_elems": 8, "out_elems": 8}

    def call(role: str, members: list[int], work: int, op: str = "all_reduce") -> None:
        name = f"{role}{members}"
        turn[name] = turn.get(name, 0) + 1
        begins = {r: free[r] + work + (500 if r == 1 and role == "tp" else 0) for r in members}
        end = max(begins.values()) + 20
        for place, r in enumerate(members):
            more = {"ranks": members, "group_size": len(members), **size}
            if op == "send":
                more["peer"] = members[1 - place]
            else:
                more["seq"] = turn[name]
            rows.call(r, role, op if op != "send" or place == 0 else "recv", begins[r], end, begins[r] - 5, **more)
            free[r] = end

    call("mp", groups["mp"][0], 10)
    for _ in range(4):
        for members in groups["tp"][:2]:
            call("tp", members, 100)
        for members in groups["pp"]:
            call("pp", members, 10, "send")
        for members in groups["tp"][2:]:
            call("tp", members, 100)
        for members in groups["dp_cp"]:
            call("dp_cp", members, 50)
    found = open_run(rows).query("stragglers").rows()
    assert {r["owner_rank"] for r in found if r["slow"]} == {1}
    assert {(r["role"], tuple(r["member_ranks"])) for r in found if r["slow"]} >= {
        ("tp", (0, 1)), ("dp_cp", (0, 2)), ("dp_cp", (1, 3)), ("dp_cp", (4, 6)), ("dp_cp", (5, 7)),
    }  # fmt: skip


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
            "evidence": "splits",
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


def routed(rows: Any) -> Any:
    """Two layers on two expert-parallel ranks: 300 rows go out, half in layer 0, and 100 + 200 in layer 1; and back.

    layer 0: both 150 rows, experts of 40 ns each. layer 1: rank 0 gets 200 rows and computes 90 ns, rank 1 400 and 250.
    """
    for rank in (0, 1):
        rows.rank(rank)
        rows.step(rank, 3, 0, 1000)
        for layer, (begin, sent, got, work, back) in enumerate(
            (
                (100, [75, 75], [75, 75], 40, 160),
                (300, [100, 200], [100, 100] if rank == 0 else [200, 200], 90 if rank == 0 else 250, 600),
            )
        ):
            place = {"recorded_layer": layer, "recorded_microbatch": 0, "recorded_phase": "forward"}
            size = {"dtype": "bfloat16", "group_size": 2, "ranks": [0, 1]}
            rows.call(
                rank, "ep", "all_to_all", begin, begin + 20, begin - 5, seq=2 * layer, in_elems=sum(sent),
                out_elems=sum(got), in_splits=sent, out_splits=got, **size, **place,
            )  # fmt: skip
            rows.kernel(rank, "gemm", begin + 20, begin + 20 + work, begin + 1)
            rows.call(
                rank, "ep", "all_to_all", begin + 20 + work, back, begin + 2, seq=2 * layer + 1, in_elems=sum(got),
                out_elems=sum(sent), in_splits=got, out_splits=sent, **size, **place,
            )  # fmt: skip
            rows.kernel(rank, "attention", back + 5, back + 95, back)
    return rows


def test_expert_cost(open_run: OpenRun, new_rows: NewRows) -> None:
    """Layer 1: 250 ns against a mean of 170; rank 0 waits from 410 to 570, and 80 of it is imbalance at most."""
    found = open_run(routed(new_rows())).query("expert_cost").rows()
    assert [
        (r["layer"], r["imbalance"], r["hot_rank"], r["hot_compute_ns"], r["mean_compute_ns"], r["over_ns"])
        for r in found
    ] == [(0, 1.0, None, None, 40, None), (1, pytest.approx(4 / 3), 1, 250, 170, 80)]
    assert [(r["combine_waiting_ns"], r["at_most_ns"], r["ranks"]) for r in found] == [(0, 0, 2), (160, 80, 2)]


def test_a_hot_rank_that_nobody_waits_for_costs_nothing(open_run: OpenRun, new_rows: NewRows) -> None:
    """Rank 0 comes to the last call after rank 1 although it has fewer rows: whatever held it up was not its experts."""
    rows = routed(new_rows())
    last = [c for c in rows["comm_record"] if c["rank"] == 0][-1]
    last["start_ns"], last["dur_ns"] = 580, 20
    found = open_run(rows).query("expert_cost").rows()[1]
    assert (found["over_ns"], found["combine_waiting_ns"], found["at_most_ns"]) == (80, 10, 0)


def test_expert_balance(open_run: OpenRun, new_rows: NewRows) -> None:
    assert open_run(routed(new_rows())).query("expert_balance").rows() == [
        {
            "step": 3,
            "role": "ep",
            "phase": "forward",
            "evidence": "splits",
            "passes": 2,
            "whole_passes": 2,
            "imbalance_p50": 1.0,
            "imbalance_p90": pytest.approx(4 / 3),
            "imbalance_p99": pytest.approx(4 / 3),
            "imbalance_max": pytest.approx(4 / 3),
            "hot_rank": 1,
            "hot_passes": 1,
            "at_most_ns": 80,
            "costed_passes": 2,
            "contradicted_passes": None,
            "reason": None,
        }
    ]


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        ("all_gather", "its dispatcher gathers all rows: only expert counts would tell, and none are recorded"),
        ("all_to_all", "the splits of its all-to-alls are not recorded, and no expert counts"),
    ],
)
def test_rows_that_no_record_shows_are_not_guessed(open_run: OpenRun, new_rows: NewRows, op: str, reason: str) -> None:
    rows = new_rows()
    for rank in (0, 1):
        rows.rank(rank)
        rows.step(rank, 3, 0, 1000)
        rows.call(
            rank, "ep", op, 100, 120, 90, seq=1, dtype="bfloat16", in_elems=8, out_elems=16, group_size=2, ranks=[0, 1],
            recorded_phase="forward",
        )  # fmt: skip
    (found,) = open_run(rows).query("expert_balance").rows()
    assert (found["phase"], found["imbalance_max"], found["at_most_ns"], found["reason"]) == (
        "forward",
        None,
        None,
        reason,
    )


def counted(rows: Any, rank: int, layer: int, counts: list[int], at: int, **more: Any) -> None:
    """Rows of the two local experts of a rank, of two ranks, in the forward pass of step 3."""
    values = {
        "start_ns": at,
        "recorded_step": 3,
        "recorded_microbatch": 0,
        "recorded_layer": layer,
        "recorded_phase": "forward",
        "ranks": [0, 1],
        "expert_tensor_ranks": 1,
        "first_expert": 2 * rank,
        **more,
    }
    rows.add("expert_rows", rank=rank, source="hook", local_expert_rows=counts, **values)


def gathered(rows: Any) -> Any:
    """Two layers whose rows are gathered, 100 for two experts each: rank 0 computes 60 and 80 of 200, rank 1 the rest.

    layer 0: rank 0 computes 30 ns, rank 1 70, and rank 0 waits. layer 1: both 50.
    """
    for rank in (0, 1):
        rows.rank(rank)
        rows.step(rank, 3, 0, 1000)
        for layer, begin, work, back, counts in (
            (0, 100, 30 if rank == 0 else 70, 200, [25, 35] if rank == 0 else [90, 50]),
            (1, 300, 50, 400, [40, 40] if rank == 0 else [60, 60]),
        ):
            place = {"recorded_layer": layer, "recorded_microbatch": 0, "recorded_phase": "forward", "recorded_step": 3}
            size = {"dtype": "bfloat16", "group_size": 2, "ranks": [0, 1]}
            rows.call(
                rank, "ep", "all_gather", begin, begin + 20, begin - 5, seq=2 * layer, in_elems=100, out_elems=200,
                recorded_component="experts.gather", **size, **place,
            )  # fmt: skip
            counted(rows, rank, layer, counts, begin - 2)
            rows.kernel(rank, "gemm", begin + 20, begin + 20 + work, begin + 1)
            rows.call(
                rank, "ep", "reduce_scatter", begin + 20 + work, back, begin + 2, seq=2 * layer + 1, in_elems=200,
                out_elems=100, recorded_component="experts.scatter", **size, **place,
            )  # fmt: skip
    return rows


def test_counted_rows_of_a_dispatcher_that_gathers(open_run: OpenRun, new_rows: NewRows) -> None:
    """140 of 200 in layer 0, 120 of 200 in layer 1. 70 ns are 20 beyond the mean; rank 0 waits 40 for rank 1."""
    run = open_run(gathered(new_rows()))
    keys = ("layer", "evidence", "group_size", "ranks", "agrees", "imbalance", "hot_rank", "hot_compute_ns")
    costs = run.query("expert_cost").rows()
    assert [tuple(r[k] for k in keys) for r in costs] == [
        (0, "counts", 2, 2, None, 1.4, 1, 70),
        (1, "counts", 2, 2, None, 1.2, 1, 50),
    ]
    keys = ("match_id", "combine_match_id", "mean_compute_ns", "over_ns", "combine_waiting_ns", "at_most_ns")
    assert [tuple(r[k] for k in keys) for r in costs] == [(0, 1, 50, 20, 40, 20), (2, 3, 50, 0, 0, 0)]
    assert run.query("expert_imbalance").rows() == [
        {
            "match_id": 2 * layer,
            "step": 3,
            "role": "ep",
            "phase": "forward",
            "microbatch": 0,
            "layer": layer,
            "turn": layer,
            "evidence": "counts",
            "group_size": 2,
            "ranks": 2,
            "sent_rows": None,
            "received_rows": 200,
            "conserved": None,
            "max_received_rows": most,
            "max_rank": 1,
            "median_received_rows": 200 - most,
            "p95_received_rows": most,
            "imbalance": most / 100,
        }
        for layer, most in ((0, 140), (1, 120))
    ]
    assert run.query("expert_balance").rows() == [
        {
            "step": 3,
            "role": "ep",
            "phase": "forward",
            "evidence": "counts",
            "passes": 2,
            "whole_passes": 2,
            "imbalance_p50": 1.2,
            "imbalance_p90": 1.4,
            "imbalance_p99": 1.4,
            "imbalance_max": 1.4,
            "hot_rank": 1,
            "hot_passes": 2,
            "at_most_ns": 20,
            "costed_passes": 2,
            "contradicted_passes": None,
            "reason": None,
        }
    ]


def test_counted_rows_without_any_call(open_run: OpenRun, new_rows: NewRows) -> None:
    """A dispatcher outside of c10d: rows are known, what they cost is not. Rank 1 lacks the second layer."""
    rows = new_rows()
    for rank in (0, 1):
        rows.rank(rank)
        rows.step(rank, 3, 0, 1000)
    counted(rows, 0, 0, [10, 20], 100)
    counted(rows, 1, 0, [0, 90], 110)
    counted(rows, 0, 1, [5, 5], 200)
    keys = ("match_id", "role", "layer", "ranks", "imbalance", "hot_rank", "hot_compute_ns", "over_ns", "at_most_ns")
    run = open_run(rows)
    assert [tuple(r[k] for k in keys) for r in run.query("expert_cost").rows()] == [
        (None, "ep", 0, 2, 1.5, 1, None, None, None),
        (None, "ep", 1, 1, None, None, None, None, None),
    ]
    (found,) = run.query("expert_balance").rows()
    keys = ("role", "phase", "evidence", "passes", "whole_passes", "imbalance_max", "hot_rank", "at_most_ns", "reason")
    assert tuple(found[k] for k in keys) == ("ep", "forward", "counts", 2, 1, 1.5, 1, None, None)


@pytest.mark.parametrize(
    ("tensor_ranks", "last", "agrees", "contradicted", "reason"),
    [
        (1, [100, 300], True, 0, None),
        (1, [100, 301], False, 1, "experts counted other rows than the splits of their all-to-alls bring"),
        (2, [100, 700], None, None, None),  # the experts also compute what the other tensor-parallel rank received
    ],
)
def test_counted_rows_beside_splits_must_agree(
    open_run: OpenRun,
    new_rows: NewRows,
    tensor_ranks: int,
    last: list[int],
    agrees: Any,
    contradicted: Any,
    reason: Any,
) -> None:
    """routed(): 150 rows for each rank in layer 0; 200 and 400 in layer 1. Splits stay what is judged."""
    rows = routed(new_rows())
    for rank, layer, counts in ((0, 0, [70, 80]), (1, 0, [0, 150]), (0, 1, [150, 50]), (1, 1, last)):
        counted(rows, rank, layer, counts, 122 if layer == 0 else 322, expert_tensor_ranks=tensor_ranks)
    for call in rows["comm_record"]:
        call["recorded_step"] = 3
    run = open_run(rows)
    whole = None if tensor_ranks > 1 else True
    found = [(r["layer"], r["evidence"], r["imbalance"], r["agrees"]) for r in run.query("expert_cost").rows()]
    assert found == [(0, "splits", 1.0, whole), (1, "splits", pytest.approx(4 / 3), agrees)]
    (balance,) = run.query("expert_balance").rows()
    assert (balance["evidence"], balance["contradicted_passes"], balance["reason"]) == ("splits", contradicted, reason)


def test_repeated_layers_are_counted_apart(open_run: OpenRun, new_rows: NewRows) -> None:
    """Recomputation counts again; the backward pass, which is not counted, says so."""
    rows = gathered(new_rows())
    for rank in (0, 1):
        counted(rows, rank, 1, [10, 10] if rank == 0 else [20, 20], 500, recorded_phase="recompute")
        rows.call(
            rank, "ep", "all_gather", 600, 620, 590, seq=4, dtype="bfloat16", in_elems=100, out_elems=200, group_size=2,
            ranks=[0, 1], recorded_phase="backward", recorded_step=3, recorded_component="experts.scatter",
        )  # fmt: skip
    keys = ("phase", "evidence", "passes", "imbalance_max", "reason")
    assert [tuple(r[k] for k in keys) for r in open_run(rows).query("expert_balance").rows()] == [
        (
            "backward",
            None,
            None,
            None,
            "its dispatcher gathers all rows, and experts are counted in the forward pass alone",
        ),
        ("forward", "counts", 2, 1.4, None),
        ("recompute", "counts", 1, pytest.approx(4 / 3), None),
    ]


def test_counts_that_stay_on_the_device_are_said(open_run: OpenRun, new_rows: NewRows) -> None:
    rows = new_rows()
    for rank in (0, 1):
        rows.rank(rank)
        rows.add("issue", rank=rank, severity="info", code="expert_rows_on_device", sentence="They stay there.")
    (found,) = open_run(rows).query("expert_balance").rows()
    assert (found["role"], found["evidence"], found["passes"], found["reason"]) == (
        "ep",
        None,
        None,
        "They stay there.",
    )


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


@pytest.mark.shared
def test_expert_rows_of_a_run_without_devices(shared: Callable[[str], Path], tmp_path: Path) -> None:
    """EP 2, 4 layers, 4 micro-batches: each layer three exchanges a pass; all rows arrive, and no work is claimed.

    32 tokens x 2 samples x 2 ranks go to 2 experts each: 256 rows an exchange.
    """
    import_traces(sorted(shared("traces/mcore_gloo_ep2_alltoall").glob("rank*.json.gz")), tmp_path / "run.parquet")
    with Run.open(tmp_path / "run.parquet") as run:
        rows = run.query("expert_imbalance").rows()
        balance = run.query("expert_balance").rows()
        costs = run.query("expert_cost").rows()
    assert len(rows) == 96
    assert {(r["role"], r["sent_rows"], r["received_rows"], r["conserved"]) for r in rows} == {("ep", 256, 256, True)}
    assert [(r["phase"], r["passes"], r["whole_passes"]) for r in balance] == [
        ("backward", 16, 16),
        ("forward", 16, 16),
    ]
    # work on a device is not known; without it only a hot rank that nobody waited for has a cost: none
    assert {(r["hot_compute_ns"], r["mean_compute_ns"], r["over_ns"]) for r in costs} == {(None, None, None)}
    assert {r["at_most_ns"] for r in costs} == {None, 0}
