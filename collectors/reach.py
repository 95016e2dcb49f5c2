"""A process that was not started with the collector: what is possible for it and why, and how to get in.

Ways, the gentlest first:

=============  =====================================================================================================
way            needs
=============  =====================================================================================================
collector      ours is in the process already: ``traceanalyzer capture`` arms it
kineto_daemon  the process has KINETO_USE_DAEMON=1: a trace on demand (daemon.py); nothing enters the process
remote_exec    CPython >= 3.14 on both sides, the same minor version: ``sys.remote_exec``, at a safe point of the process
debugger       gdb and the right to trace the process: it is stopped for a moment, and the interpreter is asked to run the
               collector when it next can (Py_AddPendingCall: the main thread, between two bytecodes)
=============  =====================================================================================================

The debugger never runs Python in the stopped process. It refuses while a thread is inside a collective, as its stack
shows, because a rank that stands still there holds up all others.

Standard library only; runs outside the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from traceanalyzer.collectors.launch import INJECT

__all__ = ["Entered", "Process", "Reach", "Way", "collective_frames", "enter", "explain", "payload"]

_CAP_SYS_PTRACE = 19


@dataclass(frozen=True)
class Process:
    """What /proc says of a process without stopping it. None: not known, or not readable."""

    pid: int
    command: tuple[str, ...] = ()
    environ: dict[str, str] | None = None
    python: tuple[int, int] | None = None
    state: str | None = None
    uid: int | None = None
    tracer: int | None = None
    pid_inside: int | None = None
    other_namespaces: tuple[str, ...] = ()
    torch: bool | None = None
    children: tuple[int, ...] = ()
    waits_in: str | None = None
    libraries: dict[str, int] = field(default_factory=dict)

    @property
    def rank(self) -> int | None:
        """RANK in its environment."""
        text = (self.environ or {}).get("RANK", "")
        return int(text) if text.isdigit() else None

    @property
    def root(self) -> Path:
        """Its file system, as this process sees it."""
        return Path(f"/proc/{self.pid}/root") if "mnt" in self.other_namespaces else Path("/")


@dataclass(frozen=True)
class Way:
    """One way in. why: what it rests on, or what is in its way. command: what to do, where it is possible."""

    name: str
    possible: bool
    why: str
    command: str | None = None


@dataclass(frozen=True)
class Reach:
    """What is possible for one process. ways: all four, in order of preference. notes: what else matters."""

    process: Process
    ways: tuple[Way, ...]
    notes: tuple[str, ...] = ()

    def way(self, name: str) -> Way:
        """The way of this name."""
        return next(way for way in self.ways if way.name == name)


# -- looking -----------------------------------------------------------------------------------------------------------


def look(pid: int) -> Process:
    """What /proc says. Raises ProcessLookupError if there is no such process."""
    proc = Path(f"/proc/{pid}")
    try:
        command = tuple(w.decode(errors="replace") for w in (proc / "cmdline").read_bytes().split(b"\0")[:-1])
        status = dict(
            line.split(":", 1) for line in (proc / "status").read_text(errors="replace").splitlines() if ":" in line
        )
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"there is no process {pid}") from None
    environ: dict[str, str] | None = None
    with contextlib.suppress(OSError):
        raw = (proc / "environ").read_bytes()
        environ = dict(w.decode(errors="replace").split("=", 1) for w in raw.split(b"\0") if b"=" in w)
    libraries, mapped = _libraries(proc)
    exe = ""
    with contextlib.suppress(OSError):
        exe = os.readlink(proc / "exe")
    other = []
    for name in ("pid", "mnt", "net", "user"):
        with contextlib.suppress(OSError):
            if os.readlink(proc / "ns" / name) != os.readlink(f"/proc/self/ns/{name}"):
                other.append(name)
    inside = status.get("NSpid", "").split()
    return Process(
        pid,
        command,
        environ,
        _python(exe, libraries),
        status.get("State", "").split()[0] if status.get("State", "").strip() else None,
        int(status["Uid"].split()[1]) if "Uid" in status else None,
        int(status.get("TracerPid", "0")),
        int(inside[-1]) if inside else None,
        tuple(other),
        any(Path(name).name.startswith("libtorch") for name in libraries) if mapped else None,
        _children(proc),
        _line(proc / "wchan"),
        libraries,
    )


def _libraries(proc: Path) -> tuple[dict[str, int], bool]:
    """File -> where its first byte is mapped, and whether the process lets us see it."""
    found: dict[str, int] = {}
    try:
        with (proc / "maps").open(errors="replace") as lines:
            for line in lines:
                parts = line.rstrip("\n").split(None, 5)
                if len(parts) == 6 and parts[5].startswith("/") and int(parts[2], 16) == 0:
                    found.setdefault(parts[5], int(parts[0].split("-")[0], 16))
    except OSError:
        return {}, False
    return found, True


def _python(exe: str, libraries: Mapping[str, int]) -> tuple[int, int] | None:
    """Version of CPython, by the name of its library or executable."""
    for text in (*(name for name in libraries if "libpython" in name), exe, *libraries):
        if match := re.search(r"(?:lib)?python(\d)\.(\d+)", text):
            return int(match[1]), int(match[2])
    return None


def _children(proc: Path) -> tuple[int, ...]:
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in (proc / "task").iterdir():
            with contextlib.suppress(OSError):
                found.update(int(word) for word in (task / "children").read_text().split())
    return tuple(sorted(found))


def _line(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip().strip("\0") or None
    except OSError:
        return None


def _may_trace(process: Process) -> str | None:
    """None if the kernel lets us trace the process, else why not. Nothing is stopped: opening mem asks the same."""
    if process.tracer:
        return f"process {process.tracer} traces it already"
    try:
        os.close(os.open(f"/proc/{process.pid}/mem", os.O_RDONLY))
        return None
    except FileNotFoundError:
        return "it has ended"
    except OSError:
        pass
    status = _line(Path("/proc/self/status")) or ""
    effective = int(match[1], 16) if (match := re.search(r"CapEff:\s*([0-9a-fA-F]+)", status)) else 0
    if effective >> _CAP_SYS_PTRACE & 1:
        return "the kernel refuses it although we have CAP_SYS_PTRACE (another user namespace, or a security module)"
    if process.uid is not None and process.uid != os.geteuid():
        return f"it belongs to user {process.uid}, we are {os.geteuid()} and have no CAP_SYS_PTRACE"
    scope = _line(Path("/proc/sys/kernel/yama/ptrace_scope"))
    if scope in ("1", "2", "3"):
        meaning = {"1": "only a parent may trace", "2": "only CAP_SYS_PTRACE may trace", "3": "nobody may trace"}[scope]
        return f"kernel.yama.ptrace_scope is {scope} ({meaning}), and we have no CAP_SYS_PTRACE"
    return "the kernel refuses it (the process forbids tracing, or a security module does)"


# -- explaining --------------------------------------------------------------------------------------------------------


def explain(pid: int) -> Reach:
    """What is possible for the process, and why. Stops nothing. Raises ProcessLookupError if there is no such process."""
    process = look(pid)
    ways = (_collector(process), _kineto(process), _remote_exec(process), _debugger(process))
    return Reach(process, ways, tuple(_notes(process)))


def _collector(process: Process) -> Way:
    name = "collector"
    if process.environ is None:
        return Way(name, False, "its environment cannot be read")
    run_dir = process.environ.get("TRACEANALYZER_RUN_DIR")
    if not run_dir:
        return Way(name, False, "it was not started with our collector (no TRACEANALYZER_RUN_DIR in its environment)")
    found = list((process.root / run_dir.lstrip("/") / "log").glob(f"*{process.pid_inside or process.pid}.talog"))
    if not found:
        return Way(
            name,
            False,
            f"the collector's environment is there, and {run_dir} has no log of it: it has joined no process group",
        )
    return Way(name, True, f"it writes {found[0].name}", f"traceanalyzer capture {run_dir} --steps 3")


def _kineto(process: Process) -> Way:
    name = "kineto_daemon"
    if process.environ is None:
        return Way(name, False, "its environment cannot be read")
    if process.environ.get("KINETO_USE_DAEMON", "") in ("", "0"):
        return Way(
            name, False, "it was started without KINETO_USE_DAEMON=1; torch reads it at import, it cannot be set later"
        )
    if process.torch is False:
        return Way(name, False, "KINETO_USE_DAEMON is set, and the process has loaded no torch")
    if "net" in process.other_namespaces and not process.environ.get("KINETO_IPC_SOCKET_DIR"):
        return Way(
            name,
            False,
            "KINETO_USE_DAEMON is set, and the process is in another network namespace: its requests go there",
        )
    return Way(
        name,
        True,
        "KINETO_USE_DAEMON is set: a trace of three seconds; no groups, no places, no steps",
        f"traceanalyzer attach --pid {process.pid}",
    )


def _remote_exec(process: Process) -> Way:
    name = "remote_exec"
    if process.python is None:
        return Way(name, False, "it is no CPython that could be recognised")
    if process.python < (3, 14):
        return Way(name, False, f"its Python is {_dotted(process.python)}: sys.remote_exec came with 3.14")
    ours = sys.version_info[:2]
    if not hasattr(sys, "remote_exec"):
        return Way(
            name,
            False,
            f"its Python is {_dotted(process.python)}, ours {_dotted(ours)}: run traceanalyzer with the same",
        )
    if ours != process.python:
        return Way(
            name,
            False,
            f"its Python is {_dotted(process.python)}, ours {_dotted(ours)}: both must be the same minor version",
        )
    if (process.environ or {}).get("PYTHON_DISABLE_REMOTE_DEBUG"):
        return Way(name, False, "PYTHON_DISABLE_REMOTE_DEBUG is set in it")
    if (why := _cannot_enter(process)) is not None:
        return Way(name, False, why)
    return Way(
        name,
        True,
        "runs at the next safe point of its main thread, no pause",
        f"traceanalyzer attach --pid {process.pid}",
    )


def _debugger(process: Process) -> Way:
    name = "debugger"
    if process.python is None:
        return Way(name, False, "it is no CPython that could be recognised")
    if process.python < (3, 11):
        return Way(name, False, f"its Python is {_dotted(process.python)}: the collector needs 3.11")
    if (why := _cannot_enter(process)) is not None:
        return Way(name, False, why)
    if shutil.which("gdb") is None:
        return Way(name, False, "gdb is not installed here; without it we have no way to stop and enter a process")
    if process.state in ("T", "t", "Z", "X"):
        return Way(name, False, f"its state is {process.state}: it is stopped or has ended")
    return Way(
        name,
        True,
        "gdb is there and may trace it; the process stands still for a moment, and this is refused while it is inside a "
        "collective",
        f"traceanalyzer attach --pid {process.pid} --inject",
    )


def _cannot_enter(process: Process) -> str | None:
    """What keeps the collector's code out of the process, whatever the way."""
    if process.torch is False:
        workers = f": its children are {', '.join(map(str, process.children))}" if process.children else ""
        return f"it has loaded no torch, so there is nothing to hook{workers}"
    if (why := _may_trace(process)) is not None:
        return f"no right to trace it: {why}"
    if not (process.root / str(INJECT / "sitecustomize.py").lstrip("/")).exists():
        return f"it does not see {INJECT} (container): start traceanalyzer inside it"
    return None


