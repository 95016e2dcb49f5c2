"""The whole picture of a run: verdict, findings, where the step goes, pipeline, ledger, ranks, experts, bandwidth, memory.

``review`` gathers the results of the diff and of the query library; ``Review.as_document`` is the JSON document
``traceanalyzer.review/1`` (docs/review.md), from which everything that shows a review is made. Times are integer ns, sizes
bytes, null is unknown.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from importlib import metadata
from pathlib import Path
from statistics import median_low
from typing import Any

import duckdb

from traceanalyzer import __version__, attribute, axes, findings, schema
from traceanalyzer.diff import Diff, diff
from traceanalyzer.display import Tabular
from traceanalyzer.errors import InputError, JobError
from traceanalyzer.expect import memory as expected_memory
from traceanalyzer.expect import schedule as expected_schedule
from traceanalyzer.expect import versions
from traceanalyzer.findings import Facts, Finding
from traceanalyzer.job import Job
from traceanalyzer.job_rules import release
from traceanalyzer.links import Links
from traceanalyzer.queries import Library
from traceanalyzer.queries import library as all_queries
from traceanalyzer.reports import bubble, text
from traceanalyzer.reports import diff as diff_report
from traceanalyzer.reports.links import cell_time_ns, spans
from traceanalyzer.run import Run, versions_of

SCHEMA = "traceanalyzer.review/1"

MOST_ROWS = 20_000
"""Rows of one list of the document; a longer one is summarised, and what is left out is said."""

Row = dict[str, Any]
Progress = Callable[[str], None]

DEFINITIONS: tuple[tuple[str, str], ...] = (
    (
        "step",
        (
            "From the begin of a rank's step to its end, as hook, profiler or marks recorded them on the host. A device's "
            "time is that within it; kernels that still run beyond the end of the last recorded step are left out."
        ),
    ),
    ("exposed", "Communication while no compute kernel runs on the device."),
    (
        "transfer, waiting",
        "A call's transfer is its duration on the last rank to come; what others spend beyond it is waiting.",
    ),
    (
        "bubble",
        (
            "Of a stage: pipeline messages that no compute hides, and idle time, in the window from the pipeline's earliest "
            "forward start to its latest backward end; the same window for every stage."
        ),
    ),
    ("launch-starved", "Nothing runs on the device, and the host has launched nothing."),
    ("idle", "Nothing runs on the device, but launched work waits; without recorded launches, also launch-starved."),
    (
        "off-rank bytes",
        "Bytes that leave a rank in one direction if the operation runs as a ring: not measured wire bytes.",
    ),
    ("bus bandwidth", "Payload over transfer time, times the factor of nccl-tests for the operation and group size."),
    (
        "own lateness",
        (
            "What a rank comes later to a call than the first, as far as it arose on the rank itself since its previous call "
            "with others; the rest it inherited."
        ),
    ),
    (
        "at most",
        "A ceiling: without the thing named, a step cannot become shorter by more than this. It is no forecast.",
    ),
    (
        "MFU, HFU",
        "Model operations of a step (HFU: with repeated ones) over step time, ranks and the device's dense peak rate.",
    ),
)

METRICS: tuple[tuple[str, str, str, str], ...] = (
    ("step_ns", "step time", "ns", "Duration of the step."),
    ("compute_ns", "compute", "ns", "A compute kernel runs."),
    ("exposed_ns", "exposed communication", "ns", "Communication, pipeline messages included, while no compute runs."),
    ("waiting_ns", "exposed waiting", "ns", "Exposed communication in which a peer has not come yet."),
    ("tp_exposed_ns", "exposed TP", "ns", "Exposed communication of tensor parallelism alone."),
    ("cp_exposed_ns", "exposed CP", "ns", "Exposed communication of context parallelism alone."),
    ("ep_exposed_ns", "exposed EP", "ns", "Exposed communication of expert parallelism alone."),
    ("pp_exposed_ns", "exposed PP", "ns", "Exposed pipeline messages, mostly waiting."),
    ("dp_exposed_ns", "exposed DP", "ns", "Exposed communication of data parallelism alone."),
    ("launch_starved_ns", "launch-starved", "ns", "Nothing runs and nothing is launched."),
    ("idle_ns", "idle", "ns", "Nothing runs, but launched work waits."),
    ("bubble_ns", "bubble", "ns", "Pipeline waits and idle time in the pipeline's window."),
    (
        "own_late_ns",
        "own lateness",
        "ns",
        "Lateness that arose on the rank itself, summed over a step's calls; below 0: it caught up.",
    ),
    ("sent_bytes", "payload", "bytes", "Payload of a step's calls, receives left out."),
    ("clock_offset_ns", "clock offset", "ns", "How far the rank's clock is ahead of its reference."),
    ("peak_bytes", "peak memory", "bytes", "Largest peak of the allocator."),
)
"""Metrics of the rank grid: key, title, unit, meaning. Times and bytes are means over the complete steps."""


@dataclass(frozen=True)
class Review(Tabular):
    """A review; see as_document for what is in it. ``findings``: the most important first."""

    diff: Diff | None
    findings: tuple[Finding, ...]
    document: Row = field(repr=False)

    def as_document(self) -> Row:
        """The JSON document traceanalyzer.review/1 (docs/review.md)."""
        return self.document

    @property
    def exit_code(self) -> int:
        """As of diff: 0 match or nothing to compare with, 1 differs, 3 cannot be judged."""
        return {"match": 0, "no expectation": 0, "differs": 1}.get(self.document["verdict"]["word"], 3)

    def _repr_html_(self) -> str:
        """The page in a notebook, in a frame of its own."""
        from html import escape

        from traceanalyzer.reports.review.html import html

        page = escape(html(self.document), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:800px;border:0"></iframe>'


def review(
    run: Run,
    job: Job | None = None,
    *,
    links: Links | None = None,
    log: Path | None = None,
    min_coverage: float = 0.99,
    progress: Progress | None = None,
) -> Review:
    """Reviews a run. ``job``: as intended; without it the one in the run is used, intended before captured.

    links: measured bandwidths; the ledger and the bandwidths then say what the same calls take at them. log: Megatron's
    log, for the step times around the profiled ones. progress: told what is being worked out.
    Raises InputError or JobError for a run or log that cannot be read; what is wrong with the data, or with
    the job beside it, becomes the verdict.
    """
    told = progress or (lambda _: None)
    told("expected and measured traffic")
    compared, refused, used = _compare(run, job, min_coverage)
    # the diff has attributed the run, and settled more of it
    library = Library.of(run, used, links) if compared is None else Library(run, used, links)
    run.library = library
    tables = Tables(library)
    told("steps and time")
    facts_tables: dict[str, Sequence[Row]] = {name: tables.rows(name) for name in _ASKED_FIRST}
    facts_tables |= {view: run.rows(f"SELECT * FROM {view}") for view in ("rank", "issue", "metric")}
    told("calls across ranks")
    facts_tables |= {name: tables.rows(name) for name in _ASKED_THEN}
    told("pipelines, experts, memory")
    share, why_no_share = bubble.formula_share(used)
    facts_tables["rank_stage"] = tables.sql(
        "SELECT rank, pipeline, stage, stages FROM rank_stage ORDER BY rank", ("bubble",)
    )
    facts_tables["after_steps"] = tables.sql(_AFTER_STEPS, ("step_time",))
    facts_tables["link_groups"] = tables.sql(_LINK_GROUPS, ("slow_links",))
    facts_tables["recompute"] = tables.sql(_RECOMPUTE, ("kernel_classes",))
    experts, experts_left = _expert_rows(tables)
    facts_tables["expert_rows"] = tables.sql(_EXPERT_SUMS, ()) if experts else []
    facts_tables["expert_gain"] = tables.sql(_EXPERT_GAIN, ("expert_cost",)) if experts else []
    facts_tables["memory"], no_memory = _memory(run, used, facts_tables)
    history = None if log is None else _history(log, facts_tables["step_time"])
    facts_tables["history"] = history or []
    facts = Facts(facts_tables, used, compared, refused, share)
    told("findings")
    found = findings.find(facts)
    told("document")
    left: list[Row] = [{"what": "experts: micro-batches one by one", "rows": experts_left}] if experts_left else []
    pipelines, pipelines_left = _pipelines(tables, facts, used, share, why_no_share)
    left += pipelines_left
    peers, peers_left = _peers(tables)
    left += peers_left
    document = {
        "schema": SCHEMA,
        "run": _run(run, used, facts),
        "verdict": _verdict(compared, refused, used, found),
        "steps": _steps(facts),
        "peak": _peak(facts),
        "history": history,
        "findings": _finding_rows(found),
        "time": _time(tables),
        "pipelines": pipelines,
        "ledger": None if compared is None else _ledger(run, compared, links, left),
        "ranks": _ranks(tables, used),
        "skew": _skew(tables),
        "experts": experts,
        "bandwidth": tables.rows("collective_bandwidth"),
        "peers": peers,
        "memory": facts_tables["memory"],
        "issues": _issues(run),
        "appendix": _appendix(used, found),
        "empty": _empty(used, no_memory, pipelines),
        "left_out": left,
    }
    return Review(compared, tuple(found), _cut(document, left))


# -- asking ------------------------------------------------------------------------------------------------------------

_ASKED_FIRST = ("step_time", "time_classes", "throughput", "exposed_by_role", "unexplained_communication")
_ASKED_THEN = (
    "clocks",
    "step_head",
    "exposed_split",
    "stragglers",
    "slow_ranks",
    "slow_groups",
    "slow_links",
    "unmatched_calls",
    "bubble",
)


class Tables:
    """Results of the library as tables of their names, each made once."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._made: set[str] = set()

    def make(self, *names: str) -> None:
        """Makes the results of queries tables of the run's connection."""
        for name in names:
            if name not in self._made:
                self.library.result_table(name, {})
                self._made.add(name)

    def rows(self, name: str) -> list[Row]:
        """The rows of one query."""
        self.make(name)
        return self.library.run.rows(f"SELECT * FROM {name}")

    def sql(self, query: str, names: Sequence[str], parameters: list[Any] | None = None) -> list[Row]:
        """Rows of a query over the results of others."""
        self.make(*names)
        return self.library.run.rows(query, parameters)


