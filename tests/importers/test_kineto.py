"""From one trace's events to rows: times, ids, calls, ties, groups, order, and the file that appears only when whole."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest

from traceanalyzer import importers, schema
from traceanalyzer.errors import InputError
from traceanalyzer.importers import calls, kineto, spool, ties

BASE = 1_790_857_026_000_000_000
Import = Callable[..., Any]


def cpu(name: str, ts: float, dur: float, *, tid: Any = 1, cat: Any = "cpu_op", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 100, "tid": tid, "ts": ts, "dur": dur, "args": args}


def mark(name: str, ts: float, dur: float, *, tid: Any = 1, **args: Any) -> dict[str, Any]:
    return cpu(name, ts, dur, tid=tid, cat="user_annotation", **args)


def launch(ts: float, correlation: int, *, tid: int = 1) -> dict[str, Any]:
    return cpu("cudaLaunchKernelExC", ts, 1, tid=tid, cat="cuda_runtime", correlation=correlation)


def kernel(name: str, ts: float, dur: float, correlation: int, *, stream: Any = 7, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur,
            "args": {"device": 0, "stream": stream, "correlation": correlation, **args}}  # fmt: skip


NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def collective(name: str, n_in: int, n_out: int, **more: Any) -> dict[str, Any]:
    """The arguments that record_param_comms has since 2024."""
    return {"Collective name": name, "In msg nelems": n_in, "Out msg nelems": n_out, "Group size": 4, "dtype": "BFloat16",
            "In split size": "[]", "Out split size": "[]", "Process Group Name": "7",
            "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP", "Process Group Ranks": "[0, 1, 2, 3]",
            **more}  # fmt: skip


def document(*events: dict[str, Any], rank: int | None = 0, **top: Any) -> dict[str, Any]:
    info = {"backend": "nccl", "world_size": 4, **({} if rank is None else {"rank": rank})}
    return {"distributedInfo": info, "baseTimeNanoseconds": BASE, **top, "traceEvents": list(events)}


def queried(query: str) -> list[Any]:
    with duckdb.connect() as connection:
        return connection.execute(query).fetchall()


def ordered_calls(imported: Any) -> list[dict[str, Any]]:
    return sorted(imported.rows("comm_record"), key=lambda c: c["call_id"])


# Times ---------------------------------------------------------------------------------------------------------------


def test_relative_microseconds_are_exact_to_the_nanosecond(import_text: Import) -> None:
    """Three decimals up to 2**43 us: all of 8 000 values, at magnitudes where ``us * 1000`` as a float is wrong."""
    written = []
    for i in range(8000):
        whole = (5_118_240_000_000 + i * 7_919, 8_796_093_022_207 - i * 31)[i % 2]
        written.append(f"{whole}.{(i * 389) % 1000:03d}")
    events = ",".join(
        f'{{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":{ts},"dur":{i % 977}.{i % 1000:03d},'
        f'"args":{{"correlation":{i}}}}}'
        for i, ts in enumerate(written, 1)
    )
    run = import_text(f'{{"baseTimeNanoseconds": {BASE}, "traceEvents": [{events}]}}')
    rows = {k["correlation"]: (k["start_ns"], k["dur_ns"]) for k in run.rows("kernel")}
    assert len(rows) == 8000
    for i, ts in enumerate(written, 1):
        whole, part = ts.split(".")
        assert rows[i] == (BASE + int(whole) * 1000 + int(part), i % 977 * 1000 + i % 1000)


def test_absolute_microseconds_keep_all_their_digits(import_text: Import) -> None:
    start = 1_767_230_718_240_123_456
    events = ",".join(
        f'{{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":{(start + i) // 1000}.{(start + i) % 1000:03d},'
        f'"dur":0.{i + 1:03d},"args":{{"correlation":{i}}}}}'
        for i in range(900)
    )
    run = import_text(f'{{"traceEvents": [{events}]}}')
    assert [(k["start_ns"], k["dur_ns"]) for k in run.rows("kernel")] == [(start + i, i + 1) for i in range(900)]
    assert "base_time_unknown" not in run.issues()


def test_whole_microseconds_and_text_are_times_too(import_text: Import) -> None:
    run = import_text(
        {"traceEvents": [kernel("a", 1_706_850_122_862_325, 662, 1), {**kernel("b", 0, 0, 2), "ts": "1706850122862326.5",
                                                                      "dur": "1.25"}]}
    )  # fmt: skip
    assert [(k["name"], k["start_ns"], k["dur_ns"]) for k in run.rows("kernel")] == [
        ("a", 1_706_850_122_862_325_000, 662_000),
        ("b", 1_706_850_122_862_326_500, 1_250),
    ]
    assert run.result.status == "complete"


def test_the_base_may_stand_behind_the_events(import_text: Import) -> None:
    behind = {"traceEvents": [kernel("k", 1.5, 2, 1)], "displayTimeUnit": "ms", "baseTimeNanoseconds": BASE}
    assert next(iter(behind)) == "traceEvents"
    run = import_text(behind)
    assert [k["start_ns"] for k in run.rows("kernel")] == [BASE + 1500]
    [rank] = run.rows("rank")
    assert (rank["window_start_ns"], rank["window_end_ns"]) == (BASE + 1500, BASE + 3500)


def test_times_without_a_base_are_told(import_text: Import) -> None:
    run = import_text({"traceEvents": [kernel("k", 5_118_240_000_000.5, 2, 1)]})
    assert run.issues()["base_time_unknown"] == 1
    assert "base_time_unknown" not in import_text(document(kernel("k", 1.5, 2, 1))).issues()


def test_absurd_times_are_rejected_and_never_wrap_around(import_text: Import) -> None:
    run = import_text(
        document(
            kernel("far", 9.2e15, 1, 1), kernel("long", 1, 9.2e15, 2), kernel("huge", 1e300, 1, 3), kernel("ok", 1, 1, 4),
            {**kernel("no start", 0, 1, 5), "ts": None}, cpu("still running", 5, -1), rank=0,
        )
    )  # fmt: skip
    assert [(k["name"], k["start_ns"]) for k in run.rows("kernel")] == [("ok", BASE + 1000)]
    assert {code: n for code, n in run.issues().items() if code.startswith("rejected")} == {
        "rejected_device_implausible_duration": 3,
        "rejected_device_missing_start": 1,
        "rejected_host_unfinished": 1,
    }
    assert run.result.status == "complete with rejects"
    [rank] = run.rows("rank")
    assert (rank["rows_rejected"], rank["import_status"]) == (5, "complete with rejects")


def test_an_activity_without_duration_adds_no_time_to_the_window(import_text: Import) -> None:
    run = import_text(document(kernel("k", 10, 5, 1), {**kernel("copy", 30, 0, 2), "cat": "gpu_memcpy"}))
    [rank] = run.rows("rank")
    assert (rank["window_start_ns"] - BASE, rank["window_end_ns"] - BASE) == (10_000, 15_000)
    assert [k["kernel_class"] for k in run.rows("kernel")] == ["other", "copy"]


# Ranks and ids -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "name", "told", "rank", "source"),
    [
        (3, "rank7.json", 5, 3, "header"),
        (3, "trace.json", None, 3, "header"),
        (None, "rank7.json", 5, 7, "file name"),
        (None, "Baseline - 220ff-rank6-chrome-trace.json", None, 6, "file name"),
        (None, "job_rank_0.pt.trace.json", None, 0, "file name"),
        (None, "trace.json", 5, 5, "told"),
        (None, "trace.json", None, None, None),
        (None, "frank7.json", None, None, None),
        (-1, "trace.json", None, None, None),
    ],
)
def test_header_beats_file_name_beats_told(
    import_text: Import, stated: int | None, name: str, told: int | None, rank: int | None, source: str | None
) -> None:
    noise = mark("m", 1, 1, rank=9)  # an annotation's argument is not the process's rank
    run = import_text(document(noise, kernel("k", 1, 1, 1), rank=stated), name, told_rank=told)
    [row] = run.rows("rank")
    assert (row["rank"], row["rank_source"]) == (rank, source)
    assert {k["rank"] for k in run.rows("kernel")} == {rank}
    assert run.result.ranks == ([] if rank is None else [rank])


def test_a_told_rank_goes_with_one_file(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(document(kernel("k", 1, 1, 1), rank=None)))
    with pytest.raises(InputError, match="one file"):
        importers.import_traces([tmp_path], tmp_path / "run.parquet", told_rank=3)


def test_ids_beyond_two_to_the_63_survive_to_duckdb(import_text: Import) -> None:
    big = 2**64 - 1
    run = import_text(
        document(
            cpu("record_param_comms", 1, 5, **collective("allreduce", 8, 8, Seq=2**40), **{"Comms Id": big},
                **{"External id": big}),
            kernel(NCCL, 20, 3, big - 1, **collective("allreduce", 8, 8), **{"External id": big}),
            cpu("aten::mm", 8, 1, **{"External id": big - 2}),
        )
    )  # fmt: skip
    values = queried(
        f"SELECT kind, comms_id, external_id, correlation, typeof(comms_id) AS t FROM '{run.path}' "
        "WHERE kind IN ('comm_record', 'kernel', 'cpu_op') ORDER BY kind, start_ns"
    )
    assert values == [
        ("comm_record", big, big, None, "UBIGINT"),
        ("cpu_op", None, big, None, "UBIGINT"),
        ("cpu_op", None, big - 2, None, "UBIGINT"),
        ("kernel", None, big, big - 1, "UBIGINT"),
    ]
    assert ordered_calls(run)[0]["seq"] == 2**40


# Which kernel belongs to which call ----------------------------------------------------------------------------------


def test_a_kernel_is_tied_by_external_id(import_text: Import) -> None:
    run = import_text(
        document(
            cpu("c10d::allreduce_", 0, 30, **{"External id": 10}),
            cpu("record_param_comms", 2, 20, **collective("allreduce", 8, 8), **{"External id": 11}),
            mark("nccl:all_reduce", 4, 10, **{"External id": 12}),
            # the launch lies in no call: the id alone ties
            launch(500, 77),
            kernel(NCCL, 600, 9, 77, **collective("allreduce", 8, 8), **{"External id": 11}),
        )
    )
    [call] = run.rows("comm_record")
    [found] = run.rows("kernel")
    assert (call["join_evidence"], call["completeness"], call["time_source"]) == ("external_id", "full", "kernel")
    assert (call["start_ns"], call["dur_ns"], call["stream"]) == (BASE + 600_000, 9_000, 7)
    assert (call["t_issue_ns"], call["t_issue_end_ns"]) == (BASE, BASE + 30_000)
    assert (found["join_evidence"], found["coalesce_id"]) == ("external_id", call["coalesce_id"])
    assert found["launch_ns"] == BASE + 500_000


def test_an_external_id_that_repeats_the_correlation_ties_nothing(import_text: Import) -> None:
    """Up to Feb 2024 the kernel's External id is its correlation id, and may by chance be that of another call."""
    first = cpu("c10d::allreduce_", 0, 10, **{"External id": 77, "Input Dims": [[[4]]], "Input type": ["TensorList"]})
    second = cpu(
        "c10d::_allgather_base_",
        20,
        10,
        **{"External id": 5, "Input Dims": [[8], [2]], "Input type": ["float", "float"]},
    )
    run = import_text(document(first, second, launch(25, 77), kernel(NCCL, 40, 3, 77, **{"External id": 77})))
    reduce, gather = ordered_calls(run)
    assert (reduce["completeness"], gather["join_evidence"]) == ("no_kernel", "correlation")
    assert (gather["start_ns"], gather["in_elems"], gather["out_elems"]) == (BASE + 40_000, 2, 8)


