"""``traceanalyzer merge RUN_DIR``: what a collector left becomes a run with the job that it captured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from traceanalyzer import schema
from traceanalyzer.cli.merge import captured_job
from traceanalyzer.collectors import record
from traceanalyzer.errors import InputError, JobError
from traceanalyzer.job import Job
from traceanalyzer.run import Run

Cli = Callable[..., Result]
T = 1_790_000_000_000_000_000
SAID = {
    "job": {"num_layers": 4, "tensor_model_parallel_size": 2, "rank": 0, "local_rank": 0, "lr": 0.1},
    "versions": {"megatron_core": "0.16.1", "torch": "2.13.0"},
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two ranks of a job of three, one call each, in the folder where the commands run."""
    for rank in (0, 1):
        log = record.Log(tmp_path / "left" / "log" / f"r{rank:05d}-{rank}.talog", interval_s=60)
        assert log.start()
        log.put(["run", {"rank": rank, "world_size": 3, "pid": rank, "started_ns": T, "restart": 0}])
        log.put(["group", 0, {"name": "1", "description": "TENSOR_MODEL_PARALLEL_GROUP", "ranks": [0, 1], "size": 2}])
        values: dict[str, Any] = {
            "number": 0,
            "group": 0,
            "op": "all_reduce",
            "method": "allreduce",
            "dtype": "float32",
        }
        values |= {"seq": 0, "in_elems": 8, "out_elems": 8, "t_issue_ns": T, "t_issue_end_ns": T + 5, "step": 0}
        log.put(["call", *(values.get(name) for name in record.CALL)])
        log.put(["job", {**SAID, "job": {**SAID["job"], "rank": rank, "local_rank": rank}}])
        log.put(["end", {"calls": 1, "recorded": 1, "dropped": 0, "errors": 0, "disabled": None}])
        log.close()
    return tmp_path / "left"


def test_a_run_dir_becomes_a_run(run_cli: Cli, run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "meant.toml").write_text("num_layers = 8\n")
    done = run_cli("merge", "left", "-o", "run.parquet", "--job", "meant.toml")
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("run.parquet   import partial   ")
    assert lines[1:] == [
        "ranks   0-1   from 2 files",
        "rows    2 comm_record, 1 issue, 2 process_group, 2 rank",
        "issues  1 data_loss",
        " data_loss  1 of 3 ranks left no log: 2. What they sent is unknown.",
        "next    traceanalyzer info run.parquet",
        "        traceanalyzer diff run.parquet",
    ]
    with Run.open(tmp_path / "run.parquet") as run:
        captured = Job.from_json(run.metadata[schema.META_JOB_CAPTURED])
        assert (captured.num_layers, captured.tensor_model_parallel_size) == (4, 2)
        assert (captured.megatron_core_version, captured.torch_version) == ("0.16.1", "2.13.0")
        assert dict(captured.extra) == {"lr": 0.1}
        assert Job.from_json(run.metadata[schema.META_JOB_INTENDED]).num_layers == 8


def test_what_does_not_go_together_is_refused(run_cli: Cli, run_dir: Path, tmp_path: Path) -> None:
    done = run_cli("merge", "left", "left", "-o", "run.parquet")
    assert done.exit_code == 2
    assert "left is what a collector left: give it alone, one RUN_DIR makes one run." in done.stderr
    done = run_cli("merge", "left/log", "-o", "run.parquet", "--drop-raw")
    assert done.exit_code == 2
    assert "--job, --drop-raw, --keep-raw and --workers go with a RUN_DIR, and there is none here." in done.stderr
    done = run_cli("import", "left", "-o", "run.parquet")
    assert done.exit_code == 2
    assert "traceanalyzer merge left -o run.parquet makes one run of it." in done.stderr
    assert not (tmp_path / "run.parquet").exists()


def test_a_folder_of_damaged_logs_is_refused(run_cli: Cli, run_dir: Path, tmp_path: Path) -> None:
    for log in (run_dir / "log").iterdir():
        log.write_bytes(b"TALOG\x00\x00\x09")
    done = run_cli("merge", "left", "-o", "run.parquet")
    assert done.exit_code == 2
    assert "left: refused, nothing was written. r00000-0.talog: layout 9 of the log is newer" in done.stderr
    assert not (tmp_path / "run.parquet").exists()


@pytest.mark.parametrize("said", [{}, {"job": {}}, {"job": None}, {"job": [1]}])
def test_a_process_that_says_nothing_has_no_job(said: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="names no argument"):
        captured_job(said)


def test_arguments_that_contradict_each_other_are_no_job() -> None:
    with pytest.raises(JobError):
        captured_job({"job": {"num_layers": "four"}})


def test_a_stated_version_is_not_overruled() -> None:
    said = {"job": {"num_layers": 4, "torch_version": "2.9.0"}, "versions": {"torch": "2.13.0"}}
    assert json.loads(captured_job(said))["torch_version"] == "2.9.0"
