"""The expert chapter against recordings and runs of megatron-core, closed numbers, every option, release and gap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traceanalyzer import traffic
from traceanalyzer.errors import JobError
from traceanalyzer.expect import expert, tensor, versions
from traceanalyzer.expect.model import ExpectedCall, NotModelled
from traceanalyzer.expect.place import Place
from traceanalyzer.job import Job

Row = tuple[str, str, str, int, int, str]

ROLES = {
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
}
MIB = 1 << 20


def _place(job: Job, rank: int = 0, version: str | None = None) -> Place:
    return Place(job, job.layout.stage(rank), versions.parse(version or job.megatron_core_version or "0.19"))


def _calls(job: Job, rank: int = 0, version: str | None = None) -> list[ExpectedCall]:
    return expert.CHAPTER.calls(_place(job, rank, version))


def _gaps(job: Job, rank: int = 0, version: str | None = None) -> list[NotModelled]:
    return expert.CHAPTER.not_modelled(_place(job, rank, version))


def _table(calls: Iterable[ExpectedCall], *roles: str) -> Counter[Row]:
    """Calls per step by role, operation, type, elements in and out, phase."""
    found: Counter[Row] = Counter()
    for one in calls:
        if not roles or one.role in roles:
            found[one.role, one.op, one.dtype, one.in_elems, one.out_elems, one.phase] += one.calls
    return found


def _mib(calls: Iterable[ExpectedCall], **wanted: str) -> Fraction:
    """Off-rank MiB of one call of each of these rows together."""
    rows = [one for one in calls if all(getattr(one, name) == value for name, value in wanted.items())]
    return sum((one.off_rank_bytes for one in rows), Fraction(0)) / MIB


# -- recordings ------------------------------------------------------------------------------------------------------


def _recorded(recording: Any, rank: int) -> Counter[Row]:
    phases = {"forward/other": "forward", "backward": "backward", "recompute": "recompute"}
    found: Counter[Row] = Counter()
    for row in recording.rows:
        role = ROLES.get(row["group_desc"])
        if role is None or int(row["rank"]) != rank:
            continue
        op = traffic.normalise_op(row["op"])
        assert op is not None
        elements = int(row["nelems_in"]), int(row["nelems_out"])
        found[role, op, row["dtype"], *elements, phases[row["direction"]]] += int(row["count"])
    return found


def _routed_rows(job: Job, recorded: Counter[Row]) -> list[dict[str, int]]:
    """Rows of every layer and micro-batch, from the forward exchanges of the probabilities: one element is one row."""
    assert job.seq_length
    assert job.micro_batch_size
    tokens = job.seq_length // job.context_parallel_size // job.tensor_model_parallel_size * job.micro_batch_size
    own = tokens * job.moe_router_topk
    most = own * job.expert_model_parallel_size  # far less than the elements of one exchange of hidden states
    found = []
    for (role, _, _, sent, got, phase), count in sorted(recorded.items()):
        if (role, phase) == ("ep", "forward") and sent == own and got <= most:
            found += [{"routed": own, "arrived": got}] * count
    gathered = [
        (sent, got)
        for (role, op, _, sent, got, phase), count in sorted(recorded.items())
        if (role, op, phase) == ("etp", "all_gather", "forward") and sent <= most
        for _ in range(count)
    ]
    if gathered:
        assert Counter(sent for sent, _ in gathered) == Counter(entry["arrived"] for entry in found)
        return [{"routed": own, "arrived": arrived, "gathered": all_of} for arrived, all_of in gathered]
    return found


def test_recordings(recording: Any) -> None:
    """Every call of every recorded rank; sizes that depend on the routing follow from the rows that it sent."""
    job = recording.job
    for rank in recording.ranks:
        recorded = _recorded(recording, rank)
        assert bool(recorded) == (job.num_experts is not None)
        calls = _calls(job, rank)
        rows = _routed_rows(job, recorded) if any(one.varies for one in calls) else []
        assert _table(expert.replay(calls, rows)) == recorded, f"rank {rank}"
        assert _gaps(job, rank) == []


def test_balanced_recordings(recording: Any) -> None:
    """Fake tensors were routed evenly: every size is the expected one without any replay. Padded ones need none either."""
    job = recording.job
    if job.num_experts is None:
        return
    if not recording.name.startswith(("w1024_", "r2_")) and not job.moe_pad_expert_input_to_capacity:
        return
    for rank in recording.ranks:
        assert _table(_calls(job, rank)) == _recorded(recording, rank), f"rank {rank}"


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (part.partition("=") for part in text.split(";"))]


def test_rows_are_conserved(recording: Any) -> None:
    """Over a group what one rank sent another is what that one got, and what an expert group gathered is what arrived."""
    job = recording.job
    if job.layout.world_size != len(recording.ranks):
        return
    sent: Counter[tuple[int, int]] = Counter()
    got: Counter[tuple[int, int]] = Counter()
    arrived: Counter[int] = Counter()
    gathered: Counter[int] = Counter()
    for row in recording.rows:
        rank, count = int(row["rank"]), int(row["count"])
        role = ROLES.get(row["group_desc"])
        if role == "ep" and "even" not in row["peer"]:
            sides = {name: [int(n) for n in rows.split(".")] for name, rows in _pairs(row["peer"])}
            width = int(row["nelems_in"]) // sum(sides["rows_out"])
            for peer, leaving, coming in zip(
                row["group_ranks"].split(), sides["rows_out"], sides["rows_in"], strict=True
            ):
                sent[rank, int(peer)] += leaving * width * count
                got[int(peer), rank] += coming * width * count
        if role == "etp" and row["op"] == "all_gather":
            arrived[rank] += int(row["nelems_in"]) * count
            gathered[rank] += int(row["nelems_out"]) * count
    assert sent == got
    for rank, total in gathered.items():
        members = job.layout.group_of("etp", rank)
        assert members is not None
        assert total == sum(arrived[member] for member in members)


def test_replay() -> None:
    job = _job(world_size=4, tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2)
    job_rows = [{"routed": 64, "arrived": n, "gathered": 100 + n} for n in (60, 60, 70, *(64,) * 13)]
    calls = [one for one in expert.replay(_calls(job), job_rows) if one.component == "experts.gather"]
    assert _table(calls, "etp") == {
        ("etp", "all_gather", "bfloat16", 60 * 64, 160 * 64, "forward"): 2,
        ("etp", "all_gather", "bfloat16", 70 * 64, 170 * 64, "forward"): 1,
        ("etp", "all_gather", "bfloat16", 64 * 64, 164 * 64, "forward"): 13,
        ("etp", "reduce_scatter", "bfloat16", 160 * 64, 60 * 64, "backward"): 2,
        ("etp", "reduce_scatter", "bfloat16", 170 * 64, 70 * 64, "backward"): 1,
        ("etp", "reduce_scatter", "bfloat16", 164 * 64, 64 * 64, "backward"): 13,
    }
    with pytest.raises(ValueError, match="16 calls, but rows of 15"):
        expert.replay(_calls(job), job_rows[1:])
    with pytest.raises(KeyError, match="gathered"):
        expert.replay(_calls(job), [{"routed": 64, "arrived": 64}] * 16)


# -- runs of megatron-core -------------------------------------------------------------------------------------------

# The recorded model with 4 experts in every layer: H 64, 4 layers, S 32, B 2, 4 micro-batches, top-2.
_MODEL: dict[str, Any] = {
    "megatron_core_version": "0.16.1",
    "world_size": 2,
    "micro_batch_size": 2,
    "num_microbatches": 4,
    "seq_length": 32,
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "padded_vocab_size": 256,
    "bf16": True,
    "num_experts": 4,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
}
_TP2: dict[str, Any] = {"world_size": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True}
_TP2_EP2: dict[str, Any] = {**_TP2, "expert_model_parallel_size": 2}
_TP2_EP4: dict[str, Any] = {**_TP2, "world_size": 8, "expert_model_parallel_size": 4}
_BIAS: dict[str, Any] = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
_FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _job(**changes: Any) -> Job:
    return Job(**{**_MODEL, **changes})


def _mirrored(lines: str) -> Counter[Row]:
    """Rows from lines "role op type in out phase count"."""
    found: Counter[Row] = Counter()
    for line in lines.strip().splitlines():
        role, op, dtype, sent, got, phase, count = line.split()
        found[role, op, dtype, int(sent), int(got), phase] += int(count)
    return found


# name: options beyond the model, then the calls of rank 0 in step 1 as recorded.
RUNS: dict[str, tuple[dict[str, Any], str]] = {
    # 0.16.1: TP2 SP EP2, --moe-router-dtype fp32
    "router in float32": (
        {**_TP2_EP2, "moe_router_dtype": "fp32"},
        """
        tp_ep all_gather     int64    4    16   forward  16
        ep    all_to_all     bfloat16 4096 4096 forward  32
        ep    all_to_all     float32  64   64   forward  16
        etp   all_gather     bfloat16 4096 8192 forward  16
        etp   all_gather     float32  64   128  forward  16
        etp   reduce_scatter float32  8192 4096 forward  16
        ep    all_to_all     bfloat16 4096 4096 backward 32
        ep    all_to_all     float32  64   64   backward 16
        etp   all_gather     float32  4096 8192 backward 16
        etp   reduce_scatter float32  128  64   backward 16
        etp   reduce_scatter bfloat16 8192 4096 backward 16
        """,
    ),
    # 0.16.1: world 8, TP2 SP EP4 ETP1, allgather dispatcher, --moe-router-dtype fp32
    "allgather, router in float32": (
        {
            **_TP2_EP4,
            "expert_tensor_parallel_size": 1,
            "moe_token_dispatcher_type": "allgather",
            "moe_router_dtype": "fp32",
        },
        """
        tp_ep all_gather     bool     128  512  forward  16
        tp_ep all_gather     float32  128  512  forward  16
        tp_ep all_gather     bfloat16 2048 8192 forward  16
        tp_ep reduce_scatter float32  8192 2048 forward  16
        tp_ep all_gather     float32  2048 8192 backward 16
        tp_ep reduce_scatter bfloat16 8192 2048 backward 16
        tp_ep reduce_scatter float32  512  128  backward 16
        """,
    ),
    # 0.16.1: world 4, TP2 SP EP4 ETP1, allgather dispatcher, full recomputation
    "allgather, full recomputation": (
        {
            **_TP2,
            **_FULL,
            "expert_model_parallel_size": 4,
            "expert_tensor_parallel_size": 1,
            "moe_token_dispatcher_type": "allgather",
        },
        """
        tp_ep all_gather     bool     128  512  forward   16
        tp_ep all_gather     bfloat16 128  512  forward   16
        tp_ep all_gather     bfloat16 2048 8192 forward   16
        tp_ep reduce_scatter bfloat16 8192 2048 forward   16
        tp_ep all_gather     bool     128  512  recompute 16
        tp_ep all_gather     bfloat16 128  512  recompute 16
        tp_ep all_gather     bfloat16 2048 8192 recompute 16
        tp_ep reduce_scatter bfloat16 8192 2048 recompute 16
        tp_ep all_gather     bfloat16 2048 8192 backward  16
        tp_ep reduce_scatter bfloat16 8192 2048 backward  16
        tp_ep reduce_scatter bfloat16 512  128  backward  16
        """,
    ),
    # 0.16.1: world 8, TP2 SP EP4, capacity factor 1.3 padded, --moe-router-dtype fp32: ceil(64/4 * 1.3) = 21 rows an expert
    "padded to capacity": (
        {
            **_TP2_EP4,
            "moe_expert_capacity_factor": 1.3,
            "moe_pad_expert_input_to_capacity": True,
            "moe_router_dtype": "fp32",
        },
        """
        ep    all_to_all     bfloat16 5376  5376  forward  32
        ep    all_to_all     float32  84    84    forward  16
        etp   all_gather     bfloat16 5376  10752 forward  16
        etp   all_gather     float32  84    168   forward  16
        etp   reduce_scatter float32  10752 5376  forward  16
        ep    all_to_all     bfloat16 5376  5376  backward 32
        ep    all_to_all     float32  84    84    backward 16
        etp   all_gather     float32  5376  10752 backward 16
        etp   reduce_scatter float32  168   84    backward 16
        etp   reduce_scatter bfloat16 10752 5376  backward 16
        """,
    ),
}

# 0.16.1, TP2 SP EP2: what every run without recomputation has besides the router's own calls.
_PLAIN = """
    tp_ep all_gather     int64    4    16   forward  16
    ep    all_to_all     bfloat16 4096 4096 forward  32
    ep    all_to_all     bfloat16 64   64   forward  16
    etp   all_gather     bfloat16 4096 8192 forward  16
    etp   all_gather     bfloat16 64   128  forward  16
    etp   reduce_scatter bfloat16 8192 4096 forward  16
    ep    all_to_all     bfloat16 4096 4096 backward 32
    ep    all_to_all     bfloat16 64   64   backward 16
    etp   all_gather     bfloat16 4096 8192 backward 16
    etp   reduce_scatter bfloat16 128  64   backward 16
    etp   reduce_scatter bfloat16 8192 4096 backward 16
