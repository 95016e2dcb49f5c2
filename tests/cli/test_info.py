"""``traceanalyzer info``: the whole screen and the whole document of a small run, and what changes without this or that."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from traceanalyzer import schema
from traceanalyzer.job import parse_mapping

Cli = Callable[..., Result]
WriteRun = Callable[..., Path]

BASE = 1_700_000_000_000_000_000
JOB = parse_mapping({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "world_size": 4})
COMMON = {"source": "kineto"}


def rank_row(rank: int, window: tuple[int, int]) -> dict[str, Any]:
    """A recorded rank with its window in ns after BASE."""
    return {
        **COMMON,
        "rank": rank,
        "world_size": 4,
        "host": f"node{rank // 2}",
        "pid": 100 + rank,
        "device": rank % 2,
        "device_name": "Test GPU",
        "window_start_ns": BASE + window[0],
        "window_end_ns": BASE + window[1],
        "host_start_ns": BASE + window[0],
        "source_file": f"rank{rank}.json",
        "versions": json.dumps({"nccl": f"2.2{rank // 2}"}),
        "events_read": 1000,
        "rows_rejected": rank,
        "import_status": "complete",
    }


def group(rank: int, name: str, description: str, ranks: list[int]) -> dict[str, Any]:
    """A process group as a rank knows it."""
    size = len(ranks)
    return {
        **COMMON,
        "rank": rank,
        "group_id": name,
        "name": name,
        "description": description,
        "group_size": size,
        "ranks": ranks,
        "ranks_source": "header",
    }


def call(rank: int, call_id: int, op: str, name: str, **more: Any) -> dict[str, Any]:
    """A call of 8 float16 elements in a group of two, in the only step."""
    start = BASE + 20_000 + 1000 * call_id
    return {
        **COMMON,
        "rank": rank,
        "call_id": call_id,
        "coalesce_id": call_id,
        "op": op,
        "group_id": name,
        "group_size": 2,
        "dtype": "float16",
        "in_elems": 8,
        "t_issue_ns": start,
        "completeness": "no_kernel",
        **more,
    }


def kernel(rank: int, name: str, start: int, dur: int, **more: Any) -> dict[str, Any]:
    """A kernel, of communication unless told."""
    return {
        **COMMON,
        "rank": rank,
        "name": name,
        "start_ns": BASE + start,
        "dur_ns": dur,
        "kernel_class": "comm",
        **more,
    }


TIMED = {"time_source": "kernel", "start_ns": BASE + 30_000, "dur_ns": 4_000, "completeness": "full"}


@pytest.fixture
def run(write_run: WriteRun) -> Path:
    """Three ranks of four (TP 2, PP 2): calls, kernels of all three fates, one step, two sorts of issue."""
    tp, pp = "TENSOR_MODEL_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL_GROUP"
    step = {**COMMON, "name": "ProfilerStep#7", "category": "user_annotation"}
    issue = {**COMMON, "occurrences": 4, "severity": "info", "code": "flows", "sentence": "Arrows are not stored."}
    return write_run(
        "run.parquet",
        {
            "comm_record": [
                call(0, 0, "all_reduce", "1", **TIMED),
                call(0, 1, "send", "3", **TIMED),
                call(0, 2, "all_to_all", "1", splits_known=False, dtype=None),
                call(1, 0, "all_reduce", "1", **TIMED),
                call(2, 0, "all_reduce", "2", **TIMED),
            ],
            "issue": [
                {**issue, "rank": 0},
                {**issue, "rank": 1},
                {
                    **issue,
                    "rank": 2,
                    "severity": "data_loss",
                    "code": "file_cut",
                    "sentence": "It is cut.",
                    "occurrences": 1,
                },
            ],
            "kernel": [
                kernel(0, "gemm", 25_000, 2_000, kernel_class="gemm"),
                kernel(0, "nccl_a", 30_000, 4_000, coalesce_id=0, join_evidence="correlation", completeness="full"),
                kernel(0, "nccl_b", 5_000, 2_000, completeness="launched_before_window"),
                kernel(0, "deep_ep", 40_000, 1_500, completeness="kernel_only"),
                kernel(0, "deep_ep", 42_000, 500, completeness="kernel_only"),
                kernel(1, "nccl_a", 30_000, 4_000, coalesce_id=0, join_evidence="correlation", completeness="full"),
            ],
            "process_group": [
                group(0, "1", tp, [0, 1]),
                group(0, "3", pp, [0, 2]),
                group(1, "1", tp, [0, 1]),
                group(1, "4", pp, [1, 3]),
                group(2, "2", tp, [2, 3]),
                group(2, "3", pp, [0, 2]),
            ],
            "rank": [rank_row(0, (0, 900_000)), rank_row(1, (10_000, 950_000)), rank_row(2, (5_000, 1_005_000))],
            "span": [
                {**step, "rank": 0, "start_ns": BASE + 10_000, "dur_ns": 800_000},
                {**step, "rank": 1, "start_ns": BASE + 12_000, "dur_ns": 400_000},
                {**step, "rank": 2, "start_ns": BASE + 11_000, "dur_ns": 200_000},
            ],
        },
        {schema.META_JOB_INTENDED: JOB.to_json()},
    )


def test_the_whole_screen(run_cli: Cli, run: Path) -> None:
    done = run_cli("info", "run.parquet")
    assert (done.exit_code, done.stderr) == (0, "")
    assert (
        done.stdout
        == """\
