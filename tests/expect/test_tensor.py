"""The tensor-parallel chapter against recorded traffic of megatron-core, closed forms, and every flag."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from traceanalyzer import expect
from traceanalyzer.errors import JobError
from traceanalyzer.expect import shapes, tensor, versions
from traceanalyzer.expect.place import Place
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
        moe_token_dispatcher_type="alltoall",
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
            {
                "num_experts": 8,
                "moe_shared_expert_intermediate_size": 4096,
                "moe_shared_expert_overlap": True,
                "moe_token_dispatcher_type": "alltoall",
            },
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
    """Whole off-rank bytes of input re-gathers and repeated calls, half of the norm gradients; nothing else."""
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
        # 161 norms of 8192 elements, two bytes of four in vain, 2 * 3/4 of them off rank
        ("norm gradients", "other"): ("fp32_reduction", 161 * 8192 * 2 * 3 // 2, "--grad-reduce-in-bf16"),
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
    assert formula["calls"] == "layers * M = 20 * 8 = 160 per step"
    assert row.evidence.kind == "run"
    assert "tp2_sp" in row.evidence.where


def test_reasons_for_what_the_document_lacks(document_job: Callable[..., Job], rows: Callable[..., Any]) -> None:
    """Errata E34 lists the repeated gathers, the norms' gradients and the loss; the plain calls of a layer it has."""
    found = {(row.component, row.phase): row.document for row in rows(document_job())}
    assert found["attention.qkv", "forward"] == found["mlp.fc2", "backward"] == ""
    assert found["attention.qkv input re-gather", "backward"] == "E34"
    assert found["loss: max", "forward"] == found["norm gradients", "other"] == "E34"
    assert found["embedding", "forward"] == found["output layer", "forward"] == "not in the document"


def test_every_row_carries_evidence_and_formula(tiny: Callable[..., Job], rows: Callable[..., Any]) -> None:
    job = tiny(world_size=4, num_experts=4, expert_model_parallel_size=2, moe_shared_expert_intermediate_size=64)
    for row in rows(job):
        assert row.evidence.where
        assert {"in", "off-rank", "calls", "source"} <= set(row.formula)


# -- runs of megatron-core, one rank, local layers --------------------------------------------------------------------

# hidden 64, 2 layers, 4 heads, sequence 32, micro-batch 2, RMSNorm, no biases, RoPE, bf16, float32 gradients, tied, TP2.
_RUN_BASE: dict[str, Any] = {
    "num_attention_heads": 4,
    "normalization": "RMSNorm",
    "swiglu": True,
    "ffn_hidden_size": 256,
    "padded_vocab_size": 256,
}
# Latent ranks 24 and 16, heads of 16 + 8 and 12 channels; "whole" down projections stand where TransformerEngine's
# duplicated linear would, which shares nothing.
_MLA: dict[str, Any] = {
    "multi_latent_attention": True,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 12,
}
_Q: dict[str, Any] = {**_MLA, "q_lora_rank": 24}
_COLUMN: dict[str, Any] = {"transformer_impl": "local"}
_NO_SP: dict[str, Any] = {"sequence_parallel": False}
_FULL: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
_MTP: dict[str, Any] = {"mtp_num_layers": 1}
_EXPERTS: dict[str, Any] = {
    "num_experts": 2,
    "moe_ffn_hidden_size": 256,
    "moe_token_dispatcher_type": "alltoall",
}
_SHARED: dict[str, Any] = {**_EXPERTS, "moe_shared_expert_intermediate_size": 96}

# Forward, recompute, backward and other: operation, [type,] elements in and out, calls of one step.
_PREDICTED = """forward RS 4096 2048 x8; AG 2048 4096 x9; AG 4096 8192 x1; AR fp32 64 64 x6
backward AG 2048 4096 x17; RS 4096 2048 x8; AG 4096 8192 x1; RS 8192 4096 x1
other AR fp32 640 640 x1"""

_RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "0.16.1, latent attention, whole": (
        _Q,
        """forward RS 4096 2048 x5; AG 256 512 x2; AG 768 1536 x2; AG 512 1024 x2; AG 2048 4096 x3; AR fp32 64 64 x3
        backward AG 2048 4096 x8; RS 4096 2048 x3; AG 512 1024 x2; RS 1024 512 x2
        backward AG 768 1536 x2; RS 1536 768 x2; RS 512 256 x2
        other AR fp32 6464 6464 x1""",
    ),
    "0.16.1, latent attention, whole, no q_lora_rank": (
        _MLA,
        """forward RS 4096 2048 x5; AG 256 512 x2; AG 2048 4096 x5; AG 512 1024 x2; AR fp32 64 64 x3
        backward AG 2048 4096 x10; RS 4096 2048 x5; AG 512 1024 x2; RS 1024 512 x2; RS 512 256 x2
        other AR fp32 3392 3392 x1""",
    ),
    "0.16.1, latent attention, whole, no SP": (
        {**_Q, **_NO_SP},
        """forward AR 4096 4096 x5; AR fp32 64 64 x3
        backward AR 4096 4096 x3; AR 1024 1024 x2; AR 1536 1536 x2""",
    ),
    "0.16.1, latent attention, column-parallel": (
        {**_Q, **_COLUMN},
        """forward RS 4096 2048 x5; AG 2048 4096 x7; AG 768 1536 x6; AG 512 1024 x2; AR fp32 64 64 x3
        backward AG 2048 4096 x12; RS 4096 2048 x7; AG 512 1024 x4; RS 1024 512 x2; AG 768 1536 x4; RS 1536 768 x2
        other AR fp32 320 320 x1""",
    ),
    "0.16.1, latent attention, column-parallel, no SP": (
        {**_Q, **_COLUMN, **_NO_SP},
        """forward AR 4096 4096 x5; AG 768 1536 x4; AR fp32 64 64 x3
        backward AR 4096 4096 x7; AR 1024 1024 x2; AR 1536 1536 x2""",
    ),
    "0.16.1, latent attention, column-parallel, no SP, qk_layernorm": (
        {**_Q, **_COLUMN, **_NO_SP, "qk_layernorm": True},
        """forward AR 4096 4096 x5; AG 768 1536 x4; AR fp32 64 64 x3
        backward AR 4096 4096 x7; AR 1024 1024 x2; AR 1536 1536 x2
        other AR fp32 48 48 x1""",
    ),
    "0.12.3, latent attention, column-parallel": (
        {**_Q, "megatron_core_version": "0.12.3"},
        """forward RS 4096 2048 x5; AG 2048 4096 x7; AG 768 1536 x6; AG 512 1024 x2; AR fp32 64 64 x3
        backward AG 2048 4096 x12; RS 4096 2048 x7; AG 512 1024 x4; RS 1024 512 x2; AG 768 1536 x4; RS 1536 768 x2
        other AR fp32 320 320 x1""",
    ),
    "0.16.1, latent attention, whole, full recomputation": (
        {**_Q, **_FULL},
        """forward RS 4096 2048 x5; AG 256 512 x2; AG 768 1536 x2; AG 512 1024 x2; AG 2048 4096 x3; AR fp32 64 64 x3
        recompute AG 256 512 x2; AG 768 1536 x2; AG 512 1024 x2; RS 4096 2048 x4; AG 2048 4096 x2
        backward AG 2048 4096 x8; RS 4096 2048 x3; AG 512 1024 x2; RS 1024 512 x2
        backward AG 768 1536 x2; RS 1536 768 x2; RS 512 256 x2
        other AR fp32 6464 6464 x1""",
    ),
    # Recomputed in a hook of the backward pass, and recorded as "backward": told apart by the call site, a forward pass.
    "0.16.1, latent attention, whole, mla_up_proj recomputed": (
        {**_Q, "recompute_granularity": "selective", "recompute_modules": ("mla_up_proj",)},
        """forward RS 4096 2048 x5; AG 256 512 x2; AG 768 1536 x2; AG 512 1024 x2; AG 2048 4096 x3; AR fp32 64 64 x3
        recompute AG 768 1536 x2; AG 512 1024 x2
        backward AG 2048 4096 x8; RS 4096 2048 x3; AG 512 1024 x2; RS 1024 512 x2
        backward AG 768 1536 x2; RS 1536 768 x2; RS 512 256 x2
        other AR fp32 6464 6464 x1""",
    ),
    "0.16.1, latent attention, no q_lora_rank, mla_up_proj recomputed": (
        {**_MLA, "recompute_granularity": "selective", "recompute_modules": ("mla_up_proj",)},
        """forward RS 4096 2048 x5; AG 256 512 x2; AG 2048 4096 x5; AG 512 1024 x2; AR fp32 64 64 x3
        recompute AG 2048 4096 x2; AG 512 1024 x2
        backward AG 2048 4096 x10; RS 4096 2048 x5; AG 512 1024 x2; RS 1024 512 x2; RS 512 256 x2
        other AR fp32 3392 3392 x1""",
    ),
    "0.16.1, prediction": (_MTP, _PREDICTED),
    "0.13.1, prediction": ({**_MTP, "megatron_core_version": "0.13.1"}, _PREDICTED),
    "0.14.0, prediction": ({**_MTP, "megatron_core_version": "0.14.0"}, _PREDICTED),
    "0.15.3, prediction": ({**_MTP, "megatron_core_version": "0.15.3"}, _PREDICTED),
    "0.17.0, prediction": ({**_MTP, "megatron_core_version": "0.17.0"}, _PREDICTED),
    "0.18.0, prediction": ({**_MTP, "megatron_core_version": "0.18.0"}, _PREDICTED),
    "0.12.3, prediction": (
        {**_MTP, "megatron_core_version": "0.12.3"},
        """forward RS 4096 2048 x8; AG 2048 4096 x9; AG 4096 8192 x1; AR fp32 64 64 x6
        backward AG 2048 4096 x17; RS 4096 2048 x9; AG 4096 8192 x1; RS 8192 4096 x1
        other AR fp32 640 640 x1""",
    ),
    "0.19.0, prediction": (
        {**_MTP, "megatron_core_version": "0.19.0"},
        """forward RS 4096 2048 x8; AG 2048 4096 x9; AG 4096 8192 x1; AR fp32 64 64 x6; AG 64 128 x1; AG int64 64 128 x1
        backward AG 2048 4096 x17; RS 4096 2048 x8; AG 4096 8192 x1; RS 8192 4096 x1
        other AR fp32 640 640 x1""",
    ),
    "0.16.1, prediction, no SP": (
        {**_MTP, **_NO_SP},
        """forward AR 4096 4096 x8; AG 2048 4096 x1; AR fp32 64 64 x6
        backward AR 4096 4096 x8; AR 8192 8192 x1""",
    ),
    # The gather behind eh_proj, called from no "forward" of a module, was recorded as "backward", here and in the next.
    "0.16.1, prediction, full recomputation": (
        {**_MTP, **_FULL},
        """forward RS 4096 2048 x8; AG 2048 4096 x9; AG 4096 8192 x1; AR fp32 64 64 x6
        recompute AG 4096 8192 x1; AG 2048 4096 x7; RS 4096 2048 x6
        backward AG 2048 4096 x17; RS 4096 2048 x8; AG 4096 8192 x1; RS 8192 4096 x1
        other AR fp32 640 640 x1""",
    ),
    "0.16.1, prediction, full recomputation, saved activations, no SP": (
        {**_MTP, **_FULL, **_NO_SP, "distribute_saved_activations": True},
        """forward AR 4096 4096 x8; AG 2048 4096 x1; AR fp32 64 64 x6
        recompute AR 4096 4096 x6; AG 2048 4096 x1
        backward AR 4096 4096 x8; AR 8192 8192 x1; AG 2048 4096 x3""",
    ),
    "0.16.1, prediction with shared experts": (
        {**_MTP, **_SHARED},
        """forward RS 4096 2048 x8; AG 2048 4096 x9; AG 4096 8192 x1; AR fp32 64 64 x6
        backward AG 2048 4096 x17; RS 4096 2048 x8; AG 4096 8192 x1; RS 8192 4096 x1
        other AR fp32 1024 1024 x1""",
    ),
    "0.16.1, prediction with shared experts, moe and mlp recomputed": (
        {**_MTP, **_SHARED, "recompute_granularity": "selective", "recompute_modules": ("moe", "mlp")},
        """forward RS 4096 2048 x8; AG 2048 4096 x9; AG 4096 8192 x1; AR fp32 64 64 x6
        recompute AG 2048 4096 x3; RS 4096 2048 x3
        backward AG 2048 4096 x17; RS 4096 2048 x8; AG 4096 8192 x1; RS 8192 4096 x1
        other AR fp32 1024 1024 x1""",
    ),
    "0.16.1, prediction with 2 query groups on 4 ranks": (
        {
            **_MTP,
            "world_size": 4,
            "tensor_model_parallel_size": 4,
            "group_query_attention": True,
            "num_query_groups": 2,
        },
        """forward RS 4096 1024 x8; AG 1024 4096 x9; AG 2048 8192 x4; AR fp32 64 64 x6
        backward AG 1024 4096 x17; RS 4096 1024 x8; RS 8192 2048 x4; AG 2048 8192 x1
        other AR fp32 640 640 x1""",
    ),
    "0.16.1, prediction with latent attention": (
        {**_MTP, **_Q},
        """forward RS 4096 2048 x8; AG 256 512 x3; AG 768 1536 x3; AG 512 1024 x3; AG 2048 4096 x6; AG 4096 8192 x1
        forward AR fp32 64 64 x6
        backward AG 2048 4096 x14; RS 4096 2048 x5; AG 512 1024 x3; RS 1024 512 x3; AG 768 1536 x3; RS 1536 768 x3
        backward RS 512 256 x3; AG 4096 8192 x1; RS 8192 4096 x1
        other AR fp32 9856 9856 x1""",
    ),
    # Experts one by one; the default, one grouped linear, does not mark its biases.
    "0.16.1, biases of experts": (
        {**_EXPERTS, "add_bias_linear": True, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2},
        """forward RS 4096 2048 x3; AG 2048 4096 x3; AR fp32 64 64 x3
        backward AG 2048 4096 x6; RS 4096 2048 x3
        other AR fp32 836 836 x1""",
    ),
    "0.16.1, query and key norms, LayerNorm": (
        {"qk_layernorm": True, "normalization": "LayerNorm"},
        """forward RS 4096 2048 x5; AG 2048 4096 x5; AR fp32 64 64 x3
        backward AG 2048 4096 x10; RS 4096 2048 x5
        other AR fp32 768 768 x1""",
    ),
    "0.16.1, attention_output_gate": (
        {"attention_output_gate": True},
        """forward RS 4096 2048 x5; AG 2048 4096 x5; AR fp32 64 64 x3
        backward AG 2048 4096 x10; RS 4096 2048 x5
        other AR fp32 320 320 x1""",
    ),
}
_NAMES = {"AG": "all_gather", "RS": "reduce_scatter", "AR": "all_reduce", "fp32": "float32", "int64": "int64"}


