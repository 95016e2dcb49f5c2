"""The micro-batch's way to the ranks: Megatron-LM broadcasts it over the tensor-parallel group (role "tp").

Only Megatron-LM's training loop does it (get_batch_on_this_tp_rank), not bare megatron-core: on every micro-batch, on
first and last stage only, with the full sequence length (before context parallelism cuts it), on a group of one rank
too. Elements of each:

=====================  ==========  ==================  ==========================
tensor                 type        elements            stages
=====================  ==========  ==================  ==========================
tokens, position_ids   int64       B * S               first
labels                 int64       B * S               last
loss_mask              float32     B * S               last
attention_mask         bool        B * 1 * S * S       first and last
cu_seqlens             int64 and   1 and 0             0.16: first twice, last
                       int32                           once; 0.17: first once
=====================  ==========  ==================  ==========================

With one stage every tensor once (cu_seqlens as on the first stage). The calls are part of each micro-batch's forward
step: phase "forward". Broadcasting the mask can be avoided, the kernels that know "causal" do not need it.

Source: Megatron-LM core_v0.5.0 ... core_v0.19.0, megatron/training/utils.py (core/utils.py since 0.18) and
pretrain_gpt.py: get_batch; reference section 2.3.
"""

from __future__ import annotations

from traceanalyzer.expect import shapes, versions
from traceanalyzer.expect.model import Evidence, ExpectedCall, NotModelled
from traceanalyzer.expect.quantity import Quantity, call
from traceanalyzer.job import Job

ROLE = "tp"

_WHERE = Evidence(
    "run",
    "megatron-core 0.16.1: get_batch_on_this_tp_rank executed alone; Megatron-LM training/utils.py: "
    "get_batch_on_this_tp_rank, pretrain_gpt.py: get_batch",
)

_MASK = ("attention_mask_broadcast", "--no-create-attention-mask-in-dataloader")


def calls(job: Job, rank: int, release: versions.Release) -> list[ExpectedCall]:
    """The broadcasts of one rank in one step; empty unless the framework is Megatron-LM and its function is known.

    Raises JobError if the job does not say a size that is needed.
    """
    if job.framework != "megatron-lm" or not versions.since(release, "batch per tensor"):
        return []
    stage, last = job.layout.stage(rank), job.pipeline_model_parallel_size - 1
    first_here, last_here = stage == 0, stage == last
    if not (first_here or last_here):
        return []
    (micro_batches,) = job.require("num_microbatches")
    fetches = _fetches(job, release)
    tokens = shapes.batch_tokens(job)
    (length,) = job.require("seq_length")
    tensors: list[tuple[str, str, Quantity, int, tuple[str, str] | None]] = []
    if first_here:
        tensors.append(("tokens", "int64", tokens, 1, None))
    if last_here:
        tensors.append(("labels", "int64", tokens, 1, None))
        tensors.append(("loss mask", "float32", tokens, 1, None))
    if job.create_attention_mask_in_dataloader:
        tensors.append(("attention mask", "bool", tokens.times("S", f"{length}", length), 1, _MASK))
    if first_here:
        tensors.append(("position ids", "int64", tokens, 1, None))
    packing = _packing(release, first_here)
    if packing:
        tensors.append(("packing length", "int64", Quantity("1", "1", 1), packing, None))
        tensors.append(("packing offsets", "int32", Quantity("0", "0", 0), packing, None))
    return [
        call(
            f"batch: {name}",
            role=ROLE,
            op="broadcast",
            phase="forward",
            component=f"data: {name}",
            dtype=dtype,
            sent=elements,
            group_size=job.tensor_model_parallel_size,
            calls=_count(times * fetches, micro_batches),
            evidence=_WHERE,
            stage=stage,
            avoid=avoid,
            versions=_span(release),
        )
        for name, dtype, elements, times, avoid in tensors
    ]


def not_modelled(job: Job, rank: int, release: versions.Release) -> list[NotModelled]:
    """The broadcasts as a whole while the framework is unknown, or where its way of sending is not known."""
    stage = job.layout.stage(rank)
    edge = stage in (0, job.pipeline_model_parallel_size - 1)
    if job.framework == "megatron-core" or not edge:
        return []
    if job.framework != "megatron-lm":
        return [NotModelled("data broadcast: framework unknown", (ROLE,), (), ("broadcast",))]
    if not versions.since(release, "batch per tensor"):
        before = versions.before("batch per tensor")
        return [NotModelled(f"data broadcast in Megatron-LM {before}", (ROLE,), (), ("broadcast",))]
    return []


def _fetches(job: Job, release: versions.Release) -> int:
    """How many model chunks of a first or last stage fetch a micro-batch."""
    chunks = job.virtual_pipeline_model_parallel_size or 1
    every = versions.since(release, "batch for every chunk") and not versions.since(release, "batch for its chunk")
    return chunks if every else 1


def _packing(release: versions.Release, first: bool) -> int:
    """Broadcasts of the packing length (and of the offsets) in one fetch of an unpacked batch."""
    if not versions.since(release, "cu_seqlens") or versions.since(release, "cu_seqlens for packed only"):
        return 0
    in_branch = int(first)
    at_end = 0 if versions.since(release, "cu_seqlens once") else 1
    return in_branch + at_end


def _count(times: int, micro_batches: int) -> Quantity:
    if times == 1:
        return Quantity("M", f"{micro_batches} micro-batches", micro_batches)
    return Quantity(f"{times} * M", f"{times} * {micro_batches} micro-batches", times * micro_batches)


def _span(release: versions.Release) -> str:
    if versions.since(release, "cu_seqlens for packed only"):
        return versions.from_on("cu_seqlens for packed only")
    if versions.since(release, "cu_seqlens once"):
        return versions.between("cu_seqlens once", "cu_seqlens for packed only")
    if versions.since(release, "cu_seqlens"):
        return versions.between("cu_seqlens", "cu_seqlens once")
    return versions.between("batch per tensor", "cu_seqlens")
