"""Every releasing function of `tacit.summaries`, called on one kind of table: for contracts."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tacit import summaries

Table = dict[str, Any]
BOUNDS = (0.0, 100.0)
CATEGORIES = ("a", "b")


def draw_table(rng: np.random.Generator, n: int) -> Table:
    """Draw records, a few of them with missing, infinite and unreadable values."""
    x = rng.normal(50, 30, n).astype(object)
    for place, odd in zip(rng.integers(0, n, 5), (None, np.nan, np.inf, "x", "17"), strict=True):
        x[place] = odd
    return {
        "x": x,
        "y": rng.uniform(0, 100, n),
        "c": rng.choice(["a", "b", "z", None, 3], n),
        "d": rng.choice(["a", "b"], n),
        "label": rng.integers(0, 2, n),
        "score": rng.random(n),
    }


def odd_record(rng: np.random.Generator) -> dict[str, Any]:
    """Draw the values of one record, often at the ends of a range or beyond."""
    ends = [0.0, 100.0, -1e300, 1e300, np.inf, np.nan, None, "x", 50.0, 33.3, 1e-9]
    return {
        "x": ends[rng.integers(len(ends))],
        "y": float(rng.choice([0.0, 100.0, 1e9, 50.0])),
        "c": [None, "a", "z", 3, 2.5][rng.integers(5)],
        "d": ["a", "b"][rng.integers(2)],
        "label": int(rng.integers(0, 2)),
        "score": float(rng.choice([0.0, 1.0, 0.5, np.nan])),
    }


def with_record(table: Table, place: int, record: dict[str, Any], *, replaced: bool) -> Table:
    """Return the table with a record inserted at `place`, or put in the place of another."""
    changed = {}
    for name, column in table.items():
        values = list(column)
        values[place : place + replaced] = [record[name]]
        changed[name] = values
    return changed


_SCHEMA = {
    "x": {"lower": 0.0, "upper": 100.0, "step": 1},
    "score": (0.0, 1.0),
    "y": None,
    "c": CATEGORIES,
    "label": bool,
}
CALLS: dict[str, Callable[..., Any]] = {
    "count": lambda t, **k: summaries.count(t["x"], **k),
    "histogram": lambda t, **k: summaries.histogram(t["x"], bounds=BOUNDS, n_bins=7, **k),
    "categories": lambda t, **k: summaries.histogram(t["c"], categories=CATEGORIES, **k),
    "contingency table": lambda t, **k: summaries.contingency_table(
        t["c"], t["d"], categories=(CATEGORIES, CATEGORIES), **k
    ),
    "mean": lambda t, **k: summaries.mean(t["x"], bounds=BOUNDS, **k),
    "mean of the records": lambda t, **k: summaries.mean(
        t["x"], bounds=BOUNDS, about="records", **k
    ),
    "filled mean": lambda t, **k: summaries.mean(t["x"], bounds=BOUNDS, missing=20.0, **k),
    "variance": lambda t, **k: summaries.variance(t["x"], bounds=BOUNDS, outside="drop", **k),
    "covariance": lambda t, **k: summaries.covariance(
        {"x": t["x"], "y": t["y"], "s": t["score"]},
        bounds={"x": BOUNDS, "y": BOUNDS, "s": (0, 1)},
        **k,
    ),
    "quantiles": lambda t, **k: summaries.quantiles(t["x"], bounds=BOUNDS, n_cells=64, **k),
    "quantiles on a grid": lambda t, **k: summaries.quantiles(t["x"], bounds=BOUNDS, step=2.5, **k),
    "private bounds": lambda t, **k: summaries.private_bounds(t["x"], **k),
    "accuracy": lambda t, **k: summaries.accuracy(t["c"], t["d"], **k),
    "auc": lambda t, **k: summaries.auc(t["label"], t["score"], **k),
    "r2": lambda t, **k: summaries.r2(t["x"], t["y"], bounds=BOUNDS, **k),
    "mean squared error": lambda t, **k: summaries.mean_squared_error(
        t["x"], t["y"], largest_error=50.0, **k
    ),
    "log loss": lambda t, **k: summaries.log_loss(t["label"], t["score"], **k),
    "count outside": lambda t, **k: summaries.count_outside(
        {"c": [v == "z" for v in t["c"]], "l": t["label"]}, **k
    ),
    "describe": lambda t, **k: summaries.describe(t, _SCHEMA, **k),
}
