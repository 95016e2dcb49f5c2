"""The expert-parallel chapter: how tokens reach their experts and come back, and what the router sums.

T = S/(CP*SP) * B are the tokens that a rank routes, R = T*k its rows (a row for every expert that a token goes to), Hr
the width of a row, A the rows that arrive over the expert-parallel group, G those of the whole expert tensor-parallel
group. Per layer with experts and micro-batch:

==================  =======  ===================================================================  ==================
dispatcher          role     forward, in order                                                    backward
==================  =======  ===================================================================  ==================
alltoall            tp_ep    all-gather of the counts, int64 [E]; not if padded to capacity       none
..                  ep       all-to-all of rows R -> A, and (since 0.12.1) of the probabilities   the mirror of each,
..                  etp      all-gather of both, A -> G; reduce-scatter of the output, G -> A     last one first
..                  ep       all-to-all of the output, A -> R
allgather           tp_ep    all-gather of the routing map bool [T, E], probabilities [T, E] and  the mirror of the
(the default)                rows [T, Hr]; reduce-scatter of the output                           last three
flex                tp_ep    no call of torch.distributed: a copy of the row for every rank that  the same two
                             has one of its experts, and back
==================  =======  ===================================================================  ==================

On a group of one rank these calls are not made. Probabilities have the router's type, and so has the reduce-scatter of
the output with its mirror: a router in float32 doubles them. A, G depend on the routing: rows are then what balanced
routing gives, see replay. Padded to capacity, R = A = E * capacity exactly. Flex rows are volume alone, for uniform
routing; how HybridEP packs the probabilities is not known and has no row.

The load-balancing losses sum the tokens of each expert: role tp_cp (global: tp_dp_cp), not on a group of one, and
since 0.12 not without gradients: with recomputation in the repeated pass only. Once a step: the load for the expert bias
(role tp_dp_cp, a group of one too), and in Megatron-LM the losses for its log (phase "other").

Source: reference sections 2.6, 2.10 and 2.11; megatron/core/transformer/moe of core_v0.10.0 ... core_v0.19.0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from traceanalyzer import traffic
from traceanalyzer.expect import versions
from traceanalyzer.expect.model import Evidence, ExpectedCall, NotModelled
from traceanalyzer.expect.place import Place, Symbol
from traceanalyzer.expect.rules import DTYPES, Avoid, Chapter, Gap, Routed, Rule

EP, ETP, TP_EP, TP_CP, TP_DP_CP = "ep", "etp", "tp_ep", "tp_cp", "tp_dp_cp"

_RUN = "megatron-core 0.16.1 recorded: "
_FAKE = "megatron-core 0.16.1 run on a fake process group: "
_DISPATCHER = "transformer/moe/token_dispatcher.py: "
_ALLTOALL = Evidence(
    "run",
    f"{_RUN}ep2_alltoall, tp2ep2_sp_alltoall, tp2ep2_sp_alltoall_etp1; {_DISPATCHER}MoEAlltoAllTokenDispatcher",
)
_CAPACITY = Evidence(
    "run", f"megatron-core 0.16.1 run on two processes: EP2, capacity 1.0; {_DISPATCHER}MoEAlltoAllTokenDispatcher"
)
_PADDED = Evidence(
    "run", f"{_RUN}ep2_alltoall_droppad; {_DISPATCHER}MoEAlltoAllTokenDispatcher.preprocess, moe_utils.py: get_capacity"
)
_ALLGATHER = Evidence("run", f"{_RUN}ep2_allgather, tp2ep2_sp_allgather; {_DISPATCHER}MoEAllGatherTokenDispatcher")
_FLEX = Evidence(
    "source",
    f"{_DISPATCHER}MoEFlexTokenDispatcher, transformer/moe/fused_a2a.py; DeepEP 1.2.1 deep_ep/buffer.py: dispatch, combine",
)
_HYBRID = Evidence("source", f"core_v0.19.0 {_DISPATCHER}_HybridEPManager.setup_metadata")
_REPEATED = Evidence(
    "run",
    f"{_RUN}ep2_alltoall_recompute_full, ep2_alltoall_recompute_moe; transformer/moe/moe_layer.py: moe_layer_recompute, "
    "tensor_parallel/random.py: CheckpointFunction.backward",
)
_LOSS = Evidence(
    "run",
    f"{_FAKE}TP2 EP2, auxiliary losses, with and without recomputation; transformer/moe/router.py: TopKRouter, "
    "moe_utils.py: get_tokens_per_expert_and_token_count",
)
_OLD_LOSS = Evidence(
    "run",
    "megatron-core 0.11.0 run on two processes: TP2 EP2, aux_loss, full recomputation; core_v0.10.0 read; "
    "transformer/moe/router.py: apply_load_balancing_loss",
)
_OLD_SEQUENCE = Evidence(
    "run",
    "megatron-core 0.11.0 run on two processes and 0.13.1 on a fake process group: TP2, seq_aux_loss, full recomputation; "
    "transformer/moe/moe_utils.py: sequence_load_balancing_loss_func",
)
_BIAS = Evidence(
    "run",
    "megatron-core 0.16.1 run on two processes: EP2, expert bias; distributed/finalize_model_grads.py: "
    "_update_router_expert_bias, moe_utils.py: get_updated_expert_bias",
)
_METRICS = Evidence(
    "run",
    "megatron-core 0.11.0 ... 0.19.0: moe_utils.py: reduce_aux_losses_tracker_across_ranks (since 0.18 moe_logging.py: "
    "MoEMetricsTracker) executed alone; the names read in Megatron-LM training/training.py: training_log",
)

_REPEATS = Avoid("recompute_repeats_collectives", "recompute_granularity selective, moe out of recompute_modules")
_ETP_SETTING = "expert_tensor_parallel_size 1"
_WIDENS = "router_dtype_widens_hidden"

_HERE = "num_experts is not None and since('expert grid')"
_TOKENS = "S/(CP*SP) * B"
_PASSES = ("forward", "backward", "recompute")

# -- rows through the alltoall dispatcher ----------------------------------------------------------------------------

# How many rows a rank has, by mode: end of the rule's name, condition, rows, words for the own and for all other rows
# (None: exact), evidence. Without expert parallelism what arrives are the own rows.
_MODES: tuple[tuple[str, str, str, str | None, bool, Evidence], ...] = (
    ("", "dropless and EP > 1", f"{_TOKENS} * k", None, True, _ALLTOALL),
    (", one expert-parallel rank", "dropless and EP == 1", f"{_TOKENS} * k", None, False, _ALLTOALL),
    (", capacity", "drops", f"min({_TOKENS} * k, E * capacity)", "routed", True, _CAPACITY),
    (", padded to capacity", "pads", "E * capacity", None, False, _PADDED),
)

# Steps in forward order: component, role, operation, type, whether probabilities, rows in and out.
_STEPS: tuple[tuple[str, str, str, str, bool, str, str], ...] = (
    ("experts.dispatch", EP, "all_to_all", "activations", False, "routed", "arrived"),
    ("experts.dispatch probabilities", EP, "all_to_all", "router", True, "routed", "arrived"),
    ("experts.gather", ETP, "all_gather", "activations", False, "arrived", "gathered"),
    ("experts.gather probabilities", ETP, "all_gather", "router", True, "arrived", "gathered"),
    ("experts.scatter", ETP, "reduce_scatter", "router", False, "gathered", "arrived"),
    ("experts.combine", EP, "all_to_all", "activations", False, "arrived", "routed"),
)

_MIRROR = {"all_to_all": "all_to_all", "all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}


def _steps() -> Iterator[Rule]:
    for ending, condition, rows, own, varies, evidence in _MODES:
        words = {"routed": own, "arrived": "arrived" if varies else None, "gathered": "gathered" if varies else None}
        for phase in _PASSES:
            steps = _STEPS[::-1] if phase == "backward" else _STEPS
            for step in steps:
                yield from _step(step, phase, ending, condition, rows, words, evidence)


def _step(
    step: tuple[str, str, str, str, bool, str, str],
    phase: str,
    ending: str,
    condition: str,
    rows: str,
    words: Mapping[str, str | None],
    evidence: Evidence,
) -> Iterator[Rule]:
    """One step of the alltoall dispatcher in one phase: a rule, or two where an ETP of its own has another waste."""
    component, role, op, dtype, is_probability, sent, received = step
    width = "1" if is_probability else "Hr"
    if phase == "backward":
        op, sent, received = _MIRROR[op], received, sent
    size = {name: rows if name != "gathered" else f"ETP * {rows}" for name in words}
    size = size if is_probability else {name: f"{text} * Hr" for name, text in size.items()}
    when = f"{_HERE} and moe_token_dispatcher_type == 'alltoall' and {role.upper()} > 1 and {condition}"
    if is_probability:
        when += " and since('expert probabilities are exchanged') and not first_of_012"
    of_router = dtype == "router" and not is_probability
    waste: list[tuple[str, str, Avoid | None]] = [("", "", None)]
    if phase == "recompute":
        waste = [("", "", _REPEATS)]
    elif role == ETP:
        unstated = Avoid("etp_defaults_to_tp", _ETP_SETTING)
        # half of float32 carries nothing where the activations have two bytes
        wider = f"(ETP - 1) / ETP * {size['gathered']} * (probability_bytes - activation_bytes)"
        stated = Avoid(_WIDENS, "moe_router_dtype off", wider) if of_router else None
        waste = [(" and not etp_chosen", "", unstated), (" and etp_chosen", ", ETP of its own", stated)]
    notes = ["in the router's type"] if of_router else []
    notes += ["not in 0.12.0"] if is_probability else []
    notes += ["rows as balanced routing gives them"] if words["arrived"] else []
    for further, stated_as, avoid in waste:
        yield Rule(
            name=f"expert: {_name(component, phase)}{ending}{stated_as}",
            role=role,
            op=op,
            phase=phase,
            component=component,
            dtype=dtype,
            sent=size[sent],
            received="" if size[sent] == size[received] else size[received],
            calls=_calls(phase),
            when=_in(phase, when + further),
            evidence=_REPEATED if phase == "recompute" else evidence,
            avoid=avoid,
            routed=Routed(width, words[sent], words[received]) if words[sent] or words[received] else None,
            note="; ".join(notes),
            document=_DOCUMENT.get(component, ""),
        )


_NO_ETP = "the document has no expert tensor parallelism"
_NOT_THERE = "not in the document"
_DOCUMENT = {
    "experts.dispatch probabilities": _NOT_THERE,
    "experts.gather": _NO_ETP,
    "experts.gather probabilities": _NO_ETP,
    "experts.scatter": _NO_ETP,
}


def _name(component: str, phase: str) -> str:
    place = component.removeprefix("experts.")
    return {"forward": place, "backward": f"gradient of {place}", "recompute": f"{place} repeated"}[phase]


def _calls(phase: str) -> str:
    return f"{'repeated' if phase == 'recompute' else 'experts'} * M"


def _in(phase: str, when: str) -> str:
    return when if phase == "forward" else f"{when} and training"


def _counts() -> Iterator[Rule]:
    for phase in ("forward", "recompute"):
        yield Rule(
            name=f"expert: {_name('experts.counts', phase)}",
            role=TP_EP,
            op="all_gather",
            phase=phase,
            component="experts.counts",
            dtype="int64",
            sent="E",
            received="E * ETP * EP",
            calls=_calls(phase),
            when=_in(phase, f"{_HERE} and moe_token_dispatcher_type == 'alltoall' and not pads and ETP * EP > 1"),
            evidence=_REPEATED if phase == "recompute" else _ALLTOALL,
            avoid=_REPEATS if phase == "recompute" else None,
            note="tokens for each expert: the split sizes of what follows",
            document=_NOT_THERE,
        )


# -- the other dispatchers -------------------------------------------------------------------------------------------

# Steps in forward order: component, operation, type, elements of the smaller side, whether it has a gradient.
_GATHERED: tuple[tuple[str, str, str, str, bool], ...] = (
    ("experts.routing map", "all_gather", "bool", f"{_TOKENS} * E", False),
    ("experts.gather probabilities", "all_gather", "router", f"{_TOKENS} * E", True),
    ("experts.gather", "all_gather", "activations", f"{_TOKENS} * Hr", True),
    ("experts.scatter", "reduce_scatter", "router", f"{_TOKENS} * Hr", True),
)


def _allgather() -> Iterator[Rule]:
    when = f"{_HERE} and moe_token_dispatcher_type == 'allgather' and ETP * EP > 1"
    for phase in _PASSES:
        steps = [step for step in _GATHERED[::-1] if step[4]] if phase == "backward" else _GATHERED
        for component, forward_op, dtype, shard, _ in steps:
            op = _MIRROR[forward_op] if phase == "backward" else forward_op
            whole = f"ETP * EP * {shard}"
            avoid = _REPEATS if phase == "recompute" else None
            if component == "experts.scatter" and phase != "recompute":
                wider = f"(ETP * EP - 1) * {shard} * (probability_bytes - activation_bytes)"
                avoid = Avoid(_WIDENS, "moe_token_dispatcher_type alltoall", wider)
            yield Rule(
                name=f"expert: {_name(component, phase)} of all",
                role=TP_EP,
                op=op,
                phase=phase,
                component=component,
                dtype=dtype,
                sent=shard if op == "all_gather" else whole,
                received=whole if op == "all_gather" else shard,
                calls=_calls(phase),
                when=_in(phase, when),
                evidence=_REPEATED if phase == "recompute" else _ALLGATHER,
                avoid=avoid,
                note="every rank gets all tokens of the group, whatever k is",
                document="the document knows all-to-all only",
            )


# Copies of a token's row that leave the rank: one for every rank that has one of its experts (with ETP every rank of the
# group of such a rank), less the own one.
_COPIES = "destinations * (ETP - 1/EP)"

# Steps by phase: component, whether the probabilities (or their gradients) go along.
_FUSED: Mapping[str, tuple[tuple[str, bool], ...]] = {
    "forward": (("experts.dispatch", True), ("experts.combine", False)),
    "recompute": (("experts.dispatch", True), ("experts.combine", False)),
    "backward": (("experts.combine", False), ("experts.dispatch", True)),
}


def _flex() -> Iterator[Rule]:
    here = f"{_HERE} and moe_token_dispatcher_type == 'flex'"
    for backend in ("deepep", "hybridep"):
        when = f"{here} and moe_flex_dispatcher_backend == '{backend}'"
        for phase in _PASSES:
            for component, with_probabilities in _FUSED[phase]:
                parts = [("", "activations", f"{_TOKENS} * Hr", "activation_bytes")]
                if with_probabilities and backend == "deepep":
                    parts.append((" probabilities", "float32", f"{_TOKENS} * ETP * k", "4"))
                for part, dtype, elements, size in parts:
                    yield Rule(
                        name=f"expert: {_name(component + part, phase)} by {backend}",
                        role=TP_EP,
                        op="all_to_all",
                        phase=phase,
                        component=component + part,
                        dtype=dtype,
                        sent=elements,
                        calls=_calls(phase),
                        when=_in(phase, when),
                        evidence=_FLEX,
                        avoid=_REPEATS if phase == "recompute" else None,
                        outside=backend,
                        off_rank=f"{elements} * {size} * {_COPIES}",
                        note=(
                            "one copy of a token for every rank that has one of its experts; uniform routing, nothing "
                            "dropped" + ("; k expert numbers of 4 bytes go along" if part else "")
                        ),
                        document="the document sends a copy for every expert",
                    )
    for phase in ("forward", "recompute"):
        yield Rule(
            name=f"expert: {_name('experts.token maximum', phase)}",
            role=TP_EP,
            op="all_reduce",
            phase=phase,
            component="experts.token maximum",
            dtype="int64",
            sent="1",
            calls=_calls(phase),
            when=_in(
                phase,
                f"{here} and since('hybridep pads its input') and moe_flex_dispatcher_backend == 'hybridep' and "
                "on('moe_hybridep_pad_uneven_dispatch_inputs')",
            ),
            evidence=_HYBRID,
            avoid=_REPEATS if phase == "recompute" else None,
        )


# -- what the router sums --------------------------------------------------------------------------------------------


def _loads(name: str, role: str, elements: str, when: str, evidence: Evidence) -> Iterator[Rule]:
    """Tokens for each expert, summed for one load-balancing loss: where there are gradients, so in one pass only."""
    for phase, calls in (("forward", "(experts - repeated) * M"), ("recompute", "repeated * M")):
        yield Rule(
            name=f"expert: {name}" + (" under recomputation" if phase == "recompute" else ""),
            role=role,
            op="all_reduce",
            phase=phase,
            component="router.load",
            dtype="int64",
            sent=elements,
            calls=calls,
            when=f"{_HERE} and training and {when}",
            evidence=evidence,
            note="the first pass of a checkpoint has no gradients and leaves the loss out"
            if phase == "recompute"
            else "",
            document=_NOT_THERE,
        )


def _old_loads() -> Iterator[Rule]:
    """Up to 0.11 a checkpoint's first pass sums too, and up to 0.10 the coefficient does not matter."""
    before = "not since('auxiliary loss needs gradients')"
    groups = "(aux_type if not since('auxiliary loss needs a coefficient') else aux and TP * CP > 1)"
    for phase in ("forward", "recompute"):
        yield Rule(
            name=f"expert: load up to 0.11{' repeated' if phase == 'recompute' else ''}",
            role=TP_CP,
            op="all_reduce",
            phase=phase,
            component="router.load",
            dtype="int64",
            sent="E",
            calls=_calls(phase),
            when=f"{_HERE} and training and {before} and {groups}",
            evidence=_OLD_LOSS,
            avoid=_REPEATS if phase == "recompute" else None,
        )


