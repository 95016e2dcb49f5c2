"""The discrete-event engine: programs and costs -> a timeline. All ranks of a program move together, as arrays.

What it models, in integer ns:

* The host of a rank takes its instructions one after another; a launch or a call costs host time, and its kernel may start
  when the launch returns.
* A stream runs its kernels in order. A call waits for its stream, and for what the compute stream was given before it
  (c10d's stream semantics). A collective ends on all its ranks when the last has arrived plus latency and transfer; a
  message likewise on its two. Calls launched as one are one kernel, which ends with its last part.
* A call without a handle makes the compute stream wait for its end; so does a Wait, later. Wait(host) and Sync hold the
  host.

A program's host and its streams are queues that advance when what they wait for is known, whichever program makes it known;
when nothing can advance and something is left, the orders do not meet: SimulationError says who waits for whom.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from traceanalyzer import traffic
from traceanalyzer.errors import TraceAnalyzerError
from traceanalyzer.simulate.costs import INTER, INTRA, Costs
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
    Walked,
)
from traceanalyzer.simulate.timeline import NEVER, CallPlan, Hang, ProgramTimes, Timeline

COMPUTE = "compute"
POINT_TO_POINT = frozenset({"send", "recv"})
_ORDINALS = 1 << 24


class SimulationError(TraceAnalyzerError):
    """Programs that cannot run: a group or handle that does not exist, or orders of calls that do not meet."""


class DeadlockError(SimulationError):
    """Orders of calls that do not meet. hang: who waits for whom."""

    def __init__(self, hang: list[Hang], left: int) -> None:
        self.hang = hang
        shown = "; ".join(h.sentence for h in hang)
        super().__init__(f"the simulated ranks wait for each other: {shown}{f'; and {left} more' if left else ''}.")


def run(
    walked: Walked,
    costs: Costs,
    *,
    steps: int = 1,
    seed: int = 0,
    dtype: str = "bfloat16",
    keep: Sequence[int] | None = None,
    start_ns: int = 0,
    first_step: int = 0,
    allow_hang: bool = False,
) -> Timeline:
    """Runs programs for a number of steps.

    ``dtype``: element type in which the job multiplies. ``keep``: ranks whose times are kept, None for all; all are
    simulated. ``allow_hang``: orders that do not meet end the timeline instead of raising DeadlockError.
    """
    return _Engine(walked, costs, steps, seed, dtype, keep, start_ns, first_step).run(allow_hang)


# what does not depend on time ------------------------------------------------------------------------------------------


@dataclass
class _Component:
    """Programs that groups of a role tie together: their collective calls of that role are one, whatever their group.

    order, starts, sizes, back: the members side by side, sorted by group, and the way back.
    """

    programs: list[int]
    offsets: dict[int, slice]
    order: npt.NDArray[np.intp]
    starts: npt.NDArray[np.intp]
    sizes: Ints
    back: npt.NDArray[np.intp]
    groups: list[Group]
    alpha: Ints
    beta: npt.NDArray[np.float64]
    factor: npt.NDArray[np.float64]

    def spread(self, by_group: Ints) -> Ints:
        """A value of each group -> one of each member, in the order of the programs."""
        found: Ints = np.repeat(by_group, self.sizes)[self.back]
        return found

    def largest(self, of_members: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """The largest value in each group."""
        found: npt.NDArray[np.generic] = np.maximum.reduceat(of_members[self.order], self.starts)
        return found


@dataclass
class _Part:
    """A send or recv: of each rank the unit at the other end (-1: nobody), the column there, and the time it takes."""

    unit: Ints
    column: Ints
    cost: Ints
    units: list[int] = field(default_factory=list)


@dataclass
class _Message:
    """A send or recv, or several launched as one."""

    number: int
    program: int
    parts: dict[int, _Part]
    partners: frozenset[int] = frozenset()
    whole: bool = True
    """Whether every part has somebody at the other end."""


def group_index(walked: Walked) -> dict[str, Ints]:
    """Role -> place of the group of each global rank in walked.groups; -1 where it has none.

    Raises SimulationError where a rank has two of one role.
    """
    world = 1 + max(max(p.ranks) for p in walked.programs)
    found: dict[str, Ints] = {}
    for number, group in enumerate(walked.groups):
        of = found.setdefault(group.role, np.full(world, -1, np.int64))
        members = np.array(group.ranks, np.int64)
        taken = members[of[members] >= 0]
        if len(taken):
            raise SimulationError(f"rank {taken[0]} is in two groups of role {group.role}.")
        of[members] = number
    return found


def plan_of(program: Program) -> CallPlan:
    """Numbers of a program's calls; ``pair`` is filled by the engine."""
    number: dict[int, int] = {}
    messages: dict[int, int] = {}
    unit: dict[int, int] = {}
    parts: dict[int, tuple[int, ...]] = {}
    counts: dict[str, int] = {}
    single: dict[str, int] = {}
    opened: dict[int, int] = {}
    turn: dict[int, int] = {}
    turns: dict[str, int] = {}
    for i, call in enumerate(program.instructions):
        if not isinstance(call, Call):
            continue
        first = i if call.coalesce is None else opened.setdefault(call.coalesce, i)
        unit[i], parts[first] = first, (*parts.get(first, ()), i)
        if first != i:
            number[i] = number.get(first, 0)
            messages[i] = messages.get(first, 0)
            continue
        if call.op in POINT_TO_POINT and call.coalesce is None:
            messages[i] = single.get(call.role, 0)
            single[call.role] = messages[i] + 1
        else:  # c10d counts a batch of messages where it counts collectives
            number[i] = messages[i] = counts.get(call.role, 0)
            counts[call.role] = number[i] + 1
            # a batch of messages concerns two ranks, and the stages make different numbers of them
            if call.op not in POINT_TO_POINT:
                turn[i] = turns.get(call.role, 0)
                turns[call.role] = turn[i] + 1
    return CallPlan(number, messages, unit, parts, {}, counts, turn, turns)


