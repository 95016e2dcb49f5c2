"""The data-parallel chapter: gradients and parameters of DistributedDataParallel, with and without distributed optimizer.

Gradients are summed once a step over the replicas of their parameters, bucket by bucket (buckets.py); with the
distributed optimizer each rank keeps a shard of every bucket and gathers the updated parameters. A call on a group of
one rank is made too. n stands for the elements of a bucket with its padding.

==========================  =============================  =========================================================
setting                     gradients                      parameters
==========================  =============================  =========================================================
plain                       all-reduce n                   none
distributed optimizer       reduce-scatter n -> n/shards   all-gather n/shards -> n, in the parameters' type
.. in several instances     the same inside an instance,   all-gather inside an instance
                            then all-reduce of n/shards
.. ddp_reduce_scatter_      all-to-all n -> n              all-gather
with_fp32_accumulation
==========================  =============================  =========================================================

=================  ==================  ======================  ========================================
replicas           one instance        inside an instance      across instances
=================  ==================  ======================  ========================================
dense, over        dp_cp               intra_dp_cp             inter_dist_opt
DP x CP
experts            edp                 intra_edp               inter_dist_opt, the dense ones' group
=================  ==================  ======================  ========================================

There is no gradient collective on the context-parallel group. Experts are apart with expert parallelism only.

When. Gradients: after the last backward (finalize_model_grads: phase "other"). With overlap_grad_reduce they start
inside the last micro-batch's backward, except where the pipeline starts them: Megatron-LM's align_grad_reduce does so
(phase "other") on all stages behind the first, and on all stages when interleaved. In the first step of a process all
start after the backward (since 0.16), because no bucket knows yet how often its gradients arrive. For the same reason
those that the pipeline starts are sent twice with several instances (since 0.16). Parameters: at the end of
optimizer.step(), once for every chained optimizer: dense and expert optimizer each gather the buckets of both. With
overlap_param_gather once, in the forward pass of the next step; Megatron-LM leaves it out in the first step and in the
first one after an evaluation or a checkpoint, before which it gathers by itself. With
overlap_param_gather_with_optimizer_step the first model chunk's gathers are in the step.

Averaging in the collective changes the operation, not the traffic. Jobs with FSDP are not this chapter's.

Source: reference section 2.7, core_v0.4.0 ... core_v0.19.0, distributed/param_and_grad_buffer.py,
distributed/distributed_data_parallel.py, pipeline_parallel/schedules.py, optimizer/distrib_optimizer.py; Megatron-LM
training/training.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from traceanalyzer.expect import buckets, parameters, versions
from traceanalyzer.expect.model import Evidence, NotModelled
from traceanalyzer.expect.place import Place, Symbol, is_on
from traceanalyzer.expect.rules import Avoid, Chapter, Rule
from traceanalyzer.job import Job

DENSE, EXPERT = "dp_cp", "edp"

_RECORDED = "megatron-core 0.16.1 recorded"
_FAKE = "run on a fake process group"
_SYNC = "distributed/param_and_grad_buffer.py: start_grad_sync"
_GATHER = "distributed/param_and_grad_buffer.py: start_param_sync"

_PLAIN = Evidence("run", f"{_RECORDED}: dp2, tp2, pp2_vpp2, ep2_alltoall; {_SYNC}")
_SHARDED = Evidence("run", f"{_RECORDED}: dp2_distopt, world16_tp2pp2cp2ep2dp2, w1024_*; {_SYNC}")
_OVERLAP = Evidence(
    "run",
    f"{_RECORDED}: dp2_overlap, dp2_distopt_overlap; megatron-core 0.13, 0.16 and 0.19 {_FAKE}: PP2 and PP2 VPP2 with "
    f"overlap_grad_reduce, with and without grad_sync_func; {_SYNC}",
)
_INSTANCES = Evidence(
    "run", f"megatron-core 0.16.1 {_FAKE}: DP8, EP2 DP8 with num_distributed_optimizer_instances=2; {_SYNC}"
)
_AGAIN = Evidence(
    "run",
    f"megatron-core 0.16.1 {_FAKE}: PP2 DP4 with num_distributed_optimizer_instances=2 and overlap_grad_reduce; "
    "distributed/param_and_grad_buffer.py: finish_grad_sync",
)
_EXCHANGE = Evidence(
    "run",
    f"megatron-core 0.16.1 {_FAKE}: DP4 with reduce_scatter_with_fp32_accumulation; "
    "distributed/reduce_scatter_with_fp32_accumulation.py: reduce_scatter_with_fp32_accumulation",
)
_GATHERED = Evidence("run", f"{_RECORDED}: dp2_distopt, world16_tp2pp2cp2ep2dp2, w1024_*; {_GATHER}")
_TWICE = Evidence(
    "run",
    f"{_RECORDED}: world16_tp2pp2cp2ep2dp2, w1024_moe_*; megatron-core 0.12 to 0.19 {_FAKE}, 0.11 in real "
    "processes: DP4 EP2; optimizer/distrib_optimizer.py: step_with_ready_grads",
)
_IN_FORWARD = Evidence(
    "run",
    f"{_RECORDED}: dp2_distopt_overlap; megatron-core 0.16.1 {_FAKE}: PP2 and PP2 VPP2 with overlap_param_gather; "
    f"distributed/distributed_data_parallel.py: _make_forward_pre_hook, {_GATHER}",
)
_IN_STEP = Evidence(
    "run",
    f"megatron-core 0.16.1 {_FAKE}: PP2 VPP2 with overlap_param_gather_with_optimizer_step; optimizer/optimizer.py: "
    "ChainedOptimizer.step_with_ready_grads",
)
_FP8 = Evidence(
    "source", "distributed/distributed_data_parallel.py: _allocate_buffers_for_parameters (uint8), fp8_utils.py"
)
_FP8_SCALES = Evidence(
    "source",
    "fp8_utils.py: quantize_param_shard; TransformerEngine pytorch/tensor/utils.py: "
    "_cast_master_weights_to_fp8_delayed_scaling, _cast_master_weights_to_fp8_current_scaling",
)

_WIDE = Avoid("fp32_reduction", "--grad-reduce-in-bf16", "wide * bucket * (shards-1)/shards * 2")
_WIDE_ALL_REDUCE = Avoid("fp32_reduction", "--grad-reduce-in-bf16", "wide * bucket * 2*(shards-1)/shards * 2")
_WIDE_ACROSS = Avoid("fp32_reduction", "--grad-reduce-in-bf16", "wide * bucket/shards * 2*(instances-1)/instances * 2")
_PADDED_GRADIENTS = Avoid("padding", "", "padding * gradient_bytes * (shards-1)/shards")
_PADDED_ACROSS = Avoid("padding", "", "padding * gradient_bytes/shards * 2*(instances-1)/instances")
_PADDING = Avoid("padding", "", "padding * parameter_bytes * (shards-1)/shards")
_PADDING_FP8 = Avoid("padding", "", "padding * (shards-1)/shards")
_REDUCE_ONCE = Avoid("repeated_gradient_reduction", "--no-align-grad-reduce")
_GATHER_ONCE = Avoid("double_param_gather", "--overlap-param-gather")

_ONE_INSTANCE = "use_distributed_optimizer and instances == 1"
_INSTANCED = "use_distributed_optimizer and instances > 1"


def _gradients(kind: str, one: str, inside: str, family: str) -> Iterator[Rule]:
    """Rules for the gradients of dense or expert buckets: one role if there is one instance, one inside instances."""
    component = f"{kind}gradients"

    def rule(
        name: str,
        role: str,
        op: str,
        received: str,
        when: str,
        evidence: Evidence,
        avoid: tuple[Avoid, Avoid | None],
        sent: str = "bucket",
        repeats: bool = False,
    ) -> Iterator[Rule]:
        common: dict[str, Any] = {
            "role": role,
            "op": op,
            "component": component,
            "dtype": "main gradients",
            "sent": sent,
            "received": received,
            "each": family,
            "document": "gradients of two bytes in the document, of four in Megatron unless told otherwise; E12",
        }
        yield Rule(
            name=f"data: {component}{name}",
            phase="other",
            calls="1",
            when=f"{when} and not in_backward",
            evidence=evidence,
            note="summed over the ranks that hold the same parameters",
            avoid=avoid[0],
            or_avoid=avoid[1],
            **common,
        )
        if repeats:
            yield Rule(
                name=f"data: {component}{name}, again",
                phase="other",
                calls="launches - 1",
                when=f"{when} and not in_backward",
                evidence=_AGAIN,
                note="started by the pipeline, and once more at the end because that left no handle",
                avoid=_REDUCE_ONCE,
                **common,
            )
        yield Rule(
            name=f"data: {component}{name}, overlapped",
            phase="backward",
            calls="1",
            when=f"{when} and in_backward",
            evidence=_OVERLAP,
            note="starts as soon as the last micro-batch's backward has filled the bucket",
            avoid=avoid[0],
            or_avoid=avoid[1],
            **common,
        )

    wide = (_WIDE, _PADDED_GRADIENTS)
    yield from rule("", one, "all_reduce", "", "not use_distributed_optimizer", _PLAIN, (_WIDE_ALL_REDUCE, None))
    yield from rule(
        " to shards", one, "reduce_scatter", "bucket/shards", f"{_ONE_INSTANCE} and not exchanges", _SHARDED, wide
    )
    yield from rule(" to shards, fp32 sum", one, "all_to_all", "", f"{_ONE_INSTANCE} and exchanges", _EXCHANGE, wide)
    yield from rule(
        " to shards of an instance",
        inside,
        "reduce_scatter",
        "bucket/shards",
        _INSTANCED,
        _INSTANCES,
        wide,
        repeats=True,
    )
    yield from rule(
        " across instances",
        "inter_dist_opt",
        "all_reduce",
        "",
        _INSTANCED,
        _INSTANCES,
        (_WIDE_ACROSS, _PADDED_ACROSS),
        "bucket/shards",
        repeats=True,
    )


def _parameters(kind: str, one: str, inside: str, family: str) -> Iterator[Rule]:
    """Rules for the parameters of dense or expert buckets."""
    component = f"{kind}parameters"
    for role, instance in ((one, _ONE_INSTANCE), (inside, _INSTANCED)):
        within = " in an instance" if role == inside else ""
        for dtype, quantized in (("parameters", "not quantized"), ("uint8", "quantized")):
            words = within + (" in fp8" if dtype == "uint8" else "")
            common: dict[str, Any] = {
                "role": role,
                "op": "all_gather",
                "component": component,
                "dtype": dtype,
                "sent": "bucket/shards",
                "received": "bucket",
                "each": family,
                "document": "E12",
            }
            padding = _PADDING_FP8 if dtype == "uint8" else _PADDING
            evidence = _FP8 if dtype == "uint8" else None
            when = f"{instance} and {quantized}"
            yield Rule(
                name=f"data: {component}{words}",
                phase="optimizer",
                calls="1",
                when=f"{when} and not overlap_param_gather",
                evidence=evidence or (_INSTANCES if role == inside else _GATHERED),
                avoid=padding,
                **common,
            )
            yield Rule(
                name=f"data: {component}{words}, again",
                phase="optimizer",
                calls="optimizers - 1",
                when=f"{when} and not overlap_param_gather",
                evidence=evidence or _TWICE,
                avoid=_GATHER_ONCE,
                note="each chained optimizer, dense and expert, gathers the buckets of both",
                **common,
            )
            yield Rule(
                name=f"data: {component}{words}, overlapped",
                phase="forward",
                calls="1",
                when=f"{when} and in_forward",
                evidence=evidence or _IN_FORWARD,
                avoid=padding,
                note="parameters that the step before has updated",
                **common,
            )
            yield Rule(
                name=f"data: {component}{words}, with the optimizer step",
                phase="optimizer",
                calls="1",
                when=f"{when} and in_step",
                evidence=evidence or _IN_STEP,
                avoid=padding,
                note="the first model chunk's, while the other chunks are updated",
                **common,
            )
        yield Rule(
            name=f"data: {component} scales{within}",
            role=role,
            op="all_reduce",
            phase="optimizer",
            component=f"{component}: fp8 scales",
            dtype="float32",
            sent=f"{kind.strip() or 'dense'}_fp8",
            calls="1",
            when=f"{instance} and {kind.strip() or 'dense'}_fp8 > 0 and fp8_recipe in ('delayed', 'tensorwise')",
            evidence=_FP8_SCALES,
            document="E34",
        )


RULES: tuple[Rule, ...] = (
    *_gradients("", DENSE, "intra_dp_cp", "dense buckets"),
    *_gradients("expert ", EXPERT, "intra_edp", "expert buckets"),
    *_parameters("", DENSE, "intra_dp_cp", "dense buckets"),
    *_parameters("expert ", EXPERT, "intra_edp", "expert buckets"),
)


# -- when calls are made ---------------------------------------------------------------------------------------------


def optimizers(place: Place) -> int:
    """Chained optimizers of a rank: dense, experts' if they are apart, one more if the first chunk has its own."""
    job = place.job
    experts = parameters.experts_apart(job)
    if experts and not place.has("same optimizers everywhere"):
        experts = bool(place.moe(place.layers))
    return 1 + experts + job.overlap_param_gather_with_optimizer_step


