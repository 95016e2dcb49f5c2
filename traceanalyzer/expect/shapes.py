"""Shapes of one rank's tensors: pure functions of a Job that every chapter and its tests share.

Symbols are those of the reference: S sequence length, B micro-batch size, H hidden size, F feed-forward width, Nh query
heads, Ng key-value groups, d channels of a head, V padded vocabulary, M micro-batches. Activations have Megatron's
order (sequence, batch, features); weights are written (inputs, outputs), as the seed document writes them.

Every function raises JobError (from Job.require) if the job does not say what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from traceanalyzer.errors import JobError
from traceanalyzer.expect.quantity import Quantity
from traceanalyzer.job import Job

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Weight:
    """A weight matrix: its full shape (inputs, outputs), one rank's shard, and the side that tensor parallelism cuts."""

    full: tuple[int, int]
    shard: tuple[int, int]
    split: Literal["column", "row", "vocabulary", "none"]


def column_parallel(inputs: int, outputs: int, ranks: int) -> Weight:
    """A weight whose outputs are cut: every rank has all inputs and outputs/ranks outputs."""
    return Weight((inputs, outputs), (inputs, _part(outputs, ranks, "outputs of a column-parallel weight")), "column")


def row_parallel(inputs: int, outputs: int, ranks: int) -> Weight:
    """A weight whose inputs are cut; each rank's product is a partial sum of all outputs."""
    return Weight((inputs, outputs), (_part(inputs, ranks, "inputs of a row-parallel weight"), outputs), "row")


def _part(size: int, ranks: int, what: str) -> int:
    if size % ranks:
        raise JobError(f"{what}: {size} is no multiple of {ranks}")
    return size // ranks


# -- lengths and widths --------------------------------------------------------------------------------------------


def cp_tokens(job: Job) -> Quantity:
    """Tokens of one sequence in a tensor-parallel region: S/CP."""
    (length,) = job.require("seq_length")
    parts = job.context_parallel_size
    if parts == 1:
        return Quantity("S", f"{length}", length)
    return Quantity("S/CP", f"{length}/{parts}", _part(length, parts, "seq_length over context_parallel_size"))


def sequence_shard(job: Job) -> Quantity:
    """Tokens of one sequence between the tensor-parallel regions, at norms and residuals and at stage boundaries.

    S/(CP*TP) with sequence parallelism, S/CP without (errata E2: the sequence is divided by each of them once).
    """
    whole = cp_tokens(job)
    parts = job.tensor_model_parallel_size
    if not job.sequence_parallel or parts == 1:
        return whole
    tokens = _part(whole.value, parts, "seq_length/context_parallel_size over tensor_model_parallel_size")
    if job.context_parallel_size == 1:
        return Quantity("S/TP", f"{whole.value}/{parts}", tokens)
    return Quantity("S/(CP*TP)", f"{job.seq_length}/({job.context_parallel_size}*{parts})", tokens)


def heads_per_rank(job: Job) -> int:
    """Query heads of one tensor-parallel rank: Nh/TP."""
    (heads,) = job.require("num_attention_heads")
    return _part(heads, job.tensor_model_parallel_size, "num_attention_heads over tensor_model_parallel_size")


def qkv_width(job: Job) -> Quantity:
    """Outputs of the QKV projection over all ranks: (Nh + 2*Ng) * d; 3H without grouped queries."""
    heads, groups, channels = job.require("num_attention_heads", "num_query_groups", "kv_channels")
    return Quantity("(Nh+2*Ng) * d", f"({heads}+2*{groups}) * {channels}", (heads + 2 * groups) * channels)


# -- shapes by place -----------------------------------------------------------------------------------------------


