"""What makes Megatron stop before or in the first step: one generator of sentences per chapter, read by ``Job``.

A rule refuses only what the software refuses. Sources are files of megatron-core 0.16.1, compared with 0.11 to 0.19:

- a rule that every one of these releases has holds whatever the job's release;
- any other needs a stated ``megatron_core_version`` (``_within``), except where the option itself came with the rule;
- what only Megatron-LM's command line checks (training/arguments.py: validate_args; training/training.py) needs
  ``framework`` "megatron-lm": another loop around the library may run it;
- a fact that nobody stated refuses nothing.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from traceanalyzer.errors import JobError

if TYPE_CHECKING:
    from traceanalyzer.job import Job

_Rule: TypeAlias = "Callable[[Job], Iterator[str]]"

_RECOMPUTED = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out")


def ratio(dividend: int, divisor: int) -> str:
    """A division with its result, for messages: ``12 / 8 = 1.5``."""
    return f"{dividend} / {divisor} = {dividend / divisor:.6g}"


def release(version: str | None) -> tuple[int, int] | None:
    """Major and minor number of a megatron-core version, ``(0, 16)`` for "core_v0.16.1"; None if it has no two."""
    numbers = [int(part) for part in re.findall(r"\d+", version or "")[:2]]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else None


def check(job: Job, *, batch_known: bool) -> None:
    """Raise JobError with the first rule that the job breaks. ``batch_known``: num_microbatches is more than a guess.

    No release of Megatron lays ranks out in a product grid: what runs there is other software, with rules of its own.
    """
    if job.grid == "product":
        return
    chapters = (*_CHAPTERS, _interleaving) if batch_known else _CHAPTERS
    broken = next(itertools.chain.from_iterable(chapter(job) for chapter in chapters), None)
    if broken is not None:
        raise JobError(broken)


def _within(job: Job, first: int, last: int | None = None) -> bool:
    """Whether the job's release is stated and 0.``first`` or later, and no later than 0.``last``."""
    stated = release(job.megatron_core_version)
    return stated is not None and (0, first) <= stated and (last is None or stated <= (0, last))


def _trains_with_ddp(job: Job) -> bool:
    return not (job.forward_only or job.use_megatron_fsdp or job.use_torch_fsdp2)


def _heads(job: Job) -> tuple[int, int] | None:
    """Query heads and key-value groups of one TP rank; None if not known."""
    heads, groups, tp = job.num_attention_heads, job.num_query_groups, job.tensor_model_parallel_size
    if heads is None or groups is None:
        return None
    return heads // tp, heads // tp if job.multi_latent_attention else max(1, groups // tp)


# -- model and tensor parallel ---------------------------------------------------------------------------------------


def _has_dense_layer(job: Job) -> bool:
    if job.num_experts is None:
        return True
    if isinstance(job.moe_layer_freq, int):
        return job.moe_layer_freq > 1 and (job.num_layers or 0) > 1
    return 0 in job.moe_layer_freq


def _widths(job: Job) -> Iterator[str]:
    # core/utils.py: divide, called by ColumnParallelLinear, RowParallelLinear and Transformer Engine's linear layers.
    tp, etp = job.tensor_model_parallel_size, job.expert_tensor_parallel_size or job.tensor_model_parallel_size
    split: list[tuple[str, int | None, str, int]] = []
    if _has_dense_layer(job):
        split.append(("ffn_hidden_size", job.ffn_hidden_size, "tensor_model_parallel_size", tp))
    if job.num_experts is not None:
        split.append(("moe_ffn_hidden_size", job.moe_ffn_hidden_size, "expert_tensor_parallel_size", etp))
        shared = job.moe_shared_expert_intermediate_size
        split.append(("moe_shared_expert_intermediate_size", shared, "tensor_model_parallel_size", tp))
    for name, width, axis, size in split:
        if width is not None and width % size:
            yield (
                f"{axis}={size} does not divide {name}={width} ({ratio(width, size)}): the MLP is split over these "
                f"ranks; round {name} up to a multiple"
            )


def _model(job: Job) -> Iterator[str]:
    script = job.framework == "megatron-lm"
    if script and job.max_position_embeddings is not None and (job.seq_length or 0) > job.max_position_embeddings:
        yield (
            f"max_position_embeddings={job.max_position_embeddings} is less than seq_length={job.seq_length}: give at "
            f"least the sequence length"
        )
    # multi_latent_attention.py builds one key-value head for each query head.
    if script and job.multi_latent_attention and job.group_query_attention and _within(job, 16):
        yield "multi_latent_attention=True excludes group_query_attention=True: switch one of them off"
    if script and job.tp_comm_overlap and not job.sequence_parallel:
        yield "tp_comm_overlap=True needs sequence_parallel=True and tensor_model_parallel_size > 1"
    if script and job.mtp_num_layers and _within(job, 12, 17) and job.position_embedding_type not in ("rope", "none"):
        yield (
            f"mtp_num_layers={job.mtp_num_layers} with position_embedding_type={job.position_embedding_type!r}: "
            f"multi-token prediction needs 'rope' or 'none'"
        )


