"""The two rule sets side by side: what real Megatron sends, and what the seed document's model has, with the reason.

Rows meet by role, phase, component, operation, element type and size; what is left over is then paired in the same role,
phase and component, and what differs is named. The reason of a difference stands with the rules (Rule.document).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from traceanalyzer.expect.errata import in_words
from traceanalyzer.expect.model import ExpectedCall

SAME, DIFFERS, ONLY_MEGATRON, ONLY_DOCUMENT = "same", "differs", "only megatron", "only document"


@dataclass(frozen=True)
class Beside:
    """Calls of one place under both rule sets; one side may have none. ``cause``: why they differ, "" where they do not."""

    role: str
    phase: str
    component: str
    megatron: tuple[ExpectedCall, ...]
    document: tuple[ExpectedCall, ...]
    verdict: str
    cause: str

    @property
    def calls(self) -> tuple[int, int]:
        """Calls per rank and step, megatron and document."""
        return sum(c.calls for c in self.megatron), sum(c.calls for c in self.document)

    @property
    def off_rank_bytes(self) -> tuple[Fraction, Fraction]:
        """Off-rank bytes per rank and step, receives not counted, megatron and document."""
        return _leaving(self.megatron), _leaving(self.document)


def beside(megatron: Sequence[ExpectedCall], document: Sequence[ExpectedCall]) -> list[Beside]:
    """Every call of either rule set, in the order of the megatron rows; what only the document has comes last."""
    found: list[Beside] = []
    rest = list(document)
    open_rows: list[ExpectedCall] = []
    for key, rows in _grouped(megatron, _exact).items():
        partners = [row for row in rest if _exact(row) == key]
        if partners and sum(r.calls for r in partners) == sum(r.calls for r in rows):
            rest = [row for row in rest if row not in partners]
            found.append(_row(rows, partners, SAME, ""))
        else:
            open_rows += rows
    for key, rows in _grouped(open_rows, _place).items():
        partners = [row for row in rest if _place(row) == key]
        rest = [row for row in rest if row not in partners]
        if partners:
            found.append(_row(rows, partners, DIFFERS, _difference(rows, partners)))
        else:
            found.append(_row(rows, [], ONLY_MEGATRON, _reasons(rows) or "not in the document"))
    for rows in _grouped(rest, _place).values():
        found.append(_row([], rows, ONLY_DOCUMENT, _reasons(rows) or "real Megatron does not make these calls"))
    order = {id(row): n for n, row in enumerate(megatron)}
    return sorted(found, key=lambda one: min((order[id(r)] for r in one.megatron), default=len(order)))


def _row(megatron: Sequence[ExpectedCall], document: Sequence[ExpectedCall], verdict: str, cause: str) -> Beside:
    one = (megatron or document)[0]
    return Beside(one.role, one.phase, one.component, tuple(megatron), tuple(document), verdict, cause)


def _exact(row: ExpectedCall) -> tuple[object, ...]:
    return (*_place(row), row.op, row.dtype, row.in_elems, row.out_elems)


def _place(row: ExpectedCall) -> tuple[object, ...]:
    return (row.role, row.phase, row.component)


def _grouped(rows: Iterable[ExpectedCall], key: object) -> dict[tuple[object, ...], list[ExpectedCall]]:
    groups: dict[tuple[object, ...], list[ExpectedCall]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)  # type: ignore[operator]
    return groups


def _leaving(rows: Iterable[ExpectedCall]) -> Fraction:
    return sum((row.off_rank_bytes * row.calls for row in rows if row.op != "recv"), Fraction(0))


def _reasons(rows: Iterable[ExpectedCall]) -> str:
    return "; ".join(dict.fromkeys(in_words(row.document) for row in rows if row.document))


def _difference(megatron: Sequence[ExpectedCall], document: Sequence[ExpectedCall]) -> str:
    """What differs, and why, as far as a rule says."""
    parts: list[str] = []
    for words, value in (
        ("operation", lambda row: row.op),
        ("type", lambda row: row.dtype),
        ("elements", lambda row: f"{row.in_elems:,} -> {row.out_elems:,}"),
        ("group", lambda row: str(row.group_size)),
    ):
        one, other = (sorted({value(row) for row in rows}) for rows in (megatron, document))
        if one != other:
            parts.append(f"{words} {', '.join(one)} instead of {', '.join(other)}")
    counts = [sum(row.calls for row in rows) for rows in (megatron, document)]
    if counts[0] != counts[1]:
        parts.append(f"{counts[0]:,} calls instead of {counts[1]:,}")
    why = _reasons([*megatron, *document])
    return "; ".join(parts) + (f" ({why})" if why else "")
