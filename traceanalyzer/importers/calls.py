"""Ties what a Kineto trace says about communication together: host records to calls, kernels to calls, groups to ranks.

A collective leaves up to five host records, nested on one thread: our own range ``ta:op``, the dispatcher's ``c10d::op_``,
the backend's ``record_param_comms``, an annotation ``nccl:op``; with gloo, ``gloo:op`` on a worker thread. Which of them
exist depends on torch's version and backend (reference: record_formats, sections 1.2 and 1.3). One call makes one row
whatever was recorded of it; ``wait`` and ``init`` make none.

Evidence of a kernel's tie, best first: ``external_id`` (kernel and record_param_comms share it, from May 2024),
``correlation`` (the launch lies inside the call on its thread), ``coalesced`` (calls that a group launches together when
it ends, after their own ranges are closed: inferred, one kernel for several calls), ``order`` (gloo's worker ranges in order
of issue: inferred).
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from traceanalyzer import traffic
from traceanalyzer.importers.json_stream import Args, whole_number

Once = Callable[[str], str]
"""Gives the one copy of equal texts."""


class Metadata(Struct, gc=False):
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

    @classmethod
    def of(cls, args: Args, once: Once = str) -> Metadata | None:
        """The metadata of an event, None if it carries no collective name. ``once`` gives the one copy of equal texts."""
        if args.cname is None:
            return None
        group = args.pgname if args.pgname is not None else args.pgid
        return cls(
            name=once(args.cname),
            dtype=_once(args.dtype, once),
            in_elems=_size(args.inn if args.inn is not None else args.inn_old),
            out_elems=_size(args.outn if args.outn is not None else args.outn_old),
            group_size=whole_number(args.gsize),
            group_name=_once(group, once),
            group_desc=_once(args.pgdesc, once),
            group_ranks=_once(args.pgranks, once),
            rank_start=whole_number(args.gstart),
            rank_stride=whole_number(args.gstride),
            in_splits=_once(args.insplit, once),
            out_splits=_once(args.outsplit, once),
            seq=whole_number(args.cseq),
            comms_id=whole_number(args.comms),
            rank_field=_size(args.grank),
            peer=whole_number(args.dst if args.dst is not None else args.src),
            is_async=_flag(args.is_async),
        )

    @classmethod
    def of_ours(cls, args: Args, once: Once = str) -> Metadata | None:
        """The metadata of a ``ta:`` range (traceanalyzer.collectors.naming), None if it names no group."""
        if args.ta_pg is None:
            return None
        return cls(
            dtype=_once(args.dtype, once),
            in_elems=_size(args.ta_in),
            out_elems=_size(args.ta_out),
            group_size=whole_number(args.ta_size),
            group_name=_once(args.ta_pg, once),
            group_desc=_once(args.ta_desc, once),
            group_ranks=_once(args.ta_ranks, once),
            seq=whole_number(args.ta_seq),
            in_splits=_once(args.ta_in_splits, once),
            out_splits=_once(args.ta_out_splits, once),
            group_rank=_size(args.ta_rank),
            peer=whole_number(args.ta_peer),
            root=whole_number(args.ta_root),
            reduce_op=None if args.ta_reduce in (None, "") else once(str(args.ta_reduce).lower()),
            is_async=_flag(args.ta_async),
            block=_size(args.ta_coalesce),
        )


class HostEvent(Struct, gc=False):
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
    def of(
        cls, name: str, args: Args, pid: int | None, tid: int | None, start_ns: int, dur_ns: int, once: Once = str
    ) -> HostEvent:
        """The record of an event; ``once`` gives the one copy of equal texts."""
        meta = Metadata.of_ours(args, once) if name.startswith("ta:") else Metadata.of(args, once)
        dims = bytes(args.dims) or bytes(args.dims_old)
        return cls(
            name,
            pid,
            tid,
            start_ns,
            start_ns + dur_ns,
            whole_number(args.ext if args.ext is not None else args.ext_old),
            meta,
            *(once(bytes(raw).decode("utf-8", "replace")) or None for raw in (dims, args.types, args.concrete)),
        )


class Joint:
    """What is launched as one: calls and kernels that hold the same one share a coalesce_id."""

    __slots__ = ()


class CommKernel(Struct, gc=False):
    """One communication kernel. Times in ns relative to the file's base."""

    name: str
    start_ns: int
    dur_ns: int
    device: int | None
    stream: int | None
    correlation: int | None
    external_id: int | None
    graph_id: int | None
    op: str | None
    meta: Metadata | None
    coalesce_id: int | None = None
    evidence: str | None = None
    completeness: str = "full"
    launch_ns: int | None = None
    joint: Joint | None = None


