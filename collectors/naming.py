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
    coalesce    int   calls between ``_start_coalescing`` and ``_end_coalescing`` only: which such block of the group,
                      from 0. The end of the block is a range of its own, ``ta:end_coalescing``
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
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["disabled_reason", "install", "installed", "mark", "name_groups", "uninstall"]

_OUTPUT_THEN_INPUT = (1, 0)
_IN_PLACE = (0, 0)
_INPUT_ONLY = (0, None)
_OUTPUT_ONLY = (None, 0)
_NO_TENSORS = (None, None)

# Method of ProcessGroup, old and new names -> (operation, (position of the input, position of the output)).
_METHODS: dict[str, tuple[str, tuple[int | None, int | None]]] = {
    "allreduce": ("all_reduce", _IN_PLACE),
    "allreduce_coalesced": ("all_reduce", _IN_PLACE),
    "allgather": ("all_gather", _OUTPUT_THEN_INPUT),
    "all_gather_single": ("all_gather", _OUTPUT_THEN_INPUT),
    "_allgather_base": ("all_gather", _OUTPUT_THEN_INPUT),
    "allgather_coalesced": ("all_gather", _OUTPUT_THEN_INPUT),
    "all_gather_single_coalesced": ("all_gather", _OUTPUT_THEN_INPUT),
    "allgather_into_tensor_coalesced": ("all_gather", _OUTPUT_THEN_INPUT),
    "reduce_scatter": ("reduce_scatter", _OUTPUT_THEN_INPUT),
    "reduce_scatter_single": ("reduce_scatter", _OUTPUT_THEN_INPUT),
    "_reduce_scatter_base": ("reduce_scatter", _OUTPUT_THEN_INPUT),
    "reduce_scatter_single_coalesced": ("reduce_scatter", _OUTPUT_THEN_INPUT),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", _OUTPUT_THEN_INPUT),
    "all_to_all_single": ("all_to_all", _OUTPUT_THEN_INPUT),
    "alltoall_base": ("all_to_all", _OUTPUT_THEN_INPUT),
    "alltoall": ("all_to_all", _OUTPUT_THEN_INPUT),
    "broadcast": ("broadcast", _IN_PLACE),
    "reduce": ("reduce", _IN_PLACE),
    "gather": ("gather", _OUTPUT_THEN_INPUT),
    "scatter": ("scatter", _OUTPUT_THEN_INPUT),
    "send": ("send", _INPUT_ONLY),
    "recv": ("recv", _OUTPUT_ONLY),
    "recv_anysource": ("recv", _OUTPUT_ONLY),
    "barrier": ("barrier", _NO_TENSORS),
    "monitored_barrier": ("barrier", _NO_TENSORS),
    "_start_coalescing": ("start_coalescing", _NO_TENSORS),
    "_end_coalescing": ("end_coalescing", _NO_TENSORS),
}

_IN_PLACE_NAMES = ("tensors", "tensor")
_INPUT_NAMES = ("input_tensors", "input_tensor", "input", "inputTensor", "inputs", "input_list")
_OUTPUT_NAMES = ("output_tensors", "output_tensor", "output", "outputTensor", "outputs", "output_lists")
_ROOT_POSITION = {"broadcast": 1, "reduce": 1, "gather": 2, "scatter": 2}
_REDUCING = frozenset({"all_reduce", "reduce_scatter", "reduce"})
_POINT_TO_POINT = frozenset({"send", "recv"})


@dataclass
class _Group:
    """What the hook knows of one process group, and its counters."""

    identity: dict[str, Any] = field(default_factory=dict)
    ranks: list[int] | None = None
    collectives: int = 0
    point_to_point: int = 0
    blocks: int = 0
    block: int | None = None


def _text(value: object) -> str:
    """``value`` as text that survives the trace writer: printable ASCII without double quote or backslash."""
    return "".join(c if " " <= c <= "~" and c not in '"\\' else {'"': "'", "\\": "/"}.get(c, "?") for c in str(value))


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, names: tuple[str, ...]) -> Any:
    """The argument at ``position`` (``self`` not counted) or under one of ``names``; None if it was not given."""
    if position < len(args):
        return args[position]
    return next((kwargs[name] for name in names if name in kwargs), None)


def _elements(tensors: Any, dtypes: set[Any]) -> tuple[int, int]:
    """(elements, tensors) in a tensor or a nest of lists of them; adds their element types to ``dtypes``."""
    if tensors is None:
        return 0, 0
    if isinstance(tensors, (list, tuple)):
        inner = [_elements(item, dtypes) for item in tensors]
        return sum(n for n, _ in inner), sum(n for _, n in inner)
    dtypes.add(tensors.dtype)
    return int(tensors.numel()), 1


