"""The tensor-parallel chapter against recorded traffic of megatron-core, closed forms, and every flag."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from traceanalyzer import expect
from traceanalyzer.errors import JobError
from traceanalyzer.expect import shapes, tensor
from traceanalyzer.job import Job

MIB = 1 << 20

_OPS = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}


def _measured(recording: Any, rank: int) -> Counter[tuple[str, str, int, int, str]]:
    """Calls of one rank on its tensor-parallel group, keyed like the fixture ``counts``."""
    found: Counter[tuple[str, str, int, int, str]] = Counter()
    for row in recording.rows:
        if int(row["rank"]) != rank or row["group_desc"] != "TENSOR_MODEL_PARALLEL_GROUP":
            continue
        phase = row["direction"].replace("forward/other", "forward")
        if row["callsite"].split("/")[-1].startswith("finalize_model_grads.py"):
            phase = "other"
        op, dtype = str(row["op"]), str(row["dtype"])
        found[_OPS.get(op, op), dtype, int(row["nelems_in"]), int(row["nelems_out"]), str(phase)] += int(row["count"])
    return found


def test_recorded_traffic(recording: Any, counts: Callable[..., Any]) -> None:
    """Every configuration and rank: the same calls, types, sizes, phases and counts per step."""
    for rank in recording.ranks:
        assert counts(recording.job, rank) == _measured(recording, rank), f"rank {rank}"


# -- counts of the reference, section 2.10 ---------------------------------------------------------------------------

SHARD, WHOLE = 16 * 2 * 64, 32 * 2 * 64  # S/TP * B * H and S * B * H


def test_reference_counts_with_sequence_parallelism(tiny: Callable[..., Job], counts: Callable[..., Any]) -> None:
    assert counts(tiny()) == {
        ("all_gather", "bfloat16", SHARD, WHOLE, "forward"): 5,
        ("reduce_scatter", "bfloat16", WHOLE, SHARD, "forward"): 5,
        ("all_reduce", "float32", 64, 64, "forward"): 3,
        ("all_gather", "bfloat16", SHARD, WHOLE, "backward"): 10,
        ("reduce_scatter", "bfloat16", WHOLE, SHARD, "backward"): 5,
        ("all_reduce", "float32", 640, 640, "other"): 1,  # (2*2+1) LayerNorms of weight and bias
    }


def test_reference_counts_without_sequence_parallelism(tiny: Callable[..., Job], counts: Callable[..., Any]) -> None:
    assert counts(tiny(sequence_parallel=False)) == {
        ("all_reduce", "bfloat16", WHOLE, WHOLE, "forward"): 5,
        ("all_reduce", "float32", 64, 64, "forward"): 3,
        ("all_reduce", "bfloat16", WHOLE, WHOLE, "backward"): 5,
    }


@pytest.mark.parametrize(
    ("options", "gathers", "scatters"),
    [
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, 14, 9),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}, 14, 9),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}, 12, 7),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 9}, 14, 9),
        ({"recompute_granularity": "selective"}, 10, 5),
        ({"recompute_granularity": "selective", "recompute_modules": ("mlp",)}, 12, 7),
        ({"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp", "layernorm")}, 12, 7),
        ({"recompute_granularity": "selective", "recompute_modules": ("moe", "shared_experts")}, 10, 5),
    ],
)
def test_recomputation_repeats_forward_calls(
    tiny: Callable[..., Job], counts: Callable[..., Any], options: dict[str, Any], gathers: int, scatters: int
) -> None:
    found = counts(tiny(**options))
    late = Counter({key[0]: 0 for key in found})
    for key, number in found.items():
        if key[-1] in ("backward", "recompute"):
            late[key[0]] += number
    assert (late["all_gather"], late["reduce_scatter"]) == (gathers, scatters)
    forward = {key: number for key, number in found.items() if key[-1] == "forward"}
    assert forward == {key: number for key, number in counts(tiny()).items() if key[-1] == "forward"}


def test_recomputation_without_sequence_parallelism(tiny: Callable[..., Job], counts: Callable[..., Any]) -> None:
    job = tiny(
        sequence_parallel=False,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    assert counts(job)["all_reduce", "bfloat16", WHOLE, WHOLE, "recompute"] == 4


def test_fewer_query_groups_than_ranks(tiny: Callable[..., Job], counts: Callable[..., Any]) -> None:
    """TP4, 8 heads, 2 groups: the mixed QKV has (8 + 2*2) * 8 / 4 = 24 channels a rank, for the whole sequence."""
    options: dict[str, Any] = {
        "world_size": 4,
        "tensor_model_parallel_size": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
    }
    part, whole = 32 * 2 * 24, 128 * 2 * 24
    for job in (tiny(**options), tiny(**options, sequence_parallel=False)):
        found = counts(job)
        assert found["all_gather", "bfloat16", part, whole, "forward"] == 2
        assert found["reduce_scatter", "bfloat16", whole, part, "backward"] == 2
    full = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    assert counts(tiny(**options, **full))["all_gather", "bfloat16", part, whole, "recompute"] == 1
    as_many = counts(tiny(**{**options, "num_query_groups": 4}))
    assert not any(key[2] == part for key in as_many)


# -- counts of runs of megatron-core 0.16.1 on a fake group, one rank ------------------------------------------------


def _late(found: Counter[Any], op: str) -> tuple[int, int, int]:
    """Calls of one operation in forward, backward and recompute."""
    phases = ("forward", "backward", "recompute")
    return tuple(sum(n for key, n in found.items() if key[0] == op and key[-1] == phase) for phase in phases)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("options", "gathers", "scatters"),
    [
        ({}, (5, 10, 0), (5, 5, 0)),
        ({"moe_shared_expert_gate": True}, (5, 10, 0), (5, 5, 0)),
        ({"moe_shared_expert_overlap": True}, (5, 8, 0), (5, 5, 0)),
        (
            {
                "moe_shared_expert_overlap": True,
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
            (5, 8, 4),
            (5, 5, 4),
        ),
        ({"recompute_granularity": "selective", "recompute_modules": ("moe",)}, (5, 10, 2), (5, 5, 2)),
        ({"recompute_granularity": "selective", "recompute_modules": ("shared_experts",)}, (5, 10, 2), (5, 5, 2)),
        ({"recompute_granularity": "selective", "recompute_modules": ("moe", "shared_experts")}, (5, 10, 4), (5, 5, 4)),
        (
            {"moe_shared_expert_overlap": True, "recompute_granularity": "selective", "recompute_modules": ("moe",)},
            (5, 8, 2),
            (5, 5, 2),
        ),
    ],
)
def test_shared_experts(
    tiny: Callable[..., Job],
    counts: Callable[..., Any],
    options: dict[str, Any],
    gathers: tuple[int, int, int],
    scatters: tuple[int, int, int],
) -> None:
    """Two layers, both with experts and a shared expert: embedding, output layer and twice attention and shared."""
    job = tiny(
        world_size=4,
        expert_model_parallel_size=2,
        num_experts=4,
        moe_shared_expert_intermediate_size=128,
        normalization="RMSNorm",
        **options,
    )
    found = counts(job)
    assert _late(found, "all_gather") == gathers
    assert _late(found, "reduce_scatter") == scatters
    # 5 norms of 64, 2 routers of 4*64, 2 gates of 64 if there are any
    gradients = 960 if job.moe_shared_expert_gate else 832
    assert found["all_reduce", "float32", gradients, gradients, "other"] == 1


@pytest.mark.parametrize(
    ("options", "elements"),
    [
        ({"normalization": "RMSNorm"}, 9 * 64),
        ({}, 9 * 2 * 64),
        ({"add_bias_linear": True}, 9 * 2 * 64 + 8 * 64),
        ({"qk_layernorm": True}, 9 * 2 * 64 + 4 * 2 * 2 * 16),
        ({"qk_layernorm": True, "normalization": "RMSNorm"}, 9 * 64 + 4 * 2 * 16),
        ({"qk_layernorm": True, "normalization": "RMSNorm", "sequence_parallel": False}, 4 * 2 * 16),
        ({"sequence_parallel": False, "add_bias_linear": True}, 0),
        ({"add_qkv_bias": True, "normalization": "RMSNorm"}, 9 * 64),
    ],
)
def test_gradients_of_replicated_parameters(
    tiny: Callable[..., Job], counts: Callable[..., Any], options: dict[str, Any], elements: int
) -> None:
    """Four layers, four heads of 16 channels."""
    job = tiny(num_layers=4, num_attention_heads=4, **options)
    found = {key[2]: number for key, number in counts(job).items() if key[-1] == "other"}
    assert found == ({elements: 1} if elements else {})
    assert tensor.replicated_parameters(job, 0).value == elements


def test_gradients_come_in_the_main_gradient_type(tiny: Callable[..., Job], counts: Callable[..., Any]) -> None:
    found = counts(tiny(grad_reduce_in_bf16=True))
    assert found["all_reduce", "bfloat16", 640, 640, "other"] == 1


def test_final_norm_is_on_the_last_stage_only(tiny: Callable[..., Job]) -> None:
    job = tiny(world_size=4, pipeline_model_parallel_size=2, num_layers=4)
    assert [tensor.replicated_parameters(job, rank).value for rank in (0, 2)] == [2 * 2 * 2 * 64, 5 * 2 * 64]


def test_learned_absolute_positions(tiny: Callable[..., Job], rows: Callable[..., Any]) -> None:
    job = tiny(position_embedding_type="learned_absolute", bf16=False)
    found = [
        (row.phase, row.op, row.dtype, row.in_elems, row.out_elems, row.calls)
        for row in rows(job, component="embedding")
    ]
    assert found == [
        ("forward", "all_reduce", "float32", WHOLE, WHOLE, 1),
        ("backward", "all_gather", "float32", SHARD, WHOLE, 1),
    ]


@pytest.mark.parametrize(("method", "number", "gathers"), [("uniform", 1, 4), ("uniform", 3, 2), ("block", 3, 3)])
def test_distributed_saved_activations(
    tiny: Callable[..., Job], rows: Callable[..., Any], method: str, number: int, gathers: int
) -> None:
    job = tiny(
        num_layers=4,
        sequence_parallel=False,
        recompute_granularity="full",
        recompute_method=method,
        recompute_num_layers=number,
        distribute_saved_activations=True,
    )
    (row,) = rows(job, component="saved activations")
    assert (row.phase, row.op, row.in_elems, row.out_elems, row.calls) == (
        "backward",
        "all_gather",
        WHOLE // 2,
        WHOLE,
        gathers,
    )


def test_block_recomputation_counts_layers_of_each_chunk(tiny: Callable[..., Job], counts: Callable[..., Any]) -> None:
    """PP2 x 2 chunks x 2 layers, the first layer of a chunk, 2 micro-batches: 2 * 2 repeats of each call."""
    job = tiny(
        world_size=4,
        num_layers=8,
        num_microbatches=2,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        recompute_granularity="full",
        recompute_method="block",
        recompute_num_layers=1,
    )
    assert _late(counts(job), "all_gather") == (16, 34, 8)
    assert _late(counts(job), "reduce_scatter") == (18, 16, 8)


# -- closed forms of the reference, section 2.11 ---------------------------------------------------------------------


def _seed(document_job: Callable[..., Job], **changes: Any) -> Job:
    """The seed's dimensions on a middle stage of TP4 CP2 PP4: 20 layers, one micro-batch."""
    return document_job(
        **{"world_size": 32, "context_parallel_size": 2, "pipeline_model_parallel_size": 4, **changes},
    )


