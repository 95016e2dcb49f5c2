"""The review in a terminal: verdict, findings and the step's time, in a screenful. The page and the JSON hold the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from traceanalyzer.reports import text
from traceanalyzer.reports.diff import human_time, name

Row = Mapping[str, Any]

MOST_FINDINGS = 7

_STYLES = {"match": "bold green", "differs": "bold red", "cannot be judged": "bold yellow", "no expectation": "bold"}


def render(document: Row, *, findings: int = MOST_FINDINGS) -> RenderableType:
    """The first ``findings`` findings of a document traceanalyzer.review/1 beneath its verdict."""
    run, verdict = document["run"], document["verdict"]
    parts: list[RenderableType] = []
    head = Text(name(run["path"]))
    if run["job"]:
        head.append(f"   {name(run['job'], 200)}")
    parts.append(head)
    line = Text(verdict["word"], style=_STYLES.get(verdict["word"], "bold"))
    line.append(f"   {name(verdict['sentence'], 400)}", style="not bold default")
    parts += [line, Text("")]
    shown = document["findings"][:findings]
    if shown:
        table = Table.grid(padding=(0, 2))
        table.add_column(justify="right", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(overflow="fold")
        for finding in shown:
            words = Text(name(finding["sentence"], 1000))
            notes = [finding["code"], finding["confidence"]]
            if finding["because_of"] is not None:
                notes.append(f"effect of {finding['because_of']}")
            words.append(f" ({', '.join(notes)})", style="dim")
            if finding["remedy"]:
                words.append(f"\n{name(finding['remedy'], 400)}", style="italic")
            table.add_row(str(finding["rank_of_finding"]), _gain(finding), words)
        parts.append(Padding(table, (0, 0, 0, 1), expand=False))
    else:
        parts.append(Text(" no findings"))
    rest = len(document["findings"]) - len(shown)
    if rest > 0:
        parts.append(Text(f" {text.counted(rest, 'more finding')}: write a page with -o review.html"))
    parts += _time(document["time"])
    if verdict.get("next"):
        parts += [Text(""), Text(f"next    {name(verdict['next'], 300)}")]
    return Group(*parts)


def _gain(finding: Row) -> str:
    """The ceiling, short."""
    if finding["gain_ns_at_most"] is not None:
        return f"<= {human_time(finding['gain_ns_at_most'])}"
    return "-" if finding["gain_bytes"] is None else text.size(abs(finding["gain_bytes"]))


def _time(time: Sequence[Row]) -> list[RenderableType]:
    """Shares of the step over all stages and steps."""
    total = sum(t["step_ns"] for t in time)
    if not total:
        return []
    sums: dict[str, int] = {}
    for row in (c for t in time for c in t["classes"]):
        key = row["class"] if not row["role"] or row["class"] == "pp" else f"{row['class']} {row['role']}"
        sums[key] = sums.get(key, 0) + row["dur_ns"]
    words = [f"{key} {text.share(ns, total)}" for key, ns in sorted(sums.items(), key=lambda item: -item[1]) if ns]
    return [Text(""), Text(f"time    {', '.join(words)}")]