"""
_AGAIN = "\n".join(line.replace("forward", "recompute") for line in _PLAIN.splitlines() if "forward" in line)
_AUX: dict[str, Any] = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}

RUNS |= {
    # world 8, seq_aux_loss 0.01: one count for every sequence of the micro-batch
    "loss of each sequence": (
        {**_TP2_EP2, "world_size": 8, **_AUX, "moe_router_load_balancing_type": "seq_aux_loss"},
        _PLAIN + "tp_cp all_reduce int64 8 8 forward 16",
    ),
    # world 8, [aux_loss 0.01, seq_aux_loss 0, global_aux_loss 0.1], z-loss, full recomputation
    "several losses, full recomputation": (
        {
            **_TP2_EP2,
            **_FULL,
            "world_size": 8,
            "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss"),
            "moe_aux_loss_coeff": (0.01, 0.0, 0.1),
            "moe_z_loss_coeff": 0.001,
        },
        _PLAIN + _AGAIN + "\ntp_cp all_reduce int64 4 4 recompute 16\ntp_dp_cp all_reduce int64 4 4 recompute 16",
    ),
    # world 8, aux_loss 0.01, selective recomputation of "moe"
    "loss under recomputation of the experts": (
        {
            **_TP2_EP2,
            **_AUX,
            "world_size": 8,
            "recompute_granularity": "selective",
            "recompute_modules": ("moe",),
        },
        _PLAIN + _AGAIN + "\ntp_cp all_reduce int64 4 4 recompute 16",
    ),
    # world 2, no EP, global_aux_loss 0.01
    "global loss": (
        {**_AUX, "moe_router_load_balancing_type": "global_aux_loss"},
        "tp_dp_cp all_reduce int64 4 4 forward 16",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs(name: str) -> None:
    options, lines = RUNS[name]
    job = _job(**options)
    assert _table(_calls(job)) == _mirrored(lines)
    assert _gaps(job) == []


def _times(lines: str, count: int) -> str:
    """The same rows with another count, doubled where they are rows and results."""
    found = []
    for line in lines.strip().splitlines():
        *row, number = line.split()
        found.append(" ".join([*row, str(count * int(number) // 16)]))
    return "\n".join(found) + "\n"


# More runs of the same model: options, release, rank, lines.
MORE_RUNS: dict[str, tuple[dict[str, Any], str, int, str]] = {
    # 0.16.1, one layer of multi-token prediction, aux_loss 0.01: it has experts like the last decoder layer
    "multi-token prediction": (
        {**_TP2_EP2, **_AUX, "mtp_num_layers": 1},
        "0.16.1",
        0,
        _times(_PLAIN, 20) + "tp_cp all_reduce int64 4 4 forward 20",
    ),
    # 0.16.1, PP2, two such layers, experts in every second layer, full recomputation
    "multi-token prediction, first stage": (
        {
            **_TP2_EP2,
            **_AUX,
            **_FULL,
            "world_size": 8,
            "pipeline_model_parallel_size": 2,
            "mtp_num_layers": 2,
            "moe_layer_freq": (0, 1, 0, 1),
        },
        "0.16.1",
        0,
        _times(_PLAIN, 4) + _times(_AGAIN, 4) + "tp_cp all_reduce int64 4 4 recompute 4",
    ),
    "multi-token prediction, last stage": (
        {
            **_TP2_EP2,
            **_AUX,
            **_FULL,
            "world_size": 8,
            "pipeline_model_parallel_size": 2,
            "mtp_num_layers": 2,
            "moe_layer_freq": (0, 1, 0, 1),
        },
        "0.16.1",
        4,
        _times(_PLAIN, 12) + _times(_AGAIN, 12) + "tp_cp all_reduce int64 4 4 recompute 12",
    ),
    # 0.16.1, TP1, ETP2, EP2
    "expert tensor parallelism alone": (
        {"world_size": 4, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
        "0.16.1",
        0,
        """
        tp_ep all_gather     int64    4     16    forward  16
        ep    all_to_all     bfloat16 8192  8192  forward  32
        ep    all_to_all     bfloat16 128   128   forward  16
        etp   all_gather     bfloat16 8192  16384 forward  16
        etp   all_gather     bfloat16 128   256   forward  16
        etp   reduce_scatter bfloat16 16384 8192  forward  16
        ep    all_to_all     bfloat16 8192  8192  backward 32
        ep    all_to_all     bfloat16 128   128   backward 16
        etp   all_gather     bfloat16 8192  16384 backward 16
        etp   reduce_scatter bfloat16 256   128   backward 16
        etp   reduce_scatter bfloat16 16384 8192  backward 16
        """,
    ),
    # 0.16.1, EP2, full recomputation by block of the first layer; aux_loss 0.01 makes no call on a group of one
    "first layer recomputed": (
        {**_AUX, **_FULL, "recompute_method": "block", "expert_model_parallel_size": 2},
        "0.16.1",
        0,
        """
        tp_ep all_gather int64    4    8    forward   16
        ep    all_to_all bfloat16 8192 8192 forward   32
        ep    all_to_all bfloat16 128  128  forward   16
        tp_ep all_gather int64    4    8    recompute 4
        ep    all_to_all bfloat16 8192 8192 recompute 8
        ep    all_to_all bfloat16 128  128  recompute 4
        ep    all_to_all bfloat16 8192 8192 backward  32
        ep    all_to_all bfloat16 128  128  backward  16
        """,
    ),
    # 0.16.1, TP2 SP, EP1 ETP1
    "groups of one rank": ({**_TP2, "world_size": 2, "expert_tensor_parallel_size": 1}, "0.16.1", 0, ""),
    # world 8, TP2 SP EP4, aux_loss 0.01
    "0.17": (
        {**_TP2_EP4, **_AUX},
        "0.17.0",
        0,
        _PLAIN.replace("4    16 ", "4    32 ") + "tp_cp all_reduce int64 4 4 forward 16",
    ),
    "0.18, experts recomputed": (
        {**_TP2_EP4, **_AUX, "recompute_granularity": "selective", "recompute_modules": ("moe",)},
        "0.18.0",
        0,
        (_PLAIN + _AGAIN).replace("4    16 ", "4    32 ") + "\ntp_cp all_reduce int64 4 4 recompute 16",
    ),
    "0.19, full recomputation": (
        {**_TP2_EP4, **_AUX, **_FULL},
        "0.19.0",
        0,
        (_PLAIN + _AGAIN).replace("4    16 ", "4    32 ") + "\ntp_cp all_reduce int64 4 4 recompute 16",
    ),
    # world 8, TP2 SP EP4 ETP1
    "0.11, allgather": (
        {**_TP2_EP4, "expert_tensor_parallel_size": 1, "moe_token_dispatcher_type": "allgather"},
        "0.11.0",
        0,
        """
        tp_ep all_gather     bool     128  512  forward  16
        tp_ep all_gather     bfloat16 128  512  forward  16
        tp_ep all_gather     bfloat16 2048 8192 forward  16
        tp_ep reduce_scatter bfloat16 8192 2048 forward  16
        tp_ep all_gather     bfloat16 2048 8192 backward 16
        tp_ep reduce_scatter bfloat16 8192 2048 backward 16
        tp_ep reduce_scatter bfloat16 512  128  backward 16
        """,
    ),
    # 0.19.0 on two processes, EP2
    "0.19, allgather": (
        {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather", "moe_router_dtype": "fp32"},
        "0.19.0",
        0,
        """
        tp_ep all_gather     bool     256  512  forward  16
        tp_ep all_gather     float32  256  512  forward  16
        tp_ep all_gather     bfloat16 4096 8192 forward  16
        tp_ep reduce_scatter float32  8192 4096 forward  16
        tp_ep all_gather     float32  4096 8192 backward 16
        tp_ep reduce_scatter bfloat16 8192 4096 backward 16
        tp_ep reduce_scatter float32  512  256  backward 16
        """,
    ),
    # global_aux_loss 0.01
    "0.15, global loss": (
        {**_TP2_EP4, **_AUX, "moe_router_load_balancing_type": "global_aux_loss"},
        "0.15.3",
        0,
        _PLAIN.replace("4    16 ", "4    32 ") + "tp_dp_cp all_reduce int64 4 4 forward 16",
    ),
    # seq_aux_loss 0.01, full recomputation
    "0.14, loss of each sequence": (
        {**_TP2_EP4, **_AUX, **_FULL, "moe_router_load_balancing_type": "seq_aux_loss"},
        "0.14.0",
        0,
        (_PLAIN + _AGAIN).replace("4    16 ", "4    32 ") + "\ntp_cp all_reduce int64 8 8 recompute 16",
    ),
    # 0.16.1, EP2, full recomputation, uniform by 2 layers
    "two layers a checkpoint": (
        {**_AUX, **_FULL, "recompute_num_layers": 2, "expert_model_parallel_size": 2},
        "0.16.1",
        0,
        """
        tp_ep all_gather int64    4    8    forward   16
        ep    all_to_all bfloat16 8192 8192 forward   32
        ep    all_to_all bfloat16 128  128  forward   16
        tp_ep all_gather int64    4    8    recompute 16
        ep    all_to_all bfloat16 8192 8192 recompute 32
        ep    all_to_all bfloat16 128  128  recompute 16
        ep    all_to_all bfloat16 8192 8192 backward  32
        ep    all_to_all bfloat16 128  128  backward  16
        """,
    ),
    "0.12.3, full recomputation": (
        {**_TP2_EP4, **_AUX, **_FULL},
        "0.12.3",
        0,
        (_PLAIN + _AGAIN).replace("4    16 ", "4    32 ") + "\ntp_cp all_reduce int64 4 4 recompute 16",
    ),
    "0.13.1, loss of each sequence": (
        {**_TP2_EP4, **_AUX, **_FULL, "moe_router_load_balancing_type": "seq_aux_loss"},
        "0.13.1",
        0,
        (_PLAIN + _AGAIN).replace("4    16 ", "4    32 ")
        + "\ntp_cp all_gather float32 128 256 recompute 16\ntp_cp reduce_scatter float32 256 128 backward 16",
    ),
}


@pytest.mark.parametrize("name", MORE_RUNS)
def test_more_runs(name: str) -> None:
    options, version, rank, lines = MORE_RUNS[name]
    job = _job(**options, megatron_core_version=version)
    assert _table(_calls(job, rank)) == _mirrored(lines)
    assert _gaps(job, rank) == []


def test_no_probabilities_before_0_12_1() -> None:
    """0.11.0 on two processes, EP2, full recomputation: 32 all-to-alls in each pass, of rows of 64 elements alone."""
    for version, widths in (("0.11.0", {64}), ("0.12.0", {64}), ("0.12.1", {1, 64}), ("0.12.3", {1, 64})):
        job = _job(expert_model_parallel_size=2, megatron_core_version=version, **_FULL)
        rows = [one for one in _calls(job) if one.role == "ep"]
        assert {one.varies.width for one in rows if one.varies} == widths
        hidden: Counter[str] = Counter()
        for one in rows:
            hidden[one.phase] += one.calls if one.in_elems == 8192 else 0
        assert hidden == {"forward": 32, "recompute": 32, "backward": 32}
    assert {one.varies.width for one in _calls(_job(expert_model_parallel_size=2), version="0.12") if one.varies} == {
        1,
        64,
    }


def test_dropped_rows_of_a_run() -> None:
    """0.16.1 on two processes, EP2, capacity factor 1.0: rows that rank 0 sent and got in each layer and micro-batch."""
    pairs = [(110, 104), (116, 116), (118, 114), (119, 110), (119, 128), (120, 128), (121, 128), (122, 126)]
    pairs += [(122, 128), (123, 118), (123, 122), (123, 128), (123, 128), (124, 120), (125, 124), (125, 128)]
    calls = _calls(_job(expert_model_parallel_size=2, moe_expert_capacity_factor=1.0))
    table = _table(expert.replay(calls, [{"routed": sent, "arrived": got} for sent, got in pairs]))
    exchanged = {row: n for row, n in table.items() if row[0] == "ep"}
    for phase, sent, got in (("forward", 250_445, 250_462), ("backward", 250_462, 250_445)):
        assert sum(row[3] * n for row, n in exchanged.items() if row[5] == phase) == sent
        assert sum(row[4] * n for row, n in exchanged.items() if row[5] == phase) == got
    assert table["tp_ep", "all_gather", "int64", 4, 8, "forward"] == 16


# 0.16.1, TP2 SP EP2, a shared expert in each of 4 layers: all-gathers and reduce-scatters [32, 2, 64] of the whole rank,
# forward, recompute, backward. Attention has 1 and 1, 1 and 1, 2 and 1 in a layer, embedding and output layer 1 in a pass.
SHARED_EXPERTS: dict[str, tuple[dict[str, Any], tuple[int, int, int], tuple[int, int, int]]] = {
    "plain": ({}, (36, 0, 72), (36, 0, 36)),
    "gate": ({"moe_shared_expert_gate": True}, (36, 0, 72), (36, 0, 36)),
    "overlapped": ({"moe_shared_expert_overlap": True}, (36, 0, 56), (36, 0, 36)),
    "full recomputation": (_FULL, (36, 32, 72), (36, 32, 36)),
    "recomputed": (
        {"recompute_granularity": "selective", "recompute_modules": ("shared_experts", "mlp")},
        (36, 16, 72),
        (36, 16, 36),
    ),
    "a checkpoint inside another": (
        {"recompute_granularity": "selective", "recompute_modules": ("moe", "shared_experts")},
        (36, 32, 72),
        (36, 32, 36),
    ),
    "overlapped, experts recomputed": (
        {
            "moe_shared_expert_overlap": True,
            "recompute_granularity": "selective",
            "recompute_modules": ("moe",),
        },
        (36, 16, 56),
        (36, 16, 36),
    ),
}


@pytest.mark.parametrize("name", SHARED_EXPERTS)
def test_shared_experts(name: str) -> None:
    """Their traffic is tensor-parallel, and its rules stand with the linear layers; the exchange does not change."""
    options, gathers, scatters = SHARED_EXPERTS[name]
    job = _job(**_TP2_EP2, **options, moe_shared_expert_intermediate_size=128)
    phases = ("forward", "recompute", "backward")
    table = _table(tensor.CHAPTER.calls(_place(job)), "tp")
    assert tuple(table["tp", "all_gather", "bfloat16", 2048, 4096, phase] for phase in phases) == gathers
    assert tuple(table["tp", "reduce_scatter", "bfloat16", 4096, 2048, phase] for phase in phases) == scatters
    without = _job(**_TP2_EP2, **{key: value for key, value in options.items() if "shared" not in key})
    assert _table(_calls(job)) == _table(_calls(without))


# -- closed numbers of the reference ---------------------------------------------------------------------------------

# The document's model: S 8192, B 2, H 8192, 64 experts, top-2, in every 4th layer.
_LARGE: dict[str, Any] = {
    **_MODEL,
    "world_size": 1024,
    "tensor_model_parallel_size": 4,
    "sequence_parallel": True,
    "pipeline_model_parallel_size": 4,
    "context_parallel_size": 2,
    "expert_model_parallel_size": 8,
    "seq_length": 8192,
    "num_layers": 80,
    "hidden_size": 8192,
    "ffn_hidden_size": 32768,
    "num_attention_heads": 64,
    "num_microbatches": 8,
    "num_experts": 64,
    "moe_layer_freq": 4,
}


def test_sizes_of_the_large_model() -> None:
    """Off-rank MiB of one call, and of the exchanges of a layer's forward pass without the probabilities (4.2)."""
    calls = _calls(Job(**_LARGE))
    (dispatch,) = [one for one in calls if (one.component, one.phase) == ("experts.dispatch", "forward")]
    assert dispatch.payload_bytes == 64 * MIB
    assert dispatch.off_rank_bytes == 56 * MIB
    assert dispatch.calls == 40  # 5 of the 20 layers of a stage, 8 micro-batches
    steps = ("experts.dispatch", "experts.gather", "experts.scatter", "experts.combine")
    assert [_mib(calls, component=step, phase="forward") for step in steps] == [56, 192, 192, 56]
    assert [_mib(calls, component=step, phase="backward") for step in steps] == [56, 192, 192, 56]
    alone = _calls(Job(**{**_LARGE, "expert_tensor_parallel_size": 1}))
    assert [_mib(alone, component=step, phase="forward") for step in steps] == [56, 0, 0, 56]
    small = {"tensor_model_parallel_size": 1, "sequence_parallel": False, "context_parallel_size": 1}
    assert _mib(_calls(Job(**{**_LARGE, **small})), component="experts.dispatch", phase="forward") == 448