# -- context parallel ------------------------------------------------------------------------------------------------


def _context(job: Job) -> Iterator[str]:
    cp = job.context_parallel_size
    kinds = set(job.cp_comm_type)
    levels = job.hierarchical_context_parallel_sizes
    script = job.framework == "megatron-lm"
    if "a2a+p2p" in kinds and (cp > 1 or script) and not levels:
        yield (
            "cp_comm_type='a2a+p2p' without hierarchical_context_parallel_sizes: give the two sizes, all-to-all first, "
            f"whose product is context_parallel_size={cp}"
        )
    # extensions/transformer_engine.py hands both groups to attn_forward_func_with_cp, which takes exactly two.
    if "a2a+p2p" in kinds and cp > 1 and levels and len(levels) != 2:
        yield (
            f"hierarchical_context_parallel_sizes={' '.join(map(str, levels))} has {len(levels)} levels, but "
            f"cp_comm_type='a2a+p2p' needs two: the all-to-all size, then the ring's"
        )
    if levels and math.prod(levels) != cp:
        yield (
            f"hierarchical_context_parallel_sizes {' x '.join(map(str, levels))} = {math.prod(levels)} is not "
            f"context_parallel_size={cp}"
        )
    # transformer/dot_product_attention.py: DotProductAttention.__init__.
    if cp > 1 and job.transformer_impl == "local":
        yield f"context_parallel_size={cp} needs transformer_impl='transformer_engine', not 'local'"
    heads = _heads(job)
    if heads is not None and cp > 1:
        # Transformer Engine, context_parallel.py: AttnFuncWithCPAndQKVOA2A; flash_attn_a2a_communicate.
        for kind, size in (("a2a", cp), ("a2a+p2p", levels[0] if levels else 1)):
            if kind not in kinds:
                continue
            for what, count in (("num_attention_heads", heads[0]), ("num_query_groups", heads[1])):
                if count % size:
                    yield (
                        f"cp_comm_type={kind!r} spreads heads over {size} ranks: {what} per TP rank = {count} is no "
                        f"multiple of it ({ratio(count, size)}); use cp_comm_type='p2p', or a smaller "
                        f"context_parallel_size or tensor_model_parallel_size"
                    )
    if script and job.hybrid_context_parallel:
        if job.pipeline_model_parallel_size > 1:
            yield (
                f"hybrid_context_parallel=True excludes pipeline_model_parallel_size="
                f"{job.pipeline_model_parallel_size}: it must be 1"
            )
        if job.use_megatron_fsdp:
            yield "hybrid_context_parallel=True excludes use_megatron_fsdp=True: switch one of them off"
        if not job.calculate_per_token_loss:
            yield "hybrid_context_parallel=True needs calculate_per_token_loss=True"


# -- pipeline --------------------------------------------------------------------------------------------------------


