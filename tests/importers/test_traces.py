"""Public traces of every age, and our own recordings: what their READMEs state, with the literal numbers.

Where a README and its files disagree, the files are asserted and the place says so.
"""

from __future__ import annotations

import csv
import gzip
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer import importers, traffic

pytestmark = pytest.mark.shared

Import = Callable[..., Any]
Shared = Callable[[str], Path]


@pytest.fixture
def load(shared: Shared, import_files: Import) -> Import:
    """Imports the Kineto files of a set, or those named."""

    def run(name: str, *files: str) -> Any:
        folder = shared(f"traces/{name}")
        return import_files([folder / f for f in files] if files else [folder])

    return run


def calls(run: Any) -> list[dict[str, Any]]:
    return sorted(run.rows("comm_record"), key=lambda c: (c["rank"] or 0, c["call_id"]))


def count(rows: Iterable[dict[str, Any]], *keys: str) -> dict[Any, int]:
    """How many rows have each combination of values; a single key is not wrapped in a tuple."""
    first, *more = keys
    return dict(Counter((r[first], *(r[k] for k in more)) if more else r[first] for r in rows))


def comm_kernels(run: Any) -> list[dict[str, Any]]:
    return [k for k in run.rows("kernel") if k["kernel_class"] == "comm"]


def steps(run: Any) -> dict[int | None, list[str]]:
    """Names of the profiler steps of each rank, in time order."""
    found: dict[int | None, list[str]] = {}
    for span in run.rows("span"):
        if span["name"].startswith("ProfilerStep#") and span["category"] == "user_annotation":
            found.setdefault(span["rank"], []).append(span["name"].removeprefix("ProfilerStep"))
    return found


def versions(run: Any) -> set[str]:
    return {r["versions"] for r in run.rows("rank")}


def host_names(run: Any, prefix: str) -> dict[str, int]:
    found = Counter(run.counts("cpu_op", "name")) + Counter(run.counts("span", "name"))
    return {name: n for name, n in found.items() if name.startswith(prefix)}


# NCCL, by age --------------------------------------------------------------------------------------------------------


