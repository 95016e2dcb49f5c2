"""``traceanalyzer export``: files that appear, what is said of them, and refusals."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import Result
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

from traceanalyzer import schema

Cli = Callable[..., Result]


@pytest.fixture
def run(write_run: Callable[..., Path]) -> Path:
    """Two kernels on each of two ranks, in steps 1 and 2, and one kernel without a start."""
    kernel = {"source": "kineto", "device": 0, "stream": 7, "kernel_class": "gemm", "dur_ns": 30}
    span = {"source": "kineto", "category": "user_annotation", "dur_ns": 100, "tid": 5}
    return write_run(
        "run.parquet",
        {
            "kernel": [
                {**kernel, "rank": r, "name": f"gemm, {n}", "start_ns": 100 * n + 20} for r in (0, 1) for n in (1, 2)
            ]
            + [{**kernel, "rank": 1, "name": "lost"}],
            "rank": [{"rank": r, "source": "kineto", "window_start_ns": 120, "window_end_ns": 250} for r in (0, 1)],
            "span": [
                {**span, "rank": r, "name": f"ProfilerStep#{n}", "start_ns": 100 * n} for r in (0, 1) for n in (1, 2)
            ],
        },
    )


def test_both_timelines_and_what_is_said_of_them(run_cli: Cli, run: Path, tmp_path: Path) -> None:
    done = run_cli("export", run, "--perfetto", "a.pftrace", "--chrome", "b.json.gz")
    assert (done.exit_code, done.stdout) == (0, "")
    packets = Trace()
    packets.ParseFromString((tmp_path / "a.pftrace").read_bytes())
    kinds = [int(p.track_event.type) for p in packets.packet if p.HasField("track_event")]
    # on each rank: two steps, two kernels, two ranges of the host, each with begin (1) and end (2)
    assert (kinds.count(1), kinds.count(2), len(kinds)) == (12, 12, 24)
    document = json.loads(gzip.decompress((tmp_path / "b.json.gz").read_bytes()))
    assert document["baseTimeNanoseconds"] == 100
    assert sum(e["ph"] == "X" for e in document["traceEvents"]) == 12
    said = [
        "2 ranks, 6 tracks, 12 slices, 0 flow ends, 0 counter values",
        "note     no expected bytes and verdicts (no job is known: give --job)",
        "note     ranks 0-1: no call ties their clocks to others; they are as recorded",
        "left out 1 kernels without a start",
    ]
    lines = done.stderr.splitlines()
    assert [lines[0].split("   ")[-1], *lines[1:4]] == said
    assert [lines[4].split("   ")[-1], *lines[5:]] == said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pftrace", "b.json.gz", "run.parquet"]


def test_quiet_says_nothing(run_cli: Cli, run: Path) -> None:
    done = run_cli("export", run, "--csv", "b.csv", "--view", "rank", "--quiet")
    assert (done.exit_code, done.output) == (0, "")


def test_some_ranks_and_steps(run_cli: Cli, run: Path, tmp_path: Path) -> None:
    done = run_cli("export", run, "--chrome", "b.json", "--ranks", "1", "--steps", "2-9")
    assert done.exit_code == 0
    events = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))["traceEvents"]
    assert [(e["pid"], e["name"], e["ts"]) for e in events if e["ph"] == "X"] == [
        (1_000_001, "step 2", 0.1),
        (1_000_001, "gemm, 2", 0.12),
        (1_000_001, "ProfilerStep#2", 0.1),
    ]
    assert "note     steps 3-9 are not in the run" in done.stderr
    assert "left out 2 kernels outside of the chosen steps" in done.stderr
    assert "left out 1 operators and ranges of the host outside of the chosen steps" in done.stderr


def test_a_view_as_parquet_and_csv(run_cli: Cli, run: Path, tmp_path: Path) -> None:
    done = run_cli("export", run, "--parquet", "k.parquet", "--csv", "k.csv", "--view", "kernel", "--steps", "1")
    assert (done.exit_code, done.stderr) == (0, "k.parquet   2 rows\nk.csv   2 rows\n")
    rows = pq.read_table(tmp_path / "k.parquet").to_pylist()
    assert [(r["rank"], r["step"], r["name"], r["start_ns"]) for r in rows] == [
        (0, 1, "gemm, 1", 120),
        (1, 1, "gemm, 1", 120),
    ]
    lines = list(csv.DictReader(io.StringIO((tmp_path / "k.csv").read_text(encoding="utf-8"))))
    assert [(r["rank"], r["name"], r["start_ns"], r["layer"]) for r in lines] == [
        ("0", "gemm, 1", "120", ""),
        ("1", "gemm, 1", "120", ""),
    ]


def test_a_query_on_stdout(run_cli: Cli, run: Path) -> None:
    done = run_cli("export", run, "--csv", "-", "--query", "top_kernels", "--param", "top=1", "--ranks", "0")
    assert done.exit_code == 0
    (row,) = csv.DictReader(io.StringIO(done.stdout))
    assert (row["rank"], row["dur_ns"]) == ("0", "30")
    assert done.stderr == ""


def test_a_folder_for_every_view(run_cli: Cli, run: Path, tmp_path: Path) -> None:
    done = run_cli("export", run, "--parquet", "views", "--ranks", "0")
    assert done.exit_code == 0
    found = {p.stem: pq.read_metadata(p).num_rows for p in (tmp_path / "views").iterdir()}
    assert found == dict.fromkeys(schema.VIEWS, 0) | {"kernel": 2, "rank": 1, "span": 2}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "what to write? --perfetto, --chrome, --parquet or --csv."),
        (["--chrome", "a", "--perfetto", "a"], "two formats into one file"),
        (["--chrome", "a", "--view", "comm"], "--view and --query go with --parquet or --csv."),
        (["--csv", "a"], "--csv: which table?"),
        (["--parquet", "a.parquet"], "which table? --view NAME or --query NAME; a folder takes all views."),
        (["--parquet", "a", "--steps", "1"], "--steps with every view"),
        (["--csv", "a", "--view", "comm", "--query", "calls"], "--view or --query, not both."),
        (["--csv", "a", "--view", "comm", "--param", "a=b"], "--param goes with --query."),
        (["--csv", "a", "--query", "calls", "--param", "a"], "must be NAME=VALUE"),
        (["--csv", "a", "--view", "calls"], "no view 'calls'. There are: run, comm, cpu_op"),
        (["--csv", "a", "--view", "rank", "--steps", "1"], "view rank has no column step"),
        (["--csv", "a", "--query", "nothing"], "no query 'nothing'"),
        (["--chrome", "run.parquet"], "this file is read by the same command"),
        (["--parquet", "."], "the run lies in this folder"),
        (["--chrome", "a", "--ranks", "3-1"], "holds no rank"),
        (["--chrome", "a", "--ranks", "7"], "none of the ranks asked for. The run has ranks 0-1."),
        (["--chrome", "a", "--steps", "7"], "nothing to export: the run has steps 1-2."),
        (["--chrome", "none/a"], "cannot be written"),
    ],
)
def test_refusals_leave_nothing_behind(
    run_cli: Cli, run: Path, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    done = run_cli("export", run, *arguments)
    assert done.exit_code == 2
    assert sentence in " ".join(done.stderr.split())
    assert [p.name for p in tmp_path.iterdir() if not p.is_dir()] == ["run.parquet"]