run.parquet   import complete   schema 1.2
job      intended, from the run: 4 = TP 2 x CP 1 x PP 2 x DP 1
ranks    0-2   3 of 4 present   tp 0-1, pp 0-1
missing  3   tp 1, pp 1
host     ranks 0-1: node0; Test GPU, device 0-1
         rank 2: node1; Test GPU, device 0
window   1.005 ms from 2023-11-14 22:13:20.000000000 UTC, clocks as recorded

sources
 source  files  events  rejected  rows
 kineto      3   3,000         3    26
 kineto  6 kernel, 6 process_group, 5 comm_record, 3 issue, 3 rank, 3 span
         nccl 2.20 and 2.21

steps
 step  evidence       ranks  whole         min      median         max
 7     profiler_step      3      3  200.000 us  400.000 us  800.000 us

groups
 role  axis  size  groups  calls  role by
 tp    TP       2       2      4  description
 pp    PP       2       2      1  description

communication
 kernels  2 of 5 tied to calls, 66.6 % of their time
          1 launched before the recording began
          2 that no call explains, bytes unknown:
                2    2.000 us  deep_ep
 calls    5: 4 timed by kernels, 1 without time
 known    role of 100 %, step of 100 %, bytes of 80 %

places of kernels, by their time
 fact         compute  communication  copy  by
 step           100 %         83.3 %     -  profiler_step
 role               -         66.6 %     -  call
 phase            0 %         66.6 %     -  call
 microbatch       0 %            0 %     -  none
 layer            0 %            0 %     -  none
 component        0 %            0 %     -  none
 served axis      0 %              -     -  none

issues: 1 data_loss, 1 info
 data_loss  It is cut. (rank 2)
 info       Arrows are not stored. (ranks 0-1, 8 times)

what can be asked of this run
 diff against the job   yes     job: the intended one, in the run
 exposed communication  partly  kernels recorded on 2 of 3 ranks
 pipeline bubble        no      2 of 2 stages recorded, no pass is known: no
                                kernel of one, no mark, no operator of
                                autograd's
 layer attribution      no      neither marks nor module ranges around the calls
 MoE balance            no      no split sizes recorded on 1 all_to_all call
 MoE cost               no      no all_to_all call has both split sizes and the
                                time of a kernel
 skew between ranks     partly  2 of 4 rank sets recorded whole
 slow ranks             no      fewer than 3 recorded ranks do the same work
 slow links             no      2 hosts recorded, and links of 3 are compared
