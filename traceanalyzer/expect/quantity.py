"""A number together with the way it was reached, for the lines of ``traceanalyzer expect --explain``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from traceanalyzer import traffic
from traceanalyzer.expect.model import Avoidable, Evidence, ExpectedCall


@dataclass(frozen=True)
class Quantity:
    """``value``, the formula in symbols and the same formula in numbers, e.g. "S/CP * B", "8192/2 * 2", 8192."""

    symbols: str
    numbers: str
    value: int

    def __str__(self) -> str:
        value = f"{self.value:,}"
        return " = ".join(dict.fromkeys((self.symbols, self.numbers, value)))

    def times(self, symbols: str, numbers: str, factor: int) -> Quantity:
        """This times a factor written ``symbols`` and ``numbers``."""
        return Quantity(f"{self.symbols} * {symbols}", f"{self.numbers} * {numbers}", self.value * factor)


def human_bytes(count: int | Fraction) -> str:
    """Bytes in binary units: "32 MiB", "11.25 MiB", "12 B"; "about" where two decimals do not say it exactly."""
    unit, size = next(
        ((unit, size) for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)) if count >= size),
        ("B", 1),
    )
    scaled = Fraction(count) / size
    if scaled.denominator == 1:
        return f"{scaled.numerator:,} {unit}"
    about = "" if (scaled * 100).denominator == 1 else "about "
    return f"{about}{float(scaled):,.2f} {unit}"


def call(
    rule: str,
    *,
    role: str,
    op: str,
    phase: str,
    component: str,
    dtype: str,
    sent: Quantity,
    received: Quantity | None = None,
    group_size: int,
    calls: Quantity,
    evidence: Evidence,
    stage: int | None = None,
    avoid: tuple[str, str] | None = None,
    versions: str = "",
    note: str = "",
    off_rank: Fraction | None = None,
    transport: str = "",
    peer: str = "",
    document: str = "",
) -> ExpectedCall:
    """An ExpectedCall with its formula.

    sent, received: this rank's input and output elements; received None means the same. calls: per rank and step.
    avoid: cause code and setting, for a call whose off-rank bytes need not be sent at all. off_rank, transport, peer,
    document: as in ExpectedCall.
    """
    received = received or sent
    row = ExpectedCall(
        rule=rule,
        role=role,
        op=op,
        phase=phase,
        component=component,
        dtype=dtype,
        in_elems=sent.value,
        out_elems=received.value,
        group_size=group_size,
        calls=calls.value,
        evidence=evidence,
        stage=stage,
        versions=versions,
        off_rank=off_rank,
        transport=transport,
        peer=peer,
        document=document,
    )
    leaving = row.off_rank_bytes
    formula = {"in": f"{sent} elements = {_size(sent.value, dtype)}"}
    if received is not sent:
        formula["out"] = f"{received} elements = {_size(received.value, dtype)}"
    formula["off-rank"] = f"{_factor(op, group_size) if off_rank is None else 'expected'} = {human_bytes(leaving)}"
    formula["calls"] = f"{calls} per step"
    if note:
        formula["why"] = note
    formula["source"] = f"{evidence.kind}: {evidence.where}"
    if transport:
        formula["transport"] = f"{transport}, no call of torch.distributed"
    waste = Avoidable(bytes_per_call=int(leaving), code=avoid[0], setting=avoid[1]) if avoid and leaving else None
    return replace(row, formula=formula, avoidable=waste)


def _size(elements: int, dtype: str) -> str:
    count = traffic.tensor_bytes(elements, dtype)
    if count is None:
        raise ValueError(f"unknown element type {dtype}")
    return f"{human_bytes(count)} {traffic.SHORT_DTYPE.get(dtype, dtype)}"


def _factor(op: str, group_size: int) -> str:
    """The off-rank factor of section 4 of the design, in words."""
    whole = "out" if op == "all_gather" else "in"
    if group_size == 1:
        return f"0 * {whole}, a group of one rank"
    if op == "all_reduce":
        return f"2(N-1)/N * {whole} = 2*{group_size - 1}/{group_size} * {whole}"
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return f"(N-1)/N * {whole} = {group_size - 1}/{group_size} * {whole}"
    return "the message"
