"""Real jobs run once under the marks for all tests that look at them, and what they left behind."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.collectors import record

HERE = Path(__file__).parent
JOBS = HERE.parent / "integration" / "jobs"


@dataclass
class Marked:
    """folder: what the job itself left."""

    folder: Path
    ranks: int

    def records(self, rank: int) -> list[list[Any]]:
        return record.read(self.folder / f"r{rank}.talog").records

    def facts(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"facts{rank}.json").read_text())
        return found

    def places(self, rank: int) -> dict[int, dict[str, Any]]:
        return {r[1]: r[2] for r in self.records(rank) if r[0] == "place"}

    def calls(self, rank: int, step: int, group: str = "") -> list[tuple[Any, ...]]:
        """(method, phase, micro-batch, chunk, layer, component) of each call of a step, on groups so described."""
        keys = ("phase", "microbatch", "chunk", "layer", "component")
        places = self.places(rank)
        return [
            (r[3], *(places.get(r[5], {}).get(key) for key in keys))
            for r in self.records(rank)
            if r[0] == "call" and r[4] == step and r[2].startswith(group)
        ]


def folder_of(factory: pytest.TempPathFactory) -> Path:
    """Where the jobs of this test run are, for all of its processes (xdist's have folders of their own below one)."""
    base = factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "marked_jobs"


def launch(ranks: int, *command: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *command),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        env={**environment, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]


def run(base: Path, job: str, *arguments: str, ranks: int = 2, marks: bool = True) -> Marked:
    """Runs a job unless another test, in whatever process, has done so or is at it."""
    name = "-".join((job, *arguments, "marked" if marks else "plain"))
    folder = base / name
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        deadline = time.monotonic() + 180
        while not (folder / "done").exists():
            assert time.monotonic() < deadline, f"{name} is not done"
            time.sleep(0.1)
        return Marked(folder, ranks)
    command = [str(JOBS / f"{job}.py"), *arguments, str(folder), "--steps", "2"]
    if marks:
        command = [str(HERE / "marks_worker.py"), str(folder), *command]
    launch(ranks, *command)
    (folder / "done").touch()
    return Marked(folder, ranks)


def needs_megatron() -> None:
    pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("megatron.core", reason="needs megatron-core")
