"""The operations from which formulas about rows are built, once for each kind of engine.

A formula is a Python function that takes `Operations` and combines columns with `+ - * / %`, with
comparisons and with the methods below. Its columns are arrays of numpy, expressions of narwhals
(DuckDB, polars, pyarrow, pandas, Dask, Spark), or SQL text (PostgreSQL).

Every operation is either exact (integers, floor, choice) or rounded as IEEE 754 prescribes (sum,
product, quotient and square root of doubles). No formula uses an exponential or a logarithm, which
engines round differently. So all engines compute the same integers from the same rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

NUMBER, INTEGER, DECIMAL = "number", "integer", "decimal"  # NUMBER: a floating-point number
TEXT, BOOLEAN = "text", "boolean"
BLANKS = (
    "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007"
    "\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
)
"""Characters that are removed at both ends of a text: those that `str.strip` removes."""

Expression: TypeAlias = Any
"""A column or a formula of columns. Any: the type of the engine."""
Pair: TypeAlias = tuple[float, float]
Triple: TypeAlias = tuple[float, float, float]
Case: TypeAlias = tuple[Expression, Expression]
"""A condition, and the value that it selects."""


class Operations(Protocol):
    """What formulas use besides operators; see the module."""

    def column(self, name: str) -> Expression:
        """Return an integer column of the table."""
        ...

    def number(self, name: str, kind: str) -> Expression:
        """Return a column as a double; a missing value and NaN are absent."""
        ...

    def exact(self, name: str, kind: str) -> Expression:
        """Return a column of integers, decimals or truth values as it is; NaN is absent."""
        ...

    def text(self, name: str) -> Expression:
        """Return a column as text without blanks at its ends."""
        ...

    def folded(self, text: Expression) -> Expression:
        """Return a text in lower case."""
        ...

    def is_absent(self, value: Expression) -> Expression:
        """Return whether a value is missing."""
        ...

    def where(self, cases: Sequence[Case], otherwise: Expression) -> Expression:
        """Return the value of the first case that holds; a condition that is absent does not."""
        ...

    def within(self, name: str, kind: str, bounds: Pair, instead: Triple) -> Expression:
        """Return a column as a double within bounds.

        `instead` are the numbers for absent values, values below, and values above the bounds.
        """
        ...

    def product(self, value: Expression, factor: float) -> Expression:
        """Return a double >= 0 times a positive constant; below 1/4 it may be 0 instead."""
        ...

    def floor(self, value: Expression) -> Expression:
        """Return a double, rounded down, as an integer of 64 bits."""
        ...

    def real(self, value: Expression) -> Expression:
        """Return an integer as a double."""
        ...

    def root(self, value: Expression) -> Expression:
        """Return the square root of a double."""
        ...


class ArrayOperations:
    """Operations on arrays of numpy; the columns are integers already."""

    def __init__(self, columns: dict[str, np.ndarray]) -> None:
        self._columns = columns

    def column(self, name: str) -> Expression:
        return self._columns[name]

    def number(self, name: str, kind: str) -> Expression:
        raise NotImplementedError(f"{kind} column {name}: cells are encoded by the schema")

    def exact(self, name: str, kind: str) -> Expression:
        raise NotImplementedError(f"{kind} column {name}: cells are encoded by the schema")

    def text(self, name: str) -> Expression:
        raise NotImplementedError(f"column {name}: cells are encoded by the schema")

    def folded(self, text: Expression) -> Expression:
        return np.char.lower(text)

    def is_absent(self, value: Expression) -> Expression:
        return np.isnan(value)

    def where(self, cases: Sequence[Case], otherwise: Expression) -> Expression:
        found = otherwise
        for condition, value in reversed(cases):
            found = np.where(condition, value, found)
        return found

    def within(self, name: str, kind: str, bounds: Pair, instead: Triple) -> Expression:
        raise NotImplementedError(f"{kind} column {name}, {bounds}, {instead}: see `number`")

    def product(self, value: Expression, factor: float) -> Expression:
        return value * factor

    def floor(self, value: Expression) -> Expression:
        return np.floor(value).astype(np.int64)

    def real(self, value: Expression) -> Expression:
        return np.asarray(value, np.float64)

    def root(self, value: Expression) -> Expression:
        return np.sqrt(value)


class FrameOperations:
    """Operations of narwhals, on data frames of any library and on engines behind them.

    `is_spark` says that names are parsed: a point in a name would select a field of a column.
    """

    def __init__(self, *, is_spark: bool = False) -> None:
        import narwhals.stable.v2 as nw

        self._nw, self._is_spark = nw, is_spark

    def column(self, name: str) -> Expression:
        is_parsed = self._is_spark and not name.isidentifier()
        return self._nw.col("`" + name.replace("`", "``") + "`" if is_parsed else name)

    def number(self, name: str, kind: str) -> Expression:  # noqa: ARG002  # all kinds can be cast
        # NaN is larger than every number in some engines, and a missing value in others.
        return self.column(name).cast(self._nw.Float64).fill_nan(None)

    def exact(self, name: str, kind: str) -> Expression:  # noqa: ARG002  # none of them has NaN
        return self.column(name)

    def text(self, name: str) -> Expression:
        return self.column(name).cast(self._nw.String).str.strip_chars(BLANKS)

    def folded(self, text: Expression) -> Expression:
        return text.str.to_lowercase()

    def is_absent(self, value: Expression) -> Expression:
        return value.is_null()

    def where(self, cases: Sequence[Case], otherwise: Expression) -> Expression:
        found = self._literal(otherwise)
        for condition, value in reversed(cases):
            found = self._nw.when(condition).then(self._literal(value)).otherwise(found)
        return found

    def within(self, name: str, kind: str, bounds: Pair, instead: Triple) -> Expression:  # noqa: ARG002
        # Most values take the first case; NaN, which may pass for a large number, takes the last.
        value = self.column(name).cast(self._nw.Float64)
        (lower, upper), (absent, low, high) = bounds, instead
        cases = [((value >= lower) & (value <= upper), value), (value < lower, low)]
        return self.where([*cases, ((value > upper) & ~value.is_nan(), high)], absent)

    def product(self, value: Expression, factor: float) -> Expression:
        return value * factor

    def floor(self, value: Expression) -> Expression:
        return value.floor().cast(self._nw.Int64)

    def real(self, value: Expression) -> Expression:
        return value.cast(self._nw.Float64)

    def root(self, value: Expression) -> Expression:
        return value.sqrt()

    def _literal(self, value: Expression) -> Expression:
        if isinstance(value, int):
            return self._nw.lit(value, dtype=self._nw.Int64)
        return self._nw.lit(value) if isinstance(value, float | str) else value


@dataclass(frozen=True, eq=False)
class Sql:
    """A piece of SQL in the dialect of PostgreSQL; operators build larger pieces."""

    text: str

    def __add__(self, other: Expression) -> "Sql":
        return self._joined("+", other)

    def __sub__(self, other: Expression) -> "Sql":
        return self._joined("-", other)

    def __mul__(self, other: Expression) -> "Sql":
        return self._joined("*", other)

    def __truediv__(self, other: Expression) -> "Sql":
        return self._joined("/", other)

    def __mod__(self, other: Expression) -> "Sql":
        return self._joined("%", other)

    def __radd__(self, other: Expression) -> "Sql":
        return Sql(quoted(other)) + self

    def __rsub__(self, other: Expression) -> "Sql":
        return Sql(quoted(other)) - self

    def __rmul__(self, other: Expression) -> "Sql":
        return Sql(quoted(other)) * self

    def __rtruediv__(self, other: Expression) -> "Sql":
        return Sql(quoted(other)) / self

    def __lt__(self, other: Expression) -> "Sql":
        return self._joined("<", other)

    def __le__(self, other: Expression) -> "Sql":
        return self._joined("<=", other)

    def __gt__(self, other: Expression) -> "Sql":
        return self._joined(">", other)

    def __ge__(self, other: Expression) -> "Sql":
        return self._joined(">=", other)

    def __eq__(self, other: object) -> "Sql":  # type: ignore[override]  # a condition, as in numpy
        return self._joined("=", other)

    def __or__(self, other: "Sql") -> "Sql":
        return self._joined("OR", other)

    def _joined(self, sign: str, other: Expression) -> "Sql":
        return Sql(f"({self.text} {sign} {quoted(other)})")


class SqlOperations:
    """Operations in SQL of PostgreSQL."""

    def column(self, name: str) -> Expression:
        return Sql(identifier(name))

    def number(self, name: str, kind: str) -> Expression:
        column = identifier(name)
        if kind == BOOLEAN:
            return Sql(f"{column}::int::float8")
        # A cast of a numeric that no double can hold is an error, which would reveal the value.
        exact = f"{column}::numeric"
        return Sql(
            f"CASE WHEN {exact} = 'NaN' THEN NULL WHEN {exact} > 1e300 THEN 'Infinity'::float8 "
            f"WHEN {exact} < -1e300 THEN '-Infinity'::float8 WHEN abs({exact}) < 1e-300 "
            f"THEN 0::float8 ELSE {column}::float8 END"
            if kind == DECIMAL
            else f"nullif({column}::float8, 'NaN'::float8)"
        )

    def exact(self, name: str, kind: str) -> Expression:
        column = identifier(name)
        return Sql(f"nullif({column}, 'NaN'::numeric)" if kind == DECIMAL else column)

    def text(self, name: str) -> Expression:
        # The collation compares characters; one of the column may take different texts as equal.
        return Sql(f'btrim({identifier(name)}::text, {quoted(BLANKS)}) COLLATE "C"')

    def folded(self, text: Expression) -> Expression:
        return Sql(f"lower({text.text})")

    def is_absent(self, value: Expression) -> Expression:
        return Sql(f"({value.text} IS NULL)")

    def where(self, cases: Sequence[Case], otherwise: Expression) -> Expression:
        parts = " ".join(f"WHEN {when.text} THEN {quoted(then)}" for when, then in cases)
        return Sql(f"(CASE {parts} ELSE {quoted(otherwise)} END)")

    def within(self, name: str, kind: str, bounds: Pair, instead: Triple) -> Expression:
        value, (lower, upper), (absent, low, high) = self.number(name, kind), bounds, instead
        cases = [(self.is_absent(value), absent), (value < lower, low), (value > upper, high)]
        return self.where(cases, value)

    def product(self, value: Expression, factor: float) -> Expression:
        # A product that is too small for a double is an error of the server.
        return self.where([(value < 0.25 / factor, 0.0)], value * factor)

    def floor(self, value: Expression) -> Expression:
        return Sql(f"floor({value.text})::int8")

    def real(self, value: Expression) -> Expression:
        return Sql(f"{value.text}::float8")

    def root(self, value: Expression) -> Expression:
        return Sql(f"sqrt({value.text})")


def quoted(value: Expression) -> str:
    """Return a piece of SQL as it is, and a number or a text as a typed literal."""
    if isinstance(value, Sql):
        return value.text
    if isinstance(value, float):
        return f"'{value!r}'::float8"
    if isinstance(value, int):
        return f"{value}::int8" if value >= 0 else f"({value})::int8"
    return "'" + str(value).replace("'", "''") + "'::text"


def identifier(name: str) -> str:
    """Return a name as a quoted identifier."""
    return '"' + name.replace('"', '""') + '"'
