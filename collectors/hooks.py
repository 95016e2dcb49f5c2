"""Records and marks the calls of c10d that are made through the methods of torch's ``ProcessGroup``.

The methods of the class are replaced, so that early imports of torch.distributed's functions, calls of a group's
methods, batched point-to-point calls and coalesced calls all pass here. Two things can be done with a call, each by
itself (both know the same of it):

- a session is open and active (``state.on``): one "call" record goes to ``state.log`` (fields: record.CALL), after one
  "group" record for each group, said before its first call. While a profiler may record, a range is opened too, whose
  args carry the number of the record as ``call``;
- naming.py's hook is installed: a range is opened while a profiler records.

With neither, the methods are torch's own: a dormant collector costs a call nothing. A call that a call makes is not
recorded again.

Calls that C++ issues (torch's DistributedDataParallel, functional collectives) do not pass these methods: dispatch.py
sees them. ``want_dispatcher`` says that the job uses such a thing; ``after_import`` watches for it.

Nothing here raises into the job. Importing this module imports no torch.
"""

# What written_out binds where ``plain`` is true is bound where its record is made.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from traceanalyzer.collectors.record import CALL
from traceanalyzer.collectors.state import state

__all__ = [
    "WATCHED",
    "Hook",
    "after_import",
    "current",
    "install",
    "report",
    "say_groups",
    "switched",
    "uninstall",
    "want_dispatcher",
    "watch",
]

_OUTPUT_THEN_INPUT = (1, 0)
_IN_PLACE = (0, 0)
_INPUT_ONLY = (0, None)
_OUTPUT_ONLY = (None, 0)
_NO_TENSORS = (None, None)

