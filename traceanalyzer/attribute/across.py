"""One call as all its ranks saw it: matching over ranks, clocks, arrivals and lateness, as small tables of a run.

============== ========================================================================================
table          a row is
============== ========================================================================================
matched_call   one call over all ranks that recorded it
matched_member one rank's part in it, with its time
unmatched_call a call that no other rank's call was matched to, and why
clock          the clock of one rank against the reference rank of those it is connected to
arrival        when one rank came to one call, by aligned clocks, and what of its time is transfer
lateness       how much later than the first it came, what of that is its own, and who owns the rest
============== ========================================================================================

Calls are matched by Comms Id, else by the group's sequence number; where neither was recorded, by order, and only where
all ranks of a group recorded the same calls in the same order (of the whole recording, else of the step). Clocks come from
calls that complete together on all ranks; sends, broadcasts and reduces do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traceanalyzer.run import Run

TOGETHER: frozenset[str] = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Operations that no rank can complete before the last one has come."""

_TIMED = ("kernel", "backend_range")

_ROUNDS = 12
"""Rounds of weights, after which the fit no longer moves by what matters."""

_LEAST_FOR_DRIFT = 8
"""Calls of a rank from which a drift is fitted."""

COLUMNS: dict[str, dict[str, tuple[pa.DataType, str]]] = {
    "matched_call": {
        "match_id": (pa.int64(), "Number of the matched call in this run."),
        "evidence": (pa.string(), "comms_id, seq (group and sequence number), order (an inference)."),
        "op": (pa.string(), "Operation; send for a send and its recv."),
        "role": (pa.string(), "Role of the group; null where it is not known, or the ranks disagree."),
        "step": (pa.int64(), "Step on the lowest rank; null: outside every step."),
        "dtype": (pa.string(), "Element type."),
        "group_size": (pa.int32(), "Ranks that take part; null: not recorded."),
        "payload_bytes": (pa.int64(), "Payload, the largest of the ranks'; null: not known."),
        "first_rank": (pa.int32(), "Lowest rank that recorded it."),
        "members": (pa.int32(), "Ranks that recorded it."),
        "timed": (pa.int32(), "Ranks that recorded its time."),
        "complete": (pa.bool_(), "Whether all ranks of the group recorded it with its time."),
        "member_ranks": (pa.list_(pa.int32()), "Ranks that recorded it, ascending."),
        "shared": (pa.bool_(), "Whether its time is also that of other calls that were launched as one with it."),
        "hosts": (pa.int32(), "Hosts of its ranks; null where one is not known."),
    },
    "matched_member": {
        "match_id": (pa.int64(), "The call."),
        "rank": (pa.int32(), "Global rank."),
        "call_id": (pa.int64(), "Number of the call on the rank."),
        "start_ns": (pa.int64(), "Start of its work as recorded; null: no time."),
        "end_ns": (pa.int64(), "End of its work as recorded; null: no time."),
    },
    "unmatched_call": {
        "rank": (pa.int32(), "Global rank."),
        "call_id": (pa.int64(), "Number of the call on the rank."),
        "reason": (pa.string(), "Why it has no counterpart."),
    },
    "clock": {
        "rank": (pa.int32(), "Global rank."),
        "host": (pa.string(), "Its host; null: not recorded."),
        "reference_rank": (
            pa.int32(),
            (
                "The rank whose clock is taken as right: the lowest that is connected by calls. Clocks of different "
                "references cannot be compared."
            ),
        ),
        "base_ns": (pa.int64(), "The time at which offset_ns holds, by the reference's clock."),
        "offset_ns": (pa.int64(), "How far this clock is ahead of the reference at base_ns."),
        "drift_ppb": (pa.float64(), "How much faster it runs, in 1e-9; null: too few calls, taken as 0."),
        "calls": (pa.int64(), "Calls the figures rest on."),
        "residual_median_ns": (pa.int64(), "Median of what is left at this rank's ends; null: nothing to take it of."),
        "residual_p95_ns": (pa.int64(), "95th percentile of it: smaller differences are not claimed."),
        "residual_max_ns": (pa.int64(), "The largest."),
    },
    "end_spread": {
        "match_id": (pa.int64(), "A call that completes together."),
        "recorded_ns": (pa.int64(), "From the first end to the last, clocks as recorded."),
        "aligned_ns": (pa.int64(), "The same by aligned clocks."),
    },
    "arrival": {
        "match_id": (pa.int64(), "The call."),
        "rank": (pa.int32(), "Global rank."),
        "arrival_ns": (pa.int64(), "Start of its work by the reference's clock."),
        "end_ns": (pa.int64(), "End of it by the reference's clock."),
        "dur_ns": (pa.int64(), "Its duration as recorded."),
        "after_first_ns": (pa.int64(), "How much later than the first rank it came."),
        "last": (pa.bool_(), "Whether it came last; of several the lowest rank."),
        "transfer_ns": (pa.int64(), "Duration on the last rank to come; null: not all ranks were recorded."),
        "waiting_ns": (pa.int64(), "dur_ns beyond the transfer, not below 0; null: likewise."),
        "residual_ns": (pa.int64(), "What the clocks leave open between ranks: smaller differences mean nothing."),
    },
    "lateness": {
        "match_id": (pa.int64(), "The call."),
        "rank": (pa.int32(), "Global rank."),
        "late_ns": (pa.int64(), "How much later than the first rank it came."),
        "own_ns": (
            pa.int64(),
            "Part that arose on the rank itself since its previous call with others ended; null: no earlier call.",
        ),
        "inherited_ns": (pa.int64(), "Part it brought along: that earlier call ended later for it than for the first."),
        "owner_rank": (
            pa.int32(),
            "The rank that the larger part leads back to, through earlier calls; null: the chain leaves the recording.",
        ),
        "owner_match_id": (pa.int64(), "The call in which the owner was late by itself."),
        "chain": (pa.int32(), "Earlier calls it was followed through."),
        "outside": (pa.bool_(), "Whether the chain leaves the recorded ranks or the recording."),
    },
}
"""Columns of every table: type and meaning. Times are ns."""


