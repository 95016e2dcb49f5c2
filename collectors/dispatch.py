"""Records and marks the calls of c10d that C++ issues: torch's DistributedDataParallel, functional collectives, DTensor.

Every call of c10d passes an operator ``c10d::*`` of torch's dispatcher. A Python function is registered for each of them
under the key BackendSelect: it lies right above the backends' own kernels, tensors of every device pass it, also in
inference mode and below autograd, and torch has nothing there. The function hands the call on to the backend's kernel
with the GIL released, as torch does: a kernel that blocks (NCCL making a communicator) stops no other Python thread.
(Overriding the backends' kernels through torch.library.get_kernel, torch >= 2.9, calls them with the GIL held.)

A call made through a method of ProcessGroup passes both hooks. hooks.py records it, and this one lets it through: the
operator runs on the thread of the method, which is marked as being in a call.

Registering costs every call a passage through Python, about ten microseconds, whether or not it is recorded. So the
functions are registered only if the job uses what needs them, and only while the collector is active.

What reduction a call from C++ uses is not known: the operator's argument shows it to C++ only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from traceanalyzer.collectors import hooks
from traceanalyzer.collectors.state import state

__all__ = ["OPERATORS", "reasons", "remove", "sync", "want"]

# Operator -> operation. monitored_barrier_ is issued from Python only.
OPERATORS: dict[str, str] = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "barrier": "barrier",
}

_KEY = "BackendSelect"
_INPUTS = ("tensors", "input_tensors", "input_tensor", "inputs", "input", "input_list")
_OUTPUTS = ("tensors", "output_tensors", "output_tensor", "outputs", "output", "output_lists")


def _place(names: list[str], wanted: tuple[str, ...]) -> int | None:
    return next((names.index(name) for name in wanted if name in names), None)


def _describer(name: str, schema: Any) -> tuple[int, hooks.Describe]:
    """(position of the group, the function that reads the arguments) of one operator."""
    op = OPERATORS[name]
    names = [argument.name for argument in schema.arguments]
    defaults = [argument.default_value for argument in schema.arguments]
    source = _place(names, _INPUTS) if op not in ("recv", "barrier") else None
    target = _place(names, _OUTPUTS) if op not in ("send", "barrier") else None
    in_place = source is not None and source == target
    coalesced = name.endswith("_coalesced_")
    parts = name == "alltoall_"
    root, peer = _place(names, ("root_rank",)), _place(names, ("dst", "src"))
    in_splits, out_splits = _place(names, ("input_split_sizes",)), _place(names, ("output_split_sizes",))
    asynchronous = _place(names, ("async_op",))

    def at(args: Sequence[Any], place: int | None) -> Any:
        # arguments at the end that have their default value are not handed over
        if place is None:
            return None
        return args[place] if place < len(args) else defaults[place]

    def describe(ranks: list[int] | None, call: Sequence[Any], _kwargs: dict[str, Any]) -> hooks.Facts:
        args = call[2]  # call: group, keys, arguments of the operator, and named ones
        given, got = at(args, source), None if in_place else at(args, target)
        dtype, in_elems, out_elems, tensors = hooks.facts(given, got, in_place, coalesced)
        return (
            dtype,
            in_elems,
            out_elems,
            None,
            hooks.global_rank(ranks, at(args, root)),
            hooks.global_rank(ranks, at(args, peer)),
            hooks.each(given) if parts else hooks.rows(at(args, in_splits)),
            hooks.each(got) if parts else hooks.rows(at(args, out_splits)),
            tensors,
            at(args, asynchronous),
        )

    return names.index("process_group"), describe


class Dispatcher:
    """The functions registered for the operators."""

    def __init__(self, hook: hooks.Hook) -> None:
        import torch

        self.hook = hook
        core: Any = torch._C
        self.key: Any = core.DispatchKey.BackendSelect
        self.unbox: Callable[[Any], Any] = core._distributed_c10d.ProcessGroup.unbox
        library: Any = torch.library.Library
        self.library: Any = library("c10d", "IMPL")
        self.names: list[str] = []
        try:
            for name in OPERATORS:
                packet = getattr(torch.ops.c10d, name, None)
                if packet is not None:
                    self.library.impl(name, self.function(name, packet.default), _KEY, with_keyset=True)
                    self.names.append(name)
        except BaseException:
            self.destroy()
            raise

    def destroy(self) -> None:
        self.library._destroy()

    def function(self, name: str, operator: Any) -> Callable[..., Any]:
        group_at, describe = _describer(name, operator._schema)
        redispatch = operator._handle.redispatch_boxed
        here, switches, key, hook, unbox = hooks.thread, state, self.key, self.hook, self.unbox

        def call(_group: Any, keys: Any, args: Any, kwargs: Any) -> Any:
            return redispatch(keys.remove(key), *args, **kwargs)

        around = self.hook.around(hooks.Kind(OPERATORS[name], f"c10d::{name}", describe), call)

        def function(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if not here.me.inside and switches.on:
                try:
                    group = unbox(args[group_at])
                except Exception as error:  # noqa: BLE001 - whatever it is, the job's call goes on
                    hook.failed(error, name)
                else:
                    return around(group, keys, args, kwargs)
            return redispatch(keys.remove(key), *args, **kwargs)

        return function


_lock = threading.RLock()
_dispatcher: Dispatcher | None = None
_hook: hooks.Hook | None = None
_reasons: list[str] = []
_missing: str | None = None


def reasons() -> list[str]:
    """What the job uses that needs the dispatcher's hook; [] if it is not installed and will not be."""
    return list(_reasons)


def want(hook: hooks.Hook, reason: str) -> str | None:
    """Has the functions registered while the collector is active. Gives why that is not possible, None if it is."""
    global _hook
    with _lock:
        if _dispatcher is None and _missing is None:
            _try(hook)
        if _missing is not None:
            return _missing
        _hook = hook
        if reason not in _reasons:
            _reasons.append(reason)
        sync()
        return None


def _try(hook: hooks.Hook) -> None:
    global _dispatcher, _missing
    try:
        _dispatcher = Dispatcher(hook)
    except Exception as error:  # noqa: BLE001 - another torch: the methods' hook is there
        _missing = f"this torch does not let Python stand before its operators ({type(error).__name__}: {error})"


def sync() -> None:
    """Registers the functions if the collector is active and they are wanted; takes them away if not. Never raises.

    Not to be called from inside a call.
    """
    global _dispatcher
    try:
        with _lock:
            if _hook is None or _missing is not None or hooks.thread.me.inside:
                return
            if state.on and _dispatcher is None:
                _try(_hook)
            elif not state.on and _dispatcher is not None:
                _dispatcher.destroy()
                _dispatcher = None
    except Exception as error:  # noqa: BLE001 - the job does not depend on us
        state.failed("dispatcher", error)


def remove() -> None:
    """Takes the functions away; nothing is wanted any more. Never raises."""
    global _dispatcher, _hook, _missing
    try:
        with _lock:
            if _dispatcher is not None:
                _dispatcher.destroy()
            _dispatcher = _hook = _missing = None
            _reasons.clear()
    except Exception as error:  # noqa: BLE001 - the job does not depend on us
        state.failed("dispatcher", error)


def after_fork() -> None:
    """In a forked child: other threads' locks are open."""
    global _lock
    _lock = threading.RLock()
