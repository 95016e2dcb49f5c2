"""A collector's log -> rows: every field of a call, and every way in which a log can be damaged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from traceanalyzer import schema
from traceanalyzer.collectors import record
from traceanalyzer.importers import hook_log, import_traces

T = 1_790_000_000_000_000_000
RUN = {
    "rank": 1,
    "world_size": 4,
    "pid": 4711,
    "host": "node-a",
    "python": "3.11.7",
    "torch": "2.13.0",
    "started_ns": T - 5,
    "restart": 0,
}
GROUP = {
    "name": "3",
    "description": "TENSOR_MODEL_PARALLEL_GROUP",
    "backend": "nccl",
    "ranks": [0, 1],
    "size": 2,
    "rank": 1,
}
PLACE = {"microbatch": 2, "chunk": 0, "layer": 5, "phase": "backward", "component": "attention"}


def call(number: int, op: str = "all_reduce", **more: Any) -> list[Any]:
    """A record of one call; fields that are not given have the values of a small all-reduce."""
    values: dict[str, Any] = {
        "number": number,
        "group": 0,
        "op": op,
        "method": "allreduce",
        "seq": number,
        "dtype": "bfloat16",
        "in_elems": 8,
        "out_elems": 8,
        "t_issue_ns": T + 1000 * number,
        "t_issue_end_ns": T + 1000 * number + 400,
        "step": 0,
        "place": 0,
        "tid": 77,
        **more,
    }
    return ["call", *(values.get(name) for name in record.CALL)]


def end(calls: int, **more: Any) -> list[Any]:
    """The last record of a log that holds this many calls."""
    return ["end", {"calls": calls, "recorded": calls, "dropped": 0, "errors": 0, "disabled": None, **more}]


def step(number: int, first: int, last: int) -> list[Any]:
    """A step's span around these calls."""
    return ["span", "step", f"step {number}", T + 1000 * first - 10, T + 1000 * last + 500, 77, number, 0]


Imported = Callable[..., tuple[hook_log.LogSummary, dict[str, list[dict[str, Any]]]]]


@pytest.fixture
def write_log(tmp_path: Path) -> Callable[..., Path]:
    """Writes records as a log, one frame for each list of them."""

    def write(*frames: Sequence[Any], name: str = "r00001-4711.talog") -> Path:
        log = record.Log(tmp_path / name, interval_s=60)
        assert log.start()
        for frame in frames:
            for item in frame:
                log.put(item)
            log.flush()
        log.close()
        return log.path

    return write


@pytest.fixture
def imported(write_log: Callable[..., Path], tmp_path: Path) -> Imported:
    """Imports records (or a log): its summary, and the rows by kind, without what is null."""

    def run(*frames: Sequence[Any], path: Path | None = None, **options: Any) -> Any:
        summary = hook_log.import_file(path or write_log(*frames), tmp_path / "part.parquet", **options)
        rows: dict[str, list[dict[str, Any]]] = {}
        if summary.part is not None:
            for row in pq.read_table(summary.part).to_pylist():
                rows.setdefault(row.pop("kind"), []).append({k: v for k, v in row.items() if v is not None})
        return summary, rows

    return run


def codes(rows: dict[str, list[dict[str, Any]]]) -> dict[str, int]:
    return {row["code"]: row["occurrences"] for row in rows.get("issue", [])}