def test_closed_forms() -> None:
    """Section 2.11: EP M*n*(4*R*H*e + 2*R*p)*(EP-1)/EP, ETP M*n*(ETP-1)*R*H*(2*e + 2*p), p a probability's bytes."""
    calls = _calls(Job(**{**_LARGE, "moe_router_dtype": "fp32", **_FULL}))

    def total(role: str, width: int, *phases: str) -> Fraction:
        rows = [one for one in calls if one.role == role and one.phase in phases and one.varies is not None]
        return sum(
            (one.off_rank_bytes * one.calls for one in rows if one.varies and one.varies.width == width), Fraction(0)
        )

    rows = 4096
    both = ("forward", "backward")
    assert total("ep", 8192, *both) + total("ep", 1, *both) == 40 * (4 * rows * 8192 * 2 + 2 * rows * 4) * Fraction(
        7, 8
    )
    assert total("ep", 8192, "recompute") == 40 * 2 * rows * 8192 * 2 * Fraction(7, 8)
    assert total("etp", 8192, *both) == 40 * 3 * rows * 8192 * (2 * 2 + 2 * 4)
    assert total("etp", 8192, "recompute") == 40 * 3 * rows * 8192 * (2 + 4)


def test_two_sided_layer_of_the_reference() -> None:
    """Section 2.10: TP2 SP EP4 ETP1, 8 experts, top-2, 8 heads: calls of one layer in one micro-batch."""
    job = _job(
        **{**_TP2_EP4, **_AUX},
        expert_tensor_parallel_size=1,
        num_experts=8,
        num_layers=1,
        num_microbatches=1,
    )
    assert _table(_calls(job)) == _mirrored(
        """
        tp_cp all_reduce int64    8    8    forward  1
        tp_ep all_gather int64    8    32   forward  1
        ep    all_to_all bfloat16 4096 4096 forward  2
        ep    all_to_all bfloat16 64   64   forward  1
        ep    all_to_all bfloat16 4096 4096 backward 2
        ep    all_to_all bfloat16 64   64   backward 1
        """
    )


