"""``traceanalyzer info``: what a run holds and what can be asked of it."""

from __future__ import annotations

from pathlib import Path

import click

from traceanalyzer.cli.common import format_option, job_of, job_option, print_json, print_report


@click.command("info")
@click.argument("source", metavar="RUN")
@job_option
@format_option
def info_command(source: str, job_file: Path | None, form: str) -> None:
    """Say what a run holds and what can be asked of it.

    RUN is a .parquet file, a folder or glob of them, or a URL. Ranks, sources, steps, groups, the share of communication
    that is tied to calls, and everything that was wrong or missing in the input.
    """
    from traceanalyzer.attribute import attach, in_world_of
    from traceanalyzer.reports import info, info_terminal
    from traceanalyzer.run import Run

    with Run.open(source) as run:
        job, used = job_of(run, job_file)
        job = None if job is None else in_world_of(run, job)
        found = info.collect(run, attach(run, job), job, used)
    if form == "json":
        print_json(info.document(found))
    else:
        print_report(info_terminal.render(found))
