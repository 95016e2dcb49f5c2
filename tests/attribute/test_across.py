"""Matching over ranks, clocks, arrivals and lateness: tiny runs with figures worked out by hand, and a real trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.attribute import across, attach
from traceanalyzer.importers import import_traces
from traceanalyzer.run import Run

OpenRun = Callable[..., Run]
TP = "TENSOR_MODEL_PARALLEL_GROUP"


def call(rank: int, number: int, start: int | None, end: int | None, **more: Any) -> dict[str, Any]:
    """An all-reduce of 8 float32 on group 1, timed by a kernel."""
    return {
        "rank": rank,
        "call_id": number,
        "coalesce_id": number,
        "op": "all_reduce",
        "group_id": "1",
        "dtype": "float32",
        "in_elems": 8,
        "out_elems": 8,
        "t_issue_ns": 0 if start is None else start,
        "start_ns": start,
        "dur_ns": None if start is None or end is None else end - start,
        "time_source": None if start is None else "kernel",
        **more,
    }


def rows(ranks: int, calls: list[dict[str, Any]], groups: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    everyone = list(range(ranks))
    one = [{"rank": r, "group_id": "1", "description": TP, "ranks": everyone, "group_size": ranks} for r in everyone]
    hosts = [{"rank": r, "host": f"node{r // 2}", "window_start_ns": 0, "window_end_ns": 10_000} for r in everyone]
    return {"rank": hosts, "process_group": one if groups is None else groups, "comm_record": calls}


def made(open_run: OpenRun, content: dict[str, Any]) -> Run:
    run = open_run(content)
    attach(run, None)
    across.make(run)
    return run


def matched(run: Run) -> list[tuple[Any, ...]]:
    return run.tuples(
        """SELECT evidence, op, complete, list((rank, call_id) ORDER BY rank, call_id)
           FROM matched_call JOIN matched_member USING (match_id)
           GROUP BY match_id, evidence, op, complete ORDER BY match_id"""
    )


def unmatched(run: Run) -> list[tuple[Any, ...]]:
    return run.tuples("SELECT rank, call_id, reason FROM unmatched_call ORDER BY ALL")


# -- matching ------------------------------------------------------------------------------------------------------------


def test_a_window_that_misses_the_first_call(open_run: OpenRun) -> None:
    """Peer defect 6: rank 1 misses the first of 5 calls; by order every call would be paired with the wrong one."""
    calls = [call(0, i, 100 * i + 10, 100 * i + 50, seq=i + 1) for i in range(5)]
    calls += [call(1, i, 100 * (i + 1) + 10, 100 * (i + 1) + 50, seq=i + 2) for i in range(4)]
    run = made(open_run, rows(2, calls))
    assert matched(run) == [("seq", "all_reduce", True, [(0, i + 1), (1, i)]) for i in range(4)]
    assert unmatched(run) == [(0, 0, "no other rank recorded its number")]
    assert run.value("SELECT max(after_first_ns) FROM arrival") == 0


@pytest.mark.parametrize("ahead", [7, 100], ids=["a number of another step", "no number of both"])
def test_batches_of_messages_may_count_on_the_collectives_number(open_run: OpenRun, ahead: int) -> None:
    """Between the two losses rank 0 issued 6 batches and rank 1 more: its first number is rank 0's second, or nobody's."""
    first, second = {"recorded_step": 0}, {"recorded_step": 1}
    calls = [call(0, 0, 10, 50, seq=1, **first), call(0, 2, 110, 150, seq=8, **second)]
    calls += [call(1, 0, 20, 50, seq=1 + ahead, **first), call(1, 2, 120, 150, seq=8 + ahead, **second)]
    calls += [call(0, 1, 60, 90, op="send", peer=1, seq=2), call(1, 1, 70, 90, op="recv", peer=0, seq=9)]
    run = made(open_run, rows(2, calls))
    assert matched(run) == [
        ("order", "all_reduce", True, [(0, 0), (1, 0)]),
        ("order", "send", True, [(0, 1), (1, 1)]),
        ("order", "all_reduce", True, [(0, 2), (1, 2)]),
    ]
    assert unmatched(run) == []


def test_a_lost_call_does_not_set_the_others_apart(open_run: OpenRun) -> None:
    calls = [call(r, i, 100 * i + 10, 100 * i + 50, seq=i, recorded_step=i) for r in (0, 1) for i in range(3)]
    calls += [call(r, 3, 400, 410, op=op, peer=1 - r, seq=9) for r, op in ((0, "send"), (1, "recv"))]
    del calls[0]
    run = made(open_run, rows(2, calls))
    assert [m[0] for m in matched(run)] == ["seq", "seq", "order"]
    assert unmatched(run) == [(1, 0, "no other rank recorded its number")]


def test_comms_id_comes_first(open_run: OpenRun) -> None:
    """Unsigned 64 bit, and equal on all ranks even where the sequence numbers are not."""
    big = 2**64 - 5
    run = made(open_run, rows(2, [call(0, 0, 10, 50, seq=1, comms_id=big), call(1, 0, 20, 50, seq=7, comms_id=big)]))
    assert matched(run) == [("comms_id", "all_reduce", True, [(0, 0), (1, 0)])]


def test_order_where_all_ranks_made_the_same_calls(open_run: OpenRun) -> None:
    calls = [
        call(rank, i, 100 * i + 10, 100 * i + 50, in_elems=8 + i, out_elems=8 + i) for rank in (0, 1) for i in range(2)
    ]
    run = made(open_run, rows(2, calls))
    assert [m[0] for m in matched(run)] == ["order", "order"]
    fewer = made(open_run, rows(2, calls[:3]))
    assert matched(fewer) == []
    why = "it has no number, and the ranks of its group did not record the same calls"
    assert unmatched(fewer) == [(0, 0, why), (0, 1, why), (1, 0, why)]


def test_order_inside_the_steps_that_are_alike(open_run: OpenRun) -> None:
    """Step 1 lacks a call on rank 1, step 2 is whole."""
    calls = [call(0, i, 100 * i + 10, 100 * i + 50, recorded_step=1 + i // 2) for i in range(4)]
    calls += [call(1, i, 100 * (i + 1) + 10, 100 * (i + 1) + 50, recorded_step=1 if i == 0 else 2) for i in range(3)]
    run = made(open_run, rows(2, calls))
    assert [m[3] for m in matched(run)] == [[(0, 2), (1, 1)], [(0, 3), (1, 2)]]
    assert [(rank, number) for rank, number, _ in unmatched(run)] == [(0, 0), (0, 1), (1, 0)]


def test_what_cannot_be_matched_says_why(open_run: OpenRun) -> None:
    groups = [
        {"rank": r, "group_id": f"ptr:{10 * r + k}", "ranks": [0, 1], "group_size": 2} for r in (0, 1) for k in (0, 1)
    ]
    calls = [
        call(0, 0, 10, 50, group_id="ptr:0"),
        call(0, 1, 110, 150, group_id=None),
        call(0, 2, 210, 250, group_id="1", seq=4),
        call(0, 3, 310, 350, op=None, group_id="1"),
        call(1, 0, 210, 250, group_id="1", seq=4, op="broadcast"),
        call(0, 4, 410, 450, group_id="1", op="send", peer=1),
    ]
    assert unmatched(made(open_run, rows(2, calls, groups))) == [
        (0, 0, "the group is an address beside others of the same ranks"),
        (0, 1, "its group is not named"),
        (0, 2, "its number names another operation on another rank"),
        (0, 3, "its operation is not known"),
        (0, 4, "rank 1 recorded no such messages"),
        (1, 0, "its number names another operation on another rank"),
    ]


def test_an_address_is_the_groups_ranks(open_run: OpenRun) -> None:
    groups = [{"rank": r, "group_id": f"ptr:{r}", "ranks": [0, 1], "group_size": 2} for r in (0, 1)]
    calls = [call(r, 0, 10, 50, group_id=f"ptr:{r}", seq=3) for r in (0, 1)]
    assert matched(made(open_run, rows(2, calls, groups))) == [("seq", "all_reduce", True, [(0, 0), (1, 0)])]


def test_a_name_of_several_groups_is_told_apart_by_ranks(open_run: OpenRun) -> None:
    """Ranks that count their groups by themselves name two pairs alike; of rank 4 the pair is not known."""
    pairs = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3], 4: None}
    groups = [{"rank": r, "group_id": "7", "ranks": ranks, "group_size": 2} for r, ranks in pairs.items()]
    run = made(open_run, rows(5, [call(r, 0, 10, 50, group_id="7", seq=1) for r in pairs], groups))
    assert [m[3] for m in matched(run)] == [[(0, 0), (1, 0)], [(2, 0), (3, 0)]]
    assert unmatched(run) == [(4, 0, "the name of its group stands for several, and its ranks are not known")]


def test_messages_match_in_order_of_each_pair(open_run: OpenRun) -> None:
    """Both ranks send two and receive two; their own numbers say nothing of the other's."""
    calls = [
        call(0, 0, 10, 20, op="send", peer=1, seq=1),
        call(0, 1, 30, 40, op="recv", peer=1, seq=2),
        call(0, 2, 50, 60, op="send", peer=1, seq=3),
        call(1, 0, 10, 20, op="recv", peer=0, seq=1),
        call(1, 1, 30, 40, op="recv", peer=0, seq=2),
        call(1, 2, 50, 60, op="send", peer=0, seq=3),
    ]
    run = made(open_run, rows(2, calls))
    assert sorted(m[3] for m in matched(run)) == [[(0, 0), (1, 0)], [(0, 1), (1, 2)], [(0, 2), (1, 1)]]
    assert {m[:3] for m in matched(run)} == {("order", "send", True)}


