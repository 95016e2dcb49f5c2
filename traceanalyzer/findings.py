"""What a run's owner should know first: a table of rules, each of which looks at small tables and makes findings.

A finding is one sentence with its place, its evidence (a query of the library and some of its rows) and a ceiling: what a
step could save at most, never a forecast. One fault has many effects. A finding that only shows what another one causes
says so (``because_of``) and stands below it.

Order: what forbids judging; traffic that is wrong; job files that contradict each other; avoidable traffic and time that has
a cause, by their ceilings; what is odd about the recording; where time goes without anything being wrong, by ceilings.

Not made is a finding of time that is smaller than LEAST_SHARE of a step, than what the clocks leave open, or than the
figure's own spread from step to step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from statistics import median_low
from typing import Any, Literal, NamedTuple

from traceanalyzer import axes
from traceanalyzer.diff import Diff
from traceanalyzer.job import Job
from traceanalyzer.matching import DIFFERS, Cell
from traceanalyzer.reports import text

Kind = Literal["verdict", "avoidable", "time", "conflict", "data"]
Confidence = Literal["proven", "likely", "limit"]
Row = Mapping[str, Any]

LEAST_SHARE = Fraction(1, 200)
"""Of a step. Two recordings of an unchanged job differ by about this; less cannot be seen in an unprofiled step time."""

MOST_ROWS = 5
"""Rows of evidence that a finding carries; its query gives the others."""

AFTER_STEPS = Fraction(1, 20)
"""Of the calls of a step, behind the last whole one: a barrier or two after the last step are no step that was cut."""

UNEVEN = Fraction(105, 100)
"""Compute of the slowest stage over the mean: the embedding and the output layer alone make a few percent."""

ABOVE_FORMULA = Fraction(110, 100)
"""Measured bubble over the schedule's: gaps between the kernels of a pass count as bubble, and are a few percent of it."""

HIDDEN_BY_OVERLAP = Fraction(1, 5)
"""Share of the transfers that overlap must hide at least. Few buckets, of which the last has nothing behind it, and only one
micro-batch to hide behind leave much exposed although the overlap works."""

IMBALANCED = Fraction(125, 100)
"""Rows of the fullest expert rank over the mean: an auxiliary loss keeps routing within about a fifth."""

LIKE = 3
"""Ranks of one kind from which the query slow_ranks judges."""

LEAST_UNEXPLAINED = Fraction(1, 50)
"""Of a step: lateness that nothing explains. Routing and jitter alone let some rank come last by a percent."""

EXPLAINS = Fraction(1, 4)
"""Part of a rank's lateness that something it does longer than its peers must explain, for it to be named the cause."""

DRIFT_PPB = 100_000
"""Two quartz clocks of the same machine room differ by less."""

OFFSET_NS = 10_000_000
"""Clocks kept by NTP agree to a few milliseconds."""

JUMP_PPB = 1_000_000
"""No quartz drifts by a thousandth: such a fit is a clock that was set while it ran."""

JUMP = 20
"""Largest distance of an end from where the clocks put it, over the 95th percentile: sound calls have no such tail."""

JUMP_NS = 1_000_000
"""Ends of sound calls do not lie farther apart: the recorded ones of 8 GPUs lie within 0.05 ms."""

SMALL_BYTES = 2**20
"""Of one rank and step: what every link between two devices moves in well under a millisecond."""

MEMORY = Fraction(102, 100)
"""Measured memory over the estimate: allocators round up, and buffers are padded."""


@dataclass(frozen=True)
class Evidence:
    """A query of the library, what it shows, and up to MOST_ROWS of its rows. query None: not of the library (``source``)."""

    query: str | None
    sentence: str
    rows: tuple[Row, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True)
class Finding:
    """One thing to know.

    gain_ns_at_most: what a step would be shorter by at most without it; None: no ceiling is known. gain_bytes: off-rank
    bytes per rank and step in question. place: role, axis, ranks, stage, host, layer, step, microbatch, component as far as
    it has one. because_of: another finding of which this one is an effect. forbids: without it the rest cannot be judged.
    """

    code: str
    kind: Kind
    sentence: str
    confidence: Confidence
    gain_ns_at_most: int | None = None
    gain_bytes: int | None = None
    place: Mapping[str, Any] = field(default_factory=dict)
    evidence: tuple[Evidence, ...] = ()
    remedy: str | None = None
    because_of: Finding | None = None
    forbids: bool = False


