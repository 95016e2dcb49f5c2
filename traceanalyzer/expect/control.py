"""The scalars of a step: gradient norm, overflow flag, success, loss average, learning rate, token count.

Tiny, but some of them make every rank wait for every other. Only what is certain has a rule; log-dependent calls (timer
barriers, interval logging, exit signals) are named as not modelled.

===================  =====================================  ==========================================================
call                 who makes it                           role, by release
===================  =====================================  ==========================================================
gradient norm        megatron-core's optimizer              no distributed optimizer: mp, and tp_ep_pp for experts;
                                                            distributed: world <= 0.12, dist_opt since 0.13
overflow flag        the same, with a loss scale (fp16)     the same, once for each chained optimizer
success, norm        Megatron-LM's train_step               mp since 0.11
loss average         Megatron-LM, last stage                dp (and cp) per micro-batch <= 0.12, dp_cp per step since
                                                            0.13; also in a forward-only job
learning rate        Megatron-LM's training_log             mp since 0.11
rerun state          Megatron-LM's train_step               world, unless rerun_mode is disabled
token count          megatron-core's finalize_model_grads   pp and dp_cp, with calculate_per_token_loss
===================  =====================================  ==========================================================

Phases: optimizer for what optimizer.step() does, other for the rest. Source: reference section 2.9 (the learning rate is
reduced since 0.11, not 0.13: training/training.py of core_v0.11.0), checked in the tags that versions.py names.
"""

from __future__ import annotations

from collections.abc import Iterator

from traceanalyzer.expect import parameters, versions
from traceanalyzer.expect.model import Evidence, ExpectedCall, NotModelled
from traceanalyzer.expect.quantity import Quantity, call
from traceanalyzer.job import Job

_RUN = "megatron-core 0.16.1 recorded: "
_NORM = Evidence("run", f"{_RUN}dp2, dp2_distopt, ep2_alltoall, w1024_*; optimizer/clip_grads.py: get_grad_norm_fp32")
_OVERFLOW = Evidence("source", "optimizer/optimizer.py: MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan")
_TOKENS = Evidence("run", f"{_RUN}r2_pp2_per_token_loss; distributed/finalize_model_grads.py: finalize_model_grads")
_STEP = Evidence("source", "Megatron-LM training/training.py: train_step")
_LOG = Evidence("source", "Megatron-LM training/training.py: training_log")
_LOSS = Evidence("source", "Megatron-LM training/training.py: train_step, evaluate")
_LOSS_FUNCTION = Evidence("source", "Megatron-LM pretrain_gpt.py: loss_func")
_RERUN = Evidence("source", "rerun_state_machine.py: RerunStateMachine.should_run_forward_backward")

_ONE = Quantity("1", "1", 1)
_TWO = Quantity("2", "2", 2)


def calls(job: Job, rank: int, release: versions.Release) -> list[ExpectedCall]:
    """The scalar calls of one rank in one successful step. Raises JobError if the job does not say what is needed."""
    rows = [*_loss_average(job, rank, release)]
    if not job.forward_only:
        rows += [
            *_token_count(job, rank),
            *_rerun(job, rank),
            *_optimizer(job, rank, release),
            *_training_loop(job, rank, release),
        ]
    return rows


def _scalar(
    job: Job,
    rank: int,
    component: str,
    role: str,
    evidence: Evidence,
    *,
    elements: Quantity = _ONE,
    count: Quantity = _ONE,
    dtype: str = "float32",
    op: str = "all_reduce",
    phase: str = "other",
    words: str = "",
) -> ExpectedCall:
    return call(
        f"control: {component}",
        role=role,
        op=op,
        phase=phase,
        component=component,
        dtype=dtype,
        sent=elements,
        group_size=job.layout.group_size(role),
        calls=count,
        evidence=evidence,
        stage=job.layout.stage(rank),
        versions=words,
    )


# -- optimizer -------------------------------------------------------------------------------------------------------


def _statistics(job: Job, release: versions.Release) -> tuple[list[str], str]:
    """The group of each chained optimizer's statistics, dense first; and the releases this holds for."""
    optimizers = 2 if parameters.experts_apart(job) else 1
    if not _is_distributed(job):
        return ["mp", "tp_ep_pp"][:optimizers], ""
    behaviour = "distributed-optimizer group"
    if versions.since(release, behaviour):
        return ["dist_opt"] * optimizers, versions.from_on(behaviour)
    return ["world"] * optimizers, versions.before(behaviour)


def _is_distributed(job: Job) -> bool:
    return job.use_distributed_optimizer or job.use_megatron_fsdp


def _optimizer(job: Job, rank: int, release: versions.Release) -> Iterator[ExpectedCall]:
    groups, words = _statistics(job, release)
    if job.fp16 or job.loss_scale:
        for role in dict.fromkeys(groups):
            yield _scalar(
                job,
                rank,
                "overflow flag",
                role,
                _OVERFLOW,
                count=_times(groups.count(role), "optimizers"),
                phase="optimizer",
                words=words,
            )
    if not _computes_norm(job, release):
        return
    if job.use_torch_fsdp2:
        yield _scalar(job, rank, "gradient norm", "dp_cp", _NORM, phase="optimizer")
    shared = versions.since(release, "one gradient norm")
    for role in dict.fromkeys(groups):
        count = _ONE if shared else _times(groups.count(role), "optimizers")
        yield _scalar(job, rank, "gradient norm", role, _NORM, count=count, phase="optimizer", words=words)


def _times(number: int, what: str) -> Quantity:
    return _ONE if number == 1 else Quantity(what, f"{number} {what}", number)