def test_a_launch_is_looked_up_on_its_own_thread(import_text: Import) -> None:
    """Two threads issue at once; autograd's launches must not be tied to the main thread's call."""
    main = cpu("c10d::allreduce_", 0, 100, tid=1, **{"Input Dims": [[[4]]]})
    autograd = cpu("c10d::allreduce_", 10, 20, tid=2, **{"Input Dims": [[[6]]]})
    run = import_text(
        document(main, autograd, launch(15, 5, tid=2), launch(50, 6), kernel(NCCL, 40, 3, 5), kernel(NCCL, 60, 3, 6))
    )
    assert {c["in_elems"]: c["start_ns"] - BASE for c in run.rows("comm_record")} == {6: 40_000, 4: 60_000}


def batch(ts: float, at: int, *, group: str = "9", peer: int = 2) -> list[dict[str, Any]]:
    """A send and a receive as batch_isend_irecv records them; they last 20 us."""
    found = []
    for i, op in enumerate(("send", "recv")):
        args = collective(
            op, 512, 512, **{"Process Group Name": group, "Dst Rank" if op == "send" else "Src Rank": peer + i}
        )
        start = ts + 10 * i
        found += [
            cpu(f"c10d::{op if op == 'send' else 'recv_'}", start, 8, **{"External id": at + 3 * i}),
            cpu("record_param_comms", start + 1, 6, **args, **{"External id": at + 3 * i + 1}),
            mark(f"nccl:{op} 0->1", start + 2, 4, **{"External id": at + 3 * i + 2}),
        ]
    return found


