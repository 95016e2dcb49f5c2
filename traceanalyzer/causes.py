"""Why a cell differs: the table of causes. Each is a code, a sentence and a confidence, and is tested by itself.

A cause is ``proven`` where another cell or a flag confirms it, ``likely`` where the numbers alone suggest it. A cause may
join cells; each then names the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from traceanalyzer import traffic
from traceanalyzer.expect.model import ExpectedCall, RuleSet
from traceanalyzer.job import Job

Confidence = Literal["proven", "likely"]


@dataclass(frozen=True)
class Cause:
    """A code, a sentence with its numbers, and how sure it is."""

    code: str
    sentence: str
    confidence: Confidence


GROUP_OF_ONE = Cause(
    "group_of_one", "A call on a group of one rank: nothing leaves the rank, and no kernel is needed.", "proven"
)


@dataclass(frozen=True)
class CellView:
    """What a cause may look at of a cell. Calls are per rank and step; payload is of one call."""

    role: str | None
    op: str | None
    phase: str | None
    dtype: str | None
    payload: int | None
    calls_expected: int
    calls_measured: int
    verdict: str
    expected: tuple[ExpectedCall, ...] = ()
    ranks: tuple[int, ...] = (0,)
    steps: tuple[int, ...] = (0,)

    @property
    def differs(self) -> bool:
        """Whether there is something to explain."""
        return self.verdict in ("excess", "missing", "unexpected")

    @property
    def surplus(self) -> int:
        """Calls beyond the expected ones; negative if some are missing."""
        return self.calls_measured - self.calls_expected

    @property
    def elements(self) -> int | None:
        """Elements that the payload counts; None if unknown."""
        size = traffic.element_bytes(self.dtype)
        return None if self.payload is None or not size else self.payload // size

    @property
    def paired(self) -> bool:
        """Whether something differs that was both expected and measured."""
        return self.differs and bool(self.expected) and self.calls_measured > 0


@dataclass(frozen=True)
class Facts:
    """What a cause may look at besides cells: the job, what it said of itself, the rules, and what the megatron rules
    expect of each rank where other rules are in force."""

    job: Job
    captured: Job | None = None
    rules: RuleSet = "megatron"
    megatron: Mapping[int, Sequence[ExpectedCall]] = field(default_factory=dict)


Found = Iterator[tuple[Cause, tuple[int, ...]]]
Rule = Callable[[Sequence[CellView], Facts], Found]


def explain(cells: Sequence[CellView], facts: Facts) -> dict[int, tuple[Cause, tuple[int, ...]]]:
    """Cell index -> (its cause, the other cells the cause joins). The first rule of the table that fits a cell wins."""
    found: dict[int, tuple[Cause, tuple[int, ...]]] = {}
    for rule in TABLE:
        for cause, joined in rule(cells, facts):
            for i in joined:
                if i not in found:
                    found[i] = (cause, tuple(j for j in joined if j != i))
    return found


# -- the table -------------------------------------------------------------------------------------------------------


def _beyond_the_document(cells: Sequence[CellView], facts: Facts) -> Found:
    """Under the document's rules: what real Megatron does besides, looked up in the megatron rules."""
    if facts.rules != "document":
        return
    for i, cell in enumerate(cells):
        if not cell.differs or cell.surplus <= 0:
            continue
        siblings = [c for c in cells if _same_calls(c, cell)]  # cells that only the component tells apart
        known = {c.component for s in siblings for c in s.expected}
        measured = sum(s.calls_measured for s in siblings)
        real = [
            c
            for c in facts.megatron.get(cell.ranks[0], ())
            if (c.role, c.op, c.dtype, c.payload_bytes) == (cell.role, cell.op, cell.dtype, cell.payload)
            and (c.phase == cell.phase or (c.phase == "optimizer" and cell.phase == "other"))
        ]
        beyond = [c for c in real if c.component not in known]
        if not beyond:
            continue
        explained = sum(c.calls for c in real)
        proven = explained == measured
        regathers = sum(c.calls for c in beyond if c.avoidable is not None and c.avoidable.code == "sp_input_regather")
        listed = ", ".join(f"{c.calls} {c.component}" for c in beyond)
        if regathers:
            code = "sp_input_regather"
            words = (
                "The document lets the backward pass mirror the forward one; real Megatron gathers the input of every "
                f"column-parallel layer again for its weight gradient: {regathers} of the {cell.surplus} calls beyond the "
                f"document ({listed})."
            )
        elif any(c.phase == "recompute" for c in beyond):
            code = "recompute_repeats_collectives"
            words = f"Recomputation repeats forward collectives, which the document does not mention: {listed}."
        else:
            code = "not_in_document"
            words = f"The document does not mention these calls, real Megatron makes them: {listed}."
        count = f"{explained} call{'' if explained == 1 else 's'}"
        total = count if proven else f"{count} of {measured}"
        yield Cause(code, f"{words} The megatron rules explain {total}.", "proven" if proven else "likely"), (i,)


