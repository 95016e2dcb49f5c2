"""The seed document's own model, corrected where its errata say so: rule set "document", and the oracle of its claims.

Per rank and step; M micro-batches, layers of the stage, t = S/CP * B tokens of a rank, ts = S/(CP*SP) * B of them between
tensor-parallel regions (E2). The backward pass mirrors the forward one.

=============  ========  ==============================================  ================================================
dimension      role      forward                                         backward
=============  ========  ==============================================  ================================================
tensor, SP     tp        a layer: all-gather ts*H -> t*H, reduce-        the mirror of each, last one first
                         scatter back, around attention and MLP
.. without SP  tp        all-reduce t*H, after both (E6)                 the same
pipeline       pp        ts*H to the next stage; v times, in a ring,     ts*H to the previous stage
                         when interleaved (E10)
ring           cp        CP-1 times K+V, 2 * t*H/TP, to the next rank    CP-1 times dK+dV, to the previous rank
all-gather     cp        gather K and V, t*H/TP each                     reduce-scatter dK and dV
Ulysses        cp        all-to-all of Q, K, V, then of O                all-to-all of dO, then of dQ, dK, dV
experts        ep        dispatch and combine, ts*k rows of H            the same two, combine's mirror first (E8); once
                                                                         a step the router's gradient H*E
plain          dp_cp     none                                            all-reduce of Psi gradients, once a step
ZeRO-1, -2     dp_cp     none                                            once a step: reduce-scatter of gradients, all-
                                                                         gather of parameters (E12)
ZeRO-3         dp_cp     all-gather of each layer, every micro-batch     all-gather and reduce-scatter of each layer, every
                                                                         micro-batch (E12)
=============  ========  ==============================================  ================================================

Layers with experts have no tensor-parallel pair around the MLP: experts are not cut (E7). Psi are the rank's own parameters
(E25); experts' are reduced over "edp", all others over "dp_cp", whatever the grid: with the document's own
(axes.DOCUMENT_ORDER, grid "product") these are DP*CP*TP and DP*EP*CP ranks (E4). 4.7 also reduces the router's over "ep",
though they are in Psi. Gradients have the parameters' type. ZeRO stage: 1 with the distributed optimizer, 1, 2, 3 with
Megatron-FSDP's strategies, 3 with torch FSDP2, else none. What does not divide is padded.

The document knows no embedding, loss, repeated gather of an input or of keys and values, norm gradients, recomputation,
grouped queries, expert tensor parallelism, token counts, shared embedding or gradient norm (E34): under these rules such
calls are not expected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from traceanalyzer.expect import parameters, schedule
from traceanalyzer.expect.model import Evidence, NotModelled
from traceanalyzer.expect.place import Place, Symbol
from traceanalyzer.expect.rules import Chapter, Gap, Routed, Rule


def _said(where: str) -> Evidence:
    return Evidence("document", where)


_WHOLE, _SHARD = "S/CP * B * H", "S/(CP*SP) * B * H"

# -- tensor parallelism ----------------------------------------------------------------------------------------------

# Component, whether its weight is column-parallel, how many layers have it; in the order of the forward pass.
_LINEARS: tuple[tuple[str, bool, str], ...] = (
    ("attention.qkv", True, "layers"),
    ("attention.proj", False, "layers"),
    ("mlp.fc1", True, "dense_layers"),
    ("mlp.fc2", False, "dense_layers"),
)
_TENSOR = {
    "forward": _said("1.5 and 1.6 (S1.5-1 to S1.5-11, S1.6.3-1 to S1.6.3-8), corrected by E2, E6, E7, E28"),
    "backward": _said("1.8 (S1.8-18 to S1.8-43), corrected by E2, E6, E7, E28"),
}


def _tensor() -> Iterator[Rule]:
    for phase in ("forward", "backward"):
        for component, column, layers in _LINEARS if phase == "forward" else _LINEARS[::-1]:
            enters = column == (phase == "forward")
            with_sp = Rule(
                name=f"document tensor: {component}, {phase}",
                role="tp",
                op="all_gather" if enters else "reduce_scatter",
                phase=phase,
                component=component,
                sent=_SHARD if enters else _WHOLE,
                received=_WHOLE if enters else _SHARD,
                calls=f"{layers} * M",
                when=f"TP > 1 and sequence_parallel{_training(phase)}",
                evidence=_TENSOR[phase],
            )
            yield with_sp
            if not enters:
                yield replace(
                    with_sp,
                    op="all_reduce",
                    received="",
                    when=f"TP > 1 and not sequence_parallel{_training(phase)}",
                )


def _training(phase: str) -> str:
    return "" if phase == "forward" else " and training"


# -- pipeline parallelism --------------------------------------------------------------------------------------------

_PIPELINE = _said("2.2.1, 2.3.3 and 2.6 (S2.2.1-1 to S2.2.1-5, S2.3.3-1 to S2.3.3-4), corrected by E2, E9, E10, E28")


def _pipeline() -> Iterator[Rule]:
    for (op, content, toward), count in schedule.MESSAGES.items():
        phase = "forward" if content == "activation" else "backward"
        yield Rule(
            name=f"document pipeline: {op} {content} {'to' if op == 'send' else 'from'} {toward}",
            role="pp",
            op=op,
            phase=phase,
            component=f"{content}s",
            sent=_SHARD,
            calls=count,
            when=f"PP > 1{_training(phase)}",
            evidence=_PIPELINE,
            peer=toward,
        )


# -- context parallelism ---------------------------------------------------------------------------------------------

_RING = _said("3.2 (S3.2.3-1 to S3.2.4-4), corrected by E15, E28; with TP: section B of the errata")
_GATHER = _said("3.3 (S3.3.3-1 to S3.3.4-8), corrected by E24, E28; with TP: section B of the errata")
_ULYSSES = _said("3.4 (S3.4.2-1 to S3.4.4-7) and 6.5 (S6.5-21 to S6.5-30), corrected by E3, E14, E28")
_ONE = "S/CP * B * H/TP"
_HEADS = "S/CP * B * Nh*d/TP"


def _attention(part: str, op: str, phase: str, evidence: Evidence, sent: str, when: str, **more: Any) -> Rule:
    times = more.pop("times", "1")
    side = f", {op}" if op in ("send", "recv") else ""
    return Rule(
        name=f"document context: {part}{side}",
        role="cp",
        op=op,
        phase=phase,
        component=f"attention: {part}",
        sent=sent,
        calls=f"{times} * layers_of_type * M",
        when=f"{when}{_training(phase)}",
        evidence=evidence,
        each="types",
        **more,
    )


def _context() -> Iterator[Rule]:
    ring, gather, ulysses = "comm == 'p2p'", "comm == 'all_gather'", "comm == 'a2a'"
    for part, phase, ahead, behind in (
        ("K and V", "forward", "next", "previous"),
        ("dK and dV", "backward", "previous", "next"),
    ):
        for op, peer in (("send", ahead), ("recv", behind)):
            yield _attention(part, op, phase, _RING, f"2 * {_ONE}", ring, times="(CP-1)", peer=peer)
    for part in ("K", "V"):
        yield _attention(part, "all_gather", "forward", _GATHER, _ONE, gather, received=f"CP * {_ONE}")
    for part in ("dK", "dV"):
        yield _attention(part, "reduce_scatter", "backward", _GATHER, f"CP * {_ONE}", gather, received=_ONE)
    for phase, parts in (("forward", ("Q", "K", "V", "O")), ("backward", ("dO", "dQ", "dK", "dV"))):
        for part in parts:
            yield _attention(part, "all_to_all", phase, _ULYSSES, _HEADS, ulysses)


def _types(place: Place) -> Iterator[Mapping[str, Any]]:
    """A member for each way in which attention of the stage communicates, with its layers."""
    if place.job.context_parallel_size > 1:
        for comm, layers in Counter(place.job.cp_comm_type_of(layer) for layer in place.layers).items():
            yield {"comm": comm, "layers_of_type": layers}


# -- expert parallelism ----------------------------------------------------------------------------------------------

_EXPERTS = {
    "forward": _said("4.5 to 4.7 (S4.5-1, S4.6-3 to S4.7-8), corrected by E2, E16, E28"),
    "backward": _said("4.7 (S4.7-12 to S4.7-14), corrected by E2, E8, E28"),
}
_ROWS = "S/(CP*SP) * B * k * H"


def _expert() -> Iterator[Rule]:
    for phase, components in (
        ("forward", ("experts.dispatch", "experts.combine")),
        ("backward", ("experts.combine", "experts.dispatch")),
    ):
        for component in components:
            leaves = (component == "experts.dispatch") == (phase == "forward")
            yield Rule(
                name=f"document expert: {component.removeprefix('experts.')}, {phase}",
                role="ep",
                op="all_to_all",
                phase=phase,
                component=component,
                sent=_ROWS,
                calls="moe_layers * M",
                when=f"EP > 1{_training(phase)}",
                evidence=_EXPERTS[phase],
                routed=Routed("H", None, "arrived") if leaves else Routed("H", "arrived", None),
                note="uniform routing; a row for every expert that a token goes to",
            )
    yield Rule(
        name="document expert: gradient of the router",
        role="ep",
        op="all_reduce",
        phase="other",
        component="router gradients",
        dtype="parameters",
        sent="H * E",
        calls="moe_layers",
        when="EP > 1 and training",
        evidence=_said("4.7 (S4.7-15)"),
        document="real Megatron reduces the router's gradient only with the other dense gradients",
    )


# -- data parallelism ------------------------------------------------------------------------------------------------

_PLAIN = _said("5.4 (S5.4-1 to S5.4-3), corrected by E4, E25")
_ZERO = _said("5.3 and 5.4 (S5.3-7 to S5.3-9, S5.4-4 to S5.4-10), corrected by E4, E12, E25")
_ZERO3 = _said("5.3 and 5.4 (S5.3-10 to S5.3-12, S5.4-11 to S5.4-13), corrected by E4, E12, E25")


def _data(kind: str, role: str, ranks: str, psi: str, layers: str) -> Iterator[Rule]:
    """Rules for the gradients and parameters of experts, or of everything else. psi: how many; layers: their family."""

    def rule(what: str, op: str, phase: str, size: str, evidence: Evidence, when: str, **more: Any) -> Rule:
        shard, whole = f"ceil({size}/{ranks})", f"{ranks} * ceil({size}/{ranks})"
        sides = {"all_reduce": (size, ""), "reduce_scatter": (whole, shard), "all_gather": (shard, whole)}
        return Rule(
            name=f"document data: {kind}{what}, {phase}{', ZeRO-3' if evidence is _ZERO3 else ''}",
            role=role,
            op=op,
            phase=phase,
            component=f"{kind}{what}",
            dtype="parameters",
            sent=sides[op][0],
            received=sides[op][1],
            when=f"known and {ranks} > 1 and {psi} > 0 and {when}",
            evidence=evidence,
            **more,
        )

    for phase, late in (("other", "not in_backward"), ("backward", "in_backward")):
        when = f"training and {late}"
        yield rule("gradients", "all_reduce", phase, psi, _PLAIN, f"{when} and zero == 0", calls="1")
        yield rule("gradients", "reduce_scatter", phase, psi, _ZERO, f"{when} and zero in (1, 2)", calls="1")
    for phase, late in (("optimizer", "not in_forward"), ("forward", "in_forward")):
        when = f"training and {late} and zero in (1, 2)"
        yield rule("parameters", "all_gather", phase, psi, _ZERO, when, calls="1")
    each = {"each": layers, "calls": "many * M"}
    yield rule("parameters", "all_gather", "forward", "n", _ZERO3, "zero == 3", **each)
    yield rule("parameters", "all_gather", "backward", "n", _ZERO3, "zero == 3 and training", **each)
    yield rule("gradients", "reduce_scatter", "backward", "n", _ZERO3, "zero == 3 and training", **each)


_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def zero_stage(place: Place) -> int:
    """The document's ZeRO stage that a job's data parallelism is: 0 (plain) to 3."""
    job = place.job
    if job.use_megatron_fsdp:
        return _STRATEGIES[job.data_parallel_sharding_strategy]
    return 3 if job.use_torch_fsdp2 else int(job.use_distributed_optimizer)


def _in_backward(place: Place) -> bool:
    return place.job.overlap_grad_reduce or (place.job.use_megatron_fsdp and zero_stage(place) == 2)


def _count(expert: bool, parts: Iterable[parameters.Component]) -> int:
    """Parameters of these components that are experts', or that are not."""
    return sum(part.elements.value for part in parts if part.expert == expert)


