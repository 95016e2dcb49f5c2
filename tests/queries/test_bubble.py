"""The bubble of pipelines whose timelines are known, beside the schedule's formula."""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.importers import import_traces
from traceanalyzer.job import Job
from traceanalyzer.reports.bubble import stage_bubbles
from traceanalyzer.run import Run

OpenRun = Callable[..., Run]
NewRows = Callable[[], Any]
Pass = tuple[str, int, int]


def stage(rows: Any, rank: int, stages: int, passes: list[Pass], offset: int = 0) -> None:
    """A rank whose passes ("F" or "B", start, end) are one kernel each, launched 1 ns before or, if it waits, long before."""
    rows.rank(rank, 0, 1000)
    rows.step(rank, 1, 0, 1000)
    rows.add(
        "process_group",
        rank=rank,
        group_id="pp",
        description="PIPELINE_MODEL_PARALLEL_GROUP",
        ranks=list(range(stages)),
    )
    for kind, start, end in passes:
        name = "nn.Module: GPTModel_0" if kind == "F" else "autograd::engine::evaluate_function: AddmmBackward0"
        tid = 1 if kind == "F" else 2
        rows.range(rank, name, start + offset - 2, start + offset, tid)
        rows.kernel(rank, "gemm", start + offset, end + offset, start + offset - 1, tid)


# 1F1B of two stages and two micro-batches, forward 10 and backward 20, from 100 on:
#   stage 0: F 0-10, F 10-20, B 40-60, B 70-90        stage 1: F 10-20, B 20-40, F 40-50, B 50-70
STAGE_0: list[Pass] = [("F", 0, 10), ("F", 10, 20), ("B", 40, 60), ("B", 70, 90)]
STAGE_1: list[Pass] = [("F", 10, 20), ("B", 20, 40), ("F", 40, 50), ("B", 50, 70)]


def two_stages(rows: Any) -> Any:
    stage(rows, 0, 2, STAGE_0, 100)
    stage(rows, 1, 2, STAGE_1, 100)
    # stage 0 waits for gradients in a receive kernel from 120 to 140; a tp all-reduce fills 160-164
    rows.call(0, "pp", "recv", 120, 140, 115)
    rows.call(0, "tp", "all_reduce", 160, 164, 155)
    return rows


def test_bubble(open_run: OpenRun, new_rows: NewRows) -> None:
    common = {"pipeline": 0, "step": 1, "device": 0, "window_ns": 90, "stages_recorded": 2, "stages": 2}
    common |= {"copy_ns": 0, "compute_ns": 60, "steady_ns": 0, "evidence": "kernels", "lower_limit": False}
    common |= {"clocks": "as recorded", "clocks_open_ns": None, "claimed": None}
    assert open_run(two_stages(new_rows())).query("bubble").rows() == [
        {
            "stage": 0,
            "rank": 0,
            "bubble_ns": 21,  # the receive, and 169-170 between launch and start
            "bubble_of_total": 21 / 90,
            "warm_up_ns": 20,
            "cool_down_ns": 1,
            "communication_ns": 4,
            "pp_ns": 20,
            "launch_starved_ns": 5,  # 164-169: in the middle of its passes nothing is launched
            "idle_ns": 1,
        }
        | common,
        {
            "stage": 1,
            "rank": 1,
            "bubble_ns": 30,  # 100-110 before its first pass and 170-190 after its last one
            "bubble_of_total": 30 / 90,
            "warm_up_ns": 10,
            "cool_down_ns": 20,
            "communication_ns": 0,
            "pp_ns": 0,
            "launch_starved_ns": 0,
            "idle_ns": 30,
        }
        | common,
    ]


def test_with_a_stage_unrecorded_the_window_is_a_lower_limit(open_run: OpenRun, new_rows: NewRows) -> None:
    rows = new_rows()
    stage(rows, 1, 2, STAGE_1, 100)
    run = open_run(rows)
    (row,) = run.query("bubble")
    assert (row["window_ns"], row["bubble_ns"], row["stages_recorded"], row["stages"]) == (60, 0, 1, 2)
    assert (row["lower_limit"], row["clocks"], row["clocks_open_ns"], row["claimed"]) == (True, "one", 0, False)
    (found,) = stage_bubbles(run, None)
    assert found.lower_limit
    assert (found.of_total, found.formula, found.reason) == (Fraction(0), None, "no job is known")


