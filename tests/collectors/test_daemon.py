"""Our daemon for KINETO_USE_DAEMON: the protocol, and a trace on demand of a real job."""

from __future__ import annotations

import errno
import gzip
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from traceanalyzer.collectors import daemon

JOB = Path(__file__).with_name("launch_job.py")


class Client:
    """What torch's profiler sends, from a socket of this process."""

    def __init__(self, folder: Path, name: str = "client") -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(folder / name))
        self.socket.settimeout(10)
        self.to = str(folder / "dynolog")

    def send(self, kind: bytes, payload: bytes) -> None:
        self.socket.sendto(struct.pack("<Q32s", len(payload), kind) + payload, self.to)

    def request(self, pid: int) -> str:
        self.send(b"req", struct.pack("<iiqii", 3, 2, 0, pid, 1))
        return self.answer()[1].decode()

    def answer(self) -> tuple[bytes, bytes]:
        data = self.socket.recv(65536)
        size, kind = struct.unpack_from("<Q32s", data)
        assert size == len(data) - 40
        return kind.rstrip(b"\0"), data[40:]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    found = Client(tmp_path)
    yield found
    found.socket.close()


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name leaves room for the profiler's own socket."""
    with tempfile.TemporaryDirectory(prefix="ta", dir="/tmp") as folder:
        yield Path(folder)


def test_a_process_gets_its_configuration_once(tmp_path: Path, client: Client) -> None:
    """The sender is told apart by what the kernel says of it, not by the pid it writes."""
    stop = threading.Event()
    served: set[int] = set()
    with daemon.Daemon(tmp_path) as ours:
        thread = threading.Thread(
            target=lambda: served.update(ours.serve({os.getpid(): "KEY=1\n"}, lambda _: stop.is_set(), 20))
        )
        thread.start()
        client.socket.sendto(b"too short", client.to)
        client.send(b"ctxt", struct.pack("<iiq", 0, 1, 0))
        assert client.answer() == (b"ctxt", struct.pack("<i", 1))
        client.send(b"what", b"")
        assert client.request(4_000_000) == "KEY=1\n"
        assert client.request(os.getpid()) == ""
        stop.set()
        thread.join()
        assert ours.asked == {os.getpid(): 2}
    assert served == {os.getpid()}
    assert not (tmp_path / "dynolog").exists()


def test_others_get_nothing(tmp_path: Path, client: Client) -> None:
    done = threading.Event()
    with daemon.Daemon(tmp_path) as ours:
        thread = threading.Thread(target=lambda: ours.serve({1: "KEY=1\n"}, lambda _: done.is_set(), 20))
        thread.start()
        assert client.request(os.getpid()) == ""
        done.set()
        thread.join()


def test_the_name_is_taken(tmp_path: Path) -> None:
    with daemon.Daemon(tmp_path), pytest.raises(OSError) as caught:  # noqa: PT011 - its number is what is looked at
        daemon.Daemon(tmp_path)
    assert caught.value.errno == errno.EADDRINUSE


def test_a_short_window_is_made_long_enough() -> None:
    assert daemon.config_text("/tmp/x.json", 1500, 1).splitlines() == [
        "ACTIVITIES_LOG_FILE=/tmp/x.json",
        "PROFILE_REPORT_INPUT_SHAPES=true",
        "ACTIVITIES_DURATION_MSECS=1500",
        "ACTIVITIES_WARMUP_PERIOD_SECS=1",
    ]


def sleeping(env: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process whose environment can be read: the kernel shows it a moment after the start."""
    process = subprocess.Popen(["sleep", "60"], env=env)
    end = time.monotonic() + 10
    while not Path(f"/proc/{process.pid}/environ").read_bytes() and time.monotonic() < end:
        time.sleep(0.01)
    return process


def test_a_process_that_does_not_ask(tmp_path: Path, short: Path) -> None:
    """And one that does not exist; nothing is left in /tmp."""
    (tmp_path / "spool").mkdir()
    env = {**os.environ, "KINETO_IPC_SOCKET_DIR": str(short), "KINETO_ONDEMAND_TRACE_DIR": str(tmp_path / "spool")}
    process = sleeping(env)
    try:
        silent, gone = daemon.capture([process.pid, 4_194_304], tmp_path / "out", timeout_s=0.3)
    finally:
        process.kill()
        process.wait()
    assert silent.file is None
    assert silent.why is not None
    assert silent.why.startswith(f"process {process.pid} did not ask within 0.3 s (it asks every 5 s): ")
    assert gone.why == "pid 4194304: No such file or directory"
    assert not list((tmp_path / "spool").iterdir())
    deep = short / ("x" * 60)
    deep.mkdir()
    process = sleeping({**env, "KINETO_IPC_SOCKET_DIR": str(deep)})
    try:
        (far,) = daemon.capture([process.pid], tmp_path / "out", timeout_s=0.3)
    finally:
        process.kill()
        process.wait()
    assert far.why == f"process {process.pid} cannot ask: its KINETO_IPC_SOCKET_DIR is longer than 54 characters"
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(find_spec("torch") is None, reason="a real job needs torch")
def test_a_trace_of_a_running_job(tmp_path: Path, short: Path) -> None:
    """Started without a collector, with KINETO_USE_DAEMON; the socket is a file, so that nothing else is met."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRACEANALYZER_")} | {
        "KINETO_USE_DAEMON": "1",
        "KINETO_IPC_SOCKET_DIR": str(short),
        "RANK": "3",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [sys.executable, JOB, "forever", tmp_path / "store"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready")
        (captured,) = daemon.capture([process.pid], tmp_path / "out", timeout_s=50)
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert captured == daemon.Captured(process.pid, 3, tmp_path / "out" / "rank00003-ondemand0.json.gz")
    trace = json.loads(gzip.decompress((tmp_path / "out" / "rank00003-ondemand0.json.gz").read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"c10d::allreduce_", "aten::addmm"} <= names
    assert process.returncode == 7
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["rank00003-ondemand0.json.gz"]
