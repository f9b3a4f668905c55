"""The encoding of rows as integers on a public grid, by a schema, in any engine.

A number is clipped to its declared bounds and rounded to one of 2 `STEPS` + 1 points; a category
becomes its index. Then every feature is an integer z in [-`STEPS`, `STEPS`] that stands for
z / `STEPS` in [-1, 1], and an indicator is 0 or `STEPS`. All sums are sums of integers, so they do
not depend on the order of the rows, on the engine, or on how often a task was retried.

**No sum overflows.** A factor is at most `STEPS` = 2^15 in magnitude and a product at most 2^30.
At most `MOST_ROWS` = 2^32 rows are added, so a sum is at most 2^62, below the 2^63 of an integer.

**Rounding costs no privacy.** Declared bounds are points of the grid, so a rounded value is within
them. What is rounded later (a shrunk row, a residual) is rounded towards zero, so no contribution
of a record grows, and the sensitivities of the exact rows hold.

How missing and outside values are treated is asked from `Column.parse` itself, with cells that
stand for them, so that engines cannot have rules of their own.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tacit._check import whole
from tacit.datasets import UNKNOWN, Column, Derived, Parsed, Schema
from tacit.sources.operations import BOOLEAN, INTEGER, NUMBER, TEXT, Expression, Operations

STEPS = 2**15
MOST_ROWS = 2**32
PERSON = "person"
HASH = "hash"
_PRIME = 2**31 - 1
_UNKNOWN_TEXT = "\x01 no category \x01"


MISSING, BELOW, ABOVE, NO_CATEGORY = -1, -2, -3, -2
"""Codes of cells without a value: missing, outside the bounds of a number, or no category."""


def require_engine_schema(schema: Schema) -> Schema:
    """Return the checked schema; raise for what statistics in an engine cannot use."""
    schema.check()
    if any(column.type == "weight" for column in schema.declared):
        raise ValueError(
            "statistics in an engine have no weights. Declare that column as ignored, or read the "
            "table into memory."
        )
    for column in schema.declared:
        if column.is_feature and _is_quantity(column) and not math.isfinite(_grid(column)[1]):
            raise ValueError(f"column {column.name!r}: upper - lower is too small for a grid.")
    return schema


def require_bound(schema: Schema, records_per_person: int) -> int:
    """Return the checked bound on the records of a person; 1 without a column of persons."""
    most = whole(records_per_person=records_per_person, least=1)
    if most > 1 and schema.unit != "person":
        raise ValueError("records_per_person needs a column of type person in the schema.")
    return most


def encode(
    schema: Schema, kinds: Mapping[str, str], ops: Operations, *, with_rules: bool = False
) -> dict[str, Expression]:
    """Return the codes of the rows of an engine, whose columns have the types `kinds`.

    A number is its place on the grid, a category its index, a threshold or truth value 0 or 1.
    Cells without a value have the codes below 0 that the module defines, or, `with_rules`, the
    codes that the rules of their column give them.
    """
    codes = {
        f"c{k}": _code(column, kinds[column.name], ops, schema, with_rules=with_rules)
        for k, column in enumerate(_coded(schema))
    }
    for k, derived in enumerate(schema.derived_features):
        codes[f"d{k}"] = _derived_code(derived, kinds, ops)
    return codes


def encode_cells(schema: Schema, cells: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the codes of cells in Python. Any: see `tacit.datasets.Cells`."""
    rules, codes = schema.dialect.rules, {}
    for index, column in enumerate(_coded(schema)):
        parsed = column.parse(cells[column.name], rules)
        values, outside = parsed.values, np.full(len(parsed.values), NO_CATEGORY)
        is_missing = parsed.is_missing
        if _is_quantity(column):
            lower, scale = _grid(column)
            code = _rounded_array(values, lower, scale)
            # Where the rule is "missing", both sides become the same value.
            outside = np.where(code <= STEPS, BELOW, ABOVE)
            if column.outside != "missing":  # then only a text that is no number is absent
                is_missing = is_missing | parsed.is_absent
        elif column.at_least is not None:
            code = (values >= column.at_least).astype(np.int64)
        else:
            code = np.nan_to_num(values, nan=-1.0).astype(np.int64)
        code = np.where(parsed.is_outside, outside, code)
        codes[f"c{index}"] = np.where(is_missing, MISSING, code)
    for index, derived in enumerate(schema.derived_features):
        value = derived.values(cells, rules)
        is_indicator = derived.at_least is not None
        codes[f"d{index}"] = (
            value.astype(np.int64) if is_indicator else _rounded_array(value, -1.0, float(STEPS))
        )
    return codes


