"""``traceanalyzer sql``: DuckDB's SQL over the views of a run."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from traceanalyzer.cli.common import job_of, job_option, refuse_own_input, stdout_option, whole_file
from traceanalyzer.errors import TraceAnalyzerError

if TYPE_CHECKING:
    import pyarrow

    from traceanalyzer.run import Run

_TABLE_ROWS = 40
_BATCH = 65_536
_SUFFIXES = {".csv": "csv", ".json": "json", ".parquet": "parquet"}


@click.command("sql")
@click.argument("source", metavar="RUN")
@click.argument("query", required=False)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "csv", "json", "parquet"]),
    help="A table to read (long cells cut), or all of it, exact.  [default: by the suffix of -o, else table]",
)
@stdout_option
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"At most N rows.  [default: {_TABLE_ROWS} in a table, else all]",
)
@job_option
def sql_command(
    source: str, query: str | None, form: str | None, out: Path | None, limit: int | None, job_file: Path | None
) -> None:
    """Ask a run with SQL; without a query, list its views.

    The QUERY is DuckDB's SQL. The view comm has a row per call, with role, step and phase where they are known (the job
    in the run, or --job, names what the recording does not); so has the view kernel.

    \b
    traceanalyzer sql run.parquet "SELECT role, op, count(*) FROM comm GROUP BY ALL"
    """
    from traceanalyzer.attribute import attach, in_world_of, kernels
    from traceanalyzer.run import Run

    form = form or (_SUFFIXES.get(out.suffix.lower(), "table") if out is not None else "table")
    if form == "parquet" and out is None:
        raise click.UsageError("--format parquet is no text: say where to write it with -o FILE.")
    with Run.open(source) as run:
        refuse_own_input(out, run.files)
        job = job_of(run, job_file).job
        job = None if job is None else in_world_of(run, job)
        attach(run, job)
        if query is None or re.search(r"\bkernel\b", query, re.IGNORECASE):
            kernels.of_kernels(run, job)  # takes seconds on a large run: only where it is asked
        if query is None and form == "table":
            with _output(out) as write:
                write(_views(run))
        else:
            _answer(run, query or _LIST_VIEWS, form, out, limit)


_LIST_VIEWS = """
SELECT table_name AS view, column_name AS name, data_type AS type FROM duckdb_columns()
WHERE table_name IN (SELECT view_name FROM duckdb_views() WHERE NOT internal) AND NOT starts_with(table_name, 'stored')
  AND table_name <> 'recorded_comm'
ORDER BY table_name, column_index"""


def _views(run: Run) -> list[str]:
    """Every view with what a row is and its columns."""
    from traceanalyzer import schema

    columns: dict[str, list[str]] = {}
    for row in run.rows(_LIST_VIEWS):
        columns.setdefault(row["view"], []).append(f"{row['name']} {row['type']}")
    lines = []
    for view, found in columns.items():
        kind = schema.VIEWS.get(view)
        meaning = "all rows of all kinds" if kind is None else "a row is " + schema.KINDS[kind]
        if view == "comm":
            meaning = "a row is one call, from the source that says most, with its role and place"
        lines.append(f"{view}: {meaning}")
        text = click.wrap_text(", ".join(c.replace(" ", "\u00a0") for c in found), 80, "    ", "    ")
        lines += [*text.replace("\u00a0", " ").splitlines(), ""]
    return [*lines, 'What the columns mean: docs/tables.md. A query: traceanalyzer sql RUN "SELECT ..."']


def _answer(run: Run, query: str, form: str, out: Path | None, limit: int | None) -> None:
    import duckdb

    try:
        relation = run.sql(query)
        if relation is None:
            click.echo("The query gives no table.", err=True)
            return
        types = [str(t).strip('"') for t in relation.types]
        reader = relation.to_arrow_reader(_BATCH)
        if form == "table":
            write_table(reader, out, _TABLE_ROWS if limit is None else limit, explicit=limit is not None)
        elif form == "parquet" and out is not None:
            _parquet(reader, out, limit)
        else:
            write_text(reader, types, form, out, limit)
    except duckdb.Error as error:
        raise TraceAnalyzerError(f"the query failed: {error}\n\nViews: {', '.join(_view_names())}") from error


def _view_names() -> list[str]:
    from traceanalyzer import schema

    return ["run", *sorted(schema.VIEWS)]


def _batches(reader: pyarrow.RecordBatchReader, limit: int | None) -> Iterator[pyarrow.RecordBatch]:
    """The batches of a reader, up to ``limit`` rows."""
    left = limit
    for batch in reader:
        if left is None:
            yield batch
            continue
        yield batch.slice(0, left)
        left -= min(left, batch.num_rows)
        if left == 0:
            return


def _rows(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[tuple[Any, ...]]:
    for batch in batches:
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def write_table(reader: pyarrow.RecordBatchReader, out: Path | None, limit: int, *, explicit: bool) -> None:
    """A table to read, and how many rows of it are not shown."""
    from traceanalyzer.reports import rows, text

    shown: list[tuple[Any, ...]] = []
    total = 0
    for batch in reader:
        if len(shown) < limit:
            shown += _rows([batch.slice(0, limit - len(shown))])
        total += batch.num_rows
    width = shutil.get_terminal_size().columns if out is None and sys.stdout.isatty() else None
    lines = rows.table_lines(reader.schema.names, shown, width)
    if len(shown) < total:
        rest = "" if explicit else "; --limit N shows N, --format csv or json all"
        lines.append(f"{text.count(total - len(shown))} of {text.counted(total, 'row')} not shown{rest}")
    else:
        lines.append(text.counted(total, "row"))
    with _output(out) as write:
        write(lines)


def write_text(
    reader: pyarrow.RecordBatchReader, types: Sequence[str], form: str, out: Path | None, limit: int | None
) -> None:
    """All rows as csv or json, exact."""
    from traceanalyzer.reports import rows

    names: list[str] = reader.schema.names
    found = _rows(_batches(reader, limit))
    if form == "json":
        _refuse_twins(names, form)
        lines = rows.json_lines(list(zip(names, types, strict=True)), found)
    else:
        lines = rows.csv_lines(names, found)
    with _output(out) as write:
        write(lines)


def _parquet(reader: pyarrow.RecordBatchReader, out: Path, limit: int | None) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    _refuse_twins(reader.schema.names, "parquet")
    with whole_file(out) as temporary:
        try:
            with pq.ParquetWriter(temporary, reader.schema, compression="zstd") as writer:
                for batch in _batches(reader, limit):
                    writer.write_batch(batch)
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
            raise TraceAnalyzerError(f"the result does not fit into Parquet: {error}. CAST the column.") from error


def _refuse_twins(names: Sequence[str], form: str) -> None:
    twins = sorted({n for n in names if names.count(n) > 1})
    if twins:
        raise TraceAnalyzerError(
            f"{form} needs a name for each column, and several are called {', '.join(twins)}: use AS."
        )


def _echo(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)


@contextmanager
def _output(out: Path | None) -> Iterator[Callable[[Iterable[str]], None]]:
    """Gives a function that writes lines to the file, which appears when whole, or to stdout."""
    if out is None:
        yield _echo
        return
    with whole_file(out) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        yield lambda lines: file.writelines(f"{line}\n" for line in lines)
