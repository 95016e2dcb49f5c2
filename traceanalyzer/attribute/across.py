"""One call as all its ranks saw it: matching over ranks, clocks, arrivals and lateness, as small tables of a run.

============== ========================================================================================
table          a row is
============== ========================================================================================
matched_call   one call over all ranks that recorded it
matched_member one rank's part in it, with its time
unmatched_call a call that no other rank's call was matched to, and why
clock          the clock of one rank against the reference rank of those it is connected to
arrival        when one rank came to one call, by aligned clocks, and what of its time is transfer
lateness       how much later than the first it came, what of that is its own, and who owns the rest
============== ========================================================================================

Calls are matched by Comms Id, else by the group's sequence number; where neither was recorded, by order, and only where
all ranks of a group recorded the same calls in the same order (of the whole recording, else of the step). Clocks come from
calls that complete together on all ranks; sends, broadcasts and reduces do not (clocks.py). Lateness: lateness.py. All of it
is sorts and array arithmetic, linear in the calls but for the sorts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from traceanalyzer.attribute import clocks, lateness
from traceanalyzer.attribute.clocks import Clocks, Ends, Ints
from traceanalyzer.attribute.lateness import Arrivals
from traceanalyzer.run import Run

pc: Any = pyarrow.compute  # its functions are made when it is imported: no type checker sees them

TOGETHER: frozenset[str] = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Operations that no rank can complete before the last one has come."""

_TIMED = ("kernel", "backend_range")

COLUMNS: dict[str, dict[str, tuple[pa.DataType, str]]] = {
    "matched_call": {
        "match_id": (pa.int64(), "Number of the matched call in this run."),
        "evidence": (pa.string(), "comms_id, seq (group and sequence number), order (an inference)."),
        "op": (pa.string(), "Operation; send for a send and its recv."),
        "role": (pa.string(), "Role of the group; null where it is not known, or the ranks disagree."),
        "step": (pa.int64(), "Step on the lowest rank, of a message on the sender; null: outside every step."),
        "dtype": (pa.string(), "Element type."),
        "group_size": (pa.int32(), "Ranks that take part; null: not recorded."),
        "payload_bytes": (pa.int64(), "Payload, the largest of the ranks'; null: not known."),
        "first_rank": (pa.int32(), "Lowest rank that recorded it."),
        "sender_rank": (pa.int32(), "Rank that sends a message; null: no message."),
        "members": (pa.int32(), "Ranks that recorded it."),
        "timed": (pa.int32(), "Ranks that recorded its time."),
        "complete": (pa.bool_(), "Whether all ranks of the group recorded it with its time."),
        "member_ranks": (pa.list_(pa.int32()), "Ranks that recorded it, ascending."),
        "shared": (pa.bool_(), "Whether its time is also that of other calls that were launched as one with it."),
        "hosts": (pa.int32(), "Hosts of its ranks; null where one is not known."),
    },
    "matched_member": {
        "match_id": (pa.int64(), "The call."),
        "rank": (pa.int32(), "Global rank."),
        "call_id": (pa.int64(), "Number of the call on the rank."),
        "start_ns": (pa.int64(), "Start of its work as recorded; null: no time."),
        "end_ns": (pa.int64(), "End of its work as recorded; null: no time."),
    },
    "unmatched_call": {
        "rank": (pa.int32(), "Global rank."),
        "call_id": (pa.int64(), "Number of the call on the rank."),
        "reason": (pa.string(), "Why it has no counterpart."),
    },
    "clock": {
        "rank": (pa.int32(), "Global rank."),
        "host": (pa.string(), "Its host; null: not recorded."),
        "reference_rank": (
            pa.int32(),
            (
                "The rank whose clock is taken as right: the lowest that is connected by calls or a shared host. Clocks of "
                "different references cannot be compared."
            ),
        ),
        "base_ns": (pa.int64(), "The time at which offset_ns holds, by the reference's clock."),
        "since_ns": (
            pa.int64(),
            "From when on the figures hold, by this clock: it was set then. Null: from the beginning.",
        ),
        "offset_ns": (pa.int64(), "How far this clock is ahead of the reference at base_ns."),
        "drift_ppb": (pa.float64(), "How much faster it runs, in 1e-9; null: too few calls, taken as 0."),
        "calls": (pa.int64(), "Calls the figures rest on."),
        "residual_median_ns": (pa.int64(), "Median of what is left at this rank's ends; null: nothing to take it of."),
        "residual_p95_ns": (pa.int64(), "95th percentile of it."),
        "residual_max_ns": (pa.int64(), "The largest."),
        "open_ns": (
            pa.int64(),
            (
                "What the clocks leave open between this rank and others: the largest, over the sets of ranks it makes calls "
                "with, of the 95th percentile of how far apart these end by aligned clocks; not less than 50 us where a "
                "host's clock alone connects it to others. Null: neither."
            ),
        ),
        "evidence": (
            pa.string(),
            "calls (that complete together), host (no call, but others of its host show the same clock), recorded (neither).",
        ),
    },
    "end_spread": {
        "match_id": (pa.int64(), "A call that completes together."),
        "recorded_ns": (pa.int64(), "From the first end to the last, clocks as recorded."),
        "aligned_ns": (pa.int64(), "The same by aligned clocks."),
    },
    "arrival": {
        "match_id": (pa.int64(), "The call."),
        "rank": (pa.int32(), "Global rank."),
        "arrival_ns": (pa.int64(), "Start of its work by the reference's clock."),
        "end_ns": (pa.int64(), "End of it by the reference's clock."),
        "dur_ns": (pa.int64(), "Its duration as recorded."),
        "after_first_ns": (pa.int64(), "How much later than the first rank it came."),
        "last": (pa.bool_(), "Whether it came last; of several the lowest rank."),
        "transfer_ns": (pa.int64(), "Duration on the last rank to come; null: not all ranks were recorded."),
        "waiting_ns": (pa.int64(), "dur_ns beyond the transfer, not below 0; null: likewise."),
        "residual_ns": (pa.int64(), "What the clocks leave open between ranks: smaller differences mean nothing."),
    },
    "lateness": {
        "match_id": (pa.int64(), "The call."),
        "rank": (pa.int32(), "Global rank."),
        "late_ns": (pa.int64(), "How much later than the first rank it came."),
        "own_ns": (
            pa.int64(),
            "Part that arose on the rank itself since its previous call with others ended; null: no earlier call.",
        ),
        "inherited_ns": (pa.int64(), "Part it brought along: that earlier call ended later for it than for the first."),
        "owner_rank": (
            pa.int32(),
            "The rank that the larger part leads back to, through earlier calls; null: the chain leaves the recording.",
        ),
        "owner_match_id": (pa.int64(), "The call in which the owner was late by itself."),
        "chain": (pa.int32(), "Earlier calls it was followed through."),
        "outside": (pa.bool_(), "Whether the chain leaves the recorded ranks or the recording."),
    },
}
"""Columns of every table: type and meaning. Times are ns."""