MIDDLE, LAST = 8, 24  # first ranks of stages 1 and 3


@pytest.mark.parametrize(
    ("phase", "per_layer"), [("forward", 384 * MIB), ("backward", 576 * MIB), ("recompute", 384 * MIB)]
)
def test_off_rank_bytes_of_a_dense_layer(
    document_job: Callable[..., Job], off_rank: Callable[..., int], phase: str, per_layer: int
) -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert off_rank(_seed(document_job, **full), MIDDLE, phase=phase) == 20 * per_layer


def test_off_rank_bytes_of_a_layer_with_experts(document_job: Callable[..., Job], off_rank: Callable[..., int]) -> None:
    job = _seed(document_job, num_experts=64, moe_layer_freq=4)
    assert off_rank(job, MIDDLE, phase="forward") == 15 * 384 * MIB + 5 * 192 * MIB
    assert off_rank(job, MIDDLE, phase="backward") == 15 * 576 * MIB + 5 * 288 * MIB


@pytest.mark.parametrize(
    ("rank", "options", "gathers_and_scatters"),
    [
        (0, {}, 10 * 20 + 2),
        (MIDDLE, {}, 10 * 20),
        (LAST, {}, 10 * 20 + 3),
        (0, {"position_embedding_type": "learned_absolute"}, 10 * 20 + 3),
        (0, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, 14 * 20 + 2),
        (MIDDLE, {"num_experts": 8, "moe_shared_expert_intermediate_size": 4096}, 10 * 20),
        (
            MIDDLE,
            {"num_experts": 8, "moe_shared_expert_intermediate_size": 4096, "moe_shared_expert_overlap": True},
            9 * 20,
        ),
        (MIDDLE, {"num_experts": 8}, 5 * 20),
    ],
)
def test_closed_form_with_sequence_parallelism(
    document_job: Callable[..., Job],
    rows: Callable[..., Any],
    rank: int,
    options: dict[str, Any],
    gathers_and_scatters: int,
) -> None:
    """M * A * (...), A = (TP-1) * S/(CP*TP) * B * H * 2 bytes = 96 MiB at the seed's sizes; an all-reduce is 2 A."""
    job = _seed(document_job, num_microbatches=3, **options)
    found = sum(row.off_rank_bytes * row.calls for row in rows(job, rank) if row.dtype == "bfloat16")
    assert found == 3 * 96 * MIB * gathers_and_scatters


