"""The review as one HTML file that opens from disk: a pure function of the document ``traceanalyzer.review/1``.

The page carries the document as JSON and draws it with its own scripts and Apache ECharts (assets/, with its licence). It
loads nothing and sends nothing: its content security policy allows only the scripts and the style sheet written into it,
by their hashes. What comes from a trace reaches the page as JSON and is shown as text, never as markup.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from traceanalyzer import axes
from traceanalyzer.reports import diff

SCHEMA = "traceanalyzer.review/1"

ECHARTS_VERSION = "6.1.0"
"""Release of assets/echarts.min.js: the file dist/echarts.min.js of the npm package echarts, unchanged."""

_SCRIPTS = ("echarts.min.js", "base.js", "tables.js", "charts.js", "sections.js", "page.js")
"""Scripts in the order they run."""

_EXACT = 2**53 - 1
"""The largest whole number that JavaScript's numbers hold exactly."""

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character, as a broken name may hold: it has no UTF-8."""

_PACKED_FROM = 12
"""Lists of at least so many rows are written column by column."""


def html(document: Mapping[str, Any]) -> str:
    """The whole page. ``document``: traceanalyzer.review/1; what is null in it is shown as unknown.

    Keys that are absent are taken as nothing recorded. Raises ValueError for a document of another schema.
    """
    if document.get("schema") != SCHEMA:
        raise ValueError(f"the page shows documents of {SCHEMA}, this is {document.get('schema')!r}")
    verdict = document.get("verdict") or {}
    run = document.get("run") or {}
    return page(
        document,
        name="review",
        title=f"{diff.name(str(verdict.get('word') or 'review'))}: {_run_name(run)}",
        sentence=diff.name(str(verdict.get("sentence") or verdict.get("word") or ""), 400),
        scripts=[asset(name) for name in _SCRIPTS],
    )


def page(document: Mapping[str, Any], *, name: str, title: str, sentence: str, scripts: Sequence[str]) -> str:
    """A page that carries a document and draws it with these scripts. ``sentence``: what it says without them.

    ``name``: what the page is (review, comparison). Title and sentence may hold anything.
    """
    style = asset("review.css")
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "name": escape(name),
        "title": escape(title),
        "style": style,
        "sentence": escape(sentence),
        "data": _json(_packed(dict(document))),
        "axes": _json({role: str(entry.axis) for role, entry in axes.ROLES.items()}),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    # Pieces, not replacements one after another: a piece may hold what looks like a place of another.
    pieces = asset("page.html").split("{{")
    out = [pieces[0]]
    for piece in pieces[1:]:
        key, rest = piece.split("}}", 1)
        out += [parts[key], rest]
    return "".join(out)


def _run_name(run: Mapping[str, Any]) -> str:
    """The last part of the run's path."""
    path = str(run.get("path") or "run")
    return diff.name(path.rstrip("/").rsplit("/", 1)[-1] or path, 60)


def asset(name: str) -> str:
    """Text of a file in assets/."""
    return files("traceanalyzer.reports.review").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Text of a script or style element as the content security policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(value: Any) -> str:
    """JSON that may stand in a script element: nothing in it ends the element or opens a comment."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    marks = "<>&\u2028\u2029"
    text = _SURROGATE.sub("\ufffd", text)
    return text.translate({ord(mark): f"\\u{ord(mark):04x}" for mark in marks})


def _packed(value: Any) -> Any:
    """The value as base.js unpacks it: the same, smaller, and exact.

    - whole numbers that JavaScript would round are ``{"$int": "123"}``; what is no number (NaN, infinities) is null
    - rows (mappings of the same keys) are ``{"$keys": [...], "$columns": [...]}``; a column of few different texts is
      ``{"$words": [...], "$index": [...]}``
    - mappings that could be taken for one of these are ``{"$map": {...}}``
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if abs(value) <= _EXACT else {"$int": str(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        found = {str(key): _packed(item) for key, item in value.items()}
        return {"$map": found} if any(key.startswith("$") for key in found) else found
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes | bytearray):
        return _packed_rows(list(value))
    return str(value)


def _packed_rows(rows: list[Any]) -> Any:
    if len(rows) < _PACKED_FROM or not all(isinstance(row, Mapping) for row in rows):
        return [_packed(row) for row in rows]
    keys = list(rows[0])
    if not keys or any(list(row) != keys for row in rows):
        return [_packed(row) for row in rows]
    return {
        "$keys": [str(key) for key in keys],
        "$columns": [_packed_column([row[key] for row in rows]) for key in keys],
    }


def _packed_column(column: list[Any]) -> Any:
    if all(isinstance(item, str) or item is None for item in column):
        words: dict[str | None, int] = {}
        index = [words.setdefault(item, len(words)) for item in column]
        if 2 * len(words) <= len(column):
            return {"$words": list(words), "$index": index}
    return [_packed(item) for item in column]
