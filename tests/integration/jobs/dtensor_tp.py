"""torch's tensor parallelism over DTensor: functional collectives, forward and backward. Two processes."""

from typing import Any

import common
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import parallel


def shard(module: torch.nn.Sequential) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan: dict[str, Any] = {"2": parallel.ColwiseParallel(), "4": parallel.RowwiseParallel()}
    return parallel.parallelize_module(module, mesh, plan)


if __name__ == "__main__":
    common.run(shard, same_data=True)
