"""The closed numbers of the reference, section 4.2, from the whole model: a layer's bytes, a rank's parameters, messages.

The seed document's model under Megatron's layout: S 8192, B 2, H 8192, 64 heads, F 32768, 80 layers of which every fourth
has 64 experts (k 2); TP4 SP, CP2 by all-to-all, PP4, EP8, 1,024 ranks. MiB a rank, layer and micro-batch, ring-equivalent.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from traceanalyzer import expect
from traceanalyzer.expect import parameters
from traceanalyzer.job import Job

MIB = 1 << 20

Make = Callable[..., Job]


@pytest.fixture
def job(document_job: Make) -> Make:
    def make(**changes: Any) -> Job:
        options: dict[str, Any] = {
            "world_size": 1024,
            "context_parallel_size": 2,
            "cp_comm_type": ("a2a",),
            "pipeline_model_parallel_size": 4,
            "expert_model_parallel_size": 8,
            "num_experts": 64,
            "moe_router_topk": 2,
            "moe_layer_freq": 4,
            "moe_token_dispatcher_type": "alltoall",
            "num_microbatches": 8,
            "transformer_engine_version": "2.13",
            "use_distributed_optimizer": True,
        }
        return document_job(**{**options, **changes})

    return make


def _layer(job: Job, phase: str, role: str, part: str, layers: int) -> Fraction:
    """MiB that leave the rank in one layer and micro-batch, in calls of this part that carry hidden states."""
    rows = [
        row
        for row in expect.expected(job, job.layout.rank_of(pp=1)).calls
        if (row.role, row.phase) == (role, phase)
        and row.component.startswith(part)
        and not row.component.endswith(("probabilities", "counts"))
    ]
    assert rows
    return sum((row.off_rank_bytes * row.calls for row in rows), Fraction(0)) / (layers * 8 * MIB)


def _tp(job: Job, phase: str) -> tuple[Fraction, Fraction]:
    """Attention and dense MLP: 20 layers of a stage have the one, 15 the other."""
    return _layer(job, phase, "tp", "attention", 20), _layer(job, phase, "tp", "mlp", 15)


def _experts(job: Job, phase: str) -> Fraction:
    roles = ["ep", "etp"] if job.expert_tensor_parallel_size != 1 else ["ep"]
    return sum((_layer(job, phase, role, "experts", 5) for role in roles), Fraction(0))


def test_a_dense_layer(job: Make) -> None:
    """384 + 64 forward, 576 + 64 backward: 1088 MiB."""
    forward, backward = _tp(job(), "forward"), _tp(job(), "backward")
    cp = [_layer(job(), phase, "cp", "attention", 20) for phase in ("forward", "backward")]
    assert [sum(forward), sum(backward), *cp] == [384, 576, 64, 64]
    assert sum((*forward, *backward, *cp)) == 1088


@pytest.mark.parametrize(("etp", "experts", "whole"), [(4, 496, 1600), (1, 112, 832)])
def test_a_layer_with_experts(job: Make, etp: int, experts: int, whole: int) -> None:
    """ETP4: 56 + 192 + 192 + 56 in each direction; ETP1: 56 + 56."""
    made = job(expert_tensor_parallel_size=etp)
    both = ("forward", "backward")
    assert [_tp(made, phase)[0] for phase in both] == [192, 288]
    assert [_experts(made, phase) for phase in both] == [experts, experts]
    cp = sum(_layer(made, phase, "cp", "attention", 20) for phase in both)
    assert 192 + 288 + cp + 2 * experts == whole


@pytest.mark.parametrize(("kind", "forward", "backward"), [("a2a", 64, 64), ("p2p", 64, 128), ("all_gather", 64, 128)])
@pytest.mark.parametrize(("groups", "share"), [(64, 1), (8, 8)])
def test_context_parallel_bytes(job: Make, kind: str, forward: int, backward: int, groups: int, share: int) -> None:
    """Queries and outputs do not shrink with grouped queries, keys and values do."""
    made = job(cp_comm_type=(kind,), group_query_attention=True, num_query_groups=groups)
    found = []
    for phase in ("forward", "backward"):
        rows = [
            row
            for row in expect.expected(made, made.layout.rank_of(pp=1)).calls
            if (row.role, row.phase) == ("cp", phase) and row.op != "recv"
        ]
        found.append(sum((row.off_rank_bytes * row.calls for row in rows), Fraction(0)) / (20 * 8 * MIB))
    if kind == "a2a":
        assert found == [forward * Fraction(1, 2) * (1 + Fraction(1, share))] * 2
    else:
        assert found == [Fraction(forward, share), Fraction(backward, share)]


def test_parameters(job: Make) -> None:
    """1.10e12 in all, experts 93.7 %; 4.36e9 dense and 8.05e9 of experts on a rank with ETP4, embeddings left out."""
    made = job()
    hidden = 8192
    layers = 80 * 4 * hidden**2 + 60 * 12 * hidden**2 + 20 * 64 * 12 * hidden**2
    assert layers == 1_100_585_369_600
    held = parameters.components(made, made.layout.rank_of(pp=1))
    dense = sum(part.elements.value for part in held if not part.expert)
    expert = sum(part.elements.value for part in held if part.expert)
    norms_and_router = 20 * 2 * hidden + 5 * 64 * hidden
    assert dense - norms_and_router == (20 * 4 + 15 * 12) * hidden**2 // 4 == 4_362_076_160
    assert expert == 5 * 64 * 12 * hidden**2 // 32 == 8_053_063_680


def test_gradients_and_parameters_of_a_step(job: Make) -> None:
    """Dense 17.4 GB reduce-scattered in float32 over 64 ranks, experts 32.2 GB over 8; gathered in bf16, twice."""
    made = job()
    rounded: dict[tuple[str, str], tuple[float, int, int]] = {}
    for row in expect.expected(made, made.layout.rank_of(pp=1)).calls:
        if row.role in ("dp_cp", "edp"):
            calls = rounded.get((row.role, row.op), (0.0, 0, 0))[2] + row.calls
            rounded[row.role, row.op] = (round(row.payload_bytes / 1e9, 1), row.group_size, calls)
    assert rounded == {
        ("dp_cp", "reduce_scatter"): (17.5, 64, 1),
        ("dp_cp", "all_gather"): (8.7, 64, 2),
        ("edp", "reduce_scatter"): (32.2, 8, 1),
        ("edp", "all_gather"): (16.1, 8, 2),
    }


@pytest.mark.parametrize(
    ("chunks", "stage", "messages"),
    [
        (None, 0, (8, 0, 0, 8)),
        (None, 1, (8, 8, 8, 8)),
        (None, 3, (0, 8, 8, 0)),
        (2, 0, (16, 8, 8, 16)),
        (2, 1, (16, 16, 16, 16)),
        (2, 3, (8, 16, 16, 8)),
    ],
)
def test_messages_of_a_stage(job: Make, chunks: int | None, stage: int, messages: tuple[int, ...]) -> None:
    """Section 2.4, M 8: sends to next, receives from previous, sends to previous, receives from next; 32 MiB each."""
    made = job(virtual_pipeline_model_parallel_size=chunks)
    rows = [row for row in expect.expected(made, made.layout.rank_of(pp=stage)).calls if row.role == "pp"]
    assert {row.payload_bytes for row in rows} == {32 * MIB}
    ways = [("send", "next"), ("recv", "previous"), ("send", "previous"), ("recv", "next")]
    assert tuple(sum(row.calls for row in rows if (row.op, row.peer) == way) for way in ways) == messages


def test_deep_ep_sends_a_token_once_to_a_rank(job: Make) -> None:
    """D = EP (1 - C(E - E/EP, k) / C(E, k)) = 17/9 = 1.889 ranks a token, its own among them, instead of k = 2."""
    made = job(
        moe_token_dispatcher_type="flex",
        moe_enable_deepep=True,
        moe_router_dtype="fp32",
        expert_tensor_parallel_size=1,
    )
    rows = [row for row in expect.expected(made, made.layout.rank_of(pp=1)).calls if row.outside_c10d]
    (dispatch,) = {
        row.off_rank_bytes
        for row in rows
        if row.phase == "forward"
        and row.component.startswith("experts.dispatch")
        and not row.component.endswith("probabilities")
    }
    tokens, own = 8192 // 8 * 2, Fraction(17, 9) / 8
    assert dispatch == tokens * (Fraction(17, 9) - own) * 8192 * 2
    assert {row.transport for row in rows} == {"deepep"}
