"""What megatron-core asks of CUDA, answered on a machine without it. Nothing else of megatron-core is changed.

``before_import`` goes before the first import of megatron, ``after_import`` behind it. Each answer has its reason beside
it; none of them makes, drops or changes a call of torch.distributed.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")


class Done:
    """Stands for a stream or an event of CUDA: whatever it is asked to wait for has happened."""

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...
    def wait_stream(self, _other: object) -> None: ...
    def wait_event(self, _event: object) -> None: ...
    def wait(self, *_args: object) -> None: ...
    def record(self, *_args: object) -> None: ...
    def record_event(self, event: Done | None = None) -> Done:
        return event or Done()

    def synchronize(self) -> None: ...
    def __enter__(self) -> Done:
        return self

    def __exit__(self, *_args: object) -> None: ...


def before_import() -> None:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # sequence parallelism insists on it
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # core's jit_fuser compiles; no compiler is needed here
    warnings.filterwarnings("ignore")  # one for each missing package of kernels
    stream = Done()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU  # passed on as device=
    cuda.synchronize = lambda *_args: None
    cuda.Stream = Done  # made by the data-parallel wrapper and by the mixture of experts
    cuda.current_stream = lambda *_args: stream
    cuda.stream = lambda _stream: Done()
    cuda.get_rng_state = lambda *_args: torch.get_rng_state()
    cuda.manual_seed = torch.manual_seed

    def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def inner(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = CPU  # "cuda" is written out in many places
            kwargs.pop("pin_memory", None)  # positions under context parallelism; needs a driver
            return make(*args, **kwargs)

        return inner

    for name in ("tensor", "empty", "zeros", "ones", "full", "arange"):
        setattr(torch, name, on_cpu(getattr(torch, name)))

    real_type = torch.Tensor.type

    def type_of(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        got = real_type(self, *args, **kwargs)  # the optimizer sorts parameters by "torch.cuda.BFloat16Tensor"
        return got.replace("torch.", "torch.cuda.", 1) if isinstance(got, str) else got

    tensor: Any = torch.Tensor
    tensor.type = type_of
    tensor.cuda = lambda self, *_args, **_kwargs: self
    tensor.record_stream = lambda _self, _stream: None


def after_import() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # The tracker of random states holds those of CUDA: here of the CPU.
    random._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
    # The router looks it up before it asks whether TransformerEngine is there; 0.16.1 does not define it without.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)

    def to_host(tensor: Any, as_numpy: bool = False, **_kwargs: object) -> Any:
        return tensor.detach().numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host  # core's own converts only what is on a GPU
