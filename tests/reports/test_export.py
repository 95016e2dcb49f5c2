"""Exported timelines: the track tree, slices, flows and counters of a small run to the ns, and of a recorded one."""

from __future__ import annotations

import gzip
import io
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackDescriptor, TrackEvent

from traceanalyzer.diff import diff
from traceanalyzer.errors import InputError
from traceanalyzer.importers.spool import RunWriter, table_of
from traceanalyzer.job import Job, read_job
from traceanalyzer.reports.export import chrome, perfetto
from traceanalyzer.reports.export.tracks import LAUNCH_FLOWS, Slice, Timeline, nested
from traceanalyzer.run import Run

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "megatron_tp2_sp"


# reading what was written -----------------------------------------------------------------------------------------------


@dataclass
class Shown:
    """One slice as a viewer reads it: begin and end of its track, paired as a stack."""

    start: int
    end: int
    name: str
    category: str
    args: dict[str, Any]
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


@dataclass
class Decoded:
    """A trace: track names with their parents in the order of their ranks, slices and counters by (process, track)."""

    tree: dict[str, list[str]] = field(default_factory=dict)
    slices: dict[tuple[str, str], list[Shown]] = field(default_factory=lambda: defaultdict(list))
    counters: dict[tuple[str, str], list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    def every(self) -> Iterator[tuple[str, str, Shown]]:
        for (process, track), found in self.slices.items():
            for one in found:
                yield process, track, one


def decode(data: bytes) -> Decoded:
    """Reads a Perfetto trace as its own reader would: packet by packet, with interned strings of the sequence."""
    trace = Trace()
    trace.ParseFromString(data)
    first = trace.packet[0]
    assert first.sequence_flags == first.SEQ_INCREMENTAL_STATE_CLEARED
    assert {c.clock_id: c.timestamp for c in first.clock_snapshot.clocks} == {
        6: first.clock_snapshot.clocks[0].timestamp,
        1: first.clock_snapshot.clocks[0].timestamp,
    }
    root = trace.packet[1].track_descriptor
    assert root.uuid == 0
    assert root.process_ordering == TrackDescriptor.PROCESS_ORDERING_EXPLICIT
    assert root.thread_ordering == TrackDescriptor.THREAD_ORDERING_EXPLICIT
    known: dict[int, Any] = {}
    texts: dict[str, dict[int, str]] = {n: {} for n in ("name", "category", "arg", "value")}
    found, stacks = Decoded(), defaultdict(list)
    for packet in trace.packet[2:]:
        assert packet.trusted_packet_sequence_id == 1
        assert packet.sequence_flags == packet.SEQ_NEEDS_INCREMENTAL_STATE
        texts["name"].update((e.iid, e.name) for e in packet.interned_data.event_names)
        texts["category"].update((e.iid, e.name) for e in packet.interned_data.event_categories)
        texts["arg"].update((e.iid, e.name) for e in packet.interned_data.debug_annotation_names)
        texts["value"].update((e.iid, e.str.decode()) for e in packet.interned_data.debug_annotation_string_values)
        if packet.HasField("track_descriptor"):
            told = packet.track_descriptor
            assert told.uuid not in known
            known[told.uuid] = told
            continue
        event, told = packet.track_event, known[packet.track_event.track_uuid]
        key = known[told.parent_uuid].process.process_name, told.name
        if event.type == TrackEvent.TYPE_COUNTER:
            found.counters[key].append((packet.timestamp, event.counter_value))
        elif event.type == TrackEvent.TYPE_SLICE_END:
            stacks[key].pop().end = packet.timestamp
        else:
            one = Shown(
                packet.timestamp,
                packet.timestamp,
                texts["name"][event.name_iid],
                texts["category"][event.category_iids[0]],
                {texts["arg"][a.name_iid]: value_of(a, texts["value"]) for a in event.debug_annotations},
                tuple(event.flow_ids),
                tuple(event.terminating_flow_ids),
            )
            found.slices[key].append(one)
            if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                stacks[key].append(one)
    assert not any(stacks.values())
    processes = sorted((t for t in known.values() if t.HasField("process")), key=lambda t: t.sibling_order_rank)
    for top in processes:
        below = [t for t in known.values() if t.parent_uuid == top.uuid]
        assert all(t.thread.pid == top.process.pid for t in below if t.HasField("thread"))
        assert all(t.HasField("thread") != t.HasField("counter") for t in below)
        found.tree[top.process.process_name] = [t.name for t in sorted(below, key=lambda t: t.sibling_order_rank)]
    return found


def value_of(annotation: Any, texts: Mapping[int, str]) -> Any:
    kind = annotation.WhichOneof("value")
    value = getattr(annotation, kind)
    return texts[value] if kind == "string_value_iid" else value


def written(timeline: Timeline) -> Decoded:
    out = io.BytesIO()
    perfetto.write(timeline, out)
    return decode(out.getvalue())


def events(timeline: Timeline) -> tuple[int, list[dict[str, Any]]]:
    """Chrome's events with ts and dur in ns, and the base of ts."""
    out = io.BytesIO()
    chrome.write(timeline, out)
    document = json.loads(out.getvalue(), parse_float=str)
    found = document["traceEvents"]
    for event in found:
        for name in ("ts", "dur"):
            if name in event:
                whole, _, rest = event[name].partition(".")
                assert len(rest) == 3
                event[name] = int(whole) * 1000 + int(rest)
    return document["baseTimeNanoseconds"], found


# a run of two ranks -----------------------------------------------------------------------------------------------------

T = 1_700_000_000_000_000_000
"""Unix ns: too large for a double to hold the last digits."""


def rank_rows(rank: int, ahead: int = 0) -> dict[str, list[dict[str, Any]]]:
    """One step of one rank: a gemm, an all-reduce, half of it behind another gemm, and their launches; times from T."""
    common = {"rank": rank, "source": "kineto"}
    kernel = {**common, "device": 0, "completeness": "full"}
    host = {**common, "pid": 10, "tid": 11}
    late = 7 * rank  # rank 1 comes later to the all-reduce

    def at(ns: int) -> int:
        return T + ahead + ns

    return {
        "comm_record": [
            {
                **host,
                "call_id": 0,
                "coalesce_id": 0,
                "op": "all_reduce",
                "op_raw": "all_reduce",
                "group_id": "3",
                "group_size": 2,
                "seq": 9,
                "is_p2p": False,
                "reduce_op": "sum",
                "dtype": "bfloat16",
                "in_elems": 1024,
                "out_elems": 1024,
                "start_ns": at(2_001 + late),
                "dur_ns": 1_000 - late,
                "t_issue_ns": at(103),
                "t_issue_end_ns": at(109),
                "time_source": "kernel",
                "completeness": "full",
                "call_path": ["ta:forward"],
            }
        ],
        "cpu_op": [
            {
                **host,
                "name": "cudaLaunchKernel",
                "category": "cuda_runtime",
                "start_ns": at(50),
                "dur_ns": 5,
                "correlation": 1,
            }
        ],
        "kernel": [
            {
                **kernel,
                "stream": 7,
                "name": 'gemm "<script>"',
                "kernel_class": "gemm",
                "start_ns": at(1_000),
                "dur_ns": 1_001,
                "correlation": 1,
            },
            {
                **kernel,
                "stream": 20,
                "name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
                "kernel_class": "comm",
                "kernel_op": "all_reduce",
                "coalesce_id": 0,
                "start_ns": at(2_001 + late),
                "dur_ns": 1_000 - late,
            },
            {
                **kernel,
                "stream": 7,
                "name": "gemm",
                "kernel_class": "gemm",
                "start_ns": at(2_501),
                "dur_ns": 700,
            },
            {**kernel, "stream": 7, "name": "lost", "kernel_class": "gemm"},
        ],
        "process_group": [
            {
                **common,
                "group_id": "3",
                "name": "3",
                "description": "TENSOR_MODEL_PARALLEL_GROUP",
                "ranks": [0, 1],
                "group_size": 2,
                "ranks_source": "header",
            }
        ],
        "rank": [
            {
                **common,
                "world_size": 2,
                "window_start_ns": at(1_000),
                "window_end_ns": at(3_201),
                "host_start_ns": at(0),
                "import_status": "complete",
            }
        ],
        "span": [
            {**host, "name": "ProfilerStep#4", "category": "user_annotation", "start_ns": at(0), "dur_ns": 4_000},
            {**host, "name": "ta:forward", "category": "user_annotation", "start_ns": at(10), "dur_ns": 2_990},
        ],
    }


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes the rows of ranks as one run table."""

    def write(*parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> Path:
        path = tmp_path / "run.parquet"
        kinds = sorted({kind for part in parts for kind in part})
        with RunWriter(path, {}) as out:
            for kind in kinds:
                out.write(kind, [table_of(kind, [row for part in parts for row in part.get(kind, [])])])
        return path

    return write


JOB = Job(world_size=2, tensor_model_parallel_size=2)

OF_CALL = {
    "role": "tp",
    "role_evidence": "description",
    "op": "all_reduce",
    "step": 4,
    "phase": "forward",
    "dtype": "bfloat16",
    "group_id": "3",
    "group_size": 2,
    "seq": 9,
    "reduce_op": "sum",
    "call_id": 0,
    "time_source": "kernel",
    "completeness": "full",
}


def test_two_ranks_to_the_ns(write_run: Callable[..., Path]) -> None:
    with Run.open(write_run(rank_rows(0), rank_rows(1))) as run:
        timeline = Timeline.of(run, JOB, aligned=False)
        found = written(timeline)
    tracks = ["steps", "passes", "compute stream 7", "communication tp", "host thread 11", "exposed tp"]
    assert found.tree == {"rank 0  tp0": tracks, "rank 1  tp1": tracks}

    mine = {track: shown for (process, track), shown in found.slices.items() if process == "rank 1  tp1"}
    step = {"step": 4, "step_evidence": "profiler_step", "step_complete": True}
    assert mine["steps"] == [Shown(T, T + 4_000, "step 4", "step", step)]
    (launch_kernel,) = mine["compute stream 7"][0].ends
    first, second = mine["compute stream 7"]
    assert (first.start, first.end, first.name, first.category) == (T + 1_000, T + 2_001, 'gemm "<script>"', "gemm")
    assert (second.start, second.end, second.name, second.ends) == (T + 2_501, T + 3_201, "gemm", ())
    assert (first.args["stream"], first.args["correlation"]) == (7, 1)

    call, kernel = mine["communication tp"]
    (launch_call,) = (f for f in call.ends if f >= LAUNCH_FLOWS)
    assert call == Shown(
        T + 2_008,
        T + 3_001,
        "all_reduce",
        "comm",
        # both end at T + 3001; rank 1 comes last, so all of its time is transfer
        {**OF_CALL, "match_id": 0, "calls": 1, "payload_bytes": 2048, "transfer_ns": 993, "waiting_ns": 0},
        (),
        call.ends,
    )
    assert set(call.ends) == {1, launch_call}
    assert (kernel.start, kernel.end, kernel.category) == (T + 2_008, T + 3_001, "comm")
    theirs = found.slices["rank 0  tp0", "communication tp"][0]
    assert (theirs.begins, theirs.args["transfer_ns"], theirs.args["waiting_ns"]) == ((1,), 993, 7)

    by_name = {s.name: s for s in mine["host thread 11"]}
    assert list(by_name) == ["ProfilerStep#4", "ta:forward", "cudaLaunchKernel", "issue all_reduce"]
    assert (by_name["cudaLaunchKernel"].start, by_name["cudaLaunchKernel"].end) == (T + 50, T + 55)
    assert by_name["cudaLaunchKernel"].begins == (launch_kernel,)
    assert by_name["issue all_reduce"].begins == (launch_call,)
    assert (by_name["issue all_reduce"].start, by_name["issue all_reduce"].end) == (T + 103, T + 109)

    # a gemm runs until 2001 and again from 2501
    assert found.counters["rank 0  tp0", "exposed tp"] == [(T + 2_001, 1), (T + 2_501, 0)]
    assert found.counters["rank 1  tp1", "exposed tp"] == [(T + 2_008, 1), (T + 2_501, 0)]
    assert +timeline.left_out == {"kernels without a start": 2}
    assert timeline.counts["slices"] == sum(1 for _ in found.every())


def test_aligned_clocks_show_one_end(write_run: Callable[..., Path]) -> None:
    """Rank 1's clock is ahead by 5 ms; the call ends on both at once."""
    path = write_run(rank_rows(0), rank_rows(1, ahead=5_000_000))
    with Run.open(path) as run:
        aligned, recorded = written(Timeline.of(run, JOB)), written(Timeline.of(run, JOB, aligned=False))
    key = "rank 1  tp1", "communication tp"
    assert (recorded.slices[key][0].start, recorded.slices[key][0].end) == (T + 5_002_008, T + 5_003_001)
    call = aligned.slices[key][0]
    assert call.end == aligned.slices["rank 0  tp0", "communication tp"][0].end == T + 3_001
    assert (call.args["recorded_start_ns"], call.args["recorded_dur_ns"]) == (T + 5_002_008, 993)
    assert "recorded_start_ns" not in recorded.slices[key][0].args
    assert aligned.slices["rank 1  tp1", "steps"][0].start == T


def test_ranks_and_steps_leave_out_and_say_so(write_run: Callable[..., Path]) -> None:
    with Run.open(write_run(rank_rows(0), rank_rows(1))) as run:
        timeline = Timeline.of(run, JOB, ranks=[1, 5], steps=[4], host=False, aligned=False)
        found = written(timeline)
        assert list(found.tree) == ["rank 1  tp1"]
        assert timeline.notes == ["ranks 5 are not in the run"]
        assert +timeline.left_out == {
            "kernels outside of the chosen steps": 1,  # without a start it lies in no step
            "operators and ranges of the host, which were not asked for": 3,
            "flows of matched calls, all but one rank of which are not shown": 1,
        }
        assert not any(s.begins or s.ends for _, _, s in found.every())
        with pytest.raises(InputError, match=r"none of the ranks asked for\. The run has ranks 0-1\."):
            Timeline.of(run, JOB, ranks=[7])
        with pytest.raises(InputError, match=r"the run has steps 4\."):
            Timeline.of(run, JOB, steps=[3])


def test_names_of_any_kind(write_run: Callable[..., Path]) -> None:
    rows = rank_rows(0)
    names = ['"; <script>alert(1)</script>', "x" * 10_000, "tab\tand\nline, back\\slash, \u00e9\U0001f600", "'"]
    rows["cpu_op"] = [
        {"rank": 0, "source": "kineto", "tid": 11, "name": n, "start_ns": T + 200 + 10 * i, "dur_ns": 5}
        for i, n in enumerate(names)
    ]
    with Run.open(write_run(rows)) as run:
        timeline = Timeline.of(run, JOB)
        ours = {"ProfilerStep#4", "ta:forward", "issue all_reduce"}
        shown = [s.name for s in written(timeline).slices["rank 0  tp0", "host thread 11"] if s.name not in ours]
        assert shown == names
        _, found = events(timeline)
        assert [e["name"] for e in found if e["ph"] == "X" and e["cat"] == "cpu_op"] == names


def test_crossing_slices_go_to_another_lane() -> None:
    def piece(start: int, end: int) -> Slice:
        return Slice(start, end, f"{start}-{end}", "", {})

    outer, inner, crossing, after, instant = piece(0, 10), piece(2, 10), piece(5, 12), piece(10, 11), piece(3, 3)
    assert nested([after, crossing, inner, outer, instant]) == [[outer, inner, instant, after], [crossing]]


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "perfetto.protos.perfetto.trace.perfetto_trace_pb2", None)
    with pytest.raises(InputError, match=r"pip install 'traceanalyzer\[perfetto\]'\. --chrome FILE writes the same"):
        perfetto.messages()


