"""``traceanalyzer merge``: run tables of different ranks, or a collector's folder -> one file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from traceanalyzer import schema
from traceanalyzer.cli.common import read_job_file, run_option
from traceanalyzer.errors import InputError, SchemaError

if TYPE_CHECKING:
    from traceanalyzer.importers import ImportResult


@click.command("merge")
@click.argument("parts", nargs=-1, required=True, metavar="PART...")
@run_option
@click.option(
    "--job",
    "job_file",
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="RUN_DIR only: the job as intended, kept in the run beside what the job said of itself.",
)
@click.option(
    "--drop-raw/--keep-raw",
    default=None,
    help="RUN_DIR only: delete the profiler's traces that were read whole, or keep them.  [default: as attach was asked]",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="RUN_DIR only: processes that read files.  [default: one per processor]",
)
def merge_command(
    parts: tuple[str, ...], out: Path, job_file: Path | None, drop_raw: bool | None, workers: int | None
) -> None:
    """Merge run tables of different ranks, or what a collector left, into one file.

    A PART is a run table, or a folder or glob of them, each with the rows of one rank (or of a span of ranks that no other
    part reaches into). The job in the parts must be the same; the merged run is as complete as the worst part.

    Or it is one RUN_DIR, the folder that traceanalyzer attach leaves: its logs, traces and dumps become one run, with the
    job as it described itself. Ranks that are missing or were killed are named, the others are kept.
    """
    from traceanalyzer.importers import merge_files
    from traceanalyzer.importers.run_dir import is_run_dir
    from traceanalyzer.reports import text
    from traceanalyzer.run import run_files

    folders = [part for part in parts if is_run_dir(Path(part))]
    if folders:
        if len(parts) > 1:
            raise click.UsageError(f"{folders[0]} is what a collector left: give it alone, one RUN_DIR makes one run.")
        result = merge_run_dir(Path(folders[0]), out, job_file=job_file, drop_raw=drop_raw, workers=workers)
        print_run_dir(result, out)
        return
    if job_file is not None or drop_raw is not None or workers is not None:
        raise click.UsageError("--job, --drop-raw, --keep-raw and --workers go with a RUN_DIR, and there is none here.")
    files = [Path(f) for part in parts for f in run_files(part)]
    read = _in_order([_read(f) for f in files])
    metadata = _metadata(read)
    rows = merge_files([p.path for p in read], out, metadata)
    status = json.loads(metadata.get(schema.META_IMPORT, "{}")).get("status", "status not recorded")
    ranks = text.ranges(r for p in read for r in p.ranks) if read[0].ranks else "unknown"
    click.echo(f"{out}   import {status}   {text.size(out.stat().st_size)}")
    click.echo(f"ranks   {ranks}   from {text.counted(len(read), 'part')}")
    click.echo(f"rows    {', '.join(f'{text.count(n)} {kind}' for kind, n in sorted(rows.items()))}")
    click.echo(f"next    traceanalyzer info {out}")


def merge_run_dir(
    run_dir: Path,
    out: Path,
    *,
    job_file: Path | None = None,
    drop_raw: bool | None = None,
    workers: int | None = None,
    progress: Callable[[Path, int], None] | None = None,
) -> ImportResult:
    """Makes one run of a collector's folder, with the job that it captured and the one that was intended, if given.

    Raises InputError where the folder holds nothing that can be trusted.
    """
    from traceanalyzer.importers import default_workers
    from traceanalyzer.importers.run_dir import import_run_dir

    metadata = {} if job_file is None else {schema.META_JOB_INTENDED: read_job_file(job_file).to_json()}
    result = import_run_dir(
        run_dir,
        out,
        metadata=metadata,
        job_text=captured_job,
        workers=default_workers() if workers is None else workers,
        progress=progress,
        drop_raw=drop_raw,
    )
    if result.out is None:
        reasons = [str(i["sentence"]) for i in result.issues if i["severity"] == "error"]
        raise InputError(f"{run_dir}: refused, nothing was written. {' '.join(reasons)}")
    return result


def print_run_dir(result: ImportResult, out: Path) -> None:
    """Says what a collector's folder gave."""
    from traceanalyzer.cli.common import print_report
    from traceanalyzer.reports import issues, text

    folded = issues.fold(result.issues)
    ranks = text.ranges(result.ranks) if result.ranks else "unknown"
    click.echo(f"{out}   import {result.status}   {text.size(out.stat().st_size)}")
    click.echo(f"ranks   {ranks}   from {text.counted(len(result.files), 'file')}")
    click.echo(f"rows    {', '.join(f'{text.count(n)} {kind}' for kind, n in sorted(result.rows.items()))}")
    if folded:
        click.echo(f"issues  {issues.summary(folded)}")
        print_report(issues.render(folded, most=_MOST_ISSUES, run=str(out)))
    click.echo(f"next    traceanalyzer info {out}")
    click.echo(f"        traceanalyzer diff {out}")


