"""The comparison as Markdown for pull requests: verdict, differing jobs, what moved, traffic that differs; the rest folds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from traceanalyzer.reports import text
from traceanalyzer.reports.compare import words
from traceanalyzer.reports.markdown import escape, rest, table_row

Row = Mapping[str, Any]

MOST_ROWS = 40
"""Rows of one table."""


def markdown(document: Row, gates: Sequence[str] = ()) -> str:
    """The comparison of a document traceanalyzer.compare/1; ``gates``: sentences of gates, shown beneath the verdict."""
    verdict = document["verdict"]
    lines = [f"**{verdict['word']}**: {escape(verdict['sentence'])}", ""]
    lines += [f"- {escape(sentence)}" for sentence in gates]
    lines += [""] if gates else []
    lines += [f"- {side.upper()}: {escape(words.side(document[side]))}" for side in "ab"] + [""]
    if verdict["next"]:
        lines += [f"Next: {escape(verdict['next'])}", ""]
    lines += _fields("Jobs differ", [(d["field"], d) for d in document["job_differences"]])
    lines += _fields("Settings differ", [(d["name"], d) for d in document["setting_differences"]])
    lines += [f"- {escape(note)}" for note in document["notes"]] + ([""] if document["notes"] else [])
    moved = [r for r in document["rows"] if r["verdict"] == "moved"]
    single = [r for r in document["rows"] if r["verdict"] == "no band"]
    same = [r for r in document["rows"] if r["verdict"] not in ("moved", "no band")]
    lines += _times("What moved", moved)
    lines += _times("What changed, noise or not", single)
    traffic = [t for t in document["traffic"] if t["differs"] or t["verdict"] == "moved"]
    lines += _traffic(traffic)
    alike = len(document["traffic"]) - len(traffic)
    if alike:
        lines += [
            f"{text.counted(alike, 'other kind')} of calls: nothing known to differ or to have moved.",
            "",
        ]
    lines += _slow(document["slow_ranks"])
    if same:
        lines += [f"<details><summary>{text.counted(len(same), 'figure')} that did not move</summary>", ""]
        lines += _times(None, same)
        lines += ["</details>", ""]
    rules = document["rules"]
    lines.append(f"Moved: {escape(rules['moved'])} ({rules['least_share'] * 100:g} %). Band: {escape(rules['band'])}.")
    lines += [f"Left out: {escape(row['what'])} ({row['rows']:,})." for row in document["left_out"]]
    return "\n".join(lines).rstrip() + "\n"


def _fields(title: str, rows: Sequence[tuple[str, Row]]) -> list[str]:
    if not rows:
        return []
    lines = [f"### {title}", "", "| | A | B |", "|---|---|---|"]
    for field, row in rows:
        a, b = (f"{words.value(row[s])}{_unstated(row, s)}" for s in "ab")
        lines.append(table_row((field, a, b)))
    return [*lines, ""]


def _unstated(row: Row, side: str) -> str:
    return "" if row.get("stated", "both") in ("both", side) else " (not stated)"


def _times(title: str | None, rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    lines = [] if title is None else [f"### {title}", ""]
    lines += ["| | A | B | change | of the step | band of A | band of B | |", "|---|--:|--:|--:|--:|---|---|---|"]
    for row in rows[:MOST_ROWS]:
        unit = row["unit"]
        cells = [
            words.row_name(row), words.median(row["a"], unit), words.median(row["b"], unit), words.change(row),
            words.percent(row["share_of_step"]), words.band(row["a"], unit), words.band(row["b"], unit),
            row["verdict"] if row["verdict"] == "moved" else f"{row['verdict']}: {row['reason']}",
        ]  # fmt: skip
        lines.append(table_row(cells))
    lines += rest(rows, MOST_ROWS)
    return [*lines, ""]


def _traffic(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    lines = [
        "### Traffic, per rank and step",
        "",
        "| | type | each | calls A | B | bytes A | B | time A | B | differs |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows[:MOST_ROWS]:
        time = "" if row["verdict"] != "moved" else "time moved"
        cells = [
            words.traffic_name(row), words.types(row), words.sizes(row), words.calls(row["calls_a"]),
            words.calls(row["calls_b"]), words.per_step(row["bytes_a"]), words.per_step(row["bytes_b"]),
            words.median(row["time_a"], "ns"), words.median(row["time_b"], "ns"),
            ", ".join(w for w in (words.differs(row), time) if w),
        ]  # fmt: skip
        lines.append(table_row(cells))
    lines += rest(rows, MOST_ROWS)
    return [*lines, ""]


def _slow(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    lines = ["### Slow ranks", ""]
    return [*lines, *(f"- {escape(slow_words(row))}" for row in rows[:MOST_ROWS]), ""]


def slow_words(row: Row) -> str:
    """One slow rank in words: in which run, why, by how much."""
    said = [
        f"{side.upper()}: {row[f'cause_{side}']}, {words.signed_time(row[f'over_ns_{side}'])} against its like, "
        f"in {text.counted(row[f'slow_steps_{side}'], 'step')}"
        for side in "ab"
        if row[f"slow_steps_{side}"]
    ]
    where = "slow in both" if row["only_in"] is None else f"slow only in {row['only_in']}"
    return f"rank {row['rank']} {where} ({'; '.join(said)})"
