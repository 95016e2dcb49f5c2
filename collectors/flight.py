"""Dumps torch's flight recorder: at the end of the process, and when the job hangs.

The flight recorder is the ring of the last collectives that torch keeps by itself (TORCH_FR_BUFFER_SIZE, 2000 by
default since about 2.7). ``flight/r<rank>.pickle`` is what ``_dump_nccl_trace`` (NCCL builds) or ``_dump_fr_trace``
gives, without stack traces, which take seconds: torch's own format, also what ``torchfrtrace`` reads. For gloo it works
but is poor (no send and recv, no completion, no ranks), for the fake backend it is empty.

A dump is written by rename, and again by each later one. It makes no device synchronisation: the recorder asks events
whether they are done. When it is made:

- at exit, also one by an exception or by a signal handler that raises
- when no step has begun and no call was made for ``hang_s`` (600) seconds, once, by the background thread. The job goes on
  waiting. It is called a hang only if a call is open: a thread is in one, or the recorder holds calls that were not
  completed, as NCCL's are asked. Otherwise the job may as well save a checkpoint, evaluate or load data, and the issue
  says no more than that. While nothing is recorded (dormant), calls go by unseen, and the issue says that

A SIGTERM whose action is the default one ends a process without running any Python: nothing is dumped then, unless the
hang was seen before. Handlers of signals are not replaced.

Importing this module imports no torch.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import pickle
import sys
import threading
import time
from pathlib import Path
from typing import Any

from traceanalyzer.collectors import hooks
from traceanalyzer.collectors.state import state

__all__ = ["Flight", "groups", "install", "installed", "recorded"]

HANG_S = 600.0
_NAMES = ("_dump_nccl_trace", "_dump_fr_trace")


class Flight:
    """The dumps of one process."""

    def __init__(self, session: Any, windows: Any = None) -> None:
        config: dict[str, Any] = getattr(session, "config", None) or {}
        self.session = session
        self.windows = windows
        self.hang_s = float(config.get("hang_s") or HANG_S)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._step: int | None = None
        self._calls = 0
        self._since = time.monotonic()
        self._hangs_at: int | None = None
        self._said = False
        self._closed = False

    def tick(self) -> None:
        """Looks whether the steps go on; for the background thread, about once per second. Never raises."""
        try:
            step = getattr(self.windows, "step", None)
            hook = hooks.current()
            calls = hook.calls() if hook is not None else 0
            now = time.monotonic()
            if (step, calls) != (self._step, self._calls):
                self._step, self._calls, self._since = step, calls, now
                self._hangs_at = None
            elif step is not None and step >= 0 and now - self._since >= self.hang_s and self._hangs_at != step:
                self._hangs_at = step
                self._stands(step)
        except Exception as error:  # noqa: BLE001 - the job does not depend on us
            state.failed("flight.tick", error)

    def _stands(self, step: int) -> None:
        """Nothing has happened for too long: says what is known of it, and dumps."""
        inside = hooks.inside()
        pending = _pending(recorded()[0])
        what = f"no step began and no call was made for {self.hang_s:.0f} s after step {step}"
        if not state.on:
            what = f"no step began for {self.hang_s:.0f} s after step {step}, calls were not watched"
        opened = [f"{inside} of this process's threads are in a call"] if inside else []
        opened += [f"{pending} calls are not completed"] if pending else []
        if opened:
            self._issue("warning", "hang", f"{what}; {', '.join(opened)}: the flight recorder is dumped")
        else:
            self._issue(
                "info",
                "no_progress",
                f"{what}; no call is known to be open, so this may be an evaluation, a checkpoint or a hang elsewhere: the "
                "flight recorder is dumped",
            )
        self.dump()

    def dump(self) -> Path | None:
        """Writes the recorder's content; None where there is none, and an issue says why, once. Never raises."""
        try:
            with self._lock:
                content, why = recorded()
                if content is None:
                    self._lacks(why or "nothing was recorded")
                    return None
                rank = getattr(self.session, "rank", None)
                name = f"p{self._pid}.pickle" if rank is None else f"r{rank:05d}.pickle"
                path = Path(self.session.run_dir) / "flight" / name
                part = path.with_name(f".{name}.{self._pid}")
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    part.write_bytes(content)
                    os.replace(part, path)
                finally:
                    with contextlib.suppress(OSError):
                        part.unlink(missing_ok=True)
                return path
        except OSError as error:
            self._lacks(f"the dump was not written: {error.strerror}")
        except Exception as error:  # noqa: BLE001 - the job does not depend on us
            state.failed("flight.dump", error)
        return None

    def close(self) -> None:
        """The dump at the end of the process. Never raises."""
        if not self._closed and os.getpid() == self._pid:
            self._closed = True
            atexit.unregister(self.close)
            self.dump()

    def _lacks(self, why: str) -> None:
        if not self._said:
            self._said = True
            self._issue("info", "no_flight_recorder", f"no dump of the flight recorder: {why}")

    def _issue(self, severity: str, code: str, sentence: str) -> None:
        log = state.log
        if log is not None:
            log.issue(severity, code, sentence)


