"""Operations of a step against published formulas and counts by hand; peaks of devices."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from traceanalyzer.errors import JobError
from traceanalyzer.flops import of_step, peak_tflops, product_dtype
from traceanalyzer.job import Job


def gpt(**changes: Any) -> Job:
    """GPT-3 as trained in arXiv 2104.04473: 96 layers, hidden 12288, 96 heads, sequence 2048, batch 1536."""
    fields = {
        "world_size": 1024,
        "tensor_model_parallel_size": 8,
        "pipeline_model_parallel_size": 8,
        "num_layers": 96,
        "hidden_size": 12288,
        "ffn_hidden_size": 4 * 12288,
        "num_attention_heads": 96,
        "seq_length": 2048,
        "padded_vocab_size": 51200,
        "micro_batch_size": 1,
        "global_batch_size": 1536,
        "bf16": True,
    }
    return Job(**{**fields, **changes})


def narayanan(recompute: bool, batch: int = 1536) -> Fraction:
    """96 (with recomputation) or 72 B s L h^2 (1 + s/6h + ...), arXiv 2104.04473, appendix: no causal mask."""
    s, layers, h, v = 2048, 96, 12288, 51200
    common = Fraction(batch * s * layers * h * h)
    if recompute:
        return 96 * common * (1 + Fraction(s, 6 * h) + Fraction(v, 16 * layers * h))
    return 72 * common * (1 + Fraction(s, 6 * h) + Fraction(v, 12 * layers * h))


def test_operations_are_those_of_the_published_formula() -> None:
    found = of_step(gpt(), causal=False)
    assert (found.tokens, found.model, found.hardware) == (1536 * 2048, narayanan(False), narayanan(False))
    full = of_step(gpt(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1), causal=False)
    assert (full.model, full.hardware) == (narayanan(False), narayanan(True))


def test_a_causal_mask_halves_attention() -> None:
    difference = of_step(gpt(), causal=False).model - of_step(gpt()).model
    assert difference == 1536 * 2048 * 12 * 96 * 12288 * 2048 // 2


def small(**changes: Any) -> Job:
    """One rank, 2 layers, hidden 8, 4 heads of 2, ffn 16, vocabulary 32, sequence 4, batch 3: 12 tokens."""
    fields = {
        "world_size": 1,
        "num_layers": 2,
        "hidden_size": 8,
        "ffn_hidden_size": 16,
        "num_attention_heads": 4,
        "seq_length": 4,
        "padded_vocab_size": 32,
        "micro_batch_size": 3,
        "global_batch_size": 3,
        "bf16": True,
    }
    return Job(**{**fields, **changes})


# weights of a layer: qkv 8 x 24, projection 8 x 8, mlp 2 x 8 x 16 -> 192 + 64 + 256 = 512; output 8 x 32 = 256
# scores per token and layer, causal: 4 x 8 x 4 / 2 = 64; forward per token: 2 x (2 x 512 + 64) + 2 x 256 = 2688
FORWARD = 2 * (2 * 512 + 64) + 2 * 256


@pytest.mark.parametrize(
    ("changes", "model", "hardware"),
    [
        ({}, 12 * 3 * FORWARD, 12 * 3 * FORWARD),
        ({"forward_only": True}, 12 * FORWARD, 12 * FORWARD),
        ({"swiglu": True}, 12 * 3 * (FORWARD + 2 * 2 * 128), 12 * 3 * (FORWARD + 2 * 2 * 128)),
        # 2 of 4 query groups: keys and values 8 x 4 each instead of 8 x 8
        (
            {"group_query_attention": True, "num_query_groups": 2},
            12 * 3 * (FORWARD - 2 * 2 * 64),
            12 * 3 * (FORWARD - 2 * 2 * 64),
        ),
        # experts: top 2 of 4 with ffn 16 and the router 8 x 4 instead of one MLP
        (
            {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16},
            12 * 3 * (FORWARD + 2 * 2 * (256 + 32)),
            12 * 3 * (FORWARD + 2 * 2 * (256 + 32)),
        ),
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
            12 * 3 * FORWARD,
            12 * (3 * FORWARD + 2 * 512 + 64),
        ),
        ({"recompute_granularity": "selective"}, 12 * 3 * FORWARD, 12 * (3 * FORWARD + 2 * 64)),
        (
            {"recompute_granularity": "selective", "recompute_modules": ("mlp", "layernorm")},
            12 * 3 * FORWARD,
            12 * (3 * FORWARD + 2 * 2 * 256),
        ),
    ],
)
def test_operations_of_a_small_model(changes: dict[str, Any], model: int, hardware: int) -> None:
    found = of_step(small(**changes))
    assert (found.tokens, found.model, found.hardware) == (12, model, hardware)


def test_what_has_no_rule_is_not_counted() -> None:
    with pytest.raises(JobError, match="no rule counts the operations of a job with multi_latent_attention"):
        of_step(small(multi_latent_attention=True))
    with pytest.raises(JobError, match="the job does not say padded_vocab_size"):
        of_step(small(padded_vocab_size=None))


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 80GB HBM3", "float8", 1978.9),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "float16", 312.0),
        ("NVIDIA A100-SXM4-80GB", "float8", None),
        ("NVIDIA B200", "bfloat16", 2250.0),
        ("Tesla V100-SXM2-16GB", "float16", 125.0),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3", "float32", None),
        ("NVIDIA H100 80GB HBM3", None, None),
        ("Test GPU", "bfloat16", None),
        (None, "bfloat16", None),
    ],
)
def test_peaks(device: str | None, dtype: str | None, peak: float | None) -> None:
    assert peak_tflops(device, dtype) == peak


def test_type_of_the_products() -> None:
    assert (product_dtype(small()), product_dtype(small(fp8="hybrid"))) == ("bfloat16", "float8")
    assert product_dtype(small(bf16=False)) == "float32"
