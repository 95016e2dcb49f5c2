"""What a device did with its time: every instant of a window is of exactly one of CLASSES, which sum to the window.

Of work whose launch was not recorded it is not known when it was launched: the gap before it counts as idle. The sweep is
intervals.active, one rank and device at a time, linear in events after the sort, exact in integer ns.

Of a rank without device work the host takes the device's place (device null, basis host): compute is an operator that runs on
any of its threads, without those that communicate; communication are its calls by the backend's own ranges (gloo's). The
threads count together, because one waits while another works.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from traceanalyzer.intervals import Ints, active, by_mask, union
from traceanalyzer.run import Run

CLASSES: dict[str, str] = {
    "compute": "a kernel runs that is neither communication nor a copy or memset",
    "communication": "else, if communication of a role other than pp or of an unknown one runs; of several all are named",
    "pp": "else, if only pipeline messages run: their transfer, or the wait for the other stage",
    "copy": "else, if a copy or memset runs",
    "idle": "else, if work was launched that has not started: it waits for other work, or its launch takes time",
    "launch_starved": "else: the host has launched nothing. Without launch times in the recording this is part of idle",
}
"""Class -> when an instant is of it; the first that fits."""

UNKNOWN = "unknown"
"""Stands for the role of communication whose role is not known."""

_ROLE = f"CASE WHEN axis = 'PP' THEN 'pp' ELSE coalesce(role, '{UNKNOWN}') END"
"""Communication by role; pipeline messages on the default group are the pipeline's."""

_COMPUTE, _COPY, _PENDING = range(3)
_BATCH = 1 << 17

_STEPS = """
CREATE OR REPLACE TABLE device_step AS
WITH seen AS (SELECT coalesce(rank, -1) AS rank_key, max(window_end_ns) AS window_end_ns FROM rank GROUP BY ALL),
profiled AS (
  SELECT coalesce(rank, -1) AS rank_key, least(min(window_start_ns), min(host_start_ns)) AS from_ns,
         max(window_end_ns) AS to_ns
  FROM rank WHERE source = 'kineto' GROUP BY ALL
),
within AS (
  SELECT s.rank_key, s.step, s.step_start_ns AS start_ns, s.step_end_ns AS end_ns, p.from_ns, p.to_ns,
         (s.step_end_ns - s.step_start_ns) // 100 AS little_ns
  FROM step_range s JOIN profiled p USING (rank_key) WHERE p.to_ns > s.step_start_ns AND p.from_ns < s.step_end_ns
),
-- the profiler began or stopped within the step, and a hook recorded calls of the part that it did not see
cut AS (
  SELECT DISTINCT w.rank_key, w.step
  FROM within w JOIN comm c ON coalesce(c.rank, -1) = w.rank_key AND c.step = w.step
  WHERE NOT contains(c.source, 'kineto')
    AND (c.t_issue_ns > w.to_ns AND w.end_ns - w.to_ns > w.little_ns
         OR c.t_issue_ns < w.from_ns AND w.from_ns - w.start_ns > w.little_ns)
)
SELECT s.rank_key, s.step, s.step_start_ns AS start_ns,
       CASE WHEN s.step_end_ns < 9223372036854775807 THEN s.step_end_ns
            WHEN w.window_end_ns > s.step_start_ns THEN w.window_end_ns END AS end_ns,
       s.step_end_ns < 9223372036854775807 AS end_recorded, s.step_evidence,
       s.step_complete AND c.step IS NULL AS step_complete,
       s.rank_key NOT IN (SELECT rank_key FROM profiled) OR p.step IS NOT NULL AS profiled
FROM step_range s LEFT JOIN seen w USING (rank_key)
LEFT JOIN within p ON p.rank_key = s.rank_key AND p.step = s.step
LEFT JOIN cut c ON c.rank_key = s.rank_key AND c.step = s.step
"""


class Window(NamedTuple):
    """A stretch of time of one rank, [start_ns, end_ns), under a number of the caller's."""

    number: int
    start_ns: int
    end_ns: int


DEVICE, HOST = "device", "host"
"""What the classes of a rank rest on: activities of its device, or operators and calls on its host."""

