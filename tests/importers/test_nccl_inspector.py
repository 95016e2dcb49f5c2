"""Lines of NCCL's Inspector plugin -> rows. The first collective is the example of the plugin's own README."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.run import Run

WORLD, PAIR = "0xe62dedaa97644a", "0x7f8c496ae9f661"
META = {
    "inspector_output_format_version": "v4.0",
    "git_rev": "9019a1912-dirty",
    "rec_mechanism": "nccl_profiler_interface",
    "dump_timestamp_us": 1752867229276385,
    "hostname": "example-hostname",
    "pid": 438776,
}


def line(comm: str = WORLD, rank: int = 4, size: int = 8, **call: dict[str, Any]) -> dict[str, Any]:
    return {"header": {"id": comm, "rank": rank, "n_ranks": size, "nnodes": 1}, "metadata": META, **call}


REDUCE_SCATTER = {
    "coll": "ReduceScatter",
    "coll_sn": 1231,
    "coll_msg_size_bytes": 2147483648,
    "coll_exec_time_us": 41057,
    "coll_timing_source": "kernel_gpu",
    "coll_algobw_gbs": 418.439467,
    "coll_busbw_gbs": 366.134533,
    "event_trace_ts": {
        "coll_start_ts": 1752867229235059,
        "coll_stop_ts": 1752867229235064,
        "kernel_events": [
            {"channel_id": 1, "kernel_start_ts": 1752867229235190, "kernel_stop_ts": 1752867229275811},
            {"channel_id": 0, "kernel_start_ts": 1752867229235181, "kernel_stop_ts": 1752867229275810},
        ],
    },
}
ALL_GATHER = {"coll": "AllGather", "coll_sn": 7, "coll_msg_size_bytes": 4096, "coll_exec_time_us": 12}
SEND = {"p2p": "Send", "p2p_sn": 3, "p2p_peer": 5, "p2p_msg_size_bytes": 65536, "p2p_exec_time_us": 20.5}


@pytest.fixture
def imported(tmp_path: Path, import_files: Callable[..., Any]) -> Callable[..., Any]:
    def run(lines: list[Any], name: str = "example-hostname-pid438776.log", **options: Any) -> Any:
        text = "".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines).encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        return import_files([path], **options)

    return run


def test_both_kinds_of_calls(imported: Callable[..., Any]) -> None:
    """Peer defect 7. Of the all-gather the file has this rank's shard, of the reduce-scatter the shard it gets."""
    run = imported([line(coll_perf=REDUCE_SCATTER), line(PAIR, 0, 2, coll_perf=ALL_GATHER), line(p2p_perf=SEND)])
    assert (run.result.status, run.result.ranks) == ("complete", [4])
    names = (
        "call_id", "op", "group_id", "group_size", "group_rank", "seq", "is_p2p", "peer", "in_elems", "out_elems", "dtype",
        "start_ns", "dur_ns", "time_source", "completeness",
    )  # fmt: skip
    assert [tuple(c[n] for n in names) for c in run.rows("comm_record")] == [
        (
            0, "reduce_scatter", WORLD, 8, 4, 1231, False, None, 8 * 2147483648, 2147483648, "uint8",
            1752867229235181000, 41057000, "kernel", "full",
        ),
        (1, "all_gather", PAIR, 2, 0, 7, False, None, 4096, 8192, "uint8", None, 12000, "backend_range", "no_kernel"),
        (2, "send", WORLD, 8, 4, 3, True, 5, 65536, 65536, "uint8", None, 20500, "backend_range", "no_kernel"),
    ]  # fmt: skip
    assert run.issues() == {"sizes_in_bytes": 1, "small_messages_not_recorded": 1, "rank_inferred": 1}
    assert {g["group_id"]: (g["group_size"], g["ranks"]) for g in run.rows("process_group")} == {
        WORLD: (8, list(range(8))),
        PAIR: (2, None),
    }
    (rank,) = run.rows("rank")
    assert (rank["host"], rank["pid"], rank["rank_source"]) == ("example-hostname", 438776, "header")
    with Run.open(run.path) as opened:  # payload: of both the whole tensor
        assert opened.tuples("SELECT call_id, payload_bytes FROM comm ORDER BY call_id") == [
            (0, 8 * 2147483648),
            (1, 8192),
            (2, 65536),
        ]


def test_a_rank_that_the_name_states_leaves_the_peer_open(imported: Callable[..., Any]) -> None:
    """Ranks of the communicator are not the global ones where this rank's differ."""
    run = imported([line(p2p_perf=SEND)], "rank12.log.gz")
    assert run.result.ranks == [12]
    assert [(c["group_rank"], c["peer"]) for c in run.rows("comm_record")] == [(4, None)]
    assert run.issues() == {"sizes_in_bytes": 1, "small_messages_not_recorded": 1}


def test_an_all_to_all_has_no_size(imported: Callable[..., Any]) -> None:
    run = imported([line(coll_perf={**ALL_GATHER, "coll": "AlltoAll"})])
    (call,) = run.rows("comm_record")
    assert (call["op"], call["in_elems"], call["out_elems"], call["dtype"]) == ("all_to_all", None, None, None)


def test_lines_that_are_no_calls_are_counted(imported: Callable[..., Any]) -> None:
    run = imported([line(coll_perf=ALL_GATHER), line(proxy_ctrl={}), "{torn", ""])
    assert run.result.status == "complete with rejects"
    assert run.issues()["odd_record"] == 2
    (rank,) = run.rows("rank")
    assert (rank["events_read"], rank["rows_kept"], rank["rows_rejected"]) == (3, 1, 2)


def test_a_compressed_file_that_ends_early_is_partial(tmp_path: Path, import_files: Callable[..., Any]) -> None:
    text = "".join(json.dumps(line(coll_perf={**ALL_GATHER, "coll_sn": n})) + "\n" for n in range(2000)).encode()
    (tmp_path / "rank1.log.gz").write_bytes(gzip.compress(text)[:-200])
    run = import_files([tmp_path / "rank1.log.gz"])
    assert run.result.status == "partial"
    assert run.issues()["truncated"] == 1
    assert 0 < len(run.rows("comm_record")) < 2000


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([line(rank=0, coll_perf=ALL_GATHER), line(rank=1, coll_perf=ALL_GATHER)], "several ranks of one communicator"),
        (
            [{**line(coll_perf=ALL_GATHER), "metadata": {"inspector_output_format_version": "v5.1"}}],
            "format v5.1; this program reads up to v4.x",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(imported: Callable[..., Any], lines: list[Any], reason: str) -> None:
    run = imported(lines)
    assert run.result.status == "refused"
    assert reason in str(run.result.files[0].reason)
