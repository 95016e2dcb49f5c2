"""A job that is armed while it runs: real two-process gloo jobs, and the arithmetic of the step they agree on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from traceanalyzer.cli import main
from traceanalyzer.collectors import control
from traceanalyzer.collectors.control import Beat, CaptureError, choose_start
from traceanalyzer.collectors.window import Windows

sys.path.insert(0, str(Path(__file__).parent))
from window_job import Job

CALLS_PER_STEP = 2


def wait_for(what: Any, timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < until, "time is up"
        time.sleep(0.02)


def at_step(job: Job, step: int) -> Any:
    run_dir = job.run_dir
    assert run_dir is not None
    return lambda: [b for b in control.beats(run_dir) if (b.step or -1) >= step]


def recorded_steps(job: Job, rank: int) -> dict[int | None, int]:
    """Step -> recorded calls."""
    steps = job.steps_of_calls(rank)
    return {step: steps.count(step) for step in dict.fromkeys(steps)}


# In a job that runs ---------------------------------------------------------------------------------------------------


def test_capture_of_a_dormant_job(tmp_path: Path) -> None:
    """All ranks begin at one step, with and without the profiler, one capture after the other; the losses are equal."""
    pytest.importorskip("torch")
    job = Job.start(tmp_path / "job", loops=100_000, step_s=0.05, dormant=True)
    try:
        assert job.run_dir is not None
        wait_for(at_step(job, 1))
        done = CliRunner().invoke(main, ["capture", str(job.run_dir), "--steps", "2", "--format", "json"])
        assert done.exit_code == 0, done.output
        first = json.loads(done.stdout)
        text = CliRunner().invoke(main, ["capture", str(job.run_dir), "--steps", "3", "--no-profile"])
        assert text.exit_code == 0, text.output
        again = json.loads((job.run_dir / "control" / "request.json").read_text())
    finally:
        found = job.stop()
    assert job.codes == [0, 0], job.errors

    start = first["request"]["start"]
    assert first["ranks"]["done"] == [{"rank": 0, "step": start, "why": None}, {"rank": 1, "step": start, "why": None}]
    assert (first["ranks"]["unheard"], first["ranks"]["gone"]) == ([], [])
    second = again["start"]
    assert second > start + 1
    for rank in range(2):
        wanted = [start, start + 1, second, second + 1, second + 2]
        assert recorded_steps(job, rank) == dict.fromkeys(wanted, CALLS_PER_STEP)
        (window,) = job.windows(rank)
        assert (window["step_from"], window["step_to"], window["state"]) == (start, start + 1, "complete")
        assert window["warmup"] is True
        assert job.marked_calls(rank) == [0, 1, 2, 3]
        assert "capture_late" not in job.issues(rank)
    assert f"asked   steps {second} to {second + 2} of 2 ranks" in text.output
    assert f"recorded ranks 0, 1 from step {second}" in text.output
    assert "next    traceanalyzer merge" in text.output

    # The node's folder, where rank 1 read the requests, is gone again; the heartbeats say that both ended.
    assert list((tmp_path / "job" / "tmp").glob("traceanalyzer-*")) == []
    assert [beat.ended for beat in control.beats(job.run_dir)] == [True, True]
    with pytest.raises(CaptureError, match="the job has ended: all 2 ranks say so"):
        control.living(job.run_dir)

    same = Job.start(tmp_path / "plain", loops=len(found[0]["losses"]), attached=False)
    assert [f["losses"] for f in same.end()] == [f["losses"] for f in found]


def test_a_rank_that_learns_of_it_too_late(tmp_path: Path) -> None:
    """Rank 1 looks every 5 s only: it joins at the fallback step, alone, and both sides say so."""
    pytest.importorskip("torch")
    job = Job.start(tmp_path / "job", loops=100_000, step_s=0.05, dormant=True, each={1: {"poll_s": 5.0}})
    try:
        assert job.run_dir is not None
        run_dir = job.run_dir
        wait_for(at_step(job, 2))
        wait_for(lambda: len(control.beats(run_dir)) == 2)
        # Once it has looked, it does not look again for almost 5 s, that is 100 steps at most.
        since = (time.time() - control.beats(run_dir)[1].alive_ns / 1e9) % 5.0
        if since > 1.5:
            time.sleep(5.3 - since)
        beats = control.beats(run_dir)
        start = max(beat.step or 0 for beat in beats) + 10
        document = control.request(run_dir, start=start, steps=2, fallback=start + 110, profile=False)
        *_, last = control.follow(run_dir, document, beats, 60)
    finally:
        job.stop()
    assert job.codes == [0, 0], job.errors
    assert {b.rank: (b.capture or {})["step"] for b in last.by_state["done"]} == {0: start, 1: start + 110}
    assert recorded_steps(job, 0) == {start: 2, start + 1: 2}
    assert recorded_steps(job, 1) == {start + 110: 2, start + 111: 2}
    late = job.issues(1)["capture_late"]
    assert late.startswith(f"the capture from step {start} on was learned of at step ")
    assert late.endswith(f"this rank joins at step {start + 110}")
    assert "capture_late" not in job.issues(0)


def test_paused_and_gone_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    job = Job.start(tmp_path / "job", loops=100_000, step_s=0.05, dormant=True)
    try:
        assert job.run_dir is not None
        run_dir = job.run_dir
        wait_for(at_step(job, 2))
        for process in job.processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        with pytest.raises(
            CaptureError, match=r"no rank gave a sign of life for 2 s: the job is gone or stopped. Last"
        ):
            control.living(run_dir, patience_s=2.0)
        job.processes[1].kill()
        job.processes[1].wait()
        job.processes[0].kill()
        job.processes[0].wait()
        with pytest.raises(CaptureError, match="the job is gone or stopped"):
            control.living(run_dir, patience_s=0.5)
    finally:
        job.kill()


def test_without_any_step_the_capture_says_what_is_missing(tmp_path: Path) -> None:
    session = SimpleNamespace(run_dir=tmp_path, rank=0, world_size=1, config={"poll_s": 0.05}, observers=[])
    windows = Windows(session, session.config)
    part = control.Control(session, windows)
    try:
        part.start()
        wait_for(lambda: control.beats(tmp_path))
        stepless = replace(control.beats(tmp_path)[0])
        with pytest.raises(CaptureError, match="no rank has marked a step"):
            choose_start([stepless])
        document = control.request(tmp_path, start=5, steps=1)
        *_, last = control.follow(tmp_path, document, [stepless], 20)
        assert [(b.capture or {})["why"] for b in last.by_state["waiting"]] == [
            "this rank marks no steps, so nothing says where one begins"
        ]
    finally:
        part.close()
    refused = CliRunner().invoke(main, ["capture", str(tmp_path)])
    assert refused.exit_code == 2
    assert "the job has ended" in refused.output


def test_a_folder_without_heartbeats(tmp_path: Path) -> None:
    refused = CliRunner().invoke(main, ["capture", str(tmp_path)])
    assert refused.exit_code == 2
    assert "no rank has left a heartbeat" in refused.output


def test_a_request_that_was_there_before_is_not_taken(tmp_path: Path) -> None:
    control.request(tmp_path, start=5, steps=1)
    session = SimpleNamespace(run_dir=tmp_path, rank=0, world_size=1, config={"poll_s": 0.02}, observers=[])
    windows = Windows(session, session.config)
    part = control.Control(session, windows)
    try:
        part.start()
        windows.step_begins(0)
        wait_for(lambda: any(beat.step == 0 for beat in control.beats(tmp_path)))
        assert windows.plan is None
        document = control.request(tmp_path, start=9, steps=1)
        wait_for(lambda: windows.plan is not None)
        assert windows.plan is not None
        assert windows.plan.first == 9
        (beat,) = [b for b in control.beats(tmp_path) if b.capture] or [None]
        assert beat is None or (beat.capture or {})["id"] == document["id"]
    finally:
        part.close()


def test_the_other_ranks_of_a_node_ask_the_nodes_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RUN_DIR may be a shared file system: of each node, one rank asks it."""
    node = tmp_path / "node"
    node.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(node))
    asked: list[tuple[int, Path]] = []
    parts = []
    for rank in range(2):
        session = SimpleNamespace(
            run_dir=tmp_path / "run.d", rank=rank, world_size=2, local_rank=rank, config={}, observers=[]
        )
        part = control.Control(session, Windows(session, {}))
        part._mirror = control._node_folder(tmp_path / "run.d")
        part.windows.step_begins(0)
        parts.append(part)
    lstat = os.lstat
    turn = [0]
    monkeypatch.setattr(
        control.os, "lstat", lambda path: (asked.append((turn[0], Path(path))), lstat(path))[1], raising=True
    )
    central = tmp_path / "run.d" / "control" / "request.json"
    document = control.request(tmp_path / "run.d", start=7, steps=1)
    for rank in (1, 0, 1):
        turn[0] = rank
        parts[rank].turn()
    assert [part.capture["id"] for part in parts if part.capture] == [document["id"]] * 2
    assert (0, central) in asked
    assert (1, central) not in asked
    # Should rank 0 be gone, the others come to it in the end.
    (node / parts[1]._mirror.name / "request.json").unlink()
    later = control.request(tmp_path / "run.d", start=70, steps=1)
    turn[0] = 1
    for _ in range(control.MIRROR_TURNS):
        parts[1].turn()
    assert parts[1].capture is not None
    assert parts[1].capture["id"] == later["id"]
    assert parts[1].capture["state"] == "refused"  # the first one is armed still
    for part in parts:
        part.close()
    assert list(node.iterdir()) == []