_HOSTS = f"""
WITH busy AS (SELECT DISTINCT coalesce(rank, -1) AS rank_key FROM kernel_place WHERE start_ns IS NOT NULL AND dur_ns > 0)
SELECT rank_key, what, start_ns, end_ns FROM (
  SELECT coalesce(rank, -1)::INTEGER AS rank_key, '+compute' AS what, start_ns, start_ns + dur_ns AS end_ns FROM cpu_op
  WHERE start_ns IS NOT NULL AND dur_ns > 0 AND coalesce(category, 'cpu_op') = 'cpu_op'
    AND regexp_matches(name, '^[a-z_0-9]+::')
    AND NOT regexp_matches(name, '^(?:autograd|c10d|_c10d_functional|c10d_functional)::')
  UNION ALL
  SELECT coalesce(rank, -1)::INTEGER, {_ROLE}, start_ns, end_ns FROM comm
  WHERE time_source = 'backend_range' AND start_ns IS NOT NULL AND dur_ns > 0
) ANTI JOIN busy USING (rank_key) ORDER BY rank_key
"""


def _hosts(run: Run) -> Iterator[tuple[int, int | None, dict[str, Any]]]:
    """The same of the hosts of ranks without device work."""
    table = run.arrow(_HOSTS)
    keys = table["rank_key"].to_numpy()
    cuts = (np.flatnonzero(np.diff(keys)) + 1).tolist()
    for low, high in pairwise([0, *cuts, len(keys)] if len(keys) else [0]):
        part = table.slice(low, high - low)
        words = part["what"].combine_chunks().dictionary_encode()
        found: dict[str, Any] = {n: part[n].to_numpy() for n in ("start_ns", "end_ns")}
        found["launch_ns"] = np.zeros(high - low, np.int64)
        found["what"], found["names"] = words.indices.to_numpy().astype(np.int64), words.dictionary.to_pylist()
        yield int(keys[low]), None, found


def _devices(run: Run) -> Iterator[tuple[int, int | None, dict[str, Any]]]:
    """Each rank and device with the arrays what, start, end and launch (0: unknown) of its activities."""
    reader = run.sql(
        f"""SELECT coalesce(rank, -1)::INTEGER AS rank_key, device, coalesce(device, -1)::INTEGER AS device_key,
                   CASE WHEN kernel_class = 'comm' THEN {_ROLE}
                        WHEN kernel_class IN ('copy', 'memset') THEN '+copy' ELSE '+compute' END AS what,
                   start_ns, start_ns + dur_ns AS end_ns, coalesce(launch_ns, 0) AS launch_ns
            FROM kernel_place WHERE start_ns IS NOT NULL AND dur_ns > 0 ORDER BY rank_key, device_key"""
    ).to_arrow_reader(_BATCH)
    names: dict[str, int] = {}
    pieces: list[pa.RecordBatch] = []
    last: tuple[int, int] | None = None

    def arrays() -> tuple[int, int | None, dict[str, Any]]:
        table = pa.Table.from_batches(pieces)
        words = table["what"].combine_chunks().dictionary_encode()
        codes = np.array([names.setdefault(w, len(names)) for w in words.dictionary.to_pylist()], np.int64)
        found = {n: table[n].to_numpy() for n in ("start_ns", "end_ns", "launch_ns")}
        found["what"], found["names"] = codes[words.indices.to_numpy()], list(names)
        return table["rank_key"][0].as_py(), table["device"][0].as_py(), found

    for batch in reader:
        ranks, devices = batch["rank_key"].to_numpy(), batch["device_key"].to_numpy()
        cuts = np.flatnonzero((np.diff(ranks) != 0) | (np.diff(devices) != 0)) + 1
        for low, high in zip([0, *cuts.tolist()], [*cuts.tolist(), len(ranks)], strict=True):
            key = (int(ranks[low]), int(devices[low])) if high > low else last
            if last is not None and key != last:
                yield arrays()
                pieces.clear()
            last = key
            pieces.append(batch.slice(low, high - low))
    if pieces:
        yield arrays()


