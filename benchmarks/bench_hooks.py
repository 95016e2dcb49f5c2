"""What the collectors' hooks add to one call of c10d, on torch's fake backend and on gloo.

    make bench
    python benchmarks/bench_hooks.py [--calls 500] [--rounds 40] [--json OUT]

One process, a world of one rank (a fake one of four on the fake backend); the call is the all-reduce method of the process
group on ten elements, made from Python, with options made for it as torch's functions make them. Each state of the hooks
is measured in turn, round by round, so that what else the machine does falls on all of them; the added time is the median
of the rounds' differences to the same call without hooks. CPU time of the calling thread.

    none        the methods are torch's own
    dormant     a dormant collector: the methods are torch's own until it is armed
    active      methods' hook, a record of each call
    profiled    the same while torch.profiler records, less the profiler's own share
    dispatcher  the dispatcher's hook too, which a job with DistributedDataParallel or functional collectives gets
    functional  a functional collective (issued from C++) with the dispatcher's hook, less the same call without

The limits decide the exit code: dormant under 0.2 us, active under 2 us, on the fake backend and on gloo. For that, gloo's
threads share one core with the caller. With a core for them (the third part, without limits) each call wakes that core, which
takes longer and comes more often as calls are further apart: the difference has that in it, and varies more than it is.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LIMITS_US = {"dormant": 0.2, "active": 2.0}


BATCH = 20
"""Calls that are issued before their works are waited for: nothing piles up in the backend's own threads."""


def per_call_us(call: Callable[[], Any], calls: int, settle: Callable[[Any], Any]) -> float:
    """Microseconds to issue a call, median of batches; ``settle`` waits for what a call gave, outside of the time."""
    gc.disable()
    taken = []
    for _ in range(calls // BATCH):
        begin = time.thread_time_ns()
        given = [call() for _ in range(BATCH)]
        taken.append(time.thread_time_ns() - begin)
        for one in given:
            settle(one)
    gc.enable()
    return statistics.median(taken) / BATCH / 1000


def main() -> int:
    """0: all under their limits. 1: one is not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results here")
    args = parser.parse_args()

    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    failed = False
    results = []
    cores = os.sched_getaffinity(0)
    for name in ("fake", "gloo", "gloo, on several cores"):
        limited = name in ("fake", "gloo")
        backend = name.partition(",")[0]
        os.sched_setaffinity(0, {min(cores)} if limited else cores)  # threads that the backend makes now are held to it
        if backend == "fake":
            dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
        else:
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            dist.init_process_group("gloo", rank=0, world_size=1, store=store)
        found = measure(torch, dist, args.calls, args.rounds)
        dist.destroy_process_group()
        plain = found.pop("none")
        print(f"{name}: {plain:.2f} us for the call without hooks")
        for state, added in found.items():
            limit = LIMITS_US.get(state) if limited else None
            over = limit is not None and added > limit
            failed = failed or over
            bound = "" if limit is None else f"  limit {limit} us{': OVER' if over else ''}"
            print(f"  {state:<12}{added:+8.2f} us   {1 + added / plain:6.2f} x{bound}")
        results.append({"backend": name, "none_us": plain, "added_us": found})
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if failed else 0


def measure(torch: Any, dist: Any, calls: int, rounds: int) -> dict[str, float]:
    """Added microseconds of each state; "none": microseconds of the call itself."""
    import torch.distributed._functional_collectives as functional

    from traceanalyzer.collectors import dispatch, hooks
    from traceanalyzer.collectors.record import Log
    from traceanalyzer.collectors.state import state

    tensors, group = [torch.ones(10)], dist.group.WORLD
    make, total = dist.distributed_c10d.AllreduceOptions, dist.ReduceOp.SUM

    def call() -> Any:
        options = make()
        options.reduceOp = total
        options.asyncOp = False
        return group.allreduce(tensors, options)

    def from_native() -> Any:
        return functional.all_reduce(tensors[0], "sum", group)

    def settle(given: Any) -> None:
        if given is not None:  # a work, or the tensor of a functional collective
            given.wait()

    @contextlib.contextmanager
    def hooked(folder: str, mode: str | None, on: bool) -> Iterator[None]:
        if mode is None:
            yield
            return
        log = Log(Path(folder) / f"{time.time_ns()}.talog", max_queue=10 * calls)
        log.start()
        state.log, state.on = log, on
        hooks.install(mode)
        hooks.switched()
        try:
            yield
        finally:
            state.on, state.log = False, None
            hooks.uninstall()
            log.close()

    @contextlib.contextmanager
    def profiled(wanted: bool) -> Iterator[None]:
        with torch.profiler.profile(record_shapes=True) if wanted else contextlib.nullcontext():
            yield

    # name: (call, mode of the hooks, active, under the profiler, what is subtracted)
    states: dict[str, tuple[Callable[[], None], str | None, bool, bool, str | None]] = {
        "none": (call, None, False, False, None),
        "dormant": (call, "methods", False, False, "none"),
        "active": (call, "methods", True, False, "none"),
        "none, profiled": (call, None, False, True, None),
        "profiled": (call, "methods", True, True, "none, profiled"),
        "dispatcher": (call, "dispatcher", True, False, "none"),
        "none, functional": (from_native, None, False, False, None),
        "functional": (from_native, "dispatcher", True, False, "none, functional"),
    }
    times: dict[str, list[float]] = {name: [] for name in states}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for name, (what, mode, on, under, _) in states.items():
                number = calls // 4 if under else calls
                with hooked(folder, mode, on), profiled(under):
                    per_call_us(what, number, settle)  # until Python has it optimized
                    times[name].append(per_call_us(what, number, settle))
    assert not dispatch.reasons()
    assert state.disabled is None
    assert not state.errors
    added = {
        name: statistics.median(a - b for a, b in zip(times[name], times[less], strict=True))
        for name, (*_, less) in states.items()
        if less is not None
    }
    return {"none": statistics.median(times["none"]), **added}


if __name__ == "__main__":
    raise SystemExit(main())
