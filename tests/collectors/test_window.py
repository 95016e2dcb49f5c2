"""Windows of the profiler, in real two-process gloo jobs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from traceanalyzer.collectors.state import state
from traceanalyzer.collectors.window import NEVER, Plan, Windows

sys.path.insert(0, str(Path(__file__).parent))
from window_job import Job

CALLS_PER_STEP = 2  # of the worker's loop: weight and bias


def both(job: Job, timeout_s: float = 90) -> list[dict[str, Any]]:
    found = job.end(timeout_s)
    assert job.codes == [0, 0], job.errors
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The losses of the job without the collector."""
    pytest.importorskip("torch")
    return [found["losses"] for found in both(Job.start(tmp_path_factory.mktemp("plain"), attached=False))]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, list[dict[str, Any]]]:
    """Steps 3 to 5 profiled on both ranks; rank 0 forks a child inside of the window, and one after it."""
    pytest.importorskip("torch")
    job = Job.start(tmp_path_factory.mktemp("window"), own={0: {"fork_in": 4}, 1: {"fork_in": 6}}, steps=[3, 5])
    return job, both(job)


def test_losses_are_equal_to_the_bit(plain: list[list[str]], windowed: tuple[Job, list[dict[str, Any]]]) -> None:
    assert [found["losses"] for found in windowed[1]] == plain
    assert len(plain[0]) == 8


def test_the_trace_holds_the_steps_asked_for_and_no_others(windowed: tuple[Job, list[dict[str, Any]]]) -> None:
    job, _ = windowed
    for rank in range(2):
        # Two calls in each of the steps 0 to 7, numbered from 0: steps 3, 4 and 5 hold the calls 6 to 11.
        assert job.steps_of_calls(rank) == [step for step in range(8) for _ in range(CALLS_PER_STEP)]
        assert job.marked_calls(rank) == [6, 7, 8, 9, 10, 11]
        described = [e["args"] for e in job.trace(rank) if e["name"] == "ta:all_reduce"]
        assert {(a["desc"], a["ranks"], a["dtype"]) for a in described} == {
            ("DATA_PARALLEL_GROUP", "[0, 1]", "float32")
        }


def test_the_window_is_recorded(windowed: tuple[Job, list[dict[str, Any]]]) -> None:
    job, _ = windowed
    assert job.run_dir is not None
    for rank in range(2):
        (window,) = job.windows(rank)
        assert window["file"] == f"trace/r0000{rank}-w0.json.gz"
        assert (window["step_from"], window["step_to"], window["state"]) == (3, 5, "complete")
        assert window["warmup"] is True
        assert 0 < window["end_ns"] - window["start_ns"] < 60e9
        calls = job.records(rank, "call")
        issued = 1 + 16  # t_issue_ns in record.CALL
        inside = [c for c in calls if window["start_ns"] <= c[issued] <= window["end_ns"]]
        assert [c[1] for c in inside] == [6, 7, 8, 9, 10, 11]
    assert sorted(path.name for path in (job.run_dir / "trace").iterdir()) == [
        "r00000-w0.json.gz",
        "r00001-w0.json.gz",
    ]


def test_the_trace_says_whose_it_is(windowed: tuple[Job, list[dict[str, Any]]]) -> None:
    import gzip

    job, _ = windowed
    assert job.run_dir is not None
    whole = json.loads(gzip.decompress((job.run_dir / "trace" / "r00001-w0.json.gz").read_bytes()))
    assert whole["record_shapes"] == 1
    info = whole["distributedInfo"]
    assert (info["rank"], info["world_size"], info["backend"]) == (1, 2, "gloo")
    assert [group["pg_desc"] for group in info["pg_config"]] == ["default_pg", "DATA_PARALLEL_GROUP"]


def test_a_forked_child_ends_with_its_own_status(windowed: tuple[Job, list[dict[str, Any]]]) -> None:
    """Without care the child of a process that has profiled waits forever for a thread of Kineto's at its end."""
    assert [found["child"] for found in windowed[1]] == [3, 3]


