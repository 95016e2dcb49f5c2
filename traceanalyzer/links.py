"""Measured bandwidths of a cluster's links (--links FILE), and the time a call takes at them.

Two kinds of files are read, told apart by what is in them:

- the text that nccl-tests (or rccl-tests) print, several operations and several runs in one file. The operation is the one of
  ``# Collective test starting: all_reduce_perf``, or, where the release does not print that, of the last command that names a
  ``..._perf`` program. One host in the list of ranks makes a run intra, several inter. The figure taken is the out-of-place
  bus bandwidth.
- a table of bus bandwidths, TOML or CSV: TOML ``[[link]]`` entries, or CSV columns, with ``span`` (intra, inter; left out:
  both), ``op`` (left out: every operation), ``payload_bytes`` (left out: every size) and ``gb_per_s``.

Bus bandwidth is nccl-tests' (traffic.off_rank_factor), so that a figure measured on one number of ranks serves another.
Between two measured sizes it is interpolated linearly in the logarithm of the size; outside of them the nearest end holds,
and is marked. Lines that look like a row and cannot be read are counted, not guessed.
"""

from __future__ import annotations

import csv
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from traceanalyzer import traffic
from traceanalyzer.errors import InputError

Span = Literal["intra", "inter"]
Note = Literal["measured", "interpolated", "below the table", "above the table", "any size"]

_STARTING = re.compile(r"^#\s*Collective test starting:\s*(\w+?)_perf")
_COMMAND = re.compile(r"(?:^|[\s/'\"])(\w+?)_perf(?:_mpi)?(?=\s|$|['\"])")
_DEVICE = re.compile(r"^#\s+Rank\s+\d+\s+.*?\bon\s+(\S+)\s+device\b")
_MPI_TAG = re.compile(r"^\[\d+,\d+\]<std(?:out|err)>:\s?")
_ROW = re.compile(r"^\s*\d+\s+\d+\s+[a-z]\w*\s")
_OTHER_NAMES = {"sendrecv": "send", "alltoallv": "all_to_all"}


@dataclass(frozen=True)
class Estimate:
    """What a call takes at the links' bandwidth: ns, the bus bandwidth in GB/s, and how it was found in the table."""

    time_ns: int
    bus_gb_per_s: float
    note: Note


@dataclass(frozen=True)
class Links:
    """Bus bandwidths by operation and span (None: every one): points of payload bytes (None: every size) and GB/s.

    unreadable: numbers of the lines (of a table: entries) that could not be read.
    """

    source: str
    points: Mapping[tuple[str | None, Span | None], tuple[tuple[int | None, float], ...]]
    unreadable: tuple[int, ...] = field(default=())

    def time(self, op: str, span: str | None, group_size: int, payload_bytes: int) -> Estimate | None:
        """Time of one call on this many ranks. None: the file says nothing of this operation and span.

        A call whose span is not known is compared only with figures that hold for both. ``op``: one of traffic.OPS; a recv is
        a send.
        """
        op = "send" if op == "recv" else op
        where: Span | None = "intra" if span == "intra" else "inter" if span == "inter" else None
        wanted: list[tuple[str | None, Span | None]] = [(op, where), (op, None), (None, where), (None, None)]
        found = next((self.points[key] for key in wanted if key in self.points), None)
        factor = float(traffic.off_rank_factor(op, group_size))
        if found is None or factor == 0 or payload_bytes <= 0:
            return None
        speed, note = _at(found, payload_bytes)
        # 1 GB/s is 1 byte a ns
        return Estimate(round(payload_bytes * factor / speed), speed, note)


def _at(points: Iterable[tuple[int | None, float]], size: int) -> tuple[float, Note]:
    """Bus bandwidth at a size."""
    sized = sorted((at, speed) for at, speed in points if at is not None)
    if not sized:
        return next(speed for _, speed in points), "any size"
    for at, speed in sized:
        if at == size:
            return speed, "measured"
    if size < sized[0][0]:
        return sized[0][1], "below the table"
    if size > sized[-1][0]:
        return sized[-1][1], "above the table"
    above = next(i for i, (at, _) in enumerate(sized) if at > size)
    (low, slow), (high, fast) = sized[above - 1], sized[above]
    share = math.log(size / low) / math.log(high / low)
    return slow + share * (fast - slow), "interpolated"


