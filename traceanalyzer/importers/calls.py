"""Makes calls of the host records of communication in a Kineto trace.

A collective leaves up to five host records, nested on one thread: our own range ``ta:op``, the dispatcher's ``c10d::op_``,
the backend's ``record_param_comms``, an annotation ``nccl:op``; with gloo, ``gloo:op`` on a worker thread. Which of them
exist depends on torch's version and backend (reference: record_formats, sections 1.2 and 1.3). One call makes one row
whatever was recorded of it; ``wait`` and ``init`` make none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import Struct

from traceanalyzer import traffic
from traceanalyzer.importers.json_stream import Args, whole_number


class Metadata(Struct, gc=False, array_like=True):
    """Collective metadata as written on a record_param_comms event, a kernel, or our own range. None: not written."""

    name: str | None = None
    dtype: str | None = None
    in_elems: int | None = None
    out_elems: int | None = None
    group_size: int | None = None
    group_name: str | None = None
    group_desc: str | None = None
    group_ranks: str | None = None
    rank_start: int | None = None
    rank_stride: int | None = None
    in_splits: str | None = None
    out_splits: str | None = None
    seq: int | None = None
    comms_id: int | None = None
    group_rank: int | None = None
    rank_field: int | None = None
    """Key "Rank" as written: group rank of this process; of the peer for send and recv, of the root where there is one."""
    peer: int | None = None
    root: int | None = None
    reduce_op: str | None = None
    is_async: bool | None = None
    block: int | None = None
    """Which start/end block of its group coalesces the call, as our hook counts them."""
    call: int | None = None
    """Number that our hook gave the call: ties it to the hook's log."""

    @classmethod
    def of(cls, args: Args) -> Metadata | None:
        """The metadata of an event, None if it carries no collective name."""
        if args.cname is None:
            return None
        group = args.pgname if args.pgname is not None else args.pgid
        return cls(
            name=args.cname,
            dtype=_text(args.dtype),
            in_elems=_size(args.inn if args.inn is not None else args.inn_old),
            out_elems=_size(args.outn if args.outn is not None else args.outn_old),
            group_size=_members(args.gsize),
            group_name=_text(group),
            group_desc=_text(args.pgdesc),
            group_ranks=_text(args.pgranks),
            rank_start=whole_number(args.gstart),
            rank_stride=whole_number(args.gstride),
            in_splits=_text(args.insplit),
            out_splits=_text(args.outsplit),
            seq=whole_number(args.cseq),
            comms_id=whole_number(args.comms),
            rank_field=_size(args.grank),
            peer=whole_number(args.dst if args.dst is not None else args.src),
            is_async=_flag(args.is_async),
        )

    @classmethod
    def of_ours(cls, args: Args) -> Metadata | None:
        """The metadata of a ``ta:`` range of our hooks, None if it names neither a group nor a call."""
        if args.ta_pg is None and args.ta_call is None:
            return None
        return cls(
            dtype=_text(args.dtype),
            in_elems=_size(args.ta_in),
            out_elems=_size(args.ta_out),
            group_size=_members(args.ta_size),
            group_name=_text(args.ta_pg),
            group_desc=_text(args.ta_desc),
            group_ranks=_text(args.ta_ranks),
            seq=whole_number(args.ta_seq),
            in_splits=_text(args.ta_in_splits),
            out_splits=_text(args.ta_out_splits),
            group_rank=_size(args.ta_rank),
            peer=whole_number(args.ta_peer),
            root=whole_number(args.ta_root),
            reduce_op=None if args.ta_reduce in (None, "") else str(args.ta_reduce).lower(),
            is_async=_flag(args.ta_async),
            block=_size(args.ta_coalesce),
            call=_size(args.ta_call),
        )


