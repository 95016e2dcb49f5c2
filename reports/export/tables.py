"""Views of a run and results of queries as Parquet or CSV, every row and every digit."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from traceanalyzer import schema
from traceanalyzer.attribute import attach, in_world_of, kernels
from traceanalyzer.errors import InputError
from traceanalyzer.job import Job
from traceanalyzer.queries import Library
from traceanalyzer.reports.rows import csv_lines
from traceanalyzer.run import Run

_BATCH = 65_536


def view(
    run: Run, name: str, job: Job | None, *, ranks: Collection[int] | None = None, steps: Collection[int] | None = None
) -> pa.RecordBatchReader:
    """The rows of a view of the run, attributed, of some ranks and steps. None: all.

    Raises InputError for a view that does not exist, and for steps where a view has no column step.
    """
    if name not in ("run", *schema.VIEWS):
        raise InputError(f"no view {name!r}. There are: {', '.join(['run', *sorted(schema.VIEWS)])}.")
    used = None if job is None else in_world_of(run, job)
    if not run.value("SELECT count(*) FROM duckdb_tables() WHERE table_name = 'step_range'"):
        attach(run, used)
    if name == "kernel":
        kernels.of_kernels(run, used)
    return _chosen(run.sql(f"FROM {name}"), f"view {name}", ranks, steps)


def query(
    run: Run,
    name: str,
    job: Job | None,
    parameters: dict[str, Any],
    *,
    ranks: Collection[int] | None = None,
    steps: Collection[int] | None = None,
) -> pa.RecordBatchReader:
    """The rows of a query of the library. Raises InputError as the library does, and where ranks or steps are no column."""
    found = Library.of(run, job).ask(name, **parameters).arrow()
    return _chosen(run.connection.from_arrow(found), f"query {name}", ranks, steps)


def _chosen(
    relation: duckdb.DuckDBPyRelation, what: str, ranks: Collection[int] | None, steps: Collection[int] | None
) -> pa.RecordBatchReader:
    for column, option, values in (("rank", "--ranks", ranks), ("step", "--steps", steps)):
        if values is None:
            continue
        if column not in relation.columns:
            raise InputError(f"{what} has no column {column}: {option} cannot choose among its rows.")
        relation = relation.filter(f"{column} IN ({', '.join(str(int(v)) for v in sorted(values)) or 'NULL'})")
    return relation.to_arrow_reader(_BATCH)


def parquet(reader: pa.RecordBatchReader, out: Path) -> int:
    """Writes all rows to a Parquet file; how many there were."""
    rows = 0
    with pq.ParquetWriter(out, reader.schema, compression="zstd") as writer:
        for batch in reader:
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows


def csv(reader: pa.RecordBatchReader, out: IO[str]) -> int:
    """Writes all rows as CSV (RFC 4180; null is an empty field, empty text is ``""``); how many there were."""
    rows = 0

    def counted() -> Iterator[tuple[Any, ...]]:
        nonlocal rows
        for batch in reader:
            for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                rows += 1
                yield row

    out.writelines(f"{line}\n" for line in csv_lines(reader.schema.names, counted()))
    return rows
