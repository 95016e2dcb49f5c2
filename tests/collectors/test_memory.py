"""Bytes of parameters, gradients and optimizer state, against sizes worked out by hand."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.collectors import marks, memory

sys.path.insert(0, str(Path(__file__).parent))
from marked_jobs import folder_of, needs_megatron, run


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    yield
    marks.uninstall()


class Log:
    def __init__(self) -> None:
        self.records: list[Any] = []

    def put(self, record: Any) -> None:
        self.records.append(record)


@pytest.mark.megatron
@pytest.mark.parametrize("rank", [0, 1])
def test_megatron_tensor_parallel(tmp_path_factory: pytest.TempPathFactory, rank: int) -> None:
    needs_megatron()
    found = run(folder_of(tmp_path_factory), "megatron_job", "tp2_sp")
    # half of each: embedding 256 x 64; qkv 192 x 64, proj 64 x 64, fc1 512 x 64, fc2 64 x 256 of two layers; norms whole
    elements = 256 * 64 // 2 + 2 * ((192 * 64 + 64 * 64 + 512 * 64 + 64 * 256) // 2 + 2 * 64) + 64
    steps = 14 * 4  # Adam's count of steps for each parameter, float32
    assert [r for r in found.records(rank) if r[0] == "metric"] == [
        ["metric", "memory.parameters_bytes", 2 * elements, "bytes", 0],
        ["metric", "memory.gradients_bytes", 4 * elements, "bytes", 0],
        ["metric", "memory.optimizer_bytes", 3 * 4 * elements + steps, "bytes", 0],
    ]


@pytest.mark.megatron
def test_distributed_optimizer_holds_its_shard(tmp_path_factory: pytest.TempPathFactory) -> None:
    needs_megatron()
    found = run(folder_of(tmp_path_factory), "megatron_job", "dp2_distopt_overlap")
    elements = 256 * 64 + 2 * (192 * 64 + 64 * 64 + 512 * 64 + 64 * 256 + 2 * 64) + 64
    sizes = [{r[1]: r[2] for r in found.records(rank) if r[0] == "metric"} for rank in (0, 1)]
    for one in sizes:
        # The buffer is padded, bucket by bucket.
        assert 2 * elements <= one["memory.parameters_bytes"] < 2 * elements * 1.02
        assert one["memory.gradients_bytes"] == 2 * one["memory.parameters_bytes"]
    total = sum(one["memory.optimizer_bytes"] for one in sizes)
    assert 12 * elements <= total < 12 * elements * 1.02


def test_storages_are_counted_once() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    model = torch.nn.Linear(4, 3)
    model.again = model.weight  # tied
    optimizer = torch.optim.Adam(model.parameters())
    marks.Seen.add(marks.seen.models, model)
    marks.Seen.add(marks.seen.optimizers, optimizer)
    assert memory.measure() == {
        "memory.parameters_bytes": 60,
        "memory.gradients_bytes": 0,
        "memory.optimizer_bytes": 0,
    }
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert memory.measure() == {
        "memory.parameters_bytes": (12 + 3) * 4,
        "memory.gradients_bytes": (12 + 3) * 4,
        "memory.optimizer_bytes": 2 * (12 + 3) * 4 + 2 * 4,
    }


def test_it_is_measured_once_and_again_when_something_comes() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    model, log = torch.nn.Linear(4, 3), Log()
    marks.Seen.add(marks.seen.models, model)
    for step in (5, 6):
        memory.record(log, step)
    optimizer = torch.optim.SGD(model.parameters())
    marks.Seen.add(marks.seen.optimizers, optimizer)
    memory.record(log, 7)
    assert [(r[1], r[4]) for r in log.records] == [
        ("memory.parameters_bytes", 5),
        ("memory.gradients_bytes", 5),
        ("memory.parameters_bytes", 7),
        ("memory.gradients_bytes", 7),
        ("memory.optimizer_bytes", 7),
    ]


def test_an_accelerator_is_asked_when_the_job_uses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    log = Log()
    stats = {
        "allocated_bytes.all.current": 10,
        "reserved_bytes.all.current": 20,
        "allocated_bytes.all.peak": 15,
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    memory.record(log, 0)
    assert log.records == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    memory.record(log, 1)
    assert log.records == [
        ["metric", "memory.allocated_bytes", 10, "bytes", 1],
        ["metric", "memory.reserved_bytes", 20, "bytes", 1],
        ["metric", "memory.peak_allocated_bytes", 15, "bytes", 1],
    ]