class HostEvent(Struct, gc=False, array_like=True):
    """One host record that concerns communication. Times in ns relative to the file's base."""

    name: str
    pid: int | None
    tid: int | None
    start_ns: int
    end_ns: int
    external_id: int | None
    meta: Metadata | None
    dims: str | None
    types: str | None
    concrete: str | None

    @classmethod
    def of(cls, name: str, args: Args, pid: int | None, tid: int | None, start_ns: int, end_ns: int) -> HostEvent:
        """The record of an event."""
        meta = Metadata.of_ours(args) if name.startswith("ta:") else Metadata.of(args)
        dims = bytes(args.dims) or bytes(args.dims_old)
        return cls(
            name,
            pid,
            tid,
            start_ns,
            end_ns,
            whole_number(args.ext if args.ext is not None else args.ext_old),
            meta,
            *(bytes(raw).decode("utf-8", "replace") or None for raw in (dims, args.types, args.concrete)),
        )


class Call(Struct, gc=False, array_like=True):
    """One call as the host (or, for want of that, its kernel) tells it. Times in ns relative to the file's base."""

    op: str | None
    op_raw: str
    pid: int | None
    tid: int | None
    start_ns: int
    end_ns: int
    meta: Metadata
    in_elems: int | None = None
    out_elems: int | None = None
    dtype: str | None = None
    dims: str | None = None
    group_id: str | None = None
    external_ids: tuple[int, ...] = ()
    first_dims: str | None = None
    """Shape of the first input tensor: what gloo's own range of the call shows."""
    issue_seen: bool = True
    """Whether start_ns and end_ns are those of the issuing call on the host."""
    own_work: bool = False
    """Whether they are those of the work itself: a range on gloo's thread."""


POINT_TO_POINT = frozenset({"send", "recv"})
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
_PLACELESS = re.compile(
    r"^(?:aten::|c10d::|_c10d_functional::|nccl:|gloo:|xccl:|ucc:|ta:(?!step|microbatch|forward|backward|layer|phase)|"
    r"record_param_comms|cuda[A-Z]|cu[A-Z]|hip[A-Z]|detach|PyTorch Profiler)"
)
_PYTHON_FUNCTION = re.compile(r"^(?!nn\.Module: ).*\(\d+\): ")


def names_a_place(name: str) -> bool:
    """Whether an enclosing range of this name says where a call was made (autograd functions, modules, marks, steps)."""
    return not _PLACELESS.match(name) and not _PYTHON_FUNCTION.match(name)


# nesting ----------------------------------------------------------------------------------------------------------


class Node:
    """A host record and the records that lie inside it."""

    __slots__ = ("children", "event")

    def __init__(self, event: HostEvent) -> None:
        self.event = event
        self.children: list[Node] = []


_NESTING = ("ta:", "_c10d_functional::", "c10d::", "record_param_comms")


def depth(name: str) -> int:
    """Which of two records with the same times encloses the other: old traces have whole microseconds only."""
    return next((i for i, prefix in enumerate(_NESTING) if name.startswith(prefix)), len(_NESTING))


def _ends_group(name: str) -> bool:
    """Whether a range of this name, not inside a call, stands for the end of a group of coalesced calls."""
    return name == "ta:end_coalescing" or (name.startswith(("nccl:", "xccl:")) and name.endswith("coalesced"))


def nested(events: Iterable[HostEvent]) -> Iterator[tuple[Node, bool]]:
    """(outermost record with what lies inside it, whether it ends a coalesced group) of one thread, each as it closes.

    ``events`` are ordered by start, the longer first, then by ``depth``. The end of a group holds no record together:
    before torch 2.9 it was closed only when its work was dropped, much later.
    """
    stack: list[Node] = []
    for event in events:
        while stack and (stack[-1].event.end_ns <= event.start_ns or stack[-1].event.end_ns < event.end_ns):
            closed = stack.pop()
            if not stack:
                yield closed, False
        node = Node(event)
        if stack:
            stack[-1].children.append(node)
        elif _ends_group(event.name):
            yield node, True
            continue
        stack.append(node)
    if stack:
        yield stack[0], False


# records to calls ----------------------------------------------------------------------------------------------------


def calls_of(node: Node) -> list[Call]:
    """The calls of one outermost record, [] for a wait or an init."""
    made = _calls_of(node)
    if not node.event.name.startswith("ta:"):
        # a hook that replaces the dispatcher's kernels opens its range inside the operator's record
        ours = list(_ours(node))
        if len(ours) == len(made):
            for call, mark in zip(sorted(made, key=lambda c: c.start_ns), ours, strict=True):
                fill(call, mark.event.meta)
    return made


