"""The naming hook: what it writes into real traces of real gloo groups, and that it never harms the job."""

import csv
import gzip
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.collectors import hooks, naming

WORKER = Path(__file__).with_name("naming_worker.py")
FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "megatron_tp2_sp"
KINETO_KEYS = {"External id", "Record function id", "Ev Idx"}


def load(path: Path) -> list[dict[str, Any]]:
    """The events of a trace in order of time, outermost first."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]
    return sorted(events, key=lambda event: (event["ts"], -event["dur"]))


def ranges(events: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """(op, args without the profiler's own) of the hook's ranges."""
    return [
        (event["name"][3:], {key: value for key, value in event["args"].items() if key not in KINETO_KEYS})
        for event in events
        if event["name"].startswith("ta:") and event["cat"] == "cpu_op"
    ]


# Without torch -------------------------------------------------------------------------------------------------------


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_import_loads_nothing_but_the_standard_library() -> None:
    heavy = {"torch", "duckdb", "pandas", "pyarrow", "click", "numpy", "rich", "msgspec", "yaml"}
    code = f"import sys, traceanalyzer.collectors.naming; print(sorted({heavy!r} & set(sys.modules)))"
    assert run_python(code) == "[]"


def test_without_torch_nothing_is_installed_and_the_block_runs() -> None:
    code = """
import sys
sys.modules["torch"] = None  # the import of torch fails
import traceanalyzer.collectors
from traceanalyzer.collectors import hooks, naming
done = []
with naming.name_groups(), naming.mark("step 0"):
    done.append("ran")
print(done, naming.install(), naming.installed(), naming.disabled_reason())
"""
    printed = run_python(code)
    assert printed.startswith("['ran'] False False ModuleNotFoundError in install: ")
    assert "torch" in printed


# Two gloo processes --------------------------------------------------------------------------------------------------

WORLD = {"pg": "0", "desc": "default_pg", "ranks": "[0, 1]", "size": 2}
TP = {"pg": "1", "desc": "TENSOR_MODEL_PARALLEL_GROUP", "ranks": "[0, 1]", "size": 2}


def call(
    group: dict[str, Any], seq: int, method: str, dtype: str | None, sizes: int | tuple[int, int], **more: Any
) -> Any:
    """The args of a range, rank left out; every value literal."""
    sizes = (sizes, sizes) if isinstance(sizes, int) else sizes
    found = {**group, "seq": seq, "method": method, "in_elems": sizes[0], "out_elems": sizes[1], **more}
    return found if dtype is None else {**found, "dtype": dtype}


SYNC: dict[str, Any] = {"is_async": False}
ASYNC: dict[str, Any] = {"is_async": True}
F32, BF16 = "float32", "bfloat16"

# case -> the ranges inside it, the same on both ranks
ON_BOTH: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "all_reduce": [("all_reduce", call(WORLD, 0, "allreduce", F32, 10, reduce_op="sum", **SYNC))],
    "all_reduce_async": [("all_reduce", call(TP, 1, "allreduce", BF16, 7, reduce_op="max", **ASYNC))],
    "all_gather_into_tensor": [("all_gather", call(TP, 2, "all_gather_single", F32, (4, 8), **SYNC))],
    "all_gather_list": [("all_gather", call(TP, 3, "allgather", F32, (3, 6), **SYNC))],
    "reduce_scatter_tensor": [
        ("reduce_scatter", call(TP, 4, "reduce_scatter_single", F32, (8, 4), reduce_op="sum", **SYNC))
    ],
    "reduce_scatter_list": [("reduce_scatter", call(TP, 5, "reduce_scatter", F32, (8, 4), reduce_op="sum", **SYNC))],
    "all_to_all_even": [("all_to_all", call(TP, 6, "all_to_all_single", F32, 4, **SYNC))],
    "all_to_all_list": [("all_to_all", call(TP, 8, "alltoall", F32, 8, **SYNC))],
    "broadcast": [("broadcast", call(TP, 9, "broadcast", "int64", 5, root=1, **SYNC))],
    "reduce": [("reduce", call(TP, 10, "reduce", F32, 5, root=1, reduce_op="sum", **SYNC))],
    "barrier": [("barrier", call(TP, 13, "barrier", None, 0, **SYNC))],
    "coalesced_all_reduce": [
        ("all_reduce", call(TP, 14, "allreduce_coalesced", F32, 30, tensors=2, reduce_op="sum", **SYNC))
    ],
    "coalesced_all_gather": [
        ("all_gather", call(TP, 15, "all_gather_single_coalesced", F32, (30, 60), tensors=2, **ASYNC))
    ],
    "coalesced_reduce_scatter": [
        (
            "reduce_scatter",
            call(TP, 16, "reduce_scatter_single_coalesced", F32, (60, 30), tensors=2, reduce_op="sum", **ASYNC),
        )
    ],
    "direct": [("all_reduce", call(TP, 17, "allreduce", F32, 9, reduce_op="min"))],
    "backward": [("all_reduce", call(WORLD, 1, "allreduce", F32, 6, reduce_op="sum", **SYNC))],
    "functional": [],  # issued from C++: not seen
    "odd_description": [
        ("all_reduce", call({**TP, "pg": "2", "desc": "odd / ?"}, 0, "allreduce", F32, 1, reduce_op="sum", **SYNC))
    ],
}
UNEVEN = "all_to_all_single"
ON_ONE: dict[int, dict[str, list[tuple[str, dict[str, Any]]]]] = {
    0: {
        "all_to_all_uneven": [
            ("all_to_all", call(TP, 7, UNEVEN, F32, (15, 20), in_splits="[1, 2]", out_splits="[1, 3]", **SYNC))
        ],
        "gather": [("gather", call(TP, 11, "gather", F32, (4, 8), root=0, **SYNC))],
        "scatter": [("scatter", call(TP, 12, "scatter", F32, (0, 4), root=1, **SYNC))],
        "send_recv": [("send", call(TP, 0, "send", F32, (6, 0), peer=1))],
        "any_source": [("send", call(WORLD, 0, "send", F32, (2, 0), peer=1))],
        "batch_isend_irecv": [
            ("send", call(TP, 1, "send", BF16, (3, 0), peer=1)),
            ("recv", call(TP, 2, "recv", BF16, (0, 3), peer=1)),
        ],
        "alone": [
            (
                "all_reduce",
                call(
                    {"pg": "3", "desc": "ALONE", "ranks": "[0]", "size": 1},
                    0,
                    "allreduce",
                    F32,
                    2,
                    reduce_op="sum",
                    **SYNC,
                ),
            )
        ],
    },
    1: {
        "all_to_all_uneven": [
            ("all_to_all", call(TP, 7, UNEVEN, F32, (20, 15), in_splits="[3, 1]", out_splits="[2, 1]", **SYNC))
        ],
        "gather": [("gather", call(TP, 11, "gather", F32, (4, 0), root=0, **SYNC))],
        "scatter": [("scatter", call(TP, 12, "scatter", F32, (8, 4), root=1, **SYNC))],
        "send_recv": [("recv", call(TP, 0, "recv", F32, (0, 6), peer=0))],
        "any_source": [("recv", call(WORLD, 0, "recv_anysource", F32, (0, 2)))],
        "batch_isend_irecv": [
            ("send", call(TP, 1, "send", BF16, (3, 0), peer=0)),
            ("recv", call(TP, 2, "recv", BF16, (0, 3), peer=0)),
        ],
        "alone": [
            (
                "all_reduce",
                call(
                    {"pg": "4", "desc": "ALONE", "ranks": "[1]", "size": 1},
                    0,
                    "allreduce",
                    F32,
                    2,
                    reduce_op="sum",
                    **SYNC,
                ),
            )
        ],
    },
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that two gloo processes left."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("naming")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(WORKER), str(rank), str(folder / "store"), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
    return folder


@pytest.mark.parametrize("rank", [0, 1])
def test_each_kind_of_call_names_its_group(recorded: Path, rank: int) -> None:
    events = load(recorded / f"trace{rank}.json")
    cases = [event for event in events if event["name"].startswith("ta:case ")]
    found = {}
    for case in cases:
        assert case["cat"] == "user_annotation"
        inside = [e for e in events if case["ts"] <= e["ts"] and e["ts"] + e["dur"] <= case["ts"] + case["dur"]]
        found[case["name"].removeprefix("ta:case ")] = ranges(inside)
    expected = {
        name: [(op, {**args, "rank": 0 if name == "alone" else rank}) for op, args in calls]
        for name, calls in (ON_BOTH | ON_ONE[rank]).items()
    }
    assert found == expected
    # Python holds True == 1, JSON does not
    assert all(type(args["seq"]) is int and type(args["pg"]) is str for case in found.values() for _, args in case)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_range_encloses_one_call_of_torch(recorded: Path, rank: int) -> None:
    events = load(recorded / f"trace{rank}.json")
    calls = [e for e in events if e["name"].startswith("c10d::")]
    for event in events:
        if event["name"].startswith("ta:") and event["cat"] == "cpu_op":
            end = event["ts"] + event["dur"]
            inside = [c for c in calls if event["ts"] <= c["ts"] and c["ts"] + c["dur"] <= end]
            assert len(inside) == 1, event


@pytest.mark.parametrize("rank", [0, 1])
def test_uninstall_puts_the_identical_methods_back(recorded: Path, rank: int) -> None:
    facts = json.loads((recorded / f"facts{rank}.json").read_text())
    assert facts["restored"] is True
    assert facts["reason"] is None
    assert facts["total"] == [3.0]
    assert {"allreduce", "_allgather_base", "send", "recv_anysource", "_end_coalescing"} <= set(facts["replaced"])
    events = load(recorded / f"after{rank}.json")
    assert ranges(events) == []
    assert any(event["name"] == "c10d::allreduce_" for event in events)


# One process, torch's fake backend ----------------------------------------------------------------------------------


@pytest.fixture
def world() -> Iterator[Any]:
    """torch.distributed as rank 0 of a world of 4 in which nothing is sent; the hook is uninstalled at the end."""
    torch = pytest.importorskip("torch")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist = torch.distributed
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    before = dict(torch._C._distributed_c10d.ProcessGroup.__dict__)
    yield dist
    naming.uninstall()
    dist.destroy_process_group()
    after = dict(torch._C._distributed_c10d.ProcessGroup.__dict__)
    assert all(after[name] is value for name, value in before.items())


@pytest.fixture
def profiled(tmp_path: Path) -> Any:
    """Runs a function under a profiler; gives the hook's ranges."""
    torch = pytest.importorskip("torch")

    def run(function: Any, **options: Any) -> list[tuple[str, dict[str, Any]]]:
        options = {"record_shapes": True, **options}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options) as profiler:
            function()
        profiler.export_chrome_trace(str(tmp_path / "trace.json"))
        return ranges(load(tmp_path / "trace.json"))

    return run


