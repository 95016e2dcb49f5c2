"""A timeline as rows of the run table: what the collectors and ``traceanalyzer merge`` would have left of it.

Of each rank: the hook's record of every call with its place, and the profiler's (Kineto's) record of the same call with the
time of its kernel, kernels, launches, ranges and marks; either alone on demand. Rows go out rank by rank, so memory stays
with a few ranks. What a rank records is shown by its own clock (Costs.clocks).

Differences from a recording: one host thread issues everything, also backward work; ranges are one for each stretch of work
of one phase and layer, not one for each operator; compute kernels have no external id.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traceanalyzer import __version__, kernel_names, schema, traffic
from traceanalyzer.importers.spool import RunWriter, table_of
from traceanalyzer.simulate.costs import Clock
from traceanalyzer.simulate.program import (
    Begin,
    Call,
    Compute,
    End,
    Group,
    Host,
    Ints,
    PerRank,
    Program,
    Sync,
    Wait,
    Where,
)
from traceanalyzer.simulate.timeline import NEVER, CallPlan, ProgramTimes, Timeline

HOOK, KINETO = "hook", "kineto"
META_SIMULATED = "traceanalyzer.simulated"
"""Key of the metadata that says that a run was simulated, and how (JSON)."""

SOURCE_FILE = "simulated"
COMPUTE_STREAM = 7
_FIRST_COMM_STREAM = 20
_BLOCK = 32
"""Ranks whose times are taken out of a program's arrays at once."""

_METHODS = {
    "all_gather": ("_allgather_base", "_allgather_base"),
    "reduce_scatter": ("_reduce_scatter_base", "_reduce_scatter_base"),
    "all_reduce": ("allreduce", "allreduce"),
    "all_to_all": ("alltoall_base", "all_to_all"),
}
"""Operation -> what the hook and what the profiler call it, where that is not its name."""

_KERNELS = {
    "all_gather": "AllGather_RING_LL",
    "reduce_scatter": "ReduceScatter_Sum_{}_RING_LL",
    "all_reduce": "AllReduce_Sum_{}_RING_LL",
    "all_to_all": "SendRecv",
    "send": "SendRecv",
    "recv": "SendRecv",
    "broadcast": "Broadcast_RING_LL",
    "reduce": "Reduce_Sum_{}_RING_LL",
    "gather": "SendRecv",
    "scatter": "SendRecv",
    "barrier": "AllReduce_Sum_f32_RING_LL",
}
_RANGES = {
    "forward": ("nn.Module: {}", "python_function"),
    "backward": ("autograd::engine::evaluate_function: {}Backward", "cpu_op"),
    "recompute": ("CheckpointFunctionBackward", "cpu_op"),
    "optimizer": ("Optimizer.step#Adam.step", "user_annotation"),
}
"""Phase -> name and category of the range around a stretch of its work; {}: the part of the model."""

_LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"

_Codes = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Collected:
    """What was collected. ranks: those that left anything, None: all whose times were kept. hooks: whether the hooks
    recorded. profiled: the ranks that ran the profiler, None: all of them."""

    ranks: Collection[int] | None = None
    hooks: bool = True
    profiled: Collection[int] | None = None


def group_names(groups: list[Group]) -> list[str]:
    """Names that torch gives groups made in this order: numbers, the default group first."""
    default = next((i for i, g in enumerate(groups) if g.role == "world"), None)
    found: list[str] = []
    number = 0
    for i in range(len(groups)):
        if i == default:
            found.append("0")
        else:
            number += 1
            found.append(str(number))
    return found


def write_rows(
    timeline: Timeline,
    path: Path,
    *,
    collected: Collected,
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, int]:
    """Writes a timeline as a run table, which appears when whole. Gives the rows of each kind.

    ``progress`` is called with work done and all work, in ranks times kinds.
    """
    maker = _Maker(timeline, collected)
    kinds: dict[str, Callable[[_Rank], pa.Table | None]] = {
        "comm_record": maker.calls,
        "cpu_op": maker.host,
        "issue": maker.issues,
        "kernel": maker.kernels,
        "metric": maker.metrics,
        "process_group": maker.groups,
        "rank": maker.rank,
        "span": maker.spans,
    }
    total, done = len(kinds) * len(maker.ranks), 0
    sources = ", ".join(s for s, used in ((HOOK, collected.hooks), (KINETO, maker.any_profiled)) if used)
    status = "complete" if timeline.hang is None else "partial"
    said = {schema.META_IMPORT: json.dumps({"source": sources, "status": status}), **(metadata or {})}
    with RunWriter(path, said) as writer:
        for kind, make in kinds.items():

            def tables(make: Callable[[_Rank], pa.Table | None] = make) -> Iterator[pa.Table]:
                nonlocal done
                for rank in maker.each():
                    found = make(rank)
                    if found is not None and found.num_rows:
                        yield found
                    done += 1
                    if progress is not None and (done % 16 == 0 or done == total):
                        progress(done, total)

            writer.write(kind, tables())
    return writer.rows


