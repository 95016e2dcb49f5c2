"""The diff as programs and tickets read it: the JSON document traceanalyzer.diff/1, and Markdown.

The words for numbers and components are shared with the terminal's table (diff_terminal.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from traceanalyzer import traffic
from traceanalyzer.reports.text import counted, ranges

if TYPE_CHECKING:  # the expectation shares these words, and needs neither DuckDB nor Arrow
    from traceanalyzer.diff import Coverage, Diff, ReleaseApart
    from traceanalyzer.job import Job
    from traceanalyzer.matching import Cell

SCHEMA = "traceanalyzer.diff/1"

_LONGEST_NAME = 120


# -- words for numbers -----------------------------------------------------------------------------------------------


def human_bytes(size: int | float | Fraction | None, *, exact: bool = False) -> str:
    """Bytes with a binary unit and three digits; the exact number with ``exact``; 'unknown' for None."""
    if size is None:
        return "unknown"
    if exact:
        return f"{int(size):,} B" if Fraction(size).denominator == 1 else f"{float(size):,.3f} B"
    value = float(size)
    if value < 1024:
        return f"{value:g} B" if value == int(value) else f"{value:.1f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 999.5:
            return f"{value:.3g} {unit}"
    return f"{value / 1024:.3g} PiB"


def human_time(ns: int | None) -> str:
    """Nanoseconds with a unit and three digits; '-' for None."""
    if ns is None:
        return "-"
    value = float(ns)
    for unit in ("ns", "us", "ms"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} s"


def human_rate(bytes_per_s: float | None) -> str:
    """Bytes per second with a decimal unit, as bandwidths are given; '-' for None."""
    if bytes_per_s is None:
        return "-"
    value = bytes_per_s / 1000
    for unit in ("kB/s", "MB/s"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB/s"


def share(value: float | None) -> str:
    """A share as a percentage, rounded down so that 100 % means all; 'unknown' for None."""
    if value is None:
        return "unknown"
    hundredths = int(Fraction(value).limit_denominator(10**12) * 10_000)
    return f"{hundredths / 100:g} %"


def calls(number: int | None) -> str:
    """A number of calls; '-' where nothing says how many are expected."""
    return "-" if number is None else f"{number:,}"


def name(text: str, longest: int = _LONGEST_NAME) -> str:
    """A recorded name that is safe to print: one line, no control characters, its middle left out where it is long."""
    clean = "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)
    if len(clean) <= longest:
        return clean
    half = (longest - 5) // 2
    return f"{clean[:half]} ... {clean[-half:]}"


# -- words for the job and its cells ---------------------------------------------------------------------------------


def job_words(job: Job) -> str:
    """The job in one line: model, batch, layout, type."""
    sizes = [
        (job.num_layers, f"{job.num_layers} layers"),
        (job.hidden_size, f"hidden {job.hidden_size}"),
        (job.seq_length, f"seq {job.seq_length}"),
        (job.micro_batch_size, f"micro-batch {job.micro_batch_size}"),
        ((job.num_microbatches or 0) > 1, f"{job.num_microbatches} micro-batches"),
    ]
    degrees = [
        (job.tensor_model_parallel_size, "TP"),
        (job.context_parallel_size, "CP"),
        (job.pipeline_model_parallel_size, "PP"),
        (job.expert_model_parallel_size, "EP"),
        (1 if job.world_size is None else job.data_parallel_size, "DP"),
    ]
    layout = " x ".join(f"{axis}{n}" for n, axis in degrees if n > 1) or "one rank"
    dtype = traffic.SHORT_DTYPE.get(job.activation_dtype, job.activation_dtype)
    words = [*(text for said, text in sizes if said), layout + (" + SP" if job.sequence_parallel else ""), dtype]
    if job.num_experts is not None:
        words.insert(-2, f"{job.num_experts} experts")
    return ", ".join(words) + (", forward only" if job.forward_only else "")


def run_words(c: Coverage) -> str:
    """Which ranks and steps were judged."""
    declared = f" of {c.ranks_declared:,}" if c.ranks_declared else ""
    present = f"{len(c.ranks_present)}{declared} rank{'' if (c.ranks_declared or len(c.ranks_present)) == 1 else 's'}"
    if not {"profiler_step", "mark", "recorded"} & set(c.step_evidence):
        why = "it holds one optimizer step" if c.step_evidence == ("optimizer",) else "it marks no steps"
        return f"{present}, the whole recording as one step ({why})"
    return f"{present}, step{'' if len(c.steps) == 1 else 's'} {ranges(c.steps)}"


def rules_words(diff: Diff) -> str:
    """The rules, and the releases they stand for."""
    if diff.rules != "megatron":
        return diff.rules
    if len(diff.versions_tried) == 1:
        return "megatron, the same in every release" if diff.version == "all" else f"megatron {diff.version}"
    fits = all(c.verdict == "match" for c in diff.cells)
    return f"megatron, releases that {'fit' if fits else 'come closest'}: {diff.version}"


def first_step_words(diff: Diff) -> str:
    """Which step was judged as a first one."""
    return f"step {diff.first_step} judged as a first step, in which overlapped traffic runs at other places"


def coverage_words(c: Coverage) -> str:
    """Coverage in one line: kernels or calls, bytes, what was judged, what lies outside."""
    parts = [f"{c.kernels_attributed:,} of {c.kernels:,} communication kernels"] if c.kernels else []
    parts.append(f"{c.calls:,} calls")
    if c.bytes_known:
        parts.append(f"{share(c.bytes_attributed / c.bytes_known)} of bytes with a role")
    if c.judged is not None:
        parts.append(f"{share(c.judged)} judged")
    if c.calls_of_unknown_bytes:
        parts.append(f"{c.calls_of_unknown_bytes:,} calls of unknown size")
    if c.kernels_before_window:
        parts.append(f"{c.kernels_before_window:,} kernels from before the window")
    if c.calls_outside_steps:
        parts.append(f"{c.calls_outside_steps:,} calls outside complete steps")
    return ", ".join(parts)


def evidence_words(c: Coverage) -> str:
    """On what the roles rest, with calls."""
    return ", ".join(f"{evidence} {n:,}" for evidence, n in c.role_evidence) or "nothing"


def components(cell: Cell) -> str:
    """The parts of the model that make the cell's calls; those of one kind together."""
    plain, losses, gathers = [], [], []
    for component in cell.components:
        if component.startswith("loss: "):
            losses.append(component.removeprefix("loss: "))
        elif component.endswith(" input re-gather"):
            gathers.append(component.removesuffix(" input re-gather"))
        else:
            plain.append(component)
    if losses:
        plain.append(f"loss: {', '.join(losses)}")
    if gathers:
        plain.append(f"input re-gather of {', '.join(gathers)}")
    if not plain and cell.cause is not None and cell.cause.code == "group_of_one":
        return "group of one"
    return name("; ".join(plain) if losses or gathers else ", ".join(plain)) or "-"


