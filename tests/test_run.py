"""Opening a run: what it accepts, what it refuses with which sentence, and that the views lose nothing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from traceanalyzer import schema, traffic
from traceanalyzer.errors import InputError, SchemaError
from traceanalyzer.importers.spool import RunWriter, table_of
from traceanalyzer.run import Run

WriteRun = Callable[..., Path]


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Writes rows (kind -> rows) as a run table of this name."""

    def write(
        name: str, rows: Mapping[str, Sequence[Mapping[str, Any]]], metadata: Mapping[str, str] | None = None
    ) -> Path:
        path = tmp_path / name
        with RunWriter(path, metadata or {}) as out:
            for kind in sorted(rows):
                out.write(kind, [table_of(kind, rows[kind])])
        return path

    return write


def rank_rows(*ranks: int) -> dict[str, list[dict[str, Any]]]:
    """One row of kind rank for each rank."""
    return {"rank": [{"rank": r, "source": "kineto"} for r in ranks]}


def ranks_of(source: str | Path) -> list[int]:
    """The ranks a source holds."""
    with Run.open(source) as run:
        return [row["rank"] for row in run.rows("SELECT rank FROM rank ORDER BY rank")]


def status(word: str) -> dict[str, str]:
    """Metadata with an import status."""
    return {schema.META_IMPORT: json.dumps({"source": "kineto", "status": word})}


# what can be opened ------------------------------------------------------------------------------------------------------


def test_a_file_a_folder_and_a_glob(write_run: WriteRun, tmp_path: Path) -> None:
    first = write_run("runs/a.parquet", rank_rows(0))
    write_run("runs/deeper/b.parquet", rank_rows(1))
    write_run("other.parquet", rank_rows(7))
    assert ranks_of(first) == [0]
    assert ranks_of(str(first)) == [0]
    assert ranks_of(tmp_path / "runs") == [0, 1]
    assert ranks_of(tmp_path / "runs" / "*.parquet") == [0]
    assert ranks_of(tmp_path / "**" / "*.parquet") == [0, 1, 7]


def test_brackets_in_a_name_are_no_glob(write_run: WriteRun) -> None:
    write_run("run1.parquet", rank_rows(1))
    assert ranks_of(write_run("run[1].parquet", rank_rows(5))) == [5]


def test_a_folder_called_rank_3_does_not_overrule_the_column(write_run: WriteRun, tmp_path: Path) -> None:
    write_run("rank=3/a.parquet", rank_rows(0))
    write_run("rank=4/a.parquet", rank_rows(1))
    assert ranks_of(tmp_path) == [0, 1]


def test_the_workplace_of_an_import_is_no_part_of_a_folder(write_run: WriteRun, tmp_path: Path) -> None:
    write_run("runs/a.parquet", rank_rows(0))
    write_run("runs/.traceanalyzer-x/0/part.parquet", rank_rows(0))
    assert ranks_of(tmp_path / "runs") == [0]


