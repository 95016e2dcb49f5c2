"""Writes the rows of a run as Kineto traces: one JSON file per rank, as the profiler of a version of torch would.

The way back is ``traceanalyzer import``. What the way there and back cannot carry is listed in ``NOT_CARRIED``. Formats:
reference "record formats" and "trace event shapes"; what a call's records say is in kineto_calls.py.

Times: from torch 2.4 on, three decimals of microseconds since a base that all ranks share: nothing is lost. Torch 2.2 and
1.13 wrote whole microseconds: start and duration are each rounded down, so up to 999 ns of either are lost.

Rows do not know a kernel's launch configuration: ``grid`` and ``block`` are 1, and registers, shared memory and occupancy
are left out. Nothing else is made up; what a row does not know is not written, save the ids that tie records to each
other, and the host records of a call (operator, record_param_comms, annotation, launch) where the rows hold the call but
none of them.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
from isal import isal_zlib

from traceanalyzer.errors import InputError
from traceanalyzer.run import Run
from traceanalyzer.simulate import kineto_calls
from traceanalyzer.simulate.kineto_calls import ANNOTATIONS, PROFILES, Group, Profile, Words, is_call, pair

pc: Any = pyarrow.compute  # its functions are made when it is imported: no type checker sees them

Ints = npt.NDArray[np.int64]

BASE_STEP_NS = 7_889_238 * 10**9
"""baseTimeNanoseconds is a multiple of this, so that ranks share it (kineto: output_json.h)."""

NOT_CARRIED: dict[str, str] = {
    "comm_record.call_id": "numbered by the importer in order of issue; a hook's own numbers stand on its ranges",
    "comm_record.coalesce_id": "numbered by the importer; that calls share one is carried by how they were launched",
    "comm_record.comms_id": "torch 2.12 and later",
    "comm_record.completeness": "that a recording ends inside a call",
    "comm_record.dtype": "torch 2.2 and 1.13: of batched messages, whose records show lists of tensors",
    "comm_record.external_id": "of torch 2.2 and 1.13: the dispatcher operator's",
    "comm_record.group_id": "torch 2.2 wrote an address; 1.13 nothing",
    "comm_record.group_rank": "torch 1.13; torch 2.2 where the group's ranks are not known",
    "comm_record.group_size": "torch 1.13",
    "comm_record.hook_call": "only on the hook's own ranges (marks=True)",
    "comm_record.in_dims": "shapes of the record that the version has them on",
    "comm_record.in_splits": "lists of more than 30 are written shortened: not known (splits_known is false)",
    "comm_record.is_async": "from torch 2.12 on, or with shapes",
    "comm_record.join_evidence": "how the version's records tie: correlation before torch 2.4",
    "comm_record.op_raw": "the name of the record that the version has",
    "comm_record.out_elems": "torch 1.13: of calls on single tensors, whose inputs alone were recorded",
    "comm_record.out_splits": "as in_splits",
    "comm_record.peer": "from torch 2.5 on",
    "comm_record.recorded_chunk": "a hook's log, not the profiler, records places (rows of ranges ta:... are written)",
    "comm_record.recorded_component": "as recorded_chunk",
    "comm_record.recorded_layer": "as recorded_chunk",
    "comm_record.recorded_microbatch": "as recorded_chunk",
    "comm_record.recorded_phase": "as recorded_chunk",
    "comm_record.recorded_step": "as recorded_chunk",
    "comm_record.reduce_op": "only on the hook's own ranges (marks=True)",
    "comm_record.root": "from torch 2.5 on, or on the hook's own ranges",
    "comm_record.seq": "from torch 2.12 on; torch 2.2 with shapes",
    "comm_record.splits_known": "as in_splits",
    "comm_record.t_issue_end_ns": "of calls launched as one: their records end before the launch, whatever the rows say",
    "comm_record.work_state": "a flight recorder's word",
    "cpu_op.in_dims": "kept as text; absent where shapes were not recorded",
    "expert_rows": "no place in a trace",
    "issue": "the importer's own findings",
    "kernel.coalesce_id": "as for calls",
    "kernel.external_id": "of a communication kernel: its record's, from torch 2.4 on; before, the correlation id",
    "kernel.graph_id": "torch 2.13",
    "kernel.join_evidence": "as for calls",
    "kernel.kernel_op": "torch 2.2 and 1.13: by the kernel's name, which does not tell a send from an all-to-all",
    "kernel.launch_ns": "made up (the call's issue) where a simulator left it out",
    "metric": "no place in a trace",
    "process_group.description": "from torch 2.4 on",
    "process_group.ranks": "torch 2.2 and 1.13 wrote none; irregular groups that the header does not list are not known",
    "process_group.ranks_source": "header, call or inferred: a trace cannot say that a hook read them",
    "rank.device_name": "needs the device of a kernel",
    "rank.events_read": "counts events, not rows",
    "rank.host": "torch 2.13",
    "rank.import_status": "of the import",
    "rank.rank_source": "told becomes the file's name",
    "rank.rows_kept": "of the import",
    "rank.rows_rejected": "of the import",
    "rank.source_file": "the new file's",
    "rank.source_sha256": "the new file's",
    "rank.versions": "from torch 2.4 on; trace_schema is always written",
    "rank.window_start_ns": "worked out anew",
    "span.completeness": "only of the hook's steps",
    "span.recorded_step": "a hook's log",
    "start_ns": "torch 2.2 and 1.13: whole microseconds (also dur_ns, launch_ns, t_issue_ns, t_issue_end_ns)",
}
"""What a Kineto trace cannot carry: kind, kind.column or column of the run table -> why, or from which version on."""

# Numbers of CUPTI's callbacks, as found in real traces.
_CBID = {
    "cuLaunchKernel": 307,
    "cuLaunchKernelEx": 652,
    "cudaDeviceGetAttribute": 200,
    "cudaDeviceGetStreamPriorityRange": 205,
    "cudaDeviceSynchronize": 165,
    "cudaDriverGetVersion": 1,
    "cudaEventElapsedTime": 139,
    "cudaEventQuery": 138,
    "cudaEventRecord": 135,
    "cudaEventRecordWithFlags": 370,
    "cudaEventSynchronize": 137,
    "cudaFree": 22,
    "cudaFuncGetAttributes": 15,
    "cudaFuncSetAttribute": 273,
    "cudaGetDriverEntryPoint": 406,
    "cudaGetFuncBySymbol": 336,
    "cudaLaunchKernel": 211,
    "cudaLaunchKernelExC": 430,
    "cudaMalloc": 20,
    "cudaMemcpyAsync": 41,
    "cudaMemsetAsync": 51,
    "cudaOccupancyMaxActiveBlocksPerMultiprocessor": 210,
    "cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags": 251,
    "cudaPeekAtLastError": 11,
    "cudaPointerGetAttributes": 151,
    "cudaStreamGetCaptureInfo_v2": 409,
    "cudaStreamGetPriority": 203,
    "cudaStreamIsCapturing": 317,
    "cudaStreamSynchronize": 131,
    "cudaStreamWaitEvent": 147,
    "cudaThreadExchangeStreamCaptureMode": 327,
}
_LAUNCHES = ("Launch", "Memcpy", "Memset")
"""A runtime call with one of these in its name starts an arrow to the device."""
_RUNTIME = ("cuda_runtime", "cuda_driver", "xpu_runtime", "mtia_runtime", "privateuse1_runtime", "hip_runtime")
_BATCH = 1 << 16
_BLOCK_ROWS = 200_000
"""Rows of the run table in memory at a time, if a rank has no more by itself."""
_LAUNCH_NS = 5_000
_FIRST_ADDRESS = 93_825_000_000_000

_HOST = (
    "kind", "start_ns", "dur_ns", "name", "category", "pid", "tid", "external_id", "correlation", "sequence_nr", "in_dims"
)  # fmt: skip
_GROUP = ("group_id", "name", "description", "backend", "group_size", "ranks", "ranks_source")
_KERNEL = (
    "start_ns", "dur_ns", "name", "category", "device", "stream", "correlation", "external_id", "kernel_class",
    "join_evidence", "completeness", "launch_ns", "copy_bytes", "graph_id", "coalesce_id",
)  # fmt: skip
_CALL = (
    "external_id", "in_dims", "coalesce_id", "hook_call", "op", "op_raw", "group_id", "group_size", "group_rank", "seq",
    "comms_id", "peer", "root", "reduce_op", "dtype", "in_elems", "out_elems", "in_splits", "out_splits", "splits_known",
    "is_async", "pid", "tid", "t_issue_ns", "t_issue_end_ns", "start_ns", "dur_ns", "time_source", "join_evidence",
)  # fmt: skip


def write_kineto(
    source: Run | str | Path,
    directory: Path,
    *,
    torch: str = "2.13",
    ranks: Sequence[int] | None = None,
    compress: bool = True,
    marks: bool = True,
) -> list[Path]:
    """Writes the ranks of a run as Kineto traces ``rank-N.json.gz`` (``.json`` without ``compress``) into ``directory``.

    ``torch``: whose profiler writes, one of kineto_calls.PROFILES. ``ranks`` None: all of them; a rank that is not known
    goes into ``unknown.json``. ``marks``: whether our own ranges are written: ``ta:step 3`` where the rows hold them,
    ``ta:all_reduce`` around calls that a hook saw. A row without a duration (cut off) cannot be written. Every file is the
    same on repetition; a few ranks are in memory at a time. Gives the files in order of rank. Raises InputError for a
    version that is not known, for a run without ranks, and for a rank that it does not hold.
    """
    profile = PROFILES.get(torch)
    if profile is None:
        raise InputError(f"torch {torch}: not known. Choose one of {', '.join(PROFILES)}.")
    if not isinstance(source, Run):
        with Run.open(source) as run:
            return write_kineto(run, directory, torch=torch, ranks=ranks, compress=compress, marks=marks)
    recorded: dict[int | None, dict[str, Any]] = {}
    for row in source.rows("SELECT * FROM rank ORDER BY rank NULLS LAST, source = 'kineto' DESC, source NULLS LAST"):
        recorded.setdefault(row["rank"], row)
    if not recorded:
        raise InputError(f"{source.source}: holds no rank (no row of kind rank). Give a run table of traces.")
    missing = [r for r in ranks or () if r not in recorded]
    if missing:
        raise InputError(f"{source.source}: holds no rank {missing[0]}; it holds {len(recorded)} ranks.")
    directory.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    wanted = [row for rank, row in recorded.items() if ranks is None or rank in ranks]
    per_rank = max(1, int(source.value("SELECT count(*) FROM run")) // len(recorded))
    size = max(1, _BLOCK_ROWS // per_rank)
    for start in range(0, len(wanted), size):
        rows = wanted[start : start + size]
        block = _Block(source, [row["rank"] for row in rows])
        for row in rows:
            name = "unknown" if row["rank"] is None else f"rank-{row['rank']}"
            path = directory / f"{name}.json{'.gz' if compress else ''}"
            with path.open("wb") as file:
                out = _Out(file, compress)
                _Writer(block, row, profile, out, marks=marks).write(path.name.removesuffix(".gz"))
                out.close()
            written.append(path)
    return written


class _Block:
    """The rows of some ranks, read at once: a query for each rank would cost more than writing it."""

    def __init__(self, run: Run, ranks: Sequence[int | None]) -> None:
        known = [r for r in ranks if r is not None]
        among = (
            [f"rank BETWEEN {min(known)} AND {max(known)} AND rank IN ({', '.join(map(str, known))})"] if known else []
        )
        among += ["rank IS NULL"] if None in ranks else []
        where = " OR ".join(f"({a})" for a in among)

        def read(kinds: str, columns: Sequence[str], order: str = "") -> pa.Table:
            return run.arrow(
                f"SELECT rank, source, {', '.join(columns)} FROM run WHERE kind IN ({kinds}) AND ({where}) {order}"
            )

        self.host = read("'cpu_op', 'span'", _HOST)
        self.kernel = read("'kernel'", _KERNEL)
        self.calls = read("'comm_record'", _CALL, "ORDER BY call_id")
        self.groups = read("'process_group'", _GROUP)

    def of(self, table: pa.Table, rank: int | None, source: str | None) -> pa.Table:
        """Rows of one rank and source, without these two columns."""
        return _with(self.of_rank(table, rank), "source", source).drop_columns(["rank", "source"])

    def of_rank(self, table: pa.Table, rank: int | None) -> pa.Table:
        """Rows of one rank, of all sources."""
        return _with(table, "rank", rank)


def _with(table: pa.Table, column: str, value: int | str | None) -> pa.Table:
    """The rows that have a value in a column; None: that have none."""
    given = table.column(column)
    return table.filter(pc.is_null(given) if value is None else pc.fill_null(pc.equal(given, value), False))


class _Out:
    """Text into a file, packed or not; the same bytes for the same text."""

    def __init__(self, file: BinaryIO, compress: bool) -> None:
        self._file = file
        self._pack: Any = isal_zlib.compressobj(1, isal_zlib.DEFLATED, 31) if compress else None
        self._first = True

    def text(self, text: str) -> None:
        self._put(text.encode())

    def events(self, column: pa.Array) -> None:
        """Adds events: the bytes of a column of text lie one behind another already. Each begins with a comma."""
        for start in range(0, len(column), _BATCH):
            part = pa.concat_arrays([column.slice(start, _BATCH)])  # its own buffers, from offset 0
            text = part.buffers()[2]
            if text is None or text.size == 0:
                continue
            ends = np.frombuffer(part.buffers()[1], np.int32)[len(part)]
            self._put(memoryview(text)[1 if self._first else 0 : int(ends)])
            self._first = False

    def _put(self, text: bytes | memoryview) -> None:
        self._file.write(text if self._pack is None else self._pack.compress(text))

    def close(self) -> None:
        if self._pack is not None:
            self._file.write(self._pack.flush())


# columns of text ------------------------------------------------------------------------------------------------------


def _join(*parts: pa.Array | str) -> pa.Array:
    """Columns and constants, glued row by row; null adds nothing."""
    return pc.binary_join_element_wise(*parts, "", null_handling="replace", null_replacement="")


def _number(values: pa.Array | npt.NDArray[Any]) -> pa.Array:
    array = values if isinstance(values, pa.Array) else pa.array(values)
    return pc.cast(array, pa.string())


def _optional(key: str, values: pa.Array) -> pa.Array:
    """``, "key": value`` where there is a value, else null."""
    return pc.binary_join_element_wise(f', "{key}": ', _number(values), "", null_handling="emit_null")


_THOUSAND = pa.array([f".{i:03d}" for i in range(1000)])


def _microseconds(ns: Ints, *, whole: bool) -> pa.Array:
    number = _number(ns // 1000)
    return number if whole else _join(number, _THOUSAND.take(pa.array(ns % 1000)))


def _quoted(values: pa.Array) -> pa.Array:
    """Text as JSON, null for null; each distinct text is escaped once."""
    codes = values.dictionary_encode()
    texts = [msgspec.json.encode(text).decode() for text in codes.dictionary.to_pylist()]
    return pa.array(texts, pa.string()).take(codes.indices)


def _args(*parts: pa.Array | str) -> pa.Array:
    """The args section of events; each part begins with a comma and the first one's goes. No arguments: null."""
    joined = _join(*parts)
    inside = pc.utf8_slice_codeunits(joined, 2)
    section = _join(',\n    "args": {\n      ', inside, "\n    }")
    return pc.if_else(pc.equal(pc.binary_length(joined), 0), pa.scalar(None, pa.string()), section)


