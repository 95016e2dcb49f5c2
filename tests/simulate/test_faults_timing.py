"""Faults in time and in data: the finding that names each comes first, at the right place, and no other is invented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.errors import JobError
from traceanalyzer.job import Job
from traceanalyzer.review import review
from traceanalyzer.run import Run
from traceanalyzer.simulate import Simulation
from traceanalyzer.simulate.costs import Costs
from traceanalyzer.simulate.faults import FAULTS, Chosen, Plan, data, run, timing
from traceanalyzer.simulate.truth import document

Row = dict[str, Any]

PLACES: dict[str, Row] = {
    "hot_expert": {"role": "ep", "axis": "EP", "layer": 1, "ranks": [2, 6]},
    "hot_rank": {"role": "ep", "axis": "EP", "ranks": [2, 6]},
    "uneven_stages": {"axis": "PP", "stage": 0},
    "slow_gpu": {"ranks": [5], "host": "node-0000"},
    "slow_rank_all_peers_late": {"ranks": [5], "host": "node-0000", "stage": 0},
    "slow_host": {"ranks": [4, 5], "host": "node-0002", "stage": 0},
    "slow_link": {"role": "dp_cp", "axis": "DP", "ranks": [1, 3, 5, 7]},
    "slow_direction": {"role": "pp", "axis": "PP", "ranks": [2, 10]},
    "late_loader": {"ranks": [3], "host": "node-0000"},
    "missing_rank": {"ranks": [3]},
    "duplicate_rank": {"ranks": [3]},
    "lost_events": {"ranks": [2]},
    "clock_offset": {"ranks": [8, 9, 10, 11, 12, 13, 14, 15], "host": "node-0001"},
    "clock_drift": {"ranks": [8, 9, 10, 11, 12, 13, 14, 15], "host": "node-0001"},
    "clock_step": {"ranks": [8, 9, 10, 11, 12, 13, 14, 15], "host": "node-0001"},
    "window_cut": {"ranks": [0, 1, 2, 3, 4, 5, 6, 7], "step": 2},
}
"""Fault with its default options -> the place that its finding names."""

SAYS: dict[str, str] = {
    "hot_expert": "Experts of ranks 2, 6 in layer 1 receive up to 1.8",
    "hot_rank": "Ranks 2, 6 receive up to 1.99 times",
    "uneven_stages": "Stage 0 computes",
    "slow_gpu": "Rank 5 is late, and the other ranks of dp_cp, tp wait: its kernels of several classes run longer",
    "slow_rank_all_peers_late": "Rank 5 is late, and the other ranks of dp_cp, tp wait: its kernels of several classes",
    "slow_host": "Ranks 4-5 are late, and the other ranks of dp_cp wait: its host launches work late",
    "slow_link": "reduce_scatter of dp_cp (",
    "slow_direction": "send of pp (16.0 MiB) takes 11.31 times as long from rank 2 to rank 10, and not back,",
    "late_loader": "On rank 3 the device gets its first work of a step up to 20.000 ms later",
    "missing_rank": "1 of 8 ranks is not in this run (3)",
    "duplicate_rank": "Rank 3 was recorded more than once",
    "lost_events": "The recording of rank 2 lost events (file_cut)",
    "clock_offset": "The clock of ranks 8-15 is up to 50.000 ms ahead of that of rank 0",
    "clock_drift": "The clock of ranks 8-15 runs 400 ppm fast against rank 0",
    "clock_step": "Some calls end up to 9.999 ms apart on ranks 8-15 and the others",
    "window_cut": "Behind step 1, the last whole one, ranks 0-7 recorded",
}
"""How its sentence begins."""

MINE = (*timing.FAULTS, *data.FAULTS)


def simulated(name: str, path: Path, jitter: float = 0.01) -> Simulation:
    fault = FAULTS[name]
    found = run(Plan(fault.base(), steps=3, costs=Costs(jitter=jitter)), [Chosen(fault)], seed=1)
    found.write(path)
    return found


def reviewed(path: Path) -> Row:
    with Run.open(path) as opened:
        return review(opened).as_document()


def named(findings: list[Row]) -> list[Row]:
    """Findings that say that something is wrong: not how time is spent where all is well, nor effects of others."""
    return [
        f
        for f in findings
        if f["because_of"] is None
        and f["kind"] != "avoidable"
        and not (f["kind"] == "time" and f["confidence"] == "limit" and not {"ranks", "stage"} & set(f["place"]))
    ]


def step_ns(found: Simulation) -> int:
    """Median step of the truth's first rank; what a review calls a step."""
    table = document(found.timeline, seed=0)["step_time"]
    rank, dur = (table["columns"].index(name) for name in ("rank", "dur_ns"))
    _, middle, _ = sorted(int(row[dur]) for row in table["rows"] if row[rank] == 0)
    return middle


