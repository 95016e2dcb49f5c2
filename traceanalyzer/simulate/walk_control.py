"""Around the model: the input of a micro-batch, the optimizer step, and what Megatron-LM's loop reduces for its log.

After megatron-core 0.16.1 optimizer/optimizer.py, clip_grads.py, distrib_optimizer.py; and Megatron-LM 0.16
megatron/training/utils.py (get_batch_on_this_tp_rank, reduce_max_stat_across_model_parallel_group), training.py
(train_step, train, training_log), pretrain_gpt.py; moe_utils.py (reduce_aux_losses_tracker_across_ranks).
"""

from __future__ import annotations

from collections.abc import Sequence

from traceanalyzer.simulate import walk_kernels as kernels
from traceanalyzer.simulate.walk_data import Wrapped
from traceanalyzer.simulate.walk_expert import auxiliary_losses
from traceanalyzer.simulate.walk_tape import Sizes, Tape


def batch(tape: Tape, *, first: bool, last: bool) -> None:
    """The input of one micro-batch: loaded by the first rank of each TP group and broadcast. For stages with an end."""
    job = tape.sizes.job
    if job.framework != "megatron-lm" or not (first or last):
        return
    sequence, size = job.require("seq_length", "micro_batch_size")
    tape.host("data")
    tokens = sequence * size

    def broadcast(what: str, elems: int, dtype: str) -> None:
        tape.call("tp", "broadcast", elems, dtype=dtype, component=f"data: {what}")

    if first:
        broadcast("tokens", tokens, "int64")
    if last:
        broadcast("labels", tokens, "int64")
        broadcast("loss mask", tokens, "float32")
    if job.create_attention_mask_in_dataloader:
        broadcast("attention mask", size * sequence * sequence, "bool")
    if first:
        broadcast("position ids", tokens, "int64")
    # 0.16 says twice that samples are not packed, 0.17 once, later releases never.
    beside = first and tape.sizes.release in ((0, 16), (0, 17))
    for _ in range(beside + (tape.sizes.release == (0, 16))):
        broadcast("packing length", 1, "int64")
        broadcast("packing offsets", 0, "int32")