def where(cell: Cell, diff: Diff) -> str:
    """Stage, ranks and steps of a cell, as far as not every cell has them; '' where it has all."""
    words = []
    if len({c.stage for c in diff.cells}) > 1 and cell.stage is not None:
        words.append(f"stage {cell.stage}")
    if cell.ranks != diff.coverage.ranks_present:
        words.append(f"rank{'' if len(cell.ranks) == 1 else 's'} {ranges(cell.ranks)}")
    if cell.steps != diff.coverage.steps:
        words.append(f"step{'' if len(cell.steps) == 1 else 's'} {ranges(cell.steps)}")
    return ", ".join(words)


def dtype(cell: Cell) -> str:
    """Short name of the element type."""
    return "?" if cell.dtype is None else traffic.SHORT_DTYPE.get(cell.dtype, name(cell.dtype, 16))


def each(cell: Cell, *, exact: bool = False) -> str:
    """Payload of one call."""
    if cell.varies:
        return "~"
    if cell.payload_bytes_each is None and cell.payload_bytes_measured is not None:
        return "varies"
    return human_bytes(cell.payload_bytes_each, exact=exact)


def expected_bytes(cell: Cell, *, exact: bool = False) -> str:
    """Expected off-rank bytes; '-' where nothing says how many."""
    return "-" if cell.off_rank_bytes_expected is None else human_bytes(cell.off_rank_bytes_expected, exact=exact)


