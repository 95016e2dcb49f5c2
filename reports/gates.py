"""Gates for CI: ``--fail-on EXPR`` on diff, review and compare. A pure function of their JSON documents.

    expression = figure ["." part] compare number [unit]
    compare    = ">" | ">=" | "<" | "<="
    unit       = "%" | "x" | B KiB MiB GiB TiB kB MB GB TB | ns us ms s

The gate fails the build where the comparison holds. Which figures there are, their parts and their units: FIGURES. A figure
that the document does not know (null) makes the gate ``unknown``, which fails too: a gate that silently passes guards
nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import median_low
from typing import Any, Literal, NoReturn

from traceanalyzer import axes
from traceanalyzer.errors import InputError
from traceanalyzer.reports import text

Kind = Literal["count", "bytes", "share", "times", "ns"]
State = Literal["passed", "failed", "unknown"]

UNITS: Mapping[str, tuple[Kind, Fraction]] = {
    "": ("count", Fraction(1)),
    "%": ("share", Fraction(1, 100)),
    "x": ("times", Fraction(1)),
    "B": ("bytes", Fraction(1)),
    **{unit: ("bytes", Fraction(1024**i)) for i, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), 1)},
    **{unit: ("bytes", Fraction(1000**i)) for i, unit in enumerate(("kB", "MB", "GB", "TB"), 1)},
    "ns": ("ns", Fraction(1)),
    "us": ("ns", Fraction(10**3)),
    "ms": ("ns", Fraction(10**6)),
    "s": ("ns", Fraction(10**9)),
}
"""Unit -> what it measures, and how much one of it is."""

_WORDS: Mapping[Kind, str] = {
    "count": "no unit",
    "bytes": "B, KiB, MiB, GiB, TiB, kB, MB, GB or TB",
    "share": "%",
    "times": "x",
    "ns": "ns, us, ms or s",
}


@dataclass(frozen=True)
class Known:
    """A figure that gates may name: the documents that have it, its units, whether it has parts, what it is."""

    documents: tuple[str, ...]
    kinds: tuple[Kind, ...]
    parts: bool
    doc: str


_ALL = ("diff", "review", "compare")
_RUNS = ("review", "compare")

FIGURES: Mapping[str, Known] = {
    "missing": Known(("diff", "review"), ("count",), False, "rows of the diff that lack calls or bytes"),
    "unexpected": Known(("diff", "review"), ("count",), False, "rows that nothing expects"),
    "excess": Known(("diff", "review"), ("count",), False, "rows with more than expected"),
    "unknown": Known(("diff", "review"), ("count",), False, "rows without a verdict"),
    "conflicts": Known(("diff", "review"), ("count",), False, "contradictions between the job and the run"),
    "coverage": Known(("diff", "review"), ("share",), False, "share that is attributed and judged, the lower of the two"),
    "avoidable": Known(("diff", "review"), ("bytes",), False, "avoidable off-rank bytes a step, of the rank with most"),
    "exposed": Known(
        _ALL, ("share", "ns", "times"), True,
        "communication no compute hides; of one axis (exposed.dp) or role; share of the step, or time a rank and step",
    ),
    "idle": Known(_RUNS, ("share", "ns", "times"), False, "idle time"),
    "launch_starved": Known(_RUNS, ("share", "ns", "times"), False, "time for which the host has launched nothing"),
    "compute": Known(_RUNS, ("share", "ns", "times"), False, "time in which compute runs"),
    "bubble": Known(_RUNS, ("times", "share"), False, "bubble of the pipelines: x the schedule's, or % of the window"),
    "mfu": Known(_RUNS, ("share", "times"), False, "model FLOP utilisation of a typical step"),
    "hfu": Known(_RUNS, ("share", "times"), False, "hardware FLOP utilisation of a typical step"),
    "step_time": Known(_RUNS, ("ns", "times"), False, "a typical step; x: against the first run (compare only)"),
    "moved": Known(("compare",), ("count",), False, "figures of time that moved beyond the noise of both runs"),
    "traffic": Known(("compare",), ("count",), False, "kinds of calls that differ in calls, bytes, type or size"),
    "finding": Known(("review",), ("count",), True, "findings; of one code (finding.slow_gpu) or of any"),
}  # fmt: skip
"""Figures by name. ``x`` of all but bubble is the second run against the first: compare only."""

_TOKENS = re.compile(
    r"\s*(?:(?P<word>[A-Za-z_]\w*(?:\.\w+)?)|(?P<compare>>=|<=|>|<)|(?P<number>\d+(?:\.\d+)?)|(?P<end>$))"
)
_UNIT = re.compile(r"\s*(%|[A-Za-z]*)")


@dataclass(frozen=True)
class Gate:
    """A parsed expression. limit: in the units of kind (a share of 1, bytes, ns). part "": of the whole."""

    expression: str
    figure: str
    part: str
    compare: Literal[">", ">=", "<", "<="]
    limit: Fraction
    kind: Kind

    @property
    def key(self) -> str:
        """Figure and part, as a document names them."""
        return f"{self.figure}.{self.part}" if self.part else self.figure

    def holds(self, value: Fraction) -> bool:
        """Whether the comparison holds, so that the gate fails."""
        return {
            ">": value > self.limit,
            ">=": value >= self.limit,
            "<": value < self.limit,
            "<=": value <= self.limit,
        }[self.compare]


@dataclass(frozen=True)
class Result:
    """What came of a gate. value: the figure, in the units of the gate's kind; None: not known."""

    gate: Gate
    state: State
    value: Fraction | None
    sentence: str