def _pipeline(job: Job) -> Iterator[str]:
    pp, vpp = job.pipeline_model_parallel_size, job.virtual_pipeline_model_parallel_size
    script = job.framework == "megatron-lm"
    names = (
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "pipeline_model_parallel_layout",
    )
    given = [name for name in names if getattr(job, name) is not None]
    if script and len(given) > 1 and _within(job, 13):
        yield f"{' and '.join(given)} are both given: each fixes the chunks of a stage, give one of them"
    first, last = job.decoder_first_pipeline_num_layers, job.decoder_last_pipeline_num_layers
    uneven = first is not None or last is not None
    if script and uneven and given == [names[0]]:
        yield (
            f"num_layers_per_virtual_pipeline_stage={job.num_layers_per_virtual_pipeline_stage} with "
            f"decoder_first_pipeline_num_layers={first}, decoder_last_pipeline_num_layers={last}: give "
            f"num_virtual_stages_per_pipeline_rank instead"
        )
    middle = pp - (first is not None) - (last is not None)
    rest = None if job.num_layers is None else job.num_layers - (first or 0) - (last or 0)
    if uneven and middle > 0 and rest == 0 and _within(job, 16):
        yield (
            f"num_layers={job.num_layers} - first stage {first or 0} - last stage {last or 0} = 0 layers are left for "
            f"{middle} middle stages (pipeline_model_parallel_size={pp}): give the first and last stage fewer"
        )
    if script and vpp is not None and not job.overlap_p2p_comm and pp == 2:
        yield (
            f"virtual_pipeline_model_parallel_size={vpp} at pipeline_model_parallel_size=2 needs overlap_p2p_comm=True: "
            f"without it two sends and receives between the same two ranks would share a batch"
        )
    # schedules.py: forward_backward_pipelining_with_interleaving. The default of the first is the command line's.
    both = {"overlap_p2p_comm", "batch_p2p_comm"} <= job.given
    if vpp is not None and both and job.overlap_p2p_comm and job.batch_p2p_comm:
        yield "overlap_p2p_comm=True and batch_p2p_comm=True: at most one of them with an interleaved schedule"
    if job.overlap_p2p_comm_warmup_flush and not job.overlap_p2p_comm and (script or pp > 1):
        yield "overlap_p2p_comm_warmup_flush=True needs overlap_p2p_comm=True and an interleaved schedule"
    # model_parallel_config.py: ModelParallelConfig.__post_init__.
    if job.defer_embedding_wgrad_compute:
        if pp == 1:
            yield "defer_embedding_wgrad_compute=True needs pipeline_model_parallel_size > 1, but it is 1"
        if not job.gradient_accumulation_fusion:
            yield "defer_embedding_wgrad_compute=True needs gradient_accumulation_fusion=True"
        if job.wgrad_deferral_limit < 0:
            yield f"wgrad_deferral_limit={job.wgrad_deferral_limit}: must be 0 (all micro-batches) or more"


def _stages(job: Job) -> Iterator[str]:
    # pipeline_parallel_layer_layout.py: validate_layer_layout; transformer_config.py: "PP layout".
    parts = job.layout_stages
    if parts is None:
        return
    text = f"pipeline_model_parallel_layout={job.pipeline_model_parallel_layout!r}"
    others = [
        name
        for name in (
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        )
        if getattr(job, name) not in (None, False)
    ]
    if others:
        yield f"{text} excludes {' and '.join(others)}: the layout places every layer, drop the other"
    flat = "".join(parts)
    for letter, what, at_its_end in (("E", "first", flat[:1] == "E"), ("L", "last", flat[-1:] == "L")):
        if flat.count(letter) != 1 or not at_its_end:
            yield f"{text} has {flat.count(letter)} {letter}: exactly one, and it must be the {what} layer"
    count, layers = flat.count("m"), job.mtp_num_layers or 0
    if count != layers and (count or _within(job, 14)):
        yield f"{text} places {count} multi-token prediction layers (m), but mtp_num_layers={job.mtp_num_layers}"
    if count and "t" in flat[flat.index("m") :]:
        yield f"{text} has a decoder layer (t) after a multi-token prediction layer (m): these must come last"
    pp = job.pipeline_model_parallel_size
    chunks = len(parts) // pp
    for index, part in enumerate(parts):
        if "m" not in part:
            continue
        if index // pp < chunks - 1:
            yield f"{text} has m in chunk {index // pp} of stage {index % pp}: it must be in the stage's last chunk"
        if part.count("m") != count:
            yield f"{text} spreads m over several stages: all {count} must be in one"


def _interleaving(job: Job) -> Iterator[str]:
    # schedules.py: forward_backward_pipelining_with_interleaving.
    pp, microbatches = job.pipeline_model_parallel_size, job.num_microbatches
    if job.virtual_pipeline_model_parallel_size is None or microbatches is None:
        return
    group = job.microbatch_group_size_per_vp_stage or pp
    if not pp <= group <= microbatches:
        yield (
            f"microbatch_group_size_per_vp_stage={group} must be between pipeline_model_parallel_size={pp} and "
            f"num_microbatches={microbatches}: an interleaved schedule needs a larger global_batch_size or a smaller group"
        )
        return
    rest = microbatches % group
    if 0 < rest < pp:
        yield (
            f"num_microbatches={microbatches} leaves {rest} for the last group of microbatch_group_size_per_vp_stage="
            f"{group}: 0 or at least pipeline_model_parallel_size={pp}; change global_batch_size or the group"
        )


