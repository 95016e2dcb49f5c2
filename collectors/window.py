"""Windows of torch.profiler: opened and closed on the main thread at step boundaries, written by a helper thread.

A window covers whole steps. Its profiler is prepared one step earlier where that step is seen (CUPTI starts up then; what
ran before the window has no metadata in a trace, so nothing may be launched in the window's first moments by a profiler
that is still starting). After the last step the profiler is stopped, and that is all the job waits for: stopping takes
torch itself about 2 s per 100 MB of trace, and ends with the device synchronisation that torch.profiler makes. Writing
the file (about 0.6 s per 100 MB) lets go of Python's lock, so a thread does it while the job goes on, and a low-priority
child process, started by ``subprocess`` and never by fork, packs it: ``trace/r00000-w0.json`` becomes ``.json.gz`` by
rename. A reader that finds no ``.json.gz`` yet takes the ``.json``, which is whole from the moment it has that name.

torch.autograd.profiler.profile is used, not the class on top of it, because that one imports torch._inductor (823
modules, 1 s) into a job that may not need it.

What would harm the job, and what is done about it (torch 2.13):

- a process that ends while a profiler records crashes: the window is closed at exit
- a profiler started on another thread than the main one crashes the process when that thread ends: such steps get none
- a profiler of the job's own that starts while ours is prepared or recording takes over without an error, and ours then
  crashes the process: while ours is open, ``_prepare_trace`` and ``_start_trace`` are watched, and ours is closed first
- a child forked after any profiling hangs when it ends through ``sys.exit``: it waits for a thread of Kineto's that fork
  left behind. In such a child the last thing done at exit is ``_exit`` with the same status
- a profiler of the job's own that records already: no second one is started, its trace gets our ranges
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traceanalyzer.collectors.state import state

__all__ = ["NEVER", "Plan", "Windows", "install", "installed"]

NEVER = sys.maxsize
"""A step that does not come."""

RAW_LIMIT_BYTES = 4 << 30
"""Raw traces one rank keeps at most, where the configuration names no limit."""

STEPS_PER_FILE = 10
"""A longer window goes into several files: the profiler holds a window in memory until it ends."""

PACKED = 12
"""How many times smaller a trace is once packed; measured 11 to 18. Only for traces that are not packed yet."""

EXIT_WAIT_S = 60.0
"""How long a process that ends waits for the file of a window to be written."""

PACK_WAIT_S = 3.0
"""How long a process that ends waits for the file to be packed; the child goes on alone after that."""

USER_WAIT_S = 30.0
"""How long a profiler of the job's on another thread waits for the next step boundary, where ours is closed."""

_PACK = """
import gzip, os, shutil, sys
source, target = sys.argv[1:]
part = target + ".part"
try:
    with open(source, "rb") as plain, gzip.open(part, "wb", 6) as packed:
        shutil.copyfileobj(plain, packed, 1 << 20)
    os.replace(part, target)
    os.unlink(source)
except BaseException:
    if os.path.exists(part):
        os.unlink(part)
    raise
"""


@dataclass
class Plan:
    """What to do from step ``first`` to step ``last``. profile: with the profiler, on ``ranks`` (None: on all; asked when
    the time has come, as a rank may not know its number before). activate: hooks on (dormant job).

    fallback: where a rank that comes too late begins instead, as it was agreed; None: it skips. told: called with
    (what, step, why) when this rank joins, skips, is late or is done; on the training thread, must be quick.
    """

    first: int
    last: int
    profile: bool = True
    ranks: list[int] | None = None
    activate: bool = False
    fallback: int | None = None
    told: Any = None


