"""A collector's folder (RUN_DIR) -> one run table: logs of the hooks, windows of the profiler, flight recorder dumps.

A call of the hooks has one number in its process, which stands in the log and on the range around the call in a trace. It
becomes the call's ``call_id`` in the rows of both, so that the view ``comm`` can make one row of them; calls that a trace
alone holds are numbered behind (docs/decisions/0007-hook-and-trace-are-one-call.md). One log of a rank counts: of a rank
that was started again, the last.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from traceanalyzer import schema
from traceanalyzer.errors import InputError, TraceAnalyzerError
from traceanalyzer.importers import STATUSES, ImportResult, merge_files, read_all
from traceanalyzer.importers.hook_log import LogSummary
from traceanalyzer.importers.kineto import Summary
from traceanalyzer.importers.spool import RunWriter, table_of

_SORT_MEMORY = "1GB"
_NEAR_NS = 1_000_000
"""Calls without a number are taken for the hook's call of the same operation if both are each other's nearest and
begin less than this apart: clocks of hook and profiler differ by microseconds."""
_RANK_IN_NAME = re.compile(r"^r(\d+)[-.]")
_PID_IN_NAME = re.compile(r"^p(\d+)[-.]")
_TRACES = (".json", ".json.gz")
_UNFINISHED = ".json.tmp"
"""What the profiler calls a trace that it is writing."""
_DUMPS = (".pickle", ".json", ".json.gz")

JobText = Callable[[Mapping[str, Any]], str]
"""What makes the JSON text of a Job of what a process says of itself; raises InputError or JobError."""


@dataclass(frozen=True)
class RunDir:
    """The files of a collector's folder, sorted by name. launch: what run.json says, {} without one.

    unfinished: traces that were, or are, being written; not among ``files``.
    """

    path: Path
    logs: list[Path]
    traces: list[Path]
    dumps: list[Path]
    launch: dict[str, Any] = field(default_factory=dict)
    launch_problem: str | None = None
    unfinished: list[Path] = field(default_factory=list)

    @property
    def files(self) -> list[Path]:
        return [*self.logs, *self.traces, *self.dumps]


def is_run_dir(path: Path) -> bool:
    """Whether a path is a collector's folder: one with logs, or with run.json and recordings."""
    if not path.is_dir():
        return False
    if any((path / "log").glob("*.talog")):
        return True
    return (path / "run.json").is_file() and any((path / name).is_dir() for name in ("log", "trace", "flight"))


def open_run_dir(path: Path) -> RunDir:
    """The files of a collector's folder. Raises InputError where it holds no recording at all."""

    def of(folder: str, endings: tuple[str, ...]) -> list[Path]:
        inside = (path / folder).iterdir() if (path / folder).is_dir() else iter(())
        names = {p.name: p for p in inside if p.is_file() and p.name.endswith(endings)}
        # a trace has its name when it is whole, and another once it is packed
        return [p for name, p in sorted(names.items()) if f"{name}.gz" not in names]

    launch, problem = {}, None
    if (path / "run.json").is_file():
        try:
            content = json.loads((path / "run.json").read_text(encoding="utf-8"))
            launch = content if isinstance(content, dict) else {}
        except (OSError, ValueError) as error:
            problem = str(error)
    traces = of("trace", _TRACES)
    whole = {_stem(p.name) for p in traces}
    unfinished = [p for p in of("trace", (_UNFINISHED,)) if _stem(p.name.removesuffix(".tmp")) not in whole]
    found = RunDir(path, of("log", (".talog",)), traces, of("flight", _DUMPS), launch, problem, unfinished)
    if not found.files:
        raise InputError(f"{path}: no log, trace or dump in it: the job left nothing, or has not begun to record.")
    return found


