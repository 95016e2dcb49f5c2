"""Faults in time: ranks make the calls that they should, but some of it takes longer, or comes later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from traceanalyzer.errors import JobError
from traceanalyzer.simulate.costs import SlowLink
from traceanalyzer.simulate.faults.plan import Fault, Plan
from traceanalyzer.simulate.program import Ints
from traceanalyzer.simulate.walk_expert import Draw, drawn, scattered

DENSE: Mapping[str, Any] = {
    "world_size": 16,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "sequence_parallel": True,
    "num_layers": 4,
    "hidden_size": 4096,
    "ffn_hidden_size": 11008,
    "num_attention_heads": 32,
    "swiglu": True,
    "seq_length": 4096,
    "max_position_embeddings": 4096,
    "position_embedding_type": "rope",
    "padded_vocab_size": 2048,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "bf16": True,
    "use_distributed_optimizer": True,
    "megatron_core_version": "0.16.1",
}
"""Two stages of two TP ranks, four replicas: every rank has three of its kind to be held against."""

MOE: Mapping[str, Any] = {
    **DENSE,
    "world_size": 8,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "sequence_parallel": False,
    "num_layers": 3,
    "expert_model_parallel_size": 4,
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
    "moe_ffn_hidden_size": 4096,
}
"""Two groups of four expert-parallel ranks."""


def check_ranks(plan: Plan, *ranks: int) -> None:
    """Raises JobError for a rank that the job does not have."""
    world = plan.job.layout.world_size
    wrong = [r for r in ranks if not 0 <= r < world]
    if wrong:
        raise JobError(f"the fault names rank {wrong[0]}, and the job has ranks 0 to {world - 1}")


def check_host(plan: Plan, rank: int) -> None:
    """Raises JobError where all ranks are on the host of this one: then it cannot differ from others."""
    host = plan.costs.host_of(rank)
    if all(plan.costs.host_of(r) == host for r in range(plan.job.layout.world_size)):
        raise JobError(
            f"all ranks are on {host}, so it cannot differ from others: fewer ranks_per_node make more hosts"
        )


def _nodes(plan: Plan, ranks_per_node: int) -> Plan:
    """The plan with nodes of another size; 0 leaves it."""
    return plan.with_costs(ranks_per_node=ranks_per_node) if ranks_per_node else plan


# -- experts -----------------------------------------------------------------------------------------------------------


def _toward(draw: Draw, experts: list[int], factor: float) -> Ints:
    """Rows of which some experts get ``factor`` times their share, as far as there are tokens; the others share the rest."""
    popularity = draw.random.dirichlet(np.full(draw.experts, 100.0))
    popularity[experts] = factor / draw.experts
    others = [e for e in range(draw.experts) if e not in experts]
    popularity[others] *= max(0.0, 1.0 - factor / draw.experts * len(experts)) / popularity[others].sum()
    return drawn(draw, popularity)


def _expert_ranks(plan: Plan) -> tuple[int, int]:
    degree, experts = plan.job.expert_model_parallel_size, plan.job.num_experts
    if experts is None or degree is None or degree < 2:
        raise JobError("the job has no expert parallelism, so no expert of it can be hot")
    return experts, degree


def _hot_expert(plan: Plan, layer: int, expert: int, factor: float) -> Plan:
    experts, degree = _expert_ranks(plan)
    if not 0 <= expert < experts:
        raise JobError(f"the fault names expert {expert}, and the job has experts 0 to {experts - 1}")

    def rows(draw: Draw) -> Ints:
        return _toward(draw, [expert], factor) if draw.layer == layer else scattered(draw)

    rank = (plan.job.layout.group_of("ep", 0) or (0,))[expert // (experts // degree)]
    return plan.with_(routing=rows).at(role="ep", layer=layer, rank=rank)


def _hot_rank(plan: Plan, place: int, factor: float) -> Plan:
    experts, degree = _expert_ranks(plan)
    if not 0 <= place < degree:
        raise JobError(f"the fault names place {place} of expert-parallel groups of {degree}")
    each = experts // degree
    mine = list(range(place * each, (place + 1) * each))

    def rows(draw: Draw) -> Ints:
        return _toward(draw, mine, factor)

    rank = (plan.job.layout.group_of("ep", 0) or (0,))[place]
    return plan.with_(routing=rows).at(role="ep", rank=rank)


# -- stages, devices and hosts -----------------------------------------------------------------------------------------


def _uneven_stages(plan: Plan, stage: int, layers: int) -> Plan:
    job = plan.job
    stages = job.pipeline_model_parallel_size
    if not stages or stages < 2 or not 0 <= stage < stages:
        raise JobError("the job has no such pipeline stage, or one alone")
    if stage not in (0, stages - 1):
        raise JobError("only the first or the last stage can have another number of layers than the rest")
    field = "decoder_first_pipeline_num_layers" if stage == 0 else "decoder_last_pipeline_num_layers"
    changed: dict[str, Any] = {field: layers}
    return plan.with_(job=replace(job, **changed)).at(stage=stage)


def _slow_gpu(plan: Plan, rank: int, factor: float) -> Plan:
    check_ranks(plan, rank)
    return plan.with_costs(slow_gpu={**plan.costs.slow_gpu, rank: factor}).at(
        rank=rank, stage=plan.job.layout.stage(rank)
    )


def _slow_host(plan: Plan, rank: int, factor: float, ranks_per_node: int) -> Plan:
    check_ranks(plan, rank)
    plan = _nodes(plan, ranks_per_node)
    check_host(plan, rank)
    host = plan.costs.host_of(rank)
    ranks = [r for r in range(plan.job.layout.world_size) if plan.costs.host_of(r) == host]
    return plan.with_costs(slow_host={**plan.costs.slow_host, **dict.fromkeys(ranks, factor)}).at(
        host=host, ranks=ranks
    )


def _late_loader(plan: Plan, rank: int, late_ns: int) -> Plan:
    check_ranks(plan, rank)
    usual = plan.costs.host_ns.get("data", 0)
    if usual <= 0:
        raise JobError("loading data costs nothing in these costs, so it cannot be late")
    slow = {**plan.costs.slow_host_cost, (rank, "data"): (usual + late_ns) / usual}
    return plan.with_costs(slow_host_cost=slow).at(rank=rank)


# -- links -------------------------------------------------------------------------------------------------------------


def _slow_link(plan: Plan, source: int, target: int, factor: float, ranks_per_node: int) -> Plan:
    check_ranks(plan, source, target)
    plan = _nodes(plan, ranks_per_node)
    slow = (*plan.costs.slow_link, SlowLink(source, target, factor), SlowLink(target, source, factor))
    return plan.with_costs(slow_link=slow).at(ranks=[source, target])


def _slow_direction(plan: Plan, source: int, target: int, factor: float) -> Plan:
    check_ranks(plan, source, target)
    slow = (*plan.costs.slow_link, SlowLink(source, target, factor))
    return plan.with_costs(slow_link=slow).at(role="pp", ranks=[source, target])


FAULTS: tuple[Fault, ...] = (
    Fault(
        "hot_expert",
        "One expert of one layer gets several times its share of the tokens.",
        "time",
        "hot_expert",
        "experts of the rank receive more rows than the mean in this layer",
        MOE,
        _hot_expert,
        {"layer": 1, "expert": 5, "factor": 3.0},
    ),
    Fault(
        "hot_rank",
        "All experts of one expert-parallel rank get several times their share of the tokens.",
        "time",
        "hot_rank",
        "the rank receives more rows than the mean in every layer",
        MOE,
        _hot_rank,
        {"place": 2, "factor": 2.0},
    ),
    Fault(
        "uneven_stages",
        "One pipeline stage has more layers than the others.",
        "time",
        "uneven_stages",
        "the stage computes longer than the mean of all",
        {**DENSE, "num_layers": 8},
        _uneven_stages,
        {"stage": 0, "layers": 6},
    ),
    Fault(
        "slow_gpu",
        "The kernels of one GPU take longer.",
        "time",
        "slow_gpu",
        "the rank's kernels of several classes take longer than those of its like",
        {**DENSE, "pipeline_model_parallel_size": 1, "world_size": 8},
        _slow_gpu,
        {"rank": 5, "factor": 1.3},
    ),
    Fault(
        "slow_rank_all_peers_late",
        "One GPU is slow, so its tensor-, pipeline- and data-parallel peers all come late too.",
        "time",
        "slow_gpu",
        "the rank alone is named; what its peers show is explained by it",
        DENSE,
        _slow_gpu,
        {"rank": 5, "factor": 1.4},
    ),
    Fault(
        "slow_host",
        "The host of some ranks launches work slowly.",
        "time",
        "slow_host",
        "the devices of this host alone wait for launches",
        {**DENSE, "hidden_size": 1024, "ffn_hidden_size": 2816, "seq_length": 1024, "num_attention_heads": 8},
        _slow_host,
        {"rank": 4, "factor": 6.0, "ranks_per_node": 2},
    ),
    Fault(
        "slow_link",
        "Data moves slowly between two ranks, both ways.",
        "time",
        "slow_link",
        "calls of the group with both take longer than those of its equals",
        DENSE,
        _slow_link,
        {"source": 1, "target": 3, "factor": 6.0, "ranks_per_node": 2},
    ),
    Fault(
        "slow_direction",
        "Pipeline messages from one rank to another move slowly, and not back.",
        "time",
        "slow_direction",
        "messages this way take longer than those of the other pipelines",
        DENSE,
        _slow_direction,
        {"source": 2, "target": 10, "factor": 12.0},
    ),
    Fault(
        "late_loader",
        "The data loader of one rank is late in every step.",
        "time",
        "late_data",
        "the rank's device gets its first work of a step later than the others",
        {
            **DENSE,
            "world_size": 8,
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "sequence_parallel": False,
            "framework": "megatron-lm",
        },
        _late_loader,
        {"rank": 3, "late_ns": 20_000_000},
    ),
)