# one program's rows, the same on all its ranks --------------------------------------------------------------------------


def _dictionary(texts: list[str | None]) -> tuple[_Codes, list[str]]:
    """Codes (-1: null) and the texts they stand for."""
    known: dict[str, int] = {}
    codes = np.array([-1 if t is None else known.setdefault(t, len(known)) for t in texts], np.int32)
    return codes, list(known)


def _numbers(values: list[int | None]) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Values and where they are missing."""
    missing = np.array([v is None for v in values], bool)
    return np.array([0 if v is None else v for v in values], np.int64), missing


def _stacked(values: list[PerRank], ranks: int) -> Ints:
    """Values of (calls, ranks), or of (calls, 1) where no rank differs."""
    width = ranks if any(isinstance(v, np.ndarray) for v in values) else 1
    found = np.empty((len(values), width), np.int64)
    for n, value in enumerate(values):
        found[n] = value
    return found


@dataclass
class _Range:
    first: int
    last: int
    name: str
    category: str


class _Sheet:
    """What the rows of a program's ranks have in common, instruction by instruction."""

    def __init__(self, program: Program, plan: CallPlan) -> None:
        self.program, self.plan = program, plan
        instructions = program.instructions
        self.call_at = np.array([i for i, c in enumerate(instructions) if isinstance(c, Call)], np.int64)
        self.calls = [c for c in instructions if isinstance(c, Call)]
        place = {int(i): n for n, i in enumerate(self.call_at)}
        self.first_of = np.array([place[plan.unit[int(i)]] for i in self.call_at], np.int64)
        self.alone = np.array([_alone(program, plan, int(i)) for i in self.call_at], bool)
        """Calls that are launched by themselves; a batch of one message is none of them."""
        batches = {i: parts[-1] for i, parts in plan.parts.items() if not _alone(program, plan, i)}
        self.launches_batch = np.array([batches.get(plan.unit[int(i)]) == int(i) for i in self.call_at], bool)
        self.roles = sorted({c.role for c in self.calls})
        self.role = np.array([self.roles.index(c.role) for c in self.calls], np.int64)
        p2p = [c.op in ("send", "recv") for c in self.calls]
        self.is_p2p = np.array(p2p, bool)
        single = [p and c.coalesce is None for p, c in zip(p2p, self.calls, strict=True)]
        self.seq = np.array([plan.messages[int(i)] for i in self.call_at], np.int64)
        lone: dict[str, int] = {}
        for c, one in zip(self.calls, single, strict=True):
            if one:
                lone[c.role] = lone.get(c.role, 0) + 1
        self.seq_of_step = np.array(
            [
                lone[c.role] if one else plan.collectives.get(c.role, 0)
                for c, one in zip(self.calls, single, strict=True)
            ],
            np.int64,
        )
        spelled = [traffic.normalise_dtype(c.dtype) for c in self.calls]
        self.words = {
            "op": _dictionary([c.op for c in self.calls]),
            "dtype": _dictionary(spelled),
            "reduce_op": _dictionary([c.reduce_op or _reduction(c.op) for c in self.calls]),
            "recorded_phase": _dictionary([c.where.phase for c in self.calls]),
            "recorded_component": _dictionary([c.where.component for c in self.calls]),
        }
        self.raw = {
            source: _dictionary([_METHODS.get(c.op, (c.op, c.op))[n] for c in self.calls])
            for n, source in enumerate((HOOK, KINETO))
        }
        self.places = {
            "recorded_microbatch": _numbers([c.where.microbatch for c in self.calls]),
            "recorded_chunk": _numbers([c.where.chunk for c in self.calls]),
            "recorded_layer": _numbers([c.where.layer for c in self.calls]),
        }
        self.is_async = np.array([c.handle is not None for c in self.calls], bool)
        names = sorted({c.stream or f"comm:{c.role}" for c in self.calls})
        others = sorted({k.stream for k in instructions if isinstance(k, Compute)} - {"compute"} - set(names))
        self.stream_ids = {name: _FIRST_COMM_STREAM + n for n, name in enumerate([*names, *others])}
        self.stream_ids["compute"] = COMPUTE_STREAM
        begun = [self.calls[n] for n in self.first_of.tolist()]
        self.stream = np.array([self.stream_ids[c.stream or f"comm:{c.role}"] for c in begun], np.int64)
        self.call_class = np.array([c.op == "all_to_all" for c in self.calls], bool)
        self.rooted = [n for n, c in enumerate(self.calls) if c.op in ("broadcast", "reduce", "gather", "scatter")]
        self.sizes = [
            _stacked(values, len(program.ranks))
            for values in (
                [c.in_elems for c in self.calls],
                [c.out_elems for c in self.calls],
                [-1 if c.peer is None else c.peer for c in self.calls],
            )
        ]
        self.splits = [
            {n: s // c.row_elems for n, c in enumerate(self.calls) if (s := getattr(c, side)) is not None}
            for side in ("in_splits", "out_splits")
        ]
        self._kernels(spelled)
        self.ranges = _ranges(program)
        self.marks = _marks(program)
        self.paths: dict[int, pa.Array] = {}
        self.syncs = [i for i, c in enumerate(instructions) if isinstance(c, Sync) or (isinstance(c, Wait) and c.host)]
        self.hosts = [(i, c.cost) for i, c in enumerate(instructions) if isinstance(c, Host)]

    def _kernels(self, spelled: list[str | None]) -> None:
        """Everything that is launched: kernels, and calls or the last of those launched as one."""
        instructions = self.program.instructions
        place = {int(i): n for n, i in enumerate(self.call_at)}
        at: list[int] = []
        call: list[int] = []
        names: list[str | None] = []
        categories: list[str | None] = []
        classes: list[str | None] = []
        ops: list[str | None] = []
        streams: list[int] = []
        launches: list[str | None] = []
        for i, what in enumerate(instructions):
            if isinstance(what, Compute):
                copy = what.kernel_class in ("copy", "memset")
                at.append(i)
                call.append(-1)
                names.append(what.name)
                categories.append(
                    "kernel" if not copy else "gpu_memset" if what.kernel_class == "memset" else "gpu_memcpy"
                )
                classes.append(what.kernel_class if copy else kernel_names.classify(what.name).kernel_class)
                ops.append(None)
                streams.append(self.stream_ids[what.stream])
                launches.append("cudaMemcpyAsync" if copy else "cudaLaunchKernel")
            elif isinstance(what, Call) and self.plan.parts[self.plan.unit[i]][-1] == i:
                first = place[self.plan.unit[i]]
                begun = self.calls[first]
                dtype = traffic.SHORT_DTYPE.get(spelled[first] or "", "u8")
                at.append(i)
                call.append(first)
                alone = _alone(self.program, self.plan, i)
                name = f"ncclDevKernel_{_KERNELS[begun.op].format(dtype)}(ncclDevKernelArgsStorage<4096ul>)"
                names.append(name)
                categories.append("kernel")
                classes.append("comm")
                ops.append(begun.op if alone else kernel_names.classify(name).op)
                streams.append(int(self.stream[first]))
                launches.append("cudaLaunchKernelExC")
        self.launch_at = np.array(at, np.int64)
        self.launch_call = np.array(call, np.int64)
        self.launch_stream = np.array(streams, np.int64)
        self.launch_words = {
            "name": _dictionary(names),
            "category": _dictionary(categories),
            "kernel_class": _dictionary(classes),
            "kernel_op": _dictionary(ops),
        }
        self.launch_names = launches

    def call_paths(self, steps: range) -> pa.Array:
        """The names of the ranges around each call of each step, innermost first; null where there are none."""
        for step in steps:
            if step not in self.paths:
                self.paths[step] = self._paths(step)
        return pa.concat_arrays([self.paths[step] for step in steps])

    def _paths(self, step: int) -> pa.Array:
        around: list[tuple[int, int, str]] = [(m[0], m[1], _numbered(m[2], step)) for m in self.marks]
        around += [(r.first - 1, r.last + 1, r.name) for r in self.ranges]
        found: list[list[str] | None] = []
        memo: dict[tuple[str, ...], list[str]] = {}
        stack: list[tuple[int, int, str]] = []
        waiting = sorted(around, key=lambda a: (a[0], -a[1]), reverse=True)
        for i in self.call_at.tolist():
            while waiting and waiting[-1][0] < i:
                stack.append(waiting.pop())
            stack = [s for s in stack if s[1] > i]
            names = tuple(s[2] for s in reversed(stack))
            found.append(memo.setdefault(names, list(names)) if names else None)
        return pa.array(found, pa.list_(pa.string()))


def _alone(program: Program, plan: CallPlan, i: int) -> bool:
    """Whether a call's kernel is its own: not so for those launched as one, nor in a batch of one send or receive."""
    call = program.instructions[i]
    batched = isinstance(call, Call) and call.op in ("send", "recv") and call.coalesce is not None
    return len(plan.parts[plan.unit[i]]) == 1 and not batched


def _reduction(op: str) -> str | None:
    return "sum" if op in ("all_reduce", "reduce_scatter", "reduce") else None


def _component(where: Where) -> str:
    return (where.component or ("layer" if where.layer is not None else "model")).replace(" ", "_")


def _ranges(program: Program) -> list[_Range]:
    """Stretches of kernels and calls of one phase and layer, without pipeline messages, which come from outside of all."""
    found: list[_Range] = []
    last: tuple[Any, ...] | None = None
    for i, what in enumerate(program.instructions):
        if isinstance(what, Begin | End | Host | Sync):
            last = None
        elif isinstance(what, Compute | Call):
            where = what.where
            message = isinstance(what, Call) and what.op in ("send", "recv") and what.role == "pp"
            if message or where.phase not in _RANGES:
                last = None
                continue
            key = (where.phase, where.microbatch, where.chunk, where.layer)
            if key == last:
                found[-1].last = i
            else:
                name, category = _RANGES[where.phase]
                part = _component(where) if where.layer is None else f"TransformerLayer_{where.layer}"
                if where.phase == "backward":
                    part = "".join(w.capitalize() for w in _component(where).replace(".", "_").split("_"))
                found.append(_Range(i, i, name.format(part), category))
            last = key
    return found


def _marks(program: Program) -> list[tuple[int, int, str]]:
    """Begin, end and name of the marks, outer ones first."""
    found: list[tuple[int, int, str]] = []
    stack: list[tuple[int, str]] = []
    for i, what in enumerate(program.instructions):
        if isinstance(what, Begin):
            stack.append((i, what.name))
        elif isinstance(what, End):
            begin, name = stack.pop()
            found.append((begin, i, name))
    return sorted(found, key=lambda m: (m[0], -m[1]))


# one rank ---------------------------------------------------------------------------------------------------------------


@dataclass
class _Rank:
    """One rank's times, by its own clock: arrays over step and instruction. after: when the host was done with it."""

    rank: int
    column: int
    sheet: _Sheet
    issue: Ints
    after: Ints
    start: Ints
    end: Ints
    profiled: bool


@dataclass
class _Program:
    times: ProgramTimes
    sheet: _Sheet
    block: tuple[int, list[Ints]] = field(default_factory=lambda: (-1, []))


def shown(time: Ints, clock: Clock, start_ns: int) -> Ints:
    """True times as a clock shows them; NEVER stays."""
    if clock == Clock():
        return time
    since = time - start_ns
    # the quotient apart, so that the product stays within 64 bits for any drift below 1e9
    drift = since // 1_000_000_000 * clock.drift_ppb + since % 1_000_000_000 * clock.drift_ppb // 1_000_000_000
    moved = time + clock.offset_ns + drift + np.where(since >= clock.step_at_ns, clock.step_ns, 0)
    return np.where(time == NEVER, NEVER, moved)


def _masked(values: npt.NDArray[Any], missing: npt.NDArray[np.bool_] | None, kind: pa.DataType) -> pa.Array:
    return pa.array(values, kind, mask=missing if missing is not None and missing.any() else None)


def _words(codes: _Codes, texts: list[str], missing: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    gone = codes < 0 if missing is None else (codes < 0) | missing
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32(), mask=gone), pa.array(texts, pa.string()))


