"""The session of one process: opens the log in RUN_DIR, installs what records, and ends in order.

A session is opened by the environment (bootstrap.py), by ``traceanalyzer.collectors.attach`` or by ``open_session``. It
leaves ``RUN_DIR/log/r<rank>-<pid>.talog`` once the process belongs to a process group; a process that never does (a
launcher's agent, a worker of a data loader) leaves nothing.

What is observed at step boundaries is an entry of ``observers``, with ``step_begins(step)`` and ``step_ends(step)``. Marks
call the methods of the same names here.

Killed processes: the log's thread writes every half second, and a file that was cut is whole up to its last frame. A
forked child does not write to its parent's log. Nothing here raises into the job. Importing this module imports no torch.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from traceanalyzer.collectors import hooks
from traceanalyzer.collectors.record import Log
from traceanalyzer.collectors.state import state

__all__ = ["OPTIONS", "Session", "configuration", "current", "open_session"]

OPTIONS = frozenset(
    {
        "run_dir",
        "steps",
        "ranks",
        "profile_ranks",
        "hooks",
        "marks",
        "dormant",
        "max_log_bytes",
        "max_queue",
        "errors_allowed",
        "keep_raw",
        "raw_limit_bytes",
        "steps_per_window",
        "control",
        "hang_s",
        "poll_s",
    }
)
"""Keys of the configuration; others are ignored, and an issue says so."""

_MODES = ("auto", "methods", "dispatcher")
_PARTS = ("window", "control", "flight")


def configuration(environ: Mapping[str, str]) -> dict[str, Any]:
    """What TRACEANALYZER_CONFIG and TRACEANALYZER_RUN_DIR say; what cannot be read is left out."""
    found: Any = {}
    with contextlib.suppress(ValueError):
        found = json.loads(environ.get("TRACEANALYZER_CONFIG") or "{}")
    given: dict[str, Any] = dict(found) if isinstance(found, dict) else {}
    if environ.get("TRACEANALYZER_RUN_DIR"):
        given["run_dir"] = environ["TRACEANALYZER_RUN_DIR"]
    return given


class Session:
    """What records in this process. Made by open_session(); a context manager that closes it.

    run_dir: folder of the run. rank, world_size: null until torch.distributed knows them. config: as given.
    facts: what was installed, and why. observers: told of step boundaries. on: whether calls are recorded.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self.run_dir = Path(self.config["run_dir"]).absolute()
        self.rank: int | None = None
        self.world_size: int | None = None
        self.facts: dict[str, Any] = {}
        self.observers: list[Any] = []
        self.closed = False
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._started_ns = time.time_ns()
        self._parts: list[Any] = []
        self._logging = False
        self.log = self._new_log()

    # -- life ------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        state.errors_allowed = self._number("errors_allowed", 20)
        state.errors = 0
        state.disabled = None
        state.step = None
        state.place = 0
        state.log = self.log
        state.on_disable.append(self._disabled)
        hooks.on_change.append(self._changed)
        hooks.on_group.append(self.learn_rank)
        atexit.register(self.close)  # before the parts register theirs: they end first
        self._end_with_multiprocessing()
        for key in sorted(set(self.config) - OPTIONS):
            self.log.issue("warning", "unknown_option", f"the option {hooks.text(key)} is not known and was ignored")
        self._install_hooks()
        if self.config.get("marks", True):
            self._part("marks")
        for name in _PARTS:
            self._part(name)
        self._say_run()
        self.learn_rank()
        if not self.config.get("dormant"):
            self.activate()

    def _install_hooks(self) -> None:
        mode = self.config.get("hooks", "auto")
        if mode not in _MODES:
            self.log.issue("warning", "unknown_option", f"hooks: {hooks.text(mode)} is not known; auto was taken")
            mode = "auto"
        try:
            hooks.install(mode)
            self.facts["hooks"] = hooks.report()
        except Exception as error:  # noqa: BLE001 - a job on another torch goes on without the hooks
            words = f"{type(error).__name__}: {error}"
            self.facts["hooks"] = {"mode": mode, "missing": words}
            self.log.issue("data_loss", "hooks_not_installed", f"calls are not recorded: {words}")

    def _part(self, name: str) -> None:
        """Installs one part; its absence is a fact, its failure an error of ours."""
        try:
            module = importlib.import_module(f"traceanalyzer.collectors.{name}")
        except ModuleNotFoundError as error:
            self.facts[name] = f"not installed: {error}"
            return
        except Exception as error:  # noqa: BLE001 - one missing part leaves the others
            self.facts[name] = f"not installed: {type(error).__name__}: {error}"
            state.failed(f"import of {name}", error)
            return
        install = getattr(module, "install", None)
        if install is None:
            return
        try:
            made = install(self)
            self.facts[name] = made if isinstance(made, str) else "installed"
            self._parts.append((module, made))
        except Exception as error:  # noqa: BLE001 - one missing part leaves the others
            self.facts[name] = f"not installed: {type(error).__name__}: {error}"
            state.failed(f"{name}.install", error)

    def close(self) -> None:
        """Ends the session: parts, hooks, log. Does nothing the second time, and in a forked child. Never raises."""
        with self._lock:
            if self.closed or os.getpid() != self._pid:
                return
            self.closed = True
        try:
            self.learn_rank()
            if state.log is self.log:
                self._say_job()  # while marks still know what they saw
            for module, made in reversed(self._parts):
                self._end_part(module, made)
            if state.log is self.log:
                hooks.say_groups()
                state.on = state.marking = False
            hook = hooks.current()
            calls = hook.calls() if hook is not None else 0
            hooks.uninstall()
            self._forget()
            self.log.put(
                [
                    "end",
                    {
                        "calls": calls,
                        "recorded": calls - min(calls, self.log.dropped),
                        "dropped": self.log.dropped,
                        "errors": state.errors,
                        "disabled": state.disabled,
                    },
                ]
            )
            self.log.close()
        except Exception as error:  # noqa: BLE001 - the job has ended well
            state.failed("close", error)
        finally:
            if state.log is self.log:
                state.on = state.marking = False
                state.log = None

    def _end_part(self, module: Any, made: Any) -> None:
        for owner, name in ((made, "close"), (module, "uninstall")):
            call = getattr(owner, name, None)
            if call is not None:
                try:
                    call()
                except Exception as error:  # noqa: BLE001 - the others are to end too
                    state.failed(f"{module.__name__}.{name}", error)

    def _forget(self) -> None:
        global _session
        for where, what in (
            (state.on_disable, self._disabled),
            (hooks.on_change, self._changed),
            (hooks.on_group, self.learn_rank),
        ):
            while what in where:
                where.remove(what)
        atexit.unregister(self.close)
        if _session is self:
            _session = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- switching ---------------------------------------------------------------------------------------------------

    @property
    def on(self) -> bool:
        return state.on and state.log is self.log

    def activate(self) -> None:
        """Records calls from now on. To be called between calls, best at a step boundary. Never raises."""
        if state.disabled is not None or self.closed or state.log is not self.log:
            return
        self.learn_rank()
        state.on = True
        hooks.switched()
        if self.rank is not None:
            hooks.say_groups()

    def deactivate(self) -> None:
        """Records no call from now on: torch's methods are its own again. Never raises."""
        state.on = False
        hooks.switched()

    def step_begins(self, step: int) -> None:
        """A step begins: marks say so, on the thread that runs the model. Never raises."""
        state.step = step
        if self.rank is None:
            self.learn_rank()
        elif state.disabled is not None:
            hooks.switched()  # what could not be taken away inside of a call
        for observer in self.observers:
            try:
                observer.step_begins(step)
            except Exception as error:  # noqa: BLE001 - the job goes on
                state.failed("step_begins", error)
        if state.on:
            hooks.say_groups()

    def step_ends(self, step: int) -> None:
        """A step has ended. Never raises."""
        for observer in self.observers:
            try:
                observer.step_ends(step)
            except Exception as error:  # noqa: BLE001 - the job goes on
                state.failed("step_ends", error)
        state.step = None

    # -- what the log says of the process ----------------------------------------------------------------------------

    def _new_log(self) -> Log:
        return Log(
            self._path(),
            max_queue=self._number("max_queue", 200_000),
            max_bytes=self._number("max_log_bytes", 2 << 30),
            on_failure=self._log_failed,
        )

    def _number(self, key: str, default: int) -> int:
        value = self.config.get(key)
        return value if type(value) is int and value >= 0 else default

    def _path(self) -> Path:
        name = f"p{os.getpid()}" if self.rank is None else f"r{self.rank:05d}-{os.getpid()}"
        return self.run_dir / "log" / f"{name}.talog"

    def learn_rank(self) -> None:
        """Asks torch.distributed for the rank, if it is not known; the log is begun when it is. Never raises."""
        if self._logging and self.rank is not None:
            return
        try:
            with self._lock:
                distributed = sys.modules.get("torch.distributed")
                if distributed is None or not distributed.is_available() or not distributed.is_initialized():
                    return
                if self.rank is None:
                    self.rank = int(distributed.get_rank())
                    self.world_size = int(distributed.get_world_size())
                    self._say_run()
                if not self._logging:
                    self._logging = True
                    self.log.path = self._path()
                    if not self.log.start():
                        self._log_failed(self.log.failure or "cannot be written")
        except Exception as error:  # noqa: BLE001 - the job goes on
            state.failed("learn_rank", error)

    def _say_run(self) -> None:
        torch = sys.modules.get("torch")
        self.log.put(
            [
                "run",
                {
                    "rank": self.rank,
                    "world_size": self.world_size,
                    "local_rank": _whole(os.environ.get("LOCAL_RANK")),
                    "pid": self._pid,
                    "host": socket.gethostname(),
                    "python": platform.python_version(),
                    "torch": str(getattr(torch, "__version__", "")) or None,
                    "argv": list(getattr(sys, "orig_argv", sys.argv)),
                    "started_ns": self._started_ns,
                    "restart": _whole(os.environ.get("TORCHELASTIC_RESTART_COUNT")),
                    "config": self.config,
                    "hooks": dict(self.facts),
                    "clock": {"time_ns": time.time_ns(), "perf_counter_ns": time.perf_counter_ns()},
                },
            ]
        )

    def _say_job(self) -> None:
        """Has the job described, if marks did not meet a step at which to do it."""
        marks = sys.modules.get("traceanalyzer.collectors.marks")
        if getattr(getattr(marks, "_marks", None), "job_said", None):
            return
        try:
            jobinfo = importlib.import_module("traceanalyzer.collectors.jobinfo")
        except ModuleNotFoundError:
            return
        if self._logging:
            self.log.put(["job", jobinfo.capture()])

    # -- what goes wrong ---------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        self.facts["hooks"] = hooks.report()
        self._say_run()

    def _log_failed(self, why: str) -> None:
        state.disable(f"{self.log.path}: {why}")

    def _disabled(self) -> None:
        self.facts["disabled"] = state.disabled

    # -- processes -----------------------------------------------------------------------------------------------------

    def _end_with_multiprocessing(self) -> None:
        """A child that multiprocessing forks ends without atexit: it is to close a session that was opened in it."""
        if "multiprocessing.process" not in sys.modules:
            return
        with contextlib.suppress(Exception):
            from multiprocessing import process, util

            if getattr(process, "_parent_process", None) is not None:
                util.Finalize(None, self.close, exitpriority=100)
            util.register_after_fork(self, Session._end_in_child)

    def _end_in_child(self) -> None:
        from multiprocessing import util

        session = current()
        if session is not None:
            util.Finalize(None, session.close, exitpriority=100)


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


