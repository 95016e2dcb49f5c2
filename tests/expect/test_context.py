"""Context parallelism: every recording of it, runs of real code with other options, closed forms, and each switch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from traceanalyzer import axes, expect, traffic
from traceanalyzer.errors import JobError
from traceanalyzer.expect import context, versions
from traceanalyzer.expect.model import ExpectedCall
from traceanalyzer.expect.place import Place
from traceanalyzer.job import Job

ROLES = ("cp", "cp_l0", "cp_l1")
MIB = 1 << 20

# Recorded with an attention of our own (README: cpattn.py): its calls are no model of TransformerEngine's.
STAND_INS = {"cp2_ours", "world16_tp2pp2cp2ep2dp2"}

_PHASE = {"forward/other": "forward", "backward": "backward", "recompute": "recompute"}

Key = tuple[str, str, str, int, int, str]


def _recorded(recording: Any, rank: int) -> Counter[Key]:
    found: Counter[Key] = Counter()
    for row in recording.rows:
        role = axes.role_of_description(row["group_desc"])
        if int(row["rank"]) != rank or role not in ROLES or "cpattn.py" in row["callsite"]:
            continue
        op = traffic.normalise_op(row["op"])
        assert op is not None
        sent, received = int(row["nelems_in"]), int(row["nelems_out"])
        if op in ("send", "recv"):  # the recorder leaves the other side at 0
            sent = received = max(sent, received)
        found[role, op, row["dtype"], sent, received, _PHASE[row["direction"]]] += int(row["count"])
    return found


def _calls(job: Job, rank: int = 0) -> list[ExpectedCall]:
    return [row for row in expect.expected(job, rank).calls if row.rule.startswith("context: ")]


def _counts(job: Job, rank: int = 0) -> Counter[Key]:
    found: Counter[Key] = Counter()
    for row in _calls(job, rank):
        found[row.role, row.op, row.dtype, row.in_elems, row.out_elems, row.phase] += row.calls
    return found


def test_recordings(recording: Any) -> None:
    for rank in recording.ranks:
        recorded = _recorded(recording, rank)
        if recording.name in STAND_INS:
            assert not recorded
        else:
            assert recorded == _counts(recording.job, rank)


def test_the_recordings_cover_three_types(recording: Any) -> None:
    if "_te_" in recording.name:
        assert _recorded(recording, recording.ranks[0])


# -- runs ------------------------------------------------------------------------------------------------------------


def _job(cp: int = 2, **options: Any) -> Job:
    """Hidden 64, 4 layers, 4 heads in 2 groups of 16 channels, sequence 32, micro-batch 2, 4 micro-batches."""
    fields: dict[str, Any] = {
        "megatron_core_version": "0.16.1",
        "world_size": cp * options.get("tensor_model_parallel_size", 1),
        "context_parallel_size": cp,
        "micro_batch_size": 2,
        "num_microbatches": 4,
        "seq_length": 32,
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 256,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "padded_vocab_size": 256,
        "bf16": True,
    }
    return Job(**{**fields, **options})


def _pairs(role: str, elements: int, phase: str, calls: int) -> Counter[Key]:
    """Sends and receives of one size."""
    return Counter({(role, op, "bfloat16", elements, elements, phase): calls for op in ("send", "recv")})


def _same(role: str, op: str, sizes: dict[tuple[int, int], int], phase: str, dtype: str = "bfloat16") -> Counter[Key]:
    return Counter({(role, op, dtype, sent, received, phase): calls for (sent, received), calls in sizes.items()})


_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_CORE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}

# Each of the following is what real code sent: TransformerEngine 2.20.2's Python with megatron-core 0.16.1 unless said.


def test_ring_of_four_recomputed() -> None:
    """--cp 4 --recompute full."""
    assert _counts(_job(4, **_FULL)) == (
        _pairs("cp", 1024, "forward", 48)
        + _pairs("cp", 1024, "recompute", 48)
        + _pairs("cp", 1024, "backward", 32)
        + _pairs("cp", 2048, "backward", 32)
    )


def test_ring_under_an_older_release() -> None:
    """--cp 2 --recompute full, megatron-core 0.12.3."""
    assert _counts(_job(2, megatron_core_version="0.12.3", **_FULL)) == (
        _pairs("cp", 2048, "forward", 16) + _pairs("cp", 2048, "recompute", 16) + _pairs("cp", 2048, "backward", 32)
    )


def test_ring_with_fewer_groups_than_tensor_ranks() -> None:
    """--tp 4 --sp --cp 2 --heads 8 --gqa 2: one group of 8 channels a rank."""
    job = _job(2, tensor_model_parallel_size=4, sequence_parallel=True, num_attention_heads=8)
    assert _counts(job) == _pairs("cp", 512, "forward", 16) + _pairs("cp", 512, "backward", 32)


@pytest.mark.parametrize(("recompute", "again"), [(_FULL, 20), ({**_FULL, "recompute_method": "block"}, 4), ({}, 0)])
def test_ring_of_a_predicted_layer(recompute: dict[str, Any], again: int) -> None:
    """--cp 2 mtp_num_layers=1, uniform: five attentions; block recomputes decoder layers only (source)."""
    expected = _pairs("cp", 2048, "forward", 20) + _pairs("cp", 2048, "backward", 40)
    assert _counts(_job(2, mtp_num_layers=1, **recompute)) == expected + (
        _pairs("cp", 2048, "recompute", again) if again else Counter()
    )


def test_predicted_layer_is_recomputed_since_014() -> None:
    old = _counts(_job(2, mtp_num_layers=1, megatron_core_version="0.13.1", **_FULL))
    assert old["cp", "send", "bfloat16", 2048, 2048, "recompute"] == 16


def test_all_to_all_with_recomputed_core() -> None:
    """--cp 2 a2a, selective recompute of core_attn."""
    sizes = {(1024, 1024): 32, (2048, 2048): 32}
    assert _counts(_job(2, cp_comm_type=("a2a",), **_CORE)) == sum(
        (_same("cp", "all_to_all", sizes, phase) for phase in ("forward", "recompute", "backward")), Counter()
    )


def test_gathers_with_one_recomputed_layer() -> None:
    """--cp 2 all_gather, recompute full block of 1 layer."""
    options = {**_FULL, "recompute_method": "block"}
    assert _counts(_job(2, cp_comm_type=("all_gather",), **options)) == (
        _same("cp", "all_gather", {(1024, 2048): 32}, "forward")
        + _same("cp", "all_gather", {(1024, 2048): 8}, "recompute")
        + _same("cp", "all_gather", {(1024, 2048): 32}, "backward")
        + _same("cp", "reduce_scatter", {(2048, 1024): 32}, "backward")
    )


def _two_levels(**options: Any) -> Job:
    return _job(
        8,
        cp_comm_type=("a2a+p2p",),
        hierarchical_context_parallel_sizes=(2, 4),
        num_attention_heads=8,
        num_query_groups=4,
        seq_length=64,
        **options,
    )


def test_two_levels() -> None:
    """--cp 8 --heads 8 --gqa 4 --seq 64 a2a+p2p over 2 x 4, selective recompute of core_attn; ranks 0 and 5."""
    sizes = {(1024, 1024): 32, (512, 512): 32}
    job = _two_levels(transformer_engine_version="2.20.2", **_CORE)
    expected = sum(
        (_same("cp_l0", "all_to_all", sizes, phase) for phase in ("forward", "recompute", "backward")), Counter[Key]()
    )
    expected += _pairs("cp_l1", 1024, "forward", 48) + _pairs("cp_l1", 1024, "recompute", 48)
    expected += _pairs("cp_l1", 1024, "backward", 32) + _pairs("cp_l1", 2048, "backward", 32)
    assert _counts(job, 0) == _counts(job, 5) == expected


# -- closed forms ----------------------------------------------------------------------------------------------------


def _sent(job: Job, *phases: str) -> int:
    rows = [row for row in _calls(job) if row.op != "recv" and (not phases or row.phase in phases)]
    return int(sum(row.off_rank_bytes * row.calls for row in rows))


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a"])
def test_closed_forms(comm: str, cp: int) -> None:
    """Reference 2.11, with M = 4 micro-batches and n = 4 layers; K of 4 groups so that a2a divides them."""
    job = _job(cp, cp_comm_type=(comm,), num_query_groups=4)
    k = q = 32 // cp * 2 * 4 * 16 * 2
    forward, backward = {
        "p2p": (2 * (cp - 1) * k, 4 * (cp - 1) * k),
        "all_gather": (2 * (cp - 1) * k, 4 * (cp - 1) * k),
        "a2a": (2 * (q + k) * (cp - 1) // cp, 2 * (q + k) * (cp - 1) // cp),
    }[comm]
    assert _sent(job, "forward") == 16 * forward
    assert _sent(job, "backward") == 16 * backward
    again = _job(cp, cp_comm_type=(comm,), num_query_groups=4, **_CORE)
    assert _sent(again, "recompute") == 16 * forward


@pytest.mark.parametrize(("comm", "forward", "backward"), [("p2p", 64, 128), ("all_gather", 64, 128), ("a2a", 64, 64)])
def test_the_document_s_sizes(document_job: Callable[..., Job], comm: str, forward: int, backward: int) -> None:
    """Reference 4.2: MiB of one layer and micro-batch at S 8192, B 2, H 8192, TP 4, CP 2."""
    job = document_job(world_size=8, context_parallel_size=2, num_layers=1, cp_comm_type=(comm,), grid="megatron")
    assert (_sent(job, "forward") / MIB, _sent(job, "backward") / MIB) == (forward, backward)
    assert {row.payload_bytes // MIB for row in _calls(job)} == ({32} if comm == "a2a" else {64})


def test_grouped_queries_shrink_the_ring(document_job: Callable[..., Job]) -> None:
    """Reference 4.2: 8 groups make the ring's buffer 8 MiB instead of 64."""
    job = document_job(
        world_size=8, context_parallel_size=2, num_layers=1, group_query_attention=True, num_query_groups=8
    )
    assert {row.payload_bytes for row in _calls(job)} == {8 * MIB}


