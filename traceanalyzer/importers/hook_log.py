"""Reads the log of a collector (traceanalyzer.collectors.record) into rows of the run table.

One pass over the frames of a log: calls leave as tables of 65,536 rows, everything else is small and waits for its
place in the file. Sends and receives state their message on both sides (in_elems = out_elems), as in traces. What is
missing from the log (a torn tail, dropped records, errors of the collector) is an issue with its count, and a step in
which calls are missing is marked ``cut``.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traceanalyzer import schema, traffic
from traceanalyzer.collectors import record
from traceanalyzer.errors import InputError
from traceanalyzer.importers.calls import POINT_TO_POINT, ROOTED
from traceanalyzer.importers.kineto import Summary
from traceanalyzer.importers.spool import Intern, RunWriter, issue, table_of

SOURCE = "hook"
NOT_PROFILED = "not_profiled"

_RANK_IN_NAME = re.compile(r"^r(\d+)-")
_CHUNK = 65_536
_SAFE = -(2**63)
_EVEN_SPLIT_METHODS = ("alltoall_base", "all_to_all_single", "all_to_all_v_single")
"""Methods for which no split lists mean equal parts; others hand over lists of tensors."""

PLACE = ("microbatch", "chunk", "layer", "phase", "component")
"""What a place record says, as recorded_* columns."""


@dataclass
class LogSummary(Summary):
    """What one log gave: as of any imported file, and what a run folder needs to put logs together.

    started_ns, restart, world_size: of the process. last_call: highest number of a call, -1 without calls. job: what
    the job says of itself. windows: of the profiler. ended: whether the process closed its log.
    """

    source: str = SOURCE
    started_ns: int | None = None
    restart: int | None = None
    world_size: int | None = None
    last_call: int = -1
    calls: int = 0
    steps: tuple[int, int] | None = None
    job: dict[str, Any] | None = None
    windows: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False


def is_log(path: Path) -> bool:
    """Whether a file begins as a collector's log does, of whatever version."""
    with path.open("rb") as file:
        return file.read(len(record.MAGIC))[:-1] == record.MAGIC[:-1]


