"""Gates: what can be said, what is refused and where, and what comes of it against literal documents."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from traceanalyzer.errors import InputError
from traceanalyzer.reports.gates import FIGURES, check, exit_code, parse

MS = 1_000_000


@pytest.mark.parametrize(
    ("text", "document", "key", "compare", "limit", "kind"),
    [
        ("unexpected>0", "diff", "unexpected", ">", 0, "count"),
        ("  missing  >=  2 ", "review", "missing", ">=", 2, "count"),
        ("avoidable>1GiB", "diff", "avoidable", ">", 2**30, "bytes"),
        ("avoidable > 1.5 kB", "review", "avoidable", ">", 1500, "bytes"),
        ("exposed.dp>5%", "review", "exposed.dp", ">", Fraction(1, 20), "share"),
        ("exposed.TP>2.5ms", "diff", "exposed.tp", ">", 2_500_000, "ns"),
        ("bubble>1.2x", "review", "bubble", ">", Fraction(6, 5), "times"),
        ("mfu<40%", "review", "mfu", "<", Fraction(2, 5), "share"),
        ("step_time>1.05x", "compare", "step_time", ">", Fraction(21, 20), "times"),
        ("step_time<=2s", "review", "step_time", "<=", 2 * 10**9, "ns"),
        ("avoidable>0", "diff", "avoidable", ">", 0, "bytes"),
        ("finding.slow_gpu>0", "review", "finding.slow_gpu", ">", 0, "count"),
    ],
)
def test_what_can_be_said(text: str, document: str, key: str, compare: str, limit: Fraction, kind: str) -> None:
    gate = parse(text, document)
    assert (gate.key, gate.compare, gate.limit, gate.kind) == (key, compare, limit, kind)


@pytest.mark.parametrize(
    ("text", "document", "position", "allowed"),
    [
        ("", "diff", 1, "must be a figure of diff: missing, unexpected, excess, unknown, conflicts, coverage, avoidable"),
        ("mfu<40%", "diff", 1, "must be a figure of diff"),
        ("foo>1", "review", 1, "must be a figure of review"),
        ("mfu.tp<40%", "review", 4, "mfu has no parts"),
        ("exposed.xp>1%", "review", 9, "must be an axis or a role: tp, cp, ep, pp, dp"),
        ("unexpected=0", "diff", 11, "must be >, >=, < or <="),
        ("unexpected>", "diff", 12, "must be a number"),
        ("unexpected> many", "diff", 13, "must be a number"),
        ("avoidable>1%", "review", 12, "the unit of avoidable must be B, KiB, MiB, GiB, TiB, kB, MB, GB or TB"),
        ("avoidable>1", "review", 12, "the unit of avoidable must be B"),
        ("step_time>1.05x", "review", 15, "the unit of step_time must be ns, us, ms or s"),
        ("exposed>1.1x", "review", 12, "the unit of exposed must be % or ns, us, ms or s"),
        ("exposed.dp>5%%", "review", 14, "nothing may follow"),
        ("unexpected>0 or missing>0", "diff", 14, "the unit of unexpected must be no unit"),
    ],
)  # fmt: skip
def test_what_is_refused_and_where(text: str, document: str, position: int, allowed: str) -> None:
    with pytest.raises(InputError) as error:
        parse(text, document)
    assert f"at position {position} (" in str(error.value)
    assert allowed in str(error.value)


def test_every_figure_can_be_gated() -> None:
    """With the first of its units, in each of its documents."""
    units = {"count": "", "bytes": "MiB", "share": "%", "times": "x", "ns": "ms"}
    for name, known in FIGURES.items():
        for document in known.documents:
            assert parse(f"{name}>1{units[known.kinds[0]]}", document).figure == name


def cell(verdict: str, **changes: Any) -> dict[str, Any]:
    return {
        "verdict": verdict, "role": "dp_cp", "axis": "DP", "calls_measured": 1, "exposed_ns": 2 * MS, "avoidable_bytes": 0,
        "ranks": [0, 1], "steps": [3], **changes,
    }  # fmt: skip


def ledger(*cells: dict[str, Any], attributed: float = 1.0, judged: float | None = 1.0) -> dict[str, Any]:
    return {
        "schema": "traceanalyzer.diff/1",
        "coverage": {"attributed": attributed, "judged": judged},
        "job_conflicts": [],
        "cells": list(cells),
    }


def results(document: dict[str, Any], kind: str, *texts: str) -> list[tuple[str, str]]:
    return [(r.gate.key, r.state) for r in check([parse(t, kind) for t in texts], document)]


def test_gates_of_a_diff() -> None:
    """Avoidable bytes of rank 1: 600 + 500; of rank 0: 600."""
    document = ledger(
        cell("unexpected", avoidable_bytes=600),
        cell("match", role="tp", axis="TP", ranks=[1], avoidable_bytes=500),
        cell("unknown"),
        judged=0.995,
    )
    assert results(
        document, "diff", "unexpected>0", "missing>0", "unknown>=1", "avoidable>1099B", "avoidable>1100B", "coverage<99.5%",
        "coverage<99.6%", "exposed.dp>3ms", "exposed.dp>4ms", "exposed>5ms", "exposed.ep>0",
    ) == [
        ("unexpected", "failed"), ("missing", "passed"), ("unknown", "failed"), ("avoidable", "failed"),
        ("avoidable", "passed"), ("coverage", "passed"), ("coverage", "failed"), ("exposed.dp", "failed"),
        ("exposed.dp", "passed"), ("exposed", "failed"), ("exposed.ep", "passed"),
    ]  # fmt: skip


def test_a_time_that_is_not_known_passes_no_gate() -> None:
    document = ledger(cell("match", exposed_ns=None))
    (result,) = check([parse("exposed.dp>1ms", "diff")], document)
    assert (result.state, result.value) == ("unknown", None)
    assert result.sentence == "exposed.dp>1ms: exposed.dp is not known of this run"


def review(**changes: Any) -> dict[str, Any]:
    """100 ms on each of two devices: 60 compute, 10 dp, 4 tp and dp at once, 6 pp, 20 idle; a bubble of 30 by 20 %."""
    classes = [
        ("compute", None, 120), ("communication", "dp_cp", 20), ("communication", "dp_cp + tp", 8), ("pp", "pp", 12),
        ("idle", None, 40),
    ]  # fmt: skip
    document: dict[str, Any] = {
        "schema": "traceanalyzer.review/1",
        "ledger": None,
        "time": [
            {
                "step": 1, "stage": 0, "ranks": [0, 1], "step_ns": 200 * MS,
                "classes": [{"class": c, "role": r, "part": None, "dur_ns": ms * MS} for c, r, ms in classes],
            }
        ],
        "pipelines": [{"formula_share": 0.25, "stages": [{"window_ns": 80 * MS, "bubble_ns": 24 * MS}]}],
        "steps": [
            {"complete": True, "step_ns": 100 * MS, "mfu": 0.41, "hfu": None},
            {"complete": False, "step_ns": 10 * MS, "mfu": 0.1, "hfu": None},
        ],
        "findings": [{"code": "slow_gpu"}, {"code": "bubble"}],
    }  # fmt: skip
    return document | changes


def test_gates_of_a_review() -> None:
    """The bubble is 30 % of the window, 1.2 times 25 %. Time of two roles at once counts for each."""
    assert results(
        review(), "review", "exposed.dp>14%", "exposed.dp>13.9%", "exposed.tp>4%", "exposed.tp>3.9%", "exposed>20%",
        "exposed>19.9%", "exposed.dp>13.9ms", "exposed.cp>0", "idle>=20%", "compute<60%", "bubble>1.2x", "bubble>1.19x",
        "bubble>29%", "mfu<40%", "mfu<42%", "step_time>99ms", "finding>1", "finding.slow_gpu>0", "finding.slow_host>0",
    ) == [
        ("exposed.dp", "passed"), ("exposed.dp", "failed"), ("exposed.tp", "passed"), ("exposed.tp", "failed"),
        ("exposed", "passed"), ("exposed", "failed"), ("exposed.dp", "failed"), ("exposed.cp", "passed"), ("idle", "failed"),
        ("compute", "passed"), ("bubble", "passed"), ("bubble", "failed"), ("bubble", "failed"), ("mfu", "passed"),
        ("mfu", "failed"), ("step_time", "failed"), ("finding", "failed"), ("finding.slow_gpu", "failed"),
        ("finding.slow_host", "passed"),
    ]  # fmt: skip


def test_what_a_review_does_not_know() -> None:
    bare = review(time=[], pipelines=[], steps=[])
    assert results(bare, "review", "exposed.dp>5%", "bubble>1.2x", "mfu<40%", "unexpected>0", "hfu<1%") == [
        ("exposed.dp", "unknown"), ("bubble", "unknown"), ("mfu", "unknown"), ("unexpected", "unknown"), ("hfu", "unknown"),
    ]  # fmt: skip


def test_a_document_that_brings_its_figures() -> None:
    document = {"schema": "traceanalyzer.compare/1", "gates": {"step_time": {"times": 1.06, "ns": 5}}}
    (result,) = check([parse("step_time>1.05x", "compare")], document)
    assert result.sentence == "step_time>1.05x: step_time is 1.060x, failed"


def test_a_document_of_another_kind_is_refused() -> None:
    with pytest.raises(InputError, match=r"traceanalyzer\.info/1"):
        check([parse("unexpected>0", "diff")], {"schema": "traceanalyzer.info/1"})


def test_exit_codes() -> None:
    """A gate that failed weighs more than one that is unknown."""
    document = ledger(cell("unexpected", exposed_ns=None))
    gates = {t: check([parse(t, "diff")], document) for t in ("unexpected>0", "missing>0", "exposed>1ms")}
    assert exit_code([*gates["exposed>1ms"], *gates["unexpected>0"]]) == 1
    assert exit_code([*gates["exposed>1ms"], *gates["missing>0"]]) == 3
    assert (exit_code(gates["missing>0"]), exit_code(gates["missing>0"], otherwise=1)) == (0, 1)
