"""The SQL library: one documented query per .sql file, in the folders ``rank`` and ``run``.

A file opens with a header that is read by ``parse``; the rest is one SELECT. The header's lines:

    -- gives: what a row is, in one sentence
    -- needs: comm, kernel_place, query step_time     (views, tables that are made before the query runs, other queries)
    -- parameter: top BIGINT = 20 | meaning           (used as $top; NULL is a default too)
    -- column: dur_ns BIGINT | ns | meaning | what null means, or "never"

A line that does not open with a keyword goes on with the one before. A query of level ``rank`` sees one rank's rows and the
small tables of attribution; one of level ``run`` looks across ranks at the results of rank queries. ``problems`` says where
a file breaks these rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from traceanalyzer import axes, flops, kernel_names, schema, traffic
from traceanalyzer.attribute import across, attach, in_world_of, kernels, time
from traceanalyzer.attribute.roles import layout_of
from traceanalyzer.display import Shown, frame_of
from traceanalyzer.errors import InputError, JobError
from traceanalyzer.job import Job
from traceanalyzer.links import Links
from traceanalyzer.queries import experts, pipeline
from traceanalyzer.run import Run

if TYPE_CHECKING:
    import pandas

Level = Literal["rank", "run"]
LEVELS: tuple[Level, ...] = ("rank", "run")


@dataclass(frozen=True)
class Column:
    """A column of a result: DuckDB type, unit ('' for none), meaning, and what null stands for ('never': none occurs)."""

    name: str
    dtype: str
    unit: str
    doc: str
    nulls: str


@dataclass(frozen=True)
class Parameter:
    """A parameter of a query, its DuckDB type and default."""

    name: str
    dtype: str
    default: int | float | str | None
    doc: str


@dataclass(frozen=True)
class Query:
    """One file of the library. ``needs``: views and tables. ``uses``: queries whose results are tables of their name."""

    name: str
    level: Level
    gives: str
    needs: tuple[str, ...]
    uses: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    columns: tuple[Column, ...]
    sql: str = field(repr=False)


_HEADER = re.compile(r"^-- (gives|needs|parameter|column): (.*)$")
_PARAMETER = re.compile(r"^(\w+) ([A-Z]+) = (\S+) \| (.+)$")
_COLUMN = re.compile(r"^(\w+) ([A-Z]+(?:\[\])?) \| ([^|]*) ?\| ([^|]+) \| ([^|]+)$")
_NUMBERS = ("BIGINT", "INTEGER")


def parse(name: str, level: Level, text: str) -> Query:
    """A query from the text of its file. Raises ValueError that says what is wrong with the header."""
    entries: list[tuple[str, str]] = []
    lines = text.splitlines()
    body = 0
    for body, line in enumerate(lines):
        if not line.startswith("--"):
            break
        found = _HEADER.match(line)
        if found:
            entries.append((found[1], found[2].strip()))
        elif entries and line.startswith("--   "):
            entries[-1] = (entries[-1][0], f"{entries[-1][1]} {line[2:].strip()}")
        else:
            raise ValueError(f"{name}.sql, line {body + 1}: neither a header line nor the continuation of one")
    words = {key: [value for k, value in entries if k == key] for key in ("gives", "needs", "parameter", "column")}
    for key in ("gives", "needs"):
        if len(words[key]) != 1:
            raise ValueError(f"{name}.sql: {len(words[key])} header lines '-- {key}: ...', must be 1")
    if not words["column"]:
        raise ValueError(f"{name}.sql: no header line '-- column: ...'")
    needs = [need.strip() for need in words["needs"][0].split(",")]
    return Query(
        name,
        level,
        words["gives"][0],
        tuple(n for n in needs if not n.startswith("query ")),
        tuple(n.removeprefix("query ") for n in needs if n.startswith("query ")),
        tuple(_parameter(name, p) for p in words["parameter"]),
        tuple(_column(name, c) for c in words["column"]),
        "\n".join(lines[body:]).strip().rstrip(";"),
    )


def _parameter(name: str, text: str) -> Parameter:
    found = _PARAMETER.match(text)
    if found is None:
        raise ValueError(f"{name}.sql: parameter {text!r} is not 'name TYPE = default | meaning'")
    return Parameter(found[1], found[2], _value(found[2], found[3]), found[4].strip())


def _column(name: str, text: str) -> Column:
    found = _COLUMN.match(text)
    if found is None:
        raise ValueError(f"{name}.sql: column {text!r} is not 'name TYPE | unit | meaning | nulls'")
    return Column(found[1], found[2], *(found[i].strip() for i in (3, 4, 5)))


def _value(dtype: str, text: str) -> int | float | str | None:
    """A parameter's value from text. Raises ValueError if it is none of its type."""
    if text.upper() == "NULL":
        return None
    if dtype in _NUMBERS:
        return int(text)
    return float(text) if dtype == "DOUBLE" else text