def ones(n: int) -> Any:
    import torch

    return torch.ones(n)


def test_install_is_idempotent_and_nested_blocks_keep_it(world: Any, profiled: Any) -> None:
    with naming.name_groups():
        assert naming.install()
        with naming.name_groups():
            pass
        assert naming.installed()
        assert [op for op, _ in profiled(lambda: world.all_reduce(ones(3)))] == ["all_reduce"]
    assert not naming.installed()
    naming.uninstall()
    assert naming.disabled_reason() is None


def test_calls_between_coalescing_bounds_carry_their_block(world: Any, profiled: Any) -> None:
    import torch

    def block() -> None:
        with world._coalescing_manager(device=torch.device("cpu"), async_ops=True):
            world.isend(ones(4), dst=2)
            world.irecv(ones(5), src=1)

    with naming.name_groups():
        found = profiled(lambda: (block(), world.all_reduce(ones(2)), block()))
    assert [(op, args.get("seq"), args.get("peer"), args.get("coalesce")) for op, args in found] == [
        ("send", 0, 2, 0),
        ("recv", 1, 1, 0),
        ("end_coalescing", None, None, 0),
        ("all_reduce", 0, None, None),
        ("send", 2, 2, 1),
        ("recv", 3, 1, 1),
        ("end_coalescing", None, None, 1),
    ]
    assert found[2][1] == {
        "pg": "0",
        "desc": "default_pg",
        "ranks": "[0, 1, 2, 3]",
        "size": 4,
        "rank": 0,
        "method": "_end_coalescing",
        "coalesce": 0,
    }