Figures = Mapping[str, Mapping[Kind, int | float | Fraction | None]]
"""Figure (with part) -> kind -> value; None: not known."""


def parse(expression: str, document: str) -> Gate:
    """A gate of a document (diff, review, compare). Raises InputError that shows the place and what may stand there."""

    def fail(at: int, allowed: str) -> NoReturn:
        shown = repr(expression[at : at + 12]) if expression[at:].strip() else "the end"
        raise InputError(
            f"--fail-on {expression!r}: at position {at + 1} ({shown}): {allowed}. Example: --fail-on 'unexpected>0'"
        )

    def token(at: int, what: str, allowed: str) -> tuple[str, int]:
        found = _TOKENS.match(expression, at)
        if found is None or found.lastgroup != what:
            fail(at + len(expression[at:]) - len(expression[at:].lstrip()), allowed)
        return found[what], found.end()

    names = [name for name, known in FIGURES.items() if document in known.documents]
    word, at = token(0, "word", f"must be a figure of {document}: {', '.join(names)}")
    figure, _, part = word.partition(".")
    start = at - len(word)
    if figure not in names:
        fail(start, f"must be a figure of {document}: {', '.join(names)}")
    known = FIGURES[figure]
    if part and not known.parts:
        fail(start + len(figure), f"{figure} has no parts")
    if part and figure == "exposed" and part.lower() not in _parts():
        fail(start + len(figure) + 1, f"must be an axis or a role: {', '.join(_parts())}")
    compare, at = token(at, "compare", "must be >, >=, < or <=")
    number, at = token(at, "number", "must be a number, like 0 or 1.5")
    unit = _UNIT.match(expression, at)
    assert unit is not None
    kinds: list[Kind] = [k for k in known.kinds if k != "times" or figure == "bubble" or document == "compare"]
    if figure == "step_time" and document == "review":
        kinds = ["ns"]
    allowed = " or ".join(_WORDS[k] for k in kinds)
    where = unit.start(1)
    kind, one = UNITS.get(unit[1], (None, Fraction(1)))
    limit = Fraction(number)
    if kind == "count" and limit == 0:
        kind = kinds[0]  # 0 is 0 in every unit
    if kind not in kinds:
        fail(where, f"the unit of {figure} must be {allowed}")
    if expression[unit.end() :].strip():
        fail(unit.end(), "nothing may follow")
    return Gate(expression, figure, part.lower() if figure == "exposed" else part, compare, limit * one, kind)  # type: ignore[arg-type]


def _parts() -> list[str]:
    return [
        *dict.fromkeys([*(str(a).lower() for a in ("tp", "cp", "ep", "pp", "dp", "other")), *axes.ROLES, "unknown"])
    ]


def check(gates: Iterable[Gate], document: Mapping[str, Any]) -> list[Result]:
    """Each gate against a document: of diff, of review, or one that brings its figures (key "gates")."""
    known = figures(document)
    return [_result(gate, known) for gate in gates]


def _result(gate: Gate, known: Figures) -> Result:
    of_figure = known.get(gate.key)
    if of_figure is None and gate.part and any(key == gate.figure for key in known):
        of_figure = {gate.kind: 0}  # of a known whole, a part that does not occur
    value = None if of_figure is None else of_figure.get(gate.kind)
    if value is None:
        return Result(gate, "unknown", None, f"{gate.expression}: {gate.key} is not known of this run")
    exact = _exact(value)
    state: State = "failed" if gate.holds(exact) else "passed"
    return Result(gate, state, exact, f"{gate.expression}: {gate.key} is {_shown(exact, gate.kind)}, {state}")


def _exact(value: int | float | Fraction) -> Fraction:
    """A figure as its shortest decimal says, so that 99.5 % is not below 99.5 %."""
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


def _shown(value: Fraction, kind: Kind) -> str:
    if kind == "bytes":
        return text.size(int(value))
    if kind == "ns":
        return text.duration(int(value))
    if kind == "share":
        return f"{float(value) * 100:.2f} %"
    return f"{float(value):.3f}x" if kind == "times" else f"{float(value):g}"


