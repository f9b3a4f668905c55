"""Tables (CSV or Parquet), encoded by a schema of declared bounds and categories.

A schema is public: its author has not looked at the values. Values outside the declared bounds are
clipped to them. Numeric columns are mapped from [lower, upper] to [-1, 1]. A column of categories
becomes one column per declared value, all zero for any other value. A missing number becomes the
declared `missing` value. How a value is read does not depend on any other row.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tacit.datasets.dataset import Dataset

if TYPE_CHECKING:
    import pandas as pd

_TRUTH = {"True": 1, "TRUE": 1, "true": 1, "False": 0, "FALSE": 0, "false": 0}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One declared column: a number with bounds, categories, or a threshold that gives 0 or 1."""

    name: str
    lower: float | None = None
    upper: float | None = None
    categories: tuple[str, ...] = ()
    at_least: float | None = None
    missing: float | None = None

    def __post_init__(self) -> None:
        has_bounds = self.lower is not None and self.upper is not None
        if has_bounds + bool(self.categories) + (self.at_least is not None) != 1:
            raise ValueError(
                f"column {self.name!r} must declare lower and upper, or categories, or at_least: "
                "one of the three."
            )
        if has_bounds and not self.middle_and_half[1] > 0:
            raise ValueError(f"column {self.name!r} must have lower < upper.")

    @property
    def n_classes(self) -> int | None:
        """Number of classes that the column has as a target; None if it is numeric."""
        return 2 if self.at_least is not None else len(self.categories) or None

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the features that encode this column; one per category, if it has categories."""
        return tuple(f"{self.name}={c}" for c in self.categories) or (self.name,)

    @property
    def middle_and_half(self) -> tuple[float, float]:
        """Middle and half width of the declared bounds, for scaling; 0 and 1 without bounds."""
        if self.lower is None or self.upper is None:
            return 0.0, 1.0
        return (self.lower + self.upper) / 2, (self.upper - self.lower) / 2

    def encode(self, values: Any) -> np.ndarray:
        """Return the encoded column (rows, outputs): numbers in [-1, 1], categories as 0 and 1.

        No value raises an error, because errors would reveal private values.
        """
        if self.categories:
            return self._one_hot(values)
        if self.at_least is not None:  # a missing number is not above the threshold
            return (_numbers(values) >= self.at_least).astype(np.float32)[:, None]
        middle, half = self.middle_and_half
        numbers = _numbers(values)
        absent = middle if self.missing is None else self.missing
        numbers = np.clip(np.where(np.isnan(numbers), absent, numbers), self.lower, self.upper)
        return ((numbers - middle) / half)[:, None].astype(np.float32)

    def _one_hot(self, values: Any) -> np.ndarray:
        """Return one column of 0 and 1 per category, each row encoded independently of others."""
        import pandas as pd

        exact = {c: k for k, c in enumerate(self.categories)}
        equal = {_number(c): k for c, k in exact.items() if _is_plain_number(c)}
        codes, found = pd.factorize(values.astype("string").str.strip())
        known = [exact.get(text, equal.get(_number(text), -1)) for text in map(str, found)]
        places = np.array([*known, -1])[codes]  # a missing value has code -1
        return (places[:, None] == np.arange(len(self.categories))).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Derived:
    """A feature computed from columns of the same row: a threshold, or a product of columns."""

    name: str
    column: str = ""
    at_least: float | None = None
    product: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.product) == (self.at_least is not None):
            raise ValueError(
                f"derived {self.name!r} must give 'column' and 'at_least', or 'product'."
            )

    def encode(self, frame: "pd.DataFrame") -> np.ndarray:
        """Return the feature (rows, 1): 0 or 1 for a threshold, or a product clipped to [-1, 1]."""
        if self.at_least is not None:
            return (_numbers(frame[self.column]) >= self.at_least).astype(np.float32)[:, None]
        total = np.ones(len(frame))
        for name in self.product:
            total *= np.nan_to_num(_numbers(frame[name]))
        return np.clip(total, -1.0, 1.0).astype(np.float32)[:, None]


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Declared features and target of a table; `Schema.read` reads it from a TOML file.

    >>> schema = Schema.parse('''
    ... target = "employed"
    ... [columns.age]
    ... lower = 18
    ... upper = 93
    ... [columns.employed]
    ... categories = ["0", "1"]
    ... ''')
    >>> schema.feature_names
    ('age',)
    """

    target: str
    columns: tuple[Column, ...]
    derived: tuple[Derived, ...] = ()

    def __post_init__(self) -> None:
        if self.target not in {c.name for c in self.columns}:
            raise ValueError(f"target {self.target!r} must be one of the declared columns.")

    @classmethod
    def read(cls, path: str | Path) -> "Schema":
        """Return the schema in a TOML file."""
        return cls.parse(Path(path).read_text(encoding="utf-8"))

    @classmethod
    def parse(cls, text: str) -> "Schema":
        """Return the schema in TOML text."""
        return cls.from_dict(tomllib.loads(text))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Schema":
        """Return the schema in a dictionary: target, [columns.NAME], [[derived]], as in TOML."""
        if extra := set(data) - {"target", "columns", "derived"}:
            raise ValueError(f"a schema has no {', '.join(sorted(extra))}.")
        if "target" not in data or not data.get("columns"):
            raise ValueError("a schema must have 'target' and at least one [columns.NAME].")
        try:
            columns = tuple(
                Column(name=name, **_tuples(given)) for name, given in data["columns"].items()
            )
            derived = tuple(Derived(**_tuples(given)) for given in data.get("derived", ()))
        except TypeError as wrong:
            raise ValueError(f"the schema cannot be read: {wrong}") from None
        return cls(target=data["target"], columns=columns, derived=derived)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the encoded features, in the order of the encoded columns."""
        own = [out for c in self.columns if c.name != self.target for out in c.outputs]
        return (*own, *(d.name for d in self.derived))

    @property
    def n_classes(self) -> int | None:
        """Number of classes of the target; None if the target is numeric."""
        return self._target.n_classes

    @property
    def needed(self) -> list[str]:
        """Names of the file's columns that the schema uses; all other columns are ignored."""
        extra = [name for d in self.derived for name in (d.column, *d.product) if name]
        return list(dict.fromkeys([c.name for c in self.columns] + extra))

    @property
    def _target(self) -> Column:
        return next(c for c in self.columns if c.name == self.target)

    def encode(self, frame: "pd.DataFrame") -> tuple[np.ndarray, np.ndarray]:
        """Return the encoded features (rows, features) in float32, and the encoded target.

        The target is a class number, or a number scaled to [-1, 1]. A row whose class is not
        declared gets class 0, because dropping the row would reveal its presence.
        """
        parts = [c.encode(frame[c.name]) for c in self.columns if c.name != self.target]
        parts += [d.encode(frame) for d in self.derived]
        target = self._target.encode(frame[self.target])
        y = target.argmax(axis=1) if self._target.categories else target[:, 0]
        y = y.astype(np.int64) if self.n_classes else y
        return np.concatenate(parts, axis=1), y