class _Call(NamedTuple):
    """One call of one rank; start, end: null without a time. group: what its group is called on every rank."""

    rank: int
    call_id: int
    op: str
    group: Hashable
    seq: int | None
    comms_id: int | None
    size: int | None
    peer: int | None
    step: int | None
    role: str | None
    dtype: str | None
    payload: int | None
    start: int | None
    end: int | None
    at: int
    shared: bool


class _Match(NamedTuple):
    evidence: str
    calls: list[_Call]


def make(run: Run) -> None:
    """Makes all tables. Needs an attached run."""
    calls, unmatched, timed = _calls(run)
    matches = _matches(calls, unmatched)
    hosts = dict(run.tuples("SELECT rank, any_value(host) FROM rank WHERE rank IS NOT NULL GROUP BY rank"))
    _write(run, "matched_call", [_row(i, m, hosts) for i, m in enumerate(matches)])
    _write(
        run,
        "matched_member",
        [(i, c.rank, c.call_id, c.start, c.end) for i, m in enumerate(matches) for c in m.calls],
    )
    _write(run, "unmatched_call", sorted(unmatched))
    clocks = Clocks.of(matches)
    _write(run, "clock", clocks.rows(hosts))
    _write(run, "end_spread", clocks.spreads(matches))
    arrivals = _arrivals(matches, clocks)
    _write(run, "arrival", [row for found in arrivals for row in found.rows()])
    seen = {(rank, call) for a in arrivals for rank, call in zip(a.ranks, a.calls, strict=True)}
    _write(
        run, "lateness", _lateness(arrivals, [_Alone.of(c, clocks) for c in timed if (c.rank, c.call_id) not in seen])
    )


def _write(run: Run, name: str, rows: Sequence[tuple[Any, ...]]) -> None:
    columns = COLUMNS[name]
    run.table(
        name,
        pa.table({c: pa.array([r[i] for r in rows], dtype) for i, (c, (dtype, _)) in enumerate(columns.items())}),
    )


# -- matching ------------------------------------------------------------------------------------------------------------

