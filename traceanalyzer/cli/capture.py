"""``traceanalyzer capture``: some steps of a job that runs with the collector in it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from traceanalyzer.cli.common import format_option
from traceanalyzer.collectors import control, launch

_WORDS = {
    "done": "recorded",
    "joined": "recording",
    "armed": "armed",
    "late": "late",
    "skipped": "skipped",
    "refused": "refused",
    "waiting": "without steps",
    "ended": "ended before",
    "failed": "failed",
}


@click.command("capture")
@click.argument("run_dir", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="RUN_DIR")
@click.option("--steps", type=click.IntRange(1, 10_000), default=3, show_default=True, help="How many steps to record.")
@click.option(
    "--ranks",
    metavar="auto|all|0,3,8-15",
    help="Ranks that torch.profiler records; hooks are on all.  [default: as the job was started]",
)
@click.option("--profile/--no-profile", default=True, show_default=True, help="With torch.profiler, or hooks only.")
@click.option(
    "--at", "start", type=click.IntRange(0), metavar="STEP", help="The first step.  [default: the next safe one]"
)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Follow until every rank is through.")
@click.option("--timeout", type=click.FloatRange(1), default=600.0, show_default=True, help="Seconds to follow.")
@format_option
def capture_command(
    run_dir: Path,
    steps: int,
    ranks: str | None,
    profile: bool,
    start: int | None,
    wait: bool,
    timeout: float,
    form: str,
) -> None:
    """Record some steps of a job that runs with the collector in it.

    The job was started with `traceanalyzer attach --dormant`, or with hooks only. All its ranks begin at the same step,
    which is chosen far enough ahead for each of them to know of it; right after the start of a job that takes until its
    steps are timed. A rank that learns of it too late joins at the
    fallback step or skips, and both this command and the run say so.

    Exit codes: 0 all ranks recorded; 1 some did not; 2 the job cannot be reached, or usage.
    """
    try:
        chosen = _ranks(ranks)
        found = control.living(run_dir)
        if start is None:
            found = control.paced(run_dir, found)
        first = control.choose_start(found) if start is None else _checked(start, found)
    except (control.CaptureError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    document = control.request(run_dir, start=first, steps=steps, ranks=chosen, profile=profile)
    text = form == "text"
    if text:
        last = first + steps - 1
        what = f"step {first}" if steps == 1 else f"steps {first} to {last}"
        click.echo(f"asked   {what} of {_counted(len(found), 'rank')}, {_pace(found, first)}")
        for line in _absent(found):
            click.echo(f"absent  {line}")
    if not wait:
        if text:
            click.echo(
                f"next    traceanalyzer merge {run_dir} -o run.parquet   (once the job is past step {first + steps})"
            )
        else:
            click.echo(json.dumps({"schema": "traceanalyzer.capture_result/1", "request": document}, indent=2))
        return
    progress = _follow(run_dir, document, found, timeout, text)
    recorded = len(progress.by_state.get("done", [])) if progress is not None else 0
    if text:
        _say(progress, timeout)
        if recorded:
            click.echo(f"next    traceanalyzer merge {run_dir} -o run.parquet")
    else:
        click.echo(json.dumps(_result(document, progress), indent=2))
    if recorded < len(found):
        raise click.exceptions.Exit(1)


def _ranks(text: str | None) -> str | list[int] | None:
    """The ranks to profile; None: as the job was started."""
    return None if text is None or text.strip() == "auto" else launch.parse_ranks(text)


def _checked(start: int, found: list[control.Beat]) -> int:
    there = max((beat.step for beat in found if beat.step is not None), default=-1)
    if start <= there:
        raise ValueError(f"--at {start}: the job is at step {there} already")
    return start


def _pace(found: list[control.Beat], first: int) -> str:
    known = [beat for beat in found if beat.step is not None]
    there = max((beat.step or 0 for beat in known), default=0)
    paces = sorted(beat.step_s for beat in known if beat.step_s)
    if not paces:
        return f"now at step {there}"
    pace = paces[len(paces) // 2]
    return f"now at step {there}, {pace:.3g} s each: begins in about {pace * (first - there):.0f} s"


def _absent(found: list[control.Beat]) -> list[str]:
    """Ranks that the world has and that gave no heartbeat, and ranks that mark no steps."""
    world = max((beat.world_size or 0 for beat in found), default=0)
    missing = sorted(set(range(world)) - {beat.rank for beat in found})
    lines = []
    if missing:
        lines.append(f"{_list(missing)}: no heartbeat: without the collector, or gone")
    stepless = [beat.rank for beat in found if beat.step is None]
    if stepless:
        lines.append(f"{_list(stepless)}: no step was marked there, so nothing can begin at one")
    return lines


def _list(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:12])
    more = f" and {len(ranks) - 12} more" if len(ranks) > 12 else ""
    return f"rank {shown}{more}" if len(ranks) == 1 else f"ranks {shown}{more}"


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def _follow(
    run_dir: Path, document: dict[str, Any], found: list[control.Beat], timeout: float, text: bool
) -> control.Progress | None:
    """Follows the request, with a line that changes where stderr is a terminal."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    progress = None
    if text and console.is_terminal:
        with console.status("waiting for the ranks") as status:
            for progress in control.follow(run_dir, document, found, timeout):
                status.update(_line(progress))
        return progress
    before, said_at = "", 0.0
    for progress in control.follow(run_dir, document, found, timeout):
        line = _states(progress)
        if text and line != before and time.monotonic() - said_at > 1:
            click.echo(_line(progress), err=True)
            before, said_at = line, time.monotonic()
    return progress


