"""The reader of damaged and odd text: what is sound comes out exactly, what is not is counted, nothing raises."""

from __future__ import annotations

import gzip
import io
import json
import random
import zlib
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traceanalyzer.errors import InputError
from traceanalyzer.importers import json_stream
from traceanalyzer.importers.json_stream import EventStream, Structure, object_end, repair
from traceanalyzer.importers.source import TraceText

# Events made to fool a reader that looks for borders: brackets, borders and keys inside strings and nested lists.
ADVERSARIAL: list[dict[str, Any]] = [
    {"ph": "X", "cat": "cpu_op", "name": 'x}, {"ph": "X", "name": "y', "ts": 1.5, "dur": 2.25, "pid": 1, "tid": 2,
     "args": {"External id": 1}},
    {"ph": "X", "cat": "kernel", "name": 'a\\"}, {"name": {', "ts": 2.5, "dur": 1, "pid": 0, "tid": 7,
     "args": {"nested": [{"name": 1}, {"name": 2}, {"ph": "f"}], "s": '}, {"ph":'}},
    {"ph": "i", "name": "é}\n,\n{", "s": "g", "ts": 3, "pid": "Traces", "tid": "T"},
    {"name": "n", "ph": "M", "ts": 1, "pid": 1, "tid": 0, "args": {"name": "python"}},
    {"ts": 5.001, "ph": "X", "name": "kfirst", "cat": "k", "dur": 0, "pid": 1, "tid": 1,
     "args": {"a": {"args": {}}, "b": [[], [{"ts": 1}, {"ts": 2}]]}},
    # whole events inside an event's arguments
    {"ph": "X", "name": "outer", "ts": 6, "dur": 1, "pid": 1, "tid": 1,
     "args": {"list": [{"ph": "X", "name": "inner", "ts": 1, "dur": 1}, {"name": "inner", "ph": "X", "ts": 2}]}},
    {"ph": "X", "name": 'end}], "traceName": "t"}', "ts": 7, "dur": 1, "pid": 1, "tid": 1, "args": {"l": [{"k": [1]}]}},
]  # fmt: skip
TOP = {
    "schemaVersion": 1,
    "note": 'fake "traceEvents": [ in a string',
    "x": {"pg": [{"name": 1}, {"name": 2}], "traceEvents": [{"ph": "X"}]},
}
TAIL = {
    "traceName": "t]},{",
    "INFO": ["a", "b"],
    "distributedInfo": {"pg_config": [{"name": "a"}, {"name": "b"}]},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "compact": {"separators": (",", ":")},
    "default": {},
    "indent": {"indent": 2},
    "array": {},
}
# The last holds any of these files whole, the first make every cut a guess.
BLOCKS = (1, 7, 64, 200, 333, 1000, 1 << 16)


def read(text: bytes, block: int = 1 << 20) -> tuple[list[Any], EventStream]:
    stream = EventStream(io.BytesIO(text), block_bytes=block)
    return [event for events in stream for event in events], stream


def shape(event: Any) -> tuple[object, ...]:
    """What is compared of an event, from the reader's or from json.loads'."""
    if isinstance(event, dict):
        return event.get("name"), event.get("ph"), event.get("ts"), event.get("dur")
    return event.name, event.ph, event.ts, event.dur


def names(text: bytes, block: int = 1 << 20) -> list[object]:
    return [event.name for event in read(text, block)[0]]


def event(name: str, **more: object) -> str:
    return json.dumps({"ph": "X", "cat": "cpu_op", "name": name, "ts": 1.0, "dur": 2.0, "pid": 1, "tid": 1, **more})


def trace(
    *events: str, head: str = '{"schemaVersion": 1, "traceEvents": [\n', tail: str = '\n], "traceName": "t"}'
) -> bytes:
    return (head + ",\n".join(events) + tail).encode()


# Any layout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(10))
def test_every_layout_and_block_size_gives_what_json_gives(seed: int, layout: str) -> None:
    chance = random.Random(seed)
    for order in range(3):
        events = [chance.choice(ADVERSARIAL) for _ in range(chance.randint(0, 40))]
        whole: Any = (
            events
            if layout == "array"
            else [
                {**TOP, "traceEvents": events, **TAIL},
                {**TOP, **TAIL, "traceEvents": events},
                {"traceEvents": events, **TOP},
            ][order]
        )
        text = json.dumps(whole, **LAYOUTS[layout]).encode()
        for block in BLOCKS:
            found, stream = read(text, block)
            assert [shape(e) for e in found] == [shape(e) for e in events], (order, block)
            assert dict(stream.counts) == ({"events": len(events)} if events else {}) or not events, (order, block)
            if layout != "array":
                assert stream.meta == {k: v for k, v in whole.items() if k != "traceEvents"}, (order, block)


