"""Processes that were not started with the collector: what is said of them, and getting in through a debugger."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from traceanalyzer.collectors import launch, reach, record

JOB = Path(__file__).with_name("launch_job.py")
Start = Callable[..., "subprocess.Popen[str]"]
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="a real job needs torch")
OURS = ".".join(map(str, sys.version_info[:2]))


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def begin(*command: str | Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TRACEANALYZER_", "KINETO_", "RANK"))}
        process = subprocess.Popen(
            list(map(str, command)),
            env={**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def process(**facts: object) -> reach.Process:
    """A process of another user's job, by facts."""
    known: dict[str, object] = {"environ": {}, "python": (3, 11), "state": "S", "uid": os.geteuid(), "torch": True}
    return reach.Process(os.getpid(), **{**known, **facts})  # type: ignore[arg-type]


# Saying what is possible ----------------------------------------------------------------------------------------------


def test_no_such_process() -> None:
    with pytest.raises(ProcessLookupError, match="there is no process 4194304"):
        reach.explain(4_194_304)


def test_a_process_without_torch(start: Start) -> None:
    """Four ways, four reasons."""
    running = start(sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)", env={"RANK": "2"})
    assert running.stdout is not None
    running.stdout.readline()
    found = reach.explain(running.pid)
    assert found.process.rank == 2
    assert found.process.python == sys.version_info[:2]
    assert [(way.name, way.possible) for way in found.ways] == [
        ("collector", False),
        ("kineto_daemon", False),
        ("remote_exec", False),
        ("debugger", False),
    ]
    assert found.way("collector").why == (
        "it was not started with our collector (no TRACEANALYZER_RUN_DIR in its environment)"
    )
    assert found.way("kineto_daemon").why == (
        "it was started without KINETO_USE_DAEMON=1; torch reads it at import, it cannot be set later"
    )
    if sys.version_info < (3, 14):
        assert found.way("remote_exec").why == f"its Python is {OURS}: sys.remote_exec came with 3.14"
    assert found.way("debugger").why == "it has loaded no torch, so there is nothing to hook"


def test_a_process_that_is_no_python(start: Start) -> None:
    found = reach.explain(start("sleep", "60").pid)
    assert found.way("debugger").why == "it is no CPython that could be recognised"
    assert found.way("remote_exec").why == "it is no CPython that could be recognised"


def test_a_launcher_names_its_children(start: Start) -> None:
    code = "import subprocess, sys; print('up', flush=True); subprocess.run(['sleep', '60'])"
    running = start(sys.executable, "-c", code)
    assert running.stdout is not None
    running.stdout.readline()
    end = time.monotonic() + 10
    while not (found := reach.explain(running.pid)).process.children and time.monotonic() < end:
        time.sleep(0.05)
    (child,) = found.process.children
    assert found.way("debugger").why == f"it has loaded no torch, so there is nothing to hook: its children are {child}"
    os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("facts", "way", "why"),
    [
        ({"environ": None}, "collector", "its environment cannot be read"),
        (
            {"environ": {"KINETO_USE_DAEMON": "1"}, "torch": False},
            "kineto_daemon",
            "KINETO_USE_DAEMON is set, and the process has loaded no torch",
        ),
        (
            {"environ": {"KINETO_USE_DAEMON": "1"}, "other_namespaces": ("net",)},
            "kineto_daemon",
            "KINETO_USE_DAEMON is set, and the process is in another network namespace: its requests go there",
        ),
        ({"python": (3, 10)}, "debugger", "its Python is 3.10: the collector needs 3.11"),
        ({"state": "T"}, "debugger", "its state is T: it is stopped or has ended"),
        ({"tracer": 77}, "debugger", "no right to trace it: process 77 traces it already"),
    ],
)
def test_reasons(monkeypatch: pytest.MonkeyPatch, facts: dict[str, object], way: str, why: str) -> None:
    monkeypatch.setattr(reach, "look", lambda pid: process(**facts))
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/gdb")
    found = reach.explain(os.getpid()).way(way)
    assert (found.possible, found.why) == (False, why)


def test_kineto_is_possible_where_it_was_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "look", lambda pid: process(environ={"KINETO_USE_DAEMON": "1"}))
    found = reach.explain(os.getpid()).way("kineto_daemon")
    assert (found.possible, found.command) == (True, f"traceanalyzer attach --pid {os.getpid()}")


def test_without_gdb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "look", lambda pid: process())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = reach.explain(os.getpid()).way("debugger")
    assert (found.possible, found.why) == (
        False,
        "gdb is not installed here; without it we have no way to stop and enter a process",
    )