def _old_sequence_loads() -> Iterator[Rule]:
    """Up to 0.13 the loss of each sequence gathers the scores of its tokens, and scatters their gradients."""
    when = (
        f"{_HERE} and training and seq_aux and not since('sequence loss by counts') and TP * CP > 1 and "
        "moe_router_score_function == 'softmax'"
    )
    shard = f"{_TOKENS} * E"
    old, new = "not since('auxiliary loss needs gradients')", "since('auxiliary loss needs gradients')"
    for ending, phase, calls, further in (
        ("", "forward", "(experts - repeated) * M", new),
        (" under recomputation", "recompute", "repeated * M", new),
        (" up to 0.11", "forward", "experts * M", old),
        (" up to 0.11 repeated", "recompute", "repeated * M", old),
        (", gradient", "backward", "experts * M", "True"),
    ):
        op = "reduce_scatter" if phase == "backward" else "all_gather"
        yield Rule(
            name=f"expert: scores of a sequence{ending}",
            role=TP_CP,
            op=op,
            phase=phase,
            component="router.scores",
            dtype="float32",
            sent=shard if op == "all_gather" else f"TP * CP * {shard}",
            received=shard if op == "reduce_scatter" else f"TP * CP * {shard}",
            calls=calls,
            when=f"{when} and {further}",
            evidence=_OLD_SEQUENCE,
            avoid=_REPEATS if ending.endswith("repeated") else None,
        )


