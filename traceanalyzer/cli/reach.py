"""``traceanalyzer attach --pid``: what is possible for a running process and why, and the gentlest of it done."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from traceanalyzer.collectors import daemon, launch, reach


def reach_processes(
    pids: Sequence[int], wanted: Path, settings: Mapping[str, Any], *, inject: bool, explain: bool
) -> int:
    """Says what is possible for each process; unless ``explain``, does it. ``inject`` allows the debugger.

    Exit code: 0 done or explained, 1 if a process was not reached. Raises UsageError if there is no such process.
    """
    try:
        found = [reach.explain(pid) for pid in pids]
    except ProcessLookupError as error:
        raise click.UsageError(f"{error}.") from None
    for one in found:
        for line in explained(one):
            click.echo(line)
    if explain:
        return 0
    ready = [one for one in found if one.way("collector").possible]
    for one in ready:
        click.echo(f"next     {one.way('collector').command}")
    rest = [one for one in found if one not in ready]
    into = [one for one in rest if one.way("remote_exec").possible or (inject and one.way("debugger").possible)]
    asked = [one for one in rest if one not in into and one.way("kineto_daemon").possible]
    left = [one for one in rest if one not in into and one not in asked]
    failed = len(left)
    for one in left:
        opt_in = " without --inject" if one.way("debugger").possible else ""
        click.echo(f"process {one.process.pid}: nothing is possible{opt_in}.")
    if into:
        failed += _enter(into, wanted, settings, inject)
    if asked:
        failed += _on_demand(asked, wanted)
    return 1 if failed else 0


def explained(found: reach.Reach) -> list[str]:
    """Lines that say what is possible for one process and why."""
    process = found.process
    version = "no CPython" if process.python is None else f"Python {process.python[0]}.{process.python[1]}"
    rank = "rank not stated" if process.rank is None else f"rank {process.rank}"
    command = shlex.join(process.command)
    lines = [f"process  {process.pid}   {rank}   {version}   {command[:80]}{'...' if len(command) > 80 else ''}"]
    lines += [f"{'yes' if way.possible else 'no':<8} {way.name}: {way.why}" for way in found.ways]
    return [*lines, *(f"note     {note}" for note in found.notes)]


def _run_dir(wanted: Path, settings: Mapping[str, Any]) -> Path:
    prepared = launch.prepare(wanted, None, settings)
    if prepared.note is not None:
        click.echo(f"note: {prepared.note}.", err=True)
    if prepared.run_dir is None:
        raise click.UsageError("give a --run-dir that can be written.")
    return prepared.run_dir


def _enter(found: Sequence[reach.Reach], wanted: Path, settings: Mapping[str, Any], inject: bool) -> int:
    """Puts the collector into the processes; how many it could not."""
    run_dir = _run_dir(wanted, settings)
    failed = 0
    for one in found:
        pid = one.process.pid
        done = reach.enter(pid, run_dir, settings, debugger=inject, say=lambda text: click.echo(f"         {text}"))
        pause = f", held for {done.pause_ns / 1e6:.0f} ms in {done.stops} stops" if done.stops else ""
        if done.log is None:
            failed += 1
            click.echo(f"process {pid}: not entered ({done.way}){pause}: {done.why}.")
        else:
            click.echo(f"process {pid}: entered ({done.way}){pause}; it writes {done.log.name}")
    if failed < len(found):
        folder = shlex.quote(str(run_dir))
        if settings.get("dormant"):
            click.echo(f"next     traceanalyzer capture {folder} --steps 3")
        else:
            click.echo(f"next     traceanalyzer merge {folder} -o run.parquet   (when the job has ended)")
    return failed


def _on_demand(found: Sequence[reach.Reach], wanted: Path) -> int:
    """Has the processes' own profilers write a trace; how many wrote none."""
    click.echo(f"asking   {len(found)} processes for a trace; they look every {daemon.POLL_S:g} s")
    try:
        results = daemon.capture([one.process.pid for one in found], wanted)
    except OSError as error:
        why = "another daemon listens there, dynolog perhaps" if error.errno is not None else ""
        click.echo(
            f"not possible: the profilers' socket cannot be taken ({error.strerror or error}){': ' + why if why else ''}."
        )
        return len(found)
    files = [shlex.quote(str(one.file)) for one in results if one.file is not None]
    for one in results:
        click.echo(f"process {one.pid}: {one.file if one.file is not None else one.why}")
    if files:
        click.echo(f"next     traceanalyzer import {' '.join(files)} -o run.parquet")
    return len(results) - len(files)