def test_everything_that_a_log_says_becomes_rows(imported: Imported, write_log: Callable[..., Path]) -> None:
    path = write_log(
        [
            ["run", RUN],
            ["group", 0, GROUP],
            ["place", 1, PLACE],
            call(0, place=1, reduce_op="sum", is_async=True, coalesce=9),
            call(1, "all_gather", method="_allgather_base", in_elems=8, out_elems=16, coalesce=9, step=None),
            call(2, "send", method="send", in_elems=6, out_elems=0, peer=0, reduce_op=None),
            call(3, "recv", method="recv", in_elems=0, out_elems=7, peer=0),
            call(4, "broadcast", method="broadcast", root=0, peer=None),
            ["span", "step", "step 0", T - 10, T + 5000, 77, 0, 0],
            ["span", "layer", "layer 5", T, T + 90, 77, 0, 1],
            ["metric", "parameter_bytes", 1024, "bytes", None],
            ["metric", "loss_scale", 2.5, None, 0],
            ["issue", "info", "hook_chosen", "method patching", 1],
            ["job", {"job": {"num_layers": 4}, "versions": {"nccl": "2.27.3"}, "device": {"name": "H", "index": 3}}],
            ["window", {"file": "r00001-w0.json", "step_from": 0, "step_to": 0, "start_ns": T, "end_ns": T + 9}],
            end(5),
        ]
    )
    summary, rows = imported(path=path)
    about = {"rank": 1, "source": "hook", "pid": 4711}
    of_call = {
        **about,
        "tid": 77,
        "group_id": "3",
        "group_size": 2,
        "group_rank": 1,
        "dtype": "bfloat16",
        "completeness": "not_profiled",
        "recorded_step": 0,
    }

    def one(number: int, **more: Any) -> dict[str, Any]:
        times = {"t_issue_ns": T + 1000 * number, "t_issue_end_ns": T + 1000 * number + 400}
        ids = {"call_id": number, "hook_call": number, "coalesce_id": number, "seq": number, "is_p2p": False}
        return {**of_call, **ids, "in_elems": 8, "out_elems": 8, "op_raw": more.get("op"), **times, **more}

    place = {f"recorded_{k}": v for k, v in PLACE.items()}
    second = one(1, op="all_gather", op_raw="_allgather_base", out_elems=16, coalesce_id=0)
    del second["recorded_step"]
    assert rows["comm_record"] == [
        one(0, op="all_reduce", op_raw="allreduce", reduce_op="sum", is_async=True, **place),
        second,
        one(2, op="send", is_p2p=True, peer=0, in_elems=6, out_elems=6),
        one(3, op="recv", is_p2p=True, peer=0, in_elems=7, out_elems=7),
        one(4, op="broadcast", root=0),
    ]
    assert rows["span"] == [
        {
            **about,
            "start_ns": T - 10,
            "dur_ns": 5010,
            "name": "step 0",
            "category": "step",
            "tid": 77,
            "recorded_step": 0,
            "completeness": "full",
        },
        {
            **about,
            "start_ns": T,
            "dur_ns": 90,
            "name": "layer 5",
            "category": "layer",
            "tid": 77,
            "recorded_step": 0,
            **place,
        },
        {**about, "start_ns": T, "dur_ns": 9, "name": "r00001-w0.json", "category": "window"},
    ]
    assert rows["metric"] == [
        {"rank": 1, "source": "hook", "key": "parameter_bytes", "value": 1024.0, "unit": "bytes"},
        {"rank": 1, "source": "hook", "key": "loss_scale", "value": 2.5, "step": 0},
    ]
    group = {k: v for k, v in GROUP.items() if k not in ("size", "rank")}
    assert rows["process_group"] == [
        {"rank": 1, "source": "hook", **group, "group_id": "3", "group_size": 2, "ranks_source": "hook"}
    ]
    assert rows["rank"] == [
        {
            **about,
            "rank_source": "header",
            "host": "node-a",
            "device": 3,
            "device_name": "H",
            "world_size": 4,
            "window_start_ns": T,
            "window_end_ns": T + 4400,
            "host_start_ns": T,
            "source_file": path.name,
            "source_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "versions": json.dumps({"nccl": "2.27.3", "python": "3.11.7", "torch": "2.13.0"}, sort_keys=True),
            "events_read": 16,
            "rows_kept": 11,
            "rows_rejected": 0,
            "import_status": "complete",
        }
    ]
    assert codes(rows) == {"hook_chosen": 1}
    assert (summary.status, summary.rank, summary.calls, summary.last_call, summary.steps) == (
        "complete",
        1,
        5,
        4,
        (0, 0),
    )
    assert summary.job is not None
    assert summary.job["job"] == {"num_layers": 4}
    assert [w["file"] for w in summary.windows] == ["r00001-w0.json"]


