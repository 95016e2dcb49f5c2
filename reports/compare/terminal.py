"""The comparison in a terminal: both runs, what differs in their jobs, verdict, what moved, traffic that differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from traceanalyzer.reports import text
from traceanalyzer.reports.compare import words
from traceanalyzer.reports.compare.markdown import slow_words
from traceanalyzer.reports.diff import name

Row = Mapping[str, Any]

MOST_ROWS = 20
"""Rows of one table; the JSON document and the page hold all."""

_BANDS_FROM = 120
"""Terminals at least so wide show the bands."""

_NARROW = 80
"""Narrower terminals leave out shares of the step, and the last column, which mostly says what the heading does."""

_STYLES = {
    "moved": "bold red", "did not move": "bold green", "cannot be told": "bold yellow", "cannot be compared": "bold yellow",
}  # fmt: skip


def render(document: Row, *, width: int = 160) -> RenderableType:
    """A document traceanalyzer.compare/1 for a terminal this wide."""
    verdict = document["verdict"]
    parts: list[RenderableType] = [Text(f"{side.upper()}  {words.side(document[side])}") for side in "ab"]
    parts.append(Text())
    if document["job_differences"] or document["setting_differences"]:
        parts += [_fields(document), Text()]
    line = Text(verdict["word"], style=_STYLES.get(verdict["word"], "bold"))
    line.append(f"   {name(verdict['sentence'], 600)}", style="not bold default")
    parts += [line, Text()]
    moved = [r for r in document["rows"] if r["verdict"] == "moved"]
    single = [r for r in document["rows"] if r["verdict"] == "no band"]
    same = [r for r in document["rows"] if r["verdict"] not in ("moved", "no band")]
    for title, rows in (("What moved", moved), ("What changed, noise or not", single), ("What did not move", same)):
        if rows:
            parts += [Text(title, "bold"), _times(rows[:MOST_ROWS], width), *_more(rows), Text()]
    traffic = [t for t in document["traffic"] if t["differs"] or t["verdict"] == "moved"]
    if traffic:
        parts += [Text("Traffic, per rank and step", "bold"), _traffic(traffic[:MOST_ROWS], width), *_more(traffic)]
    alike = len(document["traffic"]) - len(traffic)
    if alike:
        other = "other kind" if traffic else "kind"
        parts.append(Text(f"{text.counted(alike, other)} of calls: nothing known to differ or to have moved"))
    parts += [Text(slow_words(row)) for row in document["slow_ranks"][:MOST_ROWS]]
    parts += [Text(f"note    {name(note, 400)}", "dim") for note in document["notes"]]
    if verdict["next"]:
        parts.append(Text(f"next    {name(verdict['next'], 300)}"))
    return Group(*parts)


def _fields(document: Row) -> Table:
    table = _grid()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for kind, key, rows in (
        ("job", "field", document["job_differences"]),
        ("setting", "name", document["setting_differences"]),
    ):
        for row in rows:
            a, b = (
                f"{side.upper()} {words.value(row[side])}"
                + ("" if row.get("stated", "both") in ("both", side) else " (not stated)")
                for side in "ab"
            )
            table.add_row(Text(f"{kind}  {name(row[key], 50)}"), Text(a), Text(b))
    return table


def _grid() -> Table:
    return Table.grid(padding=(0, 2), pad_edge=False)


def _times(rows: Sequence[Row], width: int) -> Table:
    bands = width >= _BANDS_FROM
    narrow = width < _NARROW
    heads = ["", "A", "B", "change", "of step", *(["band of A", "band of B"] if bands else []), ""]
    if narrow:
        heads = heads[:4]
    table = _headed(heads, left=(0,) if narrow else (0, len(heads) - 1))
    for row in rows:
        unit = row["unit"]
        cells = [
            words.row_name(row), words.median(row["a"], unit), words.median(row["b"], unit), words.change(row),
            words.percent(row["share_of_step"]),
            *([words.band(row["a"], unit), words.band(row["b"], unit)] if bands else []),
            row["verdict"] if row["verdict"] == "moved" else row["reason"],
        ]  # fmt: skip
        table.add_row(*(Text(cell) for cell in cells[: len(heads)]))
    return table


def _traffic(rows: Sequence[Row], width: int) -> Table:
    wide = width >= _BANDS_FROM
    heads = [
        "",
        *(["type", "each"] if wide else []),
        "calls A",
        "B",
        "bytes A",
        "B",
        *(["time A", "B"] if wide else []),
        "",
    ]
    table = _headed(heads, left=(0, len(heads) - 1, *((1,) if wide else ())))
    for row in rows:
        time = "time moved" if row["verdict"] == "moved" else ""
        cells = [
            words.traffic_name(row), *([words.types(row), words.sizes(row)] if wide else []),
            words.calls(row["calls_a"]), words.calls(row["calls_b"]),
            words.per_step(row["bytes_a"]), words.per_step(row["bytes_b"]),
            *([words.median(row["time_a"], "ns"), words.median(row["time_b"], "ns")] if wide else []),
            ", ".join(w for w in (words.differs(row), time) if w),
        ]  # fmt: skip
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _headed(heads: Sequence[str], left: Sequence[int]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for i, head in enumerate(heads):
        # the first column wraps where a terminal is narrow; numbers are never cut
        table.add_column(
            head,
            justify="left" if i in left else "right",
            no_wrap=i > 0 and not (i == len(heads) - 1 and i in left),
            overflow="fold",
        )
    return table


def _more(rows: Sequence[Row]) -> list[Text]:
    if len(rows) <= MOST_ROWS:
        return []
    return [Text(f"{len(rows) - MOST_ROWS:,} more: write a page with -o compare.html", "dim")]
