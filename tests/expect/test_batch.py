"""The broadcast of the micro-batch over the tensor-parallel group, by release and stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from traceanalyzer import expect
from traceanalyzer.job import Job

TOKENS, MASK = 2 * 32, 2 * 32 * 32  # B * S, B * S * S


def _broadcasts(job: Job, rank: int = 0) -> dict[str, tuple[str, int, int]]:
    """Type, elements and calls per step by component."""
    rows = [row for row in expect.expected(job, rank).calls if row.op == "broadcast" and row.role == "tp"]
    assert {row.phase for row in rows} <= {"forward"}
    return {row.component.removeprefix("data: "): (row.dtype, row.in_elems, row.calls) for row in rows}


def _unknown(job: Job, rank: int = 0) -> list[str]:
    return [entry.what for entry in expect.expected(job, rank).not_modelled if entry.what.startswith("data broadcast")]


def _job(tiny: Callable[..., Job], version: str = "0.16.1", **options: Any) -> Job:
    return tiny(**{"framework": "megatron-lm", "megatron_core_version": version, "num_microbatches": 3, **options})


ALL: dict[str, tuple[str, int, int]] = {
    "tokens": ("int64", TOKENS, 3),
    "labels": ("int64", TOKENS, 3),
    "loss mask": ("float32", TOKENS, 3),
    "attention mask": ("bool", MASK, 3),
    "position ids": ("int64", TOKENS, 3),
}


@pytest.mark.parametrize(
    ("version", "packing"), [("0.5.0", 0), ("0.15.0", 0), ("0.16.1", 6), ("0.17.0", 3), ("0.19.0", 0)]
)
def test_one_stage(tiny: Callable[..., Job], version: str, packing: int) -> None:
    lengths = {"packing length": ("int64", 1, packing), "packing offsets": ("int32", 0, packing)} if packing else {}
    assert _broadcasts(_job(tiny, version)) == ALL | lengths


def test_stages_of_a_pipeline(tiny: Callable[..., Job]) -> None:
    job = _job(tiny, world_size=6, pipeline_model_parallel_size=3, num_layers=3)
    first = {name: ALL[name] for name in ("tokens", "attention mask", "position ids")}
    last = {name: ALL[name] for name in ("labels", "loss mask", "attention mask")}
    assert _broadcasts(job, 0) == first | {"packing length": ("int64", 1, 6), "packing offsets": ("int32", 0, 6)}
    assert _broadcasts(job, 2) == {}
    assert _broadcasts(job, 4) == last | {"packing length": ("int64", 1, 3), "packing offsets": ("int32", 0, 3)}
    assert _unknown(job, 2) == []


@pytest.mark.parametrize(("version", "chunks"), [("0.12.0", 1), ("0.13.0", 2), ("0.14.0", 2), ("0.15.0", 1)])
def test_chunks_of_an_interleaved_pipeline(tiny: Callable[..., Job], version: str, chunks: int) -> None:
    job = _job(
        tiny,
        version,
        world_size=4,
        num_layers=4,
        num_microbatches=4,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
    )
    assert _broadcasts(job)["tokens"] == ("int64", TOKENS, 4 * chunks)


@pytest.mark.parametrize(
    ("version", "packing"), [("0.12.0", 0), ("0.15.0", 0), ("0.16.1", 6), ("0.17.0", 3), ("0.19.0", 0)]
)
def test_prediction_takes_tokens_on_the_last_stage(tiny: Callable[..., Job], version: str, packing: int) -> None:
    """It embeds them again: up to 0.15 tokens and positions beside labels and mask, since 0.16 as with one stage."""
    job = _job(tiny, version, world_size=4, pipeline_model_parallel_size=2, mtp_num_layers=1)
    lengths = {"packing length": ("int64", 1, packing), "packing offsets": ("int32", 0, packing)} if packing else {}
    assert _broadcasts(job, 2) == ALL | lengths
    assert "labels" not in _broadcasts(job, 0)


def test_prediction_on_a_stage_of_its_own_takes_everything(tiny: Callable[..., Job]) -> None:
    options = {"world_size": 6, "pipeline_model_parallel_size": 3, "mtp_num_layers": 1}
    job = _job(tiny, "0.17.0", **options, pipeline_model_parallel_layout="Ett|m|L")
    assert set(ALL) < set(_broadcasts(job, 2))
    assert set(_broadcasts(job, 4)) == {"labels", "loss mask", "attention mask"}


@pytest.mark.parametrize(("version", "unknown"), [("0.15.0", []), ("0.16.1", ["data broadcast: packed samples"])])
def test_lengths_of_packed_samples_are_data(tiny: Callable[..., Job], version: str, unknown: list[str]) -> None:
    job = _job(tiny, version, sft=True, micro_batch_size=1)
    assert _unknown(job) == unknown
    assert "packing length" not in _broadcasts(job)
    assert _broadcasts(job)["tokens"] == ("int64", 32, 3)


def test_whole_sequence_before_context_parallelism(tiny: Callable[..., Job]) -> None:
    assert _broadcasts(_job(tiny, world_size=4, context_parallel_size=2))["tokens"] == ("int64", TOKENS, 3)


def test_group_of_one(tiny: Callable[..., Job]) -> None:
    assert set(ALL) < set(_broadcasts(_job(tiny, world_size=1, tensor_model_parallel_size=1)))


def test_mask_is_avoidable(document_job: Callable[..., Job]) -> None:
    job = document_job(framework="megatron-lm")
    (mask,) = [row for row in expect.expected(job, 0).calls if row.component == "data: attention mask"]
    assert mask.payload_bytes == 128 << 20
    assert mask.avoidable is not None
    assert mask.avoidable.bytes_per_call == 128 << 20
    assert mask.avoidable.setting == "--no-create-attention-mask-in-dataloader"
    without = document_job(framework="megatron-lm", create_attention_mask_in_dataloader=False)
    assert "attention mask" not in _broadcasts(without)


def test_only_of_megatron_lm(tiny: Callable[..., Job]) -> None:
    assert _broadcasts(tiny()) == {}
    assert _unknown(tiny()) == []
    assert _unknown(tiny(framework="something")) == ["data broadcast: framework unknown"]
    assert _unknown(_job(tiny, "0.4.0")) == ["data broadcast in Megatron-LM <=0.4"]
    assert _broadcasts(_job(tiny, "0.4.0")) == {}