def _same(text: str | None, n: int) -> pa.Array:
    codes = pa.array(np.zeros(n, np.int32), mask=None if text is not None else np.ones(n, bool))
    return pa.DictionaryArray.from_arrays(codes, pa.array([text or ""], pa.string()))


def _repeat(value: int, n: int, kind: pa.DataType) -> pa.Array:
    return pa.array(np.full(n, value, np.int64), kind)


class _Maker:
    """Makes the rows of one rank after another."""

    def __init__(self, timeline: Timeline, collected: Collected) -> None:
        self.timeline, self.collected = timeline, collected
        wanted = None if collected.ranks is None else set(collected.ranks)
        self.profiled = None if collected.profiled is None else set(collected.profiled)
        self.programs = [
            _Program(t, _Sheet(t.program, plan)) for t, plan in zip(timeline.programs, timeline.plans, strict=True)
        ]
        self.ranks = sorted(
            (int(r), p, column)
            for p, made in enumerate(self.programs)
            for column, r in enumerate(made.times.ranks)
            if wanted is None or int(r) in wanted
        )
        self.any_profiled = any(self._is_profiled(r) for r, _, _ in self.ranks)
        self.names = group_names(timeline.groups)
        self.paths: dict[int, pa.Array] = {}
        self.world = timeline.world_size
        self.members: dict[int, list[int]] = {}
        for number, group in enumerate(timeline.groups):
            for rank in group.ranks:
                self.members.setdefault(rank, []).append(number)

    def _is_profiled(self, rank: int) -> bool:
        return self.profiled is None or rank in self.profiled

    def each(self) -> Iterator[_Rank]:
        for rank, number, column in self.ranks:
            made = self.programs[number]
            first = column - column % _BLOCK
            if made.block[0] != first:
                times = made.times
                here = slice(first, first + _BLOCK)
                arrays = [
                    a[:, :, here].reshape(-1, a[:, :, here].shape[2]) for a in (times.issue, times.start, times.end)
                ]
                after = np.concatenate([arrays[0][1:], times.finish[None, here]])
                made.block = (first, [np.ascontiguousarray(a.T) for a in (*arrays, after)])
            clock, base = self.timeline.costs.clock_of(rank), self.timeline.start_ns
            issue, start, end, after = (shown(a[column - first], clock, base) for a in made.block[1])
            yield _Rank(rank, column, made.sheet, issue, after, start, end, self._is_profiled(rank))
        for made in self.programs:
            made.block = (-1, [])

    def _steps(self, rank: _Rank, at: Ints) -> tuple[Ints, Ints]:
        """Rows of the arrays of some instructions over all steps, and which of ``at`` each is."""
        steps, width = self.timeline.steps, len(rank.sheet.program.instructions)
        rows = (np.arange(steps)[:, None] * width + at[None, :]).ravel()
        return rows, np.tile(np.arange(len(at)), steps)

    # kinds

    def calls(self, rank: _Rank) -> pa.Table | None:
        sheet = rank.sheet
        rows, which = self._steps(rank, sheet.call_at)
        issue = rank.issue[rows]
        n_step = len(sheet.calls)
        number = np.arange(len(rows))
        real = issue != NEVER
        sources = [s for s, used in ((0, self.collected.hooks), (1, rank.profiled)) if used]
        if not sources or not real.any():
            return None
        start, end = rank.start[rows], rank.end[rows]
        number, which, issue, start, end = (a[real] for a in (number, which, issue, start, end))
        returned = rank.after[rows][real]
        # the launch of a batch is behind its last member, not part of it
        launched = np.minimum(returned - issue, self.timeline.costs.launch_ns)
        returned = np.where(sheet.launches_batch[which] & (returned != NEVER), returned - launched, returned)
        ended = end != NEVER
        n = len(number)
        hook: npt.NDArray[np.bool_] = np.repeat(np.array(sources) == 0, n)
        at = np.tile(np.arange(n), len(sources))
        key = np.where(hook | ~np.tile(ended, len(sources)), issue[at], start[at])
        order = np.argsort(key, kind="stable")
        hook, at = hook[order], at[order]
        kineto: npt.NDArray[np.bool_] = np.logical_not(hook)
        total = len(at)
        number, which, issue, start, end, returned, ended = (
            a[at] for a in (number, which, issue, start, end, returned, ended)
        )
        timed: npt.NDArray[np.bool_] = np.logical_and(kineto, ended)
        untimed: npt.NDArray[np.bool_] = np.logical_not(timed)
        step = number // n_step
        joint = step * n_step + sheet.first_of[which]
        role = sheet.role[which]
        groups = [self.timeline.group_of(r, rank.rank) for r in sheet.roles]
        names = [self.names[int(self.timeline.group_index[r][rank.rank])] for r in sheet.roles]
        places = np.array([g.ranks.index(rank.rank) for g in groups], np.int64)
        sizes = np.array([len(g.ranks) for g in groups], np.int64)
        in_elems, out_elems, peer, root, splits = self._per_rank(rank, groups)
        p2p = sheet.is_p2p[which]
        rooted = root[which] >= 0
        words = {name: _words(codes[which], texts) for name, (codes, texts) in sheet.words.items()}
        raw_hook, raw_kineto = sheet.raw[HOOK], sheet.raw[KINETO]
        raw = np.where(hook, raw_hook[0][which], raw_kineto[0][which] + len(raw_hook[1])).astype(np.int32)
        coalesced = ~sheet.alone[which]
        evidence = np.where(coalesced, 1, 0).astype(np.int32)
        whole = np.where(hook, 0, np.where(ended, 1, 2)).astype(np.int32)
        microbatch, chunk, layer = (_masked(v[which], m[which] | kineto, pa.int32()) for v, m in sheet.places.values())
        phase, component = words.pop("recorded_phase"), words.pop("recorded_component")
        if not self.collected.hooks:  # the profiler knows it from the hooks' marks alone
            words["reduce_op"] = _hidden(words["reduce_op"], kineto)
        columns: dict[str, Any] = {
            "rank": _repeat(rank.rank, total, pa.int32()),
            "source": _words(kineto.astype(np.int32), [HOOK, KINETO]),
            "start_ns": _masked(start, untimed, pa.int64()),
            "dur_ns": _masked(np.where(timed, end - start, 0), untimed, pa.int64()),
            "pid": _repeat(_pid(rank.rank), total, pa.int64()),
            "tid": _repeat(_pid(rank.rank), total, pa.int64()),
            "external_id": _masked(number + 1, hook, pa.uint64()),
            "call_id": pa.array(number, pa.int64()),
            "hook_call": pa.array(number, pa.int64()) if self.collected.hooks else pa.nulls(total, pa.int64()),
            "coalesce_id": pa.array(joint, pa.int64()),
            **words,
            "op_raw": _words(raw, raw_hook[1] + raw_kineto[1]),
            "group_id": _words(role.astype(np.int32), names),
            "group_size": pa.array(sizes[role], pa.int32()),
            "group_rank": pa.array(places[role], pa.int32()),
            "seq": pa.array(sheet.seq[which] + step * sheet.seq_of_step[which], pa.int64()),
            "is_p2p": pa.array(p2p),
            "peer": _masked(peer[which], ~p2p, pa.int32()),
            "root": _masked(root[which], ~rooted, pa.int32()),
            "in_elems": pa.array(in_elems[which], pa.int64()),
            "out_elems": pa.array(out_elems[which], pa.int64()),
            "is_async": pa.array(sheet.is_async[which]),
            "t_issue_ns": pa.array(issue, pa.int64()),
            "t_issue_end_ns": _masked(returned, returned == NEVER, pa.int64()),
            "completeness": _words(whole, ["not_profiled", "full", "cut"]),
            "recorded_step": _masked(self.timeline.first_step + step, kineto, pa.int64()),
            "recorded_microbatch": microbatch,
            "recorded_chunk": chunk,
            "recorded_layer": layer,
            "recorded_phase": _hidden(phase, kineto),
            "recorded_component": _hidden(component, kineto),
        }
        if rank.profiled:
            columns |= {
                "time_source": _words(np.where(timed, 0, -1).astype(np.int32), ["kernel"]),
                "join_evidence": _words(np.where(timed, evidence, -1).astype(np.int32), ["external_id", "coalesced"]),
                "stream": _masked(sheet.stream[which], untimed, pa.int64()),
                "call_path": self._paths(sheet).take(pa.array(step * n_step + which, mask=hook)),
            }
        if sheet.call_class.any():
            exchanging = sheet.call_class[which]
            taken = pa.array(which, mask=~exchanging)
            columns["in_splits"], columns["out_splits"] = (s.take(taken) for s in splits)
            columns["splits_known"] = _masked(exchanging, ~exchanging, pa.bool_())
        return pa.table(columns)

    def _per_rank(self, rank: _Rank, groups: list[Group]) -> tuple[Ints, Ints, Ints, Ints, tuple[pa.Array, pa.Array]]:
        """Elements in and out, peer, root (-1: none) and splits in rows of each call of one rank."""
        sheet = rank.sheet
        column = int(self.programs[self._number(rank)].times.columns[rank.column])
        in_elems, out_elems, peer = (values[:, column if values.shape[1] > 1 else 0] for values in sheet.sizes)
        root = np.full(len(sheet.calls), -1, np.int64)
        for n in sheet.rooted:
            given = sheet.calls[n].root
            root[n] = groups[sheet.role[n]].ranks[0] if given is None else int(given[column])
        listed = []
        for side in sheet.splits:
            said: list[Any] = [None] * len(sheet.calls)
            for n, rows in side.items():
                said[n] = rows[column].tolist()
            listed.append(pa.array(said, pa.list_(pa.int64())))
        return in_elems, out_elems, peer, root, (listed[0], listed[1])

    def _paths(self, sheet: _Sheet) -> pa.Array:
        known = self.paths.get(id(sheet))
        if known is None:
            first = self.timeline.first_step
            known = self.paths[id(sheet)] = sheet.call_paths(range(first, first + self.timeline.steps))
        return known

    def _number(self, rank: _Rank) -> int:
        return next(i for i, p in enumerate(self.programs) if p.sheet is rank.sheet)

    def _launched(self, rank: _Rank) -> tuple[Ints, Ints, Ints, Ints]:
        """Row, place in the sheet and launch of everything launched; last: how long the launch took."""
        sheet = rank.sheet
        rows, which = self._steps(rank, sheet.launch_at)
        issued, returned = rank.issue[rows], rank.after[rows]
        # a call spends its time in torch and, at its end, in the launch
        own = np.minimum(returned - issued, self.timeline.costs.launch_ns)
        launch = np.where(sheet.launch_call[which] >= 0, returned - own, issued)
        return rows, which, launch, returned - launch

    def kernels(self, rank: _Rank) -> pa.Table | None:
        if not rank.profiled:
            return None
        sheet = rank.sheet
        rows, which, launch, _ = self._launched(rank)
        start, end = rank.start[rows], rank.end[rows]
        number = np.arange(len(rows))
        real = (end != NEVER) & (start != NEVER)
        rows, which, launch, start, end, number = (a[real] for a in (rows, which, launch, start, end, number))
        order = np.argsort(start, kind="stable")
        which, launch, start, end, number = (a[order] for a in (which, launch, start, end, number))
        call = sheet.launch_call[which]
        comm = call >= 0
        step = number // len(sheet.launch_at)
        joint = step * len(sheet.calls) + np.maximum(call, 0)
        alone = sheet.alone[np.maximum(call, 0)] if len(sheet.calls) else np.zeros(len(call), bool)
        n = len(which)
        words = {name: _words(codes[which], texts) for name, (codes, texts) in sheet.launch_words.items()}
        return pa.table(
            {
                "rank": _repeat(rank.rank, n, pa.int32()),
                "source": _same(KINETO, n),
                "start_ns": pa.array(start, pa.int64()),
                "dur_ns": pa.array(end - start, pa.int64()),
                **words,
                "correlation": pa.array(number + 1, pa.uint64()),
                "external_id": _masked(joint + 1, ~(comm & alone), pa.uint64()),
                "coalesce_id": _masked(joint, ~comm, pa.int64()),
                "join_evidence": _words(
                    np.where(comm, np.where(alone, 0, 1), -1).astype(np.int32), ["external_id", "coalesced"]
                ),
                "completeness": _words(np.where(comm, 0, -1).astype(np.int32), ["full"]),
                "device": _repeat(rank.rank % self.timeline.costs.ranks_per_node, n, pa.int32()),
                "stream": pa.array(sheet.launch_stream[which], pa.int64()),
                "launch_ns": _masked(launch, ~comm, pa.int64()),
            }
        )

    def host(self, rank: _Rank) -> pa.Table | None:
        if not rank.profiled:
            return None
        sheet = rank.sheet
        rows, which, launch, took = self._launched(rank)
        names, texts = _dictionary([*sheet.launch_names, *(r.name for r in sheet.ranges), "cudaDeviceSynchronize"])
        pieces: list[tuple[Ints, Ints, _Codes, _Codes, Ints]] = []
        made = (rank.issue[rows] != NEVER) & (rank.after[rows] != NEVER)
        number = np.arange(len(rows)) + 1
        pieces.append((launch[made], took[made], names[which][made], np.zeros(made.sum(), np.int32), number[made]))
        mine = [(n, r) for n, r in enumerate(sheet.ranges) if r.category != "user_annotation"]
        for at, last, name, category in (
            (
                np.array([r.first for _, r in mine], np.int64),
                np.array([r.last for _, r in mine], np.int64),
                names[[len(sheet.launch_names) + n for n, _ in mine]],
                np.array([1 if r.category == "cpu_op" else 2 for _, r in mine], np.int32),
            ),
            (
                np.array(sheet.syncs, np.int64),
                np.array(sheet.syncs, np.int64),
                np.full(len(sheet.syncs), names[-1], np.int32),
                np.zeros(len(sheet.syncs), np.int32),
            ),
        ):
            if len(at) == 0:
                continue
            begun, which = self._steps(rank, at)
            low, high = rank.issue[begun], rank.after[self._steps(rank, last)[0]]
            real = (low != NEVER) & (high != NEVER)
            none = np.zeros(int(real.sum()), np.int64)
            pieces.append((low[real], (high - low)[real], name[which][real], category[which][real], none))
        start, dur, code, category, correlation = (np.concatenate(p) for p in zip(*pieces, strict=True))
        # an outer range before the inner one that begins with it
        order = np.lexsort((-dur, start))
        n = len(order)
        correlation = correlation[order]
        return pa.table(
            {
                "rank": _repeat(rank.rank, n, pa.int32()),
                "source": _same(KINETO, n),
                "start_ns": pa.array(start[order], pa.int64()),
                "dur_ns": pa.array(dur[order], pa.int64()),
                "name": _words(code[order], texts),
                "category": _words(category[order], ["cuda_runtime", "cpu_op", "python_function"]),
                "pid": _repeat(_pid(rank.rank), n, pa.int64()),
                "tid": _repeat(_pid(rank.rank), n, pa.int64()),
                "correlation": _masked(correlation, correlation == 0, pa.uint64()),
            }
        )

    def spans(self, rank: _Rank) -> pa.Table | None:
        sheet = rank.sheet
        first_step = self.timeline.first_step
        width = len(sheet.program.instructions)
        found: list[dict[str, Any]] = []
        for step in range(self.timeline.steps):
            base = step * width
            ranges = [(b, e, _numbered(name, first_step + step), "user_annotation") for b, e, name in sheet.marks]
            ranges += [(r.first, r.last, r.name, r.category) for r in sheet.ranges if r.category == "user_annotation"]
            ranges += [(i, i, _LOADER, "user_annotation") for i, cost in sheet.hosts if cost == "data"]
            for begin, end, name, category in ranges:
                low = int(rank.issue[base + begin])
                # a mark ends when the host comes to its end, work when the host is done with its last part
                is_mark = begin != end and isinstance(sheet.program.instructions[end], End)
                high = int((rank.issue if is_mark else rank.after)[base + end])
                if low == NEVER:
                    continue
                whole = high != NEVER
                row = {"rank": rank.rank, "start_ns": low, "dur_ns": high - low if whole else None}
                row |= {"pid": _pid(rank.rank), "tid": _pid(rank.rank)}
                if self.collected.hooks and name.startswith("ta:"):
                    found.append({**row, "source": HOOK, **_hook_span(name, first_step + step, whole)})
                if rank.profiled and whole:
                    found.append({**row, "source": KINETO, "name": name, "category": category})
        found.sort(key=lambda r: (r["start_ns"], -(r["dur_ns"] or 0)))
        return table_of("span", found)

    def groups(self, rank: _Rank) -> pa.Table | None:
        if not self.collected.hooks and not rank.profiled:
            return None
        source = HOOK if self.collected.hooks else KINETO
        found = []
        for number in self.members.get(rank.rank, ()):
            group = self.timeline.groups[number]
            found.append(
                {
                    "rank": rank.rank,
                    "source": source,
                    "name": self.names[number],
                    "group_id": self.names[number],
                    "group_size": len(group.ranks),
                    "description": group.description,
                    "backend": f"cuda:{self.timeline.costs.backend}",
                    "ranks": list(group.ranks),
                    "ranks_source": "hook" if self.collected.hooks else "header",
                }
            )
        found.sort(key=lambda g: str(g["group_id"]))
        return table_of("process_group", found)

    def metrics(self, rank: _Rank) -> pa.Table | None:
        if not self.collected.hooks:
            return None
        column = int(self.programs[self._number(rank)].times.columns[rank.column])
        found = []
        for key, value in rank.sheet.program.metrics.items():
            said = int(value[column]) if isinstance(value, np.ndarray) else int(value)
            row = {"rank": rank.rank, "source": HOOK, "key": key, "value": float(said), "unit": "bytes"}
            found.append({**row, "step": self.timeline.first_step})
        return table_of("metric", found)

    def issues(self, rank: _Rank) -> pa.Table | None:
        if self.timeline.hang is None or not self.collected.hooks:
            return None
        row = {
            "rank": rank.rank,
            "source": HOOK,
            "source_file": SOURCE_FILE,
            "severity": "warning",
            "code": "log_not_ended",
            "sentence": "The process ended without closing its log (it was killed, or still ran): what it did after the last "
            "record is unknown. Steps are whole up to the last one whose end was recorded.",
            "occurrences": 1,
        }
        return table_of("issue", [row])

    def rank(self, rank: _Rank) -> pa.Table | None:
        costs = self.timeline.costs
        issued = rank.issue[rank.issue != NEVER]
        done = rank.after[rank.after != NEVER]
        low, high = int(issued.min()), int(max(issued.max(), done.max() if len(done) else issued.max()))
        common = {
            "rank": rank.rank,
            "pid": _pid(rank.rank),
            "host": costs.host_of(rank.rank),
            "rank_source": "header",
            "world_size": self.world,
            "device": rank.rank % costs.ranks_per_node,
            "device_name": costs.device_name,
            "host_start_ns": low,
            "source_file": SOURCE_FILE,
            "versions": json.dumps({"simulator": f"traceanalyzer {__version__}"}),
            "rows_rejected": 0,
            "import_status": "complete" if self.timeline.hang is None else "partial",
        }
        rows = []
        if self.collected.hooks:
            rows.append({**common, "source": HOOK, "window_start_ns": low, "window_end_ns": high})
        if rank.profiled:
            at = self._steps(rank, rank.sheet.launch_at)[0]
            start, end = rank.start[at], rank.end[at]
            real = (start != NEVER) & (end > start)
            window: dict[str, int] = {"window_start_ns": low, "window_end_ns": high}
            if real.any():
                window = {"window_start_ns": int(start[real].min()), "window_end_ns": int(end[real].max())}
            rows.append({**common, "source": KINETO, **window})
        return table_of("rank", rows)


