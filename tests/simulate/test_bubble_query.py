"""The bubble that the query measures in simulated pipelines is the one they were made with."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from traceanalyzer.run import Run
from traceanalyzer.simulate import simulate_programs
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