@pytest.mark.parametrize(("rank", "all_reduces"), [(0, 81), (MIDDLE, 80), (LAST, 81)])
def test_closed_form_without_sequence_parallelism(
    document_job: Callable[..., Job], rows: Callable[..., Any], rank: int, all_reduces: int
) -> None:
    job = _seed(document_job, sequence_parallel=False)
    found = sum(row.off_rank_bytes * row.calls for row in rows(job, rank) if row.dtype == "bfloat16")
    assert found == 192 * MIB * all_reduces


def test_closed_form_of_the_loss(document_job: Callable[..., Job], rows: Callable[..., Any]) -> None:
    """3 * 2(TP-1)/TP * S/CP * B * 4 bytes = 3 * 1.5 * 32 KiB."""
    found = [row for row in rows(_seed(document_job), LAST) if row.component.startswith("loss")]
    assert sum(row.off_rank_bytes * row.calls for row in found) == 3 * 48 * 1024
    assert not [row for row in rows(_seed(document_job), 0) if row.component.startswith("loss")]


def test_check_of_the_reference(tiny: Callable[..., Job], rows: Callable[..., Any]) -> None:
    """L=2 dense, TP2 SP, one micro-batch: 25 collectives of A, 15 all-gathers and 10 reduce-scatters."""
    found = Counter({"all_gather": 0, "reduce_scatter": 0})
    for row in rows(tiny()):
        if row.op in found:
            found[row.op] += row.calls
    assert found == {"all_gather": 15, "reduce_scatter": 10}