"""
    )


def test_the_json_document(run_cli: Cli, run: Path) -> None:
    done = run_cli("info", "run.parquet", "--format", "json")
    assert (done.exit_code, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    ranks = document.pop("ranks")
    assert ranks[2] == {
        "rank": 2,
        "host": "node1",
        "pid": 102,
        "device": 0,
        "device_name": "Test GPU",
        "coordinates": {"tp": 0, "cp": 0, "dp": 0, "pp": 1, "ep": 0, "etp": 0, "edp": 0},
        "window_start_ns": 1_700_000_000_000_005_000,
        "window_end_ns": 1_700_000_000_001_005_000,
        "import_status": "complete",
    }
    assert [r["rank"] for r in ranks] == [0, 1, 2]
    assert document.pop("questions")[0] == {
        "question": "diff against the job",
        "answer": "yes",
        "reason": "job: the intended one, in the run",
    }
    assert document.pop("inferred")[1:4] == [
        {"name": "tp", "value": 2, "sure": "proven", "reason": "group 1 is described as such and has 2 ranks"},
        {
            "name": "cp",
            "value": 1,
            "sure": "proven",
            "reason": "the only layout that has the groups' roles and sizes agrees",
        },
        {"name": "pp", "value": 2, "sure": "proven", "reason": "group 3 is described as such and has 2 ranks"},
    ]
    assert document.pop("inferred_layout") == "TP2 x PP2"
    # of 12 us of communication 2 lie outside of the step, and 4 belong to no call
    places = {(p["work"], p["fact"], p["evidence"]): p for p in document.pop("kernel_places")}
    one = {"kernels": 4, "dur_ns": 10_000, "share": 10 / 12}
    assert places["communication", "step", "profiler_step"] == {
        "work": "communication", "fact": "step", "evidence": "profiler_step", **one,
    }  # fmt: skip
    assert places["communication", "role", "call"]["dur_ns"] == 8_000
    assert places["communication", "role", None]["kernels"] == 3
    assert {p["kernels"] for (work, *_), p in places.items() if work == "compute"} == {1}
    assert document == {
        "schema": "traceanalyzer.info/1",
        "run": "run.parquet",
        "schema_version": "1.2",
        "import_status": "complete",
        "job": {
            "used": "intended",
            "intended": True,
            "captured": False,
            "layout": {"tp": 2, "cp": 1, "ep": 1, "pp": 2, "dp": 1, "etp": 2, "edp": 1},
            "equation": "4 = TP 2 x CP 1 x PP 2 x DP 1",
            "problem": None,
            "conflicts": [],
        },
        "world_size": 4,
        "world_size_source": "recorded",
        "present_ranks": [0, 1, 2],
        "missing_ranks": [3],
        "present_coordinates": {"tp": [0, 1], "pp": [0, 1]},
        "missing_coordinates": {"tp": [1], "pp": [1]},
        "sources": [
            {
                "source": "kineto",
                "files": 3,
                "events_read": 3000,
                "events_rejected": 3,
                "rows": {"comm_record": 5, "issue": 3, "kernel": 6, "process_group": 6, "rank": 3, "span": 3},
                "versions": {"nccl": ["2.20", "2.21"]},
            }
        ],
        "window_start_ns": 1_700_000_000_000_000_000,
        "window_end_ns": 1_700_000_000_001_005_000,
        "steps": [
            {
                "step": 7,
                "evidence": "profiler_step",
                "min_dur_ns": 200_000,
                "median_dur_ns": 400_000,
                "max_dur_ns": 800_000,
                "ranks": [
                    {"rank": 0, "start_ns": 1_700_000_000_000_010_000, "dur_ns": 800_000, "complete": True},
                    {"rank": 1, "start_ns": 1_700_000_000_000_012_000, "dur_ns": 400_000, "complete": True},
                    {"rank": 2, "start_ns": 1_700_000_000_000_011_000, "dur_ns": 200_000, "complete": True},
                ],
            }
        ],
        "groups": [
            {"role": "tp", "axis": "TP", "size": 2, "groups": 2, "calls": 4, "evidence": ["description"]},
            {"role": "pp", "axis": "PP", "size": 2, "groups": 2, "calls": 1, "evidence": ["description"]},
        ],
        "conflicts": [],
        "communication": {
            "kernels": 5,
            "tied_kernels": 2,
            "launched_before_window": 1,
            "unexplained_kernels": 2,
            "kernel_dur_ns": 12_000,
            "tied_dur_ns": 8_000,
            "unexplained": [{"name": "deep_ep", "kernels": 2, "dur_ns": 2_000}],
            "calls": 5,
            "calls_with_kernel": 4,
            "calls_with_host_range": 0,
            "calls_without_time": 1,
            "calls_without_time_alone": 0,
            "calls_with_role": 5,
            "calls_with_step": 5,
            "calls_with_bytes": 4,
        },
        "issues": [
            {
                "severity": "data_loss",
                "code": "file_cut",
                "sentence": "It is cut.",
                "occurrences": 1,
                "ranks": [2],
                "files": [],
            },
            {
                "severity": "info",
                "code": "flows",
                "sentence": "Arrows are not stored.",
                "occurrences": 8,
                "ranks": [0, 1],
                "files": [],
            },
        ],
    }


def test_a_job_file_wins_and_contradictions_are_told(run_cli: Cli, run: Path, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("tensor_model_parallel_size = 8\nworld_size = 8\n", encoding="utf-8")
    lines = run_cli("info", "run.parquet", "--job", "job.toml").stdout.splitlines()
    assert lines[1] == "job       from --job: 8 = TP 8 x CP 1 x PP 1 x DP 1"
    assert "conflict  declared a world of 8 ranks, recorded 4" in lines
    assert "conflict  declared TP8, observed groups imply TP2 x PP2 (proven)" in lines
    assert "conflict  declared tp groups of 8 ranks, observed groups of 2" in lines


def test_a_rank_that_is_in_two_files_is_told(run_cli: Cli, write_run: WriteRun) -> None:
    for name in ("runs/a.parquet", "runs/b.parquet"):
        write_run(name, {"rank": [{**COMMON, "rank": 3}]})
    assert "conflict  rank 3 there more than once: their calls and times count each time" in (
        run_cli("info", "runs").stdout.splitlines()
    )


def test_captured_against_intended(run_cli: Cli, write_run: WriteRun) -> None:
    jobs = {
        schema.META_JOB_INTENDED: parse_mapping({"world_size": 1, "fp16": True}).to_json(),
        schema.META_JOB_CAPTURED: parse_mapping({"world_size": 1, "fp16": False}).to_json(),
    }
    write_run("run.parquet", {"rank": [{**COMMON, "rank": 0}]}, jobs)
    lines = run_cli("info", "run.parquet").stdout.splitlines()
    assert lines[2] == "job conflict  fp16: intended true, captured false"


def test_more_issues_than_fit_are_counted(run_cli: Cli, write_run: WriteRun) -> None:
    found = [{**COMMON, "rank": 0, "severity": "info", "code": f"c{i}", "sentence": f"No. {i}."} for i in range(21)]
    found.append({**COMMON, "rank": 0, "severity": "warning", "code": "w", "sentence": "Beware."})
    write_run("run.parquet", {"issue": found, "rank": [{**COMMON, "rank": 0}]})
    lines = run_cli("info", "run.parquet").stdout.splitlines()
    first = lines.index("issues: 1 warning, 21 info")
    assert lines[first + 1] == " warning  Beware. (rank 0)"
    assert lines[first + 21 : first + 24] == [
        " 2 more (2 info) not shown; all of them:",
        '   traceanalyzer sql run.parquet "SELECT * FROM issue"',
        "",
    ]


def test_a_run_of_almost_nothing(run_cli: Cli, write_run: WriteRun) -> None:
    write_run("run.parquet", {"rank": [COMMON]})
    done = run_cli("info", "run.parquet")
    assert done.exit_code == 0
    assert (
        done.stdout
        == """\