class Windows:
    """Observer of the session's steps. One attribute is compared per step until a plan's time has come."""

    def __init__(self, session: Any, config: dict[str, Any]) -> None:
        self.session = session
        self.step = -1
        """The last step that began; read by the heartbeat."""
        self.armed_from = NEVER
        """The step at which step_begins has something to do."""
        self.close_after = NEVER
        """The step after which step_ends closes what is open."""
        self.raw_limit_bytes = int(config.get("raw_limit_bytes") or RAW_LIMIT_BYTES)
        self.steps_per_file = int(config.get("steps_per_window") or STEPS_PER_FILE)
        self.raw_bytes = 0
        self.number = 0
        self.plan: Plan | None = None
        self.active = False
        """Whether the plan's steps run."""
        self.daemon = bool(os.environ.get("KINETO_USE_DAEMON"))
        """Kineto may record without any flag that tells (an on-demand capture): ranges stay open."""
        self.watch_user = not config.get("dormant")
        """Whether to look for a profiler of the job's own at each step."""
        self.no_more: str | None = None
        self._open: _Open | None = None
        self._lock = threading.Lock()
        self._writers: list[threading.Thread] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._pid = os.getpid()
        self._user_waits = False

    # -- what is to be done ------------------------------------------------------------------------------------------

    def arm(self, plan: Plan) -> bool:
        """Takes a plan; False if another one is not done yet. From any thread."""
        with self._lock:
            if self.plan is not None:
                return False
            self.plan = plan
            self.armed_from = plan.first - 1 if plan.profile else plan.first
            return True

    # -- steps, on the training thread -------------------------------------------------------------------------------

    def step_begins(self, step: int) -> None:
        """A step begins; outside of its ranges. Never raises."""
        self.step = step
        if step >= self.armed_from:
            self._guarded(self._begin, step)
        if self.watch_user:
            self._look_for_user()

    def step_ends(self, step: int) -> None:
        """A step has ended. Never raises."""
        if step >= self.close_after:
            self._guarded(self._finish, step)

    def _guarded(self, call: Any, step: int) -> None:
        try:
            call(step)
        except Exception as error:  # noqa: BLE001 - the job goes on
            self.armed_from = self.close_after = NEVER
            state.failed("window", error)
            with contextlib.suppress(Exception):
                self._end_plan("failed", step, f"{type(error).__name__}: {error}")

    def _begin(self, step: int) -> None:
        if self._open is not None and self._user_waits:
            self._close(step - 1, "cut: the job's own profiler started")
        plan = self.plan
        if state.disabled is not None:
            self._close(step - 1, "cut: the collector switched itself off")
            self._end_plan("skipped", step, state.disabled)
            return
        if plan is None:
            self.armed_from = NEVER
            return
        if self.active:
            if step > plan.last:  # the end of the last step was not told
                self._finish(step - 1)
            elif self._open is not None and step - self._open.first >= self.steps_per_file:
                self._close(step - 1, "complete")
                self._start_window(plan, step)
            self.armed_from = plan.last + 1 if self.plan is not None else NEVER
            if self._open is not None:
                self.armed_from = min(self.armed_from, self._open.first + self.steps_per_file)
            return
        if step < plan.first:  # the step before: time to get ready
            self._prepare(plan)
            self.armed_from = plan.first
        elif step == plan.first or (plan.told is None and step <= plan.last):
            if step > plan.first:  # configured steps in a job that resumed among them: on all ranks alike
                self.issue(
                    "data_loss", "steps_before_start", f"the job began at step {step}: {plan.first} is not recorded"
                )
            self._start(plan, step)
        else:
            self._late(plan, step)

    def _late(self, plan: Plan, step: int) -> None:
        """The agreed step went by before this rank knew of it."""
        fallback, length = plan.fallback, plan.last - plan.first
        self._tell(plan, "late", step, f"step {plan.first} had gone by when this rank was at step {step}")
        if fallback is not None and fallback >= step:
            self.issue(
                "warning",
                "capture_late",
                f"the capture from step {plan.first} on was learned of at step {step}: this rank joins at step {fallback}",
            )
            plan.first, plan.last, plan.fallback = fallback, fallback + length, None
            self.armed_from = fallback - 1 if plan.profile else fallback
            self._begin(step) if step >= self.armed_from else None
            return
        self.issue(
            "data_loss",
            "capture_missed",
            f"the steps from {plan.first} on had begun at step {step}: this rank skips them",
        )
        self._discard()
        self._end_plan("skipped", step, f"step {plan.first} had gone by")

    def _start(self, plan: Plan, step: int) -> None:
        self.active = True
        if plan.activate:
            _switch(self.session, True)
        self.close_after = plan.last
        self.armed_from = plan.last + 1
        if self._profiles(plan):
            self._start_window(plan, step)
            self.armed_from = min(self.armed_from, step + self.steps_per_file)
        self._tell(plan, "joined", step, None if self._open is not None or not self._profiles(plan) else self.no_more)

    def _finish(self, step: int) -> None:
        plan = self.plan
        whole = plan is None or step >= plan.last
        self._close(step, "complete" if whole else f"cut: {state.disabled or 'another profiler was to start'}")
        state.marking = self.daemon
        if plan is not None and plan.activate:
            _switch(self.session, False)
        self._end_plan("done", step, None)

    def _end_plan(self, what: str, step: int, why: str | None) -> None:
        plan = self.plan
        self.armed_from = self.close_after = NEVER
        self.active = False
        self.plan = None
        if plan is not None:
            self._tell(plan, what, step, why)

    def _tell(self, plan: Plan, what: str, step: int, why: str | None) -> None:
        if plan.told is not None:
            with contextlib.suppress(Exception):
                plan.told(what, step, why)

    def _profiles(self, plan: Plan) -> bool:
        return plan.profile and (plan.ranks is None or getattr(self.session, "rank", None) in plan.ranks)

    # -- the profiler ------------------------------------------------------------------------------------------------

    def _why_not(self) -> str | None:
        """Why no profiler can be started now; None: one can."""
        if self.no_more is not None:
            return self.no_more
        if threading.current_thread() is not threading.main_thread():
            return "the steps run on another thread than the main one, where a profiler cannot be ended safely"
        if self.raw_bytes >= self.raw_limit_bytes:
            self.no_more = f"the raw traces of this rank reached their limit of {self.raw_limit_bytes} bytes"
            return self.no_more
        if user_profiles():
            return "the job's own profiler records"
        return None

    def _prepare(self, plan: Plan) -> None:
        """Has the profiler start up one step early, where it can."""
        if not self._profiles(plan) or self._open is not None:
            return
        if self._why_not() is None:
            self._open = _Open(self, warmup=True)
            self._open.prepare()

    def _start_window(self, plan: Plan, step: int) -> None:
        why = self._why_not() if self._open is None else None
        if why is not None:
            user = why == "the job's own profiler records"
            state.marking = user or self.daemon
            code = "user_profiler" if user else "window_skipped"
            ours = (
                "its trace has our ranges, and this program starts none beside it" if user else "no trace is recorded"
            )
            self.issue("warning", code, f"steps {step}-{plan.last}: {why}; {ours}")
            if not user:
                self._record(None, step, plan.last, None, None, f"failed: {why}")
            return
        try:
            if self._open is None:
                self._open = _Open(self, warmup=False)
            self._open.start(step)
        except Exception as error:  # noqa: BLE001 - the job goes on without this window
            self._discard()
            self.no_more = f"the profiler did not start: {type(error).__name__}: {error}"
            self.issue("error", "window_failed", self.no_more)
            self._record(None, step, plan.last, None, None, f"failed: {self.no_more}")
            return
        state.marking = True
        self._record(None, step, plan.last, self._open.start_ns, None, "open")  # should the process be killed in it

    def _close(self, last: int, how: str) -> None:
        """Ends the window that is open, if one is; its file is written by a thread."""
        opened, self._open = self._open, None
        if opened is None:
            return
        if opened.profiler is None or not opened.recording:
            opened.discard()
            return
        state.marking = self.daemon
        number, self.number = self.number, self.number + 1
        try:
            opened.stop()
        except Exception as error:  # noqa: BLE001 - the job goes on without this window
            self.issue("error", "window_failed", f"the profiler did not stop: {type(error).__name__}: {error}")
            self._record(None, opened.first, last, opened.start_ns, time.time_ns(), f"failed: {type(error).__name__}")
            return
        writer = threading.Thread(
            target=self._write, args=(opened, number, last, how), name="traceanalyzer-trace", daemon=True
        )
        self._writers.append(writer)
        writer.start()

    def _discard(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.discard()

    def _look_for_user(self) -> None:
        """Ranges are opened while a profiler of the job's own records."""
        if self._open is None:
            flags = sys.modules.get("torch.autograd.profiler")
            state.marking = self.daemon or getattr(flags, "_is_profiler_enabled", False)

    def user_starts(self) -> None:
        """The job starts a profiler of its own: ours makes way. Called on the thread of that profiler. Never raises."""
        try:
            if self._open is None:
                return
            if threading.current_thread() is threading.main_thread():
                self._close(
                    self.step - 1 if state.step is not None else self.step, "cut: the job's own profiler started"
                )
            else:  # ours can be stopped on its own thread only, so theirs waits for that
                self._user_waits = True
                self.armed_from = self.close_after = -1
                until = time.monotonic() + USER_WAIT_S
                while self._open is not None and time.monotonic() < until:
                    time.sleep(0.01)
            self._user_waits = False
            state.marking = True
            self.issue(
                "warning", "user_profiler", "the job started its own profiler inside a window: the window ends there"
            )
        except Exception as error:  # noqa: BLE001 - the job's profiler starts in any case
            state.failed("user_starts", error)

    # -- the file, on its own thread ---------------------------------------------------------------------------------

    def _write(self, opened: _Open, number: int, last: int, how: str) -> None:
        rank = getattr(self.session, "rank", None)
        who = f"p{self._pid}" if rank is None else f"r{rank:05d}"
        folder = Path(self.session.run_dir) / "trace"
        while any((folder / f"{who}-w{number}.json{end}").exists() for end in ("", ".gz")):
            number += 1  # this rank was started again: the earlier process left these
        target = folder / f"{who}-w{number}.json.gz"
        plain = target.with_suffix("")
        file: str | None = f"trace/{target.name}"
        more: dict[str, Any] = {}
        began = time.monotonic()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            opened.export(plain)
            if not plain.exists():  # torch raises nothing then
                raise OSError("the profiler could not write the file: no space, or no right to")
            size = plain.stat().st_size
            more = {"bytes": size, "write_s": round(time.monotonic() - began, 3)}
            if not size:
                raise OSError("the profiler wrote an empty file")
            self.raw_bytes += size // PACKED
            if self.raw_bytes >= self.raw_limit_bytes:
                self.issue(
                    "data_loss",
                    "raw_limit",
                    f"the raw traces reached their limit of {self.raw_limit_bytes} bytes: no further window is recorded",
                )
        except Exception as error:  # noqa: BLE001 - the job goes on without this trace
            how = f"failed: {type(error).__name__}: {error}"
            self.issue("error", "window_failed", f"the trace of steps {opened.first}-{last} was not written: {error}")
            for left in (plain, plain.with_name(plain.name + ".tmp")):
                with contextlib.suppress(OSError):
                    left.unlink()
            file = None
        finally:
            opened.profiler = None
        more |= {"stop_s": opened.stop_s, "warmup": opened.warmup}
        self._record(file, opened.first, last, opened.start_ns, opened.end_ns, how, more)
        if file is not None:
            self._pack(plain, target)

    def _pack(self, plain: Path, target: Path) -> None:
        """Packs a trace in a child of low priority. The plain file stays where that is not possible."""
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PACK, str(plain), str(target)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={k: v for k, v in os.environ.items() if not k.startswith(("LD_PRELOAD", "TRACEANALYZER_"))},
                start_new_session=True,
            )
        except Exception as error:  # noqa: BLE001 - the plain file serves as well
            self.issue("info", "trace_not_packed", f"{plain.name} is not packed: {type(error).__name__}: {error}")
            return
        self._children.append(child)
        with contextlib.suppress(Exception):
            os.setpriority(os.PRIO_PROCESS, child.pid, 19)
        child.wait()
        self._children.remove(child)
        if child.returncode:
            self.issue(
                "info", "trace_not_packed", f"{plain.name} is not packed: the child ended with {child.returncode}"
            )

    def _record(
        self,
        file: str | None,
        first: int,
        last: int,
        start_ns: int | None,
        end_ns: int | None,
        how: str,
        more: dict[str, Any] | None = None,
    ) -> None:
        log = state.log
        if log is not None:
            whole = last if last >= first else None
            facts = {"file": file, "step_from": first, "step_to": whole, "start_ns": start_ns, "end_ns": end_ns}
            log.put(["window", {**facts, "state": how, **(more or {})}])

    def issue(self, severity: str, code: str, sentence: str) -> None:
        """One issue of each kind and sentence."""
        log = state.log
        if log is not None:
            log.issue(severity, code, sentence)

    def disabled(self) -> None:
        """The collector switched itself off: what is open is closed at the next boundary, or at the end."""
        self.armed_from = self.close_after = -1

    @property
    def writing(self) -> bool:
        """Whether a trace is being written. From any thread."""
        return any(w.is_alive() for w in list(self._writers)) and not self._children

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes what is open and waits for what is being written; for the end of a session or process. Never raises."""
        if os.getpid() != self._pid:
            return
        try:
            if self._open is None or threading.current_thread() is threading.main_thread():
                atexit.unregister(self.close)
            while self.disabled in state.on_disable:
                state.on_disable.remove(self.disabled)
            plan = self.plan
            if self._open is not None and threading.current_thread() is threading.main_thread():
                last = self.step - 1 if state.step is not None else self.step
                complete = plan is not None and last >= plan.last
                self._close(last, "complete" if complete else f"cut: the job ended in step {self.step}")
            if plan is not None:
                if not self.active and plan.first < NEVER:
                    self.issue("data_loss", "steps_not_reached", f"the job ended before step {plan.first}")
                self._end_plan("ended", self.step, "the job ended")
            until = time.monotonic() + EXIT_WAIT_S
            while self._writers and time.monotonic() < until:
                writer = self._writers[0]
                packing = bool(self._children)
                writer.join(PACK_WAIT_S if packing else 0.05)
                if not writer.is_alive() or packing:
                    self._writers.pop(0)
        except Exception as error:  # noqa: BLE001 - the process ends in any case
            state.failed("window.close", error)


class _Open:
    """One profiler, from its preparation to the writing of its file."""

    def __init__(self, windows: Windows, *, warmup: bool) -> None:
        self.windows = windows
        self.warmup = warmup
        self.recording = False
        self.first = 0
        self.start_ns = self.end_ns = 0
        self.stop_s = 0.0
        self.profiler: Any = None
        self._prepared = False
        self._replaced: dict[str, tuple[Any, Any]] = {}
        self._cls: Any = None

    def prepare(self) -> None:
        import torch.autograd.profiler as profilers

        _once_in_children()
        self._cls = profilers.profile
        self.profiler = _profiler(profilers)
        self._watch()
        self.profiler._prepare_trace()
        self._prepared = True

    def start(self, step: int) -> None:
        if not self._prepared:
            self.prepare()
        self.profiler._start_trace()
        self.recording = True
        self.first = step
        with contextlib.suppress(Exception):
            _metadata()
        self.start_ns = time.time_ns()

    def stop(self) -> None:
        self.end_ns = time.time_ns()
        began = time.monotonic()
        try:
            self.profiler.__exit__(None, None, None)
        finally:
            self.recording = False
            self._unwatch()
            self.stop_s = round(time.monotonic() - began, 3)

    def discard(self) -> None:
        """Ends a profiler whose trace nobody wants. Never raises."""
        try:
            if self._prepared and not self.recording:  # torch ends a warm-up in this way too
                self.profiler._start_trace()
            if self._prepared:
                self.profiler.__exit__(None, None, None)
        except Exception as error:  # noqa: BLE001 - nothing of it is needed
            state.failed("window.discard", error)
        finally:
            self.recording = self._prepared = False
            self.profiler = None
            self._unwatch()

    def export(self, path: Path) -> None:
        """Writes the trace. torch lets go of Python's lock meanwhile."""
        self.profiler.export_chrome_trace(str(path))

    def _watch(self) -> None:
        """Has a profiler of the job's own tell before it starts."""
        for name in ("_prepare_trace", "_start_trace"):
            original = self._cls.__dict__.get(name)
            if original is None:
                continue
            wrapper = self._asking(original)
            self._replaced[name] = (original, wrapper)
            setattr(self._cls, name, wrapper)

    def _asking(self, original: Any) -> Any:
        def ask(profiler: Any, *args: Any, **kwargs: Any) -> Any:
            if profiler is not self.profiler:
                self.windows.user_starts()
            return original(profiler, *args, **kwargs)

        return ask

    def _unwatch(self) -> None:
        for name, (original, wrapper) in self._replaced.items():
            if self._cls.__dict__.get(name) is wrapper:
                setattr(self._cls, name, original)
        self._replaced.clear()


