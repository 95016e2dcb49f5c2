"""What a job was told to do: derived values, refusals, and every reader on literal inputs."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from traceanalyzer.errors import InputError, JobError
from traceanalyzer.job import Conflict, Job, conflicts, parse_command_line, parse_log, parse_mapping, read_job


def message(ask: Any, *arguments: Any, **names: Any) -> str:
    with pytest.raises(JobError) as error:
        ask(*arguments, **names)
    return str(error.value)


def stated(job: Job) -> dict[str, Any]:
    """The fields that the source stated, with their final values."""
    return {name: getattr(job, name) for name in sorted(job.given)}


# -- the argument block ----------------------------------------------------------------------------------------------

BLOCK = """\
using world size: 16, data-parallel size: 2, context-parallel size: 2, hierarchical context-parallel sizes: None, \
tensor-model-parallel size: 2, pipeline-model-parallel size: 2
------------------------ arguments ------------------------
  accumulate_allreduce_grads_in_fp32 .............. True
  adam_beta1 ...................................... 0.9
  add_bias_linear ................................. False
  attention_backend ............................... AttnBackend.auto
  barrier_with_L1_time ............................ True
  bf16 ............................................ True
  context_parallel_size ........................... 2
  cp_comm_type .................................... ['p2p']
  data_parallel_size .............................. 2
  data_path ....................................... ['/data/a', '/data/b']
  expert_model_parallel_size ...................... 2
  expert_tensor_parallel_size ..................... 1
  ffn_hidden_size ................................. 2816
  fp16 ............................................ False
  fp8 ............................................. None
  global_batch_size ............................... 64
  group_query_attention ........................... True
  hidden_size ..................................... 1024
  hierarchical_context_parallel_sizes ............. None
  kv_channels ..................................... 64
  micro_batch_size ................................ 2
  moe_aux_loss_coeff .............................. 0.01
  moe_layer_freq .................................. [0, 1, 1, 1, 0, 1, 1, 1]
  moe_token_dispatcher_type ....................... alltoall
  moe_use_a_very_long_name_that_is_not_in_the_table_today  7
  num_attention_heads ............................. 16
  num_experts ..................................... 8
  num_layers ...................................... 8
  num_query_groups ................................ 4
  padded_vocab_size ............................... None
  params_dtype .................................... torch.bfloat16
  pipeline_model_parallel_size .................... 2
  recompute_granularity ........................... None
  seq_length ...................................... 4096
  sequence_parallel ............................... True
  swiglu .......................................... True
  tensor_model_parallel_size ...................... 2
  virtual_pipeline_model_parallel_size ............ None
  vocab_size ...................................... None
  wandb_project ................................... 
  world_size ...................................... 16
-------------------- end of arguments ---------------------
> building GPT2BPETokenizer tokenizer ...
 > padded vocab (size: 50257) with 175 dummy tokens (new size: 50432)
"""  # noqa: W291

BLOCK_STATES = {
    "accumulate_allreduce_grads_in_fp32": True,
    "add_bias_linear": False,
    "barrier_with_L1_time": True,
    "bf16": True,
    "context_parallel_size": 2,
    "cp_comm_type": ("p2p",),
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "ffn_hidden_size": 2816,
    "fp16": False,
    "fp8": None,
    "global_batch_size": 64,
    "group_query_attention": True,
    "hidden_size": 1024,
    "hierarchical_context_parallel_sizes": (),
    "kv_channels": 64,
    "micro_batch_size": 2,
    "moe_aux_loss_coeff": 0.01,
    "moe_layer_freq": (0, 1, 1, 1, 0, 1, 1, 1),
    "moe_token_dispatcher_type": "alltoall",
    "num_attention_heads": 16,
    "num_experts": 8,
    "num_layers": 8,
    "num_query_groups": 4,
    "padded_vocab_size": 50432,
    "params_dtype": "bfloat16",
    "pipeline_model_parallel_size": 2,
    "recompute_granularity": None,
    "seq_length": 4096,
    "sequence_parallel": True,
    "swiglu": True,
    "tensor_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": None,
    "world_size": 16,
}

BLOCK_EXTRA = {
    "adam_beta1": 0.9,
    "attention_backend": "AttnBackend.auto",
    "data_path": ["/data/a", "/data/b"],
    "moe_use_a_very_long_name_that_is_not_in_the_table_today": 7,
    "wandb_project": "",
}


def test_argument_block() -> None:
    job = parse_log(BLOCK)
    assert stated(job) == BLOCK_STATES
    assert job.extra == BLOCK_EXTRA
    assert job.framework == "megatron-lm"
    assert job.layout.equation == "16 = TP 2 x CP 2 x PP 2 x DP 2"
    assert job.layout.expert_equation == "16 = ETP 1 x EP 2 x PP 2 x EDP 4"
    assert job.num_microbatches == 16
    assert [layer for layer in job.layers_on_stage(1) if job.is_moe_layer(layer)] == [5, 6, 7]


@pytest.mark.parametrize(
    "prefix",
    [
        "[rank0]: ",
        "0: ",
        "[default0]:",
        "[node7:0]:",
        "2026-08-23 09:15:42,117 - INFO - ",
        "2026-08-23T09:15:42Z worker stdout | ",
        "\x1b[36m(pid=12)\x1b[0m ",
    ],
)
def test_launcher_prefixes(prefix: str) -> None:
    text = "".join(f"{prefix}{line}\r\n" for line in BLOCK.splitlines())
    assert parse_log(text) == parse_log(BLOCK)


def test_other_lines_between_the_arguments_are_skipped() -> None:
    lines = BLOCK.splitlines()
    noise = ["[rank5]: WARNING hidden_size .. 7", "  hidden_size ..... 7", "NCCL version 2.27 ... 12", ""]
    mixed = [text for line in lines for text in (*noise, line)]
    assert parse_log(mixed) == parse_log(BLOCK)


def test_the_last_complete_block_counts() -> None:
    later = BLOCK.replace(". 1024", ". 2048").replace("new size: 50432", "new size: 50688")
    cut = BLOCK[: BLOCK.index("  kv_channels")]
    job = parse_log(BLOCK + later + cut)
    assert (job.hidden_size, job.padded_vocab_size) == (2048, 50688)


def test_padded_vocabulary_of_an_earlier_block_is_not_used() -> None:
    assert parse_log(BLOCK + BLOCK[: BLOCK.index(" > padded")]).padded_vocab_size is None


def test_no_block() -> None:
    assert message(parse_log, "training ...\n") == (
        "no argument block: Megatron prints '---- arguments ----' on rank 0 at the start of the run"
    )
    assert message(parse_log, "one\n" + BLOCK[: BLOCK.index("  kv_channels")]) == (
        "the argument block that starts on line 3 has no end: the log is cut; give the log of rank 0 up to "
        "'end of arguments', or the launch command"
    )


# -- the command line ------------------------------------------------------------------------------------------------

COMMAND = r"""
torchrun --nproc-per-node 8 --nnodes=4 --node-rank 0 --master_addr 10.0.0.1 pretrain_gpt.py \
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size=4 \
    --num-layers-per-virtual-pipeline-stage 2 --use-tp-pp-dp-mapping \
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 \
    --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 128 \
    --swiglu --disable-bias-linear --normalization RMSNorm --use-rotary-position-embeddings \
    --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --vocab-size 128000 \
    --bf16 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --no-align-grad-reduce \
    --recompute-activations --fp8-format hybrid --no-barrier-with-level-1-timing --disable-tp-comm-bulk-wgrad \
    --cp-comm-type p2p --recompute-modules core_attn mlp --moe-layer-freq "([0]*1+[1]*3)*8" \
    --lr 3e-4 --no-masked-softmax-fusion --data-path 0.3 /data/a 0.7 '/data/b c' --min-lr -1