def _table(text: str) -> Counter[tuple[str, str, int, int, str]]:
    found: Counter[tuple[str, str, int, int, str]] = Counter()
    for line in text.splitlines():
        phase, calls = line.strip().split(" ", 1)
        for call in calls.split("; "):
            op, *dtype, sent, received, number = call.split()
            kind = _NAMES[dtype[0]] if dtype else "bfloat16"
            found[_NAMES[op], kind, int(sent), int(received), phase] += int(number.removeprefix("x"))
    return found


@pytest.mark.parametrize("name", _RUNS)
def test_runs(tiny: Callable[..., Job], counts: Callable[..., Any], name: str) -> None:
    options, text = _RUNS[name]
    job = tiny(**{**_RUN_BASE, **options})
    assert counts(job) == _table(text)
    assert _unknown(job) == {}


def test_run_of_two_predictions_on_two_stages(tiny: Callable[..., Job], counts: Callable[..., Any]) -> None:
    """0.16.1, PP2, one decoder layer a stage, two micro-batches."""
    job = tiny(**_RUN_BASE, world_size=4, pipeline_model_parallel_size=2, num_microbatches=2, mtp_num_layers=2)
    first = """forward RS 4096 2048 x6; AG 2048 4096 x4
    backward AG 2048 4096 x10; RS 4096 2048 x4
    other AR fp32 128 128 x1"""
    last = """forward AG 2048 4096 x22; RS 4096 2048 x16; AG 4096 8192 x4; AR fp32 64 64 x18
    backward AG 2048 4096 x38; RS 4096 2048 x18; AG 4096 8192 x4; RS 8192 4096 x4
    other AR fp32 832 832 x1"""
    assert counts(job, 0) == _table(first)
    assert counts(job, 2) == _table(last)