_CALLS = f"""
WITH groups AS (
  SELECT rank, group_id, any_value(ranks) AS ranks FROM process_group GROUP BY ALL
),
twins AS (  -- groups of one rank that have the same members: an address alone cannot tell them apart
  SELECT rank, ranks, count(*) AS alike FROM groups WHERE starts_with(group_id, 'ptr:') AND ranks IS NOT NULL GROUP BY ALL
)
SELECT c.rank, c.call_id, c.op, NULL AS grouped, c.seq, c.comms_id, coalesce(c.group_size, len(g.ranks)), c.peer, c.step,
       c.role, c.dtype, c.payload_bytes,
       CASE WHEN c.time_source IN {_TIMED} THEN c.start_ns END, CASE WHEN c.time_source IN {_TIMED} THEN c.end_ns END,
       coalesce(c.t_issue_ns, c.start_ns), coalesce(s.members, 1) > 1, c.group_id, g.ranks, coalesce(t.alike, 1)
FROM comm c
LEFT JOIN (SELECT rank, coalesce_id, count(*) AS members FROM comm WHERE coalesce_id IS NOT NULL GROUP BY ALL) s
  ON s.rank = c.rank AND s.coalesce_id = c.coalesce_id
LEFT JOIN groups g ON g.rank IS NOT DISTINCT FROM c.rank AND g.group_id = c.group_id
LEFT JOIN twins t ON t.rank IS NOT DISTINCT FROM c.rank AND t.ranks = g.ranks
WHERE c.rank IS NOT NULL AND coalesce(c.group_size, 2) > 1
ORDER BY c.rank, c.call_id
"""


def _calls(run: Run) -> tuple[list[_Call], list[tuple[int, int, str]], list[_Call]]:
    """Calls that can be matched, those that cannot, with the reason, and all that have a time."""
    found: list[_Call] = []
    unmatched: list[tuple[int, int, str]] = []
    timed: list[_Call] = []
    for *facts, name, ranks, alike in run.tuples(_CALLS):
        call = _Call(*facts)
        if call.start is not None and call.end is not None:
            timed.append(call)
        address = name is not None and name.startswith("ptr:")
        why: str | None = None
        if call.op is None or call.at is None:
            why = "its operation is not known" if call.op is None else "it has no time"
        elif name is None and call.comms_id is None:
            why = "its group is not named"
        elif address and (ranks is None or alike > 1):
            why = "the group is an address" + (
                " without ranks" if ranks is None else " beside others of the same ranks"
            )
        if why is not None:
            unmatched.append((call.rank, call.call_id, why))
        else:
            found.append(call._replace(group=tuple(ranks or ()) if name is None or address else name))
    return found, unmatched, timed


def _matches(calls: Iterable[_Call], unmatched: list[tuple[int, int, str]]) -> list[_Match]:
    """The calls put together, in order of their first rank's issue; adds to ``unmatched``."""
    numbered: dict[tuple[Hashable, ...], dict[int, list[_Call]]] = defaultdict(lambda: defaultdict(list))
    ordered: dict[Hashable, dict[int, list[_Call]]] = defaultdict(lambda: defaultdict(list))
    pairs: dict[tuple[Hashable, int, int], tuple[list[_Call], list[_Call]]] = defaultdict(lambda: ([], []))
    for call in calls:
        if call.op in ("send", "recv"):
            if call.peer is None:
                unmatched.append((call.rank, call.call_id, "its peer is not known"))
            elif call.op == "send":
                pairs[call.group, call.rank, call.peer][0].append(call)
            else:
                pairs[call.group, call.peer, call.rank][1].append(call)
        elif call.comms_id is not None:
            numbered["comms_id", call.comms_id][call.rank].append(call)
        elif call.seq is not None:
            numbered["seq", call.group, call.seq][call.rank].append(call)
        else:
            ordered[call.group][call.rank].append(call)
    found: list[_Match] = []
    for key, by_rank in numbered.items():
        found += _of_one_number(str(key[0]), by_rank, unmatched)
    for by_rank in ordered.values():
        found += _by_order(by_rank, unmatched)
    for (_, sender, receiver), (sends, receives) in pairs.items():
        found += _pairs(sender, receiver, sends, receives, unmatched)
    return sorted(found, key=lambda m: (min(c.at for c in m.calls), m.calls[0].rank, m.calls[0].call_id))


def _of_one_number(
    evidence: str, by_rank: Mapping[int, list[_Call]], unmatched: list[tuple[int, int, str]]
) -> list[_Match]:
    """Calls of one sequence number; several of one rank were launched as one and match in turn."""
    found: list[_Match] = []
    for turn in range(max(map(len, by_rank.values()))):
        together = [calls[turn] for _, calls in sorted(by_rank.items()) if turn < len(calls)]
        if len({c.op for c in together}) > 1:
            unmatched += [(c.rank, c.call_id, "its number names another operation on another rank") for c in together]
        elif len(together) == 1:
            unmatched.append((together[0].rank, together[0].call_id, "no other rank recorded its number"))
        else:
            found.append(_Match(evidence, together))
    return found


