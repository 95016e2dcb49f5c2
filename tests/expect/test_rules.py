"""The tables of rules themselves: every name in them is known, and the engine that applies them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import pytest

from traceanalyzer import axes, expect, traffic
from traceanalyzer.errors import JobError
from traceanalyzer.expect import document
from traceanalyzer.expect.model import PHASES, Evidence, Varies
from traceanalyzer.expect.place import COMMON, Place, Symbol
from traceanalyzer.expect.rules import DTYPES, Avoid, Chapter, Gap, Routed, Rule
from traceanalyzer.job import Job

SOURCE = Evidence("source", "somewhere.py: something")
TABLES = (*expect.CHAPTERS, *document.CHAPTERS)
RULES = [(chapter, rule) for chapter in TABLES for rule in chapter.rules]


@pytest.mark.parametrize(("chapter", "rule"), RULES, ids=[f"{c.name}-{n}" for n, (c, _) in enumerate(RULES)])
def test_every_rule_speaks_of_known_things(chapter: Chapter, rule: Rule) -> None:
    assert rule.role in axes.ROLES
    assert rule.group in ("", *axes.ROLES)
    assert rule.op in traffic.OPS
    assert rule.phase in PHASES
    assert rule.dtype in DTYPES or traffic.element_bytes(rule.dtype), rule.dtype
    assert rule.evidence.where
    assert rule.name.startswith(f"{chapter.name}: ") or rule.name.startswith(f"{chapter.name} ")
    assert rule.each in ("", *chapter.families)
    known = {*COMMON, *chapter.symbols, *(f.name for f in fields(Job))}
    if not rule.each:  # a family brings symbols of its own
        assert (
            not {name for formula in rule.formulas for name in formula.names}
            - known
            - {"since", "on", "ceil", "min", "max"}
        )


@pytest.mark.parametrize("chapter", TABLES, ids=lambda c: c.name)
def test_every_gap_speaks_of_known_things(chapter: Chapter) -> None:
    for gap in chapter.gaps:
        assert set(gap.roles) <= set(axes.ROLES), gap.what
        assert gap.roles
        assert set(gap.phases) <= set(PHASES), gap.what
        assert set(gap.ops) <= set(traffic.OPS), gap.what
    assert set(chapter.family_words) == set(chapter.families)


def test_chapters_have_different_names() -> None:
    assert max(Counter(chapter.name for chapter in expect.CHAPTERS).values()) == 1
    assert max(Counter(chapter.title for chapter in TABLES).values()) == 1


# -- the engine ------------------------------------------------------------------------------------------------------


def _rule(**changes: Any) -> Rule:
    usual: dict[str, Any] = {
        "name": "test: a call",
        "role": "tp",
        "op": "all_gather",
        "phase": "forward",
        "component": "somewhere",
        "sent": "S/TP * B * H",
        "received": "S * B * H",
        "calls": "2 * layers * M",
        "evidence": SOURCE,
    }
    return Rule(**{**usual, **changes})


def _chapter(*rules: Rule, **more: Any) -> Chapter:
    return Chapter(name="test", title="Test", source="nowhere", rules=rules, **more)


def test_a_rule_becomes_a_call(tiny: Callable[..., Job]) -> None:
    """Tiny model: S 32, B 2, H 64, TP2, 2 layers, 1 micro-batch."""
    (row,) = _chapter(_rule(note="because")).calls(Place(tiny(), 0, (0, 16)))
    assert (row.in_elems, row.out_elems, row.group_size, row.calls, row.dtype) == (2048, 4096, 2, 4, "bfloat16")
    assert (row.rule, row.stage, row.versions, row.outside_c10d) == ("test: a call", 0, "", False)
    assert dict(row.formula) == {
        "in": "S/TP * B * H = 32/2 * 2 * 64 = 2,048 elements = 4 KiB bf16",
        "out": "S * B * H = 32 * 2 * 64 = 4,096 elements = 8 KiB bf16",
        "off-rank": "(N-1)/N * out = 1/2 * out = 4 KiB",
        "calls": "2 * layers * M = 2 * 2 * 1 = 4 per step",
        "why": "because",
        "source": "source: somewhere.py: something",
    }


def test_no_call_without_its_condition_or_with_a_count_of_zero(tiny: Callable[..., Job]) -> None:
    place = Place(tiny(), 0, (0, 16))
    assert _chapter(_rule(when="not sequence_parallel"), _rule(calls="0 * M")).calls(place) == []


def test_releases_of_a_rule(tiny: Callable[..., Job]) -> None:
    chapter = _chapter(
        _rule(when="since('embedding reduce-scatter')"),
        _rule(when="not since('loss once per step')"),
        _rule(when="since('expert grid') and not since('rerun by default')"),
    )
    assert [row.versions for row in chapter.calls(Place(tiny(), 0, (0, 12)))] == [">=0.8", "<=0.12", "0.10-0.13"]


def test_a_family_gives_a_call_for_each_member(tiny: Callable[..., Job]) -> None:
    chapter = _chapter(
        _rule(op="all_reduce", sent="bucket", received="", calls="1", each="buckets"),
        families={"buckets": lambda place: [{"bucket": 10 * place.stage + n} for n in (1, 2)]},
    )
    assert [row.in_elems for row in chapter.calls(Place(tiny(), 0, (0, 16)))] == [1, 2]


def test_symbols_of_a_chapter(tiny: Callable[..., Job]) -> None:
    chapter = _chapter(
        _rule(calls="passes * M"), symbols={"passes": Symbol("passes of a micro-batch", lambda place: 7)}
    )
    assert [row.calls for row in chapter.calls(Place(tiny(), 0, (0, 16)))] == [7]


def test_waste(tiny: Callable[..., Job]) -> None:
    """All that leaves the rank, or what a formula says; nothing where nothing leaves."""
    chapter = _chapter(
        _rule(avoid=Avoid("some_code", "--a-flag")),
        _rule(avoid=Avoid("some_code", "--a-flag", "S * B")),
        _rule(avoid=Avoid("some_code", "--a-flag"), role="pp", received="S/TP * B * H"),
    )
    rows = chapter.calls(Place(tiny(), 0, (0, 16)))
    assert [row.avoidable and row.avoidable.bytes_per_call for row in rows] == [4096, 64, None]


def test_traffic_outside_of_torch_distributed(tiny: Callable[..., Job]) -> None:
    (row,) = _chapter(_rule(outside="deepep", off_rank="S * B / 3")).calls(Place(tiny(), 0, (0, 16)))
    assert row.outside_c10d
    assert row.off_rank_bytes == Fraction(64, 3)
    assert row.formula["transport"] == "deepep, no call of torch.distributed"


def test_sizes_that_depend_on_routing(tiny: Callable[..., Job]) -> None:
    rule = _rule(op="all_to_all", sent="S * B * H", received="", routed=Routed("H", received="arrived"))
    (row,) = _chapter(rule).calls(Place(tiny(), 0, (0, 16)))
    assert row.varies == Varies(64, None, "arrived")


def test_gaps(tiny: Callable[..., Job]) -> None:
    chapter = _chapter(
        gaps=(
            Gap(what="sft", roles=("tp",)),
            Gap(what="too many layers", when="layers > 1", roles=("pp",), phases=("forward",), ops=("send",)),
        )
    )
    found = chapter.not_modelled(Place(tiny(), 0, (0, 16)))
    assert [(gap.what, gap.roles, gap.phases, gap.ops) for gap in found] == [
        ("too many layers", ("pp",), ("forward",), ("send",))
    ]
    assert [gap.what for gap in chapter.not_modelled(Place(tiny(sft=True, num_layers=1), 0, (0, 16)))] == ["sft"]


def test_an_unknown_size_is_named(tiny: Callable[..., Job]) -> None:
    job = replace(tiny(), padded_vocab_size=None, vocab_size=None)
    with pytest.raises(JobError, match="the job does not say padded_vocab_size"):
        _chapter(_rule(sent="V", received="")).calls(Place(job, 0, (0, 16)))
    with pytest.raises(JobError, match="nonsense is neither a symbol nor a field of the job"):
        _chapter(_rule(sent="nonsense", received="")).calls(Place(job, 0, (0, 16)))