def test_without_a_pipeline_there_is_no_bubble(open_run: OpenRun, new_rows: NewRows) -> None:
    rows = new_rows()
    stage(rows, 0, 1, STAGE_0)
    assert open_run(rows).query("bubble").rows() == []


def test_evaluation_has_a_window_of_forward_passes(open_run: OpenRun, new_rows: NewRows) -> None:
    rows = new_rows()
    stage(rows, 0, 2, [("F", 100, 110), ("F", 110, 120)])
    stage(rows, 1, 2, [("F", 110, 120), ("F", 120, 130)])
    found = open_run(rows).query("bubble").rows()
    assert [(r["window_ns"], r["bubble_ns"], r["warm_up_ns"], r["steady_ns"], r["cool_down_ns"]) for r in found] == [
        (30, 10, 0, 0, 10),
        (30, 10, 10, 0, 0),
    ]


def one_f_one_b(stages: int, microbatches: int, forward: int, backward: int) -> list[list[Pass]]:
    """Passes of 1F1B, each as early as its own order and its neighbours allow."""
    orders = []
    for p in range(stages):
        warm = min(microbatches, stages - 1 - p)
        order = [("F", m) for m in range(warm)]
        for m in range(microbatches):
            order += [("F", warm + m)] if warm + m < microbatches else []
            order.append(("B", m))
        orders.append(order)
    ends: dict[tuple[str, int, int], int] = {}
    free, found = [0] * stages, [[] for _ in range(stages)]
    while any(orders):
        for p in range(stages):
            while orders[p]:
                kind, m = orders[p][0]
                before = (kind, p - 1 if kind == "F" else p + 1, m)
                at_end = p == (0 if kind == "F" else stages - 1)
                if at_end and kind == "B":
                    before = ("F", p, m)
                if not (at_end and kind == "F") and before not in ends:
                    break
                start = max(free[p], 0 if at_end and kind == "F" else ends[before])
                free[p] = ends[kind, p, m] = start + (forward if kind == "F" else backward)
                found[p].append((kind, start, free[p]))
                orders[p].pop(0)
    return found


def test_four_stages_and_eight_micro_batches(open_run: OpenRun, new_rows: NewRows) -> None:
    """27.3 % of the pipeline's window on every stage, as the formula (PP-1)/(M+PP-1) = 3/11  says."""
    rows = new_rows()
    for rank, passes in enumerate(one_f_one_b(4, 8, 10, 20)):
        stage(rows, rank, 4, passes, 100)
        for i, (_, start, _) in enumerate(passes):  # a message is waited for from the end of the pass before
            if start > (since := passes[i - 1][2] if i else 0):
                rows.call(rank, "pp", "recv", 100 + since, 100 + start, 100 + since - 1)
    job = Job(world_size=4, pipeline_model_parallel_size=4, micro_batch_size=1, global_batch_size=8)
    found = stage_bubbles(open_run(rows, job), job)
    assert [f.stage for f in found] == [0, 1, 2, 3]
    assert {f.window_ns for f in found} == {330}
    assert [f.bubble_ns for f in found] == [90, 90, 90, 90]
    assert {f.of_total for f in found} == {f.formula for f in found} == {Fraction(3, 11)}


def shifted(rows: Any, rank: int, ahead: int) -> None:
    """Sets a rank's clock ahead."""
    for kind in ("kernel", "cpu_op", "comm_record", "span"):
        for row in rows.get(kind, []):
            if row["rank"] == rank:
                row["start_ns"] += ahead
                if row.get("t_issue_ns") is not None:
                    row["t_issue_ns"] += ahead


def together(rows: Any, ranks: int, scatter: int = 0) -> None:
    """Seven all-reduces of all ranks after the passes, which end together, but for the fourth: that ``scatter`` apart."""
    for rank in range(ranks):
        for turn in range(7):
            end = 620 + 20 * turn + (scatter if rank % 2 and turn == 3 else 0)
            rows.call(
                rank, "mp", "all_reduce", 610 + 20 * turn, end, 605 + 20 * turn, ranks=list(range(ranks)), seq=turn
            )