def _psi(expert: bool) -> Symbol:
    words = "parameters of the rank's experts" if expert else "parameters of the rank, experts apart"
    return Symbol(
        words,
        lambda place: _count(expert, parameters.components(place.job, place.rank, None, place.release)),
    )


def _layers(place: Place, expert: bool) -> Iterator[Mapping[str, Any]]:
    """Layers of equal size together: many of n parameters; at the end what is outside layers, as if it were one."""
    if not _is_known(place):
        return
    sizes = Counter(_count(expert, parameters.of_layer(place, layer)) for layer in place.layers)
    inside = sum(size * many for size, many in sizes.items())
    everything = _count(expert, parameters.components(place.job, place.rank, None, place.release))
    sizes[everything - inside] += 1
    yield from ({"n": size, "many": many} for size, many in sizes.items() if size)


def _is_known(place: Place) -> bool:
    return not parameters.undescribed(place.job, place.rank, place.release)


def _unknown(place: Place) -> Iterator[NotModelled]:
    if not place.job.forward_only or zero_stage(place) == 3:
        for reason in parameters.undescribed(place.job, place.rank, place.release)[:1]:
            yield NotModelled(reason, ("dp_cp", "edp"))


# -- chapters --------------------------------------------------------------------------------------------------------

CHAPTERS: tuple[Chapter, ...] = (
    Chapter(
        name="document tensor",
        title="The document: tensor and sequence parallelism",
        source="seed document, chapter 1",
        rules=tuple(_tensor()),
    ),
    Chapter(
        name="document pipeline",
        title="The document: pipeline parallelism",
        source="seed document, chapter 2",
        rules=tuple(_pipeline()),
    ),
    Chapter(
        name="document context",
        title="The document: context parallelism",
        source="seed document, chapter 3",
        rules=tuple(_context()),
        families={"types": _types},
        family_words={"types": "cp_comm_type: comm and its layers_of_type"},
        gaps=(
            Gap(
                what="a2a+p2p: the document has no such variant",
                when="CP > 1 and 'a2a+p2p' in cp_comm_type",
                roles=("cp", "cp_l0", "cp_l1"),
            ),
        ),
    ),
    Chapter(
        name="document expert",
        title="The document: expert parallelism",
        source="seed document, chapter 4",
        rules=tuple(_expert()),
    ),
    Chapter(
        name="document data",
        title="The document: data parallelism and ZeRO",
        source="seed document, chapter 5",
        rules=(
            *_data("", "dp_cp", "DPCP", "Psi", "layers"),
            *_data("expert ", "edp", "EDP", "Psi_e", "expert layers"),
        ),
        symbols={
            "Psi": _psi(expert=False),
            "Psi_e": _psi(expert=True),
            "zero": Symbol("the document's ZeRO stage: 0 (plain) to 3", zero_stage),
            "in_backward": Symbol("whether gradients are reduced inside the backward pass", _in_backward),
            "in_forward": Symbol(
                "whether parameters are gathered inside the forward pass",
                lambda place: place.job.overlap_param_gather and not place.job.use_megatron_fsdp,
            ),
            "known": Symbol("whether the rank's parameters can be counted", _is_known),
        },
        families={
            "layers": lambda place: _layers(place, expert=False),
            "expert layers": lambda place: _layers(place, expert=True),
        },
        family_words={
            "layers": "many layers of n parameters each, experts apart, and what is outside layers",
            "expert layers": "many layers with n parameters of experts each",
        },
        more_gaps=_unknown,
    ),
)
"""The rule set, a chapter for each chapter of the document."""
