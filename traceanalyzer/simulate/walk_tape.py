"""What a walk writes on: the instructions of a program in the order of issue, and the backward work that they owe.

Modules of the model are functions that take a Tape. Going forward they append instructions and leave, with ``owes``, a
function that appends the instructions of their backward pass; ``pay`` calls these from the last to the first, as
autograd does. A checkpoint runs its part without leaving anything, and owes one thing: to run it again and pay for that
(tensor_parallel/random.py: CheckpointFunction). So nothing about the backward pass or recomputation is a rule of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

from traceanalyzer import traffic
from traceanalyzer.job import Job
from traceanalyzer.job_rules import release
from traceanalyzer.simulate.program import (
    Begin,
    Call,
    Compute,
    End,
    Host,
    Instruction,
    Ints,
    PerRank,
    Phase,
    Sync,
    Wait,
    Where,
)

if TYPE_CHECKING:
    from traceanalyzer.simulate.walk_expert import Splits

NEWEST_WALKED = (0, 16)
"""The release walked for a job that does not say its own: the one the reference recordings were made with."""

_SPELLED = {
    "bfloat16": "BFloat16",
    "float16": "Half",
    "float32": "Float",
    "float64": "Double",
    "int64": "Long",
    "int32": "Int",
    "uint8": "Byte",
    "bool": "Bool",
}

Module: TypeAlias = tuple[int | None, str]
"""A module with parameters: its layer (None outside the layers) and its name."""

Owed: TypeAlias = list[tuple[int | None, Callable[[], object]]]


class Replica(Protocol):
    """What the data-parallel wrapper of a model chunk hears of: its forward pre-hooks and gradient hooks."""

    def before(self, tape: Tape, module: Module) -> None:
        """A module is about to use its parameters."""

    def ready(self, tape: Tape, module: Module) -> None:
        """The gradients of a module's parameters are complete for this micro-batch."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that modules ask for, from a job. Elements, unless a name says otherwise; ``tokens`` times sequences."""

    job: Job
    release: tuple[int, int]
    tp: int
    cp: int
    dtype: str
    """Activations and parameters, canonical name."""
    itemsize: int
    hidden: int
    sequence: int
    """Tokens of one sequence on a context-parallel rank."""
    batch: int
    heads: int
    """Query heads of this rank."""
    groups: int
    """Key and value heads of this rank, at least one."""
    head_width: int
    vocab: int
    """Rows of the vocabulary on this rank."""

    @classmethod
    def of(cls, job: Job) -> Sizes:
        length = "decoder_seq_length" if job.decoder_seq_length else "seq_length"
        hidden, sequence, batch, heads, groups, width, vocab = job.require(
            "hidden_size",
            length,
            "micro_batch_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "padded_vocab_size",
        )
        tp, cp = job.tensor_model_parallel_size, job.context_parallel_size
        return cls(
            job,
            release(job.megatron_core_version) or NEWEST_WALKED,
            tp,
            cp,
            job.activation_dtype,
            traffic.element_bytes(job.activation_dtype) or 4,
            hidden,
            sequence // cp,
            batch,
            heads // tp,
            max(groups // tp, 1),
            width,
            vocab // tp,
        )

    @property
    def sp(self) -> bool:
        """Whether the sequence is split between tensor-parallel regions."""
        return self.job.sequence_parallel

    @property
    def tokens(self) -> int:
        """Tokens that a tensor-parallel region sees."""
        return self.sequence * self.batch

    @property
    def shard(self) -> int:
        """Tokens between tensor-parallel regions."""
        return self.tokens // self.tp if self.sp else self.tokens

    @property
    def query_width(self) -> int:
        """Width of all query heads of the model."""
        (heads,) = self.job.require("num_attention_heads")
        return heads * self.head_width

    @property
    def qkv_width(self) -> int:
        """Width of the fused projection of all queries, keys and values of the model."""
        (groups,) = self.job.require("num_query_groups")
        return self.query_width + 2 * groups * self.head_width


@dataclass
class Tape:
    """One program while it is written.

    ``phase``, ``microbatch``, ``chunk`` and ``layer`` are the place of what is appended next; ``grad`` says whether
    forward work leaves backward work behind.
    """

    sizes: Sizes
    instructions: list[Instruction] = field(default_factory=list)
    phase: Phase = "other"
    microbatch: int | None = None
    chunk: int | None = None
    layer: int | None = None
    grad: bool = False
    later: Owed | None = None
    """Where the gradients of weights are put off to, if they are a pass of their own."""
    owed: Owed = field(default_factory=list)
    replica: Replica | None = None
    router: Callable[[int, int], Splits] | None = None
    """Where a layer's router sends the tokens of a micro-batch, for each rank of the program."""
    ring: Callable[[str, int], Ints] | None = None
    """Global rank so many places on in the group of a role, for each rank of the program."""
    _handles: int = 0
    _coalesced: int = 0
    _places: dict[tuple[object, ...], Where] = field(default_factory=dict)
    _kernels: dict[tuple[object, ...], Compute] = field(default_factory=dict)

    # -- places

    def where(self, component: str | None) -> Where:
        key = (self.phase, self.microbatch, self.chunk, self.layer, component)
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = Where(*key)
        return found

    @contextmanager
    def at(
        self,
        phase: Phase,
        *,
        microbatch: int | None = None,
        chunk: int | None = None,
        layer: int | None = None,
    ) -> Iterator[None]:
        """What is appended inside belongs to this place, and to no other."""
        before = self.phase, self.microbatch, self.chunk, self.layer
        self.phase, self.microbatch, self.chunk, self.layer = phase, microbatch, chunk, layer
        yield
        self.phase, self.microbatch, self.chunk, self.layer = before

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """A host range around what is appended inside."""
        self.instructions.append(Begin(f"ta:{name}"))
        yield
        self.instructions.append(End())

    @contextmanager
    def layer_range(self, layer: int) -> Iterator[None]:
        """One transformer layer going forward."""
        before, self.layer = self.layer, layer
        self.instructions.append(Begin(f"ta:layer {layer}"))
        yield
        self.instructions.append(End())
        self.layer = before

    # -- instructions

    def compute(
        self,
        name: str,
        kernel_class: str,
        flops: PerRank,
        memory_bytes: PerRank,
        component: str | None,
        stream: str = "compute",
    ) -> None:
        where = self.where(component)
        if isinstance(flops, int) and isinstance(memory_bytes, int):
            key = (name, flops, memory_bytes, where, stream)
            found = self._kernels.get(key)
            if found is None:
                found = self._kernels[key] = Compute(name, kernel_class, flops, memory_bytes, where, stream)
            self.instructions.append(found)
        else:
            self.instructions.append(Compute(name, kernel_class, flops, memory_bytes, where, stream))

    def call(
        self,
        role: str,
        op: str,
        in_elems: PerRank,
        out_elems: PerRank | None = None,
        *,
        component: str,
        dtype: str | None = None,
        overlap: bool = False,
        in_splits: Ints | None = None,
        out_splits: Ints | None = None,
        row_elems: int = 1,
        peer: Ints | None = None,
        root: Ints | None = None,
        coalesce: int | None = None,
        stream: str | None = None,
        reduce_op: str | None = None,
    ) -> int | None:
        """Appends a call; ``out_elems`` None: as many as in. ``dtype`` None: the activations'.

        Gives the handle to wait for if it overlaps, else None.
        """
        handle = None
        if overlap:
            handle = self._handles
            self._handles += 1
        if reduce_op is None and op in ("all_reduce", "reduce_scatter", "reduce"):
            reduce_op = "sum"
        self.instructions.append(
            Call(
                role,
                op,
                _SPELLED[dtype or self.sizes.dtype],
                in_elems,
                in_elems if out_elems is None else out_elems,
                self.where(component),
                in_splits,
                out_splits,
                peer,
                handle,
                coalesce,
                stream,
                reduce_op,
                row_elems,
                root,
            )
        )
        return handle

    def wait(self, handle: int | None, *, host: bool = False) -> None:
        """Waits for a call; nothing for None."""
        if handle is not None:
            self.instructions.append(Wait(handle, host))

    def new_coalesced(self) -> int:
        """A number for calls that become one kernel."""
        self._coalesced += 1
        return self._coalesced - 1

    def host(self, cost: str) -> None:
        self.instructions.append(Host(cost))

    def sync(self) -> None:
        self.instructions.append(Sync())

    # -- autograd

    def owes(self, backward: Callable[[], object]) -> None:
        """``backward`` appends the backward work of what was just appended."""
        if self.grad:
            self.owed.append((self.layer, backward))

    @contextmanager
    def recording(self) -> Iterator[Owed]:
        """Gives a list that ends up with what the forward work inside owes."""
        before = self.grad, self.owed
        owed: Owed = []
        self.grad, self.owed = True, owed
        yield owed
        self.grad, self.owed = before

    def pay(self, owed: Owed) -> None:
        """Appends the backward work of a recording, last first."""
        before = self.layer
        while owed:
            self.layer, backward = owed.pop()
            backward()
        self.layer = before

    def weights(self, work: Callable[[], object]) -> None:
        """Appends the work for the gradient of a weight, or puts it off."""
        if self.later is None:
            work()
        else:
            self.later.insert(0, (self.layer, work))

    def checkpoint(self, run: Callable[[], None], *, first: Callable[[], None] | None = None) -> None:
        """Runs a part of the model forward; when its gradients are wanted, ``first`` and the part are run again."""
        if not self.grad:
            run()
            return
        self.grad = False
        run()
        self.grad = True

        def again() -> None:
            phase = self.phase
            if first is not None:
                first()
            self.phase = "recompute"
            with self.recording() as owed:
                run()
            self.phase = phase
            self.pay(owed)

        self.owes(again)

    # -- parameters

    def uses(self, *names: str, outside: bool = False) -> None:
        """Modules of this layer (or outside the layers) are about to use their parameters."""
        if self.replica is not None:
            for name in names:
                self.replica.before(self, (None if outside else self.layer, name))

    def ready(self, *names: str, outside: bool = False) -> None:
        """The gradients of these modules' parameters are there."""
        if self.replica is not None:
            for name in names:
                self.replica.ready(self, (None if outside else self.layer, name))
