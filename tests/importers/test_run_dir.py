"""A collector's folder -> one run: hook and trace make one call, and what is missing is said."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer import attribute, schema
from traceanalyzer.collectors import record
from traceanalyzer.errors import InputError
from traceanalyzer.importers import ImportResult
from traceanalyzer.importers.run_dir import import_run_dir, is_run_dir
from traceanalyzer.run import Run

T = 1_790_000_000_000_000_000
STEPS = 2
CALLS = 3
"""Calls of each step: two all-reduces in the forward pass and a barrier outside."""


class Folder:
    """Writes the files of a collector's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(
        self, rank: int, *, pid: int = 100, world: int = 2, steps: int = STEPS, closed: bool = True, **run: Any
    ) -> Path:
        """A log with some steps of three calls each, 1 us apart."""
        log = record.Log(self.path / "log" / f"r{rank:05d}-{pid + rank}.talog", interval_s=60)
        assert log.start()
        facts = {
            "rank": rank,
            "world_size": world,
            "pid": pid + rank,
            "host": "h",
            "started_ns": T,
            "restart": 0,
            **run,
        }
        put = log.put
        put(["run", facts])
        group = {"name": "5", "description": "TENSOR_MODEL_PARALLEL_GROUP", "backend": "gloo", "ranks": [0, 1]}
        put(["group", 0, {**group, "size": 2, "rank": rank % 2}])
        put(["place", 1, {"microbatch": 0, "chunk": None, "layer": 3, "phase": "forward", "component": "layers"}])
        for number in range(steps * CALLS):
            at = T + 1000 * number
            barrier = number % CALLS == 2
            op, method, elems = ("barrier", "barrier", 0) if barrier else ("all_reduce", "allreduce", 8)
            values: dict[str, Any] = {"number": number, "group": 0, "op": op, "method": method, "seq": number}
            values |= {"dtype": None if barrier else "float32", "in_elems": elems, "out_elems": elems, "tid": 7}
            values |= {"t_issue_ns": at, "t_issue_end_ns": at + 500, "step": number // CALLS, "place": int(not barrier)}
            put(["call", *(values.get(name) for name in record.CALL)])
            if barrier:
                put(["span", "step", f"step {number // CALLS}", at - 2010, at + 600, 7, number // CALLS, 0])
        put(["job", {"job": {"num_layers": 4}, "place": {"tp": rank}}])
        for window in run.get("windows", ()):
            put(["window", window])
        if closed:
            put(
                [
                    "end",
                    {"calls": steps * CALLS, "recorded": steps * CALLS, "dropped": 0, "errors": 0, "disabled": None},
                ]
            )
        log.close()
        return log.path

    def trace(
        self,
        rank: int,
        numbers: Sequence[int | None],
        *,
        window: int = 0,
        pid: int = 100,
        cut: int = 0,
        late_ns: int = 40,
        first: int = 0,
        kernels: bool = True,
    ) -> Path:
        """A window with calls of these numbers; the i-th call begins ``late_ns`` after the log's call ``first + i``."""
        events: list[dict[str, Any]] = []
        for i, number in enumerate(numbers):
            at = 1000 * (first + i) + late_ns
            op = "barrier" if (first + i) % CALLS == 2 else "all_reduce"
            args = {} if number is None else {"pg": "5", "call": number, "seq": number}
            host = {"cat": "cpu_op", "pid": pid + rank, "tid": 7, "ph": "X"}
            events.append({**host, "name": f"ta:{op}", "ts": at / 1000, "dur": 0.4, "args": args})
            launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": (at + 100) / 1000, "dur": 0.05}
            if kernels:
                events.append({**host, **launch, "args": {"correlation": 9 + i}})
                device = {"cat": "kernel", "name": "ncclDevKernel_AllReduce", "ph": "X", "pid": 0, "tid": 20}
                work = {"ts": (at + 300) / 1000, "dur": 0.25, "args": {"correlation": 9 + i, "device": 0, "stream": 20}}
                events.append({**device, **work})
        info = {"rank": rank, "world_size": 2, "backend": "nccl"}
        document = {"baseTimeNanoseconds": T, "distributedInfo": info, "traceEvents": events}
        path = self.path / "trace" / f"r{rank:05d}-w{window}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = gzip.compress(json.dumps(document).encode())
        path.write_bytes(text[: len(text) - cut])
        return path


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "run")


@pytest.fixture
def merge(folder: Folder, tmp_path: Path) -> Callable[..., ImportResult]:
    """Imports the folder into run.parquet."""

    def run(**options: Any) -> ImportResult:
        options.setdefault("job_text", lambda said: json.dumps(said["job"]))
        return import_run_dir(folder.path, tmp_path / "run.parquet", **options)

    return run


def found(result: ImportResult) -> dict[str, int]:
    """Code -> occurrences of an import's issues."""
    counts: dict[str, int] = {}
    for issue in result.issues:
        counts[issue["code"]] = counts.get(issue["code"], 0) + issue["occurrences"]
    return counts


def rows(result: ImportResult, query: str) -> list[tuple[Any, ...]]:
    """The answer to a query with places and steps attached."""
    assert result.out is not None
    with Run.open(result.out) as run:
        attribute.attach(run, None)
        return run.tuples(query)


def test_a_call_of_hook_and_trace_is_one(folder: Folder, merge: Callable[..., ImportResult]) -> None:
    for rank in (0, 1):
        folder.log(rank)
    folder.trace(0, [3, 4, 5], first=3)
    result = merge()
    assert (result.status, result.ranks, found(result)) == ("complete", [0, 1], {})
    asked = """SELECT call_id, coalesce_id, source, op, in_elems, start_ns, dur_ns, t_issue_ns, time_source, completeness,
                      step, step_complete, phase, phase_evidence, component, microbatch, role
               FROM comm WHERE rank = 0 ORDER BY call_id"""
    place = ("forward", "recorded", "layers", 0, "tp")
    no_path = ("other", "no_path", None, None)
    bare, outside = (None, None, None, "not_profiled"), (None, None, None, None)
    assert rows(result, asked) == [
        (0, 0, "hook", "all_reduce", 8, None, None, T, *bare[2:], 0, True, *place),
        (1, 1, "hook", "all_reduce", 8, None, None, T + 1000, *bare[2:], 0, True, *place),
        (2, 2, "hook", "barrier", 0, None, None, T + 2000, *bare[2:], 0, True, *outside, "tp"),
        (3, 6, "hook, kineto", "all_reduce", 8, T + 3340, 250, T + 3040, "kernel", "full", 1, True, *place),
        (4, 7, "hook, kineto", "all_reduce", 8, T + 4340, 250, T + 4040, "kernel", "full", 1, True, *place),
        (5, 8, "hook, kineto", "barrier", 0, T + 5340, 250, T + 5040, "kernel", "full", 1, True, *no_path, "tp"),
    ]
    assert rows(result, "SELECT coalesce_id FROM kernel ORDER BY start_ns") == [(6,), (7,), (8,)]
    assert rows(result, "SELECT rank, source, group_id, ranks FROM process_group ORDER BY rank") == [
        (0, "hook", "5", [0, 1]),
        (1, "hook", "5", [0, 1]),
    ]
    assert rows(result, "SELECT rank, source, source_file FROM rank ORDER BY ALL") == [
        (0, "hook", "r00000-100.talog"),
        (0, "kineto", "r00000-w0.json.gz"),
        (1, "hook", "r00001-101.talog"),
    ]


def test_the_windows_of_a_rank_are_one_recording(folder: Folder, merge: Callable[..., ImportResult]) -> None:
    folder.log(0, world=1)
    folder.trace(0, [0, 1], window=0)
    folder.trace(0, [3, 4], window=1, first=3)
    result = merge()
    assert found(result) == {}
    assert rows(result, "SELECT call_id, coalesce_id, source FROM comm ORDER BY call_id") == [
        (0, 6, "hook, kineto"),
        (1, 7, "hook, kineto"),
        (2, 2, "hook"),
        (3, 8, "hook, kineto"),
        (4, 9, "hook, kineto"),
        (5, 5, "hook"),
    ]
    assert rows(result, "SELECT coalesce_id FROM kernel ORDER BY start_ns") == [(6,), (7,), (8,), (9,)]
    asked = "SELECT source_file, window_start_ns - ?, window_end_ns - ? FROM rank WHERE source = 'kineto'"
    assert rows(result, asked.replace("?", str(T))) == [("r00000-w0.json.gz, r00000-w1.json.gz", 340, 4590)]


def test_calls_that_the_hook_missed_are_numbered_behind(folder: Folder, merge: Callable[..., ImportResult]) -> None:
    folder.log(0, world=1)
    folder.trace(0, [3, None, 5], first=3)
    result = merge()
    assert rows(result, "SELECT call_id, source FROM comm WHERE source <> 'hook' ORDER BY call_id") == [
        (3, "hook, kineto"),
        (5, "hook, kineto"),
        (7, "kineto"),
    ]
    assert found(result) == {"calls_without_hook": 1}


@pytest.mark.parametrize(("late_ns", "joined"), [(40, 3), (-300, 3), (2_000_000, 0)])
def test_a_trace_without_numbers_is_laid_beside_the_log(
    folder: Folder, merge: Callable[..., ImportResult], late_ns: int, joined: int
) -> None:
    folder.log(0, world=1)
    folder.trace(0, [None, None, None], first=3, late_ns=late_ns)
    result = merge()
    counts = {"calls_joined_by_time": joined, "calls_without_hook": 3 - joined}
    assert found(result) == {code: n for code, n in counts.items() if n}
    assert rows(result, "SELECT count(*) FILTER (source = 'hook, kineto'), count(*) FROM comm") == [
        (joined, 9 - joined)
    ]


def test_a_trace_of_another_process_is_left_out(folder: Folder, merge: Callable[..., ImportResult]) -> None:
    folder.log(0, world=1)
    folder.trace(0, [2, 5, 2], first=3, pid=900)  # the log's 2 and 5 are barriers
    result = merge()
    assert found(result) == {"window_of_another_process": 1}
    assert rows(result, "SELECT DISTINCT source FROM comm") == [("hook",)]


def test_a_rank_that_was_started_again_counts_once(folder: Folder, merge: Callable[..., ImportResult]) -> None:
    for rank in (0, 1):
        folder.log(rank, pid=100, steps=1, closed=False)
        folder.log(rank, pid=200, restart=1, started_ns=T + 10)
    folder.trace(0, [0, 1, 2], pid=100)
    folder.trace(1, [0, 1, 2], pid=200)
    result = merge()
    assert found(result) == {"rank_restarted": 2, "window_of_earlier_process": 1}
    assert rows(result, "SELECT rank, source, count(*) FROM comm GROUP BY ALL ORDER BY ALL") == [
        (0, "hook", 6),
        (1, "hook", 3),
        (1, "hook, kineto", 3),
    ]
    (said,) = (i for i in result.issues if i["code"] == "rank_restarted" and i["rank"] == 0)
    assert said["sentence"] == (
        "Rank 0 was started again: the log of its earlier process, r00000-100.talog (3 calls, steps 0 to 0), was left out. "
        "To see it, import it by itself: traceanalyzer import."
    )


def test_a_job_that_came_back_smaller(folder: Folder, merge: Callable[..., ImportResult]) -> None:
    for rank in (0, 1):
        folder.log(rank)
    folder.log(0, pid=300, world=1, restart=1, started_ns=T + 10)
    result = merge()
    assert (result.ranks, found(result)) == ([0], {"rank_restarted": 1, "world_shrank": 1})


def test_a_killed_rank_and_a_missing_one(folder: Folder, merge: Callable[..., ImportResult]) -> None:
    folder.log(0, world=3)
    log = folder.log(1, world=3, closed=False)
    log.write_bytes(log.read_bytes()[:-30])
    (folder.path / "run.json").write_text('{"command": ["torchrun"], "config": {"ranks": "auto"}}')
    folder.trace(0, [0, 1, 2])
    folder.trace(1, [0, 1, 2], cut=40)
    result = merge()
    assert (result.status, result.ranks) == ("partial", [0, 1])
    assert {"rank_missing": 1, "log_torn": 1, "log_not_ended": 1, "file_cut": 1}.items() <= found(result).items()
    (missing,) = (i for i in result.issues if i["code"] == "rank_missing")
    assert missing["sentence"] == "1 of 3 ranks left no log: 2. What they sent is unknown."
    assert rows(result, "SELECT step, step_complete, count(*) FROM comm WHERE rank = 0 GROUP BY ALL ORDER BY ALL") == [
        (0, True, 3),
        (1, True, 3),
    ]
    with Run.open(result.out or "") as run:
        assert json.loads(run.metadata[schema.META_LAUNCH]) == {"command": ["torchrun"], "config": {"ranks": "auto"}}
        assert run.import_status == "partial"


def test_only_the_ranks_that_were_asked_for_are_missed(folder: Folder, merge: Callable[..., ImportResult]) -> None:
    folder.log(0, world=8)
    (folder.path / "run.json").write_text('{"config": {"ranks": [0]}}')
    assert found(merge()) == {}


def test_a_window_that_was_recorded_and_is_not_there(folder: Folder, merge: Callable[..., ImportResult]) -> None:
    windows = [{"file": f"r00000-w{i}.json", "step_from": i, "step_to": i, "state": "written"} for i in (0, 1)]
    folder.log(0, world=1, windows=windows)
    folder.trace(0, [0, 1, 2])
    result = merge()
    assert found(result) == {"window_missing": 1}
    assert result.issues[-1]["location"] == "r00000-w1.json"


def test_a_process_that_was_killed_in_a_window(folder: Folder, merge: Callable[..., ImportResult]) -> None:
    opened = {"file": None, "step_from": 0, "step_to": 1, "start_ns": T, "end_ns": None, "state": "open"}
    written = {**opened, "file": "trace/r00000-w0.json.gz", "end_ns": T + 9000, "state": "complete"}
    folder.log(0, world=2, windows=[opened, written])
    folder.trace(0, [0, 1, 2])
    folder.log(1, world=2, windows=[opened, written, {**opened, "step_from": 2, "step_to": 4}], closed=False)
    folder.trace(1, [0, 1, 2])
    result = merge()
    (lost,) = [i for i in result.issues if i["code"] == "window_lost"]
    assert lost["rank"] == 1
    assert lost["sentence"].startswith(
        "Rank 1 was recording a window of the profiler from step 2 on (to 4 as planned) when "
    )


def test_the_job_is_what_the_lowest_rank_says(folder: Folder, merge: Callable[..., ImportResult]) -> None:
    for rank in (0, 1):
        folder.log(rank)
    result = merge()
    with Run.open(result.out or "") as run:
        assert json.loads(run.metadata[schema.META_JOB_CAPTURED]) == {"num_layers": 4}
    result = merge(job_text=lambda said: json.dumps({**said["job"], **said["place"]}))
    assert found(result) == {"job_differs": 1}
    assert "(tp differ)" in result.issues[-1]["sentence"]

    def refuse(said: object) -> str:
        raise InputError("no such shape.")

    result = merge(job_text=refuse)
    assert found(result) == {"job_not_understood": 2}
    with Run.open(result.out or "") as run:
        assert schema.META_JOB_CAPTURED not in run.metadata


def test_a_flight_recorder_beside_a_hook_adds_no_call(folder: Folder, merge: Callable[..., ImportResult]) -> None:
    folder.log(0, world=2)
    folder.log(1, world=2)
    (folder.path / "flight").mkdir()
    entry = {
        "record_id": 0,
        "process_group": ("5", "TENSOR_MODEL_PARALLEL_GROUP"),
        "collective_seq_id": 1,
        "p2p_seq_id": 0,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[8]],
        "output_sizes": [[8]],
        "input_dtypes": ["Float"],
        "output_dtypes": ["Float"],
        "time_created_ns": T + 9,
        "state": "started",
        "is_p2p": False,
    }
    other = {"name": "6", "desc": "DATA_PARALLEL_GROUP", "ranks": "[0]"}
    dump = {"version": "2.10", "pg_config": {"6": other}, "entries": [entry]}
    (folder.path / "flight" / "r00000.pickle").write_bytes(pickle.dumps(dump, protocol=2))
    result = merge()
    assert found(result) == {}
    assert rows(result, "SELECT rank, count(*) FROM comm GROUP BY ALL ORDER BY ALL") == [(0, 6), (1, 6)]
    assert rows(
        result, "SELECT rank, call_id, op, work_state FROM run WHERE source = 'flight_recorder' AND op = 'all_reduce'"
    ) == [(0, None, "all_reduce", "started")]
    assert rows(result, "SELECT group_id, source, ranks FROM process_group WHERE rank = 0 ORDER BY group_id") == [
        ("5", "hook", [0, 1]),
        ("6", "flight_recorder", [0]),
    ]


def test_traces_alone_make_a_run(folder: Folder, merge: Callable[..., ImportResult]) -> None:
    folder.trace(0, [0, 1])
    folder.trace(0, [3, 4], window=1, first=3)
    folder.trace(1, [0, 1])
    result = merge()
    assert (result.status, result.ranks) == ("complete", [0, 1])
    assert rows(result, "SELECT rank, source, list_sort(list(call_id)) FROM comm GROUP BY ALL ORDER BY ALL") == [
        (0, "kineto", [0, 1, 3, 4]),
        (1, "kineto", [0, 1]),
    ]


def test_drop_raw_deletes_what_was_read_whole(folder: Folder, merge: Callable[..., ImportResult]) -> None:
    log = folder.log(0, world=1)
    whole, cut = folder.trace(0, [0, 1, 2]), folder.trace(0, [3, 4, 5], window=1, first=3, cut=40)
    merge()
    assert whole.exists()
    merge(drop_raw=True)
    assert (log.exists(), whole.exists(), cut.exists()) == (True, False, True)


def test_raw_traces_are_deleted_where_the_launch_was_asked_to(
    folder: Folder, merge: Callable[..., ImportResult]
) -> None:
    folder.log(0, world=1)
    trace = folder.trace(0, [0, 1, 2])
    about = folder.path / "run.json"
    about.write_text('{"config": {"keep_raw": true}}')
    merge()
    assert trace.exists()
    about.write_text('{"config": {"keep_raw": false}}')
    merge(drop_raw=False)
    assert trace.exists()
    merge()
    assert not trace.exists()


def test_a_trace_that_is_being_packed_is_read_once(folder: Folder, merge: Callable[..., ImportResult]) -> None:
    folder.log(0, world=1)
    packed = folder.trace(0, [0, 1, 2])
    packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
    result = merge()
    assert [f.file for f in result.files] == ["r00000-100.talog", "r00000-w0.json.gz"]


def test_traces_that_are_not_packed_yet_count_and_unfinished_ones_do_not(
    folder: Folder, merge: Callable[..., ImportResult]
) -> None:
    """As a job leaves them that ends while its last window is being packed, and one that was killed in a window."""
    folder.log(0, world=1, windows=[{"file": "trace/r00000-w0.json.gz", "step_from": 0, "step_to": 0}])
    packed = folder.trace(0, [0, 1, 2])
    plain = packed.with_suffix("")
    plain.write_bytes(gzip.decompress(packed.read_bytes()))
    packed.rename(packed.with_name(packed.name + ".part"))
    plain.with_name(plain.name + ".tmp").write_bytes(b"{")  # an older one of the same name
    result = merge()
    assert [f.file for f in result.files] == ["r00000-100.talog", "r00000-w0.json"]
    assert "window_missing" not in found(result)
    assert "window_unfinished" not in found(result)
    (packed.parent / "r00000-w1.json.tmp").write_bytes(plain.read_bytes()[:400])
    result = merge()
    assert [f.file for f in result.files] == ["r00000-100.talog", "r00000-w0.json"]
    assert found(result)["window_unfinished"] == 1
    assert result.status == "partial"


def test_workers_give_the_same(folder: Folder, merge: Callable[..., ImportResult]) -> None:
    for rank in (0, 1):
        folder.log(rank)
        folder.trace(rank, [0, 1, 2])
    asked = "SELECT * EXCLUDE (pid) FROM comm ORDER BY rank, call_id"
    assert rows(merge(), asked) == rows(merge(workers=2), asked)


def test_what_is_a_collectors_folder(folder: Folder, tmp_path: Path) -> None:
    assert not is_run_dir(folder.path)
    folder.path.mkdir()
    assert not is_run_dir(folder.path)
    (folder.path / "run.json").write_text("{}")
    assert not is_run_dir(folder.path)
    (folder.path / "log").mkdir()
    assert is_run_dir(folder.path)
    with pytest.raises(InputError, match="no log, trace or dump in it"):
        import_run_dir(folder.path, tmp_path / "run.parquet")
    (folder.path / "run.json").unlink()
    folder.log(0)
    assert is_run_dir(folder.path)


def test_nothing_that_can_be_read_is_refused(
    folder: Folder, merge: Callable[..., ImportResult], tmp_path: Path
) -> None:
    (folder.path / "log").mkdir(parents=True)
    (folder.path / "log" / "r00000-1.talog").write_bytes(b"")
    result = merge()
    assert (result.status, result.out) == ("refused", None)
    assert not (tmp_path / "run.parquet").exists()