# -- flex ------------------------------------------------------------------------------------------------------------


def _flex(**changes: Any) -> Job:
    return Job(**{**_LARGE, "moe_token_dispatcher_type": "flex", "expert_tensor_parallel_size": 1, **changes})


def test_copies_of_a_token() -> None:
    """8 * (1 - C(56,2)/C(64,2)) = 8 * (1 - 1540/2016) = 17/9 = 1.889 ranks, the own one included."""
    place = _place(_flex())
    assert expert.CHAPTER.symbols["destinations"].of(place) == Fraction(17, 9)
    assert expert.CHAPTER.symbols["destinations"].of(_place(_flex(moe_router_topk=64))) == 8
    assert expert.CHAPTER.symbols["destinations"].of(_place(_flex(moe_router_topk=1))) == 1


def test_flex_is_outside_torch() -> None:
    calls = _calls(_flex())
    assert {(one.role, one.transport) for one in calls} == {("tp_ep", "deepep")}
    hidden = [one for one in calls if one.dtype == "bfloat16"]
    assert [(one.component, one.phase, one.calls) for one in hidden] == [
        ("experts.dispatch", "forward", 40),
        ("experts.combine", "forward", 40),
        ("experts.combine", "backward", 40),
        ("experts.dispatch", "backward", 40),
    ]
    # 2048 tokens of 16 KiB: 32 MiB, 17/9 copies of which one in eight stays
    assert {one.off_rank_bytes for one in hidden} == {32 * MIB * Fraction(17, 9) * Fraction(7, 8)}
    weights = [one for one in calls if one.dtype == "float32"]
    assert [(one.component, one.phase) for one in weights] == [
        ("experts.dispatch probabilities", "forward"),
        ("experts.dispatch probabilities", "backward"),
    ]
    assert {one.off_rank_bytes for one in weights} == {2048 * 2 * 4 * Fraction(17, 9) * Fraction(7, 8)}
    assert {one.avoidable for one in calls} == {None}