def _batch(job: Job) -> Iterator[str]:
    # core/num_microbatches_calculator.py; later releases take the option away.
    ramp = job.rampup_batch_size
    if not ramp or (release(job.megatron_core_version) or (0, 0)) >= (0, 18):
        return
    text = f"rampup_batch_size={' '.join(map(str, ramp))}"
    if len(ramp) != 3:
        yield f"{text} has {len(ramp)} numbers: give the first batch size, the increment and the samples of the ramp-up"
        return
    start, increment, samples = ramp
    if start < 1 or increment < 1 or samples < 0:
        yield f"{text}: the first batch size and the increment must be at least 1, the samples at least 0"
        return
    total = job.global_batch_size
    if total is None:
        return
    if start > total:
        yield f"{text} starts at {start}, more than global_batch_size={total}: start lower"
    elif (total - start) % increment:
        yield (
            f"{text}: the increment does not divide global_batch_size={total} - {start} = {total - start} "
            f"({ratio(total - start, increment)})"
        )


# -- experts ---------------------------------------------------------------------------------------------------------


def _experts(job: Job) -> Iterator[str]:
    experts, tp = job.num_experts, job.tensor_model_parallel_size
    etp = job.expert_tensor_parallel_size or tp
    if experts is None:
        if _within(job, 13) and job.moe_ffn_hidden_size is not None:
            yield f"moe_ffn_hidden_size={job.moe_ffn_hidden_size} without num_experts: give num_experts"
        if job.framework == "megatron-lm" and job.moe_latent_size is not None:
            yield f"moe_latent_size={job.moe_latent_size} without num_experts: give num_experts"
        return
    # models/gpt/gpt_layer_specs.py: moe_layer_pattern.
    if isinstance(job.moe_layer_freq, tuple) and set(job.moe_layer_freq) - {0, 1}:
        wrong = min(set(job.moe_layer_freq) - {0, 1})
        yield f"moe_layer_freq lists {wrong}: 1 is a layer with experts, 0 one without"
    elif isinstance(job.moe_layer_freq, int) and job.moe_layer_freq < 1:
        yield f"moe_layer_freq={job.moe_layer_freq}: must be at least 1"
    if job.moe_router_topk > experts:
        yield f"moe_router_topk={job.moe_router_topk} is more than num_experts={experts}: a token has too few experts"
    # moe_layer.py: MoELayer.forward.
    if tp > 1 and not job.sequence_parallel and not job.forward_only:
        yield (
            f"num_experts={experts} with tensor_model_parallel_size={tp} needs sequence_parallel=True in training: "
            f"switch it on, or use tensor_model_parallel_size=1"
        )
    if job.add_bias_linear and etp > 1 and _within(job, 15):
        yield (
            f"add_bias_linear=True with experts needs expert_tensor_parallel_size=1, but it is {etp}: give "
            f"expert_tensor_parallel_size=1 or disable the bias"
        )
    # experts.py: GroupedMLP.__init__, which is gone since 0.17.
    single = job.moe_use_legacy_grouped_gemm or job.transformer_impl == "local"
    if job.add_bias_linear and job.moe_grouped_gemm and single and _within(job, 0, 16):
        yield (
            "moe_grouped_gemm=True with the grouped GEMM of Megatron itself (transformer_impl=local or "
            "moe_use_legacy_grouped_gemm) excludes add_bias_linear=True: disable the bias (--disable-bias-linear)"
        )
    # shared_experts.py: SharedExpertMLP.__init__.
    if job.add_bias_linear and job.moe_shared_expert_intermediate_size is not None:
        yield (
            f"moe_shared_expert_intermediate_size={job.moe_shared_expert_intermediate_size} excludes "
            f"add_bias_linear=True: disable the bias (--disable-bias-linear)"
        )
    yield from _routing(job, experts)
    yield from _capacity(job)
    yield from _dispatch(job, etp)


def _routing(job: Job, experts: int) -> Iterator[str]:
    score, kinds, coefficients = (
        job.moe_router_score_function,
        job.moe_router_load_balancing_type,
        job.moe_aux_loss_coeff,
    )
    if job.moe_router_enable_expert_bias and (score == "softmax" or (score == "sqrtsoftplus" and _within(job, 0, 17))):
        yield (
            f"moe_router_enable_expert_bias=True with moe_router_score_function={score!r}: the bias needs 'sigmoid' "
            f"(from 0.18 also 'sqrtsoftplus')"
        )
    if isinstance(kinds, tuple) and _within(job, 14):
        count = len(coefficients) if isinstance(coefficients, tuple) else 1
        if count != len(kinds) or not isinstance(coefficients, tuple):
            yield (
                f"moe_router_load_balancing_type lists {len(kinds)} losses, but moe_aux_loss_coeff {count}: one "
                f"coefficient for each loss"
            )
    # router.py: TopKRouter.sinkhorn_load_balancing.
    if kinds == "sinkhorn" and coefficients not in (0, 0.0):
        yield f"moe_router_load_balancing_type='sinkhorn' excludes moe_aux_loss_coeff={coefficients}: it must be 0"
    groups, limit = job.moe_router_num_groups, job.moe_router_group_topk
    if limit is not None:
        if groups is None:
            yield f"moe_router_group_topk={limit} without moe_router_num_groups: give the number of groups"
        elif experts % groups:
            yield f"moe_router_num_groups={groups} does not divide num_experts={experts} ({ratio(experts, groups)})"
        elif limit > groups:
            yield f"moe_router_group_topk={limit} is more than moe_router_num_groups={groups}"


