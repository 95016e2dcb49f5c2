"""The seed document's rules, chapter 1 (tensor parallelism), corrected where its errata make it an oracle.

Per layer and direction 2 all-gathers and 2 reduce-scatters with sequence parallelism, 2 all-reduces without (E6), the
backward pass the mirror of the forward; layers with experts have only the pair around attention (E7). Sizes: gathered
S/CP, shard S/(TP*CP) (E2); counts per rank: the layers of its own stage, times the micro-batches of a step (E28).

The document knows no embedding, output layer, loss, repeated gather of an input, norm gradients or recomputation: under
these rules such calls are not expected.
"""

from __future__ import annotations

from traceanalyzer.expect import shapes
from traceanalyzer.expect.model import Evidence, ExpectedCall
from traceanalyzer.expect.quantity import Quantity, call
from traceanalyzer.job import Job

ROLE = "tp"

_FORWARD = Evidence("document", "1.5 and 1.6 (S1.5-1 to S1.5-11, S1.6.3-1 to S1.6.3-8), corrected by E2, E6, E7, E28")
_BACKWARD = Evidence("document", "1.8 (S1.8-18 to S1.8-43), corrected by E2, E6, E7, E28")


def calls(job: Job, rank: int) -> list[ExpectedCall]:
    """The tensor-parallel calls of one rank in one step as the document has them, in order; none for TP 1.

    Raises JobError if the job does not say a size that is needed.
    """
    ranks = job.tensor_model_parallel_size
    if ranks == 1:
        return []
    stage = job.layout.stage(rank)
    layers = job.layers_on_stage(stage)
    dense = sum(not job.is_moe_layer(layer) for layer in layers)
    (micro_batches,) = job.require("num_microbatches")
    attention = _count("layers", len(layers), micro_batches)
    mlp = _count("dense layers", dense, micro_batches)
    places = [
        ("attention.qkv", True, attention),
        ("attention.proj", False, attention),
        ("mlp.fc1", True, mlp),
        ("mlp.fc2", False, mlp),
    ]
    rows: list[ExpectedCall] = []
    for phase, order in (("forward", places), ("backward", places[::-1])):
        if phase == "backward" and job.forward_only:
            break
        for component, column, count in order:
            entering = column == (phase == "forward")
            if not job.sequence_parallel and entering:
                continue
            whole, shard = shapes.hidden_states(job), shapes.hidden_shard(job)
            if not job.sequence_parallel:
                op, sent, received = "all_reduce", whole, whole
            elif entering:
                op, sent, received = "all_gather", shard, whole
            else:
                op, sent, received = "reduce_scatter", whole, shard
            rows.append(
                call(
                    "document: tensor",
                    role=ROLE,
                    op=op,
                    phase=phase,
                    component=component,
                    dtype=job.activation_dtype,
                    sent=sent,
                    received=received,
                    group_size=ranks,
                    calls=count,
                    evidence=_FORWARD if phase == "forward" else _BACKWARD,
                    stage=stage,
                )
            )
    return [row for row in rows if row.calls]


def _count(what: str, layers: int, micro_batches: int) -> Quantity:
    return Quantity(f"{what} * M", f"{layers} {what} * {micro_batches} micro-batches", layers * micro_batches)
