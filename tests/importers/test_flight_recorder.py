"""Dumps of PyTorch's flight recorder -> rows."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from traceanalyzer.importers import flight_recorder, import_traces

T = 1_758_610_505_000_000_000
GROUPS = {
    "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
    "7": {"name": "7", "desc": "PIPELINE_MODEL_PARALLEL_GROUP", "ranks": "[1, 3]"},
}


def entry(record_id: int, name: str = "nccl:all_reduce", **more: Any) -> dict[str, Any]:
    """An entry of the ring: a small all-reduce on the world, unless told otherwise."""
    return {
        "record_id": record_id,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": record_id + 1,
        "p2p_seq_id": 0,
        "op_id": record_id + 1,
        "profiling_name": name,
        "time_created_ns": T + record_id,
        "input_sizes": [[4, 2]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4, 2]],
        "output_dtypes": ["BFloat16"],
        "state": "completed",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": True,
        "timeout_ms": 600000,
        "is_p2p": False,
        **more,
    }


P2P: dict[str, Any] = {"process_group": ("7", "PIPELINE_MODEL_PARALLEL_GROUP"), "is_p2p": True, "collective_seq_id": 3}

Imported = Callable[..., tuple[Any, dict[str, list[dict[str, Any]]]]]


@pytest.fixture
def imported(tmp_path: Path) -> Imported:
    """Writes a dump (as a pickle; JSON by its name; bytes as they are) and imports it: summary, and rows by kind."""

    def run(content: Any, name: str = "r00003.pickle", **options: Any) -> Any:
        path = tmp_path / name
        if not isinstance(content, bytes):
            content = json.dumps(content).encode() if ".json" in name else pickle.dumps(content, protocol=2)
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return read(path, tmp_path, **options)

    return run


def read(path: Path, folder: Path, **options: Any) -> tuple[Any, dict[str, list[dict[str, Any]]]]:
    summary = flight_recorder.import_file(path, folder / "part.parquet", **options)
    rows: dict[str, list[dict[str, Any]]] = {}
    if summary.part is not None:
        for row in pq.read_table(summary.part).to_pylist():
            rows.setdefault(row.pop("kind"), []).append({k: v for k, v in row.items() if v is not None})
    return summary, rows


def dump(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A dump of version 2.10 with these entries."""
    return {"version": "2.10", "comm_lib_version": "2.27.3", "pg_config": GROUPS, "entries": list(entries), **more}


def test_everything_that_a_dump_says_becomes_rows(imported: Imported) -> None:
    summary, rows = imported(
        dump(
            entry(0, time_discovered_started_ns=T + 50, time_discovered_completed_ns=T + 90),
            entry(1, "nccl:_all_gather_base", output_sizes=[[16, 2]], state="started", duration_ms=0.25),
            entry(2, "nccl:send 1->0", **P2P, p2p_seq_id=8, state="scheduled", output_sizes=[], retired=False),
            entry(3, "nccl:broadcast", input_dtypes=["Float", "Long"]),
        )
    )
    about = {"rank": 3, "source": "flight_recorder", "completeness": "not_profiled"}
    world = {"group_id": "0", "group_size": 4, "group_rank": 3, "is_p2p": False, "dtype": "bfloat16"}

    def one(number: int, **more: Any) -> dict[str, Any]:
        ids = {"call_id": number, "coalesce_id": number, "seq": number + 1, "t_issue_ns": T + number}
        return {**about, **ids, "in_elems": 8, "out_elems": 8, **more}

    first = one(0, **world, op="all_reduce", op_raw="nccl:all_reduce", work_state="completed")
    second = one(1, **world, op="all_gather", op_raw="nccl:_all_gather_base", out_elems=32, work_state="started")
    message = {
        "group_id": "7",
        "group_size": 2,
        "group_rank": 1,
        "is_p2p": True,
        "dtype": "bfloat16",
        "peer": 1,
        "seq": 8,
    }
    fourth = one(3, **world, op="broadcast", op_raw="nccl:broadcast", work_state="completed")
    del fourth["dtype"]  # two types in one call
    assert sorted(rows["comm_record"], key=lambda row: row["call_id"]) == [
        {**first, "start_ns": T + 50, "dur_ns": 40, "time_source": "watchdog"},
        {**second, "dur_ns": 250_000, "time_source": "cuda_event"},
        one(2, **message, op="send", op_raw="nccl:send 1->0", work_state="scheduled"),
        fourth,
    ]
    assert rows["process_group"] == [
        {
            "rank": 3,
            "source": "flight_recorder",
            "group_id": name,
            "name": name,
            "description": said["desc"],
            "group_size": len(json.loads(said["ranks"])),
            "ranks": json.loads(said["ranks"]),
            "ranks_source": "flight_recorder",
        }
        for name, said in GROUPS.items()
    ]
    (rank,) = rows["rank"]
    assert (rank["versions"], rank["events_read"], rank["rank_source"]) == (
        '{"flight_recorder": "2.10", "nccl": "2.27.3"}',
        4,
        "file name",
    )
    assert (summary.status, summary.rank, summary.issues) == ("complete", 3, [])


def test_the_entry_that_closes_a_group_speaks_for_its_calls(imported: Imported) -> None:
    open_ended = {"state": "scheduled", **P2P, "p2p_seq_id": 5}
    _, rows = imported(
        dump(
            entry(0, "nccl:send 1->0", **open_ended),
            entry(1, "nccl:recv 1<-0", **open_ended),
            entry(
                2,
                "nccl:coalesced",
                **{**open_ended, "state": "completed"},
                input_sizes=[],
                output_sizes=[],
                duration_ms=1.5,
            ),
            entry(3),
        )
    )
    assert [(r["op"], r["coalesce_id"], r["work_state"], r.get("dur_ns")) for r in rows["comm_record"]] == [
        ("send", 0, "completed", 1_500_000),
        ("recv", 0, "completed", 1_500_000),
        ("all_reduce", 2, "completed", None),
    ]


