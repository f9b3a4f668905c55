"""Local SGD: private gradients, and models near those without noise."""

import csv
import gzip

import numpy as np
import pytest
from scipy.special import expit

from tacit import local


def logistic_data(n=40_000, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, (n, 2))
    return X, (rng.random(n) < expit(2 * X[:, 0] - X[:, 1] + 0.5)).astype(float)


def test_the_report_of_a_person_is_exactly_private(enumeration):
    sgd = local.LocalSGD(epsilon=0.5, n_features=1)
    weights = np.array([0.5, -0.25])
    rows = [([1.0], 1.0), ([-1.0], 0.0), ([0.5], 1.0)]
    laws = [
        enumeration.law(lambda rng, x=x, y=y: sgd.randomize(weights, x, y, rng))[0] for x, y in rows
    ]
    assert enumeration.ratio(laws) <= sgd.worst_case_ratio() <= enumeration.exponential(0.5)


@pytest.mark.parametrize("loss", ["logistic", "squared"])
def test_gradients_are_those_of_the_loss_and_stay_in_bounds(loss):
    sgd = local.LocalSGD(epsilon=1.0, n_features=3, loss=loss)
    rng = np.random.default_rng(1)
    X, y, w = rng.uniform(-1, 1, (50, 3)), rng.integers(0, 2, 50) * 0.3, rng.normal(0, 0.1, 4)

    def total(weights):
        scores = X @ weights[:-1] + weights[-1]
        if loss == "squared":
            return ((scores - y) ** 2 / 2).sum()
        return (np.logaddexp(0, scores) - y * scores).sum()

    steps = np.eye(4) * 1e-6
    numeric = [(total(w + s) - total(w - s)) / 2e-6 for s in steps]
    found = sgd.gradients(w, X, y)
    np.testing.assert_allclose(found.sum(axis=0), numeric, rtol=1e-5, atol=1e-6)
    wild = sgd.gradients(100 * w, 50 * X, 1000 * y)
    assert abs(wild).max() <= 1


def test_logistic_regression_finds_the_probabilities():
    X, y = logistic_data()
    model = local.LocalSGD(epsilon=4.0, n_features=2).fit(X, y, rng=1)
    truth = expit(2 * X[:, 0] - X[:, 1] + 0.5)
    assert np.mean(abs(model.predict(X) - truth)) < 0.08
    assert model.event.epsilon == 4.0


def test_linear_regression_finds_the_line():
    rng = np.random.default_rng(3)
    X = rng.uniform(-1, 1, (60_000, 1))
    y = 0.5 * X[:, 0] - 0.2 + rng.normal(0, 0.1, len(X))
    model = local.LocalSGD(epsilon=4.0, n_features=1, loss="squared").fit(X, y, rng=2)
    assert model.coef[0] == pytest.approx(0.5, abs=0.12)
    assert model.intercept == pytest.approx(-0.2, abs=0.08)


def test_missing_values_do_no_harm():
    X, y = logistic_data(2000)
    X[::7] = np.nan
    y[::5] = np.inf
    model = local.LocalSGD(epsilon=4.0, n_features=2).fit(X, y, rng=0)
    assert np.isfinite(model.coef).all()


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="loss must be"):
        local.LocalSGD(epsilon=1.0, n_features=1, loss="hinge")
    with pytest.raises(ValueError, match="X must have 2 columns"):
        local.LocalSGD(epsilon=1.0, n_features=2).fit(np.zeros((5, 3)), np.zeros(5))


@pytest.mark.slow
def test_the_probability_of_being_married_rises_with_education(shared_data):
    with gzip.open(shared_data / "census" / "fulton_pums5.csv.gz", "rt") as lines:
        rows = list(csv.DictReader(lines))
    X = np.array([[(float(row["educ"]) - 1) / 15 * 2 - 1] for row in rows])
    y = np.array([float(row["married"]) for row in rows])
    model = local.LocalSGD(epsilon=2.0, n_features=1).fit(X, y, rng=0)
    low, high = model.predict([[-1.0], [1.0]])
    # Without privacy the logistic model has 0.18 and 0.63.
    assert low == pytest.approx(0.18, abs=0.12)
    assert high == pytest.approx(0.63, abs=0.12)
