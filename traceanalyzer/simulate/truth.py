"""What is true of a simulated run: the JSON document ``traceanalyzer.truth/1``, from the timeline's own arrays.

Times are true ones (no clock is in them), integer ns; the definitions are those of the design (section 7). Nothing here reads
rows, and nothing of the analysis is used, so that what the analysis measures can be held against it. Tables are columns and
rows; null where only some ranks of what is asked were kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from traceanalyzer.simulate.program import Begin, Call, Compute, End, Ints, Program
from traceanalyzer.simulate.timeline import NEVER, CallPlan, ProgramTimes, Timeline

SCHEMA = "traceanalyzer.truth/1"
_BLOCK = 32
_MOST_CALLS = 400_000
"""Parts in calls up to which lateness is followed through the calls one by one."""

CLASSES: tuple[str, ...] = ("compute", "communication", "pp", "copy", "launch_starved", "idle")
_COMPUTE, _COPY, _PENDING, _ROLES = 1, 2, 4, 3
"""Bits of what is active, and the place of the first role's; behind the roles come their waiting, then their moving."""

Bools = npt.NDArray[np.bool_]


def document(timeline: Timeline, *, seed: int, faults: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """The whole document."""
    calls = _Calls(timeline)
    steps, exposed, bubble = _times(timeline, calls)
    lateness, owners = _lateness(timeline, calls)
    return {
        "schema": SCHEMA,
        "seed": seed,
        "start_ns": timeline.start_ns,
        "world_size": timeline.world_size,
        "ranks": timeline.kept,
        "steps": [timeline.first_step + s for s in range(timeline.steps)],
        "step_time": steps,
        "exposed": exposed,
        "bubble": bubble,
        "arrival": _arrivals(timeline, calls),
        "lateness": lateness,
        "owners": owners,
        "clocks": _clocks(timeline),
        "faults": list(faults),
        "hang": None if timeline.hang is None else [h.sentence for h in timeline.hang],
    }


def text(found: dict[str, Any]) -> str:
    """The document as text: one line for each row of a table."""
    parts = []
    for key, value in found.items():
        if isinstance(value, dict) and set(value) == {"columns", "rows"}:
            rows = ",\n  ".join(json.dumps(row, separators=(",", ":")) for row in value["rows"])
            parts.append(f'"{key}": {{"columns": {json.dumps(value["columns"])}, "rows": [\n  {rows}\n ]}}')
        else:
            parts.append(f'"{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(f" {p}" for p in parts) + "\n}\n"


def _table(columns: Sequence[str], rows: list[list[Any]]) -> dict[str, Any]:
    return {"columns": list(columns), "rows": rows}


def _clocks(timeline: Timeline) -> dict[str, Any]:
    rows = []
    for rank in timeline.kept:
        clock = timeline.costs.clock_of(rank)
        row = [rank, timeline.costs.host_of(rank), clock.offset_ns, clock.drift_ppb, clock.step_ns, clock.step_at_ns]
        rows.append(row)
    return _table(("rank", "host", "offset_ns", "drift_ppb", "step_ns", "step_at_ns"), rows)


# calls over their ranks -------------------------------------------------------------------------------------------------


@dataclass
class _Matched:
    """Calls of one role that are matched, those of one kind side by side: arrays of (calls, parts).

    Collectives: rows are calls, columns the ranks of a component, sorted by group; messages: rows are steps, columns
    sends and then their recvs. programs, instructions, columns: where each part is; of collectives the instruction
    varies by row, of messages by column. group: number of the group of each column. complete: whether all its ranks are
    there. step: of each row.
    """

    role: str
    op: npt.NDArray[np.str_]
    step: Ints
    program: Ints
    instruction: Ints
    column: Ints
    rank: Ints
    group: Ints
    complete: Bools
    start: Ints
    end: Ints
    first: Ints = field(init=False)
    last: Ints = field(init=False)
    lowest: Ints = field(init=False)
    transfer: Ints = field(init=False)

    def __post_init__(self) -> None:
        heads = np.concatenate([[0], np.flatnonzero(np.diff(self.group)) + 1])
        counts = np.diff(np.append(heads, len(self.group)))
        self.lowest = np.repeat(np.minimum.reduceat(self.start, heads, axis=1), counts, axis=1)
        latest = np.repeat(np.maximum.reduceat(self.start, heads, axis=1), counts, axis=1)
        # of several that come last the lowest rank: columns of a group stand by rank
        position = np.arange(len(self.group))
        candidates = np.where(self.start == latest, position, len(self.group))
        self.last = np.repeat(np.minimum.reduceat(candidates, heads, axis=1), counts, axis=1)
        durations = self.end - self.start
        self.transfer = np.take_along_axis(durations, self.last, axis=1)

    @property
    def waiting(self) -> Ints:
        """What each part's duration is longer than the transfer."""
        found: Ints = np.maximum(self.end - self.start - self.transfer, 0)
        return found


class _Calls:
    """All matched calls of a timeline. moving: for each program, from when on data of each call moves; NEVER: unknown."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.matched: list[_Matched] = []
        self.moving = [np.full_like(p.start, NEVER) for p in timeline.programs]
        self._collectives()
        self._messages()
        for m in self.matched:
            whole = m.complete & (m.end != NEVER)
            at = np.broadcast_to(m.step[:, None], m.start.shape), np.broadcast_to(m.instruction, m.start.shape)
            column = np.broadcast_to(m.column, m.start.shape)
            value = m.start + m.waiting
            for p in np.unique(m.program):
                mine = whole & (m.program == p)
                self.moving[p][at[0][mine], at[1][mine], column[mine]] = value[mine]

    def _collectives(self) -> None:
        timeline = self.timeline
        roles = sorted({c.role for p in timeline.programs for c in p.program.instructions if isinstance(c, Call)})
        for role in roles:
            index = timeline.group_index[role]
            numbered = [_numbered(p.program, role) for p in timeline.programs]
            for tied in _tied(timeline, role):
                programs = [p for p in tied if numbered[p]]
                shapes = {tuple(op for op, _ in numbered[p]) for p in programs}
                if len(shapes) != 1:
                    continue  # orders that differ: nothing can be said of them one by one
                where = [np.array([i for _, i in numbered[p]], np.int64) for p in programs]
                self._component(role, index, programs, where, [op for op, _ in numbered[programs[0]]])

    def _component(self, role: str, index: Ints, programs: list[int], where: list[Ints], ops: list[str]) -> None:
        timeline = self.timeline
        steps = timeline.steps
        times = [timeline.programs[p] for p in programs]
        rank = np.concatenate([t.ranks for t in times])
        order = np.lexsort((rank, index[rank]))
        order = order[index[rank][order] >= 0]
        if len(order) == 0:
            return
        sizes = np.array([len(g.ranks) for g in timeline.groups])
        group = index[rank][order]
        ids, counts = np.unique(group, return_counts=True)
        complete = np.isin(group, ids[counts == sizes[ids]])
        more = sizes[group] > 1
        order, group, complete = order[more], group[more], complete[more]
        if len(order) == 0:
            return
        taken = (
            np.concatenate(
                [getattr(t, name)[:, at, :].reshape(steps * len(at), -1) for t, at in zip(times, where, strict=True)], 1
            )
            for name in ("start", "end")
        )
        start, end = (a[:, order] for a in taken)
        program = np.concatenate([np.full(len(t.ranks), p) for p, t in zip(programs, times, strict=True)])[order]
        column = np.concatenate([np.arange(len(t.ranks)) for t in times])[order]
        instruction = np.concatenate(
            [np.repeat(np.tile(at, steps)[:, None], len(t.ranks), 1) for t, at in zip(times, where, strict=True)], 1
        )[:, order]
        step = np.repeat(np.arange(steps), len(ops))
        op = np.array(ops * steps)
        real = (start != NEVER).all(axis=1) & (end != NEVER).all(axis=1)
        if real.any():
            self.matched.append(
                _Matched(
                    role, op[real], step[real], program, instruction[real], column, rank[order], group, complete,
                    start[real], end[real],
                )
            )  # fmt: skip

    def _messages(self) -> None:
        timeline = self.timeline
        ends: dict[str, dict[str, list[Ints]]] = {}
        for p, (times, plan) in enumerate(zip(timeline.programs, timeline.plans, strict=True)):
            for i, pair in plan.pair.items():
                call = times.program.instructions[i]
                assert isinstance(call, Call)
                kept = pair[times.columns]
                at = np.flatnonzero(kept >= 0)
                side = ends.setdefault(call.role, {"send": [], "recv": []})[call.op]
                same = np.full(len(at), p), np.full(len(at), i), at, times.ranks[at]
                side.append(np.stack([kept[at], *same]))
        for role, sides in sorted(ends.items()):
            if not sides["send"] or not sides["recv"]:
                continue
            sent, got = (np.concatenate(sides[op], axis=1) for op in ("send", "recv"))
            _, a, b = np.intersect1d(sent[0], got[0], assume_unique=True, return_indices=True)
            # the two parts of each message side by side, by rank
            both = np.stack([sent[:, a], got[:, b]], axis=2)
            flip = both[4, :, 0] > both[4, :, 1]
            both[:, flip] = both[:, flip, ::-1]
            flat = both.reshape(5, -1)
            _, program, instruction, column, rank = flat
            if flat.shape[1] == 0:
                continue
            start = np.empty((timeline.steps, flat.shape[1]), np.int64)
            end = np.empty_like(start)
            for p in np.unique(program):
                mine = program == p
                times = timeline.programs[p]
                start[:, mine] = times.start[:, instruction[mine], column[mine]]
                end[:, mine] = times.end[:, instruction[mine], column[mine]]
            op = np.full(timeline.steps, "send")
            group = np.repeat(np.arange(flat.shape[1] // 2), 2)
            # whole steps only: what hangs has no end
            real = (start != NEVER).all(axis=1) & (end != NEVER).all(axis=1)
            if real.any():
                self.matched.append(
                    _Matched(
                        role, op[real], np.arange(timeline.steps)[real], program, instruction[None, :], column, rank, group,
                        np.ones(len(group), bool), start[real], end[real],
                    )
                )  # fmt: skip


def _numbered(program: Program, role: str) -> list[tuple[str, int]]:
    """Operation and instruction of the collective calls of a role, in order."""
    return [
        (c.op, i)
        for i, c in enumerate(program.instructions)
        if isinstance(c, Call) and c.role == role and c.op not in ("send", "recv")
    ]


def _tied(timeline: Timeline, role: str) -> list[list[int]]:
    """Programs that groups of a role tie together."""
    program_of = {int(r): p for p, t in enumerate(timeline.programs) for r in t.program.ranks}
    sets: list[set[int]] = []
    for group in timeline.groups:
        if group.role == role:
            mine = {program_of[r] for r in group.ranks}
            apart = [s for s in sets if not s & mine]
            sets = [*apart, mine.union(*(s for s in sets if s & mine))]
    return sorted(sorted(s) for s in sets)


# time by class ----------------------------------------------------------------------------------------------------------


@dataclass
class _Sweep:
    """What is active when, on each of some ranks: sorted points (ranks, points), and from each to the next the place of
    its mask in ``masks``."""

    points: Ints
    codes: Ints
    masks: list[int]

    def sums(self, low: Ints, high: Ints) -> dict[int, Ints]:
        """ns of each mask in a window of each rank; they sum to the windows. An empty window has none."""
        ranks, count = len(self.points), len(self.masks)
        high = np.maximum(low, high)
        first = min(int(np.searchsorted(p, t, "right")) for p, t in zip(self.points, low, strict=True))
        last = max(int(np.searchsorted(p, t)) for p, t in zip(self.points, high, strict=True))
        here = slice(max(first - 1, 0), max(last, first))
        after = slice(here.start + 1, here.stop + 1)
        held = np.minimum(self.points[:, after], high[:, None])
        width = held.shape[1]
        held -= np.maximum(self.points[:, here][:, :width], low[:, None])
        np.maximum(held, 0, out=held)
        key = self.codes[:, here][:, :width] + np.arange(ranks)[:, None] * count
        # float64 sums whole numbers exactly below 2 ** 53 ns, which is 104 days
        summed = np.bincount(key.ravel(), held.ravel(), count * ranks).astype(np.int64).reshape(ranks, count)
        found = {mask: summed[:, n] for n, mask in enumerate(self.masks)}
        found[0] = found.get(0, np.zeros(ranks, np.int64)) + high - low - held.sum(axis=1)
        return found


def _time_role(call: Call) -> str:
    """The role whose time a call is: messages on the default group are the pipeline's."""
    return "pp" if call.op in ("send", "recv") and call.role == "world" else call.role


class _Activity:
    """Which instructions of a program make which bits active, and between which times."""

    def __init__(self, program: Program, plan: CallPlan, roles: list[str]) -> None:
        def at(wanted: Callable[[int, Any], bool]) -> Ints:
            return np.array([i for i, what in enumerate(program.instructions) if wanted(i, what)], np.int64)

        def launched(i: int, what: Any) -> bool:
            return isinstance(what, Call) and plan.parts[plan.unit[i]][-1] == i

        copies = ("copy", "memset")
        kernels = at(lambda _, what: isinstance(what, Compute) and what.kernel_class not in copies)
        copied = at(lambda _, what: isinstance(what, Compute) and what.kernel_class in copies)
        self.calls = at(launched)
        every = np.sort(np.concatenate([kernels, copied, self.calls]))
        self.bits: list[tuple[int, Ints, str, str]] = [
            (0, kernels, "start", "end"),
            (1, copied, "start", "end"),
            (2, every, "launch", "start"),
        ]
        for n, role in enumerate(roles):

            def of_role(_: int, what: Any, role: str = role) -> bool:
                return isinstance(what, Call) and _time_role(what) == role

            mine = at(of_role)
            self.bits.append((_ROLES + n, mine[np.isin(mine, self.calls)], "start", "end"))
            self.bits.append((_ROLES + len(roles) + n, mine, "start", "moving"))
            self.bits.append((_ROLES + 2 * len(roles) + n, mine, "moving", "end"))


def _sweep(timeline: Timeline, times: ProgramTimes, activity: _Activity, moving: Ints, columns: slice) -> _Sweep:
    """All activity of some ranks of a program."""
    issue, start, end, moves = (a[:, :, columns] for a in (times.issue, times.start, times.end, moving))
    after = times.after()[:, activity.calls, columns]
    launch = issue.copy()
    own = np.minimum(after - issue[:, activity.calls], timeline.costs.launch_ns)
    launch[:, activity.calls] = np.where(after == NEVER, NEVER, after - own)
    named = {"start": start, "end": end, "launch": launch, "moving": moves}
    ranks = start.shape[2]
    points: list[Ints] = [np.full((ranks, 2), timeline.start_ns)]
    bits, changes = [np.zeros(2, np.int64)], [np.zeros(2, np.int32)]
    # one bit after another, in order of issue: long sorted runs, which a stable sort only merges
    for bit, at, opens, closes in activity.bits:
        if len(at) == 0:
            continue
        low, high = (named[name][:, at].reshape(-1, ranks).T for name in (opens, closes))
        good = (low != NEVER) & (high != NEVER)
        for side, change in ((low, 1), (high, -1)):
            points.append(np.where(good, side, timeline.start_ns))
            bits.append(np.full(side.shape[1], bit))
            changes.append(np.full(side.shape[1], change, np.int32))
    stacked = np.concatenate(points, axis=1)
    order = np.argsort(stacked, axis=1, kind="stable")
    bit_of, change_of = np.concatenate(bits), np.concatenate(changes)
    codes = np.zeros((ranks, stacked.shape[1] - 1), np.int64)
    masks = [0]
    for bit in range(max(b for b, *_ in activity.bits) + 1):
        delta = np.where(bit_of == bit, change_of, 0).astype(np.int32)
        if not delta.any():
            continue
        codes *= 2
        codes += np.cumsum(delta[order], axis=1, dtype=np.int32)[:, :-1] > 0
        used = np.bincount(codes.ravel(), minlength=2 * len(masks)) > 0
        codes = (np.cumsum(used) - 1)[codes]
        masks = [m | on << bit for m, on in ((masks[c >> 1], c & 1) for c in np.flatnonzero(used).tolist())]
    return _Sweep(np.take_along_axis(stacked, order, axis=1), codes, masks)


def _class_of(mask: int, roles: list[str]) -> tuple[str, list[str], str]:
    """Class of what is active, the roles that communicate, and transfer or waiting where one alone is exposed ("")."""
    running = [r for n, r in enumerate(roles) if mask >> (_ROLES + n) & 1]
    if mask & _COMPUTE:
        return "compute", running, ""
    if running:
        n = roles.index(running[0])
        waits, moves = (mask >> (_ROLES + k * len(roles) + n) & 1 for k in (1, 2))
        part = "" if len(running) > 1 else "transfer" if moves else "waiting" if waits else ""
        return ("pp" if running == ["pp"] else "communication"), running, part
    if mask & _COPY:
        return "copy", [], ""
    return ("idle" if mask & _PENDING else "launch_starved"), [], ""


def step_window(program: Program) -> tuple[int, int]:
    """First and last instruction of the step: those of its mark, else of the program."""
    depth: list[int] = []
    for i, what in enumerate(program.instructions):
        if isinstance(what, Begin):
            depth.append(i)
        elif isinstance(what, End):
            begin = depth.pop()
            begun = program.instructions[begin]
            if isinstance(begun, Begin) and begun.name.startswith("ta:step "):
                return begin, i
    return 0, len(program.instructions) - 1


def _times(timeline: Timeline, calls: _Calls) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Tables step_time, exposed and bubble."""
    pipelines = _Pipelines(timeline)
    by_rank: dict[int, list[list[Any]]] = {}
    exposed: dict[int, list[list[Any]]] = {}
    bubbles: list[list[Any]] = []
    for times, plan, moving in zip(timeline.programs, timeline.plans, calls.moving, strict=True):
        roles = sorted({_time_role(c) for c in times.program.instructions if isinstance(c, Call)})
        begin, end = step_window(times.program)
        activity = _Activity(times.program, plan, roles)
        for first in range(0, len(times.ranks), _BLOCK):
            here = slice(first, min(first + _BLOCK, len(times.ranks)))
            sweep = _sweep(timeline, times, activity, moving, here)
            ranks = times.ranks[here]
            for step in range(timeline.steps):
                low, high = times.issue[step, begin, here], times.issue[step, end, here]
                whole = (low != NEVER) & (high != NEVER)
                low, high = (np.where(whole, t, timeline.start_ns) for t in (low, high))
                sums = sweep.sums(low, high)
                number = timeline.first_step + step
                for column, rank in enumerate(ranks.tolist()):
                    if whole[column]:
                        mine = {m: int(v[column]) for m, v in sums.items() if v[column]}
                        total = int(high[column] - low[column])
                        by_rank.setdefault(rank, []).append([number, rank, total, *_classes(mine, roles)])
                        exposed.setdefault(rank, []).extend([number, rank, *row] for row in _exposed(mine, roles))
                bubbles += pipelines.rows(step, ranks, sweep, roles)
    columns = ("step", "rank", "dur_ns", *(f"{c}_ns" for c in CLASSES), "overlapped_ns", "shared_ns")
    parts = ("busy_ns", "overlapped_ns", "exposed_ns", "shared_ns", "transfer_ns", "waiting_ns", "unsplit_ns")
    return (
        _table(columns, [row for r in sorted(by_rank) for row in by_rank[r]]),
        _table(("step", "rank", "role", *parts), [row for r in sorted(exposed) for row in exposed[r]]),
        _table(_Pipelines.COLUMNS, sorted(bubbles)),
    )


def _classes(sums: dict[int, int], roles: list[str]) -> list[int]:
    totals = dict.fromkeys(CLASSES, 0)
    overlapped = shared = 0
    for mask, held in sums.items():
        kind, running, _ = _class_of(mask, roles)
        totals[kind] += held
        overlapped += held if kind == "compute" and running else 0
        shared += held if kind == "communication" and len(running) > 1 else 0
    return [*totals.values(), overlapped, shared]


def _exposed(sums: dict[int, int], roles: list[str]) -> Iterator[list[Any]]:
    for role in roles:
        busy = overlapped = shared = 0
        parts = {"transfer": 0, "waiting": 0, "": 0}
        for mask, held in sums.items():
            kind, running, part = _class_of(mask, roles)
            if role not in running:
                continue
            busy += held
            if kind == "compute":
                overlapped += held
            elif len(running) > 1:
                shared += held
            else:
                parts[part] += held
        if busy:
            alone = busy - overlapped - shared
            yield [role, busy, overlapped, alone, shared, parts["transfer"], parts["waiting"], parts[""]]


class _Pipelines:
    """The window of each pipeline in each step, from the earliest forward start to the latest backward end."""

    COLUMNS = (
        "pipeline", "step", "stage", "rank", "window_ns", "bubble_ns", "warm_up_ns", "steady_ns", "cool_down_ns",
        "compute_ns", "communication_ns", "pp_ns", "copy_ns", "launch_starved_ns", "idle_ns",
    )  # fmt: skip

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.bounds: dict[tuple[int, int], tuple[int, int, int, int] | None] = {}
        for times in timeline.programs:
            for step in range(timeline.steps):
                for rank, found in zip(times.ranks.tolist(), self._bounds(times, step), strict=True):
                    self.bounds[step, rank] = found

    @staticmethod
    def _bounds(times: ProgramTimes, step: int) -> list[tuple[int, int, int, int] | None]:
        """First start and last end of forward and of backward compute, recomputation included, of each rank."""
        phases: dict[str, list[int]] = {"forward": [], "backward": []}
        for i, what in enumerate(times.program.instructions):
            if isinstance(what, Compute) and what.kernel_class not in ("copy", "memset"):
                way = "backward" if what.where.phase == "recompute" else what.where.phase
                if way in phases:
                    phases[way].append(i)
        there = [at for at in phases.values() if at]
        if not phases["forward"] or any((times.end[step, at] == NEVER).any() for at in there):
            return [None] * len(times.ranks)
        forward = times.start[step, phases["forward"]].min(0), times.end[step, phases["forward"]].max(0)
        if phases["backward"]:
            backward = times.start[step, phases["backward"]].min(0), times.end[step, phases["backward"]].max(0)
        else:
            backward = forward[0], forward[1]
        return list(zip(*(a.tolist() for a in (*forward, *backward)), strict=True))

    def rows(self, step: int, ranks: Ints, sweep: _Sweep, roles: list[str]) -> list[list[Any]]:
        """Rows of some ranks of one program in one step; none of a pipeline of which not all ranks were kept."""
        index = self.timeline.group_index.get("pp")
        if index is None:
            return []
        cuts = np.zeros((6, len(ranks)), np.int64)
        stages: list[tuple[int, ...] | None] = []
        for column, rank in enumerate(ranks.tolist()):
            group: tuple[int, ...] = () if index[rank] < 0 else self.timeline.groups[int(index[rank])].ranks
            bounds = [self.bounds.get((step, r)) for r in group]
            known = [b for b in bounds if b is not None]
            stages.append(group if len(known) == len(group) > 1 else None)
            mine = self.bounds.get((step, rank))
            if stages[-1] is None or mine is None:
                continue
            forward, forward_end, backward, end = mine
            first = max(forward, backward)
            last = max(first, forward_end)
            low, high = min(b[0] for b in known), max(b[3] for b in known)
            cuts[:, column] = (low, forward, first, last, max(last, end), high)
        if not any(s is not None for s in stages):
            return []
        parts = [sweep.sums(cuts[n], cuts[n + 1]) for n in range(5)]
        rows = []
        for column, (rank, staged) in enumerate(zip(ranks.tolist(), stages, strict=True)):
            if staged is None:
                continue
            totals = dict.fromkeys(CLASSES, 0)
            bubble = [0] * 5
            idle = 0
            for n, sums in enumerate(parts):
                for mask, by_rank in sums.items():
                    held, (kind, _, _) = int(by_rank[column]), _class_of(mask, roles)
                    # before its first and after its last pass the schedule has nothing for the host to launch
                    outside = kind == "launch_starved" and n in (0, 4)
                    if kind in ("pp", "idle") or outside:
                        bubble[n] += held
                        idle += held if kind != "pp" else 0
                    if kind not in ("idle",) and not outside:
                        totals[kind] += held
            window = int(cuts[5, column] - cuts[0, column])
            rows.append(
                [
                    min(staged), self.timeline.first_step + step, staged.index(rank), rank, window, sum(bubble),
                    bubble[0] + bubble[1], bubble[2], bubble[3] + bubble[4], totals["compute"], totals["communication"],
                    totals["pp"], totals["copy"], totals["launch_starved"], idle,
                ]
            )  # fmt: skip
        return rows


# arrivals and lateness --------------------------------------------------------------------------------------------------


def _arrivals(timeline: Timeline, calls: _Calls) -> dict[str, Any]:
    """Per step, role, operation and rank: when it came to the calls it shares with others."""
    sums: dict[tuple[int, str, str, int], list[int]] = {}
    for m in calls.matched:
        late = m.start - m.lowest
        last = m.last == np.arange(m.start.shape[1])
        duration, waiting = m.end - m.start, m.waiting
        for step in np.unique(m.step).tolist():
            for op in np.unique(m.op).tolist():
                chosen = (m.step == step) & (m.op == op)
                if not chosen.any():
                    continue
                of = [
                    np.full(m.start.shape[1], int(chosen.sum())),
                    *(a[chosen].sum(axis=0) for a in (last, late, duration)),
                ]
                of += [np.where(m.complete, a[chosen].sum(axis=0), 0) for a in (m.transfer, waiting)]
                table = np.stack(of)
                ids, which = np.unique(m.rank, return_inverse=True)
                totals = np.zeros((len(of), len(ids)), np.int64)
                for n, row in enumerate(table):
                    np.add.at(totals[n], which, row)
                known = np.zeros(len(ids), bool)
                np.logical_or.at(known, which, m.complete)
                for n, rank in enumerate(ids.tolist()):
                    key = (timeline.first_step + step, m.role, op, rank)
                    before = sums.get(key, [0] * 6)
                    sums[key] = [a + int(b) for a, b in zip(before, totals[:, n], strict=True)]
    columns = ("step", "role", "op", "rank", "calls", "last_calls", "late_ns", "dur_ns", "transfer_ns", "waiting_ns")
    return _table(columns, [[*key, *value] for key, value in sorted(sums.items())])


def _lateness(timeline: Timeline, calls: _Calls) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Own and inherited lateness per step, role, operation and rank; and whom the waiting goes back to, per step and role.

    A rank comes late by what its previous call with others ended later for it than for the first to come (inherited), and
    by what it took longer since (own). Of the last rank to come the larger part counts. Inherited lateness is followed back:
    the previous call ended when it did because of the rank that came last to it, that rank from its own previous call, and
    so on; who brings the sum of what these own to half of what was inherited is the owner. None beyond _MOST_CALLS parts.
    """
    if sum(m.start.size for m in calls.matched) > _MOST_CALLS:
        return None, None
    listed: list[tuple[int, int, int, str, str, int, list[int], list[int], list[int], bool]] = []
    for m in calls.matched:
        heads = [0, *(np.flatnonzero(np.diff(m.group)) + 1).tolist(), len(m.group)]
        for row in range(len(m.step)):
            issue = np.empty(len(m.group), np.int64)
            for p in np.unique(m.program):
                mine = m.program == p
                at = np.broadcast_to(m.instruction[min(row, len(m.instruction) - 1)], mine.shape)
                issue[mine] = timeline.programs[p].issue[m.step[row], at[mine], m.column[mine]]
            for low, high in pairwise(heads):
                starts, ends = m.start[row, low:high].tolist(), m.end[row, low:high].tolist()
                ranks = m.rank[low:high].tolist()
                key = (max(starts), int(issue[low:high].min()), ranks[0])
                whole = bool(m.complete[low])
                listed.append((*key, m.role, str(m.op[row]), int(m.step[row]), ranks, starts, ends, whole))
    previous: dict[int, tuple[int, int]] = {}
    """Rank -> end and number of its call that ended last."""
    lasts: list[tuple[int, int | None, int | None]] = []
    """Of each call the last rank, what it owns (None: not known) and the number of its call before."""

    def owner_of(inherited: int, number: int | None) -> int | None:
        total = 0
        while number is not None:
            rank, own, before = lasts[number]
            if own is None:
                return None
            total += own
            if 2 * total >= inherited:
                return rank
            number = before
        return None

    late: dict[tuple[int, str, str, int], list[int]] = {}
    caused: dict[tuple[int, str, int], list[int]] = {}
    for number, entry in enumerate(sorted(listed, key=lambda c: c[:3])):
        *_, role, op, step, ranks, starts, ends, whole = entry
        first = min(range(len(ranks)), key=lambda i: (starts[i], ranks[i]))
        last = max(range(len(ranks)), key=lambda i: (starts[i], -ranks[i]))
        before = previous.get(ranks[first])
        own: int | None = None
        owner: int | None = None
        for i, rank in enumerate(ranks):
            behind = starts[i] - starts[first]
            mine = previous.get(rank)
            if before is None or mine is None:
                continue
            inherited = min(max(mine[0] - before[0], 0), behind)
            sums = late.setdefault((timeline.first_step + step, role, op, rank), [0, 0])
            sums[0] += behind - inherited
            sums[1] += inherited
            if i == last and whole:
                own = behind - inherited
                owner = rank if own >= inherited else owner_of(inherited, mine[1])
        transfer = ends[last] - starts[last]
        waited = sum(max(e - s - transfer, 0) for s, e in zip(starts, ends, strict=True))
        if owner is not None and waited:
            of = caused.setdefault((timeline.first_step + step, role, owner), [0, 0])
            of[0] += 1
            of[1] += waited
        known = previous.get(ranks[last])
        lasts.append((ranks[last], own, None if known is None else known[1]))
        for rank, end in zip(ranks, ends, strict=True):
            known = previous.get(rank)
            if known is None or known[0] <= end:
                previous[rank] = (end, number)
    return (
        _table(("step", "role", "op", "rank", "own_ns", "inherited_ns"), [[*k, *v] for k, v in sorted(late.items())]),
        _table(
            ("step", "role", "owner_rank", "calls", "caused_waiting_ns"), [[*k, *v] for k, v in sorted(caused.items())]
        ),
    )