def test_torch_inductor_is_not_imported(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = """
import sys, torch
from types import SimpleNamespace
from traceanalyzer.collectors.window import Plan, Windows
windows = Windows(SimpleNamespace(run_dir=sys.argv[1], rank=0), {})
windows.arm(Plan(0, 0))
windows.step_begins(0); torch.ones(3) + 1; windows.step_ends(0); windows.close()
print("torch._inductor" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True).stdout
    assert out.splitlines()[-1] == "False"


def test_one_rank_profiles_and_the_first_step_needs_no_warm_up(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    job = Job.start(tmp_path, loops=3, steps=[0, 1], profile_ranks=[1])
    both(job)
    assert job.run_dir is not None
    assert [path.name for path in (job.run_dir / "trace").iterdir()] == ["r00001-w0.json.gz"]
    assert job.windows(0) == []
    (window,) = job.windows(1)
    assert (window["step_from"], window["step_to"], window["state"], window["warmup"]) == (0, 1, "complete", False)
    assert job.marked_calls(1) == [0, 1, 2, 3]


def test_long_windows_are_cut_into_files_and_the_limit_ends_them(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    job = Job.start(tmp_path, loops=8, steps=[1, 6], steps_per_window=2, each={1: {"raw_limit_bytes": 100}}, step_s=0.2)
    both(job)
    windows = job.windows(0)
    assert [(w["step_from"], w["step_to"], w["state"]) for w in windows] == [
        (1, 2, "complete"),
        (3, 4, "complete"),
        (5, 6, "complete"),
    ]
    assert [job.marked_calls(0, n) for n in range(3)] == [[2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13]]
    first, *later = job.windows(1)
    assert (first["step_from"], first["step_to"], first["state"]) == (1, 2, "complete")
    assert [w["state"][:7] for w in later if w["file"] is None] != []
    assert sum(w["file"] is not None for w in [first, *later]) < 3
    assert "raw_limit" in job.issues(1)


def test_a_job_that_ends_inside_the_window_leaves_what_was_recorded(tmp_path: Path, plain: list[list[str]]) -> None:
    """A process that ends while a profiler records crashes, if nobody stops it."""
    job = Job.start(tmp_path, loops=5, steps=[3, 30])
    found = both(job)
    assert [f["losses"] for f in found] == [losses[:5] for losses in plain]
    for rank in range(2):
        (window,) = job.windows(rank)
        assert (window["step_from"], window["step_to"]) == (3, 4)
        assert window["state"].startswith("cut: the job ended")
        assert job.marked_calls(rank) == [6, 7, 8, 9]


def test_an_error_of_the_job_inside_the_window(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    job = Job.start(tmp_path, loops=5, steps=[1, 3], own={r: {"raise_in": 2} for r in range(2)})
    job.end()
    assert job.codes == [1, 1]
    assert all("the job's own error" in error for error in job.errors)
    (window,) = job.windows(0)
    assert (window["step_from"], window["step_to"]) == (1, 1)
    assert window["state"].startswith("cut: ")
    assert job.marked_calls(0) == [2, 3]


def test_a_killed_rank_leaves_the_other_one_whole(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    job = Job.start(tmp_path, loops=6, steps=[1, 4], own={1: {"kill_in": 3}}, step_s=0.3)
    job.end()
    assert job.codes == [1, -9], job.errors  # rank 0: gloo's own error, the connection is closed
    (window,) = job.windows(0)
    assert (window["step_from"], window["step_to"]) == (1, 2)
    assert job.marked_calls(0)[:4] == [2, 3, 4, 5]
    assert job.run_dir is not None
    assert [path.name for path in (job.run_dir / "trace").iterdir()] == ["r00000-w0.json.gz"]
    # What rank 1 had recorded is in its log: the thread writes every half second.
    assert job.steps_of_calls(1)[:2] == [0, 0]


def test_steps_that_never_come_and_none_asked_for(tmp_path: Path, plain: list[list[str]]) -> None:
    job = Job.start(tmp_path, each={0: {"steps": [10, 12]}})
    assert [f["losses"] for f in both(job)] == plain
    assert job.issues(0)["steps_not_reached"] == "the job ended before step 10"
    assert "steps_not_reached" not in job.issues(1)
    for rank in range(2):
        assert job.windows(rank) == []
        assert len(job.steps_of_calls(rank)) == 8 * CALLS_PER_STEP
    assert job.run_dir is not None
    assert not (job.run_dir / "trace").exists()


# A profiler of the job's own ------------------------------------------------------------------------------------------


def own_calls(path: Path) -> list[int]:
    events = json.loads(path.read_text())["traceEvents"]
    return [e["args"]["call"] for e in sorted(events, key=lambda e: e.get("ts", 0)) if e.get("name") == "ta:all_reduce"]


def test_a_profiler_of_the_jobs_own_is_used_and_other_threads_get_none(tmp_path: Path, plain: list[list[str]]) -> None:
    """A profiler started on a thread that ends before the process crashes the process (torch 2.13)."""
    file = tmp_path / "own.json"
    own = {0: {"profile_in": 1, "profile_until": 5, "profile_file": str(file)}, 1: {"thread": True}}
    job = Job.start(tmp_path, own=own, steps=[3, 4])
    assert [f["losses"] for f in both(job)] == plain
    assert own_calls(file) == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert job.windows(0) == []
    assert "user_profiler" in job.issues(0)

    (window,) = job.windows(1)
    assert window["file"] is None
    assert window["state"].startswith("failed: the steps run on another thread")
    assert "window_skipped" in job.issues(1)
    assert len(job.steps_of_calls(1)) == 8 * CALLS_PER_STEP


def test_a_profiler_of_the_jobs_own_that_starts_later_goes_first(tmp_path: Path, plain: list[list[str]]) -> None:
    """Two profilers at once crash the process (torch 2.13), or lose one's trace. Rank 0: ours records; 1: it is ready."""
    starts = (4, 2)
    files = [tmp_path / f"own{rank}.json" for rank in range(2)]
    own = {r: {"profile_in": starts[r], "profile_until": 5, "profile_file": str(files[r])} for r in range(2)}
    job = Job.start(tmp_path, own=own, steps=[3, 6])
    assert [f["losses"] for f in both(job)] == plain
    assert own_calls(files[0]) == [8, 9, 10, 11]
    assert own_calls(files[1]) == [4, 5, 6, 7, 8, 9, 10, 11]
    (window,) = job.windows(0)
    assert (window["step_from"], window["step_to"]) == (3, 3)
    assert window["state"] == "cut: the job's own profiler started"
    assert job.marked_calls(0) == [6, 7]
    assert job.windows(1) == []
    assert all("user_profiler" in job.issues(rank) for rank in range(2))


def test_a_trace_that_cannot_be_written(tmp_path: Path, plain: list[list[str]]) -> None:
    (tmp_path / "run.d").mkdir()
    (tmp_path / "run.d" / "trace").write_text("")
    job = Job.start(tmp_path, steps=[3, 4])
    assert [f["losses"] for f in both(job)] == plain
    (window,) = job.windows(0)
    assert window["file"] is None
    assert window["state"].startswith("failed: ")
    assert "window_failed" in job.issues(0)


def test_a_trace_that_cannot_be_packed_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(state, "log", SimpleNamespace(issue=lambda severity, code, sentence: heard.append(code)))
    windows = Windows(Nobody(tmp_path), {})
    plain, target = tmp_path / "r00000-w0.json", tmp_path / "missing" / "r00000-w0.json.gz"
    plain.write_text("{}")
    windows._pack(plain, target)  # the child cannot write there
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    windows._pack(plain, tmp_path / "r00000-w0.json.gz")
    assert heard == ["trace_not_packed", "trace_not_packed"]
    assert [path.name for path in tmp_path.iterdir()] == ["r00000-w0.json"]


# Without torch: which steps -------------------------------------------------------------------------------------------


class Nobody:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.rank = run_dir, 0
        self.switched: list[bool] = []

    def activate(self) -> None:
        self.switched.append(True)

    def deactivate(self) -> None:
        self.switched.append(False)


def told_of(windows: Windows, plan: Plan) -> list[tuple[str, int]]:
    heard: list[tuple[str, int]] = []
    plan.told = lambda what, step, why: heard.append((what, step))
    assert windows.arm(plan)
    return heard


def run_steps(windows: Windows, steps: range) -> None:
    for step in steps:
        windows.step_begins(step)
        windows.step_ends(step)


def test_a_late_rank_joins_at_the_agreed_later_step(tmp_path: Path) -> None:
    session = Nobody(tmp_path)
    windows = Windows(session, {"dormant": True})
    run_steps(windows, range(12))
    heard = told_of(windows, Plan(10, 11, profile=False, activate=True, fallback=16))
    run_steps(windows, range(12, 20))
    assert heard == [("late", 12), ("joined", 16), ("done", 17)]
    assert session.switched == [True, False]
    assert windows.armed_from == NEVER


@pytest.mark.parametrize("fallback", [None, 15])
def test_a_rank_that_is_too_late_for_both_skips(tmp_path: Path, fallback: int | None) -> None:
    session = Nobody(tmp_path)
    windows = Windows(session, {"dormant": True})
    run_steps(windows, range(16))
    heard = told_of(windows, Plan(10, 11, profile=False, activate=True, fallback=fallback))
    run_steps(windows, range(16, 20))
    assert heard == [("late", 16), ("skipped", 16)]
    assert session.switched == []
    assert windows.armed_from == NEVER
    assert windows.arm(Plan(30, 30, profile=False))


def test_configured_steps_of_a_job_that_resumed_among_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(state, "log", SimpleNamespace(issue=lambda severity, code, sentence: heard.append(sentence)))
    session = Nobody(tmp_path)
    windows = Windows(session, {"dormant": True})
    assert windows.arm(Plan(10, 12, profile=False, activate=True))
    windows.step_begins(11)
    assert session.switched == [True]
    windows.step_ends(11)
    run_steps(windows, range(12, 15))
    assert session.switched == [True, False]
    assert heard == ["the job began at step 11: 10 is not recorded"]


def test_a_second_plan_is_refused_while_one_waits(tmp_path: Path) -> None:
    windows = Windows(Nobody(tmp_path), {})
    assert windows.arm(Plan(5, 6))
    assert not windows.arm(Plan(8, 9))


def test_steps_whose_end_is_not_told(tmp_path: Path) -> None:
    session = Nobody(tmp_path)
    windows = Windows(session, {"dormant": True})
    heard = told_of(windows, Plan(2, 3, profile=False, activate=True))
    for step in range(6):
        windows.step_begins(step)
    assert heard == [("joined", 2), ("done", 3)]
    assert session.switched == [True, False]


def test_an_error_in_a_window_does_not_reach_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = Windows(Nobody(tmp_path), {})
    monkeypatch.setattr(state, "errors", 0)
    monkeypatch.setattr(windows, "_start", lambda plan, step: 1 / 0)
    heard = told_of(windows, Plan(1, 2, profile=False))
    run_steps(windows, range(5))
    assert heard == [("failed", 1)]
    assert state.errors == 1


def test_a_dormant_step_costs_next_to_nothing(tmp_path: Path) -> None:
    """One comparison at each end: 0.1 us measured; the bound leaves room for a loaded machine."""
    windows = Windows(Nobody(tmp_path), {"dormant": True})
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter_ns()
        for step in range(10_000):
            windows.step_begins(step)
            windows.step_ends(step)
        best = min(best, (time.perf_counter_ns() - began) / 10_000)
    assert best < 2_000, f"{best:.0f} ns per step"
