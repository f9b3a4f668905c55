"""How the constants of private regression were chosen, on data sets used nowhere else.

    python benchmarks/regression_tuning.py [linear] [logistic]

Each constant of a schedule or rule is varied alone around its default. A cell is the loss of score
(R^2 or accuracy) relative to the fit without privacy: the mean over data sets and epsilons of the
median over seeds. Adult, fertility_us1980 and acs_income_binned, on which results are reported, are
not used here. The data sets used are treated as public, and bounds are their 0.1 % and 99.9 %
quantiles. Rule: a default stays unless another value loses at least a fifth less.
"""

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple

import _results as results
import _tables as tables
import numpy as np
import pandas as pd
from sklearn.linear_model import LinearRegression as OrdinaryLinear
from sklearn.linear_model import LogisticRegression as OrdinaryLogistic
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tacit.regression import (
    Bounds,
    LinearRegression,
    LogisticRegression,
    adassp,
    gradient,
    newton,
)
from tacit.regression import bounds as declared

EPSILONS, SEEDS, DELTA = (0.1, 0.3, 1.0), range(5), 1e-6
UCI = ("protein", "bike", "pol", "keggundirected")
MOST_ROWS = 50_000


class Task(NamedTuple):
    """A table, and the score of the fit without privacy for each seed."""

    name: str
    table: tables.Table
    ordinary: list[float]


def census(name: str, target: str, *, drop: tuple[str, ...] = ()) -> tuple[Any, Any]:
    """Return features, with one-hot categories, and the target. Any: frames of pandas."""
    frame = pd.read_csv(tables.DATA / "census" / name)
    frame = frame.sample(min(len(frame), MOST_ROWS), random_state=0)
    features = pd.get_dummies(frame.drop(columns=[target, *drop]), dtype=float)
    return features.loc[:, features.nunique() > 1].to_numpy(np.float64), frame[target]


def bounded(X: Any, y: Any) -> tables.Table:
    """Return the table with bounds from quantiles; almost constant columns are dropped."""
    X, y = np.asarray(X, np.float64), np.asarray(y, np.float64)
    low, high = np.quantile(X, [0.001, 0.999], axis=0)
    kept = low < high
    target = Bounds(*np.quantile(y, [0.001, 0.999]).tolist())
    return tables.Table(X[:, kept], y, Bounds(low[kept], high[kept]), target)


def linear_sets() -> Iterable[tuple[str, tables.Table]]:
    yield (
        "california_housing",
        bounded(*census("california_housing_1990.csv.gz", "median_house_value")),
    )
    yield "cps_earnings", bounded(*census("cps_earnings_cpssw8.csv.gz", "earnings"))
    yield (
        "cps_taxunits",
        bounded(*census("cps_taxunits_2012_2014.csv.gz", "e00200", drop=("e00200p", "e00200s"))),
    )
    for name in UCI:
        rows = pd.read_csv(tables.DATA / "uci-regression" / f"{name}.csv.gz", header=None)
        values = rows.sample(min(len(rows), MOST_ROWS), random_state=0).to_numpy(np.float64)
        yield name, bounded(values[:, :-1], values[:, -1])


def logistic_sets() -> Iterable[tuple[str, tables.Table]]:
    drop = ("state", "puma", "fips", "income")
    yield "fulton: employed", bounded(*census("fulton_pums5.csv.gz", "employed", drop=drop))
    yield (
        "fulton: married",
        bounded(*census("fulton_pums5.csv.gz", "married", drop=(*drop, "divorced"))),
    )
    X, y = census("census_income_kdd_train.csv.xz", "income", drop=("instance_weight",))
    groups = 40  # attributes, each one number or one indicator
    X, y = X[:20_000, (X != 0).mean(axis=0) >= 0.01], y[:20_000]
    largest = np.maximum(np.quantile(np.abs(X), 0.999, axis=0), 1.0)
    bounds = Bounds(np.zeros(X.shape[1]), largest, norm=groups**0.5)
    yield "census_income_kdd", tables.Table(X, y.to_numpy(np.float64), bounds, Bounds(0, 1))
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (20_000, 20))
    y = X @ rng.normal(size=20) + rng.logistic(size=len(X)) > 0
    yield "simulated", tables.Table(X, y.astype(float), Bounds(-1, 1), Bounds(0, 1))


def tasks(sets: Iterable[tuple[str, tables.Table]], make: Callable[[], Any]) -> list[Task]:
    """Return each data set with the scores of the fit without privacy."""
    found = []
    for name, table in sets:
        scores = []
        for seed in SEEDS:
            X, y, X_test, y_test = tables.split(clipped(table), seed)
            scores.append(make().fit(X, y).score(X_test, y_test))
        found.append(Task(name, clipped(table), scores))
    return found


def clipped(table: tables.Table) -> tables.Table:
    """Return the table clipped to its bounds, so that both kinds of fit use the same values."""
    X = np.clip(table.X, table.bounds.lower, table.bounds.upper)
    return table._replace(X=X, y=np.clip(table.y, *_ends(table.target_bounds)))


