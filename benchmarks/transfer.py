"""Transfer regression on a line, on sources that differ, on real tables, and as glmtrans simulates.

    python benchmarks/transfer.py [--processes 16] [--parts line,unlike,tables,sparse]

Line: y = 2x + 1 with x given as (i, i), two equal coordinates, so that the design is collinear.
Data sets i = 1..5, then 5, 10, 15 and 20 migrated ones i = 6..25, each with 1,000 records uniform
around its point, epsilon = 1 for each; h = 0 declares one line for all. Bar: the squared error
summed over test points falls with every step and ends at least 20 times below the start (mean of
100 runs).

Sparse: p = 500, s = 5, K = 5 sources, h in {5, 20}, sizes 50 times those of Tian & Feng 2023
(glmtrans): n_0 = 10,000 and n_k = 5,000. Error against the number of informative sources for
transfer, target only, oracle (given the informative sources) and naive pooling of all.

Unlike sources: three sources that all differ from the target by the same vector, from differences
that noise hides to obvious ones. Bar: if no source is informative, the error is at most 1.1 times
that of the target alone.

Tables: a few records of a real table are the target. Its three sources are other records of the
same table, records of another group, or records that were made unrelated: targets negated or
shuffled, columns exchanged. Bar: the error is never above that of the target alone, beyond two
standard errors of the mean over seeds and 1 % of the target's variance.
"""

import argparse
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import cache

import _results as results
import _tables as tables
import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from tacit.regression import Bounds, TransferRegression

BUDGET = {"epsilon": 1.0, "delta": 1e-6}
Floats = NDArray[np.float64]
Data = tuple[Floats, Floats]

RUNS, ORIGINAL, STEPS, RECORDS = 100, 5, (0, 5, 10, 15, 20), 1000
UNLIKE_RUNS, OFFSETS = 100, (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0, 3.0)
SPARSE_RUNS, P, S, N_TARGET, N_SOURCE, K = 11, 500, 5, 10_000, 5_000, 5
EVERYTHING = 1e9
"""Allowance at which every source counts as informative: naive pooling."""


def around(i: int, rng: np.random.Generator) -> Data:
    """Return data set i: both coordinates equal, noise of standard deviation 0.5."""
    t = i + rng.uniform(-0.5, 0.5, RECORDS)
    return np.column_stack([t, t]), 2 * t + 1 + rng.normal(0, 0.5, RECORDS)


def line_errors(seed: int) -> list[float]:
    """Return the sum of squared errors over i = 1..25 after each step."""
    rng = np.random.default_rng(seed)
    data = [around(i, rng) for i in range(1, ORIGINAL + max(STEPS) + 1)]
    points = np.arange(1.0, len(data) + 1)
    errors = []
    for migrated in STEPS:
        target, *sources = data[: ORIGINAL + migrated]
        model = TransferRegression(
            **BUDGET, bounds=Bounds(0, 26), target_bounds=Bounds(0, 54), h=0, random_state=seed
        ).fit(*target, sources=sources)
        away = model.predict(np.column_stack([points, points])) - (2 * points + 1)
        errors.append(float(away @ away))
    return errors


