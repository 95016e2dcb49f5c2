"""Every nanosecond of a step has one class: literal timelines, an independent sweep in SQL, and real traces."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.importers import import_traces
from traceanalyzer.run import Run

OpenRun = Callable[..., Run]
NewRows = Callable[[], Any]
DESCRIPTIONS = {"tp": "TENSOR_MODEL_PARALLEL_GROUP", "pp": "PIPELINE_MODEL_PARALLEL_GROUP"}
CLASSES = ("compute_ns", "communication_ns", "pp_ns", "copy_ns", "launch_starved_ns", "idle_ns")


def one_of_each(rows: Any, rank: int = 0) -> Any:
    """A step [100, 200) with every class.

    100 nothing launched .. 105 launched .. 110 gemm .. 120 tp beside it .. 130 tp alone .. 140 tp and dp_cp .. 145 dp_cp
    .. 150 copy .. 155 launched .. 160 gemm .. 170 nothing .. 171 launched .. 172 pp .. 176 nothing .. 185 launched ..
    190 gemm, which outlives the step
    """
    rows.rank(rank, 90, 300)
    rows.step(rank, 3, 100, 200)
    rows.kernel(rank, "gemm", 110, 130, 105)
    rows.call(rank, "tp", "all_reduce", 120, 145, 106)
    rows.call(rank, "dp_cp", "reduce_scatter", 140, 150, 107)
    rows.kernel(rank, "copy", 150, 155, 108)
    rows.kernel(rank, "attention", 160, 170, 150)
    rows.call(rank, "pp", "send", 172, 176, 171)
    rows.kernel(rank, "gemm", 190, 205, 185)
    return rows


def test_time_classes(open_run: OpenRun, new_rows: NewRows) -> None:
    assert open_run(one_of_each(new_rows())).query("time_classes").rows() == [
        {
            "rank": 0,
            "device": 0,
            "step": 3,
            "dur_ns": 100,
            "compute_ns": 40,  # 110-130, 160-170, 190-200
            "communication_ns": 20,  # 130-150
            "pp_ns": 4,
            "copy_ns": 5,
            "launch_starved_ns": 15,  # 100-105, 170-171, 176-185
            "idle_ns": 16,  # 105-110, 155-160, 171-172, 185-190
            "overlapped_ns": 10,  # 120-130
            "shared_ns": 5,  # 140-145
            "basis": "device",
            "complete": True,
        }
    ]


def test_exposed_by_role(open_run: OpenRun, new_rows: NewRows) -> None:
    unmatched = {"transfer_ns": None, "waiting_ns": None, "reason": "needs the other ranks: query exposed_split"}
    common = {"rank": 0, "device": 0, "step": 3, **unmatched}
    assert open_run(one_of_each(new_rows())).query("exposed_by_role").rows() == [
        {"role": "dp_cp", "busy_ns": 10, "overlapped_ns": 0, "exposed_ns": 5, "shared_ns": 5, "shared_with": ["tp"]}
        | common,
        {"role": "pp", "busy_ns": 4, "overlapped_ns": 0, "exposed_ns": 4, "shared_ns": 0, "shared_with": None} | common,
        {"role": "tp", "busy_ns": 25, "overlapped_ns": 10, "exposed_ns": 10, "shared_ns": 5, "shared_with": ["dp_cp"]}
        | common,
    ]


def test_exposed_split(open_run: OpenRun, new_rows: NewRows) -> None:
    """Two all-reduces end together; rank 1 comes 12 later to the first, so that rank 0 waits 12 of its 20 exposed ns.

    Of the second rank 0 has compute on the first 10 of 30; it waits 14, of which 4 are exposed. The third has no
    counterpart on rank 1.
    """
    rows = new_rows()
    both = {"ranks": [0, 1], "group_size": 2}
    for rank in (0, 1):
        rows.rank(rank)
        rows.step(rank, 1, 0, 200)
    rows.call(0, "tp", "all_reduce", 20, 40, 10, seq=1, **both)
    rows.call(1, "tp", "all_reduce", 32, 40, 12, seq=1, **both)
    rows.kernel(0, "gemm", 50, 70, 45)
    rows.call(0, "tp", "all_reduce", 60, 90, 50, seq=2, **both)
    rows.call(1, "tp", "all_reduce", 74, 90, 52, seq=2, **both)
    rows.call(0, "tp", "all_reduce", 100, 105, 95, seq=3, **both)
    found = open_run(rows).query("exposed_split").rows()
    assert found == [
        {
            "rank": rank,
            "device": 0,
            "step": 1,
            "role": "tp",
            "exposed_ns": exposed,
            "transfer_ns": transfer,
            "waiting_ns": waiting,
            "unsplit_ns": unsplit,
        }
        for rank, exposed, transfer, waiting, unsplit in (
            (0, 20 + 20 + 5, 8 + 16, 12 + 4, 5),
            (1, 8 + 16, 8 + 16, 0, 0),
        )
    ]


def test_overlap(open_run: OpenRun, new_rows: NewRows) -> None:
    # 120-150 and 172-176; gemm hides 120-130
    assert open_run(one_of_each(new_rows())).query("overlap").rows() == [
        {
            "rank": 0,
            "device": 0,
            "step": 3,
            "communication_ns": 34,
            "overlapped_ns": 10,
            "exposed_ns": 24,
            "overlapped_share": 10 / 34,
        }
    ]


def test_nothing_communicates(open_run: OpenRun, new_rows: NewRows) -> None:
    rows = new_rows()
    rows.rank(0)
    rows.step(0, 1, 0, 10)
    rows.kernel(0, "gemm", 2, 4, 1)
    (row,) = open_run(rows).query("overlap")
    assert (row["communication_ns"], row["overlapped_ns"], row["exposed_ns"], row["overlapped_share"]) == (
        0,
        0,
        0,
        None,
    )


def test_work_of_unknown_launch_makes_its_own_gap_idle(open_run: OpenRun, new_rows: NewRows) -> None:
    rows = new_rows()
    rows.rank(0)
    rows.step(0, 1, 0, 100)
    rows.kernel(0, "gemm", 10, 20)  # nobody knows since when it waited: 0-10 idle
    rows.kernel(0, "gemm", 40, 50, 35)  # 20-35 nothing launched, 35-40 idle
    rows.kernel(0, "gemm", 60, 70)  # 50-60 idle; 70-100 nothing launched
    (row,) = open_run(rows).query("time_classes")
    assert {name: row[name] for name in CLASSES} == {
        "compute_ns": 30,
        "communication_ns": 0,
        "pp_ns": 0,
        "copy_ns": 0,
        "launch_starved_ns": 45,
        "idle_ns": 25,
    }


def test_without_launch_times_nothing_is_called_starved(open_run: OpenRun, new_rows: NewRows) -> None:
    rows = new_rows()
    rows.rank(0)
    rows.step(0, 1, 0, 100)
    rows.kernel(0, "gemm", 10, 20)
    (row,) = open_run(rows).query("time_classes")
    assert (row["compute_ns"], row["launch_starved_ns"], row["idle_ns"]) == (10, None, 90)


def test_communication_of_unknown_role_is_exposed_communication(open_run: OpenRun, new_rows: NewRows) -> None:
    rows = new_rows()
    rows.rank(0)
    rows.step(0, 1, 0, 100)
    rows.kernel(0, "comm", 10, 30, 5)
    run = open_run(rows)
    (row,) = run.query("time_classes")
    assert (row["communication_ns"], row["compute_ns"]) == (20, 0)
    assert [(r["role"], r["exposed_ns"]) for r in run.query("exposed_by_role")] == [("unknown", 20)]


def test_devices_of_one_process_and_two_ranks_stand_apart(open_run: OpenRun, new_rows: NewRows) -> None:
    rows = new_rows()
    for rank in (0, 1):
        rows.rank(rank)
        rows.step(rank, 1, 0, 100)
    rows.kernel(0, "gemm", 10, 20, 1)
    rows.kernel(0, "gemm", 15, 40, 1, device=1)
    rows.kernel(1, "gemm", 10, 50, 1)
    found = open_run(rows).query("time_classes").rows()
    assert [(r["rank"], r["device"], r["compute_ns"]) for r in found] == [(0, 0, 10), (0, 1, 25), (1, 0, 40)]


def test_a_rank_without_a_device_has_the_time_of_its_host(open_run: OpenRun, new_rows: NewRows) -> None:
    """Operators on two threads: 10-30 and 25-40 compute; gloo's ranges 35-60 (tp) and 70-80 (pp).

    Nested operators count once. What communicates, autograd's ranges and modules are no operators that compute.
    """
    rows = new_rows()
    rows.rank(0)
    rows.step(0, 1, 0, 100)
    for name, start, end, tid in (
        ("aten::mm", 10, 30, 1),
        ("aten::view", 12, 14, 1),
        ("aten::add", 25, 40, 2),
        ("c10d::allreduce_", 41, 60, 1),
        ("autograd::engine::evaluate_function: MulBackward0", 62, 90, 1),
        ("nn.Module: MLP_0", 0, 99, 1),
        ("_ReduceFromModelParallelRegion", 40, 65, 1),
    ):
        rows.range(0, name, start, end, tid)
    call = {"rank": 0, "completeness": "full", "time_source": "backend_range"}
    for number, (role, op, start, end) in enumerate((("tp", "all_reduce", 35, 60), ("pp", "send", 70, 80))):
        rows.add("process_group", rank=0, group_id=role, description=DESCRIPTIONS[role])
        rows.add("comm_record", call_id=number, op=op, group_id=role, start_ns=start, dur_ns=end - start, **call)
    rows.rank(1)
    rows.step(1, 1, 0, 100)
    rows.kernel(1, "gemm", 10, 20, 5)
    rows.range(1, "aten::mm", 5, 90, 1)
    run = open_run(rows)
    first, second = run.query("time_classes").rows()
    assert first == {
        "rank": 0,
        "device": None,
        "step": 1,
        "dur_ns": 100,
        "compute_ns": 30,
        "communication_ns": 20,
        "pp_ns": 10,
        "copy_ns": 0,
        "launch_starved_ns": None,
        "idle_ns": 40,
        "overlapped_ns": 5,
        "shared_ns": 0,
        "basis": "host",
        "complete": True,
    }
    assert (second["rank"], second["device"], second["compute_ns"], second["basis"]) == (1, 0, 10, "device")
    assert [(r["rank"], r["role"], r["busy_ns"], r["overlapped_ns"]) for r in run.query("exposed_by_role")] == [
        (0, "pp", 10, 0),
        (0, "tp", 25, 5),
    ]


def test_step_time(open_run: OpenRun, new_rows: NewRows) -> None:
    rows = new_rows()
    rows.rank(0, 0, 900)
    rows.step(0, 5, 100, 350)
    rows.step(0, 6, 350, 500)
    rows.rank(None, 20, 70)
    assert open_run(rows).query("step_time").rows() == [
        {
            "rank": 0,
            "step": 5,
            "start_ns": 100,
            "end_ns": 350,
            "dur_ns": 250,
            "end_recorded": True,
            "evidence": "profiler_step",
            "complete": True,
        },
        {
            "rank": 0,
            "step": 6,
            "start_ns": 350,
            "end_ns": 500,
            "dur_ns": 150,
            "end_recorded": True,
            "evidence": "profiler_step",
            "complete": True,
        },
        {
            "rank": None,
            "step": 0,
            "start_ns": 20,
            "end_ns": 70,
            "dur_ns": 50,
            "end_recorded": False,
            "evidence": "window",
            "complete": True,
        },
    ]


def test_step_spread(open_run: OpenRun, new_rows: NewRows) -> None:
    rows = new_rows()
    for rank, start, dur in ((0, 100, 50), (1, 104, 70), (2, 90, 70), (3, 101, 61)):
        rows.rank(rank)
        rows.step(rank, 7, start, start + dur)
    assert open_run(rows).query("step_spread").rows() == [
        {
            "step": 7,
            "ranks": 4,
            "min_dur_ns": 50,
            "median_dur_ns": 61,
            "max_dur_ns": 70,
            "longest_rank": 1,
            "start_spread_ns": 14,
        }
    ]


# the same by another way --------------------------------------------------------------------------------------------------

# Both edges of each activity with a weight of its own per class in one packed counter; one running sum (reference: ingest
# speed, section 7). Launched work that waits is an activity of its own.
PACKED = """
WITH numbered AS (SELECT unnest(['compute', 'copy', 'pending', 'tp', 'dp_cp', 'pp']) AS what, unnest(range(6)) AS i),
activity AS (
  SELECT CASE WHEN kernel_class = 'comm' THEN role WHEN kernel_class IN ('copy', 'memset') THEN 'copy' ELSE 'compute' END
           AS what, start_ns AS a, start_ns + dur_ns AS b FROM kernel_place
  UNION ALL SELECT 'pending', launch_ns, start_ns FROM kernel_place WHERE launch_ns < start_ns
),
edge AS (
  SELECT t, w FROM (SELECT a AS t, 1::BIGINT << (10 * i) AS w FROM activity JOIN numbered USING (what))
  UNION ALL SELECT b, -(1::BIGINT << (10 * i)) FROM activity JOIN numbered USING (what)
  UNION ALL SELECT step_start_ns, 0 FROM step_range UNION ALL SELECT step_end_ns, 0 FROM step_range
),
stretch AS (
  SELECT t, lead(t) OVER (ORDER BY t) AS until, sum(w) OVER (ORDER BY t)::BIGINT AS n FROM edge
),
classed AS (
  SELECT s.t, s.until - s.t AS ns, p.step,
         CASE WHEN n & 1023 > 0 THEN 'compute'
              WHEN (n >> 30) & 1023 > 0 OR (n >> 40) & 1023 > 0 THEN 'communication'
              WHEN (n >> 50) & 1023 > 0 THEN 'pp'
              WHEN (n >> 10) & 1023 > 0 THEN 'copy'
              WHEN (n >> 20) & 1023 > 0 THEN 'idle' ELSE 'launch_starved' END AS class
  FROM stretch s ASOF JOIN step_range p ON s.t >= p.step_start_ns WHERE s.until > s.t AND s.t < p.step_end_ns
)
SELECT step, class, sum(ns)::BIGINT FROM classed GROUP BY ALL
"""


@pytest.mark.parametrize("seed", range(3))
def test_the_sweep_and_the_packed_sweep_in_sql_agree_to_the_nanosecond(
    open_run: OpenRun, new_rows: NewRows, seed: int
) -> None:
    chance = random.Random(seed)
    base = 1_790_857_026_000_000_000
    rows = new_rows()
    rows.rank(0, base, base + 3_000_000)
    for i in range(3):
        rows.step(0, i + 1, base + i * 900_000, base + i * 900_000 + 800_000 + i)
    for _ in range(700):
        start = base + chance.randrange(2_600_000)
        end = start + chance.choice((1, chance.randrange(1, 900), chance.randrange(1, 4_000)))
        launch = start - chance.randrange(3_000)
        what = chance.choice(("gemm", "gemm", "norm", "copy", "memset", "tp", "dp_cp", "pp"))
        if what in ("tp", "dp_cp", "pp"):
            rows.call(0, what, "send" if what == "pp" else "all_reduce", start, end, launch)
        else:
            rows.kernel(0, what, start, end, launch)
    run = open_run(rows)
    found = {
        (row["step"], name.removesuffix("_ns")): row[name]
        for row in run.query("time_classes")
        for name in CLASSES
        if row[name]
    }
    assert found == {(step, name): ns for step, name, ns in run.tuples(PACKED)}
    assert len(found) == 18  # six classes in each of three steps


# real traces --------------------------------------------------------------------------------------------------------------

SETS = (
    "nanogpt_dp8_h100",
    "megatron_tp8_a100",
    "torchao_ep_moe_b200",
    "hta_nccl_metadata_a100_x2",
    "torchrec_a2a_v100_x4",
    "param_dlrm_v100_x8",
    "tracelens_gpu_only_mi210",
    "tracelens_qwen_h100_x1",
)


@pytest.mark.shared
@pytest.mark.parametrize("name", SETS)
def test_the_classes_sum_to_the_step_on_real_traces(shared: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    import_traces([shared(f"traces/{name}")], tmp_path / "run.parquet")
    with Run.open(tmp_path / "run.parquet") as run:
        steps = {(s["rank"], s["step"], s["dur_ns"]) for s in run.query("step_time")}
        found = run.query("time_classes").rows()
        roles = run.query("exposed_by_role").rows()
    assert {(r["rank"], r["step"], r["dur_ns"]) for r in found} == steps
    for row in found:
        assert sum(row[c] or 0 for c in CLASSES) == row["dur_ns"] > 0
        assert row["compute_ns"] > 0
        here = [r for r in roles if (r["rank"], r["device"], r["step"]) == (row["rank"], row["device"], row["step"])]
        assert sum(r["exposed_ns"] for r in here) + row["shared_ns"] == row["communication_ns"] + row["pp_ns"]
        assert all(r["busy_ns"] == r["overlapped_ns"] + r["exposed_ns"] + r["shared_ns"] for r in here)


@pytest.mark.shared
def test_ranks_without_a_device(shared: Callable[[str], Path], tmp_path: Path) -> None:
    """TP 2 with gloo: the classes sum to each step; gloo's ranges, united, are what communicates, hidden or not."""
    import_traces(sorted(shared("traces/mcore_gloo_tp2").glob("rank*.json.gz")), tmp_path / "run.parquet")
    with Run.open(tmp_path / "run.parquet") as run:
        found = run.query("time_classes").rows()
        steps = {(s["rank"], s["step"], s["dur_ns"]) for s in run.query("step_time")}
        ranges = run.tuples(
            """SELECT c.rank, greatest(c.start_ns, s.start_ns), least(c.end_ns, s.end_ns) FROM comm c
               JOIN device_step s ON s.rank_key = c.rank WHERE c.start_ns IS NOT NULL ORDER BY ALL"""
        )
    assert {(r["rank"], r["step"], r["dur_ns"]) for r in found} == steps
    for row in found:
        assert (row["device"], row["basis"], row["launch_starved_ns"]) == (None, "host", None)
        assert sum(row[c] or 0 for c in CLASSES) == row["dur_ns"] > row["compute_ns"] > 0
        busy, reached = 0, 0
        for rank, start, end in ranges:
            if rank == row["rank"]:
                busy += max(0, end - max(start, reached))
                reached = max(reached, end)
        assert row["communication_ns"] + row["overlapped_ns"] == busy > 0