def import_file(
    path: Path,
    part: Path,
    *,
    told_rank: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> LogSummary:
    """Imports one log into the Parquet file ``part``.

    ``told_rank`` is used where neither the log nor its name states a rank; ``progress`` is called with the bytes of the
    file once it is read. Damage becomes rows of kind ``issue``. Gives a summary of status ``refused``, and no file, for
    a log that cannot be read at all: no log, or of a newer layout. Raises OSError if it cannot be opened.
    """
    reader = _Reader(path)
    try:
        found = reader.write(part, told_rank)
    except (ValueError, InputError) as error:
        return LogSummary(path.name, str(path), "refused", reason=str(error))
    if progress is not None:
        progress(path.stat().st_size)
    return found


class _Reader:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.run: dict[str, Any] = {}
        self.groups: list[dict[str, Any]] = []
        self.group_at: dict[Any, int] = {}
        self.places: list[tuple[Any, ...]] = [(None,) * len(PLACE)]
        self.place_at: dict[Any, int] = {}
        self.blocks: dict[int, int] = {}
        """Block of coalesced calls -> number of its first call."""
        self.numbers: list[npt.NDArray[np.int64]] = []
        self.steps: list[npt.NDArray[np.int64]] = []
        self.spans: list[list[Any]] = []
        self.experts_at: dict[Any, dict[str, Any]] = {}
        self.expert_rows: list[dict[str, Any]] = []
        self.metrics: list[list[Any]] = []
        self.windows: list[dict[str, Any]] = []
        self.open_windows: dict[Any, dict[str, Any]] = {}
        self.job: dict[str, Any] = {}
        self.end: dict[str, Any] | None = None
        self.said: Counter[tuple[str, str, str]] = Counter()
        self.counts: Counter[str] = Counter()
        self.samples: dict[str, str] = {}
        self.base = 0
        """Added to the numbers of calls: those that an earlier recording of the same process used up."""
        self.torn: str | None = None
        self.first_ns: int | None = None
        self.last_ns: int | None = None

    # frames ------------------------------------------------------------------------------------------------------

    def _frames(self) -> Iterator[list[Any]]:
        frames = record.frames(self.path, _decoded)
        while True:
            try:
                part = next(frames, None)
            except (zlib.error, json.JSONDecodeError, UnicodeDecodeError) as error:
                # its checksum is right: it was written so, and the frame before it was whole
                self.torn = f"0 bytes, a frame that cannot be read ({error})"
                return
            if part is None:
                return
            if isinstance(part, str):
                self.torn = part
                return
            if isinstance(part, list):
                yield part

    def _rank(self, told: int | None) -> tuple[int | None, str | None]:
        """The rank, from the first record that states it, the file's name, or as told."""
        for frame in self._frames():
            for item in frame:
                if isinstance(item, list) and len(item) > 1 and item[0] == "run" and isinstance(item[1], dict):
                    rank = _whole(item[1].get("rank"))
                    if rank is not None and rank >= 0:
                        return rank, "header"
        named = _RANK_IN_NAME.match(self.path.name)
        if named is not None:
            return int(named[1]), "file name"
        return (told, "told") if told is not None else (None, None)

    def _calls(self) -> Iterator[pa.Table]:
        """The calls, table by table; every other record is kept for later."""
        waiting: list[list[Any]] = []
        for frame in self._frames():
            self.counts["records"] += len(frame)
            for item in frame:
                if not isinstance(item, list) or not item:
                    self._odd("record", item)
                elif item[0] == "call":
                    waiting.append(item)
                elif item[0] == "run" and self.end is not None:
                    if waiting:
                        yield self._table(waiting)
                        waiting = []
                    self._again()
                    self._take(item)
                else:
                    self._take(item)
            # a frame names groups and places before the calls that use them
            if len(waiting) >= _CHUNK:
                yield self._table(waiting)
                waiting = []
        if waiting:
            yield self._table(waiting)

    def _again(self) -> None:
        """Begins anew in a process that had closed its log: numbers of calls, groups and places start over."""
        self.counts["reopened"] += 1
        self.base = max((int(n.max()) for n in self.numbers if len(n)), default=-1) + 1
        self.end = None
        for numbered in (self.group_at, self.place_at, self.blocks, self.experts_at):
            numbered.clear()

    def _odd(self, what: str, item: object) -> None:
        self.counts["odd"] += 1
        self.samples.setdefault(what, f"{what}: {str(item)[:80]}")

    def _take(self, item: list[Any]) -> None:
        kind, values = item[0], item[1:]
        if kind == "group" and len(values) == 2 and isinstance(values[1], dict):
            self._group(values[0], values[1])
        elif kind == "place" and len(values) == 2 and isinstance(values[1], dict):
            self.place_at[values[0]] = len(self.places)
            self.places.append(tuple(values[1].get(name) for name in PLACE))
        elif kind == "span" and len(values) >= 7:
            self.spans.append(values)
        elif kind == "experts" and len(values) == 2 and isinstance(values[1], dict):
            self.experts_at[values[0]] = values[1]
        elif kind == "rows" and len(values) >= 5 and _counts(values[4]) is not None:
            self._expert_rows(*values[:5])
        elif kind == "metric" and len(values) >= 4:
            self.metrics.append(values)
        elif kind in ("run", "job", "end", "window") and values and isinstance(values[0], dict):
            if kind == "run":
                self.run.update({k: v for k, v in values[0].items() if v is not None})
            elif kind == "job":
                # more is known when the model is built, and less again once the groups are destroyed
                if _arguments(values[0]) >= _arguments(self.job):
                    self.job = values[0]
            elif kind == "window" and values[0].get("state") == "open":
                self.open_windows[values[0].get("step_from")] = values[0]
            elif kind == "window":
                self.open_windows.pop(values[0].get("step_from"), None)
                self.windows.append(values[0])
                name = Path(str(values[0].get("file") or "")).name or None
                self.spans.append(["window", name, values[0].get("start_ns"), values[0].get("end_ns"), None, None, 0])
            else:
                self.end = values[0]
        elif kind == "issue" and len(values) >= 4:
            severity = values[0] if values[0] in schema.SEVERITIES else "warning"
            self.said[severity, str(values[1]), str(values[2])] += _whole(values[3]) or 1
        elif type(kind) is int:  # a call in short, the form of which is not there
            self._odd("call", item)
        elif kind in (*("group", "place", "span", "metric", "run", "job", "end", "window", "issue"), "experts", "rows"):
            self._odd(str(kind), item)
        else:
            self.counts["unknown"] += 1
            self.samples.setdefault("unknown", str(kind)[:40])

    def _group(self, number: Any, said: Mapping[str, Any]) -> None:
        name = None if said.get("name") in (None, "") else str(said["name"])
        ranks = said.get("ranks")
        listed: list[int] | None = None
        if isinstance(ranks, list) and ranks:
            listed = [r for r in map(_whole, ranks) if r is not None]
            listed = listed if len(listed) == len(ranks) else None
        size = _whole(said.get("size"))
        if listed is not None and size is not None and size != len(listed):
            listed = None
        found = {
            "group_id": name if name is not None else f"unnamed {number}",
            "name": name,
            "description": said.get("description"),
            "backend": said.get("backend"),
            "group_size": size if size is not None else (None if listed is None else len(listed)),
            "group_rank": _whole(said.get("rank")),
            "ranks": listed,
            "ranks_source": None if listed is None else SOURCE,
        }
        if number in self.group_at:  # more is known of it now
            place = self.group_at[number]
            self.groups[place] = {**found, "group_id": self.groups[place]["group_id"]}
            return
        # a name comes again after the groups were destroyed and made anew: the same ranks are the same group
        namesakes = [g for g in self.groups if g["name"] == name and name is not None]
        for other in namesakes:
            if (other["ranks"], other["group_size"]) == (found["ranks"], found["group_size"]):
                self.group_at[number] = self.groups.index(other)
                return
        if namesakes:
            found["group_id"] = f"{name}#{len(namesakes) + 1}"
            self.counts["renamed"] += 1
        self.group_at[number] = len(self.groups)
        self.groups.append(found)

    def _expert_rows(self, number: Any, at_ns: Any, step: Any, place: Any, counts: Any) -> None:
        """One call of the local experts, as a row without its rank."""
        said = self.experts_at.get(number)
        if said is None:
            self.counts["expertless"] += 1
            said = {}
        if place and place not in self.place_at:
            self.counts["placeless"] += 1
        at = self.places[self.place_at.get(place, 0)]
        found = {
            f"recorded_{key}": None if value is None else str(value) if key in ("phase", "component") else _whole(value)
            for key, value in zip(PLACE, at, strict=True)
        }
        name = said.get("dispatcher")
        self.expert_rows.append(
            {
                "source": SOURCE,
                "start_ns": _whole(at_ns),
                "name": None if name is None else str(name),
                "recorded_step": _whole(step),
                **found,
                "ranks": _counts(said.get("ranks")),
                "local_expert_rows": _counts(counts),
                "first_expert": _whole(said.get("first")),
                "expert_tensor_ranks": _whole(said.get("tensor_ranks")),
            }
        )

    # calls ---------------------------------------------------------------------------------------------------------

    def _table(self, items: list[list[Any]]) -> pa.Table:
        width = len(record.CALL) + 1
        if any(len(item) != width for item in items):
            for i, item in enumerate(items):
                if len(item) < width:
                    self._odd("call", item)
                items[i] = [*item[:width], *[None] * (width - len(item))]
        values = dict(zip(("kind", *record.CALL), zip(*items, strict=True), strict=True))
        n = len(items)
        number = self._integers(values["number"])
        numbers = number.fill_null(_SAFE).to_numpy()
        if self.base:
            numbers = np.where(numbers == _SAFE, _SAFE, numbers + self.base)
            number = pa.array(numbers, mask=numbers == _SAFE)
        step = self._integers(values["step"])
        self.numbers.append(numbers)
        self.steps.append(step.fill_null(_SAFE).to_numpy())
        op_codes, ops = _coded(values["op"])
        normal = [traffic.normalise_op(op) for op in ops]
        known = Intern()
        codes_of_normal = np.array([known[op] for op in normal] + [-1], np.int64)
        op = known.decode(codes_of_normal[op_codes])
        pointwise = np.array([name in POINT_TO_POINT for name in normal] + [False], bool)[op_codes]
        rooted = np.array([name in ROOTED for name in normal] + [False], bool)[op_codes]
        in_elems, out_elems = self._integers(values["in_elems"]), self._integers(values["out_elems"])
        in_elems, out_elems = _both_sides(in_elems, out_elems, pointwise)
        group = np.fromiter((self.group_at.get(g, -1) for g in values["group"]), np.int64, n)
        self.counts["groupless"] += int(np.count_nonzero((group < 0) & _given(values["group"])))
        place = np.fromiter((self.place_at.get(p, 0) for p in values["place"]), np.int64, n)
        unsaid = sum(bool(p) and p not in self.place_at for p in values["place"]) if (place == 0).any() else 0
        self.counts["placeless"] += unsaid
        issued, returned = self._integers(values["t_issue_ns"]), self._integers(values["t_issue_end_ns"])
        self._widen(issued, returned)
        dtype_codes, dtypes = _coded(values["dtype"])
        spelled = Intern()
        codes_of_spelled = np.array([spelled[traffic.normalise_dtype(d)] for d in dtypes] + [-1], np.int64)
        columns: dict[str, Any] = {
            "call_id": number,
            "hook_call": pa.nulls(n, pa.int64()) if self.base else number,
            "coalesce_id": self._coalesced(numbers, values["coalesce"]),
            "op": op,
            "op_raw": _dictionary(values["method"]),
            **self._of_groups(group),
            "seq": self._integers(values["seq"]),
            "is_p2p": pa.array(pointwise, mask=op_codes < 0),
            "peer": _where(self._integers(values["peer"]), pointwise, pa.int32()),
            "root": _where(self._integers(values["root"]), rooted, pa.int32()),
            "reduce_op": _dictionary(values["reduce_op"]),
            "dtype": spelled.decode(codes_of_spelled[dtype_codes]),
            "in_elems": in_elems,
            "out_elems": out_elems,
            **self._splits(values, normal, op_codes),
            "is_async": pa.array([v if isinstance(v, bool) else None for v in values["is_async"]], pa.bool_()),
            "t_issue_ns": issued,
            "t_issue_end_ns": returned,
            "tid": self._integers(values["tid"]),
            "completeness": _constant(NOT_PROFILED, n),
            "recorded_step": step,
            **self._of_places(place),
        }
        return pa.table(columns)

    def _integers(self, values: Sequence[Any]) -> pa.Array:
        try:
            return pa.array(values, pa.int64())
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, TypeError):
            whole = [_whole(v) for v in values]
            for value, number in zip(values, whole, strict=True):
                if value is not None and number is None:
                    self._odd("number", value)
            return pa.array(whole, pa.int64())

    def _widen(self, issued: pa.Array, returned: pa.Array) -> None:
        start = issued.drop_null()
        if len(start):
            low, high = start.to_numpy().min(), start.to_numpy().max()
            end = returned.drop_null()
            high = max(high, end.to_numpy().max()) if len(end) else high
            self.first_ns = int(low) if self.first_ns is None else min(self.first_ns, int(low))
            self.last_ns = int(high) if self.last_ns is None else max(self.last_ns, int(high))

    def _coalesced(self, numbers: npt.NDArray[np.int64], blocks: Sequence[Any]) -> pa.Array:
        """The number of the first call that is launched together with each; a call by itself: its own."""
        joint = numbers.copy()
        for i, block in enumerate(blocks):
            if block is not None and isinstance(block, int):
                joint[i] = self.blocks.setdefault(block, int(numbers[i]))
        return pa.array(joint, mask=joint == _SAFE)

    def _of_groups(self, at: npt.NDArray[np.int64]) -> dict[str, Any]:
        unknown = at < 0
        ids = pa.array([g["group_id"] for g in self.groups], pa.string())
        index = pa.array(np.where(unknown, 0, at).astype(np.int32), mask=unknown)
        sizes = pa.array([g["group_size"] for g in self.groups], pa.int32())
        own = pa.array([g["group_rank"] for g in self.groups], pa.int32())
        return {
            "group_id": pa.DictionaryArray.from_arrays(index, ids),
            "group_size": sizes.take(index),
            "group_rank": own.take(index),
        }

    def _of_places(self, at: npt.NDArray[np.int64]) -> dict[str, Any]:
        index = pa.array(at.astype(np.int32))
        columns: dict[str, Any] = {}
        for i, name in enumerate(PLACE):
            said = [place[i] for place in self.places]
            if name in ("phase", "component"):
                column = pa.array([None if v is None else str(v) for v in said], pa.string()).take(index)
                columns[f"recorded_{name}"] = column.dictionary_encode()
            else:
                columns[f"recorded_{name}"] = pa.array([_whole(v) for v in said], pa.int32()).take(index)
        return columns

    def _splits(
        self, values: Mapping[str, Sequence[Any]], ops: Sequence[str | None], op_codes: npt.NDArray[np.int64]
    ) -> dict[str, Any]:
        exchanging = np.array([op == "all_to_all" for op in ops] + [False], bool)[op_codes]
        places = np.flatnonzero(exchanging)
        n = len(op_codes)
        columns: dict[str, Any] = {}
        if len(places) == 0:
            return {
                "in_splits": pa.nulls(n, pa.list_(pa.int64())),
                "out_splits": pa.nulls(n, pa.list_(pa.int64())),
                "splits_known": pa.nulls(n, pa.bool_()),
            }
        given: dict[str, list[Any]] = {}
        for side in ("in_splits", "out_splits"):
            said: list[Any] = [None] * n
            for i in places.tolist():
                said[i] = values[side][i] or None
            try:
                columns[side] = pa.array(said, pa.list_(pa.int64()))
            except (pa.ArrowException, TypeError, OverflowError):
                said = [None if v is None else _split_list(v) for v in said]
                columns[side] = pa.array(said, pa.list_(pa.int64()))
            given[side] = said
        known: list[bool | None] = [None] * n
        for i in places.tolist():
            stated = given["in_splits"][i] is not None, given["out_splits"][i] is not None
            unreadable = (bool(values["in_splits"][i]) != stated[0]) or (bool(values["out_splits"][i]) != stated[1])
            method = str(values["method"][i] or "").removeprefix("c10d::").rstrip("_")
            known[i] = all(stated) or (method in _EVEN_SPLIT_METHODS and not unreadable)
        columns["splits_known"] = pa.array(known, pa.bool_())
        return columns

    # the rest ------------------------------------------------------------------------------------------------------

    def write(self, part: Path, told_rank: int | None) -> LogSummary:
        rank, rank_source = self._rank(told_rank)
        self.torn = None
        temporary: dict[str, str] = {}
        with RunWriter(part, temporary) as writer:
            constant = {"rank": rank, "source": SOURCE, "pid": None}
            writer.write("comm_record", self._with_pid(self._calls(), rank))
            lost, damaged = self._lost()
            spans = self._span_table(rank, damaged)
            metrics = self._metric_table(rank)
            issues = self._issues(rank, rank_source, lost)
            status = self._status(lost)
            calls = sum(map(len, self.numbers))
            kept = calls + len(self.groups) + spans.num_rows + metrics.num_rows + len(self.expert_rows)
            about = {"rank": rank, "source": SOURCE, "source_file": self.path.name}
            routed = sorted(self.expert_rows, key=lambda row: row["start_ns"] or 0)
            writer.write("expert_rows", [table_of("expert_rows", [{"rank": rank, **row} for row in routed])])
            writer.write("issue", [table_of("issue", [{**about, **i} for i in issues])])
            writer.write("metric", [metrics])
            groups = [{"rank": rank, "source": SOURCE, **g} for g in self.groups]
            writer.write("process_group", [table_of("process_group", groups)])
            row = self._rank_row(rank, rank_source, status, kept)
            writer.write("rank", [table_of("rank", [{**constant, **row}])])
            writer.write("span", [spans])
        all_numbers = np.concatenate([np.array([-1]), *self.numbers])
        steps = np.concatenate([np.array([], np.int64), *self.steps])
        steps = steps[steps != _SAFE]
        return LogSummary(
            file=self.path.name,
            path=str(self.path),
            status=status,
            rank=rank,
            rank_source=rank_source,
            part=str(part),
            rows=dict(writer.rows),
            issues=issues,
            window_start_ns=self.first_ns,
            events=self.counts["records"],
            pid=_whole(self.run.get("pid")),
            started_ns=_whole(self.run.get("started_ns")),
            restart=_whole(self.run.get("restart")),
            world_size=_whole(self.run.get("world_size")),
            last_call=int(all_numbers.max()),
            calls=calls,
            steps=(int(steps.min()), int(steps.max())) if len(steps) else None,
            job=self.job or None,
            windows=[*self.windows, *self.open_windows.values()],
            ended=self.end is not None,
        )

    def _with_pid(self, tables: Iterator[pa.Table], rank: int | None) -> Iterator[pa.Table]:
        for table in tables:
            n = table.num_rows
            pid = pa.scalar(_whole(self.run.get("pid")), pa.int64())
            for name, value in (("rank", pa.scalar(rank, pa.int32())), ("pid", pid)):
                table = table.append_column(name, pa.repeat(value, n))
            yield table.append_column("source", _constant(SOURCE, n))

    def _lost(self) -> tuple[int, set[int] | None]:
        """How many calls the log lacks, by their numbers, and the steps they may belong to (None: any of them)."""
        numbers = np.concatenate([np.array([], np.int64), *self.numbers])
        steps = np.concatenate([np.array([], np.int64), *self.steps])
        order = np.argsort(numbers, kind="stable")
        numbers, steps = numbers[order], steps[order]
        usable = numbers >= 0
        numbers, steps = numbers[usable], steps[usable]
        total = _whole((self.end or {}).get("calls"))
        total = None if total is None else total + self.base
        lost, damaged = 0, set[int]()
        before = np.concatenate([[-1], numbers])
        after = np.concatenate([numbers, [total if total is not None else int(before[-1]) + 1]])
        gaps = np.flatnonzero(after - before > 1)
        for i in gaps.tolist():
            lost += int(after[i] - before[i] - 1)
            low = int(steps[i - 1]) if i > 0 and steps[i - 1] != _SAFE else None
            high = int(steps[i]) if i < len(steps) and steps[i] != _SAFE else None
            if low is None and high is None:
                return lost + sum(int(after[j] - before[j] - 1) for j in gaps.tolist() if j > i), None
            first, last = (low if low is not None else high), (high if high is not None else low)
            assert first is not None
            assert last is not None
            damaged.update(range(first, last + 1) if last - first < 1_000_000 else (first, last))
        return lost, damaged

    def _span_table(self, rank: int | None, damaged: set[int] | None) -> pa.Table:
        kind, name, start, end, tid, step, place, *_ = (
            zip(*(s[:7] for s in self.spans), strict=True) if self.spans else ((),) * 7
        )
        n = len(self.spans)
        start_ns, end_ns = self._integers(start), self._integers(end)
        known = start_ns.is_valid().to_numpy(zero_copy_only=False) & end_ns.is_valid().to_numpy(zero_copy_only=False)
        starts, ends = start_ns.fill_null(0).to_numpy(), end_ns.fill_null(0).to_numpy()
        negative = known & (ends < starts)
        self.counts["odd"] += int(negative.sum())
        dur = pa.array(ends - starts, pa.int64(), mask=~known | negative)
        steps = self._integers(step)
        times = Counter(s for k, s in zip(kind, step, strict=True) if k == "step" and s is not None)
        self.counts["step_twice"] = sum(c > 1 for c in times.values())
        whole: list[str | None] = []
        for k, s, ok in zip(kind, step, (known & ~negative).tolist(), strict=True):
            if k != "step":
                whole.append(None)
            else:
                whole.append("full" if ok and damaged is not None and s not in damaged and times[s] == 1 else "cut")
        table = pa.table(
            {
                "start_ns": start_ns,
                "dur_ns": dur,
                "name": _dictionary(name),
                "category": _dictionary(kind),
                "tid": self._integers(tid),
                "recorded_step": steps,
                "completeness": pa.array(whole, pa.string()).dictionary_encode(),
                **self._of_places(np.fromiter((self.place_at.get(p, 0) for p in place), np.int64, n)),
                "rank": pa.repeat(pa.scalar(rank, pa.int32()), n),
                "pid": pa.repeat(pa.scalar(_whole(self.run.get("pid")), pa.int64()), n),
                "source": _constant(SOURCE, n),
            }
        )
        return table.take(pa.array(np.argsort(starts, kind="stable")))

    def _metric_table(self, rank: int | None) -> pa.Table:
        rows = []
        for key, value, unit, step, *_ in self.metrics:
            number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
            number = number if number is not None and math.isfinite(number) else None
            if number is None and value is not None:
                self._odd("metric", [key, value])
            rows.append(
                {
                    "rank": rank,
                    "source": SOURCE,
                    "key": str(key),
                    "value": None if number is None else float(number),
                    "unit": None if unit is None else str(unit),
                    "step": _whole(step),
                }
            )
        return table_of("metric", rows)

    def _status(self, lost: int) -> str:
        if self.torn is not None or self.end is None:
            return "partial"
        if lost or self.counts["odd"] or self._told("dropped") or self._told("errors") or self.end.get("disabled"):
            return "complete with rejects"
        return "complete"

    def _told(self, name: str) -> int:
        return _whole((self.end or {}).get(name)) or 0

    def _rank_row(self, rank: int | None, rank_source: str | None, status: str, kept: int) -> dict[str, Any]:
        run = self.run
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
        versions = {name: str(run[name]) for name in ("python", "torch") if run.get(name) is not None}
        said = self.job.get("versions")
        versions |= {str(k): str(v) for k, v in said.items() if v is not None} if isinstance(said, dict) else {}
        device = self.job.get("device")
        described = device if isinstance(device, dict) else {}
        name = described.get("name") or (device if isinstance(device, str) else None)
        return {
            "rank": rank,
            "rank_source": rank_source,
            "pid": _whole(run.get("pid")),
            "host": None if run.get("host") is None else str(run["host"]),
            "device": _whole(described.get("index")),
            "device_name": None if name is None else str(name),
            "world_size": _whole(run.get("world_size")),
            "window_start_ns": self.first_ns,
            "window_end_ns": self.last_ns,
            "host_start_ns": self.first_ns,
            "source_file": self.path.name,
            "source_sha256": digest.hexdigest(),
            "versions": json.dumps(versions, sort_keys=True),
            "events_read": self.counts["records"],
            "rows_kept": kept,
            "rows_rejected": self.counts["odd"] + self.counts["unknown"],
            "import_status": status,
        }

    def _issues(self, rank: int | None, rank_source: str | None, lost: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []

        def add(severity: str, code: str, sentence: str, n: int, location: str | None = None) -> None:
            found.append(issue(severity, code, sentence, n, location))

        for (severity, code, sentence), n in self.said.items():
            add(severity, code, sentence, n, "said by the collector")
        if self.torn is not None:
            add(
                "data_loss",
                "log_torn",
                "The log ends in a damaged or unfinished piece: everything before it is kept, what came after is unknown.",
                1,
                self.torn,
            )
        if self.end is None:
            add(
                "warning",
                "log_not_ended",
                "The process ended without closing its log (it was killed, or still ran): what it did after the last record "
                "is unknown. Steps are whole up to the last one whose end was recorded.",
                1,
            )
        if lost:
            add(
                "data_loss",
                "calls_lost",
                f"{lost} call{'s are' if lost > 1 else ' is'} missing from the log by number: the steps they may belong to "
                "are not judged.",
                lost,
            )
        if dropped := self._told("dropped"):
            add(
                "data_loss",
                "records_dropped",
                "The collector dropped records, because they came faster than they could be written or the log reached its "
                "largest size.",
                dropped,
            )
        if errors := self._told("errors"):
            add(
                "warning",
                "collector_errors",
                "Errors of the collector itself, which the job did not notice: a call may be recorded in part or not at all.",
                errors,
            )
        if self.end is not None and self.end.get("disabled"):
            add(
                "data_loss",
                "collector_disabled",
                "The collector switched itself off; nothing was recorded afterwards.",
                1,
                str(self.end["disabled"])[:400],
            )
        if self.counts["odd"]:
            add(
                "warning",
                "odd_record",
                "Records with values that cannot be used: those values are null.",
                self.counts["odd"],
                "; ".join(v for k, v in self.samples.items() if k != "unknown")[:400],
            )
        if self.counts["unknown"]:
            add(
                "info",
                "unknown_record",
                "Records of a kind that this program does not know were left out.",
                self.counts["unknown"],
                self.samples["unknown"],
            )
        if self.counts["groupless"]:
            add(
                "data_loss",
                "group_not_recorded",
                "Calls on groups whose own record is missing: their group is unknown.",
                self.counts["groupless"],
            )
        if self.counts["placeless"]:
            add(
                "warning",
                "place_not_recorded",
                "Calls, or calls of experts, at places whose own record is missing: micro-batch, layer, phase and component "
                "are unknown.",
                self.counts["placeless"],
            )
        if self.counts["expertless"]:
            add(
                "warning",
                "experts_not_recorded",
                "Rows of experts whose own record is missing: which experts and ranks they are of is unknown.",
                self.counts["expertless"],
            )
        if self.counts["renamed"]:
            add(
                "info",
                "group_name_reused",
                "A group was made under the name of an earlier one with other ranks: the later one has #2, #3, ... behind "
                "its name.",
                self.counts["renamed"],
            )
        if self.counts["reopened"]:
            add(
                "warning",
                "recorded_again",
                "The process closed its log and recorded again: calls are numbered on, and those of traces are not tied to "
                "them.",
                self.counts["reopened"],
            )
        if self.counts["step_twice"]:
            add(
                "warning",
                "step_twice",
                "Steps whose number occurs twice in one log: they are not judged.",
                self.counts["step_twice"],
            )
        if rank is None:
            add(
                "warning",
                "rank_not_recorded",
                "The log does not state a rank: it stays unknown. Give --rank N to name it.",
                1,
                self.path.name,
            )
        elif rank_source == "file name":
            add(
                "info",
                "rank_from_file_name",
                "The log does not state its rank: it was taken from the file's name.",
                1,
                self.path.name,
            )
        return found


# small helpers ---------------------------------------------------------------------------------------------------------


def _decoded(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:  # NaN and Infinity, which Python writes and JSON does not know
        return json.loads(text)


def _arguments(job: Mapping[str, Any]) -> int:
    """How much a record says of the job."""
    said = job.get("job")
    return len(said) if isinstance(said, dict) else 0


def _whole(value: object) -> int | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else None
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
        return int(value)
    return None


def _coded(values: Sequence[Any]) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Codes of texts (-1 for none), and the texts."""
    seen = Intern()
    codes = np.fromiter((seen[v] for v in values), np.int64, len(values))
    return codes, seen.texts


def _dictionary(values: Sequence[Any]) -> pa.DictionaryArray:
    codes, texts = _coded(values)
    return pa.DictionaryArray.from_arrays(
        pa.array(codes.astype(np.int32), mask=codes < 0), pa.array(texts, pa.string())
    )


def _constant(value: str, n: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int32)), pa.array([value]))


def _given(values: Sequence[Any]) -> npt.NDArray[np.bool_]:
    return np.fromiter((v is not None for v in values), bool, len(values))


def _where(values: pa.Array, keep: npt.NDArray[np.bool_], dtype: pa.DataType) -> pa.Array:
    """The values where ``keep``, null elsewhere and where they are negative."""
    numbers = values.fill_null(-1).to_numpy()
    return pa.array(numbers, mask=~keep | (numbers < 0)).cast(dtype)


def _both_sides(given: pa.Array, got: pa.Array, pointwise: npt.NDArray[np.bool_]) -> tuple[pa.Array, pa.Array]:
    """Elements handed in and got out; a message has its size on both sides."""
    known = given.is_valid().to_numpy(zero_copy_only=False), got.is_valid().to_numpy(zero_copy_only=False)
    a, b = given.fill_null(0).to_numpy(), got.fill_null(0).to_numpy()
    message = np.maximum(a, b)
    some = known[0] | known[1]
    one = pa.array(np.where(pointwise, message, a), mask=~np.where(pointwise, some, known[0]))
    other = pa.array(np.where(pointwise, message, b), mask=~np.where(pointwise, some, known[1]))
    return one, other


def _counts(value: Any) -> list[int] | None:
    """A list of whole numbers that are not negative; None for anything else."""
    if not isinstance(value, list) or not value:
        return None
    whole = [v for v in map(_whole, value) if v is not None and v >= 0]
    return whole if len(whole) == len(value) else None


def _split_list(value: Any) -> list[int] | None:
    if isinstance(value, str):
        value = [int(v) for v in re.findall(r"\d+", value)] if "..." not in value else None
    if not isinstance(value, list) or not value:
        return None
    whole = [_whole(v) for v in value]
    return None if any(v is None or v < 0 for v in whole) else [v for v in whole if v is not None]
