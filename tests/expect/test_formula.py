"""Formulas as text: values, exactness, numbers for --explain, and what is no formula."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from traceanalyzer.errors import JobError
from traceanalyzer.expect.formula import parse

SYMBOLS: dict[str, Any] = {
    "S": 8192,
    "CP": 2,
    "TP": 4,
    "B": 2,
    "H": 8192,
    "first": 1,
    "on": lambda name: name == "fp8",
    "kind": "te",
    "none": None,
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("S/(CP*TP) * B * H", 16_777_216),
        ("2 * S - 1", 16_383),
        ("-B + 3", 1),
        ("S // 3", 2730),
        ("S % 3", 2),
        ("ceil(S / 3)", 2731),
        ("min(S, B) + max(CP, TP)", 6),
        ("2**CP", 4),
        ("S if first else B", 8192),
        ("3 * S / 3", 8192),
        ("S/3 * 3", 8192),
    ],
)
def test_whole_value(text: str, value: int) -> None:
    assert parse(text).whole(SYMBOLS) == value


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("first", True),
        ("not first", False),
        ("first and TP > 1 and CP == 2", True),
        ("TP == 1 or kind == 'te'", True),
        ("1 < CP < TP", True),
        ("1 < TP < CP", False),
        ("kind in ('te', 'native')", True),
        ("kind not in ('te', 'native')", False),
        ("none is None and kind is not None", True),
        ("on('fp8')", True),
        ("on('fp4')", False),
    ],
)
def test_condition(text: str, holds: bool) -> None:
    assert parse(text).holds(SYMBOLS) is holds


def test_division_is_exact() -> None:
    assert parse("S / 3").value(SYMBOLS) == Fraction(8192, 3)
    with pytest.raises(JobError, match=r"S/\(TP-1\) is not whole: 8192/\(4-1\) = 2730.67"):
        parse("S/(TP-1)").whole(SYMBOLS)
    with pytest.raises(JobError, match="division of 8192 by 0"):
        parse("S/(CP-2)").whole(SYMBOLS)


def test_numbers_stand_in_the_places_of_the_symbols() -> None:
    quantity = parse("ceil(S/3) * H if kind == 'te' else B").quantity(SYMBOLS)
    assert quantity.numbers == "ceil(8192/3) * 8192 if te == 'te' else 2"
    assert str(parse("S/(CP*TP) * B * H").quantity(SYMBOLS)) == (
        "S/(CP*TP) * B * H = 8192/(2*4) * 2 * 8192 = 16,777,216"
    )


def test_a_condition_stops_where_it_is_decided() -> None:
    """A job that does not say a size is not asked for it where a flag already says no."""
    assert parse("TP == 1 and missing > 2").holds(SYMBOLS) is False


@pytest.mark.parametrize("text", ["S.real", "S[0]", "lambda: 1", "[S]", "f'{S}'", "S = 1", "__import__('os').getcwd()"])
def test_what_is_no_formula(text: str) -> None:
    with pytest.raises(SyntaxError):
        parse(text)