HEAD = [["run", RUN], ["group", 0, GROUP], ["place", 1, PLACE]]


@pytest.mark.parametrize(
    ("method", "in_splits", "out_splits", "stored"),
    [
        ("alltoall_base", [1, 3], [2, 2], ([1, 3], [2, 2], True)),
        ("alltoall_base", "[1, 3]", "[2, 2]", ([1, 3], [2, 2], True)),
        ("alltoall_base", None, None, (None, None, True)),
        ("c10d::alltoall_base_", [], [], (None, None, True)),
        ("alltoall_base", [1, 3], None, ([1, 3], None, True)),
        ("alltoall_base", "[1, ..., 3]", "[2, 2]", (None, [2, 2], False)),
        ("alltoall", None, None, (None, None, False)),
        ("alltoall", [4, 4], [4, 4], ([4, 4], [4, 4], True)),
    ],
)
def test_splits(imported: Imported, method: str, in_splits: Any, out_splits: Any, stored: tuple[Any, ...]) -> None:
    _, rows = imported(
        [*HEAD, call(0, "all_to_all", method=method, in_splits=in_splits, out_splits=out_splits), end(1)]
    )
    (row,) = rows["comm_record"]
    assert (row.get("in_splits"), row.get("out_splits"), row.get("splits_known")) == stored


EXPERTS = {"dispatcher": "MoEAllGatherTokenDispatcher", "first": 2, "local": 2, "ranks": [1, 3], "tensor_ranks": 1}


def test_rows_of_experts(imported: Imported) -> None:
    place = {"microbatch": 2, "chunk": 0, "layer": 5, "phase": "recompute", "component": "experts"}
    _, rows = imported(
        [
            ["run", RUN],
            ["place", 1, place],
            ["experts", 1, EXPERTS],
            ["rows", 1, T + 20, 4, 1, [7, 0]],
            ["rows", 1, T + 10, 4, 0, [3, 4]],
            ["experts", 2, {**EXPERTS, "ranks": None, "tensor_ranks": None}],
            ["rows", 2, T + 30, None, 0, [5, 6]],
            end(0),
        ]
    )
    about = {"rank": 1, "source": "hook", "name": "MoEAllGatherTokenDispatcher", "first_expert": 2}
    group = {"ranks": [1, 3], "expert_tensor_ranks": 1}
    at = {f"recorded_{key}": value for key, value in place.items()}
    assert rows["expert_rows"] == [
        {**about, **group, "start_ns": T + 10, "local_expert_rows": [3, 4], "recorded_step": 4},
        {**about, **group, **at, "start_ns": T + 20, "local_expert_rows": [7, 0], "recorded_step": 4},
        {**about, "start_ns": T + 30, "local_expert_rows": [5, 6]},
    ]
    assert codes(rows) == {}
    assert rows["rank"][0]["rows_kept"] == 3


def test_rows_of_experts_that_are_damaged(imported: Imported) -> None:
    """What is no list of counts is odd; whose experts are not said, or whose place, is kept and said."""
    _, rows = imported(
        [
            ["run", RUN],
            ["experts", 1, EXPERTS],
            *(["rows", 1, T, 4, 0, counts] for counts in (None, [], 7, [1, -1], [1, "x"])),
            ["rows", 9, T, 4, 3, [1, 2]],
            end(0),
        ]
    )
    assert rows["expert_rows"] == [
        {"rank": 1, "source": "hook", "start_ns": T, "local_expert_rows": [1, 2], "recorded_step": 4}
    ]
    assert codes(rows) == {"odd_record": 5, "experts_not_recorded": 1, "place_not_recorded": 1}


