"""What a trace viewer shows of a run: a process for each rank, its tracks, slices, flows and counters.

One rank is held at a time. Every activity of a device, every operator and range of the host and every call that has a time is
one slice; ``Timeline.left_out`` counts what could not be shown, with the reason. Tracks of a rank, in this order:

=============================  ========================================================================================
track                          a slice is
=============================  ========================================================================================
steps                          a training step
passes                         a stretch of forward or backward (with recompute) work or of the optimizer, of one
                               micro-batch; by the kernels of compute, or by the ranges that marks and hooks put there
compute stream N               a kernel, copy or memset
communication ROLE             a call, or several launched as one; inside of it its kernels
host thread N                  an operator or a range of the host, or a call from issue to return
in-flight micro-batches        counter: those whose first pass has begun and whose last has not ended
exposed ROLE                   counter: 1 while communication of this role runs and no compute does, else 0
=============================  ========================================================================================

Slices of one track nest; where two cross, the later one goes to another track of the same name with a number. Flows lead
through the ranks of a matched call in the order in which they came, and from the host's launch to the kernel.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from traceanalyzer import axes
from traceanalyzer.attribute import across, attach, in_world_of, kernels, roles, time
from traceanalyzer.diff import Diff
from traceanalyzer.errors import InputError, JobError
from traceanalyzer.expect.model import ExpectedCall
from traceanalyzer.intervals import Ints
from traceanalyzer.job import Job
from traceanalyzer.matching import Cell
from traceanalyzer.reports.text import ranges
from traceanalyzer.run import Run

Value = int | float | str | bool
Row = dict[str, Any]

FIRST_PID = 1_000_000
"""Process id of rank 0; a viewer keeps 0 for its idle process. The rank follows in the last digits."""

LAUNCH_FLOWS = 1 << 48
"""Ids of flows from launches begin here; below are those of matched calls (their match_id + 1)."""

_FLOWS_OF_A_RANK = 28
"""Bits of a launch's flow id below its rank."""


class Process(NamedTuple):
    """One rank. ``rank_key``: the rank, -1 where it is not known."""

    rank_key: int
    name: str
    order: int

    @property
    def pid(self) -> int:
        """Process id in the file."""
        return FIRST_PID + self.rank_key


class Flow(NamedTuple):
    """A slice's place in a flow: "s" begins it, "t" passes it on, "f" ends it."""

    id: int
    end: str


class Slice(NamedTuple):
    """One slice, [start_ns, end_ns); an instant if they are equal. ``args``: what is known, by name."""

    start_ns: int
    end_ns: int
    name: str
    category: str
    args: Mapping[str, Value]
    flows: tuple[Flow, ...] = ()


class Track(NamedTuple):
    """A track with its slices, nested and in the order of their starts, outer ones first. ``number``: from 1 in its rank."""

    number: int
    name: str
    slices: list[Slice]


class Gauge(NamedTuple):
    """A counter: its value from each time on. ``number``: as of a track."""

    number: int
    name: str
    unit: str
    times: list[int]
    values: list[int]


class Content(NamedTuple):
    """What one rank shows."""

    process: Process
    tracks: list[Track]
    gauges: list[Gauge]


