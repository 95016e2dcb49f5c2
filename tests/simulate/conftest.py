"""Costs that a hand can reckon with, and pipelines of one rank a stage."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from traceanalyzer.simulate.costs import Costs, Link
from traceanalyzer.simulate.program import Call, Compute, Group, Instruction, Phase, Program, Walked, Where

Order = list[tuple[str, int, int]]


@pytest.fixture(scope="session")
def plain_costs() -> Costs:
    """1 FLOP a ns, launches and calls of 1 ns, no shortest kernel; all links 100 ns and 1 byte a ns, 4 ranks a node."""
    link = Link(100, 1e9)
    return Costs(
        ranks_per_node=4,
        flops_per_s={"any": {"any": 1e9}},
        memory_bytes_per_s=1e9,
        kernel_ns=0,
        links={"intra": link, "inter": link},
        launch_ns=1,
        call_ns=1,
        host_ns={"data": 1000},
    )


@pytest.fixture(scope="session")
def free_links(plain_costs: Costs) -> Costs:
    """The same with links that cost nothing."""
    link = Link(0, float("inf"))
    return plain_costs.with_changes(links={"intra": link, "inter": link})


@pytest.fixture(scope="session")
def kernel() -> Callable[..., Compute]:
    """Makes a matrix product of this many ns: on every rank, or on each."""

    def make(ns: int | list[int], phase: Phase = "forward", stream: str = "compute") -> Compute:
        flops = ns if isinstance(ns, int) else np.array(ns, np.int64)
        return Compute("gemm_kernel", "gemm", flops, 0, Where(phase), stream)

    return make


@pytest.fixture(scope="session")
def call() -> Callable[..., Call]:
    """Makes a call on floats; an all-reduce or a message of ``elems``, an all-gather or reduce-scatter to or from them."""

    def make(op: str, role: str, elems: int, ranks: int = 2, phase: Phase = "forward", **more: object) -> Call:
        part = elems // ranks
        sizes = {"all_gather": (part, elems), "reduce_scatter": (elems, part)}.get(op, (elems, elems))
        return Call(role, op, "Float", *sizes, Where(phase), **more)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def pipeline() -> Callable[..., Walked]:
    """Makes a pipeline of one rank a stage from each stage's passes: ("F" or "B", chunk, micro-batch).

    A pass takes ``forward`` or ``backward`` ns. What it needs is received just before it, what it makes is sent behind it
    without waiting; each way between two chunks has a stream of its own, so that messages do not wait for each other.
    """

    def make(orders: list[Order], forward: int, backward: int) -> Walked:
        stages = len(orders)
        last = stages * (1 + max(chunk for order in orders for _, chunk, _ in order)) - 1
        programs = []
        for stage, order in enumerate(orders):
            body: list[Instruction] = []
            for kind, chunk, microbatch in order:
                way: Phase = "forward" if kind == "F" else "backward"
                where = Where(way, microbatch=microbatch, chunk=chunk)
                place = chunk * stages + stage
                before, after = (place - 1, place + 1) if kind == "F" else (place + 1, place - 1)

                def message(op: str, other: int, where: Where = where, handle: int | None = None) -> Call:
                    peer = np.array([other % stages], np.int64)
                    stream = f"pp {where.phase} {op} {other}"
                    return Call("pp", op, "Float", 0, 0, where, peer=peer, stream=stream, handle=handle)

                if 0 <= before <= last:
                    body.append(message("recv", before))
                body.append(Compute("gemm_kernel", "gemm", forward if kind == "F" else backward, 0, where))
                if 0 <= after <= last:
                    body.append(message("send", after, handle=len(body)))
            programs.append(Program((stage,), body))
        ranks = tuple(range(stages))
        groups = [Group("world", ranks, "default_pg"), Group("pp", ranks, "PIPELINE_MODEL_PARALLEL_GROUP")]
        return Walked(programs, groups)

    return make
