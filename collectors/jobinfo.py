"""What the job says of itself: Megatron's arguments and configuration, groups, versions, host, device, switches.

``capture()`` gives a dict of JSON values:

===========  =========================================================================================================
key          content
===========  =========================================================================================================
job          the Job by Megatron's names, for ``traceanalyzer.job.parse_mapping``. Megatron-LM: all of ``get_args()``.
             Bare megatron-core: the configuration objects of model, data-parallel wrapper and optimizer, the arguments
             of initialize_model_parallel and of the schedule, sizes of the model. Else: what torch.distributed knows
groups       role -> {name, ranks}: the groups of megatron.core.parallel_state that this rank is in
place        coordinates of this rank: tp, pp, cp, dp, ep, etp, vpp where known
versions     python, torch, cuda, nccl, transformer_engine, megatron_core, apex
host         name, processors
device       kind, name, count, index, memory_bytes
environment  switches of the job: variables by PREFIXES only, for the rest may hold secrets
unread       what could not be read, and why
===========  =========================================================================================================

Nothing is asked of a device, and no value of an argument whose name speaks of a secret is kept. Importing this module
imports no torch.
"""

from __future__ import annotations

import enum
import json
import math
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from traceanalyzer.collectors.marks import Seen, seen

__all__ = ["PREFIXES", "capture", "record"]

PREFIXES: tuple[str, ...] = ("NCCL_", "NVTE_", "TORCH_", "PYTORCH_", "CUDA_DEVICE_MAX_CONNECTIONS")
"""Beginnings of the environment variables that are kept."""

_SECRET = re.compile(r"secret|passw|api_?key|credential|access_?token|auth_?token|hf_token", re.IGNORECASE)

_ROLES: dict[str, str] = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_EMBEDDING_GROUP": "embedding",
    "_POSITION_EMBEDDING_GROUP": "position_embedding",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp",
    "_INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "inter_dist_opt",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "_EXPERT_DATA_PARALLEL_GROUP": "edp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "intra_edp",
    "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "inter_edp",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "dist_opt",
    "_INTER_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "inter_dist_opt",
}
"""Variables of megatron.core.parallel_state -> role."""

_PLACES: dict[str, str] = {
    "tp": "get_tensor_model_parallel_rank",
    "pp": "get_pipeline_model_parallel_rank",
    "cp": "get_context_parallel_rank",
    "dp": "get_data_parallel_rank",
    "ep": "get_expert_model_parallel_rank",
    "etp": "get_expert_tensor_parallel_rank",
}

_SIZES: dict[str, str] = {
    "tensor_model_parallel_size": "get_tensor_model_parallel_world_size",
    "pipeline_model_parallel_size": "get_pipeline_model_parallel_world_size",
    "context_parallel_size": "get_context_parallel_world_size",
    "expert_model_parallel_size": "get_expert_model_parallel_world_size",
    "expert_tensor_parallel_size": "get_expert_tensor_parallel_world_size",
    "virtual_pipeline_model_parallel_size": "get_virtual_pipeline_model_parallel_world_size",
}

_RENAMED: dict[str, str] = {
    "num_moe_experts": "num_experts",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "fp8_param": "fp8_param_gather",
    "bucket_size": "ddp_bucket_size",
    "average_in_collective": "ddp_average_in_collective",
    "pad_buckets_for_high_nccl_busbw": "ddp_pad_buckets_for_high_nccl_busbw",
    "reduce_scatter_with_fp32_accumulation": "ddp_reduce_scatter_with_fp32_accumulation",
    "reshard_after_forward": "torch_fsdp2_reshard_after_forward",
    "use_custom_fsdp": "use_megatron_fsdp",
    "enable_megatron_fsdp": "use_megatron_fsdp",
}
"""Names in core's configuration objects -> names of Megatron's arguments."""

_NOT_OF_THE_JOB: frozenset[str] = frozenset(
    {
        # derived, or of the configuration object's own life
        "gated_linear_unit",
        "activation_func",
        "grad_reduce_in_fp32",
        "timers",
        "pipeline_dtype",
        "autocast_dtype",
        "perform_initialization",
        "use_cpu_initialization",
        "moe_extended_tp",
    }
)


class _UnreadableError(Exception):
    """The value is no JSON value and has none that stands for it."""


def _plain(value: Any) -> Any:
    """``value`` as a JSON value; raises _UnreadableError for functions, tensors, objects."""
    if value is None or isinstance(value, (bool, int, str)):
        return value.value if isinstance(value, enum.Enum) and isinstance(value.value, str) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if type(value).__name__ == "PipelineParallelLayerLayout" and isinstance(getattr(value, "input_data", None), str):
        return value.input_data
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise _UnreadableError(type(value).__name__)