def activations(job: Job) -> Mapping[str, Shape]:
    """Shapes (sequence, batch, features) of one rank's activations in a layer, by place.

    norm: input and output of both norms, residual, layer input and output. gathered: input of QKV and of the MLP. qkv:
    their projection. query, value: one of the parts (value also stands for the key). attention: its output. partial:
    row-parallel output before the reduction. mlp: one of gate and up, or the only one without swiglu.
    """
    batch, hidden, feed_forward = job.require("micro_batch_size", "hidden_size", "ffn_hidden_size")
    groups, channels = job.require("num_query_groups", "kv_channels")
    ranks = job.tensor_model_parallel_size
    tokens, shard = cp_tokens(job).value, sequence_shard(job).value
    query = heads_per_rank(job) * channels
    return MappingProxyType(
        {
            "norm": (shard, batch, hidden),
            "gathered": (tokens, batch, hidden),
            "qkv": (tokens, batch, _part(qkv_width(job).value, ranks, "QKV outputs over tensor_model_parallel_size")),
            "query": (tokens, batch, query),
            "value": (tokens, batch, max(1, groups // ranks) * channels),
            "attention": (tokens, batch, query),
            "partial": (tokens, batch, hidden),
            "mlp": (tokens, batch, _part(feed_forward, ranks, "ffn_hidden_size over tensor_model_parallel_size")),
        }
    )


def weights(job: Job) -> Mapping[str, Weight]:
    """Weights of a layer and the word embedding, by component; gradients have the shape of their weight.

    mlp.gate and mlp.up with swiglu (Megatron keeps them in one matrix, fc1), else mlp.fc1. embedding only if the padded
    vocabulary is known. With experts also router and, of one expert, experts.gate and experts.up (or experts.fc1) and
    experts.fc2, cut over the expert tensor-parallel ranks.
    """
    hidden, feed_forward, heads, channels = job.require(
        "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"
    )
    ranks = job.tensor_model_parallel_size
    inner = column_parallel(hidden, feed_forward, ranks)
    found = {
        "attention.qkv": column_parallel(hidden, qkv_width(job).value, ranks),
        "attention.proj": row_parallel(heads * channels, hidden, ranks),
        **({"mlp.gate": inner, "mlp.up": inner} if job.swiglu else {"mlp.fc1": inner}),
        "mlp.fc2": row_parallel(feed_forward, hidden, ranks),
    }
    if job.padded_vocab_size is not None:
        vocabulary = job.padded_vocab_size
        shard = _part(vocabulary, ranks, "padded_vocab_size over tensor_model_parallel_size")
        found["embedding"] = Weight((vocabulary, hidden), (shard, hidden), "vocabulary")
    if job.num_experts is not None:
        (width,) = job.require("moe_ffn_hidden_size")
        parts = job.layout.expert_tensor_size
        inner = column_parallel(hidden, width, parts)
        found["router"] = Weight((hidden, job.num_experts), (hidden, job.num_experts), "none")
        found |= {"experts.gate": inner, "experts.up": inner} if job.swiglu else {"experts.fc1": inner}
        found["experts.fc2"] = row_parallel(width, hidden, parts)
    return MappingProxyType(found)


def attention(job: Job, exchange: Literal["p2p", "all_gather", "a2a"]) -> Mapping[str, tuple[int, int, int, int]]:
    """Shapes inside attention with context parallelism of one kind (cp_comm_type).

    local: query and output of a rank (batch, sequence, heads, channels). whole: what its kernel works on, with a2a the
    whole sequence of a part of the heads, else local. scores: (batch, heads, queries, keys), one block of CP with p2p.
    """
    batch, length, channels = job.require("micro_batch_size", "seq_length", "kv_channels")
    tokens, heads = cp_tokens(job).value, heads_per_rank(job)
    queries, keys, own = tokens, tokens if exchange == "p2p" else length, heads
    if exchange == "a2a":
        queries, own = length, _part(heads, job.context_parallel_size, "heads of a rank over context_parallel_size")
    return MappingProxyType(
        {
            "local": (batch, tokens, heads, channels),
            "whole": (batch, queries, own, channels),
            "scores": (batch, own, queries, keys),
        }
    )


def routing(job: Job) -> Mapping[str, tuple[int, int]]:
    """Shapes (tokens of a rank, features) in a router: its input, the scores of all experts, the experts chosen."""
    batch, hidden, experts, chosen = job.require("micro_batch_size", "hidden_size", "num_experts", "moe_router_topk")
    tokens = batch * sequence_shard(job).value
    return MappingProxyType({"input": (tokens, hidden), "scores": (tokens, experts), "chosen": (tokens, chosen)})
