# ruff: noqa: E501 (screens are as wide as they are)
"""traceanalyzer expect: calls, sums, explanation, both rule sets, memory, schedule, formats, refusals, and a big world."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import Result

RunCli = Callable[..., Result]

# Shard 32/2 * 2 * 64 elements = 4 KiB bf16, whole 8 KiB; a stage: one layer; M 4.
JOB = """\
megatron_core_version = "0.16.1"
world_size = 4
tensor_model_parallel_size = 2
sequence_parallel = true
pipeline_model_parallel_size = 2
micro_batch_size = 2
num_microbatches = 4
seq_length = 32
num_layers = 2
hidden_size = 64
num_attention_heads = 8
add_bias_linear = false
normalization = "RMSNorm"
position_embedding_type = "rope"
padded_vocab_size = 128
bf16 = true
"""

# Elements of a rank: embedding 128/2*64, QKV 64*192/2, proj 64*64/2, fc1 and fc2 64*256/2 each, norms 2*64: 28,800.
SCREEN = """\
job     2 layers, hidden 64, seq 32, micro-batch 2, 4 micro-batches, TP2 x PP2 + SP, bf16
layout  4 = TP 2 x CP 1 x PP 2 x DP 1
rules   megatron 0.16

 #  role       phase      operation       what                           type     each  ranks  calls  off-rank  avoidable
 1  tp         forward    reduce_scatter  embedding                      bf16    8 KiB      2      4    16 KiB
 2  tp         forward    all_gather      attention.qkv                  bf16    8 KiB      2      4    16 KiB
 3  tp         forward    reduce_scatter  attention.proj                 bf16    8 KiB      2      4    16 KiB
 4  tp         forward    all_gather      mlp.fc1                        bf16    8 KiB      2      4    16 KiB
 5  tp         forward    reduce_scatter  mlp.fc2                        bf16    8 KiB      2      4    16 KiB
 6  tp         backward   all_gather      mlp.fc2                        bf16    8 KiB      2      4    16 KiB
 7  tp         backward   all_gather      mlp.fc1 input re-gather        bf16    8 KiB      2      4    16 KiB     16 KiB
 8  tp         backward   reduce_scatter  mlp.fc1                        bf16    8 KiB      2      4    16 KiB
 9  tp         backward   all_gather      attention.proj                 bf16    8 KiB      2      4    16 KiB
10  tp         backward   all_gather      attention.qkv input re-gather  bf16    8 KiB      2      4    16 KiB     16 KiB
11  tp         backward   reduce_scatter  attention.qkv                  bf16    8 KiB      2      4    16 KiB
12  tp         backward   all_gather      embedding                      bf16    8 KiB      2      4    16 KiB
13  tp         other      all_reduce      norm gradients                 f32     512 B      2      1     512 B      256 B
14  dp_cp      other      all_reduce      gradients                      f32   112 KiB      1      1       0 B
15  mp         optimizer  all_reduce      gradient norm                  f32       4 B      4      1       6 B
16  pp         forward    send            activations (next)             bf16    4 KiB      2      4    16 KiB
17  pp         backward   recv            gradients (next)               bf16    4 KiB      2      4  received
18  embedding  other      all_reduce      word embedding                 f32    16 KiB      2      1    16 KiB      8 KiB

avoidable  sp_input_regather  64 KiB off-rank over these ranks: no setting removes it
avoidable  fp32_reduction  16.5 KiB off-rank over these ranks: --grad-reduce-in-bf16 removes it

2 ranks: 112 calls a step, 449 KiB off-rank, 80.5 KiB of it avoidable
"""

SUMS = """\
         role       calls  payload  off-rank  received  avoidable  c10d
rank 3   tp            65  420 KiB   212 KiB             48.4 KiB
rank 3   dp_cp          1  113 KiB       0 B
rank 3   mp             1      4 B       6 B
rank 3   pp             4   16 KiB    16 KiB    16 KiB
rank 3   embedding      1   16 KiB    16 KiB                8 KiB
rank 3   all           72  565 KiB   244 KiB    16 KiB   56.4 KiB
"""

EXPLANATION = """\
row 2: tp / forward / all_gather   attention.qkv   4 calls a step on stages 0-1   rule tensor: attention.qkv, input
  in        S/(CP*TP) * B * H = 32/(1*2) * 2 * 64 = 2,048 elements = 4 KiB bf16
  out       S/CP * B * H = 32/1 * 2 * 64 = 4,096 elements = 8 KiB bf16
  off-rank  (N-1)/N * out = 1/2 * out = 4 KiB
  calls     layers * M = 1 * 4 = 4 per step
  source    run: megatron-core 0.16.1 recorded"""

SCHEDULE = """\
1f1b: 2 stages, 4 micro-batches

                           send      recv      send  recv