# -- peers and waste -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", [_job(4), _two_levels(transformer_engine_version="2.13")], ids=["cp", "l1"])
def test_what_is_sent_is_received(job: Job) -> None:
    opposite = {"next": "previous", "previous": "next"}
    sent: Counter[Any] = Counter()
    received: Counter[Any] = Counter()
    for row in _calls(job):
        if row.op == "send":
            sent[row.phase, row.in_elems, row.peer] += row.calls
        if row.op == "recv":
            received[row.phase, row.out_elems, opposite[row.peer]] += row.calls
    assert sent == received
    assert {(phase, peer) for phase, _, peer in sent} == {("forward", "next"), ("backward", "previous")}


@pytest.mark.parametrize(
    ("options", "setting"),
    [(_FULL, "recompute_granularity selective"), (_CORE, "core_attn out of recompute_modules")],
)
def test_recomputation_is_waste(options: dict[str, Any], setting: str) -> None:
    rows = _calls(_job(2, **options))
    wasted = {row.op: row.avoidable for row in rows if row.phase == "recompute"}
    assert wasted["recv"] is None
    assert wasted["send"] is not None
    assert (wasted["send"].bytes_per_call, wasted["send"].code) == (4096, "recompute_repeats_collectives")
    assert wasted["send"].setting == setting
    assert not any(row.avoidable for row in rows if row.phase != "recompute")