def test_experts_of_an_earlier_recording_are_not_taken(imported: Imported) -> None:
    _, rows = imported(
        [["run", RUN], ["experts", 1, EXPERTS], end(0), ["run", RUN], ["rows", 1, T, 0, 0, [1, 2]], end(0)]
    )
    assert [row.get("first_expert") for row in rows["expert_rows"]] == [None]
    assert codes(rows) == {"experts_not_recorded": 1, "recorded_again": 1}


def test_a_group_is_known_better_later_and_a_name_comes_again(imported: Imported) -> None:
    _, rows = imported(
        [["run", RUN], ["group", 0, {**GROUP, "ranks": None}], call(0)],
        [["group", 0, GROUP], call(1)],
        [["group", 4, GROUP], call(2, group=4)],  # destroyed and made anew, with the same ranks
        [["group", 5, {**GROUP, "ranks": [1, 2, 3], "size": 3, "rank": 0}], call(3, group=5), end(4)],
    )
    assert [row["group_id"] for row in rows["comm_record"]] == ["3", "3", "3", "3#2"]
    assert [(g["group_id"], g["name"], g["ranks"]) for g in rows["process_group"]] == [
        ("3", "3", [0, 1]),
        ("3#2", "3", [1, 2, 3]),
    ]
    assert codes(rows) == {"group_name_reused": 1}


def test_ranks_that_contradict_their_size_are_not_taken(imported: Imported) -> None:
    _, rows = imported([["run", RUN], ["group", 0, {**GROUP, "ranks": [0, 1], "size": 3}], end(0)])
    assert rows["process_group"] == [
        {
            "rank": 1,
            "source": "hook",
            "name": "3",
            "group_id": "3",
            "group_size": 3,
            "description": "TENSOR_MODEL_PARALLEL_GROUP",
            "backend": "nccl",
        }
    ]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_tail_is_cut_and_counted(imported: Imported, write_log: Callable[..., Path], cut: int) -> None:
    path = write_log([*HEAD, call(0), call(1), step(0, 0, 1)], [call(2, step=1), step(1, 2, 2), end(3)])
    path.write_bytes(path.read_bytes()[:-cut])
    summary, rows = imported(path=path)
    assert summary.status == "partial"
    assert [row["call_id"] for row in rows["comm_record"]] == [0, 1]
    assert [(row["recorded_step"], row["completeness"]) for row in rows["span"]] == [(0, "full")]
    assert codes(rows) == {"log_torn": 1, "log_not_ended": 1}
    (torn,) = (row for row in rows["issue"] if row["code"] == "log_torn")
    assert (torn["severity"], torn["location"].endswith("bytes of a torn frame")) == ("data_loss", True)


def test_a_wrong_checksum_ends_the_reading(imported: Imported, write_log: Callable[..., Path]) -> None:
    path = write_log([*HEAD, call(0)], [call(1), end(2)])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    summary, rows = imported(path=path)
    assert (summary.status, len(rows["comm_record"])) == ("partial", 1)
    assert codes(rows) == {"log_torn": 1, "log_not_ended": 1}


def test_a_killed_process_keeps_its_whole_steps(imported: Imported) -> None:
    summary, rows = imported([*HEAD, call(0), step(0, 0, 0), call(1, step=1)])
    assert summary.status == "partial"
    assert [(row["recorded_step"], row["completeness"]) for row in rows["span"]] == [(0, "full")]
    assert codes(rows) == {"log_not_ended": 1}


