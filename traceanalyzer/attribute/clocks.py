"""The clocks of a run's ranks against each other: offset, drift and steps, from calls that complete together.

A call's end is one instant; rank r shows it at instant + offset_r + drift_r * (instant - base). The unknown instants drop out
when each call's mean is subtracted, so the system has two unknowns a rank however many calls there are. Ranks that no call
connects have no common clock. A few calls that end far apart (on one rank other work was counted in) must not move a clock:
rounds of weights, the less the farther apart a call ends, find a fit that most calls agree on, and those beyond 5 times its
median spread are left out of the last one.

A clock may be set while it runs (NTP steps it). Where what is left of a rank jumps from one call to the next and stays, its
clock has another offset from that call on; the drift is one. Of a clock that is set back, the times that it shows twice are
taken to be those after. A drift that no clock has is not fitted.

Devices of one host show its clock, but for what the conversion of their times leaves. So ranks of one host that no call
connects are compared by that clock, and ranks that calls connect to one of them go along.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]
_Bools = npt.NDArray[np.bool_]

_ROUNDS = 12
"""Rounds of weights, after which the fit no longer moves by what matters."""

_LEAST_FOR_DRIFT = 8
"""Calls of a rank from which a drift is fitted."""

_MOST_DRIFT = 500e-6
"""What clocks are steered by at most (NTP). A fit with more has found something else: a step, or calls at one time only."""

_LEAST_FOR_STEP = 4
"""Calls on either side of a step."""

_STEP_WINDOW = 16
"""Calls on either side that are compared to find a step."""

_STEP_OVER_NOISE = 8.0
"""How much larger than the scatter from call to call a jump must be to be a step of the clock."""

_LEAST_STEP_NS = 1000
"""Less is within what traces resolve."""

_TOGETHER_NS = 1_000_000
"""Steps of several ranks within this are one."""

_MOST_STEPS = 16
"""Rounds in which steps are looked for."""


_OPEN_ON_HOST_NS = 50_000
"""What is left open between devices of one host that no call connects: on a node of 8 A100 the ends of 84 all-reduces lay up
to 49 us apart by clocks as recorded."""


class Ends(NamedTuple):
    """Ends of calls that complete together, ordered by call: which call, which rank, when (as recorded)."""

    call: Ints
    rank: Ints
    end: Ints


class _Block(NamedTuple):
    """Calls of the same clocks: places in Ends (calls x members), and the members' clocks and ranks as indexes."""

    where: Ints
    clocks: Ints
    ranks: Ints


class Clock(NamedTuple):
    """One clock of one rank: the rank has several where it was set. since_ns: by that clock; None: the first."""

    rank: int
    since_ns: int | None
    reference: int
    offset: float
    drift: float | None
    calls: int
    residuals: _Floats | None
    evidence: str


