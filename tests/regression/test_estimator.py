"""Rules for every estimator: scikit-learn's checks, payment before release, safe errors."""

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

import tacit
from tacit.accounting import GDP
from tacit.errors import BudgetExceeded
from tacit.events import Relation
from tacit.mechanisms import secure_generator
from tacit.regression import (
    Bounds,
    FrankWolfe,
    LinearRegression,
    LogisticRegression,
    TransferRegression,
)

SMALL = {"bounds": Bounds(-10, 10), "delta": 1e-6}
LINEAR = SMALL | {"target_bounds": Bounds(-100, 100)}
MEMBERS = [
    LinearRegression(**LINEAR | {"delta": 0.0}),
    LinearRegression(**LINEAR, method="adassp"),
    LinearRegression(**LINEAR, method="gradient", max_weight=10),
    LogisticRegression(**SMALL, max_weight=10),
    LogisticRegression(**SMALL, method="objective"),
    TransferRegression(**LINEAR),
]


def name(model):
    return f"{type(model).__name__}-{getattr(model, 'method', 'moments')}"


def some_data(rows=400, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-10, 10, (rows, 3))
    return X, (X[:, 0] > 0).astype(int)


def checks_that_do_not_apply(model):
    """Return the checks of weights which privacy or the method rules out, each with the reason."""
    if not isinstance(model, LinearRegression | LogisticRegression):
        return {}
    ruled_out = {
        "check_all_zero_sample_weights_error": "an error would reveal private weights",
        "check_classifiers_one_label_sample_weights": "so would an error for labels of weight 0",
        "check_sample_weight_equivalence_on_dense_data": "two fits have different noise",
        "check_sample_weight_equivalence_on_sparse_data": "sparse tables have no weights",
    }
    if model.max_weight is not None:
        return ruled_out
    others = ("pandas_series", "not_an_array", "list", "shape", "not_overwritten")
    names = [*ruled_out, *(f"check_sample_weights_{name}" for name in others)]
    return dict.fromkeys(names, "this method refuses weights")


@pytest.mark.filterwarnings("ignore:Skipping check")
@parametrize_with_checks(MEMBERS, expected_failed_checks=checks_that_do_not_apply)
def test_scikit_learn_finds_no_fault(estimator, check):
    check(estimator)


@pytest.mark.parametrize("model", MEMBERS, ids=name)
def test_without_bounds_the_error_says_what_to_pass(model):
    with pytest.raises(ValueError, match=r"bounds must be declared, got None\. Pass Bounds\("):
        clone(model).set_params(bounds=None).fit(*some_data())


def test_without_target_bounds_the_error_says_what_to_pass():
    with pytest.raises(ValueError, match="target_bounds must be declared"):
        LinearRegression(bounds=(0, 1)).fit(*some_data())


@pytest.mark.parametrize("model", MEMBERS, ids=name)
def test_a_seed_repeats_the_model_and_none_does_not(model):
    X, y = some_data()
    first, second = (clone(model).set_params(random_state=7).fit(X, y) for _ in range(2))
    np.testing.assert_array_equal(first.coef_, second.coef_)
    assert not np.array_equal(clone(model).fit(X, y).coef_, clone(model).fit(X, y).coef_)


@pytest.mark.parametrize("relation", [Relation.ADD_REMOVE, Relation.REPLACE_ONE])
@pytest.mark.parametrize("model", MEMBERS, ids=name)
def test_the_event_costs_no_more_than_the_budget(model, relation):
    fitted = clone(model).set_params(relation=relation, epsilon=0.8).fit(*some_data())
    if model.delta == 0:
        parts = fitted.event_.parts
        moves = [p.replace_factor if relation is Relation.REPLACE_ONE else 1.0 for p in parts]
        spent = sum(m / part.noise_multiplier for m, part in zip(moves, parts, strict=True))
        assert spent <= 0.8
    elif getattr(model, "method", None) != "objective":
        assert GDP().epsilon(fitted.event_, delta=1e-6, relation=relation) <= 0.8
    else:
        assert tacit.epsilon(fitted.event_, delta=1e-6, relation=relation) <= 0.8 * (1 + 1e-9)


@pytest.mark.parametrize("model", MEMBERS, ids=name)
def test_a_fit_that_cannot_be_paid_releases_nothing(model):
    ledger = tacit.Ledger(budget=tacit.Budget(epsilon=0.01, delta=1e-9))
    poor = clone(model).set_params(ledger=ledger, epsilon=1.0)
    with pytest.raises(BudgetExceeded):
        poor.fit(*some_data())
    assert not hasattr(poor, "coef_")
    assert ledger.history() == []


