"""Formulas written as text: "S/(CP*TP) * B * H". The text is the rule, its numbers are what ``--explain`` prints.

A formula is an expression over the symbols of symbols.py (and of the chapter that uses it) with + - * / // % ** , whole
numbers, the functions ceil, min and max; a condition also has comparisons, ``in``, and, or, not, quoted words, True,
False, None and the functions since("behaviour") (versions.py) and on("flag") (whether an option is set). Division is
exact: a size that does not come out whole is an error, never rounded.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any

from traceanalyzer.errors import JobError
from traceanalyzer.expect.quantity import Quantity

Value = Any
"""What a symbol stands for: a number in a size, also a word, a truth value or a tuple in a condition."""

_NAME = re.compile(r"(?<![\w'\"])[A-Za-z_]\w*(?![\w'\"(])")
_WORDS = frozenset({"and", "or", "not", "in", "if", "else", "True", "False", "None"})

_Compiled = Callable[[Mapping[str, Value]], Value]


class Formula:
    """One formula or condition; raises SyntaxError for text that is none."""

    def __init__(self, text: str) -> None:
        self.text = text
        tree = ast.parse(text, mode="eval").body
        self.names = frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
        self._value = _compile(tree, text)

    def value(self, symbols: Mapping[str, Value]) -> Value:
        """What it comes to, a Fraction where it is not whole. Errors of the symbols, and JobError for a division by 0."""
        return self._value(symbols)

    def holds(self, symbols: Mapping[str, Value]) -> bool:
        """Whether the condition is true."""
        return bool(self._value(symbols))

    def whole(self, symbols: Mapping[str, Value]) -> int:
        """The value as a whole number. Raises JobError, with the numbers, if it is none."""
        value = self._value(symbols)
        if isinstance(value, Fraction) and value.denominator != 1:
            raise JobError(f"{self.text} is not whole: {self.numbers(symbols)} = {float(value):.6g}")
        return int(value)

    def quantity(self, symbols: Mapping[str, Value]) -> Quantity:
        """The whole value with the formula in symbols and in numbers. Raises JobError if it is not whole."""
        return Quantity(self.text, self.numbers(symbols), self.whole(symbols))

    def numbers(self, symbols: Mapping[str, Value]) -> str:
        """The text with every symbol replaced by its value."""
        return _NAME.sub(lambda found: found[0] if found[0] in _WORDS else str(symbols[found[0]]), self.text)


@cache
def parse(text: str) -> Formula:
    """The Formula of ``text``; each text is parsed once."""
    return Formula(text)


def _divide(one: Value, other: Value) -> Value:
    if other == 0:
        raise JobError(f"division of {one} by 0")
    result = Fraction(one) / Fraction(other)
    return result.numerator if result.denominator == 1 else result


_BINARY: dict[type[ast.operator], Callable[[Value, Value], Value]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: _divide,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Pow: lambda a, b: a**b,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Value, Value], bool]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: lambda a, b: a is b,
    ast.IsNot: lambda a, b: a is not b,
}
_FUNCTIONS: dict[str, Callable[..., Value]] = {"ceil": math.ceil, "min": min, "max": max}


def _compile(node: ast.expr, text: str) -> _Compiled:
    match node:
        case ast.Constant(value=constant):
            return lambda _: constant
        case ast.Name(id=name):
            return lambda symbols: symbols[name]
        case ast.Tuple(elts=items):
            parts = [_compile(item, text) for item in items]
            return lambda symbols: tuple(part(symbols) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            denied = _compile(inner, text)
            return lambda symbols: not denied(symbols)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            positive = _compile(inner, text)
            return lambda symbols: -positive(symbols)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _BINARY:
            one, other, apply = _compile(left, text), _compile(right, text), _BINARY[type(operator)]
            return lambda symbols: apply(one(symbols), other(symbols))
        case ast.BoolOp(op=ast.And(), values=values):
            all_of = [_compile(value, text) for value in values]
            return lambda symbols: all(part(symbols) for part in all_of)
        case ast.BoolOp(op=ast.Or(), values=values):
            any_of = [_compile(value, text) for value in values]
            return lambda symbols: any(part(symbols) for part in any_of)
        case ast.Compare(left=left, ops=operators, comparators=others) if all(type(op) in _COMPARE for op in operators):
            first = _compile(left, text)
            rest = [(_COMPARE[type(op)], _compile(other, text)) for op, other in zip(operators, others, strict=True)]
            return lambda symbols: _compares(first(symbols), rest, symbols)
        case ast.IfExp(test=test, body=body, orelse=otherwise):
            condition, yes, no = _compile(test, text), _compile(body, text), _compile(otherwise, text)
            return lambda symbols: yes(symbols) if condition(symbols) else no(symbols)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            values_of = [_compile(argument, text) for argument in arguments]
            function = _FUNCTIONS.get(name)
            if function is not None:
                return lambda symbols: function(*(part(symbols) for part in values_of))
            return lambda symbols: symbols[name](*(part(symbols) for part in values_of))
        case _:
            raise SyntaxError(f"{text!r}: {ast.unparse(node)!r} is not part of a formula")


def _compares(
    value: Value, rest: list[tuple[Callable[[Value, Value], bool], _Compiled]], symbols: Mapping[str, Value]
) -> bool:
    for compare, part in rest:
        following = part(symbols)
        if not compare(value, following):
            return False
        value = following
    return True