def test_arguments_are_typed_and_others_skipped() -> None:
    [found], _ = read(
        trace(event("k", args={"External id": 7, "Comms Id": 2**64 - 1, "Input Dims": [[2, 3]], "grid": [1, 1, 1]}))
    )
    assert (found.args.ext, found.args.comms, bytes(found.args.dims)) == (7, 18446744073709551615, b"[[2, 3]]")


def test_progress_is_told_in_bytes() -> None:
    text = trace(*(event(str(i)) for i in range(50)))
    told: list[int] = []
    assert sum(map(len, EventStream(io.BytesIO(text), block_bytes=512, progress=told.append))) == 50
    assert told == sorted(told)
    assert told[-1] == len(text)


def test_a_bare_list_may_end_without_its_bracket() -> None:
    text = f"[{event('a')},\n{event('b')},\n".encode()
    found, stream = read(text)
    assert [e.name for e in found] == ["a", "b"]
    assert not stream.counts["cut"]


# Truncation ----------------------------------------------------------------------------------------------------------

SMALL_EVENTS = [*ADVERSARIAL[:5], ADVERSARIAL[6]]


def whole_events_before(text: bytes, cut: int, first: int, ends: list[int]) -> int:
    return sum(end <= cut for end in ends) if cut >= first else 0


@pytest.mark.parametrize("block", [64, 1 << 20])
@pytest.mark.parametrize("layout", ["compact", "indent"])
def test_a_file_cut_at_any_byte_keeps_every_whole_event(layout: str, block: int) -> None:
    texts = [json.dumps(e, **LAYOUTS[layout]) for e in SMALL_EVENTS]
    head, tail = (
        '{"schemaVersion":1,"baseTimeNanoseconds":5,"traceEvents":[\n',
        '\n],"traceName":"t]},{","z":[{"name":1}]}',
    )
    text = (head + ",\n".join(texts) + tail).encode()
    ends, at = [], len(head)
    for one in texts:
        at += len(one.encode())
        ends.append(at)
        at += 2
    for cut in range(len(text) + 1):
        if cut < len(head) - 1:  # cut before the array: there is nothing to read, and the message says so
            with pytest.raises(InputError, match=r"traceEvents|empty"):
                read(text[:cut], block)
            continue
        found, stream = read(text[:cut], block)
        whole = whole_events_before(text, cut, len(head), ends)
        assert [shape(e) for e in found] == [shape(e) for e in SMALL_EVENTS[:whole]], cut
        assert stream.counts["cut"] == (0 if cut == len(text) else 1), cut
        assert not stream.counts["bad_events"], cut
        assert stream.meta["baseTimeNanoseconds"] == 5
        if stream.cut_at is not None:
            assert (ends[whole - 1] if whole else 0) <= stream.cut_at <= cut


def test_a_cut_tail_keeps_its_whole_members() -> None:
    text = trace(event("a"), tail='], "distributedInfo": {"rank": 3}, "baseTimeNanoseconds": 17, "traceName": "abc')
    found, stream = read(text)
    assert [e.name for e in found] == ["a"]
    assert stream.meta["distributedInfo"] == {"rank": 3}
    assert stream.meta["baseTimeNanoseconds"] == 17
    assert stream.counts["cut"] == 1


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def unpacked(path: Path) -> tuple[bytes, str | None]:
    """All text that a file gives, and the error it ends with."""
    parts: list[bytes] = []
    with TraceText(path) as text:
        try:
            while part := text.read1(1 << 16):
                parts.append(part)
        except (EOFError, OSError) as error:
            return b"".join(parts), str(error)
    return b"".join(parts), None


def test_a_gzip_file_cut_anywhere_gives_all_that_can_be_unpacked(tmp_path: Path) -> None:
    chance = random.Random(1)
    text = trace(*(event(f"e{chance.random()}", args={"External id": i}) for i in range(400)))
    packed = gzip.compress(text)
    for cut in [*range(2, 40), *range(40, len(packed), 97), *range(len(packed) - 10, len(packed))]:
        got, error = unpacked(write(tmp_path / "t.json.gz", packed[:cut]))
        possible = zlib.decompressobj(31).decompress(packed[:cut])
        assert possible.startswith(got), cut
        assert len(possible) - len(got) <= 258, cut  # the last symbol of a deflate stream stands for so many bytes
        assert error is not None, cut
        assert "ends early" in error
    assert unpacked(write(tmp_path / "t.json.gz", packed)) == (text, None)


