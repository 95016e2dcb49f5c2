"""Parameters of a rank against recorded models of megatron-core, numbers worked out by hand, and every option."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from traceanalyzer.errors import JobError
from traceanalyzer.expect import parameters
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
    job = tiny(**RECORDED, **sizes, **INTERLEAVED)
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
INTERLEAVED = {"virtual_pipeline_model_parallel_size": 2, "num_microbatches": 4}
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


# GPTModel of megatron-core run on a fake process group, its parameters counted: all, experts' and those marked
# sequence_parallel, for the first rank of each stage. RECORDED with these flags; 0.16.1 unless said.
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 12,
}
FOUR_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "expert_model_parallel_size": 2,
    "moe_ffn_hidden_size": 256,
    "moe_layer_freq": (0, 1, 0, 1),
}
ONE_TP: dict[str, Any] = {"tensor_model_parallel_size": 1}


@pytest.mark.parametrize(
    ("options", "counted"),
    [
        # TransformerEngine's specification: whole down projections
        (
            {**TWO_STAGES, **LATENT, "q_lora_rank": 24, "qk_layernorm": True},
            {0: (70_992, 0, 6_480), 2: (71_056, 0, 6_544)},
        ),
        ({**LATENT, "add_bias_linear": True}, {0: (136_768, 0, 7_232)}),
        # 0.12.3: column-parallel down projections
        (
            {**LATENT, "q_lora_rank": 24, "qk_layernorm": True, "megatron_core_version": "0.12.3"},
            {0: (127_712, 0, 736)},
        ),
        ({**LATENT, "q_lora_rank": 24, "qk_layernorm": True, "transformer_impl": "local"}, {0: (127_712, 0, 736)}),
        (
            {**TWO_STAGES, **FOUR_EXPERTS, "world_size": 8, "mtp_num_layers": 2},
            {0: (98_816, 49_152, 512), 4: (231_104, 147_456, 1_728)},
        ),
        (
            {
                **TWO_STAGES,
                **INTERLEAVED,
                **ONE_TP,
                "untie_embeddings_and_output_weights": True,
                "mtp_num_layers": 1,
                "normalization": "LayerNorm",
            },
            {0: (147_968, 0, 512), 2: (238_848, 0, 1_280)},
        ),
        (
            {
                **ONE_TP,
                "world_size": 4,
                "pipeline_model_parallel_size": 4,
                "mtp_num_layers": 1,
                "pipeline_model_parallel_layout": "Et*2|t|t|mL",
            },
            {0: (147_712, 0, 256), 1: (65_664, 0, 128), 2: (65_728, 0, 192), 3: (106_816, 0, 320)},
        ),
        # 0.19: one layer of multi-token prediction, used twice
        (
            {
                **TWO_STAGES,
                "mtp_num_layers": 2,
                "extra": {"mtp_use_repeated_layer": True},
                "megatron_core_version": "0.19.0",
            },
            {0: (73_984, 0, 256), 2: (119_424, 0, 640)},
        ),
        (
            {
                **FOUR_EXPERTS,
                "world_size": 4,
                "expert_tensor_parallel_size": 1,
                "add_bias_linear": True,
                "transformer_impl": "local",
            },
            {0: (291_400, 198_912, 1_736)},
        ),
        (
            {
                "group_query_attention": True,
                "num_query_groups": 2,
                "attention_output_gate": True,
                "softmax_type": "learnable",
                "normalization": "LayerNorm",
            },
            {0: (140_424, 0, 1_152)},
        ),
    ],
)
def test_models_on_a_fake_process_group(
    tiny: Callable[..., Job], options: dict[str, Any], counted: dict[int, tuple[int, int, int]]
) -> None:
    """Of TP 1 the marks are all off in the model: there the third number is by hand, the norms and routers."""
    job = tiny(**{**RECORDED, **options})
    for rank, expected in counted.items():
        assert parameters.undescribed(job, rank) == []
        dense, expert = _counts(job, rank)
        assert (dense + expert, expert, parameters.sequence_parallel(job, rank).value) == expected, f"rank {rank}"


def test_rows_that_were_only_read(tiny: Callable[..., Job]) -> None:
    """moe_latent_size needs TransformerEngine (moe_layer.py: fc1_latent_proj; experts.py: TEGroupedMLP)."""
    job = tiny(**RECORDED, **{**FOUR_EXPERTS, "expert_tensor_parallel_size": 1}, world_size=4, moe_latent_size=32)
    names = _names(job)
    assert names["latent projections"] == 2 * 2 * 64 * 32
    assert names["experts.fc1"] == 2 * 2 * 2 * 32 * 256
    assert names["experts.fc2"] == 2 * 2 * 256 * 32
    biased = tiny(
        **{**RECORDED, **FOUR_EXPERTS, "add_bias_linear": True, "expert_tensor_parallel_size": 1},
        world_size=4,
        moe_latent_size=32,
    )
    names = _names(biased)
    assert (names["latent fc1 bias"], names["latent fc2 bias"]) == (2 * 32, 2 * 64)
    assert (names["experts.fc1 bias"], names["experts.fc2 bias"]) == (2 * 2 * 2 * 256, 2 * 2 * 32)
    assert names["router bias"] == 2 * 4


@pytest.mark.parametrize("extra", [{"qk_l2_norm": True}, {"moe_router_enable_expert_bias": True}])
def test_options_without_parameters(tiny: Callable[..., Job], extra: dict[str, Any]) -> None:
    """An L2 norm has no weight, the router's expert bias is a buffer."""
    fields = {"moe_router_enable_expert_bias"}
    options = {name: value for name, value in extra.items() if name in fields}
    more = {**RECORDED, "qk_layernorm": "qk_l2_norm" in extra}
    job = tiny(**more, **options, extra={name: value for name, value in extra.items() if name not in fields})
    assert _counts(job) == (139_840, 0)