def read(path: Path) -> Links:
    """Reads a file of links. Raises InputError where it cannot be read or holds no bandwidth."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}).") from error
    if path.suffix == ".toml":
        found, bad = _of_toml(path, text)
    elif "gb_per_s" in text.split("\n", 1)[0]:
        found, bad = _of_entries(csv.DictReader(text.splitlines()), first=2)
    else:
        found, bad = _of_nccl_tests(text)
    if not found:
        raise InputError(
            f"{path}: no bandwidth in it ({len(bad)} lines that look like rows could not be read). Give the output of "
            "nccl-tests (all_reduce_perf, ...), or a TOML or CSV table with gb_per_s, and span, op, payload_bytes as needed."
        )
    return Links(str(path), {key: tuple(points.items()) for key, points in found.items()}, tuple(bad))


_Found = dict[tuple[str | None, Span | None], dict[int | None, float]]


def _of_nccl_tests(text: str) -> tuple[_Found, list[int]]:
    found: _Found = {}
    bad: list[int] = []
    op: str | None = None
    hosts: set[str] = set()
    for number, raw in enumerate(text.splitlines(), 1):
        line = _MPI_TAG.sub("", raw)
        started = _STARTING.match(line) or (None if _ROW.match(line) else _COMMAND.search(line))
        if started:
            if not line.startswith("# Collective test concluded"):
                op, hosts = _op(started[1]), set()
        elif device := _DEVICE.match(line):
            hosts.add(device[1])
        elif _ROW.match(line):
            speed = _bus(line)
            if speed is None or op is None:
                bad.append(number)
                continue
            span: Span | None = None if not hosts else "intra" if len(hosts) == 1 else "inter"
            # a size that is measured again counts once, the later run
            found.setdefault((op, span), {})[int(line.split()[0])] = speed
    return found, bad


def _op(name: str) -> str | None:
    return _OTHER_NAMES.get(name) or traffic.normalise_op(name)


def _bus(line: str) -> float | None:
    """Out-of-place bus bandwidth of a row: size, count, type, then redop and root where the release prints them, then time,
    algbw, busbw and errors, out of place and in place. None: not such a row."""
    cells = line.split()
    if len(cells) not in (7 + 4, 8 + 4, 9 + 4):
        return None
    try:
        time, algorithm, bus = (float(c) for c in cells[-8:-5])
    except ValueError:
        return None
    return bus if time > 0 and algorithm > 0 and bus > 0 and math.isfinite(bus) else None


def _of_toml(path: Path, text: str) -> tuple[_Found, list[int]]:
    try:
        entries = tomllib.loads(text).get("link", [])
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: no TOML ({error}).") from error
    if not isinstance(entries, list):
        raise InputError(f"{path}: link must be a list of tables: write [[link]] before each.")
    return _of_entries(entries, first=1)


def _of_entries(entries: Iterable[Any], first: int) -> tuple[_Found, list[int]]:
    found: _Found = {}
    bad: list[int] = []
    for number, entry in enumerate(entries, first):
        try:
            speed = float(entry["gb_per_s"])
            size = int(entry["payload_bytes"]) if entry.get("payload_bytes") not in (None, "") else None
            span = entry.get("span") or None
            named = entry.get("op") or None
            op = None if named is None else _op(str(named))
        except (KeyError, TypeError, ValueError, AttributeError):
            bad.append(number)
            continue
        usable = speed > 0 and math.isfinite(speed) and (size is None or size > 0) and (named is None or op is not None)
        if not usable or span not in (None, "intra", "inter"):
            bad.append(number)
            continue
        found.setdefault((op, span), {})[size] = speed
    return found, bad