def test_calls_that_are_missing_by_number_spoil_their_steps_only(imported: Imported) -> None:
    records = [*HEAD]
    for number in (0, 1, 2, 5, 6, 7):
        records.append(call(number, step=number // 2))
    records += [step(0, 0, 1), step(1, 2, 3), step(2, 4, 5), step(3, 6, 7), end(8, dropped=2, recorded=6)]
    summary, rows = imported(records)
    assert summary.status == "complete with rejects"
    assert [(row["recorded_step"], row["completeness"]) for row in rows["span"]] == [
        (0, "full"),
        (1, "cut"),
        (2, "cut"),
        (3, "full"),
    ]
    assert codes(rows) == {"calls_lost": 2, "records_dropped": 2}


def test_calls_that_are_missing_at_the_end_spoil_the_last_step(imported: Imported) -> None:
    _, rows = imported([*HEAD, call(0), call(1, step=1), step(0, 0, 0), step(1, 1, 1), end(3)])
    assert [row["completeness"] for row in rows["span"]] == ["full", "cut"]
    assert codes(rows) == {"calls_lost": 1}


def test_a_step_that_is_there_twice_is_not_judged(imported: Imported) -> None:
    _, rows = imported([*HEAD, call(0), call(1), step(0, 0, 0), step(0, 1, 1), end(2)])
    assert [row["completeness"] for row in rows["span"]] == ["cut", "cut"]
    assert codes(rows) == {"step_twice": 1}


def test_a_collector_in_trouble_says_so(imported: Imported) -> None:
    summary, rows = imported(
        [
            *HEAD,
            ["issue", "warning", "collector_error", "ValueError in enter", 1],
            end(0, errors=21, disabled="21 errors, the last: ValueError in enter"),
        ]
    )
    assert summary.status == "complete with rejects"
    assert codes(rows) == {"collector_error": 1, "collector_errors": 21, "collector_disabled": 1}


def test_records_of_another_shape_lose_no_other(imported: Imported) -> None:
    short = call(1)[:-3]
    odd = call(2, in_elems="many", peer=-1, t_issue_ns=True)
    later = [*call(3), "a field of a newer collector"]
    _, rows = imported(
        [*HEAD, call(0), short, odd, later, 7, [], ["span", "step"], ["novelty", 1], call(4, group=8, place=9), end(5)]
    )
    found = rows["comm_record"]
    assert [row["call_id"] for row in found] == [0, 1, 2, 3, 4]
    assert "in_elems" not in found[2]
    assert "group_id" not in found[4]
    assert codes(rows) == {"odd_record": 6, "unknown_record": 1, "group_not_recorded": 1, "place_not_recorded": 1}


def test_a_value_that_is_no_number_is_null(imported: Imported) -> None:
    metrics = [["metric", "loss", value, None, 0] for value in (float("nan"), float("inf"), "much", True, None, 3)]
    _, rows = imported([*HEAD, *metrics, call(0), end(1)])
    assert [row.get("value") for row in rows["metric"]] == [None, None, None, None, None, 3.0]
    assert codes(rows) == {"odd_record": 4}


def test_the_job_is_what_was_said_when_most_was_known(imported: Imported) -> None:
    jobs = [{"job": {}}, {"job": {"tp": 1, "pp": 1}}, {"job": {"tp": 2, "pp": 1}}, {"job": {"torch_version": "2.13"}}]
    summary, _ = imported([*HEAD, *(["job", job] for job in jobs), end(0)])
    assert summary.job == {"job": {"tp": 2, "pp": 1}}


def test_a_process_that_records_again_numbers_on(imported: Imported) -> None:
    _, rows = imported([*HEAD, call(0), call(1), end(2)], [["run", RUN], ["group", 0, GROUP], call(0), end(1)])
    assert [(row["call_id"], row.get("hook_call")) for row in rows["comm_record"]] == [(0, 0), (1, 1), (2, None)]
    assert codes(rows) == {"recorded_again": 1}


@pytest.mark.parametrize(
    ("stated", "name", "told", "rank", "source"),
    [
        (2, "r00001-4711.talog", 7, 2, "header"),
        (None, "r00001-4711.talog", 7, 1, "file name"),
        (None, "p4711.talog", 7, 7, "told"),
        (None, "p4711.talog", None, None, None),
    ],
)
def test_where_the_rank_comes_from(
    imported: Imported,
    write_log: Callable[..., Path],
    stated: int | None,
    name: str,
    told: int | None,
    rank: int | None,
    source: str | None,
) -> None:
    path = write_log([["run", {**RUN, "rank": stated}], ["group", 0, GROUP], call(0), end(1)], name=name)
    summary, rows = imported(path=path, told_rank=told)
    assert (summary.rank, summary.rank_source) == (rank, source)
    assert rows["comm_record"][0].get("rank") == rank


def test_a_rank_that_is_learnt_late_holds_for_every_call(imported: Imported, write_log: Callable[..., Path]) -> None:
    path = write_log(
        [["run", {**RUN, "rank": None}], ["group", 0, GROUP], call(0)],
        [["run", RUN], call(1), end(2)],
        name="p4711.talog",
    )
    summary, rows = imported(path=path)
    assert (summary.rank, [row["rank"] for row in rows["comm_record"]]) == (1, [1, 1])


def test_short_records_are_calls_like_the_others(imported: Imported, write_log: Callable[..., Path]) -> None:
    """A log of short records gives the rows that the same calls give in whole records; one without its form is odd."""
    bits = ["bfloat16", 1024, 1024, "sum"]
    whole = [
        call(0, dtype="bfloat16", in_elems=1024, out_elems=1024, reduce_op="sum", seq=0, is_async=False),
        call(1, dtype="bfloat16", in_elems=1024, out_elems=1024, reduce_op="sum", seq=1, is_async=True, coalesce=2),
    ]
    issued, returned, tid = (1 + record.CALL.index(name) for name in ("t_issue_ns", "t_issue_end_ns", "tid"))
    group, op, method = (1 + record.CALL.index(name) for name in ("group", "op", "method"))
    short = [["form", 7, whole[0][group], whole[0][op], whole[0][method]]]
    for n, one in enumerate(whole):
        block, is_async = (None, False) if n == 0 else (2, True)
        step, place = one[returned + 1 : tid]
        short.append([7, n, n, *bits, block, is_async, one[issued], one[returned], step, place, one[tid]])
    _, expected = imported(path=write_log([*HEAD, *whole, end(2)], name="r00001-1.talog"))
    summary, rows = imported(path=write_log([*HEAD, *short, end(2)], name="r00001-2.talog"))
    assert (summary.status, len(rows["comm_record"])) == ("complete", 2)
    assert rows["comm_record"] == expected["comm_record"]
    path = write_log([*HEAD, *short[1:2], *short, end(2)], name="r00001-3.talog")
    _, rows = imported(path=path)
    assert (len(rows["comm_record"]), codes(rows)["odd_record"]) == (2, 1)


def test_a_log_of_a_newer_layout_is_refused(imported: Imported, write_log: Callable[..., Path]) -> None:
    path = write_log([*HEAD])
    path.write_bytes(record.MAGIC[:-1] + b"\x09" + path.read_bytes()[len(record.MAGIC) :])
    summary, _ = imported(path=path)
    assert (summary.status, summary.reason) == (
        "refused",
        "r00001-4711.talog: layout 9 of the log is newer than this program knows",
    )


def test_an_empty_log_and_one_without_calls(imported: Imported, write_log: Callable[..., Path]) -> None:
    summary, rows = imported([])
    assert (summary.status, rows["rank"][0]["rank"]) == ("partial", 1)
    assert codes(rows) == {"log_not_ended": 1, "rank_from_file_name": 1}


def test_import_takes_a_log(write_log: Callable[..., Path], tmp_path: Path) -> None:
    path = write_log([*HEAD, call(0), end(1)])
    result = import_traces([path], tmp_path / "run.parquet")
    assert (result.status, result.ranks, result.rows["comm_record"]) == ("complete", [1], 1)
    metadata = pq.read_schema(tmp_path / "run.parquet").metadata
    assert json.loads(metadata[schema.META_IMPORT.encode()]) == {"source": "hook", "status": "complete"}
