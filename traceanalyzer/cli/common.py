"""What several commands share: finding the job of a run, printing, options that look alike everywhere."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from traceanalyzer import schema
from traceanalyzer.errors import TraceAnalyzerError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from traceanalyzer.job import Job
    from traceanalyzer.links import Links
    from traceanalyzer.reports.gates import Result
    from traceanalyzer.run import Run

job_option = click.option(
    "--job",
    "job_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="The job as intended: TOML, YAML, Megatron's log of rank 0, or a text with the launch command.",
)
format_option = click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="What to print: a text to read, or one JSON document.",
)


links_option = click.option(
    "--links",
    "links_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Measured bandwidths: output of nccl-tests, or a TOML or CSV table of GB/s (docs/links.md).",
)


param_option = click.option(
    "--param",
    "given",
    multiple=True,
    metavar="NAME=VALUE",
    help="Value of a parameter of the query; NULL for none. May be given several times.",
)
stdout_option = click.option(
    "-o", "--out", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="Write here instead of stdout."
)
run_option = click.option(
    "-o",
    "--out",
    required=True,
    metavar="RUN",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The run table to write. It appears when whole; what was there is replaced.",
)


def parameters(given: Iterable[str]) -> dict[str, str]:
    """The values of --param. Raises UsageError for one that is no NAME=VALUE."""
    values: dict[str, str] = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        if not equals:
            raise click.UsageError(f"--param {pair}: must be NAME=VALUE.")
        values[key] = value
    return values


def fail_on_option(gates: str) -> Callable[[Any], Any]:
    """--fail-on, with what it says of itself."""
    return click.option("--fail-on", "expressions", multiple=True, metavar="EXPR", help=f"{gates} May be repeated.")


def read_links(path: Path | None) -> Links | None:
    """The links of a file; lines that could not be read are pointed out on stderr. None without a file."""
    if path is None:
        return None
    from traceanalyzer.links import read

    found = read(path)
    if found.unreadable:
        where = ", ".join(map(str, found.unreadable[:5])) + (", ..." if len(found.unreadable) > 5 else "")
        lines = "1 line" if len(found.unreadable) == 1 else f"{len(found.unreadable)} lines"
        click.echo(f"note: {path.name}: {lines} could not be read ({where})", err=True)
    return found


_PIPE_WIDTH = 160
"""Columns where there is no terminal to ask and COLUMNS is not set: the table with every column."""


class ChosenJob(NamedTuple):
    """The job a command uses, and where it comes from: file, intended, captured, or None without a job."""

    job: Job | None
    used: str | None


def job_of(run: Run, job_file: Path | None) -> ChosenJob:
    """The job of a run: from the file if given, else as intended, else as captured, else none."""
    from traceanalyzer.job import Job

    if job_file is not None:
        return ChosenJob(read_job_file(job_file), "file")
    for which, used in ((schema.META_JOB_INTENDED, "intended"), (schema.META_JOB_CAPTURED, "captured")):
        text = run.job_text(which)
        if text is not None:
            return ChosenJob(Job.from_json(text), used)
    return ChosenJob(None, None)


def read_job_file(path: Path) -> Job:
    """The job of a file; names in a hand-written one that look like a misspelt field are pointed out on stderr."""
    from traceanalyzer.job import read_job

    job = read_job(path)
    for name, field in job.likely_typos() if path.suffix in (".toml", ".yaml", ".yml") else ():
        click.echo(f"note: {path.name}: {name} is not a field this program knows; did you mean {field}?", err=True)
    return job


def refuse_own_input(out: Path | None, inputs: Iterable[str | Path]) -> None:
    """Refuses to write over a file that the command reads."""
    if out is not None and any(Path(i).resolve() == out.resolve() for i in inputs):
        raise click.UsageError(f"-o {out}: this file is read by the same command. Give another name.")


def print_json(document: dict[str, Any]) -> None:
    """Prints one JSON document."""
    click.echo(json.dumps(document, indent=2))


def print_report(report: RenderableType) -> None:
    """Prints something of rich's to stdout: as wide as the terminal, 80 columns in a pipe, no blanks at line ends."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=False)
    with console.capture() as captured:
        console.print(report)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def console_for(out: Path | None) -> Console:
    """Where a wide table goes: the terminal, a pipe, or a file, which has no colours."""
    from rich.console import Console

    stream = sys.stdout if out is None else StringIO()
    known = out is None and (stream.isatty() or bool(os.environ.get("COLUMNS")))
    width = None if known else _PIPE_WIDTH
    terminal = None if out is None else False  # FORCE_COLOR is about the terminal
    return Console(file=stream, width=width, force_terminal=terminal, highlight=False, markup=False, emoji=False)


# -- reports that are written as a page, Markdown, JSON or text --------------------------------------------------------

_FORMS = {".html": "html", ".htm": "html", ".md": "markdown", ".markdown": "markdown", ".json": "json"}


def report_options(printed: str, gates: str) -> Callable[[Any], Any]:
    """-o, --format and --fail-on of a report. printed: what is printed without -o; gates: what --fail-on says of itself."""
    options = (
        click.option(
            "-o",
            "--out",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            help=f"Write here: .html, .md or .json. Without it {printed} printed.",
        ),
        click.option(
            "--format",
            "form",
            type=click.Choice(["text", "html", "markdown", "json"]),
            help="What to write or print.  [default: by the name of -o, else text]",
        ),
        fail_on_option(gates),
    )

    def put(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return put


def report_form(out: Path | None, form: str | None) -> str:
    """What to write: text, html, markdown or json. Raises UsageError where the name of the file does not say."""
    kind = form or ("text" if out is None else _FORMS.get(out.suffix.lower()))
    if kind is None:
        raise click.UsageError(f"-o {out}: what to write? Name it .html, .md or .json, or give --format.")
    return kind


def report_text(name: str, kind: str, document: dict[str, Any], results: Sequence[Result], **options: Any) -> str:
    """A document as reports.``name`` (review, compare) shows it; ``options`` go to what renders text."""
    from importlib import import_module

    if kind == "json":
        return json.dumps(document, indent=1, allow_nan=False) + "\n"
    shown = import_module(f"traceanalyzer.reports.{name}.{'terminal' if kind == 'text' else kind}")
    if kind == "html":
        return str(shown.html(document))
    if kind == "markdown":
        return str(shown.markdown(document, [r.sentence for r in results]))
    console = console_for(None)
    with console.capture() as captured:
        console.print(shown.render(document, **options))
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def write_report(content: str, out: Path | None, *, printed: bool) -> None:
    """Writes a report to its file, which appears when whole, or to stdout if it is to be ``printed``."""
    if out is not None:
        with whole_file(out) as temporary:
            temporary.write_text(content, encoding="utf-8")
    elif printed:
        click.echo(content, nl=False)


@contextmanager
def whole_file(out: Path) -> Iterator[Path]:
    """A temporary name beside ``out`` that becomes ``out`` if all goes well."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        yield temporary
        os.replace(temporary, out)
    except OSError as error:
        raise TraceAnalyzerError(f"{out}: cannot be written ({error.strerror}).") from error
    finally:
        temporary.unlink(missing_ok=True)


def told() -> Callable[[str], None] | None:
    """Tells on stderr what is being worked out, on one line of a terminal ('' clears it); None where that is none."""
    if not sys.stderr.isatty():
        return None

    def tell(what: str) -> None:
        click.echo(f"\r\x1b[2K{what + ' ...' if what else ''}", err=True, nl=False)

    return tell