def _compare(run: Run, job: Job | None, min_coverage: float) -> tuple[Diff | None, str | None, Job | None]:
    """The diff, why there is none although a job is known, and the job that is used."""
    chosen = job
    for key in (schema.META_JOB_INTENDED, schema.META_JOB_CAPTURED):
        stored = run.job_text(key)
        if chosen is None and stored is not None:
            chosen = Job.from_json(stored)
    if chosen is None:
        return None, None, None
    used = attribute.in_world_of(run, chosen)
    try:
        found = diff(run, job, min_coverage=min_coverage)
    except (InputError, JobError) as error:
        return None, str(error), used
    return found, None, found.job


_AFTER_STEPS = """
WITH whole AS (SELECT rank, max(end_ns) AS end_ns, max(step) AS step FROM step_time WHERE complete GROUP BY ALL),
usual AS (
  SELECT rank, count(*) / count(DISTINCT step) AS calls_of_step FROM comm WHERE step IS NOT NULL GROUP BY ALL
)
SELECT w.rank, w.step AS last_step, count(*) AS calls, round(any_value(u.calls_of_step))::BIGINT AS calls_of_step
FROM whole w JOIN comm c ON c.rank = w.rank AND c.step IS NULL AND coalesce(c.t_issue_ns, c.start_ns) >= w.end_ns
JOIN usual u ON u.rank = w.rank
GROUP BY ALL ORDER BY w.rank
"""
_LINK_GROUPS = """
SELECT m.role, m.op, m.payload_bytes, l.hosts, count(DISTINCT (m.member_ranks, m.sender_rank)) AS groups
FROM matched_call m JOIN link l ON l.member_ranks = m.member_ranks AND l.sender_rank IS NOT DISTINCT FROM m.sender_rank
GROUP BY ALL
"""
_RECOMPUTE = """
SELECT rank, step, sum(kernels)::BIGINT AS kernels, sum(dur_ns)::BIGINT AS dur_ns FROM kernel_classes
WHERE phase = 'recompute' AND step IS NOT NULL AND kernel_class NOT IN ('comm', 'copy', 'memset') GROUP BY ALL ORDER BY ALL
"""


