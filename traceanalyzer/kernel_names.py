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


class Library(NamedTuple):
    """One pattern of communication: of which library, what it is, and where its name comes from."""

    pattern: re.Pattern[str]
    op: str | None
    library: str
    what: str
    source: str


COMMUNICATION: tuple[Library, ...] = tuple(
    Library(re.compile(pattern), op, library, what, source)
    for pattern, op, library, what, source in (
        (
            r"mscclpp|mscclKernel|msccl_?\w*[gG]eneric",
            None, "MSCCL", "MSCCL and MSCCL++: programs of collectives", "names in microsoft/mscclpp and msccl-executor",
        ),
        (
            r"(?:^|[\s:])(?:rccl\w*[gG]eneric\w*)",
            None, "RCCL", "AMD's NCCL: one kernel for every collective", "recorded (MI210, MI300)",
        ),
        (
            r"(?:^|[\s:])(?:nccl\w*Kernel_?Generic|nccl\w*[gG]eneric\w*)",
            None, "NCCL", "one kernel for several collectives", "recorded (NCCL 2.19 and later)",
        ),
        # DeepEP and HybridEP: get_dispatch_layout counts tokens on one device and moves nothing (see _TABLE).
        (
            r"(?:deep_ep|hybrid_ep)::(?!layout::)\w*(?:::)?(?:dispatch|combine)",
            "all_to_all", "DeepEP", "tokens to experts and back", "names in deepseek-ai/DeepEP",
        ),
        (
            r"(?:deep_ep|hybrid_ep)::(?:intranode|internode|internode_ll)::",
            None, "DeepEP", "notifications and barriers around it", "names in deepseek-ai/DeepEP",
        ),
        (
            r"(?:^|[\s:])(?:multimem_)?(?:multimem|one_shot|two_shot)_all_reduce\w*kernel",
            "all_reduce", "symmetric memory", "torch's own collectives on peers' memory",
            "names in pytorch CUDASymmetricMemoryOps.cu",
        ),
        (
            r"(?:^|[\s:])(?:multimem|one_shot|two_shot)_all_gather\w*kernel",
            "all_gather", "symmetric memory", "torch's own collectives on peers' memory",
            "names in pytorch CUDASymmetricMemoryOps.cu",
        ),
        (
            r"(?:^|[\s:])(?:multimem|one_shot|two_shot)_reduce_scatter\w*kernel",
            "reduce_scatter", "symmetric memory", "torch's own collectives on peers' memory",
            "names in pytorch CUDASymmetricMemoryOps.cu",
        ),
        (
            r"cross_device_reduce_[12]stage",
            "all_reduce", "custom all-reduce", "vLLM's and SGLang's all-reduce on peers' memory",
            "names in vllm custom_all_reduce.cuh",
        ),
        (
            r"quickreduce::\w*all_?reduce",
            "all_reduce", "custom all-reduce", "vLLM's quantised all-reduce on AMD", "names in vllm quickreduce",
        ),
        (
            r"(?:(?:one|two)ShotAllReduce|allreduce_fusion_kernel|lamport_style_\w*allreduce)",
            "all_reduce", "TensorRT-LLM/FlashInfer", "all-reduce fused with normalisation",
            "names in TensorRT-LLM and flashinfer",
        ),
        (
            r"userbuffers_\w*_(?:rs|reduce_?scatter)(?![a-z])",
            "reduce_scatter", "userbuffers", "TransformerEngine's overlap with products",
            "names in TransformerEngine userbuffers.cu",
        ),
        (
            r"userbuffers_\w*_(?:ag|all_?gather)(?![a-z])",
            "all_gather", "userbuffers", "TransformerEngine's overlap with products",
            "names in TransformerEngine userbuffers.cu",
        ),
        (
            r"kuserbuffers_push",
            "send_recv", "userbuffers", "TransformerEngine's overlap with products",
            "names in TransformerEngine userbuffers.cu",
        ),
        (
            r"(?:^|\s|:)k?userbuffers_",
            None, "userbuffers", "TransformerEngine's overlap with products",
            "names in TransformerEngine userbuffers.cu",
        ),
        (
            r"(?:^|[\s:])nvshmem\w*(?:kernel|_on_stream)",
            None, "NVSHMEM", "one-sided messages", "names in NVSHMEM",
        ),
    )
)  # fmt: skip
"""Communication by the kernel's name beside NCCL's own names (_NCCL): the first that matches wins."""

PEER_COPY = re.compile(r"^Memcpy (?:PtoP|P2P|Peer)", re.IGNORECASE)
"""Copies between devices by the copy engines; in Kineto "Memcpy PtoP (Device -> Device)"."""

COPY_ENGINE = "copy engine"

# (pattern, class). The first that matches wins, so the exceptions stand before the rules.
_TABLE: tuple[tuple[re.Pattern[str], str, str | None], ...] = tuple(
    (re.compile(pattern), kernel_class, op)
    for pattern, kernel_class, op in (
        (r"deep_ep::layout::", "moe", None),
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
    found = _communication(name)
    if found is not None:
        return KernelClass("comm", found[0])
    for pattern, kernel_class, op in _TABLE:
        if pattern.search(name):
            return KernelClass(kernel_class, op)
    return KernelClass("other", None)


def _communication(name: str) -> tuple[str | None, str] | None:
    """Operation and library of a communication kernel; None for every other."""
    first = next((entry for entry in COMMUNICATION if entry.pattern.search(name)), None)
    match = None if first is not None and first.library in ("MSCCL", "RCCL", "NCCL") else _NCCL.search(name)
    if match:
        return _NCCL_OPS.get(match.group(1).lower()), "NCCL"
    return None if first is None else (first.op, first.library)


@lru_cache(maxsize=65536)
def library_of(name: str) -> str | None:
    """The library that a communication kernel, or a copy between devices, is of by its name; None if it does not tell.

    NCCL: also what other programs (Horovod, the user's own code) launch through it; they have no kernels of their own that
    communicate. On AMD, RCCL's kernels with NCCL's names count as NCCL.
    """
    if PEER_COPY.search(name):
        return COPY_ENGINE
    found = _communication(name)
    return None if found is None else found[1]