def _metrics() -> Iterator[Rule]:
    """The losses of all layers for Megatron-LM's log, one call after the other for every name."""
    for role, calls in (
        ("pp", "1"),
        (TP_CP, "on_tp_cp"),
        (TP_DP_CP, "on_tp_dp_cp"),
        ("dp", "on_dp"),
        ("dp_cp", "on_dp_cp"),
    ):
        yield Rule(
            name=f"expert: losses for the log over {role}",
            role=role,
            op="all_reduce",
            phase="other",
            component="experts.losses for the log",
            dtype="float32",
            sent="entries",
            calls=calls,
            when=f"{_HERE} and training and framework == 'megatron-lm'",
            each="losses",
            evidence=_METRICS,
            document=_NOT_THERE,
        )


RULES: tuple[Rule, ...] = (
    *_counts(),
    *_steps(),
    *_allgather(),
    *_flex(),
    *_loads("load", TP_CP, "E", "aux and since('auxiliary loss needs gradients') and TP * CP > 1", _LOSS),
    *_loads(
        "load of each sequence", TP_CP, "B * E", "seq_aux and since('sequence loss by counts') and TP * CP > 1", _LOSS
    ),
    *_loads(
        "load of all replicas",
        TP_DP_CP,
        "E",
        "global_aux and since('global auxiliary loss') and TP * DPCP > 1",
        _LOSS,
    ),
    *_old_loads(),
    *_old_sequence_loads(),
    Rule(
        name="expert: load for the expert bias",
        role=TP_DP_CP,
        op="all_reduce",
        phase="other",
        component="router.expert bias",
        sent="routers * E",
        calls="1 if routers else 0",
        when=f"{_HERE} and training and since('expert bias') and moe_router_enable_expert_bias",
        evidence=_BIAS,
        note="one for all layers of the rank, in the type that the model's buffers are cast to",
        document=_NOT_THERE,
    ),
    *_metrics(),
)


