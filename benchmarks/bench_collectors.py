"""What the collector costs a whole step of a real megatron-core job: paired short runs, ratios of medians.

    python benchmarks/bench_collectors.py [--rounds 5] [--steps 40] [--configuration tp2_sp]

Each round runs the job without the collector, with a dormant one, with hooks and marks, and with a window of torch.profiler
on both ranks besides, in an order that changes from round to round, so that a slow minute of the machine hits all of them.
Steps 0 to 4 and the last one are left out; a run gives the median of the others, a round the ratios to its own run
without the collector. Printed: the median of the rounds' ratios, and the least and greatest of them. Needs torch and
megatron-core, no GPU; two processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from traceanalyzer.collectors import launch

JOB = Path(__file__).resolve().parents[1] / "tests" / "integration" / "jobs" / "megatron_job.py"
WARM = 5
WAYS = ("without", "dormant", "hooks", "profiler")


def step_ms(way: str, configuration: str, steps: int) -> float:
    """Median duration of a step on rank 0, ms."""
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        window = [WARM, steps - 2] if way == "profiler" else None
        ranks = None if way == "profiler" else []
        settings = launch.config(steps=window, profile_ranks=ranks, dormant=way == "dormant", keep_raw=False)
        if way != "without":
            env = launch.environment(Path(folder, "run.d"), settings, env)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run(
            [*torchrun, str(JOB), configuration, folder, "--steps", str(steps)],
            env=env,
            check=True,
            capture_output=True,
            timeout=600,
        )
        times = json.loads(Path(folder, "rank0.json").read_text())["step_seconds"]
        if way != "without" and not launch.logs(Path(folder, "run.d")):
            raise SystemExit(f"{way}: no log, the collector was not there")
    return statistics.median(times[WARM + 1 : -1]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--configuration", default="tp2_sp")
    options = parser.parse_args()
    ratios: dict[str, list[float]] = {way: [] for way in WAYS}
    without: list[float] = []
    for number in range(options.rounds):
        turn = number % len(WAYS)
        found = {way: step_ms(way, options.configuration, options.steps) for way in (*WAYS[turn:], *WAYS[:turn])}
        without.append(found["without"])
        print(f"  round {number}: " + ", ".join(f"{way} {found[way]:.1f} ms" for way in WAYS), flush=True)
        for way in WAYS:
            ratios[way].append(found[way] / found["without"])
    spread = (max(without) - min(without)) / statistics.median(without)
    print(f"{options.configuration}: {statistics.median(without):.1f} ms a step without the collector, ", end="")
    print(f"its own spread over {options.rounds} rounds {spread:.1%}")
    for way in WAYS[1:]:
        values = sorted(ratios[way])
        print(f"  {way:<9} x{statistics.median(values):.3f}   ({values[0]:.3f} to {values[-1]:.3f})")


if __name__ == "__main__":
    main()
