"""The scalars of a step: gradient norm, overflow flag, success, loss average, learning rate, token count.

Tiny, but some of them make every rank wait for every other. Only what is certain has a rule; log-dependent calls (timer
barriers, interval logging, exit signals) are named as not modelled.

===================  =====================================  ==========================================================
call                 who makes it                           role, by release
===================  =====================================  ==========================================================
gradient norm        megatron-core's optimizer              no distributed optimizer: mp, and tp_ep_pp for experts;
                                                            distributed: world <= 0.12, dist_opt since 0.13
overflow flag        the same, with a loss scale (fp16)     the same, once for each chained optimizer
norm groups          the same, with clip_grad                the same, in the first step, since 0.19
zero count           the same, with log_num_zeros_in_grad   the same; 0.12 also without, where optimizers share a group
success, norm        Megatron-LM's train_step               mp since 0.11
zeros for the log    the same, with log_num_zeros_in_grad   mp since 0.11
loss average         Megatron-LM, last stage                dp (and cp) per micro-batch <= 0.12, dp_cp per step since
                                                            0.13; also in a forward-only job
learning rate        Megatron-LM's training_log             mp since 0.11
parameter norm       Megatron-LM, with log_params_norm      dp_cp, mp, tp_ep_pp unless its ranks are those of mp; since
                                                            0.14
rerun state          Megatron-LM's train_step               world, unless rerun_mode is disabled
token count          megatron-core's finalize_model_grads   pp, and dp_cp (dp <= 0.12), with calculate_per_token_loss
===================  =====================================  ==========================================================

Phases: optimizer for what optimizer.step() does, other for the rest. Source:
reference section 2.9 (the learning rate is reduced since 0.11, not 0.13: training/training.py of core_v0.11.0), checked in
the tags that versions.py names.
"""

from __future__ import annotations

from collections.abc import Iterator

from traceanalyzer.expect import data, parameters
from traceanalyzer.expect.model import Evidence, NotModelled
from traceanalyzer.expect.place import Place, Symbol
from traceanalyzer.expect.rules import Chapter, Gap, Rule

_RUN = "megatron-core 0.16.1 recorded: "
_FAKE = "run on a fake process group"
_NORM = Evidence("run", f"{_RUN}dp2, dp2_distopt, ep2_alltoall, w1024_*; optimizer/clip_grads.py: get_grad_norm_fp32")
_OVERFLOW = Evidence(
    "run",
    "megatron-core 0.16.1 run in real processes: fp16, EP2, with the distributed optimizer; "
    "optimizer/optimizer.py: MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan",
)
_ZEROS = Evidence(
    "run",
    f"megatron-core 0.16.1 {_FAKE}: DP3 with the distributed optimizer, EP2 without, log_num_zeros_in_grad; 0.12.3: TP2; "
    "optimizer/clip_grads.py: count_zeros_fp32",
)
_GROUPS = Evidence(
    "run",
    "megatron-core 0.19.0 run in real processes: EP2 with the distributed optimizer; "
    "optimizer/optimizer.py: MegatronOptimizer.has_grad_norm_group",
)
_TOKENS = Evidence("run", f"{_RUN}r2_pp2_per_token_loss; distributed/finalize_model_grads.py: finalize_model_grads")
_STEP = Evidence("source", "Megatron-LM training/training.py: train_step")
_LOG = Evidence("source", "Megatron-LM training/training.py: training_log")
_PARAMS_NORM = Evidence("source", "Megatron-LM training/utils.py: calc_params_l2_norm; training/training.py: train")
_LOSS = Evidence("source", "Megatron-LM training/training.py: train_step, evaluate")
_LOSS_FUNCTION = Evidence("source", "Megatron-LM pretrain_gpt.py: loss_func")
_RERUN = Evidence("source", "rerun_state_machine.py: RerunStateMachine.should_run_forward_backward")

_NOT_THERE = "E34"

_DISTRIBUTED = "(use_distributed_optimizer or use_megatron_fsdp)"
_OWN_GROUP = "since('distributed-optimizer group')"
_ONE_NORM = "since('one gradient norm')"

# A single optimizer of the older releases, and Megatron-FSDP's, computes the norm only to clip by it.
_HAS_NORM = f"(clip_grad or ({_ONE_NORM} and not use_megatron_fsdp))"
_HAS_SCALE = "(fp16 or loss_scale)"
_LOOP = "framework == 'megatron-lm'"


def _scalar(
    name: str,
    role: str,
    when: str,
    evidence: Evidence,
    *,
    calls: str = "1",
    elements: str = "1",
    dtype: str = "float32",
    op: str = "all_reduce",
    phase: str = "other",
) -> Rule:
    return Rule(
        name=f"control: {name}",
        role=role,
        op=op,
        phase=phase,
        component=name,
        dtype=dtype,
        sent=elements,
        when=when,
        calls=calls,
        evidence=evidence,
        document=_NOT_THERE,
    )