def make(run: Run) -> None:
    """Makes all tables. Needs an attached run."""
    calls, unmatched = _calls(run)
    match, reasons = _matched(calls)
    hosts = dict(run.tuples("SELECT rank, any_value(host) FROM rank WHERE rank IS NOT NULL GROUP BY rank"))
    _write(run, "matched_call", _match_table(run, calls, match, hosts))
    row = np.flatnonzero(match >= 0)
    row = row[np.lexsort((calls.rank[row], calls.side[row], match[row]))]
    times = {n: pa.array(t[row], mask=~calls.timed[row]) for n, t in (("start_ns", calls.start), ("end_ns", calls.end))}
    _write(
        run,
        "matched_member",
        pa.table({"match_id": match[row], "rank": calls.rank[row], "call_id": calls.call_id[row], **times}),
    )
    left = pa.concat_tables([unmatched, _reason_table(calls, reasons).cast(unmatched.schema)])
    _write(run, "unmatched_call", left.sort_by([("rank", "ascending"), ("call_id", "ascending")]))

    row = row[calls.timed[row]]
    together = row[np.isin(calls.op[row], [i for i, op in enumerate(calls.ops) if op in TOGETHER])]
    several = together[np.bincount(match[together], minlength=1)[match[together]] > 1]
    ends = Ends(match[several], calls.rank[several], calls.end[several])
    found = Clocks(np.unique(calls.rank).tolist(), ends, hosts)
    _write_rows(run, "clock", clocks.rows(found, hosts))
    _write(run, "end_spread", clocks.spreads(found, ends))
    arrivals = Arrivals.of(
        match[row], calls.rank[row], calls.start[row], calls.end[row], _sizes(calls, match)[match[row]], found
    )
    _write(run, "arrival", arrivals.table())
    seen = np.zeros(len(match), bool)
    seen[row[np.isin(match[row], arrivals.match)]] = True
    alone = np.flatnonzero(calls.timed & ~seen)
    _write(
        run,
        "lateness",
        lateness.of_arrivals(
            arrivals,
            calls.rank[alone],
            found.aligned(calls.rank[alone], calls.start[alone]),
            found.aligned(calls.rank[alone], calls.end[alone]),
        ),
    )
    run.connection.execute("DROP TABLE seen_call")


