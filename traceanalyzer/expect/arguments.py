"""Arguments of Megatron that decide a job and move no byte of a step's communication, and why.

Every other argument that the model knows either changes a call or is named by a Gap; tests/expect/test_arguments.py
tries them all.
"""

from __future__ import annotations

UNMOVED: dict[str, str] = {
    "align_param_gather": "when chunks start their gathers, not what they gather",
    "create_all_gather_group": "a twin of the data-parallel group for gathers: the same calls, on its twin",
    "ddp_average_in_collective": "the average is taken in the call instead of before it: as many calls and bytes",
    "enable_gloo_process_groups": "twins of groups for checkpoints, not for a step",
    "use_tp_pp_dp_mapping": "which ranks form a group, not what each sends",
    "microbatch_group_size_per_vp_stage": "the order of an interleaved schedule; as many messages",
    "moe_enable_deepep": "the older name of the flex dispatcher's default backend",
    "overlap_moe_expert_parallel_comm": "the order of calls: another micro-batch's compute runs beside them",
    "log_interval": "how often logged values are written; what is summed for them is summed every step, the rest is a gap",
    "make_vocab_size_divisible_by": "only through the padded vocabulary",
    "vocab_size": "only through the padded vocabulary",
    "torch_version": "names of calls, not their number or size",
}
"""Argument -> why it changes no call."""