def _ends(bounds: Bounds) -> tuple[Any, Any]:
    return bounds.lower, bounds.upper


def loss(task: Task, epsilon: float, **options: Any) -> float:
    """Return the median loss of score over seeds, at most 1 to limit the weight of one set."""
    lost = []
    for seed in SEEDS:
        X, y, X_test, y_test = tables.split(task.table, seed)
        budget = {"epsilon": epsilon, "delta": DELTA, "random_state": seed}
        if task.table.target_bounds == Bounds(0, 1):
            model: Any = LogisticRegression(bounds=task.table.bounds, **budget, **options)
        else:
            model = LinearRegression(
                bounds=task.table.bounds,
                target_bounds=task.table.target_bounds,
                **budget,
                **options,
            )
        lost.append(task.ordinary[seed] - model.fit(X, y).score(X_test, y_test))
    return min(1.0, float(np.median(lost)))


def mean_loss(chosen: list[Task], **options: Any) -> float:
    return float(np.mean([loss(t, epsilon, **options) for t in chosen for epsilon in EPSILONS]))


def vary(
    chosen: list[Task], module: ModuleType, name: str, others: Iterable[Any], **options: Any
) -> list[object]:
    """Return one line of the table: the default with its loss, then other values with theirs."""
    default = getattr(module, name)
    cells = []
    for value in (default, *others):
        setattr(module, name, value)
        cells.append(f"{value}: {mean_loss(chosen, **options):.4f}".replace("), ", ") "))
        print(name, options, cells[-1], flush=True)
    setattr(module, name, default)
    return [name.strip("_").lower().replace("_", " "), f"**{cells[0]}**", "; ".join(cells[1:])]


def linear_lines(sets: list[Task]) -> list[list[object]]:
    descent, moments = {"method": "gradient"}, {"method": "adassp"}
    varied: list[tuple[ModuleType, str, tuple[Any, ...], dict[str, str]]] = [
        (newton, "_STEPS", (6, 12), descent),
        (newton, "_FIRST_GRAM", (0.05, 0.2), descent),
        (newton, "_SECOND_GRAM", (0.1, 0.3), descent),
        (newton, "_NOISE_EXCESS", (1e-4, 1e-3), descent),
        (newton, "_ROW_CLIP", (0.5, 1.0), descent),
        (newton, "_RESIDUAL_CLIP", (1.3, 2.2), descent),
        (newton, "_DROPPED", (0.4, 0.6), descent),
        (newton, "_DAMPING", (0.25, 1.0), descent),
        (declared, "ROW_SHARE", (0.2, 0.3, 0.6, 1.0), descent),
        (declared, "ROW_SHARE", (0.2, 0.3, 0.6, 1.0), moments),
        (adassp, "_SHARES", ((1 / 3,) * 3, (0.05, 0.6, 0.35)), moments),
        (adassp, "_NO_SHRINK_NOISE", (0.0005, 0.008), moments),
    ]
    return [[*options.values(), *vary(sets, m, n, o, **options)] for m, n, o, options in varied]


def logistic_lines(sets: list[Task]) -> list[list[object]]:
    varied: list[tuple[ModuleType, str, tuple[Any, ...]]] = [
        (gradient, "_STEPS", (6, 24)),
        (gradient, "_MOMENTUM", (0.0, 0.75)),
        (gradient, "_GRAM_SHARE", (0.05, 0.3)),
        (gradient, "_CROWDED", (0.0, 0.2, 0.8)),
        (gradient, "_AVERAGED", (4, 12)),
        (declared, "ROW_SHARE", (0.2, 1.0)),
    ]
    return [["gradient", *vary(sets, m, n, o)] for m, n, o in varied]


def report(kind: str, title: str, sets: list[Task], lines: list[list[object]]) -> None:
    """Write the table of one kind of model."""
    shapes = ", ".join(
        f"{t.name} ({t.table.X.shape[0]:,} x {t.table.X.shape[1]}, {np.median(t.ordinary):.3f})"
        for t in sets
    )
    header = ["method", "constant", "default: loss", "others: loss"]
    results.write(
        f"regression_tuning_{kind}",
        f"What other constants would cost: {title}",
        ["numpy", "scikit-learn"],
        f"Sets, with the score of the fit without privacy: {shapes}. Epsilon 0.1, 0.3 and 1, delta "
        f"1e-6, {len(SEEDS)} splits. Neither Adult, nor fertility_us1980, nor acs_income_binned.",
        results.table(header, lines),
    )


def main() -> None:
    parts = sys.argv[1:] or ["linear", "logistic"]
    if "linear" in parts:
        sets = tasks(linear_sets(), OrdinaryLinear)
        report("linear", "R^2 lost", sets, linear_lines(sets))
    if "logistic" in parts:
        sets = tasks(logistic_sets(), lambda: make_pipeline(StandardScaler(), OrdinaryLogistic()))
        report("logistic", "accuracy lost", sets, logistic_lines(sets))


if __name__ == "__main__":
    main()
