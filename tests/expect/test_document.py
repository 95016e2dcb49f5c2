"""The document's rules: what they are made of, section B of the errata, and properties over random jobs.

The single claims of the document are in test_claims.py.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from traceanalyzer import axes, expect, traffic
from traceanalyzer.axes import DOCUMENT_ORDER
from traceanalyzer.errors import JobError
from traceanalyzer.expect import document, parameters, totals, versions
from traceanalyzer.expect.model import PHASES, ExpectedCall, RuleSet
from traceanalyzer.expect.place import COMMON, Place
from traceanalyzer.expect.rules import DTYPES
from traceanalyzer.job import Job

RULES = [(chapter, rule) for chapter in document.CHAPTERS for rule in chapter.rules]
MIB = 1 << 20
Make = Callable[..., Job]

# Chapter 6: every dimension, in the document's own grid.
TOGETHER: dict[str, Any] = {
    "world_size": 1024,
    "grid": "product",
    "order": DOCUMENT_ORDER,
    "context_parallel_size": 2,
    "pipeline_model_parallel_size": 4,
    "expert_model_parallel_size": 8,
    "expert_tensor_parallel_size": 1,
    "num_experts": 64,
    "moe_router_topk": 2,
    "moe_layer_freq": 4,
    "moe_token_dispatcher_type": "alltoall",
    "cp_comm_type": ("a2a",),
}


def calls(job: Job, rank: int = 0, rules: RuleSet = "document", **wanted: str) -> list[ExpectedCall]:
    """Calls whose fields have these values."""
    return [
        row
        for row in expect.expected(job, rank, rules=rules).calls
        if all(getattr(row, name) == value for name, value in wanted.items())
    ]


def listed(job: Job, rank: int = 0) -> list[tuple[str, str, str, int]]:
    return [(row.phase, row.component, row.op, row.calls) for row in calls(job, rank)]


# -- the tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chapter", "rule"), RULES, ids=[f"{n}-{rule.name}" for n, (_, rule) in enumerate(RULES)])
def test_every_rule_speaks_of_known_things(chapter: Any, rule: Any) -> None:
    assert rule.name.startswith(f"{chapter.name}: ")
    assert rule.role in axes.ROLES
    assert rule.op in traffic.OPS
    assert rule.phase in PHASES
    assert rule.dtype in DTYPES
    assert rule.evidence.kind == "document"
    of_members = {"types": {"comm", "layers_of_type"}}.get(rule.each, {"n", "many"} if rule.each else set())
    known = {*COMMON, *chapter.symbols, *(field.name for field in fields(Job)), *of_members, "ceil"}
    assert not {name for formula in rule.formulas for name in formula.names} - known


def test_tables_are_complete() -> None:
    assert [chapter.name.removeprefix("document ") for chapter in document.CHAPTERS] == [
        "tensor",
        "pipeline",
        "context",
        "expert",
        "data",
    ]
    for chapter in document.CHAPTERS:
        assert set(chapter.family_words) == set(chapter.families)
    assert not {chapter.name for chapter in document.CHAPTERS} & {chapter.name for chapter in expect.CHAPTERS}


def test_evidence_names_claims_that_exist(claims: list[dict[str, str]]) -> None:
    known = {claim["id"] for claim in claims}
    named = {name for _, rule in RULES for name in re.findall(r"S\d[\d.]*-\d+", rule.evidence.where)}
    assert len(named) > 20
    assert named <= known


# -- single dimensions ---------------------------------------------------------------------------------------------------


def test_backward_mirrors_the_forward_pass(document_job: Make) -> None:
    assert listed(document_job(num_layers=1)) == [
        ("forward", "attention.qkv", "all_gather", 1),
        ("forward", "attention.proj", "reduce_scatter", 1),
        ("forward", "mlp.fc1", "all_gather", 1),
        ("forward", "mlp.fc2", "reduce_scatter", 1),
        ("backward", "mlp.fc2", "all_gather", 1),
        ("backward", "mlp.fc1", "reduce_scatter", 1),
        ("backward", "attention.proj", "all_gather", 1),
        ("backward", "attention.qkv", "reduce_scatter", 1),
    ]


def test_without_sequence_parallelism(document_job: Make) -> None:
    """E6: two all-reduces per layer and direction, no all-gather."""
    assert listed(document_job(num_layers=1, sequence_parallel=False)) == [
        ("forward", "attention.proj", "all_reduce", 1),
        ("forward", "mlp.fc2", "all_reduce", 1),
        ("backward", "mlp.fc1", "all_reduce", 1),
        ("backward", "attention.qkv", "all_reduce", 1),
    ]


def test_one_rank_sends_nothing(document_job: Make) -> None:
    assert listed(document_job(world_size=1, tensor_model_parallel_size=1)) == []


def test_a_forward_pass_alone(document_job: Make) -> None:
    assert {row.phase for row in calls(document_job(forward_only=True, **TOGETHER))} == {"forward"}


@pytest.mark.parametrize(
    ("stage", "sends", "receives"),
    [(0, {"next": 8}, {"next": 8}), (1, {"next": 8, "previous": 8}, {"next": 8, "previous": 8})],
)
def test_messages_of_a_stage(document_job: Make, stage: int, sends: dict[str, int], receives: dict[str, int]) -> None:
    """E9: stage 0 sends activations and receives gradients, a middle stage has both neighbours."""
    job = document_job(world_size=16, pipeline_model_parallel_size=4, num_microbatches=8)
    rank = job.layout.rank_of(pp=stage)
    assert {row.peer: row.calls for row in calls(job, rank, op="send")} == sends
    assert {row.peer: row.calls for row in calls(job, rank, op="recv")} == receives


def test_interleaved_messages(document_job: Make) -> None:
    """E10: of the same size; PP*v-1 = 7 boundaries instead of 3, the ends too have two neighbours."""

    def sent(job: Job) -> list[int]:
        ranks = [job.layout.rank_of(pp=stage) for stage in range(4)]
        return [sum(row.calls for row in calls(job, rank, op="send", phase="forward")) for rank in ranks]

    job = document_job(world_size=16, pipeline_model_parallel_size=4, num_microbatches=8)
    interleaved = document_job(
        world_size=16, pipeline_model_parallel_size=4, num_microbatches=8, virtual_pipeline_model_parallel_size=2
    )
    assert sent(job) == [8, 8, 8, 0]
    assert sent(interleaved) == [16, 16, 16, 8]
    assert {row.payload_bytes for row in calls(interleaved, role="pp")} == {64 * MIB}


def test_ring_of_four(document_job: Make) -> None:
    """E15: three rounds of 128 MiB; K and V to the next rank, their gradients to the previous one."""
    job = document_job(
        world_size=4, tensor_model_parallel_size=1, context_parallel_size=4, num_layers=1, cp_comm_type=("p2p",)
    )
    rows = calls(job, role="cp")
    assert [(r.phase, r.op, r.peer, r.calls, r.payload_bytes) for r in rows] == [
        ("forward", "send", "next", 3, 128 * MIB),
        ("forward", "recv", "previous", 3, 128 * MIB),
        ("backward", "send", "previous", 3, 128 * MIB),
        ("backward", "recv", "next", 3, 128 * MIB),
    ]


def test_types_of_attention_may_differ_by_layer(document_job: Make) -> None:
    job = document_job(
        world_size=2,
        tensor_model_parallel_size=1,
        context_parallel_size=2,
        num_layers=3,
        cp_comm_type=("a2a", "p2p", "a2a"),
    )
    found = {row.component: row.calls for row in calls(job, role="cp", phase="forward")}
    assert found == {"attention: K and V": 1, **{f"attention: {part}": 2 for part in "QKVO"}}


def test_grouped_queries_are_unknown_to_it(document_job: Make) -> None:
    """E34: keys and values are as wide as queries."""
    options: dict[str, Any] = {
        "world_size": 8,
        "context_parallel_size": 2,
        "num_layers": 1,
        "cp_comm_type": ("all_gather",),
        "group_query_attention": True,
        "num_query_groups": 8,
    }
    job = document_job(**options)
    (of_document,) = calls(job, component="attention: K", phase="forward")
    (real,) = calls(job, rules="megatron", component="attention: K", phase="forward")
    assert of_document.in_elems == 8 * real.in_elems


def test_exchange_on_two_levels_has_no_rule(document_job: Make) -> None:
    job = document_job(
        world_size=16,
        context_parallel_size=4,
        cp_comm_type=("a2a+p2p",),
        hierarchical_context_parallel_sizes=(2, 2),
    )
    found = expect.expected(job, 0, rules="document")
    assert [(gap.what, gap.roles) for gap in found.not_modelled] == [
        ("a2a+p2p: the document has no such variant", ("cp", "cp_l0", "cp_l1"))
    ]
    assert not [row for row in found.calls if axes.rollup(row.role) == "CP"]


def test_sizes_of_experts_depend_on_the_routing(document_job: Make) -> None:
    """Own rows are exact; what arrives is what balanced routing gives, as in the rules of real Megatron."""
    job = document_job(**TOGETHER)
    rows = calls(job, role="ep", op="all_to_all")
    real = calls(job, rules="megatron", role="ep", op="all_to_all")
    real = [row for row in real if "probabilities" not in row.component]
    assert [(r.component, r.phase, r.varies) for r in rows] == [(r.component, r.phase, r.varies) for r in real]
    assert all(row.varies for row in rows)


@pytest.mark.parametrize(
    ("options", "stage"),
    [
        ({}, 0),
        ({"use_distributed_optimizer": True}, 1),
        ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "no_shard"}, 0),
        ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim"}, 1),
        ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"}, 2),
        ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}, 3),
        ({"use_torch_fsdp2": True}, 3),
    ],
)
def test_zero_stage(document_job: Make, options: dict[str, Any], stage: int) -> None:
    """Calls a step of 2 layers and what is outside them, 3 micro-batches, 4 ranks: E12."""
    job = document_job(
        world_size=4,
        tensor_model_parallel_size=1,
        num_layers=2,
        num_microbatches=3,
        untie_embeddings_and_output_weights=True,
        **options,
    )
    assert document.zero_stage(Place(job, 0, (0, 16))) == stage
    found = Counter[str]()
    for row in calls(job, role="dp_cp"):
        found[row.op] += row.calls
    assert (
        found
        == [
            {"all_reduce": 1},
            {"reduce_scatter": 1, "all_gather": 1},
            {"reduce_scatter": 1, "all_gather": 1},
            {"reduce_scatter": 9, "all_gather": 18},
        ][stage]
    )


def test_zero_bytes(document_job: Make) -> None:
    """E25: reduce-scatter and all-gather 2 Psi each in full, 1.5 Psi off rank at DP 4; all-reduce 3; ZeRO-3 4.5."""

    def off_rank(**options: Any) -> Fraction:
        job = document_job(world_size=4, tensor_model_parallel_size=1, num_layers=2, **options)
        psi = parameters.dense(job, 0).value
        return sum((row.off_rank_bytes * row.calls for row in calls(job, role="dp_cp")), Fraction(0)) / psi

    sharded = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
    assert off_rank() == 3
    assert off_rank(use_distributed_optimizer=True) == 3
    assert off_rank(**sharded) == Fraction(9, 2)
    assert off_rank(**sharded, num_microbatches=8) == 36


def test_dense_and_expert_replicas(document_job: Make) -> None:
    """E4, E21: dense parameters over DP*EP*CP = 64 ranks, experts over DP*CP*TP = 32; in Megatron's grid the same."""
    for grid in ({}, {"grid": "megatron", "order": axes.DEFAULT_ORDER}):
        job = document_job(**{**TOGETHER, **grid})
        sizes = {row.role: (row.group_size, row.in_elems) for row in calls(job, phase="other") if row.role != "ep"}
        assert set(sizes) == {"dp_cp", "edp"}
        assert (sizes["dp_cp"][0], sizes["edp"]) == (64, (32, 32_212_254_720))
        # 4.36e9: attention and dense MLP of the stage over TP; norms, routers and, on stage 0, the embedding besides
        matrices = (20 * 4 + 15 * 12) * 8192**2 // 4
        assert sizes["dp_cp"][1] == matrices + 40 * 8192 + 5 * 64 * 8192 + 32000 // 4 * 8192


