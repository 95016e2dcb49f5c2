"""CUDA graphs: what a graph captures stays expected, and is no call of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from traceanalyzer import expect
from traceanalyzer.job import Job

EXPERTS: dict[str, Any] = {
    "world_size": 8,
    "num_experts": 4,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_layer_freq": (1, 0),
    "moe_shared_expert_intermediate_size": 128,
    "moe_aux_loss_coeff": 0.01,
}


def _captured(job: Job, rank: int = 0) -> set[str]:
    """First words of the components that a graph captures."""
    rows = [row for row in expect.expected(job, rank).calls if row.transport == "CUDA graph"]
    assert all(row.outside_c10d for row in rows)
    return {row.component.split(".")[0].split(":")[0] for row in rows}


LAYER = {"attention", "mlp", "experts", "router", "shared expert"}


@pytest.mark.parametrize(
    ("options", "components"),
    [
        ({}, set()),
        ({"cuda_graph_impl": "local"}, LAYER),
        ({"cuda_graph_impl": "transformer_engine"}, LAYER),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ("attn",)}, {"attention"}),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ("mlp",)}, {"mlp"}),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ("moe_router",)}, {"router", "shared expert"}),
        ({"megatron_core_version": "0.13.0", "enable_cuda_graph": True}, LAYER),
    ],
)
def test_layers(tiny: Callable[..., Job], options: dict[str, Any], components: set[str]) -> None:
    """Embedding, output layer, loss, gradients and scalars are never inside the graph of a layer."""
    assert _captured(tiny(**{**EXPERTS, **options})) == components


def test_an_overlapped_shared_expert_is_not_in_the_routers_graph(tiny: Callable[..., Job]) -> None:
    options = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ("moe_router",)}
    assert _captured(tiny(**EXPERTS, **options, moe_shared_expert_overlap=True)) == {"router"}


def test_a_whole_iteration_is_all_but_the_optimizer_and_the_training_loop(tiny: Callable[..., Job]) -> None:
    job = tiny(cuda_graph_impl="local", cuda_graph_scope=("full_iteration",), framework="megatron-lm")
    outside = {row.component for row in expect.expected(job, 0).calls if not row.outside_c10d}
    assert "embedding" in _captured(job)
    assert "gradients" in _captured(job)
    assert {"gradient norm", "loss average"} <= outside
    assert not {component for component in outside if component.startswith(("attention", "mlp", "embedding", "loss:"))}


def test_sizes_and_counts_are_those_without_graphs(tiny: Callable[..., Job]) -> None:
    plain, graphed = (expect.expected(tiny(cuda_graph_impl=impl), 0) for impl in ("none", "local"))
    assert [(r.rule, r.in_elems, r.calls) for r in plain.calls] == [
        (r.rule, r.in_elems, r.calls) for r in graphed.calls
    ]
    (row,) = [row for row in graphed.calls if row.component == "attention.qkv" and row.phase == "forward"]
    assert row.formula["transport"] == "CUDA graph: captured, no call of torch.distributed when it runs"
