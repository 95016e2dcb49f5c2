"""Walked jobs: what the queries measure in their rows is what the truth says, to the nanosecond where clocks agree."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.job import Job
from traceanalyzer.run import Run
from traceanalyzer.simulate import START_NS, Simulation, simulate
from traceanalyzer.simulate.costs import Clock, Costs, SlowLink

GPT: dict[str, Any] = {
    "world_size": 8, "num_layers": 4, "hidden_size": 1024, "ffn_hidden_size": 2816, "num_attention_heads": 8, "swiglu": True,
    "seq_length": 1024, "max_position_embeddings": 1024, "position_embedding_type": "rope", "padded_vocab_size": 2048,
    "micro_batch_size": 1, "global_batch_size": 8, "bf16": True, "megatron_core_version": "0.16.1",
}  # fmt: skip
MOE: dict[str, Any] = {
    "num_experts": 8, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True,
    "moe_ffn_hidden_size": 1024,
}  # fmt: skip
TP2PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 pp2 dp2": {**TP2PP2, "use_distributed_optimizer": True},
    "pp4 dp2": {"pipeline_model_parallel_size": 4},
    "pp2 vpp2 dp4": {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
    "tp2 cp2 dp2": {
        "tensor_model_parallel_size": 2, "context_parallel_size": 2, "use_distributed_optimizer": True,
        "overlap_grad_reduce": True, "overlap_param_gather": True,
    },
    "ep4 dp8": {**MOE, "expert_model_parallel_size": 4, "use_distributed_optimizer": True},
    "ep2 pp2 dp4": {**MOE, "expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "recompute": {
        **TP2PP2, "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
        "framework": "megatron-lm",
    },
}  # fmt: skip
COSTS: dict[str, Costs] = {
    "slow gpu": Costs(jitter=0.02, slow_gpu={5: 1.5}),
    "slow host": Costs(ranks_per_node=2, slow_host={2: 5.0, 3: 5.0}),
    "slow link": Costs(ranks_per_node=4, slow_link=(SlowLink(1, 3, 5.0), SlowLink(2, 6, 7.0))),
    "late loader": Costs(slow_host_cost={(1, "data"): 20.0}),
}
CASES = [(layout, Costs(jitter=0.02, ranks_per_node=4), name) for name, layout in LAYOUTS.items()]
CASES += [({**TP2PP2, "framework": "megatron-lm"}, costs, name) for name, costs in COSTS.items()]

KEYS = {
    "step_time": ("time_classes", ("step", "rank")),
    "bubble": ("bubble", ("pipeline", "step", "stage", "rank")),
    "exposed": ("exposed_by_role", ("step", "rank", "role")),
    "arrival": ("arrival_skew", ("step", "role", "op", "rank")),
    "lateness": ("arrival_skew", ("step", "role", "op", "rank")),
}
"""Table of the truth -> the query that measures it, and what names its rows in both."""

Row = dict[str, Any]


def listed(table: dict[str, Any]) -> list[Row]:
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def written(job: dict[str, Any], costs: Costs, path: Path, steps: int = 2) -> Simulation:
    found = simulate(Job(**{**GPT, **job}), steps=steps, costs=costs, seed=3)
    found.write(path)
    return found


def measured(run: Run, table: str) -> dict[tuple[Any, ...], Row]:
    query, keys = KEYS[table]
    rows = {tuple(row[k] for k in keys): row for row in run.query(query)}
    if table == "exposed":  # transfer and waiting are the answer of another query
        for row in run.query("exposed_split"):
            rows[tuple(row[k] for k in keys)] |= row
        for row in rows.values():
            row.update({k: row.get(k) or 0 for k in ("transfer_ns", "waiting_ns", "unsplit_ns")})
    return rows


@pytest.mark.parametrize(("job", "costs", "name"), CASES, ids=[name for *_, name in CASES])
def test_every_figure_equals_the_truth(job: dict[str, Any], costs: Costs, name: str, tmp_path: Path) -> None:
    simulated = written(job, costs, tmp_path / "run.parquet")
    truth = simulated.truth()
    with Run.open(tmp_path / "run.parquet") as run:
        for table, (_, keys) in KEYS.items():
            expected = listed(truth[table])
            rows = measured(run, table)
            if table == "bubble" and "pipeline_model_parallel_size" not in job:
                assert expected == [] == list(rows)
                continue
            assert len(expected) >= 16
            found = [{k: rows[tuple(row[k] for k in keys)][k] for k in row} for row in expected]
            assert found == expected
            if table == "lateness":  # the truth has none of ranks without an earlier call
                known = {tuple(row[k] for k in keys) for row in expected}
                assert all(row["own_ns"] is None for key, row in rows.items() if key not in known)
            else:
                assert len(rows) == len(expected)
        # groups whose ranks do the same work
        same_work = {row["role"] for row in run.query("stragglers")} | {"tp", "dp_cp", "cp", "ep", "edp"}
        caused: dict[tuple[Any, ...], int] = defaultdict(int)
        for row in run.query("stragglers"):
            if row["owner_rank"] is not None and row["caused_waiting_ns"]:
                caused[row["step"], row["role"], row["owner_rank"]] += row["caused_waiting_ns"]
    owners = {
        (r["step"], r["role"], r["owner_rank"]): r["caused_waiting_ns"]
        for r in listed(truth["owners"])
        if r["role"] in same_work
    }
    assert caused == owners
    assert owners or not (costs.jitter or costs.slow_gpu)


CLOCKS = {
    "offset": Clock(offset_ns=-3_000_000),
    "drift": Clock(drift_ppb=200_000),
    "both": Clock(offset_ns=40_000_000, drift_ppb=-150_000),
}


@pytest.mark.parametrize("clock", CLOCKS.values(), ids=CLOCKS)
def test_clocks_are_found_within_their_residual(clock: Clock, tmp_path: Path) -> None:
    """Offset, drift and lateness are the truth's up to what the query says is left open, and the rounding of ns."""
    costs = Costs(jitter=0.02, ranks_per_node=4, clocks={"node-0001": clock})
    simulated = written({**TP2PP2, "use_distributed_optimizer": True}, costs, tmp_path / "run.parquet", steps=3)
    truth = simulated.truth()
    with Run.open(tmp_path / "run.parquet") as run:
        clocks = {row["rank"]: row for row in run.query("clocks")}
        late = measured(run, "arrival")
        residual = {(r["step"], r["role"], r["op"], r["rank"]): r["residual_ns"] for r in run.query("arrival_skew")}
    assert [row["rank"] for row in listed(truth["clocks"]) if row["offset_ns"] or row["drift_ppb"]] == [4, 5, 6, 7]
    for rank, row in clocks.items():
        set_to = clock if rank >= 4 else Clock()
        assert row["since_ns"] is None
        for since_ns in (0, int(simulated.timeline.programs[0].finish.max()) - START_NS):
            ahead = set_to.offset_ns + set_to.drift_ppb * since_ns / 1e9
            shown = row["offset_ns"] + row["drift_ppb"] * (since_ns + START_NS - row["base_ns"]) / 1e9
            assert abs(shown - ahead) <= row["open_ns"] + 2
        assert row["open_ns"] <= 3_000
    rows = listed(truth["arrival"])
    assert len(rows) >= 48
    for row in rows:
        key = tuple(row[k] for k in KEYS["arrival"][1])
        assert abs(late[key]["late_ns"] - row["late_ns"]) <= (residual[key] + 1) * row["calls"]