class Clocks:
    """The clocks of all ranks. ``ranks``: every rank that is asked for; those without ends have the clock of their host, or
    keep theirs as recorded. ``hosts``: the host of a rank; None: not known.
    """

    def __init__(self, ranks: Iterable[int], ends: Ends, hosts: Mapping[int, str | None] | None = None) -> None:
        self.base = int(ends.end.min()) if len(ends.end) else 0
        self.ranks: Ints = np.unique(np.concatenate([np.array(sorted(ranks), np.int64), ends.rank])).astype(np.int64)
        self._since: list[list[int]] = [[] for _ in self.ranks]
        self._offset: list[list[float]] = [[0.0] for _ in self.ranks]
        self._drift: list[float | None] = [None] * len(self.ranks)
        self._left: list[list[_Floats]] = [[] for _ in self.ranks]
        self._calls: list[list[int]] = [[0] for _ in self.ranks]
        self._reference: Ints = np.arange(len(self.ranks), dtype=np.int64)
        self._open: Ints = np.zeros(len(self.ranks), np.int64)
        self._call_open: tuple[Ints, Ints] = (np.empty(0, np.int64), np.empty(0, np.int64))
        self._by_host: set[int] = set()
        parts = [np.array([i], np.int64) for i in range(len(self.ranks))]
        if len(ends.end):
            parts = self._by_calls(ends)
        self._join(parts, hosts or {})

    def _by_calls(self, ends: Ends) -> list[Ints]:
        """Fits the clocks of ranks that calls connect; gives the sets of places in ``ranks`` that are connected."""
        where = np.searchsorted(self.ranks, ends.rank)
        part_of = np.empty(len(self.ranks), np.int64)
        parts = _connected(len(self.ranks), where, _numbers(ends.call))
        for i, part in enumerate(parts):
            part_of[part] = i
        order = np.argsort(part_of[where], kind="stable")
        cuts = np.searchsorted(part_of[where][order], np.arange(len(parts) + 1))
        for part, low, high in zip(parts, cuts, cuts[1:], strict=False):
            if high > low:
                inside = order[low:high]
                self._fit(part, where[inside], ends.end[inside], ends.call[inside])
        order = np.argsort(self._call_open[0], kind="stable")
        self._call_open = self._call_open[0][order], self._call_open[1][order]
        return parts

    def _join(self, parts: list[Ints], hosts: Mapping[int, str | None]) -> None:
        """Lets sets of ranks that share a host have one reference: that of the set with the lowest rank.

        A clock that was set says no more which of its times a clock of another set shows: its set stays apart.
        """
        parts = sorted(parts, key=lambda p: int(p[0]))
        host = [hosts.get(rank) for rank in self.ranks.tolist()]
        at_host: dict[str | None, list[int]] = {}
        for n, part in enumerate(parts):
            for name in dict.fromkeys(host[i] for i in part.tolist()):
                at_host.setdefault(name, []).append(n)
        free = [not any(self._since[i] for i in part.tolist()) for part in parts]
        joined = [False] * len(parts)
        for n, part in enumerate(parts):
            if joined[n] or not free[n]:
                continue
            joined[n] = True
            reached = part.tolist()
            seen = {None}
            for known in reached:  # grows while it is gone through
                if host[known] in seen:
                    continue
                seen.add(host[known])
                for other in at_host[host[known]]:
                    if free[other] and not joined[other]:
                        joined[other] = True
                        members = parts[other].tolist()
                        self._follow(parts[other], known, next(i for i in members if host[i] == host[known]))
                        reached += members
            if len(reached) > len(part):
                self._by_host |= set(reached)
                alone = [i for i in reached if not self._calls[i][0]]
                self._open[alone] = np.maximum(self._open[alone], _OPEN_ON_HOST_NS)

    def _follow(self, part: Ints, known: int, same: int) -> None:
        """Gives a set of ranks the reference of the rank at ``known``; one of them, at ``same``, shows its clock."""
        offset = self._offset[known][0] - self._offset[same][0]
        drifts = self._drift[known], self._drift[same]
        drift = (drifts[0] or 0.0) - (drifts[1] or 0.0)
        for i in part.tolist():
            self._offset[i] = [self._offset[i][0] + offset]
            self._drift[i] = None if drifts == (None, None) else (self._drift[i] or 0.0) + drift
            self._reference[i] = self._reference[known]
            self._open[i] = max(int(self._open[i]), int(self._open[known]), _OPEN_ON_HOST_NS)

    def index(self, ranks: Ints) -> Ints:
        """Places of ranks in ``ranks``."""
        return np.searchsorted(self.ranks, ranks).astype(np.int64)

    def aligned(self, ranks: Ints, times: Ints) -> Ints:
        """Times of these ranks' clocks by their references' ones, to the nearest ns."""
        return times - self.ahead(ranks, times)

    def ahead(self, ranks: Ints, times: Ints) -> Ints:
        """How far each rank's clock is ahead of its reference when it shows this time, to the nearest ns."""
        at = self.index(ranks)
        drift = np.array([d or 0.0 for d in self._drift])[at]
        offset = np.array([o[0] for o in self._offset])[at]
        for i, since in enumerate(self._since):
            if since:
                mine = np.flatnonzero(at == i)
                offset[mine] = np.array(self._offset[i])[np.searchsorted(np.array(since), times[mine], side="right")]
        found: Ints = np.rint(offset + drift * ((times - self.base) - offset)).astype(np.int64)
        return found

    def reference(self, ranks: Ints) -> Ints:
        """The rank whose clock each rank's is aligned to."""
        found: Ints = self.ranks[self._reference[self.index(ranks)]]
        return found

    def open_ns(self, ranks: Ints) -> Ints:
        """What alignment leaves open at each rank: the largest of its groups' 95th percentiles of how far apart calls end."""
        found: Ints = self._open[self.index(ranks)]
        return found

    def open_of_calls(self, calls: Ints, begins: Ints, ranks: Ints) -> Ints:
        """What alignment leaves open between the ranks of each row's call, which begins at ``begins``.

        The 95th percentile over the calls of the same ranks that complete together; where the row's call is none of them, the
        largest of its ranks'.
        """
        if not len(calls):
            return calls
        largest = np.maximum.reduceat(self.open_ns(ranks), begins)
        numbers, left = self._call_open
        if len(numbers):
            at = np.minimum(np.searchsorted(numbers, calls[begins]), len(numbers) - 1)
            largest = np.where(numbers[at] == calls[begins], left[at], largest)
        found: Ints = np.repeat(largest, np.diff(np.append(begins, len(calls))))
        return found

    def table(self) -> list[Clock]:
        """Every clock, by rank and time."""
        found: list[Clock] = []
        for i, rank in enumerate(self.ranks.tolist()):
            for n, offset in enumerate(self._offset[i]):
                found.append(
                    Clock(
                        rank,
                        self._since[i][n - 1] if n else None,
                        int(self.ranks[self._reference[i]]),
                        offset,
                        self._drift[i],
                        self._calls[i][n],
                        self._left[i][n] if self._left[i] else None,
                        "calls" if any(self._calls[i]) else "host" if i in self._by_host else "recorded",
                    )
                )
        return found

    def _fit(self, part: Ints, where: Ints, end: Ints, call: Ints) -> None:
        """Fits the clocks of one connected set of ranks, and again with every step that is found."""
        place = np.full(len(self.ranks), -1, np.int64)
        place[part] = np.arange(len(part))
        rank, times = place[where], (end - self.base).astype(np.float64)
        numbers, call = call, _numbers(call)
        alike = _blocks(call, rank, rank)
        enough = bool((np.bincount(rank, minlength=len(part)) >= _LEAST_FOR_DRIFT).all()) and len(part) > 1
        steps: list[list[int]] = [[] for _ in part]

        def fitted() -> tuple[_Fit, bool]:
            if enough:
                fit = _Fit.of(rank, times, call, steps, len(part), True)
                if np.abs(fit.drift).max() <= _MOST_DRIFT:
                    return fit, True
            return _Fit.of(rank, times, call, steps, len(part), False), False

        fit, with_drift = fitted()
        for _ in range(_MOST_STEPS):
            found = _steps(alike, end, fit)
            if not found:
                break
            for i, since in found:
                steps[i] = sorted([*steps[i], since - self.base])
            fit, with_drift = fitted()
        for block in alike:
            spread = np.ptp(fit.left[block.where], axis=1)
            open_ns = int(np.ceil(np.quantile(spread, 0.95, method="higher") - 1e-3))  # less is the arithmetic's own
            members = part[block.ranks]
            self._open[members] = np.maximum(self._open[members], open_ns)
            theirs = numbers[block.where[:, 0]]
            self._call_open = (
                np.concatenate([self._call_open[0], theirs]),
                np.concatenate([self._call_open[1], np.full(len(theirs), open_ns)]),
            )
        of_rank = np.argsort(rank, kind="stable")
        cuts = np.searchsorted(rank[of_rank], np.arange(len(part) + 1))
        for i, where_it_is in enumerate(part.tolist()):
            mine = of_rank[cuts[i] : cuts[i + 1]]
            which = fit.clock[mine] - fit.first_clock[i]
            self._since[where_it_is] = [s + self.base for s in steps[i]]
            self._offset[where_it_is] = fit.offset[fit.first_clock[i] : fit.first_clock[i + 1]].tolist()
            self._drift[where_it_is] = float(fit.drift[i]) if with_drift else None
            self._calls[where_it_is] = [int((which == n).sum()) for n in range(len(steps[i]) + 1)]
            self._left[where_it_is] = [np.abs(fit.left[mine[which == n]]) for n in range(len(steps[i]) + 1)]
            self._reference[where_it_is] = part[0]


