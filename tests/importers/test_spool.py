"""Rows and records on disk."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from traceanalyzer.importers import spool
from traceanalyzer.importers.spool import Intern, Records, Spool, in_order


class Thing(msgspec.Struct, array_like=True):
    number: int
    text: str | None = None


def test_records_are_read_and_replaced_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "_PIECE", 100)
    records = Records(tmp_path, Thing)
    numbers = [records.append(Thing(n, "x" * (n % 50))) for n in range(300)]
    assert numbers == list(range(300))
    assert records[299] == Thing(299, "x" * 49)
    records[5] = Thing(-1, "longer than before " * 20)
    assert records.append(Thing(300)) == 300
    assert len(records) == 301
    expected = [Thing(n, "x" * (n % 50)) for n in range(300)] + [Thing(300)]
    expected[5] = Thing(-1, "longer than before " * 20)
    assert [records[n] for n in range(301)] == expected
    records.close()
    assert list(tmp_path.iterdir()) == []


def test_rows_of_several_spools_come_in_one_order(tmp_path: Path) -> None:
    first = Spool(tmp_path / "first.parquet", ("start_ns", "a"))
    second = Spool(tmp_path / "second.parquet", ("b", "start_ns"), frozenset({"b"}))
    first.append(3, {"start_ns": np.array([5, 1, 5]), "a": np.array([1, 2, 3])})
    second.append(2, {"start_ns": np.array([5, 0]), "b": np.array([2**64 - 1, 7], np.uint64)})
    empty = Spool(tmp_path / "empty.parquet", ("start_ns",))
    for one in (first, second, empty):
        one.close()
    rows = [row for batch in in_order([empty, first, second], tmp_path) for row in batch.to_pylist()]
    assert [(r["start_ns"], r["a"], r["b"]) for r in rows] == [
        (0, None, 7),
        (1, 2, None),
        (5, 1, None),
        (5, 3, None),
        (5, None, 2**64 - 1),
    ]
    backwards = [r["start_ns"] for b in in_order([first], tmp_path, "start_ns DESC") for r in b.to_pylist()]
    assert backwards == [5, 5, 1]
    assert list(in_order([empty], tmp_path)) == []


def test_codes_become_the_texts_in_use() -> None:
    names = Intern()
    codes = np.array([names[t] for t in ("a", "b", None, "c", "b")])
    assert codes.tolist() == [0, 1, -1, 2, 1]
    found = names.decode(codes[1:3])
    assert found.to_pylist() == ["b", None]
    assert found.dictionary.to_pylist() == ["b"]
    assert names.decode(codes[:0]).to_pylist() == []
