"""Ties the communication kernels of a Kineto trace to the calls that issued them, and numbers the calls.

Evidence of a kernel's tie, best first: ``external_id`` (kernel and record_param_comms share it, from May 2024),
``correlation`` (the launch lies inside the call on its thread), ``coalesced`` (calls that a group launches together when
it ends, after their own ranges are closed: inferred, one kernel for several calls), ``order`` (gloo's worker ranges in order
of issue: inferred).

A long trace holds calls by the hundred thousand, so what was said of each stays on disk (spool.Records); in memory stand
integer columns: what ties and order need, about 100 bytes a call and 30 bytes a kernel.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from traceanalyzer import traffic
from traceanalyzer.importers.calls import (
    POINT_TO_POINT,
    ROOTED,
    Call,
    HostEvent,
    Metadata,
    Node,
    calls_of,
    decoded,
    fill,
    first_tensor,
    nested,
    splits,
)
from traceanalyzer.importers.spool import Column, Intern, Records, issue

NONE = -(2**63)
"""Stands for null in an integer column."""

EVIDENCE = (None, "external_id", "correlation", "coalesced", "order")
COMPLETENESS = ("no_kernel", "full", "kernel_only", "launched_before_window")
TIME_SOURCES = (None, "kernel", "backend_range")
_EXTERNAL_ID, _CORRELATION, _COALESCED, _ORDER = range(1, 5)
_NO_KERNEL, _FULL, _KERNEL_ONLY, _BEFORE_WINDOW = range(4)
_KERNEL, _BACKEND_RANGE = 1, 2

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


class Launch(NamedTuple):
    """The runtime call that launched a kernel."""

    thread: int
    start_ns: int


class Kernel(NamedTuple):
    """A communication kernel. Times in ns relative to the file's base, NONE for a stream that is not known."""

    number: int
    start_ns: int
    dur_ns: int
    stream: int
    external_id: int | None
    correlation: int | None
    meta: int | None
    """Number of its collective metadata; None: it has none."""
    nccl: bool