def _statistic(
    name: str, when: str, calls: str, calls_shared: str, evidence: Evidence, dtype: str = "float32"
) -> Iterator[Rule]:
    """A statistic of the gradients, over the group of each chained optimizer.

    calls: of one optimizer that has a group of its own. calls_shared: of all optimizers where they share one group.
    """
    for role, condition, number in (
        ("mp", f"not {_DISTRIBUTED}", calls),
        ("tp_ep_pp", f"not {_DISTRIBUTED} and experts_apart", calls),
        ("dist_opt", f"{_DISTRIBUTED} and {_OWN_GROUP}", calls_shared),
        ("world", f"{_DISTRIBUTED} and not {_OWN_GROUP}", calls_shared),
    ):
        yield _scalar(
            name,
            role,
            f"training and {when} and {condition}",
            evidence,
            calls=number,
            dtype=dtype,
            phase="optimizer",
        )


_COUNTS = "counts of zeros"

_PER_TOKEN = "training and calculate_per_token_loss"

RULES: tuple[Rule, ...] = (
    # Loss and tokens of the micro-batches, for the log; the gradient does not depend on it.
    _scalar(
        "loss average",
        "dp_cp",
        f"{_LOOP} and not sft and last and since('loss once per step')",
        _LOSS,
        elements="2",
    ),
    _scalar(
        "loss over the sequence",
        "cp",
        f"{_LOOP} and not sft and last and not since('loss once per step') and CP > 1",
        _LOSS_FUNCTION,
        elements="2",
        calls="M",
    ),
    _scalar(
        "loss average",
        "dp",
        f"{_LOOP} and not sft and last and not since('loss once per step')",
        _LOSS_FUNCTION,
        elements="loss_values",
        calls="M",
    ),
    _scalar("token count", "pp", _PER_TOKEN, _TOKENS, dtype="int32", op="broadcast"),
    _scalar("token count", "dp_cp", f"{_PER_TOKEN} and since('token count over CP')", _TOKENS, dtype="int32"),
    _scalar("token count", "dp", f"{_PER_TOKEN} and not since('token count over CP')", _TOKENS, dtype="int32"),
    _scalar(
        "rerun state",
        "world",
        f"training and {_LOOP} and rerun_mode not in (None, 'disabled')",
        _RERUN,
        dtype="int32",
    ),
    *_statistic("overflow flag", _HAS_SCALE, "1", "optimizers", _OVERFLOW),
    _scalar(
        "gradient norm",
        "dp_cp",
        f"training and use_torch_fsdp2 and {_HAS_NORM}",
        _NORM,
        phase="optimizer",
    ),
    *_statistic("gradient norm", _HAS_NORM, "1", "statistics", _NORM),
    _scalar(
        "zero count", "dp_cp", "training and use_torch_fsdp2 and counts_zeros", _ZEROS, dtype=_COUNTS, phase="optimizer"
    ),
    *_statistic(
        "gradient norm groups",
        "first_step and clip_grad and since('gradient norm groups')",
        "1",
        "optimizers",
        _GROUPS,
        dtype="int32",
    ),
    *_statistic("zero count", "counts_zeros", "1", "statistics", _ZEROS, dtype=_COUNTS),
    _scalar("success of the step", "mp", "training and mp_scalars", _STEP, dtype="int32"),
    _scalar("gradient norm for the log", "mp", "training and mp_scalars", _STEP),
    _scalar("zeros for the log", "mp", "training and mp_scalars and log_num_zeros_in_grad", _STEP),
    _scalar("learning rate for the log", "mp", "training and mp_scalars", _LOG),
    _scalar("parameter norm", "dp_cp", "training and knows_parameter_norm", _PARAMS_NORM),
    _scalar("parameter norm", "mp", "training and knows_parameter_norm", _PARAMS_NORM),
    _scalar("parameter norm", "tp_ep_pp", "training and knows_parameter_norm and expert_ranks_differ", _PARAMS_NORM),
)


def _counts_zeros(place: Place) -> bool:
    """optimizer.py, ChainedOptimizer.step: 0.12 counts in any case, unless the optimizers have groups of their own."""
    job = place.job
    if job.log_num_zeros_in_grad:
        return True
    if not place.has("one gradient norm") or place.has("zeros counted on request") or job.use_megatron_fsdp:
        return False
    return job.use_distributed_optimizer or data.optimizers(place) == 1


def _expert_ranks_differ(place: Place) -> bool:
    layout = place.job.layout
    return layout.group_of("mp", place.rank) != layout.group_of("tp_ep_pp", place.rank)


def _mp_scalars(place: Place) -> bool:
    return place.job.framework == "megatron-lm" and place.has("scalars over model parallel")


