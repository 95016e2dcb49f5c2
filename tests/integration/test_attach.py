"""Real jobs under ``traceanalyzer attach``: every call is caught and explained, and the job's results stay as they are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.run import Run

MEGATRON = {
    "tp2_sp": 2,
    "pp2_interleaved": 2,
    "dp2_distopt_overlap": 2,
    "ep2": 2,
    "ep2_allgather": 2,
    "cp2": 2,
    "tp2_pp2_interleaved": 4,
    "pp2_dp2_distopt": 4,
    "tp2_pp2_cp2_ep2_distopt": 8,
}


def explained(attached: Any, processes: int) -> None:
    """The diff of the run with what it says of its own job has nothing left over."""
    code, found = attached.diff("--min-coverage", "1")
    wrong = [
        {
            key: c[key]
            for key in ("role", "op", "phase", "stage", "dtype", "calls_expected", "calls_measured", "verdict")
        }
        for c in found["cells"]
        if c["verdict"] not in ("match", "avoidable")
    ]
    assert not wrong, wrong
    coverage = found["coverage"]
    assert (coverage["ranks_present"], coverage["ranks_declared"]) == (list(range(processes)), processes)
    assert coverage["calls_of_unknown_bytes"] == 0
    assert (coverage["attributed"], coverage["judged"]) == (1, 1)
    assert found["job_conflicts"] == []
    assert found["job"]["used"] == "captured"
    assert (found["verdict"], code) == ("match", 0)


# The others repeat what these three hold together (the one of 8 processes has TP, SP, PP, CP, EP and DP at once).
EVERY_TIME = ("pp2_interleaved", "dp2_distopt_overlap", "tp2_pp2_cp2_ep2_distopt")


@pytest.mark.megatron
@pytest.mark.parametrize("name", [n if n in EVERY_TIME else pytest.param(n, marks=pytest.mark.slow) for n in MEGATRON])
def test_megatron_under_the_profiler(name: str, jobs: Any) -> None:
    """A profiler window of two steps on all ranks."""
    pytest.importorskip("megatron.core")
    processes = MEGATRON[name]
    alone = jobs.alone("alone", lambda out: jobs.megatron(name, processes, out))
    assert alone.code == 0, alone.output
    attached = jobs.attached(
        "attached", lambda out: jobs.megatron(name, processes, out), "--steps", "1-2", "--ranks", "all"
    )
    assert attached.code == 0, attached.output
    assert attached.results == alone.results
    assert len(list((attached.run_dir / "trace").glob("*.json.gz"))) == processes
    explained(attached, processes)


@pytest.mark.megatron
@pytest.mark.parametrize("name", ["tp2_sp", pytest.param("pp2_dp2_distopt", marks=pytest.mark.slow)])
def test_megatron_with_hooks_only(name: str, jobs: Any) -> None:
    pytest.importorskip("megatron.core")
    processes = MEGATRON[name]
    alone = jobs.alone("alone", lambda out: jobs.megatron(name, processes, out))
    attached = jobs.attached("attached", lambda out: jobs.megatron(name, processes, out), "--no-profile")
    assert attached.code == alone.code == 0, attached.output
    assert attached.results == alone.results
    assert not list((attached.run_dir / "trace").glob("*"))
    explained(attached, processes)


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("name", "evidence"), [pytest.param("ep2", "splits", marks=pytest.mark.slow), ("ep2_allgather", "counts")]
)
def test_rows_of_experts(name: str, evidence: str, jobs: Any) -> None:
    """What the run holds, and the balance made of it, is what the job's own routers say."""
    pytest.importorskip("megatron.core")
    job = jobs.attached("attached", lambda out: jobs.megatron(name, 2, out), "--no-profile")
    assert job.code == 0, job.output
    repeats = 2 if name == "ep2_allgather" else 1  # forward, and again before the backward pass
    sent: dict[tuple[int, int, int], list[int]] = {}  # (step, micro-batch, layer) -> rows of each expert, of both ranks
    for layer in (0, 1):
        calls = [[counts for number, counts in job.results[rank]["routed"] if number == layer] for rank in (0, 1)]
        assert [len(c) for c in calls] == [3 * 2 * repeats] * 2
        for i, pair in enumerate(zip(*calls, strict=True)):
            sent[i // repeats // 2, i // repeats % 2, layer] = [sum(counts) for counts in zip(*pair, strict=True)]
    assert {sum(counts) for counts in sent.values()} == {2 * 2 * 32 * 2}  # ranks, sequences, tokens, experts of each
    with Run.open(job.out) as run:
        rows = run.rows(
            "SELECT rank, recorded_step, recorded_microbatch, recorded_layer, recorded_phase, local_expert_rows, "
            "first_expert, ranks, expert_tensor_ranks FROM expert_rows"
        )
        assert sorted(tuple(r.values()) for r in rows) == sorted(
            (rank, *place, phase, counts[2 * rank : 2 * rank + 2], 2 * rank, [0, 1], 1)
            for place, counts in sent.items()
            for rank in (0, 1)
            for phase in ("forward", "recompute")[:repeats]
        )
        balance = [r for r in run.query("expert_balance").rows() if r["phase"] == "forward"]
        imbalance: dict[int, list[float]] = {step: [] for step in range(3)}
        for (step, _, _), counts in sent.items():
            imbalance[step].append(max(sum(counts[:2]), sum(counts[2:])) / 128)
        assert [(r["step"], r["evidence"], r["passes"], r["whole_passes"], r["imbalance_max"]) for r in balance] == [
            (step, evidence, 4, 4, max(found)) for step, found in imbalance.items()
        ]
        assert {r["contradicted_passes"] for r in balance} == {0 if evidence == "splits" else None}
        assert {r["reason"] for r in balance} == {None}


# -- torch's own ------------------------------------------------------------------------------------------------------

F32 = "float32"
LAYER = 16 * 16 + 16
# job -> calls of one step on one rank: (op, dtype, elements in, elements out) -> how often
STEP: dict[str, dict[tuple[str, str, int, int], int]] = {
    # one bucket of all gradients
    "ddp": {("all_reduce", F32, 3 * LAYER, 3 * LAYER): 1},
    # each of three layers: parameters before forward and before backward, gradients after it
    "fsdp2": {("all_gather", F32, LAYER // 2, LAYER): 6, ("reduce_scatter", F32, LAYER, LAYER // 2): 3},
    # output of the row-parallel layer, and the gradient of the column-parallel layer's input: 4 rows of 16
    "dtensor_tp": {("all_reduce", F32, 4 * 16, 4 * 16): 2},
}


def calls(out: Path) -> dict[tuple[int, int | None], Counter[tuple[Any, ...]]]:
    """(rank, step) -> calls as STEP has them; every one is in a group whose ranks are known."""
    found: dict[tuple[int, int | None], Counter[tuple[Any, ...]]] = {}
    with Run.open(out) as run:
        for row in run.rows(
            "SELECT c.rank, c.recorded_step AS step, c.op, c.dtype, c.in_elems, c.out_elems, c.hook_call, g.ranks "
            "FROM comm c LEFT JOIN process_group g USING (rank, group_id)"
        ):
            assert row["hook_call"] is not None, row  # a call that only the profiler saw
            if row["op"] != "barrier":
                assert list(row["ranks"]) == [0, 1]
            key = (row["op"], row["dtype"], row["in_elems"], row["out_elems"])
            found.setdefault((row["rank"], row["step"]), Counter())[key] += 1
    return found


@pytest.mark.parametrize("job", STEP)
def test_jobs_of_torch_itself(job: str, jobs: Any) -> None:
    """Calls that come from C++ are caught too. Counts and sizes are worked out by hand above."""
    alone = jobs.alone("alone", lambda out: jobs.command(f"{job}.py", 2, str(out)))
    assert alone.code == 0, alone.output
    attached = jobs.attached(
        "attached", lambda out: jobs.command(f"{job}.py", 2, str(out)), "--steps", "2", "--ranks", "all"
    )
    assert attached.code == 0, attached.output
    assert attached.results == alone.results
    found = calls(attached.out)
    for rank in (0, 1):
        assert found[rank, 2] == STEP[job]
