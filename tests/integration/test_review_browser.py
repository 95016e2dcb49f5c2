"""The review page in a real browser: it opens from disk, draws, sorts, is reached by keyboard, and reads in both themes."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.reports.review.html import html

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from playwright.sync_api import Browser, Error, Page, expect, sync_playwright

MS = 1_000_000
CHECKS = Path(__file__).with_name("review_checks.js").read_text(encoding="utf-8")
FORWARD, BACKWARD = "#2257a8", "#8fd3ae"
"""Fills of the pipeline's boxes in the light theme."""

# -- documents ---------------------------------------------------------------------------------------------------------


def passes(stages: int, batches: int) -> tuple[list[dict[str, Any]], int]:
    """1F1B with forward passes of 1 ms and backward passes of 2 ms, and its window in ns."""
    left = []
    for stage in range(stages):
        warm = min(stages - stage - 1, batches)
        order = [("forward", i) for i in range(warm)]
        for i in range(batches - warm):
            order += [("forward", warm + i), ("backward", i)]
        left.append(order + [("backward", i) for i in range(batches - warm, batches)])
    ends: dict[tuple[str, int, int], int] = {}
    free = [0] * stages
    boxes = []
    while any(left):
        for stage, order in enumerate(left):
            if not order:
                continue
            kind, batch = order[0]
            before = ("forward", batch, stage - 1) if kind == "forward" else ("backward", batch, stage + 1)
            if kind == "backward" and stage == stages - 1:
                before = ("forward", batch, stage)
            if before[2] >= 0 and before not in ends:
                continue
            start = max(free[stage], ends.get(before, 0))
            takes = MS if kind == "forward" else 2 * MS
            free[stage] = ends[kind, batch, stage] = start + takes
            boxes.append(
                {
                    "stage": stage,
                    "rank": stage,
                    "kind": kind,
                    "microbatch": batch,
                    "chunk": 0,
                    "start_ns": start,
                    "dur_ns": takes,
                    "evidence": "mark",
                }
            )
            order.pop(0)
    return boxes, max(free)


def cell(
    role: str | None, op: str, what: list[str], due: int | None, measured: int, each: int, **more: Any
) -> dict[str, Any]:
    """A row of traceanalyzer.diff/1."""
    return {
        "role": role,
        "op": op,
        "phase": "forward",
        "stage": None,
        "dtype": "bfloat16",
        "group_size": 2,
        "payload_bytes_each": each,
        "components": what,
        "calls_expected": due,
        "calls_measured": measured,
        "payload_bytes_expected": None if due is None else due * each,
        "payload_bytes_measured": measured * each,
        "off_rank_bytes_expected": None if due is None else due * each // 2,
        "off_rank_bytes_measured": measured * each // 2,
        "varies": False,
        "avoidable_bytes": 0,
        "avoidable": [],
        "time_ns": measured * MS,
        "exposed_ns": measured * MS // 10,
        "bus_bandwidth_bytes_per_s": 168e9,
        "verdict": "match",
        "reason": None,
        "cause": None,
        "related_cells": [],
        "role_evidence": ["description"],
        "ranks": list(range(8)),
        "steps": [2, 3],
    } | more


