"""A timeline as Perfetto's own format: TracePackets of protobuf, written as they come, with interned names.

The messages are those of the ``perfetto`` package (extra ``perfetto``). Times are unix ns; Perfetto shows them as wall time,
because a clock snapshot says that its clock and the real one are the same.
"""

from __future__ import annotations

import importlib
from typing import IO, Any

from traceanalyzer.errors import InputError
from traceanalyzer.reports.export.tracks import Content, Gauge, Process, Progress, Slice, Timeline, Track, Value, edges

_SEQUENCE = 1
_BATCH = 2000
"""Packets that are serialised together."""

_REALTIME, _BOOTTIME = 1, 6
"""Perfetto's builtin clocks: unix time, and the one its traces are in."""

_TRACKS_OF_A_RANK = 20
"""Bits of a track's uuid below its rank."""


def messages() -> Any:
    """The module with Perfetto's protobuf messages. Raises InputError where it is not installed."""
    try:
        return importlib.import_module("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    except ImportError as error:
        raise InputError(
            f"Perfetto's format needs the package perfetto ({error}). Install it: pip install 'traceanalyzer[perfetto]'. "
            "--chrome FILE writes the same tracks without it."
        ) from None


def write(timeline: Timeline, out: IO[bytes], progress: Progress | None = None) -> None:
    """Writes a timeline. ``progress`` is told of each rank. Raises InputError without the perfetto package."""
    writer = _Writer(messages(), out)
    writer.begin(timeline.base_ns)
    processes = timeline.processes()
    for i, process in enumerate(processes):
        if progress is not None:
            progress(process.name, i, len(processes))
        writer.rank(timeline.content(process))
    writer.flush()


class _Writer:
    """Packets of one sequence; interned strings are sent with the first packet that uses them."""

    def __init__(self, proto: Any, out: IO[bytes]) -> None:
        self._proto = proto
        self._event: Any = proto.TrackEvent
        self._out = out
        self._trace: Any = proto.Trace()
        self._interned: dict[str, dict[str, int]] = {
            n: {}
            for n in ("event_categories", "event_names", "debug_annotation_names", "debug_annotation_string_values")
        }

    def flush(self) -> None:
        """Writes what was collected: messages of the same type may simply follow each other."""
        self._out.write(self._trace.SerializeToString())
        self._trace = self._proto.Trace()

    def _packet(self) -> Any:
        if len(self._trace.packet) >= _BATCH:
            self.flush()
        packet = self._trace.packet.add()
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.sequence_flags = self._proto.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        return packet

    def begin(self, at_ns: int) -> None:
        """The first packets: the state of the sequence, the clock, and that ranks and tracks have an order of their own."""
        packet = self._packet()
        packet.sequence_flags = self._proto.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        for clock in (_BOOTTIME, _REALTIME):
            packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=max(0, at_ns))
        root = self._packet().track_descriptor
        root.uuid = 0
        root.process_ordering = self._proto.TrackDescriptor.PROCESS_ORDERING_EXPLICIT
        root.thread_ordering = self._proto.TrackDescriptor.THREAD_ORDERING_EXPLICIT

    def rank(self, content: Content) -> None:
        """One rank: its descriptors, then its events."""
        process = content.process
        top = self._packet().track_descriptor
        top.uuid = _uuid(process, 0)
        top.process.pid, top.process.process_name = process.pid, process.name
        top.sibling_order_rank = process.order
        top.child_ordering = self._proto.TrackDescriptor.EXPLICIT
        for track in content.tracks:
            self._slices(process, track)
        for gauge in content.gauges:
            self._counter(process, gauge)

    def _described(self, process: Process, track: Track | Gauge) -> Any:
        told = self._packet().track_descriptor
        told.uuid, told.parent_uuid = _uuid(process, track.number), _uuid(process, 0)
        told.name = track.name
        told.sibling_order_rank = track.number
        return told

    def _slices(self, process: Process, track: Track) -> None:
        thread = self._described(process, track).thread
        thread.pid, thread.tid, thread.thread_name = process.pid, track.number, track.name
        uuid = _uuid(process, track.number)
        for at, begun in edges(track.slices):
            packet = self._packet()
            packet.timestamp = at
            event = packet.track_event
            event.track_uuid = uuid
            if begun is None:
                event.type = self._event.TYPE_SLICE_END
            else:
                instant = begun.end_ns == begun.start_ns
                event.type = self._event.TYPE_INSTANT if instant else self._event.TYPE_SLICE_BEGIN
                self._filled(packet, begun)

    def _filled(self, packet: Any, begun: Slice) -> None:
        event = packet.track_event
        event.name_iid = self._iid(packet, "event_names", begun.name)
        event.category_iids.append(self._iid(packet, "event_categories", begun.category))
        for flow in begun.flows:
            (event.terminating_flow_ids if flow.end == "f" else event.flow_ids).append(flow.id)
        for name, value in begun.args.items():
            self._annotated(packet, event.debug_annotations.add(), name, value)

    def _annotated(self, packet: Any, told: Any, name: str, value: Value) -> None:
        told.name_iid = self._iid(packet, "debug_annotation_names", name)
        if isinstance(value, bool):
            told.bool_value = value
        elif isinstance(value, int):
            if value < 1 << 63:
                told.int_value = value
            else:
                told.uint_value = value
        elif isinstance(value, float):
            told.double_value = value
        else:
            told.string_value_iid = self._iid(packet, "debug_annotation_string_values", value)

    def _counter(self, process: Process, gauge: Gauge) -> None:
        self._described(process, gauge).counter.unit_name = gauge.unit
        uuid = _uuid(process, gauge.number)
        for at, value in zip(gauge.times, gauge.values, strict=True):
            packet = self._packet()
            packet.timestamp = at
            packet.track_event.type = self._event.TYPE_COUNTER
            packet.track_event.track_uuid = uuid
            packet.track_event.counter_value = value

    def _iid(self, packet: Any, kind: str, text: str) -> int:
        known = self._interned[kind]
        found = known.get(text)
        if found is None:
            found = known[text] = len(known) + 1
            entry = getattr(packet.interned_data, kind).add()
            entry.iid = found
            if kind == "debug_annotation_string_values":
                entry.str = text.encode()
            else:
                entry.name = text
        return found


def _uuid(process: Process, number: int) -> int:
    """Unique in the file: the rank, counted from 1, and the track's number in it (0: the rank itself)."""
    return (process.rank_key + 2) << _TRACKS_OF_A_RANK | number