# -- switches --------------------------------------------------------------------------------------------------------


def test_nothing_without_context_parallelism(tiny: Callable[..., Job]) -> None:
    assert _calls(tiny()) == []
    assert context.CHAPTER.not_modelled(Place(tiny(sft=True), 0, (0, 16))) == []


def test_evaluation_has_the_forward_pass_only() -> None:
    assert _counts(_job(2, forward_only=True, **_FULL)) == _pairs("cp", 2048, "forward", 16)


def test_one_level_of_one_rank() -> None:
    """TransformerEngine falls back to the other type on the other level's group."""
    ring = _job(4, cp_comm_type=("a2a+p2p",), hierarchical_context_parallel_sizes=(1, 4))
    assert {row.role for row in _calls(ring)} == {"cp_l1"}
    assert _sent(ring) == _sent(_job(4))
    exchange = _job(2, cp_comm_type=("a2a+p2p",), hierarchical_context_parallel_sizes=(2, 1))
    assert {row.role for row in _calls(exchange)} == {"cp_l0"}
    assert _sent(exchange) == _sent(_job(2, cp_comm_type=("a2a",)))


def test_a_type_for_each_layer() -> None:
    types = ("p2p", "a2a", "a2a", "all_gather")
    job = _job(2, cp_comm_type=types, megatron_core_version="0.17.0", transformer_engine_version="2.14")
    forward = {(row.op, row.calls) for row in _calls(job) if row.phase == "forward"}
    # One ring of 4 micro-batches; two layers exchange Q, K, V, O; one gathers K and V.
    assert forward == {("send", 4), ("recv", 4), ("all_to_all", 8), ("all_gather", 4)}
    assert _gaps(job) == []
    assert _gaps(_job(2, cp_comm_type=types)) == ["a list of cp_comm_type before 0.17"]
    with_prediction = _job(2, cp_comm_type=("p2p",) * 4, megatron_core_version="0.17.0", mtp_num_layers=1)
    assert _gaps(with_prediction) == ["multi-token prediction with a list of cp_comm_type"]


