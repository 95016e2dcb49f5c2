"""traceanalyzer review: what it prints and writes, gates and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from traceanalyzer import schema
from traceanalyzer.job import Job

RunCli = Callable[..., Result]

STEP = {"name": "ProfilerStep#1", "category": "user_annotation", "start_ns": 0, "dur_ns": 1000, "source": "kineto"}
RANK = {"source": "kineto", "world_size": 2, "window_start_ns": 0, "window_end_ns": 1000}
ROWS: dict[str, list[dict[str, Any]]] = {
    "rank": [{"rank": r, **RANK} for r in (0, 1)],
    "span": [{"rank": r, **STEP} for r in (0, 1)],
    "kernel": [
        {
            "rank": r, "name": "gemm", "kernel_class": "gemm", "device": 0, "stream": 7, "start_ns": 100, "dur_ns": 600,
            "source": "kineto",
        }
        for r in (0, 1)
    ],
}  # fmt: skip


@pytest.fixture
def run_file(write_run: Callable[..., Path]) -> Path:
    """Two ranks with one step of 1000 ns, 600 of them compute; no job."""
    return write_run("run.parquet", ROWS)


def test_text(run_cli: RunCli, run_file: Path) -> None:
    result = run_cli("review", run_file)
    assert result.exit_code == 0
    assert "no expectation   No job is known for this run" in result.stdout
    assert "time    compute 60 %, idle 40 %" in result.stdout
    assert "next    Give --job FILE" in result.stdout
    assert "\x1b" not in result.output


@pytest.mark.parametrize(("name", "start"), [("r.md", "**no expectation**"), ("r.html", "<!"), ("r.json", "{")])
def test_the_name_says_the_form(run_cli: RunCli, run_file: Path, tmp_path: Path, name: str, start: str) -> None:
    result = run_cli("review", run_file, "-o", name)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"no expectation   0 findings   {name}\n"
    assert (tmp_path / name).read_text(encoding="utf-8").startswith(start)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_json_on_stdout(run_cli: RunCli, run_file: Path) -> None:
    document = json.loads(run_cli("review", run_file, "--format", "json").stdout)
    assert document["schema"] == "traceanalyzer.review/1"
    assert document["time"][0]["step_ns"] == 2000


def test_gates(run_cli: RunCli, run_file: Path) -> None:
    result = run_cli("review", run_file, "-o", "r.md", "--fail-on", "idle>30%", "--fail-on", "compute<50%")
    assert result.exit_code == 1
    assert "gate    idle>30%: idle is 40.00 %, failed\n" in result.stderr
    assert "gate    compute<50%: compute is 60.00 %, passed\n" in result.stderr
    assert "idle&gt;30%: idle is 40.00 %, failed" in Path("r.md").read_text(encoding="utf-8")


def test_a_gate_that_passes_and_one_that_cannot_be_known(run_cli: RunCli, run_file: Path) -> None:
    assert run_cli("review", run_file, "--fail-on", "idle>50%").exit_code == 0
    assert run_cli("review", run_file, "--fail-on", "unexpected>0").exit_code == 3


def test_quiet(run_cli: RunCli, run_file: Path) -> None:
    assert run_cli("review", run_file, "-o", "r.md", "--quiet", "--fail-on", "idle>50%").output == ""
    failed = run_cli("review", run_file, "--quiet", "--fail-on", "idle>30%")
    assert (failed.exit_code, failed.stdout) == (1, "")
    assert failed.stderr == "gate    idle>30%: idle is 40.00 %, failed\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run.parquet", "-o", "r.txt"), "Name it .html, .md or .json"),
        (("run.parquet", "-o", "run.parquet", "--format", "json"), "this file is read by the same command"),
        (("run.parquet", "--fail-on", "exposed.dp=5%"), "at position 11 ('=5%'): must be >, >=, < or <="),
        (("none.parquet",), "no such file, folder or glob"),
    ],
)
def test_usage(run_cli: RunCli, run_file: Path, arguments: tuple[str, ...], words: str) -> None:
    before = run_file.read_bytes()
    result = run_cli("review", *arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
    assert run_file.read_bytes() == before


def test_a_run_that_differs_is_no_failure_without_a_gate(run_cli: RunCli, write_run: Callable[..., Path]) -> None:
    """The job's all-reduces are not in the run."""
    job = Job(
        world_size=2, tensor_model_parallel_size=2, num_layers=1, hidden_size=64, num_attention_heads=2, seq_length=8,
        micro_batch_size=1, global_batch_size=1, padded_vocab_size=64, max_position_embeddings=8, bf16=True,
        forward_only=True,
    )  # fmt: skip
    write_run("tp.parquet", ROWS, {schema.META_JOB_INTENDED: job.to_json()})
    result = run_cli("review", "tp.parquet", "--format", "json", "--min-coverage", "0")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["verdict"]["word"]) == (0, "differs")
    assert {f["code"] for f in document["findings"] if f["kind"] == "verdict"} == {"missing"}
    assert run_cli("review", "tp.parquet", "--fail-on", "missing>0").exit_code == 1


def test_gates_of_diff_stand_in_for_its_verdict(run_cli: RunCli, write_run: Callable[..., Path]) -> None:
    job = Job(
        world_size=2, tensor_model_parallel_size=2, num_layers=1, hidden_size=64, num_attention_heads=2, seq_length=8,
        micro_batch_size=1, global_batch_size=1, padded_vocab_size=64, max_position_embeddings=8, bf16=True,
        forward_only=True,
    )  # fmt: skip
    write_run("tp.parquet", ROWS, {schema.META_JOB_INTENDED: job.to_json()})
    assert run_cli("diff", "tp.parquet").exit_code == 1
    passed = run_cli("diff", "tp.parquet", "--fail-on", "unexpected>0")
    assert (passed.exit_code, passed.stderr) == (0, "gate    unexpected>0: unexpected is 0, passed\n")
    assert run_cli("diff", "tp.parquet", "--fail-on", "missing>0").exit_code == 1
    assert run_cli("diff", "tp.parquet", "--fail-on", "mfu<40%").exit_code == 2