# -- head --------------------------------------------------------------------------------------------------------------


def _run(run: Run, job: Job | None, facts: Facts) -> Row:
    recorded = sorted({r["rank"] for r in facts.rows("rank") if r["rank"] is not None})
    names = sorted({r["device_name"] for r in facts.rows("rank") if r["device_name"] is not None})
    found = versions_of(r["versions"] for r in facts.rows("rank"))
    return {
        "path": run.source,
        "job_in_run": any(
            run.job_text(key) is not None for key in (schema.META_JOB_INTENDED, schema.META_JOB_CAPTURED)
        ),
        "ranks_recorded": recorded,
        "world_size": run.world_size or (None if job is None else job.world_size),
        "steps": list(facts.steps),
        "device": ", ".join(names) or None,
        "torch": ", ".join(found.get("torch", ())) or None,
        "megatron_core": ", ".join(found.get("megatron_core", ()))
        or (None if job is None else job.megatron_core_version),
        "job": None if job is None else diff_report.job_words(job),
    }


def _ledger(run: Run, compared: Diff, links: Links | None, left: list[Row]) -> Row:
    """The diff's document, each cell with what it expects: component, calls per rank and step, formula, evidence.

    Of releases that fit less well the first rows; ``left`` is told of the others.
    """
    times: list[int | None] | None = None
    if links is not None:
        span_of = spans(run)
        times = [cell_time_ns(cell, links, span_of) for cell in compared.cells]
    document = diff_report.document(compared, times)
    for row, cell in zip(document["cells"], compared.cells, strict=True):
        row["expected"] = [
            {
                "component": call.component,
                "rule": call.rule,
                "calls": call.calls,
                "formula": dict(call.formula),
                "evidence": f"{call.evidence.kind}: {call.evidence.where}",
            }
            for call in cell.expected
        ]
    cut = 0
    for one in document["versions_apart"]:
        cut += len(one["cells"][_MOST_APART:])
        del one["cells"][_MOST_APART:]
    if cut:
        left.append({"what": "ledger: rows that tell other releases apart", "rows": cut})
    return document


_MOST_APART = 100
"""Rows shown of a release that fits less well: of a thousand ranks every exchange can be one."""


def _verdict(compared: Diff | None, refused: str | None, job: Job | None, found: Sequence[Finding]) -> Row:
    forbids = next((f for f in found if f.forbids), None)
    if job is None:
        return {
            "word": "no expectation",
            "sentence": "No job is known for this run, so nothing is expected of its traffic; time is shown all the same.",
            "coverage": None,
            "next": "Give --job FILE (TOML, YAML, a Megatron log or command line).",
        }
    if compared is None:
        return {
            "word": "cannot be judged",
            "sentence": refused or "The run could not be compared.",
            "coverage": None,
            "next": None if forbids is None else forbids.remedy,
        }
    words = {
        "match": "Every byte of the recorded communication is what the job should send.",
        "differs": "The recorded communication is not what the job should send.",
        "cannot be judged": "Too much of the recorded communication cannot be judged.",
    }[compared.verdict]
    first = next((f for f in found if f.kind == "verdict"), None)
    todo = {
        "match": "See the findings for where the time goes.",
        "differs": "See the findings, and traceanalyzer diff --explain N for the formula of a row."
        if first is None or first.remedy is None
        else first.remedy,
        "cannot be judged": "See what could not be attributed or judged, and why: traceanalyzer diff."
        if forbids is None or forbids.remedy is None
        else forbids.remedy,
    }[compared.verdict]
    return {
        "word": compared.verdict,
        "sentence": f"{words} {diff_report.coverage_words(compared.coverage).capitalize()}.",
        "coverage": diff_report.document(compared)["coverage"],
        "next": todo,
    }


def _steps(facts: Facts) -> list[Row]:
    """One row a step. step_ns: of its longest rank, for a step ends with its last; findings are shares of the median rank."""
    by_step: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for row in facts.rows("throughput"):
        by_step[row["step"]].append(row)
    whole: dict[int, list[bool]] = defaultdict(list)
    for row in facts.rows("step_time"):
        whole[row["step"]].append(bool(row["complete"]))
    found = []
    for step, rows in sorted(by_step.items()):
        longest = max(rows, key=lambda r: r["dur_ns"] or 0)
        known = [r["dur_ns"] for r in rows if r["dur_ns"] is not None]
        lacks = longest["reason"]
        if lacks is None and longest["peak_tflops"] is None:
            lacks = f"no peak rate is known for {longest['device_name'] or 'the device'} in {longest['dtype'] or 'this type'}"
        found.append(
            {
                "step": step,
                "complete": all(whole[step]),
                "step_ns": longest["dur_ns"],
                "median_rank_ns": median_low(known) if known else None,
                "ranks": sorted(r["rank"] for r in rows if r["rank"] is not None),
                "tokens_per_s_per_gpu": longest["tokens_per_s_per_device"],
                "mfu": longest["mfu"],
                "hfu": longest["hfu"],
                "why_null": lacks,
            }
        )
    return found


def _peak(facts: Facts) -> Row | None:
    rates = {(r["peak_tflops"], r["dtype"], r["device_name"]) for r in facts.rows("throughput") if r["peak_tflops"]}
    if len(rates) != 1:
        return None
    tflops, dtype, device = rates.pop()
    return {"tflops": tflops, "dtype": dtype, "source": f"data sheet of {device}, dense"}


