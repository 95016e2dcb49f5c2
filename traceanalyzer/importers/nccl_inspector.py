"""Reads the JSON lines of NCCL's Inspector plugin (format v4.x) into rows of the run table.

A line is one call of one communicator on one rank: ``header`` (communicator, its rank and size), ``metadata`` (host, pid),
and ``coll_perf`` for a collective or ``p2p_perf`` for a send or receive (NVIDIA/nccl, ext-profiler/inspector). Ranks are
those of the communicator. The rank in the largest communicator is taken for the global one, which holds for torch's default
group, unless the file's name states a rank; with a rank that differs from it, peers stay unknown.

Sizes are bytes without a type, of one rank: of an all-gather its shard, of a reduce-scatter the shard it gets. They are given
as elements of type uint8. Times are there with the plugin's verbose output only; else a call has a duration and no start.
Small messages and calls without device times are dropped by the plugin itself unless it was told otherwise.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from traceanalyzer import traffic
from traceanalyzer.importers.calls import POINT_TO_POINT
from traceanalyzer.importers.kineto import Summary, rank_of_name
from traceanalyzer.importers.spool import RunWriter, issue, table_of

SOURCE = "nccl_inspector"

_GZIP = b"\x1f\x8b"
_MAJOR = 4
_KINDS = {"coll_perf": "coll", "p2p_perf": "p2p"}
"""Key of a call in a line -> prefix of its fields."""


def is_log(path: Path) -> bool:
    """Whether a file looks like the plugin's: its first line is an object with a header and one of the kinds of calls."""
    try:
        with gzip.open(path) if _head(path) == _GZIP else path.open("rb") as file:
            first = file.readline(1 << 20)
    except (OSError, EOFError, zlib.error):
        return False
    if b'"header"' not in first:
        return False
    try:
        record = json.loads(first)
    except ValueError:
        return False
    return isinstance(record, dict) and any(k in record for k in _KINDS)


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(2)


def import_file(path: Path, part: Path, *, told_rank: int | None = None) -> Summary:
    """Imports one file of one rank into the Parquet file ``part``; damage becomes rows of kind ``issue``.

    Gives a Summary of status ``refused``, and no file, for a file of several ranks (a process that drives several devices),
    one without a usable line, and one of a newer major version.
    """
    data = path.read_bytes()
    torn = False
    text = data
    if data.startswith(_GZIP):
        text, torn = _unpacked(data)
    records, odd = _records(text)

    def refused(reason: str) -> Summary:
        return Summary(path.name, str(path), "refused", reason=f"{path.name}: {reason}", source=SOURCE)

    if not records:
        return refused("no line of the NCCL Inspector could be read.")
    versions = {str(r["metadata"].get("inspector_output_format_version") or "") for r in records}
    newer = [v for v in versions if (major := v.lstrip("v").split(".")[0]).isdigit() and int(major) > _MAJOR]
    if newer:
        return refused(f"written in the Inspector's format {newer[0]}; this program reads up to v{_MAJOR}.x.")
    places = {(r["header"].get("id"), _number(r["header"].get("rank"))) for r in records}
    twice = [c for c, n in Counter(c for c, _ in places).items() if n > 1]
    if twice:
        return refused("holds calls of several ranks of one communicator. Record each rank in a process of its own.")
    sizes = {r["header"].get("id"): _number(r["header"].get("n_ranks")) for r in records}
    largest = max(sizes, key=lambda c: sizes[c] or 0)
    of_largest = next(rank for c, rank in places if c == largest)
    named = rank_of_name(path.name)
    rank, rank_source = (
        (named, "file name")
        if named is not None
        else (told_rank, "told")
        if told_rank is not None
        else (of_largest, "header")
    )
    default = largest if rank == of_largest else None
    rows = [_row(i, r, default) for i, r in enumerate(records)]
    about = {"rank": rank, "source": SOURCE}
    issues = _issues(odd, torn, rank_source == "header", rank, path.name)
    status = "partial" if torn else "complete with rejects" if odd else "complete"
    first = records[0]["metadata"]
    pid = _number(first.get("pid"))
    times = [row["start_ns"] for row in rows if row["start_ns"] is not None]
    ends = [
        row["start_ns"] + row["dur_ns"] for row in rows if row["start_ns"] is not None and row["dur_ns"] is not None
    ]
    window = {"window_start_ns": min(times, default=None), "window_end_ns": max(ends, default=None)}
    groups = [
        {
            **about,
            "group_id": str(comm),
            "name": _name(comm, records),
            "group_size": size,
            "ranks": list(range(size)) if comm == default and size else None,
            "ranks_source": "inferred" if comm == default and size else None,
        }
        for comm, size in sizes.items()
        if comm is not None
    ]
    rank_row = {
        **about,
        **window,
        "rank_source": rank_source,
        "host": None if first.get("hostname") is None else str(first["hostname"]),
        "pid": pid,
        "source_file": path.name,
        "source_sha256": hashlib.sha256(data).hexdigest(),
        "versions": json.dumps({"nccl_inspector": sorted(versions)[-1]} if any(versions) else {}),
        "events_read": len(records) + odd,
        "rows_kept": len(rows),
        "rows_rejected": odd,
        "import_status": status,
    }
    with RunWriter(part, {}) as writer:
        writer.write("comm_record", [table_of("comm_record", [{**about, **row} for row in _in_order(rows)])])
        writer.write("issue", [table_of("issue", [{**about, "source_file": path.name, **i} for i in issues])])
        writer.write("process_group", [table_of("process_group", groups)])
        writer.write("rank", [table_of("rank", [rank_row])])
    return Summary(
        file=path.name,
        path=str(path),
        status=status,
        rank=rank,
        rank_source=rank_source,
        part=str(part),
        rows=dict(writer.rows),
        issues=issues,
        window_start_ns=window["window_start_ns"],
        events=len(records) + odd,
        source=SOURCE,
        pid=pid,
    )