def test_forward_only_of_an_old_public_trace(rows: Callable[..., Any], off_rank: Callable[..., int]) -> None:
    """Megatron on 8 A100, TP8, 40 layers, no SP, forward: 80 + 1 all-reduces of 64 MiB and 3 of 32 KiB."""
    job = Job(
        megatron_core_version="0.5.0",
        forward_only=True,
        world_size=8,
        tensor_model_parallel_size=8,
        micro_batch_size=4,
        num_microbatches=1,
        seq_length=2048,
        num_layers=40,
        hidden_size=4096,
        num_attention_heads=32,
        fp16=True,
    )
    found = [(row.component, row.dtype, row.payload_bytes, row.calls) for row in rows(job)]
    assert found == [
        ("embedding", "float16", 64 * MIB, 1),
        ("attention.proj", "float16", 64 * MIB, 40),
        ("mlp.fc2", "float16", 64 * MIB, 40),
        ("loss: max", "float32", 32 * 1024, 1),
        ("loss: predicted logit", "float32", 32 * 1024, 1),
        ("loss: sum of exponentials", "float32", 32 * 1024, 1),
    ]
    assert off_rank(job, component="embedding") == 112 * MIB
    assert off_rank(job, component="attention.proj") + off_rank(job, component="mlp.fc2") == 8960 * MIB  # 8.75 GiB


