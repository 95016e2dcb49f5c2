"""Run against run: what moved between two runs, or two ranges of steps of one, and what did not.

``compare`` measures both sides with the query library and lays them side by side; ``Comparison.as_document`` is the JSON
document ``traceanalyzer.compare/1`` (docs/compare.md), from which everything that shows a comparison is made.

Times are means over the ranks of a stage (over their devices) in each complete step: integer ns, rounded once. Of a run the
lower median over its steps is shown, a value that occurred, and beside it the band of noise (Spread). Calls and bytes are
exact and compared without a band, except bytes whose size the router decides. Totals are never compared: of different worlds
they mean nothing.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from statistics import median_low
from typing import Any, Literal

from traceanalyzer import axes, schema
from traceanalyzer.errors import InputError
from traceanalyzer.job import Job, conflicts
from traceanalyzer.queries import Library
from traceanalyzer.reports import bubble, text
from traceanalyzer.reports import diff as words
from traceanalyzer.reports.compare import words as compare_words
from traceanalyzer.run import Run, versions_of

SCHEMA = "traceanalyzer.compare/1"

LEAST_SHARE = Fraction(1, 100)
"""A smaller share of the step than this did not move."""

MAD_FROM = 5
"""From so many steps on the band is median and MAD; of fewer it reaches from the shortest to the longest."""

MAD_FACTOR = Fraction(44478, 10000)
"""Half a band in MADs: 3 standard deviations of a normal distribution, 1.4826 MADs each."""

MOST_ROWS = 20_000
"""Rows of traffic that are listed; those that differ come first."""

Row = dict[str, Any]
Number = int | float
Progress = Callable[[str], None]
Verdict = Literal["moved", "not moved", "no band", "unknown"]
_Key = tuple[str, str]
"""What is measured, and of which roles ("" for none)."""


# -- which steps -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """A run and the ranges of its steps, both ends included; None: all."""

    source: str
    steps: tuple[tuple[int, int], ...] | None = None

    def holds(self, step: int) -> bool:
        """Whether a step is meant."""
        return self.steps is None or any(low <= step <= high for low, high in self.steps)

    def __str__(self) -> str:
        if self.steps is None:
            return self.source
        return f"{self.source}@{','.join(str(a) if a == b else f'{a}-{b}' for a, b in self.steps)}"


_SELECTED = re.compile(r"^(?P<source>.+)@(?P<steps>\d[\d,-]*)$")
_RANGE = re.compile(r"^(\d+)(?:-(\d+))?$")


def selection(argument: str) -> Selection:
    """``RUN``, ``RUN@100-120`` or ``RUN@3,5,8-9``. A file of just this name is that file.

    Raises InputError for steps that are no ranges.
    """
    found = _SELECTED.match(argument)
    if found is None or Path(argument).exists():
        return Selection(argument)
    ranges = []
    for part in found["steps"].split(","):
        one = _RANGE.match(part)
        low, high = (int(one[1]), int(one[2] or one[1])) if one else (1, 0)
        if low > high:
            raise InputError(f"{argument}: {part!r} is no range of steps. Write RUN@100-120, or RUN@3,5,8-9.")
        ranges.append((low, high))
    return Selection(found["source"], tuple(ranges))


# -- noise -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """A figure over the steps of one side: lower median and band of noise, both ends included.

    low, high: None of one step, which has no band. method: "min-max" (2 to 4 steps), "mad" (median and 4.4478 MADs to both
    sides, from 5 steps on), "one step".
    """

    steps: int
    median: Number
    low: Number | None
    high: Number | None
    method: Literal["min-max", "mad", "one step"]

    @classmethod
    def of(cls, values: Sequence[Number]) -> Spread:
        """The spread of the figures of at least one step."""
        middle = median_low(values)
        if len(values) == 1:
            return cls(1, middle, None, None, "one step")
        if len(values) < MAD_FROM:
            return cls(len(values), middle, min(values), max(values), "min-max")
        mad = median_low([abs(v - middle) for v in values])
        if isinstance(middle, int) and isinstance(mad, int):
            half: Number = -(-mad * MAD_FACTOR.numerator // MAD_FACTOR.denominator)  # up: never narrower than said
        else:
            half = mad * float(MAD_FACTOR)
        return cls(len(values), middle, middle - half, middle + half, "mad")

    def holds(self, value: Number) -> bool | None:
        """Whether a value is within the band; None without one."""
        return None if self.low is None or self.high is None else self.low <= value <= self.high


def judge(a: Spread | None, b: Spread | None, least: Fraction) -> tuple[Verdict, str]:
    """Whether a figure moved, and why so. ``least``: a difference below this is too small to count, in its unit."""
    if a is None or b is None:
        return "unknown", "not known of " + ("both" if a is b else "A" if a is None else "B")
    change = b.median - a.median
    if change == 0:
        return "not moved", "equal"
    if abs(Fraction(change)) < least:
        return "not moved", "smaller than the least share"
    within = [name for name, inside in (("A", a.holds(b.median)), ("B", b.holds(a.median))) if inside]
    if within:
        return "not moved", f"within the band of {' and '.join(within)}"
    single = [name for name, side in (("A", a), ("B", b)) if side.low is None]
    if single:
        return "no band", f"{' and '.join(single)} {'have' if len(single) > 1 else 'has'} one step"
    return "moved", "outside both bands"


# -- one side ----------------------------------------------------------------------------------------------------------

_TIME = """
SELECT d.step, s.stage, d.class, list_aggregate(list_sort(d.roles), 'string_agg', ' + ') AS roles,
       sum(d.dur_ns)::BIGINT AS dur_ns
