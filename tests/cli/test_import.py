"""``traceanalyzer import``: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from traceanalyzer.job import Job
from traceanalyzer.run import Run

Cli = Callable[..., Result]

BASE = 1_700_000_000_000_000_000
NOT_EXPLAINED = {
    "severity": "warning",
    "code": "kernels_without_call",
    "sentence": "Communication kernels that no recorded call explains: their bytes are unknown.",
    "occurrences": 1,
    "location": None,
}


def without_size(text: str) -> str:
    """The file's size depends on the release of the Parquet writer."""
    return re.sub(r"\d[\d.,]* (?:B|KiB|MiB)", "SIZE", text)


def command(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """``python -m traceanalyzer`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "traceanalyzer", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_two_traces_become_one_run(run_cli: Cli, traces: list[Path], tmp_path: Path) -> None:
    done = run_cli("import", "trace0.json", "trace1.json", "-o", "run.parquet", "--workers", "1")
    assert done.exit_code == 0
    assert done.stderr == ""
    assert without_size(done.stdout) == (
        "run.parquet   import complete   SIZE\n"
        "ranks   0-1   from 2 files\n"
        "rows    4 cpu_op, 2 issue, 4 kernel, 2 rank\n"
        "issues  1 warning\n"
        " warning  Communication kernels that no recorded call explains: their bytes are\n"
        "          unknown. (ranks 0-1, 2 times)\n"
        "next    traceanalyzer info run.parquet\n"
        "        traceanalyzer diff run.parquet --job FILE\n"
    )
    with Run.open(tmp_path / "run.parquet") as run:
        assert run.rows("SELECT rank, name, start_ns, dur_ns FROM kernel WHERE rank = 1 ORDER BY start_ns") == [
            {"rank": 1, "name": "sm80_xmma_gemm_f16", "start_ns": BASE + 100_000, "dur_ns": 20_000},
            {"rank": 1, "name": "ncclDevKernel_AllReduce_Sum_f16_RING_LL", "start_ns": BASE + 130_000, "dur_ns": 5_000},
        ]


def test_the_json_document(run_cli: Cli, traces: list[Path]) -> None:
    done = run_cli("import", "trace0.json", "-o", "run.parquet", "--format", "json")
    assert done.exit_code == 0
    assert done.stderr == ""
    assert json.loads(done.stdout) == {
        "schema": "traceanalyzer.import/1",
        "status": "complete",
        "out": "run.parquet",
        "ranks": [0],
        "rows": {"cpu_op": 2, "issue": 1, "kernel": 2, "rank": 1},
        "files": [
            {"file": "trace0.json", "status": "complete", "rank": 0, "rank_source": "header", "reason": None},
        ],
        "issues": [{**NOT_EXPLAINED, "rank": 0, "source_file": "trace0.json"}],
    }


def test_jobs_are_kept_in_the_run(run_cli: Cli, traces: list[Path], tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("tensor_model_parallel_size = 2\nworld_size = 2\n", encoding="utf-8")
    (tmp_path / "said.yaml").write_text("world_size: 4\n", encoding="utf-8")
    done = run_cli("import", "trace0.json", "-o", "run.parquet", "--job", "job.toml", "--captured-job", "said.yaml")
    assert done.exit_code == 0
    assert done.stdout.endswith("        traceanalyzer diff run.parquet\n")
    with Run.open(tmp_path / "run.parquet") as run:
        intended = Job.from_json(run.metadata["traceanalyzer.job.intended"])
        captured = Job.from_json(run.metadata["traceanalyzer.job.captured"])
    assert (intended.tensor_model_parallel_size, intended.world_size) == (2, 2)
    assert (captured.tensor_model_parallel_size, captured.world_size) == (1, 4)


def test_a_job_that_is_wrong_stops_the_import(run_cli: Cli, traces: list[Path], tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("num_layers = 'many'\n", encoding="utf-8")
    done = run_cli("import", "trace0.json", "-o", "run.parquet", "--job", "job.toml")
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: job.toml: num_layers=")
    assert not (tmp_path / "run.parquet").exists()


def test_quiet_says_nothing_of_a_complete_import(run_cli: Cli, traces: list[Path], tmp_path: Path) -> None:
    done = run_cli("import", "trace0.json", "-o", "run.parquet", "--quiet")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "run.parquet").exists()


def test_a_cut_file_is_partial_and_says_so(run_cli: Cli, traces: list[Path]) -> None:
    whole = traces[0].read_text(encoding="utf-8")
    traces[0].write_text(whole[: whole.index('"ncclDev')], encoding="utf-8")
    done = run_cli("import", "trace0.json", "-o", "run.parquet", "--quiet")
    assert done.exit_code == 0
    lines = without_size(done.stdout).splitlines()
    assert lines[0] == "run.parquet   import partial   SIZE"
    assert lines[3:5] == [
        "issues  1 data_loss",
        " data_loss  The file ends early: every whole event before the cut is kept, what",
    ]


def test_rejects_are_counted_and_exit_0(run_cli: Cli, tmp_path: Path) -> None:
    content: dict[str, Any] = {
        "distributedInfo": {"rank": 0, "world_size": 1},
        "baseTimeNanoseconds": BASE,
        "traceEvents": [
            {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": -5, "pid": 0, "tid": 7, "args": {}},
            {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 5, "pid": 0, "tid": 7, "args": {}},
        ],
    }
    (tmp_path / "t.json").write_text(json.dumps(content), encoding="utf-8")
    done = run_cli("import", "t.json", "-o", "run.parquet")
    assert done.exit_code == 0
    assert without_size(done.stdout) == (
        "run.parquet   import complete with rejects   SIZE\n"
        "ranks   0   from 1 file\n"
        "rows    1 issue, 1 kernel, 1 rank\n"
        "issues  1 data_loss\n"
        " data_loss  1 device event left out: negative duration. (rank 0)\n"
        "next    traceanalyzer info run.parquet\n"
        "        traceanalyzer diff run.parquet --job FILE\n"
    )


def test_a_refusal_exits_2_and_leaves_no_file(run_cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text('{"traceEvents": [{"ph": "M", "name": "process_name"}]}', encoding="utf-8")
    done = run_cli("import", "notes.json", "-o", "run.parquet")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr == (
        "Error: refused, nothing was written. notes.json holds 1 events but no complete one (phase X): it is not a Kineto "
        "trace. Give a file written by torch.profiler.\n"
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.json"]


def test_a_refusal_in_json_is_a_document_too(run_cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text('{"traceEvents": []}', encoding="utf-8")
    done = run_cli("import", "notes.json", "-o", "run.parquet", "--format", "json")
    assert done.exit_code == 2
    document = json.loads(done.stdout)
    assert (document["schema"], document["status"], document["out"]) == ("traceanalyzer.import/1", "refused", None)
    assert [i["code"] for i in document["issues"]] == ["file_refused"]
    assert done.stderr.startswith("Error: refused, nothing was written. notes.json")


def test_rank_with_several_traces_says_why_not(run_cli: Cli, traces: list[Path], tmp_path: Path) -> None:
    done = run_cli("import", ".", "--rank", "3", "-o", "run.parquet")
    assert done.exit_code == 2
    assert done.stderr == (
        "Usage: main import [OPTIONS] TRACE...\n"
        "Try 'main import --help' for help.\n"
        "\n"
        "Error: --rank names the rank of one trace, and here are 2: they cannot all be rank 3. Import the trace that does "
        "not state its rank by itself with --rank, then use traceanalyzer merge.\n"
    )
    assert not (tmp_path / "run.parquet").exists()


def test_rank_names_a_trace_that_does_not_state_it(run_cli: Cli, tmp_path: Path, traces: list[Path]) -> None:
    content = json.loads(traces[0].read_text(encoding="utf-8"))
    del content["distributedInfo"]["rank"]
    (tmp_path / "worker.json").write_text(json.dumps(content), encoding="utf-8")
    done = run_cli("import", "worker.json", "--rank", "3", "-o", "run.parquet")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "ranks   3   from 1 file\n" in done.stdout
    done = run_cli("import", "worker.json", "-o", "run.parquet")
    assert "ranks   unknown: neither the file nor its name states one\n" in done.stdout


def test_a_stated_rank_is_not_overruled(run_cli: Cli, traces: list[Path]) -> None:
    done = run_cli("import", "trace1.json", "--rank", "3", "-o", "run.parquet", "--quiet")
    assert done.exit_code == 0
    assert done.stderr == "Note: --rank 3 was not used: trace1.json states rank 1.\n"


def test_an_existing_file_is_replaced(run_cli: Cli, traces: list[Path], tmp_path: Path) -> None:
    (tmp_path / "run.parquet").write_text("old", encoding="utf-8")
    assert run_cli("import", "trace1.json", "-o", "run.parquet", "--quiet").exit_code == 0
    with Run.open(tmp_path / "run.parquet") as run:
        assert run.rows("SELECT rank FROM rank") == [{"rank": 1}]


def test_a_folder_gets_a_file_for_each_rank(run_cli: Cli, traces: list[Path], tmp_path: Path) -> None:
    done = run_cli("import", *traces, "-o", "run", "--workers", "1")
    assert done.exit_code == 0
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["rank-00000.parquet", "rank-00001.parquet"]
    with Run.open(tmp_path / "run") as run:
        assert run.rows("SELECT rank FROM rank ORDER BY rank") == [{"rank": 0}, {"rank": 1}]


def test_a_missing_trace_is_a_usage_error(run_cli: Cli) -> None:
    done = run_cli("import", "nowhere.json", "-o", "run.parquet")
    assert done.exit_code == 2
    assert done.stderr.endswith("Error: Invalid value for 'TRACE...': Path 'nowhere.json' does not exist.\n")


def test_an_output_that_cannot_be_written(run_cli: Cli, traces: list[Path]) -> None:
    done = run_cli("import", "trace0.json", "-o", "trace1.json/run.parquet")
    assert done.exit_code == 2
    assert done.stderr == "Error: trace1.json: File exists.\n"


@pytest.mark.parametrize("workers", ["1", "2"])
def test_as_a_process_with_workers(traces: list[Path], tmp_path: Path, workers: str) -> None:
    done = command("import", *traces, "-o", "run.parquet", "--workers", workers, folder=tmp_path)
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.splitlines()[1] == "ranks   0-1   from 2 files"


def test_the_version_as_a_process(tmp_path: Path) -> None:
    done = command("--version", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "traceanalyzer 0.1.0\n", "")


def test_help_loads_no_library(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from traceanalyzer.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "finally:\n"
        "    heavy = {'duckdb', 'pyarrow', 'pandas', 'numpy', 'rich', 'torch', 'yaml'} & set(sys.modules)\n"
        "    print(sorted(heavy), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stderr == "[]\n"
    for name in ("import", "info", "diff", "sql", "merge"):
        assert f"\n  {name}" in done.stdout


def test_a_misspelt_job_field_is_pointed_out(run_cli: Cli, traces: list[Path], tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("num_layer = 2\nhidden_size = 64\n")
    done = run_cli("import", "trace0.json", "--job", "job.toml", "-o", "run.parquet", "--quiet")
    assert done.exit_code == 0
    assert done.stderr == "note: job.toml: num_layer is not a field this program knows; did you mean num_layers?\n"


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("trace0.json", "-o trace0.json: this file is read by the same command. Give another name."),
        ("job.toml", "-o job.toml: this file is read by the same command. Give another name."),
        ("run.txt", "-o run.txt: give a name that ends in .parquet, or a folder."),
    ],
)
def test_what_is_read_is_never_written_over(
    run_cli: Cli, traces: list[Path], tmp_path: Path, out: str, words: str
) -> None:
    (tmp_path / "job.toml").write_text("num_layers = 2\n")
    before = traces[0].read_bytes()
    done = run_cli("import", "trace0.json", "--job", "job.toml", "-o", out)
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (2, f"Error: {words}")
    assert traces[0].read_bytes() == before


def test_sizes_that_cannot_be_sizes_are_null_and_counted(run_cli: Cli, tmp_path: Path) -> None:
    call = {
        "ph": "X",
        "cat": "cpu_op",
        "name": "record_param_comms",
        "pid": 1,
        "tid": 1,
        "ts": 1,
        "dur": 1,
        "args": {
            "Collective name": "allreduce",
            "In msg nelems": -5,
            "Out msg nelems": 4096.5,
            "Group size": -1,
            "dtype": "Float",
            "Process Group Name": "3",
        },
    }
    (tmp_path / "rank0.json").write_text(
        json.dumps({"baseTimeNanoseconds": BASE, "distributedInfo": {"rank": 0}, "traceEvents": [call]})
    )
    done = run_cli("import", "rank0.json", "-o", "run.parquet", "--format", "json")
    assert [(i["code"], i["occurrences"]) for i in json.loads(done.stdout)["issues"] if i["severity"] == "warning"] == [
        ("unusable_value", 3)
    ]
    with Run.open(tmp_path / "run.parquet") as run:
        assert run.tuples("SELECT in_elems, out_elems, group_size FROM comm") == [(None, None, None)]