def test_shards_of_dense_and_expert_parameters(document_job: Make) -> None:
    """ZeRO-1: 1/64 of the dense parameters of a middle stage and 1/32 of its experts'; ZeRO-3: layer by layer the same."""
    dense, experts = (20 * 4 + 15 * 12) * 8192**2 // 4 + 40 * 8192 + 5 * 64 * 8192, 5 * 8 * 12 * 8192**2
    expected = {"dp_cp": (dense, dense // 64), "edp": (experts, experts // 32)}
    once = document_job(**TOGETHER, use_distributed_optimizer=True)
    rank = once.layout.rank_of(pp=1)
    for role, (whole, shard) in expected.items():
        rows = calls(once, rank, role=role)
        assert [(row.op, row.in_elems, row.out_elems) for row in rows] == [
            ("reduce_scatter", whole, shard),
            ("all_gather", shard, whole),
        ]
    strategy = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
    each = document_job(**TOGETHER, **strategy, num_microbatches=3)
    for role, (whole, shard) in expected.items():
        for phase in ("forward", "backward"):
            rows = calls(each, rank, role=role, op="all_gather", phase=phase)
            assert sum(row.in_elems * row.calls for row in rows) == 3 * shard
            assert sum(row.out_elems * row.calls for row in rows) == 3 * whole
            assert sorted(row.calls for row in rows) == ([15, 45] if role == "dp_cp" else [15])


def test_gradients_that_do_not_divide_are_padded(document_job: Make) -> None:
    job = document_job(world_size=7, tensor_model_parallel_size=1, num_layers=1, use_distributed_optimizer=True)
    psi = parameters.dense(job, 0).value
    missing = 7 - psi % 7
    assert missing < 7
    sizes = {(row.op, row.in_elems, row.out_elems) for row in calls(job, role="dp_cp")}
    whole, shard = psi + missing, (psi + missing) // 7
    assert sizes == {("reduce_scatter", whole, shard), ("all_gather", shard, whole)}


@pytest.mark.parametrize(
    ("options", "phases"),
    [
        ({}, ["other", "optimizer"]),
        ({"overlap_grad_reduce": True}, ["backward", "optimizer"]),
        ({"overlap_grad_reduce": True, "overlap_param_gather": True}, ["backward", "forward"]),
    ],
)
def test_overlapped_calls_are_in_another_phase(document_job: Make, options: dict[str, Any], phases: list[str]) -> None:
    job = document_job(world_size=2, tensor_model_parallel_size=1, use_distributed_optimizer=True, **options)
    assert [row.phase for row in calls(job, role="dp_cp")] == phases


def test_parameters_that_cannot_be_counted(document_job: Make) -> None:
    job = document_job(world_size=8, padded_vocab_size=None)
    found = expect.expected(job, 0, rules="document")
    assert [(gap.what, gap.roles) for gap in found.not_modelled] == [("padded_vocab_size is unknown", ("dp_cp", "edp"))]
    assert {row.role for row in found.calls} == {"tp"}


def test_sizes_must_be_known(document_job: Make) -> None:
    with pytest.raises(JobError, match="hidden_size"):
        expect.expected(document_job(hidden_size=None), 0, rules="document")


def test_releases_make_no_difference(document_job: Make) -> None:
    job = document_job(megatron_core_version=None, **TOGETHER)
    assert [variant.releases for variant in expect.expectations(job, 0, "document")] == ["all"]


def test_calls_that_it_does_not_know(tiny: Make) -> None:
    """E34: embedding, loss, output layer, norm gradients, gradient norm, tied embedding, repeated gathers."""
    job = tiny(world_size=8, pipeline_model_parallel_size=2, num_layers=4, framework="megatron-lm")
    components = {row.component for rank in (0, 7) for row in calls(job, rank)}
    assert components == {
        *("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2", "activations", "gradients"),
    }


# -- section B of the errata ---------------------------------------------------------------------------------------------

TP_ALONE: dict[str, Any] = {"world_size": 4}
CP_ALONE: dict[str, Any] = {"world_size": 2, "tensor_model_parallel_size": 1, "context_parallel_size": 2}
COMBINED: dict[str, Any] = {"world_size": 8, "context_parallel_size": 2}
EXPERTS: dict[str, Any] = {
    "expert_model_parallel_size": 8,
    "expert_tensor_parallel_size": 1,
    "num_experts": 64,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
}

# Record, phase, component prefix, full and off-rank MiB of its calls of one layer and micro-batch by setting; every call
# by itself, or their sum.
SECTION_B: list[tuple[dict[str, Any], dict[str, Any], str, tuple[str, ...], bool, int, int]] = [
    (TP_ALONE, {}, "tp", ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2"), False, 256, 192),
    (COMBINED, {}, "tp", ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2"), False, 128, 96),
    (TP_ALONE, {"pp": 4}, "pp", ("activations",), False, 64, 64),
    (CP_ALONE, {"pp": 4}, "pp", ("activations",), False, 128, 128),
    (COMBINED, {"pp": 4}, "pp", ("activations",), False, 32, 32),
    (CP_ALONE, {"comm": "p2p"}, "cp", ("attention: K and V",), False, 256, 256),
    (COMBINED, {"comm": "p2p"}, "cp", ("attention: K and V",), False, 64, 64),
    (CP_ALONE, {"comm": "all_gather"}, "cp", ("attention: K", "attention: V"), True, 512, 256),
    (COMBINED, {"comm": "all_gather"}, "cp", ("attention: K", "attention: V"), True, 128, 64),
    (CP_ALONE, {"comm": "a2a"}, "cp", tuple(f"attention: {part}" for part in "QKVO"), False, 128, 64),
    (COMBINED, {"comm": "a2a"}, "cp", tuple(f"attention: {part}" for part in "QKVO"), False, 32, 16),
    (CP_ALONE, {"comm": "a2a"}, "cp", tuple(f"attention: {part}" for part in "QKVO"), True, 512, 256),
    (COMBINED, {"comm": "a2a"}, "cp", tuple(f"attention: {part}" for part in "QKVO"), True, 128, 64),
    (TP_ALONE, {"ep": 8}, "ep", ("experts.dispatch", "experts.combine"), False, 128, 112),
    (CP_ALONE, {"ep": 8}, "ep", ("experts.dispatch", "experts.combine"), False, 256, 224),
    (COMBINED, {"ep": 8}, "ep", ("experts.dispatch", "experts.combine"), False, 64, 56),
]


def _setting(make: Make, sizes: dict[str, Any], more: dict[str, Any], rules: RuleSet) -> Job:
    """One dimension or two with one more, one layer a stage: in the document's grid, or in Megatron's for its own rules."""
    options = {**sizes, "num_layers": 1}
    if "pp" in more:
        options |= {"pipeline_model_parallel_size": 4, "num_layers": 4}
        options["world_size"] *= 4
    if "ep" in more:
        options |= EXPERTS
        options["world_size"] *= 8
    if "comm" in more:
        options["cp_comm_type"] = (more["comm"],)
    if rules == "document":
        options |= {"grid": "product", "order": DOCUMENT_ORDER}
    return make(**options)


@pytest.mark.parametrize("rules", ["document", "megatron"])
@pytest.mark.parametrize(
    ("sizes", "more", "role", "components", "summed", "full", "off_rank"),
    SECTION_B,
    ids=[f"{n}-{row[2]}" for n, row in enumerate(SECTION_B)],
)
def test_section_b(
    document_job: Make,
    rules: RuleSet,
    sizes: dict[str, Any],
    more: dict[str, Any],
    role: str,
    components: tuple[str, ...],
    summed: bool,
    full: int,
    off_rank: int,
) -> None:
    """The adopted table, in both rule sets: the forward calls that the document has are real Megatron's."""
    job = _setting(document_job, sizes, more, rules)
    rows = [
        row
        for row in calls(job, rules=rules, role=role, phase="forward")
        if row.component in components and row.op != "recv"
    ]
    assert [(row.component, row.calls) for row in rows] == [(component, 1) for component in components]
    if summed:
        found = {(sum(row.payload_bytes for row in rows), sum(row.off_rank_bytes for row in rows))}
    else:
        found = {(row.payload_bytes, row.off_rank_bytes) for row in rows}
    assert found == {(full * MIB, off_rank * MIB)}


@pytest.mark.parametrize("rules", ["document", "megatron"])
def test_section_b_ring_in_full(document_job: Make, rules: RuleSet) -> None:
    """All rounds of the ring, forward: the own block too is 512 and 128 MiB, as all-gather has it."""
    for sizes, full, off_rank in ((CP_ALONE, 512, 256), (COMBINED, 128, 64)):
        job = _setting(document_job, sizes, {"comm": "p2p"}, rules)
        (row,) = calls(job, rules=rules, component="attention: K and V", op="send", phase="forward")
        assert row.off_rank_bytes * row.calls == off_rank * MIB
        assert row.payload_bytes * (row.calls + 1) == full * MIB


def _per_layer(job: Job, rank: int, rules: RuleSet, phase: str) -> list[int | Fraction]:
    """Off-rank MiB of a dense layer, of a layer with experts, and of the stage, messages between stages left out."""
    dense, moe, stage = Fraction(0), Fraction(0), Fraction(0)
    real_only = ("experts.dispatch probabilities", "experts.counts")
    for row in calls(job, rank, rules, phase=phase):
        if row.role not in ("tp", "cp", "ep") or row.op == "all_reduce" or row.component in real_only:
            continue
        in_all, in_moe = row.calls == 20, row.calls == 5
        assert in_all or in_moe or row.calls == 15
        dense += 0 if in_moe else row.off_rank_bytes
        moe += row.off_rank_bytes if in_all or in_moe else 0
        stage += row.off_rank_bytes * row.calls
    return [dense / MIB, moe / MIB, stage / MIB]


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_section_b_layers_and_stage(document_job: Make, phase: str) -> None:
    """448, 368 and 8560 MiB per layer and stage of 15 dense layers and 5 with experts; backward equals forward."""
    job = document_job(**TOGETHER)
    for stage in range(4):
        assert _per_layer(job, job.layout.rank_of(pp=stage), "document", phase) == [448, 368, 8560]


def test_section_b_layers_and_stage_of_real_megatron(document_job: Make) -> None:
    """The same calls forward; on a middle stage, without embedding and output layer."""
    job = document_job(**{**TOGETHER, "grid": "megatron", "order": axes.DEFAULT_ORDER})
    assert _per_layer(job, job.layout.rank_of(pp=1), "megatron", "forward") == [448, 368, 8560]


def test_off_rank_on_the_printed_tensors(document_job: Make) -> None:
    """E26: uniformly off rank, the rows that chapter 6 lists on tensors of 2048 tokens are 208 and 272 MiB a direction."""
    job = document_job(**TOGETHER, seq_length=4096)
    rows = {row.component: row.off_rank_bytes for row in calls(job, phase="forward")}
    exchanges = sum(row.off_rank_bytes for row in calls(document_job(**TOGETHER), phase="forward", role="cp"))
    tokens = sum(row.off_rank_bytes for row in calls(document_job(**TOGETHER), phase="forward", role="ep"))
    listed_rows = rows["attention.qkv"] + rows["attention.proj"]
    assert (listed_rows + rows["mlp.fc2"] + exchanges) / MIB == 208
    assert (listed_rows + exchanges + tokens) / MIB == 272


# -- random jobs ---------------------------------------------------------------------------------------------------------

SMALL = st.sampled_from((1, 2, 4))


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Small models on every combination of axes, in either grid."""
    tp, cp, pp, ep, dp = (draw(SMALL) for _ in range(5))
    product = draw(st.booleans())
    vpp = draw(st.sampled_from((None, 2))) if pp > 1 else None
    etp = draw(st.sampled_from((1, tp)))
    forward_only = draw(st.booleans())
    # Megatron trains experts under tensor parallelism with sequence parallelism only.
    sequence_parallel = draw(st.booleans()) or not (product or forward_only)
    world = tp * cp * pp * dp * (ep if product else 1)
    assume(product or world % (etp * ep * pp) == 0)
    return Job(
        megatron_core_version="0.16.1",
        world_size=world,
        grid="product" if product else "megatron",
        order=DOCUMENT_ORDER if product else axes.DEFAULT_ORDER,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        sequence_parallel=sequence_parallel,
        micro_batch_size=draw(st.integers(1, 3)),
        num_microbatches=4 * draw(st.integers(1, 3)),
        seq_length=64,
        num_layers=8,
        hidden_size=64,
        num_attention_heads=16,
        num_experts=8,
        moe_router_topk=draw(st.integers(1, 4)),
        moe_layer_freq=draw(st.sampled_from((1, 2))),
        moe_token_dispatcher_type="alltoall",
        padded_vocab_size=128,
        add_bias_linear=False,
        swiglu=True,
        bf16=True,
        cp_comm_type=(draw(st.sampled_from(("p2p", "all_gather", "a2a"))),),
        use_distributed_optimizer=draw(st.booleans()),
        forward_only=forward_only,
    )


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_what_is_sent_is_received(job: Job) -> None:
    """Between stages: what one sends to the next, the next receives from its previous one; in a ring: on every rank."""
    stages = job.pipeline_model_parallel_size
    rows = [calls(job, job.layout.rank_of(pp=stage)) for stage in range(stages)]

    def messages(stage: int, op: str, peer: str, role: str) -> Counter[tuple[str, str, int]]:
        found: Counter[tuple[str, str, int]] = Counter()
        for row in rows[stage]:
            if (row.op, row.peer, row.role) == (op, peer, role):
                found[row.phase, row.component, row.payload_bytes] += row.calls
        return found

    for stage in range(stages):
        after = (stage + 1) % stages
        assert messages(stage, "send", "next", "pp") == messages(after, "recv", "previous", "pp")
        assert messages(after, "send", "previous", "pp") == messages(stage, "recv", "next", "pp")
        assert messages(stage, "send", "next", "cp") == messages(stage, "recv", "previous", "cp")
        assert messages(stage, "send", "previous", "cp") == messages(stage, "recv", "next", "cp")


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_sums_agree(job: Job) -> None:
    """Over components, roles, phases and axes the same is added up; receives stand beside it."""
    for stage in range(job.pipeline_model_parallel_size):
        rows = [(row, 1) for row in calls(job, job.layout.rank_of(pp=stage))]
        whole = totals.total(rows)
        for by in totals.KEYS:
            parts = totals.totals(rows, by).values()
            assert sum(part.calls for part in parts) == whole.calls
            assert sum(part.off_rank_bytes for part in parts) == whole.off_rank_bytes
            assert sum(part.payload_bytes for part in parts) == whole.payload_bytes
        assert whole.off_rank_bytes == sum(row.off_rank_bytes * row.calls for row, _ in rows if row.op != "recv")


@settings(max_examples=40, deadline=None)
@given(jobs())
def test_backward_moves_what_forward_does(job: Job) -> None:
    """For every job and axis but the data-parallel one, over all stages."""
    assume(not job.forward_only)
    moved: defaultdict[tuple[str, str], Fraction] = defaultdict(Fraction)
    for stage in range(job.pipeline_model_parallel_size):
        for row in calls(job, job.layout.rank_of(pp=stage)):
            if row.op != "recv":
                moved[row.role, row.phase] += row.off_rank_bytes * row.calls
    for role in ("tp", "cp", "ep", "pp"):
        assert moved[role, "forward"] == moved[role, "backward"]


@settings(max_examples=30, deadline=None)
@given(jobs(), st.sampled_from(versions.KNOWN))
def test_only_the_job_counts(job: Job, release: versions.Release) -> None:
    """All ranks of a stage send the same, under every release."""
    for stage in range(job.pipeline_model_parallel_size):
        place = Place(job, stage, release)
        found = [row for chapter in document.CHAPTERS for row in chapter.calls(place)]
        last = max(rank for rank in range(job.layout.world_size) if job.layout.stage(rank) == stage)
        assert found == calls(job, last)
