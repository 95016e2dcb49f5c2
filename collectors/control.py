"""Arms a job while it runs: heartbeats, the request, and the step at which all ranks begin.

In the job, one background thread per process does everything; the training thread compares one integer per step
(Windows.armed_from). Once per second at most the thread writes ``control/beat/r<rank>``, and looks for
``control/request.json``: local rank 0 of each node asks the file system of RUN_DIR and mirrors the request into a folder
of the node, the other ranks of the node ask that folder (and RUN_DIR itself every tenth time, should local rank 0 be
gone). Outside the job, ``traceanalyzer capture`` reads the heartbeats, names a step that no rank can have reached by the
time it knows, writes the request by rename, and follows in the heartbeats who joined.

``control/beat/r<rank>`` is one JSON object, padded to a fixed length and written in place::

    rank, world_size, host, pid
    step        the last step that began; null: no step was marked yet
    step_ns     when that was noticed, unix ns; alive_ns: when this was written
    step_s      seconds per step, as the thread saw it after the first, which is slower; null: not known yet
    every_s     the heartbeats' interval: 1 s, in large jobs longer, so that a job writes 256 per second at most
    dormant     whether the hooks wait to be armed
    capture     null or {id, state, step, why}: what became of the last request on this rank. state: armed, waiting (no
                steps are marked), refused, joined, late, skipped, ended (the job ended first), failed, done
    ended       true in the last one of a process that ends in order

``control/request.json``::

    schema      "traceanalyzer.capture/1"
    id          text; a process takes each request once, and never one that was there when it started
    start       the first step; steps: how many
    fallback    the first step of a rank that learns of the request when ``start`` has gone by; later than that it skips
    profile     whether torch.profiler records; ranks: on which, a list or "all"; null: as the job was started
    created_ns  when it was written

Standard library only.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import math
import os
import socket
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traceanalyzer.collectors import window
from traceanalyzer.collectors.state import state
from traceanalyzer.collectors.window import Plan, Windows

__all__ = [
    "FINAL",
    "Beat",
    "CaptureError",
    "Control",
    "Progress",
    "beats",
    "choose_start",
    "follow",
    "install",
    "installed",
    "living",
    "paced",
    "request",
]

SCHEMA = "traceanalyzer.capture/1"
POLL_S = 1.0
BEATS_PER_SECOND = 256
ALIVE_EVERY_S = 10.0
"""A heartbeat without a new step comes this seldom."""
MIRROR_TURNS = 10
"""A rank that asks its node's folder asks RUN_DIR itself once in so many times."""
BEAT_BYTES = 768
FINAL = frozenset({"done", "skipped", "refused", "waiting", "ended", "failed"})
"""States of a capture on a rank after which nothing more happens there."""

_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID")


# -- in the job --------------------------------------------------------------------------------------------------------


