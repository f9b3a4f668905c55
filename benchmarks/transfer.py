"""Transfer regression on a line, on sources that differ, and on the simulation of glmtrans.

    python benchmarks/transfer.py

Line: y = 2x + 1 with x given as (i, i), two equal coordinates, so that the design is collinear.
Data sets i = 1..5, then 5, 10, 15 and 20 migrated ones i = 6..25, each with 1,000 records uniform
around its point, epsilon = 1 for each. Bar: the squared error summed over test points falls with
every step and ends at least 20 times below the start (mean of 100 runs).

Sparse: p = 500, s = 5, K = 5 sources, h in {5, 20}, sizes 50 times those of Tian & Feng 2023
(glmtrans): n_0 = 10,000 and n_k = 5,000. Error against the number of informative sources for
transfer, target only, oracle (given the informative sources) and naive pooling of all.

Unlike sources: three sources that all differ from the target by the same vector, from differences
that noise hides to obvious ones. Bar: if no source is informative, the error is at most 1.1 times
that of the target alone.
"""

import _results as results
import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from tacit.regression import Bounds, TransferRegression

mpl.use("Agg")
import matplotlib.pyplot as plt  # after the backend is chosen

BUDGET = {"epsilon": 1.0, "delta": 1e-6}
Floats = NDArray[np.float64]
Data = tuple[Floats, Floats]

RUNS, ORIGINAL, STEPS, RECORDS = 100, 5, (0, 5, 10, 15, 20), 1000
UNLIKE_RUNS, OFFSETS = 200, (0.0, 0.1, 0.2, 0.3, 0.45, 0.6, 1.0, 3.0)
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
            **BUDGET, bounds=Bounds(0, 26), target_bounds=Bounds(0, 54), random_state=seed
        ).fit(*target, sources=sources)
        away = model.predict(np.column_stack([points, points])) - (2 * points + 1)
        errors.append(float(away @ away))
    return errors


def line() -> str:
    """Return the table of the line simulation, and draw results/transfer_line.svg."""
    found = np.array([line_errors(seed) for seed in range(RUNS)])
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


def unlike_ratios(n_features: int, q: int) -> list[str]:
    """Return the mean error with three sources relative to the target alone, at each offset."""
    weights = np.ones(n_features)
    bounds = {"bounds": (0, 10), "target_bounds": (-10 * n_features, 20 * n_features)}
    cells = []
    for offset in OFFSETS:
        errors = np.zeros((UNLIKE_RUNS, 2))
        for seed in range(UNLIKE_RUNS):
            rng = np.random.default_rng(seed)
            turn = rng.normal(size=n_features)
            moved = weights + offset * turn / np.linalg.norm(turn)
            sizes = [(weights, 1000 * n_features)] + [(moved, 2500 * n_features)] * 3
            data = []
            for w, n in sizes:
                X = rng.uniform(0, 10, (n, n_features))
                data.append((X, X @ w + 1 + rng.normal(size=n)))
            test = rng.uniform(0, 10, (500, n_features))
            for column, sources in enumerate([data[1:], []]):
                model = TransferRegression(**BUDGET, **bounds, q=q, random_state=seed)
                away = model.fit(*data[0], sources=sources).predict(test) - test @ weights - 1
                errors[seed, column] = np.mean(away**2)
        helped, alone = errors.mean(axis=0)
        cells.append(f"{helped / alone:.2f}")
    return cells


def unlike() -> str:
    """Return the table of unlike sources."""
    rows = [[d, q, *unlike_ratios(d, q)] for d in (2, 5) for q in (1, 2)]
    return results.table(["features", "q", *(f"offset {o:g}" for o in OFFSETS)], rows)


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


def sparse(h: float) -> list[list[object]]:
    """Return rows of h, q, number of informative sources, and the error of each approach."""
    sigma = toeplitz()
    names = ("transfer", "target only", "oracle", "naive pooling")
    cases = [(q, a) for q in (1, 2) for a in range(K + 1)]
    found = {(case, name): [] for case in cases for name in names}
    right = dict.fromkeys(cases, 0)
    for seed in range(SPARSE_RUNS):
        target, good, bad, beta = simulate(seed, h)
        alone = {q: fit(target, [], q, seed, None)[0] for q in (1, 2)}
        for q, a in cases:
            sources = good[:a] + bad[: K - a]
            coef, used = fit(target, sources, q, seed, None)
            right[q, a] += used == list(range(a))
            ways = {
                "transfer": coef,
                "target only": alone[q],
                "oracle": fit(target, good[:a], q, seed, EVERYTHING)[0],
                "naive pooling": fit(target, sources, q, seed, EVERYTHING)[0],
            }
            for name, w in ways.items():
                found[(q, a), name].append(float((w - beta) @ sigma @ (w - beta)))
    return [
        [f"{h:g}", q, a, *(f"{np.median(found[(q, a), name]):.4f}" for name in names),
         f"{right[q, a]} of {SPARSE_RUNS}"]
        for q, a in cases
    ]  # fmt: skip


def main() -> None:
    header = [
        "h", "q", "informative", "transfer", "target only", "oracle", "naive pooling",
        "sources chosen rightly",
    ]  # fmt: skip
    rows = [row for h in (5.0, 20.0) for row in sparse(h)]
    results.write(
        "transfer",
        "Transfer regression",
        ["numpy", "scikit-learn"],
        "Each data set has epsilon = 1, delta = 1e-6 of its own; people are disjoint.",
        f"## The line\n\n{RUNS} runs.\n\n{line()}\n\n![line](transfer_line.svg)",
        f"## Unlike sources\n\nMean squared error with three sources whose coefficients are off by "
        "a vector of this length (the target's are all 1), over that of the target alone with the "
        f"same noise; mean of {UNLIKE_RUNS} runs. If noise hides the difference, a source "
        f"sometimes is used; obviously different sources are not.\n\n{unlike()}",
        f"## Sparse, p = {P}\n\nn_0 = {N_TARGET:,}, n_k = {N_SOURCE:,}, {K} sources of which some "
        "are informative. Prediction error (w - beta)' Sigma (w - beta), median of "
        f"{SPARSE_RUNS} runs; at w = 0 it is {np.sum(toeplitz()[:S, :S]) / 4:.2f}.\n\n"
        + results.table(header, rows),
    )


if __name__ == "__main__":
    main()