@pytest.mark.parametrize(
    ("theirs", "ours", "possible", "why"),
    [
        ((3, 15), (3, 14), False, "its Python is 3.15, ours 3.14: both must be the same minor version"),
        ((3, 14), (3, 14), True, "runs at the next safe point of its main thread, no pause"),
        ((3, 13), (3, 14), False, "its Python is 3.13: sys.remote_exec came with 3.14"),
    ],
)
def test_remote_exec_needs_the_same_python(
    monkeypatch: pytest.MonkeyPatch, theirs: tuple[int, int], ours: tuple[int, int], possible: bool, why: str
) -> None:
    monkeypatch.setattr(reach, "look", lambda pid: process(python=theirs))
    monkeypatch.setattr(sys, "remote_exec", lambda pid, script: None, raising=False)
    monkeypatch.setattr(sys, "version_info", (*ours, 0, "final", 0))
    found = reach.explain(os.getpid()).way("remote_exec")
    assert (found.possible, found.why) == (possible, why)


def test_remote_exec_runs_the_text_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The interpreter's part is stood in for: it reads the file that it is given."""
    came: list[tuple[int, str]] = []
    monkeypatch.setattr(
        sys, "remote_exec", lambda pid, script: came.append((pid, Path(script).read_text())), raising=False
    )
    done = reach._through_remote_exec(process(), "pass\n")
    assert (done.way, done.why, came) == ("remote_exec", None, [(os.getpid(), "pass\n")])

    def refuse(pid: int, script: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(sys, "remote_exec", refuse)
    assert reach._through_remote_exec(process(), "pass\n").why == "PermissionError: [Errno 1] Operation not permitted"


@pytest.mark.skipif(os.geteuid() != 0, reason="to become another user needs root")
def test_no_right_to_trace_another_users_process(start: Start) -> None:
    """Really asked of the kernel, as a user without rights."""
    running = start("sleep", "60")
    code = (
        "import os, sys; sys.path[:0] = sys.argv[2].split(os.pathsep); from traceanalyzer.collectors import reach\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "print(reach._may_trace(reach.look(int(sys.argv[1]))))"
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run([sys.executable, "-c", code, str(running.pid), paths], capture_output=True, text=True)
    assert done.stdout == "it belongs to user 0, we are 65534 and have no CAP_SYS_PTRACE\n", done.stderr


# Stacks ---------------------------------------------------------------------------------------------------------------

WAITING = """
Thread 3 (Thread 0x1 (LWP 3) "pt_gloo_runloop"):
#0  __futex_wait (private=...) at ./nptl/futex.c:57
#5  0x00007f17a139c856 in gloo::transport::tcp::UnboundBuffer::waitRecv(int*) () from /x/libtorch.so
#6  0x00007f17a136475a in gloo::(anonymous namespace)::ring(gloo::AllreduceOptions const&) () from /x/libtorch.so
Thread 2 (Thread 0x2 (LWP 2) "gloo_tcp_loop"):
#1  0x00007f17a137d62d in gloo::transport::tcp::Loop::run() () from /x/libtorch.so
Thread 1 (Thread 0x3 (LWP 1) "python3"):
#7  0x00007f179ef6984b in c10d::Work::wait(std::chrono::duration<long, std::ratio<1l, 1000l> >) () from /x/libtorch.so
"""
IDLE = """
Thread 4 (Thread 0x1 (LWP 3) "pt_gloo_runloop"):
#7  0x00007f179ef12501 in c10d::ProcessGroupGloo::runLoop(int) () from /x/libtorch.so
Thread 3 (Thread 0x1 (LWP 3) "watchdog"):
#7  0x00007f179ef12501 in c10d::ProcessGroupNCCL::ncclCommWatchdog() () from /x/libtorch_cuda.so
Thread 2 (Thread 0x2 (LWP 2) "gloo_tcp_loop"):
#1  0x00007f17a137d62d in gloo::transport::tcp::Loop::run() () from /x/libtorch.so
Thread 1 (Thread 0x3 (LWP 1) "python3"):
#0  0x00007f17af6e9d0b in clock_nanosleep () from /lib/libc.so.6
#1  0x00007f17afd00000 in _PyEval_EvalFrameDefault () from /x/libpython3.11.so.1.0
"""
NCCL = """
Thread 1 (Thread 0x3 (LWP 1) "python3"):
#2  0x00007f17af6e9d0b in pncclAllReduce () from /x/libnccl.so.2
#3  0x00007f17af6e9d0b in c10d::ProcessGroupNCCL::allreduce(std::vector<at::Tensor>&) () from /x
"""


def test_what_counts_as_inside_a_collective() -> None:
    assert reach.collective_frames(IDLE) == []
    assert reach.collective_frames(WAITING) == ["gloo::{}::ring", "c10d::Work::wait"]
    assert reach.collective_frames(NCCL) == ["c10d::ProcessGroupNCCL::allreduce"]


# Getting in -----------------------------------------------------------------------------------------------------------


def test_the_text_leaves_no_names_and_raises_nothing(tmp_path: Path) -> None:
    """Run as the interpreter would, in a process that has no torch: nothing happens."""
    text = reach.payload(tmp_path / "it's", {"hooks": 'a"b'})
    code = f"exec({text!r}); print(sorted(n for n in globals() if not n.startswith('__')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
    broken = text.replace("sitecustomize.py", "missing.py")
    assert subprocess.run([sys.executable, "-c", broken], capture_output=True, text=True).stderr == ""


def test_the_debugger_is_opt_in(start: Start, tmp_path: Path) -> None:
    running = start("sleep", "60")
    done = reach.enter(running.pid, tmp_path, {})
    assert (done.way, done.log, done.stops) == ("remote_exec", None, 0)
    done = reach.enter(running.pid, tmp_path, {}, debugger=True)
    assert (done.way, done.why, done.stops) == ("debugger", "it is no CPython that could be recognised", 0)


needs_gdb = pytest.mark.skipif(
    shutil.which("gdb") is None or os.geteuid() != 0, reason="gdb is not installed, or there is no right to trace"
)


@needs_torch
@needs_gdb
def test_into_a_running_job(start: Start, tmp_path: Path) -> None:
    """A real process that knows nothing of us: afterwards it records, goes on, and ends as it would have."""
    running = start(sys.executable, JOB, "forever", tmp_path / "store")
    assert running.stdout is not None
    assert running.stdout.readline().startswith("ready")
    said: list[str] = []
    done = reach.enter(
        running.pid, tmp_path / "run.d", launch.config(), debugger=True, attempts=20, wait_s=60, say=said.append
    )
    assert done.why is None, (done, said)
    assert done.log == tmp_path / "run.d" / "log" / f"r00000-{running.pid}.talog"
    assert done.stops >= 1
    assert 0 < done.pause_ns < 30e9
    time.sleep(1.5)
    running.send_signal(signal.SIGTERM)
    out, _ = running.communicate(timeout=30)
    assert (out, running.returncode) == ("signal SIGTERM\n", 7)
    assert done.log is not None
    records = record.read(done.log).records
    calls = [r for r in records if r[0] == "call"]
    assert len(calls) > 10
    assert {r[3] for r in calls} == {"all_reduce"}
    assert records[-1][0] == "end"
    assert launch.read_run_json(tmp_path / "run.d")["started_by"] == "first process"


@needs_gdb
def test_a_call_that_does_not_return_is_broken_off(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is let go, unharmed: it goes on where it was."""
    code = "import time; print('up', flush=True)\nfor i in range(1000): time.sleep(0.05); print(i, flush=True)"
    running = start(sys.executable, "-c", code)
    assert running.stdout is not None
    running.stdout.readline()

    def hang(gdb: reach._Gdb, pid: int, text: str) -> None:
        gdb.ask("print ((int(*)(unsigned))sleep)(100)", timeout_s=1.0)

    monkeypatch.setattr(reach, "_queue", hang)
    done = reach._through_gdb(reach.look(running.pid), "", 1, str)
    assert done.why == "gdb did not answer within 1 s"
    assert 1e9 < done.pause_ns < 20e9
    assert done.stops == 1
    seen = [int(running.stdout.readline()) for _ in range(60)]
    assert seen == list(range(60))
    assert running.poll() is None


@needs_torch
@needs_gdb
def test_refused_inside_a_collective(start: Start, tmp_path: Path) -> None:
    """Rank 0 waits for rank 1, which comes late; it is let go each time, and the job ends as it would have."""
    code = (
        "import sys, time, torch, torch.distributed as dist\n"
        "rank = int(sys.argv[1])\n"
        "dist.init_process_group('gloo', init_method='file://' + sys.argv[2], rank=rank, world_size=2)\n"
        "x = torch.ones(2); dist.all_reduce(x); print('ready', flush=True)\n"
        "if rank: sys.stdin.readline()\n"
        "dist.all_reduce(x); print(x.tolist(), flush=True); dist.destroy_process_group()\n"
    )
    (tmp_path / "job.py").write_text(code)
    late = subprocess.Popen(
        [sys.executable, tmp_path / "job.py", "1", tmp_path / "store"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        running = start(sys.executable, tmp_path / "job.py", "0", tmp_path / "store")
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        time.sleep(0.5)
        done = reach.enter(running.pid, tmp_path / "run.d", {}, debugger=True, attempts=2, wait_s=0)
        assert done.log is None
        assert done.stops == 2
        assert done.pause_ns > 0
        assert done.why is not None
        assert done.why.startswith("refused: the process was inside a collective at each of 2 stops (")
        assert "c10d::" in done.why
        late.communicate(b"go\n", timeout=30)
        assert running.communicate(timeout=30)[0] == "[4.0, 4.0]\n"
        assert (running.returncode, late.returncode) == (0, 0)
        assert not (tmp_path / "run.d").exists()
    finally:
        late.kill()
        late.wait()
