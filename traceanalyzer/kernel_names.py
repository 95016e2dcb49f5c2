"""What a device kernel is, by its name: the one table of patterns that every analysis shares.

Metadata wins over names; a name is asked only where a kernel carries no collective metadata. A generic communication
kernel (RCCL's, NCCL's ``Generic``) is communication of unknown operation: it is not guessed.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple


class KernelClass(NamedTuple):
    """Class of a kernel, and the operation if it is a communication kernel whose name tells."""

    kernel_class: str
    op: str | None


_NCCL_OPS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgatherv": "all_gather",
    "reducescatter": "reduce_scatter",
    "sendrecv": "send_recv",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all",
    "gather": "gather",
    "scatter": "scatter",
}

# NCCL before 2.19: ncclKernel_AllReduce_RING_LL_Sum_half; after: ncclDevKernel_AllReduce_Sum_f16_RING_LL; symmetric
# memory: ncclSymkDevKernel_AllGather_LL, ncclSymDevKernel_...; even older: ncclAllReduceRingLLKernel_sum_f16.
_NCCL = re.compile(
    r"(?:^|[\s:])(?:nccl(?:Dev|Sym|SymDev|Symk|SymkDev)?Kernel_?|nccl(?=(?:All|Reduce|Broadcast|SendRecv)\w*Kernel))"
    r"([A-Z][A-Za-z]*?)(?=_|\(|$|Ring|Tree|Coll)"
)
_GENERIC_COMM = re.compile(r"(?:^|[\s:])(?:nccl\w*Kernel_?Generic|(?:rccl|nccl|mscclpp?)\w*[gG]eneric\w*|mscclKernel)")

# (pattern, class, operation). The first that matches wins, so the exceptions stand before the rules.
_TABLE: tuple[tuple[re.Pattern[str], str, str | None], ...] = tuple(
    (re.compile(pattern), kernel_class, op)
    for pattern, kernel_class, op in (
        # DeepEP and HybridEP: get_dispatch_layout counts tokens on one device and moves nothing.
        (r"deep_ep::layout::", "moe", None),
        (r"(?:deep_ep|hybrid_ep)::\w*(?:::)?(?:dispatch|combine)", "comm", "all_to_all"),
        (r"(?:deep_ep|hybrid_ep)::(?:intranode|internode|internode_ll)::", "comm", None),
        # symmetric memory, vLLM/SGLang/TensorRT-LLM custom all-reduce, TransformerEngine userbuffers, NVSHMEM
        (r"(?:^|[\s:])(?:multimem|one_shot|two_shot)_all_reduce\w*kernel", "comm", "all_reduce"),
        (r"(?:^|[\s:])(?:multimem|one_shot|two_shot)_all_gather\w*kernel", "comm", "all_gather"),
        (r"(?:^|[\s:])(?:multimem|one_shot|two_shot)_reduce_scatter\w*kernel", "comm", "reduce_scatter"),
        (r"cross_device_reduce_[12]stage", "comm", "all_reduce"),
        (
            r"(?:oneShotAllReduce|twoShotAllReduce|allreduce_fusion_kernel|lamport_style_\w*allreduce)",
            "comm",
            "all_reduce",
        ),
        (r"userbuffers_\w*_(?:rs|reduce_?scatter)(?![a-z])", "comm", "reduce_scatter"),
        (r"userbuffers_\w*_(?:ag|all_?gather)(?![a-z])", "comm", "all_gather"),
        (r"kuserbuffers_push", "comm", "send_recv"),
        (r"(?:^|\s|:)k?userbuffers_", "comm", None),
        (r"(?:^|[\s:])nvshmem\w*(?:kernel|_on_stream)", "comm", None),
        # copies that run as kernels stay what their category says; below: compute
        (
            r"(?i)(?:fmha|flash(?!infer::quant)|attention|softmax_lse|mha_fwd|mha_bwd|sdpa|paged_attn)",
            "attention",
            None,
        ),
        (r"(?i)(?:grouped_gemm|groupgemm|grouped_mm|moe_gemm)", "grouped_gemm", None),
        (
            # not fbgemm, the name space of the embedding kernels; of Triton's kernels the templates, not the fusions
            r"(?i)(?:(?<!fb)gemm|cutlass.*(?:mm|conv)|cublas|splitk|nvjet|xmma|Cijk_|gemv|matmul|wgrad|dgrad|triton_tem\w*mm_)",
            "gemm",
            None,
        ),
        (r"(?i)(?:layer_?norm|rms_?norm|batch_?norm|group_?norm|ln_fwd|ln_bwd)", "norm", None),
        (
            r"(?i)(?:multi_tensor_apply|fused_?adam|adamw|optimizer|(?<![a-z])(?:adam|lamb(?!da)|sgd))",
            "optimizer",
            None,
        ),
        (r"(?i)(?:rotary|(?<![a-z])rope)", "elementwise", None),
        (r"(?i)(?:embedding|indexSelect|index_select)", "embedding", None),
        (r"(?i)(?:moe|permute|topk|router|expert)", "moe", None),
        (r"(?i)(?:reduce_kernel|softmax|cross_entropy|cunn_)", "reduction", None),
        (
            r"(?i)(?:elementwise|vectorized|triton_poi|pointwise|CatArray|copy_kernel|fill|dropout|gelu|silu|swiglu)",
            "elementwise",
            None,
        ),
    )
)


@lru_cache(maxsize=65536)
def classify(name: str) -> KernelClass:
    """Class and, for communication, operation of a kernel by its name.

    Classes: comm, gemm, grouped_gemm, attention, norm, elementwise, optimizer, embedding, moe, reduction, other. The
    operation is None for everything but communication, and for communication whose name does not tell.
    """
    if _GENERIC_COMM.search(name):
        return KernelClass("comm", None)
    match = _NCCL.search(name)
    if match:
        return KernelClass("comm", _NCCL_OPS.get(match.group(1).lower()))
    for pattern, kernel_class, op in _TABLE:
        if pattern.search(name):
            return KernelClass(kernel_class, op)
    return KernelClass("other", None)
