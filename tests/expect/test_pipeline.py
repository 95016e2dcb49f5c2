"""Messages between pipeline stages and the shared word embedding, against recordings and runs of real megatron-core."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from traceanalyzer import expect
from traceanalyzer.expect.model import ExpectedCall
from traceanalyzer.job import Job

_P2P = ("send", "recv")
_DESCRIPTIONS = {"PIPELINE_MODEL_PARALLEL_GROUP": "pp", "WORLD": "world", "EMBEDDING_GROUP": "embedding"}
MESSAGE = 32 * 2 * 64  # S * B * H of the small model


def _rows(job: Job, rank: int = 0) -> list[ExpectedCall]:
    return [
        row
        for row in expect.expected(job, rank).calls
        if row.role == "embedding" or (row.role in ("pp", "world") and row.op in _P2P)
    ]


def _table(job: Job, rank: int = 0) -> dict[tuple[str, str, str, str], tuple[str, int, int]]:
    """(role, operation, component, neighbour) -> type, elements, calls."""
    found = {
        (row.role, row.op, row.component, row.peer): (row.dtype, row.in_elems, row.calls) for row in _rows(job, rank)
    }
    assert len(found) == len(_rows(job, rank))
    return found


def _job(tiny: Callable[..., Job], **options: Any) -> Job:
    """The small model of the recordings without tensor parallelism, two stages unless said."""
    stages = options.get("pipeline_model_parallel_size", 2)
    usual = {
        "world_size": stages,
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
        "pipeline_model_parallel_size": stages,
        "num_layers": 4,
        "num_microbatches": 4,
        "padded_vocab_size": 256,
    }
    return tiny(**{**usual, **options})


def _stages(job: Job) -> list[int]:
    """The first rank of every stage."""
    return [job.layout.rank_of(pp=stage) for stage in range(job.pipeline_model_parallel_size)]


# -- recordings ------------------------------------------------------------------------------------------------------


def _recorded(recording: Any, rank: int) -> Counter[tuple[str, str, str, int, int]]:
    """Calls by (role, operation, type, elements, peer); peer -1 for an all-reduce."""
    found: Counter[tuple[str, str, str, int, int]] = Counter()
    for row in recording.rows:
        role, op = _DESCRIPTIONS.get(row["group_kind"]), row["op"].removeprefix("i")
        if int(row["rank"]) == rank and role and (role == "embedding" or op in _P2P):
            peer = int(row["peer"].split("=")[1]) if op in _P2P else -1
            elements = int(row["nelems_in"]) or int(row["nelems_out"])
            found[role, op, row["dtype"], elements, peer] += int(row["count"])
    return found


def _expected(job: Job, rank: int) -> Counter[tuple[str, str, str, int, int]]:
    pipeline = job.layout.group_of("pp", rank)
    assert pipeline is not None
    stage = job.layout.stage(rank)
    step = {"next": 1, "previous": -1}
    found: Counter[tuple[str, str, str, int, int]] = Counter()
    for row in _rows(job, rank):
        assert row.in_elems == row.out_elems
        peer = pipeline[(stage + step[row.peer]) % len(pipeline)] if row.op in _P2P else -1
        found[row.role, row.op, row.dtype, row.in_elems, peer] += row.calls
    return found


def test_recorded_traffic(recording: Any) -> None:
    """Every message with its peer and group, and every call of the embedding group, on every recorded rank."""
    for rank in recording.ranks:
        recorded = _recorded(recording, rank)
        assert _expected(recording.job, rank) == recorded, f"rank {rank}"
        assert bool(recorded) == (recording.job.pipeline_model_parallel_size > 1)


def test_nothing_unknown_in_recordings(recording: Any) -> None:
    if recording.job.use_megatron_fsdp:
        return
    for rank in recording.ranks[:1]:
        unknown = expect.expected(recording.job, rank).not_modelled
        assert not [entry for entry in unknown if entry.what.startswith("pipeline")]
        assert not [entry for entry in unknown if "embedding" in entry.roles]


# -- runs of real code -----------------------------------------------------------------------------------------------


# Messages of each stage per step: (send next, receive previous, send previous, receive next), all of 4096 bfloat16, as
# megatron-core 0.16.1 made them on a fake process group with the small model and the options; 4 micro-batches unless said.
FOUR_PLAIN = [(4, 0, 0, 4), (4, 4, 4, 4), (4, 4, 4, 4), (0, 4, 4, 0)]
FOUR_RING = [(16, 8, 8, 16), (16, 16, 16, 16), (16, 16, 16, 16), (8, 16, 16, 8)]
_RING: dict[str, Any] = {
    "pipeline_model_parallel_size": 4,
    "virtual_pipeline_model_parallel_size": 2,
    "num_layers": 8,
    "num_microbatches": 8,
}
_UNEVEN: dict[str, Any] = {
    "num_layers": 6,
    "decoder_first_pipeline_num_layers": 1,
    "decoder_last_pipeline_num_layers": 1,
}
RUNS: list[tuple[str, dict[str, Any], list[tuple[int, int, int, int]]]] = [
    ("uneven split", {"pipeline_model_parallel_size": 4, **_UNEVEN}, FOUR_PLAIN),
    # The first and last stage hold no decoder layer.
    ("layout", {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "E|tt|tt|L"}, FOUR_PLAIN),
    ("batch_p2p_comm off", {"pipeline_model_parallel_size": 4, "batch_p2p_comm": False}, FOUR_PLAIN),
    (
        "6 micro-batches",
        {"pipeline_model_parallel_size": 4, "num_microbatches": 6},
        [(6, 0, 0, 6), (6, 6, 6, 6), (6, 6, 6, 6), (0, 6, 6, 0)],
    ),
    (
        "fewer micro-batches than stages",
        {"pipeline_model_parallel_size": 4, "num_microbatches": 3},
        [(3, 0, 0, 3), (3, 3, 3, 3), (3, 3, 3, 3), (0, 3, 3, 0)],
    ),
    ("2 chunks, overlapped", _RING, FOUR_RING),
    ("2 chunks, batched", {**_RING, "overlap_p2p_comm": False}, FOUR_RING),
    ("2 chunks, groups of 8", {**_RING, "microbatch_group_size_per_vp_stage": 8}, FOUR_RING),
    ("2 chunks, receive early", {**_RING, "overlap_p2p_comm_warmup_flush": True}, FOUR_RING),
]


@pytest.mark.parametrize(("options", "stages"), [run[1:] for run in RUNS], ids=[run[0] for run in RUNS])
def test_runs(tiny: Callable[..., Job], options: dict[str, Any], stages: list[tuple[int, int, int, int]]) -> None:
    job = _job(tiny, **options)
    keys = [
        ("send", "activations", "next", "forward"),
        ("recv", "activations", "previous", "forward"),
        ("send", "gradients", "previous", "backward"),
        ("recv", "gradients", "next", "backward"),
    ]
    for rank, counts in zip(_stages(job), stages, strict=True):
        found = {(row.op, row.component, row.peer, row.phase): row for row in _rows(job, rank) if row.role == "pp"}
        assert {key: row.calls for key, row in found.items()} == {
            key: count for key, count in zip(keys, counts, strict=True) if count
        }
        assert {(row.dtype, row.in_elems, row.out_elems) for row in found.values()} == {("bfloat16", 4096, 4096)}


# megatron-core 0.16.1, two stages, 2 chunks, overlap_p2p_comm, groups of 3, 6 micro-batches; rank 0 and rank 1.
def test_two_stages_with_single_messages(tiny: Callable[..., Job]) -> None:
    job = _job(tiny, virtual_pipeline_model_parallel_size=2, num_microbatches=6, microbatch_group_size_per_vp_stage=3)
    embedding = {("embedding", "all_reduce", "word embedding", ""): ("float32", 256 * 64, 1)}
    assert _table(job, 0) == embedding | {
        ("pp", "send", "activations", "next"): ("bfloat16", MESSAGE, 12),
        ("world", "recv", "activations", "previous"): ("bfloat16", MESSAGE, 6),
        ("pp", "send", "gradients", "previous"): ("bfloat16", MESSAGE, 6),
        ("world", "recv", "gradients", "next"): ("bfloat16", MESSAGE, 12),
    }
    assert _table(job, 1) == embedding | {
        ("world", "send", "activations", "next"): ("bfloat16", MESSAGE, 6),
        ("pp", "recv", "activations", "previous"): ("bfloat16", MESSAGE, 12),
        ("world", "send", "gradients", "previous"): ("bfloat16", MESSAGE, 12),
        ("pp", "recv", "gradients", "next"): ("bfloat16", MESSAGE, 6),
    }


def test_reference_counts(tiny: Callable[..., Job]) -> None:
    """Reference 2.10: PP2, 2 chunks, M4: 12 sends on the pipeline's group and 12 receives on the default group."""
    rows = _rows(_job(tiny, virtual_pipeline_model_parallel_size=2))
    assert sum(row.calls for row in rows if (row.role, row.op) == ("pp", "send")) == 12
    assert sum(row.calls for row in rows if (row.role, row.op) == ("world", "recv")) == 12
    assert {(row.role, row.op) for row in rows} == {("pp", "send"), ("world", "recv"), ("embedding", "all_reduce")}


