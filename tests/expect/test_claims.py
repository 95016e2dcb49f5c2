"""Every claim of the seed document, by calling the analytical model: its rules, shapes, schedules, memory, layout and job.

The value compared is the claims table's ``recomputed_value``: equal to the document's own where the verdict is
"consistent", the corrected one where it is "arithmetic_error" or "convention_mismatch". A claim is in one of three places:

* CLAIMS: what our code gives is the table's value.
* CONTRADICTED: the document contradicts itself; the errata entry, what our code gives, and what that must be.
* EXCLUDED: nothing to compute, with the reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cached_property
from typing import Any

import pytest

from traceanalyzer import axes, expect, traffic
from traceanalyzer.axes import DOCUMENT_ORDER, Axis
from traceanalyzer.expect import document, memory, parameters, schedule, shapes
from traceanalyzer.expect import expert as experts
from traceanalyzer.expect.model import ExpectedCall
from traceanalyzer.expect.place import Place
from traceanalyzer.expect.schedule import Schedule
from traceanalyzer.job import Job

Value = int | Fraction | tuple[int, ...]
Claim = Callable[["Seed"], Value]

_UNIT: dict[str, int | Fraction] = {
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "GB": 10**9,
    "Gparams": 10**9,
    "%": Fraction(1, 100),
}
_RELEASE = (0, 16)


class Case:
    """One job as one of its ranks sees it under the document's rules."""

    def __init__(self, job: Job, rank: int = 0) -> None:
        self.job = job
        self.rank = rank

    @cached_property
    def calls(self) -> tuple[ExpectedCall, ...]:
        return expect.expected(self.job, self.rank, rules="document").calls

    @cached_property
    def place(self) -> Place:
        return Place(self.job, self.job.layout.stage(self.rank), _RELEASE)

    def at(self, rank: int) -> Case:
        """The same job on another rank."""
        return Case(self.job, rank)

    def rows(self, phase: str = "", op: str = "", role: str = "", component: str = "") -> list[ExpectedCall]:
        """The calls of a phase, operation, role and of components that begin so; "" takes all."""
        return [
            row
            for row in self.calls
            if phase in ("", row.phase)
            and op in ("", row.op)
            and role in ("", row.role)
            and row.component.startswith(component)
        ]

    def row(self, component: str, phase: str = "forward", op: str = "") -> ExpectedCall:
        (found,) = [row for row in self.rows(phase, op) if row.component == component]
        return found

    # -- numbers and bytes: a receive is counted with its sender

    def number(self, phase: str = "", op: str = "", role: str = "", component: str = "") -> int:
        return sum(row.calls for row in self.rows(phase, op, role, component) if row.op != "recv")

    def full(self, phase: str = "", op: str = "", role: str = "", component: str = "") -> int:
        """Full-tensor bytes."""
        found = self.rows(phase, op, role, component)
        return sum(row.payload_bytes * row.calls for row in found if row.op != "recv")

    def off_rank(self, phase: str = "", op: str = "", role: str = "", component: str = "") -> Fraction:
        found = self.rows(phase, op, role, component)
        return sum((row.off_rank_bytes * row.calls for row in found if row.op != "recv"), Fraction(0))

    def own_part(self, component: str, phase: str = "forward") -> int:
        row = self.row(component, phase)
        shard = row.in_elems if row.op == "all_gather" else row.out_elems
        return traffic.tensor_bytes(shard, row.dtype) or 0

    def received(self, component: str, phase: str = "forward") -> Fraction:
        row = self.row(component, phase)
        found = traffic.received_bytes(row.op, row.payload_bytes, row.group_size)
        assert found is not None
        return found

    # -- shapes

    def activation(self, place: str) -> tuple[int, ...]:
        sequence, batch, features = shapes.activations(self.job)[place]
        return batch, sequence, features

    def buffer(self, component: str, phase: str, side: str, op: str = "") -> tuple[int, ...]:
        """Shape of a call's input or output; which of the possible shapes it is, its number of elements must say."""
        row = self.row(component, phase, op)
        elements = row.in_elems if side == "in" else row.out_elems
        batch, length, hidden = self.job.require("micro_batch_size", "seq_length", "hidden_size")
        for shape in (self.activation("norm"), self.activation("gathered"), (batch, length, hidden)):
            if math.prod(shape) == elements:
                return shape
        raise AssertionError(f"{component} {phase} {side}: {elements} elements")

    def message(self, phase: str = "forward") -> ExpectedCall:
        """What the stage sends to a neighbour."""
        return self.row("activations" if phase == "forward" else "gradients", phase, "send")

    # -- data parallelism, in multiples of the rank's parameters

    @property
    def psi(self) -> int:
        return parameters.dense(self.job, self.rank).value

    def in_psi(self, phase: str = "", op: str = "", component: str = "") -> Fraction:
        """Full-tensor bytes of data parallelism over the rank's parameters; an all-reduce counts twice."""
        found = self.rows(phase, op, "dp_cp", component)
        return Fraction(sum(r.payload_bytes * r.calls * (2 if r.op == "all_reduce" else 1) for r in found), self.psi)

    def of_layers(self, phase: str, component: str) -> ExpectedCall:
        """The ZeRO-3 calls of the layers, not of what is outside them."""
        return max(self.rows(phase, "", "dp_cp", component), key=lambda row: row.calls)

    def per_layer(self, phase: str, component: str) -> Fraction:
        return Fraction(self.of_layers(phase, component).calls, self.job.num_layers or 0)

    def in_psi_of_layer(self, phase: str, component: str) -> Fraction:
        """Full-tensor bytes of one layer's ZeRO-3 call over the layer's parameters."""
        return Fraction(
            self.of_layers(phase, component).payload_bytes,
            parameters.total(parameters.of_layer(self.place, 0)).value,
        )

    # -- layers and stages

    def layers(self, stage: int, chunk: int | None = None) -> tuple[int, ...]:
        return self.job.layers_on_stage(stage, chunk)

    def stage(self, stage: int) -> Case:
        return self.at(self.job.layout.rank_of(pp=stage))

    @property
    def stages(self) -> list[Case]:
        return [self.stage(stage) for stage in range(self.job.pipeline_model_parallel_size)]

    @property
    def layer_parameters(self) -> int:
        """Parameters of the rank's decoder layers."""
        return sum(parameters.total(parameters.of_layer(self.place, layer)).value for layer in self.place.layers)

    def component(self, name: str) -> parameters.Component:
        (found,) = [part for part in parameters.components(self.job, self.rank) if part.name == name]
        return found


