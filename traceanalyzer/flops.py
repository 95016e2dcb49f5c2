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


# (name of the device, dense TFLOP/s in 16 bits with fp32 accumulation, dense TFLOP/s in fp8); makers' data sheets
_PEAKS: tuple[tuple[re.Pattern[str], float, float | None], ...] = tuple(
    (re.compile(pattern), half, eighth)
    for pattern, half, eighth in (
        (r"\bH100 PCIe\b", 756.0, 1513.0),
        (r"\bH100 NVL\b", 835.0, 1671.0),
        (r"\b(?:H100|H200|GH200)\b", 989.4, 1978.9),
        (r"\bH800\b", 989.4, 1978.9),
        (r"\bH20\b", 148.0, 296.0),
        (r"\bGB200\b", 2500.0, 5000.0),
        (r"\bB200\b", 2250.0, 4500.0),
        (r"\bA(?:100|800)\b", 312.0, None),
        (r"\bA40\b", 149.7, None),
        (r"\bA10G?\b", 125.0, None),
        (r"\bL40S\b", 362.0, 733.0),
        (r"\bV100\b", 125.0, None),
        (r"\bMI300X\b", 1307.4, 2614.9),
        (r"\bMI325X\b", 1307.4, 2614.9),
        (r"\bMI250X\b", 191.5, None),  # one of its two dies, which is what a process sees as a device
        (r"\bMI210\b", 181.0, None),
    )
)


def peak_tflops(device_name: str | None, dtype: str | None) -> float | None:
    """Dense peak rate of a device in TFLOP/s by its name; None if unknown.

    dtype: float16, bfloat16 or float8. Other types have no entry. V100 has no bfloat16.
    """
    if device_name is None:
        return None
    name = re.sub(r"[-_]", " ", device_name)
    for pattern, half, eighth in _PEAKS:
        if pattern.search(name):
            if dtype == "float8":
                return eighth
            if dtype == "float16" or (dtype == "bfloat16" and "V100" not in name):
                return half
            return None
    return None


def product_dtype(job: Job) -> str:
    """Type in which a job multiplies matrices: float8 with fp8, else that of its activations."""
    return "float8" if job.fp8 else job.activation_dtype
