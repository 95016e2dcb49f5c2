"""Rows of a run written as the profiler would, and read back: nothing is lost that a trace of that version can hold."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from traceanalyzer import schema
from traceanalyzer.errors import InputError
from traceanalyzer.importers import import_traces
from traceanalyzer.importers.spool import RunWriter, table_of
from traceanalyzer.run import Run
from traceanalyzer.simulate.costs import Costs
from traceanalyzer.simulate.engine import run as simulated
from traceanalyzer.simulate.kineto import NOT_CARRIED, write_kineto
from traceanalyzer.simulate.program import (
    Begin,
    Call,
    Compute,
    End,
    Group,
    Host,
    Instruction,
    Program,
    Sync,
    Wait,
    Walked,
    Where,
)
from traceanalyzer.simulate.rows import Collected, write_rows

Rows = dict[str, Sequence[dict[str, Any]]]
COMPARED = ("comm_record", "cpu_op", "kernel", "process_group", "span")
FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
# 228 times 7889238 s, the last multiple before the times below
BASE = 1_798_746_264_000_000_000
START = 1_800_000_000_000_000_000


def stored(path: Path, rows: Rows) -> Path:
    """A run table of these rows, all of rank 1 and source kineto unless they say otherwise."""
    with RunWriter(path, {}) as writer:
        for kind in sorted(rows):
            writer.write(kind, [table_of(kind, [{"rank": 1, "source": "kineto", **row} for row in rows[kind]])])
    return path


def document(path: Path) -> dict[str, Any]:
    text = path.read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(text) if path.suffix == ".gz" else text)
    return found


def as_lines(events: Iterable[dict[str, Any]]) -> list[str]:
    return [json.dumps(event) for event in events]


# there and back -------------------------------------------------------------------------------------------------------


def there_and_back(source: Path, folder: Path, torch: str) -> tuple[Path, Path]:
    first, second = folder / "first.parquet", folder / "second.parquet"
    import_traces([source], first)
    import_traces(write_kineto(first, folder / "written", torch=torch), second)
    return first, second


def check(source: Path, folder: Path, torch: str, expected: tuple[int, ...], added_spans: int = 0) -> None:
    """Every row comes back with all its columns, and no other; of the row of the rank what NOT_CARRIED does not name."""
    first, second = there_and_back(source, folder, torch)
    with Run.open(first) as run:
        run.connection.execute(f"CREATE VIEW back AS SELECT * FROM read_parquet('{second}')")

        def count(table: str) -> tuple[int, ...]:
            found = dict(run.tuples(f"SELECT kind, count(*) FROM {table} GROUP BY kind"))
            return tuple(found.get(kind, 0) for kind in COMPARED)

        assert count("run") == expected
        assert count("back") == (*expected[:-1], expected[-1] + added_spans)
        lost = {}
        for kind in COMPARED:
            columns = ", ".join(c.name for c in schema.columns_of(kind))
            rows = f"SELECT {columns} FROM {{}} WHERE kind = '{kind}'"
            lost[kind] = run.value(f"SELECT count(*) FROM ({rows.format('run')} EXCEPT ALL {rows.format('back')})")
        assert lost == dict.fromkeys(COMPARED, 0)
        kept = [c.name for c in schema.columns_of("rank") if f"rank.{c.name}" not in NOT_CARRIED]
        rank = f"SELECT {', '.join(kept)} FROM {{}} WHERE kind = 'rank'"
        assert run.rows(rank.format("run")) == run.rows(rank.format("back"))


def test_rows_of_the_recorded_fixture_come_back(tmp_path: Path) -> None:
    check(FIXTURES / "megatron_tp2_sp" / "rank0.json.gz", tmp_path, "2.13", (59, 5916, 0, 18, 69))


@pytest.mark.shared
@pytest.mark.parametrize(
    ("source", "torch", "expected", "added_spans"),
    [
        # calls, host events, device activities, groups, ranges; the profiler's own span and two marks that a source lacks
        ("megatron_tp8_a100/megatron_kineto_0.json.gz", "2.2", (85, 8951, 777, 2, 90), 0),
        ("nanogpt_dp8_h100/Baseline - 12-11 - 220ff-rank6-chrome-trace.json.gz", "2.13", (56, 13620, 4283, 1, 244), 0),
        ("gloo_torch213/rank0.json.gz", "2.13", (92, 2787, 0, 7, 229), 0),
        ("gloo_torch213/record_param_comms.json.gz", "2.13", (12, 13, 0, 8, 3), 0),
        ("hta_nccl_metadata_a100_x2/nccl_data.json.gz", "2.4", (21, 23086, 3774, 1, 75), 0),
        ("torchao_ep_moe_b200/ref_ep_moe_fwd.json.gz", "2.13", (30, 4881, 914, 1, 66), 0),
        ("tracelens_vllm_b200_x8/eager_trace.json.gz", "2.13", (1, 21411, 929, 15, 15), 3),
        ("hta_odd/rank_non_gpu.json.gz", "1.13", (6, 2424, 0, 0, 43), 3),
    ],
)
def test_rows_of_real_traces_come_back(
    shared: Callable[[str], Path], tmp_path: Path, source: str, torch: str, expected: tuple[int, ...], added_spans: int
) -> None:
    check(shared(f"traces/{source}"), tmp_path, torch, expected, added_spans)


# one call, word for word ----------------------------------------------------------------------------------------------

GROUP = {
    "group_id": "0", "name": "0", "description": "default_pg", "backend": "cuda:nccl", "group_size": 4,
    "ranks": [0, 1, 2, 3], "ranks_source": "header",
}  # fmt: skip
RANK = {
    "pid": 4321, "host": "node-a", "rank_source": "header", "world_size": 4, "device": 1,
    "device_name": "NVIDIA H100 80GB HBM3", "versions": '{"backend": "nccl", "nccl": "2.28.9", "cupti": "28"}',
}  # fmt: skip
ALL_GATHER = {
    "call_id": 0, "coalesce_id": 0, "op": "all_gather", "op_raw": "_allgather_base", "group_id": "0", "group_size": 4,
    "group_rank": 1, "seq": 5, "comms_id": 12345678901234567890, "is_p2p": False, "dtype": "bfloat16", "in_elems": 1024,
    "out_elems": 4096, "is_async": False, "pid": 4321, "tid": 4322, "external_id": 8, "t_issue_ns": START + 1_234,
    "t_issue_end_ns": START + 21_734, "start_ns": START + 40_007, "dur_ns": 30_009, "time_source": "kernel",
    "join_evidence": "external_id", "completeness": "full",
}  # fmt: skip
KERNEL = {
    "start_ns": START + 40_007, "dur_ns": 30_009, "name": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "category": "kernel", "device": 1, "stream": 17, "correlation": 77, "external_id": 8, "kernel_class": "comm",
    "kernel_op": "all_gather", "launch_ns": START + 16_234, "coalesce_id": 0, "join_evidence": "external_id",
    "completeness": "full",
}  # fmt: skip
ONE_CALL: Rows = {"comm_record": [ALL_GATHER], "kernel": [KERNEL], "process_group": [GROUP], "rank": [RANK]}

KERNEL_NAME = KERNEL["name"]

TORCH_2_13 = [
    (
        '{"ph": "X", "cat": "cpu_op", "name": "c10d::_allgather_base_", "pid": 4321, "tid": 4322, "ts": 1253736000001.234, '
        '"dur": 20.5, "args": {"External id": 9, "Record function id": 0, "Ev Idx": 0}}'
    ),
    (
        '{"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 4321, "tid": 4322, "ts": 1253736000001.234, '
        '"dur": 20.5, "args": {"External id": 8, "Record function id": 0, "Process Group Name": "0", '
        '"Comms Id": 12345678901234567890, "In split size": "[]", "Out split size": "[]", "Out msg nelems": 4096, '
        '"Process Group Ranks": "[0, 1, 2, 3]", "Group size": 4, "Global rank stride": 1, "Seq": 5, '
        '"Is asynchronized op": 0, "Collective name": "_allgather_base", "Process Group Description": "default_pg", '
        '"dtype": "BFloat16", "Rank": 1, "In msg nelems": 1024, "Global rank start": 0, "Ev Idx": 1}}'
    ),
    (
        '{"ph": "X", "cat": "user_annotation", "name": "nccl:_all_gather_base", "pid": 4321, "tid": 4322, '
        '"ts": 1253736000001.234, "dur": 20.5, "args": {"External id": 10, "Record function id": 0, "Ev Idx": 2}}'
    ),
    (
        '{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernelExC", "pid": 4321, "tid": 4322, '
        '"ts": 1253736000016.234, "dur": 5.0, "args": {"External id": 8, "cbid": 430, "correlation": 77}}'
    ),
    '{"ph": "s", "id": 77, "pid": 4321, "tid": 4322, "ts": 1253736000016.234, "cat": "ac2g", "name": "ac2g"}',
    (
        '{"ph": "X", "cat": "gpu_user_annotation", "name": "nccl:_all_gather_base", "pid": 1, "tid": 17, '
        '"ts": 1253736000040.006, "dur": 30.011, "args": {"External id": 10}}'
    ),
    (
        f'{{"ph": "X", "cat": "kernel", "name": "{KERNEL_NAME}", "pid": 1, "tid": 17, "ts": 1253736000040.007, '
        '"dur": 30.009, "args": {"External id": 8, "queued": 0, "device": 1, "context": 1, "stream": 17, "correlation": 77, '
        '"grid": [1, 1, 1], "block": [1, 1, 1], "graph id": 0, "graph node id": 0, "Collective name": "_allgather_base", '
        '"In msg nelems": 1024, "Out msg nelems": 4096, "Group size": 4, "dtype": "BFloat16", "In split size": "[]", '
        '"Out split size": "[]", "Process Group Name": "0", "Process Group Description": "default_pg", '
        '"Process Group Ranks": "[0, 1, 2, 3]", "Seq": 5, "Comms Id": 12345678901234567890}}'
    ),
    '{"ph": "f", "id": 77, "pid": 1, "tid": 17, "ts": 1253736000040.007, "cat": "ac2g", "name": "ac2g", "bp": "e"}',
]
TORCH_2_4 = [
    TORCH_2_13[0],
    (
        '{"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 4321, "tid": 4322, "ts": 1253736000001.234, '
        '"dur": 20.5, "args": {"External id": 8, "Record function id": 0, "Process Group Name": "0", '
        '"In split size": "[]", "Out split size": "[]", "Out msg nelems": 4096, "Process Group Ranks": "[0, 1, 2, 3]", '
        '"Group size": 4, "Global rank stride": 1, "Collective name": "_allgather_base", '
        '"Process Group Description": "default_pg", "dtype": "BFloat16", "In msg nelems": 1024, "Global rank start": 0, '
        '"Ev Idx": 1}}'
    ),
    *TORCH_2_13[2:6],
    (
        f'{{"ph": "X", "cat": "kernel", "name": "{KERNEL_NAME}", "pid": 1, "tid": 17, "ts": 1253736000040.007, '
        '"dur": 30.009, "args": {"External id": 8, "queued": 0, "device": 1, "context": 1, "stream": 17, "correlation": 77, '
        '"grid": [1, 1, 1], "block": [1, 1, 1], "Collective name": "_allgather_base", "In msg nelems": 1024, '
        '"Out msg nelems": 4096, "Group size": 4, "dtype": "BFloat16", "In split size": "[]", "Out split size": "[]", '
        '"Process Group Name": "0", "Process Group Description": "default_pg", "Process Group Ranks": "[0, 1, 2, 3]"}}'
    ),
    TORCH_2_13[7],
]
# whole microseconds, rounded down; no metadata, sizes on the shapes alone; the kernel's External id is its correlation
TORCH_1_13 = [
    (
        '{"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 4321, "tid": 4322, "ts": 1800000000000001, '
        '"dur": 20, "args": {"Trace name": "PyTorch Profiler", "Trace iteration": 0, "External id": 8, '
        '"Profiler Event Index": 0, "Module Hierarchy": "", "Call stack": ""}}'
    ),
    (
        '{"ph": "X", "cat": "user_annotation", "name": "nccl:_all_gather_base", "pid": 4321, "tid": 4322, '
        '"ts": 1800000000000001, "dur": 20, "args": {"Trace name": "PyTorch Profiler", "Trace iteration": 0, '
        '"External id": 9, "Profiler Event Index": 1, "Input Dims": [[1024]], "Input type": ["c10::BFloat16"], '
        '"Module Hierarchy": "", "Call stack": ""}}'
    ),
    (
        '{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernelExC", "pid": 4321, "tid": 4322, '
        '"ts": 1800000000000016, "dur": 5, "args": {"External id": 77, "cbid": 430, "correlation": 77}}'
    ),
    '{"ph": "s", "id": 77, "pid": 4321, "tid": 4322, "ts": 1800000000000016, "cat": "ac2g", "name": "ac2g"}',
    (
        f'{{"ph": "X", "cat": "kernel", "name": "{KERNEL_NAME}", "pid": 1, "tid": 17, "ts": 1800000000000040, "dur": 30, '
        '"args": {"External id": 77, "queued": 0, "device": 1, "context": 1, "stream": 17, "correlation": 77, '
        '"grid": [1, 1, 1], "block": [1, 1, 1]}}'
    ),
    '{"ph": "f", "id": 77, "pid": 1, "tid": 17, "ts": 1800000000000040, "cat": "ac2g", "name": "ac2g", "bp": "e"}',
]


@pytest.mark.parametrize(
    ("torch", "expected", "head"),
    [
        (
            "2.13",
            TORCH_2_13,
            ["schemaVersion", "deviceProperties", "cupti_version", "distributedInfo", "trace_id", "host_name",
             "displayTimeUnit", "baseTimeNanoseconds", "traceEvents", "traceName"],
        ),
        (
            "2.4",
            TORCH_2_4,
            ["schemaVersion", "deviceProperties", "cupti_version", "distributedInfo", "traceEvents", "traceName",
             "displayTimeUnit", "baseTimeNanoseconds"],
        ),
        (
            "1.13",
            TORCH_1_13,
            ["schemaVersion", "deviceProperties", "distributedInfo", "record_shapes", "traceEvents", "traceName"],
        ),
    ],
)  # fmt: skip
def test_one_call_word_for_word(tmp_path: Path, torch: str, expected: list[str], head: list[str]) -> None:
    (path,) = write_kineto(stored(tmp_path / "run.parquet", ONE_CALL), tmp_path, torch=torch, compress=False)
    assert path.name == "rank-1.json"
    found = document(path)
    assert list(found) == head
    events = found["traceEvents"]
    assert as_lines(e for e in events if e["ph"] in "Xsf" and e.get("cat") != "Trace") == expected
    assert found["deviceProperties"] == [{"id": 1, "name": "NVIDIA H100 80GB HBM3"}]
    assert found["traceName"] == "rank-1.json"
    if torch == "1.13":
        assert found["distributedInfo"] == {"backend": "nccl", "rank": 1, "world_size": 4}
    else:
        assert found["baseTimeNanoseconds"] == BASE
        assert found["distributedInfo"] == {
            "backend": "nccl", "rank": 1, "world_size": 4, "pg_count": 1,
            "pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "pg_size": 4,
                           "ranks": [0, 1, 2, 3]}],
            "nccl_version": "2.28.9",
        }  # fmt: skip


def test_names_of_processes_and_marks_of_the_profiler(tmp_path: Path) -> None:
    (path,) = write_kineto(stored(tmp_path / "run.parquet", ONE_CALL), tmp_path)
    events = document(path)["traceEvents"]
    names = [(e["name"], e["pid"], e["tid"], e["args"]) for e in events[:10]]
    assert names == [
        ("process_name", 4321, 0, {"name": "python"}),
        ("process_labels", 4321, 0, {"labels": "CPU"}),
        ("process_sort_index", 4321, 0, {"sort_index": 4321}),
        ("process_name", 1, 0, {"name": "python"}),
        ("process_labels", 1, 0, {"labels": "GPU 1"}),
        ("process_sort_index", 1, 0, {"sort_index": 16777217}),
        ("thread_name", 1, 17, {"name": "stream 17 "}),
        ("thread_sort_index", 1, 17, {"sort_index": 17}),
        ("thread_name", 4321, 4322, {"name": "thread 4322 (python)"}),
        ("thread_sort_index", 4321, 4322, {"sort_index": 4322}),
    ]
    assert as_lines(events[-4:]) == [
        (
            '{"ph": "X", "cat": "Trace", "ts": 1253736000001.234, "dur": 68.782, "pid": "Spans", "tid": "PyTorch Profiler", '
            '"name": "PyTorch Profiler (0)", "args": {"Op count": 0}}'
        ),
        (
            '{"name": "process_sort_index", "ph": "M", "ts": 1253736000001.234, "pid": "Spans", "tid": 0, '
            '"args": {"sort_index": 536870912}}'
        ),
        (
            '{"name": "Iteration Start: PyTorch Profiler", "ph": "i", "s": "g", "pid": "Traces", '
            '"tid": "Trace PyTorch Profiler", "ts": 1253736000001.234}'
        ),
        '{"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": 1253736000070.016}',
    ]


# what the real profiler leaves out ------------------------------------------------------------------------------------

SHORTENED_64 = (
    "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, ..., "
    "63]"
)


def events_of(path: Path, name: str) -> list[dict[str, Any]]:
    return [e for e in document(path)["traceEvents"] if e.get("name", "").startswith(name) and e["ph"] == "X"]


def test_long_lists_are_shortened(tmp_path: Path) -> None:
    group = {**GROUP, "group_size": 64, "ranks": list(range(64)), "ranks_source": "call"}
    exchange = {
        **ALL_GATHER, "op": "all_to_all", "op_raw": "all_to_allv", "group_size": 64, "in_splits": [7] * 64,
        "out_splits": [7] * 30, "splits_known": True,
    }  # fmt: skip
    rows = {**ONE_CALL, "process_group": [group], "comm_record": [exchange]}
    (path,) = write_kineto(stored(tmp_path / "run.parquet", rows), tmp_path)
    for event in (*events_of(path, "record_param_comms"), *events_of(path, "ncclDevKernel")):
        assert event["args"]["Process Group Ranks"] == SHORTENED_64
        assert event["args"]["In split size"] == "[" + "7, " * 30 + "...]"
        assert event["args"]["Out split size"] == "[" + "7, " * 29 + "7]"
    assert "pg_config" not in document(path)["distributedInfo"]
    import_traces([path], tmp_path / "back.parquet")
    with Run.open(tmp_path / "back.parquet") as run:
        assert run.tuples("SELECT ranks, ranks_source FROM process_group") == [(list(range(64)), "inferred")]
        assert run.tuples("SELECT in_splits, out_splits, splits_known FROM comm") == [(None, [7] * 30, False)]


def test_ranks_of_irregular_groups_and_of_one_rank_are_not_written(tmp_path: Path) -> None:
    for ranks, stride in (([0, 1, 3], None), ([1], None), ([1, 3, 5], 2)):
        group = {**GROUP, "group_size": len(ranks), "ranks": ranks, "ranks_source": "call"}
        rows = {**ONE_CALL, "process_group": [group], "comm_record": [{**ALL_GATHER, "group_size": len(ranks)}]}
        (path,) = write_kineto(stored(tmp_path / "run.parquet", rows), tmp_path)
        (event,) = events_of(path, "record_param_comms")
        args = event["args"]
        assert args["Process Group Ranks"] == ("[1, 3, 5]" if stride else "[]")
        assert (args["Global rank start"], args.get("Global rank stride")) == (ranks[0], stride)


def test_batched_messages_have_no_metadata(tmp_path: Path) -> None:
    """A send and a receive launched as one: a bare kernel behind their records, inside nccl:coalesced."""
    send = {
        **ALL_GATHER, "op": "send", "op_raw": "send", "is_p2p": True, "peer": 2, "in_elems": 1024, "out_elems": 1024,
        "join_evidence": "coalesced", "comms_id": None, "group_rank": None,
    }  # fmt: skip
    recv = {
        **send, "call_id": 1, "op": "recv", "op_raw": "recv", "peer": 0, "external_id": 11, "seq": 6,
        "t_issue_ns": START + 21_734, "t_issue_end_ns": START + 30_000,
    }  # fmt: skip
    bare = {
        **KERNEL, "name": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "external_id": None,
        "join_evidence": "coalesced", "launch_ns": START + 31_000,
    }  # fmt: skip
    rows = {**ONE_CALL, "comm_record": [send, recv], "kernel": [bare]}
    (path,) = write_kineto(stored(tmp_path / "run.parquet", rows), tmp_path)
    (kernel,) = events_of(path, "ncclDevKernel")
    assert list(kernel["args"]) == [
        "queued", "device", "context", "stream", "correlation", "grid", "block", "graph id", "graph node id"
    ]  # fmt: skip
    records = [(e["args"]["Collective name"], e["args"].get("Dst Rank"), e["args"].get("Src Rank"), e["args"]["Rank"])
               for e in events_of(path, "record_param_comms")]  # fmt: skip
    assert records == [("send", 2, None, 2), ("recv", None, 0, 0)]
    (mark,) = events_of(path, "nccl:")
    assert (mark["name"], mark["ts"]) == ("nccl:coalesced", 1253736000031.0)
    import_traces([path], tmp_path / "back.parquet")
    with Run.open(tmp_path / "back.parquet") as run:
        columns = "op, peer, coalesce_id, join_evidence, start_ns, dur_ns, t_issue_ns, t_issue_end_ns"
        query = f"SELECT {columns} FROM comm ORDER BY t_issue_ns"
        assert run.tuples(query) == [
            ("send", 2, 0, "coalesced", START + 40_007, 30_009, START + 1_234, START + 21_734),
            ("recv", 0, 0, "coalesced", START + 40_007, 30_009, START + 21_734, START + 30_000),
        ]


def test_kernels_launched_before_the_window_are_bare(tmp_path: Path) -> None:
    early = {
        **KERNEL, "start_ns": START - 90_000, "correlation": 12, "external_id": None, "coalesce_id": None,
        "join_evidence": None, "launch_ns": None, "completeness": "launched_before_window",
    }  # fmt: skip
    rows = {**ONE_CALL, "kernel": [early, KERNEL]}
    (path,) = write_kineto(stored(tmp_path / "run.parquet", rows), tmp_path)
    first, second = events_of(path, "ncclDevKernel")
    assert not {"Collective name", "External id"} & set(first["args"])
    assert second["args"]["Collective name"] == "_allgather_base"
    assert len(events_of(path, "cudaLaunchKernelExC")) == 1
    import_traces([path], tmp_path / "back.parquet")
    with Run.open(tmp_path / "back.parquet") as run:
        assert run.tuples("SELECT completeness FROM kernel ORDER BY start_ns") == [
            ("launched_before_window",),
            ("full",),
        ]
        assert run.value("SELECT count(*) FROM comm") == 1


def test_times_are_exact_from_torch_2_4_on_and_rounded_down_before(tmp_path: Path) -> None:
    times = [START + n for n in (0, 1, 999, 1_000, 1_999, 123_456_789)]
    ops = [
        {"start_ns": t, "dur_ns": 1_999, "name": "aten::add", "category": "cpu_op", "pid": 1, "tid": 1} for t in times
    ]
    run = stored(tmp_path / "run.parquet", {"cpu_op": ops, "rank": [RANK]})
    expected = {
        "2.4": [(t, 1_999) for t in times],
        "1.13": [(t // 1000 * 1000, 1_000) for t in times],
    }
    for torch, found in expected.items():
        back = tmp_path / f"{torch}.parquet"
        import_traces(write_kineto(run, tmp_path / torch, torch=torch), back)
        with Run.open(back) as read:
            assert read.tuples("SELECT start_ns, dur_ns FROM cpu_op ORDER BY start_ns") == found


def test_the_same_bytes_again_and_names_that_need_escaping(tmp_path: Path) -> None:
    name = 'a "quoted" name \\ with é and <tags>'
    op = {"start_ns": START, "dur_ns": 5, "name": name, "category": "cpu_op", "pid": 1, "tid": 1, "external_id": 3}
    run = stored(tmp_path / "run.parquet", {**ONE_CALL, "cpu_op": [op]})
    (first,) = write_kineto(run, tmp_path / "a")
    (second,) = write_kineto(run, tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()
    (plain,) = write_kineto(run, tmp_path / "c", compress=False)
    assert gzip.decompress(first.read_bytes()) == plain.read_bytes()
    assert [e["name"] for e in events_of(first, "a ")] == [name]


def test_what_cannot_be_written_is_refused_in_words(tmp_path: Path) -> None:
    run = stored(tmp_path / "run.parquet", ONE_CALL)
    with pytest.raises(InputError, match=r"torch 9.9: not known. Choose one of 1.13, 2.2, 2.4, 2.13."):
        write_kineto(run, tmp_path, torch="9.9")
    with pytest.raises(InputError, match="holds no rank 3"):
        write_kineto(run, tmp_path, ranks=[3])
    with pytest.raises(InputError, match="holds no rank \\(no row of kind rank\\)"):
        write_kineto(stored(tmp_path / "empty.parquet", {"kernel": [KERNEL]}), tmp_path)


def test_what_is_not_carried_is_named_by_kind_and_column() -> None:
    for key in NOT_CARRIED:
        kind, _, column = key.partition(".")
        if column:
            assert column in {c.name for c in schema.columns_of(kind)}
        else:
            assert kind in schema.KINDS or kind in schema.BY_NAME


# a simulated run ------------------------------------------------------------------------------------------------------


def program(stage: int) -> Program:
    """One step of four of eight ranks: two micro-batches through a pipeline of two stages, all kinds of calls."""
    ranks = tuple(range(stage * 4, stage * 4 + 4))
    peer = np.array([(r + 4) % 8 for r in ranks], np.int64)
    splits = np.array([[16, 48]] * 4)
    body: list[Instruction] = [Begin("ta:step 0"), Host("data")]

    def message(op: str, phase: Any, microbatch: int, batch: int) -> Call:
        return Call("pp", op, "BFloat16", 1024, 1024, Where(phase, microbatch, 0), peer=peer, coalesce=batch)

    def gemm(phase: Any, ns: int, microbatch: int) -> Compute:
        return Compute("gemm_kernel", "gemm", ns * 600_000, 0, Where(phase, microbatch, 0, stage))

    for m in range(2):
        w = Where("forward", m, 0, stage)
        body.append(Begin(f"ta:microbatch {m}"))
        body += [message("recv", "forward", m, m)] if stage else []
        body += [
            Call("tp", "all_gather", "BFloat16", 512, 1024, w),
            gemm("forward", 50, m),
            Call("tp", "reduce_scatter", "BFloat16", 1024, 512, w),
            Call("ep", "all_to_all", "BFloat16", 64, 64, w, in_splits=splits, out_splits=splits, row_elems=16),
        ]
        body += [] if stage else [message("send", "forward", m, m)]
        body.append(End())
    for m in range(2):
        w = Where("backward", m, 0, stage)
        body += [] if stage else [message("recv", "backward", m, 10 + m)]
        body += [gemm("backward", 100, m), Call("tp", "all_reduce", "Float", 256, 256, w, handle=m)]
        body += [message("send", "backward", m, 10 + m)] if stage else []
        body.append(Wait(m))
    # both ways at once, launched as one kernel
    body += [message("send", "other", 0, 20), message("recv", "other", 0, 20)]
    body += [
        Call("dp", "reduce_scatter", "Float", 4096, 2048, Where("other")),
        Call("world", "all_reduce", "Float", 1, 1, Where("optimizer"), reduce_op="max"),
        Compute("adam_kernel", "optimizer", 6_000_000, 0, Where("optimizer")),
        Call("dp", "all_gather", "BFloat16", 2048, 4096, Where("optimizer")),
        Sync(),
        End(),
    ]
    return Program(ranks, body)


@pytest.fixture(scope="module")
def eight_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A simulation of eight ranks: its rows of the profiler alone, and those imported from its traces, by version (of
    the older ones that of one rank)."""
    groups = [Group("world", tuple(range(8)), "default_pg")]
    groups += [Group("tp", (i, i + 1), "TENSOR_MODEL_PARALLEL_GROUP") for i in (0, 2, 4, 6)]
    groups += [Group("dp", (i, i + 2), "DATA_PARALLEL_GROUP_WITH_CP") for i in (0, 1, 4, 5)]
    groups += [Group("ep", (i, i + 2), "EXPERT_MODEL_PARALLEL_GROUP") for i in (0, 1, 4, 5)]
    groups += [Group("pp", (i, i + 4), "PIPELINE_MODEL_PARALLEL_GROUP") for i in range(4)]
    costs = Costs(ranks_per_node=4, jitter=0.05)
    timeline = simulated(Walked([program(0), program(1)], groups), costs, steps=2, seed=3, start_ns=START + 123)
    folder = tmp_path_factory.mktemp("simulated")
    found = {"rows": folder / "rows.parquet"}
    write_rows(timeline, found["rows"], collected=Collected(hooks=False))
    for torch in ("2.13", "2.4", "2.2", "1.13"):
        found[torch] = folder / f"{torch}.parquet"
        ranks = None if torch == "2.13" else [5]
        import_traces(write_kineto(found["rows"], folder / torch, torch=torch, ranks=ranks), found[torch])
    found["hooked"] = folder / "hooked.parquet"
    write_rows(timeline, found["hooked"], collected=Collected())
    return found