def import_run_dir(
    run_dir: Path,
    out: Path,
    *,
    metadata: Mapping[str, str] | None = None,
    job_text: JobText | None = None,
    workers: int = 1,
    progress: Callable[[Path, int], None] | None = None,
    drop_raw: bool | None = None,
) -> ImportResult:
    """Imports a collector's folder into the Parquet file ``out``, which appears when whole.

    ``metadata`` goes into the key-value metadata as it is; ``job_text`` makes the captured job of what the lowest rank
    says of itself (an error of it is an issue). ``progress`` as for import_traces. ``drop_raw`` deletes the traces that
    were read whole, once the run is written; None: as the launch was asked (``keep_raw`` in run.json), else not. Missing
    ranks, killed ranks and damage are issues; what is left opens.
    Raises InputError for a folder without any recording.
    """
    found = open_run_dir(Path(run_dir))
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".traceanalyzer-", dir=out.parent))
    try:
        told = [_rank_of_name(p) for p in found.files]
        summaries = read_all(found.files, work, told, workers, progress)
        result = _put_together(found, summaries, out, dict(metadata or {}), job_text, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if drop_raw is None:
        asked = found.launch.get("config")
        drop_raw = isinstance(asked, dict) and asked.get("keep_raw") is False
    if drop_raw and result.out is not None:
        whole = {s.path for s in summaries if s.status in ("complete", "complete with rejects")}
        for trace in found.traces:
            if str(trace) in whole:
                trace.unlink(missing_ok=True)
    return result


def _stem(name: str) -> str:
    return name.removesuffix(".gz").removesuffix(".json")


def _rank_of_name(path: Path) -> int | None:
    named = _RANK_IN_NAME.match(path.name)
    return int(named[1]) if named else None


# choosing ----------------------------------------------------------------------------------------------------------------


@dataclass
class _Rank:
    """What was recorded of one rank."""

    log: LogSummary | None = None
    traces: list[Summary] = field(default_factory=list)
    dump: Summary | None = None


class _Issues(list[dict[str, Any]]):
    def say(
        self, severity: str, code: str, sentence: str, n: int = 1, *, file: str | None = None, rank: int | None = None
    ) -> None:
        self.append(
            {
                "severity": severity,
                "code": code,
                "sentence": sentence,
                "occurrences": n,
                "location": file,
                "source_file": file,
                "rank": rank,
                "source": "hook",
            }
        )


def _put_together(
    found: RunDir,
    summaries: list[Summary],
    out: Path,
    metadata: dict[str, str],
    job_text: JobText | None,
    work: Path,
) -> ImportResult:
    issues = _Issues()
    for s in summaries:
        if s.status == "refused":
            issues.say("error", "file_refused", s.reason or "refused", file=s.file, rank=s.rank)
    usable = [s for s in summaries if s.status != "refused"]
    logs = [s for s in usable if isinstance(s, LogSummary)]
    ranks, left_out = _choose(logs, [s for s in usable if not isinstance(s, LogSummary)], issues)
    if not ranks:
        return ImportResult("refused", None, summaries, [], issues=_of_files(usable) + issues)
    kept_logs = [r.log for r in ranks.values() if r.log is not None]
    if found.launch_problem is not None:
        issues.say(
            "warning", "launch_unreadable", f"run.json cannot be read ({found.launch_problem}).", file="run.json"
        )
    _say_what_is_missing(found, ranks, kept_logs, summaries, issues)
    job = _captured(kept_logs, job_text, issues)
    if job is not None:
        metadata.setdefault(schema.META_JOB_CAPTURED, job)
    if found.launch:
        metadata[schema.META_LAUNCH] = json.dumps(found.launch, sort_keys=True)
    parts: list[Path] = []
    for rank in sorted(ranks, key=lambda r: -1 if r is None else r):
        parts.append(_combine(rank, ranks[rank], work, issues))
    kept = [s for s in usable if s.file not in left_out]
    worst = max((STATUSES.index(s.status) for s in kept), default=0)
    lost = any(i["severity"] in ("data_loss", "error") for i in issues)
    status = STATUSES[max(worst, STATUSES.index("partial"))] if lost else STATUSES[worst]
    sources = ", ".join(sorted({s.source for s in kept}))
    metadata[schema.META_IMPORT] = json.dumps({"source": sources, "status": status})
    rows = merge_files(parts, out, metadata, extra_issues=issues)
    known = sorted(r for r in ranks if r is not None)
    return ImportResult(status, out, summaries, known, rows, _of_files(kept) + issues)


def _of_files(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    return [{**issue, "rank": s.rank, "source_file": s.file} for s in summaries for issue in s.issues]


def _choose(
    logs: Sequence[LogSummary], others: Sequence[Summary], issues: _Issues
) -> tuple[dict[int | None, _Rank], set[str]]:
    """What counts of each rank, and the names of the files that do not: those of processes that were started again."""
    ranks: dict[int | None, _Rank] = {}
    left_out: set[str] = set()
    stale_pids: set[tuple[int | None, int | None]] = set()
    by_rank: dict[int | None, list[LogSummary]] = defaultdict(list)
    for log in logs:
        by_rank[log.rank].append(log)
    if None in by_rank and (len(by_rank) > 1 or len(by_rank[None]) > 1):
        for log in by_rank.pop(None):  # a launcher, a data loader: processes that never were a rank
            left_out.add(log.file)
            if log.calls:
                issues.say(
                    "data_loss",
                    "log_without_rank",
                    f"{log.file} does not say which rank it is of: its {log.calls} calls were left out.",
                    log.calls,
                    file=log.file,
                )
    for rank, mine in by_rank.items():
        mine.sort(key=lambda s: (s.restart or 0, s.started_ns or s.window_start_ns or 0, s.file))
        ranks[rank] = _Rank(log=mine[-1])
        for log in mine[:-1]:
            left_out.add(log.file)
            stale_pids.add((rank, log.pid))
            during = "" if log.steps is None else f", steps {log.steps[0]} to {log.steps[1]}"
            issues.say(
                "warning" if log.calls else "info",
                "rank_restarted",
                f"Rank {rank} was started again: the log of its earlier process, {log.file} ({log.calls} calls{during}), was "
                "left out. To see it, import it by itself: traceanalyzer import.",
                file=log.file,
                rank=rank,
            )
    pid_of = {r.log.pid for r in ranks.values() if r.log is not None}
    worlds = [r.log.world_size for r in ranks.values() if r.log is not None and r.log.world_size is not None]
    newest = max((r.log for r in ranks.values() if r.log is not None), key=lambda s: s.started_ns or 0, default=None)
    if len(set(worlds)) > 1 and newest is not None and newest.world_size is not None:
        gone = [r for r in ranks if r is not None and r >= newest.world_size]
        for rank in gone:
            earlier = ranks.pop(rank).log
            if earlier is not None:
                left_out.add(earlier.file)
                stale_pids.add((rank, earlier.pid))
        if gone:
            issues.say(
                "warning",
                "world_shrank",
                f"The job was started again with {newest.world_size} ranks: what ranks {_listed(gone)} recorded before was "
                "left out.",
                len(gone),
            )
    rank_of_pid = {log.pid: log.rank for log in logs if log.rank is not None}
    for other in others:
        trace_pid = other.pid
        if other.rank is None and (named := _PID_IN_NAME.match(other.file)):  # written before the rank was known
            other.rank = rank_of_pid.get(int(named[1]))
        if (other.rank, trace_pid) in stale_pids and trace_pid not in pid_of:
            left_out.add(other.file)
            issues.say(
                "warning",
                "window_of_earlier_process",
                f"{other.file} was recorded by an earlier process of rank {other.rank} and was left out.",
                file=other.file,
                rank=other.rank,
            )
            continue
        if other.rank is None and (len(ranks) > 1 or None not in ranks) and (ranks or len(others) > 1):
            left_out.add(other.file)
            issues.say(
                "error",
                "file_without_rank",
                f"{other.file} states no rank, neither inside nor in its name, so it was left out.",
                file=other.file,
            )
            continue
        entry = ranks.setdefault(other.rank, _Rank())
        if other.source == "flight_recorder":
            if entry.dump is not None:
                left_out.add(entry.dump.file)
            entry.dump = other
        else:
            entry.traces.append(other)
    for entry in ranks.values():
        entry.traces.sort(key=lambda s: (s.window_start_ns or 0, s.file))
    return ranks, left_out


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8]))
    return shown + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _say_what_is_missing(
    found: RunDir,
    ranks: Mapping[int | None, _Rank],
    logs: Sequence[LogSummary],
    summaries: Sequence[Summary],
    issues: _Issues,
) -> None:
    world = max((log.world_size for log in logs if log.world_size is not None), default=None)
    config = found.launch.get("config")
    wanted = config.get("ranks") if isinstance(config, dict) else None
    expected = set(range(world)) if world is not None else set[int]()
    if isinstance(wanted, list) and wanted:
        expected &= {r for r in wanted if isinstance(r, int)}
    missing = sorted(expected - {r for r, entry in ranks.items() if r is not None and entry.log is not None})
    if missing and logs:
        issues.say(
            "data_loss",
            "rank_missing",
            f"{len(missing)} of {world} ranks left no log: {_listed(missing)}. What they sent is unknown.",
            len(missing),
        )
    silent = [log.rank for log in logs if not log.calls and log.rank is not None]
    if silent and len(silent) < len(logs):
        issues.say(
            "warning",
            "rank_without_calls",
            f"The logs of ranks {_listed(silent)} hold no call, those of other ranks do.",
            len(silent),
        )
    for path in found.unfinished:
        issues.say(
            "data_loss",
            "window_unfinished",
            f"{path.name}: the profiler's trace was left while it was written (or still is), and was left out. To see what "
            "is in it, import it by itself: traceanalyzer import.",
            file=path.name,
            rank=_rank_of_name(path),
        )
    read = {_stem(s.file) for s in summaries}
    for log in logs:
        for window in log.windows:
            if window.get("state") == "open":
                issues.say(
                    "data_loss",
                    "window_lost",
                    f"Rank {log.rank} was recording a window of the profiler from step {window.get('step_from')} on (to "
                    f"{window.get('step_to')} as planned) when its log ends: that trace is lost, the log's calls are there.",
                    rank=log.rank,
                )
            name = Path(str(window.get("file") or "")).name
            if name and _stem(name) not in read:
                state = window.get("state")
                issues.say(
                    "data_loss",
                    "window_missing",
                    f"Rank {log.rank} recorded a window of the profiler (steps {window.get('step_from')} to "
                    f"{window.get('step_to')}) into {name}, which is not there"
                    + (f" (state: {state})." if state else "."),
                    file=name,
                    rank=log.rank,
                )