def test_clocks_that_are_apart_are_aligned_first(open_run: OpenRun, new_rows: NewRows) -> None:
    """1F1B of four stages and eight micro-batches: every stage 3/11 although the clocks differ by more than the window."""
    rows = new_rows()
    for rank, passes in enumerate(one_f_one_b(4, 8, 10, 20)):
        stage(rows, rank, 4, passes, 100)
        for i, (_, start, _) in enumerate(passes):
            if start > (since := passes[i - 1][2] if i else 0):
                rows.call(rank, "pp", "recv", 100 + since, 100 + start, 100 + since - 1)
    together(rows, 4)
    for rank, ahead in enumerate((0, 7_000, -50, 1_234_567)):
        shifted(rows, rank, ahead)
    found = stage_bubbles(open_run(rows), None)
    assert {f.of_total for f in found} == {Fraction(3, 11)}
    assert {(f.window_ns, f.clocks, f.clocks_open_ns, f.claimed) for f in found} == {(330, "aligned", 0, True)}


def test_a_bubble_below_what_the_clocks_leave_open_is_not_claimed(open_run: OpenRun, new_rows: NewRows) -> None:
    """The ends of one call in seven lie 400 ns apart; stage 1 is idle for 30 of 90."""
    rows = new_rows()
    stage(rows, 0, 2, STAGE_0, 100)
    stage(rows, 1, 2, STAGE_1, 100)
    together(rows, 2, 400)
    found = open_run(rows).query("bubble").rows()
    assert [(r["bubble_ns"], r["clocks"], r["clocks_open_ns"], r["claimed"]) for r in found] == [
        (2, "aligned", 400, False),
        (30, "aligned", 400, False),
    ]


def test_without_kernels_the_marks_around_passes_count(open_run: OpenRun, new_rows: NewRows) -> None:
    """The same two stages on CPUs: hooks of stage 0, and ranges in a trace of stage 1. What a pass did is not known."""
    rows = new_rows()
    for rank, passes in enumerate((STAGE_0, STAGE_1)):
        rows.rank(rank, 0, 1000)
        rows.step(rank, 1, 0, 1000)
        ranks = {"ranks": [0, 1], "description": "PIPELINE_MODEL_PARALLEL_GROUP"}
        rows.add("process_group", rank=rank, group_id="pp", **ranks)
        for kind, start, end in passes:
            word = "forward" if kind == "F" else "backward"
            name = {"name": word, "category": word, "source": "hook", "recorded_step": 1} if rank == 0 else {}
            mark = {"name": f"ta:{word}", "category": "user_annotation", **name}
            rows.add("span", rank=rank, start_ns=100 + start, dur_ns=end - start, tid=1, **mark)
    found = open_run(rows).query("bubble").rows()
    assert [
        (r["stage"], r["window_ns"], r["bubble_ns"], r["warm_up_ns"], r["steady_ns"], r["cool_down_ns"]) for r in found
    ] == [(0, 90, 30, 20, 0, 10), (1, 90, 30, 10, 0, 20)]
    unknown = ("compute_ns", "communication_ns", "pp_ns", "copy_ns", "launch_starved_ns", "idle_ns", "device")
    assert {(r["evidence"], *(r[name] for name in unknown)) for r in found} == {("marks", *[None] * 7)}


# a real recording ---------------------------------------------------------------------------------------------------------


def recorded_passes(file: Path) -> list[list[Pass]]:
    """Passes of one stage by iteration, times in ns from the iteration's begin; begin and end of a pass are two events."""
    found: list[list[Pass]] = []
    begun = 0
    for event in json.loads(gzip.decompress(file.read_bytes())):
        if event["name"] == "iteration":
            found += [[]] if event["ph"] == "B" else []
        elif event["ph"] == "B":
            begun = event["rel_ts"]
        else:
            found[-1].append((event["name"][0].upper(), begun, event["rel_ts"]))
    return found


