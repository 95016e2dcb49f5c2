"""The data-parallel chapter, its first part: gradients of plain DistributedDataParallel.

Once a step, after the last backward and outside autograd (finalize_model_grads: phase "other"), every gradient buffer is
summed over the replicas of its parameters by one all-reduce, on a group of one rank too:

======================  ==========================================  ==================================================
buffer                  elements                                    role
======================  ==========================================  ==================================================
dense, one for each     parameters.dense                            dp_cp: replicas over DP and CP; there is no
model chunk                                                         gradient collective on the CP group
experts, one for each   parameters.expert; none with EP 1           edp
model chunk
======================  ==========================================  ==================================================

Nothing is padded, the element type is the main gradients'. overlap_grad_reduce cuts the buffers into buckets on the first
stage only; on the others the one call stays where it is as long as Megatron-LM aligns it with the pipeline
(align_grad_reduce), which starts it outside autograd too.

No rule yet: buckets on the first stage, the distributed optimizer, FSDP. See not_modelled.

Source: reference section 2.7; the same in core_v0.4.0 ... core_v0.19.0, experts since 0.10.
"""

from __future__ import annotations

from traceanalyzer.expect import parameters, versions
from traceanalyzer.expect.model import Evidence, ExpectedCall, NotModelled
from traceanalyzer.expect.quantity import Quantity, call
from traceanalyzer.job import Job

DENSE, EXPERT = "dp_cp", "edp"

_WHERE = "distributed/param_and_grad_buffer.py: start_grad_sync"
_BUFFER = Evidence("run", f"megatron-core 0.16.1 recorded: dp2, tp2, pp2_vpp2, ep2_alltoall; {_WHERE}")
_ALIGNED = Evidence(
    "run",
    "megatron-core 0.16.1 run on a fake process group: PP2 with overlap_grad_reduce and grad_sync_func; "
    f"pipeline_parallel/schedules.py: grad_sync_func, distributed/distributed_data_parallel.py: bucket_size, {_WHERE}",
)


def calls(job: Job, rank: int, release: versions.Release) -> list[ExpectedCall]:
    """The gradient all-reduces of one rank in one step, dense first; empty where not_modelled says why.

    Raises JobError if the job does not say a size that is needed.
    """
    if job.forward_only or _without_rule(job, rank) or parameters.undescribed(job, rank):
        return []
    stage = job.layout.stage(rank)
    chunks = job.virtual_pipeline_model_parallel_size or 1
    buffers = [(DENSE, "gradients", parameters.dense(job, rank, chunk)) for chunk in range(chunks)]
    if _has_expert_rule(release):
        buffers += [(EXPERT, "expert gradients", parameters.expert(job, rank, chunk)) for chunk in range(chunks)]
    return [
        call(
            f"data: {component}",
            role=role,
            op="all_reduce",
            phase="other",
            component=component,
            dtype=job.main_grad_dtype,
            sent=elements,
            group_size=job.layout.group_size(role),
            calls=Quantity("1", "1", 1),
            evidence=_ALIGNED if job.overlap_grad_reduce else _BUFFER,
            stage=stage,
            versions=versions.from_on("expert grid") if role == EXPERT else "",
            note="one gradient buffer, summed over the ranks that hold the same parameters",
        )
        for role, component, elements in buffers
        if elements.value
    ]


def not_modelled(job: Job, rank: int, release: versions.Release) -> list[NotModelled]:
    """Data-parallel traffic without a rule, by flag."""
    if job.forward_only:
        return []
    found = [NotModelled(name, roles) for name, roles in _without_rule(job, rank)]
    gradients = (("other",), ("all_reduce",))
    if not found:
        found += [NotModelled(reason, _roles(job), *gradients) for reason in parameters.undescribed(job, rank)]
    if parameters.experts_apart(job) and not _has_expert_rule(release):
        found.append(NotModelled(f"experts in megatron-core {versions.before('expert grid')}", (EXPERT,)))
    if job.num_experts is not None and job.framework == "megatron-lm":
        found.append(NotModelled("averages of the experts' losses", ("dp",), *gradients))
    return found


def _roles(job: Job) -> tuple[str, ...]:
    return (DENSE, EXPERT) if parameters.experts_apart(job) else (DENSE,)


def _has_expert_rule(release: versions.Release) -> bool:
    return versions.since(release, "expert grid")


def _without_rule(job: Job, rank: int) -> list[tuple[str, tuple[str, ...]]]:
    """Options that this chapter has no rule for yet, with the roles they touch."""
    roles = _roles(job)
    if job.num_distributed_optimizer_instances > 1:
        roles += ("intra_dp_cp", "intra_edp", "inter_dist_opt")
    found = [name for name in _OPTIONS if parameters.is_on(job, name)]
    if job.overlap_grad_reduce and not found and not _is_aligned(job, rank):
        found = ["overlap_grad_reduce"]
    return [(name, roles) for name in found]


# Sharded optimizer or parameters; parameters of another type, which have a buffer of their own.
_OPTIONS: tuple[str, ...] = (
    "use_distributed_optimizer",
    "use_megatron_fsdp",
    "use_custom_fsdp",
    "use_torch_fsdp2",
    "fp8_param_gather",
    "fp4_param_gather",
)


def _is_aligned(job: Job, rank: int) -> bool:
    """Whether overlapped reduction is one call for each buffer, outside autograd: Megatron-LM behind the first stage."""
    return job.framework == "megatron-lm" and job.align_grad_reduce and job.layout.stage(rank) > 0
