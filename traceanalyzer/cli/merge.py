"""``traceanalyzer merge``: run tables of different ranks -> one file."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import NamedTuple

import click

from traceanalyzer import schema
from traceanalyzer.errors import InputError, SchemaError


@click.command("merge")
@click.argument("parts", nargs=-1, required=True, metavar="PART...")
@click.option(
    "-o",
    "--out",
    required=True,
    metavar="RUN",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write. It appears when whole; what was there is replaced.",
)
def merge_command(parts: tuple[str, ...], out: Path) -> None:
    """Merge run tables of different ranks into one file.

    A PART is a run table, or a folder or glob of them, each with the rows of one rank (or of a span of ranks that no other
    part reaches into). The job in the parts must be the same; the merged run is as complete as the worst part.
    """
    from traceanalyzer.importers import merge_files
    from traceanalyzer.reports import text
    from traceanalyzer.run import run_files

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
            elif key != schema.META_SCHEMA and key in merged and json.loads(merged[key]) != json.loads(value):
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


def _differences(left: str, right: str) -> str:
    """The fields in which two jobs differ, with both values."""
    a, b = json.loads(left), json.loads(right)
    if not isinstance(a, dict) or not isinstance(b, dict):
        return "other text"
    names = sorted(k for k in {*a, *b} - {"given"} if a.get(k) != b.get(k))
    shown = ", ".join(f"{n} {json.dumps(a.get(n))} and {json.dumps(b.get(n))}" for n in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "what was given explicitly"
