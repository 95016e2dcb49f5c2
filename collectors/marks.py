"""Where in the step the job is: steps, micro-batches, model chunks, layers, phases, components.

Megatron-core 0.11 to 0.19 and Megatron-LM's training loop are hooked by name as their modules are imported; in a job
without them, torch's optimizers end the steps, and the repeated children of a ModuleList are the layers. Nothing here
touches a tensor: losses are equal to the bit with and without marks.

While ``state.on`` is False a hooked function does one check and calls on; a step boundary tells the session. While it is
True, ``state.place`` is the number of a place record, said to the log before its first use, and its keys are

==========  ==========================================================================================================
key         meaning; each is null where it is not known or does not apply
==========  ==========================================================================================================
microbatch  number in the step, from 0. Of a message between stages: the one whose activations or gradients it carries
chunk       model chunk on this rank, from 0
layer       number in the whole model, from 0. Megatron: layer_number - 1. Otherwise: position in the ModuleList
phase       forward, backward, recompute (forward work repeated inside the backward pass), optimizer, other
component   the words of the expected calls without what follows a blank or colon: attention.qkv, mlp.fc1, router, ...
==========  ==========================================================================================================

Forward: modules, found in the model by their path, are wrapped on their class (never on the instance, which the job may
copy or save). Backward: autograd functions that communicate keep the place of their forward call and go back to it;
for everything else a hook on the autograd node of a module's output says that its backward pass begins here. A forward
call of a known module while the backward pass runs is recomputation. The place is of the process: autograd's threads for
devices work while the thread that called backward waits.

Steps. Megatron-LM: ``args.curr_iteration`` (Megatron prints it as one more); a step lasts until the next one, an
evaluation, a checkpoint or the end of training, because the loop logs, and communicates for it, after train_step.
Bare megatron-core: a schedule begins a step, counted from 0, and the optimizer ends it. Otherwise: the first forward
call of a model in training mode begins it, the last optimizer ends it; where several optimizers take turns, the first
round counts each of them as a step, because nobody can know.

Ranges ``ta:step 3``, ``ta:microbatch 0``, ``ta:forward``, ``ta:backward``, ``ta:layer 5``, ``ta:phase optimizer`` are
opened only while ``state.marking``; the same as "span" records while ``state.on``. The backward pass of a layer has a
span and no range: it begins and ends inside different nodes of autograd.

Rows per expert. Megatron's dispatchers bring the number of rows of each local expert to the host before the experts are
called; there it is read, and said as a "rows" record. Nothing is copied or waited for: a count that is on the device, or
whose copy to the host nobody is known to have waited for, is left out, and an issue says so.

Not hooked: the combined 1F1B schedule that overlaps expert communication with another micro-batch (combined_1f1b.py),
ring_exchange, whole-iteration CUDA graphs.

Importing this module imports no torch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from traceanalyzer.collectors.state import state

__all__ = ["WATCHED", "Seen", "Session", "after_import", "install", "seen", "uninstall"]


class Session(Protocol):
    """Who is told of step boundaries, also while dormant. On the thread that runs the model, outside of all ranges."""

    def step_begins(self, step: int) -> None: ...

    def step_ends(self, step: int) -> None: ...


class Key(NamedTuple):
    """A place: see the module's table."""

    microbatch: int | None = None
    chunk: int | None = None
    layer: int | None = None
    phase: str | None = None
    component: str | None = None


class Place:
    """An interned key with its number in the log, and the places that were entered from it: entering is one look-up."""

    __slots__ = ("backward", "key", "nested", "number")

    def __init__(self, key: Key, number: int) -> None:
        self.key = key
        self.number = number
        self.nested: dict[Any, Place] = {}
        self.backward: Place | None = None  # the same with phase backward, once somebody asked


NOWHERE = Key()


@dataclass
class Seen:
    """What went by and says what the job is; held weakly. For jobinfo and memory.

    models: Megatron's chunks, or the outermost modules of another job. optimizers: Megatron's, or torch's. schedule:
    arguments of the last schedule (seq_length, micro_batch_size, num_microbatches, decoder_seq_length, forward_only)
    and ``name`` of its function. loop: whether Megatron-LM's own training loop runs.
    """

    models: list[weakref.ref[Any]] = field(default_factory=list)
    optimizers: list[weakref.ref[Any]] = field(default_factory=list)
    schedule: dict[str, Any] = field(default_factory=dict)
    grid: dict[str, Any] = field(default_factory=dict)
    loop: bool = False

    @staticmethod
    def add(where: list[weakref.ref[Any]], what: Any) -> bool:
        """Adds an object once; False if it was there."""
        where[:] = [ref for ref in where if ref() is not None]
        if any(ref() is what for ref in where):
            return False
        where.append(weakref.ref(what))
        return True

    @staticmethod
    def alive(where: list[weakref.ref[Any]]) -> list[Any]:
        return [found for ref in where if (found := ref()) is not None]


seen = Seen()
"""The process's own."""


@dataclass(eq=False, slots=True)
class Experts:
    """The local experts of one layer. facts: what the log's "experts" record says. log: that has heard of them.

    waited: whether counts that are on the host when the experts are called are known to be complete there although the rows
    are on a device.
    """

    facts: dict[str, Any]
    waited: bool
    log: Any = None
    number: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Label:
    """What a module is: its layer (None: the enclosing one's) and component; kind is "layer" or "module".

    tells: whether its backward pass is found by a hook on autograd's node. The linear layers have none: their autograd
    functions go back to their place by themselves. experts: of the local experts of a layer, what their counts are of.
    """

    layer: int | None
    component: str | None
    kind: str = "module"
    tells: bool = True
    experts: Experts | None = None


# -- what is hooked by name --------------------------------------------------------------------------------------------

_CORE = "megatron.core."
_SCHEDULES = f"{_CORE}pipeline_parallel.schedules"
_P2P = f"{_CORE}pipeline_parallel.p2p_communication"
_TRAINING = "megatron.training.training"
_TRAINING_UTILS = "megatron.training.utils"
_DISPATCHER = f"{_CORE}transformer.moe.token_dispatcher"
_FINALIZE = f"{_CORE}distributed.finalize_model_grads"
_OPTIMIZER = f"{_CORE}optimizer.optimizer"
_CLIP = f"{_CORE}optimizer.clip_grads"
_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


class Target(NamedTuple):
    """A function or method to wrap: its module, its name there, the maker of the wrapper, the maker's arguments."""

    module: str
    name: str
    maker: str
    arguments: tuple[Any, ...] = ()


def _labels(module: str, found: dict[str, str], phase: str | None = None) -> tuple[Target, ...]:
    return tuple(Target(module, name, "label", (component, phase)) for name, component in found.items())


_LOOP_CALLS: dict[str, str] = {
    "average_losses_across_data_parallel_group": "loss average",
    "logical_and_across_model_parallel_group": "success of the step",
    "calc_params_l2_norm": "parameter norm",
}
"""Functions of Megatron-LM's loop that communicate -> component."""

