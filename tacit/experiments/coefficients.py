"""Coefficients of a linear model of a table, in the units of the file, compared with references.

Every category has a feature of its own, so only differences between the categories of a column mean
something. They are stated against one reference category, whose coefficient goes into the
intercept.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from tacit.datasets import Schema


class Coefficients(NamedTuple):
    """Intercept and contrasts by name; one number each, or one per class for three or more."""

    values: dict[str, Any]
    """Any: a number, or a list of numbers."""
    references: dict[str, str]
    """The reference category of each column of categories."""


def coefficients_of(schema: "Schema", coef: np.ndarray, intercept: Any) -> Coefficients:
    """Return a model of encoded features in the units of the data file.

    `coef` is (features,) or (classes, features). A row of declared categories has the same
    prediction by these numbers as by the model itself.
    """
    slopes, constants = np.atleast_2d(coef), np.atleast_1d(intercept).astype(float)
    n_numbers = slopes.shape[1] - sum(len(c.outputs) for c in schema.features)
    scales = [c.middle_and_half for c in schema.features for _ in c.outputs]
    middles, halves = np.transpose(scales + [(0.0, 1.0)] * n_numbers)
    slopes = slopes / halves
    constants = constants - slopes @ middles
    if schema.n_classes is None:
        middle, half = schema.target_column.middle_and_half
        slopes, constants = slopes * half, constants * half + middle
    found, references = {}, {}
    columns = dict(zip(schema.feature_names, slopes.T, strict=True))
    for column in schema.features:
        if column.type == "category":
            reference = column.reference or column.categories[0]
            references[column.name] = reference
            base = columns[f"{column.name}={reference}"]
            constants = constants + base
            names = [f"{column.name}={c}" for c in column.categories if c != reference]
            found |= {name: columns[name] - base for name in names}
        else:
            found |= {name: columns[name] for name in column.outputs}
    found |= {name: columns[name] for name in schema.feature_names[len(columns) - n_numbers :]}
    values = {"(intercept)": constants} | found
    plain = {name: v.tolist() if len(v) > 1 else float(v[0]) for name, v in values.items()}
    return Coefficients(plain, references)
