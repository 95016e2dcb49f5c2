"""Names the process group of every collective and point-to-point call in a torch.profiler trace.

A trace of the gloo backend does not say which group a call ran on, and a trace of the NCCL backend does not say it for
batched point-to-point calls. This hook wraps the methods of torch's ``ProcessGroup`` class, so that each call made
from Python while a profiler records is enclosed in a range ``ta:<op>`` (category ``cpu_op``) whose ``args`` carry::

    pg          text  name of the group (group_name)
    desc        text  description of the group (group_desc)
    ranks       text  global ranks of the group, complete, as JSON text: "[0, 1]"
    size        int   ranks in the group
    rank        int   this process's index in the group
    seq         int   number of the call in its group on this rank, from 0 when the hook was installed. Collectives
                      and point-to-point calls are counted apart, as c10d does; a barrier is a collective
    method      text  the ProcessGroup method that was called
    dtype       text  element type in torch's spelling ("bfloat16"); absent: no tensors, or several types
    in_elems    int   elements this rank hands in, summed over the tensors (0: none)
    out_elems   int   elements this rank gets out, summed over the tensors (0: none)
    reduce_op   text  "sum", "max", "avg", ...; absent: the call does not reduce
    root, peer  int   global rank of the root / of the other side of a send or receive; absent: none, or any source
    in_splits   text  all-to-all only: rows for each rank as JSON text; absent: equal parts. out_splits: likewise
    tensors     int   calls merged by a coalescing manager only: how many tensors they hold
    coalesce    int   calls between ``_start_coalescing`` and ``_end_coalescing`` only: which such block of the process,
                      from 0. The end of the block is a range of its own, ``ta:end_coalescing``
    call        int   while a session records: number of the call's record in its log (record.py)
    is_async    bool  whether the caller asked for an asynchronous call; absent: unknown (always so for send and recv)

``<op>`` is all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, send, recv or
barrier. A key that is absent is unknown or does not apply; nothing is ever -1. The profiler writes the ``args`` only
with ``record_shapes=True``, and not when it records all threads (``profile_all_threads``): the ranges are then bare.

Not seen: calls that C++ issues itself (torch's own DistributedDataParallel, functional collectives) and traffic that
does not pass c10d. The hook does not harm the job: an error in its own code switches it off, see disabled_reason().

Importing this module imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from traceanalyzer.collectors import hooks

__all__ = ["disabled_reason", "install", "installed", "mark", "name_groups", "uninstall"]

_lock = threading.Lock()
_reason: str | None = None


def install() -> bool:
    """Installs the hook; does nothing if it is installed already.

    Gives True if the hook is in place, False if this torch does not offer what it needs (disabled_reason() says what).
    A hook that had switched itself off is replaced by a new one, whose counters begin at 0. Never raises.
    """
    global _reason
    with _lock:
        hook = hooks.current()
        if hook is not None and hook.naming:
            return True
        _reason = None
        try:
            hooks.release()
            hook = hooks.the_hook()
            hook.reason = None
            hook.naming = True
            hook.sync()
        except Exception as error:  # noqa: BLE001 - a job on another torch goes on without the hook
            _reason = f"{type(error).__name__} in install: {error}"
            if hook is not None:
                hook.naming = False
                with contextlib.suppress(Exception):
                    hooks.release()
            return False
        return True


def uninstall() -> None:
    """Puts the methods back as they were; does nothing if the hook is not installed. Never raises.

    An open session goes on using them.
    """
    global _reason
    with _lock:
        hook = hooks.current()
        if hook is not None:
            _reason = hook.reason or _reason
            hook.naming = False
            with contextlib.suppress(Exception):
                hooks.release()


def installed() -> bool:
    """Whether the hook is installed and has not switched itself off."""
    hook = hooks.current()
    return hook is not None and hook.naming


def disabled_reason() -> str | None:
    """Why the hook is not working: the error in its own code, or what install() missed. None: nothing went wrong."""
    hook = hooks.current()
    return (hook.reason if hook is not None else None) or _reason


@contextlib.contextmanager
def name_groups() -> Iterator[None]:
    """Has the hook installed inside the ``with`` block; leaves one that was installed before in place."""
    ours = not installed() and install()
    try:
        yield
    finally:
        if ours:
            uninstall()


@contextlib.contextmanager
def mark(name: str) -> Iterator[None]:
    """Encloses the block in a range ``ta:<name>`` of the trace (category ``user_annotation``), if a profiler records.

    For steps and micro-batches: ``mark("step 3")``, ``mark("microbatch 0")``, numbers from 0. Characters that would
    break the trace are replaced. An error in the profiler is ignored: the block always runs.
    """
    scope: Any = None
    profiler = sys.modules.get("torch.autograd.profiler")
    if getattr(profiler, "_is_profiler_enabled", False) or os.environ.get("KINETO_USE_DAEMON"):
        try:
            scope = getattr(profiler, "record_function")(f"ta:{hooks.text(name)}")  # noqa: B009 - profiler may be None
            scope.__enter__()
        except Exception:  # noqa: BLE001 - a range less, the job goes on
            scope = None
    try:
        yield
    finally:
        if scope is not None:
            with contextlib.suppress(Exception):
                scope.__exit__(None, None, None)
