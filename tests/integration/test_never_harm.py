"""Whatever happens to job or collector: the job's results stay, it ends in time, and only RUN_DIR is written to."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.collectors import launch, record
from traceanalyzer.run import Run

LIMIT_S = 120.0
"""No job here takes a tenth of it; gloo's own patience is longer."""


def plain(jobs: Any, case: str = "plain", env: dict[str, str] | None = None) -> dict[int, dict[str, Any]]:
    ended = jobs.alone("alone", lambda out: jobs.command("odd.py", 2, case, str(out)), env)
    assert ended.code == 0, ended.output
    found: dict[int, dict[str, Any]] = ended.results
    assert sorted(found) == [0, 1]
    return found


def attached(jobs: Any, case: str, *options: str, launcher: tuple[str, ...] = (), env: Any = None) -> Any:
    return jobs.attached(
        "attached", lambda out: jobs.command("odd.py", 2, case, str(out), launcher=launcher), *options, env=env
    )


def logs(run_dir: Path) -> list[record.Contents]:
    return [record.read(path) for path in sorted((run_dir / "log").glob("*.talog"))]


def calls(run: Path, rank: int) -> dict[int | None, int]:
    """Calls on the pair by step."""
    with Run.open(run) as opened:
        rows = opened.rows(
            "SELECT recorded_step AS step, count(*) AS n FROM comm c JOIN process_group g USING (rank, group_id) "
            f"WHERE rank = {rank} AND g.description LIKE 'PAIR%' GROUP BY 1 ORDER BY 1"
        )
    return {row["step"]: row["n"] for row in rows}


