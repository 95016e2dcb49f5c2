"""Rows on their way to the run table: a spool of integer columns on disk, and the sorted writing of the final file.

Rows arrive in the order of the source and leave in the order of the table, (kind, rank, start_ns), so they are spooled
to temporary Parquet files and sorted out of core by DuckDB. Text is interned: the spool holds codes only, which keeps the
sort narrow and the memory flat.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import duckdb
import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from traceanalyzer import schema

ROW_GROUP = 65_536
_SORT_MEMORY = "48MB"

Column = npt.NDArray[np.int64]


_trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None


def _give_back() -> None:
    """Gives freed memory back to the system. glibc keeps it by itself, in ever more pieces: 100 MB after a long file."""
    if _trim is not None:
        _trim(0)


class Intern(dict[Any, int]):
    """Text -> code, in order of first sight; ``clean`` is applied once to each new text. None has the code -1."""

    def __init__(self, clean: Callable[[str], str] | None = None) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._clean = clean
        self[None] = -1

    def __missing__(self, key: object) -> int:
        text = key if isinstance(key, str) else str(key)
        self.texts.append(self._clean(text) if self._clean else text)
        code = len(self.texts) - 1
        self[key] = code
        return code

    def decode(self, codes: Column) -> pa.DictionaryArray:
        """Codes as a dictionary array that holds only the texts in use."""
        place = np.zeros(len(self.texts) + 1, np.int32)  # the last for code -1
        place[codes] = 1
        used = np.flatnonzero(place[:-1])
        place[used] = np.arange(len(used), dtype=np.int32)
        index = pa.array(place[codes], pa.int32(), mask=codes < 0)
        return pa.DictionaryArray.from_arrays(index, pa.array([self.texts[c] for c in used], pa.string()))


class Spool:
    """One kind's rows: int64 columns (a mask for nulls), appended in any order, read back in any order (in_order)."""

    def __init__(self, path: Path, columns: Sequence[str], unsigned: frozenset[str] = frozenset()) -> None:
        self.path = path
        self.columns = tuple(columns)
        self.rows = 0
        self._types = {c: pa.uint64() if c in unsigned else pa.int64() for c in columns}
        self._schema = pa.schema([pa.field(c, self._types[c]) for c in columns])
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._writer: pq.ParquetWriter | None = None

    def append(self, n: int, values: Mapping[str, Any]) -> None:
        """Adds ``n`` rows; columns that are not given are null."""
        arrays = []
        for name in self.columns:
            value = values.get(name)
            if value is None:
                arrays.append(pa.nulls(n, self._types[name]))
            else:
                arrays.append(value if isinstance(value, pa.Array) else pa.array(value, self._types[name]))
        self._pending.append(pa.table(arrays, schema=self._schema))
        self._pending_rows += n
        self.rows += n
        if self._pending_rows >= ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        if self._writer is None:
            self._writer = pq.ParquetWriter(self.path, self._schema, compression="lz4", use_dictionary=False)
        self._writer.write_table(pa.concat_tables(self._pending).combine_chunks(), row_group_size=ROW_GROUP)
        self._pending, self._pending_rows = [], 0
        _give_back()

    def close(self) -> None:
        """Finishes the file; batches and in_order may be called afterwards."""
        self._flush()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows in the order they came, some columns only."""
        if self.rows:
            with pq.ParquetFile(self.path, pre_buffer=False) as file:  # what is read ahead is held to the end
                for group in range(file.num_row_groups):
                    yield from file.iter_batches(
                        ROW_GROUP, row_groups=[group], columns=list(columns), use_threads=False
                    )
            _give_back()

    def remove(self) -> None:
        """Deletes the file."""
        self.close()
        self.path.unlink(missing_ok=True)


def in_order(spools: Sequence[Spool], work: Path, order: str = "start_ns") -> Iterator[pa.RecordBatch]:
    """The rows of closed spools, null where one lacks a column, ordered by an SQL expression; in bounded memory.

    Rows that are equal in it come spool by spool, and of each in the order in which they were appended.
    """
    filled = [spool for spool in spools if spool.rows]
    if not filled:
        return
    connection = duckdb.connect(":memory:")
    try:
        connection.execute(f"SET memory_limit='{_SORT_MEMORY}'")
        connection.execute("SET threads=1")
        connection.execute("SET temp_directory=?", [str(work / "sort")])
        rows = " UNION ALL BY NAME ".join(
            f"SELECT *, {number} AS spool FROM read_parquet(?, file_row_number=true)" for number in range(len(filled))
        )
        ordered = connection.sql(
            f"SELECT * EXCLUDE (spool, file_row_number) FROM ({rows}) ORDER BY {order}, spool, file_row_number",
            params=[str(spool.path) for spool in filled],
        )
        yield from ordered.to_arrow_reader(ROW_GROUP)
    finally:
        connection.close()
        _give_back()


_Record = TypeVar("_Record", bound=msgspec.Struct)
_PIECE = 1 << 16


class Records(Generic[_Record]):
    """A list of records on disk, read and replaced by number: of each, 8 bytes stay in memory."""

    def __init__(self, folder: Path, kind: type[_Record]) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=_PIECE)  # noqa: SIM115 - closed by close
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._places = array("q")
        self._size = 0
        self._pending = bytearray()

    def __len__(self) -> int:
        return len(self._places)

    def append(self, record: _Record) -> int:
        """Adds a record and gives its number."""
        self._places.append(self._put(record))
        return len(self._places) - 1

    def __setitem__(self, number: int, record: _Record) -> None:
        self._places[number] = self._put(record)

    def __getitem__(self, number: int) -> _Record:
        if self._pending:
            self._flush()
        self._file.seek(self._places[number])
        size = int.from_bytes(self._file.read(4), "little")
        return self._decode(self._file.read(size))

    def _put(self, record: _Record) -> int:
        data = self._encode(record)
        place = self._size
        self._pending += len(data).to_bytes(4, "little")
        self._pending += data
        self._size += 4 + len(data)
        if len(self._pending) >= _PIECE:
            self._flush()
        return place

    def _flush(self) -> None:
        self._file.seek(0, os.SEEK_END)
        self._file.write(self._pending)
        self._pending.clear()

    def close(self) -> None:
        """Ends the list; the file has no name and goes with it."""
        self._file.close()
        self._places = array("q")


def issue(severity: str, code: str, sentence: str, occurrences: int, location: str | None = None) -> dict[str, Any]:
    """What a row of kind issue says."""
    return {
        "severity": severity,
        "code": code,
        "sentence": sentence,
        "occurrences": occurrences,
        "location": location,
    }


def table_of(kind: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows given as dicts, as a table of the kind's own columns; missing keys are null."""
    kind_schema = schema.kind_schema(kind)
    columns = []
    for field in kind_schema:
        values = [row.get(field.name) for row in rows]
        if pa.types.is_dictionary(field.type):
            columns.append(pa.array(values, pa.string()).dictionary_encode())
        else:
            columns.append(pa.array(values, field.type))
    return pa.table(columns, schema=kind_schema)