stage  warm-up  in flight  next  previous  previous  next  order
    0        1          2     4         0         0     4  F0 F1 B0 F2 B1 F3 B2 B3
    1        0          1     0         4         4     0  F0 B0 F1 B1 F2 B2 F3 B3

bubble 20 % of the pipeline's time, 25 % of ideal time, stages taken as equal
"""


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch, run_cli: RunCli) -> None:
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(JOB, encoding="utf-8")
    return Path("job.toml")


def _text(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.output


def test_screen_of_a_stage(run_cli: RunCli, job_file: Path) -> None:
    assert _text(run_cli("expect", job_file, "--stage", "0")) == SCREEN


def test_every_stage_is_the_default(run_cli: RunCli, job_file: Path) -> None:
    shown = _text(run_cli("expect", job_file))
    assert shown == _text(run_cli("expect", job_file, "--all"))
    assert " attention.qkv                  stages 0-1  " in shown
    assert shown.endswith("4 ranks: 256 calls a step, 937 KiB off-rank, 193 KiB of it avoidable\n")


def test_sums(run_cli: RunCli, job_file: Path) -> None:
    words = [line.split() for line in SUMS.splitlines()]
    shown = _text(run_cli("expect", job_file, "--rank", "3", "--by", "role"))
    lines = [line.split() for line in shown.splitlines()]
    assert [line for line in lines if line[:2] == ["rank", "3"]] == words[1:]
    assert words[0] in lines


def test_explanation(run_cli: RunCli, job_file: Path) -> None:
    assert EXPLANATION in _text(run_cli("expect", job_file, "--explain", "2"))


def test_beside_the_document(run_cli: RunCli, job_file: Path) -> None:
    shown = _text(run_cli("expect", job_file, "--stage", "0", "--against", "document"))
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "tp forward attention.qkv stage 0 4 4 16 KiB 16 KiB same" in lines
    at = lines.index("tp backward mlp.fc1 input re-gather stage 0 4 0 16 KiB 0 B only megatron")
    assert lines[at + 1].startswith("E34: real Megatron makes these calls")


@pytest.mark.parametrize(
    "options", [(), ("--by", "role"), ("--against", "document"), ("--show", "schedule"), ("--show", "memory")]
)
def test_nothing_is_cut_on_a_narrow_terminal(
    run_cli: RunCli, job_file: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = _text(run_cli("expect", job_file, *options))
    assert "\u2026" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_schedule(run_cli: RunCli, job_file: Path) -> None:
    assert _text(run_cli("expect", job_file, "--show", "schedule")).endswith(SCHEDULE)


def test_memory(run_cli: RunCli, job_file: Path) -> None:
    """28,800 elements on stage 0, 28,864 with the final norm: bf16 weights, float32 gradients and Adam's three tensors."""
    shown = _text(run_cli("expect", job_file, "--show", "memory"))
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "parameters 56.2 KiB 56.4 KiB" in lines
    assert "gradients 112 KiB 113 KiB" in lines
    assert "optimizer 338 KiB 338 KiB" in lines
    document = json.loads(_text(run_cli("expect", job_file, "--show", "memory", "--format", "json")))
    assert document["schema"] == "traceanalyzer.memory/1"
    assert [one["totals"]["parameters"] for one in document["stages"]] == [57_600, 57_728]
    assert [one["totals"]["optimizer"] for one in document["stages"]] == [345_600, 346_368]


def test_json(run_cli: RunCli, job_file: Path) -> None:
    document = json.loads(_text(run_cli("expect", job_file, "--rank", "1", "--format", "json")))
    assert document["schema"] == "traceanalyzer.expect/1"
    assert document["job"]["tensor_model_parallel_size"] == 2
    assert document["parts"] == [{"kind": "rank", "number": 1, "ranks": 1}]
    call = next(one for one in document["calls"] if one["component"] == "mlp.fc1 input re-gather")
    evidence = call.pop("evidence")
    assert evidence["kind"] == "run"
    assert evidence["where"]
    assert call == {
        "rank": 1,
        "role": "tp",
        "axis": "TP",
        "op": "all_gather",
        "phase": "backward",
        "component": "mlp.fc1 input re-gather",
        "dtype": "bfloat16",
        "group_size": 2,
        "in_elems": 2048,
        "out_elems": 4096,
        "calls": 4,
        "payload_bytes": 8192,
        "off_rank_bytes": 4096,
        "avoidable_bytes": 4096,
        "avoidable": {"code": "sp_input_regather", "setting": ""},
        "outside_c10d": False,
        "transport": None,
        "peer": None,
        "varies": None,
        "rule": "tensor: mlp.fc1, input again",
        "versions": None,
    }
    assert document["total"]["calls"] == 56
    assert document["totals"]["role"]["pp"] == {
        "calls": 4,
        "receives": 4,
        "payload_bytes": 16384,
        "off_rank_bytes": 16384,
        "received_bytes": 16384,
        "avoidable_bytes": 0,
        "outside_c10d_bytes": 0,
    }


