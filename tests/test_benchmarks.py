"""The benchmark of queries asks every query of the library, and its runs give every one of them something to work on."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from traceanalyzer.queries import library
from traceanalyzer.run import Run

_FILE = Path(__file__).resolve().parents[1] / "benchmarks" / "bench_queries.py"


@pytest.fixture
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_queries", _FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_query_is_measured(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At each of the three sizes; one that takes more than 14 times as long decides the exit code."""
    asked: list[list[str]] = []
    slow = "top_kernels"

    def ask(path: Path, names: list[str]) -> dict[str, dict[str, Any]]:
        asked.append(names)
        return {n: {"wall_s": 15.0 if n == slow and path.name == "10x_ranks.parquet" else 1.0} for n in names}

    def write(path: Path, ranks: int, kernels: int) -> int:
        path.touch()
        return ranks * kernels

    monkeypatch.setattr(bench, "ask", ask)
    monkeypatch.setattr(bench, "write_run", write)
    monkeypatch.setattr("sys.argv", ["bench_queries.py"])
    assert bench.main() == 1
    assert asked == [list(library())] * 3
    assert f"{slow} over" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["bench_queries.py", "--query", "bubble"])
    assert bench.main() == 0


def test_its_run_occupies_the_queries(bench: ModuleType, tmp_path: Path) -> None:
    """A query without rows would be measured at nothing. Those that find what is wrong with a run find nothing in it."""
    bench.write_run(tmp_path / "run.parquet", 8, 200)
    with Run.open(tmp_path / "run.parquet") as run:
        empty = {name for name in library() if not len(run.query(name))}
    assert empty == {"unexplained_communication", "unmatched_calls"}