run.parquet   import complete   schema 1.2
job    none: roles and coordinates are known only where the recording names them
ranks  1 source without a rank
host   not recorded; no device

sources
 source  files   events  rejected  rows
 kineto      1  unknown   unknown     1
 kineto  1 rank

steps
 none: neither step marks nor a window

groups
 none recorded

communication
 kernels  no communication kernel recorded
 calls    0

issues: none

what can be asked of this run
 diff against the job   no       no communication call is recorded
 exposed communication  no       neither a kernel nor a backend's range of a
                                 call is recorded
 pipeline bubble        unknown  neither a job nor a named group says how many
                                 stages there are
 layer attribution      no       no communication call is recorded
 MoE balance            no       no all_to_all call is recorded
 MoE cost               no       no all_to_all call is recorded
 skew between ranks     unknown  no group's ranks are known
 slow ranks             no       no kernel of a rank of known stage is recorded
 slow links             no       no call has a time
"""
    )


def test_a_group_of_one_needs_no_kernel(run_cli: Cli, write_run: WriteRun) -> None:
    write_run(
        "run.parquet",
        {
            "comm_record": [{**call(0, 0, "all_reduce", "ptr:1"), "group_size": 1}],
            "process_group": [{**COMMON, "rank": 0, "group_id": "ptr:1", "group_size": 1}],
            "rank": [{**COMMON, "rank": 0}],
        },
    )
    lines = run_cli("info", "run.parquet").stdout.splitlines()
    assert " calls    1: 1 without time (all in groups of one rank)" in lines
    assert " unknown  -        1  unknown      1  none" in lines


def test_a_pipe_gets_80_columns_without_colour(run_cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    plain = run_cli("info", "run.parquet").stdout
    assert "\x1b" not in plain
    assert max(map(len, plain.splitlines())) <= 80


def test_a_file_that_is_no_run(run_cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing", encoding="utf-8")
    done = run_cli("info", "notes.txt")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Error: notes.txt: cannot be read as Parquet (")


def test_a_job_that_cannot_be_read(run_cli: Cli, run: Path, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("num_layers =", encoding="utf-8")
    done = run_cli("info", "run.parquet", "--job", "job.toml")
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: job.toml: not valid TOML: ")
