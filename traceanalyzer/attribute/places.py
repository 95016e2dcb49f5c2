"""Where in the step a call was made, from the host ranges that enclose it.

A call's path holds the names of autograd functions, modules and marks around it, innermost first. Megatron's parallel
regions are autograd functions, so their names say who communicates, and the autograd engine's ranges say whether that is a
backward pass; forward work inside a checkpoint's backward is recomputation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import pyarrow as pa

from traceanalyzer.job import Job
from traceanalyzer.run import Run

TENSOR_PARALLEL_FUNCTIONS: frozenset[str] = frozenset(
    {
        # megatron/core/tensor_parallel: mappings.py, layers.py, cross_entropy.py
        "_CopyToModelParallelRegion",
        "_ReduceFromModelParallelRegion",
        "_ScatterToModelParallelRegion",
        "_GatherFromModelParallelRegion",
        "_ScatterToSequenceParallelRegion",
        "_GatherFromSequenceParallelRegion",
        "_ReduceScatterToSequenceParallelRegion",
        "_AllGatherFromTensorParallelRegion",
        "_ReduceScatterToTensorParallelRegion",
        "LinearWithGradAccumulationAndAsyncCommunication",
        "LinearWithFrozenWeight",
        "_VocabParallelCrossEntropy",
        # transformer_engine/pytorch/module
        "_Linear",
        "_LayerNormLinear",
        "_LayerNormMLP",
    }
)
"""Autograd functions that communicate over the tensor-parallel group, and no other in a dense model."""

# MoE dispatchers call these two with the ETP x EP or ETP group (moe/token_dispatcher.py), so there they settle nothing.
_SHARED_WITH_EXPERTS = frozenset({"_GatherFromSequenceParallelRegion", "_ReduceScatterToSequenceParallelRegion"})
# MoE routers sum token counts with this one, over other groups (moe/moe_utils.py): there only hidden states settle it.
_SHARED_WITH_ROUTER = "_ReduceFromModelParallelRegion"

_ENGINE = "autograd::engine::evaluate_function"
_BACKWARD = re.compile(r"Backward\d*$")
# FSDP2's own ranges; what runs after the engine's last function has no engine around it
_FSDP_BACKWARD = re.compile(r"^FSDP::(?:root_)?(?:pre|post)_backward")
_CHECKPOINT_BACKWARD = re.compile(r"^(?:_?CheckpointFunction|_?CheckpointFrame\w*|CheckpointWithoutOutput\w*)Backward$")
_MARK = re.compile(r"^(?:ProfilerStep#|ta:|Optimizer\.|enumerate\(DataLoader\)|DistributedDataParallel\.|\[)")
_MICROBATCH = re.compile(r"^ta:microbatch (\d+)$")
_LAYER = re.compile(r"^ta:layer (\d+)$")
_PHASE_MARK = re.compile(r"^ta:(?:phase )?(forward|backward|recompute|optimizer|other)$")


class Place(NamedTuple):
    """What a path says: phase, role, component and micro-batch, each None if it does not say."""

    phase: str
    phase_evidence: str
    role: str | None = None
    component: str | None = None
    component_evidence: str | None = None
    microbatch: int | None = None
    layer: int | None = None


def place_of(path: Sequence[str] | None, in_dims: str | None, job: Job | None) -> Place:
    """The place a path (innermost first; None: nothing encloses the call) and the dimensions of a call's tensors say.

    ``in_dims`` is the recorded JSON text; it tells the embedding (batch first) from the layers (sequence first) where
    micro-batch and sequence length differ.
    """
    names = [n for n in path or () if not _MARK.match(n)]
    inner = next((_BACKWARD.sub("", n) for n in names if not n.startswith(_ENGINE)), None)
    phase, evidence = _phase(path or (), job)
    shape = _by_shape(in_dims, job)
    component, component_evidence = None, None
    if inner == "_VocabParallelCrossEntropy":
        component, component_evidence = "loss", "call_path"
    elif inner == "_ReduceFromModelParallelRegion" and phase in ("forward", "recompute") and shape is not None:
        component, component_evidence = shape, "call_path and shape"
    microbatch = next((int(m.group(1)) for n in path or () if (m := _MICROBATCH.match(n))), None)
    layer = next((int(m.group(1)) for n in path or () if (m := _LAYER.match(n))), None)
    role = "tp" if inner is not None and _is_tensor_parallel(inner, shape, job) else None
    return Place(phase, evidence, role, component, component_evidence, microbatch, layer)


def _is_tensor_parallel(function: str, shape: str | None, job: Job | None) -> bool:
    """Whether this autograd function communicates over the tensor-parallel group and no other in this job."""
    shared = function in _SHARED_WITH_EXPERTS or (function == _SHARED_WITH_ROUTER and shape is None)
    if shared and job is not None and job.num_experts is not None:
        return False
    return function in TENSOR_PARALLEL_FUNCTIONS


def _phase(path: Sequence[str], job: Job | None) -> tuple[str, str]:
    """Phase and its evidence, by the innermost range that decides."""
    names = [n for n in path if n.startswith("Optimizer.") or not _MARK.match(n) or _PHASE_MARK.match(n)]
    ran_forward = False
    for i, name in enumerate(names):
        mark = _PHASE_MARK.match(name)
        if mark:
            return mark.group(1), "mark"
        if name.startswith("Optimizer."):
            return "optimizer", "call_path"
        if _CHECKPOINT_BACKWARD.match(name):
            # what the checkpoint itself calls is no repeated forward work: it gathers the activations it saved in parts
            gathers = i == 0 and job is not None and job.distribute_saved_activations
            return "backward" if gathers else "recompute", "call_path"
        if name.startswith(_ENGINE) or _BACKWARD.search(name) or _FSDP_BACKWARD.match(name):
            # a forward function inside the backward pass: a checkpoint without a function of its own (saved-tensor hooks)
            return "recompute" if ran_forward else "backward", "call_path"
        ran_forward = ran_forward or name in TENSOR_PARALLEL_FUNCTIONS
    return ("forward", "call_path") if names else ("other", "no_path")


def is_checkpoint(name: str) -> bool:
    """Whether a range of this name is the backward pass of a checkpoint, in which forward work is repeated."""
    return _CHECKPOINT_BACKWARD.match(name) is not None


def is_backward(name: str) -> bool:
    """Whether a range of this name is part of the backward pass."""
    return name.startswith(_ENGINE) or bool(_BACKWARD.search(name)) or bool(_FSDP_BACKWARD.match(name))


def is_tensor_parallel(name: str) -> bool:
    """Whether a range of this name is one of TENSOR_PARALLEL_FUNCTIONS or its backward pass."""
    return _BACKWARD.sub("", name.removeprefix(f"{_ENGINE}: ")) in TENSOR_PARALLEL_FUNCTIONS


def is_mark(name: str) -> bool:
    """Whether a range of this name is a mark that says no place in the model: steps, micro-batches, data loading."""
    return _MARK.match(name) is not None


def _by_shape(in_dims: str | None, job: Job | None) -> str | None:
    if in_dims is None or job is None or job.micro_batch_size is None or job.seq_length is None:
        return None
    try:
        shape = msgspec.json.decode(in_dims)
    except msgspec.DecodeError:
        return None
    while isinstance(shape, list) and shape and isinstance(shape[0], list):
        shape = shape[0]
    local = job.seq_length // job.context_parallel_size
    if not isinstance(shape, list) or len(shape) != 3 or job.micro_batch_size == local:
        return None
    if shape[0] == job.micro_batch_size and shape[1] == local:
        return "embedding"
    return "layers" if shape[0] == local and shape[1] == job.micro_batch_size else None


CLASSES = frozenset({"embedding", "layers", "loss"})
"""Components as coarse as call paths and shapes tell them."""


def class_of_component(component: str) -> str | None:
    """The coarse name that ``component`` in the view comm uses for an expected component; None if it uses none."""
    if component.startswith("embedding"):
        return "embedding"
    if component.startswith("loss"):
        return "loss"
    if component.startswith(("attention", "mlp")):
        return "layers"
    return None


def of_paths(run: Run, job: Job | None) -> pa.Table:
    """The place of every distinct (path, dimensions) of a run: table path_place."""
    rows = run.tuples("SELECT DISTINCT call_path, in_dims FROM recorded_comm")
    placed = [place_of(path, dims, job) for path, dims in rows]
    return pa.table(
        {
            "call_path": pa.array([r[0] for r in rows], pa.list_(pa.string())),
            "in_dims": pa.array([r[1] for r in rows], pa.string()),
            "path_phase": pa.array([p.phase for p in placed], pa.string()),
            "path_role": pa.array([p.role for p in placed], pa.string()),
            "path_component": pa.array([p.component for p in placed], pa.string()),
            "path_microbatch": pa.array([p.microbatch for p in placed], pa.int32()),
            "path_layer": pa.array([p.layer for p in placed], pa.int32()),
            "path_phase_evidence": pa.array([p.phase_evidence for p in placed], pa.string()),
            "path_component_evidence": pa.array([p.component_evidence for p in placed], pa.string()),
        }
    )


_PHASE_SIGNS = {
    "backward": "name LIKE 'autograd::engine::evaluate_function%' OR regexp_matches(name, 'Backward[0-9]*$')",
    "optimizer": "name LIKE 'Optimizer.step%' OR name LIKE '%multi_tensor_apply%' OR name LIKE 'aten::_fused_adam%'",
}


def phases_seen(run: Run) -> dict[str, bool | None]:
    """Whether the recording holds host work of the phases backward and optimizer at all.

    None: no host operators were recorded, so it cannot be told. What was not in the window cannot be missing.
    """
    if not run.value("SELECT count(*) FROM cpu_op WHERE category = 'cpu_op' OR category IS NULL"):
        return dict.fromkeys(_PHASE_SIGNS)
    return {
        phase: bool(
            run.value(
                f"""SELECT EXISTS (SELECT 1 FROM cpu_op WHERE {sign}) OR EXISTS (SELECT 1 FROM span WHERE {sign})
                    OR EXISTS (SELECT 1 FROM recorded_comm WHERE recorded_phase = '{phase}')"""
            )
        )
        for phase, sign in _PHASE_SIGNS.items()
    }
