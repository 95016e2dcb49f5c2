"""Words for the rows of a comparison, shared by all that show one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from traceanalyzer.reports.diff import human_bytes, human_time, name
from traceanalyzer.reports.text import ranges

Row = Mapping[str, Any]

_NAMES = {"launch_starved": "launch-starved", "busy": "communication"}


def row_name(row: Row) -> str:
    """A row of time in words: ``exposed tp``, ``step time``, ``compute of stage 1``."""
    what = _NAMES.get(row["what"], str(row["what"]))
    found = f"{what} {name(row['role'], 60)}" if row["role"] else what
    return found if row["stage"] is None else f"{found} of stage {row['stage']}"


def traffic_name(row: Row) -> str:
    """A row of traffic in words: ``tp forward all_gather attention.qkv``, unknown parts as ``?``."""
    parts = [name(str(row[key]), 40) if row[key] is not None else "?" for key in ("role", "phase", "op")]
    if row["component"] is not None:
        parts.append(name(row["component"], 60))
    return " ".join(parts) + ("" if row["stage"] is None else f" of stage {row['stage']}")


def signed_time(ns: int | float | None) -> str:
    """A change of time with its sign; - for None."""
    if ns is None:
        return "-"
    return f"{'+' if ns > 0 else '-' if ns < 0 else ''}{human_time(abs(int(ns)))}"


def figure(value: int | float | None, unit: str) -> str:
    """A figure of a row in its unit (ns, tokens/s, 1: a share)."""
    if value is None:
        return "unknown"
    if unit == "ns":
        return human_time(int(value))
    return f"{value * 100:.2f} %" if unit == "1" else f"{value:,.1f}"


def median(spread: Row | None, unit: str) -> str:
    """The lower median of a side."""
    return "unknown" if spread is None else figure(spread["median"], unit)


def band(spread: Row | None, unit: str) -> str:
    """The band of a side: ``98 ms to 102 ms``, ``98 ms`` where both ends read alike; none of one step."""
    if spread is None:
        return "-"
    if spread["low"] is None:
        return "none: one step"
    low, high = figure(spread["low"], unit), figure(spread["high"], unit)
    return low if low == high else f"{low} to {high}"


def change(row: Row) -> str:
    """The change of a row in its unit, with its sign."""
    if row["change"] is None:
        return "-"
    if row["unit"] == "ns":
        return signed_time(row["change"])
    if row["unit"] == "1":
        return f"{row['change'] * 100:+.2f} points"
    return f"{row['change']:+,.1f}"


def percent(value: float | None) -> str:
    """A share of the step with its sign; - for None."""
    return "-" if value is None else f"{value * 100:+.2f} %"


def calls(value: int | float | None) -> str:
    """Calls of a rank and step: whole where they are."""
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def per_step(value: int | float | None) -> str:
    """Bytes of a rank and step."""
    return human_bytes(value)


def types(row: Row) -> str:
    """Element types, and from which to which where they differ."""
    one, two = (", ".join(name(d, 30) for d in row[f"dtypes_{side}"]) for side in "ab")
    return one or two if one == two or not one or not two else f"{one} -> {two}"


def sizes(row: Row) -> str:
    """Payload of one call, and from which to which where it differs."""

    def shown(values: list[int]) -> str:
        if len(values) > 2:
            return f"{human_bytes(values[0])} to {human_bytes(values[-1])}"
        return ", ".join(human_bytes(v) for v in values)

    if row["by_data"]:
        return "by routing"
    one, two = (shown(row[f"sizes_{side}"]) for side in "ab")
    return (one or two or "unknown") if one == two or not one or not two else f"{one} -> {two}"


def differs(row: Row) -> str:
    """What of the calls differs: ``only in A``, ``calls, bytes``; empty for nothing."""
    if not row["only_in"]:
        return ", ".join(row["differs"])
    other = "B" if row["only_in"] == "A" else "A"
    return f"only in {row['only_in']}{f', or of unknown role in {other}' if row['differs'] == ['unknown'] else ''}"


def value(content: Any) -> str:
    """A field of a job or a setting."""
    return "unknown" if content is None else name(str(content), 80)


def side(row: Row) -> str:
    """Which run and steps, in one line."""
    steps = row["steps"]
    said = f"{name(row['path'], 100)}{'' if row['selected'] is None else '@' + row['selected']}"
    world = f" of {row['world_size']:,}" if row["world_size"] else ""
    parts = [said, f"step{'' if len(steps) == 1 else 's'} {ranges(steps)}", f"{row['ranks_recorded']:,}{world} ranks"]
    return "   ".join(p for p in [*parts, row["device"] and name(row["device"], 60), row["job"]] if p)
