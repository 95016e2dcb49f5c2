"""Context parallelism: how attention reaches the keys and values of the other ranks' part of the sequence.

TransformerEngine makes these calls (megatron-core's own attention refuses more than one context-parallel rank), in every
attention layer of the stage, layers of multi-token prediction included, on every micro-batch. Elements of one rank, with
t = S/CP * B tokens: Q = t * Wq, K = t * Wk, V = t * Wv, O = t * Wo, where a width W is heads of the rank times channels
(keys and values: query groups of the rank, at least one). cp_comm_type, also one for each layer:

============  ==========  ==============================================  ==============================================
type          role        forward                                         backward
============  ==========  ==============================================  ==============================================
p2p           cp          CP-1 times send and receive K+V, to the next    to the previous rank: K+V, CP-2 times K+V with
                          rank of the ring                                their gradients, then the gradients alone
all_gather    cp          gather K, gather V                              gather both again, reduce-scatter both gradients
a2a           cp          exchange Q, K, V, then O                        exchange dO, then dQ, dK, dV
a2a+p2p       cp_l0       as a2a                                          O, dO, then dQ, dK, dV
              cp_l1       as p2p: the same K+V (heads/L0, tokens*L0)      as p2p
============  ==========  ==============================================  ==============================================

A level of one rank leaves the other type alone, on the other level's group. Causal load balance (each rank owns an early
and a late piece of the sequence) changes no size: every round carries all keys and values, of which half are used. Ring
messages are the same whether they start in one batch (CP 2 before compute capability 10, or NVTE_BATCH_MHA_P2P_COMM=1)
or one by one. Weights are copies on every rank; their gradients belong to "dp_cp", none to "cp".

FP8 attention (fp8_dot_product_attention with fp8): the ring sends bytes (uint8), and the gradients return by one
all-to-all of CP * (K+V) bytes; a2a exchanges bytes, with recipe "tensorwise" only before the kernels. The largest logit
(qk_clip, log_max_attention_logit) is reduced over the ring, gathered over the heads of a2a. A softmax offset
(softmax_type, a2a only) adds a gather of its gradient.

Recomputing core attention, or the whole layer, repeats the forward calls inside the backward pass.

TransformerEngine exchanges O in the backward pass of a2a up to 2.7, of a2a+p2p up to 2.14: its release is taken from
transformer_engine_version, else from what the release of megatron-core accepts, else the calls are not modelled.

Source: TransformerEngine v1.2 ... v2.18, attention/dot_product_attention/context_parallel.py (pytorch/attention.py
before 2.3); reference section 2.5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from traceanalyzer.expect import versions
from traceanalyzer.expect.model import Evidence, NotModelled
from traceanalyzer.expect.place import Place, Symbol, is_on
from traceanalyzer.expect.rules import Avoid, Chapter, Gap, Rule

_TE = "TransformerEngine context_parallel.py"
_RUN = "Python of TransformerEngine 2.20.2 with megatron-core 0.16.1, recorded"
_RING = Evidence("run", f"{_RUN}: cp2_te_p2p, cp4_te_p2p, w1024_moe_*_te_p2p; {_TE}: AttnFuncWithCPAndKVP2P")
_GATHER = Evidence("run", f"{_RUN}: cp2_te_all_gather; {_TE}: AttnFuncWithCPAndKVAllGather")
_EXCHANGE = Evidence("run", f"{_RUN}: cp2_te_a2a; {_TE}: AttnFuncWithCPAndQKVOA2A")
_LEVELS = Evidence(
    "run",
    "Python of TransformerEngine 2.20.2 with megatron-core 0.16.1, 4 gloo processes: context_parallel_size 4, "
    f"hierarchical_context_parallel_sizes 2 2, cp_comm_type a2a+p2p; {_TE}: AttnFuncWithCPAndKVP2P",
)
_OUTPUT = Evidence(
    "source", f"{_TE}: AttnFuncWithCPAndQKVOA2A.backward (to 2.7), AttnFuncWithCPAndKVP2P.backward (to 2.14)"
)
_FP8_RING = Evidence("source", f"{_TE} (2.13): AttnFuncWithCPAndKVP2P")
_FP8_EXCHANGE = Evidence("source", f"{_TE} (2.13): AttnFuncWithCPAndQKVOA2A")
_LOGIT = Evidence("source", f"{_TE} (2.13): max_logit, flash_attn_a2a_communicate_softmax_offset")
_OFFSET = Evidence("source", f"{_TE} (2.13): AttnFuncWithCPAndQKVOA2A.backward")

_TOKENS = "S/CP * B"
_KV = f"{_TOKENS} * (Wk + Wv)"
_REPEATS = "recompute_repeats_collectives"
_CORE, _FULL = "core_attn out of recompute_modules", "recompute_granularity selective"


# -- rules -----------------------------------------------------------------------------------------------------------


def _forward(name: str, role: str, op: str, evidence: Evidence, sent: str, times: str, **more: Any) -> Iterator[Rule]:
    """A call of the forward pass, and its repetition by either kind of recomputation."""
    when = more.pop("when")
    for phase, layers, condition, setting in (
        ("forward", "layers_of_type", "True", ""),
        ("recompute", "repeated", "training and by_core", _CORE),
        ("recompute", "repeated", "training and not by_core", _FULL),
    ):
        suffix = "" if phase == "forward" else f", recomputed ({'core attention' if setting == _CORE else 'layer'})"
        # What is received counts with its sender.
        avoid = Avoid(_REPEATS, setting) if setting and op != "recv" else None
        yield Rule(
            name=f"context: {name}{suffix}",
            role=role,
            op=op,
            phase=phase,
            component=f"attention: {more.get('component', name)}",
            sent=sent,
            calls=f"{times} * {layers} * M",
            when=f"{when} and {condition}",
            evidence=evidence,
            each="types",
            avoid=avoid,
            **{key: value for key, value in more.items() if key != "component"},
        )


def _backward(name: str, role: str, op: str, evidence: Evidence, sent: str, times: str, **more: Any) -> Rule:
    when = more.pop("when")
    return Rule(
        name=f"context: {name}",
        role=role,
        op=op,
        phase="backward",
        component=f"attention: {more.pop('component', name)}",
        sent=sent,
        calls=f"{times} * layers_of_type * M",
        when=f"training and {when}",
        evidence=evidence,
        each="types",
        **more,
    )


def _ring(role: str, when: str, evidence: Evidence) -> Iterator[Rule]:
    """Both sides of every message of the ring over ``role``."""
    backward = "section 4.2, CP ring: the document sends the gradients only"
    for op, ahead, behind in (("send", "next", "previous"), ("recv", "previous", "next")):
        for dtype, kind, proof in (
            ("activations", "not fp8_attention", evidence),
            ("uint8", "fp8_attention", _FP8_RING),
        ):
            more = {"when": f"{when} and {kind}", "dtype": dtype}
            words = "" if dtype == "activations" else ", fp8"
            yield from _forward(
                f"K and V{words}, {op}", role, op, proof, _KV, "(R - 1)", peer=ahead, component="K and V", **more
            )
        plain = {"when": f"{when} and not fp8_attention", "document": backward, "peer": behind}
        yield _backward(f"K and V again, {op}", role, op, evidence, _KV, "1", component="K and V again", **plain)
        both = f"2 * {_KV}"
        yield _backward(
            f"K, V and gradients, {op}", role, op, evidence, both, "(R - 2)", component="K, V and dK, dV", **plain
        )
        yield _backward(f"dK and dV, {op}", role, op, evidence, _KV, "1", component="dK and dV", **plain)
        small = {"when": f"{when} and fp8_attention", "document": backward, "peer": behind, "dtype": "uint8"}
        yield _backward(
            f"K and V again, fp8, {op}", role, op, _FP8_RING, _KV, "(R - 1)", component="K and V again", **small
        )
    yield _backward(
        "dK and dV, fp8",
        role,
        "all_to_all",
        _FP8_RING,
        f"R * {_KV}",
        "1",
        when=f"{when} and fp8_attention",
        dtype="uint8",
        component="dK and dV",
    )
    yield from _forward(
        "largest logit of the ring",
        role,
        "all_reduce",
        _LOGIT,
        "heads / A",
        "1",
        when=f"{when} and largest_logit",
        component="largest logit",
    )


def _exchange(role: str, when: str, evidence: Evidence) -> Iterator[Rule]:
    """The all-to-alls that trade tokens for heads over ``role``."""
    for part, width in (("Q", "Wq"), ("K", "Wk"), ("V", "Wv"), ("O", "Wo")):
        for dtype, kind, proof in _dtypes(evidence, late=part == "O"):
            yield from _forward(
                f"{part}{'' if dtype == 'activations' else ', fp8'}",
                role,
                "all_to_all",
                proof,
                f"{_TOKENS} * {width}",
                "1",
                when=f"{when} and {kind}",
                dtype=dtype,
                component=part,
            )
    for part, width in (("dO", "Wo"), ("dQ", "Wq"), ("dK", "Wk"), ("dV", "Wv")):
        for dtype, kind, proof in _dtypes(evidence, late=part != "dO"):
            yield _backward(
                f"{part}{'' if dtype == 'activations' else ', fp8'}",
                role,
                "all_to_all",
                proof,
                f"{_TOKENS} * {width}",
                "1",
                when=f"{when} and {kind}",
                dtype=dtype,
                component=part,
            )
    yield _backward(
        "O again",
        role,
        "all_to_all",
        _OUTPUT,
        f"{_TOKENS} * Wo",
        "1",
        when=f"{when} and not fp8_attention and exchanges_output",
    )
    yield from _forward(
        "largest logit of the heads",
        role,
        "all_gather",
        _LOGIT,
        "heads / A",
        "1",
        received="heads",
        when=f"{when} and largest_logit",
        component="largest logit",
    )


def _dtypes(evidence: Evidence, *, late: bool) -> tuple[tuple[str, str, Evidence], ...]:
    """Element type, condition and evidence; ``late``: what leaves a kernel, in bytes with delayed scaling only."""
    if late:
        return (
            ("activations", "not (fp8_attention and fp8_recipe == 'delayed')", evidence),
            ("uint8", "fp8_attention and fp8_recipe == 'delayed'", _FP8_EXCHANGE),
        )
    return ("activations", "not fp8_attention", evidence), ("uint8", "fp8_attention", _FP8_EXCHANGE)


def _gathers() -> Iterator[Rule]:
    when = "comm == 'all_gather'"
    for part, width in (("K", "Wk"), ("V", "Wv")):
        own, whole = f"{_TOKENS} * {width}", f"CP * {_TOKENS} * {width}"
        yield from _forward(part, "cp", "all_gather", _GATHER, own, "1", received=whole, when=when)
        yield _backward(
            f"{part} again",
            "cp",
            "all_gather",
            _GATHER,
            own,
            "1",
            received=whole,
            when=when,
            document="section 4.2, CP all-gather: the document keeps K and V",
        )
        yield _backward(f"d{part}", "cp", "reduce_scatter", _GATHER, whole, "1", received=own, when=when)
    yield from _forward(
        "largest logit",
        "cp",
        "all_reduce",
        _LOGIT,
        "heads",
        "1",
        when=f"{when} and largest_logit",
    )


RULES: tuple[Rule, ...] = (
    *_ring("cp", "comm == 'p2p'", _RING),
    *_gathers(),
    *_exchange("cp", "comm == 'a2a'", _EXCHANGE),
    _backward(
        "gradient of the softmax offset",
        "cp",
        "all_gather",
        _OFFSET,
        "heads / CP",
        "1",
        received="heads",
        dtype="float32",
        when="comm == 'a2a' and on('softmax_type')",
    ),
    *_exchange("cp_l0", "comm == 'a2a+p2p' and A > 1", _LEVELS),
    *_ring("cp_l1", "comm == 'a2a+p2p' and R > 1", _LEVELS),
)


# -- symbols ---------------------------------------------------------------------------------------------------------


def _heads(place: Place) -> int:
    return place.need("num_attention_heads") // place.job.tensor_model_parallel_size


def _groups(place: Place) -> int:
    """Query groups of a rank; with fewer groups than ranks each rank keeps the one that its queries need."""
    if place.job.multi_latent_attention:
        return _heads(place)
    return max(1, place.need("num_query_groups") // place.job.tensor_model_parallel_size)


def _key_channels(place: Place) -> int:
    job = place.job
    return job.qk_head_dim + job.qk_pos_emb_head_dim if job.multi_latent_attention else place.need("kv_channels")


def _value_channels(place: Place) -> int:
    return place.job.v_head_dim if place.job.multi_latent_attention else place.need("kv_channels")


def _by_core(place: Place) -> bool:
    """Whether core attention alone is recomputed."""
    job = place.job
    if job.recompute_granularity != "selective":
        return False
    return "core_attn" in job.recompute_modules or not place.has("recompute_modules")


def _repeated(place: Place) -> tuple[tuple[int, ...], bool]:
    """Decoder layers whose attention runs again in the backward pass; and whether multi-token prediction's does."""
    job = place.job
    if _by_core(place):
        return place.layers, True
    if job.recompute_granularity != "full":
        return (), False
    if job.recompute_method == "uniform":
        return place.layers, place.has("multi-token prediction recomputed")
    number = place.need("recompute_num_layers")
    return tuple(layer for chunk in place.chunks for layer in chunk[:number]), False