def _ours(node: Node) -> Iterator[Node]:
    """Our own ranges inside a record that say something of a call, outermost ones, in order of start."""
    for child in node.children:
        if child.event.name.startswith("ta:") and child.event.meta is not None:
            yield child
        else:
            yield from _ours(child)


def _calls_of(node: Node) -> list[Call]:
    event = node.event
    name = event.name
    if name.startswith("ta:"):
        inner = [c for child in node.children for c in calls_of(child)]
        if not inner and traffic.normalise_op(name) is not None:
            inner = [_call(event, event.meta or Metadata(), [event], name)]
        for call in inner:
            fill(call, event.meta, sizes=len(inner) == 1)
        if len(inner) == 1:
            inner[0].start_ns, inner[0].end_ns = event.start_ns, event.end_ns
        return inner
    if name == "record_param_comms":
        return _of_record(node)
    records = list(_records(node))
    stated = [n for n in records if n.event.meta is not None]
    moving = [n for n in stated if (n.event.meta or Metadata()).name not in traffic.NOT_TRAFFIC]
    own_op = traffic.normalise_op(name)
    annotation = next((n.event for n in _walk_down(node) if n.event.name.startswith(("nccl:", "xccl:"))), None)
    if own_op == "barrier" and (moving or records or name.startswith("c10d::")):
        # NCCL records a barrier and then the all-reduce that carries it: one call
        first = moving[0].event if moving else (records[0].event if records else event)
        call = _call(first, first.meta or Metadata(), [event, first], name)
        call.op, call.start_ns, call.end_ns = "barrier", event.start_ns, event.end_ns
        call.external_ids = _ids([event, *(r.event for r in records)])
        return [call]
    if moving:
        made = [_call(n.event, n.event.meta or Metadata(), [n.event, *_events(n), event], None) for n in moving]
        if len(made) == 1 and own_op is not None:
            made[0].start_ns, made[0].end_ns = event.start_ns, event.end_ns
        return made
    if stated and not name.startswith("c10d::"):
        return []
    if own_op is None and not name.startswith("c10d::"):
        return [c for child in node.children for c in calls_of(child)]
    inner = [c for child in node.children if child.event.name.startswith("c10d::") for c in calls_of(child)]
    if inner:
        return inner
    bare = next((n.event for n in records if n.event.meta is None), None)
    sources = [e for e in (event, annotation, bare) if e is not None]
    call = _call(event, _positional(bare), sources, name)
    if name.startswith("gloo:"):  # nothing else was recorded of the call: the range is its work, on gloo's thread
        call.own_work, call.issue_seen = True, False
    return [call]


def _of_record(node: Node) -> list[Call]:
    event = node.event
    if event.meta is not None:
        if event.meta.name in traffic.NOT_TRAFFIC:
            return []
        return [_call(event, event.meta, [event, *_events(node)], None)]
    annotation = next((n.event for n in _walk_down(node) if n.event.name.startswith(("nccl:", "xccl:"))), None)
    if annotation is None:
        return []  # without an annotation and a dispatcher operator: a wait, or an init
    return [_call(event, _positional(event), [annotation, event], annotation.name)]


def _walk_down(node: Node) -> Iterable[Node]:
    for child in node.children:
        yield child
        yield from _walk_down(child)


def _records(node: Node) -> Iterable[Node]:
    """The record_param_comms inside a record, without those that carry out another (an all_gather of unequal tensors is
    recorded, and inside it the broadcasts that it is made of)."""
    for child in node.children:
        if child.event.name == "record_param_comms":
            yield child
            if child.event.meta is not None and child.event.meta.name not in traffic.NOT_TRAFFIC:
                continue
        yield from _records(child)


def _events(node: Node) -> list[HostEvent]:
    return [n.event for n in _walk_down(node)]