def _captured(logs: Sequence[LogSummary], job_text: JobText | None, issues: _Issues) -> str | None:
    """The captured job as JSON text: what the lowest rank that says anything says; an issue where others differ."""
    texts: dict[str, list[int]] = {}
    problems: dict[str, list[int]] = {}
    for log in sorted(logs, key=lambda log: log.rank or 0):
        if log.job is None or job_text is None:
            continue
        try:
            texts.setdefault(job_text(log.job), []).append(log.rank or 0)
        except TraceAnalyzerError as error:
            problems.setdefault(str(error), []).append(log.rank or 0)
    for problem, of in problems.items():
        issues.say(
            "warning",
            "job_not_understood",
            f"What rank{'s' if len(of) > 1 else ''} {_listed(of)} said of the job cannot be used: {problem}",
            len(of),
        )
    if not texts:
        return None
    first = min(texts, key=lambda text: texts[text][0])
    for text, of in texts.items():
        if text != first:
            a, b = json.loads(first), json.loads(text)
            names = (
                sorted(k for k in {*a, *b} if a.get(k) != b.get(k))
                if isinstance(a, dict) and isinstance(b, dict)
                else []
            )
            issues.say(
                "warning",
                "job_differs",
                f"Ranks {_listed(of)} describe another job than rank {texts[first][0]}, whose words were kept "
                f"({', '.join(names[:8])} differ).",
                len(of),
            )
    return first