@pytest.mark.parametrize(
    ("version", "options", "roles"),
    [
        ("0.7.0", {}, {"pp"}),
        ("0.8.0", {}, {"pp", "world"}),
        ("0.11.0", {"pipeline_model_parallel_comm_backend": "ucc"}, {"pp", "world"}),
        ("0.12.0", {"pipeline_model_parallel_comm_backend": "ucc"}, {"pp"}),
        ("0.12.0", {"pipeline_model_parallel_comm_backend": "nccl"}, {"pp", "world"}),
        ("0.19.0", {}, {"pp", "world"}),
        ("0.19.0", {"overlap_p2p_comm": False}, {"pp"}),
        ("0.19.0", {"overlap_p2p_comm": False, "batch_p2p_comm": False}, {"pp", "world"}),
    ],
)
def test_default_group_by_release(
    tiny: Callable[..., Job], version: str, options: dict[str, Any], roles: set[str]
) -> None:
    job = _job(tiny, megatron_core_version=version, virtual_pipeline_model_parallel_size=2, **options)
    for rank in (0, 1):
        assert {row.role for row in _rows(job, rank) if row.op in _P2P} == roles
        assert sum(row.calls for row in _rows(job, rank) if row.op in _P2P) == 24


def test_releases_are_named(tiny: Callable[..., Job]) -> None:
    job = _job(tiny, virtual_pipeline_model_parallel_size=2)
    assert {(row.role, row.versions) for row in _rows(job) if row.op in _P2P} == {("pp", ""), ("world", ">=0.8")}