def _knows_parameter_norm(place: Place) -> bool:
    job = place.job
    sharded = job.use_megatron_fsdp or job.use_torch_fsdp2
    is_asked = job.log_params_norm and job.framework == "megatron-lm"
    return is_asked and not sharded and place.has("parameter norm over DP x CP")


# -- what the rules do not know --------------------------------------------------------------------------------------


def _optimizer_gaps(place: Place) -> Iterator[NotModelled]:
    job = place.job
    if job.forward_only:
        return
    apart = parameters.experts_apart(job)
    groups: tuple[str, ...] = ("mp", "tp_ep_pp") if apart else ("mp",)
    if job.use_distributed_optimizer or job.use_megatron_fsdp:
        groups = ("dist_opt",) if place.has("distributed-optimizer group") else ("world",)
    if job.use_megatron_fsdp and apart:
        yield NotModelled("use_megatron_fsdp with experts", groups, ("optimizer",), ("all_reduce",))
    if data.apart_by_tensor_parallelism(place):
        roles = ("mp", "tp_ep_pp") if groups == ("mp",) else groups
        yield NotModelled("experts with their own tensor parallelism", roles, ("optimizer",), ("all_reduce",))
    if job.optimizer not in ("adam", "sgd"):
        roles = tuple(dict.fromkeys((*groups, "mp", "world")))
        yield NotModelled(f"optimizer {job.optimizer}", roles, ("optimizer",))


def _flag(name: str, roles: tuple[str, ...], ops: tuple[str, ...] = ()) -> Gap:
    return Gap(what=name, roles=roles, when=f"training and on({name!r})", ops=ops)


CHAPTER = Chapter(
    name="control",
    title="Scalars of a step",
    source="reference section 2.9",
    rules=RULES,
    symbols={
        "optimizers": Symbol("chained optimizers: dense, experts', the first chunk's own", data.optimizers),
        "statistics": Symbol(
            "times that optimizers which share a group reduce one statistic: once since 0.12, before each",
            lambda place: 1 if place.has("one gradient norm") else data.optimizers(place),
        ),
        "loss_values": Symbol(
            "values of the loss that are averaged: sum and tokens since 0.7, before the mean",
            lambda place: 2 if place.has("loss sum and tokens") else 1,
        ),
        "experts_apart": Symbol(
            "whether the experts' parameters have an optimizer of their own",
            lambda place: parameters.experts_apart(place.job),
        ),
        "counts_zeros": Symbol("whether zeros in the gradients are counted", _counts_zeros),
        "mp_scalars": Symbol("whether the training loop agrees on scalars over tensor x pipeline", _mp_scalars),
        "knows_parameter_norm": Symbol("whether the norm of the parameters is logged, as known", _knows_parameter_norm),
        "expert_ranks_differ": Symbol(
            "whether tensor x pipeline and expert tensor x expert x pipeline are other ranks", _expert_ranks_differ
        ),
    },
    gaps=(
        Gap(
            what="training loop: framework unknown",
            when="framework not in ('megatron-lm', 'megatron-core')",
            roles=("mp", "dp", "dp_cp", "cp", "world"),
            phases=("other",),
            ops=("all_reduce", "barrier"),
        ),
        Gap(
            what="interval logging",
            when="framework == 'megatron-lm'",
            roles=("world",),
            phases=("other",),
            ops=("barrier", "all_reduce", "all_gather"),
        ),
        Gap(
            what="sft: loss average",
            when="framework == 'megatron-lm' and sft",
            roles=("dp", "dp_cp", "cp"),
            phases=("other",),
            ops=("all_reduce",),
        ),
        Gap(
            what="log_params_norm",
            when="training and log_params_norm and not knows_parameter_norm",
            roles=("mp", "dp", "dp_cp", "tp_ep_pp"),
            phases=("other",),
            ops=("all_reduce",),
        ),
        Gap(
            what="timing_log_level",
            when="training and timing_log_level > 0 and barrier_with_L1_time",
            roles=("world",),
            ops=("barrier", "all_reduce"),
        ),
        _flag("exit_duration_in_mins", ("world",), ("all_reduce",)),
        _flag("exit_signal_handler", ("world",), ("all_gather",)),
        _flag("log_straggler", ("world",)),
        _flag("check_weight_hash_across_dp_replicas_interval", ("dp", "dp_cp")),
        Gap(
            what="mtp_detach_heads",
            when="training and on('mtp_detach_heads')",
            roles=("mp", "tp_ep_pp", "dist_opt"),
            phases=("optimizer",),
            ops=("all_reduce",),
        ),
        _flag("qk_clip", ("dp_cp",), ("all_reduce",)),
        _flag("log_max_attention_logit", ("dp_cp",), ("all_reduce",)),
    ),
    more_gaps=_optimizer_gaps,
)