@dataclass
class Timeline:
    """A run as tracks. Use ``Timeline.of``; then ``content`` for each of ``processes``.

    ``steps`` None: everything. ``aligned``: times by the clock of the reference rank instead of the rank's own.
    ``counts`` and ``left_out`` grow while ranks are read.
    """

    run: Run
    job: Job | None
    compared: Diff | None
    ranks: tuple[int, ...]
    steps: frozenset[int] | None
    aligned: bool
    host: bool
    counts: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        run: Run,
        job: Job | None = None,
        compared: Diff | None = None,
        *,
        ranks: Collection[int] | None = None,
        steps: Collection[int] | None = None,
        aligned: bool = True,
        host: bool = True,
    ) -> Timeline:
        """Attributes the run, matches its calls over ranks and finds what can be shown.

        ``compared``: the diff of this run, for expected bytes and verdicts; it has attributed the run then. Raises
        InputError if no rank or no step of the run is among those asked for.
        """
        used = job if compared is None else compared.job
        used = None if used is None else in_world_of(run, used)
        if compared is None:
            attach(run, used)
        kernels.of_kernels(run, used)
        across.make(run)
        time.steps_with_ends(run)
        run.connection.execute(_SHOWN_CALL)
        present = [
            r for (r,) in run.tuples("SELECT DISTINCT coalesce(rank, -1) FROM run WHERE kind <> 'issue' ORDER BY 1")
        ]
        chosen = [r for r in present if ranks is None or r in ranks]
        if not chosen:
            asked = "" if ranks is None else f" The run has ranks {ranges(r for r in present if r >= 0)}."
            raise InputError(f"{run.source}: nothing to export: none of the ranks asked for.{asked}")
        timeline = cls(run, used, compared, tuple(chosen), None if steps is None else frozenset(steps), aligned, host)
        if steps is not None:
            known = {s for (s,) in run.tuples("SELECT DISTINCT step FROM device_step WHERE step IS NOT NULL")}
            if not known & set(steps):
                raise InputError(f"{run.source}: nothing to export: the run has steps {ranges(known)}.")
            absent = set(steps) - known
            if absent and len(absent) <= 1000:
                timeline.notes.append(f"steps {ranges(absent)} are not in the run")
        without = sorted(set(ranks or ()) - set(present))
        if without:
            timeline.notes.append(f"ranks {ranges(without)} are not in the run")
        timeline._check_clocks()
        return timeline

    def processes(self) -> list[Process]:
        """The ranks as processes, in order; one whose rank is not known comes last."""
        return [self._process(r) for r in sorted(self.ranks, key=lambda r: (r < 0, r))]

    def _process(self, rank_key: int) -> Process:
        return Process(rank_key, rank_name(rank_key, self._layout), rank_key if rank_key >= 0 else 1 << 30)

    @cached_property
    def base_ns(self) -> int:
        """The earliest time that any chosen rank may show."""
        rows = self.run.tuples(
            """SELECT rank_key, min(low)::BIGINT FROM (
                 SELECT coalesce(rank, -1) AS rank_key, least(start_ns, t_issue_ns) AS low FROM run
                 UNION ALL SELECT rank_key, start_ns FROM device_step)
               WHERE low IS NOT NULL GROUP BY rank_key"""
        )
        found = [self._clock(rank_key).shown(int(low)) for rank_key, low in rows if rank_key in self._chosen]
        return min(found, default=0)

    @cached_property
    def _layout(self) -> axes.Layout | None:
        try:
            return None if self.job is None else self.job.layout
        except JobError:
            return None

    # -- clocks ----------------------------------------------------------------------------------------------------------

    def _check_clocks(self) -> None:
        """Notes what cannot be aligned."""
        if not self.aligned or len(self.ranks) < 2:
            return
        references = dict(
            self.run.tuples("SELECT rank, min(reference_rank) FROM clock WHERE evidence <> 'recorded' GROUP BY rank")
        )
        alone = [r for r in self.ranks if r >= 0 and r not in references]
        if alone:
            self.notes.append(f"ranks {ranges(alone)}: no call ties their clocks to others; they are as recorded")
        if len({references[r] for r in self.ranks if r in references}) > 1:
            self.notes.append(
                "not all clocks are tied to each other by calls: ranks of different groups cannot be compared"
            )

    @cached_property
    def _clocks(self) -> dict[int, _Clock]:
        found: dict[int, list[tuple[int | None, int, int, float]]] = {}
        if self.aligned:
            for rank, *row in self.run.tuples(
                """SELECT rank, since_ns, base_ns, offset_ns, coalesce(drift_ppb, 0) / 1e9 FROM clock
                   WHERE calls > 0 OR evidence = 'host' ORDER BY rank, since_ns NULLS FIRST"""
            ):
                found.setdefault(rank, []).append((row[0], row[1], row[2], row[3]))
        return {rank: _Clock(tuple(rows)) for rank, rows in found.items()}

    def _clock(self, rank_key: int) -> _Clock:
        return self._clocks.get(rank_key, _AS_RECORDED)

    # -- expectation -----------------------------------------------------------------------------------------------------

    def _cells(self, rank_key: int) -> list[tuple[Cell, frozenset[int]]]:
        """The cells of the diff that hold for a rank and were measured, with their steps."""
        if self.compared is None:
            return []
        return [(c, frozenset(c.steps)) for c in self.compared.cells if c.calls_measured and rank_key in c.ranks]

    # -- one rank --------------------------------------------------------------------------------------------------------

    def content(self, process: Process) -> Content:
        """Everything one rank shows."""
        rank_key = process.rank_key
        clock = self._clock(rank_key)
        windows = self._windows(rank_key)
        kernel_rows = self._kernels(rank_key)
        calls = self._calls(rank_key)
        host, launches = self._host(rank_key, kernel_rows, calls, windows, clock)
        passes = _passes(kernel_rows) or self._marked(rank_key, windows, calls)
        groups: list[tuple[str, list[Slice]]] = [
            ("steps", self._steps(windows, clock)),
            ("passes", [_pass_slice(p, clock) for p in passes]),
            *self._device(kernel_rows, calls, launches, self._cells(rank_key), clock),
            *host,
        ]
        tracks: list[Track] = []
        for name, slices in groups:
            for i, lane in enumerate(nested(slices)):
                tracks.append(Track(len(tracks) + 1, name if i == 0 else f"{name} ({i + 1})", lane))
        gauges = [
            Gauge(len(tracks) + i + 1, name, unit, times, values)
            for i, (name, unit, times, values) in enumerate(
                [*_in_flight(passes, clock), *self._exposed(rank_key, windows, clock)]
            )
        ]
        for track in tracks:
            self.counts["slices"] += len(track.slices)
            self.counts["flow ends"] += sum(len(s.flows) for s in track.slices)
        self.counts["tracks"] += len(tracks) + len(gauges)
        self.counts["counter values"] += sum(len(g.times) for g in gauges)
        self.counts["ranks"] += 1
        return Content(process, tracks, gauges)

    def _windows(self, rank_key: int) -> list[Row]:
        rows = self.run.rows(
            f"""SELECT step, start_ns, end_ns, step_evidence, step_complete FROM device_step
                WHERE rank_key = {rank_key} ORDER BY start_ns"""
        )
        return [r for r in rows if self.steps is None or r["step"] in self.steps]

    def _steps(self, windows: Sequence[Row], clock: _Clock) -> list[Slice]:
        found = []
        for row in windows:
            if row["end_ns"] is None or row["end_ns"] < row["start_ns"]:
                self.left_out["steps without an end"] += 1
                continue
            name = "step" if row["step"] is None else f"step {row['step']}"
            args = _known(row, "step", "step_evidence", "step_complete")
            found.append(Slice(*clock.both(row["start_ns"], row["end_ns"]), name, "step", args))
        return found

    def _of_steps(self, rows: list[Row], what: str) -> list[Row]:
        """The rows of the chosen steps; the others are counted."""
        if self.steps is None:
            return rows
        kept = [r for r in rows if r["step"] in self.steps]
        self.left_out[f"{what} outside of the chosen steps"] += len(rows) - len(kept)
        return kept

    def _kernels(self, rank_key: int) -> list[Row]:
        rows = self.run.rows(
            f"""SELECT {", ".join(_KERNEL)} FROM kernel_place WHERE {_of_rank(rank_key)}
                ORDER BY start_ns, dur_ns DESC, name"""
        )
        rows = self._of_steps(rows, "kernels")
        kept = [r for r in rows if r["start_ns"] is not None and (r["dur_ns"] or 0) >= 0]
        self.left_out["kernels without a start"] += len(rows) - len(kept)
        for row in kept:
            if row["dur_ns"] is None:
                self.left_out["durations of kernels, which are shown as instants"] += 1
            row["end_ns"] = row["start_ns"] + (row["dur_ns"] or 0)
        return kept

    def _calls(self, rank_key: int) -> list[Row]:
        rows = self.run.rows(f"FROM shown_call WHERE {_of_rank(rank_key)} ORDER BY start_ns, call_id")
        return self._of_steps(rows, "calls")

    def _device(
        self,
        kernel_rows: list[Row],
        calls: list[Row],
        launches: Mapping[Any, Flow | None],
        cells: Sequence[tuple[Cell, frozenset[int]]],
        clock: _Clock,
    ) -> Iterator[tuple[str, list[Slice]]]:
        """Tracks of streams and of the roles that communicate."""
        devices = {r["device"] for r in kernel_rows}
        streams: dict[tuple[int, int], list[Slice]] = {}
        by_role: dict[str, list[Slice]] = {}
        role_of: dict[int, str] = {}
        units: dict[Any, list[Row]] = {}
        for call in calls:
            key = ("call", call["call_id"]) if call["coalesce_id"] is None else call["coalesce_id"]
            units.setdefault(key, []).append(call)
        for key, members in units.items():
            role = _same(members, "role") or time.UNKNOWN
            role_of[key] = role
            shown = self._unit(members, launches, cells, clock)
            if shown is not None:
                by_role.setdefault(role, []).append(shown)
        for row in kernel_rows:
            ended = launches.get(("kernel", row["correlation"])) if row["correlation"] is not None else None
            shown = Slice(
                *clock.both(row["start_ns"], row["end_ns"]),
                row["name"] or "kernel",
                row["kernel_class"] or "kernel",
                _known(row, *_KERNEL_ARGS),
                () if ended is None else (ended,),
            )
            if row["kernel_class"] == "comm":
                role = role_of.get(row["coalesce_id"]) if row["coalesce_id"] is not None else None
                by_role.setdefault(role or row["role"] or time.UNKNOWN, []).append(shown)
            else:
                on_stream = (-1 if row[n] is None else int(row[n]) for n in ("device", "stream"))
                streams.setdefault((next(on_stream), next(on_stream)), []).append(shown)
        for (device, stream), slices in sorted(streams.items()):
            on = f" of device {device}" if len(devices) > 1 and device >= 0 else ""
            yield f"compute stream{'' if stream < 0 else f' {stream}'}{on}", slices
        for role, slices in sorted(by_role.items(), key=lambda item: (item[0] == time.UNKNOWN, item[0])):
            yield f"communication {'of unknown role' if role == time.UNKNOWN else role}", slices

    def _unit(
        self,
        members: list[Row],
        launches: Mapping[Any, Flow | None],
        cells: Sequence[tuple[Cell, frozenset[int]]],
        clock: _Clock,
    ) -> Slice | None:
        """Calls that were launched as one as a slice; None (and counted) without a time."""
        timed = [m for m in members if m["start_ns"] is not None and m["dur_ns"] is not None and m["dur_ns"] >= 0]
        if not timed:
            self.left_out["calls without a time of their work"] += len(members)
            return None
        start, end = min(m["start_ns"] for m in timed), max(m["end_ns"] for m in timed)
        ops = Counter(m["op"] or m["op_raw"] or "unknown operation" for m in members)
        name = " + ".join(op if n == 1 else f"{op} x{n}" for op, n in ops.items())
        args: dict[str, Value] = {n: v for n in _CALL_ARGS if (v := _same(members, n)) is not None}
        args["calls"] = len(members)
        if all(m["payload_bytes"] is not None for m in members):
            args["payload_bytes"] = sum(m["payload_bytes"] for m in members)
        judged = [_judged(m, cells) for m in members]
        verdicts = {None if j is None else j.verdict for j in judged}
        if len(verdicts) == 1 and None not in verdicts:
            known = [j for j in judged if j is not None]
            args["verdict"] = known[0].verdict
            if all(j.expected_bytes is not None for j in known):
                args["expected_payload_bytes"] = sum(j.expected_bytes or 0 for j in known)
            for word in ("cause", "avoidable"):
                codes = sorted({code for j in known if (code := getattr(j, word))})
                if codes:
                    args[word] = ", ".join(codes)
            self.counts["calls with a verdict"] += len(members)
        self.counts["calls"] += len(members)
        shown = clock.both(start, end)
        if shown != (start, end):
            args["recorded_start_ns"], args["recorded_dur_ns"] = start, end - start
        flows = [
            Flow(m["match_id"] + 1, self._place[m["match_id"], m["rank"]])
            for m in timed
            if (m["match_id"], m["rank"]) in self._place
        ]
        issued = [launches.get(("call", m["call_id"])) for m in members]
        flows += [f for f in issued if f is not None]
        return Slice(*shown, name, "comm", args, tuple(flows))

    @cached_property
    def _place(self) -> dict[tuple[int, int], str]:
        """Where each shown member of a matched call stands in its flow: first s, last f; by the times that are shown."""
        of: dict[int, list[tuple[int, int]]] = {}
        steps = "" if self.steps is None else f"AND step IN ({', '.join(map(str, sorted(self.steps)))})"
        for match, rank, start in self.run.tuples(
            f"""SELECT match_id, rank, start_ns FROM shown_call
                WHERE match_id IS NOT NULL AND start_ns IS NOT NULL AND dur_ns >= 0 {steps}"""
        ):
            if rank in self._chosen:
                of.setdefault(match, []).append((self._clock(rank).shown(start), rank))
        found: dict[tuple[int, int], str] = {}
        for match, members in of.items():
            if len({r for _, r in members}) < 2:
                continue
            order = sorted(members)
            for i, (_, rank) in enumerate(order):
                found[match, rank] = "s" if i == 0 else "f" if i == len(order) - 1 else "t"
        self.left_out["flows of matched calls, all but one rank of which are not shown"] += sum(
            len(m) == 1 for m in of.values()
        )
        return found

    @cached_property
    def _chosen(self) -> frozenset[int]:
        return frozenset(self.ranks)

    def _host(
        self, rank_key: int, kernel_rows: list[Row], calls: list[Row], windows: Sequence[Row], clock: _Clock
    ) -> tuple[list[tuple[str, list[Slice]]], dict[Any, Flow | None]]:
        """Tracks of host threads, and the flows that begin there: by ("kernel", correlation) and ("call", call_id)."""
        rows = self.run.rows(
            f"""SELECT kind, name, category, start_ns, dur_ns, tid, correlation, external_id, sequence_nr,
                       recorded_step, recorded_microbatch, recorded_layer, recorded_phase, recorded_component
                FROM run WHERE kind IN ('cpu_op', 'span') AND {_of_rank(rank_key)}
                ORDER BY start_ns, dur_ns DESC, name"""
        )
        if not self.host:
            self.left_out["operators and ranges of the host, which were not asked for"] += len(rows)
            return [], {}
        if self.steps is not None:
            inside = [r for r in rows if r["start_ns"] is not None and _within(r["start_ns"], windows)]
            self.left_out["operators and ranges of the host outside of the chosen steps"] += len(rows) - len(inside)
            rows = inside
        launched = Counter(k["correlation"] for k in kernel_rows if k["correlation"] is not None)
        starts = {k["correlation"]: k["start_ns"] for k in kernel_rows if launched[k["correlation"]] == 1}
        flow_ids = itertools.count(LAUNCH_FLOWS + ((rank_key + 1) << _FLOWS_OF_A_RANK))
        threads: dict[tuple[bool, int], list[Slice]] = {}
        launches: dict[Any, Flow | None] = {}
        for row in rows:
            if row["start_ns"] is None or (row["dur_ns"] or 0) < 0:
                self.left_out["operators and ranges of the host without a start"] += 1
                continue
            flows: tuple[Flow, ...] = ()
            begins = starts.get(row["correlation"]) if row["correlation"] is not None else None
            if begins is not None and ("kernel", row["correlation"]) not in launches:
                if row["start_ns"] <= begins:
                    flow = next(flow_ids)
                    flows = (Flow(flow, "s"),)
                    launches["kernel", row["correlation"]] = Flow(flow, "f")
                else:
                    self.left_out["flows of launches that are later than their kernels"] += 1
            category = row["category"] or row["kind"]
            shown = Slice(
                *clock.both(row["start_ns"], row["start_ns"] + (row["dur_ns"] or 0)),
                row["name"] or category,
                category,
                _known(row, *_HOST_ARGS),
                flows,
            )
            threads.setdefault((row["tid"] is None, row["tid"] or 0), []).append(shown)
        for call in calls:
            if call["t_issue_ns"] is None:
                continue
            end = call["t_issue_end_ns"]
            flows = ()
            start = call["start_ns"]
            if start is not None and call["dur_ns"] is not None and call["dur_ns"] >= 0 and call["t_issue_ns"] <= start:
                flow = next(flow_ids)
                flows = (Flow(flow, "s"),)
                launches["call", call["call_id"]] = Flow(flow, "f")
            name = f"issue {call['op'] or call['op_raw'] or 'unknown operation'}"
            times = clock.both(call["t_issue_ns"], call["t_issue_ns"] if end is None else max(end, call["t_issue_ns"]))
            args = {n: v for n in _CALL_ARGS if (v := call[n]) is not None}
            threads.setdefault((call["tid"] is None, call["tid"] or 0), []).append(
                Slice(*times, name, "call", args, flows)
            )
        named = [
            (f"host {'thread unknown' if unknown else f'thread {tid}'}", slices)
            for (unknown, tid), slices in sorted(threads.items())
        ]
        return named, launches

    def _marked(self, rank_key: int, windows: Sequence[Row], calls: Sequence[Row]) -> list[_Pass]:
        """Passes by the ranges that marks and hooks put around them; the direction of a range that does not say it is that
        of the calls issued inside."""
        rows = self.run.rows(
            rf"""SELECT name, category, start_ns, start_ns + dur_ns AS end_ns, recorded_step, recorded_microbatch,
                        recorded_chunk
                 FROM span WHERE {_of_rank(rank_key)} AND start_ns IS NOT NULL AND dur_ns > 0
                   AND (category IN ('forward', 'backward')
                        OR regexp_matches(name, '^ta:(?:forward|backward|microbatch \d+|phase \w+)$'))
                 ORDER BY start_ns, dur_ns DESC"""
        )
        found = []
        for row in rows:
            step = row["recorded_step"]
            if step is None:
                step = next((w["step"] for w in windows if _holds(w, row["start_ns"])), None)
            if self.steps is not None and step not in self.steps:
                continue
            words = (row["name"] or "").removeprefix("ta:").split(" ")
            microbatch = int(words[1]) if words[0] == "microbatch" else row["recorded_microbatch"]
            phase = words[1] if words[0] == "phase" else row["category"]
            phase = words[0] if words[0] in ("forward", "backward") else phase
            if words[0] == "microbatch":
                inside = {
                    _DIRECTION[c["phase"]]
                    for c in calls
                    if c["phase"] in _DIRECTION
                    and c["t_issue_ns"] is not None
                    and row["start_ns"] <= c["t_issue_ns"] < row["end_ns"]
                }
                phase = inside.pop() if len(inside) == 1 else None
            found.append(_Pass(step, phase, microbatch, row["recorded_chunk"], row["start_ns"], row["end_ns"], 0))
        return found

    @cached_property
    def _exposed_all(self) -> dict[int, list[tuple[int | None, str, Ints, Ints]]]:
        found: dict[int, list[tuple[int | None, str, Ints, Ints]]] = {}
        for rank_key, device, role, start, end in time.exposed(self.run):
            if rank_key in self._chosen:
                found.setdefault(rank_key, []).append((device, role, start, end))
        return found

    def _exposed(
        self, rank_key: int, windows: Sequence[Row], clock: _Clock
    ) -> Iterator[tuple[str, str, list[int], list[int]]]:
        mine = self._exposed_all.get(rank_key, [])
        several = len({device for device, *_ in mine}) > 1
        for device, role, start, end in mine:
            pieces = list(zip(start.tolist(), end.tolist(), strict=True))
            if self.steps is not None:
                pieces = _clipped(pieces, windows)
            points: list[tuple[int, int]] = []
            for low, high in pieces:
                if points and points[-1][0] == low:
                    points.pop()
                else:
                    points.append((low, 1))
                points.append((high, 0))
            if points:
                on = f" on device {device}" if several else ""
                yield f"exposed {role}{on}", "running", [clock.shown(t) for t, _ in points], [v for _, v in points]


