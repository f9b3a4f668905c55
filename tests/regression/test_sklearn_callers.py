"""What scikit-learn does around a private fit: refused or counted."""

import pickle
import warnings
from io import BytesIO

import joblib
import numpy as np
import pandas as pd
import pytest
from scipy.stats import uniform
from sklearn.base import clone
from sklearn.compose import ColumnTransformer, make_column_selector
from sklearn.decomposition import NMF, PCA
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.model_selection import (
    GridSearchCV,
    RandomizedSearchCV,
    cross_val_predict,
    cross_val_score,
)
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    MinMaxScaler,
    Normalizer,
    PolynomialFeatures,
    StandardScaler,
    scale,
)

import tacit
from tacit.datasets import Schema
from tacit.errors import LearningStep
from tacit.regression import Bounds, FrankWolfe, LinearRegression, LogisticRegression
from tacit.regression.sklearn_callers import UncountedFits

OPTIONS = {"epsilon": 1.0, "delta": 1e-6, "bounds": (-3, 3), "random_state": 0}
LINEAR = LinearRegression(**OPTIONS, target_bounds=(-3, 3), method="adassp")


def some_data(n=200):
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (n, 2))
    return X, X[:, 0] / 2


@pytest.mark.parametrize(
    "step",
    [
        StandardScaler(),
        MinMaxScaler(),
        SimpleImputer(),
        PCA(1),
        make_pipeline(Normalizer(), StandardScaler()),
        ColumnTransformer([("a", MinMaxScaler(), [0])], remainder="passthrough"),
        FeatureUnion([("a", FunctionTransformer()), ("b", PCA(1))]),
    ],
    ids=lambda step: type(step).__name__,
)
@pytest.mark.parametrize(
    "model", [LINEAR, LogisticRegression(**OPTIONS), FrankWolfe(**OPTIONS, target_bounds=(-3, 3))]
)
def test_a_step_that_learns_is_refused_by_name_with_the_replacement(step, model):
    X, y = some_data()
    y = y > 0 if isinstance(model, LogisticRegression) else y
    ledger = tacit.Ledger()
    with pytest.raises(LearningStep, match=r"learns from the private records.*Schema"):
        make_pipeline(step, model.set_params(ledger=ledger)).fit(X, y)
    assert ledger.history() == []


class OwnScaler(FunctionTransformer):
    """A class of the user's own, which says that it learns nothing."""

    def transform(self, X):
        return scale(X)


def public_scaler():
    return StandardScaler().fit(np.random.default_rng(1).normal(size=(50, 2)))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (FunctionTransformer(scale), "treat each record"),
        (FunctionTransformer(np.abs), "treat each record"),
        (OwnScaler(), "treat each record"),
        (make_pipeline(Normalizer(), FunctionTransformer(scale)), "treat each record"),
        (ColumnTransformer([("a", FunctionTransformer(scale), [0])]), "treat each record"),
        (ColumnTransformer([("a", "drop", [0])], remainder=OwnScaler()), "treat each record"),
        (ColumnTransformer([("a", Normalizer(), lambda X: [0])]), "chooses columns"),
        (FeatureUnion([("a", Normalizer()), ("b", OwnScaler())]), "treat each record"),
        (FrozenEstimator(FunctionTransformer(scale)), "treat each record"),
        (FrozenEstimator(make_pipeline(OwnScaler())), "treat each record"),
        (FrozenEstimator(NMF(1).fit(np.ones((4, 2)))), "treat each record"),
        (Pipeline([("a", Normalizer())], memory="somewhere"), "has a memory"),
    ],
)
def test_a_step_that_may_treat_records_together_is_refused(step, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    X, y = some_data()
    ledger = tacit.Ledger()
    with pytest.raises(LearningStep, match=message):
        make_pipeline(step, clone(LINEAR).set_params(ledger=ledger)).fit(np.abs(X), y)
    assert ledger.history() == []


def test_steps_that_learn_nothing_are_accepted():
    X, y = some_data()
    steps = (
        FunctionTransformer(),
        Normalizer(),
        PolynomialFeatures(2),
        FrozenEstimator(public_scaler()),
        FrozenEstimator(make_pipeline(StandardScaler(), PolynomialFeatures(2)).fit(X[:9])),
        ColumnTransformer([("a", "passthrough", [0])], remainder=PolynomialFeatures(2)),
        Schema(default=[-3, 3]),
        ColumnTransformer([("a", Schema(default=[-3, 3]), [0, 1])]),
        "passthrough",
    )
    for step in steps:
        make_pipeline(step, LinearRegression(**OPTIONS, target_bounds=(-3, 3))).fit(X, y)
    by_type = ColumnTransformer([("a", Normalizer(), make_column_selector(dtype_include=float))])
    make_pipeline(by_type, clone(LINEAR)).fit(pd.DataFrame(X, columns=["a", "b"]), y)


def test_a_search_without_a_ledger_warns_once_with_the_total():
    X, y = some_data()
    plain = LinearRegression(**OPTIONS, target_bounds=(-3, 3), method="adassp")
    grid = {"epsilon": [0.5, 1.0]}
    for search, total in (
        (GridSearchCV(plain, grid, cv=3), "epsilon 5.5 at delta 7e-06 .7 fits"),
        (GridSearchCV(plain, grid, cv=3, refit=False), "epsilon 4.5 .*6 fits"),
        (RandomizedSearchCV(plain, grid, n_iter=2, cv=4), "epsilon 7 .*9 fits"),
        (RandomizedSearchCV(plain, {"epsilon": [1.0, 8.0, 2.0]}, n_iter=2, cv=3), "epsilon 56 "),
        (RandomizedSearchCV(plain, {"epsilon": uniform(1, 9)}, n_iter=2, cv=3), "many times"),
        (GridSearchCV(plain, {"delta": [1e-6, 1e-5]}, cv=3), "epsilon 7 at delta 4.3e-05"),
        (GridSearchCV(make_pipeline(FunctionTransformer(), plain), {}, cv=3), "4 fits"),
    ):
        with pytest.warns(UncountedFits, match=total) as caught:
            search.fit(X, y)
        assert len(caught) == 1
    for validate in (cross_val_score, cross_val_predict):
        with pytest.warns(UncountedFits, match=r"epsilon 5 .*5 fits") as caught:
            validate(plain, X, y, cv=5)
        assert len(caught) == 1


@pytest.mark.slow
def test_with_a_file_ledger_two_processes_pay_for_every_fit(tmp_path):
    X, y = some_data()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncountedFits)
        with tacit.Ledger(tmp_path / "a.ledger") as ledger:
            model = LINEAR.set_params(ledger=ledger)
            GridSearchCV(model, {"epsilon": [0.5, 1.0]}, cv=3, n_jobs=2).fit(X, y)
            assert len(ledger.history()) == 7
            cross_val_score(model, X, y, cv=3, n_jobs=2)
            assert len(ledger.history()) == 10