TARGETS: tuple[Target, ...] = (
    Target(_TRAINING, "train_step", "train_step"),
    Target(_TRAINING, "train", "outside"),
    Target(_TRAINING, "evaluate", "outside"),
    Target(_TRAINING, "save_checkpoint_and_time", "outside"),
    Target(f"{_CORE}parallel_state", "initialize_model_parallel", "grid"),
    Target(_SCHEDULES, "forward_backward_no_pipelining", "schedule"),
    Target(_SCHEDULES, "forward_backward_pipelining_without_interleaving", "schedule"),
    Target(_SCHEDULES, "forward_backward_pipelining_with_interleaving", "schedule"),
    Target(_SCHEDULES, "forward_step", "forward_step"),
    Target(_SCHEDULES, "backward_step", "backward_step"),
    Target(_P2P, "_batched_p2p_ops", "messages"),
    Target(_P2P, "_p2p_ops", "messages"),
    Target(_P2P, "_communicate_shapes", "shapes"),  # up to 0.13
    Target(_P2P, "P2PCommunicator._communicate_shapes", "shapes"),
    Target(_OPTIMIZER, "MegatronOptimizer.__init__", "optimizer_made"),
    Target(_OPTIMIZER, "MixedPrecisionOptimizer.step", "optimizer_step"),
    Target(_OPTIMIZER, "FP32Optimizer.step", "optimizer_step"),
    Target(_OPTIMIZER, "ChainedOptimizer.step", "optimizer_step"),
    *_labels(
        _OPTIMIZER,
        {
            "MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan": "overflow flag",
            "MegatronOptimizer.has_grad_norm_group": "gradient norm groups",
        },
        "same",
    ),
    *_labels(_CLIP, {"get_grad_norm_fp32": "gradient norm", "count_zeros_fp32": "zero count"}, "same"),
    *_labels(
        _FINALIZE,
        {
            "finalize_model_grads": "",
            "_allreduce_conditional_embedding_grads": "conditional embedding",
            "_allreduce_word_embedding_grads": "word embedding",
            "_allreduce_position_embedding_grads": "position embedding",
            "_allreduce_layernorm_grads": "norm gradients",  # up to 0.12
            "_allreduce_non_tensor_model_parallel_grads": "norm gradients",
            "_update_router_expert_bias": "router.expert bias",
        },
        "other",
    ),
    Target(
        f"{_CORE}distributed.param_and_grad_buffer",
        "_ParamAndGradBucketGroup.start_grad_sync",
        "bucket",
        ("gradients",),
    ),
    Target(
        f"{_CORE}distributed.param_and_grad_buffer",
        "_ParamAndGradBucketGroup.finish_grad_sync",
        "bucket",
        ("gradients",),
    ),
    Target(
        f"{_CORE}distributed.param_and_grad_buffer",
        "_ParamAndGradBucketGroup.start_param_sync",
        "bucket",
        ("parameters",),
    ),
    # Parts of the alltoall dispatcher, from 0.14; before, permutation and unpermutation are whole.
    *_labels(
        _DISPATCHER,
        {
            "MoEAlltoAllTokenDispatcher.preprocess": "experts.counts",
            "MoEAlltoAllTokenDispatcher.token_permutation": "experts.dispatch",
            "MoEAlltoAllTokenDispatcher.token_unpermutation": "experts.combine",
            "MoEAlltoAllTokenDispatcher.token_dispatch": "experts.dispatch",
            "MoEAlltoAllTokenDispatcher.dispatch_postprocess": "experts.gather",
            "MoEAlltoAllTokenDispatcher.combine_preprocess": "experts.scatter",
            "MoEAlltoAllTokenDispatcher.token_combine": "experts.combine",
            "MoEAllGatherTokenDispatcher.token_permutation": "experts.gather",
            "MoEAllGatherTokenDispatcher.token_unpermutation": "experts.scatter",
            "MoEAllGatherTokenDispatcher.token_dispatch": "experts.gather",
            "MoEAllGatherTokenDispatcher.token_combine": "experts.scatter",
            "MoEFlexTokenDispatcher.token_dispatch": "experts.dispatch",
            "MoEFlexTokenDispatcher.token_combine": "experts.combine",
        },
    ),
    *_labels(
        f"{_CORE}models.common.language_module.language_module", {"LanguageModule.compute_language_model_loss": "loss"}
    ),
    *_labels(
        f"{_CORE}transformer.moe.router",
        {
            "TopKRouter.aux_loss_load_balancing": "router.load",  # the first two up to 0.12
            "TopKRouter.seq_aux_loss_load_balancing": "router.load",
            "TopKRouter._apply_aux_loss": "router.load",
            "TopKRouter._apply_seq_aux_loss": "router.load",
            "TopKRouter._apply_global_aux_loss": "router.load",
        },
    ),
    Target(f"{_CORE}tensor_parallel.random", "CheckpointWithoutOutput._recompute", "label", (None, "recompute")),
    # Megatron-LM's own calls.
    *_labels(_TRAINING_UTILS, {"get_batch_on_this_tp_rank": "data"}),
    *_labels(f"{_CORE}utils", {"get_batch_on_this_tp_rank": "data"}),  # from 0.18
    *(
        target
        for module in (_TRAINING_UTILS, f"{_TRAINING_UTILS}.common_utils")  # from 0.18
        for target in _labels(module, _LOOP_CALLS, "other")
    ),
    *_labels(
        f"{_CORE}rerun_state_machine",
        {
            "RerunStateMachine.should_run_forward_backward": "rerun state",
            "RerunStateMachine.should_checkpoint_and_exit": "rerun state",
        },
        "other",
    ),
    # torch
    Target("torch.autograd", "backward", "autograd"),
    Target("torch.autograd", "grad", "autograd"),
    Target(_FSDP2, "FSDPParamGroup.unshard", "label", ("parameters", "same")),
    Target(_FSDP2, "FSDPParamGroup.post_backward", "label", ("gradients", "same")),
)

FUNCTIONS: tuple[str, ...] = (
    f"{_CORE}tensor_parallel.mappings",
    f"{_CORE}tensor_parallel.layers",
    f"{_CORE}tensor_parallel.cross_entropy",
    f"{_CORE}fusions.fused_cross_entropy",
    f"{_CORE}transformer.moe.fused_a2a",
    "transformer_engine.pytorch.module.linear",
    "transformer_engine.pytorch.module.layernorm_linear",
    "transformer_engine.pytorch.module.layernorm_mlp",
    "transformer_engine.pytorch.module.grouped_linear",
    "transformer_engine.pytorch.attention",
    "transformer_engine.pytorch.attention.dot_product_attention.context_parallel",
)
"""Modules whose autograd functions communicate in the backward pass."""

WATCHED: tuple[str, ...] = tuple(
    dict.fromkeys(
        (*(t.module for t in TARGETS), *FUNCTIONS, "torch.optim.optimizer", "torch.nn.modules.module", "torch.nn")
    )
)
"""Modules that after_import wants to hear of."""

