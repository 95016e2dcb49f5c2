"""Starts the jobs in jobs/, alone and with the collector."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

JOBS = Path(__file__).with_name("jobs")
LIMIT_S = 100.0


@dataclass
class Ended:
    """What a job left: its exit code, what it printed, and by rank what it wrote of itself, without the times."""

    code: int
    output: str
    results: dict[int, dict[str, Any]]


@dataclass
class Attached(Ended):
    """out: the run. run_dir: what the collector left."""

    out: Path
    run_dir: Path

    def diff(self, *options: str) -> tuple[int, dict[str, Any]]:
        """Exit code and document of ``traceanalyzer diff`` without a job of ours: the run holds the captured one."""
        found = traceanalyzer("diff", str(self.out), "--format", "json", *options)
        assert found.stdout, found.stderr
        return found.returncode, json.loads(found.stdout)


def traceanalyzer(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "traceanalyzer", *arguments], capture_output=True, text=True, timeout=LIMIT_S, **more
    )


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours, so that nothing outside steers a job."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TRACEANALYZER_", "TORCH_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(more or {})}


def read_results(folder: Path) -> dict[int, dict[str, Any]]:
    found = {}
    for path in sorted(folder.glob("rank*.json")):
        left = json.loads(path.read_text())
        left.pop("step_seconds", None)
        found[int(path.stem.removeprefix("rank"))] = left
    return found


@dataclass
class Jobs:
    """folder: where jobs and runs leave what they leave."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def command(self, script: str, processes: int, *arguments: str, launcher: tuple[str, ...] = ()) -> list[str]:
        """As a user types it; ``launcher``: further options of torchrun."""
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        return [*run, *launcher, str(JOBS / script), *arguments]

    def megatron(self, name: str, processes: int, out: Path, *more: str) -> list[str]:
        return self.command("megatron_job.py", processes, name, str(out), *more)

    def start(self, command: list[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """In a process group of its own, which is ended with the test."""
        process = subprocess.Popen(
            command,
            env=environment(env),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def wait(self, process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> tuple[int, str]:
        """Exit code and output; a job that hangs fails the test."""
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"still running after {limit_s:.0f} s: {' '.join(process.args)}\n{output[-4000:]}")  # type: ignore[arg-type]
        return process.returncode, output

    def alone(self, name: str, command: Callable[[Path], list[str]], env: Mapping[str, str] | None = None) -> Ended:
        """Without the collector."""
        results = self.folder / f"{name}.results"
        code, output = self.wait(self.start(command(results), env))
        return Ended(code, output, read_results(results))

    def attached(
        self,
        name: str,
        command: Callable[[Path], list[str]],
        *options: str,
        env: Mapping[str, str] | None = None,
    ) -> Attached:
        """Under ``traceanalyzer attach``."""
        results, out = self.folder / f"{name}.results", self.folder / f"{name}.parquet"
        attach = [sys.executable, "-m", "traceanalyzer", "attach", "--out", str(out), *options, "--"]
        code, output = self.wait(self.start([*attach, *command(results)], env))
        return Attached(code, output, read_results(results), out, out.with_suffix(".d"))

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    pytest.importorskip("torch", reason="the jobs need torch")
    found = Jobs(tmp_path)
    yield found
    found.end()
