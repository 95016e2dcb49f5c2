"""``traceanalyzer expect``: what a job should communicate, without any trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from traceanalyzer.cli.common import console_for, read_job_file, refuse_own_input
from traceanalyzer.expect.model import RULE_SETS, RuleSet

if TYPE_CHECKING:
    from rich.console import RenderableType

    from traceanalyzer.job import Job


@click.command(name="expect")
@click.argument("job", metavar="JOB", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--rank", type=int, metavar="R", help="Only this rank of the world.")
@click.option(
    "--stage", type=int, metavar="S", help="Only this pipeline stage (0-based): what each of its ranks sends."
)
@click.option(
    "--all", "every", is_flag=True, help="Every pipeline stage. This is what happens without --rank and --stage."
)
@click.option(
    "--rules",
    type=click.Choice(RULE_SETS),
    default="megatron",
    show_default=True,
    help="Which model: what Megatron really does, or the formulas of the document the model came from.",
)
@click.option("--by", type=click.Choice(["role", "component", "phase"]), help="Sums by this instead of single calls.")
@click.option("--against", type=click.Choice(["document"]), help="Show both rule sets side by side, with causes.")
@click.option(
    "--show",
    type=click.Choice(["calls", "memory", "schedule"]),
    default="calls",
    show_default=True,
    help="Calls; or the memory of a rank of each stage, by part; or the pipeline's schedule with its bubble.",
)
@click.option("--explain", type=int, metavar="N", help="Show formula, numbers and source of row N of the table.")
@click.option(
    "--first-step",
    is_flag=True,
    help="The first step after start or evaluation, where overlapped gradient and parameter traffic differs.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "markdown"]),
    default="table",
    show_default=True,
    help="What to print: a table to read, one JSON document, or Markdown.",
)
@click.option("--exact", is_flag=True, help="Show bytes to the last one instead of KiB, MiB, GiB.")
@click.option("-o", "--out", type=click.Path(path_type=Path, dir_okay=False), help="Write to a file instead.")
def expect_command(
    job: Path,
    rank: int | None,
    stage: int | None,
    every: bool,
    rules: RuleSet,
    by: str | None,
    against: str | None,
    show: str,
    explain: int | None,
    first_step: bool,
    form: str,
    exact: bool,
    out: Path | None,
) -> None:
    """Say what a job should communicate, without any trace.

    One row per kind of call: group role, operation, phase, component, element type, size, calls and bytes per rank and
    step. JOB is a TOML or YAML file with Megatron's argument names, Megatron's log of rank 0, or a text with the launch
    command.

    Off-rank bytes are what a ring sends from one rank in one direction; receives are shown and not added to them.
    """
    from traceanalyzer.expect.sheet import sheet
    from traceanalyzer.reports import expect as report
    from traceanalyzer.reports import expect_terminal

    if sum((rank is not None, stage is not None, every)) > 1:
        raise click.UsageError("--rank, --stage and --all exclude each other.")
    if form != "table" and (explain is not None or (by is not None and form == "markdown")):
        raise click.UsageError("--explain goes with --format table, --by with table or json (which has every sum).")
    if against and rules == "document":
        raise click.UsageError("--against document compares the megatron rules with the document's: leave --rules out.")
    if against and (explain is not None or by is not None or form == "markdown"):
        raise click.UsageError("--against goes without --explain, --by and --format markdown.")
    if show != "calls" and (
        against or by or explain is not None or first_step or form == "markdown" or rules != "megatron"
    ):
        raise click.UsageError(f"--show {show} goes with --rank, --stage, --format table or json, --exact and -o only.")
    refuse_own_input(out, [job])
    found = read_job_file(job)
    if show != "calls":
        _write(out, *_plan(found, show, rank, stage, exact, form))
        return
    shown = sheet(found, rank=rank, stage=stage, rules=rules, first_step=first_step)
    other = sheet(found, rank=rank, stage=stage, rules="document") if against else None
    screen: RenderableType | None = None
    text = ""
    if form == "json":
        text = json.dumps(report.document(shown, other), indent=1) + "\n"
    elif form == "markdown":
        text = report.markdown(shown, exact=exact)
    elif other is not None:
        screen = expect_terminal.render_against(shown, other, exact=exact, width=console_for(out).width)
    else:
        try:
            width = console_for(out).width
            screen = expect_terminal.render(shown, by=by, exact=exact, explain=explain, width=width)
        except ValueError as error:
            raise click.BadParameter(f"{error}.", param_hint="--explain") from None
    _write(out, text, screen)


def _plan(
    job: Job, show: str, rank: int | None, stage: int | None, exact: bool, form: str
) -> tuple[str, RenderableType | None]:
    """Memory or schedule, as a JSON text or as a screen."""
    from traceanalyzer.expect import memory, schedule, versions
    from traceanalyzer.reports import plan

    if show == "schedule":
        release = versions.parse(job.megatron_core_version) if job.megatron_core_version else versions.KNOWN[-1]
        passes = schedule.of_job(job, release)
        if form == "json":
            return json.dumps(plan.schedule_document(job, passes), indent=1) + "\n", None
        return "", plan.schedule_screen(job, passes)
    if rank is not None:
        ranks = [rank]
    else:
        stages = range(job.pipeline_model_parallel_size) if stage is None else (stage,)
        ranks = [job.layout.rank_of(pp=number) for number in stages]
    found = [memory.estimate(job, one) for one in ranks]
    if form == "json":
        return json.dumps(plan.memory_document(job, found), indent=1) + "\n", None
    return "", plan.memory_screen(job, found, exact=exact, width=console_for(None).width)


def _write(out: Path | None, text: str, screen: RenderableType | None) -> None:
    """Prints a text or a screen, or writes it to a file."""
    if screen is not None:
        console = console_for(out)
        with console.capture() as captured:
            console.print(screen)
        text = "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())
    if out is None:
        click.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
