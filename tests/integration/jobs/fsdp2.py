"""torch's fully_shard (FSDP2): parameters of each layer gathered, gradients reduce-scattered. Two processes."""

import common
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def shard(module: torch.nn.Sequential) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    for layer in module:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


if __name__ == "__main__":
    common.run(shard)
