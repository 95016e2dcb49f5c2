"""The run table: every column's name, type, unit and meaning. Writers, views, docs and checks all derive from here.

One wide Parquet schema holds nine kinds of rows, told apart by ``kind``; each kind uses its own columns and leaves the
others null. Null is unknown, 0 is zero, -1 does not exist. Times are int64 unix nanoseconds as recorded (clocks are not
aligned here), sizes are int64 bytes or elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

SCHEMA_VERSION = (1, 2)
"""Major, minor. A reader refuses a newer major version; a minor version only adds columns or words."""

META_SCHEMA = "traceanalyzer.schema"
META_JOB_CAPTURED = "traceanalyzer.job.captured"
META_JOB_INTENDED = "traceanalyzer.job.intended"
META_IMPORT = "traceanalyzer.import"
META_LAUNCH = "traceanalyzer.launch"
"""Keys of the Parquet key-value metadata: schema version, the job's own words, the user's words, the import's status, and
what the launcher wrote into RUN_DIR/run.json."""

KINDS: dict[str, str] = {
    "comm_record": "one collective or point-to-point call on one rank, as one source saw it",
    "cpu_op": "one operator or runtime call on the host",
    "expert_rows": "one call of the local experts of one MoE layer on one rank, and the rows each of them got",
    "issue": "something wrong or missing in the input",
    "kernel": "one activity on a device: a kernel, a copy or a memset",
    "metric": "one measured value",
    "process_group": "one process group as one rank knows it",
    "rank": "one recorded rank (or one source file whose rank is unknown)",
    "span": "a range or a mark: profiler step, annotation, module, synchronisation, the profiler's own overhead",
}
"""Kind of row -> what a row of it is. Rows are ordered by (kind, rank, start_ns)."""

VIEWS: dict[str, str] = {
    "comm": "comm_record",
    "cpu_op": "cpu_op",
    "expert_rows": "expert_rows",
    "issue": "issue",
    "kernel": "kernel",
    "metric": "metric",
    "process_group": "process_group",
    "rank": "rank",
    "span": "span",
}
"""View name -> kind it shows. ``comm`` merges the sources of comm_record into one row per call."""

_DICT = pa.dictionary(pa.int32(), pa.string())
_TEXT = pa.string()
_I64 = pa.int64()
_I32 = pa.int32()
_I16 = pa.int16()
_U64 = pa.uint64()
_F64 = pa.float64()
_BOOL = pa.bool_()
_LIST_I64 = pa.list_(pa.int64())
_LIST_I32 = pa.list_(pa.int32())
_LIST_TEXT = pa.list_(pa.string())


@dataclass(frozen=True)
class Column:
    """One column: its Arrow type, the unit of its values ('' for none), its meaning, and the kinds that use it."""

    name: str
    dtype: pa.DataType
    unit: str
    doc: str
    kinds: tuple[str, ...]


_ALL = tuple(KINDS)
_TIMED = ("comm_record", "cpu_op", "kernel", "span")
_HOST = ("comm_record", "cpu_op", "span")
_C = ("comm_record",)
_E = ("expert_rows",)
_PLACED = ("comm_record", "span", "expert_rows")
_K = ("kernel",)
_G = ("process_group",)
_R = ("rank",)
_I = ("issue",)

COLUMNS: tuple[Column, ...] = (
    # every kind
    Column("kind", _DICT, "", "Kind of row: one of the kinds above.", _ALL),
    Column("rank", _I32, "", "Global rank of the process. Null: the source does not say and nobody told.", _ALL),
    Column("source", _DICT, "", "What recorded the row: kineto, hook, flight_recorder, ...", _ALL),
    # time
    Column(
        "start_ns",
        _I64,
        "ns",
        "Start, unix time as recorded. For a call: start of its work (kernel, or the backend's own range); null if no "
        "work was tied to it. For expert rows: when the host called the experts.",
        (*_TIMED, *_E),
    ),
    Column(
        "dur_ns",
        _I64,
        "ns",
        "Duration. For a call: from the first start to the last end of the work tied to it. Null: not recorded.",
        _TIMED,
    ),
    # names and classes
    Column(
        "name",
        _DICT,
        "",
        "Name as recorded. Of expert rows: class of the dispatcher.",
        ("cpu_op", "kernel", "process_group", "span", *_E),
    ),
    Column(
        "category",
        _DICT,
        "",
        "The recorder's own category, in today's spelling (cpu_op, cuda_runtime, python_function, kernel, gpu_memcpy, "
        "user_annotation, ...).",
        ("cpu_op", "kernel", "span"),
    ),
    # host side
    Column("pid", _I64, "", "Process id.", (*_HOST, "rank")),
    Column("tid", _I64, "", "Thread id.", _HOST),
    Column("external_id", _U64, "", "Kineto's External id.", (*_HOST, "kernel")),
    Column(
        "correlation",
        _U64,
        "",
        "Correlation id between a runtime call and the device activity it launched.",
        ("cpu_op", "kernel"),
    ),
    Column(
        "sequence_nr",
        _I64,
        "",
        "Autograd sequence number, which ties a backward operator to its forward one.",
        ("cpu_op",),
    ),
    Column("in_dims", _DICT, "elements", "Input dimensions as recorded (JSON text).", ("comm_record", "cpu_op")),
    # one call
    Column(
        "call_id",
        _I64,
        "",
        "Number of the call on its rank, from 0. In a run of one source: in order of issue. Rows of several sources that "
        "hold one call share it; calls that a hook did not record are numbered behind those that it did. Null: it is not "
        "known which call of another source this is (a flight recorder's beside a hook's); such rows are not in the view "
        "comm.",
        _C,
    ),
    Column(
        "hook_call",
        _I64,
        "",
        "Number that our hook gave the call, in its log and on the range it opens in a trace. Null: not seen by the hook.",
        _C,
    ),
    Column(
        "coalesce_id",
        _I64,
        "",
        "Calls that were launched as one share it, and so do their kernels: the time of such a kernel counts once, the "
        "bytes count per call. Unique on a rank.",
        (*_C, "kernel"),
    ),
    Column(
        "op",
        _DICT,
        "",
        "Operation: all_gather, reduce_scatter, all_reduce, all_to_all, send, recv, broadcast, "
        "reduce, gather, scatter, barrier. Null: a name this program does not know.",
        _C,
    ),
    Column("op_raw", _DICT, "", "Operation as the source spells it.", _C),
    Column(
        "group_id",
        _DICT,
        "",
        "Identity of the process group on its rank: the group's name, or 'ptr:N' where only an address was "
        "recorded. Null: the source does not name the group.",
        (*_C, "process_group"),
    ),
    Column("group_size", _I32, "ranks", "Number of ranks in the group.", (*_C, "process_group")),
    Column("group_rank", _I32, "", "This rank's index in the group.", _C),
    Column("seq", _I64, "", "Sequence number of the call in its group, as recorded.", _C),
    Column("comms_id", _U64, "", "Kineto's Comms Id: equal on all ranks of one call. Unsigned 64 bit.", _C),
    Column("is_p2p", _BOOL, "", "Whether the call is point to point.", _C),
    Column("peer", _I32, "", "Global rank of the other side of a send or recv.", _C),
    Column("root", _I32, "", "Global rank of the root of a broadcast, reduce, gather or scatter.", _C),
    Column("reduce_op", _DICT, "", "Reduction: sum, max, avg, ...", _C),
    Column("dtype", _DICT, "", "Element type in torch's spelling (bfloat16, float32, ...).", _C),
    Column(
        "in_elems", _I64, "elements", "Elements this rank hands in, summed over the tensors of a coalesced call.", _C
    ),
    Column("out_elems", _I64, "elements", "Elements this rank gets out.", _C),
    Column(
        "in_splits",
        _LIST_I64,
        "rows",
        "Rows sent to each rank of the group, in group order. Null: an even split, or unknown (see splits_known).",
        _C,
    ),
    Column("out_splits", _LIST_I64, "rows", "Rows received from each rank of the group.", _C),
    Column(
        "splits_known",
        _BOOL,
        "",
        "all_to_all only: whether the split is known (an empty recorded list means even). "
        "False: the recorded list was shortened, or is missing.",
        _C,
    ),
    Column("is_async", _BOOL, "", "Whether the caller asked for an asynchronous call.", _C),
    Column("t_issue_ns", _I64, "ns", "When the host issued the call, unix time as recorded.", _C),
    Column("t_issue_end_ns", _I64, "ns", "When the issuing call returned.", _C),
    Column(
        "time_source",
        _DICT,
        "",
        "What start_ns and dur_ns of a call rest on: kernel (device time), backend_range "
        "(a host range such as gloo's), cuda_event (a flight recorder's measured duration), watchdog (times at which a "
        "flight recorder noticed start and end, which is late). Null: no time.",
        _C,
    ),
    Column(
        "join_evidence",
        _DICT,
        "",
        "How a kernel was tied to its call: external_id, correlation (launch inside the call), coalesced (launch "
        "inside the box that grouped calls share; inferred), order (inferred). Null: not tied.",
        (*_C, "kernel"),
    ),
    Column(
        "completeness",
        _DICT,
        "",
        "full; no_kernel (no device work is tied to the call); kernel_only (seen on the device alone); "
        "launched_before_window (work whose launch lies before the recording); cut (the file ends inside it); "
        "not_profiled (recorded by a hook or a flight recorder alone: whether and when device work ran for it is not "
        "known). A span of category step: full, or cut (its end or calls inside it are missing).",
        (*_C, "kernel", "span"),
    ),
    Column(
        "work_state",
        _DICT,
        "",
        "How far the call had come when a flight recorder was dumped: scheduled, started, completed. With gloo it stays "
        "scheduled.",
        _C,
    ),
    Column(
        "call_path",
        _LIST_TEXT,
        "",
        "Names of the host ranges that enclose the call, innermost first, without aten "
        "operators and the call's own records.",
        _C,
    ),
    Column("recorded_step", _I64, "", "Training step, as a hook recorded it.", _PLACED),
    Column("recorded_microbatch", _I32, "", "Micro-batch, as a hook recorded it.", _PLACED),
    Column("recorded_chunk", _I32, "", "Virtual pipeline chunk, as a hook recorded it.", _PLACED),
    Column("recorded_layer", _I32, "", "Layer (from 0), as a hook recorded it.", _PLACED),
    Column("recorded_phase", _DICT, "", "Phase, as a hook recorded it.", _PLACED),
    Column("recorded_component", _DICT, "", "Component, as a hook recorded it.", _PLACED),
    # one device activity
    Column("device", _I32, "", "Device ordinal in its process.", (*_K, "rank")),
    Column("stream", _I64, "", "Stream on the device.", (*_K, "comm_record")),
    Column(
        "kernel_class",
        _DICT,
        "",
        "comm, gemm, attention, norm, elementwise, optimizer, embedding, moe, reduction, copy, memset, other: from "
        "the one table of kernel names, or comm by collective metadata.",
        _K,
    ),
    Column(
        "kernel_op",
        _DICT,
        "",
        "Operation of a communication kernel, by metadata or name. Null: not known, as for generic kernels.",
        _K,
    ),
    Column("launch_ns", _I64, "ns", "Start of the runtime call that launched a communication kernel.", _K),
    Column("copy_bytes", _I64, "bytes", "Bytes of a copy or memset.", _K),
    Column("graph_id", _I64, "", "CUDA graph that launched the kernel. Null: none, or not recorded.", _K),
    # one group
    Column("description", _TEXT, "", "Description the job gave the group (group_desc).", _G),
    Column("backend", _DICT, "", "Communication backend.", _G),
    Column(
        "ranks",
        _LIST_I32,
        "",
        "Global ranks in the group, complete. Of expert rows: in the expert-parallel group. Null: not known.",
        (*_G, *_E),
    ),
    Column(
        "ranks_source",
        _DICT,
        "",
        "Where the ranks come from: hook (read from the group object), header, flight_recorder, call (as shown on a "
        "call), inferred (filled in or derived). Null: not known.",
        _G,
    ),
    # one rank
    Column("host", _TEXT, "", "Host name.", _R),
    Column("rank_source", _DICT, "", "Where the rank comes from: header, file name, told (--rank). Null: none.", _R),
    Column("world_size", _I32, "ranks", "Ranks in the job, as recorded.", _R),
    Column("device_name", _TEXT, "", "Name of the device.", _R),
    Column(
        "window_start_ns", _I64, "ns", "First start of sound device work, or of host work where there is no device.", _R
    ),
    Column("window_end_ns", _I64, "ns", "Last end of it.", _R),
    Column(
        "host_start_ns",
        _I64,
        "ns",
        "First start of a host event: device work launched earlier is older than the recording.",
        _R,
    ),
    Column(
        "source_file",
        _TEXT,
        "",
        "Name of the file the rank was read from; of several windows of one rank: their names, separated by commas.",
        ("rank", "issue"),
    ),
    Column("source_sha256", _TEXT, "", "Hash of that file (or those files, in order) as it lies on disk.", _R),
    Column("versions", _TEXT, "", "Versions found in the source (JSON object of text).", _R),
    Column("events_read", _I64, "events", "Events found in the source.", _R),
    Column("rows_kept", _I64, "rows", "Rows kept.", _R),
    Column("rows_rejected", _I64, "events", "Events that could not be used, each counted in an issue.", _R),
    Column("import_status", _DICT, "", "complete, complete with rejects, or partial.", _R),
    # one call of the local experts
    Column(
        "local_expert_rows",
        _LIST_I64,
        "rows",
        "Rows that each local expert got, in order of its number, with those that the dispatcher pads. Read where the job "
        "had them on the host.",
        _E,
    ),
    Column("first_expert", _I32, "", "Number of the first local expert among the experts of the layer, from 0.", _E),
    Column(
        "expert_tensor_ranks",
        _I32,
        "ranks",
        "Ranks that share each expert (expert tensor parallelism): each of them computes these rows. Null: not known.",
        _E,
    ),
    # one metric
    Column("key", _DICT, "", "Name of the value.", ("metric",)),
    Column("value", _F64, "see unit", "The value.", ("metric",)),
    Column("unit", _DICT, "", "Unit of the value.", ("metric",)),
    Column("step", _I64, "", "Training step the value belongs to.", ("metric",)),
    # one issue
    Column("severity", _DICT, "", "info, warning, data_loss, error.", _I),
    Column("code", _DICT, "", "Short stable code.", _I),
    Column("sentence", _TEXT, "", "What is wrong and what it means for the figures.", _I),
    Column("occurrences", _I64, "", "How often.", _I),
    Column("location", _TEXT, "", "Where: byte offset, event, or name.", _I),
)

BY_NAME: dict[str, Column] = {c.name: c for c in COLUMNS}
SEVERITIES: tuple[str, ...] = ("info", "warning", "data_loss", "error")

DUCKDB_TYPES: dict[pa.DataType, str] = {
    _DICT: "VARCHAR",
    _TEXT: "VARCHAR",
    _I64: "BIGINT",
    _I32: "INTEGER",
    _I16: "SMALLINT",
    _U64: "UBIGINT",
    _F64: "DOUBLE",
    _BOOL: "BOOLEAN",
    _LIST_I64: "BIGINT[]",
    _LIST_I32: "INTEGER[]",
    _LIST_TEXT: "VARCHAR[]",
}


def columns_of(kind: str) -> tuple[Column, ...]:
    """The columns a kind uses, in schema order. KeyError for a kind that does not exist."""
    if kind not in KINDS:
        raise KeyError(f"no kind {kind!r}; kinds: {', '.join(KINDS)}")
    return tuple(c for c in COLUMNS if kind in c.kinds)


def kind_schema(kind: str) -> pa.Schema:
    """Arrow schema of one kind: its own columns only."""
    return pa.schema([pa.field(c.name, c.dtype) for c in columns_of(kind)])


def arrow_schema(metadata: Mapping[str, str] | None = None) -> pa.Schema:
    """Arrow schema of the whole table, with the schema version (and ``metadata``) in its key-value metadata."""
    entries = {META_SCHEMA: f"{SCHEMA_VERSION[0]}.{SCHEMA_VERSION[1]}", **(metadata or {})}
    return pa.schema(
        [pa.field(c.name, c.dtype) for c in COLUMNS],
        metadata={k.encode(): v.encode() for k, v in entries.items()},
    )


def writer_options() -> dict[str, object]:
    """Options of ``pyarrow.parquet.ParquetWriter`` for run tables.

    Dictionaries only for text, delta encoding for integers: 1.9 times smaller and 3 times faster to scan than pyarrow's
    defaults (reference: ingest speed, section 3.6).
    """
    text = [c.name for c in COLUMNS if c.dtype in (_DICT, _TEXT)]
    delta = {c.name: "DELTA_BINARY_PACKED" for c in COLUMNS if c.dtype in (_I64, _I32, _U64)}
    return {"compression": "zstd", "use_dictionary": text, "column_encoding": delta}
