"""One of two gloo processes: a small training loop that tells a real session of its steps.

Argument: JSON text with rank, store, steps, step_s, run_dir (null: without the collector), options (of the session),
own (what this rank does besides), stop (a file: when it appears, the loops of both ranks end ten steps later). Prints one
JSON line: losses (as hexadecimal text, so that equality is to the bit), seconds per step boundary, and what ``own`` found.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.profiler import ProfilerActivity, profile

dist: Any = distributed


def main() -> None:
    job = json.loads(sys.argv[1])
    rank, own = job["rank"], job.get("own", {})
    torch.set_num_threads(1)
    torch.manual_seed(7 + rank)
    dist.init_process_group("gloo", init_method=f"file://{job['store']}", rank=rank, world_size=2)
    dp = dist.new_group([0, 1], group_desc="DATA_PARALLEL_GROUP")
    session: Any = None
    if job["run_dir"] is not None:
        from traceanalyzer.collectors import attach

        session = attach(job["run_dir"], marks=False, **job["options"])
    model = torch.nn.Linear(8, 8)
    losses: list[str] = []
    found: dict[str, Any] = {}
    boundaries: list[float] = []
    own_profile: Any = None

    def train(step: int) -> None:
        nonlocal own_profile
        if own.get("profile_in") == step:
            own_profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            own_profile.start()
        if own.get("kill_in") == step:
            os.kill(os.getpid(), signal.SIGKILL)
        if own.get("slow_in") == step:
            time.sleep(2.5)
        if own.get("raise_in") == step:
            raise RuntimeError("the job's own error")
        if own.get("fork_in") == step:
            child = os.fork()
            if child == 0:
                sys.exit(3)
            until = time.monotonic() + 20
            while (left := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
                time.sleep(0.01)
            found["child"] = os.waitstatus_to_exitcode(left[1]) if left[0] else "hangs"
            if not left[0]:
                os.kill(child, signal.SIGKILL)
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            grad = parameter.grad
            assert grad is not None
            dist.all_reduce(grad, group=dp)
            with torch.no_grad():
                parameter -= 0.01 * grad
            parameter.grad = None
        losses.append(float(loss.detach()).hex())
        time.sleep(job["step_s"])
        if own.get("profile_until") == step:
            own_profile.stop()
            own_profile.export_chrome_trace(own["profile_file"])
            own_profile = None

    def loop() -> None:
        for step in range(job.get("first_step", 0), job.get("first_step", 0) + job["steps"]):
            began = time.perf_counter()
            if session is not None:
                session.step_begins(step)
            middle = time.perf_counter()
            train(step)
            after = time.perf_counter()
            if session is not None:
                session.step_ends(step)
            boundaries.append(middle - began + time.perf_counter() - after)
            if rank == 0 and job.get("stop") and Path(job["stop"]).exists() and not Path(job["stop"] + ".at").exists():
                # The other rank is at most one step away, and has read this by then.
                part = Path(job["stop"] + ".part")
                part.write_text(str(step + 10))
                part.rename(job["stop"] + ".at")
            if (
                job.get("stop")
                and Path(job["stop"] + ".at").exists()
                and step >= int(Path(job["stop"] + ".at").read_text())
            ):
                break

    if own.get("thread"):
        thread = threading.Thread(target=loop)
        thread.start()
        thread.join()
    else:
        loop()
    print(json.dumps({"losses": losses, "boundaries": boundaries, **found}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