def test_default_group_without_interleaving(tiny: Callable[..., Job]) -> None:
    assert {row.role for row in _rows(_job(tiny)) if row.op in _P2P} == {"pp"}
    assert set(_table(_job(tiny, batch_p2p_comm=False))) == {
        ("pp", "send", "activations", "next"),
        ("world", "recv", "gradients", "next"),
        ("embedding", "all_reduce", "word embedding", ""),
    }


# megatron-core 0.16.1 in two processes, variable_seq_lengths (2 layers): each message and its shape, 4 times.
def test_shapes(tiny: Callable[..., Job]) -> None:
    job = _job(tiny, num_layers=2, variable_seq_lengths=True)
    embedding = {("embedding", "all_reduce", "word embedding", ""): ("float32", 16384, 1)}
    assert _table(job, 0) == embedding | {
        ("pp", "send", "activations", "next"): ("bfloat16", 4096, 4),
        ("pp", "recv", "gradients", "next"): ("bfloat16", 4096, 4),
        ("pp", "send", "shapes of activations", "next"): ("int64", 3, 4),
        ("pp", "recv", "shapes of gradients", "next"): ("int64", 3, 4),
    }
    assert _table(job, 1) == embedding | {
        ("pp", "recv", "activations", "previous"): ("bfloat16", 4096, 4),
        ("pp", "send", "gradients", "previous"): ("bfloat16", 4096, 4),
        ("pp", "recv", "shapes of activations", "previous"): ("int64", 3, 4),
        ("pp", "send", "shapes of gradients", "previous"): ("int64", 3, 4),
    }
    # The scheduling code of 0.11.0, 0.13.1, 0.16.1, 0.17.0 and 0.19.0: shapes stay on the pipeline's group.
    single = _job(tiny, variable_seq_lengths=True, virtual_pipeline_model_parallel_size=2)
    shapes = {key: value for key, value in _table(single, 0).items() if key[2].startswith("shapes")}
    assert {key[0] for key in shapes} == {"pp"}
    assert sorted(count for _, _, count in shapes.values()) == [4, 4, 8, 8]