@pytest.mark.parametrize("relation", [Relation.ADD_REMOVE, Relation.REPLACE_ONE])
@pytest.mark.parametrize("model", MEMBERS, ids=name)
def test_a_fit_may_spend_a_budget_to_the_last(model, relation):
    budget = tacit.Budget(epsilon=0.7, delta=model.delta)
    ledger = tacit.Ledger(budget=budget, relation=relation)
    clone(model).set_params(ledger=ledger, epsilon=0.7, relation=relation).fit(*some_data())
    assert len(ledger.history()) == 1
    with pytest.raises(BudgetExceeded):
        clone(model).set_params(ledger=ledger, epsilon=0.7, relation=relation).fit(*some_data())


FAULTS = {
    "nan": lambda X, y: (np.where(X[0, 0] == X, np.nan, X), y),
    "inf": lambda X, y: (np.where(X[0, 0] == X, np.inf, X), y),
    "nan target": lambda X, y: (X, np.where(np.arange(len(y)) == 3, np.nan, y)),
    "inf target": lambda X, y: (X, np.where(np.arange(len(y)) == 3, np.inf, y)),
    "shape": lambda X, y: (X, y[:-1]),
    "flat": lambda X, y: (X[:, 0], y),
    "mixed": lambda X, y: (np.where(X[0, 0] == X, f"secret {X[0, 0]:.4f}", X).astype(object), y),
    "empty": lambda X, y: (X[:0], y[:0]),
    "sparse": lambda X, y: (scipy.sparse.csr_matrix(X), y),
    "complex": lambda X, y: (X + 1j, y),
    "complex target": lambda X, y: (X, y + 1j * X[:, 0]),
    "wide": lambda X, y: (np.zeros((len(X), 10_001)), y),
}
SETTINGS = [
    {"epsilon": 0.0},
    {"epsilon": -1.0},
    {"epsilon": np.nan},
    {"delta": 1.0},
    {"delta": -0.1},
    {"n_records": 0.5},
    {"relation": "neighbors"},
    {"method": "newton"},
    {"bounds": Bounds([0, 0], [1, 1])},
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("model", MEMBERS, ids=name)
def test_a_faulty_table_is_an_error_without_values_and_costs_nothing(model, fault):
    if fault in ("sparse", "wide") and name(model) == "LogisticRegression-auto":
        pytest.skip("these tables are accepted")
    ledger = tacit.Ledger()
    X, y = FAULTS[fault](*some_data())
    with pytest.raises((ValueError, TypeError)) as error:
        clone(model).set_params(ledger=ledger).fit(X, y)
    assert f"{some_data()[0][0, 0]:.2f}" not in str(error.value)
    assert error.value.__suppress_context__ or error.value.__context__ is None
    assert ledger.history() == []


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("model", MEMBERS, ids=name)
def test_a_wrong_setting_is_an_error_and_costs_nothing(model, setting):
    if not setting.keys() <= model.get_params().keys():
        pytest.skip("not a setting of this estimator")
    ledger = tacit.Ledger()
    with pytest.raises((ValueError, TypeError), match="must"):
        clone(model).set_params(ledger=ledger, **setting).fit(*some_data())
    assert ledger.history() == []


def test_a_ledger_of_another_relation_is_refused():
    ledger = tacit.Ledger(relation=Relation.REPLACE_ONE)
    with pytest.raises(ValueError, match="relation must be that of the ledger"):
        LinearRegression(**LINEAR, ledger=ledger).fit(*some_data())


@pytest.mark.parametrize("model", MEMBERS, ids=name)
def test_a_constant_column_gives_a_finite_model(model):
    X, y = some_data()
    X[:, 1] = 3.0
    assert np.isfinite(clone(model).fit(X, y).coef_).all()


@pytest.mark.parametrize("model", MEMBERS, ids=name)
def test_values_outside_the_bounds_are_clipped_to_them(model):
    X, y = some_data()
    clipped = clone(model).set_params(random_state=0).fit(np.clip(X, -2, 3), y)
    wide = clone(model).set_params(random_state=0)
    inside, outside = (clone(m).set_params(bounds=Bounds(-2, 3)) for m in (clipped, wide))
    np.testing.assert_allclose(
        inside.fit(np.clip(X, -2, 3), y).coef_, outside.fit(X, y).coef_, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("model", MEMBERS, ids=name)
def test_a_record_far_out_of_bounds_is_clipped_without_a_warning(model):
    """A warning would reveal that the record exists; in the tests, warnings are errors."""
    X, y = some_data()
    X[0, 0] = 1e308
    tiny = clone(model).set_params(bounds=Bounds(-1e-3, 1e-3))
    assert np.isfinite(tiny.fit(X, y).coef_).all()


@pytest.mark.parametrize("model", MEMBERS, ids=name)
def test_noise_and_draws_may_come_from_the_secure_generator(model):
    X, y = some_data(2000)
    model = clone(model).set_params(random_state=secure_generator(), epsilon=50.0)
    assert np.isfinite(model.fit(X, y).coef_).all()


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame])
@pytest.mark.parametrize("model", MEMBERS, ids=name)
def test_frames_name_the_features(model, frame):
    X, y = some_data()
    table = frame({"age": X[:, 0], "hours": X[:, 1], "years": X[:, 2]})
    fitted = clone(model).fit(table, y)
    assert fitted.feature_names_in_.tolist() == ["age", "hours", "years"]
    assert fitted.predict(table).shape == (len(X),)