def test_json_beside_the_document(run_cli: RunCli, job_file: Path) -> None:
    document = json.loads(_text(run_cli("expect", job_file, "--against", "document", "--format", "json")))
    verdicts = {(row["stage"], row["component"]): row["verdict"] for row in document["against"] if row["role"] == "tp"}
    assert verdicts[0, "attention.qkv"] == "same"
    assert verdicts[1, "output layer"] == "only megatron"


def test_markdown_and_file(run_cli: RunCli, job_file: Path, tmp_path: Path) -> None:
    assert _text(run_cli("expect", job_file, "--stage", "0", "--format", "markdown", "-o", "out.md")) == ""
    lines = (tmp_path / "out.md").read_text(encoding="utf-8").splitlines()
    assert (
        "| 7 | stage 0 | tp | backward | all_gather | mlp.fc1 input re-gather | bf16 | 8 KiB | 2 | 4 | 16 KiB | 16 KiB sp_input_regather |"
        in lines
    )


def test_a_job_without_a_release(run_cli: RunCli, tmp_path: Path) -> None:
    text = JOB.replace('megatron_core_version = "0.16.1"\n', "")
    (tmp_path / "job.toml").write_text(text, encoding="utf-8")
    shown = _text(run_cli("expect", "job.toml", "--stage", "0"))
    assert "the job does not say its release, others differ: <=0.7" in shown
    assert "release <=0.7" in shown


def test_what_has_no_rule_is_said(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB + 'fp4 = "e2m1"\n', encoding="utf-8")
    assert "not modelled  fp4" in _text(run_cli("expect", "job.toml", "--stage", "0"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rank", "4"), "rank 4 is outside the world of 4"),
        (("--stage", "2"), "stage 2: the job has stages 0 to 1"),
        (("--rank", "0", "--stage", "0"), "exclude each other"),
        (("--all", "--stage", "0"), "exclude each other"),
        (("--explain", "99"), "there is no row 99"),
        (("--explain", "1", "--format", "json"), "--explain goes with --format table"),
        (("--against", "document", "--rules", "document"), "leave --rules out"),
        (("--against", "document", "--by", "role"), "--against goes without"),
        (("--show", "memory", "--by", "role"), "--show memory goes with"),
        (("-o", "job.toml"), "read by the same command"),
    ],
)
def test_refusals(run_cli: RunCli, job_file: Path, options: tuple[str, ...], words: str) -> None:
    result = run_cli("expect", job_file, *options)
    assert result.exit_code == 2
    assert words in " ".join(click.unstyle(result.output).replace("│", " ").split())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("num_attention_heads = 9", "num_attention_heads=9"),
        ("num_experts = 6\nexpert_model_parallel_size = 4\nworld_size = 8", "expert_model_parallel_size=4"),
        ("seq_length = 33", "seq_length=33"),
    ],
)
def test_impossible_jobs(run_cli: RunCli, tmp_path: Path, change: str, words: str) -> None:
    names = {line.split(" = ")[0] for line in change.splitlines()}
    kept = [line for line in JOB.splitlines() if line.split(" = ")[0] not in names]
    (tmp_path / "job.toml").write_text("\n".join([*kept, change, ""]), encoding="utf-8")
    result = run_cli("expect", "job.toml")
    assert result.exit_code == 2
    assert words in result.output


def test_a_job_that_lacks_a_size(run_cli: RunCli, tmp_path: Path) -> None:
    text = JOB.replace("padded_vocab_size = 128\n", "")
    (tmp_path / "job.toml").write_text(text, encoding="utf-8")
    result = run_cli("expect", "job.toml", "--show", "memory")
    assert result.exit_code == 2
    assert "the job does not say padded_vocab_size" in result.output


def test_a_world_of_16384_ranks_is_answered_by_its_stages(run_cli: RunCli, tmp_path: Path) -> None:
    """Whatever rank is asked for: no list of ranks is made; the benchmark measures the time."""
    big = JOB.replace("world_size = 4", "world_size = 16384").replace(
        "pipeline_model_parallel_size = 2", "pipeline_model_parallel_size = 8"
    )
    (tmp_path / "job.toml").write_text(big.replace("num_layers = 2", "num_layers = 64"), encoding="utf-8")
    document = json.loads(_text(run_cli("expect", "job.toml", "--format", "json")))
    assert [part["ranks"] for part in document["parts"]] == [2048] * 8
    last = json.loads(_text(run_cli("expect", "job.toml", "--rank", "16383", "--format", "json")))
    seventh = [one for one in document["calls"] if one["stage"] == 7]
    assert [one["calls"] for one in last["calls"]] == [one["calls"] for one in seventh]