class RunWriter:
    """Writes a run table: rows of one kind at a time, kinds in alphabetical order, to a name that appears when whole.

    Use as a context manager: leaving it without an error renames the finished file to ``path``; leaving it with an error
    removes what was written.
    """

    def __init__(self, path: Path, metadata: Mapping[str, str]) -> None:
        self.path = path
        self._temporary = path.with_name(path.name + f".{os.getpid()}.part")
        self._schema = schema.arrow_schema(metadata)
        self._writer: pq.ParquetWriter | None = None
        self._kind = ""
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self.rows: dict[str, int] = {}

    def __enter__(self) -> RunWriter:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = schema.writer_options()
        self._writer = pq.ParquetWriter(self._temporary, self._schema, **options)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        assert self._writer is not None
        if error is None:
            self._flush()
        self._writer.close()
        if error is None:
            os.replace(self._temporary, self.path)
        else:
            self._temporary.unlink(missing_ok=True)

    def write(self, kind: str, tables: Iterable[pa.Table | pa.RecordBatch]) -> None:
        """Appends rows of one kind, given with any of its columns (by name); row groups never mix kinds."""
        if kind != self._kind:
            if kind < self._kind:
                raise ValueError(f"kinds must come in order; {kind} after {self._kind}")
            self._flush()
            self._kind = kind
        for table in tables:
            if table.num_rows == 0:
                continue
            self._pending.append(self._cast(table))
            self._pending_rows += table.num_rows
            self.rows[kind] = self.rows.get(kind, 0) + table.num_rows
            if self._pending_rows >= ROW_GROUP:
                self._flush()

    def _cast(self, table: pa.Table | pa.RecordBatch) -> pa.Table:
        """The kind's own columns in the types of the schema; what is not given is added at the flush."""
        columns, fields = [], []
        for name in table.schema.names:
            field = self._schema.field(name)
            value = table.column(name)
            columns.append(value if value.type == field.type else value.cast(field.type))
            fields.append(field)
        return pa.table(columns, schema=pa.schema(fields))

    def _flush(self) -> None:
        if not self._pending:
            return
        assert self._writer is not None
        narrow = pa.concat_tables(self._pending, promote_options="default").unify_dictionaries().combine_chunks()
        self._pending, self._pending_rows = [], 0
        n = narrow.num_rows
        given = {name: narrow.column(name) for name in narrow.schema.names}
        given["kind"] = pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int32)), pa.array([self._kind]))
        nulls: dict[pa.DataType, pa.Array] = {}  # one array of nulls serves every column of its type
        columns = []
        for field in self._schema:
            if field.name not in given and field.type not in nulls:
                nulls[field.type] = pa.nulls(n, field.type)
            columns.append(given[field.name] if field.name in given else nulls[field.type])
        self._writer.write_table(pa.table(columns, schema=self._schema), row_group_size=ROW_GROUP)
        _give_back()
