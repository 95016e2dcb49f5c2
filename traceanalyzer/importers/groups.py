"""Process groups and their ranks, from a trace's header and from what its calls say."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any

from traceanalyzer.importers.calls import Call
from traceanalyzer.importers.json_stream import whole_number
from traceanalyzer.importers.spool import issue


def groups(
    info: dict[str, Any],
    calls: Iterable[Call],
    *,
    rank: int | None,
    world_size: int | None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of kind process_group, and issues. ``calls`` come in order of issue.

    The header's list of ranks is complete; lists on calls may be shortened.
    """
    found: dict[str, dict[str, Any]] = {}
    config = info.get("pg_config")
    for entry in config if isinstance(config, list) else ():
        if not isinstance(entry, dict) or entry.get("pg_name") is None:
            continue
        name = str(entry["pg_name"])
        listed, shortened = _rank_list(entry.get("ranks"))
        size = whole_number(entry.get("pg_size", entry.get("group_size")))
        complete = listed is not None and not shortened and (size is None or size == len(listed))
        found[name] = {
            "group_id": name,
            "name": name,
            "description": entry.get("pg_desc"),
            "backend": entry.get("backend_config") or info.get("backend"),
            "group_size": size if size is not None else (len(listed) if listed is not None and complete else None),
            "ranks": listed if complete else None,
            "ranks_source": "header" if complete else None,
        }
        if not complete and listed is not None:
            _settle(found[name], listed, shortened, None, None)
    unsettled: dict[str, str] = {}
    for call in calls:
        if call.group_id is None:
            continue
        row = found.setdefault(
            call.group_id,
            {
                "group_id": call.group_id,
                "name": None if call.group_id.startswith("ptr:") else call.group_id,
                "description": None,
                "backend": info.get("backend"),
                "group_size": None,
                "ranks": None,
                "ranks_source": None,
            },
        )
        if row["description"] is None and call.meta.group_desc:
            row["description"] = call.meta.group_desc
        if row["group_size"] is None:
            row["group_size"] = call.meta.group_size
        if row["ranks"] is None:
            listed, shortened = _rank_list(call.meta.group_ranks)
            if not _settle(row, listed, shortened, call.meta.rank_start, call.meta.rank_stride) and listed:
                unsettled[call.group_id] = str(call.meta.group_ranks)
    for row in found.values():
        if row["ranks"] is None and row["group_size"] is not None:
            if world_size is not None and row["group_size"] == world_size:
                row["ranks"], row["ranks_source"] = list(range(world_size)), "inferred"
            elif row["group_size"] == 1 and rank is not None:
                row["ranks"], row["ranks_source"] = [rank], "inferred"
        if row["ranks"] is not None:
            unsettled.pop(row["group_id"], None)
    issues = [
        issue(
            "warning",
            "group_ranks_unknown",
            f"The ranks of group {name} are written shortened and cannot be filled in: they stay unknown, its calls are "
            "counted.",
            1,
            text[:120],
        )
        for name, text in unsettled.items()
    ]
    return list(found.values()), issues


def _settle(
    row: dict[str, Any], listed: list[int] | None, shortened: bool, start: int | None, stride: int | None
) -> bool:
    """Sets the ranks of a group from a list that may be shortened; True if they are known now."""
    size = row["group_size"]
    if listed and size == len(listed):
        row["ranks"], row["ranks_source"] = listed, "call"
        return True
    if size == 1 and start is not None and start >= 0:
        row["ranks"], row["ranks_source"] = [start], "inferred"
        return True
    if start is not None and stride is not None and stride > 0 and size:
        row["ranks"], row["ranks_source"] = [start + i * stride for i in range(size)], "inferred"
        return True
    if not listed or not shortened or size is None or size < len(listed) or len(listed) < 2:
        return False
    gap = size - len(listed)
    last_shown, last = listed[-2], listed[-1]
    steps = {b - a for a, b in itertools.pairwise(listed[:-1])}
    step = steps.pop() if len(steps) == 1 else 1
    if last - last_shown == step * (gap + 1):
        filled = [last_shown + step * (i + 1) for i in range(gap)]
        row["ranks"], row["ranks_source"] = [*listed[:-1], *filled, last], "inferred"
        return True
    return False


def _rank_list(value: object) -> tuple[list[int] | None, bool]:
    """(ranks shown, whether the list is shortened) from a list or its text; (None, False) if there is none."""
    if isinstance(value, list):
        ranks = [whole_number(v) for v in value]
        return ([r for r in ranks if r is not None], False) if all(r is not None for r in ranks) else (None, False)
    if not isinstance(value, str):
        return None, False
    shown = [int(n) for n in re.findall(r"-?\d+", value)]
    return (shown or None), "..." in value
