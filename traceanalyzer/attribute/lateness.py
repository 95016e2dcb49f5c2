"""When ranks come to matched calls, how late that is, and who owns it: array by array, linear in the calls after sorting.

A rank comes late by what its previous call ended later than the first rank's did (inherited), and by what it took longer
since (own). Inherited lateness belongs to whoever made that call end late: the rank that came to it last, or whom that one
waited for, and so on back through groups and stages.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traceanalyzer.attribute.clocks import Clocks, Ints

_Bools = npt.NDArray[np.bool_]


class Arrivals(NamedTuple):
    """One row per call and timed rank, ordered by call and rank as the call lists them; times by aligned clocks.

    first: row of the rank that came first to the row's call, of several the lowest. last: row of the one that came last, of
    several the lowest. complete: whether all ranks of the call are there.
    """

    match: Ints
    rank: Ints
    start: Ints
    end: Ints
    first: Ints
    last: Ints
    complete: _Bools
    open_ns: Ints

    @classmethod
    def of(cls, match: Ints, rank: Ints, start: Ints, end: Ints, size: Ints, clocks: Clocks) -> Arrivals:
        """Of timed members (times as recorded, ordered by match): calls of two ranks or more that have a common clock.

        size: ranks that take part in the row's call; 0: not known.
        """
        kept = _alike(match, clocks.reference(rank))
        match, rank, start, end, size = match[kept], rank[kept], start[kept], end[kept], size[kept]
        began, ended = clocks.aligned(rank, start), clocks.aligned(rank, end)
        begins = _begins(match)
        members = np.diff(np.append(begins, len(match)))
        of_call = np.repeat(np.arange(len(begins)), members)
        place = np.arange(len(match))
        by_start = np.lexsort((place, rank, began, of_call))
        first = by_start[begins][of_call] if len(begins) else place
        by_end = np.lexsort((place, rank, -began, of_call))
        last = by_end[begins][of_call] if len(begins) else place
        complete = np.repeat(members, members) == size
        return cls(match, rank, began, ended, first, last, complete, clocks.open_of_calls(match, begins, rank))

    def table(self) -> pa.Table:
        """Table arrival."""
        duration = self.end - self.start
        transfer = duration[self.last]
        missing = ~self.complete
        return pa.table(
            {
                "match_id": self.match,
                "rank": pa.array(self.rank, pa.int32()),
                "arrival_ns": self.start,
                "end_ns": self.end,
                "dur_ns": duration,
                "after_first_ns": self.start - self.start[self.first],
                "last": pa.array(self.last == np.arange(len(self.last))),
                "transfer_ns": pa.array(transfer, mask=missing),
                "waiting_ns": pa.array(np.maximum(duration - transfer, 0), mask=missing),
                "residual_ns": self.open_ns,
            }
        )


def _begins(match: Ints) -> Ints:
    found: Ints = np.flatnonzero(np.concatenate([[True], np.diff(match) != 0])) if len(match) else match
    return found


def _alike(match: Ints, reference: Ints) -> _Bools:
    """Whether the row's call has two rows or more, all of one reference."""
    begins = _begins(match)
    if not len(begins):
        return np.zeros(0, bool)
    members = np.diff(np.append(begins, len(match)))
    same = np.minimum.reduceat(reference, begins) == np.maximum.reduceat(reference, begins)
    found: _Bools = np.repeat(same & (members > 1), members)
    return found


