"""The diff as a screen: what this is, how much of it can be judged, one row per cell, the verdict and what to do next.

Layouts, of which the first that fits the terminal is taken: a table with every column; those in which phase, operation and
what makes the calls share a column, with and without times; and the one with only what a verdict needs, calls and
measured bytes. No column is ever cut. Colour repeats what the words say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from traceanalyzer.diff import Diff
from traceanalyzer.matching import DIFFERS, Cell
from traceanalyzer.reports import diff as words
from traceanalyzer.reports.text import counted, ranges

_LEAST = 26
"""Least width of the column that wraps; with less, a table of fewer columns is taken."""

_GAP = 2
"""Blanks between columns; one in the narrowest layout."""

_MOST_UNKNOWN = 12
"""How many rows without a verdict are shown."""

_STYLE = {"match": "green", "excess": "bold red", "missing": "bold red", "unexpected": "bold red", "unknown": "yellow"}
_VERDICT_STYLE = {"match": "bold green", "differs": "bold red", "cannot be judged": "bold yellow"}


def render(
    diff: Diff,
    *,
    exact: bool = False,
    explain: int | None = None,
    width: int = 160,
    link_times: Sequence[int | None] | None = None,
) -> RenderableType:
    """The whole screen for a terminal this wide.

    exact: bytes to the last one. explain: adds the formula of that row, numbered from 1; a number without a row is a
    ValueError. link_times: of each cell, the time at measured bandwidths, a column beside the time.
    """
    if explain is not None and not 1 <= explain <= len(diff.cells):
        raise ValueError(f"rows are numbered 1 to {len(diff.cells)}, there is no row {explain}")
    parts: list[RenderableType] = [Text(words.name(diff.source), "bold"), _facts(diff), Text()]
    if diff.cells:
        parts.append(_table(diff, exact=exact, width=width, link_times=link_times))
        notes = _notes(diff)
        if notes:
            parts += [Text(), _grid((Text(label, "dim"), text) for label, text in notes)]
    if explain is not None:
        parts += [Text(), *_explanation(diff.cells[explain - 1], explain)]
    last = f"   {words.verdict_words(diff)}"
    if diff.verdict != "match":
        last += "   --explain N shows the formula of row N"
    parts += [Text(), Text.assemble((diff.verdict, _VERDICT_STYLE[diff.verdict]), last)]
    return Group(*parts)


# -- above the table -------------------------------------------------------------------------------------------------


def _facts(diff: Diff) -> RenderableType:
    c = diff.coverage
    rows = [
        ("job", Text(f"{words.job_words(diff.job)} ({diff.job_used})")),
        ("run", Text(words.run_words(c))),
        ("coverage", Text(words.coverage_words(c))),
        ("roles by", Text(words.evidence_words(c))),
        ("rules", Text(words.rules_words(diff))),
    ]
    if c.import_status not in (None, "complete"):
        status = f"{c.import_status}: traceanalyzer info {words.name(diff.source)} says what is missing"
        rows.append(("import", Text(status, "bold yellow")))
    rows += [("job conflict", Text(words.name(x.sentence, 400), "yellow")) for x in diff.job_conflicts]
    return _grid((Text(label, "dim"), text) for label, text in rows)


def _grid(rows: Iterable[tuple[Text, Text]]) -> RenderableType:
    """Two columns without lines, the second wraps."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


# -- the table -------------------------------------------------------------------------------------------------------


Side = Literal["left", "right"]


class _Column(NamedTuple):
    """One column: its title, the text of a cell, its side, and whether it may wrap."""

    title: str
    text: Callable[[Cell], str | Text]
    side: Side = "right"
    wraps: bool = False


def _table(diff: Diff, *, exact: bool, width: int, link_times: Sequence[int | None] | None) -> RenderableType:
    shown = _shown(diff)
    filled = [
        (columns, [[_as_text(column.text(diff.cells[n])) for column in columns] for n in shown])
        for columns in _layouts(diff, exact=exact, link_times=link_times)
    ]
    columns, rows = next((one for one in filled if _least_width(*one) <= width), filled[-1])
    gap = 1 if columns is filled[-1][0] else _GAP
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("#", justify="right", style="dim")
    for column in columns:
        table.add_column(column.title, justify=column.side, no_wrap=not column.wraps, overflow="fold")
    for n, row in zip(shown, rows, strict=True):
        table.add_row(Text(str(n + 1)), *row)
    return table


def _shown(diff: Diff) -> list[int]:
    """Indices of the cells that have a row: all, but of many without a verdict only the largest."""
    unknown = [n for n, cell in enumerate(diff.cells) if cell.verdict == "unknown"]
    size = {n: (diff.cells[n].payload_bytes_measured or 0, diff.cells[n].calls_measured) for n in unknown}
    hidden = set(sorted(unknown, key=lambda n: size[n], reverse=True)[_MOST_UNKNOWN:])
    return [n for n in range(len(diff.cells)) if n not in hidden]


def _least_width(columns: Sequence[_Column], rows: Sequence[Sequence[Text]]) -> int:
    """Least width of a table that cuts nothing, its wrapping column included."""
    total = len(str(len(rows)))
    for i, column in enumerate(columns):
        lines = [*column.title.splitlines(), *(line for row in rows for line in row[i].plain.splitlines())]
        total += _GAP + (_LEAST if column.wraps else max(map(cell_len, lines), default=0))
    return total


def _as_text(value: str | Text) -> Text:
    return value if isinstance(value, Text) else Text(value)