def test_flex_with_expert_tensor_parallelism() -> None:
    """Every rank of the expert tensor-parallel groups gets a copy: 4 * 17/9 of which 1/8 * 17/9 stays."""
    hidden = [one for one in _calls(_flex(expert_tensor_parallel_size=4)) if one.dtype == "bfloat16"]
    assert {one.off_rank_bytes for one in hidden} == {32 * MIB * Fraction(17, 9) * Fraction(31, 8)}
    weights = [one for one in _calls(_flex(expert_tensor_parallel_size=4)) if one.dtype == "float32"]
    assert {one.in_elems for one in weights} == {2048 * 2 * 4}


def test_flex_backends() -> None:
    hybrid = _calls(_flex(moe_flex_dispatcher_backend="hybridep"))
    assert {(one.transport, one.dtype) for one in hybrid} == {("hybridep", "bfloat16")}
    assert len(hybrid) == 4
    padded = _flex(
        moe_flex_dispatcher_backend="hybridep",
        extra={"moe_hybridep_pad_uneven_dispatch_inputs": True},
        megatron_core_version="0.19.0",
    )
    inside = [one for one in _calls(padded) if not one.outside_c10d]
    assert _table(inside) == {("tp_ep", "all_reduce", "int64", 1, 1, "forward"): 40}
    assert [one for one in _calls(padded, version="0.18") if not one.outside_c10d] == []
    other = _flex(moe_flex_dispatcher_backend="ncclep")
    assert _calls(other) == []
    assert [gap.what for gap in _gaps(other)] == ["moe_flex_dispatcher_backend ncclep"]


# -- waste -----------------------------------------------------------------------------------------------------------


def _waste(job: Job) -> dict[tuple[str, str], tuple[str, str, int]]:
    return {
        (one.component, one.phase): (one.avoidable.code, one.avoidable.setting, one.avoidable.bytes_per_call)
        for one in _calls(job)
        if one.avoidable is not None
    }


