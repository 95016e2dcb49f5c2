"""Dumps of the flight recorder."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from traceanalyzer.collectors import flight, hooks
from traceanalyzer.collectors.state import state

sys.path.insert(0, str(Path(__file__).parent))
from window_job import Job

DUMP = {
    "version": "2.10",
    "pg_config": {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
        "1": {"name": "1", "desc": "TENSOR_MODEL_PARALLEL_GROUP", "ranks": "[0, 2]"},
        "2": {"name": "", "desc": "", "ranks": ""},
    },
    "entries": [{"record_id": 0}],
}


class Heard:
    def __init__(self) -> None:
        self.issues: list[tuple[str, str]] = []

    def issue(self, severity: str, code: str, sentence: str) -> None:
        self.issues.append((code, sentence))


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    log = Heard()
    monkeypatch.setattr(state, "log", log)
    return log


def session(tmp_path: Path, **config: Any) -> Any:
    return SimpleNamespace(run_dir=tmp_path, rank=3, config=config)


def torch_with(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(**functions))  # type: ignore[arg-type]


def test_a_job_leaves_its_last_calls(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    job = Job.start(tmp_path, loops=3, each={1: {"hang_s": 1.0}}, own={r: {"slow_in": 2} for r in range(2)})
    job.end()
    assert job.codes == [0, 0], job.errors
    assert job.run_dir is not None
    assert sorted(path.name for path in (job.run_dir / "flight").iterdir()) == ["r00000.pickle", "r00001.pickle"]
    for rank in range(2):
        entries = pickle.loads((job.run_dir / "flight" / f"r0000{rank}.pickle").read_bytes())["entries"]
        reductions = [e for e in entries if e["profiling_name"] == "gloo:all_reduce"]
        assert [e["process_group"][1] for e in reductions] == ["DATA_PARALLEL_GROUP"] * 6
        assert [e["collective_seq_id"] for e in reductions] == list(range(1, 7))
        assert not any(e.get("frames") for e in entries)
    # The job sleeps in step 2: nothing is open, so it is not called a hang.
    assert job.issues(1)["no_progress"] == (
        "no step began and no call was made for 1 s after step 2; no call is known to be open, so this may be an evaluation, "
        "a checkpoint or a hang elsewhere: the flight recorder is dumped"
    )
    assert not {"hang", "no_progress"} & job.issues(0).keys()
    assert "hang" not in job.issues(1)


def test_a_hang_is_dumped_once(tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(flight.time, "monotonic", lambda: clock[0])
    entries = [{"state": "completed"}, {"state": "started"}, {"state": "scheduled"}]
    torch_with(monkeypatch, _dump_nccl_trace=lambda **_: pickle.dumps({**DUMP, "entries": entries}))
    monkeypatch.setattr(state, "on", True)
    calls = [0]
    monkeypatch.setattr(flight.hooks, "current", lambda: SimpleNamespace(calls=lambda: calls[0]))
    windows = SimpleNamespace(step=-1)
    dumps = flight.Flight(session(tmp_path, hang_s=600), windows)
    dumped = tmp_path / "flight" / "r00003.pickle"

    def after(seconds: float) -> bool:
        clock[0] += seconds
        dumps.tick()
        return dumped.exists()

    dumps.tick()
    assert not after(5000)  # no step yet: the job may be loading
    windows.step = 7
    assert not after(1)
    assert not after(599)
    assert after(1)
    dumped.unlink()
    assert not after(5000)
    windows.step = 8
    assert not after(1)
    for _ in range(5):  # an evaluation: calls go on
        calls[0] += 1
        assert not after(500)
    assert after(600)
    assert [code for code, _ in heard.issues] == ["hang", "hang"]
    assert heard.issues[0][1] == (
        "no step began and no call was made for 600 s after step 7; 2 calls are not completed: the flight recorder is dumped"
    )
    del entries[1:]
    windows.step = 9
    dumped.unlink()
    assert not after(1)
    monkeypatch.setattr(state, "on", False)
    assert after(600)
    assert heard.issues[-1][0] == "no_progress"
    assert heard.issues[-1][1].startswith(
        "no step began for 600 s after step 9, calls were not watched; no call is known "
    )
    hooks.thread.me.inside = True
    try:
        windows.step = 10
        assert after(1)
        after(600)
    finally:
        hooks.thread.me.inside = False
    assert heard.issues[-1][0] == "hang"
    assert "1 of this process's threads are in a call" in heard.issues[-1][1]


def test_the_order_in_which_torch_is_asked(tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def dump(**options: Any) -> bytes:
        given.append(options)
        return pickle.dumps(DUMP)

    empty = pickle.dumps({"entries": []})
    torch_with(monkeypatch, _dump_nccl_trace=lambda **_: empty, _dump_fr_trace=dump)
    assert flight.Flight(session(tmp_path)).dump() == tmp_path / "flight" / "r00003.pickle"
    assert given == [{"includeCollectives": True, "includeStackTraces": False, "onlyActive": False}]
    assert pickle.loads((tmp_path / "flight" / "r00003.pickle").read_bytes()) == DUMP


@pytest.mark.parametrize(
    ("functions", "why"),
    [
        pytest.param({}, "this torch has none (_dump_fr_trace, _dump_nccl_trace)", id="older torch"),
        pytest.param(
            {"_dump_fr_trace": lambda **_: pickle.dumps({"entries": []})},
            "it is empty: TORCH_FR_BUFFER_SIZE is 0, or the backend does not record",
            id="nothing in it",
        ),
    ],
)
def test_what_is_missing_is_said_once(
    tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch, functions: dict[str, Any], why: str
) -> None:
    torch_with(monkeypatch, **functions)
    dumps = flight.Flight(session(tmp_path))
    assert dumps.dump() is None
    dumps.close()
    assert heard.issues == [("no_flight_recorder", f"no dump of the flight recorder: {why}")]
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_torchs_stays_inside(tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> bytes:
        raise RuntimeError("no recorder here")

    monkeypatch.setattr(state, "errors", 0)
    torch_with(monkeypatch, _dump_fr_trace=broken)
    assert flight.Flight(session(tmp_path)).dump() is None
    assert state.errors == 1


def test_a_folder_that_cannot_be_written(tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_with(monkeypatch, _dump_fr_trace=lambda **_: pickle.dumps(DUMP))
    (tmp_path / "flight").write_text("")
    assert flight.Flight(session(tmp_path)).dump() is None
    assert [code for code, _ in heard.issues] == ["no_flight_recorder"]


def test_members_of_groups() -> None:
    assert flight.groups(pickle.dumps(DUMP)) == {
        "0": ("default_pg", [0, 1, 2, 3]),
        "1": ("TENSOR_MODEL_PARALLEL_GROUP", [0, 2]),
    }


def test_a_dump_that_would_run_code_is_refused() -> None:
    with pytest.raises(pickle.UnpicklingError, match="in a dump of the flight recorder"):
        flight.groups(pickle.dumps(Path("x")))
