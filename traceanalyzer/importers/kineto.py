"""Reads one Kineto (torch.profiler) trace into rows of the run table.

Two passes. The first streams the file: every event becomes a spooled row or a counted reject; what concerns
communication is spooled once more, for itself. The second makes calls of it (calls.py), ties kernels to them (ties.py) and
writes the rows in order. Formats read: every
key profile from December 2020 to April 2026 (reference: trace_event_shapes and the traces' README).
"""

from __future__ import annotations

import gc
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traceanalyzer import kernel_names, schema, traffic
from traceanalyzer.errors import InputError
from traceanalyzer.importers import calls, groups, ties
from traceanalyzer.importers.json_stream import AnyEvent, Args, EventStream, whole_number
from traceanalyzer.importers.source import TraceText
from traceanalyzer.importers.spool import Intern, Records, RunWriter, Spool, in_order, issue, table_of

SOURCE = "kineto"

# Old spellings of categories (2020 to 2022) -> today's.
_OLD_CATEGORIES = {
    "operator": "cpu_op",
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
    "runtime": "cuda_runtime",
    "driver": "cuda_driver",
    "python": "python_function",
}
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_RUNTIME = frozenset(
    {"cuda_runtime", "cuda_driver", "xpu_runtime", "mtia_runtime", "privateuse1_runtime", "hip_runtime"}
)
_HOST = frozenset({"cpu_op", "python_function", "privateuse1_driver", *_RUNTIME})
_FLOWS = frozenset("stf")
_LONGEST_US = 30 * 86_400 * 1_000_000
# The year 2096: with a base of as much again and the longest duration it still fits int64 nanoseconds.
_LARGEST_US = 4 * 10**15
# Sept 2001: whatever is smaller counts from some other start than 1970.
_EARLIEST_UNIX_NS = 10**18
_RANK_IN_NAME = re.compile(r"(?:^|[^a-z])rank[-_ .]?(\d+)", re.IGNORECASE)
_COMM_HOST = ("record_param_comms", "c10d::", "nccl:", "gloo:", "ta:", "_c10d_functional::", "xccl:", "ucc:")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

REJECT_REASONS = {
    "no_timestamps": "start and duration are both 0: the device record never got its time stamps",
    "missing_duration": "no duration",
    "negative_duration": "negative duration",
    "implausible_duration": "a duration beyond 30 days or a time beyond the year 2096",
    "unfinished": "still running when the profiler stopped (negative duration on the host)",
    "missing_start": "no start time",
}
"""Why a complete event cannot be used."""


@dataclass
class Reject:
    """Counted rejects of one reason on one side, with the first names."""

    count: int = 0
    names: list[str] = field(default_factory=list)


@dataclass
class Summary:
    """What one imported file gave; small enough to travel between processes.

    ``status``: complete, complete with rejects, partial, refused. ``reason`` is set for a refusal. Times in ns.
    """

    file: str
    path: str
    status: str
    rank: int | None = None
    rank_source: str | None = None
    reason: str | None = None
    part: str | None = None
    rows: dict[str, int] = field(default_factory=dict)
    issues: list[dict[str, Any]] = field(default_factory=list)
    window_start_ns: int | None = None
    events: int = 0
    text_bytes: int = 0
    source: str = SOURCE
    pid: int | None = None


def rank_of_name(name: str) -> int | None:
    """The rank a file name states (``rank-3``, ``job_rank_0.json``), or None."""
    found = _RANK_IN_NAME.findall(name)
    return int(found[-1]) if found else None


def import_file(
    path: Path,
    part: Path,
    *,
    work: Path,
    told_rank: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Summary:
    """Imports one trace file into the Parquet file ``part``.

    ``work`` is an existing folder for temporary files; ``told_rank`` is used where neither the header nor the file's name
    states a rank; ``progress`` is called with the bytes of the file read so far. Damage becomes rows of kind ``issue``.
    Gives a Summary of status ``refused``, and no file, where nothing in the file can be trusted.
    """
    reader = _Reader(path, work)
    collecting = gc.isenabled()
    gc.disable()  # millions of small objects that never form cycles: the collector would double the time
    pool = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())  # gives back what is freed; mimalloc holds on to 40 MB
    try:
        reader.read(progress)
        return reader.write(part, told_rank)
    except InputError as error:
        return Summary(path.name, str(path), "refused", reason=str(error))
    finally:
        reader.remove()
        pa.set_memory_pool(pool)
        if collecting:
            gc.enable()


