"""Jobs that Megatron refuses, one row for each rule, beside a near one that it runs; and every argument as a field."""

from __future__ import annotations

from typing import Any

import pytest

from traceanalyzer import job_rules
from traceanalyzer.errors import JobError
from traceanalyzer.job import Job, parse_command_line, parse_log, parse_mapping

# Every argument that determines the traffic, as attributes of Megatron's args. world_size comes from the environment.
ARGUMENTS = """
world_size tensor_model_parallel_size sequence_parallel pipeline_model_parallel_size
virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
pipeline_model_parallel_layout microbatch_group_size_per_vp_stage context_parallel_size cp_comm_type
hierarchical_context_parallel_sizes hybrid_context_parallel expert_model_parallel_size expert_tensor_parallel_size
use_tp_pp_dp_mapping num_distributed_optimizer_instances create_all_gather_group enable_gloo_process_groups

micro_batch_size global_batch_size rampup_batch_size seq_length decoder_seq_length variable_seq_lengths
create_attention_mask_in_dataloader sft

num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels group_query_attention num_query_groups swiglu
add_bias_linear normalization qk_layernorm position_embedding_type padded_vocab_size vocab_size
make_vocab_size_divisible_by untie_embeddings_and_output_weights multi_latent_attention q_lora_rank kv_lora_rank
qk_pos_emb_head_dim mtp_num_layers decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split transformer_impl

num_experts moe_layer_freq moe_router_topk moe_ffn_hidden_size moe_token_dispatcher_type moe_flex_dispatcher_backend
moe_enable_deepep moe_router_dtype moe_router_load_balancing_type moe_aux_loss_coeff moe_expert_capacity_factor
moe_pad_expert_input_to_capacity moe_shared_expert_intermediate_size moe_shared_expert_overlap
moe_router_enable_expert_bias moe_latent_size overlap_moe_expert_parallel_comm

recompute_granularity recompute_method recompute_num_layers recompute_modules distribute_saved_activations

bf16 fp16 params_dtype accumulate_allreduce_grads_in_fp32 grad_reduce_in_bf16 main_grads_dtype fp8 fp8_recipe
fp8_param_gather fp4 fp8_dot_product_attention

use_distributed_optimizer overlap_grad_reduce overlap_param_gather overlap_param_gather_with_optimizer_step
align_grad_reduce align_param_gather ddp_bucket_size ddp_num_buckets ddp_pad_buckets_for_high_nccl_busbw
ddp_average_in_collective ddp_reduce_scatter_with_fp32_accumulation use_megatron_fsdp data_parallel_sharding_strategy
outer_dp_sharding_strategy use_torch_fsdp2

tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_bulk_dgrad tp_comm_bulk_wgrad
tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 overlap_p2p_comm pipeline_model_parallel_comm_backend
cross_entropy_loss_fusion cross_entropy_fusion_impl defer_embedding_wgrad_compute calculate_per_token_loss

rerun_mode timing_log_level barrier_with_L1_time log_interval log_num_zeros_in_grad log_params_norm loss_scale

megatron_core_version transformer_engine_version torch_version
"""


def test_every_argument_that_determines_traffic_is_a_field() -> None:
    assert [name for name in ARGUMENTS.split() if name not in Job.__dataclass_fields__] == []


