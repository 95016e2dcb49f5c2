"""HTA's analyses on a run's rows against the same analyses on HTA's own parse of the JSON, and against our own figures."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest

from traceanalyzer.attribute.time import Window, of_windows
from traceanalyzer.errors import InputError
from traceanalyzer.importers import import_traces
from traceanalyzer.importers.spool import RunWriter, table_of
from traceanalyzer.run import Run

Shared = Callable[[str], Path]

pytestmark = pytest.mark.filterwarnings("ignore")  # HTA uses what the newest pandas deprecates


@pytest.fixture
def hta() -> Any:
    """HTA's module of analyses, its logging off; the test is skipped without HTA, which `make test` installs."""
    found = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed")
    importlib.import_module("hta.configs.config").logger.setLevel(logging.CRITICAL)
    return found


def write(path: Path, rows: dict[str, list[dict[str, Any]]]) -> Path:
    with RunWriter(path, {}) as out:
        for kind in sorted(rows):
            out.write(kind, [table_of(kind, [{"source": "kineto", "rank": 3, **row} for row in rows[kind]])])
    return path


def test_without_hta_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hta.trace_analysis", None)
    with (
        Run.open(write(tmp_path / "run.parquet", {"rank": [{}]})) as run,
        pytest.raises(InputError, match=r"pip install 'traceanalyzer\[hta\]'"),
    ):
        run.to_hta()


def test_a_run_without_a_trace_is_refused(hta: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "run.parquet", {"rank": [{"source": "hook"}]})
    with Run.open(path) as run, pytest.raises(InputError, match="holds no rows of a profiler trace"):
        run.to_hta()


BASE = 1_700_000_000_000_000_000


def tiny(path: Path) -> Path:
    """One step, a launch of a gemm and one of an all-reduce. Device, from 10.4 us on: gemm to 20.6, all-reduce 15 to 30."""

    def at(start: int, end: int) -> dict[str, int]:
        return {"start_ns": BASE + start, "dur_ns": end - start}

    launch = {"name": "cudaLaunchKernel", "category": "cuda_runtime", "pid": 9, "tid": 9}
    kernel = {"category": "kernel", "device": 2, "stream": 7}
    return write(
        path,
        {
            "rank": [{"world_size": 4, "device": 2, "device_name": "Test GPU"}],
            "span": [
                {"name": "ProfilerStep#5", "category": "user_annotation", "pid": 9, "tid": 9, **at(1000, 40_000)},
                {"name": "ProfilerStep#5", "category": "gpu_user_annotation", "pid": 2, "tid": 7, **at(15_000, 50_000)},
                {"name": "Record Window End", "category": "instant", **at(50_000, 50_000)},
                {"name": "[memory]", "category": "cpu_instant_event", "pid": 9, "tid": 9, **at(2500, 2500)},
            ],
            "cpu_op": [
                {**launch, "correlation": 1, **at(2000, 3000)},
                {**launch, "correlation": 2, **at(4000, 5000)},
                {
                    "name": "aten::mm",
                    "category": "cpu_op",
                    "pid": 9,
                    "tid": 9,
                    "external_id": 2**63,
                    **at(45_000, 46_000),
                },
            ],
            "kernel": [
                {"name": "gemm", "kernel_class": "gemm", "correlation": 1, **kernel, **at(10_400, 20_600)},
                {
                    "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
                    "kernel_class": "comm",
                    "correlation": 2,
                    **kernel,
                    "stream": 8,
                    **at(15_000, 30_000),
                },
                {
                    "name": "Memcpy HtoD (Pinned -> Device)",
                    "kernel_class": "copy",
                    **kernel,
                    "category": "gpu_memcpy",
                    "copy_bytes": 8000,
                    **at(32_000, 34_000),
                },
            ],
        },
    )