class _Fit(NamedTuple):
    """One fit: per end its clock and what is left of it; offsets per clock, drifts per rank, spreads per call.

    first_clock: the first clock of each rank, and how many there are.
    """

    clock: Ints
    left: _Floats
    offset: _Floats
    drift: _Floats
    spread: _Floats
    first_clock: Ints

    @classmethod
    def of(
        cls, rank: Ints, times: _Floats, call: Ints, steps: Sequence[Sequence[int]], ranks: int, with_drift: bool
    ) -> _Fit:
        """Fits with the steps as given (times after the base, by the clock that steps)."""
        first = np.concatenate([[0], np.cumsum([len(s) + 1 for s in steps])]).astype(np.int64)
        clock = first[rank]
        for i in (i for i, s in enumerate(steps) if s):
            mine = np.flatnonzero(rank == i)
            clock[mine] += np.searchsorted(np.array(steps[i], np.float64), times[mine], side="right")
        blocks = _blocks(call, clock, rank)
        scale = float(np.abs(times).max()) or 1.0
        rows = [times[b.where] for b in blocks]
        weights: list[_Floats] = [np.ones(len(r)) for r in rows]

        def solved() -> tuple[_Floats, _Floats, list[_Floats]]:
            offset, drift = _solve(blocks, rows, weights, int(first[-1]), ranks, with_drift, scale)
            return offset, drift, [_left(r, b, offset, drift) for r, b in zip(rows, blocks, strict=True)]

        offset, drift, left = solved()
        for _ in range(_ROUNDS):
            weights = [1.0 / np.maximum(np.ptp(rest, axis=1), 1.0) for rest in left]
            offset, drift, left = solved()
        # the same weight for all but those that still end far apart, if the rest connects the clocks too
        spreads = [np.ptp(rest, axis=1) for rest in left]
        limit = 5 * float(np.median(np.concatenate(spreads))) + 1.0
        weights = [(spread <= limit).astype(np.float64) for spread in spreads]
        kept = [b.clocks for b, weight in zip(blocks, weights, strict=True) if weight.any()]
        members = np.concatenate(kept) if kept else np.empty(0, np.int64)
        numbers = np.repeat(np.arange(len(kept)), [len(k) for k in kept])
        if len(_connected(int(first[-1]), members, numbers)) == 1:
            offset, drift, left = solved()
        whole = np.zeros(len(times))
        for b, rest in zip(blocks, left, strict=True):
            whole[b.where] = rest
        spread = np.concatenate([np.ptp(rest, axis=1) for rest in left])
        return cls(clock, whole, offset, drift, spread, first)


