"""``traceanalyzer attach``: a training job with the collector in it -> run table."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from traceanalyzer.collectors import launch
from traceanalyzer.errors import JobError, TraceAnalyzerError

if TYPE_CHECKING:
    from traceanalyzer.job import Job

# numpy, pyarrow and duckdb start threads, and a signal must reach the launcher's main thread: they are imported after
# the job has ended.


@click.command("attach", context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
@click.option("--steps", metavar="A-B", help="Steps that torch.profiler records, both included.")
@click.option(
    "--ranks",
    default="auto",
    show_default=True,
    metavar="auto|all|0,3,8-15",
    help="Ranks that torch.profiler records; hooks are on all. auto: one complete model-parallel replica, one full data-"
    "parallel and one full expert-parallel group.",
)
@click.option(
    "--hooks",
    type=click.Choice(["auto", "methods", "dispatcher"]),
    default="auto",
    show_default=True,
    help="How calls are caught; auto takes the cheapest way that suffices for the job.",
)
@click.option("--no-profile", is_flag=True, help="Hooks and marks only.")
@click.option("--dormant", is_flag=True, help="Record nothing until traceanalyzer capture asks for it.")
@click.option(
    "-o",
    "--out",
    default="run.parquet",
    show_default=True,
    metavar="RUN",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The run to write when the job has ended. It appears when whole; what was there is replaced.",
)
@click.option(
    "--run-dir",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the job leaves its records.  [default: RUN without .parquet, with .d]",
)
@click.option(
    "--drop-raw",
    is_flag=True,
    help="Delete the profiler's own trace files once they are in the run; with --env and --pid, `merge` does.",
)
@click.option(
    "--nccl-timing", is_flag=True, help="Set TORCH_NCCL_ENABLE_TIMING: durations of NCCL's calls, a CUDA event each."
)
@click.option("--env", "env_mode", is_flag=True, help="Print lines for eval in a shell instead of starting a job.")
@click.option(
    "--pid",
    "pids",
    multiple=True,
    type=click.IntRange(min=1),
    metavar="PID",
    help="Reach a process that runs: says what is possible for it and why, and does the gentlest of it. Repeatable.",
)
@click.option("--explain", is_flag=True, help="With --pid: say it, and do nothing.")
@click.option(
    "--inject",
    is_flag=True,
    help="With --pid: a debugger may stop the process for a moment, to put the collector into it.",
)
@click.pass_context
def attach_command(
    ctx: click.Context,
    command: tuple[str, ...],
    steps: str | None,
    ranks: str,
    hooks: str,
    no_profile: bool,
    dormant: bool,
    out: Path,
    run_dir: Path | None,
    drop_raw: bool,
    nccl_timing: bool,
    env_mode: bool,
    pids: tuple[int, ...],
    explain: bool,
    inject: bool,
) -> None:
    """Start a training job with the collector in it, or reach a running one.

    `traceanalyzer attach --steps 10-12 -- torchrun --nproc-per-node 8 pretrain_gpt.py ...` starts the job unchanged, passes
    signals to it, writes RUN when it has ended, and exits with the job's exit code. In a script that starts the job
    itself, on Slurm say: `eval "$(traceanalyzer attach --env --run-dir DIR)"`, and `traceanalyzer merge DIR` afterwards.

    A process reached with --pid records nothing until `traceanalyzer capture` asks for it, unless --steps is given.

    Exit codes: the job's; with --pid 0 done, 1 not possible; 2 usage.
    """
    if sum((bool(command), env_mode, bool(pids))) != 1:
        raise click.UsageError("give the command that starts the job (after --), or --env, or --pid.")
    if (inject or explain) and not pids:
        raise click.UsageError("--inject and --explain go with --pid.")
    try:
        chosen_steps = launch.parse_steps(steps) if steps else None
        chosen_ranks = launch.parse_ranks(ranks)
    except ValueError as error:
        raise click.UsageError(f"{error}.") from None
    wanted = run_dir or launch.default_run_dir(out)
    if pids:
        from traceanalyzer.cli.reach import reach_processes

        profiled = [] if no_profile else chosen_ranks if isinstance(chosen_ranks, list) else None
        settings = launch.config(
            steps=chosen_steps,
            ranks=chosen_ranks,
            profile_ranks=profiled,
            hooks=hooks,
            dormant=dormant or chosen_steps is None,
            keep_raw=not drop_raw,
        )
        ctx.exit(reach_processes(pids, wanted, settings, inject=inject, explain=explain))

    job = _job(command) if command else None
    chosen = Profiled([], "none") if no_profile else profiled_ranks(chosen_ranks, job)
    settings = launch.config(
        steps=chosen_steps,
        ranks=chosen_ranks,
        profile_ranks=chosen.ranks,
        hooks=hooks,
        dormant=dormant,
        keep_raw=not drop_raw,
    )
    several = launch.several(command, os.environ)
    prepared = launch.prepare(wanted, command or None, settings, shared=several)
    if prepared.note is not None:
        click.echo(f"note: {prepared.note}.", err=True)
    if env_mode:
        if prepared.run_dir is None:
            raise click.UsageError("give a --run-dir that can be written.")
        timing = 'TORCH_NCCL_ENABLE_TIMING="${TORCH_NCCL_ENABLE_TIMING:-1}"; export TORCH_NCCL_ENABLE_TIMING\n'
        click.echo(launch.exports(prepared.run_dir, settings) + (timing if nccl_timing else ""), nl=False)
        return
    environ = dict(os.environ)
    if prepared.run_dir is None:
        click.echo("note: the job runs without the collector.", err=True)
    else:
        environ = launch.environment(prepared.run_dir, settings, os.environ)
        if nccl_timing:
            environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")
        for line in announced(prepared.run_dir, settings, chosen, job) if launch.speaks(os.environ) else ():
            click.echo(line, err=True)
    ended = launch.run(command, environ)
    if ended.problem is not None:
        click.echo(f"Error: {ended.problem}", err=True)
    if prepared.run_dir is not None:
        launch.finish(prepared.run_dir, ended)
        if launch.speaks(os.environ):
            _collect(prepared.run_dir, out, ended, command, several, drop_raw)
    ctx.exit(ended.code)


# -- before ------------------------------------------------------------------------------------------------------------


class Profiled(NamedTuple):
    """Ranks that torch.profiler records, None for all, and why these."""

    ranks: list[int] | None
    why: str


def _job(command: Sequence[str]) -> Job | None:
    """What the command says of the job; None where it cannot be read."""
    from traceanalyzer.job import parse_command_line

    try:
        return parse_command_line(command)
    except TraceAnalyzerError:
        return None


def profiled_ranks(asked: str | list[int], job: Job | None) -> Profiled:
    """The ranks to profile. auto: rank 0's replica and groups in the job's layout, else the first eight ranks."""
    if asked == "all":
        return Profiled(None, "all")
    if isinstance(asked, list):
        return Profiled(asked, "as given")
    world = job.world_size if job is not None else None
    if job is not None and world is not None and "num_layers" in job.given:  # one of Megatron's, with its degrees
        try:
            layout = job.layout
            members = {rank for rank in range(world) if layout.coordinates(rank).dp == 0}
            for role in ("dp_cp", "ep", "edp"):
                members |= set(layout.group_of(role, 0) or ())
        except JobError:
            pass
        else:
            why = "one model-parallel replica, and rank 0's whole data- and expert-parallel groups"
            return Profiled(sorted(members) if len(members) < world else None, why)
    ranks = launch.first_ranks(world)
    if world is not None and len(ranks) == world:
        return Profiled(None, "all")
    return Profiled(ranks, "the first ones: the command does not tell the job's degrees")


def announced(run_dir: Path, settings: dict[str, Any], profiled: Profiled, job: Job | None) -> list[str]:
    """What is said before the job starts."""
    from traceanalyzer.reports import text

    lines = [f"records  {run_dir}"]
    if profiled.ranks == []:
        return [*lines, "profiler none"]
    steps = settings["steps"]
    if steps is None and not settings["dormant"]:
        return [
            *lines,
            "profiler none: hooks record every step; --steps A-B names the steps that torch.profiler records",
        ]
    ranks = "all ranks" if profiled.ranks is None else f"ranks {text.ranges(profiled.ranks)} ({profiled.why})"
    when = "when traceanalyzer capture asks for it" if steps is None else f"steps {steps[0]} to {steps[1]}"
    lines.append(f"profiler {ranks}, {when}")
    layers, microbatches = _size(job)
    if layers is None:
        return [*lines, "volume   unknown: the command does not tell layers and micro-batches"]
    count = (job.world_size if job is not None else None) if profiled.ranks is None else len(profiled.ranks)
    found = launch.volume(layers, microbatches, count, steps[1] - steps[0] + 1 if steps else None)
    line = f"volume   about {text.size(found.per_rank_and_step)} of compressed trace per profiled rank and step"
    if found.total is not None:
        line += f", {text.size(found.total)} in all"
    return [*lines, f"{line} (estimate: {layers} layers, {text.counted(microbatches, 'micro-batch', 'micro-batches')})"]


def _size(job: Job | None) -> tuple[int | None, int]:
    """Layers on one rank at most, and micro-batches (1 where not known)."""
    if job is None or job.num_layers is None:
        return None, 1
    stages = max(1, job.pipeline_model_parallel_size)
    return -(-job.num_layers // stages), job.num_microbatches or 1


# -- after -------------------------------------------------------------------------------------------------------------


def _collect(
    run_dir: Path, out: Path, ended: launch.Ended, command: Sequence[str], several: bool, drop_raw: bool
) -> None:
    """Makes the run and says what is in it. What goes wrong here is said; the exit code stays the job's."""
    found = launch.logs(run_dir)
    merge = f"traceanalyzer merge {shlex.quote(str(run_dir))} -o {shlex.quote(str(out))}"
    if drop_raw:
        merge += " --drop-raw"
    if ended.code:
        how = f"was ended by signal {ended.signal}" if ended.signal else f"ended with exit code {ended.code}"
        click.echo(f"job      {how}", err=True)
    if not found:
        click.echo(f"note: {run_dir} has no log: {launch.why_no_log(command, os.environ)}.", err=True)
        return
    if several:
        click.echo(f"next     {merge}   (when all parts of the job have ended)", err=True)
        return
    try:
        for line in imported(run_dir, out, drop_raw=drop_raw):
            click.echo(line, err=True)
    except KeyboardInterrupt:
        click.echo(f"\nnote: stopped before {out} was written; {merge} does it.", err=True)
    except Exception as error:  # noqa: BLE001 - the job's exit code is what counts
        click.echo(
            f"note: {out} was not written ({type(error).__name__}: {error}); records are in {run_dir}.", err=True
        )
        click.echo(f"next     {merge}", err=True)


