"""torch's DistributedDataParallel: its reducer issues every call of a step from C++. Two processes."""

import common
import torch

if __name__ == "__main__":
    common.run(torch.nn.parallel.DistributedDataParallel)