@pytest.mark.parametrize("version", ["0.14.0", "0.15.3", "0.16.1", "0.17.0", "0.18.0", "0.19.0"])
def test_shifts_of_a_prediction_over_context_parallel_ranks(tiny: Callable[..., Job], version: str) -> None:
    """CP4: tokens, positions, labels and mask, two integers a message; the ends have one neighbour only."""
    job = tiny(
        **{**_RUN_BASE, **_MTP, **_NO_SP},
        megatron_core_version=version,
        world_size=4,
        tensor_model_parallel_size=1,
        context_parallel_size=4,
        num_microbatches=3,
    )
    for rank, sides in ((0, ["next"]), (1, ["previous", "next"]), (3, ["previous"])):
        found: Counter[tuple[str, str, str, int, str]] = Counter()
        for row in expect.expected(job, rank).calls:
            if row.rule.startswith("tensor: prediction shifts"):
                assert (row.role, row.phase, row.group_size, int(row.off_rank_bytes)) == ("world", "forward", 4, 16)
                found[row.component, row.op, row.peer, row.in_elems, row.dtype] += row.calls
        names = ("tokens", "positions", "labels", "loss mask")
        assert found == {
            (f"prediction: shift of {name}", op, side, 2, "int64"): 3
            for name in names
            for op in ("send", "recv")
            for side in sides
        }


def test_run_of_a_prediction_away_from_the_loss(tiny: Callable[..., Job], counts: Callable[..., Any]) -> None:
    """0.16.1 on four gloo processes, layout "Ettm|L", two micro-batches: output layers and losses alone on the last."""
    job = tiny(
        **{**_RUN_BASE, **_MTP},
        world_size=4,
        pipeline_model_parallel_size=2,
        num_microbatches=2,
        pipeline_model_parallel_layout="Ettm|L",
    )
    first = """forward RS 4096 2048 x16; AG 2048 4096 x14; AG 4096 8192 x2
    backward AG 2048 4096 x30; RS 4096 2048 x12; AG 4096 8192 x2; RS 8192 4096 x2
    other AR fp32 640 640 x1"""
    last = """forward AG 2048 4096 x4; AR fp32 64 64 x12
    backward AG 2048 4096 x4; RS 4096 2048 x4"""
    assert counts(job, 0) == _table(first)
    assert counts(job, 2) == _table(last)


def test_shifts_in_megatron_lm_and_before(tiny: Callable[..., Job], rows: Callable[..., Any]) -> None:
    """Megatron-LM hands over its loss mask, float32; up to 0.13 there is no CP with prediction."""
    options = {**_MTP, "world_size": 4, "context_parallel_size": 2}
    masks = rows(tiny(**options, framework="megatron-lm"), role="world", component="prediction: shift of loss mask")
    assert {row.dtype for row in masks} == {"float32"}
    old = rows(tiny(**options, megatron_core_version="0.13.0"), role="world")
    assert not [row for row in old if row.rule.startswith("tensor")]


