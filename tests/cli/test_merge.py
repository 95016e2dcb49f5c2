"""``traceanalyzer merge``: rank order, metadata, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import Result

from traceanalyzer import schema
from traceanalyzer.run import Run

Cli = Callable[..., Result]
WriteRun = Callable[..., Path]


@pytest.fixture
def write_part(write_run: WriteRun) -> Callable[..., Path]:
    """A run table of one kernel and one rank row for each rank."""

    def write(name: str, *ranks: int | None, status: str = "complete", metadata: dict[str, str] | None = None) -> Path:
        imported = {schema.META_IMPORT: json.dumps({"source": "kineto", "status": status})}
        return write_run(
            name,
            {
                "kernel": [{"rank": r, "source": "kineto", "name": "k", "start_ns": 5, "dur_ns": 1} for r in ranks],
                "rank": [{"rank": r, "source": "kineto"} for r in ranks],
            },
            {**imported, **(metadata or {})},
        )

    return write


def test_parts_come_out_in_order_of_rank(run_cli: Cli, write_part: Callable[..., Path], tmp_path: Path) -> None:
    write_part("a.parquet", 10, metadata={schema.META_JOB_INTENDED: '{"world_size": 16}'})
    write_part("b.parquet", 2, 3, status="complete with rejects")
    write_part("c.parquet", 0, metadata={schema.META_JOB_INTENDED: '{"world_size": 16}'})
    done = run_cli("merge", "a.parquet", "b.parquet", "c.parquet", "-o", "run.parquet")
    assert (done.exit_code, done.stderr) == (0, "")
    assert re.sub(r"[\d.]+ KiB", "SIZE", done.stdout) == (
        "run.parquet   import complete with rejects   SIZE\n"
        "ranks   0, 2-3, 10   from 3 parts\n"
        "rows    4 kernel, 4 rank\n"
        "next    traceanalyzer info run.parquet\n"
    )
    table = pq.read_table(tmp_path / "run.parquet", columns=["kind", "rank"])
    assert table.column("kind").to_pylist() == ["kernel"] * 4 + ["rank"] * 4
    assert table.column("rank").to_pylist() == [0, 2, 3, 10] * 2
    with Run.open(tmp_path / "run.parquet") as run:
        assert run.metadata == {
            "traceanalyzer.schema": "1.2",
            "traceanalyzer.import": '{"source": "kineto", "status": "complete with rejects"}',
            "traceanalyzer.job.intended": '{"world_size": 16}',
        }


def test_a_folder_is_its_parts_and_the_worst_status_wins(
    run_cli: Cli, write_part: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "parts").mkdir()
    write_part("parts/x.parquet", 1, status="partial")
    write_part("parts/y.parquet", 0)
    assert run_cli("merge", "parts", "-o", "run.parquet").exit_code == 0
    with Run.open(tmp_path / "run.parquet") as run:
        assert run.import_status == "partial"
        assert run.rows("SELECT rank FROM rank ORDER BY rank") == [{"rank": 0}, {"rank": 1}]


def test_the_output_may_be_one_of_the_parts(run_cli: Cli, write_part: Callable[..., Path], tmp_path: Path) -> None:
    write_part("a.parquet", 0)
    write_part("b.parquet", 1)
    assert run_cli("merge", "a.parquet", "b.parquet", "-o", "a.parquet").exit_code == 0
    with Run.open(tmp_path / "a.parquet") as run:
        assert run.rows("SELECT count(*) AS n FROM kernel") == [{"n": 2}]


def test_a_rank_that_is_there_twice(run_cli: Cli, write_part: Callable[..., Path], tmp_path: Path) -> None:
    write_part("a.parquet", 0)
    write_part("b.parquet", 0)
    done = run_cli("merge", "a.parquet", "b.parquet", "-o", "run.parquet")
    assert done.exit_code == 2
    assert done.stderr == (
        "Error: rank 0 is in a.parquet and in b.parquet: one of them is from another run, or given twice. Leave one out.\n"
    )
    assert not (tmp_path / "run.parquet").exists()


def test_a_rank_that_is_unknown(run_cli: Cli, write_part: Callable[..., Path]) -> None:
    write_part("a.parquet", 0)
    write_part("b.parquet", None)
    done = run_cli("merge", "a.parquet", "b.parquet", "-o", "run.parquet")
    assert done.exit_code == 2
    assert done.stderr == (
        "Error: b.parquet: its rank is unknown, so it cannot stand beside others. Import its trace again with --rank N.\n"
    )


def test_ranks_that_interleave(run_cli: Cli, write_part: Callable[..., Path]) -> None:
    write_part("a.parquet", 0, 2)
    write_part("b.parquet", 1, 3)
    done = run_cli("merge", "a.parquet", "b.parquet", "-o", "run.parquet")
    assert done.exit_code == 2
    assert done.stderr == (
        "Error: the ranks of a.parquet (0 to 2) reach into those of b.parquet (from 1): merge files of single ranks instead "
        "(traceanalyzer import -o FOLDER writes them).\n"
    )


def test_different_jobs(run_cli: Cli, write_part: Callable[..., Path]) -> None:
    write_part("a.parquet", 0, metadata={schema.META_JOB_INTENDED: '{"world_size": 2, "fp16": true, "given": []}'})
    write_part("b.parquet", 1, metadata={schema.META_JOB_INTENDED: '{"world_size": 4, "given": ["world_size"]}'})
    done = run_cli("merge", "a.parquet", "b.parquet", "-o", "run.parquet")
    assert done.exit_code == 2
    assert done.stderr == (
        "Error: a.parquet and b.parquet hold different jobs (traceanalyzer.job.intended: fp16 true and null, world_size 2 "
        "and 4). Import the traces of one run with one job file.\n"
    )


def test_columns_of_a_newer_program_are_not_dropped(
    run_cli: Cli, write_part: Callable[..., Path], tmp_path: Path
) -> None:
    write_part("a.parquet", 0)
    table = pq.read_table(write_part("b.parquet", 1))
    pq.write_table(table.append_column("novelty", pa.nulls(len(table), pa.int64())), tmp_path / "b.parquet")
    done = run_cli("merge", "a.parquet", "b.parquet", "-o", "run.parquet")
    assert done.exit_code == 2
    assert done.stderr == (
        "Error: b.parquet: has columns that this program does not know (novelty) and would lose: it was written by a newer "
        "one. Update traceanalyzer.\n"
    )


def test_a_part_of_an_older_minor_version_has_nulls(
    run_cli: Cli, write_part: Callable[..., Path], tmp_path: Path
) -> None:
    write_part("a.parquet", 0)
    table = pq.read_table(write_part("b.parquet", 1))
    older = table.drop_columns(["graph_id"])
    with pq.ParquetWriter(tmp_path / "b.parquet", older.schema) as writer:
        for row in range(len(older)):  # a row group never mixes kinds
            writer.write_table(older.slice(row, 1))
    assert run_cli("merge", "a.parquet", "b.parquet", "-o", "run.parquet").exit_code == 0
    with Run.open(tmp_path / "run.parquet") as run:
        assert run.rows("SELECT rank, name, graph_id FROM kernel ORDER BY rank") == [
            {"rank": 0, "name": "k", "graph_id": None},
            {"rank": 1, "name": "k", "graph_id": None},
        ]