def _call(event: HostEvent, meta: Metadata, sources: list[HostEvent], raw: str | None) -> Call:
    """A call from its metadata, completed by what the other records of the same call say."""
    op_raw = raw or meta.name or event.name
    call = Call(
        op=traffic.normalise_op(op_raw),
        op_raw=op_raw,
        pid=event.pid,
        tid=event.tid,
        start_ns=event.start_ns,
        end_ns=event.end_ns,
        meta=meta,
        in_elems=meta.in_elems,
        out_elems=meta.out_elems,
        group_id=meta.group_name,
        external_ids=_ids(e for e in sources if not e.name.startswith("nccl:")),
    )
    for source in sources:
        if source.dims is not None and call.dims is None:
            call.dims = source.dims
        if source.name.startswith("c10d::"):
            _from_operator(call, source)
        elif source.name.startswith(("nccl:", "xccl:", "gloo:")):
            _from_annotation(call, source)
    return call


_SIZES = (("in_elems", "in_elems"), ("out_elems", "out_elems"))
_OF_ONE_CALL = frozenset({"in_elems", "out_elems", "in_splits", "out_splits", "seq", "comms_id", "dtype", "call"})


def _ids(events: Iterable[HostEvent]) -> tuple[int, ...]:
    return tuple(e.external_id for e in events if e.external_id is not None)


def fill(call: Call, meta: Metadata | None, *, sizes: bool = True) -> bool:
    """Completes a call with what another record states; what is known already stays. Says whether anything was added.

    ``sizes`` False: the record is of several calls, so its sizes and numbers are not this call's.
    """
    if meta is None:
        return False
    added = False
    for name in Metadata.__struct_fields__:
        if getattr(call.meta, name) is None and (sizes or name not in _OF_ONE_CALL):
            value = getattr(meta, name)
            if value is not None:
                setattr(call.meta, name, value)
                added = True
    for own, stated in (("group_id", "group_name"), *(_SIZES if sizes else ())):
        value = getattr(meta, stated)
        if getattr(call, own) is None and value is not None:
            setattr(call, own, value)
            added = True
    return added


# Positions of (output tensors, input tensors) among a dispatcher operator's arguments.
_OPERANDS: dict[str, tuple[int, int]] = {
    "c10d::allreduce_": (0, 0),
    "c10d::allreduce_coalesced_": (0, 0),
    "c10d::broadcast_": (0, 0),
    "c10d::reduce_": (0, 0),
    "c10d::send": (0, 0),
    "c10d::recv_": (0, 0),
    "c10d::recv_any_source_": (0, 0),
    "c10d::_allgather_base_": (0, 1),
    "c10d::allgather_": (0, 1),
    "c10d::allgather_coalesced_": (0, 1),
    "c10d::allgather_into_tensor_coalesced_": (0, 1),
    "c10d::_reduce_scatter_base_": (0, 1),
    "c10d::reduce_scatter_": (0, 1),
    "c10d::reduce_scatter_tensor_coalesced_": (0, 1),
    "c10d::alltoall_base_": (0, 1),
    "c10d::alltoall_": (0, 1),
    "c10d::gather_": (0, 1),
    "c10d::scatter_": (0, 1),
}


def _from_operator(call: Call, source: HostEvent) -> None:
    """Sizes, element type, splits and flags from a ``c10d::`` operator's recorded arguments."""
    dims = decoded(source.dims)
    concrete = decoded(source.concrete)
    types = decoded(source.types)
    if call.op == "barrier":
        call.in_elems = call.out_elems = 0
        return
    places = _OPERANDS.get(source.name)
    if isinstance(dims, list) and places is not None and max(places) < len(dims):
        out_elems, in_elems = (_elements(dims[p]) for p in places)
        if call.in_elems is None:
            call.in_elems = in_elems
        if call.out_elems is None:
            call.out_elems = out_elems
        call.first_dims = first_tensor(dims[places[1]])
    if isinstance(types, list) and places is not None and places[1] < len(types) and call.dtype is None:
        kind = types[places[1]]
        if isinstance(kind, str) and "List" not in kind and kind not in ("", "Scalar"):
            call.dtype = kind
    if source.name == "c10d::alltoall_":
        # One tensor for each rank: their elements are the splits. The "[]" of the backend's record says nothing here.
        call.meta.out_splits, call.meta.in_splits = _tensor_splits(dims, 0), _tensor_splits(dims, 1)
    if not isinstance(concrete, list):
        return
    if source.name == "c10d::alltoall_base_" and len(concrete) > 4:
        call.meta.out_splits = call.meta.out_splits or str(concrete[3])
        call.meta.in_splits = call.meta.in_splits or str(concrete[4])
    if call.meta.is_async is None and source.name.endswith("_"):
        flags = [c for c in concrete if c in ("True", "False")]
        if flags:
            call.meta.is_async = flags[0] == "True"