def _unpacked(data: bytes) -> tuple[bytes, bool]:
    """The text of a compressed file, and whether it ends early."""
    reader = zlib.decompressobj(31)
    try:
        text = reader.decompress(data)
    except zlib.error:
        return b"", True
    return text, not reader.eof


def _records(text: bytes) -> tuple[list[dict[str, Any]], int]:
    """Lines that are calls, in the file's order, and how many others there are."""
    found: list[dict[str, Any]] = []
    odd = 0
    for line in text.splitlines():
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            odd += 1
            continue
        parts = record if isinstance(record, dict) else {}
        if isinstance(parts.get("header"), dict) and any(isinstance(parts.get(k), dict) for k in _KINDS):
            parts["metadata"] = parts["metadata"] if isinstance(parts.get("metadata"), dict) else {}
            found.append(parts)
        else:
            odd += 1
    return found, odd


def _row(number: int, record: Mapping[str, Any], default: object) -> dict[str, Any]:
    """One call; ``default``: the communicator whose ranks are the global ones, None if that is not known."""
    kind, prefix = next((k, p) for k, p in _KINDS.items() if isinstance(record.get(k), dict))
    header, call = record["header"], record[kind]
    raw = None if call.get(prefix) is None else str(call[prefix])
    op = traffic.normalise_op(raw)
    size, comm = _number(header.get("n_ranks")), header.get("id")
    message = _number(call.get(f"{prefix}_msg_size_bytes"))
    peer = _number(call.get(f"{prefix}_peer"))
    duration = call.get(f"{prefix}_exec_time_us")
    start = _start(call.get("event_trace_ts"))
    measured = isinstance(duration, (int, float)) and not isinstance(duration, bool) and duration >= 0
    on_device = call.get(f"{prefix}_timing_source") == "kernel_gpu"
    return {
        "call_id": number,
        "coalesce_id": number,
        "op": op,
        "op_raw": raw,
        "group_id": None if comm is None else str(comm),
        "group_size": size,
        "group_rank": _number(header.get("rank")),
        "seq": _number(call.get(f"{prefix}_sn")),
        "is_p2p": kind == "p2p_perf" or op in POINT_TO_POINT,
        "peer": peer if kind == "p2p_perf" and default is not None and comm == default else None,
        **_sizes(op, message, size),
        "start_ns": start,
        "dur_ns": round(duration * 1000) if measured else None,
        "time_source": None if not measured else "kernel" if on_device else "backend_range",
        "splits_known": False if op == "all_to_all" else None,
        "completeness": "full" if on_device else "no_kernel",
    }


def _sizes(op: str | None, message: int | None, size: int | None) -> dict[str, Any]:
    """Elements in and out by the message's bytes; of an all-to-all the plugin's figure is not known to be the whole."""
    whole = None if message is None or size is None else message * size
    given, got = {
        "all_gather": (message, whole),
        "reduce_scatter": (whole, message),
        "all_to_all": (None, None),
        None: (None, None),
    }.get(op, (message, message))
    return {"dtype": None if given is None and got is None else "uint8", "in_elems": given, "out_elems": got}


def _start(trace: object) -> int | None:
    """First start of the call's kernels in unix ns, by the host's clock, of verbose output."""
    events = trace.get("kernel_events") if isinstance(trace, dict) else None
    starts = [_number(e.get("kernel_start_ts")) for e in events or () if isinstance(e, dict)]
    known = [s for s in starts if s]
    return min(known) * 1000 if known else None


def _in_order(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """By start, as the run table has them; those without one last."""
    yield from sorted(rows, key=lambda r: (r["start_ns"] is None, r["start_ns"] or 0))


def _name(comm: object, records: list[dict[str, Any]]) -> str | None:
    """The name of a communicator; the plugin writes "unknown" for none."""
    names = {r["header"].get("comm_name") for r in records if r["header"].get("id") == comm}
    known = [n for n in names if isinstance(n, str) and n not in ("", "unknown")]
    return known[0] if len(known) == 1 else None


def _number(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < 2**63 else None


def _issues(odd: int, torn: bool, inferred: bool, rank: int | None, name: str) -> list[dict[str, Any]]:
    found = [
        issue(
            "info",
            "sizes_in_bytes",
            "The Inspector records bytes and no element types: sizes are given as elements of type uint8.",
            1,
        ),
        issue(
            "info",
            "small_messages_not_recorded",
            "Unless told otherwise the Inspector leaves out messages below 8192 bytes and calls without device times.",
            1,
        ),
    ]
    if odd:
        found.append(issue("warning", "odd_record", "Lines that are no calls were left out.", odd))
    if torn:
        found.append(
            issue("data_loss", "truncated", "The compressed file ends early: what is behind is lost.", 1, name)
        )
    if inferred:
        found.append(
            issue(
                "warning",
                "rank_inferred",
                f"The file states ranks of communicators only: {rank}, that in the largest, was taken for the rank. "
                "Give --rank N to name it.",
                1,
                name,
            )
        )
    return found
