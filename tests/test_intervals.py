"""Interval algebra against two oracles: every nanosecond counted by itself, and the packed sweep in SQL."""

from __future__ import annotations

import random

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traceanalyzer.intervals import Ints, active, by_mask, covered, exposed, length, overlap_each, union

Pairs = list[tuple[int, int]]
SPAN = 64


def arrays(pairs: Pairs) -> tuple[Ints, Ints]:
    return np.array([a for a, _ in pairs], np.int64), np.array([b for _, b in pairs], np.int64)


def every_ns(pairs: Pairs) -> set[int]:
    """The nanoseconds that the half-open intervals hold."""
    return {t for a, b in pairs for t in range(a, b)}


def pairs(most: int = 12) -> st.SearchStrategy[Pairs]:
    one = st.tuples(st.integers(0, SPAN), st.integers(0, 12)).map(lambda p: (p[0], p[0] + p[1]))
    return st.lists(one, max_size=most)


# The packed sweep: two edges of each interval, both groups in one counter, one running sum (reference: ingest speed, 7).
PACKED_SWEEP = """
WITH edges AS (
  SELECT start_ns AS t, weight FROM spans UNION ALL SELECT end_ns, -weight FROM spans
),
segments AS (
  SELECT lead(t) OVER (ORDER BY t) - t AS ns, sum(weight) OVER (ORDER BY t ROWS UNBOUNDED PRECEDING)::BIGINT AS active
  FROM edges
)
SELECT coalesce(sum(ns) FILTER ((active & 1023) > 0), 0)::BIGINT,
       coalesce(sum(ns) FILTER ((active >> 10) > 0), 0)::BIGINT,
       coalesce(sum(ns) FILTER ((active & 1023) > 0 AND (active >> 10) > 0), 0)::BIGINT
FROM segments WHERE ns > 0
"""


def packed_sweep(first: Pairs, second: Pairs) -> tuple[int, int, int]:
    """(length of the first union, of the second, of what both cover)."""
    rows = [(a, b, 1) for a, b in first] + [(a, b, 1 << 10) for a, b in second]
    table = {name: np.array([r[i] for r in rows], np.int64) for i, name in enumerate(("start_ns", "end_ns", "weight"))}
    with duckdb.connect() as connection:
        connection.register("spans", pa.table(table))
        row = connection.execute(PACKED_SWEEP).fetchone()
    assert row is not None
    return int(row[0]), int(row[1]), int(row[2])


@given(pairs())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_union_holds_each_nanosecond_once(given_pairs: Pairs) -> None:
    start, end = union(*arrays(given_pairs))
    assert length(start, end) == len(every_ns(given_pairs))
    assert every_ns(list(zip(start.tolist(), end.tolist(), strict=True))) == every_ns(given_pairs)
    assert (start[1:] > end[:-1]).all()  # disjoint, sorted, and touching ones are one
    assert (end > start).all()


@given(pairs(), st.lists(st.integers(-5, SPAN + 20), max_size=8))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_how_much_lies_before_a_point(given_pairs: Pairs, points: list[int]) -> None:
    found = covered(np.array(points, np.int64), *union(*arrays(given_pairs)))
    held = every_ns(given_pairs)
    assert found.tolist() == [sum(t < p for t in held) for p in points]
    assert found.dtype == np.int64


@given(pairs(), pairs())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_overlap_of_each_and_exposure(ours: Pairs, others: Pairs) -> None:
    held = every_ns(others)
    each = overlap_each(*arrays(ours), *union(*arrays(others)))
    assert each.tolist() == [sum(t in held for t in range(a, b)) for a, b in ours]
    assert exposed(*arrays(ours), *arrays(others)) == len(every_ns(ours) - held)


@pytest.mark.parametrize("seed", range(6))
def test_numpy_and_the_packed_sweep_agree_to_the_nanosecond(seed: int) -> None:
    """Unix nanoseconds, thousands of intervals: where floats would be wrong by 128."""
    chance = random.Random(seed)
    base = 1_790_857_026_000_000_000

    def many(n: int, longest: int) -> Pairs:
        starts = [base + chance.randrange(3_000_000_000) for _ in range(n)]
        return [(a, a + chance.choice((0, 1, chance.randrange(longest)))) for a in starts]

    compute, comm = many(4000, 400_000), many(3000, 900_000)
    both = overlap_each(*union(*arrays(comm)), *union(*arrays(compute))).sum()
    expected = packed_sweep(compute, comm)
    assert (length(*union(*arrays(compute))), length(*union(*arrays(comm))), int(both)) == expected
    assert exposed(*arrays(comm), *arrays(compute)) == expected[1] - expected[2]


@given(pairs(6), pairs(6))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_the_packed_sweep_is_right_too(first: Pairs, second: Pairs) -> None:
    one, two = every_ns(first), every_ns(second)
    assert packed_sweep(first, second) == (len(one), len(two), len(one & two))


def test_nothing_is_nothing() -> None:
    empty: Pairs = []
    start, end = union(*arrays(empty))
    assert (len(start), length(start, end)) == (0, 0)
    assert exposed(*arrays([(1, 5)]), *arrays(empty)) == 4
    assert exposed(*arrays(empty), *arrays([(1, 5)])) == 0
    assert overlap_each(*arrays(empty), *arrays(empty)).tolist() == []
    assert union(*arrays([(5, 5), (7, 3)]))[0].tolist() == []  # empty and reversed intervals vanish


def test_the_input_is_left_as_it_was() -> None:
    start, end = arrays([(5, 9), (1, 6)])
    union(start, end)
    assert (start.tolist(), end.tolist()) == ([5, 1], [9, 6])


@given(st.lists(pairs(6), max_size=4), st.integers(-10, SPAN), st.integers(-10, SPAN + 30))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_who_is_active_in_a_window(groups: list[Pairs], low: int, high: int) -> None:
    held = [every_ns(g) for g in groups]
    expected: dict[int, int] = {}
    for t in range(low, high):
        mask = sum(1 << i for i, ns in enumerate(held) if t in ns)
        expected[mask] = expected.get(mask, 0) + 1
    start, end, mask = active([arrays(g) for g in groups])
    assert by_mask(start, end, mask, low, high) == expected
    assert (start[1:] == end[:-1]).all()


def test_sixty_two_groups_are_the_most() -> None:
    base = 1_790_857_026_000_000_000
    groups = [arrays([(base + i, base + 100)]) for i in range(62)]
    found = by_mask(*active(groups), base, base + 200)
    assert found[2**62 - 1] == 100 - 61
    assert found[0] == 100
    with pytest.raises(ValueError, match="63 groups"):
        active([*groups, groups[0]])
