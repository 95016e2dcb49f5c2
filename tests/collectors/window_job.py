"""Starts the two processes of window_worker.py and reads what they leave."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traceanalyzer.collectors import record

WORKER = Path(__file__).with_name("window_worker.py")
POLL_S = 0.1


@dataclass
class Job:
    """Two processes; ``run_dir`` None: without the collector."""

    folder: Path
    run_dir: Path | None
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        folder: Path,
        *,
        loops: int = 8,
        step_s: float = 0.0,
        attached: bool = True,
        own: dict[int, dict[str, Any]] | None = None,
        each: dict[int, dict[str, Any]] | None = None,
        environ: dict[str, str] | None = None,
        **options: Any,
    ) -> Job:
        """options: of the session, on both ranks; each: further ones by rank; own: see the worker."""
        folder.mkdir(parents=True, exist_ok=True)
        run_dir = folder / "run.d" if attached else None
        job = cls(folder, run_dir)
        temporary = folder / "tmp"
        temporary.mkdir(exist_ok=True)
        store = tempfile.mktemp(dir=folder, prefix="store")
        for rank in range(2):
            arguments = {
                "rank": rank,
                "store": store,
                "steps": loops,
                "step_s": step_s,
                "run_dir": None if run_dir is None else str(run_dir),
                "options": {"poll_s": POLL_S, **options, **(each or {}).get(rank, {})},
                "own": (own or {}).get(rank, {}),
                "stop": str(folder / "stop"),
            }
            job.processes.append(
                subprocess.Popen(
                    [sys.executable, str(WORKER), json.dumps(arguments)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "LOCAL_RANK": str(rank), "TMPDIR": str(temporary), **(environ or {})},
                )
            )
        return job

    def end(self, timeout_s: float = 90) -> list[dict[str, Any]]:
        """Waits; what each rank printed ({} where it printed nothing). Packing is over when this returns."""
        printed = []
        self.errors = []
        for process in self.processes:
            out, err = process.communicate(timeout=timeout_s)
            self.errors.append(err)
            lines = [line for line in out.splitlines() if line.startswith("{")]
            printed.append(json.loads(lines[-1]) if lines else {})
        if self.run_dir is not None:
            until = time.monotonic() + 20
            while list(self.run_dir.glob("trace/*.json")) and time.monotonic() < until:
                time.sleep(0.05)
        return printed

    @property
    def codes(self) -> list[int | None]:
        return [process.returncode for process in self.processes]

    def stop(self) -> list[dict[str, Any]]:
        """Lets the loops end early, as end() otherwise."""
        (self.folder / "stop").write_text("")
        return self.end()

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def records(self, rank: int, kind: str) -> list[list[Any]]:
        """The records of one kind in the log of a rank."""
        assert self.run_dir is not None
        (log,) = self.run_dir.glob(f"log/r{rank:05d}-*.talog")
        return [found for found in record.read(log).records if found[0] == kind]

    def windows(self, rank: int) -> list[dict[str, Any]]:
        return [found[1] for found in self.records(rank, "window") if found[1]["state"] != "open"]

    def steps_of_calls(self, rank: int) -> list[int | None]:
        """The step of each recorded call."""
        at = 1 + record.CALL.index("step")
        return [found[at] for found in self.records(rank, "call")]

    def issues(self, rank: int) -> dict[str, str]:
        """code -> sentence; what this torch lacks is left out."""
        return {found[2]: found[3] for found in self.records(rank, "issue")}

    def trace(self, rank: int, window: int = 0) -> list[dict[str, Any]]:
        """The events of a trace."""
        assert self.run_dir is not None
        path = self.run_dir / "trace" / f"r{rank:05d}-w{window}.json.gz"
        events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        return events

    def marked_calls(self, rank: int, window: int = 0) -> list[int]:
        """``call`` of each of our ranges around a call, in order of time."""
        events = [e for e in self.trace(rank, window) if e["ph"] == "X" and e["name"] == "ta:all_reduce"]
        return [int(e["args"]["call"]) for e in sorted(events, key=lambda e: e["ts"])]
