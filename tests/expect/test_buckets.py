"""Order of a model's parameters and the buckets they fill, against listings of real runs and by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from traceanalyzer.errors import JobError
from traceanalyzer.expect import buckets, parameters
from traceanalyzer.expect.buckets import Bucket, Parameter
from traceanalyzer.expect.place import Place
from traceanalyzer.job import Job

NEW = (0, 16)


def _parameters(*sizes: int, tied: tuple[int, ...] = ()) -> tuple[Parameter, ...]:
    return tuple(Parameter(f"p{n}", size, tied=n in tied) for n, size in enumerate(sizes))


def _fill(*sizes: int, tied: tuple[int, ...] = (), **options: Any) -> list[tuple[int, int]]:
    """(elements, padding) of each bucket; one bucket over one rank with the distributed optimizer unless said."""
    settings: dict[str, Any] = {"limit": None, "shards": 1, "distributed": True, **options}
    return [(one.elements, one.padding) for one in buckets.fill(_parameters(*sizes, tied=tied), **settings)]


def _place(job: Job, stage: int = 0, release: tuple[int, int] = NEW) -> Place:
    return Place(job, stage, release)


def _elements(job: Job, stage: int = 0, *, expert: bool = False, release: tuple[int, int] = NEW) -> list[int]:
    return [placed.bucket.elements for placed in buckets.of_place(_place(job, stage, release), expert=expert)]


# -- filling ---------------------------------------------------------------------------------------------------------


def test_plain_buffer_is_not_padded() -> None:
    assert _fill(100, 30, 7, distributed=False) == [(137, 0)]


def test_parameters_start_at_64_and_buckets_end_at_128() -> None:
    # In reverse: 7 at 0, 30 at 64, 100 at 128 ... 228, padded to 256.
    assert _fill(100, 30, 7) == [(256, 119)]


@pytest.mark.parametrize(
    ("shards", "bus_bandwidth", "elements"),
    [(1, False, 128), (3, False, 384), (64, False, 128), (96, False, 384), (2, True, 65_536), (3, True, 196_608)],
)
def test_buckets_end_at_a_multiple_of_the_shards(shards: int, bus_bandwidth: bool, elements: int) -> None:
    assert _fill(100, shards=shards, bus_bandwidth=bus_bandwidth) == [(elements, elements - 100)]


def test_a_bucket_closes_when_it_reaches_the_limit() -> None:
    assert _fill(50, 50, 50, 50, limit=100, distributed=False) == [(100, 0), (100, 0)]
    assert _fill(50, 50, 51, 50, limit=101, distributed=False) == [(101, 0), (100, 0)]
    assert _fill(10, 500, 10, limit=100, distributed=False) == [(510, 0), (10, 0)]
    # Alignment counts towards the limit: 65 at 0, 1 at 128 ends at 129.
    assert _fill(5, 1, 65, limit=129) == [(256, 190), (128, 123)]


def test_a_tied_embedding_is_a_bucket_of_its_own_with_the_distributed_optimizer() -> None:
    assert _fill(256, 128, 128, tied=(0,)) == [(256, 0), (256, 0)]
    assert _fill(128, 128, 256, tied=(2,)) == [(256, 0), (256, 0)]
    assert _fill(256, 128, 128, tied=(0,), distributed=False) == [(512, 0)]


def test_nothing_fills_no_bucket() -> None:
    assert buckets.fill((), limit=None, shards=2, distributed=True) == []


# -- order -----------------------------------------------------------------------------------------------------------

LAYER: dict[str, Any] = {"num_layers": 1, "tensor_model_parallel_size": 1, "sequence_parallel": False}


def _names(job: Job, stage: int = 0, chunk: int = 0) -> list[str]:
    return [one.name for one in buckets.parameter_list(job, stage, chunk, NEW)]


def test_order_of_a_dense_layer(tiny: Callable[..., Job]) -> None:
    job = tiny(**LAYER, qk_layernorm=True, add_bias_linear=True, normalization="RMSNorm")
    qk = ["query and key norms", "query and key norms"]
    qkv = ["attention.qkv", "attention.qkv bias"]
    proj = ["attention.proj", "attention.proj bias"]
    mlp = ["norms", "mlp.fc1", "mlp.fc1 bias", "mlp.fc2", "mlp.fc2 bias"]
    local = ["embedding", "norms", *proj, *qkv, *qk, *mlp, "final norm"]
    assert _names(replace(job, transformer_impl="local")) == local
    # TransformerEngine keeps the norm in the linear layer behind it.
    assert _names(job) == ["embedding", *proj, "norms", *qkv, *qk, *mlp, "final norm"]


def test_a_layer_norm_is_a_weight_and_a_bias(tiny: Callable[..., Job]) -> None:
    found = buckets.parameter_list(tiny(**LAYER, transformer_impl="local"), 0, 0, NEW)
    assert [(one.name, one.elements) for one in found[:4]] == [
        ("embedding", 128 * 64),
        ("norms", 64),
        ("norms", 64),
        ("attention.proj", 64 * 64),
    ]
    assert [one.name for one in found[-2:]] == ["final norm", "final norm"]


EXPERTS: dict[str, Any] = {
    **LAYER,
    "world_size": 4,
    "num_experts": 4,
    "expert_model_parallel_size": 2,
    "normalization": "RMSNorm",
    "moe_ffn_hidden_size": 32,
}


def test_order_of_experts(tiny: Callable[..., Job]) -> None:
    shared = {"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_gate": True}
    job = tiny(**EXPERTS, **shared)
    before = ["embedding", "attention.proj", "norms", "attention.qkv", "norms", "router"]
    after = ["shared expert gate", "shared expert.fc1", "shared expert.fc2", "final norm"]
    one = ["experts.fc1", "experts.fc2"]
    assert _names(job) == [*before, *one, *one, *after]
    assert _names(replace(job, moe_grouped_gemm=True)) == [*before, one[0], one[0], one[1], one[1], *after]
    fused = replace(job, moe_grouped_gemm=True, moe_use_legacy_grouped_gemm=True)
    assert _names(fused) == [*before, *one, *after]
    experts = [found.elements for found in buckets.parameter_list(fused, 0, 0, NEW) if found.expert]
    assert experts == [2 * 64 * 32, 2 * 32 * 64]


def test_order_of_latent_attention(tiny: Callable[..., Job]) -> None:
    latent = {"multi_latent_attention": True, "q_lora_rank": 24, "qk_layernorm": True, "normalization": "RMSNorm"}
    job = tiny(**LAYER, **latent)
    start, end = ["embedding", "norms", "attention.proj"], ["norms", "mlp.fc1", "mlp.fc2", "final norm"]
    norms = ["query latent norm", "key and value latent norm"]
    engine = _names(job)
    down = [name for name in engine if "down" in name]
    assert engine == [*start, down[0], norms[0], "attention.q up", down[1], norms[1], "attention.kv up", *end]
    local = _names(replace(job, transformer_impl="local"))
    down = [name for name in local if "down" in name]
    assert local == [*start, down[0], "attention.q up", down[1], "attention.kv up", *norms, *end]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_bias_linear": True, "qk_layernorm": True, "position_embedding_type": "learned_absolute"},
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "num_layers": 8},
        {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1},
        {"multi_latent_attention": True, "q_lora_rank": 16},
        {"mtp_num_layers": 1},
        {"mtp_num_layers": 2, "pipeline_model_parallel_size": 2, "untie_embeddings_and_output_weights": True},
        {"num_experts": 4, "expert_model_parallel_size": 2, "moe_layer_freq": (0, 1, 0, 1)},
        {"num_experts": 4, "moe_grouped_gemm": True, "moe_shared_expert_intermediate_size": 128},
        {"num_experts": 4, "expert_model_parallel_size": 2, "moe_latent_size": 16, "mtp_num_layers": 1},
    ],
)
def test_order_holds_every_parameter_once(tiny: Callable[..., Job], options: dict[str, Any]) -> None:
    job = tiny(**{"world_size": 8, "num_layers": 4, "num_microbatches": 4, "max_position_embeddings": 32, **options})
    for stage in range(job.pipeline_model_parallel_size):
        place = _place(job, stage)
        assert not parameters.undescribed(job, place.rank)
        for chunk in range(place.chunk_count):
            found = buckets.parameter_list(job, stage, chunk, NEW)
            assert sum(one.elements for one in found if not one.expert) == (
                parameters.dense(job, place.rank, chunk, NEW).value
            )
            assert sum(one.elements for one in found if one.expert) == (
                parameters.expert(job, place.rank, chunk, NEW).value
            )


def test_a_parameter_without_a_place_is_an_error(tiny: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    job = tiny()
    known = parameters.components(job, 0, 0, NEW)
    unknown = replace(known[0], name="new kind")
    monkeypatch.setattr(parameters, "components", lambda *_: [*known, unknown])
    with pytest.raises(JobError, match="no place for new kind"):
        buckets.parameter_list(job, 0, 0, NEW)


# -- tied embeddings -------------------------------------------------------------------------------------------------


def _tied(job: Job, stage: int) -> list[str]:
    return [one.name for one in buckets.parameter_list(job, stage, 0, NEW) if one.tied]


def test_tied_embeddings(tiny: Callable[..., Job]) -> None:
    assert _tied(tiny(), 0) == []
    two = tiny(world_size=4, pipeline_model_parallel_size=2)
    assert (_tied(two, 0), _tied(two, 1)) == (["embedding"], ["tied embedding"])
    untied = replace(two, untie_embeddings_and_output_weights=True)
    assert (_tied(untied, 0), _tied(untied, 1)) == ([], [])
    # Multi-token prediction has a copy of the embedding in any case.
    predicting = replace(untied, mtp_num_layers=1)
    assert (_tied(predicting, 0), _tied(predicting, 1)) == (["embedding"], ["embedding for prediction"])


# -- limit -----------------------------------------------------------------------------------------------------------


def _overlap(tiny: Callable[..., Job], **options: Any) -> Job:
    sizes = {"world_size": 256, "tensor_model_parallel_size": 1, "sequence_parallel": False, "seq_length": 64}
    return tiny(**{**sizes, "overlap_grad_reduce": True, **options})


@pytest.mark.parametrize(
    ("options", "release", "limit"),
    [
        ({"overlap_grad_reduce": False}, NEW, None),
        ({}, NEW, 256_000_000),
        ({"world_size": 32}, NEW, 40_000_000),
        # Replicas over DP and CP are what Megatron-LM counts, over DP what the library counts.
        ({"context_parallel_size": 4}, NEW, 64_000_000),
        ({"context_parallel_size": 4, "framework": "megatron-lm"}, NEW, 256_000_000),
        ({"context_parallel_size": 4, "framework": "megatron-lm"}, (0, 12), 256_000_000),
        ({"context_parallel_size": 4, "framework": "megatron-lm"}, (0, 11), 64_000_000),
        ({"ddp_bucket_size": 1000}, NEW, 1000),
        # 2 layers: 4 * 64 * 64 + 2 * 64 * 256 + 4 * 64 elements each; embedding 128 * 64, final norm 2 * 64.
        ({"ddp_num_buckets": 3}, NEW, (2 * (16_384 + 32_768 + 256) + 8_192 + 128) // 3),
        ({"ddp_num_buckets": 3}, (0, 11), 256_000_000),
    ],
)
def test_limit(tiny: Callable[..., Job], options: dict[str, Any], release: tuple[int, int], limit: int | None) -> None:
    assert buckets.limit(_place(_overlap(tiny, **options), release=release), 0) == limit


def test_limit_holds_on_the_first_stage_and_for_the_first_chunk_only(tiny: Callable[..., Job]) -> None:
    stages = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "num_layers": 4,
        "num_microbatches": 4,
    }
    job = _overlap(tiny, **stages, ddp_bucket_size=1000)
    places = [_place(job, stage) for stage in (0, 1)]
    assert [buckets.limit(place, chunk) for place in places for chunk in (0, 1)] == [1000, None, None, None]
    with_step = replace(
        job,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
        overlap_param_gather_with_optimizer_step=True,
    )
    assert buckets.limit(_place(with_step), 0) is None


# -- listings --------------------------------------------------------------------------------------------------------


def test_recorded_listings(recording: Any) -> None:
    """Buckets of every buffer of every recorded rank, as the models of the recordings listed them."""
    job = recording.job
    if job.use_megatron_fsdp or job.use_torch_fsdp2:
        pytest.skip("FSDP has buckets of its own")
    # Recorded without TransformerEngine's layers, but for the attention that context parallelism needs.
    if job.context_parallel_size == 1:
        job = replace(job, transformer_impl="local")
    stated = json.loads(recording.path.with_name(f"{recording.name}.json").read_text(encoding="utf-8"))
    assert stated["per_rank"]
    for rank in stated["per_rank"]:
        for expert in (False, True):
            listed = [
                elements
                for buffer in rank["buffers"]
                if buffer["group"].startswith("EXPERT") == expert
                for elements in buffer["buckets"]
            ]
            assert _elements(job, rank["pp_stage"], expert=expert) == listed, f"rank {rank['rank']}"


# H 40, F 96, V 100, 4 heads, 4 layers of gated MLPs: sizes that need padding.
UNEVEN: dict[str, Any] = {
    **LAYER,
    "world_size": 2,
    "num_layers": 4,
    "hidden_size": 40,
    "ffn_hidden_size": 96,
    "padded_vocab_size": 100,
    "num_attention_heads": 4,
    "swiglu": True,
    "normalization": "RMSNorm",
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "transformer_impl": "local",
}


def test_listing_of_uneven_sizes(tiny: Callable[..., Job]) -> None:
    """megatron-core 0.16.1 on a fake process group: bucket size 3000, query and key norms."""
    job = tiny(**UNEVEN, qk_layernorm=True, ddp_bucket_size=3000)
    layer = [7_680, 4_992, 5_504]
    assert _elements(job) == [3_968, *layer, *layer, *layer, 7_680, 4_992, 5_760]


def test_listing_of_uneven_sizes_with_biases(tiny: Callable[..., Job]) -> None:
    """The same with LayerNorm, biases in all linear layers and learned positions for 32 tokens."""
    options = {"add_bias_linear": True, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute"}
    job = tiny(**{**UNEVEN, **options, "max_position_embeddings": 32, "ddp_bucket_size": 3000})
    layer = [7_936, 5_120, 5_760]
    assert _elements(job) == [4_096, *layer, *layer, *layer, 7_936, 5_120, 3_072, 4_096]


def test_listing_of_experts_with_biases(tiny: Callable[..., Job]) -> None:
    """The same with DP4 EP2, four experts in every layer, biases, RMSNorm, bucket size 5000."""
    experts = {"world_size": 4, "num_experts": 4, "expert_model_parallel_size": 2, "add_bias_linear": True}
    job = tiny(**{**UNEVEN, **experts, "ddp_bucket_size": 5000})
    assert _elements(job) == [5_376, 7_040, 7_040, 7_040, 5_760]
    assert _elements(job, expert=True) == [11_776] * 8


def test_listing_of_uneven_sizes_with_experts(tiny: Callable[..., Job]) -> None:
    """megatron-core 0.16.1 on a fake process group: DP4 EP2, experts in layers 1 and 3, shared expert of 56 with a gate,
    untied, bucket size 9000."""
    job = tiny(
        **{
            **UNEVEN,
            "world_size": 4,
            "num_experts": 4,
            "expert_model_parallel_size": 2,
            "moe_layer_freq": (0, 1, 0, 1),
            "moe_shared_expert_intermediate_size": 56,
            "moe_shared_expert_gate": True,
            "untie_embeddings_and_output_weights": True,
            "ddp_bucket_size": 9000,
        }
    )
    assert sorted(_elements(job)) == [10_624, 10_624, 10_880, 12_544, 13_184, 13_568]
    assert _elements(job, expert=True) == [11_520] * 4


def test_fp8_weights_have_a_buffer_of_their_own(tiny: Callable[..., Job]) -> None:
    """By hand, source only: the four matrices of a layer apart from embedding and norms."""
    job = tiny(
        **LAYER,
        normalization="RMSNorm",
        use_distributed_optimizer=True,
        fp8="hybrid",
        fp8_param_gather=True,
    )
    placed = buckets.of_place(_place(job), expert=False)
    matrices, rest = 4 * 64 * 64 + 2 * 64 * 256, 128 * 64 + 3 * 64
    assert [(one.quantized, one.bucket) for one in placed] == [
        (True, Bucket(matrices)),
        (False, Bucket(rest + 64, 64)),
    ]
