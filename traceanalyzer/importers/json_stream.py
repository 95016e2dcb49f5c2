"""Reads a Chrome trace of any size in bounded memory and loses no sound event to a broken neighbour.

The event array is cut into blocks of about a megabyte at places that look like the border between two events. A cut is
a guess; the typed decoder proves it: text cut at any other depth, or inside a string, is no valid array. A block that
does not decode is taken apart event by event: each is decoded alone, repaired, or rejected by itself, and its end is found
by its structure (``object_end``), not by what a border looks like. Layout, key order and the place of ``traceEvents`` do
not matter. The rule and its measurements: reference "ingest speed", sections 3.3 to 3.5; the taking apart is ours.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from enum import Enum
from operator import attrgetter
from typing import Any, Protocol

import msgspec
from msgspec import Raw, Struct

from traceanalyzer.errors import InputError

BLOCK_BYTES = 1 << 20
EXACT_LIMIT_US = 2**43
"""Below it a double holds every three-decimal microsecond to the nanosecond (half an ulp is 0.488 ns)."""

_RENAME = {
    "ext": "External id",
    "ext_old": "external id",
    "corr": "correlation",
    "nbytes": "bytes",
    "graph": "graph id",
    "seq_nr": "Sequence number",
    "dims": "Input Dims",
    "dims_old": "Input dims",
    "types": "Input type",
    "concrete": "Concrete Inputs",
    "cname": "Collective name",
    "inn": "In msg nelems",
    "inn_old": "In msg size",
    "outn": "Out msg nelems",
    "outn_old": "Out msg size",
    "gsize": "Group size",
    "insplit": "In split size",
    "outsplit": "Out split size",
    "pgname": "Process Group Name",
    "pgid": "Process Group ID",
    "pgdesc": "Process Group Description",
    "pgranks": "Process Group Ranks",
    "gstart": "Global rank start",
    "gstride": "Global rank stride",
    "grank": "Rank",
    "src": "Src Rank",
    "dst": "Dst Rank",
    "cseq": "Seq",
    "comms": "Comms Id",
    "is_async": "Is asynchronized op",
    "labels": "labels",
    "name": "name",
    # our own ranges (traceanalyzer.collectors.naming)
    "ta_pg": "pg",
    "ta_desc": "desc",
    "ta_ranks": "ranks",
    "ta_size": "size",
    "ta_rank": "rank",
    "ta_seq": "seq",
    "ta_in": "in_elems",
    "ta_out": "out_elems",
    "ta_reduce": "reduce_op",
    "ta_peer": "peer",
    "ta_async": "is_async",
    "ta_root": "root",
    "ta_coalesce": "coalesce",
    "ta_in_splits": "in_splits",
    "ta_out_splits": "out_splits",
    "ta_call": "call",
}

Number = int | float | str | None


class Args(Struct, gc=False, rename=_RENAME):
    """The arguments of an event that the importer uses; all others are skipped while parsing."""

    ext: Number = None
    ext_old: Number = None
    corr: Number = None
    stream: Number = None
    device: Number = None
    nbytes: Number = None
    graph: Number = None
    seq_nr: Number = None
    dims: Raw = Raw(b"")
    dims_old: Raw = Raw(b"")
    types: Raw = Raw(b"")
    concrete: Raw = Raw(b"")
    cname: str | None = None
    dtype: str | None = None
    inn: Number = None
    inn_old: Number = None
    outn: Number = None
    outn_old: Number = None
    gsize: Number = None
    insplit: str | None = None
    outsplit: str | None = None
    pgname: str | None = None
    pgid: Number = None
    pgdesc: str | None = None
    pgranks: str | None = None
    gstart: Number = None
    gstride: Number = None
    grank: Number = None
    src: Number = None
    dst: Number = None
    cseq: Number = None
    comms: Number = None
    is_async: bool | int | str | None = None
    labels: Number = None
    name: Number = None
    ta_pg: Number = None
    ta_desc: Number = None
    ta_ranks: Number = None
    ta_size: Number = None
    ta_rank: Number = None
    ta_seq: Number = None
    ta_in: Number = None
    ta_out: Number = None
    ta_reduce: Number = None
    ta_peer: Number = None
    ta_async: bool | int | str | None = None
    ta_root: Number = None
    ta_coalesce: Number = None
    ta_in_splits: Number = None
    ta_out_splits: Number = None
    ta_call: Number = None


class Event(Struct, gc=False):
    """One trace event. ``ts`` and ``dur`` in microseconds as written; None where the key is missing or null."""

    name: str | int | float | None = None
    ph: str | None = None
    cat: str | None = None
    pid: Number = None
    tid: Number = None
    ts: int | float | None = None
    dur: int | float | None = None
    args: Args | None = None


class ExactEvent(Struct, gc=False):
    """As Event, with times as decimals: for absolute microseconds with decimals, which a double cannot hold."""

    name: str | int | float | None = None
    ph: str | None = None
    cat: str | None = None
    pid: Number = None
    tid: Number = None
    ts: Decimal | None = None
    dur: Decimal | None = None
    args: Args | None = None


AnyEvent = Event | ExactEvent


class Source(Protocol):
    """Where the text comes from: bytes as they become available, b"" at the end; OSError or EOFError where it is damaged.

    What could be read before the damage has been given before the error is raised.
    """

    def read1(self, size: int, /) -> bytes:
        """At most ``size`` bytes."""
        ...


_KEYS = rb"ph|name|cat|pid|tid|ts|dur|id|args|bp|s|tts"
_EVENT_BEGINS = rb"\{\s*\"(?:" + _KEYS + rb')"\s*:'
_EVENT = re.compile(_EVENT_BEGINS)
_HEAD = re.compile(rb'"traceEvents"\s*:\s*\[')
_BARE_LIST = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*(?:\{|\]|$)")
_BARE_LIST_LATER = re.compile(rb"^\s*\[(?=\s*" + _EVENT_BEGINS + rb")", re.MULTILINE)
_BORDER = re.compile(rb"\}\s*(,)\s*" + _EVENT_BEGINS)
_ARRAY_END = re.compile(rb'\}\s*(\])\s*(?:,\s*(?:"|$)|\}|$)')
_BRACKET = re.compile(rb'\](?=\s*(?:,\s*(?:"|$)|\}|$))')
_GAP = re.compile(rb"[\s,]*+")
_TOP_LEVEL_KEY = re.compile(
    rb'\]\s*,\s*"(?:traceName|displayTimeUnit|baseTimeNanoseconds|distributedInfo|deviceProperties|schemaVersion|'
    rb'otherData|metadata|INFO)"\s*:'
)
_MAX_HEAD = 64 << 20
_MAX_OPEN = 8 << 20
_MAX_EVENT = 256 << 20
_LOOK_AHEAD = 8


class EventStream:
    """Iterates over the events of one trace file in lists; afterwards ``meta`` holds the other top-level keys.

    ``exact``: whether an event so far needs decimals; from then on events are ExactEvents.

    ``counts`` says what was repaired or lost: ``events`` (decoded), ``repaired_strings``, ``missing_values`` (inf and
    nan, now null), ``odd_fields`` (of an unexpected type, now null), ``bad_events`` (rejected, with the first few in
    ``bad_samples``), ``head_lost``, ``tail_lost`` (metadata beyond repair), ``cut`` (1 if the file ends early),
    ``torn_events`` (1 if it ends inside an event). ``cut_at`` is the byte offset (in the uncompressed text) after the last
    complete event of a cut file. Raises InputError if the text holds no event array at all.
    """

    def __init__(
        self,
        source: Source,
        *,
        block_bytes: int = BLOCK_BYTES,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.meta: dict[str, Any] = {}
        self.counts: Counter[str] = Counter()
        self.bad_samples: list[str] = []
        self.cut_at: int | None = None
        self.read_error: str | None = None
        self.text_bytes = 0
        self.bare_list = False
        self._source = source
        self._block = block_bytes
        self._progress = progress
        self.exact = False
        self._decoders: dict[bool, tuple[Any, Any]] = {
            False: (msgspec.json.Decoder(list[Event]), msgspec.json.Decoder(Event)),
            True: (msgspec.json.Decoder(list[ExactEvent]), msgspec.json.Decoder(ExactEvent)),
        }

    # reading -----------------------------------------------------------------------------------------------------

    def _read(self, size: int) -> bytes:
        """``size`` bytes; fewer only where the file ends, or where a compressed one is damaged (then read_error says so)."""
        parts: list[bytes] = []
        missing = size
        while missing and self.read_error is None:
            try:
                part = self._source.read1(missing)
            except (EOFError, OSError, ValueError) as error:
                self.read_error = str(error)
                break
            if not part:
                break
            parts.append(part)
            missing -= len(part)
        chunk = b"".join(parts)
        self.text_bytes += len(chunk)
        if self._progress is not None and chunk:
            self._progress(self.text_bytes)
        return chunk

    def __iter__(self) -> Iterator[list[AnyEvent]]:
        rest = self._find_array()
        tail: bytes | None = None
        while tail is None:
            # As much as is carried over already: what has to be looked at again then grows like the file, not its square.
            chunk = self._read(max(self._block, len(rest)))
            if not chunk:
                break
            text = rest + chunk
            cut = self._last_border(text)
            if cut is None:
                rest = text
                if len(text) < _MAX_OPEN:
                    continue
                body, behind = text, b""
            else:
                body, behind = text[: cut.start(1)], text[cut.start(1) :]
            events, left, tail = self._decode(body, final=False)
            if tail is not None:
                tail += behind
            else:
                rest = left + behind
            if events:
                yield events
        if tail is None:
            events, left, tail = self._decode(rest, final=True)
            if tail is None:
                self._note_cut(left)
            if events:
                yield events
        if tail is not None:
            while chunk := self._read(self._block):
                tail += chunk
            self._read_tail(tail)
        if self.read_error is not None:
            self.counts["cut"] = 1

    def _find_array(self) -> bytes:
        """Reads up to the event array; returns the text behind its bracket."""
        buffer = b""
        searched = 0
        while chunk := self._read(max(self._block, len(buffer))):
            buffer += chunk
            if (len(buffer) >= 16 or self.read_error is not None) and _BARE_LIST.match(buffer):
                self.bare_list = True
                return buffer[buffer.index(b"[") + 1 :]
            for match in _HEAD.finditer(buffer, searched):
                meta = self._object(buffer[: match.start()] + b'"_end_":0}')
                if meta is not None:  # None: a key of this name deeper in the metadata
                    self.meta.update({k: v for k, v in meta.items() if k != "_end_"})
                    return buffer[match.end() :]
            searched = max(0, len(buffer) - 64)
            if len(buffer) > _MAX_HEAD:
                break
        return self._find_array_in_damage(buffer)

    def _find_array_in_damage(self, buffer: bytes) -> bytes:
        """No clean head: the first mention of the array behind which an event follows, else a bare list after log lines."""
        if _BARE_LIST.match(buffer):
            self.bare_list = True
            return buffer[buffer.index(b"[") + 1 :]
        for match in _HEAD.finditer(buffer):
            if buffer[match.end() :].lstrip()[:1] in (b"{", b"]", b""):
                self.counts["head_lost"] = 1
                return buffer[match.end() :]
        if listed := _BARE_LIST_LATER.search(buffer):
            self.bare_list = True
            return buffer[listed.end() :]
        if self.read_error is not None:
            raise InputError(f"cannot be read: {self.read_error}. Copy the file again from where it was written.")
        begins = buffer.lstrip()[:40].decode("utf-8", "replace")
        if not begins:
            raise InputError("the file is empty. Copy it again from where it was written, or record it again.")
        raise InputError(
            f"no traceEvents in it (it begins with {begins!r}): this is not a Kineto trace, or it was cut before its events. "
            "Give a file written by torch.profiler's export_chrome_trace or tensorboard_trace_handler."
        )

    @staticmethod
    def _last_border(text: bytes) -> re.Match[bytes] | None:
        window = 1 << 16
        while True:
            last = None
            for last in _BORDER.finditer(text, max(0, len(text) - window)):  # noqa: B007 - the last match is wanted
                pass
            if last is not None or window >= len(text):
                return last
            window *= 8

    def _note_cut(self, left: bytes) -> None:
        torn = left.strip(b" \t\r\n,")
        if self.bare_list and not torn:
            return  # Chrome's own array form may end without the bracket
        self.counts["cut"] = 1
        if torn:
            self.counts["torn_events"] += 1
        self.cut_at = self.text_bytes - (len(left) if torn else 0)

    def _read_tail(self, tail: bytes) -> None:
        """The keys behind the event array."""
        if self.bare_list:
            return
        text = b"{" + tail.strip().removeprefix(b",")
        meta = self._object(text)
        if meta is None:
            self.counts["tail_lost"] = 1
            if object_end(text, 0)[1] is Structure.OPEN:
                self.counts["cut"] = 1
                self.cut_at = self.text_bytes - len(tail)
            meta = self._whole_members(text)
        self.meta.update(meta)

    def _whole_members(self, text: bytes) -> dict[str, Any]:
        """The members of a damaged object that stand before the damage, as far as a few dozen attempts find them."""
        end = len(text)
        for _ in range(64):
            end = text.rfind(b",", 0, end)
            if end < 0:
                break
            meta = self._object(text[:end] + b"}")
            if meta is not None:
                return meta
        return {}

    @staticmethod
    def _object(text: bytes) -> dict[str, Any] | None:
        """A JSON object as a dict, repaired if it must be; None if it does not decode. Text before it is skipped."""
        brace = text.find(b"{")
        while brace >= 0:
            for candidate in (text[brace:], repair(text[brace:], Counter())):
                try:
                    value = msgspec.json.decode(candidate)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    continue
                if isinstance(value, dict):
                    return value
            line = re.compile(rb"^\s*\{", re.MULTILINE).search(text, brace + 1)
            if line is None or brace > 1 << 16:  # log lines before the JSON may hold braces too
                return None
            brace = line.end() - 1
        return None

    # decoding ----------------------------------------------------------------------------------------------------

    def _decode(self, body: bytes, *, final: bool) -> tuple[list[AnyEvent], bytes, bytes | None]:
        """(events, text to carry over, text behind the array's end or None)."""
        if not final:
            events = self._list(body)
            if events is not None:
                return events, b"", None
        else:
            for match in reversed(list(_ARRAY_END.finditer(body, max(0, len(body) - (1 << 16))))[-4:]):
                events = self._list(body[: match.start(1)])
                if events is not None:
                    return events, b"", body[match.end(1) :]
        events, left, tail = self._take_apart(body, final=final)
        self.counts["events"] += len(events)
        return events, left, tail

    def _list(self, body: bytes) -> list[AnyEvent] | None:
        """The events of text that is sound throughout, else None. A comma before the first event is passed over."""
        text = b"[" + body[_GAP.match(body).end() :] + b"]"  # type: ignore[union-attr]  # it matches nothing, too
        try:
            events: list[AnyEvent] = self._decoders[self.exact][0].decode(text)
            if not self.exact and _needs_exact(events):
                self.exact = True
                events = self._decoders[True][0].decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        self.counts["events"] += len(events)
        return events

    def _take_apart(self, body: bytes, *, final: bool) -> tuple[list[AnyEvent], bytes, bytes | None]:
        """As _decode, one event at a time."""
        borders = [m.start(1) for m in _BORDER.finditer(body)]
        at = 0  # the first border behind pos
        events: list[AnyEvent] = []
        pos = 0
        while True:
            pos = _GAP.match(body, pos).end()  # type: ignore[union-attr]  # it matches nothing, too
            if pos == len(body):
                return events, b"", None
            if _BRACKET.match(body, pos):
                return events, b"", body[pos + 1 :]
            while at < len(borders) and borders[at] < pos:
                at += 1
            border = borders[at] if at < len(borders) else len(body)
            if body[pos] != b"{"[0]:
                begins = _EVENT.search(body, pos)
                resume = self._bracket(body, pos, begins.start() if begins else len(body), final=final)
                if resume is None and begins is None and not final and len(body) - pos < _MAX_OPEN:
                    return events, body[pos:], None
                end = resume if resume is not None else begins.start() if begins else len(body)
                self._reject(body[pos:end])
                pos = end
                continue
            event = self._one(body[pos:border])
            if event is not None:
                events.append(event)
                pos = border
                continue
            end, structure = object_end(body, pos)
            if structure is Structure.WHOLE:
                event = self._one(body[pos:end]) or self._mended(body[pos:end])
                if event is not None:
                    events.append(event)
                else:
                    self._reject(body[pos:end])
                pos = end
                continue
            if structure is Structure.OPEN and self._may_go_on(body, pos, final=final):
                return events, body[pos:], None
            event, end = self._broken(body, pos, border, final=final)
            if event is None and end == len(body) and not final and len(body) - pos < _MAX_EVENT:
                return events, body[pos:], None
            if event is not None:
                events.append(event)
            else:
                self._reject(body[pos:end])
            pos = end

    def _may_go_on(self, body: bytes, pos: int, *, final: bool) -> bool:
        """Whether an object without an end is one that is not read whole yet (or that the file's end tore).

        The other reading: it lost its own end, and what follows only seems to lie inside it. Then events follow that are
        sound by themselves.
        """
        if not final and len(body) - pos < _MAX_OPEN:
            return True
        if self._sound_inside(body, pos, len(body)) is not None:
            return False
        return final or len(body) - pos < _MAX_EVENT

    def _broken(self, body: bytes, pos: int, border: int, *, final: bool) -> tuple[AnyEvent | None, int]:
        """(the repaired event or None, where the text goes on) for an event whose structure is broken."""
        for match in _ARRAY_END.finditer(body, pos, border):  # the last event of the array: no border ends it
            event = self._mended(body[pos : match.start(1)])
            if event is not None:
                return event, match.start(1)
        event = self._mended(body[pos:border])
        if event is not None:
            return event, border
        resume = self._sound_inside(body, pos, border)
        if resume is None:
            resume = self._bracket(body, pos, border, final=final)
        return None, border if resume is None else resume

    @staticmethod
    def _bracket(body: bytes, pos: int, end: int, *, final: bool) -> int | None:
        """Where the bracket of the event array stands in text of which nothing else is sure; None if it is not in it.

        Known by a top-level key behind it or, once the whole text is there, by sound metadata behind it.
        """
        if known := _TOP_LEVEL_KEY.search(body, pos, end):
            return known.start()
        for match in _BRACKET.finditer(body, pos, end) if final else ():
            tail = body[match.end() :].strip().removeprefix(b",")
            try:
                msgspec.json.decode(b"{" + (tail or b"}"), type=dict[str, Raw])
            except msgspec.DecodeError:
                continue
            return match.start()
        return None

    def _sound_inside(self, body: bytes, pos: int, end: int) -> int | None:
        """Where a sound event begins in the text of one that lost its end; None if none of the next few does."""
        for match in itertools.islice(_EVENT.finditer(body, pos + 1, end), _LOOK_AHEAD):
            behind, structure = object_end(body, match.start())
            if structure is Structure.WHOLE:
                event = self._one(body[match.start() : behind], count=False)
                if event is not None and event.name is not None and event.ph is not None and event.ts is not None:
                    return match.start()
        return None

    def _one(self, text: bytes, *, count: bool = True) -> AnyEvent | None:
        """One event from its text as it is, or None. ``count``: whether fields that had to be dropped are counted."""
        try:
            event: AnyEvent = self._decoders[self.exact][1].decode(text)
        except msgspec.ValidationError:
            odd = self.counts["odd_fields"]
            found = self._untyped(text)
            if not count:
                self.counts["odd_fields"] = odd
            if found is None:
                return None
            event = found
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if not self.exact and _needs_exact([event]):
            self.exact = True
            return self._one(text, count=count)
        return event

    def _mended(self, text: bytes) -> AnyEvent | None:
        """One event from its repaired text, or None; counts what was repaired."""
        notes: Counter[str] = Counter()
        event = self._one(repair(text, notes))
        if event is not None:
            self.counts.update(notes)
        return event

    def _untyped(self, text: bytes) -> AnyEvent | None:
        """An event with a field of an unexpected type: the event stays, that field becomes None and is counted."""
        try:
            fields = msgspec.json.decode(text, type=dict[str, Raw])
            args = fields.pop("args", None)
            event: AnyEvent = self._fill(ExactEvent if self.exact else Event, fields)
            if args is not None:
                try:
                    event.args = self._fill(Args, msgspec.json.decode(args, type=dict[str, Raw]))
                except msgspec.DecodeError:
                    self.counts["odd_fields"] += 1
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return event

    def _fill(self, kind: type[Any], fields: dict[str, Raw]) -> Any:
        values: dict[str, Any] = {}
        for spec in msgspec.structs.fields(kind):
            if spec.encode_name in fields:
                try:
                    values[spec.name] = msgspec.json.decode(fields[spec.encode_name], type=spec.type, strict=False)
                except msgspec.ValidationError:
                    self.counts["odd_fields"] += 1
        return kind(**values)

    def _reject(self, piece: bytes) -> None:
        self.counts["bad_events"] += 1
        if len(self.bad_samples) < 3:
            self.bad_samples.append(piece.strip()[:120].decode("utf-8", "replace"))


_TS = attrgetter("ts")


def _needs_exact(events: list[AnyEvent]) -> bool:
    times = list(map(_TS, events))
    try:
        if not times or (max(times) < EXACT_LIMIT_US and min(times) > -EXACT_LIMIT_US):
            return False
    except TypeError:  # an event without a time: the long way
        pass
    return any(type(ts) is float and abs(ts) >= EXACT_LIMIT_US for ts in times)


# structure ---------------------------------------------------------------------------------------------------------


class Structure(Enum):
    """How the text of an object ends."""

    WHOLE = "whole"
    OPEN = "open: the text ends inside it"
    BROKEN = "broken: no JSON text goes on like this"


_TOKEN = re.compile(rb'\s*+(?:"(?:[^"\\]++|\\.)*+"|[{}\[\],:]|[^\s{}\[\],:"]++)', re.DOTALL)
_IN_STRING = re.compile(rb'\s*+"')


def object_end(text: bytes, start: int) -> tuple[int, Structure]:
    """Where the object that begins at ``start`` ends: (offset behind it, WHOLE), or (offset of the trouble, OPEN or BROKEN).

    Strict in structure (braces, brackets, commas, colons), lenient in what profilers write wrong inside it: any word is a
    number, any escape and any control byte may stand in a string, a comma may trail.
    """
    stack: list[bytes] = []
    expected = "value"
    pos = start
    while True:
        match = _TOKEN.match(text, pos)
        if match is None:
            torn = _IN_STRING.match(text, pos) is not None
            ok = not torn or expected in ("value", "value or end", "key or end")
            return (len(text), Structure.OPEN) if ok else (pos, Structure.BROKEN)
        token = match[0].lstrip()
        kind = token[:1]
        if kind in (b"}", b"]"):
            opener = b"{" if kind == b"}" else b"["
            ending = expected == "comma or end" or expected == ("key or end" if kind == b"}" else "value or end")
            if not stack or stack[-1] != opener or not ending:
                return pos, Structure.BROKEN
            stack.pop()
            if not stack:
                return match.end(), Structure.WHOLE
            expected = "comma or end"
        elif kind == b",":
            if expected != "comma or end":
                return pos, Structure.BROKEN
            expected = "key or end" if stack[-1] == b"{" else "value or end"
        elif kind == b":":
            if expected != "colon":
                return pos, Structure.BROKEN
            expected = "value"
        elif expected == "key or end" and kind == b'"':
            expected = "colon"
        elif expected in ("value", "value or end"):
            if kind in (b"{", b"["):
                stack.append(kind)
                expected = "key or end" if kind == b"{" else "value or end"
            else:
                expected = "comma or end"
        else:
            return pos, Structure.BROKEN
        pos = match.end()


# repairing ---------------------------------------------------------------------------------------------------------

_STRING = re.compile(rb'"((?:[^"\\]++|\\.)*+)"', re.DOTALL)
_SOUND_ESCAPES = re.compile(rb'(?:[^\\]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_CONTROL = re.compile(rb"[\x00-\x1f]")
_NOT_NUMBERS = re.compile(
    rb"(?<=[:\[,\s])[+-]?(?:nan(?:\([^)]*\))?|inf(?:inity)?|1\.#[a-z]+\d*)(?=\s*[,}\]])", re.IGNORECASE
)
_TRAILING_COMMA = re.compile(rb",\s*(?=[}\]])")


def repair(text: bytes, notes: Counter[str]) -> bytes:
    """Text of one event or object with the damage that profilers are known to write mended; ``notes`` counts it.

    Invalid escapes (Windows paths: then every backslash of that string is literal, so that no ``\\t`` becomes a tab),
    raw control bytes, half surrogates, bytes that are not UTF-8, inf and nan (null), trailing commas, bare quotes inside
    a value, and a backslash in front of the quote that ends a value.
    """
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        text = text.decode("utf-8", "replace").encode()
        notes["repaired_strings"] += 1
    text = _whole_strings(text, notes)

    def mend(match: re.Match[bytes]) -> bytes:
        body = match[1]
        changed = body
        if _SOUND_ESCAPES.fullmatch(body) is None:
            changed = body.replace(b"\\", b"/").replace(b'/"', b"'")
        changed = _LONE_SURROGATE.sub(b"?", _CONTROL.sub(b" ", changed))
        if changed == body:
            return match[0]
        notes["repaired_strings"] += 1
        return b'"' + changed + b'"'

    pieces: list[bytes] = []
    at = 0
    for match in _STRING.finditer(text):  # numbers stand outside strings only
        pieces += [_outside(text[at : match.start()], notes), mend(match)]
        at = match.end()
    pieces.append(_outside(text[at:], notes))
    return b"".join(pieces)


def _outside(text: bytes, notes: Counter[str]) -> bytes:
    text, missing = _NOT_NUMBERS.subn(b"null", text)
    notes["missing_values"] += missing
    return _TRAILING_COMMA.sub(b"", text)


_VALUE_OPEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"\s*:\s*"')
_VALUE_CLOSE = re.compile(rb'"(?=\s*(?:,\s*"|,\s*[\[{\d-]|[}\]]))')
_BARE_QUOTE = re.compile(rb'(?<!\\)"')
_KEY_INSIDE = re.compile(rb'"\s*:')
_ESCAPED_CLOSE = re.compile(rb'\\"(?=\s*(?:,\s*"[^"]*"\s*:|[}\]]))')


def _whole_strings(text: bytes, notes: Counter[str]) -> bytes:
    """Text whose strings begin and end where they should; as it was where no known repair leads there."""
    start = text.find(b"{")
    if start < 0 or object_end(text, start)[1] is Structure.WHOLE:
        return text
    for attempt in (_bare_quotes, lambda t: _ESCAPED_CLOSE.subn(b'/"', t)):
        repaired, count = attempt(text)
        if object_end(repaired, start)[1] is Structure.WHOLE:
            notes["repaired_strings"] += count
            return repaired
    return text


def _bare_quotes(text: bytes) -> tuple[bytes, int]:
    """Escapes quotes that stand inside a value (a group description or a record_function name with a quote in it)."""
    out: list[bytes] = []
    count = at = 0
    while (opened := _VALUE_OPEN.search(text, at)) is not None:
        close = _VALUE_CLOSE.search(text, opened.end())
        if close is None:
            break
        body = text[opened.end() : close.start()]
        if _BARE_QUOTE.search(body) and not _KEY_INSIDE.search(body):
            body = _BARE_QUOTE.sub(rb"\"", body)
            count += 1
        out += [text[at : opened.end()], body, b'"']
        at = close.end()
    out.append(text[at:])
    return b"".join(out), count


_DIGITS = re.compile(r"\s*-?[0-9]{1,20}\s*")


def whole_number(value: object) -> int | None:
    """A whole number from an int, a whole float or digits as text; None for everything else: also for booleans,
    and for what takes more than 64 bits."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        number = value
    elif (isinstance(value, float) and value.is_integer()) or (isinstance(value, str) and _DIGITS.fullmatch(value)):
        number = int(value)
    else:
        return None
    return number if -(2**63) <= number < 2**64 else None