def _capacity(job: Job) -> Iterator[str]:
    # transformer_config.py; a negative factor is None there.
    factor = job.moe_expert_capacity_factor
    kinds = job.moe_router_load_balancing_type
    if factor is not None and "sinkhorn" in (kinds if isinstance(kinds, tuple) else (kinds,)):
        yield (
            f"moe_expert_capacity_factor={factor:g} excludes moe_router_load_balancing_type='sinkhorn': use an "
            f"auxiliary loss or 'none'"
        )
    if job.moe_pad_expert_input_to_capacity and (factor is None or factor < 0):
        yield "moe_pad_expert_input_to_capacity=True needs moe_expert_capacity_factor: give the factor"
    rows = job.moe_expert_rank_capacity_factor
    if rows is not None and _within(job, 18) and job.moe_flex_dispatcher_backend not in ("hybridep", "ncclep"):
        yield (
            f"moe_expert_rank_capacity_factor={rows:g} with moe_flex_dispatcher_backend="
            f"{job.moe_flex_dispatcher_backend!r}: it needs 'hybridep'"
        )


def _dispatch(job: Job, etp: int) -> Iterator[str]:
    kind, ep = job.moe_token_dispatcher_type, job.expert_model_parallel_size
    deepep = job.moe_enable_deepep or job.moe_flex_dispatcher_backend == "deepep"
    if job.moe_enable_deepep and kind != "flex" and _within(job, 12):
        yield f"moe_enable_deepep=True needs moe_token_dispatcher_type='flex', not {kind!r}"
    if job.moe_enable_deepep and job.moe_flex_dispatcher_backend == "hybridep" and _within(job, 16):
        yield "moe_enable_deepep=True excludes moe_flex_dispatcher_backend='hybridep': give one of them"
    if kind == "flex":
        # token_dispatcher.py: MoEFlexTokenDispatcher.__init__; from 0.18 only the DeepEP backend asks for it.
        if etp * ep == 1 and (_within(job, 12, 17) or (deepep and _within(job, 18))):
            yield (
                "moe_token_dispatcher_type='flex' needs expert_tensor_parallel_size x expert_model_parallel_size > 1, "
                "but both are 1: use 'alltoall'"
            )
        if job.moe_pad_expert_input_to_capacity and deepep and _within(job, 12):
            yield (
                "moe_token_dispatcher_type='flex' with DeepEP excludes moe_pad_expert_input_to_capacity=True: use "
                "'alltoall'"
            )
    shared_overlap = job.moe_shared_expert_intermediate_size is not None and job.moe_shared_expert_overlap
    if shared_overlap and (kind == "allgather" or (kind == "flex" and _within(job, 0, 17))):
        yield f"moe_shared_expert_overlap=True needs moe_token_dispatcher_type='alltoall', not {kind!r}"
    # The command line switches variable_seq_lengths off.
    if kind == "allgather" and job.variable_seq_lengths and job.framework != "megatron-lm":
        yield "moe_token_dispatcher_type='allgather' excludes variable_seq_lengths=True: use 'alltoall'"
    padded = job.moe_router_padding_for_fp8 or job.moe_router_padding_for_quantization
    if padded and job.fp8 is None and job.fp4 is None:
        yield "moe_router_padding_for_quantization=True needs fp8 or fp4"
    if padded and kind == "allgather":
        yield "moe_router_padding_for_quantization=True needs moe_token_dispatcher_type='alltoall', not 'allgather'"


