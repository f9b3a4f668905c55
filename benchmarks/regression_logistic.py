"""Logistic regression on every table with a binary target, by `auto` and by each method.

    python benchmarks/regression_logistic.py [--seeds 9] [--tables adult,a9a] [--processes N]

A cell is the median over 80/20 splits of the test accuracy in percent. Bars: `auto` is at most 0.5
points below the best method; one-hot encoding of the ACS table at epsilon 0.1 is at most 1 point
below plain numbers.
"""

import argparse
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import _results as results
import _tables as tables
import numpy as np
from sklearn.linear_model import LogisticRegression as Ordinary
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tacit.regression import LogisticRegression

EPSILONS, DELTA = (0.1, 0.3, 1.0, 3.0, 8.0), 1e-6
METHODS = ("auto", "gradient", "sgd", "objective")
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


def one_split(task: tuple[str, int]) -> tuple[str, float, dict[str, list[float]]]:
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
    return name, 100 * float(ordinary.score(X_test, y_test)), scores


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=9)
    parser.add_argument("--tables", default=";".join(LOADERS), help="separated by semicolons")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    given = parser.parse_args()
    names = given.tables.split(";")
    found: dict[str, list] = {name: [] for name in names}
    with ProcessPoolExecutor(given.processes) as pool:
        tasks = [(name, seed) for name in names for seed in range(given.seeds)]
        for name, ordinary, scores in pool.map(one_split, tasks):
            found[name].append((ordinary, scores))
            print(name, flush=True)
    lines, n_met = [], 0
    for name in names:
        ordinary = np.median([ordinary for ordinary, _ in found[name]])
        lines.append([name, "non-private", *[f"{ordinary:.2f}"] * len(EPSILONS)])
        medians = {m: np.median([s[m] for _, s in found[name]], axis=0) for m in METHODS}
        best = np.max(list(medians.values()), axis=0)
        for method, values in medians.items():
            cells = [f"{value:.2f}" for value in values]
            if method == "auto":
                met = values >= best - ENOUGH
                n_met += int(met.sum())
                cells = [
                    f"**{c}**" if m else f"{c} (missed)" for c, m in zip(cells, met, strict=True)
                ]
            lines.append([name, method, *cells])
    header = ["table", "method", *(f"epsilon {epsilon:g}" for epsilon in EPSILONS)]
    results.write(
        "regression_logistic",
        "Logistic regression on every table, by all methods",
        ["numpy", "scikit-learn"],
        f"Test accuracy in percent, median of {given.seeds} splits, delta {DELTA:g}. `auto` is "
        f"within {ENOUGH:g} points of the best method in {n_met} of "
        f"{len(names) * len(EPSILONS)} cells.",
        results.table(header, lines),
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