def _vector(value: PerRank, ranks: int) -> Ints:
    return value if isinstance(value, np.ndarray) else np.full(ranks, value, np.int64)


def _payload_elems(call: Call) -> PerRank:
    """Elements of the tensor that the payload counts (traffic.full_elems)."""
    return call.out_elems if call.op in ("all_gather", "gather", "recv") else call.in_elems


# the machine -----------------------------------------------------------------------------------------------------------


_Flat: TypeAlias = tuple[int, int, bool, Ints, Ints]
"""A send or recv: program, instruction, whether it sends, and of each rank the key of its pair and its column."""


class _Done:
    """Something that ends; time: when, on each rank of the program; None: not known yet."""

    __slots__ = ("time",)

    def __init__(self, time: Ints | None = None) -> None:
        self.time = time


class _Opened:
    """Calls that will be launched as one; blocking: whether one of them has no handle."""

    __slots__ = ("blocking", "done")

    def __init__(self) -> None:
        self.done = _Done()
        self.blocking = False


class _Item:
    """Work in a stream's queue. after: what must have ended besides the work before it. posted: when a call arrived."""

    __slots__ = ("after", "done", "duration", "kind", "places", "posted", "ready", "step", "unit")

    def __init__(self, kind: int, step: int, places: tuple[int, ...], ready: Ints | None, after: _Done | None) -> None:
        self.kind = kind
        self.step = step
        self.places = places
        self.ready = ready
        self.after = after
        self.duration: Ints | int = 0
        self.done = _Done()
        self.posted: Ints | None = None
        self.unit: _Unit | _Message | None = None


_KERNEL, _WAIT, _CALL = range(3)


class _Stream:
    __slots__ = ("free", "queue", "tail")

    def __init__(self, free: Ints) -> None:
        self.free = free
        self.queue: deque[_Item] = deque()
        self.tail = _Done(free)


class _Unit:
    """One collective (or several launched as one) over all programs of a component."""

    __slots__ = ("component", "here", "key", "role")

    def __init__(self, key: tuple[str, int, int], component: _Component) -> None:
        self.key = key
        self.role = key[0]
        self.component = component
        self.here: dict[int, _Item] = {}


class _State:
    """A program in motion."""

    def __init__(self, number: int, program: Program, plan: CallPlan, start: Ints) -> None:
        self.number = number
        self.program = program
        self.plan = plan
        self.at = 0
        self.step = 0
        self.host = start
        self.start = start
        self.streams: dict[str, _Stream] = {COMPUTE: _Stream(start)}
        self.handles: dict[int, _Done] = {}
        self.counted: dict[str, int] = {}
        self.opened: dict[int, _Opened] = {}

    def stream(self, name: str) -> _Stream:
        found = self.streams.get(name)
        if found is None:
            found = self.streams[name] = _Stream(self.start)
        return found