def _pid(rank: int) -> int:
    return 10_000 + rank


def _hidden(words: pa.DictionaryArray, missing: npt.NDArray[np.bool_]) -> pa.DictionaryArray:
    indices = words.indices
    gone = missing | ~indices.is_valid().to_numpy(zero_copy_only=False)
    return pa.DictionaryArray.from_arrays(
        pa.array(indices.fill_null(0).to_numpy(), pa.int32(), mask=gone), words.dictionary
    )


def _numbered(name: str, step: int) -> str:
    return f"ta:step {step}" if name.startswith("ta:step ") else name


def _hook_span(name: str, step: int, whole: bool) -> dict[str, Any]:
    """Name, category and place of the hook's own record of a mark."""
    said = name.removeprefix("ta:")
    kind, _, number = said.partition(" ")
    row: dict[str, Any] = {"name": said, "category": kind, "recorded_step": step}
    if kind == "step":
        row["completeness"] = "full" if whole else "cut"
    elif kind == "microbatch" and number.isdigit():
        row["recorded_microbatch"] = int(number)
    elif kind == "layer" and number.isdigit():
        row["recorded_layer"] = int(number)
    elif kind == "phase":
        row["category"] = number or kind
        row["recorded_phase"] = number or None
    elif kind in ("forward", "backward"):
        row["recorded_phase"] = kind
    return row