def test_prediction_on_a_stage_of_its_own(tiny: Callable[..., Job], rows: Callable[..., Any]) -> None:
    """Embedding and layer where the layout says m, output layer and loss where the last stage has them."""
    job = tiny(world_size=6, pipeline_model_parallel_size=3, mtp_num_layers=1, pipeline_model_parallel_layout="Ett|m|L")
    found = [{row.component for row in rows(job, rank, phase="forward")} for rank in (0, 2, 4)]
    assert not [name for name in found[0] if name.startswith("prediction")]
    assert found[1] == {
        "prediction embedding",
        "prediction.eh_proj",
        "prediction.eh_proj output",
        *(f"prediction {name}" for name in ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")),
    }
    parts = ("max", "predicted logit", "sum of exponentials")
    assert found[2] == {
        f"{begin}{name}"
        for begin in ("", "prediction ")
        for name in ("output layer", *(f"loss: {part}" for part in parts))
    }


def test_block_recomputation_leaves_predictions_out(tiny: Callable[..., Job], rows: Callable[..., Any]) -> None:
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
    for options in (block, {**_FULL, "megatron_core_version": "0.13.0"}):
        job = tiny(**_MTP, **options)
        assert not [row for row in rows(job, phase="recompute") if row.component.startswith("prediction")]


def test_evaluation_repeats_nothing(tiny: Callable[..., Job], rows: Callable[..., Any]) -> None:
    modules = {"recompute_granularity": "selective", "recompute_modules": ("mlp",)}
    for options in (_FULL, modules, {**_MTP, **_FULL}, {"megatron_core_version": "0.19.0", **_MTP}):
        found = rows(tiny(forward_only=True, **options))
        assert {row.phase for row in found} == {"forward"}
        assert not [row for row in found if row.component.startswith("prediction accepted")]


# -- fp8 of TransformerEngine ----------------------------------------------------------------------------------------

# In and out of a gather of [16, 2, 64] from 2 ranks: a byte for each element; MXFP8 adds 4 bytes of scales a token (two,
# padded to four), and gathers a gradient along rows and along columns.
_BYTES, _SCALED, _BOTH = (2048, 4096), (2176, 4352), (4352, 8704)


@pytest.mark.parametrize(
    ("recipe", "forward", "gradient", "maxima"),
    [
        ("delayed", _BYTES, _BYTES, 0),
        ("tensorwise", _BYTES, _BYTES, 4),
        ("mxfp8", _SCALED, _BOTH, 0),
    ],
)
def test_fp8_gathers_bytes(
    tiny: Callable[..., Job],
    counts: Callable[..., Any],
    recipe: str,
    forward: tuple[int, int],
    gradient: tuple[int, int],
    maxima: int,
) -> None:
    """Four gathers a layer and direction; embedding, output layer, loss and reductions stay as they are."""
    found = counts(tiny(fp8="hybrid", fp8_recipe=recipe))
    plain = counts(tiny())
    kept = {key: number for key, number in plain.items() if key[0] != "all_gather"}
    expected: Counter[Any] = Counter(kept)
    expected["all_gather", "bfloat16", SHARD, WHOLE, "forward"] = 1
    expected["all_gather", "bfloat16", SHARD, WHOLE, "backward"] = 2
    expected["all_gather", "uint8", *forward, "forward"] = 4
    expected["all_gather", "uint8", *forward, "backward"] += 4
    expected["all_gather", "uint8", *gradient, "backward"] += 4
    if maxima:
        expected["all_reduce", "float32", 1, 1, "forward"] = maxima
        expected["all_reduce", "float32", 1, 1, "backward"] = maxima
    assert found == expected


def test_fp8_without_sequence_parallelism_changes_nothing(tiny: Callable[..., Job], counts: Callable[..., Any]) -> None:
    assert counts(tiny(fp8="hybrid", sequence_parallel=False)) == counts(tiny(sequence_parallel=False))


def test_layers_that_stay_in_bf16(tiny: Callable[..., Job], counts: Callable[..., Any]) -> None:
    """Of 6 layers the first and the last two: 3 * 2 gathers forward in bf16 (and the output layer's), 3 * 2 in bytes."""
    options = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True, "num_layers": 6}
    found = counts(tiny(**options, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2))
    assert found["all_gather", "bfloat16", SHARD, WHOLE, "forward"] == 3 * 2 + 1
    assert found["all_gather", "uint8", SHARD, WHOLE, "forward"] == 3 * 2
    assert found["all_gather", "bfloat16", SHARD, WHOLE, "backward"] == 3 * 4 + 2
    assert found["all_gather", "uint8", SHARD, WHOLE, "backward"] == 3 * 4
    assert found["all_reduce", "float32", 1, 1, "forward"] == 3 * 2
    full = counts(tiny(**options, **_FULL, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2))
    assert full["all_gather", "bfloat16", SHARD, WHOLE, "recompute"] == 3 * 2
    assert full["all_gather", "uint8", SHARD, WHOLE, "recompute"] == 3 * 2


def test_fp8_gathers_of_a_shared_expert(tiny: Callable[..., Job], rows: Callable[..., Any]) -> None:
    """With overlap its input is gathered without TransformerEngine."""
    job = tiny(fp8="hybrid", **_SHARED)
    (row,) = rows(job, phase="forward", component="shared expert.fc1")
    assert (row.dtype, row.in_elems) == ("uint8", 2048)
    (row,) = rows(
        tiny(fp8="hybrid", **_SHARED, moe_shared_expert_overlap=True), phase="forward", component="shared expert.fc1"
    )
    assert (row.dtype, row.in_elems) == ("bfloat16", 2048)