def _numbers(call: Ints) -> Ints:
    """Calls numbered from 0 in their order."""
    return np.cumsum(np.concatenate([[0], np.diff(call) != 0])).astype(np.int64) if len(call) else call


def _blocks(call: Ints, clock: Ints, rank: Ints) -> list[_Block]:
    """Calls by who takes part; ends of a call lie together."""
    starts = np.flatnonzero(np.concatenate([[True], np.diff(call) != 0]))
    sizes = np.diff(np.append(starts, len(call)))
    found: list[_Block] = []
    for size in np.unique(sizes).tolist():
        where = starts[sizes == size][:, None] + np.arange(size)
        members = np.ascontiguousarray(clock[where])
        rows = members.view(np.dtype((np.void, members.dtype.itemsize * size))).ravel()
        _, one, which = np.unique(rows, return_index=True, return_inverse=True)
        order = np.argsort(which, kind="stable")
        for i, group in zip(one, np.split(order, np.cumsum(np.bincount(which))[:-1]), strict=True):
            found.append(_Block(where[group], members[i], rank[where[i]]))
    return found


def _connected(count: int, members: Ints, call: Ints) -> list[Ints]:
    """The sets of 0..count-1 that calls connect: labels fall to the lowest neighbour's until none falls."""
    label = np.arange(count, dtype=np.int64)
    while len(call):
        lowest = np.full(int(call.max()) + 1, count, np.int64)
        np.minimum.at(lowest, call, label[members])
        fallen = label.copy()
        np.minimum.at(fallen, members, lowest[call])
        fallen = fallen[fallen]
        if (fallen == label).all():
            break
        label = fallen
    order = np.argsort(label, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(label[order])) + 1)


