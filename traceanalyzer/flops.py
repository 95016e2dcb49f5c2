"""Floating-point operations of one training step, from the job alone, and the peak rates of devices.

Counted are matrix products, two operations per multiply-add, as in the MFU of PaLM (Chowdhery et al., arXiv 2204.02311,
appendix B): per token 6 P + 12 L A S c, with P the weights of all matrix products that one token takes part in (of experts
the top-k and the shared one; the output layer, not the embedding's look-up), L layers, A = heads times channels, S the
sequence length. The first term is 2 P forward and 4 P backward, the second the products QK' and (QK')V, 4 A S forward and
8 A S backward. c is 1/2 with a causal mask (half of the scores are not needed; flash attention does not compute them) and 1
without: PaLM and Narayanan et al. (arXiv 2104.04473) use 1, and so does ``causal=False``.

Hardware operations (HFU) add the forward work that activation recomputation repeats: all of a layer's with granularity
full, the attention products with selective and core_attn, the MLP's with mlp or moe.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from traceanalyzer.errors import JobError
from traceanalyzer.job import Job


@dataclass(frozen=True)
class StepFlops:
    """Of the whole job in one step. model: what the model asks for. hardware: with what recomputation repeats.

    tokens: global batch times sequence length. hardware None: a recomputed part has no rule. Evaluation counts a forward
    pass only.
    """

    tokens: int
    model: Fraction
    hardware: Fraction | None


def of_step(job: Job, *, causal: bool = True) -> StepFlops:
    """Operations of one step. Raises JobError if the job does not say its shape or batch, or has a part without a rule."""
    batch, length, layers, hidden, vocabulary = job.require(
        "global_batch_size", "seq_length", "num_layers", "hidden_size", "padded_vocab_size"
    )
    for field, name in (
        (job.multi_latent_attention, "multi_latent_attention"),
        (job.experimental_attention_variant, "experimental_attention_variant"),
        (job.mtp_num_layers, "mtp_num_layers"),
        (job.moe_latent_size, "moe_latent_size"),
        (job.attention_output_gate, "attention_output_gate"),
    ):
        if field:
            raise JobError(f"no rule counts the operations of a job with {name}")
    tokens = batch * length
    attention_weights, width = _attention(job)
    scores = Fraction(4 * width * length, 2 if causal else 1)
    mlps = [_mlp(job, layer) for layer in range(layers)]
    forward = [2 * (attention_weights + mlp) + scores for mlp in mlps]
    output = 2 * hidden * vocabulary
    passes = 1 if job.forward_only else 3
    model = tokens * passes * (sum(forward, Fraction(0)) + output)
    if job.forward_only or job.recompute_granularity is None:
        return StepFlops(tokens, model, model)
    repeated = _repeated(job, forward, scores, mlps)
    return StepFlops(tokens, model, None if repeated is None else model + tokens * repeated)


def _attention(job: Job) -> tuple[int, int]:
    """Weights of a layer's projections, and heads times channels."""
    (heads, hidden) = job.require("num_attention_heads", "hidden_size")
    channels = job.kv_channels or hidden // heads
    groups = job.num_query_groups if job.group_query_attention and job.num_query_groups else heads
    return hidden * channels * (heads + 2 * groups) + heads * channels * hidden, heads * channels


def _mlp(job: Job, layer: int) -> int:
    """Weights of a layer's MLP that one token meets, the router included."""
    (hidden,) = job.require("hidden_size")
    matrices = 3 if job.swiglu else 2
    if not job.is_moe_layer(layer):
        (ffn,) = job.require("ffn_hidden_size")
        return matrices * hidden * ffn
    experts, ffn = job.require("num_experts", "moe_ffn_hidden_size")
    shared = job.moe_shared_expert_intermediate_size or 0
    return matrices * hidden * (job.moe_router_topk * ffn + shared) + hidden * experts


_NO_PRODUCTS = frozenset({"layernorm", "moe_act"})