def test_default_expert_tensor_parallelism_is_waste() -> None:
    code = ("etp_defaults_to_tp", "expert_tensor_parallel_size 1")
    waste = _waste(_job(**_TP2_EP2))
    assert waste == {
        ("experts.gather", "forward"): (*code, 8192),  # half of 8192 elements of 2 bytes
        ("experts.gather probabilities", "forward"): (*code, 128),
        ("experts.scatter", "forward"): (*code, 8192),
        ("experts.scatter", "backward"): (*code, 8192),
        ("experts.gather probabilities", "backward"): (*code, 128),
        ("experts.gather", "backward"): (*code, 8192),
    }
    assert _waste(_job(**_TP2_EP2, expert_tensor_parallel_size=1)) == {}
    stated: dict[str, Any] = {"given": frozenset({"expert_tensor_parallel_size"})}
    assert _waste(_job(**_TP2_EP2, expert_tensor_parallel_size=2, **stated)) == waste
    # another one than TP is a choice
    chosen: dict[str, Any] = {"world_size": 4, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    assert _waste(_job(**chosen, **stated)) == {}
    assert len(_waste(_job(**chosen))) == 6
    assert _table(_calls(_job(**chosen, **stated))) == _table(_calls(_job(**chosen)))


def test_wide_router_is_waste() -> None:
    """Of 4 bytes an element two are the activation's."""
    chosen = _job(
        world_size=4,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=2,
        given=frozenset({"expert_tensor_parallel_size"}),
        moe_router_dtype="fp32",
    )
    assert _waste(chosen) == {
        ("experts.scatter", phase): ("router_dtype_widens_hidden", "moe_router_dtype off", 16384)
        for phase in ("forward", "backward")
    }
    of_all = {**_TP2_EP4, "expert_tensor_parallel_size": 1, "moe_token_dispatcher_type": "allgather"}
    assert _waste(_job(**of_all, moe_router_dtype="fp64")) == {
        ("experts.scatter", phase): ("router_dtype_widens_hidden", "moe_token_dispatcher_type alltoall", 3 * 2048 * 6)
        for phase in ("forward", "backward")
    }
    assert _waste(_job(**of_all)) == {}


def test_repetition_is_waste() -> None:
    job = _job(**_TP2_EP2, **_FULL, **_AUX)
    repeated = [one for one in _calls(job) if one.phase == "recompute"]
    sums = [one for one in repeated if one.component == "router.load"]
    assert [one.avoidable for one in sums] == [None]  # the only pass that makes it
    others = [one for one in repeated if one not in sums]
    assert {one.avoidable.code if one.avoidable else None for one in others} == {"recompute_repeats_collectives"}
    assert all(one.avoidable and one.avoidable.bytes_per_call == int(one.off_rank_bytes) for one in others)


# -- options ---------------------------------------------------------------------------------------------------------


def test_dropped_rows() -> None:
    """Capacity without padding: as many calls and the counts, own rows not exact; never more than the experts hold."""
    job = _job(**_TP2_EP2, moe_expert_capacity_factor=0.5)
    plain = _job(**_TP2_EP2)
    assert sum(one.calls for one in _calls(job)) == sum(one.calls for one in _calls(plain))
    dispatch, *_ = [one for one in _calls(job) if one.component == "experts.dispatch"]
    assert dispatch.varies is not None
    assert (dispatch.varies.sent, dispatch.varies.received) == ("routed", "arrived")
    assert dispatch.in_elems == 4 * 8 * 64  # 4 experts of ceil(64/4 * 0.5) rows
    ample, *_ = [one for one in _calls(_job(**_TP2_EP2, moe_expert_capacity_factor=2.0)) if one.role == "ep"]
    assert ample.in_elems == 64 * 64
    rows = [{"routed": 60, "arrived": 66, "gathered": 130}] * 16
    assert ("ep", "all_to_all", "bfloat16", 60 * 64, 66 * 64, "forward") in _table(expert.replay(_calls(job), rows))
    assert _table(_calls(_job(**_TP2_EP2, moe_expert_capacity_factor=-1.0))) == _table(_calls(plain))


def test_capacity_is_rounded_as_megatron_rounds_it() -> None:
    """Floating point: 64/4 * 1.1 is a little more than 17.6, and 10/10 * 1.1 * 10 would be 12 by a hair."""
    for factor, rows in ((1.0, 16), (1.05, 17), (1.1, 18), (1.25, 20)):
        job = _job(**_TP2_EP2, moe_expert_capacity_factor=factor, moe_pad_expert_input_to_capacity=True)
        assert expert.CHAPTER.symbols["capacity"].of(_place(job)) == rows


def test_latent_width() -> None:
    """Rows of the latent size, tokens routed as before; the allgather dispatcher too."""
    for dispatcher in ("alltoall", "allgather"):
        options = {**_TP2_EP2, "moe_token_dispatcher_type": dispatcher}
        narrow, wide = (_table(_calls(_job(**options, **more))) for more in ({"moe_latent_size": 16}, {}))
        assert {row[3] for row in narrow if row[2] == "bfloat16"} < {n // 4 for *_, n, _, _ in wide} | {64, 128, 512}
        assert sum(narrow.values()) == sum(wide.values())


def test_forward_only() -> None:
    job = _job(**_TP2_EP2, **_AUX, **_FULL, forward_only=True, framework="megatron-lm")
    assert _table(_calls(job)) == Counter({row: n for row, n in _mirrored(_PLAIN).items() if row[5] == "forward"})
    assert _gaps(job) == []


def test_whole_sequence_without_sequence_parallelism() -> None:
    """Evaluation only: every tensor-parallel rank routes all tokens; training refuses."""
    options = {**_TP2_EP2, "sequence_parallel": False}
    dispatch, *_ = [one for one in _calls(_job(**options, forward_only=True)) if one.role == "ep"]
    assert dispatch.in_elems == 128 * 64
    assert _gaps(_job(**options, forward_only=True)) == []
    with pytest.raises(JobError, match="needs sequence_parallel=True in training"):
        _job(**options)


def test_overlap_changes_nothing() -> None:
    for flag in ("overlap_moe_expert_parallel_comm", "moe_shared_expert_overlap"):
        assert _table(_calls(_job(**_TP2_EP2, **{flag: True}))) == _table(_calls(_job(**_TP2_EP2)))
    for name in ("moe_permute_fusion", "moe_router_fusion", "moe_grouped_gemm", "moe_router_force_load_balancing"):
        assert _table(_calls(_job(**_TP2_EP2, extra={name: True}))) == _table(_calls(_job(**_TP2_EP2)))
        assert _gaps(_job(**_TP2_EP2, extra={name: True})) == []


@pytest.mark.parametrize("modules", [("core_attn",), ("mlp", "layernorm", "moe_act"), ("shared_experts",)])
def test_other_modules_repeat_no_dispatch(modules: tuple[str, ...]) -> None:
    job = _job(**_TP2_EP2, moe_grouped_gemm=True, recompute_granularity="selective", recompute_modules=modules)
    assert _table(_calls(job)) == _table(_calls(_job(**_TP2_EP2)))


def test_recomputation_by_the_old_flag() -> None:
    job = _job(**_TP2_EP2, moe_layer_recompute=True)
    assert _table(_calls(job, version="0.11")) - _table(_calls(_job(**_TP2_EP2), version="0.11")) == Counter(
        {row: n for row, n in _mirrored(_AGAIN).items() if row[3] != 64}
    )
    by_module = _job(**_TP2_EP2, recompute_granularity="selective", recompute_modules=("moe",))
    assert not [one for one in _calls(by_module, version="0.11") if one.phase == "recompute"]


def test_recomputation_of_multi_token_prediction() -> None:
    job = _job(**_TP2_EP2, **_FULL, mtp_num_layers=1)
    counted = {
        version: sum(one.calls for one in _calls(job, version=version) if one.component == "experts.counts")
        for version in ("0.13", "0.14")
    }
    assert counted == {"0.13": 20 + 16, "0.14": 20 + 20}
    block = _job(**_TP2_EP2, **{**_FULL, "recompute_method": "block"}, mtp_num_layers=1)
    assert sum(one.calls for one in _calls(block) if one.component == "experts.counts") == 20 + 4


def test_prediction_layer_without_experts() -> None:
    """It is built like the last decoder layer, which here has a dense MLP."""
    job = _job(**_TP2_EP2, mtp_num_layers=1, moe_layer_freq=(1, 1, 1, 0))
    assert sum(one.calls for one in _calls(job) if one.component == "experts.counts") == 12


# -- what the router sums --------------------------------------------------------------------------------------------


def _loads(job: Job, version: str | None = None) -> Counter[Row]:
    return _table([one for one in _calls(job, 0, version) if one.component.startswith("router.")])


def test_losses_by_release() -> None:
    load = ("tp_cp", "all_reduce", "int64", 4, 4)
    plain, full = _job(**_TP2_EP2, **_AUX), _job(**_TP2_EP2, **_AUX, **_FULL)
    assert _loads(plain, "0.11") == _loads(plain, "0.19") == {(*load, "forward"): 16}
    assert _loads(full, "0.10") == _loads(full, "0.11") == {(*load, "forward"): 16, (*load, "recompute"): 16}
    assert _loads(full, "0.12") == _loads(full, "0.19") == {(*load, "recompute"): 16}
    # 0.10 sums whatever the coefficient is, and on a group of one rank
    unused = _job(expert_model_parallel_size=2, moe_router_load_balancing_type="aux_loss")
    assert _loads(unused, "0.10") == {(*load, "forward"): 16}
    assert _loads(unused, "0.11") == {}
    assert _loads(_job(expert_model_parallel_size=2, **_AUX), "0.11") == {}


def test_loss_of_each_sequence_by_release() -> None:
    job = _job(**_TP2_EP2, **{**_AUX, "moe_router_load_balancing_type": "seq_aux_loss"})
    assert _loads(job, "0.14") == {("tp_cp", "all_reduce", "int64", 8, 8, "forward"): 16}
    old = {
        ("tp_cp", "all_gather", "float32", 128, 256, "forward"): 16,
        ("tp_cp", "reduce_scatter", "float32", 256, 128, "backward"): 16,
    }
    assert _loads(job, "0.13") == old == _loads(job, "0.11")
    full = _job(**_TP2_EP2, **_FULL, **{**_AUX, "moe_router_load_balancing_type": "seq_aux_loss"})
    assert _loads(full, "0.11") == {**old, ("tp_cp", "all_gather", "float32", 128, 256, "recompute"): 16}
    sigmoid = _job(
        **_TP2_EP2,
        **{**_AUX, "moe_router_load_balancing_type": "seq_aux_loss"},
        moe_router_score_function="sigmoid",
    )
    assert [gap.what for gap in _gaps(sigmoid, version="0.13")] == [
        "seq_aux_loss with a score function other than softmax up to 0.13"
    ]
    assert _gaps(sigmoid, version="0.14") == []


def test_global_loss() -> None:
    job = _job(**_TP2_EP2, **{**_AUX, "moe_router_load_balancing_type": "global_aux_loss"})
    assert _loads(job, "0.15") == {("tp_dp_cp", "all_reduce", "int64", 4, 4, "forward"): 16}
    assert _loads(job, "0.14") == {}
    assert _loads(_job(world_size=1, **{**_AUX, "moe_router_load_balancing_type": "global_aux_loss"})) == {}


def test_losses_without_a_coefficient() -> None:
    types = ("aux_loss", "seq_aux_loss", "global_aux_loss")
    assert _loads(_job(**_TP2_EP2, moe_router_load_balancing_type=types, moe_aux_loss_coeff=(0.0, 0.0, 0.0))) == {}
    assert _loads(_job(**_TP2_EP2, moe_router_load_balancing_type="sinkhorn")) == {}
    assert _loads(_job(**_TP2_EP2, moe_z_loss_coeff=0.001)) == {}


def test_expert_bias() -> None:
    """Once a step for all layers of the rank, on a group of one too. 0.16.1 on two processes: bfloat16 [4 layers, 4]."""
    job = _job(world_size=1, **_BIAS)
    assert _loads(job) == {("tp_dp_cp", "all_reduce", "bfloat16", 16, 16, "other"): 1}
    assert _loads(job, "0.10") == {}
    with_mtp = {**_BIAS, "mtp_num_layers": 2}
    assert [row[3] for row in _loads(_job(world_size=1, **with_mtp))] == [24]
    assert [row[3] for row in _loads(_job(world_size=1, **with_mtp, extra={"mtp_use_repeated_layer": True}))] == [20]
    dense = _job(world_size=1, **_BIAS, moe_layer_freq=(0, 0, 0, 0))
    assert _loads(dense) == {}


# -- losses for the log ----------------------------------------------------------------------------------------------


def _logged(version: str, rank: int = 0, **changes: Any) -> dict[str, list[int]]:
    """Entries of every call for the log, by role."""
    options: dict[str, Any] = {**_TP2_EP2, **_AUX, "framework": "megatron-lm", **changes}
    found: dict[str, list[int]] = {}
    for one in _calls(_job(**options), rank, version):
        if one.component == "experts.losses for the log":
            assert (one.op, one.dtype, one.phase, one.calls) == ("all_reduce", "float32", "other", one.calls)
            found.setdefault(one.role, []).extend([one.in_elems] * one.calls)
    return found


def test_logged_losses_by_release() -> None:
    """What the tracker of every release reduced, executed alone: pipeline, the router's group, averages over replicas."""
    assert _logged("0.10") == _logged("0.11") == {"pp": [4], "tp_cp": [4]}
    assert _logged("0.12") == _logged("0.13") == {"pp": [4], "tp_cp": [4]}
    assert _logged("0.14") == _logged("0.15") == {"pp": [4], "tp_cp": [4], "dp_cp": [4]}
    assert _logged("0.16") == _logged("0.17") == {"pp": [4], "tp_cp": [4], "dp": [4]}
    assert _logged("0.18") == _logged("0.19") == {"pp": [4], "tp_cp": [4], "dp": [4]}


def test_logged_without_a_coefficient() -> None:
    """The name is taken from the option, and nobody has recorded a group."""
    unused: dict[str, Any] = {"moe_aux_loss_coeff": 0.0}
    assert _logged("0.11", **unused) == {}
    assert _logged("0.10", **unused) == {"pp": [4], "tp_cp": [4]}
    assert _logged("0.13", **unused) == {"pp": [4]}
    assert _logged("0.15", **unused) == {"pp": [4], "dp_cp": [4]}
    assert _logged("0.16", **unused) == {"pp": [4]}
    assert _logged("0.18", **unused) == {"pp": [4], "dp": [4]}
    assert _logged("0.18", moe_router_load_balancing_type="none") == {}


def test_logged_names_are_parts_of_words() -> None:
    """One type is a string, and "aux_loss" is part of "global_aux_loss": two names, of which one was recorded."""
    whole: dict[str, Any] = {"moe_router_load_balancing_type": "global_aux_loss"}
    assert _logged("0.16", **whole) == {"pp": [4, 4], "tp_dp_cp": [4]}
    assert _logged("0.15", **whole) == {"pp": [4, 4], "tp_dp_cp": [4], "dp_cp": [4, 4]}
    assert _logged("0.18", **whole) == {"pp": [4, 4], "tp_dp_cp": [4], "dp": [4]}
    sequence: dict[str, Any] = {"moe_router_load_balancing_type": "seq_aux_loss"}
    assert _logged("0.16", **sequence) == {"pp": [4, 4], "tp_cp": [4], "dp": [4]}
    assert _logged("0.13", **sequence) == {"pp": [4], "tp_cp": [4]}
    several: dict[str, Any] = {
        "moe_router_load_balancing_type": ("seq_aux_loss", "global_aux_loss"),
        "moe_aux_loss_coeff": (0.1, 0.1),
    }
    assert _logged("0.16", **several) == {"pp": [4, 4], "tp_cp": [4], "tp_dp_cp": [4], "dp": [4]}
    assert _logged("0.14", **several) == {"pp": [4], "tp_cp": [4], "dp_cp": [4]}


def test_logged_z_loss() -> None:
    z_loss: dict[str, Any] = {"moe_z_loss_coeff": 0.001, "moe_router_load_balancing_type": "none"}
    assert _logged("0.11", **z_loss) == _logged("0.13", **z_loss) == _logged("0.17", **z_loss) == {"pp": [4]}
    assert _logged("0.15", **z_loss) == {"pp": [4], "dp_cp": [4]}
    assert _logged("0.18", **z_loss) == {"pp": [4], "dp": [4]}
    assert _logged("0.19", **z_loss) == {"pp": [4], "tp_dp_cp": [4], "dp": [4]}


def test_logged_on_a_stage_without_experts() -> None:
    stages: dict[str, Any] = {"world_size": 8, "pipeline_model_parallel_size": 2, "moe_layer_freq": (0, 0, 1, 1)}
    assert _logged("0.16", **stages) == {"pp": [4]}
    assert _logged("0.16", 4, **stages) == {"pp": [4], "tp_cp": [4], "dp": [4]}
    assert _logged("0.18", **stages) == {"pp": [4], "dp": [4]}
    assert _logged("0.11", **stages) == {}
    predicted = {**stages, "mtp_num_layers": 1}
    assert _logged("0.16", 4, **predicted)["pp"] == [5]
    assert _logged("0.18", **predicted)["pp"] == [5]
    assert _logged("0.12", 4, **predicted)["pp"] == [4]


def test_logged_groups_of_one() -> None:
    alone: dict[str, Any] = {
        "world_size": 1,
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
        "expert_model_parallel_size": 1,
    }
    assert _logged("0.13", **alone) == {"pp": [4]}
    assert _logged("0.16", **alone) == {"pp": [4], "tp_cp": [4], "dp": [4]}


def test_log_is_megatron_lm_s() -> None:
    assert _logged("0.16", framework="megatron-core") == {}
    job = _job(**_TP2_EP2, **_AUX, framework="nemo")
    assert _loads(job)
    assert [gap.what for gap in _gaps(job)] == ["losses of the experts: framework unknown"]


# -- what has no rule ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "variable_seq_lengths",
        "sft",
        "hybrid_context_parallel",
        "dataloader_inter_document_masking",
        "rampup_batch_size",
        "hybrid_layer_pattern",
        "hybrid_override_pattern",
        "heterogeneous_layers_config_path",
        "use_legacy_models",
        "moe_router_padding_for_quantization",
        "moe_router_padding_for_fp8",
        "fp32_residual_connection",
        "moe_paged_stash",
    ],
)
def test_gaps_by_flag(name: str) -> None:
    fields: dict[str, Any] = {name: True} if name in Job.__dataclass_fields__ else {"extra": {name: True}}
    if name.startswith("moe_router_padding"):
        fields |= {"fp8": "hybrid"}
    if name == "rampup_batch_size":
        fields = {"extra": {name: [16, 8, 1000]}} if "extra" in fields else {name: (16, 8, 1000)}
    if name in ("hybrid_layer_pattern", "hybrid_override_pattern", "heterogeneous_layers_config_path"):
        fields = {"extra": {name: "ME"}} if "extra" in fields else {name: "ME"}
    assert name in [gap.what for gap in _gaps(_job(**_TP2_EP2, **fields))]
    dense = {**_TP2, "num_experts": None, **fields}
    assert _gaps(_job(**dense)) == []


