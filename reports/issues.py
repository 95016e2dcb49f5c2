"""Issues of an input, folded: the same sentence of many ranks is one line, worst severity first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from traceanalyzer import schema
from traceanalyzer.reports import text

_STYLES = {"error": "bold red", "data_loss": "red", "warning": "yellow", "info": "dim"}


@dataclass(frozen=True)
class Issue:
    """One sentence with all its places. ``occurrences`` is the sum over them; None: not recorded."""

    severity: str
    code: str
    sentence: str
    occurrences: int | None
    ranks: list[int]
    files: list[str]

    @property
    def where(self) -> str:
        """The ranks, or the files where no rank is known; empty if neither is."""
        if self.ranks:
            return text.ranks_text(self.ranks)
        shown = ", ".join(self.files[:3])
        return shown if len(self.files) <= 3 else f"{shown} and {len(self.files) - 3} more files"


def fold(rows: Iterable[Mapping[str, Any]]) -> list[Issue]:
    """Rows of kind issue as Issues: worst severity first, then the most frequent."""
    found: dict[tuple[str, str, str], tuple[list[int | None], set[int], set[str]]] = {}
    for row in rows:
        key = (row.get("severity") or "error", row.get("code") or "", row.get("sentence") or "")
        occurrences, ranks, files = found.setdefault(key, ([], set(), set()))
        occurrences.append(row.get("occurrences"))
        if row.get("rank") is not None:
            ranks.add(row["rank"])
        if row.get("source_file") is not None:
            files.add(row["source_file"])
    issues = [
        Issue(
            *key,
            None if all(n is None for n in numbers) else sum(n for n in numbers if n is not None),
            sorted(ranks),
            sorted(files),
        )
        for key, (numbers, ranks, files) in found.items()
    ]
    return sorted(issues, key=lambda i: (-_level(i.severity), -(i.occurrences or 0), i.code, i.ranks, i.files))


def _level(severity: str) -> int:
    return schema.SEVERITIES.index(severity) if severity in schema.SEVERITIES else len(schema.SEVERITIES)


def summary(issues: Sequence[Issue]) -> str:
    """How many of each severity: ``1 error, 2 info``; "none" for no issues."""
    severities = sorted({i.severity for i in issues}, key=_level, reverse=True)
    return ", ".join(f"{sum(i.severity == s for i in issues)} {s}" for s in severities) or "none"


def render(issues: Sequence[Issue], *, most: int, run: str) -> RenderableType:
    """The issues as lines, ``most`` of them; the rest is counted, with the way to see all of run table ``run``."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for issue in issues[:most]:
        line = Text(issue.sentence)
        places = [issue.where] if issue.where else []
        if issue.occurrences is not None and issue.occurrences != 1:
            places.append(f"{text.count(issue.occurrences)} times")
        if places:
            line.append(f" ({', '.join(places)})", style="dim")
        table.add_row(Text(issue.severity, style=_STYLES.get(issue.severity, "")), line)
    parts: list[RenderableType] = [Padding(table, (0, 0, 0, 1), expand=False)]
    if len(issues) > most:
        rest = issues[most:]
        parts.append(Text(f" {len(rest)} more ({summary(rest)}) not shown; all of them:"))
        parts.append(Text(f'   traceanalyzer sql {run} "SELECT * FROM issue"'))
    return Group(*parts)
