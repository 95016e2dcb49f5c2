"""``traceanalyzer export``: a run for a trace viewer, or its tables for other programs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from traceanalyzer.cli.common import job_of, job_option, param_option, parameters, refuse_own_input, whole_file

if TYPE_CHECKING:
    from traceanalyzer.job import Job
    from traceanalyzer.reports.export.tracks import Timeline
    from traceanalyzer.run import Run

_OUT = click.Path(path_type=Path)


def _numbers(_context: click.Context, _parameter: click.Parameter, value: str | None) -> frozenset[int] | None:
    """Whole numbers and spans, as everywhere."""
    from traceanalyzer.cli.simulate import parse_ranks

    return None if value is None else frozenset(parse_ranks(value))


@click.command("export")
@click.argument("source", metavar="RUN")
@click.option("--perfetto", metavar="FILE", type=_OUT, help="Perfetto's format (.pftrace), for ui.perfetto.dev.")
@click.option("--chrome", metavar="FILE", type=_OUT, help="Chrome's trace events: .json, or .json.gz.")
@click.option("--parquet", metavar="FILE", type=_OUT, help="A view or query as Parquet; a folder for every view.")
@click.option("--csv", metavar="FILE", type=_OUT, help="A view or query as CSV; - for stdout.")
@click.option(
    "--view", metavar="NAME", help="With --parquet or --csv: comm, kernel, ... (traceanalyzer sql RUN lists them)."
)
@click.option("--query", metavar="NAME", help="With --parquet or --csv: a query of the library.")
@param_option
@click.option("--ranks", callback=_numbers, metavar="SPEC", help="These ranks only, like 0-7,64,128-255:8.")
@click.option("--steps", callback=_numbers, metavar="SPEC", help="These steps only.")
@click.option(
    "--clocks",
    type=click.Choice(["aligned", "recorded"]),
    default="aligned",
    show_default=True,
    help="Times of ranks against each other, by their calls; or as each rank recorded them.",
)
@click.option("--no-host", is_flag=True, help="Leave out operators and ranges of the host: a far smaller file.")
@job_option
@click.option("--quiet", is_flag=True, help="Say nothing but errors.")
def export_command(
    source: str,
    perfetto: Path | None,
    chrome: Path | None,
    parquet: Path | None,
    csv: Path | None,
    view: str | None,
    query: str | None,
    given: Sequence[str],
    ranks: frozenset[int] | None,
    steps: frozenset[int] | None,
    clocks: str,
    no_host: bool,
    job_file: Path | None,
    quiet: bool,
) -> None:
    """Export a run for a trace viewer, or its tables.

    Tracks are named by coordinates and role; flows join the ranks of a collective; with a job, calls carry expected bytes
    and verdict. What cannot be shown is counted on stderr. docs/export.md

    \b
    traceanalyzer export run.parquet --perfetto run.pftrace
    traceanalyzer export run.parquet --chrome run.json.gz --ranks 0-7 --steps 3
    traceanalyzer export run.parquet --parquet comm.parquet --view comm
    """
    from traceanalyzer.run import Run

    outs = [out for out in (perfetto, chrome, parquet, csv) if out is not None]
    if not outs:
        raise click.UsageError("what to write? --perfetto, --chrome, --parquet or --csv.")
    if len({out.resolve() for out in outs}) < len(outs):
        raise click.UsageError("two formats into one file: give each a name of its own.")
    tables = parquet is not None or csv is not None
    if (view or query) and not tables:
        raise click.UsageError("--view and --query go with --parquet or --csv.")
    if view and query:
        raise click.UsageError("--view or --query, not both.")
    if given and not query:
        raise click.UsageError("--param goes with --query.")
    if csv is not None and not (view or query):
        raise click.UsageError("--csv: which table? --view NAME or --query NAME.")
    with Run.open(source) as run:
        for out in outs:
            refuse_own_input(out, [*run.files, *([] if job_file is None else [job_file])])
            refuse_folder_of(out, run.files)
        job = job_of(run, job_file).job
        if perfetto is not None or chrome is not None:
            _timelines(run, job, perfetto, chrome, ranks, steps, clocks == "aligned", not no_host, quiet)
        if tables:
            _tables(run, job, parquet, csv, view, query, parameters(given), ranks, steps, quiet)


def refuse_folder_of(out: Path, files: Sequence[str]) -> None:
    """Refuses a folder for Parquet that the run itself lies in."""
    if out.is_dir() and any(out.resolve() in Path(f).resolve().parents for f in files):
        raise click.UsageError(f"{out}: the run lies in this folder. Give another one.")


def _timelines(
    run: Run,
    job: Job | None,
    perfetto: Path | None,
    chrome: Path | None,
    ranks: frozenset[int] | None,
    steps: frozenset[int] | None,
    aligned: bool,
    host: bool,
    quiet: bool,
) -> None:
    from traceanalyzer.diff import Diff, diff
    from traceanalyzer.errors import InputError, JobError
    from traceanalyzer.reports.export import chrome as chrome_format
    from traceanalyzer.reports.export import perfetto as perfetto_format
    from traceanalyzer.reports.export.tracks import Timeline

    if perfetto is not None:
        perfetto_format.messages()
    tell = _told(quiet)
    compared: Diff | None = None
    refused = "no job is known: give --job" if job is None else None
    tell("attributing the run")
    if job is not None:
        try:
            compared = diff(run, job)
        except (InputError, JobError) as error:
            refused = str(error)
    known = Timeline.of(run, job, compared, ranks=ranks, steps=steps, aligned=aligned, host=host)
    if refused is not None:
        known.notes.insert(0, f"no expected bytes and verdicts ({refused})")
    for out, form in ((perfetto, perfetto_format), (chrome, chrome_format)):
        if out is None:
            continue
        timeline = replace(known, counts=Counter(), left_out=Counter())
        with whole_file(out) as temporary, _opened(temporary, out) as file:
            form.write(timeline, file, lambda name, i, n: tell(f"{name} ({i + 1} of {n})"))
        tell("")
        if not quiet:
            for line in _summary(timeline, out):
                click.echo(line, err=True)


def _summary(timeline: Timeline, out: Path) -> Iterator[str]:
    from traceanalyzer.reports.text import count, counted, size

    n = timeline.counts
    yield (
        f"{out}   {size(out.stat().st_size)}   {counted(n['ranks'], 'rank')}, {counted(n['tracks'], 'track')}, "
        f"{counted(n['slices'], 'slice')}, {counted(n['flow ends'], 'flow end')}, "
        f"{counted(n['counter values'], 'counter value')}"
    )
    if timeline.compared is not None:
        yield f"verdict  on {count(n['calls with a verdict'])} of {counted(n['calls'], 'call')}"
    for note in timeline.notes:
        yield f"note     {note}"
    for what, number in sorted(timeline.left_out.items()):
        if number:
            yield f"left out {count(number)} {what}"


def _tables(
    run: Run,
    job: Job | None,
    parquet: Path | None,
    csv: Path | None,
    view: str | None,
    query: str | None,
    parameters: dict[str, str],
    ranks: frozenset[int] | None,
    steps: frozenset[int] | None,
    quiet: bool,
) -> None:
    from traceanalyzer import schema
    from traceanalyzer.reports.export import tables
    from traceanalyzer.reports.text import counted

    def reader(name: str | None) -> Any:
        if query is not None:
            return tables.query(run, query, job, dict(parameters), ranks=ranks, steps=steps)
        return tables.view(run, name or "", job, ranks=ranks, steps=steps)

    def told(out: Path | str, rows: int) -> None:
        if not quiet:
            click.echo(f"{out}   {counted(rows, 'row')}", err=True)

    if parquet is not None and view is None and query is None:
        if steps is not None:
            raise click.UsageError("--steps with every view: not all have a step. Name one with --view.")
        if parquet.suffix == ".parquet":
            raise click.UsageError(
                f"--parquet {parquet}: which table? --view NAME or --query NAME; a folder takes all views."
            )
        parquet.mkdir(parents=True, exist_ok=True)
        for name in schema.VIEWS:
            with whole_file(parquet / f"{name}.parquet") as temporary:
                rows = tables.parquet(reader(name), temporary)
            told(parquet / f"{name}.parquet", rows)
    elif parquet is not None:
        with whole_file(parquet) as temporary:
            rows = tables.parquet(reader(view), temporary)
        told(parquet, rows)
    if csv is not None and str(csv) == "-":
        tables.csv(reader(view), sys.stdout)
    elif csv is not None:
        with whole_file(csv) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
            rows = tables.csv(reader(view), file)
        told(csv, rows)


@contextmanager
def _opened(temporary: Path, out: Path) -> Iterator[Any]:
    """A binary file; compressed if the name it will have says so."""
    if out.suffix == ".gz":
        import gzip

        with gzip.open(temporary, "wb", compresslevel=6) as packed:
            yield packed
    else:
        with temporary.open("wb") as file:
            yield file


def _told(quiet: bool) -> Callable[[str], None]:
    """Tells on stderr what is being done, on one line of a terminal; in a pipe nothing."""
    if quiet or not sys.stderr.isatty():
        return lambda _: None
    return lambda what: click.echo(f"\r\x1b[2K{what}{' ...' if what else ''}", err=True, nl=False)