# -- symbols ---------------------------------------------------------------------------------------------------------


def _of_mtp(place: Place) -> int:
    """Layers of multi-token prediction with experts: they are built like the last decoder layer."""
    layers = int(place.symbols["mtp_layers"])
    if not layers:
        return 0
    return layers if place.job.is_moe_layer(place.need("num_layers") - 1) else 0


def _experts(place: Place) -> int:
    return len(place.moe(place.layers)) + _of_mtp(place)


def _routers(place: Place) -> int:
    of_mtp = _of_mtp(place)
    return len(place.moe(place.layers)) + (min(1, of_mtp) if place.job.extra.get("mtp_use_repeated_layer") else of_mtp)


def _repeated(place: Place) -> int:
    """Layers with experts whose forward pass a checkpoint repeats.

    transformer_block.py and multi_token_prediction.py: _checkpointed_forward; moe_layer.py: moe_layer_recompute.
    """
    job = place.job
    if job.forward_only or job.num_experts is None:
        return 0
    if job.recompute_granularity == "full":
        uniform = job.recompute_method == "uniform"
        parts = place.chunks if uniform else (chunk[: job.recompute_num_layers or 0] for chunk in place.chunks)
        of_mtp = _of_mtp(place) if uniform and place.has("multi-token prediction recomputed") else 0
        return sum(len(place.moe(part)) for part in parts) + of_mtp
    by_module = job.recompute_granularity == "selective" and "moe" in job.recompute_modules
    by_flag = job.moe_layer_recompute
    if by_flag or (by_module and place.has("recompute_modules")):
        return _experts(place)
    return 0