def test_groups_of_one_rank_are_no_matter(open_run: OpenRun) -> None:
    alone = [{"rank": 0, "group_id": "1", "ranks": [0], "group_size": 1}]
    run = made(open_run, rows(1, [call(0, 0, 10, 50, group_size=1)], alone))
    assert (matched(run), unmatched(run)) == ([], [])


# -- clocks --------------------------------------------------------------------------------------------------------------


def clocks(run: Run) -> dict[int, tuple[int, int, float | None]]:
    return {
        r: (ref, off, drift)
        for r, ref, off, drift in run.tuples("SELECT rank, reference_rank, offset_ns, drift_ppb FROM clock")
    }


def test_an_offset_is_recovered_and_is_no_skew(open_run: OpenRun) -> None:
    """Peer defect 10: rank 1's clock is 500 us ahead, its calls start with rank 0's."""
    ahead = 500_000
    calls = [call(0, i, 10_000 * i + 10, 10_000 * i + 500, seq=i) for i in range(3)]
    calls += [call(1, i, 10_000 * i + 10 + ahead, 10_000 * i + 500 + ahead, seq=i) for i in range(3)]
    run = made(open_run, rows(2, calls))
    assert clocks(run) == {0: (0, 0, None), 1: (0, ahead, None)}
    assert run.tuples("SELECT DISTINCT recorded_ns, aligned_ns FROM end_spread") == [(ahead, 0)]
    assert run.value("SELECT max(after_first_ns) FROM arrival") == 0