def _says_who_starts(job: Job) -> bool:
    """Whether the job's loop is known to set grad_sync_func or not to: megatron-core itself leaves it None."""
    return job.framework == "megatron-lm" or "align_grad_reduce" in job.given


def _aligned(place: Place) -> bool:
    """Whether the pipeline starts the reductions of this stage (schedules.py: grad_sync_func), outside autograd."""
    job = place.job
    if place.pp == 1 or not (job.align_grad_reduce and _says_who_starts(job)):
        return False
    return place.chunk_count > 1 or place.stage > 0


def _in_backward(place: Place) -> bool:
    counts = place.first_step and place.has("gradients counted in the first step")
    return place.job.overlap_grad_reduce and not counts and not _aligned(place)


def _launches(place: Place) -> int:
    # Where the pipeline starts the reductions, no bucket ever counts its gradients, so finish_grad_sync starts what has no
    # handle; with several instances there is none.
    job = place.job
    repeated = job.overlap_grad_reduce and job.num_distributed_optimizer_instances > 1
    return 2 if repeated and _aligned(place) and place.has("gradients counted in the first step") else 1


def _skips_gathers(place: Place) -> bool:
    return place.first_step and place.job.framework == "megatron-lm" and place.has("no gather in the first step")


# -- families --------------------------------------------------------------------------------------------------------


