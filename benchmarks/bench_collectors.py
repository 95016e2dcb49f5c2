"""What the collector costs a whole step of a real megatron-core job, by comparison inside of one job and between jobs.

    make bench
    python benchmarks/bench_collectors.py [--cycles 30] [--rounds 3]

First, on torch's fake backend, where nothing waits for anybody: the CPU time that a dormant collector and hooks with marks
add to the thread that trains, and that the collector's own threads take, per step. One job is measured, with the collector
taken away and put there block by block of its steps (alternating_job.py); the interval is the one of the median of the
cycles' differences, by bootstrap.

Then, on gloo with two processes, the wall time of a step in the same way, for a job of short steps and for one whose layers
are wider, which makes the same calls: what was found first is set against it. Last, pairs of jobs with hooks alone and with
a window of torch.profiler on both ranks besides: the profiler's own share.

The exit code is 1 if hooks take 1 % or more of the wider job's step, or if a dormant collector makes its steps longer by
more than its interval explains. Needs torch and megatron-core, no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from traceanalyzer.collectors import launch

ALTERNATING = Path(__file__).with_name("alternating_job.py")
JOB = Path(__file__).resolve().parents[1] / "tests" / "integration" / "jobs" / "megatron_job.py"
SHORT, WIDE = "tp2_sp", "tp2_sp_wide"
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LIMIT = 0.01
WARM = 5

Found = dict[str, list[list[float]]]
"""Way -> per cycle [wall, CPU of the thread that trains, CPU of the collector's threads], seconds a step."""


def alternating(configuration: str, cycles: int, steps: int, *, fake: bool) -> Found:
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        start = [sys.executable] if fake else TORCHRUN
        job = [str(ALTERNATING), configuration, folder, "--cycles", str(cycles), "--steps", str(steps)]
        subprocess.run(
            [*start, *job, *(["--fake"] if fake else [])], env=ENV, check=True, capture_output=True, timeout=1800
        )
        found: Found = json.loads(Path(folder, "rank0.json").read_text())
        return found


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, bounds of the interval that holds it in 95 of 100 samples drawn from these values)."""
    draw = random.Random(5)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return statistics.median(values), medians[50], medians[1949]


def added_cpu(found: Found, way: str) -> list[float]:
    return [a[1] - b[1] for a, b in zip(found[way], found["without"], strict=True)]


def ratios(found: Found, way: str) -> list[float]:
    return [a[0] / b[0] for a, b in zip(found[way], found["without"], strict=True)]


def profiled_ms(profiler: bool, steps: int = 40) -> float:
    """Median duration of a step of the short job on rank 0, ms; with hooks and marks."""
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        window = [WARM, steps - 2] if profiler else None
        settings = launch.config(steps=window, profile_ranks=None if profiler else [], keep_raw=False)
        env = launch.environment(Path(folder, "run.d"), settings, ENV)
        subprocess.run(
            [*TORCHRUN, str(JOB), SHORT, folder, "--steps", str(steps)],
            env=env,
            check=True,
            capture_output=True,
            timeout=600,
        )
        if not launch.logs(Path(folder, "run.d")):
            raise SystemExit("no log: the collector was not there")
        times = json.loads(Path(folder, "rank0.json").read_text())["step_seconds"]
    return statistics.median(times[WARM + 1 : -1]) * 1e3


def main() -> int:
    """0: within the limits. 1: not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    failed = False

    found = alternating(SHORT, options.cycles, 60, fake=True)
    step_ms = statistics.median(c[1] for c in found["without"]) * 1e3
    print(f"{SHORT} on the fake backend: {step_ms:.2f} ms of CPU a step; added")
    added_ms: dict[str, float] = {}
    for way in ("dormant", "hooks"):
        middle, low, high = (1e3 * value for value in interval(added_cpu(found, way)))
        own = statistics.median(c[2] for c in found[way]) * 1e3
        added_ms[way] = middle + own
        print(
            f"  {way:<9}{middle:+.2f} ms ({low:+.2f} to {high:+.2f}), and {own:.2f} ms in the collector's threads",
            flush=True,
        )

    for configuration, steps in ((SHORT, 15), (WIDE, 5)):
        found = alternating(configuration, options.cycles, steps, fake=False)
        wall_ms = statistics.median(c[0] for c in found["without"]) * 1e3
        print(f"{configuration} on gloo: {wall_ms:.1f} ms a step")
        for way in ("dormant", "hooks"):
            middle, low, high = interval(ratios(found, way))
            share = added_ms[way] / wall_ms
            over = configuration == WIDE and (share >= LIMIT if way == "hooks" else low > 1)
            failed = failed or over
            print(
                f"  {way:<9}CPU {share:.2%} of a step; wall x{middle:.3f} ({low:.3f} to {high:.3f}){' OVER' * over}",
                flush=True,
            )

    pairs = [(profiled_ms(False), profiled_ms(True)) for _ in range(options.rounds)]
    shares = sorted(b / a for a, b in pairs)
    print(f"{SHORT}, profiler beside hooks: x{statistics.median(shares):.3f} ({shares[0]:.3f} to {shares[-1]:.3f})")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