def _pending(start: Ints, end: Ints, launch: Ints) -> tuple[Ints, Ints]:
    """When launched work waits for its start. Of unknown launches: since the work before it ended."""
    order = np.argsort(start, kind="stable")
    start, end, launch = start[order], end[order], launch[order]
    reach = np.concatenate([[np.iinfo(np.int64).min], np.maximum.accumulate(end)[:-1]])
    return np.where(launch != 0, launch, reach), start


Parts = Mapping[tuple[int, str], list[tuple[int, int, int]]]
"""(rank_key, role) -> calls of known waiting: start, from when on data moves, end."""

WAITING, TRANSFER = "waiting", "transfer"


def parts_of_calls(run: Run) -> Parts:
    """What of each matched call is waiting and, after it, what is transfer (tables matched_member and arrival)."""
    found: dict[tuple[int, str], list[tuple[int, int, int]]] = {}
    for rank, role, *times in run.tuples(
        f"""SELECT m.rank, {_ROLE}, m.start_ns, m.start_ns + a.waiting_ns, m.end_ns
            FROM matched_member m
            JOIN arrival a ON a.match_id = m.match_id AND a.rank = m.rank
            JOIN comm c ON c.rank = m.rank AND c.call_id = m.call_id
            WHERE a.waiting_ns IS NOT NULL AND m.start_ns IS NOT NULL AND m.end_ns IS NOT NULL"""
    ):
        found.setdefault((rank, role), []).append((times[0], times[1], times[2]))
    return found


def of_windows(run: Run, windows: Mapping[int, Iterable[Window]], parts: Parts | None = None) -> pa.Table:
    """Time by class in windows of ranks (rank_key -> windows) on each of the rank's devices that did anything.

    Needs the table kernel_place. Columns: rank_key, device, number, class, roles (of the communication that runs, sorted;
    under compute the overlapped one; null for none), part, dur_ns, launches_known, basis (device, host). part: where one role
    alone is exposed, transfer or waiting by ``parts`` (transfer if calls of it do both); null where that is not known. The
    rows of one rank, device and window sum to the window.
    """
    rows: list[tuple[Any, ...]] = []
    sources = chain(((DEVICE, *d) for d in _devices(run)), ((HOST, *h) for h in _hosts(run)))
    for basis, rank_key, device, found in sources:
        mine = list(windows.get(rank_key, ()))
        if not mine:
            continue
        known = bool((found["launch_ns"] != 0).any())
        words = [found["names"][i] for i in np.unique(found["what"]).tolist()]
        roles = sorted(w for w in words if not w.startswith("+"))

        def of(word: str, found: dict[str, Any] = found) -> tuple[Ints, Ints]:
            code = found["names"].index(word) if word in found["names"] else -1
            here = found["what"] == code
            return found["start_ns"][here], found["end_ns"][here]

        pending = _pending(found["start_ns"], found["end_ns"], found["launch_ns"])
        calls = [np.array((parts or {}).get((rank_key, role)) or np.empty((0, 3)), np.int64) for role in roles]
        waiting, moving = [(c[:, 0], c[:, 1]) for c in calls], [(c[:, 1], c[:, 2]) for c in calls]
        stretches = active([of("+compute"), of("+copy"), pending, *map(of, roles), *waiting, *moving])
        for window in mine:
            sums: dict[tuple[str, tuple[str, ...], str], int] = {}
            for mask, held in by_mask(*stretches, window.start_ns, window.end_ns).items():
                key = _class_of(mask, roles, known)
                sums[key] = sums.get(key, 0) + held
            rows += ((rank_key, device, window.number, *key, held, known, basis) for key, held in sorted(sums.items()))
    return pa.table(
        {
            "rank_key": pa.array([r[0] for r in rows], pa.int32()),
            "device": pa.array([r[1] for r in rows], pa.int32()),
            "number": pa.array([r[2] for r in rows], pa.int64()),
            "class": pa.array([r[3] for r in rows], pa.string()),
            "roles": pa.array([list(r[4]) or None for r in rows], pa.list_(pa.string())),
            "part": pa.array([r[5] or None for r in rows], pa.string()),
            "dur_ns": pa.array([r[6] for r in rows], pa.int64()),
            "launches_known": pa.array([r[7] for r in rows], pa.bool_()),
            "basis": pa.array([r[8] for r in rows], pa.string()),
        }
    )


