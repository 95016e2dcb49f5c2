"""Parameters of a rank against recorded models of megatron-core, numbers worked out by hand, and every option."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from traceanalyzer.errors import JobError
from traceanalyzer.expect import parameters, tensor
from traceanalyzer.job import Job


def _names(job: Job, rank: int = 0, chunk: int | None = None) -> dict[str, int]:
    return {part.name: part.elements.value for part in parameters.components(job, rank, chunk)}


def _counts(job: Job, rank: int = 0, chunk: int | None = None) -> tuple[int, int]:
    return parameters.dense(job, rank, chunk).value, parameters.expert(job, rank, chunk).value


def test_recorded_models(recording: Any) -> None:
    """Every recorded rank of every configuration: all parameters, and those of experts apart."""
    described = json.loads(recording.path.with_name(f"{recording.name}.json").read_text(encoding="utf-8"))
    for one in described["per_rank"]:
        rank = one["rank"]
        assert parameters.undescribed(recording.job, rank) == []
        dense, expert = _counts(recording.job, rank)
        assert (dense + expert, expert) == (one["params"], one["expert_params"]), f"rank {rank}"


# -- by hand -----------------------------------------------------------------------------------------------------------

# The recorded model: H 64, F 256, 4 heads, V 256, 4 layers, swiglu, RMSNorm, no biases, RoPE, tied.
RECORDED: dict[str, Any] = {
    "num_layers": 4,
    "num_attention_heads": 4,
    "ffn_hidden_size": 256,
    "padded_vocab_size": 256,
    "swiglu": True,
    "normalization": "RMSNorm",
}


def test_two_tensor_parallel_ranks(tiny: Callable[..., Job]) -> None:
    job = tiny(**RECORDED)
    assert _names(job) == {
        "embedding": 8192,  # 256/2 * 64
        "attention.qkv": 24576,  # 4 * 64 * 192/2
        "attention.proj": 8192,  # 4 * 64/2 * 64
        "mlp.fc1": 65536,  # 4 * 2 * 64 * 256/2
        "mlp.fc2": 32768,  # 4 * 256/2 * 64
        "norms": 512,  # 4 * 2 * 64
        "final norm": 64,
    }
    assert _counts(job) == _counts(job, 1) == (139_840, 0)
    assert _counts(tiny(**RECORDED | {"num_layers": 2})) == (74_048, 0)


def test_untied_output_layer(tiny: Callable[..., Job]) -> None:
    job = tiny(**RECORDED, untie_embeddings_and_output_weights=True)
    assert _names(job)["output layer"] == 8192
    assert _counts(job) == (148_032, 0)  # 139,840 + 8,192


def test_stages_and_chunks(tiny: Callable[..., Job]) -> None:
    """A layer has 65,664 elements on one rank, the vocabulary 16,384 on first and last stage, the final norm 64."""
    sizes = {"world_size": 2, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}
    job = tiny(**RECORDED, **sizes, virtual_pipeline_model_parallel_size=2)
    assert [_counts(job, 0, chunk)[0] for chunk in range(2)] == [82_048, 65_664]
    assert [_counts(job, 1, chunk)[0] for chunk in range(2)] == [65_664, 82_112]
    assert "tied embedding" in _names(job, 1, 1)
    assert "tied embedding" not in _names(job, 1, 0) | _names(job, 0)
    assert [_counts(job, rank)[0] for rank in range(2)] == [147_712, 147_776]


# -- models that were built and counted ------------------------------------------------------------------------------

# GPTModel of megatron-core 0.16.1 (local layers), every parameter counted; LayerNorm, biases, learned positions unless said.
BUILT: dict[str, Any] = {
    "sequence_parallel": False,
    "num_layers": 4,
    "padded_vocab_size": 256,
    "ffn_hidden_size": 256,
    "max_position_embeddings": 48,
    "position_embedding_type": "learned_absolute",
    "add_bias_linear": True,
}
TWO_STAGES: dict[str, Any] = {"world_size": 4, "pipeline_model_parallel_size": 2}
EXPERTS: dict[str, Any] = {
    "sequence_parallel": True,
    "num_experts": 8,
    "moe_ffn_hidden_size": 96,
    "add_bias_linear": False,
}
GATED: dict[str, Any] = {
    "world_size": 8,
    "expert_model_parallel_size": 4,
    "expert_tensor_parallel_size": 1,
    "moe_layer_freq": 2,
    "swiglu": True,
    "moe_shared_expert_intermediate_size": 80,
    "moe_shared_expert_gate": True,
}
INTERLEAVED = {"virtual_pipeline_model_parallel_size": 2}
FEWER_LAYERS = {**INTERLEAVED, "num_layers": 7, "account_for_embedding_in_pipeline_split": True}


@pytest.mark.parametrize(
    ("options", "rank", "counts"),
    [
        ({}, 0, [(112_128, 0)]),
        ({"swiglu": True}, 0, [(145_408, 0)]),
        ({"qk_layernorm": True}, 0, [(112_256, 0)]),
        (
            {"qk_layernorm": True, "normalization": "RMSNorm", "add_bias_linear": False, "add_qkv_bias": True},
            0,
            [(110_592, 0)],
        ),
        ({"group_query_attention": True, "num_query_groups": 2, "kv_channels": 16}, 0, [(120_320, 0)]),
        (
            {
                "world_size": 4,
                "tensor_model_parallel_size": 4,
                "group_query_attention": True,
                "num_query_groups": 2,
            },
            0,
            [(52_192, 0)],
        ),
        ({**TWO_STAGES, "decoder_first_pipeline_num_layers": 1}, 0, [(36_448, 0)]),
        ({**TWO_STAGES, "decoder_first_pipeline_num_layers": 1}, 2, [(83_872, 0)]),
        ({**TWO_STAGES, **INTERLEAVED, "untie_embeddings_and_output_weights": True}, 0, [(36_448, 0), (25_184, 0)]),
        ({**TWO_STAGES, **INTERLEAVED, "untie_embeddings_and_output_weights": True}, 2, [(25_184, 0), (33_504, 0)]),
        ({**TWO_STAGES, **FEWER_LAYERS}, 0, [(36_448, 0), (50_368, 0)]),
        ({**TWO_STAGES, **FEWER_LAYERS}, 2, [(50_368, 0), (58_688, 0)]),
        ({**EXPERTS, **GATED}, 3, [(110_848, 73_728)]),
        (
            {
                **EXPERTS,
                "world_size": 4,
                "expert_model_parallel_size": 2,
                "moe_shared_expert_intermediate_size": 80,
            },
            0,
            [(67_712, 98_304)],
        ),
        ({**EXPERTS, "position_embedding_type": "rope"}, 0, [(240_768, 0)]),  # EP 1: experts are not apart
    ],
)
def test_built_models(
    tiny: Callable[..., Job], options: dict[str, Any], rank: int, counts: list[tuple[int, int]]
) -> None:
    job = tiny(**{**BUILT, **options})
    assert parameters.undescribed(job, rank) == []
    assert [_counts(job, rank, chunk) for chunk in range(len(counts))] == counts
    assert _counts(job, rank) == tuple(sum(column) for column in zip(*counts, strict=True))


@pytest.mark.parametrize("options", [{}, {"qk_layernorm": True}, {"normalization": "RMSNorm"}, {**EXPERTS, **GATED}])
def test_replicated_parameters_are_part_of_them(tiny: Callable[..., Job], options: dict[str, Any]) -> None:
    """What the tensor-parallel group sums once a step is what every rank of it holds whole."""
    job = tiny(**{**BUILT, "sequence_parallel": True, "position_embedding_type": "rope", **options})
    whole = {
        "norms",
        "final norm",
        "query and key norms",
        "attention.proj bias",
        "mlp.fc2 bias",
        "router",
        "shared expert gate",
    }
    names = _names(job)
    assert sum(names[name] for name in whole & set(names)) == tensor.replicated_parameters(job, 0).value


def test_formula(tiny: Callable[..., Job]) -> None:
    job = tiny(**RECORDED)
    (fc1,) = [part for part in parameters.components(job, 0) if part.name == "mlp.fc1"]
    assert str(fc1.elements) == "dense layers * 2 * H * F/TP = 4 * 2 * 64 * 128 = 65,536"
    assert parameters.dense(job, 0).symbols.startswith("V/TP * H + layers * H * (Nh+2*Ng)*d/TP + ")
    assert str(parameters.expert(job, 0)) == "0"


# -- what is not counted ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"multi_latent_attention": True}, "multi_latent_attention"),
        ({"mtp_num_layers": 1}, "mtp_num_layers"),
        ({"extra": {"attention_output_gate": True}}, "attention_output_gate"),
        ({"extra": {"softmax_type": "learnable"}}, "softmax_type"),
        ({"extra": {"gtp_weight_remat_size": 2}}, "gtp_weight_remat_size"),
        ({"num_experts": 4, "add_bias_linear": True}, "add_bias_linear of experts"),
        ({"padded_vocab_size": None}, "padded_vocab_size is unknown"),
        ({"position_embedding_type": "learned_absolute"}, "max_position_embeddings is unknown"),
    ],
)
def test_models_that_are_not_described(tiny: Callable[..., Job], options: dict[str, Any], reason: str) -> None:
    assert parameters.undescribed(tiny(**options), 0) == [reason]


@pytest.mark.parametrize(
    "extra",
    [
        {"softmax_type": "vanilla"},
        {"gtp_weight_remat_size": 1},
        {"tensor_parallel_num_weight_shards": 2},
        {"hybrid_override_pattern": "None"},
    ],
)
def test_options_at_their_default_change_nothing(tiny: Callable[..., Job], extra: dict[str, Any]) -> None:
    assert parameters.undescribed(tiny(extra=extra), 0) == []


def test_unknown_sizes_matter_only_where_they_are_held(tiny: Callable[..., Job]) -> None:
    unknown = {"padded_vocab_size": None, "position_embedding_type": "learned_absolute"}
    sizes = {"world_size": 6, "pipeline_model_parallel_size": 3, "num_layers": 3}
    job = tiny(**unknown, **sizes)
    assert parameters.undescribed(job, 2) == []  # the middle stage
    assert parameters.undescribed(job, 4) == ["padded_vocab_size is unknown"]
    with pytest.raises(JobError, match="padded_vocab_size"):
        parameters.components(job, 4)
    with pytest.raises(JobError, match="chunk 1"):
        parameters.components(job, 2, 1)
