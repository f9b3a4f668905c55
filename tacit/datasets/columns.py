"""Declared columns of a table: what a cell may hold, and how it becomes numbers.

A declaration is public: its author has not looked at the values. Each cell is read by itself, so
how a cell is read does not depend on any other row, and no cell raises an error, because an error
would reveal a private value. A cell is *inside* the declared domain, *missing*, or *outside*.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tacit._arrays import Flags, Floats

TYPES = ("number", "category", "boolean", "ordered", "ignored", "person", "weight")
NOT_FEATURES = ("ignored", "person", "weight")
CLIP, MISSING = "clip", "missing"  # rules for values outside the domain
UNKNOWN = "(other)"
"""Stands for a text that is no declared category; summaries refuse a category of this name."""
MISSING_MARKS = ("", "NA", "N/A", "NaN", "nan", "NULL", "null", "None", "?")
_LARGEST = 1e150  # bounds above this overflow when they are squared
_TRUE = frozenset(("1", "true", "yes", "t", "y"))
_FALSE = frozenset(("0", "false", "no", "f", "n"))

Singles: TypeAlias = NDArray[np.float32]
Cells: TypeAlias = np.ndarray | Sequence[Any]
"""One column of a table: numbers as an array, texts (or None) as a tuple, anything else as a list.
Any: Python objects."""


class Parsed(NamedTuple):
    """Cells of one column as numbers or category numbers, with flags. Private."""

    values: Floats
    """The number, or the index of the category; NaN if the cell has no value that can be used."""
    is_missing: Flags
    is_outside: Flags
    is_absent: Flags
    """Whether the cell has no value that can be used, and the column declares no `missing`."""


class CellRules(NamedTuple):
    """How texts of a file are read: which texts mean a missing value, and the decimal sign."""

    missing: frozenset[str] = frozenset(MISSING_MARKS)
    decimal: str = "."


PLAIN = CellRules()
"""The rules of a file that declares none."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One declared column.

    Parameters
    ----------
    type
        number (with `lower` and `upper`), category or ordered (with `categories`), boolean;
        ignored, person (whose id the cell holds) and weight are no features. Default: the type that
        the other settings imply.
    step
        Distance of the possible values of a number, such as 1 for whole numbers, if it is known
        publicly; it must divide `upper - lower`. Quantiles have shorter intervals then.
    at_least
        Turn a number into 0 or 1: whether it reaches this threshold.
    missing
        What a missing value becomes: a number, or one of the categories. Default: the middle of the
        bounds; no category. Without this setting a missing value counts as outside the domain, and
        a record whose target is missing is left out.
    outside
        What a value outside the domain becomes: "clip" (to the nearest bound; the default for
        numbers), "missing" (the default for the others), or one of the categories.
    reference
        The category that coefficients are compared with; default the first one.
    """

    name: str
    type: str = ""
    lower: float | None = None
    upper: float | None = None
    categories: tuple[str, ...] = ()
    at_least: float | None = None
    step: float | None = None
    missing: float | str | bool | None = None
    outside: str = ""
    reference: str = ""

    def __post_init__(self) -> None:
        has_bounds = self.lower is not None or self.upper is not None
        declared = has_bounds + bool(self.categories) + (self.at_least is not None)
        type_ = self.type or ("category" if self.categories else "number")
        if not self.type and declared != 1:
            raise ValueError(
                f"column {self.name!r} must declare lower and upper, or categories, or at_least: "
                f"one of the three. Or give its type: {', '.join(TYPES)}."
            )
        if type_ not in TYPES:
            raise ValueError(f"column {self.name!r}: type must be one of {', '.join(TYPES)}.")
        object.__setattr__(self, "type", type_)
        object.__setattr__(self, "categories", tuple(text.strip() for text in self.categories))
        self._check_domain(has_bounds)
        self._check_rules()

    def _check_domain(self, has_bounds: bool) -> None:
        """Raise unless the settings of the domain are those of the column's type, and complete."""
        needs_bounds = self.type == "weight" or (self.type == "number" and self.at_least is None)
        if needs_bounds and (self.lower is None or self.upper is None):
            raise ValueError(f"column {self.name!r} must declare lower and upper.")
        if has_bounds and not needs_bounds:
            what = "one with at_least" if self.type == "number" else f"of type {self.type}"
            raise ValueError(f"column {self.name!r}, {what}, has no lower and upper.")
        if self.step is not None and not needs_bounds:
            raise ValueError(f"column {self.name!r}: step needs lower and upper.")
        if self.at_least is not None and self.type != "number":
            raise ValueError(f"column {self.name!r}: at_least needs type number.")
        if needs_bounds:
            assert self.lower is not None  # checked above, like the next one
            assert self.upper is not None
            largest = max(abs(self.lower), abs(self.upper))
            if not largest < _LARGEST:  # also refuses NaN
                raise ValueError(f"column {self.name!r}: bounds must be numbers below 1e150.")
            if not self.lower < self.upper:
                raise ValueError(f"column {self.name!r} must have lower < upper.")
            n_steps = 1.0 if not self.step else (self.upper - self.lower) / self.step
            is_whole = 0.5 < n_steps < 1e15 and abs(n_steps - round(n_steps)) <= 1e-6 * n_steps
            if self.step == 0 or not is_whole:
                raise ValueError(f"column {self.name!r}: step must divide upper - lower.")
            if self.type == "weight" and self.lower < 0:
                raise ValueError(f"column {self.name!r}: a weight must have lower >= 0.")
        if self.at_least is not None and not math.isfinite(self.at_least):
            raise ValueError(f"column {self.name!r}: at_least must be a finite number.")
        has_categories = self.type in ("category", "ordered")
        if has_categories != bool(self.categories):
            rule = "needs" if has_categories else "has no"
            raise ValueError(f"column {self.name!r} of type {self.type} {rule} categories.")
        if len(set(self.categories)) < len(self.categories):
            raise ValueError(f"column {self.name!r}: categories must differ from each other.")
        if self.type == "ordered" and len(self.categories) < 2:
            raise ValueError(f"column {self.name!r}: ordered needs at least two categories.")

    def _check_rules(self) -> None:
        """Raise unless `missing`, `outside` and `reference` fit the domain."""
        is_number = self.type in ("number", "weight") and self.at_least is None
        if self.type in ("ignored", "person") and (self.missing is not None or self.outside):
            raise ValueError(f"column {self.name!r} of type {self.type} has no rules for values.")
        if self.missing is not None:
            is_real = isinstance(self.missing, int | float) and not isinstance(self.missing, bool)
            if is_number and not (is_real and abs(float(str(self.missing))) <= sys.float_info.max):
                raise ValueError(f"column {self.name!r}: missing must be a finite number.")
            if self.categories and str(self.missing) not in self.categories:
                raise ValueError(f"column {self.name!r}: missing must be one of its categories.")
            if self.n_classes == 2 and not self.categories and not isinstance(self.missing, bool):
                raise ValueError(f"column {self.name!r}: missing must be true or false.")
        rules = (CLIP, MISSING) if is_number else (MISSING, *self.categories)
        if self.outside and self.outside not in rules:
            raise ValueError(
                f"column {self.name!r}: outside must be one of {', '.join(map(repr, rules))}."
            )
        if self.reference and self.reference not in self.categories:
            raise ValueError(f"column {self.name!r}: reference must be one of its categories.")

    @property
    def is_feature(self) -> bool:
        """Whether the column may be a feature or the target: not ignored, person or weight."""
        return self.type not in NOT_FEATURES

    @property
    def n_classes(self) -> int | None:
        """Number of classes that the column has as a target; None if it is numeric."""
        if self.type == "boolean" or self.at_least is not None:
            return 2
        return len(self.categories) or None

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes that the column has as a target; empty if it is numeric."""
        if self.categories:
            return self.categories
        if self.type == "boolean":
            return "false", "true"
        return () if self.at_least is None else (f"< {self.at_least:g}", f">= {self.at_least:g}")

    @property
    def spellings(self) -> tuple[str, ...]:
        """Texts that are a value: the categories, or the words for true and false in lower case."""
        return tuple(sorted(_TRUE | _FALSE)) if self.type == "boolean" else self.categories

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the features that encode this column; one per category of a category column."""
        if self.type == "category":
            return tuple(f"{self.name}={c}" for c in self.categories)
        return (self.name,) if self.is_feature else ()

    @property
    def is_indicator(self) -> bool:
        """Whether the features that encode this column are 0 or 1, at most one of them 1."""
        return self.type in ("category", "boolean") or self.at_least is not None

    @property
    def middle_and_half(self) -> tuple[float, float]:
        """Middle and half width of the declared bounds, for scaling; 0 and 1 for indicators."""
        if self.type == "ordered":
            half = (len(self.categories) - 1) / 2
            return half, half
        if self.lower is None or self.upper is None:
            return 0.0, 1.0
        return self.lower / 2 + self.upper / 2, self.upper / 2 - self.lower / 2

    def parse(self, cells: Cells, rules: CellRules = PLAIN) -> Parsed:
        """Return the cells as numbers; a category as its index, true and false as 1 and 0.

        Missing values and values outside the domain are replaced by the declared rules. Private.
        """
        numbers, is_missing = self._numbers(cells, rules)
        is_outside = ~is_missing & ~self._contains(numbers)
        inside = self._inside(numbers, is_outside)
        is_absent = np.isnan(inside) & (self.missing is None)
        return Parsed(self._filled(inside), is_missing, is_outside, is_absent)

    def plain(self, cells: Cells, rules: CellRules = PLAIN) -> list[Any]:
        """Return what the cells say, before the rules for missing and outside values. Private.

        Numbers are floats, with NaN for what is no number. Categories and truth values are texts,
        `UNKNOWN` for a text that is not declared and None for a missing one. A person is a text or
        None. Any: a list of one of these.
        """
        if self.type == "person":
            return self.ids(cells, rules)
        numbers, is_missing = self._numbers(cells, rules)
        if self.type in ("number", "weight"):
            return numbers.tolist()
        names = {float(k): name for k, name in enumerate(self.classes)}
        return [
            None if absent else names.get(number, UNKNOWN)
            for number, absent in zip(numbers.tolist(), is_missing.tolist(), strict=True)
        ]

    def ids(self, cells: Cells, rules: CellRules = PLAIN) -> list[str | None]:
        """Return the cells as names of persons; None for a missing one. Private.

        A number gives the same name however it is stored: 1, 1.0 and the text "1". A float from
        2^53 on names nobody, because different integers become the same float there.
        """
        listed = cells.tolist() if isinstance(cells, np.ndarray) else cells
        return [None if one in rules.missing else one for one in as_texts(map(_plain_id, listed))]

    def _numbers(self, cells: Cells, rules: CellRules) -> tuple[Floats, Flags]:
        """Return the number or the category's index of each cell, and whether it is missing."""
        if isinstance(cells, np.ndarray) and cells.dtype.kind in "iuf" and not self.categories:
            numbers = cells.astype(np.float64)
            return numbers, np.isnan(numbers)
        texts = cells if isinstance(cells, tuple) else as_texts(cells)
        return self._from_text(texts, rules)

    def _from_text(self, texts: Sequence[str | None], rules: CellRules) -> tuple[Floats, Flags]:
        """Return the value of each text, and whether it is missing; each distinct text once."""
        places = {text: k for k, text in enumerate(set(texts))}
        codes = np.fromiter(map(places.__getitem__, texts), np.intp, len(texts))
        look = {text: float(k) for k, text in enumerate(self.categories)}
        equal = {float(c): k for c, k in look.items() if _is_plain_number(c)}
        values, missing = np.full(len(places), np.nan), np.zeros(len(places), np.bool_)
        for raw, place in places.items():
            text = None if raw is None else raw.strip()
            if text is not None and (known := look.get(text)) is not None:
                values[place] = known  # a declared category is never a mark for missing
            elif text is None or text in rules.missing:
                missing[place] = True
            elif self.type == "boolean":
                values[place] = _truth(text)
            elif self.categories:
                values[place] = equal.get(_number(text, rules.decimal), np.nan)
            else:
                values[place] = _number(text, rules.decimal)
        return values[codes], missing[codes]

    def _contains(self, numbers: Floats) -> Flags:
        """Return which numbers are in the declared domain; NaN is not."""
        if self.categories or self.at_least is not None:
            return ~np.isnan(numbers)
        if self.type == "boolean":
            return (numbers == 0) | (numbers == 1)
        assert self.lower is not None  # a quantity, whose bounds were checked
        assert self.upper is not None
        return (numbers >= self.lower) & (numbers <= self.upper)

    def _inside(self, numbers: Floats, is_outside: Flags) -> Floats:
        """Return the numbers with the rule for outside values applied; NaN where none is left."""
        if self.outside and self.outside in self.categories:
            return np.where(is_outside, self.categories.index(self.outside), numbers)
        if self.lower is None or self.outside == MISSING:
            return np.where(is_outside, np.nan, numbers)
        return np.clip(numbers, self.lower, self.upper)

    def _filled(self, numbers: Floats) -> Floats:
        """Return the numbers with the rule for missing values applied."""
        filled = np.where(np.isnan(numbers), self._absent, numbers)
        return filled if self.lower is None else np.clip(filled, self.lower, self.upper)

    @property
    def _absent(self) -> float:
        """The number that stands for a missing value; NaN if no category or truth is declared."""
        if self.missing is None:
            return math.nan if self.lower is None else self.middle_and_half[0]
        if self.categories:
            return float(self.categories.index(str(self.missing)))
        if self.at_least is not None:
            return self.at_least if self.missing else -math.inf
        return float(self.missing)

    def encode(self, cells: Cells, rules: CellRules = PLAIN) -> Singles:
        """Return the features of the column, (rows, outputs), in float32; see `features`."""
        return self.features(self.parse(cells, rules))

    def features(self, parsed: Parsed) -> Singles:
        """Return the encoded column (rows, outputs): numbers in [-1, 1], indicators as 0 and 1.

        A cell without a usable value becomes all zeros for categories and booleans, and the middle
        of the range for an ordered column.
        """
        values = parsed.values
        if self.type == "category":
            return (values[:, None] == np.arange(len(self.categories))).astype(np.float32)
        if self.at_least is not None:  # a missing number is not above the threshold
            return (values >= self.at_least).astype(np.float32)[:, None]
        middle, half = self.middle_and_half
        scaled = np.nan_to_num((values - middle) / half)
        return scaled[:, None].astype(np.float32)

    def targets(self, parsed: Parsed) -> np.ndarray:
        """Return the encoded target: a class number, or a number scaled to [-1, 1].

        Where `Parsed.is_absent`, the number means nothing: such a record must be left out.
        """
        if self.at_least is None and self.n_classes is not None:
            return np.nan_to_num(parsed.values).astype(np.int64)
        encoded = self.features(parsed)[:, 0]
        return encoded.astype(np.int64) if self.n_classes else encoded

    def flags(self, parsed: Parsed) -> Flags:
        """Return which cells the declaration does not describe: outside, or missing without a rule.

        Private. The paid check of a table counts them.
        """
        return (
            parsed.is_outside if self.missing is not None else parsed.is_outside | parsed.is_missing
        )