def _same_calls(one: CellView, other: CellView) -> bool:
    """Whether two cells hold calls of one kind in the same steps, so that only the component tells them apart."""
    return (one.role, one.op, one.phase, one.dtype, one.payload, one.ranks, one.steps) == (
        other.role,
        other.op,
        other.phase,
        other.dtype,
        other.payload,
        other.ranks,
        other.steps,
    )


def _recompute_on(cells: Sequence[CellView], facts: Facts) -> Found:
    """Forward collectives repeated in the backward pass although the job does not recompute."""
    if facts.job.recompute_granularity == "full":
        return
    joined = tuple(i for i, c in enumerate(cells) if c.phase == "recompute" and c.verdict in ("unexpected", "excess"))
    if not joined:
        return
    confirmed = facts.captured is not None and facts.captured.recompute_granularity == "full"
    first = cells[joined[0]]
    calls = sum(
        cells[i].surplus for i in joined if first.ranks[0] in cells[i].ranks and first.steps[0] in cells[i].steps
    )
    granularity = facts.job.recompute_granularity
    asked = f"the job says {granularity}" if granularity else "the job does not ask for it"
    captured = ", and the captured job has recompute_granularity full" if confirmed else ""
    yield (
        Cause(
            "recompute_full",
            f"{calls} forward calls are repeated inside the backward pass: recomputation is on, {asked}{captured}.",
            "proven" if confirmed else "likely",
        ),
        joined,
    )


def _recompute_off(cells: Sequence[CellView], facts: Facts) -> Found:
    """The job recomputes, the run does not."""
    if facts.job.recompute_granularity is None:
        return
    joined = tuple(i for i, c in enumerate(cells) if c.phase == "recompute" and c.verdict == "missing")
    if joined and not any(c.phase == "recompute" and c.calls_measured for c in cells):
        yield (
            Cause(
                "recompute_off",
                f"recompute_granularity is {facts.job.recompute_granularity}, but no forward call is repeated in the "
                "backward pass: the run does not recompute.",
                "proven",
            ),
            joined,
        )


def _sequence_parallel(cells: Sequence[CellView], facts: Facts) -> Found:
    """All-reduces where the job's sequence parallelism expects all-gather and reduce-scatter pairs, or the other way."""
    everywhere = {
        i: c
        for i, c in enumerate(cells)
        if c.role == "tp" and c.phase in ("forward", "backward", "recompute") and c.dtype == facts.job.activation_dtype
    }
    if facts.job.sequence_parallel and any(c.verdict == "match" and c.op == "all_gather" for c in everywhere.values()):
        return  # it was on: single operations that differ have another reason
    layers = {i: c for i, c in everywhere.items() if c.differs}
    reduces = sum(c.calls_measured for c in layers.values() if c.op == "all_reduce")
    pairs = sum(c.calls_measured for c in layers.values() if c.op in ("all_gather", "reduce_scatter"))
    wanted = {c.op for cell in layers.values() for c in cell.expected}
    joined = tuple(i for i, c in layers.items() if c.op in ("all_reduce", "all_gather", "reduce_scatter"))
    said = facts.captured is not None and facts.captured.sequence_parallel != facts.job.sequence_parallel
    if facts.job.sequence_parallel and reduces > pairs and wanted & {"all_gather", "reduce_scatter"}:
        yield (
            Cause(
                "sequence_parallel_off",
                "The job has sequence parallelism on, but its tensor-parallel layers all-reduce: it was off in this run.",
                "proven" if pairs == 0 or said else "likely",
            ),
            joined,
        )
    elif not facts.job.sequence_parallel and pairs > reduces and "all_reduce" in wanted:
        yield (
            Cause(
                "sequence_parallel_on",
                "The job has sequence parallelism off, but its tensor-parallel layers all-gather and reduce-scatter: it was "
                "on in this run.",
                "proven" if reduces == 0 or said else "likely",
            ),
            joined,
        )