def _members(place: Place, expert: bool) -> list[Mapping[str, Any]]:
    job = place.job
    if _reason(place) or (expert and not _knows_experts(place)):
        return []
    with_step = job.overlap_param_gather_with_optimizer_step
    return [
        {
            "bucket": one.bucket.elements,
            "padding": one.bucket.padding,
            "quantized": one.quantized,
            "shards": job.layout.group_size(EXPERT if expert else DENSE) // job.num_distributed_optimizer_instances,
            "in_forward": job.overlap_param_gather
            and not _skips_gathers(place)
            and (place.first_step or not (with_step and one.chunk == 0)),
            "in_step": with_step and one.chunk == 0,
        }
        for one in buckets.of_place(place, expert=expert)
    ]


def _fp8_tensors(place: Place, expert: bool) -> int:
    if not place.job.fp8_param_gather or _reason(place):
        return 0
    held = (
        one
        for chunk in range(place.chunk_count)
        for one in buckets.parameter_list(place.job, place.stage, chunk, place.release)
    )
    return sum(one.matrix and one.expert == expert for one in held)


# -- what has no rule ------------------------------------------------------------------------------------------------

_FSDP = ("use_megatron_fsdp", "use_torch_fsdp2", "use_custom_fsdp")

# Optimizers that lay buffers out and gather in their own way (optimizer/layer_wise_optimizer.py).
_OPTIMIZERS = ("adam", "sgd")