# megatron-core 0.16.1 in four processes, 2 micro-batches, mtp_num_layers 1, layout Ett|tt|m|L. That run left the prediction
# stage out of the embedding group, whose stages Megatron-LM gives to megatron-core (get_mtp_ranks).
def test_prediction_before_the_last_stage(tiny: Callable[..., Job]) -> None:
    job = _job(
        tiny,
        pipeline_model_parallel_size=4,
        num_microbatches=2,
        mtp_num_layers=1,
        pipeline_model_parallel_layout="Ett|tt|m|L",
    )
    short, long = ("bfloat16", 4096, 2), ("bfloat16", 8192, 2)
    messages = [{key: value for key, value in _table(job, rank).items() if value[0] == "bfloat16"} for rank in range(4)]
    assert messages == [
        {("pp", "send", "activations", "next"): short, ("pp", "recv", "gradients", "next"): short},
        {
            ("pp", "send", "activations", "next"): short,
            ("pp", "recv", "activations", "previous"): short,
            ("pp", "send", "gradients", "previous"): short,
            ("pp", "recv", "gradients", "next"): short,
        },
        {
            ("pp", "send", "activations", "next"): long,
            ("pp", "recv", "activations", "previous"): short,
            ("pp", "send", "gradients", "previous"): short,
            ("pp", "recv", "gradients", "next"): long,
        },
        {("pp", "recv", "activations", "previous"): long, ("pp", "send", "gradients", "previous"): long},
    ]
    for rank in range(4):
        shapes = [row for row in _rows(job, rank) if row.component.startswith("shapes")]
        assert {(row.dtype, row.in_elems, row.calls) for row in shapes} == {("int64", 3, 2)}
        assert len(shapes) == len(messages[rank])
    sharing = [rank for rank in range(4) if any(row.role == "embedding" for row in _rows(job, rank))]
    assert sharing == [0, 2, 3]


def test_prediction_before_the_last_stage_interleaved(tiny: Callable[..., Job]) -> None:
    """Only the last chunk's messages are longer, from the prediction stage on; the ring closes before them."""
    job = _job(
        tiny,
        pipeline_model_parallel_size=2,
        num_layers=3,
        num_microbatches=2,
        overlap_p2p_comm=False,
        mtp_num_layers=1,
        pipeline_model_parallel_layout="Et|tt|m|L",
    )
    for rank, forward, backward in ((0, "next", "next"), (1, "previous", "previous")):
        sizes = Counter(
            {
                (row.op, row.in_elems): row.calls
                for row in _rows(job, rank)
                if row.peer in (forward, backward) and row.dtype == "bfloat16"
            }
        )
        assert sizes == {("send", 4096): 2, ("send", 8192): 2, ("recv", 4096): 2, ("recv", 8192): 2}
    ring = {(row.op, row.in_elems, row.calls) for row in _rows(job, 0) if row.peer == "previous" and row.in_elems > 3}
    assert ring == {("send", 4096, 2), ("recv", 4096, 2)}