def measured_bytes(cell: Cell, *, exact: bool = False) -> str:
    """Measured off-rank bytes; with "~" a mean of what depends on the routing."""
    found = human_bytes(cell.off_rank_bytes_measured, exact=exact)
    return f"~{found}" if cell.varies and cell.off_rank_bytes_measured else found


def routing_words(cell: Cell) -> str:
    """What depends on the routing in a cell, and whether it adds up; "" where nothing does."""
    if not cell.varies or not cell.calls_measured:
        return ""
    words = []
    if cell.spread is not None:
        balanced, least, most = cell.spread
        found = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        words.append(f"{found} rows a rank and step depend on the routing, {balanced:,} if balanced")
        if balanced:
            ratios = dict.fromkeys(f"{rows / balanced:.2f}" for rows in (least, most))
            words[-1] += f" ({' to '.join(ratios)} times)"
    if cell.conserved is None:
        words.append("not all ranks of the group were recorded, so that rows sent are rows received is not checked")
    else:
        words.append("all rows sent were received" if cell.conserved else "rows sent and received differ")
    return "; ".join(words)


def verdict_of(cell: Cell) -> str:
    """Verdict and, where it is unknown, why."""
    return cell.verdict if cell.reason is None else f"{cell.verdict}: {name(cell.reason)}"


def apart_words(apart: ReleaseApart) -> str:
    """Releases that fit less well, and by which cells."""
    shown = [
        f"{c.role or '?'} {c.phase or '?'} {c.op or '?'} {components(c)} {calls(c.calls_expected)} expected, "
        f"{c.calls_measured:,} measured ({verdict_of(c)})"
        for c in apart.cells[:_MOST_APART]
    ]
    more = len(apart.cells) - len(shown)
    return f"{apart.releases}: {'; '.join(shown)}" + (f"; and {counted(more, 'other row')}" if more else "")


_MOST_APART = 3
"""How many cells that tell releases apart are listed."""


def avoidable_words(cell: Cell) -> str:
    """What need not have been sent, and what removes it."""
    ways = "; ".join(
        code + (f": {way} removes it" if way else ": no setting removes it") for code, way in cell.avoidable
    )
    return f"avoidable {human_bytes(cell.avoidable_bytes)} off-rank a step   {ways}"


def per_step(diff: Diff, of: Iterable[tuple[Cell, int]]) -> tuple[int, int]:
    """The least and the most of a sum over the cells of one rank's step."""
    totals = {(rank, step): 0 for cell in diff.cells for rank in cell.ranks for step in cell.steps}
    for cell, value in of:
        for rank in cell.ranks:
            for step in cell.steps:
                totals[rank, step] += value
    return (min(totals.values()), max(totals.values())) if totals else (0, 0)


def verdict_words(diff: Diff) -> str:
    """The last line, without the verdict itself."""
    counts = ", ".join(f"{diff.count(v)} {v}" for v in ("missing", "unexpected", "excess", "unknown") if diff.count(v))
    words: list[str] = []
    if diff.verdict == "match":
        least, most = per_step(diff, ((c, c.calls_measured) for c in diff.cells if c.verdict == "match"))
        number = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        words.append(f"{number} calls per rank and step explained, 0 missing, 0 unexpected")
        if counts:
            words.append(f"rows without a verdict: {counts}")
    elif counts:
        words.append(f"rows: {counts}")
    if diff.verdict == "cannot be judged":
        c = diff.coverage
        words.append(
            f"{share(c.attributed)} attributed, {share(c.judged)} judged, less than the {share(diff.min_coverage)} of "
            "--min-coverage"
        )
    least, most = per_step(diff, ((c, c.avoidable_bytes) for c in diff.cells))
    if most:
        words.append(f"{'' if least == most else 'up to '}{human_bytes(most)} avoidable")
    words.append(f"exit {diff.exit_code}")
    return "   ".join(words)


# -- markdown --------------------------------------------------------------------------------------------------------