_KERNEL = (
    "device", "stream", "name", "kernel_class", "start_ns", "dur_ns", "correlation", "coalesce_id", "role", "phase", "step",
    "microbatch", "chunk", "layer", "component", "served_axis", "graph_id", "copy_bytes", "completeness",
)  # fmt: skip
_KERNEL_ARGS = (
    "step", "phase", "microbatch", "chunk", "layer", "component", "role", "served_axis", "device", "stream", "correlation",
    "graph_id", "copy_bytes", "completeness",
)  # fmt: skip
_CALL = (
    "rank", "call_id", "coalesce_id", "op", "op_raw", "role", "role_evidence", "step", "phase", "microbatch", "chunk",
    "layer", "component", "dtype", "group_id", "group_size", "seq", "peer", "root", "reduce_op", "is_async", "payload_bytes",
    "start_ns", "dur_ns", "time_source", "completeness", "tid", "t_issue_ns", "t_issue_end_ns",
)  # fmt: skip
_CALL_ARGS = (
    "role", "role_evidence", "op", "step", "phase", "microbatch", "chunk", "layer", "component", "dtype", "group_id",
    "group_size", "seq", "peer", "root", "reduce_op", "is_async", "call_id", "match_id", "transfer_ns", "waiting_ns",
    "time_source", "completeness",
)  # fmt: skip
_HOST_ARGS = (
    "external_id", "correlation", "sequence_nr", "recorded_step", "recorded_microbatch", "recorded_layer", "recorded_phase",
    "recorded_component",
)  # fmt: skip


