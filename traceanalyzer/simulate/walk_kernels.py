"""The kernels that modules launch: names as real ones are spelled, so that they classify by name, and what they cost.

A kernel costs floating-point operations and bytes to and from memory; both follow from the sizes of its operands.
Elementwise work between two matrix products is one kernel, as fusion makes it.
"""

from __future__ import annotations

from traceanalyzer.simulate.program import PerRank
from traceanalyzer.simulate.walk_tape import Tape

_GEMM_TYPES = {
    "bfloat16": "sm90_xmma_gemm_bf16bf16_bf16f32_f32",
    "float16": "sm90_xmma_gemm_f16f16_f16f32_f32",
    "float32": "sm80_xmma_gemm_f32f32_f32f32_f32",
}
_CUTLASS_TYPES = {"bfloat16": "cutlass::bfloat16_t", "float16": "cutlass::half_t", "float32": "float"}
_LAYOUTS = {"forward": "tn_n", "dgrad": "nn_n", "wgrad": "nt_n"}


def gemm(tape: Tape, component: str, rows: int, width_in: int, width_out: int, use: str = "forward") -> None:
    """A matrix product of ``rows`` x ``width_in`` with a weight; use: forward, dgrad or wgrad, which cost the same."""
    sizes = tape.sizes
    name = (
        f"{_GEMM_TYPES[sizes.dtype]}_{_LAYOUTS[use]}_tilesize128x128x64_warpgroupsize2x1x1_execute_segment_k_off_"
        f"kernel__5x_cublas"
    )
    moved = rows * width_in + rows * width_out + width_in * width_out
    tape.compute(name, "gemm", 2 * rows * width_in * width_out, moved * sizes.itemsize, component)


def grouped_gemm(
    tape: Tape, component: str, rows: PerRank, width_in: int, width_out: int, experts: int, use: str = "forward"
) -> None:
    """One product for each expert of the rank; ``rows`` of all of them together."""
    sizes = tape.sizes
    name = (
        f"void grouped_gemm::CutlassGroupedGemm<{_CUTLASS_TYPES[sizes.dtype]}, {str(use != 'wgrad').lower()}, "
        f"{str(use == 'forward').lower()}>"
    )
    moved = rows * (width_in + width_out) + experts * width_in * width_out
    tape.compute(name, "grouped_gemm", 2 * rows * width_in * width_out, moved * sizes.itemsize, component)


def attention(tape: Tape, component: str, queries: int, keys: int, heads: int, groups: int, *, backward: bool) -> None:
    """Attention of ``queries`` tokens to ``keys`` tokens of a sequence, half of the pairs masked out by causality.

    The backward pass computes five products where the forward pass has two.
    """
    sizes = tape.sizes
    batch, width = sizes.batch, sizes.head_width
    kind = _CUTLASS_TYPES[sizes.dtype]
    traits = f"Flash_{'bwd' if backward else 'fwd'}_kernel_traits<{width}, 128, 128, 8, false, false, {kind}"
    name = (
        f"void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<{traits}>, false, true>(Flash_bwd_params)"
        if backward
        else f"void flash_fwd_kernel<{traits}>, false, true>(Flash_fwd_params)"
    )
    product = batch * heads * queries * keys * width  # 2 operations for a pair and channel, half of the pairs
    moved = batch * width * (2 * queries * heads + 2 * keys * groups) * sizes.itemsize
    tape.compute(name, "attention", (5 if backward else 2) * product, (2 if backward else 1) * moved, component)


def norm(tape: Tape, component: str | None, rows: int, width: int, *, backward: bool = False) -> None:
    """A layer norm or RMS norm over rows of ``width``."""
    word = "rmsnorm" if tape.sizes.job.normalization == "RMSNorm" else "ln"
    name = (
        f"void transformer_engine::normalization::{word}_{'bwd' if backward else 'fwd'}_tuned_kernel<"
        f"transformer_engine::normalization::Kernel_traits<{_CUTLASS_TYPES[tape.sizes.dtype]}, {width}u>>"
    )
    name = name.replace("::ln_", "::layernorm_ln_")
    elems = rows * width
    tape.compute(name, "norm", 8 * elems, (4 if backward else 2) * elems * tape.sizes.itemsize, component)