@pytest.mark.parametrize(("option", "role", "size"), [(False, "tp_dp_cp", 4), (True, "tp_cp", 2)])
def test_maxima_of_delayed_scaling(tiny: Callable[..., Job], option: bool, role: str, size: int) -> None:
    """Two layers of four linears: three tensors each forward, two backward; once a micro-batch and direction."""
    job = tiny(world_size=4, num_microbatches=3, fp8="hybrid", tp_only_amax_red=option)
    found = [
        (row.phase, row.role, row.group_size, row.in_elems, row.calls, row.evidence.kind)
        for row in expect.expected(job, 0).calls
        if row.component == "fp8 maxima"
    ]
    assert found == [("forward", role, size, 24, 3, "inferred"), ("backward", role, size, 16, 3, "inferred")]
    one = tiny(world_size=1, tensor_model_parallel_size=1, fp8="hybrid")
    assert not [row for row in expect.expected(one, 0).calls if row.component == "fp8 maxima"]


def test_maxima_that_cannot_be_counted_are_unknown(tiny: Callable[..., Job]) -> None:
    for options in (_EXPERTS, _MTP, _MLA, _FULL):
        entries = expect.expected(tiny(fp8="hybrid", **options), 0).not_modelled
        (gap,) = [entry for entry in entries if entry.what == "fp8 maxima of this model"]
        assert (gap.roles, gap.ops) == (("tp_dp_cp", "tp_cp"), ("all_reduce",))
    for options in ({}, {"fp8_recipe": "mxfp8", **_MTP}):
        entries = expect.expected(tiny(fp8="hybrid", **options), 0).not_modelled
        assert "fp8 maxima of this model" not in [entry.what for entry in entries]


# -- userbuffers -----------------------------------------------------------------------------------------------------


def _moved(found: list[Any]) -> set[tuple[str, str, str]]:
    """Component, operation and phase of the calls that userbuffers carry."""
    assert {row.transport for row in found} <= {"", "userbuffers"}
    return {(row.component, row.op, row.phase) for row in found if row.transport}


_AG_FORWARD = {(name, "all_gather", "forward") for name in ("attention.qkv", "mlp.fc1")}
_RS_FORWARD = {(name, "reduce_scatter", "forward") for name in ("attention.proj", "mlp.fc2")}
_AG_BACKWARD = {(name, "all_gather", "backward") for name in ("attention.proj", "mlp.fc2")}
_AGAIN = {(f"{name} input re-gather", "all_gather", "backward") for name in ("attention.qkv", "mlp.fc1")}
_RS_BACKWARD = {(name, "reduce_scatter", "backward") for name in ("attention.qkv", "mlp.fc1")}
_ALL = _AG_FORWARD | _RS_FORWARD | _AG_BACKWARD | _AGAIN | _RS_BACKWARD


@pytest.mark.parametrize(
    ("options", "moved"),
    [
        ({}, _ALL),
        ({"tp_comm_overlap_ag": False}, _ALL - _AG_FORWARD - _AG_BACKWARD),
        ({"tp_comm_overlap_rs": False}, _ALL - _RS_FORWARD),
        ({"tp_comm_bulk_dgrad": False}, _ALL - _AGAIN),
        ({"tp_comm_bulk_wgrad": False}, _ALL - _RS_BACKWARD),
        ({"tp_comm_overlap_rs_dgrad": True, "tp_comm_bulk_wgrad": False, "tp_comm_bulk_dgrad": False}, _ALL - _AGAIN),
        ({"tp_comm_overlap_rs_dgrad": True}, _ALL - _AGAIN),
        ({"tp_comm_overlap_disable_qkv": True}, _ALL - {("attention.qkv", "all_gather", "forward")}),
        ({"tp_comm_overlap_disable_fc1": True}, _ALL - {("mlp.fc1", "all_gather", "forward")}),
        ({"transformer_impl": "local"}, set()),
    ],
)
def test_userbuffers(
    tiny: Callable[..., Job], rows: Callable[..., Any], options: dict[str, Any], moved: set[tuple[str, str, str]]
) -> None:
    """Calls of layers leave torch.distributed, with their sizes and counts; embedding, output layer, loss stay."""
    if options.get("transformer_impl") == "local":
        job = tiny(tp_comm_overlap=False, **options)
    else:
        job = tiny(tp_comm_overlap=True, **options)
    found = rows(job)
    assert _moved(found) == moved
    sizes = Counter({(row.component, row.op, row.phase, row.in_elems): row.calls for row in found})
    assert sizes == Counter({(row.component, row.op, row.phase, row.in_elems): row.calls for row in rows(tiny())})