_APART = versions.from_on("experts apart by tensor parallelism")


def apart_by_tensor_parallelism(place: Place) -> bool:
    """Whether experts are apart without expert parallelism, which parameters.experts_apart does not know."""
    job = place.job
    if job.num_experts is None or parameters.experts_apart(job):
        return False
    differs = job.layout.expert_tensor_size != job.tensor_model_parallel_size
    return differs and place.has("experts apart by tensor parallelism")


def _applies(place: Place) -> bool:
    return not place.job.forward_only and not any(is_on(place.job, name) for name in _FSDP)


def _knows_experts(place: Place) -> bool:
    return place.has("expert grid") or not parameters.experts_apart(place.job)


_LOOP_UNKNOWN = "overlap_grad_reduce: training loop unknown"


def _depends_on_loop(place: Place) -> bool:
    """Whether an unknown loop decides who starts the reductions, on a first stage also which chunks have buckets.

    Nothing is open without a pipeline, and on the first stage of one that is not interleaved. Behind the first, a job that
    was captured says it: align_grad_reduce is there whether grad_sync_func was set.
    """
    is_open = place.pp > 1 and (place.stage > 0 or place.chunk_count > 1)
    known = place.job.framework == "megatron-lm" or (place.stage > 0 and _says_who_starts(place.job))
    return place.job.overlap_grad_reduce and is_open and not known


