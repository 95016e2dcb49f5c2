"""Rows on their way to the run table: a spool of integer columns on disk, and the sorted writing of the final file.

Rows arrive in the order of the source and leave in the order of the table, (kind, rank, start_ns), so they are spooled
to temporary Parquet files and sorted out of core by DuckDB. Text is interned: the spool holds codes only, which keeps the
sort narrow and the memory flat.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from traceanalyzer import schema

ROW_GROUP = 65_536
_SORT_MEMORY = "100MB"

Column = npt.NDArray[np.int64]


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
        used, inverse = np.unique(codes, return_inverse=True)
        missing = len(used) > 0 and used[0] == -1
        texts = pa.array([self.texts[c] for c in used[1 if missing else 0 :]], pa.string())
        index = inverse.astype(np.int32) - (1 if missing else 0)
        return pa.DictionaryArray.from_arrays(pa.array(index, pa.int32(), mask=index < 0), texts)


class Spool:
    """One kind's rows: int64 columns (a mask for nulls), appended in any order, read back sorted by ``start_ns``."""

    def __init__(self, path: Path, columns: Sequence[str], unsigned: frozenset[str]) -> None:
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

    def close(self) -> None:
        """Finishes the file; batches and sorted may be called afterwards."""
        self._flush()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows in the order they came, some columns only."""
        if self.rows:
            with pq.ParquetFile(self.path) as file:
                yield from file.iter_batches(ROW_GROUP, columns=list(columns))

    def sorted(self, work: Path) -> Iterator[pa.RecordBatch]:
        """The rows ordered by start_ns, and as they came where that is equal; in bounded memory."""
        if not self.rows:
            return
        connection = duckdb.connect(":memory:")
        try:
            connection.execute(f"SET memory_limit='{_SORT_MEMORY}'")
            connection.execute("SET threads=1")
            connection.execute("SET temp_directory=?", [str(work / "sort")])
            ordered = connection.sql(
                "SELECT * EXCLUDE file_row_number FROM read_parquet(?, file_row_number=true) "
                "ORDER BY start_ns, file_row_number",
                params=[str(self.path)],
            )
            yield from ordered.to_arrow_reader(ROW_GROUP)
        finally:
            connection.close()


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
        self._writer = pq.ParquetWriter(self._temporary, self._schema, **schema.writer_options())
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
