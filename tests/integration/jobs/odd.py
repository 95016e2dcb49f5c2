"""Small jobs that do odd things which a collector must survive. Two processes of plain torch over gloo.

    torchrun --nproc-per-node 2 odd.py CASE FOLDER

=============  =======================================================================================================
CASE           what happens
=============  =======================================================================================================
plain          five steps
forks          forks in the middle of a step, by os.fork and by multiprocessing; the children use torch
workers        batches come from a data loader with two worker processes
again          destroys its process groups and makes them again, twice, with another group
killed         rank 1 kills itself with SIGKILL in the middle of step 3, the other one ends of it
restarted      the first life of the job fails in step 2; torchrun --max-restarts starts it once more
forever        steps until it is ended from outside
=============  =======================================================================================================

Leaves ``rank<r>.json`` in FOLDER: losses as hexadecimal floats.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WIDTH = 8
STEPS = 5


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(WIDTH).float().sin() * (index + 1)


def batches(workers: int) -> Iterator[torch.Tensor]:
    loader: Any = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=workers)
    yield from loader


def work() -> None:
    torch.ones(3).sum().item()


def fork() -> None:
    """One child by os.fork and one by multiprocessing; the parent waits for both."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    os.waitpid(child, 0)
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()


def join(store: Path) -> None:
    """Joins the world. A store of its own for each: in one used before, gloo finds the addresses of what is gone."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store.absolute()}", rank=rank, world_size=size)


def main() -> None:
    case, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder.mkdir(parents=True, exist_ok=True)
    life = os.environ["TORCHELASTIC_RESTART_COUNT"]
    join(folder / f"store{life}")
    rank = dist.get_rank()
    group: Any = dist.new_group([0, 1], group_desc="PAIR")
    torch.manual_seed(3)
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    data = batches(2 if case == "workers" else 0)
    number = 0
    while number < STEPS or case == "forever":
        batch = torch.ones(4, WIDTH) if case == "forever" else next(data)
        optimizer.zero_grad()
        loss = model(batch * (rank + 1)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
        if case == "forks":
            fork()
        if case == "killed" and rank == 1 and number == 3:
            (folder / "killed").touch()
            time.sleep(float(os.environ.get("ODD_SLEEP", "1")))
            os.kill(os.getpid(), signal.SIGKILL)
        if case == "restarted" and number == 2 and life == "0":
            raise SystemExit(5)
        optimizer.step()
        losses.append(loss.item().hex())
        if case == "again" and number in (1, 3):
            dist.destroy_process_group()
            join(folder / f"store{life}_{number}")
            group = dist.new_group([0, 1], group_desc=f"PAIR_{number}")
        if case == "forever":
            (folder / f"step{rank}").write_text(str(number))
            time.sleep(0.05)
        number += 1
    (folder / f"rank{rank}.json").write_text(json.dumps({"losses": losses}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