def _expert_overlap(job: Job) -> Iterator[str]:
    # transformer_config.py: overlap_moe_expert_parallel_comm, delay_wgrad_compute.
    if job.delay_wgrad_compute and not job.overlap_moe_expert_parallel_comm and _within(job, 14):
        yield "delay_wgrad_compute=True needs overlap_moe_expert_parallel_comm=True"
    if job.delay_wgrad_compute and job.transformer_impl == "local" and job.framework == "megatron-lm":
        yield "delay_wgrad_compute=True needs transformer_impl='transformer_engine', not 'local'"
    if job.ep_overlap_early_attn_memory_release and not job.overlap_moe_expert_parallel_comm:
        yield "ep_overlap_early_attn_memory_release=True needs overlap_moe_expert_parallel_comm=True"
    if not job.overlap_moe_expert_parallel_comm or not _within(job, 14):
        return
    option = "overlap_moe_expert_parallel_comm=True"
    pp = job.pipeline_model_parallel_size
    if job.expert_model_parallel_size == 1:
        yield f"{option} needs expert_model_parallel_size > 1, but it is 1"
    if job.moe_token_dispatcher_type == "allgather":
        yield f"{option} needs moe_token_dispatcher_type='alltoall' or 'flex', not 'allgather'"
    if pp > 1 and job.virtual_pipeline_model_parallel_size is None:
        yield f"{option} at pipeline_model_parallel_size={pp} needs virtual_pipeline_model_parallel_size > 1"
    if job.recompute_granularity == "full":
        yield f"{option} excludes recompute_granularity='full': use 'selective' or none"
    if not (job.bf16 or job.fp16):
        yield f"{option} needs bf16=True or fp16=True"
    if job.moe_shared_expert_overlap:
        yield f"{option} excludes moe_shared_expert_overlap=True: switch the latter off"
    if (job.mtp_num_layers or 0) > 1:
        yield f"{option} with mtp_num_layers={job.mtp_num_layers}: at most 1"


# -- recompute, offload, graphs --------------------------------------------------------------------------------------


def _recompute(job: Job) -> Iterator[str]:
    script = job.framework == "megatron-lm"
    granularity, method, layers = job.recompute_granularity, job.recompute_method, job.recompute_num_layers
    if granularity == "full" and method is None:
        yield "recompute_granularity='full' without recompute_method: give 'uniform' or 'block'"
    if granularity == "full" and layers is None:
        yield "recompute_granularity='full' without recompute_num_layers: give the layers of one recomputed block, 1 or more"
    if script and granularity == "selective" and method is not None:
        yield f"recompute_method={method!r} has no meaning with recompute_granularity='selective'"
    if granularity == "selective" and layers is not None:
        yield f"recompute_num_layers={layers} has no meaning with recompute_granularity='selective': drop it"
    # multi_token_prediction.py: MultiTokenPredictionLayer._checkpointed_forward.
    if granularity == "full" and method == "uniform" and (layers or 0) > 1 and job.mtp_num_layers and _within(job, 14):
        yield (
            f"recompute_num_layers={layers} with mtp_num_layers={job.mtp_num_layers}: recompute_method='uniform' needs "
            f"recompute_num_layers=1 then"
        )
    if job.distribute_saved_activations:
        if script and job.tensor_model_parallel_size == 1:
            yield "distribute_saved_activations=True needs tensor_model_parallel_size > 1, but it is 1"
        if script and granularity != "full":
            yield f"distribute_saved_activations=True needs recompute_granularity='full', not {granularity!r}"
        if granularity is not None and job.sequence_parallel:
            yield "distribute_saved_activations=True excludes sequence_parallel=True: activations are split already"
    if granularity == "selective":
        yield from _recomputed_modules(job)
    if job.cpu_offloading:
        yield from _offload(job)


def _recomputed_modules(job: Job) -> Iterator[str]:
    modules = job.recompute_modules
    for module in modules:
        if module not in _RECOMPUTED:
            yield f"recompute_modules={module!r}: must be one of {', '.join(_RECOMPUTED)}"
    if "moe_act" in modules and not job.moe_grouped_gemm:
        yield "recompute_modules='moe_act' needs moe_grouped_gemm=True"
    if "mla_up_proj" in modules and not job.multi_latent_attention:
        yield "recompute_modules='mla_up_proj' needs multi_latent_attention=True"
    shared_overlap = job.moe_shared_expert_intermediate_size is not None and job.moe_shared_expert_overlap
    if "shared_experts" in modules and shared_overlap:
        yield "recompute_modules='shared_experts' excludes moe_shared_expert_overlap=True: switch one of them off"
    delayed = job.fp8 is not None and job.fp8_recipe == "delayed"
    for module in ("moe_act", "layernorm"):
        if delayed and module in modules and _within(job, 13):
            yield f"recompute_modules={module!r} with fp8 excludes fp8_recipe='delayed': use another recipe"