def recorded() -> tuple[bytes | None, str | None]:
    """(the recorder's content as a pickle, None), or (None, why there is none). Raises what torch raises.

    torch is not imported: a process that has not imported its c10d has recorded nothing.
    """
    core: Any = sys.modules.get("torch._C._distributed_c10d")
    if core is None:
        return None, "torch.distributed was not used"
    empty: str | None = None
    for name in _NAMES:
        call = getattr(core, name, None)
        if call is None:
            continue
        try:
            content = bytes(call(includeCollectives=True, includeStackTraces=False, onlyActive=False))
        except TypeError:  # other keywords in another torch
            content = bytes(call())
        if _entries(content):
            return content, None
        empty = "it is empty: TORCH_FR_BUFFER_SIZE is 0, or the backend does not record"
    return None, empty or "this torch has none (_dump_fr_trace, _dump_nccl_trace)"


class _Primitives(pickle.Unpickler):
    """Reads pickles of primitives only: a dump holds nothing else."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} in a dump of the flight recorder")


def _read(content: bytes) -> dict[str, Any]:
    found = _Primitives(io.BytesIO(content)).load()
    return found if isinstance(found, dict) else {}


def _entries(content: bytes) -> bool:
    found = _read(content)
    return bool(found.get("entries"))


def _pending(content: bytes | None) -> int:
    """How many calls of a dump are not completed; 0 where the backend does not say when one is (gloo)."""
    entries = _read(content).get("entries") if content is not None else None
    states = [entry.get("state") for entry in entries or () if isinstance(entry, dict)]
    return sum(s in ("scheduled", "started") for s in states) if "completed" in states else 0


def groups(content: bytes) -> dict[str, tuple[str, list[int]]]:
    """Name of each group in a dump -> (description, global ranks). Groups without ranks are left out (gloo's).

    Raises pickle.UnpicklingError for what is no dump.
    """
    config = _read(content).get("pg_config")
    found: dict[str, tuple[str, list[int]]] = {}
    for name, facts in (config or {}).items():
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            ranks = facts.get("ranks")
            ranks = json.loads(ranks) if isinstance(ranks, str) else ranks
            if ranks:
                found[str(name)] = (str(facts.get("desc", "")), [int(rank) for rank in ranks])
    return found


_flight: Flight | None = None


def installed() -> Flight | None:
    """The dumps of this process, once installed."""
    return _flight


def install(session: Any, control: Any = None) -> Flight:
    """Dumps at exit, and on a hang, which the background thread of ``control`` sees (None: of the one installed last).

    session: with ``run_dir``, ``rank`` and ``config``; ``hang_s`` in it is the time without a step that counts as a hang.
    """
    global _flight
    if control is None:
        from traceanalyzer.collectors import control as controls

        control = controls.installed()
    flight = Flight(session, getattr(control, "windows", None))
    _flight = flight
    try:
        atexit.register(flight.close)
        if control is not None:
            control.ticks.append(flight.tick)
    except Exception as error:  # noqa: BLE001 - the job does not depend on us
        state.failed("flight.install", error)
    return flight