_PARTS: dict[str, str] = {
    "self_attention": "attention",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.proj",
    "self_attention.linear_q_proj": "attention.q",
    "self_attention.linear_q_down_proj": "attention.q down",
    "self_attention.linear_q_up_proj": "attention.q up",
    "self_attention.linear_kv_down_proj": "attention.kv down",
    "self_attention.linear_kv_up_proj": "attention.kv up",
    "mlp": "mlp",
    "mlp.linear_fc1": "mlp.fc1",
    "mlp.linear_fc2": "mlp.fc2",
    "mlp.router": "router",
    "mlp.experts": "experts",
    "mlp.shared_experts": "shared expert",
    "mlp.shared_experts.linear_fc1": "shared expert.fc1",
    "mlp.shared_experts.linear_fc2": "shared expert.fc2",
}
"""Path of a module inside a transformer layer -> component."""

_OUTSIDE: dict[str, str] = {
    "embedding": "embedding",
    "output_layer": "output layer",
}
"""Last part of the path of a module outside the layers -> component."""


_WAITING = (
    "MoEAllGatherTokenDispatcher",  # copies and waits
    "MoEAlltoAllTokenDispatcher",  # waits at its cuda_sync_point, before_finish at the latest; padded: made on the host
    "MoEAlltoAllSEQTokenDispatcher",  # up to 0.12, likewise
    "_DeepepManager",  # DeepEP gives a list, after it has waited
)
"""Dispatchers (of a flexible one: its manager) after which a count on the host is complete: megatron-core 0.11 to 0.19."""

_READING = ("GroupedMLP", "SequentialMLP", "TEGroupedMLP")
"""Experts that read the counts on the host themselves, first of all, unless they are fused."""


def _experts(layer: Any, module: Any) -> Experts | None:
    """What is known of the experts of a MoE layer; None if it is another kind of layer. Never raises, asks no device."""
    try:
        dispatcher = getattr(layer, "token_dispatcher", None)
        local = [int(number) for number in layer.local_expert_indices]
        if dispatcher is None or local != list(range(local[0], local[0] + len(local))):
            return None
        manager = getattr(dispatcher, "_comm_manager", None)
        names = [type(x).__name__ for x in (dispatcher, manager) if x is not None]
        group = getattr(dispatcher, "ep_group", None) or getattr(layer, "ep_group", None)
        ranks: list[int] | None = None
        with contextlib.suppress(Exception):
            ranks = list(sys.modules["torch.distributed"].get_process_group_ranks(group)) if group is not None else None
        tensor = getattr(dispatcher, "tp_size", None)
        facts = {
            "dispatcher": ".".join(names),
            "first": local[0],
            "local": len(local),
            "ranks": ranks,
            "tensor_ranks": tensor if isinstance(tensor, int) else None,
        }
        reads = type(module).__name__ in _READING and not getattr(module, "_with_fused_impl", False)
        return Experts(facts, names[-1] in _WAITING or reads)
    except Exception as error:  # noqa: BLE001 - layers without counts
        state.failed("marks.experts", error)
        return None


def _find(model: Any) -> dict[Any, Label]:
    """Labels of the modules of a Megatron model chunk, by their paths."""
    found: dict[Any, Label] = {}
    routed: dict[str, Any] = {}  # path of the experts of a layer -> the layer that holds their dispatcher
    layers: list[tuple[str, str]] = []  # path of a layer, what its components begin with
    for path, module in model.named_modules():
        inside = next(((p, words) for p, words in reversed(layers) if path.startswith(f"{p}.")), None)
        ancestry = {cls.__name__ for cls in type(module).__mro__}
        prediction = "mtp" in path.split(".")
        if "MultiTokenPredictionLayer" in ancestry:
            found[module] = Label(None, "prediction")
        elif "BaseTransformerLayer" in ancestry or (
            inside is None
            and path.rpartition(".")[2].isdigit()
            and isinstance(getattr(module, "layer_number", None), int)
        ):
            layers.append((path, "prediction " if prediction else ""))
            number = getattr(module, "layer_number", None)
            if not prediction and isinstance(number, int):
                found[module] = Label(number - 1, None, "layer")
        elif inside is not None:
            component = _PARTS.get(path[len(inside[0]) + 1 :])
            if component == "mlp" and hasattr(module, "router"):
                component = "experts"
                routed[f"{path}.experts"] = module
            if component is not None:
                tells = "linear" not in path.rpartition(".")[2]
                experts = _experts(routed[path], module) if path in routed else None
                found[module] = Label(None, inside[1] + component, tells=tells, experts=experts)
        elif (last := path.rpartition(".")[2]) in _OUTSIDE:
            if last != "embedding" or hasattr(module, "word_embeddings"):
                found[module] = Label(None, _OUTSIDE[last])
        elif last == "eh_proj":
            found[module] = Label(None, "prediction.eh_proj")
    return found


def _find_repeated(root: Any) -> dict[Any, Label]:
    """Layers of a model that nobody knows: children of one class in a ModuleList or Sequential, outermost first.

    They count if they hold a quarter of the model's parameters: not the two linears of a head.
    """
    found: dict[Any, Label] = {}
    lists: list[str] = []
    whole = sum(p.numel() for p in root.parameters())
    for path, module in root.named_modules():
        kinds = {cls.__name__ for cls in type(module).__mro__}
        if not kinds & {"ModuleList", "Sequential"} or any(path.startswith(f"{p}.") for p in lists if p) or "" in lists:
            continue
        sizes = [(child, sum(p.numel() for p in child.parameters())) for child in module.children()]
        common, _ = (
            Counter(type(child) for child, size in sizes if size).most_common(1)[0]
            if any(size for _, size in sizes)
            else (None, 0)
        )
        layers = [(child, size) for child, size in sizes if type(child) is common]
        if len(layers) < 2 or 4 * sum(size for _, size in layers) < whole:
            continue
        lists.append(path)
        for child, _ in layers:
            found[child] = Label(len(found), None, "layer")
    return found


# -- one schedule ------------------------------------------------------------------------------------------------------


