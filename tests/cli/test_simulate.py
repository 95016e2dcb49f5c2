"""traceanalyzer simulate: a job as a run, its truth and its traces."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import Result

from traceanalyzer.cli.simulate import parse_ranks
from traceanalyzer.run import Run

RunCli = Callable[..., Result]

JOB = """\
megatron_core_version = "0.16.1"
world_size = 4
tensor_model_parallel_size = 2
sequence_parallel = true
pipeline_model_parallel_size = 2
micro_batch_size = 2
num_microbatches = 4
seq_length = 32
num_layers = 2
hidden_size = 64
num_attention_heads = 8
add_bias_linear = false
normalization = "RMSNorm"
position_embedding_type = "rope"
padded_vocab_size = 128
bf16 = true
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB, encoding="utf-8")
    return path


def test_a_run_with_its_truth(run_cli: RunCli, job: Path, tmp_path: Path) -> None:
    (tmp_path / "costs.toml").write_text("jitter = 0.1\n", encoding="utf-8")
    arguments = ("--steps", "2", "--costs", "costs.toml", "--seed", "3", "--truth", "truth.json", "--no-progress")
    result = run_cli("simulate", job, "-o", "run.parquet", *arguments)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("run.parquet   simulated, seed 3   ")
    assert lines[1] == "ranks   0-3 of 4   2 steps"
    assert lines[-3:] == [
        "truth   truth.json",
        "next    traceanalyzer info run.parquet",
        "        traceanalyzer diff run.parquet",
    ]
    truth = json.loads((tmp_path / "truth.json").read_text(encoding="utf-8"))
    assert (truth["schema"], truth["steps"], truth["ranks"]) == ("traceanalyzer.truth/1", [0, 1], [0, 1, 2, 3])
    with Run.open(tmp_path / "run.parquet") as run:
        measured = [(r["step"], r["rank"], r["dur_ns"], r["compute_ns"]) for r in run.query("time_classes")]
    assert sorted(measured) == sorted(tuple(row[:4]) for row in truth["step_time"]["rows"])

    def digest() -> list[str]:
        return [hashlib.sha256((tmp_path / n).read_bytes()).hexdigest() for n in ("run.parquet", "truth.json")]

    first = digest()
    run_cli("simulate", job, "-o", "run.parquet", *arguments)
    assert digest() == first


def test_some_ranks_and_traces(run_cli: RunCli, job: Path, tmp_path: Path) -> None:
    result = run_cli(
        "simulate", job, "-o", "run.parquet", "--ranks", "0-3:2,3", "--profiled", "3", "--kineto", "traces"
    )
    assert result.exit_code == 0, result.output
    assert "ranks   0,2-3 of 4   1 step" in result.output.replace(", ", ",")
    assert [p.name for p in (tmp_path / "traces").iterdir()] == ["rank-3.json.gz"]
    with Run.open(tmp_path / "run.parquet") as run:
        assert run.tuples("SELECT DISTINCT rank FROM comm ORDER BY rank") == [(0,), (2,), (3,)]
        assert run.tuples("SELECT DISTINCT rank FROM kernel") == [(3,)]


def test_refusals(run_cli: RunCli, job: Path, tmp_path: Path) -> None:
    (tmp_path / "costs.toml").write_text("speed = 1\n", encoding="utf-8")
    for arguments, said in (
        (("--costs", "costs.toml"), "no such cost: speed"),
        (("--ranks", "3-9"), "rank 9 is not in a world of 4"),
        (("--ranks", "x"), "is no rank"),
        (("--no-hooks", "--profiled", "none"), "leaves nothing recorded"),
        (("--kineto", "traces", "--profiled", "none"), "leaves nothing of it"),
        (("--truth", "job.toml"), "read by the same command"),
    ):
        result = run_cli("simulate", job, "-o", "run.parquet", *arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert said in " ".join(result.output.split())
    assert not (tmp_path / "run.parquet").exists()


def test_spans_of_ranks() -> None:
    assert parse_ranks("0-3,8,16-31:8") == [0, 1, 2, 3, 8, 16, 24]
    assert parse_ranks("5, 1, 5") == [1, 5]
    for text in ("", "3-1", "0-4:0", "-1"):
        with pytest.raises(click.BadParameter):
            parse_ranks(text)
