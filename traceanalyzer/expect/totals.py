"""Sums over expected calls: by role, component or phase, for a rank or for the whole job."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

from traceanalyzer import axes
from traceanalyzer.expect.model import ExpectedCall

KEYS: dict[str, Callable[[ExpectedCall], str]] = {
    "role": lambda call: call.role,
    "component": lambda call: call.component,
    "phase": lambda call: call.phase,
    "axis": lambda call: str(axes.rollup(call.role)),
}
"""What calls can be added up by."""


@dataclass(frozen=True)
class Total:
    """Calls and bytes of one step. Receives stand beside what is sent and are never added to it.

    calls: all but receives. receives: calls of ``recv``. payload_bytes, off_rank_bytes: of ``calls``. received_bytes: of
    ``receives``. avoidable_bytes: off-rank bytes that need not be sent. outside_bytes: the part of off_rank_bytes that
    torch.distributed does not carry.
    """

    calls: int = 0
    receives: int = 0
    payload_bytes: int = 0
    off_rank_bytes: Fraction = Fraction(0)
    received_bytes: int = 0
    avoidable_bytes: int = 0
    outside_bytes: Fraction = Fraction(0)

    def plus(self, call: ExpectedCall, times: int = 1) -> Total:
        """This and ``times`` the calls of a row."""
        number = call.calls * times
        if call.op == "recv":
            return Total(
                self.calls,
                self.receives + number,
                self.payload_bytes,
                self.off_rank_bytes,
                self.received_bytes + call.payload_bytes * number,
                self.avoidable_bytes,
                self.outside_bytes,
            )
        leaving = call.off_rank_bytes * number
        wasted = call.avoidable.bytes_per_call * number if call.avoidable else 0
        return Total(
            self.calls + number,
            self.receives,
            self.payload_bytes + call.payload_bytes * number,
            self.off_rank_bytes + leaving,
            self.received_bytes,
            self.avoidable_bytes + wasted,
            self.outside_bytes + (leaving if call.outside_c10d else 0),
        )


def totals(rows: Iterable[tuple[ExpectedCall, int]], by: str) -> dict[str, Total]:
    """Key -> sum, in the order in which the keys first appear; each row is counted as often as its number says.

    by: "role", "component", "phase" or "axis".
    """
    found: dict[str, Total] = {}
    for call, times in rows:
        key = KEYS[by](call)
        found[key] = found.get(key, Total()).plus(call, times)
    return found


def total(rows: Iterable[tuple[ExpectedCall, int]]) -> Total:
    """The sum of all rows, each counted as often as its number says."""
    found = Total()
    for call, times in rows:
        found = found.plus(call, times)
    return found
