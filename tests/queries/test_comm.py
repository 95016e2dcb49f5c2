"""Calls: listed, summed by role, operation and size with their bandwidth, and kernels without a call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.importers import import_traces
from traceanalyzer.run import Run

OpenRun = Callable[..., Run]
NewRows = Callable[[], Any]


def some_calls(rows: Any) -> Any:
    """Two all-reduces of 1000 bfloat16 over 4 ranks, one all-to-all of fp8, a send and a receive launched as one."""
    rows.rank(0)
    rows.step(0, 3, 0, 1000)
    sum_of = {"dtype": "bfloat16", "in_elems": 1000, "out_elems": 1000, "group_size": 4}
    rows.call(0, "tp", "all_reduce", 100, 200, 90, **sum_of)
    rows.call(0, "tp", "all_reduce", 300, 600, 290, **sum_of)
    rows.call(
        0, "ep", "all_to_all", 700, 710, 690, dtype="float8_e4m3fn", in_elems=600, out_elems=800, group_size=2,
        in_splits=[100, 200], out_splits=[200, 200],
    )  # fmt: skip
    message = {"dtype": "float32", "in_elems": 50, "out_elems": 50, "group_size": 2, "coalesce_id": 9}
    rows.call(0, "pp", "send", 800, 840, 790, peer=1, **message)
    rows.call(0, "pp", "recv", 800, 840, 790, peer=1, **message)
    return rows


def test_comm_summary(open_run: OpenRun, new_rows: NewRows) -> None:
    together = {
        "timed_calls": 0,
        "coalesced_calls": 1,
        "dur_ns": None,
        "min_dur_ns": None,
        "median_dur_ns": None,
        "max_dur_ns": None,
        "bus_gb_per_s": None,
        "best_bus_gb_per_s": None,
    }
    message = {"role": "pp", "axis": "PP", "dtype": "float32", "group_size": 2, "payload_bytes": 200, "calls": 1}
    assert open_run(some_calls(new_rows())).query("comm_summary").rows() == [
        {
            "rank": 0,
            "step": 3,
            "role": "ep",
            "axis": "EP",
            "op": "all_to_all",
            "dtype": "float8_e4m3fn",
            "group_size": 2,
            "payload_bytes": 600,
            "calls": 1,
            "total_bytes": 600,
            "timed_calls": 1,
            "coalesced_calls": 0,
            "dur_ns": 10,
            "min_dur_ns": 10,
            "median_dur_ns": 10,
            "max_dur_ns": 10,
            "bus_gb_per_s": 30.0,  # 600 bytes / 10 ns x 1/2
            "best_bus_gb_per_s": 30.0,
        },
        {"rank": 0, "step": 3, "op": "recv", "total_bytes": 200} | message | together,
        {"rank": 0, "step": 3, "op": "send", "total_bytes": 200} | message | together,
        {
            "rank": 0,
            "step": 3,
            "role": "tp",
            "axis": "TP",
            "op": "all_reduce",
            "dtype": "bfloat16",
            "group_size": 4,
            "payload_bytes": 2000,
            "calls": 2,
            "total_bytes": 4000,
            "timed_calls": 2,
            "coalesced_calls": 0,
            "dur_ns": 400,
            "min_dur_ns": 100,
            "median_dur_ns": 100,
            "max_dur_ns": 300,
            "bus_gb_per_s": 15.0,  # 4000 bytes / 400 ns x 2 x 3/4
            "best_bus_gb_per_s": 30.0,  # 2000 bytes / 100 ns x 2 x 3/4
        },
    ]


def test_what_is_not_known_is_null(open_run: OpenRun, new_rows: NewRows) -> None:
    rows = new_rows()
    rows.rank(0)
    rows.add("comm_record", rank=0, call_id=0, op="all_reduce", dtype="bfloat16")
    (row,) = open_run(rows).query("comm_summary")
    assert row["calls"] == 1
    assert {n for n, value in row.items() if value is None} == {
        "step", "role", "axis", "group_size", "payload_bytes", "total_bytes", "dur_ns", "min_dur_ns", "median_dur_ns",
        "max_dur_ns", "bus_gb_per_s", "best_bus_gb_per_s",
    }  # fmt: skip


def test_calls(open_run: OpenRun, new_rows: NewRows) -> None:
    run = open_run(some_calls(new_rows()))
    assert run.query("calls", op="all_to_all").rows() == [
        {
            "rank": 0,
            "call_id": 2,
            "step": 3,
            "phase": "other",
            "microbatch": None,
            "role": "ep",
            "op": "all_to_all",
            "dtype": "float8_e4m3fn",
            "group_id": "ep",
            "group_size": 2,
            "seq": None,
            "peer": None,
            "in_elems": 600,
            "out_elems": 800,
            "in_splits": [100, 200],
            "out_splits": [200, 200],
            "payload_bytes": 600,
            "start_ns": 700,
            "dur_ns": 10,
            "time_source": "kernel",
            "coalesce_id": 2,
        }
    ]

    def found(**parameters: Any) -> list[int]:
        return [row["call_id"] for row in run.query("calls", **parameters)]

    assert found() == [0, 1, 2, 3, 4]
    assert found(role="pp") == [3, 4]
    assert found(role="pp", op="send") == [3]
    assert (found(step=3), found(step=4)) == ([0, 1, 2, 3, 4], [])


def test_unexplained_communication(open_run: OpenRun, new_rows: NewRows) -> None:
    rows = some_calls(new_rows())
    gather = {"name": "ncclDevKernel_AllGather_RING_LL", "kernel_op": "all_gather"}
    rows.kernel(0, "copy", 1, 10, name="Memcpy PtoP (Device -> Device)")
    rows.kernel(0, "copy", 1, 10, name="Memcpy DtoD (Device -> Device)")
    rows.kernel(0, "comm", 10, 15, completeness="launched_before_window", **gather)
    rows.kernel(0, "comm", 20, 27, completeness="launched_before_window", **gather)
    rows.kernel(0, "comm", 30, 31, completeness="kernel_only", name="userbuffers_rs")
    rows.kernel(0, "comm", 40, 42, name="userbuffers_rs")
    assert open_run(rows).query("unexplained_communication").rows() == [
        {
            "rank": 0,
            "name": "Memcpy PtoP (Device -> Device)",
            "library": "copy engine",
            "op": None,
            "why": "no_call",
            "kernels": 1,
            "dur_ns": 9,
        },
        {
            "rank": 0,
            "name": "ncclDevKernel_AllGather_RING_LL",
            "library": "NCCL",
            "op": "all_gather",
            "why": "launched_before_window",
            "kernels": 2,
            "dur_ns": 12,
        },
        {
            "rank": 0,
            "name": "userbuffers_rs",
            "library": "userbuffers",
            "op": None,
            "why": "no_call",
            "kernels": 2,
            "dur_ns": 3,
        },
    ]


# real traces --------------------------------------------------------------------------------------------------------------


@pytest.mark.shared
def test_nanogpt(shared: Callable[[str], Path], tmp_path: Path) -> None:
    """28 + 28 calls on every rank; 20 to 28 kernels more than that were launched before the recording began."""
    import_traces([shared("traces/nanogpt_dp8_h100")], tmp_path / "run.parquet")
    with Run.open(tmp_path / "run.parquet") as run:
        calls: Counter[tuple[int, str]] = Counter()
        for row in run.query("comm_summary"):
            calls[row["rank"], row["op"]] += row["calls"]
        before: Counter[int] = Counter()
        for row in run.query("unexplained_communication"):
            assert row["why"] == "launched_before_window"
            before[row["rank"]] += row["kernels"]
        sizes = Counter((c["op"], c["dtype"], max(c["in_elems"], c["out_elems"])) for c in run.query("calls"))
    assert calls == {(rank, op): 28 for rank in range(8) for op in ("all_gather", "reduce_scatter")}
    assert before == {0: 20, 1: 20, 2: 20, 3: 20, 4: 25, 5: 28, 6: 28, 7: 28}
    assert sizes[("reduce_scatter", "bfloat16", 38_633_472)] == 8 * 10


@pytest.mark.shared
def test_torchao(shared: Callable[[str], Path], tmp_path: Path) -> None:
    """20 exchanges of 4096 + 4096 rows of 7168 bfloat16 and 10 of their counts; one kernel is older than the recording."""
    import_traces([shared("traces/torchao_ep_moe_b200")], tmp_path / "run.parquet")
    with Run.open(tmp_path / "run.parquet") as run:
        found = Counter(
            (c["dtype"], c["in_elems"], tuple(c["in_splits"]), tuple(c["out_splits"]), c["payload_bytes"])
            for c in run.query("calls", op="all_to_all")
        )
        (older,) = run.query("unexplained_communication")
    assert found == {
        ("bfloat16", 58_720_256, (4096, 4096), (4096, 4096), 117_440_512): 20,
        ("int64", 8, (4, 4), (4, 4), 64): 10,
    }
    assert (older["why"], older["kernels"]) == ("launched_before_window", 1)


@pytest.mark.shared
def test_communication_outside_of_torch_distributed(shared: Callable[[str], Path], tmp_path: Path) -> None:
    """vLLM on eight B200: 73 all-reduces on symmetric memory, counted and summed over the JSON; none of it is compute."""
    import_traces([shared("traces/tracelens_vllm_b200_x8/eager_trace.json.gz")], tmp_path / "run.parquet")
    with Run.open(tmp_path / "run.parquet") as run:
        found = [r for r in run.query("unexplained_communication") if r["library"] == "symmetric memory"]
        computed = run.value("SELECT count(*) FROM kernel WHERE name LIKE '%multimem%' AND kernel_class <> 'comm'")
    assert [(r["op"], r["why"], r["kernels"], r["dur_ns"]) for r in found] == [("all_reduce", "no_call", 73, 2_119_548)]
    assert computed == 0