def _readable(values: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        if name.startswith("_") or _SECRET.search(name):
            continue
        try:
            found[name] = _plain(value)
        except _UnreadableError:
            continue
    return found


def _config(config: Any) -> dict[str, Any]:
    """Fields of one of core's configuration objects by the names of Megatron's arguments; none that is null."""
    found = {}
    for name, value in _readable(dict(vars(config))).items():
        if value is not None and name not in _NOT_OF_THE_JOB:
            found[_RENAMED.get(name, name)] = value
    return found


def _unwrapped(model: Any) -> Iterator[Any]:
    """A model and what its wrappers hold, outermost first."""
    for _ in range(8):
        yield model
        inner = getattr(model, "module", None)
        if inner is None:
            return
        model = inner


def _module(name: str) -> Any:
    return sys.modules.get(name)


def _core_job() -> dict[str, Any]:
    """The Job of a loop around megatron-core: from what was built and called."""
    job: dict[str, Any] = {}
    optimizers = Seen.alive(seen.optimizers)
    for optimizer in optimizers[::-1]:
        config = getattr(optimizer, "config", None)
        if config is not None:
            job.update(_config(config))
    chunks = Seen.alive(seen.models)
    if chunks:
        job.update(_model(chunks[0]))
    job.update(_grid())
    schedule = seen.schedule
    for name in ("seq_length", "micro_batch_size", "num_microbatches", "decoder_seq_length"):
        if isinstance(schedule.get(name), int):
            job[name] = schedule[name]
    if schedule.get("forward_only"):
        job["forward_only"] = True
    return job


def _model(chunk: Any) -> dict[str, Any]:
    job: dict[str, Any] = {}
    layers = list(_unwrapped(chunk))
    data_parallel = next((c for m in layers if (c := getattr(m, "ddp_config", None)) is not None), None)
    config = next((c for m in reversed(layers) if (c := getattr(m, "config", None)) is not None), None)
    if config is not None:
        job.update(_config(config))
        if getattr(config, "gated_linear_unit", False):
            job["swiglu"] = True  # the width of fc1 is what matters: every gated unit doubles it
    if data_parallel is not None:
        both = bool(job.get("fp8_param_gather"))
        job.update(_config(data_parallel))
        if both:
            job["fp8_param_gather"] = True
        in_fp32 = bool(getattr(data_parallel, "grad_reduce_in_fp32", False))
        job["accumulate_allreduce_grads_in_fp32"] = in_fp32
        if job.get("bf16") and not in_fp32:
            job["grad_reduce_in_bf16"] = True
        # Megatron-LM's two switches do nothing but set these functions.
        if getattr(data_parallel, "overlap_grad_reduce", False) and config is not None:
            job["align_grad_reduce"] = getattr(config, "grad_sync_func", None) is not None
        if getattr(data_parallel, "overlap_param_gather", False) and config is not None:
            job["align_param_gather"] = getattr(config, "param_sync_func", None) is not None
    if any(type(m).__name__ == "TorchFullyShardedDataParallel" for m in layers):
        job["use_torch_fsdp2"] = True
    inner = layers[-1]
    tied = getattr(inner, "share_embeddings_and_output_weights", None)
    if isinstance(tied, bool):
        job["untie_embeddings_and_output_weights"] = not tied
    for name, attribute in (
        ("position_embedding_type", "position_embedding_type"),
        ("max_position_embeddings", "max_sequence_length"),
        ("padded_vocab_size", "vocab_size"),
    ):
        value = getattr(inner, attribute, None)
        if isinstance(value, (str, int)):
            job[name] = value
    return job


def _grid() -> dict[str, Any]:
    """Sizes of the grid that parallel_state was set up with, and its order where the call was seen."""
    job: dict[str, Any] = {}
    parallel = _module("megatron.core.parallel_state")
    for name, function in _SIZES.items():
        try:
            value = getattr(parallel, function)()
        except Exception:  # noqa: BLE001 - older releases lack it, or assert that the group exists
            continue
        if isinstance(value, int) and value > 0:
            job[name] = value
    told = seen.grid
    if isinstance(told.get("order"), str):
        job["order"] = told["order"]
    for name, argument in (
        ("num_distributed_optimizer_instances", "num_distributed_optimizer_instances"),
        ("enable_gloo_process_groups", "create_gloo_process_groups"),
    ):
        value = told.get(argument)
        if isinstance(value, (bool, int)):
            job[name] = value
    sizes = told.get("hierarchical_context_parallel_sizes")
    if isinstance(sizes, (list, tuple)):
        job["hierarchical_context_parallel_sizes"] = list(sizes)
    return job


def _arguments() -> dict[str, Any] | None:
    """Megatron-LM's arguments; None where its loop does not run."""
    get_args = getattr(_module("megatron.training.global_vars"), "get_args", None)
    if get_args is None:
        return None
    try:
        found = _readable(dict(vars(get_args())))
    except AssertionError:  # not parsed: somebody only imports megatron.training
        return None
    return {name: value for name, value in found.items() if value is not None}


def _job() -> dict[str, Any]:
    arguments = _arguments()
    core = _module("megatron.core")
    if arguments is not None:
        job: dict[str, Any] = {**arguments, "framework": "megatron-lm"}
        count = seen.schedule.get("num_microbatches")
        if isinstance(count, int) and "global_batch_size" not in job:
            job["num_microbatches"] = count
    elif core is not None and (seen.models or seen.grid):
        job = {**_core_job(), "framework": "megatron-core"}
    else:
        job = {"framework": "other"}
    versions = _versions()
    for name, key in (
        ("megatron_core_version", "megatron_core"),
        ("transformer_engine_version", "transformer_engine"),
        ("torch_version", "torch"),
    ):
        if key in versions:
            job[name] = versions[key]
    ranks = _world()
    if ranks is not None:
        job["world_size"] = ranks
    switch = os.environ.get("NVTE_BATCH_MHA_P2P_COMM")
    if switch in ("0", "1"):
        job["nvte_batch_mha_p2p_comm"] = switch == "1"
    return job


def _world() -> int | None:
    distributed = _module("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return int(distributed.get_world_size())


def _groups() -> dict[str, Any]:
    parallel, distributed = _module("megatron.core.parallel_state"), _module("torch.distributed")
    found: dict[str, Any] = {}
    if parallel is None or distributed is None:
        return found
    for variable, role in _ROLES.items():
        group = getattr(parallel, variable, None)
        for one in group if isinstance(group, list) else [group]:
            if one is None or not hasattr(one, "group_name"):
                continue
            key = role if role not in found else f"{role} {len(found)}"
            ranks = [int(rank) for rank in distributed.get_process_group_ranks(one)]
            found[key] = {"name": str(one.group_name), "ranks": ranks}
    return found


def _place() -> dict[str, int]:
    parallel = _module("megatron.core.parallel_state")
    found: dict[str, int] = {}
    for key, function in _PLACES.items():
        try:
            value = getattr(parallel, function)()
        except Exception:  # noqa: BLE001 - older releases lack it, or assert that the group exists
            continue
        if isinstance(value, int):
            found[key] = value
    return found


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    torch = _module("torch")
    for key, name in (
        ("torch", "torch"),
        ("megatron_core", "megatron.core"),
        ("transformer_engine", "transformer_engine"),
        ("apex", "apex"),
        ("triton", "triton"),
    ):
        version = getattr(_module(name), "__version__", None)
        if version is not None:
            found[key] = str(version)
    if torch is not None:
        for key, value in (
            ("cuda", getattr(torch.version, "cuda", None)),
            ("hip", getattr(torch.version, "hip", None)),
        ):
            if value:
                found[key] = str(value)
        if _cuda(torch):
            number = torch.cuda.nccl.version()
            found["nccl"] = ".".join(str(part) for part in number) if isinstance(number, tuple) else str(number)
    return found


def _cuda(torch: Any) -> bool:
    """Whether CUDA is in use; asking must not set it up."""
    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())


def _device() -> dict[str, Any]:
    torch = _module("torch")
    if torch is None or not _cuda(torch):
        return {"kind": "cpu", "name": platform.processor() or platform.machine(), "count": os.cpu_count()}
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    return {
        "kind": "cuda",
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "index": index,
        "memory_bytes": int(properties.total_memory),
    }


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIXES) and not _SECRET.search(name)
    }