def exit_code(results: Sequence[Result], otherwise: int = 0) -> int:
    """1 if a gate failed, else 3 if one is unknown, else ``otherwise``."""
    states = {r.state for r in results}
    return 1 if "failed" in states else 3 if "unknown" in states else otherwise


# -- figures of documents ----------------------------------------------------------------------------------------------


def figures(document: Mapping[str, Any]) -> Figures:
    """The figures of a document. Raises InputError for one of another kind."""
    if "gates" in document:
        return dict(document["gates"])
    schema = str(document.get("schema"))
    maker = _MAKERS.get(schema.partition("/")[0])
    if maker is None:
        raise InputError(f"no gates are known for a document of schema {schema!r}")
    return maker(document)


def _of_diff(document: Mapping[str, Any]) -> Figures:
    cells = document["cells"]
    found: dict[str, dict[Kind, Any]] = {
        word: {"count": sum(c["verdict"] == word for c in cells)}
        for word in ("missing", "unexpected", "excess", "unknown")
    }
    shares = [s for s in (document["coverage"]["attributed"], document["coverage"]["judged"]) if s is not None]
    found["coverage"] = {"share": min(shares, default=None)}
    found["conflicts"] = {"count": len(document["job_conflicts"])}
    of_rank: dict[tuple[int, int], int] = defaultdict(int)
    exposed: dict[str, dict[tuple[int, int], int]] = defaultdict(lambda: defaultdict(int))
    known: dict[str, bool] = defaultdict(lambda: True)
    for cell in cells:
        for key in (
            "exposed",
            *(f"exposed.{p}" for p in dict.fromkeys([str(cell["axis"]).lower(), str(cell["role"])])),
        ):
            known[key] &= cell["exposed_ns"] is not None or not cell["calls_measured"]
            for place in ((r, s) for r in cell["ranks"] for s in cell["steps"]):
                exposed[key][place] += cell["exposed_ns"] or 0
        for rank in cell["ranks"]:
            for step in cell["steps"]:
                of_rank[rank, step] += cell["avoidable_bytes"]
    found["avoidable"] = {"bytes": max(of_rank.values(), default=0)}
    for key, of in exposed.items():
        found[key] = {"ns": max(of.values()) if known[key] else None}
    return found


def _of_review(document: Mapping[str, Any]) -> Figures:
    ledger = document.get("ledger")
    found: dict[str, dict[Kind, Any]] = {}
    if ledger is not None:
        found |= {k: dict(v) for k, v in _of_diff(ledger).items() if not k.startswith("exposed")}
    time = document.get("time") or []
    total = sum(t["step_ns"] for t in time)
    if total:
        sums: dict[str, int] = defaultdict(int, {"exposed": 0, "idle": 0, "launch_starved": 0, "compute": 0})
        for row in (c for t in time for c in t["classes"]):
            if row["class"] in ("communication", "pp"):
                sums["exposed"] += row["dur_ns"]
                # several roles at once count for each, and once for an axis
                roles = str(row["role"] or "unknown").split(" + ")
                for part in dict.fromkeys([*roles, *(_axis(r) for r in roles)]):
                    sums[f"exposed.{part}"] += row["dur_ns"]
            elif row["class"] in sums:
                sums[row["class"]] += row["dur_ns"]
        # of a rank and step: there are as many of them as the mean step fits into the sum
        devices = sum(len(t["ranks"]) if isinstance(t["ranks"], list) else t["ranks"] for t in time)
        for key, value in sums.items():
            found[key] = {"share": Fraction(value, total), "ns": value // devices if devices else None}
    stages = [(p, s) for p in document.get("pipelines") or () for s in p["stages"]]
    window = sum(s["window_ns"] for _, s in stages)
    if window:
        share = Fraction(sum(s["bubble_ns"] for _, s in stages), window)
        formula = next((p["formula_share"] for p, _ in stages if p["formula_share"]), None)
        found["bubble"] = {"share": share, "times": None if formula is None else share / _exact(formula)}
    steps = [s for s in document["steps"] if s["complete"]]
    for name, key, kind in (("mfu", "mfu", "share"), ("hfu", "hfu", "share"), ("step_time", "step_ns", "ns")):
        values = [s[key] for s in steps if s[key] is not None]
        found[name] = {kind: median_low(values) if values else None}  # type: ignore[dict-item]
    found["finding"] = {"count": len(document["findings"])}
    for finding in document["findings"]:
        entry = found.setdefault(f"finding.{finding['code']}", {"count": 0})
        entry["count"] += 1
    return found


def _axis(role: str) -> str:
    return str(axes.rollup(role)).lower() if role in axes.ROLES else "unknown"


_MAKERS: Mapping[str, Callable[[Mapping[str, Any]], Figures]] = {
    "traceanalyzer.diff": _of_diff,
    "traceanalyzer.review": _of_review,
}