def _offload(job: Job) -> Iterator[str]:
    # transformer_config.py: TransformerConfig.__post_init__.
    if job.num_layers is not None and not 0 <= job.cpu_offloading_num_layers < job.num_layers:
        yield (
            f"cpu_offloading_num_layers={job.cpu_offloading_num_layers} must be less than num_layers={job.num_layers}"
        )
    if job.pipeline_model_parallel_size > 1:
        yield (
            f"cpu_offloading=True excludes pipeline_model_parallel_size={job.pipeline_model_parallel_size}: it must be 1"
        )
    if job.recompute_granularity is not None:
        yield f"cpu_offloading=True excludes recompute_granularity={job.recompute_granularity!r}: switch one off"


def _graphs(job: Job) -> Iterator[str]:
    older = [name for name in ("enable_cuda_graph", "external_cuda_graph") if getattr(job, name)]
    if len(older) == 2 and _within(job, 15):
        yield "enable_cuda_graph=True and external_cuda_graph=True: at most one of them"
    if job.cuda_graph_impl == "none":
        return
    if job.cpu_offloading and _within(job, 15):
        yield f"cuda_graph_impl={job.cuda_graph_impl!r} excludes cpu_offloading=True: switch one of them off"
    if job.recompute_granularity == "full":
        whole = job.cuda_graph_scope == ("full_iteration",)
        if (_within(job, 16, 17) and not whole) or (
            _within(job, 18) and not whole and "full" not in job.cuda_graph_impl
        ):
            yield (
                f"recompute_granularity='full' with cuda_graph_impl={job.cuda_graph_impl!r} needs a graph of the full "
                f"iteration: give that scope, or recompute selectively"
            )


# -- precision, optimizer, data parallel -----------------------------------------------------------------------------


def _precision(job: Job) -> Iterator[str]:
    script = job.framework == "megatron-lm"
    if job.fp8 is not None and job.fp4 is not None:
        yield f"fp8={job.fp8!r} and fp4={job.fp4!r}: at most one of them"
    if job.fp8_param_gather and job.fp8 is None and _within(job, 12):
        yield "fp8_param_gather=True needs fp8: give the format (--fp8-format)"
    if job.fp4_param and job.fp4 is None:
        yield "fp4_param=True needs fp4: give the format (--fp4-format)"
    sharded = job.use_distributed_optimizer or job.use_torch_fsdp2 or job.use_megatron_fsdp
    # 0.11 knows fewer ways, and use_custom_fsdp is the older name of use_megatron_fsdp.
    if script and job.fp8_param_gather and not (sharded or job.forward_only or job.extra.get("use_custom_fsdp")):
        yield "fp8_param_gather=True needs use_distributed_optimizer, use_megatron_fsdp or use_torch_fsdp2"
    if job.reuse_grad_buf_for_mxfp8_param_ag and not job.fp8_param_gather and not job.fsdp_manual_registration:
        yield "reuse_grad_buf_for_mxfp8_param_ag=True needs fp8_param_gather=True"
    if job.fp8 is not None and job.first_last_layers_bf16:
        if job.fp8_recipe == "delayed":
            yield "first_last_layers_bf16=True excludes fp8_recipe='delayed': use another recipe"
        if job.num_layers is not None:
            most = job.num_layers // job.pipeline_model_parallel_size
            for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
                if not 0 <= getattr(job, name) <= most:
                    yield (
                        f"{name}={getattr(job, name)} must be between 0 and num_layers={job.num_layers} / "
                        f"pipeline_model_parallel_size={job.pipeline_model_parallel_size} = {most}"
                    )


def _optimizer(job: Job) -> Iterator[str]:
    if job.forward_only:
        return
    script = job.framework == "megatron-lm"
    # optimizer_config.py: OptimizerConfig.__post_init__.
    if job.use_precision_aware_optimizer:
        if job.optimizer != "adam":
            yield f"use_precision_aware_optimizer=True needs optimizer='adam', not {job.optimizer!r}"
        if not job.use_distributed_optimizer:
            yield "use_precision_aware_optimizer=True needs use_distributed_optimizer=True"
    else:
        for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if getattr(job, name) != "float32":
                yield f"{name}={getattr(job, name)} needs use_precision_aware_optimizer=True; without it: float32"
    if script and job.bf16 and job.accumulate_allreduce_grads_in_fp32 and job.main_grads_dtype != "float32":
        yield (
            f"accumulate_allreduce_grads_in_fp32=True excludes main_grads_dtype={job.main_grads_dtype}: it must be "
            f"float32"
        )
    if script and job.optimizer_cpu_offload:
        if not job.use_precision_aware_optimizer:
            yield "optimizer_cpu_offload=True needs use_precision_aware_optimizer=True"
        if job.fp8_param_gather and job.fp8_recipe != "delayed":
            yield (
                f"optimizer_cpu_offload=True with fp8_param_gather=True needs fp8_recipe='delayed', not "
                f"{job.fp8_recipe!r}"
            )
    # optimizer/distrib_optimizer.py: DistributedOptimizer.__init__.
    if job.optimizer == "sgd" and job.use_distributed_optimizer and _within(job, 0, 18):
        yield "use_distributed_optimizer=True needs optimizer='adam', not 'sgd'"
    if script and "muon" in job.optimizer and _within(job, 16, 17):
        for name in (
            "overlap_grad_reduce",
            "overlap_param_gather",
            "use_distributed_optimizer",
            "use_torch_fsdp2",
            "use_megatron_fsdp",
        ):
            if getattr(job, name):
                yield f"optimizer={job.optimizer!r} excludes {name}=True: switch it off"