def test_megatron_tp8_a100(load: Import) -> None:
    run = load("megatron_tp8_a100", *(f"megatron_kineto_{r}.json.gz" for r in range(8)))
    assert (run.result.status, run.result.ranks) == ("complete", list(range(8)))
    ranks = run.rows("rank")
    assert {(r["world_size"], r["device_name"], r["rank_source"]) for r in ranks} == {
        (8, "NVIDIA A100-SXM4-80GB", "header")
    }
    assert all(14_000 < r["events_read"] < 15_700 for r in ranks)
    assert steps(run) == {r: ["#3"] for r in range(8)}
    [step] = [s for s in run.rows("span", rank=0) if s["name"] == "ProfilerStep#3"]
    assert step["dur_ns"] // 1_000_000 == 603  # the README's 603 ms is rank 0's; the others last 589 to 626 ms

    for rank in range(8):
        mine = run.rows("comm_record", rank=rank)
        assert len(mine) == 85
        sizes = count(mine, "op", "dtype", "in_elems", "out_elems", "group_size", "completeness", "join_evidence")
        full = 2048 * 4 * 4096
        assert sizes == {
            ("all_reduce", "float16", full, full, 8, "full", "correlation"): 81,
            ("all_reduce", "float32", 8192, 8192, 8, "full", "correlation"): 3,
            ("all_reduce", "float32", 1, 1, 1, "no_kernel", None): 1,
        }
        # 80 in the layers, sequence first; one for the embedding, batch first
        assert count((c for c in mine if c["in_elems"] == full), "in_dims") == {
            "[[[2048, 4, 4096]], [], [], [], []]": 80,
            "[[[4, 2048, 4096]], [], [], [], []]": 1,
        }
        # the group is known as an address only; eight of eight ranks can only be the world
        groups = {g["group_size"]: g for g in run.rows("process_group", rank=rank)}
        assert set(groups) == {1, 8}
        assert (groups[8]["ranks"], groups[8]["ranks_source"]) == (list(range(8)), "inferred")
        assert (groups[1]["ranks"], groups[1]["ranks_source"]) == ([rank], "inferred")
        assert all(g["group_id"].startswith("ptr:") and g["name"] is None for g in groups.values())
    assert traffic.payload_bytes("all_reduce", 2048 * 4 * 4096, None, "float16", 8) == 67_108_864

    kernels = comm_kernels(run)
    assert count(kernels, "rank", "stream") == {(r, 24): 84 for r in range(8)}
    assert Counter("_f16_" in k["name"] for k in kernels if k["rank"] == 0) == {True: 81, False: 3}
    assert all(k["external_id"] == k["correlation"] and k["launch_ns"] is not None for k in kernels)
    last = {r: max(k["start_ns"] + k["dur_ns"] for k in kernels if k["rank"] == r) for r in range(8)}
    assert max(last.values()) - min(last.values()) == 1000
    busy = {r: sum(k["dur_ns"] for k in kernels if k["rank"] == r) // 1_000_000 for r in range(8)}
    assert busy == {0: 241, 1: 481, 2: 413, 3: 472, 4: 495, 5: 490, 6: 263, 7: 481}  # README: 264, rounded up

    ops = run.counts("cpu_op", "name", rank=0)
    assert ops["record_param_comms"] == 170
    assert ops["LinearWithGradAccumulationAndAsyncCommunication"] == 161
    assert ops["FusedLayerNormAffineFunction"] == 81
    assert host_names(run, "nccl:")["nccl:all_reduce"] == 85 * 8


def test_nanogpt_dp8_h100(load: Import) -> None:
    run = load("nanogpt_dp8_h100")
    assert (run.result.status, run.result.ranks) == ("complete", list(range(8)))  # file names do not sort by rank
    assert all('"nccl": "2.28.9"' in v for v in versions(run))
    assert {r["device_name"] for r in run.rows("rank")} == {"NVIDIA H100 80GB HBM3"}
    assert steps(run) == {r: ["#10", "#11", "#12", "#13"] for r in range(8)}
    starts = [
        s["start_ns"] for s in run.rows("span") if s["name"] == "ProfilerStep#10" and s["category"] == "user_annotation"
    ]
    assert (max(starts) - min(starts)) // 1_000_000 == 30  # up to 31 ms
    large, small = (38_633_472, 37_748_736), (96, 1152, 64)
    assert count((c for c in calls(run) if c["rank"] == 3), "op", "dtype", "in_elems", "out_elems") == {
        ("reduce_scatter", "bfloat16", large[0], large[0] // 8): 10,
        ("reduce_scatter", "float32", large[1], large[1] // 8): 8,
        ("reduce_scatter", "bfloat16", small[0], small[0] // 8): 4,
        ("reduce_scatter", "bfloat16", small[1], small[1] // 8): 4,
        ("reduce_scatter", "float32", small[2], small[2] // 8): 2,
        ("all_gather", "bfloat16", large[0] // 8, large[0]): 10,
        ("all_gather", "float32", large[1] // 8, large[1]): 8,
        ("all_gather", "bfloat16", small[0] // 8, small[0]): 4,
        ("all_gather", "bfloat16", small[1] // 8, small[1]): 4,
        ("all_gather", "float32", small[2] // 8, small[2]): 2,
    }
    assert count(calls(run), "rank", "op") == {(r, op): 28 for r in range(8) for op in ("reduce_scatter", "all_gather")}
    assert count(calls(run), "op_raw") == {"_reduce_scatter_base": 224, "_allgather_base": 224}
    assert count(calls(run), "completeness", "join_evidence", "group_rank") == {
        ("full", "external_id", r): 56 for r in range(8)
    }
    groups = run.rows("process_group")
    assert [(g["group_id"], g["description"], g["ranks"], g["ranks_source"]) for g in groups] == [
        ("0", "default_pg", list(range(8)), "header")
    ] * 8
    # NCCL kernels outnumber calls: the surplus was launched before the recording and is no call of the first step
    kernels = comm_kernels(run)
    surplus = dict.fromkeys(range(4), 20) | {4: 25, 5: 28, 6: 28, 7: 28}
    assert count(kernels, "rank") == {r: 56 + n for r, n in surplus.items()}
    before = [k for k in kernels if k["completeness"] == "launched_before_window"]
    assert count(before, "rank") == surplus
    assert {(k["external_id"], k["coalesce_id"], k["launch_ns"]) for k in before} == {(None, None, None)}
    assert {i["rank"]: i["occurrences"] for i in run.rows("issue") if i["code"] == "kernels_before_window"} == surplus
    assert {k["stream"] for k in kernels} == {23, 37}
    for rank in range(8):
        late = [k["start_ns"] for k in kernels if k["rank"] == rank and k["completeness"] == "full"]
        assert max(k["start_ns"] for k in before if k["rank"] == rank) < min(late)


def test_torchao_ep_moe_b200(load: Import) -> None:
    run = load("torchao_ep_moe_b200")
    [rank] = run.rows("rank")
    assert (rank["rank"], rank["world_size"], rank["device_name"], rank["events_read"]) == (0, 2, "NVIDIA B200", 9256)
    assert ('"nccl": "2.29.7"' in rank["versions"], '"cupti": "13' in rank["versions"]) == (True, True)
    assert steps(run) == {0: ["#2"]}
    rows = [{**c, "splits": tuple(c["in_splits"])} for c in calls(run)]
    assert count(rows, "op", "op_raw", "dtype", "in_elems", "splits") == {
        ("all_to_all", "all_to_allv", "bfloat16", 58_720_256, (4096, 4096)): 20,
        ("all_to_all", "all_to_allv", "int64", 8, (4, 4)): 10,
    }
    assert count(rows, "is_async", "splits_known", "group_rank") == {(True, True, 0): 30}
    assert sorted(c["seq"] for c in rows) == list(range(178, 208))
    assert all(c["in_splits"] == c["out_splits"] and c["in_elems"] == c["out_elems"] for c in rows)
    # splits are rows, sizes elements: a row has 7168 of them
    assert traffic.row_elems(58_720_256, [4096, 4096], None, None) == 7168
    assert count(comm_kernels(run), "kernel_op", "completeness") == {
        ("send_recv", "launched_before_window"): 1,
        ("all_to_all", "full"): 30,
    }
    assert len([k for k in comm_kernels(run) if k["name"].startswith("ncclDevKernel_SendRecv")]) == 31
    assert host_names(run, "record_param_comms") == {"record_param_comms": 60}  # 30 calls, 30 waits


def test_torchrec_a2a_v100_x4(load: Import) -> None:
    run = load("torchrec_a2a_v100_x4")
    assert run.result.ranks == [0, 1, 2, 3]
    assert steps(run) == {r: ["#4", "#5", "#6"] for r in range(4)}
    assert count(calls(run), "rank", "op", "completeness", "join_evidence") == {
        (r, "all_to_all", "full", "correlation"): 12 for r in range(4)
    }
    # no metadata and no shapes: what was not recorded stays unknown
    assert {(c["in_elems"], c["dtype"], c["group_id"], c["group_size"], c["splits_known"]) for c in calls(run)} == {
        (None, None, None, None, False)
    }
    # README: 13 SendRecv kernels a rank. The file of rank 2 has 12
    assert count(comm_kernels(run), "rank", "kernel_op") == {
        (0, "send_recv"): 13, (1, "send_recv"): 13, (2, "send_recv"): 12, (3, "send_recv"): 13,
    }  # fmt: skip
    assert count((k for k in comm_kernels(run) if k["completeness"] != "full"), "rank", "completeness") == {
        (r, "launched_before_window"): 1 for r in (0, 1, 3)
    }
    assert {r["world_size"] for r in run.rows("rank")} == {4}
    assert {r["device_name"] for r in run.rows("rank")} == {"Tesla V100-SXM2-16GB"}


def test_torchrec_a2a_allreduce_v100_x4_two_runs(load: Import, shared: Shared, tmp_path: Path) -> None:
    both = load("torchrec_a2a_allreduce_v100_x4_two_runs")
    assert (both.result.status, both.result.ranks) == ("partial", [0, 1, 2, 3])
    assert both.issues()["rank_twice"] == 4
    assert [r["pid"] for r in both.rows("rank")] == [24049, 24050, 24051, 24052]  # the run recorded first
    later = sorted(p for p in shared("traces/torchrec_a2a_allreduce_v100_x4_two_runs").iterdir() if "_26" in p.name)
    second = importers.import_traces(later, tmp_path / "second.parquet")
    assert (second.status, second.ranks, len(later)) == ("complete", [0, 1, 2, 3], 4)
    assert count(calls(both), "rank", "op") == {
        (r, op): n for r in range(4) for op, n in (("all_to_all", 15), ("all_reduce", 12))
    }
    surplus = [k for k in comm_kernels(both) if k["completeness"] == "launched_before_window"]
    # README: kernels outnumber calls by up to 4. That holds for each operation; a rank has up to 6 more in all
    assert max(count(surplus, "rank", "kernel_op").values()) == 4
    assert count(surplus, "rank") == {0: 6, 1: 6, 2: 4, 3: 6}
    assert min(s["dur_ns"] for s in both.rows("span") if s["name"].startswith("ProfilerStep#")) > 1_000_000_000
    assert all(k["external_id"] == k["correlation"] for k in comm_kernels(both))


def test_torchrec_x2_v100(load: Import) -> None:
    run = load("torchrec_x2_v100")
    assert (run.result.status, run.result.ranks) == ("complete", [0, 1])
    assert steps(run) == {0: ["#1", "#2", "#3"], 1: ["#1", "#2", "#3"]}
    assert count(calls(run), "rank", "op", "completeness") == {(r, "all_to_all", "full"): 12 for r in (0, 1)}


def test_param_dlrm_v100_x8(load: Import, shared: Shared) -> None:
    names = [p.name for p in shared("traces/param_dlrm_v100_x8").glob("worker*.json.gz")]
    run = load("param_dlrm_v100_x8", *names)
    assert (run.result.status, run.result.ranks) == ("complete", list(range(8)))
    # "worker<N>" is no rank by itself: it comes from distributedInfo
    assert {(r["rank_source"], r["device_name"], r["world_size"]) for r in run.rows("rank")} == {
        ("header", "Tesla V100-SXM2-32GB", 8)
    }
    assert all(3200 < r["events_read"] < 3500 for r in run.rows("rank"))
    assert steps(run) == {r: ["#10"] for r in range(8)}
    for rank in range(8):
        mine = run.rows("comm_record", rank=rank)
        # the records of the all_reduces have no sizes (tensor lists), their annotations do
        assert sorted(c["in_elems"] for c in mine if c["op"] == "all_reduce") == [112, 226_960, 394_241]
        assert count(mine, "op", "completeness", "join_evidence") == {
            ("all_to_all", "full", "correlation"): 5,
            ("all_reduce", "full", "correlation"): 3,
        }
        assert {c["dtype"] for c in mine if c["op"] == "all_reduce"} == {"float32"}
        assert run.counts("cpu_op", "name", rank=rank)["record_param_comms"] == 13
    assert count(comm_kernels(run), "rank") == dict.fromkeys(range(8), 8)
    assert all(k["name"].startswith("ncclKernel_") and k["external_id"] == k["correlation"] for k in comm_kernels(run))


def test_hta_nccl_metadata_a100_x2(load: Import) -> None:
    run = load("hta_nccl_metadata_a100_x2")
    [rank] = run.rows("rank")
    assert (rank["rank"], rank["world_size"], rank["events_read"]) == (0, 2, 40_573)
    assert '"nccl": "2.17.1"' in rank["versions"]
    assert steps(run) == {0: ["#4", "#5", "#6"]}
    assert count(calls(run), "op", "completeness", "join_evidence") == {
        ("all_reduce", "full", "external_id"): 15,
        ("broadcast", "full", "external_id"): 6,
    }
    assert host_names(run, "record_param_comms") == {"record_param_comms": 15 + 6 + 6}  # 6 waits
    assert count(comm_kernels(run), "kernel_op", "completeness") == {
        ("all_reduce", "full"): 15,
        ("broadcast", "full"): 6,
    }
    assert all(k["name"].startswith("ncclKernel_") and k["external_id"] != k["correlation"] for k in comm_kernels(run))
    assert {(c["group_id"], c["group_rank"]) for c in calls(run)} == {("0", 0)}


def test_hta_sampled_128gpu(load: Import) -> None:
    run = load("hta_sampled_128gpu")
    assert run.result.ranks == [0, 1]
    assert [(r["world_size"], r["device_name"], r["events_read"]) for r in run.rows("rank")] == [
        (128, None, 4855), (128, None, 4720),
    ]  # fmt: skip
    assert steps(run) == {0: ["#551", "#552"], 1: ["#551", "#552"]}
    assert run.issues() == {}  # no flow events
    assert max(c["in_elems"] for c in calls(run) if c["op"] == "all_to_all") == 419_430_400
    # authors thinned the events and made every kernel a SendRecv: the operation of the call is not the kernel's
    assert count(calls(run), "rank", "op") == {
        (0, "all_reduce"): 4, (0, "all_to_all"): 4, (0, "all_gather"): 2,
        (1, "all_reduce"): 4, (1, "all_to_all"): 4, (1, "all_gather"): 2,
    }  # fmt: skip
    # 128 ranks, and yet the gather is over 64: the group is not the world and stays unknown
    assert {(c["in_elems"], c["out_elems"], c["group_size"]) for c in calls(run) if c["op"] == "all_gather"} == {
        (16_777_216, 64 * 16_777_216, None)
    }
    assert not any(o["dur_ns"] % 1000 for o in run.rows("cpu_op"))  # floats in a file of whole starts, but whole ones


def test_hta_ddp_1hot_v100_x2(load: Import) -> None:
    run = load("hta_ddp_1hot_v100_x2")
    [rank] = run.rows("rank")
    assert (rank["rank"], rank["world_size"], rank["device"], rank["events_read"]) == (1, 2, 1, 216_092)
    assert steps(run) == {1: ["#2", "#3", "#4", "#5", "#6"]}
    assert count(calls(run), "op", "completeness", "join_evidence") == {("all_reduce", "full", "correlation"): 2020}
    assert count(comm_kernels(run), "name", "device") == {
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", 1): 2020
    }
    assert run.counts("span", "category")["cpu_instant_event"] == 28_010


def test_hta_gloo_cpu_only_x300(load: Import) -> None:
    run = load("hta_gloo_cpu_only_x300")
    [rank] = run.rows("rank")
    assert (rank["rank"], rank["world_size"], rank["device"], rank["device_name"]) == (34, 300, None, None)
    assert rank["events_read"] == 30
    assert run.rows("kernel") == []
    assert count(calls(run), "op", "in_elems", "dtype", "time_source") == {
        ("all_reduce", 321_271, "float32", "backend_range"): 5,
        ("all_reduce", 2_082_411, "float32", "backend_range"): 5,
    }
    # pg_count says 10, but eleven groups are listed, each of 300 ranks
    groups = run.rows("process_group")
    assert len(groups) == 11
    assert {(tuple(g["ranks"]), g["ranks_source"]) for g in groups} == {(tuple(range(300)), "header")}


@pytest.mark.parametrize(
    ("file", "events", "rank", "source", "facts"),
    [
        ("distributed_info_not_found.json.gz", 2467, None, None, {"cpu_op": 2424, "comm_record": 6}),
        ("rank_not_found.json.gz", 2467, None, None, {"cpu_op": 2424, "comm_record": 6}),
        ("rank_non_gpu.json.gz", 2467, 0, "header", {"cpu_op": 2424, "comm_record": 6}),
        ("base.json.gz", 33, 1, "header", {"kernel": 18, "comm_record": 2}),
        ("test.json.gz", 34, 1, "header", {"kernel": 17, "comm_record": 1}),
        ("inference_rank_1.json.gz", 54, 1, "header", {"kernel": 4, "cpu_op": 8}),
    ],
)
def test_hta_odd(
    load: Import, file: str, events: int, rank: int | None, source: str | None, facts: dict[str, int]
) -> None:
    run = load("hta_odd", file)
    [row] = run.rows("rank")
    assert (row["rank"], row["rank_source"], row["events_read"]) == (rank, source, events)
    assert {kind: run.result.rows[kind] for kind in facts} == facts
    assert ("rank_not_recorded" in run.issues()) == (rank is None)
    if file == "inference_rank_1.json.gz":  # old spellings: Kernel, Runtime, async_gpu
        assert run.counts("kernel", "category") == {"kernel": 4}
        assert run.counts("cpu_op", "category") == {"cuda_runtime": 8}


def test_tracelens_vllm_b200_x8(load: Import) -> None:
    run = load("tracelens_vllm_b200_x8")
    [rank] = run.rows("rank")
    assert (rank["rank"], rank["world_size"], rank["events_read"]) == (0, 8, 24_656)
    assert '"nccl": "2.27.5"' in rank["versions"]
    assert run.counts("cpu_op", "category")["python_function"] == 15_230
    # one NCCL call beside 73 kernels that move data without c10d: communication, of no recorded call
    [call] = calls(run)
    assert (call["op"], call["in_elems"], call["out_elems"], call["dtype"], call["group_id"]) == (
        "all_gather", 25_136, 201_088, "bfloat16", "3",
    )  # fmt: skip
    kernels = comm_kernels(run)
    assert count(kernels, "kernel_op", "completeness", "join_evidence", "coalesce_id") == {
        ("all_reduce", "kernel_only", None, None): 73,
        ("all_gather", "full", "external_id", 0): 1,
    }
    assert sum("multimem_all_reduce_kernel" in k["name"] for k in kernels) == 73
    assert run.issues()["kernels_without_call"] == 73
    # pg_count 71, but only the rank's own 15 are listed
    groups = run.rows("process_group")
    assert len(groups) == 15
    assert count(groups, "description") == {"default_pg": 1, "undefined": 14}


def test_tracelens_qwen_h100_x1(load: Import) -> None:
    run = load("tracelens_qwen_h100_x1")
    [rank] = run.rows("rank")
    assert (rank["rank"], rank["world_size"]) == (None, None)
    assert run.issues()["rank_not_recorded"] == 1
    assert calls(run) == []
    assert comm_kernels(run) == []
    assert "H100" in rank["device_name"]


def test_tracelens_gpu_only_mi210(load: Import) -> None:
    run = load("tracelens_gpu_only_mi210")
    [rank] = run.rows("rank")
    assert (rank["rank"], rank["device_name"]) == (None, "AMD Instinct MI210")
    assert run.counts("cpu_op", "category") == {"cuda_runtime": 631}  # HIP calls only, no operators
    assert run.result.rows["kernel"] == 562


# Not quite Kineto, and no collectives --------------------------------------------------------------------------------


def test_kineto_resnet50_list_form(load: Import) -> None:
    run = load("kineto_resnet50_list_form")
    [rank] = run.rows("rank")
    assert (rank["events_read"], rank["rank"]) == (82_276, None)
    assert run.counts("cpu_op", "category").keys() == {"cpu_op", "cuda_runtime"}
    assert run.counts("kernel", "category").keys() == {"kernel", "gpu_memcpy", "gpu_memset"}
    assert {k["stream"] for k in run.rows("kernel")} >= {7}  # tid is text: "stream 7"
    assert calls(run) == []


@pytest.mark.parametrize("file", ["after_fix_trace.json.gz", "before_fix_trace.json.gz"])
def test_kineto_out_of_order(load: Import, file: str) -> None:
    run = load("kineto_out_of_order", file)
    [rank] = run.rows("rank")
    assert (rank["events_read"], rank["device_name"]) == (75, "NVIDIA H100")
    assert run.result.status == "complete"


def test_colossalai_world1(load: Import) -> None:
    run = load("colossalai_world1")
    [rank] = run.rows("rank")
    assert (rank["rank"], rank["world_size"], rank["events_read"]) == (0, 1, 308)
    assert "A800" in rank["device_name"]
    assert (calls(run), steps(run)) == ([], {})


def test_horovod_timeline(load: Import) -> None:
    run = load("horovod_timeline")
    assert run.issues()["other_phases_not_stored"] > 0  # NEGOTIATE_ALLREDUCE begins and ends
    assert max(o["dur_ns"] for o in run.rows("cpu_op")) > 7 * 10**14  # durations of 8e11 us stay as recorded
    assert calls(run) == []


def test_pippy_forward_gpt2(load: Import) -> None:
    run = load("pippy_forward_gpt2")
    assert run.result.rows["cpu_op"] == 2304
    assert count(run.rows("cpu_op"), "category", "pid") == {(None, None): 2304}  # pid is the text "CPU functions"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("param_dlrm_v100_x8/dlrm_eg_0.json.gz", "no traceEvents"),
        ("megatron_tp8_a100/megatron_et_0.json.gz", "no traceEvents"),
        ("bytedance_straggler_ST/result-ST.json.gz", "no traceEvents"),
        ("nvrx_flight_recorder/gpu_error_1st/all_ranks_decoded.json.gz", "no list of entries"),
        ("nccl_profiler_plugin/allreduce_4gpu_single_node.jsonl.gz", "no traceEvents"),
        ("megatronapp_pp4_vpp4/benchmark-data-0-pipeline-0-tensor-0.json.gz", "no complete one"),
    ],
)
def test_recordings_of_other_kinds_are_refused(shared: Shared, tmp_path: Path, file: str, message: str) -> None:
    result = importers.import_traces([shared(f"traces/{file}")], tmp_path / "run.parquet")
    assert (result.status, result.out) == ("refused", None)
    assert message in str(result.files[0].reason)


# Our own: gloo, torch 2.13 -------------------------------------------------------------------------------------------

N = 1024
FIRST_OF_PP = {0: "send", 1: "send", 2: "recv", 3: "recv"}


def one_step(rank: int) -> dict[str, list[Any]]:
    """(op, elements in, elements out) of the calls of each ``case:`` in one step of one rank."""
    ins, outs = {0: ([3, 5], [3, 7]), 1: ([2, 4], [2, 6]), 2: ([7, 9], [5, 9]), 3: ([6, 8], [4, 8])}[rank]
    p2p = FIRST_OF_PP[rank]
    both = [("send", N, N), ("recv", N, N)]
    found: dict[str, list[Any]] = {
        "all_reduce_tp": [("all_reduce", N, N)],
        "all_reduce_async_dp": [("all_reduce", N, N)],
        "all_reduce_bf16": [("all_reduce", N, N)],
        "all_reduce_max_world": [("all_reduce", N, N)],
        "all_gather_into_tensor_tp": [("all_gather", N, 2 * N)],
        "reduce_scatter_tensor_tp": [("reduce_scatter", N, N // 2)],
        # a list of lists of tensors is an argument whose shapes the profiler does not write
        "all_gather_list_dp": [("all_gather", N, None)],
        "reduce_scatter_list_dp": [("reduce_scatter", None, N // 2)],
        "all_to_all_single_uneven_dp": [("all_to_all", 4 * sum(ins), 4 * sum(outs))],
        "all_to_all_single_even_world": [("all_to_all", 16, 16)],
        "all_to_all_list_dp": [("all_to_all", 8, 8)],
        "broadcast_tp": [("broadcast", N, N)],
        "reduce_tp": [("reduce", N, N)],
        "gather_tp": [("gather", N, None)],
        "scatter_tp": [("scatter", None, N)],
        "send_recv_pp": [(p2p, N, N)],
        "isend_irecv_pp": [(p2p, N, N)],
        "batch_isend_irecv_pp": both,
        "barrier_world": [("barrier", 0, 0)],
        "barrier_tp": [("barrier", 0, 0)],
        "coalescing_manager_all_reduce": [("all_reduce", 30, 30)],
        "coalescing_manager_all_gather": [("all_gather", 30, 60)],
        "coalescing_manager_reduce_scatter": [("reduce_scatter", 60, 30)],
        "all_reduce_coalesced": [("all_reduce", 30, 30)],
        "fc_all_reduce": [("all_reduce", N, N)],
        "fc_all_gather_tensor": [("all_gather", N, 2 * N)],
        "fc_reduce_scatter_tensor": [("reduce_scatter", N, N // 2)],
        "fc_all_to_all_single": [("all_to_all", N, N)],
        "fc_all_gather_into_tensor_coalesced": [("all_gather", 12, 24)],
        "fc_reduce_scatter_tensor_coalesced": [("reduce_scatter", 12, 6)],
        "fc_all_reduce_coalesced": [("all_reduce", 12, 12)],
        "all_reduce_irregular": [("all_reduce", N, N)],
        "ddp": [("all_reduce", 8320, 8320)],
        "fsdp2": [("all_gather", 1040, 4160)] * 4 + [("reduce_scatter", 4160, 1040)] * 2,
    }
    if rank == 2:
        del found["all_reduce_irregular"]
    return found


def test_gloo_torch213(load: Import) -> None:
    run = load("gloo_torch213", *(f"rank{r}.json.gz" for r in range(4)))
    assert (run.result.status, run.result.ranks) == ("complete", [0, 1, 2, 3])
    assert steps(run) == {r: ["#1", "#2"] for r in range(4)}
    for rank in range(4):
        cases: dict[str, list[dict[str, Any]]] = {}
        for call in sorted(run.rows("comm_record", rank=rank), key=lambda c: c["call_id"]):
            # the autograd engine's thread is inside no case: DDP's and FSDP2's backward
            inside = [p.removeprefix("case:") for p in call["call_path"] or () if p.startswith("case:")]
            cases.setdefault(inside[0] if inside else "", []).append(call)
        marks = Counter(s["name"] for s in run.rows("span", rank=rank) if s["name"].startswith("case:"))
        assert set(marks.values()) == {2}
        assert len(marks) == (35 if rank == 2 else 36)
        expected = one_step(rank)
        backward = cases.pop("", [])
        found = {
            case: Counter((c["op"], c["in_elems"], c["out_elems"]) for c in of_case)
            for case, of_case in cases.items()
            if case in expected
        }
        for call in backward:
            key = call["op"], call["in_elems"], call["out_elems"]
            found.setdefault("ddp" if call["in_elems"] == 8320 else "fsdp2", Counter())[key] += 1
        both_steps = {case: Counter(2 * once) for case, once in expected.items()}
        # not in the README: in its second backward, the first that is recorded, DDP rebuilds and broadcasts its buckets
        both_steps["ddp"] += Counter([("broadcast", 5, 5), ("broadcast", 1, 1)])
        assert found == both_steps
        assert set(cases) - set(expected) == {"all_gather_object", "dtensor"}

        by_case = {case: of_case[0] for case, of_case in cases.items()}
        size = {
            case: traffic.payload_bytes(c["op"], c["in_elems"], c["out_elems"], c["dtype"], 2)
            for case, c in by_case.items()
        }
        assert size["all_reduce_tp"] == 4096
        assert size["all_reduce_bf16"] == 2048
        assert size["all_gather_into_tensor_tp"] == 8192
        assert size["reduce_scatter_tensor_tp"] == 4096
        assert traffic.tensor_bytes(by_case["all_gather_into_tensor_tp"]["in_elems"], "float32") == 4096
        assert traffic.tensor_bytes(by_case["reduce_scatter_tensor_tp"]["out_elems"], "float32") == 2048
        uneven = by_case["all_to_all_single_uneven_dp"]
        assert (uneven["in_splits"], uneven["out_splits"]) == {
            0: ([3, 5], [3, 7]), 2: ([7, 9], [5, 9]), 1: ([2, 4], [2, 6]), 3: ([6, 8], [4, 8]),
        }[rank]  # fmt: skip
        assert uneven["splits_known"] is True
        even = by_case["all_to_all_single_even_world"]
        assert (even["in_splits"], even["splits_known"]) == (None, True)
        assert by_case["all_to_all_list_dp"]["in_splits"] == [4, 4]
        assert (by_case["all_reduce_async_dp"]["is_async"], by_case["all_reduce_tp"]["is_async"]) == (True, False)
    ddp = [c for c in calls(run) if c["in_elems"] == 8320]
    assert {traffic.payload_bytes(c["op"], c["in_elems"], c["out_elems"], c["dtype"], 2) for c in ddp} == {33_280}
    # a trace of gloo does not say which group a call ran on, nor have calls a backend's record
    assert {(c["group_id"], c["group_size"], c["seq"]) for c in calls(run)} == {(None, None, None)}
    # a rank's file lists the groups it is in
    described = {g["description"]: g["ranks"] for g in run.rows("process_group", rank=0)}
    assert described["TENSOR_MODEL_PARALLEL_GROUP"] == [0, 1]
    assert described["DATA_PARALLEL_GROUP"] == [0, 2]
    assert described["PIPELINE_MODEL_PARALLEL_GROUP"] == [0, 3]
    assert described["IRREGULAR_GROUP"] == [0, 1, 3]
    assert described["default_pg"] == [0, 1, 2, 3]
    # work that gloo did is host time, and no kernel
    assert run.rows("kernel") == []
    assert {c["time_source"] for c in calls(run)} == {"backend_range", None}


def record_param_comms(run: Any) -> list[tuple[object, ...]]:
    keys = ("op", "in_elems", "out_elems", "group_id", "group_size", "seq", "comms_id", "is_async", "peer")
    return [tuple(c[k] for k in keys) for c in calls(run)]


RECORDED = [
    ("all_reduce", 1024, 1024, "3", 8, 7, 8248777784072093085, False, None),
    ("all_gather", 1024, 8192, "3", 8, 8, 8248777784072093149, True, None),
    ("reduce_scatter", 8192, 1024, "3", 8, 9, 8248777784072093200, True, None),
    ("all_to_all", 1024, 1008, "9", 64, 9, 6623666769262169577, True, None),
    ("reduce_scatter", 8_589_934_592, 16_777_216, "10", 512, 10, 2594088171957591805, True, None),
    ("all_reduce", 1024, 1024, "11", 3, 11, 4117802056558546051, True, None),
    ("all_reduce", 1024, 1024, "12", 1, 12, 11194622155780830520, True, None),
    ("send", 1024, 1024, "13", 4, 13, 15638310858217385520, True, 4),
    ("recv", 1024, 1024, "13", 4, 14, 15638310858217385591, True, 12),
    ("all_reduce", 5, 5, "30", 30, 17, 8690754640249220515, True, None),
    ("all_reduce", 5, 5, "31", 31, 18, 7484782275399169773, True, None),
    ("barrier", 0, 0, "3", 8, 19, 8248777784072093848, False, None),
]


def test_record_param_comms_of_torch_2_13(load: Import) -> None:
    """Thirteen genuine events with chosen arguments, one of them a wait; ids beyond 2**63; no rank, no kernels."""
    run = load("gloo_torch213", "record_param_comms.json.gz")
    assert host_names(run, "record_param_comms") == {"record_param_comms": 13}
    assert record_param_comms(run) == RECORDED
    groups = {g["group_id"]: (g["description"], g["ranks"], g["ranks_source"]) for g in run.rows("process_group")}
    assert groups == {
        "3": ("TENSOR_MODEL_PARALLEL_GROUP", list(range(8)), "call"),
        "9": ("EXPERT_MODEL_PARALLEL_GROUP", list(range(64)), "inferred"),  # written shortened
        "10": ("DATA_PARALLEL_GROUP_WITH_CP", list(range(3, 4096, 8)), "inferred"),  # 512 ranks by start and stride
        "11": ("EMBEDDING_GROUP", None, None),  # irregular: neither a list nor a stride
        "12": ("CONTEXT_PARALLEL_GROUP", [5], "inferred"),  # one rank: its start
        "13": ("PIPELINE_MODEL_PARALLEL_GROUP", [0, 4, 8, 12], "call"),
        "30": ("G30", list(range(30)), "call"),
        "31": ("G31", list(range(31)), "inferred"),  # one rank more than is written out
    }
    exchange = calls(run)[3]
    assert (exchange["in_splits"], exchange["out_splits"], exchange["splits_known"]) == (None, None, False)  # shortened
    # the key Rank is the place in the group but for send and recv
    assert [c["group_rank"] for c in calls(run)] == [1, 1, 1, 1, 1, 1, 0, None, None, 1, 1, 1]
    assert {c["dtype"] for c in calls(run)} == {"bfloat16", "uint8"}


def test_the_same_with_a_quote_in_a_group_description(load: Import) -> None:
    """The file as torch 2.13 writes it is no valid JSON: one repaired text more, nothing lost."""
    run = load("gloo_torch213", "record_param_comms_badquote.json.gz")
    found = record_param_comms(run)
    assert [f for f in found if f[3] != "q"] == RECORDED
    assert len(found) == 13
    assert run.issues() == {"repaired_string": 1, "rank_not_recorded": 1}
    [group] = run.rows("process_group", group_id="q")
    assert (group["description"], group["ranks"]) == ('quo"te', [0, 1])


# Our own: real megatron-core over gloo -------------------------------------------------------------------------------

MEGATRON = (
    "cp2_te_a2a", "cp2_te_all_gather", "cp2_te_p2p", "dp2", "dp2_distopt", "dp2_distopt_overlap", "dp2_megatron_fsdp",
    "dp2_torch_fsdp2", "ep2_allgather", "ep2_alltoall", "pp2", "pp2_vpp2", "pp2_vpp2_overlap", "pp4", "tp2", "tp2_sp",
    "tp2_sp_recompute_full", "tp2ep2_sp_alltoall", "tp2pp2_sp",
)  # fmt: skip


def as_traced(op: str, dtype: str, n_in: int, n_out: int) -> list[tuple[object, ...]]:
    """What a gloo trace shows of a call that the table counts at torch.distributed, as (op, dtype, in, out).

    Equal but for three things. A send or receive has one tensor, which the profiler shows as the operand both ways, the
    table as handed in or got out. Lists of tensors (the dropless MoE's with expert TP): the profiler writes no shapes of
    a list of lists, so one side is unknown, and the type with it where that is the input. And gloo refuses unequal
    lists, so the recording carried them out otherwise (megatron_job/shim.py): an all_gather as a broadcast from each of
    the two ranks, a reduce_scatter as an all_reduce of the whole.
    """
    name = str(traffic.normalise_op(op))
    if name in ("send", "recv"):
        return [(name, dtype, n_in or n_out, n_in or n_out)]
    if op == "all_gather":
        if n_out != 2 * n_in:
            return [("broadcast", dtype, n, n) for n in (n_in, n_out - n_in)]
        return [(name, dtype, n_in, None)]
    if op == "reduce_scatter":
        if n_in != 2 * n_out:
            return [("all_reduce", dtype, n_in, n_in)]
        return [(name, None, None, n_out)]
    return [(name, dtype, n_in, n_out)]


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_over_gloo_gives_the_table_that_was_counted_beside_it(load: Import, shared: Shared, name: str) -> None:
    """Every rank: the calls of the first step, by operation, type and sizes.

    Calls inside a coalescing manager are merged by torch into one; here each manager holds one, so the rows stay.
    """
    table = shared(f"megatron_recorded/{name}.csv.gz")
    run = load(f"mcore_gloo_{name}")
    expected: Counter[tuple[object, ...]] = Counter()
    with gzip.open(table, "rt", newline="") as file:
        for row in csv.DictReader(file):
            if row["phase"].startswith("step0"):
                for call in as_traced(row["op"], row["dtype"], int(row["nelems_in"]), int(row["nelems_out"])):
                    expected[int(row["rank"]), *call] += int(row["count"])
    found = Counter((c["rank"], c["op"], c["dtype"], c["in_elems"], c["out_elems"]) for c in calls(run))
    assert found == expected
    assert run.result.status == "complete"
    assert run.result.ranks == sorted({int(str(key[0])) for key in expected})
    # the header names the groups: Megatron's descriptions, and complete lists
    groups = run.rows("process_group")
    assert {g["ranks_source"] for g in groups} == {"header"}
    assert "TENSOR_MODEL_PARALLEL_GROUP" in {g["description"] for g in groups}
    # a gloo trace says no group of a call, but where it was made: every one lies in some range
    assert {c["group_id"] for c in calls(run)} == {None}


def test_no_set_is_left_out(shared: Shared) -> None:
    tested = Path(__file__).read_text()
    elsewhere = {"bytedance_straggler_SE"}  # Parquet of operations, no Kineto file
    for folder in sorted(shared("traces").iterdir()):
        if folder.is_dir() and folder.name not in elsewhere:
            assert f'"{folder.name.removeprefix("mcore_gloo_")}' in tested, folder.name