def _capacity_factor(place: Place) -> float | None:
    factor = place.job.moe_expert_capacity_factor
    return None if factor is None or factor < 0 else factor


def _capacity(place: Place) -> int:
    """Rows of one expert from one rank, rounded as moe_utils.py: get_capacity does, in floating point."""
    job = place.job
    tokens, batch, k, experts = job.require("seq_length", "micro_batch_size", "moe_router_topk", "num_experts")
    own = Fraction(tokens * batch * k, job.context_parallel_size * int(place.symbols["SP"]))
    return math.ceil(float(own) / experts * (_capacity_factor(place) or 0.0))


def _destinations(place: Place) -> Fraction:
    """Expected expert-parallel ranks that a token goes to, its own included, if every choice of k experts is as likely."""
    experts, k = place.job.require("num_experts", "moe_router_topk")
    ranks = place.job.expert_model_parallel_size
    elsewhere = experts - experts // ranks
    return ranks * (1 - Fraction(math.comb(elsewhere, k), math.comb(experts, k)))


def _loss_types(place: Place) -> tuple[str, ...]:
    types = place.job.moe_router_load_balancing_type
    return (types,) if isinstance(types, str) else tuple(types)


def _has_loss(place: Place, loss: str) -> bool:
    """Whether this load-balancing loss has a coefficient."""
    types, coefficients = _loss_types(place), place.job.moe_aux_loss_coeff
    if loss not in types:
        return False
    if isinstance(coefficients, tuple):
        index = types.index(loss)
        return index < len(coefficients) and coefficients[index] != 0
    return coefficients != 0