def test_the_events_of_a_cut_gzip_file_are_kept(tmp_path: Path) -> None:
    texts = [event(f"e{i}", args={"External id": i}) for i in range(3000)]
    packed = gzip.compress(trace(*texts), 1)
    with TraceText(write(tmp_path / "t.json.gz", packed[: len(packed) // 2])) as source:
        stream = EventStream(source)
        found = [e.name for events in stream for e in events]
    text = zlib.decompressobj(31).decompress(packed[: len(packed) // 2])
    assert found == [f"e{i}" for i in range(text.count(b"}}"))]
    assert len(found) > 1000
    assert stream.counts["cut"] == 1
    assert stream.counts["bad_events"] == 0


def test_gzip_members_and_padding_behind_them_are_read_as_gzip_reads_them(tmp_path: Path) -> None:
    path = write(tmp_path / "t.gz", gzip.compress(b"abc") + gzip.compress(b"def") + bytes(512))
    assert unpacked(path) == (b"abcdef", None)
    assert unpacked(write(tmp_path / "plain", b"abc")) == (b"abc", None)
    assert unpacked(write(tmp_path / "empty", b"")) == (b"", None)


def test_flipped_bytes_in_a_gzip_file_never_raise_and_are_told(
    tmp_path: Path, import_files: Callable[..., Any]
) -> None:
    chance = random.Random(3)
    text = trace(*(event(f"e{chance.random()}", args={"External id": i}) for i in range(300)))
    packed = gzip.compress(text)
    statuses = []
    for n, position in enumerate([4, 9, 11, 15, *chance.sample(range(20, len(packed)), 16), len(packed) - 6]):
        damaged = bytearray(packed)
        damaged[position] ^= 1 << chance.randrange(8)
        result = import_files([write(tmp_path / f"rank{n}.json.gz", bytes(damaged))]).result
        statuses.append(result.status)
        if result.status == "refused":
            assert "damaged" in result.files[0].reason or "traceEvents" in result.files[0].reason
            assert result.out is None
    # bytes 4 and 9 of the header (time, system) are covered by no checksum and change nothing
    assert statuses[:2] == ["complete", "complete"]
    assert "complete" not in statuses[2:]
    assert statuses[-1] == "partial"


def test_the_hash_is_that_of_the_file_as_it_lies_on_disk(tmp_path: Path) -> None:
    import hashlib

    packed = gzip.compress(b"x" * 100_000) + b"behind"
    with TraceText(write(tmp_path / "t.gz", packed)) as text:
        while text.read1(4096):
            pass
        text.drain()
        assert text.sha256 == hashlib.sha256(packed).hexdigest()
        assert text.packed_bytes == len(packed)


# One damaged event ---------------------------------------------------------------------------------------------------

# name: (the damaged event's text, its name once read, what was counted)
MENDED: dict[str, tuple[str, object, dict[str, int]]] = {
    "control_byte": (event("aXb").replace("X", "X", 1).replace("aXb", "a\x01b"), "a b", {"repaired_strings": 1}),
    "raw_newline_and_tab": (event("a_b_c").replace("a_b_c", "a\nb\tc"), "a b c", {"repaired_strings": 1}),
    "windows_path": (event("PATH").replace("PATH", r"C:\Users\train.py"), "C:/Users/train.py", {"repaired_strings": 1}),
    "accidental_escape": (event("PATH").replace("PATH", r"C:\dumps\new"), "C:/dumps/new", {"repaired_strings": 1}),
    "path_ends_with_backslash": (
        event("PATH").replace("PATH", "C:\\dir\\"), "C:/dir/", {"repaired_strings": 2}),
    "half_surrogate": (event("SUR").replace("SUR", r"a\ud83db"), "a?b", {"repaired_strings": 1}),
    "bare_quote": (event("QUO").replace("QUO", 'quo"te'), 'quo"te', {"repaired_strings": 1}),
    "bare_quotes_around": (event("QUO").replace("QUO", 'a "b" c'), 'a "b" c', {"repaired_strings": 1}),
    "inf": (event("n").replace("2.0", "inf"), "n", {"missing_values": 1}),
    "minus_nan_and_infinity": (event("n", args={"a": [1]}).replace("[1]", "[-nan, Infinity, -Infinity, NaN]"), "n",
                               {"missing_values": 4}),
    "windows_nan": (event("n", args={"a": 1}).replace("1}", "-nan(ind)}").replace("2.0", "1.#INF"), "n",
                    {"missing_values": 2}),
    "trailing_commas": (event("n", args={"a": [1]}).replace("[1]}", "[1,],}"), "n", {}),
}  # fmt: skip


@pytest.mark.parametrize("block", [16, 1 << 20])
@pytest.mark.parametrize("kind", MENDED)
def test_known_damage_is_mended_and_counted(kind: str, block: int) -> None:
    damaged, name, counts = MENDED[kind]
    for events, expected in (
        ((event("before"), damaged, event("after")), ["before", name, "after"]),
        ((damaged, event("after")), [name, "after"]),
        ((event("before"), damaged), ["before", name]),
        ((damaged,), [name]),
    ):
        found, stream = read(trace(*events), block)
        assert [e.name for e in found] == expected
        assert dict(+stream.counts) == {"events": len(events), **counts}
        assert stream.meta["traceName"] == "t"
    assert found[0].ts == 1.0


def test_bad_utf8_is_replaced() -> None:
    text = trace(event("before"), event("BAD"), event("after")).replace(b"BAD", b"a\xff\xfeb")
    found, stream = read(text)
    assert [e.name for e in found] == ["before", "a\ufffd\ufffdb", "after"]
    assert stream.counts["repaired_strings"] == 1


def test_sound_escapes_are_not_repaired_beside_damage() -> None:
    text = event("n", args={"a": "\\u0041\\\\users\\n"}).replace("2.0", "nan").encode()
    notes: Any = json_stream.Counter()
    assert msgspec.json.decode(repair(text, notes))["args"]["a"] == "\\u0041\\\\users\\n"
    assert dict(+notes) == {"missing_values": 1}


HOPELESS = {
    "missing_value": event("bad").replace("2.0", ""),
    "missing_colon": event("bad").replace('"ts":', '"ts"'),
    "lost_middle": event("bad").replace(', "ts": 1.0, "dur": 2.0, "pid"', ' "pid'),
    "lost_end": event("bad", args={"a": [1, 2]})[:-4],
    "half": event("bad")[:30],
    "words": "WARNING: profiler overflow",
    "log_line": "[W123 kineto.cpp:1] INFO: dropped } events {",
    "wrong_bracket": event("bad", args={"a": [1]}).replace("[1]", "[1}"),
    "a_number": "12",
    "a_string": '"text"',
}


@pytest.mark.parametrize("block", [16, 1 << 20])
@pytest.mark.parametrize("kind", HOPELESS)
def test_what_is_beyond_repair_is_rejected_alone(kind: str, block: int) -> None:
    sound = [event(f"s{i}", args={"External id": i, "list": [{"k": 1}]}) for i in range(12)]
    # Behind an event that lost its end the array's own end seems to close it: that is read as a cut, see below.
    for place in (0, 5) if kind == "lost_end" else (0, 5, 12):
        text = trace(*sound[:place], HOPELESS[kind], *sound[place:])
        found, stream = read(text, block)
        assert [e.name for e in found] == [f"s{i}" for i in range(12)], place
        assert stream.counts["bad_events"] == 1, place
        assert len(stream.bad_samples) == 1
        assert not stream.counts["cut"]
        assert stream.meta["traceName"] == "t"


def test_a_last_event_without_its_end_is_told_as_a_cut() -> None:
    found, stream = read(trace(event("a"), HOPELESS["lost_end"]))
    assert [e.name for e in found] == ["a"]
    assert (stream.counts["cut"], stream.counts["torn_events"]) == (1, 1)


@given(
    data=st.data(),
    count=st.integers(1, 8),
    block=st.sampled_from([32, 256, 1 << 20]),
    compact=st.booleans(),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_one_broken_event_never_loses_a_sound_one(data: st.DataObject, count: int, block: int, compact: bool) -> None:
    """One event loses, gains or changes a few bytes; every other one comes out, in order."""
    layout = LAYOUTS["compact" if compact else "default"]
    made = [
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": f"s{i}",
            "ts": i + 0.5,
            "dur": 1,
            "args": {"External id": i, "l": [{"k": "v"}]},
        }
        for i in range(count)
    ]
    texts = [json.dumps(e, **layout) for e in made]
    broken = data.draw(st.integers(0, count - 1))
    victim = texts[broken]
    at = data.draw(st.integers(0, len(victim) - 1))
    kind = data.draw(st.sampled_from(["drop", "insert", "change", "cut"]))
    bytes_in = data.draw(st.sampled_from(['"', "\\", "{", "}", "[", "]", ",", ":", "nan", "\x00", "x", '"}', "é"]))
    if kind == "drop":
        victim = victim[:at] + victim[at + data.draw(st.integers(1, 5)) :]
    elif kind == "insert":
        victim = victim[:at] + bytes_in + victim[at:]
    elif kind == "change":
        victim = victim[:at] + bytes_in + victim[at + 1 :]
    else:
        victim = victim[:at]
    texts[broken] = victim
    found, stream = read(trace(*texts), block)
    sound = [f"s{i}" for i in range(count) if i != broken]
    kept = [e.name for e in found if e.name in sound]
    assert kept == sound, victim
    # one that lost its end at the very end of the array takes the metadata along, and is told as a cut
    assert stream.meta.get("traceName") == "t" or (stream.counts["cut"] and broken == count - 1), victim


@given(
    events=st.lists(
        st.fixed_dictionaries(
            {"ph": st.sampled_from("XMi"), "name": st.text(max_size=12), "ts": st.integers(0, 10**6)},
            optional={"args": st.dictionaries(st.text(max_size=6), st.recursive(
                st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=8),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
                max_leaves=6), max_size=4)},
        ),
        max_size=6,
    ),
    block=st.integers(1, 400),
    indent=st.sampled_from([None, 1]),
)  # fmt: skip
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_json_comes_out_as_it_went_in(events: list[dict[str, Any]], block: int, indent: int | None) -> None:
    text = json.dumps({"a": [{"name": 1}], "traceEvents": events, "z": {"ph": []}}, indent=indent).encode()
    found, stream = read(text, block)
    assert [shape(e) for e in found] == [shape(e) for e in events]
    assert stream.meta == {"a": [{"name": 1}], "z": {"ph": []}}
    assert not +stream.counts - json_stream.Counter(events=len(events), odd_fields=10**6)


# Odd files -----------------------------------------------------------------------------------------------------------


def test_a_byte_order_mark_and_log_lines_before_the_json_are_skipped() -> None:
    logs = (
        "[W1023 10:00:00.1 init.cpp:42] warning { braces } in it\nSTAGE:2023-01-01 12:00:00 output_json.cpp:417] Done\n"
    )
    for before in ("\ufeff", logs, "\ufeff" + logs):
        found, stream = read(before.encode() + trace(event("a"), event("b")), 64)
        assert [e.name for e in found] == ["a", "b"]
        assert stream.meta == {"schemaVersion": 1, "traceName": "t"}
    assert names(logs.encode() + f"[{event('a')},\n{event('b')}]".encode(), 64) == ["a", "b"]
    assert names(b"\xef\xbb\xbf" + f"[{event('a')}]".encode()) == ["a"]


def test_a_quote_in_the_leading_metadata_does_not_hide_the_events() -> None:
    text = trace(event("a"), head='{"note": "quo"te", "distributedInfo": {"rank": 3}, "traceEvents": [')
    found, stream = read(text, 32)
    assert [e.name for e in found] == ["a"]
    assert stream.meta["distributedInfo"] == {"rank": 3}
    assert stream.meta["note"] == 'quo"te'


def test_leading_metadata_beyond_repair_is_told() -> None:
    found, stream = read(trace(event("a"), head='{"x": [1, 2}, "traceEvents": ['))
    assert [e.name for e in found] == ["a"]
    assert stream.counts["head_lost"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "not a Kineto trace"),
        (b'{"schemaVersion": 1, "entries": []}', "no traceEvents in it"),
        (b"just text", "begins with 'just text'"),
        (b'{"schemaVersion": 1, "trac', "cut before its events"),
    ],
)
def test_what_holds_no_events_is_refused_with_a_reason(text: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(text)


def test_no_events_are_no_error() -> None:
    for text in (b'{"traceEvents": []}', b'{"traceEvents":[ ],"a":1}', b"[]", b" [ \n ]"):
        found, stream = read(text)
        assert (found, dict(+stream.counts)) == ([], {})


def test_a_huge_event_is_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "_MAX_OPEN", 1 << 12)
    huge = event("huge", args={"External id": 1, "Call stack": "frame;" * 20_000, "l": [[1, {"a": "}, {"}]] * 3000})
    text = trace(event("a"), huge, event("b"))
    for block in (1000, 1 << 16, 1 << 20):
        found, stream = read(text, block)
        assert [e.name for e in found] == ["a", "huge", "b"]
        assert dict(stream.counts) == {"events": 3}


def test_a_damaged_event_does_not_carry_the_file_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that lost its end seems to hold all that follows: past a limit that reading is given up."""
    monkeypatch.setattr(json_stream, "_MAX_OPEN", 1 << 12)
    sound = [event(f"s{i}") for i in range(500)]
    lost = event("bad", args={"a": [1, 2]})[:-3]
    found, stream = read(trace(*sound[:100], lost, *sound[100:]), 1000)
    assert [e.name for e in found] == [f"s{i}" for i in range(500)]
    assert stream.counts["bad_events"] == 1


def test_of_duplicate_keys_the_last_counts() -> None:
    [found], _ = read(b'{"traceEvents": [{"ph": "X", "name": "a", "name": "b", "ts": 1, "ts": 2, "dur": 3}]}')
    assert (found.name, found.ts) == ("b", 2)


def test_fields_of_an_odd_type_are_null_and_the_event_stays() -> None:
    text = trace(
        event("before"),
        '{"ph": "X", "name": {"a": 1}, "ts": "12.5", "dur": [1], "pid": true, "tid": null, "args": {"External id": [1],'
        ' "stream": "7", "Collective name": 5}}',
        '{"ph": "X", "name": "n", "ts": 1, "args": [1, 2]}',
        event("after"),
    )
    found, stream = read(text)
    odd = found[1]
    assert (odd.name, odd.ts, odd.dur, odd.pid, odd.tid) == (None, 12.5, None, None, None)
    assert (odd.args.ext, odd.args.stream, odd.args.cname) == (None, "7", None)
    assert (found[2].name, found[2].args) == ("n", None)
    assert [e.name for e in found][::3] == ["before", "after"]
    assert stream.counts["odd_fields"] == 6  # name, dur, pid, External id, Collective name; args


def test_absolute_microseconds_with_decimals_are_read_as_decimals() -> None:
    first, second = "1767230718240123.456", "1767230718240123.607"
    text = trace(event("a").replace("1.0", first), event("b").replace("1.0", second))
    found, _ = read(text, 64)
    assert [e.ts for e in found] == [Decimal(first), Decimal(second)]


# Structure -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "end", "structure"),
    [
        (b'{}', 2, Structure.WHOLE),
        (b'{"a": [1, {"b": "}"}], "c": nan,} tail', 33, Structure.WHOLE),
        (b'{"a": "x\\"}"}', 13, Structure.WHOLE),
        (b'{"a": [', 7, Structure.OPEN),
        (b'{"a', 3, Structure.OPEN),
        (b'{"a": 1, ', 9, Structure.OPEN),
        (b'{"a": 1 "b', 7, Structure.BROKEN),
        (b'{"a" 1}', 4, Structure.BROKEN),
        (b'{"a": }', 5, Structure.BROKEN),
        (b'{1: 2}', 1, Structure.BROKEN),
        (b'{"a": [1}', 8, Structure.BROKEN),
        (b'{"a": 1, {"b": 1}}', 8, Structure.BROKEN),
        (b'{"a"}', 4, Structure.BROKEN),
        (b'{,}', 1, Structure.BROKEN),
        (b'{"a":: 1}', 5, Structure.BROKEN),
    ],
)  # fmt: skip
def test_the_end_of_an_object(text: bytes, end: int, structure: Structure) -> None:
    assert object_end(text, 0) == (end, structure)


@given(st.recursive(st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=6),
                    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
                    max_leaves=12), st.sampled_from([None, 2]))  # fmt: skip
@settings(max_examples=150, deadline=None, derandomize=True)
def test_every_prefix_of_an_object_is_open_and_the_whole_is_whole(value: object, indent: int | None) -> None:
    text = json.dumps({"v": value, "w": 1}, indent=indent).encode()
    assert object_end(text + b", {", 0) == (len(text), Structure.WHOLE)
    for cut in range(1, len(text)):
        assert object_end(text[:cut], 0) == (cut, Structure.OPEN)


@pytest.mark.parametrize(
    ("value", "number"),
    [(5, 5), (5.0, 5), (5.5, None), ("7", 7), (" -7 ", -7), ("--7", None), ("", None), ("x", None), (True, None),
     (None, None), ([1], None), (float("inf"), None), (float("nan"), None), ("²", None), (2**64 - 1, 2**64 - 1)],
)  # fmt: skip
def test_whole_numbers(value: object, number: int | None) -> None:
    assert json_stream.whole_number(value) == number