def _by_order(by_rank: Mapping[int, list[_Call]], unmatched: list[tuple[int, int, str]]) -> list[_Match]:
    """Calls of one group without numbers: where all its ranks made the same calls in the same order, else step by step."""

    def alike(parts: Mapping[int, list[_Call]]) -> bool:
        return len(parts) > 1 and len({tuple((c.op, c.dtype, c.payload) for c in p) for p in parts.values()}) == 1

    def turns(parts: Mapping[int, list[_Call]]) -> list[_Match]:
        return [_Match("order", list(group)) for group in zip(*(p for _, p in sorted(parts.items())), strict=True)]

    if alike(by_rank):
        return turns(by_rank)
    steps: dict[int | None, dict[int, list[_Call]]] = defaultdict(lambda: defaultdict(list))
    for rank, calls in by_rank.items():
        for call in calls:
            steps[call.step][rank].append(call)
    found: list[_Match] = []
    for step, parts in steps.items():
        if step is not None and set(parts) == set(by_rank) and alike(parts):
            found += turns(parts)
            continue
        why = (
            "no other rank of its group was recorded"
            if len(by_rank) == 1
            else "it has no number, and the ranks of its group did not record the same calls"
        )
        unmatched += [(c.rank, c.call_id, why) for part in parts.values() for c in part]
    return found


def _pairs(
    sender: int,
    receiver: int,
    sends: list[_Call],
    receives: list[_Call],
    unmatched: list[tuple[int, int, str]],
) -> list[_Match]:
    """Messages from one rank to another, in order: a message's number is counted by each rank for itself."""

    def sizes(calls: Iterable[_Call]) -> list[tuple[str | None, int | None]]:
        return [(c.dtype, c.payload) for c in calls]

    if sizes(sends) == sizes(receives):
        return [_Match("order", [s, r]) for s, r in zip(sends, receives, strict=True)]
    found: list[_Match] = []
    for step in sorted({c.step for c in (*sends, *receives) if c.step is not None}):
        ours, theirs = [c for c in sends if c.step == step], [c for c in receives if c.step == step]
        if sizes(ours) == sizes(theirs):
            found += [_Match("order", [s, r]) for s, r in zip(ours, theirs, strict=True)]
    matched = {(c.rank, c.call_id) for m in found for c in m.calls}
    for call in (*sends, *receives):
        if (call.rank, call.call_id) not in matched:
            other = receiver if call.rank == sender else sender
            there = receives if call.rank == sender else sends
            why = f"rank {other} recorded no such messages" if not there else f"rank {other} recorded other messages"
            unmatched.append((call.rank, call.call_id, why))
    return found


def _row(number: int, match: _Match, hosts: Mapping[int, str | None]) -> tuple[Any, ...]:
    first = match.calls[0]
    roles = {c.role for c in match.calls}
    sizes = [c.payload for c in match.calls if c.payload is not None]
    timed = sum(c.end is not None for c in match.calls)
    size = _size(match)
    names = {hosts.get(c.rank) for c in match.calls}
    return (
        number,
        match.evidence,
        first.op,
        roles.pop() if len(roles) == 1 else None,
        first.step,
        first.dtype,
        size,
        max(sizes, default=None),
        min(c.rank for c in match.calls),
        len(match.calls),
        timed,
        size is not None and timed == size,
        sorted(c.rank for c in match.calls),
        any(c.shared for c in match.calls),
        None if None in names or len(match.calls) != size else len(names),
    )


def _size(match: _Match) -> int | None:
    """Ranks that take part: both of a message, else the group's."""
    if match.calls[0].op in ("send", "recv"):
        return 2
    return next((c.size for c in match.calls if c.size is not None), None)


# -- clocks --------------------------------------------------------------------------------------------------------------

_Floats = npt.NDArray[np.float64]