def _profiler(profilers: Any) -> Any:
    """A profiler of the CPU, and of the accelerator where the job uses one; shapes on, so that args of ranges land."""
    import torch

    options: dict[str, Any] = {"use_cpu": True, "record_shapes": True, "use_kineto": True}
    device = None
    # A device that the job has not initialised holds no work of it, and is left alone.
    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available() and getattr(module, "is_initialized", lambda: True)():
            device = name
            break
    more: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # older torch builds Python's events at the stop, which takes longer
        from torch._C._profiler import _ExperimentalConfig

        more["experimental_config"] = _ExperimentalConfig(trace_only=True)  # pyright: ignore[reportCallIssue]
    for extra in ({**more, "use_device": device}, {"use_device": device}, {"use_cuda": device == "cuda"}):
        try:
            return profilers.profile(**options, **extra)
        except TypeError:
            continue
    return profilers.profile(**options)


def _metadata() -> None:
    """What torch.profiler.profile adds to a trace: the importer reads rank and groups from it."""
    import torch
    import torch.distributed as dist

    autograd: Any = torch.autograd
    cuda: Any = torch.cuda
    add = autograd._add_metadata_json
    add("record_shapes", "1")
    if not dist.is_available() or not dist.is_initialized():
        return
    backend = dist.get_backend()
    facts: dict[str, Any] = {"backend": backend, "rank": dist.get_rank(), "world_size": dist.get_world_size()}
    with contextlib.suppress(Exception):
        c10d: Any = dist.distributed_c10d
        facts |= {"pg_count": dist.get_pg_count(), "pg_config": c10d._get_all_pg_configs()}
    if "nccl" in str(backend):
        with contextlib.suppress(Exception):
            facts["nccl_version"] = ".".join(str(part) for part in cuda.nccl.version())
    add("distributedInfo", json.dumps(facts, default=str))


