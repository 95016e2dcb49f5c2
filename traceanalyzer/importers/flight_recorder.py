"""Reads a dump of PyTorch's flight recorder (pickle or JSON; versions 2.x) into rows of the run table.

A dump holds the last calls of one rank, with their groups' complete ranks. Its times are host times: when a call was
enqueued, and when a watchdog noticed its start and end, which is late; a duration is measured only where the job switched
that on. The calls of a coalesced group have entries of their own, and one more closes the group: it is no call, but its
state and times are those of the group (reference: record_formats, section 2).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from traceanalyzer import traffic
from traceanalyzer.errors import InputError
from traceanalyzer.importers.calls import POINT_TO_POINT, ROOTED
from traceanalyzer.importers.kineto import Summary
from traceanalyzer.importers.spool import RunWriter, issue, table_of

SOURCE = "flight_recorder"

_MAJOR = 2
_GZIP = b"\x1f\x8b"
_PICKLE = b"\x80"
_RANK_IN_NAME = re.compile(r"(?:^|[^a-z])(?:rank|dump|trace|r|fr)[-_ .]?(\d+)(?=\D*$)", re.IGNORECASE)
_PAIR = re.compile(r" (\d+)(->|<-)(\d+)$")
_LARGEST = 1 << 30


class _Refusing(pickle.Unpickler):
    """Dumps hold numbers, text, lists and dicts only; whatever else a pickle asks for is refused."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"asks for {module_name}.{global_name}")


def is_dump(path: Path) -> bool:
    """Whether a file looks like a dump: a pickle, or JSON (plain or gzip) that begins with a dump's keys."""
    with path.open("rb") as file:
        head = file.read(4096)
    if head.startswith(_PICKLE):
        return True
    if head.startswith(_GZIP):
        try:
            with gzip.open(path) as packed:
                head = packed.read(4096)
        except (OSError, EOFError, zlib.error):
            return False
    if b'"traceEvents"' in head or b'"schemaVersion"' in head:
        return False
    return head.lstrip().startswith(b"{") and any(
        key in head for key in (b'"pg_config"', b'"collective_seq_id"', b'"comm_lib_version"', b'"pg_status"')
    )


def load(path: Path) -> dict[str, Any]:
    """The content of a dump. Raises InputError for what is none, or is of a newer major version; OSError as open does."""
    data = path.read_bytes()
    if data.startswith(_GZIP):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{path.name}: the compressed file is damaged ({error}).") from error
    try:
        found = _Refusing(io.BytesIO(data)).load() if data.startswith(_PICKLE) else json.loads(data)
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise InputError(f"{path.name}: not a dump of the flight recorder, or a damaged one ({error}).") from error
    if not isinstance(found, dict) or not isinstance(found.get("entries"), list):
        raise InputError(f"{path.name}: not a dump of the flight recorder (no list of entries).")
    version = str(found.get("version") or "")
    if version.split(".")[0].isdigit() and int(version.split(".")[0]) > _MAJOR:
        raise InputError(f"{path.name}: a flight recorder's dump of version {version}; this program reads 2.x.")
    return found


def rank_of_name(name: str) -> int | None:
    """The rank that the name of a dump ends with (r00003.pickle, _dump_3, fr3.json.gz); None if it has none."""
    found = _RANK_IN_NAME.search(name)
    return int(found[1]) if found else None


