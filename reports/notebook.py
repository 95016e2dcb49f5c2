"""Runs, diffs and results of queries as HTML for a notebook, and diffs and reviews as tables. Pure functions.

Everything that comes from a recording is escaped. Colours are the notebook's own, so that dark and light both read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import pyarrow as pa

from traceanalyzer import schema
from traceanalyzer.diff import Diff
from traceanalyzer.matching import Cell
from traceanalyzer.queries import Result
from traceanalyzer.reports import diff as words
from traceanalyzer.reports.rows import json_text, plain_text, table_lines
from traceanalyzer.reports.text import count, counted, ranges
from traceanalyzer.run import Run

_ROWS = 40
"""Rows of a result or a diff that are shown."""

_CELL = 120
"""Longest text in a cell, in characters."""

_NUMBER = 'style="text-align:right;font-variant-numeric:tabular-nums"'
_TEXT = 'style="text-align:left"'


def html(shown: Any) -> str:
    """An object as HTML. Raises TypeError for one of another class than Run, Diff and Result."""
    if isinstance(shown, Run):
        return _run(shown)
    if isinstance(shown, Diff):
        return _diff(shown)
    if isinstance(shown, Result):
        return _result(shown)
    raise TypeError(f"{type(shown).__name__} has no HTML of its own")


def text(shown: Any) -> str:
    """An object in a line or, a result, as a table: for a terminal of IPython, and for readers that show no HTML."""
    if isinstance(shown, Run):
        return f"Run {shown.source}, {counted(len(shown.files), 'file')}"
    if isinstance(shown, Diff):
        return f"{shown.verdict}   {words.verdict_words(shown)}"
    if isinstance(shown, Result):
        rows = [tuple(row.values()) for row in shown.table.slice(0, _ROWS).to_pylist()]
        return "\n".join([*table_lines(shown.table.schema.names, rows), _end(shown)])
    document = shown.as_document()
    return f"{document['verdict']['word']}   {counted(len(document['findings']), 'finding')}"


def table(shown: Any) -> pa.Table:
    """A diff (a row is a cell) or a review (a row is a finding) as a table."""
    return _cells(shown) if isinstance(shown, Diff) else _findings(shown.as_document())


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"<div>{line}</div>" for line in lines)


def _cut(text: str) -> str:
    return text if len(text) <= _CELL else f"{text[: _CELL - 3]}..."


def _html_table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; numbers to the right, null as null. Texts are escaped and cut here."""
    head = "".join(f"<th {_TEXT}>{escape(_cut(n))}</th>" for n in names)
    body = []
    for row in rows:
        cells = []
        for value in row:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            text = "null" if value is None else _cut(plain_text(value))
            cells.append(f"<td {_NUMBER if number else _TEXT}>{escape(text)}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _run(run: Run) -> str:
    """What a run holds, by a few counts; nothing is attributed for it."""
    ranks = [r for (r,) in run.tuples("SELECT DISTINCT rank FROM rank WHERE rank IS NOT NULL")]
    of = "" if run.world_size is None else f" of {count(run.world_size)}"
    kinds = dict(run.tuples("SELECT kind, count(*) FROM run GROUP BY kind"))
    issues = dict(run.tuples("SELECT severity, sum(coalesce(occurrences, 1))::BIGINT FROM issue GROUP BY severity"))
    stored = [
        word
        for word, key in (("intended", schema.META_JOB_INTENDED), ("captured", schema.META_JOB_CAPTURED))
        if run.job_text(key) is not None
    ]
    lines = [
        f"<b>{escape(_cut(run.source))}</b>   import {escape(run.import_status or 'status not recorded')}",
        f"ranks {escape(ranges(ranks))} ({count(len(ranks))}{of}), job {' and '.join(stored) or 'not stored'}",
    ]
    if issues:
        told = ", ".join(f"{count(issues[s])} {s}" for s in schema.SEVERITIES if s in issues)
        lines.append(f"issues: {escape(told)}")
    rows = [(kind, count(number), schema.KINDS[kind]) for kind, number in sorted(kinds.items()) if kind in schema.KINDS]
    return _lines(lines) + _html_table(("kind", "rows", "a row is"), rows)


def _result(result: Result) -> str:
    """The first rows of a result, and how many are not shown."""
    shown = result.table.slice(0, _ROWS)
    rows = zip(*(column.to_pylist() for column in shown.columns), strict=True) if shown.num_columns else ()
    lines = [f"<b>{escape(result.query.name)}</b>: {escape(result.query.gives)}"]
    return _lines(lines) + _html_table(shown.schema.names, rows) + _lines([escape(_end(result))])


def _end(result: Result) -> str:
    rows = counted(len(result), "row")
    return (
        rows
        if len(result) <= _ROWS
        else f"{count(len(result) - _ROWS)} of {rows} not shown: .frame() or .arrow() has all"
    )


_COLUMNS = (
    "role",
    "phase",
    "operation",
    "what",
    "type",
    "each",
    "calls expected",
    "measured",
    "off-rank expected",
    "measured",
)


def _diff(diff: Diff) -> str:
    """The diff: verdict, coverage, one row a cell."""
    lines = [
        f"<b>{escape(diff.verdict)}</b>   {escape(words.verdict_words(diff))}",
        escape(f"{words.job_words(diff.job)}; {words.run_words(diff.coverage)}; rules {words.rules_words(diff)}"),
        escape(f"coverage: {words.coverage_words(diff.coverage)}; roles by {words.evidence_words(diff.coverage)}"),
        *(escape(f"job conflict: {c.sentence}") for c in diff.job_conflicts),
    ]
    rows = [
        (
            cell.role or "?",
            cell.phase or "?",
            cell.op or "?",
            words.components(cell),
            words.dtype(cell),
            words.each(cell),
            words.calls(cell.calls_expected),
            words.calls(cell.calls_measured),
            words.expected_bytes(cell),
            words.measured_bytes(cell),
            words.verdict_of(cell),
            "" if cell.cause is None else cell.cause.code,
        )
        for cell in diff.cells[:_ROWS]
    ]
    found = _lines(lines) + _html_table((*_COLUMNS, "verdict", "cause"), rows)
    if len(diff.cells) > _ROWS:
        found += _lines(
            [f"{count(len(diff.cells) - _ROWS)} of {counted(len(diff.cells), 'row')} not shown: .frame() has all"]
        )
    return found


_CELLS: Mapping[str, pa.DataType] = {
    "role": pa.string(),
    "axis": pa.string(),
    "op": pa.string(),
    "phase": pa.string(),
    "stage": pa.int32(),
    "dtype": pa.string(),
    "group_size": pa.int32(),
    "components": pa.list_(pa.string()),
    "payload_bytes_each": pa.int64(),
    "calls_expected": pa.int64(),
    "calls_measured": pa.int64(),
    "payload_bytes_expected": pa.int64(),
    "payload_bytes_measured": pa.int64(),
    "off_rank_bytes_expected": pa.float64(),
    "off_rank_bytes_measured": pa.float64(),
    "avoidable_bytes": pa.int64(),
    "time_ns": pa.int64(),
    "exposed_ns": pa.int64(),
    "verdict": pa.string(),
    "reason": pa.string(),
    "cause": pa.string(),
    "varies": pa.bool_(),
    "ranks": pa.list_(pa.int32()),
    "steps": pa.list_(pa.int64()),
}
"""Columns of a diff's table: the fields of a cell. Off-rank bytes may be fractions, and are doubles for that."""


def _cells(diff: Diff) -> pa.Table:
    return pa.table({n: pa.array([_field(c, n) for c in diff.cells], kind) for n, kind in _CELLS.items()})


def _field(cell: Cell, name: str) -> Any:
    value = getattr(cell, name)
    if name == "cause":
        return None if value is None else value.code
    if name.startswith("off_rank"):
        return None if value is None else float(value)
    return list(value) if isinstance(value, tuple) else value


_FINDINGS: Mapping[str, pa.DataType] = {
    "rank_of_finding": pa.int64(),
    "code": pa.string(),
    "kind": pa.string(),
    "sentence": pa.string(),
    "gain_ns_at_most": pa.int64(),
    "gain_bytes": pa.float64(),
    "confidence": pa.string(),
    "place": pa.string(),
    "remedy": pa.string(),
    "because_of": pa.int64(),
}
"""Columns of a review's table: the fields of a finding, its place as JSON text; the evidence is in the document."""


def _findings(document: Mapping[str, Any]) -> pa.Table:
    rows = [
        {
            **row,
            "place": json_text(row["place"]),
            "gain_bytes": None if row["gain_bytes"] is None else float(row["gain_bytes"]),
        }
        for row in document["findings"]
    ]
    return pa.table({n: pa.array([r[n] for r in rows], kind) for n, kind in _FINDINGS.items()})