def _notes(process: Process) -> list[str]:
    notes = []
    if process.children and process.rank is None and process.torch is not False:
        children = ", ".join(map(str, process.children))
        notes.append(f"it has no RANK and has children ({children}): if it is torchrun, they are the ranks")
    if process.other_namespaces:
        names = ", ".join(process.other_namespaces)
        notes.append(f"it is in other namespaces ({names}), where its pid is {process.pid_inside}: a container")
    if process.waits_in and process.waits_in != "0":
        notes.append(
            f"its main thread waits in the kernel ({process.waits_in}); whether for a collective, only a debugger can see"
        )
    return notes


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version[:2]))


# -- entering ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entered:
    """What came of it. way: remote_exec or debugger. log: the process's log, None if none appeared. why: what went wrong.

    pause_ns: how long the debugger held the process, all stops together; stops: how often.
    """

    way: str
    log: Path | None
    why: str | None = None
    pause_ns: int = 0
    stops: int = 0


def payload(run_dir: Path, config: Mapping[str, Any]) -> str:
    """Python text that starts the collector in a process; it raises nothing and leaves no names."""
    code = (
        "import importlib.util, os\n"
        f"os.environ['TRACEANALYZER_RUN_DIR'] = {str(run_dir.absolute())!r}\n"
        f"os.environ['TRACEANALYZER_CONFIG'] = {json.dumps(dict(config))!r}\n"
        f"file = {str(INJECT / 'sitecustomize.py')!r}\n"
        "spec = importlib.util.spec_from_file_location('_traceanalyzer_enter', file)\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "module.enter()\n"
    )
    return f"try:\n exec({code!r}, {{}})\nexcept BaseException:\n pass\n"


