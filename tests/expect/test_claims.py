"""Every claim of the seed document's chapter 1 that our functions can produce, by calling them.

The value compared is the claims table's ``recomputed_value``: equal to the document's own where the verdict is
"consistent", the corrected one where it is "convention_mismatch". What has no counterpart here is listed with a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from traceanalyzer import expect, traffic
from traceanalyzer.expect import shapes
from traceanalyzer.expect.model import ExpectedCall
from traceanalyzer.job import Job

Value = int | Fraction | tuple[int, ...]

_UNIT = {"MiB": 1 << 20, "GiB": 1 << 30}

EXCLUDED: dict[str, str] = {
    "S1.2.2-3": "E6: plain tensor parallelism has no all-gather",
    "S1.3.1-11": "no value: the vocabulary size is not given",
    "S1.3.1-12": "no value: the vocabulary size is not given",
    "S1.3.1-22": "E33: the formula was an image",
    "S1.3.1-23": "arithmetic of an activation function, no traffic",
    "S1.3.1-27": "advice about another model's width",
    "S1.3.1-28": "contradicts the document's own width of 4H (S4.1-4)",
    "S1.3.2-1": "an identity: a gradient has the shape of its weight, there is nothing to compute",
}


class Layer:
    """The document's TP4 job, one micro-batch: SP or not, all 80 layers or one."""

    def __init__(self, make: Callable[..., Job]) -> None:
        self.job = make()
        self.one = make(num_layers=1)
        self.plain = make(num_layers=1, sequence_parallel=False)

    def rows(self, job: Job, phase: str | None = None, op: str | None = None) -> list[ExpectedCall]:
        calls = expect.expected(job, 0, rules="document").calls
        return [row for row in calls if phase in (None, row.phase) and op in (None, row.op)]

    def row(self, component: str, phase: str = "forward") -> ExpectedCall:
        (found,) = [row for row in self.rows(self.one, phase) if row.component == component]
        return found

    def number(self, phase: str, op: str | None = None, *, plain: bool = False) -> int:
        return sum(row.calls for row in self.rows(self.plain if plain else self.one, phase, op))

    def full(self, job: Job, phase: str | None = None) -> int:
        """Full-tensor bytes, all calls."""
        return sum(row.payload_bytes * row.calls for row in self.rows(job, phase))

    def off_rank(self, job: Job, phase: str) -> Fraction:
        return sum((row.off_rank_bytes * row.calls for row in self.rows(job, phase)), Fraction(0))

    def activation(self, place: str, *, plain: bool = False) -> tuple[int, ...]:
        sequence, batch, features = shapes.activations(self.plain if plain else self.one)[place]
        return batch, sequence, features

    def buffer(self, component: str, phase: str, side: str) -> tuple[int, ...]:
        """Shape of a call's input or output; which of the two shapes it is, its number of elements must say."""
        row = self.row(component, phase)
        elements = row.in_elems if side == "in" else row.out_elems
        for place in ("norm", "gathered"):
            shape = self.activation(place)
            if shape[0] * shape[1] * shape[2] == elements:
                return shape
        raise AssertionError(f"{component} {phase} {side}: {elements} elements")

    def own_part(self, component: str, phase: str = "forward") -> int:
        row = self.row(component, phase)
        shard = row.in_elems if row.op == "all_gather" else row.out_elems
        return traffic.tensor_bytes(shard, row.dtype) or 0

    def received(self, component: str, phase: str = "forward") -> Fraction:
        row = self.row(component, phase)
        found = traffic.received_bytes(row.op, row.payload_bytes, row.group_size)
        assert found is not None
        return found


QKV = shapes.column_parallel(8192, 24576, 4)  # the document's W with H' = 3H
ROW = shapes.row_parallel(8192, 24576, 4)

