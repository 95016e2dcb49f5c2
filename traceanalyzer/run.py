"""A run: Parquet files opened in DuckDB, with one typed view per kind of row.

A run is a file, a folder, a glob or an object-store URL. Every file must be a run table of a schema version this program
reads; rows of older minor versions lack the newer columns, which are null.
"""

from __future__ import annotations

import glob
import importlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import duckdb

from traceanalyzer import schema, traffic
from traceanalyzer.display import Shown
from traceanalyzer.errors import InputError, SchemaError

if TYPE_CHECKING:
    import pandas
    import pyarrow

    from traceanalyzer.queries import Result

_REMOTE = ("s3://", "gs://", "gcs://", "r2://", "http://", "https://", "hf://", "az://", "abfss://")


def versions_of(stored: Iterable[str | None]) -> dict[str, list[str]]:
    """What ``versions`` of the view rank says: name -> its versions, each once, sorted. Null and no JSON add none."""
    found: dict[str, set[str]] = {}
    for text in {one for one in stored if one}:
        try:
            pairs = json.loads(text)
        except ValueError:
            continue
        for name, version in pairs.items() if isinstance(pairs, dict) else ():
            found.setdefault(str(name), set()).add(str(version))
    return {name: sorted(known) for name, known in sorted(found.items())}


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _listed(files: list[str]) -> str:
    """Files as a list in SQL. DuckDB would take brackets and stars in a local name for a glob, and read another file."""
    escaped = (f if f.startswith(_REMOTE) else re.sub(r"([*?\[])", r"[\1]", f) for f in files)
    return "[" + ", ".join(map(_quoted, escaped)) + "]"


def run_files(source: str | Path) -> list[str]:
    """The Parquet files of a run, sorted: the file itself, those in a folder, those of a glob; a URL as it is.

    Raises InputError where there are none.
    """
    text = str(source)
    if text.startswith(_REMOTE):
        return [text]
    path = Path(text)
    if path.is_dir():
        # Hidden folders are an import's workplace.
        inside = ((p, p.relative_to(path).parts) for p in path.rglob("*.parquet"))
        found = sorted(str(p) for p, parts in inside if not any(part.startswith(".") for part in parts))
        if not found:
            raise InputError(f"{text}: no .parquet file in this folder. Import traces first: traceanalyzer import.")
        return found
    if path.exists():
        return [text]
    found = sorted(glob.glob(text, recursive=True))
    if not found:
        raise InputError(
            f"{text}: no such file, folder or glob. Import traces first: traceanalyzer import TRACE... -o {text}"
        )
    return found