@cache
def library() -> Mapping[str, Query]:
    """Every query by its name, rank level first, sorted. Raises ValueError for a file that cannot be read."""
    found: dict[str, Query] = {}
    for level in LEVELS:
        folder = resources.files(f"traceanalyzer.queries.{level}")
        for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
            if file.name.endswith(".sql"):
                name = file.name.removesuffix(".sql")
                if name in found:
                    raise ValueError(f"{name}.sql is in both folders")
                found[name] = parse(name, level, file.read_text(encoding="utf-8"))
    return found


def named(name: str) -> Query:
    """One query. Raises InputError that lists what there is."""
    found = library().get(name)
    if found is None:
        raise InputError(f"no query {name!r}. There are: {', '.join(library())}.")
    return found


# tables that are made before a query runs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """A table that Python or SQL makes from a run before a query reads it."""

    level: Level
    doc: str
    make: Callable[[Library], None]
    after: tuple[str, ...] = ()


@dataclass
class Library:
    """The queries over one run: makes what they need once, and keeps it. ``job`` None: nothing is known of the job.

    ``links``: measured bandwidths, for the time of calls at them; None: none are given.
    """

    run: Run
    job: Job | None = None
    links: Links | None = None
    _ready: set[str] = field(default_factory=set, repr=False)

    @classmethod
    def of(cls, run: Run, job: Job | None = None, links: Links | None = None) -> Library:
        """The library of a run, attributed with this job, else the job the run holds (intended, then captured).

        Raises JobError if the run's own job cannot be read.
        """
        attached = bool(run.value("SELECT count(*) FROM duckdb_tables() WHERE table_name = 'step_range'"))
        chosen = job
        for key in (schema.META_JOB_INTENDED, schema.META_JOB_CAPTURED):
            text = run.job_text(key)
            if chosen is None and text is not None:
                chosen = Job.from_json(text)
        chosen = None if chosen is None else in_world_of(run, chosen)
        if not attached or job is not None:
            attach(run, chosen)
        return cls(run, chosen, links)

    def prepare(self, query: Query) -> None:
        """Makes the tables a query needs."""
        for need in query.needs:
            if need in MADE:
                self._make(need)

    def _make(self, name: str) -> None:
        if name in self._ready:
            return
        made = MADE[name]
        for before in made.after:
            if before in MADE:
                self._make(before)
            else:
                self.result_table(before, {})
        made.make(self)
        self._ready.add(name)

    def result_table(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Makes the result of a query a table of its name."""
        self.run.table(name, self.ask(name, **parameters).arrow())

    def ask(self, name: str, **parameters: Any) -> Result:
        """Runs a query. Raises InputError for a query or a parameter that does not exist, or a value of another type."""
        query = named(name)
        known = {p.name: p for p in query.parameters}
        strange = sorted(set(parameters) - set(known))
        if strange:
            has = f"It has: {', '.join(known)}." if known else "It has none."
            raise InputError(f"query {name}: no parameter {', '.join(strange)}. {has}")
        values = {p.name: _checked(query, p, parameters.get(p.name, p.default)) for p in query.parameters}
        for used in query.uses:
            theirs = {p.name for p in named(used).parameters}
            self.result_table(used, {k: v for k, v in values.items() if k in theirs})
        self.prepare(query)
        return Result(query, self.run.connection.sql(query.sql, params=values or None).to_arrow_table())


def _checked(query: Query, parameter: Parameter, value: Any) -> Any:
    if isinstance(value, str):
        try:
            return _value(parameter.dtype, value) if parameter.dtype != "VARCHAR" else value
        except ValueError:
            raise InputError(
                f"query {query.name}: {parameter.name}={value}: must be a {parameter.dtype}, or NULL."
            ) from None
    fits = {"DOUBLE": (int, float), "BIGINT": (int,), "INTEGER": (int,)}.get(parameter.dtype, (str,))
    if value is not None and (not isinstance(value, fits) or isinstance(value, bool)):
        raise InputError(f"query {query.name}: {parameter.name}={value!r}: must be a {parameter.dtype}, or None.")
    return value


@dataclass(frozen=True)
class Result(Shown):
    """What a query found; its columns are described in ``query``."""

    query: Query
    table: pa.Table

    def arrow(self) -> pa.Table:
        """The rows as an Arrow table."""
        return self.table

    def frame(self) -> pandas.DataFrame:
        """The rows as a pandas data frame."""
        return frame_of(self.table)

    def rows(self) -> list[dict[str, Any]]:
        """The rows as dicts."""
        found: list[dict[str, Any]] = self.table.to_pylist()
        return found

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows())

    def __len__(self) -> int:
        return int(self.table.num_rows)


def _bus_factors(library: Library) -> None:
    sizes = [s for (s,) in library.run.tuples("SELECT DISTINCT group_size FROM comm WHERE group_size > 0")]
    rows = [(op, size, float(traffic.off_rank_factor(op, size))) for op in traffic.OPS for size in sizes]
    library.run.table(
        "bus_factor",
        pa.table(
            {
                "op": pa.array([r[0] for r in rows], pa.string()),
                "group_size": pa.array([r[1] for r in rows], pa.int32()),
                "factor": pa.array([r[2] for r in rows], pa.float64()),
            }
        ),
    )


_SIZED = """
SELECT DISTINCT op, group_size, payload_bytes, CASE WHEN hosts = 1 THEN 'intra' WHEN hosts > 1 THEN 'inter' END AS span
FROM matched_call WHERE group_size > 1 AND payload_bytes IS NOT NULL
"""


def _link_times(library: Library) -> None:
    """Time at measured bandwidths of every operation, size and span that occurs and that the file of links knows."""
    rows: list[tuple[Any, ...]] = []
    for op, size, payload, span in [] if library.links is None else library.run.tuples(_SIZED):
        found = library.links.time(op, span, size, payload) if library.links is not None else None
        if found is not None:
            rows.append((op, size, payload, span, found.time_ns, found.bus_gb_per_s, found.note))
    names = ("op", "group_size", "payload_bytes", "span", "link_time_ns", "link_bus_gb_per_s", "link_note")
    types = (pa.string(), pa.int32(), pa.int64(), pa.string(), pa.int64(), pa.float64(), pa.string())
    library.run.table("link_time", pa.table({n: pa.array([r[i] for r in rows], types[i]) for i, n in enumerate(names)}))


def _libraries(library: Library) -> None:
    names = library.run.tuples("SELECT DISTINCT name FROM run WHERE kind = 'kernel' AND name IS NOT NULL ORDER BY name")
    found = [(name, kernel_names.library_of(name)) for (name,) in names]
    known = [f for f in found if f[1] is not None]
    library.run.table(
        "communication_library",
        pa.table(
            {
                "name": pa.array([f[0] for f in known], pa.string()),
                "library": pa.array([f[1] for f in known], pa.string()),
            }
        ),
    )


def _step_flops(library: Library) -> None:
    """One row: what a step of the job computes, or why it is not known."""
    job, found, reason, dtype, tokens = library.job, None, None, None, None
    if job is None:
        reason = "no job is known: give --job, or import with it"
    else:
        dtype = flops.product_dtype(job)
        if job.global_batch_size is not None and job.seq_length is not None:
            tokens = job.global_batch_size * job.seq_length  # known also where operations are not
        try:
            found = flops.of_step(job)
        except JobError as error:
            reason = str(error)
    hardware = None if found is None or found.hardware is None else float(found.hardware)
    library.run.table(
        "step_flops",
        pa.table(
            {
                "tokens": pa.array([tokens], pa.int64()),
                "model_flops": pa.array([None if found is None else float(found.model)], pa.float64()),
                "hardware_flops": pa.array([hardware], pa.float64()),
                "dtype": pa.array([dtype], pa.string()),
                "world_size": pa.array([None if job is None else job.world_size], pa.int32()),
                "reason": pa.array([reason], pa.string()),
            }
        ),
    )


def _device_peak(library: Library) -> None:
    dtype = None if library.job is None else flops.product_dtype(library.job)
    names = [n for (n,) in library.run.tuples("SELECT DISTINCT device_name FROM rank WHERE device_name IS NOT NULL")]
    library.run.table(
        "device_peak",
        pa.table(
            {
                "device_name": pa.array(names, pa.string()),
                "tflops": pa.array([flops.peak_tflops(n, dtype) for n in names], pa.float64()),
            }
        ),
    )


def _stage_roles(library: Library) -> None:
    roles = [role for role in axes.ROLES if axes.within_stage(role)]
    library.run.table("stage_role", pa.table({"role": pa.array(roles, pa.string())}))


_LINKS = """
WITH sets AS (SELECT DISTINCT member_ranks, sender_rank FROM matched_call),
spread AS (SELECT *, unnest(member_ranks) AS rank FROM sets),
hosted AS (
  SELECT s.member_ranks, s.sender_rank, s.rank, h.host
  FROM spread s JOIN (SELECT rank, any_value(host) AS host FROM rank GROUP BY rank) h ON h.rank = s.rank
)
SELECT member_ranks, sender_rank,
       CASE WHEN sender_rank IS NULL OR count(DISTINCT host) = 1 THEN list_sort(list_distinct(list(host)))
            ELSE list(host ORDER BY rank <> sender_rank) END AS hosts
FROM hosted GROUP BY member_ranks, sender_rank HAVING count(host) = len(member_ranks)
"""


def _made_with_it(library: Library) -> None:
    """Tables that are made together with another one."""


MADE: dict[str, Made] = {
    "kernel_place": Made(
        "rank",
        "the view kernel with launch time, step, phase, micro-batch, layer, component, role and axis of each activity",
        lambda library: kernels.of_kernels(library.run, library.job),
    ),
    "communication_library": Made(
        "rank", "library of communication by the names of kernels and copies, where they tell", _libraries
    ),
    "device_step": Made(
        "rank",
        "begin and end of every step, the recording's end where nothing else ends it",
        lambda library: time.steps_with_ends(library.run),
    ),
    "device_time": Made(
        "rank",
        "time of every rank, device and step by class and by the roles that communicate (a sweep)",
        lambda library: library.run.table("device_time", time.of_steps(library.run)),
        ("kernel_place", "device_step"),
    ),
    "bus_factor": Made(
        "rank", "factor from bytes over time to bus bandwidth, by operation and group size", _bus_factors
    ),
    "link_time": Made(
        "run",
        "time of calls at the bandwidths of --links; empty without",
        _link_times,
        ("matched_call",),
    ),
    "step_flops": Made("rank", "what one step of the job computes, or why that is not known", _step_flops),
    "device_peak": Made(
        "rank", "peak rate of every device by its name, in the type in which the job multiplies", _device_peak
    ),
    "rank_stage": Made(
        "rank",
        "pipeline and stage of every rank, by the layout or by the ranks of its pipeline group",
        lambda library: library.run.table("rank_stage", pipeline.stages(library.run, layout_of(library.job))),
    ),
    "rank_like": Made(
        "rank",
        "ranks that do the same work: of one stage and tensor-parallel place, or one stage",
        lambda library: library.run.table("rank_like", pipeline.like(library.run, layout_of(library.job))),
        ("rank_stage",),
    ),
    "stage_role": Made("rank", "roles whose groups lie within one pipeline stage", _stage_roles),
    "link": Made(
        "run",
        "the hosts between which the ranks of matched calls move data, of messages in their direction",
        lambda library: library.run.table("link", library.run.arrow(_LINKS)),
        ("matched_call",),
    ),
    "expert_pass": Made(
        "run",
        "one pass of rows through the experts as one rank saw it: by splits or by the experts' counts, and the work between",
        lambda library: experts.make(library.run),
        ("kernel_place",),
    ),
    "marked_pass": Made(
        "rank",
        "a forward or backward pass by a range that a hook or a mark put around it",
        lambda library: pipeline.passes_without_kernels(library.run),
    ),
    "host_pass": Made(
        "rank",
        "of ranks without device work an operator that autograd ran backward, or one of autograd's functions",
        _made_with_it,
        ("marked_pass",),
    ),
    "pipeline_time": Made(
        "run",
        "time of every stage by class in the parts of its pipeline's window (a sweep)",
        lambda library: library.run.table("pipeline_time", pipeline.of_parts(library.run)),
        ("kernel_place", "rank_stage", "pass_bounds", "marked_pass", "clock"),
    ),
    "split_time": Made(
        "run",
        "device_time with exposed communication split into transfer and waiting, where the call is matched over its ranks",
        lambda library: library.run.table("split_time", time.of_steps(library.run, time.parts_of_calls(library.run))),
        ("kernel_place", "device_step", "matched_call"),
    ),
    "matched_call": Made("run", "one call over all ranks that recorded it", lambda library: across.make(library.run)),
    "matched_member": Made("run", "one rank's part in a matched call", _made_with_it, ("matched_call",)),
    "unmatched_call": Made("run", "a call without a counterpart, and why", _made_with_it, ("matched_call",)),
    "clock": Made("run", "the clock of one rank against its reference rank", _made_with_it, ("matched_call",)),
    "end_spread": Made("run", "how far apart a call's ends are on its ranks", _made_with_it, ("matched_call",)),
    "arrival": Made("run", "when one rank came to one matched call", _made_with_it, ("matched_call",)),
    "lateness": Made("run", "how late it came, and who owns that", _made_with_it, ("matched_call",)),
}
"""Tables beside the views that a query may need: their level, what a row is, how they are made, what is made before."""

VIEWS: frozenset[str] = frozenset(schema.VIEWS)


# rules of the library ----------------------------------------------------------------------------------------------------

_COMMENT = re.compile(r"--[^\n]*")
_JOIN = re.compile(
    r"\b((?:asof|cross|positional|semi|anti|left|right|full|inner|outer)\s+)*join\b(.*?)"
    r"(?=\b(?:asof|cross|positional|semi|anti|left|right|full|inner|join|where|group|order|having|window|qualify|"
    r"union|limit|select)\b|$)",
    re.IGNORECASE | re.DOTALL,
)
_UNEQUAL = re.compile(r"<>|!=|<=|>=|<|>|\bbetween\b", re.IGNORECASE)
_COMMA_JOIN = re.compile(r"\bfrom\s+\w+(?:\s+(?:as\s+)?\w+)?\s*,\s*(?!unnest|lateral)\w", re.IGNORECASE)


def problems(query: Query) -> list[str]:
    """Where a query breaks the rules that its text alone shows; empty if nowhere."""
    body = _COMMENT.sub("", query.sql)
    text = re.sub(r"'[^']*'", "''", body)
    found: list[str] = []
    for match in _JOIN.finditer(text):
        whole = match[0].lower()
        if whole.startswith("cross"):
            found.append("CROSS JOIN: give the columns that the rows share")
        elif not whole.startswith("asof") and _UNEQUAL.search(match[2].split(" on ", 1)[-1]):
            found.append(f"a join on a range or an inequality, which is quadratic: {' '.join(match[0].split())}")
    if _COMMA_JOIN.search(text):
        found.append("tables joined by a comma: give the columns that the rows share")
    used = set(re.findall(r"\b\w+\b", text))
    known = VIEWS | set(MADE) | set(library())
    wanted = set(query.needs) | set(query.uses)
    sources = set(re.findall(r"\b(?:from|join)\s+(\w+)", text, re.IGNORECASE))
    found += [f"needs {n}, which is neither a view nor a table nor a query" for n in sorted(wanted - known)]
    found += [f"needs {n} and does not read it" for n in sorted(wanted - used)]
    found += [f"reads {n} and does not need it" for n in sorted((sources & known) - wanted)]
    found += [f"parameter {p.name} is not used" for p in query.parameters if f"${p.name}" not in text]
    if query.name in VIEWS | set(MADE):
        found.append("has the name of a view or a table")
    if query.level == "rank":
        if not any(c.name == "rank" for c in query.columns):
            found.append("of level rank without a column rank")
        across = [n for n in query.needs if n in MADE and MADE[n].level == "run"]
        across += [n for n in query.uses if library()[n].level == "run"]
        found += [f"of level rank, and needs {n} of level run" for n in across]
    return found


def mismatches(result: Result) -> list[str]:
    """Where the header of a query says other columns or types than DuckDB gives; empty if nowhere."""
    import duckdb

    relation = duckdb.from_arrow(result.table)
    given = list(zip(relation.columns, map(str, relation.types), strict=True))
    said = [(c.name, c.dtype) for c in result.query.columns]
    if given == said:
        return []
    return [f"said {said[i] if i < len(said) else None}, gave {given[i] if i < len(given) else None}"
            for i in range(max(len(said), len(given)))
            if i >= len(said) or i >= len(given) or said[i] != given[i]]  # fmt: skip