# one rank's sources to one part --------------------------------------------------------------------------------------


class _Shift(NamedTuple):
    """How the ids of one trace move: calls and groups of calls without a number of the hook get these added."""

    calls: int
    coalesced: int


def _combine(rank: int | None, entry: _Rank, work: Path, issues: _Issues) -> Path:
    """One run table of what was recorded of a rank, ids settled, rows in order."""
    sources = [s for s in (entry.log, *entry.traces, entry.dump) if s is not None]
    if len(sources) == 1:
        assert sources[0].part is not None
        return Path(sources[0].part)
    folder = Path(tempfile.mkdtemp(dir=work))
    connection = duckdb.connect(":memory:")
    try:
        connection.execute(f"SET memory_limit='{_SORT_MEMORY}'")
        connection.execute("SET temp_directory=?", [str(folder / "sort")])
        selects = _selects(connection, rank, entry, issues)
        path = folder / "rank.parquet"
        with RunWriter(path, {}) as writer:
            for kind in sorted(schema.KINDS):
                names = [c.name for c in schema.columns_of(kind) if c.name != "kind"]
                rows = " UNION ALL ".join(
                    f"SELECT {', '.join(s.of(n, kind) + ' AS ' + n for n in names)}, {i} AS part, file_row_number AS place "
                    f"FROM {s.table} WHERE kind = '{kind}'"
                    for i, s in enumerate(selects)
                )
                query = _FOLDS.get(kind, "SELECT * FROM ({rows})").format(rows=rows, names=", ".join(names))
                order = {"comm_record": "coalesce(start_ns, t_issue_ns)", "process_group": "group_id"}.get(
                    kind, "start_ns" if kind in ("cpu_op", "expert_rows", "kernel", "span") else "part"
                )
                found = connection.sql(f"SELECT {', '.join(names)} FROM ({query}) ORDER BY {order}, part, place")
                if kind == "rank":
                    writer.write(kind, [table_of(kind, _one_row_of_each(found.to_arrow_table().to_pylist()))])
                else:
                    writer.write(kind, (_encoded(batch) for batch in found.to_arrow_reader(65_536)))
        return path
    finally:
        connection.close()


