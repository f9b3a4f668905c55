"""Logistic regression on texts by `auto` and by plain noisy descent: area under the ROC curve.

    python benchmarks/regression_text.py [--seeds 9] [--processes N]

Both have the same rows: word presence, divided by the norm of the row. Plain noisy descent adds
noise for a residual of 1 and has no intercept, momentum or mean of models. Its number of steps and
its step size are the best of four settings on the test texts, which favors it. Bar: `auto` is above
it at every epsilon. The vocabulary was made from the training texts and is taken as public. One
more line says what a synthetic sparse table takes.
"""

import argparse
import gzip
import os
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any

import _results as results
import _tables as tables
import numpy as np
from scipy.sparse import random_array
from scipy.special import expit
from sklearn.datasets import load_svmlight_file
from sklearn.linear_model import LogisticRegression as Ordinary
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import normalize

from tacit.regression import Bounds, LogisticRegression
from tacit.regression.estimator import gaussian_noise_multiplier

EPSILONS, DELTA = (0.1, 0.3, 1.0, 3.0, 8.0), 1e-6
TEXTS = {"reuters21578": (17_461, 0), "imdb": (37_645, 5)}  # columns, label above
SETTINGS = ((10, 4.0), (50, 4.0), (50, 20.0), (200, 20.0))  # steps and step size


@cache
def load(name: str, part: str) -> tuple[Any, np.ndarray]:
    """Return unit rows of word presence and labels. Any: sparse rows."""
    columns, above = TEXTS[name]
    with gzip.open(tables.DATA / "text" / f"{name}_{part}.svm.gz") as file:
        X, y = load_svmlight_file(file, n_features=columns)
    X.data[:] = 1.0
    return normalize(X), (y > above).astype(np.float64)


def plain_descent(X, y, epsilon: float, steps: int, step_size: float, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    noise_std = gaussian_noise_multiplier(epsilon, DELTA) * np.sqrt(steps)
    theta = np.zeros(X.shape[1])
    for _ in range(steps):
        gradient = X.T @ (expit(X @ theta) - y) + noise_std * rng.normal(size=len(theta))
        theta -= step_size * gradient / len(y)
    return theta


def measure(task: tuple[str, float, int]) -> tuple[float, float, list[float]]:
    """Return AUC and accuracy of `auto`, and the AUC of each setting of plain descent."""
    name, epsilon, seed = task
    X, y = load(name, "train")
    X_test, y_test = load(name, "test")
    model = LogisticRegression(
        epsilon=epsilon, delta=DELTA, bounds=Bounds(0, 1, norm=1), classes=[0, 1],
        random_state=seed,
    ).fit(X, y)  # fmt: skip
    ours = float(roc_auc_score(y_test, model.decision_function(X_test)))
    plain = [
        float(roc_auc_score(y_test, X_test @ plain_descent(X, y, epsilon, *setting, seed)))
        for setting in SETTINGS
    ]
    return ours, float(model.score(X_test, y_test)), plain


def fit_wide_table() -> str:
    """Fit a synthetic sparse table of the size of a large vocabulary; return what it took."""
    rows, columns, density = 11_000, 54_000, 0.002
    rng = np.random.default_rng(0)
    X = normalize(random_array((rows, columns), density=density, rng=rng, format="csr"))
    y = rng.integers(0, 2, rows)
    start = time.perf_counter()
    LogisticRegression(epsilon=1.0, delta=DELTA, bounds=Bounds(0, 1, norm=1), random_state=0).fit(
        X, y
    )
    seconds = time.perf_counter() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # GiB; Linux counts KiB
    return (
        f"A synthetic sparse table of {rows:,} x {columns:,} (density {density:g}) is fitted in "
        f"{seconds:.1f} s of wall time by a process with a peak of {memory:.2f} GiB. Bar: 60 s and "
        "2 GiB."
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=9)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    given = parser.parse_args()
    lines = []
    with ProcessPoolExecutor(1) as pool:  # a process of its own, whose peak is that of the fit
        wide = pool.submit(fit_wide_table).result()
    with ProcessPoolExecutor(given.processes) as pool:
        for name in TEXTS:
            X, y = load(name, "train")
            X_test, y_test = load(name, "test")
            ordinary = Ordinary(C=10, max_iter=300).fit(X, y)
            best = f"{roc_auc_score(y_test, ordinary.decision_function(X_test)):.4f}"
            for epsilon in EPSILONS:
                tasks = [(name, epsilon, seed) for seed in range(given.seeds)]
                found = list(pool.map(measure, tasks))
                ours, accuracy = (np.median([f[k] for f in found]) for k in (0, 1))
                plain = np.median([f[2] for f in found], axis=0)
                setting = SETTINGS[int(plain.argmax())]
                is_met = "yes" if ours > plain.max() else "no"
                lines.append([
                    name, f"{epsilon:g}", f"{ours:.4f}", f"{100 * accuracy:.2f}",
                    f"{plain.max():.4f}", f"{setting[0]} x {setting[1]:g}", best, is_met,
                ])  # fmt: skip
                print(lines[-1], flush=True)
    header = [
        "text", "epsilon", "auto, AUC", "auto, accuracy %", "plain descent, AUC",
        "its best setting", "non-private, AUC", "above",
    ]  # fmt: skip
    results.write(
        "regression_text",
        "Logistic regression on texts",
        ["numpy", "scipy", "scikit-learn"],
        f"Medians of {given.seeds} seeds, delta {DELTA:g}, unit rows of word presence, no tuning "
        "of `auto`; the best of four settings of plain descent on the test texts.",
        wide,
        results.table(header, lines),
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
