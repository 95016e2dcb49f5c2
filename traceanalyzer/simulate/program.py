"""What ranks do in one step: instructions, in the order in which a rank's host issues them.

``walk`` makes programs from a job, ``engine`` gives their instructions times. Ranks that do the same work (the ranks of one
pipeline stage, as a rule) share one program, so that a thousand ranks cost little more than one; where a size or a peer
differs among them it is an array with one row per rank, in the order of ``Program.ranks``.

Sizes are elements, costs are FLOP and bytes, nothing here is a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Phase: TypeAlias = Literal["forward", "backward", "recompute", "optimizer", "other"]
Ints: TypeAlias = NDArray[np.int64]
PerRank: TypeAlias = int | Ints
"""One value for all ranks of a program, or an array of one per rank."""


@dataclass(frozen=True, slots=True)
class Where:
    """Place of an instruction in the step. None: it belongs to none (a gradient reduction has no micro-batch)."""

    phase: Phase
    microbatch: int | None = None
    chunk: int | None = None
    layer: int | None = None
    """Global number of the layer, from 0."""
    component: str | None = None


@dataclass(frozen=True, slots=True)
class Compute:
    """One kernel. Its time is the larger of flops over the rate of its class and bytes over the memory's rate."""

    name: str
    kernel_class: str
    """A class of attribute.kernels: gemm, attention, norm, elementwise, optimizer, copy, ..."""
    flops: PerRank
    memory_bytes: PerRank
    where: Where
    stream: str = "compute"


@dataclass(frozen=True, slots=True)
class Call:
    """One collective or point-to-point call on the rank's group of ``role``.

    ``handle``: the host goes on without waiting, and a later Wait names it; None: the compute stream waits for the call
    where it is issued. ``coalesce``: calls with one number are launched as one kernel (batched P2P); it is unique within
    the program. ``stream``: "comm:" and the role unless said otherwise; calls of one stream run one after another.
    """

    role: str
    op: str
    """all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, reduce, send, recv, barrier (traffic.py's names)."""
    dtype: str
    """As torch names it in records: BFloat16, Float, Long, ..."""
    in_elems: PerRank
    out_elems: PerRank
    where: Where
    in_splits: Ints | None = None
    """Elements to each rank of the group: one row per rank of the program. None: even, or no all-to-all."""
    out_splits: Ints | None = None
    peer: Ints | None = None
    """Global rank at the other end of a send or recv, one per rank of the program."""
    handle: int | None = None
    coalesce: int | None = None
    stream: str | None = None
    reduce_op: str | None = None
    row_elems: int = 1
    """Elements of one row of an all-to-all: records show splits in rows. Its splits are multiples of it."""
    root: Ints | None = None
    """Global rank of the root of a broadcast, reduce, gather or scatter, one per rank. None: the first of the group."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The compute stream waits until the call with this handle has ended. ``host``: the host waits too."""

    handle: int
    host: bool = False


@dataclass(frozen=True, slots=True)
class Begin:
    """A range opens on the host: ``name`` as collectors.marks writes it (ta:step 3, ta:microbatch 0, ta:forward, ...)."""

    name: str


@dataclass(frozen=True, slots=True)
class End:
    """The innermost open range closes."""


@dataclass(frozen=True, slots=True)
class Host:
    """Time on the host alone (data loading, Python): ``cost`` names a figure of Costs.host_ns."""

    cost: str


@dataclass(frozen=True, slots=True)
class Sync:
    """The host waits for the whole device (an item(), a loss being printed)."""


Instruction: TypeAlias = Compute | Call | Wait | Begin | End | Host | Sync


@dataclass(frozen=True)
class Program:
    """One step of the ranks that do the same work."""

    ranks: tuple[int, ...]
    instructions: list[Instruction] = field(default_factory=list)
    metrics: dict[str, PerRank] = field(default_factory=dict)
    """Bytes that collectors.memory would measure on each rank: memory.parameters_bytes, memory.gradients_bytes,
    memory.optimizer_bytes. A key that is missing is not known."""


@dataclass(frozen=True)
class Group:
    """One process group of the job."""

    role: str
    """In Megatron's vocabulary: tp, dp_cp, ..."""
    ranks: tuple[int, ...]
    description: str
    """What the framework writes into the group (TENSOR_MODEL_PARALLEL_GROUP, ...)."""


@dataclass(frozen=True)
class Walked:
    """A job as programs: every rank is in exactly one program, every call's role has a group of the rank in ``groups``
    (the default group is of role world)."""

    programs: list[Program]
    groups: list[Group]
