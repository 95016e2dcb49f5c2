"""Operations of a step against published formulas and counts by hand; peaks of devices."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from traceanalyzer.errors import JobError
from traceanalyzer.flops import PEAKS, of_step, peak_tflops, product_dtype
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
        ("NVIDIA H200", "bfloat16", 989.4),
        ("NVIDIA H200 NVL", "bfloat16", 835.0),
        ("NVIDIA H800", "bfloat16", None),
        ("NVIDIA H20", "float8", 296.0),
        ("NVIDIA A100-SXM4-80GB", "float16", 312.0),
        ("NVIDIA A100-SXM4-80GB", "float8", None),
        ("NVIDIA B200", "bfloat16", 2250.0),
        ("NVIDIA B300 SXM6 AC", "float8", 4500.0),
        ("NVIDIA GB200", "bfloat16", 2500.0),
        ("NVIDIA A10G", "bfloat16", None),
        ("NVIDIA L40S", "float8", 733.0),
        ("AMD Instinct MI300X", "float8", 2614.9),
        ("Tesla V100-SXM2-16GB", "float16", 125.0),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("Tesla V100-PCIE-32GB", "float16", 112.0),
        ("Tesla V100S-PCIE-32GB", "float16", None),
        ("NVIDIA H100 80GB HBM3", "float32", None),
        ("NVIDIA H100 80GB HBM3", None, None),
        ("Test GPU", "bfloat16", None),
        (None, "bfloat16", None),
    ],
)
def test_peaks(device: str | None, dtype: str | None, peak: float | None) -> None:
    assert peak_tflops(device, dtype) == peak


# Compute units, operations of one unit in one clock in 16 bits, clock in GHz: white papers of the architectures.
UNITS = {
    "A100-SXM4-80GB": (108, 2048, 1.41),
    "A40": (84, 1024, 1.74),
    "A10": (72, 1024, 1.695),
    "H100 80GB HBM3": (132, 4096, 1.83),
    "H100 PCIe": (114, 4096, 1.62),
    "V100-SXM2-16GB": (80, 1024, 1.53),
    "V100-PCIE-16GB": (80, 1024, 1.38),
    "MI210": (104, 1024, 1.7),
    "MI250X": (110, 1024, 1.7),
    "MI300X": (304, 2048, 2.1),
    "MI350X": (256, 4096, 2.2),
    "MI355X": (256, 4096, 2.4),
}


@pytest.mark.parametrize("device", UNITS)
def test_peaks_are_units_times_operations_times_clock(device: str) -> None:
    """To 1 %, to which the makers round; fp8 doubles the rate where there is any."""
    units, operations, clock = UNITS[device]
    assert peak_tflops(device, "float16") == pytest.approx(units * operations * clock / 1000, rel=0.01)
    eighth = peak_tflops(device, "float8")
    assert eighth is None or eighth == pytest.approx(2 * units * operations * clock / 1000, rel=0.01)


def test_every_peak_has_a_source() -> None:
    assert all(peak.source for peak in PEAKS)
    assert {peak.pattern for peak in PEAKS if peak.half is None} == {r"\bH800\b"}


def test_type_of_the_products() -> None:
    assert (product_dtype(small()), product_dtype(small(fp8="hybrid"))) == ("bfloat16", "float8")
    assert product_dtype(small(bf16=False)) == "float32"
