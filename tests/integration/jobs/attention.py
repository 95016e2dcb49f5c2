"""Attention under context parallelism, in the place of TransformerEngine's, which cannot be built without CUDA.

megatron-core's own attention refuses more than one context-parallel rank. This one does what TransformerEngine's does
with cp_comm_type "all_gather": each rank gathers the keys and the values of the sequence in the forward pass, gathers
both again in the backward pass, and reduce-scatters both gradients. The calls are in that order and have those sizes,
but they are ours: that they are what the expectation says of TransformerEngine proves nothing about TransformerEngine.

A rank of N holds pieces r and 2N-1-r of 2N of the sequence (as core's rotary embedding has it), tensors are
[sequence, batch, heads, channels].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def pieces(rank: int, ranks: int, length: int) -> torch.Tensor:
    """Positions in a sequence of ``length`` tokens that a context-parallel rank holds, in its order."""
    whole = torch.arange(length).view(2 * ranks, -1)
    return torch.cat([whole[rank], whole[2 * ranks - 1 - rank]])


def gathered(shard: torch.Tensor, group: Any) -> torch.Tensor:
    out = shard.new_empty((shard.shape[0] * group.size(), *shard.shape[1:]))
    dist.all_gather_into_tensor(out, shard.contiguous(), group=group)
    return out


def scattered(whole: torch.Tensor, group: Any) -> torch.Tensor:
    out = whole.new_empty((whole.shape[0] // group.size(), *whole.shape[1:]))
    dist.reduce_scatter_tensor(out, whole.contiguous(), group=group)
    return out


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """softmax(Q K / sqrt(d)) V where not ``hidden``: [queries, batch, heads, channels]."""
    repeats = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(repeats, 2) if repeats > 1 else x for x in (key, value))
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    scores = (q @ k.transpose(-1, -2)).float() / query.shape[-1] ** 0.5
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1).to(v.dtype)
    return (weights @ v).permute(2, 0, 1, 3)


class Gathering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, hidden: Any, group: Any) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, hidden)
        ctx.group = group
        return attend(query, gathered(key, group), gathered(value, group), hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, key, value, hidden = ctx.saved_tensors
        gathered_again = (query, gathered(key, ctx.group), gathered(value, ctx.group))
        q, k, v = (x.detach().requires_grad_() for x in gathered_again)
        with torch.enable_grad():
            out = attend(q, k, v, hidden)
        to_query, to_key, to_value = torch.autograd.grad(out, (q, k, v), grads[0])
        return to_query, scattered(to_key, ctx.group), scattered(to_value, ctx.group), None, None


class GatheringAttention(torch.nn.Module):
    """Takes what core builds a core attention with."""

    def __init__(self, config: Any, *_args: object, pg_collection: Any = None, **_kwargs: object) -> None:
        super().__init__()
        self.group = pg_collection.cp
        self.ranks = config.context_parallel_size

    def forward(self, query: Any, key: Any, value: Any, *_args: object, **_kwargs: object) -> torch.Tensor:
        length = query.shape[0] * self.ranks
        at = [pieces(rank, self.ranks, length) for rank in range(self.ranks)]
        hidden = torch.cat(at)[None, :] > at[self.group.rank()][:, None]
        return Gathering.apply(query, key, value, hidden, self.group).flatten(2)
