"""``traceanalyzer review``: the whole picture of a run, as a page, Markdown or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from traceanalyzer.cli.common import job_option, links_option

if TYPE_CHECKING:
    from traceanalyzer.reports.gates import Result

_FORMS = {".html": "html", ".htm": "html", ".md": "markdown", ".markdown": "markdown", ".json": "json"}


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
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write here: .html, .md or .json. Without it the findings are printed.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "html", "markdown", "json"]),
    help="What to write or print.  [default: by the name of -o, else text]",
)
@click.option(
    "--fail-on",
    "expressions",
    multiple=True,
    metavar="EXPR",
    help="Exit 1 where this holds: 'unexpected>0', 'avoidable>1GiB', 'exposed.dp>5%', 'bubble>1.2x'. May be repeated.",
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
    kind = form or ("text" if out is None else _FORMS.get(out.suffix.lower()))
    if kind is None:
        raise click.UsageError(f"-o {out}: what to write? Name it .html, .md or .json, or give --format.")
    job = None if job_file is None else read_job_file(job_file)
    links = read_links(links_file)
    with Run.open(run) as opened:
        refuse_own_input(out, [*opened.files, *(f for f in (job_file, links_file, log) if f is not None)])
        found = review(
            opened, job, links=links, log=log, min_coverage=min_coverage, progress=None if quiet else _told()
        )
    document = found.as_document()
    results = gates.check(wanted, document)
    content = _written(kind, document, results)
    if out is not None:
        _replace(out, content)
    elif not quiet or form is not None:
        click.echo(content, nl=False)
    if not quiet:
        if out is not None:
            click.echo(f"{document['verdict']['word']}   {len(document['findings'])} findings   {out}", err=True)
        for result in results:
            click.echo(f"gate    {result.sentence}", err=True)
    else:
        for result in (r for r in results if r.state != "passed"):
            click.echo(f"gate    {result.sentence}", err=True)
    sys.exit(gates.exit_code(results))


def _written(kind: str, document: dict[str, Any], results: Sequence[Result]) -> str:
    if kind == "json":
        return json.dumps(document, indent=1, allow_nan=False) + "\n"
    if kind == "html":
        from traceanalyzer.reports.review.html import html

        return html(document)
    if kind == "markdown":
        from traceanalyzer.reports.review.markdown import markdown

        return markdown(document, [r.sentence for r in results])
    from traceanalyzer.cli.common import console_for
    from traceanalyzer.reports.review.terminal import render

    console = console_for(None)
    with console.capture() as captured:
        console.print(render(document))
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def _replace(out: Path, content: str) -> None:
    """Writes a file whole: it appears by rename."""
    partial = out.with_name(f".{out.name}.partial")
    partial.write_text(content, encoding="utf-8")
    partial.replace(out)


def _told() -> Any:
    """Tells on stderr what is being worked out, on one line of a terminal; in a pipe nothing."""
    if not sys.stderr.isatty():
        return None

    def tell(what: str) -> None:
        click.echo(f"\r\x1b[2K{what} ...", err=True, nl=False)
        if what == "document":
            click.echo("\r\x1b[2K", err=True, nl=False)

    return tell
