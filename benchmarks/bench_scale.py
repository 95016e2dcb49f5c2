"""What a job of 1,024 ranks takes: one step simulated, then laid beside its expectation; processes of their own.

    make bench
    python benchmarks/bench_scale.py [--json OUT]

The job is fixtures/gpt_moe_1024, recorded as `traceanalyzer attach --ranks auto` would: hooks on all ranks, the profiler on
one model-parallel replica and on one data- and one expert-parallel group. The same job on 256 ranks shows the growth. CPU
seconds count, not those of the clock, for the machine may be busy. The limits that must hold decide the exit code: both
commands together under 120 s, each under 4 GiB, four times the ranks in at most 4.4 times the time, and the verdict match.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from traceanalyzer.cli.attach import profiled_ranks
from traceanalyzer.cli.common import read_job_file

JOB = Path(__file__).parents[1] / "fixtures" / "gpt_moe_1024" / "job.toml"
SMALL, LARGE = 256, 1024
LIMIT_S = 120.0
LIMIT_BYTES = 4 << 30
LIMIT_GROWTH = 4.4


def main() -> int:
    """0: all limits kept. 1: one is not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results here")
    out = parser.parse_args().json
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for world in (SMALL, LARGE):
            job, run = Path(folder) / f"{world}.toml", Path(folder) / f"{world}.parquet"
            text = JOB.read_text(encoding="utf-8")
            job.write_text(re.sub(r"(?m)^world_size = .*$", f"world_size = {world}", text), encoding="utf-8")
            profiled = ",".join(map(str, profiled_ranks("auto", read_job_file(job)).ranks or []))
            simulate = _measure("simulate", str(job), "-o", str(run), "--profiled", profiled)
            diff = _measure("diff", str(run), "-o", str(Path(folder) / "diff.txt"))
            seconds, peak = simulate[0] + diff[0], max(simulate[1], diff[1])
            results.append(
                {
                    "world_size": world,
                    "simulate_cpu_s": round(simulate[0], 1),
                    "diff_cpu_s": round(diff[0], 1),
                    "cpu_s": round(seconds, 1),
                    "peak_bytes": peak,
                    "exit_code": diff[2],
                }
            )
            sys.stdout.write(
                f"{world:>5,} ranks   simulate {simulate[0]:5.1f} s CPU, diff {diff[0]:5.1f} s, peak {peak / 2**30:.2f} GiB, "
                f"exit code of diff {diff[2]}\n"
            )
    if out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    small, large = results
    growth = float(large["cpu_s"]) / float(small["cpu_s"])
    checks = {
        f"{LIMIT_S:.0f} s": float(large["cpu_s"]) < LIMIT_S,
        f"{LIMIT_BYTES >> 30} GiB": int(large["peak_bytes"]) < LIMIT_BYTES,
        f"{LIMIT_GROWTH} times the time ({growth:.1f})": growth <= LIMIT_GROWTH,
        "match": large["exit_code"] == small["exit_code"] == 0,
    }
    for limit, kept in checks.items():
        sys.stdout.write(f"limit {limit}: {'kept' if kept else 'exceeded'}\n")
    return 0 if all(checks.values()) else 1


def _measure(*arguments: str) -> tuple[float, int, int]:
    """CPU seconds, peak resident bytes and exit code of one command."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "traceanalyzer", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # it is waited for
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, process.returncode


if __name__ == "__main__":
    raise SystemExit(main())