@dataclass
class Run(Shown):
    """An opened run. Use ``Run.open``; close it, or use it as a context manager.

    ``metadata`` is the key-value metadata under ``traceanalyzer.``; ``files`` the Parquet files. The connection holds the
    views ``run`` (all rows, all columns) and one per kind (``comm``, ``kernel``, ``cpu_op``, ``span``,
    ``process_group``, ``rank``, ``metric``, ``issue``).
    """

    source: str
    files: list[str]
    connection: duckdb.DuckDBPyConnection
    metadata: dict[str, str] = field(default_factory=dict)
    library: Any = field(default=None, repr=False, compare=False)
    """The queries over this run (traceanalyzer.queries.Library), once one was asked."""

    @classmethod
    def open(cls, source: str | Path, *, threads: int | None = None) -> Run:
        """Opens a run; raises InputError if there is nothing to open, SchemaError if it is not a run table."""
        files = run_files(source)
        connection = duckdb.connect(":memory:")
        if threads is not None:
            connection.execute(f"SET threads={int(threads)}")
        try:
            metadata = _metadata(connection, files)
            _create_views(connection, files)
        except BaseException:
            connection.close()
            raise
        return cls(str(source), files, connection, metadata)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; the run cannot be used afterwards."""
        self.connection.close()

    def sql(self, query: str, parameters: list[Any] | None = None) -> duckdb.DuckDBPyRelation:
        """A query over the views as a DuckDB relation (``.fetchall()``, ``.df()``, ``.to_arrow_table()``)."""
        return self.connection.sql(query, params=parameters)

    def tuples(self, query: str, parameters: list[Any] | None = None) -> list[tuple[Any, ...]]:
        """A query's rows as tuples."""
        return self.connection.sql(query, params=parameters).fetchall()

    def value(self, query: str, parameters: list[Any] | None = None) -> Any:
        """The first column of a query's first row; None without rows."""
        found = self.tuples(query, parameters)
        return found[0][0] if found else None

    def table(self, name: str, content: pyarrow.Table) -> None:
        """Makes (or replaces) a small table of the run's connection."""
        self.connection.execute(f"DROP TABLE IF EXISTS {name}")
        self.connection.register("incoming", content)
        self.connection.execute(f"CREATE TABLE {name} AS SELECT * FROM incoming")
        self.connection.unregister("incoming")

    def rows(self, query: str, parameters: list[Any] | None = None) -> list[dict[str, Any]]:
        """A query's rows as dicts."""
        relation = self.connection.sql(query, params=parameters)
        names = relation.columns
        return [dict(zip(names, row, strict=True)) for row in relation.fetchall()]

    def arrow(self, query: str, parameters: list[Any] | None = None) -> pyarrow.Table:
        """A query's result as an Arrow table."""
        return self.connection.sql(query, params=parameters).to_arrow_table()

    def frame(self, query: str) -> pandas.DataFrame:
        """A query's result as a pandas data frame."""
        found: pandas.DataFrame = self.connection.sql(query).df()
        return found

    def query(self, name: str, **parameters: Any) -> Result:
        """A query of the library, by its name: a result with ``.arrow()``, ``.frame()`` and ``.rows()``.

        The run is attributed first, with the job it holds (intended, then captured), unless it is already. Raises
        InputError for a query or a parameter that does not exist.
        """
        if self.library is None:
            # The library stands above the run in the order of imports, and is found by its name.
            self.library = importlib.import_module("traceanalyzer.queries").Library.of(self)
        found: Result = self.library.ask(name, **parameters)
        return found

    def to_hta(self, *, include_last_profiler_step: bool = False, whole_microseconds: bool = True) -> Any:
        """HTA's ``TraceAnalysis`` over this run, made from its rows (those of profiler traces) without parsing JSON again.

        HTA counts in microseconds and leaves the last of several profiler steps out; ``include_last_profiler_step`` is its
        own switch. With ``whole_microseconds`` starts are rounded up and ends down, as HTA's parser does; without, they
        keep their nanoseconds. A rank that is not known becomes 0. What HTA cannot do so: docs/interop.md. Raises
        InputError without HTA (``pip install 'traceanalyzer[hta]'``), and for a run without rows of a trace.
        """
        of_run = importlib.import_module("traceanalyzer.hta").of_run
        return of_run(
            self, include_last_profiler_step=include_last_profiler_step, whole_microseconds=whole_microseconds
        )

    def job_text(self, which: str) -> str | None:
        """JSON text of the captured or intended job in the metadata; None if the run has none.

        ``which`` is schema.META_JOB_CAPTURED or schema.META_JOB_INTENDED.
        """
        return self.metadata.get(which)

    @cached_property
    def world_size(self) -> int | None:
        """Ranks in the job, as recorded; None if no source says."""
        found = self.value("SELECT max(world_size) FROM rank")
        return None if found is None else int(found)

    @property
    def import_status(self) -> str | None:
        """Status of the import that made the run (complete, complete with rejects, partial); None if not recorded."""
        text = self.metadata.get(schema.META_IMPORT)
        return None if text is None else str(json.loads(text).get("status"))


def _metadata(connection: duckdb.DuckDBPyConnection, files: list[str]) -> dict[str, str]:
    """The run's metadata; checks that every file is a run table of a version that can be read."""
    listed = _listed(files)
    try:
        entries = connection.execute(
            f"SELECT file_name, decode(key), decode(value) FROM parquet_kv_metadata({listed}) "
            "WHERE starts_with(decode(key), 'traceanalyzer.')"
        ).fetchall()
    except duckdb.Error as error:
        raise InputError(f"{', '.join(files)}: cannot be read as Parquet ({error}).") from error
    # A file without such keys must be found out too; a URL may be a glob, which only DuckDB can resolve.
    found: dict[str, dict[str, str]] = {f: {} for f in files if not f.startswith(_REMOTE) or not entries}
    for file, key, value in entries:
        found.setdefault(file, {})[key] = value
    merged: dict[str, str] = {}
    statuses: list[str] = []
    for file, pairs in found.items():
        version = pairs.get(schema.META_SCHEMA)
        if version is None:
            raise SchemaError(
                f"{file}: a Parquet file, but not a run table (no {schema.META_SCHEMA} in its metadata). Make one with "
                "traceanalyzer import."
            )
        major = version.split(".")[0]
        if not major.isdigit():
            raise SchemaError(
                f"{file}: its schema version {version!r} is no version. Make the run table again with traceanalyzer import."
            )
        if int(major) > schema.SCHEMA_VERSION[0]:
            raise SchemaError(
                f"{file}: written with schema version {version}; this program reads up to {schema.SCHEMA_VERSION[0]}."
                f"{schema.SCHEMA_VERSION[1]}. Update traceanalyzer."
            )
        if schema.META_IMPORT in pairs:
            statuses.append(str(json.loads(pairs[schema.META_IMPORT]).get("status")))
        for key, value in pairs.items():
            merged.setdefault(key, value)
    worst = next((s for s in ("partial", "complete with rejects") if s in statuses), None)
    if worst is not None:
        merged[schema.META_IMPORT] = json.dumps({**json.loads(merged[schema.META_IMPORT]), "status": worst})
    return merged


