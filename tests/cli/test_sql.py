"""``traceanalyzer sql``: formats that lose nothing, a table that says what it leaves out, errors that help."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import Result

from traceanalyzer.reports import rows

Cli = Callable[..., Result]
WriteRun = Callable[..., Path]

ODD = """SELECT 9007199254740993 AS big, 18446744073709551615::UBIGINT AS huge, NULL::BIGINT AS nothing, '' AS empty,
'a,"b"' AS quoted, [1, NULL] AS list, {'k': 'v'} AS struct, 0.1 AS dec, true AS yes, 'NaN'::DOUBLE AS nan"""


@pytest.fixture
def run(write_run: WriteRun) -> Path:
    """Three calls on one rank, two of them of the tensor-parallel group."""
    call = {"rank": 0, "source": "kineto", "op": "all_reduce", "dtype": "float16", "completeness": "full"}
    return write_run(
        "run.parquet",
        {
            "comm_record": [
                {**call, "call_id": 0, "group_id": "8", "in_elems": 100, "comms_id": 2**64 - 1},
                {**call, "call_id": 1, "group_id": "8", "in_elems": 200},
                {**call, "call_id": 2, "in_elems": None},
            ],
            "process_group": [
                {"rank": 0, "source": "kineto", "group_id": "8", "description": "TENSOR_MODEL_PARALLEL_GROUP"}
            ],
            "rank": [{"rank": 0, "source": "kineto"}],
        },
    )


def test_a_table_with_roles(run_cli: Cli, run: Path) -> None:
    query = "SELECT role, count(*) AS calls, sum(payload_bytes) AS bytes FROM comm GROUP BY role ORDER BY role"
    done = run_cli("sql", "run.parquet", query)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == (
        "role  calls  bytes\n"
        "----  -----  -----\n"
        "tp        2    600\n"
        "null      1   null\n"
        "2 rows\n"
    )  # fmt: skip


def test_a_table_says_what_it_leaves_out(run_cli: Cli, run: Path) -> None:
    done = run_cli("sql", "run.parquet", "SELECT range AS n, repeat('x', 61) AS long FROM range(1000)", "--limit", "2")
    assert done.stdout == (
        "n  long\n"
        f"-  {'-' * 60}\n"
        f"0  {'x' * 57}...\n"
        f"1  {'x' * 57}...\n"
        "cells that end with ... are cut to 60 characters\n"
        "998 of 1,000 rows not shown\n"
    )
    assert run_cli("sql", "run.parquet", "FROM range(1000)").stdout.splitlines()[-1] == (
        "960 of 1,000 rows not shown; --limit N shows N, --format csv or json all"
    )


def test_csv_is_exact(run_cli: Cli, run: Path) -> None:
    done = run_cli("sql", "run.parquet", ODD, "--format", "csv")
    assert done.stdout == (
        "big,huge,nothing,empty,quoted,list,struct,dec,yes,nan\n"
        '9007199254740993,18446744073709551615,,"","a,""b""","[1, null]","{""k"": ""v""}",0.1,true,nan\n'
    )


def test_json_is_exact(run_cli: Cli, run: Path) -> None:
    done = run_cli("sql", "run.parquet", ODD, "--format", "json")
    assert json.loads(done.stdout, parse_float=Decimal) == {
        "schema": "traceanalyzer.sql/1",
        "columns": [
            {"name": "big", "type": "BIGINT"},
            {"name": "huge", "type": "UBIGINT"},
            {"name": "nothing", "type": "BIGINT"},
            {"name": "empty", "type": "VARCHAR"},
            {"name": "quoted", "type": "VARCHAR"},
            {"name": "list", "type": "INTEGER[]"},
            {"name": "struct", "type": "STRUCT(k VARCHAR)"},
            {"name": "dec", "type": "DECIMAL(2,1)"},
            {"name": "yes", "type": "BOOLEAN"},
            {"name": "nan", "type": "DOUBLE"},
        ],
        "rows": [
            {
                "big": 9007199254740993,
                "huge": 18446744073709551615,
                "nothing": None,
                "empty": "",
                "quoted": 'a,"b"',
                "list": [1, None],
                "struct": {"k": "v"},
                "dec": Decimal("0.1"),
                "yes": True,
                "nan": "nan",
            }
        ],
    }
    done = run_cli("sql", "run.parquet", "SELECT 1 AS one WHERE false", "--format", "json")
    assert json.loads(done.stdout)["rows"] == []


def test_parquet_is_exact(run_cli: Cli, run: Path, tmp_path: Path) -> None:
    query = "SELECT call_id, comms_id, in_elems, sum(in_elems) OVER () AS total FROM comm ORDER BY call_id"
    done = run_cli("sql", "run.parquet", query, "-o", "out.parquet")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.schema.types == [pa.int64(), pa.uint64(), pa.int64(), pa.decimal128(38, 0)]
    assert table.to_pydict() == {
        "call_id": [0, 1, 2],
        "comms_id": [2**64 - 1, None, None],
        "in_elems": [100, 200, None],
        "total": [Decimal(300)] * 3,
    }


