"""The command line. Commands are thin: they open, call and print; only this package prints or exits.

Each command is loaded when it is asked for, so ``--help`` is fast. Exit codes: 0 done, 2 usage or input that cannot be
used; a command that judges says its own (see docs/cli.md).
"""

from __future__ import annotations

import errno
import importlib
from typing import Any

import click

from traceanalyzer import __version__
from traceanalyzer.errors import TraceAnalyzerError

COMMANDS: dict[str, tuple[str, str]] = {
    "attach": (
        "traceanalyzer.cli.attach:attach_command",
        "Start a training job with the collector in it, or reach a running one.",
    ),
    "capture": (
        "traceanalyzer.cli.capture:capture_command",
        "Record some steps of a job that runs with the collector in it.",
    ),
    "import": ("traceanalyzer.cli.import_:import_command", "Import traces of PyTorch's profiler into one run table."),
    "info": ("traceanalyzer.cli.info:info_command", "Say what a run holds and what can be asked of it."),
    "diff": (
        "traceanalyzer.cli.diff:diff_command",
        "Compare a run with what its job should communicate.",
    ),
    "review": (
        "traceanalyzer.cli.review:review_command",
        "Review a run: verdict, ranked findings, where the step goes.",
    ),
    "compare": ("traceanalyzer.cli.compare:compare_command", "Compare run B with run A: what moved and what did not."),
    "export": (
        "traceanalyzer.cli.export:export_command",
        "Export a run for a trace viewer, or its tables.",
    ),
    "expect": (
        "traceanalyzer.cli.expect:expect_command",
        "Say what a job should communicate, without any trace.",
    ),
    "simulate": (
        "traceanalyzer.cli.simulate:simulate_command",
        "Simulate a job: a run as its recording would look, with known answers.",
    ),
    "sql": ("traceanalyzer.cli.sql:sql_command", "Ask a run with SQL; without a query, list its views."),
    "query": ("traceanalyzer.cli.query:query_command", "Answer one question of the library; without any, list them."),
    "merge": (
        "traceanalyzer.cli.merge:merge_command",
        "Merge run tables of different ranks, or what a collector left, into one file.",
    ),
}
"""Command -> where it is (module:attribute) and its line in ``--help``, which is the command's own first line."""


class Refusal(click.ClickException):
    """An error for the user, as text on stderr and exit code 2."""

    exit_code = 2


class _Commands(click.Group):
    """A group that imports a command only when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        try:
            command: click.Command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise Refusal(f"this version of traceanalyzer has no command {cmd_name!r} yet.") from None
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TraceAnalyzerError as error:
            raise Refusal(str(error)) from error
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            raise Refusal(f"{error.filename or 'the output'}: {error.strerror}.") from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="traceanalyzer", message="%(prog)s %(version)s")
def main() -> None:
    """Measured against expected communication of Megatron-style training.

    Start with `traceanalyzer import TRACE... -o run.parquet`, then ask the run: info, diff, sql.
    """
