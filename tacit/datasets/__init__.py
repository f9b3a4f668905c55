"""Data sets: arrays with the public facts that a private method may rely on.

`load("digits")` needs scikit-learn only. mnist, fashion-mnist and cifar10 are read from files.
`read_table` reads a CSV or Parquet table by a schema of declared bounds and categories. No bound is
ever chosen by looking at the values.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tacit._lazy import lazy
from tacit.datasets.columns import TYPES, UNKNOWN, Column, Parsed
from tacit.datasets.csv_lines import FIELDS, Dialect, find_columns
from tacit.datasets.dataset import Dataset, PersonRows
from tacit.datasets.images import cifar10, digits, fashion_mnist, mnist, read_idx

if TYPE_CHECKING:  # these load scikit-learn, so they are loaded on first use
    from tacit.datasets.schema import Derived, EncodedRows, FeatureBounds, Schema
    from tacit.datasets.tables import (
        as_dataset,
        column_names,
        count_rows,
        frame_chunks,
        held_out,
        held_out_by_content,
        read_cell_chunks,
        read_columns,
        read_rows,
        read_table,
        take_rows,
        with_target,
    )

__all__ = [
    "FIELDS",
    "TYPES",
    "UNKNOWN",
    "Column",
    "Dataset",
    "Derived",
    "Dialect",
    "EncodedRows",
    "FeatureBounds",
    "Parsed",
    "PersonRows",
    "Schema",
    "as_dataset",
    "cifar10",
    "column_names",
    "count_rows",
    "digits",
    "fashion_mnist",
    "find_columns",
    "frame_chunks",
    "held_out",
    "held_out_by_content",
    "load",
    "mnist",
    "read_cell_chunks",
    "read_columns",
    "read_idx",
    "read_rows",
    "read_table",
    "take_rows",
    "with_target",
]

_SCHEMA = "Derived EncodedRows FeatureBounds Schema"
_TABLES = (
    "as_dataset column_names count_rows frame_chunks held_out held_out_by_content "
    "read_cell_chunks read_columns read_rows read_table take_rows with_target"
)
_HOMES = {"schema": _SCHEMA, "tables": _TABLES}
__getattr__ = lazy(
    __name__, {name: home for home, names in _HOMES.items() for name in names.split()}
)

_NAMED: dict[str, Callable[[Path | None], Dataset]] = {
    "digits": lambda _: digits(),
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
}


def load(name: str, *, data: str | Path | None = None) -> Dataset:
    """Return the data set called `name`; `data` is the folder that holds it, default `TACIT_DATA`.

    >>> load("digits").x_train.shape
    (1438, 8, 8)
    """
    if name not in _NAMED:
        raise ValueError(
            f"name must be one of {', '.join(_NAMED)}, got {name!r}. "
            "For a table, write a schema and call read_table."
        )
    return _NAMED[name](None if data is None else Path(data))
