"""Second moments of a table, computed where its rows are, and models fitted to them.

`moments` needs one pass over the table. Linear regression (AdaSSP, or the functional mechanism for
pure DP) is fitted to them; logistic regression reads the table once per gradient. Noise is added
once, on the driver, by the mechanisms of `tacit.regression`, after the ledger has been paid.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from tacit._arrays import Floats
from tacit._check import whole
from tacit.datasets import FeatureBounds, Schema
from tacit.regression import (
    Bounds,
    LinearRegression,
    LogisticRegression,
    SecondMoments,
    fit_for_users,
)
from tacit.sources.engine_table import EngineTable, require_few_rows
from tacit.sources.grid_encoding import STEPS, require_bound, require_engine_schema
from tacit.sources.operations import Expression, Operations
from tacit.sources.places import open_table

_SHRINK = 1 - 2.0**-19
"""Factor on sums of products. A sum of up to 2^32 rows may need 62 bits, and is rounded to the 53
bits of a double. So the sums of two neighbors, of norm at most 2^32 S for a sensitivity S, differ
by at most 2 * 2^-53 * 2^32 S = 2^-20 S more than their exact values: less than the factor removes.
Coefficients do not change, because the factor cancels."""
_SMALLEST = 1e-30  # coefficients below this are 0, so that no product underflows
_FARTHEST = 16.0  # of a margin: the sigmoid differs from 0 or 1 by 1e-7 there

Model = TypeVar("Model", LinearRegression, LogisticRegression)


class GridMoments(NamedTuple):
    """Sums over all rows on the grid. Private."""

    gram: np.ndarray
    """Sums of products of 1, z0, z1, ..., y: integers in units of 1 / STEPS^2."""

    def scaled(self) -> SecondMoments:
        """Return the moments in the scaled units of features and target."""
        size = len(self.gram) - 1
        scaled = self.gram.astype(np.float64) * (_SHRINK / STEPS**2)
        return SecondMoments(scaled[:size, :size], scaled[:size, -1], float(scaled[-1, -1]))

    def __add__(self, other: object) -> "GridMoments":
        if not isinstance(other, GridMoments):
            return NotImplemented
        return GridMoments(self.gram + other.gram)

    @property
    def n_rows(self) -> int:
        """Number of rows, if none was shrunk."""
        return int(self.gram[0, 0]) // STEPS**2


def moments(
    table: Any, schema: Schema, *, row_norm: float = math.inf, records_per_person: int = 1
) -> GridMoments:
    """Return the second moments of a table by its schema, in one pass. Private.

    `table` is what `open_table` takes. Rows without a target are left out. Rows longer than
    `row_norm` are shrunk to it. If the schema has a column of type person, at most
    `records_per_person` records of each person are used.

    >>> import pandas as pd
    >>> people = pd.DataFrame({"age": [20.0, 60.0, 60.0], "pay": [0.0, 5.0, float("nan")]})
    >>> schema = Schema({"age": [20, 60], "pay": [0, 10]}, target="pay")
    >>> moments(people, schema).scaled().cross.round(3).tolist()
    [-1.0, 1.0]
    """
    most = require_bound(schema, records_per_person)
    with open_table(table, schema) as opened:
        return _moments(opened.features(schema, most), schema, row_norm)


def _moments(rows: EngineTable, schema: Schema, row_norm: float) -> GridMoments:
    names = [f"z{k}" for k in range(len(schema.feature_names))]
    schema.target_column  # noqa: B018  # raises if there is none

    if not math.isfinite(row_norm):
        return GridMoments(rows.gram([*names, "y"], constant=STEPS))

    limit = row_norm * STEPS
    # A constant depends on no column, but every row has one.
    rows = rows.extend(lambda ops: {"one": ops.where([(ops.column("y") < 0, STEPS)], STEPS)})
    rows = rows.extend(lambda ops: {"square": _square(["one", *names], ops)})
    rows = rows.extend(lambda ops: {"factor": _shrinking(ops, limit)})
    shrunk = ["one", *names, "y"]
    rows = rows.stage(lambda ops: {
        name: _towards_zero(ops.real(ops.column(name)) * ops.column("factor"), ops)
        for name in shrunk
    })  # fmt: skip
    return GridMoments(rows.gram(shrunk))


def _square(names: Sequence[str], ops: Operations) -> Expression:
    """Return the sum of the squares of columns."""
    first, *others = (ops.column(name) for name in names)
    total: Expression = first * first
    for column in others:
        total = total + column * column
    return total


def _shrinking(ops: Operations, limit: float) -> Expression:
    """Return the factor that shortens a row, whose squared norm is a column, to `limit`."""
    norm = ops.root(ops.real(ops.column("square")))
    # Exactly 1 for short rows. No row is divided by zero: a warning would reveal it.
    return limit / ops.where([(norm > limit, norm)], limit)


def _towards_zero(value: Expression, ops: Operations) -> Expression:
    return ops.where([(value < 0.0, 0 - ops.floor(0.0 - value))], ops.floor(value))


class PartialMoments:
    """Second moments that grow with every chunk of a table: `partial_fit`, then `fit_linear`.

    Rows are not shrunk, so the fit has somewhat more noise than that of a whole table. A schema
    that names persons is refused: a person's records may be in several chunks.

    >>> import pandas as pd
    >>> schema = Schema({"age": [20, 60], "pay": [0, 10]}, target="pay")
    >>> grown = PartialMoments(schema)
    >>> for chunk in (pd.DataFrame({"age": [20.0], "pay": [1.0]}),) * 3:
    ...     grown = grown.partial_fit(chunk)
    >>> grown.moments.n_rows
    3
    """

    def __init__(self, schema: Schema) -> None:
        if schema.unit == "person":
            raise ValueError("a table with a column of type person is read whole: see fit_linear.")
        self.schema = schema
        size = len(schema.feature_names) + 2
        self.moments = GridMoments(np.zeros((size, size), np.int64))
        self.n_records = 0
        """Number of all rows, with a target or without; assumed public."""

    def partial_fit(self, chunk: Any) -> Self:  # Any: what `open_table` takes
        """Add the rows of a chunk."""
        with open_table(chunk, self.schema) as opened:
            self.moments += _moments(opened.features(self.schema), self.schema, math.inf)
            self.n_records += opened.coded(self.schema).count()
        return self


def fit_linear(
    table: Any,  # Any: what `open_table` takes, or `PartialMoments`
    schema: Schema,
    *,
    n_records: int | None = None,
    records_per_person: int = 1,
    **options: Any,  # Any: the settings of `LinearRegression`
) -> LinearRegression:
    """Return a linear regression of the target of the schema on its features, paid for.

    The model predicts the target scaled to [-1, 1] from the features that `schema.transform` gives.
    `options` are those of `LinearRegression` except for the bounds, which the schema declares. The
    table is read once if `n_records`, the public number of records, is given, and else once more to
    count its rows, which are then assumed public. If the schema has a column of type person, the
    engine keeps at most `records_per_person` records of each, and the guarantee is for a person.

    >>> import pandas as pd
    >>> people = pd.DataFrame({"age": [20.0, 40.0, 60.0] * 9000, "pay": [1.0, 2.0, 3.0] * 9000})
    >>> schema = Schema({"age": [20, 60], "pay": [0, 4]}, target="pay")
    >>> model = fit_linear(people, schema, epsilon=1.0, delta=1e-6, random_state=0)
    >>> model.coef_.round(2).tolist()
    [0.5]
    """
    require_engine_schema(schema)
    if schema.n_classes is not None:
        raise ValueError("the target has classes: use fit_logistic.")
    n_features = _require_features(schema)
    model = LinearRegression(bounds=schema.bounds, target_bounds=(-1, 1), **options)
    most = require_bound(schema, records_per_person)
    if isinstance(table, PartialMoments):
        if table.schema.to_dict() != schema.to_dict():
            raise ValueError("these moments were computed by another schema: give that one.")
        known = table.moments
        n_rows = _size(lambda: table.n_records, n_records)
        return _from_partial(model, known, schema.bounds, n_rows)
    with open_table(table, schema) as opened:
        rows = opened.features(schema, most)
        facts = {
            "n_features": n_features,
            "n_records": _size(opened.coded(schema, most).count, n_records),
            "is_user": schema.unit == "person",
        }

        def private(row_norm: float) -> SecondMoments:
            return _moments(rows, schema, row_norm).scaled()

        empty = GridMoments(np.zeros((n_features + 2, n_features + 2), np.int64)).scaled()
        return _fitted(
            model,
            most,
            lambda model: model.fit_moments(private, **facts),
            lambda model: model.fit_moments(lambda _: empty, **facts),
        )


def _require_features(schema: Schema) -> int:
    """Return the number of features; raise if there are none."""
    if not schema.feature_names:
        raise ValueError("the schema declares no column but the target: there is nothing to fit.")
    return len(schema.feature_names)


def _size(count: Callable[[], int], n_records: int | None) -> int:
    """Return the public number of records: that declared, or all, with a target or without."""
    if n_records is not None:
        return require_few_rows(whole(n_records=n_records, least=1))
    found = require_few_rows(count())
    if found == 0:
        raise ValueError("the table has no records.")
    return found


def _fitted(
    model: Model, most: int, fit: Callable[[Model], Model], trial: Callable[[Model], Model]
) -> Model:
    """Return a model fitted to at most `most` records of each person, paid for as a person."""
    if most == 1:
        return fit(model)
    fitted, event = fit_for_users(model, most, fit, trial=trial)
    fitted.event_, fitted.epsilon, fitted.ledger = event, model.epsilon, model.ledger
    return fitted


def _from_partial(
    model: LinearRegression, known: GridMoments, bounds: FeatureBounds, n_records: int
) -> LinearRegression:
    n_features = len(bounds.lower)
    # Rows were not shrunk, so the longest row that the bounds allow must be paid for.
    largest = bounds.norm if bounds.norm is not None else math.sqrt(n_features)
    model.bounds = Bounds(*bounds._replace(norm=largest))

    def unshrunk(row_norm: float) -> SecondMoments:
        if row_norm < math.hypot(1.0, largest) * (1 - 1e-12):
            raise ValueError(
                "these moments are of rows that were not shrunk: use fit_linear(table)."
            )
        return known.scaled()

    return model.fit_moments(unshrunk, n_features=n_features, n_records=n_records)


class GridRows:
    """Rows of an encoded table for a descent in rounds, each round one pass over the table.

    `tacit.regression` defines what a descent needs: counts of norms and gradients. Residuals are
    rounded towards zero to 2^-15 of their bound, so no contribution of a record grows.
    """

    def __init__(self, rows: EngineTable, n_features: int) -> None:
        self._rows = rows
        self.n_features = n_features
        self._names = [f"z{k}" for k in range(n_features)]

    def norm_counts(self, levels: Floats) -> Floats:
        """Return how many norms of features are at most each level. Private."""
        limits = [math.floor((level * STEPS) ** 2 * (1 + 1e-12)) for level in levels.tolist()]
        rows = self._rows.stage(lambda ops: {"square": _square(self._names, ops)})
        found = rows.sums(lambda ops: {
            f"n{k}": ops.where([(ops.column("square") <= limit, 1)], 0)
            for k, limit in enumerate(limits)
        })  # fmt: skip
        return np.array(list(found.values()), np.float64)

    def gradient(self, theta: Floats, limit: float, clip: float) -> Floats:
        """Return the sum of factor * residual * (1, x) over all rows, (d + 1, 1). Private."""
        units, names = STEPS / clip, self._names
        coefficients = dict(zip(names, (theta[1:, 0] / STEPS).tolist(), strict=True))

        def margin(ops: Operations) -> Expression:
            total = ops.real(ops.column("y")) * 0.0 + float(theta[0, 0])
            for name, coefficient in coefficients.items():
                if abs(coefficient) > _SMALLEST:
                    total = total + ops.real(ops.column(name)) * coefficient
            return total

        rows = self._rows.extend(lambda ops: {"margin": margin(ops), "square": _square(names, ops)})
        rows = rows.extend(lambda ops: {"factor": _shrinking(ops, limit * STEPS)})
        rows = _with_residuals(rows, clip).extend(lambda ops: {
            "w": _towards_zero(ops.column("residual") * ops.column("factor") * units, ops)
        })  # fmt: skip
        found = rows.sums(lambda ops: {
            "w": ops.column("w"),
            **{name: ops.column("w") * ops.column(name) for name in names},
        })  # fmt: skip
        total = np.array(list(found.values()), np.float64) / units
        total[1:] /= STEPS
        return (_SHRINK * total)[:, None]


def _with_residuals(rows: EngineTable, clip: float) -> EngineTable:
    """Add the column w (p - y) for the log-odds `margin`, as in `tacit.regression.irls`.

    p = 1 / (1 + e^-|m|) is computed from e^-x = (e^(-x / 64))^64 and six terms of Taylor's series,
    with a relative error below 1e-6: engines round their exponentials differently. The larger of p
    and 1 - p, which the weight needs, is p of |m|. Whatever is used more than once becomes a
    column, because a formula that repeats its parts grows with every use of them.
    """

    def size(ops: Operations) -> Expression:
        margin = ops.column("margin")
        return ops.where([(margin < 0.0, 0.0 - margin)], margin)

    def taylor(ops: Operations) -> Expression:
        size, power = ops.column("size"), 1.0
        step = ops.where([(size > _FARTHEST, _FARTHEST)], size) / 64.0
        for k in range(6, 0, -1):
            power = 1.0 - step * power / float(k)
        return power

    def eighth_power(ops: Operations, name: str) -> Expression:
        square = ops.column(name) * ops.column(name)
        return square * square * (square * square)

    def residual(ops: Operations) -> Expression:
        larger, margin = ops.column("larger"), ops.column("margin")
        probability = ops.where([(margin < 0.0, 1.0 - larger)], larger)
        weight = ops.where([(larger > clip, clip / larger)], 1.0)
        return weight * (probability - ops.real(ops.column("y")))

    def clipped(ops: Operations) -> Expression:
        # Rounding of the quotient may pass the clip in the last bit.
        value = ops.column("quotient")
        return ops.where([(value > clip, clip), (value < -clip, -clip)], value)

    for name, formula in (
        ("size", size),
        ("power", taylor),
        ("power8", lambda ops: eighth_power(ops, "power")),
        ("larger", lambda ops: 1.0 / (1.0 + eighth_power(ops, "power8"))),
        ("quotient", residual),
        ("residual", clipped),
    ):
        rows = rows.extend(lambda ops, name=name, formula=formula: {name: formula(ops)})
    return rows


def fit_logistic(
    table: Any,  # Any: what `open_table` takes
    schema: Schema,
    *,
    n_records: int | None = None,
    records_per_person: int = 1,
    **options: Any,  # Any: the settings of `LogisticRegression`
) -> LogisticRegression:
    """Return a logistic regression of a target with two classes, fitted in rounds and paid for.

    Every round is one pass over the table, which releases a noisy gradient: 20 to 150 rounds, by
    public facts. `options` are those of `LogisticRegression` except for bounds and classes. For
    `n_records` and `records_per_person` see `fit_linear`.
    """
    require_engine_schema(schema)
    if schema.n_classes != 2:
        raise ValueError("fit_logistic needs a target with two classes.")
    n_features = _require_features(schema)
    model = LogisticRegression(bounds=schema.bounds, **options)
    most = require_bound(schema, records_per_person)
    with open_table(table, schema) as opened:
        rows = opened.features(schema, most)
        facts = {
            "classes": schema.classes,
            "n_records": _size(opened.coded(schema, most).count, n_records),
            "is_user": schema.unit == "person",
        }

        def fit(model: LogisticRegression) -> LogisticRegression:
            return model.fit_rows(GridRows(rows, n_features), **facts)  # pays before it reads

        return _fitted(model, most, fit, fit)
