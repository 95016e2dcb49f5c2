"""``traceanalyzer query``: the SQL library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from traceanalyzer.cli.common import (
    job_of,
    job_option,
    links_option,
    param_option,
    parameters,
    read_links,
    refuse_own_input,
    stdout_option,
)
from traceanalyzer.cli.sql import write_table, write_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from traceanalyzer.queries import Query, Result

_ROWS = 40


@click.command("query")
@click.argument("source", metavar="[RUN]", required=False)
@click.argument("name", required=False)
@click.option("--list", "listed", is_flag=True, help="List the queries, or with a NAME its parameters and columns.")
@param_option
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "csv", "json"]),
    default="table",
    show_default=True,
    help="A table to read (long cells cut), or all of it, exact.",
)
@stdout_option
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"At most N rows.  [default: {_ROWS} in a table, else all]",
)
@job_option
@links_option
def query_command(
    source: str | None,
    name: str | None,
    listed: bool,
    given: Sequence[str],
    form: str,
    out: Path | None,
    limit: int | None,
    job_file: Path | None,
    links_file: Path | None,
) -> None:
    """Answer one question of the library; without any, list them.

    What the columns mean: docs/queries.md, or --list NAME. The job in the run, or --job, names what the recording does not.

    \b
    traceanalyzer query run.parquet time_classes
    traceanalyzer query run.parquet top_kernels --param top=5
    """
    from traceanalyzer.queries import Library, library, named
    from traceanalyzer.run import Run

    if listed or source is None:
        wanted = name or source  # --list NAME, and RUN NAME --list
        lines = _overview(list(library().values())) if wanted is None else _described(named(wanted))
        for line in lines:
            click.echo(line)
        return
    if name is None:
        raise click.UsageError("which query? traceanalyzer query --list names them.")
    query = named(name)
    values = parameters(given)
    links = read_links(links_file)
    with Run.open(source) as run:
        refuse_own_input(out, run.files)
        result = Library.of(run, job_of(run, job_file).job, links).ask(query.name, **values)
    _write(result, form, out, limit)


def _write(result: Result, form: str, out: Path | None, limit: int | None) -> None:
    reader = result.arrow().to_reader()
    if form == "table":
        write_table(reader, out, _ROWS if limit is None else limit, explicit=limit is not None)
    else:
        write_text(reader, [column.dtype for column in result.query.columns], form, out, limit)


def _overview(queries: Sequence[Query]) -> Iterator[str]:
    """A line for each query."""
    width = max(len(query.name) for query in queries)
    for query in queries:
        yield f"{query.name.ljust(width)}  {query.gives}"
    yield ""
    yield "One of them: traceanalyzer query RUN NAME. Its parameters and columns: traceanalyzer query --list NAME"


def _described(query: Query) -> Iterator[str]:
    """Everything the header of a query says."""
    yield f"{query.name}: {query.gives}"
    for parameter in query.parameters:
        default = "NULL" if parameter.default is None else parameter.default
        yield f"  --param {parameter.name}={default}  {parameter.dtype}. {parameter.doc}"
    for column in query.columns:
        unit = f", {column.unit}" if column.unit else ""
        nulls = "" if column.nulls == "never" else f" Null: {column.nulls}."
        yield f"  {column.name}  {column.dtype}{unit}. {column.doc}{nulls}"
