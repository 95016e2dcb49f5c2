"""The comparison as a page, as Markdown and in the terminal, of one literal document: whole, and nothing in it gets out."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

import pytest
from rich.console import Console

from traceanalyzer.reports.compare import words
from traceanalyzer.reports.compare.html import html
from traceanalyzer.reports.compare.markdown import markdown
from traceanalyzer.reports.compare.terminal import render

EVIL = "</script><script>pwned()</script><img src=x onerror=pwned()>|`*\"'<!-- {{data}} \u2028"
LONG = "x" * 10_000


def spread(median: float, low: float | None, high: float | None) -> dict[str, Any]:
    return {"steps": 1 if low is None else 3, "median": median, "low": low, "high": high, "method": "min-max"}


def row(what: str, a: Any, b: Any, verdict: str, reason: str, **more: Any) -> dict[str, Any]:
    change = b["median"] - a["median"] if a and b else None
    return {
        "what": what, "role": None, "axis": None, "stage": None, "unit": "ns", "part_of_step": what != "step time", "a": a,
        "b": b, "change": change, "ratio": b["median"] / a["median"] if a and b else None,
        "share_of_step": None if change is None else change / 1_000_000, "verdict": verdict, "reason": reason, **more,
    }  # fmt: skip


def call(op: str, **more: Any) -> dict[str, Any]:
    return {
        "role": "tp", "axis": "TP", "op": op, "phase": "forward", "component": "attention.qkv", "stage": None,
        "only_in": None, "by_data": False, "differs": [], "dtypes_a": ["bfloat16"], "dtypes_b": ["bfloat16"],
        "sizes_a": [8192], "sizes_b": [8192], "calls_a": 8, "calls_b": 8, "bytes_a": 65536, "bytes_b": 65536,
        "total_calls_a": 48, "total_calls_b": 48, "total_bytes_a": 393216, "total_bytes_b": 393216, "rank_steps_a": 6,
        "rank_steps_b": 6, "time_a": spread(1000, 900, 1100), "time_b": spread(1000, 900, 1100), "change": 0,
        "share_of_step": 0.0, "verdict": "not moved", "reason": "equal", **more,
    }  # fmt: skip


def side(path: str, *steps: int) -> dict[str, Any]:
    return {
        "path": path, "selected": None, "steps": list(steps), "steps_left_out": [],
        "step_times": [{"step": s, "step_ns": 1_000_000} for s in steps], "ranks_recorded": 2, "stages": None,
        "world_size": 8, "device": "NVIDIA H100", "job": "4 layers, TP2", "calls_outside_steps": 0,
    }  # fmt: skip


def document(**changes: Any) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "schema": "traceanalyzer.compare/1",
        "a": side("before.parquet", 1, 2, 3),
        "b": side("after.parquet", 4, 5, 6),
        "verdict": {"word": "moved", "sentence": "Step time moved.", "next": "See the roles."},
        "rules": {"least_share": 0.01, "least_ns": 10_000, "band": "shortest to longest", "moved": "outside both"},
        "job_differences": [
            {"field": "hidden_size", "a": 64, "b": 128, "stated": "both"},
            {"field": "sequence_parallel", "a": False, "b": True, "stated": "b"},
        ],
        "setting_differences": [{"name": "torch", "a": "2.9", "b": None}],
        "notes": ["Different ranks were recorded."],
        "rows": [
            row("step time", spread(1_000_000, 990_000, 1_010_000), spread(1_100_000, 1_090_000, 1_110_000), "moved", "out"),
            row("exposed", spread(5000, None, None), spread(95_000, 95_000, 96_000), "no band", "A has one step", role="tp"),
            row("compute", spread(600_000, 1, 2), spread(600_000, 1, 2), "not moved", "equal", stage=1),
            row("MFU", spread(0.40, 0.39, 0.41), spread(0.36, 0.35, 0.37), "moved", "out", unit="1", share_of_step=None),
            row("idle", None, spread(7, 7, 7), "unknown", "not known of A"),
        ],
        "traffic": [
            call("all_gather", differs=["calls", "bytes"], calls_b=9, bytes_b=73728),
            call("all_reduce", only_in="A", differs=["unknown"], calls_b=None, bytes_b=None, time_b=None, change=None),
            call("reduce_scatter"),
        ],
        "slow_ranks": [
            {
                "rank": 3, "stage": 0, "only_in": "B", "cause_a": None, "cause_b": "device", "slow_steps_a": 0,
                "slow_steps_b": 3, "over_ns_a": None, "over_ns_b": 255_000,
            }
        ],
        "left_out": [],
        "gates": {},
    }  # fmt: skip
    return {**whole, **changes}


def evil() -> dict[str, Any]:
    """A document whose every recorded text is hostile or very long."""
    return document(
        a=side(EVIL, 1) | {"device": EVIL, "job": LONG},
        verdict={"word": "moved", "sentence": EVIL, "next": LONG},
        notes=[EVIL],
        setting_differences=[{"name": EVIL, "a": EVIL, "b": LONG}],
        traffic=[call(EVIL, component=LONG, role=EVIL, dtypes_a=[EVIL], differs=["calls"])],
        rows=[row("busy", spread(1, 1, 1), spread(9, 9, 9), "moved", "out", role=EVIL)],
    )


def test_the_page_holds_the_document() -> None:
    page = html(document())
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    carried = json.loads(data)
    assert carried == document()  # its lists are too short to be packed
    assert "<title>moved: before.parquet and after.parquet</title>" in page
    assert 'content="traceanalyzer comparison"' in page
    assert len(page) < 2_000_000


def test_the_page_runs_its_own_scripts_alone() -> None:
    page = html(evil())
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    allowed = set(re.findall(r"'sha256-([^']+)'", policy.split("style-src")[0]))
    hashes = {base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts}
    assert hashes == allowed
    assert len(scripts) == 6
    assert "pwned()</script>" not in page
    assert "<img src=x" not in page
    assert not re.search(r'(?:src|href)="(?:https?:)?//', page.split("<style>")[0])


def test_another_schema_is_refused() -> None:
    with pytest.raises(ValueError, match=r"traceanalyzer\.compare/1"):
        html({"schema": "traceanalyzer.review/1"})


def test_markdown() -> None:
    assert markdown(document(), ["step_time>1.05x: step_time is 1.100x, failed"]) == (
        "**moved**: Step time moved.\n"
        "\n"
        "- step\\_time&gt;1.05x: step\\_time is 1.100x, failed\n"
        "\n"
        "- A: before.parquet   steps 1-3   2 of 8 ranks   NVIDIA H100   4 layers, TP2\n"
        "- B: after.parquet   steps 4-6   2 of 8 ranks   NVIDIA H100   4 layers, TP2\n"
        "\n"
        "Next: See the roles.\n"
        "\n"
        "### Jobs differ\n"
        "\n"
        "| | A | B |\n"
        "|---|---|---|\n"
        "| hidden\\_size | 64 | 128 |\n"
        "| sequence\\_parallel | False (not stated) | True |\n"
        "\n"
        "### Settings differ\n"
        "\n"
        "| | A | B |\n"
        "|---|---|---|\n"
        "| torch | 2.9 | unknown |\n"
        "\n"
        "- Different ranks were recorded.\n"
        "\n"
        "### What moved\n"
        "\n"
        "| | A | B | change | of the step | band of A | band of B | |\n"
        "|---|--:|--:|--:|--:|---|---|---|\n"
        "| step time | 1 ms | 1.1 ms | +100 us | +10.00 % | 990 us to 1.01 ms | 1.09 ms to 1.11 ms | moved |\n"
        "| MFU | 40.00 % | 36.00 % | -4.00 points | - | 39.00 % to 41.00 % | 35.00 % to 37.00 % | moved |\n"
        "\n"
        "### What changed, noise or not\n"
        "\n"
        "| | A | B | change | of the step | band of A | band of B | |\n"
        "|---|--:|--:|--:|--:|---|---|---|\n"
        "| exposed tp | 5 us | 95 us | +90 us | +9.00 % | none: one step | 95 us to 96 us | no band: A has one step |\n"
        "\n"
        "### Traffic, per rank and step\n"
        "\n"
        "| | type | each | calls A | B | bytes A | B | time A | B | differs |\n"
        "|---|---|--:|--:|--:|--:|--:|--:|--:|---|\n"
        "| tp forward all\\_gather attention.qkv | bfloat16 | 8 KiB | 8 | 9 | 64 KiB | 72 KiB | 1 us | 1 us "
        "| calls, bytes |\n"
        "| tp forward all\\_reduce attention.qkv | bfloat16 | 8 KiB | 8 | unknown | 64 KiB | unknown | 1 us | unknown "
        "| only in A, or of unknown role in B |\n"
        "\n"
        "1 other kind of calls: nothing known to differ or to have moved.\n"
        "\n"
        "### Slow ranks\n"
        "\n"
        "- rank 3 slow only in B (B: device, +255 us against its like, in 3 steps)\n"
        "\n"
        "<details><summary>2 figures that did not move</summary>\n"
        "\n"
        "| | A | B | change | of the step | band of A | band of B | |\n"
        "|---|--:|--:|--:|--:|---|---|---|\n"
        "| compute of stage 1 | 600 us | 600 us | 0 ns | +0.00 % | 1 ns to 2 ns | 1 ns to 2 ns | not moved: equal |\n"
        "| idle | unknown | 7 ns | - | - | - | 7 ns | unknown: not known of A |\n"
        "\n"
        "</details>\n"
        "\n"
        "Moved: outside both (1 %). Band: shortest to longest.\n"
    )


def test_markdown_escapes() -> None:
    shown = markdown(evil())
    assert "<script" not in shown
    assert "<img" not in shown
    (moved,) = (line for line in shown.splitlines() if line.startswith("| communication "))
    assert len(re.findall(r"(?<!\\)\|", moved)) == 9  # no bar of the name ends a cell
    assert LONG not in shown


@pytest.mark.parametrize("width", [80, 160])
def test_terminal(width: int) -> None:
    console = Console(width=width, force_terminal=False, color_system=None, markup=False, highlight=False)
    for shown in (document(), evil()):
        with console.capture() as captured:
            console.print(render(shown, width=width))
        lines = captured.get().splitlines()
        assert max(map(len, lines)) <= width
    with console.capture() as captured:
        console.print(render(document(), width=width))
    text = "\n".join(" ".join(line.split()) for line in captured.get().splitlines())
    bands = " 990 us to 1.01 ms 1.09 ms to 1.11 ms" if width == 160 else ""
    assert f"step time 1 ms 1.1 ms +100 us +10.00 %{bands} moved" in text
    assert "job sequence_parallel A False (not stated) B True" in text
    assert "What changed, noise or not" in text
    assert "rank 3 slow only in B" in text


def test_words() -> None:
    assert words.sizes(call("send", sizes_a=[1024], sizes_b=[2048])) == "1 KiB -> 2 KiB"
    assert words.sizes(call("all_to_all", by_data=True, sizes_a=[], sizes_b=[])) == "by routing"
    assert words.types(call("send", dtypes_b=["float32"])) == "bfloat16 -> float32"
    assert words.calls(4 / 3) == "1.333"
    assert words.signed_time(-1500) == "-1.5 us"
    assert words.traffic_name(call("send", role=None, component=None, stage=2)) == "? forward send of stage 2"
