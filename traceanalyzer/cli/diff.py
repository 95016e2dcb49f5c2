"""``traceanalyzer diff``: measured traffic beside the expectation, cell by cell."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import click

from traceanalyzer.cli.common import fail_on_option, job_option, links_option
from traceanalyzer.expect.model import RULE_SETS, RuleSet


@click.command(name="diff")
@click.argument("run", metavar="RUN")
@job_option
@links_option
@click.option(
    "--rules",
    type=click.Choice(RULE_SETS),
    default="megatron",
    show_default=True,
    help="Which model: what Megatron really does, or the formulas of the document the model came from.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "markdown"]),
    default="table",
    show_default=True,
    help="What to print: a table to read, one JSON document, or Markdown.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    metavar="X",
    help="Relative difference of calls and bytes that still counts as a match.",
)
@click.option(
    "--min-coverage",
    type=click.FloatRange(0, 1),
    default=0.99,
    show_default=True,
    metavar="X",
    help="Share of the communication that must be attributed and judged; below it the exit code is 3.",
)
@fail_on_option("Exit 1 only where this holds, like 'unexpected>0' or 'avoidable>1GiB' (docs/review.md).")
@click.option("--explain", type=int, metavar="N", help="Show the formula and the source of row N of the table.")
@click.option("--exact", is_flag=True, help="Show bytes to the last one instead of KiB, MiB, GiB.")
@click.option("-o", "--out", type=click.Path(path_type=Path, dir_okay=False), help="Write to a file instead.")
def diff_command(
    run: str,
    job_file: Path | None,
    links_file: Path | None,
    rules: RuleSet,
    form: str,
    tolerance: float,
    min_coverage: float,
    expressions: tuple[str, ...],
    explain: int | None,
    exact: bool,
    out: Path | None,
) -> None:
    """Compare a run with what its job should communicate.

    One row per kind of call: expected and measured calls and bytes per rank and step, a verdict, and a cause where
    something differs. RUN is a Parquet file, a folder of them, a glob, or a URL; its job is the one of --job, else the one
    stored in it.

    Exit code: 0 match, 1 something differs (with --fail-on: a gate failed), 2 usage or unreadable input, 3 cannot be judged.
    """
    from traceanalyzer.cli.common import console_for, read_job_file, read_links, refuse_own_input
    from traceanalyzer.diff import diff
    from traceanalyzer.reports import diff as report
    from traceanalyzer.reports import diff_terminal, gates
    from traceanalyzer.reports.links import cell_time_ns, spans
    from traceanalyzer.run import Run

    if explain is not None and form != "table":
        raise click.UsageError("--explain goes with --format table.")
    if not math.isfinite(tolerance):
        raise click.BadParameter("must be a finite number.", param_hint="--tolerance")
    wanted = [gates.parse(expression, "diff") for expression in expressions]
    job = None if job_file is None else read_job_file(job_file)
    links = read_links(links_file)
    link_times: list[int | None] | None = None
    with Run.open(run) as opened:
        refuse_own_input(out, opened.files)
        found = diff(opened, job, rules=rules, tolerance=tolerance, min_coverage=min_coverage)
        if links is not None:
            span_of = spans(opened)
            link_times = [cell_time_ns(cell, links, span_of) for cell in found.cells]
    if form == "json":
        text = json.dumps(report.document(found, link_times), indent=1) + "\n"
    elif form == "markdown":
        text = report.markdown(found, exact=exact, link_times=link_times)
    else:
        console = console_for(out)
        try:
            screen = diff_terminal.render(
                found, exact=exact, explain=explain, width=console.width, link_times=link_times
            )
        except ValueError as error:
            raise click.BadParameter(f"{error}.", param_hint="--explain") from None
        with console.capture() as captured:
            console.print(screen)
        text = "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())
    if out is None:
        click.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
    if not wanted:
        sys.exit(found.exit_code)
    results = gates.check(wanted, report.document(found))
    for result in results:
        click.echo(f"gate    {result.sentence}", err=True)
    sys.exit(gates.exit_code(results, otherwise=3 if found.exit_code == 3 else 0))