def test_the_suffix_of_the_file_chooses_the_format(run_cli: Cli, run: Path, tmp_path: Path) -> None:
    for name, start in (
        ("o.csv", "n\n5\n"),
        ("o.json", '{"schema": "traceanalyzer.sql/1"'),
        ("o.txt", "n\n-\n5\n1 row\n"),
    ):
        assert run_cli("sql", "run.parquet", "SELECT 5 AS n", "-o", name).exit_code == 0
        assert (tmp_path / name).read_text(encoding="utf-8").startswith(start)


def test_the_limit_holds_for_every_format(run_cli: Cli, run: Path) -> None:
    done = run_cli("sql", "run.parquet", "SELECT range AS n FROM range(200000)", "--format", "csv", "--limit", "3")
    assert done.stdout == "n\n0\n1\n2\n"
    done = run_cli("sql", "run.parquet", "SELECT range AS n FROM range(5)", "--format", "csv", "--limit", "0")
    assert done.stdout == "n\n"


def test_a_wrong_query_names_the_views(run_cli: Cli, run: Path) -> None:
    done = run_cli("sql", "run.parquet", "SELECT rol FROM comm")
    assert done.exit_code == 2
    assert done.stdout == ""
    first, *_, last = done.stderr.splitlines()
    assert first.startswith('Error: the query failed: Binder Error: Referenced column "rol" not found')
    assert last == "Views: run, comm, cpu_op, expert_rows, issue, kernel, metric, process_group, rank, span"


def test_a_query_that_fails_late_leaves_no_file(run_cli: Cli, run: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    for name in ("o.csv", "o.parquet"):
        done = run_cli("sql", "run.parquet", "SELECT CAST(name AS INTEGER) FROM (SELECT 'x' || range AS name FROM range(9))", "-o", name)  # fmt: skip  # noqa: E501
        assert done.exit_code == 2
        assert done.stderr.startswith("Error: the query failed: Conversion Error")
    assert sorted(tmp_path.iterdir()) == before


def test_parquet_needs_a_file(run_cli: Cli, run: Path) -> None:
    done = run_cli("sql", "run.parquet", "SELECT 1", "--format", "parquet")
    assert done.exit_code == 2
    assert done.stderr.endswith("Error: --format parquet is no text: say where to write it with -o FILE.\n")


def test_columns_of_one_name_are_refused_where_they_would_merge(run_cli: Cli, run: Path) -> None:
    done = run_cli("sql", "run.parquet", "SELECT 1 AS a, 2 AS a", "--format", "json")
    assert done.exit_code == 2
    assert done.stderr == "Error: json needs a name for each column, and several are called a: use AS.\n"
    assert run_cli("sql", "run.parquet", "SELECT 1 AS a, 2 AS a", "--format", "csv").stdout == "a,a\n1,2\n"


def test_without_a_query_the_views_are_listed(run_cli: Cli, run: Path) -> None:
    done = run_cli("sql", "run.parquet")
    assert done.exit_code == 0
    heads = [line for line in done.stdout.splitlines() if line and not line.startswith(" ")]
    assert heads == [
        "comm: a row is one call, from the source that says most, with its role and place",
        "cpu_op: a row is one operator or runtime call on the host",
        "expert_rows: a row is one call of the local experts of one MoE layer on one rank, and the rows each of them got",
        "issue: a row is something wrong or missing in the input",
        "kernel: a row is one activity on a device: a kernel, a copy or a memset",
        "metric: a row is one measured value",
        "process_group: a row is one process group as one rank knows it",
        "rank: a row is one recorded rank (or one source file whose rank is unknown)",
        "run: all rows of all kinds",
        "span: a row is a range or a mark: profiler step, annotation, module, synchronisation, the profiler's own overhead",
        'What the columns mean: docs/tables.md. A query: traceanalyzer sql RUN "SELECT ..."',
    ]
    assert (
        "metric: a row is one measured value\n    rank INTEGER, source VARCHAR, key VARCHAR, value DOUBLE,"
        in done.stdout
    )
    done = run_cli("sql", "run.parquet", "--format", "csv", "--limit", "2")
    assert done.stdout == "view,name,type\ncomm,rank,INTEGER\ncomm,source,VARCHAR\n"


def test_a_file_that_is_not_there(run_cli: Cli) -> None:
    done = run_cli("sql", "none.parquet", "SELECT 1")
    assert done.exit_code == 2
    assert done.stderr == (
        "Error: none.parquet: no such file, folder or glob. Import traces first: traceanalyzer import TRACE... -o "
        "none.parquet\n"
    )


def test_columns_that_do_not_fit_the_terminal_are_named() -> None:
    assert rows.table_lines(["a", "bbbb", "c"], [(1, "x", None), (22, "y\nz", None)], width=9) == [
        " a  bbbb",
        "--  ----",
        " 1  x",
        "22  y\\nz",
        "1 columns do not fit and are not shown: c",
    ]
