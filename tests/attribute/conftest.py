"""Runs of a few literal rows, opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.importers.spool import RunWriter, table_of
from traceanalyzer.job import Job
from traceanalyzer.run import Run

Rows = Mapping[str, Sequence[Mapping[str, Any]]]


@pytest.fixture
def open_run(tmp_path: Path) -> Iterator[Callable[[Rows], Run]]:
    """Writes rows (kind -> rows, source kineto unless said) as a run table and opens it; closed after the test."""
    opened: list[Run] = []

    def make(rows: Rows) -> Run:
        path = tmp_path / f"run{len(opened)}.parquet"
        with RunWriter(path, {}) as out:
            for kind in sorted(rows):
                out.write(kind, [table_of(kind, [{"source": "kineto", **row} for row in rows[kind]])])
        opened.append(Run.open(path))
        return opened[-1]

    yield make
    for run in opened:
        run.close()


@pytest.fixture
def job() -> Callable[..., Job]:
    """A Job of 8 ranks, TP 4 x CP 2, sequence 32 and micro-batch 2, with the given fields changed."""

    def make(**changes: Any) -> Job:
        fields = {
            "world_size": 8,
            "tensor_model_parallel_size": 4,
            "context_parallel_size": 2,
            "seq_length": 32,
            "micro_batch_size": 2,
        }
        return Job(**{**fields, **changes})

    return make