def test_before_the_option_there_is_the_ring() -> None:
    job = _job(2, cp_comm_type=("a2a",), megatron_core_version="0.9.0")
    assert {row.op for row in _calls(job)} == {"send", "recv"}


@pytest.mark.parametrize(
    ("comm", "stated", "core", "backward", "unknown"),
    [
        ("a2a", "2.7.0", "0.16.1", 5, False),
        ("a2a", "2.8.0", "0.16.1", 4, False),
        ("a2a", None, "0.16.1", 4, False),  # accepts 2.9 to 2.11
        ("a2a", None, "0.14.0", 5, True),  # names 2.6 and 2.7, but nothing refuses a newer one
        ("a2a", None, "0.13.1", 4, True),
        ("a2a", None, "0.17.0", 4, True),
        ("a2a+p2p", "2.14.1", "0.17.0", 5, False),
        ("a2a+p2p", "2.15.0", "0.17.0", 4, False),
        ("a2a+p2p", None, "0.16.1", 5, True),
        ("a2a+p2p", None, "0.18.0", 4, True),
    ],
)
def test_output_exchanged_again(comm: str, stated: str | None, core: str, backward: int, unknown: bool) -> None:
    levels = (2, 2) if comm == "a2a+p2p" else ()
    job = _job(
        2 if comm == "a2a" else 4,
        num_layers=1,
        num_microbatches=1,
        cp_comm_type=(comm,),
        hierarchical_context_parallel_sizes=levels,
        megatron_core_version=core,
        transformer_engine_version=stated,
    )
    exchanges = [row.calls for row in _calls(job) if row.phase == "backward" and row.op == "all_to_all"]
    assert sum(exchanges) == backward
    assert _gaps(job) == ([f"{comm}: version of TransformerEngine unknown"] if unknown else [])


def test_supported_versions_of_transformer_engine() -> None:
    since = versions.transformer_engine_since
    assert since(None, (0, 15), "a2a keeps its output") is True
    assert since(None, (0, 14), "a2a+p2p keeps its output") is False
    assert since(None, (0, 19), "a2a keeps its output") is None
    assert since("2.17.1", (0, 14), "a2a+p2p keeps its output") is True


def test_latent_attention_sends_wide_keys_and_narrow_values() -> None:
    """4 heads of 24 + 8 = 32 channels in K and Q, 16 in V and O, on t = 16 * 2 tokens."""
    latent = {
        "multi_latent_attention": True,
        "group_query_attention": False,
        "qk_head_dim": 24,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 16,
    }
    ring = _job(2, **latent)
    assert {row.in_elems for row in _calls(ring)} == {32 * 4 * (32 + 16)}
    levels = _job(4, cp_comm_type=("a2a+p2p",), hierarchical_context_parallel_sizes=(2, 2), **latent)
    sizes = Counter({row.component.split()[-1]: row.in_elems for row in _calls(levels) if row.phase == "forward"})
    assert (sizes["Q"], sizes["V"], sizes["O"]) == (16 * 4 * 32, 16 * 4 * (32 + 16), 16 * 4 * 16)
    assert _gaps(ring) == []


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_ring_in_fp8(recipe: str) -> None:
    job = _job(4, fp8="hybrid", fp8_recipe=recipe, fp8_dot_product_attention=True, num_layers=1, num_microbatches=1)
    assert _counts(job) == Counter(
        {
            ("cp", "send", "uint8", 1024, 1024, "forward"): 3,
            ("cp", "recv", "uint8", 1024, 1024, "forward"): 3,
            ("cp", "send", "uint8", 1024, 1024, "backward"): 3,
            ("cp", "recv", "uint8", 1024, 1024, "backward"): 3,
            ("cp", "all_to_all", "uint8", 4096, 4096, "backward"): 1,
        }
    )


def test_exchange_in_fp8() -> None:
    """With delayed scaling everything is bytes; with current scaling what leaves a kernel is not."""
    options = {"fp8": "hybrid", "fp8_dot_product_attention": True, "num_layers": 1, "cp_comm_type": ("a2a",)}
    delayed = _calls(_job(2, fp8_recipe="delayed", **options))
    assert {row.dtype for row in delayed} == {"uint8"}
    current = {
        row.component.removeprefix("attention: "): row.dtype
        for row in _calls(_job(2, fp8_recipe="tensorwise", **options))
    }
    assert {part for part, dtype in current.items() if dtype == "uint8"} == {"Q", "K", "V", "dO"}
    assert {part for part, dtype in current.items() if dtype == "bfloat16"} == {"O", "dQ", "dK", "dV"}


