"""Linear regression compared with diffprivlib at equal epsilon, and the noise on each entry.

    python -m venv .venv-diffprivlib
    .venv-diffprivlib/bin/pip install -r benchmarks/requirements-diffprivlib.txt
    python benchmarks/regression_diffprivlib.py .venv-diffprivlib/bin/python

diffprivlib runs in a separate environment, because its release does not import with the current
scikit-learn. It is pure DP for a replaced record, so the first row of tacit has the same guarantee.
Bar: the test error of tacit is lower at every epsilon.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import _results as results
import _tables as tables
import numpy as np
from sklearn.linear_model import LinearRegression as Ordinary

from tacit.events import Relation
from tacit.mechanisms import generator
from tacit.regression import Bounds, LinearRegression, functional
from tacit.regression.rows import PrivateRows

SETS = {
    "Adult, hours": tables.adult_hours,
    "fertility_us1980": tables.fertility,
    "acs_income_binned": tables.acs_income,
}
EPSILONS = (0.1, 1.0, 3.0)
SEEDS = range(15)
OURS = {
    "tacit, pure, replace one": {"relation": "replace_one", "method": "functional"},
    "tacit, pure, add or remove": {"method": "functional"},
    "tacit, auto, delta 1e-6": {"delta": 1e-6},
}
DRAWS = 300

PEER = """
import json, sys, warnings
import numpy as np
import diffprivlib, sklearn
from diffprivlib.models import LinearRegression
warnings.simplefilter("ignore")
job = json.loads(sys.argv[1])
data = np.load(job["file"])
bounds = {"bounds_X": (data["lower"], data["upper"]), "bounds_y": tuple(data["target"])}
if job["kind"] == "errors":
    found = []
    for epsilon in job["epsilons"]:
        model = LinearRegression(epsilon=epsilon, random_state=job["seed"], **bounds)
        model.fit(data["X"], data["y"])
        found.append(float(np.mean((model.predict(data["X_test"]) - data["y_test"]) ** 2)))
else:
    grams = []
    for seed in range(job["draws"]):
        model = LinearRegression(epsilon=1.0, random_state=seed, fit_intercept=False, **bounds)
        grams.append(model.fit(data["X"], data["y"])._obj_coefs[2])
    found = np.std(grams, axis=0).tolist()
print(json.dumps([found, diffprivlib.__version__, sklearn.__version__]))
"""


def ask(python: str, file: Path, arrays: dict[str, object], **job: object) -> list:
    """Return what diffprivlib computes in its own environment."""
    np.savez(file, **arrays)
    text = json.dumps({"file": str(file)} | job)
    done = subprocess.run([python, "-c", PEER, text], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def errors(python: str, file: Path) -> tuple[str, list[str]]:
    """Return the table of test errors, and the versions in the other environment."""
    rows, versions = [], []
    for title, load in SETS.items():
        table = load()
        arrays = {
            "lower": np.asarray(table.bounds.lower),
            "upper": np.asarray(table.bounds.upper),
            "target": [table.target_bounds.lower, table.target_bounds.upper],
        }
        found = {name: [] for name in ("diffprivlib", *OURS, "non-private")}
        for seed in SEEDS:
            X, y, X_test, y_test = tables.split(table, seed)
            arrays |= {"X": X, "y": y, "X_test": X_test, "y_test": y_test}
            peer, *versions = ask(python, file, arrays, kind="errors", epsilons=EPSILONS, seed=seed)
            found["diffprivlib"].append(peer)
            models = {
                name: [
                    LinearRegression(
                        epsilon=epsilon,
                        bounds=table.bounds,
                        target_bounds=table.target_bounds,
                        random_state=seed,
                        **options,
                    )
                    for epsilon in EPSILONS
                ]
                for name, options in OURS.items()
            }
            models["non-private"] = [Ordinary()] * len(EPSILONS)
            for name, row in models.items():
                found[name].append(
                    [float(np.mean((m.fit(X, y).predict(X_test) - y_test) ** 2)) for m in row]
                )
        for name, values in found.items():
            above = np.median(np.array(values) - np.array(found["non-private"]), axis=0)
            cells = [
                f"{v:,.6g} ({e:+.2g})"
                for v, e in zip(np.median(values, axis=0), above, strict=True)
            ]
            rows.append([title, name, *cells])
    header = ["data", "method", *(f"epsilon {e:g}" for e in EPSILONS)]
    return results.table(header, rows), versions


def coverage(python: str, file: Path) -> str:
    """Return a table of the noise on each released entry of X'X with bounds (0, 100)."""
    X = np.random.default_rng(0).uniform(0, 100, (200, 3))
    y = X.sum(axis=1)
    arrays = {"lower": np.zeros(3), "upper": np.full(3, 100.0), "target": [0, 300]}
    peer, *_ = ask(python, file, arrays | {"X": X, "y": y}, kind="noise", draws=DRAWS)
    box = Bounds(0, 100).box(3)
    exact = PrivateRows(X, box).moments(Bounds(0, 300).box(1).scale_target(y))
    plan = functional.plan_functional(3, epsilon=1.0, relation=Relation.REPLACE_ONE)
    rng = generator(0)
    ours = np.std(
        [
            functional.release_functional(exact, plan, n_records=200, rng=rng).gram
            for _ in range(DRAWS)
        ],
        axis=0,
    )
    declared = np.sqrt(2) * plan.quadratic.noise_scale
    rows = []
    for i in range(3):
        for j in range(i, 3):
            ratio = ours[i + 1, j + 1] / declared
            rows.append([f"x{i} x{j}", f"{peer[i][j]:,.4g}", f"{ratio:.2f}"])
    return results.table(
        ["entry", "diffprivlib: std of the noise", "tacit: std over the declared one"], rows
    )


def main() -> None:
    python = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "data.npz"
        compared, versions = errors(python, file)
        covered = coverage(python, file)
    results.write(
        "regression_diffprivlib",
        "Linear regression against diffprivlib",
        ["numpy", "scikit-learn"],
        f"diffprivlib {versions[0]} in an environment of its own with scikit-learn {versions[1]}: "
        "it does not import with 1.9.",
        "## Test error\n\nMean squared error on test rows, median of "
        f"{len(SEEDS)} 80/20 splits, equal bounds; in brackets, the median over splits of "
        f"what it is above least squares on the same split. diffprivlib is pure DP.\n\n{compared}",
        "## Noise on every entry\n\nBounds (0, 100), no intercept, epsilon 1, spread over "
        f"{DRAWS} fits of one table. diffprivlib computes the sensitivity of a squared feature "
        "from its lower bound twice, so with lower bound 0 the diagonal has no noise at all and "
        f"the fit is not private (its issue 105).\n\n{covered}",
    )


if __name__ == "__main__":
    main()
