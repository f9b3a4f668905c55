"""The sensitivity contract by brute force: every option of the estimators, on neighbors."""

import numpy as np
import pytest
import scipy.sparse
from recorded_releases import recorded_releases
from sklearn.base import clone

from tacit.events import Relation
from tacit.regression import Bounds, LinearRegression, LogisticRegression, objective
from tacit.regression.rows import PrivateRows

N = 300
BUDGET = {"epsilon": 30.0, "delta": 1e-6, "relation": Relation.ADD_REMOVE}
LINEAR = LinearRegression(
    epsilon=30.0, delta=1e-6, bounds=(-2, 5), target_bounds=(-1, 1), n_records=N, random_state=0
)
LOGISTIC = LogisticRegression(
    epsilon=30.0, delta=1e-6, bounds=(-2, 5), classes=[0, 1], n_records=N, random_state=0
)
OPTIONS = {
    "plain": {},
    "weights": {"max_weight": 2.0},
    "ridge": {"l2": 0.1},
    "lasso": {"l1": 0.01},
    "elastic net without intercept": {"l1": 0.01, "l2": 0.1, "fit_intercept": False},
    "weights without intercept": {"max_weight": 2.0, "fit_intercept": False},
    "norm": {"bounds": Bounds(-2, 5, norm=1.0)},
    "groups": {"bounds": Bounds(0, 1, groups=[(1, 2, 3)])},
}
CASES = [
    *((f"linear, {name}", LINEAR, options) for name, options in OPTIONS.items()),
    ("linear, adassp", LINEAR, {"method": "adassp"}),
    *((f"logistic, {name}", LOGISTIC, options) for name, options in OPTIONS.items()),
    ("logistic, sparse", LOGISTIC, {"method": "descent"}),
]
EXTREMES = [[5.0, 5, 5, 5], [-2.0, 5, -2, 5], [1e9, -1e9, 0, 0], [0.0, 0, 0, 0]]


def table():
    rng = np.random.default_rng(0)
    X = np.vstack([rng.exponential(size=(N, 4)) * 10.0 ** -np.arange(4), EXTREMES])
    return X, rng.integers(0, 2, len(X)).astype(float), 2 * rng.random(len(X)) ** 4


def values(monkeypatch, model, chosen, outputs):
    """Return the exact values that the fit of the `chosen` records releases."""
    X, y, weights = (part[chosen] for part in table())
    if model.method == "descent":
        X = scipy.sparse.csr_array(X)
    given = {} if model.max_weight is None else {"sample_weight": weights}
    with recorded_releases(monkeypatch, outputs) as seen:
        clone(model).fit(X, y, **given)
    return seen


@pytest.mark.filterwarnings("ignore:.*fitted")
@pytest.mark.parametrize(("model", "options"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_record_changes_every_release_by_at_most_its_sensitivity(monkeypatch, model, options):
    """All these releases are divided by their bounds: 1, and at most 2 for a replaced record."""
    model = clone(model).set_params(**options)
    bound = 1.0
    if model.method == "adassp":
        bound = model._plan(model._box(4), N).row_norm ** 2  # of the Gram matrix, the largest
    outputs: list[np.ndarray] = []
    everyone = np.arange(N)
    exact = values(monkeypatch, model, everyone, outputs)
    for extreme in range(N, N + len(EXTREMES)):
        added = values(monkeypatch, model, np.append(everyone, extreme), outputs)
        replaced = values(monkeypatch, model, np.append(everyone[1:], extreme), outputs)
        for one, more, other in zip(exact, added, replaced, strict=True):
            assert np.linalg.norm(one - more) <= bound * (1 + 1e-9)
            assert np.linalg.norm(one - other) <= 2 * bound * (1 + 1e-9)


@pytest.mark.parametrize("bounds", [Bounds(-2, 5), Bounds(-2, 5, norm=1.0)], ids=str)
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_a_record_changes_the_perturbed_objective_as_its_proof_assumes(bounds, label):
    """The gradient moves by at most R, always towards one side; the Hessian by a small rank one."""
    X, y, _ = table()
    box = bounds.box(4)
    plan = objective.plan_objective(4, row_norm=box.row_norm, n_records=N, **BUDGET)
    rng = np.random.default_rng(0)
    for extreme in range(N, N + len(EXTREMES)):
        chosen = np.append(np.arange(N), extreme)
        labels = np.append(y[:N], label)
        directions = []
        for theta in rng.normal(0, 3, (20, 5)):
            one, more = (
                objective._objective(
                    PrivateRows(X[rows], box, row_norm=plan.row_norm),
                    labels[: len(rows)], theta, np.zeros(5), plan.ridge,
                )
                for rows in (chosen[:N], chosen)
            )  # fmt: skip
            change = more[1] - one[1]
            assert np.linalg.norm(change) <= plan.row_norm * (1 + 1e-9)
            directions.append(change)
            values = np.linalg.eigvalsh(more[2] - one[2])
            assert values[-1] <= plan.row_norm * np.sqrt(5) / 4 * (1 + 1e-9)
            np.testing.assert_allclose(values[:-1], 0, atol=1e-9)
        signs = np.sign(np.array(directions) @ directions[0])
        assert (signs >= 0).all()
