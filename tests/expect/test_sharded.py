"""Megatron-FSDP and torch FSDP2: both recordings, runs of real code with other options, closed forms, and each switch."""

from __future__ import annotations

import csv
import gzip
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from traceanalyzer import axes, expect, traffic
from traceanalyzer.expect import sharded, versions
from traceanalyzer.expect.model import ExpectedCall
from traceanalyzer.expect.place import Place
from traceanalyzer.expect.sharded import Tensor
from traceanalyzer.job import Job

ROLES = ("dp_cp", "edp", "intra_dp_cp", "inter_dist_opt", "dist_opt", "mp")

Key = tuple[str, str, str, int, int, str]


def _key(role: str, op: str, dtype: str, sent: int, received: int, phase: str) -> Key:
    return role, op, dtype, sent, received, phase


def _recorded(rows: list[dict[str, str]], rank: int) -> Counter[Key]:
    """Calls of a recorded rank. What the recorder saw outside autograd is forward work, or the optimizer's."""
    found: Counter[Key] = Counter()
    for row in rows:
        role = axes.role_of_description(row["group_desc"])
        if int(row["rank"]) != rank or role not in ROLES:
            continue
        op = traffic.normalise_op(row["op"])
        assert op is not None
        phase = "optimizer" if row["phase"].endswith("optimizer") else row["direction"].removesuffix("/other")
        found[role, op, row["dtype"], int(row["nelems_in"]), int(row["nelems_out"]), phase] += int(row["count"])
    return found


def _expected(job: Job, rank: int = 0, *, first_step: bool = False, chapter: str = "") -> Counter[Key]:
    found: Counter[Key] = Counter()
    for row in expect.expected(job, rank, first_step=first_step).calls:
        if row.role in ROLES and row.rule.startswith(chapter):
            found[row.role, row.op, row.dtype, row.in_elems, row.out_elems, row.phase] += row.calls
    return found


def _as_built(recording: Any) -> Job:
    """The job with the layers that the recording's GPTModel has: megatron-core's own, not TransformerEngine's."""
    job: Job = recording.job
    return replace(job, transformer_impl="local")


def test_recordings(recording: Any) -> None:
    """Both recordings, with the gradient norm and whatever else these groups carry."""
    if "fsdp" not in recording.name:
        assert _expected(recording.job, chapter="sharded: ") == Counter()
        return
    for rank in recording.ranks:
        assert _expected(_as_built(recording), rank) == _recorded(recording.rows, rank)


def test_first_step_of_the_recordings(recording: Any) -> None:
    if "fsdp" not in recording.name:
        return
    with gzip.open(recording.path, "rt", newline="") as text:
        rows = [row for row in csv.DictReader(text) if row["phase"].startswith("step0:")]
    for rank in recording.ranks:
        assert _expected(_as_built(recording), rank, first_step=True) == _recorded(rows, rank)


# -- runs ------------------------------------------------------------------------------------------------------------


def _job(**options: Any) -> Job:
    """Hidden 64, 4 heads of 16, MLP 256 gated, sequence 32 and vocabulary 256, tied; 2 layers and micro-batches."""
    fields: dict[str, Any] = {
        "megatron_core_version": "0.16.1",
        "world_size": 2,
        "micro_batch_size": 2,
        "num_microbatches": 2,
        "seq_length": 32,
        "max_position_embeddings": 32,
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 256,
        "num_attention_heads": 4,
        "swiglu": True,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "padded_vocab_size": 256,
        "bf16": True,
        "use_distributed_optimizer": True,
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": "optim_grads_params",
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "transformer_impl": "local",
    }
    return Job(**{**fields, **options})


def _torch(**options: Any) -> Job:
    off = {
        "use_distributed_optimizer": False,
        "use_megatron_fsdp": False,
        "data_parallel_sharding_strategy": "no_shard",
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
    }
    return _job(**{**off, "use_torch_fsdp2": True, "untie_embeddings_and_output_weights": True, **options})


