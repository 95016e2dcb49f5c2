"""Importing in tests: traces from text or from files, and the rows that came out, read with nothing but pyarrow."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from traceanalyzer import schema
from traceanalyzer.importers import ImportResult, import_traces


@dataclass(frozen=True)
class Imported:
    """An import's result and its rows."""

    result: ImportResult
    _read: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        assert self.result.out is not None, [f.reason for f in self.result.files]
        return self.result.out

    def rows(self, kind: str, **equal: Any) -> list[dict[str, Any]]:
        """Rows of a kind in the order of the file, with the kind's own columns; ``equal`` keeps those with these values."""
        if kind not in self._read:
            columns = [c.name for c in schema.columns_of(kind)]
            self._read[kind] = pq.read_table(self.path, columns=columns, filters=[("kind", "=", kind)]).to_pylist()
        return [r for r in self._read[kind] if all(r[k] == v for k, v in equal.items())]

    def counts(self, kind: str, column: str, rank: int | None = None) -> dict[str | None, int]:
        """How many rows of a kind (of one rank, if given) have each value of a text column; cheaper than rows."""
        filters: list[Any] = [("kind", "=", kind)] + ([] if rank is None else [("rank", "=", rank)])
        table = pq.read_table(self.path, columns=[column], filters=filters)
        return {v["values"]: v["counts"] for v in table[column].cast("string").value_counts().to_pylist()}

    def issues(self) -> dict[str, int]:
        """Code -> occurrences."""
        found: dict[str, int] = {}
        for row in self.rows("issue"):
            found[row["code"]] = found.get(row["code"], 0) + row["occurrences"]
        return found


@pytest.fixture
def import_files(tmp_path: Path) -> Callable[..., Imported]:
    """Imports files or folders."""

    def run(paths: Sequence[Path], **options: Any) -> Imported:
        return Imported(import_traces(paths, tmp_path / "out" / "run.parquet", **options))

    return run


@pytest.fixture
def import_text(tmp_path: Path, import_files: Callable[..., Imported]) -> Callable[..., Imported]:
    """Imports one trace given as text, bytes, a list of events, or a whole document."""

    def run(trace: object, name: str = "rank0.json", **options: Any) -> Imported:
        if isinstance(trace, list):
            trace = {"baseTimeNanoseconds": 0, "traceEvents": trace}
        text = trace if isinstance(trace, (str, bytes)) else json.dumps(trace)
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return import_files([path], **options)

    return run
