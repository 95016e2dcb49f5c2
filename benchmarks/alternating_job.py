"""The job of bench_collectors.py: real megatron-core steps, with the collector taken away and put there while it runs.

    torchrun --nproc-per-node 2 benchmarks/alternating_job.py CONFIGURATION FOLDER [--cycles N] [--steps N]
    python benchmarks/alternating_job.py CONFIGURATION FOLDER --fake

--fake: rank 0 alone, on torch's fake backend: the same calls, which move nothing and wait for nobody.

A cycle has a block of steps for each way (``without``, ``dormant``, ``hooks``), in an order drawn anew for each cycle, the
same one on every rank; the first two steps of a block are left out. Leaves ``rank<r>.json`` in FOLDER: for each way a list
with, per cycle, in seconds a step: the median wall time, the median CPU time of the thread that trains, and the mean CPU time
of the collector's own threads.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "integration" / "jobs"))

import megatron_job
import torch.distributed as dist

from traceanalyzer.collectors.session import Session, open_session

WAYS = ("without", "dormant", "hooks")


def own_threads_s() -> float:
    """CPU time that the collector's threads have used, s."""
    clocks = [
        time.pthread_getcpuclockid(thread.ident)
        for thread in threading.enumerate()
        if thread.name.startswith("traceanalyzer") and thread.ident is not None
    ]
    return sum(map(time.clock_gettime, clocks))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("configuration", choices=megatron_job.CONFIGURATIONS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--steps", type=int, default=6, help="of a block, that count")
    parser.add_argument("--fake", action="store_true")
    options = parser.parse_args()
    megatron_job.prepare()
    settings = megatron_job.Settings(**megatron_job.CONFIGURATIONS[options.configuration])
    if options.fake:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(settings.world_size)}
        dist.init_process_group("fake", rank=0, world_size=settings.world_size, store=FakeStore())
    else:
        dist.init_process_group("gloo")
    training = megatron_job.Training(settings)
    import megatron.core.distributed as distributed

    def step() -> None:
        # a job that was started with the collector has its function here
        training.config.finalize_model_grads_func = distributed.finalize_model_grads
        training.step()

    draw = random.Random(7)
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    for _ in range(10):
        step()
    for cycle in range(options.cycles):
        for way in draw.sample(WAYS, len(WAYS)):
            session: Session | None = None
            if way != "without":
                config: dict[str, Any] = {"run_dir": str(options.folder / f"{cycle}-{way}"), "profile_ranks": []}
                session = open_session({**config, "dormant": way == "dormant"})
            for _ in range(2):
                step()
            dist.barrier()
            wall, trained = [], []
            own = own_threads_s()
            for _ in range(options.steps):
                begin, used = time.perf_counter(), time.thread_time()
                step()
                wall.append(time.perf_counter() - begin)
                trained.append(time.thread_time() - used)
            own = (own_threads_s() - own) / options.steps
            if session is not None:
                assert session.on == (way == "hooks"), "the collector did not do what it was asked for"
                session.close()
            found[way].append((statistics.median(wall), statistics.median(trained), own))
    megatron_job.leave(found, options.folder)


if __name__ == "__main__":
    main()