def _element_bytes(key: str) -> Symbol:
    words = {"router": "bytes of a probability", "activations": "bytes of an activation"}
    return Symbol(words[key], lambda place: traffic.element_bytes(DTYPES[key](place)))


def _loss(name: str) -> Symbol:
    return Symbol(f"whether {name} has a coefficient", lambda place: _has_loss(place, name))


# -- losses for the log ----------------------------------------------------------------------------------------------

# Type in moe_router_load_balancing_type, and since which release Megatron-LM logs it under a name of its own.
_LOGGED = {
    "aux_loss": "expert grid",
    "seq_aux_loss": "sequence loss logged apart",
    "global_aux_loss": "global auxiliary loss",
}


def _losses(place: Place) -> Iterator[Mapping[str, Any]]:
    """Every name that Megatron-LM logs: entries, and on which groups it sums them.

    Since 0.12 the names follow from the options, so a stage without experts takes part; what the router itself has
    recorded there decides on the groups beyond the pipeline.
    """
    if place.job.num_experts is None or place.job.forward_only:
        return
    here = _experts(place) > 0
    z_loss = place.symbols["on"]("moe_z_loss_coeff")
    if not place.has("expert losses by option"):
        if here and _recorded(place, "aux_loss"):
            yield _logged(place, here, "aux_loss")
        if here and z_loss:
            yield _logged(place, here, "z_loss")
        return
    for loss, since in _LOGGED.items():
        if place.has(since) and _is_named(place, loss):
            yield _logged(place, here, loss)
    if z_loss:
        yield _logged(place, here, "z_loss")


def _is_named(place: Place, loss: str) -> bool:
    """Whether training_log takes the loss up: by the option alone, whatever its coefficient is."""
    types = place.job.moe_router_load_balancing_type
    if not place.has("sequence loss logged apart"):
        return types in ("aux_loss", "seq_aux_loss")
    # "aux_loss" in args.moe_router_load_balancing_type: one type is a string, and "aux_loss" is part of all three
    types = types[0] if isinstance(types, tuple) and len(types) == 1 else types
    return loss in types