def _selected(table: pa.Table, mask: npt.NDArray[np.bool_]) -> pa.Table:
    return table.filter(pa.array(mask))


def _column(table: pa.Table, name: str) -> pa.Array:
    found = table.column(name).combine_chunks()
    return pa.concat_arrays(found.chunks) if isinstance(found, pa.ChunkedArray) else found


def _ints(table: pa.Table, name: str, missing: int = 0) -> Ints:
    found: Ints = _column(table, name).fill_null(missing).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


_HOST_TYPES: dict[str, pa.DataType] = {
    "kind": pa.string(),
    "start_ns": pa.int64(),
    "dur_ns": pa.int64(),
    "name": pa.string(),
    "category": pa.string(),
    "pid": pa.int64(),
    "tid": pa.int64(),
    "external_id": pa.uint64(),
    "correlation": pa.uint64(),
    "sequence_nr": pa.int64(),
    "in_dims": pa.string(),
    "extra": pa.string(),
}


# one rank ---------------------------------------------------------------------------------------------------------------


class _Writer:
    def __init__(self, block: _Block, row: dict[str, Any], profile: Profile, out: _Out, *, marks: bool) -> None:
        self.block = block
        self.row = row
        self.rank: int | None = row["rank"]
        self.profile = profile
        self.out = out
        self.marks = marks
        self.versions: dict[str, str] = json.loads(row["versions"]) if row["versions"] else {}

    def write(self, name: str) -> None:
        self._read()
        self._host_extras()
        self._host_made()
        self._kernel_extras()
        ranges = pc.equal(pc.fill_null(self.host.column("category"), ""), "gpu_user_annotation")  # wider by 1 ns
        times = [t for t in (self.host.filter(pc.invert(ranges)), self.kernel) if t.num_rows]
        first = min((pc.min(t.column("start_ns")).as_py() for t in times), default=0)
        last = max((pc.max(pc.add(t.column("start_ns"), t.column("dur_ns"))).as_py() for t in times), default=0)
        self.base = 0 if self.profile.whole_us else first // BASE_STEP_NS * BASE_STEP_NS
        self.first = first
        self._header()
        names = self._process_names()
        if self.profile.processes_first:
            self.out.events(names)
        self._write_host()
        self._write_kernels()
        if not self.profile.processes_first:
            self.out.events(names)
        self._write_spans_of_the_profiler(first, last)
        self.out.text("\n  ]" + f',\n  "traceName": {json.dumps(name)}' + self._times(behind=True) + "\n}\n")

    # what there is -----------------------------------------------------------------------------------------------

    def _read(self) -> None:
        block, source = self.block, self.row["source"]
        host = block.of(block.host, self.rank, source)
        host = pa.table({n: pc.cast(_column(host, n), _HOST_TYPES[n]) for n in _HOST})
        keep = pc.and_(pc.is_valid(host.column("start_ns")), pc.is_valid(host.column("dur_ns")))
        if not self.marks:
            ours = pc.fill_null(pc.starts_with(host.column("name"), "ta:"), False)
            keep = pc.and_(keep, pc.invert(ours))
        if self.profile.correlation_ids:  # torch 2.2 and older had no ranges on the device
            keep = pc.and_(keep, pc.fill_null(pc.not_equal(host.column("category"), "gpu_user_annotation"), True))
        self.host = host.filter(keep)
        kernel = block.of(block.kernel, self.rank, source)
        self.kernel = kernel.filter(
            pc.and_(pc.is_valid(kernel.column("start_ns")), pc.is_valid(kernel.column("dur_ns")))
        )
        self.calls: list[dict[str, Any]] = block.of(block.calls, self.rank, source).to_pylist()
        listed: dict[str, dict[str, Any]] = {}
        groups = block.of_rank(block.groups, self.rank).to_pylist()
        for row in sorted(groups, key=lambda g: g["source"] != source):  # a hook knows groups that the trace does not
            if row["group_id"] is not None:
                listed.setdefault(row["group_id"], row)
        self.group_rows = found = list(listed.values())
        self.groups: dict[str, Group] = {}
        for i, g in enumerate(found):
            address = g["group_id"].removeprefix("ptr:")
            number = int(address) if address != g["group_id"] and address.isdigit() else _FIRST_ADDRESS + i * 4096
            self.groups[g["group_id"]] = Group(g["group_id"], g["description"], g["group_size"], g["ranks"], number)
        self.shapes = self.profile.metadata != "keys" or bool(pc.any(pc.is_valid(self.host.column("in_dims"))).as_py())
        self.words: dict[int, Words] = {}
        for number, call in enumerate(self.calls):
            group = self.groups.get(call["group_id"])
            if group is None and call["group_id"] is not None:
                group = Group(call["group_id"], None, call["group_size"], None, _FIRST_ADDRESS - 4096)
            self.words[number] = Words(self.profile, call, group, own_rank=self.rank)
        self.by_coalesce: dict[int, list[int]] = defaultdict(list)
        for number, call in enumerate(self.calls):
            if call["coalesce_id"] is not None:
                self.by_coalesce[call["coalesce_id"]].append(number)
        seen = [
            pc.max(t.column(c)).as_py() or 0
            for t, c in ((self.host, "external_id"), (self.kernel, "external_id"))
            if t.num_rows
        ] + [c["external_id"] or 0 for c in self.calls]
        self._next_id = max(seen, default=0) + 1
        links = [pc.max(t.column("correlation")).as_py() or 0 for t in (self.host, self.kernel) if t.num_rows]
        self._next_link = max(links, default=0) + 1

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    # what is said of calls ---------------------------------------------------------------------------------------

    def _host_extras(self) -> None:
        """Arguments of the host's records of communication; finds the calls that have no such record."""
        table = self.host
        codes = _column(table, "name").dictionary_encode()
        texts = codes.dictionary.to_pylist()
        about = np.array([_about_a_call(text) for text in texts] + [False])
        index = np.flatnonzero(about[codes.indices.fill_null(len(texts)).to_numpy()])
        extras: list[str | None] = [None] * table.num_rows
        dims: dict[int, str] = {}
        finder = _Finder(self.calls)
        rows = table.select(["name", "category", "pid", "tid", "start_ns", "dur_ns", "external_id", "in_dims"])
        found = rows.take(pa.array(index)).to_pylist()
        places = [finder.find(row) for row in found]
        self.seen = {place for place in places if place is not None}
        shaped: dict[int, tuple[str, str]] = {}
        for row, place in zip(found, places, strict=True):
            if place is not None and row["in_dims"] is not None:
                operator = row["name"] if row["name"].startswith("c10d::") else "record_param_comms"
                if place not in shaped or operator != "record_param_comms":
                    shaped[place] = operator, row["in_dims"]
        for i, row, place in zip(index.tolist(), found, places, strict=True):
            name = row["name"]
            words = None if place is None else self.words[place]
            if name == "record_param_comms":
                if words is None:
                    extras[i] = kineto_calls.wait(self.profile, shapes=self.shapes)
                elif self.profile.metadata == "keys":
                    extras[i] = words.record()
                elif self.profile.metadata == "positional" and row["in_dims"] is not None:
                    extras[i] = words.positional()
            elif words is None or place is None:
                continue
            elif name.startswith("c10d::"):
                if row["in_dims"] is not None:
                    extras[i] = words.operator(name, row["in_dims"])
            elif name.startswith("ta:"):
                joint = self.by_coalesce.get(words.call["coalesce_id"], [])
                extras[i] = words.ours(words.call["coalesce_id"] if len(joint) > 1 else None)
            elif row["category"] == "user_annotation" and self.shapes:
                operator, shape = shaped.get(place, (None, words.call["in_dims"]))
                extras[i], own = words.annotation(operator, shape)
                if own is not None:
                    dims[i] = own
        if dims:
            column = _column(table, "in_dims").to_pylist()
            for i, text in dims.items():
                column[i] = text
            table = table.set_column(table.schema.get_field_index("in_dims"), "in_dims", pa.array(column, pa.string()))
        self.host = table.append_column("extra", pa.array(extras, pa.string()))

    def _host_made(self) -> None:
        """Host records of calls that have none, and the launches of their kernels."""
        made: list[dict[str, Any]] = []
        self.record_ids: dict[int, int] = {}
        self.annotation_ids: dict[int, int] = {}
        self.launched: dict[int, tuple[int, int, int]] = {}
        """Call -> (process, thread, when) of the launch of its kernel."""
        kernels = {
            row["coalesce_id"]: row["launch_ns"]
            for row in self.kernel.select(["coalesce_id", "launch_ns"])
            .filter(pc.is_valid(self.kernel.column("coalesce_id")))
            .to_pylist()
        }
        own = self.row["pid"] if self.row["pid"] is not None else 1000 + (self.rank or 0)
        closing: dict[int, tuple[int, int, int]] = {}
        for number, call in enumerate(self.calls):
            begin, end = call["t_issue_ns"], call["t_issue_end_ns"]
            if begin is None:
                continue
            end = begin if end is None else end
            pid = call["pid"] if call["pid"] is not None else own
            tid = call["tid"] if call["tid"] is not None else pid
            joint = call["coalesce_id"]
            batched = len(self.by_coalesce.get(joint, ())) > 1 or call["join_evidence"] == "coalesced"
            launch = kernels.get(joint)
            self.launched[number] = pid, tid, begin if launch is None else launch
            if number in self.seen:
                continue
            if batched and launch is not None and begin <= launch < end:
                end = launch  # a group is launched behind the records of its calls
            self._record_call(number, begin, end, pid, tid, batched, made)
            if batched and (joint not in closing or end >= closing[joint][2]):
                closing[joint] = pid, tid, end
        for joint, (pid, tid, end) in closing.items():
            launch = kernels.get(joint)
            when = end if launch is None else max(launch, end)
            members = self.by_coalesce[joint]
            for number in members:
                self.launched[number] = pid, tid, when
            place = {"pid": pid, "tid": tid, "start_ns": when, "dur_ns": _LAUNCH_NS, "external_id": self._new_id()}
            made.append({**place, "kind": "span", "category": "user_annotation", "name": "nccl:coalesced"})
            if self._is_ours(members[0]):
                extra = pair("pg", self.calls[members[0]]["group_id"]) + pair("coalesce", joint)
                made.append(
                    {
                        **place, "kind": "cpu_op", "category": "cpu_op", "name": "ta:end_coalescing", "extra": extra,
                        "external_id": self._new_id(),
                    }
                )  # fmt: skip
        self._add_host(made)

    def _is_ours(self, number: int) -> bool:
        """Whether our hook saw a call, and its ranges are wanted."""
        return self.marks and self.calls[number]["hook_call"] is not None

    def _record_call(
        self, number: int, begin: int, end: int, pid: int, tid: int, batched: bool, made: list[dict[str, Any]]
    ) -> None:
        """Adds the records of a call, the outer ones first: ours, the operator, record_param_comms, the annotation."""
        profile, call, words = self.profile, self.calls[number], self.words[number]
        op = call["op"]
        self.record_ids[number] = call["external_id"] if call["external_id"] is not None else self._new_id()
        place = {"start_ns": begin, "dur_ns": end - begin, "pid": pid, "tid": tid}
        operation = {**place, "kind": "cpu_op", "category": "cpu_op"}
        record = {**operation, "name": "record_param_comms", "external_id": self.record_ids[number]}
        if profile.metadata == "keys":
            record["extra"] = words.record()
        elif profile.metadata == "positional":
            record["extra"] = words.positional()
        if end == begin and profile.metadata == "keys":
            made.append(record)  # records of no duration do not enclose one another: one has to do
            return
        if self._is_ours(number) and op is not None:
            joint = call["coalesce_id"] if batched else None
            extra = words.ours(joint)
            made.append({**operation, "name": f"ta:{op}", "external_id": self._new_id(), "extra": extra})
        operator = kineto_calls.operator_of(call, profile)
        shape: tuple[str | None, str | None] = (None, call["in_dims"])
        if operator is not None:
            name, dims = operator
            shown = self.shapes and op != "barrier"
            shape = operator if shown else shape
            shapes = {"in_dims": dims, "extra": words.operator(name, dims)} if shown else {}
            made.append({**operation, "name": name, "external_id": self._new_id(), **shapes})
        if end == begin and operator is not None:
            return
        if end > begin:
            made.append(record)
        if not batched and op is not None:
            extra, own_dims = words.annotation(*shape) if self.shapes else ("", None)
            self.annotation_ids[number] = self._new_id()
            made.append(
                {
                    **place, "kind": "span", "category": "user_annotation", "external_id": self.annotation_ids[number],
                    "name": f"nccl:{ANNOTATIONS.get(op, op)}", "in_dims": own_dims, "extra": extra,
                }
            )  # fmt: skip

    def _add_host(self, rows: list[dict[str, Any]]) -> None:
        if rows:
            schema = pa.schema(list(_HOST_TYPES.items()))
            self.host = pa.concat_tables([self.host, pa.Table.from_pylist(rows, schema=schema)]).combine_chunks()

    def _kernel_extras(self) -> None:
        """What communication kernels say of their calls; the ids and launches that rows of kernels lack."""
        table, profile = self.kernel, self.profile
        n = table.num_rows
        links = _column(table, "correlation")
        if links.null_count:
            missing = np.flatnonzero(links.is_null().to_numpy(zero_copy_only=False))
            values = links.fill_null(0).to_numpy().copy()
            values[missing] = np.arange(self._next_link, self._next_link + len(missing), dtype=np.uint64)
            self._next_link += len(missing)
            links = pa.array(values, pa.uint64())
        ids = _column(table, "external_id")
        extras: list[str | None] = [None] * n
        if profile.correlation_ids:
            ids = links
        elif len(ids) and bool(pc.all(pc.equal(ids, links)).as_py() or False):
            ids = pa.nulls(n, pa.uint64())  # an old profiler's, which say nothing of the host
        runtime = self.host.filter(pc.is_in(self.host.column("category"), pa.array(_RUNTIME)))
        known = np.unique(_column(runtime, "correlation").drop_null().to_numpy())
        comm = np.flatnonzero(
            pc.fill_null(pc.equal(_column(table, "kernel_class"), "comm"), False).to_numpy(zero_copy_only=False)
        )
        rows = table.take(pa.array(comm)).to_pylist()
        own_ids: dict[int, int | None] = {}
        launches: list[dict[str, Any]] = []
        twins: list[dict[str, Any]] = []
        for i, row in zip(comm.tolist(), rows, strict=True):
            joint = self.by_coalesce.get(row["coalesce_id"], [])
            if not joint or row["completeness"] == "launched_before_window":
                continue
            call = joint[0]
            bare = len(joint) > 1 or row["join_evidence"] == "coalesced"
            if not bare:
                if profile.metadata == "keys":
                    extras[i] = self.words[call].kernel()
                if not profile.correlation_ids and (call in self.seen or call in self.record_ids):
                    own_ids[i] = self.record_ids.get(call, self.calls[call]["external_id"])
            told = row["launch_ns"] is not None or call in self.record_ids
            if told and call in self.launched and links[i].as_py() not in known:
                pid, tid, when = self.launched[call]
                launches.append(
                    {
                        "kind": "cpu_op", "category": "cuda_runtime", "name": "cudaLaunchKernelExC", "pid": pid,
                        "tid": tid, "start_ns": when, "dur_ns": _LAUNCH_NS, "correlation": links[i].as_py(),
                        "external_id": links[i].as_py() if profile.correlation_ids else self.record_ids.get(call),
                    }
                )  # fmt: skip
            if call in self.annotation_ids and not profile.correlation_ids:
                op = self.calls[call]["op"]
                twins.append(
                    {
                        "kind": "span", "category": "gpu_user_annotation", "name": f"nccl:{ANNOTATIONS.get(op or '', op)}",
                        "pid": row["device"], "tid": row["stream"], "start_ns": row["start_ns"] - 1,
                        "dur_ns": row["dur_ns"] + 2, "external_id": self.annotation_ids.get(call),
                    }
                )  # fmt: skip
        if own_ids:
            listed = ids.to_pylist()
            for i, own in own_ids.items():
                listed[i] = own
            ids = pa.array(listed, pa.uint64())
        for name, column in (("correlation", links), ("external_id", ids)):
            table = table.set_column(table.schema.get_field_index(name), name, column)
        self.kernel = table.append_column("extra", pa.array(extras, pa.string()))
        self._add_host(launches)
        self._add_host(twins)

    # text --------------------------------------------------------------------------------------------------------

    def _times(self, *, behind: bool) -> str:
        if self.profile.whole_us or behind != self.profile.times_behind:
            return ""
        text = f'"displayTimeUnit": "ms",\n  "baseTimeNanoseconds": {self.base}'
        return ",\n  " + text if behind else "  " + text + ",\n"

    def _header(self) -> None:
        row, newer = self.row, self.profile.metadata == "keys"
        head: list[tuple[str, Any]] = [("schemaVersion", 1), ("deviceProperties", [])]
        if row["device"] is not None:
            name = {} if row["device_name"] is None else {"name": row["device_name"]}
            head[-1] = ("deviceProperties", [{"id": row["device"], **name}])
        if newer:
            for key in ("cupti_version", "cuda_runtime_version", "cuda_driver_version"):
                value = self.versions.get(key.removesuffix("_version"))
                if value is not None:
                    head.append((key, int(value) if value.isdigit() else value))
        info = self._distributed(newer)
        if info:
            head.append(("distributedInfo", info))
        if self.shapes or (self.marks and any(call["hook_call"] is not None for call in self.calls)):
            head.append(("record_shapes", 1))  # our own ranges show their arguments with shapes only
        if self.profile.newer_keys:
            seed = f"{self.rank} {self.first}".encode()
            head.append(("trace_id", hashlib.sha256(seed).hexdigest()[:32].upper()))
            if row["host"] is not None:
                head.append(("host_name", row["host"]))
        text = "".join(f'  "{key}": {json.dumps(value)},\n' for key, value in head)
        self.out.text("\n{\n" + text + self._times(behind=False) + '  "traceEvents": [')

    def _distributed(self, newer: bool) -> dict[str, Any]:
        row = self.row
        info: dict[str, Any] = {}
        backends = [str(g["backend"]).rsplit(":", 1)[-1] for g in self.group_rows if g["backend"] is not None]
        if "backend" in self.versions or backends:
            info["backend"] = self.versions.get("backend") or backends[0]
        if self.rank is not None and row["rank_source"] in (None, "header"):
            info["rank"] = self.rank
        if row["world_size"] is not None:
            info["world_size"] = row["world_size"]
        if newer:
            listed = [
                {
                    "pg_name": g["group_id"],
                    "pg_desc": g["description"],
                    **({} if g["backend"] is None else {"backend_config": g["backend"]}),
                    "pg_size": g["group_size"],
                    "ranks": list(g["ranks"]),
                }
                for g in self.group_rows
                if g["ranks"] is not None and g["ranks_source"] not in ("call", "inferred")
            ]
            if listed:
                info |= {"pg_count": len(listed), "pg_config": listed}
            if "nccl" in self.versions:
                info["nccl_version"] = self.versions["nccl"]
        return info

    def _event(self, table: pa.Table, args: pa.Array, *, category: pa.Array | str | None = None) -> pa.Array:
        cat = _quoted(_column(table, "category")) if category is None else category
        name = _quoted(_column(table, "name"))
        return _join(
            ',\n  {\n    "ph": "X"',
            cat
            if isinstance(cat, str)
            else pc.binary_join_element_wise(', "cat": ', cat, "", null_handling="emit_null"),
            pc.binary_join_element_wise(', "name": ', name, "", null_handling="emit_null"),
            _optional("pid", _column(table, "pid")),
            _optional("tid", _column(table, "tid")),
            ',\n    "ts": ',
            self._us(_ints(table, "start_ns") - self.base),
            ', "dur": ',
            self._us(_ints(table, "dur_ns")),
            args,
            "\n  }",
        )

    def _us(self, ns: Ints) -> pa.Array:
        return _microseconds(ns, whole=self.profile.whole_us)

    def _flow(self, table: pa.Table, starts: npt.NDArray[np.bool_]) -> pa.Array:
        """Arrows between runtime calls and the device: ``s`` where one starts, ``f`` at all other ends."""
        kind = pc.if_else(pa.array(starts), "s", "f")
        bind = pc.if_else(pa.array(starts), "", ', "bp": "e"')
        return _join(
            ',\n  {\n    "ph": "', kind, '", "id": ', _number(_column(table, "correlation")),
            _optional("pid", _column(table, "pid")), _optional("tid", _column(table, "tid")), ', "ts": ',
            self._us(_ints(table, "start_ns") - self.base),
            ',\n    "cat": "ac2g", "name": "ac2g"', bind, "\n  }",
        )  # fmt: skip

    def _batches(self, table: pa.Table) -> Iterator[pa.Table]:
        for start in range(0, table.num_rows, _BATCH):
            yield table.slice(start, _BATCH)

    def _write_host(self) -> None:
        category = _column(self.host, "category").fill_null("").dictionary_encode()
        texts = category.dictionary.to_pylist()
        codes = category.indices.to_numpy()
        self.index = 0

        def those(*names: str) -> pa.Table:
            return _selected(self.host, np.isin(codes, [i for i, text in enumerate(texts) if text in names]))

        apart = {*_RUNTIME, "gpu_user_annotation", "overhead", "trace", "instant", "cpu_instant_event"}
        for table in self._batches(those(*(set(texts) - apart))):
            self.out.events(self._event(table, self._host_args(table)))
        for table in self._batches(those("overhead")):
            self.out.events(self._event(table, pa.nulls(table.num_rows, pa.string())))
        for table in self._batches(those(*_RUNTIME)):
            self._write_runtime(table)
        for table in self._batches(those("gpu_user_annotation")):
            self.out.events(self._event(table, _args(_optional("External id", _column(table, "external_id")))))
        self.instants = those("instant", "cpu_instant_event")
        self.traces = those("trace")

    def _host_args(self, table: pa.Table) -> pa.Array:
        n, profile = table.num_rows, self.profile
        index = _number(np.arange(self.index, self.index + n))
        self.index += n
        ids = _optional("External id", _column(table, "external_id"))
        dims = pc.binary_join_element_wise(', "Input Dims": ', _column(table, "in_dims"), "", null_handling="emit_null")
        extra = _column(table, "extra")
        number = _optional("Sequence number", _column(table, "sequence_nr"))
        python = pc.fill_null(pc.equal(_column(table, "category"), "python_function"), False)
        if profile.oldest:
            thread = pc.if_else(pc.is_valid(number), ', "Fwd thread id": 0', "")
            head = pair("Trace name", "PyTorch Profiler") + pair("Trace iteration", 0)
            tail = pair("Module Hierarchy", "") + pair("Call stack", "")
            return _args(head, ids, ', "Profiler Event Index": ', index, dims, extra, thread, number, tail)
        thread = pc.if_else(pc.is_valid(number), ', "Fwd thread id": 0', "")
        function = pc.if_else(python, "", ', "Record function id": 0') if profile.metadata == "keys" else ""
        return _args(ids, number, thread, function, extra, dims, ', "Ev Idx": ', index)

    def _write_runtime(self, table: pa.Table) -> None:
        names = _column(table, "name").dictionary_encode()
        texts = [text or "" for text in names.dictionary.to_pylist()]
        codes = pa.array([_CBID.get(text) for text in texts], pa.int64())
        launching = np.array([any(word in text for word in _LAUNCHES) for text in texts] + [False])
        starts = launching[names.indices.fill_null(len(texts)).to_numpy()]
        links = _column(table, "correlation")
        ids = _column(table, "external_id")
        if self.profile.correlation_ids:
            ids = pc.coalesce(ids, links)
        args = _args(
            _optional("External id", ids), _optional("cbid", codes.take(names.indices)), _optional("correlation", links)
        )
        events = self._event(table, args)
        flows = pc.if_else(pc.is_valid(links), self._flow(table, starts), "")
        self.out.events(_join(events, flows))

    def _write_kernels(self) -> None:
        for table in self._batches(self.kernel):
            device, stream = _column(table, "device"), _column(table, "stream")
            table = table.append_column("pid", device).append_column("tid", stream)
            kernel = pc.fill_null(pc.equal(_column(table, "category"), "kernel"), False)
            size, dur = _column(table, "copy_bytes"), _column(table, "dur_ns")
            timed = pc.if_else(pc.greater(dur, 0), dur, pa.scalar(None, pa.int64()))
            rate = pc.divide(pc.cast(size, pa.float64()), pc.cast(timed, pa.float64()))
            graph: pa.Array | str = ""
            if self.profile.newer_keys:
                graph = _join(
                    ', "graph id": ', _number(_column(table, "graph_id").fill_null(0)), ', "graph node id": 0'
                )
            args = _args(
                _optional("External id", _column(table, "external_id")),
                pc.if_else(kernel, ', "queued": 0', ""),
                _optional("device", device),
                ', "context": 1',
                _optional("stream", stream),
                _optional("correlation", _column(table, "correlation")),
                pc.if_else(kernel, ', "grid": [1, 1, 1], "block": [1, 1, 1]', ""),
                _optional("bytes", size),
                _optional("memory bandwidth (GB/s)", rate),
                graph,
                _column(table, "extra"),
            )
            ends = np.zeros(table.num_rows, bool)
            self.out.events(_join(self._event(table, args), self._flow(table, ends)))

    def _process_names(self) -> pa.Array:
        """Names and order of processes, threads and streams."""
        when = _microseconds(np.array([self.first - self.base]), whole=self.profile.whole_us)[0].as_py()
        events: list[str] = []

        def add(kind: str, pid: object, tid: object, key: str, value: object) -> None:
            events.append(
                f',\n  {{\n    "name": "{kind}", "ph": "M", "ts": {when}, "pid": {json.dumps(pid)}, "tid": {tid},\n'
                f'    "args": {{\n      "{key}": {json.dumps(value)}\n    }}\n  }}'
            )

        host = self.host.filter(pc.not_equal(pc.fill_null(self.host.column("category"), ""), "gpu_user_annotation"))
        threads = _pairs(host, "pid", "tid")
        streams = _pairs(self.kernel, "device", "stream")
        for pid in dict.fromkeys(p for p, _ in threads):
            add("process_name", pid, 0, "name", "python")
            add("process_labels", pid, 0, "labels", "CPU")
            add("process_sort_index", pid, 0, "sort_index", pid)
        for device in dict.fromkeys(d for d, _ in streams):
            add("process_name", device, 0, "name", "python")
            add("process_labels", device, 0, "labels", f"GPU {device}")
            add("process_sort_index", device, 0, "sort_index", device + 16777216)
        for device, stream in streams:
            add("thread_name", device, stream, "name", f"stream {stream} ")
            add("thread_sort_index", device, stream, "sort_index", stream)
        for pid, tid in threads:
            add("thread_name", pid, tid, "name", f"thread {tid} (python)")
            add("thread_sort_index", pid, tid, "sort_index", tid)
        return pa.array(events, pa.string())

    def _write_spans_of_the_profiler(self, first: int, last: int) -> None:
        """The profiler's own span and marks, as the rows have them, else around everything."""
        traces = self.traces.select(["name", "start_ns", "dur_ns"]).to_pylist()
        begin = min((row["start_ns"] for row in traces), default=first)
        if not traces and last > first:
            traces = [{"name": "PyTorch Profiler (0)", "start_ns": first, "dur_ns": last - first}]
        events: list[str] = []

        def us(ns: int) -> str:
            return str(ns // 1000) if self.profile.whole_us else f"{ns // 1000}.{ns % 1000:03d}"

        for row in traces:
            events.append(
                f',\n  {{\n    "ph": "X", "cat": "Trace", "ts": {us(row["start_ns"] - self.base)}, "dur": '
                f'{us(row["dur_ns"])},\n    "pid": "Spans", "tid": "PyTorch Profiler",\n    "name": '
                f'{json.dumps(row["name"])},\n    "args": {{\n      "Op count": 0\n    }}\n  }}'
            )
        if traces:
            events.append(
                f',\n  {{\n    "name": "process_sort_index", "ph": "M", "ts": {us(begin - self.base)},\n    "pid": "Spans", '
                '"tid": 0,\n    "args": {\n      "sort_index": 536870912\n    }\n  }'
            )
        own = {"Iteration Start: PyTorch Profiler": ("Traces", "Trace PyTorch Profiler"), "Record Window End": ("", "")}
        rows = self.instants.to_pylist()
        if traces and not any(row["name"] in own for row in rows):
            rows += [
                {"name": name, "category": "instant", "pid": None, "tid": None, "start_ns": when}
                for name, when in zip(own, (begin, last), strict=True)
            ]
        for row in rows:
            pid, tid = row["pid"], row["tid"]
            if pid is None and tid is None and row["name"] in own:
                pid, tid = own[row["name"]]
            known = row["category"] not in (None, "instant")
            category = f'"cat": {json.dumps(row["category"])}, ' if known else ""
            events.append(
                f',\n  {{\n    "name": {json.dumps(row["name"])}, "ph": "i", {category}"s": "{"t" if known else "g"}",\n    '
                + "".join(f'"{key}": {json.dumps(v)}, ' for key, v in (("pid", pid), ("tid", tid)) if v is not None)
                + f'"ts": {us(row["start_ns"] - self.base)}\n  }}'
            )
        self.out.events(pa.array(events, pa.string()))


def _pairs(table: pa.Table, first: str, second: str) -> list[tuple[int, int]]:
    """The distinct pairs of two columns, without nulls and negative numbers, in order."""
    found = table.select([first, second]).group_by([first, second]).aggregate([]).to_pydict()
    pairs = zip(found[first], found[second], strict=True)
    return sorted((a, b) for a, b in pairs if a is not None and b is not None and a >= 0 and b >= 0)


def _about_a_call(name: str | None) -> bool:
    if name is None:
        return False
    if name.startswith(("nccl:", "gloo:", "xccl:", "ta:")):
        return is_call(name)
    return name == "record_param_comms" or name.startswith("c10d::")


class _Finder:
    """Finds the call that a host record belongs to."""

    def __init__(self, calls: Sequence[Mapping[str, Any]]) -> None:
        self._by_id: dict[int, int] = {}
        self._by_work: dict[tuple[int, int], int] = {}
        issued: dict[tuple[int | None, int | None], list[tuple[int, int, int]]] = defaultdict(list)
        for number, call in enumerate(calls):
            if call["external_id"] is not None:
                self._by_id.setdefault(call["external_id"], number)
            if call["time_source"] == "backend_range":
                self._by_work.setdefault((call["start_ns"], call["dur_ns"]), number)
            if call["t_issue_ns"] is not None and call["t_issue_end_ns"] is not None:
                thread = call["pid"], call["tid"]
                issued[thread].append((call["t_issue_ns"], call["t_issue_end_ns"], number))
        self._issued: dict[tuple[int | None, int | None], tuple[list[int], list[int], list[int]]] = {}
        for thread, ranges in issued.items():
            ranges.sort()
            self._issued[thread] = [r[0] for r in ranges], [r[1] for r in ranges], [r[2] for r in ranges]

    def find(self, row: Mapping[str, Any]) -> int | None:
        """Number of the call: the one whose id, work or issue this is, else the innermost around it or first inside it."""
        name, begin = row["name"], row["start_ns"]
        end = begin + row["dur_ns"]
        if name.startswith("gloo:"):
            return self._by_work.get((begin, row["dur_ns"]))
        if (
            row["category"] != "gpu_user_annotation"
            and row["external_id"] in self._by_id
            and not name.startswith("nccl:")
        ):
            return self._by_id[row["external_id"]]
        here = self._issued.get((row["pid"], row["tid"]))
        if here is None:
            return None
        starts, ends, numbers = here
        at = bisect_right(starts, begin) - 1
        for i in range(at, max(at - 8, -1), -1):
            if ends[i] >= end:
                return numbers[i]
        at = bisect_left(starts, begin)
        return numbers[at] if at < len(starts) and ends[at] <= end and begin <= starts[at] else None