def test_queries_over_a_simulation_and_over_its_traces_agree(eight_ranks: dict[str, Path]) -> None:
    with Run.open(eight_ranks["rows"]) as direct, Run.open(eight_ranks["2.13"]) as imported:
        sizes = {}
        for name in ("comm_summary", "time_classes", "exposed_by_role", "bubble"):
            rows = direct.query(name).rows()
            assert imported.query(name).rows() == rows
            sizes[name] = len(rows)
    assert all(sizes.values())
    assert sizes["time_classes"] == 16  # eight ranks, two steps


@pytest.mark.parametrize("torch", ["2.13", "2.4", "2.2", "1.13"])
def test_what_a_version_loses_of_a_simulation_is_named(eight_ranks: dict[str, Path], torch: str) -> None:
    """Calls and kernels are as many, and every column that differs is among NOT_CARRIED."""
    differing: dict[str, set[str]] = defaultdict(set)
    with Run.open(eight_ranks["rows"]) as direct, Run.open(eight_ranks[torch]) as imported:
        for kind, order in (("comm_record", "rank, t_issue_ns, seq"), ("kernel", "rank, start_ns, stream")):
            query = f"SELECT * FROM run WHERE kind = '{kind}' AND rank = 5 ORDER BY {order}"
            first, second = direct.rows(query), imported.rows(query)
            assert len(first) == len(second) > 0
            for a, b in zip(first, second, strict=True):
                for row in (a, b):  # the simulator does not number steps in paths
                    row["call_path"] = [n for n in row["call_path"] or () if not n.startswith("ta:step ")]
                differing[kind] |= {name for name in a if a[name] != b[name]}
    times = {"start_ns", "dur_ns", "t_issue_ns", "t_issue_end_ns", "launch_ns"} if torch in ("2.2", "1.13") else set()
    for kind, names in differing.items():
        assert {f"{kind}.{n}" for n in names - times} <= set(NOT_CARRIED)
    if torch == "2.13":
        assert differing["kernel"] == {"coalesce_id"}


