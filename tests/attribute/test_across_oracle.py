"""Matching and lateness of random runs: the arrays give what one call at a time gives, as plain as can be."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from traceanalyzer.attribute import across, attach
from traceanalyzer.run import Run

# -- one call at a time ----------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """One call of one rank that can be matched, or a message without a peer."""

    rank: int
    call_id: int
    op: str
    group: Hashable
    seq: int | None
    comms_id: int | None
    peer: int | None
    step: int | None
    dtype: str | None
    payload: int | None
    at: int


class Match(NamedTuple):
    evidence: str
    calls: list[Call]


def matches(calls: Iterable[Call], unmatched: list[tuple[int, int, str]]) -> list[Match]:
    """The calls put together, in order of their first rank's issue; adds to ``unmatched``."""
    numbered: dict[tuple[Hashable, ...], dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    ordered: dict[Hashable, dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    pairs: dict[tuple[Hashable, int, int], tuple[list[Call], list[Call]]] = defaultdict(lambda: ([], []))
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
    found: list[Match] = []
    for key, by_rank in numbered.items():
        found += _of_one_number(str(key[0]), by_rank, unmatched)
    for by_rank in ordered.values():
        found += _by_order(by_rank, unmatched)
    for (_, sender, receiver), (sends, receives) in pairs.items():
        found += _pairs(sender, receiver, sends, receives, unmatched)
    return sorted(found, key=lambda m: (min(c.at for c in m.calls), m.calls[0].rank, m.calls[0].call_id))


def _of_one_number(
    evidence: str, by_rank: Mapping[int, list[Call]], unmatched: list[tuple[int, int, str]]
) -> list[Match]:
    """Calls of one sequence number; several of one rank were launched as one and match in turn."""
    found: list[Match] = []
    for turn in range(max(map(len, by_rank.values()))):
        together = [calls[turn] for _, calls in sorted(by_rank.items()) if turn < len(calls)]
        if len({c.op for c in together}) > 1:
            unmatched += [(c.rank, c.call_id, "its number names another operation on another rank") for c in together]
        elif len(together) == 1:
            unmatched.append((together[0].rank, together[0].call_id, "no other rank recorded its number"))
        else:
            found.append(Match(evidence, together))
    return found


def _by_order(by_rank: Mapping[int, list[Call]], unmatched: list[tuple[int, int, str]]) -> list[Match]:
    """Calls of one group without numbers: where all its ranks made the same calls in the same order, else step by step."""

    def alike(parts: Mapping[int, list[Call]]) -> bool:
        return len(parts) > 1 and len({tuple((c.op, c.dtype, c.payload) for c in p) for p in parts.values()}) == 1

    def turns(parts: Mapping[int, list[Call]]) -> list[Match]:
        return [Match("order", list(group)) for group in zip(*(p for _, p in sorted(parts.items())), strict=True)]

    if alike(by_rank):
        return turns(by_rank)
    steps: dict[int | None, dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    for rank, calls in by_rank.items():
        for call in calls:
            steps[call.step][rank].append(call)
    found: list[Match] = []
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
    sends: list[Call],
    receives: list[Call],
    unmatched: list[tuple[int, int, str]],
) -> list[Match]:
    """Messages from one rank to another, in order: a message's number is counted by each rank for itself."""

    def sizes(calls: Iterable[Call]) -> list[tuple[str | None, int | None]]:
        return [(c.dtype, c.payload) for c in calls]

    if sizes(sends) == sizes(receives):
        return [Match("order", [s, r]) for s, r in zip(sends, receives, strict=True)]
    found: list[Match] = []
    for step in sorted({c.step for c in (*sends, *receives) if c.step is not None}):
        ours, theirs = [c for c in sends if c.step == step], [c for c in receives if c.step == step]
        if sizes(ours) == sizes(theirs):
            found += [Match("order", [s, r]) for s, r in zip(ours, theirs, strict=True)]
    matched = {(c.rank, c.call_id) for m in found for c in m.calls}
    for call in (*sends, *receives):
        if (call.rank, call.call_id) not in matched:
            other = receiver if call.rank == sender else sender
            there = receives if call.rank == sender else sends
            why = f"rank {other} recorded no such messages" if not there else f"rank {other} recorded other messages"
            unmatched.append((call.rank, call.call_id, why))
    return found


class Arrival(NamedTuple):
    number: int
    ranks: list[int]
    starts: list[int]
    ends: list[int]
    complete: bool

    @property
    def last(self) -> int:
        return max(range(len(self.ranks)), key=lambda i: (self.starts[i], -self.ranks[i]))


class Alone(NamedTuple):
    rank: int
    start: int
    end: int


class Part(NamedTuple):
    """How a call's last rank came to it: its own lateness, None: not known, and the last rank's call before; None: none."""

    rank: int
    number: int
    own: int | None
    before: Part | None


def owner(part: Part | None, inherited: int) -> tuple[int | None, int | None, int, bool]:
    """Who brings the sum of what was owned on the way back to half of what was inherited; calls followed; leaves it."""
    found, chain = 0, 0
    while part is not None and part.own is not None:
        chain += 1
        found += part.own
        if 2 * found >= inherited:
            return part.rank, part.number, chain, False
        part = part.before
    return None, None, chain + 1, True


def lateness(arrivals: Sequence[Arrival], alone: Sequence[Alone]) -> list[tuple[Any, ...]]:
    """Rows of the table lateness, in one pass over the calls in order of time."""
    previous: dict[int, tuple[int, Part | None]] = {}
    rows: list[tuple[Any, ...]] = []
    waiting = sorted(alone, key=lambda a: a.start, reverse=True)
    for call in sorted(arrivals, key=lambda a: (max(a.starts), a.number)):
        while waiting and waiting[-1].start < max(call.starts):
            one = waiting.pop()
            if one.rank not in previous or previous[one.rank][0] <= one.end:
                previous[one.rank] = (one.end, None)
        first = min(range(len(call.ranks)), key=lambda i: (call.starts[i], call.ranks[i]))
        before = previous.get(call.ranks[first])
        parts: list[Part] = []
        for i, rank in enumerate(call.ranks):
            late = call.starts[i] - call.starts[first]
            mine = previous.get(rank)
            own = inherited = None
            found: tuple[int | None, int | None, int, bool] = (None, None, 0, True)
            if before is not None and mine is not None:
                inherited = min(max(mine[0] - before[0], 0), late)
                own = late - inherited
                found = (rank, call.number, 0, False) if own >= inherited else owner(mine[1], inherited)
            parts.append(Part(rank, call.number, own, None if mine is None else mine[1]))
            rows.append((call.number, rank, late, own, inherited, *found))
        # who made this call end when it did; with ranks missing it may have been one of them
        last = parts[call.last] if call.complete else None
        for i, rank in enumerate(call.ranks):
            known = previous.get(rank)
            if known is None or known[0] <= call.ends[i]:
                previous[rank] = (call.ends[i], last)
    return sorted(rows, key=lambda r: (r[0], r[1]))


# -- random runs -----------------------------------------------------------------------------------------------------------

RANKS = 6
GROUPS = {"all": range(RANKS), "left": (0, 1, 2), "right": (3, 4, 5), "pair": (1, 4)}


def random_calls(seed: int) -> list[dict[str, Any]]:
    """Calls of all kinds: numbered or not, with a Comms Id or not, some lost, some of another operation, messages."""
    chance = random.Random(seed)
    numbered = {g: chance.random() < 0.6 for g in GROUPS}
    lossy = chance.random() < 0.7
    by_rank: dict[int, list[dict[str, Any]]] = {r: [] for r in range(RANKS)}
    free = [1000] * RANKS
    count = dict.fromkeys(GROUPS, 0)
    for number in range(60):
        name = chance.choice(list(GROUPS))
        members = list(GROUPS[name])
        message = chance.random() < 0.3
        if message:
            members = chance.sample(members, 2)
        op = chance.choice(["all_reduce", "all_reduce", "all_gather", "broadcast"])
        size, step = chance.choice([8, 8, 16]), number // 20
        count[name] += 1
        begins = {r: free[r] + chance.choice([0, 0, 5, chance.randrange(200)]) for r in members}
        end = max(begins.values()) + 20
        for place, r in enumerate(members):
            # clocks agree, and what completes together does; a message or a broadcast leaves its ranks at different times
            free[r] = end + (chance.choice([0, 0, 3]) if message or op == "broadcast" else 0)
            if lossy and chance.random() < 0.04:
                continue
            row: dict[str, Any] = {
                "op": op, "group_id": name, "dtype": "float32", "in_elems": size, "out_elems": size, "recorded_step": step,
                "t_issue_ns": begins[r], "group_size": len(GROUPS[name]),
            }  # fmt: skip
            if chance.random() < 0.9:
                row |= {"start_ns": begins[r], "dur_ns": free[r] - begins[r], "time_source": "kernel"}
            if message:
                peer = None if lossy and chance.random() < 0.05 else members[1 - place]
                row |= {"op": ("send", "recv")[place], "peer": peer, "seq": chance.randrange(9)}
            elif numbered[name]:
                row["seq"] = count[name]
                row["comms_id"] = 7000 + count[name] if name == "left" else None
                row["op"] = "reduce" if lossy and chance.random() < 0.03 else op
            by_rank[r].append(row)
    return [{"rank": r, "call_id": i, **row} for r, rows in by_rank.items() for i, row in enumerate(rows)]


def oracle_calls(run: Run) -> list[Call]:
    return [
        Call(*row)
        for row in run.tuples(
            """SELECT rank, call_id, op, group_id, seq, comms_id, peer, step, dtype, payload_bytes,
                      coalesce(t_issue_ns, start_ns) FROM comm ORDER BY rank, call_id"""
        )
    ]


def is_lateness_alike(run: Run) -> None:
    rows = run.tuples(
        """SELECT a.match_id, a.rank, m.call_id, arrival_ns, a.end_ns, transfer_ns IS NOT NULL, m.rank || '/' || m.call_id
           FROM arrival a JOIN matched_member m ON m.match_id = a.match_id AND m.rank = a.rank ORDER BY a.match_id, a.rank"""
    )
    calls: dict[int, list[tuple[Any, ...]]] = {}
    for row in rows:
        calls.setdefault(row[0], []).append(row)
    arrivals = [
        Arrival(n, [r[1] for r in part], [r[3] for r in part], [r[4] for r in part], part[0][5])
        for n, part in calls.items()
    ]
    seen = {row[6] for row in rows}
    alone = [
        Alone(rank, start, end)
        for rank, number, start, end in run.tuples(
            "SELECT rank, call_id, start_ns, end_ns FROM comm WHERE start_ns IS NOT NULL ORDER BY rank, call_id"
        )
        if f"{rank}/{number}" not in seen
    ]
    expected = lateness(arrivals, alone)
    found = run.tuples(
        """SELECT match_id, rank, late_ns, own_ns, inherited_ns, owner_rank, owner_match_id, chain, outside
           FROM lateness ORDER BY match_id, rank"""
    )
    assert found == expected
    assert len(found) > 40
    assert {row[7] for row in found} > {0, 1}


@pytest.mark.parametrize("seed", range(12))
def test_random_runs(open_run: Callable[..., Run], seed: int) -> None:
    groups = [
        {"rank": r, "group_id": g, "ranks": list(ranks), "group_size": len(ranks)}
        for g, ranks in GROUPS.items()
        for r in ranks
    ]
    hosts = [{"rank": r, "host": f"node{r // 3}", "window_start_ns": 0, "window_end_ns": 99_999} for r in range(RANKS)]
    run = open_run({"rank": hosts, "process_group": groups, "comm_record": random_calls(seed)})
    attach(run, None)
    across.make(run)
    unmatched: list[tuple[int, int, str]] = []
    expected = matches(oracle_calls(run), unmatched)
    assert run.tuples(
        """SELECT evidence, op, list((m.rank, m.call_id) ORDER BY m.rank, m.call_id)
           FROM matched_call c JOIN matched_member m USING (match_id) GROUP BY match_id, evidence, op ORDER BY match_id"""
    ) == [(m.evidence, m.calls[0].op, sorted((c.rank, c.call_id) for c in m.calls)) for m in expected]
    assert run.tuples("SELECT rank, call_id, reason FROM unmatched_call ORDER BY ALL") == sorted(unmatched)
    assert run.tuples("SELECT DISTINCT offset_ns, since_ns FROM clock") == [(0, None)]
    is_lateness_alike(run)
