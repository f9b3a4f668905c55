"""Coefficients of a linear model of a table, in the units of the file, compared with references.

Every category has a feature of its own, so only differences between the categories of a column mean
something. They are stated against one reference category, whose coefficient goes into the
intercept.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from tacit.datasets import Schema
    from tacit.regression import Inference

_INTERCEPT, _CONFIDENCE = "(intercept)", 0.95


class Coefficients(NamedTuple):
    """Intercept and contrasts by name; one number each, or one per class for three or more."""

    values: dict[str, Any]
    """Any: a number, or a list of numbers."""
    references: dict[str, str]
    """The reference category of each column of categories."""


class Units(NamedTuple):
    """The map from a model of encoded features to one in the units of the data file.

    `matrix` @ (intercept, coefficients) + `offset` are the quantities that `names` lists.
    """

    names: tuple[str, ...]
    matrix: np.ndarray
    offset: np.ndarray
    references: dict[str, str]
    """The reference category of each column of categories."""
    target_unit: float
    """What a difference of 1 between encoded targets is in the file; 1 for classes."""


def units_of(schema: "Schema") -> Units:
    """Return the units of the data file that `schema` describes.

    A row of declared categories has the same prediction in these units as by the model itself.
    """
    names = schema.feature_names
    scales = [c.middle_and_half for c in schema.features for _ in c.outputs]
    scales += [(0.0, 1.0)] * (len(names) - len(scales))  # derived features
    middles, halves = np.transpose(scales)
    slopes = dict(zip(names, np.diag(np.append(1.0, 1 / halves))[1:], strict=True))
    rows = {_INTERCEPT: np.append(1.0, -middles / halves)}
    references: dict[str, str] = {}
    for column in schema.features:
        shown, base = list(column.outputs), np.zeros(len(names) + 1)
        if column.type == "category":
            references[column.name] = column.reference or column.categories[0]
            shown.remove(reference := f"{column.name}={references[column.name]}")
            base = slopes[reference]
            rows[_INTERCEPT] = rows[_INTERCEPT] + base
        rows |= {name: slopes[name] - base for name in shown}
    rows |= {one.name: slopes[one.name] for one in schema.derived_features}
    middle, half = (0.0, 1.0) if schema.n_classes else schema.target_column.middle_and_half
    offset = np.zeros(len(rows))
    offset[0] = middle
    return Units(tuple(rows), half * np.array(list(rows.values())), offset, references, half)


def coefficients_of(schema: "Schema", coef: np.ndarray, intercept: Any) -> Coefficients:
    """Return a model of encoded features in the units of the data file.

    `coef` is (features,) or (classes, features).
    """
    units = units_of(schema)
    model = np.vstack([np.atleast_1d(intercept), np.atleast_2d(coef).T])  # (features + 1, outputs)
    values = units.matrix @ model + units.offset[:, None]
    plain = {
        name: row.tolist() if len(row) > 1 else float(row[0])
        for name, row in zip(units.names, values, strict=True)
    }
    return Coefficients(plain, units.references)


def intervals_of(schema: "Schema", inference: "Inference") -> dict[str, Any]:
    """Return what model.json says of the uncertainty of a model of encoded features.

    "inference" is about encoded features and target, for predictions. "intervals" has a row for
    each quantity in the units of the file; None stands for what noise hides. All of it is computed
    from released values. Any: JSON values.
    """
    units = units_of(schema)
    found = inference.mapped(units.names, units.matrix, offset=units.offset, unit=units.target_unit)
    ends, columns = found.interval(_CONFIDENCE), {}
    for name, estimate, error, lower, upper in zip(
        found.names, found.estimates, found.standard_errors, *ends, strict=True
    ):
        numbers = {"estimate": estimate, "std_error": error, "lower": lower, "upper": upper}
        columns[name] = {k: float(v) if np.isfinite(v) else None for k, v in numbers.items()}
    stored = ("estimates", "covariance", "hidden")
    return {
        "intervals": {"confidence": _CONFIDENCE, "rows": columns},
        "residual_std": found.residual_std,
        "inference": {name: getattr(inference, name).tolist() for name in stored}
        | {"residual_std": inference.residual_std},
    }