def _computes_norm(job: Job, release: versions.Release) -> bool:
    """A single optimizer of the older releases, and Megatron-FSDP's, computes the norm only to clip by it."""
    if versions.since(release, "one gradient norm") and not job.use_megatron_fsdp:
        return True
    return job.extra.get("clip_grad", 1.0) not in (0, None)


# -- Megatron-LM's training loop -------------------------------------------------------------------------------------


def _training_loop(job: Job, rank: int, release: versions.Release) -> Iterator[ExpectedCall]:
    behaviour = "scalars over model parallel"
    if job.framework != "megatron-lm" or not versions.since(release, behaviour):
        return
    words = versions.from_on(behaviour)
    yield _scalar(job, rank, "success of the step", "mp", _STEP, dtype="int32", words=words)
    yield _scalar(job, rank, "gradient norm for the log", "mp", _STEP, words=words)
    yield _scalar(job, rank, "learning rate for the log", "mp", _LOG, words=words)


def _rerun(job: Job, rank: int) -> Iterator[ExpectedCall]:
    if job.framework == "megatron-lm" and job.rerun_mode not in (None, "disabled"):
        yield _scalar(job, rank, "rerun state", "world", _RERUN, dtype="int32")


def _loss_average(job: Job, rank: int, release: versions.Release) -> Iterator[ExpectedCall]:
    """Loss and tokens of the micro-batches, for the log; the gradient does not depend on it."""
    if job.framework != "megatron-lm" or job.sft:
        return
    if job.layout.stage(rank) != job.pipeline_model_parallel_size - 1:
        return
    per_step = "loss once per step"
    if versions.since(release, per_step):
        words = versions.from_on(per_step)
        yield _scalar(job, rank, "loss average", "dp_cp", _LOSS, elements=_TWO, words=words)
        return
    (micro_batches,) = job.require("num_microbatches")
    count = Quantity("M", f"{micro_batches} micro-batches", micro_batches)
    both = versions.since(release, "loss sum and tokens")
    words = versions.between("loss sum and tokens", per_step) if both else versions.before("loss sum and tokens")
    if job.context_parallel_size > 1:
        words_cp = versions.before(per_step)
        yield _scalar(
            job, rank, "loss over the sequence", "cp", _LOSS_FUNCTION, elements=_TWO, count=count, words=words_cp
        )
    elements = _TWO if both else _ONE
    yield _scalar(job, rank, "loss average", "dp", _LOSS_FUNCTION, elements=elements, count=count, words=words)


def _token_count(job: Job, rank: int) -> Iterator[ExpectedCall]:
    if job.calculate_per_token_loss:
        yield _scalar(job, rank, "token count", "pp", _TOKENS, dtype="int32", op="broadcast")
        yield _scalar(job, rank, "token count", "dp_cp", _TOKENS, dtype="int32")


# -- what the rules do not know --------------------------------------------------------------------------------------


def not_modelled(job: Job, release: versions.Release) -> list[NotModelled]:
    """Scalars and control calls without a rule, by flag; the training loop's as a whole while it is unknown."""
    found: list[NotModelled] = []
    if job.framework not in ("megatron-lm", "megatron-core"):
        loop = ("mp", "dp", "dp_cp", "cp", "world")
        found.append(NotModelled("training loop: framework unknown", loop, ("other",), ("all_reduce", "barrier")))
    if job.framework == "megatron-lm":
        found.append(NotModelled("interval logging", ("world",), ("other",), ("barrier", "all_reduce", "all_gather")))
        if job.sft:
            found.append(NotModelled("sft: loss average", ("dp", "dp_cp", "cp"), ("other",), ("all_reduce",)))
    if job.forward_only:
        return found
    statistics = tuple(dict.fromkeys(_statistics(job, release)[0]))
    optimizer = (statistics, ("optimizer",), ("all_reduce",))
    if job.log_num_zeros_in_grad:
        found.append(NotModelled("log_num_zeros_in_grad", *optimizer))
        found.append(NotModelled("log_num_zeros_in_grad", ("mp",), ("other",), ("all_reduce",)))
    if job.overlap_param_gather_with_optimizer_step:
        found.append(NotModelled("overlap_param_gather_with_optimizer_step", *optimizer))
    if job.use_megatron_fsdp and parameters.experts_apart(job):
        found.append(NotModelled("use_megatron_fsdp with experts", *optimizer))
    if str(job.extra.get("optimizer", "adam")) not in ("adam", "sgd"):
        found.append(NotModelled(f"optimizer {job.extra['optimizer']}", (*statistics, "mp", "world"), ("optimizer",)))
    if job.log_params_norm:
        found.append(NotModelled("log_params_norm", ("mp", "dp", "dp_cp", "tp_ep_pp"), ("other",), ("all_reduce",)))
    if job.timing_log_level > 0 and job.barrier_with_L1_time:
        found.append(NotModelled("timing_log_level", ("world",), (), ("barrier", "all_reduce")))
    for name, roles, ops in _FLAGS:
        if job.extra.get(name) not in (None, False, 0, "None", "False"):
            found.append(NotModelled(name, roles, (), ops))
    return found


# Options that Job has no field for.
_FLAGS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("exit_duration_in_mins", ("world",), ("all_reduce",)),
    ("exit_signal_handler", ("world",), ("all_gather",)),
    ("log_straggler", ("world",), ()),
    ("check_weight_hash_across_dp_replicas_interval", ("dp", "dp_cp"), ()),
    ("qk_clip", ("dp_cp",), ("all_reduce",)),
    ("log_max_attention_logit", ("dp_cp",), ("all_reduce",)),
)