def read_chunks(
    path: str | Path, schema: Schema, *, rows: int = 65_536
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield encoded (features, target) of `rows` rows at a time, so that memory stays bounded."""
    path = Path(path)
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        for batch in parquet.ParquetFile(path).iter_batches(rows, columns=schema.needed):
            yield schema.encode(batch.to_pandas(integer_object_nulls=True))
        return
    import pandas as pd

    # Columns are read as text. A guessed column type would let one row (for example an empty field,
    # which turns whole numbers into floats) change how all other rows are read, and no noise covers
    # that.
    try:
        reader = pd.read_csv(
            path, usecols=schema.needed, chunksize=rows, skipinitialspace=True, dtype=str
        )
        with reader:
            for frame in reader:
                yield schema.encode(frame)
    except ValueError as wrong:
        raise ValueError(f"{path.name} does not fit the schema: {wrong}") from None


def read_table(
    path: str | Path, schema: Schema, *, test_share: float = 0.2, seed: int = 0
) -> Dataset:
    """Return a table as a data set, split by a random permutation of the row numbers."""
    chunks = list(read_chunks(path, schema))
    if not chunks:
        raise ValueError(f"{Path(path).name} has no rows.")
    x, y = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    order = np.random.default_rng(seed).permutation(len(x))
    n_test = round(test_share * len(x))
    test, train = np.sort(order[:n_test]), np.sort(order[n_test:])
    return Dataset(
        name=Path(path).name.split(".")[0],
        x_train=x[train],
        y_train=y[train],
        x_test=x[test],
        y_test=y[test],
        n_classes=schema.n_classes,
        feature_names=schema.feature_names,
        public=("number of records", "bounds and categories of the schema"),
    )


def _numbers(column: Any) -> np.ndarray:  # Any: pandas' stubs do not type a column's methods
    import pandas as pd

    if not pd.api.types.is_numeric_dtype(column):
        column = column.map(_TRUTH.get, na_action="ignore").where(column.isin(_TRUTH), column)
    numbers: Any = pd.to_numeric(column, errors="coerce")
    return numbers.to_numpy(dtype=np.float64, na_value=np.nan)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_plain_number(text: str) -> bool:
    """Return whether a category is a plain whole number, so that "1.0" or "01" may denote it."""
    return text.removeprefix("-").isdecimal() and text == str(int(text))


def _tuples(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(str(v) for v in value) if isinstance(value, list) else value
        for name, value in given.items()
    }
