"""Coverage and width of 95 % intervals for the coefficients of private regression.

    python benchmarks/regression_intervals.py [linear] [logistic] [--simulations 1000]
                                              [--processes N] [--kinds uniform] [--first-seed 0]
                                              [--shapes "1000 x 2;5000 x 3"]

Every simulation draws a new table and fits it once. Bars: coverage of each coefficient at least
93 %; width at most 1.3 times that of the interval which knows the spread of the estimates over all
simulations (1.96 standard deviations), the shortest that is valid for this estimator.
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

import _results as results
import numpy as np

from tacit.regression import LinearRegression, LogisticRegression

EPSILONS, DELTA, STD = (0.1, 1.0, 8.0), 1e-6, 0.15
SHAPES = "1000 x 2;5000 x 3;20000 x 8"
KINDS = {
    "linear": (
        "uniform", "correlated", "very correlated", "indicators", "rare indicators", "heavy tails",
        "heteroscedastic", "skewed errors",
    ),
    "logistic": (
        "uniform", "correlated", "indicators", "rare indicators", "heavy tails", "steep",
        "rare class",
    ),
}  # fmt: skip


class Outcome(NamedTuple):
    """One simulation: errors and half widths of the coefficients, and what least squares has."""

    errors: np.ndarray
    halves: np.ndarray
    ordinary: np.ndarray
    predicted: float


def features(kind: str, n: int, d: int, rng: np.random.Generator) -> np.ndarray:
    if "correlated" in kind:
        common = 0.9 if kind == "very correlated" else 0.5
        root = np.linalg.cholesky((1 - common) * np.eye(d) + common)
        return np.clip(rng.normal(0, 0.3, (n, d)) @ root.T, -1, 1)
    if "indicators" in kind:
        return 2.0 * (rng.random((n, d)) < (0.02 if "rare" in kind else 0.3)) - 1
    if kind == "heavy tails":
        return np.clip(rng.standard_t(3, (n, d)) / 6, -1, 1)
    return rng.uniform(-1, 1, (n, d))


def simulate_logistic(task: tuple[str, int, int, float], seed: int) -> Outcome:
    kind, n, d, epsilon = task
    rng = np.random.default_rng([seed, n, d, 1])
    X, slopes = features(kind, n, d, rng), np.linspace(-1, 1, d) * (2 if kind == "steep" else 1)
    truth = np.append(-3.5 if kind == "rare class" else -0.5, slopes)
    Z = np.column_stack([np.ones(n), X])
    p = 1 / (1 + np.exp(-Z @ truth))
    y = rng.random(n) < p
    model = LogisticRegression(
        epsilon=epsilon, delta=DELTA, bounds=(-1, 1), classes=[False, True], random_state=seed
    ).fit(X, y)
    if model.inference_ is None:  # the method without second moments, for hopeless budgets
        return Outcome(np.zeros(d + 1), *[np.full(d + 1, np.inf)] * 2, np.nan)
    interval = model.inference_.interval()
    ordinary = 1.96 * np.sqrt(np.diag(np.linalg.pinv((Z.T * (p * (1 - p))) @ Z)))
    halves = (interval.upper - interval.lower) / 2
    return Outcome(model.inference_.estimates - truth, halves, ordinary, np.nan)


def draw_errors(kind: str, X: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return errors of mean 0; their standard deviation is STD, or depends on a feature."""
    if kind == "heavy tails":
        return rng.standard_t(5, len(X)) * STD / np.sqrt(5 / 3)
    if kind == "skewed errors":
        return STD * (rng.exponential(1, len(X)) - 1)
    scale = np.exp(1.2 * X[:, 0]) if kind == "heteroscedastic" else 1.0
    return rng.normal(0, STD, len(X)) * scale


