"""The comparison as one HTML file that opens from disk: a pure function of the document ``traceanalyzer.compare/1``.

The page is built as that of the review is (reports/review/html.py), with its style sheet, its chart library and its tables;
compare.js beside this file draws what is its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from traceanalyzer.reports.diff import name
from traceanalyzer.reports.review.html import asset, page

SCHEMA = "traceanalyzer.compare/1"

_SHARED = ("echarts.min.js", "base.js", "tables.js", "charts.js")
"""Scripts of the review's page that run before compare.js."""


def html(document: Mapping[str, Any]) -> str:
    """The whole page. Raises ValueError for a document of another schema."""
    if document.get("schema") != SCHEMA:
        raise ValueError(f"the page shows documents of {SCHEMA}, this is {document.get('schema')!r}")
    own = files("traceanalyzer.reports.compare").joinpath("compare.js").read_text(encoding="utf-8")
    verdict = document["verdict"]
    runs = (_last(document[side]["path"]) for side in "ab")
    return page(
        document,
        name="comparison",
        title=f"{name(verdict['word'])}: {' and '.join(runs)}",
        sentence=name(verdict["sentence"], 400),
        scripts=[*(asset(script) for script in _SHARED), own, asset("page.js")],
    )


def _last(path: str) -> str:
    """The last part of a run's path."""
    return name(path.rstrip("/").rsplit("/", 1)[-1] or path, 60)