def enter(
    pid: int,
    run_dir: Path,
    config: Mapping[str, Any],
    *,
    debugger: bool = False,
    attempts: int = 5,
    wait_s: float = 30.0,
    say: Callable[[str], object] = str,
) -> Entered:
    """Puts the collector into the process by the gentlest way that is possible; gdb only with ``debugger``.

    Waits up to ``wait_s`` for its log to appear in RUN_DIR. Raises ProcessLookupError as explain().
    """
    reach = explain(pid)
    before = set(_logs(run_dir, reach.process))
    if reach.way("remote_exec").possible:
        done = _through_remote_exec(reach.process, payload(run_dir, config))
    elif debugger and reach.way("debugger").possible:
        done = _through_gdb(reach.process, payload(run_dir, config), attempts, say)
    elif debugger:
        return Entered("debugger", None, reach.way("debugger").why)
    else:
        return Entered("remote_exec", None, reach.way("remote_exec").why)
    if done.why is not None:
        return done
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        if new := sorted(set(_logs(run_dir, reach.process)) - before):
            return Entered(done.way, new[0], None, done.pause_ns, done.stops)
        if not os.path.exists(f"/proc/{pid}"):
            return Entered(done.way, None, "the process has ended", done.pause_ns, done.stops)
        time.sleep(0.05)
    why = (
        f"the process has not run the collector within {wait_s:g} s: its main thread is inside C code, or it has joined no "
        "process group; it will, as soon as it can"
    )
    return Entered(done.way, None, why, done.pause_ns, done.stops)