def _type_of(place: Place, layer: int) -> str:
    return place.job.cp_comm_type_of(layer) if place.has("cp_comm_type") else "p2p"


def _types(place: Place) -> Iterator[Mapping[str, Any]]:
    """A member for each way in which attention of the stage communicates, with its layers and its two levels."""
    if place.job.context_parallel_size == 1:
        return
    layers: Counter[str] = Counter(_type_of(place, layer) for layer in place.layers)
    again, predicted_again = _repeated(place)
    repeated: Counter[str] = Counter(_type_of(place, layer) for layer in again)
    predicted = place.symbols["mtp_layers"]
    if predicted and len(place.job.cp_comm_type) == 1:
        layers[_type_of(place, 0)] += predicted
        repeated[_type_of(place, 0)] += predicted * predicted_again
    for comm, number in layers.items():
        exchanged, ring = _levels(place, comm)
        behaviour = "a2a keeps its output" if ring == 1 else "a2a+p2p keeps its output"
        yield {
            "comm": comm,
            "layers_of_type": number,
            "repeated": repeated[comm],
            "A": exchanged,
            "R": ring,
            "exchanges_output": exchanged > 1 and _te_has(place, behaviour) is False,
        }


def _levels(place: Place, comm: str) -> tuple[int, int]:
    """Ranks that exchange heads, and ranks of the ring."""
    size = place.job.context_parallel_size
    if comm == "a2a":
        return size, 1
    if comm != "a2a+p2p":
        return 1, size
    exchanged, ring = place.job.hierarchical_context_parallel_sizes  # two: job_rules.py sees to it
    return exchanged, ring