class Calls:
    """The calls of one file, by number of creation; ``settle`` gives their order of issue.

    ``wanted``: External ids of communication kernels, ordered; others need not be kept. ``gloo``: whether worker ranges
    of gloo are to be tied.
    """

    def __init__(self, records: Records[Call], wanted: npt.NDArray[np.uint64], *, gloo: bool) -> None:
        self.records = records
        self.start = array("q")
        self.end = array("q")
        self.thread = array("i")
        self.joint = array("i")
        """Calls that are launched as one hold the same number: that of one of them."""
        self.group = array("i")
        self.block = array("q")
        self.alone = bytearray()
        """Whether the call is known to be in a group of one rank."""
        self.pointwise = bytearray()
        self.work_start = array("q")
        self.work_end = array("q")
        self.stream = array("q")
        self.evidence = bytearray()
        self.completeness = bytearray()
        self.source = bytearray()
        self.path = array("i")
        self.groups = Intern()
        self.paths: list[tuple[str, ...]] = [()]
        self._wanted = wanted
        self._found_ids = array("Q")
        self._found_calls = array("q")
        self._gloo = gloo
        self.gloo_keys: dict[tuple[str | None, str | None], int] = {}
        self.gloo_key = array("i")
        self.gloo_dtype = array("i")
        """Element type that a worker range showed for a call that states none itself, as a code of ``dtypes``."""
        self.dtypes = Intern()

    def __len__(self) -> int:
        return len(self.start)

    def add(self, call: Call, thread: int, joint: int | None = None) -> int:
        """Adds a call and gives its number; ``joint`` None: it is launched by itself."""
        number = self.records.append(call)
        self.start.append(call.start_ns)
        self.end.append(call.end_ns)
        self.thread.append(thread)
        self.joint.append(number if joint is None else joint)
        self.block.append(-1 if call.meta.block is None else call.meta.block)
        self.pointwise.append(call.op in POINT_TO_POINT)
        self.group.append(self.groups[call.group_id])
        self.alone.append(call.meta.group_size == 1)
        self.work_start.append(call.start_ns if call.own_work else NONE)
        self.work_end.append(call.end_ns if call.own_work else NONE)
        self.stream.append(NONE)
        self.evidence.append(0)
        self.completeness.append(_FULL if call.own_work else _NO_KERNEL)
        self.source.append(_BACKEND_RANGE if call.own_work else 0)
        self.path.append(0)
        if self._gloo:
            key = _GLOO_NAMES.get(call.op or ""), call.first_dims
            self.gloo_key.append(self.gloo_keys.setdefault(key, len(self.gloo_keys)))
            self.gloo_dtype.append(self.dtypes[call.dtype] if call.dtype else -1)
        for external in call.external_ids:
            if 0 <= external < 2**64:
                self._found_ids.append(external)
                self._found_calls.append(number)
        if len(self._found_ids) > 1 << 16:
            self._keep_wanted()
        return number

    def _keep_wanted(self) -> None:
        ids, calls = np.array(self._found_ids, np.uint64), np.array(self._found_calls, np.int64)
        kept = np.isin(ids, self._wanted)
        self._found_ids, self._found_calls = array("Q", ids[kept].tobytes()), array("q", calls[kept].tobytes())

    def by_external(self) -> Callable[[int], int | None]:
        """Finds the first call that holds an External id."""
        ids, first = np.unique(np.array(self._found_ids, np.uint64), return_index=True)
        calls = np.array(self._found_calls, np.int64)[first]

        def find(external: int) -> int | None:
            at = int(np.searchsorted(ids, np.uint64(external)))
            return int(calls[at]) if at < len(ids) and ids[at] == external else None

        return find

    def of_thread(self, thread: int) -> Column:
        """The numbers of a thread's calls, by start."""
        mine = np.flatnonzero(np.array(self.thread) == thread)
        return mine[np.argsort(np.array(self.start)[mine], kind="stable")]

    def complete(self, number: int, meta: Metadata) -> None:
        """Completes what is known of a call with its kernel's metadata."""
        call = self.records[number]
        if fill(call, meta):
            self.records[number] = call
            self.group[number] = self.groups[call.group_id]
            self.alone[number] = call.meta.group_size == 1
            self.block[number] = -1 if call.meta.block is None else call.meta.block

    def settle(self) -> None:
        """Orders the calls by issue and numbers what is launched as one in that order, from 0."""
        self.issued: Column = np.lexsort((np.array(self.end), np.array(self.start)))
        joints, first, inverse = np.unique(
            np.array(self.joint, np.int64)[self.issued], return_index=True, return_inverse=True
        )
        numbers = np.empty(len(joints), np.int64)
        numbers[np.argsort(first)] = np.arange(len(joints))
        self._joints, self._numbers = joints, numbers
        self.coalesce_id: Column = np.empty(len(self), np.int64)
        self.coalesce_id[self.issued] = numbers[inverse]

    def coalesced(self, joints: Column) -> Column:
        """The coalesce_id of each joint, -1 where there is none."""
        if len(self._joints) == 0:
            return np.full(len(joints), -1, np.int64)
        at = np.minimum(np.searchsorted(self._joints, joints), len(self._joints) - 1)
        return np.where(self._joints[at] == joints, self._numbers[at], -1)

    def in_order(self) -> Iterator[Call]:
        """What was said of each call, in order of issue."""
        return (self.records[int(number)] for number in self.issued)

    def rows(self, base_ns: int, rank: int | None, groups: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The calls as rows of kind comm_record, times absolute, ordered by start (or issue, where no work is known)."""
        members = {g["group_id"]: g.get("ranks") for g in groups}
        sizes = {g["group_id"]: g.get("group_size") for g in groups}
        own = {
            group: ranks.index(rank) if ranks is not None and rank in ranks else None
            for group, ranks in members.items()
        }
        work_start = np.array(self.work_start)
        first = np.where(work_start != NONE, work_start, np.array(self.start))[self.issued]
        for call_id in np.argsort(first, kind="stable"):
            number = int(self.issued[call_id])
            call = self.records[number]
            meta = call.meta
            ranks = members.get(call.group_id)
            in_splits, in_known = splits(meta.in_splits)
            out_splits, out_known = splits(meta.out_splits)
            position = meta.rank_field
            member = ranks[position] if ranks is not None and position is not None and position < len(ranks) else None
            group_rank = own.get(call.group_id) if own.get(call.group_id) is not None else meta.group_rank
            if group_rank is None and call.op not in POINT_TO_POINT and call.op not in ROOTED:
                group_rank = position
            peer = root = None
            if call.op in POINT_TO_POINT:
                peer = meta.peer if meta.peer is not None else member
            elif call.op in ROOTED:
                root = meta.root if meta.root is not None else member
            start_ns = dur_ns = None
            if self.work_start[number] != NONE:
                start_ns = self.work_start[number] + base_ns
                dur_ns = self.work_end[number] - self.work_start[number]
            dtype = meta.dtype or call.dtype
            if not dtype and self._gloo and self.gloo_dtype[number] >= 0:
                dtype = self.dtypes.texts[self.gloo_dtype[number]]
            yield {
                "call_id": int(call_id),
                "hook_call": meta.call,
                "coalesce_id": int(self.coalesce_id[number]),
                "op": call.op,
                "op_raw": call.op_raw,
                "group_id": call.group_id,
                "group_size": meta.group_size if meta.group_size is not None else sizes.get(call.group_id),
                "group_rank": group_rank,
                "seq": meta.seq,
                "comms_id": meta.comms_id,
                "is_p2p": call.op in POINT_TO_POINT,
                "peer": peer,
                "root": root,
                "reduce_op": meta.reduce_op,
                "dtype": traffic.normalise_dtype(dtype),
                "in_elems": call.in_elems,
                "out_elems": call.out_elems,
                "in_splits": in_splits or None,
                "out_splits": out_splits or None,
                "splits_known": (in_known and out_known) if call.op == "all_to_all" else None,
                "in_dims": call.dims,
                "is_async": meta.is_async,
                "pid": call.pid,
                "tid": call.tid,
                "stream": None if self.stream[number] == NONE else self.stream[number],
                "external_id": call.external_ids[0] if call.external_ids else None,
                "t_issue_ns": call.start_ns + base_ns if call.issue_seen else None,
                "t_issue_end_ns": call.end_ns + base_ns if call.issue_seen else None,
                "start_ns": start_ns,
                "dur_ns": dur_ns,
                "time_source": TIME_SOURCES[self.source[number]],
                "join_evidence": EVIDENCE[self.evidence[number]],
                "completeness": COMPLETENESS[self.completeness[number]],
                "call_path": self.paths[self.path[number]] or None,
            }


# records of one file to calls ----------------------------------------------------------------------------------------


class _Marks:
    """The ends of a thread's coalesced groups, by start."""

    def __init__(self) -> None:
        self.start = array("q")
        self.end = array("q")
        self.group = array("i")
        self.block = array("q")

    def add(self, event: HostEvent, groups: Intern) -> None:
        block = None if event.meta is None else event.meta.block
        self.start.append(event.start_ns)
        self.end.append(event.end_ns)
        self.group.append(-1 if event.meta is None else groups[event.meta.group_name])
        self.block.append(-1 if block is None else block)


class Scopes:
    """Finds the innermost range that holds a point in time, on one thread: the last to begin among those that hold it."""

    def __init__(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        start, end = np.array(starts, np.int64), np.array(ends, np.int64)
        order = np.lexsort((-end, start))
        self._number = array("q", order.astype(np.int64).tobytes())
        self._starts = array("q", start[order].tobytes())
        self._ends = array("q", end[order].tobytes())
        # For each range the nearest earlier one that ends later: what lies between cannot hold a point this one does not.
        self._longer = array("q")
        for i, range_end in enumerate(self._ends):
            before = i - 1
            while before >= 0 and self._ends[before] <= range_end:
                before = self._longer[before]
            self._longer.append(before)

    def at(self, point: int) -> int:
        """The number of that range as given, -1 if there is none. Ranges are half open: their end is not in them."""
        index = bisect_right(self._starts, point) - 1
        while index >= 0 and self._ends[index] <= point:
            index = self._longer[index]
        return self._number[index] if index >= 0 else -1


class _Thread:
    """Where on one thread the calls and the ends of coalesced groups lie."""

    def __init__(self) -> None:
        self.marks = _Marks()
        self._starts = array("q")
        self._ends = array("q")
        self._first = array("i")
        self._count = array("i")

    def add(self, start_ns: int, end_ns: int, first: int, count: int) -> None:
        """Adds a range in which the kernels of ``count`` calls from number ``first`` on are launched."""
        self._starts.append(start_ns)
        self._ends.append(end_ns)
        self._first.append(first)
        self._count.append(count)

    def close(self) -> None:
        self._scopes = Scopes(self._starts, self._ends)
        del self._starts, self._ends

    def at(self, point: int) -> range:
        """The calls of the innermost range that holds a point."""
        number = self._scopes.at(point)
        return range(self._first[number], self._first[number] + self._count[number]) if number >= 0 else range(0)


class Builder:
    """Makes calls of host records, thread by thread; ``threads`` then says where their kernels are launched."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.threads: dict[int, _Thread] = {}
        self._blocks: dict[tuple[int, int], int] = {}

    def thread(self, number: int, events: Iterable[HostEvent]) -> None:
        """Takes all records of one thread, in the order that ``nested`` needs."""
        calls = self.calls
        here = self.threads[number] = _Thread()
        before = len(calls)
        ends: list[HostEvent] = []
        for node, ends_group in nested(events):
            if not ends_group:
                self._make(node, number)
            elif traffic.normalise_op(node.event.name) is None:
                here.marks.add(node.event, calls.groups)
            else:
                ends.append(node.event)
        starts = np.sort(np.array(calls.start[before:], np.int64))
        for event in ends:  # an annotation that names an operation and holds no call is a call itself
            if np.searchsorted(starts, event.start_ns) < np.searchsorted(starts, event.end_ns):
                here.marks.add(event, calls.groups)
            else:
                self._make(Node(event), number)
        here.close()

    def _make(self, node: Node, thread: int) -> None:
        """Adds the calls of one outermost record, and the ranges in which their kernels are launched."""
        made = calls_of(node)
        if not made:
            return
        calls = self.calls
        first = len(calls)
        for call in made:
            joint = first
            if call.meta.block is not None:  # calls of one block that our hook counted share a launch
                joint = self._blocks.setdefault((calls.groups[call.group_id], call.meta.block), first)
            calls.add(call, thread, joint)
        here = self.threads[thread]
        here.add(node.event.start_ns, node.event.end_ns, first, len(made))
        if len(made) > 1:  # a launch inside one member's own range belongs to that member alone
            for i, call in enumerate(made):
                here.add(call.start_ns, call.end_ns, first + i, 1)


def set_paths(calls: Calls, ranges: Iterable[tuple[int, int, int, str]]) -> None:
    """Sets the path of every call. ``ranges``: (thread, start, end, name), ordered by thread, start, and the longer first."""
    order = np.lexsort((np.array(calls.start), np.array(calls.thread)))
    codes: dict[tuple[str, ...], int] = {path: code for code, path in enumerate(calls.paths)}
    coming = iter(ranges)
    scope = next(coming, None)
    stack: list[tuple[int, int, int, str]] = []
    for number in order.tolist():
        here = calls.thread[number], calls.start[number]
        while scope is not None and scope[:2] <= here:
            while stack and (stack[-1][0] != scope[0] or stack[-1][2] <= scope[1]):
                stack.pop()
            stack.append(scope)
            scope = next(coming, None)
        path = tuple(name for thread, _, end, name in reversed(stack) if thread == here[0] and end > here[1])
        code = codes.get(path)
        if code is None:
            code = codes[path] = len(calls.paths)
            calls.paths.append(path)
        calls.path[number] = code


# kernels to calls ------------------------------------------------------------------------------------------------------


@dataclass
class KernelTies:
    """What was found of each communication kernel, by its number."""

    joint: array[int]
    evidence: bytearray
    completeness: bytearray
    launch_ns: array[int]


def tie_kernels(
    builder: Builder,
    kernels: Iterable[Kernel],
    metas: Records[Metadata],
    launch_of: Callable[[int], Launch | None],
    *,
    bogus_ids: bool,
    any_launch: bool,
) -> tuple[KernelTies, list[dict[str, Any]]]:
    """Ties each kernel, given in the order of the file, to its calls; adds a call for one that only its kernel tells of.

    ``bogus_ids``: the External ids of kernels without metadata say nothing of the host. ``any_launch``: whether the file
    holds launches at all, so that a kernel whose launch is missing is older than the recording. Gives issues, too.
    """
    calls = builder.calls
    ties = KernelTies(array("i"), bytearray(), bytearray(), array("q"))
    find = calls.by_external()
    alone: dict[int, int] = {}
    """External id -> the call that is known from its kernel alone."""
    untied: list[tuple[Kernel, Launch | None]] = []
    for kernel in kernels:
        launch = None if kernel.correlation is None else launch_of(kernel.correlation)
        ties.joint.append(-1)
        ties.evidence.append(0)
        ties.completeness.append(_FULL)
        ties.launch_ns.append(NONE if launch is None else launch.start_ns)
        meta = None if kernel.meta is None else metas[kernel.meta]
        found: Sequence[int] = ()
        if kernel.external_id is not None and (meta is not None or not bogus_ids):
            call = find(kernel.external_id)
            if call is None:
                call = alone.get(kernel.external_id)
            if call is not None:
                found, ties.evidence[-1] = (call,), _EXTERNAL_ID
        if not found and launch is not None and launch.thread in builder.threads:
            found = builder.threads[launch.thread].at(launch.start_ns)
            if found:
                ties.evidence[-1] = _CORRELATION if len(found) == 1 else _COALESCED
        if not found and meta is not None and meta.name not in traffic.NOT_TRAFFIC:
            found = (calls.add(_kernel_call(kernel, meta), -1),)
            calls.completeness[found[0]] = ties.completeness[-1] = _KERNEL_ONLY
            if kernel.external_id is not None:  # a second kernel of the same call is not a second call
                alone[kernel.external_id] = found[0]
        if found:
            _work(calls, found, kernel, ties, meta)
        else:
            untied.append((kernel, launch))
    _tie_coalesced(builder, untied, ties, metas)
    return ties, _explain([(k, at) for k, at in untied if ties.joint[k.number] < 0], ties, any_launch)


def _explain(untied: list[tuple[Kernel, Launch | None]], ties: KernelTies, any_launch: bool) -> list[dict[str, Any]]:
    before = 0
    for kernel, launch in untied:
        # A kernel whose correlation id is not recorded might have been launched at any time.
        older = launch is None and any_launch and bool(kernel.correlation)
        ties.completeness[kernel.number] = _BEFORE_WINDOW if older else _KERNEL_ONLY
        before += older
    found = []
    if before:
        found.append(
            issue(
                "info",
                "kernels_before_window",
                "Communication kernels launched before the recording began: marked, and neither counted as calls of the "
                "first step nor as missing.",
                before,
            )
        )
    if lost := len(untied) - before:
        found.append(
            issue(
                "warning",
                "kernels_without_call",
                "Communication kernels that no recorded call explains: their bytes are unknown.",
                lost,
            )
        )
    return found


def _tie_coalesced(
    builder: Builder, untied: list[tuple[Kernel, Launch | None]], ties: KernelTies, metas: Records[Metadata]
) -> None:
    """Ties kernels that a group launched when it ended to the calls that wait for it on that thread.

    NCCL launches at the end of a group, after the records of its calls are closed; all that marks it is an annotation
    ``nccl:coalesced`` around the launch (torch before 2.4: right behind it), or our own ``ta:end_coalescing``. The calls:
    those before the launch that have no kernel, of one group and kind, back to the first that has one.
    """
    groups: dict[int, _Groups] = {}
    launched = [(launch, kernel) for kernel, launch in untied if launch is not None and kernel.nccl]
    for launch, kernel in sorted(launched, key=lambda pair: pair[0].start_ns):
        thread = builder.threads.get(launch.thread)
        if thread is None or not thread.marks.start:
            continue
        if launch.thread not in groups:
            groups[launch.thread] = _Groups(builder.calls, launch.thread, thread.marks)
        found = groups[launch.thread].waiting(launch.start_ns)
        if found:
            ties.evidence[kernel.number] = _COALESCED
            _work(builder.calls, found, kernel, ties, None if kernel.meta is None else metas[kernel.meta])


class _Groups:
    """The calls of one thread and the marks of coalesced groups, for kernels asked about in order of launch."""

    def __init__(self, calls: Calls, thread: int, marks: _Marks) -> None:
        self._table = calls
        self._marks = marks
        self._calls = array("q", calls.of_thread(thread).tobytes())
        self._starts = array("q", (calls.start[c] for c in self._calls))
        self._blocks: dict[tuple[int, int], list[int]] = defaultdict(list)
        for call in self._calls:
            if calls.block[call] >= 0:
                self._blocks[calls.group[call], calls.block[call]].append(call)
        # For each mark the run of calls whose launch it marks, as positions in _calls; -1: it is not spent.
        self._from = array("q", [-1]) * len(marks.start)
        self._to = array("q", [-1]) * len(marks.start)

    def waiting(self, point: int) -> Sequence[int]:
        """The calls that a launch at ``point`` carries out, none if no group ends there."""
        issued = bisect_right(self._starts, point)
        low = self._run(issued, point)
        number = self._mark(point, issued, low < issued)
        if number is None:
            return ()
        inside = bisect_left(self._starts, self._marks.start[number], low, issued)
        if inside < issued:
            low = inside
        if self._marks.block[number] >= 0:
            found = self._blocks.get((self._marks.group[number], self._marks.block[number]))
            if found:
                self._from[number] = self._to[number] = 0
                return found
        if low == issued:  # another kernel of the group that this mark launched before
            low, issued = self._from[number], self._to[number]
        self._from[number], self._to[number] = low, issued
        return self._calls[low:issued]

    def _mark(self, point: int, issued: int, waiting: bool) -> int | None:
        """The innermost mark around the point; if it is spent, the next one behind, if no call begins in between."""
        starts, ends = self._marks.start, self._marks.end
        around = bisect_right(starts, point) - 1
        while around >= 0 and ends[around] <= point:
            around -= 1
        if around >= 0 and self._from[around] < 0:
            return around
        behind = bisect_left(starts, point)
        next_call = self._starts[issued] if issued < len(self._starts) else None
        if waiting and behind < len(starts) and (next_call is None or starts[behind] <= next_call):
            return behind
        return around if around >= 0 else None

    def _run(self, issued: int, point: int) -> int:
        """Position of the first of the calls without a kernel right before the point, of one group and kind."""
        table = self._table
        low = issued
        for i in range(issued - 1, -1, -1):
            call, last = self._calls[i], self._calls[issued - 1]
            alike = table.group[call] == table.group[last] and table.pointwise[call] == table.pointwise[last]
            if table.completeness[call] != _NO_KERNEL or table.end[call] > point or table.alone[call] or not alike:
                break
            low = i
        return low


def _kernel_call(kernel: Kernel, meta: Metadata) -> Call:
    """A call known from its kernel alone: the host side was not recorded."""
    return Call(
        op=traffic.normalise_op(meta.name),
        op_raw=meta.name or "",
        pid=None,
        tid=None,
        start_ns=kernel.start_ns,
        end_ns=kernel.start_ns + kernel.dur_ns,
        meta=meta,
        in_elems=meta.in_elems,
        out_elems=meta.out_elems,
        group_id=meta.group_name,
        issue_seen=False,
    )


def _work(calls: Calls, found: Sequence[int], kernel: Kernel, ties: KernelTies, meta: Metadata | None) -> None:
    """Notes that a kernel did the work of these calls."""
    end_ns = kernel.start_ns + kernel.dur_ns
    joint = ties.joint[kernel.number] = calls.joint[found[0]]
    for call in found:
        calls.joint[call] = joint
        known = calls.work_start[call] != NONE
        calls.work_start[call] = min(calls.work_start[call], kernel.start_ns) if known else kernel.start_ns
        calls.work_end[call] = max(calls.work_end[call], end_ns) if known else end_ns
        calls.stream[call] = kernel.stream
        calls.source[call] = _KERNEL
        calls.evidence[call] = ties.evidence[kernel.number]
        if calls.completeness[call] == _NO_KERNEL:
            calls.completeness[call] = _FULL
    if meta is not None and len(found) == 1:
        calls.complete(found[0], meta)


# gloo --------------------------------------------------------------------------------------------------------------------


class GlooRanges:
    """The ranges of gloo's worker threads, by operation and shape."""

    def __init__(self) -> None:
        self._codes: dict[tuple[str | None, str | None], int] = {}
        self._types = Intern()
        self._columns = tuple(array("q") for _ in range(5))

    def add(self, event: HostEvent, number: int) -> None:
        """Takes a range; ``number``: its place in the file."""
        dims, types = decoded(event.dims), decoded(event.types)
        kind = types[0] if isinstance(types, list) and types and isinstance(types[0], str) and types[0] else None
        key = traffic.normalise_op(event.name), first_tensor(dims[0]) if dims else None
        code = self._codes.setdefault(key, len(self._codes))
        values = code, event.start_ns, number, event.end_ns, self._types[kind]
        for column, value in zip(self._columns, values, strict=True):
            column.append(value)

    def tie(self, calls: Calls) -> None:
        """Ties them to calls: equal operation and dimensions, in order of issue, only where counts agree."""
        code, start, number, end, kind = (np.array(column, np.int64) for column in self._columns)
        order = np.lexsort((number, start))
        code, start, end, kind = code[order], start[order], end[order], kind[order]
        wanted = np.array(calls.gloo_key, np.int64)[calls.issued]
        for key, key_code in calls.gloo_keys.items():
            mine = calls.issued[wanted == key_code].tolist()
            events = np.flatnonzero(code == self._codes.get(key, -1))
            types = set(kind[events].tolist())
            if len(types) == 1:  # an operator that takes a list of tensors does not record their type, its work does
                self._set_dtype(calls, mine, [types.pop()] * len(mine))
            if len(events) != len(mine):
                continue
            self._set_dtype(calls, mine, kind[events].tolist())
            for call, begin, finish in zip(mine, start[events].tolist(), end[events].tolist(), strict=True):
                if begin >= calls.start[call]:
                    calls.work_start[call], calls.work_end[call] = begin, finish
                    calls.source[call], calls.evidence[call], calls.completeness[call] = _BACKEND_RANGE, _ORDER, _FULL

    def _set_dtype(self, calls: Calls, numbers: list[int], kinds: list[int]) -> None:
        for call, kind in zip(numbers, kinds, strict=True):
            if calls.gloo_dtype[call] < 0 and kind >= 0:
                calls.gloo_dtype[call] = calls.dtypes[self._types.texts[kind]]
