"""Small literal inputs for the commands: traces of two ranks, and run tables written row by row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from traceanalyzer import schema
from traceanalyzer.cli import main
from traceanalyzer.importers.spool import RunWriter, table_of

Rows = Mapping[str, Sequence[Mapping[str, Any]]]


def trace(rank: int | None, *, world: int = 2) -> dict[str, Any]:
    """One rank's trace: two launches, a gemm, and an NCCL kernel that no call explains. Times in us."""
    info = {"backend": "nccl", "world_size": world} | ({} if rank is None else {"rank": rank})
    common = {"ph": "X", "pid": 10, "tid": 10}
    device = {"ph": "X", "pid": 0, "tid": 7, "cat": "kernel"}
    return {
        "schemaVersion": 1,
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        "distributedInfo": info,
        "deviceProperties": [{"id": 0, "name": "Test GPU"}],
        "traceEvents": [
            {
                **common,
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "ts": 90,
                "dur": 1,
                "args": {"correlation": 1},
            },
            {
                **common,
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "ts": 95,
                "dur": 1,
                "args": {"correlation": 2},
            },
            {
                **device,
                "name": "sm80_xmma_gemm_f16",
                "ts": 100,
                "dur": 20,
                "args": {"device": 0, "stream": 7, "correlation": 1},
            },
            {
                **device,
                "name": "ncclDevKernel_AllReduce_Sum_f16_RING_LL",
                "ts": 130,
                "dur": 5,
                "args": {"device": 0, "stream": 9, "correlation": 2},
            },
        ],
    }


@pytest.fixture
def traces(tmp_path: Path) -> list[Path]:
    """Two traces, of ranks 0 and 1 of 2."""
    files = []
    for rank in (0, 1):
        file = tmp_path / f"trace{rank}.json"
        file.write_text(json.dumps(trace(rank)), encoding="utf-8")
        files.append(file)
    return files


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows (kind -> rows) as a run table of this name, with this metadata beside the schema version."""

    def write(name: str, rows: Rows, metadata: Mapping[str, str] | None = None) -> Path:
        path = tmp_path / name
        with RunWriter(
            path, {schema.META_IMPORT: '{"source": "kineto", "status": "complete"}', **(metadata or {})}
        ) as out:
            for kind in sorted(rows):
                out.write(kind, [table_of(kind, rows[kind])])
        return path

    return write


@pytest.fixture
def run_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a command in tmp_path, 80 columns wide and without colour; gives the result (stdout, stderr, exit_code)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "TERM", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str | Path) -> Result:
        return CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)

    return run