class _Reader:
    def __init__(self, path: Path, work: Path) -> None:
        self.path = path
        self.work = work
        self.names = Intern(self._clean)
        self.categories = Intern()
        self.dims = Intern()
        self.dims_of_bytes = _Asked(lambda raw: self.dims[raw.decode("utf-8", "replace") or None])
        self.concerns_communication = _Asked(_concerns_communication)
        self.kinds_of_kernel = _Asked(lambda name: kernel_names.classify(str(name)))
        self.classes = Intern()
        self.ops = Intern()
        self.evidence = Intern()
        self.completeness = Intern()
        self.meta: dict[str, Any] = {}
        self.rejects: dict[tuple[str, str], Reject] = {}
        self.counts: Counter[str] = Counter()
        self.labels: dict[str, set[str]] = {}
        self.window: dict[str, tuple[int, int]] = {}
        self.base_ns = 0
        u64 = frozenset({"external_id", "correlation"})
        timed = ("start_ns", "dur_ns", "name", "category")
        self.cpu_op = Spool(
            work / "cpu_op.parquet",
            (*timed, "pid", "tid", "external_id", "correlation", "sequence_nr", "in_dims"),
            u64,
        )
        self.span = Spool(work / "span.parquet", (*timed, "pid", "tid", "external_id"), u64)
        device = (*timed, "device", "stream", "correlation", "external_id", "kernel_class")
        self.kernel = Spool(work / "kernel.parquet", (*device, "copy_bytes", "graph_id"), u64)
        self.comm_kernel = Spool(work / "comm_kernel.parquet", (*device, "kernel_op", "graph_id", "meta"), u64)
        self.kernel_metas = Records(work, calls.Metadata)
        self.host_comm = Spool(work / "host_comm.parquet", ("start_ns", "end_ns", "thread", "depth", "record"))
        self.host_records = Records(work, calls.HostEvent)
        self.comm_pids: Counter[int] = Counter()
        self.threads: dict[tuple[int | None, int | None], int] = {}
        """(pid, tid) -> number, in order of the first record of communication."""
        self.dispatched = self.gloo = False
        """Whether the file holds calls seen above the backend, and ranges of gloo."""

    def _clean(self, text: str) -> str:
        if _CONTROL.search(text):
            # Kineto never writes control characters in a name: one is what an unescaped Windows path became.
            self.counts["control_names"] += 1
            text = _CONTROL.sub(
                lambda m: {"\t": "/t", "\n": "/n", "\r": "/r", "\b": "/b", "\f": "/f"}.get(m[0], "?"), text
            )
        return text

    # first pass --------------------------------------------------------------------------------------------------

    def read(self, progress: Callable[[int], None] | None) -> None:
        with TraceText(self.path) as text:
            self.stream = stream = EventStream(
                text, progress=None if progress is None else lambda _: progress(text.packed_bytes)
            )
            for events in stream:
                self._take(events)
            text.drain()
        self.sha256 = text.sha256
        self.meta = stream.meta
        for spool in (self.cpu_op, self.span, self.kernel, self.comm_kernel, self.host_comm):
            spool.close()
        base = whole_number(self.meta.get("baseTimeNanoseconds"))
        if base is not None and 0 <= base <= _LARGEST_US * 1000:
            self.base_ns = base

    def _take(self, events: list[AnyEvent]) -> None:
        complete: defaultdict[str | None, list[AnyEvent]] = defaultdict(list)
        flows = 0
        for event in events:
            ph = event.ph
            if ph == "X":
                complete[event.cat].append(event)
            elif ph is not None and ph in _FLOWS:
                flows += 1
            elif ph in ("i", "I", "R"):
                complete["\x00instant"].append(event)
            elif ph == "M":
                self._metadata(event)
            elif ph == "C":
                self.counts["counter_events"] += 1
            else:
                self.counts["other_phases"] += 1
        self.counts["flow_events"] += flows
        for raw_category, group in complete.items():
            self._group(raw_category, group)

    def _metadata(self, event: AnyEvent) -> None:
        self.counts["metadata_events"] += 1
        if event.name == "process_labels" and event.args is not None and event.args.labels is not None:
            self.labels.setdefault(str(event.pid), set()).add(str(event.args.labels))

    def _group(self, raw_category: str | None, group: list[AnyEvent]) -> None:
        if raw_category == "\x00instant":
            category, kind = None, "span"
        else:
            category = None if raw_category is None else raw_category.lower()
            category = _OLD_CATEGORIES.get(category or "", category)
            if category in _DEVICE:
                kind = "kernel"
            elif category in _HOST or category is None:
                kind = "cpu_op"
            else:
                kind = "span"
        start, dur, keep = self._times(group, kind, instant=raw_category == "\x00instant")
        if keep is not None:
            group = [e for e, k in zip(group, keep, strict=True) if k]
            start, dur = start[keep], dur[keep]
        n = len(group)
        if n == 0:
            return
        if raw_category == "\x00instant":
            codes = np.fromiter((self.categories[e.cat.lower() if e.cat else "instant"] for e in group), np.int64, n)
        else:
            codes = np.full(n, self.categories[category], np.int64)
        names = [e.name for e in group]
        values: dict[str, Any] = {
            "start_ns": start,
            "dur_ns": dur,
            "name": np.fromiter(map(self.names.__getitem__, names), np.int64, n),
            "category": codes,
        }
        args = [e.args or _NO_ARGS for e in group]
        values["external_id"] = _integers([a.ext if a.ext is not None else a.ext_old for a in args], pa.uint64())
        if kind != "span":
            self._widen_window("device" if kind == "kernel" else "host", start, dur)
        if kind == "kernel":
            self._kernels(n, values, category or "kernel", names, args, group)
            return
        values["pid"] = _integers([e.pid for e in group], pa.int64())
        values["tid"] = _integers([e.tid for e in group], pa.int64())
        if category in ("cpu_op", "user_annotation", None):  # gpu_user_annotation repeats the host's
            self._host_comm(group, start, dur, names)
        if kind == "span":
            self.span.append(n, values)
            return
        if category in _RUNTIME:
            values["correlation"] = _integers([a.corr for a in args], pa.uint64())
        elif category != "python_function":
            values["sequence_nr"] = _integers([a.seq_nr for a in args], pa.int64())
            dims = self.dims_of_bytes
            values["in_dims"] = np.fromiter([dims[bytes(a.dims) or bytes(a.dims_old)] for a in args], np.int64, n)
        self.cpu_op.append(n, values)

    def _widen_window(self, side: str, start: npt.NDArray[np.int64], dur: npt.NDArray[np.int64]) -> None:
        if side == "device":  # a copy of no duration counts as an event and adds no time
            start, dur = start[dur > 0], dur[dur > 0]
        if len(start):
            low, high = int(start.min()), int((start + dur).max())
            was = self.window.get(side, (low, high))
            self.window[side] = min(was[0], low), max(was[1], high)

    def _times(
        self, group: list[AnyEvent], kind: str, *, instant: bool
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_] | None]:
        """Start and duration in ns relative to the base; a mask of the sound events, None if all are."""
        n = len(group)
        starts = [e.ts for e in group]
        durs = [0] * n if instant else [e.dur for e in group]
        if self.stream.exact:
            ts = np.array([np.nan if t is None else float(t) for t in starts])
            du = np.array([np.nan if d is None else float(d) for d in durs])
        else:
            ts = np.array(starts, np.float64) if None in starts else np.fromiter(starts, np.float64, n)
            du = np.array(durs, np.float64) if None in durs else np.fromiter(durs, np.float64, n)
        with np.errstate(invalid="ignore"):
            sound = (np.abs(ts) < _LARGEST_US) & (du >= 0) & (du <= _LONGEST_US)
            if kind == "kernel":
                sound &= (ts != 0) | (du != 0)
        keep: npt.NDArray[np.bool_] | None = None
        if not sound.all():
            keep = sound
            for i in np.flatnonzero(~sound):
                self._reject(group[int(i)], ts[i], du[i], kind)
            ts, du = np.where(sound, ts, 0), np.where(sound, du, 0)
        if self.stream.exact and any(isinstance(t, Decimal) for t in starts):
            start = np.array([_exact_ns(t) if k else 0 for t, k in zip(starts, sound, strict=True)], np.int64)
            dur = np.array([_exact_ns(d) if k else 0 for d, k in zip(durs, sound, strict=True)], np.int64)
            return start, dur, keep
        return _nanoseconds(ts), _nanoseconds(du), keep

    def _reject(self, event: AnyEvent, ts: float, dur: float, kind: str) -> None:
        side = "device" if kind == "kernel" else "host"
        if np.isnan(ts):
            reason = "missing_start"
        elif side == "device" and ts == 0 and dur == 0:
            reason = "no_timestamps"
        elif np.isnan(dur):
            reason = "missing_duration"
        elif dur < 0:
            reason = "negative_duration" if side == "device" else "unfinished"
        else:
            reason = "implausible_duration"
        entry = self.rejects.setdefault((side, reason), Reject())
        entry.count += 1
        if len(entry.names) < 3:
            entry.names.append(str(event.name)[:80])

    def _kernels(
        self,
        n: int,
        values: dict[str, Any],
        category: str,
        names: list[Any],
        args: list[Args],
        group: list[AnyEvent],
    ) -> None:
        values["device"] = _integers(
            [a.device if a.device is not None else e.pid for a, e in zip(args, group, strict=True)], pa.int64()
        )
        values["stream"] = _integers(
            [a.stream if a.stream is not None else _stream_of(e.tid) for a, e in zip(args, group, strict=True)],
            pa.int64(),
        )
        values["correlation"] = _integers([a.corr for a in args], pa.uint64())
        values["graph_id"] = _integers([a.graph or None for a in args], pa.int64())
        if category != "kernel":
            values["copy_bytes"] = _integers([a.nbytes for a in args], pa.int64())
            values["kernel_class"] = np.full(
                n, self.classes["copy" if category == "gpu_memcpy" else "memset"], np.int64
            )
            self.kernel.append(n, values)
            return
        kinds = [self.kinds_of_kernel[name] for name in names]
        values["kernel_class"] = np.fromiter((self.classes[kind.kernel_class] for kind in kinds), np.int64, n)
        comm = [i for i in range(n) if kinds[i].kernel_class == "comm" or args[i].cname is not None]
        if comm:
            self._comm_kernels(
                {k: v.take(pa.array(comm)) if isinstance(v, pa.Array) else v[comm] for k, v in values.items()},
                [args[i] for i in comm],
                [kinds[i].op for i in comm],
            )
            rest = np.ones(n, bool)
            rest[comm] = False
            n -= len(comm)
            values = {k: v.filter(pa.array(rest)) if isinstance(v, pa.Array) else v[rest] for k, v in values.items()}
        if n:
            self.kernel.append(n, values)

    def _comm_kernels(self, values: dict[str, Any], args: list[Args], named_ops: list[str | None]) -> None:
        metas = [calls.Metadata.of(a) for a in args]
        ops = [
            traffic.normalise_op(a.cname) if a.cname is not None else op for a, op in zip(args, named_ops, strict=True)
        ]
        values["kernel_class"] = np.full(len(args), self.classes["comm"], np.int64)
        values["kernel_op"] = np.array([self.ops[op] for op in ops], np.int64)
        values["meta"] = pa.array([None if m is None else self.kernel_metas.append(m) for m in metas], pa.int64())
        self.comm_kernel.append(len(args), values)

    def _host_comm(
        self, group: list[AnyEvent], start: npt.NDArray[np.int64], dur: npt.NDArray[np.int64], names: list[Any]
    ) -> None:
        found = [i for i, name in enumerate(names) if self.concerns_communication[name]]
        if not found:
            return
        threads, depths, first = [], [], len(self.host_records)
        begin, end = start[found], (start + dur)[found]
        for i, start_ns, end_ns in zip(found, begin.tolist(), end.tolist(), strict=True):
            event, name = group[i], names[i]
            pid, tid = whole_number(event.pid), whole_number(event.tid)
            self.counts["unusable_values"] += calls.unusable_values(event.args or _NO_ARGS)
            self.host_records.append(calls.HostEvent.of(name, event.args or _NO_ARGS, pid, tid, start_ns, end_ns))
            threads.append(self._thread(pid, tid))
            depths.append(calls.depth(name))
            if pid is not None:
                self.comm_pids[pid] += 1
            self.dispatched |= name.startswith(("c10d::", "ta:"))
            self.gloo |= name.startswith("gloo:")
        record = np.arange(first, first + len(found))
        self.host_comm.append(
            len(found), {"start_ns": begin, "end_ns": end, "thread": threads, "depth": depths, "record": record}
        )

    def _thread(self, pid: int | None, tid: int | None) -> int:
        return self.threads.setdefault((pid, tid), len(self.threads))

    def remove(self) -> None:
        """Deletes the temporary files."""
        for spool in (self.cpu_op, self.span, self.kernel, self.comm_kernel, self.host_comm):
            spool.remove()
        self.kernel_metas.close()
        self.host_records.close()

    # second pass -------------------------------------------------------------------------------------------------

    def write(self, part: Path, told_rank: int | None) -> Summary:
        """Ties, sorts and writes; gives the summary."""
        info = self.meta.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        usable = self.cpu_op.rows + self.span.rows + self.kernel.rows + self.comm_kernel.rows
        if usable == 0 and not self.rejects and not self.stream.counts["cut"]:
            raise InputError(
                f"{self.path.name} holds {self.stream.counts['events']} events but no complete one (phase X): it is not a "
                "Kineto trace. Give a file written by torch.profiler."
            )
        self._refuse_two_processes()
        rank, rank_source = self._rank(info, told_rank)
        world = whole_number(info.get("world_size"))
        issues = self._issues(rank, rank_source)
        tied, comm_kernels, tie_issues = self._tie()
        pid = self._pid()
        group_rows, group_issues = groups.groups(info, tied.in_order(), rank=rank, world_size=world)
        issues += group_issues + tie_issues
        cut = bool(self.stream.counts["cut"])
        rejected = sum(r.count for r in self.rejects.values()) + self.stream.counts["bad_events"]
        status = "partial" if cut else "complete with rejects" if rejected else "complete"
        window = self.window.get("device") or self.window.get("host")
        base = self.base_ns
        window_start_ns = None if window is None else window[0] + base
        rank_row: dict[str, Any] = {
            "rank": rank,
            "source": SOURCE,
            "rank_source": rank_source,
            "pid": pid,
            "host": self.meta.get("host_name"),
            "device": self._device(),
            "device_name": self._device_name(),
            "world_size": world,
            "window_start_ns": window_start_ns,
            "window_end_ns": None if window is None else window[1] + base,
            "host_start_ns": self.window["host"][0] + base if "host" in self.window else None,
            "source_file": self.path.name,
            "source_sha256": self.sha256,
            "versions": json.dumps(self._versions(info), sort_keys=True),
            "events_read": self.stream.counts["events"],
            "rows_rejected": rejected,
            "import_status": status,
        }
        metadata = {schema.META_IMPORT: json.dumps({"source": SOURCE, "status": status})}
        kept = self.cpu_op.rows + self.span.rows + self.kernel.rows + self.comm_kernel.rows + len(tied)
        rank_row["rows_kept"] = kept + len(group_rows)
        with RunWriter(part, metadata) as writer:
            constant = {"rank": rank, "source": SOURCE}
            writer.write("comm_record", _chunks("comm_record", tied.rows(base, rank, group_rows), constant))
            tied.records.close()
            del tied
            writer.write("cpu_op", self._final([self.cpu_op], constant))
            writer.write(
                "issue", [table_of("issue", [{**constant, "source_file": self.path.name, **i} for i in issues])]
            )
            writer.write("kernel", self._final([self.kernel, comm_kernels], constant))
            writer.write("process_group", [table_of("process_group", [{**constant, **g} for g in group_rows])])
            writer.write("rank", [table_of("rank", [rank_row])])
            writer.write("span", self._final([self.span], constant))
        comm_kernels.remove()
        return Summary(
            file=self.path.name,
            path=str(self.path),
            status=status,
            rank=rank,
            rank_source=rank_source,
            part=str(part),
            rows=dict(writer.rows),
            issues=issues,
            window_start_ns=window_start_ns,
            events=self.stream.counts["events"],
            text_bytes=self.stream.text_bytes,
            pid=pid,
        )

    def _rank(self, info: dict[str, Any], told: int | None) -> tuple[int | None, str | None]:
        stated = whole_number(info.get("rank"))
        if stated is not None and stated >= 0:
            return stated, "header"
        named = rank_of_name(self.path.name)
        if named is not None:
            return named, "file name"
        return (told, "told") if told is not None else (None, None)

    def _versions(self, info: dict[str, Any]) -> dict[str, str]:
        found = {
            "nccl": info.get("nccl_version"),
            "backend": info.get("backend"),
            "cupti": self.meta.get("cupti_version"),
            "cuda_runtime": self.meta.get("cuda_runtime_version"),
            "cuda_driver": self.meta.get("cuda_driver_version"),
            "trace_schema": self.meta.get("schemaVersion"),
        }
        return {k: str(v) for k, v in found.items() if v is not None}

    def _pid(self) -> int | None:
        if self.comm_pids:
            return self.comm_pids.most_common(1)[0][0]
        for spool in (self.cpu_op, self.span):
            for batch in spool.batches(["pid"]):
                found = batch.column(0).drop_null()
                if len(found):
                    return int(found[0].as_py())
        return None

    def _device(self) -> int | None:
        for spool in (self.kernel, self.comm_kernel):
            for batch in spool.batches(["device"]):
                values = batch.column(0).drop_null()
                if len(values):
                    return int(values[0].as_py())
        return None

    def _device_name(self) -> str | None:
        properties = self.meta.get("deviceProperties")
        device = self._device()
        if isinstance(properties, list) and device is not None:
            for entry in properties:
                if isinstance(entry, dict) and entry.get("id") == device:
                    return str(entry.get("name")) if entry.get("name") is not None else None
        return None

    def _tie(self) -> tuple[ties.Calls, Spool, list[dict[str, Any]]]:
        """The calls; the communication kernels with what they are tied to; issues."""
        external, correlation, bare_ids, bogus_ids = [_NO_IDS], [_NO_IDS], False, True
        for batch in self.comm_kernel.batches(["external_id", "correlation", "meta"]):
            external.append(np.unique(batch.column(0).drop_null().to_numpy()))
            correlation.append(np.unique(batch.column(1).drop_null().to_numpy()))
            # Up to Feb 2024 a kernel's External id is its correlation id and says nothing of the host.
            has_id, has_correlation, has_meta = (c.is_valid().to_numpy(zero_copy_only=False) for c in batch.columns)
            ids, correlations = (batch.column(i).fill_null(0).to_numpy() for i in (0, 1))
            bare = has_id & ~has_meta
            bare_ids |= bool(bare.any())
            bogus_ids &= bool((has_correlation & (ids == correlations))[bare].all())
        gloo = ties.GlooRanges() if self.gloo and self.dispatched else None
        records = Records(self.work, calls.Call)
        tied = ties.Calls(records, np.unique(np.concatenate(external)), gloo=gloo is not None)
        builder = ties.Builder(tied)
        for thread, events in itertools.groupby(self._host_events(gloo), lambda pair: pair[0]):
            builder.thread(thread, (event for _, event in events))
        self.host_records.close()
        ties.set_paths(tied, self._ancestors(tied))
        found, issues = ties.tie_kernels(
            builder,
            self._tie_input(),
            self.kernel_metas,
            self._launches(np.unique(np.concatenate(correlation))),
            bogus_ids=bare_ids and bogus_ids,
            any_launch=any("Launch" in t for t in self.names.texts),
        )
        tied.settle()
        if gloo is not None:
            gloo.tie(tied)
        return tied, self._tied_kernels(tied, found), issues

    def _host_events(self, gloo: ties.GlooRanges | None) -> Iterator[tuple[int, calls.HostEvent]]:
        """(thread, record) in the order in which records nest; gloo's worker ranges go to ``gloo`` instead."""
        for batch in in_order([self.host_comm], self.work, "thread, start_ns, end_ns DESC, depth"):
            threads, records = batch.column("thread").to_pylist(), batch.column("record").to_pylist()
            for thread, number in zip(threads, records, strict=True):
                event = self.host_records[number]
                if gloo is not None and event.name.startswith("gloo:"):
                    gloo.add(event, number)
                else:
                    yield thread, event

    def _tie_input(self) -> Iterator[ties.Kernel]:
        """The communication kernels in the order of the file."""
        nccl = ["nccl" in text or "rccl" in text for text in self.names.texts] + [False]  # code -1: no name
        columns = ["start_ns", "dur_ns", "stream", "external_id", "correlation", "meta", "name"]
        number = itertools.count()
        for batch in self.comm_kernel.batches(columns):
            rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
            for start, dur, stream, external, correlation, meta, name in rows:
                known_stream = ties.NONE if stream is None else stream
                yield ties.Kernel(next(number), start, dur, known_stream, external, correlation, meta, nccl[name])

    def _tied_kernels(self, tied: ties.Calls, found: ties.KernelTies) -> Spool:
        """The communication kernels with what they are tied to."""
        given = [c for c in self.comm_kernel.columns if c != "meta"]
        added = ("coalesce_id", "join_evidence", "completeness", "launch_ns")
        spool = Spool(self.work / "tied_kernel.parquet", (*given, *added), frozenset({"external_id", "correlation"}))
        evidence = np.array([-1 if e is None else self.evidence[e] for e in ties.EVIDENCE])
        completeness = np.array([self.completeness[c] for c in ties.COMPLETENESS])
        coalesced = tied.coalesced(np.array(found.joint))
        launch = np.array(found.launch_ns)
        at = 0
        for batch in self.comm_kernel.batches(given):
            here = slice(at, at := at + batch.num_rows)
            values = dict(zip(given, batch.columns, strict=True))
            values["coalesce_id"] = pa.array(coalesced[here], mask=coalesced[here] < 0)
            values["join_evidence"] = evidence[np.frombuffer(found.evidence, np.uint8)[here]]
            values["completeness"] = completeness[np.frombuffer(found.completeness, np.uint8)[here]]
            values["launch_ns"] = pa.array(launch[here] + self.base_ns, mask=launch[here] == ties.NONE)
            spool.append(batch.num_rows, values)
        spool.close()
        return spool

    def _launches(self, wanted: npt.NDArray[np.uint64]) -> Callable[[int], ties.Launch | None]:
        """Finds the runtime call that launched a communication kernel; ``wanted``: their correlation ids, ordered."""
        thread, start = np.full(len(wanted), -1), np.zeros(len(wanted), np.int64)
        for batch in self.cpu_op.batches(["correlation", "pid", "tid", "start_ns"]) if len(wanted) else ():
            correlation = batch.column(0)
            known = correlation.is_valid().to_numpy(zero_copy_only=False)
            values = correlation.fill_null(0).to_numpy()
            place = np.minimum(np.searchsorted(wanted, values), len(wanted) - 1)
            for i in np.flatnonzero(known & (wanted[place] == values)):
                if thread[place[i]] < 0:
                    thread[place[i]] = self._thread(batch.column(1)[i].as_py(), batch.column(2)[i].as_py())
                    start[place[i]] = batch.column(3)[i].as_py()

        def find(correlation: int) -> ties.Launch | None:
            at = int(np.searchsorted(wanted, np.uint64(correlation)))
            return ties.Launch(int(thread[at]), int(start[at])) if thread[at] >= 0 else None

        return find

    def _ancestors(self, tied: ties.Calls) -> Iterator[tuple[int, int, int, str]]:
        """Host ranges that enclose the start of a call, of the names that say something about the place of a call."""
        eligible = np.array([calls.names_a_place(t) for t in self.names.texts] + [False], bool)  # code -1: no name
        if not len(tied) or not eligible.any():
            return
        start, thread = np.array(tied.start), np.array(tied.thread)
        points = {key: np.sort(start[thread == number]) for key, number in self.threads.items()}
        around = Spool(self.work / "around.parquet", ("start_ns", "end_ns", "thread", "name"))
        for spool in (self.cpu_op, self.span):
            for batch in spool.batches(["name", "pid", "tid", "start_ns", "dur_ns"]):
                name = batch.column(0).to_numpy()
                pid = batch.column(1).fill_null(-1).to_numpy()
                tid = batch.column(2).fill_null(-1).to_numpy()
                start = batch.column(3).to_numpy()
                end = start + batch.column(4).to_numpy()
                usable = eligible[name]
                for (p, t), at in points.items():
                    mine = usable & (pid == (-1 if p is None else p)) & (tid == (-1 if t is None else t))
                    index = np.flatnonzero(mine)
                    index = index[np.searchsorted(at, start[index]) < np.searchsorted(at, end[index])]
                    if len(index):
                        number = np.full(len(index), self.threads[p, t])
                        values = {"start_ns": start[index], "end_ns": end[index], "thread": number, "name": name[index]}
                        around.append(len(index), values)
        around.close()
        try:
            for batch in in_order([around], self.work, "thread, start_ns, end_ns DESC"):
                columns = (batch.column(c).to_pylist() for c in ("thread", "start_ns", "end_ns", "name"))
                for thread_number, start_ns, end_ns, code in zip(*columns, strict=True):
                    yield thread_number, start_ns, end_ns, self.names.texts[code]
        finally:  # ranges behind the last call are not asked for
            around.remove()

    def _refuse_two_processes(self) -> None:
        """A file into which two processes' events were merged: ids repeat, so nothing in it can be tied soundly."""
        launch_names = np.array(["Launch" in t for t in self.names.texts] + [False], bool)
        launched = [
            batch.column(0).filter(pa.array(launch_names[batch.column(1).to_numpy()])).drop_null().to_numpy().copy()
            for batch in self.cpu_op.batches(["correlation", "name"])
        ]
        twice = _repeated(launched)
        if len(twice) == 0:
            return
        worked = [
            batch.column(0).drop_null().to_numpy()
            for spool in (self.kernel, self.comm_kernel)
            for batch in spool.batches(["correlation"])
        ]
        both = np.intersect1d(twice, _repeated(worked))
        if len(both) == 0:
            return
        shown = ", ".join(str(int(c)) for c in both[:5])
        labels = "; ".join(f"pid {p} is labelled {', '.join(sorted(v))}" for p, v in self.labels.items() if len(v) > 1)
        raise InputError(
            f"{self.path.name}: more than one process's events under the same ids: {len(both)} correlation ids have two "
            f"launches and two kernels (ids {shown})"
            + (f"; {labels}" if labels else "")
            + ". Give one file for each rank."
        )

    def _issues(self, rank: int | None, rank_source: str | None) -> list[dict[str, Any]]:
        counts = self.stream.counts
        found: list[dict[str, Any]] = []

        def add(severity: str, code: str, sentence: str, n: int, location: str | None = None) -> None:
            found.append(issue(severity, code, sentence, n, location))

        if counts["cut"]:
            why = f" ({self.stream.read_error})" if self.stream.read_error else ""
            add(
                "data_loss",
                "file_cut",
                f"The file ends early{why}: every whole event before the cut is kept, what came after is unknown. Nothing "
                "worked out from this rank's last step can be compared as if it were whole.",
                1,
                None if self.stream.cut_at is None else f"after byte {self.stream.cut_at} of the text",
            )
        for (side, reason), reject in sorted(self.rejects.items()):
            add(
                "data_loss" if side == "device" else "warning",
                f"rejected_{side}_{reason}",
                f"{reject.count} {side} event{'s' if reject.count > 1 else ''} left out: {REJECT_REASONS[reason]}.",
                reject.count,
                "; ".join(reject.names),
            )
        if counts["bad_events"]:
            add(
                "data_loss",
                "bad_event",
                "Events whose text is beyond repair were left out.",
                counts["bad_events"],
                " | ".join(self.stream.bad_samples),
            )
        if counts["repaired_strings"] or self.counts["control_names"]:
            add(
                "info",
                "repaired_string",
                "Text with invalid escapes, control characters, bare quotes or bytes that are not UTF-8 was repaired; "
                "times and sizes are untouched.",
                counts["repaired_strings"] + self.counts["control_names"],
            )
        if counts["missing_values"]:
            add(
                "warning",
                "missing_value",
                "inf and nan are not numbers: those values are null.",
                counts["missing_values"],
            )
        if self.counts["unusable_values"]:
            add(
                "warning",
                "unusable_value",
                "Sizes of calls or groups that cannot be sizes (negative, fractional, a group of no rank): those values are "
                "null, and the bytes of those calls are unknown.",
                self.counts["unusable_values"],
            )
        if counts["odd_fields"]:
            add("warning", "odd_field", "Fields of an unexpected type are null.", counts["odd_fields"])
        for what in ("head", "tail"):
            if counts[f"{what}_lost"]:
                add(
                    "data_loss",
                    f"{what}_lost",
                    f"The metadata {'before' if what == 'head' else 'after'} the events is damaged beyond repair.",
                    1,
                )
        if self.counts["flow_events"]:
            add(
                "info",
                "flow_events_not_stored",
                "Flow arrows are not stored: correlation ids hold the same links.",
                self.counts["flow_events"],
            )
        if self.counts["counter_events"]:
            add("info", "counter_events_not_stored", "Counter events are not stored.", self.counts["counter_events"])
        if self.counts["other_phases"]:
            add(
                "warning",
                "other_phases_not_stored",
                "Events of other phases (begin/end pairs, async) are not stored: Kineto does not write them.",
                self.counts["other_phases"],
            )
        ends = [high for _, high in self.window.values()]
        if self.base_ns == 0 and ends and max(ends) < _EARLIEST_UNIX_NS:
            add(
                "warning",
                "base_time_unknown",
                "The times are no unix times and the file does not say what they count from (baseTimeNanoseconds): "
                "durations and gaps are right, but times of other ranks cannot be compared with these.",
                1,
            )
        if rank_source == "file name":
            add(
                "info",
                "rank_from_file_name",
                "The file does not state its rank: it was taken from the file's name.",
                1,
                self.path.name,
            )
        if rank is None:
            add(
                "warning",
                "rank_not_recorded",
                "Neither the file (distributedInfo) nor its name states a rank: it stays unknown. Give --rank N to name it.",
                1,
                self.path.name,
            )
        return found

    def _final(self, spools: Sequence[Spool], constant: dict[str, Any]) -> Iterator[pa.Table]:
        """Sorted rows with text for codes, absolute times and the constant columns."""
        texts = {
            "name": self.names,
            "category": self.categories,
            "in_dims": self.dims,
            "kernel_class": self.classes,
            "kernel_op": self.ops,
            "join_evidence": self.evidence,
            "completeness": self.completeness,
        }
        for batch in in_order(spools, self.work):
            columns: dict[str, Any] = {}
            for name in batch.schema.names:
                column = batch.column(name)
                if name in texts:
                    columns[name] = texts[name].decode(column.fill_null(-1).to_numpy().astype(np.int64))
                elif name == "start_ns":
                    columns[name] = pa.array(column.to_numpy() + self.base_ns)
                else:
                    columns[name] = column
            yield _with_constants(pa.table(columns), constant)


