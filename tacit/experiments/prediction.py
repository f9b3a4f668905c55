"""Predictions of a finished run for the records of another table."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, softmax

from tacit import datasets
from tacit.experiments import data as data_of
from tacit.experiments.facts import RECIPE, Facts
from tacit.experiments.folder import RunFolder
from tacit.experiments.recipe import Recipe

_FALSE_ALARM = 1e-3


class Predictions(NamedTuple):
    """One row for each record: the prediction, and the probability of each class if it is known."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[object, ...]]
    undescribed: tuple[str, ...] = ()
    """Columns with values that the schema does not describe, which its rules replaced."""


def predict_table(
    folder: str | Path, table: str | Path, *, interval: float | None = None
) -> Predictions:
    """Apply the model of a finished run on a table to the records of `table`.

    The table needs the columns of the features alone. The model was paid for, so predictions cost
    nothing; they reveal the records of `table` to whoever reads them. Raises `HopelessTable` if the
    schema clearly fails to describe a column of the table, as `data.most_outside` of the recipe
    says; chance is no reason to stop, so a table of one or two records is always predicted.

    `interval` is a confidence, such as 0.95: each prediction of a number by `tacit regress` then
    has an interval that contains the target of such a record with that probability.
    """
    run = RunFolder(folder)
    facts = run.facts()
    recipe = Recipe.read(run / RECIPE)
    if recipe.method == "summary":
        raise ValueError(f"{run.path} holds statistics of a table, and no model to predict with.")
    if recipe.data.name != "table":
        raise ValueError(f"{run.path} holds a model of {facts.data}, not of a table.")
    schema = data_of.schema_of(recipe.data)
    rows = datasets.read_rows(table, schema, training=False)
    flags = dict(zip(schema.checked_features, rows.flags.T, strict=True))
    most = recipe.data.most_outside
    data_of.refuse_undescribed(Path(table).name, flags, most, false_alarm=_FALSE_ALARM)
    found = _predicted(run, facts, schema, rows.x, interval)
    return found._replace(undescribed=tuple(name for name, some in flags.items() if some.any()))


def _predicted(
    run: RunFolder,
    facts: Facts,
    schema: "datasets.Schema",
    x: np.ndarray,
    interval: float | None,
) -> Predictions:
    """Return the predictions of the run's model for encoded rows."""
    if interval is not None and (facts.method != "regression" or schema.n_classes is not None):
        raise ValueError(
            "intervals are for a number that tacit regress fitted; classes have probabilities."
        )
    if facts.method in ("regression", "transfer"):
        content = json.loads((run / facts.model_file).read_text(encoding="utf-8"))
        scores = x @ np.atleast_2d(content["coef"]).T + np.asarray(content["intercept"])
        if schema.n_classes is None:
            columns, parts = [schema.target], [scores[:, 0]]
            if interval is not None:
                columns += [f"{schema.target}_lower", f"{schema.target}_upper"]
                parts += _interval(run, content, x, interval)
            middle, half = schema.target_column.middle_and_half
            numbers = np.clip(np.column_stack(parts), -1, 1) * half + middle
            return Predictions(tuple(columns), [tuple(row) for row in numbers.tolist()])
        if schema.n_classes == 2:
            chances = np.column_stack([expit(-scores[:, 0]), expit(scores[:, 0])])
        else:
            chances = softmax(scores, axis=1)
    elif facts.method == "PATE":
        from tacit.pate import SpreadStudent

        with np.load(run / facts.model_file, allow_pickle=False) as arrays:
            student = SpreadStudent.from_arrays(dict(arrays))
        return _classes(schema, student.predict(x), None)
    else:
        from tacit.experiments.released import load_model

        chances = softmax(load_model(run.path).scores(x).astype(np.float64), axis=1)
    return _classes(schema, chances.argmax(axis=1), chances)


def _interval(
    run: RunFolder, content: Mapping[str, Any], x: np.ndarray, confidence: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the intervals of encoded targets. Any: JSON values of model.json."""
    from tacit.regression import Inference

    stored = content.get("inference")
    if stored is None or stored["residual_std"] is None:
        raise ValueError(
            f"the model in {run.path} has no intervals. Fit it with tacit regress, a delta above 0 "
            "and --method auto or gradient."
        )
    inference = Inference(
        names=("intercept", *content["features"]),
        estimates=np.asarray(stored["estimates"], float),
        covariance=np.asarray(stored["covariance"], float),
        hidden=np.asarray(stored["hidden"], float),
        residual_std=stored["residual_std"],
    )
    return inference.prediction_interval(np.column_stack([np.ones(len(x)), x]), confidence)


def _classes(
    schema: "datasets.Schema", numbers: np.ndarray, chances: np.ndarray | None
) -> Predictions:
    names = schema.classes
    named = [(names[int(k)],) for k in numbers]
    if chances is None:
        return Predictions((schema.target,), list(named))
    rows = [(*one, *row) for one, row in zip(named, chances.tolist(), strict=True)]
    return Predictions((schema.target, *(f"P({name})" for name in names)), rows)