@pytest.mark.shared
def test_the_two_late_ranks_of_eight_are_those_whose_host_is_late(
    shared: Callable[[str], Path], tmp_path: Path
) -> None:
    """Ranks 0 and 6 spend 241 and 257 ms of the step in all-reduces, the others 389 to 479 waiting for them."""
    import_traces([shared("traces/megatron_tp8_a100")], tmp_path / "run.parquet")
    with Run.open(tmp_path / "run.parquet") as run:
        found = {r["rank"]: r for r in run.query("time_classes")}
        (split,) = (r for r in run.query("exposed_split") if r["rank"] == 0)
    assert found[0]["dur_ns"] == 603_240_000
    assert {r: f["communication_ns"] for r, f in found.items() if r in (0, 6)} == {0: 241_191_000, 6: 256_838_000}
    assert min(f["communication_ns"] for r, f in found.items() if r not in (0, 6)) == 389_163_000
    assert sorted(found, key=lambda r: found[r]["launch_starved_ns"])[-2:] == [6, 0]
    assert {f["overlapped_ns"] for f in found.values()} == {0}
    # durations on the last rank to come, by clocks as recorded, sum to 50.210 ms over the 84 calls
    assert (split["exposed_ns"], split["unsplit_ns"]) == (241_191_000, 0)
    assert abs(split["transfer_ns"] - 50_210_000) < 100_000