_COLUMNS = (
    ("#", "r"),
    ("role", "l"),
    ("phase", "l"),
    ("operation", "l"),
    ("what", "l"),
    ("type", "l"),
    ("each", "r"),
    ("calls expected", "r"),
    ("calls measured", "r"),
    ("off-rank expected", "r"),
    ("off-rank measured", "r"),
    ("time", "r"),
    ("exposed", "r"),
    ("verdict", "l"),
    ("cause", "l"),
)


def markdown(diff: Diff, *, exact: bool = False, link_times: Sequence[int | None] | None = None) -> str:
    """The diff for a pull request or a ticket. link_times: of each cell, the time at measured bandwidths, a column more."""
    c = diff.coverage
    lines = [
        f"**{diff.verdict}**: {_escape(job_words(diff.job))}; {_escape(run_words(c))}; rules {_escape(rules_words(diff))}",
        "",
        f"Coverage: {_escape(coverage_words(c))}; roles by {_escape(evidence_words(c))}.",
        "",
    ]
    if c.import_status not in (None, "complete"):
        lines += [f"Import: {_escape(str(c.import_status))}.", ""]
    lines += [f"- job conflict: {_escape(x.sentence)}" for x in diff.job_conflicts]
    if diff.job_conflicts:
        lines.append("")
    columns = list(_COLUMNS)
    rows = [_markdown_row(diff, n, exact) for n in range(len(diff.cells))]
    if link_times is not None:
        beside = [title for title, _ in columns].index("time") + 1
        columns.insert(beside, ("at the links' bandwidth", "r"))
        for row, time in zip(rows, link_times, strict=True):
            row.insert(beside, human_time(time))
    lines += [
        f"| {' | '.join(title for title, _ in columns)} |",
        f"|{'|'.join('--:' if side == 'r' else '---' for _, side in columns)}|",
    ]
    lines += [f"| {' | '.join(map(_escape, row))} |" for row in rows]
    lines += ["", _escape(verdict_words(diff))]
    if diff.not_in_window:
        lines += ["", f"Not in the window: {', '.join(diff.not_in_window)}."]
    if diff.first_step is not None:
        lines += ["", f"{_escape(first_step_words(diff))}."]
    if diff.versions_apart:
        lines.append("")
    lines += [f"- does not fit {_escape(apart_words(a))}" for a in diff.versions_apart]
    if c.unattributed:
        lines.append("")
    for u in c.unattributed:
        found = f"{_escape(name(u.name))}, {counted(u.kernels, 'kernel')}, {human_time(u.time_ns)} ({u.why})"
        lines.append(f"- unattributed communication: {found}")
    return "\n".join(lines) + "\n"


def _markdown_row(diff: Diff, number: int, exact: bool) -> list[str]:
    cell = diff.cells[number]
    place = where(cell, diff)
    notes = [] if cell.cause is None else [f"{cell.cause.code} ({cell.cause.confidence}): {cell.cause.sentence}"]
    notes += [avoidable_words(cell)] if cell.avoidable_bytes else []
    notes += [routing_words(cell)] if routing_words(cell) else []
    return [
        str(number + 1),
        cell.role or "?",
        cell.phase or "?",
        cell.op or "?",
        components(cell) + (f" ({place})" if place else ""),
        dtype(cell),
        each(cell, exact=exact),
        calls(cell.calls_expected),
        calls(cell.calls_measured),
        expected_bytes(cell, exact=exact),
        measured_bytes(cell, exact=exact),
        human_time(cell.time_ns),
        human_time(cell.exposed_ns),
        cell.verdict + (f" ({cell.reason})" if cell.reason else ""),
        "; ".join(notes),
    ]


