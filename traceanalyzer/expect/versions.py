"""Which release of megatron-core (and of Megatron-LM's training loop) changed which traffic. The only home of it.

A release is its first two numbers, (0, 16) for "0.16.1": one patch release is known to have changed traffic (NOT_YET).
Every entry was read in the tags core_v0.4.0 ... core_v0.19.0 of NVIDIA/Megatron-LM at the place its comment names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from traceanalyzer.errors import JobError

Release = tuple[int, int]

KNOWN: tuple[Release, ...] = tuple((0, minor) for minor in range(4, 20))
"""Releases that were read. Older ones are treated like the first, newer ones like the last."""

SINCE: dict[str, Release] = {
    # tensor_parallel/layers.py: VocabParallelEmbedding(reduce_scatter_embeddings); before: all-reduce, then a slice
    "embedding reduce-scatter": (0, 8),
    # parallel_state.py: expert grid and ETP; before, an expert's tensor traffic ran on the tensor-parallel group
    "expert grid": (0, 10),
    # transformer/attention.py: num_query_groups < world_size; before, such a job does not start
    "fewer query groups than TP": (0, 16),
    # optimizer/optimizer.py: MegatronOptimizer is always chained, and chained optimizers share one norm
    "one gradient norm": (0, 12),
    # optimizer/__init__.py: intra_dist_opt_group; before, the default group
    "distributed-optimizer group": (0, 13),
    # training/training.py, train_step: logical_and_across_model_parallel_group; training_log: learning rate
    "scalars over model parallel": (0, 11),
    # pretrain_gpt.py, loss_func: the all-reduce per micro-batch left it; training.py sums once per step
    "loss once per step": (0, 13),
    # pretrain_gpt.py, loss_func: (loss sum, tokens) instead of the mean
    "loss sum and tokens": (0, 7),
    # training/arguments.py: --rerun-mode defaults to validate_results
    "rerun by default": (0, 14),
    # training/utils.py: get_batch_on_this_tp_rank
    "batch per tensor": (0, 5),
    # pretrain_gpt.py, get_batch: first and last stage without regard to the model chunk ...
    "batch for every chunk": (0, 13),
    # ... until vp_stage came back
    "batch for its chunk": (0, 15),
    # training/utils.py: two broadcasts of cu_seqlens beside the tensors, and two more at the end of the function ...
    "cu_seqlens": (0, 16),
    # ... which 0.17 dropped; core/utils.py of 0.18 sends them for packed sequences only
    "cu_seqlens once": (0, 17),
    "cu_seqlens for packed only": (0, 18),
    # -- pipeline and schedule --
    # pipeline_parallel/schedules.py: microbatch_group_size_per_vp_stage; before, M = PP made every forward pass warm-up
    "warm-up also at M = PP": (0, 10),
    # pipeline_parallel/p2p_communication.py: _p2p_ops, even_recv_odd_send_group
    "pipeline messages over the default group": (0, 8),
    # parallel_state.py: pipeline_model_parallel_comm_backend; p2p_communication.py: != 'ucc'
    "ucc pipeline backend": (0, 12),
    # pipeline_parallel/schedules.py: get_tensor_shapes, effective_seq_length; before, of models with an encoder only
    "decoder length of pipeline messages": (0, 14),
    # transformer/transformer_config.py: pipeline_dtype with fp32_residual_connection
    "fp32 pipeline messages": (0, 17),
    # transformer/pipeline_parallel_layer_layout.py: mtp_standalone; before, the layout must put them on the last stage
    "prediction layers before the last stage": (0, 16),
    # distributed/finalize_model_grads.py: mtp_num_layers in _allreduce_word_embedding_grads
    "embedding shared with prediction layers": (0, 12),
    # -- context ---------------------------------------------------------------------------------------------------
    # transformer_config.py: cp_comm_type; before, TransformerEngine's own default, the ring
    "cp_comm_type": (0, 10),
    # transformer/transformer_layer.py: cp_comm_type[layer_number - 1]; before, the list is read one entry too far, and
    # the last layer stops with an IndexError
    "cp_comm_type of a layer": (0, 17),
    # transformer_config.py: recompute_modules; before, selective recomputation means core attention
    "recompute_modules": (0, 12),
    # transformer/multi_token_prediction.py: MultiTokenPredictionLayer._checkpointed_forward
    "multi-token prediction recomputed": (0, 14),
    # extensions/transformer_engine.py: TEDotProductAttention(return_max_logit)
    "largest attention logit": (0, 16),
    # -- parameters
    # models/gpt/gpt_layer_specs.py, TE spec: linear_q_down_proj=backend.linear(), a "duplicated" TELinear
    "latent attention down projections whole": (0, 14),
    # transformer/moe/router.py: self.bias with add_bias_linear
    "router bias": (0, 15),
    # transformer/transformer_block.py: has_final_layernorm_in_this_stage, with multi-token prediction
    "final norm behind the last decoder layer": (0, 16),
    # transformer/moe/experts.py: probabilities multiply the activation inside the experts; before, their result on return
    "weighted at the experts": (0, 13),
    # -- data parallel and control --
    # distributed/param_and_grad_buffer.py: start_param_sync; before, the optimizer gathered, and padding was another
    "parameter gather by bucket": (0, 9),
    # training/training.py: disable_forward_pre_hook before the first iteration, enable_forward_pre_hook behind it
    "no gather in the first step": (0, 11),
    # distributed/distributed_data_parallel_config.py: pad_buckets_for_high_nccl_busbw
    "padding for bus bandwidth": (0, 12),
    # training/training.py, get_model: default bucket size from the ranks of dp_cp; before, the library's, of dp
    "bucket limit over CP": (0, 12),
    # training/training.py, get_model: ddp_num_buckets
    "number of buckets": (0, 12),
    # optimizer/__init__.py, _get_param_groups: groups of all ranks are united; before, a rank without experts had none
    "same optimizers everywhere": (0, 14),
    # optimizer/clip_grads.py: count_zeros_fp32 (total_num_zeros is int64)
    "zeros counted as whole numbers": (0, 17),
    # distributed/finalize_model_grads.py: get_data_parallel_group(with_context_parallel=True); before, without it
    "token count over CP": (0, 13),
    # optimizer/optimizer.py, ChainedOptimizer.step: only with log_num_zeros_in_grad; 0.12 counts in any case
    "zeros counted on request": (0, 13),
    # training/utils.py: calc_params_l2_norm; before, without CP, and other groups for experts
    "parameter norm over DP x CP": (0, 14),
    # distributed/param_and_grad_buffer.py: is_first_batch; before, a bucket was ready with the first gradient of each
    # parameter, in the first step too
    "gradients counted in the first step": (0, 16),
    # tensor_parallel/layers.py: use_expert_pgs; before, experts were apart with expert parallelism only
    "experts apart by tensor parallelism": (0, 19),
    # optimizer/optimizer.py: has_grad_norm_group
    "gradient norm groups": (0, 19),
    # distributed/distributed_data_parallel_config.py: reduce_scatter_with_fp32_accumulation
    "reduce-scatter by all-to-all": (0, 16),
    # -- experts --
    # transformer/moe/router.py: TopKRouter.apply_load_balancing_loss returns at once at 0, and needs more than one rank
    "auxiliary loss needs a coefficient": (0, 11),
    # transformer/moe/router.py: torch.is_grad_enabled() in front of it; before, a checkpoint's first pass sums too
    "auxiliary loss needs gradients": (0, 12),
    # distributed/finalize_model_grads.py: _update_router_expert_bias
    "expert bias": (0, 11),
    # training/training.py: track_names; before, the losses that the rank has recorded
    "expert losses by option": (0, 12),
    # transformer/moe/token_dispatcher.py: permuted_probs; before, a rank kept them and weighed what came back
    "expert probabilities are exchanged": (0, 12),
    # transformer/moe/token_dispatcher.py: output_bias_total, which the allgather dispatcher summed apart, left it
    "biases of experts stay with them": (0, 13),
    # transformer/moe/router.py: num_layers += mtp_num_layers
    "expert losses with multi-token prediction": (0, 13),
    # transformer/moe/router.py: _apply_seq_aux_loss; before, sequence_load_balancing_loss_func gathered the scores
    "sequence loss by counts": (0, 14),
    # training/training.py: seq_load_balancing_loss; moe_utils.py: ... and every loss averaged over DP with CP ...
    "sequence loss logged apart": (0, 14),
    # ... until 0.16 averaged over DP what was summed before, and no more
    "expert losses averaged over DP": (0, 16),
    # transformer/moe/router.py: _apply_global_aux_loss
    "global auxiliary loss": (0, 15),
    # transformer/moe/moe_layer.py: shared_experts_recompute
    "shared experts recomputed": (0, 14),
    # transformer/moe/moe_logging.py: MoEMetricsTracker, needs_dp_avg
    "expert losses tracker": (0, 18),
    # transformer/moe/router.py: apply_z_loss, avg_group
    "z-loss averaged over all replicas": (0, 19),
    # transformer/moe/token_dispatcher.py: _HybridEPManager, moe_hybridep_pad_uneven_dispatch_inputs
    "hybridep pads its input": (0, 19),
    # -- tensor
    # transformer/multi_latent_attention.py, read from this release on
    "latent attention as read": (0, 11),
    # transformer/multi_token_prediction.py
    "multi-token prediction": (0, 12),
    # training/utils.py: get_batch_on_this_tp_rank(mtp_on_this_rank); before, tokens and positions for the last stage
    "batch for prediction": (0, 16),
    # transformer/multi_token_prediction.py: gather_from_tensor_model_parallel_region after eh_proj; before,
    # all_gather_last_dim_from_tensor_parallel_region, whose gradient is reduce-scattered
    "prediction gathers without reduction": (0, 13),
    # the same file: roll_tensor(cp_group); before, no CP. Output layer and loss of a prediction moved to the last stage
    "prediction under context parallelism": (0, 14),
    # the same file: _vocab_parallel_argmax for the acceptance rate
    "predictions are counted": (0, 19),
    # -- sharded ---------------------------------------------------------------------------------------------------
    # distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py: chunk_size_factor (custom_fsdp before)
    "Megatron-FSDP in rows": (0, 14),
    # the same, _get_parameter_groups: is_expert_parameter looks at the name; before, at the mark that EP > 1 sets
    "experts by name": (0, 16),
    # .../megatron_fsdp.py: _root_pre_backward sets the state of every module, _post_backward_release_module resets units'
    "only units look ahead": (0, 18),
    # distributed/fsdp/mcore_fsdp_adapter.py: MixedPrecisionPolicy; before, grad_reduce_in_fp32 decides
    "Megatron-FSDP gradient type of its own": (0, 19),
}
"""Behaviour -> the first release that has it."""

NOT_YET: dict[str, str] = {"expert probabilities are exchanged": "0.12.0"}
"""Behaviour -> the version of its first release that does not have it yet; the later patches of that release do."""

TRANSFORMER_ENGINE: dict[Release, tuple[Release, Release]] = {
    (0, 14): ((2, 6), (2, 7)),
    (0, 15): ((2, 9), (2, 9)),
    (0, 16): ((2, 9), (2, 11)),
}
"""Release -> first and last release of TransformerEngine that it accepts (pyproject.toml); others accept any."""

TRANSFORMER_ENGINE_SINCE: dict[str, Release] = {
    # .../dot_product_attention/context_parallel.py, AttnFuncWithCPAndQKVOA2A.backward: out is saved as it left the kernel
    "a2a keeps its output": (2, 8),
    # the same, AttnFuncWithCPAndKVP2P.backward
    "a2a+p2p keeps its output": (2, 15),
}
"""Behaviour of TransformerEngine -> its first release that has it, read in the tags v2.3 ... v2.18."""


def transformer_engine_since(stated: str | None, release: Release, behaviour: str) -> bool | None:
    """Whether TransformerEngine has ``behaviour``, a key of TRANSFORMER_ENGINE_SINCE; None if it cannot be known.

    stated: its version, e.g. "2.13.0"; None: unknown, then what ``release`` of megatron-core accepts may settle it.
    """
    first = TRANSFORMER_ENGINE_SINCE[behaviour]
    if stated:
        return parse(stated) >= first
    oldest, newest = TRANSFORMER_ENGINE.get(release, (None, None))
    if oldest is None or newest is None or oldest < first <= newest:
        return None
    return oldest >= first


def parse(text: str) -> Release:
    """The release that a version string names: "0.16.1", "core_v0.16.1", "0.14.0rc5" -> (0, 16), (0, 16), (0, 14).

    Raises JobError for a string without two numbers.
    """
    found = re.search(r"(\d+)\.(\d+)", text)
    if found is None:
        raise JobError(f"megatron_core_version={text!r}: a version has at least two numbers, e.g. 0.16.1")
    return int(found[1]), int(found[2])


def label(release: Release) -> str:
    """A release in words: "0.16", and for one that was not read, whose rules stand for it: "0.25 (rules of 0.19)"."""
    nearest = min(max(release, KNOWN[0]), KNOWN[-1])
    return _text(release) if release in KNOWN else f"{_text(release)} (rules of {_text(nearest)}, the nearest known)"


def since(release: Release, behaviour: str) -> bool:
    """Whether ``release`` has ``behaviour``, a key of SINCE."""
    return release >= SINCE[behaviour]


def not_yet(version: str | None, behaviour: str) -> bool:
    """Whether ``version``, e.g. "0.12.0", is one of the release in SINCE and without ``behaviour``, a key of NOT_YET.

    None, or a version that leaves the patch open, stands for the last patch.
    """
    stated = re.search(r"\d+\.\d+\.\d+", version or "")
    return stated is not None and stated[0] == NOT_YET[behaviour]


def span(releases: Iterable[Release]) -> str:
    """Words for releases out of KNOWN: "<=0.10", "0.11-0.12", "0.12", ">=0.13", "all"; a gap gives two, with a comma."""
    runs: list[list[Release]] = []
    for release in sorted(releases):
        if runs and KNOWN.index(release) == KNOWN.index(runs[-1][-1]) + 1:
            runs[-1].append(release)
        else:
            runs.append([release])
    return ", ".join(_run(run[0], run[-1]) for run in runs)


def _run(first: Release, last: Release) -> str:
    if first == KNOWN[0] and last == KNOWN[-1]:
        return "all"
    if first == KNOWN[0]:
        return f"<={_text(last)}"
    if last == KNOWN[-1]:
        return f">={_text(first)}"
    return _text(first) if first == last else f"{_text(first)}-{_text(last)}"


def from_on(behaviour: str) -> str:
    """Words for the releases that have ``behaviour``: ">=0.13"."""
    return f">={_text(SINCE[behaviour])}"


def before(behaviour: str) -> str:
    """Words for the releases that do not have ``behaviour`` yet: "<=0.12"."""
    return f"<={_text(max(release for release in KNOWN if release < SINCE[behaviour]))}"


def between(first: str, behind: str) -> str:
    """Words for the releases that have ``first`` and do not have ``behind`` yet: "0.13-0.14"."""
    return span(release for release in KNOWN if SINCE[first] <= release < SINCE[behind])


def _text(release: Release) -> str:
    return f"{release[0]}.{release[1]}"