def test_other_gaps() -> None:
    job = _job(
        **_TP2_EP2,
        overlap_moe_expert_parallel_comm=True,
        recompute_granularity="selective",
        recompute_modules=("moe",),
    )
    assert [gap.what for gap in _gaps(job)] == ["recompute_modules moe with overlap_moe_expert_parallel_comm"]
    quantiles = _job(**_TP2_EP2, moe_router_load_balancing_type="quantile_balancing")
    assert [gap.roles for gap in _gaps(quantiles, version="0.19")] == [("tp_cp", "dp_cp")]
    fused = {"extra": {"use_grouped_gemm_for_shared_expert": True}}
    assert [gap.roles for gap in _gaps(_job(**_TP2_EP2, **fused))] == [("tp",)]
    assert _gaps(_job(expert_model_parallel_size=2, **fused)) == []
    biased = _job(add_bias_linear=True, moe_token_dispatcher_type="allgather", expert_model_parallel_size=2)
    assert [gap.roles for gap in _gaps(biased, version="0.12")] == [("tp_ep",)]
    assert _gaps(biased, version="0.13") == []


def test_single_grid() -> None:
    job = _job(**_TP2_EP2, framework="megatron-lm", **_BIAS)
    assert _calls(job, version="0.9") == []
    assert [(gap.what, gap.roles) for gap in _gaps(job, version="0.9")] == [
        ("experts in megatron-core <=0.9", ("ep", "etp", "tp_ep", "tp_cp", "tp_dp_cp"))
    ]