def _logs(run_dir: Path, process: Process) -> list[Path]:
    folder = process.root / str(run_dir.absolute()).lstrip("/") / "log"
    return list(folder.glob(f"*{process.pid_inside or process.pid}.talog"))


def _through_remote_exec(process: Process, text: str) -> Entered:
    with tempfile.NamedTemporaryFile("w", suffix=".py", dir=process.root / "tmp", delete=False) as file:
        file.write(text)
    inside = "/" + str(Path(file.name).relative_to(process.root))
    inside = inside if inside.startswith("/") and not inside.startswith("//") else inside[1:]
    os.chmod(file.name, 0o644)
    try:
        sys.remote_exec(process.pid, inside)  # type: ignore[attr-defined]
    except Exception as error:  # noqa: BLE001 - whatever the interpreter has against it, it is the answer
        os.unlink(file.name)
        return Entered("remote_exec", None, f"{type(error).__name__}: {error}")
    # The process reads the file when it comes to it; it is gone with /tmp otherwise.
    threading.Timer(60.0, lambda: Path(file.name).unlink(missing_ok=True)).start()
    return Entered("remote_exec", None)


# -- gdb ---------------------------------------------------------------------------------------------------------------

_COLLECTIVE = re.compile(
    r"\bgloo::(?!transport::\w+::(?:Loop|Context|Device)\b)(?:\w+::)*\w*"
    r"|\bc10d::(?:ops::)?\w*(?:Work|ProcessGroup)\w*::"
    r"(?:wait|synchronize|allreduce|allgather|_allgather|reduce|broadcast|alltoall|gather|scatter|send|recv|barrier)\w*"
    r"|\bp?nccl(?:All|Reduce|Broadcast|Send|Recv|Group|CommInit|Gather|Scatter)\w*"
)
_IDLE = re.compile(
    r"c10d::\w*::(?:runLoop|ncclCommWatchdog|heartbeatMonitor|runHookLoop)|gloo::transport::\w+::Loop::run"
)
_PENDING = re.compile(r"\b(?:make_pending_calls|_?Py_AddPendingCall|_PyEval_AddPendingCall|handle_eval_breaker)\b")
_LIBRARIES = re.compile(
    r"/(?:libpython\d[^/]*|python\d[^/]*|libc|libc-[^/]*|libtorch_cpu|libtorch_python|libtorch_cuda|libnccl)"
    r"(?:\.so[.\d]*)?$"
)


