"""A timeline as Chrome's trace events in JSON, for viewers that read nothing else.

The tracks are those of the Perfetto file. ``ts`` and ``dur`` are microseconds with the nanoseconds as decimals, exact; ``ts``
counts from ``baseTimeNanoseconds``, as in the profiler's own traces: a double holds no unix time to the ns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO

from traceanalyzer.reports.export.tracks import Content, Progress, Timeline, Track


def write(timeline: Timeline, out: IO[bytes], progress: Progress | None = None) -> None:
    """Writes a timeline. ``progress`` is told of each rank."""
    base = timeline.base_ns
    out.write(f'{{"displayTimeUnit": "ns", "baseTimeNanoseconds": {base}, "traceEvents": ['.encode())
    between = b"\n"
    processes = timeline.processes()
    for i, process in enumerate(processes):
        if progress is not None:
            progress(process.name, i, len(processes))
        for line in _events(timeline.content(process), base):
            out.write(between + line.encode())
            between = b",\n"
    out.write(b"\n]}\n")


def _microseconds(ns: int) -> str:
    sign, size = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{size // 1000}.{size % 1000:03d}"


def _events(content: Content, base: int) -> Iterator[str]:
    pid = content.process.pid
    yield _told(pid, 0, "process_name", "name", content.process.name)
    yield _told(pid, 0, "process_sort_index", "sort_index", content.process.order)
    for track in content.tracks:
        yield _told(pid, track.number, "thread_name", "name", track.name)
        yield _told(pid, track.number, "thread_sort_index", "sort_index", track.number)
        yield from _slices(track, pid, base)
    for gauge in content.gauges:
        name, unit = json.dumps(gauge.name), json.dumps(gauge.unit)
        for at, value in zip(gauge.times, gauge.values, strict=True):
            ts = _microseconds(at - base)
            yield f'{{"ph": "C", "pid": {pid}, "name": {name}, "ts": {ts}, "args": {{{unit}: {value}}}}}'


def _told(pid: int, tid: int, what: str, key: str, value: str | int) -> str:
    return json.dumps({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {key: value}})


def _slices(track: Track, pid: int, base: int) -> Iterator[str]:
    for found in track.slices:
        at = f'"pid": {pid}, "tid": {track.number}, "ts": {_microseconds(found.start_ns - base)}'
        what = f'"name": {json.dumps(found.name)}, "cat": {json.dumps(found.category)}'
        args = json.dumps(dict(found.args))
        if found.end_ns > found.start_ns:
            dur = _microseconds(found.end_ns - found.start_ns)
            yield f'{{"ph": "X", {at}, "dur": {dur}, {what}, "args": {args}}}'
        else:
            yield f'{{"ph": "i", "s": "t", {at}, {what}, "args": {args}}}'
        for flow in found.flows:
            bound = ', "bp": "e"' if flow.end == "f" else ""
            yield f'{{"ph": "{flow.end}", "id": {flow.id}, {at}, "name": "flow", "cat": "flow"{bound}}}'