"""

COMMAND_STATES = {
    "add_bias_linear": False,
    "align_grad_reduce": False,
    "barrier_with_L1_time": False,
    "bf16": True,
    "cp_comm_type": ("p2p",),
    "fp8": "hybrid",
    "global_batch_size": 128,
    "group_query_attention": True,
    "hidden_size": 4096,
    "max_position_embeddings": 4096,
    "micro_batch_size": 1,
    "moe_layer_freq": (0, 1, 1, 1) * 8,
    "normalization": "RMSNorm",
    "num_attention_heads": 32,
    "num_layers": 32,
    "num_layers_per_virtual_pipeline_stage": 2,
    "num_query_groups": 8,
    "overlap_grad_reduce": True,
    "pipeline_model_parallel_size": 4,
    "position_embedding_type": "rope",
    "recompute_granularity": "selective",
    "recompute_modules": ("core_attn", "mlp"),
    "seq_length": 4096,
    "sequence_parallel": True,
    "swiglu": True,
    "tensor_model_parallel_size": 4,
    "tokenizer_type": "NullTokenizer",
    "tp_comm_bulk_wgrad": False,
    "untie_embeddings_and_output_weights": True,
    "use_distributed_optimizer": True,
    "use_tp_pp_dp_mapping": True,
    "vocab_size": 128000,
    "world_size": 32,
}


def test_command_line() -> None:
    job = parse_command_line(COMMAND)
    assert stated(job) == COMMAND_STATES
    assert job.extra == {
        "lr": 3e-4,
        "no_masked_softmax_fusion": True,
        "data_path": [0.3, "/data/a", 0.7, "/data/b c"],
        "min_lr": -1,
    }
    assert job.virtual_pipeline_model_parallel_size == 4
    assert job.overlap_p2p_comm
    assert job.order == "tp-cp-ep-pp-dp"
    assert job.layout.groups("pp")[0] == (0, 4, 8, 12)
    assert job.num_microbatches == 64
    # NullTokenizer adds one token before padding to 128 x TP.
    assert job.padded_vocab_size == 128512
    assert job.ffn_hidden_size == 10880
    assert job.is_moe_layer(3) is False, "no experts, whatever moe_layer_freq says"


def test_command_line_as_words() -> None:
    job = parse_command_line(["--num-layers", "4", "--cp-comm-type", "p2p", "a2a", "p2p", "allgather", "--fp16"])
    assert stated(job) == {
        "cp_comm_type": ("p2p", "a2a", "p2p", "all_gather"),
        "fp16": True,
        "num_layers": 4,
    }
    assert [job.cp_comm_type_of(layer) for layer in range(4)] == ["p2p", "a2a", "p2p", "all_gather"]
    assert job.world_size is None


@pytest.mark.parametrize(
    ("launcher", "world_size"),
    [
        ("torchrun --nnodes 2 --nproc_per_node=4 x.py", 8),
        ("torchrun --standalone --nproc-per-node 4 x.py", 4),
        ("python -m torch.distributed.run --nnodes=2 --nproc-per-node=8 /opt/x.py", 16),
        ("torchrun --nnodes 1:4 --nproc-per-node 8 x.py", None),
        ("torchrun --nnodes $NNODES --nproc-per-node 8 x.py", None),
        ("torchrun --nproc-per-node gpu x.py", None),
        ("python x.py", None),
        ("", None),
    ],
)
def test_world_size_of_the_launcher(launcher: str, world_size: int | None) -> None:
    assert parse_command_line(f"{launcher} --num-layers 2").world_size == world_size


def test_command_line_refusals() -> None:
    assert message(parse_command_line, "x.py --num-layers --bf16") == "--num-layers has no value"
    assert message(parse_command_line, "x.py --num-layers four") == "num_layers='four': expected a whole number"
    assert message(parse_command_line, "x.py --tensor-model-parallel-size ${TP}") == (
        "--tensor-model-parallel-size is followed by '${TP}': shell variables are not expanded here; give the command "
        "as it ran ('ps -ww -ef', or what 'bash -x' prints for the script)"
    )
    assert message(parse_command_line, "x.py --data-path 'a") == (
        "the command line cannot be split into words: No closing quotation"
    )
    assert message(parse_command_line, "x.py --moe-layer-freq [1]*x") == (
        "moe_layer_freq='[1]*x': expected a list such as [1, 0]"
    )
    assert message(parse_command_line, "x.py --moe-layer-freq [1]*999999999") == (
        "moe_layer_freq='[1]*999999999': expected a list such as [1, 0]"
    )


# -- files -----------------------------------------------------------------------------------------------------------

TOML = """
run = "ablation 7"
[model]
layers = 12
hidden = 768
heads = 12
num_query_groups = 4
ffn = 3072
vocab = 50257
[parallel]
tp = 2
cp = 1
pp = 2
vpp = 3
dp = 4
sp = true
[batch]
seq = 1024
mbs = 4
microbatches = 8
dtype = "bf16"
[notes]
owner = "us"
started = 2026-08-23
"""


def test_toml_with_short_names(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(TOML)
    job = read_job(path)
    assert stated(job) == {
        "bf16": True,
        "ffn_hidden_size": 3072,
        "fp16": False,
        "context_parallel_size": 1,
        "group_query_attention": True,
        "hidden_size": 768,
        "micro_batch_size": 4,
        "num_attention_heads": 12,
        "num_layers": 12,
        "num_microbatches": 8,
        "num_query_groups": 4,
        "pipeline_model_parallel_size": 2,
        "seq_length": 1024,
        "sequence_parallel": True,
        "tensor_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 3,
        "vocab_size": 50257,
        "world_size": 16,
    }
    assert job.extra == {"run": "ablation 7", "owner": "us", "started": "2026-08-23"}
    assert job.framework == "megatron-core"
    assert job.global_batch_size == 128
    assert job.padded_vocab_size == 50432


MEGATRON_YAML = """
# WARNING: Yaml configs is currently an experimental feature
language_model:
  num_layers: 24
  hidden_size: 1024
  num_attention_heads: 16
  num_query_groups: 8
  ffn_hidden_size: null
  kv_channels: null
  add_bias_linear: False
  activation_func: swiglu
  num_moe_experts: 8
  moe_aux_loss_coeff: 0  # 1e-2 would be a good start
  recompute_granularity: null
  layernorm_epsilon: 1.e-5