def of_arrivals(arrivals: Arrivals, alone_rank: Ints, alone_start: Ints, alone_end: Ints) -> pa.Table:
    """Table lateness.

    alone: timed calls of one rank of which no other's part is known, by aligned clocks: whom it waited for there cannot be
    told.
    """
    n, others = len(arrivals.match), len(alone_rank)
    # rows of calls, then calls alone; a call counts from when its last rank came, one alone from the next ns on
    when = np.concatenate([arrivals.start[arrivals.last], alone_start])
    kind = np.concatenate([np.zeros(n, np.int64), np.ones(others, np.int64)])
    number = np.concatenate([arrivals.match, np.arange(others)])
    rank = np.concatenate([arrivals.rank, alone_rank])
    end = np.concatenate([arrivals.end, alone_end])
    order = np.lexsort((number, kind, when, rank))
    before = _latest_before(rank[order], end[order])
    previous = np.full(n + others, -1, np.int64)
    previous[order] = np.where(before >= 0, order[before], -1)
    previous = previous[:n]

    late = arrivals.start - arrivals.start[arrivals.first]
    theirs = previous[arrivals.first] if n else previous
    known = (previous >= 0) & (theirs >= 0)
    ended = end[previous] if n + others else end
    inherited = np.where(known, np.clip(ended - (end[theirs] if n + others else end), 0, late), 0)
    own = late - inherited

    itself, follows = known & (own >= inherited), known & (own < inherited)
    owner, chain = _owners(arrivals, previous, np.where(known, own, -1), np.flatnonzero(follows), inherited)
    owner = np.where(itself, np.arange(n), owner)
    gone = owner < 0
    who = np.where(gone, 0, owner)
    return pa.table(
        {
            "match_id": arrivals.match,
            "rank": pa.array(arrivals.rank, pa.int32()),
            "late_ns": late,
            "own_ns": pa.array(own, mask=~known),
            "inherited_ns": pa.array(inherited, mask=~known),
            "owner_rank": pa.array(arrivals.rank[who], pa.int32(), mask=gone),
            "owner_match_id": pa.array(arrivals.match[who], mask=gone),
            "chain": pa.array(chain, pa.int32()),
            "outside": pa.array(gone),
        }
    )


def _owners(arrivals: Arrivals, previous: Ints, own: Ints, rows: Ints, inherited: Ints) -> tuple[Ints, Ints]:
    """Per row the row that owns what ``rows`` inherited, -1: nobody that is known, and the calls it was followed through.

    own: -1 where it is not known. Every call ended when it did because of the rank that came last; that came from its own
    previous call, and so on: what the last ranks own is added up on the way back, and who brings the sum to half of what was
    inherited is the owner. A call all of whose ranks come equally late so passes the question on. A table of jumps over 1, 2,
    4, ... calls, each with the sum on the way, finds the place in logarithmic time.
    """
    n = len(arrivals.match)
    begins = _begins(arrivals.match)
    nowhere = len(begins)
    call = np.repeat(np.arange(nowhere), np.diff(np.append(begins, n)))
    lasts = arrivals.last[begins]
    usable = np.append(arrivals.complete[begins] & (own[lasts] >= 0), False)

    def before(row: Ints) -> Ints:
        """The call before, where its last rank is known and has one before it; else nowhere."""
        at = previous[row]
        inside = (at >= 0) & (at < n)
        found = np.where(inside, call[np.where(inside, at, 0)] if n else nowhere, nowhere)
        return np.where(usable[found], found, nowhere)

    jumps = [np.append(before(lasts), nowhere)]
    sums = [np.append(np.maximum(own[lasts], 0), 0)]
    while (jumps[-1] != nowhere).any():
        jump, total = jumps[-1], sums[-1]
        jumps.append(jump[jump])
        sums.append(total + total[jump])
    at = before(rows)
    need = (inherited[rows] + 1) // 2
    found_sum, length = np.zeros(len(rows), np.int64), np.ones(len(rows), np.int64)
    for level in range(len(jumps) - 1, -1, -1):
        goes = (jumps[level][at] != nowhere) & (found_sum + sums[level][at] < need)
        found_sum += np.where(goes, sums[level][at], 0)
        at = np.where(goes, jumps[level][at], at)
        length += goes.astype(np.int64) << level
    enough = (at != nowhere) & (found_sum + sums[0][at] >= need)
    owner, chain = np.full(n, -1, np.int64), np.zeros(n, np.int64)
    owner[rows] = np.where(enough, lasts[np.where(enough, at, 0)] if nowhere else -1, -1)
    chain[rows] = length + ((at != nowhere) & ~enough)
    return owner, chain


def _latest_before(rank: Ints, end: Ints) -> Ints:
    """For each row (ordered by rank and time): the row of its rank before it that ends last, of several the latest; -1."""
    found = np.full(len(rank), -1, np.int64)
    cuts = np.append(_begins(rank), len(rank))
    for low, high in pairwise(cuts.tolist()):
        reach = np.maximum.accumulate(end[low:high])
        holder = np.maximum.accumulate(np.where(end[low:high] >= reach, np.arange(low, high), -1))
        found[low + 1 : high] = holder[:-1]
    return found