def test_dense_model() -> None:
    job = _job(**_TP2, num_experts=None, framework="megatron-lm")
    for version in ("0.9", "0.10", "0.16", "0.19"):
        assert _calls(job, version=version) == []
        assert _gaps(job, version=version) == []


# -- properties ------------------------------------------------------------------------------------------------------

_MIRROR = {"all_to_all": "all_to_all", "all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}


@st.composite
def _jobs(draw: st.DrawFn) -> Job:
    tp, etp, ep, cp, pp = (draw(st.sampled_from([1, 2, 4])) for _ in range(5))
    grids = max(tp * cp, etp * ep)
    options: dict[str, Any] = {}
    capacity = draw(st.sampled_from([None, 0.7, 1.0, 1.3]))
    if capacity:
        options = {
            "moe_expert_capacity_factor": capacity,
            "moe_pad_expert_input_to_capacity": draw(st.booleans()),
        }
    if draw(st.booleans()):
        options |= _FULL
    return _job(
        **options,
        world_size=grids * pp * draw(st.sampled_from([1, 3])),
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        num_experts=draw(st.sampled_from([4, 8])),
        moe_router_topk=draw(st.sampled_from([1, 2, 3])),
        moe_router_dtype=draw(st.sampled_from([None, "fp32"])),
        moe_token_dispatcher_type=draw(st.sampled_from(["alltoall", "allgather"])),
    )


@settings(max_examples=60, deadline=None)
@given(job=_jobs(), version=st.sampled_from(["0.10", "0.12", "0.16", "0.19"]))
def test_balanced_exchange(job: Job, version: str) -> None:
    """Every rank sends what it gets; a gather multiplies by its group, a scatter divides; backward mirrors forward."""
    calls = _calls(job, version=version)
    size = {role: job.layout.group_size(role) for role in ("ep", "etp", "tp_ep")}
    for one in calls:
        assert one.group_size == size[one.role] > 1
        factor = {
            "all_to_all": Fraction(1),
            "all_gather": Fraction(size[one.role]),
            "reduce_scatter": Fraction(1, size[one.role]),
        }[one.op]
        assert one.out_elems == one.in_elems * factor
    forward, again, backward = (
        _table([one for one in calls if one.phase == phase]) for phase in ("forward", "recompute", "backward")
    )
    counts = {row for row in forward if row[2] in ("int64", "bool")}
    assert backward == Counter(
        {
            (role, _MIRROR[op], dtype, got, sent, "backward"): n
            for (role, op, dtype, sent, got, _), n in forward.items()
            if (role, op, dtype, sent, got, "forward") not in counts
        }
    )
    repeated = Counter({(*row[:5], "recompute"): n for row, n in forward.items()})
    assert again == (repeated if job.recompute_granularity else Counter())