def test_fp8_without_fp8_attention_changes_nothing() -> None:
    assert _counts(_job(2, fp8="hybrid")) == _counts(_job(2))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {("cp", "all_reduce", "bfloat16", 4, 4, "forward"): 16}),
        ({"cp_comm_type": ("all_gather",)}, {("cp", "all_reduce", "bfloat16", 4, 4, "forward"): 16}),
        ({"cp_comm_type": ("a2a",)}, {("cp", "all_gather", "bfloat16", 2, 4, "forward"): 16}),
    ],
)
def test_largest_logit(options: dict[str, Any], expected: dict[Key, int]) -> None:
    asked = _counts(_job(2, qk_clip=True, **options))
    assert asked - _counts(_job(2, **options)) == Counter(expected)
    before = {"megatron_core_version": "0.15.0", **options}
    assert _counts(_job(2, qk_clip=True, **before)) == _counts(_job(2, **before))


def test_largest_logit_over_two_levels() -> None:
    asked = _counts(_two_levels(extra={"log_max_attention_logit": True}))
    assert asked - _counts(_two_levels()) == Counter(
        {
            ("cp_l1", "all_reduce", "bfloat16", 4, 4, "forward"): 16,
            ("cp_l0", "all_gather", "bfloat16", 4, 8, "forward"): 16,
        }
    )


def test_softmax_offset() -> None:
    job = _job(2, cp_comm_type=("a2a",), extra={"softmax_type": "learnable"})
    assert _counts(job) - _counts(_job(2, cp_comm_type=("a2a",))) == Counter(
        {("cp", "all_gather", "float32", 2, 4, "backward"): 16}
    )


# -- gaps and refusals -----------------------------------------------------------------------------------------------


def _gaps(job: Job) -> list[str]:
    place = Place(job, 0, versions.parse(job.megatron_core_version or ""))
    return [gap.what for gap in context.CHAPTER.not_modelled(place)]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"sft": True}, "sft"),
        ({"variable_seq_lengths": True}, "variable_seq_lengths"),
        ({"extra": {"window_size": (128, 0)}}, "window_size"),
        ({"extra": {"dynamic_context_parallel": True}}, "dynamic_context_parallel"),
        ({"extra": {"experimental_attention_variant": "dsa"}}, "experimental_attention_variant"),
        ({"extra": {"hybrid_override_pattern": "M*M*"}}, "hybrid_override_pattern"),
        ({"extra": {"use_legacy_models": True}}, "use_legacy_models"),
        (
            {"fp8": "hybrid", "fp8_recipe": "mxfp8", "fp8_dot_product_attention": True},
            "fp8_dot_product_attention with recipe mxfp8",
        ),
        (
            {"fp8": "hybrid", "fp8_dot_product_attention": True, "cp_comm_type": ("all_gather",)},
            "fp8_dot_product_attention with all_gather or a2a+p2p",
        ),
        (
            {
                "fp8": "hybrid",
                "fp8_recipe": "tensorwise",
                "fp8_dot_product_attention": True,
                "extra": {"first_last_layers_bf16": True},
            },
            "fp8_dot_product_attention with other layers or widths",
        ),
        (
            {
                "fp8": "hybrid",
                "fp8_dot_product_attention": True,
                "cp_comm_type": ("a2a",),
                "transformer_engine_version": "2.5",
            },
            "fp8_dot_product_attention with a2a: version of TransformerEngine unknown or old",
        ),
    ],
)
def test_gaps(options: dict[str, Any], what: str) -> None:
    assert _gaps(_job(2, **options)) == [what]


def test_hybrid_context_parallelism_is_not_modelled() -> None:
    job = _job(2, hybrid_context_parallel=True)
    assert "hybrid_context_parallel" in _gaps(job)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(JobError, match=r"a2a|query_groups|context_parallel"):
        _calls(_job(4, cp_comm_type=("a2a",)))  # 2 groups over 4 ranks


def test_levels_must_be_given() -> None:
    with pytest.raises(JobError, match=r"hierarchical_context_parallel_sizes"):
        _calls(_job(4, cp_comm_type=("a2a+p2p",)))