# the recorded run -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The recorded run of two ranks on CPUs."""
    from traceanalyzer.importers import import_traces

    out = tmp_path_factory.mktemp("export") / "run.parquet"
    import_traces([FIXTURE / "rank0.json.gz", FIXTURE / "rank1.json.gz"], out)
    with Run.open(out) as run:
        yield run


@pytest.fixture(scope="module")
def timeline(recorded: Run) -> Timeline:
    job = read_job(FIXTURE / "job.toml")
    return Timeline.of(recorded, job, diff(recorded, job), aligned=False)


@pytest.fixture(scope="module")
def found(timeline: Timeline) -> Decoded:
    return written(timeline)


def test_every_event_of_the_trace_is_shown_with_its_time(found: Decoded) -> None:
    """Against the trace itself: names, starts and ends of all operators and ranges, ns from its microseconds."""
    for rank in (0, 1):
        trace = json.loads(gzip.decompress((FIXTURE / f"rank{rank}.json.gz").read_bytes()), parse_float=str)
        base = int(trace["baseTimeNanoseconds"])

        def ns(text: str) -> int:
            whole, _, rest = str(text).partition(".")
            return int(whole) * 1000 + int(rest.ljust(3, "0") or 0)

        wanted = sorted(
            (base + ns(e["ts"]), base + ns(e["ts"]) + ns(e["dur"]), e["name"])
            for e in trace["traceEvents"]
            if e.get("ph") == "X" and e["cat"] in ("cpu_op", "user_annotation") and not is_call(e)
        )
        shown = sorted(
            (s.start, s.end, s.name)
            for process, track, s in found.every()
            if process == f"rank {rank}  tp{rank}"
            and track.startswith("host thread")
            and s.category in ("cpu_op", "user_annotation")
        )
        assert len(wanted) > 5000
        assert shown == wanted


