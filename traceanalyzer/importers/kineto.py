"""Reads one Kineto (torch.profiler) trace into rows of the run table.

Two passes. The first streams the file: every event becomes a spooled row or a counted reject; what concerns
communication is kept aside. The second ties kernels to calls (calls.py) and writes the rows in order. Formats read: every
key profile from December 2020 to April 2026 (reference: trace_event_shapes and the traces' README).
"""

from __future__ import annotations

import gc
import itertools
import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traceanalyzer import kernel_names, schema, traffic
from traceanalyzer.errors import InputError
from traceanalyzer.importers import calls
from traceanalyzer.importers.json_stream import AnyEvent, Args, EventStream, ExactEvent, whole_number
from traceanalyzer.importers.source import TraceText
from traceanalyzer.importers.spool import Intern, RunWriter, Spool, table_of

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
    try:
        reader.read(progress)
        return reader.write(part, told_rank)
    except InputError as error:
        return Summary(path.name, str(path), "refused", reason=str(error))
    finally:
        if collecting:
            gc.enable()


class _Reader:
    def __init__(self, path: Path, work: Path) -> None:
        self.path = path
        self.work = work
        self.names = Intern(self._clean)
        self.categories = Intern()
        self.dims = Intern()
        self.classes = Intern()
        self.ops = Intern()
        self.meta: dict[str, Any] = {}
        self.rejects: dict[tuple[str, str], Reject] = {}
        self.counts: Counter[str] = Counter()
        self.labels: dict[str, set[str]] = {}
        self.host_comm: list[calls.HostEvent] = []
        self.shared: dict[str, str] = {}
        """Texts of communication records, each kept once: these records stay in memory until the file is read."""
        self.comm_kernels: list[calls.CommKernel] = []
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
        self.kernel = Spool(
            work / "kernel.parquet",
            (
                *timed,
                "device",
                "stream",
                "correlation",
                "external_id",
                "kernel_class",
                "kernel_op",
                "copy_bytes",
                "graph_id",
            ),
            u64,
        )

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
        for spool in (self.cpu_op, self.span, self.kernel):
            spool.close()
        base = whole_number(self.meta.get("baseTimeNanoseconds"))
        if base is not None and 0 <= base <= _LARGEST_US * 1000:
            self.base_ns = base

    def _take(self, events: list[AnyEvent]) -> None:
        groups: dict[str | None, list[AnyEvent]] = {}
        for event in events:
            ph = event.ph
            if ph == "X":
                groups.setdefault(event.cat, []).append(event)
            elif ph in ("i", "I", "R"):
                groups.setdefault("\x00instant", []).append(event)
            elif ph == "M":
                self._metadata(event)
            elif ph is not None and ph in _FLOWS:
                self.counts["flow_events"] += 1
            elif ph == "C":
                self.counts["counter_events"] += 1
            else:
                self.counts["other_phases"] += 1
        for raw_category, group in groups.items():
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
            values["in_dims"] = np.fromiter((self.dims[_text(a.dims) or _text(a.dims_old)] for a in args), np.int64, n)
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
        if isinstance(group[0], ExactEvent) or any(isinstance(e, ExactEvent) for e in group):
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
        if any(isinstance(t, Decimal) for t in starts):
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
        classes = [kernel_names.classify(str(name)) for name in names]
        comm = [i for i in range(n) if classes[i].kernel_class == "comm" or args[i].cname is not None]
        if comm:
            for i in comm:
                op = traffic.normalise_op(args[i].cname) if args[i].cname is not None else classes[i].op
                self.comm_kernels.append(
                    calls.CommKernel(
                        name=self._once(str(names[i])),
                        start_ns=int(values["start_ns"][i]),
                        dur_ns=int(values["dur_ns"][i]),
                        device=values["device"][i].as_py(),
                        stream=values["stream"][i].as_py(),
                        correlation=values["correlation"][i].as_py(),
                        external_id=values["external_id"][i].as_py(),
                        graph_id=values["graph_id"][i].as_py(),
                        op=op,
                        meta=calls.Metadata.of(args[i], self._once),
                    )
                )
            rest = np.ones(n, bool)
            rest[comm] = False
            if not rest.any():
                return
            n = int(rest.sum())
            values = {k: v.filter(pa.array(rest)) if isinstance(v, pa.Array) else v[rest] for k, v in values.items()}
            classes = [c for c, r in zip(classes, rest, strict=True) if r]
        values["kernel_class"] = np.fromiter((self.classes[c.kernel_class] for c in classes), np.int64, n)
        self.kernel.append(n, values)

    def _host_comm(
        self, group: list[AnyEvent], start: npt.NDArray[np.int64], dur: npt.NDArray[np.int64], names: list[Any]
    ) -> None:
        for i, name in enumerate(names):
            if type(name) is str and name.startswith(_COMM_HOST) and not calls.names_a_place(name):
                event = group[i]
                self.host_comm.append(
                    calls.HostEvent.of(
                        self._once(name),
                        event.args or _NO_ARGS,
                        whole_number(event.pid),
                        whole_number(event.tid),
                        int(start[i]),
                        int(dur[i]),
                        self._once,
                    )
                )

    def _once(self, text: str) -> str:
        return self.shared.setdefault(text, text)

    # second pass -------------------------------------------------------------------------------------------------

    def write(self, part: Path, told_rank: int | None) -> Summary:
        """Ties, sorts and writes; gives the summary."""
        info = self.meta.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        usable = self.cpu_op.rows + self.span.rows + self.kernel.rows + len(self.comm_kernels)
        if usable == 0 and not self.rejects and not self.stream.counts["cut"]:
            raise InputError(
                f"{self.path.name} holds {self.stream.counts['events']} events but no complete one (phase X): it is not a "
                "Kineto trace. Give a file written by torch.profiler."
            )
        self._refuse_two_processes()
        rank, rank_source = self._rank(info, told_rank)
        world = whole_number(info.get("world_size"))
        issues = self._issues(rank, rank_source)
        launches = self._launches()
        tied = calls.tie(
            self.host_comm,
            self.comm_kernels,
            launches=launches,
            ancestors=self._ancestors(),
            any_launch=any("Launch" in t for t in self.names.texts),
        )
        pid = self._pid()
        self.host_comm.clear()
        groups, group_issues = calls.groups(info, tied, rank=rank, world_size=world)
        issues += group_issues + tied.issues
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
        kept = self.cpu_op.rows + self.span.rows + self.kernel.rows + len(self.comm_kernels) + len(tied.calls)
        rank_row["rows_kept"] = kept + len(groups)
        with RunWriter(part, metadata) as writer:
            constant = {"rank": rank, "source": SOURCE}
            writer.write("comm_record", _chunks("comm_record", tied.call_rows(base, rank, groups), constant))
            writer.write("cpu_op", self._final(self.cpu_op, constant))
            writer.write(
                "issue", [table_of("issue", [{**constant, "source_file": self.path.name, **i} for i in issues])]
            )
            writer.write("kernel", self._kernel_batches(tied, constant))
            writer.write("process_group", [table_of("process_group", [{**constant, **g} for g in groups])])
            writer.write("rank", [table_of("rank", [rank_row])])
            writer.write("span", self._final(self.span, constant))
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
        pids = Counter(e.pid for e in self.host_comm if e.pid is not None)
        if pids:
            return pids.most_common(1)[0][0]
        for spool in (self.cpu_op, self.span):
            for batch in spool.batches(["pid"]):
                found = batch.column(0).drop_null()
                if len(found):
                    return int(found[0].as_py())
        return None

    def _device(self) -> int | None:
        for batch in self.kernel.batches(["device"]):
            values = batch.column(0).drop_null()
            if len(values):
                return int(values[0].as_py())
        return next((k.device for k in self.comm_kernels if k.device is not None), None)

    def _device_name(self) -> str | None:
        properties = self.meta.get("deviceProperties")
        device = self._device()
        if isinstance(properties, list) and device is not None:
            for entry in properties:
                if isinstance(entry, dict) and entry.get("id") == device:
                    return str(entry.get("name")) if entry.get("name") is not None else None
        return None

    def _launches(self) -> dict[int, calls.Launch]:
        """Correlation -> the runtime call that launched a communication kernel."""
        wanted = np.array(
            sorted({k.correlation for k in self.comm_kernels if k.correlation is not None}), dtype=np.uint64
        )
        found: dict[int, calls.Launch] = {}
        if len(wanted) == 0:
            return found
        for batch in self.cpu_op.batches(["correlation", "pid", "tid", "start_ns"]):
            correlation = batch.column(0)
            known = correlation.is_valid().to_numpy(zero_copy_only=False)
            values = correlation.fill_null(0).to_numpy()
            hit = np.flatnonzero(known & np.isin(values, wanted))
            for i in hit:
                found.setdefault(
                    int(values[i]),
                    calls.Launch(batch.column(1)[i].as_py(), batch.column(2)[i].as_py(), batch.column(3)[i].as_py()),
                )
        return found

    def _ancestors(self) -> list[calls.Range]:
        """Host ranges that enclose the start of a call, of the names that say something about the place of a call."""
        starts: dict[tuple[int | None, int | None], list[int]] = {}
        for event in self.host_comm:
            starts.setdefault((event.pid, event.tid), []).append(event.start_ns)
        points = {k: np.array(sorted(v), np.int64) for k, v in starts.items()}
        eligible = np.array([calls.names_a_place(t) for t in self.names.texts] + [False], bool)  # code -1: no name
        found: list[calls.Range] = []
        if not points or not eligible.any():
            return found
        for spool in (self.cpu_op, self.span):
            for batch in spool.batches(["name", "pid", "tid", "start_ns", "dur_ns"]):
                name = batch.column(0).to_numpy()
                pid = batch.column(1).fill_null(-1).to_numpy()
                tid = batch.column(2).fill_null(-1).to_numpy()
                start = batch.column(3).to_numpy()
                end = start + batch.column(4).to_numpy()
                usable = eligible[name]
                for (p, t), at in points.items():
                    index = np.flatnonzero(
                        usable & (pid == (-1 if p is None else p)) & (tid == (-1 if t is None else t))
                    )
                    if len(index) == 0:
                        continue
                    inside = np.searchsorted(at, start[index], "left") < np.searchsorted(at, end[index], "left")
                    for i in index[inside]:
                        found.append(calls.Range(p, t, int(start[i]), int(end[i]), self.names.texts[int(name[i])]))
        return found

    def _refuse_two_processes(self) -> None:
        """A file into which two processes' events were merged: ids repeat, so nothing in it can be tied soundly."""
        launch_names = np.array(["Launch" in t for t in self.names.texts] + [False], bool)
        launched = [
            batch.column(0).filter(pa.array(launch_names[batch.column(1).to_numpy()])).drop_null().to_numpy()
            for batch in self.cpu_op.batches(["correlation", "name"])
        ]
        twice = _repeated(np.concatenate(launched)) if launched else np.array([], np.uint64)
        if len(twice) == 0:
            return
        worked = [b.column(0).drop_null().to_numpy() for b in self.kernel.batches(["correlation"])]
        worked.append(np.array([k.correlation for k in self.comm_kernels if k.correlation is not None], np.uint64))
        both = np.intersect1d(twice, _repeated(np.concatenate(worked)))
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
            found.append(
                {"severity": severity, "code": code, "sentence": sentence, "occurrences": n, "location": location}
            )

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
                f"The file does not state its rank; {rank} was taken from its name.",
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

    def _final(self, spool: Spool, constant: dict[str, Any]) -> Iterator[pa.Table]:
        """Sorted rows with text for codes, absolute times and the constant columns."""
        texts = {
            "name": self.names,
            "category": self.categories,
            "in_dims": self.dims,
            "kernel_class": self.classes,
            "kernel_op": self.ops,
        }
        for batch in spool.sorted(self.work):
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

    def _kernel_batches(self, tied: calls.Tied, constant: dict[str, Any]) -> Iterator[pa.Table]:
        """Compute kernels and copies from the spool, merged in time order with the tied communication kernels."""
        comm = sorted(tied.kernels, key=lambda k: (k.start_ns, k.stream or 0))
        starts = [k.start_ns + self.base_ns for k in comm]
        at = 0
        for table in self._final(self.kernel, constant):
            upto = bisect_right(starts, table.column("start_ns")[-1].as_py(), at)
            if upto == at:
                yield table
                continue
            ours = table_of("kernel", [{**constant, **calls.kernel_row(k, self.base_ns)} for k in comm[at:upto]])
            merged = pa.concat_tables([table, ours], promote_options="permissive").unify_dictionaries()
            yield merged.sort_by("start_ns")
            at = upto
        yield from _chunks("kernel", (calls.kernel_row(k, self.base_ns) for k in comm[at:]), constant)


_NO_ARGS = Args()


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


def _text(raw: msgspec.Raw) -> str | None:
    text = bytes(raw)
    return text.decode("utf-8", "replace") if text else None


def _repeated(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The values that occur more than once, without 0 (an id that means none)."""
    ordered = np.sort(values)
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
