"""``python -m traceanalyzer.collectors -- torchrun ...``: starts a job attached, with nothing but torch installed.

It leaves RUN_DIR; ``traceanalyzer merge RUN_DIR -o run.parquet`` makes the run of it, here or elsewhere.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from traceanalyzer import __version__
from traceanalyzer.collectors import launch


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m traceanalyzer.collectors",
        description="Start a training job with the collector in it; no change to the job.",
        epilog="Its exit code is the job's.",
    )
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="where the job leaves its records (default: run.d)")
    parser.add_argument("--steps", metavar="A-B", help="steps that torch.profiler records")
    parser.add_argument(
        "--ranks",
        default="auto",
        metavar="auto|all|0,3,8-15",
        help="ranks that torch.profiler records; auto: the first eight (hooks are on all ranks)",
    )
    parser.add_argument(
        "--hooks", choices=("auto", "methods", "dispatcher"), default="auto", help="how calls are caught"
    )
    parser.add_argument("--no-profile", action="store_true", help="hooks and marks only")
    parser.add_argument("--dormant", action="store_true", help="record nothing until traceanalyzer capture asks for it")
    parser.add_argument("--env", action="store_true", help="print lines for eval in a shell instead of starting a job")
    parser.add_argument("--version", action="version", version=f"traceanalyzer {__version__}")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="the job, as it is started")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it; the exit code is the job's, 2 for a call that cannot be used."""
    parser = _parser()
    given = parser.parse_args(arguments)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if bool(command) == bool(given.env):
        parser.error("give --env, or the command that starts the job after --")
    try:
        steps = launch.parse_steps(given.steps) if given.steps else None
        ranks = launch.parse_ranks(given.ranks)
    except ValueError as error:
        parser.error(str(error))
    profiled = (
        [] if given.no_profile else None if ranks == "all" else launch.first_ranks(None) if ranks == "auto" else ranks
    )
    settings = launch.config(
        steps=steps,
        ranks=ranks,
        profile_ranks=profiled if isinstance(profiled, list) else None,
        hooks=given.hooks,
        dormant=given.dormant,
    )
    several = launch.several(command, os.environ)
    wanted = given.run_dir or launch.default_run_dir(Path("run.parquet"))
    prepared = launch.prepare(wanted, command or None, settings, shared=several)
    if prepared.note is not None:
        _say(prepared.note)
    if given.env:
        if prepared.run_dir is None:
            return 2
        sys.stdout.write(launch.exports(prepared.run_dir, settings))
        return 0
    run_dir = prepared.run_dir
    if run_dir is None:
        _say("the job runs without the collector")
    environ = dict(os.environ) if run_dir is None else launch.environment(run_dir, settings, os.environ)
    ended = launch.run(command, environ)
    if ended.problem is not None:
        _say(ended.problem)
    if run_dir is not None:
        launch.finish(run_dir, ended)
        if not launch.speaks(os.environ):
            pass
        elif found := launch.logs(run_dir):
            _say(f"{run_dir}: {len(found)} logs. Next: traceanalyzer merge {run_dir} -o run.parquet")
        else:
            _say(f"{run_dir} has no log: {launch.why_no_log(command, os.environ)}")
    return ended.code


def _say(text: str) -> None:
    sys.stderr.write(f"traceanalyzer: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