_SHOWN_CALL = f"""
CREATE OR REPLACE TABLE shown_call AS
SELECT {", ".join(f"c.{n}" for n in _CALL)}, c.start_ns + c.dur_ns AS end_ns, m.match_id, a.transfer_ns, a.waiting_ns
FROM comm c
LEFT JOIN matched_member m ON m.rank = c.rank AND m.call_id = c.call_id
LEFT JOIN arrival a ON a.rank = m.rank AND a.match_id = m.match_id
"""
"""The calls once for all ranks: the view comm takes long to plan."""


def _of_rank(rank_key: int) -> str:
    """Condition of the rows of one rank, as Parquet's statistics can use it."""
    return f"rank = {rank_key}" if rank_key >= 0 else "rank IS NULL"


@dataclass(frozen=True)
class _Clock:
    """How far a clock is ahead of its reference: (since, base, offset, drift), in the order of time; none: as recorded."""

    rows: tuple[tuple[int | None, int, int, float], ...] = ()

    def shown(self, at: int) -> int:
        """A time by the reference's clock, to the nearest ns (as attribute.clocks has it)."""
        if not self.rows:
            return at
        held = self.rows[0]
        for row in self.rows[1:]:
            if row[0] is not None and row[0] <= at:
                held = row
        _, base, offset, drift = held
        return at - round(offset + drift * (at - base - offset))

    def both(self, start: int, end: int) -> tuple[int, int]:
        """Two times by the reference's clock; the end is never before the start."""
        low = self.shown(start)
        return low, max(low, self.shown(end))