_lock = threading.Lock()
_session: Session | None = None
_forks_known = False


def current() -> Session | None:
    """The session of this process; None if none is open."""
    session = _session
    return session if session is not None and session._pid == os.getpid() else None


def open_session(config: Mapping[str, Any] | None = None) -> Session:
    """Opens the session of this process, or gives the one that is open.

    config: keys of OPTIONS; None: from the environment. ``run_dir`` is taken from TRACEANALYZER_RUN_DIR where it is not
    given. Raises ValueError without one; nothing else: a session that cannot record is disabled, with a line on stderr.
    """
    global _session
    given = configuration(os.environ)
    if config is not None:
        given = {**({"run_dir": given["run_dir"]} if "run_dir" in given else {}), **config}
    if not given.get("run_dir"):
        raise ValueError("no folder for the run: give run_dir or set TRACEANALYZER_RUN_DIR")
    with _lock:
        session = current()
        if session is not None:
            return session
        session = _session = Session(given)
        _know_forks()
    try:
        session._open()
    except Exception as error:  # noqa: BLE001 - the job goes on
        state.disable(f"{type(error).__name__} at the start: {error}")
    return session


def _know_forks() -> None:
    global _forks_known
    if not _forks_known:
        _forks_known = True
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    """In a forked child: nothing of the parent's is written to. Never raises."""
    global _session, _lock
    parent = _session
    state.on = state.marking = False
    state.log = None
    state.step = None
    _session = None
    _lock = threading.Lock()  # another thread of the parent may have held it
    state._lock = threading.Lock()
    try:
        hooks.after_fork()
        if parent is None or parent.closed:
            return
        atexit.unregister(parent.close)
        parent._lock = threading.RLock()
        parent._forget()
        if not parent._logging:  # no process group yet: this may be a rank's own process
            open_session(parent.config)
    except Exception as error:  # noqa: BLE001 - the child goes on
        state.failed("after_fork", error)
