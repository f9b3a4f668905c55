"""Private columns as numbers in [0, 1] or as numbers of declared categories.

Each value is read by itself, so how it is read does not depend on other records. No value raises an
error, because an error would reveal it. A value that cannot be read as a number is missing.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from tacit._arrays import Flags, Floats, Indices
from tacit._check import one_of

Category: TypeAlias = str | int | float | bool
CLIP, DROP = "clip", "drop"
OTHER, ABSENT = "(other)", "(missing)"
MISSING_TEXTS = frozenset(("", "NA", "N/A", "NaN", "nan", "NULL", "null", "None"))
_TRUTH = {"true": 1.0, "yes": 1.0, "t": 1.0, "y": 1.0, "1": 1.0}
_TRUTH |= {"false": 0.0, "no": 0.0, "f": 0.0, "n": 0.0, "0": 0.0}


class Range(NamedTuple):
    """Declared bounds of a number: public, and never learned from the values."""

    lower: float
    upper: float

    @property
    def width(self) -> float:
        """Distance of the bounds."""
        return self.upper - self.lower

    def unscale(self, unit: Any) -> Any:  # Any: a number or an array
        """Return the values that stand at `unit` in [0, 1] between the bounds."""
        return self.lower + self.width * unit


def as_range(bounds: object, name: str = "bounds") -> Range:
    """Return the declared bounds (lower, upper), checked."""
    if bounds is None:
        raise ValueError(
            f"{name} must be declared, got None. Pass (lower, upper) from public knowledge, or "
            "find them privately with tacit.summaries.private_bounds."
        )
    try:
        lower, upper = (float(x) for x in bounds)  # type: ignore[union-attr]  # else TypeError
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a pair of numbers (lower, upper).") from None
    if not (math.isfinite(lower) and math.isfinite(upper) and lower < upper):
        raise ValueError(f"{name} must be finite with lower < upper, got {lower:g} and {upper:g}.")
    if not 1e-150 < upper - lower < 1e150 or max(abs(lower), abs(upper)) > 1e150:
        raise ValueError(f"{name} must be below 1e150 in size, and more than 1e-150 apart.")
    return Range(lower, upper)


def numbers(values: ArrayLike) -> Floats:
    """Return a private column as floats; NaN where a value is missing or no number."""
    array = _one_column(values)
    if array.dtype.kind in "fiub":
        return array.astype(np.float64)
    return np.fromiter(map(_number, array.tolist()), np.float64, len(array))


def in_unit(
    values: ArrayLike, bounds: Range, *, missing: str | float = DROP, outside: str = CLIP
) -> Floats:
    """Return a private column clipped to its bounds and scaled to [0, 1]; NaN where dropped.

    `missing` is "drop" or the number that stands for a missing value. `outside` says what happens
    to values outside the bounds: "clip" or "drop".
    """
    one_of((CLIP, DROP), outside=outside)
    column = numbers(values)
    if missing != DROP:
        column = np.where(np.isnan(column), fill_value(missing), column)
    if outside == DROP:
        column = np.where((column < bounds.lower) | (column > bounds.upper), np.nan, column)
    clipped = np.clip(column, bounds.lower, bounds.upper)
    return np.clip((clipped - bounds.lower) / bounds.width, 0.0, 1.0)


def truths(values: ArrayLike) -> Indices:
    """Return 1 for true, 0 for false, 2 for anything else, 3 for a missing value. Private."""
    column = numbers(values)
    other = np.where(is_present(values), 2, 3)
    return np.where((column == 0) | (column == 1), np.nan_to_num(column), other).astype(np.int64)


def is_outside_bounds(values: ArrayLike, bounds: Range | None) -> Flags:
    """Return which values are present, but no number within the bounds (None: no bounds). Private.

    >>> is_outside_bounds([5.0, 50.0, None, "x"], Range(0, 10)).tolist()
    [False, True, False, True]
    """
    column = numbers(values)
    lower, upper = bounds or (-math.inf, math.inf)
    return is_present(values) & ~((column >= lower) & (column <= upper))


def fill_value(missing: object) -> float:
    """Return the number that stands for missing values, checked."""
    if isinstance(missing, bool) or not isinstance(missing, int | float | np.number):
        raise ValueError(f"missing must be 'drop' or a number, got {missing!r}.")
    if not math.isfinite(missing):
        raise ValueError("missing must be 'drop' or a finite number.")
    return float(missing)


def codes(values: ArrayLike, categories: Sequence[Category]) -> Indices:
    """Return the number of each value's category; k for another value, k + 1 for a missing one.

    k is the number of categories. Values and categories are compared as texts without outer blanks;
    a whole number is the same with and without ".0".
    """
    place = {category_text(c): index for index, c in enumerate(categories)}
    k = len(place)
    array = _one_column(values)
    known: dict[Any, int] = {}
    found = np.empty(len(array), np.int64)
    for index, value in enumerate(array.tolist()):
        key = type(value), value  # 1 and True are equal, but not the same category
        try:
            code = known.get(key)
        except TypeError:  # not hashable
            found[index] = k
            continue
        if code is None:
            text = category_text(value)
            code = place.get(text, k + 1 if _is_missing(value, text) else k)
            known[key] = code
        found[index] = code
    return found


def check_categories(categories: object, name: str = "categories") -> tuple[Category, ...]:
    """Return the declared categories, checked: at least one, all different."""
    if isinstance(categories, str) or not isinstance(categories, Sequence | np.ndarray):
        raise TypeError(f"{name} must be a list of the values that may occur.")
    listed = tuple(categories)
    if not listed:
        raise ValueError(f"{name} must list at least one value.")
    texts = [category_text(c) for c in listed]
    if len(set(texts)) < len(texts):
        raise ValueError(f"{name} must be different from each other.")
    if {OTHER, ABSENT} & set(texts):
        raise ValueError(f"{name} must not contain {OTHER!r} or {ABSENT!r}.")
    return listed


def category_text(value: object) -> str:
    """Return the text by which a value is compared with categories."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def is_present(values: ArrayLike) -> Flags:
    """Return which values are not missing: not None, not NaN, not an empty text. Private."""
    array = _one_column(values)
    if array.dtype.kind == "f":
        return ~np.isnan(array)
    if array.dtype.kind in "iub":
        return np.ones(len(array), np.bool_)
    flags = (not _is_missing(value, category_text(value)) for value in array.tolist())
    return np.fromiter(flags, np.bool_, len(array))