def _layouts(diff: Diff, *, exact: bool, link_times: Sequence[int | None] | None = None) -> list[list[_Column]]:
    """The columns of each layout, the widest first."""

    def differing(text: str, cell: Cell) -> Text:
        return Text(text, "bold" if cell.verdict in DIFFERS else "")

    role = _Column("role", lambda c: c.role or "?", "left")
    size = [_Column("type", words.dtype, "left"), _Column("each", lambda c: words.each(c, exact=exact))]
    parts = [
        role,
        _Column("phase", lambda c: c.phase or "?", "left"),
        _Column("operation", lambda c: c.op or "?", "left"),
        _Column("what", words.components, "left", wraps=True),
        *([_Column("where", lambda c: words.where(c, diff), "left")] if _has_where(diff) else []),
        *size,
    ]
    joined = [
        role,
        _Column("what", lambda c: _what(c, diff), "left", wraps=True),
        *size,
    ]
    counts = [
        _Column("calls\nexp", lambda c: words.calls(c.calls_expected)),
        _Column("\nmeas", lambda c: differing(words.calls(c.calls_measured), c)),
    ]
    expected = _Column("off-rank\nexpected", lambda c: words.expected_bytes(c, exact=exact))
    measured = _Column("off-rank\nmeasured", lambda c: differing(words.measured_bytes(c, exact=exact), c))
    time = [_Column("time", lambda c: words.human_time(c.time_ns))]
    exposed = [_Column("exposed", lambda c: words.human_time(c.exposed_ns))]
    bandwidth = [_Column("bus bw >=", lambda c: words.human_rate(c.bus_bandwidth_bytes_per_s))]
    # a column that no row fills only takes room
    time = time if any(c.time_ns is not None for c in diff.cells) else []
    if link_times is not None:
        at_links = {id(cell): found for cell, found in zip(diff.cells, link_times, strict=True)}
        time.append(_Column("at links'\nbandwidth", lambda c: words.human_time(at_links[id(c)])))
    exposed = exposed if any(c.exposed_ns is not None for c in diff.cells) else []
    bandwidth = bandwidth if any(c.bus_bandwidth_bytes_per_s is not None for c in diff.cells) else []
    verdict = _Column("verdict", lambda c: Text(c.verdict, _STYLE[c.verdict]), "left")
    compared = [*counts, expected, measured._replace(title="\nmeasured")]
    return [
        [*parts, *compared, *time, *exposed, *bandwidth, verdict],
        [*joined, *compared, *time, verdict],
        [*joined, *compared, verdict],
        [*joined, *counts, measured, verdict],
    ]


def _has_where(diff: Diff) -> bool:
    return any(words.where(c, diff) for c in diff.cells)


def _what(cell: Cell, diff: Diff) -> Text:
    """Phase and operation, the components below, then where."""
    found = Text(f"{cell.phase or '?'} {cell.op or '?'}")
    for line in (words.components(cell), words.where(cell, diff)):
        if line not in ("", "-"):
            found.append(f"\n{line}", "dim")
    return found


# -- below the table -------------------------------------------------------------------------------------------------


def _notes(diff: Diff) -> list[tuple[str, Text]]:
    """Reasons, causes and avoidable bytes by row, then what no row can show; what holds for several rows is said once."""
    rows: list[tuple[str, Text]] = []
    for number, cell in enumerate(diff.cells, 1):
        if cell.reason is not None:
            alike = [n for n, other in enumerate(diff.cells, 1) if other.reason == cell.reason]
            if number == alike[0]:
                rows.append((ranges(alike), Text(f"unknown: {words.name(cell.reason)}", "yellow")))
        if cell.cause is not None and all(number - 1 < other for other in cell.related):
            joined = [number, *(other + 1 for other in cell.related)]
            title = f"{cell.cause.code} ({cell.cause.confidence})  "
            rows.append((ranges(joined), Text.assemble((title, "bold"), words.name(cell.cause.sentence, 1000))))
        if cell.avoidable_bytes:
            rows.append((str(number), Text(words.avoidable_words(cell), "cyan")))
        if words.routing_words(cell):
            rows.append((str(number), Text(f"~ {words.routing_words(cell)}", "dim")))
    shown = set(_shown(diff))
    hidden = [n + 1 for n in range(len(diff.cells)) if n not in shown]
    if hidden:
        calls = sum(diff.cells[n - 1].calls_measured * diff.cells[n - 1].places for n in hidden)
        left = (
            f"{counted(len(hidden), 'row')} without a verdict left out, {counted(calls, 'call')} in all: --format json"
        )
        rows.append((ranges(hidden), Text(left, "yellow")))
    for item in diff.coverage.unattributed:
        found = (
            f"{words.name(item.name)}: {counted(item.kernels, 'kernel')}, {words.human_time(item.time_ns)} ({item.why})"
        )
        rows.append(("?", Text(f"unattributed communication  {found}", "yellow")))
    if diff.first_step is not None:
        rows.append(("-", Text(words.first_step_words(diff), "dim")))
    rows += [("-", Text(f"does not fit  {words.apart_words(apart)}", "dim")) for apart in diff.versions_apart]
    if diff.not_in_window:
        phases = ", ".join(diff.not_in_window)
        rows.append(("-", Text(f"not in the window: {phases} (the recording holds no work of these phases)", "dim")))
    return rows


def _explanation(cell: Cell, number: int) -> list[RenderableType]:
    """The formula of everything a row expects."""
    out: list[RenderableType] = [
        Text(f"row {number}: {cell.role or '?'} / {cell.phase or '?'} / {cell.op or '?'}", "bold")
    ]
    for call in cell.expected:
        out.append(Text(f"  {call.component}   {counted(call.calls, 'call')} a step", "bold"))
        out.append(_grid((Text(f"    {label}", "dim"), Text(line)) for label, line in call.formula.items()))
    if not cell.expected:
        out.append(Text("  no rule expects these calls"))
    return out
