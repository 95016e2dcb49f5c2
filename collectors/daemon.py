"""Traces on demand of jobs that were started with KINETO_USE_DAEMON=1 and without a collector.

The profiler inside such a process asks a daemon on its machine every five seconds whether it should record, and writes
the trace to a file itself. The daemon is ours while the capture lasts: datagrams on the abstract Unix socket
``\\0dynolog\\0``, or on the file ``dynolog`` in KINETO_IPC_SOCKET_DIR. A message is an unsigned 64-bit size of the
payload, 32 bytes of type, and the payload; a request has type ``req`` and the payload {int32 type, int32 n, int64 job,
int32 pids[n]}, its own pid first; the answer's payload is a configuration as text, empty for "nothing to do". Source:
dynolog's ipcfabric headers, and what torch 2.13 sends.

Standard library only; runs outside the job.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import select
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Captured", "Daemon", "capture", "config_text"]

NAME = "dynolog"
POLL_S = 5.0
"""How often the profiler in a process asks (torch 2.13)."""

SHORTEST_MS = 3000
"""The profiler begins and ends at ticks of its own, about a second apart, and cuts the trace to the window asked for: of
windows up to 1000 ms some came out empty (torch 2.13)."""

LONGEST_DIR = 54
"""Bytes of KINETO_IPC_SOCKET_DIR: with the name of the profiler's own socket behind it, a longer one fits no address."""

_HEAD = struct.Struct("<Q32s")
_REQUEST = struct.Struct("<iiq")
_CREDENTIALS = struct.Struct("iii")