def line(pool: ProcessPoolExecutor) -> str:
    """Return the table of the line simulation, and draw results/transfer_line.svg."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # after the backend is chosen

    found = np.array(list(pool.map(line_errors, range(RUNS))))
    mean = found.mean(axis=0)
    figure, axes = plt.subplots(figsize=(6, 4))
    sets = [ORIGINAL + migrated for migrated in STEPS]
    axes.plot(sets, mean, marker="o", label="mean of 100 runs")
    axes.plot(sets, np.median(found, axis=0), marker="s", linestyle=":", label="median")
    axes.set(yscale="log", xlabel="data sets", ylabel="sum of squared errors, i = 1..25")
    axes.set_xticks(sets)
    axes.legend()
    figure.tight_layout()
    figure.savefig(results.RESULTS / "transfer_line.svg", metadata={"Date": None})
    plt.close(figure)
    rows = [
        [f"{ORIGINAL} + {m}", f"{a:,.2f}", f"{b:,.2f}", f"{mean[0] / a:,.0f}"]
        for m, a, b in zip(STEPS, mean, np.median(found, axis=0), strict=True)
    ]
    return results.table(
        ["data sets", "sum of squares, mean", "median", "times below the start"], rows
    )


def unlike_ratio(task: tuple[int, int, float]) -> float:
    """Return the mean error with three sources relative to that of the target alone."""
    n_features, q, offset = task
    weights = np.ones(n_features)
    bounds = {"bounds": (0, 10), "target_bounds": (-10 * n_features, 20 * n_features)}
    errors = np.zeros((UNLIKE_RUNS, 2))
    for seed in range(UNLIKE_RUNS):
        rng = np.random.default_rng(seed)
        turn = rng.normal(size=n_features)
        moved = weights + offset * turn / np.linalg.norm(turn)
        sizes = [(weights, 400 * n_features)] + [(moved, 1000 * n_features)] * 3
        data = []
        for w, n in sizes:
            X = rng.uniform(0, 10, (n, n_features))
            data.append((X, X @ w + 1 + rng.normal(size=n)))
        test = rng.uniform(0, 10, (500, n_features))
        model = TransferRegression(**BUDGET, **bounds, q=q, random_state=seed)
        model.fit(*data[0], sources=data[1:])
        coef, intercept = model.alone_
        for column, found in enumerate([model.predict(test), test @ coef + intercept]):
            errors[seed, column] = np.mean((found - test @ weights - 1) ** 2)
    helped, alone = errors.mean(axis=0)
    return helped / alone


def unlike(pool: ProcessPoolExecutor) -> str:
    """Return the table of unlike sources."""
    cases = [(d, q) for d in (1, 2, 5, 10) for q in (1, 2)]
    tasks = [(d, q, offset) for d, q in cases for offset in OFFSETS]
    cells = [f"{ratio:.2f}" for ratio in pool.map(unlike_ratio, tasks)]
    width = len(OFFSETS)
    rows = [[d, q, *cells[k * width : (k + 1) * width]] for k, (d, q) in enumerate(cases)]
    return results.table(["features", "q", *(f"offset {o:g}" for o in OFFSETS)], rows)


TABLES = {
    "california": tables.california,
    "cps": tables.cps_earnings,
    "fulton": tables.fulton,
    "acs": tables.acs_income,
    "fertility": tables.fertility,
    "adult": tables.adult_hours,
    "protein": lambda: tables.uci("protein"),
    "bike": lambda: tables.uci("bike"),
}
KINDS = ("same", "group", "negated", "shuffled", "exchanged", "one of three")
TARGETS, SOURCE, TABLE_RUNS = (300, 2000), 6000, 19


@cache
def scaled(name: str) -> Data:
    """Return features and target, clipped to their bounds and scaled to [-1, 1]."""
    table = TABLES[name]()
    box = table.bounds.box(table.X.shape[1])
    X = (np.clip(table.X, box.lower, box.upper) - box.center) / box.half
    return X, table.target_bounds.box(1).scale_target(table.y)


def sources_of(X: Floats, y: Floats, kind: str, rng: np.random.Generator) -> list[Data]:
    """Return three sources from the records `X`, `y`, changed as `kind` says."""
    found = []
    for k, rows in enumerate(np.array_split(rng.permutation(len(y))[: 3 * SOURCE], 3)):
        features, targets = X[rows], y[rows]
        if kind == "negated" or (kind == "one of three" and k > 0):
            targets = -targets
        if kind == "shuffled":
            targets = rng.permutation(targets)
        if kind == "exchanged":
            features = np.roll(features, 1, axis=1)
        found.append((features, targets))
    return found


def on_table(task: tuple[str, int, float, str, int]) -> tuple[float, float, int]:
    """Return the errors with sources and alone, relative to the variance, and sources used."""
    name, n_target, epsilon, kind, seed = task
    X, y = scaled(name)
    rng = np.random.default_rng(seed)
    column = X[:, int(np.argmax(X.std(axis=0)))]
    is_one = column > column.mean() if kind == "group" else rng.random(len(y)) < 0.5
    own, others = rng.permutation(np.flatnonzero(is_one)), np.flatnonzero(~is_one)
    target, test = own[:n_target], own[n_target : n_target + 4000]
    model = TransferRegression(
        epsilon=epsilon, delta=1e-6, bounds=(-1, 1), target_bounds=(-1, 1), random_state=seed
    ).fit(X[target], y[target], sources=sources_of(X[others], y[others], kind, rng))
    coef, intercept = model.alone_
    truth = y[test]
    both = (model.predict(X[test]), X[test] @ coef + intercept)
    with_sources, alone = (float(np.mean((p - truth) ** 2) / truth.var()) for p in both)
    return with_sources, alone, len(model.informative_)


def on_tables(pool: ProcessPoolExecutor) -> str:
    """Return the table of real tables, and how many of its cells are within the bar."""
    cases = [
        (name, n, epsilon, kind)
        for name in TABLES for n in TARGETS for epsilon in (0.1, 1.0) for kind in KINDS
    ]  # fmt: skip
    tasks = [(*case, seed) for case in cases for seed in range(TABLE_RUNS)]
    found = np.array(list(pool.map(on_table, tasks, chunksize=TABLE_RUNS)))
    rows, n_met = [], 0
    for case, runs in zip(cases, found.reshape(len(cases), TABLE_RUNS, 3), strict=True):
        change = runs[:, 0] - runs[:, 1]
        error = change.std(ddof=1) / TABLE_RUNS**0.5
        is_met = change.mean() <= 2 * error + 0.01
        n_met += is_met
        cells = [f"{np.median(runs[:, k]):.3f}" for k in (1, 0)]
        cells += [f"{change.mean():+.4f} ± {error:.4f}", f"{change.max():+.3f}"]
        rows.append([*case, *cells, f"{runs[:, 2].mean():.1f}", "yes" if is_met else "NO"])
    header = [
        "table", "records", "epsilon", "sources", "alone", "transfer", "mean change", "worst",
        "used", "met",
    ]  # fmt: skip
    return f"{n_met} of {len(cases)} cells are within the bar.\n\n" + results.table(header, rows)


def toeplitz() -> Floats:
    """Return the covariance matrix 0.5^|i - j|."""
    index = np.arange(P)
    return 0.5 ** np.abs(index[:, None] - index)


def draw(
    n: int, weights: Floats, shift: float, direction: Floats, rng: np.random.Generator
) -> Data:
    """Return features with covariance Sigma + direction direction', and their targets."""
    white = rng.normal(size=(n, P))
    white[:, 1:] *= 0.75**0.5
    X = lfilter([1.0], [1.0, -0.5], white, axis=1)  # an autoregression has covariance Sigma
    X += rng.normal(size=(n, 1)) * direction
    return X, X @ weights + shift + rng.normal(size=n)