def test_the_marks_of_our_hooks_are_written_with_their_arguments_or_not_at_all(
    eight_ranks: dict[str, Path], tmp_path: Path
) -> None:
    (path,) = write_kineto(eight_ranks["hooked"], tmp_path / "with", ranks=[1])
    ours = events_of(path, "ta:")
    (largest,) = {json.dumps(e["args"]["reduce_op"]) for e in ours if e["args"].get("pg") == "0"}
    assert largest == '"max"'
    assert {"ta:step 0", "ta:step 1", "ta:microbatch 0", "ta:all_gather", "ta:end_coalescing"} <= {
        e["name"] for e in ours
    }
    (without,) = write_kineto(eight_ranks["hooked"], tmp_path / "without", ranks=[1], marks=False)
    assert events_of(without, "ta:") == []
    back = tmp_path / "back.parquet"
    import_traces([path], back)
    query = (
        "SELECT hook_call, op, reduce_op, group_id, seq, start_ns, dur_ns, coalesce_id IS NULL FROM run "
        "WHERE kind = 'comm_record' AND source = 'kineto' AND rank = 1 ORDER BY hook_call"
    )
    with Run.open(eight_ranks["hooked"]) as direct, Run.open(back) as imported:
        rows = direct.tuples(query)
        assert len(rows) == 34
        assert imported.tuples(query) == rows


