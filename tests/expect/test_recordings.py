"""Every call of every recorded configuration and rank, all groups together: nothing missing, nothing extra.

The chapters' own tests compare phases, components and peers; here the whole step is one multiset of (role, operation,
element type, elements in, elements out). Sizes that depend on routing are counted here; test_expert.py replays them from
the recorded splits and checks that rows sent are rows received.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from traceanalyzer import axes, expect, traffic

Key = tuple[str, str, str, "int | None", "int | None"]

# Stand-ins of the recordings that the README of the recordings names: attention that gathers keys and values itself,
# because megatron-core's own refuses context parallelism.
STAND_INS = {"cp2_ours": "cpattn.py", "world16_tp2pp2cp2ep2dp2": "cpattn.py"}


def _measured(recording: Any, rank: int) -> Counter[Key]:
    found: Counter[Key] = Counter()
    stand_in = STAND_INS.get(recording.name)
    for row in recording.rows:
        if int(row["rank"]) != rank:
            continue
        role = axes.role_of_description(row["group_desc"])
        op = traffic.normalise_op(row["op"])
        assert role is not None, row
        assert op is not None, row
        if stand_in and stand_in in row["callsite"]:
            assert role == "cp", row
            continue
        sizes = int(row["nelems_in"]), int(row["nelems_out"])
        if op in ("send", "recv"):
            sizes = (max(sizes), max(sizes))
        found[role, op, row["dtype"], *sizes] += int(row["count"])
    return found


def _expected(recording: Any, rank: int) -> Counter[Key]:
    found: Counter[Key] = Counter()
    for call in expect.expected(recording.job, rank).calls:
        if recording.name in STAND_INS and call.role == "cp":
            continue
        sizes = (None, None) if call.varies else (call.in_elems, call.out_elems)
        found[call.role, call.op, call.dtype, *sizes] += call.calls
    return found


def test_whole_step(recording: Any) -> None:
    for rank in recording.ranks:
        wanted = _expected(recording, rank)
        measured: Counter[Key] = Counter()
        for key, count in _measured(recording, rank).items():
            varies = (*key[:3], None, None)
            measured[key if key in wanted or varies not in wanted else varies] += count
        assert measured == wanted, f"rank {rank}"


def test_nothing_is_unmodelled(recording: Any) -> None:
    """No gap stands in for a rule: what could not be judged would hide behind it."""
    for rank in recording.ranks:
        assert expect.expected(recording.job, rank).not_modelled == (), f"rank {rank}"
