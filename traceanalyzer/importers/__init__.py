"""Importers: one module per outside format, each giving rows of the run table. This module runs them over many files.

One process reads one file. Ranks are settled when all files are read: a file without a rank stays without one if it is
alone and is left out by name among several; of two files that claim one rank, a trace or log stays before a dump of the
flight recorder or lines of NCCL's Inspector, else the one recorded first.
"""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.process
import json
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from traceanalyzer import schema
from traceanalyzer.errors import InputError
from traceanalyzer.importers import flight_recorder, hook_log, nccl_inspector
from traceanalyzer.importers.kineto import Summary, import_file, trace_files
from traceanalyzer.importers.spool import RunWriter, table_of

__all__ = ["ImportResult", "import_traces", "merge_files", "read_all", "trace_files"]

STATUSES = ("complete", "complete with rejects", "partial", "refused")
"""From best to worst."""

_BESIDE = (flight_recorder.SOURCE, nccl_inspector.SOURCE)
"""Sources that know of calls alone: what else is known of a rank counts first."""


@dataclass
class ImportResult:
    """What an import gave. ``out`` is None for a refusal: then no file was written."""

    status: str
    out: Path | None
    files: list[Summary]
    ranks: list[int]
    rows: dict[str, int] = field(default_factory=dict)
    issues: list[dict[str, Any]] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """The JSON document ``traceanalyzer.import/1``."""
        return {
            "schema": "traceanalyzer.import/1",
            "status": self.status,
            "out": None if self.out is None else str(self.out),
            "ranks": self.ranks,
            "rows": self.rows,
            "files": [
                {
                    "file": f.file,
                    "status": f.status,
                    "rank": f.rank,
                    "rank_source": f.rank_source,
                    "reason": f.reason,
                }
                for f in self.files
            ],
            "issues": [
                {
                    key: issue.get(key)
                    for key in ("severity", "code", "sentence", "occurrences", "location", "rank", "source_file")
                }
                for issue in self.issues
            ],
        }