# -- history -----------------------------------------------------------------------------------------------------------

_ITERATION = re.compile(r"\biteration\s+(\d+)\s*/\s*(\d+)\s*\|")
_ELAPSED = re.compile(r"elapsed time per iteration \((ms|s)\):\s*([-+0-9.eE]+)")
_LOSS = re.compile(r"\b(?:lm )?loss:\s*([-+0-9.eE]+|nan|inf)", re.IGNORECASE)
_CONSUMED = re.compile(r"consumed samples:\s*(\d+)")


def iterations(lines: Iterable[str]) -> Iterator[Row]:
    """Megatron's iteration lines: iteration, step_ns (a mean over the iterations since the line before), loss, and so on.

    Launcher prefixes, colours and other lines are passed over; a value that cannot be read is null. Of an iteration printed
    twice (a restart) both are given.
    """
    for line in lines:
        head = _ITERATION.search(line)
        if head is None:
            continue
        elapsed, loss, consumed = (pattern.search(line) for pattern in (_ELAPSED, _LOSS, _CONSUMED))
        step_ns: int | None = None
        if elapsed is not None:
            try:
                step_ns = int(Fraction(elapsed[2]) * (1_000_000 if elapsed[1] == "ms" else 1_000_000_000))
            except ValueError:
                step_ns = None
        number = None if loss is None else float(loss[1])
        yield {
            "iteration": int(head[1]),
            "step_ns": step_ns,
            "loss": number if number is not None and abs(number) < float("inf") else None,
            "consumed_samples": None if consumed is None else int(consumed[1]),
        }


