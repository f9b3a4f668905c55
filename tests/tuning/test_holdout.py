"""A score adds exactly one value in [0, 1] for each scoring record, whatever the shapes are."""

import numpy as np
import pandas as pd
import pytest
import toy_estimator as toy
from sklearn.exceptions import DataConversionWarning
from sklearn.tree import DecisionTreeClassifier

import tacit
from tacit.pate import PATEClassifier
from tacit.regression import Bounds, LinearRegression, LogisticRegression
from tacit.tuning import EveryConfiguration, PrivateSearch, SearchFailed
from tacit.tuning.holdout import SCORINGS, Score

EVERY = EveryConfiguration()
N = 300


class _Predicts:
    """A model whose predictions have the shape that it is given."""

    classes_ = np.array([0, 1])

    def __init__(self, shape):
        self.shape = shape

    def predict(self, X):
        return np.resize(X[:, 0] > 0.5, self.shape).astype(float)

    def predict_proba(self, X):
        return np.resize([0.3, 0.7], self.shape)


def values(scoring, shape, y):
    X = np.random.default_rng(0).random((N, 2))
    return Score(scoring, 1.0, N, 1.0).values(_Predicts(shape), X, y)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_one_record_changes_one_value(scoring):
    shapes = [(N, 2)] if scoring == "probability" else [(N,), (N, 1)]
    for shape in shapes:
        y = np.arange(N) % 2
        before = values(scoring, shape, y)
        y[0] = 1 - y[0]
        after = values(scoring, shape, y)
        assert before.shape == after.shape == (N,)
        assert np.abs(before - after).sum() <= 1


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize(
    "shape", [(), (1,), (1, N), (N, N), (N, 3), (N - 1,), (N + 1,), (N, 1, 1), (N, 2, 1), (1, 2)]
)
def test_predictions_of_another_shape_are_no_score(scoring, shape):
    with pytest.raises(ValueError, match="must have shape"):
        values(scoring, shape, np.arange(N) % 2)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("shape", [(N, 1), (1, N), (N, 2)])
def test_targets_of_another_shape_are_no_score(scoring, shape):
    shapes = {(N, 2) if scoring == "probability" else (N,)}
    for predicted in shapes:
        with pytest.raises(ValueError, match="must have shape"):
            values(scoring, predicted, np.resize([0, 1], shape))


def searches():
    X = np.random.default_rng(0).uniform(0, 1, (N, 2))
    labels = (X[:, 0] > 0.5).astype(int)
    teacher = DecisionTreeClassifier(max_depth=2)
    pate = PATEClassifier(teacher, n_queries=4, n_teachers=5, classes=[0, 1])
    linear = LinearRegression(bounds=Bounds(0, 1), target_bounds=(0, 1))
    logistic = LogisticRegression(bounds=Bounds(0, 1))
    methods = {"method": ["gradient"]}
    return {
        "toy": (toy.Toy(), {"level": [0.5]}, (X, labels)),
        "classification": (logistic, methods, (X, labels)),
        "regression": (linear, methods, (X, labels.astype(float))),
        "PATE": (pate, {"n_teachers": [5]}, (X, labels, X[:20])),
    }


@pytest.mark.parametrize("name", list(searches()))
@pytest.mark.parametrize("columns", ["array", "frame", "list"])
@pytest.mark.filterwarnings("ignore:the noise on the votes")
def test_a_column_of_targets_is_read_as_one_value_for_each_record(name, columns):
    model, space, (X, y, *public) = searches()[name]
    column = y[:, None]
    given = {"array": column, "frame": pd.DataFrame({"y": y}), "list": column.tolist()}[columns]
    plain, warned = (
        PrivateSearch(model, space, runs=EVERY, random_state=0, epsilon=2.0) for _ in range(2)
    )
    with pytest.warns(DataConversionWarning, match="y is a column"):
        warned.fit(X, given, *public)
    assert warned.best_score_ == plain.fit(X, y, *public).best_score_
    assert -1 < warned.best_score_ < 2


@pytest.mark.parametrize("name", list(searches()))
def test_several_targets_are_refused_before_anything_is_paid(name):
    model, space, (X, y, *public) = searches()[name]
    ledger = tacit.Ledger()
    search = PrivateSearch(model, space, runs=EVERY, ledger=ledger)
    for targets in (np.column_stack([y, y]), y[None, :], y[:, None, None], np.float64(1)):
        with pytest.raises(ValueError, match="one value for each record"):
            search.fit(X, targets, *public)
    with pytest.raises(ValueError, match="as many rows"):
        search.fit(X, y[:-1], *public)
    assert ledger.history() == []


class _Wide(toy.Toy):
    def predict(self, X):
        return np.tile(super().predict(X)[:, None], (1, len(X)))


def test_a_search_ends_if_predictions_are_no_single_numbers():
    with pytest.raises(SearchFailed, match="ValueError"):
        PrivateSearch(_Wide(), {"level": [0.5]}, runs=EVERY).fit(*toy.records(N))


def test_lists_are_tables():
    X, y = toy.records(N)
    search = PrivateSearch(toy.Toy(), {"level": [0.9]}, runs=EVERY, random_state=0)
    assert search.fit(X.tolist(), y.tolist()).best_params_ == {"level": 0.9}