@pytest.mark.parametrize("end", ["newer", "older", "never closed", "enclosing", "ours"])
def test_coalesced_calls_share_the_kernel_of_their_group(import_text: Import, end: str) -> None:
    """The shapes of nccl:coalesced: around the launch alone; behind it; left open; around everything; and our own mark."""
    events: list[dict[str, Any]] = [
        cpu("record_param_comms", 0, 5, **collective("allreduce", 4, 4), **{"External id": 1})
    ]
    expected = []
    for number in range(3):
        at = 100 + 1000 * number
        records = batch(at, 100 * number + 10, peer=2 * number)
        events += [launch(at + 40, 50 + number), kernel(SEND_RECV, at + 60, 7, 50 + number, stream=30)]
        if end == "newer":
            events.append(mark("nccl:coalesced", at + 35, 20))
        elif end == "older":
            events.append(mark("nccl:coalesced", at + 43, 5))
        elif end == "never closed":
            events.append(mark("nccl:coalesced", at + 35, 5000))
        elif end == "enclosing":
            events.append(mark("nccl:coalesced", at - 5, 60))
        else:
            block = {"pg": "9", "coalesce": number}
            events += [
                cpu("ta:send", at, 9, method="send", **block),
                cpu("ta:recv", at + 10, 9, method="recv", **block),
            ]
            events.append(cpu("ta:end_coalescing", at + 34, 30, method="_end_coalescing", **block))
        # then the records, and a call of its own between the groups
        events += [
            *records,
            cpu("record_param_comms", at + 500, 5, **collective("allreduce", 4, 4), **{"External id": 900 + number}),
            launch(at + 502, 80 + number),
            kernel(NCCL, at + 520, 2, 80 + number, **collective("allreduce", 4, 4), **{"External id": 900 + number}),
        ]
        expected.append((2 * number, 2 * number + 1, BASE + (at + 60) * 1000))
    run = import_text(document(*events))
    groups: dict[int, list[dict[str, Any]]] = {}
    for call in ordered_calls(run):
        groups.setdefault(call["coalesce_id"], []).append(call)
    shared = [g for g in groups.values() if len(g) > 1]
    assert [[c["op"] for c in g] for g in shared] == [["send", "recv"]] * 3
    assert [(g[0]["peer"], g[1]["peer"], g[0]["start_ns"]) for g in shared] == expected
    assert {c["join_evidence"] for g in shared for c in g} == {"coalesced"}
    assert {(c["group_id"], c["in_elems"], c["dur_ns"]) for g in shared for c in g} == {("9", 512, 7000)}
    alone = [g[0] for g in groups.values() if len(g) == 1]
    assert [c["op"] for c in alone] == ["all_reduce"] * 4
    assert [c["join_evidence"] for c in alone] == [None, "external_id", "external_id", "external_id"]
    kernels = run.rows("kernel", stream=30)
    assert [k["coalesce_id"] for k in kernels] == [g[0]["coalesce_id"] for g in shared]
    assert "kernels_without_call" not in run.issues()


def test_a_second_kernel_of_a_group_belongs_to_the_same_calls(import_text: Import) -> None:
    run = import_text(
        document(*batch(0, 10), mark("nccl:coalesced", 30, 40), launch(35, 1), launch(45, 2),
                 kernel(SEND_RECV, 60, 5, 1), kernel(SEND_RECV, 70, 5, 2))
    )  # fmt: skip
    assert {k["coalesce_id"] for k in run.rows("kernel")} == {0}
    assert {(c["start_ns"] - BASE, c["dur_ns"]) for c in run.rows("comm_record")} == {(60_000, 15_000)}


def test_calls_that_wait_for_no_group_are_not_drawn_in(import_text: Import) -> None:
    """Before the batch: a call on a group of one, which launches nothing; calls of another group and kind."""
    lonely = collective("allreduce", 4, 4, **{"Group size": 1, "Process Group Name": "1"})
    events = [
        cpu("record_param_comms", 0, 5, **collective("allreduce", 4, 4)),
        cpu("record_param_comms", 10, 5, **lonely),
        *batch(100, 10),
        mark("nccl:coalesced", 130, 40),
        launch(135, 1),
        kernel(SEND_RECV, 160, 5, 1),
    ]
    run = import_text(document(*events))
    assert [(c["op"], c["completeness"]) for c in ordered_calls(run)] == [
        ("all_reduce", "no_kernel"), ("all_reduce", "no_kernel"), ("send", "full"), ("recv", "full"),
    ]  # fmt: skip


def test_a_communication_kernel_of_another_library_is_not_tied_to_a_group(import_text: Import) -> None:
    multimem = "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16>(float*)"
    run = import_text(document(*batch(0, 10), mark("nccl:coalesced", 30, 4000), launch(35, 1), launch(800, 2),
                               kernel(SEND_RECV, 60, 5, 1), kernel(multimem, 900, 5, 2)))  # fmt: skip
    assert [(k["kernel_op"], k["completeness"], k["coalesce_id"]) for k in run.rows("kernel")] == [
        ("send_recv", "full", 0),
        ("all_reduce", "kernel_only", None),
    ]
    assert run.issues()["kernels_without_call"] == 1


def test_gloo_ranges_are_tied_in_order_where_counts_agree(import_text: Import) -> None:
    def call(ts: int, n: int) -> dict[str, Any]:
        return cpu("c10d::allreduce_", ts, 5, **{"Input Dims": [[[n]]], "Input type": ["TensorList"]})

    def work(ts: int, n: int) -> dict[str, Any]:
        return mark("gloo:all_reduce", ts, 9, tid=2, **{"Input Dims": [[n]], "Input type": ["c10::BFloat16"]})

    run = import_text(
        document(call(0, 8), call(10, 8), call(20, 4), work(30, 8), work(40, 8), work(50, 4), work(60, 4))
    )
    first, second, third = ordered_calls(run)
    assert [(c["start_ns"] - BASE, c["join_evidence"], c["time_source"]) for c in (first, second)] == [
        (30_000, "order", "backend_range"),
        (40_000, "order", "backend_range"),
    ]
    # two ranges for one call: which is its work is not known, but the element type is the same in both
    assert (third["start_ns"], third["completeness"], third["dtype"]) == (None, "no_kernel", "bfloat16")


def test_a_gloo_range_alone_is_a_call_that_shows_its_work(import_text: Import) -> None:
    run = import_text(document(mark("gloo:all_reduce", 30, 9, **{"Input Dims": [[8]], "Input type": ["float"]})))
    [call] = run.rows("comm_record")
    assert (call["start_ns"], call["dur_ns"], call["time_source"]) == (BASE + 30_000, 9_000, "backend_range")
    assert (call["t_issue_ns"], call["in_elems"], call["dtype"]) == (None, 8, "float32")