def _reason(place: Place) -> str:
    """Why no bucket of the place can be said, "" if they can: not this chapter's, an option, an old release, a model."""
    job = place.job
    if not _applies(place):
        return "not data parallel"
    for name in ("fp4_param_gather", "fp4_param"):
        if is_on(job, name):
            return name
    if job.fp8_param_gather and job.fp8_recipe == "mxfp8":
        return "fp8_param_gather with mxfp8"
    if job.fp8_param_gather and job.first_last_layers_bf16:
        return "fp8_param_gather with first_last_layers_bf16"
    if job.optimizer not in _OPTIMIZERS:
        return f"optimizer {job.optimizer}"
    if apart_by_tensor_parallelism(place):
        return f"experts with their own tensor parallelism in megatron-core {_APART}"
    old = not place.has("parameter gather by bucket")
    if old and (job.use_distributed_optimizer or job.overlap_grad_reduce):
        option = "use_distributed_optimizer" if job.use_distributed_optimizer else "overlap_grad_reduce"
        return f"{option} in megatron-core {versions.before('parameter gather by bucket')}"
    if _depends_on_loop(place) and place.stage == 0:
        return f"{_LOOP_UNKNOWN}: buckets"
    return next(iter(parameters.undescribed(job, place.rank, place.release)), "")


def _roles(place: Place) -> tuple[str, ...]:
    apart = parameters.experts_apart(place.job) or apart_by_tensor_parallelism(place)
    roles: tuple[str, ...] = (DENSE, EXPERT) if apart else (DENSE,)
    if place.job.num_distributed_optimizer_instances > 1:
        roles += ("intra_dp_cp", "intra_edp", "inter_dist_opt") if apart else ("intra_dp_cp", "inter_dist_opt")
    return roles


def _more_gaps(place: Place) -> Iterator[NotModelled]:
    if not _applies(place):
        return
    reason = _reason(place)
    if reason:
        yield NotModelled(reason, _roles(place))
    elif _depends_on_loop(place):
        ops = ("all_reduce", "reduce_scatter", "all_to_all")
        yield NotModelled(_LOOP_UNKNOWN, _roles(place), ("backward", "other"), ops)
    if parameters.experts_apart(place.job) and not _knows_experts(place):
        yield NotModelled(f"experts in megatron-core {versions.before('expert grid')}", (EXPERT,))
    job = place.job
    if job.fp8_param_gather and not reason:
        if job.fp8_recipe not in ("delayed", "tensorwise"):
            yield NotModelled(
                f"fp8_param_gather: scales of {job.fp8_recipe}", _roles(place), ("optimizer",), ("all_reduce",)
            )
        if job.overlap_param_gather_with_optimizer_step:
            yield NotModelled(
                "fp8_param_gather with overlap_param_gather_with_optimizer_step",
                _roles(place),
                ("optimizer",),
                ("all_reduce",),
            )


CHAPTER = Chapter(
    name="data",
    title="Data parallel",
    source="reference section 2.7",
    rules=RULES,
    more_gaps=_more_gaps,
    symbols={
        "optimizers": Symbol("chained optimizers: dense, experts', the first chunk's own", optimizers),
        "in_backward": Symbol("whether reductions start inside the backward pass", _in_backward),
        "launches": Symbol("times a reduction outside the backward pass is started", _launches),
        "exchanges": Symbol(
            "whether an all-to-all and a sum in fp32 stand for the reduce-scatter",
            lambda place: (
                place.job.ddp_reduce_scatter_with_fp32_accumulation and place.has("reduce-scatter by all-to-all")
            ),
        ),
        "gradient_bytes": Symbol(
            "bytes of a gradient", lambda place: 4 if place.job.main_grad_dtype == "float32" else 2
        ),
        "parameter_bytes": Symbol(
            "bytes of a parameter", lambda place: 4 if place.job.activation_dtype == "float32" else 2
        ),
        "dense_fp8": Symbol("dense weights stored in fp8, tensors", lambda place: _fp8_tensors(place, False)),
        "expert_fp8": Symbol("experts' weights stored in fp8, tensors", lambda place: _fp8_tensors(place, True)),
    },
    families={
        "dense buckets": lambda place: _members(place, False),
        "expert buckets": lambda place: _members(place, True),
    },
    family_words={
        "dense buckets": "one for each bucket of the parameters replicated over DP x CP",
        "expert buckets": "one for each bucket of the experts' parameters",
    },
)