class Control:
    """The background thread of one process. ticks: called once per turn of it, for other parts that have to look."""

    def __init__(self, session: Any, windows: Windows) -> None:
        config: dict[str, Any] = getattr(session, "config", None) or {}
        self.session = session
        self.windows = windows
        self.folder = Path(session.run_dir) / "control"
        self.dormant = bool(config.get("dormant"))
        self.profile_ranks: list[int] | None = config.get("profile_ranks")
        self.poll_s = float(config.get("poll_s") or POLL_S)
        self.every_s = self.poll_s
        self.ticks: list[Callable[[], None]] = []
        self.capture: dict[str, Any] | None = None
        self.local_rank = _local_rank(session)
        self._wake = threading.Event()
        self._stop = False
        self._pid = os.getpid()
        self._host = socket.gethostname()
        self._seen: str | None = None
        self._stamps: dict[Path, tuple[int, int, int]] = {}
        self._turn = 0
        self._mirror: Path | None = None
        self._step_ns = 0
        self._step = -1
        self._step_s: float | None = None
        self._paces = 0
        self._beat_at = 0.0
        self._beaten = -2
        self._changed = True
        self._thread: threading.Thread | None = None
        self._unwritable = False

    @property
    def rank(self) -> int | None:
        return getattr(self.session, "rank", None)

    @property
    def world_size(self) -> int | None:
        return getattr(self.session, "world_size", None)

    def start(self) -> None:
        known = self._read(self.folder / "request.json")
        self._seen = known.get("id") if known else None
        if self.local_rank is not None:
            self._mirror = _node_folder(Path(self.session.run_dir))
        self._thread = threading.Thread(target=self._run, name="traceanalyzer-control", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            try:
                self.turn()
            except Exception as error:  # noqa: BLE001 - the job does not depend on us
                state.failed("control", error)
            if state.disabled is not None:
                return
            self._wake.wait(self.poll_s)
            self._wake.clear()

    def turn(self) -> None:
        """One look around: heartbeat, request, ticks."""
        self.every_s = max(self.poll_s, (self.world_size or 1) / BEATS_PER_SECOND)
        self._watch_step()
        found = self._look()
        if found is not None:
            self._take(found)
        now = time.monotonic()
        since = now - self._beat_at
        due = self._step != self._beaten and since >= 0.9 * self.every_s
        if self._changed or due or since >= max(ALIVE_EVERY_S, self.every_s):
            self.beat()
        for tick in self.ticks:
            tick()

    def _watch_step(self) -> None:
        step, now = self.windows.step, time.time_ns()
        if step != self._step:
            if self._step >= 0 and step > self._step:
                self._paces += 1
                if self._paces > 1:
                    self._step_s = (now - self._step_ns) / 1e9 / (step - self._step)
            self._step, self._step_ns = step, now

    # -- request -----------------------------------------------------------------------------------------------------

    def _look(self) -> dict[str, Any] | None:
        """A request that is new to this process."""
        self._turn += 1
        central = self.folder / "request.json"
        mirror = None if self._mirror is None else self._mirror / "request.json"
        leads = mirror is None or self.local_rank == 0
        found = None
        if not leads and mirror is not None:
            found = self._read(mirror, owned=True)
        if leads or (found is None and self._turn % MIRROR_TURNS == 0):
            found = self._read(central)
            if found is not None and mirror is not None and self.local_rank == 0:
                self._copy(found, mirror)
        if found is None or found.get("id") == self._seen:
            return None
        return found

    def _read(self, path: Path, *, owned: bool = False) -> dict[str, Any] | None:
        """What a file holds if it changed since it was last read; None where there is none, or it is no request."""
        try:
            facts = os.lstat(path)
        except OSError:
            return None
        stamp = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
        if self._stamps.get(path) == stamp or (owned and facts.st_uid != os.getuid()):
            return None
        self._stamps[path] = stamp
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and found.get("schema") == SCHEMA else None

    def _copy(self, found: dict[str, Any], mirror: Path) -> None:
        with contextlib.suppress(OSError):  # the others ask RUN_DIR themselves, later
            mirror.parent.mkdir(mode=0o700, exist_ok=True)
            if os.lstat(mirror.parent).st_uid == os.getuid():
                _replace(mirror, found)

    def _take(self, found: dict[str, Any]) -> None:
        """Arms what a request asks for."""
        self._seen = found["id"]
        try:
            start, steps = int(found["start"]), int(found["steps"])
            fallback = None if found.get("fallback") is None else int(found["fallback"])
            ranks = self.profile_ranks if found.get("ranks") is None else found["ranks"]
            wanted = bool(found.get("profile", True))
        except (KeyError, TypeError, ValueError) as error:
            state.failed("request", error)
            return
        self._say("armed", start, None)
        if self.windows.step < 0:
            self._say("waiting", None, "this rank marks no steps, so nothing says where one begins")
            self.windows.issue(
                "warning", "capture_no_steps", "a capture was asked for, but no step was ever marked here"
            )
            return
        ranks = ranks if isinstance(ranks, list) else None
        plan = Plan(start, start + steps - 1, wanted, ranks, self.dormant, fallback, self._told)
        if not self.windows.arm(plan):
            self._say("refused", None, "other steps are armed already")
            self.windows.issue("warning", "capture_refused", "a capture was asked for while another one was armed")

    def _told(self, what: str, step: int, why: str | None) -> None:
        """From the training thread."""
        self._say(what, step, why)
        self._wake.set()

    def _say(self, what: str, step: int | None, why: str | None) -> None:
        before = self.capture or {}
        if before.get("id") == self._seen:
            why = why or before.get("why")
            if what == "done":
                step = before.get("step")
        self.capture = {"id": self._seen, "state": what, "step": step, "why": why}
        self._changed = True

    # -- heartbeat ---------------------------------------------------------------------------------------------------

    def beat(self, ended: bool = False) -> None:
        """Writes the heartbeat, in place: readers skip one that is torn."""
        capture = self.capture
        if capture is not None and capture["state"] == "done" and self.windows.writing:
            capture = {**capture, "state": "joined", "why": "the trace is being written"}
            self._changed = True
        else:
            self._changed = False
        self._beat_at, self._beaten = time.monotonic(), self._step
        if self.rank is None or self._unwritable:
            return
        facts = {
            "rank": self.rank,
            "world_size": self.world_size,
            "host": self._host[:64],
            "pid": self._pid,
            "step": None if self._step < 0 else self._step,
            "step_ns": self._step_ns,
            "alive_ns": time.time_ns(),
            "step_s": self._step_s,
            "every_s": self.every_s,
            "poll_s": self.poll_s,
            "dormant": self.dormant,
            "capture": None if capture is None else {**capture, "why": capture["why"] and capture["why"][:120]},
            "ended": ended,
        }
        try:
            path = self.folder / "beat" / f"r{self.rank:05d}"
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.write(file, json.dumps(facts, separators=(",", ":")).encode().ljust(BEAT_BYTES - 1) + b"\n")
            finally:
                os.close(file)
        except OSError as error:
            self._unwritable = True
            self.windows.issue(
                "warning", "no_heartbeat", f"no heartbeat can be written: {error.strerror}: no capture later"
            )

    def close(self) -> None:
        """Closes the windows, says that the process ends, and removes the node's folder. Never raises."""
        if self._stop or os.getpid() != self._pid:
            return
        self._stop = True
        atexit.unregister(self.close)
        self._wake.set()
        try:
            self.windows.close()
            thread = self._thread
            if thread is not None and thread is not threading.current_thread():
                thread.join(2.0)
            self._watch_step()
            self.beat(ended=True)
            if self.local_rank == 0 and self._mirror is not None and self._mirror.exists():
                for left in self._mirror.iterdir():
                    left.unlink(missing_ok=True)
                self._mirror.rmdir()
        except Exception as error:  # noqa: BLE001 - the process ends in any case
            state.failed("control.close", error)


def _local_rank(session: Any) -> int | None:
    known = getattr(session, "local_rank", None)
    if isinstance(known, int):
        return known
    return next((int(v) for name in _LOCAL_RANK if (v := os.environ.get(name, "")).isdigit()), None)


def _node_folder(run_dir: Path) -> Path:
    """A folder on this node that stands for the run; made when there is something to put into it."""
    who = f"{os.getuid()}:{os.path.realpath(run_dir)}:{os.environ.get('TORCHELASTIC_RUN_ID', '')}"
    return Path(tempfile.gettempdir()) / f"traceanalyzer-{hashlib.sha256(who.encode()).hexdigest()[:16]}"


def _replace(path: Path, document: dict[str, Any]) -> None:
    """Writes a file that appears whole."""
    part = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    try:
        part.write_text(json.dumps(document))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


_control: Control | None = None


def installed() -> Control | None:
    """The control of this process, once installed."""
    return _control


def install(session: Any, windows: Windows | None = None) -> Control:
    """Starts the background thread; ``"control": false`` in the configuration leaves it out.

    session: with ``run_dir``, ``rank``, ``world_size`` and ``config``. windows: None: those installed last.
    """
    global _control
    control = Control(session, windows or window.installed() or window.install(session))
    _control = control
    try:
        atexit.register(control.close)
        if (getattr(session, "config", None) or {}).get("control", True):
            control.start()
    except Exception as error:  # noqa: BLE001 - the job does not depend on us
        state.failed("control.install", error)
    return control


# -- outside the job ---------------------------------------------------------------------------------------------------


class CaptureError(Exception):
    """A capture that cannot be asked for; the text says why and what would help."""


@dataclass
class Beat:
    """One rank's last heartbeat; see the module's table. step: null is None."""

    rank: int
    world_size: int | None
    host: str
    pid: int
    step: int | None
    step_ns: int
    alive_ns: int
    step_s: float | None
    every_s: float
    poll_s: float
    dormant: bool
    capture: dict[str, Any] | None
    ended: bool


@dataclass
class Progress:
    """How far a capture is: ranks by state of the request. unheard: ranks that have not said anything of it yet."""

    start: int
    at_step: int | None
    by_state: dict[str, list[Beat]] = field(default_factory=dict)
    unheard: list[Beat] = field(default_factory=list)
    gone: list[Beat] = field(default_factory=list)
    finished: bool = False


def beats(run_dir: Path) -> list[Beat]:
    """The heartbeats in RUN_DIR by rank; torn ones are read again, unreadable ones left out."""
    found = []
    names = Beat.__dataclass_fields__
    for path in sorted((run_dir / "control" / "beat").glob("r*")):
        for _ in range(3):
            try:
                facts = json.loads(path.read_bytes())
                found.append(Beat(**{name: facts[name] for name in names}))
                break
            except (ValueError, KeyError, TypeError):
                time.sleep(0.01)
            except OSError:
                break
    return sorted(found, key=lambda beat: beat.rank)


def living(run_dir: Path, patience_s: float | None = None) -> list[Beat]:
    """The heartbeats of processes that have not ended, once one of them has changed: so the job lives.

    patience_s: how long to wait for that; None: two of their intervals. Raises CaptureError with what is missing.
    """
    first = beats(run_dir)
    if not first:
        raise CaptureError(
            f"{run_dir}: no rank has left a heartbeat. The job has to be started with the collector (traceanalyzer attach "
            "--dormant ...), and to have opened its process group."
        )
    open_ = {beat.rank: beat.alive_ns for beat in first if not beat.ended}
    if not open_:
        raise CaptureError(f"{run_dir}: the job has ended: all {len(first)} ranks say so.")
    interval = max(max(beat.every_s for beat in first), ALIVE_EVERY_S)
    until = time.monotonic() + (2 * interval if patience_s is None else patience_s)
    while time.monotonic() < until:
        now = beats(run_dir)
        if any(beat.alive_ns != open_.get(beat.rank) for beat in now):
            return [beat for beat in now if not beat.ended]
        time.sleep(0.1)
    raise CaptureError(
        f"{run_dir}: no rank gave a sign of life for {interval * 2 if patience_s is None else patience_s:.0f} s: the job is "
        f"gone or stopped. Last seen: {_last_seen(first)}."
    )


def paced(run_dir: Path, found: list[Beat], patience_s: float = 60.0) -> list[Beat]:
    """The heartbeats once each rank that marks steps knows how long they take; after ``patience_s`` as they are then.

    Right after the start of a job nobody knows, and the next safe step cannot be chosen.
    """
    until = time.monotonic() + patience_s
    while any(beat.step is not None and beat.step_s is None for beat in found) and time.monotonic() < until:
        time.sleep(0.1)
        found = [beat for beat in beats(run_dir) if not beat.ended] or found
    return found


def _last_seen(found: Sequence[Beat]) -> str:
    last = max(found, key=lambda beat: beat.alive_ns)
    where = "no step" if last.step is None else f"step {last.step}"
    return (
        f"rank {last.rank} on {last.host} at {where}, {time.strftime('%H:%M:%S', time.localtime(last.alive_ns / 1e9))}"
    )


def choose_start(found: Sequence[Beat]) -> int:
    """A step that no rank can have reached before it knows of the request. Raises CaptureError where no step is known.

    Heartbeats are compared with the newest among them, not with the clock here. Where a rank stands now is extrapolated
    with the seconds per step; then two polls (of local rank 0, and of the others), one interval and one second go by.
    Where no rank knows its seconds per step (see paced), half a second is taken, or as long as the step runs already.
    """
    known = [beat for beat in found if beat.step is not None]
    if not known:
        raise CaptureError(
            "no rank has marked a step, so nothing says where one begins: the job is still starting, or its loop is none "
            "that this collector knows. Steps are marked by Megatron's train_step and by torch optimizers."
        )
    newest = max(beat.alive_ns for beat in known)
    paces = [beat.step_s for beat in known if beat.step_s]
    pace = statistics.median(paces) if paces else max(0.5, min(newest - beat.step_ns for beat in known) / 1e9)
    lead_s = max(2 * beat.poll_s + beat.every_s for beat in known) + 1.0
    moving = [beat for beat in known if _moves(beat, newest)]
    if not moving:
        raise CaptureError(f"the processes live, but none has begun a step lately: the job hangs. {_last_seen(known)}.")
    here = max((beat.step or 0) + math.ceil(max(newest - beat.step_ns, 0) / 1e9 / pace) for beat in moving)
    return here + math.ceil(lead_s / pace) + 2


def _moves(beat: Beat, newest: int) -> bool:
    return True if beat.step_s is None else newest - beat.step_ns < max(60.0, 20 * beat.step_s) * 1e9


def request(
    run_dir: Path,
    *,
    start: int,
    steps: int,
    ranks: Sequence[int] | str | None = None,
    profile: bool = True,
    fallback: int | None = None,
) -> dict[str, Any]:
    """Writes the request; gives the document. fallback: None: as far after the end as the end is after the start."""
    document = {
        "schema": SCHEMA,
        "id": uuid.uuid4().hex,
        "start": start,
        "steps": steps,
        "fallback": start + 2 * steps + 2 if fallback is None else fallback,
        "profile": profile,
        "ranks": ranks if ranks is None or isinstance(ranks, str) else list(ranks),
        "created_ns": time.time_ns(),
    }
    folder = run_dir / "control"
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / "request.json", document)
    return document