def _options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The c10d options object among the arguments; None if there is none."""
    return next((a for a in (*args, *kwargs.values()) if type(a).__name__.endswith("Options")), None)


def _reduction(op: Any) -> str | None:
    """Name of a c10d reduction ("sum", "max", "avg", "premul_sum", ...); None if ``op`` is none."""
    if type(op).__name__ == "ReduceOp":
        op = op.op
    return str(op.name).lower() if type(op).__name__ == "RedOpType" else None


def _splits(value: Any) -> str | None:
    return str([int(rows) for rows in value]) if value is not None and len(value) else None


def _global(group: _Group, rank: Any) -> int | None:
    """Global rank of a rank of the group; None if it is no rank or the group's ranks are not known."""
    if not isinstance(rank, int) or group.ranks is None or not 0 <= rank < len(group.ranks):
        return None
    return group.ranks[rank]


def _describe(method: str, group: _Group, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What the arguments of one call say about it: the keys of the module's table from ``method`` on."""
    op, (source, target) = _METHODS[method]
    found: dict[str, Any] = {"method": method}
    if op == "end_coalescing":
        return found
    dtypes: set[Any] = set()
    in_place = (source, target) == _IN_PLACE or op in _POINT_TO_POINT
    given = None if source is None else _argument(args, kwargs, source, _IN_PLACE_NAMES if in_place else _INPUT_NAMES)
    got = None if target is None else _argument(args, kwargs, target, _IN_PLACE_NAMES if in_place else _OUTPUT_NAMES)
    found["in_elems"], count = _elements(given, dtypes)
    found["out_elems"], _ = _elements(got, dtypes)
    if method.endswith("_coalesced"):
        found["tensors"] = count
    if len(dtypes) == 1:
        found["dtype"] = str(next(iter(dtypes))).removeprefix("torch.")

    options = _options(args, kwargs)
    if isinstance(is_async := getattr(options, "asyncOp", None), bool):
        found["is_async"] = is_async
    if op in _REDUCING:
        candidates = (getattr(options, "reduceOp", None), *args, *kwargs.values())
        found["reduce_op"] = next((name for c in candidates if (name := _reduction(c))), "sum")
    if op in _ROOT_POSITION:
        root = getattr(options, "rootRank", None)
        found["root"] = _global(group, _argument(args, kwargs, _ROOT_POSITION[op], ("root",)) if root is None else root)
    if method in ("send", "recv"):
        found["peer"] = _global(group, _argument(args, kwargs, 1, ("dstRank", "srcRank")))
    if method in ("all_to_all_single", "alltoall_base"):
        found["out_splits"] = _splits(_argument(args, kwargs, 2, ("output_split_sizes",)))
        found["in_splits"] = _splits(_argument(args, kwargs, 3, ("input_split_sizes",)))
    return {key: value for key, value in found.items() if value is not None}


class _Hook:
    """One installation: the wrapped methods, the groups' counters, and why it was switched off."""

    def __init__(self) -> None:
        import torch
        from torch._C._distributed_c10d import ProcessGroup
        from torch._C._profiler import _RecordFunctionFast
        from torch.distributed import distributed_c10d

        self.active = True
        self.reason: str | None = None
        self.cls: Any = ProcessGroup
        self.range: Any = _RecordFunctionFast
        self.world: Any = distributed_c10d._world
        core: Any = torch._C  # its stubs do not know all of it
        self.profiling_here: Callable[[], bool] = core._autograd._profiler_enabled
        # A profile that a daemon starts shows in none of the flags.
        self.always = bool(os.environ.get("KINETO_USE_DAEMON"))
        self.lock = threading.Lock()
        self.local = threading.local()
        self.groups: weakref.WeakKeyDictionary[Any, _Group] = weakref.WeakKeyDictionary()
        self.replaced: dict[str, tuple[Any, Any]] = {}

    def put(self) -> None:
        """Replaces the methods. An error leaves those that were replaced to take()."""
        for name in _METHODS:
            if name in self.cls.__dict__:
                # getattr gives an unbound builtin: right for calling, wrong for putting back.
                wrapper = self.wrap(name, getattr(self.cls, name))
                self.replaced[name] = (self.cls.__dict__[name], wrapper)
                setattr(self.cls, name, wrapper)

    def take(self) -> None:
        """Puts the methods back. One that somebody replaced over ours is left, and ours under it passes through."""
        self.active = False
        for name, (original, wrapper) in self.replaced.items():
            if self.cls.__dict__.get(name) is wrapper:
                setattr(self.cls, name, original)

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(pg: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.active or getattr(self.local, "inside", False):
                return call(pg, *args, **kwargs)
            scope = None
            try:
                scope = self.enter(name, pg, args, kwargs)
                return call(pg, *args, **kwargs)
            finally:
                self.leave(scope)

        return wrapper

    def enter(self, name: str, pg: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Counts the call and opens its range; None if none is open. Never raises."""
        self.local.inside = True
        try:
            op = _METHODS[name][0]
            with self.lock:
                group, counters = self.count(op, pg)
            if op == "start_coalescing" or not self.recording():
                return None
            values = {**group.identity, **counters, **_describe(name, group, args, kwargs)}
            scope = self.range(f"ta:{op}", [], values)
            scope.__enter__()
            return scope
        except Exception as error:  # noqa: BLE001 - whatever it is, the job's call goes on
            self.disable(error, name)
            return None

    def leave(self, scope: Any) -> None:
        """Closes the range. Never raises."""
        self.local.inside = False
        if scope is not None:
            try:
                scope.__exit__(None, None, None)
            except Exception as error:  # noqa: BLE001 - whatever it is, the job's call goes on
                self.disable(error, "leave")

    def disable(self, error: Exception, where: str) -> None:
        self.active = False
        self.reason = f"{type(error).__name__} in {where}"
        with contextlib.suppress(Exception):  # text of an error is code too
            self.reason = f"{self.reason}: {error}"

    def recording(self) -> bool:
        """Whether a profiler may be recording this thread."""
        flags = sys.modules.get("torch.autograd.profiler")
        return self.always or self.profiling_here() or getattr(flags, "_is_profiler_enabled", False)

    def count(self, op: str, pg: Any) -> tuple[_Group, dict[str, Any]]:
        """The group of the call, and the call's numbers in it."""
        group = self.groups.get(pg)
        if group is None:
            group = self.groups[pg] = _Group()
        if group.ranks is None:
            self.identify(group, pg)
        counters: dict[str, Any] = {}
        if op == "start_coalescing":
            group.block = group.blocks
            group.blocks += 1
            return group, counters
        if group.block is not None:
            counters["coalesce"] = group.block
        if op == "end_coalescing":
            group.block = None
        elif op in _POINT_TO_POINT:
            counters["seq"] = group.point_to_point
            group.point_to_point += 1
        else:
            counters["seq"] = group.collectives
            group.collectives += 1
        return group, counters

    def identify(self, group: _Group, pg: Any) -> None:
        identity: dict[str, Any] = {"pg": _text(pg.group_name), "desc": _text(pg.group_desc)}
        identity["size"] = int(pg.size())
        identity["rank"] = int(pg.rank())
        # {global rank: rank in the group}; absent for a group that torch.distributed did not make.
        if ranks := self.world.pg_group_ranks.get(pg):
            group.ranks = sorted(ranks, key=ranks.__getitem__)
            identity["ranks"] = str(group.ranks)
        # The profiler drops empty text.
        group.identity = {key: value for key, value in identity.items() if value != ""}


_lock = threading.Lock()
_hook: _Hook | None = None
_reason: str | None = None


def install() -> bool:
    """Installs the hook; does nothing if it is installed already.

    Gives True if the hook is in place, False if this torch does not offer what it needs (disabled_reason() says what).
    A hook that had switched itself off is replaced by a new one, whose counters begin at 0. Never raises.
    """
    global _hook, _reason
    with _lock:
        if _hook is not None and _hook.active:
            return True
        if _hook is not None:
            _hook.take()
        _hook, _reason = None, None
        hook = None
        try:
            hook = _Hook()
            hook.put()
        except Exception as error:  # noqa: BLE001 - a job on another torch goes on without the hook
            if hook is not None:
                hook.take()
            _reason = f"{type(error).__name__} in install: {error}"
            return False
        _hook = hook
        return True


def uninstall() -> None:
    """Puts the methods back as they were; does nothing if the hook is not installed. Never raises."""
    global _hook, _reason
    with _lock:
        if _hook is not None:
            _hook.take()
            _reason = _hook.reason
            _hook = None


def installed() -> bool:
    """Whether the hook is installed and has not switched itself off."""
    hook = _hook
    return hook is not None and hook.active


def disabled_reason() -> str | None:
    """Why the hook is not working: the error in its own code, or what install() missed. None: nothing went wrong."""
    hook = _hook
    return hook.reason if hook is not None else _reason


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
            scope = getattr(profiler, "record_function")(f"ta:{_text(name)}")  # noqa: B009 - profiler may be None
            scope.__enter__()
        except Exception:  # noqa: BLE001 - a range less, the job goes on
            scope = None
    try:
        yield
    finally:
        if scope is not None:
            with contextlib.suppress(Exception):
                scope.__exit__(None, None, None)