# -- the loss --------------------------------------------------------------------------------------------------------


def test_loss_runs_on_a_group_of_one(tiny: Callable[..., Job], rows: Callable[..., Any]) -> None:
    found = rows(tiny(world_size=1, tensor_model_parallel_size=1))
    assert [(row.op, row.in_elems, row.group_size, row.off_rank_bytes) for row in found] == [
        ("all_reduce", 64, 1, 0)
    ] * 3


def test_fused_loss(tiny: Callable[..., Job], rows: Callable[..., Any]) -> None:
    fused = rows(tiny(cross_entropy_loss_fusion=True), phase="forward")
    assert [(row.op, row.in_elems) for row in fused if row.component.startswith("loss")] == [
        ("all_reduce", 64),
        ("all_reduce", 128),
    ]


def test_loss_fused_by_transformer_engine(tiny: Callable[..., Job], rows: Callable[..., Any]) -> None:
    options = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
    found = [row for row in rows(tiny(**options)) if row.component.startswith("loss")]
    assert [(row.op, row.dtype, row.in_elems, row.out_elems) for row in found] == [("all_gather", "float32", 192, 384)]
    assert rows(tiny(world_size=1, tensor_model_parallel_size=1, **options)) == []


# -- stages and chunks -----------------------------------------------------------------------------------------------


def test_ends_of_an_interleaved_pipeline(tiny: Callable[..., Job], rows: Callable[..., Any]) -> None:
    """Embedding once a micro-batch on the first stage, output layer and loss on the last, whatever the chunks."""
    job = tiny(
        world_size=4,
        num_layers=8,
        num_microbatches=4,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
    )
    ends = {"embedding", "output layer", "loss: max"}
    found = {
        rank: {(row.component, row.phase): row.calls for row in rows(job, rank) if row.component in ends}
        for rank in (0, 2)
    }
    assert found[0] == {("embedding", "forward"): 4, ("embedding", "backward"): 4}
    assert found[2] == {("output layer", "forward"): 4, ("output layer", "backward"): 4, ("loss: max", "forward"): 4}
    (qkv,) = rows(job, 0, phase="forward", component="attention.qkv")
    assert (qkv.calls, qkv.stage) == (4 * 4, 0)


def test_order_of_the_backward_pass_of_a_layer(tiny: Callable[..., Job], rows: Callable[..., Any]) -> None:
    assert [(row.component, row.op) for row in rows(tiny(), phase="backward")] == [
        ("output layer input re-gather", "all_gather"),
        ("output layer", "reduce_scatter"),
        ("mlp.fc2", "all_gather"),
        ("mlp.fc1 input re-gather", "all_gather"),
        ("mlp.fc1", "reduce_scatter"),
        ("attention.proj", "all_gather"),
        ("attention.qkv input re-gather", "all_gather"),
        ("attention.qkv", "reduce_scatter"),
        ("embedding", "all_gather"),
    ]


# -- waste, evidence, explanation ------------------------------------------------------------------------------------