_AS_RECORDED = _Clock()


class _Pass(NamedTuple):
    """A stretch of work of one direction and micro-batch, by the rank's own clock. kernels: 0 where a range says it."""

    step: int | None
    phase: str | None
    microbatch: int | None
    chunk: int | None
    start_ns: int
    end_ns: int
    kernels: int


_DIRECTION = {"forward": "forward", "backward": "backward", "recompute": "backward", "optimizer": "optimizer"}
"""Phase -> direction of the pass it belongs to; other work does not divide passes."""


def _passes(kernel_rows: Sequence[Row]) -> list[_Pass]:
    """Runs of compute kernels of one step, direction, micro-batch and chunk."""
    found: list[_Pass] = []
    for row in kernel_rows:
        phase = _DIRECTION.get(row["phase"])
        if phase is None or row["kernel_class"] in ("comm", "copy", "memset") or row["dur_ns"] is None:
            continue
        key = (row["step"], phase, row["microbatch"], row["chunk"])
        if found and found[-1][:4] == key:
            last = found[-1]
            found[-1] = last._replace(end_ns=max(last.end_ns, row["end_ns"]), kernels=last.kernels + 1)
        else:
            found.append(_Pass(*key, row["start_ns"], row["end_ns"], 1))
    return found


def _pass_slice(found: _Pass, clock: _Clock) -> Slice:
    words = [found.phase, None if found.microbatch is None else f"micro-batch {found.microbatch}"]
    words.append(None if found.chunk is None else f"chunk {found.chunk}")
    args: dict[str, Value] = {
        n: v for n in ("step", "phase", "microbatch", "chunk") if (v := getattr(found, n)) is not None
    }
    args["evidence"] = "kernels" if found.kernels else "range"
    if found.kernels:
        args["kernels"] = found.kernels
    name = " ".join(w for w in words if w) or "pass"
    return Slice(*clock.both(found.start_ns, found.end_ns), name, found.phase or "pass", args)