class Clocks:
    """Offset and drift of every rank's clock, by least squares over all calls that complete together.

    A call's end is one instant; rank r shows it at instant + offset_r + drift_r * (instant - base). The unknown instants
    drop out when each call's mean is subtracted, so the system has two unknowns a rank however many calls there are. Ranks
    that no call connects have no common clock. A few calls that end far apart (on one rank other work was counted in) must
    not move a clock: rounds of weights, the less the farther apart a call ends, find a fit that most calls agree on, and
    those beyond 5 times its median spread are left out of the last one.
    """

    def __init__(self, base: int) -> None:
        self.base = base
        self.reference: dict[int, int] = {}
        self.offset: dict[int, float] = {}
        self.drift: dict[int, float | None] = {}
        self.calls: dict[int, int] = {}
        self.residuals: dict[int, _Floats] = {}
        self.open_ns: dict[int, int] = {}

    @classmethod
    def of(cls, matches: Sequence[_Match]) -> Clocks:
        """The clocks that these calls give."""
        used = [(i, m) for i, m in enumerate(matches) if _usable(m)]
        ends = [min(c.end for c in m.calls if c.end is not None) for _, m in used]
        clocks = cls(min(ends, default=0))
        parts = _connected([[c.rank for c in m.calls if c.end is not None] for _, m in used])
        for ranks in parts:
            inside = [m for _, m in used if m.calls[0].rank in ranks]
            clocks._fit(sorted(ranks), inside)
        for match in matches:
            for call in match.calls:
                clocks.reference.setdefault(call.rank, call.rank)
                clocks.offset.setdefault(call.rank, 0.0)
                clocks.drift.setdefault(call.rank, None)
                clocks.calls.setdefault(call.rank, 0)
        return clocks

    def aligned(self, rank: int, time: int) -> int:
        """A time of this rank's clock by its reference's, to the nearest ns."""
        ahead = self.offset[rank] + (self.drift[rank] or 0.0) * (time - self.base - self.offset[rank])
        return time - round(ahead)

    def comparable(self, ranks: Iterable[int]) -> bool:
        """Whether these ranks have a common clock."""
        return len({self.reference[r] for r in ranks}) == 1

    def rows(self, hosts: Mapping[int, str | None]) -> list[tuple[Any, ...]]:
        """Rows of the table clock."""
        found: list[tuple[Any, ...]] = []
        for rank in sorted(self.reference):
            left = self.residuals.get(rank)
            quantiles: list[int | None] = [None, None, None]
            if left is not None and len(left):
                quantiles = [int(q) for q in np.quantile(left, [0.5, 0.95, 1.0], method="higher")]
            drift = self.drift[rank]
            found.append(
                (
                    rank,
                    hosts.get(rank),
                    self.reference[rank],
                    self.base,
                    round(self.offset[rank]),
                    None if drift is None else drift * 1e9,
                    self.calls[rank],
                    *quantiles,
                )
            )
        return found

    def spreads(self, matches: Sequence[_Match]) -> list[tuple[Any, ...]]:
        """Rows of the table end_spread."""
        found: list[tuple[Any, ...]] = []
        for number, match in enumerate(matches):
            if _usable(match):
                raw = [(c.rank, c.end) for c in match.calls if c.end is not None]
                aligned = [self.aligned(rank, end) for rank, end in raw]
                found.append((number, max(e for _, e in raw) - min(e for _, e in raw), max(aligned) - min(aligned)))
        return found

    def _fit(self, ranks: list[int], matches: Sequence[_Match]) -> None:
        index = {rank: i for i, rank in enumerate(ranks)}
        by_members: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
        for match in matches:
            timed = [(index[c.rank], c.end) for c in match.calls if c.end is not None]
            by_members[tuple(i for i, _ in timed)].append([e - self.base for _, e in timed])
        blocks = {members: np.array(rows, dtype=np.float64) for members, rows in by_members.items()}
        counts = np.zeros(len(ranks), dtype=np.int64)
        for members, rows in blocks.items():
            counts[list(members)] += len(rows)
        with_drift = bool((counts >= _LEAST_FOR_DRIFT).all()) and len(ranks) > 1
        weights = {members: np.ones(len(rows)) for members, rows in blocks.items()}
        offsets, drifts = _solve(blocks, weights, len(ranks), with_drift)
        spreads = _spreads(blocks, offsets, drifts)
        for _ in range(_ROUNDS):
            weights = {members: 1.0 / np.maximum(spread, 1.0) for members, spread in spreads.items()}
            offsets, drifts = _solve(blocks, weights, len(ranks), with_drift)
            spreads = _spreads(blocks, offsets, drifts)
        # the same weight for all but those that still end far apart, if the rest connects the ranks too
        limit = 5 * float(np.median(np.concatenate(list(spreads.values())))) + 1.0
        weights = {members: (spread <= limit).astype(np.float64) for members, spread in spreads.items()}
        if {len(part) for part in _connected([m for m, weight in weights.items() if weight.any()])} == {len(ranks)}:
            offsets, drifts = _solve(blocks, weights, len(ranks), with_drift)
        left: dict[int, list[_Floats]] = defaultdict(list)
        aligned: list[_Floats] = []
        for members, rows in blocks.items():
            rest = _left(rows, members, offsets, drifts)
            aligned.append(np.ptp(rest, axis=1))
            for column, i in enumerate(members):
                left[i].append(np.abs(rest[:, column]))
        open_ns = int(np.ceil(np.quantile(np.concatenate(aligned), 0.95, method="higher")))
        for rank, i in index.items():
            self.reference[rank] = ranks[0]
            self.offset[rank] = float(offsets[i])
            self.drift[rank] = float(drifts[i]) if with_drift else None
            self.calls[rank] = int(counts[i])
            self.residuals[rank] = np.concatenate(left[i])
            self.open_ns[rank] = open_ns