def issues(run: Path) -> list[tuple[str, str, str]]:
    with Run.open(run) as opened:
        return [(r["severity"], r["code"], r["sentence"]) for r in opened.rows("SELECT * FROM issue")]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A short path: data loaders make sockets in it."""
    with tempfile.TemporaryDirectory(prefix="ta") as folder:
        yield Path(folder)


# -- what a job may do -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["forks", "workers", "again"])
def test_a_job_that_does_odd_things(case: str, jobs: Any, temporary: Path) -> None:
    """Children of the job leave no log and do not end ours; groups made again are other groups."""
    env = {"TMPDIR": str(temporary)}
    expected = plain(jobs, case, env)
    left = sorted(path.name for path in temporary.rglob("*"))
    shutil.rmtree(temporary)
    temporary.mkdir()
    found = attached(jobs, case, "--steps", "1-3", "--ranks", "all", env=env)
    assert found.code == 0, found.output
    assert found.results == expected
    read = logs(found.run_dir)
    assert [(log.torn_bytes, log.records[-1][0]) for log in read] == [(0, "end")] * 2
    assert [log.records[-1][1]["errors"] for log in read] == [0, 0]
    for rank in (0, 1):
        assert {step: n for step, n in calls(found.out, rank).items() if step is not None} == dict.fromkeys(range(5), 2)
    # What torchrun leaves has other names every time; there is no more of it.
    assert len(list(temporary.rglob("*"))) == len(left)
    assert {path.name for path in jobs.folder.iterdir()} == {
        "alone.results",
        "attached.results",
        "attached.parquet",
        "attached.d",
    }
    assert {path.name for path in found.run_dir.iterdir()} <= {"run.json", "log", "trace", "flight", "control"}


def test_a_job_that_is_started_again(jobs: Any) -> None:
    """torchrun --max-restarts: both lives leave a log; the run says that there were two, and has one of each step."""
    found = attached(jobs, "restarted", "--no-profile", launcher=("--max-restarts", "1"))
    assert found.code == 0, found.output
    assert found.results == plain(jobs)
    lives = [next(r[1] for r in reversed(log.records) if r[0] == "run") for log in logs(found.run_dir)]
    assert sorted((life["rank"], life["restart"]) for life in lives) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert any("again" in sentence or "restart" in sentence for _, _, sentence in issues(found.out))
    for rank in (0, 1):
        assert {s: n for s, n in calls(found.out, rank).items() if s is not None} == dict.fromkeys(range(5), 2)


# -- what may be done to it ------------------------------------------------------------------------------------------


def test_a_rank_killed_in_the_middle_of_a_window(jobs: Any) -> None:
    """The other rank's window and log, and the dead one's log up to the kill, make a run that says what is lost."""
    started = time.monotonic()
    found = attached(jobs, "killed", "--steps", "2-4", "--ranks", "all")
    assert time.monotonic() - started < LIMIT_S
    assert found.code != 0
    assert found.results == {}
    dead = calls(found.out, 1)
    assert {dead[step] for step in (0, 1, 2, 3)} == {2}  # the log's thread had written step 3's
    assert {calls(found.out, 0)[step] for step in (0, 1, 2)} == {2}
    with Run.open(found.out) as run:
        said = {
            row["rank"]
            for row in run.rows("SELECT rank FROM issue WHERE sentence LIKE '%ended without closing its log%'")
        }
        whole = run.rows("SELECT rank, completeness FROM span WHERE category = 'step' AND rank = 1 AND name = 'step 3'")
    assert 1 in said
    assert all(row["completeness"] == "cut" for row in whole), whole
    assert "issue" in found.output


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_the_job_and_the_run_is_written(number: signal.Signals, jobs: Any) -> None:
    results, out = jobs.folder / "results", jobs.folder / "run.parquet"
    command = [sys.executable, "-m", "traceanalyzer", "attach", "--out", str(out), "--no-profile", "--"]
    process = jobs.start([*command, *jobs.command("odd.py", 2, "forever", str(results))])
    # SIGTERM ends a worker at once: what its log's thread has not written yet (half a second of steps) is lost.
    assert eventually(lambda: all(int(read(results / f"step{r}") or 0) > 30 for r in (0, 1)))
    os.kill(process.pid, number)
    code, output = jobs.wait(process, LIMIT_S)
    assert code != 0
    assert not any(survives(pid) for pid in pids(out.with_suffix(".d"))), output
    assert calls(out, 0)[3] == calls(out, 1)[3] == 2
    assert json.loads((out.with_suffix(".d") / "run.json").read_text())["exit_code"] == code


def test_a_full_disk(jobs: Any) -> None:
    """A limit on the size of files stands for it: the log stops, and so does the trace; the job does not."""
    expected = plain(jobs)
    results, run_dir = jobs.folder / "attached.results", jobs.folder / "run.d"
    settings = launch.config(steps=[1, 3], ranks="all", profile_ranks=None)
    env = launch.environment(run_dir, settings, {})
    limited = ["bash", "-c", 'ulimit -f 2; exec "$@"', "-", *jobs.command("odd.py", 2, "plain", str(results))]
    code, output = jobs.wait(jobs.start(limited, env), LIMIT_S)
    assert code == 0, output
    assert read_results(results) == expected
    assert all(path.stat().st_size <= 2048 for path in run_dir.rglob("*") if path.is_file())


@pytest.mark.parametrize("where", ["a file", pytest.param("missing", marks=pytest.mark.slow)])
def test_a_folder_that_cannot_be_written(where: str, jobs: Any) -> None:
    expected = plain(jobs)
    results, file = jobs.folder / "attached.results", jobs.folder / "file"
    file.touch()
    run_dir = file / "run.d" if where == "a file" else Path("/proc/none/run.d")
    env = launch.environment(run_dir, launch.config(steps=[1, 3], profile_ranks=None), {})
    code, output = jobs.wait(jobs.start(jobs.command("odd.py", 2, "plain", str(results)), env), LIMIT_S)
    assert code == 0, output
    assert read_results(results) == expected
    assert len(re.findall("traceanalyzer: ", output)) == 2, output  # one line for each rank


# -- errors of ours --------------------------------------------------------------------------------------------------

BROKEN = {
    "log": """
        from traceanalyzer.collectors import record
        record.Log.put = broken
    """,
    "hooks": """
        from traceanalyzer.collectors import hooks
        hooks.Hook.learn = broken
        hooks.Hook.say = broken
        hooks.Hook.next_call = broken
    """,
    "steps": """
        from traceanalyzer.collectors import session
        session.Session.step_begins = broken
        session.Session.step_ends = broken
    """,
    "start": """
        from traceanalyzer.collectors import session
        session.Session._open = broken
    """,
    "close": """
        from traceanalyzer.collectors import session
        session.Session.close = broken
    """,
}


@pytest.mark.parametrize(
    "part", [part if part in ("hooks", "steps") else pytest.param(part, marks=pytest.mark.slow) for part in BROKEN]
)
def test_an_error_of_ours(part: str, jobs: Any) -> None:
    """Each of these raises on every call: it is counted, and the collector switches itself off with one line."""
    expected = plain(jobs)
    folder = jobs.folder / "broken"
    folder.mkdir()
    lines = [line.strip() for line in BROKEN[part].strip().splitlines()]
    broken = "def broken(*args, **kwargs):\n    raise RuntimeError('broken')\n"
    # The collector's own sitecustomize runs this one after itself.
    (folder / "sitecustomize.py").write_text(
        broken + "import os\nif os.environ.get('RANK'):\n    " + "\n    ".join(lines)
    )
    found = attached(jobs, "plain", "--steps", "1-3", "--ranks", "all", env={"PYTHONPATH": inherited(str(folder))})
    assert found.code == 0, found.output
    assert found.results == expected
    assert len(re.findall("collector switched off", found.output)) <= 2, found.output


# -- helpers ---------------------------------------------------------------------------------------------------------


def inherited(folder: str) -> str:
    before = os.environ.get("PYTHONPATH")
    return folder + (os.pathsep + before if before else "")


def read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def read_results(folder: Path) -> dict[int, Any]:
    return {int(path.stem.removeprefix("rank")): json.loads(path.read_text()) for path in sorted(folder.glob("rank*"))}


def pids(run_dir: Path) -> list[int]:
    return [int(path.stem.rpartition("-")[2]) for path in (run_dir / "log").glob("r*.talog")]


def survives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def eventually(what: Callable[[], bool], limit_s: float = 60.0) -> bool:
    """Waits until ``what`` holds; False if it does not in time."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(0.05)
    return False
