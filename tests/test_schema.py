"""The schema keeps the promises that its page makes, and the page is the schema's."""

from __future__ import annotations

import importlib.util
import keyword
from pathlib import Path
from types import ModuleType
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from traceanalyzer import schema

ROOT = Path(__file__).resolve().parent.parent
NAMES = [column.name for column in schema.COLUMNS]


def rows_of(query: str) -> list[tuple[Any, ...]]:
    """All rows of a query in a DuckDB of its own."""
    with duckdb.connect() as connection:
        return connection.execute(query).fetchall()


def generator() -> ModuleType:
    """docs/generate.py as a module; it is a script beside the page it writes, not part of the package."""
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_column_names_are_unique() -> None:
    assert len(NAMES) == len(set(NAMES))
    assert list(schema.BY_NAME) == NAMES


def test_no_column_is_a_python_keyword() -> None:
    assert set(NAMES) & {*keyword.kwlist, *keyword.softkwlist} == set()


def test_no_column_needs_quoting_in_duckdb() -> None:
    words = rows_of(
        "SELECT keyword_name FROM duckdb_keywords() "
        "WHERE keyword_category IN ('reserved', 'type_function', 'column_name')"
    )
    assert ("select",) in words
    assert set(NAMES) & {word for (word,) in words} == set()


def test_every_column_can_be_selected_bare() -> None:
    columns = ", ".join(f"NULL::{schema.DUCKDB_TYPES[column.dtype]} AS {column.name}" for column in schema.COLUMNS)
    bare = ", ".join(NAMES)
    assert rows_of(f"SELECT {bare} FROM (SELECT {columns}) ORDER BY {bare}") == [(None,) * len(NAMES)]


@pytest.mark.parametrize("kind", schema.KINDS)
def test_every_kind_has_columns_of_its_own(kind: str) -> None:
    names = [column.name for column in schema.columns_of(kind)]
    assert names[:3] == ["kind", "rank", "source"]
    assert len(names) > 3
    assert schema.kind_schema(kind).names == names


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(KeyError, match="no kind 'kernels'; kinds: comm_record, cpu_op"):
        schema.columns_of("kernels")


def test_every_column_belongs_to_known_kinds() -> None:
    for column in schema.COLUMNS:
        assert column.kinds, column.name
        assert set(column.kinds) <= set(schema.KINDS), column.name
        assert len(set(column.kinds)) == len(column.kinds), column.name


def test_every_kind_has_one_view() -> None:
    assert sorted(schema.VIEWS.values()) == sorted(schema.KINDS)


def test_every_column_is_described() -> None:
    for column in schema.COLUMNS:
        assert column.doc, column.name
        assert column.doc.endswith((".", "...")), column.name


def test_times_say_ns_and_are_integers() -> None:
    times = {column.name for column in schema.COLUMNS if column.unit == "ns"}
    assert times == {name for name in NAMES if name.endswith("_ns")}
    assert {"start_ns", "dur_ns", "t_issue_ns", "window_end_ns"} <= times
    assert {schema.BY_NAME[name].dtype for name in times} == {pa.int64()}


def test_sizes_say_bytes_or_elems_and_are_integers() -> None:
    for unit, ending in (("bytes", "_bytes"), ("elements", "_elems")):
        sizes = {column.name for column in schema.COLUMNS if column.unit == unit and not column.name.endswith("_dims")}
        assert sizes == {name for name in NAMES if name.endswith(ending)}
        assert sizes
        assert {schema.BY_NAME[name].dtype for name in sizes} == {pa.int64()}


def test_every_type_has_its_duckdb_type() -> None:
    assert {column.dtype for column in schema.COLUMNS} <= set(schema.DUCKDB_TYPES)


def test_recorded_values_that_do_not_fit_int64_are_unsigned() -> None:
    for name in ("external_id", "correlation", "comms_id"):
        assert schema.DUCKDB_TYPES[schema.BY_NAME[name].dtype] == "UBIGINT"


def sample_rows() -> list[dict[str, Any]]:
    """Rows whose values break careless types: unsigned 64 bit, null beside zero, empty beside absent lists."""
    call: dict[str, Any] = {
        "kind": "comm_record",
        "rank": 0,
        "source": "kineto",
        "start_ns": 1_790_857_026_000_000_001,
        "dur_ns": 0,
        "op": "all_to_all",
        "comms_id": 2**64 - 1,
        "in_elems": 0,
        "out_elems": 2**40,
        "in_splits": [0, 40],
        "out_splits": [],
        "splits_known": False,
        "call_path": ["MoELayer", "Schritt \u00e4"],
    }
    group: dict[str, Any] = {"kind": "process_group", "rank": 1, "group_id": "13", "ranks": [0, 2], "group_size": 2}
    metric: dict[str, Any] = {"kind": "metric", "key": "loss", "value": 0.1, "step": 3}
    return [dict.fromkeys(NAMES) | row for row in (call, group, metric)]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    table_schema = schema.arrow_schema({schema.META_JOB_INTENDED: '{"tp": 2}'})
    path = tmp_path / "run.parquet"
    options: dict[str, Any] = schema.writer_options()
    with pq.ParquetWriter(path, table_schema, **options) as writer:
        writer.write_table(pa.Table.from_pylist(sample_rows(), schema=table_schema))
    return path


def test_rows_come_back_from_parquet_as_written(run_file: Path) -> None:
    table = pq.read_table(run_file)
    assert table.schema.equals(schema.arrow_schema())
    assert table.to_pylist() == sample_rows()


def test_duckdb_sees_the_promised_types(run_file: Path) -> None:
    described = rows_of(f"DESCRIBE SELECT * FROM '{run_file}'")
    assert {row[0]: row[1] for row in described} == {c.name: schema.DUCKDB_TYPES[c.dtype] for c in schema.COLUMNS}


def test_duckdb_keeps_null_and_zero_and_unsigned_apart(run_file: Path) -> None:
    rows = rows_of(
        f"SELECT dur_ns, in_elems, comms_id, out_splits, seq, peer FROM '{run_file}' WHERE kind = 'comm_record'"
    )
    assert rows == [(0, 0, 18446744073709551615, [], None, None)]


def test_the_file_names_its_schema_version_and_the_job(run_file: Path) -> None:
    pairs = rows_of(f"SELECT decode(key), decode(value) FROM parquet_kv_metadata('{run_file}')")
    assert ("traceanalyzer.schema", "1.2") in pairs
    assert ("traceanalyzer.job.intended", '{"tp": 2}') in pairs


def test_text_is_dictionary_encoded_and_integers_are_deltas(run_file: Path) -> None:
    encodings = dict(rows_of(f"SELECT path_in_schema, encodings FROM parquet_metadata('{run_file}')"))
    assert "DICTIONARY" in encodings["op"]
    assert "DELTA_BINARY_PACKED" in encodings["start_ns"]


def test_the_page_of_tables_is_current() -> None:
    assert generator().difference() == ""


def test_a_stale_page_is_found_and_the_difference_named(tmp_path: Path) -> None:
    docs = generator()
    page = tmp_path / "tables.md"
    page.write_text(docs.render().replace("Thread id.", "Thread."), encoding="utf-8")
    found = docs.difference(page)
    assert "-| `tid` | `BIGINT` |  | Thread. |" in found
    assert "+| `tid` | `BIGINT` |  | Thread id. |" in found
    assert docs.difference(tmp_path / "absent.md").count("\n+") > 100


def test_the_page_explains_every_metadata_key() -> None:
    keys = {value for name, value in vars(schema).items() if name.startswith("META_")}
    assert set(generator().METADATA) == keys
