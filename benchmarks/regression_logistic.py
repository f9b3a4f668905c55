"""Logistic regression on every table with a binary target, by `auto` and by each method.

    python benchmarks/regression_logistic.py [--seeds 9] [--tables "adult;a9a"] [--store FILE]

A cell is the median over 80/20 splits of the test accuracy in percent. Bars: `auto` is at most 0.5
points below the best method; one-hot encoding of the ACS table at epsilon 0.1 is at most 1 point
below plain numbers.
"""

import os
import warnings
from collections.abc import Callable
from functools import partial

import _method_tables as method_tables
import _results as results
import _tables as tables
import numpy as np
from _method_tables import DELTA, EPSILONS, Split
from sklearn.linear_model import LogisticRegression as Ordinary
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tacit.regression import LogisticRegression

METHODS = ("auto", "gradient", "objective")
LOADERS: dict[str, Callable[[], tables.Table]] = {
    "acs": tables.acs_high_income,
    "acs, one-hot": partial(tables.acs_high_income, "one-hot"),
    "acs, one-hot, norm": partial(tables.acs_high_income, "one-hot, norm"),
    "adult": tables.adult_numbers,
    "adult, one-hot": tables.adult_income,
    "a9a": tables.a9a,
    "fulton: married": partial(tables.fulton_flag, 6),
    "fulton: employed": partial(tables.fulton_flag, 12),
    "census_kdd": tables.census_high_income,
    "fertility": tables.fertility_more,
    "california": lambda: tables.halved(tables.california()),
} | {name: lambda name=name: tables.halved(tables.uci(name)) for name in tables.UCI}
ENOUGH = 0.5


def one_split(task: tuple[str, int]) -> Split:
    """Return the accuracies of one split: without privacy, and of each method at each epsilon."""
    warnings.simplefilter("ignore")  # of the ordinary fit, which may not converge
    name, seed = task
    table = LOADERS[name]()
    X, y, X_test, y_test = tables.split(table, seed)
    ordinary = make_pipeline(StandardScaler(), Ordinary(C=100, max_iter=300)).fit(X, y)
    scores: dict[str, list[float]] = {}
    for method in METHODS:
        scores[method] = []
        for k, epsilon in enumerate(EPSILONS):
            model = LogisticRegression(
                epsilon=epsilon, delta=DELTA, bounds=table.bounds, classes=[0, 1], method=method,
                random_state=len(EPSILONS) * seed + k,
            )  # fmt: skip
            scores[method].append(100 * model.fit(X, y).score(X_test, y_test))
    return Split(100 * float(ordinary.score(X_test, y_test)), scores)


def main() -> None:
    given = method_tables.parser(LOADERS).parse_args()
    lines, n_met, n_cells = [], 0, 0
    measured = method_tables.over_splits(one_split, lambda name: len(LOADERS[name]().y), given)
    for name, (ordinary, scores) in measured.items():
        splits = len(ordinary)
        plain = [f"{np.median(ordinary):.2f}"] * len(EPSILONS)
        lines.append([name, str(splits), "non-private", *plain])
        medians = {method: np.median(values, axis=0) for method, values in scores.items()}
        met = medians["auto"] >= np.max(list(medians.values()), axis=0) - ENOUGH
        n_met, n_cells = n_met + int(met.sum()), n_cells + len(met)
        lines += method_tables.lines_of(name, splits, medians, met)
    results.write(
        "regression_logistic",
        "Logistic regression on every table, by all methods",
        ["numpy", "scikit-learn"],
        f"Test accuracy in percent, {method_tables.splits_in_words(given.seeds)}, delta {DELTA:g}. "
        f"`auto` is within {ENOUGH:g} points of the best method in {n_met} of {n_cells} cells.",
        results.table(method_tables.HEADER, lines),
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
