"""Faults in traffic: the ranks make other calls than their job says, or the job is another one than was meant."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from traceanalyzer.errors import JobError
from traceanalyzer.simulate.faults.graphs import captured_in_graphs
from traceanalyzer.simulate.faults.plan import Fault, Plan
from traceanalyzer.simulate.program import Call, Instruction, Program, Sync, Wait, Walked, Where

MODEL: dict[str, Any] = {
    "megatron_core_version": "0.16.1",
    "framework": "megatron-lm",
    "micro_batch_size": 1,
    "num_microbatches": 4,
    "seq_length": 4096,
    "max_position_embeddings": 4096,
    "num_layers": 4,
    "hidden_size": 4096,
    "ffn_hidden_size": 16384,
    "num_attention_heads": 32,
    "padded_vocab_size": 32768,
    "bf16": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "swiglu": True,
    "normalization": "RMSNorm",
}
"""A small model whose kernels are long enough to be more than launches."""


def job(world_size: int, **fields: Any) -> dict[str, Any]:
    """Fields of a job with that model."""
    return {**MODEL, "world_size": world_size, **fields}


_TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
_SHARDED: dict[str, Any] = {"use_distributed_optimizer": True}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 8192,
    "moe_token_dispatcher_type": "alltoall",
}

# -- changes of programs -----------------------------------------------------------------------------------------------


def each(change: Callable[[Program], Iterator[Instruction]]) -> Callable[[Walked], Walked]:
    """A change of programs out of one of a program's instructions."""

    def changed(walked: Walked) -> Walked:
        programs = [Program(p.ranks, list(change(p)), p.metrics) for p in walked.programs]
        return Walked(programs, walked.groups)

    return changed


def _calls(change: Callable[[Call], list[Call]]) -> Callable[[Walked], Walked]:
    """A change of programs out of one of calls."""

    def change_program(program: Program) -> Iterator[Instruction]:
        for one in program.instructions:
            if isinstance(one, Call):
                yield from change(one)
            else:
                yield one

    return each(change_program)


def _without(dropped: Callable[[Call], bool]) -> Callable[[Walked], Walked]:
    """Programs that lack some calls, and the waits for them."""

    def change(program: Program) -> Iterator[Instruction]:
        gone = {c.handle for c in program.instructions if isinstance(c, Call) and dropped(c)} - {None}
        for one in program.instructions:
            if isinstance(one, Call) and dropped(one):
                continue
            if isinstance(one, Wait) and one.handle in gone:
                continue
            yield one

    return each(change)


def _at_the_end(*added: Instruction) -> Callable[[Walked], Walked]:
    """Programs with more instructions at the end of the step, inside its range."""
    return each(lambda program: iter([*program.instructions[:-1], *added, program.instructions[-1]]))


def _apart(plan: Plan, rank: int) -> Plan:
    """The plan in which a rank has a program of its own."""
    if not 0 <= rank < plan.job.layout.world_size:
        raise JobError(f"rank {rank} is not in a world of {plan.job.layout.world_size}")
    same = {"num_layers": plan.does.num_layers}
    return plan.with_changes(ranks={**plan.changes.ranks, rank: {**same, **plan.changes.ranks.get(rank, {})}})


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise JobError(f"this fault needs a job with {what}")


def _members(plan: Plan, role: str, rank: int) -> tuple[int, ...]:
    return plan.job.layout.group_of(role, rank) or (rank,)


# -- the faults --------------------------------------------------------------------------------------------------------


def _sequence_parallel_off(plan: Plan, stage: int) -> Plan:
    does = plan.does
    _need(does.sequence_parallel, "sequence parallelism")
    _need(0 <= stage < does.pipeline_model_parallel_size, f"a stage {stage}")
    (sequence, batch, hidden) = does.require("seq_length", "micro_batch_size", "hidden_size")
    elems = sequence * batch * hidden // does.context_parallel_size // does.tensor_model_parallel_size

    def messages(call: Call) -> list[Call]:
        # the schedule still exchanges a part with each neighbour, whatever the layers do
        if call.op in ("send", "recv") and call.where.component in ("activations", "gradients"):
            return [dataclasses.replace(call, in_elems=elems, out_elems=elems)]
        return [call]

    off = {**plan.changes.stages.get(stage, {}), "sequence_parallel": False}
    changed = plan.with_changes(stages={**plan.changes.stages, stage: off}).after(_calls(messages))
    return changed.at(stage=stage, role="tp") if does.pipeline_model_parallel_size > 1 else changed.at(role="tp")