def import_file(path: Path, part: Path, *, told_rank: int | None = None) -> Summary:
    """Imports one dump into the Parquet file ``part``; damage becomes rows of kind ``issue``.

    A dump does not state its rank: it comes from the file's name, else from ``told_rank``. Gives a Summary of status
    ``refused``, and no file, for what is no dump.
    """
    try:
        content = load(path)
    except InputError as error:
        return Summary(path.name, str(path), "refused", reason=str(error), source=SOURCE)
    named = rank_of_name(path.name)
    rank = named if named is not None else told_rank
    rank_source = "file name" if named is not None else ("told" if told_rank is not None else None)
    entries = [e for e in content["entries"] if isinstance(e, dict)]
    odd = len(content["entries"]) - len(entries)
    groups = _groups(content.get("pg_config"), entries)
    rows = _calls(entries, groups, rank)
    issues = _issues(entries, odd, rank, path.name)
    status = "complete with rejects" if odd else "complete"
    about = {"rank": rank, "source": SOURCE}
    times = [row["t_issue_ns"] for row in rows if row["t_issue_ns"] is not None]
    library = content.get("comm_lib_version") or content.get("nccl_version")
    versions = {"flight_recorder": content.get("version"), "nccl": library}
    rank_row = {
        **about,
        "rank_source": rank_source,
        "window_start_ns": min(times, default=None),
        "window_end_ns": max(times, default=None),
        "host_start_ns": min(times, default=None),
        "source_file": path.name,
        "source_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "versions": json.dumps({k: str(v) for k, v in versions.items() if v}, sort_keys=True),
        "events_read": len(content["entries"]),
        "rows_kept": len(rows) + len(groups),
        "rows_rejected": odd,
        "import_status": status,
    }
    with RunWriter(part, {}) as writer:
        writer.write("comm_record", [table_of("comm_record", [{**about, **row} for row in rows])])
        writer.write("issue", [table_of("issue", [{**about, "source_file": path.name, **i} for i in issues])])
        writer.write("process_group", [table_of("process_group", [{**about, **g} for g in groups.values()])])
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
        window_start_ns=min(times, default=None),
        events=len(content["entries"]),
        source=SOURCE,
    )


