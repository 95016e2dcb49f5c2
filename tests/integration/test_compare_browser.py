"""The page of a comparison in a real browser: it opens from disk, draws, sorts, filters, and reads in both themes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.reports.compare.html import html

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from playwright.sync_api import Browser, Error, Page, sync_playwright

CHECKS = Path(__file__).with_name("review_checks.js").read_text(encoding="utf-8")
US = 1000
EVIL = "</script><img src=x onerror=pwned()>\"'`|"


def spread(median: int, noise: int = 10 * US) -> dict[str, Any]:
    return {"steps": 3, "median": median, "low": median - noise, "high": median + noise, "method": "min-max"}


def row(what: str, role: str | None, one: int, two: int, verdict: str, stage: int | None = None) -> dict[str, Any]:
    return {
        "what": what, "role": role, "axis": None, "stage": stage, "unit": "ns", "part_of_step": what != "step time",
        "a": spread(one * US), "b": spread(two * US), "change": (two - one) * US, "ratio": two / one,
        "share_of_step": (two - one) / 1000, "verdict": verdict, "reason": "outside both bands",
    }  # fmt: skip


def call(op: str, calls: int, differs: list[str], component: str = "attention.qkv") -> dict[str, Any]:
    return {
        "role": "tp", "axis": "TP", "op": op, "phase": "forward", "component": component, "stage": 0, "only_in": None,
        "by_data": False, "differs": differs, "dtypes_a": ["bfloat16"], "dtypes_b": ["bfloat16"], "sizes_a": [8192],
        "sizes_b": [8192], "calls_a": 8, "calls_b": calls, "bytes_a": 65536, "bytes_b": 8192 * calls,
        "time_a": spread(9 * US), "time_b": None, "change": None, "verdict": "unknown",
        "reason": "not every call has a time of its own",
    }  # fmt: skip


def side(path: str, times: list[int]) -> dict[str, Any]:
    return {
        "path": path, "selected": "1-3", "steps": [1, 2, 3], "ranks_recorded": 8, "world_size": 8, "device": EVIL,
        "job": "4 layers, TP2", "step_times": [{"step": i + 1, "step_ns": t * US} for i, t in enumerate(times)],
    }  # fmt: skip


DOCUMENT: dict[str, Any] = {
    "schema": "traceanalyzer.compare/1",
    "a": side(EVIL, [990, 1000, 1010]),
    "b": side("after.parquet", [1090, 1100, 1110]),
    "verdict": {"word": "moved", "sentence": "Step time moved from 1 ms to 1.1 ms.", "next": None},
    "rules": {"least_share": 0.01, "least_ns": 10 * US, "band": "shortest to longest", "moved": "outside both bands"},
    "job_differences": [{"field": EVIL, "a": 64, "b": "x" * 10_000, "stated": "b"}],
    "setting_differences": [],
    "notes": [EVIL, "Stages are not aligned."],
    "rows": [
        row("step time", None, 1000, 1100, "moved"),
        row("exposed", "tp", 100, 260, "moved"),
        row("idle", None, 200, 150, "moved"),
        row("compute", None, 600, 601, "not moved"),
        row("compute", None, 610, 612, "not moved", 0),
    ],
    "traffic": [call("all_gather", 9, ["calls", "bytes"], EVIL), call("reduce_scatter", 8, [])],
    "slow_ranks": [
        {
            "rank": 3, "stage": 0, "only_in": "B", "cause_a": None, "cause_b": "device", "slow_steps_a": 0, "slow_steps_b": 3,
            "over_ns_a": None, "over_ns_b": 255 * US,
        }
    ],
    "left_out": [],
    "gates": {},
}  # fmt: skip

Opener = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, that of the system or Playwright's own."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = os.environ.get("CHROMIUM") or next((path for path in map(shutil.which, names) if path), None)
    with sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        except Error as error:
            pytest.skip(f"no Chromium could be started: {str(error).splitlines()[0]}")
        yield started
        started.close()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Opener]:
    """Opens the page from disk; at the end nothing may have been said on its console, or asked of anyone."""
    contexts = []
    said: list[str] = []
    asked: list[str] = []
    path = tmp_path / "compare.html"
    path.write_text(html(DOCUMENT), encoding="utf-8")

    def start(width: int = 1280, **options: Any) -> Page:
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=true]")
        return page

    yield start
    for context in contexts:
        context.close()
    assert said == []
    assert asked == [path.as_uri()] * len(contexts)


def column(page: Page, section: str, number: int) -> list[str]:
    return page.locator(f"#s-{section} tbody tr > td:nth-child({number})").all_inner_texts()


def test_opens_from_disk_and_draws(opened: Opener) -> None:
    page = opened()
    assert page.locator("main h1, main h2").all_inner_texts() == [
        "≠\nMoved", "Jobs and settings", "What moved", "Traffic", "Slow ranks", "All figures",
    ]  # fmt: skip
    drawn = page.locator("#s-moved .chart").first.locator("svg text").all_text_contents()
    assert [t for t in drawn if t.endswith("moved")] == ["−50 µs, moved", "+160 µs, moved"]
    # smallest change below: categories are drawn from the bottom up
    assert [t for t in drawn if t in ("exposed tp", "idle", "compute")] == ["compute", "idle", "exposed tp"]
    assert page.locator("#s-moved .chart").count() == 2
    assert page.evaluate("window.pwned === undefined && document.images.length === 0")


def test_sorts_and_filters(opened: Opener) -> None:
    page = opened()
    assert column(page, "traffic", 3) == ["all_gather"]
    page.locator("#s-traffic select").select_option("all")
    assert column(page, "traffic", 3) == ["all_gather", "reduce_scatter"]
    assert column(page, "figures", 4) == ["+100 µs", "+160 µs", "−50 µs", "+1 µs", "+2 µs"]
    page.locator("#s-figures th button", has_text="change").click()
    assert column(page, "figures", 4) == ["+160 µs", "+100 µs", "+2 µs", "+1 µs", "−50 µs"]
    page.get_by_label("Verdict").select_option("moved")
    assert column(page, "figures", 1) == ["exposed tp", "step time", "idle"]
    page.get_by_label("Verdict").select_option("")
    page.get_by_label("Stage").select_option("0")
    assert column(page, "figures", 1) == ["compute of stage 0"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_reads(opened: Opener, width: int, scheme: str) -> None:
    page = opened(width, color_scheme=scheme)
    page.locator("#s-traffic select").select_option("all")
    page.set_viewport_size({"width": width, "height": page.evaluate("document.documentElement.scrollHeight")})
    found = {
        name: page.evaluate(f"() => {{ {CHECKS}\n return checks.{name}(); }}") for name in ("overlaps", "contrast")
    }
    assert found["overlaps"]["texts"] > 80
    assert (found["overlaps"]["pairs"], found["overlaps"]["wide"]) == ([], 0)
    assert found["contrast"]["bad"] == []
    assert found["contrast"]["checked"] > 80