@pytest.mark.parametrize("dump", [pickle.dump, joblib.dump])
def test_a_fitted_model_keeps_the_path_of_its_ledger(tmp_path, dump):
    X, y = some_data()
    with tacit.Ledger(tmp_path / "a.ledger") as ledger:
        fitted = LINEAR.set_params(ledger=ledger).fit(X, y)
    stream = BytesIO()
    dump(fitted, stream)
    stream.seek(0)
    again = joblib.load(stream) if dump is joblib.dump else pickle.load(stream)
    assert np.array_equal(again.predict(X), fitted.predict(X))
    assert again.ledger.path == tmp_path / "a.ledger"
    again.fit(X, y)
    assert len(tacit.Ledger(tmp_path / "a.ledger").history()) == 2
    (tmp_path / "a.ledger").unlink()
    with pytest.raises(tacit.errors.LedgerError, match="there is no ledger"):
        again.fit(X, y)


def test_a_ledger_in_memory_does_not_pay_in_another_process():
    X, y = some_data()
    again = pickle.loads(pickle.dumps(LINEAR.set_params(ledger=tacit.Ledger()).fit(X, y)))
    with pytest.raises(tacit.errors.LedgerError, match=r"Use Ledger\(FILE\)"):
        again.fit(X, y)


def test_bounds_are_given_by_name():
    X, y = some_data()
    frame = pd.DataFrame(X, columns=["a", "b"])
    options = {**OPTIONS, "target_bounds": (-3, 3), "method": "adassp"}
    one = LinearRegression(**options | {"bounds": Bounds([-3, -4], [3, 5])}).fit(X, y)
    two = LinearRegression(**options | {"bounds": {"b": (-4, 5), "a": (-3, 3)}}).fit(frame, y)
    assert np.array_equal(one.coef_, two.coef_)
    with pytest.raises(ValueError, match="feature 'b'"):
        LinearRegression(**options | {"bounds": {"a": (-3, 3)}}).fit(frame, y)
    with pytest.raises(ValueError, match="feature 'c'"):
        LinearRegression(**options | {"bounds": dict.fromkeys("abc", (0, 1))}).fit(frame, y)
    with pytest.raises(ValueError, match="column names"):
        LinearRegression(**options | {"bounds": {"a": (0, 1), "b": (0, 1)}}).fit(X, y)


@pytest.mark.parametrize("labels", [["1", "2", "Jane Doe HIV+"], [1, 2, "Jane Doe HIV+"]])
@pytest.mark.parametrize(
    "model",
    [
        LINEAR,
        LogisticRegression(**OPTIONS),
        LogisticRegression(**OPTIONS, classes=["1", "2"]),
        FrankWolfe(**OPTIONS, target_bounds=(-3, 3)),
        FrankWolfe(**OPTIONS, loss="logistic"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*feature_names")
def test_no_error_quotes_a_record(model, labels):
    X = np.ones((3, 2))
    for table, y in ((X, labels), ([["Jane Doe HIV+", 1]] * 3, [0, 1, 0])):
        found = None
        try:
            model.fit(table, y)
        except Exception as error:
            found = error
        while found is not None:
            assert "Jane" not in str(found)
            found = None if found.__suppress_context__ else found.__context__
