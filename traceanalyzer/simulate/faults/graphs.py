"""CUDA graphs: what a recording holds of calls that were captured. Their kernels run, and nothing on the host says why."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from traceanalyzer.simulate.faults.data import rewritten
from traceanalyzer.simulate.faults.plan import Finish

pc: Any = pyarrow.compute  # its functions are made when it is imported: no type checker sees them

_GRAPH = 1
_TIES = ("coalesce_id", "join_evidence", "external_id", "completeness", "launch_ns")
"""Columns of a kernel that tie it to the call it is of."""


def captured_in_graphs() -> Finish:
    """The calls of the layers' passes leave no record; their kernels are tied to no call, and name a graph."""
    gone: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def change(kind: str, rows: pa.Table) -> pa.Table:
        nonlocal gone
        if kind == "comm_record":  # written before the kernels
            inside = pc.and_(
                pc.is_in(
                    rows.column("recorded_phase").cast(pa.string()), pa.array(["forward", "backward", "recompute"])
                ),
                pc.is_valid(rows.column("recorded_layer")),
            )
            gone = _keys(rows.filter(pc.fill_null(inside, False)), "call_id")
            return rows.filter(pa.array(~np.isin(_keys(rows, "call_id"), gone)))
        if kind == "kernel":
            tied = np.isin(_keys(rows, "coalesce_id"), gone)
            for name in _TIES:
                rows = _nulled(rows, name, tied)
            graph = pa.array(np.full(len(tied), _GRAPH), pa.int64(), mask=~tied)
            return rows.set_column(rows.column_names.index("graph_id"), "graph_id", graph)
        return rows

    return rewritten(change)


def _keys(table: pa.Table, column: str) -> npt.NDArray[np.int64]:
    """Rank and number of each row in one integer; -1 where there is no number."""
    rank = table.column("rank").to_numpy().astype(np.int64)
    number = pc.fill_null(table.column(column), -1).to_numpy().astype(np.int64)
    found: npt.NDArray[np.int64] = np.where(number < 0, -1, rank * (1 << 40) + number)
    return found


def _nulled(table: pa.Table, name: str, where: npt.NDArray[np.bool_]) -> pa.Table:
    """The table with nulls in a column."""
    column = table.column(name)
    plain = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    values = pc.if_else(pa.array(where), pa.scalar(None, plain), column.cast(plain))
    return table.set_column(table.column_names.index(name), name, values.cast(column.type))