def simulate(task: tuple[str, int, int, float], seed: int) -> Outcome:
    kind, n, d, epsilon = task
    rng = np.random.default_rng([seed, n, d])
    X, beta = features(kind, n, d, rng), np.linspace(-0.3, 0.3, d)
    noise = draw_errors(kind, X, rng)
    truth = np.append(0.1, beta)
    model = LinearRegression(
        epsilon=epsilon, delta=DELTA, bounds=(-1, 1), target_bounds=(-3, 3), random_state=seed
    ).fit(X, X @ beta + 0.1 + noise)
    assert model.inference_ is not None
    interval = model.inference_.interval()
    Z = np.column_stack([np.ones(n), X])
    bread = np.linalg.pinv(Z.T @ Z)
    ordinary = 1.96 * np.sqrt(np.diag(bread @ (Z.T * noise**2) @ Z @ bread))
    fresh = features(kind, 200, d, rng)
    target = fresh @ beta + 0.1 + draw_errors(kind, fresh, rng)
    ends = model.predict_interval(fresh)
    predicted = float(np.mean((ends.lower <= target) & (target <= ends.upper)))
    halves = (interval.upper - interval.lower) / 2
    return Outcome(model.inference_.estimates - truth, halves, ordinary, predicted)


def measure(model: str, given: argparse.Namespace) -> str:
    """Return the table of one kind of model."""
    simulation = {"linear": simulate, "logistic": simulate_logistic}[model]
    kinds = given.kinds.split(",") if given.kinds else KINDS[model]
    shapes = [tuple(map(int, shape.split("x"))) for shape in given.shapes.split(";")]
    seeds = range(given.first_seed, given.first_seed + given.simulations)
    lines = []
    with ProcessPoolExecutor(given.processes) as pool:
        for task in ((k, n, d, e) for n, d in shapes for k in kinds for e in EPSILONS):
            done = list(pool.map(partial(simulation, task), seeds, chunksize=8))
            errors, halves, ordinary, predicted = map(np.array, zip(*done, strict=True))
            covered = np.mean(np.abs(errors) <= halves, axis=0)
            finite = np.isfinite(halves).all(axis=1)
            kind, n, d, epsilon = task
            if finite.sum() < 30:  # too few for a spread
                hidden = f"{100 * np.mean(~finite):.1f}"
                least = f"{100 * covered.min():.1f}"
                blank = ["-"] * (3 if model == "linear" else 2)
                lines.append([kind, f"{n:,} x {d}", f"{epsilon:g}", least, least, *blank, hidden])
                print(model, lines[-1], flush=True)
                continue
            oracle = 1.96 * errors[finite].std(axis=0)
            width = np.median(halves[finite], axis=0)
            lines.append([
                kind, f"{n:,} x {d}", f"{epsilon:g}", f"{100 * covered.min():.1f}",
                f"{100 * covered.mean():.1f}", f"{(width / oracle).max():.2f}",
                f"{np.median(width / np.median(ordinary, axis=0)):.2f}",
                *([f"{100 * predicted.mean():.1f}"] if model == "linear" else []),
                f"{100 * np.mean(~finite):.1f}",
            ])  # fmt: skip
            print(model, lines[-1], flush=True)
    header = [
        "features", "table", "epsilon", "coverage, least %", "coverage, mean %",
        "width over shortest valid, largest", "width over non-private",
        *(["prediction %"] if model == "linear" else []), "infinite %",
    ]  # fmt: skip
    return f"## {model.capitalize()}\n\n" + results.table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=["linear", "logistic"])
    parser.add_argument("--simulations", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--kinds", help="separated by commas; default: all")
    parser.add_argument("--shapes", default=SHAPES, help="separated by semicolons")
    given = parser.parse_args()
    results.write(
        "regression_intervals",
        "Intervals of private regression",
        ["numpy", "scikit-learn"],
        f"{given.simulations} simulations per line, seeds from {given.first_seed}, nominal 95 %, "
        f"delta {DELTA:g}, default method. Least coverage is that of the worst coefficient. Widths "
        "are medians, over fits in which all are finite; the non-private ones are robust to errors "
        "of different variances. Heavy tails: t with 3 degrees of freedom in the features "
        "(clipped) and with 5 in the errors. Rare indicators: 2 %. Heteroscedastic: standard "
        "deviation exp(1.2 x). Skewed errors: exponential. Steep: slopes up to 2. Rare class: 3 %.",
        *(measure(model, given) for model in given.models),
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
