"""Released statistics: values with confidence intervals, alone or as a table."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context
from typing import Any

import numpy as np

from tacit._arrays import Floats
from tacit._check import one_of
from tacit.events import Event, Relation

RECORDS, POPULATION = "records", "population"
"""What an interval is about: the records of the table, or the population they were drawn from."""


@dataclass(frozen=True)
class Statistic:
    """A released value with a confidence interval. Nothing in it is private.

    `about` says what the interval contains with probability `confidence`: "records", the exact
    value in the table, so that only the noise is uncertain; or "population", the value in the
    population of which the records are independent draws, so that noise and chance are.

    >>> Statistic("mean", 41.3, 40.9, 41.7)
    mean 41.3 [40.9, 41.7], 95 % interval, population
    """

    name: str
    value: float
    lower: float
    upper: float
    confidence: float = 0.95
    about: str = POPULATION
    column: str = ""
    event: Event | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        where = f"{self.column}: " if self.column else ""
        return (
            f"{where}{self.name} {self.value:.6g} [{self.lower:.6g}, {self.upper:.6g}], "
            f"{100 * self.confidence:.4g} % interval, {self.about}"
        )

    def rounded(self, digits: int = 6) -> "Statistic":
        """Return the statistic with a value of `digits` digits and the interval rounded outwards.

        >>> Statistic("mean", 2 / 3, 1 / 3, 7 / 6).rounded(3)
        mean 0.667 [0.333, 1.17], 95 % interval, population
        """
        ends = (
            (self.value, ROUND_HALF_EVEN),
            (self.lower, ROUND_FLOOR),
            (self.upper, ROUND_CEILING),
        )
        value, lower, upper = (_rounded(x, digits, rule) for x, rule in ends)
        return replace(self, value=value, lower=lower, upper=upper)

    def to_dict(self) -> dict[str, Any]:  # Any: JSON values
        """Return the statistic as plain JSON values; infinite ends of an interval are None."""
        numbers = {name: _finite(getattr(self, name)) for name in ("value", "lower", "upper")}
        names = {"column": self.column, "statistic": self.name}
        return names | numbers | {"confidence": self.confidence, "about": self.about}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Statistic":  # Any: JSON values
        """Return the statistic that `to_dict` turned into `data`, without its event."""
        value, lower, upper = (data[name] for name in ("value", "lower", "upper"))
        return cls(
            data["statistic"],
            math.nan if value is None else value,
            -math.inf if lower is None else lower,
            math.inf if upper is None else upper,
            data["confidence"],
            data["about"],
            data["column"],
        )


@dataclass(frozen=True, repr=False)
class StatisticTable:
    """Statistics that were released together, with the event that was paid for all of them.

    Rows are found by name, or by column and name: `table["age", "mean"]`. `print` shows a table.
    Each interval holds with its own confidence, not all of them at once.
    """

    rows: tuple[Statistic, ...]
    event: Event
    epsilon: float
    delta: float
    relation: Relation
    note: str = ""

    @property
    def values(self) -> Floats:
        """Released values, one per row."""
        return np.array([row.value for row in self.rows])

    @property
    def lower(self) -> Floats:
        """Lower ends of the intervals."""
        return np.array([row.lower for row in self.rows])

    @property
    def upper(self) -> Floats:
        """Upper ends of the intervals."""
        return np.array([row.upper for row in self.rows])

    def __iter__(self) -> Iterator[Statistic]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: str | tuple[str, str]) -> Statistic:
        column, name = key if isinstance(key, tuple) else ("", key)
        found = [row for row in self.rows if row.name == name and column in ("", row.column)]
        if len(found) != 1:
            problem = "no" if not found else "more than one"
            raise KeyError(f"{problem} statistic {key!r}. Rows are found by (column, name).")
        return found[0]

    def __repr__(self) -> str:
        return f"<StatisticTable of {len(self.rows)} rows, {self._guarantee()}>"

    def __str__(self) -> str:
        return "\n".join([*aligned(self.rows), self._guarantee()])

    def to_dict(self) -> dict[str, Any]:  # Any: JSON values
        """Return rows and guarantee as plain JSON values."""
        return {
            "rows": [row.to_dict() for row in self.rows],
            "epsilon": self.epsilon,
            "delta": self.delta,
            "relation": str(self.relation),
            "note": self.note,
            "event": self.event.to_dict(),
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False, ensure_ascii=False)

    def rounded(self, digits: int = 6) -> "StatisticTable":
        """Return the table with values of `digits` digits and intervals rounded outwards."""
        return replace(self, rows=tuple(row.rounded(digits) for row in self.rows))

    def _guarantee(self) -> str:
        return f"epsilon {self.epsilon:g}, delta {self.delta:g}, {self.relation}"


def check_about(about: str) -> str:
    """Return `about`; raise unless it is "population" or "records"."""
    one_of((POPULATION, RECORDS), about=about)
    return about


def aligned(rows: tuple[Statistic, ...]) -> list[str]:
    """Return the rows as lines of text with aligned columns, under a line of headings."""
    cells = [("column", "statistic", "value", "lower", "upper", "interval for")]
    cells += [
        (row.column, row.name, *(f"{x:.6g}" for x in (row.value, row.lower, row.upper)), row.about)
        for row in rows
    ]
    if not any(row.column for row in rows):
        cells = [line[1:] for line in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    n_left = len(widths) - 4  # names are aligned to the left, numbers to the right
    return [
        "  ".join(
            cell.ljust(width) if k < n_left or k == len(widths) - 1 else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _rounded(number: float, digits: int, rounding: str) -> float:
    if not np.isfinite(number):
        return number
    return float(Context(prec=digits, rounding=rounding).create_decimal(repr(float(number))))


def _finite(number: float) -> float | None:
    return float(number) if np.isfinite(number) else None