def test_waits_and_inits_are_never_calls(import_text: Import) -> None:
    wait = {"Collective name": "wait", "dtype": "Byte", "In msg nelems": 0, "Out msg nelems": 0, "Group size": 1,
            "Process Group Ranks": "[]"}  # fmt: skip
    old_wait = {"Concrete Inputs": ["337", "0", "0", "", "[]", "[]", "1"], "Input Dims": [[], [], [], [], [], [], []]}
    run = import_text(
        document(
            cpu("record_param_comms", 0, 5, **wait),
            cpu("record_param_comms", 10, 5, **{**wait, "Collective name": "init"}),
            cpu("record_param_comms", 20, 5, **old_wait),
            cpu("record_param_comms", 30, 5),
            cpu("_c10d_functional::wait_tensor", 40, 20),
            cpu("record_param_comms", 45, 5, **wait),
            kernel("other", 5, 1, 1),
        )
    )
    assert run.rows("comm_record") == []
    assert run.rows("process_group") == []
    assert len(run.rows("cpu_op")) == 6


def test_kernels_launched_before_the_recording_are_no_calls(import_text: Import) -> None:
    run = import_text(
        document(
            kernel(NCCL, 1, 5, 3),
            kernel("gemm", 7, 1, 4),
            cpu("record_param_comms", 50, 9, **collective("allreduce", 8, 8), **{"External id": 2}),
            launch(52, 9),
            kernel(NCCL, 70, 5, 9, **collective("allreduce", 8, 8), **{"External id": 2}),
        )
    )
    assert [(k["kernel_class"], k["completeness"]) for k in run.rows("kernel")] == [
        ("comm", "launched_before_window"),
        ("gemm", None),
        ("comm", "full"),
    ]
    assert len(run.rows("comm_record")) == 1
    assert run.issues() == {"kernels_before_window": 1}


def test_a_kernel_without_a_correlation_id_is_not_called_older_than_the_recording(import_text: Import) -> None:
    """Which launch was its own is not recorded, so nothing shows that it lay before the recording."""
    nameless = kernel(NCCL, 70, 5, 0)
    del nameless["args"]["correlation"]
    run = import_text(document(launch(52, 9), kernel("gemm", 60, 5, 9), nameless))
    assert [(k["kernel_class"], k["completeness"]) for k in run.rows("kernel")] == [
        ("gemm", None),
        ("comm", "kernel_only"),
    ]
    assert run.issues() == {"kernels_without_call": 1}


def test_a_rank_from_the_name_is_told_in_the_same_words_for_every_rank(import_text: Import) -> None:
    said = set()
    for rank in (3, 7):
        run = import_text(document(kernel("gemm", 60, 5, 9), rank=None), name=f"rank{rank}.json")
        [told] = run.rows("issue", code="rank_from_file_name")
        assert told["rank"] == rank
        said.add(told["sentence"])
    assert len(said) == 1


def test_a_kernel_with_metadata_whose_call_was_not_recorded_is_one_call(import_text: Import) -> None:
    meta = collective("_allgather_base", 8, 32, Seq=5)
    run = import_text(
        document(
            kernel(NCCL, 1, 5, 3, **meta, **{"External id": 9}), kernel(NCCL, 8, 5, 4, **meta, **{"External id": 9})
        )
    )
    [call] = run.rows("comm_record")
    assert (call["completeness"], call["t_issue_ns"], call["op"], call["group_id"]) == (
        "kernel_only",
        None,
        "all_gather",
        "7",
    )
    assert (call["start_ns"] - BASE, call["dur_ns"]) == (1_000, 12_000)


def test_device_annotations_are_never_calls_or_work(import_text: Import) -> None:
    box = {**mark("nccl:all_reduce", 1, 50), "cat": "gpu_user_annotation", "pid": 0, "tid": 7}
    run = import_text(document(box, kernel(NCCL, 2, 5, 3)))
    assert run.rows("comm_record") == []
    assert [(s["category"], s["name"]) for s in run.rows("span")] == [("gpu_user_annotation", "nccl:all_reduce")]
    [rank] = run.rows("rank")
    assert (rank["window_start_ns"], rank["window_end_ns"]) == (BASE + 2_000, BASE + 7_000)


def test_one_call_is_one_row_whatever_was_recorded_of_it(import_text: Import) -> None:
    """A functional collective: five nested records; and an all_gather of unequal tensors made of broadcasts."""
    functional = [
        cpu("_c10d_functional::all_gather_into_tensor", 0, 60),
        cpu("c10d::_allgather_base_", 5, 50, **{"Input Dims": [[32], [8], []]}),
        cpu("record_param_comms", 10, 40, **collective("_allgather_base", 8, 32)),
        mark("nccl:_all_gather_base", 15, 30, **{"Input Dims": [[8]]}),
    ]
    uneven = [
        cpu("c10d::allgather_", 100, 90),
        cpu("record_param_comms", 102, 80, **collective("all_gather", 8, 32)),
        *(cpu("record_param_comms", 110 + 20 * i, 10, **collective("_broadcast_oop", 8, 8)) for i in range(3)),
        mark("nccl:coalesced", 175, 5),
    ]
    barrier = [
        cpu("c10d::barrier", 300, 90),
        cpu("record_param_comms", 302, 5, **collective("barrier", 0, 0)),
        cpu("record_param_comms", 310, 50, **collective("allreduce", 1, 1)),
    ]
    run = import_text(document(*functional, *uneven, *barrier))
    assert [(c["op"], c["in_elems"], c["out_elems"]) for c in ordered_calls(run)] == [
        ("all_gather", 8, 32),
        ("all_gather", 8, 32),
        ("barrier", 0, 0),
    ]


def test_coalesced_operators_of_older_torch_have_no_record_and_are_calls(import_text: Import) -> None:
    """torch 2.1 to 2.3: the merged call shows as its dispatcher operator, or as an annotation alone."""
    run = import_text(
        document(
            cpu("c10d::reduce_scatter_tensor_coalesced_", 0, 20, **{"Input Dims": [[[4], [2]], [[8], [4]], []]}),
            mark("nccl:reduce_scatter_tensor_coalesced", 5, 10),
            mark("nccl:all_gather_into_tensor_coalesced", 50, 10, **{"Input Dims": [[4], [2]], "Input type": ["float"] * 2}),
            launch(55, 9),
            kernel(NCCL, 70, 5, 9),
        )
    )  # fmt: skip
    scatter, gather = ordered_calls(run)
    assert (scatter["op"], scatter["in_elems"], scatter["out_elems"]) == ("reduce_scatter", 12, 6)
    assert (gather["op"], gather["in_elems"], gather["dtype"]) == ("all_gather", 6, "float32")
    assert (gather["join_evidence"], gather["start_ns"]) == ("correlation", BASE + 70_000)