SCRIPT: dict[str, Any] = {"framework": "megatron-lm"}
V16: dict[str, Any] = {"megatron_core_version": "0.16.1"}
MOE: dict[str, Any] = {"num_experts": 8, "add_bias_linear": False}
FLEX: dict[str, Any] = {**MOE, **V16, "moe_token_dispatcher_type": "flex"}
SHARED: dict[str, Any] = {**MOE, "moe_shared_expert_intermediate_size": 64, "moe_token_dispatcher_type": "alltoall"}
SELECTIVE: dict[str, Any] = {"recompute_granularity": "selective"}
FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CP4: dict[str, Any] = {"context_parallel_size": 4, "num_attention_heads": 8, "tensor_model_parallel_size": 2}
PIPE: dict[str, Any] = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
BATCH: dict[str, Any] = {**PIPE, "world_size": 2, "micro_batch_size": 1}
EP_OVERLAP: dict[str, Any] = {
    **MOE,
    **V16,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "overlap_moe_expert_parallel_comm": True,
    "bf16": True,
}
GATHER: dict[str, Any] = {
    **SCRIPT,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
FSDP2: dict[str, Any] = {
    **SCRIPT,
    "use_torch_fsdp2": True,
    "untie_embeddings_and_output_weights": True,
    "gradient_accumulation_fusion": False,
}
PRECISION: dict[str, Any] = {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True}
GROUPED: dict[str, Any] = {**MOE, "moe_router_group_topk": 2, "moe_router_num_groups": 4}
HYBRID: dict[str, Any] = {**SCRIPT, "hybrid_context_parallel": True, "calculate_per_token_loss": True}
DEFER: dict[str, Any] = {"defer_embedding_wgrad_compute": True, "pipeline_model_parallel_size": 2}
TP4: dict[str, Any] = {"tensor_model_parallel_size": 4}

# What the accepted job has, what is changed in it, and the words that the refusal starts with.
RULES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (TP4, {"ffn_hidden_size": 90}, "tensor_model_parallel_size=4 does not divide ffn_hidden_size=90 (90 / 4 = 22.5)"),
    (
        {**MOE, "expert_tensor_parallel_size": 4},
        {"moe_ffn_hidden_size": 90},
        "expert_tensor_parallel_size=4 does not divide moe_ffn_hidden_size=90 (90 / 4 = 22.5)",
    ),
    (
        {**SHARED, **TP4, "sequence_parallel": True},
        {"moe_shared_expert_intermediate_size": 90},
        "tensor_model_parallel_size=4 does not divide moe_shared_expert_intermediate_size=90 (90 / 4 = 22.5)",
    ),
    (
        {**SCRIPT, "seq_length": 64, "max_position_embeddings": 64},
        {"max_position_embeddings": 32},
        "max_position_embeddings=32 is less than seq_length=64",
    ),
    (
        {**SCRIPT, **V16, "multi_latent_attention": True},
        {"group_query_attention": True},
        "multi_latent_attention=True excludes group_query_attention=True",
    ),
    (
        {**SCRIPT, **V16, "mtp_num_layers": 1, "position_embedding_type": "rope"},
        {"position_embedding_type": "learned_absolute"},
        "mtp_num_layers=1 with position_embedding_type='learned_absolute': multi-token prediction needs 'rope'",
    ),
    # Context parallel.
    (
        {**CP4, "cp_comm_type": ("a2a+p2p",), "hierarchical_context_parallel_sizes": (2, 2)},
        {"hierarchical_context_parallel_sizes": ()},
        "cp_comm_type='a2a+p2p' without hierarchical_context_parallel_sizes",
    ),
    (
        {**CP4, "cp_comm_type": ("a2a+p2p",), "hierarchical_context_parallel_sizes": (2, 2)},
        {"hierarchical_context_parallel_sizes": (2, 2, 1)},
        "hierarchical_context_parallel_sizes=2 2 1 has 3 levels, but cp_comm_type='a2a+p2p' needs two",
    ),
    (
        {**CP4, "hierarchical_context_parallel_sizes": (2, 2)},
        {"hierarchical_context_parallel_sizes": (2, 4)},
        "hierarchical_context_parallel_sizes 2 x 4 = 8 is not context_parallel_size=4",
    ),
    (CP4, {"transformer_impl": "local"}, "context_parallel_size=4 needs transformer_impl='transformer_engine'"),
    (
        {**CP4, "cp_comm_type": ("a2a",)},
        {"num_attention_heads": 12},
        "cp_comm_type='a2a' spreads heads over 4 ranks: num_attention_heads per TP rank = 6 is no multiple of it",
    ),
    (
        {**CP4, "cp_comm_type": ("a2a",), "group_query_attention": True, "num_query_groups": 8},
        {"num_query_groups": 4},
        "cp_comm_type='a2a' spreads heads over 4 ranks: num_query_groups per TP rank = 2 is no multiple of it",
    ),
    (
        HYBRID,
        {"pipeline_model_parallel_size": 2},
        "hybrid_context_parallel=True excludes pipeline_model_parallel_size=2",
    ),
    (HYBRID, {"use_megatron_fsdp": True}, "hybrid_context_parallel=True excludes use_megatron_fsdp=True"),
    (HYBRID, {"calculate_per_token_loss": False}, "hybrid_context_parallel=True needs calculate_per_token_loss=True"),
    # Pipeline.
    (
        {
            **SCRIPT,
            **V16,
            "pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
            "num_layers": 8,
        },
        {"num_layers_per_virtual_pipeline_stage": 2},
        "num_layers_per_virtual_pipeline_stage and num_virtual_stages_per_pipeline_rank are both given",
    ),
    (
        {**SCRIPT, "pipeline_model_parallel_size": 2, "num_layers": 8, "num_layers_per_virtual_pipeline_stage": 2},
        {"decoder_first_pipeline_num_layers": 4},
        "num_layers_per_virtual_pipeline_stage=2 with decoder_first_pipeline_num_layers=4",
    ),
    (
        {**V16, "pipeline_model_parallel_size": 3, "num_layers": 8, "decoder_first_pipeline_num_layers": 4},
        {"decoder_last_pipeline_num_layers": 4},
        "num_layers=8 - first stage 4 - last stage 4 = 0 layers are left for 1 middle stages",
    ),
    (
        {**SCRIPT, **PIPE, "global_batch_size": 4, "micro_batch_size": 1},
        {"overlap_p2p_comm": False},
        "virtual_pipeline_model_parallel_size=2 at pipeline_model_parallel_size=2 needs overlap_p2p_comm=True",
    ),
    (
        {**PIPE, "overlap_p2p_comm_warmup_flush": True},
        {"overlap_p2p_comm": False},
        "overlap_p2p_comm_warmup_flush=True needs overlap_p2p_comm=True",
    ),
    (
        DEFER,
        {"pipeline_model_parallel_size": 1},
        "defer_embedding_wgrad_compute=True needs pipeline_model_parallel_size",
    ),
    (DEFER, {"gradient_accumulation_fusion": False}, "defer_embedding_wgrad_compute=True needs gradient_accumulation"),
    (DEFER, {"wgrad_deferral_limit": -1}, "wgrad_deferral_limit=-1: must be 0 (all micro-batches) or more"),
    (
        {"pipeline_model_parallel_layout": "EttL"},
        {"account_for_loss_in_pipeline_split": True},
        "pipeline_model_parallel_layout='EttL' excludes account_for_loss_in_pipeline_split",
    ),
    (
        {"pipeline_model_parallel_layout": "EttL"},
        {"pipeline_model_parallel_layout": "ttL"},
        "pipeline_model_parallel_layout='ttL' has 0 E: exactly one, and it must be the first layer",
    ),
    (
        {"pipeline_model_parallel_layout": "EttL"},
        {"pipeline_model_parallel_layout": "EtLt"},
        "pipeline_model_parallel_layout='EtLt' has 1 L: exactly one, and it must be the last layer",
    ),
    (
        {"pipeline_model_parallel_layout": "EttmL", "mtp_num_layers": 1},
        {"mtp_num_layers": 2},
        "pipeline_model_parallel_layout='EttmL' places 1 multi-token prediction layers (m), but mtp_num_layers=2",
    ),
    (
        {"pipeline_model_parallel_layout": "EttmL", "mtp_num_layers": 1},
        {"pipeline_model_parallel_layout": "EtmtL"},
        "pipeline_model_parallel_layout='EtmtL' has a decoder layer (t) after a multi-token prediction layer (m)",
    ),
    (
        {"pipeline_model_parallel_layout": "Et|t|t|mL", "mtp_num_layers": 1, "pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_layout": "Ett|m||L"},
        "pipeline_model_parallel_layout='Ett|m||L' has m in chunk 0 of stage 1",
    ),
    (
        {"pipeline_model_parallel_layout": "Et|mmL", "mtp_num_layers": 2, "pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_layout": "Etm|mL"},
        "pipeline_model_parallel_layout='Etm|mL' spreads m over several stages: all 2 must be in one",
    ),
    (
        {**BATCH, "num_microbatches": 4},
        {"num_microbatches": 1},
        "microbatch_group_size_per_vp_stage=2 must be between pipeline_model_parallel_size=2 and num_microbatches=1",
    ),
    (
        {**BATCH, "num_microbatches": 8},
        {"microbatch_group_size_per_vp_stage": 1},
        "microbatch_group_size_per_vp_stage=1 must be between pipeline_model_parallel_size=2 and num_microbatches=8",
    ),
    # Nothing left over, or a whole pipeline's worth.
    (
        {**BATCH, "num_microbatches": 5, "microbatch_group_size_per_vp_stage": 3},
        {"num_microbatches": 7},
        "num_microbatches=7 leaves 1 for the last group of microbatch_group_size_per_vp_stage=3",
    ),
    (
        {"rampup_batch_size": (8, 4, 100), "global_batch_size": 32},
        {"rampup_batch_size": (8, 4)},
        "rampup_batch_size=8 4 has 2 numbers",
    ),
    (
        {"rampup_batch_size": (8, 4, 100), "global_batch_size": 32},
        {"rampup_batch_size": (8, 0, 100)},
        "rampup_batch_size=8 0 100: the first batch size and the increment must be at least 1",
    ),
    (
        {"rampup_batch_size": (8, 4, 100), "global_batch_size": 32},
        {"rampup_batch_size": (40, 4, 100)},
        "rampup_batch_size=40 4 100 starts at 40, more than global_batch_size=32",
    ),
    (
        {"rampup_batch_size": (8, 4, 100), "global_batch_size": 32},
        {"rampup_batch_size": (8, 5, 100)},
        "rampup_batch_size=8 5 100: the increment does not divide global_batch_size=32 - 8 = 24 (24 / 5 = 4.8)",
    ),
    # Experts.
    (V16, {"moe_ffn_hidden_size": 64}, "moe_ffn_hidden_size=64 without num_experts"),
    (SCRIPT, {"moe_latent_size": 64}, "moe_latent_size=64 without num_experts"),
    (
        {**MOE, "moe_layer_freq": (0, 1)},
        {"moe_layer_freq": (0, 2)},
        "moe_layer_freq lists 2: 1 is a layer with experts",
    ),
    (MOE, {"moe_layer_freq": 0}, "moe_layer_freq=0: must be at least 1"),
    ({**MOE, "moe_router_topk": 8}, {"moe_router_topk": 9}, "moe_router_topk=9 is more than num_experts=8"),
    (
        {**MOE, "tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"sequence_parallel": False},
        "num_experts=8 with tensor_model_parallel_size=2 needs sequence_parallel=True in training",
    ),
    (
        {**MOE, **V16, "expert_tensor_parallel_size": 2},
        {"add_bias_linear": True},
        "add_bias_linear=True with experts needs expert_tensor_parallel_size=1, but it is 2",
    ),
    (
        {**MOE, **V16, "moe_grouped_gemm": True, "transformer_impl": "local"},
        {"add_bias_linear": True},
        (
            "moe_grouped_gemm=True with the grouped GEMM of Megatron itself (transformer_impl=local or "
            "moe_use_legacy_grouped_gemm) excludes add_bias_linear=True"
        ),
    ),
    (SHARED, {"add_bias_linear": True}, "moe_shared_expert_intermediate_size=64 excludes add_bias_linear=True"),
    (
        {**MOE, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
        {"moe_router_score_function": "softmax"},
        "moe_router_enable_expert_bias=True with moe_router_score_function='softmax'",
    ),
    (
        {
            **MOE,
            **V16,
            "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"),
            "moe_aux_loss_coeff": (0.1, 0.2),
        },
        {"moe_aux_loss_coeff": 0.1},
        "moe_router_load_balancing_type lists 2 losses, but moe_aux_loss_coeff 1",
    ),
    (
        {**MOE, "moe_router_load_balancing_type": "sinkhorn"},
        {"moe_aux_loss_coeff": 0.1},
        "moe_router_load_balancing_type='sinkhorn' excludes moe_aux_loss_coeff=0.1",
    ),
    (GROUPED, {"moe_router_num_groups": None}, "moe_router_group_topk=2 without moe_router_num_groups"),
    (GROUPED, {"moe_router_num_groups": 3}, "moe_router_num_groups=3 does not divide num_experts=8 (8 / 3 = 2.66667)"),
    (GROUPED, {"moe_router_group_topk": 5}, "moe_router_group_topk=5 is more than moe_router_num_groups=4"),
    (
        {**MOE, "moe_expert_capacity_factor": 1.5},
        {"moe_router_load_balancing_type": "sinkhorn"},
        "moe_expert_capacity_factor=1.5 excludes moe_router_load_balancing_type='sinkhorn'",
    ),
    (
        {**MOE, "moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 1.0},
        {"moe_expert_capacity_factor": -1.0},
        "moe_pad_expert_input_to_capacity=True needs moe_expert_capacity_factor",
    ),
    (
        {
            **MOE,
            "megatron_core_version": "0.18.0",
            "moe_expert_rank_capacity_factor": 1.5,
            "moe_flex_dispatcher_backend": "hybridep",
        },
        {"moe_flex_dispatcher_backend": "deepep"},
        "moe_expert_rank_capacity_factor=1.5 with moe_flex_dispatcher_backend='deepep'",
    ),
    (
        {**FLEX, "moe_enable_deepep": True, "expert_model_parallel_size": 2},
        {"moe_token_dispatcher_type": "alltoall"},
        "moe_enable_deepep=True needs moe_token_dispatcher_type='flex', not 'alltoall'",
    ),
    (
        {**FLEX, "moe_enable_deepep": True, "expert_model_parallel_size": 2},
        {"moe_flex_dispatcher_backend": "hybridep"},
        "moe_enable_deepep=True excludes moe_flex_dispatcher_backend='hybridep'",
    ),
    (
        {**FLEX, "expert_model_parallel_size": 2},
        {"expert_model_parallel_size": 1},
        "moe_token_dispatcher_type='flex' needs expert_tensor_parallel_size x expert_model_parallel_size > 1",
    ),
    (
        {**FLEX, "expert_model_parallel_size": 2, "moe_expert_capacity_factor": 1.0},
        {"moe_pad_expert_input_to_capacity": True},
        "moe_token_dispatcher_type='flex' with DeepEP excludes moe_pad_expert_input_to_capacity=True",
    ),
    (
        {**SHARED, "moe_shared_expert_overlap": True},
        {"moe_token_dispatcher_type": "allgather"},
        "moe_shared_expert_overlap=True needs moe_token_dispatcher_type='alltoall', not 'allgather'",
    ),
    (MOE, {"variable_seq_lengths": True}, "moe_token_dispatcher_type='allgather' excludes variable_seq_lengths=True"),
    (
        {**MOE, "moe_router_padding_for_fp8": True, "fp8": "hybrid", "moe_token_dispatcher_type": "alltoall"},
        {"fp8": None},
        "moe_router_padding_for_quantization=True needs fp8 or fp4",
    ),
    (
        {**MOE, "moe_router_padding_for_fp8": True, "fp8": "hybrid", "moe_token_dispatcher_type": "alltoall"},
        {"moe_token_dispatcher_type": "allgather"},
        "moe_router_padding_for_quantization=True needs moe_token_dispatcher_type='alltoall'",
    ),
    (V16, {"delay_wgrad_compute": True}, "delay_wgrad_compute=True needs overlap_moe_expert_parallel_comm=True"),
    (
        {**EP_OVERLAP, **SCRIPT, "delay_wgrad_compute": True},
        {"transformer_impl": "local"},
        "delay_wgrad_compute=True needs transformer_impl='transformer_engine', not 'local'",
    ),
    (
        {**EP_OVERLAP, "ep_overlap_early_attn_memory_release": True},
        {"overlap_moe_expert_parallel_comm": False},
        "ep_overlap_early_attn_memory_release=True needs overlap_moe_expert_parallel_comm=True",
    ),
    (
        EP_OVERLAP,
        {"expert_model_parallel_size": 1},
        "overlap_moe_expert_parallel_comm=True needs expert_model_parallel",
    ),
    (EP_OVERLAP, {"moe_token_dispatcher_type": "allgather"}, "overlap_moe_expert_parallel_comm=True needs moe_token_"),
    (
        EP_OVERLAP,
        {"pipeline_model_parallel_size": 2},
        "overlap_moe_expert_parallel_comm=True at pipeline_model_parallel",
    ),
    (EP_OVERLAP, FULL, "overlap_moe_expert_parallel_comm=True excludes recompute_granularity='full'"),
    (EP_OVERLAP, {"bf16": False}, "overlap_moe_expert_parallel_comm=True needs bf16=True or fp16=True"),
    (
        EP_OVERLAP,
        {"moe_shared_expert_overlap": True},
        "overlap_moe_expert_parallel_comm=True excludes moe_shared_expert",
    ),
    (EP_OVERLAP, {"mtp_num_layers": 2}, "overlap_moe_expert_parallel_comm=True with mtp_num_layers=2: at most 1"),
    # Recompute, offload, graphs.
    (FULL, {"recompute_num_layers": None}, "recompute_granularity='full' without recompute_num_layers"),
    (
        SELECTIVE,
        {"recompute_num_layers": 2},
        "recompute_num_layers=2 has no meaning with recompute_granularity='selective'",
    ),
    (
        {**FULL, **V16, "mtp_num_layers": 1},
        {"recompute_num_layers": 2},
        "recompute_num_layers=2 with mtp_num_layers=1: recompute_method='uniform' needs recompute_num_layers=1",
    ),
    (
        {**FULL, **SCRIPT, "distribute_saved_activations": True, "tensor_model_parallel_size": 2},
        {"tensor_model_parallel_size": 1},
        "distribute_saved_activations=True needs tensor_model_parallel_size > 1",
    ),
    (
        {**SCRIPT, "tensor_model_parallel_size": 2},
        {"distribute_saved_activations": True},
        "distribute_saved_activations=True needs recompute_granularity='full', not None",
    ),
    (
        {**FULL, "distribute_saved_activations": True, "tensor_model_parallel_size": 2},
        {"sequence_parallel": True},
        "distribute_saved_activations=True excludes sequence_parallel=True",
    ),
    (SELECTIVE, {"recompute_modules": ("mlps",)}, "recompute_modules='mlps': must be one of core_attn, moe_act"),
    (
        {**SELECTIVE, "moe_grouped_gemm": True, "recompute_modules": ("moe_act",)},
        {"moe_grouped_gemm": False},
        "recompute_modules='moe_act' needs moe_grouped_gemm=True",
    ),
    (
        SELECTIVE,
        {"recompute_modules": ("mla_up_proj",)},
        "recompute_modules='mla_up_proj' needs multi_latent_attention",
    ),
    (
        {**SHARED, **SELECTIVE, "recompute_modules": ("shared_experts",)},
        {"moe_shared_expert_overlap": True},
        "recompute_modules='shared_experts' excludes moe_shared_expert_overlap=True",
    ),
    (
        {**SELECTIVE, **V16, "recompute_modules": ("layernorm",), "fp8": "hybrid", "fp8_recipe": "tensorwise"},
        {"fp8_recipe": "delayed"},
        "recompute_modules='layernorm' with fp8 excludes fp8_recipe='delayed'",
    ),
    (
        {"cpu_offloading": True, "cpu_offloading_num_layers": 3, "num_layers": 4},
        {"cpu_offloading_num_layers": 4},
        "cpu_offloading_num_layers=4 must be less than num_layers=4",
    ),
    (
        {"cpu_offloading": True},
        {"pipeline_model_parallel_size": 2},
        "cpu_offloading=True excludes pipeline_model_parallel",
    ),
    ({"cpu_offloading": True}, SELECTIVE, "cpu_offloading=True excludes recompute_granularity='selective'"),
    (
        {**V16, "enable_cuda_graph": True},
        {"external_cuda_graph": True},
        "enable_cuda_graph=True and external_cuda_graph=True: at most one of them",
    ),
    (
        {**V16, "cuda_graph_impl": "local"},
        {"cpu_offloading": True},
        "cuda_graph_impl='local' excludes cpu_offloading=True",
    ),
    (
        {**V16, **FULL, "cuda_graph_impl": "local", "cuda_graph_scope": ("full_iteration",)},
        {"cuda_graph_scope": ("attn",)},
        "recompute_granularity='full' with cuda_graph_impl='local' needs a graph of the full iteration",
    ),
    # Precision, optimizer, data parallel.
    ({"fp8": "hybrid"}, {"fp4": "e2m1"}, "fp8='hybrid' and fp4='e2m1': at most one of them"),
    (
        {**V16, "fp8": "hybrid", "fp8_param_gather": True},
        {"fp8": None},
        "fp8_param_gather=True needs fp8: give the format (--fp8-format)",
    ),
    ({"fp4": "e2m1", "fp4_param": True}, {"fp4": None}, "fp4_param=True needs fp4: give the format (--fp4-format)"),
    (
        {**SCRIPT, "fp8": "hybrid", "fp8_param_gather": True, "use_distributed_optimizer": True},
        {"use_distributed_optimizer": False},
        "fp8_param_gather=True needs use_distributed_optimizer, use_megatron_fsdp or use_torch_fsdp2",
    ),
    (
        {"fp8": "hybrid", "fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True},
        {"fp8_param_gather": False},
        "reuse_grad_buf_for_mxfp8_param_ag=True needs fp8_param_gather=True",
    ),
    (
        {"fp8": "hybrid", "first_last_layers_bf16": True, "fp8_recipe": "tensorwise"},
        {"fp8_recipe": "delayed"},
        "first_last_layers_bf16=True excludes fp8_recipe='delayed'",
    ),
    (
        {"fp8": "hybrid", "first_last_layers_bf16": True, "fp8_recipe": "tensorwise", "num_layers": 4},
        {"num_layers_at_end_in_bf16": 5},
        "num_layers_at_end_in_bf16=5 must be between 0 and num_layers=4 / pipeline_model_parallel_size=1 = 4",
    ),
    (PRECISION, {"optimizer": "sgd"}, "use_precision_aware_optimizer=True needs optimizer='adam', not 'sgd'"),
    (
        PRECISION,
        {"use_distributed_optimizer": False},
        "use_precision_aware_optimizer=True needs use_distributed_optimizer",
    ),
    (
        {**PRECISION, "exp_avg_dtype": "bf16"},
        {"use_precision_aware_optimizer": False},
        "exp_avg_dtype=bfloat16 needs use_precision_aware_optimizer=True",
    ),
    (
        {**PRECISION, **SCRIPT, "bf16": True, "main_grads_dtype": "bf16"},
        {"accumulate_allreduce_grads_in_fp32": True},
        "accumulate_allreduce_grads_in_fp32=True excludes main_grads_dtype=bfloat16",
    ),
    (
        {**PRECISION, **SCRIPT, "optimizer_cpu_offload": True},
        {"use_precision_aware_optimizer": False},
        "optimizer_cpu_offload=True needs use_precision_aware_optimizer=True",
    ),
    (
        {**PRECISION, **SCRIPT, "optimizer_cpu_offload": True, "fp8": "hybrid", "fp8_param_gather": True},
        {"fp8_recipe": "mxfp8"},
        "optimizer_cpu_offload=True with fp8_param_gather=True needs fp8_recipe='delayed', not 'mxfp8'",
    ),
    (
        {**V16, "use_distributed_optimizer": True},
        {"optimizer": "sgd"},
        "use_distributed_optimizer=True needs optimizer='adam', not 'sgd'",
    ),
    (
        {**V16, **SCRIPT, "optimizer": "muon"},
        {"overlap_grad_reduce": True},
        "optimizer='muon' excludes overlap_grad_reduce=True",
    ),
    (
        {"num_distributed_optimizer_instances": 2, "use_distributed_optimizer": True},
        {"use_distributed_optimizer": False},
        "num_distributed_optimizer_instances=2 needs use_distributed_optimizer=True",
    ),
    (
        {"num_distributed_optimizer_instances": 2, "use_distributed_optimizer": True},
        {"ddp_reduce_scatter_with_fp32_accumulation": True},
        "num_distributed_optimizer_instances=2 excludes ddp_reduce_scatter_with_fp32_accumulation=True",
    ),
    (
        {**V16, "calculate_per_token_loss": True},
        {"ddp_average_in_collective": True},
        "calculate_per_token_loss=True excludes ddp_average_in_collective=True",
    ),
    (
        {**V16, **SCRIPT, "ddp_num_buckets": 4},
        {"ddp_bucket_size": 1000},
        "ddp_num_buckets=4 and ddp_bucket_size=1000: each fixes the buckets",
    ),
    (GATHER, {"overlap_grad_reduce": False}, "overlap_param_gather=True needs overlap_grad_reduce=True"),
    (
        {**GATHER, **PIPE, "overlap_param_gather_with_optimizer_step": True},
        {"use_distributed_optimizer": False, "use_megatron_fsdp": True},
        "overlap_param_gather_with_optimizer_step=True needs use_distributed_optimizer=True",
    ),
    (
        {**GATHER, **PIPE, "overlap_param_gather_with_optimizer_step": True},
        {"overlap_param_gather": False},
        "overlap_param_gather_with_optimizer_step=True needs overlap_param_gather=True",
    ),
    (
        {**GATHER, **PIPE, "overlap_param_gather_with_optimizer_step": True},
        {"virtual_pipeline_model_parallel_size": None},
        "overlap_param_gather_with_optimizer_step=True needs an interleaved schedule",
    ),
    (
        {**SCRIPT, "use_megatron_fsdp": True, "nccl_ub": True, "fsdp_manual_registration": True},
        {"nccl_ub": False},
        "fsdp_manual_registration=True needs nccl_ub=True",
    ),
    (FSDP2, {"pipeline_model_parallel_size": 2}, "use_torch_fsdp2=True excludes pipeline_model_parallel_size=2"),
    ({**FSDP2, **MOE}, {"expert_model_parallel_size": 2}, "use_torch_fsdp2=True excludes expert_model_parallel_size=2"),
    (FSDP2, {"use_distributed_optimizer": True}, "use_torch_fsdp2=True excludes use_distributed_optimizer=True"),
    (FSDP2, {"gradient_accumulation_fusion": True}, "use_torch_fsdp2=True excludes gradient_accumulation_fusion=True"),
    (FSDP2, {"fp16": True}, "use_torch_fsdp2=True excludes fp16=True"),
    (
        FSDP2,
        {"untie_embeddings_and_output_weights": False},
        "use_torch_fsdp2=True needs untie_embeddings_and_output_weights=True",
    ),
]


@pytest.mark.parametrize(("accepted", "change", "expected"), RULES, ids=[row[2][:60] for row in RULES])
def test_rule(accepted: dict[str, Any], change: dict[str, Any], expected: str) -> None:
    Job(**accepted)
    with pytest.raises(JobError) as error:
        Job(**{**accepted, **change})
    assert str(error.value).startswith(expected)


@pytest.mark.parametrize(
    "fields",
    [
        # Rules of the command line do not bind another loop around the library.
        {"use_torch_fsdp2": True, "expert_model_parallel_size": 2, "num_experts": 8},
        {"overlap_param_gather": True},
        {"tp_comm_overlap": True},
        # Rules that only some releases have need a stated one.
        {**MOE, "moe_token_dispatcher_type": "flex"},
        {"num_experts": 8, "expert_tensor_parallel_size": 2},
        {"delay_wgrad_compute": True},
        {**SCRIPT, "megatron_core_version": "0.19.0", "mtp_num_layers": 1},
        {
            **SHARED,
            "megatron_core_version": "0.18.0",
            "moe_token_dispatcher_type": "flex",
            "expert_model_parallel_size": 2,
            "moe_shared_expert_overlap": True,
        },
        {"megatron_core_version": "0.19.0", "use_distributed_optimizer": True, "optimizer": "sgd"},
        # Evaluation.
        {**MOE, "tensor_model_parallel_size": 2, "forward_only": True},
        # The batch is not known: the single micro-batch is assumed.
        BATCH,
        # A product grid is no Megatron layout.
        {**MOE, "tensor_model_parallel_size": 2, "grid": "product"},
        # Dense layers are not known to exist.
        {**MOE, "ffn_hidden_size": 90, "moe_ffn_hidden_size": 64, **TP4, "sequence_parallel": True},
    ],
)
def test_not_refused(fields: dict[str, Any]) -> None:
    Job(**fields)


def test_both_kinds_of_pipeline_messages() -> None:
    with pytest.raises(JobError, match="at most one of them with an interleaved schedule"):
        parse_mapping({"pp": 2, "vpp": 2, "overlap_p2p_comm": True, "batch_p2p_comm": True})
    assert parse_mapping({"pp": 2, "vpp": 2, "batch_p2p_comm": False}).overlap_p2p_comm


def test_release() -> None:
    assert job_rules.release("core_v0.16.1") == (0, 16)
    assert job_rules.release("0.18.0rc0") == (0, 18)
    assert job_rules.release("main") is None
    assert job_rules.release(None) is None


# -- fields and how they are read ------------------------------------------------------------------------------------

PRINTED: dict[str, tuple[str, Any]] = {
    "cuda_graph_impl": ("transformer_engine", "transformer_engine"),
    "cuda_graph_scope": ("[<CudaGraphScope.attn: 2>, <CudaGraphScope.moe_router: 5>]", ("attn", "moe_router")),
    "clip_grad": ("0.0", 0.0),
    "exp_avg_dtype": ("torch.float32", "float32"),
    "moe_z_loss_coeff": ("0.001", 0.001),
    "fp4_param_gather": ("False", False),
    "gradient_accumulation_fusion": ("False", False),
    "optimizer": ("sgd", "sgd"),
    "offload_modules": ("['core_attn', 'attn_proj']", ("core_attn", "attn_proj")),
}


def test_new_fields_in_a_log() -> None:
    rows = [f"  {name} {'.' * (48 - len(name))} {text}" for name, (text, _) in PRINTED.items()]
    text = "\n".join(["----------- arguments -----------", *rows, "----------- end of arguments -----------"])
    job = parse_log(text)
    assert job.extra == {}
    renamed = {"fp4_param_gather": "fp4_param"}
    expected = {renamed.get(name, name): value for name, (_, value) in PRINTED.items()}
    assert {name: getattr(job, name) for name in expected} == expected


def test_new_options_on_a_command_line() -> None:
    job = parse_command_line(
        "x.py --use-nccl-ub --no-gradient-accumulation-fusion --no-gradient-reduce-div-fusion --clip-grad 0.5 "
        "--optimizer dist_muon --cuda-graph-impl local --cuda-graph-scope attn mlp --disable-tp-comm-split-ag "
        "--fp8-format e4m3 --no-fp8-wgrad --moe-layer-freq ([0]*1+[1]*3)*2 --num-layers 8 --exp-avg-sq-dtype fp32 "
        "--disable-gloo-process-groups --qk-clip"
    )
    assert job.extra == {}
    assert {name: getattr(job, name) for name in job.given} == {
        "nccl_ub": True,
        "gradient_accumulation_fusion": False,
        "gradient_reduce_div_fusion": False,
        "clip_grad": 0.5,
        "optimizer": "dist_muon",
        "cuda_graph_impl": "local",
        "cuda_graph_scope": ("attn", "mlp"),
        "tp_comm_split_ag": False,
        "fp8": "e4m3",
        "fp8_wgrad": False,
        "moe_layer_freq": (0, 1, 1, 1, 0, 1, 1, 1),
        "num_layers": 8,
        "exp_avg_sq_dtype": "float32",
        "enable_gloo_process_groups": False,
        "qk_clip": True,
    }


def test_new_fields_in_a_file() -> None:
    job = parse_mapping(
        {
            "te_version": "2.9.0",
            "torch_version": "2.9.1",
            "environment": {"NVTE_BATCH_MHA_P2P_COMM": 1},
            "cuda_graph_scope": "attn,mlp",
            "enable_cuda_graph": True,
            "use_precision_aware_optimizer": True,
            "use_distributed_optimizer": True,
            "exp_avg_dtype": "fp8",
        }
    )
    assert (job.transformer_engine_version, job.torch_version) == ("2.9.0", "2.9.1")
    assert job.nvte_batch_mha_p2p_comm is True
    assert (job.cuda_graph_impl, job.cuda_graph_scope) == ("local", ("attn", "mlp"))
    assert job.exp_avg_dtype == "uint8"
    assert Job.from_json(job.to_json()) == job
    assert Job(cuda_graph_scope=("full",)).cuda_graph_scope == ()
    assert Job().nvte_batch_mha_p2p_comm is None


def test_batched_messages_are_the_opposite_of_overlapped_ones() -> None:
    assert Job().batch_p2p_comm is True
    assert Job(**PIPE).batch_p2p_comm is False


def test_a_field_that_an_older_program_stored_as_extra() -> None:
    job = Job.from_json('{"num_layers": 2, "given": ["num_layers"], "extra": {"clip_grad": 0.0, "lr": 0.1}}')
    assert job.clip_grad == 0
    assert job.given == {"num_layers", "clip_grad"}


def test_a_batch_rounded_down() -> None:
    sizes: dict[str, Any] = {"world_size": 8, "micro_batch_size": 2, "global_batch_size": 100}
    assert Job(**sizes, decrease_batch_size_if_needed=True).num_microbatches == 6


def test_where_multi_token_prediction_is() -> None:
    layout: dict[str, Any] = {
        "pipeline_model_parallel_layout": "Et|t|tm|L",
        "pipeline_model_parallel_size": 4,
        "mtp_num_layers": 1,
    }
    job = Job(**layout)
    assert job.layout_stages == ("Et", "t", "tm", "L")
    assert job.mtp_standalone
    assert [job.mtp_layers_on_stage(stage) for stage in range(4)] == [0, 0, 1, 0]
    plain = Job(**PIPE, mtp_num_layers=2)
    assert not plain.mtp_standalone
    assert [plain.mtp_layers_on_stage(1, chunk) for chunk in (0, 1)] == [0, 2]
    assert plain.mtp_layers_on_stage(0) == 0
