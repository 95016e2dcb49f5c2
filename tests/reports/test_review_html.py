"""The review page as a file: it holds the document whole, runs only its own scripts, and nothing in a trace gets out."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import pytest

from traceanalyzer.reports.review.html import ECHARTS_VERSION, html

EVIL = "</script><script>pwned()</script><img src=x onerror=pwned()>\"'&lt;<!-- {{data}} \u2028"


class Page(HTMLParser):
    """Elements of a page: their attributes, and the text of scripts, styles and the title."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] in {"script", "style", "title"}:
            tag, attributes = self.elements[-1]
            self.texts.append((tag, attributes, data))

    def text(self, tag: str, **wanted: str) -> list[str]:
        """Texts of the elements with these attributes."""
        return [
            t
            for name, attributes, t in self.texts
            if name == tag and wanted.items() <= attributes.items() and t.strip()
        ]


def scripts(page: Page) -> list[str]:
    """Scripts that run."""
    return [
        text for tag, attributes, text in page.texts if tag == "script" and "type" not in attributes and text.strip()
    ]


def unpacked(value: Any) -> Any:
    """The document as written into a page, by the rules of html.py, independently of base.js."""
    if isinstance(value, list):
        return [unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    match list(value):
        case ["$int"]:
            return int(value["$int"])
        case ["$map"]:
            return {key: unpacked(item) for key, item in value["$map"].items()}
        case ["$words", "$index"]:
            return [value["$words"][i] for i in value["$index"]]
        case ["$keys", "$columns"]:
            columns = [unpacked(column) for column in value["$columns"]]
            return [dict(zip(value["$keys"], row, strict=True)) for row in zip(*columns, strict=True)]
    return {key: unpacked(item) for key, item in value.items()}


def carried(page: str) -> Any:
    """The document a page carries."""
    (text,) = Page(page).text("script", id="data")
    return unpacked(json.loads(text))


def document(**parts: Any) -> dict[str, Any]:
    return {
        "schema": "traceanalyzer.review/1",
        "run": {"path": "runs/a.parquet"},
        "verdict": {"word": "match"},
        **parts,
    }


def test_carries_the_document_whole_and_exact() -> None:
    rows = [
        {"rank": rank, "host": "a" if rank < 9 else "b", "at_ns": 1_760_000_000_123_456_789 + rank}
        for rank in range(20)
    ]
    given = document(
        steps=[{"step": 3, "step_ns": 2**53 - 1, "mfu": 0.25, "why_null": None}],
        skew=rows,
        few=[{"a": 1}, {"a": 2}],
        uneven=[*rows, {"rank": 20}],
        odd={"$int": "no number", "$words": []},
        exact=[2**53, -(2**53), 2**64],
        flags=[True, False, None, ""],
    )
    assert carried(html(given)) == given


def test_what_is_no_number_is_null() -> None:
    given = document(values=[float("nan"), float("inf"), -0.5])
    assert carried(html(given))["values"] == [None, None, -0.5]


def test_half_a_character_is_replaced() -> None:
    page = html(document(name="kernel \ud800 a"))
    assert page.encode()
    assert carried(page)["name"] == "kernel \ufffd a"


def test_names_cannot_leave_the_data() -> None:
    plain = Page(html(document(names=["kernel"] * 4)))
    evil = html(
        document(run={"path": EVIL}, verdict={"word": EVIL, "sentence": EVIL}, names=[EVIL] * 20, odd={EVIL: EVIL})
    )
    page = Page(evil)
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]
    assert scripts(page) == scripts(plain)
    assert "pwned()</script>" not in evil
    assert carried(evil)["names"] == [EVIL] * 20
    assert carried(evil)["odd"] == {EVIL: EVIL}
    (title,) = page.text("title")
    assert title.startswith("</script><script>pwned()</script>")


def test_only_the_scripts_and_styles_of_the_page_may_run() -> None:
    text = html(document())
    page = Page(text)
    (policy,) = [a["content"] or "" for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))

    def named(code: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"

    assert len(scripts(page)) == 6
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].split() == [named(script) for script in scripts(page)]
    assert rules["style-src"].split() == [named(style) for style in page.text("style")]
    assert "unsafe" not in policy
    loading = {"src", "srcset", "data", "poster", "action", "style", "onclick", "onload", "onerror"}
    assert [
        (tag, a) for tag, a in page.elements if loading & a.keys() or not (a.get("href") or "#").startswith("#")
    ] == []
    assert not re.search(r"@import|url\(", page.text("style")[0])


def test_a_document_without_its_parts_is_a_page() -> None:
    assert carried(html({"schema": "traceanalyzer.review/1"})) == {"schema": "traceanalyzer.review/1"}


def test_refuses_another_document() -> None:
    with pytest.raises(ValueError, match=r"traceanalyzer\.review/1, this is 'traceanalyzer\.diff/1'"):
        html({"schema": "traceanalyzer.diff/1"})


def test_echarts_is_the_published_file_with_its_licence() -> None:
    """The sum is that of dist/echarts.min.js in the npm package echarts 6.1.0."""
    assets = files("traceanalyzer.reports.review") / "assets"
    library = assets.joinpath("echarts.min.js").read_bytes()
    assert hashlib.sha256(library).hexdigest() == "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0"
    assert ECHARTS_VERSION == "6.1.0"
    assert b't.version="6.1.0"' in library
    assert "Apache License" in assets.joinpath("echarts-LICENSE.txt").read_text(encoding="utf-8")
    assert "Apache ECharts" in assets.joinpath("echarts-NOTICE.txt").read_text(encoding="utf-8")
    assert "Mike Bostock" in assets.joinpath("echarts-LICENSE-d3.txt").read_text(encoding="utf-8")


def test_a_large_run_is_under_six_megabytes() -> None:
    """1,024 ranks, and every list as long as a document may make it: 20,000 rows."""
    rows = range(20_000)
    given = document(
        ranks={
            "axes": ["tp", "cp", "ep", "pp", "dp"],
            "metrics": [{"key": f"m{k}", "title": f"m{k}", "unit": "ns", "doc": ""} for k in range(15)],
            "rows": [
                {"rank": r, "tp": r % 8, "pp": r // 128, "host": f"node{r // 8}"}
                | {f"m{k}": r * 1_000_003 + k for k in range(15)}
                for r in range(1024)
            ],
        },
        skew=[
            {"rank": n % 1024, "role": "tp", "calls": 80, "own_late_ns": n * 7919, "residual_ns": 49_000} for n in rows
        ],
        experts=[
            {"layer": n % 40, "microbatch": n % 8, "rank": n % 64, "rows_received": n * 31 % 9973, "mean": 4096.0}
            for n in rows
        ],
        memory=[
            {"rank": n % 1024, "what": "peak", "expected_bytes": 10**10 + n, "measured_bytes": 10**10 - n} for n in rows
        ],
        pipelines=[
            {
                "pipeline": 0,
                "boxes": [
                    {
                        "stage": n % 16,
                        "rank": n % 16,
                        "kind": "forward",
                        "microbatch": n % 512,
                        "chunk": 0,
                        "start_ns": n * 1_000_003,
                        "dur_ns": 999_979 + n,
                        "evidence": "mark",
                    }
                    for n in rows
                ],
            }
        ],
    )
    assert len(html(given).encode()) < 6_000_000