def test_a_drift_is_recovered(open_run: OpenRun) -> None:
    """Rank 1 is 1000 ns ahead at the first end and gains 10 ns in 1 ms: 10,000 ppb."""
    ends = [1_000_000 * i for i in range(1, 11)]
    calls = [call(0, i, end - 400, end, seq=i) for i, end in enumerate(ends)]
    calls += [call(1, i, end + 1000 + 10 * i - 400, end + 1000 + 10 * i, seq=i) for i, end in enumerate(ends)]
    run = made(open_run, rows(2, calls))
    reference, offset, drift = clocks(run)[1]
    assert (reference, offset) == (0, 1000)
    assert drift == pytest.approx(10_000, abs=1)
    assert run.value("SELECT max(aligned_ns) FROM end_spread") <= 1


def test_clocks_go_through_several_groups(open_run: OpenRun) -> None:
    """Ranks 0-1 and 1-2 share groups: rank 2's offset to rank 0 is the sum, +300 and -100. Calls connect ranks
    3-4 with each other alone, but rank 3 shares a host with rank 2, and so its clock."""
    members = {"a": [0, 1], "b": [1, 2], "c": [3, 4]}
    offset = {0: 0, 1: 300, 2: 200, 3: 0, 4: 7}
    groups = [
        {"rank": r, "group_id": g, "ranks": ranks, "group_size": 2} for g, ranks in members.items() for r in ranks
    ]
    calls, number = [], dict.fromkeys(offset, 0)
    for turn, (g, ranks) in enumerate([("a", [0, 1]), ("b", [1, 2]), ("c", [3, 4]), ("a", [0, 1]), ("b", [1, 2])]):
        for r in ranks:
            at = 1000 * turn + offset[r]
            calls.append(call(r, number[r], at + 10, at + 90, group_id=g, seq=turn))
            number[r] += 1
    run = made(open_run, rows(5, calls, groups))
    assert {r: c[:2] for r, c in clocks(run).items()} == {0: (0, 0), 1: (0, 300), 2: (0, 200), 3: (0, 200), 4: (0, 207)}


