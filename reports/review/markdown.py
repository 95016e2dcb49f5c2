"""The review as Markdown for pull requests and tickets: verdict, findings, steps, time by stage, and what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from traceanalyzer.reports import text
from traceanalyzer.reports.diff import human_bytes, human_time
from traceanalyzer.reports.markdown import escape, rest, table_row

Row = Mapping[str, Any]

MOST_FINDINGS = 7
"""Findings that are shown in full; the others fold."""

MOST_STAGES = 64
"""Rows of the table of time, and of the traffic that differs."""

MOST_TEXT = 65_000
"""Characters: a comment on GitHub holds 65,536."""


def markdown(document: Row, gates: Sequence[str] = ()) -> str:
    """The review of a document traceanalyzer.review/1; ``gates``: sentences of gates, shown beneath the verdict."""
    run, verdict = document["run"], document["verdict"]
    lines = [f"**{verdict['word']}**: {escape(verdict['sentence'])}", ""]
    lines += [f"- {escape(sentence)}" for sentence in gates]
    if gates:
        lines.append("")
    head = [run["job"], _ranks(run), run["device"], _steps(document["steps"])]
    lines += [" · ".join(escape(part) for part in head if part), ""]
    if verdict.get("next"):
        lines += [f"Next: {escape(verdict['next'])}", ""]
    lines += _findings(document["findings"])
    lines += _time(document["time"])
    lines += _pipelines(document["pipelines"])
    lines += _ledger(document["ledger"])
    lines += _issues(document["issues"])
    for row in document.get("left_out") or ():
        lines.append(f"Left out: {escape(row['what'])} ({row['rows']:,}).")
    return _cut("\n".join(lines).rstrip() + "\n")


def _cut(words: str) -> str:
    """The text as far as a comment holds it, in whole lines."""
    if len(words) <= MOST_TEXT:
        return words
    note = "Cut here: a comment holds no more. The page (-o review.html) and the JSON document hold all."
    lines: list[str] = []
    left = MOST_TEXT - len(note) - len("\n\n</details>\n\n\n")
    for line in words.split("\n"):
        left -= len(line) + 1
        if left < 0:
            break
        lines.append(line)
    folded = sum(line.startswith("<details>") for line in lines) > lines.count("</details>")
    return "\n".join([*lines, *(["", "</details>"] if folded else []), "", note]) + "\n"


def _ranks(run: Row) -> str:
    world = f" of {run['world_size']:,}" if run["world_size"] else ""
    return f"{len(run['ranks_recorded']):,}{world} ranks"


def _percent(share: float) -> str:
    """A share as the page has it: rounded down to a tenth."""
    return text.share(int(share * 1e9 + 1), 10**9)


def _steps(steps: Sequence[Row]) -> str:
    whole = [s for s in steps if s["complete"]]
    if not whole:
        return "no whole step"
    words = [f"step {text.ranges(s['step'] for s in whole)}"]
    # of median duration, as the page shows it: a step that occurred
    last = sorted(whole, key=lambda s: s["step_ns"] or 0)[(len(whole) - 1) // 2]
    words.append(human_time(last["step_ns"]))
    if last["tokens_per_s_per_gpu"] is not None:
        words.append(f"{last['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU")
    words.append(f"MFU {_percent(last['mfu'])}" if last["mfu"] is not None else f"MFU unknown ({last['why_null']})")
    return ", ".join(words)


def _findings(findings: Sequence[Row]) -> list[str]:
    if not findings:
        return ["No findings.", ""]
    lines = ["### Findings", ""]
    for i, finding in enumerate(findings):
        if i == MOST_FINDINGS:
            lines += ["", f"<details><summary>{text.counted(len(findings) - i, 'more finding')}</summary>", ""]
        lines.append(_finding(finding))
    return [*lines, *(["", "</details>"] if len(findings) > MOST_FINDINGS else []), ""]


def _finding(finding: Row) -> str:
    notes = [f"`{finding['code']}`", finding["confidence"]]
    if finding["because_of"] is not None:
        notes.append(f"effect of {finding['because_of']}")
    queries = dict.fromkeys(e["query"] for e in finding["evidence"])
    if queries:
        notes.append("evidence: " + ", ".join(escape(q) for q in queries))
    line = f"{finding['rank_of_finding']}. {escape(finding['sentence'])} ({', '.join(notes)})"
    return line + (f" *{escape(finding['remedy'])}*" if finding["remedy"] else "")


def _time(time: Sequence[Row]) -> list[str]:
    if not time:
        return []
    kinds = list(dict.fromkeys((c["class"], c["role"]) for t in time for c in t["classes"]))
    kinds.sort(
        key=lambda kind: -sum(c["dur_ns"] for t in time for c in t["classes"] if (c["class"], c["role"]) == kind)
    )
    titles = [kind if role in (None, kind) else f"{kind} {role}" for kind, role in kinds]
    lines = [
        "### Time by stage",
        "",
        f"| step | stage | {' | '.join(map(escape, titles))} |",
        f"|--:|--:|{'--:|' * len(kinds)}",
    ]
    for row in time[:MOST_STAGES]:
        shares = []
        for kind in kinds:
            part = sum(c["dur_ns"] for c in row["classes"] if (c["class"], c["role"]) == kind)
            shares.append(text.share(part, row["step_ns"]))
        stage = "-" if row["stage"] is None else row["stage"]
        lines.append(f"| {row['step']} | {stage} | {' | '.join(shares)} |")
    lines += rest(time, MOST_STAGES)
    return [*lines, ""]


def _pipelines(pipelines: Sequence[Row]) -> list[str]:
    if not pipelines:
        return []
    window = sum(s["window_ns"] for p in pipelines for s in p["stages"])
    bubble = sum(s["bubble_ns"] for p in pipelines for s in p["stages"])
    formula = pipelines[0]["formula_share"]
    words = (
        "by the schedule unknown"
        if formula is None
        else f"{_percent(formula)} by the schedule, {pipelines[0]['formula']}"
    )
    return [
        f"Bubble: {text.share(bubble, window)} of the pipeline's window in step {pipelines[0]['step']}, {words}.",
        "",
    ]


def _ledger(ledger: Row | None) -> list[str]:
    if ledger is None:
        return []
    cells = [c for c in ledger["cells"] if c["verdict"] not in ("match", "unknown")]
    if not cells:
        return [f"Traffic: {text.counted(len(ledger['cells']), 'row')} of the ledger, none differs.", ""]
    lines = [
        "### Traffic that differs",
        "",
        "| role | phase | operation | what | calls expected | measured | off-rank expected | measured | verdict |",
        "|---|---|---|---|--:|--:|--:|--:|---|",
    ]
    for cell in cells[:MOST_STAGES]:
        what = ", ".join(cell["components"]) or "-"
        row = [
            cell["role"] or "?", cell["phase"] or "?", cell["op"] or "?", what,
            "-" if cell["calls_expected"] is None else f"{cell['calls_expected']:,}", f"{cell['calls_measured']:,}",
            "-" if cell["off_rank_bytes_expected"] is None else human_bytes(cell["off_rank_bytes_expected"]),
            human_bytes(cell["off_rank_bytes_measured"]), cell["verdict"],
        ]  # fmt: skip
        lines.append(table_row(row))
    lines += rest(cells, MOST_STAGES)
    return [*lines, ""]


def _issues(issues: Sequence[Row]) -> list[str]:
    shown = [i for i in issues if i["severity"] != "info"]
    if not shown:
        return []
    return [
        "### Input",
        "",
        *(f"- {escape(i['severity'])}: {escape(i['sentence'])} ({_places(i)})" for i in shown[:20]),
        *([f"- {len(shown) - 20} more"] if len(shown) > 20 else []),
        "",
    ]


def _places(issue: Row) -> str:
    where = text.ranks_text(issue["ranks"]) if issue["ranks"] else escape(", ".join(issue["files"][:3])) or "no rank"
    return f"{where}, {text.counted(issue['occurrences'], 'time')}"