def collective_frames(stacks: str) -> list[str]:
    """Functions in gdb's backtraces of all threads that belong to a collective under way, without those of idle threads."""
    found: list[str] = []
    for thread in re.split(r"(?m)^Thread ", stacks):
        frames = re.findall(r"(?m)^#\d+\s+(?:0x[0-9a-f]+ in )?(.*?)(?: \(\)| from |$)", thread)
        busy = [frame for frame in frames if _COLLECTIVE.search(frame) and not _IDLE.search(frame)]
        if busy:
            found.append(busy[-1].replace("(anonymous namespace)", "{}").split("(")[0][:80])
    return found


class _Gdb:
    """One gdb, asked over pipes."""

    def __init__(self, executable: str) -> None:
        self._process = subprocess.Popen(
            [executable, "-nx", "-q", "-iex", "set debuginfod enabled off", "-iex", "set auto-load off"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env={k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")},
        )
        self._lines: Queue[str | None] = Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._count = 0

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def ask(self, *commands: str, timeout_s: float) -> str:
        """What gdb prints for the commands. Raises TimeoutError, and OSError if it has gone."""
        self._count += 1
        end = f"traceanalyzer-{self._count}"
        assert self._process.stdin is not None
        self._process.stdin.write("\n".join([*commands, f"echo \\n{end}\\n"]) + "\n")
        self._process.stdin.flush()
        deadline, text = time.monotonic() + timeout_s, ""
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                raise TimeoutError(f"gdb did not answer within {timeout_s:g} s") from None
            if line is None:
                raise OSError(f"gdb ended: {text.strip()[-300:]}")
            if line.replace("(gdb) ", "").strip() == end:
                return text.replace("(gdb) ", "")
            text += line

    def interrupt(self) -> None:
        """Breaks off a call in the process that does not return; the process is as it was before the call."""
        self._process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """Ends gdb; it lets go of the process first, and the kernel does so if gdb cannot."""
        with contextlib.suppress(Exception):
            assert self._process.stdin is not None
            self._process.stdin.close()  # end of input: gdb detaches and quits
            self._process.wait(5)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


def _through_gdb(process: Process, text: str, attempts: int, say: Callable[[str], object]) -> Entered:
    gdb = _Gdb(shutil.which("gdb") or "gdb")
    pause, stops, seen = 0, 0, ""
    try:
        # Symbols are read before the process is stopped: libtorch alone takes seconds.
        gdb.ask(
            "set pagination off", "set confirm off", "set width 0", "set auto-solib-add off", "set print thread-events off",
            "set print frame-arguments none", "set unwindonsignal on", "handle all nostop noprint pass", timeout_s=60.0,
        )  # fmt: skip
        for name, base in sorted(process.libraries.items()):
            if _LIBRARIES.search(name):
                gdb.ask(
                    f"add-symbol-file {process.root}{name} -readnever -o {base:#x}".replace("//", "/"), timeout_s=120.0
                )
        for attempt in range(max(1, attempts)):
            time.sleep(0.0 if attempt == 0 else 0.05 + 0.1 * attempt)
            began = time.monotonic_ns()
            try:
                busy, problem = _one_stop(gdb, process.pid, text)
            finally:
                took = time.monotonic_ns() - began
                pause, stops = pause + took, stops + 1
            if problem is not None:
                return Entered("debugger", None, problem, pause, stops)
            if not busy:
                return Entered("debugger", None, None, pause, stops)
            seen = busy
            say(f"stop {stops}, {took / 1e6:.0f} ms: inside a collective ({seen})")
    except (OSError, TimeoutError) as error:
        return Entered("debugger", None, str(error), pause, stops)
    finally:
        gdb.close()
    why = f"refused: the process was inside a collective at each of {stops} stops ({seen})"
    return Entered("debugger", None, why, pause, stops)


def _one_stop(gdb: _Gdb, pid: int, text: str) -> tuple[str, str | None]:
    """Stops the process, looks, and unless it is busy has it run ``text`` later: (what it is busy with, what went wrong)."""
    answer = gdb.ask(f"attach {pid}", timeout_s=30.0)
    if "Could not attach" in answer or "No such process" in answer or "ptrace:" in answer:
        return "", f"gdb: {answer.strip().splitlines()[-1]}"
    try:
        stacks = gdb.ask("thread apply all -s backtrace 48", timeout_s=30.0)
        busy = "; ".join(dict.fromkeys(collective_frames(stacks)))
        if busy:
            return busy, None
        if _PENDING.search(stacks):  # it may hold the lock that Py_AddPendingCall takes
            return "the interpreter's queue of calls", None
        return "", _queue(gdb, pid, text)
    except TimeoutError:
        gdb.interrupt()
        raise
    finally:
        gdb.ask("detach", timeout_s=30.0)


def _queue(gdb: _Gdb, pid: int, text: str) -> str | None:
    """Asks the interpreter to run ``text`` at its next safe point; None, or what went wrong.

    No allocator is entered, because the stopped thread may be inside one: the memory is mapped by a system call of its
    own and stays.
    """
    data = text.encode() + b"\0"
    mapping = "((void*(*)(void*,unsigned long,int,int,int,long))mmap)"
    answer = gdb.ask(f"print/x (unsigned long){mapping}(0, {len(data)}, 3, 34, -1, 0)", timeout_s=20.0)
    found = re.search(r"= (0x[0-9a-f]+)\s*$", answer)
    if found is None or found[1].endswith("ffffffff"):
        return f"gdb could not map memory in the process: {answer.strip()[-200:]}"
    try:
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(int(found[1], 16))
            memory.write(data)
    except OSError as error:
        return f"the text could not be written into the process: {error.strerror or error}"
    call = f"((int(*)(void*,void*))Py_AddPendingCall)((void*)PyRun_SimpleString, (void*){found[1]})"
    answer = gdb.ask(f"print {call}", timeout_s=20.0)
    if re.search(r"= 0\s*$", answer) is None:
        return f"the interpreter did not take the call: {answer.strip()[-200:]}"
    return None