def test_userbuffers_gather_only_with_gradients(tiny: Callable[..., Job], rows: Callable[..., Any]) -> None:
    """The first pass of a checkpoint and an evaluation run without: their gathers stay, what is repeated moves."""
    gathers = [
        (row.phase, row.transport, row.calls)
        for row in rows(tiny(tp_comm_overlap=True, num_layers=4, **{**_FULL, "recompute_method": "block"}))
        if row.component == "attention.qkv" and row.op == "all_gather"
    ]
    assert gathers == [("forward", "userbuffers", 3), ("forward", "", 1), ("recompute", "userbuffers", 1)]
    evaluated = rows(tiny(tp_comm_overlap=True, forward_only=True))
    assert _moved(evaluated) == _RS_FORWARD
    mlp = tiny(tp_comm_overlap=True, recompute_granularity="selective", recompute_modules=("mlp",))
    assert [row.transport for row in rows(mlp, phase="forward", component="mlp.fc1")] == [""]


def test_shared_expert_in_userbuffers(tiny: Callable[..., Job], rows: Callable[..., Any]) -> None:
    """Its own linears use them, without gradients too; with moe_shared_expert_overlap the code around them communicates."""
    options = {"tp_comm_overlap": True, **_SHARED}
    moved = {key for key in _moved(rows(tiny(**options))) if key[0].startswith("shared expert")}
    shared = {(component.replace("mlp", "shared expert"), op, phase) for component, op, phase in _ALL}
    assert moved == {key for key in shared if key[0].startswith("shared expert")}
    apart = _moved(rows(tiny(**options, moe_shared_expert_overlap=True)))
    assert not [key for key in apart if key[0].startswith("shared expert")]
    recomputed = tiny(**options, recompute_granularity="selective", recompute_modules=("moe",))
    gathers = rows(recomputed, phase="forward", component="shared expert.fc1")
    assert [row.transport for row in gathers] == ["userbuffers"]


def test_fp8_in_userbuffers(tiny: Callable[..., Job], rows: Callable[..., Any]) -> None:
    (row,) = rows(tiny(tp_comm_overlap=True, fp8="hybrid"), phase="forward", component="attention.qkv")
    assert (row.dtype, row.transport, row.in_elems) == ("uint8", "userbuffers", SHARD)
    (row,) = rows(tiny(tp_comm_overlap=True, fp8="hybrid"), phase="forward", component="attention.proj")
    assert (row.dtype, row.transport) == ("bfloat16", "userbuffers")


# -- gathers that wait for the flush ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "late"), [(0, 6), (4, 4), (9, 6)])
def test_deferred_embedding_gradient(tiny: Callable[..., Job], rows: Callable[..., Any], limit: int, late: int) -> None:
    job = tiny(
        world_size=4,
        pipeline_model_parallel_size=2,
        num_microbatches=6,
        defer_embedding_wgrad_compute=True,
        wgrad_deferral_limit=limit,
        gradient_accumulation_fusion=True,
    )
    found = {(row.phase, row.op): row.calls for row in rows(job, 2, component="output layer input re-gather")}
    expected = {("other", "all_gather"): late, ("backward", "all_gather"): 6 - late}
    assert found == {key: number for key, number in expected.items() if number}
    assert not rows(job, 0, component="output layer input re-gather")