def import_traces(
    paths: Sequence[Path],
    out: Path,
    *,
    metadata: Mapping[str, str] | None = None,
    told_rank: int | None = None,
    workers: int = 1,
    progress: Callable[[Path, int], None] | None = None,
) -> ImportResult:
    """Imports recordings into a run table: Kineto traces (files or folders), a collector's logs, flight recorder dumps.

    ``out`` is a Parquet file, or a folder (an existing one, or a name without suffix): then one file per rank, and
    rank files of an earlier import that are not part of this one are removed. Nothing changes there before everything is
    read. ``metadata`` goes into the key-value metadata as it is. ``told_rank`` names
    the rank of a file that does not state one, so it goes with one file only. ``progress`` is called with a file and how
    many of its bytes are read (with one worker), or with a file and its size when it is done. Raises InputError where a
    path does not exist; damage in a file is an issue, not an error.
    """
    files = trace_files([Path(p) for p in paths])
    if told_rank is not None and len(files) > 1:
        raise InputError(
            f"--rank names the rank of one file, and {len(files)} were given. Import the file without a rank by itself, or "
            "name the files after their ranks (rank0.json)."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".traceanalyzer-", dir=out.parent))
    try:
        summaries = read_all(files, work, [told_rank] * len(files), workers, progress)
        return _settle(summaries, out, dict(metadata or {}), work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _read_one(path: Path, folder: Path, told_rank: int | None, progress: Callable[[int], None] | None) -> Summary:
    """Reads one file by what it is: a collector's log, a flight recorder's dump, NCCL's Inspector's lines, else a trace."""
    folder.mkdir()
    if hook_log.is_log(path):
        return hook_log.import_file(path, folder / "part.parquet", told_rank=told_rank, progress=progress)
    if flight_recorder.is_dump(path):
        return flight_recorder.import_file(path, folder / "part.parquet", told_rank=told_rank)
    if nccl_inspector.is_log(path):
        return nccl_inspector.import_file(path, folder / "part.parquet", told_rank=told_rank)
    return import_file(path, folder / "part.parquet", work=folder, told_rank=told_rank, progress=progress)


def read_all(
    files: Sequence[Path],
    work: Path,
    told_ranks: Sequence[int | None],
    workers: int,
    progress: Callable[[Path, int], None] | None,
) -> list[Summary]:
    """What every file gave, in order, its rows in folders inside ``work``; ``told_ranks`` for files that state none."""
    folders = [work / str(i) for i in range(len(files))]
    if workers <= 1 or len(files) == 1:
        return [
            _read_one(f, d, r, None if progress is None else lambda n, f=f: progress(f, n))  # type: ignore[misc]
            for f, d, r in zip(files, folders, told_ranks, strict=True)
        ]
    # spawn: a fork would copy DuckDB's and Arrow's threads in an unknown state
    context = multiprocessing.get_context("spawn")
    results: list[Summary | None] = [None] * len(files)
    try:
        with concurrent.futures.ProcessPoolExecutor(min(workers, len(files)), mp_context=context) as pool:
            futures = {
                pool.submit(_read_one, f, d, r, None): i
                for i, (f, d, r) in enumerate(zip(files, folders, told_ranks, strict=True))
            }
            for future in concurrent.futures.as_completed(futures):
                i = futures[future]
                results[i] = future.result()
                if progress is not None:
                    progress(files[i], files[i].stat().st_size)
    except concurrent.futures.process.BrokenProcessPool as error:
        raise InputError(
            "a worker process was killed, most likely for lack of memory. Import again with fewer workers (--workers 1)."
        ) from error
    return [r for r in results if r is not None]


def _settle(summaries: list[Summary], out: Path, metadata: dict[str, str], work: Path) -> ImportResult:
    issues: list[dict[str, Any]] = []
    usable = [s for s in summaries if s.status != "refused"]
    for refused in summaries:
        if refused.status == "refused":
            issues.append(_issue("error", "file_refused", refused.reason or "refused", refused.file))
    if not usable:
        return ImportResult("refused", None, summaries, [], issues=_of_files(summaries) + issues)
    kept: list[Summary] = []
    if len(summaries) > 1:
        chosen: dict[int, Summary] = {}
        for summary in sorted(usable, key=lambda s: (s.source in _BESIDE, s.window_start_ns or 0, s.file)):
            if summary.rank is None:
                issues.append(
                    _issue(
                        "error",
                        "file_without_rank",
                        f"{summary.file} states no rank, neither inside nor in its name, so it was left out. Import it "
                        "alone with --rank N, or write the rank into its distributedInfo.",
                        summary.file,
                    )
                )
            elif summary.rank in chosen and summary.source in _BESIDE and chosen[summary.rank].source not in _BESIDE:
                issues.append(
                    _issue(
                        "warning",
                        "record_beside_trace",
                        f"{summary.file} ({summary.source}) is of rank {summary.rank}, of which {chosen[summary.rank].file} "
                        "holds more than the calls, so it was left out. To see it, import it by itself; a collector's "
                        "folder (traceanalyzer merge RUN_DIR) has both in one run.",
                        summary.file,
                    )
                )
            elif summary.rank in chosen:
                issues.append(
                    _issue(
                        "error",
                        "rank_twice",
                        f"Rank {summary.rank} is claimed by {chosen[summary.rank].file} and by {summary.file}, recorded "
                        "later, which was left out. If these are two runs, import each by itself.",
                        summary.file,
                    )
                )
            else:
                chosen[summary.rank] = summary
        kept = [chosen[r] for r in sorted(chosen)]
    else:
        kept = usable
    if not kept:
        return ImportResult("refused", None, summaries, [], issues=_of_files(summaries) + issues)
    worst = max((STATUSES.index(s.status) for s in kept), default=0)
    status = "partial" if issues else STATUSES[worst]
    sources = ", ".join(sorted({s.source for s in kept}))
    metadata = {**metadata, schema.META_IMPORT: json.dumps({"source": sources, "status": status})}
    parts = [Path(s.part) for s in kept if s.part is not None]
    if _is_folder(out):
        out.mkdir(parents=True, exist_ok=True)
        rows: dict[str, int] = {}
        names: list[str] = []
        for i, (summary, part) in enumerate(zip(kept, parts, strict=True)):
            names.append(f"rank-{summary.rank:05d}.parquet" if summary.rank is not None else "rank-unknown.parquet")
            one = merge_files([part], work / names[-1], metadata, extra_issues=issues if i == 0 else ())
            for kind, n in one.items():
                rows[kind] = rows.get(kind, 0) + n
        for name in names:  # all are whole now: none appears before
            os.replace(work / name, out / name)
        _remove_stale(out, names)
    else:
        rows = merge_files(parts, out, metadata, extra_issues=issues)
    ranks = [s.rank for s in kept if s.rank is not None]
    return ImportResult(status, out, summaries, ranks, rows, _of_files(kept) + issues)


def _remove_stale(folder: Path, names: Sequence[str]) -> None:
    """Removes the rank files of an earlier import, known by their name and our schema key, that are not in ``names``."""
    for path in folder.glob("rank-*.parquet"):
        if path.name in names or not path.is_file():
            continue
        try:
            metadata = pq.read_schema(path).metadata or {}
        except (pa.ArrowException, OSError):
            continue  # not ours
        if schema.META_SCHEMA.encode() in metadata:
            path.unlink()


def _is_folder(out: Path) -> bool:
    return out.is_dir() or (out.suffix == "" and not out.exists())


def _issue(severity: str, code: str, sentence: str, file: str) -> dict[str, Any]:
    return {
        "severity": severity,
        "code": code,
        "sentence": sentence,
        "occurrences": 1,
        "location": file,
        "source_file": file,
        "source": "kineto",
    }


def _of_files(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    return [{**issue, "rank": s.rank, "source_file": s.file} for s in summaries for issue in s.issues]


def merge_files(
    parts: Sequence[Path], out: Path, metadata: Mapping[str, str], *, extra_issues: Sequence[Mapping[str, Any]] = ()
) -> dict[str, int]:
    """Merges run tables of the current schema version into one, rows ordered by (kind, rank, start_ns).

    ``parts`` must each hold the rows of one rank, sorted by kind and start, and come in order of rank. ``extra_issues`` are
    added as rows. Gives the rows written of each kind. Memory is bounded: one row group at a time.
    """
    readers = [pq.ParquetFile(p, pre_buffer=False) for p in parts]  # what is read ahead is held to the end
    try:
        with RunWriter(out, metadata) as writer:
            for kind in sorted(schema.KINDS):
                columns = [c.name for c in schema.columns_of(kind)]
                if kind == "issue" and extra_issues:
                    writer.write(kind, [table_of(kind, extra_issues)])
                for reader in readers:
                    for group in range(reader.num_row_groups):
                        if _kind_of(reader, group) == kind:
                            writer.write(kind, [reader.read_row_group(group, columns=columns)])
        return writer.rows
    finally:
        for reader in readers:
            reader.close()


def _kind_of(reader: pq.ParquetFile, group: int) -> str:
    """The kind of a row group's rows, from its statistics: a group never mixes kinds."""
    statistics = reader.metadata.row_group(group).column(0).statistics
    if statistics is None or not statistics.has_min_max or statistics.min != statistics.max:
        raise InputError("not a run table written by this program: a row group mixes kinds. Import the traces again.")
    return str(statistics.min)


def default_workers() -> int:
    """As many workers as this process may use processors."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