FROM device_time d LEFT JOIN rank_stage s ON s.rank = d.rank GROUP BY ALL
"""
_DEVICES = """
WITH one AS (
  SELECT DISTINCT rank, device, step, start_ns, basis, launches_known FROM device_time
)
SELECT o.step, s.stage, count(*) AS devices, bool_and(o.launches_known) AS launches_known,
       list_sort(list(DISTINCT o.basis)) AS bases
FROM one o LEFT JOIN rank_stage s ON s.rank = o.rank GROUP BY ALL
"""
_STEPS = """
SELECT t.step, s.stage, count(*) AS ranks, count(t.dur_ns) AS timed, sum(t.dur_ns)::BIGINT AS dur_ns,
       bool_and(t.complete) AS complete, any_value(t.evidence) AS evidence
FROM step_time t LEFT JOIN rank_stage s ON s.rank = t.rank GROUP BY ALL
"""
_RATES = """
SELECT step, avg(tokens_per_s_per_device) AS tokens, avg(mfu) AS mfu, avg(hfu) AS hfu, count(*) AS ranks,
       count(tokens_per_s_per_device) AS known, min(reason) AS reason
FROM throughput GROUP BY step
"""
_CALLS = """
WITH together AS (
  SELECT rank, coalesce_id, count(*) AS members FROM recorded_comm WHERE coalesce_id IS NOT NULL GROUP BY ALL
),
called AS (
  SELECT c.rank, c.step, c.role, c.op, c.phase, c.component, c.dtype, c.payload_bytes,
         c.in_splits IS NOT NULL OR c.out_splits IS NOT NULL AS by_data,
         CASE WHEN coalesce(t.members, 1) = 1 THEN c.dur_ns END AS own_ns
  FROM comm c LEFT JOIN together t ON t.rank IS NOT DISTINCT FROM c.rank AND t.coalesce_id = c.coalesce_id
)
SELECT c.step, s.stage, c.role, c.op, c.phase, c.component, c.dtype,
       CASE WHEN NOT c.by_data THEN c.payload_bytes END AS each_bytes, c.by_data, count(*) AS calls,
       count(c.payload_bytes) AS sized, coalesce(sum(c.payload_bytes), 0)::BIGINT AS total_bytes, count(c.own_ns) AS timed,
       coalesce(sum(c.own_ns), 0)::BIGINT AS dur_ns
FROM called c LEFT JOIN rank_stage s ON s.rank = c.rank GROUP BY ALL
"""
_BUBBLE = """
SELECT step, stage, count(*) AS devices, sum(bubble_ns)::BIGINT AS bubble_ns, sum(window_ns)::BIGINT AS window_ns,
       bool_or(lower_limit) AS lower_limit
FROM bubble GROUP BY ALL
"""
_SLOW = """
SELECT rank, step, any_value(stage) AS stage, cause,
       (CASE WHEN cause = 'host' THEN launch_starved_ns - usual_launch_starved_ns
             ELSE compute_ns - usual_compute_ns END)::BIGINT AS over_ns