def test_a_list_all_to_all_is_split_by_its_tensors(import_text: Import) -> None:
    """The backend's record shows "[]" for it, which means an even split only where one tensor is exchanged."""
    dims = [[[3], [1]], [[2, 2], [5]], [], []]
    run = import_text(
        document(
            cpu("c10d::alltoall_", 0, 20, **{"Input Dims": dims}),
            cpu("record_param_comms", 5, 10, **collective("all_to_all", 9, 4)),
            cpu("c10d::alltoall_", 50, 20),
            cpu("record_param_comms", 55, 10, **collective("all_to_all", 9, 4)),
            cpu("c10d::alltoall_base_", 100, 20),
            cpu("record_param_comms", 105, 10, **collective("all_to_all", 8, 8)),
        )
    )
    known, unknown, even = ordered_calls(run)
    assert (known["in_splits"], known["out_splits"], known["splits_known"]) == ([4, 5], [3, 1], True)
    assert (unknown["in_splits"], unknown["splits_known"]) == (None, False)
    assert (even["in_splits"], even["splits_known"]) == (None, True)


def test_peer_root_and_place_in_the_group_come_from_the_key_rank(import_text: Import) -> None:
    """It is this process's place in the group, but the peer's for send and recv and the root's where there is one."""
    ranks = {"Process Group Ranks": "[4, 6, 8, 10]", "Process Group Name": "21"}
    run = import_text(
        document(
            cpu("record_param_comms", 0, 5, **collective("send", 8, 8, **ranks, Rank=3)),
            cpu("record_param_comms", 10, 5, **collective("recv", 8, 8, **ranks, Rank=3, **{"Src Rank": 4})),
            cpu("record_param_comms", 20, 5, **collective("broadcast", 8, 8, **ranks, Rank=2)),
            cpu("record_param_comms", 30, 5, **collective("allreduce", 8, 8, **ranks, Rank=1)),
            rank=6,
        )
    )
    assert [(c["op"], c["peer"], c["root"], c["group_rank"]) for c in ordered_calls(run)] == [
        ("send", 10, None, 1), ("recv", 4, None, 1), ("broadcast", None, 8, 1), ("all_reduce", None, None, 1),
    ]  # fmt: skip


def test_the_place_of_a_call_is_the_names_of_the_ranges_around_it(import_text: Import) -> None:
    run = import_text(
        document(
            mark("ProfilerStep#3", 0, 200),
            mark("ta:microbatch 1", 10, 100),
            cpu("nn.Module: Linear_0", 15, 60, cat="python_function"),
            cpu("megatron/core/layers.py(12): forward", 16, 58, cat="python_function"),
            cpu("_CopyToModelParallelRegion", 20, 50),
            cpu("aten::mm", 22, 40),
            cpu("c10d::allreduce_", 30, 9, **{"Input Dims": [[[4]]]}),
            cpu("elsewhere", 30, 9, tid=2),
            cpu("c10d::allreduce_", 150, 9, **{"Input Dims": [[[4]]]}),
        )
    )
    assert [c["call_path"] for c in ordered_calls(run)] == [
        ["_CopyToModelParallelRegion", "nn.Module: Linear_0", "ta:microbatch 1", "ProfilerStep#3"],
        ["ProfilerStep#3"],
    ]


# The innermost range -------------------------------------------------------------------------------------------------


class Scopes:
    """The thing of each range, not its number."""

    def __init__(self, ranges: list[tuple[int, int, list[Any]]]) -> None:
        self._things = [thing for _, _, thing in ranges]
        self._scopes = ties.Scopes([start for start, _, _ in ranges], [end for _, end, _ in ranges])

    def at(self, point: int) -> list[Any]:
        number = self._scopes.at(point)
        return self._things[number] if number >= 0 else []


def test_the_innermost_range_is_found_however_many_lie_between() -> None:
    """A range of 1 000 us with 2 000 short ones in it: the point behind them all is inside the long one alone."""
    call: list[Any] = [calls.Metadata() for _ in range(4)]
    inner = [(10 + 2 * i, 11 + 2 * i, [call[1]]) for i in range(2000)]
    scopes = Scopes([(0, 10_000, [call[0]]), *inner, (20_000, 30_000, [call[2]]), (20_000, 25_000, [call[3]])])
    assert scopes.at(9_000) == [call[0]]
    assert scopes.at(10) == [call[1]]
    assert scopes.at(11) == [call[0]]
    assert scopes.at(10_000) == []
    assert scopes.at(-1) == []
    assert scopes.at(20_000) == [call[3]]
    assert scopes.at(25_000) == [call[2]]


def test_the_innermost_range_is_what_a_search_of_all_finds() -> None:
    import random

    chance = random.Random(5)
    for _ in range(200):
        ranges: list[tuple[int, int, list[Any]]] = []
        for number in range(chance.randint(0, 12)):
            start = chance.randint(0, 30)
            ranges.append((start, start + chance.randint(0, 15), [number]))
        scopes = Scopes(ranges)
        for point in range(-1, 47):
            holding = [r for r in ranges if r[0] <= point < r[1]]
            best = max(holding, key=lambda r: (r[0], -r[1])) if holding else None
            found = scopes.at(point)
            if best is None:
                assert found == []
            else:
                assert next(r for r in ranges if r[2] is found)[:2] == best[:2]


# Every age of the profiler: events quoted from public traces (reference: trace_event_shapes) --------------------------


def quoted(heading: str, shared: Callable[[str], Path]) -> list[dict[str, Any]]:
    text = shared("reference/trace_event_shapes.md").read_text()
    section = text.split(f"\n## {heading}")[1].split("\n## ")[0]
    return [json.loads(block.split("\n```")[0]) for block in section.split("```json\n")[1:]]


