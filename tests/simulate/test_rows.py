"""The rows of simulated runs: literal ones of a few calls, and what every query library needs of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from traceanalyzer import schema
from traceanalyzer.run import Run
from traceanalyzer.simulate import START_NS, Collected, Simulation, simulate_programs
from traceanalyzer.simulate.costs import Clock, Costs
from traceanalyzer.simulate.program import (
    Begin,
    Call,
    Compute,
    End,
    Group,
    Host,
    Instruction,
    Program,
    Sync,
    Walked,
    Where,
)
from traceanalyzer.simulate.rows import META_SIMULATED, group_names

Make = Callable[..., Any]
DESCRIPTIONS = {"world": "default_pg", "tp": "TENSOR_MODEL_PARALLEL_GROUP", "ep": "EXPERT_MODEL_PARALLEL_GROUP"}


def walked() -> Walked:
    """Two ranks: a forward kernel, an all-reduce, an exchange of uneven rows, a backward kernel, a batch of messages."""
    forward = Where("forward", microbatch=0, chunk=0, layer=1, component="mlp.fc2")
    backward = Where("backward", microbatch=0, layer=1)
    peers = np.array([1, 0])
    body: list[Instruction] = [
        Host("data"),
        Begin("ta:microbatch 0"),
        Compute("sm90_xmma_gemm_bf16", "gemm", np.array([10, 50]), 0, forward),
        Call("tp", "all_reduce", "BFloat16", 50, 50, forward),
        Call(
            "ep",
            "all_to_all",
            "BFloat16",
            np.array([8, 12]),
            np.array([12, 8]),
            forward,
            in_splits=np.array([[4, 4], [8, 4]]),
            out_splits=np.array([[4, 8], [4, 4]]),
            row_elems=4,
        ),
        Compute("sm90_xmma_gemm_bf16", "gemm", 20, 0, backward),
        Call("tp", "send", "Float", 5, 5, backward, peer=peers, coalesce=0, handle=1),
        Call("tp", "recv", "Float", 5, 5, backward, peer=peers, coalesce=0, handle=1),
        End(),
        Call("world", "barrier", "Byte", 0, 0, Where("other")),
        Sync(),
    ]
    groups = [Group(role, (0, 1), DESCRIPTIONS[role]) for role in ("world", "tp", "ep")]
    return Walked([Program((0, 1), body, {"memory.parameters_bytes": np.array([7, 9])})], groups)


@pytest.fixture
def written(plain_costs: Costs, tmp_path: Path) -> Callable[..., Run]:
    """Simulates ``walked`` for two steps from step 5 on and opens what was written."""

    def make(collected: Collected | None = None, costs: Costs = plain_costs, **more: Any) -> Run:
        simulated: Simulation = simulate_programs(
            walked(), steps=2, first_step=5, costs=costs, collected=collected, **more
        )
        simulated.write(tmp_path / "run.parquet")
        return Run.open(tmp_path / "run.parquet")

    return make


def test_calls_of_one_rank(written: Callable[..., Run]) -> None:
    with written() as run:
        rows = run.tuples(
            f"""SELECT source, call_id, coalesce_id, op, op_raw, group_id, group_size, group_rank, seq, dtype, peer, in_elems,
                       out_elems, in_splits, out_splits, is_async, t_issue_ns - {START_NS}, start_ns - {START_NS}, dur_ns,
                       completeness
                FROM comm WHERE rank = 1 AND recorded_step = 5 ORDER BY call_id"""
        )
    both = "hook, kineto"
    # 1000 of data, 1002 the kernel of 50 starts, 1052 + 100 latency + 100 bytes
    assert rows == [
        (both, 0, 0, "all_reduce", "allreduce", "1", 2, 1, 0, "bfloat16", None, 50, 50, None, None, False, 1001, 1051, 200,
         "full"),
        # 8 elements of 2 bytes leave rank 1 or come to rank 0
        (both, 1, 1, "all_to_all", "alltoall_base", "2", 2, 1, 0, "bfloat16", None, 12, 8, [2, 1], [1, 1], False, 1002, 1251,
         116, "full"),
        # launched as one with the next: c10d counts them once, as a collective of the group
        (both, 2, 2, "send", "send", "1", 2, 1, 1, "float32", 0, 5, 5, None, None, True, 1004, 1387, 120, "full"),
        (both, 3, 2, "recv", "recv", "1", 2, 1, 1, "float32", 0, 5, 5, None, None, True, 1005, 1387, 120, "full"),
        (both, 4, 4, "barrier", "barrier", "0", 2, 1, 0, "uint8", None, 0, 0, None, None, False, 1006, 1387, 100, "full"),
    ]  # fmt: skip


def test_places_are_the_hooks_alone(written: Callable[..., Run]) -> None:
    with written() as run:
        places = run.tuples(
            """SELECT source, recorded_step, recorded_microbatch, recorded_chunk, recorded_layer, recorded_phase,
                      recorded_component, call_path
               FROM run WHERE kind = 'comm_record' AND rank = 0 AND call_id IN (0, 9) ORDER BY call_id, source"""
        )
    layer = ["nn.Module: TransformerLayer_1", "ta:microbatch 0", "ta:step 5"]
    assert places == [
        ("hook", 5, 0, 0, 1, "forward", "mlp.fc2", None),
        ("kineto", None, None, None, None, None, None, layer),
        ("hook", 6, None, None, None, "other", None, None),
        ("kineto", None, None, None, None, None, None, ["ta:step 6"]),
    ]


def test_kernels_and_what_launched_them(written: Callable[..., Run]) -> None:
    with written() as run:
        rows = run.tuples(
            f"""SELECT k.name, kernel_class, kernel_op, stream, device, k.start_ns - {START_NS}, k.dur_ns, coalesce_id,
                       join_evidence, l.name, l.start_ns - {START_NS}, l.dur_ns
                FROM kernel k JOIN cpu_op l USING (rank, correlation) WHERE rank = 0 ORDER BY l.start_ns LIMIT 6"""
        )
    arguments = "(ncclDevKernelArgsStorage<4096ul>)"
    gemm, gathered = "sm90_xmma_gemm_bf16", f"ncclDevKernel_SendRecv{arguments}"
    assert rows == [
        (gemm, "gemm", None, 7, 0, 1001, 10, None, None, "cudaLaunchKernel", 1000, 1),
        (f"ncclDevKernel_AllReduce_Sum_bf16_RING_LL{arguments}", "comm", "all_reduce", 21, 0, 1011, 240, 0, "external_id",
         "cudaLaunchKernelExC", 1001, 1),
        (gathered, "comm", "all_to_all", 20, 0, 1251, 116, 1, "external_id", "cudaLaunchKernelExC", 1002, 1),
        (gemm, "gemm", None, 7, 0, 1367, 20, None, None, "cudaLaunchKernel", 1003, 1),
        (gathered, "comm", "send_recv", 21, 0, 1387, 120, 2, "coalesced", "cudaLaunchKernelExC", 1005, 1),
        (f"ncclDevKernel_AllReduce_Sum_f32_RING_LL{arguments}", "comm", "barrier", 22, 0, 1387, 100, 4, "external_id",
         "cudaLaunchKernelExC", 1006, 1),
    ]  # fmt: skip


def test_spans_groups_ranks_and_metrics(written: Callable[..., Run]) -> None:
    with written() as run:
        spans = run.tuples(
            f"""SELECT source, name, category, start_ns - {START_NS}, dur_ns, recorded_step, completeness
                FROM span WHERE rank = 0 AND start_ns < {START_NS + 1007} ORDER BY start_ns, dur_ns DESC, source"""
        )
        groups = run.tuples(
            "SELECT rank, source, group_id, description, ranks, ranks_source FROM process_group ORDER BY ALL"
        )
        ranks = run.tuples(
            "SELECT rank, source, host, device, world_size, source_file, import_status FROM rank ORDER BY rank, source"
        )
        metrics = run.tuples("SELECT rank, key, value, unit, step FROM metric ORDER BY rank")
        said = json.loads(run.metadata[META_SIMULATED])
    assert spans == [
        ("hook", "step 5", "step", 0, 1507, 5, "full"),
        ("kineto", "ta:step 5", "user_annotation", 0, 1507, None, None),
        (
            "kineto",
            "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
            "user_annotation",
            0,
            1000,
            None,
            None,
        ),
        ("hook", "microbatch 0", "microbatch", 1000, 6, 5, None),
        ("kineto", "ta:microbatch 0", "user_annotation", 1000, 6, None, None),
    ]
    assert groups == [
        (rank, "hook", name, DESCRIPTIONS[role], [0, 1], "hook")
        for rank in (0, 1)
        for name, role in (("0", "world"), ("1", "tp"), ("2", "ep"))
    ]
    assert ranks == [
        (rank, source, "node-0000", rank, 2, "simulated", "complete")
        for rank in (0, 1)
        for source in ("hook", "kineto")
    ]
    assert metrics == [(0, "memory.parameters_bytes", 7.0, "bytes", 5), (1, "memory.parameters_bytes", 9.0, "bytes", 5)]
    assert said == {"seed": 0, "steps": 2, "faults": []}


def test_what_was_not_collected_is_not_there(written: Callable[..., Run]) -> None:
    def counts(run: Run) -> dict[tuple[str, str, int], int]:
        with run:
            return {
                (kind, source, rank): n
                for kind, source, rank, n in run.tuples("SELECT kind, source, rank, count(*) FROM run GROUP BY ALL")
            }

    hooks = counts(written(Collected(profiled=[1])))
    assert {k for k in hooks if k[2] == 0} == {
        ("comm_record", "hook", 0),
        ("metric", "hook", 0),
        ("process_group", "hook", 0),
        ("rank", "hook", 0),
        ("span", "hook", 0),
    }
    assert hooks["comm_record", "hook", 1] == hooks["comm_record", "kineto", 1] == 10
    alone = counts(written(Collected(hooks=False)))
    assert {source for _, source, _ in alone} == {"kineto"}
    assert alone["process_group", "kineto", 0] == 3
    assert {rank for _, _, rank in counts(written(Collected(ranks=[1])))} == {1}
    # ranks that are not kept are simulated all the same
    with written(ranks=[0]) as run:
        assert run.tuples("SELECT DISTINCT rank FROM rank") == [(0,)]
        assert run.tuples(f"SELECT dur_ns FROM kernel WHERE start_ns = {START_NS + 1011}") == [(240,)]


def test_clocks_show_other_times(written: Callable[..., Run], plain_costs: Costs) -> None:
    clocks = {"1": Clock(offset_ns=5000, drift_ppb=1_000_000, step_ns=70, step_at_ns=1300)}
    with written(costs=plain_costs.with_changes(clocks=clocks)) as run:
        rows = run.tuples(
            f"""SELECT rank, call_id, t_issue_ns - {START_NS}, start_ns - {START_NS}, dur_ns FROM comm
                WHERE call_id < 3 ORDER BY ALL"""
        )
    assert [r for r in rows if r[0] == 1] == [
        (1, 0, 1001 + 5001, 1051 + 5001, 200),
        (1, 1, 1002 + 5001, 1251 + 5001, 116 + 70),  # ends behind the step
        (1, 2, 1004 + 5001, 1387 + 5071, 120),
    ]


def test_the_same_arguments_give_the_same_bytes(plain_costs: Costs, tmp_path: Path) -> None:
    noisy = plain_costs.with_changes(jitter=0.2)
    hashes = set()
    for name in ("a", "b"):
        found = simulate_programs(walked(), steps=3, costs=noisy, seed=4)
        found.write(tmp_path / name)
        found.write_truth(tmp_path / f"{name}.json")
        files = (tmp_path / name, tmp_path / f"{name}.json")
        hashes.add(tuple(hashlib.sha256(f.read_bytes()).hexdigest() for f in files))
    assert len(hashes) == 1
    simulate_programs(walked(), steps=3, costs=noisy, seed=5).write(tmp_path / "c")
    assert hashlib.sha256((tmp_path / "c").read_bytes()).hexdigest() not in next(iter(hashes))


def test_rows_are_in_order_and_kinds_apart(plain_costs: Costs, tmp_path: Path) -> None:
    simulate_programs(walked(), steps=3, costs=plain_costs).write(tmp_path / "run.parquet")
    table = pq.read_table(tmp_path / "run.parquet", columns=["kind", "rank", "start_ns", "t_issue_ns"])
    rows = list(zip(*(table[c].to_pylist() for c in table.column_names), strict=True))
    keys = [(kind, rank, start if start is not None else issue or 0) for kind, rank, start, issue in rows]
    assert keys == sorted(keys)
    assert {r[0] for r in rows} == set(schema.KINDS) - {"issue", "expert_rows"}


def test_a_hang_leaves_what_was_recorded(plain_costs: Costs, kernel: Make, call: Make, tmp_path: Path) -> None:
    groups = [Group("tp", (0, 1), DESCRIPTIONS["tp"])]
    first = Program((0,), [kernel(5), call("all_reduce", "tp", 1), kernel(5), Sync()])
    found = simulate_programs(
        Walked([first, Program((1,), [kernel(5)])], groups), costs=plain_costs, allow_hang=True, steps=2
    )
    found.write(tmp_path / "run.parquet")
    with Run.open(tmp_path / "run.parquet") as run:
        assert run.tuples("SELECT rank, op, start_ns, dur_ns, completeness FROM comm") == [
            (0, "all_reduce", None, None, "cut")
        ]
        assert run.tuples("SELECT rank, recorded_step, completeness FROM span WHERE source = 'hook' ORDER BY ALL") == [
            (0, 0, "cut"),
            (1, 0, "full"),
            (1, 1, "full"),
        ]
        assert run.import_status == "partial"
        assert run.tuples("SELECT DISTINCT code FROM issue") == [("log_not_ended",)]
    assert found.truth()["hang"] == ["rank 0 waits in all_reduce on tp (forward, step 0) for rank 1"]


def test_names_of_groups() -> None:
    groups = [Group(role, (0, 1), "") for role in ("tp", "world", "pp")]
    assert group_names(groups) == ["1", "0", "2"]


def test_a_batch_of_one_message_has_no_kernel_of_its_own(plain_costs: Costs, call: Make, tmp_path: Path) -> None:
    """batch_isend_irecv launches its kernel behind its last member, without saying whose it is, also if it has one."""
    there, here = np.array([1]), np.array([0])
    costs = plain_costs.with_changes(call_ns=10)
    programs = [
        Program((0,), [call("send", "pp", 5, peer=there, coalesce=0), call("send", "pp", 5, peer=there), Sync()]),
        Program((1,), [call("recv", "pp", 5, peer=here, coalesce=0), call("recv", "pp", 5, peer=here), Sync()]),
    ]
    groups = [Group("pp", (0, 1), "PIPELINE_MODEL_PARALLEL_GROUP")]
    simulate_programs(Walked(programs, groups), costs=costs).write(tmp_path / "run.parquet")
    with Run.open(tmp_path / "run.parquet") as run:
        calls = run.tuples(
            f"""SELECT t_issue_ns - {START_NS}, t_issue_end_ns - {START_NS} FROM run
                WHERE kind = 'comm_record' AND source = 'kineto' AND rank = 0 ORDER BY call_id"""
        )
        kernels = run.tuples(
            f"""SELECT kernel_op, join_evidence, external_id, launch_ns - {START_NS} FROM kernel
                WHERE rank = 0 ORDER BY launch_ns"""
        )
    # each takes 10 ns, of which the launch is the last one
    assert calls == [(0, 9), (10, 20)]
    assert kernels == [("send_recv", "coalesced", None, 9), ("send", "external_id", 2, 19)]


def test_the_profiler_alone_knows_no_reduction(written: Callable[..., Run]) -> None:
    said = "SELECT DISTINCT reduce_op FROM run WHERE kind = 'comm_record' AND op = 'all_reduce'"
    with written() as run:
        assert run.tuples(said) == [("sum",)]
    with written(Collected(hooks=False)) as run:
        assert run.tuples(said) == [(None,)]
