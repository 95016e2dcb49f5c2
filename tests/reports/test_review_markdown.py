"""The review as Markdown and in the terminal, of one literal document."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from traceanalyzer.reports.review.markdown import markdown
from traceanalyzer.reports.review.terminal import render

MS = 1_000_000


def finding(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "rank_of_finding": number, "code": "slow_gpu", "kind": "time", "sentence": "Rank 5 is late.",
        "gain_ns_at_most": 20 * MS, "gain_bytes": None, "confidence": "proven", "place": {"ranks": [5]},
        "evidence": [{"query": "slow_ranks", "parameters": {}, "sentence": "", "rows": []}], "remedy": "Check clocks.",
        "because_of": None, **changes,
    }  # fmt: skip


def cell(**changes: Any) -> dict[str, Any]:
    return {
        "role": "tp", "phase": "forward", "op": "all_gather", "components": ["attention.qkv"], "calls_expected": 0,
        "calls_measured": 40, "off_rank_bytes_expected": 0, "off_rank_bytes_measured": 3 << 20, "verdict": "unexpected",
        **changes,
    }  # fmt: skip


def document(**changes: Any) -> dict[str, Any]:
    parts = [
        ("compute", None, None, 70),
        ("communication", "tp", "transfer", 10),
        ("communication", "tp", "waiting", 5),
        ("idle", None, None, 15),
    ]
    classes = [{"class": c, "role": r, "part": p, "dur_ns": ms * MS} for c, r, p, ms in parts]
    whole: dict[str, Any] = {
        "schema": "traceanalyzer.review/1",
        "run": {
            "path": "run.parquet", "ranks_recorded": [0, 1], "world_size": 8, "steps": [3], "device": "NVIDIA H100",
            "job": "4 layers, TP2",
        },
        "verdict": {"word": "differs", "sentence": "It is not what the job should send.", "next": "See row 1."},
        "steps": [
            {
                "step": 3, "complete": True, "step_ns": 100 * MS, "tokens_per_s_per_gpu": 12_345.6, "mfu": 0.4123,
                "why_null": None,
            }
        ],
        "findings": [finding(1), finding(2, code="bubble", sentence="More bubble.", because_of=1, remedy=None)],
        "time": [
            {
                "step": 3, "stage": 0, "ranks": [0], "step_ns": 100 * MS,
                "classes": classes,
            }
        ],
        "pipelines": [
            {"step": 3, "formula_share": 0.2, "formula": "(PP-1)/(M+PP-1)", "stages": [{"window_ns": 80, "bubble_ns": 20}]}
        ],
        "ledger": {"cells": [cell(), cell(verdict="match")]},
        "issues": [
            {"severity": "info", "sentence": "nothing", "ranks": [], "files": [], "occurrences": 1},
            {"severity": "data_loss", "sentence": "events lost", "ranks": [0, 1], "files": [], "occurrences": 12},
        ],
        "left_out": [{"what": "boxes of other pipelines", "rows": 3}],
    }  # fmt: skip
    return whole | changes


def test_the_whole_text() -> None:
    assert markdown(document(), ["unexpected>0: unexpected is 1, failed"]) == (
        r"""**differs**: It is not what the job should send.

- unexpected&gt;0: unexpected is 1, failed

4 layers, TP2 · 2 of 8 ranks · NVIDIA H100 · step 3, 100 ms, 12,346 tokens/s/GPU, MFU 41.2 %

Next: See row 1.

### Findings

1. Rank 5 is late. (`slow_gpu`, proven, evidence: slow\_ranks) *Check clocks.*
2. More bubble. (`bubble`, proven, effect of 1, evidence: slow\_ranks)

### Time by stage

| step | stage | compute | communication tp | idle |
|--:|--:|--:|--:|--:|
| 3 | 0 | 70 % | 15 % | 15 % |

Bubble: 25 % of the pipeline's window in step 3, 20 % by the schedule, (PP-1)/(M+PP-1).

### Traffic that differs

| role | phase | operation | what | calls expected | measured | off-rank expected | measured | verdict |
|---|---|---|---|--:|--:|--:|--:|---|
| tp | forward | all\_gather | attention.qkv | 0 | 40 | 0 B | 3 MiB | unexpected |

### Input

- data\_loss: events lost (ranks 0-1, 12 times)

Left out: boxes of other pipelines (3).
"""
    )


def test_what_comes_from_traces_is_only_text() -> None:
    evil = "<script>alert(1)</script> | `x` [a](b)\n# head"
    shown = markdown(document(findings=[finding(1, sentence=evil)], issues=[]))
    assert "<script>" not in shown
    assert r"&lt;script&gt;alert(1)&lt;/script&gt; \| \`x\` \[a\](b) \# head" in shown


def test_many_findings_fold() -> None:
    shown = markdown(document(findings=[finding(i) for i in range(1, 12)]))
    assert "<details><summary>4 more findings</summary>" in shown
    assert shown.index("7. Rank") < shown.index("<details>") < shown.index("8. Rank")


def test_little_is_known() -> None:
    unknown = {
        "step": 3,
        "complete": True,
        "step_ns": None,
        "tokens_per_s_per_gpu": None,
        "mfu": None,
        "why_null": "no job",
    }
    bare = document(
        verdict={"word": "no expectation", "sentence": "No job.", "next": None}, steps=[unknown], findings=[], time=[],
        pipelines=[], ledger=None, issues=[], left_out=[],
    )  # fmt: skip
    bare["run"] |= {"job": None, "world_size": None, "device": None}
    assert markdown(bare) == (
        "**no expectation**: No job.\n\n2 ranks · step 3, -, MFU unknown (no job)\n\nNo findings.\n"
    )


def shown(whole: dict[str, Any], width: int = 100) -> str:
    console = Console(width=width, force_terminal=False, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(render(whole))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def test_the_terminal() -> None:
    assert shown(document()) == (
        """run.parquet   4 layers, TP2
differs   It is not what the job should send.

 1  <= 20 ms  Rank 5 is late. (slow_gpu, proven)
              Check clocks.
 2  <= 20 ms  More bubble. (bubble, proven, effect of 1)

time    compute 70 %, communication tp 15 %, idle 15 %

next    See row 1."""
    )


def test_a_narrow_terminal_shows_the_first_findings() -> None:
    text = shown(document(findings=[finding(i) for i in range(1, 10)]), width=40)
    assert max(map(len, text.splitlines())) <= 40
    assert "2 more findings" in text
    assert "[bold]" in shown(document(findings=[finding(1, sentence="[bold]x")]))


def test_a_comment_holds_it() -> None:
    """GitHub takes 65,536 characters. What is cut is cut between lines, says so, and leaves no fold open."""
    many = [finding(n, sentence=f"Rank {n} is late. " + "x" * 900) for n in range(1, 101)]
    words = markdown(document(findings=many))
    assert 64_000 < len(words) <= 65_000
    lines = words.rstrip().splitlines()
    assert lines[-1] == "Cut here: a comment holds no more. The page (-o review.html) and the JSON document hold all."
    assert words.count("<details>") == words.count("</details>") == 1
    assert all(line.endswith("*Check clocks.*") for line in lines if ". Rank " in line)
