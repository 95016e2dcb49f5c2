"""``traceanalyzer import``: profiler traces -> run table."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from traceanalyzer import schema
from traceanalyzer.cli.common import format_option, print_json, print_report, read_job_file, refuse_own_input
from traceanalyzer.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from traceanalyzer.importers import ImportResult

_MOST_ISSUES = 10


@click.command("import")
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...", type=click.Path(path_type=Path, exists=True))
@click.option(
    "-o",
    "--out",
    required=True,
    metavar="RUN",
    type=click.Path(path_type=Path),
    help="Where to write: a .parquet file, or a folder for one file per rank. It appears when whole; what was there is "
    "replaced.",
)
@click.option(
    "--job",
    "job_file",
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The job as intended, kept in the run: TOML, YAML, Megatron's log of rank 0, or a text with the launch command.",
)
@click.option(
    "--captured-job",
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="What the job said of itself, kept in the run: Megatron's log of rank 0, say.",
)
@click.option(
    "--rank", type=click.IntRange(min=0), metavar="N", help="The rank of the one trace, where it does not state it."
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes that read files.  [default: one per processor]",
)
@format_option
@click.option("--quiet", is_flag=True, help="No progress bar, and no text if all went well.")
def import_command(
    traces: tuple[Path, ...],
    out: Path,
    job_file: Path | None,
    captured_job: Path | None,
    rank: int | None,
    workers: int | None,
    form: str,
    quiet: bool,
) -> None:
    """Import traces of PyTorch's profiler into one run table.

    A TRACE is a .json or .json.gz file of one rank, or a folder of such files. What is damaged or missing in them is
    counted in the run as issues. Exit code 0: a run was written, also a partial one, which says so; 2: nothing in the
    traces can be trusted, and no file was written.
    """
    from traceanalyzer.importers import default_workers, import_traces, trace_files
    from traceanalyzer.importers.run_dir import is_run_dir

    folder = next((t for t in traces if is_run_dir(t)), None)
    if folder is not None:
        raise click.UsageError(
            f"{folder} is what a collector left, more than traces: traceanalyzer merge {folder} -o {out} makes one run of it."
        )
    files = trace_files(list(traces))
    if rank is not None and len(files) > 1:
        raise click.UsageError(
            f"--rank names the rank of one trace, and here are {len(files)}: they cannot all be rank {rank}. "
            "Import the trace that does not state its rank by itself with --rank, then use traceanalyzer merge."
        )
    refuse_own_input(out, [*files, *(f for f in (job_file, captured_job) if f is not None)])
    if out.suffix not in ("", ".parquet") and not out.is_dir():
        raise click.UsageError(f"-o {out}: give a name that ends in .parquet, or a folder.")
    metadata = {
        key: read_job_file(path).to_json()
        for key, path in ((schema.META_JOB_INTENDED, job_file), (schema.META_JOB_CAPTURED, captured_job))
        if path is not None
    }
    with _progress(files, shown=not quiet and form == "text") as progress:
        result = import_traces(
            files,
            out,
            metadata=metadata,
            told_rank=rank,
            workers=default_workers() if workers is None else workers,
            progress=progress,
        )
    if form == "json":
        print_json(result.document())
    if result.out is None:
        raise InputError(_refusal(result))
    if rank is not None and result.files[0].rank_source != "told":
        stated = {"header": "states", "file name": "has in its name"}[result.files[0].rank_source or "header"]
        click.echo(
            f"Note: --rank {rank} was not used: {result.files[0].file} {stated} rank {result.files[0].rank}.", err=True
        )
    if form == "text" and (not quiet or (result.issues and result.status != "complete")):
        print_report(_text(result, result.out, bool(metadata)))


def _refusal(result: ImportResult) -> str:
    sentences = []
    for issue in result.issues:
        if issue["severity"] == "error":
            file, sentence = str(issue.get("source_file") or ""), str(issue["sentence"])
            sentences.append(sentence if file in sentence else f"{file}: {sentence}")
    return "refused, nothing was written. " + " ".join(sentences)


def _text(result: ImportResult, out: Path, has_job: bool) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from traceanalyzer.reports import issues, text

    folded = issues.fold(result.issues)
    written = [out] if out.is_file() else sorted(out.glob("*.parquet"))
    head = Text.assemble(
        (str(out), "bold"),
        "   ",
        (f"import {result.status}", "" if result.status == "complete" else "bold yellow"),
        f"   {text.size(sum(p.stat().st_size for p in written))}",
    )
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    ranks = text.ranges(result.ranks) if result.ranks else "unknown: neither the file nor its name states one"
    left_out = len(result.files) - max(len(result.ranks), 1)
    kept = f"   from {text.counted(len(result.files) - left_out, 'file')}" if result.ranks else ""
    grid.add_row("ranks", ranks + kept + (f", {text.counted(left_out, 'file')} left out" if left_out else ""))
    grid.add_row("rows", ", ".join(f"{text.count(n)} {kind}" for kind, n in sorted(result.rows.items())))
    grid.add_row("issues", issues.summary(folded))
    parts: list[RenderableType] = [head, grid]
    if folded:
        parts.append(issues.render(folded, most=_MOST_ISSUES, run=str(out)))
    parts.append(
        Text(
            f"next    traceanalyzer info {out}\n        traceanalyzer diff {out}{'' if has_job else ' --job FILE'}",
            overflow="fold",
            no_wrap=False,
        )
    )
    return Group(*parts)


@contextmanager
def _progress(files: list[Path], *, shown: bool) -> Iterator[Callable[[Path, int], None] | None]:
    """A bar over the bytes of all files, on stderr and only on a terminal; gives what to call on the way."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield None
        return
    total = sum(os.path.getsize(f) for f in files)
    read: dict[Path, int] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=total)

        def step(file: Path, n: int) -> None:
            read[file] = max(n, read.get(file, 0))
            done = sum(read.values())
            bar.update(task, completed=done, description="reading" if done < total else "writing")

        yield step