def capture() -> dict[str, Any]:
    """Everything the job says of itself by now: see the module's table. Never raises."""
    found: dict[str, Any] = {}
    unread: dict[str, str] = {}
    parts: dict[str, Callable[[], Any]] = {
        "job": _job,
        "groups": _groups,
        "place": _place,
        "versions": _versions,
        "host": lambda: {"name": platform.node(), "processors": os.cpu_count()},
        "device": _device,
        "environment": _environment,
    }
    for key, read in parts.items():
        try:
            found[key] = read()
        except Exception as error:  # noqa: BLE001 - the rest is still worth having
            unread[key] = f"{type(error).__name__}: {error}"[:400]
    if unread:
        found["unread"] = unread
    return found


def _signature() -> tuple[Any, ...]:
    """What, when it changes, may change the job. Cheap."""
    return (
        tuple(seen.schedule.items()),
        len(seen.models),
        len(seen.optimizers),
        len(seen.grid),
        "megatron.training.global_vars" in sys.modules,
    )


def record(log: Any, said: Any = None) -> Any:
    """Writes the "job" record, if it is new; ``said`` is what the last call for this log gave. Never raises."""
    try:
        signature = (id(log), *_signature())
        if said is not None and said[0] == signature:
            return said
        content = capture()
        text = json.dumps(content, sort_keys=True, default=str)
        if said is None or said[1] != text or said[0][0] != id(log):
            log.put(["job", content])
        return (signature, text)
    except Exception as error:  # noqa: BLE001 - the job goes on
        from traceanalyzer.collectors.state import state

        state.failed("jobinfo.record", error)
        return said