@pytest.mark.shared
@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        # (op, dtype, in, out, group, group size, group rank, in splits, seq, is_async) of each call
        ("KA,", [("all_to_all", "float32", 72_220_672, None, None, None, None, None, None, None)]),
        ("K0,", [("all_to_all", None, None, None, None, None, None, None, None, None)]),
        ("K1,", [("all_reduce", "float32", 394_241, 394_241, None, None, None, None, None, None)]),
        ("K2,", [("all_reduce", "float16", 33_554_432, 33_554_432, "ptr:93825114103440", 8, 0, None, 337, None)]),
        ("K3,", [("all_reduce", "float32", 2_049_000, 2_049_000, "0", 1, 0, None, None, None)]),
        # the kernel that is quoted belongs to another call, so it is one of its own
        ("K4,", [("all_reduce", "float32", 6_144, 6_144, "13", 2, 0, None, None, None)] * 2),
        ("K5, Dec", [("reduce_scatter", "bfloat16", 38_633_472, 4_829_184, "0", 8, 0, None, None, None),
                     ("reduce_scatter", "bfloat16", 96, 12, "0", 8, 0, None, None, None)]),
        ("K5 on AMD", [("broadcast", "bfloat16", 9_600, 9_600, "0", 8, 0, None, None, None)]),
        ("K6,", [("all_to_all", "int64", 8, 8, "0", 2, 0, [4, 4], 178, True)]),
        ("gloo, Jul 2024", [("all_reduce", "float32", 321_271, 321_271, None, None, None, None, None, None)]),
        ("gloo, torch 2.13", [("all_reduce", "float32", 1_024, 1_024, None, None, None, None, None, False)]),
    ],
)  # fmt: skip
def test_the_quoted_events_of_every_profiler_age(
    heading: str, expected: list[tuple[object, ...]], shared: Callable[[str], Path], import_text: Import
) -> None:
    events = [e for e in quoted(heading, shared) if "ph" in e]
    assert events
    world = 2 if heading.startswith("K6") else 8
    run = import_text(
        document(*events, rank=0) | {"distributedInfo": {"backend": "nccl", "rank": 0, "world_size": world}}
    )
    keys = (
        "op",
        "dtype",
        "in_elems",
        "out_elems",
        "group_id",
        "group_size",
        "group_rank",
        "in_splits",
        "seq",
        "is_async",
    )
    found = [tuple(c[k] for k in keys) for c in ordered_calls(run) if c["op"] != "send"]
    # the K1 section quotes an all_to_all's record by itself: without annotation and operator it says no operation
    assert sorted(map(str, found)) == sorted(map(str, expected))
    assert run.result.status == "complete"
    for row in run.rows("kernel"):
        assert row["kernel_class"] == "comm"
        if row["completeness"] == "full":
            assert row["join_evidence"] == "external_id"


@pytest.mark.shared
def test_the_quoted_events_of_2020(shared: Callable[[str], Path], import_text: Import) -> None:
    """Old spellings: categories, "Input dims", "external id", tid as text."""
    run = import_text(json.dumps(quoted("Dec 2020", shared)))
    [operator] = run.rows("cpu_op")
    [found] = run.rows("kernel")
    assert (operator["category"], operator["external_id"], operator["tid"]) == ("cpu_op", 2, 4_093_687_616)
    assert (found["category"], found["stream"], found["device"], found["kernel_class"]) == ("kernel", 7, 0, "gemm")
    assert (found["start_ns"], found["dur_ns"]) == (1_606_910_596_288_085_000, 379_000)


# Our own ranges ------------------------------------------------------------------------------------------------------


def test_our_ranges_name_group_ranks_number_and_sizes(import_text: Import) -> None:
    ours = {"pg": "12", "desc": "TENSOR_MODEL_PARALLEL_GROUP", "ranks": "[4, 5]", "size": 2, "rank": 1, "seq": 31,
            "method": "_allgather_base", "dtype": "bfloat16", "in_elems": 2048, "out_elems": 4096,
            "is_async": True}  # fmt: skip
    reduce = {**ours, "method": "allreduce", "seq": 32, "in_elems": 8, "out_elems": 8, "reduce_op": "max"}
    exchange = {**ours, "method": "alltoall_base", "seq": 33, "in_splits": "[3, 5]", "out_splits": "[4, 4]",
                "in_elems": 16, "out_elems": 16}  # fmt: skip
    send = {**ours, "method": "send", "seq": 3, "in_elems": 7, "out_elems": 0, "peer": 4}
    cast = {**ours, "method": "broadcast", "seq": 34, "in_elems": 9, "out_elems": 9, "root": 4}
    run = import_text(
        document(
            cpu("ta:all_gather", 0, 20, **ours),
            cpu("c10d::_allgather_base_", 5, 10, **{"Input Dims": [[32, 2, 64], [16, 2, 64], []],
                                                     "Input type": ["c10::BFloat16", "c10::BFloat16", ""]}),
            cpu("ta:all_reduce", 30, 20, **reduce),
            cpu("ta:all_to_all", 60, 20, **exchange),
            cpu("ta:send", 90, 20, **send),
            cpu("c10d::send", 92, 10, **{"Input Dims": [[[7]], [], [], []]}),
            cpu("ta:broadcast", 120, 20, **cast),
            rank=5,
        )
    )  # fmt: skip
    gather, maximum, uneven, sent, broadcast = ordered_calls(run)
    keys = ("op", "group_id", "group_size", "group_rank", "seq", "dtype", "in_elems", "out_elems", "is_async")
    assert [gather[k] for k in keys] == ["all_gather", "12", 2, 1, 31, "bfloat16", 2048, 4096, True]
    assert (gather["t_issue_ns"], gather["t_issue_end_ns"]) == (BASE, BASE + 20_000)
    assert gather["in_dims"] == "[[32,2,64],[16,2,64],[]]".replace(",", ", ")
    assert maximum["reduce_op"] == "max"
    assert (uneven["in_splits"], uneven["out_splits"], uneven["splits_known"]) == ([3, 5], [4, 4], True)
    assert (sent["peer"], sent["in_elems"], sent["is_p2p"]) == (4, 7, True)
    assert (broadcast["root"], broadcast["peer"]) == (4, None)
    [group] = run.rows("process_group")
    assert (group["group_id"], group["description"], group["ranks"], group["ranks_source"]) == (
        "12", "TENSOR_MODEL_PARALLEL_GROUP", [4, 5], "call",
    )  # fmt: skip