def _history(log: Path, steps: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The iterations of a log with a time; profiled: a step of this number was recorded.

    Raises InputError if the log has none.
    """
    with log.open(encoding="utf-8", errors="replace") as lines:
        found = [row for row in iterations(lines) if row["step_ns"] is not None]
    if not found:
        raise InputError(
            f"{log}: no line with 'iteration N/ M | ... | elapsed time per iteration (ms): ...'. Give the log of the rank "
            "that prints them, Megatron's last one."
        )
    recorded = {r["step"] for r in steps}
    return [row | {"profiled": row["iteration"] in recorded} for row in found]


# -- findings ----------------------------------------------------------------------------------------------------------

_PLACE = ("role", "axis", "ranks", "stage", "host", "layer", "step", "microbatch", "component")


def _finding_rows(found: Sequence[Finding]) -> list[Row]:
    number = {id(f): i + 1 for i, f in enumerate(found)}
    return [
        {
            "rank_of_finding": number[id(f)],
            "code": f.code,
            "kind": f.kind,
            "sentence": f.sentence,
            "gain_ns_at_most": f.gain_ns_at_most,
            "gain_bytes": f.gain_bytes,
            "confidence": f.confidence,
            "place": {key: f.place[key] for key in _PLACE if f.place.get(key) is not None},
            "evidence": [
                {
                    "query": e.query or e.source,
                    "parameters": dict(e.parameters),
                    "sentence": e.sentence,
                    "rows": [_plain(dict(r)) for r in e.rows],
                }
                for e in f.evidence
            ],
            "remedy": f.remedy,
            "because_of": None if f.because_of is None else number.get(id(f.because_of)),
            "forbids_judging": f.forbids,
        }
        for f in found
    ]


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


# -- time --------------------------------------------------------------------------------------------------------------

_TIME = """
WITH staged AS (
  SELECT t.step, s.stage, t.rank, t.class, array_to_string(t.roles, ' + ') AS role, t.part, t.dur_ns
  FROM split_time t LEFT JOIN rank_stage s ON s.rank = t.rank WHERE t.step_complete
),
-- under compute, the roles that run beside it are no class of their own
classed AS (
  SELECT step, stage, rank, class, CASE WHEN class = 'compute' THEN NULL ELSE role END AS role,
         CASE WHEN class = 'compute' THEN NULL ELSE part END AS part, dur_ns FROM staged
)
SELECT step, stage, class, role, part, sum(dur_ns)::BIGINT AS dur_ns FROM classed GROUP BY ALL
ORDER BY step, stage, class, role, part
"""
_TIME_RANKS = """
SELECT t.step, s.stage, list_sort(list(DISTINCT t.rank)) AS ranks, count(DISTINCT (t.rank, t.device)) AS devices
FROM split_time t LEFT JOIN rank_stage s ON s.rank = t.rank WHERE t.step_complete GROUP BY ALL ORDER BY ALL
"""


def _time(tables: Tables) -> list[Row]:
    """Per complete step and stage the time of its devices by class; the classes sum to step_ns."""
    found: dict[tuple[Any, Any], Row] = {}
    for row in tables.sql(_TIME_RANKS, ("exposed_split", "bubble")):
        found[row["step"], row["stage"]] = {**row, "step_ns": 0, "classes": []}
    for row in tables.sql(_TIME, ("exposed_split", "bubble")):
        place = found[row["step"], row["stage"]]
        place["step_ns"] += row["dur_ns"]
        place["classes"].append({key: row[key] for key in ("class", "role", "part", "dur_ns")})
    return list(found.values())


# -- pipelines ---------------------------------------------------------------------------------------------------------

_BOXES = """
WITH mine AS (SELECT rank, stage FROM rank_stage WHERE pipeline = ?),
events AS (
  SELECT k.rank, m.stage, coalesce(k.launch_ns, k.start_ns) AS at_ns, k.start_ns, k.start_ns + k.dur_ns AS end_ns,
         CASE WHEN k.phase = 'forward' THEN 'forward' ELSE 'backward' END AS pass, 0 AS message, k.microbatch, k.chunk
  FROM kernel_place k JOIN mine m ON m.rank = k.rank
  WHERE k.step = ? AND k.phase IN ('forward', 'backward', 'recompute') AND k.start_ns IS NOT NULL AND k.dur_ns IS NOT NULL
    AND k.kernel_class NOT IN ('comm', 'copy', 'memset')
  UNION ALL
  SELECT c.rank, m.stage, coalesce(c.t_issue_ns, c.start_ns), NULL, NULL, NULL, 1, NULL, NULL
  FROM comm c JOIN mine m ON m.rank = c.rank
  WHERE c.step = ? AND c.axis = 'PP' AND coalesce(c.t_issue_ns, c.start_ns) IS NOT NULL
),
turned AS (
  SELECT *, sum(message) OVER (PARTITION BY rank ORDER BY at_ns, message DESC ROWS UNBOUNDED PRECEDING) AS turn FROM events
),
changed AS (
  -- two passes of one direction may follow each other without a message: their micro-batch or chunk tells them apart
  SELECT *, CASE WHEN turn IS DISTINCT FROM lag(turn) OVER w OR pass IS DISTINCT FROM lag(pass) OVER w
                   OR microbatch <> last_value(microbatch IGNORE NULLS) OVER before
                   OR chunk <> last_value(chunk IGNORE NULLS) OVER before THEN 1 ELSE 0 END AS new
  FROM turned WHERE message = 0
  WINDOW w AS (PARTITION BY rank ORDER BY at_ns, start_ns),
         before AS (PARTITION BY rank ORDER BY at_ns, start_ns ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
),
numbered AS (
  SELECT *, sum(new) OVER (PARTITION BY rank ORDER BY at_ns, start_ns ROWS UNBOUNDED PRECEDING) AS box FROM changed
)
SELECT rank, stage, box, pass, min(start_ns) AS start_ns, max(end_ns) AS end_ns, count(*) AS kernels
FROM numbered GROUP BY ALL ORDER BY stage, rank, min(start_ns), box
"""


def _pipelines(
    tables: Tables, facts: Facts, job: Job | None, share: Fraction | None, why_not: str | None
) -> tuple[list[Row], list[Row]]:
    """The pipelines in a typical step with their stages, and the boxes of one of them."""
    windows: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for row in tables.rows("bubble"):
        if not facts.steps or row["step"] in facts.steps:
            windows[row["step"], row["pipeline"]].append(row)
    if not windows:
        return [], []
    longest = {step: max(rows[0]["window_ns"] for (s, _), rows in windows.items() if s == step) for step, _ in windows}
    typical = min(longest, key=lambda s: (abs(longest[s] - median_low(list(longest.values()))), s))
    shown = sorted(pipeline for step, pipeline in windows if step == typical)
    clocks = {r["rank"]: r for r in facts.rows("clocks") if r["since_ns"] is None}
    found: list[Row] = []
    for pipeline in shown:
        rows = windows[typical, pipeline]
        boxes = _boxes(tables, pipeline, typical, job, clocks) if pipeline == shown[0] else []
        residuals = [clocks[r["rank"]]["open_ns"] for r in rows if r["rank"] in clocks]
        known = [r for r in residuals if r is not None]
        found.append(
            {
                "pipeline": pipeline,
                "step": typical,
                "window_ns": rows[0]["window_ns"],
                "clocks": rows[0]["clocks"],
                "residual_ns": max(known) if known else None,
                "formula_share": None if share is None else float(share),
                "formula": _formula(job) if share is not None else why_not,
                "stages": rows,
                "boxes": boxes,
            }
        )
    left = []
    if len(shown) > 1:
        left.append({"what": f"boxes of pipelines other than {shown[0]}", "rows": len(shown) - 1})
    if len(longest) > 1:
        left.append({"what": f"pipelines of steps other than {typical}", "rows": len(windows) - len(shown)})
    return found, left


def _formula(job: Job | None) -> str:
    chunks = None if job is None else job.virtual_pipeline_model_parallel_size
    return "(PP-1)/(M+PP-1)" if not chunks or chunks == 1 else "(PP-1)/(v*M+PP-1)"


def _boxes(
    tables: Tables, pipeline: int, step: int, job: Job | None, clocks: Mapping[int, Mapping[str, Any]]
) -> list[Row]:
    """Passes of every stage: runs of kernels of one direction between pipeline messages, numbered by the schedule's order.

    Where a stage has not as many passes as the schedule, micro-batches are null. Clocks are aligned.
    """
    boxes = tables.sql(_BOXES, ("bubble",), [pipeline, step, step])
    orders = _orders(job)
    found: list[Row] = []
    of_rank: dict[int, list[Row]] = defaultdict(list)
    for box in boxes:
        of_rank[box["rank"]].append(box)
    for rank, mine in of_rank.items():
        ahead = clocks[rank]["offset_ns"] if rank in clocks else 0
        wanted = orders.get(mine[0]["stage"], {})
        for direction in ("forward", "backward"):
            passes = [b for b in mine if b["pass"] == direction]
            order = wanted.get(direction, [])
            for i, box in enumerate(passes):
                number, chunk = order[i] if len(order) == len(passes) else (None, None)
                found.append(
                    {
                        "stage": box["stage"],
                        "rank": rank,
                        "kind": direction,
                        "microbatch": number,
                        "chunk": chunk,
                        "start_ns": box["start_ns"] - ahead,
                        "dur_ns": box["end_ns"] - box["start_ns"],
                        "evidence": "order of the schedule" if number is not None else "between messages",
                    }
                )
    begin = min((b["start_ns"] for b in found), default=0)
    for box in found:
        box["start_ns"] -= begin
    return sorted(found, key=lambda b: (b["stage"], b["rank"], b["start_ns"]))


def _orders(job: Job | None) -> dict[int, dict[str, list[tuple[int, int]]]]:
    """Stage -> direction -> (micro-batch, chunk) in the order in which the schedule runs them; {} where it is not known."""
    if job is None:
        return {}
    try:
        found = expected_schedule.of_job(job, release(job.megatron_core_version) or versions.KNOWN[-1])
    except JobError:
        return {}
    if found is None:
        return {}
    orders: dict[int, dict[str, list[tuple[int, int]]]] = {}
    for stage in range(found.stages):
        orders[stage] = {"forward": [], "backward": []}
        for action in expected_schedule.actions(found, stage):
            direction = {"F": "forward", "B": "backward"}.get(action.kind)
            if direction is not None:
                orders[stage][direction].append((action.microbatch, action.chunk))
    return orders


# -- ranks and skew ----------------------------------------------------------------------------------------------------

_RANKS = """
WITH steps AS (SELECT rank, avg(dur_ns) AS step_ns FROM step_time WHERE complete GROUP BY ALL),
times AS (
  SELECT rank, avg(compute_ns) AS compute_ns, avg(launch_starved_ns) AS launch_starved_ns, avg(idle_ns) AS idle_ns,
         avg(communication_ns + pp_ns) AS exposed_ns
  FROM time_classes WHERE complete GROUP BY ALL
),
summed AS (
  SELECT e.rank, e.step, sum(e.waiting_ns) AS waiting_ns, sum(e.exposed_ns) FILTER (a.axis = 'TP') AS tp,
         sum(e.exposed_ns) FILTER (a.axis = 'CP') AS cp, sum(e.exposed_ns) FILTER (a.axis = 'EP') AS ep,
         sum(e.exposed_ns) FILTER (a.axis = 'PP') AS pp, sum(e.exposed_ns) FILTER (a.axis = 'DP') AS dp
  FROM exposed_split e LEFT JOIN role_axis a ON a.role = e.role GROUP BY ALL
),
exposed AS (
  SELECT rank, avg(waiting_ns) AS waiting_ns, avg(tp) AS tp, avg(cp) AS cp, avg(ep) AS ep, avg(pp) AS pp, avg(dp) AS dp
  FROM summed GROUP BY ALL
),
bubbles AS (SELECT rank, avg(bubble_ns) AS bubble_ns FROM bubble GROUP BY ALL),
late AS (
  SELECT rank, avg(own_ns) AS own_ns FROM (
    SELECT rank, step, sum(own_ns) AS own_ns FROM arrival_skew WHERE step IS NOT NULL GROUP BY ALL) GROUP BY ALL
),
sent AS (
  SELECT rank, avg(total) AS sent_bytes FROM (
    SELECT rank, step, CASE WHEN bool_and(payload_bytes IS NOT NULL) THEN sum(payload_bytes) END AS total
    FROM comm WHERE step IS NOT NULL AND op IS DISTINCT FROM 'recv' GROUP BY ALL) GROUP BY ALL
),
peak AS (SELECT rank, max(value)::BIGINT AS peak_bytes FROM metric WHERE key = 'memory.peak_allocated_bytes' GROUP BY ALL)
SELECT r.rank, r.host, round(s.step_ns)::BIGINT AS step_ns, round(t.compute_ns)::BIGINT AS compute_ns,
       round(t.exposed_ns)::BIGINT AS exposed_ns, round(e.waiting_ns)::BIGINT AS waiting_ns,
       round(e.tp)::BIGINT AS tp_exposed_ns, round(e.cp)::BIGINT AS cp_exposed_ns, round(e.ep)::BIGINT AS ep_exposed_ns,
       round(e.pp)::BIGINT AS pp_exposed_ns, round(e.dp)::BIGINT AS dp_exposed_ns,
       round(t.launch_starved_ns)::BIGINT AS launch_starved_ns, round(t.idle_ns)::BIGINT AS idle_ns,
       round(b.bubble_ns)::BIGINT AS bubble_ns, round(l.own_ns)::BIGINT AS own_late_ns,
       round(n.sent_bytes)::BIGINT AS sent_bytes, CASE WHEN c.calls > 0 THEN c.offset_ns END AS clock_offset_ns, p.peak_bytes
FROM (SELECT rank, min(host) AS host FROM rank WHERE rank IS NOT NULL GROUP BY ALL) r
LEFT JOIN steps s USING (rank) LEFT JOIN times t USING (rank) LEFT JOIN exposed e USING (rank)
LEFT JOIN bubbles b USING (rank) LEFT JOIN late l USING (rank) LEFT JOIN sent n USING (rank)
LEFT JOIN (SELECT * FROM clocks WHERE since_ns IS NULL) c USING (rank) LEFT JOIN peak p USING (rank)
ORDER BY r.rank
"""


def _ranks(tables: Tables, job: Job | None) -> Row:
    rows = tables.sql(_RANKS, ("step_time", "time_classes", "exposed_split", "bubble", "arrival_skew", "clocks"))
    layout: axes.Layout | None = None
    if job is not None:
        try:
            layout = job.layout
        except JobError:
            layout = None
    names = ("tp", "cp", "ep", "pp", "dp")
    found = []
    for row in rows:
        known = layout is not None and row["rank"] < layout.world_size
        place = layout.coordinates(row["rank"]) if layout is not None and known else None
        coordinates = {name: getattr(place, name, None) for name in names}
        found.append({"rank": row.pop("rank"), **coordinates, **row})
    used = {key for row in found for key, value in row.items() if value is not None}
    metrics = [{"key": k, "title": t, "unit": u, "doc": d} for k, t, u, d in METRICS if k in used]
    return {"axes": list(names), "metrics": metrics, "rows": found}


_SKEW = """
WITH slow AS (
  SELECT owner_rank AS rank, role, count(*) AS groups, any_value(finding) AS finding
  FROM stragglers WHERE slow AND owner_rank IS NOT NULL GROUP BY ALL
)
SELECT a.rank, a.role, sum(a.calls)::BIGINT AS calls, sum(a.own_ns)::BIGINT AS own_late_ns,
       sum(a.inherited_ns)::BIGINT AS inherited_late_ns, max(a.residual_ns) AS residual_ns,
       coalesce(any_value(s.groups), 0) > 0 AS slow, any_value(s.finding) AS finding
FROM arrival_skew a LEFT JOIN slow s ON s.rank = a.rank AND s.role = a.role
WHERE a.step IS NOT NULL
GROUP BY a.rank, a.role ORDER BY a.rank, a.role
"""


def _skew(tables: Tables) -> list[Row]:
    """Lateness of every rank in the calls of a role, summed over the steps; residual_ns is the error of one call."""
    return tables.sql(_SKEW, ("arrival_skew", "stragglers"))


# -- experts -----------------------------------------------------------------------------------------------------------

_EXPERTS = """
CREATE OR REPLACE TABLE expert_received AS
WITH received AS (  -- of exchanges that all ranks recorded; those that are even by construction bring results back
  -- where no exchange shows the rows, what the experts counted, under numbers below 0
  SELECT i.match_id, i.step, i.layer, i.microbatch, m.rank, list_sum(c.out_splits)::BIGINT AS rows
  FROM expert_imbalance i
  JOIN matched_member m ON m.match_id = i.match_id
  JOIN comm c ON c.rank = m.rank AND c.call_id = m.call_id
  WHERE i.phase = 'forward' AND i.imbalance IS NOT NULL AND i.evidence = 'splits'
  UNION ALL
  SELECT -count_id, step, layer, microbatch, rank, received_rows FROM expert_pass
  WHERE evidence = 'counts' AND phase = 'forward' AND whole
),
whole AS (
  SELECT *, sum(rows) OVER w AS total_rows, count(*) OVER w AS ranks, max(rows) OVER w > min(rows) OVER w AS uneven
  FROM received WINDOW w AS (PARTITION BY match_id)
)
SELECT match_id, step, layer, microbatch, rank, rows, total_rows::BIGINT AS total_rows, ranks::BIGINT AS ranks FROM whole
WHERE uneven OR match_id < 0 OR NOT (SELECT coalesce(bool_or(uneven), false) FROM whole)
"""
_EXPERT_SUMS = """
SELECT layer, rank, sum(rows)::BIGINT AS rows, sum(total_rows)::BIGINT AS total_rows, max(ranks) AS ranks,
       sum(total_rows) / max(ranks) AS mean_rows
FROM expert_received GROUP BY ALL HAVING sum(total_rows) > 0 ORDER BY layer, rank
"""
_EXPERT_GAIN = """
WITH moved AS (SELECT match_id, max(transfer_ns) AS transfer_ns FROM arrival WHERE last GROUP BY match_id),
costed AS (  -- groups run side by side: of one layer and micro-batch the dearest counts
  -- with as many rows on every rank the exchanges, too, would take as much less as the fullest rank has more than the mean
  SELECT c.step, c.layer, c.microbatch, c.phase,
         max(c.at_most_ns + ceil((1 - 1 / coalesce(c.imbalance, 1))
                                 * (coalesce(d.transfer_ns, 0) + coalesce(b.transfer_ns, 0)))::BIGINT) AS at_most_ns
  FROM expert_cost c
  LEFT JOIN moved d ON d.match_id = c.match_id
  LEFT JOIN moved b ON b.match_id = c.combine_match_id
  WHERE c.at_most_ns IS NOT NULL AND c.step IS NOT NULL GROUP BY ALL
)
SELECT step, sum(at_most_ns)::BIGINT AS at_most_ns FROM costed GROUP BY step ORDER BY step
"""
_EXPERT_ROWS = """
SELECT {fields}, rank, sum(rows)::BIGINT AS rows_received, sum(total_rows) / max(ranks) AS mean,
       sum(rows) * max(ranks) / nullif(sum(total_rows), 0) AS max_over_mean, count(*) AS exchanges
FROM expert_received GROUP BY ALL ORDER BY layer, microbatch, rank
"""


def _expert_rows(tables: Tables) -> tuple[list[Row], int]:
    """Rows that each expert rank receives by layer and micro-batch (summed over steps), and rows that were summed further.

    max_over_mean is that rank's rows over the mean of its group; the largest of a layer is the layer's imbalance.
    """
    tables.make("expert_imbalance")
    tables.library.run.connection.execute(_EXPERTS)
    number = tables.library.run.value("SELECT count(DISTINCT (layer, microbatch, rank)) FROM expert_received")
    whole = number <= MOST_ROWS
    fields = "layer, microbatch" if whole else "layer, NULL::INTEGER AS microbatch"
    rows = tables.sql(_EXPERT_ROWS.format(fields=fields), ())
    return (
        [
            {
                "layer": row["layer"],
                "microbatch": row["microbatch"],
                "rank": row["rank"],
                "rows_received": row["rows_received"],
                "mean": row["mean"],
                "max_over_mean": row["max_over_mean"],
                "evidence": text.counted(row["exchanges"], "exchange"),
            }
            for row in rows
        ],
        0 if whole else number - len(rows),
    )


# -- bandwidth, memory, issues -----------------------------------------------------------------------------------------


SLOWEST = 4
"""Groups or pairs of ranks that are shown of one kind of call."""

_PEERS = """
WITH kinds AS (
  SELECT g.*, len(g.member_ranks) AS group_size,
         row_number() OVER (PARTITION BY g.role, g.op, g.dtype, g.payload_bytes, g.span, len(g.member_ranks)
                            ORDER BY g.median_transfer_ns DESC, g.member_ranks, g.sender_rank) AS place
  FROM slow_groups g
)
SELECT k.role, k.op, k.dtype, k.payload_bytes, k.span, k.member_ranks, k.sender_rank, k.calls, k.median_transfer_ns,
       k.usual_transfer_ns, k.payload_bytes / nullif(k.median_transfer_ns, 0) * f.factor AS bus_gb_per_s, k.groups, k.slow,
       k.place
FROM kinds k LEFT JOIN bus_factor f ON f.op = k.op AND f.group_size = k.group_size
ORDER BY k.role, k.op, k.payload_bytes, k.dtype, k.span, k.place, k.member_ranks
"""


def _peers(tables: Tables) -> tuple[list[Row], list[Row]]:
    """Of each kind of call the groups, or pairs of ranks, whose transfers take longest, and how many are left out."""
    rows = tables.sql(_PEERS, ("slow_groups", "collective_bandwidth"))
    found = []
    for row in rows:
        if row.pop("place") > SLOWEST:
            continue
        members, sender = row.pop("member_ranks"), row.pop("sender_rank")
        if sender is None:
            peers = text.ranks_text(members)
        else:
            peers = f"{sender} to {', '.join(str(r) for r in members if r != sender)}"
        found.append({"role": row.pop("role"), "op": row.pop("op"), "peers": peers, **row})
    if len(rows) == len(found):
        return found, []
    return found, [
        {"what": "bandwidth: groups and pairs that are no slower than the shown ones", "rows": len(rows) - len(found)}
    ]


_MEASURED = {
    "parameters": "memory.parameters_bytes",
    "gradients": "memory.gradients_bytes",
    "optimizer": "memory.optimizer_bytes",
    "peak": "memory.peak_allocated_bytes",
}


def _memory(
    run: Run, job: Job | None, tables: Mapping[str, Sequence[Mapping[str, Any]]]
) -> tuple[list[Row], str | None]:
    """Measured and expected memory of the recorded ranks, and why nothing is expected of a rank, where a job is known.

    Where none was measured, expected only, a rank of each stage.
    """
    why: str | None = None
    measured: dict[tuple[int, str], int] = {}
    for row in run.rows(
        "SELECT rank, key, max(value)::BIGINT AS bytes FROM metric WHERE rank IS NOT NULL GROUP BY ALL"
    ):
        for what, key in _MEASURED.items():
            if row["key"] == key:
                measured[row["rank"], what] = row["bytes"]
    ranks = sorted({r["rank"] for r in tables["rank"] if r["rank"] is not None})
    expected: dict[int, expected_memory.Memory | None] = {}
    found: list[Row] = []
    for rank in ranks:
        stage: int | None = None
        memory: expected_memory.Memory | None = None
        if job is not None:
            try:
                stage = job.layout.stage(rank)
                if stage not in expected:
                    expected[stage] = expected_memory.estimate(job, rank)
                memory = expected[stage]
            except JobError as error:
                memory, why = None, str(error)
                if stage is not None:
                    expected[stage] = None
        if not measured and stage is not None and any(r["stage"] == stage for r in found):
            continue
        for what in ("parameters", "gradients", "optimizer", "activations", "peak"):
            wanted = None
            if memory is not None:
                wanted = memory.total() if what == "peak" else memory.total(what)  # type: ignore[arg-type]
            have = measured.get((rank, what))
            if wanted is not None or have is not None:
                found.append(
                    {"rank": rank, "stage": stage, "what": what, "expected_bytes": wanted, "measured_bytes": have}
                )
    return found, why


def _empty(job: Job | None, no_memory: str | None, pipelines: Sequence[Row]) -> dict[str, str]:
    """Why a section has nothing or lacks a part, where the job tells: section -> sentence."""
    found: dict[str, str] = {}
    if no_memory is not None:
        found["memory"] = f"What memory to expect is not known: {no_memory}."
    if job is not None:
        if job.pipeline_model_parallel_size == 1:
            found["pipelines"] = "The job has one pipeline stage."
        elif not pipelines:
            found["pipelines"] = "The job has several stages, but the recording does not show where their passes lie."
        if not job.num_experts:
            found["experts"] = "The job has no experts."
        else:
            found["experts"] = (
                "The job has experts, but no all-to-all with split sizes and no count of their rows was recorded: "
                "traceanalyzer attach records both."
            )
    return found


_ISSUES = """
SELECT severity, code, sentence, sum(occurrences)::BIGINT AS occurrences,
       coalesce(list_sort(list(DISTINCT rank) FILTER (rank IS NOT NULL)), []) AS ranks,
       coalesce(list_sort(list(DISTINCT source_file) FILTER (source_file IS NOT NULL)), []) AS files
FROM issue GROUP BY ALL
"""


def _issues(run: Run) -> list[Row]:
    """Issues of the input, the same sentence of many ranks in one row, worst first."""
    rows = run.rows(_ISSUES)
    return sorted(
        rows, key=lambda r: (-_severity(r["severity"]), -(r["occurrences"] or 0), r["code"] or "", r["ranks"])
    )


def _severity(word: str | None) -> int:
    return schema.SEVERITIES.index(word) if word in schema.SEVERITIES else len(schema.SEVERITIES)


# -- appendix ----------------------------------------------------------------------------------------------------------

_FIGURES = (
    "step_time",
    "throughput",
    "time_classes",
    "exposed_split",
    "bubble",
    "arrival_skew",
    "stragglers",
    "slow_ranks",
    "slow_groups",
    "slow_links",
    "clocks",
    "expert_imbalance",
    "collective_bandwidth",
)


def _appendix(job: Job | None, found: Sequence[Finding]) -> Row:
    library = all_queries()
    asked = [*_FIGURES, *(e.query for f in found for e in f.evidence if e.query is not None)]
    return {
        "job": None if job is None else json.loads(job.to_json()),
        "definitions": [{"term": term, "text": words} for term, words in DEFINITIONS],
        "versions": {
            "traceanalyzer": __version__,
            "duckdb": duckdb.__version__,
            "pyarrow": metadata.version("pyarrow"),
        },
        "queries": [
            {
                "name": name,
                "sql": library[name].sql,
                "gives": library[name].gives,
                "parameters": {p.name: p.default for p in library[name].parameters},
            }
            for name in dict.fromkeys(asked)
            if name in library
        ],
    }


def _cut(document: Row, left: list[Row]) -> Row:
    """The document with every long list shortened to MOST_ROWS; what is left out is added to ``left``."""
    for key in ("skew", "bandwidth", "peers", "memory", "issues", "time"):
        rows = document[key]
        if len(rows) > MOST_ROWS:
            left.append({"what": f"{key}: rows after the first {MOST_ROWS:,}", "rows": len(rows) - MOST_ROWS})
            document[key] = rows[:MOST_ROWS]
    document["left_out"] = left
    return {key: _plain(value) for key, value in document.items()}
