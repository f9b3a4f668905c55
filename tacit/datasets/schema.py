"""The schema of a table: declared columns, as a scikit-learn transformer that learns nothing.

Guarantee: every row is encoded by itself and by public declarations alone, so a model that is
private for the encoded rows is private for the rows of the table. Numbers are clipped to their
bounds and mapped to [-1, 1]. A column of categories becomes one 0/1 feature per category.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.validation import validate_data

from tacit._arrays import Flags
from tacit._check import did_you_mean, known_key
from tacit.datasets.columns import CellRules, Cells, Column, Singles
from tacit.datasets.csv_lines import FIELDS, Dialect, find_columns
from tacit.datasets.declaration import (
    LARGEST_FILE,
    SourceLines,
    column_of,
    parse_toml,
)
from tacit.datasets.frames import as_frame, checked_array, frame_cells

_SECTIONS = ("target", "columns", "derived", "file", "default")
_DERIVED = ("name", "column", "at_least", "product")


@dataclass(frozen=True, kw_only=True)
class Derived:
    """A feature computed from columns of the same row: a threshold, or a product of columns."""

    name: str
    column: str = ""
    at_least: float | None = None
    product: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.product) == (self.at_least is not None) or bool(self.product) == bool(
            self.column
        ):
            raise ValueError(
                f"derived {self.name!r} must give 'column' and 'at_least', or 'product'."
            )

    @property
    def used(self) -> tuple[str, ...]:
        """Names of the columns that the feature is computed from."""
        return self.product or (self.column,)

    def encode(self, cells: Mapping[str, Cells], rules: CellRules) -> Singles:
        """Return `values` as a feature (rows, 1) in float32."""
        return self.values(cells, rules).astype(np.float32)[:, None]

    def values(self, cells: Mapping[str, Cells], rules: CellRules) -> np.ndarray:
        """Return 0 or 1 for a threshold, or a product clipped to [-1, 1], (rows,)."""
        numbers = [_REAL.parse(cells[name], rules).values for name in self.used]
        if self.at_least is not None:
            return (numbers[0] >= self.at_least).astype(np.float64)
        product = np.ones(len(numbers[0]))
        with np.errstate(over="ignore", under="ignore"):  # a warning would reveal a record
            for factor in numbers:
                product *= np.nan_to_num(factor)
        return np.clip(np.nan_to_num(product), -1.0, 1.0)


class FeatureBounds(NamedTuple):
    """Bounds of the encoded features: what `bounds` of a private estimator takes."""

    lower: tuple[float, ...]
    upper: tuple[float, ...]
    norm: float | None
    labels: tuple[str, ...] = ()
    """Names of the features."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Positions of the features that encode one column of categories, its reference first."""


class EncodedRows(NamedTuple):
    """Encoded rows of a table. Private."""

    x: np.ndarray
    """Features in float32, (rows, features)."""
    y: np.ndarray | None
    """Class numbers, or numbers scaled to [-1, 1]; None if the target was not read."""
    flags: Flags
    """Which cells the schema does not describe, (rows, `Schema.checked`)."""
    persons: tuple[str | None, ...] | None
    """Ids of the persons; None if the schema declares no person."""
    weights: np.ndarray | None
    """Weights divided by their upper bound; None if the schema declares no weight."""
    has_target: Flags
    """Which rows have a target that can be used, or one that the schema declares for them; all
    rows if the target was not read."""