def follow(
    run_dir: Path, document: dict[str, Any], expected: Sequence[Beat], timeout_s: float, every_s: float = 0.3
) -> Iterator[Progress]:
    """How the request fares, again and again until every rank of ``expected`` is through, gone, or time is up."""
    until = time.monotonic() + timeout_s
    alive = {beat.rank: (beat.alive_ns, time.monotonic()) for beat in expected}
    while True:
        now = {beat.rank: beat for beat in beats(run_dir)}
        steps = [beat.step for beat in now.values() if beat.step is not None]
        progress = Progress(document["start"], max(steps, default=None))
        for rank, (seen_ns, seen_at) in list(alive.items()):
            beat = now.get(rank)
            if beat is None:
                continue
            if beat.alive_ns != seen_ns:
                alive[rank] = (beat.alive_ns, time.monotonic())
            answer = beat.capture if beat.capture and beat.capture.get("id") == document["id"] else None
            silent_s = time.monotonic() - seen_at
            if answer is not None and (answer["state"] in FINAL or not beat.ended):
                progress.by_state.setdefault(answer["state"], []).append(beat)
            if beat.ended or silent_s > 3 * max(beat.every_s, ALIVE_EVERY_S):
                if answer is None or answer["state"] not in FINAL:
                    progress.gone.append(beat)
            elif answer is None:
                progress.unheard.append(beat)
        waiting = sum(len(b) for s, b in progress.by_state.items() if s not in FINAL) + len(progress.unheard)
        stopped = {beat.rank for beat in progress.gone}
        running = sum(b.rank not in stopped for s, bs in progress.by_state.items() if s not in FINAL for b in bs)
        progress.finished = waiting == 0 or (not progress.unheard and running == 0)
        yield progress
        if progress.finished or time.monotonic() >= until:
            return
        time.sleep(every_s)