def _usable(match: _Match) -> bool:
    return match.calls[0].op in TOGETHER and sum(c.end is not None for c in match.calls) > 1


def _spreads(
    blocks: Mapping[tuple[int, ...], _Floats], offsets: _Floats, drifts: _Floats
) -> dict[tuple[int, ...], _Floats]:
    """How far apart each call ends by aligned clocks."""
    return {members: np.ptp(_left(rows, members, offsets, drifts), axis=1) for members, rows in blocks.items()}


def _connected(groups: Iterable[Sequence[int]]) -> list[set[int]]:
    """The sets of ranks that groups connect."""
    parent: dict[int, int] = {}

    def root(rank: int) -> int:
        parent.setdefault(rank, rank)
        while parent[rank] != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    for group in {tuple(g) for g in groups}:
        for rank in group[1:]:
            parent[root(rank)] = root(group[0])
    found: dict[int, set[int]] = defaultdict(set)
    for rank in parent:
        found[root(rank)].add(rank)
    return list(found.values())


def _solve(
    blocks: Mapping[tuple[int, ...], _Floats], weights: Mapping[tuple[int, ...], _Floats], ranks: int, with_drift: bool
) -> tuple[_Floats, _Floats]:
    """Offsets and drifts by weighted least squares; those of rank 0 are 0. Times are scaled so that both are alike."""
    scale = max(float(np.abs(rows).max()) for rows in blocks.values()) or 1.0
    terms = 2 if with_drift else 1
    normal = np.zeros((terms * ranks, terms * ranks))
    right = np.zeros(terms * ranks)
    for members, rows in blocks.items():
        instants = rows.mean(axis=1)
        apart = rows - instants[:, None]
        where = np.array(members)
        centre = np.eye(len(members)) - 1.0 / len(members)
        weight = weights[members]
        powers = [np.ones(len(rows)), instants / scale][:terms]
        for i, left in enumerate(powers):
            right[where * terms + i] += (weight * left) @ apart
            for j, other in enumerate(powers):
                normal[np.ix_(where * terms + i, where * terms + j)] += centre * float((weight * left) @ other)
    free = slice(terms, None)
    found = np.zeros(terms * ranks)
    inner = normal[free, free]
    # calls that all end at one time say nothing of a drift: the smallest weight on 0 keeps the system solvable
    ridge = 1e-13 * float(np.trace(inner)) * np.eye(len(inner))
    found[free] = np.linalg.solve(inner + ridge, right[free])
    offsets = found[0::terms]
    return offsets, found[1::2] / scale if with_drift else np.zeros(ranks)


def _left(rows: _Floats, members: tuple[int, ...], offsets: _Floats, drifts: _Floats) -> _Floats:
    """Each end's distance from its call's mean, by aligned clocks."""
    where = list(members)
    aligned = rows - offsets[where] - drifts[where] * (rows - offsets[where])
    found: _Floats = aligned - aligned.mean(axis=1, keepdims=True)
    return found


# -- arrivals and lateness -----------------------------------------------------------------------------------------------