def _in_flight(passes: Sequence[_Pass], clock: _Clock) -> Iterator[tuple[str, str, list[int], list[int]]]:
    """Micro-batches between the start of their first and the end of their last pass; nothing where none is numbered."""
    spans: dict[tuple[int | None, int, int | None], tuple[int, int]] = {}
    for p in passes:
        if p.microbatch is not None:
            low, high = spans.get((p.step, p.microbatch, p.chunk), (p.start_ns, p.end_ns))
            spans[p.step, p.microbatch, p.chunk] = min(low, p.start_ns), max(high, p.end_ns)
    if not spans:
        return
    change: Counter[int] = Counter()
    for low, high in spans.values():
        change[clock.shown(low)] += 1
        change[clock.shown(high)] -= 1
    times = sorted(t for t, n in change.items() if n)
    values = np.cumsum([change[t] for t in times]).tolist()
    yield "in-flight micro-batches", "micro-batches", times, values


def nested(slices: Sequence[Slice]) -> list[list[Slice]]:
    """Slices on lanes, each on the first where it fits, so that those of a lane nest; in a lane by start, outer first."""
    lanes: list[tuple[list[Slice], list[int]]] = []
    for found in sorted(slices, key=lambda s: (s.start_ns, -s.end_ns)):
        chosen: tuple[list[Slice], list[int]] | None = None
        for lane in lanes:
            open_ends = lane[1]
            while open_ends and open_ends[-1] <= found.start_ns:
                open_ends.pop()
            if not open_ends or found.end_ns <= open_ends[-1]:
                chosen = lane
                break
        if chosen is None:
            chosen = [], []
            lanes.append(chosen)
        chosen[0].append(found)
        if found.end_ns > found.start_ns:
            chosen[1].append(found.end_ns)
    return [lane for lane, _ in lanes]


