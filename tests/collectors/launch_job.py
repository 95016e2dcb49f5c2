"""A small job of two gloo ranks, or of one process: what it does is said by its first argument."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed import init_process_group  # an early copy of the name
from torch.utils.data import DataLoader, TensorDataset


def main() -> int:
    what = sys.argv[1]
    if what == "alone":  # no group at all
        return 0
    if what in ("one", "forever"):
        init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
    else:
        init_process_group("gloo")
    total = torch.zeros(4)
    if what == "loader":
        data = TensorDataset(torch.ones(4, 4))
        for (batch,) in DataLoader(data, num_workers=1, multiprocessing_context=sys.argv[2]):
            total += batch[0]
        children = [subprocess.run([sys.executable, "-c", "import torch.distributed"], check=True)]
        assert children
    else:
        total += 1
    dist.all_reduce(total)
    if what == "forever":

        def leave(number: int, frame: object) -> None:
            print(f"signal {signal.Signals(number).name}", flush=True)
            sys.exit(7)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, leave)
        print(f"ready {os.getpid()}", flush=True)
        linear = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            linear(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            dist.all_reduce(total)
            time.sleep(0.01)
    print(f"rank {dist.get_rank()}: {total.tolist()}", flush=True)
    dist.destroy_process_group()
    return 5 if what == "five" and dist.is_available() else 0


if __name__ == "__main__":
    multiprocessing.freeze_support()
    sys.exit(main())