def _data_parallel(job: Job) -> Iterator[str]:
    script = job.framework == "megatron-lm"
    if script:
        yield from _gather_overlap(job)
        yield from _sharding(job)
    if not _trains_with_ddp(job):
        return
    instances = job.num_distributed_optimizer_instances
    # distributed/distributed_data_parallel.py, param_and_grad_buffer.py.
    if instances > 1 and not job.use_distributed_optimizer:
        yield f"num_distributed_optimizer_instances={instances} needs use_distributed_optimizer=True"
    if instances > 1 and job.ddp_reduce_scatter_with_fp32_accumulation:
        yield (
            f"num_distributed_optimizer_instances={instances} excludes ddp_reduce_scatter_with_fp32_accumulation=True: "
            f"use one instance"
        )
    if job.ddp_average_in_collective and job.calculate_per_token_loss and _within(job, 12):
        yield "calculate_per_token_loss=True excludes ddp_average_in_collective=True: switch one of them off"
    if script and job.ddp_num_buckets is not None and job.ddp_bucket_size is not None and _within(job, 12, 17):
        yield (
            f"ddp_num_buckets={job.ddp_num_buckets} and ddp_bucket_size={job.ddp_bucket_size}: each fixes the buckets, "
            f"give one of them"
        )


def _gather_overlap(job: Job) -> Iterator[str]:
    # From 0.18 an optimizer that gathers by itself (dist_muon) may overlap too.
    own_gather = "muon" in job.optimizer
    sharded = job.use_distributed_optimizer or job.use_megatron_fsdp or bool(job.extra.get("use_custom_fsdp"))
    if job.overlap_param_gather and not sharded and not own_gather:
        yield "overlap_param_gather=True needs use_distributed_optimizer or use_megatron_fsdp"
    if job.overlap_param_gather and not job.overlap_grad_reduce:
        yield "overlap_param_gather=True needs overlap_grad_reduce=True"
    if not job.overlap_param_gather_with_optimizer_step:
        return
    option = "overlap_param_gather_with_optimizer_step=True"
    if not job.use_distributed_optimizer:
        yield f"{option} needs use_distributed_optimizer=True"
    if not job.overlap_param_gather:
        yield f"{option} needs overlap_param_gather=True"
    if job.virtual_pipeline_model_parallel_size is None:
        yield f"{option} needs an interleaved schedule (virtual_pipeline_model_parallel_size > 1)"


def _sharding(job: Job) -> Iterator[str]:
    if job.fsdp_manual_registration:
        for name in ("use_megatron_fsdp", "nccl_ub"):
            if not getattr(job, name):
                yield f"fsdp_manual_registration=True needs {name}=True"
    if not job.use_torch_fsdp2:
        return
    for name in ("pipeline_model_parallel_size", "expert_model_parallel_size"):
        if getattr(job, name) > 1:
            yield f"use_torch_fsdp2=True excludes {name}={getattr(job, name)}: it must be 1"
    for name in ("use_distributed_optimizer", "gradient_accumulation_fusion", "fp16"):
        if getattr(job, name):
            yield f"use_torch_fsdp2=True excludes {name}=True: switch it off"
    if not job.untie_embeddings_and_output_weights:
        yield "use_torch_fsdp2=True needs untie_embeddings_and_output_weights=True"


_CHAPTERS: tuple[_Rule, ...] = (
    _model,
    _widths,
    _context,
    _pipeline,
    _stages,
    _batch,
    _experts,
    _expert_overlap,
    _recompute,
    _graphs,
    _precision,
    _optimizer,
    _data_parallel,
)
