"""The rules of the library: headers that are true, no query untested, none that is quadratic, ranks that stand alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

import traceanalyzer.queries as queries
from traceanalyzer import schema
from traceanalyzer.errors import InputError
from traceanalyzer.job import Job
from traceanalyzer.run import Run

OpenRun = Callable[..., Run]
NewRows = Callable[[], Any]
NAMES = list(queries.library())
HERE = Path(__file__).parent

GOOD = """\
-- gives: One thing.
-- needs: kernel
-- parameter: top BIGINT = 20 | How many,
--   at most.
-- column: rank INTEGER | | Global rank. | the source does not say
-- column: dur_ns BIGINT | ns | Duration. | never
SELECT rank, dur_ns FROM kernel WHERE rank < $top
"""


SIZES = {"dtype": "bfloat16", "in_elems": 64, "out_elems": 64, "group_size": 2}


def rich(rows: Any, ranks: tuple[int, ...] = (0, 1)) -> Any:
    """Two stages of a pipeline: each has passes, messages, copies, calls of several roles and kernels without a call."""
    for rank in ranks:
        start = 100 + 10 * rank
        rows.rank(rank, 0, 500, device_name="NVIDIA H100 80GB HBM3", world_size=2)
        rows.step(rank, 1, 0, 250 + rank)
        rows.step(rank, 2, 250 + rank, 500)
        for turn, begin in enumerate((start, start + 250)):
            rows.range(rank, "nn.Module: GPTModel_0", begin - 5, begin, 1)
            rows.kernel(rank, "gemm", begin, begin + 40 + rank, begin - 3)
            rows.range(rank, "autograd::engine::evaluate_function: AddmmBackward0", begin + 50, begin + 60, 2)
            rows.kernel(rank, "gemm", begin + 70, begin + 90, begin + 55, 2)
            both = {"ranks": [0, 1], "seq": turn}
            end = begin + 50 + rank
            rows.call(rank, "tp", "all_reduce", begin + 30, end, begin + 2, **SIZES, **both)
            splits = {"in_splits": [3, 5], "out_splits": [3, 5] if rank == 0 else [5, 3], "splits_known": True}
            rows.call(rank, "ep", "all_to_all", begin + 60, begin + 65, begin + 58, **SIZES, **both, **splits)
            message = "send" if rank == 0 else "recv"
            rows.call(rank, "pp", message, begin + 95, begin + 99, begin + 91, **SIZES, **both, peer=1 - rank)
        if rank == 0:
            rows.call(rank, "dp_cp", "all_reduce", 480, 485, 478, **SIZES, ranks=[0, 1], seq=0)
        rows.kernel(rank, "copy", 10, 14, 5)
        rows.kernel(rank, "comm", 2, 6 + rank, completeness="launched_before_window")
    return rows


@pytest.fixture(scope="module")
def rich_runs(write_rows: Callable[..., Path], new_rows: NewRows) -> Iterator[list[Run]]:
    """Both ranks of ``rich``, each alone, and a run without any rows but one of kind rank."""
    contents = [rich(new_rows()), rich(new_rows(), (0,)), rich(new_rows(), (1,)), {"rank": [{"rank": 0}]}]
    runs = [Run.open(write_rows(rows)) for rows in contents]
    yield runs
    for run in runs:
        run.close()


# every query --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_its_text_keeps_the_rules(name: str) -> None:
    assert queries.problems(queries.library()[name]) == []


@pytest.mark.parametrize("name", NAMES)
def test_it_gives_the_columns_that_its_header_says(rich_runs: list[Run], name: str) -> None:
    result = rich_runs[0].query(name)
    assert queries.mismatches(result) == []
    assert len(result) > 0 or result.query.level == "run"
    for column in result.query.columns:
        if column.nulls == "never":
            assert result.arrow()[column.name].null_count == 0, column.name


@pytest.mark.parametrize("name", NAMES)
def test_it_has_columns_also_without_rows(rich_runs: list[Run], name: str) -> None:
    result = rich_runs[3].query(name)
    assert queries.mismatches(result) == []


@pytest.mark.parametrize("name", [n for n in NAMES if queries.library()[n].level == "rank"])
def test_a_rank_query_does_not_look_at_other_ranks(rich_runs: list[Run], name: str) -> None:
    together = rich_runs[0].query(name).rows()
    alone = [row for run in rich_runs[1:3] for row in run.query(name).rows()]
    assert [r for rank in (0, 1) for r in together if r["rank"] == rank] == alone


@pytest.mark.parametrize("name", NAMES)
def test_it_has_a_test(name: str) -> None:
    tests = [f for f in HERE.parent.rglob("test_*.py") if f != Path(__file__)]
    asked = re.compile(rf"\.query\(\s*[\"']{name}[\"']")
    assert any(asked.search(f.read_text(encoding="utf-8")) for f in tests)


@pytest.mark.parametrize("name", NAMES)
def test_its_columns_are_no_keywords_and_name_their_unit(name: str) -> None:
    reserved = duckdb.connect().execute(
        "SELECT keyword_name FROM duckdb_keywords() WHERE keyword_category = 'reserved'"
    )
    keywords = {word for (word,) in reserved.fetchall()}
    for column in queries.library()[name].columns:
        assert column.name not in keywords
        if column.unit in ("ns", "bytes"):
            assert column.name.endswith(f"_{column.unit}"), column.name
        if column.name.endswith("_ns"):
            assert (column.unit, column.dtype) == ("ns", "BIGINT"), column.name


def test_made_tables_and_queries_have_names_of_their_own() -> None:
    assert not set(queries.MADE) & (set(NAMES) | set(schema.VIEWS))


# headers ------------------------------------------------------------------------------------------------------------------


def test_a_header_is_read() -> None:
    assert queries.parse("some", "rank", GOOD) == queries.Query(
        "some",
        "rank",
        "One thing.",
        ("kernel",),
        (),
        (queries.Parameter("top", "BIGINT", 20, "How many, at most."),),
        (
            queries.Column("rank", "INTEGER", "", "Global rank.", "the source does not say"),
            queries.Column("dur_ns", "BIGINT", "ns", "Duration.", "never"),
        ),
        "SELECT rank, dur_ns FROM kernel WHERE rank < $top",
    )


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("-- gives: One thing.\n", "", "some.sql: 0 header lines '-- gives: ...', must be 1"),
        ("-- needs: kernel\n", "-- needs: kernel\n-- needs: span\n", "2 header lines '-- needs: ...'"),
        ("-- gives: One", "-- gifs: One", "line 1: neither a header line nor the continuation"),
        ("top BIGINT = 20 |", "top BIGINT |", "parameter .* is not 'name TYPE = default | meaning'"),
        ("| ns | Duration. | never", "| ns | Duration.", "column .* is not 'name TYPE | unit | meaning | nulls'"),
        ("= 20", "= many", "many"),
    ],
)
def test_a_header_that_is_not_whole_is_refused(old: str, new: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        queries.parse("some", "rank", GOOD.replace(old, new))


def test_without_columns_it_is_refused() -> None:
    with pytest.raises(ValueError, match="no header line '-- column"):
        queries.parse("some", "rank", "\n".join(line for line in GOOD.splitlines() if "column" not in line))


# rules that the text alone shows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sql", "problem"),
    [
        ("SELECT rank, dur_ns FROM kernel WHERE rank < $top", None),
        (
            "SELECT a.rank FROM kernel a ASOF JOIN kernel b ON a.rank = b.rank AND a.start_ns >= b.start_ns WHERE $top > 1",
            None,
        ),
        ("SELECT a.rank, '<' FROM kernel a LEFT JOIN kernel b ON a.rank = b.rank WHERE a.dur_ns < $top", None),
        ("SELECT UNNEST(list) FROM kernel, UNNEST([$top])", None),
        (
            "SELECT 1 FROM kernel a JOIN kernel b ON a.rank = b.rank AND a.start_ns < b.start_ns WHERE $top > 1",
            "a join on a range",
        ),
        (
            "SELECT $top FROM kernel a LEFT JOIN kernel b ON a.start_ns BETWEEN b.start_ns AND b.dur_ns",
            "a join on a range",
        ),
        ("SELECT $top FROM kernel a CROSS JOIN kernel b", "CROSS JOIN"),
        ("SELECT $top FROM kernel a, kernel b WHERE a.start_ns < b.start_ns", "joined by a comma"),
        ("SELECT $top FROM kernel JOIN span USING (rank)", "reads span and does not need it"),
        ("SELECT $top FROM other", "needs kernel and does not read it"),
        ("SELECT 1 FROM kernel", "parameter top is not used"),
    ],
)
def test_the_lint(sql: str, problem: str | None) -> None:
    header = GOOD[: GOOD.index("SELECT")]
    found = queries.problems(queries.parse("some", "rank", header + sql))
    assert len(found) == (problem is not None), found
    assert problem is None or problem in found[0]


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("comm", "", "", "has the name of a view or a table"),
        (
            "some",
            "needs: kernel",
            "needs: kernel, nothing",
            "needs nothing, which is neither a view nor a table nor a query",
        ),
        ("some", "column: rank INTEGER", "column: place INTEGER", "of level rank without a column rank"),
        ("some", "kernel", "pipeline_time", "of level rank, and needs pipeline_time of level run"),
        ("some", "kernel", "query bubble", "of level rank, and needs bubble of level run"),
    ],
)
def test_rules_of_names_and_levels(name: str, old: str, new: str, problem: str) -> None:
    text = GOOD.replace(old, new) if old else GOOD
    assert problem in queries.problems(queries.parse(name, "rank", text))


def test_a_header_that_is_not_true_is_found(open_run: OpenRun) -> None:
    run = open_run({"rank": [{"rank": 0}]})
    query = queries.parse("some", "rank", GOOD)
    table = run.arrow("SELECT rank, start_ns AS at_ns, 1 AS more FROM kernel")
    assert queries.mismatches(queries.Result(query, table)) == [
        "said ('dur_ns', 'BIGINT'), gave ('at_ns', 'BIGINT')",
        "said None, gave ('more', 'INTEGER')",
    ]


# asking -------------------------------------------------------------------------------------------------------------------


def test_a_result_in_three_forms(open_run: OpenRun, new_rows: NewRows) -> None:
    result = open_run(rich(new_rows(), (0,))).query("step_time")
    assert result.arrow()["dur_ns"].to_pylist() == [250, 250]
    assert result.frame()["dur_ns"].tolist() == [250, 250]
    assert [row["dur_ns"] for row in result] == [row["dur_ns"] for row in result.rows()] == [250, 250]
    assert len(result) == 2


@pytest.mark.parametrize(
    ("name", "parameters", "sentence"),
    [
        ("nonsense", {}, r"no query 'nonsense'\. There are: attribution_coverage, calls, comm_summary, "),
        ("step_time", {"top": 1}, r"query step_time: no parameter top\. It has none\."),
        ("top_kernels", {"tops": 1}, r"query top_kernels: no parameter tops\. It has: top\."),
        ("top_kernels", {"top": "many"}, r"query top_kernels: top=many: must be a BIGINT, or NULL\."),
        ("top_kernels", {"top": 1.5}, r"query top_kernels: top=1\.5: must be a BIGINT, or None\."),
        ("top_kernels", {"top": True}, r"query top_kernels: top=True: must be a BIGINT"),
        ("calls", {"role": 3}, r"query calls: role=3: must be a VARCHAR"),
    ],
)
def test_what_cannot_be_asked(open_run: OpenRun, name: str, parameters: dict[str, Any], sentence: str) -> None:
    run = open_run({"rank": [{"rank": 0}]})
    with pytest.raises(InputError, match=sentence):
        run.query(name, **parameters)


def test_a_job_may_be_given(open_run: OpenRun) -> None:
    run = open_run({"rank": [{"rank": 0, "window_start_ns": 0, "window_end_ns": 10}]})
    run.library = queries.Library.of(run, Job(world_size=4, bf16=True))
    assert [row["dtype"] for row in run.query("throughput")] == ["bfloat16"]