class _Engine:
    def __init__(
        self,
        walked: Walked,
        costs: Costs,
        steps: int,
        seed: int,
        dtype: str,
        keep: Sequence[int] | None,
        start_ns: int,
        first_step: int,
    ) -> None:
        if not walked.programs:
            raise SimulationError("there is no program to run.")
        self.walked, self.costs, self.steps = walked, costs, steps
        self.start_ns, self.first_step = start_ns, first_step
        self.dtype = dtype
        self.index = group_index(walked)
        self.plans = [plan_of(p) for p in walked.programs]
        self.components: dict[tuple[str, int], _Component] = {}
        self.roles_done: set[str] = set()
        self.unit_costs: dict[tuple[int, ...], Ints] = {}
        self.units: dict[tuple[str, int, int], _Unit] = {}
        self.messages: list[_Message] = []
        self.message_at: list[dict[int, _Message]] = [{} for _ in walked.programs]
        self.posted: dict[tuple[int, int], tuple[_State, _Item]] = {}
        self.left: dict[tuple[int, int], int] = {}
        self.dirty: dict[int, None] = {}
        self.mismatches: list[Hang] = []
        wanted = None if keep is None else set(keep)
        self.states: list[_State] = []
        self.times: list[ProgramTimes] = []
        self.keep: list[Ints | None] = []
        self.durations: list[dict[int, Ints | int]] = []
        self.launch: list[Ints | int] = []
        self.call: list[Ints | int] = []
        self.noise: list[list[np.random.Generator]] = []
        for number, (program, plan) in enumerate(zip(walked.programs, self.plans, strict=True)):
            ranks = np.array(program.ranks, np.int64)
            chosen = range(len(ranks)) if wanted is None else [i for i, r in enumerate(program.ranks) if r in wanted]
            columns = np.array(list(chosen), np.int64)
            shape = (steps, len(program.instructions), len(columns))
            self.times.append(
                ProgramTimes(
                    program,
                    columns,
                    ranks[columns],
                    issue=np.full(shape, NEVER, np.int64),
                    start=np.full(shape, NEVER, np.int64),
                    end=np.full(shape, NEVER, np.int64),
                    finish=np.full(len(columns), NEVER, np.int64),
                )
            )
            self.keep.append(None if len(columns) == len(ranks) else columns)
            self.states.append(_State(number, program, plan, np.full(len(ranks), start_ns, np.int64)))
            self.durations.append(self._durations(program))
            self.launch.append(self._host_cost(program, costs.launch_ns))
            self.call.append(self._host_cost(program, costs.call_ns))
            seeded = [np.random.Generator(np.random.Philox(key=[seed, r])) for r in program.ranks]
            self.noise.append(seeded if costs.jitter else [])
        self._match_messages()

    # costs ---------------------------------------------------------------------------------------------------------

    def _host_cost(self, program: Program, ns: int, name: str | None = None) -> Ints | int:
        slow = {r: f for r, f in self.costs.slow_host.items() if r in program.ranks}
        for (rank, cost), factor in self.costs.slow_host_cost.items():
            if cost == name and rank in program.ranks:
                slow[rank] = slow.get(rank, 1.0) * factor
        if not slow:
            return ns
        return np.array([round(ns * slow.get(r, 1.0)) for r in program.ranks], np.int64)

    def _durations(self, program: Program) -> dict[int, Ints | int]:
        """Time of every kernel without jitter."""
        costs = self.costs
        slow = None
        if any(r in costs.slow_gpu for r in program.ranks):
            slow = np.array([costs.slow_gpu.get(r, 1.0) for r in program.ranks])
        known: dict[tuple[str, int, int], int] = {}
        found: dict[int, Ints | int] = {}
        for i, kernel in enumerate(program.instructions):
            if not isinstance(kernel, Compute):
                continue
            rate = costs.rate(kernel.kernel_class, self.dtype)
            if isinstance(kernel.flops, np.ndarray) or isinstance(kernel.memory_bytes, np.ndarray) or slow is not None:
                time = np.maximum(
                    np.asarray(kernel.flops) / rate, np.asarray(kernel.memory_bytes) / costs.memory_bytes_per_s
                )
                base = np.maximum(np.rint(time * 1e9), costs.kernel_ns)
                base = base if slow is None else np.rint(base * slow)
                found[i] = np.broadcast_to(base, (len(program.ranks),)).astype(np.int64)
            else:
                key = (kernel.kernel_class, kernel.flops, kernel.memory_bytes)
                if key not in known:
                    time_s = max(kernel.flops / rate, kernel.memory_bytes / costs.memory_bytes_per_s)
                    known[key] = max(round(time_s * 1e9), costs.kernel_ns)
                found[i] = known[key]
        return found

    def _jittered(self, state: _State) -> dict[int, Ints | int]:
        """Kernel times of the coming step."""
        plain = self.durations[state.number]
        if not self.noise[state.number] or not plain:
            return plain
        factors = np.stack([g.standard_normal(len(plain)) for g in self.noise[state.number]], axis=1)
        factors = np.maximum(1.0 + self.costs.jitter * factors, 0.1)
        return {i: np.rint(factors[n] * base).astype(np.int64) for n, (i, base) in enumerate(plain.items())}

    def _component(self, role: str, program: int) -> _Component:
        if role not in self.roles_done:
            self._make_components(role)
        return self.components[role, program]

    def _make_components(self, role: str) -> None:
        of = self.index.get(role)
        if of is None:
            raise SimulationError(f"a call is made on role {role}, and the job has no group of it.")
        program_of = np.full(len(of), -1, np.int64)
        for number, program in enumerate(self.walked.programs):
            program_of[np.array(program.ranks)] = number
        parent = list(range(len(self.walked.programs)))

        def root(a: int) -> int:
            while parent[a] != a:
                parent[a] = parent[parent[a]]
                a = parent[a]
            return a

        for group in self.walked.groups:
            if group.role == role:
                inside = np.unique(program_of[np.array(group.ranks)])
                if inside[0] < 0:
                    raise SimulationError(
                        f"group {group.description} {group.ranks[:8]} has a rank that has no program."
                    )
                for a, b in zip(inside[:-1].tolist(), inside[1:].tolist(), strict=True):
                    parent[root(b)] = root(a)
        tied: dict[int, list[int]] = {}
        for number, program in enumerate(self.walked.programs):
            if (of[np.array(program.ranks)] >= 0).any():
                tied.setdefault(root(number), []).append(number)
        for programs in tied.values():
            made = self._tied(role, programs, of)
            for number in programs:
                self.components[role, number] = made
        self.roles_done.add(role)

    def _tied(self, role: str, programs: list[int], of: Ints) -> _Component:
        ranks = [np.array(self.walked.programs[p].ranks) for p in programs]
        ends = np.cumsum([0, *map(len, ranks)])
        mine = of[np.concatenate(ranks)]
        order = np.argsort(mine, kind="stable")
        order = order[np.searchsorted(mine[order], 0) :]  # ranks without a group make no call
        ids, starts, sizes = np.unique(mine[order], return_index=True, return_counts=True)
        back = np.zeros(len(mine), np.intp)
        back[order] = np.arange(len(order))
        groups = [self.walked.groups[g] for g in ids.tolist()]
        links = [self.costs.link(role, self._span(g.ranks)) for g in groups]
        return _Component(
            programs,
            {p: slice(int(ends[i]), int(ends[i + 1])) for i, p in enumerate(programs)},
            order,
            starts,
            sizes.astype(np.int64),
            back,
            groups,
            np.array([link.alpha_ns for link in links], np.int64),
            np.array([link.bytes_per_s for link in links]),
            np.array([self._slowness(g.ranks) for g in groups]),
        )

    def _span(self, ranks: Sequence[int]) -> str:
        return INTRA if len({r // self.costs.ranks_per_node for r in ranks}) == 1 else INTER

    def _slowness(self, ranks: Sequence[int]) -> float:
        if not self.costs.slow_link:
            return 1.0
        inside = set(ranks)
        return max((s.factor for s in self.costs.slow_link if {s.source, s.target} <= inside), default=1.0)

    def _transfer(self, unit: _Unit) -> Ints:
        """Latency and transfer of a collective in each of its groups."""
        key = tuple(n for p in unit.component.programs for n in (p, *unit.here[p].places))
        known = self.unit_costs.get(key)
        if known is not None:
            return known
        component = unit.component
        total = np.zeros(len(component.groups))
        for turn in range(len(unit.here[component.programs[0]].places)):
            parts = []
            for p in component.programs:
                program = self.walked.programs[p]
                call = program.instructions[unit.here[p].places[turn]]
                assert isinstance(call, Call)
                parts.append(self._off_rank(program, call, component, p))
            total += component.largest(np.concatenate(parts)).astype(np.float64)
        found = component.alpha + np.rint(total * component.factor / component.beta * 1e9).astype(np.int64)
        self.unit_costs[key] = found
        return found

    def _off_rank(self, program: Program, call: Call, component: _Component, number: int) -> npt.NDArray[np.float64]:
        """Bytes that leave or enter each rank of a program in one call, the larger; one direction."""
        ranks = len(program.ranks)
        width = traffic.element_bytes(call.dtype)
        if width is None:
            raise SimulationError(f"a call has the element type {call.dtype!r}, whose size is not known.")
        sizes = component.spread(component.sizes)[component.offsets[number]]
        if call.op == "all_to_all" and call.in_splits is not None and call.out_splits is not None:
            place = np.array([self._group(call.role, r).ranks.index(r) for r in program.ranks], np.int64)
            rows = np.arange(ranks)
            sent, got = (s.sum(axis=1) - s[rows, place] for s in (call.in_splits, call.out_splits))
            rows_moved: npt.NDArray[np.float64] = (np.maximum(sent, got) * width).astype(np.float64)
            return rows_moved
        factors = np.array([float(traffic.off_rank_factor(call.op, n)) for n in sizes.tolist()])
        moved: npt.NDArray[np.float64] = (_vector(_payload_elems(call), ranks) * factors * width).astype(np.float64)
        return moved

    def _group(self, role: str, rank: int) -> Group:
        return self.walked.groups[int(self.index[role][rank])]

    # messages ------------------------------------------------------------------------------------------------------

    def _match_messages(self) -> None:
        """Sends and recvs of one step: the n-th from one rank to another on a role is the n-th received there."""
        roles: dict[str, int] = {}
        world = 1 + max(max(p.ranks) for p in self.walked.programs)
        flat: list[_Flat] = []
        for number, (program, plan) in enumerate(zip(self.walked.programs, self.plans, strict=True)):
            ranks = np.array(program.ranks, np.int64)
            for i, call in enumerate(program.instructions):
                if not isinstance(call, Call) or call.op not in POINT_TO_POINT:
                    continue
                if call.peer is None or len(call.peer) != len(ranks):
                    raise SimulationError(f"a {call.op} of ranks {program.ranks[:8]} does not say its peers.")
                role = roles.setdefault(call.role, len(roles)) * world
                sends = call.op == "send"
                source, target = (ranks, call.peer) if sends else (call.peer, ranks)
                first = plan.unit[i]
                message = self.message_at[number].get(first)
                if message is None:
                    message = _Message(len(self.messages), number, {})
                    self.messages.append(message)
                    self.message_at[number][first] = message
                cost = self._message_costs(call, source, target) if sends else np.zeros(len(ranks), np.int64)
                nobody = np.full(len(ranks), -1, np.int64)
                message.parts[i] = _Part(nobody, nobody.copy(), cost)
                flat.append((number, i, sends, (role + source) * world + target, np.arange(len(ranks))))
        if not flat:
            return
        for sides in (True, False):
            if not any(f[2] is sides for f in flat):
                for number, i, _, key, _ in flat:
                    self.message_at[number][self.plans[number].unit[i]].whole = False
                    self.plans[number].pair[i] = np.full(len(key), -1, np.int64)
                return
        self._pair({side: [f for f in flat if f[2] is side] for side in (True, False)})

    def _pair(self, lists: dict[bool, list[_Flat]]) -> None:
        """Ties each send (True) to its recv (False)."""
        keys: dict[bool, Ints] = {}
        where: dict[bool, Ints] = {}
        column: dict[bool, Ints] = {}
        for side, mine in lists.items():
            key = np.concatenate([f[3] for f in mine])
            order = np.argsort(key, kind="stable")
            key = key[order]
            keys[side] = key * _ORDINALS + (np.arange(len(key)) - np.searchsorted(key, key))
            where[side] = np.repeat(np.arange(len(mine)), [len(f[3]) for f in mine])[order]
            column[side] = np.concatenate([f[4] for f in mine])[order]
        at = np.minimum(np.searchsorted(keys[False], keys[True]), len(keys[False]) - 1)
        met = np.flatnonzero(keys[False][at] == keys[True])
        sends, recvs = met, at[met]
        units = {
            s: np.array([self.message_at[f[0]][self.plans[f[0]].unit[f[1]]].number for f in lists[s]]) for s in lists
        }
        costs = np.concatenate([self._part(f).cost for f in lists[True]])
        starts = np.cumsum([0, *(len(f[3]) for f in lists[True])])
        cost = costs[starts[where[True][sends]] + column[True][sends]]
        for side, ours, theirs in ((True, sends, recvs), (False, recvs, sends)):
            position = where[side][ours]
            order = np.argsort(position, kind="stable")
            cuts = np.searchsorted(position[order], np.arange(len(lists[side]) + 1))
            for n, entry in enumerate(lists[side]):
                chosen = order[cuts[n] : cuts[n + 1]]
                part = self._part(entry)
                to = column[side][ours[chosen]]
                part.unit[to] = units[not side][where[not side][theirs[chosen]]]
                part.column[to] = column[not side][theirs[chosen]]
                part.cost[to] = cost[chosen]
                pair = np.full(len(part.unit), -1, np.int64)
                pair[to] = met[chosen]
                self.plans[entry[0]].pair[entry[1]] = pair
        for message in self.messages:
            for part in message.parts.values():
                part.units = [u for u in np.unique(part.unit).tolist() if u >= 0]
                message.whole = message.whole and bool((part.unit >= 0).all())
            message.partners = frozenset(u for part in message.parts.values() for u in part.units)

    def _part(self, entry: _Flat) -> _Part:
        number, i = entry[:2]
        return self.message_at[number][self.plans[number].unit[i]].parts[i]

    def _message_costs(self, call: Call, source: Ints, target: Ints) -> Ints:
        width = traffic.element_bytes(call.dtype)
        if width is None:
            raise SimulationError(f"a send has the element type {call.dtype!r}, whose size is not known.")
        node = self.costs.ranks_per_node
        near = source // node == target // node
        intra, inter = (self.costs.link(call.role, span) for span in (INTRA, INTER))
        beta = np.where(near, intra.bytes_per_s, inter.bytes_per_s)
        factor = np.ones(len(source))
        for slow in self.costs.slow_link:
            factor[(source == slow.source) & (target == slow.target)] = slow.factor
        time = np.rint(_vector(_payload_elems(call), len(source)) * float(width) * factor / beta * 1e9)
        return np.where(near, intra.alpha_ns, inter.alpha_ns) + time.astype(np.int64)

    # running -------------------------------------------------------------------------------------------------------

    def run(self, allow_hang: bool) -> Timeline:
        self.jittered = [self._jittered(s) for s in self.states]
        self.dirty = dict.fromkeys(range(len(self.states)))
        while self.dirty:
            self._advance(self.states[self.dirty.popitem()[0]])
        for state, times in zip(self.states, self.times, strict=True):
            if state.step == self.steps:
                times.finish[:] = state.host[times.columns]
        hang = self._hang()
        if hang and not allow_hang:
            raise DeadlockError(hang[:8], max(0, len(hang) - 8))
        return Timeline(
            self.walked,
            self.costs,
            self.steps,
            self.first_step,
            self.start_ns,
            self.times,
            self.plans,
            hang or None,
            self.index,
        )

    def _advance(self, state: _State) -> None:
        while self._pump(state) | self._host(state):
            pass

    def _pump(self, state: _State) -> bool:
        """Advances the streams as far as they go; whether anything moved."""
        moved = again = False
        while True:
            for stream in tuple(state.streams.values()):
                while stream.queue and self._first(state, stream):
                    moved = again = True
            if not again:
                return moved
            again = False

    def _first(self, state: _State, stream: _Stream) -> bool:
        """Tries the first item of a queue; whether it is finished and gone."""
        item = stream.queue[0]
        if item.kind == _CALL:
            if item.done.time is None and item.posted is None:
                assert item.after is not None
                assert item.ready is not None
                if item.after.time is None:
                    return False
                item.posted = np.maximum(np.maximum(item.ready, stream.free), item.after.time)
                self._record(state, item, "start", item.posted)
                self._post(state, item)
            if item.done.time is None:
                return False
            stream.free = item.done.time
            self._record(state, item, "end", stream.free)
        elif item.kind == _KERNEL:
            assert item.ready is not None
            start: Ints = np.maximum(item.ready, stream.free)
            stream.free = np.add(start, item.duration, dtype=np.int64)
            self._record(state, item, "start", start)
            self._record(state, item, "end", stream.free)
            item.done.time = stream.free
        else:
            assert item.after is not None
            if item.after.time is None:
                return False
            stream.free = np.maximum(stream.free, item.after.time)
            item.done.time = stream.free
        stream.queue.popleft()
        return True

    def _record(self, state: _State, item: _Item, what: str, time: Ints) -> None:
        keep = self.keep[state.number]
        kept = time if keep is None else time[keep]
        array: Ints = getattr(self.times[state.number], what)
        for place in item.places:
            array[item.step, place] = kept

    def _post(self, state: _State, item: _Item) -> None:
        """A call has arrived on all ranks of a program: ends it, and those of other programs, if it was the last."""
        unit = item.unit
        if isinstance(unit, _Unit):
            unit.here[state.number] = item
            if len(unit.here) == len(unit.component.programs):
                self._end_collective(unit)
            return
        assert isinstance(unit, _Message)
        key = (item.step, unit.number)
        self.posted[key] = (state, item)
        self.left[key] = len(unit.partners) + 1
        for number in sorted({unit.number, *unit.partners}):
            there = self.posted.get((item.step, number))
            message = self.messages[number]
            if there is None or not message.whole or there[1].done.time is not None:
                continue
            if all((item.step, p) in self.posted for p in message.partners):
                self._end_message(message, *there)

    def _end_collective(self, unit: _Unit) -> None:
        component = unit.component
        said = {p: self._said(p, item) for p, item in unit.here.items()}
        if len(set(said.values())) > 1:
            self._mismatch(unit, said)
            return
        arrivals = [unit.here[p].posted for p in component.programs]
        together = np.concatenate([a for a in arrivals if a is not None])
        ends = component.largest(together).astype(np.int64) + self._transfer(unit)
        by_member = component.spread(ends)
        for p, item in unit.here.items():
            item.done.time = by_member[component.offsets[p]]
            self.dirty[p] = None
        del self.units[unit.key]

    def _said(self, program: int, item: _Item) -> tuple[str, ...]:
        calls = (self.walked.programs[program].instructions[i] for i in item.places)
        return tuple(c.op for c in calls if isinstance(c, Call))

    def _mismatch(self, unit: _Unit, said: dict[int, tuple[str, ...]]) -> None:
        for p, ops in said.items():
            others = tuple(r for q, o in said.items() if o != ops for r in self.walked.programs[q].ranks)
            there = next(o for q, o in said.items() if o != ops)
            call = f"{', '.join(ops)} on {unit.role}, where others call {', '.join(there)},"
            self.mismatches.append(Hang(self.walked.programs[p].ranks[0], call, others))

    def _end_message(self, message: _Message, state: _State, item: _Item) -> None:
        assert item.posted is not None
        end = item.posted
        for part in message.parts.values():
            if len(part.units) == 1:
                there = self.posted[item.step, part.units[0]][1].posted
                assert there is not None
                other = there[part.column]
            else:
                other = np.empty(len(end), np.int64)
                for number in part.units:
                    there = self.posted[item.step, number][1].posted
                    assert there is not None
                    here = part.unit == number
                    other[here] = there[part.column[here]]
            end = np.maximum(end, np.maximum(item.posted, other) + part.cost)
        item.done.time = end
        self.dirty[state.number] = None
        for number in {message.number, *message.partners}:
            key = (item.step, number)
            self.left[key] -= 1
            if self.left[key] == 0:
                del self.posted[key], self.left[key]

    def _host(self, state: _State) -> bool:
        """Issues instructions until one must wait or all are issued; whether any was issued."""
        number = state.number
        instructions = state.program.instructions
        times = self.times[number]
        keep = self.keep[number]
        launch, called = self.launch[number], self.call[number]
        moved = False
        while state.step < self.steps:
            if state.at == len(instructions):
                state.at = 0
                state.step += 1
                if state.step < self.steps and self.noise[number]:
                    self.jittered[number] = self._jittered(state)
                continue
            i, step = state.at, state.step
            what = instructions[i]
            before = state.host
            issued = before if keep is None else before[keep]
            if isinstance(what, Compute):
                state.host = before + launch
                item = _Item(_KERNEL, step, (i,), state.host, None)
                item.duration = self.jittered[number][i]
                self._queue(state, what.stream, item)
            elif isinstance(what, Call):
                state.host = before + called
                self._issue(state, i, what)
            elif isinstance(what, Wait):
                done = state.handles.get(what.handle)
                if done is None:
                    raise SimulationError(
                        f"ranks {state.program.ranks[:8]} wait for handle {what.handle}, which no call has."
                    )
                if what.host:
                    if done.time is None:
                        return moved
                    state.host = np.maximum(before, done.time)
                    times.start[step, i] = issued
                    times.end[step, i] = state.host if keep is None else state.host[keep]
                self._queue(state, COMPUTE, _Item(_WAIT, step, (i,), None, done))
            elif isinstance(what, Sync):
                if any(s.queue for s in state.streams.values()):
                    return moved
                for stream in state.streams.values():
                    state.host = np.maximum(state.host, stream.free)
                times.start[step, i] = issued
                times.end[step, i] = state.host if keep is None else state.host[keep]
            elif isinstance(what, Host):
                cost = self._host_cost(state.program, self.costs.host_ns.get(what.cost, 0), what.cost)
                state.host = before + cost
                times.start[step, i] = issued
                times.end[step, i] = state.host if keep is None else state.host[keep]
            else:
                assert isinstance(what, Begin | End)
            times.issue[step, i] = issued
            state.at += 1
            moved = True
        return moved

    def _queue(self, state: _State, name: str, item: _Item) -> None:
        stream = state.stream(name)
        stream.queue.append(item)
        stream.tail = item.done
        if len(stream.queue) == 1:
            self._first(state, stream)

    def _issue(self, state: _State, i: int, call: Call) -> None:
        plan = state.plan
        first = plan.unit[i]
        places = plan.parts[first]
        opened = state.opened.setdefault(first, _Opened())
        if call.handle is None:
            opened.blocking = True
        else:
            state.handles[call.handle] = opened.done
        if places[-1] != i:
            return
        del state.opened[first]
        begun = state.program.instructions[first]
        assert isinstance(begun, Call)
        item = _Item(_CALL, state.step, places, state.host, state.streams[COMPUTE].tail)
        item.done = opened.done
        if begun.op in POINT_TO_POINT:
            item.unit = self.message_at[state.number][first]
        else:
            component = self._component(begun.role, state.number)
            turn = state.step * plan.turns[begun.role] + plan.turn[first]
            key = (begun.role, component.programs[0], turn)
            item.unit = self.units.get(key)
            if item.unit is None:
                item.unit = self.units[key] = _Unit(key, component)
        self._queue(state, begun.stream or f"comm:{begun.role}", item)
        if opened.blocking:
            self._queue(state, COMPUTE, _Item(_WAIT, state.step, places, None, item.done))

    # orders that do not meet ---------------------------------------------------------------------------------------

    def _hang(self) -> list[Hang]:
        """What every rank's first unfinished call waits for; empty if all is finished."""
        if all(s.step == self.steps and not any(q.queue for q in s.streams.values()) for s in self.states):
            return []
        found = list(self.mismatches)
        for state in self.states:
            for stream in state.streams.values():
                if not stream.queue or stream.queue[0].kind != _CALL:
                    continue
                item = stream.queue[0]
                unit = item.unit
                first = state.program.instructions[item.places[0]]
                assert isinstance(first, Call)
                if item.posted is None or (
                    isinstance(unit, _Unit) and any(m.rank in state.program.ranks for m in found)
                ):
                    continue
                if isinstance(unit, _Unit):
                    found += self._missing(state, item, unit, first)
                else:
                    assert isinstance(unit, _Message)
                    found += self._unmet(state, item, unit)
        return found

    def _place(self, call: Call, step: int) -> str:
        where = call.where
        more = "" if where.microbatch is None else f", micro-batch {where.microbatch}"
        more += "" if where.layer is None else f", layer {where.layer}"
        return f"{where.phase}{more}, step {self.first_step + step}"

    def _missing(self, state: _State, item: _Item, unit: _Unit, call: Call) -> list[Hang]:
        found = []
        absent = {r for p in unit.component.programs if p not in unit.here for r in self.walked.programs[p].ranks}
        for rank in state.program.ranks:
            group = self._group(call.role, rank)
            missing = tuple(r for r in group.ranks if r in absent)
            if missing:
                text = f"{call.op} on {call.role} ({self._place(call, item.step)})"
                found.append(Hang(rank, text, missing))
        return found

    def _unmet(self, state: _State, item: _Item, message: _Message) -> list[Hang]:
        found = []
        for i, part in message.parts.items():
            call = state.program.instructions[i]
            assert isinstance(call, Call)
            assert call.peer is not None
            for column, rank in enumerate(state.program.ranks):
                unit = int(part.unit[column])
                if unit < 0 or (item.step, unit) not in self.posted:
                    to = "to" if call.op == "send" else "from"
                    text = f"{call.op} {to} rank {call.peer[column]} on {call.role} ({self._place(call, item.step)})"
                    found.append(Hang(rank, text, (int(call.peer[column]),)))
        return found