FROM slow_ranks WHERE slow GROUP BY ALL
"""


@dataclass
class Side:
    """What one run holds, by step and stage (None: not known, or there is one), summed over ranks. Made by ``measure``."""

    source: str
    job: Job | None
    """The job its figures rest on."""
    ran: Job | None
    """The job as the run says of itself; None: it does not."""
    ranks: tuple[int, ...]
    setting: Row
    stages: int | None
    """Stages of its pipelines; None: not known, or they differ."""
    complete: frozenset[int]
    incomplete: frozenset[int]
    step_rows: list[Row] = field(repr=False)
    devices: list[Row] = field(repr=False)
    time: list[Row] = field(repr=False)
    rates: list[Row] = field(repr=False)
    calls: list[Row] = field(repr=False)
    bubbles: list[Row] = field(repr=False)
    slow: list[Row] = field(repr=False)
    formula: Fraction | None


def measure(run: Run, job: Job | None = None, progress: Progress | None = None) -> Side:
    """Asks a run all that a comparison needs; all steps at once. ``job``: as in Library.of."""
    told = progress or (lambda _: None)
    told(f"{run.source}: steps and time")
    library = Library.of(run, job)
    run.library = library
    for name in ("step_time", "time_classes", "throughput", "slow_ranks"):
        library.result_table(name, {})
    stages = run.tuples("SELECT min(stages), max(stages), count(DISTINCT rank) FROM rank_stage")[0]
    ranks = tuple(r for (r,) in run.tuples("SELECT DISTINCT rank FROM rank WHERE rank IS NOT NULL ORDER BY rank"))
    known = stages[0] if stages[0] == stages[1] and stages[2] == len(ranks) else None
    if known is not None and known > 1:
        told(f"{run.source}: pipelines")
        library.result_table("bubble", {})
    told(f"{run.source}: traffic")
    steps = run.rows(_STEPS)
    whole: dict[int, bool] = {}
    for row in steps:
        sound = bool(row["complete"]) and row["timed"] == row["ranks"]
        whole[row["step"]] = whole.get(row["step"], True) and sound
    devices = run.rows(_DEVICES)
    captured = run.job_text(schema.META_JOB_CAPTURED)
    return Side(
        run.source,
        library.job,
        None if captured is None else Job.from_json(captured),
        ranks,
        _setting(run, library.job, steps, devices),
        known,
        frozenset(s for s, complete in whole.items() if complete),
        frozenset(s for s, complete in whole.items() if not complete),
        steps,
        devices,
        run.rows(_TIME),
        run.rows(_RATES),
        run.rows(_CALLS),
        run.rows(_BUBBLE) if known is not None and known > 1 else [],
        run.rows(_SLOW),
        bubble.formula_share(library.job)[0],
    )


def _setting(run: Run, job: Job | None, steps: Iterable[Row], devices: Iterable[Row]) -> Row:
    """What a run ran on, as far as the recording says; figures of different settings differ for that reason alone."""
    versions = versions_of(stored for (stored,) in run.tuples("SELECT DISTINCT versions FROM rank"))
    names = run.tuples("SELECT DISTINCT device_name FROM rank WHERE device_name IS NOT NULL ORDER BY 1")
    hosts = run.value("SELECT count(DISTINCT host) FROM rank")
    return {
        "world size": run.world_size or (None if job is None else job.world_size),
        "ranks recorded": run.value("SELECT count(DISTINCT rank) FROM rank"),
        "device": ", ".join(n for (n,) in names) or None,
        "hosts recorded": hosts or None,
        "steps by": ", ".join(sorted({s["evidence"] for s in steps})) or None,
        "time of": ", ".join(sorted({b for d in devices for b in d["bases"] if b is not None})) or None,
        **{name: ", ".join(found) for name, found in versions.items()},
    }


class _Chosen:
    """The chosen steps of a side, and its figures in each of them."""

    def __init__(self, side: Side, wanted: Selection) -> None:
        self.side = side
        self.wanted = wanted
        self.steps = sorted(s for s in side.complete if wanted.holds(s))
        self.left_out = sorted(s for s in side.incomplete if wanted.holds(s))
        chosen = set(self.steps)
        self.devices: dict[int, dict[int | None, int]] = defaultdict(dict)
        self.launches = True
        for row in side.devices:
            if row["step"] in chosen:
                self.devices[row["step"]][row["stage"]] = row["devices"]
                self.launches = self.launches and bool(row["launches_known"])
        self.ranks: dict[int, dict[int | None, int]] = defaultdict(dict)
        self.step_ns: dict[int, dict[int | None, int]] = defaultdict(dict)
        for row in side.step_rows:
            if row["step"] in chosen:
                self.ranks[row["step"]][row["stage"]] = row["ranks"]
                self.step_ns[row["step"]][row["stage"]] = row["dur_ns"]
        self.parts: dict[_Key, dict[tuple[int, int | None], int]] = defaultdict(lambda: defaultdict(int))
        for row in side.time:
            if row["step"] in chosen:
                place = row["step"], row["stage"]
                for key in _measures(row):
                    self.parts[key][place] += row["dur_ns"]
        self.unknown_roles = ("busy", "unknown") in self.parts
        self.unplaced = {(r["op"], r["dtype"]) for r in side.calls if r["role"] is None and r["step"] in chosen}
        self.bubbles: dict[int, list[Row]] = defaultdict(list)
        for row in side.bubbles:
            self.bubbles[row["step"]].append(row)

    def may_hold(self, op: str | None, dtypes: set[str]) -> bool:
        """Whether there are calls of unknown role that could be of this operation and one of these types."""
        return any(o in (op, None) and (d is None or not dtypes or d in dtypes) for o, d in self.unplaced)

    @property
    def timed(self) -> bool:
        """Whether every chosen step has time by class."""
        return bool(self.steps) and all(self.devices.get(s) for s in self.steps)

    def spread(self, keys: Iterable[_Key], stage: int | None) -> Spread | None:
        """The sum of some parts per device; ``stage`` None: of all."""
        if not self.timed:
            return None
        values = []
        for step in self.steps:
            stages = self.devices[step]
            counted = sum(stages.values()) if stage is None else stages.get(stage, 0)
            if not counted:
                return None
            total = sum(
                self.parts[key].get((step, s), 0)
                for key in keys
                if key in self.parts
                for s in stages
                if stage is None or s == stage
            )
            values.append(_rounded(total, counted))
        return Spread.of(values)

    def step_time(self, stage: int | None) -> Spread | None:
        """Duration of a step per rank."""
        values = []
        for step in self.steps:
            ranks = self.ranks[step]
            counted = sum(ranks.values()) if stage is None else ranks.get(stage, 0)
            if not counted:
                return None
            values.append(_rounded(sum(v for s, v in self.step_ns[step].items() if stage in (None, s)), counted))
        return Spread.of(values) if values else None

    def step_values(self) -> list[Row]:
        """Number and duration of every chosen step."""
        return [
            {"step": s, "step_ns": _rounded(sum(self.step_ns[s].values()), sum(self.ranks[s].values()))}
            for s in self.steps
        ]

    def rate(self, name: str) -> Spread | None:
        """A rate of query throughput, mean over the ranks."""
        found = {r["step"]: r[name] for r in self.side.rates if r["known"] == r["ranks"]}
        values = [found.get(step) for step in self.steps]
        known = [v for v in values if v is not None]
        return Spread.of(known) if known and len(known) == len(values) else None

    def bubble(self, stage: int | None) -> tuple[Spread | None, Fraction | None]:
        """Bubble per stage and pipeline, and its share of the windows of all chosen steps."""
        values, bubble_ns, window_ns = [], 0, 0
        for step in self.steps:
            rows = [r for r in self.bubbles.get(step, ()) if stage in (None, r["stage"])]
            if not rows:
                return None, None
            of_step = sum(r["bubble_ns"] for r in rows)
            values.append(_rounded(of_step, sum(r["devices"] for r in rows)))
            bubble_ns += of_step
            window_ns += sum(r["window_ns"] for r in rows)
        return (Spread.of(values), Fraction(bubble_ns, window_ns) if window_ns else None) if values else (None, None)

    def places(self, stage: int | None) -> int:
        """Ranks times steps."""
        return sum(n for s in self.steps for at, n in self.ranks[s].items() if stage is None or at == stage)

    def as_row(self) -> Row:
        """The side as the document names it."""
        job = self.side.job
        return {
            "path": self.side.source,
            "selected": None if self.wanted.steps is None else str(self.wanted).rpartition("@")[2],
            "steps": self.steps,
            "steps_left_out": self.left_out,
            "step_times": self.step_values(),
            "ranks_recorded": len(self.side.ranks),
            "stages": self.side.stages,
            "world_size": self.side.setting["world size"],
            "device": self.side.setting["device"],
            "job": None if job is None else words.job_words(job),
            "calls_outside_steps": sum(c["calls"] for c in self.side.calls if c["step"] is None),
        }


def _measures(row: Row) -> list[_Key]:
    """What a row of time counts for: one part of the step, and the roles that communicate in it."""
    roles = row["roles"]
    if row["class"] in ("communication", "pp"):
        found = [("exposed", roles or "unknown"), ("exposed_total", "")]
    else:
        found = [(row["class"], "")]
    each = [] if roles is None else roles.split(" + ")
    found += [("busy", role) for role in each]
    if row["class"] in ("communication", "pp"):
        # several roles at once count for each, and once for an axis
        found += [("exposed_any", part) for part in dict.fromkeys([*each, *map(_axis, each)])]
    return found


def _axis(role: str) -> str:
    return str(axes.rollup(role)).lower() if role in axes.ROLES else "unknown"


def _rounded(total: int, count: int) -> int:
    return (2 * total + count) // (2 * count)


# -- the comparison ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side; see as_document for what is in it."""

    document: Row = field(repr=False)

    def as_document(self) -> Row:
        """The JSON document traceanalyzer.compare/1 (docs/compare.md)."""
        return self.document

    @property
    def comparable(self) -> bool:
        """Whether there is a figure that both sides have."""
        return bool(self.document["verdict"]["word"] != "cannot be compared")

    def _repr_html_(self) -> str:
        """The page in a notebook, in a frame of its own."""
        from html import escape

        from traceanalyzer.reports.compare.html import html

        page = escape(html(self.document), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:800px;border:0"></iframe>'


def compare(
    a: Run,
    b: Run,
    *,
    steps_a: Selection | None = None,
    steps_b: Selection | None = None,
    job_a: Job | None = None,
    job_b: Job | None = None,
    least_share: Fraction = LEAST_SHARE,
    progress: Progress | None = None,
) -> Comparison:
    """Compares run B with run A; both may be one opened run, of which then the steps differ.

    steps_a, steps_b: which steps; None: all complete ones. job_a, job_b: as intended; None: the one in the run, intended
    before captured. least_share: of A's step, below which a difference is too small to count.
    Raises InputError or JobError for a run or job that cannot be read, and InputError for chosen steps that a run lacks.
    """
    one = measure(a, job_a, progress)
    other = one if a is b and job_a is job_b else measure(b, job_b, progress)
    return lay(one, other, steps_a or Selection(a.source), steps_b or Selection(b.source), least_share)


def lay(a: Side, b: Side, steps_a: Selection, steps_b: Selection, least_share: Fraction = LEAST_SHARE) -> Comparison:
    """Lays two measured sides side by side; see compare."""
    sides = (_Chosen(a, steps_a), _Chosen(b, steps_b))
    for side in sides:
        _refuse_absent(side)
    notes = _notes(*sides)
    staged = a.stages == b.stages and (a.stages or 1) > 1
    stages: list[int | None] = [None, *(range(a.stages) if staged and a.stages else ())]
    base = sides[0].step_time(None)
    least = least_share * (0 if base is None else int(base.median))
    rows = _time_rows(*sides, stages, least, base, least_share)
    traffic = _traffic_rows(*sides, staged, least, base, least_share)
    shown = traffic[:MOST_ROWS]
    document: Row = {
        "schema": SCHEMA,
        "a": sides[0].as_row(),
        "b": sides[1].as_row(),
        "verdict": {},
        "rules": {
            "least_share": float(least_share),
            "least_ns": int(least) if base is not None else None,
            "band": (
                f"2 to {MAD_FROM - 1} steps: shortest to longest; from {MAD_FROM} on: lower median and "
                f"{float(MAD_FACTOR):g} MADs to both sides; one step: no band"
            ),
            "moved": "outside the bands of both runs, and at least the least share of A's step",
        },
        "job_differences": _all_differences(a, b),
        "setting_differences": [
            {"name": name, "a": a.setting.get(name), "b": b.setting.get(name)}
            for name in dict.fromkeys([*a.setting, *b.setting])
            if a.setting.get(name) != b.setting.get(name)
        ],
        "notes": notes,
        "rows": rows,
        "traffic": shown,
        "slow_ranks": _slow_rows(*sides),
        "left_out": [{"what": "traffic", "rows": len(traffic) - len(shown)}] if len(traffic) > len(shown) else [],
        "gates": {},
    }
    document["verdict"] = _verdict(document, *sides)
    document["gates"] = _gates(*sides, document, traffic)
    return Comparison(document)


def _refuse_absent(side: _Chosen) -> None:
    if side.wanted.steps is not None and not side.steps and not side.left_out:
        known = text.ranges(side.side.complete | side.side.incomplete)
        raise InputError(f"{side.wanted}: the run has no such step. It has: {known}.")


def job_differences(a: Job | None, b: Job | None) -> list[Row]:
    """Fields in which two jobs differ: those that both state first, then those that only one states.

    ``a``, ``b``: values as Megatron would end up with. ``stated``: both, a, b.
    """
    if a is None or b is None:
        return []
    found = [
        {"field": c.field, "a": c.intended, "b": c.captured, "stated": "both"}
        for c in conflicts(captured=b, intended=a)
    ]
    known = {f["field"] for f in found}
    names = {f.name for f in dataclasses.fields(Job)} - {"given", "extra"}
    for name in sorted((a.given ^ b.given) & names - known):
        left, right = _plain(getattr(a, name)), _plain(getattr(b, name))
        if left != right:
            found.append({"field": name, "a": left, "b": right, "stated": "a" if name in a.given else "b"})
    return found


def _all_differences(a: Side, b: Side) -> list[Row]:
    """Those of the jobs as the runs say of themselves, then those of the jobs that the figures rest on."""
    found = job_differences(a.ran, b.ran)
    known = {row["field"] for row in found}
    return found + [row for row in job_differences(a.job, b.job) if row["field"] not in known]


def _plain(value: Any) -> Any:
    """A field of a job as JSON holds it."""
    if value is None or isinstance(value, bool | int | str):
        return value
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else str(value)


def _notes(a: _Chosen, b: _Chosen) -> list[str]:
    """What limits the comparison, in sentences."""
    found = []
    for name, side in (("A", a), ("B", b)):
        if len(side.steps) == 1:
            found.append(f"{name} has one step: nothing says how much its times vary, so it has no band.")
        if side.left_out:
            found.append(f"{name}: {_steps_words(side.left_out)} not recorded whole, left out.")
        outside = sum(c["calls"] for c in side.side.calls if c["step"] is None)
        if outside:
            found.append(f"{name}: {text.counted(outside, 'call')} outside every step, left out.")
        if side.unknown_roles:
            found.append(f"{name} has communication of unknown role: roles that it lacks are not known to be absent.")
        if any(r["lower_limit"] for r in side.side.bubbles):
            found.append(f"{name}: a stage is not recorded, so its bubble is a lower limit.")
    worlds = [s.side.setting["world size"] for s in (a, b)]
    if worlds[0] != worlds[1]:
        found.append(
            f"Different worlds ({text.count(worlds[0])} and {text.count(worlds[1])} ranks): all figures are means per rank."
        )
    elif a.side.ranks != b.side.ranks:
        found.append("Different ranks were recorded: all figures are means over the recorded ones.")
    stages = [s.side.stages for s in (a, b)]
    if stages[0] != stages[1]:
        found.append(
            f"Stages are not aligned ({text.count(stages[0])} in A, {text.count(stages[1])} in B): only means over all ranks "
            "are compared."
        )
    if a.timed and b.timed and a.side.setting["time of"] != b.side.setting["time of"]:
        found.append(
            f"Time by class is not compared: of A it is the {a.side.setting['time of']}'s, of B the "
            f"{b.side.setting['time of']}'s."
        )
    elif a.launches != b.launches:
        found.append(
            f"Only {'A' if a.launches else 'B'} has launch times: launch-starved time is counted as idle in both."
        )
    for name, side in (("A", a), ("B", b)):
        if side.side.job is None:
            found.append(f"No job is known of {name}: jobs, tokens/s and MFU are not compared.")
    return found


def _steps_words(steps: Sequence[int]) -> str:
    return f"step{'' if len(steps) == 1 else 's'} {text.ranges(steps)} {'was' if len(steps) == 1 else 'were'}"


def _time_rows(
    a: _Chosen, b: _Chosen, stages: Sequence[int | None], least: Fraction, base: Spread | None, least_share: Fraction
) -> list[Row]:
    """Steps, the parts they consist of, communication by role, bubble, rates: those that moved first, by time."""
    found = []

    def add(what: str, role: str | None, stage: int | None, unit: str, one: Spread | None, two: Spread | None) -> None:
        if one is None and two is None:
            return
        floor = least if unit == "ns" else least_share * abs(Fraction(one.median)) if one else Fraction(0)
        found.append(_figure(what, role, stage, unit, one, two, floor, base))

    same_basis = a.side.setting["time of"] == b.side.setting["time of"]
    launches = a.launches and b.launches
    keys = sorted({*a.parts, *b.parts})
    for stage in stages:
        add("step time", None, stage, "ns", a.step_time(stage), b.step_time(stage))
        for what, role in keys if same_basis else ():
            if what in ("exposed_any", "exposed_total") or (what == "launch_starved" and not launches):
                continue
            merged = [(what, role), ("launch_starved", "")] if what == "idle" and not launches else [(what, role)]
            one, two = (
                None if role and (what, role) not in side.parts and side.unknown_roles else side.spread(merged, stage)
                for side in (a, b)
            )
            if what != "idle" and all(s is not None and not s.median and not (s.high or 0) for s in (one, two)):
                continue  # a part that neither has in this stage
            add(what, role or None, stage, "ns", one, two)
        if (a.side.stages or 0) > 1 and (b.side.stages or 0) > 1:
            add("bubble", None, stage, "ns", a.bubble(stage)[0], b.bubble(stage)[0])
    for name, unit in (("tokens", "tokens/s"), ("mfu", "1"), ("hfu", "1")):
        what = "tokens/s per device" if name == "tokens" else name.upper()
        add(what, None, None, unit, a.rate(name), b.rate(name))
    return sorted(found, key=_order)


def _figure(
    what: str, role: str | None, stage: int | None, unit: str, a: Spread | None, b: Spread | None, least: Fraction,
    base: Spread | None,
) -> Row:  # fmt: skip
    verdict, reason = judge(a, b, least)
    change = None if a is None or b is None else b.median - a.median
    return {
        "what": what,
        "role": role,
        "axis": None if role is None else _axes_of(role),
        "stage": stage,
        "unit": unit,
        "part_of_step": what in PARTS,
        "a": None if a is None else dataclasses.asdict(a),
        "b": None if b is None else dataclasses.asdict(b),
        "change": change,
        "ratio": None if a is None or b is None or not a.median else b.median / a.median,
        "share_of_step": None if change is None or unit != "ns" or base is None or not base.median
        else change / base.median,
        "verdict": verdict,
        "reason": reason,
    }  # fmt: skip


PARTS: tuple[str, ...] = ("compute", "exposed", "copy", "launch_starved", "idle")
"""Parts of a step: each instant belongs to one of them (exposed: of one set of roles)."""

_FIRST = {"moved": 0, "no band": 1, "not moved": 2, "unknown": 3}


def _axes_of(role: str) -> str:
    found = {_axis(r).upper() for r in role.split(" + ")}
    return found.pop() if len(found) == 1 else "other"


def _order(row: Row) -> tuple[Any, ...]:
    change = abs(row["change"] or 0) if row["unit"] == "ns" else -1
    size = max((s["median"] for s in (row["a"], row["b"]) if s is not None), default=0) if row["unit"] == "ns" else 0
    first = row["what"] != "step time" or row["stage"] is not None
    return (
        _FIRST[row["verdict"]],
        first,
        -change,
        row["stage"] is not None,
        -size,
        row["stage"] or 0,
        row["what"],
        row["role"] or "",
    )


# -- traffic -----------------------------------------------------------------------------------------------------------


@dataclass
class _Cell:
    """Calls of one side that are alike, over its chosen steps."""

    calls: int = 0
    sized: int = 0
    total_bytes: int = 0
    timed: int = 0
    by_data: bool = False
    step_bytes: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    step_ns: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    dtypes: set[str] = field(default_factory=set)
    sizes: set[int] = field(default_factory=set)

    def add(self, other: _Cell) -> None:
        """Adds the calls of another cell."""
        for name in ("calls", "sized", "total_bytes", "timed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.by_data |= other.by_data
        self.dtypes |= other.dtypes
        self.sizes |= other.sizes
        for mine, theirs in ((self.step_bytes, other.step_bytes), (self.step_ns, other.step_ns)):
            for step, value in theirs.items():
                mine[step] += value

    def total(self) -> int | None:
        """Payload of all its calls; None where that of one is not known."""
        return self.total_bytes if self.sized == self.calls else None


_Place = tuple[int | None, str | None, str | None, str | None, str | None]
"""Stage, role, operation, phase, component."""
_Cells = dict[_Place, dict[tuple[str | None, int | None, bool], _Cell]]


def _cells(side: _Chosen, staged: bool) -> _Cells:
    found: _Cells = defaultdict(lambda: defaultdict(_Cell))
    chosen = set(side.steps)
    for row in side.side.calls:
        if row["step"] not in chosen:
            continue
        place = (row["stage"] if staged else None, row["role"], row["op"], row["phase"], row["component"])
        cell = found[place][row["dtype"], row["each_bytes"], row["by_data"]]
        cell.calls += row["calls"]
        cell.sized += row["sized"]
        cell.total_bytes += row["total_bytes"]
        cell.timed += row["timed"]
        cell.by_data |= row["by_data"]
        cell.step_bytes[row["step"]] += row["total_bytes"]
        cell.step_ns[row["step"]] += row["dur_ns"]
        if row["dtype"] is not None:
            cell.dtypes.add(row["dtype"])
        if row["each_bytes"] is not None:
            cell.sizes.add(row["each_bytes"])
    return found


def _traffic_rows(
    a: _Chosen, b: _Chosen, staged: bool, least: Fraction, base: Spread | None, least_share: Fraction
) -> list[Row]:
    """Kinds of calls side by side: first by type and size, what is left over of one place together."""
    left, right = _cells(a, staged), _cells(b, staged)
    found = []
    for place in {**left, **right}:
        ones, twos = left.get(place, {}), right.get(place, {})
        pairs: list[tuple[_Cell | None, _Cell | None]] = [(ones[k], twos[k]) for k in ones if k in twos]
        rest = [[c for k, c in mine.items() if k not in theirs] for mine, theirs in ((ones, twos), (twos, ones))]
        if all(rest):
            together = (_Cell(), _Cell())
            for cell, cells in zip(together, rest, strict=True):
                for other in cells:
                    cell.add(other)
            pairs.append(together)
        else:
            pairs += [(c, None) for c in rest[0]] + [(None, c) for c in rest[1]]
        found += [_traffic_row(place, pair, (a, b), least, base, least_share) for pair in pairs]
    return sorted(found, key=_traffic_order)


def _traffic_row(
    place: _Place,
    pair: tuple[_Cell | None, _Cell | None],
    sides: tuple[_Chosen, _Chosen],
    least: Fraction,
    base: Spread | None,
    least_share: Fraction,
) -> Row:
    stage, role, op, phase, component = place
    one, two = pair
    present = [cell for cell in pair if cell is not None]
    by_data = any(cell.by_data for cell in present)
    calls: list[Fraction | None] = []
    each: list[Fraction | None] = []
    spreads: list[Spread | None] = []
    times: list[Spread | None] = []
    for cell, side in zip(pair, sides, strict=True):
        places = side.places(stage)
        if cell is None or not places:
            # nothing of it was seen: that is none, unless calls of unknown role could be it
            lacks = places and not (role is not None and side.may_hold(op, present[0].dtypes))
            absent = Fraction(0) if lacks else None
            calls.append(absent)
            each.append(absent)
            spreads.append(None if absent is None else _per_step(side, stage, {}))
            times.append(None if absent is None else _per_step(side, stage, {}))
            continue
        total = cell.total()
        calls.append(Fraction(cell.calls, places))
        each.append(None if total is None else Fraction(total, places))
        spreads.append(None if total is None else _per_step(side, stage, cell.step_bytes))
        times.append(_per_step(side, stage, cell.step_ns) if cell.timed == cell.calls else None)
    differs = []
    if None not in calls and calls[0] != calls[1]:
        differs.append("calls")
    if by_data:
        of_a = spreads[0]
        floor = least_share * abs(Fraction(of_a.median)) if of_a is not None else Fraction(0)
        if judge(spreads[0], spreads[1], floor)[0] == "moved":
            differs.append("bytes")
    elif None not in each and each[0] != each[1]:
        differs.append("bytes")
    if one is None or two is None:
        differs = differs or ["unknown"]
    else:
        if one.dtypes != two.dtypes:
            differs.append("type")
        if one.sizes != two.sizes and not by_data:
            differs.append("size")
    verdict, reason = judge(times[0], times[1], least)
    where = "" if one is not None and two is not None else "A" if two is None else "B"
    change = None if times[0] is None or times[1] is None else int(times[1].median - times[0].median)
    return {
        "role": role,
        "axis": None if role is None else _axes_of(role),
        "op": op,
        "phase": phase,
        "component": component,
        "stage": stage,
        "only_in": where or None,
        "by_data": by_data,
        "differs": differs,
        **{
            f"{name}_{side}": value
            for i, side in enumerate("ab")
            for name, value in (
                ("dtypes", _sorted(pair[i], "dtypes")),
                ("sizes", _sorted(pair[i], "sizes")),
                ("calls", _number(calls[i])),
                ("bytes", _number(each[i])),
                ("total_calls", _total(pair[i], calls[i], "calls")),
                ("total_bytes", _total(pair[i], each[i], "total_bytes")),
                ("rank_steps", sides[i].places(stage)),
            )
        },
        "time_a": None if times[0] is None else dataclasses.asdict(times[0]),
        "time_b": None if times[1] is None else dataclasses.asdict(times[1]),
        "change": change,
        "share_of_step": None if change is None or base is None or not base.median else change / base.median,
        "verdict": verdict,
        "reason": "not every call has a time of its own" if verdict == "unknown" else reason,
    }


def _per_step(side: _Chosen, stage: int | None, values: Mapping[int, int]) -> Spread | None:
    found = []
    for step in side.steps:
        ranks = sum(n for at, n in side.ranks[step].items() if stage is None or at == stage)
        if not ranks:
            return None
        found.append(_rounded(values.get(step, 0), ranks))
    return Spread.of(found) if found else None


def _sorted(cell: _Cell | None, name: str) -> list[Any]:
    return [] if cell is None else sorted(getattr(cell, name))


def _total(cell: _Cell | None, each: Fraction | None, name: str) -> int | None:
    if each is None:
        return None
    return 0 if cell is None else int(getattr(cell, name))


def _number(value: Fraction | None) -> Number | None:
    """Per rank and step: whole where it is, else rounded; the totals beside it are exact."""
    if value is None:
        return None
    return value.numerator if value.denominator == 1 else float(value)


def _traffic_order(row: Row) -> tuple[Any, ...]:
    moved = row["verdict"] == "moved"
    size = abs((row["bytes_b"] or 0) - (row["bytes_a"] or 0))
    name = tuple(str(row[key]) for key in ("role", "phase", "op", "component"))
    return not (row["differs"] or moved), -abs(row["change"] or 0), -size, name, row["stage"] or 0, str(row["sizes_a"])


# -- ranks, verdict, gates ---------------------------------------------------------------------------------------------


def _slow_rows(a: _Chosen, b: _Chosen) -> list[Row]:
    """Ranks that were slow in most of the steps of a side (query slow_ranks), those of one side alone first."""
    found: dict[tuple[int, int | None], Row] = {}
    for name, side in (("a", a), ("b", b)):
        of_rank: dict[tuple[int, int | None], list[Row]] = defaultdict(list)
        chosen = set(side.steps)
        for row in side.side.slow:
            if row["step"] in chosen:
                of_rank[row["rank"], row["stage"]].append(row)
        for key, rows in of_rank.items():
            if 2 * len(rows) <= len(side.steps):
                continue
            entry = found.setdefault(
                key, {"rank": key[0], "stage": key[1], "only_in": None, "cause_a": None, "cause_b": None, "slow_steps_a": 0,
                      "slow_steps_b": 0, "over_ns_a": None, "over_ns_b": None},
            )  # fmt: skip
            entry[f"slow_steps_{name}"] = len(rows)
            entry[f"over_ns_{name}"] = median_low([r["over_ns"] for r in rows])
            entry[f"cause_{name}"] = ", ".join(sorted({r["cause"] for r in rows}))
    for entry in found.values():
        entry["only_in"] = "A" if not entry["slow_steps_b"] else "B" if not entry["slow_steps_a"] else None
    return sorted(found.values(), key=lambda r: (r["only_in"] is None, r["rank"]))


def _verdict(document: Row, a: _Chosen, b: _Chosen) -> Row:
    """The word, one sentence that says why, and what to do next."""
    for name, side in (("A", a), ("B", b)):
        if not side.steps:
            return _said(
                "cannot be compared",
                f"{name} has no step that was recorded whole.",
                f"See its steps: traceanalyzer query {side.side.source} step_time",
            )
    rows, traffic = document["rows"], document["traffic"]
    both = [r for r in rows if r["verdict"] != "unknown"]
    if not both and not any(t["only_in"] is None for t in traffic):
        return _said(
            "cannot be compared", "There is no figure that both have.", "See what each holds: traceanalyzer info"
        )
    step = next((r for r in rows if r["what"] == "step time" and r["stage"] is None), None)
    moved = [r for r in rows if r["verdict"] == "moved"]
    open_ = [r for r in rows if r["verdict"] == "no band"]
    differs = [t for t in traffic if t["differs"]]
    timed = [t for t in traffic if t["verdict"] == "moved"]
    sentences = [] if step is None else [_step_words(step)]
    if moved:
        sentences.append(f"{text.counted(len(moved), 'figure')} of time moved.")
    of_parts = [r for r in (moved or open_) if r["part_of_step"] and r["stage"] is None]
    if of_parts:
        most = max(of_parts, key=lambda r: abs(r["change"]))
        sentences.append(
            f"Of its parts {compare_words.row_name(most)} changed most: {compare_words.signed_time(most['change'])}."
        )
    if differs:
        sentences.append(
            f"{text.counted(len(differs), 'kind')} of calls {'differs' if len(differs) == 1 else 'differ'} in calls, bytes, "
            "type or size."
        )
    elif traffic:
        sized = all(t["bytes_a"] is not None and t["bytes_b"] is not None for t in traffic)
        sentences.append(
            "Calls and bytes are the same." if sized else "Calls are the same, and bytes where they are known."
        )
    if moved or differs or timed:
        return _said("moved", " ".join(sentences), None)
    if open_:
        return _said(
            "cannot be told",
            " ".join(sentences),
            "Record several steps of each: of one step nothing says how much its times vary.",
        )
    return _said("did not move", " ".join(sentences), None)


def _said(word: str, sentence: str, then: str | None) -> Row:
    return {"word": word, "sentence": sentence, "next": then}


def _step_words(row: Row) -> str:
    if row["a"] is None or row["b"] is None:
        return "The step time is not known of both."
    one, two = (words.human_time(row[side]["median"]) for side in "ab")
    percent = "" if row["ratio"] is None else f" ({(row['ratio'] - 1) * 100:+.1f} %)"
    steps = f"{row['a']['steps']} and {text.counted(row['b']['steps'], 'step')}"
    if row["verdict"] == "moved":
        return f"Step time moved from {one} to {two}{percent}, outside the bands of both ({steps})."
    if row["verdict"] == "no band":
        return f"Step time went from {one} to {two}{percent}; whether that is noise cannot be told: {row['reason']}."
    if row["reason"] == "equal":
        return f"Step time is the same, {one} ({steps})."
    return f"Step time did not move: {one} and {two}{percent}, {row['reason']} ({steps})."


def _gates(a: _Chosen, b: _Chosen, document: Row, traffic: Sequence[Row]) -> Row:
    """Figures of B for --fail-on (reports/gates.py): shares of B's step, times, and B against A. None: not known."""
    found: dict[str, Row] = {}

    def times(one: Spread | None, two: Spread | None) -> float | None:
        if one is None or two is None:
            return None
        return two.median / one.median if one.median else 1.0 if not two.median else None

    steps = (a.step_time(None), b.step_time(None))
    found["step_time"] = {"ns": None if steps[1] is None else steps[1].median, "times": times(*steps)}
    comparable = a.side.setting["time of"] == b.side.setting["time of"]

    def put(name: str, key: _Key) -> None:
        one, two = (side.spread([key], None) for side in (a, b))
        share = None
        if two is not None and steps[1] is not None and steps[1].median:
            share = two.median / steps[1].median
        found[name] = {
            "share": share,
            "ns": None if two is None else two.median,
            "times": times(one, two) if comparable else None,
        }

    put("exposed", ("exposed_total", ""))
    for what, part in sorted({*a.parts, *b.parts}):
        if what == "exposed_any":
            put(f"exposed.{part}", (what, part))
    for what in ("compute", "idle", "launch_starved"):
        put(what, (what, ""))
    if not b.launches:
        found["launch_starved"] = {"share": None, "ns": None, "times": None}
    share = b.bubble(None)[1]
    formula = b.side.formula
    found["bubble"] = {
        "share": None if share is None else float(share),
        "times": float(share / formula) if share is not None and formula else None,
    }
    for name in ("mfu", "hfu"):
        one, two = a.rate(name), b.rate(name)
        found[name] = {"share": None if two is None else two.median, "times": times(one, two)}
    judged = [*document["rows"], *traffic]
    moved: int | None = sum(r["verdict"] == "moved" for r in judged)
    if not a.steps or not b.steps or (not moved and any(r["verdict"] == "no band" for r in judged)):
        moved = None  # of one step nothing says whether it moved
    found["moved"] = {"count": moved}
    found["traffic"] = {"count": sum(bool(t["differs"]) for t in traffic) if a.steps and b.steps else None}
    return found
