"""Holistic Trace Analysis over a run: HTA's own objects, made from rows instead of JSON (Run.to_hta).

The frames are those that HTA's parser makes (HolisticTraceAnalysis 0.5, hta/common/trace.py and trace_parser.py): one row per
complete event, ``ts`` and ``dur`` in microseconds, text as numbers of one symbol table, -1 where an event lacks a value.
Alignment and the choice of steps are HTA's own code, called on them. What differs from a parse of the JSON:

- ``index`` numbers the rows of a rank by start from 1, not the events of the file; HTA takes 0 for "no such row".
- ``iteration`` comes from the host's ProfilerStep ranges. HTA's parser also takes the device's, which lie later.
- cuda_sync events have no stream and no event to wait on, because the run does not hold either: HTA's critical path
  lacks their edges, and its idle time does not count them as work.
- ``input_type``, ``input_strides`` and the links from forward to backward operators are missing.
- Spellings of 2020 to 2022 (Kernel, Memcpy, Runtime, Operator) are today's.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

from traceanalyzer.errors import InputError
from traceanalyzer.run import Run

if TYPE_CHECKING:
    import pandas

_ROWS = """
SELECT * FROM (
  SELECT category AS cat, name, pid, tid, start_ns, dur_ns, NULL AS stream, correlation, NULL AS bytes, external_id, in_dims
  FROM cpu_op WHERE source = 'kineto' AND rank IS NOT DISTINCT FROM $rank
  UNION ALL
  SELECT category, name, pid, tid, start_ns, dur_ns, NULL, NULL, NULL, external_id, NULL
  FROM span WHERE source = 'kineto' AND rank IS NOT DISTINCT FROM $rank
    AND category NOT IN ('trace', 'instant', 'cpu_instant_event')  -- marks have no duration, and HTA drops them
  UNION ALL
  SELECT category, name, device, stream, start_ns, dur_ns, stream, correlation, copy_bytes, external_id, NULL
  FROM kernel WHERE source = 'kineto' AND rank IS NOT DISTINCT FROM $rank
) WHERE start_ns IS NOT NULL AND dur_ns IS NOT NULL AND cat IS NOT NULL AND name IS NOT NULL
ORDER BY start_ns, dur_ns DESC, cat, name
"""


def _part(name: str) -> Any:
    """A module of HTA. Raises InputError without HTA."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            f"Holistic Trace Analysis cannot be imported ({error}). Install it: pip install 'traceanalyzer[hta]'"
        ) from error


def of_run(run: Run, *, include_last_profiler_step: bool, whole_microseconds: bool) -> Any:
    """A ``hta.trace_analysis.TraceAnalysis`` of the run's ranks; see Run.to_hta."""
    analysis_part, trace_part = _part("hta.trace_analysis"), _part("hta.common.trace")
    ranks = run.tuples(
        "SELECT rank, world_size, device, device_name FROM rank WHERE source = 'kineto' ORDER BY rank NULLS FIRST"
    )
    first = run.value(
        """SELECT min(start_ns) FROM (SELECT min(start_ns) AS start_ns FROM cpu_op WHERE source = 'kineto'
           UNION ALL SELECT min(start_ns) FROM span WHERE source = 'kineto'
           UNION ALL SELECT min(start_ns) FROM kernel WHERE source = 'kineto')"""
    )
    if not ranks or first is None:
        raise InputError(
            f"{run.source} holds no rows of a profiler trace, which is what HTA analyses. Import the job's Kineto traces."
        )
    base = first - first % 1_000_000_000  # whole seconds: HTA's rounding sees the same fractions as in the file
    trace = trace_part.Trace(trace_files={}, trace_dir="")
    for rank, world_size, device, device_name in ranks:
        number = 0 if rank is None else rank
        trace.traces[number] = _frame(run, rank, base, trace, trace_part, whole_microseconds)
        trace.meta_data[number] = {
            "schemaVersion": 1,
            "distributedInfo": {"rank": number} | ({} if world_size is None else {"world_size": world_size}),
            "deviceProperties": [] if device_name is None else [{"id": device, "name": device_name}],
            "baseTimeNanoseconds": base,
        }
    trace.align_and_filter_trace(include_last_profiler_step)
    for number, frame in trace.traces.items():
        trace.traces[number] = frame.set_index(frame["index"].rename(None), drop=False)
    trace.is_parsed = True
    # The class's own constructor parses files.
    analysis = analysis_part.TraceAnalysis.__new__(analysis_part.TraceAnalysis)
    analysis.t = trace
    return analysis


