"""Linear regression on every table with a numeric target, by `auto` and by other methods.

    python benchmarks/regression_linear.py [--seeds 9] [--tables "yacht;wine"] [--store FILE]
                                           [--diffprivlib PYTHON]

A cell is the median over 80/20 splits of the excess test error: what the mean squared error is
above that of least squares on the same split, in percent of the latter. Bar: `auto` has at most 1.5
times the smallest excess of all methods, or at most 0.2 %, and does not grow with epsilon.
`--diffprivlib` names the Python of an environment with diffprivlib (requirements-diffprivlib.txt).
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import _linear_peers as peers
import _method_tables as method_tables
import _results as results
import _tables as tables
import numpy as np
from _method_tables import DELTA, EPSILONS, Split

from tacit.regression import Bounds, LinearRegression

LOADERS: dict[str, Callable[[], tables.Table]] = {
    "california": tables.california,
    "cps_earnings": tables.cps_earnings,
    "fulton": tables.fulton,
    "cps_taxunits": tables.tax_units,
    "census_kdd": tables.census_weeks,
    "fertility": tables.fertility,
    "acs_income": tables.acs_income,
    "adult": tables.adult_hours,
} | {name: partial(tables.uci, name) for name in tables.UCI}
ENOUGH, FACTOR = 0.2, 1.5


def ours(method: str, X, y, epsilon, delta, rng):
    model = LinearRegression(
        epsilon=epsilon,
        delta=None if method == "functional" else delta,
        bounds=Bounds(-1, 1),
        target_bounds=(-1, 1),
        method=method,
        random_state=int(rng.integers(2**31)),
    ).fit(X, y)
    return np.append(model.intercept_, model.coef_)


METHODS = {
    "auto": partial(ours, "auto"),
    "adassp": partial(ours, "adassp"),
    "functional (pure)": partial(ours, "functional"),
    "BoostedAdaSSP, 10": partial(peers.boosted_adassp, rounds=10),
    "BoostedAdaSSP, 100": partial(peers.boosted_adassp, rounds=100),
    "DP-GD": peers.plain_descent,
    "objective": peers.objective_perturbation,
}
PEER = """
import json, sys, warnings
import numpy as np
from diffprivlib.models import LinearRegression
warnings.simplefilter("ignore")
data, job = np.load(sys.argv[1]), json.loads(sys.argv[2])
X, y, found = data["X"], data["y"], []
for seed in range(job["seeds"]):
    order = np.random.default_rng(seed).permutation(len(y))
    train, test = np.split(order, [len(order) * 4 // 5])
    errors = []
    for epsilon in job["epsilons"]:
        model = LinearRegression(epsilon=epsilon, bounds_X=(-1, 1), bounds_y=(-1, 1),
                                 random_state=seed).fit(X[train], y[train])
        errors.append(float(np.mean((model.predict(X[test]) - y[test]) ** 2)))
    found.append(errors)
print(json.dumps(found))
"""


def scaled(name: str) -> tables.Table:
    """Return the table clipped to its bounds and scaled to [-1, 1], for all methods alike."""
    table = LOADERS[name]()
    box = table.bounds.box(table.X.shape[1])
    X = (np.clip(table.X, box.lower, box.upper) - box.center) / box.half
    return table._replace(X=X, y=table.target_bounds.box(1).scale_target(table.y))


def error(theta, X, y) -> float:
    return float(np.mean((X @ theta[1:] + theta[0] - y) ** 2))


def one_split(task: tuple[str, int]) -> Split:
    """Return the errors of one split: of least squares, and of each method at each epsilon."""
    name, seed = task
    X, y, X_test, y_test = tables.split(scaled(name), seed)
    Z = np.column_stack([np.ones(len(X)), X])
    least = error(np.linalg.lstsq(Z.T @ Z, Z.T @ y, rcond=1e-12)[0], X_test, y_test)
    errors = {
        method: [
            error(fit(X, y, epsilon, DELTA, np.random.default_rng([seed, k])), X_test, y_test)
            for k, epsilon in enumerate(EPSILONS)
        ]
        for method, fit in METHODS.items()
    }
    return Split(least, errors)


def ask_diffprivlib(python: str, name: str, seeds: int) -> list[list[float]]:
    """Return the errors of diffprivlib, which runs in its own environment."""
    table = scaled(name)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.npz"
        np.savez(file, X=table.X, y=table.y)
        job = json.dumps({"seeds": seeds, "epsilons": EPSILONS})
        command = [python, "-c", PEER, str(file), job]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def is_met(excess: dict[str, np.ndarray]) -> np.ndarray:
    """Return for each epsilon whether `auto` is within the bar."""
    best = np.min(list(excess.values()), axis=0)
    return (excess["auto"] <= ENOUGH) | (excess["auto"] <= FACTOR * np.maximum(best, 0))


def grows(excess: np.ndarray) -> bool:
    """Return whether the excess, (splits, epsilons), grows with epsilon by more than noise.

    The median over splits must rise by more than two of its standard errors (1.25 / sqrt(splits)
    times the standard deviation of the rise), and by more than ENOUGH.
    """
    rise = np.diff(excess, axis=1)
    noise = 2 * 1.25 * rise.std(axis=0, ddof=1) / np.sqrt(len(rise))
    return bool((np.diff(np.median(excess, axis=0)) > np.maximum(ENOUGH, noise)).any())


def main() -> None:
    parser = method_tables.parser(LOADERS)
    parser.add_argument("--diffprivlib")
    given = parser.parse_args()
    lines, n_met, n_cells, grown = [], 0, 0, []
    measured = method_tables.over_splits(one_split, lambda name: len(LOADERS[name]().y), given)
    for name, (least, errors) in measured.items():
        if given.diffprivlib:
            asked = ask_diffprivlib(given.diffprivlib, name, len(least))
            errors["diffprivlib (pure)"] = np.array(asked)
        excess = {method: 100 * (e / least[:, None] - 1) for method, e in errors.items()}
        medians = {method: np.median(e, axis=0) for method, e in excess.items()}
        met = is_met(medians)
        n_met, n_cells = n_met + int(met.sum()), n_cells + len(met)
        if grows(excess["auto"]):
            grown.append(name)
        lines += method_tables.lines_of(name, len(least), medians, met)
    results.write(
        "regression_linear",
        "Linear regression on every table, by all methods",
        ["numpy", "scikit-learn"],
        "Excess test error over least squares in percent, "
        f"{method_tables.splits_in_words(given.seeds)}, delta {DELTA:g} (functional and "
        f"diffprivlib: pure). `auto` is within {FACTOR:g} times the best of all methods, or within "
        f"{ENOUGH:g} %, in {n_met} of {n_cells} cells. Tables on which it grows with epsilon by "
        f"more than noise: {', '.join(grown) or 'none'}.",
        results.table(method_tables.HEADER, lines),
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
