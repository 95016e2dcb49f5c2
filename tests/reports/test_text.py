"""Numbers and lists as people read them."""

from __future__ import annotations

import pytest

from traceanalyzer.reports import issues, text


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [([], "none"), ([3], "3"), ([0, 1], "0-1"), ([7, 0, 1, 2, 1, 9], "0-2, 7, 9")],
)
def test_ranges(numbers: list[int], shown: str) -> None:
    assert text.ranges(numbers) == shown


@pytest.mark.parametrize(
    ("ns", "shown"),
    [
        (None, "unknown"),
        (0, "0 ns"),
        (999, "999 ns"),
        (1_000, "1.000 us"),
        (999_999, "999.999 us"),
        (1_234_567, "1.235 ms"),
        (-1_500_000, "-1.500 ms"),
        (603_240_000, "603.240 ms"),
        (3_600_000_000_000, "3,600.000 s"),
    ],
)
def test_durations(ns: int | None, shown: str) -> None:
    assert text.duration(ns) == shown


@pytest.mark.parametrize(
    ("number", "shown"),
    [(None, "unknown"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (67_108_864, "64.0 MiB"), (2**40, "1.0 TiB")],
)
def test_sizes(number: int | None, shown: str) -> None:
    assert text.size(number) == shown


def test_a_share_of_100_percent_means_all() -> None:
    assert text.share(999_999, 1_000_000) == "99.9 %"
    assert text.share(5, 5) == "100 %"
    assert text.share(0, 5) == "0 %"
    assert text.share(0, 0) == "-"


def test_counts() -> None:
    assert [text.counted(n, "rank") for n in (0, 1, 1234, None)] == [
        "0 ranks",
        "1 rank",
        "1,234 ranks",
        "unknown ranks",
    ]


def test_issues_fold_by_sentence_and_come_worst_first() -> None:
    row = {"severity": "info", "code": "a", "sentence": "A.", "occurrences": 2, "source_file": "f"}
    folded = issues.fold(
        [
            {**row, "rank": 1},
            {**row, "severity": "error", "code": "z", "sentence": "Z.", "occurrences": None, "rank": None},
            {**row, "rank": 0, "occurrences": 3, "source_file": "g"},
            {**row, "severity": "data_loss", "code": "d", "sentence": "D.", "rank": 4},
        ]
    )
    assert folded == [
        issues.Issue("error", "z", "Z.", None, [], ["f"]),
        issues.Issue("data_loss", "d", "D.", 2, [4], ["f"]),
        issues.Issue("info", "a", "A.", 5, [0, 1], ["f", "g"]),
    ]
    assert [i.where for i in folded] == ["f", "rank 4", "ranks 0-1"]
    assert issues.summary(folded) == "1 error, 1 data_loss, 1 info"
    assert issues.summary([]) == "none"