def _create_views(connection: duckdb.DuckDBPyConnection, files: list[str]) -> None:
    listed = _listed(files)
    connection.execute(  # No Hive partitions: a folder called rank=3 must not overrule the column rank.
        f"CREATE VIEW stored AS SELECT * FROM read_parquet({listed}, union_by_name=true, hive_partitioning=false)"
    )
    present = {row[0] for row in connection.execute("DESCRIBE stored").fetchall()}
    columns = ", ".join(
        f"CAST({c.name} AS {schema.DUCKDB_TYPES[c.dtype]}) AS {c.name}"
        if c.name in present
        else f"CAST(NULL AS {schema.DUCKDB_TYPES[c.dtype]}) AS {c.name}"
        for c in schema.COLUMNS
    )
    connection.execute(f"CREATE VIEW run AS SELECT {columns} FROM stored")
    for view, kind in schema.VIEWS.items():
        names = [c.name for c in schema.columns_of(kind) if c.name != "kind"]
        if view == "comm":
            continue
        connection.execute(f"CREATE VIEW {view} AS SELECT {', '.join(names)} FROM run WHERE kind = '{kind}'")
    names = [c.name for c in schema.columns_of("comm_record") if c.name != "kind"]
    connection.execute(
        f"""CREATE VIEW recorded_comm AS
        SELECT {", ".join(names)},
               start_ns + dur_ns AS end_ns,
               {_PAYLOAD} AS payload_bytes
        FROM (SELECT *, {_FULL_ELEMS} AS full_elems, {_element_bytes_sql()} AS element_bytes FROM ({_merged(names)}))"""
    )
    connection.execute("CREATE VIEW comm AS SELECT * FROM recorded_comm")


_OF_THE_WORK = frozenset(
    {
        "start_ns", "dur_ns", "t_issue_ns", "t_issue_end_ns", "time_source", "join_evidence", "completeness", "stream",
        "coalesce_id", "external_id", "call_path",
    }
)  # fmt: skip
"""What a trace says of a call better than a hook: its times, all by one clock, and the work done for it."""


def _merged(names: list[str]) -> str:
    """SQL of one row per call: a hook says what was called and where, a trace what was done for it and when.

    Calls of other sources (a flight recorder's) are those that neither of the two holds.
    """
    known = {
        "source": "h.source || CASE WHEN k.call_id IS NULL THEN '' ELSE ', kineto' END",
        **{n: f"CASE WHEN k.call_id IS NULL THEN h.{n} ELSE k.{n} END" for n in _OF_THE_WORK},
    }
    merged = ", ".join(f"{known.get(n, f'coalesce(h.{n}, k.{n})')} AS {n}" for n in names)
    rows = "SELECT {} FROM run WHERE kind = 'comm_record' AND call_id IS NOT NULL AND {}"
    columns = ", ".join(names)
    hook, kineto = (rows.format(columns, f"source = '{s}'") for s in ("hook", "kineto"))
    keys = rows.format("rank, call_id", "source IN ('hook', 'kineto')")
    same = "{0}.rank IS NOT DISTINCT FROM {1}.rank AND {0}.call_id = {1}.call_id"
    others = rows.format(columns, "coalesce(source, '') NOT IN ('hook', 'kineto')")
    return f"""
        SELECT {merged} FROM ({hook}) h LEFT JOIN ({kineto}) k ON {same.format("h", "k")}
        UNION ALL
        SELECT {columns} FROM ({kineto}) k ANTI JOIN ({rows.format("rank, call_id", "source = 'hook'")}) h
          ON {same.format("h", "k")}
        UNION ALL
        SELECT {columns} FROM ({others}) o ANTI JOIN ({keys}) s ON {same.format("o", "s")}
        QUALIFY row_number() OVER (PARTITION BY rank, call_id ORDER BY source) = 1"""


# traffic.full_elems and payload_bytes in SQL; tests/test_run.py holds the two together.
_FULL_ELEMS = """CASE
      WHEN op = 'all_gather' THEN coalesce(out_elems, in_elems * group_size)
      WHEN op = 'gather' THEN coalesce(nullif(out_elems, 0), in_elems * group_size)
      WHEN op = 'reduce_scatter' THEN coalesce(in_elems, out_elems * group_size)
      WHEN op = 'scatter' THEN coalesce(nullif(in_elems, 0), out_elems * group_size)
      WHEN op = 'barrier' THEN 0
      WHEN op = 'recv' THEN coalesce(out_elems, in_elems)
      ELSE coalesce(in_elems, out_elems) END"""
_PAYLOAD = """CASE WHEN op = 'barrier' THEN 0 WHEN op IS NULL THEN NULL ELSE full_elems * element_bytes END"""


def _element_bytes_sql() -> str:
    by_size: dict[int, list[str]] = {}
    for name in traffic.DTYPES:
        size = traffic.element_bytes(name)
        if size is not None:
            by_size.setdefault(size, []).append(name)
    whens = " ".join(f"WHEN dtype IN ({', '.join(map(_quoted, names))}) THEN {size}" for size, names in by_size.items())
    return f"CASE {whens} END"