class _Arrival(NamedTuple):
    """One call by aligned clocks: ranks, their calls, starts, ends, durations; complete: all its ranks are there."""

    number: int
    ranks: list[int]
    calls: list[int]
    starts: list[int]
    ends: list[int]
    durations: list[int]
    complete: bool
    open_ns: int

    @property
    def last(self) -> int:
        """Index of the rank that came last."""
        return max(range(len(self.ranks)), key=lambda i: (self.starts[i], -self.ranks[i]))

    def rows(self) -> list[tuple[Any, ...]]:
        """Rows of the table arrival."""
        last, first = self.last, min(self.starts)
        transfer = self.durations[last] if self.complete else None
        return [
            (
                self.number,
                rank,
                self.starts[i],
                self.ends[i],
                self.durations[i],
                self.starts[i] - first,
                i == last,
                transfer,
                None if transfer is None else max(0, self.durations[i] - transfer),
                self.open_ns,
            )
            for i, rank in enumerate(self.ranks)
        ]


def _arrivals(matches: Sequence[_Match], clocks: Clocks) -> list[_Arrival]:
    """Calls of two timed ranks or more that have a common clock."""
    found: list[_Arrival] = []
    for number, match in enumerate(matches):
        timed = [(c.rank, c.start, c.end) for c in match.calls if c.start is not None and c.end is not None]
        numbers = [c.call_id for c in match.calls if c.start is not None and c.end is not None]
        ranks = [rank for rank, _, _ in timed]
        if len(timed) < 2 or not clocks.comparable(ranks):
            continue
        starts = [clocks.aligned(rank, start) for rank, start, _ in timed]
        ends = [clocks.aligned(rank, end) for rank, _, end in timed]
        durations = [end - start for _, start, end in timed]
        complete = len(timed) == _size(match)
        found.append(
            _Arrival(number, ranks, numbers, starts, ends, durations, complete, clocks.open_ns.get(ranks[0], 0))
        )
    return found


class _Alone(NamedTuple):
    """A timed call of one rank of which no other's part is known: whom it waited for there cannot be told."""

    rank: int
    start: int
    end: int

    @classmethod
    def of(cls, call: _Call, clocks: Clocks) -> _Alone:
        """The call, which has a time, by aligned clocks where there are any."""
        assert call.start is not None
        assert call.end is not None
        if call.rank not in clocks.reference:
            return cls(call.rank, call.start, call.end)
        return cls(call.rank, clocks.aligned(call.rank, call.start), clocks.aligned(call.rank, call.end))


class _Blame(NamedTuple):
    rank: int | None
    match: int | None
    chain: int
    outside: bool


_OUTSIDE = _Blame(None, None, 0, True)


def _lateness(arrivals: Sequence[_Arrival], alone: Sequence[_Alone]) -> list[tuple[Any, ...]]:
    """Rows of the table lateness, in one pass over the calls in order of time.

    A rank comes late by what its previous call ended later than the first rank's did (inherited), and by what it took
    longer since (own). Inherited lateness belongs to whoever made that call end late: the rank that came to it last.
    """
    previous: dict[int, tuple[int, _Blame]] = {}
    rows: list[tuple[Any, ...]] = []
    waiting = sorted(alone, key=lambda a: a.start, reverse=True)
    for call in sorted(arrivals, key=lambda a: (max(a.starts), a.number)):
        while waiting and waiting[-1].start < max(call.starts):
            one = waiting.pop()
            if one.rank not in previous or previous[one.rank][0] <= one.end:
                previous[one.rank] = (one.end, _OUTSIDE)
        first = min(range(len(call.ranks)), key=lambda i: (call.starts[i], call.ranks[i]))
        before = previous.get(call.ranks[first])
        blames: list[_Blame] = []
        for i, rank in enumerate(call.ranks):
            late = call.starts[i] - call.starts[first]
            mine = previous.get(rank)
            own: int | None = None
            inherited: int | None = None
            if before is not None and mine is not None:
                inherited = min(max(mine[0] - before[0], 0), late)
                own = late - inherited
            if own is None or inherited is None:
                blame = _OUTSIDE
            elif own >= inherited:
                blame = _Blame(rank, call.number, 0, False)
            else:
                assert mine is not None
                blame = mine[1]._replace(chain=mine[1].chain + 1)
            blames.append(blame)
            rows.append((call.number, rank, late, own, inherited, *blame))
        # who made this call end when it did; with ranks missing it may have been one of them
        last = blames[call.last] if call.complete else _OUTSIDE
        for i, rank in enumerate(call.ranks):
            known = previous.get(rank)
            if known is None or known[0] <= call.ends[i]:
                previous[rank] = (call.ends[i], last)
    return sorted(rows, key=lambda r: (r[0], r[1]))