def elementwise(tape: Tape, component: str | None, elems: PerRank, word: str, passes: int = 3) -> None:
    """A fused elementwise kernel that touches ``elems`` elements ``passes`` times."""
    name = f"void at::native::vectorized_elementwise_kernel<4, {word}_functor>"
    tape.compute(name, "elementwise", 4 * elems, passes * elems * tape.sizes.itemsize, component)


def reduction(tape: Tape, component: str | None, elems: int, word: str, itemsize: int = 4) -> None:
    """A kernel that reads ``elems`` elements and reduces them."""
    name = f"void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, {word}, unsigned int, float, 4>>"
    tape.compute(name, "reduction", elems, elems * itemsize, component)


def softmax(tape: Tape, component: str | None, elems: int, *, backward: bool = False) -> None:
    """Exponentials of logits and what follows from them, in float32."""
    name = f"void at::native::cunn_SoftMax{'Backward' if backward else 'Forward'}<4, float, float>"
    tape.compute(name, "reduction", 6 * elems, 8 * elems, component)


def embedding(tape: Tape, component: str, rows: int, width: int, *, backward: bool = False) -> None:
    """A look-up of rows in a table, or the sum of their gradients into it."""
    name = (
        "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float, long>"
        if backward
        else "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>"
    )
    tape.compute(name, "embedding", rows * width if backward else 0, 2 * rows * width * tape.sizes.itemsize, component)


def permute(tape: Tape, component: str, elems: PerRank, *, back: bool = False) -> None:
    """Rows brought into the order of their experts, or back."""
    name = "_unpermute_kernel" if back else "_permute_kernel"
    tape.compute(name, "moe", 0, 2 * elems * tape.sizes.itemsize, component)


def topk(tape: Tape, component: str, tokens: int, experts: int) -> None:
    """The experts of each token."""
    name = "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>"
    tape.compute(name, "moe", 4 * tokens * experts, 4 * tokens * experts, component)


def userbuffers(tape: Tape, component: str, op: str, elems: int) -> None:
    """TransformerEngine's own all-gather or reduce-scatter, under the matrix product it belongs to."""
    word = {"all_gather": "rr_ag", "reduce_scatter": "rr_rs"}[op]
    name = f"void userbuffers_fp16_sum_inplace_gpu_{word}<4>(int, int, int, int, int, void**)"
    tape.compute(name, "comm", 0, elems * tape.sizes.itemsize, component, stream="userbuffers")


def deep_ep(tape: Tape, component: str, word: str, moved: PerRank, *, nodes: bool) -> None:
    """A kernel of DeepEP: what moves ``moved`` bytes, or prepares it."""
    place = "layout" if word == "get_dispatch_layout" else "internode" if nodes else "intranode"
    name = f"void deep_ep::{place}::{word}<8, 768>(int4*, float*, int*, int)"
    tape.compute(name, "moe" if place == "layout" else "comm", 0, moved, component)


def adam(tape: Tape, elems: int) -> None:
    """Adam on ``elems`` main parameters: gradient, parameter and both moments read in float32, three of them written."""
    name = "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctorMaster<float, float, int>, float>"
    tape.compute(name, "optimizer", 12 * elems, elems * (4 * 4 + 3 * 4 + tape.sizes.itemsize), None)


def scale(tape: Tape, component: str | None, elems: int, itemsize: int = 4) -> None:
    """Gradients multiplied by a factor, in place."""
    name = "void at::native::vectorized_elementwise_kernel<4, MulFunctor<float>>"
    tape.compute(name, "elementwise", elems, 2 * elems * itemsize, component)


def norm_of(tape: Tape, component: str, elems: int) -> None:
    """Sum of squares of ``elems`` float32 values."""
    name = "void multi_tensor_apply_kernel<TensorListMetadata<1>, L2NormFunctor<float>, float*, float*, bool, int>"
    tape.compute(name, "optimizer", 2 * elems, 4 * elems, component)
