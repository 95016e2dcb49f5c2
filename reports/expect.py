"""The expectation as programs and tickets read it: the JSON document traceanalyzer.expect/1, and Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from traceanalyzer import axes, traffic
from traceanalyzer.expect import against
from traceanalyzer.expect.model import ExpectedCall
from traceanalyzer.expect.sheet import Apart, Part, Row, Sheet
from traceanalyzer.expect.totals import Total, total, totals
from traceanalyzer.reports.diff import human_bytes, job_words
from traceanalyzer.reports.text import counted, ranges

SCHEMA = "traceanalyzer.expect/1"


# -- words -----------------------------------------------------------------------------------------------------------


def rules_words(sheet: Sheet) -> str:
    """The rules, and the releases they stand for."""
    if sheet.rules != "megatron":
        return f"{sheet.rules} (the seed document's model)"
    if sheet.job.megatron_core_version is not None:
        return f"megatron {sheet.releases}"
    if not sheet.apart:
        return "megatron, the same in every release"
    others = ", ".join(one.releases for one in sheet.apart)
    return f"megatron {sheet.releases}; the job does not say its release, others differ: {others}"


def parts_words(parts: Sequence[Part]) -> str:
    """The ranks or stages of a row: "stages 0-2"."""
    kind = parts[0].kind
    return f"{kind}{'' if len(parts) == 1 else 's'} {ranges(part.number for part in parts)}"


def dtype_word(call: ExpectedCall) -> str:
    """Short name of the element type."""
    return traffic.SHORT_DTYPE.get(call.dtype, call.dtype)


def what_words(call: ExpectedCall) -> str:
    """The component, with the peer of a message and what carries the bytes."""
    words = call.component + (f" ({call.peer})" if call.peer else "")
    return words + (f" [{call.transport}]" if call.transport else "")


def each_words(call: ExpectedCall, *, exact: bool = False) -> str:
    """Payload of one call; "~" before a size that depends on data."""
    return ("~" if call.varies else "") + human_bytes(call.payload_bytes, exact=exact)


def leaving_words(call: ExpectedCall, *, exact: bool = False) -> str:
    """Off-rank bytes of a step; "received" for a receive, whose bytes left another rank."""
    if call.op == "recv":
        return "received"
    return ("~" if call.varies else "") + human_bytes(call.off_rank_bytes * call.calls, exact=exact)


def avoidable_words(rows: Iterable[Row]) -> list[str]:
    """What need not be sent, by code and setting, with its bytes per rank and step."""
    found: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        waste = row.call.avoidable
        if waste is not None:
            for part in row.parts:
                per_part = found.setdefault((waste.code, waste.setting), [])
                per_part.append(waste.bytes_per_call * row.call.calls * part.ranks)
    lines = []
    for (code, setting), sizes in found.items():
        removes = f"{setting} removes it" if setting else "no setting removes it"
        lines.append(f"{code}  {human_bytes(sum(sizes))} off-rank over these ranks: {removes}")
    return lines


def total_words(sheet: Sheet) -> str:
    """The last line: calls and bytes of everything the sheet stands for."""
    found = total(sheet.counted)
    ranks = sum(part.ranks for part in sheet.parts)
    words = f"{counted(found.calls, 'call')} a step, {human_bytes(found.off_rank_bytes)} off-rank"
    over = "one rank" if ranks == 1 else f"{ranks:,} ranks"
    if found.avoidable_bytes:
        words += f", {human_bytes(found.avoidable_bytes)} of it avoidable"
    if found.outside_bytes:
        words += f", {human_bytes(found.outside_bytes)} of it not carried by torch.distributed"
    return f"{over}: {words}"


def apart_words(one: Apart) -> str:
    """What tells other releases from those shown, in one line."""

    def some(calls: Sequence[ExpectedCall]) -> str:
        words = [f"{c.role} {c.phase} {c.op} {c.component} ({c.calls} x {c.in_elems:,} {dtype_word(c)})" for c in calls]
        return "; ".join(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "")

    sides = []
    if one.only_there:
        sides.append(f"only there: {some(one.only_there)}")
    if one.missing_there:
        sides.append(f"not there: {some(one.missing_there)}")
    return "   ".join(sides) or "the same calls, other gaps"


# -- json ------------------------------------------------------------------------------------------------------------


def document(sheet: Sheet, other: Sheet | None = None) -> dict[str, Any]:
    """The JSON document traceanalyzer.expect/1 (docs/expect.md). Calls and bytes are per rank and step.

    other: the document's rules for the same parts; adds "against".
    """
    job: dict[str, Any] = json.loads(sheet.job.to_json())
    calls = [(part, call) for part in sheet.parts for call in part.expectation.calls]
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "rules": sheet.rules,
        "releases": sheet.releases,
        "job": job,
        "parts": [{"kind": part.kind, "number": part.number, "ranks": part.ranks} for part in sheet.parts],
        "calls": [{part.kind: part.number, **_call(call)} for part, call in calls],
        "totals": {by: _totals(sheet, by) for by in ("role", "axis", "phase", "component")},
        "total": _total(total(sheet.counted)),
        "not_modelled": [
            {"what": gap.what, "roles": list(gap.roles), "phases": list(gap.phases), "ops": list(gap.ops)}
            for gap in sheet.not_modelled
        ],
        "apart": [
            {
                "releases": one.releases,
                "only_there": [_call(call) for call in one.only_there],
                "missing_there": [_call(call) for call in one.missing_there],
            }
            for one in sheet.apart
        ],
    }
    if other is not None:
        found["against"] = [
            {
                part.kind: part.number,
                "role": row.role,
                "phase": row.phase,
                "component": row.component,
                "verdict": row.verdict,
                "cause": row.cause,
                "megatron": [_call(call) for call in row.megatron],
                "document": [_call(call) for call in row.document],
            }
            for part, row in compared(sheet, other)
        ]
    return found


def compared(sheet: Sheet, other: Sheet) -> list[tuple[Part, against.Beside]]:
    """Each part's rows under the two rule sets, side by side."""
    return [
        (part, row)
        for part, beside in zip(sheet.parts, other.parts, strict=True)
        for row in against.beside(part.expectation.calls, beside.expectation.calls)
    ]


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