def _tensor_splits(dims: object, position: int) -> str | None:
    """Elements of each tensor of a list, as the text of a split list; None if the shapes were not recorded."""
    shapes = dims[position] if isinstance(dims, list) and position < len(dims) else None
    if not isinstance(shapes, list) or not shapes or not all(isinstance(shape, list) for shape in shapes):
        return None
    return str([_product(shape) for shape in shapes])


def _from_annotation(call: Call, source: HostEvent) -> None:
    """Sizes and element type from an ``nccl:`` or ``gloo:`` annotation, whose dimensions are those of the inputs."""
    dims = decoded(source.dims)
    types = decoded(source.types)
    if isinstance(types, list) and types and isinstance(types[0], str) and call.dtype is None and types[0]:
        call.dtype = types[0]
    if isinstance(dims, list) and dims and call.in_elems is None:
        call.in_elems = _elements(dims)
        if call.out_elems is None and call.op in ("all_reduce", "broadcast", "reduce", "send", "recv"):
            call.out_elems = call.in_elems


def _positional(event: HostEvent | None) -> Metadata:
    """Metadata from the positional arguments that torch up to 2.2 recorded (with shapes on).

    Data operations: "", seq, address of the group, rank, "", in splits, out splits, group size.
    """
    concrete = decoded(event.concrete) if event is not None else None
    if not isinstance(concrete, list) or len(concrete) != 8:
        return Metadata()
    address = str(concrete[2])
    return Metadata(
        seq=whole_number(concrete[1]),
        group_name=f"ptr:{address}" if address.isdigit() else None,
        group_size=whole_number(concrete[7]),
        in_splits=str(concrete[5]),
        out_splits=str(concrete[6]),
    )


# small helpers -----------------------------------------------------------------------------------------------------------


def decoded(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None


def _product(shape: list[int]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


def _elements(dims: object) -> int | None:
    """Elements of a tensor's shape, or of a list of shapes (summed). A scalar's shape is [] and counts 1 inside a list;

    alone, [] is what an argument that is no tensor looks like: unknown.
    """
    if not isinstance(dims, list) or not dims:
        return None
    if all(isinstance(d, int) for d in dims):
        return _product(dims)
    total = 0
    for shape in dims:
        if not isinstance(shape, list):
            return None
        if shape and not all(isinstance(d, int) for d in shape):
            inner = _elements(shape)
            if inner is None:
                return None
            total += inner
        else:
            total += _product(shape)
    return total


def first_tensor(dims: object) -> str | None:
    """A tensor's shape, or the first of a list of shapes, as comparable text."""
    if isinstance(dims, list) and dims and isinstance(dims[0], list):
        dims = dims[0]
    return str(dims) if isinstance(dims, list) else None


def splits(text: str | None) -> tuple[list[int], bool]:
    """(rows per rank, whether that is the truth): empty and known for "[]" (even), unknown for a shortened list."""
    if text is None:
        return [], False
    if "..." in text:
        return [], False
    return [int(n) for n in re.findall(r"\d+", text)], True


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _size(value: object) -> int | None:
    number = whole_number(value)
    return None if number is None or number < 0 else number


def _members(value: object) -> int | None:
    """The size of a group: at least one rank, else it is not known."""
    number = whole_number(value)
    return None if number is None or number < 1 else number


def unusable_values(args: Args) -> int:
    """How many sizes of a call are written but cannot be sizes (negative, fractional, a group of no rank)."""
    if args.cname is None or args.cname in traffic.NOT_TRAFFIC:
        return 0
    sizes = (args.inn, args.inn_old, args.outn, args.outn_old)
    unusable = sum(size is not None and _size(size) is None for size in sizes)
    return unusable + (args.gsize is not None and _members(args.gsize) is None)


def _flag(value: object) -> bool | None:
    if value is None or value == "":
        return None
    if isinstance(value, str):
        return value.lower() in ("true", "1")
    return bool(value)