def small() -> dict[str, Any]:
    """PP4, 8 micro-batches, TP2: a finding, a straggler, three verdicts, memory, bandwidth, history."""
    boxes, window = passes(4, 8)
    classes = [
        ("compute", None, None, 600),
        ("communication", "tp", "transfer", 70),
        ("communication", "tp", "waiting", 25),
        ("communication", "dp_cp", "transfer", 60),
        ("bubble", None, None, 180),
        ("launch_starved", None, None, 20),
        ("idle", None, None, 45),
    ]
    step = 1_000 * MS
    recompute = {
        "code": "recompute_full",
        "sentence": "Full recomputation repeats 40 all-gathers.",
        "confidence": "proven",
    }
    formula = {
        "in": "S/TP * B * H = 33,554,432 elements = 64 MiB bf16",
        "calls": "5 layers * 8 micro-batches = 40 per step",
    }
    before_qkv = {"component": "before QKV", "rule": "tp.sp", "calls": 40, "formula": formula, "evidence": "reference"}
    coverage = {
        "ranks_present": list(range(8)),
        "ranks_declared": 8,
        "steps": [2, 3],
        "calls": 90,
        "kernels": 100,
        "kernels_attributed": 90,
        "bytes_known": 1000,
        "bytes_attributed": 1000,
        "attributed": 0.9,
        "judged": 0.9,
        "unattributed": [
            {"name": "deep_ep::dispatch", "kernels": 10, "time_ns": MS, "why": "no recorded call explains it"}
        ],
    }
    cells = [
        cell(
            "tp",
            "all_gather",
            ["before QKV"],
            0,
            40,
            64 << 20,
            verdict="unexpected",
            phase="recompute",
            cause=recompute,
        ),
        cell(None, "all_to_all", ["deep_ep::dispatch"], None, 640, 1 << 20, verdict="unknown", reason="unattributed"),
        cell("tp", "all_gather", ["before QKV", "before MLP"], 80, 80, 64 << 20, expected=[before_qkv]),
        cell("pp", "send", ["activations"], 8, 8, 32 << 20, ranks=[0, 1], steps=[2]),
        cell(
            "dp_cp",
            "reduce_scatter",
            ["gradients"],
            6,
            6,
            412 << 20,
            avoidable_bytes=618 << 20,
            avoidable=[{"code": "fp32_reduction", "setting": "--grad-reduce-in-bf16"}],
        ),
    ]
    late = {(5, "tp"): 9 * MS}
    return {
        "schema": "traceanalyzer.review/1",
        "run": {"path": "runs/pp4.parquet", "ranks_recorded": list(range(8)), "world_size": 8, "job": "GPT, TP2 x PP4"},
        "verdict": {"word": "differs", "sentence": "40 calls too many.", "coverage": coverage, "next": "Turn it off."},
        "steps": [
            {
                "step": s,
                "complete": True,
                "step_ns": step + s,
                "ranks": 8,
                "tokens_per_s_per_gpu": 2861.4,
                "mfu": 0.41,
                "hfu": 0.43,
            }
            for s in (2, 3)
        ],
        "peak": {"tflops": 989.0, "dtype": "bf16", "source": "device name"},
        "history": [
            {"iteration": i, "step_ns": step + (40 * MS if i in (50, 51) else i % 7 * MS), "profiled": i in (50, 51)}
            for i in range(1, 101)
        ],
        "findings": [
            {
                "rank_of_finding": 1,
                "code": "recompute_full",
                "kind": "verdict",
                "sentence": "Full recomputation repeats 40 all-gathers of TP.",
                "gain_ns_at_most": 44 * MS,
                "gain_bytes": 40 << 20,
                "confidence": "proven",
                "place": {"role": "tp", "ranks": [0, 1]},
                "evidence": [
                    {
                        "query": "comm_summary",
                        "parameters": {"role": "tp"},
                        "sentence": "Calls of TP.",
                        "rows": [{"rank": r, "dur_ns": 44 * MS, "at_ns": 1_760_000_000_123_456_789} for r in (0, 1)],
                    }
                ],
                "remedy": "--recompute-granularity selective",
            }
        ],
        "time": [
            {
                "step": s,
                "stage": stage,
                "ranks": [2 * stage, 2 * stage + 1],
                "step_ns": 2 * step,
                "classes": [{"class": c, "role": r, "part": p, "dur_ns": 2 * ms * MS} for c, r, p, ms in classes],
            }
            for s in (2, 3)
            for stage in range(4)
        ],
        "pipelines": [
            {
                "pipeline": 0,
                "step": 2,
                "window_ns": window,
                "clocks": "aligned",
                "residual_ns": 31_000,
                "formula_share": 3 / 11,
                "formula": "(PP-1)/(M+PP-1) = 3/11",
                "stages": [
                    {"stage": s, "window_ns": window, "bubble_ns": window - 24 * MS, "bubble_of_total": 3 / 11}
                    for s in range(4)
                ],
                "boxes": boxes,
            }
        ],
        "ledger": {
            "rules": "megatron",
            "version": "0.16",
            "coverage": coverage,
            "cells": cells,
            "job_conflicts": [{"sentence": "recompute_granularity: intended selective, captured full"}],
            "not_in_window": ["evaluation"],
        },
        "ranks": {
            "axes": ["tp", "cp", "ep", "pp", "dp"],
            "metrics": [
                {"key": "late_ns", "title": "own lateness", "unit": "ns", "doc": "Lateness of its own."},
                {"key": "peak_bytes", "title": "peak memory", "unit": "bytes", "doc": "Largest peak."},
            ],
            "rows": [
                {
                    "rank": r,
                    "tp": r % 2,
                    "cp": 0,
                    "ep": 0,
                    "pp": r // 2,
                    "dp": 0,
                    "host": f"node{r // 4}",
                    "late_ns": 9 * MS if r == 5 else 100_000 * (r + 1),
                    "peak_bytes": None if r == 7 else (60 + r) << 30,
                }
                for r in range(8)
            ],
        },
        "skew": [
            {
                "rank": r,
                "role": role,
                "calls": 80,
                "own_late_ns": late.get((r, role), 40_000 * r),
                "inherited_late_ns": 300_000,
                "residual_ns": 20_000,
                "slow": (r, role) in late,
                "finding": "Rank 5 comes late by itself." if (r, role) in late else None,
            }
            for role in ("tp", "pp")
            for r in range(8)
        ],
        "experts": [],
        "bandwidth": [
            {
                "role": role,
                "op": op,
                "dtype": "bfloat16",
                "group_size": 2,
                "payload_bytes": size,
                "span": span,
                "calls": 80,
                "min_transfer_ns": 300_000,
                "median_transfer_ns": 400_000,
                "max_transfer_ns": 600_000,
                "algorithm_gb_per_s": rate,
                "bus_gb_per_s": rate,
                "link_bus_gb_per_s": link,
            }
            for role, op, size, span, rate, link in (
                ("tp", "all_gather", 128 << 20, "intra", 168.0, 450.0),
                ("tp", "all_reduce", 32 << 10, "intra", 1.5, 450.0),
                ("pp", "send", 32 << 20, "inter", 41.9, None),
                ("dp_cp", "reduce_scatter", 412 << 20, "inter", 36.0, 50.0),
            )
        ],
        "memory": [
            {"rank": r, "stage": r // 2, "what": what, "expected_bytes": expected << 30, "measured_bytes": measured}
            for r in range(8)
            for what, expected, measured in (
                ("parameters", 5, 5 << 30),
                ("gradients", 10, 10 << 30),
                ("optimizer", 15, 15 << 30),
                ("activations", 20, None),
                ("peak", 50, 53 << 30),
            )
        ],
        "issues": [
            {
                "severity": "data_loss",
                "code": "torn_tail",
                "sentence": "A torn record was left out.",
                "occurrences": 2,
                "ranks": [1, 6],
            },
            {
                "severity": "info",
                "code": "no_shapes",
                "sentence": "No shapes were recorded.",
                "occurrences": None,
                "ranks": [],
            },
        ],
        "appendix": {
            "job": {"num_layers": 20, "hidden_size": 8192},
            "definitions": [{"term": "exposed", "text": "Communication with no compute running."}],
            "versions": {"traceanalyzer": "0.1.0"},
            "queries": [
                {"name": "comm_summary", "sql": "SELECT 1 AS one\nFROM comm", "gives": "Calls.", "parameters": {}},
                {"name": "bubble", "sql": "SELECT 2 AS two", "gives": "Bubble.", "parameters": {}},
            ],
        },
        "left_out": [],
    }


def moe() -> dict[str, Any]:
    """Everything matches; experts of 12 layers on 8 ranks, 16 micro-batches, two chunks."""
    given = small()
    noise = random.Random(1)
    given["verdict"] |= {"word": "match", "sentence": "Every byte is what the job should send."}
    given["ledger"]["cells"] = [c for c in given["ledger"]["cells"] if c["verdict"] == "match"]
    boxes, window = passes(4, 16)
    given["pipelines"][0] |= {"boxes": [b | {"chunk": b["microbatch"] % 2} for b in boxes], "window_ns": window}
    given["experts"] = [
        {
            "layer": layer,
            "microbatch": batch,
            "rank": rank,
            "rows_received": int(noise.gauss(4096, 700)),
            "mean": 4096.0,
        }
        for layer in range(12)
        for batch in range(2)
        for rank in range(8)
    ]
    return given


def bare() -> dict[str, Any]:
    """No job, no device times, nothing across ranks."""
    return {
        "schema": "traceanalyzer.review/1",
        "run": {"path": "bare.parquet", "ranks_recorded": [0], "world_size": None, "steps": [1], "job": None},
        "verdict": {"word": "no expectation", "sentence": "No job is known.", "coverage": None, "next": "Give --job."},
        "steps": [
            {"step": 1, "complete": True, "step_ns": 5 * MS, "ranks": [0], "mfu": None, "why_null": "no job is known"}
        ],
        "findings": [],
        "ledger": None,
        "appendix": {"job": None, "definitions": [], "versions": {}, "queries": []},
    }


EVIL = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'>\"'&lt;<!-- \u2028 \u202e {b} {a|b}"
LONG = "void cutlass::Kernel<" + "A" * 10_000 + ">"


def hostile() -> dict[str, Any]:
    """Every text that a trace, a job or a file name can bring in is markup or 10,000 characters long."""
    given = small()
    given["run"] |= {"path": EVIL, "job": LONG, "device": EVIL}
    given["verdict"] |= {"sentence": EVIL + LONG, "next": EVIL}
    given["findings"][0] |= {"sentence": EVIL, "code": EVIL, "remedy": LONG, "place": {"role": EVIL, "host": LONG}}
    given["findings"][0]["evidence"][0] |= {"query": EVIL, "sentence": EVIL, "rows": [{EVIL: EVIL, "name": LONG}]}
    given["time"][0]["classes"][0]["class"] = EVIL
    given["time"][1]["classes"][1]["role"] = EVIL
    given["pipelines"][0] |= {"formula": EVIL, "clocks": EVIL}
    for row in given["ledger"]["cells"][:2]:
        row |= {"components": [EVIL, LONG], "op": EVIL, "phase": EVIL, "dtype": EVIL, "role": EVIL}
        row["cause"] = {"code": EVIL, "sentence": LONG, "confidence": EVIL}
    given["ledger"]["coverage"]["unattributed"][0] |= {"name": LONG, "why": EVIL}
    given["ranks"]["metrics"][0] |= {"title": EVIL, "doc": EVIL}
    for row in given["ranks"]["rows"]:
        row["host"] = EVIL
    for row in given["skew"]:
        row |= {"role": EVIL, "finding": EVIL}
    given["bandwidth"][0] |= {"role": EVIL, "op": EVIL, "dtype": EVIL}
    given["memory"][0]["what"] = EVIL
    given["issues"][0] |= {"sentence": LONG, "code": EVIL}
    given["appendix"]["job"] = {EVIL: EVIL, "name": LONG}
    given["appendix"]["definitions"] = [{"term": EVIL, "text": LONG}]
    return given


DOCUMENTS: dict[str, Callable[[], dict[str, Any]]] = {"small": small, "moe": moe, "bare": bare, "hostile": hostile}

# -- the browser -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, that of the system or Playwright's own."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = os.environ.get("CHROMIUM") or next((path for path in map(shutil.which, names) if path), None)
    quiet = [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]
    with sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(executable_path=found, args=quiet)
        except Error as error:
            pytest.skip(f"no Chromium could be started: {str(error).splitlines()[0]}")
        yield started
        started.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages as files."""
    folder = tmp_path_factory.mktemp("review")
    pages = {name: folder / f"{name}.html" for name in DOCUMENTS}
    for name, path in pages.items():
        path.write_text(html(DOCUMENTS[name]()), encoding="utf-8")
    return pages


Opener = Callable[..., Page]


@pytest.fixture
def opened(browser: Browser, written: dict[str, Path]) -> Iterator[Opener]:
    """Opens a page from disk; at the end nothing may have been said on its console, asked for, or popped up."""
    contexts = []
    said: list[str] = []
    asked: list[str] = []

    def start(name: str, width: int = 1280, height: int = 900, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(written[name].as_uri())
        page.wait_for_selector("html[data-ready=true]")
        return page

    yield start
    for context in contexts:
        context.close()
    assert said == []
    assert {url for url in asked if not url.startswith("file:")} == set()
    assert len(asked) == len(contexts)


def texts(page: Page, selector: str) -> list[str]:
    """Texts as shown; of SVG, which has no such notion, as written."""
    found = page.locator(selector)
    return found.all_text_contents() if " svg " in selector else found.all_inner_texts()


def column(page: Page, number: int) -> list[str]:
    """Cells of a column of the ledger, from 1, the button that opens a row being the first."""
    return texts(page, f"#s-ledger tbody tr:not(.detail) > td:nth-child({number})")


def check(page: Page, name: str) -> dict[str, Any]:
    """What one of the checks in review_checks.js finds."""
    found: dict[str, Any] = page.evaluate(f"() => {{ {CHECKS}\n return checks.{name}(); }}")
    return found


def unfold(page: Page) -> None:
    """Opens what is folded, and the first rows of the ledger."""
    page.evaluate("document.querySelectorAll('details.fold').forEach((d) => { d.open = true; })")
    page.wait_for_timeout(100)
    page.evaluate("[...document.querySelectorAll('#s-ledger .open')].slice(0, 3).forEach((b) => b.click())")


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_opens_from_disk_and_says_the_verdict_first(opened: Opener) -> None:
    page = opened("small")
    assert texts(page, "main > * > h1, main > * > h2") == [
        "≠\nTraffic differs",
        "Findings",
        "Step time by stage",
        "Pipeline",
        "Traffic: expected and measured",
        "Ranks",
        "Skew and stragglers",
        "MoE balance",
        "Bandwidth",
        "Memory",
        "Input",
        "Step-time history",
        "Appendix",
    ]
    assert texts(page, ".figures dt") == ["Step time", "Tokens/s per GPU", "MFU"]
    assert texts(page, ".figures dd") == ["1 s", "2,861", "41 %"]
    assert texts(page, ".coverage dd") == ["8 of 8", "90 of 100", "100 %", "90 %", "90"]
    assert texts(page, ".finding-gain")[0].split("\n") == ["at most 44 ms a step", "40 MiB a rank and step"]


def test_charts_are_drawn(opened: Opener) -> None:
    page = opened("small")
    boxes = "#s-pipelines .chart svg path[fill='{}']"
    assert page.locator(boxes.format(FORWARD)).count() == 4 * 8
    assert page.locator(boxes.format(BACKWARD)).count() == 4 * 8
    numbers = texts(page, "#s-pipelines .chart svg text")
    assert [numbers.count(str(batch)) for batch in range(8)] == [8] * 8
    assert [n for n in numbers if n.startswith("stage")] == [f"stage {s}  27.2 %" for s in range(4)]
    shares = texts(page, "#s-time .chart svg text")
    assert shares.count("60 %") == 4  # compute, on each of four bars
    assert shares.count("18 %") == 4  # the bubble
    assert (
        page.locator("#s-time .chart svg path[fill^='url']").count() >= 4 * 4
    )  # patterns: waiting, bubble, starved, idle
    assert page.locator("#s-skew .chart svg path[fill='#b3261e']").count() == 8
    assert [n for n in texts(page, "#s-ranks .chart svg text") if n.endswith(("s", "?"))] == [
        "100 µs", "200 µs", "300 µs", "400 µs", "500 µs", "9 ms", "700 µs", "800 µs",
    ]  # fmt: skip
    assert "500" in texts(page, "#s-bandwidth .chart svg text")  # GB/s: the links' 450 are on the chart
    for section in ("bandwidth", "memory", "history"):
        assert page.locator(f"#s-{section} .chart svg path").count() > 4, section


def test_the_pipeline_zooms_by_button(opened: Opener) -> None:
    page = opened("small")
    boxes = page.locator(
        f"#s-pipelines .chart svg path[fill='{FORWARD}'], #s-pipelines .chart svg path[fill='{BACKWARD}']"
    )
    expect(boxes).to_have_count(64)
    page.get_by_role("button", name="Zoom in").press("Enter")
    page.get_by_role("button", name="Zoom in").press("Enter")
    assert page.evaluate("R.pipelineView.range()") == [37.5, 62.5]
    page.wait_for_timeout(50)  # drawn with the next frame
    assert 0 < boxes.count() < 32
    page.get_by_role("button", name="Later").press("Enter")
    assert page.evaluate("R.pipelineView.range()") == [50, 75]
    page.get_by_role("button", name="Show the whole step").press("Enter")
    expect(boxes).to_have_count(64)


def test_the_ledger_sorts_by_keyboard(opened: Opener) -> None:
    page = opened("small")
    assert column(page, 2) == ["1", "2", "3", "4", "5"]
    head = page.locator("#s-ledger th", has_text="calls meas.")
    head.get_by_role("button").press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert column(page, 2) == ["2", "3", "1", "4", "5"]  # 640, 80, 40, 8, 6 calls
    head.get_by_role("button").press(" ")
    assert head.get_attribute("aria-sort") == "ascending"
    assert column(page, 2) == ["5", "4", "1", "3", "2"]
    expected = page.locator("#s-ledger th", has_text="calls exp.")
    expected.get_by_role("button").press("Enter")
    assert column(page, 2) == ["3", "4", "5", "1", "2"]  # 80, 8, 6, 0; what is not known comes last
    expected.get_by_role("button").press("Enter")
    assert column(page, 2) == ["1", "5", "4", "3", "2"]
    assert head.get_attribute("aria-sort") == "none"
    page.locator("#s-ledger th", has_text="verdict").get_by_role("button").press("Enter")
    assert column(page, 2) == ["1", "2", "3", "4", "5"]  # the worst first


def test_the_ledger_filters_and_unfolds(opened: Opener) -> None:
    page = opened("small")
    page.get_by_label("Verdict").select_option("match")
    assert column(page, 2) == ["3", "4", "5"]
    assert texts(page, "#s-ledger .status") == ["3 of 5 rows"]
    page.get_by_label("Axis").select_option("DP")
    assert column(page, 2) == ["5"]
    page.get_by_label("Axis").select_option("")
    page.get_by_label("Verdict").select_option("")
    page.get_by_label("Contains").fill("qkv")
    assert column(page, 2) == ["1", "3"]
    page.get_by_label("Contains").fill("step 2")  # where only some rows are
    assert column(page, 2) == ["4"]
    assert column(page, 6) == ["activations\nranks 0-1, step 2"]
    page.get_by_label("Contains").fill("recomputation")  # the cause's sentence
    assert column(page, 2) == ["1"]
    page.get_by_label("Contains").fill("")
    page.get_by_label("avoidable only").check()
    assert column(page, 2) == ["5"]
    page.get_by_label("avoidable only").uncheck()
    assert texts(page, "#s-ledger .status") == ["5 rows"]
    third = page.locator("#s-ledger .open").nth(2)
    third.press("Enter")
    assert third.get_attribute("aria-expanded") == "true"
    detail = page.locator("#s-ledger tr.detail:not([hidden])")
    assert "5 layers * 8 micro-batches = 40 per step" in detail.inner_text()
    assert "5,368,709,120" in detail.inner_text()  # 80 calls of 64 MiB, to the byte
    third.press("Enter")
    assert detail.count() == 0


def test_evidence_leads_to_rows_and_sql(opened: Opener) -> None:
    page = opened("small")
    page.locator(".finding summary").first.press("Enter")
    evidence = page.locator(".evidence")
    expect(evidence.locator("tbody tr")).to_have_count(2)
    assert evidence.locator("tbody td").all_inner_texts() == [
        "0", "44 ms", "1,760,000,000,123,456,789 ns", "1", "44 ms", "1,760,000,000,123,456,789 ns",
    ]  # fmt: skip
    assert "traceanalyzer query runs/pp4.parquet comm_summary --param role=tp" in evidence.inner_text()
    evidence.locator("summary").press("Enter")
    expect(evidence.locator("pre")).to_be_visible()
    assert evidence.locator("pre").inner_text() == "SELECT 1 AS one\nFROM comm"


def test_a_figure_leads_to_its_queries(opened: Opener) -> None:
    """Those of them that the appendix holds."""
    page = opened("small")
    source = page.locator("#s-pipelines > details.fold")
    assert source.locator("summary").inner_text() == "Where it comes from: bubble"
    source.locator("summary").press("Enter")
    assert source.locator(".command").inner_text() == "traceanalyzer query runs/pp4.parquet bubble"
    source.locator(".evidence summary").press("Enter")
    assert source.locator("pre").inner_text() == "SELECT 2 AS two"
    page = opened("bare")
    assert page.get_by_text("Where it comes from").count() == 0


def test_the_rank_grid_follows_the_reader(opened: Opener) -> None:
    page = opened("small")
    chart = "#s-ranks .chart svg text"
    assert [t for t in texts(page, chart) if t[:2] in ("tp", "pp")] == ["pp0", "pp1", "pp2", "pp3", "tp0", "tp1"]
    page.locator("#s-ranks select[data-axis=pp]").select_option("columns")
    assert [t for t in texts(page, chart) if t[:2] in ("tp", "pp")] == [
        f"pp{p} tp{t}" for p in range(4) for t in range(2)
    ]
    page.locator("#s-ranks select[data-axis=pp]").select_option("rows")
    page.locator("#s-ranks select[data-axis=tp]").select_option("off")
    assert [t for t in texts(page, chart) if t.endswith("s")] == [
        "200 µs",
        "400 µs",
        "9 ms",
        "800 µs",
    ]  # the larger of two
    page.locator("#s-ranks select[data-axis=tp]").select_option("columns")
    page.get_by_label("Colour").select_option("peak_bytes")
    shown = [t for t in texts(page, chart) if t.endswith("B") or t == "?"]
    assert shown == ["60 GiB", "61 GiB", "62 GiB", "63 GiB", "64 GiB", "65 GiB", "66 GiB", "?"]
    assert texts(page, "#s-ranks .scale span") == ["60 GiB", "66 GiB", "?: unknown of 1 rank"]


def test_the_step_is_chosen_once_for_all(opened: Opener) -> None:
    page = opened("small")
    assert page.locator(".strip h3").inner_text().startswith("Where step 2 goes")
    page.locator(".band select").select_option("3")
    assert page.locator(".strip h3").inner_text().startswith("Where step 3 goes")
    assert "step 3" in (page.locator("#s-time .chart").get_attribute("aria-label") or "")


def test_experts_are_shown_against_their_mean(opened: Opener) -> None:
    page = opened("moe")
    given = [r for r in moe()["experts"] if r["layer"] == 0 and r["rank"] == 0]
    share = sum(r["rows_received"] for r in given) / (4096 * 2)
    cells = [t for t in texts(page, "#s-experts .chart svg text") if t[:2] in ("0.", "1.", "2.")]
    assert len(cells) == 12 * 8
    assert cells[0] == f"{share:.2f}"


def test_what_was_not_recorded_says_why(opened: Opener) -> None:
    page = opened("bare")
    for section in (
        "time",
        "pipelines",
        "ledger",
        "ranks",
        "skew",
        "experts",
        "bandwidth",
        "memory",
        "issues",
        "history",
    ):
        sentence = page.locator(f"#s-{section} .empty")
        assert sentence.count() == 1, section
        assert sentence.inner_text().endswith("."), section
    assert page.locator(".chart").count() == 0
    assert texts(page, ".figures dd") == ["5 ms", "unknown", "unknown"]
    assert "no job is known" in page.locator(".figures").inner_text()


# -- how it reads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "width"),
    [("small", 1280), ("small", 390), ("moe", 390), ("bare", 390), ("hostile", 1280), ("hostile", 390)],
)
def test_no_text_lies_on_another(opened: Opener, name: str, width: int) -> None:
    page = opened(name, width)
    for _ in ("folded", "unfolded"):
        found = check(page, "overlaps")
        assert found["texts"] > (40 if name == "bare" else 250)
        assert found["pairs"] == []
        assert found["wide"] <= 0  # the page itself never scrolls sideways
        unfold(page)


@pytest.mark.parametrize(("name", "scheme"), [("small", "light"), ("small", "dark"), ("moe", "dark")])
def test_contrast_is_aa(opened: Opener, name: str, scheme: str) -> None:
    page = opened(name, 1280, 1000, color_scheme=scheme)
    unfold(page)
    page.set_viewport_size({"width": 1280, "height": page.evaluate("document.documentElement.scrollHeight")})
    page.wait_for_timeout(100)
    found = check(page, "contrast")
    assert found["checked"] > 400
    assert found["bad"] == []


def test_the_checks_see_what_is_wrong(opened: Opener) -> None:
    """Texts moved onto each other, and grey on white, as the two checks above must find them."""
    page = opened("bare", 1280, 3000)
    assert check(page, "overlaps")["pairs"] == check(page, "contrast")["bad"] == []
    page.evaluate("document.querySelector('.next').style.marginTop = '-22px'")
    assert "No job is known. / Next" in check(page, "overlaps")["pairs"]
    page.evaluate("document.documentElement.style.setProperty('--muted', '#949494')")  # 3.03 to 1 on white
    assert "3.03 Give --job." in check(page, "contrast")["bad"]


def test_the_theme_follows_the_system_and_the_reader(opened: Opener) -> None:
    page = opened("small", color_scheme="dark")
    ground = "getComputedStyle(document.querySelector('#s-findings')).backgroundColor"
    forward = "#s-pipelines .chart svg path[fill='{}']"
    assert page.evaluate(ground) == "rgb(23, 28, 35)"
    assert page.locator(forward.format("#2a62b8")).count() == 32
    button = page.get_by_role("button", name="Theme")
    button.press("Enter")
    assert button.inner_text() == "Theme: light"
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    assert page.locator(forward.format(FORWARD)).count() == 32
    button.press("Enter")
    assert page.evaluate(ground) == "rgb(23, 28, 35)"
    button.press("Enter")
    page.emulate_media(color_scheme="light")
    expect(page.locator(forward.format(FORWARD))).to_have_count(32)
    assert page.evaluate(ground) == "rgb(255, 255, 255)"


def test_the_keyboard_reaches_everything(opened: Opener) -> None:
    page = opened("small")
    controls = "a[href], button, select, input, summary, [tabindex='0']"
    visible = f'[...document.querySelectorAll("{controls}")].filter((e) => e.checkVisibility())'
    number = page.evaluate(f"{visible}.forEach((e, i) => {{ e.dataset.number = i; }}), {visible}.length")
    assert number > 60
    reached = []
    page.evaluate("document.activeElement.blur()")
    for _ in range(number):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.dataset.number"))
    assert sorted(map(int, reached)) == list(range(number))
    assert reached[0] == "0"
    page.evaluate("window.scrollTo(0, 0), document.activeElement.blur()")


def test_the_first_key_skips_to_the_review(opened: Opener) -> None:
    page = opened("small")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the review"
    assert page.locator(".skip").bounding_box()["x"] >= 0  # type: ignore[index]
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Tab")
    assert page.evaluate("!!document.activeElement.closest('main')")


def test_landmarks_headings_and_names(opened: Opener) -> None:
    page = opened("small")
    assert page.locator("main").count() == page.locator("nav[aria-label]").count() == page.locator("h1").count() == 1
    assert page.evaluate(
        "[...document.querySelectorAll('main > section')]"
        ".every((s) => document.getElementById(s.getAttribute('aria-labelledby')))"
    )
    assert page.locator(".chart:not([aria-label])").count() == 0
    targets = page.evaluate(
        "[...document.querySelectorAll('#rail a')].map((a) => document.querySelectorAll(a.getAttribute('href')).length)"
    )
    assert targets == [1] * 13
    assert page.evaluate("[...document.querySelectorAll('select, input')].every((e) => e.labels.length === 1)")


def test_motion_is_asked_for(opened: Opener) -> None:
    behaviour = "getComputedStyle(document.documentElement).scrollBehavior"
    assert opened("bare", reduced_motion="reduce").evaluate(behaviour) == "auto"
    assert opened("bare", reduced_motion="no-preference").evaluate(behaviour) == "smooth"


def test_nothing_in_a_trace_becomes_markup(opened: Opener) -> None:
    page = opened("hostile")
    unfold(page)
    assert page.evaluate("window.pwned === undefined")
    assert page.locator("img, iframe, object, embed, main script, main style, nav script").count() == 0
    assert "</script><script>window.pwned = 1</script>" in page.locator(".next").inner_text()
    longest = page.evaluate(
        "Math.max(...[...document.querySelectorAll('summary, .name, svg text')].map((e) => e.textContent.length))"
    )
    assert longest <= 1200
    assert page.evaluate("R.shell('runs/a b$(pwned).parquet')") == "'runs/a b$(pwned).parquet'"
    assert page.evaluate("""R.shell("it's")""") == r"'it'\''s'"
    job = page.locator(".run details.long")
    assert len(job.locator("summary").nth(1).get_attribute("title") or "") == len(LONG)
    assert job.nth(1).locator(".whole").text_content() == LONG


def test_paper_is_light_and_as_wide_as_the_paper(opened: Opener) -> None:
    page = opened("small", color_scheme="dark")
    page.evaluate(
        "addEventListener('beforeprint', () => { window.printed = [document.documentElement.dataset.scheme, "
        "Math.max(...[...document.querySelectorAll('.chart svg')].map((s) => s.clientWidth))]; })"
    )
    pdf = page.pdf(prefer_css_page_size=True, print_background=True)
    assert pdf.startswith(b"%PDF")
    theme, widest = page.evaluate("window.printed")
    assert theme == "light"
    assert 690 < widest <= 186 / 25.4 * 96 + 1
    assert page.evaluate("document.documentElement.dataset.theme") == "auto"
    assert page.evaluate("document.querySelector('#s-pipelines .chart svg').clientWidth") > 900


def test_a_large_run_opens(browser: Browser, tmp_path: Path) -> None:
    """1,024 ranks, TP8 x PP8 x DP16: under 6 MB, and every rank is a cell."""
    given = small()
    boxes, window = passes(8, 64)
    given["pipelines"] = [
        given["pipelines"][0] | {"pipeline": p, "boxes": boxes, "window_ns": window} for p in range(16)
    ]
    given["ranks"]["rows"] = [
        {
            "rank": r,
            "tp": r % 8,
            "cp": 0,
            "ep": r // 8 % 4,
            "pp": r // 128,
            "dp": r // 8 % 16,
            "host": f"node{r // 8}",
            "late_ns": r,
            "peak_bytes": r << 20,
        }
        for r in range(1024)
    ]
    given["skew"] = [
        row | {"rank": r, "role": role}
        for r in range(1024)
        for role, row in zip(("tp", "pp", "dp_cp"), given["skew"], strict=False)
    ]
    given["experts"] = [
        {"layer": layer, "microbatch": batch, "rank": rank, "rows_received": layer * rank, "mean": 100.0}
        for layer in range(38) for batch in range(8) for rank in range(64)
    ]  # fmt: skip
    file = tmp_path / "large.html"
    file.write_text(html(given), encoding="utf-8")
    assert file.stat().st_size < 6_000_000
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready=true]")
    assert page.locator("#s-pipelines .chart svg path[fill='#2257a8']").count() == 8 * 64
    assert page.locator("#s-ranks .chart svg path:not([fill=none])").count() >= 1024
    found = check(page, "overlaps")
    assert found["pairs"] == []
    page.locator("#s-ranks summary").first.press("Enter")
    expect(page.locator("#s-ranks tbody tr")).to_have_count(200)
    page.locator("#s-ranks .more").press("Enter")
    expect(page.locator("#s-ranks tbody tr")).to_have_count(1024)
    assert errors == []
    page.close()