def test_a_call_made_by_a_call_is_not_counted_again(world: Any, profiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    group_class: Any = type(world.group.WORLD)
    real = group_class.__dict__["barrier"]
    # somebody's barrier that is made of two all-reduces
    monkeypatch.setattr(
        group_class, "barrier", lambda pg, *_args, **_kwargs: (pg.allreduce(ones(1)), pg.allreduce(ones(1)))[1]
    )
    with naming.name_groups():
        found = profiled(lambda: (world.barrier(), world.all_reduce(ones(1))))
    # monkeypatch would put an unbound builtin back
    monkeypatch.undo()
    group_class.barrier = real
    assert [(op, args["seq"]) for op, args in found] == [("barrier", 0), ("all_reduce", 1)]


def test_our_wrapper_under_someone_elses_passes_through(world: Any, profiled: Any) -> None:
    group_class: Any = type(world.group.WORLD)
    real = group_class.__dict__["allreduce"]
    naming.install()
    ours = group_class.allreduce
    theirs = lambda pg, *args, **kwargs: ours(pg, *args, **kwargs)  # noqa: E731
    group_class.allreduce = theirs
    try:
        naming.uninstall()
        assert group_class.allreduce is theirs
        assert profiled(lambda: world.all_reduce(ones(1))) == []
        naming.install()
        assert len(profiled(lambda: world.all_reduce(ones(1)))) == 1
        naming.uninstall()
        assert group_class.allreduce is theirs
    finally:
        group_class.allreduce = real


@pytest.mark.parametrize("where", ["describe", "count", "leave"])
def test_an_error_of_the_hook_disables_it_and_the_call_runs_once(
    world: Any, profiled: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    group_class: Any = type(world.group.WORLD)
    real = group_class.__dict__["allreduce"]
    call_real = group_class.allreduce
    made = []
    group_class.allreduce = lambda pg, *args, **kwargs: (made.append(1), call_real(pg, *args, **kwargs))[1]

    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise ValueError("planted")

    try:
        naming.install()
        hook = hooks.current()
        assert hook is not None
        if where == "describe":
            monkeypatch.setattr(hooks, "arguments", fail)
        elif where == "count":
            monkeypatch.setattr(hook, "learn", fail)
        else:
            scope = type("Scope", (), {"__enter__": lambda self: self, "__exit__": fail})
            monkeypatch.setattr(hook, "range", lambda *_args: scope())
        tensor = ones(3)
        assert profiled(lambda: world.all_reduce(tensor)) == []
        assert made == [1]
        expected = "ValueError in leave: planted" if where == "leave" else "ValueError in allreduce: planted"
        assert naming.disabled_reason() == expected
        assert not naming.installed()
        assert profiled(lambda: world.all_reduce(tensor)) == []
        assert made == [1, 1]
        monkeypatch.undo()
        naming.uninstall()
        assert naming.disabled_reason() == expected
        assert naming.install()
        assert naming.disabled_reason() is None
        assert [args["seq"] for _, args in profiled(lambda: world.all_reduce(tensor))] == [0]
    finally:
        naming.uninstall()
        group_class.allreduce = real


def test_an_error_of_the_call_comes_through_and_the_hook_stays(world: Any, profiled: Any) -> None:
    def wrong() -> None:
        with pytest.raises(TypeError):
            world.group.WORLD.allreduce("no tensor", 1, 2, 3, 4)

    with naming.name_groups():
        # the hook cannot describe text either: it steps aside, and the caller sees torch's own error
        profiled(wrong)
        assert naming.disabled_reason() == "AttributeError in allreduce: 'str' object has no attribute 'dtype'"
    with naming.name_groups():
        with pytest.raises(TypeError):
            world.group.WORLD.allreduce("no tensor", 1, 2, 3, 4)
        assert naming.disabled_reason() is None
        assert [args["seq"] for _, args in profiled(lambda: world.all_reduce(ones(1)))] == [1]


def test_calls_of_many_threads_are_each_counted_once(world: Any, profiled: Any) -> None:
    def work() -> None:
        for _ in range(200):
            world.all_reduce(ones(1))

    with naming.name_groups():
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = profiled(lambda: world.all_reduce(ones(1)))
    assert [args["seq"] for _, args in found] == [1600]


def test_without_shapes_the_ranges_are_bare(world: Any, profiled: Any) -> None:
    with naming.name_groups():
        assert profiled(lambda: world.all_reduce(ones(1)), record_shapes=False) == [("all_reduce", {})]


def test_a_long_list_of_ranks_is_complete(profiled: Any) -> None:
    torch = pytest.importorskip("torch")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=5, world_size=1024, store=FakeStore())
    try:
        with naming.name_groups():
            [(_, args)] = profiled(lambda: torch.distributed.all_reduce(ones(1)))
    finally:
        torch.distributed.destroy_process_group()
    assert json.loads(args["ranks"]) == list(range(1024))
    assert args["rank"] == 5


def test_text_is_made_fit_for_the_trace() -> None:
    assert hooks.text('a "b" \\ c\n\u4e2d') == "a 'b' / c??"


# The fixture ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_the_megatron_fixture_holds_the_calls_that_were_counted_beside_it(rank: int) -> None:
    expected: Counter[tuple[object, ...]] = Counter()
    with (FIXTURE / "calls.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if int(row["rank"]) == rank:
                sizes = (int(row["in_elems"]), int(row["out_elems"]), int(row["group_size"]))
                key = (row["op"], row["dtype"], *sizes, row["group_description"], row["reduce_op"])
                expected[key] += int(row["count"])
    events = load(FIXTURE / f"rank{rank}.json.gz")
    found = Counter(
        (op, a["dtype"], a["in_elems"], a["out_elems"], a["size"], a["desc"], a.get("reduce_op", ""))
        for op, a in ranges(events)
    )
    assert found == expected
    assert sum(found.values()) == 59
    steps = [event["name"] for event in events if event["name"].startswith("ProfilerStep#")]
    assert steps == ["ProfilerStep#1"]


@pytest.mark.megatron
def test_recording_the_fixture_anew_counts_the_same_calls(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    subprocess.run([sys.executable, "-W", "ignore", FIXTURE / "record.py", tmp_path], check=True, capture_output=True)
    assert (tmp_path / "calls.csv").read_bytes() == (FIXTURE / "calls.csv").read_bytes()
    for rank in range(2):
        new, old = (
            Counter(event["name"] for event in load(folder / f"rank{rank}.json.gz") if event["name"].startswith("ta:"))
            for folder in (tmp_path, FIXTURE)
        )
        assert new == old


_TORCH_ALONE = """
import importlib.abc, sys, torch
torch.profiler.profile  # what torch itself needs is loaded now

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"duckdb", "pyarrow", "click", "rich", "msgspec", "yaml", "isal"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import torch.distributed as dist
from traceanalyzer.collectors import naming
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
with naming.name_groups(), torch.profiler.profile(record_shapes=True) as profile:
    dist.all_reduce(torch.ones(4))
print([e.name for e in profile.events() if e.name.startswith("ta:")], naming.disabled_reason())
"""


def test_an_environment_that_holds_torch_alone_is_enough() -> None:
    done = subprocess.run([sys.executable, "-c", _TORCH_ALONE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['ta:all_reduce'] None\n"
