"""What the small torch jobs share: the command line, the loop, and what they leave behind.

    torchrun --nproc-per-node 2 JOB.py FOLDER [--steps N] [--seconds X]

Leaves ``rank<r>.json`` in FOLDER: the loss of each step as a hexadecimal float and a digest of the parameters' bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WIDTH = 16
BATCH = 4
LAYERS = 3


def model() -> torch.nn.Sequential:
    """The same numbers on every rank: LAYERS times Linear(WIDTH, WIDTH) and ReLU."""
    torch.manual_seed(1)
    layers: list[torch.nn.Module] = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers)


def digest(module: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        local: Any = parameter.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        found.update(name.encode())
        found.update(local.contiguous().numpy().tobytes())
    return found.hexdigest()


def run(prepare: Callable[[torch.nn.Sequential], torch.nn.Module], *, same_data: bool = False) -> None:
    """Trains what ``prepare`` makes of the model. same_data: all ranks take the same batches."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    module = prepare(model())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(5 if same_data else 5 + rank)
    losses: list[str] = []
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss = module(torch.randn(BATCH, WIDTH, generator=random)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        if options.seconds:
            time.sleep(options.seconds)
    options.folder.mkdir(parents=True, exist_ok=True)
    left = {"losses": losses, "parameters": digest(module)}
    (options.folder / f"rank{rank}.json").write_text(json.dumps(left))
    dist.barrier()
    dist.destroy_process_group()