class Schema(TransformerMixin, BaseEstimator):
    """Declared features and target of a table; `Schema.read` reads it from a TOML file.

    `fit` learns nothing. `transform` takes a pandas or polars data frame or a pyarrow table, by
    column name, or an array with the declared features in their order.

    Parameters
    ----------
    columns
        What each column may hold: `{"age": [18, 93], "sex": ["f", "m"], "id": "ignored"}`; see
        `Column` for all settings. Columns that are not named are ignored.
    target
        Name of the column to predict.
    derived
        Further features: `Derived`, or dictionaries with its settings.
    file
        How the file is written: a `Dialect`, or a dictionary with its settings.
    default
        Declaration of every column that is not named, as in `default=[0, 255]`; `columns` must then
        be left out.

    Examples
    --------
    >>> import pandas as pd
    >>> schema = Schema({"age": [18, 93], "sex": ["f", "m"]})
    >>> schema.fit_transform(pd.DataFrame({"sex": ["m", "f"], "age": [18, 200]})).tolist()
    [[-1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
    >>> schema.get_feature_names_out().tolist()
    ['age', 'sex=f', 'sex=m']
    """

    def __init__(
        self,
        columns: Mapping[str, Any] | Sequence[Column] | None = None,
        *,
        target: str = "",
        derived: Sequence[Any] = (),
        file: Any = None,
        default: Any = None,
    ) -> None:
        self.columns = columns
        self.target = target
        self.derived = derived
        self.file = file
        self.default = default

    @classmethod
    def read(cls, path: str | Path) -> "Schema":
        """Return the schema in a TOML file."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"there is no schema file {path}. See: tacit schema init")
        if path.stat().st_size > LARGEST_FILE:
            raise ValueError(f"{path.name} is too large for a schema.")
        try:
            return cls.parse(path.read_bytes().decode("utf-8-sig"))
        except UnicodeDecodeError:
            raise ValueError(f"{path.name} is no schema: it is not text in UTF-8.") from None
        except ValueError as wrong:
            raise ValueError(f"{path.name}, {wrong}") from None

    @classmethod
    def parse(cls, text: str) -> "Schema":
        """Return the schema in TOML text."""
        return cls.from_dict(parse_toml(text), SourceLines(text))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], lines: SourceLines | None = None) -> "Schema":
        """Return the schema in a dictionary: target, columns, derived, file, as in TOML.

        `lines` gives the line numbers for errors.
        """
        lines = lines or SourceLines()
        for key in data:
            try:
                known_key("a schema", key, _SECTIONS)
            except ValueError as wrong:
                raise ValueError(f"{lines.prefix(key)}{wrong}") from None
        columns = data.get("columns")
        if not isinstance(columns, Mapping) or not columns:
            raise ValueError("a schema must have at least one column under [columns].")
        declared = []
        for name, given in columns.items():
            try:
                declared.append(column_of(name, given))
            except ValueError as wrong:
                raise ValueError(f"{lines.prefix('columns', name)}{wrong}") from None
        target = data.get("target", "")
        schema = cls(
            tuple(declared),
            target=target if isinstance(target, str) else "",
            derived=_derived(data.get("derived", ()), lines),
            file=_dialect(data.get("file", {}), lines),
        )
        try:
            if not isinstance(target, str):
                raise ValueError("target must be the name of a column, in quotes.")
            schema.check()
        except ValueError as wrong:
            raise ValueError(f"{lines.prefix('target')}{wrong}") from None
        return schema

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that `from_dict` reads back to an equal schema."""
        columns = {c.name: _plain(c, "name") for c in self.declared}
        found: dict[str, Any] = {"target": self.target} if self.target else {}
        found["columns"] = columns
        if self.derived:
            found["derived"] = [_plain(d) for d in _derived(self.derived)]
        dialect = _plain(self.dialect)
        plain = _plain(Dialect())
        if changed := {k: v for k, v in dialect.items() if plain.get(k) != v}:
            found["file"] = changed
        return found

    def check(self) -> Self:
        """Raise if a declaration is wrong; return the schema. `parse` and `fit` call this."""
        declared = self.declared
        names = [c.name for c in declared]
        if len(set(names)) < len(names):
            raise ValueError("a schema must declare each column once.")
        if self.target and self.target not in names:
            advice = did_you_mean(self.target, names)
            raise ValueError(f"target {self.target!r} must be one of the declared columns.{advice}")
        if self.target and not self._target.is_feature:
            raise ValueError(f"target {self.target!r} cannot be of type {self._target.type}.")
        for kind in ("person", "weight"):
            if sum(c.type == kind for c in declared) > 1:
                raise ValueError(f"a schema may declare one column of type {kind}.")
        outputs = self.feature_names
        if len(set(outputs)) < len(outputs):
            raise ValueError("two features of the schema would have the same name.")
        return self

    @property
    def declared(self) -> tuple[Column, ...]:
        """The declared columns."""
        given = self.columns or ()
        if isinstance(given, Mapping):
            return tuple(column_of(name, value) for name, value in given.items())
        return tuple(given)

    @property
    def dialect(self) -> Dialect:
        """How the file is written."""
        return self.file if isinstance(self.file, Dialect) else Dialect.from_dict(self.file or {})

    @property
    def features(self) -> tuple[Column, ...]:
        """The columns that become features: all but the target, ignored, person and weight."""
        return tuple(c for c in self.declared if c.name != self.target and c.is_feature)

    @property
    def derived_features(self) -> tuple[Derived, ...]:
        """The derived features, which come after those of the columns."""
        return _derived(self.derived)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the encoded features, in the order of the encoded columns."""
        own = [out for c in self.features for out in c.outputs]
        return (*own, *(d.name for d in _derived(self.derived)))

    @property
    def n_classes(self) -> int | None:
        """Number of classes of the target; None if the target is numeric."""
        return self._target.n_classes

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes of the target; empty if the target is numeric."""
        return self._target.classes

    @property
    def needed(self) -> list[str]:
        """Names of the file's columns that training uses; all other columns are ignored."""
        return self.needed_for(training=True)

    def needed_for(self, *, training: bool) -> list[str]:
        """Return the names of the columns that are read: for a prediction, features alone."""
        read = (c for c in self.declared if c.type != "ignored") if training else self.features
        extra = [name for d in _derived(self.derived) for name in d.used]
        return list(dict.fromkeys([*(c.name for c in read), *extra]))

    @property
    def checked(self) -> tuple[str, ...]:
        """Names of what the paid check counts: lines, features, weights and the target."""
        return (FIELDS, *(c.name for c in self.declared if c.type not in ("ignored", "person")))

    @property
    def checked_features(self) -> tuple[str, ...]:
        """Names of what is checked before a prediction: lines and features."""
        return (FIELDS, *(c.name for c in self.features))

    @property
    def bounds(self) -> FeatureBounds:
        """Bounds of the encoded features, for the `bounds` of a private estimator.

        A column of categories is encoded with at most one 1, so the norm of a row is at most the
        square root of the number of columns, whatever the number of categories.
        """
        columns, derived = self.features, _derived(self.derived)
        lower = [0.0 if c.is_indicator else -1.0 for c in columns for _ in c.outputs]
        lower += [0.0 if d.at_least is not None else -1.0 for d in derived]
        norm = (len(columns) + len(derived)) ** 0.5
        has_categories = any(c.type == "category" for c in columns)
        if not has_categories:
            lower = [-1.0] * len(lower)
        upper, used = (1.0,) * len(lower), norm if has_categories else None
        return FeatureBounds(tuple(lower), upper, used, self.feature_names, self._groups)

    @property
    def _groups(self) -> tuple[tuple[int, ...], ...]:
        found, start = [], 0
        for column in self.features:
            places = list(range(start, start + len(column.outputs)))
            if column.type == "category":
                first = column.categories.index(column.reference) if column.reference else 0
                found.append((places.pop(first), *places))
            start += len(column.outputs)
        return tuple(found)

    @property
    def unit(self) -> str:
        """The unit of privacy: "person" if a column names persons, else "record"."""
        return "person" if any(c.type == "person" for c in self.declared) else "record"

    @property
    def target_column(self) -> Column:
        """The declared target; raises if the schema names none."""
        return self._target

    @property
    def _target(self) -> Column:
        for column in self.declared:
            if column.name == self.target:
                return column
        raise ValueError("the schema names no target. Add: target = 'NAME'")

    def encode(self, frame: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the encoded features (rows, features) in float32, and the encoded target.

        The target is a class number, or a number scaled to [-1, 1]. A row without a target (missing
        or not declared, and no `missing` in its declaration) is left out. Each row decides that for
        itself, so neighboring tables still differ in one row. How many rows are left is private:
        pass the number of rows of `frame` as `n_records` of an estimator.
        """
        rows = self.encode_rows(self._cells_of(frame, training=True))
        assert rows.y is not None  # the schema's target, checked when the cells were read
        return rows.x[rows.has_target], rows.y[rows.has_target]

    def encode_rows(self, cells: Mapping[str, Cells]) -> EncodedRows:
        """Return the encoded rows of the columns in `cells`: all of `needed`, or features alone."""
        rules, parts, weights, y, persons = self.dialect.rules, [], None, None, None
        has_target = None
        flags = [np.isnan(cells[FIELDS])] if FIELDS in cells else []
        for column in self.declared:
            if column.type == "ignored" or column.name not in cells:
                continue
            if column.type == "person":
                persons = tuple(column.ids(cells[column.name], rules))
                continue
            parsed = column.parse(cells[column.name], rules)
            flags.append(column.flags(parsed))
            if column.type == "weight":
                weights = parsed.values / (column.upper or 1.0)
            elif column.name == self.target:
                y, has_target = column.targets(parsed), ~parsed.is_absent
            else:
                parts.append(column.features(parsed))
        parts += [d.encode(cells, rules) for d in _derived(self.derived)]
        x = _joined(parts, cells)
        if FIELDS not in cells:  # a data frame has no lines
            flags.insert(0, np.zeros(len(x), np.bool_))
        if has_target is None:
            has_target = np.ones(len(x), np.bool_)
        return EncodedRows(x, y, np.stack(flags, axis=1), persons, weights, has_target)

    def fit(self, X: Any, y: object = None) -> Self:  # noqa: ARG002  # the interface of scikit-learn
        """Check the declaration and the names of the columns of `X`; learn nothing from values."""
        self.check()
        self._cells_of(X, reset=True)
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Return the encoded features of the rows of `X`, in float32."""
        cells = self._cells_of(X)
        schema = self._for_all(cells) if self.default is not None else self
        return schema.encode_rows(cells).x

    def get_feature_names_out(self, input_features: object = None) -> np.ndarray:  # noqa: ARG002
        """Return the names of the encoded features."""
        if self.default is not None:
            names = getattr(self, "feature_names_in_", None)
            names = [f"x{k}" for k in range(self.n_features_in_)] if names is None else names
            return np.asarray(self._for_all(dict.fromkeys(names)).feature_names, object)
        return np.asarray(self.feature_names, object)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.requires_fit = False
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        tags.input_tags.categorical = True
        tags.input_tags.sparse = False
        assert tags.transformer_tags is not None
        tags.transformer_tags.preserves_dtype = []
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return self.default is None or hasattr(self, "n_features_in_")

    def _for_all(self, names: Mapping[str, Any]) -> "Schema":
        """Return the schema in which each of `names` has the default declaration."""
        return Schema({name: _renamed(name, self.default) for name in names})

    def _cells_of(
        self, table: Any, *, training: bool = False, reset: bool = False
    ) -> dict[str, Cells]:
        """Return the columns of a data frame by name, or of an array by place."""
        frame = as_frame(table)
        if self.default is not None:
            if self.columns:
                raise ValueError("give columns or default, not both.")
            if frame is not None:
                validate_data(self, table, reset=reset, skip_check_array=True)
                return frame_cells(frame, frame.columns)
            array = checked_array(self, table, reset=reset)
            return {f"x{k}": array[:, k] for k in range(array.shape[1])}
        needed = self.needed_for(training=training)
        if training:
            self.target_column  # noqa: B018  # raises if there is none
        if frame is not None:
            find_columns("the table", needed, frame.columns)
            if reset:
                self.n_features_in_ = len(needed)
            return frame_cells(frame, needed)
        names = [c.name for c in self.features]
        if needed != names:
            raise ValueError("this schema needs a table with column names, not an array.")
        array = checked_array(self, table, reset=reset)
        if array.shape[1] != len(names):
            raise ValueError(
                f"X has {array.shape[1]} features, but Schema is expecting {len(names)} features "
                "as input. Pass a table with column names, or the declared features in order."
            )
        return {name: array[:, k] for k, name in enumerate(names)}


def _joined(parts: Sequence[np.ndarray], cells: Mapping[str, Cells]) -> np.ndarray:
    n_rows = len(next(iter(cells.values()))) if cells else 0
    return np.concatenate(parts, axis=1) if parts else np.zeros((n_rows, 0), np.float32)


def _renamed(name: str, given: Any) -> Column:
    if isinstance(given, Column):
        return replace(given, name=name)
    return column_of(name, given)


def _dialect(given: Any, lines: SourceLines) -> Dialect:
    """Return the dialect of section [file]; an error names the line of the wrong setting."""
    known = Dialect.__dataclass_fields__
    unknown = [key for key in given if key not in known] if isinstance(given, Mapping) else []
    try:
        return Dialect.from_dict(given)
    except ValueError as wrong:
        raise ValueError(f"{lines.prefix('file', *unknown[:1])}{wrong}") from None


def _derived(given: Any, lines: SourceLines | None = None) -> tuple[Derived, ...]:
    """Return derived features from `Derived` objects or dictionaries with their settings."""
    lines = lines or SourceLines()
    if isinstance(given, Mapping) or not isinstance(given, Sequence) or isinstance(given, str):
        raise ValueError(f"{lines.prefix('derived')}write each derived feature as [[derived]].")
    found = []
    for one in given:
        try:
            found.append(one if isinstance(one, Derived) else _derived_of(one))
        except ValueError as wrong:
            raise ValueError(f"{lines.prefix('derived')}{wrong}") from None
    return tuple(found)


def _derived_of(given: Any) -> Derived:
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise ValueError("a derived feature must have a name.")
    for key, value in given.items():
        known_key(f"derived {given['name']!r}", key, _DERIVED)
        is_texts = isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        right = {"at_least": is_number, "product": is_texts}.get(key, isinstance(value, str))
        if not right:
            raise ValueError(f"derived {given['name']!r}: {key} has a value of another type.")
    settings: dict[str, Any] = {k: tuple(v) if k == "product" else v for k, v in given.items()}
    return Derived(**settings)


def _plain(declaration: Any, *without: str) -> dict[str, Any]:
    """Return the settings of a frozen declaration that are not empty, as TOML values."""
    found = {k: v for k, v in vars(declaration).items() if k not in without}
    found = {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}
    return {k: v for k, v in found.items() if v not in (None, "", [])}


_REAL = Column(name="number", at_least=0.0)  # reads any number, without bounds
