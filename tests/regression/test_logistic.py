"""Logistic regression: probabilities of a known model, many classes, and census data."""

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit

import tacit
from tacit.regression import Bounds, LogisticRegression


def coins(rows=60_000, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform([0, -5], [10, 5], (rows, 2))
    return X, (rng.random(rows) < expit(0.4 * X[:, 0] - 0.6 * X[:, 1] - 2)).astype(int)


@pytest.mark.parametrize("method", ["gradient", "objective"])
def test_the_true_model_is_found(method):
    X, y = coins()
    model = LogisticRegression(
        epsilon=3.0, delta=1e-6, bounds=Bounds([0, -5], [10, 5]), method=method, random_state=0
    ).fit(X, y)
    np.testing.assert_allclose(model.coef_, [[0.4, -0.6]], rtol=0.15)
    np.testing.assert_allclose(model.intercept_, [-2], rtol=0.2)


def test_an_old_call_with_sgd_is_told_what_to_write():
    X, y = coins(100)
    with pytest.raises(ValueError, match="'sgd' is gone: write 'gradient'"):
        LogisticRegression(epsilon=3.0, bounds=(-5, 10), method="sgd").fit(X, y)


def test_many_classes_get_one_row_each():
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (20_000, 2))
    labels = np.array(["left", "middle", "right"])[np.digitize(X[:, 0], [-0.3, 0.3])]
    model = LogisticRegression(epsilon=2.0, delta=1e-6, bounds=(-1, 1), random_state=0)
    model.fit(X, labels)
    assert model.coef_.shape == (3, 2)
    assert model.score(X, labels) > 0.85
    np.testing.assert_allclose(model.predict_proba(X).sum(axis=1), 1)
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), model.predict_proba(X))


def test_declared_classes_may_be_absent_from_the_data():
    X, y = coins(2000)
    model = LogisticRegression(bounds=(0, 10), classes=[0, 1, 2]).fit(X, y)
    assert model.classes_.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="not in classes"):
        LogisticRegression(bounds=(0, 10), classes=[1, 2]).fit(X, y)


def test_one_class_is_an_error_and_costs_nothing():
    X, y = coins(100)
    ledger = tacit.Ledger()
    with pytest.raises(ValueError, match="at least two classes"):
        LogisticRegression(bounds=(0, 10), ledger=ledger).fit(X, np.ones_like(y))
    assert ledger.history() == []


@pytest.fixture(scope="module")
def fulton(shared_data):
    return pd.read_csv(shared_data / "census" / "fulton_pums5.csv.gz")


def test_marriage_rises_with_education_on_the_census(fulton):
    model = LogisticRegression(
        epsilon=1.0, delta=1e-6, bounds=Bounds(1, 16), classes=[0, 1], random_state=0
    ).fit(fulton[["educ"]], fulton["married"])
    low, high = model.predict_proba(pd.DataFrame({"educ": [4, 16]}))[:, 1]
    assert 0 < low < high < 1


def test_employment_on_the_census_comes_near_the_ordinary_fit(fulton):
    from sklearn.linear_model import LogisticRegression as Ordinary

    table = fulton[
        [
            "sex", "married", "black", "asian", "militaryservice", "uscitizen", "disability",
            "englishability",
        ]
    ].assign(
        collegedegree=(fulton["educ"] >= 13).astype(int), black_female=fulton.black * fulton.sex
    )  # fmt: skip
    private = LogisticRegression(epsilon=1.0, delta=1e-6, bounds=Bounds(0, 1), random_state=0)
    private.fit(table, fulton["employed"])
    ordinary = Ordinary().fit(table, fulton["employed"])
    assert private.score(table, fulton["employed"]) > (
        ordinary.score(table, fulton["employed"]) - 0.01
    )