def is_call(event: Mapping[str, Any]) -> bool:
    """The records of calls themselves, which become calls: torch's own and those of the hook."""
    return event["name"] in ("record_param_comms",)


def test_calls_have_their_bytes_and_verdict(found: Decoded) -> None:
    """The step's calls as the fixture's README counts them by hand: 59 a rank, 57 of them on tp."""
    calls = [s for _, track, s in found.every() if track == "communication tp" and s.category == "comm"]
    assert len(calls) == 2 * 57
    assert {s.args["verdict"] for s in calls} == {"match"}
    by_size: dict[tuple[str, int, int], int] = defaultdict(int)
    for s in calls:
        by_size[s.name, s.args["payload_bytes"], s.args["expected_payload_bytes"]] += 1
    # 4096 elements of 2 bytes; 64 losses and 320 norm gradients of 4 bytes
    assert by_size == {
        ("all_gather", 8192, 8192): 2 * 30,
        ("reduce_scatter", 8192, 8192): 2 * 20,
        ("all_reduce", 256, 256): 2 * 6,
        ("all_reduce", 1280, 1280): 2 * 1,
    }


def test_flows_join_the_ranks_of_each_call(found: Decoded) -> None:
    """58 calls over both ranks: each flow begins on the one that came first and ends on the other."""
    ends: dict[int, dict[str, list[tuple[str, Shown]]]] = defaultdict(lambda: {"begins": [], "ends": []})
    for process, _, one in found.every():
        for flow in one.begins:
            ends[flow]["begins"].append((process, one))
        for flow in one.ends:
            ends[flow]["ends"].append((process, one))
    matched = {flow: e for flow, e in ends.items() if flow < LAUNCH_FLOWS}
    assert len(matched) == 58
    for e in matched.values():
        (begins, first), (ended, second) = e["begins"][0], e["ends"][0]
        assert (len(e["begins"]), len(e["ends"])) == (1, 1)
        assert {begins, ended} == {"rank 0  tp0", "rank 1  tp1"}
        assert first.start <= second.start
        assert (first.args["seq"], first.args["group_id"], first.name) == (
            second.args["seq"],
            second.args["group_id"],
            second.name,
        )
    launches = [e for flow, e in ends.items() if flow >= LAUNCH_FLOWS]
    assert len(launches) == 2 * 59
    for e in launches:
        (begins, issue), (ended, call) = e["begins"][0], e["ends"][0]
        assert begins == ended
        assert issue.category == "call"
        assert issue.args["call_id"] == call.args["call_id"]
        assert issue.start <= call.start