def imported(run_dir: Path, out: Path, *, drop_raw: bool = False) -> list[str]:
    """Imports RUN_DIR into ``out``; the lines that say what is in it. drop_raw: as for merge_run_dir."""
    from traceanalyzer.cli.merge import merge_run_dir
    from traceanalyzer.reports import text
    from traceanalyzer.run import Run

    merge_run_dir(run_dir, out, drop_raw=drop_raw)
    with Run.open(out) as run:
        ranks = [row["rank"] for row in run.rows("SELECT DISTINCT rank FROM rank WHERE rank IS NOT NULL ORDER BY rank")]
        (calls,) = run.rows("SELECT count(*) AS n FROM comm")
        (steps,) = run.rows("SELECT count(DISTINCT recorded_step) AS n FROM comm")
        issues = run.rows("SELECT severity, code, sentence FROM issue WHERE severity <> 'info' LIMIT 6")
        status = json.loads(run.metadata.get("traceanalyzer.import", "{}")).get("status", "not recorded")
    lines = [
        f"run      {out}   import {status}   {text.size(out.stat().st_size)}",
        f"ranks    {text.ranges(ranks) if ranks else 'unknown'}",
        f"calls    {text.count(calls['n'])} in {text.counted(steps['n'], 'step')}",
    ]
    lines += [f"issue    {row['severity']}: {row['sentence']}" for row in issues[:5]]
    if len(issues) > 5:
        lines.append(f"issue    and more: traceanalyzer info {out}")
    return [*lines, f"next     traceanalyzer diff {shlex.quote(str(out))}"]
