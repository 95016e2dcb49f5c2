"""Tokens per second, MFU and HFU of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from traceanalyzer.job import Job
from traceanalyzer.run import Run

OpenRun = Callable[..., Run]
NewRows = Callable[[], Any]


def small(**changes: Any) -> Job:
    """One rank, 2 layers, hidden 8, 4 heads of 2, ffn 16, vocabulary 32, sequence 4, batch 3: 12 tokens."""
    fields = {
        "world_size": 1,
        "num_layers": 2,
        "hidden_size": 8,
        "ffn_hidden_size": 16,
        "num_attention_heads": 4,
        "seq_length": 4,
        "padded_vocab_size": 32,
        "micro_batch_size": 3,
        "global_batch_size": 3,
        "bf16": True,
    }
    return Job(**{**fields, **changes})


def a_step(rows: Any, device: str) -> Any:
    rows.rank(0, 0, 2000, device_name=device, world_size=1)
    rows.step(0, 1, 0, 1000)
    return rows


def test_throughput(open_run: OpenRun, new_rows: NewRows) -> None:
    run = open_run(a_step(new_rows(), "NVIDIA A100-SXM4-80GB"), small(recompute_granularity="selective"))
    (row,) = run.query("throughput")
    shares = {name: row.pop(name) for name in ("tokens_per_s_per_device", "mfu", "hfu")}
    assert row == {
        "rank": 0,
        "step": 1,
        "dur_ns": 1000,
        "tokens": 12,
        "model_flops": 96768.0,  # 12 x 3 x (2 x (2 x 512 + 64) + 2 x 256), see tests/test_flops.py
        "hardware_flops": 98304.0,  # 12 x (3 x 2688 + 2 x 64)
        "device_name": "NVIDIA A100-SXM4-80GB",
        "dtype": "bfloat16",
        "peak_tflops": 312.0,
        "reason": None,
    }
    assert shares == {
        "tokens_per_s_per_device": pytest.approx(12e6),
        "mfu": pytest.approx(96768 / 312e6),  # 1 us at 312 TFLOP/s: 312e6 operations
        "hfu": pytest.approx(98304 / 312e6),
    }


def test_the_peak_may_be_given(open_run: OpenRun, new_rows: NewRows) -> None:
    run = open_run(a_step(new_rows(), "Test GPU"), small())
    (unknown,) = run.query("throughput")
    assert (unknown["tokens"], unknown["peak_tflops"], unknown["mfu"]) == (12, None, None)
    (given,) = run.query("throughput", peak_tflops=100)
    assert given["peak_tflops"] == 100.0
    assert given["mfu"] == pytest.approx(96768 / 100e6)


def test_without_a_job(open_run: OpenRun, new_rows: NewRows) -> None:
    (row,) = open_run(a_step(new_rows(), "NVIDIA B200")).query("throughput")
    assert row["reason"] == "no job is known: give --job, or import with it"
    assert (row["dur_ns"], row["tokens"], row["mfu"]) == (1000, None, None)


def test_a_job_with_a_part_of_no_rule(open_run: OpenRun, new_rows: NewRows) -> None:
    (row,) = open_run(a_step(new_rows(), "NVIDIA B200"), small(moe_latent_size=4)).query("throughput")
    assert row["reason"] == "no rule counts the operations of a job with moe_latent_size"
    assert row["model_flops"] is None
    assert (row["tokens"], row["tokens_per_s_per_device"]) == (12, pytest.approx(12e6))  # tokens need no rule