def _te_has(place: Place, behaviour: str) -> bool | None:
    return versions.transformer_engine_since(place.job.transformer_engine_version, place.release, behaviour)


def _fp8_attention(place: Place) -> bool:
    return place.job.fp8 is not None and place.job.fp8_dot_product_attention


def _largest_logit(place: Place) -> bool:
    asked = is_on(place.job, "qk_clip") or is_on(place.job, "log_max_attention_logit")
    return asked and place.has("largest attention logit")


# -- what the rules do not know --------------------------------------------------------------------------------------

_ROLES = ("cp", "cp_l0", "cp_l1")
_PARALLEL = "CP > 1"


def _unknown(place: Place) -> Iterable[NotModelled]:
    """Exchanges of the output under an unknown TransformerEngine, and what FP8 attention does outside its rules."""
    job = place.job
    if job.context_parallel_size == 1:
        return
    used = {_type_of(place, layer) for layer in place.layers}
    exchanges = {comm: _levels(place, comm) for comm in used if comm in ("a2a", "a2a+p2p")}
    for comm, (exchanged, ring) in exchanges.items():
        behaviour = "a2a keeps its output" if ring == 1 else "a2a+p2p keeps its output"
        # a release names what it accepts, but nothing stops a newer TransformerEngine, which keeps its output
        has = _te_has(place, behaviour)
        unknown = has is None or (not has and not job.transformer_engine_version)
        if exchanged > 1 and not job.forward_only and unknown:
            role = "cp" if comm == "a2a" else "cp_l0"
            yield NotModelled(f"{comm}: version of TransformerEngine unknown", (role,), ("backward",), ("all_to_all",))
    if _fp8_attention(place):
        if job.fp8_recipe not in ("delayed", "tensorwise"):
            yield NotModelled(f"fp8_dot_product_attention with recipe {job.fp8_recipe}", _ROLES)
        elif job.multi_latent_attention or is_on(job, "first_last_layers_bf16"):
            yield NotModelled("fp8_dot_product_attention with other layers or widths", _ROLES)
        elif not used <= {"p2p", "a2a"}:
            yield NotModelled("fp8_dot_product_attention with all_gather or a2a+p2p", _ROLES)
        elif "a2a" in used and _te_has(place, "a2a keeps its output") is not True:
            yield NotModelled("fp8_dot_product_attention with a2a: version of TransformerEngine unknown or old", _ROLES)