def edges(slices: Sequence[Slice]) -> Iterator[tuple[int, Slice | None]]:
    """Begins (with the slice) and ends (None) of a lane in the order of time; at one time ends come first. No instants."""
    stack: list[int] = []
    for found in slices:
        while stack and stack[-1] <= found.start_ns:
            yield stack.pop(), None
        yield found.start_ns, found
        if found.end_ns > found.start_ns:
            stack.append(found.end_ns)
    while stack:
        yield stack.pop(), None


def rank_name(rank_key: int, layout: axes.Layout | None) -> str:
    """``rank 5  pp1 dp0 tp1``: the coordinates on the axes that have more than one rank, outermost first."""
    if rank_key < 0:
        return "rank unknown"
    if layout is None or rank_key >= layout.world_size:
        return f"rank {rank_key}"
    at = layout.coordinates(rank_key)
    sizes = {"pp": layout.pp, "dp": layout.dp, "ep": layout.ep, "cp": layout.cp, "tp": layout.tp}
    words = " ".join(f"{axis}{getattr(at, axis)}" for axis, size in sizes.items() if size > 1)
    return f"rank {rank_key}  {words}" if words else f"rank {rank_key}"


def _known(row: Mapping[str, Any], *names: str) -> dict[str, Value]:
    return {n: row[n] for n in names if row[n] is not None}