def _write(run: Run, name: str, found: pa.Table) -> None:
    run.table(name, pa.table({c: found[c].cast(dtype) for c, (dtype, _) in COLUMNS[name].items()}))


def _write_rows(run: Run, name: str, rows: Sequence[tuple[Any, ...]]) -> None:
    columns = COLUMNS[name]
    run.table(
        name,
        pa.table({c: pa.array([r[i] for r in rows], dtype) for i, (c, (dtype, _)) in enumerate(columns.items())}),
    )


# -- calls ---------------------------------------------------------------------------------------------------------------


class _Calls(NamedTuple):
    """Calls as arrays, ordered by rank and number; what is null there is -1 here, and a time without ``timed`` is 0.

    usable: whether the call can be matched at all. group: what its group is called on every rank. what: op, dtype and
    payload together (of a message without the op). key: its number, by Comms Id or sequence, -1: none. side: 0 of a send or
    a collective, 1 of a recv.
    """

    rank: Ints
    call_id: Ints
    usable: npt.NDArray[np.bool_]
    op: Ints
    ops: list[str]
    group: Ints
    by_comms_id: npt.NDArray[np.bool_]
    key: Ints
    size: Ints
    peer: Ints
    step: Ints
    what: Ints
    side: Ints
    shared: npt.NDArray[np.bool_]
    timed: npt.NDArray[np.bool_]
    start: Ints
    end: Ints
    at: Ints