class _Select(NamedTuple):
    """Where one source's rows are and what becomes of their ids: SQL by column, others as they are."""

    table: str
    replaced: dict[str, str]

    def of(self, column: str, kind: str) -> str:
        return self.replaced.get(column, column) if kind in ("comm_record", "kernel") or column == "rank" else column


_FOLDS = {
    # several records of the backend inside one call of the hook are one call, from the first start to the last end
    "comm_record": """SELECT * REPLACE (min(start_ns) OVER same AS start_ns,
                        max(start_ns + dur_ns) OVER same - min(start_ns) OVER same AS dur_ns) FROM ({rows})
                      WINDOW same AS (PARTITION BY source, coalesce(call_id, -1 - place))
                      QUALIFY call_id IS NULL OR source <> 'kineto'
                        OR row_number() OVER (PARTITION BY source, call_id ORDER BY part, place) = 1""",
    # a group is one row, of the source that knows its ranks, the hook before the others
    "process_group": """SELECT * FROM ({rows})
                        QUALIFY row_number() OVER (PARTITION BY group_id ORDER BY ranks IS NULL, part, place) = 1""",
}


def _selects(connection: duckdb.DuckDBPyConnection, rank: int | None, entry: _Rank, issues: _Issues) -> list[_Select]:
    """The sources of a rank with their ids settled, the hook's first."""
    same_rank = {"rank": "CAST(NULL AS INTEGER)" if rank is None else str(rank)}
    found: list[_Select] = []
    free = 0
    if entry.log is not None:
        found.append(_Select(_view(connection, "hook", entry.log), same_rank))
        free = entry.log.last_call + 1
    for i, trace in enumerate(entry.traces):
        table = _view(connection, f"trace{i}", trace)
        calls, joint, numbered, top = connection.execute(
            "SELECT coalesce(max(call_id), -1), coalesce(max(coalesce_id), -1), count(hook_call), coalesce(max(hook_call), "
            f"-1) FROM {table} WHERE kind = 'comm_record'"
        ).fetchall()[0]
        free = max(free, top + 1)
        number = "hook_call"
        if entry.log is not None and entry.log.calls and calls >= 0:
            if numbered and _is_another_process(connection, table):
                issues.say(
                    "data_loss",
                    "window_of_another_process",
                    f"{trace.file} numbers its calls otherwise than the log of rank {rank}: it is another process's and was "
                    "left out.",
                    file=trace.file,
                    rank=rank,
                )
                continue
            if not numbered:
                number = _by_time(connection, table, i)
            alone = connection.execute(
                f"SELECT count(*) FROM {table} WHERE kind = 'comm_record' AND {number} IS NULL"
            ).fetchall()[0][0]
            if not numbered and alone < calls + 1:
                issues.say(
                    "info",
                    "calls_joined_by_time",
                    f"{trace.file} does not number its calls: they were laid beside the log's by operation and time "
                    "(inferred).",
                    calls + 1 - alone,
                    file=trace.file,
                    rank=rank,
                )
            if alone:
                issues.say(
                    "warning",
                    "calls_without_hook",
                    f"{trace.file} holds calls that the hooks did not record: they count as calls of their own.",
                    alone,
                    file=trace.file,
                    rank=rank,
                )
        shift = _Shift(free, free)
        free += max(calls, joint) + 1
        found.append(
            _Select(
                table,
                {
                    **same_rank,
                    "call_id": f"coalesce({number}, call_id + {shift.calls})",
                    "coalesce_id": f"coalesce_id + {shift.coalesced}",
                },
            )
        )
    if entry.dump is not None:
        # its calls are those of the other sources, and which is which is not known
        beside = {"call_id": "CAST(NULL AS BIGINT)", "coalesce_id": "CAST(NULL AS BIGINT)"} if found else {}
        found.append(_Select(_view(connection, "dump", entry.dump), {**same_rank, **beside}))
    return found