_NO_ARGS = Args()
_NO_IDS = np.array([], np.uint64)


class _Asked(dict[Any, Any]):
    """What a function says of each key, asked once."""

    def __init__(self, ask: Callable[[Any], Any]) -> None:
        super().__init__()
        self._ask = ask

    def __missing__(self, key: object) -> Any:
        found = self[key] = self._ask(key)
        return found


def _concerns_communication(name: object) -> bool:
    return isinstance(name, str) and name.startswith(_COMM_HOST) and not calls.names_a_place(name)


def _chunks(kind: str, rows: Iterable[dict[str, Any]], constant: dict[str, Any]) -> Iterator[pa.Table]:
    """Rows as tables of a bounded number of rows: a row as a dict takes a kilobyte."""
    left = iter(rows)
    while chunk := list(itertools.islice(left, 8192)):
        yield table_of(kind, [{**constant, **row} for row in chunk])


def _with_constants(table: pa.Table, constant: dict[str, Any]) -> pa.Table:
    for name, value in constant.items():
        dtype = schema.BY_NAME[name].dtype
        n = table.num_rows
        if value is None:
            column: pa.Array = pa.nulls(n, dtype)
        elif pa.types.is_dictionary(dtype):
            column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int32)), pa.array([value]))
        else:
            column = pa.repeat(pa.scalar(value, dtype), n)
        table = table.append_column(name, column)
    return table


