"""Faults in what was recorded: the ranks did what they should, and the files do not show it as it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from traceanalyzer import schema
from traceanalyzer.errors import JobError
from traceanalyzer.importers.spool import RunWriter, issue, table_of
from traceanalyzer.simulate.costs import Clock
from traceanalyzer.simulate.faults.plan import Fault, Finish, Plan
from traceanalyzer.simulate.faults.timing import DENSE, check_host, check_ranks
from traceanalyzer.simulate.rows import KINETO

pc: Any = pyarrow.compute  # its functions are made when it is imported: no type checker sees them

Change = Callable[[str, pa.Table], pa.Table]
"""Rows of one kind -> what is left of them, and what is added."""


def rewritten(change: Change, *, status: str | None = None) -> Finish:
    """A step of ``Simulation.write`` that changes the rows of each kind; ``status``: what the import says of itself."""

    def finish(path: Path) -> Sequence[Path]:
        file = pq.ParquetFile(path)
        metadata = {k.decode(): v.decode() for k, v in (file.schema_arrow.metadata or {}).items()}
        if status is not None:
            said = json.loads(metadata.get(schema.META_IMPORT, "{}"))
            metadata[schema.META_IMPORT] = json.dumps({**said, "status": status})
        pieces: dict[str, list[int]] = {kind: [] for kind in ("issue",)}
        for group in range(file.num_row_groups):  # row groups do not mix kinds
            kinds = file.read_row_group(group, columns=["kind"]).column("kind")
            pieces.setdefault(str(kinds[0]), []).append(group)
        with RunWriter(path, metadata) as writer:
            for kind in sorted(pieces):
                own = [n for n in schema.kind_schema(kind).names if n != "kind"]
                empty = table_of(kind, []).select(own)
                rows = file.read_row_groups(pieces[kind], columns=own) if pieces[kind] else empty
                writer.write(kind, [change(kind, rows)])
        return ()

    return finish


def _of_rank(rows: pa.Table, rank: int) -> pa.ChunkedArray:
    return pc.fill_null(pc.equal(rows.column("rank"), rank), False)


def _profiled(rows: pa.Table) -> pa.ChunkedArray:
    return pc.fill_null(pc.equal(rows.column("source"), KINETO), False)


def _ends(rows: pa.Table) -> pa.ChunkedArray:
    """When a row of the profiler ends, by the clock of its rank; its start where it has no duration."""
    start = rows.column("start_ns")
    return pc.add(start, pc.fill_null(rows.column("dur_ns"), 0))


# -- files of ranks ----------------------------------------------------------------------------------------------------


def _missing_rank(plan: Plan, rank: int) -> Plan:
    check_ranks(plan, rank)
    every = range(plan.job.layout.world_size) if plan.collected.ranks is None else plan.collected.ranks
    left = tuple(r for r in every if r != rank)
    return plan.with_(collected=replace(plan.collected, ranks=left)).at(rank=rank)


def _duplicate_rank(plan: Plan, rank: int) -> Plan:
    check_ranks(plan, rank)

    def again(kind: str, rows: pa.Table) -> pa.Table:
        mine = rows.filter(_of_rank(rows, rank))
        if kind == "rank":
            names = pa.array(["simulated again"] * mine.num_rows, pa.string()).dictionary_encode()
            at = mine.schema.get_field_index("source_file")
            mine = mine.set_column(at, mine.schema.field(at), names.cast(mine.schema.field(at).type))
        return pa.concat_tables([rows, mine])

    return plan.with_(finish=(*plan.finish, rewritten(again))).at(rank=rank)


def _lost_events(plan: Plan, rank: int, kept: float) -> Plan:
    """``kept``: share of the rank's recorded time before which the profiler's file ends."""
    check_ranks(plan, rank)
    if not 0 < kept < 1:
        raise JobError("what is kept of a file that is cut must be above 0 and below 1")
    sentence = (
        "The file ends early: every whole event before the cut is kept, what came after is unknown. Nothing worked out from "
        "this rank's last step can be compared as if it were whole."
    )
    cut: dict[str, int] = {}

    def shortened(path: Path) -> Sequence[Path]:
        rows = pq.read_table(path, columns=["kind", "rank", "source", "start_ns", "dur_ns"])
        rows = rows.filter(pc.and_(_of_rank(rows, rank), pc.equal(rows.column("kind"), "kernel")))
        if rows.num_rows:
            low, high = pc.min(rows.column("start_ns")).as_py(), pc.max(_ends(rows)).as_py()
            cut["at"] = low + int((high - low) * kept)
        return rewritten(change, status="partial")(path)

    def change(kind: str, rows: pa.Table) -> pa.Table:
        if kind == "issue":
            said = {**issue("data_loss", "file_cut", sentence, 1), "rank": rank, "source": KINETO}
            return pa.concat_tables(
                [rows, table_of(kind, [said]).select(rows.schema.names)], promote_options="permissive"
            )
        if "at" not in cut or kind not in ("comm_record", "cpu_op", "kernel", "span"):
            return rows
        lost = pc.and_(pc.and_(_of_rank(rows, rank), _profiled(rows)), pc.greater(_ends(rows), cut["at"]))
        return rows.filter(pc.invert(pc.fill_null(lost, False)))

    profiled_only = replace(plan.collected, hooks=False)
    return plan.with_(collected=profiled_only, finish=(*plan.finish, shortened)).at(rank=rank)


# -- clocks ------------------------------------------------------------------------------------------------------------


def _clock(plan: Plan, rank: int, **clock: int) -> Plan:
    check_ranks(plan, rank)
    check_host(plan, rank)
    host = plan.costs.host_of(rank)
    found = plan.with_costs(clocks={**plan.costs.clocks, host: Clock(**clock)})
    return found.at(host=host, rank=rank)


def _clock_offset(plan: Plan, rank: int, offset_ns: int) -> Plan:
    return _clock(plan, rank, offset_ns=offset_ns)


def _clock_drift(plan: Plan, rank: int, drift_ppb: int) -> Plan:
    return _clock(plan, rank, drift_ppb=drift_ppb)


def _clock_step(plan: Plan, rank: int, step_ns: int, at_ns: int) -> Plan:
    return _clock(plan, rank, step_ns=step_ns, step_at_ns=at_ns)


# -- the window --------------------------------------------------------------------------------------------------------


def _window_cut(plan: Plan, before_end_ns: int) -> Plan:
    """The profilers of all ranks stop ``before_end_ns`` before the end of the run, within its last step."""

    def shortened(path: Path) -> Sequence[Path]:
        rows = pq.read_table(path, columns=["kind", "rank", "source", "start_ns", "dur_ns"])
        rows = rows.filter(pc.and_(_profiled(rows), pc.equal(rows.column("kind"), "kernel")))
        ends = pa.table({"rank": rows.column("rank"), "end": _ends(rows)}).group_by("rank").aggregate([("end", "max")])
        stops = {r: e - before_end_ns for r, e in zip(*(c.to_pylist() for c in ends.columns), strict=True)}
        return rewritten(lambda kind, rows: _stopped(kind, rows, stops))(path)

    profiled_only = replace(plan.collected, hooks=False)
    return plan.with_(collected=profiled_only, finish=(*plan.finish, shortened)).at(step=plan.steps - 1)


def _stopped(kind: str, rows: pa.Table, stops: Mapping[int, int]) -> pa.Table:
    """Rows that a profiler leaves that stops at a time: calls before it are there, and their kernels if they had ended."""
    if kind == "rank":
        at = rows.schema.get_field_index("window_end_ns")
        columns = (rows.column(name).to_pylist() for name in ("rank", "source", "window_end_ns"))
        ends = [stops.get(r, e) if source == KINETO else e for r, source, e in zip(*columns, strict=True)]
        return rows.set_column(at, rows.schema.field(at), pa.array(ends, pa.int64()))
    if kind not in ("comm_record", "cpu_op", "kernel", "span"):
        return rows
    known = pa.table({"rank": pa.array(list(stops), pa.int32()), "stop": pa.array(list(stops.values()), pa.int64())})
    places = pc.index_in(rows.column("rank"), known.column("rank").combine_chunks())
    stop = known.column("stop").combine_chunks().take(places.combine_chunks())
    late = pc.and_(_profiled(rows), pc.greater(_ends(rows), pa.chunked_array([stop])))
    return rows.filter(pc.invert(pc.fill_null(late, False)))


_RECORDED: Mapping[str, Any] = {**DENSE, "world_size": 8, "grad_reduce_in_bf16": True}
_STAGED: Mapping[str, Any] = {**DENSE, "grad_reduce_in_bf16": True}

FAULTS: tuple[Fault, ...] = (
    Fault(
        "missing_rank",
        "The file of one rank is missing.",
        "data",
        "ranks_missing",
        "the rank is not in the run",
        _RECORDED,
        _missing_rank,
        {"rank": 3},
    ),
    Fault(
        "duplicate_rank",
        "The recording of one rank is there twice.",
        "data",
        "rank_twice",
        "the rank was recorded more than once, and nothing is judged",
        _RECORDED,
        _duplicate_rank,
        {"rank": 3},
    ),
    Fault(
        "lost_events",
        "The profiler's file of one rank ends early, and there are no hooks.",
        "data",
        "lost_events",
        "the rank lost events, and calls that look missing may only be unrecorded",
        _RECORDED,
        _lost_events,
        {"rank": 2, "kept": 0.8},
    ),
    Fault(
        "clock_offset",
        "The clock of one host is ahead of the others.",
        "data",
        "clock_offset",
        "the clock of these ranks is ahead, and is corrected",
        _STAGED,
        _clock_offset,
        {"rank": 8, "offset_ns": 50_000_000},
    ),
    Fault(
        "clock_drift",
        "The clock of one host runs fast.",
        "data",
        "clock_drift",
        "the clock of these ranks runs fast, and is corrected",
        _STAGED,
        _clock_drift,
        {"rank": 8, "drift_ppb": 400_000},
    ),
    Fault(
        "clock_step",
        "The clock of one host is set during the recording.",
        "data",
        "clock_step",
        "the clock of these ranks was set during the recording",
        _STAGED,
        _clock_step,
        {"rank": 8, "step_ns": 20_000_000, "at_ns": 100_000_000},
    ),
    Fault(
        "window_cut",
        "The profilers stop in the middle of a step, and there are no hooks.",
        "data",
        "step_cut",
        "the last step is cut, and is left out of every figure",
        _RECORDED,
        _window_cut,
        {"before_end_ns": 30_000_000},
    ),
)
