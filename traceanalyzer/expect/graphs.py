"""CUDA graphs: which expected calls are captured, so that no record of torch.distributed shows them when they run.

A captured call runs inside the graph: its kernels are there at every replay, but the host makes no call. The traffic
stays expected; it is marked with the transport "CUDA graph".

=================  ============================  ======================================================================
release            setting                       captured
=================  ============================  ======================================================================
up to 0.14         enable_cuda_graph             whole layers; scope full_iteration: everything but the optimizer
up to 0.14         external_cuda_graph           whole layers; scope attn: attention
0.15 and later     cuda_graph_impl               local and transformer_engine: whole layers, or what the scope names;
                                                 full_iteration (an implementation since 0.18, before a scope):
                                                 everything but the optimizer
0.16 and later     cuda_graph_scope, since 0.18  attn: attention; mlp: dense MLP; moe: the layer of experts; moe_router
                   cuda_graph_modules            and moe_preprocess: router, shared expert unless it is overlapped
=================  ============================  ======================================================================

Never inside the graph of a layer: embedding, output layer, loss, what multi-token prediction rolls or projects, gradients.

Source: transformer/transformer_config.py (cuda_graph_impl, cuda_graph_scope), transformer/transformer_layer.py,
transformer/cuda_graphs.py of core_v0.13.0 ... core_v0.19.0; read, not run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from traceanalyzer.expect.model import ExpectedCall
from traceanalyzer.expect.place import Place

TRANSPORT = "CUDA graph"

_PASSES = frozenset({"forward", "backward", "recompute"})

# Beginnings of components by part of a layer, and the words of the scope that capture them.
_PARTS: tuple[tuple[tuple[str, ...], frozenset[str]], ...] = (
    (("attention", "saved activations"), frozenset({"attn"})),
    (("mlp",), frozenset({"mlp"})),
    (("router",), frozenset({"moe", "moe_router"})),
    (("experts",), frozenset({"moe"})),
    (("shared expert",), frozenset({"moe", "moe_router"})),
)

_OVER_THE_STEP = ("control:", "batch:", "expert: losses for the log")


def scope(place: Place) -> frozenset[str]:
    """What is captured: words of the scope, "full" for whole layers, "full_iteration"; empty without CUDA graphs."""
    job = place.job
    if job.cuda_graph_impl == "none":
        return frozenset()
    if job.cuda_graph_impl == "full_iteration":
        return frozenset({"full_iteration"})
    named = job.cuda_graph_modules or job.cuda_graph_scope
    return frozenset(named) or frozenset({"full"})


def mark(place: Place, calls: Iterable[ExpectedCall]) -> list[ExpectedCall]:
    """The calls, those that a graph captures marked as not made by torch.distributed."""
    words = scope(place)
    if not words:
        return list(calls)
    return [_marked(call) if _is_captured(place, call, words) else call for call in calls]


def _marked(call: ExpectedCall) -> ExpectedCall:
    formula = {**call.formula, "transport": f"{TRANSPORT}: captured, no call of torch.distributed when it runs"}
    return replace(call, transport=call.transport or TRANSPORT, formula=formula)


def _is_captured(place: Place, call: ExpectedCall, words: frozenset[str]) -> bool:
    if "full_iteration" in words:
        # finalize_model_grads is inside; the training loop's own scalars and input are not
        return call.phase != "optimizer" and not call.rule.startswith(_OVER_THE_STEP)
    if call.phase not in _PASSES or call.role in ("pp", "world"):
        return False
    for beginnings, capturing in _PARTS:
        if call.component.startswith(beginnings):
            overlapped = call.component.startswith("shared expert") and place.job.moe_shared_expert_overlap
            return "full" in words or bool(words & (capturing - {"moe_router"} if overlapped else capturing))
    return False
