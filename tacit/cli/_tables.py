"""Code that `regress` and `transfer` share: reading a table by its schema, printing a model."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from tacit.cli import _shared as shared

if TYPE_CHECKING:
    from tacit.datasets import Schema
    from tacit.regression import Bounds

SchemaFile = Annotated[Path, typer.Option(help="TOML file of target, bounds and categories.")]
ModelFile = Annotated[Path | None, typer.Option(help="Write the model as JSON.")]


def read(path: Path, schema: "Schema") -> tuple[np.ndarray, np.ndarray]:
    """Return the encoded features and the target of all rows of a table."""
    from tacit.datasets import read_table

    table = read_table(path, schema, test_share=0.0)
    return table.x_train, table.y_train


def bounds_of(schema: "Schema") -> "Bounds":
    """Return the bounds of the encoded features: [-1, 1] for numbers, [0, 1] for categories.

    A column of categories is encoded with at most one 1, so the norm of a row is at most the square
    root of the number of columns, whatever the number of categories.
    """
    from tacit.regression import Bounds

    columns = [c for c in schema.columns if c.name != schema.target]
    if not any(c.categories for c in columns):
        return Bounds(-1, 1)
    lower = [0.0 if c.categories else -1.0 for c in columns for _ in c.outputs]
    lower += [0.0 if d.at_least is not None else -1.0 for d in schema.derived]
    return Bounds(lower, 1.0, norm=(len(columns) + len(schema.derived)) ** 0.5)


def model_of(schema: "Schema", coef: np.ndarray, intercept: Any) -> dict[str, Any]:
    """Return the intercept and each feature's coefficient, converted to the units of the data file.

    Values are numbers for a regression or two classes, and lists with one number per class for
    more; hence their type Any.
    """
    coef, intercept = np.atleast_2d(coef), np.atleast_1d(intercept).astype(float)
    columns = [c for c in schema.columns if c.name != schema.target]
    scales = [c.middle_and_half for c in columns for _ in c.outputs]
    scales += [(0.0, 1.0)] * len(schema.derived)
    middles, halves = np.transpose(scales)
    slopes = coef / halves
    constants = intercept - slopes @ middles
    if schema.n_classes is None:
        (target,) = (c for c in schema.columns if c.name == schema.target)
        middle, half = target.middle_and_half
        slopes, constants = slopes * half, constants * half + middle
    values = {"(intercept)": constants} | dict(zip(schema.feature_names, slopes.T, strict=True))
    return {name: v.tolist() if len(v) > 1 else float(v[0]) for name, v in values.items()}


def show(
    schema: "Schema", model: Any, about: dict[str, Any], *, out: Path | None, as_json: bool
) -> None:
    """Print a fitted model with its guarantee, as a table or as JSON.

    `model` is an estimator of `tacit.regression`; `about` states its method, epsilon, delta and
    relation. `out` is the JSON file to write, if any.
    """
    coefficients = model_of(schema, model.coef_, model.intercept_)
    facts = {"method": about["method"], "coefficients": coefficients} | about
    facts["event"] = model.event_.to_dict()
    if out is not None:
        out.write_text(json.dumps(facts, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    if as_json:
        shared.print_json(facts)
        return
    width = max(len(name) for name in coefficients)
    for name, value in coefficients.items():
        shown = " ".join(f"{v:>12.6g}" for v in (value if isinstance(value, list) else [value]))
        typer.echo(f"{name:<{width}}  {shown}")
    typer.echo(
        f"{facts['method']}: epsilon = {shared.round_up(facts['epsilon'], 4)} "
        f"at delta = {facts['delta']:g}, {facts['relation']}"
    )
    if out is not None:
        typer.echo(f"wrote {out}")
