"""Columns of data frames (pandas, polars, pyarrow, through narwhals) and of arrays.

The same values give the same cells, whatever the library that holds them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import validate_data

from tacit.datasets.columns import Cells


def as_frame(table: Any) -> Any:  # Any: data frames of several libraries
    """Return a data frame in the form of narwhals; None if `table` is no data frame."""
    if isinstance(table, np.ndarray | list | tuple):
        return None
    import narwhals.stable.v1 as nw

    found = nw.from_native(table, pass_through=True)
    if isinstance(found, nw.LazyFrame):
        raise TypeError("the table is lazy: collect it first, as in table.collect().")
    return found if isinstance(found, nw.DataFrame) else None


def frame_cells(frame: Any, names: Sequence[str]) -> dict[str, Cells]:
    """Return the named columns of a narwhals data frame as cells. Private."""
    return {name: _cells(frame[name]) for name in names}


def checked_array(estimator: BaseEstimator, table: Any, *, reset: bool) -> np.ndarray:
    """Return `table` as a two-dimensional array; errors quote no value."""
    try:
        return validate_data(  # type: ignore[return-value]  # an array, since y is not given
            estimator,
            table,
            reset=reset,
            dtype=None,
            ensure_all_finite=False,
            ensure_min_features=1,
        )
    except ValueError as wrong:
        message, quoted, _ = str(wrong).partition(":\narray=")
        if quoted:
            message += ". Reshape your data to one row per record."
        if "Complex data" in message:
            message = "Complex data not supported. Pass real numbers."
        raise ValueError(message) from None


def _cells(series: Any) -> Cells:
    """Return one column: numbers as an array with NaN for missing values, else a list.

    Integers stay exact, because they may be the ids of persons.
    """
    if series.dtype.is_numeric() and not series.dtype.is_decimal():
        array = series.to_numpy()
        if array.dtype.kind in "iu":
            return array
        is_rounded = series.dtype.is_integer() and (np.abs(array) >= 2.0**53).any()  # has nulls
        if array.dtype.kind == "f" and not is_rounded:
            return array.astype(np.float64)
    return series.to_list()
