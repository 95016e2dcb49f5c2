"""Formulas written as text: "S/(CP*TP) * B * H". The text is the rule, its numbers are what ``--explain`` prints.

A formula is an expression over the symbols of place.py (and of the chapter that uses it) with + - * / // % ** , whole
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
from types import CodeType
from typing import Any

from traceanalyzer.errors import JobError
from traceanalyzer.expect.quantity import Quantity

Value = Any
"""What a symbol stands for: a number in a size, also a word, a truth value or a tuple in a condition."""

_NAME = re.compile(r"(?<![\w'\"])[A-Za-z_]\w*(?![\w'\"(])")
_WORDS = frozenset({"and", "or", "not", "in", "if", "else", "True", "False", "None"})


class Formula:
    """One formula or condition; raises SyntaxError for text that is none."""

    def __init__(self, text: str) -> None:
        self.text = text
        tree = ast.parse(text, mode="eval")
        self.names = frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
        self._code = _compile(tree, text)

    def value(self, symbols: Mapping[str, Value]) -> Value:
        """What it comes to, a Fraction where it is not whole. Errors of the symbols, and JobError for a division by 0."""
        return eval(self._code, _GLOBALS, symbols)

    def holds(self, symbols: Mapping[str, Value]) -> bool:
        """Whether the condition is true."""
        return bool(self.value(symbols))

    def whole(self, symbols: Mapping[str, Value]) -> int:
        """The value as a whole number. Raises JobError, with the numbers, if it is none."""
        value = self.value(symbols)
        if isinstance(value, Fraction) and value.denominator != 1:
            raise JobError(f"{self.text} is not whole: {self.numbers(symbols)} = {float(value):.6g}")
        return int(value)

    def quantity(self, symbols: Mapping[str, Value]) -> Quantity:
        """The whole value with the formula in symbols and in numbers; a symbol may stand for a Quantity of its own.

        Raises JobError if it is not whole.
        """
        if self.text in self.names and isinstance(symbols[self.text], Quantity):
            return symbols[self.text]  # type: ignore[no-any-return]
        return Quantity(self.text, self.numbers(symbols), self.whole(symbols))

    def numbers(self, symbols: Mapping[str, Value]) -> str:
        """The text with every symbol replaced by its value."""
        return _NAME.sub(lambda found: found[0] if found[0] in _WORDS else str(symbols[found[0]]), self.text)


@cache
def parse(text: str) -> Formula:
    """The Formula of ``text``; each text is parsed once."""
    return Formula(text)


def _divide(one: Value, other: Value) -> Value:
    """The exact quotient: a whole number where it is one, else a Fraction."""
    if other == 0:
        raise JobError(f"division of {one} by 0")
    if type(one) is int and type(other) is int and one % other == 0:
        return one // other
    result = Fraction(one) / Fraction(other)
    return result.numerator if result.denominator == 1 else result


_DIVIDE = "divided"

FUNCTIONS: dict[str, Callable[..., Value]] = {"ceil": math.ceil, "min": min, "max": max, _DIVIDE: _divide}
"""What a formula may call besides the functions that stand among its symbols."""

_PARTS: tuple[type[ast.AST], ...] = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Tuple, ast.IfExp),
    *(ast.UnaryOp, ast.Not, ast.USub, ast.BoolOp, ast.And, ast.Or),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow),
    *(ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Is, ast.IsNot),
)
"""Everything a formula is made of, calls of a plain name apart: nothing that could reach beyond its symbols."""


class _ExactDivision(ast.NodeTransformer):
    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Div):
            return node
        return ast.Call(ast.Name(_DIVIDE, ast.Load()), [node.left, node.right], [])


def _compile(tree: ast.Expression, text: str) -> CodeType:
    for node in ast.walk(tree):
        plain_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords
        if not (plain_call or isinstance(node, _PARTS)):
            raise SyntaxError(f"{text!r}: {ast.unparse(node)!r} is not part of a formula")
    exact = ast.fix_missing_locations(_ExactDivision().visit(tree))
    return compile(exact, f"<formula {text}>", "eval")


_GLOBALS: dict[str, Any] = {"__builtins__": {}, **FUNCTIONS}