def _call(call: ExpectedCall) -> dict[str, Any]:
    return {
        "role": call.role,
        "axis": str(axes.rollup(call.role)),
        "op": call.op,
        "phase": call.phase,
        "component": call.component,
        "dtype": call.dtype,
        "group_size": call.group_size,
        "in_elems": call.in_elems,
        "out_elems": call.out_elems,
        "calls": call.calls,
        "payload_bytes": call.payload_bytes,
        "off_rank_bytes": _number(call.off_rank_bytes),
        "avoidable_bytes": 0 if call.avoidable is None else call.avoidable.bytes_per_call,
        "avoidable": None
        if call.avoidable is None
        else {"code": call.avoidable.code, "setting": call.avoidable.setting},
        "outside_c10d": call.outside_c10d,
        "transport": call.transport or None,
        "peer": call.peer or None,
        "varies": None
        if call.varies is None
        else {"width": call.varies.width, "sent": call.varies.sent, "received": call.varies.received},
        "rule": call.rule,
        "evidence": {"kind": call.evidence.kind, "where": call.evidence.where},
        "versions": call.versions or None,
    }


def _totals(sheet: Sheet, by: str) -> dict[str, Any]:
    return {key: _total(found) for key, found in totals(sheet.counted, by).items()}


def _total(found: Total) -> dict[str, Any]:
    return {
        "calls": found.calls,
        "receives": found.receives,
        "payload_bytes": found.payload_bytes,
        "off_rank_bytes": _number(found.off_rank_bytes),
        "received_bytes": found.received_bytes,
        "avoidable_bytes": found.avoidable_bytes,
        "outside_c10d_bytes": _number(found.outside_bytes),
    }


# -- markdown --------------------------------------------------------------------------------------------------------

_COLUMNS = (
    "#",
    "where",
    "role",
    "phase",
    "operation",
    "what",
    "type",
    "each",
    "ranks",
    "calls",
    "off-rank",
    "avoidable",
)
_RIGHT = frozenset({"#", "each", "ranks", "calls", "off-rank", "avoidable"})


def markdown(sheet: Sheet, *, exact: bool = False) -> str:
    """The expectation for a ticket: one row per kind of call, calls and bytes per rank and step."""
    lines = [
        f"Expected: {job_words(sheet.job)}; rules {rules_words(sheet)}",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        f"|{'|'.join('--:' if title in _RIGHT else '---' for title in _COLUMNS)}|",
    ]
    for number, row in enumerate(sheet.rows, 1):
        call = row.call
        waste = call.avoidable
        cells = [
            str(number),
            parts_words(row.parts),
            call.role,
            call.phase,
            call.op,
            what_words(call),
            dtype_word(call),
            each_words(call, exact=exact),
            str(call.group_size),
            f"{call.calls:,}",
            leaving_words(call, exact=exact),
            f"{human_bytes(waste.bytes_per_call * call.calls, exact=exact)} {waste.code}" if waste else "",
        ]
        lines.append(f"| {' | '.join(cell.replace('|', '/').replace('~', chr(92) + '~') for cell in cells)} |")
    lines += ["", total_words(sheet)]
    lines += [f"- not modelled: {gap.what} ({', '.join(gap.roles)})" for gap in sheet.not_modelled]
    return "\n".join(lines) + "\n"