class Launch(NamedTuple):
    """The runtime call that launched a kernel."""

    pid: int | None
    tid: int | None
    start_ns: int


class Range(NamedTuple):
    """A host range that encloses calls."""

    pid: int | None
    tid: int | None
    start_ns: int
    end_ns: int
    name: str


class Call(Struct, gc=False):
    """One call in the making."""

    op: str | None
    op_raw: str
    pid: int | None
    tid: int | None
    start_ns: int
    end_ns: int
    meta: Metadata
    joint: Joint
    in_elems: int | None = None
    out_elems: int | None = None
    dtype: str | None = None
    dims: str | None = None
    group_id: str | None = None
    path: tuple[str, ...] = ()
    external_ids: tuple[int, ...] = ()
    work_start_ns: int | None = None
    work_end_ns: int | None = None
    stream: int | None = None
    evidence: str | None = None
    time_source: str | None = None
    completeness: str = "no_kernel"
    coalesce_id: int | None = None
    first_dims: str | None = None
    """Shape of the first input tensor: what gloo's own range of the call shows."""
    issue_seen: bool = True
    """Whether start_ns and end_ns are those of the issuing call on the host."""


_POINT_TO_POINT = frozenset({"send", "recv"})
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
_PLACELESS = re.compile(
    r"^(?:aten::|c10d::|_c10d_functional::|nccl:|gloo:|xccl:|ucc:|ta:(?!step|microbatch|forward|backward|layer|phase)|"
    r"record_param_comms|cuda[A-Z]|cu[A-Z]|hip[A-Z]|detach|PyTorch Profiler)"
)
_PYTHON_FUNCTION = re.compile(r"^(?!nn\.Module: ).*\(\d+\): ")


def names_a_place(name: str) -> bool:
    """Whether an enclosing range of this name says where a call was made (autograd functions, modules, marks, steps)."""
    return not _PLACELESS.match(name) and not _PYTHON_FUNCTION.match(name)