def test_our_range_around_merged_calls_gives_them_the_group_and_no_sizes(import_text: Import) -> None:
    ours = {"pg": "12", "ranks": "[0, 1]", "size": 2, "rank": 0, "seq": 1, "in_elems": 30, "out_elems": 30}
    inner = [cpu("c10d::allreduce_", 2 + 10 * i, 5, **{"Input Dims": [[[10 + 10 * i]]]}) for i in range(2)]
    run = import_text(document(cpu("ta:all_reduce", 0, 30, **ours), *inner))
    assert [(c["group_id"], c["in_elems"], c["seq"]) for c in ordered_calls(run)] == [
        ("12", 10, None),
        ("12", 20, None),
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_megatron_fixture_gives_the_calls_counted_beside_it(rank: int, import_files: Import) -> None:
    import csv
    from collections import Counter

    folder = Path(__file__).resolve().parents[2] / "fixtures" / "megatron_tp2_sp"
    run = import_files([folder / f"rank{rank}.json.gz"])
    groups = {g["group_id"]: g for g in run.rows("process_group")}
    found: Counter[tuple[object, ...]] = Counter()
    for c in run.rows("comm_record"):
        group = groups[c["group_id"]]
        key = (
            c["op"],
            c["dtype"],
            c["in_elems"],
            c["out_elems"],
            c["group_size"],
            group["description"],
            c["reduce_op"] or "",
        )
        found[key] += 1
        assert group["ranks_source"] == "header"
        assert group["ranks"][c["group_rank"]] == rank
    with (folder / "calls.csv").open(newline="") as file:
        expected: Counter[tuple[object, ...]] = Counter()
        for r in csv.DictReader(file):
            if int(r["rank"]) == rank:
                expected[r["op"], r["dtype"], int(r["in_elems"]), int(r["out_elems"]), int(r["group_size"]),
                         r["group_description"], r["reduce_op"]] += int(r["count"])  # fmt: skip
    assert found == expected
    assert found.total() == 59


# Groups --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "text", "more", "ranks", "source"),
    [
        (4, "[0, 2, 4, 6]", {}, [0, 2, 4, 6], "call"),
        (6, "[0, 1, 2, ..., 5]", {}, [0, 1, 2, 3, 4, 5], "inferred"),
        (4, "[0, 2, ..., 6]", {}, [0, 2, 4, 6], "inferred"),
        (5, "[0, 2, 4, ..., 8]", {}, [0, 2, 4, 6, 8], "inferred"),
        (9, "[0, 2, 4, ..., 8]", {}, None, None),  # nine do not fit
        (6, "[0, 1, 5, ..., 9]", {}, None, None),  # irregular: the gap may hold anything
        (5, "[0, 1, 5, ..., 7]", {}, [0, 1, 5, 6, 7], "inferred"),  # no room for anything else
        (6, "[0, 1, 2, ...]", {}, None, None),
        (6, "[0, 1, 2, ...]", {"Global rank start": 0, "Global rank stride": 1}, [0, 1, 2, 3, 4, 5], "inferred"),
        (3, "[]", {"Global rank start": 5, "Global rank stride": 8}, [5, 13, 21], "inferred"),
        (3, "[]", {"Global rank start": 5}, None, None),  # irregular
        (1, "[]", {"Global rank start": 5}, [5], "inferred"),
    ],
)  # fmt: skip
def test_the_ranks_of_a_group(
    import_text: Import, size: int, text: str, more: dict[str, int], ranks: list[int] | None, source: str | None
) -> None:
    call = cpu(
        "record_param_comms",
        0,
        5,
        **collective("allreduce", 8, 8, **{"Group size": size, "Process Group Ranks": text, **more}),
    )
    run = import_text({"distributedInfo": {"backend": "nccl", "world_size": 64}, "traceEvents": [call]}, "t.json")
    [group] = run.rows("process_group")
    assert (group["group_size"], group["ranks"], group["ranks_source"]) == (size, ranks, source)
    assert len(run.rows("comm_record")) == 1
    assert ("group_ranks_unknown" in run.issues()) == (ranks is None and text != "[]")


def test_the_header_beats_what_a_call_shows(import_text: Import) -> None:
    config = [
        {"pg_name": "7", "pg_desc": "dp", "backend_config": "cuda:nccl", "pg_size": 4, "ranks": [0, 8, 16, 24]},
        {"pg_name": "8", "pg_desc": "short", "pg_size": 40, "ranks": "[" + ", ".join(map(str, range(29))) + ", ..., 39]"},
        {"pg_name": "9", "ranks": [1, 2]},
        "odd", {"pg_desc": "no name"},
    ]  # fmt: skip
    run = import_text(document(cpu("record_param_comms", 0, 5, **collective("allreduce", 8, 8))) |
                      {"distributedInfo": {"backend": "nccl", "rank": 8, "pg_config": config}})  # fmt: skip
    keys = ("group_size", "ranks", "ranks_source", "description", "backend")
    assert {g["group_id"]: tuple(g[k] for k in keys) for g in run.rows("process_group")} == {
        "7": (4, [0, 8, 16, 24], "header", "dp", "cuda:nccl"),
        "8": (40, list(range(40)), "inferred", "short", "nccl"),
        "9": (2, [1, 2], "header", None, "nccl"),
    }
    assert ordered_calls(run)[0]["group_rank"] == 1


# The file ------------------------------------------------------------------------------------------------------------


def two_ranks(folder: Path) -> Path:
    folder.mkdir()
    for rank in (1, 0):
        events: list[dict[str, Any]] = []
        for i in range(400):
            at = 10_000 - 20 * i  # backwards: the order of the file is not that of the trace
            events += [
                cpu("aten::mm", at, 3), mark("m", at, 2),
                cpu("record_param_comms", at + 1, 2, **collective("allreduce", i, i, Seq=i), **{"External id": 3 * i + 1}),
                launch(at + 1, 3 * i + 1), kernel("gemm", at + 2, 1, 3 * i + 2),
                kernel(NCCL, at + 4 + rank, 5, 3 * i + 1, **collective("allreduce", i, i), **{"External id": 3 * i + 1}),
            ]  # fmt: skip
        with gzip.open(folder / f"worker{rank}.json.gz", "wt") as file:
            json.dump(document(*events, rank=rank), file)
    return folder


def test_rows_are_ordered_and_row_groups_never_mix_kinds(
    import_files: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "ROW_GROUP", 100)
    run = import_files([two_ranks(tmp_path / "traces")])
    file = pq.ParquetFile(run.path)
    rows = file.read(columns=["kind", "rank", "start_ns", "t_issue_ns"]).to_pylist()
    order = [(r["kind"], r["rank"], r["start_ns"] if r["start_ns"] is not None else r["t_issue_ns"]) for r in rows]
    timed = [o for o in order if o[2] is not None]
    assert timed == sorted(timed)
    assert [o[:2] for o in order] == sorted((o[:2] for o in order), key=lambda o: (o[0], -1 if o[1] is None else o[1]))
    assert file.num_row_groups > len(schema.KINDS)
    for group in range(file.num_row_groups):
        assert len(set(file.read_row_group(group, columns=["kind"])["kind"].to_pylist())) == 1
    assert {r["kind"] for r in rows} == {"comm_record", "cpu_op", "kernel", "process_group", "rank", "span"}
    assert run.result.rows == {kind: sum(r["kind"] == kind for r in rows) for kind in {r["kind"] for r in rows}}