def test_prediction_on_the_last_stage(tiny: Callable[..., Job]) -> None:
    """megatron-core 0.16.1, untied: no shapes, messages as ever, but the embedding is shared with the prediction."""
    options: dict[str, Any] = {"mtp_num_layers": 1, "untie_embeddings_and_output_weights": True, "num_layers": 2}
    for rank in (0, 1):
        table = _table(_job(tiny, **options), rank)
        assert table.pop(("embedding", "all_reduce", "word embedding", "")) == ("float32", 16384, 1)
        assert set(table.values()) == {("bfloat16", 4096, 4)}
        older = _job(tiny, megatron_core_version="0.11.0", **options)
        assert not [row for row in _rows(older, rank) if row.role == "embedding"]


# -- sizes -----------------------------------------------------------------------------------------------------------


def test_message_of_the_document(document_job: Callable[..., Job]) -> None:
    """8192/(2*4) * 2 * 8192 elements of bf16 are 32 MiB (errata E2; the document's own example has 16)."""
    job = document_job(world_size=64, pipeline_model_parallel_size=4, context_parallel_size=2, num_microbatches=8)
    (row,) = [row for row in _rows(job) if row.op == "send"]
    assert (row.in_elems, row.payload_bytes, row.calls) == (1024 * 2 * 8192, 32 << 20, 8)
    assert row.off_rank_bytes == 32 << 20
    whole = document_job(
        world_size=64,
        pipeline_model_parallel_size=4,
        context_parallel_size=2,
        num_microbatches=8,
        sequence_parallel=False,
    )
    assert {row.in_elems for row in _rows(whole)} == {4096 * 2 * 8192}


@pytest.mark.parametrize(
    ("version", "options", "length"),
    [
        ("0.13.0", {}, 32),
        ("0.14.0", {}, 16),
        ("0.16.1", {"virtual_pipeline_model_parallel_size": 2}, 32),
    ],
)
def test_length_of_the_decoder(tiny: Callable[..., Job], version: str, options: dict[str, Any], length: int) -> None:
    job = _job(tiny, megatron_core_version=version, decoder_seq_length=16, **options)
    assert {row.in_elems for row in _rows(job) if row.op in _P2P} == {length * 2 * 64}


def test_type(tiny: Callable[..., Job]) -> None:
    def types(**options: Any) -> set[str]:
        return {row.dtype for row in _rows(_job(tiny, **options)) if row.op in _P2P}

    assert types(bf16=False) == {"float32"}
    assert types(bf16=False, fp16=True) == {"float16"}
    assert types(fp32_residual_connection=True, megatron_core_version="0.17.0") == {"float32"}


def test_embedding(tiny: Callable[..., Job]) -> None:
    def embedding(rank: int = 0, **options: Any) -> list[tuple[str, str, int, int, str]]:
        rows = [row for row in _rows(_job(tiny, **options), rank) if row.role == "embedding"]
        return [(row.op, row.dtype, row.in_elems, row.calls, row.phase) for row in rows]

    one = [("all_reduce", "float32", 256 * 64, 1, "other")]
    four: dict[str, Any] = {"pipeline_model_parallel_size": 4}
    assert [embedding(rank, **four) for rank in range(4)] == [one, [], [], one]
    half = embedding(world_size=4, tensor_model_parallel_size=2, sequence_parallel=True)
    assert half == [("all_reduce", "float32", 128 * 64, 1, "other")]
    # megatron-core 0.16.1, distributed optimizer, gradients reduced in bf16.
    narrow = embedding(world_size=4, use_distributed_optimizer=True, grad_reduce_in_bf16=True)
    assert narrow == [("all_reduce", "bfloat16", 256 * 64, 1, "other")]
    assert embedding(untie_embeddings_and_output_weights=True) == []
    assert embedding(forward_only=True) == []
    assert embedding(world_size=2, pipeline_model_parallel_size=1) == []