def _same(rows: Sequence[Row], name: str) -> Any:
    """The value that all rows have; None if they differ or it is not known."""
    first = rows[0][name]
    return first if all(r[name] == first for r in rows) else None


def _holds(window: Row, at: int) -> bool:
    return bool(window["start_ns"] <= at and (window["end_ns"] is None or at < window["end_ns"]))


def _within(at: int, windows: Sequence[Row]) -> bool:
    return any(_holds(w, at) for w in windows)


def _clipped(pieces: Sequence[tuple[int, int]], windows: Sequence[Row]) -> list[tuple[int, int]]:
    """The parts of pieces that lie in windows, in the order of time. Windows do not overlap."""
    found = []
    for w in windows:
        low, high = w["start_ns"], math.inf if w["end_ns"] is None else w["end_ns"]
        found += [(max(a, low), int(min(b, high))) for a, b in pieces if a < high and b > low]
    return sorted(found)


class _Judged(NamedTuple):
    """What the diff says of one call. expected_bytes None: varies, or the cells that it may lie in differ; "": none."""

    verdict: str
    expected_bytes: int | None
    cause: str
    avoidable: str


def _judged(call: Row, cells: Sequence[tuple[Cell, frozenset[int]]]) -> _Judged | None:
    """What all cells of the diff say in which a call may lie: those of its type and size, else of its operation and role.

    None where they have several verdicts, or there is none.
    """
    near = [
        c
        for c, steps in cells
        if call["step"] in steps
        and (c.role, c.op) == (call["role"], call["op"])
        and (c.phase == call["phase"] or (c.phase is not None and roles.same_phase(call["phase"], c.phase, c.role)))
    ]
    exact = [c for c in near if c.dtype == call["dtype"] and c.payload_bytes_each == call["payload_bytes"]]
    may_be = [c for c in exact if c.phase == call["phase"]] or exact or near
    if len({c.verdict for c in may_be}) != 1:
        return None
    expected = {_expected_bytes(c) for c in may_be}
    causes = {"" if c.cause is None else c.cause.code for c in may_be}
    avoidable = {", ".join(code for code, _ in c.avoidable) for c in may_be}
    return _Judged(
        may_be[0].verdict,
        expected.pop() if len(expected) == 1 else None,
        causes.pop() if len(causes) == 1 else "",
        avoidable.pop() if len(avoidable) == 1 else "",
    )


def _expected_bytes(cell: Cell) -> int | None:
    """Payload of one expected call of a cell; None where it varies, the expected calls differ, or nothing is expected."""
    if cell.varies or not cell.calls_expected or cell.payload_bytes_expected is None:
        return None
    if len({(c.dtype, _full_elems(c)) for c in cell.expected}) > 1:
        return None
    each, rest = divmod(cell.payload_bytes_expected, cell.calls_expected)
    return each if rest == 0 else None


def _full_elems(call: ExpectedCall) -> int:
    return max(call.in_elems, call.out_elems)


Progress = Callable[[str, int, int], None]
"""Told what is being done, how many ranks are done, and of how many."""