def test_gate_of_a_quick_geglu(tiny: Callable[..., Job]) -> None:
    one = tiny(**{**RECORDED, "swiglu": False}, extra={"quick_geglu": True})
    assert _names(one)["mlp.fc1"] == 65536


def test_document_model(document_job: Callable[..., Job]) -> None:
    """Errata E21, E22: what the document's own sizes come to, without embeddings, norms and routers."""
    job = document_job(
        world_size=1024,
        context_parallel_size=2,
        pipeline_model_parallel_size=4,
        expert_model_parallel_size=8,
        expert_tensor_parallel_size=1,
        num_experts=64,
        moe_ffn_hidden_size=32768,
        moe_layer_freq=4,
    )
    whole = {part.name: part.elements.value for part in parameters.whole_model(job)}
    attention = whole["attention.qkv"] + whole["attention.proj"]
    mlp, experts = whole["mlp.fc1"] + whole["mlp.fc2"], whole["experts.fc1"] + whole["experts.fc2"]
    assert attention == 80 * 4 * 8192**2 == 21_474_836_480
    assert mlp == 60 * 12 * 8192**2 == 48_318_382_080
    assert experts == 20 * 64 * 12 * 8192**2 == 1_030_792_151_040
    assert attention + mlp + experts == 1_100_585_369_600
    assert round(100 * experts / (attention + mlp + experts), 1) == 93.7
    for etp, of_experts in ((1, 32_212_254_720), (4, 8_053_063_680)):
        held = {
            part.name: part.elements.value
            for part in parameters.components(dataclasses.replace(job, expert_tensor_parallel_size=etp), 256)
        }
        assert held["experts.fc1"] + held["experts.fc2"] == of_experts
        of_matrices = ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")
        assert sum(held[name] for name in of_matrices) == (attention + mlp) // 16 == 4_362_076_160


def test_a_model_on_ranks_is_the_whole_model(tiny: Callable[..., Job]) -> None:
    """Ranks of a replica hold every parameter once, what tensor parallelism does not cut TP times, the tied copy too."""
    job = tiny(**RECORDED, world_size=4, pipeline_model_parallel_size=2)
    ranks = sum(_counts(job, rank)[0] for rank in range(4))
    whole = sum(part.elements.value for part in parameters.whole_model(job))
    twice = sum(parameters.sequence_parallel(job, rank).value for rank in (0, 2))
    assert ranks == whole + twice + 256 * 64


def test_formula(tiny: Callable[..., Job]) -> None:
    job = tiny(**RECORDED)
    (fc1,) = [part for part in parameters.components(job, 0) if part.name == "mlp.fc1"]
    assert str(fc1.elements) == "dense_blocks * G * H * F/TP = 4 * 2 * 64 * 256/2 = 65,536"
    assert parameters.dense(job, 0).symbols.startswith("V/TP * H + blocks * H * (Nh+2*Ng)*d/TP + ")
    assert str(parameters.expert(job, 0)) == "0"


# -- what is not counted ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"experimental_attention_variant": "gated_delta_net"}, "experimental_attention_variant"),
        ({"extra": {"hybrid_override_pattern": "M*M-"}}, "hybrid_override_pattern"),
        ({"extra": {"heterogeneous_layers_config_path": "layers.json"}}, "heterogeneous_layers_config_path"),
        ({"extra": {"use_legacy_models": True}}, "use_legacy_models"),
        ({"extra": {"spec": "my_module my_spec"}}, "spec"),
        ({"extra": {"gtp_weight_remat_size": 2}}, "gtp_weight_remat_size"),
        ({"extra": {"tensor_parallel_num_weight_shards": 4}}, "tensor_parallel_num_weight_shards"),
        ({"padded_vocab_size": None}, "padded_vocab_size is unknown"),
        ({"position_embedding_type": "learned_absolute"}, "max_position_embeddings is unknown"),
    ],
)
def test_models_that_are_not_described(tiny: Callable[..., Job], options: dict[str, Any], reason: str) -> None:
    assert parameters.undescribed(tiny(**options), 0) == [reason]


@pytest.mark.parametrize(
    "extra",
    [
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