CLAIMS: dict[str, Callable[[Layer], Value]] = {
    # 1.2.1: one linear layer
    "S1.2.1-1": lambda layer: layer.activation("gathered"),
    "S1.2.1-2": lambda layer: QKV.full,
    "S1.2.1-3": lambda layer: QKV.shard,
    "S1.2.1-4": lambda layer: (*layer.activation("gathered")[:2], QKV.shard[1]),
    "S1.2.1-5": lambda layer: ROW.shard,
    "S1.2.1-6": lambda layer: (*layer.activation("gathered")[:2], ROW.shard[0]),
    "S1.2.1-7": lambda layer: (*layer.activation("gathered")[:2], ROW.shard[1]),
    # 1.2.2: what sequence parallelism cuts
    "S1.2.2-1": lambda layer: layer.activation("norm", plain=True),
    "S1.2.2-2": lambda layer: layer.activation("norm"),
    "S1.2.2-4": lambda layer: layer.buffer("attention.proj", "forward", "out"),
    "S1.2.2-5": lambda layer: layer.off_rank(layer.plain, "forward") / layer.off_rank(layer.one, "forward"),
    "S1.2.2-6": lambda layer: layer.activation("norm", plain=True),
    "S1.2.2-7": lambda layer: layer.buffer("mlp.fc2", "forward", "out"),
    # 1.3: weights, gradients, optimizer states, activations
    **{
        claim: lambda layer, name=name, part=part: getattr(shapes.weights(layer.one)[name], part)  # type: ignore[misc]
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
    "S1.3.1-13": lambda layer: shapes.qkv_width(layer.one).value // (layer.one.kv_channels or 0),
    "S1.3.1-14": lambda layer: shapes.heads_per_rank(layer.one),
    "S1.3.1-16": lambda layer: shapes.weights(layer.one)["mlp.gate"].shard[1],
    "S1.3.1-18": lambda layer: shapes.weights(layer.one)["mlp.up"].shard[1],
    "S1.3.1-20": lambda layer: shapes.weights(layer.one)["mlp.fc2"].shard[0],
    "S1.3.3-1": lambda layer: Fraction(_elements(layer, "shard"), _elements(layer, "full")),
    "S1.3.4-1": lambda layer: layer.activation("norm"),
    "S1.3.4-2": lambda layer: layer.activation("gathered"),
    "S1.3.4-3": lambda layer: layer.activation("qkv"),
    "S1.3.4-4": lambda layer: layer.activation("query"),
    "S1.3.4-5": lambda layer: layer.activation("partial"),
    "S1.3.4-6": lambda layer: layer.buffer("attention.proj", "forward", "out"),
    "S1.3.4-7": lambda layer: layer.activation("norm"),
    "S1.3.4-8": lambda layer: layer.activation("mlp"),
    "S1.3.4-9": lambda layer: layer.activation("partial"),
    "S1.3.4-10": lambda layer: layer.buffer("mlp.fc2", "forward", "out"),
    # 1.4, 1.5: group and calls
    "S1.4-1": lambda layer: layer.one.layout.group_size("tp"),
    "S1.5-1": lambda layer: layer.buffer("attention.qkv", "forward", "in"),
    "S1.5-2": lambda layer: layer.buffer("attention.qkv", "forward", "out"),
    "S1.5-3": lambda layer: layer.buffer("mlp.fc1", "forward", "in"),
    "S1.5-4": lambda layer: layer.buffer("mlp.fc1", "forward", "out"),
    "S1.5-5": lambda layer: layer.buffer("attention.proj", "forward", "in"),
    "S1.5-6": lambda layer: layer.buffer("attention.proj", "forward", "out"),
    "S1.5-7": lambda layer: layer.buffer("mlp.fc2", "forward", "in"),
    "S1.5-8": lambda layer: layer.buffer("mlp.fc2", "forward", "out"),
    "S1.5-9": lambda layer: layer.number("forward", "all_gather"),
    "S1.5-10": lambda layer: layer.number("forward", "reduce_scatter"),
    "S1.5-11": lambda layer: layer.number("forward", "all_reduce", plain=True),
    # 1.6: bytes
    "S1.6.1-1": lambda layer: layer.own_part("attention.qkv"),
    "S1.6.1-2": lambda layer: layer.received("attention.qkv"),
    "S1.6.1-3": lambda layer: layer.received("attention.qkv") + layer.row("attention.qkv").off_rank_bytes,  # E23
    "S1.6.1-4": lambda layer: layer.row("attention.proj").off_rank_bytes / layer.row("attention.qkv").off_rank_bytes,
    "S1.6.2-1": lambda layer: shapes.sequence_shard(layer.one).value,
    "S1.6.2-2": lambda layer: layer.own_part("attention.qkv"),
    "S1.6.2-3": lambda layer: layer.own_part("attention.qkv"),
    "S1.6.2-4": lambda layer: layer.received("attention.qkv"),
    "S1.6.2-5": lambda layer: layer.received("attention.qkv"),
    "S1.6.2-6": lambda layer: layer.own_part("attention.qkv") + layer.received("attention.qkv"),
    "S1.6.2-7": lambda layer: layer.row("attention.qkv").payload_bytes,
    "S1.6.2-8": lambda layer: layer.row("attention.proj").payload_bytes,
    "S1.6.3-1": lambda layer: layer.number("forward", "all_gather"),
    "S1.6.3-2": lambda layer: layer.number("forward", "reduce_scatter"),
    "S1.6.3-3": lambda layer: layer.number("forward"),
    "S1.6.3-4": lambda layer: layer.full(layer.one, "forward"),
    "S1.6.3-5": lambda layer: layer.full(layer.one, "forward"),
    "S1.6.3-6": lambda layer: layer.full(layer.job, "forward"),
    "S1.6.3-7": lambda layer: layer.full(layer.job, "backward"),
    "S1.6.3-8": lambda layer: layer.full(layer.job),
    # 1.7: what sequence parallelism saves
    "S1.7.1-1": lambda layer: layer.number("forward", "all_reduce", plain=True),
    "S1.7.1-2": lambda layer: layer.off_rank(layer.plain, "forward") / layer.off_rank(layer.one, "forward"),
    "S1.7.1-3": lambda layer: Fraction(layer.activation("norm", plain=True)[1], layer.activation("norm")[1]),
    "S1.7.3-1": lambda layer: Fraction(layer.activation("norm", plain=True)[1], layer.activation("norm")[1]),
    # 1.8: the flow of a layer
    "S1.8-1": lambda layer: layer.activation("norm"),
    "S1.8-2": lambda layer: layer.activation("norm"),
    "S1.8-3": lambda layer: layer.buffer("attention.qkv", "forward", "out"),
    "S1.8-4": lambda layer: layer.activation("qkv"),
    "S1.8-5": lambda layer: layer.activation("value"),
    "S1.8-6": lambda layer: layer.activation("attention"),
    "S1.8-7": lambda layer: layer.activation("partial"),
    "S1.8-8": lambda layer: layer.buffer("attention.proj", "forward", "out"),
    "S1.8-9": lambda layer: layer.activation("norm"),
    "S1.8-10": lambda layer: layer.activation("norm"),
    "S1.8-11": lambda layer: layer.buffer("mlp.fc1", "forward", "out"),
    "S1.8-12": lambda layer: layer.activation("mlp"),
    "S1.8-13": lambda layer: layer.activation("mlp"),
    "S1.8-14": lambda layer: layer.activation("mlp"),
    "S1.8-15": lambda layer: layer.activation("partial"),
    "S1.8-16": lambda layer: layer.buffer("mlp.fc2", "forward", "out"),
    "S1.8-17": lambda layer: layer.buffer("mlp.fc2", "backward", "in"),
    "S1.8-18": lambda layer: layer.buffer("mlp.fc2", "backward", "out"),
    "S1.8-19": lambda layer: layer.buffer("mlp.fc1", "backward", "in"),
    "S1.8-20": lambda layer: layer.buffer("mlp.fc1", "backward", "out"),
    "S1.8-21": lambda layer: layer.buffer("attention.proj", "backward", "out"),
    "S1.8-22": lambda layer: layer.buffer("attention.qkv", "backward", "out"),
    "S1.8-23": lambda layer: layer.own_part("attention.qkv"),
    "S1.8-24": lambda layer: layer.received("attention.qkv"),
    "S1.8-25": lambda layer: layer.own_part("mlp.fc1"),
    "S1.8-26": lambda layer: layer.received("mlp.fc1"),
    "S1.8-27": lambda layer: layer.own_part("mlp.fc2", "backward"),
    "S1.8-28": lambda layer: layer.received("mlp.fc2", "backward"),
    "S1.8-29": lambda layer: layer.own_part("attention.proj", "backward"),
    "S1.8-30": lambda layer: layer.received("attention.proj", "backward"),
    "S1.8-31": lambda layer: layer.row("attention.proj").off_rank_bytes,  # E23, and the three like it
    "S1.8-32": lambda layer: layer.received("attention.proj"),
    "S1.8-33": lambda layer: layer.row("mlp.fc2").off_rank_bytes,
    "S1.8-34": lambda layer: layer.received("mlp.fc2"),
    "S1.8-35": lambda layer: layer.row("mlp.fc1", "backward").off_rank_bytes,
    "S1.8-36": lambda layer: layer.received("mlp.fc1", "backward"),
    "S1.8-37": lambda layer: layer.row("attention.qkv", "backward").off_rank_bytes,
    "S1.8-38": lambda layer: layer.received("attention.qkv", "backward"),
    "S1.8-39": lambda layer: layer.number("backward", "all_gather"),
    "S1.8-40": lambda layer: layer.number("backward", "reduce_scatter"),
    "S1.8-41": lambda layer: layer.number("backward"),
    "S1.8-42": lambda layer: layer.row("mlp.fc2", "backward").payload_bytes,
    "S1.8-43": lambda layer: layer.full(layer.one, "backward"),
}


def _elements(layer: Layer, part: str) -> int:
    """Elements of all weights of a layer, and so of each optimizer state."""
    names = ("attention.qkv", "attention.proj", "mlp.gate", "mlp.up", "mlp.fc2")
    sizes = [getattr(shapes.weights(layer.one)[name], part) for name in names]
    return sum(rows * columns for rows, columns in sizes)


def _table_value(claim: dict[str, str]) -> Any:
    text = claim["recomputed_value"]
    if text.startswith("["):
        return tuple(int(number) for number in text.strip("[]").split(","))
    return Fraction(text) * _UNIT.get(claim["unit"], 1)


def test_claim(claim: dict[str, str], document_job: Callable[..., Job]) -> None:
    if claim["id"] in EXCLUDED:
        assert claim["verdict"] != "consistent" or claim["id"] in ("S1.3.1-23", "S1.3.2-1")
        pytest.skip(EXCLUDED[claim["id"]])
    assert claim["verdict"] in ("consistent", "arithmetic_error", "convention_mismatch")
    assert CLAIMS[claim["id"]](Layer(document_job)) == _table_value(claim)


def test_no_claim_is_listed_twice() -> None:
    assert not CLAIMS.keys() & EXCLUDED.keys()