def simulate(seed: int, h: float) -> tuple[Data, list[Data], list[Data], Floats]:
    """Return target, informative sources, other sources, and the target's coefficients."""
    rng = np.random.default_rng(seed)
    beta = np.zeros(P)
    beta[:S] = 0.5
    target = draw(N_TARGET, beta, 0.0, np.zeros(P), rng)
    good, bad = [], []
    for _ in range(K):
        direction = rng.normal(0, 0.3, P)
        near = beta + h / P * rng.choice([-1, 1], P)
        good.append(draw(N_SOURCE, near, 0.0, direction, rng))
        far = np.zeros(P)
        far[rng.choice(np.arange(S, P), S, replace=False)] = 0.5
        bad.append(draw(N_SOURCE, far + 2 * h / P * rng.choice([-1, 1], P), 0.5, direction, rng))
    return target, good, bad, beta


def fit(target: Data, sources: list[Data], q: int, seed: int, h: float | None) -> tuple:
    """Return the coefficients and the sources used."""
    # Bounds +-4 keep all but 6e-5 of normal features; the norm is that of the mean square, 1 / 16.
    model = TransferRegression(
        **BUDGET,
        bounds=Bounds(-4, 4, norm=(P / 16) ** 0.5),
        target_bounds=Bounds(-8, 8),
        q=q,
        h=h,
        max_features=20,
        random_state=seed,
    ).fit(*target, sources=sources)
    return model.coef_, model.informative_


