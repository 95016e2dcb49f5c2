"""Numbers and lists as people read them. Null is shown as "unknown", never as 0."""

from __future__ import annotations

from collections.abc import Collection, Iterable

UNKNOWN = "unknown"


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers as ranges, sorted, each once: ``0-3, 7``; "none" for no numbers."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts) or "none"


def ranks_text(ranks: Collection[int]) -> str:
    """``rank 3`` or ``ranks 0-7``."""
    return f"rank{'' if len(set(ranks)) == 1 else 's'} {ranges(ranks)}"


def count(number: int | None) -> str:
    """A whole number with thousands marked."""
    return UNKNOWN if number is None else f"{number:,}"


def counted(number: int | None, noun: str, plural: str | None = None) -> str:
    """A number with its noun: ``1 call``, ``2 calls``."""
    return f"{count(number)} {noun if number == 1 else plural or noun + 's'}"


def duration(ns: int | None) -> str:
    """Nanoseconds in the unit that fits, exact below 1 ms and else rounded to three decimals."""
    if ns is None:
        return UNKNOWN
    for unit, size in (("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000)):
        if abs(ns) >= size:
            thousandths = (abs(ns) * 1000 + size // 2) // size
            return f"{'-' if ns < 0 else ''}{thousandths // 1000:,}.{thousandths % 1000:03d} {unit}"
    return f"{ns} ns"


def size(number: int | None) -> str:
    """Bytes in the unit that fits: exact below 1 KiB, else rounded to one decimal."""
    if number is None:
        return UNKNOWN
    for unit, one in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= one:
            tenths = (number * 10 + one // 2) // one
            return f"{tenths // 10:,}.{tenths % 10} {unit}"
    return f"{number} B"


def share(part: int, whole: int) -> str:
    """A share in percent, rounded down to one decimal so that 100 % means all; a whole of 0 has none."""
    if whole == 0:
        return "-"
    tenths = part * 1000 // whole
    return f"{tenths // 10} %" if tenths % 10 == 0 else f"{tenths // 10}.{tenths % 10} %"
