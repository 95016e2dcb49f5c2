"""Hooks and session: every kind of call of real gloo processes, each once; what a session leaves; that it harms nothing."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.collectors import hooks, record
from traceanalyzer.collectors.session import OPTIONS, Session, current, open_session
from traceanalyzer.collectors.state import state

WORKER = Path(__file__).with_name("core_worker.py")
QUIET = {"marks": False, "control": False}


def run_python(code: str, *args: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *args],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def logs(folder: Path) -> list[Path]:
    return sorted((folder / "log").glob("*.talog")) if (folder / "log").exists() else []


def records(path: Path, kind: str) -> list[list[Any]]:
    found = record.read(path)
    assert found.problem is None
    return [r[1:] for r in found.records if r[0] == kind]


def calls(path: Path) -> list[dict[str, Any]]:
    return [dict(zip(record.CALL, r, strict=True)) for r in records(path, "call")]


# Two gloo processes --------------------------------------------------------------------------------------------------

WORLD = {"name": "0", "description": "default_pg", "backend": "cpu:gloo,cuda:gloo", "ranks": [0, 1], "size": 2}
TP = {**WORLD, "name": "1", "description": "TENSOR_MODEL_PARALLEL_GROUP"}
F32, BF16 = "float32", "bfloat16"


def row(group: str, op: str, method: str, dtype: str | None, sizes: int | tuple[int, int], **more: Any) -> Any:
    """What is told of one call, all of it literal; what is not named is null."""
    sizes = (sizes, sizes) if isinstance(sizes, int) else sizes
    found = {"group": group, "op": op, "method": method, "dtype": dtype, "in_elems": sizes[0], "out_elems": sizes[1]}
    rest = ("reduce_op", "root", "peer", "in_splits", "out_splits", "tensors", "coalesce", "is_async")
    return {**found, **dict.fromkeys(rest), **more}


SYNC: dict[str, Any] = {"is_async": False}
ASYNC: dict[str, Any] = {"is_async": True}
SUM: dict[str, Any] = {"reduce_op": "sum", **SYNC}


def from_python(rank: int) -> dict[str, list[Any]]:
    """Case -> the calls that Python issues."""
    other = 1 - rank
    rows_in, rows_out, n = ([1, 2], [1, 3], (15, 20)) if rank == 0 else ([3, 1], [2, 1], (20, 15))
    fsdp = [row("0", "all_gather", "all_gather_single", F32, (8, 16), **SYNC)] * 4
    fsdp += [row("0", "reduce_scatter", "reduce_scatter_single", F32, (16, 8), reduce_op="avg", **SYNC)] * 2
    return {
        "all_reduce": [row("0", "all_reduce", "allreduce", F32, 10, **SUM)],
        "all_reduce_max": [row("1", "all_reduce", "allreduce", BF16, 7, reduce_op="max", **ASYNC)],
        "all_gather": [row("1", "all_gather", "allgather", F32, (3, 6), **SYNC)],
        "all_gather_into_tensor": [row("1", "all_gather", "all_gather_single", F32, (4, 8), **SYNC)],
        "reduce_scatter": [row("1", "reduce_scatter", "reduce_scatter", F32, (8, 4), **SUM)],
        "reduce_scatter_tensor": [row("1", "reduce_scatter", "reduce_scatter_single", F32, (8, 4), **SUM)],
        "all_to_all": [row("1", "all_to_all", "alltoall", F32, 8, in_splits=[4, 4], out_splits=[4, 4], **SYNC)],
        "all_to_all_single": [row("1", "all_to_all", "all_to_all_single", F32, 4, **SYNC)],
        "all_to_all_uneven": [
            row("1", "all_to_all", "all_to_all_single", F32, n, in_splits=rows_in, out_splits=rows_out, **SYNC)
        ],
        "broadcast": [row("1", "broadcast", "broadcast", "int64", 5, root=1, **SYNC)],
        "reduce": [row("1", "reduce", "reduce", F32, 5, root=1, **SUM)],
        "gather": [row("1", "gather", "gather", F32, (4, 8 if rank == 0 else 0), root=0, **SYNC)],
        "scatter": [row("1", "scatter", "scatter", F32, (8 if rank == 1 else 0, 4), root=1, **SYNC)],
        "early": [row("0", "all_reduce", "allreduce", F32, 10, **SUM)],
        "direct": [row("1", "all_reduce", "allreduce", F32, 9, reduce_op="min")],
        "isend_irecv": [
            row("1", "send", "send", F32, (6, 0), peer=other),
            row("1", "recv", "recv", F32, (0, 6), peer=other),
        ],
        "batch_isend_irecv": [
            row("1", "send", "send", BF16, (3, 0), peer=other),
            row("1", "recv", "recv", BF16, (0, 3), peer=other),
        ],
        "any_source": [
            row("0", "send", "send", F32, (2, 0), peer=1)
            if rank == 0
            else row("0", "recv", "recv_anysource", F32, (0, 2))
        ],
        "coalescing_manager": [
            row("1", "all_gather", "all_gather_single_coalesced", F32, (30, 60), tensors=2, **ASYNC)
        ],
        "all_gather_object": [
            row("0", "all_gather", "allgather", "int64", (1, 2), **SYNC),
            row("0", "all_gather", "allgather", "uint8", (24, 48), **SYNC),
        ],
        "barrier": [row("1", "barrier", "barrier", None, 0, **SYNC)],
        "backward": [row("0", "all_reduce", "allreduce", F32, 6, **SUM)],
        "inference_mode": [row("0", "all_reduce", "allreduce", F32, 3, **SUM)],
        "wrong_arguments": [row("0", "broadcast", "broadcast", F32, 3)],
        "functional": [],
        "functional_inference": [],
        "make_ddp": [],
        "ddp_step": [],
        "make_fsdp2": [],
        "fsdp2_step": fsdp,
        "dtensor": [row("0", "scatter", "scatter", F32, (4 if rank == 0 else 0, 2), root=0, **SYNC)],
    }


MANY = "c10d::allgather_into_tensor_coalesced_"
FROM_NATIVE: dict[str, list[Any]] = {
    "functional": [row("1", "all_reduce", "c10d::allreduce_", F32, 3, **ASYNC)],
    "functional_inference": [row("1", "all_gather", MANY, F32, (2, 4), tensors=1, **ASYNC)],
    "make_ddp": [
        row("1", "all_gather", "c10d::allgather_", "int64", (1, 2), **ASYNC),
        row("1", "broadcast", "c10d::broadcast_", "int64", 8, root=0, **ASYNC),
        row("1", "broadcast", "c10d::broadcast_", F32, 32, root=0, **ASYNC),
    ],
    "ddp_step": [row("1", "all_reduce", "c10d::allreduce_", F32, 32, **ASYNC)],
    "dtensor": [row("0", "all_gather", MANY, F32, (2, 4), tensors=1, **ASYNC)],
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """RUN_DIR that two gloo processes left, by hooks."""
    pytest.importorskip("torch")
    made: dict[str, Path] = {}

    def run(mode: str) -> Path:
        if mode in made:
            return made[mode]
        folder = made[mode] = tmp_path_factory.mktemp(mode)
        processes = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", str(WORKER), str(rank), str(folder / "store"), str(folder), mode],
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            for process in processes:
                output, _ = process.communicate(timeout=180)
                assert process.returncode == 0, output
                assert "traceanalyzer" not in output
        finally:
            for process in processes:
                process.kill()
        return folder

    return run


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("mode", ["methods", "auto", "dispatcher"])
def test_every_kind_of_call_is_recorded_once(recorded: Callable[[str], Path], mode: str, rank: int) -> None:
    folder = recorded(mode)
    facts = json.loads((folder / f"facts{rank}.json").read_text())
    log = logs(folder)[rank]
    assert log.name.startswith(f"r0000{rank}-")
    made = calls(log)
    assert [call["number"] for call in made] == list(range(len(made)))
    said: list[Any] = records(log, "group")
    groups: dict[int, Any] = dict(said)
    expected = from_python(rank)
    if mode != "methods":
        expected |= {name: expected[name] + found for name, found in FROM_NATIVE.items()}
    found = {
        name: [
            {key: groups[call["group"]]["name"] if key == "group" else call[key] for key in row("", "", "", None, 0)}
            for call in made[case["from"] : case["to"]]
        ]
        for name, case in facts["cases"].items()
    }
    assert found == expected
    assert all(call["t_issue_ns"] <= call["t_issue_end_ns"] for call in made)
    assert all(call["tid"] > 0 and call["step"] is None and call["place"] == 0 for call in made)


@pytest.mark.parametrize("mode", ["methods", "auto", "dispatcher"])
def test_groups_and_numbers_of_calls(recorded: Callable[[str], Path], mode: str) -> None:
    folder = recorded(mode)
    by_rank = []
    for rank, log in enumerate(logs(folder)):
        said: list[Any] = records(log, "group")
        # the world is destroyed and made anew: it gets another number, and its calls go on being counted
        assert [group["name"] for _, group in said][:2] == ["0", "1"]
        assert [number for number, _ in said] == sorted({number for number, _ in said})
        assert said[0][1] == said[-1][1] == {**WORLD, "rank": rank}
        assert said[1][1] == {**TP, "rank": rank}
        names = {number: group["name"] for number, group in said}
        numbers: dict[tuple[str, bool], list[int]] = {}
        for call in calls(log):
            numbers.setdefault((names[call["group"]], call["op"] in ("send", "recv")), []).append(call["seq"])
        assert all(seq == list(range(len(seq))) for seq in numbers.values())
        by_rank.append({key: len(seq) for key, seq in numbers.items()})
    assert by_rank[0] == by_rank[1]


@pytest.mark.parametrize("mode", ["methods", "auto", "dispatcher"])
def test_results_are_those_of_the_job_without_us(recorded: Callable[[str], Path], mode: str) -> None:
    for rank in range(2):
        with_us, without = (json.loads((recorded(which) / f"facts{rank}.json").read_text()) for which in (mode, "none"))
        assert [c["result"] for c in with_us["cases"].values()] == [c["result"] for c in without["cases"].values()]
        assert with_us["restored"]
        assert with_us["ddp_restored"]
    assert logs(recorded("none")) == []


def test_the_cheapest_sufficient_hook_is_chosen_and_reported(recorded: Callable[[str], Path]) -> None:
    facts = json.loads((recorded("auto") / "facts0.json").read_text())["cases"]
    assert facts["wrong_arguments"]["dispatcher"] == []
    assert facts["functional"]["dispatcher"] == ["functional collectives"]
    log = logs(recorded("auto"))[0]
    assert records(log, "run")[-1][0]["hooks"]["hooks"]["dispatcher"] == ["functional collectives"]
    assert [i for i in records(log, "issue") if i[0] == "data_loss"] == []
    lost = [i[2] for i in records(logs(recorded("methods"))[0], "issue") if i[1] == "calls_from_cpp_not_seen"]
    assert lost == [
        f"calls that C++ issues for {what} are not recorded: the hooks were limited to methods"
        for what in (
            "functional collectives",
            "DistributedDataParallel",
            "broadcast of buckets from C++",
            "DeviceMesh (FSDP2, DTensor)",
        )
    ]


def test_what_the_log_says_of_the_process(recorded: Callable[[str], Path]) -> None:
    log = logs(recorded("auto"))[1]
    first, *_, last = records(log, "run")
    assert (first[0]["rank"], last[0]["rank"], last[0]["world_size"]) == (None, 1, 2)
    assert log.name == f"r00001-{last[0]['pid']}.talog"
    (end,) = records(log, "end")
    n = len(calls(log))
    assert end == [{"calls": n, "recorded": n, "dropped": 0, "errors": 0, "disabled": None}]
    assert [i[1:3] for i in records(log, "issue")] == [["call_raised", "broadcast raised TypeError"]]


# One process, torch's fake backend ------------------------------------------------------------------------------------


@pytest.fixture
def world() -> Iterator[Any]:
    torch = pytest.importorskip("torch")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist = torch.distributed
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    before = dict(torch._C._distributed_c10d.ProcessGroup.__dict__)
    yield dist
    if (session := current()) is not None:
        session.close()
    assert (state.on, state.log, state.on_disable) == (False, None, [])
    state.disabled = None
    dist.destroy_process_group()
    after = dict(torch._C._distributed_c10d.ProcessGroup.__dict__)
    assert all(after[name] is value for name, value in before.items())


@pytest.fixture
def session(world: Any, tmp_path: Path) -> Session:
    return open_session({"run_dir": str(tmp_path), **QUIET})


def ones(n: int) -> Any:
    import torch

    return torch.ones(n)


@pytest.mark.parametrize("mode", ["methods", "dispatcher"])
def test_ranges_and_records_carry_the_same_numbers(world: Any, tmp_path: Path, mode: str) -> None:
    import torch
    import torch.distributed._functional_collectives as functional

    with open_session({"run_dir": str(tmp_path), "hooks": mode, **QUIET}):
        world.all_reduce(ones(1))
        with torch.profiler.profile(record_shapes=True) as profiler:
            world.all_reduce(ones(3))
            with world._coalescing_manager(device=torch.device("cpu"), async_ops=True):
                world.isend(ones(4), dst=2)
                world.irecv(ones(5), src=1)
            functional.all_reduce(ones(6), "sum", world.group.WORLD)
            world.all_reduce(ones(2))
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ranges = sorted((e for e in events if e.get("name", "").startswith("ta:")), key=lambda e: e["ts"])
    made = calls(logs(tmp_path)[0])
    native = mode == "dispatcher"
    ops = ["all_reduce", "send", "recv", "end_coalescing", *["all_reduce"] * (2 if native else 1)]
    assert [e["name"][3:] for e in ranges] == ops
    numbered = [e["args"] for e in ranges if "call" in e["args"]]
    assert [args["call"] for args in numbered] == [call["number"] for call in made[1:]]
    for args, call in zip(numbered, made[1:], strict=True):
        assert (args["seq"], args["method"], args["in_elems"]) == (call["seq"], call["method"], call["in_elems"])
        assert args.get("coalesce") == call["coalesce"]
    assert [call["coalesce"] for call in made] == [None, None, 0, 0, *[None] * (2 if native else 1)]
    assert [call["peer"] for call in made][2:4] == [2, 1]

    def holds(outer: Any, inner: Any) -> bool:
        return bool(outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"])

    # each of torch's operators has one range: around it, or inside it where C++ issued the call
    operators = [e for e in events if e.get("name", "").startswith("c10d::")]
    assert len(operators) == 5
    for operator in operators:
        from_native = operator["args"]["Input Dims"][0] == [[6]]
        assert sum(holds(r, operator) for r in ranges) == (0 if from_native else 1)
        assert sum(holds(operator, r) for r in ranges) == (1 if from_native and native else 0)


def test_a_dormant_session_records_nothing_until_it_is_activated(world: Any, tmp_path: Path) -> None:
    from traceanalyzer.collectors import dispatch

    session = open_session({"run_dir": str(tmp_path), "dormant": True, "hooks": "dispatcher", **QUIET})
    world.all_reduce(ones(1))
    assert dispatch._dispatcher is None
    session.activate()
    assert dispatch._dispatcher is not None
    world.new_group([0, 1], group_desc="LATE")
    session.step_begins(7)
    world.all_reduce(ones(2))
    session.step_ends(7)
    session.deactivate()
    assert dispatch._dispatcher is None
    world.all_reduce(ones(3))
    session.close()
    log = logs(tmp_path)[0]
    assert [(call["in_elems"], call["step"]) for call in calls(log)] == [(2, 7)]
    assert [group["description"] for _, group in records(log, "group")] == ["default_pg", "LATE"]


def test_a_dormant_session_leaves_torchs_own_methods(world: Any, tmp_path: Path) -> None:
    methods: Any = type(world.group.WORLD)
    names = sorted(name for name in hooks.METHODS if name in methods.__dict__)
    assert {"allreduce", "send", "barrier", "all_gather_single", "_allgather_base"} <= set(names)
    own = {name: methods.__dict__[name] for name in names}

    def replaced() -> list[str]:
        return [name for name in names if methods.__dict__[name] is not own[name]]

    session = open_session({"run_dir": str(tmp_path), "dormant": True, **QUIET})
    assert session.facts["hooks"]["methods"] == len(names)
    assert replaced() == []
    session.activate()
    assert replaced() == names
    world.all_reduce(ones(2))
    theirs = methods.barrier
    methods.barrier = lambda *args, **kwargs: theirs(*args, **kwargs)  # somebody else's, over ours
    session.deactivate()
    assert replaced() == ["barrier"]
    world.barrier()
    session.activate()
    assert replaced() == names
    world.barrier()
    session.close()
    assert replaced() == ["barrier"]
    methods.barrier = own["barrier"]
    assert [call["op"] for call in calls(logs(tmp_path)[0])] == ["all_reduce", "barrier"]


SHORT_WAYS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda world: world.all_reduce(ones(6)),
    "max, of whole numbers, not waited for": lambda world: world.all_reduce(
        ones(4).long(), world.ReduceOp.MAX, async_op=True
    ),
    "reduction read from the options": lambda world: world.group.WORLD.allreduce(
        [ones(3)], world.distributed_c10d.AllreduceOptions()
    ),
    "gathered": lambda world: world.all_gather_into_tensor(ones(8), ones(2)),
    "scattered": lambda world: world.reduce_scatter_tensor(ones(2), ones(8), world.ReduceOp.AVG),
}


@pytest.mark.parametrize("way", SHORT_WAYS)
def test_a_short_record_says_what_the_whole_one_said(session: Session, world: Any, tmp_path: Path, way: str) -> None:
    session.step_begins(5)
    state.place = 0
    for _ in range(3):
        SHORT_WAYS[way](world)
    session.step_ends(5)
    session.close()
    first, *others = calls(logs(tmp_path)[0])
    assert [first["number"], first["seq"], first["step"], first["tid"]] == [0, 0, 5, threading.get_native_id()]
    for n, call in enumerate(others, 1):
        assert {**call, "t_issue_ns": 0, "t_issue_end_ns": 0} == {
            **first, "number": n, "seq": n, "t_issue_ns": 0, "t_issue_end_ns": 0
        }  # fmt: skip
        assert first["t_issue_end_ns"] <= call["t_issue_ns"] <= call["t_issue_end_ns"]
    kinds = [item[0] for frame in written(logs(tmp_path)[0]) for item in frame]
    assert (kinds.count("call"), kinds.count("form"), sum(isinstance(kind, int) for kind in kinds)) == (1, 1, 2)


def written(path: Path) -> list[Any]:
    """The frames of a log as they were written."""
    left, frames = path.read_bytes()[len(record.MAGIC) :], []
    while left:
        size = int.from_bytes(left[:4], "little")
        frames.append(json.loads(zlib.decompress(left[8 : 8 + size])))
        left = left[8 + size :]
    return frames


def test_the_queue_of_short_records_has_its_limit_too(world: Any, tmp_path: Path) -> None:
    session = open_session({"run_dir": str(tmp_path), "max_queue": 50, **QUIET})
    session.log.flush()
    with session.log._writing:  # the disk does not answer
        for _ in range(100):
            world.all_reduce(ones(1))
        assert len(session.log.waiting) == 50
        assert [item[0] for item in session.log.waiting if isinstance(item[0], str)] == ["form", "call"]
        assert session.log.dropped == 51
    session.log.flush()
    session.close()
    assert [call["number"] for call in calls(logs(tmp_path)[0])] == list(range(49))
    (end,) = records(logs(tmp_path)[0], "end")[0]
    assert (end["calls"], end["recorded"], end["dropped"]) == (100, 49, 51)


def test_a_thread_that_gets_the_number_of_an_ended_one_is_itself(session: Session, world: Any, tmp_path: Path) -> None:
    made, ended = [], []

    def work() -> None:
        made.append((threading.get_ident(), threading.get_native_id()))
        world.all_reduce(ones(2))
        world.all_reduce(ones(2))

    for _ in range(20):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        ended.append(made[-1][0] not in hooks._threads)
    assert ended == [True] * 20
    assert len({ident for ident, _ in made}) < 20  # numbers did come again
    session.close()
    assert [call["tid"] for call in calls(logs(tmp_path)[0])] == [tid for _, tid in made for _ in range(2)]


def test_observers_hear_of_steps_and_an_error_of_one_stays_inside(session: Session) -> None:
    heard: list[Any] = []

    class Wrong:
        def step_begins(self, step: int) -> None:
            raise ValueError("planted")

        step_ends = step_begins

    class Right:
        def step_begins(self, step: int) -> None:
            heard.append(("begins", step, state.step))

        def step_ends(self, step: int) -> None:
            heard.append(("ends", step))

    session.observers[:0] = [Wrong(), Right()]
    session.step_begins(3)
    session.step_ends(3)
    assert heard == [("begins", 3, 3), ("ends", 3)]
    assert (state.step, state.errors) == (None, 2)


@pytest.mark.parametrize("mode", ["methods", "dispatcher"])
def test_errors_of_ours_are_counted_and_too_many_switch_us_off(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], mode: str
) -> None:
    import torch.distributed._functional_collectives as functional

    session = open_session({"run_dir": str(tmp_path), "hooks": mode, "errors_allowed": 3, **QUIET})
    hook = hooks.current()
    assert hook is not None

    def fail(*_args: Any) -> Any:
        raise ValueError("planted")

    monkeypatch.setattr(hook, "next_call", fail)
    for n in range(10):
        tensor = ones(n + 1)
        if mode == "methods":
            assert world.all_reduce(tensor, async_op=True) is not None
        else:
            tensor = functional.all_reduce(tensor, "sum", world.group.WORLD)
        assert tensor.tolist() == [1.0] * (n + 1)
    assert state.errors == 4
    assert not session.on
    session.step_begins(0)
    monkeypatch.undo()
    session.close()
    name = "allreduce" if mode == "methods" else "c10d::allreduce_"
    said = f"4 errors, the last: ValueError in {name}: planted"
    assert capfd.readouterr().err.splitlines() == [f"traceanalyzer: collector switched off: {said}"]
    assert calls(logs(tmp_path)[0]) == []
    assert records(logs(tmp_path)[0], "end")[0][0]["disabled"] == said


@pytest.mark.parametrize("error", [RuntimeError("theirs"), KeyboardInterrupt()])
def test_an_error_of_the_call_comes_through_unchanged(world: Any, tmp_path: Path, error: BaseException) -> None:
    group_class: Any = type(world.group.WORLD)
    real = group_class.__dict__["allreduce"]

    def raising(*_args: Any, **_kwargs: Any) -> None:
        raise error

    group_class.allreduce = raising
    try:
        with open_session({"run_dir": str(tmp_path), **QUIET}):
            with pytest.raises(type(error)) as caught:
                world.all_reduce(ones(1))
            assert caught.value is error
            world.barrier()
    finally:
        group_class.allreduce = real
    log = logs(tmp_path)[0]
    assert [call["op"] for call in calls(log)] == ["all_reduce", "barrier"]
    assert state.errors == 0


def test_calls_of_many_threads_are_each_recorded_once(session: Session, world: Any, tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=lambda: [world.all_reduce(ones(2)) for _ in range(200)] and None) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    session.close()
    made = calls(logs(tmp_path)[0])
    assert sorted(call["number"] for call in made) == list(range(800))
    assert sorted(call["seq"] for call in made) == list(range(800))
    assert len({call["tid"] for call in made}) == 4


def test_a_torch_that_does_not_let_us_in_is_named(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from traceanalyzer.collectors import dispatch

    class Refused(dispatch.Dispatcher):
        def __init__(self, hook: hooks.Hook) -> None:
            raise AttributeError("redispatch_boxed")

    monkeypatch.setattr(dispatch, "Dispatcher", Refused)
    with open_session({"run_dir": str(tmp_path), **QUIET}) as session:
        assert not hooks.want_dispatcher("DistributedDataParallel")
        world.all_reduce(ones(1))
        assert len(session.facts["hooks"]["not_seen"]) == 1
    (issue,) = [i for i in records(logs(tmp_path)[0], "issue") if i[1] == "calls_from_cpp_not_seen"]
    assert issue[0] == "data_loss"
    assert "does not let Python stand before its operators (AttributeError: redispatch_boxed)" in issue[2]
    assert len(calls(logs(tmp_path)[0])) == 1


def test_unknown_options_are_ignored_and_named(world: Any, tmp_path: Path) -> None:
    open_session({"run_dir": str(tmp_path), "colour": "red", "hooks": "all", "max_queue": "x", **QUIET}).close()
    said = [i[2] for i in records(logs(tmp_path)[0], "issue") if i[1] == "unknown_option"]
    assert said == ["the option colour is not known and was ignored", "hooks: all is not known; auto was taken"]
    assert {"steps", "ranks", "hooks", "dormant"} <= OPTIONS


def test_a_second_session_in_one_process_has_a_file_of_its_own(world: Any, tmp_path: Path) -> None:
    for n in (1, 2):
        with open_session({"run_dir": str(tmp_path), **QUIET}) as session:
            assert open_session({"run_dir": "elsewhere"}) is session
            for _ in range(n):
                world.all_reduce(ones(n))
    assert [log.name for log in logs(tmp_path)] == [f"r00000-{os.getpid()}-2.talog", f"r00000-{os.getpid()}.talog"]
    assert [[call["number"] for call in calls(log)] for log in logs(tmp_path)] == [[0, 1], [0]]


def test_a_full_disk_switches_us_off(
    session: Session, world: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None: ...

    world.all_reduce(ones(1))
    session.log.flush()
    real, session.log._file = session.log._file, Full()  # type: ignore[assignment]
    world.all_reduce(ones(2))
    until = time.monotonic() + 10
    while session.on and time.monotonic() < until:
        time.sleep(0.02)
    world.all_reduce(ones(3))
    assert not session.on
    session.close()
    assert real is not None
    real.close()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("traceanalyzer: collector switched off: ")
    assert line.endswith("OSError: [Errno 28] No space left on device")
    assert [call["in_elems"] for call in calls(logs(tmp_path)[0])] == [1]


def test_a_folder_that_cannot_be_written_switches_us_off(
    world: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with open_session({"run_dir": str(tmp_path / "file"), **QUIET}) as session:
        assert not session.on
        world.all_reduce(ones(1))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("traceanalyzer: collector switched off: ")


def test_without_a_folder_nothing_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACEANALYZER_RUN_DIR", raising=False)
    with pytest.raises(ValueError, match="no folder for the run"):
        open_session()
    assert current() is None


# Processes of their own ------------------------------------------------------------------------------------------------

_START = """
import os, sys, time
import torch.distributed as dist
from traceanalyzer.collectors import attach
def join():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
import torch
"""


def test_attach_loads_no_torch() -> None:
    code = """