@dataclass(frozen=True)
class Facts:
    """What the rules look at.

    tables: rows of queries and views by name; those of one rank and step for every complete step. A name that is not there:
    could not be asked. refused: why there is no diff, although a job is known.
    """

    tables: Mapping[str, Sequence[Row]]
    job: Job | None = None
    diff: Diff | None = None
    refused: str | None = None
    expected_bubble: Fraction | None = None
    """Share of a pipeline's window that the schedule leaves idle."""

    def rows(self, name: str) -> Sequence[Row]:
        """Rows of one table; none where it could not be made."""
        return self.tables.get(name, ())

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Steps that some rank recorded whole with their end, ascending."""
        return tuple(sorted({r["step"] for r in self.rows("step_time") if _whole(r)}))

    @cached_property
    def timed_steps(self) -> tuple[int, ...]:
        """Of these, steps whose time is known: a profiler saw them. All of them where no rank has such a table."""
        timed = {r["step"] for r in self.rows("time_classes")}
        return tuple(s for s in self.steps if s in timed) if timed else self.steps

    @cached_property
    def step_ns(self) -> int | None:
        """Duration of a typical step: the median over steps of the median over ranks; None: no end is known."""
        durations: dict[int, list[int]] = defaultdict(list)
        for row in self.rows("step_time"):
            if _whole(row):
                durations[row["step"]].append(row["dur_ns"])
        return median_low([median_low(d) for d in durations.values()]) if durations else None

    @cached_property
    def residual_ns(self) -> int:
        """What the clocks leave open between two ranks."""
        return max((r["open_ns"] for r in self.rows("clocks") if r["open_ns"] is not None), default=0)

    @cached_property
    def hosts(self) -> Mapping[int, str | None]:
        """Host of every recorded rank; None: not recorded."""
        return {r["rank"]: r["host"] for r in self.rows("rank") if r["rank"] is not None}

    def stage(self, rank: int) -> int:
        """Pipeline stage of a rank; 0 where it is not known."""
        return self._stages.get(rank, 0)

    @cached_property
    def starved(self) -> Mapping[str, frozenset[int]]:
        """Host -> its ranks whose devices wait for launches longer than their like do."""
        over: dict[int, dict[int, int]] = defaultdict(dict)
        for row in self.rows("slow_ranks"):
            if row["cause"] == "host":
                over[row["rank"]][row["step"]] = row["launch_starved_ns"] - row["usual_launch_starved_ns"]
        found: dict[str, set[int]] = defaultdict(set)
        for rank, steps in over.items():
            host = self.hosts.get(rank)
            if host is not None and self.lasting(steps) is not None:
                found[host].add(rank)
        return {host: frozenset(ranks) for host, ranks in found.items()}

    @cached_property
    def missing(self) -> tuple[int, ...]:
        """Ranks of the job that no file holds, ascending; none where the world size is not known."""
        present = {r["rank"] for r in self.rows("rank") if r["rank"] is not None}
        sizes = [r["world_size"] for r in self.rows("rank") if r["world_size"] is not None]
        world = self.diff.coverage.ranks_declared if self.diff is not None else max(sizes, default=None)
        return tuple(sorted(set(range(world or 0)) - present))

    @cached_property
    def on_host(self) -> bool:
        """Whether some rank's time is that of its host: how long it computes then depends on what else the machine does."""
        return any(r.get("basis") == "host" for r in self.rows("time_classes"))

    @property
    def stages(self) -> int:
        """How many stages the recorded ranks are of; 1 where that is not known."""
        return len(set(self._stages.values())) or 1

    @cached_property
    def _stages(self) -> Mapping[int, int]:
        return {r["rank"]: r["stage"] for r in self.rows("rank_stage")}

    def parallel(self, link: Row) -> int:
        """Groups that use a link of the query slow_links at the same time for the same calls."""
        key = ("role", "op", "payload_bytes", "hosts")
        return next((r["groups"] for r in self.rows("link_groups") if all(r[k] == link[k] for k in key)), 1)

    def lasting(self, by_step: Mapping[int, int], *, between_ranks: bool = False) -> int | None:
        """The lower median over the steps of known time of a figure, if it is worth a finding; None if it is noise.

        ``between_ranks``: the figure compares clocks, and must exceed what they leave open.
        """
        if not self.timed_steps or self.step_ns is None:
            return None
        values = sorted(by_step.get(step, 0) for step in self.timed_steps)
        middle = median_low(values)
        spread = values[(3 * (len(values) - 1) + 3) // 4] - values[(len(values) - 1) // 4]
        least = max(int(self.step_ns * LEAST_SHARE), self.residual_ns if between_ranks else 0, 1)
        return middle if middle >= least and middle > spread else None


Rule = Callable[[Facts, Sequence[Finding]], Iterator[Finding]]


def find(facts: Facts) -> list[Finding]:
    """The findings of a run, the most important first; effects follow what they are effects of."""
    found: list[Finding] = []
    for rule in TABLE:
        found += list(rule(facts, tuple(found)))
    if any(f.code == "rank_twice" for f in found):
        found = [f for f in found if f.kind == "data"]  # the rest would be of doubled rows
    return ranked(found)


def ranked(found: Sequence[Finding]) -> list[Finding]:
    """Findings in their order; an effect stands behind its owner and the owner's larger effects."""
    effects: dict[int, list[Finding]] = defaultdict(list)
    for finding in found:
        if finding.because_of is not None:
            effects[id(finding.because_of)].append(finding)
    out: list[Finding] = []

    def put(finding: Finding) -> None:
        out.append(finding)
        for effect in sorted(effects[id(finding)], key=_order):
            put(effect)

    for finding in sorted((f for f in found if f.because_of is None), key=_order):
        put(finding)
    return out


_TIERS: Mapping[Kind, int] = {"verdict": 1, "conflict": 2, "avoidable": 3, "time": 3, "data": 4}


def _order(finding: Finding) -> tuple[Any, ...]:
    tier = 0 if finding.forbids else _TIERS[finding.kind]
    if finding.kind == "avoidable" and finding.remedy is None:
        tier = 5  # nothing to be done about it
    if finding.kind == "avoidable" and finding.gain_ns_at_most is None and (finding.gain_bytes or 0) < SMALL_BYTES:
        tier = 5  # of unknown time, but certainly little
    if finding.kind == "time" and finding.confidence == "limit" and not {"ranks", "stage"} & set(finding.place):
        tier = 5  # where time goes, and nobody's fault
    return (
        tier,
        -(finding.gain_ns_at_most or 0),
        -(finding.gain_bytes or 0),
        finding.code,
        str(sorted(finding.place.items())),
    )


def _whole(row: Row) -> bool:
    return bool(row["complete"]) and row["dur_ns"] is not None


def _percent(part: int, whole: int) -> str:
    return text.share(part, whole)


def _shown(query: str, sentence: str, rows: Iterable[Row], **parameters: Any) -> tuple[Evidence, ...]:
    return (Evidence(query, sentence, tuple(dict(r) for r in rows)[:MOST_ROWS], parameters),)


def _source(source: str, sentence: str, rows: Iterable[Row] = ()) -> tuple[Evidence, ...]:
    return (Evidence(None, sentence, tuple(dict(r) for r in rows)[:MOST_ROWS], source=source),)


def _at_most(facts: Facts, gain: int) -> str:
    """The ceiling in words."""
    step = facts.step_ns
    return f"at most {text.duration(gain)} a step" + (f" ({_percent(gain, step)})" if step else "")


# -- the recording -----------------------------------------------------------------------------------------------------


def _rank_twice(facts: Facts, _: Sequence[Finding]) -> Iterator[Finding]:
    """Two files of one kind hold the same rank: everything of it would count twice."""
    files: dict[tuple[int, str], list[str]] = defaultdict(list)
    for row in facts.rows("rank"):
        if row["rank"] is not None:
            files[row["rank"], row["source"]].append(row["source_file"] or "an unnamed file")
    twice = {key: names for key, names in files.items() if len(names) > 1}
    if not twice:
        return
    ranks = sorted({rank for rank, _ in twice})
    names = sorted(next(iter(sorted(twice.items())))[1])
    verb = "was" if len(ranks) == 1 else "were"
    yield Finding(
        "rank_twice",
        "data",
        f"{text.ranks_text(ranks).capitalize()} {verb} recorded more than once ({' and '.join(names)}): traffic and time "
        "would count twice, so nothing is judged.",
        "proven",
        place={"ranks": ranks},
        evidence=_source("view rank", "recordings of one rank", [r for r in facts.rows("rank") if r["rank"] in ranks]),
        remedy="Open the files of one recording only.",
        forbids=True,
    )


def _refused(facts: Facts, found: Sequence[Finding]) -> Iterator[Finding]:
    """The comparison refused for another reason."""
    if facts.refused is not None and not any(f.code == "rank_twice" for f in found):
        yield Finding(
            "not_compared",
            "data",
            f"No expectation could be laid beside this run: {facts.refused}",
            "proven",
            forbids=True,
        )


def _lost_events(facts: Facts, _: Sequence[Finding]) -> Iterator[Finding]:
    """What the import says is missing or unreadable."""
    rows = [r for r in facts.rows("issue") if r["severity"] in ("error", "data_loss")]
    if not rows:
        return
    ranks = sorted({r["rank"] for r in rows if r["rank"] is not None})
    codes = ", ".join(sorted({str(r["code"]) for r in rows}))
    where = f" of {text.ranks_text(ranks)}" if ranks else ""
    # only where something looks missing does it matter for the verdict
    affected = facts.diff is not None and any(
        c.verdict in ("missing", "excess") and (not ranks or set(c.ranks) <= set(ranks)) for c in facts.diff.cells
    )
    yield Finding(
        "lost_events",
        "data",
        f"The recording{where} lost events ({codes}): calls that look missing there may only be unrecorded.",
        "proven",
        place={"ranks": ranks} if ranks else {},
        evidence=_source("view issue", "what the import says", rows),
        remedy="Record again with larger buffers or fewer steps, or import the whole file.",
        forbids=affected,
    )


def _ranks_missing(facts: Facts, _: Sequence[Finding]) -> Iterator[Finding]:
    """Ranks of the job that no file holds."""
    if facts.missing and facts.hosts:
        number = len(facts.missing)
        yield Finding(
            "ranks_missing",
            "data",
            f"{number:,} of {number + len(facts.hosts):,} ranks {'is' if number == 1 else 'are'} not in this run "
            f"({text.ranges(facts.missing)}): what they caused is seen at its effects only, and calls with them are not "
            "matched.",
            "proven",
            place={"ranks": list(facts.missing)},
            evidence=_source("view rank", "ranks that were recorded", facts.rows("rank")),
            remedy="Add their files: traceanalyzer merge.",
        )


def _step_cut(facts: Facts, found: Sequence[Finding]) -> Iterator[Finding]:
    """Steps that the window does not hold whole: they are not judged."""
    rows = [r for r in facts.rows("step_time") if not r["complete"]]
    lost = next((f for f in found if f.code == "lost_events"), None)
    if rows:
        ranks, steps = sorted({r["rank"] for r in rows if r["rank"] is not None}), sorted({r["step"] for r in rows})
        yield Finding(
            "step_cut",
            "data",
            f"Step {text.ranges(steps)} is cut by the end of the recording"
            + (f" on {text.ranks_text(ranks)}" if ranks else "")
            + ": it is left out of every figure.",
            "proven",
            place={"ranks": ranks, "step": steps[0]},
            evidence=_shown("step_time", "steps without their end", rows),
            remedy="Let the window end with a step.",
            because_of=lost if lost is not None and set(ranks) <= set(lost.place.get("ranks", ranks)) else None,
            forbids=not facts.steps,
        )
    # marks are recorded when they end, so of a step that was cut nothing is left but its calls
    after = [r for r in facts.rows("after_steps") if r["calls"] > r["calls_of_step"] * AFTER_STEPS]
    if after and not rows:
        ranks = sorted({r["rank"] for r in after})
        most = max(after, key=lambda r: r["calls"])
        yield Finding(
            "step_cut",
            "data",
            f"Behind step {most['last_step']}, the last whole one, {text.ranks_text(ranks)} recorded up to "
            f"{text.counted(most['calls'], 'call')} more, of {most['calls_of_step']:,} a step: the recording ends in the "
            "middle of a step, which is left out of every figure.",
            "proven",
            place={"ranks": ranks, "step": most["last_step"] + 1},
            evidence=_source("views comm and step", "calls behind the last whole step", after),
            remedy="Let the window end with a step.",
            because_of=lost if lost is not None and set(ranks) <= set(lost.place.get("ranks", ranks)) else None,
        )


_CARRIED = frozenset({"tp_comm_overlap_on", "cuda_graph_on"})
"""Causes that say which kernels carry what no call does."""


def _not_covered(facts: Facts, found: Sequence[Finding]) -> Iterator[Finding]:
    """Communication that no call explains; too much of it forbids a verdict."""
    if facts.diff is None:
        return
    coverage = facts.diff.coverage
    owner = next((f for f in found if f.code in _CARRIED), None)
    forbids = facts.diff.verdict == "cannot be judged" and bool(coverage.calls or coverage.kernels)
    if coverage.unattributed:
        first = coverage.unattributed[0]
        kernels = sum(u.kernels for u in coverage.unattributed)
        time = sum(u.time_ns for u in coverage.unattributed)
        yield Finding(
            "unattributed_communication",
            "data",
            f"{text.counted(kernels, 'communication kernel')} of {text.duration(time)} are explained by no call "
            f"(most: {first.name[:120]}, {first.why}): their bytes are unknown.",
            "proven",
            evidence=_shown("unexplained_communication", "kernels by name", facts.rows("unexplained_communication")),
            because_of=owner,
            forbids=forbids,
        )
        return
    share = min((s for s in (coverage.attributed, coverage.judged) if s is not None), default=0.0)
    if forbids and share < facts.diff.min_coverage:
        yield Finding(
            "low_coverage",
            "data",
            f"Only {int(share * 1000) / 10:g} % of the communication can be judged, less than the "
            f"{facts.diff.min_coverage * 100:g} % that a verdict needs.",
            "proven",
            evidence=_source("diff", "coverage"),
            remedy="See the reasons of the rows that are unknown: traceanalyzer diff.",
            forbids=True,
        )


def _clocks(facts: Facts, _: Sequence[Finding]) -> Iterator[Finding]:
    """Clocks that jump, drift or stand apart; offsets and drift are taken out of every figure that compares ranks."""
    rows = [r for r in facts.rows("clocks") if r["calls"]]

    def of(code: str, which: Sequence[Row], words: str) -> Finding:
        ranks = sorted({r["rank"] for r in which})
        place: dict[str, Any] = {"ranks": ranks}
        hosts = sorted({r["host"] for r in which if r["host"] is not None})
        if len(hosts) == 1:
            place["host"] = hosts[0]
        return Finding(code, "data", words, "proven", place=place, evidence=_shown("clocks", "clocks", which))

    set_anew = {r["rank"] for r in rows if r["since_ns"] is not None}
    jumps = [r for r in rows if r["rank"] in set_anew or abs(r["drift_ppb"] or 0) > JUMP_PPB]
    if jumps:
        ranks = sorted({r["rank"] for r in jumps})
        by = max(_jump(jumps, rank) for rank in ranks)
        words = f" by up to {text.duration(by)}" if by else ""
        yield of(
            "clock_step",
            jumps,
            f"The clock of {text.ranks_text(ranks)} jumped during the recording{words}: it was set. What compares these "
            "ranks with others is right only as far as their calls tell where.",
        )
    if not jumps:
        odd = [r for r in rows if (r["residual_max_ns"] or 0) > max(JUMP_NS, JUMP * (r["residual_p95_ns"] or 0))]
        # which of two clocks was set few calls do not tell: those by which a step took longer or shorter than the others,
        # else those that stand apart from the reference
        moved = _set_in_a_step(facts, max((r["residual_max_ns"] for r in odd), default=0))
        jumps = [r for r in odd if r["rank"] in moved] or [r for r in odd if abs(r["offset_ns"]) > JUMP_NS] or odd
        if jumps:
            ranks = sorted({r["rank"] for r in jumps})
            most = max(r["residual_max_ns"] for r in jumps)
            yield of(
                "clock_step",
                jumps,
                f"Some calls end up to {text.duration(most)} apart on {text.ranks_text(ranks)} and the others, most do not: "
                "a clock was set during the recording, in a part with too few calls between these ranks to correct it.",
            )
    drifts = [r for r in rows if r not in jumps and abs(r["drift_ppb"] or 0) > DRIFT_PPB]
    if drifts:
        ranks = sorted(r["rank"] for r in drifts)
        most_ppb = max((r["drift_ppb"] for r in drifts), key=abs)
        yield of(
            "clock_drift",
            drifts,
            f"The clock of {text.ranks_text(ranks)} runs {abs(most_ppb) / 1000:,.0f} ppm "
            f"{'fast' if most_ppb > 0 else 'slow'} against rank {drifts[0]['reference_rank']}; it is corrected.",
        )
    apart = [r for r in rows if r not in jumps and abs(r["offset_ns"]) > OFFSET_NS]
    if apart:
        ranks = sorted(r["rank"] for r in apart)
        most = max((r["offset_ns"] for r in apart), key=abs)
        yield of(
            "clock_offset",
            apart,
            f"The clock of {text.ranks_text(ranks)} is up to {text.duration(abs(most))} "
            f"{'ahead of' if most > 0 else 'behind'} that of rank {apart[0]['reference_rank']}; it is corrected.",
        )


def _set_in_a_step(facts: Facts, least_ns: int) -> set[int]:
    """Ranks one of whose steps differs from its typical one by ``least_ns`` more than on other ranks: all step together."""
    of_rank: dict[int, list[int]] = defaultdict(list)
    for row in facts.rows("step_time"):
        if row["rank"] is not None and _whole(row):
            of_rank[row["rank"]].append(row["dur_ns"])
    most = {r: max(abs(ns - median_low(steps)) for ns in steps) for r, steps in of_rank.items()}
    return {r for r, ns in most.items() if ns - min(most.values()) > least_ns} if least_ns else set()


def _jump(rows: Sequence[Row], rank: int) -> int:
    """The largest change of a clock's offset; 0 where the fit shows it as a drift."""
    offsets = [r["offset_ns"] for r in rows if r["rank"] == rank]
    return max((abs(b - a) for a, b in pairwise(offsets)), default=0)


# -- traffic -----------------------------------------------------------------------------------------------------------

_ORDER_WORDS = "names another operation"


def _order_mismatch(facts: Facts, _: Sequence[Finding]) -> Iterator[Finding]:
    """Ranks of one group that make different calls under one number."""
    rows = [r for r in facts.rows("unmatched_calls") if _ORDER_WORDS in r["reason"]]
    if rows:
        ranks, roles = sorted({r["rank"] for r in rows}), sorted({r["role"] or "unknown" for r in rows})
        calls = sum(r["calls"] for r in rows)
        yield Finding(
            "order_mismatch",
            "verdict",
            f"{text.ranks_text(ranks).capitalize()} made {text.counted(calls, 'call')} of {', '.join(roles)} in another "
            "order than their peers: the same number stands for different operations, which hangs or mixes up data.",
            "proven",
            place={"ranks": ranks, "role": roles[0]},
            evidence=_shown("unmatched_calls", "calls whose number names another operation elsewhere", rows),
            forbids=not facts.steps,
        )


def _wrong_traffic(facts: Facts, found: Sequence[Finding]) -> Iterator[Finding]:
    """Cells that differ: one finding for all that a cause joins, else for each role, phase and verdict."""
    if facts.diff is None:
        return
    groups: dict[tuple[Any, ...], list[Cell]] = defaultdict(list)
    for cell in facts.diff.cells:
        # what the training loop does by itself is no difference, but worth a word
        if cell.verdict in DIFFERS or (cell.verdict == "unknown" and cell.cause is not None and not cell.expected):
            key = (cell.cause.code,) if cell.cause is not None else ("", cell.role, cell.phase, cell.verdict)
            groups[key].append(cell)
    lost = next((f for f in found if f.code == "lost_events" and f.forbids), None)
    everyone = set(facts.diff.coverage.ranks_present)
    for key, cells in groups.items():
        first = cells[0]
        ranks = sorted({r for c in cells for r in c.ranks})
        stages = sorted({c.stage for c in cells if c.stage is not None})
        here = f" on {text.ranks_text(ranks)}" if set(ranks) != everyone else ""
        extra = sum((_surplus(c) for c in cells if ranks[0] in c.ranks), Fraction(0))
        place = _of_place(facts, first, ranks, stages, everyone)
        sure: Confidence
        if key[0]:
            assert first.cause is not None
            code, sentence, sure = (
                first.cause.code,
                f"{first.cause.sentence}{here and f' This is so{here}.'}",
                first.cause.confidence,
            )
        else:
            code, sure = first.verdict, "proven"
            listed = ", ".join(dict.fromkeys(p for c in cells for p in c.components)) or str(first.op)
            expected = sum(c.calls_expected or 0 for c in cells if ranks[0] in c.ranks)
            measured = sum(c.calls_measured for c in cells if ranks[0] in c.ranks)
            sentence = (
                f"{text.counted(expected, 'call')} expected and {measured:,} made of {first.role or 'unknown role'}, "
                f"{first.phase or 'unknown phase'} ({listed[:200]}){here}: {first.verdict}, and nothing explains it."
            )
        alone = _one_rank_alone(facts, cells)
        if alone is not None:
            code, sentence, sure = alone
        yield Finding(
            code,
            "verdict",
            sentence,
            sure,
            gain_ns_at_most=_exposed_surplus(cells),
            gain_bytes=int(extra) or None,
            place=place,
            evidence=_source("diff", "rows of the ledger that differ", [_cell_row(c) for c in cells]),
            because_of=lost if lost is not None and set(ranks) <= set(lost.place.get("ranks", ranks)) else None,
            forbids=code in _CARRIED and facts.diff.verdict == "cannot be judged",
        )


def _one_rank_alone(facts: Facts, cells: Sequence[Cell]) -> tuple[str, str, Confidence] | None:
    """Some ranks of a stage make other numbers of layer calls than the rest: their number of layers differs."""
    if facts.diff is None:
        return None
    ranks = {r for c in cells for r in c.ranks}
    stages = {facts.stage(r) for r in ranks}
    whole = {r for r in facts.diff.coverage.ranks_present if facts.stage(r) in stages}
    if not ranks < whole or len(ranks) * 2 > len(whole):
        return None
    parts = {p.partition(".")[0] for c in cells for p in c.components}
    if not {"attention", "mlp"} <= parts:
        return None
    ratios = {
        Fraction(c.calls_measured, c.calls_expected)
        for c in cells
        if c.calls_expected and c.calls_measured and any("attention" in p or "mlp" in p for p in c.components)
    }
    layers = next(iter(ratios), None)
    if len(ratios) != 1 or layers in (None, 1):
        return None
    assert layers is not None
    return (
        "layers_differ",
        (
            f"{text.ranks_text(sorted(ranks)).capitalize()} made {layers.numerator}/{layers.denominator} of the calls per "
            "layer that the other ranks of the stage made: another number of layers was built there."
        ),
        "likely",
    )


def _of_place(
    facts: Facts, cell: Cell, ranks: list[int], stages: list[int], everyone: Collection[int]
) -> dict[str, Any]:
    place: dict[str, Any] = {}
    if cell.role is not None:
        place |= {"role": cell.role, "axis": cell.axis}
    if set(ranks) != set(everyone):
        place["ranks"] = ranks
    if len(stages) == 1 and facts.diff is not None and len({c.stage for c in facts.diff.cells}) > 1:
        place["stage"] = stages[0]
    if len(cell.components) == 1:
        place["component"] = cell.components[0]
    return place


def _place_of_all(facts: Facts, cells: Sequence[Cell], ranks: list[int]) -> dict[str, Any]:
    """The place of several cells: what all of them have in common."""
    assert facts.diff is not None
    stages = sorted({c.stage for c in cells if c.stage is not None})
    place = _of_place(facts, cells[0], ranks, stages, facts.diff.coverage.ranks_present)
    for key, values in (
        ("role", {c.role for c in cells}),
        ("axis", {c.axis for c in cells}),
        ("component", {c.components for c in cells}),
    ):
        if len(values) > 1:
            place.pop(key, None)
    return place


def _surplus(cell: Cell) -> Fraction:
    """Off-rank bytes beyond the expected ones; negative if some are missing, 0 where one is unknown."""
    if cell.off_rank_bytes_measured is None or cell.off_rank_bytes_expected is None:
        return cell.off_rank_bytes_measured or Fraction(0)
    return cell.off_rank_bytes_measured - cell.off_rank_bytes_expected


def _exposed_surplus(cells: Iterable[Cell]) -> int | None:
    """Exposed time of the calls beyond the expected ones, of the rank that has most; None where none is known."""
    of_rank: dict[int, int] = defaultdict(int)
    known = False
    for cell in cells:
        if cell.exposed_ns is None or not cell.calls_measured:
            continue
        known = True
        beyond = max(0, cell.calls_measured - (cell.calls_expected or 0))
        part = (
            cell.exposed_ns if cell.off_rank_bytes_expected is None else cell.exposed_ns * beyond // cell.calls_measured
        )
        if beyond == 0 and _surplus(cell) > 0 and cell.off_rank_bytes_measured:
            part = int(cell.exposed_ns * _surplus(cell) / cell.off_rank_bytes_measured)
        for rank in cell.ranks:
            of_rank[rank] += part
    return max(of_rank.values(), default=0) if known else None


def _cell_row(cell: Cell) -> dict[str, Any]:
    """A row of the ledger as evidence."""
    return {
        "role": cell.role,
        "phase": cell.phase,
        "op": cell.op,
        "dtype": cell.dtype,
        "components": ", ".join(cell.components),
        "stage": cell.stage,
        "calls_expected": cell.calls_expected,
        "calls_measured": cell.calls_measured,
        "off_rank_bytes_expected": None if cell.off_rank_bytes_expected is None else int(cell.off_rank_bytes_expected),
        "off_rank_bytes_measured": None if cell.off_rank_bytes_measured is None else int(cell.off_rank_bytes_measured),
        "time_ns": cell.time_ns,
        "exposed_ns": cell.exposed_ns,
        "verdict": cell.verdict,
    }


def _conflicts(facts: Facts, found: Sequence[Finding]) -> Iterator[Finding]:
    """Two sources that say different things of the job; where the traffic shows it too, an effect of one matter."""
    if facts.diff is None:
        return
    for one in facts.diff.job_conflicts:
        owner = next(
            (f for f in found if f.kind == "verdict" and (one.field in f.sentence or f.code.startswith(one.field))),
            None,
        )
        yield Finding(
            "job_conflict",
            "conflict",
            f"The job contradicts the run: {one.sentence}.",
            "proven",
            place={"component": one.field},
            evidence=_source(
                "job", "what each says", [{"field": one.field, "intended": one.intended, "captured": one.captured}]
            ),
            remedy=f"Correct {one.field} in the job file, or start the job as intended.",
            because_of=owner,
        )


def _avoidable(facts: Facts, _: Sequence[Finding]) -> Iterator[Finding]:
    """Expected traffic that a setting would remove, by cause; where its time is known, only what is worth a finding."""
    if facts.diff is None:
        return
    groups: dict[tuple[tuple[str, str], ...], list[Cell]] = defaultdict(list)
    for cell in facts.diff.cells:
        if cell.avoidable_bytes:
            groups[cell.avoidable].append(cell)
    total = _most_of_rank(facts.diff.cells, lambda c: int(c.off_rank_bytes_measured or 0))
    for ways, cells in groups.items():
        size = _most_of_rank(cells, lambda c: c.avoidable_bytes)
        timed = [c for c in cells if c.exposed_ns is not None and c.off_rank_bytes_measured]
        gain: int | None = None
        if timed and len(timed) == len(cells):
            gain = int(_most_of_rank(timed, _avoidable_ns) * _moving(facts, {c.role for c in cells}))
        if gain is not None and facts.step_ns is not None:
            if gain < facts.step_ns * LEAST_SHARE:
                continue
        elif size < total * LEAST_SHARE:
            continue
        code = ways[0][0] if ways else "avoidable"
        settings = "; ".join(dict.fromkeys(setting for _, setting in ways if setting))
        ranks = sorted({r for c in cells for r in c.ranks})
        ceiling = f", {_at_most(facts, gain)}" if gain is not None else ", of unknown time"
        roles = list(dict.fromkeys(c.role for c in sorted(cells, key=lambda c: -c.avoidable_bytes)))
        yield Finding(
            code,
            "avoidable",
            f"{text.size(size)} off-rank a rank and step of {', '.join(r or 'unknown role' for r in roles)} need not be sent "
            f"({code.replace('_', ' ')}; {', '.join(dict.fromkeys(p for c in cells for p in c.components))[:160]}){ceiling}.",
            "proven",
            gain_ns_at_most=gain,
            gain_bytes=size,
            place=_place_of_all(facts, cells, ranks),
            evidence=_source("diff", "rows of the ledger with avoidable bytes", [_cell_row(c) for c in cells]),
            remedy=settings or None,
        )


def _moving(facts: Facts, roles: Collection[str | None]) -> Fraction:
    """Part of the exposed time of these roles in which data moves: waiting does not shrink with the bytes."""
    rows = [r for r in facts.rows("exposed_split") if r["role"] in roles]
    whole = sum(r["exposed_ns"] for r in rows)
    return Fraction(sum(r["transfer_ns"] + r["unsplit_ns"] for r in rows), whole) if whole else Fraction(1)


def _avoidable_ns(cell: Cell) -> int:
    """Part of a cell's exposed time that its avoidable bytes have by their share; all of it at most."""
    part = Fraction(cell.avoidable_bytes) / Fraction(cell.off_rank_bytes_measured or 1)
    return int((cell.exposed_ns or 0) * min(part, Fraction(1)))


def _most_of_rank(cells: Iterable[Cell], value: Callable[[Cell], int]) -> int:
    """The most that one rank has of a sum over its cells in one step."""
    of_rank: dict[tuple[int, int], int] = defaultdict(int)
    for cell in cells:
        amount = value(cell)
        for rank in cell.ranks:
            for step in cell.steps:
                of_rank[rank, step] += amount
    return max(of_rank.values(), default=0)


# -- who is late -------------------------------------------------------------------------------------------------------


def _late_data(facts: Facts, _: Sequence[Finding]) -> Iterator[Finding]:
    """Ranks on whose device a step's first work starts much later than on the others of their stage."""
    heads: dict[tuple[int, int], dict[int, Row]] = defaultdict(dict)
    for row in facts.rows("step_head"):
        if row["rank"] is not None and row["step"] in facts.steps:
            heads[row["step"], facts.stage(row["rank"])][row["rank"]] = row
    beyond: dict[int, dict[int, int]] = defaultdict(dict)
    evidence: dict[int, list[Row]] = defaultdict(list)
    for (step, _stage), of_rank in heads.items():
        if len(of_rank) < 3:
            continue  # of two, nothing says which is the usual one
        usual = median_low([r["head_ns"] for r in of_rank.values()])
        for rank, row in of_rank.items():
            # steps need not begin together, and what is late for nobody's call costs nothing
            beyond[rank][step] = min(row["head_ns"] - usual, row["first_late_ns"] or 0)
            evidence[rank].append(row)
    late = {r: gain for r, steps in beyond.items() if (gain := facts.lasting(steps, between_ranks=True)) is not None}
    if late and len(late) * 2 <= len(beyond):
        ranks = sorted(late, key=lambda r: -late[r])
        gain = max(late.values())
        yield Finding(
            "late_data",
            "time",
            f"On {text.ranks_text(ranks)} the device gets its first work of a step up to {text.duration(gain)} later than on "
            "the other ranks of the stage, which wait: the data loader, or other host work before the first launch, is late.",
            "likely",
            gain_ns_at_most=gain,
            place={"ranks": sorted(ranks), **_host_of(facts, ranks)},
            evidence=_shown("step_head", "begin of the step's first device activity", evidence[ranks[0]]),
            remedy="More loader workers or prefetching on these ranks; look at the host's trace before the first kernel.",
        )


def _host_of(facts: Facts, ranks: Iterable[int]) -> dict[str, Any]:
    hosts = {facts.hosts.get(r) for r in ranks}
    return {"host": next(iter(hosts))} if len(hosts) == 1 and None not in hosts else {}


_LATE = ("slow_gpu", "slow_kernel", "slow_host", "late_device", "slow_copies", "more_work", "late_rank", "late_data")
"""Codes of findings about ranks that others wait for."""


class _Why(NamedTuple):
    """What a rank does longer than its like: code, words, remedy, and by how much a step (0: nothing was found)."""

    code: str
    words: str
    remedy: str | None
    over_ns: int


_CAUSES: Mapping[str, tuple[str, str, str]] = {
    "device": (
        "slow_gpu",
        "its kernels of several classes run longer",
        "Check clocks, temperature and power limit of this GPU.",
    ),
    "kernel": ("slow_kernel", "its kernels of one class run longer", "Look at shapes and libraries of these kernels."),
    "work": (
        "more_work",
        "its device runs more kernels",
        "Find out what this rank does besides: evaluation, logging, more layers.",
    ),
    "host": (
        "slow_host",
        "its host launches work late",
        "Look at the host: other processes, garbage collection, CPU clocks, NUMA binding.",
    ),
}
"""Cause of the query slow_ranks -> code, words, remedy."""

_CLASSES: Mapping[str, tuple[str, str, str]] = {
    "compute_ns": ("slow_gpu", "its kernels compute longer", "Check clocks, temperature and power limit of this GPU."),
    "launch_starved_ns": _CAUSES["host"],
    "idle_ns": (
        "late_device",
        "its device stands idle although work is launched",
        "Look at launches that take long, and at other work on this GPU.",
    ),
    "copy_ns": ("slow_copies", "its copies take longer", "Look at host memory and PCIe of this GPU."),
}
"""Column of the query time_classes -> code, words, remedy: for ranks that have too few like them for slow_ranks."""

_ON_HOST: Mapping[str, tuple[str, str, str]] = {
    "compute_ns": ("slow_host", "its operators run longer", _CAUSES["host"][2]),
    "idle_ns": (
        "slow_host",
        "it neither computes nor communicates for longer",
        "Look at Python code around the operators, the data loader, and other work on this machine.",
    ),
}
"""The same of a run without devices, whose time is that of the host's operators."""


def _experts(facts: Facts, _: Sequence[Finding]) -> Iterator[Finding]:
    """Expert ranks that receive far more rows than the mean: in every layer a hot rank, in some a hot expert."""
    ratios: dict[int, list[Fraction]] = defaultdict(list)
    layers: dict[Any, dict[int, Fraction]] = defaultdict(dict)
    for row in facts.rows("expert_rows"):
        if row["mean_rows"]:
            ratio = Fraction(row["rows"] * row["ranks"], row["total_rows"])
            ratios[row["rank"]].append(ratio)
            layers[row["layer"]][row["rank"]] = ratio
    if not ratios:
        return
    cost: int | None = None
    if facts.rows("expert_gain"):
        cost = facts.lasting({r["step"]: r["at_most_ns"] for r in facts.rows("expert_gain")})
        if cost is None:
            return  # known to cost next to nothing
    ceiling = "" if cost is None else f", {_at_most(facts, cost)}"
    typical = {rank: median_low(values) for rank, values in ratios.items()}
    hottest = max(typical, key=lambda r: (typical[r], -r))
    if typical[hottest] >= IMBALANCED:
        # groups have their own: of each the ranks that are about as hot as the hottest
        ranks = sorted(r for r, ratio in typical.items() if ratio - 1 >= (typical[hottest] - 1) / 2)
        shown = [r for r in facts.rows("expert_rows") if r["rank"] in ranks]
        yield Finding(
            "hot_rank",
            "time",
            f"{_hot(ranks, typical[hottest])} times the mean rows of {_its(ranks)} expert-parallel group, in most layers, "
            f"and the others wait for {_its(ranks)} experts{ceiling}.",
            "proven",
            gain_ns_at_most=cost,
            place={"axis": "EP", "role": "ep", "ranks": ranks},
            evidence=_shown("expert_imbalance", "rows it receives by layer", shown),
            remedy="Check the auxiliary loss and the placement of experts.",
        )
        return
    hot = {layer: max(of.items(), key=lambda x: (x[1], -x[0])) for layer, of in layers.items()}
    worst = [(ratio, layer, rank) for layer, (rank, ratio) in hot.items() if ratio >= IMBALANCED]
    if worst:
        ratio, layer = max(((ratio, layer) for ratio, layer, _rank in worst), key=lambda x: (x[0], -(x[1] or 0)))
        where = "" if layer is None else f" in layer {layer}"
        ranks = sorted(r for r, part in layers[layer].items() if part - 1 >= (ratio - 1) / 2)
        others = len(worst) - 1
        also = f"; {text.counted(others, 'other layer')} {'is' if others == 1 else 'are'} uneven too" if others else ""
        yield Finding(
            "hot_expert",
            "time",
            f"Experts of {text.ranks_text(ranks)}{where} receive {'up to ' if len(ranks) > 1 else ''}{float(ratio):.2f} "
            f"times the mean rows of their group, and the others wait for them{ceiling}{also}.",
            "proven",
            gain_ns_at_most=cost,
            place={"axis": "EP", "role": "ep", "ranks": ranks, **({} if layer is None else {"layer": layer})},
            evidence=_shown(
                "expert_imbalance", "rows of this layer", [r for r in facts.rows("expert_rows") if r["layer"] == layer]
            ),
            remedy="Check the auxiliary loss and the router of this layer.",
        )


def _hot(ranks: Sequence[int], ratio: Fraction) -> str:
    """Ranks and what they receive: Rank 2 receives 2.00, or Ranks 2, 6 receive up to 2.00."""
    verb = "receives" if len(ranks) == 1 else "receive up to"
    return f"{text.ranks_text(ranks).capitalize()} {verb} {float(ratio):.2f}"


def _its(ranks: Sequence[int]) -> str:
    return "its" if len(ranks) == 1 else "their"


def _slow_ranks(facts: Facts, found: Sequence[Finding]) -> Iterator[Finding]:
    """Ranks that compute longer than their like, or that others wait for because they are late by themselves."""
    caused, evidence = _waited_for(facts)
    late = {r: gain for r, steps in caused.items() if (gain := facts.lasting(steps, between_ranks=True)) is not None}
    # ranks of one host that launch late together are late for none of each other, so that calls need not lead back to them
    for starved in facts.starved.values():
        together: dict[int, int] = defaultdict(int)
        for row in facts.rows("stragglers"):
            members = set(row["member_ranks"])
            if not members & starved or members <= starved or row["owner_rank"] not in (*starved, None):
                continue
            if row["step"] is not None and (row.get("share_of_step") or 0) >= _SHARE_OF_STEP:
                each = row["caused_waiting_ns"] // max(1, len(members) - 1)
                together[row["step"]] = max(together[row["step"]], each)
                evidence[min(starved)] += [] if row in evidence[min(starved)] else [row]
        if (waited := facts.lasting(together, between_ranks=True)) is not None:
            late |= {r: max(waited, late.get(r, 0)) for r in starved}
    reasons = {rank: _why(facts, rank, late.get(rank)) for rank in sorted({*late, *_slow_by_themselves(facts)})}
    loader = next((f for f in found if f.code == "late_data"), None)
    hot = next((f for f in found if f.code in ("hot_rank", "hot_expert")), None)
    made = [f for f in found if f.code in ("slow_link", "slow_direction", "hot_rank", "hot_expert")]
    # what is explained comes first, so that lateness which only passes through a rank can be laid at its door
    for ranks in sorted(_of_hosts(facts, reasons), key=lambda ranks: reasons[ranks[0]].code == "late_rank"):
        why = max((reasons[r] for r in ranks), key=lambda w: w.over_ns)
        gain = why.over_ns or max(late[r] for r in ranks)
        if why.code == "slow_host" and not facts.on_host:  # what it launches late may wait in the device besides
            gain = max(gain, *(late.get(r, 0) for r in ranks))
        because = None
        if (
            loader is not None
            and set(ranks) <= set(loader.place["ranks"])
            and 2 * (loader.gain_ns_at_most or 0) >= gain
        ):
            because = loader
        elif (
            hot is not None
            and why.code in ("slow_gpu", "slow_kernel", "late_rank")
            and set(ranks) <= set(hot.place["ranks"])
            # of two ranks the excess over the other is twice that over the mean, of more it is less
            and 2 * (hot.gain_ns_at_most or gain) >= gain
        ):
            because = hot
        elif why.code == "late_rank":
            because = max(made, key=lambda f: f.gain_ns_at_most or 0, default=loader)
            if because is None and gain < (facts.step_ns or 0) * LEAST_UNEXPLAINED:
                continue
        waits = sorted((r for rank in ranks for r in evidence[rank]), key=lambda r: -r["caused_waiting_ns"])
        whom = sorted({r["role"] for r in waits})
        place: dict[str, Any] = {"ranks": list(ranks), **_host_of(facts, ranks)}
        if len({facts.stage(r) for r in ranks}) == 1 and facts.stages > 1:
            place["stage"] = facts.stage(ranks[0])
        others = f", and the other ranks of {', '.join(whom)} wait" if whom else ""
        shown = [r for r in facts.rows("slow_ranks") if r["rank"] in ranks and r["slow"]]
        one = Finding(
            why.code,
            "time",
            f"{text.ranks_text(ranks).capitalize()} {'is' if len(ranks) == 1 else 'are'} late{others}: {why.words}, "
            f"{_at_most(facts, gain)}.",
            "limit" if not why.over_ns else "proven" if whom else "likely",
            gain_ns_at_most=gain,
            place=place,
            evidence=(
                *(_shown("slow_ranks", "these ranks against their like", shown) if shown else ()),
                *(_shown("stragglers", "groups that waited for them", waits) if waits else ()),
            ),
            remedy=why.remedy,
            because_of=because,
        )
        if because is None and why.code != "late_rank":
            made.append(one)
        yield one


def _waited_for(facts: Facts) -> tuple[dict[int, dict[int, int]], dict[int, list[Row]]]:
    """Rank -> step -> how long one other rank waited for it at least on average; and the rows that say so."""
    caused: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    evidence: dict[int, list[Row]] = defaultdict(list)
    for row in _stragglers(facts):
        owner, step = row["owner_rank"], row["step"]
        if owner is not None and step is not None:
            # groups wait for the same lateness one after the other: the most of one group, not the sum
            each = row["caused_waiting_ns"] // max(1, len(row["member_ranks"]) - 1)
            caused[owner][step] = max(caused[owner][step], each)
            evidence[owner].append(row)
    return caused, evidence


_LEAST_CALLS = 3
"""Calls that waited for a rank, of all steps: fewer may be chance. The query stragglers asks for as many in each step."""

_SHARE_OF_STEP = 0.01
"""As the query stragglers asks."""


def _stragglers(facts: Facts) -> list[Row]:
    """Rows of the query stragglers that stand out, also those whose few calls of a step wait for it in every step."""
    found: list[Row] = []
    rare: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in facts.rows("stragglers"):
        many = row["share_of_waiting"] * len(row["member_ranks"]) > 1.5
        if row["slow"]:
            found.append(row)
        elif many and (row.get("share_of_step") or 0) >= _SHARE_OF_STEP:
            rare[row["role"], tuple(row["member_ranks"]), row["owner_rank"]].append(row)
    for rows in rare.values():
        if {r["step"] for r in rows} >= set(facts.timed_steps) and sum(r["calls"] for r in rows) >= _LEAST_CALLS:
            found += rows
    return found


def _slow_by_themselves(facts: Facts) -> list[int]:
    """Ranks whose computation takes longer than that of their like, whether or not anybody was seen to wait."""
    over: dict[int, dict[int, int]] = defaultdict(dict)
    for row in facts.rows("slow_ranks"):
        if row["slow"] and row["cause"] != "host":
            over[row["rank"]][row["step"]] = row["compute_ns"] - row["usual_compute_ns"]
    return [rank for rank, steps in over.items() if facts.lasting(steps) is not None]


def _why(facts: Facts, rank: int, late_ns: int | None) -> _Why:
    """What a rank does longer than its like, if it explains enough of its lateness; else late_rank."""
    over: dict[str, dict[int, int]] = defaultdict(dict)
    for row in facts.rows("slow_ranks"):
        if row["rank"] == rank and row["cause"] is not None:
            column = "launch_starved_ns" if row["cause"] == "host" else "compute_ns"
            over[row["cause"]][row["step"]] = row[column] - row[f"usual_{column}"]
    known = {_CAUSES[cause]: gain for cause, steps in over.items() if (gain := facts.lasting(steps)) is not None}
    if not known:
        # what slow_ranks could judge and did not find is not there
        judged = any(r["rank"] == rank and r["like_ranks"] >= LIKE for r in facts.rows("slow_ranks"))
        classes = _ON_HOST if facts.on_host else _CLASSES
        columns = [c for c in classes if not judged or c in ("idle_ns", "copy_ns")]
        known = {classes[c]: _excess(facts, rank, c) or 0 for c in columns}
    (code, words, remedy), most = max(known.items(), key=lambda item: item[1])
    if most < max(int(EXPLAINS * (late_ns or 0)), 1):
        outside = bool(facts.missing)
        words = "nothing that was recorded of it explains it"
        return _Why(
            "late_rank", words + (", and the cause may lie in ranks that were not recorded" if outside else ""), None, 0
        )
    return _Why(code, f"{words} ({text.duration(most)} a step more than its like)", remedy, most)


def _excess(facts: Facts, rank: int, column: str) -> int | None:
    """Lower median over steps of what a rank spends in a class beyond the lower median of its stage; None: not known."""
    mine: dict[int, int] = {}
    peers: dict[int, list[int]] = defaultdict(list)
    for row in facts.rows("time_classes"):
        if row["rank"] is None or row[column] is None or facts.stage(row["rank"]) != facts.stage(rank):
            continue
        peers[row["step"]].append(row[column])
        if row["rank"] == rank:
            mine[row["step"]] = row[column]
    found = [ns - median_low(peers[step]) for step, ns in mine.items() if len(peers[step]) > 1]
    return median_low(found) if found else None


def _of_hosts(facts: Facts, reasons: Mapping[int, _Why]) -> Iterator[list[int]]:
    """Late ranks; those of a host together where all its recorded ranks are late for one reason."""
    left = {rank: why.code for rank, why in reasons.items()}
    ranks_of: dict[str, set[int]] = defaultdict(set)
    for rank, host in facts.hosts.items():
        if host is not None:
            ranks_of[host].add(rank)
    for ranks in ranks_of.values():
        codes = {left.get(r) for r in ranks}
        if len(ranks_of) > 1 and len(ranks) > 1 and len(codes) == 1 and not codes & {None, "late_rank"}:
            yield sorted(ranks)
            for rank in ranks:
                del left[rank]
    yield from ([rank] for rank in sorted(left))


def _late_from_outside(facts: Facts, found: Sequence[Finding]) -> Iterator[Finding]:
    """Lateness that leads back to ranks that were not recorded, or to no rank at all."""
    caused: dict[tuple[str, tuple[int, ...]], dict[int, int]] = defaultdict(dict)
    evidence: dict[tuple[str, tuple[int, ...]], list[Row]] = defaultdict(list)
    for row in _stragglers(facts) if facts.missing else [r for r in facts.rows("stragglers") if r["slow"]]:
        if row["owner_rank"] is None and row["step"] is not None:
            key = row["role"], tuple(row["member_ranks"])
            caused[key][row["step"]] = row["caused_waiting_ns"] // max(1, len(key[1]) - 1)
            evidence[key].append(row)
    worth = {
        key: gain for key, steps in caused.items() if (gain := facts.lasting(steps, between_ranks=True)) is not None
    }
    if worth:
        key = max(worth, key=lambda k: worth[k])
        yield Finding(
            "late_from_outside",
            "time",
            f"{text.counted(len(worth), 'group')} of {', '.join(sorted({role for role, _ in worth}))} waited for lateness "
            f"whose cause lies outside of the recorded ranks, {_at_most(facts, worth[key])}.",
            "limit",
            gain_ns_at_most=worth[key],
            place={"role": key[0], "axis": str(axes.rollup(key[0])), "ranks": list(key[1])},
            evidence=_shown("stragglers", "groups whose chain of lateness leaves the recording", evidence[key]),
            remedy="Record the other ranks too.",
            because_of=_owner(found, ("slow_link", "slow_direction"), worth[key]),
        )


def _slow_links(facts: Facts, found: Sequence[Finding]) -> Iterator[Finding]:
    """Links between nodes, and groups, whose transfers take longer than those of their equals.

    Nothing is said of links between a clock that was set during the recording and one that was not.
    """
    jumped = {r for f in found if f.code == "clock_step" for r in f.place["ranks"]}
    jumped_hosts = {facts.hosts.get(r) for r in jumped}
    by_hosts: dict[tuple[bool, tuple[str, ...]], list[Row]] = defaultdict(list)
    for row in facts.rows("slow_links"):
        if row["slow"]:
            by_hosts[row["op"] == "send", tuple(row["hosts"])].append(row)
    made: list[Finding] = []
    for (directed, hosts), rows in by_hosts.items():
        if jumped_hosts & set(hosts) and set(hosts) - jumped_hosts:
            continue
        one_way = directed and len(hosts) == 2 and hosts[0] != hosts[1] and (True, hosts[::-1]) not in by_hosts
        same = [h for d, h in by_hosts if not d and set(h) == set(hosts)]
        if one_way and any(set(h) > set(hosts) for d, h in by_hosts if not d):
            continue  # the collectives say it of more nodes
        if not directed and len(hosts) == 2 and _one_way(by_hosts, hosts):
            continue  # said with its slow direction, which slows the collectives too
        if one_way:
            rows = [*rows, *(r for h in same for r in by_hosts[False, h])]
        if not one_way and directed and (True, hosts[::-1]) in by_hosts and hosts > hosts[::-1]:
            continue  # said with the other direction
        gain = sum(_beyond(facts, r) // max(1, facts.parallel(r)) for r in rows)
        if not _worth(facts, gain):
            continue
        worst = max((r for r in rows if not one_way or r["op"] == "send"), key=lambda r: _beyond(facts, r))
        where = (
            f"inside {hosts[0]}"
            if len(set(hosts)) == 1
            else (f"from {hosts[0]} to {hosts[1]}, and not back," if one_way else f"between {', '.join(hosts)}")
        )
        made.append(
            Finding(
                "slow_direction" if one_way else "slow_link",
                "time",
                f"Data moves {_times(worst):.2f} times as long {where} as between like nodes ({worst['op']} of "
                f"{worst['role'] or 'unknown role'}, {text.size(worst['payload_bytes'])}, waiting left out), "
                f"{_at_most(facts, gain)}.",
                "likely",
                gain_ns_at_most=gain,
                place={"role": worst["role"], "axis": _axis(worst["role"]), "host": ", ".join(dict.fromkeys(hosts))},
                evidence=_shown("slow_links", "transfer against that between like nodes", rows),
                remedy="Check link width, errors and routes between these nodes.",
            )
        )
    yield from made
    by_ranks: dict[tuple[int, ...], dict[int | None, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in facts.rows("slow_groups"):
        if row["slow"]:
            by_ranks[tuple(row["member_ranks"])][row["sender_rank"]].append(row)
    for ranks, by_sender in by_ranks.items():
        rows = [r for of in by_sender.values() for r in of]
        # calls that are launched as one have no time of their own to compare; what is exposed holds them too
        roles = {r["role"] for r in rows}
        gain = max(sum(_beyond(facts, r) for r in rows), sum(_exposed_beyond(facts, role, ranks) for role in roles))
        if not _worth(facts, gain) or (jumped & set(ranks) and set(ranks) - jumped):
            continue
        nodes = {str(facts.hosts.get(r)) for r in ranks}
        senders = [sender for sender in by_sender if sender is not None]
        # a slow direction slows the collectives of both too
        one_way = len(senders) == 1
        sender = senders[0] if one_way else None
        worst = max(by_sender[sender] if one_way else rows, key=lambda r: _beyond(facts, r))
        where = f"in the group of {text.ranks_text(ranks)}"
        if one_way:
            where = f"from rank {sender} to rank {next(r for r in ranks if r != sender)}, and not back,"
        yield Finding(
            "slow_direction" if one_way else "slow_link",
            "time",
            f"{worst['op']} of {worst['role'] or 'unknown role'} ({text.size(worst['payload_bytes'])}) takes "
            f"{_times(worst):.2f} times as long {where} as in the other {worst['groups'] - 1} groups, waiting left out: a "
            f"link or an adapter of theirs is slow, {_at_most(facts, gain)}.",
            "likely",
            gain_ns_at_most=gain,
            place={"role": worst["role"], "axis": _axis(worst["role"]), "ranks": list(ranks), **_host_of(facts, ranks)},
            evidence=_shown("slow_groups", "transfer against that of equal groups", rows),
            remedy="Check link width, errors and routes of these ranks' adapters.",
            because_of=next((f for f in made if set(str(f.place["host"]).split(", ")) == nodes), None),
        )


def _one_way(by_hosts: Collection[tuple[bool, tuple[str, ...]]], hosts: tuple[str, ...]) -> bool:
    """Whether messages between two nodes are slow in one of the directions alone."""
    return ((True, hosts) in by_hosts) != ((True, hosts[::-1]) in by_hosts)


def _exposed_beyond(facts: Facts, role: str | None, ranks: Collection[int]) -> int:
    """Exposed transfer of a role on these ranks beyond that of the others of their stage, lower median over the steps."""
    moved: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for row in facts.rows("exposed_split"):
        if row["role"] == role and row["rank"] is not None and row["step"] in facts.steps:
            moved[row["step"]][row["rank"]] += row["transfer_ns"] + row["unsplit_ns"]
    beyond = []
    for of_rank in moved.values():
        stages = {facts.stage(r) for r in ranks}
        others = [ns for r, ns in of_rank.items() if r not in ranks and facts.stage(r) in stages]
        mine = [ns for r, ns in of_rank.items() if r in ranks]
        if others and mine:
            beyond.append(max(0, max(mine) - median_low(others)))
    return median_low(beyond) if beyond else 0


def _beyond(facts: Facts, row: Row) -> int:
    """Transfer time of a link or group beyond the usual, ns a step."""
    over: int = row["median_transfer_ns"] - row["usual_transfer_ns"]
    calls: int = row["calls"]
    return over * calls // max(1, len(facts.timed_steps))


def _times(row: Row) -> float:
    return float(Fraction(row["median_transfer_ns"], max(row["usual_transfer_ns"], 1)))


def _worth(facts: Facts, gain: int) -> bool:
    return facts.step_ns is not None and gain >= facts.step_ns * LEAST_SHARE


def _axis(role: str | None) -> str | None:
    return None if role is None else str(axes.rollup(role))


# -- where the step goes -----------------------------------------------------------------------------------------------


def _uneven_stages(facts: Facts, found: Sequence[Finding]) -> Iterator[Finding]:
    """A stage that computes more than the mean of all: the pipeline runs at its pace."""
    of_stage: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in facts.rows("time_classes"):
        if row["rank"] is not None and row["step"] in facts.steps:
            of_stage[row["step"], facts.stage(row["rank"])].append(row["compute_ns"])
    stages = sorted({stage for _, stage in of_stage})
    if len(stages) < 2 or facts.on_host:
        return
    usual = {key: median_low(values) for key, values in of_stage.items()}
    beyond: dict[int, dict[int, int]] = {stage: {} for stage in stages}
    for step in facts.steps:
        here = [usual[step, s] for s in stages if (step, s) in usual]
        mean = sum(here) // max(len(here), 1)
        for stage in stages:
            if (step, stage) in usual and usual[step, stage] >= mean * UNEVEN:
                beyond[stage][step] = usual[step, stage] - mean
    worst = max(stages, key=lambda s: facts.lasting(beyond[s]) or 0)
    gain = facts.lasting(beyond[worst])
    if gain is None:
        return
    ranks = {r["rank"] for r in facts.rows("rank_stage") if r["stage"] == worst}
    # the median of a stage stands for it, unless it has so few ranks that a slow one is the median
    late = [f for f in found if f.code in ("slow_gpu", "more_work") and f.place.get("stage") == worst]
    owner = late[0] if late and 2 * len(late[0].place["ranks"]) >= len(ranks) else None
    rows = [
        {
            "stage": s,
            "compute_ns": median_low([usual[k] for k in usual if k[1] == s]),
            "ranks": max(len(v) for k, v in of_stage.items() if k[1] == s),
        }
        for s in stages
    ]
    yield Finding(
        "uneven_stages",
        "time",
        f"Stage {worst} computes {text.duration(gain)} a step more than the mean of the {len(stages)} stages: the others "
        f"wait for it, {_at_most(facts, gain)}.",
        "likely",
        gain_ns_at_most=gain,
        place={"stage": worst, "axis": "PP"},
        evidence=_shown("time_classes", "compute of a typical rank of each stage", rows),
        remedy="Move layers between stages, or account for embedding and loss in the split.",
        because_of=owner,
    )


_PARTS = (("warm_up_ns", "in warm-up"), ("steady_ns", "in the steady state"), ("cool_down_ns", "in cool-down"))


def _bubble(facts: Facts, found: Sequence[Finding]) -> Iterator[Finding]:
    """More bubble than the schedule causes with equal stages."""
    expected = facts.expected_bubble
    if expected is None:
        return
    beyond: dict[int, int] = {}
    worst: dict[int, list[Row]] = {}
    windows: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for row in facts.rows("bubble"):
        if row["step"] in facts.steps and row["stages_recorded"] == row["stages"]:
            windows[row["step"], row["pipeline"]].append(row)
    for (step, _pipeline), rows in windows.items():
        window = rows[0]["window_ns"]
        mean = sum(r["bubble_ns"] for r in rows) // len(rows)
        excess = mean - int(expected * window)
        if window and Fraction(mean, window) > expected * ABOVE_FORMULA and excess > beyond.get(step, 0):
            beyond[step], worst[step] = excess, rows
    gain = facts.lasting(beyond)
    if gain is None:
        return
    step = min(worst, key=lambda s: abs(beyond[s] - gain))
    rows = worst[step]
    sums = {words: sum(r[name] for r in rows) for name, words in _PARTS}
    # the steady state of equal stages has no bubble, so what is there is beyond the formula
    part = (
        "in the steady state"
        if 2 * sums["in the steady state"] >= gain * len(rows)
        else max(("in warm-up", "in cool-down"), key=lambda p: sums[p])
    )
    measured = Fraction(sum(r["bubble_ns"] for r in rows), sum(r["window_ns"] for r in rows))
    yield Finding(
        "bubble",
        "time",
        f"The pipeline's bubble is {_percent(measured.numerator, measured.denominator)} of its window, and "
        f"{_percent(expected.numerator, expected.denominator)} by the "
        f"schedule with equal stages; most of what is beyond lies {part}, {_at_most(facts, gain)}.",
        "limit",
        gain_ns_at_most=gain,
        place={"axis": "PP", "role": "pp", "step": step},
        evidence=_shown("bubble", "stages of this pipeline", rows),
        remedy="More micro-batches or interleaved stages shrink the schedule's own part, even stages the rest.",
        because_of=_owner(found, (*_LATE, "slow_link", "slow_direction", "uneven_stages"), gain),
    )


def _owner(found: Sequence[Finding], codes: Collection[str], gain: int) -> Finding | None:
    """The finding that explains at least half of a time, the largest of them."""
    known = [f for f in found if f.code in codes and 2 * (f.gain_ns_at_most or 0) >= gain]
    return max(known, key=lambda f: f.gain_ns_at_most or 0, default=None)


_DP = frozenset({"dp", "dp_cp", "edp", "intra_dp_cp", "intra_edp", "inter_dist_opt"})
_WAYS: Mapping[str, str] = {
    "TP": "tp_comm_overlap hides it behind the layers' products; a smaller TP degree sends less.",
    "CP": "cp_comm_type p2p overlaps it with attention; a smaller CP degree sends less.",
    "EP": "overlap_moe_expert_parallel_comm, or a dispatcher with fewer bytes (flex with DeepEP).",
    "DP": "overlap_grad_reduce and overlap_param_gather hide it behind the passes.",
    axes.OTHER: "",
}


def _behind_links(facts: Facts, found: Sequence[Finding], axis: str) -> set[int]:
    """Ranks whose calls on an axis take longer because of a link that was found slow."""
    ranks: set[int] = set()
    for one in found:
        if one.code in ("slow_link", "slow_direction") and one.place.get("axis") == axis:
            hosts = set(str(one.place.get("host", "")).split(", "))
            ranks |= set(one.place.get("ranks") or (r for r, host in facts.hosts.items() if host in hosts))
    return ranks


def _exposed(facts: Facts, found: Sequence[Finding]) -> Iterator[Finding]:
    """Transfers that no compute hides, by axis: what a step would save at most if all of it were hidden."""
    shares: dict[str, dict[tuple[int, int], list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0, 0, 0]))
    evidence: dict[str, list[Row]] = defaultdict(list)
    busy = {(r["rank"], r["step"], r["role"]): r for r in facts.rows("exposed_by_role")}
    for row in facts.rows("exposed_split"):
        if row["step"] not in facts.steps or row["rank"] is None or row["role"] in ("pp", "unknown"):
            continue
        axis = str(axes.rollup(row["role"]))
        if axis not in _WAYS:
            continue
        sums = shares[axis][row["step"], row["rank"]]
        whole = busy.get((row["rank"], row["step"], row["role"]))
        moved = (row["transfer_ns"] + row["unsplit_ns"], row["unsplit_ns"])
        overlapped_ns = 0 if whole is None else whole["overlapped_ns"]
        hidden = (overlapped_ns, overlapped_ns + moved[0])
        shares[axis][row["step"], row["rank"]] = [a + b for a, b in zip(sums, (*moved, *hidden), strict=True)]
        evidence[axis].append(row)
    for axis, of_rank in shares.items():
        by_step: dict[int, list[int]] = defaultdict(list)
        # with peers that were not recorded, waiting looks like transfer; ranks of whole groups speak for the others
        whole_ranks = {rank for (_, rank) in of_rank} - {rank for (_, rank), sums in of_rank.items() if sums[1]}
        behind = _behind_links(facts, found, axis)
        owner = None
        if behind >= (whole_ranks or {rank for _, rank in of_rank}):
            owner = next(f for f in found if f.code in ("slow_link", "slow_direction") and f.place.get("axis") == axis)
            behind = set()
        for (step, rank), (moved_ns, *_rest) in of_rank.items():
            if rank not in behind and (rank in whole_ranks or not whole_ranks):
                by_step[step].append(moved_ns)
        # a transfer is no longer than the call on any of its ranks: of those that wait, the typical one says more
        of_step = max if whole_ranks else median_low
        gain = facts.lasting({step: of_step(values) for step, values in by_step.items()})
        if gain is None:
            continue
        usual = median_low([median_low(values) for values in by_step.values()])
        unsplit = not whole_ranks
        overlapped, total = sum(s[2] for s in of_rank.values()), sum(s[3] for s in of_rank.values())
        flags = (
            []
            if facts.job is None or axis != "DP"
            else [name for name in ("overlap_grad_reduce", "overlap_param_gather") if getattr(facts.job, name)]
        )
        # on a host, compute and communication take turns on the same cores
        idle_flags = (
            bool(flags)
            and total > 0
            and not unsplit
            and not facts.on_host
            and Fraction(overlapped, total) < HIDDEN_BY_OVERLAP
        )
        waiting = ", waiting for peers included" if unsplit else ", waiting left out"
        what = axis if axis != axes.OTHER else ", ".join(sorted({r["role"] for r in evidence[axis]}))
        share = _percent(usual, facts.step_ns or 0)
        if 2 * usual < gain:  # only some ranks have it
            share = f"Up to {_percent(gain, facts.step_ns or 0)}"
        sentence = (
            f"{share} of a step is {what} communication that no compute hides "
            f"({text.duration(usual)} on a typical rank{waiting}), {_at_most(facts, gain)}."
        )
        if idle_flags:
            sentence = (
                f"{' and '.join(flags)} {'is' if len(flags) == 1 else 'are'} set, but only {_percent(overlapped, total)} of "
                f"the {axis} transfers run beside compute: {text.duration(usual)} a step are exposed on a typical "
                f"rank, {_at_most(facts, gain)}."
            )
        rows = sorted(evidence[axis], key=lambda r: -(r["transfer_ns"] + r["unsplit_ns"]))
        yield Finding(
            "overlap_without_effect" if idle_flags else f"exposed_{axis.lower()}",
            "time",
            sentence,
            "proven" if idle_flags else "limit",
            gain_ns_at_most=gain,
            place={"axis": axis, "role": rows[0]["role"]},
            evidence=_shown("exposed_split", "ranks with the most exposed transfer", rows),
            remedy="Look for what serialises them: CUDA_DEVICE_MAX_CONNECTIONS, bucket size, streams."
            if idle_flags
            else None
            if flags
            else _WAYS[axis] or None,
            because_of=owner,
        )


def _waiting(facts: Facts, found: Sequence[Finding]) -> Iterator[Finding]:
    """Exposed waiting for peers, by axis; owned by late ranks where such were found."""
    by_step: dict[str, dict[int, dict[int | None, int]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(int)))
    evidence: dict[str, list[Row]] = defaultdict(list)
    for row in facts.rows("exposed_split"):
        axis = _axis(row["role"]) if row["role"] not in ("unknown", "pp") else None
        if axis is not None and row["step"] in facts.steps:
            by_step[axis][row["step"]][row["rank"]] += row["waiting_ns"]  # of all roles of the axis
            evidence[axis].append(row)
    codes = (*_LATE, "slow_link", "slow_direction", "late_from_outside", "uneven_stages")
    for axis, steps in by_step.items():
        gain = facts.lasting({step: median_low(of.values()) for step, of in steps.items()}, between_ranks=True)
        if gain is None:
            continue
        owner = _owner(found, codes, gain // 2)
        whose = "no single rank owns it"
        if owner is not None:
            other = {"uneven_stages": "the stage that computes more", "slow_link": "the slow link"}
            whose = f"see {other.get(owner.code, 'the late ranks')}"
        what = axis if axis != axes.OTHER else ", ".join(sorted({r["role"] for r in evidence[axis]}))
        yield Finding(
            f"waiting_{axis.lower()}",
            "time",
            f"A typical rank waits {text.duration(gain)} a step ({_percent(gain, facts.step_ns or 0)}) in {what} "
            f"communication for peers that come later; {whose}.",
            "limit",
            gain_ns_at_most=gain,
            place={"axis": axis},
            evidence=_shown(
                "exposed_split", "ranks that wait most", sorted(evidence[axis], key=lambda r: -r["waiting_ns"])
            ),
            because_of=owner,
        )


def _launch_starved(facts: Facts, _: Sequence[Finding]) -> Iterator[Finding]:
    """Devices that have nothing to run because the host launches late, on all ranks alike."""
    by_step: dict[int, list[int]] = defaultdict(list)
    for row in facts.rows("time_classes"):
        if row["step"] in facts.steps and row["launch_starved_ns"] is not None:
            by_step[row["step"]].append(row["launch_starved_ns"])
    gain = facts.lasting({step: median_low(values) for step, values in by_step.items()})
    if gain is None:
        return
    pipeline = len({facts.stage(r["rank"]) for r in facts.rows("time_classes") if r["rank"] is not None}) > 1
    yield Finding(
        "launch_starved",
        "time",
        "On a typical rank the device has nothing to run because the host has launched nothing"
        f"{', waits for the pipeline included' if pipeline else ''}: {_at_most(facts, gain)}.",
        "limit",
        gain_ns_at_most=gain,
        evidence=_shown(
            "time_classes",
            "ranks with most of it",
            sorted(
                (r for r in facts.rows("time_classes") if r["launch_starved_ns"] is not None),
                key=lambda r: -r["launch_starved_ns"],
            ),
        ),
        remedy="CUDA graphs, fewer synchronisations, or larger micro-batches.",
    )


def _recompute_cost(facts: Facts, _: Sequence[Finding]) -> Iterator[Finding]:
    """What recomputation costs where the job asks for it."""
    if facts.job is None or facts.job.recompute_granularity is None:
        return
    by_step: dict[int, list[int]] = defaultdict(list)
    rows = [r for r in facts.rows("recompute") if r["step"] in facts.steps and r["dur_ns"] is not None]
    for row in rows:
        by_step[row["step"]].append(row["dur_ns"])
    gain = facts.lasting({step: max(values) for step, values in by_step.items()})
    if gain is not None:
        yield Finding(
            "recompute_cost",
            "time",
            f"Recomputation ({facts.job.recompute_granularity}) repeats up to {text.duration(gain)} of kernels a step, "
            f"{_at_most(facts, gain)}.",
            "limit",
            gain_ns_at_most=gain,
            evidence=_shown("kernel_classes", "kernels of recomputation", sorted(rows, key=lambda r: -r["dur_ns"])),
            remedy="If memory allows, recompute fewer modules.",
        )


def _memory(facts: Facts, _: Sequence[Finding]) -> Iterator[Finding]:
    """Memory that was measured to be more than the job needs."""
    rows = [
        r
        for r in facts.rows("memory")
        if r["expected_bytes"]
        and r["measured_bytes"]
        and Fraction(r["measured_bytes"], r["expected_bytes"]) > MEMORY
        and r["what"] in ("parameters", "gradients", "optimizer")
    ]
    for what in dict.fromkeys(r["what"] for r in rows):
        mine = [r for r in rows if r["what"] == what]
        worst = max(mine, key=lambda r: r["measured_bytes"] - r["expected_bytes"])
        ranks = sorted({r["rank"] for r in mine})
        yield Finding(
            "memory",
            "conflict",
            f"{what.capitalize()} take {text.size(worst['measured_bytes'])} on rank {worst['rank']}, and "
            f"{text.size(worst['expected_bytes'])} by the job ({text.counted(len(ranks), 'rank')} beyond the estimate).",
            "likely",
            place={"ranks": ranks, "component": what},
            evidence=_source("view metric", "measured and expected memory", mine),
        )


def _history(facts: Facts, _: Sequence[Finding]) -> Iterator[Finding]:
    """Profiled steps against those around them in Megatron's log."""
    rows = facts.rows("history")
    profiled = [r["step_ns"] for r in rows if r["profiled"]]
    others = [r["step_ns"] for r in rows if not r["profiled"]]
    if not profiled or len(others) < 3:
        return
    cost = median_low(profiled) - median_low(others)
    quartiles = sorted(others)
    noise = quartiles[3 * (len(others) - 1) // 4] - quartiles[(len(others) - 1) // 4]
    if cost > noise and cost * 20 > median_low(others):
        yield Finding(
            "profiler_cost",
            "data",
            f"Profiled steps take {text.duration(cost)} longer than the others of the log "
            f"({_percent(cost, median_low(others))}): figures of time here are of profiled steps.",
            "proven",
            evidence=_source("log", "iterations", [r for r in rows if r["profiled"]]),
            remedy="Profile fewer ranks or with fewer options (stacks, shapes).",
        )


TABLE: tuple[Rule, ...] = (
    _rank_twice,
    _refused,
    _lost_events,
    _ranks_missing,
    _step_cut,
    _clocks,
    _order_mismatch,
    _wrong_traffic,
    _not_covered,
    _conflicts,
    _avoidable,
    _late_data,
    _slow_links,
    _experts,
    _slow_ranks,
    _late_from_outside,
    _uneven_stages,
    _bubble,
    _exposed,
    _waiting,
    _launch_starved,
    _recompute_cost,
    _memory,
    _history,
)
"""The rules in the order in which they are asked; a rule sees what those before it found."""
