"""Interval algebra in integer nanoseconds: the one home of unions, overlaps and exposure.

Intervals are half open, [start, end), as two int64 arrays of equal length. Everything is a sort and a running sum,
linear in events after the sort; nothing here joins ranges (reference: ingest speed, section 7).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def union(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """The union as disjoint intervals in time order. Empty intervals vanish; touching ones merge."""
    keep = end > start
    start, end = start[keep], end[keep]
    if len(start) == 0:
        return start, end
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    first = np.empty(len(start), dtype=bool)
    first[0] = True
    first[1:] = start[1:] > reach[:-1]
    index = np.flatnonzero(first)
    return start[index], reach[np.append(index[1:] - 1, len(start) - 1)]


def length(start: Ints, end: Ints) -> int:
    """Total length in ns of intervals that do not overlap (a union)."""
    return int((end - start).sum())


def covered(points: Ints, start: Ints, end: Ints) -> Ints:
    """For each point t: how much of (-inf, t) the union [start, end) covers, in ns. The union must be disjoint, sorted."""
    if len(start) == 0:
        return np.zeros(len(points), dtype=np.int64)
    before = np.concatenate([[0], np.cumsum(end - start)])
    at = np.searchsorted(start, points, side="right")
    inside = np.where(at > 0, np.minimum(points, end[np.maximum(at - 1, 0)]) - start[np.maximum(at - 1, 0)], 0)
    return np.where(at > 0, before[np.maximum(at - 1, 0)] + inside, 0).astype(np.int64)


def overlap_each(start: Ints, end: Ints, other_start: Ints, other_end: Ints) -> Ints:
    """For each interval: how many ns of it the union ``other`` covers. ``other`` must be disjoint and sorted."""
    return covered(end, other_start, other_end) - covered(start, other_start, other_end)


def exposed(start: Ints, end: Ints, cover_start: Ints, cover_end: Ints) -> int:
    """Length in ns of the union of [start, end) that no ``cover`` interval hides (both may be unsorted)."""
    ours = union(start, end)
    cover = union(cover_start, cover_end)
    return length(*ours) - int(overlap_each(*ours, *cover).sum())


def active(groups: Sequence[tuple[Ints, Ints]]) -> tuple[Ints, Ints, Ints]:
    """Which groups of intervals hold when: start, end and mask of stretches, disjoint, touching and in time order.

    Bit i of the mask says that an interval of group i covers the stretch. The stretches reach from the first start to the
    last end; those that no group covers have mask 0. Raises ValueError for more than 62 groups.
    """
    if len(groups) > 62:
        raise ValueError(f"{len(groups)} groups of intervals: a mask of 64 bits holds 62")
    unions = [union(*group) for group in groups]
    weights = [np.full(len(start), 1 << i, np.int64) for i, (start, _) in enumerate(unions)]
    points = np.concatenate([np.empty(0, np.int64), *(start for start, _ in unions), *(end for _, end in unions)])
    if len(points) == 0:
        return points, points.copy(), points.copy()
    change = np.concatenate([*weights, *(-w for w in weights)])
    order = np.argsort(points, kind="stable")
    points, mask = points[order], np.cumsum(change[order])
    real = np.flatnonzero(points[1:] > points[:-1])
    return points[real], points[real + 1], mask[real]


def by_mask(start: Ints, end: Ints, mask: Ints, low: int, high: int) -> dict[int, int]:
    """How many ns of the window [low, high) have which mask, by ``active``; what lies outside of its stretches has mask 0.

    The values sum to high - low exactly. Masks that do not occur are left out, and so is everything of an empty window.
    """
    if high <= low:
        return {}
    first, last = np.searchsorted(end, low, side="right"), np.searchsorted(start, high, side="left")
    held = np.minimum(end[first:last], high) - np.maximum(start[first:last], low)
    masks, which = np.unique(mask[first:last], return_inverse=True)
    sums = np.zeros(len(masks), np.int64)
    np.add.at(sums, which, held)
    found = dict(zip(masks.tolist(), sums.tolist(), strict=True))
    rest = high - low - int(held.sum())
    if rest:
        found[0] = found.get(0, 0) + rest
    return found