def test_the_file_describes_itself(import_text: Import) -> None:
    run = import_text(document(kernel("k", 1, 1, 1)), metadata={"traceanalyzer.job.intended": "{}"})
    found = pq.read_schema(run.path)
    assert found.names == [c.name for c in schema.COLUMNS]
    assert found.metadata[schema.META_SCHEMA.encode()] == b"1.2"
    assert json.loads(found.metadata[schema.META_IMPORT.encode()]) == {"source": "kineto", "status": "complete"}
    assert found.metadata[schema.META_JOB_INTENDED.encode()] == b"{}"


def test_several_workers_give_the_same_bytes_as_one(tmp_path: Path) -> None:
    traces = two_ranks(tmp_path / "traces")
    told: list[tuple[str, int]] = []
    one = importers.import_traces([traces], tmp_path / "one.parquet")
    two = importers.import_traces(
        [traces], tmp_path / "two.parquet", workers=2, progress=lambda path, n: told.append((path.name, n))
    )
    assert one.document() == {**two.document(), "out": str(one.out)}
    assert pq.read_table(tmp_path / "one.parquet").equals(pq.read_table(tmp_path / "two.parquet"), check_metadata=True)
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()
    assert sorted(told) == sorted((p.name, p.stat().st_size) for p in traces.iterdir())


def test_a_folder_gets_one_file_per_rank(tmp_path: Path) -> None:
    traces = two_ranks(tmp_path / "traces")
    result = importers.import_traces([traces], tmp_path / "run")
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["rank-00000.parquet", "rank-00001.parquet"]
    whole = importers.import_traces([traces], tmp_path / "run.parquet")
    assert (result.status, result.rows, result.ranks) == (whole.status, whole.rows, [0, 1])


def test_a_folder_keeps_no_rank_of_an_earlier_import_and_all_that_is_not_ours(tmp_path: Path) -> None:
    traces = two_ranks(tmp_path / "traces")
    out = tmp_path / "run"
    importers.import_traces([traces], out)
    (out / "rank-notes.parquet").write_bytes(b"no Parquet")
    pq.write_table(
        pq.read_table(out / "rank-00000.parquet").select(["name"]).replace_schema_metadata({}), out / "rank-7.parquet"
    )
    (out / "kept.parquet").write_bytes((out / "rank-00001.parquet").read_bytes())
    importers.import_traces([traces / "worker0.json.gz"], out)
    assert sorted(p.name for p in out.iterdir()) == [
        "kept.parquet",
        "rank-00000.parquet",
        "rank-7.parquet",
        "rank-notes.parquet",
    ]


@pytest.mark.parametrize("out", ["run.parquet", "run"])
@pytest.mark.parametrize("where", ["read", "write", "merge"])
def test_a_failing_import_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, out: str) -> None:
    traces = two_ranks(tmp_path / "traces")
    target = tmp_path / "results"
    target.mkdir()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    if where == "read":
        monkeypatch.setattr(kineto._Reader, "_take", fail)
    elif where == "write":
        monkeypatch.setattr(kineto._Reader, "_final", fail)
    else:
        seen: list[object] = []
        real = importers._kind_of

        def fail_later(*args: Any) -> str:
            seen.append(args)
            if len(seen) > 20:
                raise RuntimeError("planted")
            return real(*args)

        monkeypatch.setattr(importers, "_kind_of", fail_later)
    with pytest.raises(RuntimeError, match="planted"):
        importers.import_traces([traces], target / out)
    left = [str(p.relative_to(target)) for p in target.rglob("*")]
    assert left in ([], ["run"])  # the folder that was asked for, empty
    monkeypatch.undo()
    assert importers.import_traces([traces], target / out).status == "complete"
    assert not [p for p in target.rglob("*") if ".part" in p.name or p.name.startswith(".")]


def test_of_an_imported_file_only_its_part_is_left(tmp_path: Path) -> None:
    """A thousand ranks are imported one after the other: what one needed on disk is gone before the next."""
    traces = two_ranks(tmp_path / "traces")
    work = tmp_path / "work"
    work.mkdir()
    kineto.import_file(traces / "worker0.json.gz", work / "part.parquet", work=work)
    assert [p.name for p in work.iterdir() if p.is_file()] == ["part.parquet"]


def test_an_import_over_an_existing_run_replaces_it_only_when_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = two_ranks(tmp_path / "traces")
    out = tmp_path / "run.parquet"
    importers.import_traces([traces / "worker0.json.gz"], out)
    before = out.read_bytes()
    monkeypatch.setattr(importers, "_kind_of", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        importers.import_traces([traces], out)
    assert out.read_bytes() == before


def test_what_is_no_kineto_trace_is_refused_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    for text, message in (
        ('{"traceEvents": [{"ph": "B", "name": "a", "ts": 1, "pid": 1}]}', "no complete one"),
        ('{"entries": [1]}', "no traceEvents"),
        ("", "empty"),
    ):
        path.write_text(text)
        result = importers.import_traces([path], tmp_path / "run.parquet")
        assert (result.status, result.out) == ("refused", None)
        assert message in str(result.files[0].reason)
        assert result.document()["files"][0]["reason"] == result.files[0].reason
        assert [i["code"] for i in result.issues] == ["file_refused"]
    assert not (tmp_path / "run.parquet").exists()


def test_a_file_that_cannot_be_opened_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank0.json"
    path.write_text("{}")
    monkeypatch.setattr(Path, "open", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    summary = kineto.import_file(path, tmp_path / "part.parquet", work=tmp_path)
    assert summary.status == "refused"
    assert summary.reason == f"{path}: cannot be opened (Permission denied)."


def test_paths_that_hold_no_traces_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        importers.trace_files([tmp_path / "missing"])
    with pytest.raises(InputError, match=r"no \.json or \.json\.gz file"):
        importers.trace_files([tmp_path])
    for name in ("b.json", "a.json.gz", "c.json.tmp", "notes.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.pt.trace.json").write_text("x")
    found = importers.trace_files([tmp_path, tmp_path / "b.json"])
    assert [p.name for p in found] == ["a.json.gz", "b.json", "c.json.tmp", "d.pt.trace.json"]


def test_of_two_files_of_one_rank_the_one_recorded_first_stays(tmp_path: Path) -> None:
    for name, at in (("first-run.json", 50), ("later-run.json", 5000)):
        (tmp_path / name).write_text(json.dumps(document(kernel(name, at, 1, 1), rank=0)))
    result = importers.import_traces([tmp_path], tmp_path / "run.parquet")
    assert (result.status, result.ranks) == ("partial", [0])
    [issue] = [i for i in result.issues if i["code"] == "rank_twice"]
    assert issue["source_file"] == "later-run.json"
    names = queried(f"SELECT name FROM '{tmp_path / 'run.parquet'}' WHERE kind = 'kernel'")
    assert names == [("first-run.json",)]


def test_the_workers_are_those_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    assert importers.default_workers() == 3