def apply_rules(schema: Schema, ops: Operations) -> dict[str, Expression]:
    """Return the codes of rows with the rules of their columns for cells without a value."""
    codes: dict[str, Expression] = {name: ops.column(name) for name in code_names(schema)}
    for index, column in enumerate(_coded(schema)):
        code, ruled = codes[f"c{index}"], _ruled(column, schema)
        cases = [(code == special, new) for special, new in enumerate_special(ruled)]
        codes[f"c{index}"] = ops.where(cases, code)
    return codes


def features(schema: Schema, ops: Operations) -> dict[str, Expression]:
    """Return the features z0, z1, ... and, if declared, the target y, from codes with rules.

    A numeric target is on the grid like a feature; a target with classes is its class number. Rows
    without a target must have been left out (`has_target`).
    """
    found: list[Expression] = []
    target: dict[str, Expression] = {}
    for index, column in enumerate(_coded(schema)):
        code = ops.column(f"c{index}")
        if column.name == schema.target:
            target["y"] = code if column.n_classes else _centered(column, code, ops)
        elif column.type == "category":
            found += [ops.where([(code == k, STEPS)], 0) for k in range(len(column.categories))]
        elif column.is_indicator:
            found.append(ops.where([(code == 1, STEPS)], 0))
        else:
            found.append(_centered(column, code, ops))
    for index, derived in enumerate(schema.derived_features):
        code = ops.column(f"d{index}")
        found.append(code * STEPS if derived.at_least is not None else code - STEPS)
    return {**{f"z{k}": z for k, z in enumerate(found)}, **target}


def has_target(schema: Schema, ops: Operations) -> Expression | None:
    """Return whether a row of codes with rules has a target; None if the schema names none."""
    for index, column in enumerate(_coded(schema)):
        if column.name == schema.target:
            return ops.column(f"c{index}") >= 0
    return None


def flags(schema: Schema, ops: Operations) -> dict[str, Expression]:
    """Return f0, f1, ...: 1 where a cell is not as declared, for each of `flagged_names`."""
    found: dict[str, Expression] = {}
    for index, column in enumerate(_coded(schema)):
        flagged = [int(flag) for flag in column.flags(_special(column))]
        cases = [
            (ops.column(f"c{index}") == code, flag) for code, flag in enumerate_special(flagged)
        ]
        found[f"f{index}"] = ops.where(cases, 0)
    return found


def flagged_names(schema: Schema) -> list[str]:
    """Return the names of the columns whose cells are checked."""
    return [column.name for column in _coded(schema)]


def enumerate_special(values: Sequence[int]) -> list[tuple[int, int]]:
    """Return the codes of cells without a value, each with its entry of `values`."""
    return list(zip((MISSING, BELOW, ABOVE), values, strict=False))


def summarized(schema: Schema) -> dict[str, Column]:
    """Return the columns that can be summarized, by the names of their codes."""
    return {f"c{k}": column for k, column in enumerate(_coded(schema))}


def plain_values(column: Column, codes: Sequence[int]) -> list[Any]:
    """Return what codes stand for, as `Column.plain` does: numbers, or texts and None."""
    if not _is_quantity(column):
        names = dict(enumerate(column.classes)) | {MISSING: None, NO_CATEGORY: UNKNOWN}
        if column.at_least is not None:
            low, high = math.nextafter(column.at_least, -math.inf), column.at_least
            names = {0: low, 1: high, MISSING: math.nan}
        return [names[code] for code in codes]
    lower, scale = _grid(column)
    special = {MISSING: math.nan, BELOW: -math.inf, ABOVE: math.inf}
    return [special.get(code, lower + code / scale) for code in codes]


