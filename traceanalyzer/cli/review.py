"""``traceanalyzer review``: the whole picture of a run, as a page, Markdown or JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from traceanalyzer.cli.common import (
    job_option,
    links_option,
    report_form,
    report_options,
    report_text,
    told,
    write_report,
)


@click.command(name="review")
@click.argument("run", metavar="RUN")
@job_option
@links_option
@click.option(
    "--log",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Megatron's log with its iteration lines: step times around the profiled steps.",
)
@report_options(
    "the findings are",
    "Exit 1 where this holds: 'unexpected>0', 'avoidable>1GiB', 'exposed.dp>5%', 'bubble>1.2x'.",
)
@click.option(
    "--min-coverage",
    type=click.FloatRange(0, 1),
    default=0.99,
    show_default=True,
    metavar="X",
    help="Share of the communication that must be attributed and judged for a verdict.",
)
@click.option("--quiet", is_flag=True, help="Say nothing but errors.")
def review_command(
    run: str,
    job_file: Path | None,
    links_file: Path | None,
    log: Path | None,
    out: Path | None,
    form: str | None,
    expressions: Sequence[str],
    min_coverage: float,
    quiet: bool,
) -> None:
    """Review a run: verdict, ranked findings, where the step goes.

    RUN is a Parquet file, a folder of them, a glob, or a URL; its job is the one of --job, else the one stored in it.

    \b
    traceanalyzer review run.parquet -o review.html
    traceanalyzer review run.parquet -o review.md --fail-on 'unexpected>0' --fail-on 'exposed.dp>5%'

    Exit code: 0 done, and with --fail-on no gate failed; 1 a gate failed; 2 usage or unreadable input; 3 a gate's figure is
    not known. Without --fail-on a run that differs is no failure: that is what diff is for.
    """
    from traceanalyzer.cli.common import read_job_file, read_links, refuse_own_input
    from traceanalyzer.reports import gates
    from traceanalyzer.review import review
    from traceanalyzer.run import Run

    wanted = [gates.parse(expression, "review") for expression in expressions]
    kind = report_form(out, form)
    tell = None if quiet else told()
    job = None if job_file is None else read_job_file(job_file)
    links = read_links(links_file)
    with Run.open(run) as opened:
        refuse_own_input(out, [*opened.files, *(f for f in (job_file, links_file, log) if f is not None)])
        found = review(opened, job, links=links, log=log, min_coverage=min_coverage, progress=tell)
    if tell is not None:
        tell("")
    document = found.as_document()
    results = gates.check(wanted, document)
    write_report(report_text("review", kind, document, results), out, printed=not quiet or form is not None)
    if out is not None and not quiet:
        click.echo(f"{document['verdict']['word']}   {len(document['findings'])} findings   {out}", err=True)
    for result in (r for r in results if not quiet or r.state != "passed"):
        click.echo(f"gate    {result.sentence}", err=True)
    sys.exit(gates.exit_code(results))
