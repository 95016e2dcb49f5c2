"""The truth of simulated runs: by hand for small ones, and equal to what the queries measure in their rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from traceanalyzer.run import Run
from traceanalyzer.simulate import Simulation, simulate_programs, truth
from traceanalyzer.simulate.costs import Clock, Costs
from traceanalyzer.simulate.program import (
    Begin,
    Call,
    Compute,
    End,
    Group,
    Host,
    Instruction,
    Phase,
    Program,
    Sync,
    Wait,
    Walked,
    Where,
)

Make = Callable[..., Any]


def listed(table: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def tp(*body: Instruction) -> Walked:
    return Walked([Program((0, 1), list(body))], [Group("tp", (0, 1), "TENSOR_MODEL_PARALLEL_GROUP")])


def test_waiting_is_the_late_ranks_fault(plain_costs: Costs, kernel: Make, call: Make) -> None:
    # twice: rank 1 computes 40 ns longer, then both share 100 ns latency + 100 ns transfer
    part = [kernel([10, 50]), call("all_reduce", "tp", 25)]
    found = simulate_programs(tp(*part, *part, Sync()), costs=plain_costs).truth()
    assert listed(found["step_time"]) == [
        # rank 0: 0-1 the first launch takes its time, 1-11, 251-261 computing, then communication; 501 is the end
        {
            "step": 0, "rank": rank, "dur_ns": 501, "compute_ns": compute, "communication_ns": 500 - compute, "pp_ns": 0,
            "copy_ns": 0, "launch_starved_ns": 0, "idle_ns": 1, "overlapped_ns": 0, "shared_ns": 0,
        }
        for rank, compute in ((0, 20), (1, 100))
    ]  # fmt: skip
    parts = ("exposed_ns", "transfer_ns", "waiting_ns", "unsplit_ns")
    assert [[r[p] for p in parts] for r in listed(found["exposed"])] == [[480, 400, 80, 0], [400, 400, 0, 0]]
    assert [list(r.values())[3:] for r in listed(found["arrival"])] == [
        [0, 2, 0, 0, 480, 400, 80],
        [1, 2, 2, 80, 400, 400, 0],
    ]
    # of the first call nothing is known before it; the second is late by rank 1's own work
    assert found["lateness"]["rows"] == [[0, "tp", "all_reduce", 0, 0, 0], [0, "tp", "all_reduce", 1, 40, 0]]
    assert found["owners"]["rows"] == [[0, "tp", 1, 1, 40]]


def test_lateness_is_followed_to_its_owner(plain_costs: Costs, kernel: Make, call: Make) -> None:
    # rank 1 is late in tp (0, 1); that makes rank 0 late in dp (0, 2), which rank 2 waits for
    groups = [
        Group("tp", (0, 1), "TP"),
        Group("tp", (2, 3), "TP"),
        Group("dp", (0, 2), "DP"),
        Group("dp", (1, 3), "DP"),
    ]
    start = [call("all_reduce", "world", 0)]
    groups.append(Group("world", (0, 1, 2, 3), "default_pg"))
    body = [*start, kernel([10, 70, 10, 10]), call("all_reduce", "tp", 0), kernel(5), call("all_reduce", "dp", 0)]
    found = simulate_programs(Walked([Program((0, 1, 2, 3), body)], groups), costs=plain_costs).truth()
    rows = {(r["role"], r["rank"]): (r["own_ns"], r["inherited_ns"]) for r in listed(found["lateness"])}
    assert [rows["tp", r] for r in range(4)] == [(0, 0), (60, 0), (0, 0), (0, 0)]
    assert [rows["dp", r] for r in range(4)] == [(0, 60), (0, 60), (0, 0), (0, 0)]
    assert found["owners"]["rows"] == [[0, "dp", 1, 2, 120], [0, "tp", 1, 1, 60]]


def test_hidden_communication_is_not_exposed(plain_costs: Costs, kernel: Make, call: Make) -> None:
    body = [
        kernel(50),
        call("reduce_scatter", "dp_cp", 50, handle=1),
        kernel(500, "backward"),
        Wait(1),
        kernel(1),
        Sync(),
    ]
    walked = Walked([Program((0, 1), body)], [Group("dp_cp", (0, 1), "DATA_PARALLEL_GROUP_WITH_CP")])
    found = simulate_programs(walked, costs=plain_costs).truth()
    for row in listed(found["exposed"]):
        # 100 latency + half of 200 bytes
        assert {k: row[k] for k in ("busy_ns", "overlapped_ns", "exposed_ns", "shared_ns")} == {
            "busy_ns": 200,
            "overlapped_ns": 200,
            "exposed_ns": 0,
            "shared_ns": 0,
        }
    # without a handle the same call is exposed wholly
    body[1] = call("reduce_scatter", "dp_cp", 50)
    body[3:4] = []
    found = simulate_programs(walked, costs=plain_costs).truth()
    assert [(r["overlapped_ns"], r["exposed_ns"]) for r in listed(found["exposed"])] == [(0, 200), (0, 200)]


def test_a_late_host_starves_the_device(plain_costs: Costs, kernel: Make) -> None:
    found = simulate_programs(
        Walked([Program((0,), [kernel(10), Host("data"), kernel(10), Sync()])], []), costs=plain_costs
    ).truth()
    # 0-1 launch, 1-11 kernel, 11-1001 nothing launched, 1001-1002 launch, 1002-1012 kernel
    (row,) = listed(found["step_time"])
    assert (row["dur_ns"], row["compute_ns"], row["launch_starved_ns"], row["idle_ns"]) == (1012, 20, 990, 2)


def test_clocks_and_hangs_are_told(plain_costs: Costs, kernel: Make) -> None:
    costs = plain_costs.with_changes(clocks={"node-0000": Clock(5, 7), "1": Clock(step_ns=9, step_at_ns=3)})
    found = simulate_programs(tp(kernel(1)), costs=costs).truth()
    assert found["clocks"]["rows"] == [[0, "node-0000", 5, 7, 0, 0], [1, "node-0000", 0, 0, 9, 3]]
    assert found["hang"] is None
    assert json.loads(truth.text(found)) == found


def many(stages: int = 2, tensor: int = 2, data: int = 4, microbatches: int = 4, seed: int = 0) -> Walked:
    """A job of all kinds of calls: 1F1B, a call and two kernels a layer, overlapped reductions, a batch of gathers."""
    rng = np.random.default_rng(seed)
    per = tensor * data
    world = tuple(range(stages * per))
    groups = [Group("world", world, "default_pg")]
    at = np.arange(len(world)).reshape(stages, data, tensor)
    for s in range(stages):
        groups += [Group("tp", tuple(g.tolist()), "TENSOR_MODEL_PARALLEL_GROUP") for g in at[s]]
        groups += [Group("dp_cp", tuple(g.tolist()), "DATA_PARALLEL_GROUP_WITH_CP") for g in at[s].T]
    pipelines = at.reshape(stages, per).T
    groups += [Group("pp", tuple(g.tolist()), "PIPELINE_MODEL_PARALLEL_GROUP") for g in pipelines]
    programs = []
    for stage in range(stages):
        ranks = tuple(at[stage].ravel().tolist())
        body: list[Instruction] = [Host("data")]

        def work(phase: Phase, microbatch: int, layer: int, ranks: tuple[int, ...] = ranks) -> Compute:
            flops = rng.integers(10**9, 3 * 10**10, len(ranks))
            return Compute("gemm_kernel", "gemm", flops, 0, Where(phase, microbatch, 0, layer))

        ahead = stages - 1 - stage
        order = [("F", m) for m in range(ahead)]
        for m in range(microbatches - ahead):
            order += [("F", ahead + m), ("B", m)]
        order += [("B", m) for m in range(microbatches - ahead, microbatches)]
        handles = []
        for kind, m in order:
            phase: Phase = "forward" if kind == "F" else "backward"
            down = kind == "F"

            def message(op: str, to: int, handle: int | None = None, m: int = m, phase: Phase = phase) -> Call:
                peer = np.array([r % per + to * per for r in ranks])  # noqa: B023 - called at once
                stream = f"pp {phase} {op}"
                return Call(
                    "pp", op, "BFloat16", 4_096_000, 4_096_000, Where(phase, m), peer=peer, handle=handle, stream=stream
                )

            body.append(Begin(f"ta:microbatch {m}"))
            before, after = (stage - 1, stage + 1) if down else (stage + 1, stage - 1)
            if 0 <= before < stages:
                body.append(message("recv", before))
            for layer in range(3):
                where = Where(phase, m, 0, layer)
                body += [
                    work(phase, m, layer),
                    Call("tp", "all_reduce", "BFloat16", 10**6, 10**6, where),
                    work(phase, m, layer),
                ]
                if kind == "B" and m == microbatches - 1:
                    handles.append(len(body))
                    body.append(Call("dp_cp", "reduce_scatter", "Float", 4 * 10**6, 10**6, where, handle=len(body)))
            if 0 <= after < stages:
                handles.append(len(body))
                body.append(message("send", after, len(body)))
            body.append(End())
        body += [Wait(handle) for handle in handles]
        optimizer = Where("optimizer")
        body.append(Compute("multi_tensor_apply_kernel", "optimizer", 0, 10**8, optimizer))
        for part in (1000, 3000):
            body.append(Call("dp_cp", "all_gather", "BFloat16", part, 4 * part, optimizer, handle=-1, coalesce=0))
        body += [Wait(-1, host=True), Call("world", "all_reduce", "Float", 1, 1, Where("other")), Sync()]
        programs.append(Program(ranks, body))
    return Walked(programs, groups)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Simulation, Run]]:
    """A simulated run of 16 ranks and two steps, and the same opened from its rows."""
    found = simulate_programs(many(), steps=2, costs=Costs(jitter=0.05))
    path = tmp_path_factory.mktemp("run") / "run.parquet"
    found.write(path)
    with Run.open(path) as run:
        yield found, run


KEYS = {
    "step_time": ("time_classes", ("step", "rank")),
    "bubble": ("bubble", ("pipeline", "step", "stage", "rank")),
    "exposed": ("exposed_by_role", ("step", "rank", "role")),
    "arrival": ("arrival_skew", ("step", "role", "op", "rank")),
    "lateness": ("arrival_skew", ("step", "role", "op", "rank")),
}


@pytest.mark.parametrize("table", list(KEYS))
def test_queries_measure_the_truth(measured: tuple[Simulation, Run], table: str) -> None:
    simulated, run = measured
    query, keys = KEYS[table]
    expected = listed(simulated.truth()[table])
    rows = {tuple(row[k] for k in keys): row for row in run.query(query)}
    if table == "exposed":  # transfer and waiting are the answer of another query
        for row in run.query("exposed_split"):
            rows[tuple(row[k] for k in keys)] |= row
        for row in rows.values():
            row.setdefault("unsplit_ns", 0)
            row.update({k: row[k] or 0 for k in ("transfer_ns", "waiting_ns")})
    assert len(expected) > 15
    assert [{k: rows[tuple(row[k] for k in keys)][k] for k in row} for row in expected] == expected
    assert len(rows) == len(expected)


def test_every_class_and_part_occurs(measured: tuple[Simulation, Run]) -> None:
    found = measured[0].truth()
    sums = {k: sum(r[k] for r in listed(found["step_time"])) for k in found["step_time"]["columns"][2:]}
    assert all(
        sums[k] for k in ("compute_ns", "communication_ns", "pp_ns", "launch_starved_ns", "idle_ns", "overlapped_ns")
    )
    for row in listed(found["step_time"]):
        assert sum(row[f"{c}_ns"] for c in truth.CLASSES) == row["dur_ns"]
    parts = {k: sum(r[k] for r in listed(found["exposed"])) for k in ("transfer_ns", "waiting_ns")}
    assert all(parts.values())


def test_owners_are_those_of_the_stragglers(measured: tuple[Simulation, Run]) -> None:
    simulated, run = measured
    caused: dict[tuple[Any, ...], int] = {}
    for row in run.query("stragglers"):
        if row["owner_rank"] is not None:
            key = (row["step"], row["role"], row["owner_rank"])
            caused[key] = caused.get(key, 0) + row["caused_waiting_ns"]
    expected = {
        (r["step"], r["role"], r["owner_rank"]): r["caused_waiting_ns"]
        for r in listed(simulated.truth()["owners"])
        if r["role"] in ("tp", "dp_cp")
    }
    assert {k: v for k, v in caused.items() if v} == expected


def test_clocks_are_found(tmp_path: Path) -> None:
    clocks = {"node-0001": Clock(offset_ns=-3_000_000)}
    plain, skewed = (simulate_programs(many(), steps=2, costs=Costs(jitter=0.05, clocks=c)) for c in ({}, clocks))
    skewed.write(tmp_path / "run.parquet")
    with Run.open(tmp_path / "run.parquet") as run:
        for row in run.query("clocks"):
            assert abs(row["offset_ns"] - (-3_000_000 if row["rank"] >= 8 else 0)) <= 1
            assert row["residual_max_ns"] <= 1
        found = {(r["step"], r["role"], r["op"], r["rank"]): r["late_ns"] for r in run.query("arrival_skew")}
    # the truth has no clock in it
    assert skewed.truth()["arrival"] == plain.truth()["arrival"]
    for row in listed(plain.truth()["arrival"]):
        late = found[row["step"], row["role"], row["op"], row["rank"]]
        assert abs(late - row["late_ns"]) <= 2 * row["calls"]