def _view(connection: duckdb.DuckDBPyConnection, name: str, summary: Summary) -> str:
    assert summary.part is not None
    file = "'" + summary.part.replace("'", "''") + "'"
    connection.execute(f"CREATE VIEW {name} AS SELECT * FROM read_parquet({file}, file_row_number=true)")
    return name


def _is_another_process(connection: duckdb.DuckDBPyConnection, table: str) -> bool:
    """Whether the numbers of a trace's calls lead to calls of other operations in the log, more often than not."""
    alike, other = connection.execute(
        f"""SELECT count(*) FILTER (h.op = k.op), count(*) FILTER (h.op <> k.op)
            FROM {table} k JOIN hook h ON h.call_id = k.hook_call
            WHERE h.kind = 'comm_record' AND k.kind = 'comm_record'"""
    ).fetchall()[0]
    return bool(other > alike)


def _by_time(connection: duckdb.DuckDBPyConnection, table: str, i: int) -> str:
    """SQL of the hook's number of a trace's calls that state none, by operation and nearest time."""
    query = "SELECT op, {0}, t_issue_ns FROM {1} WHERE kind = 'comm_record' AND op IS NOT NULL AND t_issue_ns IS NOT NULL {2}"
    low, high = connection.execute(
        f"SELECT min(t_issue_ns), max(t_issue_ns) FROM {table} WHERE kind = 'comm_record'"
    ).fetchall()[0]
    mine: dict[int, int] = {}
    if low is not None:
        inside = f"AND t_issue_ns BETWEEN {low - _NEAR_NS} AND {high + _NEAR_NS}"
        hook = connection.sql(query.format("call_id", "hook", inside)).to_arrow_table()
        kineto = connection.sql(query.format("call_id", table, "")).to_arrow_table()
        for op in set(hook.column(0).to_pylist()) & set(kineto.column(0).to_pylist()):
            a, b = (t.filter(pc.call_function("equal", [t.column(0), op])) for t in (hook, kineto))
            mine.update(_nearest(*(np.asarray(t.column(c)) for t in (a, b) for c in (1, 2))))
    pairs = pa.table({"k": pa.array(list(mine), pa.int64()), "h": pa.array(list(mine.values()), pa.int64())})
    connection.register(f"pairs{i}", pairs)
    return f"(SELECT p.h FROM pairs{i} p WHERE p.k = {table}.call_id)"


def _nearest(hook: Any, hook_at: Any, other: Any, other_at: Any) -> dict[int, int]:
    """Number of another source -> the hook's number, for calls that are each other's nearest in time."""

    def nearest(of: Any, among: Any) -> Any:
        right = np.clip(np.searchsorted(among, of), 0, len(among) - 1)
        left = np.maximum(right - 1, 0)
        return np.where(np.abs(among[left] - of) <= np.abs(among[right] - of), left, right)

    a, b = np.argsort(hook_at, kind="stable"), np.argsort(other_at, kind="stable")
    hook, hook_at, other, other_at = hook[a], hook_at[a], other[b], other_at[b]
    forth, back = nearest(other_at, hook_at), nearest(hook_at, other_at)
    index = np.arange(len(other))
    good = (back[forth] == index) & (np.abs(hook_at[forth] - other_at) < _NEAR_NS)
    return dict(zip(other[good].tolist(), hook[forth[good]].tolist(), strict=True))


def _one_row_of_each(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row of kind rank for each source: the windows of a rank become one recording."""
    by_source: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_source[row["source"]].append(row)
    folded = []
    for mine in by_source.values():
        row = {name: next((r[name] for r in mine if r[name] is not None), None) for name in mine[0]}
        for name, of in _FOLDED.items():
            values = [r[name] for r in mine if r[name] is not None]
            row[name] = of(values) if values else None
        folded.append(row)
    return folded


def _worst(statuses: Sequence[str]) -> str:
    return max(statuses, key=lambda s: STATUSES.index(s) if s in STATUSES else len(STATUSES))


_FOLDED: dict[str, Callable[[Any], Any]] = {
    "window_start_ns": min,
    "window_end_ns": max,
    "host_start_ns": min,
    "source_file": ", ".join,
    "source_sha256": ", ".join,
    "events_read": sum,
    "rows_kept": sum,
    "rows_rejected": sum,
    "import_status": _worst,
}


def _encoded(batch: pa.RecordBatch) -> pa.Table:
    """DuckDB's text as dictionaries where the schema has them."""
    columns = {
        name: column.dictionary_encode() if pa.types.is_dictionary(schema.BY_NAME[name].dtype) else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    return pa.table(columns)