def _groups(config: object, entries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows of kind process_group by name: those of the dump's table, and those that only calls name."""
    found: dict[str, dict[str, Any]] = {}
    for name, said in config.items() if isinstance(config, dict) else ():
        if not isinstance(said, dict) or not name:  # gloo's dumps hold one empty entry
            continue
        ranks = said.get("ranks")
        listed = [int(n) for n in re.findall(r"\d+", ranks)] if isinstance(ranks, str) and "..." not in ranks else []
        found[str(name)] = {
            "group_id": str(name),
            "name": str(name),
            "description": said.get("desc"),
            "group_size": len(listed) or None,
            "ranks": listed or None,
            "ranks_source": SOURCE if listed else None,
        }
    for entry in entries:
        name, description = _group_of(entry)
        if name is not None and name not in found:
            found[name] = {"group_id": name, "name": name, "description": description}
    return found


def _group_of(entry: Mapping[str, Any]) -> tuple[str | None, str | None]:
    group = entry.get("process_group")
    if isinstance(group, (list, tuple)) and len(group) == 2:
        return str(group[0]) or None, str(group[1]) or None
    return None, None


def _calls(
    entries: list[dict[str, Any]], groups: Mapping[str, Mapping[str, Any]], rank: int | None
) -> list[dict[str, Any]]:
    """Rows of kind comm_record, numbered in the order of the ring."""
    rows: list[dict[str, Any]] = []
    same_number: dict[tuple[Any, ...], list[int]] = {}
    """(group, its two sequence numbers) -> rows: those of one coalesced group share them."""
    for entry in sorted(entries, key=lambda e: _number(e.get("record_id")) or 0):
        name, _ = _group_of(entry)
        p2p = bool(entry.get("is_p2p"))
        members = same_number.setdefault(
            (name, _number(entry.get("collective_seq_id")), _number(entry.get("p2p_seq_id"))), []
        )
        profiling = str(entry.get("profiling_name") or "")
        if profiling.endswith("coalesced") and not entry.get("input_sizes") and not entry.get("output_sizes"):
            for i in members:  # the entry that closes a group speaks for its calls
                rows[i].update(_progress(entry), coalesce_id=members[0])
            members.clear()
            continue
        members.append(len(rows))
        row = _row(entry, profiling, name, groups, rank, p2p)
        row["call_id"] = row["coalesce_id"] = len(rows)
        rows.append(row)
    return rows


def _row(
    entry: Mapping[str, Any],
    profiling: str,
    name: str | None,
    groups: Mapping[str, Mapping[str, Any]],
    rank: int | None,
    p2p: bool,
) -> dict[str, Any]:
    pair = _PAIR.search(profiling)
    raw = profiling[: pair.start()] if pair else profiling
    op = traffic.normalise_op(raw)
    ranks = groups.get(name or "", {}).get("ranks")
    members = ranks if isinstance(ranks, list) else None

    def member(position: int) -> int | None:
        return members[position] if members is not None and position < len(members) else None

    given, got = _elements(entry.get("input_sizes")), _elements(entry.get("output_sizes"))
    if op == "barrier":
        given = got = 0
    elif op in POINT_TO_POINT:
        given = got = given if given is not None else got
    dtypes = entry.get("input_dtypes") or entry.get("output_dtypes") or []
    kinds = set(map(str, dtypes)) if isinstance(dtypes, list) else set()
    seq = entry.get("p2p_seq_id") if p2p else entry.get("collective_seq_id")
    root = None
    if op in ROOTED and pair is not None:
        root = member(int(pair[3]) if pair[2] == "->" else int(pair[1]))
    return {
        "op": op,
        "op_raw": profiling,
        "group_id": name,
        "group_size": groups.get(name or "", {}).get("group_size"),
        "group_rank": members.index(rank) if members is not None and rank in members else None,
        "seq": _number(seq),
        "is_p2p": p2p or op in POINT_TO_POINT,
        "peer": member(int(pair[3])) if pair is not None and op in POINT_TO_POINT else None,
        "root": root,
        "dtype": traffic.normalise_dtype(kinds.pop()) if len(kinds) == 1 else None,
        "in_elems": given,
        "out_elems": got,
        "splits_known": False if op == "all_to_all" else None,
        "t_issue_ns": _number(entry.get("time_created_ns")) or None,
        "completeness": "not_profiled",
        **_progress(entry),
    }


def _progress(entry: Mapping[str, Any]) -> dict[str, Any]:
    """How far a call had come, and its times; a JSON dump writes 0 for none."""
    started = _number(entry.get("time_discovered_started_ns")) or None
    completed = _number(entry.get("time_discovered_completed_ns")) or None
    measured = entry.get("duration_ms")
    state = entry.get("state")
    found: dict[str, Any] = {"work_state": None if state is None else str(state)}
    if isinstance(measured, (int, float)) and not isinstance(measured, bool) and measured >= 0:
        found |= {"start_ns": None, "dur_ns": round(measured * 1e6), "time_source": "cuda_event"}
    elif started is not None:
        known = completed is not None and completed >= started
        found |= {"start_ns": started, "dur_ns": completed - started if known and completed is not None else None}
        found["time_source"] = "watchdog"
    return found


def _elements(sizes: object) -> int | None:
    """Elements of a list of shapes, summed; None if there is none, or something that is no shape."""
    if not isinstance(sizes, list) or not sizes:
        return None
    total = 0
    for shape in sizes:
        if not isinstance(shape, (list, tuple)) or not all(isinstance(n, int) and n >= 0 for n in shape):
            return None
        product = 1
        for extent in shape:
            product *= extent
        total += product
    return total if total < _LARGEST * _LARGEST else None


def _number(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if 0 <= value < 2**63 else None
    return int(value) if isinstance(value, str) and value.isdigit() and len(value) < 19 else None


def _issues(entries: list[dict[str, Any]], odd: int, rank: int | None, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if odd:
        found.append(issue("warning", "odd_record", "Entries of the dump that are no entries were left out.", odd))
    ids = [n for n in (_number(e.get("record_id")) for e in entries) if n is not None]
    if ids and min(ids) > 0:
        found.append(
            issue(
                "info",
                "ring_wrapped",
                "The flight recorder keeps the last calls only: earlier ones were overwritten, or retired and left out.",
                min(ids),
            )
        )
    if ids and (gaps := max(ids) - min(ids) + 1 - len(set(ids))):
        found.append(
            issue("info", "entries_left_out", "Entries between the first and the last are not in the dump.", gaps)
        )
    if rank is None:
        found.append(
            issue(
                "warning",
                "rank_not_recorded",
                "A flight recorder's dump states no rank, and neither does its name. Give --rank N to name it.",
                1,
                name,
            )
        )
    return found
