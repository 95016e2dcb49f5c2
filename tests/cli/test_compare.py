"""traceanalyzer compare: what it prints and writes, ranges of steps, gates and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

RunCli = Callable[..., Result]
Rows = dict[str, list[dict[str, Any]]]


def rows(steps: Sequence[tuple[int, int]], name: str = "ProfilerStep#") -> Rows:
    """One rank whose steps last so long, of which a gemm so much, in ns."""
    spans, kernels = [], []
    for i, (step, gemm) in enumerate(steps):
        at = {"rank": 0, "source": "kineto", "start_ns": i * 10_000}
        spans.append({**at, "name": f"{name}{i}", "category": "user_annotation", "dur_ns": step})
        kernels.append({**at, "name": "gemm", "kernel_class": "gemm", "device": 0, "stream": 7, "dur_ns": gemm})
    rank = {"rank": 0, "source": "kineto", "world_size": 1, "window_start_ns": 0, "window_end_ns": 100_000}
    return {"rank": [rank], "span": spans, "kernel": kernels}


@pytest.fixture
def run_file(write_run: Callable[..., Path]) -> Path:
    """Steps 0-2 of 1000 ns, 600 of them compute; steps 3-5 of 1100 ns, 700 of them compute."""
    return write_run("run.parquet", rows([(1000, 600)] * 3 + [(1100, 700)] * 3))


def test_the_same_run(run_cli: RunCli, run_file: Path) -> None:
    result = run_cli("compare", run_file, run_file, "--fail-on", "moved>0", "--fail-on", "traffic>0")
    assert result.exit_code == 0
    assert "did not move   Step time is the same, 1 us (6 and 6 steps)." in " ".join(result.stdout.split("\n"))
    assert "gate    moved>0: moved is 0, passed\n" in result.stderr
    assert "\x1b" not in result.output


def test_ranges_of_steps(run_cli: RunCli, run_file: Path) -> None:
    result = run_cli("compare", f"{run_file}@0-2", f"{run_file}@3-5")
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "step time 1 us 1.1 us +100 ns +10.00 % moved" in lines
    assert "compute 600 ns 700 ns +100 ns +10.00 % moved" in lines
    assert "idle 400 ns 400 ns 0 ns +0.00 % equal" in lines
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_gates(run_cli: RunCli, run_file: Path) -> None:
    pair = (f"{run_file}@0-2", f"{run_file}@3-5")
    failed = run_cli("compare", *pair, "--fail-on", "step_time>1.05x", "--fail-on", "compute<50%", "--quiet")
    assert (failed.exit_code, failed.stdout) == (1, "")
    assert failed.stderr == "gate    step_time>1.05x: step_time is 1.100x, failed\n"
    assert run_cli("compare", *pair, "--fail-on", "step_time>1.2x").exit_code == 0
    assert run_cli("compare", *pair, "--fail-on", "moved>0").exit_code == 1
    unknown = run_cli("compare", *pair, "--fail-on", "mfu<40%")
    assert unknown.exit_code == 3
    assert "mfu<40%: mfu is not known of this run" in unknown.stderr


def test_json(run_cli: RunCli, run_file: Path) -> None:
    document = json.loads(run_cli("compare", run_file, f"{run_file}@3", "--format", "json").stdout)
    assert document["schema"] == "traceanalyzer.compare/1"
    assert (document["a"]["steps"], document["b"]["steps"]) == ([0, 1, 2, 3, 4, 5], [3])
    assert document["b"]["selected"] == "3"


@pytest.mark.parametrize(("name", "start"), [("c.md", "**moved**"), ("c.html", "<!doctype html>"), ("c.json", "{")])
def test_the_name_says_the_form(run_cli: RunCli, run_file: Path, tmp_path: Path, name: str, start: str) -> None:
    result = run_cli("compare", f"{run_file}@0-2", f"{run_file}@3-5", "-o", name)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.startswith("moved   Step time moved from 1 us to 1.1 us (+10.0 %)")
    assert (tmp_path / name).read_text(encoding="utf-8").startswith(start)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_what_is_refused(run_cli: RunCli, run_file: Path) -> None:
    for arguments, says in (
        ((f"{run_file}@9", run_file), "the run has no such step. It has: 0-5."),
        ((f"{run_file}@5-1", run_file), "'5-1' is no range of steps"),
        ((run_file, "absent.parquet"), "absent.parquet: no such file"),
        ((run_file, run_file, "-o", run_file, "--format", "json"), "this file is read by the same command"),
        ((run_file, run_file, "-o", "c.txt"), "Name it .html, .md or .json"),
        ((run_file, run_file, "--fail-on", "unexpected>0"), "must be a figure of compare"),
        ((run_file,), "Missing argument 'B'"),
    ):
        result = run_cli("compare", *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert says in " ".join(result.stderr.split())


def test_a_run_without_a_whole_step(run_cli: RunCli, run_file: Path, write_run: Callable[..., Path]) -> None:
    """Of the other run a hook recorded one step, whose end is missing."""
    step = {
        "rank": 0, "source": "hook", "category": "step", "name": "step 0", "start_ns": 0, "recorded_step": 0,
        "completeness": "cut", "dur_ns": None,
    }  # fmt: skip
    torn = write_run("torn.parquet", {"rank": rows([])["rank"], "span": [step]})
    result = run_cli("compare", run_file, torn, "--quiet")
    assert (result.exit_code, result.stderr) == (3, "B has no step that was recorded whole.\n")
    shown = run_cli("compare", run_file, torn)
    assert shown.exit_code == 3
    assert "cannot be compared   B has no step that was recorded whole." in shown.stdout
    assert "next    See its steps: traceanalyzer query" in " ".join(shown.stdout.split("\n"))