_ESCAPED = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;"} | {mark: f"\\{mark}" for mark in "\\|`*[]~"},
)


def _escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line: no table cell, tag, link or emphasis comes of it."""
    return name(text, 1000).translate(_ESCAPED)


# -- json ------------------------------------------------------------------------------------------------------------


def document(diff: Diff, link_times: Sequence[int | None] | None = None) -> dict[str, Any]:
    """The JSON document traceanalyzer.diff/1 (docs/diff.md). Bytes and calls are per rank and step; null is unknown.

    link_times: of each cell, the time at measured bandwidths; the cells then have a key link_time_ns.
    """
    c = diff.coverage
    return {
        "schema": SCHEMA,
        "source": diff.source,
        "rules": diff.rules,
        "version": diff.version,
        "versions_tried": list(diff.versions_tried),
        "versions_apart": [
            {"releases": a.releases, "cells": [_cell_document(cell) for cell in a.cells]} for a in diff.versions_apart
        ],
        "first_step": diff.first_step,
        "job": _job_document(diff.job) | {"used": diff.job_used},
        "coverage": {
            "ranks_present": list(c.ranks_present),
            "ranks_declared": c.ranks_declared,
            "steps": list(c.steps),
            "step_evidence": list(c.step_evidence),
            "calls": c.calls,
            "calls_outside_steps": c.calls_outside_steps,
            "calls_of_unknown_bytes": c.calls_of_unknown_bytes,
            "kernels": c.kernels,
            "kernels_attributed": c.kernels_attributed,
            "kernels_before_window": c.kernels_before_window,
            "kernel_time_ns": c.kernel_time_ns,
            "kernel_time_attributed_ns": c.kernel_time_attributed_ns,
            "bytes_known": c.bytes_known,
            "bytes_attributed": c.bytes_attributed,
            "role_evidence": dict(c.role_evidence),
            "attributed": c.attributed,
            "judged": c.judged,
            "unattributed": [
                {"name": u.name, "kernels": u.kernels, "time_ns": u.time_ns, "why": u.why} for u in c.unattributed
            ],
            "import_status": c.import_status,
        },
        "job_conflicts": [
            {"field": x.field, "intended": x.intended, "captured": x.captured, "sentence": x.sentence}
            for x in diff.job_conflicts
        ],
        "not_in_window": list(diff.not_in_window),
        "cells": [
            _cell_document(cell) | ({} if link_times is None else {"link_time_ns": link_times[n]})
            for n, cell in enumerate(diff.cells)
        ],
        "min_coverage": diff.min_coverage,
        "tolerance": diff.tolerance,
        "verdict": diff.verdict,
    }


def _job_document(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(job.to_json())
    return found


def _number(value: Fraction | None) -> int | float | None:
    """A whole number of bytes as an int, a fraction of a byte as a float."""
    if value is None:
        return None
    return int(value) if value.denominator == 1 else float(value)


def _cell_document(cell: Cell) -> dict[str, Any]:
    return {
        "role": cell.role,
        "axis": cell.axis,
        "op": cell.op,
        "phase": cell.phase,
        "stage": cell.stage,
        "dtype": cell.dtype,
        "group_size": cell.group_size,
        "payload_bytes_each": cell.payload_bytes_each,
        "components": list(cell.components),
        "calls_expected": cell.calls_expected,
        "calls_measured": cell.calls_measured,
        "payload_bytes_expected": cell.payload_bytes_expected,
        "payload_bytes_measured": cell.payload_bytes_measured,
        "off_rank_bytes_expected": _number(cell.off_rank_bytes_expected),
        "off_rank_bytes_measured": _number(cell.off_rank_bytes_measured),
        "varies": cell.varies,
        "rows_that_vary": None
        if cell.spread is None
        else {"balanced": cell.spread.balanced, "least": cell.spread.least, "most": cell.spread.most},
        "conserved": cell.conserved,
        "transport": cell.transport or None,
        "avoidable_bytes": cell.avoidable_bytes,
        "avoidable": [{"code": code, "setting": setting} for code, setting in cell.avoidable],
        "time_ns": cell.time_ns,
        "exposed_ns": cell.exposed_ns,
        "bus_bandwidth_bytes_per_s": cell.bus_bandwidth_bytes_per_s,
        "verdict": cell.verdict,
        "reason": cell.reason,
        "cause": None
        if cell.cause is None
        else {"code": cell.cause.code, "sentence": cell.cause.sentence, "confidence": cell.cause.confidence},
        "related_cells": list(cell.related),
        "role_evidence": list(cell.role_evidence),
        "ranks": list(cell.ranks),
        "steps": list(cell.steps),
    }