# keys against real traces ---------------------------------------------------------------------------------------------


def keys(events: Iterable[dict[str, Any]]) -> dict[tuple[str, str], set[str]]:
    """(phase, category and kind of name) -> keys of events and of their arguments."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for event in events:
        name = str(event.get("name"))
        kind = (
            name if name == "record_param_comms" else name.split(":")[0] if name.startswith(("nccl:", "c10d:")) else ""
        )
        place = str(event["ph"]), f"{event.get('cat')} {kind}".strip()
        found[place] |= {*event, *(f"args.{key}" for key in event.get("args") or ())}
    return found


@pytest.mark.shared
@pytest.mark.parametrize(
    ("torch", "sources"),
    [
        ("2.13", ("torchao_ep_moe_b200/ref_ep_moe_fwd.json.gz", "gloo_torch213/record_param_comms.json.gz")),
        ("2.4", ("hta_nccl_metadata_a100_x2/nccl_data.json.gz",)),
        ("2.2", ("megatron_tp8_a100/megatron_kineto_0.json.gz",)),
    ],
)
def test_every_key_is_one_that_the_real_profiler_writes(
    shared: Callable[[str], Path], eight_ranks: dict[str, Path], tmp_path: Path, torch: str, sources: tuple[str, ...]
) -> None:
    real: dict[tuple[str, str], set[str]] = defaultdict(set)
    for source in sources:
        for place, names in keys(document(shared(f"traces/{source}"))["traceEvents"]).items():
            real[place] |= names
    (path,) = write_kineto(eight_ranks["rows"], tmp_path, torch=torch, ranks=[0], marks=False)
    ours = keys(document(path)["traceEvents"])
    assert {("X", "kernel"), ("X", "cpu_op record_param_comms")} <= set(ours)
    # kernels of unbatched messages have these two (reference: record formats, 1.2); no trace here holds such a message
    real["X", "kernel"] |= {"args.Src Rank", "args.Dst Rank"}
    for place, names in ours.items():
        if place in real:  # no trace of 2.4 here holds Python functions
            assert names <= real[place], place