def test_a_literal_run(hta: Any, tmp_path: Path) -> None:
    """Starts are rounded up and ends down: the gemm is 11 to 20, 5 of the all-reduce's 15 us are under it."""
    with Run.open(tiny(tmp_path / "run.parquet")) as run:
        analysis, exact = run.to_hta(), run.to_hta(whole_microseconds=False)
    trace = analysis.t
    assert isinstance(analysis, hta.TraceAnalysis)
    words = trace.symbol_table.get_sym_table()
    frame = trace.get_trace(3)
    columns = ["ts", "dur", "pid", "tid", "stream", "correlation", "index_correlation", "iteration"]
    rows = [(words[n].split(" ")[0], *row) for n, *row in frame[["name", *columns]].itertuples(index=False)]
    assert rows == [
        ("ProfilerStep#5", 0, 39, 9, 9, -1, -1, -1, 5),
        ("cudaLaunchKernel", 1, 1, 9, 9, -1, 1, 4, 5),
        ("cudaLaunchKernel", 3, 1, 9, 9, -1, 2, 6, 5),
        ("gemm", 10, 9, 2, 7, 7, 1, 2, 5),
        ("ProfilerStep#5", 14, 35, 2, 7, -1, -1, -1, 5),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 14, 15, 2, 8, 8, 2, 3, 5),
        ("Memcpy", 31, 2, 2, 7, 7, -1, -1, -1),
        ("aten::mm", 44, 1, 9, 9, -1, -1, -1, -1),
    ]
    assert list(frame["index"]) == list(frame.index) == list(range(1, 9))
    assert list(frame["memory_bw_gbps"]) == [0, 0, 0, 0, 0, 0, 4, 0]  # 8000 bytes in 2 us
    assert trace.meta_data[3] == {
        "schemaVersion": 1,
        "distributedInfo": {"rank": 3, "world_size": 4},
        "deviceProperties": [{"id": 2, "name": "Test GPU"}],
        "baseTimeNanoseconds": BASE,
    }
    assert trace.get_trace_start_unixtime_ns(3) == BASE + 1000
    times = ["idle_time(us)", "compute_time(us)", "non_compute_time(us)", "kernel_time(us)"]
    assert analysis.get_temporal_breakdown(visualize=False)[times].to_numpy().tolist() == [[2, 9, 12, 23]]
    assert exact.get_temporal_breakdown(visualize=False)[times].to_numpy().tolist() == [
        pytest.approx([2, 10.2, 11.4, 23.6])
    ]
    assert analysis.get_comm_comp_overlap(visualize=False).to_numpy().tolist() == [
        [3, pytest.approx(100 * 5 / 15, abs=0.01)]
    ]


# HTA's own parse of public traces ---------------------------------------------------------------------------------------

SETS = {
    "hta_nccl_metadata_a100_x2": ["nccl_data.json.gz"],
    "param_dlrm_v100_x8": [
        "worker0_step_12.1694128201545.pt.trace.json.gz",
        "worker1_step_12.1694128201556.pt.trace.json.gz",
    ],
    "torchao_ep_moe_b200": ["ref_ep_moe_fwd.json.gz"],
    "tracelens_vllm_b200_x8": [],
}
"""Set -> its files that are read; [] for all."""


class Both(NamedTuple):
    """One recording: HTA's parse of the file, and the run."""

    parsed: Any
    run: Run


@pytest.fixture
def read(hta: Any, shared: Shared, tmp_path: Path) -> Any:
    """Reads a set by HTA (in this process: HTA forks, which threads do not outlive) and by us."""
    opened: list[Run] = []

    def both(name: str, last_step: bool = True) -> Both:
        folder = shared(f"traces/{name}")
        files = [folder / f for f in SETS[name]] or sorted(folder.iterdir())
        result = import_traces(files, tmp_path / "run.parquet")
        opened.append(Run.open(tmp_path / "run.parquet"))
        trace = importlib.import_module("hta.common.trace").Trace(
            trace_files={r or 0: str(f) for r, f in zip(result.ranks, files, strict=True)}
        )
        trace.load_traces(last_step, use_multiprocessing=False)
        analysis = hta.TraceAnalysis.__new__(hta.TraceAnalysis)
        analysis.t = trace
        return Both(analysis, opened[-1])

    yield both
    for run in opened:
        run.close()


BREAKDOWN = ["rank", "compute_time(us)", "non_compute_time(us)", "idle_time(us)"]
Figures = dict[int, tuple[float, ...]]


def of_hta(analysis: Any) -> Figures:
    """Rank -> compute, other work and idle in us, and the hidden share of communication in percent."""
    shares = analysis.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"]
    rows = analysis.get_temporal_breakdown(visualize=False)[BREAKDOWN].itertuples(index=False)
    return {int(r): (*map(float, times), share) for (r, *times), share in zip(rows, shares, strict=True)}


def of_ours(run: Run) -> Figures:
    """The same by our classes of time, from a rank's first device work to its last."""
    run.query("time_classes")
    bounds = run.tuples("SELECT rank, min(start_ns), max(start_ns + dur_ns) FROM kernel GROUP BY rank ORDER BY rank")
    found: Figures = {}
    for rank, low, high in bounds:
        rows = of_windows(run, {rank: [Window(0, low, high)]}).to_pylist()

        def time(*classes: str, rows: list[dict[str, Any]] = rows, talking: bool = False) -> int:
            return sum(r["dur_ns"] for r in rows if r["class"] in classes and (r["roles"] or not talking))

        hidden = time("compute", talking=True)
        shown = time("communication", "pp")
        found[rank] = (
            time("compute") / 1000,
            time("communication", "pp", "copy") / 1000,
            time("idle", "launch_starved") / 1000,
            round(100 * hidden / (hidden + shown), 2),
        )
    return found


# Rank -> what HTA's parser, HTA on our rows, and our own classes say: equal where all times are whole microseconds.
WHOLE: dict[str, Figures] = {
    "param_dlrm_v100_x8": {0: (1034, 5556, 6419, 4.5), 1: (1246, 11075, 6428, 2.47)},
}


