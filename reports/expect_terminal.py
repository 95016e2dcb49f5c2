"""The expectation as a screen: the job, one row per kind of call or per sum, what is wasted, what has no rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from traceanalyzer.expect import against
from traceanalyzer.expect.errata import in_words
from traceanalyzer.expect.sheet import Part, Row, Sheet
from traceanalyzer.expect.totals import Total, total, totals
from traceanalyzer.reports import expect as words
from traceanalyzer.reports.diff import human_bytes, job_words
from traceanalyzer.reports.text import counted

_NARROW = 132
"""Columns below which phase, operation and component share a cell."""

_STYLE = {
    against.SAME: "green",
    against.DIFFERS: "yellow",
    against.ONLY_MEGATRON: "cyan",
    against.ONLY_DOCUMENT: "magenta",
}


def render(
    sheet: Sheet, *, by: str | None = None, exact: bool = False, explain: int | None = None, width: int = 160
) -> RenderableType:
    """The whole screen for a terminal this wide.

    by: sums by "role", "component" or "phase" instead of calls. explain: adds formula, numbers and source of that row,
    numbered from 1; a number without a row is a ValueError.
    """
    rows = sheet.rows
    if explain is not None and not 1 <= explain <= len(rows):
        raise ValueError(f"rows are numbered 1 to {len(rows)}, there is no row {explain}")
    parts: list[RenderableType] = [_facts(sheet), Text()]
    if by is not None:
        parts.append(_sums(sheet, by, exact=exact))
    elif explain is None:
        parts.append(_calls(sheet, rows, exact=exact, narrow=width < _NARROW))
    notes = [] if explain is not None else _notes(sheet, rows)
    if notes:
        parts += [Text(), _grid(notes)]
    if explain is not None:
        parts += _explanation(rows[explain - 1], explain)
    parts += [Text(), Text(words.total_words(sheet), "bold")]
    return Group(*parts)


def render_against(sheet: Sheet, other: Sheet, *, exact: bool = False, width: int = 160) -> RenderableType:
    """The two rule sets side by side, with the cause of each difference below the row it belongs to."""
    narrow = width < _NARROW
    table = (
        _table(("what", "wraps")) if narrow else _table(("role", ""), ("phase", ""), ("what", "wraps"), ("where", ""))
    )
    for title in ("calls\nmegatron", "\ndocument", "off-rank\nmegatron", "\ndocument"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    merged: dict[tuple[object, ...], tuple[against.Beside, list[Part]]] = {}
    for part, row in words.compared(sheet, other):
        key = (row.role, row.phase, row.component, row.calls, row.off_rank_bytes, row.verdict, row.cause)
        merged.setdefault(key, (row, []))[1].append(part)
    for row, parts in merged.values():
        where = words.parts_words(parts)
        what = Text(f"{row.role} {row.phase} {row.component}, {where}" if narrow else row.component)
        if row.cause:
            what.append(f"\n{row.cause}", "dim")
        first = [what] if narrow else [row.role, row.phase, what, where]
        table.add_row(
            *first,
            *(f"{number:,}" for number in row.calls),
            *(human_bytes(size, exact=exact) for size in row.off_rank_bytes),
            Text(row.verdict, _STYLE[row.verdict]),
        )
    sums = [total(one.counted) for one in (sheet, other)]
    last = ", ".join(
        f"{name} {human_bytes(found.off_rank_bytes, exact=exact)}"
        for name, found in zip(("megatron", "document"), sums, strict=True)
    )
    return Group(_facts(sheet), Text(), table, Text(), Text(f"off-rank a step over these ranks: {last}", "bold"))


# -- parts -----------------------------------------------------------------------------------------------------------


def _facts(sheet: Sheet) -> RenderableType:
    rows = [("job", Text(job_words(sheet.job))), ("rules", Text(words.rules_words(sheet)))]
    layout = sheet.job.layout
    rows.insert(1, ("layout", Text(f"{layout.equation}" + (f" = {_experts(sheet)}" if sheet.job.num_experts else ""))))
    return _grid(rows)


def _experts(sheet: Sheet) -> str:
    return sheet.job.layout.expert_equation.partition(" = ")[2]


def _grid(rows: Iterable[tuple[str, Text]]) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(Text(label, "dim"), text)
    return table


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for title, how in columns:
        table.add_column(title, justify="right" if how == "right" else "left", no_wrap=how != "wraps", overflow="fold")
    return table


def _calls(sheet: Sheet, rows: Sequence[Row], *, exact: bool, narrow: bool) -> RenderableType:
    several = len(sheet.parts) > 1
    columns = [("#", "right"), ("role", "")]
    columns += [("what", "wraps")] if narrow else [("phase", ""), ("operation", ""), ("what", "wraps")]
    columns += [("where", "")] if several else []
    columns += [("type", ""), ("each", "right"), ("ranks", "right"), ("calls", "right"), ("off-rank", "right")]
    columns += [] if narrow else [("avoidable", "right")]
    table = _table(*columns)
    for number, row in enumerate(rows, 1):
        call = row.call
        what = words.what_words(call)
        waste = call.avoidable
        cells: list[str | Text] = [Text(str(number), "dim"), call.role]
        cells += [Text.assemble(f"{call.phase} {call.op}\n", (what, "dim"))] if narrow else [call.phase, call.op, what]
        cells += [words.parts_words(row.parts)] if several else []
        cells += [
            words.dtype_word(call),
            words.each_words(call, exact=exact),
            f"{call.group_size:,}",
            f"{call.calls:,}",
        ]
        cells.append(words.leaving_words(call, exact=exact))
        if not narrow:
            cells.append(human_bytes(waste.bytes_per_call * call.calls, exact=exact) if waste else "")
        table.add_row(*cells)
    return table


def _sums(sheet: Sheet, by: str, *, exact: bool) -> RenderableType:
    """One row per part and key, then the sum over all ranks."""
    columns = [("", ""), (by, "wraps"), ("calls", "right"), ("payload", "right"), ("off-rank", "right")]
    columns += [("received", "right"), ("avoidable", "right"), ("outside\nc10d", "right")]
    table = _table(*columns)

    def add(where: str, key: str, found: Total, style: str = "") -> None:
        received: int | Fraction | str = human_bytes(found.received_bytes, exact=exact) if found.receives else ""
        cells = [f"{found.calls:,}", human_bytes(found.payload_bytes, exact=exact)]
        cells += [human_bytes(found.off_rank_bytes, exact=exact), str(received)]
        cells.append(human_bytes(found.avoidable_bytes, exact=exact) if found.avoidable_bytes else "")
        cells.append(human_bytes(found.outside_bytes, exact=exact) if found.outside_bytes else "")
        table.add_row(where, key, *cells, style=style)

    for part in sheet.parts:
        own = [(call, 1) for call in part.expectation.calls]
        for key, found in totals(own, by).items():
            add(part.name, key, found)
        add(part.name, "all", total(own), "bold")
    ranks = sum(part.ranks for part in sheet.parts)
    if ranks > 1:
        for key, found in totals(sheet.counted, by).items():
            add(f"{ranks:,} ranks", key, found)
    return table


def _notes(sheet: Sheet, rows: Sequence[Row]) -> list[tuple[str, Text]]:
    found = [("avoidable", Text(line, "cyan")) for line in words.avoidable_words(rows)]
    if any(row.call.varies for row in rows):
        found.append(("~", Text("depends on where the router sends tokens: the size of balanced routing", "dim")))
    for gap in sheet.not_modelled:
        touched = ", ".join((*gap.roles, *gap.phases, *gap.ops))
        found.append(("not modelled", Text(f"{gap.what} ({touched})", "yellow")))
    found += [(f"release {one.releases}", Text(words.apart_words(one), "dim")) for one in sheet.apart]
    return found


def _explanation(row: Row, number: int) -> list[RenderableType]:
    call = row.call
    title = f"row {number}: {call.role} / {call.phase} / {call.op}   {words.what_words(call)}"
    release = f"   releases {call.versions}" if call.versions else ""
    lines: list[tuple[str, Text]] = [(f"  {label}", Text(line)) for label, line in call.formula.items()]
    if call.avoidable is not None:
        setting = call.avoidable.setting or "no setting"
        size = human_bytes(call.avoidable.bytes_per_call)
        lines.append(("  avoidable", Text(f"{size} a call, {call.avoidable.code}: {setting} removes it", "cyan")))
    if call.document:
        lines.append(("  document", Text(in_words(call.document))))
    head = (
        f"{title}   {counted(call.calls, 'call')} a step on {words.parts_words(row.parts)}   rule {call.rule}{release}"
    )
    return [Text(head, "bold"), _grid(lines)]