def _solve(
    blocks: Sequence[_Block],
    rows: Sequence[_Floats],
    weights: Sequence[_Floats],
    clocks: int,
    ranks: int,
    with_drift: bool,
    scale: float,
) -> tuple[_Floats, _Floats]:
    """Offsets of clocks and drifts of ranks by weighted least squares; those of the first are 0.

    Times are divided by ``scale`` so that both unknowns are alike.
    """
    size = clocks + (ranks if with_drift else 0)
    normal, right = np.zeros((size, size)), np.zeros(size)
    for block, times, weight in zip(blocks, rows, weights, strict=True):
        instants = times.mean(axis=1)
        apart = times - instants[:, None]
        centre = np.eye(len(block.clocks)) - 1.0 / len(block.clocks)
        terms = [(block.clocks, np.ones(len(times))), (clocks + block.ranks, instants / scale)]
        for where, left in terms[: 1 + with_drift]:
            right[where] += (weight * left) @ apart
            for other_where, other in terms[: 1 + with_drift]:
                normal[np.ix_(where, other_where)] += centre * float((weight * left) @ other)
    free = np.array([i for i in range(size) if i not in (0, clocks)], np.int64)
    found = np.zeros(size)
    inner = normal[np.ix_(free, free)]
    # calls that all end at one time say nothing of a drift: the smallest weight on 0 keeps the system solvable
    ridge = 1e-13 * float(np.trace(inner)) * np.eye(len(inner))
    found[free] = np.linalg.solve(inner + ridge, right[free])
    return found[:clocks], found[clocks:] / scale if with_drift else np.zeros(ranks)


def _left(rows: _Floats, block: _Block, offset: _Floats, drift: _Floats) -> _Floats:
    """Each end's distance from its call's mean, by aligned clocks."""
    ahead = offset[block.clocks]
    aligned = rows - ahead - drift[block.ranks] * (rows - ahead)
    found: _Floats = aligned - aligned.mean(axis=1, keepdims=True)
    return found


# -- steps -----------------------------------------------------------------------------------------------------------------


def _steps(alike: Sequence[_Block], end: Ints, fit: _Fit) -> list[tuple[int, int]]:
    """The largest jump that is left, with all ranks that jump alike: rank and the first end it shows after.

    Looked for in the calls of the same ranks, one set after another: ranks of one host jump together, and of their calls
    among themselves nothing is left. Two sides of a call jump against each other, and which of them was set cannot be told
    from the calls alone: it is taken to be the side that jumps by more, as the fewer ranks do; of equal ones the side without
    the reference.
    """
    jumps: dict[int, tuple[float, int]] = {}
    for block in alike:
        for column, rank in enumerate(block.ranks.tolist()):
            mine = block.where[:, column]
            found = _jump(_level(fit.left[mine], end[mine]), fit.clock[mine])
            if found is not None and abs(found[0]) > abs(jumps.get(rank, (0.0, 0))[0]):
                jumps[rank] = (found[0], int(end[mine[found[1]]]))
    if not jumps:
        return []
    sides = [{i: j for i, j in jumps.items() if (j[0] > 0) == up} for up in (False, True)]
    largest = [max((abs(j) for j, _ in side.values()), default=0.0) for side in sides]
    without = 0 if 0 not in sides[0] else 1
    chosen = without
    if largest[1 - without] > 1.1 * largest[without] or not sides[without]:
        chosen = 1 - without
    found_all = {i: at for i, (jump, at) in sides[chosen].items() if abs(jump) >= 0.7 * largest[chosen]}
    # one clock that several ranks show is set at one time: where their first ends after it lie close, the earliest holds
    first = min(found_all.values())
    return [(i, first if abs(at - first) <= 2 * largest[chosen] + _TOGETHER_NS else at) for i, at in found_all.items()]