def _gap(what: str, when: str = "") -> Gap:
    condition = when or f"on({what!r})"
    return Gap(what=what, roles=_ROLES, when=f"{_PARALLEL} and ({condition})")


CHAPTER = Chapter(
    name="context",
    title="Context parallel",
    source="reference section 2.5",
    rules=RULES,
    symbols={
        "heads": Symbol("query heads of a rank: Nh/TP", _heads),
        "Wq": Symbol(
            "width of the queries of a rank: heads * channels", lambda place: _heads(place) * _key_channels(place)
        ),
        "Wk": Symbol(
            "width of the keys of a rank: groups * channels", lambda place: _groups(place) * _key_channels(place)
        ),
        "Wv": Symbol("width of the values of a rank", lambda place: _groups(place) * _value_channels(place)),
        "Wo": Symbol("width of attention's output", lambda place: _heads(place) * _value_channels(place)),
        "len_of_types": Symbol("entries of cp_comm_type", lambda place: len(place.job.cp_comm_type)),
        "by_core": Symbol("whether core attention alone is recomputed", _by_core),
        "fp8_attention": Symbol("whether attention runs in FP8", _fp8_attention),
        "largest_logit": Symbol("whether attention returns its largest logit", _largest_logit),
    },
    families={"types": _types},
    family_words={
        "types": "cp_comm_type: comm, its layers_of_type and how many of them are repeated, A ranks that exchange heads, "
        "R ranks of the ring",
    },
    gaps=(
        Gap(
            what="hybrid_context_parallel",
            roles=("hybrid_cp", "cp"),
        ),
        _gap("a list of cp_comm_type before 0.17", "len_of_types > 1 and not since('cp_comm_type of a layer')"),
        _gap("multi-token prediction with a list of cp_comm_type", "len_of_types > 1 and mtp_layers > 0"),
        _gap(
            "multi_latent_attention with all_gather or a2a",
            "multi_latent_attention and ('a2a' in cp_comm_type or 'all_gather' in cp_comm_type)",
        ),
        _gap("sft"),
        _gap("variable_seq_lengths"),
        _gap("window_size"),
        _gap("dynamic_context_parallel"),
        _gap("experimental_attention_variant"),
        _gap("hybrid_layer_pattern"),
        _gap("hybrid_override_pattern"),
        _gap("heterogeneous_layers_config_path"),
        _gap("use_legacy_models"),
    ),
    more_gaps=_unknown,
)