def _plain_id(cell: Any) -> Any:  # Any: one cell
    """Return a number in the form that all equal numbers have; other cells as they are."""
    if isinstance(cell, float):
        if not abs(cell) < 2.0**53:  # also NaN
            return None
        return int(cell) if cell.is_integer() else cell
    if isinstance(cell, Decimal) and cell.is_finite() and cell.adjusted() < 100:
        return int(cell) if cell == cell.to_integral_value() else cell.normalize()
    return cell


def as_texts(cells: Cells | Iterable[Any]) -> list[str | None]:
    """Return each cell as stripped text; None for a missing value. Private."""
    listed = cells.tolist() if isinstance(cells, np.ndarray) else cells
    return [cell.strip() if type(cell) is str else _text(cell) for cell in listed]


def _text(cell: Any) -> str | None:
    try:
        if cell is None or cell != cell:  # NaN and similar marks differ from themselves
            return None
    except TypeError:  # the mark NA of pandas has no truth value
        return None
    except ValueError:  # several values in one cell
        return UNKNOWN
    if isinstance(cell, bool):
        return "true" if cell else "false"
    try:
        return str(cell).strip()
    except ValueError:  # a whole number with more than 4,300 digits
        return UNKNOWN


def _number(text: str, decimal: str = ".") -> float:
    """Return the number in a text, or NaN; true and false are 1 and 0."""
    if (truth := _BOOLEANS.get(text)) is not None:
        return truth
    if decimal != ".":
        text = text.replace(".", "_").replace(decimal, ".")  # a point is then no part of a number
    if "_" in text:  # Python reads 1_000, files do not mean it
        return math.nan
    try:
        return float(text)
    except (ValueError, OverflowError):
        return math.nan


_BOOLEANS = {form: value for word, value in (("true", 1.0), ("false", 0.0))
             for form in (word, word.title(), word.upper())}  # fmt: skip


def _truth(text: str) -> float:
    folded = text.casefold()
    if folded in _TRUE or folded in _FALSE:
        return float(folded in _TRUE)
    number = _number(text)
    return number if number in (0.0, 1.0) else math.nan


def _is_plain_number(text: str) -> bool:
    """Return whether a category is a plain whole number, so that "1.0" or "01" may denote it."""
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdecimal() and len(digits) < 16 and text == str(int(text))