def _recompute(plan: Plan) -> Plan:
    _need(plan.does.recompute_granularity is None, "no recomputation")
    return plan.with_done(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1).at(
        role="tp"
    )


def _fp32_reduction(plan: Plan) -> Plan:
    _need(plan.does.main_grad_dtype != "float32", "gradients reduced in 16 bits (grad_reduce_in_bf16)")
    return plan.with_done(grad_reduce_in_bf16=False).at(role="dp_cp")


def _bucket_padding(plan: Plan) -> Plan:
    _need(plan.does.use_distributed_optimizer, "the distributed optimizer")
    return plan.with_done(ddp_pad_buckets_for_high_nccl_busbw=True).at(role="dp_cp")


def _is_gather(call: Call) -> bool:
    return call.op == "all_gather" and call.where.component in ("parameters", "expert parameters")


def _double_gather(plan: Plan) -> Plan:
    _need(plan.does.use_distributed_optimizer, "the distributed optimizer")
    # the same again, waited for where it is made
    again = _calls(lambda c: [dataclasses.replace(c, handle=None, coalesce=None), c] if _is_gather(c) else [c])
    return plan.after(again).at(role="dp_cp", op="all_gather")


def _overlap_ignored(plan: Plan) -> Plan:
    _need(plan.does.overlap_grad_reduce, "overlap_grad_reduce")
    return plan.with_done(overlap_grad_reduce=False, overlap_param_gather=False).at(role="dp_cp")


def _overlap_without_effect(plan: Plan) -> Plan:
    _need(plan.does.overlap_grad_reduce, "overlap_grad_reduce")
    roles = ("dp_cp", "edp", "intra_dp_cp", "intra_edp", "inter_dist_opt")

    def change(program: Program) -> Iterator[Instruction]:
        gone = {c.handle for c in program.instructions if isinstance(c, Call) and c.role in roles} - {None}
        for one in program.instructions:
            if isinstance(one, Call) and one.role in roles:
                yield dataclasses.replace(one, handle=None)
            elif not (isinstance(one, Wait) and one.handle in gone):
                yield one

    return plan.after(each(change)).at(role="dp_cp", axis="DP")


def _wrong_etp(plan: Plan) -> Plan:
    _need(plan.job.expert_tensor_parallel_size == 1 < plan.job.tensor_model_parallel_size, "ETP 1 and TP above 1")
    tp = plan.job.tensor_model_parallel_size
    return plan.with_job(expert_tensor_parallel_size=tp).at(role="etp", field="expert_tensor_parallel_size")


def _wrong_ep(plan: Plan) -> Plan:
    _need(plan.job.num_experts is not None and plan.job.expert_model_parallel_size > 1, "expert parallelism")
    return plan.with_job(expert_model_parallel_size=1).at(role="ep", field="expert_model_parallel_size")


def _capacity(plan: Plan, factor: float) -> Plan:
    _need(plan.does.num_experts is not None and plan.does.expert_model_parallel_size > 1, "expert parallelism")
    return plan.with_done(moe_expert_capacity_factor=factor).at(role="ep", op="all_to_all")


def _layers(plan: Plan, rank: int, layers: int) -> Plan:
    _need(plan.does.pipeline_model_parallel_size == 1, "one pipeline stage")
    _need(plan.does.num_layers not in (None, layers), f"another number of layers than {layers}")
    # ranks that share a layer's weights build it together, or hang in its first call
    members = sorted(
        {one for role in ("tp", "cp") for first in _members(plan, "tp", rank) for one in _members(plan, role, first)}
    )
    ranks = {**plan.changes.ranks}
    for one in members:
        ranks[one] = {**ranks.get(one, {}), "num_layers": layers}
    return plan.with_changes(ranks=ranks).at(ranks=members)