@pytest.mark.shared
def test_an_interleaved_pipeline_of_four_stages(
    shared: Callable[[str], Path], open_run: OpenRun, new_rows: NewRows
) -> None:
    """MegatronApp's own recording, 4 stages x 4 chunks x 8 micro-batches; what lies between passes is taken as waiting.

    Of each iteration from the sixth on, compute is 0.47, 0.45, 0.46 and 0.75 of the median iteration of 716 ms, where the
    schedule alone would leave 3/35 of the window idle.
    """
    rows, expected = new_rows(), {}
    apart = 10_000_000_000
    every = [
        recorded_passes(shared(f"traces/megatronapp_pp4_vpp4/benchmark-data-0-pipeline-{p}-tensor-0.json.gz"))
        for p in range(4)
    ]
    kept = range(5, 20)
    for rank, iterations in enumerate(every):
        rows.rank(rank, 0, 21 * apart)
        rows.add(
            "process_group",
            rank=rank,
            group_id="pp",
            description="PIPELINE_MODEL_PARALLEL_GROUP",
            ranks=[0, 1, 2, 3],
        )
        for i in kept:
            rows.step(rank, i, i * apart, (i + 1) * apart)
            since = i * apart
            for kind, start, end in iterations[i]:
                begin = i * apart + start
                name = "nn.Module: GPTModel_0" if kind == "F" else "autograd::engine::evaluate_function: AddmmBackward0"
                rows.range(rank, name, begin - 2, begin, 1 if kind == "F" else 2)
                rows.kernel(rank, "gemm", begin, i * apart + end, begin - 1, 1 if kind == "F" else 2)
                rows.kernel(rank, "comm", since, begin, since - 1, coalesce_id=0)
                since = i * apart + end
        rows.add("comm_record", rank=rank, call_id=0, coalesce_id=0, op="recv", group_id="pp")
    for i in kept:
        low = min(start for stage in every for _, start, _ in stage[i])
        high = max(end for stage in every for _, _, end in stage[i])
        for rank, stage_passes in enumerate(every):
            busy = sum(end - start for _, start, end in stage_passes[i])
            expected[i, rank] = (high - low, high - low - busy)
    job = Job(
        world_size=4,
        pipeline_model_parallel_size=4,
        num_layers=16,
        virtual_pipeline_model_parallel_size=4,
        micro_batch_size=1,
        global_batch_size=8,
    )
    found = stage_bubbles(open_run(rows, job), job)
    assert {(f.step, f.stage): (f.window_ns, f.bubble_ns) for f in found} == expected
    assert {f.formula for f in found} == {Fraction(3, 35)}
    shares = [
        statistics.median(f.window_ns - f.bubble_ns for f in found if f.stage == stage) / 716e6 for stage in range(4)
    ]
    assert [round(share, 2) for share in shares] == [0.47, 0.45, 0.46, 0.75]


@pytest.mark.shared
def test_a_real_pipeline_without_devices(shared: Callable[[str], Path], tmp_path: Path) -> None:
    """Four stages on CPUs, no mark: the first one's bubble is the time of gloo's messages, which its trace shows.

    The second stage's first pass begins later and its last one ends earlier: the rest of the window is bubble too, but for
    operators that run there (none of a pass).
    """
    import_traces(sorted(shared("traces/mcore_gloo_pp4").glob("rank*.json.gz")), tmp_path / "run.parquet")
    with Run.open(tmp_path / "run.parquet") as run:
        rows = run.query("bubble").rows()
    with gzip.open(shared("traces/mcore_gloo_pp4/rank0.json.gz"), "rt", encoding="utf-8") as text:
        events = json.load(text, parse_float=Fraction)["traceEvents"]
    ranges = sorted(
        (int(e["ts"] * 1000), int(e["ts"] * 1000) + int(e["dur"] * 1000))
        for e in events
        if e.get("ph") == "X" and e["name"] in ("gloo:send", "gloo:recv")
    )
    busy = until = 0
    for start, end in ranges:
        busy += max(0, end - max(start, until))
        until = max(until, end)
    assert {(r["evidence"], r["clocks"], r["stages_recorded"]) for r in rows} == {("operators", "as recorded", 4)}
    assert len({r["window_ns"] for r in rows}) == 1
    assert (rows[0]["stage"], rows[0]["bubble_ns"], rows[0]["pp_ns"], rows[0]["idle_ns"]) == (0, busy, busy, 0)
    for row in rows:
        parts = ("bubble_ns", "compute_ns", "communication_ns", "copy_ns", "launch_starved_ns")
        assert sum(row[p] for p in parts) == row["window_ns"]
        assert (
            row["bubble_ns"]
            == row["warm_up_ns"] + row["steady_ns"] + row["cool_down_ns"]
            == row["pp_ns"] + row["idle_ns"]
        )