_SEEN = f"""
CREATE OR REPLACE TEMP TABLE seen_call AS
WITH lone AS (  -- a call that names no group is on the rank's only one of its role
  SELECT rank, role, min(group_id) AS own_group, min(len(ranks))::INTEGER AS own_size FROM process_group
  WHERE rank IS NOT NULL AND role IS NOT NULL GROUP BY ALL HAVING count(DISTINCT group_id) = 1
)
SELECT c.rank, call_id, op, seq, comms_id, coalesce(group_id, own_group) AS group_id,
       coalesce(group_size, CASE WHEN group_id IS NULL THEN own_size END) AS group_size, peer, step, c.role, dtype,
       payload_bytes, coalesce_id,
       CASE WHEN time_source IN {_TIMED} THEN start_ns END AS start_ns,
       CASE WHEN time_source IN {_TIMED} THEN end_ns END AS end_ns, coalesce(t_issue_ns, start_ns) AS at_ns
FROM comm c LEFT JOIN lone l ON c.group_id IS NULL AND l.rank = c.rank AND l.role = c.role
WHERE c.rank IS NOT NULL AND coalesce(group_size, CASE WHEN group_id IS NULL THEN own_size END, 2) > 1
"""
_GROUPS = """
CREATE OR REPLACE TEMP TABLE call_group AS
WITH groups AS (
  SELECT rank, group_id, any_value(ranks) AS ranks FROM process_group WHERE rank IS NOT NULL GROUP BY ALL
),
named AS (  -- a name that stands for several groups, as where ranks count their own: the ranks tell them apart
  SELECT group_id, count(DISTINCT ranks) > 1 AS ambiguous FROM groups WHERE NOT starts_with(group_id, 'ptr:') GROUP BY ALL
),
twins AS (  -- groups of one rank that have the same members: an address alone cannot tell them apart
  SELECT rank, ranks, count(*) AS alike FROM groups WHERE starts_with(group_id, 'ptr:') AND ranks IS NOT NULL GROUP BY ALL
),
called AS (
  SELECT c.rank, c.group_id, g.ranks, coalesce(n.ambiguous, false) AS ambiguous, starts_with(c.group_id, 'ptr:') AS address,
         coalesce(t.alike, 1) AS alike
  FROM (SELECT DISTINCT rank, group_id FROM seen_call) c
  LEFT JOIN groups g ON g.rank = c.rank AND g.group_id = c.group_id
  LEFT JOIN named n ON n.group_id = c.group_id
  LEFT JOIN twins t ON t.rank = c.rank AND t.ranks = g.ranks
)
SELECT rank, group_id, len(ranks) AS size,
       dense_rank() OVER (ORDER BY CASE WHEN group_id IS NULL THEN 'no name'
                                        WHEN address THEN 'ranks ' || coalesce(ranks, [])::VARCHAR
                                        WHEN ambiguous THEN group_id || ' of ranks ' || coalesce(ranks, [])::VARCHAR
                                        ELSE 'name ' || group_id END) AS code,
       CASE WHEN address AND ranks IS NULL THEN 'the group is an address without ranks'
            WHEN address AND alike > 1 THEN 'the group is an address beside others of the same ranks' END AS address_reason,
       CASE WHEN group_id IS NULL THEN 'its group is not named'
            WHEN ambiguous AND ranks IS NULL
              THEN 'the name of its group stands for several, and its ranks are not known' END AS name_reason
FROM called
"""
_ORDERED = """
SELECT c.rank::BIGINT AS rank, c.call_id, g.code AS group_code, c.comms_id IS NOT NULL AS by_comms_id,
       coalesce(c.comms_id, 0) AS comms_id, c.seq IS NOT NULL AS numbered, coalesce(c.seq, -1) AS seq,
       coalesce(c.group_size, g.size, -1)::BIGINT AS size, coalesce(c.peer, -1)::BIGINT AS peer, coalesce(c.step, -1) AS step,
       coalesce(o.code, -1) AS op, t.code AS type, coalesce(c.payload_bytes, -1) AS payload,
       coalesce(c.coalesce_id, -1) AS coalesced, c.start_ns IS NOT NULL AND c.end_ns IS NOT NULL AS timed,
       coalesce(c.start_ns, 0) AS start_ns, coalesce(c.end_ns, 0) AS end_ns, coalesce(c.at_ns, 0) AS at_ns,
       CASE WHEN c.op IS NULL THEN 'its operation is not known'
            WHEN c.at_ns IS NULL THEN 'it has no time'
            ELSE coalesce(g.address_reason, CASE WHEN c.comms_id IS NULL THEN g.name_reason END) END AS reason
FROM seen_call c
JOIN call_group g ON g.rank = c.rank AND g.group_id IS NOT DISTINCT FROM c.group_id
LEFT JOIN op_code o ON o.name = c.op
JOIN type_code t ON t.name IS NOT DISTINCT FROM c.dtype
ORDER BY c.rank, c.call_id
"""


def _calls(run: Run) -> tuple[_Calls, pa.Table]:
    """All calls of groups of several ranks, and those that cannot be matched, with the reason."""
    run.connection.execute(_SEEN)
    run.connection.execute(_GROUPS)
    for name in ("op", "dtype"):
        run.connection.execute(
            f"""CREATE OR REPLACE TEMP TABLE {"op" if name == "op" else "type"}_code AS
                SELECT name, row_number() OVER (ORDER BY name) - 1 AS code
                FROM (SELECT DISTINCT {name} AS name FROM seen_call {"WHERE op IS NOT NULL" if name == "op" else ""})"""
        )
    ops = [op for (op,) in run.tuples("SELECT name FROM op_code ORDER BY code")]
    found = run.arrow(_ORDERED)
    for name in ("call_group", "op_code", "type_code"):
        run.connection.execute(f"DROP TABLE {name}")
    unmatched = found.select(["rank", "call_id", "reason"]).filter(pc.is_valid(found["reason"]))
    usable = pc.is_null(found["reason"]).to_numpy()
    column = {name: found[name].to_numpy() for name in found.column_names if name != "reason"}
    del found
    by_comms_id, op = column["by_comms_id"], column["op"]
    side = (op == ops.index("recv")).astype(np.int64) if "recv" in ops else np.zeros(len(op), np.int64)
    group = np.where(by_comms_id, 0, column["group_code"])
    key = _dense(column["comms_id"], group, np.where(by_comms_id, 0, column["seq"]))
    message = np.isin(op, [i for i, name in enumerate(ops) if name in ("send", "recv")])
    numbered = column["numbered"] & ~_apart(column, message)
    what = np.full(len(op), -1, np.int64)
    by_order = np.flatnonzero(message | ~(by_comms_id | numbered))
    # ranks hand different numbers of rows to one all-to-all
    alike = np.where(np.isin(op, [i for i, name in enumerate(ops) if name == "all_to_all"]), -1, column["payload"])
    what[by_order] = _dense(np.where(message, -1, op)[by_order], column["type"][by_order], alike[by_order])
    coalesced = _dense(column["rank"], column["coalesced"])
    return (
        _Calls(
            column["rank"], column["call_id"], usable, op, ops, column["group_code"], by_comms_id,
            np.where(by_comms_id | numbered, key, -1), column["size"], column["peer"], column["step"], what, side,
            (column["coalesced"] >= 0) & (np.bincount(coalesced)[coalesced] > 1 if len(coalesced) else False),
            column["timed"], column["start_ns"], column["end_ns"], column["at_ns"],
        ),
        unmatched,
    )  # fmt: skip