def _order(microbatches: int, chunks: int, group: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of every forward step of a rank, in order (megatron-core: get_schedule_table)."""
    group = max(group, 1)
    return [
        (microbatch, chunk)
        for start in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(start, min(start + group, microbatches))
    ]


class _Schedule:
    """Counters of one call of a schedule: which micro-batch and chunk a step or message belongs to.

    Outputs and input gradients are known by their object; what arrives is known by the order, which is the order of the
    forward (or backward) steps without those that receive nothing.
    """

    def __init__(self, chunks: list[Any], microbatches: int, group: int, first: bool, last: bool) -> None:
        self.chunks = {id(chunk): number for number, chunk in enumerate(chunks)}
        self.forwards = [0] * max(len(chunks), 1)
        self.backwards = 0
        top = max(len(chunks), 1) - 1
        forward = _order(microbatches, top + 1, group)
        backward = [(microbatch, top - chunk) for microbatch, chunk in forward]
        self.arriving = iter([x for x in forward if not (first and x[1] == 0)])
        self.arriving_gradients = iter([x for x in backward if not (last and x[1] == top)])
        self.backward = backward
        self.outputs: dict[int, tuple[int, int]] = {}
        self.gradients: dict[int, tuple[int, int]] = {}


def _tensors(value: Any) -> Iterator[Any]:
    """Tensors in a value or in a list, tuple or dict of values, one level deep."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    for item in items:
        if hasattr(item, "grad_fn"):
            yield item


# -- the marks ---------------------------------------------------------------------------------------------------------


_ON_DEVICE = "The dispatcher leaves the rows per expert on the device: they are not recorded."
_NOT_WAITED = (
    "The rows per expert are on the host, but the dispatcher is not known to have waited for their copy: they are not "
    "recorded."
)


class _Marks:
    """One installation."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.active = True
        self.nowhere = Place(NOWHERE, 0)
        self.now = self.nowhere
        self.places: dict[Key, Place] = {NOWHERE: self.nowhere}
        self.log: Any = None
        self.labels: dict[int, tuple[weakref.ref[Any], Label]] = {}  # by id of the module: faster than by weak key
        self.replaced: list[tuple[Any, str, Any, Any]] = []  # owner, name, what stood in its dict, ours
        self.inside: list[tuple[Any, str, Any, Any]] = []  # the same, of what is replaced while calls are recorded
        self.inside_on = False
        self.classes: set[Any] = set()
        self.done: set[str] = set()
        self.hooked: dict[str, int] = {}
        self.handles: list[Any] = []
        self.discovery: Any = None
        self.schedule: _Schedule | None = None
        self.step_scope: Any = None
        self.step_began_ns = 0
        self.job_said: Any = None
        self.next_step = 0
        self.in_loop = 0  # inside Megatron-LM's train_step
        self.outside = 0  # inside an evaluation or a checkpoint
        self.trained = False
        self.megatron = False
        self.optimizing = 0
        self.roots = 0  # nesting of outermost modules (torch)
        self.root_calls: dict[int, int] = {}
        self.members: list[weakref.ref[Any]] = []  # modules inside those found, until discovery ends
        self.stepped: set[int] = set()
        self.cycle: set[int] | None = None
        self.optimizer_scope: Any = None
        self.last_node: Any = None
        self.layers_of_experts = 0
        self.threads: dict[int, int] = {}  # Python's number of a thread -> the system's
        self.backward_layer: tuple[int, int, int] | None = None  # layer, start, place
        self.compiling: Callable[[], bool] = lambda: False
        self.grad_enabled: Callable[[], bool] = lambda: False
        self.range: Any = None

    # -- places

    def at(self, key: Key) -> Place:
        """The place of a key, said to the log before it is used."""
        found = self.places.get(key)
        if found is None:
            if state.log is not self.log:
                self.take_log()
            found = self.places[key] = Place(key, len(self.places))
            if self.log is not None:
                self.log.put(["place", found.number, key._asdict()])
        return found

    def take_log(self) -> None:
        """Says all places to a log that has not heard of them. At step boundaries, where logs come and go."""
        log = state.log
        if log is not self.log:
            self.log = log
            if log is not None:
                for key, place in self.places.items():
                    if place.number:
                        log.put(["place", place.number, key._asdict()])

    def go(self, place: Place) -> None:
        self.now = place
        state.place = place.number

    def to(self, key: Key) -> None:
        """Makes ``key`` the place. Never raises."""
        try:
            self.go(self.at(key))
        except Exception as error:  # noqa: BLE001 - the job goes on without a place
            state.failed("marks.to", error)

    def forward_phase(self) -> str:
        """The phase of forward work here: inside the backward pass it is repeated."""
        phase = self.now.key.phase
        return "recompute" if phase in ("backward", "recompute") else "optimizer" if phase == "optimizer" else "forward"

    # -- ranges and spans

    def open(self, name: str) -> Any:
        """Opens ``ta:<name>`` if a profiler may record; gives what close() needs. Never raises."""
        if not state.marking:
            return None
        try:
            if self.range is None:
                from torch._C._profiler import _RecordFunctionFast

                self.range = _RecordFunctionFast
            scope = self.range(f"ta:{name}")
            scope.__enter__()
            return scope
        except Exception as error:  # noqa: BLE001 - a range less
            state.failed("marks.open", error)
            return None

    def close(self, scope: Any) -> None:
        if scope is not None:
            try:
                scope.__exit__(None, None, None)
            except Exception as error:  # noqa: BLE001 - a range less
                state.failed("marks.close", error)

    def span(self, kind: str, name: str, start_ns: int, place: int) -> None:
        """Writes a span that ends now. Never raises."""
        try:
            log = state.log
            if log is not None and state.on:
                ident = threading.get_ident()
                tid = self.threads.get(ident)
                if tid is None:
                    tid = self.threads[ident] = threading.get_native_id()
                log.put(["span", kind, name, start_ns, time.time_ns(), tid, state.step, place])
        except Exception as error:  # noqa: BLE001 - a span less
            state.failed("marks.span", error)

    def within(self, key: Key, kind: str, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls with ``key`` as the place, inside a range and a span."""
        before = self.now
        self.to(key)
        scope, start_ns, place = self.open(name), time.time_ns(), state.place
        try:
            return call(*args, **kwargs)
        finally:
            self.close(scope)
            self.span(kind, name, start_ns, place)
            self.go(before)

    # -- steps

    def begin_step(self, number: int) -> None:
        """Ends the step that runs and begins another. Never raises."""
        self.end_step()
        try:
            state.step = number
            self.next_step = number + 1
            self.session.step_begins(number)
            if state.on:
                self.take_log()
                self.say_job()
                self.to(Key(phase="other"))
            self.step_scope = self.open(f"step {number}")
            self.step_began_ns = time.time_ns()
        except Exception as error:  # noqa: BLE001 - the job goes on
            state.failed("marks.begin_step", error)

    def end_step(self) -> None:
        """Ends the step that runs, if one does. Never raises."""
        number = state.step
        if number is None:
            return
        try:
            self.close(self.step_scope)
            self.step_scope = None
            self.span("step", f"step {number}", self.step_began_ns, 0)
            if state.on:
                self.say_memory(number)
                self.go(self.nowhere)
        except Exception as error:  # noqa: BLE001 - the job goes on
            state.failed("marks.end_step", error)
        state.step = None
        try:
            self.session.step_ends(number)
        except Exception as error:  # noqa: BLE001 - the job goes on
            state.failed("marks.step_ends", error)

    def say_job(self) -> None:
        from traceanalyzer.collectors import jobinfo

        log = state.log
        if log is not None:
            self.job_said = jobinfo.record(log, self.job_said)

    def say_memory(self, step: int) -> None:
        from traceanalyzer.collectors import memory

        log = state.log
        if log is not None:
            memory.record(log, step)

    # -- makers of wrappers: each gets the function and gives what stands in its place

    def label(self, call: Callable[..., Any], component: str | None, phase: str | None) -> Callable[..., Any]:
        """phase: None for forward work, "same" for the phase that is, else its word. component "" keeps none."""

        mark = object()

        def nested(before: Place) -> Place:
            key = before.key
            word = self.forward_phase() if phase is None else key.phase if phase == "same" else phase
            layer = key.layer if phase in (None, "same", "recompute") else None
            what = key.component if component is None else component or None
            if what is not None and phase is None and (key.component or "").startswith("prediction"):
                what = f"prediction {what}"
            return self.at(Key(key.microbatch if phase != "other" else None, key.chunk, layer, word, what))

        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not state.on:
                return call(*args, **kwargs)
            before = self.now
            try:
                place = before.nested.get(mark)
                if place is None:
                    place = before.nested[mark] = nested(before)
                self.now = place
                state.place = place.number
            except Exception as error:  # noqa: BLE001 - the job goes on
                state.failed("marks.label", error)
            try:
                return call(*args, **kwargs)
            finally:
                self.now = before
                state.place = before.number

        return wrapper

    def bucket(self, call: Callable[..., Any], what: str) -> Callable[..., Any]:
        """Gradients or parameters of a bucket of DistributedDataParallel, in the phase that runs."""

        @functools.wraps(call)
        def wrapper(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not state.on:
                return call(group, *args, **kwargs)
            before = self.now
            try:
                expert = any(not getattr(p, "allreduce", True) for b in group.buckets for p in list(b.params)[:1])
                word = f"expert {what}" if expert else what
                self.to(before.key._replace(layer=None, component=word, phase=before.key.phase or "other"))
            except Exception as error:  # noqa: BLE001 - the job goes on
                state.failed("marks.bucket", error)
            try:
                return call(group, *args, **kwargs)
            finally:
                self.go(before)

        return wrapper

    def autograd(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self.compiling() or not state.on:
                return call(*args, **kwargs)
            before = self.now
            self.last_node = None
            key = before.key._replace(phase="backward", component=None)
            if before.key.phase in ("backward", "recompute"):  # of what a checkpoint repeated
                self.to(key)
                try:
                    return call(*args, **kwargs)
                finally:
                    self.go(before)
            try:
                return self.within(key._replace(layer=None), "backward", "backward", call, args, kwargs)
            finally:
                self.end_backward_layer()
                if not self.megatron:
                    self.to(Key(phase="other"))

        return wrapper

    def train_step(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.megatron_runs()
            seen.loop = True
            self.begin_step(self.iteration(args, kwargs))
            self.in_loop += 1
            try:
                return call(*args, **kwargs)
            finally:
                self.in_loop -= 1

        return wrapper

    def iteration(self, args: Any, kwargs: Any) -> int:
        """The iteration that Megatron-LM is about to run; else the one after the last."""
        try:
            found = getattr(sys.modules["megatron.training.global_vars"].get_args(), "curr_iteration", None)
            if found is None:
                found = kwargs.get("iteration", args[7] if len(args) > 7 else None)
            return self.next_step if found is None else int(found)
        except Exception as error:  # noqa: BLE001 - steps are then counted
            state.failed("marks.iteration", error)
            return self.next_step

    def make(self, target: Target, call: Callable[..., Any]) -> Callable[..., Any]:
        makers: dict[str, Callable[..., Callable[..., Any]]] = {
            "label": self.label,
            "bucket": self.bucket,
            "autograd": self.autograd,
            "train_step": self.train_step,
            "outside": self.wrap_outside,
            "schedule": self.wrap_schedule,
            "forward_step": self.wrap_forward_step,
            "backward_step": self.wrap_backward_step,
            "messages": self.wrap_messages,
            "shapes": self.wrap_shapes,
            "grid": self.wrap_grid,
            "optimizer_made": self.wrap_optimizer_made,
            "optimizer_step": self.wrap_optimizer_step,
        }
        return makers[target.maker](call, *target.arguments)

    def wrap_outside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Training as a whole, evaluation, checkpoints: the step that runs ends before, and none runs inside."""
        whole = call.__name__ == "train"

        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.end_step()
            self.outside += not whole
            try:
                return call(*args, **kwargs)
            finally:
                self.outside -= not whole
                self.end_step()

        return wrapper

    def wrap_schedule(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            before, enclosing = self.now, self.schedule
            try:
                self.begin_schedule(call.__name__, kwargs)
            except Exception as error:  # noqa: BLE001 - the job goes on
                state.failed("marks.schedule", error)
            try:
                return call(*args, **kwargs)
            finally:
                self.schedule, self.last_node = enclosing, None
                if state.on:
                    self.to(
                        before.key if before.key.phase else Key(phase="other") if state.step is not None else NOWHERE
                    )

        return wrapper

    def begin_schedule(self, name: str, kwargs: dict[str, Any]) -> None:
        self.megatron_runs()
        model = kwargs.get("model")
        chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        only = bool(kwargs.get("forward_only"))
        self.trained |= not only
        for chunk in chunks:
            if Seen.add(seen.models, chunk):
                self.learn(_find(chunk))
        if not (only and self.trained):
            told = ("seq_length", "micro_batch_size", "num_microbatches", "decoder_seq_length")
            seen.schedule = {"name": name, "forward_only": only, **{key: kwargs.get(key) for key in told}}
        if not self.in_loop and not self.outside and not (only and self.trained):
            self.begin_step(self.next_step)
        if not state.on:
            self.schedule = None
            return
        microbatches = int(kwargs["num_microbatches"])
        first = last = True
        group = 1
        if name != "forward_backward_no_pipelining":
            parallel = sys.modules[f"{_CORE}parallel_state"]
            rank = parallel.get_pipeline_model_parallel_rank()
            size = parallel.get_pipeline_model_parallel_world_size()
            first, last = rank == 0, rank == size - 1
            config = self.config_of(chunks[0])
            group = getattr(config, "microbatch_group_size_per_vp_stage", None) or size
        self.schedule = _Schedule(chunks, microbatches, group, first, last)
        self.take_log()
        self.to(Key(phase="other"))

    @staticmethod
    def config_of(model: Any) -> Any:
        """The TransformerConfig of a model inside its wrappers; None if there is none."""
        for _ in range(8):
            inner = getattr(model, "module", None)
            if inner is None:
                break
            model = inner
        return getattr(model, "config", None)

    def wrap_forward_step(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not state.on:
                return call(*args, **kwargs)
            microbatch: int | None = kwargs.get("current_microbatch")
            chunk: int | None = None
            try:
                schedule = self.schedule
                model = args[2] if len(args) > 2 else kwargs.get("model")
                if schedule is not None:
                    chunk = schedule.chunks.get(id(model), 0)
                    microbatch = schedule.forwards[chunk]
                    schedule.forwards[chunk] += 1
            except Exception as error:  # noqa: BLE001 - the job goes on
                state.failed("marks.forward_step", error)
            key = Key(microbatch, chunk, None, "forward", None)
            out = self.in_microbatch(key, "forward", call, args, kwargs)
            try:
                self.last_node = None
                if self.schedule is not None and microbatch is not None and chunk is not None:
                    for tensor in _tensors(out[0]):
                        self.schedule.outputs[id(tensor)] = (microbatch, chunk)
            except Exception as error:  # noqa: BLE001 - the job goes on
                state.failed("marks.forward_step", error)
            return out

        return wrapper

    def wrap_backward_step(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not state.on:
                return call(*args, **kwargs)
            which: tuple[int | None, int | None] = (None, None)
            try:
                schedule = self.schedule
                if schedule is not None:
                    output = args[1] if len(args) > 1 else kwargs.get("output_tensor")
                    ours = (schedule.outputs.pop(id(t)) for t in _tensors(output) if id(t) in schedule.outputs)
                    which = next(ours, None) or schedule.backward[schedule.backwards]
                    schedule.backwards += 1
            except Exception as error:  # noqa: BLE001 - the job goes on
                state.failed("marks.backward_step", error)
            try:
                out = self.in_microbatch(Key(*which, None, "backward", None), "backward", call, args, kwargs)
            finally:
                self.end_backward_layer()
            try:
                if self.schedule is not None and which[0] is not None and which[1] is not None:
                    for tensor in _tensors(out):
                        self.schedule.gradients[id(tensor)] = (which[0], which[1])
            except Exception as error:  # noqa: BLE001 - the job goes on
                state.failed("marks.backward_step", error)
            return out

        return wrapper

    def in_microbatch(self, key: Key, kind: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if key.microbatch is None:
            return self.within(key, kind, kind, call, args, kwargs)
        inner = functools.partial(self.within, key, kind, kind, call, args, kwargs)
        return self.within(key._replace(phase="other"), "microbatch", f"microbatch {key.microbatch}", inner, (), {})

    def wrap_messages(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Messages between stages, up to four at once: each gets its own place, by its tensor."""

        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not state.on:
                return call(*args, **kwargs)
            before = self.now
            try:
                places = self.of_messages(kwargs)
                if places:
                    self.to(next(iter(places.values())))
                    if len(places) > 1:
                        state.place_of_tensor = {tensor: self.at(key).number for tensor, key in places.items()}
            except Exception as error:  # noqa: BLE001 - the job goes on
                state.failed("marks.messages", error)
            try:
                return call(*args, **kwargs)
            finally:
                state.place_of_tensor = None
                self.go(before)

        return wrapper

    def of_messages(self, kwargs: dict[str, Any]) -> dict[int, Key]:
        schedule = self.schedule
        found: dict[int, Key] = {}
        for name in ("tensor_send_next", "tensor_recv_prev", "tensor_send_prev", "tensor_recv_next"):
            tensor = kwargs.get(name)
            if tensor is None:
                continue
            forward = name in ("tensor_send_next", "tensor_recv_prev")
            which: tuple[int, int] | None = None
            if schedule is not None:
                if "send" in name:
                    which = (schedule.outputs if forward else schedule.gradients).get(id(tensor))
                else:
                    which = next(schedule.arriving if forward else schedule.arriving_gradients, None)
            microbatch, chunk = which or (None, None)
            phase, component = ("forward", "activations") if forward else ("backward", "gradients")
            found[id(tensor)] = Key(microbatch, chunk, None, phase, component)
        return found

    def wrap_shapes(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Shapes of what follows; the messages of both directions are made inside, so that only one direction is sure."""

        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not state.on:
                return call(*args, **kwargs)
            before = self.now
            try:
                names = ("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next")
                given: dict[str, Any] = dict(
                    zip(names, args[1:] if hasattr(args[0], "pp_group") else args, strict=False)
                )
                given.update(kwargs)
                forward = given.get("tensor_send_next") is not None or bool(given.get("recv_prev"))
                backward = given.get("tensor_send_prev") is not None or bool(given.get("recv_next"))
                if forward != backward:
                    word = "activations" if forward else "gradients"
                    self.to(Key(phase="forward" if forward else "backward", component=f"shapes of {word}"))
            except Exception as error:  # noqa: BLE001 - the job goes on
                state.failed("marks.shapes", error)
            try:
                return call(*args, **kwargs)
            finally:
                self.go(before)

        return wrapper

    def wrap_grid(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's groups are made: the only moment that says in which order."""

        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            out = call(*args, **kwargs)
            try:
                bound = inspect.signature(call).bind(*args, **kwargs)
                bound.apply_defaults()
                seen.grid = dict(bound.arguments)
            except Exception as error:  # noqa: BLE001 - the job goes on
                state.failed("marks.grid", error)
            return out

        return wrapper

    def wrap_optimizer_made(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            out = call(optimizer, *args, **kwargs)
            try:
                Seen.add(seen.optimizers, optimizer)
            except Exception as error:  # noqa: BLE001 - the job goes on
                state.failed("marks.optimizer_made", error)
            return out

        return wrapper

    def wrap_optimizer_step(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self.optimizing:
                return call(optimizer, *args, **kwargs)
            self.optimizing += 1
            try:
                if not state.on:
                    return call(optimizer, *args, **kwargs)
                Seen.add(seen.optimizers, optimizer)
                key = Key(phase="optimizer")
                return self.within(key, "optimizer", "phase optimizer", call, (optimizer, *args), kwargs)
            finally:
                self.optimizing -= 1
                if not self.in_loop and self.megatron:
                    self.end_step()

        return wrapper

    # -- modules

    def learn(self, found: dict[Any, Label]) -> None:
        """Notes the labels of a model's modules and wraps their classes."""
        for module, label in found.items():
            self.labels[id(module)] = (weakref.ref(module), label)
            self.wrap_class(type(module))
        self.hooked["modules"] = self.hooked.get("modules", 0) + len(found)

    def wrap_class(self, cls: Any) -> None:
        """Wraps ``__call__``, which encloses the hooks of a module, on the class, once in its line of bases."""
        if self.classes.isdisjoint(cls.__mro__):
            self.classes.add(cls)
            self.put_inside(cls, "__call__", self.wrap_module(cls.__call__))

    def nested(self, before: Place, label: Label) -> Place:
        """The place of a module that is called at ``before``."""
        key, component = before.key, label.component
        if component is not None and key.component is not None and key.component.startswith("prediction"):
            component = component if component.startswith("prediction") else f"prediction {component}"
        layer = key.layer if label.layer is None else label.layer
        found = self.at(Key(key.microbatch, key.chunk, layer, self.forward_phase(), component))
        before.nested[label] = found
        return found

    def wrap_module(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self.compiling() or not state.on:
                return call(module, *args, **kwargs)
            known = self.labels.get(id(module))
            if known is None or known[0]() is not module:
                return call(module, *args, **kwargs)
            label = known[1]
            before = place = self.now
            scope, start_ns, layer = None, 0, label.kind == "layer"
            try:
                place = before.nested.get(label) or self.nested(before, label)
                self.now = place
                state.place = place.number
                if layer:
                    scope, start_ns = self.open(f"layer {place.key.layer}"), time.time_ns()
                elif label.experts is not None:
                    self.say_rows(label.experts, args, kwargs, place.number)
            except Exception as error:  # noqa: BLE001 - the job goes on
                state.failed("marks.module", error)
            try:
                out = call(module, *args, **kwargs)
            finally:
                if layer:
                    self.close(scope)
                    self.span("layer", f"layer {place.key.layer}", start_ns, place.number)
                self.now = before
                state.place = before.number
            if label.tells and self.grad_enabled():
                self.hook_nodes(out, args, place, layer)
            return out

        return wrapper

    def say_rows(self, experts: Experts, args: Any, kwargs: Any, place: int) -> None:
        """Says how many rows each local expert gets, if the job has that on the host. Copies nothing, waits for nothing."""
        log = state.log
        counts = args[1] if len(args) > 1 else kwargs.get("tokens_per_expert")
        if log is None or counts is None:
            return
        if type(counts) is not list:
            if counts.device.type != "cpu":
                log.issue("info", "expert_rows_on_device", _ON_DEVICE)
                return
            if not experts.waited and args[0].device.type != "cpu":
                log.issue("info", "expert_rows_not_waited_for", _NOT_WAITED)
                return
            counts = counts.tolist()
        if experts.log is not log:
            experts.log = log
            if not experts.number:
                self.layers_of_experts += 1
                experts.number = self.layers_of_experts
            log.put(["experts", experts.number, experts.facts])
        log.put(["rows", experts.number, time.time_ns(), state.step, place, counts])

    def backward_of(self, place: Place) -> Place:
        found = place.backward
        if found is None:
            found = place.backward = self.at(place.key._replace(phase="backward"))
        return found

    def hook_nodes(self, out: Any, args: Any, place: Place, whole: bool) -> None:
        """Has autograd say when it begins with what gave ``out``. Never raises."""
        try:
            backward = place.backward or self.backward_of(place)
            tensor = out[0] if type(out) is tuple else out  # what else a module gives out hangs on the same work
            node = getattr(tensor, "grad_fn", None)
            # An inner module with the same output said more; an input that is handed on is not ours.
            if node is None or node is self.last_node or (args and tensor is args[0]):
                return
            self.last_node = node
            node.register_prehook(functools.partial(self.arrive, backward, whole))
        except Exception as error:  # noqa: BLE001 - the job goes on
            state.failed("marks.hook_nodes", error)

    def arrive(self, place: Place, whole: bool, gradients: Any) -> None:
        """Autograd begins with the backward pass of a module."""
        del gradients
        if not state.on or not self.active:
            return
        self.now = place
        state.place = place.number
        if whole and place.key.layer is not None:
            self.end_backward_layer()
            self.backward_layer = (place.key.layer, time.time_ns(), place.number)

    def end_backward_layer(self) -> None:
        found, self.backward_layer = self.backward_layer, None
        if found is not None:
            self.span("layer", f"layer {found[0]}", found[1], found[2])

    def wrap_function(self, cls: Any) -> None:
        """Has an autograd function go back to its place when its backward pass runs."""
        forward, backward = cls.__dict__.get("forward"), cls.__dict__.get("backward")
        if (
            not isinstance(forward, staticmethod)
            or not isinstance(backward, staticmethod)
            or "setup_context" in cls.__dict__
        ):
            return
        call_forward, call_backward = forward.__func__, backward.__func__

        @functools.wraps(call_forward)
        def forward_wrapper(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.compiling() and state.on:
                try:  # noqa: SIM105 - contextlib.suppress costs five calls
                    ctx._traceanalyzer_place = self.now
                except Exception:  # noqa: BLE001 - a place less
                    pass
            return call_forward(ctx, *args, **kwargs)

        @functools.wraps(call_backward)
        def backward_wrapper(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            if self.compiling() or not state.on:
                return call_backward(ctx, *args, **kwargs)
            place: Place | None = getattr(ctx, "_traceanalyzer_place", None)
            if place is None:
                return call_backward(ctx, *args, **kwargs)
            before = self.now
            try:
                self.now = place = place.backward or self.backward_of(place)
                state.place = place.number
            except Exception as error:  # noqa: BLE001 - the job goes on
                state.failed("marks.function", error)
            try:
                return call_backward(ctx, *args, **kwargs)
            finally:
                self.now = before
                state.place = before.number

        self.put_inside(cls, "forward", staticmethod(forward_wrapper))
        self.put_inside(cls, "backward", staticmethod(backward_wrapper))
        self.hooked["functions"] = self.hooked.get("functions", 0) + 1

    # -- jobs without Megatron

    def megatron_runs(self) -> None:
        """Megatron says where steps begin; torch's optimizers and modules are not asked any more."""
        if not self.megatron:
            self.megatron = True
            self.resolve()
            self.stop_discovery()

    def stop_discovery(self) -> None:
        if self.discovery is not None:
            with contextlib.suppress(Exception):
                self.discovery.remove()
            self.discovery = None
            self.members.clear()

    def discover(self, module: Any, args: Any) -> None:
        """Before any module's forward call, until the first optimizer step: the outermost in training is a model."""
        del args
        if self.megatron or not self.active:
            self.stop_discovery()
            return
        try:
            self.resolve()
            if (
                not self.roots
                and module.training
                and self.grad_enabled()
                and not any(ref() is module for ref in self.members)
                and any(True for _ in module.parameters())
            ):
                if Seen.add(seen.models, module):
                    self.members += [weakref.ref(inner) for inner in module.modules() if inner is not module]
                    self.learn(_find_repeated(module))
                    self.wrap_root(module)
                if not self.root_calls.get(id(module)):
                    self.root_begins(module)
        except Exception as error:  # noqa: BLE001 - the job goes on
            state.failed("marks.discover", error)

    def wrap_root(self, root: Any) -> None:
        if not self.classes.isdisjoint(type(root).__mro__):
            return
        self.classes.add(type(root))
        call = type(root).__call__

        @functools.wraps(call)
        def wrapper(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self.compiling() or self.megatron or not any(ref() is module for ref in seen.models):
                return call(module, *args, **kwargs)
            if self.roots or not module.training or not self.grad_enabled():
                return call(module, *args, **kwargs)
            self.root_begins(module)
            self.roots += 1
            try:
                if not state.on:
                    return call(module, *args, **kwargs)
                key = self.now.key
                inner = functools.partial(self.within, key, "forward", "forward", call, (module, *args), kwargs)
                if key.microbatch is None:
                    return inner()
                return self.within(key, "microbatch", f"microbatch {key.microbatch}", inner, (), {})
            finally:
                self.roots -= 1
                self.last_node = None

        self.put(type(root), "__call__", wrapper)

    def root_begins(self, module: Any) -> None:
        """A model is called: the first call of a step begins it. Never raises."""
        try:
            if state.step is None or (self.stepped and (self.cycle is None or self.stepped >= self.cycle)):
                if state.step is not None:
                    self.end_step()
                self.stepped = set()
                self.root_calls = {}
                self.begin_step(self.next_step)
            number = self.root_calls.get(id(module), 0)
            self.root_calls[id(module)] = number + 1
            if state.on:
                self.to(Key(number, None, None, "forward", None))
        except Exception as error:  # noqa: BLE001 - the job goes on
            state.failed("marks.root_begins", error)

    def before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if self.megatron or not self.active:
            return
        try:
            self.stop_discovery()
            Seen.add(seen.optimizers, optimizer)
            if state.step is None:
                self.stepped = set()
                self.begin_step(self.next_step)
            if state.on:
                self.to(Key(phase="optimizer"))
                self.optimizer_scope = (self.open("phase optimizer"), time.time_ns(), state.place)
        except Exception as error:  # noqa: BLE001 - the job goes on
            state.failed("marks.before_optimizer", error)

    def after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if self.megatron or not self.active:
            return
        try:
            if self.optimizer_scope is not None:
                scope, start_ns, place = self.optimizer_scope
                self.optimizer_scope = None
                self.close(scope)
                self.span("optimizer", "phase optimizer", start_ns, place)
            if state.on:
                self.to(Key(phase="other"))
            self.stepped.add(id(optimizer))
            cycle = {id(o) for o in Seen.alive(seen.optimizers)}
            if self.cycle is not None and id(optimizer) not in self.cycle:
                self.stepped |= self.cycle  # the first round: those before it in the round were taken for whole steps
            self.cycle = cycle
            if self.stepped >= self.cycle:
                self.end_step()
        except Exception as error:  # noqa: BLE001 - the job goes on
            state.failed("marks.after_optimizer", error)

    # -- installing

    def put(self, owner: Any, name: str, ours: Any) -> None:
        self.replaced.append((owner, name, vars(owner).get(name), ours))
        setattr(owner, name, ours)

    def put_inside(self, owner: Any, name: str, ours: Any) -> None:
        """Replaces what is looked up anew in each step, and called often there: only while calls are recorded."""
        self.inside.append((owner, name, vars(owner).get(name), ours))
        if self.inside_on:
            setattr(owner, name, ours)

    def sync(self) -> None:
        """Puts what is replaced while calls are recorded in its place, or what it replaced back."""
        on = bool(state.on)
        if on == self.inside_on:
            return
        self.inside_on = on
        if not on:
            self.put_back(self.inside)
            return
        for owner, name, original, ours in self.inside:
            if vars(owner).get(name) is original:  # else ours is there, under somebody else's
                setattr(owner, name, ours)

    @staticmethod
    def put_back(replaced: list[tuple[Any, str, Any, Any]]) -> None:
        for owner, name, original, ours in reversed(replaced):
            with contextlib.suppress(Exception):
                if vars(owner).get(name) is ours:
                    if original is None:
                        delattr(owner, name)
                    else:
                        setattr(owner, name, original)

    def take(self) -> None:
        """Puts everything back. What somebody replaced over ours is left, and ours under it passes through."""
        self.active = False
        self.stop_discovery()
        for handle in self.handles:
            with contextlib.suppress(Exception):
                handle.remove()
        self.put_back(self.inside)
        self.put_back(self.replaced)
        self.inside.clear()
        self.replaced.clear()

    def arrived(self, module_name: str, executed: bool) -> None:
        """Hooks what there is in a module that was imported, once; executed: known to have run to its end."""
        module = sys.modules.get(module_name)
        if module is None or module_name in self.done or module_name not in WATCHED:
            return
        if not executed and getattr(getattr(module, "__spec__", None), "_initializing", False):
            return  # the import watcher will say when it is there
        self.done.add(module_name)
        for target in TARGETS:
            if target.module == module_name:
                self.hook(module, target)
        if module_name in FUNCTIONS:
            self.hook_functions(module)
        if module_name == "torch.optim.optimizer":
            for name, hook in (
                ("register_optimizer_step_pre_hook", self.before_optimizer),
                ("register_optimizer_step_post_hook", self.after_optimizer),
            ):
                register = getattr(module, name, None)
                if register is not None:
                    self.handles.append(register(hook))
                    self.hooked["torch optimizers"] = 1
        if module_name == "torch.nn.modules.module" and not self.megatron:
            self.discovery = module.register_module_forward_pre_hook(self.discover)
        self.resolve()

    def resolve(self) -> None:
        """Takes the two questions that wrappers ask from torch, as soon as it has them."""
        torch = sys.modules.get("torch")
        self.grad_enabled = getattr(torch, "is_grad_enabled", self.grad_enabled)
        # Dynamo takes both for True while it traces, so that nothing of ours is traced; the second costs a third of the first
        for name in ("is_compiling", "is_dynamo_compiling"):
            self.compiling = getattr(sys.modules.get("torch.compiler"), name, self.compiling)

    def hook(self, module: Any, target: Target) -> None:
        owner: Any = module
        *path, name = target.name.split(".")
        for part in path:
            owner = vars(owner).get(part)
            if owner is None:
                return
        call = vars(owner).get(name)
        if not callable(call):
            return
        ours = self.make(target, call)
        self.put(owner, name, ours)
        if owner is module:
            self.replace_copies(name, call, ours)
        family = target.module.split(".")[0]
        self.hooked[family] = self.hooked.get(family, 0) + 1

    def replace_copies(self, name: str, call: Any, ours: Any) -> None:
        """The same function where another module imported it by its name."""
        for other_name, other in list(sys.modules.items()):
            if not other_name.startswith(("torch", "traceanalyzer")):
                space = getattr(other, "__dict__", {})
                if space.get(name) is call:
                    self.put(other, name, ours)

    def hook_functions(self, module: Any) -> None:
        torch = sys.modules.get("torch")
        base = getattr(getattr(torch, "autograd", None), "Function", None)
        if base is None:
            return
        for cls in list(vars(module).values()):
            if isinstance(cls, type) and issubclass(cls, base) and cls.__module__ == module.__name__:
                self.wrap_function(cls)


_lock = threading.Lock()
_marks: _Marks | None = None


def install(session: Session) -> str:
    """Hooks what is imported by now, and the rest as after_import hears of it. Says what was hooked. Never raises."""
    global _marks
    with _lock:
        if _marks is None:
            _marks = _Marks(session)
            _marks.sync()
        marks = _marks
        marks.session = session
    for name in WATCHED:
        _arrived(name, executed=False)
    return hooked()


def hooked() -> str:
    """What is hooked, in words."""
    marks = _marks
    if marks is None:
        return "marks: not installed"
    if not marks.hooked:
        return "marks: nothing imported yet"
    return "marks: " + ", ".join(f"{count} in {name}" for name, count in sorted(marks.hooked.items()))


def sync() -> None:
    """Has the marks inside of steps there while calls are recorded; hooks.switched() calls it. Never raises."""
    marks = _marks
    if marks is not None:
        try:
            marks.sync()
        except Exception as error:  # noqa: BLE001 - the job goes on without these marks
            state.failed("marks.sync", error)


def after_import(module_name: str) -> None:
    """Hooks what a module holds whose code has just run to its end, before anybody else sees it. Never raises."""
    _arrived(module_name, executed=True)


def _arrived(module_name: str, *, executed: bool) -> None:
    marks = _marks
    if marks is not None:
        try:
            marks.arrived(module_name, executed)
        except Exception as error:  # noqa: BLE001 - the job goes on without these marks
            state.failed(f"marks.after_import {module_name}", error)


def uninstall() -> None:
    """Puts everything back as it was; does nothing if nothing is installed. Never raises."""
    global _marks
    with _lock:
        marks, _marks = _marks, None
    if marks is not None:
        marks.take()
        state.place = 0
    seen.models.clear()
    seen.optimizers.clear()
    seen.schedule, seen.grid = {}, {}
    seen.loop = False
