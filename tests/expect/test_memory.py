"""Memory of a rank: recorded buffers, tensors that real layers keep, Megatron's own estimate, closed formulas, options."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from traceanalyzer.errors import JobError
from traceanalyzer.expect import memory
from traceanalyzer.job import Job

# -- recorded --------------------------------------------------------------------------------------------------------


def test_recorded_buffers(recording: Any) -> None:
    """Parameters and gradient buffers of every recorded rank, exact, dense and experts apart, padding included."""
    job = recording.job
    size = {"torch.bfloat16": 2, "torch.float32": 4}
    described = json.loads(recording.path.with_name(f"{recording.name}.json").read_text(encoding="utf-8"))
    for one in described["per_rank"]:
        found = memory.estimate(job, one["rank"])
        assert found.not_counted[: len(memory.NOT_COUNTED)] == memory.NOT_COUNTED
        if job.use_megatron_fsdp or job.use_torch_fsdp2:
            assert not one.get("buffers")
            width = 2 if job.bf16 else 4
            assert found.total("parameters") == width * -(-one["params"] // 2)
            continue
        for expert in (False, True):
            buffers = [part for part in one["buffers"] if part["group"].startswith("EXPERT") == expert]
            assert found.total("gradients", expert) == sum(part["numel"] * size[part["grad_dtype"]] for part in buffers)
            held = one["expert_params"] if expert else one["params"] - one["expert_params"]
            elements = sum(part["numel"] for part in buffers) if job.use_distributed_optimizer else held
            assert found.total("parameters", expert) == elements * (2 if job.bf16 else 4)


TINY: dict[str, Any] = {
    "sequence_parallel": True,
    "tensor_model_parallel_size": 2,
    "micro_batch_size": 3,
    "seq_length": 64,
    "num_layers": 1,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "swiglu": True,
    "normalization": "RMSNorm",
    "padded_vocab_size": 256,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "transformer_impl": "local",
}
EXPERTS: dict[str, Any] = {
    "world_size": 4,
    "num_experts": 4,
    "moe_ffn_hidden_size": 256,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
}


@pytest.mark.parametrize(("rank", "dense"), [(0, 52_608), (4, 52_736)])
def test_padded_buffers(tiny: Callable[..., Job], rank: int, dense: int) -> None:
    """megatron-core 0.16.1 run on a fake process group: 52,128 and 52,200 dense elements, 86,400 of experts.

    --world 8 --tp 2 --sp --pp 2 --ep 2 --etp 1 --experts 4 --moe-freq 2 --dist-opt 1 --hidden 72 --ffn 200
    """
    job = tiny(
        **TINY
        | EXPERTS
        | {
            "world_size": 8,
            "pipeline_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
            "num_layers": 4,
            "moe_layer_freq": (0, 1, 0, 1),
            "hidden_size": 72,
            "ffn_hidden_size": 200,
            "moe_ffn_hidden_size": 200,
            "use_distributed_optimizer": True,
        }
    )
    found = memory.estimate(job, rank)
    assert (found.total("gradients", False), found.total("gradients", True)) == (4 * dense, 4 * 86_400)
    assert (found.total("parameters", False), found.total("parameters", True)) == (2 * dense, 2 * 86_400)
    assert found.total("optimizer", False) == 12 * dense // 2  # DP 2
    assert found.total("optimizer", True) == 12 * 86_400 // 2  # EDP 2


# -- what real layers keep -------------------------------------------------------------------------------------------

# megatron-core 0.16.1 run on a fake process group, one micro-batch of 3 sequences of 64 tokens, hidden 64, 1 layer, TP2, SP,
# bf16, local layers: bytes of every storage that the forward pass saved for the backward pass. Left out: norms (a stand-in
# that keeps fp32), rotary tables, masks, and what fused activation and softmax kernels do not keep.
KEPT: dict[str, int] = {
    "attention input": 12_288,
    "attention output": 12_288,
    "query, key, value": 12_288 + 12_288 + 36_864 // 3,
    "rest of qkv output": 2 * 36_864 // 3,
    "attention softmax": 49_152,
    "token ids": 1_536,
    "output layer input": 12_288,
    "logits": 98_304,
}
DENSE = {"mlp input": 12_288, "mlp.fc1 output": 98_304, "mlp.fc2 input": 49_152}


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, {**KEPT, **DENSE}),
        (
            {**EXPERTS, "moe_shared_expert_intermediate_size": 80},
            {
                **KEPT,
                "mlp input of experts": 12_288,
                "router": 1_536 + 768 + 384 + 768 + 1_536,
                "experts.fc1 input": 49_152,
                "experts.fc1 output": 2 * 98_304,
                "experts.fc2 input": 2 * 49_152,
                "shared expert.fc1 output": 30_720,
                "shared expert.fc2 input": 15_360,
            },
        ),
        (
            {**EXPERTS, "expert_tensor_parallel_size": 1, "moe_router_dtype": "fp32"},
            {
                **KEPT,
                "mlp input of experts": 12_288,
                "router": 1_536 + 768 + 384 + 1_536 + 1_536,
                "experts.fc1 input": 24_576,
                "experts.fc1 output": 2 * 98_304,
                "experts.fc2 input": 2 * 49_152,
            },
        ),
        # core attention and MLP recomputed
        (
            {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")},
            {**{name: size for name, size in KEPT.items() if name != "attention softmax"}, "mlp input": 12_288},
        ),
    ],
)
def test_saved_tensors(tiny: Callable[..., Job], options: dict[str, Any], kept: dict[str, int]) -> None:
    found = memory.estimate(tiny(**{**TINY, **options}), 0)
    parts = {part.name: part.bytes.value for part in found.parts if part.kind == "activations"}
    norms = {"attention norm input", "mlp norm input", "final norm input"}
    assert {parts.pop(name) for name in norms} == {12_288}
    assert parts == kept


def test_saved_tensors_of_latent_attention(tiny: Callable[..., Job]) -> None:
    """As above in fp32, with whole down projections; numbers of the latents: down outputs and what the norms give."""
    job = tiny(
        **{**TINY, "transformer_impl": "transformer_engine"},
        bf16=False,
        multi_latent_attention=True,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=12,
        qk_layernorm=True,
    )
    parts = {part.name: part.bytes.value for part in memory.estimate(job, 0).parts}
    assert parts["query latent"] == 9_216 + 9_216
    assert parts["key and value latent"] == 9_216 + 6_144
    assert parts["query, key, value"] == 36_864 + 36_864 + 18_432
    assert parts["attention output"] == 18_432
    assert parts["mlp.fc1 output"] == 196_608


def test_checkpoints(tiny: Callable[..., Job]) -> None:
    """Full recompute of 4 layers: 12,288 bytes for each, run; one layer comes back in the backward pass."""
    options = {**TINY, "num_layers": 4, "recompute_granularity": "full", "recompute_method": "uniform"}
    one = memory.estimate(tiny(**TINY), 0)
    of_layer = sum(
        part.bytes.value for part in one.parts if part.kind == "activations" and part.bytes.symbols.startswith("held")
    )
    for size, checkpoints, back in ((1, 4, 1), (2, 2, 2), (3, 2, 3), (4, 1, 4)):
        found = memory.estimate(tiny(**options, recompute_num_layers=size), 0)
        parts = {part.name: part.bytes for part in found.parts}
        assert parts["checkpoints"].value == checkpoints * 12_288
        held = sum(part.bytes.value for part in found.parts if part.bytes.symbols.startswith("held"))
        assert held == back * of_layer
    options |= {"recompute_method": "block", "recompute_num_layers": 3}
    found = memory.estimate(tiny(**options), 0)
    assert {part.name: part.bytes for part in found.parts}["checkpoints"].value == 3 * 12_288
    # the fourth layer whole, and one of the three at a time
    assert sum(part.bytes.value for part in found.parts if part.bytes.symbols.startswith("held")) == 2 * of_layer


# -- closed formulas -------------------------------------------------------------------------------------------------

# Layer of the paper: MHA, F = 4 H, no gate, dropout, learned positions.
PAPER: dict[str, Any] = {
    **TINY,
    "swiglu": False,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "position_embedding_type": "learned_absolute",
    "max_position_embeddings": 64,
}


def _layer(job: Job) -> int:
    parts = memory.estimate(job, 0).parts
    return sum(part.bytes.value for part in parts if part.bytes.symbols.startswith("held"))


def test_layer_of_the_paper(tiny: Callable[..., Job]) -> None:
    """arXiv 2205.05198, table 2: s*b*h*(34 + 5*a*s/h)/t, (10 + 24/t + 5*a*s/(h*t)) without SP, 34/t recomputed."""
    s, b, h, a, t = 64, 3, 64, 4, 2
    assert _layer(tiny(**PAPER)) * t == s * b * h * 34 + 5 * a * s * s * b
    without = {**PAPER, "sequence_parallel": False}
    assert _layer(tiny(**without)) * t == s * b * h * (10 * t + 24) + 5 * a * s * s * b
    selective = {**PAPER, "recompute_granularity": "selective"}
    assert _layer(tiny(**selective)) * t == s * b * h * 34
    wide = {**selective, "ffn_hidden_size": 448}
    assert _layer(tiny(**wide)) * t == s * b * h * (18 + 4 * 7)  # F = 7 H
    fused = {**PAPER, "transformer_impl": "transformer_engine"}
    assert _layer(tiny(**fused)) * t == s * b * h * 34 + 4 * s * b * a
    # context parallelism divides the sequence
    cut = {**fused, "context_parallel_size": 2, "world_size": 4}
    assert _layer(tiny(**cut)) * 2 == _layer(tiny(**fused))


@pytest.mark.parametrize(("stages", "microbatches", "held"), [(4, 8, (4, 3, 2, 1)), (4, 2, (2, 2, 2, 1)), (1, 8, (1,))])
def test_micro_batches_in_flight(
    tiny: Callable[..., Job], stages: int, microbatches: int, held: tuple[int, ...]
) -> None:
    job = tiny(
        **TINY
        | {
            "num_layers": 4,
            "pipeline_model_parallel_size": stages,
            "world_size": 2 * stages,
            "num_microbatches": microbatches,
        }
    )
    for stage, number in enumerate(held):
        parts = {part.name: part.bytes for part in memory.estimate(job, 2 * stage).parts}
        assert parts["attention input"].value == number * (4 // stages) * 12_288
        assert ("logits" in parts) == (stage == stages - 1)
        assert ("gradient received" in parts) == (stage < stages - 1)
        assert ("gradient to send" in parts) == (stage > 0)
        if stage == 0:
            assert parts["token ids"].value == number * 1_536


def test_interleaving_holds_more(tiny: Callable[..., Job]) -> None:
    """Errata E10: PP 4, two chunks: 11 chunks in flight on the first stage, 5.5 micro-batches, 1.375 times 4."""
    sizes = {"num_layers": 8, "pipeline_model_parallel_size": 4, "world_size": 8, "num_microbatches": 8}
    plain = _layer(tiny(**TINY | sizes))
    interleaved = _layer(tiny(**TINY | sizes, virtual_pipeline_model_parallel_size=2))
    assert Fraction(interleaved, plain) == Fraction(11, 8)


def test_uneven_chunks_count_where_most_is_held(tiny: Callable[..., Job]) -> None:
    """Two layers in the first chunk, none in the second (PP 2, groups of 2, M 4).

    Stage 0 holds most after forward passes 0 to 3 of chunk 0 and a backward pass of chunk 1: four times two layers.
    """
    sizes = {"num_layers": 4, "pipeline_model_parallel_size": 2, "world_size": 4, "num_microbatches": 4}
    job = tiny(**TINY | sizes, pipeline_model_parallel_layout="Ett|tt||L")
    parts = {part.name: part.bytes for part in memory.estimate(job, 0).parts}
    assert parts["attention input"].value == 4 * 2 * 12_288
    assert parts["token ids"].value == 4 * 1_536


# -- the reference's and the document's numbers ----------------------------------------------------------------------


def _large(document_job: Callable[..., Job], **changes: Any) -> Job:
    options: dict[str, Any] = {
        "world_size": 1024,
        "context_parallel_size": 2,
        "pipeline_model_parallel_size": 4,
        "expert_model_parallel_size": 8,
        "num_experts": 64,
        "moe_ffn_hidden_size": 32768,
        "moe_layer_freq": 4,
        "num_microbatches": 8,
        "use_distributed_optimizer": True,
    }
    return document_job(**{**options, **changes})


def test_model_of_the_document(document_job: Callable[..., Job]) -> None:
    """Reference section 5, ETP 4: params 24.8 GB, gradients 49.7, optimizer 0.8 + 12.1 per rank (a middle stage)."""
    found = memory.estimate(_large(document_job), 256)
    assert round(found.total("parameters") / 1e9, 1) == 24.8
    assert round(found.total("gradients") / 1e9, 1) == 49.7
    assert round(found.total("optimizer", False) / 1e9, 1) == 0.8
    assert round(found.total("optimizer", True) / 1e9, 1) == 12.1
    assert found.total("parameters", True) == 2 * 8_053_063_680
    one = memory.estimate(_large(document_job, expert_tensor_parallel_size=1), 256)
    assert one.total("parameters", True) == 2 * 32_212_254_720
    assert one.total("optimizer", True) == 12 * 32_212_254_720 // 32


def test_document_zero_table() -> None:
    """Chapter 5.2: 16 Psi, 4 Psi + 12 Psi/DP, 2 Psi + 14 Psi/DP, 16 Psi/DP; 5.4 (E19); 6.9 (E21)."""
    rows = [memory.document_zero_memory(1, 4, stage) for stage in range(4)]
    assert [row.total for row in rows] == [16, 7, Fraction(11, 2), 4]
    half = Fraction(1, 2)
    assert [row.parameters for row in rows] == [2, 2, 2, half]
    assert [row.gradients for row in rows] == [2, 2, half, half]
    assert [row.optimizer for row in rows] == [12, 3, 3, 3]
    psi = 175 * 10**9
    assert memory.document_zero_memory(psi, 1, 0).total == 2800 * 10**9
    assert memory.document_zero_memory(psi, 4, 3).total == 700 * 10**9
    assert memory.document_zero_memory(psi, 32, 3).total == Fraction(875, 10) * 10**9
    dense, experts = 4_362_076_160, 32_212_254_720
    assert round(float(memory.document_zero_memory(dense + experts, 4, 3).total) / 1e9) == 146
    both = memory.document_zero_memory(dense, 64, 3).total + memory.document_zero_memory(experts, 32, 3).total
    assert round(float(both) / 1e9, 1) == 17.2
    assert memory.document_zero_memory(psi, 4, 1).evidence.kind == "document"


@pytest.mark.parametrize(("dp", "stage", "words"), [(4, 4, "ZeRO stage 4"), (0, 1, "dp=0")])
def test_document_zero_refuses(dp: int, stage: int, words: str) -> None:
    with pytest.raises(JobError, match=words):
        memory.document_zero_memory(1, dp, stage)


# -- how state is shared ---------------------------------------------------------------------------------------------

# 139,840 parameters: RECORDED of test_parameters. Two data-parallel ranks.
MODEL: dict[str, Any] = {**TINY, "num_layers": 4, "num_attention_heads": 4, "world_size": 4}
P = 139_840
FSDP = {"use_megatron_fsdp": True}


@pytest.mark.parametrize(
    ("options", "parameters", "gradients", "optimizer"),
    [
        ({}, 2 * P, 4 * P, 12 * P),
        ({"grad_reduce_in_bf16": True}, 2 * P, 2 * P, 12 * P),
        ({"bf16": False, "fp16": True}, 2 * P, 2 * P, 12 * P),
        ({"bf16": False, "fp16": True, "accumulate_allreduce_grads_in_fp32": True}, 2 * P, 4 * P, 12 * P),
        ({"bf16": False}, 4 * P, 4 * P, 8 * P),
        ({"use_distributed_optimizer": True}, 2 * 139_904, 4 * 139_904, 6 * 139_904),
        ({"use_distributed_optimizer": True, "bf16": False}, 4 * 139_904, 4 * 139_904, 4 * 139_904),
        (
            {"use_distributed_optimizer": True, "ddp_pad_buckets_for_high_nccl_busbw": True},
            2 * 196_608,
            4 * 196_608,
            6 * 196_608,
        ),
        # two ranks, two instances: nothing is divided
        (
            {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2},
            2 * 139_904,
            4 * 139_904,
            12 * 139_904,
        ),
        # context-parallel ranks share like data-parallel ones
        (
            {
                "use_distributed_optimizer": True,
                "world_size": 8,
                "context_parallel_size": 2,
                "transformer_impl": "transformer_engine",
            },
            2 * 139_904,
            4 * 139_904,
            3 * 139_904,
        ),
        ({**FSDP, "data_parallel_sharding_strategy": "no_shard"}, 2 * P, 4 * P, 12 * P),
        ({**FSDP, "data_parallel_sharding_strategy": "optim"}, 2 * P, 4 * P, 6 * P),
        ({**FSDP, "data_parallel_sharding_strategy": "optim_grads"}, 2 * P, 2 * P, 6 * P),
        ({**FSDP, "data_parallel_sharding_strategy": "optim_grads_params"}, P, 2 * P, 6 * P),
        ({"use_torch_fsdp2": True}, P, P, 6 * P),
        ({"optimizer": "sgd"}, 2 * P, 4 * P, 8 * P),
        ({"optimizer": "sgd", "extra": {"sgd_momentum": 0.0}}, 2 * P, 4 * P, 4 * P),
        ({"forward_only": True}, 2 * P, 0, 0),
    ],
)
def test_state(
    tiny: Callable[..., Job], options: dict[str, Any], parameters: int, gradients: int, optimizer: int
) -> None:
    found = memory.estimate(tiny(**MODEL | options), 0)
    assert found.total("parameters") == parameters
    assert found.total("gradients") == gradients
    assert found.total("optimizer") == optimizer
    assert found.total() == sum(found.total(kind) for kind in memory.KINDS)


@pytest.mark.parametrize(
    ("options", "bytes_each"),
    [
        ({}, 2 + 4 + 4),  # half of the main parameter is the parameter itself
        ({"store_param_remainders": False}, 4 + 4 + 4),
        ({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp16"}, 2 + 2 + 2),
        ({"main_params_dtype": "fp16", "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}, 2 + 1 + 1),
        ({"bf16": False, "fp16": True}, 4 + 4 + 4),
    ],
)
def test_precision_aware_optimizer(tiny: Callable[..., Job], options: dict[str, Any], bytes_each: int) -> None:
    precise = {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True}
    found = memory.estimate(tiny(**MODEL | precise | options), 0)
    assert found.total("optimizer") == bytes_each * 139_904 // 2


def test_state_on_the_host(tiny: Callable[..., Job]) -> None:
    offload = {
        "use_distributed_optimizer": True,
        "optimizer_cpu_offload": True,
        "use_precision_aware_optimizer": True,
        "store_param_remainders": False,
    }
    for fraction, on_device in ((1.0, 0), (0.5, 3 * 139_904), (0.0, 6 * 139_904)):
        found = memory.estimate(tiny(**MODEL | offload, optimizer_offload_fraction=fraction), 0)
        assert found.total("optimizer") == on_device
        assert found.total("host") == 6 * 139_904 - on_device
        assert any("optimizer_cpu_offload" in words for words in found.not_counted)


def test_fp8_parameters(tiny: Callable[..., Job]) -> None:
    """Weights of linear layers one byte each: 4 * (24576 + 8192 + 65536 + 32768) / 4 of the 139,840."""
    matrices = 24_576 + 8_192 + 65_536 + 32_768
    options = {"fp8": "e4m3", "fp8_param_gather": True, "transformer_impl": "transformer_engine"}
    found = memory.estimate(tiny(**MODEL | options, use_distributed_optimizer=True), 0)
    parts = {part.name: part.bytes.value for part in found.parts}
    assert parts["fp8 parameters"] == matrices
    # embedding 8192, norms 576, padded to a multiple of 128
    assert parts["parameters"] == 2 * 8_832
    assert any(words.startswith("fp8:") for words in found.not_counted)


def test_experts_have_their_own_replicas(tiny: Callable[..., Job]) -> None:
    """8 ranks, TP 2, EP 2, ETP 1: dense shared by DP 4, experts by EDP 4; with two instances by 2 each."""
    options = {**TINY, **EXPERTS, "world_size": 8, "expert_tensor_parallel_size": 1, "use_distributed_optimizer": True}
    experts = 2 * 3 * 64 * 256
    found = memory.estimate(tiny(**options), 0)
    assert found.total("gradients", True) == 4 * experts
    assert found.total("optimizer", True) == 3 * experts
    found = memory.estimate(tiny(**options, num_distributed_optimizer_instances=2), 0)
    assert found.total("optimizer", True) == 6 * experts
    fsdp = {
        **options,
        "use_distributed_optimizer": False,
        **FSDP,
        "data_parallel_sharding_strategy": "optim_grads_params",
    }
    found = memory.estimate(tiny(**fsdp), 0)
    assert found.total("parameters", True) == experts // 2
    assert found.total("optimizer", True) == 3 * experts
    (gathered,) = [part for part in found.parts if part.name == "gathered parameters"]
    # two layers: attention over TP 2, norms and router whole, two local experts
    layer = (4 * 64 * 64) // 2 + 2 * 64 + 4 * 64 + experts
    assert (gathered.bytes.value, gathered.evidence.kind) == (2 * 2 * layer, "inferred")


@pytest.mark.parametrize(
    ("strategy", "weights", "main", "gradients"),
    [
        ("no_shard", 279_104, 279_104, 279_104),
        ("optim", 279_552, 139_776, 279_552),
        ("optim_grads", 279_552, 139_776, 139_776),
        ("optim_grads_params", 140_352, 140_352, 140_352),
    ],
)
def test_buffers_of_megatron_fsdp(
    tiny: Callable[..., Job], strategy: str, weights: int, main: int, gradients: int
) -> None:
    """megatron-core 0.16.1, two real processes, 279,104 parameters: elements of one rank's buffers, padding included.

    --fsdp megatron --world 2, data_parallel_sharding_strategy as named. The padding (at most 0.6 %) is not counted.
    """
    job = tiny(
        **MODEL | FSDP | {"world_size": 2, "tensor_model_parallel_size": 1, "data_parallel_sharding_strategy": strategy}
    )
    parts = {part.name: part.bytes.value for part in memory.estimate(job, 0).parts}
    for name, elements, width in (
        ("parameters", weights, 2),
        ("main parameters", main, 4),
        ("gradients", gradients, 4),
    ):
        padding = elements - Fraction(parts[name], width)
        assert 0 <= padding <= elements * Fraction(6, 1000)


def test_hybrid_sharding(tiny: Callable[..., Job]) -> None:
    """outer_dp_sharding_strategy=optim: optimizer state also over the instances (Megatron-FSDP, HSDP)."""
    options = {
        **MODEL,
        **FSDP,
        "world_size": 8,
        "num_distributed_optimizer_instances": 2,
        "data_parallel_sharding_strategy": "optim_grads_params",
    }
    inner = memory.estimate(tiny(**options), 0)
    outer = memory.estimate(tiny(**options, outer_dp_sharding_strategy="optim"), 0)
    assert (inner.total("parameters"), inner.total("optimizer")) == (P, 6 * P)
    assert (outer.total("parameters"), outer.total("optimizer")) == (P, 3 * P)


# -- recomputed and other options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "options", "gone"),
    [
        ("core_attn", {}, {"attention softmax"}),
        ("core_attn", {"transformer_impl": "transformer_engine"}, {"softmax statistics"}),
        ("mlp", {}, {"mlp.fc1 output", "mlp.fc2 input"}),
        # the norm is inside the MLP
        ("mlp", {"transformer_impl": "transformer_engine"}, {"mlp input", "mlp.fc1 output", "mlp.fc2 input"}),
        ("layernorm", {}, {"attention input", "mlp input"}),
        ("layernorm", {"transformer_impl": "transformer_engine"}, set()),
        ("layernorm", {**EXPERTS, "transformer_impl": "transformer_engine"}, {"mlp input of experts"}),
        ("moe_act", {**EXPERTS, "moe_grouped_gemm": True}, {"experts.fc2 input"}),
        (
            "moe",
            {**EXPERTS, "moe_shared_expert_intermediate_size": 80},
            {
                "router",
                "experts.fc1 input",
                "experts.fc1 output",
                "experts.fc2 input",
                "shared expert.fc1 output",
                "shared expert.fc2 input",
            },
        ),
        (
            "shared_experts",
            {**EXPERTS, "moe_shared_expert_intermediate_size": 80},
            {"shared expert.fc1 output", "shared expert.fc2 input"},
        ),
    ],
)
def test_selective_recompute(tiny: Callable[..., Job], module: str, options: dict[str, Any], gone: set[str]) -> None:
    before = {part.name for part in memory.estimate(tiny(**{**TINY, **options}), 0).parts}
    recomputed = {"recompute_granularity": "selective", "recompute_modules": (module,)}
    after = {part.name for part in memory.estimate(tiny(**{**TINY, **options, **recomputed}), 0).parts}
    assert (before - after, after - before) == (gone, set())


def test_probabilities_on_the_way_back(tiny: Callable[..., Job]) -> None:
    """Up to 0.12 the result of the experts is kept, to be multiplied by the probabilities."""
    names = [
        {part.name for part in memory.estimate(tiny(**{**TINY, **EXPERTS}, megatron_core_version=version), 0).parts}
        for version in ("0.12.3", "0.13.1")
    ]
    assert names[0] - names[1] == {"experts.fc2 output"}


def test_capacity_bounds_the_rows(tiny: Callable[..., Job]) -> None:
    """96 tokens, top 2 of 4 experts: 48 rows an expert balanced; capacity 0.5 halves them, ETP 1."""
    options = {**TINY, **EXPERTS, "expert_tensor_parallel_size": 1}
    rows = {
        name: memory.estimate(tiny(**options, **more), 0)
        for name, more in {
            "dropless": {},
            "padded": {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True},
            "dropping": {"moe_expert_capacity_factor": 0.5},
            "roomy": {"moe_expert_capacity_factor": 2.0},
        }.items()
    }
    sizes = {
        name: next(part.bytes.value for part in found.parts if part.name == "experts.fc1 input")
        for name, found in rows.items()
    }
    balanced = 192 * 64 * 2
    assert sizes == {"dropless": balanced, "padded": 2 * balanced, "dropping": balanced // 2, "roomy": balanced}
    assert "routing that is not balanced" in rows["dropless"].not_counted
    assert "routing that is not balanced" not in rows["padded"].not_counted


def test_prediction_layers(tiny: Callable[..., Job]) -> None:
    """Two layers of multi-token prediction: two more layers, and three losses instead of one."""
    found = memory.estimate(tiny(**TINY, mtp_num_layers=2), 0)
    parts = {part.name: part.bytes.value for part in found.parts}
    assert parts["attention input"] == 3 * 12_288
    assert parts["logits"] == 3 * 98_304
    assert parts["prediction input"] == 2 * (2 * 2 + 4 * 2) * 96 * 64


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fp8": "e4m3", "transformer_impl": "transformer_engine"}, "fp8: inputs"),
        ({"grad_reduce_in_bf16": True}, "fp32 copies of the gradients"),
        ({"optimizer": "muon"}, "optimizer=muon"),
        ({"forward_only": True}, "forward_only"),
        ({"fine_grained_activation_offloading": True}, "fine_grained_activation_offloading"),
        ({"extra": {"use_legacy_models": True}}, "use_legacy_models: its parameters"),
        ({"cross_entropy_loss_fusion": True}, "cross_entropy_loss_fusion"),
        ({**EXPERTS, "moe_token_dispatcher_type": "flex"}, "buffers of the dispatcher"),
    ],
)
def test_what_is_not_counted(tiny: Callable[..., Job], options: dict[str, Any], words: str) -> None:
    plain = memory.estimate(tiny(**TINY), 0).not_counted
    found = memory.estimate(tiny(**{**TINY, **options}), 0).not_counted
    assert not any(words in reason for reason in plain)
    assert any(words in reason for reason in found)


def test_evaluation_keeps_no_activations(tiny: Callable[..., Job]) -> None:
    found = memory.estimate(tiny(**TINY, forward_only=True), 0)
    assert found.total("activations") == found.total("buffers") == 0
    assert found.total() == found.total("parameters")


def test_residual_in_fp32(tiny: Callable[..., Job]) -> None:
    parts = {
        part.name: part.bytes.value for part in memory.estimate(tiny(**TINY, fp32_residual_connection=True), 0).parts
    }
    assert (parts["attention norm input"], parts["attention input"]) == (24_576, 12_288)


@pytest.mark.parametrize("name", ["seq_length", "hidden_size", "padded_vocab_size", "micro_batch_size", "num_layers"])
def test_unknown_sizes(tiny: Callable[..., Job], name: str) -> None:
    with pytest.raises(JobError, match=name):
        memory.estimate(tiny(**{**TINY, name: None}), 0)


def test_rank_outside_the_world(tiny: Callable[..., Job]) -> None:
    with pytest.raises(JobError):
        memory.estimate(tiny(**TINY), 2)


def test_many_ranks_at_once(document_job: Callable[..., Job]) -> None:
    """Ranks of a stage are worked out once: a job of 16,384 answers for all within seconds."""
    job = _large(document_job, world_size=16_384)
    start = time.perf_counter()
    totals = {memory.estimate(job, rank).total() for rank in range(16_384)}
    assert len(totals) == 4
    assert time.perf_counter() - start < 5


# -- Megatron's own estimate -----------------------------------------------------------------------------------------

REPORTED: dict[str, Any] = {
    "framework": "megatron-lm",
    "world_size": 64,
    "tensor_model_parallel_size": 4,
    "pipeline_model_parallel_size": 4,
    "num_microbatches": 8,
    "seq_length": 4096,
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 16384,
    "num_attention_heads": 32,
    "padded_vocab_size": 50304,
    "use_distributed_optimizer": True,
    "recompute_granularity": "selective",
}
ONE_STAGE = {"pipeline_model_parallel_size": 1, "world_size": 8}


# Megatron-LM core_v0.16.1, training/theoretical_memory_usage.py executed: report_theoretical_memory prints MiB, before that
# what the functions it adds up return in bytes. In a folder with that file, and a utils.py with print_rank_0 = print:
# python -c "from training import theoretical_memory_usage as t; t.report_theoretical_memory(args, num_microbatches=8)"
@pytest.mark.parametrize(
    ("options", "weights", "activations", "printed"),
    [
        ({}, 4_087_779_840, 9_160_425_472, (3898.41, 8736.06, 12634.47)),
        (
            {
                "swiglu": True,
                "normalization": "RMSNorm",
                "group_query_attention": True,
                "num_query_groups": 8,
                "ffn_hidden_size": 14336,
                "untie_embeddings_and_output_weights": True,
                "use_distributed_optimizer": False,
                "recompute_granularity": None,
            },
            8_779_239_936,
            Fraction("18180066508.8"),
            (8372.54, 17337.86, 25710.40),
        ),
        (
            {**ONE_STAGE, "untie_embeddings_and_output_weights": True},
            20_565_221_376,
            9_580_855_296,
            (19612.52, 9137.02, 28749.54),
        ),
        (
            {**ONE_STAGE, "tensor_model_parallel_size": 1, "sequence_parallel": False, "recompute_granularity": None},
            49_867_714_560,
            Fraction("39303738163.2"),
            (47557.56, 37482.97, 85040.52),
        ),
        (
            {"virtual_pipeline_model_parallel_size": 2, "num_microbatches": 4},
            4_087_779_840,
            12_595_585_024,
            (3898.41, 12012.09, 15910.50),
        ),
        ({"num_microbatches": 2, "kv_channels": 192}, 4_691_759_616, 4_580_212_736, (4474.41, 4368.03, 8842.44)),
        (
            {
                "num_experts": 16,
                "moe_ffn_hidden_size": 2048,
                "moe_layer_freq": 2,
                "moe_shared_expert_intermediate_size": 1024,
                "expert_model_parallel_size": 4,
                "expert_tensor_parallel_size": 1,
                "swiglu": True,
                "normalization": "RMSNorm",
                "mtp_num_layers": 1,
            },
            7_824_773_376,
            9_160_425_472,
            (7462.29, 8736.06, 16198.35),
        ),
        (
            {
                "multi_latent_attention": True,
                "q_lora_rank": 1536,
                "kv_lora_rank": 512,
                "num_experts": 8,
                "moe_layer_freq": (0,) * 4 + (1,) * 28,
                "moe_ffn_hidden_size": 1024,
                "expert_tensor_parallel_size": 1,
                "normalization": "RMSNorm",
                "recompute_granularity": None,
            },
            2_525_812_992,
            Fraction("18180066508.8"),
            (2408.80, 17337.86, 19746.67),
        ),
        (
            {
                "multi_latent_attention": True,
                "kv_lora_rank": 512,
                "recompute_granularity": None,
                "mtp_num_layers": 2,
                "num_microbatches": 2,
            },
            4_575_071_232,
            Fraction("9090033254.4"),
            (4363.13, 8668.93, 13032.06),
        ),
    ],
)
def test_what_megatron_prints(
    tiny: Callable[..., Job],
    options: dict[str, Any],
    weights: int,
    activations: int | Fraction,
    printed: tuple[float, float, float],
) -> None:
    found = memory.megatron_estimate(tiny(**REPORTED | options))
    assert found is not None
    assert found.weights_and_optimizer == weights
    assert found.activations == activations
    megabytes = (found.weights_and_optimizer, found.activations, found.total)
    assert tuple(round(float(size / 2**20), 2) for size in megabytes) == printed


def test_other_stages_of_megatrons_estimate(tiny: Callable[..., Job]) -> None:
    """6 + 12/4 bytes for a quarter of the layers: 32 * (12 * 4096**2 + 4 * 4096) + 2 * 4096 over PP 4 and TP 4."""
    found = memory.megatron_estimate(tiny(**REPORTED))
    assert found is not None
    assert found.elsewhere == Fraction(32 * (12 * 4096**2 + 4 * 4096) + 2 * 4096, 16) * 9
    alone = memory.megatron_estimate(tiny(**REPORTED | ONE_STAGE))
    assert alone is not None
    assert alone.elsewhere is None


def test_megatron_has_no_estimate_for_hybrids(tiny: Callable[..., Job]) -> None:
    assert memory.megatron_estimate(tiny(extra={"hybrid_override_pattern": "M*M-"})) is None
