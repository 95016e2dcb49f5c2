"""Import of one large trace: peak memory and rate, beside HTA's loading and the standard library's json, in one run.

    make bench
    python benchmarks/bench_import.py [--mb 500] [--growth-mb 2000] [--trace FILE] [--hta-python PYTHON] [--json OUT]

Every candidate reads the same file in a process of its own; its peak is that process's maximum resident size, imports
included. The limits that must hold are checked and decide the exit code: the importer's peak stays under 400 MB for a
500 MB file, and at four times the size it is at most 10 % higher. Rates are reported as measured and as ratios, for they
depend on the machine; the ratios hold better.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from make_trace import write_trace

PEAK_LIMIT_MB = 400
GROWTH_LIMIT = 1.10

_OURS = """
import json, resource, sys, tempfile, time
from pathlib import Path
from traceanalyzer.importers.kineto import import_file
start = time.perf_counter()
with tempfile.TemporaryDirectory() as folder:
    summary = import_file(Path(sys.argv[1]), Path(folder) / "run.parquet", work=Path(folder))
    wall = time.perf_counter() - start
assert summary.status == "complete", summary
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"wall_s": wall, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_mb": usage.ru_maxrss * 1024 / 1e6,
                  "events": summary.events}))
"""
_STDLIB = """
import json, resource, sys, time
start = time.perf_counter()
with open(sys.argv[1], "rb") as file:
    events = len(json.load(file)["traceEvents"])
wall = time.perf_counter() - start
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"wall_s": wall, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_mb": usage.ru_maxrss * 1024 / 1e6,
                  "events": events}))
"""
_HTA = """
import json, logging, resource, shutil, sys, tempfile, time
from importlib.metadata import version
from pathlib import Path
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "rank0.json").symlink_to(Path(sys.argv[1]).resolve())
    start = time.perf_counter()
    analysis = TraceAnalysis(trace_dir=folder)
    wall = time.perf_counter() - start
events = len(analysis.t.get_trace(0))
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"wall_s": wall, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_mb": usage.ru_maxrss * 1024 / 1e6,
                  "events": events, "version": version("HolisticTraceAnalysis")}))
"""


def measure(script: str, trace: Path, python: str = sys.executable) -> dict[str, Any]:
    """One candidate in a process of its own; an 'error' entry where it failed."""
    done = subprocess.run([python, "-c", script, str(trace)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or ["failed"])[-1][:200]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    size_mb = trace.stat().st_size / 1e6
    return found | {"mb_per_s": size_mb / found["wall_s"]}


def main() -> int:
    """Runs the candidates, prints a table, checks the limits."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--mb", type=int, default=500)
    arguments.add_argument("--growth-mb", type=int, default=2000, help="0: leave out")
    arguments.add_argument("--trace", type=Path, help="measure this file instead of a generated one")
    arguments.add_argument(
        "--hta-python",
        default=os.environ.get("HTA_PYTHON"),
        help="interpreter of an environment with HolisticTraceAnalysis (make bench makes one)",
    )
    arguments.add_argument("--json", type=Path, help="write the results here too")
    options = arguments.parse_args()

    results: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "packages": {p: version(p) for p in ("duckdb", "pyarrow", "msgspec", "numpy")},
    }
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        trace = options.trace or write_trace(Path(folder) / "rank0.json", options.mb * 1_000_000)
        results["trace_mb"] = trace.stat().st_size / 1e6
        candidates = {"traceanalyzer import": measure(_OURS, trace), "stdlib json.load": measure(_STDLIB, trace)}
        if options.hta_python:
            candidates["HTA TraceAnalysis()"] = measure(_HTA, trace, options.hta_python)
        results["candidates"] = candidates
        ours = candidates["traceanalyzer import"]
        print(f"one file of {results['trace_mb']:.0f} MB, one process each")
        for name, got in candidates.items():
            if "error" in got:
                print(f"  {name:<22} failed: {got['error']}")
                continue
            ratio = got["wall_s"] / ours["wall_s"] if "wall_s" in ours else float("nan")
            print(
                f"  {name:<22} {got['wall_s']:7.2f} s  {got['mb_per_s']:6.0f} MB/s  peak {got['peak_mb']:6.0f} MB  "
                f"{ratio:5.2f} times our time"
            )
        if "error" in ours:
            failures.append(f"the import failed: {ours['error']}")
        elif ours["peak_mb"] > PEAK_LIMIT_MB:
            failures.append(f"peak {ours['peak_mb']:.0f} MB, limit {PEAK_LIMIT_MB} MB")
        if options.growth_mb and not options.trace:
            trace.unlink()
            large = write_trace(Path(folder) / "rank0.json", options.growth_mb * 1_000_000)
            grown = measure(_OURS, large)
            results["large_mb"], results["large"] = large.stat().st_size / 1e6, grown
            if "error" in grown or "error" in ours:
                failures.append(f"the large import failed: {grown.get('error')}")
            else:
                growth = grown["peak_mb"] / ours["peak_mb"]
                print(
                    f"  {results['large_mb']:.0f} MB: {grown['wall_s']:.1f} s  {grown['mb_per_s']:.0f} MB/s  peak "
                    f"{grown['peak_mb']:.0f} MB, {growth:.3f} times the peak at {results['trace_mb']:.0f} MB"
                )
                if growth > GROWTH_LIMIT:
                    failures.append(f"peak grows {growth:.3f} times, limit {GROWTH_LIMIT}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for failure in failures:
        print(f"LIMIT MISSED: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
