"""Coverage and width of 95 % intervals for the coefficients of private regression.

    python benchmarks/regression_intervals.py [linear] [logistic] [--simulations 1000]
                                              [--processes N] [--kinds uniform] [--first-seed 0]
                                              [--shapes "1000 x 2;5000 x 3"] [--epsilons 0.1,1,8]
                                              [--saved rows.jsonl]

Every simulation draws a new table and fits it once. `--saved` names a file that keeps each row; the
results hold all rows of the file, and a row in it is not measured again. Bars: coverage of each
coefficient at least 93 %; width at most 1.3 times that of the interval which knows the spread of
the estimates over all simulations (1.96 standard deviations), the shortest that is valid for this
estimator.
"""

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import _results as results
import numpy as np

from tacit.regression import LinearRegression, LogisticRegression

EPSILONS, DELTA, STD = "0.1,1,8", 1e-6, 0.15
SHAPES = "1000 x 2;5000 x 3;20000 x 8"
KINDS = {
    "linear": (
        "uniform", "correlated", "very correlated", "indicators", "rare indicators", "heavy tails",
        "heteroscedastic", "skewed errors", "lognormal errors", "wide bounds", "mixed columns",
        "weights", "no intercept",
    ),
    "logistic": (
        "uniform", "correlated", "very correlated", "indicators", "rare indicators", "heavy tails",
        "steep", "very steep", "rare class", "wide bounds", "mixed columns", "weights",
        "no intercept",
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
    if kind == "mixed columns":
        columns = [
            rng.random(n) < 0.3, rng.exponential(0.15, n), rng.normal(0.5, 0.1, n),
            rng.random(n) < 0.1, rng.uniform(0, 1, n), rng.beta(2, 5, n),
        ]  # fmt: skip
        return np.column_stack([np.clip(columns[k % 6], 0, 1) for k in range(d)]).astype(np.float64)
    return rng.uniform(-1, 1, (n, d))


def settings(kind: str) -> dict[str, Any]:
    """Return what is declared about a table besides its target."""
    if kind == "weights":
        return {"bounds": (-1, 1), "max_weight": 1.0}
    bounds = {"wide bounds": (-3, 3), "mixed columns": (0, 1)}.get(kind, (-1, 1))
    return {"bounds": bounds, "fit_intercept": kind != "no intercept"}


def draw_weights(kind: str, n: int, rng: np.random.Generator) -> np.ndarray | None:
    return rng.uniform(0, 1, n) if kind == "weights" else None


def robust_widths(Z: np.ndarray, bread: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Return half widths without privacy; `squares` are those of the weighted residuals."""
    return 1.96 * np.sqrt(np.diag(bread @ (Z.T * squares) @ Z @ bread))


def simulate_logistic(task: tuple[str, int, int, float], seed: int) -> Outcome:
    kind, n, d, epsilon = task
    rng = np.random.default_rng([seed, n, d, 1])
    X = features(kind, n, d, rng)
    slopes = np.linspace(-1, 1, d) * {"steep": 2, "very steep": 4}.get(kind, 1)
    Z, truth = np.column_stack([np.ones(n), X]), np.append(-0.5, slopes)
    truth[0] = {"rare class": -3.5, "no intercept": 0.0}.get(kind, -0.5)
    p = 1 / (1 + np.exp(-Z @ truth))
    y, weights = rng.random(n) < p, draw_weights(kind, n, rng)
    model = LogisticRegression(
        epsilon=epsilon, delta=DELTA, classes=[False, True], random_state=seed, **settings(kind)
    ).fit(X, y, weights)
    if kind == "no intercept":
        truth, Z = truth[1:], X
    if model.inference_ is None:  # the method without second moments, for hopeless budgets
        endless = np.full(len(truth), np.inf)
        return Outcome(0 * truth, endless, endless, np.nan)
    interval = model.inference_.interval()
    given = np.ones(n) if weights is None else weights
    bread = np.linalg.pinv((Z.T * (given * p * (1 - p))) @ Z)
    ordinary = robust_widths(Z, bread, given**2 * p * (1 - p))
    halves = (interval.upper - interval.lower) / 2
    return Outcome(model.inference_.estimates - truth, halves, ordinary, np.nan)


def draw_errors(kind: str, X: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return errors of mean 0; their standard deviation is STD, or depends on a feature."""
    if kind == "heavy tails":
        return rng.standard_t(5, len(X)) * STD / np.sqrt(5 / 3)
    if kind == "skewed errors":
        return STD * (rng.exponential(1, len(X)) - 1)
    if kind == "lognormal errors":
        return STD * (np.exp(0.5 * rng.normal(size=len(X)) - 0.125) - 1) / np.sqrt(np.expm1(0.25))
    scale = np.exp(1.2 * X[:, 0]) if kind == "heteroscedastic" else 1.0
    return rng.normal(0, STD, len(X)) * scale


def simulate(task: tuple[str, int, int, float], seed: int) -> Outcome:
    kind, n, d, epsilon = task
    rng = np.random.default_rng([seed, n, d])
    X, beta = features(kind, n, d, rng), np.linspace(-0.3, 0.3, d)
    noise, weights = draw_errors(kind, X, rng), draw_weights(kind, n, rng)
    constant = 0.0 if kind == "no intercept" else 0.1
    truth, Z = np.append(constant, beta), np.column_stack([np.ones(n), X])
    if kind == "no intercept":
        truth, Z = beta, X
    model = LinearRegression(
        epsilon=epsilon, delta=DELTA, target_bounds=(-3, 3), random_state=seed, **settings(kind)
    ).fit(X, X @ beta + constant + noise, weights)
    assert model.inference_ is not None
    interval = model.inference_.interval()
    given = np.ones(n) if weights is None else weights
    ordinary = robust_widths(Z, np.linalg.pinv((Z.T * given) @ Z), (given * noise) ** 2)
    fresh = features(kind, 200, d, rng)
    target = fresh @ beta + constant + draw_errors(kind, fresh, rng)
    ends = model.predict_interval(fresh)
    predicted = float(np.mean((ends.lower <= target) & (target <= ends.upper)))
    halves = (interval.upper - interval.lower) / 2
    return Outcome(model.inference_.estimates - truth, halves, ordinary, predicted)


def measure(model: str, given: argparse.Namespace, saved: dict[str, list[str]]) -> str:
    """Return the table of one kind of model: the rows in `saved`, to which new ones are added."""
    simulation = {"linear": simulate, "logistic": simulate_logistic}[model]
    asked = given.kinds.split(",") if given.kinds else KINDS[model]
    kinds = [kind for kind in asked if kind in KINDS[model]]
    shapes = [tuple(map(int, shape.split("x"))) for shape in given.shapes.split(";") if shape]
    epsilons = [float(epsilon) for epsilon in given.epsilons.split(",")]
    seeds = range(given.first_seed, given.first_seed + given.simulations)
    with ProcessPoolExecutor(given.processes) as pool:
        for task in ((k, n, d, e) for n, d in shapes for k in kinds for e in epsilons):
            name = " ".join(map(str, (model, *task)))
            if name in saved:
                continue
            done = list(pool.map(partial(simulation, task), seeds, chunksize=8))
            saved[name] = summarize(task, done, has_predictions=model == "linear")
            print(name, saved[name], flush=True)
            if given.saved:
                with open(given.saved, "a") as file:
                    file.write(json.dumps([name, saved[name]]) + "\n")
    lines = [line for name, line in saved.items() if name.startswith(model)]
    lines.sort(key=lambda line: (int(line[1].split()[0].replace(",", "")), line[0], float(line[2])))
    header = [
        "features", "table", "epsilon", "coverage, least %", "coverage, mean %",
        "width over shortest valid, largest", "width over non-private",
        *(["prediction %"] if model == "linear" else []), "infinite %",
    ]  # fmt: skip
    return f"## {model.capitalize()}\n\n" + results.table(header, lines)


def summarize(
    task: tuple[str, int, int, float], done: list[Outcome], *, has_predictions: bool
) -> list[str]:
    """Return one row of the table."""
    errors, halves, ordinary, predicted = map(np.array, zip(*done, strict=True))
    covered = np.mean(np.abs(errors) <= halves, axis=0)
    finite = np.isfinite(halves).all(axis=1)
    kind, n, d, epsilon = task
    widths = ["-"] * (2 + has_predictions)
    if finite.sum() >= 30:  # fewer are too few for a spread
        width = np.median(halves[finite], axis=0)
        ratio = width / (1.96 * errors[finite].std(axis=0))
        ordinary_ratio = np.median(width / np.median(ordinary, axis=0))
        widths = [f"{ratio.max():.2f}", f"{ordinary_ratio:.2f}"]
        widths += [f"{100 * predicted.mean():.1f}"] * has_predictions
    return [
        kind, f"{n:,} x {d}", f"{epsilon:g}", f"{100 * covered.min():.1f}",
        f"{100 * covered.mean():.1f}", *widths, f"{100 * np.mean(~finite):.1f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=["linear", "logistic"])
    parser.add_argument("--simulations", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--kinds", help="separated by commas; default: all")
    parser.add_argument("--shapes", default=SHAPES, help="separated by semicolons")
    parser.add_argument("--epsilons", default=EPSILONS, help="separated by commas")
    parser.add_argument("--saved", help="file that keeps the rows")
    given = parser.parse_args()
    saved: dict[str, list[str]] = {}
    if given.saved and Path(given.saved).exists():
        saved = dict(map(json.loads, Path(given.saved).read_text().splitlines()))
    results.write(
        "regression_intervals",
        "Intervals of private regression",
        ["numpy", "scikit-learn"],
        f"{given.simulations} simulations per line, seeds from {given.first_seed}, nominal 95 %, "
        f"delta {DELTA:g}, default method. Least coverage is that of the worst coefficient; an "
        "infinite interval covers. Widths are medians, over fits in which all are finite. The "
        "shortest valid width is 1.96 standard deviations of the estimates over these fits, which "
        "no release shows. Non-private widths are robust to errors of different variances. Heavy "
        "tails: t with 3 degrees of freedom in the features (clipped) and with 5 in the errors. "
        "Rare indicators: 2 %. Correlated: 0.5 and 0.9. Heteroscedastic: standard deviation "
        "exp(1.2 x). Skewed errors: exponential. Lognormal errors: log of standard deviation 0.5. "
        "Wide bounds: three times the range of the features. Mixed columns: indicators of 30 % and "
        "10 %, exponential, narrow normal, uniform, beta. Weights: uniform in [0, 1]. Steep: "
        "slopes up to 2; very steep: up to 4. Rare class: 3 to 4 %.",
        *(measure(model, given, saved) for model in given.models),
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