def choice_order(schema: Schema, ops: Operations) -> Expression:
    """Return a public pseudorandom integer in [0, 2^31) of the codes of a row.

    The records of a person with the smallest numbers are kept. The number depends on the record
    alone: not on the order of the rows, nor on the engine. A polynomial hash modulo a prime: all
    products stay below 2^62.
    """
    total: Expression = 1
    for name in code_names(schema):
        # codes are in [-3, 2^16], so a term is below 2^48, and 2^14 terms below 2^62
        total = total + (ops.column(name) + 3) * _multiplier(name)
    first = total % _PRIME
    return (first * (first + _multiplier("square") % 2**30)) % _PRIME


def code_names(schema: Schema) -> list[str]:
    """Return the names of the code columns."""
    codes = [f"c{k}" for k in range(len(_coded(schema)))]
    return [*codes, *(f"d{k}" for k in range(len(schema.derived_features)))]


def person_column(schema: Schema) -> Column | None:
    """Return the column that names persons; None if the unit is a record."""
    return next((c for c in schema.declared if c.type == "person"), None)


def person_key(
    schema: Schema, column: Column, kind: str, ops: Operations
) -> tuple[Expression, Expression]:
    """Return the id of a row's person, and whether it is missing."""
    if kind == NUMBER:  # the same rules as in `Column.ids`
        number = ops.number(column.name, kind)
        is_rounded = (number >= 2.0**53) | (number <= -(2.0**53))
        return ops.where([(number == 0.0, 0.0)], number), ops.is_absent(number) | is_rounded
    if kind != TEXT:  # as it is stored: doubles cannot tell large integers apart
        key = ops.exact(column.name, kind)
        return key, ops.is_absent(key)
    text = ops.text(column.name)
    missing = ops.is_absent(text)
    for mark in sorted(schema.dialect.rules.missing):
        missing = missing | (text == mark)
    return text, missing


def _coded(schema: Schema) -> tuple[Column, ...]:
    return tuple(c for c in schema.declared if c.is_feature)


def _is_quantity(column: Column) -> bool:
    return column.lower is not None


def _ends(column: Column) -> tuple[float, float]:
    assert column.lower is not None  # a quantity, like the next one
    assert column.upper is not None
    return float(column.lower), float(column.upper)


def _grid(column: Column) -> tuple[float, float]:
    """Return the lower bound of a number, and the steps of the grid per unit."""
    lower, upper = _ends(column)
    return lower, 2 * STEPS / (upper - lower)


def _code(
    column: Column, kind: str, ops: Operations, schema: Schema, *, with_rules: bool
) -> Expression:
    """Return the code of a column of an engine."""
    instead = _ruled(column, schema) if with_rules else [MISSING, BELOW, ABOVE]
    if column.categories or column.type == "boolean":
        return _category_code(column, kind, ops, schema, instead)
    if kind == TEXT:
        raise ValueError(
            f"column {column.name!r} is declared as a number, but is text in this table. Cast it "
            "there, in a view for example."
        )
    value = ops.number(column.name, kind)
    absent = (ops.is_absent(value), instead[0])
    if column.at_least is not None:
        return ops.where([absent, (value >= float(column.at_least), 1)], 0)
    lower, upper = _ends(column)
    if with_rules and min(instead) >= 0:  # no detour through codes of cells without a value
        unknown, low, high = (float(number) for number in _special(column).values)
        value = ops.within(column.name, kind, (lower, upper), (unknown, low, high))
        return _rounded(value, *_grid(column), ops)
    inside = ops.within(column.name, kind, (lower, upper), (lower, lower, lower))
    outside = [(value < lower, instead[1]), (value > upper, instead[2])]
    return ops.where([absent, *outside], _rounded(inside, *_grid(column), ops))