def _frame(
    run: Run, rank: int | None, base: int, trace: Any, trace_part: Any, whole_microseconds: bool
) -> pandas.DataFrame:
    """One rank's rows as HTA's parser leaves them; adds their names and categories to the trace's symbols."""
    import pandas as pd

    relation = run.connection.sql(_ROWS, params={"rank": rank})
    rows = relation.to_arrow_table()
    n = rows.num_rows
    start, dur = rows["start_ns"].to_numpy() - base, rows["dur_ns"].to_numpy()
    whole = not ((start % 1000).any() or (dur % 1000).any())
    if whole or whole_microseconds:  # HTA rounds a start up and an end down, so that neighbours do not overlap
        ts = -(-start // 1000)
        length = (start + dur) // 1000 - ts
    else:
        ts, length = start / 1000, dur / 1000

    def numbers(name: str) -> Any:
        return rows[name].cast("int64", safe=False).fill_null(-1).to_numpy()

    columns: dict[str, Any] = {"index": np.arange(1, n + 1)}
    for name in ("cat", "name"):
        words = rows[name].combine_chunks().dictionary_encode()
        symbols = words.dictionary.to_pylist()
        trace.symbol_table.add_symbols(symbols)
        ids = trace.symbol_table.get_sym_id_map()
        columns[name] = np.array([ids[s] for s in symbols], np.int64)[words.indices.to_numpy()]
    columns |= {"pid": numbers("pid"), "tid": numbers("tid"), "ts": ts, "dur": length}
    columns |= {"stream": numbers("stream"), "correlation": numbers("correlation"), "bytes": numbers("bytes")}
    moved = (columns["bytes"] > 0) & (dur > 0)
    columns["memory_bw_gbps"] = np.where(moved, columns["bytes"] / np.where(moved, dur, 1), 0.0)  # bytes per ns
    columns |= {"wait_on_stream": np.full(n, -1), "wait_on_cuda_event_record_corr_id": np.full(n, -1)}
    columns["input_dims"] = rows["in_dims"].fill_null("-1").to_pandas()
    columns["external_id"] = numbers("external_id")
    # HTA finds rows by their label, which must be their number.
    labelled = pd.DataFrame(columns, index=pd.Index(columns["index"]))
    frame = trace_part.transform_correlation_to_index(labelled, trace.symbol_table)
    frame["iteration"] = _iterations(frame, trace.symbol_table)
    frame["end"] = frame["ts"] + frame["dur"]
    return frame  # type: ignore[no-any-return]


def _iterations(frame: pandas.DataFrame, symbols: Any) -> Any:
    """Number of the host's ProfilerStep range in which an event, or the launch of a device's work, starts; -1: in none."""
    ids = symbols.get_sym_id_map()
    steps = {i: int(s.split("#")[1].split()[0]) for s, i in ids.items() if s.startswith("ProfilerStep#")}
    host = frame["cat"].eq(ids.get("user_annotation", -1)) & frame["name"].isin(steps)
    marks = frame.loc[host, ["ts", "dur", "name"]].sort_values("ts", kind="stable")
    ts = frame["ts"].to_numpy()
    found = np.full(len(frame), -1, np.int64)
    if len(marks):
        begin, numbers = marks["ts"].to_numpy(), marks["name"].map(steps).to_numpy()
        at = np.searchsorted(begin, ts, side="right") - 1
        inside = (at >= 0) & (ts < (begin + marks["dur"].to_numpy())[at])
        found[inside] = numbers[at[inside]]
    device = frame["stream"].to_numpy() >= 0
    launch = frame["index_correlation"].to_numpy()
    launched = device & (launch > 0)
    host_steps = found.copy()
    found[device] = -1
    found[launched] = host_steps[launch[launched] - 1]  # rows are numbered from 1 in their order
    return found
