"""What the cells of a diff would take at measured bandwidths: where a run and a file of links meet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from traceanalyzer.links import Links
from traceanalyzer.matching import Cell
from traceanalyzer.run import Run

Span = Literal["intra", "inter"]


def spans(run: Run) -> dict[str, Span]:
    """Whether the groups of a role lie on one host each, or all on several. Left out: a host is not known, or they differ.

    Needs an attached run.
    """
    found = run.tuples(
        """
        WITH member AS (
          SELECT DISTINCT role, ranks, unnest(ranks) AS rank FROM process_group
          WHERE role IS NOT NULL AND len(ranks) > 1
        ),
        hosted AS (
          SELECT m.role, m.ranks, count(DISTINCT h.host) AS hosts, count(h.host) = count(*) AS known
          FROM member m
          LEFT JOIN (SELECT rank, any_value(host) AS host FROM rank GROUP BY rank) h ON h.rank = m.rank
          GROUP BY m.role, m.ranks
        )
        SELECT role, max(hosts) = 1 FROM hosted
        GROUP BY role HAVING bool_and(known) AND (max(hosts) = 1 OR min(hosts) > 1)
        """
    )
    return {role: "intra" if one else "inter" for role, one in found}


def cell_time_ns(cell: Cell, links: Links, span_of: Mapping[str, Span]) -> int | None:
    """Time of the cell's measured calls of one rank and step, one after another, at the links' bandwidth.

    Of sizes that vary, the mean is taken for every call. None: a size or the group is not known, or the file says nothing of
    the operation.
    """
    calls = cell.calls_measured
    if not calls or cell.op is None or cell.group_size is None or cell.payload_bytes_measured is None:
        return None
    each = cell.payload_bytes_each
    size = each if each is not None else cell.payload_bytes_measured // calls
    found = links.time(cell.op, span_of.get(cell.role or ""), cell.group_size, size)
    return None if found is None else found.time_ns * calls