def _nanoseconds(us: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Microseconds as written (three decimals) to whole ns: exact while |us| < 2**43 or us is whole."""
    whole = np.floor(us)
    return whole.astype(np.int64) * 1000 + np.rint((us - whole) * 1000).astype(np.int64)


def _exact_ns(us: Decimal | float | int | None) -> int:
    if us is None:
        return 0
    return int((Decimal(us) * 1000).to_integral_value())


def _stream_of(tid: object) -> int | None:
    if isinstance(tid, str) and tid.startswith("stream "):
        return whole_number(tid.removeprefix("stream "))
    return whole_number(tid)


def _integers(values: list[Any], dtype: pa.DataType) -> pa.Array:
    """Whole numbers as an array; text that is no number, and what the type cannot hold, become null."""
    try:
        return pa.array(values, dtype)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, TypeError):
        low, high = (0, 2**64 - 1) if dtype == pa.uint64() else (-(2**63), 2**63 - 1)
        whole = (whole_number(v) for v in values)
        return pa.array([v if v is not None and low <= v <= high else None for v in whole], dtype)


def _repeated(parts: list[npt.NDArray[np.uint64]]) -> npt.NDArray[np.uint64]:
    """The values that occur more than once, without 0 (an id that means none)."""
    ordered = np.concatenate([_NO_IDS, *parts])
    ordered.sort()
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    return np.unique(again[again != 0])


def trace_files(paths: Iterable[Path]) -> list[Path]:
    """The trace files among files and folders: .json, .json.gz, and the .tmp a killed profiler leaves; sorted by name."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(
                p for p in path.rglob("*") if p.is_file() and p.name.endswith((".json", ".json.gz", ".json.tmp"))
            )
            if not inside:
                raise InputError(f"{path}: no .json or .json.gz file in this folder. Name the folder of the traces.")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise InputError(f"{path}: no such file or folder. Check the path.")
    return list(dict.fromkeys(found))