# Method of ProcessGroup, old and new names -> (operation, (position of the input, position of the output)).
METHODS: dict[str, tuple[str, tuple[int | None, int | None]]] = {
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
REDUCING = frozenset({"all_reduce", "reduce_scatter", "reduce"})
POINT_TO_POINT = frozenset({"send", "recv"})

# What torch.distributed's functions call most: (group, [tensor], options), and (group, output, input, options).
_WRITTEN_OUT = frozenset(
    {"allreduce", "all_gather_single", "_allgather_base", "reduce_scatter_single", "_reduce_scatter_base"}
)

_TRIES = 8
"""How often the ranks of a group that torch.distributed does not know (yet) are asked for."""

_NOBODY: tuple[Any, ...] = (None,)

_NOT_GIVEN: Any = object()

_next_form = itertools.count().__next__
"""Numbers of forms, which no two logs of a process share."""

Facts = tuple[Any, ...]
"""What the arguments of a call say: dtype, in_elems, out_elems, reduce_op, root, peer, in_splits, out_splits, tensors,
is_async."""

Describe = Callable[[list[int] | None, Sequence[Any], dict[str, Any]], Facts]
"""(global ranks of the group, the call's arguments, its named ones) -> Facts. The first argument is the group."""

Build = Callable[[Sequence[Any], dict[str, Any], "Group", int, int | None, int], list[Any]]
"""(arguments, named ones, group, seq, number, tid) -> the call's record, its times 0."""

_START = 1 + CALL.index("t_issue_ns")
_END = 1 + CALL.index("t_issue_end_ns")


# Arguments -----------------------------------------------------------------------------------------------------------


def text(value: object) -> str:
    """``value`` as text that survives the trace writer: printable ASCII without double quote or backslash."""
    return "".join(c if " " <= c <= "~" and c not in '"\\' else {'"': "'", "\\": "/"}.get(c, "?") for c in str(value))


_MIXED = object()
_dtypes: dict[Any, str] = {}


def _dtype(first: Any, second: Any) -> str | None:
    """Name of the element type that both have; None if they differ. None stands for no tensors."""
    if first is None:
        first = second
    elif second is not None and second is not first:
        return None
    if first is None or first is _MIXED:
        return None
    name = _dtypes.get(first)
    if name is None:
        name = _dtypes[first] = str(first).removeprefix("torch.")
    return name


def sizes(tensors: Any) -> tuple[int, int, Any]:
    """(elements, tensors, element type) of a tensor or a nest of lists of them."""
    if type(tensors) is list and len(tensors) == 1:
        tensors = tensors[0]
    if tensors is None:
        return 0, 0, None
    if isinstance(tensors, (list, tuple)):
        elements = count = 0
        dtype = None
        for item in tensors:
            more, several, of = sizes(item)
            elements += more
            count += several
            if of is not None and of is not dtype:
                dtype = of if dtype is None else _MIXED
        return elements, count, dtype
    dtype = tensors.dtype
    return tensors.numel(), 1, dtype


def each(tensors: Any) -> list[int] | None:
    """Elements of each tensor of a list; None if it is none."""
    return [tensor.numel() for tensor in tensors] if isinstance(tensors, (list, tuple)) else None


def facts(given: Any, got: Any, in_place: bool, coalesced: bool) -> tuple[str | None, int, int, int | None]:
    """(dtype, in_elems, out_elems, tensors) of what is handed in and what comes out."""
    in_elems, count, first = sizes(given) if given is not None else (0, 0, None)
    if in_place:
        return _dtype(first, None), in_elems, in_elems, count if coalesced else None
    out_elems, _, second = sizes(got)
    return _dtype(first, second), in_elems, out_elems, count if coalesced else None


def rows(value: Any) -> list[int] | None:
    return [int(n) for n in value] if value is not None and len(value) else None


def global_rank(ranks: list[int] | None, rank: Any) -> int | None:
    """Global rank of a rank of a group; None if it is no rank or the group's ranks are not known."""
    if not isinstance(rank, int) or ranks is None or not 0 <= rank < len(ranks):
        return None
    return ranks[rank]


def _argument(args: Sequence[Any], kwargs: dict[str, Any], position: int, names: tuple[str, ...]) -> Any:
    """The argument at ``position`` or under one of ``names``; None if it was not given."""
    if position < len(args):
        return args[position]
    return next((kwargs[name] for name in names if name in kwargs), None) if kwargs else None


# The options of calls that reduce. Reading their reduction makes an object each time, which is a quarter of what a record
# costs; what was put into them is known for less.
_OPTIONS = ("AllreduceOptions", "AllreduceCoalescedOptions", "ReduceScatterOptions", "ReduceOptions")


class Reductions:
    """Names of c10d's reductions ("sum", "max", "avg", "premul_sum", ...).

    ``latest``: the options that a reduction was put into last, and that reduction, while they are watched; (None, None)
    otherwise. ``names``: ``id`` of each of torch's own constants (ReduceOp.SUM, ...), which live as long as torch does,
    -> its name.
    """

    def __init__(self) -> None:
        from torch._C import _distributed_c10d
        from torch._C._distributed_c10d import ReduceOp

        kind: Any = ReduceOp
        self.kind = kind
        self.latest: tuple[Any, Any] = (None, None)
        self.names: dict[int, str] = {}
        self.total = getattr(kind, "SUM", _NOT_GIVEN)
        """torch's own constant for the reduction that nearly every call asks for."""
        self.options = [found for name in _OPTIONS if (found := getattr(_distributed_c10d, name, None)) is not None]
        self.watched: list[tuple[Any, property, property]] = []
        self.by_hash: dict[int, str] = {}
        made = 0
        for name, member in getattr(kind.RedOpType, "__members__", {}).items():
            # asking an operation for its hash takes a seventh of the time that asking for its name takes
            with contextlib.suppress(RuntimeError):  # one with a factor is made in another way, and asked for its name
                self.by_hash[hash(kind(member))] = name.lower()
                made += 1
            constant = getattr(kind, name, None)
            if constant is member:
                self.names[id(constant)] = name.lower()
        if len(self.by_hash) != made:
            self.by_hash = {}

    def watch(self) -> None:
        """Notes from now on what is put into options as their reduction."""
        if self.watched:
            return
        for options in self.options:
            original = options.__dict__.get("reduceOp")
            if isinstance(original, property) and original.fset is not None:
                ours = property(original.fget, self.setter(original.fset), original.fdel, original.__doc__)
                options.reduceOp = ours
                self.watched.append((options, original, ours))

    def setter(self, put: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def setter(options: Any, reduction: Any) -> None:
            put(options, reduction)
            self.latest = (options, reduction)

        return setter

    def unwatch(self) -> None:
        """Puts the options' property back; one that somebody replaced over ours is left, and ours passes through."""
        for options, original, ours in self.watched:
            if options.__dict__.get("reduceOp") is ours:
                options.reduceOp = original
        self.watched.clear()
        self.latest = (None, None)

    def name(self, op: Any) -> str | None:
        """Name of a reduction; None if ``op`` is none."""
        if type(op) is self.kind:
            found = self.by_hash.get(hash(op))
            if found is not None:
                return found
            op = op.op
        return str(op.name).lower() if type(op).__name__ == "RedOpType" else None


def place_of_message(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """The place of a send or receive, of its own where messages of several places are issued together."""
    places = state.place_of_tensor
    if places is not None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, (list, tuple)) and value:
                return places.get(id(value[0]), state.place)
    return state.place


class Kind:
    """One kind of call: its operation, how it is called in the record, and what makes the record of its arguments."""

    __slots__ = ("build", "forms", "method", "op", "point_to_point")

    def __init__(self, op: str, method: str, describe: Describe, build: Build | None = None) -> None:
        self.op = op
        self.method = method
        self.point_to_point = op in POINT_TO_POINT
        self.build = build or self.builder(describe)
        self.forms: dict[int, Form] | None = None
        """id of a group -> how calls of this kind look in it; None for kinds that have no short record."""

    def builder(self, describe: Describe) -> Build:
        """The way of any kind of call to its record."""
        op, method, switches, message = self.op, self.method, state, self.point_to_point

        def build(
            args: Sequence[Any], kwargs: dict[str, Any], group: Group, seq: int, number: int | None, tid: int
        ) -> list[Any]:
            *found, is_async = describe(group.ranks, args, kwargs)
            start = ["call", number, group.number, op, method, seq]
            place = place_of_message(args, kwargs) if message else switches.place
            return [*start, *found, group.block, is_async, 0, 0, switches.step, place, tid]

        return build


def _kind(method: str, reductions: Reductions) -> Kind:
    """The kind of call that a method makes."""
    describe = _describer(method, reductions)
    kind = Kind(METHODS[method][0], method, describe)
    # Sends and receives are read by code that is written out. Whatever looks different goes the general way.
    otherwise, op, dtypes, switches = kind.build, kind.op, _dtypes, state
    sends = op == "send"

    def message(
        args: Sequence[Any], kwargs: dict[str, Any], group: Group, seq: int, number: int | None, tid: int
    ) -> list[Any]:
        try:
            _, (tensor,), peer, _ = args
            places = switches.place_of_tensor
            place = switches.place if places is None else places.get(id(tensor), switches.place)
            n, ranks = tensor.numel(), group.ranks
            peer = ranks[peer] if ranks is not None and peer >= 0 else None
            # fmt: off
            return ["call", number, group.number, op, method, seq, dtypes[tensor.dtype], n if sends else 0,
                    0 if sends else n, None, None, peer, None, None, None, group.block, None, 0, 0,
                    switches.step, place, tid]
            # fmt: on
        except Exception:  # noqa: BLE001 - another form of the call, or an error: the general way tells
            return otherwise(args, kwargs, group, seq, number, tid)

    if method in ("send", "recv"):
        kind.build = message
    return kind


def _describer(method: str, reductions: Reductions) -> Describe:
    """The function that reads the arguments of one method, of which the first is the group."""
    op, (source, target) = METHODS[method]
    in_place = (source, target) == _IN_PLACE
    coalesced = method.endswith("_coalesced")
    reducing = op in REDUCING
    input_names = _IN_PLACE_NAMES if in_place or op in POINT_TO_POINT else _INPUT_NAMES
    output_names = _IN_PLACE_NAMES if op in POINT_TO_POINT else _OUTPUT_NAMES
    root_position = _ROOT_POSITION.get(op)
    one_peer = method in ("send", "recv")
    split = method in ("all_to_all_single", "alltoall_base")
    in_parts = method == "alltoall"
    options_of: dict[type, bool] = {}

    def options_among(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        for value in (*reversed(args), *kwargs.values()):
            kind = type(value)
            known = options_of.get(kind)
            if known is None:
                known = options_of[kind] = kind.__name__.endswith("Options")
            if known:
                return value
        return None

    def describe(ranks: list[int] | None, args: Sequence[Any], kwargs: dict[str, Any]) -> Facts:
        given = None if source is None else _argument(args, kwargs, source + 1, input_names)
        got = None if target is None or in_place else _argument(args, kwargs, target + 1, output_names)
        dtype, in_elems, out_elems, tensors = facts(given, got, in_place, coalesced)
        options = options_among(args, kwargs)
        reduce_op = root = peer = in_splits = out_splits = None
        if reducing:
            candidates = (getattr(options, "reduceOp", None), *args, *kwargs.values())
            reduce_op = next((name for c in candidates if (name := reductions.name(c))), None) or "sum"
        if root_position is not None:
            found = getattr(options, "rootRank", None)
            if found is None:
                found = _argument(args, kwargs, root_position + 1, ("root",))
            root = global_rank(ranks, found)
        elif one_peer:
            peer = global_rank(ranks, _argument(args, kwargs, 2, ("dstRank", "srcRank")))
        elif split:
            out_splits = rows(_argument(args, kwargs, 3, ("output_split_sizes",)))
            in_splits = rows(_argument(args, kwargs, 4, ("input_split_sizes",)))
        elif in_parts:
            in_splits, out_splits = each(given), each(got)
        is_async = getattr(options, "asyncOp", None)
        return dtype, in_elems, out_elems, reduce_op, root, peer, in_splits, out_splits, tensors, is_async

    return describe


def arguments(record: list[Any], into: dict[str, Any]) -> dict[str, Any]:
    """Adds to a range's args what a call's record says (naming.py's table); what is unknown is left out."""
    said = dict(zip(CALL, record[1:], strict=True))
    for key in _ARGUMENTS:
        value = said[key]
        if value is not None:
            into[key] = value
    if said["number"] is not None:
        into["call"] = said["number"]
    if said["method"] not in ("alltoall", "c10d::alltoall_"):
        for key in ("in_splits", "out_splits"):  # of the list form they are elements, not rows
            if said[key] is not None:
                into[key] = str(said[key])
    return into


# fmt: off
_ARGUMENTS = ("seq", "method", "dtype", "in_elems", "out_elems", "reduce_op", "root", "peer", "tensors", "coalesce",
              "is_async")
# fmt: on


# Groups --------------------------------------------------------------------------------------------------------------


class Group:
    """What is known of one process group, and the counters of its calls."""

    __slots__ = ("block", "collective", "facts", "identity", "number", "p2p", "ranks", "ref", "said", "tries")

    def __init__(self, number: int) -> None:
        self.number = number
        self.identity: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.ranks: list[int] | None = None
        self.collective = itertools.count().__next__
        self.p2p = itertools.count().__next__
        self.block: int | None = None
        self.said: Any = None  # the log that was told of it
        self.tries = _TRIES
        self.ref: Any = None


class Me:
    """One thread: whether it is in a call already, and its number in the operating system (as Kineto writes it)."""

    __slots__ = ("inside", "tid")

    def __init__(self) -> None:
        self.inside = False
        self.tid = threading.get_native_id()


_threads: dict[int, Me] = {}
"""Number of each living thread that made calls, as Python numbers threads -> the thread."""


def inside() -> int:
    """How many threads are in a call right now. Calls are watched only while they are recorded."""
    return sum(me.inside for me in list(_threads.values()))


class _Life:
    """Ends with its thread, which is then forgotten before another thread gets its number."""

    __slots__ = ("ident", "me", "threads")

    def __init__(self, me: Me) -> None:
        self.ident, self.me = threading.get_ident(), me
        self.threads = _threads  # when the interpreter ends, the module is gone first
        self.threads[self.ident] = me

    def __del__(self) -> None:
        if self.threads.get(self.ident) is self.me:
            del self.threads[self.ident]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.me = Me()
        self.life = _Life(self.me)


thread = _Thread()
"""``thread.me`` is the thread that runs."""

Form = tuple[Any, Any, Group, int, Callable[[], int], Callable[[], int]]
"""How calls of a kind look in a group: the log that was told so and its queue, the group, the form's number, and
what numbers the calls, those of the process and those of the group."""


class Hook:
    """One installation: the replaced methods, the groups and their counters."""

    def __init__(self) -> None:
        from torch._C._distributed_c10d import ProcessGroup
        from torch._C._profiler import _RecordFunctionFast
        from torch.autograd import profiler
        from torch.distributed import distributed_c10d

        self.naming = False
        self.session = False
        self.reason: str | None = None
        self.cls: Any = ProcessGroup
        self.range: Any = _RecordFunctionFast
        self.flags: Any = profiler
        self.world: Any = distributed_c10d._world
        # A profile that a daemon starts shows in none of the flags.
        self.always = bool(os.environ.get("KINETO_USE_DAEMON"))
        self.lock = threading.Lock()
        self.groups: dict[int, Group] = {}
        self.forms: list[dict[int, Form]] = []
        """What the kinds with short records know."""
        self.counters: dict[tuple[Any, ...], tuple[Callable[[], int], Callable[[], int]]] = {}
        self.orphans: dict[tuple[Any, ...], Group] = {}
        self.next_group = itertools.count().__next__
        self.next_call = itertools.count().__next__
        self.next_block = itertools.count().__next__
        self.told: tuple[Any, int] = (None, 0)
        self.reductions = Reductions()
        # what stands in the class -> what takes its place; made once, so that Python has it optimized when it comes back
        self.wrappers: dict[str, tuple[Any, Any]] = {}
        for name in METHODS:
            if name in self.cls.__dict__:
                # getattr gives an unbound builtin: right for calling, wrong for putting back.
                self.wrappers[name] = (self.cls.__dict__[name], self.wrap(name, getattr(self.cls, name)))
        self.there: set[str] = set()
        """Methods in whose place ours stand, or over ours somebody else's."""

    def sync(self) -> None:
        """Puts the methods' hook in place while somebody uses it, and torch's own methods back while nobody does."""
        active = self.session and state.on
        with self.lock:
            if active or self.naming:
                self.put()
            else:
                self.take()
        if active:
            self.reductions.watch()
        else:
            self.reductions.unwatch()

    def put(self) -> None:
        """Replaces the methods, all of them or, with an error, none."""
        try:
            for name, (_, wrapper) in self.wrappers.items():
                if name not in self.there:
                    setattr(self.cls, name, wrapper)
                    self.there.add(name)
        except BaseException:
            self.take()
            raise

    def take(self) -> None:
        """Puts the methods back. One that somebody replaced over ours is left, and ours under it passes through."""
        for name in list(self.there):
            original, wrapper = self.wrappers[name]
            if self.cls.__dict__.get(name) is wrapper:
                setattr(self.cls, name, original)
                self.there.discard(name)

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The function that takes the place of a method."""
        op = METHODS[name][0]
        if op == "start_coalescing":
            wrapper = self.around_start(call)
        elif op == "end_coalescing":
            wrapper = self.around_end(name, call)
        else:
            kind = _kind(name, self.reductions)
            wrapper = self.around(kind, call)
            if name in _WRITTEN_OUT and not self.always:  # each call has a range where a daemon may record
                kind.forms = {}
                self.forms.append(kind.forms)
                wrapper = self.written_out(kind, kind.forms, call, wrapper)
        return functools.wraps(call)(wrapper)

    # -- around a call ---------------------------------------------------------------------------------------------

    def around(self, kind: Kind, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call`` with its record and its range; the group is its first argument.

        All calls of the job pass here, so that it is one function with its names at hand.
        """
        here, switches, hook, now = thread, state, self, time.time_ns
        groups = self.groups
        method, point_to_point, build = kind.method, kind.point_to_point, kind.build
        flags, always = self.flags, self.always

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            # The group stays among args: handing on what came costs half of taking it apart and putting it together.
            if not (switches.on or hook.naming):
                return call(*args, **kwargs) if kwargs else call(*args)
            me = here.me
            if me.inside or not (hook.session or hook.naming):
                return call(*args, **kwargs)
            me.inside = True
            log: Any = None
            scope = None
            record: list[Any] | None = None
            try:
                try:
                    pg = args[0]
                    group = groups.get(id(pg))
                    if group is None or group.tries:
                        group = hook.learn(pg)
                    seq = group.p2p() if point_to_point else group.collective()
                    marked = switches.marking or flags._is_profiler_enabled or always
                    if switches.on and (log := switches.log) is not None:
                        if group.said is not log:
                            hook.say(group, log)
                        elif (forms := kind.forms) is not None and forms.get(id(pg), _NOBODY)[0] is not log:
                            hook.form(kind, forms, pg, group, log)
                        record = build(args, kwargs, group, seq, hook.next_call(), me.tid)
                        if marked:
                            scope = hook.open(kind, group, record)
                        record[_START] = now()
                    elif marked:
                        scope = hook.open(kind, group, build(args, kwargs, group, seq, None, me.tid))
                except Exception as error:  # noqa: BLE001 - whatever it is, the job's call goes on
                    hook.failed(error, method)
                return call(*args, **kwargs) if kwargs else call(*args)
            except BaseException as error:
                hook.raised(method, error)
                raise
            finally:
                me.inside = False
                if record is not None:
                    record[_END] = now()
                if scope is not None:
                    hook.leave(scope)
                if record is not None:
                    log.put(record)  # pyright: ignore[reportOptionalMemberAccess] - there is one if there is a record

        return wrapper

    def written_out(
        self,
        kind: Kind,
        forms: dict[int, Form],
        call: Callable[..., Any],
        otherwise: Callable[..., Any],
    ) -> Callable[..., Any]:
        """What ``around`` does, written out for a record without a range and the most frequent forms of calls.

        These are (group, [tensor], options) and (group, output, input, options). It is one function that makes one short
        record, as every instruction is felt where a backend's threads have emptied the caches. Whatever looks different goes
        the way of ``otherwise``, which is ``around``.
        """
        threads, ident, switches, hook, now = _threads, threading.get_ident, state, self, time.time_ns
        flags = self.flags
        method, reductions, dtypes = kind.method, self.reductions, _dtypes
        names, by_hash, total = reductions.names, reductions.by_hash, reductions.total
        in_place, reducing = METHODS[method][1] == _IN_PLACE, kind.op in REDUCING

        def wrapper(
            pg: Any = _NOT_GIVEN,
            first: Any = _NOT_GIVEN,
            second: Any = _NOT_GIVEN,
            third: Any = _NOT_GIVEN,
            /,
            *rest: Any,
            **named: Any,
        ) -> Any:
            plain = False
            try:
                log, waiting, group, form, next_call, next_seq = forms[id(pg)]
                me = threads[ident()]
                if not (
                    log is not switches.log
                    or me.inside
                    or rest
                    or named
                    or switches.marking
                    or flags._is_profiler_enabled
                ):
                    if in_place:
                        (tensor,) = first
                        options = second
                        given = got = tensor.numel()
                        same = third is _NOT_GIVEN
                    else:
                        tensor, options = first, third
                        got, given = tensor.numel(), second.numel()
                        same = second.dtype is tensor.dtype
                    is_async = options.asyncOp
                    reduction = None
                    if reducing:
                        latest, reduction = reductions.latest
                        if latest is options and reduction is total:
                            reduction = "sum"
                        elif latest is not options or (reduction := names.get(id(reduction))) is None:
                            reduction = by_hash[hash(options.reduceOp)]
                    dtype, step, place, block = dtypes[tensor.dtype], switches.step, switches.place, group.block
                    if switches.on and same:
                        number, seq = next_call(), next_seq()
                        plain = True
            except Exception:  # noqa: BLE001 - another form of the call, or an error: the general way tells
                plain = False
            if not plain:
                given_ones = [value for value in (pg, first, second, third) if value is not _NOT_GIVEN]
                return otherwise(*given_ones, *rest, **named)
            start = now()
            me.inside = True
            try:
                return call(pg, first, second) if in_place else call(pg, first, second, third)
            except BaseException as error:
                hook.raised(method, error)
                raise
            finally:
                me.inside = False
                if len(waiting) < log.max_queue:
                    waiting.append(
                        (
                            form,
                            number,
                            seq,
                            dtype,
                            given,
                            got,
                            reduction,
                            block,
                            is_async,
                            start,
                            now(),
                            step,
                            place,
                            me.tid,
                        )
                    )
                else:
                    log.dropped += 1

        return wrapper

    def form(self, kind: Kind, forms: dict[int, Form], pg: Any, group: Group, log: Any) -> None:
        """Tells the log how calls of a kind look in a group; from then on they get short records."""
        if group.tries:
            return
        number = _next_form()
        if log.put(["form", number, group.number, kind.op, kind.method]):
            forms[id(pg)] = (log, log.waiting, group, number, self.next_call, group.collective)

    def forget(self, key: int | None = None) -> None:
        """The next calls in a group (in all groups) get whole records again."""
        for forms in self.forms:
            if key is None:
                forms.clear()
            else:
                forms.pop(key, None)

    def open(self, kind: Kind, group: Group, record: list[Any]) -> Any:
        scope = self.range(f"ta:{kind.op}", [], arguments(record, {**group.identity}))
        scope.__enter__()
        return scope

    def leave(self, scope: Any) -> None:
        """Closes a range. Never raises."""
        try:
            scope.__exit__(None, None, None)
        except Exception as error:  # noqa: BLE001 - whatever it is, the job's call goes on
            self.failed(error, "leave")

    def raised(self, method: str, error: BaseException) -> None:
        """Notes that a call of the job raised; its record stays. Never raises."""
        if state.on and state.log is not None:
            with contextlib.suppress(Exception):
                state.log.issue("info", "call_raised", f"{method} raised {type(error).__name__}")

    def around_start(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The beginning of a block of coalesced calls: they are what is between, until the end."""

        def wrapper(pg: Any, *args: Any, **kwargs: Any) -> Any:
            if (state.on and self.session) or self.naming:
                try:
                    self.learn(pg).block = self.next_block()
                except Exception as error:  # noqa: BLE001 - whatever it is, the job's call goes on
                    self.failed(error, "_start_coalescing")
            return call(pg, *args, **kwargs)

        return wrapper

    def around_end(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The end of a block; its range is there for the kernel, which is launched now."""

        def wrapper(pg: Any, *args: Any, **kwargs: Any) -> Any:
            scope = None
            # also if what began the block was switched off since: the next call is not in it
            if state.on or self.naming or id(pg) in self.groups:
                try:
                    group = self.learn(pg)
                    block, group.block = group.block, None
                    if block is not None and self.recording():
                        values = {**group.identity, "method": name, "coalesce": block}
                        scope = self.range("ta:end_coalescing", [], values)
                        scope.__enter__()
                except Exception as error:  # noqa: BLE001 - whatever it is, the job's call goes on
                    self.failed(error, name)
            try:
                return call(pg, *args, **kwargs)
            finally:
                if scope is not None:
                    self.leave(scope)

        return wrapper

    def recording(self) -> bool:
        """Whether a profiler may be recording."""
        return bool(state.marking or self.flags._is_profiler_enabled or self.always)

    def failed(self, error: Exception, where: str) -> None:
        """An error of ours: naming is switched off at the first, the session counts them."""
        if self.naming:
            self.naming = False
            self.reason = f"{type(error).__name__} in {where}"
            with contextlib.suppress(Exception):  # text of an error is code too
                self.reason = f"{self.reason}: {error}"
        if self.session:
            state.failed(where, error)

    # -- groups ----------------------------------------------------------------------------------------------------

    def learn(self, pg: Any) -> Group:
        """The group of a call; groups that torch.distributed made before it are numbered first, in their order."""
        group = self.groups.get(id(pg))
        if group is not None and not group.tries:
            return group
        with self.lock:
            if group is None:
                for other in list(self.world.pg_map):
                    if other is pg:
                        break
                    if id(other) not in self.groups:
                        self.identify(self.add(other), other)
                group = self.groups.get(id(pg)) or self.add(pg)
            if group.tries:
                self.identify(group, pg)
            return group

    def add(self, pg: Any) -> Group:
        key = id(pg)
        # torch.distributed keeps its groups' objects; of others, each call from C++ may see a new object for the same
        identity = None
        if pg not in self.world.pg_map:
            identity = (pg.group_name, pg.group_desc, pg.size(), pg.rank())
            group = self.orphans.get(identity)
            if group is None:
                group = self.orphans[identity] = Group(self.next_group())
        else:
            group = Group(self.next_group())
        groups, forget = self.groups, self.forget

        def gone(_ref: Any) -> None:
            groups.pop(key, None)
            forget(key)

        group.ref = weakref.ref(pg, gone)
        groups[key] = group
        return group

    def identify(self, group: Group, pg: Any) -> None:
        identity: dict[str, Any] = {"pg": text(pg.group_name), "desc": text(pg.group_desc)}
        identity["size"] = int(pg.size())
        identity["rank"] = int(pg.rank())
        # {global rank: rank in the group}; absent for a group that torch.distributed did not make.
        if ranks := self.world.pg_group_ranks.get(pg):
            if group.ranks is None:
                group.ranks = sorted(ranks, key=ranks.__getitem__)
                # destroyed and made anew, a group has its old name: its calls go on being counted
                again = (identity["pg"], tuple(group.ranks))
                group.collective, group.p2p = self.counters.setdefault(again, (group.collective, group.p2p))
            identity["ranks"] = str(group.ranks)
            group.tries = 0
        else:
            group.tries -= 1
        # The profiler drops empty text.
        group.identity = {key: value for key, value in identity.items() if value != ""}
        known = {
            "name": str(pg.group_name),
            "description": str(pg.group_desc),
            "backend": self.backend(pg),
            "ranks": group.ranks,
            "size": identity["size"],
            "rank": identity["rank"],
        }
        if known != group.facts:
            group.facts = known
            group.said = None
            self.forget(id(pg))

    def backend(self, pg: Any) -> str | None:
        try:
            config = self.world.pg_backend_config.get(pg)
            return str(config) if config is not None else str(pg.name())
        except Exception:  # noqa: BLE001 - another torch; what is unknown is null
            return None

    def say(self, group: Group, log: Any) -> None:
        log.put(["group", group.number, dict(group.facts)])
        group.said = log
        for call in on_group:
            call()

    def calls(self) -> int:
        """How many calls got a number."""
        counter: Any = self.next_call
        return int(repr(counter.__self__)[6:-1])  # count(7); asking a counter any other way advances it

    def say_groups(self) -> None:
        """Puts a record for every group there is, also for those that were not used yet; cheap if there is no new one."""
        log = state.log
        if log is None:
            return
        groups = list(self.world.pg_map)
        if log is self.told[0] and len(groups) == self.told[1]:
            return
        self.told = (log, len(groups))
        for pg in groups:
            group = self.learn(pg)
            if group.said is not log:
                self.say(group, log)


# One installation of the process -------------------------------------------------------------------------------------

_lock = threading.RLock()
_hook: Hook | None = None
_mode = "methods"
_not_seen: set[str] = set()


def current() -> Hook | None:
    """The installation of this process; None if the methods are as torch made them."""
    return _hook


def install(mode: str = "auto") -> None:
    """Installs the methods' hook for the session. Raises what is missing in this torch.

    mode: ``methods``, ``dispatcher`` (the dispatcher too, from now on), ``auto`` (the dispatcher too once the job uses
    something that issues calls from C++).
    """
    global _mode
    with _lock:
        hook = the_hook()
        hook.session = True
        hook.forget()
        hook.next_call = itertools.count().__next__
        hook.sync()
        _mode = mode
        _not_seen.clear()
    if mode == "dispatcher":
        want_dispatcher("asked for")
    else:
        watch()


def the_hook() -> Hook:
    """The installation; makes it if there is none. Raises what is missing in this torch."""
    global _hook
    with _lock:
        if _hook is None:
            _hook = Hook()
        return _hook


def uninstall() -> None:
    """Ends the session's use of the hooks; the methods are put back unless naming.py's hook uses them."""
    with _lock:
        unwatch()
        dispatcher = sys.modules.get("traceanalyzer.collectors.dispatch")
        if dispatcher is not None:
            dispatcher.remove()
        if _hook is not None:
            _hook.session = False
            _hook.forget()
            release()


def release() -> None:
    """Puts the methods back if nobody uses them."""
    global _hook
    with _lock:
        if _hook is not None:
            _hook.sync()
            if not _hook.naming and not _hook.session:
                _hook = None


def say_groups() -> None:
    """Tells the log of every group there is. Never raises."""
    try:
        if _hook is not None:
            _hook.say_groups()
    except Exception as error:  # noqa: BLE001 - the job does not depend on us
        state.failed("say_groups", error)


def report() -> dict[str, Any]:
    """What is installed, and why: methods (how many), dispatcher (reasons, [] if it is not wanted), not_seen."""
    dispatcher = sys.modules.get("traceanalyzer.collectors.dispatch")
    return {
        "mode": _mode,
        "methods": len(_hook.wrappers) if _hook is not None and _hook.session else 0,
        "dispatcher": list(dispatcher.reasons()) if dispatcher is not None else [],
        "not_seen": sorted(_not_seen),
    }


# When the dispatcher is needed ---------------------------------------------------------------------------------------


on_change: list[Callable[[], None]] = []
"""Called when report() says something new."""


on_group: list[Callable[[], None]] = []
"""Called when a log was told of a group. None of them raises."""


def switched() -> None:
    """To be called after ``state.on`` has changed, outside of calls: what is there while calls are recorded comes or goes.

    Never raises.
    """
    try:
        if _hook is not None:
            _hook.sync()
    except Exception as error:  # noqa: BLE001 - the job does not depend on us
        state.failed("switched", error)
    dispatcher = sys.modules.get("traceanalyzer.collectors.dispatch")
    if dispatcher is not None:
        dispatcher.sync()
    marks = sys.modules.get("traceanalyzer.collectors.marks")
    if marks is not None:
        marks.sync()


def want_dispatcher(reason: str) -> bool:
    """The job uses ``reason``, which issues calls from C++: sees to it that they are seen. Never raises.

    True if they are. If not, the log gets an issue ``calls_from_cpp_not_seen``.
    """
    try:
        with _lock:
            if _hook is None or not _hook.session:
                return False
            missing = "the hooks were limited to methods" if _mode == "methods" else None
            if missing is None:
                from traceanalyzer.collectors import dispatch

                hook: Any = _hook
                missing = dispatch.want(hook, reason)
            unwatch(reason if missing is not None else None)
            if missing is not None:
                _not_seen.add(f"{text(reason)}: {text(missing)}")
                if state.log is not None:
                    state.log.issue(
                        "data_loss",
                        "calls_from_cpp_not_seen",
                        f"calls that C++ issues for {text(reason)} are not recorded: {text(missing)}",
                    )
        for call in on_change:
            call()
        return missing is None
    except Exception as error:  # noqa: BLE001 - the job does not depend on us
        state.failed("want_dispatcher", error)
        return False


# What issues calls from C++ -> (module, class or None, attribute, what the report says). The attribute is replaced until
# it is called for the first time; the dispatcher is there before that call goes on.
_SIGNS: tuple[tuple[str, str | None, str, str], ...] = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "__init__", "DistributedDataParallel"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "forward", "DistributedDataParallel"),
    ("torch.distributed.device_mesh", "DeviceMesh", "__init__", "DeviceMesh (FSDP2, DTensor)"),
    ("torch.distributed.device_mesh", "DeviceMesh", "get_group", "DeviceMesh (FSDP2, DTensor)"),
    ("torch.distributed._functional_collectives", None, "_resolve_group", "functional collectives"),
    ("torch.distributed._functional_collectives", None, "_resolve_group_name", "functional collectives"),
    ("torch.distributed", None, "_broadcast_coalesced", "broadcast of buckets from C++"),
)

WATCHED: frozenset[str] = frozenset(module for module, _, _, _ in _SIGNS)
"""Modules that after_import() wants to hear of, once their code has run."""

_watching: list[tuple[Any, str, Any, Any, str]] = []  # owner, attribute, original, ours, reason
_watchful = False


def after_import(module: str) -> None:
    """To be called when a module of WATCHED was imported while a session is open. Never raises."""
    try:
        found = sys.modules.get(module)
        with _lock:
            if found is None or _hook is None or not _hook.session or not _watchful:
                return
            for name, cls, attribute, reason in _SIGNS:
                if name == module:
                    _watch(found if cls is None else getattr(found, cls, None), attribute, reason)
    except Exception as error:  # noqa: BLE001 - the job does not depend on us
        state.failed("after_import", error)


def watch() -> None:
    """Watches for the first use of what issues calls from C++, in modules that are there. Never raises."""
    global _watchful
    _watchful = True
    for name in WATCHED:
        after_import(name)


def _watch(owner: Any, attribute: str, reason: str) -> None:
    original = owner.__dict__.get(attribute) if owner is not None else None
    if (
        original is None
        or any(entry[0] is owner and entry[1] == attribute for entry in _watching)
        or not callable(original)
    ):
        return

    @functools.wraps(original)
    def first(*args: Any, **kwargs: Any) -> Any:
        if any(entry[3] is first for entry in _watching):
            want_dispatcher(reason)
        return original(*args, **kwargs)

    _watching.append((owner, attribute, original, first, reason))
    setattr(owner, attribute, first)


def unwatch(reason: str | None = None) -> None:
    """Puts back what is watched (of ``reason`` only); what somebody replaced over ours is left, and ours passes through."""
    global _watchful
    with _lock:
        for entry in list(_watching):
            owner, attribute, original, ours, why = entry
            if reason is None or why == reason:
                _watching.remove(entry)
                if owner.__dict__.get(attribute) is ours:
                    setattr(owner, attribute, original)
        if reason is None:
            _watchful = False


def after_fork() -> None:
    """In a forked child: other threads' locks are open, and the thread that forked has another number."""
    global _lock
    _lock = threading.RLock()
    on_change.clear()
    on_group.clear()
    _threads.clear()
    thread.renew()
    if _hook is not None:
        _hook.lock = threading.Lock()
        _hook.next_call = itertools.count().__next__
        _hook.forget()
        for group in list(_hook.groups.values()):
            group.said = None
    dispatcher = sys.modules.get("traceanalyzer.collectors.dispatch")
    if dispatcher is not None:
        dispatcher.after_fork()