def _apart(column: Mapping[str, Any], message: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Collectives whose group's ranks count apart: batches of messages are counted among them by some releases of torch
    (ProcessGroupNCCL::startCoalescing), and the stages of a pipeline issue different numbers of batches. In a group with
    messages it shows: no number is one of two ranks, or most of those that are belong to different steps.
    """
    group, found = column["group_code"], np.zeros(len(message), bool)
    rows = np.flatnonzero(np.isin(group, np.unique(group[message])) & ~message & column["numbered"])
    rows = rows[np.lexsort((column["rank"][rows], column["seq"][rows], group[rows]))]
    for of_group in np.split(rows, _begins(group[rows])[1:]):
        rank, seq, step = (column[name][of_group] for name in ("rank", "seq", "step"))
        if len(of_group) == 0 or rank.min() == rank.max():
            continue
        begins = _begins(seq)
        several = np.maximum.reduceat(rank, begins) > np.minimum.reduceat(rank, begins)
        known = np.minimum.reduceat(step, begins) >= 0
        differ = several & known & (np.maximum.reduceat(step, begins) > np.minimum.reduceat(step, begins))
        found[of_group] = not several.any() or 2 * int(differ.sum()) > int((several & known).sum())
    return found


# -- matching ------------------------------------------------------------------------------------------------------------

_REASONS = (
    "its peer is not known",
    "its number names another operation on another rank",
    "no other rank recorded its number",
    "no other rank of its group was recorded",
    "it has no number, and the ranks of its group did not record the same calls",
    "rank {} recorded no such messages",
    "rank {} recorded other messages",
)
_NO_PEER, _OTHER_OP, _NO_NUMBER, _NO_RANK, _NOT_ALIKE, _NO_MESSAGES, _OTHER_MESSAGES = range(len(_REASONS))


def _reason_table(calls: _Calls, reasons: Ints) -> pa.Table:
    """Rank, number and reason of the calls that have one."""
    row = np.flatnonzero(reasons >= 0)
    pairs, which = np.unique(np.stack([reasons[row], calls.peer[row]]), axis=1, return_inverse=True)
    texts = [_REASONS[reason].format(peer) for reason, peer in pairs.T.tolist()]
    text = pa.DictionaryArray.from_arrays(which.ravel(), pa.array(texts, pa.string()))
    return pa.table({"rank": calls.rank[row], "call_id": calls.call_id[row], "reason": text})


def _matched(calls: _Calls) -> tuple[Ints, Ints]:
    """Per call the number of its match, -1: none; and the reason why it has none, -1: it has, or it was not usable.

    Numbers follow the issue of each match's first call.
    """
    match = np.full(len(calls.rank), -1, np.int64)
    reason = np.full(len(calls.rank), -1, np.int64)
    message = np.isin(calls.op, [i for i, op in enumerate(calls.ops) if op in ("send", "recv")])
    usable = calls.usable
    reason[usable & message & (calls.peer < 0)] = _NO_PEER
    count = 0
    for rows, found in (
        _by_number(calls, np.flatnonzero(usable & ~message & (calls.key >= 0)), reason),
        _by_order(calls, np.flatnonzero(usable & ~message & (calls.key < 0)), reason),
        _by_pair(calls, np.flatnonzero(usable & message & (calls.peer >= 0)), reason),
    ):
        match[rows] = np.where(found >= 0, found + count, -1)
        count += int(found.max(initial=-1)) + 1
    return _renumbered(calls, match), reason


def _renumbered(calls: _Calls, match: Ints) -> Ints:
    """Matches numbered by the earliest issue, then rank and number of the first call."""
    row = np.flatnonzero(match >= 0)
    if not len(row):
        return match
    row = row[np.lexsort((calls.rank[row], calls.side[row], match[row]))]
    begins = _begins(match[row])
    first = row[begins]
    order = np.lexsort((calls.call_id[first], calls.rank[first], np.minimum.reduceat(calls.at[row], begins)))
    number = np.empty(int(match.max()) + 1, np.int64)
    number[match[first[order]]] = np.arange(len(order))
    return np.where(match >= 0, number[match], -1)


def _begins(sorted_keys: Ints) -> Ints:
    return np.flatnonzero(np.concatenate([[True], np.diff(sorted_keys) != 0])) if len(sorted_keys) else sorted_keys


def _dense(*keys: Ints) -> Ints:
    """One number for each distinct combination of the keys."""
    if not len(keys[0]):
        return keys[0].astype(np.int64)
    order = np.lexsort(keys[::-1])
    new = np.zeros(len(order), bool)
    for key in keys:
        new[1:] |= np.diff(key[order]) != 0
    found = np.empty(len(order), np.int64)
    found[order] = np.cumsum(new)
    return found


def _turns(*keys: Ints) -> Ints:
    """Place of each row among those of the same keys, in the order of the rows."""
    one = _dense(*keys)
    order = np.argsort(one, kind="stable")
    begins = _begins(one[order])
    found = np.empty(len(one), np.int64)
    found[order] = np.arange(len(one)) - np.repeat(begins, np.diff(np.append(begins, len(one))))
    return found


def _spread(key: Ints, value: Ints) -> tuple[Ints, Ints, Ints]:
    """Per row, over the rows of its key (0, 1, ...): how many there are, the smallest value and the largest."""
    count = np.bincount(key, minlength=int(key.max(initial=-1)) + 1)
    low = np.full(len(count), np.iinfo(np.int64).max)
    high = np.full(len(count), np.iinfo(np.int64).min)
    np.minimum.at(low, key, value)
    np.maximum.at(high, key, value)
    return count[key], low[key], high[key]


def _distinct(key: Ints, value: Ints) -> Ints:
    """Per row: how many different values there are among the rows of its key."""
    pair = _dense(key, value)
    _, one = np.unique(pair, return_index=True)
    return np.bincount(key[one], minlength=int(key.max(initial=-1)) + 1)[key]


def _by_number(calls: _Calls, rows: Ints, reason: Ints) -> tuple[Ints, Ints]:
    """Calls of one number; several of one rank were launched as one and match in turn."""
    key, rank = calls.key[rows], calls.rank[rows]
    together = _dense(key, _turns(key, rank))
    count, low, high = _spread(together, calls.op[rows])
    reason[rows[low != high]] = _OTHER_OP
    reason[rows[(low == high) & (count == 1)]] = _NO_NUMBER
    return rows, np.where((low == high) & (count > 1), together, -1)


def _by_order(calls: _Calls, rows: Ints, reason: Ints) -> tuple[Ints, Ints]:
    """Calls of one group without numbers: where all its ranks made the same calls in the same order, else step by step."""
    group, rank = _dense(calls.group[rows]), calls.rank[rows]
    ranks = _distinct(group, rank)
    found = _in_turn(group, rank, ranks, calls.step[rows], calls.what[rows])
    found = np.where(ranks > 1, found, -1)
    reason[rows[found < 0]] = np.where(ranks[found < 0] == 1, _NO_RANK, _NOT_ALIKE)
    return rows, found


def _by_pair(calls: _Calls, rows: Ints, reason: Ints) -> tuple[Ints, Ints]:
    """Messages from one rank to another, in order: a message's number is counted by each rank for itself."""
    side = calls.side[rows]
    sender = np.where(side == 0, calls.rank[rows], calls.peer[rows])
    receiver = np.where(side == 0, calls.peer[rows], calls.rank[rows])
    pair = _dense(calls.group[rows], sender, receiver)
    sides = _distinct(pair, side)
    found = _in_turn(pair, side, np.full(len(rows), 2), calls.step[rows], calls.what[rows])
    reason[rows[found < 0]] = np.where(sides[found < 0] == 1, _NO_MESSAGES, _OTHER_MESSAGES)
    return rows, found


def _in_turn(key: Ints, who: Ints, needed: Ints, step: Ints, what: Ints) -> Ints:
    """The n-th calls of one key put together: over all of it if everyone made the same ones, else in steps where they did.

    needed: how many must have made them. -1: not matched.
    """

    def alike(whole: Ints, turn: Ints) -> tuple[npt.NDArray[np.bool_], Ints]:
        together = _dense(whole, turn)
        count, low, high = _spread(together, what)
        bad = (count != needed) | (low != high)
        return np.bincount(whole, bad, int(whole.max(initial=-1)) + 1)[whole] == 0, together

    whole, by_all = alike(key, _turns(key, who))
    stepped = _dense(key, step)
    in_step, by_step = alike(stepped, _turns(stepped, who))
    later = by_step + int(by_all.max(initial=-1)) + 1
    return np.where(whole, by_all, np.where(in_step & (step >= 0), later, -1))


def _sizes(calls: _Calls, match: Ints) -> Ints:
    """Ranks that take part in each match: both of a message, else the group's as the lowest rank says it; -1: not known."""
    row = np.flatnonzero((match >= 0) & (calls.size >= 0))
    found = np.full(int(match.max(initial=-1)) + 1, -1, np.int64)
    row = row[np.argsort(-calls.rank[row], kind="stable")]
    found[match[row]] = calls.size[row]
    message = np.isin(calls.op, [i for i, op in enumerate(calls.ops) if op in ("send", "recv")])
    found[match[(match >= 0) & message]] = 2
    return found


def _match_table(run: Run, calls: _Calls, match: Ints, hosts: Mapping[int, str | None]) -> pa.Table:
    """Table matched_call."""
    row = np.flatnonzero(match >= 0)
    message = np.isin(calls.op[row], [i for i, op in enumerate(calls.ops) if op in ("send", "recv")])
    evidence = np.where(message | (calls.key[row] < 0), 2, np.where(calls.by_comms_id[row], 0, 1))
    sizes = _sizes(calls, match)
    run.table(
        "match_member",
        pa.table(
            {
                "match_id": match[row],
                "rank": calls.rank[row],
                "call_id": calls.call_id[row],
                "side": calls.side[row],
                "timed": pa.array(calls.timed[row]),
                "shared": pa.array(calls.shared[row]),
                "evidence": pa.DictionaryArray.from_arrays(evidence, pa.array(["comms_id", "seq", "order"])),
                "size": pa.array(sizes[match[row]], mask=sizes[match[row]] < 0),
            }
        ),
    )
    run.table(
        "host_of",
        pa.table({"rank": pa.array(list(hosts), pa.int32()), "host": pa.array(list(hosts.values()), pa.string())}),
    )
    found = run.arrow(
        """
        WITH members AS (
          SELECT m.*, s.op, s.role, s.step, s.dtype, s.payload_bytes, h.host, m.side * 4294967296 + m.rank AS place
          FROM match_member m
          JOIN seen_call s ON s.rank = m.rank AND s.call_id = m.call_id
          LEFT JOIN host_of h ON h.rank = m.rank
        )
        SELECT match_id, any_value(evidence) AS evidence, arg_min(op, place) AS op,
               CASE WHEN count(role) = count(*) AND min(role) = max(role) THEN min(role) END AS role,
               arg_min_null(step, place) AS step, arg_min_null(dtype, place) AS dtype, any_value(size) AS group_size,
               max(payload_bytes) AS payload_bytes, min(rank) AS first_rank,
               CASE WHEN arg_min(op, place) = 'send' THEN arg_min(rank, place) END AS sender_rank, count(*) AS members,
               count(*) FILTER (timed) AS timed, coalesce(count(*) FILTER (timed) = any_value(size), false) AS complete,
               list(rank ORDER BY rank) AS member_ranks, bool_or(shared) AS shared,
               CASE WHEN count(host) = count(*) AND count(*) = any_value(size) THEN count(DISTINCT host) END AS hosts
        FROM members GROUP BY match_id ORDER BY match_id
        """
    )
    for name in ("match_member", "host_of"):
        run.connection.execute(f"DROP TABLE {name}")
    return found
