"""``traceanalyzer simulate``: a job -> a run with known answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from traceanalyzer.cli.common import read_job_file, refuse_own_input, run_option
from traceanalyzer.errors import InputError

if TYPE_CHECKING:
    from types import ModuleType

_SPAN = re.compile(r"^(\d+)(?:-(\d+)(?::(\d+))?)?$")


def parse_ranks(text: str) -> list[int]:
    """Ranks in a text like 0-7,64,128-255:8 (the last: every eighth), ascending. Raises BadParameter."""
    found: set[int] = set()
    for part in text.split(","):
        match = _SPAN.match(part.strip())
        if match is None:
            raise click.BadParameter(f"{part!r} is no rank and no span of ranks. Write them as in 0-7,64,128-255:8.")
        low, high, every = (None if g is None else int(g) for g in match.groups())
        assert low is not None
        if (high is not None and high < low) or every == 0:
            raise click.BadParameter(f"{part!r} holds no rank.")
        found.update(range(low, (low if high is None else high) + 1, every or 1))
    return sorted(found)


def _ranks(_context: click.Context, _parameter: click.Parameter, value: str | None) -> list[int] | None:
    if value is None:
        return None
    return [] if value == "none" else parse_ranks(value)


def _list_faults(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if not value or context.resilient_parsing:
        return
    known = _faults().FAULTS
    width = max(map(len, known), default=0)
    for name, fault in sorted(known.items()):
        click.echo(f"{name:<{width}}  {fault.sentence}")
    context.exit()


def _faults() -> ModuleType:
    import importlib

    try:
        return importlib.import_module("traceanalyzer.simulate.faults")
    except ModuleNotFoundError as error:
        if error.name != "traceanalyzer.simulate.faults":
            raise
        raise InputError("this version of traceanalyzer has no faults to simulate yet.") from None


@click.command("simulate")
@click.argument("job_file", metavar="JOB", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@run_option
@click.option("--steps", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Steps to run.")
@click.option(
    "--ranks",
    callback=_ranks,
    metavar="SPEC",
    help="Ranks to record, like 0-7,64,128-255:8 (every eighth); all are simulated.  [default: all]",
)
@click.option(
    "--profiled",
    callback=_ranks,
    metavar="SPEC",
    help="Of these, the ranks that ran the profiler; none: calls of the hooks alone, without times.  [default: all]",
)
@click.option("--no-hooks", is_flag=True, help="No records of the hooks: what the profiler alone tells.")
@click.option(
    "--costs",
    "costs_file",
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="TOML: rates, latencies, jitter, slow ranks and links, clocks, where they differ from a node of 8 H100.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Seed of the jitter."
)
@click.option(
    "--kineto",
    "kineto_folder",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Also write each rank's trace as PyTorch's profiler would.",
)
@click.option("--torch", default="2.13", show_default=True, metavar="VERSION", help="Whose profiler, with --kineto.")
@click.option(
    "--truth",
    "truth_file",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write what is true of the run, to hold an analysis against: a JSON document.",
)
@click.option(
    "--fault", "fault_texts", multiple=True, metavar="NAME[:KEY=VALUE,...]", help="Put a fault in. Repeatable."
)
@click.option(
    "--list-faults",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_faults,
    help="List the faults and exit.",
)
@click.option("--progress/--no-progress", default=True, help="A progress bar, on a terminal.  [default: progress]")
def simulate_command(
    job_file: Path,
    out: Path,
    steps: int,
    ranks: list[int] | None,
    profiled: list[int] | None,
    no_hooks: bool,
    costs_file: Path | None,
    seed: int,
    kineto_folder: Path | None,
    torch: str,
    truth_file: Path | None,
    fault_texts: tuple[str, ...],
    progress: bool,
) -> None:
    """Simulate a job: a run as its recording would look, with known answers.

    JOB is a TOML or YAML file with Megatron's argument names, Megatron's log of rank 0, or a text with the launch command.
    Every rank is simulated, with kernels, collectives that end when the last rank has come, pipeline messages and streams;
    times follow from simple costs. The same arguments give the same file. Everything that reads a run reads this one: diff,
    info, query.
    """
    from traceanalyzer.reports import text
    from traceanalyzer.simulate import Collected, Costs, simulate

    refuse_own_input(out, [job_file])
    refuse_own_input(truth_file, [job_file, out])
    if no_hooks and profiled == []:
        raise click.UsageError("--no-hooks with --profiled none leaves nothing recorded.")
    if kineto_folder is not None and profiled == []:
        raise click.UsageError("--kineto writes what the profiler recorded, and --profiled none leaves nothing of it.")
    job = read_job_file(job_file)
    costs = Costs() if costs_file is None else Costs.read(costs_file)
    faults: list[Any] = [_faults().parse(fault) for fault in fault_texts] if fault_texts else []
    if job.world_size is not None:
        for name, chosen in (("--ranks", ranks), ("--profiled", profiled)):
            if chosen and chosen[-1] >= job.world_size:
                raise click.UsageError(f"{name}: rank {chosen[-1]} is not in a world of {job.world_size}.")
    found = simulate(
        job,
        steps=steps,
        costs=costs,
        seed=seed,
        ranks=ranks,
        faults=faults,
        collected=Collected(hooks=not no_hooks, profiled=profiled),
    )
    with _bar(shown=progress) as step:
        rows = found.write(out, progress=step)
    if truth_file is not None:
        found.write_truth(truth_file)
    kept = found.timeline.kept
    click.echo(f"{out}   simulated, seed {seed}   {text.size(out.stat().st_size)}")
    click.echo(f"ranks   {text.ranges(kept)} of {found.timeline.world_size}   {text.counted(steps, 'step')}")
    click.echo(f"rows    {', '.join(f'{text.count(n)} {kind}' for kind, n in sorted(rows.items()))}")
    if kineto_folder is not None:
        from traceanalyzer.simulate.kineto import write_kineto

        # a run without a profiler on some ranks has traces of the others only
        written = write_kineto(out, kineto_folder, torch=torch, ranks=profiled)
        click.echo(f"traces  {text.counted(len(written), 'file')} in {kineto_folder}")
    if truth_file is not None:
        click.echo(f"truth   {truth_file}")
    for fault in found.faults:
        click.echo(f"fault   {fault.get('name')}")
    click.echo(f"next    traceanalyzer info {out}")
    click.echo(f"        traceanalyzer diff {out}")


@contextmanager
def _bar(*, shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar over what is written, on stderr and only on a terminal; gives what to call on the way."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("writing"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("writing", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