def _level(left: _Floats, end: Ints) -> _Floats:
    """What is left of one rank without its slope: a drift that was fitted across a step tilts both sides of it."""
    lag = max(1, min(_STEP_WINDOW, len(left) // 8))
    time = (end - end[0]).astype(np.float64)
    over = time[lag:] - time[:-lag]
    if not (over > 0).any():
        return left
    slope = float(np.median((left[lag:] - left[:-lag])[over > 0] / over[over > 0]))
    found: _Floats = left - slope * time
    return found


def _jump(left: _Floats, clock: Ints) -> tuple[float, int] | None:
    """The largest lasting jump in what is left of one rank, in order of time: its height and the place it is first seen."""
    n = len(left)
    width = min(_STEP_WINDOW, max(_LEAST_FOR_STEP, n // 4))
    if n < 2 * width:
        return None
    medians = np.median(np.lib.stride_tricks.sliding_window_view(left, width), axis=1)
    height = medians[width:] - medians[:-width]
    # a step that is known already is no new one
    whole = (clock[2 * width - 1 :] == clock[: n - 2 * width + 1]) if n >= 2 * width else np.empty(0, bool)
    height = np.where(whole, height, 0.0)
    if not len(height):
        return None
    best = int(np.argmax(np.abs(height)))
    jump = float(height[best])
    # where exactly: the place from which on the ends fit the later level better than the earlier one
    window = left[best : best + 2 * width]
    low, high = medians[best], medians[best + width]
    gain = np.cumsum(np.abs(window - low) - np.abs(window - high))
    split = best + int(np.argmin(gain)) + 1
    levels = np.where(np.arange(best, best + 2 * width) < split, low, high)
    rest = window - levels
    noise = max(float(np.median(np.abs(rest))), float(np.median(np.abs(np.diff(left)))), 1.0)
    if abs(jump) < max(_LEAST_STEP_NS, _STEP_OVER_NOISE * noise) or min(split, n - split) < _LEAST_FOR_STEP:
        return None
    return jump, split


# -- rows ------------------------------------------------------------------------------------------------------------------


def rows(clocks: Clocks, hosts: Mapping[int, str | None]) -> list[tuple[object, ...]]:
    """Rows of the table clock: rank, host, reference, base, since, offset, drift (ppb), calls, median, p95 and largest
    residual, what is left open between ranks, evidence."""
    found: list[tuple[object, ...]] = []
    for clock in clocks.table():
        quantiles: list[int | None] = [None, None, None]
        if clock.residuals is not None and len(clock.residuals):
            quantiles = [int(q) for q in np.quantile(clock.residuals, [0.5, 0.95, 1.0], method="higher")]
        found.append(
            (
                clock.rank,
                hosts.get(clock.rank),
                clock.reference,
                clocks.base,
                clock.since_ns,
                round(clock.offset),
                None if clock.drift is None else clock.drift * 1e9,
                clock.calls,
                *quantiles,
                int(clocks.open_ns(np.array([clock.rank]))[0]) if clock.calls or clock.evidence == "host" else None,
                clock.evidence,
            )
        )
    return found


def spreads(clocks: Clocks, ends: Ends) -> pa.Table:
    """Table end_spread: match_id, and from the first end to the last as recorded and by aligned clocks."""
    starts = np.flatnonzero(np.concatenate([[True], np.diff(ends.call) != 0])) if len(ends.call) else ends.call
    aligned = clocks.aligned(ends.rank, ends.end)
    apart = [
        np.maximum.reduceat(t, starts) - np.minimum.reduceat(t, starts) if len(starts) else t
        for t in (ends.end, aligned)
    ]
    return pa.table({"match_id": ends.call[starts], "recorded_ns": apart[0], "aligned_ns": apart[1]})
