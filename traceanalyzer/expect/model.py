"""What an expectation is: one row per kind of call, with its size, its count, its evidence and its waste."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from traceanalyzer import traffic

RuleSet = Literal["megatron", "document"]
RULE_SETS: tuple[RuleSet, ...] = ("megatron", "document")

PHASES: tuple[str, ...] = ("forward", "backward", "recompute", "optimizer", "other")
"""Phases of a step. recompute is forward work repeated inside the backward pass."""


@dataclass(frozen=True)
class Evidence:
    """Why a rule is believed.

    kind: 'run' (real code was executed and recorded), 'source' (read in the named file), 'document' (the seed says so),
    'inferred'. where: run, file and symbol, or section.
    """

    kind: Literal["run", "source", "document", "inferred"]
    where: str


@dataclass(frozen=True)
class Avoidable:
    """Bytes that need not be sent: how many per call, the cause's code (see causes.py) and the setting that removes it."""

    bytes_per_call: int
    code: str
    setting: str


@dataclass(frozen=True)
class Varies:
    """Sizes that depend on where the router sends tokens; the call's elements are then what balanced routing gives.

    width: elements of a row. sent, received: the rows of this rank's input and output that vary, None for a side that is
    exact: "routed" (own rows, T*k: exact unless capacity drops some), "arrived" (rows that came over the expert-parallel
    group), "gathered" (those of the whole expert tensor-parallel group).
    """

    width: int
    sent: str | None = None
    received: str | None = None


@dataclass(frozen=True)
class ExpectedCall:
    """Calls of one kind that one rank makes in one step.

    ``in_elems`` and ``out_elems`` are this rank's elements as a profiler shows them; ``payload_bytes`` and
    ``off_rank_bytes`` follow from them (traffic.py). ``calls`` is per rank and step. ``formula`` maps the words of
    ``--explain`` to a line each, with symbols and numbers. ``varies``: sizes depend on data. ``transport``: what carries
    the bytes if torch.distributed does not ("userbuffers", "deepep"), else "". ``off_rank``: bytes of one call that leave
    the rank, where operation and group size do not say it. ``peer``: for send and recv, "next" or "previous" stage or
    rank of the ring. ``document``: the errata entry or section because of which the document's model lacks the call.
    """

    rule: str
    role: str
    op: str
    phase: str
    component: str
    dtype: str
    in_elems: int
    out_elems: int
    group_size: int
    calls: int
    evidence: Evidence
    stage: int | None = None
    avoidable: Avoidable | None = None
    versions: str = ""
    formula: Mapping[str, str] = field(default_factory=dict, hash=False)
    varies: Varies | None = None
    transport: str = ""
    off_rank: Fraction | None = None
    peer: str = ""
    document: str = ""

    def on_stage(self, stage: int) -> ExpectedCall:
        """The same row on another pipeline stage: dataclasses.replace, but ten times as fast for a job of many stages."""
        copy = object.__new__(ExpectedCall)
        copy.__dict__.update(self.__dict__, stage=stage)
        return copy

    @property
    def same(self) -> tuple[object, ...]:
        """What two rows have in common that send the same; stage, releases and formula do not count."""
        return (
            self.rule,
            self.role,
            self.op,
            self.phase,
            self.component,
            self.dtype,
            self.in_elems,
            self.out_elems,
            self.group_size,
            self.calls,
            self.varies,
            self.transport,
            self.off_rank,
            self.peer,
            self.avoidable,
        )

    @property
    def outside_c10d(self) -> bool:
        """Whether no torch.distributed call makes this traffic, so that only kernels can show it."""
        return self.transport != ""

    @property
    def payload_bytes(self) -> int:
        """Payload of one call in bytes."""
        size = traffic.payload_bytes(self.op, self.in_elems, self.out_elems, self.dtype, self.group_size)
        if size is None:
            raise ValueError(f"rule {self.rule}: no payload for {self.op} of {self.dtype}")
        return size

    @property
    def off_rank_bytes(self) -> Fraction:
        """Bytes that leave the rank in one call, ring-equivalent."""
        if self.off_rank is not None:
            return self.off_rank
        return Fraction(self.payload_bytes) * traffic.off_rank_factor(self.op, self.group_size)


@dataclass(frozen=True)
class NotModelled:
    """Traffic a rule set has no rule for: which roles and components it touches, and the flag or chapter to blame.

    Cells it can touch become ``unknown (not modelled: what)``, never ``match``. ``phases`` and ``ops`` empty: all.
    """

    what: str
    roles: tuple[str, ...]
    phases: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Expectation:
    """Everything one rank should send in one step under one rule set, and what the rule set cannot say."""

    rules: RuleSet
    rank: int
    calls: tuple[ExpectedCall, ...]
    not_modelled: tuple[NotModelled, ...]
    version: str | None = None