def test_what_is_no_request_is_ignored(tmp_path: Path) -> None:
    session = SimpleNamespace(run_dir=tmp_path, rank=0, world_size=1, config={}, observers=[])
    windows = Windows(session, {})
    part = control.Control(session, windows)
    windows.step_begins(0)
    request = tmp_path / "control" / "request.json"
    request.parent.mkdir()
    for text in ("", "{", "[]", '{"schema": "traceanalyzer.capture/2", "id": "x", "start": 3, "steps": 1}'):
        request.write_text(text)
        part.turn()
        assert windows.plan is None
    request.write_text(json.dumps({"schema": control.SCHEMA, "id": "x", "start": "three", "steps": 1}))
    part.turn()
    assert windows.plan is None
    part.close()


def test_a_folder_that_cannot_be_written_leaves_the_job_alone(tmp_path: Path) -> None:
    (tmp_path / "control").write_text("")
    session = SimpleNamespace(run_dir=tmp_path, rank=0, world_size=1, config={}, observers=[])
    part = control.Control(session, Windows(session, {}))
    part.turn()
    part.turn()
    part.close()


# The step that is agreed on -------------------------------------------------------------------------------------------

S = 1_000_000_000


def beat(rank: int = 0, *, step: int | None = 100, age_s: float = 0.0, step_s: float | None = 0.5, **more: Any) -> Beat:
    facts: dict[str, Any] = {
        "rank": rank,
        "world_size": 2,
        "host": "node",
        "pid": 1,
        "step": step,
        "step_ns": int((1000 - age_s) * S),
        "alive_ns": 1000 * S,
        "step_s": step_s,
        "every_s": 1.0,
        "poll_s": 1.0,
        "dormant": True,
        "capture": None,
        "ended": False,
    }
    return Beat(**{**facts, **more})