def test_a_grid_search_pays_the_shared_ledger_for_every_fit():
    ledger = tacit.Ledger()
    X, y = some_data()
    pipeline = make_pipeline(
        FunctionTransformer(), LinearRegression(**LINEAR, method="adassp", ledger=ledger)
    )
    grid = {"linearregression__epsilon": [0.5, 1.0]}
    GridSearchCV(pipeline, grid, cv=3).fit(X, y)
    assert len(ledger.history()) == 2 * 3 + 1


def test_the_ledger_records_the_event_before_it_is_released():
    ledger = tacit.Ledger(budget=tacit.Budget(epsilon=1.0, delta=0.0))
    model = LinearRegression(**LINEAR | {"delta": 0.0}, ledger=ledger).fit(*some_data())
    (entry,) = ledger.history()
    assert entry.event == model.event_
    assert "LinearRegression" in entry.note


@pytest.mark.parametrize("model", MEMBERS, ids=name)
def test_only_released_values_are_kept(model):
    kept = vars(clone(model).fit(*some_data()))
    learned = {key for key in kept if key.endswith("_")}
    assert learned <= {
        "coef_", "intercept_", "event_", "method_", "classes_", "n_features_in_",
        "informative_", "events_", "inference_", "reason_",
        "alone_", "weight_", "misfits_",
    }  # fmt: skip


@pytest.mark.parametrize("model", [*MEMBERS, FrankWolfe(**LINEAR)], ids=name)
def test_predictions_clip_the_features_as_the_fit_does(model):
    X, y = some_data()
    fitted = clone(model).set_params(random_state=0).fit(X, y)
    far = X.copy()
    far[0] = [1e9, -1e9, 10.5]
    methods = ["predict", "predict_proba", "decision_function"]
    for method in filter(lambda method: hasattr(fitted, method), methods):
        answer = getattr(fitted, method)
        np.testing.assert_array_equal(answer(far), answer(np.clip(far, -10, 10)))
    assert fitted.score(far, y) == fitted.score(np.clip(far, -10, 10), y)
    fitted.clip = False
    margins = fitted.decision_function(far) if hasattr(fitted, "classes_") else fitted.predict(far)
    linear = far @ np.ravel(fitted.coef_) + fitted.intercept_
    np.testing.assert_allclose(margins, linear, rtol=1e-6)


def test_predictions_clip_sparse_rows_and_leave_the_argument_alone():
    X, y = some_data()
    fitted = FrankWolfe(**SMALL, loss="logistic", random_state=0).fit(scipy.sparse.csr_array(X), y)
    far = scipy.sparse.csr_array(10 * X)
    before = far.copy()
    clipped = fitted.decision_function(np.clip(10 * X, -10, 10))
    np.testing.assert_allclose(fitted.decision_function(far), clipped)
    np.testing.assert_array_equal(far.toarray(), before.toarray())


@pytest.mark.parametrize("n_rows", [0, 1])
def test_a_table_without_usable_rows_is_no_error(n_rows):
    """All records may have been left out, and an error would reveal that."""
    X, y = np.zeros((n_rows, 3)), np.zeros(n_rows)
    terms = {"epsilon": 1.0, "bounds": (-1, 1), "n_records": 60}
    linear = ({"method": "adassp"}, {"method": "gradient"}, {"method": "functional", "delta": 0.0})
    models = [LinearRegression(**{"delta": 1e-6, **terms, "target_bounds": (-1, 1), **one})
              for one in linear]  # fmt: skip
    models += [LogisticRegression(**terms, classes=range(k)) for k in (2, 3)]
    models += [LogisticRegression(**terms, classes=range(2), method=method)
               for method in ("gradient", "descent", "objective")]  # fmt: skip
    models += [FrankWolfe(**terms, target_bounds=(-1, 1), delta=1e-6)]
    for model in models:
        assert np.isfinite(model.fit(X, y).coef_).all()
    several = TransferRegression(**terms, target_bounds=(-1, 1), delta=1e-6)
    assert np.isfinite(several.fit(X, y, sources=[(X, y), (X, y)]).coef_).all()


@pytest.mark.parametrize("n_records", [3, 60, 6000])
def test_a_declared_number_of_records_is_not_compared_with_the_rows(n_records):
    """How many rows there are is private then, and an error would reveal it."""
    X, y = some_data()
    options = {"epsilon": 1.0, "delta": 1e-6, "bounds": (-10, 10), "n_records": n_records}
    model = LinearRegression(**options, target_bounds=(-10, 10)).fit(X, y)
    assert np.isfinite(model.coef_).all()