def _order_mismatch(plan: Plan, rank: int) -> Plan:
    """The first two calls of different operations on the rank's TP group, next to each other there, change places."""
    _need(plan.does.tensor_model_parallel_size > 1, "tensor parallelism")

    def change(program: Program) -> Iterator[Instruction]:
        body = list(program.instructions)
        if program.ranks == (rank,):
            at = [i for i, one in enumerate(body) if isinstance(one, Call) and one.role == "tp" and one.handle is None]
            pairs = [
                (i, j)
                for i, j in pairwise(at)
                if body[i].op != body[j].op and body[i].where.layer is not None  # type: ignore[union-attr]
            ]
            i, j = pairs[0]
            body[i], body[j] = body[j], body[i]
        yield from body

    changed = _apart(plan, rank).after(each(change)).with_(allow_hang=True)
    return changed.at(rank=rank, role="tp", ranks=list(_members(plan, "tp", rank)))


def _extra_all_reduce(plan: Plan, elems: int, role: str) -> Plan:
    call = Call(role, "all_reduce", "Float", elems, elems, Where("other"), reduce_op="sum")
    return plan.after(_at_the_end(call, Sync())).at(role=role, op="all_reduce")


def _barrier(plan: Plan) -> Plan:
    call = Call("world", "barrier", "Float", 1, 1, Where("other"))
    return plan.after(_at_the_end(call, Sync())).at(role="world", op="barrier")


def _is_gradient(call: Call) -> bool:
    return call.role == "dp_cp" and call.op in ("all_reduce", "reduce_scatter") and call.where.component == "gradients"


def _wrong_group(plan: Plan) -> Plan:
    _need(plan.does.context_parallel_size > 1, "context parallelism")
    _need(not plan.does.use_distributed_optimizer, "gradients that are all-reduced")
    moved = _calls(lambda c: [dataclasses.replace(c, role="dp") if _is_gradient(c) else c])
    return plan.after(moved).at(role="dp_cp", op="all_reduce")


def _tied_embedding(plan: Plan) -> Plan:
    _need(
        plan.does.pipeline_model_parallel_size > 1 and not plan.does.untie_embeddings_and_output_weights,
        "a word embedding that the first and last of several stages share",
    )
    return plan.after(_without(lambda c: c.role == "embedding")).at(role="embedding", op="all_reduce")


def _cp_variant(plan: Plan, kind: str) -> Plan:
    _need(plan.does.context_parallel_size > 1, "context parallelism")
    return plan.with_done(cp_comm_type=(kind,)).at(role="cp")


def _gqa_ignored(plan: Plan) -> Plan:
    heads, groups = plan.does.require("num_attention_heads", "num_query_groups")
    _need(groups < heads and plan.does.context_parallel_size > 1, "grouped queries and context parallelism")
    return plan.with_done(group_query_attention=False, num_query_groups=heads).at(role="cp")


def _vocabulary(plan: Plan, divisor: int) -> Plan:
    (padded,) = plan.does.require("padded_vocab_size")
    other = math.ceil(padded / divisor) * divisor
    _need(other != padded, f"a padded vocabulary that {divisor} does not divide")
    return plan.with_done(padded_vocab_size=other)


def _default_group(plan: Plan) -> Plan:
    job = plan.does
    _need(job.pipeline_model_parallel_size == 2 and bool(job.batch_p2p_comm), "two stages and batched messages")
    return plan.with_done(batch_p2p_comm=False).at(role="pp")


def _confused(plan: Plan, one: str, other: str) -> Plan:
    layout = plan.does.layout
    _need(layout.group_size(one) == layout.group_size(other) > 1, f"groups {one} and {other} of one size")
    swapped = {one: other, other: one}
    moved = _calls(
        lambda c: [
            dataclasses.replace(c, role=swapped[c.role]) if c.role in swapped and c.where.layer is not None else c
        ]
    )
    return plan.after(moved).at(role=one, roles=[one, other])