# -- closed forms over layouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "cp", "pp", "layers", "every", "micro_batches"),
    [(2, 1, 2, 8, 2, 4), (4, 2, 1, 6, 3, 1), (8, 1, 4, 16, 4, 8), (2, 4, 2, 12, 1, 3), (16, 1, 1, 5, 2, 2)],
)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_closed_forms_of_layouts(
    document_job: Callable[..., Job],
    rows: Callable[..., Any],
    tp: int,
    cp: int,
    pp: int,
    layers: int,
    every: int,
    micro_batches: int,
    sequence_parallel: bool,
) -> None:
    """Section 2.11: M A (10 n_d + 5 n_m + 2 [first] + 3 [last]), without SP 2 M A (4 n + [first] + [last]), off rank."""
    job = document_job(
        world_size=tp * cp * pp,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        num_layers=layers,
        num_microbatches=micro_batches,
        sequence_parallel=sequence_parallel,
        **({"num_experts": 8, "moe_layer_freq": every} if sequence_parallel else {}),
    )
    one = (tp - 1) * 8192 // (cp * tp) * 2 * 8192 * 2
    for stage in range(pp):
        held = range(stage * layers // pp, (stage + 1) * layers // pp)
        experts = sum(layer % every == 0 for layer in held)
        first, last = stage == 0, stage == pp - 1
        dense = len(held) - experts
        expected = 10 * dense + 5 * experts + 2 * first + 3 * last
        if not sequence_parallel:
            expected = 2 * (4 * len(held) + first + last)
        found = sum(row.off_rank_bytes * row.calls for row in rows(job, stage * tp * cp) if row.dtype == "bfloat16")
        assert found == micro_batches * one * expected


def test_waiting_differently_changes_nothing(tiny: Callable[..., Job], counts: Callable[..., Any]) -> None:
    assert counts(tiny(async_tensor_model_parallel_allreduce=False)) == counts(tiny())


# -- flags without a rule --------------------------------------------------------------------------------------------


def _unknown(job: Job, rank: int = 0) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Phases and operations by flag, for entries of this chapter that touch the tensor-parallel group."""
    place = Place(job, job.layout.stage(rank), versions.parse(job.megatron_core_version or ""))
    entries = tensor.CHAPTER.not_modelled(place)
    return {entry.what: (entry.phases, entry.ops) for entry in entries if "tp" in entry.roles}


def test_nothing_is_unknown_of_a_plain_job(tiny: Callable[..., Job]) -> None:
    assert _unknown(tiny()) == {}


_PASSES, _EVERY = ("forward", "backward", "recompute"), ((), ())


@pytest.mark.parametrize(
    ("options", "gap", "reach"),
    [
        ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, "fp8 recipe without a rule", (_PASSES, ("all_gather",))),
        ({"fp4": "e2m1"}, "fp4", (_PASSES, ("all_gather", "all_reduce"))),
        ({"variable_seq_lengths": True}, "variable_seq_lengths", _EVERY),
        ({"rampup_batch_size": (2, 2, 100)}, "rampup_batch_size", _EVERY),
        ({"decoder_seq_length": 16}, "decoder_seq_length", _EVERY),
        ({"fp32_residual_connection": True}, "fp32_residual_connection", (_PASSES, ())),
        ({"experimental_attention_variant": "dsa"}, "experimental_attention_variant", _EVERY),
        ({"use_megatron_fsdp": True}, "use_megatron_fsdp", (("other",), ("all_reduce",))),
        ({"use_torch_fsdp2": True}, "use_torch_fsdp2", (("other",), ("all_reduce",))),
        ({"extra": {"hybrid_override_pattern": "M*M*"}}, "hybrid_override_pattern", _EVERY),
        ({"extra": {"gtp_weight_remat_size": 2}}, "gtp_weight_remat_size", _EVERY),
        ({"extra": {"tensor_parallel_num_weight_shards": 4}}, "tensor_parallel_num_weight_shards", _EVERY),
        ({"extra": {"use_kitchen": True}}, "use_kitchen", (_PASSES, ("all_gather",))),
        ({"extra": {"mla_down_proj_fusion": True}}, "mla_down_proj_fusion", _EVERY),
        ({"extra": {"mtp_detach_heads": True}}, "mtp_detach_heads", (("backward",), ())),
        (
            {"tp_comm_overlap": True, **_MLA},
            "tp_comm_overlap with multi_latent_attention",
            (_PASSES, ("all_gather", "reduce_scatter")),
        ),
        (
            {"tp_comm_overlap": True, **_MTP},
            "tp_comm_overlap with mtp_num_layers",
            (_PASSES, ("all_gather", "reduce_scatter")),
        ),
    ],
)
def test_flag_without_a_rule_is_named(
    tiny: Callable[..., Job], options: dict[str, Any], gap: str, reach: tuple[tuple[str, ...], tuple[str, ...]]
) -> None:
    assert _unknown(tiny(**options)) == {gap: reach}


@pytest.mark.parametrize(
    "options",
    [
        {"extra": {"hybrid_override_pattern": None}},
        {"extra": {"hybrid_override_pattern": "None"}},
        {"extra": {"gtp_weight_remat_size": 1}},
        {"extra": {"tensor_parallel_num_weight_shards": 2}},
        {"decoder_seq_length": 32},
        {"sft": True, "micro_batch_size": 1},
    ],
)
def test_flag_that_is_off_is_not_named(tiny: Callable[..., Job], options: dict[str, Any]) -> None:
    assert _unknown(tiny(**options)) == {}


def test_flags_of_the_group_without_a_group(tiny: Callable[..., Job]) -> None:
    one_rank = {"world_size": 1, "tensor_model_parallel_size": 1}
    assert _unknown(tiny(fp4="e2m1", **one_rank)) == {}
    assert _unknown(tiny(variable_seq_lengths=True, **one_rank)) == {"variable_seq_lengths": _EVERY}


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


@pytest.mark.parametrize(
    ("options", "version", "words"),
    [
        (_MLA, "0.10.0", "multi_latent_attention in megatron-core <=0.10"),
        (_MTP, "0.11.0", "mtp_num_layers in megatron-core <=0.11"),
    ],
)
def test_models_of_older_releases_are_unknown(
    tiny: Callable[..., Job], options: dict[str, Any], version: str, words: str
) -> None:
    assert words in _unknown(tiny(**options, megatron_core_version=version))
    assert _unknown(tiny(**options, megatron_core_version="0.12.0")) == {}


def test_words_for_releases(tiny: Callable[..., Job], rows: Callable[..., Any]) -> None:
    job = tiny(**{**_RUN_BASE, **_MTP}, world_size=4, context_parallel_size=2, megatron_core_version="0.19.0")
    found = {row.component: row.versions for row in expect.expected(job, 0).calls if row.rule.startswith("tensor")}
    assert found["prediction: shift of tokens"] == ">=0.14"
    assert found["prediction accepted: its token"] == ">=0.19"
    assert found["prediction.eh_proj"] == ""
    (old, *_) = rows(
        tiny(**_MTP, megatron_core_version="0.12.0"), phase="backward", component="prediction.eh_proj output"
    )[::-1]
    assert (old.op, old.versions) == ("reduce_scatter", "<=0.12")


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