class Daemon:
    """Answers the profilers' requests; a context manager.

    socket_dir: KINETO_IPC_SOCKET_DIR of the processes, None for the abstract socket. Raises OSError if the name is taken
    (EADDRINUSE: dynolog itself, or another capture).
    """

    def __init__(self, socket_dir: str | Path | None = None) -> None:
        self._path = None if socket_dir is None else Path(socket_dir) / NAME
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # The kernel says who sends: as this process sees its pid, also across containers.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind(f"\0{NAME}\0".encode() if self._path is None else str(self._path))
            self._socket.setblocking(False)
        except OSError:
            self._socket.close()
            raise
        self.asked: dict[int, int] = {}
        """pid -> requests that came from it."""

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def serve(self, configs: Mapping[int, str], done: Callable[[set[int]], bool], timeout_s: float) -> set[int]:
        """Gives each process its configuration once; others get none. Ends when ``done(pids served)`` or at the timeout.

        Gives the pids that were served.
        """
        served: set[int] = set()
        end = time.monotonic() + timeout_s
        while not done(served) and (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([self._socket], [], [], min(left, 0.2))
            if ready:
                self._answer(configs, served)
        return served

    def _answer(self, configs: Mapping[int, str], served: set[int]) -> None:
        try:
            data, ancillary, _, sender = self._socket.recvmsg(65536, socket.CMSG_SPACE(_CREDENTIALS.size))
        except OSError:
            return
        if len(data) < _HEAD.size or not sender:
            return
        _, kind = _HEAD.unpack_from(data)
        kind = kind.rstrip(b"\0")
        if kind == b"ctxt":  # a process says that it is there; it wants to know how many there are
            self._send(sender, b"ctxt", struct.pack("<i", 1))
            return
        if kind != b"req" or len(data) < _HEAD.size + _REQUEST.size + 4:
            return
        (pid,) = struct.unpack_from("<i", data, _HEAD.size + _REQUEST.size)
        for level, what, value in ancillary:
            if level == socket.SOL_SOCKET and what == socket.SCM_CREDENTIALS and len(value) >= _CREDENTIALS.size:
                pid = _CREDENTIALS.unpack_from(value)[0] or pid
        self.asked[pid] = self.asked.get(pid, 0) + 1
        text = configs.get(pid, "") if pid not in served else ""
        if self._send(sender, b"req", text.encode()) and text:
            served.add(pid)

    def _send(self, to: Any, kind: bytes, payload: bytes) -> bool:
        try:
            self._socket.sendto(_HEAD.pack(len(payload), kind) + payload, to)
        except OSError:
            return False
        return True


def config_text(file: str, duration_ms: int, warmup_s: int) -> str:
    """The configuration of one capture; the process puts ``_<its pid>`` before the suffix of ``file``."""
    return (
        f"ACTIVITIES_LOG_FILE={file}\n"
        "PROFILE_REPORT_INPUT_SHAPES=true\n"
        f"ACTIVITIES_DURATION_MSECS={duration_ms}\n"
        f"ACTIVITIES_WARMUP_PERIOD_SECS={warmup_s}\n"
    )


@dataclass(frozen=True)
class Captured:
    """What came of one process. file: its trace, .json.gz, None where there is none; why says why not."""

    pid: int
    rank: int | None
    file: Path | None
    why: str | None = None


@dataclass(frozen=True)
class _Target:
    pid: int
    environ: dict[str, str]
    pid_inside: int
    root: Path
    uid: int
    gid: int


def capture(
    pids: Sequence[int],
    folder: Path,
    *,
    duration_ms: int = SHORTEST_MS,
    warmup_s: int = 1,
    timeout_s: float = 60.0,
) -> list[Captured]:
    """Traces of ``duration_ms`` (at least 3000) from processes that have KINETO_USE_DAEMON=1, one file each in ``folder``.

    The files are named by rank (rank00000-ondemand0.json.gz), or by pid where the rank is unknown. Raises OSError if the
    daemon's socket is taken.
    """
    targets: dict[int, _Target] = {}
    results: dict[int, Captured] = {}
    for pid in pids:
        try:
            targets[pid] = _target(pid)
        except OSError as error:
            results[pid] = Captured(pid, None, None, f"pid {pid}: {error.strerror or error}")
    dirs = {t.environ.get("KINETO_IPC_SOCKET_DIR") or None for t in targets.values()}
    if len(dirs) > 1:
        raise OSError("the processes have different KINETO_IPC_SOCKET_DIR: capture them one by one")
    socket_dir = next(iter(dirs), None)
    spools: dict[int, Path] = {}
    try:
        with Daemon(socket_dir) as daemon:
            configs: dict[int, str] = {}
            for pid, target in targets.items():
                spools[pid] = _spool(target)
                inside = Path("/") / spools[pid].relative_to(target.root)
                configs[pid] = config_text(f"{inside}/trace.json", max(duration_ms, SHORTEST_MS), warmup_s)

            def written(served: set[int]) -> bool:
                return all(
                    not os.path.exists(f"/proc/{pid}") or (pid in served and _whole(_file(spools[pid], targets[pid])))
                    for pid in targets
                )

            served = daemon.serve(configs, written, timeout_s)
            asked = dict(daemon.asked)
        for pid, target in targets.items():
            results[pid] = _fetched(target, spools[pid], folder, pid in served, pid in asked, timeout_s)
    finally:
        for spool in spools.values():
            shutil.rmtree(spool, ignore_errors=True)
    return [results[pid] for pid in pids]


def _target(pid: int) -> _Target:
    raw = Path(f"/proc/{pid}/environ").read_bytes()
    environ = dict(item.decode(errors="replace").split("=", 1) for item in raw.split(b"\0") if b"=" in item)
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    inside = next((line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:")), str(pid))
    own = os.readlink("/proc/self/ns/mnt") == os.readlink(f"/proc/{pid}/ns/mnt")
    about = Path(f"/proc/{pid}").stat()
    root = Path("/") if own else Path(f"/proc/{pid}/root")
    return _Target(pid, environ, int(inside), root, about.st_uid, about.st_gid)


def _spool(target: _Target) -> Path:
    """A folder that the process can write; newer profilers write only below /tmp or KINETO_ONDEMAND_TRACE_DIR."""
    below = target.environ.get("KINETO_ONDEMAND_TRACE_DIR") or "/tmp"
    spool = Path(tempfile.mkdtemp(prefix="traceanalyzer-", dir=target.root / below.lstrip("/")))
    if os.geteuid() == 0:
        os.chown(spool, target.uid, target.gid)
    return spool


def _file(spool: Path, target: _Target) -> Path:
    return spool / f"trace_{target.pid_inside}.json"


def _whole(file: Path) -> bool:
    """Whether the profiler has finished the file: the name of the trace is what it writes last."""
    try:
        with file.open("rb") as content:
            content.seek(0, os.SEEK_END)
            content.seek(max(0, content.tell() - 4096))
            end = content.read().rstrip()
            return end.endswith(b"}") and b'"traceName"' in end
    except OSError:
        return False


def _has_events(file: Path) -> bool:
    with file.open("rb") as content:
        before = b""
        while part := content.read(1 << 20):
            if b'"ph": "X"' in before + part:
                return True
            before = part[-16:]
    return False


def _fetched(target: _Target, spool: Path, folder: Path, served: bool, asked: bool, timeout_s: float) -> Captured:
    rank = int(text) if (text := target.environ.get("RANK", "")).isdigit() else None
    file = _file(spool, target)
    if not _whole(file):
        if not os.path.exists(f"/proc/{target.pid}"):
            why = f"process {target.pid} ended"
        elif served:
            why = f"process {target.pid} took the request and wrote no whole trace within {timeout_s:g} s"
        elif asked:
            why = f"process {target.pid} asked, and the answer did not reach it"
        elif len(os.fsencode(target.environ.get("KINETO_IPC_SOCKET_DIR", ""))) > LONGEST_DIR:
            why = f"process {target.pid} cannot ask: its KINETO_IPC_SOCKET_DIR is longer than {LONGEST_DIR} characters"
        else:
            why = (
                f"process {target.pid} did not ask within {timeout_s:g} s (it asks every {POLL_S:g} s): it has imported no "
                "torch, its torch has no daemon client, or it is in another network namespace"
            )
        return Captured(target.pid, rank, None, why)
    if not _has_events(file):
        return Captured(target.pid, rank, None, f"process {target.pid} wrote a trace without any event")
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"rank{rank:05d}" if rank is not None else f"pid{target.pid}"
    name = next(n for i in range(1_000_000) if not (folder / (n := f"{stem}-ondemand{i}.json.gz")).exists())
    beside = folder / f".{name}.{os.getpid()}"
    with file.open("rb") as source, gzip.open(beside, "wb", compresslevel=6) as out:
        shutil.copyfileobj(source, out)
    beside.replace(folder / name)
    return Captured(target.pid, rank, folder / name)
