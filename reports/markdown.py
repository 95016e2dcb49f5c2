"""What every Markdown report writes alike: escaped text, rows of a table, how many rows are left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from traceanalyzer.reports.diff import name

_ESCAPED = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"} | {mark: f"\\{mark}" for mark in "\\|`*_[]~#"})


def escape(content: object) -> str:
    """Text that Markdown shows as it is, on one line: no table cell, tag, link, heading or emphasis comes of it."""
    return name(str(content), 1000).translate(_ESCAPED)


def table_row(cells: Iterable[object]) -> str:
    """One row of a table."""
    return f"| {' | '.join(map(escape, cells))} |"


def rest(rows: Sequence[object], shown: int) -> list[str]:
    """The line behind a table that shows the first ``shown`` rows; none where these are all."""
    return [f"\n{len(rows) - shown} rows more."] if len(rows) > shown else []