def test_nothing_to_open(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.parquet: no such file, folder or glob\. Import traces first"):
        Run.open(tmp_path / "absent.parquet")
    with pytest.raises(InputError, match=r"no \.parquet file in this folder"):
        Run.open(tmp_path)


# what is refused ---------------------------------------------------------------------------------------------------------


def test_a_file_that_is_no_parquet(tmp_path: Path) -> None:
    path = tmp_path / "notes.parquet"
    path.write_text("not a table", encoding="utf-8")
    with pytest.raises(InputError, match=r"notes\.parquet: cannot be read as Parquet"):
        Run.open(path)


def test_parquet_that_is_no_run_table(tmp_path: Path) -> None:
    path = tmp_path / "sales.parquet"
    pq.write_table(pa.table({"rank": [1]}), path)
    with pytest.raises(SchemaError) as refusal:
        Run.open(path)
    assert str(refusal.value) == (
        f"{path}: a Parquet file, but not a run table (no traceanalyzer.schema in its metadata). Make one with traceanalyzer "
        "import."
    )


def test_one_stranger_among_runs_is_named(write_run: WriteRun, tmp_path: Path) -> None:
    write_run("runs/a.parquet", rank_rows(0))
    pq.write_table(pa.table({"rank": [1]}), tmp_path / "runs" / "b.parquet")
    with pytest.raises(SchemaError, match=r"b\.parquet: a Parquet file, but not a run table"):
        Run.open(tmp_path / "runs")


def test_a_newer_major_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    pq.write_table(pa.table({"rank": [1]}, schema=pa.schema([("rank", pa.int32())], {schema.META_SCHEMA: "2.0"})), path)
    with pytest.raises(SchemaError) as refusal:
        Run.open(path)
    assert str(refusal.value) == (
        f"{path}: written with schema version 2.0; this program reads up to 1.2. Update traceanalyzer."
    )


def test_a_newer_minor_version_is_read_without_its_new_columns(tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    columns = {"kind": ["rank"], "rank": [1], "novelty": ["x"]}
    table = pa.table(columns).replace_schema_metadata({schema.META_SCHEMA: "1.9"})
    pq.write_table(table, path)
    with Run.open(path) as run:
        assert run.metadata[schema.META_SCHEMA] == "1.9"
        assert run.rows("SELECT kind, rank, host FROM run") == [{"kind": "rank", "rank": 1, "host": None}]
        assert "novelty" not in run.sql("FROM run").columns


def test_columns_that_an_older_file_lacks_are_null(write_run: WriteRun, tmp_path: Path) -> None:
    kernel = {"rank": 0, "source": "kineto", "start_ns": 5, "dur_ns": 1, "graph_id": 7}
    table = pq.read_table(write_run("runs/old.parquet", {"kernel": [kernel]}))
    pq.write_table(table.drop_columns(["graph_id", "comms_id"]), tmp_path / "runs" / "old.parquet")
    query = "SELECT rank, graph_id FROM kernel ORDER BY rank"
    with Run.open(tmp_path / "runs" / "old.parquet") as run:
        assert run.rows(query) == [{"rank": 0, "graph_id": None}]
        types = dict(zip(run.sql("FROM comm").columns, map(str, run.sql("FROM comm").types), strict=True))
        assert types["comms_id"] == "UBIGINT"
    write_run("runs/new.parquet", {"kernel": [{**kernel, "rank": 1}]})
    with Run.open(tmp_path / "runs") as run:
        assert run.rows(query) == [{"rank": 0, "graph_id": None}, {"rank": 1, "graph_id": 7}]


# metadata ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "merged"),
    [
        (["complete", "complete"], "complete"),
        (["complete", "complete with rejects"], "complete with rejects"),
        (["complete with rejects", "partial", "complete"], "partial"),
    ],
)
def test_the_worst_import_status_wins(write_run: WriteRun, tmp_path: Path, words: list[str], merged: str) -> None:
    for rank, word in enumerate(words):
        write_run(f"runs/{rank}.parquet", rank_rows(rank), status(word))
    with Run.open(tmp_path / "runs") as run:
        assert run.import_status == merged


def test_jobs_in_the_metadata(write_run: WriteRun) -> None:
    with Run.open(write_run("a.parquet", rank_rows(0), {schema.META_JOB_INTENDED: '{"world_size": 2}'})) as run:
        assert run.job_text(schema.META_JOB_INTENDED) == '{"world_size": 2}'
        assert run.job_text(schema.META_JOB_CAPTURED) is None
        assert run.import_status is None


# views -------------------------------------------------------------------------------------------------------------------


def test_every_view_has_the_columns_of_its_kind(write_run: WriteRun) -> None:
    with Run.open(write_run("a.parquet", rank_rows(0))) as run:
        for view, kind in schema.VIEWS.items():
            found = run.sql(f"FROM {view}")
            wanted = [(c.name, schema.DUCKDB_TYPES[c.dtype]) for c in schema.columns_of(kind) if c.name != "kind"]
            extra = [("end_ns", "BIGINT"), ("payload_bytes", "BIGINT")] if view == "comm" else []
            assert list(zip(found.columns, map(str, found.types), strict=True)) == wanted + extra, view


def test_unsigned_ids_survive_and_null_stays_null(write_run: WriteRun) -> None:
    kernels = [
        {"rank": 0, "source": "kineto", "start_ns": 0, "dur_ns": 0, "external_id": 2**64 - 1, "stream": 0},
        {"rank": 0, "source": "kineto", "start_ns": 2**63 - 1, "dur_ns": None, "external_id": None, "stream": None},
    ]
    with Run.open(write_run("a.parquet", {"kernel": kernels})) as run:
        assert run.rows("SELECT start_ns, dur_ns, external_id, stream FROM kernel ORDER BY start_ns") == [
            {"start_ns": 0, "dur_ns": 0, "external_id": 18446744073709551615, "stream": 0},
            {"start_ns": 9223372036854775807, "dur_ns": None, "external_id": None, "stream": None},
        ]
        assert run.sql("SELECT max(external_id) FROM kernel").fetchall() == [(18446744073709551615,)]


def test_a_call_that_two_sources_saw_is_one_row_with_device_times(write_run: WriteRun) -> None:
    call = {"rank": 0, "op": "all_reduce", "dtype": "float32", "in_elems": 3, "start_ns": 10}
    records = [
        {**call, "call_id": 0, "source": "flight_recorder", "dur_ns": 9},
        {**call, "call_id": 0, "source": "kineto", "dur_ns": 4, "time_source": "kernel"},
        {**call, "call_id": 1, "source": "hook", "start_ns": None},
    ]
    with Run.open(write_run("a.parquet", {"comm_record": records})) as run:
        assert run.rows("SELECT call_id, source, end_ns, payload_bytes FROM comm ORDER BY call_id") == [
            {"call_id": 0, "source": "kineto", "end_ns": 14, "payload_bytes": 12},
            {"call_id": 1, "source": "hook", "end_ns": None, "payload_bytes": 12},
        ]


def test_payload_in_sql_is_payload_in_python(write_run: WriteRun) -> None:
    """The view's formula and traffic.payload_bytes are two spellings of one rule."""
    elems = (None, 0, 12, 2**40)
    facts = [
        {"op": op, "in_elems": n_in, "out_elems": n_out, "group_size": size, "dtype": dtype}
        for op, n_in, n_out, size, dtype in itertools.product(
            (*traffic.OPS, None), elems, elems, (None, 1, 4), (None, "bfloat16", "float32", "no_such_type")
        )
    ]
    facts += [{"op": "broadcast", "in_elems": 3, "out_elems": 3, "group_size": 2, "dtype": d} for d in traffic.DTYPES]
    rows = [{"rank": 0, "source": "kineto", "call_id": i, **fact} for i, fact in enumerate(facts)]
    with Run.open(write_run("a.parquet", {"comm_record": rows})) as run:
        found = [row["payload_bytes"] for row in run.rows("SELECT payload_bytes FROM comm ORDER BY call_id")]
    expected = [
        traffic.payload_bytes(f["op"], f["in_elems"], f["out_elems"], f["dtype"], f["group_size"]) for f in facts
    ]
    assert found == expected
    assert 2**40 * 4 * 4 in expected  # all_gather of 2**40 float32 a rank over 4 ranks, the output not recorded