def test_counters_add_up(recorded: Run, timeline: Timeline, found: Decoded) -> None:
    for (_, track), points in found.counters.items():
        assert [t for t, _ in points] == sorted({t for t, _ in points}), "one value at a time"
        assert points[-1][1] == 0
        assert all(a[1] != b[1] for a, b in pairwise(points))
        if track == "in-flight micro-batches":
            assert {v for _, v in points} == {0, 1}  # without a pipeline one micro-batch after the other
            assert len(points) == 4
    assert {track for _, track in found.counters} == {
        "in-flight micro-batches",
        "exposed tp",
        "exposed mp",
        "exposed dp_cp",
    }
    of_query = {(r["rank"], r["role"]): r["exposed_ns"] + r["shared_ns"] for r in recorded.query("exposed_by_role")}
    for (process, track), points in found.counters.items():
        if track.startswith("exposed"):
            exposed = sum(b[0] - a[0] for a, b in pairwise(points) if a[1])
            assert exposed == of_query[int(process.split()[1]), track.removeprefix("exposed ")], track


def test_chrome_has_the_same_slices(timeline: Timeline, found: Decoded) -> None:
    base, chromes = events(timeline)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in chromes if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in chromes if e["name"] == "process_name"}
    assert list(processes.values()) == ["rank 0  tp0", "rank 1  tp1"]
    shown = sorted(
        (processes[e["pid"]], names[e["pid"], e["tid"]], base + e["ts"], base + e["ts"] + e.get("dur", 0), e["name"])
        for e in chromes
        if e["ph"] in "Xi"
    )
    assert shown == sorted((p, t, s.start, s.end, s.name) for p, t, s in found.every())
    flows = [(e["id"], e["ph"]) for e in chromes if e["ph"] in "stf"]
    assert sorted(flows) == sorted(
        [(f, "s") for _, _, s in found.every() for f in s.begins]
        + [(f, "f") for _, _, s in found.every() for f in s.ends]
    )
    counters = sum(len(points) for points in found.counters.values())
    assert sum(e["ph"] == "C" for e in chromes) == counters