model_parallel:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 1
  virtual_pipeline_model_parallel_size: null
  sequence_parallel: True
  expert_model_parallel_size: 4
  bf16: True
  params_dtype: null
micro_batch_size: 2
global_batch_size: 128
rampup_batch_size: [32, 32, 65324160]
group_query_attention: False
position_embedding_type: rope
vocab_size: null
"""


def test_megatrons_yaml_configuration(tmp_path: Path) -> None:
    path = tmp_path / "gpt_config.yaml"
    path.write_text(MEGATRON_YAML)
    job = read_job(path)
    assert stated(job) == {
        "add_bias_linear": False,
        "bf16": True,
        "expert_model_parallel_size": 4,
        "global_batch_size": 128,
        # TransformerConfig has no such flag: the number of groups decides.
        "group_query_attention": True,
        "hidden_size": 1024,
        "micro_batch_size": 2,
        "moe_aux_loss_coeff": 0.0,
        "num_attention_heads": 16,
        "num_experts": 8,
        "num_layers": 24,
        "num_query_groups": 8,
        "pipeline_model_parallel_size": 1,
        "position_embedding_type": "rope",
        "rampup_batch_size": (32, 32, 65324160),
        "sequence_parallel": True,
        "swiglu": True,
        "tensor_model_parallel_size": 2,
    }
    assert job.extra == {"layernorm_epsilon": 1e-5}
    assert job.framework == "megatron-lm"
    assert (job.ffn_hidden_size, job.moe_ffn_hidden_size, job.kv_channels) == (2688, 2688, 64)


def test_dotted_and_dashed_names() -> None:
    job = parse_mapping(
        {"model_parallel.tensor-model-parallel-size": 2, "a": {"name": "x"}, "b": {"name": "y"}, "runs": [{"lr": 0.1}]}
    )
    assert stated(job) == {"tensor_model_parallel_size": 2}
    assert job.extra == {"name": "x", "b.name": "y", "runs": [{"lr": 0.1}]}


def test_mapping_refusals() -> None:
    assert message(parse_mapping, {"layers": 4, "model": {"num_layers": 8}}) == (
        "num_layers is stated twice: layers=4, model.num_layers=8"
    )
    assert message(parse_mapping, {"num_layers": 4.5}) == "num_layers=4.5: expected a whole number"
    assert message(parse_mapping, {"num_layers": True}) == "num_layers=True: expected a whole number"
    assert message(parse_mapping, {"bf16": 1}) == "bf16=1: expected true or false"
    assert message(parse_mapping, {"moe_expert_capacity_factor": "big"}) == (
        "moe_expert_capacity_factor='big': expected a number"
    )
    assert message(parse_mapping, {"normalization": 3}) == "normalization=3: expected text"
    assert message(parse_mapping, {"dtype": "fp8"}) == "dtype='fp8': must be fp32, fp16 or bf16"


def test_logs_and_scripts_by_content(tmp_path: Path) -> None:
    log, script = tmp_path / "rank0.log", tmp_path / "train.sh"
    log.write_text(BLOCK)
    script.write_text(f"#!/bin/bash\nexport OMP_NUM_THREADS=1\n# --num-layers 7\n{COMMAND}\necho done\n")
    assert read_job(log) == parse_log(BLOCK)
    assert read_job(str(script)) == parse_command_line(COMMAND)


def test_options_hidden_in_variables_are_refused(tmp_path: Path) -> None:
    # As the scripts in Megatron's examples/ are written: read without a shell, most of the job would be missing.
    path = tmp_path / "train.sh"
    path.write_text(
        "MODEL_ARGS=(\n    --num-layers 32\n    --hidden-size 4096\n)\n"
        "PARALLEL_ARGS=(\n    --tensor-model-parallel-size 1\n)\n"
        "torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\\n    ${MODEL_ARGS[@]} \\\n    ${PARALLEL_ARGS[@]}\n"
    )
    advice = (
        "shell variables are not expanded here; give the command as it ran ('ps -ww -ef', or what 'bash -x' prints for "
        "the script)"
    )
    assert message(read_job, path) == f"{path}: the command is followed by '${{MODEL_ARGS[@]}}': {advice}"
    assert message(parse_command_line, "x.py --num-layers 2 --bf16 $MORE") == f"--bf16 is followed by '$MORE': {advice}"
    assert message(parse_command_line, "x.py --lr $LR $MORE") == f"--lr is followed by '$MORE': {advice}"
    assert parse_command_line("x.py --save $OUT --num-layers 2").extra == {"save": "$OUT"}
    one_line = tmp_path / "arguments.txt"
    one_line.write_text("--num-layers 2\n")
    assert read_job(one_line).num_layers == 2
    printed = tmp_path / "bash-x.txt"
    printed.write_text("+ MODEL_ARGS=(--num-layers 3)\n+ torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 3\n")
    assert (read_job(printed).num_layers, read_job(printed).world_size) == (3, 8)


def test_unreadable_files(tmp_path: Path) -> None:
    missing = tmp_path / "no.toml"
    with pytest.raises(InputError) as error:
        read_job(missing)
    assert str(error.value) == (
        f"{missing}: cannot be read (No such file or directory); give a job file (TOML or YAML), the log of rank 0, or "
        f"a text with the launch command"
    )
    with pytest.raises(InputError):
        read_job(tmp_path)
    cases = {
        "a.toml": (b"tp = ", "not valid TOML: Invalid value (at end of document)"),
        "a.yaml": (
            b"a: [1",
            "not valid YAML: expected ',' or ']', but got '<stream end>' (line 1)",
        ),
        "b.yaml": (
            b"- 1",
            "no names in it: expected lines such as num_layers = 32 (TOML) or num_layers: 32 (YAML)",
        ),
        "c.yaml": (
            b"a: \x07",
            (
                "not valid YAML: unacceptable character #x0007: special characters are not allowed in "
                '"<unicode string>", position 3'
            ),
        ),
        "b.toml": (b"a = '\xff'", "not UTF-8 text (invalid start byte at byte 5)"),
        "c.toml": (b"num_layers = 'x'", "num_layers='x': expected a whole number"),
        "d.txt": (
            b"hello\n",
            (
                "no job in it: neither Megatron's argument block ('---- arguments ----', printed on rank 0) nor a command "
                "'script.py --num-layers ... --tensor-model-parallel-size ...'; a job file ends with .toml or .yaml"
            ),
        ),
        "e.txt": (b"x.py --num-layers x\n", "num_layers='x': expected a whole number"),
        "f.log": (
            b"------------------------ arguments ------------------------\n",
            (
                "the argument block that starts on line 1 has no end: the log is cut; give the log of rank 0 up to "
                "'end of arguments', or the launch command"
            ),
        ),
    }
    for name, (content, expected) in cases.items():
        path = tmp_path / name
        path.write_bytes(content)
        assert message(read_job, path) == f"{path}: {expected}"


# -- derived values --------------------------------------------------------------------------------------------------


def test_nothing_is_invented() -> None:
    job = Job()
    unknown = ("world_size", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
    unknown += ("kv_channels", "vocab_size", "padded_vocab_size", "seq_length", "micro_batch_size", "num_microbatches")
    assert [getattr(job, name) for name in (*unknown, "global_batch_size", "rerun_mode")] == [None] * 14


def test_one_micro_batch_where_nobody_says_how_many() -> None:
    # megatron/training/arguments.py, validate_args: global_batch_size = micro_batch_size * data_parallel_size
    job = Job(world_size=8, micro_batch_size=2)
    assert (job.num_microbatches, job.global_batch_size) == (1, 16)


def test_the_command_lines_own_words_in_a_file() -> None:
    assert parse_mapping({"disable_bias_linear": True}).add_bias_linear is False
    assert parse_mapping({"disable_bias_linear": False}).add_bias_linear is True
    assert parse_mapping({"no_align_grad_reduce": True}).align_grad_reduce is False
    assert parse_mapping({"fp8_format": "hybrid"}).fp8 == "hybrid"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("inf"), "num_layers=inf: expected a whole number"),
        (10**9, "num_layers=1000000000: must be at most 100000"),
    ],
)
def test_a_number_of_layers_that_no_model_has(value: object, words: str) -> None:
    assert message(parse_mapping, {"num_layers": value}) == words


def test_require() -> None:
    job = Job(hidden_size=64, num_layers=2)
    hidden, layers = job.require("hidden_size", "num_layers")
    assert (hidden, layers) == (64, 2)
    assert message(job.require, "hidden_size", "seq_length", "micro_batch_size") == (
        "the job does not say seq_length and micro_batch_size: give it in the job file (seq_length = ..., "
        "micro_batch_size = ...), on the command line (--seq-length --micro-batch-size), or use a log with Megatron's "
        "argument block"
    )
    assert message(lambda: job.layout).startswith("the job does not say world_size: ")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"hidden_size": 4096}, {"ffn_hidden_size": 16384}),
        ({"hidden_size": 4096, "swiglu": True}, {"ffn_hidden_size": 10880}),
        ({"hidden_size": 1024, "num_attention_heads": 16}, {"kv_channels": 64, "num_query_groups": 16}),
        ({"num_attention_heads": 16, "num_query_groups": 1}, {"num_query_groups": 16}),
        ({"num_attention_heads": 16, "group_query_attention": True}, {"num_query_groups": 1}),
        ({"num_experts": 0, "ffn_hidden_size": 64}, {"num_experts": None, "moe_ffn_hidden_size": None}),
        ({"num_experts": 4, "ffn_hidden_size": 64}, {"moe_ffn_hidden_size": 64}),
        ({"vocab_size": 50257}, {"padded_vocab_size": 50304}),
        ({"vocab_size": 50257, "tensor_model_parallel_size": 8}, {"padded_vocab_size": 51200}),
        ({"vocab_size": 50257, "padded_vocab_size": 50260}, {"padded_vocab_size": 50260}),
        ({"vocab_size": 1024, "tokenizer_type": "NullTokenizer"}, {"padded_vocab_size": 1152}),
        ({"sequence_parallel": True}, {"sequence_parallel": False, "expert_tensor_parallel_size": 1}),
        ({"pipeline_model_parallel_size": 2}, {"overlap_p2p_comm": False, "align_param_gather": False}),
        (
            {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
            {"virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": True, "align_param_gather": True},
        ),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 1},
            {"virtual_pipeline_model_parallel_size": None},
        ),
        (
            {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 2, "num_layers": 8},
            {"virtual_pipeline_model_parallel_size": 2},
        ),
        ({"megatron_core_version": "0.13.1"}, {"rerun_mode": "disabled"}),
        ({"megatron_core_version": "0.16.1rc0"}, {"rerun_mode": "validate_results"}),
        ({"use_tp_pp_dp_mapping": True}, {"order": "tp-cp-ep-pp-dp"}),
        ({}, {"order": "tp-cp-ep-dp-pp", "activation_dtype": "float32", "main_grad_dtype": "float32"}),
        ({"bf16": True}, {"activation_dtype": "bfloat16", "main_grad_dtype": "float32"}),
        ({"bf16": True, "grad_reduce_in_bf16": True}, {"main_grad_dtype": "bfloat16"}),
        (
            {
                "use_precision_aware_optimizer": True,
                "use_distributed_optimizer": True,
                "bf16": True,
                "main_grads_dtype": "bf16",
            },
            {"main_grad_dtype": "bfloat16", "main_grads_dtype": "bfloat16"},
        ),
        ({"fp16": True}, {"activation_dtype": "float16", "main_grad_dtype": "float16"}),
        ({"fp16": True, "accumulate_allreduce_grads_in_fp32": True}, {"main_grad_dtype": "float32"}),
        ({"params_dtype": "torch.bfloat16"}, {"bf16": True, "params_dtype": "bfloat16"}),
        ({"params_dtype": "torch.float16"}, {"fp16": True, "params_dtype": "float16"}),
    ],
)
def test_derived(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    job = Job(**fields)
    assert {name: getattr(job, name) for name in expected} == expected


def test_the_documents_job_as_megatron_folds_it() -> None:
    sizes: dict[str, Any] = {
        "world_size": 1024,
        "tensor_model_parallel_size": 4,
        "context_parallel_size": 2,
        "pipeline_model_parallel_size": 4,
        "expert_model_parallel_size": 8,
        "num_experts": 64,
        "num_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "seq_length": 8192,
        "micro_batch_size": 2,
        "moe_layer_freq": 4,
        "bf16": True,
        "sequence_parallel": True,
    }
    job = Job(**sizes, num_microbatches=8)
    assert job.data_parallel_size == 32
    assert job.global_batch_size == 512
    assert job.layout.expert_equation == "1024 = ETP 4 x EP 8 x PP 4 x EDP 8"
    assert [sum(map(job.is_moe_layer, job.layers_on_stage(stage))) for stage in range(4)] == [5, 5, 5, 5]
    product = Job(**sizes, num_microbatches=8, grid="product", order="tp-pp-cp-ep-dp")
    assert (product.data_parallel_size, product.layout.dp) == (32, 4)
    assert product.layout.group_of("pp", 0) == (0, 4, 8, 12)
    assert message(parse_mapping, {**sizes, "dp": 4}) == (
        "world_size=1024, but TP 4 x CP 2 x PP 4 x DP 4 = 128; Megatron folds EP into these, it does not multiply it in"
    )
    assert parse_mapping({**sizes, "dp": 32}).world_size == 1024
    assert parse_mapping({**sizes, "dp": 4, "grid": "product"}).layout.dp == 4
    assert message(Job, **{**sizes, "world_size": 1000}) == (
        "world_size 1000 is no multiple of TP 4 x CP 2 x PP 4 = 32 (1000 / 32 = 31.25): DP would not be whole"
    )


# -- layers ----------------------------------------------------------------------------------------------------------


def layers(**fields: Any) -> list[list[int]]:
    job = Job(**fields)
    return [list(job.layers_on_stage(stage)) for stage in range(job.pipeline_model_parallel_size)]


def test_layers_on_stages() -> None:
    assert layers(num_layers=4, pipeline_model_parallel_size=2) == [[0, 1], [2, 3]]
    assert layers(num_layers=8, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2) == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
    ]
    assert layers(num_layers=7, pipeline_model_parallel_size=3, decoder_first_pipeline_num_layers=1) == [
        [0],
        [1, 2, 3],
        [4, 5, 6],
    ]
    assert layers(
        num_layers=6,
        pipeline_model_parallel_size=2,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    ) == [[0, 1, 2], [3, 4, 5]]
    assert layers(
        num_layers=14,
        pipeline_model_parallel_size=2,
        num_virtual_stages_per_pipeline_rank=2,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    ) == [[0, 1, 2, 7, 8, 9, 10], [3, 4, 5, 6, 11, 12, 13]]
    assert layers(num_layers=6, pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et*2|t|t,(t|)*1tL") == [
        [0, 1, 3, 4],
        [2, 5],
    ]
    job = Job(num_layers=8, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    assert job.layers_on_stage(1, chunk=1) == (6, 7)
    assert message(job.layers_on_stage, 2) == "stage 2: the job has stages 0 to 1"
    assert message(job.layers_on_stage, 0, 2) == "chunk 2: the job has chunks 0 to 1"


def test_embedding_group_follows_the_model() -> None:
    def stages(**fields: Any) -> tuple[int, ...] | None:
        return Job(world_size=4, pipeline_model_parallel_size=4, **fields).layout.group_of("embedding", 0)

    assert stages() == (0, 3)
    assert stages(untie_embeddings_and_output_weights=True) == (0,)
    assert stages(untie_embeddings_and_output_weights=True, mtp_num_layers=1) == (0, 3)
    assert stages(mtp_num_layers=1, pipeline_model_parallel_layout="Et|t|tm|L") == (0, 2, 3)


# -- refusals --------------------------------------------------------------------------------------------------------

REFUSED = [
    (
        {"num_attention_heads": 12, "tensor_model_parallel_size": 8},
        "tensor_model_parallel_size=8 does not divide num_attention_heads=12 (12 / 8 = 1.5)",
    ),
    (
        {"num_attention_heads": 12, "hidden_size": 100},
        "num_attention_heads=12 does not divide hidden_size=100 (100 / 12 = 8.33333)",
    ),
    (
        {"num_attention_heads": 12, "group_query_attention": True, "num_query_groups": 8},
        "num_query_groups=8 does not divide num_attention_heads=12 (12 / 8 = 1.5)",
    ),
    (
        {
            "num_attention_heads": 12,
            "group_query_attention": True,
            "num_query_groups": 3,
            "tensor_model_parallel_size": 4,
        },
        "num_query_groups=3 is neither a multiple nor a divisor of tensor_model_parallel_size=4 (3 / 4 = 0.75)",
    ),
    (
        {"padded_vocab_size": 50257, "tensor_model_parallel_size": 2},
        "tensor_model_parallel_size=2 does not divide padded_vocab_size=50257 (50257 / 2 = 25128.5)",
    ),
    (
        {"num_experts": 6, "expert_model_parallel_size": 4},
        "expert_model_parallel_size=4 does not divide num_experts=6 (6 / 4 = 1.5)",
    ),
    ({"expert_model_parallel_size": 4}, "expert_model_parallel_size=4 without num_experts: give num_experts"),
    (
        {"seq_length": 1000, "context_parallel_size": 8},
        "seq_length=1000 is no multiple of 2 x context_parallel_size=8 (1000 / 16 = 62.5)",
    ),
    (
        {
            "seq_length": 12,
            "context_parallel_size": 2,
            "tensor_model_parallel_size": 4,
            "sequence_parallel": True,
        },
        (
            "sequence_parallel: seq_length=12 is no multiple of context_parallel_size=2 x "
            "tensor_model_parallel_size=4 = 8 (12 / 8 = 1.5)"
        ),
    ),
    (
        {"world_size": 8, "micro_batch_size": 2, "global_batch_size": 100},
        "global_batch_size=100 is no multiple of micro_batch_size 2 x DP 8 = 16 (100 / 16 = 6.25)",
    ),
    (
        {"world_size": 8, "micro_batch_size": 2, "global_batch_size": 64, "num_microbatches": 8},
        "num_microbatches=8, but global_batch_size=64 / (micro_batch_size 2 x DP 8 = 16) = 4",
    ),
    (
        {"num_layers": 7, "pipeline_model_parallel_size": 2},
        "pipeline_model_parallel_size=2 does not divide num_layers=7 (7 / 2 = 3.5)",
    ),
    (
        {"num_layers": 8, "pipeline_model_parallel_size": 2, "account_for_loss_in_pipeline_split": True},
        "pipeline_model_parallel_size=2 does not divide num_layers=8 + 1 for the loss (9 / 2 = 4.5)",
    ),
    (
        {"num_layers": 8, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3},
        "virtual_pipeline_model_parallel_size=3 does not divide the 4 layers of a stage (4 / 3 = 1.33333)",
    ),
    (
        {"num_layers": 8, "pipeline_model_parallel_size": 4, "decoder_first_pipeline_num_layers": 1},
        (
            "num_layers=8 - first stage 1 - last stage 0 = 7 layers cannot be spread evenly over 3 middle stages "
            "(pipeline_model_parallel_size=4)"
        ),
    ),
    (
        {
            "num_layers": 8,
            "pipeline_model_parallel_size": 2,
            "decoder_last_pipeline_num_layers": 3,
            "account_for_loss_in_pipeline_split": True,
        },
        (
            "decoder_first_pipeline_num_layers and decoder_last_pipeline_num_layers exclude "
            "account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split"
        ),
    ),
    (
        {"num_layers": 8, "pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 3},
        (
            "num_layers_per_virtual_pipeline_stage=3 x pipeline_model_parallel_size=2 does not divide 8 layers "
            "(8 / 6 = 1.33333)"
        ),
    ),
    (
        {
            "pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
            "virtual_pipeline_model_parallel_size": 4,
        },
        "virtual_pipeline_model_parallel_size=4, but num_virtual_stages_per_pipeline_rank gives 2",
    ),
    (
        {"virtual_pipeline_model_parallel_size": 2},
        "virtual_pipeline_model_parallel_size=2 needs pipeline_model_parallel_size > 1",
    ),
    (
        {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|t|tL"},
        (
            "pipeline_model_parallel_layout='Et|t|tL' has 3 stages, no multiple of pipeline_model_parallel_size=2 "
            "(3 / 2 = 1.5)"
        ),
    ),
    (
        {"num_layers": 4, "pipeline_model_parallel_layout": "EtttL"},
        "pipeline_model_parallel_layout='EtttL' places 3 decoder layers, but num_layers=4",
    ),
    (
        {"pipeline_model_parallel_layout": "Etx L"},
        "pipeline_model_parallel_layout='Etx L' holds ' ' 'x': E, t, m, L, '|', '(...)*n'",
    ),
    (
        {"num_layers": 3, "moe_layer_freq": (1, 0)},
        "moe_layer_freq lists 2 layers, but num_layers=3: one entry for each layer, or one number",
    ),
    ({"num_layers": 3, "cp_comm_type": ("p2p", "a2a")}, "cp_comm_type lists 2 layers, but num_layers=3: one or all"),
    ({"cp_comm_type": ("ring",)}, "cp_comm_type='ring': must be one of p2p, all_gather, a2a, a2a+p2p"),
    (
        {"moe_token_dispatcher_type": "alltoal"},
        "moe_token_dispatcher_type='alltoal': must be one of allgather, alltoall, flex",
    ),
    ({"hidden_size": 0}, "hidden_size=0: must be at least 1"),
    ({"bf16": True, "fp16": True}, "bf16=True and fp16=True: at most one of them"),
    ({"params_dtype": "float16", "bf16": True}, "params_dtype=float16 with bf16=True, fp16=False: these give bfloat16"),
    (
        {"use_tp_pp_dp_mapping": True, "order": "tp-cp-ep-dp-pp"},
        "use_tp_pp_dp_mapping means order='tp-cp-ep-pp-dp', not 'tp-cp-ep-dp-pp'",
    ),
    (
        {"recompute_granularity": "full"},
        "recompute_granularity='full' without recompute_method: give 'uniform' or 'block'",
    ),
    (
        {"recompute_granularity": "selective", "recompute_method": "block", "framework": "megatron-lm"},
        "recompute_method='block' has no meaning with recompute_granularity='selective'",
    ),
    (
        {"tp_comm_overlap": True, "sequence_parallel": True, "framework": "megatron-lm"},
        "tp_comm_overlap=True needs sequence_parallel=True and tensor_model_parallel_size > 1",
    ),
    (
        {"overlap_param_gather": True, "framework": "megatron-lm"},
        "overlap_param_gather=True needs use_distributed_optimizer or use_megatron_fsdp",
    ),
]


@pytest.mark.parametrize(("fields", "expected"), REFUSED)
def test_refused(fields: dict[str, Any], expected: str) -> None:
    assert message(Job, **fields) == expected


# -- stored and compared ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "job",
    [
        Job(),
        parse_log(BLOCK),
        parse_command_line(COMMAND),
        parse_mapping(
            {"moe_aux_loss_coeff": [0.1, 0.2], "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}
        ),
    ],
    ids=["empty", "log", "command", "lists"],
)
def test_round_trip(job: Job) -> None:
    again = Job.from_json(job.to_json())
    assert again == job
    assert hash(again) == hash(job)
    assert again.to_json() == job.to_json()


def test_json_of_a_newer_program_keeps_its_fields() -> None:
    job = Job.from_json('{"num_layers": 2, "quantum": 1, "given": ["num_layers"], "extra": {"lr": 0.1}}')
    assert job.num_layers == 2
    assert job.given == {"num_layers"}
    assert job.extra == {"lr": 0.1, "quantum": 1}


def test_stored_json_refusals() -> None:
    assert message(Job.from_json, "{") == (
        "a stored job is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    )
    assert message(Job.from_json, "[]") == "a stored job is a JSON object with an object 'extra'"


def test_conflicts() -> None:
    captured = parse_log(BLOCK)
    intended = parse_mapping(
        {"tp": 4, "cp": 1, "hidden": 1024, "dtype": "bf16", "vocab": 50257, "cp_comm_type": "a2a", "heads": 16}
    )
    assert conflicts(captured, intended) == [
        Conflict("context_parallel_size", 1, 2),
        Conflict("cp_comm_type", ["a2a"], ["p2p"]),
        Conflict("padded_vocab_size", 50688, 50432),
        Conflict("tensor_model_parallel_size", 4, 2),
    ]
    assert conflicts(captured, captured) == []
    assert conflicts(captured, Job(tensor_model_parallel_size=8)) == [], "nothing there was stated by a source"


def test_conflicts_see_what_other_fields_fix() -> None:
    captured = parse_log(BLOCK)
    intended = parse_mapping({"microbatches": 8, "mbs": 2, "world": 16, "tp": 2, "cp": 2, "pp": 2})
    assert conflicts(captured, intended) == [
        Conflict("global_batch_size", 32, 64),
        Conflict("num_microbatches", 8, 16),
    ]
    chunks = parse_mapping({"num_layers": 8, "pp": 2, "num_layers_per_virtual_pipeline_stage": 2})
    assert conflicts(captured, chunks) == [Conflict("virtual_pipeline_model_parallel_size", 2, None)]
    switched_off = parse_mapping({"recompute_granularity": "selective", "num_experts": 16})
    assert conflicts(captured, switched_off) == [
        Conflict("num_experts", 16, 8),
        Conflict("recompute_granularity", "selective", None),
    ]


# -- Megatron itself -------------------------------------------------------------------------------------------------

# Where the command line's default is not the dataclass's (megatron/training/arguments.py says which).
OTHER_DEFAULTS: dict[str, tuple[Any, Any]] = {
    "hierarchical_context_parallel_sizes": (None, ()),
    "overlap_p2p_comm": (False, True),
    "align_param_gather": (False, True),
    "num_layers": (0, None),
    "hidden_size": (0, None),
    "num_attention_heads": (0, None),
    "recompute_modules": (None, ("core_attn",)),
    "cp_comm_type": (None, ("p2p",)),
    "gradient_accumulation_fusion": (False, True),
    "batch_p2p_comm": (True, None),
    "cuda_graph_scope": ("full", ()),
    "offload_modules": ([], ()),
    "moe_deepep_num_sms": (20, None),
    "moe_hybridep_num_sms": (16, None),
}


@pytest.mark.megatron
def test_defaults_are_megatrons() -> None:
    transformer = pytest.importorskip("megatron.core.transformer")
    distributed = pytest.importorskip("megatron.core.distributed")
    ours = {one.name: one.default for one in dataclasses.fields(Job)}
    compared = 0
    for config in (transformer.TransformerConfig, distributed.DistributedDataParallelConfig):
        for one in dataclasses.fields(config):
            if one.name in ours and one.name != "params_dtype":
                default: Any = one.default
                if one.default_factory is not dataclasses.MISSING:
                    default = one.default_factory()
                pair = OTHER_DEFAULTS.get(one.name, (default, default))
                assert (default, ours[one.name]) == pair, one.name
                compared += 1
    assert compared > 110


@pytest.mark.megatron
def test_layers_are_where_megatron_puts_them() -> None:
    block = pytest.importorskip("megatron.core.transformer.transformer_block")
    layer = pytest.importorskip("megatron.core.transformer.transformer_layer")
    generator = random.Random(3)
    compared = 0
    while compared < 150:
        pp = generator.choice([1, 2, 3, 4])
        vpp = generator.choice([None, None, 2, 3]) if pp > 1 else None
        embedding, loss = generator.random() < 0.3, generator.random() < 0.3
        first, last = (generator.choice([None, 1, 2, 4]) for _ in range(2))
        if embedding or loss or generator.random() < 0.5 or pp == 1:
            first = last = None
        number = generator.randrange(1, 40)
        fields: dict[str, Any] = {
            "num_layers": number,
            "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": vpp,
            "account_for_embedding_in_pipeline_split": embedding,
            "account_for_loss_in_pipeline_split": loss,
        }
        try:
            job = Job(**fields, decoder_first_pipeline_num_layers=first, decoder_last_pipeline_num_layers=last)
        except JobError:
            continue
        config = SimpleNamespace(
            **fields,
            pipeline_model_parallel_layout=None,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
        )
        for stage in range(pp):
            for chunk in range(vpp or 1):
                where: dict[str, Any] = {"vp_stage": chunk if vpp else None, "pp_rank": stage}
                count = block.get_num_layers_to_build(config, **where)
                offset = layer.get_transformer_layer_offset(config, **where)
                ours = job.layers_on_stage(stage, chunk)
                assert ours == tuple(range(offset, offset + count)), (fields, first, last, where)
        compared += 1


@pytest.mark.megatron
@pytest.mark.parametrize("text", ["E|(t|)*6L", "Et*3|(tt|)*2,m|L", "E(t|tt|)*2tt|mL", "Etttt|tL"])
def test_pipeline_layouts_are_read_as_megatron_reads_them(text: str) -> None:
    module = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    enums = pytest.importorskip("megatron.core.transformer.enums")
    stages = module.PipelineParallelLayerLayout.get_num_stages_from_str(text)
    for pp in (size for size in range(1, stages + 1) if stages % size == 0):
        theirs = module.PipelineParallelLayerLayout(text, pp).layout
        counts = [[chunk.count(enums.LayerType.decoder) for chunk in row] for row in theirs]
        if pp == 1 and stages > 1:
            continue
        job = Job(
            num_layers=sum(map(sum, counts)),
            pipeline_model_parallel_size=pp,
            pipeline_model_parallel_layout=text,
            mtp_num_layers=text.count("m") or None,
        )
        ours = [[len(job.layers_on_stage(stage, chunk)) for chunk in range(stages // pp)] for stage in range(pp)]
        assert ours == counts


def test_names_that_look_like_a_misspelt_field() -> None:
    job = parse_mapping(
        {"num_layer": 4, "hidden_sizes": 64, "sequence_paralel": True, "lr": 1e-4, "encoder_seq_length": 32, "tp": 1}
    )
    assert job.likely_typos() == [
        ("num_layer", "num_layers"),
        ("hidden_sizes", "hidden_size"),
        ("sequence_paralel", "sequence_parallel"),
    ]