def exposed(run: Run) -> Iterator[tuple[int, int | None, str, Ints, Ints]]:
    """When communication runs and no compute does: rank_key, device (None: by the host), role, starts and ends.

    One item for each role of each rank and device that communicates; the stretches are disjoint and in time order, and those
    of several roles overlap where they run together. Needs the table kernel_place.
    """
    for rank_key, device, found in chain(_devices(run), _hosts(run)):
        words = [found["names"][i] for i in np.unique(found["what"]).tolist()]
        roles = sorted(w for w in words if not w.startswith("+"))
        groups = []
        for word in ("+compute", *roles):
            here = found["what"] == (found["names"].index(word) if word in found["names"] else -1)
            groups.append((found["start_ns"][here], found["end_ns"][here]))
        start, end, mask = active(groups)
        for i, role in enumerate(roles):
            alone = (mask >> (i + 1) & 1 == 1) & (mask & 1 == 0)
            yield rank_key, device, role, *union(start[alone], end[alone])


def _class_of(mask: int, roles: list[str], launches_known: bool) -> tuple[str, tuple[str, ...], str]:
    """Class, roles and part ("": not known) of a stretch by who is active in it."""
    running = [i for i in range(len(roles)) if mask >> (i + 3) & 1]
    named = tuple(roles[i] for i in running)
    if mask >> _COMPUTE & 1:
        return "compute", named, ""
    if len(running) == 1:
        waits, moves = (mask >> (running[0] + 3 + n * len(roles)) & 1 for n in (1, 2))
        return ("pp" if named == ("pp",) else "communication"), named, TRANSFER if moves else WAITING if waits else ""
    if running:
        return "communication", named, ""
    if mask >> _COPY & 1:
        return "copy", (), ""
    return ("idle" if mask >> _PENDING & 1 or not launches_known else "launch_starved"), (), ""


def steps_with_ends(run: Run) -> None:
    """Makes the table device_step: step_range with the recording's end for a step that nothing ends; null: unknown.

    step_complete: also false where the profiler saw a part of the step alone. profiled: false for a step that only hooks
    recorded on a rank that ran the profiler at other times: how its time was spent is unknown.
    """
    run.connection.execute(_STEPS)


def of_steps(run: Run, parts: Parts | None = None) -> pa.Table:
    """Time by class in every step of every rank (tables kernel_place and device_step): of_windows, and the step's own facts.

    Columns: rank, device, step, start_ns, end_ns, step_evidence, step_complete, class, roles, part, dur_ns, launches_known,
    basis.
    """
    steps = run.tuples(
        """SELECT rank_key, step, start_ns, end_ns, step_evidence, step_complete FROM device_step
           WHERE end_ns IS NOT NULL AND profiled ORDER BY rank_key, start_ns"""
    )
    windows: dict[int, list[Window]] = {}
    for number, (rank_key, _, start, end, *_rest) in enumerate(steps):
        windows.setdefault(rank_key, []).append(Window(number, start, end))
    run.table("step_class", of_windows(run, windows, parts))
    facts = ("rank_key", "step", "start_ns", "end_ns", "step_evidence", "step_complete")
    types = (pa.int32(), pa.int64(), pa.int64(), pa.int64(), pa.string(), pa.bool_())
    run.table(
        "numbered_step",
        pa.table(
            {"number": pa.array(range(len(steps)), pa.int64())}
            | {
                name: pa.array([s[i] for s in steps], kind)
                for i, (name, kind) in enumerate(zip(facts, types, strict=True))
            }
        ),
    )
    return run.arrow(
        """SELECT CASE WHEN c.rank_key >= 0 THEN c.rank_key END AS rank, c.device, s.step, s.start_ns, s.end_ns,
                  s.step_evidence, s.step_complete, c.class, c.roles, c.part, c.dur_ns, c.launches_known,
                  c.basis
           FROM step_class c JOIN numbered_step s USING (number)"""
    )