@pytest.mark.parametrize(
    ("found", "start"),
    [
        # two polls, one heartbeat and a second are 4 s: 8 steps of 0.5 s, and two more
        pytest.param([beat()], 110, id="half-second steps"),
        pytest.param([beat(), beat(1, step=103)], 113, id="the rank that is furthest"),
        pytest.param([beat(), beat(1, step=99, age_s=3.0)], 115, id="an older heartbeat is extrapolated: 99 + 6"),
        pytest.param([beat(step_s=20.0)], 103, id="slow steps"),
        pytest.param([beat(step_s=0.001)], 4102, id="fast steps"),
        pytest.param([beat(step_s=None)], 110, id="no pace yet: half a second"),
        pytest.param([beat(step_s=None, age_s=30.0)], 104, id="no pace yet, but a step that runs for 30 s"),
        pytest.param([beat(every_s=32.0)], 172, id="8,192 ranks: a heartbeat in 32 s"),
        pytest.param([beat(), beat(1, step=None)], 110, id="a rank without steps"),
        pytest.param([beat(), beat(1, step=500, age_s=3600.0)], 110, id="left by a process that was killed"),
    ],
)
def test_the_step_no_rank_can_have_reached(found: list[Beat], start: int) -> None:
    assert choose_start(found) == start


def test_right_after_the_start_it_waits_for_a_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 10 ms after a slow first one: with half a second, the step that is chosen would have gone by long ago."""
    session = SimpleNamespace(run_dir=tmp_path, rank=0, world_size=1, config={"poll_s": 0.1}, observers=[])
    part = control.Control(session, Windows(session, session.config))
    ended: list[Beat] = []

    def beats(_run_dir: Path) -> list[Beat]:
        """One turn of the job's thread: its steps take 10 ms, after the first one."""
        clock[0] += int(0.1 * S)
        part.windows.step += 10
        part.turn()
        return [*told(tmp_path), *ended]

    clock = [1000 * S]
    told = control.beats
    monkeypatch.setattr(control, "beats", beats)
    monkeypatch.setattr(control.time, "time_ns", lambda: clock[0])
    part.windows.step_begins(0)
    part.turn()
    clock[0] += 5 * S
    part.windows.step_begins(1)
    part.turn()
    part.beat()
    (first,) = told(tmp_path)
    assert first.step_s is None  # 5 s, and no later step is like it
    (found,) = control.paced(tmp_path, [first])
    assert found.step_s == pytest.approx(0.01)
    assert choose_start([found]) >= (found.step or 0) + 120
    gone = replace(first, ended=True)
    assert control.paced(tmp_path, [gone], patience_s=0.0) == [gone]
    part.close()


def test_a_job_that_hangs_is_not_asked() -> None:
    with pytest.raises(
        CaptureError, match=r"none has begun a step lately: the job hangs\. rank 0 on node at step 100, "
    ):
        choose_start([beat(age_s=600.0)])


def test_python_without_click_can_ask(tmp_path: Path) -> None:
    """Where only torch and this package are installed, the module is enough."""
    code = "import sys; from traceanalyzer.collectors import control; print('click' in sys.modules, 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip() == "False False"
