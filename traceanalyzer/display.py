"""How objects show themselves in a notebook, and as tables. What they show is made above them, in reports/notebook.py."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas
    import pyarrow


def _notebook() -> Any:
    # The reports stand above every class that is shown in the order of imports, and are found by their name.
    return importlib.import_module("traceanalyzer.reports.notebook")


def frame_of(table: pyarrow.Table) -> pandas.DataFrame:
    """A table as a pandas data frame. Whole numbers with nulls keep every digit (Int64, null is <NA>), not as floats."""
    import pandas as pd
    import pyarrow as pa

    kinds = {getattr(pa, name.lower())(): getattr(pd, f"{name}Dtype")() for name in _WHOLE}
    found: pd.DataFrame = table.to_pandas()
    for i, column in enumerate(table.columns):
        if column.null_count and column.type in kinds:
            found.isetitem(i, column.to_pandas(types_mapper=kinds.get))
    return found


_WHOLE = ("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64")


class Shown:
    """An object that Jupyter shows as HTML."""

    def _repr_html_(self) -> str:
        return str(_notebook().html(self))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        # the text only: Jupyter asks _repr_html_ for the rest, and a dataclass's own repr would be pages long
        return {"text/plain": str(_notebook().text(self))}


class Tabular(Shown):
    """An object whose rows are a table too; its columns are those of docs/notebook.md."""

    def arrow(self) -> pyarrow.Table:
        """The rows as an Arrow table."""
        found: pyarrow.Table = _notebook().table(self)
        return found

    def frame(self) -> pandas.DataFrame:
        """The rows as a pandas data frame."""
        return frame_of(self.arrow())