class Seed:
    """The document's settings: one dimension alone in each of the chapters 1 to 5, all of them in chapter 6."""

    def __init__(self, make: Callable[..., Job]) -> None:
        self._make = make

    def case(self, **options: Any) -> Case:
        """The model with nothing parallel, and these options."""
        return Case(self._make(**{"world_size": 1, "tensor_model_parallel_size": 1, **options}))

    # Chapter 1: TP 4.

    @cached_property
    def tp(self) -> Case:
        return Case(self._make())

    @cached_property
    def one(self) -> Case:
        """One layer."""
        return Case(self._make(num_layers=1))

    @cached_property
    def plain(self) -> Case:
        """One layer without sequence parallelism."""
        return Case(self._make(num_layers=1, sequence_parallel=False))

    # Chapter 2: PP 4, M 8, with TP 4 and sequence parallelism.

    def pipeline(self, **options: Any) -> Case:
        sizes = {"world_size": 16, "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 4}
        return self.case(**{**sizes, "num_microbatches": 8, **options})

    @cached_property
    def pp(self) -> Case:
        return self.pipeline()

    @cached_property
    def pass_(self) -> Case:
        """One micro-batch."""
        return self.pipeline(num_microbatches=1)

    @cached_property
    def bare(self) -> Case:
        """No tensor parallelism."""
        return self.pipeline(world_size=4, tensor_model_parallel_size=1)

    @cached_property
    def vpp(self) -> Case:
        """Two model chunks a stage."""
        return self.pipeline(virtual_pipeline_model_parallel_size=2)

    @cached_property
    def uneven(self) -> Case:
        return self.pipeline(decoder_first_pipeline_num_layers=18, decoder_last_pipeline_num_layers=22)

    # Chapter 3: CP alone, one layer.

    def cp(self, comm: str, ranks: int = 2) -> Case:
        return self.case(world_size=ranks, context_parallel_size=ranks, cp_comm_type=(comm,), num_layers=1)

    @cached_property
    def ring(self) -> Case:
        return self.cp("p2p")

    @cached_property
    def gather(self) -> Case:
        return self.cp("all_gather")

    @cached_property
    def ulysses(self) -> Case:
        return self.cp("a2a")

    @cached_property
    def whole(self) -> Case:
        """One layer, nothing parallel."""
        return self.case(num_layers=1)

    # Chapter 4: EP 8 alone, one layer with 64 experts, top-2.

    def experts(self, **options: Any) -> Case:
        sizes = {"world_size": 8, "expert_model_parallel_size": 8, "num_experts": 64, "moe_router_topk": 2}
        return self.case(**{**sizes, "num_layers": 1, "moe_token_dispatcher_type": "alltoall", **options})

    @cached_property
    def ep(self) -> Case:
        return self.experts()

    def capacity(self, factor: float = 1.0) -> int:
        """Rows of an expert from one rank."""
        case = self.experts(moe_expert_capacity_factor=factor)
        return int(experts.CHAPTER.symbols["capacity"].of(case.place))

    # Chapter 5: DP 4 alone, one micro-batch.

    def zero(self, stage: int, **options: Any) -> Case:
        strategy: dict[int, dict[str, Any]] = {
            0: {},
            1: {"use_distributed_optimizer": True},
            2: {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"},
            3: {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"},
        }
        return self.case(**{"world_size": 4, **strategy[stage], **options})

    # Chapter 6: TP 4, PP 4, CP 2, EP 8, DP 4 with Ulysses.

    def together(self, **options: Any) -> Case:
        sizes = {
            "world_size": 1024,
            "grid": "product",
            "order": DOCUMENT_ORDER,
            "tensor_model_parallel_size": 4,
            "pipeline_model_parallel_size": 4,
            "context_parallel_size": 2,
            "expert_model_parallel_size": 8,
            "expert_tensor_parallel_size": 1,
            "num_experts": 64,
            "moe_router_topk": 2,
            "moe_layer_freq": 4,
            "moe_token_dispatcher_type": "alltoall",
            "cp_comm_type": ("a2a",),
        }
        return self.case(**{**sizes, **options})

    @cached_property
    def all(self) -> Case:
        return self.together()

    @cached_property
    def printed(self) -> Case:
        """Half the sequence: tensor-parallel regions of 2048 tokens, as the document's chapter 6 prints them (E2)."""
        return self.together(seq_length=4096)

    @cached_property
    def folded(self) -> Case:
        """The same degrees in Megatron's grid, where expert-parallel ranks are data-parallel ones (E4): DP 32, M 8."""
        return self.together(grid="megatron", order=axes.DEFAULT_ORDER, num_microbatches=8)


QKV = shapes.column_parallel(8192, 24576, 4)  # the document's W with H' = 3H
ROW = shapes.row_parallel(8192, 24576, 4)

PLAN = Schedule(kind="1f1b", stages=4, microbatches=8)
GPIPE = Schedule(kind="gpipe", stages=4, microbatches=8)
INTERLEAVED = Schedule(kind="interleaved", stages=4, microbatches=8, chunks=2)
SLOT = (Fraction(1, 3), Fraction(2, 3))  # a forward and a backward pass, t_b = 2*t_f, in slots of both

ZERO_EXAMPLE = 175 * 10**9  # the document's Psi in 5.4


def _resident(plan: Schedule) -> tuple[int, ...]:
    return tuple(schedule.peak_in_flight(plan, stage) for stage in range(plan.stages))


def _steady(plan: Schedule, stage: int) -> Fraction:
    """Forward passes for each backward pass between warm-up and drain."""
    warm = schedule.warm_up(plan, stage)
    kinds = [action.kind for action in schedule.actions(plan, stage)][warm:-warm]
    return Fraction(kinds.count("F"), kinds.count("B"))


def _pipeline_messages(case: Case) -> int:
    """Bytes of one direction over all stages."""
    return sum(stage.full("forward", "send", "pp") for stage in case.stages)


def _share(case: Case, part: str) -> Fraction:
    """What the first stage holds of the layers of all stages."""
    held = [getattr(memory.document_zero_memory(stage.layer_parameters, 1, 0), part) for stage in case.stages]
    return Fraction(held[0], sum(held))


def _heads(case: Case, cp: int) -> tuple[int, int]:
    """First and last head of a context-parallel rank under Ulysses."""
    at = case.job.layout.coordinates(case.job.layout.rank_of(cp=cp)).cp
    many = shapes.attention(case.job, "a2a")["whole"][2]
    return at * many, (at + 1) * many - 1


def _experts_of(case: Case, rank: int) -> tuple[int, int]:
    """The first expert of a rank, and the one behind its last."""
    at, many = case.job.layout.coordinates(rank).ep, _experts_held(case)
    return at * many, (at + 1) * many


def _experts_held(case: Case) -> int:
    """Experts of a layer on a rank."""
    return case.component("experts.fc1").tensors // int(case.place.symbols["moe_layers"])


def _goes_to_experts(row: ExpectedCall) -> bool:
    assert row.varies is not None
    return row.varies.received == "arrived"


def _moe_layers(case: Case) -> int:
    return sum(case.job.is_moe_layer(layer) for layer in range(case.job.num_layers or 0))


def _zero(stage: int, part: str, psi: int = 1, dp: int = 4) -> Fraction:
    return Fraction(getattr(memory.document_zero_memory(psi, dp, stage), part))


def _model(case: Case, *names: str) -> int:
    """Parameters of the whole model's components that begin so."""
    parts = parameters.whole_model(case.job, _RELEASE)
    return sum(part.elements.value for part in parts if part.name.startswith(names))


_MATRICES = ("attention.", "mlp.", "router", "experts.")


def _elements(seed: Seed, part: str) -> int:
    """Elements of all weights of a layer, and so of each optimizer state."""
    names = ("attention.qkv", "attention.proj", "mlp.gate", "mlp.up", "mlp.fc2")
    sizes = [getattr(shapes.weights(seed.one.job)[name], part) for name in names]
    return sum(rows * columns for rows, columns in sizes)


def _degrees(case: Case) -> int:
    degrees = (Axis.TP, Axis.PP, Axis.CP, Axis.EP, Axis.DP)
    return math.prod(case.job.layout.degree(axis) for axis in degrees)


def _field(name: str, case: str = "all") -> Claim:
    """A size that is given."""
    return lambda seed: getattr(seed, case).job.require(name)[0]


def _degree(axis: Axis) -> Claim:
    return lambda seed: seed.all.job.layout.degree(axis)


def _group(role: str) -> Claim:
    return lambda seed: seed.all.job.layout.group_size(role)


def _element_bytes(seed: Seed) -> Value:
    return traffic.element_bytes(seed.all.job.activation_dtype) or 0


def _sequence_parts(seed: Seed) -> Value:
    return int(seed.all.place.symbols["SP"])


# -- what our code gives -------------------------------------------------------------------------------------------------

CHAPTER_0: dict[str, Claim] = {
    "S0-1": _field("micro_batch_size"),
    "S0-2": _field("seq_length"),
    "S0-3": _field("hidden_size"),
    "S0-4": _field("num_layers"),
    "S0-5": _field("num_attention_heads"),
    "S0-6": _field("kv_channels"),
    "S0-7": _field("num_experts"),
    "S0-8": _field("moe_router_topk"),
    "S0-9": _element_bytes,
    "S0-10": _degree(Axis.TP),
    "S0-11": _sequence_parts,
    "S0-12": _degree(Axis.PP),
    "S0-13": _degree(Axis.CP),
    "S0-14": _degree(Axis.EP),
    "S0-15": _degree(Axis.DP),
    "S0-16": lambda seed: _degrees(seed.all),
}

CHAPTER_1: dict[str, Claim] = {
    # 1.2.1: one linear layer
    "S1.2.1-1": lambda seed: seed.one.activation("gathered"),
    "S1.2.1-2": lambda seed: QKV.full,
    "S1.2.1-3": lambda seed: QKV.shard,
    "S1.2.1-4": lambda seed: (*seed.one.activation("gathered")[:2], QKV.shard[1]),
    "S1.2.1-5": lambda seed: ROW.shard,
    "S1.2.1-6": lambda seed: (*seed.one.activation("gathered")[:2], ROW.shard[0]),
    "S1.2.1-7": lambda seed: (*seed.one.activation("gathered")[:2], ROW.shard[1]),
    # 1.2.2: what sequence parallelism cuts
    "S1.2.2-1": lambda seed: seed.plain.activation("norm"),
    "S1.2.2-2": lambda seed: seed.one.activation("norm"),
    "S1.2.2-4": lambda seed: seed.one.buffer("attention.proj", "forward", "out"),
    "S1.2.2-5": lambda seed: seed.plain.off_rank("forward") / seed.one.off_rank("forward"),
    "S1.2.2-6": lambda seed: seed.plain.activation("norm"),
    "S1.2.2-7": lambda seed: seed.one.buffer("mlp.fc2", "forward", "out"),
    # 1.3: weights, gradients, optimizer states, activations
    **{
        claim: lambda seed, name=name, part=part: getattr(shapes.weights(seed.one.job)[name], part)  # type: ignore[misc]
        for claim, name, part in (
            ("S1.3.1-1", "attention.qkv", "full"),
            ("S1.3.1-2", "attention.qkv", "shard"),
            ("S1.3.1-3", "attention.proj", "full"),
            ("S1.3.1-4", "attention.proj", "shard"),
            ("S1.3.1-5", "mlp.gate", "full"),
            ("S1.3.1-6", "mlp.gate", "shard"),
            ("S1.3.1-7", "mlp.up", "full"),
            ("S1.3.1-8", "mlp.up", "shard"),
            ("S1.3.1-9", "mlp.fc2", "full"),
            ("S1.3.1-10", "mlp.fc2", "shard"),
            ("S1.3.1-15", "attention.proj", "shard"),
            ("S1.3.1-17", "mlp.gate", "shard"),
            ("S1.3.1-19", "mlp.up", "shard"),
            ("S1.3.1-21", "mlp.fc2", "shard"),
            ("S1.3.1-24", "mlp.gate", "full"),
            ("S1.3.1-25", "mlp.up", "full"),
            ("S1.3.1-26", "mlp.fc2", "full"),
        )
    },
    "S1.3.1-13": lambda seed: shapes.qkv_width(seed.one.job).value // (seed.one.job.kv_channels or 0),
    "S1.3.1-14": lambda seed: shapes.heads_per_rank(seed.one.job),
    "S1.3.1-16": lambda seed: shapes.weights(seed.one.job)["mlp.gate"].shard[1],
    "S1.3.1-18": lambda seed: shapes.weights(seed.one.job)["mlp.up"].shard[1],
    "S1.3.1-20": lambda seed: shapes.weights(seed.one.job)["mlp.fc2"].shard[0],
    "S1.3.3-1": lambda seed: Fraction(_elements(seed, "shard"), _elements(seed, "full")),
    "S1.3.4-1": lambda seed: seed.one.activation("norm"),
    "S1.3.4-2": lambda seed: seed.one.activation("gathered"),
    "S1.3.4-3": lambda seed: seed.one.activation("qkv"),
    "S1.3.4-4": lambda seed: seed.one.activation("query"),
    "S1.3.4-5": lambda seed: seed.one.activation("partial"),
    "S1.3.4-6": lambda seed: seed.one.buffer("attention.proj", "forward", "out"),
    "S1.3.4-7": lambda seed: seed.one.activation("norm"),
    "S1.3.4-8": lambda seed: seed.one.activation("mlp"),
    "S1.3.4-9": lambda seed: seed.one.activation("partial"),
    "S1.3.4-10": lambda seed: seed.one.buffer("mlp.fc2", "forward", "out"),
    # 1.4, 1.5: group and calls
    "S1.4-1": lambda seed: seed.one.job.layout.group_size("tp"),
    "S1.5-1": lambda seed: seed.one.buffer("attention.qkv", "forward", "in"),
    "S1.5-2": lambda seed: seed.one.buffer("attention.qkv", "forward", "out"),
    "S1.5-3": lambda seed: seed.one.buffer("mlp.fc1", "forward", "in"),
    "S1.5-4": lambda seed: seed.one.buffer("mlp.fc1", "forward", "out"),
    "S1.5-5": lambda seed: seed.one.buffer("attention.proj", "forward", "in"),
    "S1.5-6": lambda seed: seed.one.buffer("attention.proj", "forward", "out"),
    "S1.5-7": lambda seed: seed.one.buffer("mlp.fc2", "forward", "in"),
    "S1.5-8": lambda seed: seed.one.buffer("mlp.fc2", "forward", "out"),
    "S1.5-9": lambda seed: seed.one.number("forward", "all_gather"),
    "S1.5-10": lambda seed: seed.one.number("forward", "reduce_scatter"),
    "S1.5-11": lambda seed: seed.plain.number("forward", "all_reduce"),
    # 1.6: bytes
    "S1.6.1-1": lambda seed: seed.one.own_part("attention.qkv"),
    "S1.6.1-2": lambda seed: seed.one.received("attention.qkv"),
    "S1.6.1-3": lambda seed: seed.one.received("attention.qkv") + seed.one.row("attention.qkv").off_rank_bytes,  # E23
    "S1.6.1-4": lambda seed: (
        seed.one.row("attention.proj").off_rank_bytes / seed.one.row("attention.qkv").off_rank_bytes
    ),
    "S1.6.2-1": lambda seed: shapes.sequence_shard(seed.one.job).value,
    "S1.6.2-2": lambda seed: seed.one.own_part("attention.qkv"),
    "S1.6.2-3": lambda seed: seed.one.own_part("attention.qkv"),
    "S1.6.2-4": lambda seed: seed.one.received("attention.qkv"),
    "S1.6.2-5": lambda seed: seed.one.received("attention.qkv"),
    "S1.6.2-6": lambda seed: seed.one.own_part("attention.qkv") + seed.one.received("attention.qkv"),
    "S1.6.2-7": lambda seed: seed.one.row("attention.qkv").payload_bytes,
    "S1.6.2-8": lambda seed: seed.one.row("attention.proj").payload_bytes,
    "S1.6.3-1": lambda seed: seed.one.number("forward", "all_gather"),
    "S1.6.3-2": lambda seed: seed.one.number("forward", "reduce_scatter"),
    "S1.6.3-3": lambda seed: seed.one.number("forward"),
    "S1.6.3-4": lambda seed: seed.one.full("forward"),
    "S1.6.3-5": lambda seed: seed.one.full("forward"),
    "S1.6.3-6": lambda seed: seed.tp.full("forward"),
    "S1.6.3-7": lambda seed: seed.tp.full("backward"),
    "S1.6.3-8": lambda seed: seed.tp.full(),
    # 1.7: what sequence parallelism saves
    "S1.7.1-1": lambda seed: seed.plain.number("forward", "all_reduce"),
    "S1.7.1-2": lambda seed: seed.plain.off_rank("forward") / seed.one.off_rank("forward"),
    "S1.7.1-3": lambda seed: Fraction(seed.plain.activation("norm")[1], seed.one.activation("norm")[1]),
    "S1.7.3-1": lambda seed: Fraction(seed.plain.activation("norm")[1], seed.one.activation("norm")[1]),
    # 1.8: the flow of a layer
    "S1.8-1": lambda seed: seed.one.activation("norm"),
    "S1.8-2": lambda seed: seed.one.activation("norm"),
    "S1.8-3": lambda seed: seed.one.buffer("attention.qkv", "forward", "out"),
    "S1.8-4": lambda seed: seed.one.activation("qkv"),
    "S1.8-5": lambda seed: seed.one.activation("value"),
    "S1.8-6": lambda seed: seed.one.activation("attention"),
    "S1.8-7": lambda seed: seed.one.activation("partial"),
    "S1.8-8": lambda seed: seed.one.buffer("attention.proj", "forward", "out"),
    "S1.8-9": lambda seed: seed.one.activation("norm"),
    "S1.8-10": lambda seed: seed.one.activation("norm"),
    "S1.8-11": lambda seed: seed.one.buffer("mlp.fc1", "forward", "out"),
    "S1.8-12": lambda seed: seed.one.activation("mlp"),
    "S1.8-13": lambda seed: seed.one.activation("mlp"),
    "S1.8-14": lambda seed: seed.one.activation("mlp"),
    "S1.8-15": lambda seed: seed.one.activation("partial"),
    "S1.8-16": lambda seed: seed.one.buffer("mlp.fc2", "forward", "out"),
    "S1.8-17": lambda seed: seed.one.buffer("mlp.fc2", "backward", "in"),
    "S1.8-18": lambda seed: seed.one.buffer("mlp.fc2", "backward", "out"),
    "S1.8-19": lambda seed: seed.one.buffer("mlp.fc1", "backward", "in"),
    "S1.8-20": lambda seed: seed.one.buffer("mlp.fc1", "backward", "out"),
    "S1.8-21": lambda seed: seed.one.buffer("attention.proj", "backward", "out"),
    "S1.8-22": lambda seed: seed.one.buffer("attention.qkv", "backward", "out"),
    "S1.8-23": lambda seed: seed.one.own_part("attention.qkv"),
    "S1.8-24": lambda seed: seed.one.received("attention.qkv"),
    "S1.8-25": lambda seed: seed.one.own_part("mlp.fc1"),
    "S1.8-26": lambda seed: seed.one.received("mlp.fc1"),
    "S1.8-27": lambda seed: seed.one.own_part("mlp.fc2", "backward"),
    "S1.8-28": lambda seed: seed.one.received("mlp.fc2", "backward"),
    "S1.8-29": lambda seed: seed.one.own_part("attention.proj", "backward"),
    "S1.8-30": lambda seed: seed.one.received("attention.proj", "backward"),
    "S1.8-31": lambda seed: seed.one.row("attention.proj").off_rank_bytes,  # E23, and the three like it
    "S1.8-32": lambda seed: seed.one.received("attention.proj"),
    "S1.8-33": lambda seed: seed.one.row("mlp.fc2").off_rank_bytes,
    "S1.8-34": lambda seed: seed.one.received("mlp.fc2"),
    "S1.8-35": lambda seed: seed.one.row("mlp.fc1", "backward").off_rank_bytes,
    "S1.8-36": lambda seed: seed.one.received("mlp.fc1", "backward"),
    "S1.8-37": lambda seed: seed.one.row("attention.qkv", "backward").off_rank_bytes,
    "S1.8-38": lambda seed: seed.one.received("attention.qkv", "backward"),
    "S1.8-39": lambda seed: seed.one.number("backward", "all_gather"),
    "S1.8-40": lambda seed: seed.one.number("backward", "reduce_scatter"),
    "S1.8-41": lambda seed: seed.one.number("backward"),
    "S1.8-42": lambda seed: seed.one.row("mlp.fc2", "backward").payload_bytes,
    "S1.8-43": lambda seed: seed.one.full("backward"),
}

CHAPTER_2: dict[str, Claim] = {
    # 2.1: stages and the 1F1B schedule
    "S2.1-1": lambda seed: seed.pp.job.layout.degree(Axis.PP),
    "S2.1-2": lambda seed: len(seed.pp.layers(0)),
    "S2.1-3": lambda seed: tuple(schedule.warm_up(PLAN, stage) for stage in range(4)),
    "S2.1-4": lambda seed: _steady(PLAN, 0),
    "S2.1-6": lambda seed: seed.pp.job.layout.degree(Axis.PP),
    "S2.1-7": _field("num_microbatches", "pp"),
    # 2.2: layers of a stage, messages, schedules
    "S2.2-1": lambda seed: len(seed.pp.layers(0)),
    "S2.2-3": lambda seed: seed.pp.layers(0)[-1],
    "S2.2-4": lambda seed: seed.pp.layers(1)[0],
    "S2.2-5": lambda seed: seed.bare.buffer("activations", "forward", "out", "send"),
    "S2.2-6": lambda seed: seed.bare.message().payload_bytes,
    "S2.2.1-1": lambda seed: shapes.activations(seed.pipeline(sequence_parallel=False).job)["norm"],
    "S2.2.1-2": lambda seed: seed.pipeline(sequence_parallel=False).buffer("activations", "forward", "out", "send"),
    "S2.2.1-3": lambda seed: seed.pp.activation("norm"),
    "S2.2.1-4": lambda seed: seed.pp.buffer("activations", "forward", "out", "send"),
    "S2.2.1-5": lambda seed: seed.all.buffer("activations", "forward", "out", "send"),
    "S2.2.2-1": lambda seed: schedule.warm_up(GPIPE, 0),
    "S2.2.2-2": lambda seed: schedule.peak_in_flight(GPIPE, 0),
    "S2.2.2-3": lambda seed: max(schedule.in_flight(GPIPE, 0)),
    "S2.2.2-4": lambda seed: tuple(schedule.warm_up(PLAN, stage) for stage in range(4)),
    "S2.2.2-5": lambda seed: schedule.peak_in_flight(PLAN, 0),
    "S2.2.2-6": lambda seed: seed.vpp.place.chunk_count,
    "S2.2.2-7": lambda seed: len(seed.vpp.layers(0, 0)),
    "S2.2.2-8": lambda seed: schedule.peak_in_microbatches(INTERLEAVED, 0) / schedule.peak_in_microbatches(PLAN, 0),
    "S2.2.2-9": lambda seed: Fraction(seed.vpp.stage(1).number(role="pp"), seed.pp.stage(1).number(role="pp")),
    "S2.2.2-11": lambda seed: len({a.kind for a in schedule.actions(_zero_bubble(), 0)} - {"F"}),
    # 2.3: resident micro-batches, bubble, message sizes
    "S2.3.1-1": lambda seed: len(seed.pp.layers(0)),
    "S2.3.1-2": lambda seed: _resident(PLAN),
    "S2.3.1-3": lambda seed: schedule.peak_in_flight(PLAN, 0),
    "S2.3.1-4": lambda seed: schedule.peak_in_flight(PLAN, 1),
    "S2.3.1-5": lambda seed: schedule.peak_in_flight(PLAN, 2),
    "S2.3.1-6": lambda seed: schedule.peak_in_flight(PLAN, 3),
    "S2.3.2-1": lambda seed: schedule.bubble(PLAN, 1, 2).of_total,
    "S2.3.2-2": lambda seed: schedule.bubble(PLAN, *SLOT).idle,
    "S2.3.2-3": lambda seed: schedule.bubble(PLAN, *SLOT).total,
    "S2.3.2-4": lambda seed: schedule.bubble(PLAN, *SLOT).of_total,
    "S2.3.2-5": lambda seed: schedule.bubble(Schedule(kind="1f1b", stages=4, microbatches=1_000_000), *SLOT).of_total,
    "S2.3.3-1": lambda seed: seed.pp.buffer("activations", "forward", "out", "send"),
    "S2.3.3-2": lambda seed: seed.pp.message().payload_bytes,
    "S2.3.3-3": lambda seed: seed.pp.message().payload_bytes,
    "S2.3.3-4": lambda seed: seed.pp.stage(1).message("backward").payload_bytes,
    # 2.4: what a stage holds
    "S2.4-1": lambda seed: _share(seed.pp, "parameters"),
    "S2.4-2": lambda seed: _share(seed.pp, "gradients"),
    "S2.4-3": lambda seed: _share(seed.pp, "optimizer"),
    "S2.4-4": lambda seed: Fraction(len(seed.pp.layers(0)), sum(len(seed.pp.layers(stage)) for stage in range(4))),
    "S2.4-5": lambda seed: len(seed.pp.layers(0)),
    "S2.4-6": lambda seed: len(seed.pp.layers(0)),
    "S2.4-7": lambda seed: _resident(PLAN),
    "S2.4-9": lambda seed: len(seed.pp.layers(0)),
    # 2.5, 2.6: neighbours and messages
    "S2.5-1": lambda seed: len({row.peer for row in seed.pp.stage(1).rows(role="pp")}),
    "S2.5-2": lambda seed: len({row.peer for row in seed.pp.stage(0).rows(role="pp")}),
    "S2.6-1": lambda seed: seed.pp.buffer("activations", "forward", "in", "send"),
    "S2.6-2": lambda seed: seed.pp.stage(1).buffer("gradients", "backward", "in", "send"),
    # 2.7: interleaving
    "S2.7-1": lambda seed: _resident(PLAN),
    "S2.7-2": lambda seed: seed.vpp.place.chunk_count,
    "S2.7-3": lambda seed: schedule.bubble(INTERLEAVED, *SLOT).idle,
    "S2.7-4": lambda seed: Fraction(seed.vpp.stage(1).number(role="pp"), seed.pp.stage(1).number(role="pp")),
    # 2.8: one micro-batch through the stages, layers from 1
    "S2.8-1": lambda seed: seed.pp.layers(0)[0] + 1,
    "S2.8-2": lambda seed: seed.pp.layers(0)[-1] + 1,
    "S2.8-3": lambda seed: seed.pp.layers(1)[0] + 1,
    "S2.8-4": lambda seed: seed.pp.layers(1)[-1] + 1,
    "S2.8-5": lambda seed: seed.pp.layers(2)[0] + 1,
    "S2.8-6": lambda seed: seed.pp.layers(2)[-1] + 1,
    "S2.8-7": lambda seed: seed.pp.layers(3)[0] + 1,
    "S2.8-8": lambda seed: seed.pp.layers(3)[-1] + 1,
    "S2.8-9": lambda seed: seed.pass_.stage(0).message().payload_bytes,
    "S2.8-10": lambda seed: seed.pass_.stage(1).message().payload_bytes,
    "S2.8-11": lambda seed: seed.pass_.stage(2).message().payload_bytes,
    "S2.8-12": lambda seed: seed.pass_.stage(3).message("backward").payload_bytes,
    "S2.8-13": lambda seed: seed.pass_.stage(2).message("backward").payload_bytes,
    "S2.8-14": lambda seed: seed.pass_.stage(1).message("backward").payload_bytes,
    "S2.8-15": lambda seed: seed.pass_.stage(0).row("attention.qkv").calls,
    "S2.8-16": lambda seed: seed.pass_.stage(1).row("attention.qkv").calls,
    "S2.8-17": lambda seed: seed.pass_.stage(2).row("attention.qkv").calls,
    "S2.8-18": lambda seed: seed.pass_.stage(3).row("attention.qkv").calls,
    "S2.8-19": lambda seed: seed.pass_.stage(3).row("attention.qkv", "backward").calls,
    "S2.8-20": lambda seed: seed.pass_.stage(2).row("attention.qkv", "backward").calls,
    "S2.8-21": lambda seed: seed.pass_.stage(1).row("attention.qkv", "backward").calls,
    "S2.8-22": lambda seed: seed.pass_.stage(0).row("attention.qkv", "backward").calls,
    "S2.8-23": lambda seed: seed.one.number("forward", component="attention."),
    "S2.8-24": lambda seed: seed.one.number("forward", component="mlp."),
    # 2.9: the uneven example
    "S2.9-2": lambda seed: len(seed.uneven.layers(0)),
    "S2.9-3": lambda seed: len(seed.uneven.layers(1)),
    "S2.9-4": lambda seed: len(seed.uneven.layers(2)),
    "S2.9-7": lambda seed: sum(len(seed.uneven.layers(stage)) for stage in range(4)),
}

CHAPTER_3: dict[str, Claim] = {
    # 3.1: what is cut
    "S3.1-1": lambda seed: shapes.cp_tokens(seed.ring.job).value,
    "S3.1-2": _field("micro_batch_size", "ring"),
    "S3.1-3": _field("seq_length", "ring"),
    "S3.1-4": lambda seed: seed.ring.activation("attention")[2],
    "S3.1-5": lambda seed: shapes.heads_per_rank(seed.ring.job),
    "S3.1-6": _field("kv_channels", "ring"),
    "S3.1-7": lambda seed: seed.ring.job.layout.group_size("cp"),
    "S3.1-8": lambda seed: shapes.cp_tokens(seed.ring.job).value,
    "S3.1-9": lambda seed: traffic.element_bytes(seed.ring.job.activation_dtype) or 0,
    "S3.1-10": lambda seed: Fraction(seed.ring.psi, seed.whole.psi),
    "S3.1-11": lambda seed: Fraction(seed.ring.row("gradients", "other").in_elems, seed.whole.psi),
    "S3.1-12": lambda seed: _zero(0, "optimizer", seed.ring.psi) / _zero(0, "optimizer", seed.whole.psi),
    "S3.1-13": lambda seed: seed.whole.activation("gathered"),
    "S3.1-14": lambda seed: seed.ring.activation("gathered"),
    "S3.1-15": lambda seed: seed.ring.activation("query"),
    "S3.1-16": lambda seed: shapes.attention(seed.gather.job, "all_gather")["scores"],
    "S3.1-17": lambda seed: seed.ring.activation("attention"),
    "S3.1-18": lambda seed: seed.ring.number(role="cp", component="mlp"),
    "S3.1-19": lambda seed: seed.ring.number(role="cp", component="norm"),
    # 3.2: ring
    "S3.2.2-1": lambda seed: shapes.attention(seed.ring.job, "p2p")["scores"],
    "S3.2.2-2": lambda seed: seed.ring.row("attention: K and V", op="recv").calls + 1,  # and the own block
    "S3.2.3-1": lambda seed: seed.ring.number("forward", "send", "cp"),
    "S3.2.3-2": lambda seed: seed.ring.row("attention: K and V", op="send").payload_bytes // 2,
    "S3.2.3-3": lambda seed: seed.ring.row("attention: K and V", op="send").payload_bytes,
    "S3.2.3-4": lambda seed: seed.ring.row("attention: K and V", op="send").payload_bytes,
    "S3.2.3-5": lambda seed: seed.ring.off_rank("forward", role="cp"),
    "S3.2.3-6": lambda seed: seed.ring.off_rank("forward", role="cp"),
    "S3.2.3-7": lambda seed: seed.cp("p2p", 4).off_rank("forward", role="cp"),  # E15
    "S3.2.4-1": lambda seed: seed.ring.activation("attention"),
    "S3.2.4-2": lambda seed: seed.ring.off_rank("backward", role="cp"),
    "S3.2.4-3": lambda seed: seed.ring.off_rank(role="cp"),
    "S3.2.4-4": lambda seed: seed.ring.off_rank(role="cp"),
    # 3.3: all-gather
    "S3.3.2-1": lambda seed: seed.gather.activation("query"),
    "S3.3.2-2": lambda seed: seed.gather.buffer("attention: K", "forward", "out"),
    "S3.3.2-3": lambda seed: seed.gather.buffer("attention: V", "forward", "out"),
    "S3.3.2-4": lambda seed: seed.gather.activation("attention"),
    "S3.3.3-1": lambda seed: seed.gather.buffer("attention: K", "forward", "out"),
    "S3.3.3-2": lambda seed: seed.gather.buffer("attention: V", "forward", "out"),
    "S3.3.3-3": lambda seed: seed.gather.own_part("attention: K"),
    "S3.3.3-4": lambda seed: seed.gather.received("attention: K"),
    "S3.3.3-5": lambda seed: seed.gather.full("forward", role="cp"),
    "S3.3.3-6": lambda seed: shapes.attention(seed.gather.job, "all_gather")["scores"],
    "S3.3.3-7": lambda seed: seed.gather.activation("attention"),
    "S3.3.3-8": lambda seed: seed.gather.full("forward", role="cp"),
    "S3.3.3-9": lambda seed: seed.gather.full("forward", role="cp"),
    "S3.3.4-1": lambda seed: seed.gather.activation("attention"),
    "S3.3.4-2": lambda seed: seed.gather.activation("query"),
    "S3.3.4-3": lambda seed: seed.gather.buffer("attention: dK", "backward", "in"),
    "S3.3.4-4": lambda seed: seed.gather.buffer("attention: dV", "backward", "in"),
    "S3.3.4-5": lambda seed: seed.gather.buffer("attention: dK", "backward", "out"),
    "S3.3.4-6": lambda seed: seed.gather.buffer("attention: dV", "backward", "out"),
    "S3.3.4-7": lambda seed: seed.gather.full("backward", role="cp"),
    "S3.3.4-8": lambda seed: seed.gather.full(role="cp"),
    "S3.3.4-9": lambda seed: seed.gather.off_rank(role="cp") / seed.ring.off_rank(role="cp"),  # E24
    # 3.4: Ulysses
    "S3.4.2-1": lambda seed: shapes.attention(seed.ulysses.job, "a2a")["local"],
    "S3.4.2-2": lambda seed: shapes.attention(seed.ulysses.job, "a2a")["whole"],
    "S3.4.2-3": lambda seed: shapes.attention(seed.ulysses.job, "a2a")["whole"][2],
    "S3.4.2-4": lambda seed: shapes.attention(seed.ulysses.job, "a2a")["whole"],
    "S3.4.2-5": lambda seed: shapes.attention(seed.ulysses.job, "a2a")["local"],
    "S3.4.3-1": lambda seed: shapes.attention(seed.ulysses.job, "a2a")["local"],
    "S3.4.3-2": lambda seed: _heads(seed.ulysses, 0),
    "S3.4.3-3": lambda seed: _heads(seed.ulysses, 1),
    "S3.4.3-4": lambda seed: (
        seed.ulysses.row("attention: Q").off_rank_bytes / seed.ulysses.row("attention: Q").payload_bytes
    ),
    "S3.4.3-5": lambda seed: seed.ulysses.row("attention: Q").off_rank_bytes,  # E14, and all that follow from it
    "S3.4.3-6": lambda seed: seed.ulysses.row("attention: Q").off_rank_bytes,
    "S3.4.3-7": lambda seed: sum(seed.ulysses.row(f"attention: {part}").calls for part in "QKV"),
    "S3.4.3-8": lambda seed: sum(seed.ulysses.row(f"attention: {part}").off_rank_bytes for part in "QKV"),
    "S3.4.3-9": lambda seed: shapes.attention(seed.ulysses.job, "a2a")["whole"],
    "S3.4.3-10": lambda seed: shapes.attention(seed.ulysses.job, "a2a")["scores"],
    "S3.4.3-11": lambda seed: shapes.attention(seed.ulysses.job, "a2a")["local"],
    "S3.4.3-12": lambda seed: seed.ulysses.row("attention: O").off_rank_bytes,
    "S3.4.3-13": lambda seed: seed.ulysses.number("forward", "all_to_all", "cp"),
    "S3.4.3-14": lambda seed: seed.ulysses.off_rank("forward", role="cp"),
    "S3.4.4-1": lambda seed: shapes.attention(seed.ulysses.job, "a2a")["local"],
    "S3.4.4-2": lambda seed: shapes.attention(seed.ulysses.job, "a2a")["whole"],
    "S3.4.4-3": lambda seed: seed.ulysses.row("attention: dO", "backward").off_rank_bytes,
    "S3.4.4-4": lambda seed: sum(seed.ulysses.row(f"attention: d{p}", "backward").off_rank_bytes for p in "QKV"),
    "S3.4.4-5": lambda seed: seed.ulysses.number("backward", "all_to_all", "cp"),
    "S3.4.4-6": lambda seed: seed.ulysses.off_rank("backward", role="cp"),
    "S3.4.4-7": lambda seed: seed.ulysses.off_rank(role="cp"),
    "S3.4.5-1": lambda seed: sum(seed.ulysses.row(f"attention: {part}").calls for part in "QKV"),
    # 3.4.6: the comparison, all off rank (E24)
    "S3.4.6-1": lambda seed: seed.ring.off_rank("forward", role="cp"),
    "S3.4.6-2": lambda seed: seed.gather.off_rank("forward", role="cp"),
    "S3.4.6-3": lambda seed: seed.ulysses.off_rank("forward", role="cp"),
    "S3.4.6-4": lambda seed: seed.ring.off_rank("backward", role="cp"),
    "S3.4.6-5": lambda seed: seed.gather.off_rank("backward", role="cp"),
    "S3.4.6-6": lambda seed: seed.ulysses.off_rank("backward", role="cp"),
    "S3.4.6-7": lambda seed: seed.ring.off_rank(role="cp"),
    "S3.4.6-8": lambda seed: seed.gather.off_rank(role="cp"),
    "S3.4.6-9": lambda seed: seed.ulysses.off_rank(role="cp"),
    "S3.4.6-11": lambda seed: seed.gather.received("attention: K") + seed.gather.received("attention: V"),
}

CHAPTER_4: dict[str, Claim] = {
    # 4.1 to 4.4: shapes and groups
    "S4.1-1": lambda seed: shapes.weights(seed.ep.job)["router"].full,
    "S4.1-2": _field("moe_router_topk", "ep"),
    "S4.1-3": _field("num_experts", "ep"),
    "S4.1-4": lambda seed: shapes.weights(seed.ep.job)["experts.gate"].full,
    "S4.1-5": lambda seed: shapes.weights(seed.ep.job)["experts.up"].full,
    "S4.1-6": lambda seed: shapes.weights(seed.ep.job)["experts.fc2"].full,
    "S4.2-1": lambda seed: shapes.routing(seed.ep.job)["input"],
    "S4.2-2": lambda seed: shapes.routing(seed.ep.job)["chosen"],
    "S4.2-3": lambda seed: _experts_held(seed.ep),
    "S4.3-1": lambda seed: Fraction(
        seed.ep.component("router").elements.value, math.prod(shapes.weights(seed.ep.job)["router"].full)
    ),
    "S4.3-2": lambda seed: _experts_of(seed.ep, 1),
    "S4.3-3": lambda seed: seed.ep.activation("norm"),
    "S4.4-1": lambda seed: seed.ep.job.layout.group_size("ep"),
    # 4.5, 4.6: calls and bytes
    "S4.5-1": lambda seed: seed.ep.number("forward", "all_to_all", "ep"),
    "S4.5-2": lambda seed: seed.ep.number("backward", "all_to_all", "ep"),
    "S4.6-1": lambda seed: Fraction(
        seed.ep.row("experts.dispatch").payload_bytes, shapes.routing(seed.ep.job)["input"][0]
    ),
    "S4.6-2": lambda seed: shapes.routing(seed.ep.job)["input"][0],
    "S4.6-3": lambda seed: (
        seed.ep.row("experts.dispatch").off_rank_bytes / seed.ep.row("experts.dispatch").payload_bytes
    ),
    "S4.6-4": lambda seed: seed.ep.row("experts.dispatch").off_rank_bytes,
    "S4.6-5": lambda seed: seed.ep.row("experts.combine").off_rank_bytes,
    "S4.6-6": lambda seed: seed.ep.off_rank("forward", role="ep"),
    "S4.6-7": lambda seed: seed.ep.off_rank("backward", role="ep"),
    "S4.6-8": lambda seed: seed.ep.off_rank(op="all_to_all", role="ep"),
    "S4.6-9": lambda seed: seed.ep.off_rank(op="all_to_all", role="ep"),
    # 4.7: the flow of a layer
    "S4.7-1": lambda seed: seed.ep.activation("norm"),
    "S4.7-2": lambda seed: shapes.weights(seed.ep.job)["router"].shard,
    "S4.7-3": lambda seed: shapes.routing(seed.ep.job)["scores"],
    "S4.7-4": lambda seed: shapes.routing(seed.ep.job)["chosen"],
    "S4.7-5": lambda seed: seed.ep.row("experts.dispatch").off_rank_bytes,
    "S4.7-6": lambda seed: seed.ep.received("experts.dispatch"),
    "S4.7-7": lambda seed: seed.ep.row("experts.combine").off_rank_bytes,
    "S4.7-8": lambda seed: seed.ep.received("experts.combine"),
    "S4.7-9": lambda seed: Fraction(seed.ep.row("experts.dispatch").out_elems, 8192),  # E16
    "S4.7-10": lambda seed: seed.ep.activation("norm"),
    "S4.7-11": lambda seed: seed.ep.activation("norm"),
    "S4.7-12": lambda seed: int(_goes_to_experts(seed.ep.row("experts.combine", "backward"))),
    "S4.7-13": lambda seed: seed.ep.row("experts.combine", "backward").off_rank_bytes,
    "S4.7-14": lambda seed: seed.ep.row("experts.dispatch", "backward").off_rank_bytes,
    "S4.7-15": lambda seed: seed.ep.row("router gradients", "other").payload_bytes,
    "S4.7-16": lambda seed: seed.ep.number(op="all_reduce", role="ep", component="expert"),
    # 4.9: balance and capacity
    "S4.9-2": lambda seed: shapes.routing(seed.ep.job)["input"][0],
    "S4.9-4": lambda seed: Fraction(seed.capacity(), shapes.routing(seed.ep.job)["input"][0]),
    "S4.9-9": lambda seed: seed.capacity(),
    "S4.9-10": lambda seed: seed.capacity(),
    "S4.9-13": lambda seed: Fraction(seed.capacity(1.5), seed.capacity()) - 1,
    "S4.9-15": lambda seed: _expert_buffer(seed),
    "S4.9-20": lambda seed: seed.capacity(),
}

CHAPTER_5: dict[str, Claim] = {
    # 5.1, 5.2: memory
    "S5.1-1": lambda seed: _zero(1, "optimizer") / _zero(0, "optimizer"),
    "S5.1-2": lambda seed: (
        (_zero(2, "optimizer") + _zero(2, "gradients")) / (_zero(0, "optimizer") + _zero(0, "gradients"))
    ),
    "S5.1-3": lambda seed: _zero(3, "total") / _zero(0, "total"),
    **{
        f"S5.2-{4 * stage + number}": lambda seed, stage=stage, part=part: _zero(stage, part)  # type: ignore[misc]
        for stage in range(4)
        for number, part in enumerate(("parameters", "gradients", "optimizer", "total"), 1)
    },
    # 5.3: calls
    "S5.3-1": lambda seed: _zero(1, "parameters") / _zero(0, "parameters"),
    "S5.3-2": lambda seed: _zero(1, "gradients") / _zero(0, "gradients"),
    "S5.3-3": lambda seed: _zero(2, "parameters") / _zero(0, "parameters"),
    "S5.3-4": lambda seed: seed.zero(1).number("forward"),
    "S5.3-5": lambda seed: seed.zero(1).number(component="gradients"),  # a reduce-scatter: E12
    "S5.3-7": lambda seed: seed.zero(2).number("forward"),
    "S5.3-8": lambda seed: seed.zero(2).number(op="reduce_scatter", component="gradients"),
    "S5.3-9": lambda seed: seed.zero(2).number(op="all_gather", component="parameters"),
    "S5.3-10": lambda seed: seed.zero(3).per_layer("forward", "parameters"),
    "S5.3-11": lambda seed: seed.zero(3).per_layer("backward", "parameters"),
    "S5.3-12": lambda seed: seed.zero(3).per_layer("backward", "gradients"),
    # 5.4, 5.5: bytes in multiples of the parameters
    "S5.4-1": lambda seed: seed.zero(0).in_psi("forward"),
    "S5.4-2": lambda seed: seed.zero(0).in_psi(op="all_reduce", component="gradients"),
    "S5.4-3": lambda seed: seed.zero(0).in_psi(),
    "S5.4-4": lambda seed: seed.zero(1).in_psi("forward"),
    "S5.4-5": lambda seed: seed.zero(1).in_psi(),
    "S5.4-6": lambda seed: seed.zero(1).in_psi(),
    "S5.4-7": lambda seed: seed.zero(2).in_psi("forward"),
    "S5.4-8": lambda seed: seed.zero(2).in_psi(op="reduce_scatter", component="gradients"),
    "S5.4-9": lambda seed: seed.zero(2).in_psi(op="all_gather", component="parameters"),
    "S5.4-10": lambda seed: seed.zero(2).in_psi(),
    "S5.4-11": lambda seed: seed.zero(3).in_psi("forward"),
    "S5.4-12": lambda seed: seed.zero(3).in_psi("backward"),
    "S5.4-13": lambda seed: seed.zero(3).in_psi(),
    "S5.4-14": lambda seed: seed.zero(2).in_psi() - seed.zero(0).in_psi(),
    "S5.4-15": lambda seed: seed.zero(3).in_psi() - seed.zero(0).in_psi(),
    "S5.4-17": lambda seed: _zero(3, "total", ZERO_EXAMPLE),
    "S5.4-18": lambda seed: _zero(0, "total", ZERO_EXAMPLE),  # E19, and the next two
    "S5.4-19": lambda seed: _zero(3, "total", ZERO_EXAMPLE),
    "S5.4-20": lambda seed: _zero(3, "total", ZERO_EXAMPLE, dp=32),
    "S5.4-22": lambda seed: seed.zero(3).in_psi("backward") * ZERO_EXAMPLE,
    "S5.5-1": lambda seed: seed.zero(0).in_psi(component="gradients"),
    # 5.7: gradient accumulation
    "S5.7.1-2": lambda seed: seed.zero(0, num_microbatches=8).number() - seed.zero(0).number(),
    "S5.7.1-3": lambda seed: seed.zero(0, num_microbatches=8).number(op="all_reduce"),
    "S5.7.2-1": lambda seed: _sequences_of_a_pass(seed.case(num_microbatches=None, global_batch_size=16)),
    "S5.7.3-1": lambda seed: seed.zero(0).in_psi(),
    "S5.7.3-2": lambda seed: Fraction(8, seed.zero(0, num_microbatches=8).number(op="all_reduce")),
    "S5.7.4-1": _field("num_microbatches", "pp"),
    "S5.7.4-2": lambda seed: seed.pipeline(world_size=64).number(op="all_reduce", role="dp_cp"),
    "S5.7.5-1": lambda seed: schedule.peak_in_flight(Schedule(kind="1f1b", stages=1, microbatches=8), 0),
    "S5.7.5-2": lambda seed: schedule.peak_in_flight(PLAN, 0),
    "S5.7.6-1": lambda seed: seed.zero(0, num_microbatches=8).job.global_batch_size or 0,
    "S5.7.6-2": lambda seed: seed.zero(0, num_microbatches=None, global_batch_size=64).job.num_microbatches or 0,
    "S5.7.6-3": lambda seed: schedule.bubble(PLAN, *SLOT).of_total,
    "S5.7.7-3": lambda seed: (seed.folded.job.global_batch_size or 0) * 8192,
}

CHAPTER_6: dict[str, Claim] = {
    # 6.1 to 6.4: model, ranks, data
    "S6.1-1": _field("num_layers"),
    "S6.1-2": _field("hidden_size"),
    "S6.1-3": _field("num_attention_heads"),
    "S6.1-4": _field("kv_channels"),
    "S6.1-5": _field("num_experts"),
    "S6.1-6": _field("moe_router_topk"),
    "S6.1-7": _element_bytes,
    "S6.1-8": lambda seed: Fraction(seed.all.job.num_layers or 0, _moe_layers(seed.all)),
    "S6.1-9": lambda seed: _moe_layers(seed.all),
    "S6.1-10": lambda seed: sum(stage.place.symbols["dense_layers"] for stage in seed.all.stages),
    "S6.2-1": _degree(Axis.TP),
    "S6.2-2": _degree(Axis.PP),
    "S6.2-3": _degree(Axis.CP),
    "S6.2-4": _degree(Axis.EP),
    "S6.2-5": _degree(Axis.DP),
    "S6.2-6": _sequence_parts,
    "S6.2-7": lambda seed: len(seed.all.layers(0)),
    "S6.2-8": lambda seed: _experts_held(seed.all),
    "S6.2-9": lambda seed: _degrees(seed.all),
    "S6.3-1": lambda seed: tuple(seed.all.job.layout.rank_of(**{axis: 1}) for axis in ("tp", "pp", "cp", "ep", "dp")),
    "S6.3-2": _group("tp"),
    "S6.3-3": _group("dp"),
    "S6.3-4": _group("ep"),
    "S6.3-5": _group("cp"),
    "S6.3-6": _group("pp"),
    "S6.3-7": lambda seed: seed.all.job.layout.group_of("tp", 0) or (),
    "S6.3-8": lambda seed: seed.all.job.layout.group_of("dp", 0) or (),
    "S6.3-9": lambda seed: seed.all.job.layout.group_of("ep", 0) or (),
    "S6.3-10": lambda seed: seed.all.job.layout.group_of("cp", 0) or (),
    "S6.4-2": _field("seq_length"),
    "S6.4-3": _field("micro_batch_size"),
    "S6.4-4": lambda seed: shapes.cp_tokens(seed.all.job).value,
    "S6.4-7": lambda seed: seed.all.activation("norm"),
    "S6.4-8": lambda seed: shapes.sequence_shard(seed.all.job).value,
    "S6.4-9": _sequence_parts,
    # 6.5: one micro-batch forward
    "S6.5-2": lambda seed: seed.all.activation("norm"),
    "S6.5-3": lambda seed: len(seed.all.layers(0)),
    "S6.5-5": lambda seed: seed.all.activation("norm"),
    "S6.5-10": lambda seed: seed.all.row("attention.qkv").group_size,
    "S6.5-11": lambda seed: Fraction(shapes.heads_per_rank(seed.all.job), 64),
    "S6.5-12": lambda seed: shapes.heads_per_rank(seed.all.job),
    "S6.5-14": lambda seed: seed.all.activation("query")[2],
    "S6.5-16": _degree(Axis.CP),
    "S6.5-18": lambda seed: seed.all.row("attention: Q").group_size,
    "S6.5-21": lambda seed: sum(seed.all.row(f"attention: {part}").off_rank_bytes for part in "QKV"),
    "S6.5-22": lambda seed: seed.all.row("attention: Q").off_rank_bytes,
    "S6.5-23": lambda seed: sum(seed.all.row(f"attention: {part}").off_rank_bytes for part in "QKV"),
    "S6.5-28": lambda seed: seed.all.row("attention: O").off_rank_bytes,
    "S6.5-29": lambda seed: seed.all.row("attention: O").off_rank_bytes,
    "S6.5-30": lambda seed: sum(row.off_rank_bytes for row in seed.all.rows("forward", role="cp")),
    "S6.5-34": lambda seed: shapes.routing(seed.all.job)["scores"],
    "S6.5-35": lambda seed: shapes.routing(seed.all.job)["chosen"],
    "S6.5-36": lambda seed: seed.all.row("experts.dispatch").group_size,
    "S6.5-37": lambda seed: (
        seed.all.row("experts.dispatch").off_rank_bytes / seed.all.row("experts.dispatch").payload_bytes
    ),
    "S6.5-38": lambda seed: seed.all.row("experts.dispatch").off_rank_bytes,
    "S6.5-39": lambda seed: seed.all.row("experts.dispatch").off_rank_bytes,
    "S6.5-40": lambda seed: _experts_held(seed.all),
    "S6.5-41": lambda seed: _experts_held(seed.all),
    "S6.5-42": lambda seed: shapes.weights(seed.all.job)["experts.gate"].shard,
    "S6.5-43": lambda seed: shapes.weights(seed.all.job)["experts.up"].shard,
    "S6.5-44": lambda seed: shapes.weights(seed.all.job)["experts.fc2"].shard,
    "S6.5-45": lambda seed: seed.all.row("experts.combine").off_rank_bytes,
    "S6.5-46": lambda seed: shapes.weights(seed.all.job)["mlp.gate"].shard,
    "S6.5-47": lambda seed: shapes.weights(seed.all.job)["mlp.up"].shard,
    "S6.5-48": lambda seed: shapes.weights(seed.all.job)["mlp.fc2"].shard,
    "S6.5-53": lambda seed: len(seed.all.layers(1)),
    # 6.6: backward
    "S6.6-1": lambda seed: len(seed.all.layers(3)),
    "S6.6-3": lambda seed: seed.all.row("experts.combine", "backward").off_rank_bytes,
    "S6.6-4": lambda seed: seed.all.row("experts.dispatch", "backward").off_rank_bytes,
    "S6.6-6": lambda seed: seed.all.row("attention: dO", "backward").off_rank_bytes,
    "S6.6-7": lambda seed: sum(seed.all.row(f"attention: d{p}", "backward").off_rank_bytes for p in "QKV"),
    "S6.6-16": lambda seed: _model(seed.all, "attention."),
    # 6.7: the tables. Full tensors of the length they were printed for where the document mixes conventions (E26).
    **{claim: lambda seed: seed.printed.row("attention.qkv").payload_bytes for claim in ("S6.7-1", "S6.7-12")},
    **{
        claim: lambda seed: seed.printed.row("attention.qkv", "backward").payload_bytes
        for claim in ("S6.7-10", "S6.7-23")
    },
    **{
        claim: lambda seed: sum(seed.all.row(f"attention: {part}").off_rank_bytes for part in "QKV")
        for claim in ("S6.7-2", "S6.7-13")
    },
    **{claim: lambda seed: seed.all.row("attention: O").off_rank_bytes for claim in ("S6.7-3", "S6.7-14")},
    **{claim: lambda seed: seed.all.row("attention: dO", "backward").off_rank_bytes for claim in ("S6.7-8", "S6.7-20")},
    **{
        claim: lambda seed: sum(seed.all.row(f"attention: d{p}", "backward").off_rank_bytes for p in "QKV")
        for claim in ("S6.7-9", "S6.7-21")
    },
    "S6.7-16": lambda seed: seed.all.row("experts.dispatch").off_rank_bytes,
    "S6.7-17": lambda seed: seed.all.row("experts.combine").off_rank_bytes,
    "S6.7-18": lambda seed: seed.all.row("experts.dispatch", "backward").off_rank_bytes,
    "S6.7-19": lambda seed: seed.all.row("experts.combine", "backward").off_rank_bytes,
    # 6.8, 6.10: counts
    "S6.8-1": lambda seed: sum(stage.place.symbols["dense_layers"] for stage in seed.all.stages),
    "S6.8-5": lambda seed: _moe_layers(seed.all),
    "S6.8-9": lambda seed: sum(stage.number("forward", "send", "pp") for stage in seed.all.stages),
    "S6.10-3": lambda seed: seed.one.number("forward", "reduce_scatter"),
    "S6.10-5": lambda seed: seed.one.number("backward", "all_gather"),
}

CHAPTER_7: dict[str, Claim] = {
    "S7-1": lambda seed: len(document.CHAPTERS),
    "S7-6": lambda seed: seed.ring.off_rank("forward", role="cp"),
    "S7-7": lambda seed: seed.ring.off_rank("backward", role="cp"),
    "S7-8": lambda seed: seed.gather.off_rank("forward", role="cp"),
    "S7-9": lambda seed: seed.gather.off_rank("backward", role="cp"),
    "S7-10": lambda seed: seed.ulysses.off_rank("forward", role="cp"),
    "S7-11": lambda seed: seed.ulysses.off_rank("backward", role="cp"),
    "S7-14": lambda seed: seed.zero(1).in_psi("forward"),
    "S7-15": lambda seed: seed.zero(1).in_psi(),
    "S7-16": lambda seed: seed.zero(2).in_psi("forward"),
    "S7-17": lambda seed: seed.zero(2).in_psi(),
    "S7-19": lambda seed: seed.zero(3).in_psi("backward"),
    "S7-20": lambda seed: _degrees(seed.all),
}


def _zero_bubble() -> Schedule:
    return Schedule(kind="zb-h1", stages=4, microbatches=8)


def _sequences_of_a_pass(case: Case) -> Fraction:
    """Sequences of the global batch over the passes that the job makes of it."""
    return Fraction(case.job.global_batch_size or 0, case.job.num_microbatches or 0)


def _expert_buffer(seed: Seed) -> int:
    """Rows that all ranks bring to the experts of one, padded to a capacity factor of 1, in bytes: real Megatron's rule."""
    job = seed.experts(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True).job
    calls = expect.expected(job, 0).calls
    (dispatch,) = [row for row in calls if (row.component, row.phase) == ("experts.dispatch", "forward")]
    return traffic.tensor_bytes(dispatch.out_elems, dispatch.dtype) or 0


CLAIMS: Mapping[str, Claim] = {
    **CHAPTER_0,
    **CHAPTER_1,
    **CHAPTER_2,
    **CHAPTER_3,
    **CHAPTER_4,
    **CHAPTER_5,
    **CHAPTER_6,
    **CHAPTER_7,
}


# -- where the document contradicts itself -------------------------------------------------------------------------------

MIB = 1 << 20
_NORM, _REGION = (2, 1024, 8192), (2, 4096, 8192)
_LOCAL, _WHOLE, _SCORES = (2, 4096, 16, 128), (2, 8192, 8, 128), (2, 8, 8192, 8192)

# Errata entry, what our code gives, and what it must be: bytes, elements, or multiples as the unit says.
CONTRADICTED: Mapping[str, tuple[str, Claim, Value]] = {
    "S1.2.2-3": ("E6", lambda seed: seed.plain.number(op="all_gather"), 0),
    "S1.3.1-28": ("S4.1-4", lambda seed: shapes.weights(seed.one.job)["mlp.up"].full[1], 32768),
    "S2.1-5": ("E29", lambda seed: schedule.bubble(PLAN, 1, 2).idle, 9),
    "S2.2-2": ("E5", lambda seed: len(seed.pp.layers(1)), 20),
    "S2.2.2-10": (
        "E10",
        lambda seed: Fraction(_pipeline_messages(seed.vpp), _pipeline_messages(seed.pp)),
        Fraction(7, 3),
    ),
    "S2.4-8": ("E21", lambda seed: Fraction(_experts_held(seed.all), seed.all.job.num_experts or 0), Fraction(1, 8)),
    "S2.5-3": ("E9", lambda seed: len(seed.pp.stage(3).rows("backward", "recv", "pp")), 0),
    "S2.7-5": (
        "E10",
        lambda seed: Fraction(seed.vpp.stage(1).message().payload_bytes, seed.pp.stage(1).message().payload_bytes),
        1,
    ),
    "S2.7-6": (
        "E13",
        lambda seed: schedule.peak_in_flight(Schedule(kind="1f1b", stages=4, microbatches=16), 0),
        4,
    ),
    "S2.9-5": ("E11", lambda seed: len(seed.pp.layers(3)), 20),
    "S2.9-6": ("E11", lambda seed: len(seed.pp.layers(3)), 20),
    "S3.4.6-10": ("E24", lambda seed: seed.ring.row("attention: K and V", op="recv").payload_bytes, 256 * MIB),
    # The gradients' first exchange goes as dispatch does, the second as combine does.
    "S4.5-3": ("E8", lambda seed: int(not _goes_to_experts(seed.ep.rows("backward", role="ep")[0])), 0),
    "S4.5-4": ("E8", lambda seed: int(_goes_to_experts(seed.ep.rows("backward", role="ep")[1])), 0),
    "S4.8-1": ("E30", lambda seed: seed.capacity(), 512),
    "S5.3-6": ("E12", lambda seed: seed.zero(1).number(op="all_reduce", component="parameters"), 0),
    "S5.4-21": ("E19", lambda seed: seed.zero(3).in_psi("forward") * ZERO_EXAMPLE, 350 * 10**9),
    "S5.4-23": ("E19", lambda seed: seed.zero(3).in_psi() * ZERO_EXAMPLE, 1050 * 10**9),
    "S5.5-2": ("E12", lambda seed: seed.zero(1).in_psi(component="parameters"), 2),
    "S5.5-3": ("E25", lambda seed: seed.zero(2).in_psi(component="gradients"), 2),
    "S5.5-4": ("E25", lambda seed: seed.zero(2).in_psi(component="parameters"), 2),
    "S5.5-5": ("E25", lambda seed: seed.zero(3).in_psi_of_layer("forward", "parameters"), 2),
    "S5.5-6": ("E25", lambda seed: seed.zero(3).in_psi("forward", component="parameters"), 2),
    "S5.5-7": ("E25", lambda seed: seed.zero(3).in_psi_of_layer("backward", "parameters"), 2),
    "S5.5-8": ("E25", lambda seed: seed.zero(3).in_psi_of_layer("backward", "gradients"), 2),
    "S5.7.1-1": (
        "E4",
        lambda seed: seed.together(
            grid="megatron", order=None, num_microbatches=None, global_batch_size=512
        ).job.require("num_microbatches")[0],
        8,
    ),
    "S5.7.4-3": (
        "E4",
        lambda seed: seed.zero(0, num_microbatches=None, global_batch_size=64).job.num_microbatches or 0,
        8,
    ),
    "S5.7.6-4": ("E13", lambda seed: schedule.peak_in_flight(PLAN, 0), 4),
    "S6.3-11": ("E1", lambda seed: seed.all.job.layout.group_of("pp", 0) or (), (0, 4, 8, 12)),
    "S6.4-1": ("E4", lambda seed: seed.folded.job.global_batch_size or 0, 512),
    "S6.4-5": ("E2", lambda seed: seed.all.activation("norm"), _NORM),
    "S6.4-6": ("E2", lambda seed: shapes.sequence_shard(seed.all.job).value, 1024),
    "S6.4-10": ("E2", lambda seed: shapes.sequence_shard(seed.all.job).value, 1024),
    "S6.4-11": ("E2", lambda seed: shapes.cp_tokens(seed.all.job).value, 4096),
    "S6.5-1": ("E2", lambda seed: seed.all.activation("norm"), _NORM),
    "S6.5-4": ("E2", lambda seed: seed.all.activation("norm"), _NORM),
    "S6.5-6": ("E2", lambda seed: seed.all.buffer("attention.qkv", "forward", "out"), _REGION),
    "S6.5-7": ("E2", lambda seed: seed.all.buffer("attention.qkv", "forward", "in")[1], 1024),
    "S6.5-8": ("E2", lambda seed: seed.all.received("attention.qkv"), 96 * MIB),
    "S6.5-9": ("E2", lambda seed: seed.all.received("attention.qkv"), 96 * MIB),
    "S6.5-13": ("E2", lambda seed: seed.all.activation("query"), (2, 4096, 2048)),
    "S6.5-15": ("E2", lambda seed: seed.all.activation("query")[1], 4096),
    "S6.5-17": ("E2", lambda seed: shapes.attention(seed.all.job, "a2a")["local"][1], 4096),
    "S6.5-19": ("E3", lambda seed: shapes.attention(seed.all.job, "a2a")["local"], _LOCAL),
    "S6.5-20": ("E3", lambda seed: shapes.attention(seed.all.job, "a2a")["whole"], _WHOLE),
    "S6.5-24": ("E3", lambda seed: shapes.attention(seed.all.job, "a2a")["whole"], _WHOLE),
    "S6.5-25": ("E3", lambda seed: shapes.attention(seed.all.job, "a2a")["scores"], _SCORES),
    "S6.5-26": ("E3", lambda seed: shapes.attention(seed.all.job, "a2a")["whole"], _WHOLE),
    "S6.5-27": ("E3", lambda seed: shapes.attention(seed.all.job, "a2a")["local"], _LOCAL),
    "S6.5-31": ("E2", lambda seed: seed.all.row("attention.proj").payload_bytes, 128 * MIB),
    "S6.5-32": ("E2", lambda seed: seed.all.row("attention.proj").payload_bytes, 128 * MIB),
    "S6.5-33": ("E2", lambda seed: seed.all.buffer("attention.proj", "forward", "out"), _NORM),
    "S6.5-49": ("E2", lambda seed: seed.all.row("mlp.fc2").payload_bytes, 128 * MIB),
    "S6.5-50": ("E7", lambda seed: seed.one.number("forward", "all_gather", component="mlp."), 1),
    "S6.5-51": ("E2", lambda seed: seed.all.message().payload_bytes, 32 * MIB),
    "S6.5-52": ("E2", lambda seed: seed.all.message().payload_bytes, 32 * MIB),
    "S6.6-2": ("E2", lambda seed: seed.all.row("mlp.fc2", "backward").payload_bytes, 128 * MIB),
    "S6.6-5": ("E2", lambda seed: seed.all.row("attention.proj", "backward").payload_bytes, 128 * MIB),
    "S6.6-8": ("E2", lambda seed: seed.all.row("attention.qkv", "backward").off_rank_bytes, 96 * MIB),
    "S6.6-9": ("E7", lambda seed: seed.one.number("backward", "reduce_scatter", component="mlp."), 1),
    "S6.6-10": ("E2", lambda seed: seed.all.stage(3).message("backward").payload_bytes, 32 * MIB),
    "S6.6-11": ("E25", lambda seed: seed.zero(3).in_psi_of_layer("backward", "gradients"), 2),
    "S6.6-12": ("E25", lambda seed: seed.zero(3).in_psi(component="gradients"), 2),
    "S6.6-13": ("E12", lambda seed: seed.zero(3).number("optimizer"), 0),
    "S6.6-14": ("E25", lambda seed: seed.zero(3).in_psi(), 6),
    "S6.6-15": ("E22", lambda seed: _model(seed.all, *_MATRICES), 1_100_595_855_360),
    "S6.6-17": ("E22", lambda seed: _model(seed.all, *_MATRICES), 1_100_595_855_360),
    "S6.7-4": ("E2", lambda seed: seed.all.row("attention.proj").payload_bytes, 128 * MIB),
    "S6.7-5": ("E2", lambda seed: seed.all.row("mlp.fc2").payload_bytes, 128 * MIB),
    "S6.7-6": ("E2", lambda seed: seed.all.row("mlp.fc2", "backward").payload_bytes, 128 * MIB),
    "S6.7-7": ("E2", lambda seed: seed.all.row("attention.proj", "backward").payload_bytes, 128 * MIB),
    "S6.7-15": ("E2", lambda seed: seed.all.row("attention.proj").payload_bytes, 128 * MIB),
    "S6.7-22": ("E2", lambda seed: seed.all.row("attention.proj", "backward").payload_bytes, 128 * MIB),
    "S6.8-10": ("E28", lambda seed: _pipeline_messages(seed.all), 96 * MIB),
    "S6.8-18": ("E28", lambda seed: sum(s.full("backward", "send", "pp") for s in seed.all.stages), 96 * MIB),
    "S6.8-20": ("E25", lambda seed: seed.zero(3).in_psi("forward", component="parameters"), 2),
    "S6.8-21": ("E25", lambda seed: seed.zero(3).in_psi("backward", component="gradients"), 2),
    "S6.8-22": ("E25", lambda seed: seed.zero(3).in_psi("backward", component="parameters"), 2),
    "S6.10-1": ("E13", lambda seed: schedule.peak_in_flight(PLAN, 0), 4),
    "S6.10-2": ("E7", lambda seed: seed.one.number("forward", "all_gather"), 2),
    "S6.10-6": ("E7", lambda seed: seed.one.number("backward", "reduce_scatter"), 2),
    "S7-2": ("E27", lambda seed: _dense_layer(seed.all, "forward"), 4 * 128 * MIB),
    "S7-3": ("E27", lambda seed: _dense_layer(seed.all, "backward"), 4 * 128 * MIB),
    "S7-4": ("E27", lambda seed: seed.all.message().payload_bytes, 32 * MIB),
    "S7-5": ("E27", lambda seed: seed.all.stage(1).message("backward").payload_bytes, 32 * MIB),
    "S7-12": ("E27", lambda seed: sum(r.off_rank_bytes for r in seed.all.rows("forward", role="ep")), 112 * MIB),
    "S7-13": ("E27", lambda seed: sum(r.off_rank_bytes for r in seed.all.rows("backward", role="ep")), 112 * MIB),
    "S7-18": ("E25", lambda seed: seed.zero(3).in_psi("forward"), 2),
}


def _dense_layer(case: Case, phase: str) -> int:
    """Full-tensor bytes of tensor parallelism in one dense layer: one call of each kind."""
    return sum(row.payload_bytes for row in case.rows(phase, role="tp"))


# -- nothing to compute --------------------------------------------------------------------------------------------------

_LOST = "E33: the formula was an image"
_NO_VALUE = "no value: the vocabulary size is not given"
_EXPERIENCE = "a number from experience, nothing to compute it from"
_ROUTING = "depends on the data"
_INSIDE = "a value inside the model: neither traffic nor memory"
_CELLS = "sum of printed cells: checks the document's arithmetic only"
_MEMORY = "6.9, E21: an estimate of memory that is no oracle"

EXCLUDED: Mapping[str, str] = {
    "S1.3.1-11": _NO_VALUE,
    "S1.3.1-12": _NO_VALUE,
    "S1.3.1-22": _LOST,
    "S1.3.1-23": _INSIDE,
    "S1.3.1-27": "advice about another model's width",
    "S1.3.2-1": "an identity: a gradient has the shape of its weight, there is nothing to compute",
    "S2.1-8": "a picture",
    "S2.2.2-12": "E31: not so, ZB-H1 holds what 1F1B holds",
    "S2.9-1": _NO_VALUE,
    "S3.2.2-3": _LOST,
    "S3.4.5-2": "advice: one call for Q, K and V has the same bytes, and no implementation has it",
    "S4.3-4": _ROUTING,
    "S4.9-1": _EXPERIENCE,
    "S4.9-3": _INSIDE,
    "S4.9-5": _INSIDE,
    "S4.9-6": _INSIDE,
    "S4.9-7": _EXPERIENCE,
    "S4.9-8": _LOST,
    "S4.9-11": _EXPERIENCE,
    "S4.9-12": _EXPERIENCE,
    "S4.9-14": _EXPERIENCE,
    "S4.9-16": _LOST,
    "S4.9-17": _EXPERIENCE,
    "S4.9-18": _LOST,
    "S4.9-19": "another scheme's number, given",
    "S4.9-21": "E31: not Megatron's default",
    "S4.9-22": "E31: not Megatron's default",
    "S5.4-16": "given; E22: a free variable",
    "S5.7.2-2": _LOST,
    "S5.7.3-3": "a share of measured times",
    "S5.7.3-4": "a share of measured times",
    "S5.7.7-1": _EXPERIENCE,
    "S5.7.7-2": _EXPERIENCE,
    "S5.7.7-4": _EXPERIENCE,
    "S5.7.7-5": _EXPERIENCE,
    "S6.5-54": _NO_VALUE,
    **{f"S6.7-{number}": _CELLS for number in (11, 24)},
    **{f"S6.8-{number}": _CELLS for number in (2, 3, 4, 6, 7, 8, 11, 12, 13, 14, 15, 16, 17, 19, 23)},
    **{f"S6.9-{number}": _MEMORY for number in range(1, 25)},
    "S6.10-4": "counts the exchanges of Q, K and V as one call",
    "S6.10-7": "counts the exchanges of dQ, dK and dV as one call",
}

# Formulas about the inside of a model or about measured time, which no module here has a use for.
NO_MODEL = frozenset({"S1.3.1-23", "S4.9-5", "S4.9-6", "S5.7.3-3", "S5.7.3-4"})


# -- tests ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def seed(document_job: Callable[..., Job]) -> Seed:
    return Seed(document_job)


def _is_no_oracle(claim: Mapping[str, str]) -> bool:
    """Section 6.9, and sums of printed cells."""
    return claim["section"] == "6.9" or claim["unit"].startswith("rows")


def _is_given(claim: Mapping[str, str]) -> bool:
    """Whether the claim has no formula: a number, or the name of a size that is given."""
    return not claim["parameters"] or claim["formula"].isidentifier()


def _table_value(claim: Mapping[str, str]) -> Any:
    text = claim["recomputed_value"]
    if text.startswith("["):
        return tuple(int(number) for number in text.strip("[]").split(","))
    return Fraction(text)


def _in_unit(value: Value, claim: Mapping[str, str]) -> Any:
    """The value in the claim's unit, to the six decimals of the table."""
    return value if isinstance(value, tuple) else round(Fraction(value) / _UNIT.get(claim["unit"], 1), 6)


def test_claim(claim: dict[str, str], seed: Seed) -> None:
    """Whatever the table says of a claim, it stands in the list that fits it, and our code gives what it should."""
    name, verdict = claim["id"], claim["verdict"].partition(":")[0]
    if name in EXCLUDED:
        given = _is_given(claim) or verdict == "not_checkable" or name in NO_MODEL
        assert _is_no_oracle(claim) or (given and verdict in ("consistent", "not_checkable", "approximate"))
    elif name in CONTRADICTED:
        errata, ours, value = CONTRADICTED[name]
        assert verdict == "contradicts"
        assert re.fullmatch(r"E([1-9]|[12]\d|3[0-4])|S\d[\d.]*-\d+", errata)
        assert ours(seed) == value
    else:
        assert verdict in ("consistent", "arithmetic_error", "convention_mismatch", "approximate", "not_checkable")
        assert not _is_no_oracle(claim)
        assert _in_unit(CLAIMS[name](seed), claim) == _table_value(claim)


def test_what_is_adopted_is_not_what_the_document_says(claims: list[dict[str, str]]) -> None:
    """But for the claims that the others contradict, whose own value is the one to adopt."""
    rows = {claim["id"]: claim for claim in claims}
    adopted = {
        name
        for name, (_, _, value) in CONTRADICTED.items()
        if rows[name]["recomputed_value"] and _in_unit(value, rows[name]) == _table_value(rows[name])
    }
    assert adopted == {"S2.7-5", "S2.9-6", "S3.4.6-10", "S6.6-17", "S6.10-6"}


def test_every_claim_is_in_one_list(claims: list[dict[str, str]]) -> None:
    names = [*CLAIMS, *CONTRADICTED, *EXCLUDED]
    assert len(names) == len(set(names)) == 701
    assert set(names) == {claim["id"] for claim in claims}