def _repeated(job: Job, forward: list[Fraction], scores: Fraction, mlps: list[int]) -> Fraction | None:
    """Forward operations per token that recomputation repeats; None without a rule."""
    if job.recompute_granularity == "full":
        if job.recompute_method == "block":
            count = job.recompute_num_layers
            if count is None:
                return None
            first = [
                layer
                for stage in range(job.pipeline_model_parallel_size)
                for chunk in range(job.virtual_pipeline_model_parallel_size or 1)
                for layer in job.layers_on_stage(stage, chunk)[:count]
            ]
            return sum((forward[layer] for layer in first), Fraction(0))
        return sum(forward, Fraction(0))
    total = Fraction(0)
    for module in job.recompute_modules:
        if module == "core_attn":
            total += scores * len(mlps)
        elif module == "mlp":
            total += sum(2 * mlp for layer, mlp in enumerate(mlps) if not job.is_moe_layer(layer))
        elif module == "moe":
            total += sum(2 * mlp for layer, mlp in enumerate(mlps) if job.is_moe_layer(layer))
        elif module not in _NO_PRODUCTS:
            return None
    return total


class Peak(NamedTuple):
    """Dense rates of a device in TFLOP/s, with accumulation in fp32: in 16 bits, and in fp8 (None: has none)."""

    pattern: str
    """Of the device's name, hyphens and underscores read as spaces; the first that matches counts."""
    half: float | None
    eighth: float | None
    source: str


_HOPPER = (
    "nvidia.com/data-center/h100 and h200; with sparsity, so half of what it says; SXM to a digit in the white paper"
)
_BLACKWELL = "NVIDIA Blackwell architecture technical brief, dense column"
_INSTINCT = "amd.com/products/accelerators/instinct, peak matrix rate without sparsity"

PEAKS: tuple[Peak, ...] = (
    Peak(r"\bH100 PCIe\b", 756.0, 1513.0, _HOPPER),
    Peak(r"\bH[12]00 NVL\b", 835.0, 1671.0, _HOPPER),
    Peak(r"\b(?:H100|H200|GH200)\b", 989.4, 1978.9, _HOPPER),
    Peak(r"\bH800\b", None, None, "no data sheet of its maker is public: sources differ, also between SXM and PCIe"),
    Peak(
        r"\bH20\b",
        148.0,
        296.0,
        "no data sheet of its maker is public; as listed by its sellers (Tom's Hardware, 2024)",
    ),
    Peak(r"\bGB[23]00\b", 2500.0, 5000.0, _BLACKWELL),
    Peak(r"\bB[23]00\b", 2250.0, 4500.0, _BLACKWELL),
    Peak(r"\bA(?:100|800)\b", 312.0, None, "nvidia.com/data-center/a100, PCIe and SXM alike; A800: slower links only"),
    Peak(r"\bA40\b", 149.7, None, "NVIDIA A40 data sheet"),
    Peak(r"\bA10\b", 125.0, None, "NVIDIA A10 data sheet"),
    Peak(r"\bL40S\b", 362.0, 733.0, "NVIDIA L40S data sheet"),
    Peak(r"\bV100 SXM2\b", 125.0, None, "NVIDIA V100 data sheet"),
    Peak(r"\bV100 PCIE\b", 112.0, None, "NVIDIA V100 data sheet"),
    Peak(r"\bMI355X\b", 2516.6, 5033.2, _INSTINCT),
    Peak(r"\bMI350X\b", 2306.9, 4613.7, _INSTINCT),
    Peak(r"\bMI3(?:00|25)X\b", 1307.4, 2614.9, _INSTINCT),
    Peak(r"\bMI250X\b", 191.5, None, f"{_INSTINCT}; one of its two dies, which is what a process sees as a device"),
    Peak(r"\bMI210\b", 181.0, None, _INSTINCT),
)
"""Devices whose rates are known, and where from. A rate that no source confirms is None."""


def peak_tflops(device_name: str | None, dtype: str | None) -> float | None:
    """Dense peak rate of a device in TFLOP/s by its name; None if unknown.

    dtype: float16, bfloat16 or float8. Other types have no entry. V100 has no bfloat16.
    """
    if device_name is None:
        return None
    name = re.sub(r"[-_]", " ", device_name)
    for peak in PEAKS:
        if re.search(peak.pattern, name):
            if dtype == "float8":
                return peak.eighth
            if dtype == "float16" or (dtype == "bfloat16" and "V100" not in name):
                return peak.half
            return None
    return None


def product_dtype(job: Job) -> str:
    """Type in which a job multiplies matrices: float8 with fp8, else that of its activations."""
    return "float8" if job.fp8 else job.activation_dtype