import sys, tempfile
import traceanalyzer.collectors
assert "torch" not in sys.modules
with tempfile.TemporaryDirectory() as folder:
    sys.modules["torch"] = None
    with traceanalyzer.collectors.attach(folder, control=False) as session:
        pass
    import os
    print(sorted(os.listdir(folder)), session.facts["hooks"]["missing"])
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['run.json'] ModuleNotFoundError: ")


def test_a_process_without_a_group_leaves_no_log(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = run_python(_START + "attach(sys.argv[1], control=False)", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert logs(tmp_path) == []


def test_a_plain_call_records_until_the_process_ends(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = _START + "attach(sys.argv[1]); join(); dist.all_reduce(torch.ones(3))"
    done = run_python(code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    (log,) = logs(tmp_path)
    assert len(calls(log)) == 1
    assert len(records(log, "end")) == len(records(log, "job")) == 1


def test_a_terminated_process_leaves_a_whole_log(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = (
        _START
        + "attach(sys.argv[1]); join(); dist.all_reduce(torch.ones(3)); print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(1.5)
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM
    finally:
        process.kill()
    (log,) = logs(tmp_path)
    assert len(calls(log)) == 1
    assert records(log, "end") == []


def test_a_forked_child_does_not_write_to_its_parents_log(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = (
        _START
        + """
session = attach(sys.argv[1], control=False)
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
dist.all_reduce(torch.ones(3))
class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        from traceanalyzer.collectors.state import state
        dist.all_reduce(torch.ones(9))
        assert not state.on and state.log is None
        return i
data = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork")
assert sorted(int(x) for x in data) == [0, 1, 2, 3]
pid = os.fork()
if pid == 0:
    dist.all_reduce(torch.ones(4))
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
dist.all_reduce(torch.ones(5))
"""
    )
    done = run_python(code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    (log,) = logs(tmp_path)
    assert [call["in_elems"] for call in calls(log)] == [3, 5]
    assert len(records(log, "end")) == 1


def test_ranks_that_are_forked_each_leave_their_log(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = (
        _START
        + """
import multiprocessing
attach(sys.argv[1], control=False)
def rank(n):
    dist.init_process_group("gloo", rank=n, world_size=2, init_method="file://" + sys.argv[1] + "/store")
    dist.all_reduce(torch.ones(n + 1))
    dist.barrier()
processes = [multiprocessing.get_context("fork").Process(target=rank, args=(n,)) for n in range(2)]
for p in processes: p.start()
for p in processes: p.join()
print([p.exitcode for p in processes])
"""
    )
    code = code.replace("torch.ones(n + 1)", "torch.ones(2)")
    done = run_python(code, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "[0, 0]\n"), done.stderr
    assert [log.name[:7] for log in logs(tmp_path)] == ["r00000-", "r00001-"]
    for log in logs(tmp_path):
        assert [call["op"] for call in calls(log)] == ["all_reduce", "barrier"]
        assert len(records(log, "end")) == 1