def flags_of(values: ArrayLike, name: str) -> Flags:
    """Return a column of truth values, or 0 and 1, as flags; anything else is False. Private."""
    try:
        return numbers(values) == 1
    except ValueError:
        raise ValueError(f"flags of {name!r} must be one column.") from None


def same_length(**columns: Any) -> int:  # Any: arrays
    """Return the common number of records; raise if the columns differ in it."""
    lengths = {len(column) for column in columns.values()}
    if len(lengths) != 1:
        raise ValueError(f"{' and '.join(columns)} must have one value for each record.")
    return lengths.pop()


def _one_column(values: Any) -> np.ndarray:  # Any: lists, arrays, columns of data frames
    """Return the values as an array; raise unless they are one column, one value for a record."""
    array = values if isinstance(values, np.ndarray) else _as_array(values)
    if array.ndim != 1:
        raise ValueError(f"values must be one column, got {array.ndim} dimensions.")
    return array


def _as_array(values: Any) -> np.ndarray:  # Any: lists, and columns of data frames
    if hasattr(values, "to_numpy"):
        return np.asarray(values.to_numpy())
    listed = list(values)
    try:
        return np.asarray(listed) if _is_plain(listed) else _objects(listed)
    except (ValueError, OverflowError):
        return _objects(listed)


def _is_plain(listed: list[Any]) -> bool:
    """Return whether all values are of one type, so that no value changes how another is read."""
    return len(set(map(type, listed))) == 1 and type(listed[0]) in (int, float, bool)


def _objects(listed: list[Any]) -> np.ndarray:
    array = np.empty(len(listed), dtype=object)
    for index, value in enumerate(listed):  # one assignment of all would unpack nested lists
        array[index] = value
    return array


def _number(value: Any) -> float:  # Any: whatever a column holds
    try:
        if isinstance(value, str) and (truth := _TRUTH.get(value.strip().lower())) is not None:
            return truth
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _is_missing(value: Any, text: str) -> bool:  # Any: as above
    return value is None or text in MISSING_TEXTS or text == "<NA>"