@dataclass
class Tied:
    """The outcome: calls in order of issue, kernels with their ties, what went wrong."""

    calls: list[Call]
    kernels: list[CommKernel]
    issues: list[dict[str, Any]] = field(default_factory=list)

    def call_rows(self, base_ns: int, rank: int | None, groups: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The calls as rows of kind comm_record, times absolute, ordered by start (or issue, where no work is known)."""
        members = {g["group_id"]: g.get("ranks") for g in groups}
        sizes = {g["group_id"]: g.get("group_size") for g in groups}
        own = {
            group: ranks.index(rank) if ranks is not None and rank in ranks else None
            for group, ranks in members.items()
        }
        order = sorted(range(len(self.calls)), key=lambda n: (_first_ns(self.calls[n]), n))
        for number in order:
            call = self.calls[number]
            meta = call.meta
            ranks = members.get(call.group_id)
            in_splits, in_known = _splits(meta.in_splits)
            out_splits, out_known = _splits(meta.out_splits)
            position = meta.rank_field
            member = ranks[position] if ranks is not None and position is not None and position < len(ranks) else None
            group_rank = own.get(call.group_id) if own.get(call.group_id) is not None else meta.group_rank
            if group_rank is None and call.op not in _POINT_TO_POINT and call.op not in _ROOTED:
                group_rank = position
            peer = root = None
            if call.op in _POINT_TO_POINT:
                peer = meta.peer if meta.peer is not None else member
            elif call.op in _ROOTED:
                root = meta.root if meta.root is not None else member
            start_ns = dur_ns = None
            if call.work_start_ns is not None and call.work_end_ns is not None:
                start_ns, dur_ns = call.work_start_ns + base_ns, call.work_end_ns - call.work_start_ns
            yield {
                "call_id": number,
                "coalesce_id": call.coalesce_id,
                "op": call.op,
                "op_raw": call.op_raw,
                "group_id": call.group_id,
                "group_size": meta.group_size if meta.group_size is not None else sizes.get(call.group_id),
                "group_rank": group_rank,
                "seq": meta.seq,
                "comms_id": meta.comms_id,
                "is_p2p": call.op in _POINT_TO_POINT,
                "peer": peer,
                "root": root,
                "reduce_op": meta.reduce_op,
                "dtype": traffic.normalise_dtype(meta.dtype or call.dtype),
                "in_elems": call.in_elems,
                "out_elems": call.out_elems,
                "in_splits": in_splits or None,
                "out_splits": out_splits or None,
                "splits_known": (in_known and out_known) if call.op == "all_to_all" else None,
                "in_dims": call.dims,
                "is_async": meta.is_async,
                "pid": call.pid,
                "tid": call.tid,
                "stream": call.stream,
                "external_id": call.external_ids[0] if call.external_ids else None,
                "t_issue_ns": call.start_ns + base_ns if call.issue_seen else None,
                "t_issue_end_ns": call.end_ns + base_ns if call.issue_seen else None,
                "start_ns": start_ns,
                "dur_ns": dur_ns,
                "time_source": call.time_source,
                "join_evidence": call.evidence,
                "completeness": call.completeness,
                "call_path": call.path or None,
            }


def _first_ns(call: Call) -> int:
    return call.work_start_ns if call.work_start_ns is not None else call.start_ns


def kernel_row(kernel: CommKernel, base_ns: int) -> dict[str, Any]:
    """A communication kernel as a row of kind kernel, times absolute."""
    return {
        "name": kernel.name,
        "category": "kernel",
        "start_ns": kernel.start_ns + base_ns,
        "dur_ns": kernel.dur_ns,
        "device": kernel.device,
        "stream": kernel.stream,
        "correlation": kernel.correlation,
        "external_id": kernel.external_id,
        "graph_id": kernel.graph_id,
        "kernel_class": "comm",
        "kernel_op": kernel.op,
        "coalesce_id": kernel.coalesce_id,
        "join_evidence": kernel.evidence,
        "completeness": kernel.completeness,
        "launch_ns": None if kernel.launch_ns is None else kernel.launch_ns + base_ns,
    }


def tie(
    host: Sequence[HostEvent],
    kernels: Sequence[CommKernel],
    *,
    launches: dict[int, Launch],
    ancestors: Sequence[Range],
    any_launch: bool,
) -> Tied:
    """Makes calls of host records, ties kernels to them, and numbers them in order of issue.

    ``launches``: correlation of a communication kernel -> its launch. ``any_launch``: whether the file holds launches at
    all, so that a kernel without one is older than the recording. ``ancestors``: ranges that enclose calls.
    """
    builder = _Calls(host, ancestors)
    tied = Tied(builder.calls, list(kernels))
    _tie_kernels(builder, tied, launches, any_launch)
    tied.calls.sort(key=lambda c: (c.start_ns, c.end_ns))
    _tie_backend_ranges(tied, builder.backend_ranges)
    _number_coalesced(tied)
    return tied


# host records to calls -----------------------------------------------------------------------------------------------


class _Node:
    __slots__ = ("children", "event")

    def __init__(self, event: HostEvent) -> None:
        self.event = event
        self.children: list[_Node] = []


_Thread = tuple[int | None, int | None]


class _Calls:
    """Nests the host records of each thread and turns every outermost one into its calls."""

    def __init__(self, host: Sequence[HostEvent], ancestors: Sequence[Range]) -> None:
        self.calls: list[Call] = []
        self.backend_ranges: list[HostEvent] = []
        self.by_external: dict[int, Call] = {}
        self.scopes: dict[_Thread, list[tuple[int, int, list[Call]]]] = defaultdict(list)
        self.marks: dict[_Thread, list[HostEvent]] = {}
        threads: dict[_Thread, list[HostEvent]] = defaultdict(list)
        dispatched = any(e.name.startswith(("c10d::", "ta:")) for e in host)
        for event in host:
            if event.name.startswith("gloo:") and dispatched:
                self.backend_ranges.append(event)
            else:
                threads[event.pid, event.tid].append(event)
        around: dict[_Thread, list[Range]] = defaultdict(list)
        for scope in ancestors:
            around[scope.pid, scope.tid].append(scope)
        for thread, events in threads.items():
            nodes, marks = _nest(events)
            for node in nodes:
                self._make(node, thread)
            self._keep_marks(marks, thread)
        self._join_blocks()
        paths: dict[tuple[str, ...], tuple[str, ...]] = {}
        for thread, ranges in around.items():
            self._paths(thread, ranges, paths)

    def _keep_marks(self, marks: list[HostEvent], thread: _Thread) -> None:
        """Keeps the ends of coalesced groups; an annotation that names an operation and holds no call is a call itself."""
        starts = sorted(c.start_ns for c in self.calls if (c.pid, c.tid) == thread)
        for mark in marks:
            holds_calls = bisect_left(starts, mark.start_ns) < bisect_left(starts, mark.end_ns)
            if holds_calls or traffic.normalise_op(mark.name) is None:
                self.marks.setdefault(thread, []).append(mark)
            else:
                self._make(_Node(mark), thread)

    def _join_blocks(self) -> None:
        """Calls of one block that our hook counted share a launch."""
        joints: dict[tuple[str | None, int], Joint] = {}
        for call in self.calls:
            if call.meta.block is not None:
                call.joint = joints.setdefault((call.group_id, call.meta.block), call.joint)

    def _paths(self, thread: _Thread, ranges: list[Range], paths: dict[tuple[str, ...], tuple[str, ...]]) -> None:
        """Sets the path of every call of a thread; equal paths are kept once, in ``paths``."""
        ranges.sort(key=lambda r: (r.start_ns, -r.end_ns))
        mine = sorted((c for c in self.calls if (c.pid, c.tid) == thread), key=lambda c: c.start_ns)
        stack: list[Range] = []
        at = 0
        for call in mine:
            while at < len(ranges) and ranges[at].start_ns <= call.start_ns:
                while stack and stack[-1].end_ns <= ranges[at].start_ns:
                    stack.pop()
                stack.append(ranges[at])
                at += 1
            path = tuple(r.name for r in reversed(stack) if r.end_ns > call.start_ns)
            call.path = paths.setdefault(path, path)

    def _make(self, node: _Node, thread: _Thread) -> None:
        """Calls of one outermost record; adds them and the ranges in which their kernels are launched."""
        made = self._of(node)
        if not made:
            return
        for call in made:
            call.joint = made[0].joint
            self.calls.append(call)
            for external in call.external_ids:
                self.by_external.setdefault(external, call)
        self.scopes[thread].append((node.event.start_ns, node.event.end_ns, made))
        if len(made) > 1:  # a launch inside one member's own range belongs to that member alone
            for call in made:
                self.scopes[thread].append((call.start_ns, call.end_ns, [call]))

    def _of(self, node: _Node) -> list[Call]:
        event = node.event
        name = event.name
        if name.startswith("ta:"):
            inner = [c for child in node.children for c in self._of(child)]
            if not inner and traffic.normalise_op(name) is not None:
                inner = [_call(event, event.meta or Metadata(), [event], name)]
            for call in inner:
                _fill(call, event.meta, sizes=len(inner) == 1)
            if len(inner) == 1:
                inner[0].start_ns, inner[0].end_ns = event.start_ns, event.end_ns
            return inner
        if name == "record_param_comms":
            return self._of_record(node)
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
            return [c for child in node.children for c in self._of(child)]
        inner = [c for child in node.children if child.event.name.startswith("c10d::") for c in self._of(child)]
        if inner:
            return inner
        bare = next((n.event for n in records if n.event.meta is None), None)
        sources = [e for e in (event, annotation, bare) if e is not None]
        call = _call(event, _positional(bare), sources, name)
        if name.startswith("gloo:"):  # nothing else was recorded of the call: the range is its work, on gloo's thread
            call.work_start_ns, call.work_end_ns, call.time_source = event.start_ns, event.end_ns, "backend_range"
            call.completeness, call.issue_seen = "full", False
        return [call]

    def _of_record(self, node: _Node) -> list[Call]:
        event = node.event
        if event.meta is not None:
            if event.meta.name in traffic.NOT_TRAFFIC:
                return []
            return [_call(event, event.meta, [event, *_events(node)], None)]
        annotation = next((n.event for n in _walk_down(node) if n.event.name.startswith(("nccl:", "xccl:"))), None)
        if annotation is None:
            return []  # without an annotation and a dispatcher operator: a wait, or an init
        return [_call(event, _positional(event), [annotation, event], annotation.name)]


_NESTING = ("ta:", "_c10d_functional::", "c10d::", "record_param_comms")


def _depth(name: str) -> int:
    """Which of two records with the same times encloses the other: old traces have whole microseconds only."""
    return next((i for i, prefix in enumerate(_NESTING) if name.startswith(prefix)), len(_NESTING))


def _ends_group(name: str) -> bool:
    """Whether a range of this name, not inside a call, stands for the end of a group of coalesced calls."""
    return name == "ta:end_coalescing" or (name.startswith(("nccl:", "xccl:")) and name.endswith("coalesced"))


def _nest(events: list[HostEvent]) -> tuple[list[_Node], list[HostEvent]]:
    """Outermost records of one thread with what lies inside them, and the ends of coalesced groups.

    Such an end holds no record together: before torch 2.9 it was closed only when its work was dropped, much later.
    """
    roots: list[_Node] = []
    marks: list[HostEvent] = []
    stack: list[_Node] = []
    for event in sorted(events, key=lambda e: (e.start_ns, -e.end_ns, _depth(e.name))):
        while stack and (stack[-1].event.end_ns <= event.start_ns or stack[-1].event.end_ns < event.end_ns):
            stack.pop()
        if not stack and _ends_group(event.name):
            marks.append(event)
            continue
        node = _Node(event)
        (stack[-1].children if stack else roots).append(node)
        stack.append(node)
    return roots, marks


def _walk_down(node: _Node) -> Iterable[_Node]:
    for child in node.children:
        yield child
        yield from _walk_down(child)


def _records(node: _Node) -> Iterable[_Node]:
    """The record_param_comms inside a record, without those that carry out another (an all_gather of unequal tensors is
    recorded, and inside it the broadcasts that it is made of)."""
    for child in node.children:
        if child.event.name == "record_param_comms":
            yield child
            if child.event.meta is not None and child.event.meta.name not in traffic.NOT_TRAFFIC:
                continue
        yield from _records(child)


def _events(node: _Node) -> list[HostEvent]:
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
        joint=Joint(),
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


_OF_ONE_CALL = frozenset({"in_elems", "out_elems", "in_splits", "out_splits", "seq", "comms_id", "dtype"})


def _ids(events: Iterable[HostEvent]) -> tuple[int, ...]:
    return tuple(e.external_id for e in events if e.external_id is not None)


def _fill(call: Call, meta: Metadata | None, *, sizes: bool = True) -> None:
    """Completes a call with what another record states; what is known already stays.

    ``sizes`` False: the record is of several calls, so its sizes and numbers are not this call's.
    """
    if meta is None:
        return
    for name in Metadata.__struct_fields__:
        if getattr(call.meta, name) is None and (sizes or name not in _OF_ONE_CALL):
            setattr(call.meta, name, getattr(meta, name))
    if call.group_id is None:
        call.group_id = meta.group_name
    if not sizes:
        return
    if call.in_elems is None:
        call.in_elems = meta.in_elems
    if call.out_elems is None:
        call.out_elems = meta.out_elems


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
    dims = _json(source.dims)
    concrete = _json(source.concrete)
    types = _json(source.types)
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
        call.first_dims = _first_tensor(dims[places[1]])
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
    dims = _json(source.dims)
    types = _json(source.types)
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
    concrete = _json(event.concrete) if event is not None else None
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


# kernels to calls ------------------------------------------------------------------------------------------------------


def _tie_kernels(builder: _Calls, tied: Tied, launches: dict[int, Launch], any_launch: bool) -> None:
    # Up to Feb 2024 a kernel's External id is its correlation id and says nothing of the host.
    bogus = all(
        k.external_id == k.correlation for k in tied.kernels if k.external_id is not None and k.meta is None
    ) and any(k.external_id is not None and k.meta is None for k in tied.kernels)
    scopes = {thread: Scopes(found) for thread, found in builder.scopes.items()}
    untied: list[tuple[CommKernel, Launch | None]] = []
    for kernel in tied.kernels:
        launch = launches.get(kernel.correlation) if kernel.correlation is not None else None
        if launch is not None:
            kernel.launch_ns = launch.start_ns
        found: list[Call] = []
        if kernel.external_id is not None and (kernel.meta is not None or not bogus):
            call = builder.by_external.get(kernel.external_id)
            if call is not None:
                found, kernel.evidence = [call], "external_id"
        if not found and launch is not None:
            scope = scopes.get((launch.pid, launch.tid))
            found = scope.at(launch.start_ns) if scope is not None else []
            if found:
                kernel.evidence = "correlation" if len(found) == 1 else "coalesced"
        if not found and kernel.meta is not None and kernel.meta.name not in traffic.NOT_TRAFFIC:
            found = [_kernel_call(kernel)]
            kernel.completeness = "kernel_only"
            tied.calls += found
            if kernel.external_id is not None:  # a second kernel of the same call is not a second call
                builder.by_external[kernel.external_id] = found[0]
        if found:
            _work(found, kernel)
        else:
            untied.append((kernel, launch))
    _tie_coalesced(builder, untied)
    _explain_untied(tied, [(k, at) for k, at in untied if k.joint is None], any_launch)


def _explain_untied(tied: Tied, untied: list[tuple[CommKernel, Launch | None]], any_launch: bool) -> None:
    before = lost = 0
    for kernel, launch in untied:
        if launch is None and any_launch:
            kernel.completeness = "launched_before_window"
            before += 1
        else:
            kernel.completeness = "kernel_only"
            lost += 1
    if before:
        tied.issues.append(
            _issue(
                "info",
                "kernels_before_window",
                "Communication kernels launched before the recording began: marked, and neither counted as calls of the "
                "first step nor as missing.",
                before,
            )
        )
    if lost:
        tied.issues.append(
            _issue(
                "warning",
                "kernels_without_call",
                "Communication kernels that no recorded call explains: their bytes are unknown.",
                lost,
            )
        )


class Scopes:
    """Finds the innermost range that holds a point in time, on one thread: the last to begin among those that hold it."""

    def __init__(self, scopes: Iterable[tuple[int, int, list[Call]]]) -> None:
        self._scopes = sorted(scopes, key=lambda s: (s[0], -s[1]))
        self._starts = [s[0] for s in self._scopes]
        # For each range the nearest earlier one that ends later: what lies between cannot hold a point this one does not.
        self._longer: list[int] = []
        for i, (_, end, _) in enumerate(self._scopes):
            before = i - 1
            while before >= 0 and self._scopes[before][1] <= end:
                before = self._longer[before]
            self._longer.append(before)

    def at(self, point: int) -> list[Call]:
        """The calls of that range, [] if there is none. Ranges are half open: their end is not in them."""
        index = bisect_right(self._starts, point) - 1
        while index >= 0 and self._scopes[index][1] <= point:
            index = self._longer[index]
        return self._scopes[index][2] if index >= 0 else []


def _tie_coalesced(builder: _Calls, untied: list[tuple[CommKernel, Launch | None]]) -> None:
    """Ties kernels that a group launched when it ended to the calls that wait for it on that thread.

    NCCL launches at the end of a group, after the records of its calls are closed; all that marks it is an annotation
    ``nccl:coalesced`` around the launch (torch before 2.4: right behind it), or our own ``ta:end_coalescing``. The calls:
    those before the launch that have no kernel, of one group and kind, back to the first that has one.
    """
    groups: dict[_Thread, _Groups] = {}
    by_thread: dict[_Thread, list[Call]] = defaultdict(list)
    for call in builder.calls:
        by_thread[call.pid, call.tid].append(call)
    launched = [(launch, kernel) for kernel, launch in untied if launch is not None and _is_nccl(kernel.name)]
    for launch, kernel in sorted(launched, key=lambda pair: pair[0].start_ns):
        thread = (launch.pid, launch.tid)
        if thread not in builder.marks:
            continue
        if thread not in groups:
            groups[thread] = _Groups(builder.marks[thread], by_thread[thread])
        found = groups[thread].waiting(launch.start_ns)
        if found:
            kernel.evidence = "coalesced"
            _work(found, kernel)


def _is_nccl(name: str) -> bool:
    return "nccl" in name or "rccl" in name


class _Groups:
    """The calls of one thread and the marks of coalesced groups, for kernels asked about in order of launch."""

    def __init__(self, marks: list[HostEvent], calls: list[Call]) -> None:
        self._marks = sorted(marks, key=lambda m: m.start_ns)
        self._mark_starts = [m.start_ns for m in self._marks]
        self._calls = sorted(calls, key=lambda c: c.start_ns)
        self._call_starts = [c.start_ns for c in self._calls]
        self._blocks: dict[tuple[str | None, int | None], list[Call]] = defaultdict(list)
        for call in self._calls:
            self._blocks[call.group_id, call.meta.block].append(call)
        self._carried: dict[int, list[Call]] = {}
        """Number of a mark -> the calls whose launch it marks."""

    def waiting(self, point: int) -> list[Call]:
        """The calls that a launch at ``point`` carries out, [] if no group ends there."""
        issued = bisect_right(self._call_starts, point)
        run = self._run(issued, point)
        number = self._mark(point, issued, run)
        if number is None:
            return []
        mark = self._marks[number]
        found = [c for c in run if c.start_ns >= mark.start_ns] or run
        if mark.meta is not None and mark.meta.block is not None:
            found = self._blocks.get((mark.meta.group_name, mark.meta.block), found)
        if not found:  # another kernel of the group that this mark launched before
            return self._carried.get(number, [])
        self._carried[number] = found
        return found

    def _mark(self, point: int, issued: int, run: list[Call]) -> int | None:
        """The innermost mark around the point; if it is spent, the next one behind, if no call begins in between."""
        around = bisect_right(self._mark_starts, point) - 1
        while around >= 0 and self._marks[around].end_ns <= point:
            around -= 1
        if around >= 0 and around not in self._carried:
            return around
        behind = bisect_left(self._mark_starts, point)
        next_call = self._call_starts[issued] if issued < len(self._calls) else None
        if run and behind < len(self._marks) and (next_call is None or self._mark_starts[behind] <= next_call):
            return behind
        return around if around >= 0 else None

    def _run(self, issued: int, point: int) -> list[Call]:
        """Calls without a kernel right before the point, of one group and kind, back to the first that is not."""
        found: list[Call] = []
        for i in range(issued - 1, -1, -1):
            call = self._calls[i]
            alike = not found or (call.group_id == found[0].group_id and _pointwise(call) == _pointwise(found[0]))
            if call.completeness != "no_kernel" or call.end_ns > point or call.meta.group_size == 1 or not alike:
                break
            found.append(call)
        return found[::-1]


def _pointwise(call: Call) -> bool:
    return call.op in _POINT_TO_POINT


def _kernel_call(kernel: CommKernel) -> Call:
    """A call known from its kernel alone: the host side was not recorded."""
    meta = kernel.meta or Metadata()
    return Call(
        op=traffic.normalise_op(meta.name),
        op_raw=meta.name or "",
        pid=None,
        tid=None,
        start_ns=kernel.start_ns,
        end_ns=kernel.start_ns + kernel.dur_ns,
        meta=meta,
        joint=Joint(),
        in_elems=meta.in_elems,
        out_elems=meta.out_elems,
        group_id=meta.group_name,
        completeness="kernel_only",
        issue_seen=False,
    )


def _work(found: list[Call], kernel: CommKernel) -> None:
    """Notes that a kernel did the work of these calls."""
    end = kernel.start_ns + kernel.dur_ns
    kernel.joint = found[0].joint
    for call in found:
        call.joint = kernel.joint
        call.work_start_ns = kernel.start_ns if call.work_start_ns is None else min(call.work_start_ns, kernel.start_ns)
        call.work_end_ns = end if call.work_end_ns is None else max(call.work_end_ns, end)
        call.stream, call.time_source, call.evidence = kernel.stream, "kernel", kernel.evidence
        if call.completeness == "no_kernel":
            call.completeness = "full"
        if kernel.meta is not None and len(found) == 1:
            _fill(call, kernel.meta)


_GLOO_NAMES = {
    "all_reduce": "all_reduce",
    "reduce_scatter": "all_reduce",  # gloo does a reduce-scatter as an all-reduce
    "all_gather": "all_gather",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "barrier": "barrier",
}


def _tie_backend_ranges(tied: Tied, ranges: Sequence[HostEvent]) -> None:
    """Ties gloo's worker ranges to calls: equal operation and dimensions, in order of issue, only where counts agree."""
    if not ranges:
        return
    offered: dict[tuple[str | None, str | None], list[HostEvent]] = defaultdict(list)
    for event in sorted(ranges, key=lambda e: e.start_ns):
        dims = _json(event.dims)
        offered[traffic.normalise_op(event.name), _first_tensor(dims[0]) if dims else None].append(event)
    wanted: dict[tuple[str | None, str | None], list[Call]] = defaultdict(list)
    for call in tied.calls:
        wanted[_GLOO_NAMES.get(call.op or ""), call.first_dims].append(call)
    for key, calls_of_key in wanted.items():
        events = offered.get(key, [])
        types = {_first_type(e) for e in events}
        if len(types) == 1:  # an operator that takes a list of tensors does not record their type, its work does
            for call in calls_of_key:
                call.dtype = call.dtype or next(iter(types))
        if len(events) != len(calls_of_key):
            continue
        for call, event in zip(calls_of_key, events, strict=True):
            call.dtype = call.dtype or _first_type(event)
            if event.start_ns >= call.start_ns:
                call.work_start_ns, call.work_end_ns = event.start_ns, event.end_ns
                call.time_source, call.evidence, call.completeness = "backend_range", "order", "full"


def _first_type(event: HostEvent) -> str | None:
    types = _json(event.types)
    return types[0] if isinstance(types, list) and types and isinstance(types[0], str) and types[0] else None


def _number_coalesced(tied: Tied) -> None:
    """Small numbers for what is launched as one: in order of issue, from 0."""
    numbers: dict[int, int] = {}
    for call in tied.calls:
        call.coalesce_id = numbers.setdefault(id(call.joint), len(numbers))
    for kernel in tied.kernels:
        if kernel.joint is not None:
            kernel.coalesce_id = numbers[id(kernel.joint)]


# groups ----------------------------------------------------------------------------------------------------------------


def groups(
    info: dict[str, Any],
    tied: Tied,
    *,
    rank: int | None,
    world_size: int | None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of kind process_group, and issues. The header's list is complete; lists on calls may be shortened."""
    found: dict[str, dict[str, Any]] = {}
    config = info.get("pg_config")
    for entry in config if isinstance(config, list) else ():
        if not isinstance(entry, dict) or entry.get("pg_name") is None:
            continue
        name = str(entry["pg_name"])
        listed, shortened = _rank_list(entry.get("ranks"))
        size = whole_number(entry.get("pg_size", entry.get("group_size")))
        complete = listed is not None and not shortened and (size is None or size == len(listed))
        found[name] = {
            "group_id": name,
            "name": name,
            "description": entry.get("pg_desc"),
            "backend": entry.get("backend_config") or info.get("backend"),
            "group_size": size if size is not None else (len(listed) if listed is not None and complete else None),
            "ranks": listed if complete else None,
            "ranks_source": "header" if complete else None,
        }
        if not complete and listed is not None:
            _settle(found[name], listed, shortened, None, None)
    unsettled: dict[str, str] = {}
    for call in tied.calls:
        if call.group_id is None:
            continue
        row = found.setdefault(
            call.group_id,
            {
                "group_id": call.group_id,
                "name": None if call.group_id.startswith("ptr:") else call.group_id,
                "description": None,
                "backend": info.get("backend"),
                "group_size": None,
                "ranks": None,
                "ranks_source": None,
            },
        )
        if row["description"] is None and call.meta.group_desc:
            row["description"] = call.meta.group_desc
        if row["group_size"] is None:
            row["group_size"] = call.meta.group_size
        if row["ranks"] is None:
            listed, shortened = _rank_list(call.meta.group_ranks)
            if not _settle(row, listed, shortened, call.meta.rank_start, call.meta.rank_stride) and listed:
                unsettled[call.group_id] = str(call.meta.group_ranks)
    for row in found.values():
        if row["ranks"] is None and row["group_size"] is not None:
            if world_size is not None and row["group_size"] == world_size:
                row["ranks"], row["ranks_source"] = list(range(world_size)), "inferred"
            elif row["group_size"] == 1 and rank is not None:
                row["ranks"], row["ranks_source"] = [rank], "inferred"
        if row["ranks"] is not None:
            unsettled.pop(row["group_id"], None)
    issues = [
        _issue(
            "warning",
            "group_ranks_unknown",
            f"The ranks of group {name} are written shortened and cannot be filled in: they stay unknown, its calls are "
            "counted.",
            1,
            text[:120],
        )
        for name, text in unsettled.items()
    ]
    return list(found.values()), issues


def _settle(
    row: dict[str, Any], listed: list[int] | None, shortened: bool, start: int | None, stride: int | None
) -> bool:
    """Sets the ranks of a group from a list that may be shortened; True if they are known now."""
    size = row["group_size"]
    if listed and size == len(listed):
        row["ranks"], row["ranks_source"] = listed, "call"
        return True
    if size == 1 and start is not None and start >= 0:
        row["ranks"], row["ranks_source"] = [start], "inferred"
        return True
    if start is not None and stride is not None and stride > 0 and size:
        row["ranks"], row["ranks_source"] = [start + i * stride for i in range(size)], "inferred"
        return True
    if not listed or not shortened or size is None or size < len(listed) or len(listed) < 2:
        return False
    gap = size - len(listed)
    last_shown, last = listed[-2], listed[-1]
    steps = {b - a for a, b in itertools.pairwise(listed[:-1])}
    step = steps.pop() if len(steps) == 1 else 1
    if last - last_shown == step * (gap + 1):
        filled = [last_shown + step * (i + 1) for i in range(gap)]
        row["ranks"], row["ranks_source"] = [*listed[:-1], *filled, last], "inferred"
        return True
    return False


def _rank_list(value: object) -> tuple[list[int] | None, bool]:
    """(ranks shown, whether the list is shortened) from a list or its text; (None, False) if there is none."""
    if isinstance(value, list):
        ranks = [whole_number(v) for v in value]
        return ([r for r in ranks if r is not None], False) if all(r is not None for r in ranks) else (None, False)
    if not isinstance(value, str):
        return None, False
    shown = [int(n) for n in re.findall(r"-?\d+", value)]
    return (shown or None), "..." in value


# small helpers -----------------------------------------------------------------------------------------------------------


def _issue(severity: str, code: str, sentence: str, n: int, location: str | None = None) -> dict[str, Any]:
    return {"severity": severity, "code": code, "sentence": sentence, "occurrences": n, "location": location}


def _json(text: str | None) -> Any:
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


def _first_tensor(dims: object) -> str | None:
    """A tensor's shape, or the first of a list of shapes, as comparable text."""
    if isinstance(dims, list) and dims and isinstance(dims[0], list):
        dims = dims[0]
    return str(dims) if isinstance(dims, list) else None


def _splits(text: str | None) -> tuple[list[int], bool]:
    """(rows per rank, whether that is the truth): empty and known for "[]" (even), unknown for a shortened list."""
    if text is None:
        return [], False
    if "..." in text:
        return [], False
    return [int(n) for n in re.findall(r"\d+", text)], True


def _once(value: object, once: Once) -> str | None:
    return None if value is None else once(str(value))


def _size(value: object) -> int | None:
    number = whole_number(value)
    return None if number is None or number < 0 else number


def _flag(value: object) -> bool | None:
    if value is None or value == "":
        return None
    if isinstance(value, str):
        return value.lower() in ("true", "1")
    return bool(value)
