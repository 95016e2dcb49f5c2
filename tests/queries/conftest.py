"""Runs of a few literal rows, and short ways to write the rows that most of them are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer import schema
from traceanalyzer.importers.spool import RunWriter, table_of
from traceanalyzer.job import Job
from traceanalyzer.run import Run

Row = dict[str, Any]

DESCRIPTIONS = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "dp_cp": "DATA_PARALLEL_GROUP_WITH_CP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
    "mp": "MODEL_PARALLEL_GROUP",
}


class Rows(dict[str, list[Row]]):
    """Rows by kind, added one by one. Ids of launches and calls count up on each rank."""

    def add(self, kind: str, **row: Any) -> None:
        self.setdefault(kind, []).append(row)

    def rank(self, rank: int | None, start: int = 0, end: int = 1000, **more: Any) -> None:
        self.add("rank", rank=rank, window_start_ns=start, window_end_ns=end, host_start_ns=start, **more)

    def step(self, rank: int | None, number: int, start: int, end: int) -> None:
        self.add(
            "span",
            rank=rank,
            name=f"ProfilerStep#{number}",
            category="user_annotation",
            start_ns=start,
            dur_ns=end - start,
        )

    def kernel(
        self, rank: int | None, what: str, start: int, end: int, launch: int | None = None, tid: int = 1, **more: Any
    ) -> None:
        """An activity of this class; ``launch``: when the host launched it, None if that was not recorded."""
        correlation = 1 + len(self.get("kernel", []))
        row = {"name": f"{what}_kernel", "device": 0, "stream": 7, **more}
        self.add(
            "kernel",
            rank=rank,
            kernel_class=what,
            start_ns=start,
            dur_ns=end - start,
            correlation=correlation,
            **row,
        )
        if launch is not None:
            self.add(
                "cpu_op",
                rank=rank,
                name="cudaLaunchKernel",
                category="cuda_runtime",
                start_ns=launch,
                dur_ns=1,
                tid=tid,
                correlation=correlation,
            )

    def call(
        self,
        rank: int,
        role: str,
        op: str,
        start: int,
        end: int,
        launch: int,
        *,
        ranks: list[int] | None = None,
        **more: Any,
    ) -> None:
        """A call on the group of this role with one kernel of its own."""
        number = sum(c["rank"] == rank for c in self.get("comm_record", []))
        if not any(g["rank"] == rank and g["group_id"] == role for g in self.get("process_group", [])):
            self.add("process_group", rank=rank, group_id=role, description=DESCRIPTIONS.get(role), ranks=ranks)
        coalesce = more.pop("coalesce_id", number)
        self.add(
            "comm_record",
            rank=rank,
            call_id=number,
            coalesce_id=coalesce,
            op=op,
            group_id=role,
            start_ns=start,
            dur_ns=end - start,
            t_issue_ns=launch,
            time_source="kernel",
            completeness="full",
            **more,
        )
        if not any(k["rank"] == rank and k.get("coalesce_id") == coalesce for k in self.get("kernel", [])):
            self.kernel(rank, "comm", start, end, launch, coalesce_id=coalesce, completeness="full")

    def range(self, rank: int, name: str, start: int, end: int, tid: int) -> None:
        self.add("cpu_op", rank=rank, name=name, category="cpu_op", start_ns=start, dur_ns=end - start, tid=tid)


@pytest.fixture(scope="session")
def write_rows(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes rows (kind -> rows, source kineto unless said) as a run table; a job becomes the intended one."""

    def write(rows: dict[str, list[Row]], job: Job | None = None) -> Path:
        path = tmp_path_factory.mktemp("run") / "run.parquet"
        metadata = {} if job is None else {schema.META_JOB_INTENDED: job.to_json()}
        with RunWriter(path, metadata) as out:
            for kind in sorted(rows):
                if rows[kind]:
                    out.write(kind, [table_of(kind, [{"source": "kineto", **row} for row in rows[kind]])])
        return path

    return write


@pytest.fixture
def open_run(write_rows: Callable[..., Path]) -> Iterator[Callable[..., Run]]:
    """Writes rows as ``write_rows`` does and opens them; closed after the test."""
    opened: list[Run] = []

    def make(rows: dict[str, list[Row]], job: Job | None = None) -> Run:
        opened.append(Run.open(write_rows(rows, job)))
        return opened[-1]

    yield make
    for run in opened:
        run.close()


@pytest.fixture(scope="session")
def new_rows() -> Callable[[], Rows]:
    """Makes empty Rows."""
    return Rows