def _recorded(place: Place, loss: str) -> bool:
    """Whether a router of the place records the loss."""
    if not place.has("auxiliary loss needs a coefficient"):
        return loss in _loss_types(place)
    if not place.has("sequence loss logged apart") and _has_loss(place, "seq_aux_loss"):
        return loss == "aux_loss"
    return _has_loss(place, loss)


def _logged(place: Place, here: bool, loss: str) -> Mapping[str, Any]:
    job, layout = place.job, place.job.layout
    recorded = here and (loss == "z_loss" or _recorded(place, loss))
    of_router = recorded and loss != "z_loss"
    over_all = of_router and loss == "global_aux_loss"
    always = not place.has("auxiliary loss needs a coefficient") or place.has("sequence loss logged apart")
    over_tp_cp = of_router and not over_all and (always or layout.group_size(TP_CP) > 1)
    z_average = recorded and loss == "z_loss" and place.has("z-loss averaged over all replicas")
    entries = place.need("num_layers")
    if place.has("expert losses with multi-token prediction") and (recorded or place.has("expert losses tracker")):
        entries += job.mtp_num_layers or 0
    if place.has("expert losses tracker"):
        over_dp, over_dp_cp = not over_all, False
    elif place.has("expert losses averaged over DP"):
        over_dp, over_dp_cp = over_tp_cp, False
    else:
        over_dp, over_dp_cp = False, place.has("sequence loss logged apart")
    return {
        "entries": entries,
        "on_tp_cp": int(over_tp_cp),
        "on_tp_dp_cp": int(over_all) + int(z_average),
        "on_dp": int(over_dp),
        "on_dp_cp": int(over_dp_cp),
    }


# -- what has no rule ------------------------------------------------------------------------------------------------

_ROLES = (EP, ETP, TP_EP, TP_CP, TP_DP_CP)
_WITH_EXPERTS = "num_experts is not None"

# Sequences or layers of which the rows of the job do not say how many there are.
_UNKNOWN_SIZES = (
    "variable_seq_lengths",
    "sft",
    "hybrid_context_parallel",
    "dataloader_inter_document_masking",
    "rampup_batch_size",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "heterogeneous_layers_config_path",
    "use_legacy_models",
)

_GAPS: tuple[Gap, ...] = (
    *(Gap(what=name, when=f"{_WITH_EXPERTS} and on('{name}')", roles=_ROLES) for name in _UNKNOWN_SIZES),
    Gap(
        what="add_bias_linear with the allgather dispatcher up to 0.12",
        when=(
            f"{_WITH_EXPERTS} and add_bias_linear and moe_token_dispatcher_type == 'allgather' and "
            "not since('biases of experts stay with them')"
        ),
        roles=(TP_EP,),
        phases=_PASSES,
    ),
    *(
        Gap(what=name, when=f"{_WITH_EXPERTS} and on('{name}')", roles=(EP, ETP), phases=_PASSES)
        for name in ("moe_router_padding_for_quantization", "moe_router_padding_for_fp8")
    ),
    Gap(
        what="fp32_residual_connection",
        when=f"{_WITH_EXPERTS} and on('fp32_residual_connection')",
        roles=(EP, ETP, TP_EP),
        phases=_PASSES,
    ),
    Gap(
        what="recompute_modules moe with overlap_moe_expert_parallel_comm",
        when=f"{_WITH_EXPERTS} and overlap_moe_expert_parallel_comm and repeated > 0",
        roles=_ROLES,
        phases=("forward", "recompute"),
    ),
    Gap(
        what="moe_router_load_balancing_type quantile_balancing",
        when=f"{_WITH_EXPERTS} and 'quantile_balancing' in moe_router_load_balancing_type",
        roles=(TP_CP, "dp_cp"),
        phases=("forward", "recompute", "other"),
        ops=("all_gather", "all_reduce"),
    ),
    Gap(
        what="use_grouped_gemm_for_shared_expert",
        when=f"{_WITH_EXPERTS} and on('use_grouped_gemm_for_shared_expert') and TP > 1",
        roles=("tp",),
        phases=_PASSES,
    ),
    Gap(
        what="moe_paged_stash", when=f"{_WITH_EXPERTS} and on('moe_paged_stash')", roles=("world",), ops=("all_reduce",)
    ),
    Gap(
        what="seq_aux_loss with a score function other than softmax up to 0.13",
        when=(
            f"{_WITH_EXPERTS} and seq_aux and not since('sequence loss by counts') and "
            "moe_router_score_function != 'softmax'"
        ),
        roles=(TP_CP,),
        phases=_PASSES,
    ),
    Gap(
        what="losses of the experts: framework unknown",
        when=f"{_WITH_EXPERTS} and training and framework not in ('megatron-lm', 'megatron-core')",
        roles=("pp", TP_CP, TP_DP_CP, "dp", "dp_cp"),
        phases=("other",),
        ops=("all_reduce",),
    ),
)