def optimizer_step(tape: Tape, chunks: Sequence[Wrapped]) -> None:
    """One step of the chained optimizers: one of the dense parameters, one of the experts if the job has any."""
    sizes, job = tape.sizes, tape.sizes.job
    sharded = job.use_distributed_optimizer
    dense_parts = 2 if job.overlap_param_gather_with_optimizer_step else 1
    apart = job.num_experts is not None and job.expert_model_parallel_size > 1
    kinds = [False] * dense_parts + [True] * apart
    groups = ["dist_opt" if sharded else "tp_ep_pp" if expert else "mp" for expert in kinds]
    mixed = job.bf16 or job.fp16 or sharded
    shards = [
        sum(chunk.elems(expert=expert) // (chunk.replicas[expert] if sharded else 1) for chunk in chunks)
        for expert in kinds
    ]
    if dense_parts == 2:  # the first chunk has an optimizer of its own
        own = chunks[0].elems(expert=False) // chunks[0].replicas[False]
        shards[0], shards[1] = own, shards[1] - own
    if mixed and (job.loss_scale is not None or job.fp16):
        for group, elems in zip(groups, shards, strict=True):
            kernels.scale(tape, "overflow flag", elems)
            tape.call(group, "all_reduce", 1, dtype="float32", component="overflow flag", reduce_op="max")
            tape.sync()
    once = len(set(groups)) == 1
    for group, elems in [(groups[0], sum(shards))] if once else list(zip(groups, shards, strict=True)):
        kernels.norm_of(tape, "gradient norm", elems)
        tape.call(group, "all_reduce", 1, dtype="float32", component="gradient norm")
        tape.sync()
    if job.clip_grad > 0:
        kernels.scale(tape, "gradient norm", sum(shards))
    if job.log_num_zeros_in_grad:
        for group, elems in [(groups[0], sum(shards))] if once else list(zip(groups, shards, strict=True)):
            kernels.reduction(tape, "zero count", elems, "NonZeroOp<float>")
            kind = "float32" if sizes.release < (0, 17) else "int64"
            tape.call(group, "all_reduce", 1, dtype=kind, component="zero count")
            tape.sync()
    for index, elems in enumerate(shards):
        kernels.adam(tape, elems)
        if not sharded:
            continue
        # Each of the optimizers gathers the parameters of all buffers of its chunks.
        members = chunks[:1] if dense_parts == 2 and index == 0 else chunks[1:] if dense_parts == 2 else chunks
        if not job.overlap_param_gather:
            for chunk in members:
                chunk.gather(tape)
        elif dense_parts == 2 and index == 0:
            chunks[0].gather(tape, force=True)


def rerun_state(tape: Tape) -> None:
    """The ranks agree on whether a result has to be computed again."""
    job = tape.sizes.job
    if job.framework == "megatron-lm" and job.rerun_mode not in (None, "disabled"):
        tape.call("world", "all_reduce", 1, dtype="int32", component="rerun state")
        tape.sync()


def loss_average(tape: Tape) -> None:
    """The loss and its tokens, summed over all replicas, on the last stage: in training and in evaluation."""
    if tape.sizes.job.framework == "megatron-lm":
        tape.call("dp_cp", "all_reduce", 2, dtype="float32", component="loss average")


def after_step(tape: Tape, stage: int) -> None:
    """What the loop reduces after the optimizer step, and for the log."""
    job = tape.sizes.job
    if job.framework != "megatron-lm":
        return
    tape.call("mp", "all_reduce", 1, dtype="int32", component="success of the step", reduce_op="min")
    tape.sync()
    tape.call("mp", "all_reduce", 1, dtype="float32", component="gradient norm for the log", reduce_op="max")
    tape.sync()
    if job.log_num_zeros_in_grad:
        tape.call("mp", "all_reduce", 1, dtype="float32", component="zeros for the log", reduce_op="max")
        tape.sync()
    if stage == job.pipeline_model_parallel_size - 1:
        loss_average(tape)
    if job.log_params_norm:
        _parameter_norm(tape)
    tape.call("mp", "all_reduce", 1, dtype="float32", component="learning rate for the log", reduce_op="max")
    tape.sync()
    _router_losses(tape, stage)
    tape.host("python")


def _parameter_norm(tape: Tape) -> None:
    """calc_params_l2_norm: sharded parts over the replicas, then over the model, experts apart where their groups are."""
    layout = tape.sizes.job.layout
    tape.call("dp_cp", "all_reduce", 1, dtype="float32", component="parameter norm")
    tape.call("mp", "all_reduce", 1, dtype="float32", component="parameter norm")
    if layout.groups("mp") != layout.groups("tp_ep_pp"):
        tape.call("tp_ep_pp", "all_reduce", 1, dtype="float32", component="parameter norm")
    tape.sync()


def _router_losses(tape: Tape, stage: int) -> None:
    """track_moe_metrics: names by the options; groups beyond the pipeline where a router of this stage has named them."""
    job = tape.sizes.job
    if job.num_experts is None:
        return
    (layers,) = job.require("num_layers")
    routers = any(job.is_moe_layer(layer) for layer in job.layers_on_stage(stage))
    weights = auxiliary_losses(job)
    kinds: str | tuple[str, ...] = job.moe_router_load_balancing_type
    if isinstance(kinds, tuple) and len(kinds) == 1:
        (kinds,) = kinds

    always = tape.sizes.release >= (0, 18)  # moe_logging.py: averaged unless the router says otherwise

    def reduce(role: str, operation: str = "sum") -> None:
        tape.call(
            role,
            "all_reduce",
            layers,
            dtype="float32",
            component="experts.losses for the log",
            reduce_op=operation,
        )

    for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss"):
        # "in", as Megatron asks: of one kind alone, aux_loss is found in the others' names too.
        if kind in kinds:
            reduce("pp")
            recorded = kind in weights and routers
            if recorded:
                reduce("tp_dp_cp" if kind == "global_aux_loss" else "tp_cp")
            if (recorded or always) and not (recorded and kind == "global_aux_loss"):
                reduce("dp", "avg")
    if job.moe_z_loss_coeff is not None:
        reduce("pp")
        if always:
            reduce("dp", "avg")


def unsupported(sizes: Sizes) -> list[str]:
    """Options of a job that the walk does not follow, in words."""
    job = sizes.job
    found = {
        "use_megatron_fsdp": job.use_megatron_fsdp,
        "use_torch_fsdp2": job.use_torch_fsdp2,
        "fp8": job.fp8 is not None,
        "fp4": job.fp4 is not None,
        "multi_latent_attention": job.multi_latent_attention,
        "mtp_num_layers": bool(job.mtp_num_layers),
        "hybrid_context_parallel": job.hybrid_context_parallel,
        "add_bias_linear with grouped experts of the local implementation": job.moe_grouped_gemm
        and job.add_bias_linear
        and job.num_experts is not None
        and (job.moe_use_legacy_grouped_gemm or job.transformer_impl == "local"),
        "tp_comm_overlap with moe_shared_expert_overlap": job.tp_comm_overlap and job.moe_shared_expert_overlap,
        "overlap_moe_expert_parallel_comm": job.overlap_moe_expert_parallel_comm,
        "moe_latent_size": job.moe_latent_size is not None,
        "moe_flex_dispatcher_backend=hybridep": job.num_experts is not None
        and job.moe_token_dispatcher_type == "flex"
        and job.moe_flex_dispatcher_backend != "deepep",
        "defer_embedding_wgrad_compute": job.defer_embedding_wgrad_compute,
        "delay_wgrad_compute": job.delay_wgrad_compute,
        "fp32_residual_connection": job.fp32_residual_connection,
        "attention_output_gate": job.attention_output_gate,
        "experimental_attention_variant": job.experimental_attention_variant is not None,
        "softmax_type": job.softmax_type != "vanilla",
        "qk_clip": job.qk_clip,
        "optimizer": job.optimizer != "adam",
        "optimizer_cpu_offload": job.optimizer_cpu_offload,
        "symmetric_ar_type": job.symmetric_ar_type is not None,
        "sft": job.sft,
        "moe_router_padding_for_quantization": job.moe_router_padding_for_quantization
        or job.moe_router_padding_for_fp8,
        "moe_expert_rank_capacity_factor": job.moe_expert_rank_capacity_factor is not None,
        "timing_log_level": job.timing_log_level > 0,
        "megatron_core_version (only 0.16 to 0.18)": not (0, 16) <= sizes.release <= (0, 18),
        "cp_comm_type of single layers before 0.17": len(job.cp_comm_type) > 1 and sizes.release < (0, 17),
    }
    return [name for name, wanted in found.items() if wanted]