_MOST_ISSUES = 10
_OF_ONE_RANK = frozenset({"rank", "local_rank", "curr_iteration", "iteration"})
"""Arguments of Megatron that differ from rank to rank, or while the job runs."""
_VERSIONS = {
    "megatron_core": "megatron_core_version",
    "transformer_engine": "transformer_engine_version",
    "torch": "torch_version",
}


def captured_job(said: Mapping[str, Any]) -> str:
    """The Job, as JSON text, in what a process says of itself (traceanalyzer.collectors.jobinfo).

    Raises JobError where it cannot be one, InputError where it says nothing of the job.
    """
    from traceanalyzer.job import parse_mapping

    arguments = said.get("job")
    if not isinstance(arguments, Mapping) or not arguments:
        raise InputError("it names no argument of the job.")
    stated = {str(name): value for name, value in arguments.items() if name not in _OF_ONE_RANK}
    versions = said.get("versions")
    for name, field in _VERSIONS.items():
        if isinstance(versions, Mapping) and versions.get(name) and stated.get(field) is None:
            stated[field] = str(versions[name])
    return parse_mapping(stated).to_json()


class Part(NamedTuple):
    """One run table: its ranks, ascending (empty: its one rank is unknown), and its metadata."""

    path: Path
    ranks: list[int]
    metadata: dict[str, str]


def _read(path: Path) -> Part:
    import pyarrow.parquet as pq

    from traceanalyzer.run import Run

    with Run.open(path) as run:
        newer = set(pq.read_schema(path).names) - set(schema.BY_NAME)
        if newer:
            raise SchemaError(
                f"{path}: has columns that this program does not know ({', '.join(sorted(newer))}) and would lose: it was "
                "written by a newer one. Update traceanalyzer."
            )
        found = run.rows("SELECT DISTINCT rank FROM rank ORDER BY rank")
        return Part(path, [row["rank"] for row in found if row["rank"] is not None], run.metadata)


def _in_order(parts: list[Part]) -> list[Part]:
    """The parts by rank. Raises InputError where a rank is unknown, is there twice, or where spans of ranks interleave."""
    owners: dict[int, Path] = {}
    for part in parts:
        if not part.ranks and len(parts) > 1:
            raise InputError(
                f"{part.path}: its rank is unknown, so it cannot stand beside others. Import its trace again with --rank N."
            )
        for rank in part.ranks:
            if rank in owners:
                raise InputError(
                    f"rank {rank} is in {owners[rank]} and in {part.path}: one of them is from another run, or given twice. "
                    "Leave one out."
                )
            owners[rank] = part.path
    ordered = sorted(parts, key=lambda p: p.ranks)
    for before, after in itertools.pairwise(ordered):
        if before.ranks[-1] > after.ranks[0]:
            raise InputError(
                f"the ranks of {before.path} ({before.ranks[0]} to {before.ranks[-1]}) reach into those of {after.path} "
                f"(from {after.ranks[0]}): merge files of single ranks instead (traceanalyzer import -o FOLDER writes them)."
            )
    return ordered


def _metadata(parts: list[Part]) -> dict[str, str]:
    """What the parts agree on, and the worst import status. Raises InputError where two state different jobs."""
    from traceanalyzer.importers import STATUSES

    merged: dict[str, str] = {}
    said_by: dict[str, Path] = {}
    statuses: list[str] = []
    sources: set[str] = set()
    for part in parts:
        for key, value in part.metadata.items():
            if key == schema.META_IMPORT:
                entry = json.loads(value)
                statuses.append(str(entry.get("status")))
                sources |= {str(entry["source"])} if "source" in entry else set()
            elif key in _JOBS and key in merged and json.loads(merged[key]) != json.loads(value):
                raise InputError(
                    f"{said_by[key]} and {part.path} hold different jobs ({key}: {_differences(merged[key], value)}). Import "
                    "the traces of one run with one job file."
                )
            elif key != schema.META_SCHEMA:
                merged.setdefault(key, value)
                said_by.setdefault(key, part.path)
    if statuses:
        worst = max(statuses, key=lambda s: STATUSES.index(s) if s in STATUSES else len(STATUSES))
        merged[schema.META_IMPORT] = json.dumps({"source": ", ".join(sorted(sources)), "status": worst})
    return merged


_JOBS = (schema.META_JOB_CAPTURED, schema.META_JOB_INTENDED)


def _differences(left: str, right: str) -> str:
    """The fields in which two jobs differ, with both values."""
    a, b = json.loads(left), json.loads(right)
    if not isinstance(a, dict) or not isinstance(b, dict):
        return "other text"
    names = sorted(k for k in {*a, *b} - {"given"} if a.get(k) != b.get(k))
    shown = ", ".join(f"{n} {json.dumps(a.get(n))} and {json.dumps(b.get(n))}" for n in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "what was given explicitly"