def _states(progress: control.Progress) -> str:
    parts = [f"{len(beats)} {_WORDS.get(what, what)}" for what, beats in sorted(progress.by_state.items())]
    parts += [f"{len(progress.unheard)} not heard"] if progress.unheard else []
    parts += [f"{len(progress.gone)} gone"] if progress.gone else []
    return ", ".join(parts)


def _line(progress: control.Progress) -> str:
    where = "no step yet" if progress.at_step is None else f"at step {progress.at_step} of {progress.start}"
    return f"{where}: {_states(progress)}"


def _say(progress: control.Progress | None, timeout: float) -> None:
    if progress is None:
        return
    for what, beats in sorted(progress.by_state.items()):
        groups: dict[tuple[Any, Any], list[int]] = {}
        for beat in beats:
            answer = beat.capture or {}
            groups.setdefault((answer.get("step"), answer.get("why")), []).append(beat.rank)
        for (step, why), ranks in groups.items():
            where = f" from step {step}" if step is not None and what in ("done", "joined") else ""
            click.echo(f"{_WORDS.get(what, what):7} {_list(ranks)}{where}{f': {why}' if why else ''}")
    if progress.unheard:
        click.echo(f"unheard {_list([b.rank for b in progress.unheard])}: did not answer within {timeout:.0f} s")
    if progress.gone:
        click.echo(
            f"gone    {_list([b.rank for b in progress.gone])}: no sign of life, or ended before the steps were recorded"
        )


def _result(document: dict[str, Any], progress: control.Progress | None) -> dict[str, Any]:
    """The document of ``--format json``."""
    ranks: dict[str, list[dict[str, Any]]] = {}
    if progress is not None:
        for what, beats in progress.by_state.items():
            ranks[what] = [{"rank": b.rank, **{k: (b.capture or {}).get(k) for k in ("step", "why")}} for b in beats]
        ranks["unheard"] = [{"rank": b.rank} for b in progress.unheard]
        ranks["gone"] = [{"rank": b.rank} for b in progress.gone]
    return {"schema": "traceanalyzer.capture_result/1", "request": document, "ranks": ranks}