@pytest.mark.shared
@pytest.mark.parametrize("name", WHOLE)
def test_whole_microseconds_are_equal(read: Any, name: str) -> None:
    both = read(name)
    assert of_hta(both.parsed) == WHOLE[name]
    assert of_hta(both.run.to_hta(include_last_profiler_step=True)) == WHOLE[name]
    assert of_ours(both.run) == WHOLE[name]


# HTA's parser rounds nanoseconds so that each activity loses up to 2 us: HTA's figures, then those of the same events to the
# nanosecond, which are ours.
ROUNDED: dict[str, tuple[Figures, Figures]] = {
    "hta_nccl_metadata_a100_x2": (
        {0: (113012, 41026, 506512, 15.14)},
        {0: (115655.847, 41844.167, 503050.991, 15.61)},
    ),
    "torchao_ep_moe_b200": (
        {0: (20211, 4216, 9872, 8.01)},
        {0: (20941.515, 4341.733, 9016.199, 9.1)},
    ),
}


@pytest.mark.shared
@pytest.mark.parametrize("name", ROUNDED)
def test_nanoseconds_are_equal_before_htas_rounding(read: Any, name: str) -> None:
    both, (rounded, exact) = read(name), ROUNDED[name]
    assert of_hta(both.parsed) == rounded
    assert of_hta(both.run.to_hta(include_last_profiler_step=True)) == rounded
    assert of_ours(both.run) == exact
    precise = of_hta(both.run.to_hta(include_last_profiler_step=True, whole_microseconds=False))
    assert {r: pytest.approx(v, abs=1e-3) for r, v in precise.items()} == exact


@pytest.mark.shared
def test_other_figures_where_hta_takes_kernels_for_what_they_are_not(read: Any) -> None:
    """vLLM on B200. Literal figures of rank 0 in us: compute, other work, idle, hidden share.

    HTA's parser takes a host operator (triton_poi_..., 74 us, of which 73 while nothing else runs) for device work, because
    its arguments name a stream. By name HTA takes the 73 multimem_all_reduce_kernel for compute: 2119.548 us that are
    communication without a call, here and in no one's collectives.
    """
    both = read("tracelens_vllm_b200_x8")
    assert of_hta(both.parsed) == {0: (10153, 664, 73669, 0.0)}
    assert of_hta(both.run.to_hta()) == {0: (10080, 664, 73742, 0.0)}
    precise = of_hta(both.run.to_hta(whole_microseconds=False))
    assert precise == {0: pytest.approx((10771.685, 824.797, 72890.696, 0.0), abs=1e-3)}
    assert of_ours(both.run) == {0: (8652.137, 2944.345, 72890.696, 0.0)}
    assert both.run.value("SELECT count(*) FROM kernel WHERE name LIKE '%multimem_all_reduce%'") == 73


@pytest.mark.shared
def test_htas_other_analyses_say_the_same(read: Any) -> None:
    """Without the last profiler step, which HTA leaves out unless told."""
    both = read("hta_nccl_metadata_a100_x2", last_step=False)
    ours = both.run.to_hta()

    def same(ask: Callable[[Any], Any], *order: str, rtol: float = 1e-9) -> None:
        frames = [ask(analysis) for analysis in (both.parsed, ours)]
        if order:
            frames = [f.sort_values(list(order)).reset_index(drop=True) for f in frames]
        assert len(frames[0]) > 0
        pd.testing.assert_frame_equal(*frames, check_dtype=False, check_index_type=False, rtol=rtol)

    same(lambda a: a.get_gpu_kernel_breakdown(visualize=False)[0], "kernel_type")
    same(lambda a: a.get_gpu_kernel_breakdown(visualize=False, num_kernels=500)[1], "kernel_type", "name")
    same(lambda a: a.get_idle_time_breakdown(ranks=[0], visualize=False)[0])
    same(lambda a: a.get_queue_length_summary())
    same(lambda a: a.get_memory_bw_summary(), rtol=1e-4)  # theirs from the file, ours from bytes and duration
    same(lambda a: a.get_cuda_kernel_launch_stats(visualize=False)[0], "correlation")
    same(lambda a: a.get_gpu_user_annotation_breakdown(visualize=False), "name")
    with pytest.raises(ValueError):  # noqa: PT011 (it says nothing: the original file is not there to be written again)
        ours.generate_trace_with_counters(ranks=[0])
    counts = [a.t.get_trace(0)["iteration"].value_counts().to_dict() for a in (both.parsed, ours)]
    assert counts[0] == counts[1]
    pairs = [int((a.t.get_trace(0)["index_correlation"] > 0).sum()) for a in (both.parsed, ours)]
    assert pairs[0] == pairs[1] == 2 * len(ours.t.get_trace(0).query("stream >= 0"))