@pytest.mark.parametrize("op", ["broadcast", "reduce"])
def test_what_does_not_complete_together_sets_no_clock(open_run: OpenRun, op: str) -> None:
    calls = [call(r, 0, 10, 100 + 400 * r, seq=1, op=op) for r in (0, 1)]
    content = rows(2, calls)
    for row in content["rank"]:
        row["host"] = f"node{row['rank']}"
    run = made(open_run, content)
    assert clocks(run) == {0: (0, 0, None), 1: (1, 0, None)}
    assert run.tuples("FROM end_spread") == []
    assert run.tuples("FROM arrival") == [], "without a common clock nobody is late"


def test_a_pipeline_of_one_host_needs_no_collective(open_run: OpenRun) -> None:
    """Two stages on one node that send only: they are compared by its clock, and 50 us are left open."""
    pair = [{"rank": r, "group_id": "p", "ranks": [0, 1], "group_size": 2} for r in (0, 1)]
    messages = [
        call(0, 0, 70_000, 90_000, op="send", group_id="p", peer=1),
        call(1, 0, 10_000, 91_000, op="recv", group_id="p", peer=0),
    ]
    run = made(open_run, rows(2, messages, pair))
    assert run.tuples("SELECT rank, reference_rank, offset_ns, calls, open_ns, evidence FROM clock") == [
        (0, 0, 0, 0, 50_000, "host"),
        (1, 0, 0, 0, 50_000, "host"),
    ]
    assert run.tuples(
        "SELECT rank, after_first_ns, transfer_ns, waiting_ns, residual_ns FROM arrival ORDER BY rank"
    ) == [
        (0, 60_000, 20_000, 0, 50_000),
        (1, 0, 20_000, 61_000, 50_000),
    ]


def test_calls_without_a_group_are_on_the_ranks_only_one_of_the_role(open_run: OpenRun) -> None:
    """Exchanges of experts whose group is not named match in order, whatever rows each rank hands in."""
    groups = [
        {"rank": r, "group_id": role, "description": text, "ranks": ranks, "group_size": len(ranks)}
        for r in (0, 1)
        for role, text, ranks in (
            ("e", "EXPERT_MODEL_PARALLEL_GROUP", [0, 1]),
            ("t", TP, [r]),
            ("c", "CONTEXT_PARALLEL_GROUP", [r]),
        )
    ]
    calls = [
        call(r, i, 100 * i + 10 * r, 100 * i + 50, op="all_to_all", group_id=None, in_elems=8 + 4 * r)
        for r in (0, 1)
        for i in (0, 1)
    ]
    run = made(open_run, rows(2, calls, groups))
    assert run.tuples("SELECT match_id, evidence, role, group_size, members, complete FROM matched_call") == [
        (0, "order", "ep", 2, 2, True),
        (1, "order", "ep", 2, 2, True),
    ]


def test_one_call_that_ended_elsewhere_does_not_move_the_clock(open_run: OpenRun) -> None:
    """The tenth call ends 90,000 ns apart, the others 100 by rank 1's offset and 0 or 2 by chance."""
    calls = []
    for i in range(10):
        end = 10_000 * (i + 1)
        calls.append(call(0, i, end - 400, end, seq=i))
        calls.append(call(1, i, end - 400, end + (90_000 if i == 9 else 100 + 2 * (i % 2)), seq=i))
    run = made(open_run, rows(2, calls))
    assert abs(clocks(run)[1][1] - 100) <= 5


# -- arrivals and lateness -----------------------------------------------------------------------------------------------


def test_transfer_waiting_and_who_is_late(open_run: OpenRun) -> None:
    """Two calls of 3 ranks, clocks equal. In the second, ranks 0, 1, 2 come at 200, 260, 230 after all left at 100."""
    calls = [call(r, 0, 50, 100, seq=1) for r in range(3)]
    calls += [call(0, 1, 200, 300, seq=2), call(1, 1, 260, 300, seq=2), call(2, 1, 230, 300, seq=2)]
    run = made(open_run, rows(3, calls))
    assert run.tuples(
        """SELECT rank, after_first_ns, last, transfer_ns, waiting_ns, residual_ns FROM arrival WHERE match_id = 1
           ORDER BY rank"""
    ) == [(0, 0, False, 40, 60, 0), (1, 60, True, 40, 0, 0), (2, 30, False, 40, 30, 0)]
    assert run.tuples(
        "SELECT rank, late_ns, own_ns, inherited_ns, owner_rank, chain, outside FROM lateness ORDER BY match_id, rank"
    ) == [
        (0, 0, None, None, None, 0, True),
        (1, 0, None, None, None, 0, True),
        (2, 0, None, None, None, 0, True),
        (0, 0, 0, 0, 0, 0, False),
        (1, 60, 60, 0, 1, 0, False),
        (2, 30, 30, 0, 2, 0, False),
    ]