def test_forward_only(tiny: Callable[..., Job]) -> None:
    job = _job(tiny, pipeline_model_parallel_size=4, num_microbatches=6, forward_only=True)
    assert _table(job, 1) == {
        ("pp", "send", "activations", "next"): ("bfloat16", MESSAGE, 6),
        ("pp", "recv", "activations", "previous"): ("bfloat16", MESSAGE, 6),
    }


def test_explanation(tiny: Callable[..., Job]) -> None:
    job = _job(tiny, **_RING)
    (row,) = [row for row in _rows(job) if (row.op, row.component) == ("send", "gradients")]
    assert row.formula["in"] == "S_pp/(CP*SP) * B * H = 32/(1*1) * 2 * 64 = 4,096 elements = 8 KiB bf16"
    assert row.formula["calls"] == "M * (v - first) = 8 * (2 - 1) = 8 per step"


def test_one_stage(tiny: Callable[..., Job]) -> None:
    assert _rows(tiny()) == []


def test_conservation(tiny: Callable[..., Job]) -> None:
    """What a stage sends to the next one is what that one receives from the previous, and so backwards."""
    choose = random.Random(2)
    for _ in range(200):
        stages, chunks = choose.randint(2, 6), choose.randint(1, 4)
        group = choose.randint(stages, stages + 3)
        options: dict[str, Any] = {"num_microbatches": choose.randint(1, 20)}
        if chunks > 1:
            options = {
                "num_microbatches": group * choose.randint(1, 4),
                "virtual_pipeline_model_parallel_size": chunks,
                "microbatch_group_size_per_vp_stage": group,
                "overlap_p2p_comm": choose.random() < 0.5,
            }
        job = _job(tiny, pipeline_model_parallel_size=stages, num_layers=stages * chunks, **options)
        tables = [_table(job, rank) for rank in _stages(job)]
        for stage, table in enumerate(tables):
            following = tables[(stage + 1) % stages]

            def of(table: dict[Any, Any], op: str, component: str, peer: str) -> set[Any]:
                return {value for key, value in table.items() if key[1:] == (op, component, peer)}

            assert of(table, "send", "activations", "next") == of(following, "recv", "activations", "previous")
            assert of(following, "send", "gradients", "previous") == of(table, "recv", "gradients", "next")


# -- gaps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "what", "role"),
    [
        ({"pipeline_model_parallel_comm_backend": "ucc"}, "pipeline_model_parallel_comm_backend=ucc", "pp"),
        ({"variable_seq_lengths": True}, "variable_seq_lengths: sizes of messages", "pp"),
        ({"fp32_residual_connection": True}, "fp32_residual_connection with pipeline stages in <=0.16", "pp"),
        ({"extra": {"use_ring_exchange_p2p": True}}, "use_ring_exchange_p2p", "world"),
        ({"extra": {"export_kd_teacher_load": "/teacher"}}, "export_kd_teacher_load", "pp"),
        ({"extra": {"enable_mhc_connections": True}}, "enable_mhc_connections", "pp"),
        ({"extra": {"encoder_pipeline_model_parallel_size": 1}}, "encoder with its own stages", "embedding"),
        ({"extra": {"has_cond_embedder": True}}, "has_cond_embedder", "pp"),
        ({"use_torch_fsdp2": True}, "shared word embedding under fully sharded", "embedding"),
    ],
)
def test_gaps(tiny: Callable[..., Job], options: dict[str, Any], what: str, role: str) -> None:
    def found(job: Job) -> list[tuple[str, ...]]:
        return [entry.roles for entry in expect.expected(job, 0).not_modelled if entry.what.startswith(what)]

    (roles,) = found(_job(tiny, **options))
    assert role in roles
    assert found(_job(tiny)) == []


def test_gap_closed_by_release(tiny: Callable[..., Job]) -> None:
    job = _job(tiny, fp32_residual_connection=True, megatron_core_version="0.17.0")
    assert not [entry for entry in expect.expected(job, 0).not_modelled if "fp32_residual" in entry.what]
