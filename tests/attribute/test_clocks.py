"""Clocks that are set while they run, and noise that is none of it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from traceanalyzer.attribute.clocks import Clocks, Ends

MS = 1_000_000


def ends_of(shown: list[dict[int, int]]) -> Ends:
    """Calls as rank -> the end that its clock shows."""
    rows = [(call, rank, end) for call, part in enumerate(shown) for rank, end in sorted(part.items())]
    call, rank, end = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return Ends(call, rank, end)


def found(clocks: Clocks) -> dict[int, list[tuple[int | None, int]]]:
    table: dict[int, list[tuple[int | None, int]]] = {}
    for clock in clocks.table():
        table.setdefault(clock.rank, []).append((clock.since_ns, round(clock.offset)))
    return table


def test_a_clock_that_is_set() -> None:
    """Rank 1 is 300 ns ahead; between calls 11 and 12 of 20 its clock is set forward by 50 us. No call is skew."""
    ends = [i * MS for i in range(1, 21)]
    shown = [{0: end, 1: end + (300 if end <= 12 * MS else 50_300), 2: end - 40} for end in ends]
    clocks = Clocks([0, 1, 2], ends_of(shown))
    assert found(clocks) == {0: [(None, 0)], 1: [(None, 300), (13 * MS + 50_300, 50_300)], 2: [(None, -40)]}
    assert clocks.open_ns(np.array([1])).tolist() == [0]
    times = np.array([5 * MS + 300, 15 * MS + 50_300])
    assert clocks.aligned(np.array([1, 1]), times).tolist() == [5 * MS, 15 * MS]


def test_a_host_whose_clock_is_set_takes_its_ranks_along() -> None:
    """Ranks 2 and 3 share a host, ranks 0 and 1 another; the former's clock goes back by 20 us after call 9 of 20."""
    shown = [{r: i * MS - (20_000 if r > 1 and i > 9 else 0) for r in range(4)} for i in range(1, 21)]
    assert found(Clocks(range(4), ends_of(shown))) == {
        0: [(None, 0)],
        1: [(None, 0)],
        2: [(None, 0), (10 * MS - 20_000, -20_000)],
        3: [(None, 0), (10 * MS - 20_000, -20_000)],
    }


def test_the_reference_may_be_the_one_that_is_set() -> None:
    """Of four ranks the clock of rank 0 is set: its times before it are the reference."""
    shown = [{r: i * MS + (70_000 if r == 0 and i > 12 else 0) for r in range(4)} for i in range(1, 25)]
    clocks = found(Clocks(range(4), ends_of(shown)))
    assert clocks == {0: [(None, 0), (13 * MS + 70_000, 70_000)], 1: [(None, 0)], 2: [(None, 0)], 3: [(None, 0)]}


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_drift_are_no_step(seed: int) -> None:
    """Ends scatter by up to 30 us, one call in ten by 300, and rank 1 gains 100 ns a call, 100 ppm."""
    chance = random.Random(seed)
    shown = [
        {
            r: i * MS + 100 * i * (r == 1) + chance.randrange(30_000) * (10 if chance.random() < 0.1 else 1)
            for r in range(4)
        }
        for i in range(1, 201)
    ]
    clocks = Clocks(range(4), ends_of(shown)).table()
    assert [c.since_ns for c in clocks] == [None] * 4
    assert clocks[1].drift == pytest.approx(1e-4, abs=6e-5)


def test_a_step_and_a_drift() -> None:
    """Rank 1 gains 100 ns a ms and is set back by 200 us after call 30 of 60."""
    shown = [{0: i * MS, 1: i * MS + 100 * i - (200_000 if i > 30 else 0)} for i in range(1, 61)]
    clocks = Clocks([0, 1], ends_of(shown)).table()
    assert [(c.rank, c.since_ns) for c in clocks] == [(0, None), (1, None), (1, 31 * MS + 3_100 - 200_000)]
    assert clocks[1].drift == pytest.approx(1e-4, rel=1e-3)
    assert clocks[2].offset - clocks[1].offset == pytest.approx(-200_000, abs=50)


def test_a_drift_that_no_clock_has_is_none() -> None:
    """Ten calls at two times 1 ms apart, rank 1 set ahead by 100 us between them: 10 % is no drift."""
    shown = [{0: MS * (1 + i // 5) + i, 1: MS * (1 + i // 5) + i + 100_000 * (i // 5)} for i in range(10)]
    clocks = Clocks([0, 1], ends_of(shown)).table()
    assert [(c.rank, c.drift, round(c.offset)) for c in clocks] == [(0, None, 0), (1, None, 0), (1, None, 100_000)]


def test_each_group_has_its_own_residual() -> None:
    """Calls of ranks 0 and 1 end together, those of 0 and 2 now and then 400 ns apart: that is no matter of the former."""
    shown = [
        {0: i * MS, 1: i * MS} if i % 2 else {0: i * MS, 2: i * MS + (400 if i % 20 == 0 else 0)} for i in range(1, 61)
    ]
    clocks = Clocks([0, 1, 2], ends_of(shown))
    assert clocks.open_ns(np.array([0, 1, 2])).tolist() == [400, 0, 400]
    # rows of two calls that are known (numbers 0 and 1), and of a message between 1 and 2
    calls, ranks = np.array([0, 0, 1, 1, 99, 99]), np.array([0, 1, 0, 2, 1, 2])
    assert clocks.open_of_calls(calls, np.array([0, 2, 4]), ranks).tolist() == [0, 0, 400, 400, 400, 400]


def test_ranks_of_one_host_share_its_clock() -> None:
    """Calls connect ranks 2 and 3 alone, 3 is 300 ns ahead. 0 and 2 share host a, 1 and 3 host b, 4 is alone, 5 has no host.

    So 2 shows what 0 shows, and 1 what 3 shows. Between them 50 us are left open, between 2 and 3 nothing.
    """
    shown = [{2: i * MS, 3: i * MS + 300} for i in range(1, 5)]
    clocks = Clocks(range(6), ends_of(shown), {0: "a", 1: "b", 2: "a", 3: "b", 4: "c"})
    assert [(c.rank, c.reference, round(c.offset), c.calls, c.evidence) for c in clocks.table()] == [
        (0, 0, 0, 0, "host"),
        (1, 0, 300, 0, "host"),
        (2, 0, 0, 4, "calls"),
        (3, 0, 300, 4, "calls"),
        (4, 4, 0, 0, "recorded"),
        (5, 5, 0, 0, "recorded"),
    ]
    assert clocks.open_ns(np.arange(6)).tolist() == [50_000, 50_000, 50_000, 50_000, 0, 0]
    calls, begins = np.array([0, 0, 9, 9]), np.array([0, 2])
    assert clocks.open_of_calls(calls, begins, np.array([2, 3, 0, 1])).tolist() == [0, 0, 50_000, 50_000]


def test_of_a_clock_that_was_set_no_other_rank_says_more() -> None:
    """Rank 1's clock is set forward by 50 us: that of rank 2 of the same host, which makes no call, is not guessed."""
    shown = [{0: i * MS, 1: i * MS + (0 if i <= 12 else 50_000)} for i in range(1, 21)]
    clocks = Clocks(range(3), ends_of(shown), {0: "a", 1: "b", 2: "b"})
    assert [(c.rank, c.reference, c.evidence) for c in clocks.table()] == [
        (0, 0, "calls"),
        (1, 0, "calls"),
        (1, 0, "calls"),
        (2, 2, "recorded"),
    ]