def _gathers(role: str, elements: int, ranks: int, dtype: str = "bfloat16", **phases: int) -> Counter[Key]:
    return Counter({(role, "all_gather", dtype, elements // ranks, elements, phase): n for phase, n in phases.items()})


def _scatters(role: str, elements: int, ranks: int, calls: int, dtype: str = "float32") -> Counter[Key]:
    return Counter({(role, "reduce_scatter", dtype, elements, elements // ranks, "backward"): calls})


def _small(**options: Any) -> Job:
    """A job that may fetch one unit ahead only: 70,000 elements, a layer has 66,048."""
    return _job(extra={"suggested_communication_unit_size": 140_000}, **options)


_MOE = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 256, "moe_router_load_balancing_type": "none"}
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

# What real megatron-core sent in its second step, by gloo processes; 0.16.1 unless the job says another release.
RUNS: dict[str, tuple[Job, Counter[Key]]] = {
    "no_shard": (
        _job(data_parallel_sharding_strategy="no_shard"),
        Counter({("dp_cp", "all_reduce", "float32", 147_776, 147_776, "backward"): 1}),
    ),
    "optim": (
        _job(data_parallel_sharding_strategy="optim"),
        _scatters("dp_cp", 147_968, 2, 1) + _gathers("dp_cp", 147_968, 2, optimizer=1),
    ),
    "optim_grads": (
        _job(data_parallel_sharding_strategy="optim_grads"),
        _scatters("dp_cp", 147_968, 2, 2) + _gathers("dp_cp", 147_968, 2, optimizer=1),
    ),
    "optim_grads, buckets of 40,000": (
        _job(data_parallel_sharding_strategy="optim_grads", ddp_bucket_size=40_000),
        sum(
            (_scatters("dp_cp", n, 2, 2) + _gathers("dp_cp", n, 2, optimizer=1) for n in (16_896, 65_664, 66_048)),
            Counter(),
        ),
    ),
    "three ranks, MLP of 200": (
        _job(world_size=3, ffn_hidden_size=200, untie_embeddings_and_output_weights=True),
        _scatters("dp_cp", 57_600, 3, 4)
        + _scatters("dp_cp", 32_832, 3, 2)
        + _gathers("dp_cp", 57_600, 3, forward=6, optimizer=2)
        + _gathers("dp_cp", 32_832, 3, optimizer=1),
    ),
    "three ranks, LayerNorm and learned positions": (
        _job(world_size=3, normalization="LayerNorm", position_embedding_type="learned_absolute"),
        _scatters("dp_cp", 66_048, 3, 4)
        + _scatters("dp_cp", 18_624, 3, 2)
        + _gathers("dp_cp", 66_048, 3, forward=6, optimizer=2)
        + _gathers("dp_cp", 18_624, 3, optimizer=1),
    ),
    "biases and query norms": (
        _job(
            world_size=3,
            num_microbatches=3,
            hidden_size=80,
            ffn_hidden_size=320,
            group_query_attention=True,
            num_query_groups=2,
            normalization="LayerNorm",
            qk_layernorm=True,
            add_bias_linear=True,
        ),
        _scatters("dp_cp", 97_920, 3, 6)
        + _scatters("dp_cp", 20_640, 3, 3)
        + _gathers("dp_cp", 97_920, 3, forward=10, optimizer=2)
        + _gathers("dp_cp", 20_640, 3, optimizer=1),
    ),
    "bf16 gradients": (
        _job(grad_reduce_in_bf16=True),
        _scatters("dp_cp", 66_048, 2, 4, "bfloat16")
        + _scatters("dp_cp", 16_512, 2, 2, "bfloat16")
        + _gathers("dp_cp", 66_048, 2, forward=6, optimizer=2)
        + _gathers("dp_cp", 16_512, 2, optimizer=1),
    ),
    "tensor parallel": (
        _job(world_size=4, tensor_model_parallel_size=2, sequence_parallel=True),
        _scatters("dp_cp", 33_024, 2, 4)
        + _scatters("dp_cp", 8_320, 2, 2)
        + _gathers("dp_cp", 33_024, 2, forward=6, optimizer=2)
        + _gathers("dp_cp", 8_320, 2, optimizer=1),
    ),
    "experts over two ranks": (
        _job(world_size=4, expert_model_parallel_size=2, **_MOE),
        _scatters("dp_cp", 16_896, 4, 4)
        + _scatters("dp_cp", 16_640, 4, 2)
        + _scatters("edp", 98_304, 2, 4)
        + _gathers("dp_cp", 16_896, 4, forward=6, optimizer=2)
        + _gathers("dp_cp", 16_640, 4, optimizer=1)
        + _gathers("edp", 98_304, 2, forward=6, optimizer=2),
    ),
    "experts, not over ranks": (
        _job(**_MOE),
        _scatters("dp_cp", 16_768, 2, 4)
        + _scatters("dp_cp", 16_512, 2, 2)
        + _scatters("edp", 196_608, 2, 4)
        + _gathers("dp_cp", 16_768, 2, forward=6, optimizer=2)
        + _gathers("dp_cp", 16_512, 2, optimizer=1)
        + _gathers("edp", 196_608, 2, forward=6, optimizer=2),
    ),
    "shared expert in every second layer": (
        _job(
            world_size=3,
            num_microbatches=3,
            ffn_hidden_size=152,
            **{**_MOE, "num_experts": 3, "moe_ffn_hidden_size": 152},
            moe_layer_freq=(0, 1),
            moe_shared_expert_intermediate_size=200,
        ),
        _scatters("dp_cp", 57_600, 3, 3)
        + _scatters("dp_cp", 47_424, 3, 3)
        + _scatters("dp_cp", 16_512, 3, 3)
        + _scatters("edp", 87_552, 3, 3)
        + _gathers("dp_cp", 57_600, 3, forward=5, optimizer=1)
        + _gathers("dp_cp", 47_424, 3, forward=5, optimizer=1)
        + _gathers("dp_cp", 16_512, 3, optimizer=1)
        + _gathers("edp", 87_552, 3, forward=5, optimizer=1),
    ),
    "two instances": (
        _job(world_size=4, num_distributed_optimizer_instances=2),
        _scatters("intra_dp_cp", 66_048, 2, 4)
        + _scatters("intra_dp_cp", 16_512, 2, 2)
        + _gathers("intra_dp_cp", 66_048, 2, forward=6, optimizer=2)
        + _gathers("intra_dp_cp", 16_512, 2, optimizer=1)
        + Counter(
            {
                ("inter_dist_opt", "all_reduce", "float32", 33_024, 33_024, "backward"): 2,
                ("inter_dist_opt", "all_reduce", "float32", 8_256, 8_256, "backward"): 1,
            }
        ),
    ),
    "two instances, sharded over both": (
        _job(world_size=4, num_distributed_optimizer_instances=2, outer_dp_sharding_strategy="optim"),
        _scatters("intra_dp_cp", 66_560, 2, 4)
        + _scatters("intra_dp_cp", 16_640, 2, 2)
        + _scatters("inter_dist_opt", 33_280, 2, 2)
        + _scatters("inter_dist_opt", 8_320, 2, 1)
        + _gathers("intra_dp_cp", 66_560, 2, forward=6, optimizer=2)
        + _gathers("intra_dp_cp", 16_640, 2, optimizer=1)
        + _gathers("inter_dist_opt", 33_280, 2, forward=2, optimizer=2)
        + _gathers("inter_dist_opt", 8_320, 2, optimizer=1),
    ),
    "recomputed": (
        _job(**_FULL),
        _scatters("dp_cp", 66_048, 2, 4)
        + _scatters("dp_cp", 16_512, 2, 2)
        + _gathers("dp_cp", 66_048, 2, forward=6, optimizer=2)
        + _gathers("dp_cp", 16_512, 2, optimizer=1),
    ),
    "one unit ahead": (
        _small(num_layers=4),
        _scatters("dp_cp", 66_048, 2, 8)
        + _scatters("dp_cp", 16_512, 2, 2)
        + _gathers("dp_cp", 66_048, 2, forward=10, backward=8, optimizer=2)
        + _gathers("dp_cp", 16_512, 2, optimizer=1),
    ),
    "one unit ahead, recomputed": (
        _small(num_layers=4, **_FULL),
        _scatters("dp_cp", 66_048, 2, 8)
        + _scatters("dp_cp", 16_512, 2, 2)
        + _gathers("dp_cp", 66_048, 2, forward=10, backward=6, recompute=2, optimizer=2)
        + _gathers("dp_cp", 16_512, 2, optimizer=1),
    ),
    "one unit ahead, two layers in a checkpoint": (
        _small(num_layers=4, num_microbatches=3, **{**_FULL, "recompute_num_layers": 2}),
        _scatters("dp_cp", 66_048, 2, 12)
        + _scatters("dp_cp", 16_512, 2, 3)
        + _gathers("dp_cp", 66_048, 2, forward=16, backward=9, recompute=6, optimizer=2)
        + _gathers("dp_cp", 16_512, 2, optimizer=1),
    ),
    "one unit ahead, two of five layers recomputed": (
        _small(num_layers=5, num_microbatches=3, **{**_FULL, "recompute_method": "block", "recompute_num_layers": 2}),
        _scatters("dp_cp", 66_048, 2, 15)
        + _scatters("dp_cp", 16_512, 2, 3)
        + _gathers("dp_cp", 66_048, 2, forward=19, backward=15, optimizer=2)
        + _gathers("dp_cp", 16_512, 2, optimizer=1),
    ),
    "one unit ahead, experts in every second of five layers": (
        _small(
            world_size=4,
            num_layers=5,
            num_microbatches=3,
            expert_model_parallel_size=2,
            moe_layer_freq=(0, 1, 0, 1, 0),
            **_MOE,
        ),
        _scatters("dp_cp", 66_560, 4, 9)
        + _scatters("dp_cp", 16_896, 4, 6)
        + _scatters("dp_cp", 16_640, 4, 3)
        + _scatters("edp", 98_304, 2, 6)
        + _gathers("dp_cp", 66_560, 4, forward=11, backward=9, optimizer=1)
        + _gathers("dp_cp", 16_896, 4, forward=8, backward=6, optimizer=1)
        + _gathers("dp_cp", 16_640, 4, optimizer=1)
        + _gathers("edp", 98_304, 2, forward=6, backward=6),
    ),
    "one unit ahead, 0.18": (
        _small(num_layers=5, num_microbatches=3, megatron_core_version="0.18.0"),
        _scatters("dp_cp", 66_048, 2, 15)
        + _scatters("dp_cp", 16_512, 2, 3)
        + _gathers("dp_cp", 66_048, 2, forward=13, backward=15, optimizer=2)
        + _gathers("dp_cp", 16_512, 2, optimizer=1),
    ),
    "three ranks, 0.19": (
        _job(
            world_size=3, ffn_hidden_size=200, untie_embeddings_and_output_weights=True, megatron_core_version="0.19.0"
        ),
        _scatters("dp_cp", 57_600, 3, 4, "bfloat16")
        + _scatters("dp_cp", 32_832, 3, 2, "bfloat16")
        + _gathers("dp_cp", 57_600, 3, forward=2, backward=4, optimizer=2)
        + _gathers("dp_cp", 32_832, 3, optimizer=1),
    ),
    "FSDP2 on three ranks": (
        _torch(world_size=3, ffn_hidden_size=200, bf16=False),
        sum(
            (
                _scatters("dp_cp", n, 3, many * 2)
                + _gathers("dp_cp", n, 3, "float32", forward=many * 2, backward=many * 2)
                for n, many in ((55_572, 2), (16_578, 1), (16_512, 1))
            ),
            Counter(),
        ),
    ),
    "FSDP2 in bf16": (
        _torch(),
        sum(
            (
                _scatters("dp_cp", n, 2, many * 2, "bfloat16")
                + _gathers("dp_cp", n, 2, forward=many * 2, backward=many * 2)
                for n, many in ((65_664, 2), (16_448, 1), (16_384, 1))
            ),
            Counter(),
        ),
    ),
    "FSDP2, not resharded": (
        _torch(bf16=False, torch_fsdp2_reshard_after_forward=False),
        sum(
            (
                _scatters("dp_cp", n, 2, many * 2) + _gathers("dp_cp", n, 2, "float32", forward=many * 2)
                for n, many in ((65_664, 2), (16_448, 1), (16_384, 1))
            ),
            Counter(),
        ),
    ),
    "FSDP2, tensor parallel and recomputed": (
        _torch(world_size=4, tensor_model_parallel_size=2, bf16=False, **_FULL),
        sum(
            (
                _scatters("dp_cp", n, 2, many * 2)
                + _gathers("dp_cp", n, 2, "float32", forward=many * 2, backward=many * 2)
                for n, many in ((32_896, 2), (8_256, 1), (8_192, 1))
            ),
            Counter(),
        ),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs(name: str) -> None:
    job, sent = RUNS[name]
    assert _expected(job, chapter="sharded: ") == sent
    assert _gaps(job) == []


@pytest.mark.parametrize("version", ["0.14.0", "0.15.3", "0.17.0"])
def test_releases_that_send_the_same(version: str) -> None:
    job, sent = RUNS["three ranks, MLP of 200"]
    assert _expected(replace(job, megatron_core_version=version), chapter="sharded: ") == sent


def test_experts_were_told_by_their_mark() -> None:
    """Up to 0.15 experts that no expert parallelism marks are in their layer's bucket."""
    rows = _expected(_job(megatron_core_version="0.15.3", **_MOE), chapter="sharded: ")
    assert {key[0] for key in rows} == {"dp_cp"}
    assert ("dp_cp", "reduce_scatter", "float32", 213_504, 106_752, "backward") in rows


def test_output_layer_of_transformer_engine() -> None:
    """With TransformerEngine's layers FSDP2 wraps the output layer too: the final norm remains, 64 elements."""
    rows = _expected(_torch(bf16=False, transformer_impl="transformer_engine"), chapter="sharded: ")
    forward = {key[4]: calls for key, calls in rows.items() if key[1] == "all_gather" and key[5] == "forward"}
    assert forward == {65_664: 4, 16_384: 4, 64: 2}


# -- layout ----------------------------------------------------------------------------------------------------------


def _tensor(elements: int, row: int, *, tied: bool = False) -> Tensor:
    return Tensor("", elements, row, None, named_expert=False, marked_expert=False, tied=tied)


def test_layout_by_hand() -> None:
    # Rows of 200 and 64: width 1600. fc2 12800 = 8 rows; proj 4096: 3 rows (2 norms of 64 in the gap); qkv 12288: 8 rows;
    # fc1 25600 = 16 rows. 35 rows = 56000, and 36 of them are a multiple of 3 ranks.
    layer = [(64, 1), (4_096, 64), (12_288, 64), (64, 1), (25_600, 64), (12_800, 200)]
    members = [_tensor(*one) for one in layer]
    assert sharded._laid_out(members, 3) == 57_600
    assert sharded._laid_out(members, None) == 56_000
    # Two parameters that end within a row share it: 24 = 16 + 8 and 20 = 16 + 4, rows of 16.
    assert sharded._laid_out([_tensor(24, 16), _tensor(20, 16)], None) == 3 * 16
    # What does not fit behind them does not: 24 and 28 need two more rows.
    assert sharded._laid_out([_tensor(24, 16), _tensor(28, 16)], None) == 4 * 16
    assert sharded._laid_out([_tensor(5, 1)], 2) == 6


def test_buckets_outside_units() -> None:
    sizes = [(40, False), (70, False), (10, True), (5, False)]
    members = [_tensor(size, 1, tied=tied) for size, tied in sizes]

    def cut(limit: int | None, *, alone: bool = True) -> list[list[int]]:
        return [[one.elements for one in part] for part in sharded._cut(members, limit, alone=alone)]

    assert cut(100) == [[40, 70], [10], [5]]
    assert cut(None) == [[40, 70], [10], [5]]
    assert cut(None, alone=False) == [[40, 70, 10, 5]]
    assert cut(1, alone=False) == [[40], [70], [10], [5]]


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, None),
        ({"ddp_bucket_size": 7}, 7),
        ({"framework": "megatron-lm"}, 40_000_000),
        ({"framework": "megatron-lm", "world_size": 64}, 64_000_000),
        ({"framework": "megatron-lm", "ddp_bucket_size": 7}, 7),
        (
            {
                "framework": "megatron-lm",
                "data_parallel_sharding_strategy": "optim",
                "overlap_grad_reduce": False,
                "overlap_param_gather": False,
            },
            None,
        ),
    ],
)
def test_bucket_limit(options: dict[str, Any], limit: int | None) -> None:
    assert sharded._limit(Place(_job(**options), 0, (0, 16))) == limit


# -- closed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("version", ["0.16.1", "0.18.0"])
@pytest.mark.parametrize(
    ("strategy", "gradients", "parameters"),
    [
        ("optim", lambda m: 1, lambda m: 1),
        ("optim_grads", lambda m: m, lambda m: 1),
        ("optim_grads_params", lambda m: m, lambda m: 2 * m),
    ],
)
def test_zero_1_2_3(
    strategy: str,
    gradients: Callable[[int], int],
    parameters: Callable[[int], int],
    version: str,
    micro_batches: int,
) -> None:
    """Reference 2.8: (g*G + p*A) * P * (N-1)/N bytes, fp32 gradients and bf16 parameters, of every unit (N = 2)."""
    job = _job(data_parallel_sharding_strategy=strategy, num_microbatches=micro_batches, megatron_core_version=version)
    units = strategy == "optim_grads_params"
    elements = 66_048 if units else 147_968
    rows = [row for row in _rows(job) if max(row.in_elems, row.out_elems) == elements]
    many = 2 if units else 1
    wanted = many * (4 * gradients(micro_batches) + 2 * parameters(micro_batches)) * elements // 2
    assert sum(row.off_rank_bytes * row.calls for row in rows) == wanted


def _rows(job: Job) -> list[ExpectedCall]:
    return [row for row in expect.expected(job, 0).calls if row.rule.startswith("sharded: ")]


def test_a_large_model_gathers_its_first_units_three_times(document_job: Callable[..., Job]) -> None:
    """80 layers of 1.07e9 elements: up to 0.17 the final norm fetches layers ahead that the backward pass gives up."""
    options = {
        "use_megatron_fsdp": True,
        "use_distributed_optimizer": True,
        "data_parallel_sharding_strategy": "optim_grads_params",
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
        "world_size": 8,
        "num_microbatches": 3,
    }
    gathers: dict[str, int] = {}
    for version in ("0.16.1", "0.18.0"):
        job = document_job(megatron_core_version=version, **options)
        rows = [row for row in _rows(job) if row.op == "all_gather" and row.out_elems > 1_000_000_000]
        gathers[version] = sum(row.calls for row in rows)
        wasted = {row.avoidable.code: row.calls for row in rows if row.avoidable}
        assert wasted == ({"double_param_gather": 3} if version == "0.16.1" else {})
    assert gathers == {"0.16.1": 3 * (2 * 80 + 1), "0.18.0": 3 * 2 * 80}


# -- switches --------------------------------------------------------------------------------------------------------


def test_late_reduction_without_overlap() -> None:
    job = _job(data_parallel_sharding_strategy="optim", overlap_grad_reduce=False, overlap_param_gather=False)
    assert _expected(job, chapter="sharded: ") == (
        Counter({("dp_cp", "reduce_scatter", "float32", 147_968, 73_984, "other"): 1})
        + _gathers("dp_cp", 147_968, 2, optimizer=1)
    )


def test_evaluation_gathers_and_reduces_nothing() -> None:
    job = _job(forward_only=True)
    assert {row.op for row in _rows(job)} == {"all_gather"}
    assert {row.phase for row in _rows(job)} == {"forward"}
    assert {row.phase for row in _rows(_torch(forward_only=True))} == {"forward"}


def test_gradient_type_since_019() -> None:
    def dtype(version: str, **extra: Any) -> set[str]:
        job = _job(megatron_core_version=version, extra=extra)
        return {row.dtype for row in _rows(job) if row.op == "reduce_scatter"}

    assert dtype("0.18.0") == {"float32"}
    assert dtype("0.19.0") == {"bfloat16"}
    assert dtype("0.19.0", megatron_fsdp_main_grads_dtype="fp32") == {"float32"}
    assert dtype("0.19.0", megatron_fsdp_main_grads_dtype="fp32", megatron_fsdp_grad_comm_dtype="bf16") == {"bfloat16"}


def test_waste() -> None:
    def wasted(**options: Any) -> Counter[str]:
        found: Counter[str] = Counter()
        for row in _rows(_job(num_microbatches=3, **options)):
            if row.avoidable:
                found[row.avoidable.code] += row.avoidable.bytes_per_call * row.calls
        return found

    # Half of N-1 / N = 1/2 of 147,968 elements of 4 bytes; the first two of three reductions whole.
    assert wasted(data_parallel_sharding_strategy="optim") == {"fp32_reduction": 147_968}
    assert wasted(data_parallel_sharding_strategy="optim_grads") == {
        "fp32_reduction": 147_968,
        "reduce_scatter_per_microbatch": 2 * 2 * 147_968,
    }
    assert wasted(data_parallel_sharding_strategy="optim", grad_reduce_in_bf16=True) == {}


# -- gaps ------------------------------------------------------------------------------------------------------------


def _gaps(job: Job) -> list[str]:
    place = Place(job, 0, versions.parse(job.megatron_core_version or ""))
    return [gap.what for gap in sharded.CHAPTER.not_modelled(place)]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"megatron_core_version": "0.13.1"}, "use_megatron_fsdp before 0.14"),
        (
            {"world_size": 4, "pipeline_model_parallel_size": 2},
            "use_megatron_fsdp with pipeline parallelism",
        ),
        (
            {"world_size": 4, "num_distributed_optimizer_instances": 2, "data_parallel_sharding_strategy": "optim"},
            "use_megatron_fsdp over instances: with experts, or not all of gradients and parameters sharded",
        ),
        (
            {
                "data_parallel_sharding_strategy": "no_shard",
                "overlap_grad_reduce": False,
                "overlap_param_gather": False,
            },
            "no_shard without overlap_grad_reduce",
        ),
        ({"fp8": "hybrid", "fp8_param_gather": True}, "fp8_param_gather"),
        ({"fsdp_double_buffer": True}, "fsdp_double_buffer"),
        ({"mtp_num_layers": 1}, "mtp_num_layers"),
        ({"padded_vocab_size": None}, "padded_vocab_size is unknown"),
        ({"extra": {"hybrid_override_pattern": "M*"}}, "hybrid_override_pattern"),
        (
            {
                "megatron_core_version": "0.15.3",
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
                "world_size": 4,
                "expert_tensor_parallel_size": 1,
                **_MOE,
            },
            "use_megatron_fsdp before 0.16 with experts of their own tensor parallelism",
        ),
    ],
)
def test_gaps(options: dict[str, Any], what: str) -> None:
    job = _job(**options)
    assert _gaps(job) == [what]
    assert _rows(job) == []


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"padded_vocab_size": None}, "padded_vocab_size is unknown"),
        ({"mtp_num_layers": 1}, "mtp_num_layers"),
    ],
)
def test_gaps_of_fsdp2(options: dict[str, Any], what: str) -> None:
    job = _torch(**options)
    assert _gaps(job) == [what]
    assert _rows(job) == []


def test_norms_of_fsdp2_under_sequence_parallelism() -> None:
    """Run: 5 scatters of 64 float32 for 5 norms, and as many gathers by DTensor; sizes of other models were not run."""
    job = _torch(world_size=4, tensor_model_parallel_size=2, sequence_parallel=True)
    assert _gaps(job) == ["use_torch_fsdp2: gradients of norms"]
    assert _rows(job)


def test_other_jobs_have_no_gap(tiny: Callable[..., Job]) -> None:
    assert _gaps(tiny(mtp_num_layers=1)) == []
    assert _gaps(tiny(extra={"use_custom_fsdp": True})) == ["use_custom_fsdp"]