def test_every_fault_is_tested() -> None:
    assert sorted(f.name for f in MINE) == sorted(PLACES) == sorted(SAYS)


SIMILAR = ("slow_gpu", "clock_offset")
"""Faults of which another here shows the same and more."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SIMILAR else ()) for name in PLACES]
)
def test_the_finding_comes_first_and_alone(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    found = simulated(name, tmp_path / "run.parquet")
    findings = reviewed(tmp_path / "run.parquet")["findings"]
    first = findings[0]
    assert (first["code"], first["kind"], first["because_of"]) == (fault.finding, fault.kind, None)
    assert first["place"] == PLACES[name]
    assert first["sentence"].startswith(SAYS[name])
    assert [f["code"] for f in named(findings)] == [fault.finding]
    for entry in found.faults:
        assert entry["finding"] == fault.finding
        where = entry["where"]
        assert "rank" not in where or where["rank"] in first["place"]["ranks"]
        assert set(where.get("ranks", ())) <= set(first["place"].get("ranks", ()))
        assert all(
            where[k] == first["place"][k]
            for k in ("role", "stage", "host", "step", "layer")
            if k in first["place"] and k in where
        )
    if fault.kind == "time":
        # the ceiling is one: without the fault the step is not shorter by more
        costs: Row = {"slow_gpu": {}, "slow_host": {}, "slow_host_cost": {}, "slow_link": ()}
        healthy = run(Plan(fault.base(), steps=3, costs=found.timeline.costs.with_changes(**costs)), seed=1)
        saved = step_ns(found) - step_ns(healthy)
        assert 0 < saved <= first["gain_ns_at_most"]


@pytest.mark.parametrize(
    ("name", "options", "job", "says"),
    [
        ("slow_gpu", {"rank": 99}, {}, "rank 99, and the job has ranks 0 to 15"),
        ("hot_rank", {}, {}, "no expert parallelism"),
        ("hot_expert", {"expert": 8}, timing.MOE, "expert 8, and the job has experts 0 to 7"),
        ("clock_offset", {"rank": 1}, {"world_size": 8}, "all ranks are on node-0000"),
        ("slow_host", {"ranks_per_node": 16}, {}, "all ranks are on node-0000"),
        ("uneven_stages", {"stage": 1}, {"pipeline_model_parallel_size": 1}, "no such pipeline stage"),
        ("lost_events", {"kept": 1.0}, {}, "above 0 and below 1"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(name: str, options: Row, job: Row, says: str) -> None:
    with pytest.raises(JobError, match=says):
        FAULTS[name].apply(Plan(Job(**{**timing.DENSE, **job})), **options)


HEALTHY: dict[str, Row] = {
    "tp2 pp2 dp4": dict(timing.DENSE),
    "dp8": {
        **timing.DENSE,
        "world_size": 8,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "sequence_parallel": False,
        "framework": "megatron-lm",
    },
    "pp4 dp2": {
        **timing.DENSE,
        "world_size": 8,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 4,
        "sequence_parallel": False,
        "num_layers": 8,
        "global_batch_size": 16,
    },
    "pp2 vpp2": {**timing.DENSE, "world_size": 8, "num_layers_per_virtual_pipeline_stage": 2, "num_layers": 8},
    "moe": dict(timing.MOE),
}


CASES = [
    pytest.param(layout, jitter, marks=() if jitter and layout in ("tp2 pp2 dp4", "moe") else pytest.mark.slow)
    for layout in HEALTHY
    for jitter in (0.0, 0.02)
]


@pytest.mark.parametrize(("layout", "jitter"), CASES)
def test_a_healthy_run_has_no_fault(layout: str, jitter: float, tmp_path: Path) -> None:
    found = run(Plan(Job(**HEALTHY[layout]), steps=3, costs=Costs(jitter=jitter, ranks_per_node=4)), seed=2)
    found.write(tmp_path / "run.parquet")
    document = reviewed(tmp_path / "run.parquet")
    assert document["verdict"]["word"] == "match"
    assert named(document["findings"]) == []
    assert not any(f["code"] in ("bubble", "overlap_without_effect") for f in document["findings"])
    # where tokens go to experts by chance, some rank has most of them, and the others wait for it
    assert layout == "moe" or not any(row["slow"] for row in document["skew"])
