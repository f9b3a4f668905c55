"""Ridge and lasso penalties, models without an intercept, and weights, of both kinds of models."""

import numpy as np
import pytest
from scipy.special import expit
from sklearn.linear_model import ElasticNet
from sklearn.linear_model import LogisticRegression as Ordinary

from tacit.regression import Bounds, LinearRegression, LogisticRegression
from tacit.regression.penalty import Penalty

LARGE = {"epsilon": 200.0, "delta": 1e-6, "bounds": Bounds(-1, 1), "random_state": 0}


def table(rows=20_000):
    rng = np.random.default_rng(0)
    return rng, rng.uniform(-1, 1, (rows, 4))


def test_coordinate_descent_solves_the_elastic_net():
    rng, X = table(500)
    y = X @ [1.0, -0.5, 0.0, 0.05] + 0.1 * rng.normal(size=500)
    hessian, cross = X.T @ X / 500, X.T @ y / 500
    found = Penalty(l2=0.1, l1=0.05).minimize(hessian, cross, 0, np.zeros(4))
    ordinary = ElasticNet(alpha=0.15, l1_ratio=1 / 3, fit_intercept=False, tol=1e-10).fit(X, y)
    np.testing.assert_allclose(found, ordinary.coef_, atol=1e-6)


@pytest.mark.parametrize(("l2", "l1"), [(0.1, None), (None, 0.02), (0.05, 0.02)])
def test_a_penalized_linear_fit_is_that_of_scikit_learn(l2, l1):
    rng, X = table()
    y = np.clip(X @ [0.4, -0.2, 0.0, 0.01] + 0.1 + 0.1 * rng.normal(size=len(X)), -1, 1)
    model = LinearRegression(**LARGE, target_bounds=(-1, 1), l2=l2, l1=l1).fit(X, y)
    total = (l2 or 0) + (l1 or 0)
    ordinary = ElasticNet(alpha=total, l1_ratio=(l1 or 0) / total).fit(X, y)
    np.testing.assert_allclose(model.coef_, ordinary.coef_, atol=5e-3)
    assert model.inference_ is None
    with pytest.raises(ValueError, match="no intervals"):
        model.summary()


@pytest.mark.parametrize("kind", ["l1", "l2"])
def test_a_penalized_logistic_fit_is_that_of_scikit_learn(kind):
    rng, X = table()
    y = rng.random(len(X)) < expit(X @ [2.0, -1.0, 0.0, 0.1] - 0.5)
    model = LogisticRegression(**LARGE, **{kind: 0.02}).fit(X, y)
    ordinary = Ordinary(l1_ratio=float(kind == "l1"), C=1 / (0.02 * len(X)), solver="saga")
    np.testing.assert_allclose(model.coef_, ordinary.fit(X, y).coef_, atol=0.05)


@pytest.mark.parametrize("bounds", [Bounds(-1, 1), Bounds(-1, 3), Bounds(0, 1)], ids=str)
def test_models_without_an_intercept_go_through_zero(bounds):
    rng = np.random.default_rng(1)
    X = rng.uniform(bounds.lower, bounds.upper, (20_000, 2))
    linear = LinearRegression(
        **LARGE | {"bounds": bounds}, target_bounds=(-2, 6), fit_intercept=False
    ).fit(X, X @ [1.0, 0.5] + 0.1 * rng.normal(size=20_000))
    np.testing.assert_allclose(linear.coef_, [1, 0.5], atol=0.02)
    assert linear.intercept_ == 0
    assert linear.predict([[0.0, 0.0]]) == 0
    assert linear.inference_.names == ("x0", "x1")
    y = rng.random(20_000) < expit(X @ [2.0, -1.0])
    logistic = LogisticRegression(**LARGE | {"bounds": bounds}, fit_intercept=False).fit(X, y)
    np.testing.assert_allclose(logistic.coef_, [[2, -1]], atol=0.15)
    assert logistic.intercept_ == 0


def test_weights_of_a_logistic_fit_count_records():
    """Records of weight 3 in one half of the table move the intercept as three records would."""
    rng, X = table(40_000)
    y = rng.random(len(X)) < expit(X @ [1.0, -1.0, 0.0, 0.5])
    weights = np.where(y, 3.0, 1.0)
    model = LogisticRegression(**LARGE, max_weight=3).fit(X, y, weights)
    np.testing.assert_allclose(model.intercept_, [np.log(3)], atol=0.1)
    np.testing.assert_allclose(model.coef_, [[1.0, -1.0, 0.0, 0.5]], atol=0.12)


def test_a_method_without_these_options_refuses_them():
    _, X = table(100)
    y = X[:, 0] > 0
    model = LogisticRegression(**LARGE | {"epsilon": 1.0}, method="objective", l2=0.1)
    with pytest.raises(ValueError, match="has none of l1, l2"):
        model.fit(X, y)
    with pytest.raises(ValueError, match="has no weights"):
        model.set_params(l2=None, max_weight=1.0).fit(X, y, np.ones(100))
    with pytest.raises(ValueError, match="l1 must be"):
        LogisticRegression(**LARGE, l1=-1.0).fit(X, y)