def _category_code(
    column: Column, kind: str, ops: Operations, schema: Schema, instead: Sequence[int]
) -> Expression:
    """Return the index of a category, or 0 or 1 of a truth value.

    `instead` are the codes of a missing cell, and of a cell that is no category.
    """
    missing, unknown = instead[:2]
    if kind == TEXT:
        value = ops.text(column.name)
        spelled: list[Any] = list(column.spellings)
        absent = ops.is_absent(value)
        for mark in sorted(schema.dialect.rules.missing - set(column.categories)):
            absent = absent | (value == mark)
        if column.type == "boolean":
            value = ops.folded(value)
        parsed = column.parse(tuple(spelled), schema.dialect.rules)
    else:
        is_exact = kind == INTEGER  # categories may be integers that are no doubles
        value = ops.exact(column.name, kind) if is_exact else ops.number(column.name, kind)
        absent = ops.is_absent(value)
        spelled = [0.0, 1.0] if kind == BOOLEAN else _numbers_in(column.spellings, kind)
        parsed = column.parse([bool(x) for x in spelled] if kind == BOOLEAN else spelled)
    found: Expression = 0
    for cell, code, is_outside in zip(spelled, parsed.values, parsed.is_outside, strict=True):
        if not is_outside:
            found = found + ops.where([(value == cell, int(code) + 1)], 0)
    if isinstance(found, int):  # no cell of this type can be a category
        return ops.where([(absent, missing)], unknown)
    return ops.where([(absent, missing), (found == 0, unknown)], found - 1)


def _special(column: Column) -> Parsed:
    """Return what the rules make of cells without a value, in the order of `enumerate_special`."""
    if column.categories or column.type == "boolean":
        return column.parse((None, _UNKNOWN_TEXT))
    return column.parse(np.array([math.nan, -math.inf, math.inf]))


def _ruled(column: Column, schema: Schema) -> list[int]:
    """Return the codes that the rules give to `_special` cells, in the same order.

    A target without a usable value keeps the code `MISSING`: its row is left out.
    """
    values, *_, is_absent = _special(column)
    if _is_quantity(column):
        codes = _rounded_array(values, *_grid(column))
    elif column.at_least is not None:
        codes = (values >= column.at_least).astype(np.int64)
    else:
        codes = np.nan_to_num(values, nan=MISSING).astype(np.int64)
    if column.name == schema.target:
        codes = np.where(is_absent, MISSING, codes)
    return codes.tolist()


def _numbers_in(texts: Sequence[str], kind: str) -> list[float]:
    """Return the texts that are finite numbers, as numbers; for integers those of 64 bits."""
    found: list[float] = []
    for text in texts:
        try:
            number = int(text) if kind == INTEGER else float(text)
        except ValueError:
            continue
        if abs(number) < (2**63 if kind == INTEGER else math.inf) and number not in found:
            found.append(number)
    return found


def _derived_code(derived: Derived, kinds: Mapping[str, str], ops: Operations) -> Expression:
    for name in derived.used:
        if kinds[name] == TEXT:
            raise ValueError(f"derived {derived.name!r} needs numbers, but {name!r} is text.")
    numbers = [ops.number(name, kinds[name]) for name in derived.used]
    if derived.at_least is not None:
        is_above = numbers[0] >= float(derived.at_least)
        return ops.where([(ops.is_absent(numbers[0]), 0), (is_above, 1)], 0)
    largest = float(np.finfo(np.float64).max)
    product: Expression = 1.0
    for value in numbers:
        cases = [(ops.is_absent(value), 0.0), (value > largest, largest)]
        product = product * ops.where([*cases, (value < -largest, -largest)], value)
    clipped = ops.where([(product < -1.0, -1.0), (product > 1.0, 1.0)], product)
    return _rounded(clipped, -1.0, float(STEPS), ops)


def _centered(column: Column, code: Expression, ops: Operations) -> Expression:
    """Return a number or an ordered category in [-STEPS, STEPS]; 0 without a category."""
    if _is_quantity(column):
        return code - STEPS
    half = len(column.categories) - 1
    scaled = [(code == k, round(STEPS * (2 * k - half) / half)) for k in range(half + 1)]
    return ops.where(scaled, 0)


def _rounded(value: Expression, lower: float, scale: float, ops: Operations) -> Expression:
    """Return the nearest of the points lower, lower + 1 / scale, ..., as its number."""
    return ops.floor(ops.product(value - lower, scale) + 0.5)


def _rounded_array(values: np.ndarray, lower: float, scale: float) -> np.ndarray:
    return np.floor((values - lower) * scale + 0.5).astype(np.int64)


def _multiplier(name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=8, person=b"tacit choice")
    return int.from_bytes(digest.digest(), "little") % _PRIME