def _microbatches(plan: Plan, number: int) -> Plan:
    _need(plan.does.num_microbatches not in (None, number), f"another number of micro-batches than {number}")
    return plan.with_done(num_microbatches=number, global_batch_size=None)


def _graphs(plan: Plan) -> Plan:
    return plan.with_(finish=(*plan.finish, captured_in_graphs())).at(role="tp")


def _userbuffers(plan: Plan) -> Plan:
    _need(plan.does.sequence_parallel and not plan.does.tp_comm_overlap, "sequence parallelism and no tp_comm_overlap")
    return plan.with_done(tp_comm_overlap=True).at(role="tp")


FAULTS: tuple[Fault, ...] = (
    Fault(
        "sequence_parallel_off",
        "One stage runs without sequence parallelism, the job has it on.",
        "verdict",
        "sequence_parallel_off",
        "sequence parallelism was off, in this stage",
        job(8, **_TP2, pipeline_model_parallel_size=2),
        _sequence_parallel_off,
        {"stage": 1},
    ),
    Fault(
        "recompute_on",
        "Recomputation of a debugging session was left on.",
        "verdict",
        "recompute_full",
        "recomputation is on, the job does not ask for it",
        job(4, **_TP2),
        _recompute,
    ),
    Fault(
        "fp32_reduction",
        "Gradients are reduced in 32 bits, the job says 16.",
        "verdict",
        "fp32_reduction",
        "gradients are reduced as float32, twice the bytes",
        job(4, **_SHARDED, grad_reduce_in_bf16=True),
        _fp32_reduction,
    ),
    Fault(
        "bucket_padding",
        "Gradient buckets are padded for bus bandwidth, the job does not say so.",
        "verdict",
        "padding",
        "buckets are padded further",
        job(4, **_SHARDED),
        _bucket_padding,
    ),
    Fault(
        "double_param_gather",
        "Parameters are gathered twice a step.",
        "verdict",
        "double_param_gather",
        "the same parameters are gathered twice",
        job(4, **_SHARDED),
        _double_gather,
    ),
    Fault(
        "overlap_ignored",
        "Overlap of gradients is switched on, and they are reduced behind the last backward pass all the same.",
        "verdict",
        "overlap_grad_reduce_off",
        "overlap_grad_reduce was off in this run",
        job(4, **_SHARDED, overlap_grad_reduce=True),
        _overlap_ignored,
    ),
    Fault(
        "overlap_without_effect",
        "Overlap is switched on, but the compute stream waits for every reduction and gather where it is issued.",
        "time",
        "overlap_without_effect",
        "overlap is set, but the transfers do not run beside compute",
        job(4, **_SHARDED, overlap_grad_reduce=True, overlap_param_gather=True),
        _overlap_without_effect,
    ),
    Fault(
        "wrong_etp",
        "expert_tensor_parallel_size was left out, and became the tensor-parallel size instead of 1.",
        "conflict",
        "expert_tensor_parallel",
        "expert_tensor_parallel_size differs from the intended one",
        job(8, **_TP2, **_EXPERTS, expert_model_parallel_size=2, expert_tensor_parallel_size=1),
        _wrong_etp,
    ),
    Fault(
        "wrong_ep",
        "expert_model_parallel_size was left out, and every rank has all experts.",
        "conflict",
        "expert_parallel",
        "expert_model_parallel_size differs from the intended one",
        job(4, **_EXPERTS, expert_model_parallel_size=2),
        _wrong_ep,
    ),
    Fault(
        "capacity_drop",
        "A capacity factor drops tokens, the job has none.",
        "verdict",
        "capacity",
        "ranks send fewer rows than tokens x experts per token",
        job(4, **_EXPERTS, expert_model_parallel_size=4),
        _capacity,
        {"factor": 0.5},
    ),
    Fault(
        "layers_differ",
        "One rank (with its tensor- and context-parallel peers) has another number of layers.",
        "verdict",
        "layers_differ",
        "another number of layers was built on these ranks",
        job(8, **_TP2),
        _layers,
        {"rank": 5, "layers": 3},
    ),
    Fault(
        "order_mismatch",
        "Two ranks make two collectives of one group in different order, and hang.",
        "verdict",
        "order_mismatch",
        "one number stands for different operations",
        job(4, **_TP2),
        _order_mismatch,
        {"rank": 3},
    ),
    Fault(
        "extra_all_reduce",
        "The training loop sums a metric of its own over all ranks in every step.",
        "verdict",
        "extra_call",
        "a call that no part of the job makes",
        job(4, **_TP2),
        _extra_all_reduce,
        {"elems": 1, "role": "world"},
    ),
    Fault(
        "barrier",
        "The training loop has a barrier in every step.",
        "verdict",
        "barrier",
        "a barrier in every step",
        job(4, **_TP2),
        _barrier,
    ),
    Fault(
        "wrong_gradient_group",
        "Gradients are summed over the data-parallel group without its context-parallel ranks.",
        "verdict",
        "wrong_group",
        "calls of dp_cp run on dp",
        job(8, context_parallel_size=2, cp_comm_type=("p2p",)),
        _wrong_group,
    ),
    Fault(
        "tied_embedding_missing",
        "The gradients of the shared word embedding are not summed over the first and the last stage.",
        "verdict",
        "tied_embedding_missing",
        "the shared embedding's gradients are not summed over its stages",
        job(4, pipeline_model_parallel_size=2),
        _tied_embedding,
    ),
    Fault(
        "cp_variant",
        "Context parallelism runs in another variant than the job says.",
        "verdict",
        "cp_comm_type",
        "context parallelism runs as another variant",
        job(4, context_parallel_size=2, cp_comm_type=("p2p",)),
        _cp_variant,
        {"kind": "all_gather"},
    ),
    Fault(
        "gqa_ignored",
        "Keys and values have as many heads as queries, the job groups them.",
        "verdict",
        "query_groups",
        "keys and values are those of another number of query groups",
        job(4, context_parallel_size=2, cp_comm_type=("p2p",), group_query_attention=True, num_query_groups=4),
        _gqa_ignored,
    ),
    Fault(
        "vocabulary_padding",
        "The vocabulary is padded to another multiple than the job says.",
        "verdict",
        "vocabulary_size",
        "the word embedding has another number of rows",
        job(4, pipeline_model_parallel_size=2),
        _vocabulary,
        {"divisor": 5120},
    ),
    Fault(
        "pipeline_on_default_group",
        "Two stages send single messages, half of them over the default group.",
        "verdict",
        "pipeline_on_default_group",
        "messages of stage 1 run on the default group",
        job(4, pipeline_model_parallel_size=2, framework="megatron-core", batch_p2p_comm=True),
        _default_group,
    ),
    Fault(
        "groups_confused",
        "Two communicators of one size are taken for each other in the layers.",
        "verdict",
        "groups_confused",
        "calls of each of two groups run on the other",
        job(8, **_TP2, context_parallel_size=2, cp_comm_type=("p2p",)),
        _confused,
        {"one": "tp", "other": "cp"},
    ),
    Fault(
        "microbatch_count",
        "The step has another number of micro-batches than the job says.",
        "verdict",
        "microbatch_count",
        "every count is that of another number of micro-batches",
        job(4, **_TP2),
        _microbatches,
        {"number": 3},
    ),
    Fault(
        "cuda_graph",
        "The layers are captured in CUDA graphs: their kernels run without any record of a call.",
        "data",
        "cuda_graph_on",
        "communication kernels of a CUDA graph, which no recorded call explains",
        job(4, **_TP2),
        _graphs,
    ),
    Fault(
        "tp_comm_overlap_on",
        "TransformerEngine carries the tensor-parallel traffic in kernels of its own, the job does not say so.",
        "verdict",
        "tp_comm_overlap_on",
        "tp_comm_overlap is on in this run",
        job(4, **_TP2),
        _userbuffers,
    ),
)