def test_json_says_what_the_pickle_says(imported: Imported) -> None:
    content = dump(
        entry(0), entry(1, "nccl:barrier", input_sizes=[], output_sizes=[], input_dtypes=[], output_dtypes=[])
    )
    _, from_pickle = imported(content)
    in_json = json.loads(json.dumps(content))
    for e in in_json["entries"]:
        e["time_discovered_started_ns"] = e["time_discovered_completed_ns"] = 0
    for name in ("fr3.json", "fr3.json.gz"):
        _, from_json = imported(in_json, name)
        assert from_json["comm_record"] == from_pickle["comm_record"]
    assert [r["in_elems"] for r in from_pickle["comm_record"]] == [8, 0]


def test_a_ring_that_wrapped_says_what_is_gone(imported: Imported) -> None:
    summary, rows = imported(dump(entry(100), entry(102), 5))  # type: ignore[arg-type]
    assert summary.status == "complete with rejects"
    assert {row["code"]: row["occurrences"] for row in rows["issue"]} == {
        "ring_wrapped": 100,
        "entries_left_out": 1,
        "odd_record": 1,
    }


class _Evil:
    def __reduce__(self) -> Any:
        return os.getcwd, ()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"entries": _Evil()}, "asks for posix.getcwd"),
        (pickle.dumps(dump(entry(0)))[:-20], "a damaged one"),
        ([1, 2], "no list of entries"),
        ({"version": "3.0", "entries": []}, "of version 3.0; this program reads 2.x"),
    ],
)
def test_what_is_no_dump_is_refused(imported: Imported, content: Any, reason: str) -> None:
    summary, _ = imported(content)
    assert summary.status == "refused"
    assert reason in summary.reason


@pytest.mark.parametrize(
    ("name", "rank"),
    [("r00003.pickle", 3), ("_dump_12", 12), ("fr2.json.gz", 2), ("nccl_trace_rank_7", 7), ("p411.pickle", None)],
)
def test_the_rank_is_in_the_name(name: str, rank: int | None) -> None:
    assert flight_recorder.rank_of_name(name) == rank


def test_import_takes_a_dump(tmp_path: Path) -> None:
    path = tmp_path / "_dump_1"
    path.write_bytes(pickle.dumps(dump(entry(0))))
    result = import_traces([path], tmp_path / "run.parquet")
    assert (result.status, result.ranks, result.rows) == (
        "complete",
        [1],
        {"comm_record": 1, "process_group": 2, "rank": 1},
    )


def test_a_trace_of_the_same_rank_counts_before_a_dump(tmp_path: Path) -> None:
    """The dump, recorded earlier, is an issue; the trace's rows stay. Two dumps of one rank: the first stays."""
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1e9, "dur": 1, "args": {"stream": 7, "device": 0}}
    (tmp_path / "rank1.json").write_text(
        json.dumps({"schemaVersion": 1, "distributedInfo": {"rank": 1}, "traceEvents": [kernel]})
    )
    (tmp_path / "_dump_1").write_bytes(pickle.dumps(dump(entry(0))))
    result = import_traces([tmp_path / "_dump_1", tmp_path / "rank1.json"], tmp_path / "run.parquet")
    assert (result.status, result.ranks) == ("partial", [1])
    assert {k: result.rows.get(k, 0) for k in ("comm_record", "kernel", "rank")} == {
        "comm_record": 0,
        "kernel": 1,
        "rank": 1,
    }
    [issue] = [i for i in result.issues if i["code"] == "record_beside_trace"]
    assert (issue["severity"], issue["source_file"]) == ("warning", "_dump_1")
    (tmp_path / "_dump_01").write_bytes(pickle.dumps(dump(entry(0))))
    two = import_traces([tmp_path / "_dump_1", tmp_path / "_dump_01"], tmp_path / "two.parquet")
    assert [i["code"] for i in two.issues if i["code"] != "record_beside_trace"].count("rank_twice") == 1


@pytest.mark.shared
def test_a_real_job_that_hung(shared: Callable[[str], Path], tmp_path: Path) -> None:
    _, rows = read(shared("traces/nvrx_flight_recorder/gpu_error_1st/_dump_9"), tmp_path)
    assert [(r["op"], r.get("peer"), r["work_state"]) for r in rows["comm_record"] if r["is_p2p"]][:2] == [
        ("recv", 13, "scheduled"),
        ("send", 13, "scheduled"),
    ]
    assert len(rows["comm_record"]) == 19
    assert {g["description"] for g in rows["process_group"]} >= {
        "TENSOR_MODEL_PARALLEL_GROUP",
        "EXPERT_DATA_PARALLEL_GROUP",
    }


@pytest.mark.shared
def test_gloo_records_groups_and_sizes(shared: Callable[[str], Path], tmp_path: Path) -> None:
    _, rows = read(shared("traces/gloo_torch213/fr0.json.gz"), tmp_path)
    assert len(rows["comm_record"]) == 139
    assert {r["work_state"] for r in rows["comm_record"]} == {"scheduled"}
    assert {g["group_id"]: g["description"] for g in rows["process_group"]}["3"] == "DATA_PARALLEL_GROUP"
