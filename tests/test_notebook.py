"""HTML of runs, diffs and results, their tables, and the executed example: its cells give what is stored."""

from __future__ import annotations

import ast
import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from traceanalyzer.diff import diff
from traceanalyzer.display import Shown, frame_of
from traceanalyzer.importers.spool import RunWriter, table_of
from traceanalyzer.job import Job
from traceanalyzer.queries import Column, Query, Result
from traceanalyzer.run import Run

DOCS = Path(__file__).resolve().parent.parent / "docs"
NASTY = '<script>alert("1")</script>'


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Two ranks whose all-reduce has the wrong type, and a group with a hostile name."""
    path = tmp_path / "run.parquet"
    rows: dict[str, list[dict[str, Any]]] = {
        "comm_record": [
            {
                "rank": r,
                "source": "hook",
                "call_id": 0,
                "op": "all_reduce",
                "group_id": "3",
                "group_size": 2,
                "dtype": NASTY,
                "in_elems": 8,
                "out_elems": 8,
                "t_issue_ns": 50,
                "recorded_step": 1,
                "recorded_phase": "forward",
                "recorded_component": NASTY,
            }
            for r in (0, 1)
        ],
        "issue": [
            {"rank": 0, "source": "kineto", "severity": "warning", "code": "x", "sentence": "y", "occurrences": 3}
        ],
        "process_group": [
            {"rank": r, "group_id": "3", "description": "TENSOR_MODEL_PARALLEL_GROUP", "ranks": [0, 1], "group_size": 2}
            for r in (0, 1)
        ],
        "rank": [{"rank": r, "source": "hook", "world_size": 4} for r in (0, 1)],
        "span": [
            {
                "rank": r,
                "source": "hook",
                "category": "step",
                "recorded_step": 1,
                "start_ns": 0,
                "dur_ns": 100,
                "completeness": "full",
            }
            for r in (0, 1)
        ],
    }
    with RunWriter(path, {}) as out:
        for kind in sorted(rows):
            out.write(kind, [table_of(kind, rows[kind])])
    with Run.open(path) as opened:
        yield opened


def test_a_run(run: Run) -> None:
    shown = run._repr_html_()
    assert "ranks 0-1 (2 of 4), job not stored" in shown
    assert "issues: 3 warning" in shown
    assert '<td style="text-align:left">comm_record</td><td style="text-align:left">2</td>' in shown
    assert run._repr_mimebundle_() == {"text/plain": f"Run {run.source}, 1 file"}
    # nothing was attributed for it
    assert run.value("SELECT count(*) FROM duckdb_tables() WHERE table_name = 'step_range'") == 0


JOB = Job(
    world_size=2,
    tensor_model_parallel_size=2,
    num_layers=1,
    hidden_size=8,
    num_attention_heads=2,
    seq_length=4,
    micro_batch_size=1,
    global_batch_size=1,
    padded_vocab_size=16,
    ffn_hidden_size=32,
)


def test_a_diff_is_html_and_a_table(run: Run) -> None:
    found = diff(run, JOB)
    shown = found._repr_html_()
    assert shown.startswith(f"<div><b>{found.verdict}</b>")
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown
    assert shown.count("<tr>") == 1 + len(found.cells)
    table = found.arrow()
    assert table.num_rows == len(found.cells)
    assert table["verdict"].to_pylist() == [c.verdict for c in found.cells]
    assert table["calls_measured"].to_pylist() == [c.calls_measured for c in found.cells]
    assert table["ranks"].to_pylist() == [list(c.ranks) for c in found.cells]
    frame = found.frame()
    assert list(frame.columns) == table.column_names
    assert found._repr_mimebundle_()["text/plain"].startswith(found.verdict)


def result_of(values: pa.Table) -> Result:
    columns = tuple(Column(n, "VARCHAR", "", "a column", "unknown") for n in values.column_names)
    return Result(Query("some", "run", f"gives {NASTY}", (), (), (), columns, "SELECT"), values)


def test_a_result_shows_its_first_rows_and_counts_the_rest() -> None:
    start = 1_700_000_000_000_000_001
    shown = result_of(
        pa.table({"n": pa.array([start, None, *range(40)], pa.int64()), "name": [NASTY] * 42})
    )._repr_html_()
    assert shown.count("<tr>") == 41
    assert f">{start}</td>" in shown
    assert ">null</td>" in shown
    assert "2 of 42 rows not shown: .frame() or .arrow() has all" in shown
    assert "<script" not in shown


def test_long_texts_are_cut_and_say_so() -> None:
    shown = result_of(pa.table({"name": ["<" * 10_000]}))._repr_html_()
    assert shown.count("&lt;") == 117 + 2  # two of the query's own sentence
    assert "..." in shown
    assert "1 row<" in shown


def test_whole_numbers_with_nulls_keep_their_digits() -> None:
    start = 1_700_000_000_000_000_001
    table = pa.table({"a": pa.array([start, None], pa.int64()), "b": pa.array([1, 2], pa.int32()), "c": [0.5, None]})
    frame = frame_of(table)
    assert [str(t) for t in frame.dtypes] == ["Int64", "int32", "float64"]
    assert frame["a"][0] == start
    assert frame["a"][1] is pd.NA


def test_another_class_has_no_html() -> None:
    with pytest.raises(TypeError, match="Shown has no HTML of its own"):
        Shown()._repr_html_()


# the example ------------------------------------------------------------------------------------------------------------


def shown_by(source: str, names: dict[str, Any]) -> tuple[Any, str]:
    """Runs a cell: the value of its last expression (None without), and what it printed."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None
    return value, printed.getvalue()


def test_the_example_gives_what_it_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without Jupyter: every code cell in order; texts, tables and HTML as they are stored."""
    monkeypatch.chdir(DOCS)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    notebook = json.loads((DOCS / "example.ipynb").read_text(encoding="utf-8"))
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert [c["execution_count"] for c in cells] == list(range(1, len(cells) + 1))
    names: dict[str, Any] = {}
    compared = 0
    with pd.option_context("display.width", 120, "display.max_colwidth", 60, "display.max_columns", 20):
        for cell in cells:
            value, printed = shown_by("".join(cell["source"]), names)
            stored: dict[str, str] = {}
            streams = ""
            for output in cell["outputs"]:
                assert output["output_type"] in ("execute_result", "stream")
                stored |= {kind: "".join(lines) for kind, lines in output.get("data", {}).items()}
                streams += "".join(output.get("text", ""))
            assert printed == streams
            assert (value is None) == (not stored)
            if isinstance(value, Shown):
                assert stored == {"text/html": value._repr_html_(), **value._repr_mimebundle_()}
                compared += 1
            elif value is not None:
                text = repr(value)
                assert " ".join(stored["text/plain"].split()) == " ".join(text.split())
                compared += 1
    assert compared >= 8


def test_the_example_names_no_place_of_the_machine() -> None:
    text = (DOCS / "example.ipynb").read_text(encoding="utf-8")
    assert not [word for word in ("/tmp", "/home", "/root", "/work", "0x") if word in text]