def user_profiles() -> bool:
    """Whether a profiler records that is none of ours; asked while ours is closed."""
    flags = sys.modules.get("torch.autograd.profiler")
    return bool(getattr(flags, "_is_profiler_enabled", False))


def _switch(session: Any, on: bool) -> None:
    """Hooks on or off; the session knows what else belongs to it."""
    call = getattr(session, "activate" if on else "deactivate", None)
    if call is not None:
        call()
        return
    state.on = on
    hooks = sys.modules.get("traceanalyzer.collectors.hooks")
    if hooks is not None:
        hooks.switched()


_children_safe = False


def _once_in_children() -> None:
    """From now on a forked child that ends through exit() leaves without Kineto's clean-up, which would hang."""
    global _children_safe
    if _children_safe:
        return
    _children_safe = True
    with contextlib.suppress(Exception):
        libc = ctypes.CDLL(None)
        on_exit, leave = libc.on_exit, ctypes.cast(libc._exit, ctypes.c_void_p)  # of glibc; runs before destructors

        def in_child() -> None:
            state.marking = False
            on_exit(leave, None)

        os.register_at_fork(after_in_child=in_child)


_windows: Windows | None = None


def installed() -> Windows | None:
    """The windows of this process, once installed."""
    return _windows


def install(session: Any) -> Windows:
    """Has the session's steps observed and the configured window armed. Needs no torch until a window opens.

    session: with ``observers`` (list), ``run_dir``, ``rank`` and ``config``. ``steps`` [first, last] of the configuration
    are profiled on ``profile_ranks`` (null: on all). Never raises.
    """
    global _windows
    config: dict[str, Any] = getattr(session, "config", None) or {}
    windows = Windows(session, config)
    _windows = windows
    try:
        state.marking = windows.daemon
        session.observers.append(windows)
        state.on_disable.append(windows.disabled)
        atexit.register(windows.close)
        steps = config.get("steps")
        chosen = config.get("profile_ranks")
        if steps:
            ranks = chosen if isinstance(chosen, list) else None
            windows.arm(Plan(int(steps[0]), int(steps[-1]), ranks=ranks, activate=bool(config.get("dormant"))))
    except Exception as error:  # noqa: BLE001 - the hooks go on without windows
        state.failed("window.install", error)
    return windows