def _scaled_counts(cells: Sequence[CellView], facts: Facts) -> Found:
    """Every count of a step off by one and the same factor: it had another number of micro-batches than the job says."""
    micro_batches = facts.job.num_microbatches
    if micro_batches is None:
        return
    places: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for i, c in enumerate(cells):
        if c.phase in ("forward", "backward", "recompute") and c.verdict != "unknown" and c.expected:
            places.setdefault((c.ranks, c.steps), []).append(i)
    for (ranks, steps), joined in places.items():
        # a count that is right in the same steps, in a cell it shares with other ranks, speaks against it
        if any(
            i not in joined and set(ranks) <= set(cells[i].ranks) and set(steps) <= set(cells[i].steps)
            for others in places.values()
            for i in others
        ):
            continue
        counts = [(cells[i].calls_measured * micro_batches, cells[i].calls_expected) for i in joined]
        seen = {measured // wanted if measured % wanted == 0 else None for measured, wanted in counts}
        number = seen.pop() if len(seen) == 1 else None
        if len(joined) < 2 or number in (None, 0, micro_batches):
            continue
        said = facts.captured is not None and facts.captured.num_microbatches == number
        yield (
            Cause(
                "microbatch_count",
                f"Every count is {number}/{micro_batches} of the expected one: the step had {number} micro-batches, the "
                f"job says {micro_batches}.",
                "proven" if said else "likely",
            ),
            tuple(joined),
        )


def _dtype_differs(cells: Sequence[CellView], _: Facts) -> Found:
    """The same operation on as many elements of another type."""
    for i, cell in enumerate(cells):
        if not cell.paired or cell.dtype is None or cell.dtype in {c.dtype for c in cell.expected}:
            continue
        same = [c for c in cell.expected if c.op == cell.op and _elements(c) == cell.elements]
        if not same:
            continue
        size, wanted = traffic.element_bytes(cell.dtype), traffic.element_bytes(same[0].dtype)
        times = f", {size / wanted:g} times the bytes" if size and wanted else ""
        yield Cause("dtype_differs", f"Sent as {cell.dtype} instead of {same[0].dtype}{times}.", "proven"), (i,)


def _operation_differs(cells: Sequence[CellView], _: Facts) -> Found:
    """Another operation in the same place."""
    for i, cell in enumerate(cells):
        wanted = sorted({c.op for c in cell.expected})
        if cell.paired and cell.op not in wanted:
            yield Cause("operation_differs", f"{cell.op} instead of {', '.join(wanted)}.", "likely"), (i,)


def _size_differs(cells: Sequence[CellView], _: Facts) -> Found:
    """The same operation and type with another size."""
    for i, cell in enumerate(cells):
        same = {c.payload_bytes for c in cell.expected if (c.op, c.dtype) == (cell.op, cell.dtype)}
        if not cell.paired or cell.payload is None or not same or cell.payload in same:
            continue
        wanted = max(same)
        times = f" ({cell.payload / wanted:.4g} times)" if wanted else ""
        yield (
            Cause(
                "size_differs",
                f"{cell.payload:,} bytes a call instead of {wanted:,}{times}: padding, another shape, or a size of the job "
                "that is not what the job says.",
                "likely",
            ),
            (i,),
        )


def _elements(call: ExpectedCall) -> int | None:
    size = traffic.element_bytes(call.dtype)
    return call.payload_bytes // size if size else None


TABLE: tuple[Rule, ...] = (
    _beyond_the_document,
    _sequence_parallel,
    _recompute_on,
    _recompute_off,
    _scaled_counts,
    _dtype_differs,
    _operation_differs,
    _size_differs,
)
"""Rules in order: what explains several cells stands before what explains one."""
