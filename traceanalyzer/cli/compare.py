"""``traceanalyzer compare``: run against run, as a text, HTML, Markdown or JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path

import click

from traceanalyzer.cli.common import (
    console_for,
    job_option,
    report_form,
    report_options,
    report_text,
    told,
    write_report,
)


@click.command(name="compare")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@job_option
@click.option(
    "--job-b",
    "job_b_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="The job of B, where it is not that of --job.",
)
@click.option(
    "--least",
    type=click.FloatRange(0, 100),
    default=1.0,
    show_default=True,
    metavar="PERCENT",
    help="A difference below this share of A's step did not move.",
)
@report_options(
    "a table is",
    "Exit 1 where this holds of B: 'moved>0', 'traffic>0', 'step_time>1.05x', 'exposed.dp>5%'.",
)
@click.option("--quiet", is_flag=True, help="Say nothing but errors.")
def compare_command(
    a: str,
    b: str,
    job_file: Path | None,
    job_b_file: Path | None,
    least: float,
    out: Path | None,
    form: str | None,
    expressions: Sequence[str],
    quiet: bool,
) -> None:
    """Compare run B with run A: what moved and what did not.

    A and B are runs (a Parquet file, a folder of them, a glob, or a URL), with @ and ranges of steps where not all are meant.
    Both may be the same run.

    \b
    traceanalyzer compare before.parquet after.parquet -o compare.html
    traceanalyzer compare run.parquet@100-120 run.parquet@9000-9020
    traceanalyzer compare main.parquet branch.parquet --fail-on 'step_time>1.05x' --fail-on 'traffic>0'

    Exit code: 0 done, and with --fail-on no gate failed; 1 a gate failed; 2 usage or unreadable input; 3 the runs have no
    figure in common, or a gate's figure is not known. Without --fail-on a run that moved is no failure.
    """
    from traceanalyzer.cli.common import read_job_file, refuse_own_input
    from traceanalyzer.compare import lay, measure, selection
    from traceanalyzer.reports import gates
    from traceanalyzer.run import Run

    wanted = [gates.parse(expression, "compare") for expression in expressions]
    kind = report_form(out, form)
    one, other = selection(a), selection(b)
    job_a = None if job_file is None else read_job_file(job_file)
    job_b = job_a if job_b_file is None else read_job_file(job_b_file)
    tell = None if quiet else told()
    with ExitStack() as stack:
        opened = stack.enter_context(Run.open(one.source))
        refuse_own_input(out, [*opened.files, *(f for f in (job_file, job_b_file) if f is not None)])
        side_a = side_b = measure(opened, job_a, tell)
        if other.source != one.source or job_b is not job_a:
            opened = stack.enter_context(Run.open(other.source))
            refuse_own_input(out, opened.files)
            side_b = measure(opened, job_b, tell)
    if tell is not None:
        tell("")
    document = lay(side_a, side_b, one, other, Fraction(repr(least)) / 100).as_document()
    results = gates.check(wanted, document)
    content = report_text("compare", kind, document, results, width=console_for(None).width)
    write_report(content, out, printed=not quiet or form is not None)
    if out is not None and not quiet:
        click.echo(f"{document['verdict']['word']}   {document['verdict']['sentence']}   {out}", err=True)
    for result in (r for r in results if not quiet or r.state != "passed"):
        click.echo(f"gate    {result.sentence}", err=True)
    compared = document["verdict"]["word"] != "cannot be compared"
    if not compared and quiet:
        click.echo(document["verdict"]["sentence"], err=True)
    sys.exit(gates.exit_code(results, 0 if compared else 3))