def hooked(rows: Any, steps: range, calls: dict[int, str]) -> Any:
    """A rank whose hook recorded steps of 100 ns, and calls at these times, of which the profiler (350-455) saw some."""
    rows.rank(0, 350, 455)
    rows.rank(0, 0, 700, source="hook")
    for n in steps:
        row = {"start_ns": 100 * n, "dur_ns": 100, "category": "step", "name": f"step {n}", "completeness": "full"}
        rows.add("span", rank=0, source="hook", recorded_step=n, **row)
    rows.add("process_group", rank=0, group_id="tp", description=DESCRIPTIONS["tp"], ranks=[0, 1])
    for number, (at, source) in enumerate(calls.items()):
        row = {"call_id": number, "coalesce_id": number, "op": "all_reduce", "group_id": "tp", "t_issue_ns": at}
        rows.add("comm_record", rank=0, source=source, recorded_step=at // 100, **row)
    rows.kernel(0, "gemm", 360, 420, 351)
    rows.kernel(0, "gemm", 430, 455, 425)
    return rows


def test_time_of_steps_that_only_hooks_saw_is_unknown(open_run: OpenRun, new_rows: NewRows) -> None:
    """The profiler ran from 350 to 455: nothing is said of step 1, and steps 3 and 4 are not whole."""
    run = open_run(
        hooked(new_rows(), range(1, 5), {110: "hook", 310: "hook", 370: "kineto", 410: "kineto", 470: "hook"})
    )
    found = [(r["step"], r["compute_ns"], r["complete"]) for r in run.query("time_classes")]
    assert found == [(3, 40, False), (4, 45, False)]
    assert [(r["step"], r["complete"]) for r in run.query("step_time")] == [
        (1, True),
        (2, True),
        (3, False),
        (4, False),
    ]


def test_a_step_whose_last_calls_alone_the_profiler_missed_is_whole(open_run: OpenRun, new_rows: NewRows) -> None:
    """No call of a hook lies outside of what the profiler saw: the rest of the step is the host's."""
    run = open_run(hooked(new_rows(), range(3, 5), {360: "kineto", 410: "kineto"}))
    assert [(r["step"], r["complete"]) for r in run.query("time_classes")] == [(3, True), (4, True)]
