"""The bubble that the query measures in simulated pipelines is the one they were made with."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from traceanalyzer.job import Job
from traceanalyzer.run import Run
from traceanalyzer.simulate import Collected, simulate, simulate_programs
from traceanalyzer.simulate.costs import Costs
from traceanalyzer.simulate.program import Walked


def one_forward_one_backward(stages: int, microbatches: int) -> list[list[tuple[str, int, int]]]:
    """Each stage's passes: as many forward ones first as stages follow, then one of each in turn."""
    orders = []
    for stage in range(stages):
        ahead = stages - 1 - stage
        order = [("F", 0, m) for m in range(ahead)]
        for m in range(microbatches):
            order += [("F", 0, ahead + m)] if ahead + m < microbatches else []
            order.append(("B", 0, m))
        orders.append(order)
    return orders


@pytest.mark.parametrize("links", ["free", "plain"])
def test_one_forward_one_backward(
    pipeline: Callable[..., Walked], free_links: Costs, plain_costs: Costs, tmp_path: Path, links: str
) -> None:
    """4 stages, 8 micro-batches, a backward pass of twice the forward: 3/11 with free links, more with others; column by
    column what the simulation's truth says."""
    walked = pipeline(one_forward_one_backward(4, 8), 1000, 2000)
    made = simulate_programs(walked, costs=free_links if links == "free" else plain_costs)
    made.write(tmp_path / "run.parquet")
    truth = made.truth()["bubble"]
    with Run.open(tmp_path / "run.parquet") as run:
        found = run.query("bubble").rows()
    assert [[row[name] for name in truth["columns"]] for row in found] == truth["rows"]
    share = {Fraction(row["bubble_ns"], row["window_ns"]) for row in found}
    assert share == {Fraction(3, 11)} if links == "free" else min(share) > Fraction(3, 11)


def test_ranks_that_were_not_profiled_are_left_out(tmp_path: Path) -> None:
    """TP2 PP2: ranks 0 and 2, one pipeline, have kernels; of 1 and 3 the host's ranges alone were recorded."""
    job = Job(
        world_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, num_layers=2, hidden_size=64,
        num_attention_heads=4, seq_length=32, vocab_size=96, micro_batch_size=1, num_microbatches=2,
        position_embedding_type="rope",
        megatron_core_version="0.16.1", bf16=True,
    )  # fmt: skip
    simulate(job, collected=Collected(profiled=[0, 2])).write(tmp_path / "run.parquet")
    simulate(job, collected=Collected(profiled=[])).write(tmp_path / "hooks.parquet")
    for name, expected in (
        ("run", [(0, "kernels", 2), (2, "kernels", 2)]),
        ("hooks", [(0, "marks", 2), (2, "marks", 2), (1, "marks", 2), (3, "marks", 2)]),
    ):
        with Run.open(tmp_path / f"{name}.parquet") as run:
            rows = run.query("bubble").rows()
        assert [(r["rank"], r["evidence"], r["stages_recorded"]) for r in rows] == expected