def chained(third: int) -> dict[str, Any]:
    """Groups a = 0, 1 and b = 1, 2. Rank 0 is late to a by itself, which makes rank 1 late to b.

    All left a first call at 100. a: rank 0 comes at 500, rank 1 at 200, end at 520. b: rank 2 comes at 210, rank 1 at
    520 + ``third``, end at 20 later.
    """
    groups = [
        {"rank": r, "group_id": g, "description": TP, "ranks": ranks, "group_size": len(ranks)}
        for g, ranks in {"w": [0, 1, 2], "a": [0, 1], "b": [1, 2]}.items()
        for r in ranks
    ]
    late = 520 + third
    calls = [call(r, 0, 50, 100, group_id="w", seq=1) for r in range(3)]
    calls += [call(0, 1, 500, 520, group_id="a", seq=1), call(1, 1, 200, 520, group_id="a", seq=1)]
    calls += [call(1, 2, late, late + 20, group_id="b", seq=1), call(2, 1, 210, late + 20, group_id="b", seq=1)]
    return rows(3, calls, groups)


def lateness_to_b(run: Run) -> list[tuple[Any, ...]]:
    return run.tuples(
        """SELECT l.rank, late_ns, own_ns, inherited_ns, owner_rank, owner_match_id, chain
           FROM lateness l JOIN matched_call m USING (match_id) WHERE m.member_ranks = [1, 2] ORDER BY l.match_id, l.rank"""
    )


def test_inherited_lateness_is_followed_to_its_owner(open_run: OpenRun) -> None:
    """Rank 1 comes to b 340 after rank 2: it left a 420 later than rank 2 left w, so all of it is inherited from rank 0."""
    assert lateness_to_b(made(open_run, chained(30)))[0] == (1, 340, 0, 340, 0, 1, 1)


def test_the_larger_part_names_the_owner(open_run: OpenRun) -> None:
    """Rank 1 takes 900 of its own after a: 420 of 1,210 is inherited, 790 is its own."""
    assert lateness_to_b(made(open_run, chained(900)))[0] == (1, 1210, 790, 420, 1, 2, 0)


def test_a_chain_that_leaves_the_recording(open_run: OpenRun) -> None:
    """As before, but rank 0 was not recorded: what made rank 1 late in a lies outside."""
    content = chained(30)
    content["comm_record"] = [c for c in content["comm_record"] if c["rank"] != 0]
    run = made(open_run, content)
    # a was recorded on rank 1 alone: it held rank 1 up, and whom it waited for there is not known
    assert lateness_to_b(run)[-2:] == [(1, 340, 0, 340, None, None, 1), (2, 0, 0, 0, 2, 2 - 1, 0)]
    assert run.tuples("SELECT rank, reason FROM unmatched_call") == [(1, "no other rank recorded its number")]


# -- a real trace --------------------------------------------------------------------------------------------------------


@pytest.mark.shared
def test_eight_real_ranks(shared: Callable[[str], Path], tmp_path: Path) -> None:
    """Megatron TP 8 on one A100 node: the 84 all-reduces end 30 us apart in the median and 49 us at most, and ranks 0 and 6
    come last to most of them: their own kernels run 241 and 264 ms, those of the others 413 to 495."""
    import_traces(sorted(shared("traces/megatron_tp8_a100").glob("megatron_kineto_*")), tmp_path / "run.parquet")
    with Run.open(tmp_path / "run.parquet") as run:
        attach(run, None)
        across.make(run)
        assert run.tuples("SELECT evidence, complete, count(*) FROM matched_call GROUP BY ALL") == [("seq", True, 84)]
        assert run.tuples("FROM unmatched_call") == []
        assert run.tuples("SELECT median(recorded_ns), max(recorded_ns) FROM end_spread") == [(30_000.0, 49_000)]
        durations = dict(run.tuples("SELECT rank, sum(dur_ns) // 1000000 FROM arrival GROUP BY rank"))
        assert durations == {0: 241, 1: 481, 2: 413, 3: 472, 4: 495, 5: 490, 6: 263, 7: 481}
        lasts = dict(run.tuples("SELECT rank, count(*) FROM arrival WHERE last GROUP BY rank"))
        assert set(sorted(lasts, key=lambda r: -lasts[r])[:2]) == {0, 6}
        assert run.value("SELECT max(residual_max_ns) FROM clock") < 49_000
        # the figures come to the same in total: a call's duration is transfer and waiting, within what the ends differ
        over = run.value("SELECT max(abs(dur_ns - transfer_ns - waiting_ns)) FROM arrival")
        assert over < 50_000
