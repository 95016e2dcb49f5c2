"""Expected memory and pipeline schedule of a job: as JSON documents and as screens. Pure functions of results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from traceanalyzer.expect import schedule as schedules
from traceanalyzer.expect.memory import KINDS, Memory, Part
from traceanalyzer.expect.schedule import Schedule
from traceanalyzer.job import Job
from traceanalyzer.reports.diff import human_bytes, job_words, share

MEMORY_SCHEMA = "traceanalyzer.memory/1"
SCHEDULE_SCHEMA = "traceanalyzer.schedule/1"


# -- memory ----------------------------------------------------------------------------------------------------------


def memory_document(job: Job, stages: Sequence[Memory]) -> dict[str, Any]:
    """The JSON document traceanalyzer.memory/1 (docs/expect.md). Bytes of one rank of each stage, at its peak."""
    first = stages[0].megatron
    return {
        "schema": MEMORY_SCHEMA,
        "job": json.loads(job.to_json()),
        "stages": [
            {
                "stage": one.stage,
                "parts": [
                    {
                        "name": part.name,
                        "kind": part.kind,
                        "expert": part.expert,
                        "bytes": part.bytes.value,
                        "formula": str(part.bytes),
                        "evidence": {"kind": part.evidence.kind, "where": part.evidence.where},
                        "note": part.note or None,
                    }
                    for part in one.parts
                ],
                "totals": {kind: one.total(kind) for kind in KINDS},
                "total": one.total(),
                "not_counted": list(one.not_counted),
            }
            for one in stages
        ],
        "megatron_estimate": None
        if first is None
        else {
            "release": "0.16.1",
            "weights_and_optimizer_bytes": _number(first.weights_and_optimizer),
            "elsewhere_bytes": None if first.elsewhere is None else _number(first.elsewhere),
            "activations_bytes": _number(first.activations),
            "total_bytes": _number(first.total),
        },
    }


def memory_screen(job: Job, stages: Sequence[Memory], *, exact: bool = False, width: int = 160) -> RenderableType:
    """One row per part, one column per stage (alike stages share one), Megatron's own estimate below.

    width: of the terminal; stages that do not fit beside each other stand in a table of their own.
    """
    shown = _different(stages)
    tables: list[RenderableType] = []
    for start in range(0, len(shown), max(1, _most_stages(shown, width))):
        block = shown[start : start + max(1, _most_stages(shown, width))]
        tables += [_memory_table(block, exact=exact), Text()]
    notes = list(dict.fromkeys(words for one in stages for words in one.not_counted))
    parts_below: list[RenderableType] = [Text(job_words(job)), Text(), *tables]
    estimate = stages[0].megatron
    if estimate is not None:
        state, kept = (human_bytes(n, exact=exact) for n in (estimate.weights_and_optimizer, estimate.activations))
        parts_below.append(
            Text(f"Megatron's own estimate: {state} weights and optimizer of the fullest stage, {kept} activations")
        )
    parts_below += [Text(f"not counted: {words}", "dim") for words in notes]
    return Group(*parts_below)


_LABEL, _FIGURE = 34, 11
"""Columns for the name of a part, and for one stage at least."""


def _most_stages(shown: Sequence[tuple[Memory, str]], width: int) -> int:
    """Stages that fit beside each other."""
    return (width - _LABEL) // max(_FIGURE, *(len(words) + 2 for _, words in shown))


def _memory_table(shown: Sequence[tuple[Memory, str]], *, exact: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("memory of one rank", overflow="fold", min_width=_LABEL - 4)
    for _, words in shown:
        table.add_column(words, justify="right", no_wrap=True)
    for kind in (*KINDS, "host"):
        parts: dict[tuple[str, bool], None] = {}
        for one, _ in shown:
            parts.update(dict.fromkeys((part.name, part.expert) for part in one.parts if part.kind == kind))
        if not parts:
            continue
        for name, expert in parts:
            sizes = [_size_of(one.parts, kind, name, expert) for one, _ in shown]
            label = f"  {name}" + (", experts" if expert and "expert" not in name else "")
            table.add_row(label, *("" if size == 0 else human_bytes(size, exact=exact) for size in sizes), style="dim")
        sums = [sum(part.bytes.value for part in one.parts if part.kind == kind) for one, _ in shown]
        table.add_row(kind, *(human_bytes(size, exact=exact) for size in sums))
    table.add_row("all on the device", *(human_bytes(one.total(), exact=exact) for one, _ in shown), style="bold")
    return table


def _size_of(parts: Sequence[Part], kind: str, name: str, expert: bool) -> int:
    return sum(part.bytes.value for part in parts if (part.kind, part.name, part.expert) == (kind, name, expert))


def _different(stages: Sequence[Memory]) -> list[tuple[Memory, str]]:
    """Each different stage once, with words for those that are alike."""
    found: list[tuple[Memory, list[int]]] = []
    for one in stages:
        alike = next((numbers for other, numbers in found if other.parts == one.parts), None)
        if alike is None:
            found.append((one, [one.stage]))
        else:
            alike.append(one.stage)
    return [(one, f"stage{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}") for one, numbers in found]


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


# -- schedule --------------------------------------------------------------------------------------------------------


def schedule_document(job: Job, schedule: Schedule | None) -> dict[str, Any]:
    """The JSON document traceanalyzer.schedule/1 (docs/expect.md); ``schedule`` is null with one stage."""
    found: dict[str, Any] = {"schema": SCHEDULE_SCHEMA, "job": json.loads(job.to_json()), "schedule": None}
    if schedule is None:
        return found
    idle = schedules.bubble(schedule, 1, 2)
    found["schedule"] = {
        "kind": schedule.kind,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "chunks": schedule.chunks,
        "group": schedule.group,
        "bubble_of_total": float(idle.of_total),
        "bubble_of_ideal": float(idle.of_ideal),
        "per_stage": [
            {
                "stage": stage,
                "warm_up": schedules.warm_up(schedule, stage),
                "peak_in_flight_chunks": schedules.peak_in_flight(schedule, stage),
                "peak_in_flight_microbatches": float(schedules.peak_in_microbatches(schedule, stage)),
                "messages": [
                    {"op": op, "content": content, "peer": peer, "calls": calls}
                    for (op, content, peer), calls in schedules.message_counts(schedule, stage).items()
                ],
                "order": [[a.kind, a.microbatch, a.chunk] for a in schedules.actions(schedule, stage)],
            }
            for stage in range(schedule.stages)
        ],
    }
    return found


def schedule_screen(job: Job, schedule: Schedule | None) -> RenderableType:
    """Warm-up, activations in flight and messages of each stage, and the bubble."""
    if schedule is None:
        return Group(Text(job_words(job)), Text(), Text("one pipeline stage: no schedule, no bubble"))
    columns = ("stage", "warm-up", "in flight", "send next", "recv previous", "send previous", "recv next", "order")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        title = column.replace(" ", "\n") if column.startswith(("send", "recv")) else column
        if column == "order":
            table.add_column(title, overflow="fold")
        else:
            table.add_column(title, justify="right", no_wrap=True)
    for stage in range(schedule.stages):
        counts = schedules.message_counts(schedule, stage)
        keys = [("send", "next"), ("recv", "previous"), ("send", "previous"), ("recv", "next")]
        calls = [sum(n for (op, _, peer), n in counts.items() if (op, peer) == key) for key in keys]
        in_flight = float(schedules.peak_in_microbatches(schedule, stage))
        table.add_row(
            str(stage),
            str(schedules.warm_up(schedule, stage)),
            f"{in_flight:g}",
            *map(str, calls),
            _order_words(schedule, stage),
        )
    idle = schedules.bubble(schedule, 1, 2)
    chunks = f", {schedule.chunks} chunks a rank" if schedule.chunks > 1 else ""
    head = f"{schedule.kind}: {schedule.stages} stages, {schedule.microbatches} micro-batches{chunks}"
    words = f"bubble {share(float(idle.of_total))} of the pipeline's time, {share(float(idle.of_ideal))} of ideal time"
    return Group(
        Text(job_words(job)), Text(head), Text(), table, Text(), Text(f"{words}, stages taken as equal", "bold")
    )


_LONGEST_ORDER = 24


def _order_words(schedule: Schedule, stage: int) -> str:
    """The first passes: F0 F1 B0; with chunks F0.1 is micro-batch 0 through chunk 1."""
    passes = schedules.actions(schedule, stage)
    names = [f"{a.kind}{a.microbatch}" + (f".{a.chunk}" if schedule.chunks > 1 else "") for a in passes]
    shown = names[:_LONGEST_ORDER]
    return " ".join(shown) + (f" ... ({len(names)} passes)" if len(names) > len(shown) else "")
