"""Walks of the recorded jobs against what real megatron-core 0.16.1 did: which calls, how often, and in which order.

Nothing of the expectation is asked here; only its tests' reader of the recordings is used again.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from traceanalyzer import axes, traffic
from traceanalyzer.errors import JobError
from traceanalyzer.simulate.program import Call, Program
from traceanalyzer.simulate.walk import walk

_ROOT = Path(__file__).resolve().parents[2]

# Stand-ins of the recordings: attention that gathers keys and values itself, because megatron-core's own refuses
# context parallelism.
_STAND_INS = {"cp2_ours": "cpattn.py", "world16_tp2pp2cp2ep2dp2": "cpattn.py"}
_NOT_WALKED = {"dp2_megatron_fsdp": "use_megatron_fsdp", "dp2_torch_fsdp2": "use_torch_fsdp2"}
_UNEVEN = {("ep", "all_to_all"), ("etp", "all_gather"), ("etp", "reduce_scatter")}

Key = tuple[Any, ...]


def _reader() -> ModuleType:
    path = _ROOT / "tests" / "expect" / "conftest.py"
    spec = importlib.util.spec_from_file_location("recordings_reader", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_READER = _reader()


def _recordings() -> list[Any]:
    folder = next((path for path in (_ROOT / "shared", _ROOT.parent / "shared") if path.is_dir()), None)
    files = sorted((folder / "megatron_recorded").glob("*.csv.gz")) if folder else []
    found = [
        pytest.param(_READER.Recording(path), id=path.name.split(".")[0], marks=pytest.mark.shared) for path in files
    ]
    skip = pytest.mark.skip(reason="the shared reference material is not beside this checkout")
    return found or [pytest.param(None, id="none", marks=[pytest.mark.shared, skip])]


def _of_rank(programs: list[Program], rank: int) -> list[tuple[Call, int, int]]:
    """The calls of a rank with its own elements in and out."""
    (program,) = [one for one in programs if rank in one.ranks]
    place = program.ranks.index(rank)

    def own(value: Any) -> int:
        return int(value[place]) if isinstance(value, np.ndarray) else value

    calls = [one for one in program.instructions if isinstance(one, Call)]
    return [(one, own(one.in_elems), own(one.out_elems)) for one in calls]


def _size(role: str, op: str, hidden: int, sent: int, received: int) -> Key:
    """Elements; of what depends on routing, whether rows are hidden states or probabilities."""
    if (role, op) not in _UNEVEN:
        return sent, received
    return ("hidden",) if max(sent, received) >= 16 * hidden else ("probabilities",)


@pytest.mark.parametrize("recording", _recordings())
def test_whole_step(recording: Any) -> None:
    """Every call of every recorded rank: role, operation, type, elements. Calls on groups of one rank are calls."""
    if recording.name in _NOT_WALKED:
        with pytest.raises(JobError, match=_NOT_WALKED[recording.name]):
            walk(recording.job)
        return
    programs = walk(recording.job, routing="even").programs
    hidden = recording.job.hidden_size
    stand_in = _STAND_INS.get(recording.name)
    for rank in recording.ranks:
        recorded: Counter[Key] = Counter()
        for row in recording.rows:
            if int(row["rank"]) != rank or (stand_in and stand_in in row["callsite"]):
                continue
            role, op = axes.role_of_description(row["group_desc"]), traffic.normalise_op(row["op"])
            assert role is not None
            assert op is not None
            sent, received = int(row["nelems_in"]), int(row["nelems_out"])
            if op in ("send", "recv"):
                sent = received = max(sent, received)
            recorded[(role, op, row["dtype"], *_size(role, op, hidden, sent, received))] += int(row["count"])
        walked = Counter(
            (one.role, one.op, traffic.normalise_dtype(one.dtype), *_size(one.role, one.op, hidden, sent, received))
            for one, sent, received in _of_rank(programs, rank)
            if not (stand_in and one.role == "cp")
        )
        assert walked == recorded, f"rank {rank}"


_SEQUENCES = [
    "ep2_alltoall_droppad",
    "pp2",
    "pp2_untied",
    "pp2_vpp2",
    "pp2_vpp2_m8",
    "pp2_vpp2_overlap",
    "pp4",
    "tp2pp2_nosp",
    "tp2pp2_sp",
    "world16_tp2pp2cp2ep2dp2",
]


@pytest.mark.parametrize("recording", [one for one in _recordings() if one.id in (*_SEQUENCES, "none")])
def test_order_of_a_step(recording: Any) -> None:
    """All calls of a step in the order in which a rank made them: forward, backward, messages, reductions, optimizer."""
    path = recording.path.parent / "sequences" / f"{recording.name}.json.gz"
    with gzip.open(path, "rt") as text:
        content = json.load(text)
    programs = walk(recording.job, routing="even").programs
    hidden = recording.job.hidden_size
    stand_in = recording.name in _STAND_INS
    for rank, rows in content["ranks"].items():
        recorded = []
        for row in (dict(zip(content["columns"], values, strict=True)) for values in rows):
            role = "world" if row["group"] == "WORLD" else axes.role_of_description(row["group"])
            op = traffic.normalise_op(row["op"])
            assert role is not None
            assert op is not None
            sent, received = row["nelems_in"], row["nelems_out"]
            if op in ("send", "recv"):
                sent = received = max(sent, received)
            if not (stand_in and role == "cp"):
                recorded.append((role, op, *_size(role, op, hidden, sent, received)))
        walked = [
            (one.role, one.op, *_size(one.role, one.op, hidden, sent, received))
            for one, sent, received in _of_rank(programs, int(rank))
            if not (stand_in and one.role == "cp")
        ]
        assert walked == recorded, f"rank {rank}"


def test_every_recorded_sequence_is_compared() -> None:
    parameters = _recordings()
    if parameters[0].id == "none":
        pytest.skip("the shared reference material is not beside this checkout")
    folder = parameters[0].values[0].path.parent / "sequences"
    assert sorted(path.name.split(".")[0] for path in folder.glob("*.json.gz")) == _SEQUENCES