NAMES = ("transfer", "target only", "oracle", "naive pooling")
CASES = [(q, a) for q in (1, 2) for a in range(K + 1)]


def sparse_errors(task: tuple[int, float]) -> tuple[Floats, list[bool]]:
    """Return the error of each way in each case, and whether the right sources were used."""
    seed, h = task
    target, good, bad, beta = simulate(seed, h)
    errors, right = np.zeros((len(CASES), len(NAMES))), []
    for k, (q, a) in enumerate(CASES):
        sources = good[:a] + bad[: K - a]
        coef, used = fit(target, sources, q, seed, None)
        right.append(used == list(range(a)))
        ways = (
            coef,
            fit(target, [], q, seed, None)[0],
            fit(target, good[:a], q, seed, EVERYTHING)[0],
            fit(target, sources, q, seed, EVERYTHING)[0],
        )
        away = np.array(ways) - beta
        errors[k] = np.einsum("ij,jk,ik->i", away, toeplitz(), away)
    return errors, right


def sparse(pool: ProcessPoolExecutor) -> str:
    """Return the table of the sparse simulation."""
    rows: list[list[object]] = []
    for h in (5.0, 20.0):
        runs = list(pool.map(sparse_errors, [(seed, h) for seed in range(SPARSE_RUNS)]))
        medians = np.median([errors for errors, _ in runs], axis=0)
        for k, (q, a) in enumerate(CASES):
            rightly = sum(right[k] for _, right in runs)
            cells = [f"{value:.4f}" for value in medians[k]]
            rows.append([f"{h:g}", q, a, *cells, f"{rightly} of {SPARSE_RUNS}"])
    return results.table(["h", "q", "informative", *NAMES, "sources chosen rightly"], rows)


def blocks(parts: Iterable[str], pool: ProcessPoolExecutor) -> Iterable[str]:
    """Yield the text of each part."""
    for part in parts:
        if part == "line":
            yield f"## The line\n\n{RUNS} runs.\n\n{line(pool)}\n\n![line](transfer_line.svg)"
        elif part == "unlike":
            yield (
                "## Unlike sources\n\nMean squared error with three sources whose coefficients are "
                "off by a vector of this length (the target's are all 1), over that of the target "
                f"alone with the same noise; mean of {UNLIKE_RUNS} runs.\n\n{unlike(pool)}"
            )
        elif part == "tables":
            yield (
                f"## Tables\n\nThree sources of up to {SOURCE:,} records each; errors relative to "
                f"the variance of the target, medians of {TABLE_RUNS} runs; change: mean with its "
                f"standard error.\n\n{on_tables(pool)}"
            )
        else:
            yield (
                f"## Sparse, p = {P}\n\nn_0 = {N_TARGET:,}, n_k = {N_SOURCE:,}, {K} sources of "
                "which some are informative. Prediction error (w - beta)' Sigma (w - beta), median "
                f"of {SPARSE_RUNS} runs; at w = 0 it is {np.sum(toeplitz()[:S, :S]) / 4:.2f}.\n\n"
                f"{sparse(pool)}"
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--parts", default="line,unlike,tables,sparse")
    given = parser.parse_args()
    with ProcessPoolExecutor(given.processes) as pool:
        results.write(
            "transfer",
            "Transfer regression",
            ["numpy", "scikit-learn"],
            "Each data set has epsilon = 1 (tables: as stated), delta = 1e-6 of its own; people "
            "are disjoint. The target alone is `LinearRegression(method='auto')`.",
            *blocks(given.parts.split(","), pool),
        )


if __name__ == "__main__":
    main()
