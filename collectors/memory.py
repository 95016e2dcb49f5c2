"""What a rank's tensors take: parameters, gradients, optimizer state; on an accelerator, what its allocator holds.

Metric records (unit "bytes"), each for one step:

================================  ====================================================================================
key                               meaning
================================  ====================================================================================
memory.parameters_bytes           storages of the models' parameters, each counted once, with the padding of a buffer
memory.gradients_bytes            storages of their gradients (``grad``, Megatron's ``main_grad``)
memory.optimizer_bytes            what else the optimizers hold: state and main copies of parameters
memory.allocated_bytes            accelerator, at the end of the step
memory.reserved_bytes             accelerator, at the end of the step
memory.peak_allocated_bytes       accelerator: the most since the process began or the job reset the figure. It is not
                                  reset here, because the job may read it
================================  ====================================================================================

The first three are measured at the end of the first recorded step of a log, and again when models or optimizers come or
go; they cost a walk over the parameters. Nothing is asked of a device. Importing this module imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from traceanalyzer.collectors.marks import Seen, seen
from traceanalyzer.collectors.state import state

__all__ = ["measure", "record"]


def _local(tensor: Any) -> Any:
    """The part of a tensor that lies on this rank."""
    return getattr(tensor, "_local_tensor", tensor)


def _add(storages: dict[tuple[str, int], int], tensor: Any) -> None:
    """Notes the storage of a tensor: device and address -> bytes."""
    tensor = _local(tensor)
    if tensor is None or not hasattr(tensor, "untyped_storage"):
        return
    storage = tensor.untyped_storage()
    size = int(storage.nbytes())
    if size:
        storages[str(storage.device), int(storage.data_ptr())] = size


def _inner(optimizer: Any) -> Iterator[Any]:
    """torch's optimizers inside one of Megatron's, or itself."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        for one in chained:
            yield from _inner(one)
        return
    inner = getattr(optimizer, "optimizer", None)
    yield optimizer if inner is None else inner


def _held(value: Any) -> Iterator[Any]:
    """Tensors in an optimizer's state."""
    if hasattr(value, "untyped_storage"):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _held(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _held(item)


def measure() -> dict[str, int]:
    """Bytes by key, of the models and optimizers seen; a key is absent where there is nothing to ask."""
    parameters: dict[tuple[str, int], int] = {}
    gradients: dict[tuple[str, int], int] = {}
    optimizer: dict[tuple[str, int], int] = {}
    models, optimizers = Seen.alive(seen.models), Seen.alive(seen.optimizers)
    for model in models:
        for parameter in model.parameters():
            _add(parameters, parameter)
            _add(gradients, parameter.grad)
            _add(gradients, getattr(parameter, "main_grad", None))
    for one in optimizers:
        for inner in _inner(one):
            for group in getattr(inner, "param_groups", ()):
                for parameter in group["params"]:
                    _add(optimizer, parameter)
                    _add(gradients, parameter.grad)
            for held in getattr(inner, "state", {}).values():
                for tensor in _held(held):
                    _add(optimizer, tensor)
    found: dict[str, int] = {}
    if models:
        found["memory.parameters_bytes"] = sum(parameters.values())
        found["memory.gradients_bytes"] = sum(size for key, size in gradients.items() if key not in parameters)
    if optimizers:
        others = (size for key, size in optimizer.items() if key not in parameters and key not in gradients)
        found["memory.optimizer_bytes"] = sum(others)
    return found


def _allocator() -> dict[str, int]:
    """What the allocator of the accelerator says; nothing without one, or before the job uses it."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_available() or not cuda.is_initialized():
        return {}
    stats = cuda.memory_stats()
    return {
        "memory.allocated_bytes": int(stats.get("allocated_bytes.all.current", 0)),
        "memory.reserved_bytes": int(stats.get("reserved_bytes.all.current", 0)),
        "memory.peak_allocated_bytes": int(stats.get("allocated_bytes.all.peak", 0)),
    }


_measured: tuple[int, int, int] | None = None


def record(log: Any, step: int) -> None:
    """Writes the metrics at the end of a step. Never raises."""
    global _measured
    try:
        now = (id(log), len(seen.models), len(seen.optimizers))
        found = _allocator()
        if now != _measured:
            _measured = now
            found |= measure()
        for key, value in found.items():
            log.put(["metric", key, value, "bytes", step])
    except Exception as error:  # noqa: BLE001 - the job goes on
        state.failed("memory.record", error)
