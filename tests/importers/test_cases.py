"""The traces that broke other tools: every fact in ``shared/cases/*/expected.md``, from the imported run.

The facts were worked out from the intended events, independently of any reader. A fact that no check below knows fails.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from traceanalyzer import intervals, traffic

pytestmark = pytest.mark.shared

CASES = (
    "01_truncated_midwrite",
    "02_windows_backslashes",
    "03_inf_and_nan_values",
    "04_nanosecond_timestamps",
    "05_broken_times",
    "06_communication_kernel_names",
    "07_spans_that_are_not_work",
    "08_coalesced_without_metadata",
    "09_rank_not_recorded",
    "10_group_ranks_shortened",
    "11_uneven_all_to_all",
    "12_two_ranks_in_one_file",
)

# Words of the facts -> words of the schema.
MEMBERS_SOURCE = {"header": "header", "inferred": "inferred", "shown": "call"}
REJECTED = {
    "no_timestamps": "rejected_device_no_timestamps",
    "negative_duration": "rejected_device_negative_duration",
    "implausible_duration": "rejected_device_implausible_duration",
    "missing_duration": "rejected_device_missing_duration",
}


class Case:
    """One case: what was imported, and the figures that facts ask for."""

    def __init__(self, imported: Any, facts: dict[str, Any]) -> None:
        self.imported = imported
        self.facts = facts
        self.result = imported.result

    def device(self, rank: int | None = None) -> list[dict[str, Any]]:
        return [k for k in self.imported.rows("kernel") if rank is None or k["rank"] == rank]

    def kernels(self) -> list[dict[str, Any]]:
        return [k for k in self.device() if k["category"] == "kernel"]

    def comm(self) -> list[dict[str, Any]]:
        return [k for k in self.kernels() if k["kernel_class"] == "comm"]

    def compute(self, rank: int | None = None) -> list[dict[str, Any]]:
        return [k for k in self.device(rank) if k["category"] == "kernel" and k["kernel_class"] != "comm"]

    def window(self) -> tuple[int, int]:
        rank = self.imported.rows("rank")[0]
        device = [k for k in self.device() if k["dur_ns"] > 0]  # an activity without duration adds no time
        low = min(k["start_ns"] for k in device)
        high = max(k["start_ns"] + k["dur_ns"] for k in device)
        assert (rank["window_start_ns"], rank["window_end_ns"]) == (low, high)
        return low, high

    def calls(self, **equal: Any) -> list[dict[str, Any]]:
        return sorted(self.imported.rows("comm_record", **equal), key=lambda c: c["call_id"])

    def group(self, group_id: str) -> dict[str, Any]:
        [found] = self.imported.rows("process_group", group_id=group_id)
        return found  # type: ignore[no-any-return]


def spans(kernels: list[dict[str, Any]]) -> tuple[intervals.Ints, intervals.Ints]:
    start = np.array([k["start_ns"] for k in kernels], np.int64)
    return start, start + np.array([k["dur_ns"] for k in kernels], np.int64)


def busy(kernels: list[dict[str, Any]]) -> int:
    return intervals.length(*intervals.union(*spans(kernels)))


def bytes_of(call: dict[str, Any], side: str) -> int | None:
    return traffic.tensor_bytes(call[f"{side}_elems"], call["dtype"])


def moved(call: dict[str, Any], count: Callable[..., Fraction | None]) -> Fraction | None:
    """Off-rank or received bytes of a call."""
    payload = traffic.payload_bytes(call["op"], call["in_elems"], call["out_elems"], call["dtype"], call["group_size"])
    keys = ("dtype", "in_elems", "out_elems", "in_splits", "out_splits", "group_rank")
    return count(call["op"], payload, call["group_size"], **{k: call[k] for k in keys})


# One check for each kind of fact -------------------------------------------------------------------------------------


def status(case: Case, value: str) -> None:
    assert case.result.status == value
    if value != "refused":
        assert {r["import_status"] for r in case.imported.rows("rank")} <= {value, "complete"}


def reason(case: Case, value: str) -> None:
    if value == "file cut mid-event":
        [issue] = [i for i in case.imported.rows("issue") if i["code"] == "file_cut"]
        assert issue["severity"] == "data_loss"
        # every whole event stands before that place, and the torn one behind it
        cut = int(re.fullmatch(r"after byte (\d+) of the text", issue["location"])[1])  # type: ignore[index]
        text = (case.facts["folder"] / "rank0.json").read_bytes()
        assert text[:cut].rstrip(b" \n,").endswith(b"}")
        assert text[cut:].lstrip(b" \n,").startswith(b'{"ph": "X"')
        assert text[cut:].count(b'"ph"') == 1
    else:
        assert value in case.result.files[0].reason


def device_kernels(case: Case, value: int) -> None:
    assert len(case.kernels()) == value


def window_ns(case: Case, value: int) -> None:
    low, high = case.window()
    assert high - low == value


def busy_ns(case: Case, value: int) -> None:
    assert busy(case.device()) == value


def idle_ns(case: Case, value: int) -> None:
    low, high = case.window()
    assert high - low - busy(case.device()) == value


def compute_ns(case: Case, value: int) -> None:
    assert busy(case.compute()) == value


def comm_ns(case: Case, value: int) -> None:
    assert busy(case.comm()) == value


def exposed_comm_ns(case: Case, value: int) -> None:
    assert intervals.exposed(*spans(case.comm()), *spans(case.compute())) == value


def overlap_ns(case: Case, value: int) -> None:
    covered = intervals.overlap_each(*intervals.union(*spans(case.comm())), *intervals.union(*spans(case.compute())))
    assert int(covered.sum()) == value


def overlap_percent(case: Case, value: float) -> None:
    comm = busy(case.comm())
    assert (comm - intervals.exposed(*spans(case.comm()), *spans(case.compute()))) * 100 / comm == value


def complete_events(case: Case, value: int) -> None:
    assert case.imported.rows("rank")[0]["events_read"] == value


def repaired_strings(case: Case, value: int) -> None:
    [issue] = [i for i in case.imported.rows("issue") if i["code"] == "repaired_string"]  # said once
    assert issue["occurrences"] == value
    names = [r["name"] for kind in ("cpu_op", "kernel", "span") for r in case.imported.rows(kind)]
    assert len(names) == 6
    assert not [n for n in names if any(c < " " for c in n)]
    assert "torch/cuda/__init__.py(219): _lazy_init" in names


def missing_values(case: Case, value: int) -> None:
    assert case.imported.issues()["missing_value"] == value


def copies(case: Case, value: int) -> None:
    found = [k for k in case.device() if k["kernel_class"] == "copy"]
    assert len(found) == value
    assert {k["category"] for k in found} == {"gpu_memcpy"}
    assert sorted(k["dur_ns"] for k in found)[0] == 0  # it counts and adds no time


def copy_bytes(case: Case, value: int) -> None:
    assert sum(k["copy_bytes"] for k in case.device() if k["copy_bytes"] is not None) == value


def first_start_ns(case: Case, value: int) -> None:
    assert min(k["start_ns"] for k in case.kernels()) == value


def last_end_ns(case: Case, value: int) -> None:
    assert max(k["start_ns"] + k["dur_ns"] for k in case.kernels()) == value


def overlapping_pairs(case: Case, value: int) -> None:
    start, end = spans(sorted(case.kernels(), key=lambda k: k["start_ns"]))
    assert int((start[1:] < end[:-1]).sum()) == value
    assert (start[1:] - end[:-1]).tolist() == [0] * 7 + [100]


def sum_of_durations_ns(case: Case, value: int) -> None:
    assert sum(k["dur_ns"] for k in case.kernels()) == value


def events(case: Case, value: int) -> None:
    assert case.imported.rows("rank")[0]["events_read"] == value


def device_events_usable(case: Case, value: int) -> None:
    assert len(case.device()) == value


def device_events_rejected(case: Case, value: int) -> None:
    issues = case.imported.issues()
    assert sum(n for code, n in issues.items() if code.startswith("rejected_device_")) == value
    assert case.imported.rows("rank")[0]["rows_rejected"] == value + 1  # and one on the host


def rejected_by_reason(case: Case, value: dict[str, int]) -> None:
    issues = case.imported.issues()
    assert {code: n for code, n in issues.items() if code.startswith("rejected_device_")} == {
        REJECTED[why]: n for why, n in value.items()
    }


def unfinished_cpu_events(case: Case, value: int) -> None:
    assert case.imported.issues()["rejected_host_unfinished"] == value


def comm_kernels(case: Case, value: int) -> None:
    assert len(case.comm()) == value


def compute_kernels(case: Case, value: int) -> None:
    assert len(case.compute()) == value


def by_name(case: Case, value: list[dict[str, Any]]) -> None:
    found = [
        {
            "name": k["name"],
            "class": "comm" if k["kernel_class"] == "comm" else "compute",
            "operation": k["kernel_op"],
        }
        for k in case.kernels()
    ]
    assert sorted(found, key=lambda k: k["name"]) == sorted(value, key=lambda k: k["name"])


def collectives_with_unknown_bytes(case: Case, value: int) -> None:
    assert case.calls() == []  # no call, so no size that could be shown
    assert [k["coalesce_id"] for k in case.comm()] == [None] * value
    assert case.imported.issues()["kernels_without_call"] == value


def rank(case: Case, value: int) -> None:
    [row] = case.imported.rows("rank")
    assert (row["rank"], row["rank_source"]) == (value, "header")


def tie(case: Case, value: str) -> None:
    assert value == "inferred"
    # coalesced is one of the two kinds of evidence that the schema calls inferred
    assert {k["join_evidence"] for k in case.comm()} == {"coalesced"}
    assert {c["join_evidence"] for c in case.calls()} == {"coalesced"}


def kernels(case: Case, value: list[dict[str, Any]]) -> None:
    for fact in value:
        [kernel] = [k for k in case.comm() if k["stream"] == fact["stream"]]
        ours = case.calls(coalesce_id=kernel["coalesce_id"])
        sends = [c for c in ours if c["op"] == "send"]
        receives = [c for c in ours if c["op"] == "recv"]
        checks: dict[str, Callable[[], object]] = {
            "stream": lambda: kernel["stream"],  # noqa: B023 - called in this round
            "dur_ns": lambda: kernel["dur_ns"],  # noqa: B023
            "operations": lambda: len(ours),  # noqa: B023
            "group": lambda: case.group(ours[0]["group_id"])["description"],  # noqa: B023
            "sent_bytes": lambda: sum(moved(c, traffic.off_rank_bytes) or 0 for c in sends),  # noqa: B023
            "received_bytes": lambda: sum(moved(c, traffic.received_bytes) or 0 for c in receives),  # noqa: B023
            "to_rank": lambda: sends[0]["peer"],  # noqa: B023
            "from_rank": lambda: receives[0]["peer"],  # noqa: B023
            "input_bytes": lambda: sum(bytes_of(c, "in") or 0 for c in ours),  # noqa: B023
            "output_bytes": lambda: sum(bytes_of(c, "out") or 0 for c in ours),  # noqa: B023
            "ring_wire_bytes_per_rank": lambda: sum(moved(c, traffic.off_rank_bytes) or 0 for c in ours),  # noqa: B023
        }
        assert {key: checks[key]() for key in fact} == fact
        assert {c["group_id"] for c in ours} == {ours[0]["group_id"]}
        # time is shared, not repeated: each call shows the kernel's own
        assert {(c["start_ns"], c["dur_ns"]) for c in ours} == {(kernel["start_ns"], kernel["dur_ns"])}


def ranks(case: Case, value: dict[str, Any]) -> None:
    assert case.result.ranks == sorted(int(r) for r in value)
    for number, fact in value.items():
        [row] = case.imported.rows("rank", rank=int(number))
        assert (row["source_file"], row["rank_source"]) == (fact["file"], fact["rank_source"])
        assert busy(case.compute(int(number))) == fact["compute_ns"]


def files_without_rank(case: Case, value: list[str]) -> None:
    left_out = [i for i in case.imported.rows("issue") if i["code"] == "file_without_rank"]
    assert [i["source_file"] for i in left_out] == value
    assert all("--rank N" in i["sentence"] and "distributedInfo" in i["sentence"] for i in left_out)


def groups(case: Case, value: dict[str, Any]) -> None:
    for group_id, fact in value.items():
        row = case.group(group_id)
        assert row["group_size"] == fact["size"]
        assert row["ranks"] == fact["members"]
        assert row["ranks_source"] == MEMBERS_SOURCE[fact["members_source"]]


def ring_wire_bytes_per_rank(case: Case, value: dict[str, float]) -> None:
    found = {c["group_id"]: moved(c, traffic.off_rank_bytes) for c in case.calls()}
    assert found == {group: Fraction(n) for group, n in value.items()}


def operations(case: Case, value: list[dict[str, Any]]) -> None:
    for fact in value:
        [call] = case.calls(seq=fact["seq"])
        sent = moved(call, traffic.off_rank_bytes)
        handed_in = bytes_of(call, "in")
        assert sent is not None
        assert handed_in is not None
        checks: dict[str, object] = {
            "seq": call["seq"],
            "rows_out": call["in_splits"],
            "sent_bytes": sent,
            "received_bytes": moved(call, traffic.received_bytes),
            "bytes_kept_local": handed_in - sent,
        }
        assert {key: checks[key] for key in fact} == fact
        assert call["splits_known"] is True


def evidence(case: Case, value: dict[str, Any]) -> None:
    message = case.result.files[0].reason
    assert f"ids {', '.join(map(str, value['correlation_ids_with_two_kernels']))}" in message
    assert f"pid 1 is labelled {', '.join(value['labels_of_pid_1'])}" in message
    assert "Give one file for each rank" in message


CHECKS: dict[str, Callable[[Case, Any], None]] = {
    check.__name__: check
    for check in (
        status, reason, device_kernels, window_ns, busy_ns, idle_ns, compute_ns, comm_ns, exposed_comm_ns, overlap_ns,
        overlap_percent, complete_events, repaired_strings, missing_values, copies, copy_bytes, first_start_ns,
        last_end_ns, overlapping_pairs, sum_of_durations_ns, events, device_events_usable, device_events_rejected,
        rejected_by_reason, unfinished_cpu_events, comm_kernels, compute_kernels, by_name,
        collectives_with_unknown_bytes, rank, tie, kernels, ranks, files_without_rank, groups,
        ring_wire_bytes_per_rank, operations, evidence,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_fact_of_the_case_holds(
    name: str, shared: Callable[[str], Path], import_files: Callable[..., Any]
) -> None:
    folder = shared(f"cases/{name}")
    [text] = re.findall(r"```json\n(.*?)\n```", (folder / "expected.md").read_text(), re.DOTALL)
    facts = json.loads(text)
    case = Case(import_files([folder]), {**facts, "folder": folder})
    assert set(facts) <= set(CHECKS), "a fact that nothing checks"
    for fact, value in facts.items():
        CHECKS[fact](case, value)
    if facts["status"] == "refused":
        assert case.result.out is None


def test_no_case_is_left_out(shared: Callable[[str], Path]) -> None:
    assert sorted(p.name for p in shared("cases").iterdir() if p.is_dir()) == sorted(CASES)