def _more_gaps(place: Place) -> Iterator[NotModelled]:
    job = place.job
    if job.num_experts is None:
        return
    if not place.has("expert grid"):
        yield NotModelled(f"experts in megatron-core {versions.before('expert grid')}", _ROLES)
    backend = job.moe_flex_dispatcher_backend
    if job.moe_token_dispatcher_type == "flex" and backend not in ("deepep", "hybridep"):
        yield NotModelled(f"moe_flex_dispatcher_backend {backend}", (TP_EP,))


CHAPTER = Chapter(
    name="expert",
    title="Experts",
    source="reference sections 2.6, 2.10 and 2.11",
    rules=RULES,
    gaps=_GAPS,
    more_gaps=_more_gaps,
    symbols={
        "Hr": Symbol(
            "width of a routed row: moe_latent_size, else H",
            lambda place: place.job.moe_latent_size or place.need("hidden_size"),
        ),
        "experts": Symbol("layers with experts on the stage, multi-token prediction included", _experts),
        "repeated": Symbol("those of them whose forward pass a checkpoint repeats", _repeated),
        "routers": Symbol("routers on the stage: layers with experts, a layer used several times once", _routers),
        "capacity": Symbol("rows of one expert from one rank: ceil(rows / E * capacity factor)", _capacity),
        "dropless": Symbol("whether no row is dropped", lambda place: _capacity_factor(place) is None),
        "drops": Symbol(
            "whether rows beyond the capacity are dropped and nothing is padded",
            lambda place: _capacity_factor(place) is not None and not place.job.moe_pad_expert_input_to_capacity,
        ),
        "pads": Symbol(
            "whether every expert's rows are padded to the capacity",
            lambda place: _capacity_factor(place) is not None and place.job.moe_pad_expert_input_to_capacity,
        ),
        "destinations": Symbol("expected expert-parallel ranks of a token, its own included", _destinations),
        "probability_bytes": _element_bytes("router"),
        "activation_bytes": _element_bytes("activations"),
        "first_of_012": Symbol(
            "whether the job ran 0.12.0, the first version of its release",
            lambda place: versions.not_yet(place.job.megatron_core_version, "expert probabilities are exchanged"),
        ),
        "etp_chosen": Symbol(
            "whether the job states an expert tensor parallelism other than the default, TP",
            lambda place: (
                "expert_tensor_parallel_size" in place.job.given
                and place.symbols["ETP"] != place.job.tensor_model_parallel_size
            ),
        ),
        "aux": _loss("aux_loss"),
        "seq_aux": _loss("seq_aux_loss"),
        "global_aux": _loss("global_aux_loss"),
        "aux_type": Symbol("whether aux_loss is asked for", lambda place: "aux_loss" in _loss_types(place)),
    },
    families={"losses": _losses},
    family_words={"losses": "for every loss that Megatron-LM logs"},
)


# -- replay ----------------------------------------------------------------------------------------------------------


def replay(calls: Iterable[ExpectedCall], rows: Sequence[Mapping[str, int]]) -> list[ExpectedCall]:
    """The calls with sizes that follow from recorded rows instead of from balanced routing.

    rows: for every layer and micro-batch of the rank, in any order, how many rows were "routed", "arrived" and
    "gathered" (see model.Varies). A call whose size depends on them becomes one for each distinct size; all others stay.
    Raises ValueError for a call that is not made once for every entry of rows, and KeyError for rows that are missing.
    """
    found: list[ExpectedCall] = []
    for one in calls:
        varies = one.varies
        if varies is None:
            found.append(one)
            continue
        if one.calls != len(rows):
            raise ValueError(f"rule {one.rule}: {one.calls} calls, but rows of {len(rows)}")
        sizes = Counter(
            (
                one.in_elems if varies.sent is None else varies.width * entry[varies.sent],
                one.out_elems if varies.received is None else varies.width * entry[varies.received],
            )
            for entry in rows
        )
        found += [replace(one, in_elems=sent, out_elems=got, calls=n) for (sent, got), n in sizes.items()]
    return found