def test_avoidable_bytes(document_job: Callable[..., Job], rows: Callable[..., Any]) -> None:
    """Whole off-rank bytes of input re-gathers and repeated calls; nothing else of this group need not be sent."""
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    found = {}
    for row in rows(document_job(**full)):
        if row.avoidable is not None:
            found[row.component, row.phase] = (row.avoidable.code, row.avoidable.bytes_per_call, row.avoidable.setting)
    repeated = ("recompute_repeats_collectives", 192 * MIB, "recompute_granularity selective")
    gathered = ("sp_input_regather", 192 * MIB, "")
    assert found == {
        **{(c, "recompute"): repeated for c in ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")},
        **{(f"{c} input re-gather", "backward"): gathered for c in ("attention.qkv", "mlp.fc1", "output layer")},
    }


def test_setting_that_removes_a_selective_repeat(tiny: Callable[..., Job], rows: Callable[..., Any]) -> None:
    job = tiny(recompute_granularity="selective", recompute_modules=("mlp",))
    assert {row.avoidable.setting for row in rows(job, phase="recompute")} == {"mlp out of recompute_modules"}


def test_older_option_recomputes_the_moe_layer(tiny: Callable[..., Job]) -> None:
    job = tiny(recompute_granularity="selective", extra={"moe_layer_recompute": True})
    assert tensor.recompute_modules(job) == ("core_attn", "moe")


def test_explanation_shows_symbols_and_numbers(document_job: Callable[..., Job], rows: Callable[..., Any]) -> None:
    job = _seed(document_job, num_microbatches=8)
    (row,) = rows(job, MIDDLE, phase="forward", component="attention.qkv")
    formula = dict(row.formula)
    assert list(formula) == ["in", "out", "off-rank", "calls", "source"]
    assert formula["in"] == "S/(CP*TP) * B * H = 8192/(2*4) * 2 * 8192 = 16,777,216 elements = 32 MiB bf16"
    assert formula["out"] == "S/CP * B * H = 8192/2 * 2 * 8192 = 67,108,864 elements = 128 MiB bf16"
    assert formula["off-rank"] == "(N-1)/N * out = 3/4 * out = 96 MiB"
    assert formula["calls"] == "layers * M = 20 layers * 8 micro-batches = 160 per step"
    assert row.evidence.kind == "run"
    assert "tp2_sp" in row.evidence.where


def test_every_row_carries_evidence_and_formula(tiny: Callable[..., Job], rows: Callable[..., Any]) -> None:
    job = tiny(world_size=4, num_experts=4, expert_model_parallel_size=2, moe_shared_expert_intermediate_size=64)
    for row in rows(job):
        assert row.evidence.where
        assert {"in", "off-rank", "calls", "source"} <= set(row.formula)


# -- flags without a rule --------------------------------------------------------------------------------------------


def _unknown(job: Job, rank: int = 0) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Phases and operations by flag, for entries that touch the tensor-parallel group."""
    entries = expect.expected(job, rank).not_modelled
    return {entry.what: (entry.phases, entry.ops) for entry in entries if "tp" in entry.roles}


def test_nothing_is_unknown_of_a_plain_job(tiny: Callable[..., Job]) -> None:
    assert _unknown(tiny()) == {}


@pytest.mark.parametrize(
    "options",
    [
        {"tp_comm_overlap": True},
        {"fp8": "hybrid"},
        {"fp4": "e2m1"},
        {"mtp_num_layers": 1},
        {"multi_latent_attention": True},
        {"defer_embedding_wgrad_compute": True},
        {"variable_seq_lengths": True},
        {"sft": True},
        {"rampup_batch_size": (2, 2, 100)},
        {"overlap_moe_expert_parallel_comm": True},
        {"moe_latent_size": 32},
        {"use_megatron_fsdp": True},
        {"use_torch_fsdp2": True},
        {"extra": {"delay_wgrad_compute": True}},
        {"extra": {"fp32_residual_connection": True}},
        {"extra": {"attention_output_gate": True}},
        {"extra": {"hybrid_override_pattern": "M*M*"}},
        {"extra": {"gtp_weight_remat_size": 2}},
        {"extra": {"tensor_parallel_num_weight_shards": 4}},
    ],
)
def test_flag_without_a_rule_is_named(tiny: Callable[..., Job], options: dict[str, Any]) -> None:
    flag = next(iter(options.get("extra", options)))
    assert flag in _unknown(tiny(**options))


@pytest.mark.parametrize(
    "extra",
    [
        {"delay_wgrad_compute": False},
        {"hybrid_override_pattern": None},
        {"hybrid_override_pattern": "None"},
        {"gtp_weight_remat_size": 1},
        {"tensor_parallel_num_weight_shards": 2},
    ],
)
def test_flag_that_is_off_is_not_named(tiny: Callable[..., Job], extra: dict[str, Any]) -> None:
    assert _unknown(tiny(extra=extra)) == {}


def test_reach_of_flags(tiny: Callable[..., Job]) -> None:
    shards = ("all_gather", "reduce_scatter")
    assert _unknown(tiny(tp_comm_overlap=True)) == {"tp_comm_overlap": (("forward", "backward", "recompute"), shards)}
    assert _unknown(tiny(use_megatron_fsdp=True)) == {"use_megatron_fsdp": (("other",), ("all_reduce",))}
    one_rank = {"world_size": 1, "tensor_model_parallel_size": 1}
    assert _unknown(tiny(multi_latent_attention=True, **one_rank)) == {}
    assert _unknown(tiny(mtp_num_layers=1, **one_rank)) == {"mtp_num_layers": ((), ())}


def test_biases_of_experts_are_unknown(tiny: Callable[..., Job]) -> None:
    job = tiny(num_experts=4, add_bias_linear=True)
    assert _unknown(job) == {"add_bias_linear of experts": (("other",), ("all_reduce",))}


def test_decoder_length_of_its_own_is_unknown(tiny: Callable[..., Job]) -> None:
    assert "decoder_seq_length" in _unknown(tiny(decoder_seq_length=16))
    assert _unknown(tiny(decoder_seq_length=32)) == {}


# -- releases --------------------------------------------------------------------------------------------------------


def test_embedding_of_older_releases(tiny: Callable[..., Job], rows: Callable[..., Any]) -> None:
    (old, _) = rows(tiny(megatron_core_version="0.7.0"), component="embedding")
    (new, _) = rows(tiny(megatron_core_version="0.8.0"), component="embedding")
    assert (old.op, old.versions) == ("all_reduce", "<=0.7")
    assert (new.op, new.versions) == ("reduce_scatter", ">=0.8")


def test_experts_of_older_releases_are_unknown(tiny: Callable[..., Job]) -> None:
    assert "experts in megatron-core <=0.9" in _unknown(tiny(num_experts=4, megatron_core_version="0.9.0"))
    assert _unknown(tiny(num_experts=4, megatron_core_version="0.10.0")) == {}


def test_few_query_groups_of_older_releases(tiny: Callable[..., Job], rows: Callable[..., Any]) -> None:
    options = {"world_size": 4, "tensor_model_parallel_size": 4, "group_query_attention": True, "num_query_groups": 2}
    job = tiny(megatron_core_version="0.15.0", **options)
    assert rows(job, component="attention.qkv groups") == []
    assert "num_query_groups < tensor_model_parallel_size in megatron-core <=0.15" in _unknown(job)


# -- shapes and errors -----------------------------------------------------------------------------------------------


def test_lengths(document_job: Callable[..., Job]) -> None:
    job = _seed(document_job)
    assert (shapes.cp_tokens(job).value, shapes.sequence_shard(job).value) == (4096, 1024)
    assert shapes.sequence_shard(_seed(document_job, sequence_parallel=False)).value == 4096


def test_job_that_lacks_a_size(tiny: Callable[..., Job]) -> None:
    with pytest.raises(JobError, match="hidden_size"):
        expect.expected(tiny(hidden_size=None, kv_channels=8), 0)


def test_rank_outside_the_world(tiny: Callable[..., Job]) -> None:
    with pytest.raises(JobError, match="rank 2 is outside"):
        expect.expected(tiny(), 2)
