"""Rows of a query as text: a table to read, CSV and JSON that lose nothing. Pure functions of rows; nothing is printed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Any

CELL = 60
"""Longest cell of a table, in characters; what was cut ends with three dots."""


def json_text(value: Any) -> str:
    """A value as JSON, exact: whole numbers of any size and decimals digit by digit, None as null.

    What JSON does not have becomes text: times, bytes, NaN and infinities.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f'"{value}"'
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))}: {json_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(json_text, value)) + "]"
    return json.dumps(str(value))


def plain_text(value: Any) -> str:
    """A value as bare text: lists and structs as JSON, text as it is. None must be handled by the caller."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (bool, int, Decimal, list, tuple, dict)):
        return json_text(value)
    return str(value)


def csv_lines(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Lines of CSV (RFC 4180, LF): null is an empty field, empty text is ``""``."""
    yield ",".join(map(_quoted, columns))
    for row in rows:
        yield ",".join("" if value is None else _quoted(plain_text(value)) for value in row)


def _quoted(text: str) -> str:
    if text == "" or any(c in text for c in ',"\n\r') or text != text.strip():
        return '"' + text.replace('"', '""') + '"'
    return text


def json_lines(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Lines of the JSON document ``traceanalyzer.sql/1``, one row a line; ``columns`` are (name, DuckDB type)."""
    described = ", ".join(json_text({"name": name, "type": kind}) for name, kind in columns)
    yield '{"schema": "traceanalyzer.sql/1",'
    yield f' "columns": [{described}],'
    yield ' "rows": ['
    last = None
    for row in rows:
        if last is not None:
            yield f"  {last},"
        last = json_text(dict(zip((name for name, _ in columns), row, strict=True)))
    if last is not None:
        yield f"  {last}"
    yield " ]}"


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[Any]], width: int | None = None) -> list[str]:
    """Lines of a table: numbers to the right, null as ``null``, cells cut to CELL characters.

    ``width``: columns that do not fit into it are left out and named in a last line; None: all are shown.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max([len(_cell(name)), *(len(row[i]) for row in cells)]) for i, name in enumerate(columns)]
    shown = len(columns)
    while width is not None and shown > 1 and sum(widths[:shown]) + 2 * (shown - 1) > width:
        shown -= 1
    numbers = [
        any(row[i] is not None for row in rows)
        and all(row[i] is None or (isinstance(row[i], (int, float, Decimal)) and row[i] is not True) for row in rows)
        for i in range(len(columns))
    ]

    def line(texts: Sequence[str]) -> str:
        padded = (
            text.rjust(widths[i]) if numbers[i] else text.ljust(widths[i]) for i, text in enumerate(texts[:shown])
        )
        return "  ".join(padded).rstrip()

    lines = [line([_cell(name) for name in columns]), "  ".join("-" * w for w in widths[:shown])]
    lines += [line(row) for row in cells]
    if shown < len(columns):
        hidden = ", ".join(columns[shown:])
        lines.append(f"{len(columns) - shown} columns do not fit and are not shown: {hidden}")
    if any(len(_escaped(value)) > CELL for row in rows for value in row[:shown]):
        lines.append(f"cells that end with ... are cut to {CELL} characters")
    return lines


def _escaped(value: Any) -> str:
    text = "null" if value is None else plain_text(value)
    return text.replace("\r", "\\r").replace("\n", "\\n").replace("\t", "\\t")


def _cell(value: Any) -> str:
    text = _escaped(value)
    return text if len(text) <= CELL else f"{text[: CELL - 3]}..."
