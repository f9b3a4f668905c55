"""Logistic regression: probabilities of a known model, many classes, and its proofs in numbers."""

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit

import tacit
from tacit.events import Relation
from tacit.mechanisms import generator
from tacit.regression import Bounds, LogisticRegression, likelihood
from tacit.regression.statistics import PrivateRows


def coins(rows=60_000, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform([0, -5], [10, 5], (rows, 2))
    return X, (rng.random(rows) < expit(0.4 * X[:, 0] - 0.6 * X[:, 1] - 2)).astype(int)


@pytest.mark.parametrize("method", ["gradient", "sgd", "objective"])
def test_the_true_model_is_found(method):
    X, y = coins()
    model = LogisticRegression(
        epsilon=3.0, delta=1e-6, bounds=Bounds([0, -5], [10, 5]), method=method, random_state=0
    ).fit(X, y)
    np.testing.assert_allclose(model.coef_, [[0.4, -0.6]], rtol=0.15)
    np.testing.assert_allclose(model.intercept_, [-2], rtol=0.2)


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


@pytest.mark.parametrize("epsilon", [1e-12, 600.0, 1e4])
@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_an_objective_that_rounding_may_not_minimize_is_refused_before_it_is_paid(
    epsilon, relation
):
    X, y = coins(400)
    ledger = tacit.Ledger(relation=Relation(relation))
    model = LogisticRegression(
        epsilon=epsilon, delta=1e-12, bounds=(0, 10), method="objective", relation=relation
    )
    with pytest.raises(ValueError, match=r"epsilon must be (smaller|larger)"):
        model.set_params(ledger=ledger).fit(X, y)
    assert ledger.history() == []


def test_separable_records_are_minimized_just_within_what_is_accepted():
    rng = np.random.default_rng(0)
    X = np.sign(rng.uniform(-1, 1, (400, 20)))
    model = LogisticRegression(epsilon=155.0, bounds=(-1, 1), method="objective", random_state=0)
    assert model.fit(X, X[:, 0] > 0).score(X, X[:, 0] > 0) > 0.9
    with pytest.raises(ValueError, match="epsilon must be smaller"):
        model.set_params(epsilon=170.0).fit(X, X[:, 0] > 0)


@pytest.mark.parametrize("fault", ["out of steps", "singular"])
def test_an_objective_that_was_not_minimized_says_that_it_was_paid(fault, monkeypatch):
    if fault == "singular":

        def solve(*_):
            raise np.linalg.LinAlgError("Singular matrix")

        monkeypatch.setattr(np.linalg, "solve", solve)
    else:
        monkeypatch.setattr(likelihood, "_MOST_NEWTON_STEPS", 1)
    ledger = tacit.Ledger()
    model = LogisticRegression(bounds=(0, 10), method="objective", ledger=ledger)
    with pytest.raises(RuntimeError, match=r"Nothing was released, but the budget .* was spent"):
        model.fit(*coins(400))
    assert len(ledger.history()) == 1
    assert not hasattr(model, "coef_")


def plan(**changes):
    settings = {"n_classes": 2, "row_norm": 1.5, "n_records": 20_000, "epsilon": 1.0} | changes
    return likelihood.plan_gradient(10, **settings, delta=1e-6, relation=Relation.ADD_REMOVE)


def test_residuals_are_clipped_only_where_noise_dominates():
    assert plan().residual_clip == 1.0
    assert plan(n_records=500).residual_clip == 0.5
    assert plan(n_classes=3).residual_clip == pytest.approx(np.sqrt(2))


@pytest.mark.parametrize("n_classes", [2, 4])
@pytest.mark.parametrize("n_records", [300, 20_000])
def test_one_record_moves_the_gradient_by_no_more_than_claimed(n_classes, n_records):
    settings = plan(n_classes=n_classes, n_records=n_records)
    rng = np.random.default_rng(0)
    X = rng.uniform(-300, 300, (300, 10))
    labels = rng.integers(0, n_classes, 300).astype(float)
    theta = rng.normal(size=11 if n_classes == 2 else (11, n_classes)) * 5
    box = Bounds(-100, 100).box(10)
    for i in range(0, 300, 2):
        one, other = (
            likelihood._private_gradient(
                PrivateRows(X[j : j + 1], box, row_norm=1.5), labels[j : j + 1], theta,
                settings.residual_clip, n_classes,
            )
            for j in (i, i + 1)
        )  # fmt: skip
        bound = settings.gradient.l2_sensitivity * (1 + 1e-9)
        assert np.linalg.norm(one) <= bound
        assert np.linalg.norm(one - other) <= 2 * bound


def test_objective_perturbation_keeps_its_claim_in_one_dimension():
    """The density of the exact minimum on neighbors, by the change of variables, on a fine grid.

    theta determines the noise: b(theta) = -gradient of the unperturbed objective. The hockey-stick
    divergence at the claimed epsilon, integrated numerically, must be at most the claimed delta.
    """
    settings = likelihood.plan_objective(
        0, row_norm=1.0, n_records=9, epsilon=1.0, delta=1e-3, relation=Relation.ADD_REMOVE
    )
    theta = np.linspace(-12, 12, 400_001)

    def density(labels):
        p = expit(theta)
        gradient = settings.ridge * theta + sum(p - label for label in labels)
        hessian = settings.ridge + len(labels) * p * (1 - p)
        z = gradient / settings.noise_std
        return np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi) / settings.noise_std * hessian

    epsilon, delta = settings.claim.epsilon, settings.claim.delta
    width = theta[1] - theta[0]
    for fewer, more in (((), (1,)), ((0, 1, 1), (0, 1, 1, 0)), ((0,) * 9, (0,) * 9 + (1,))):
        p, q = density(fewer), density(more)
        assert p.sum() * width == pytest.approx(1, abs=1e-6)
        for a, b in ((p, q), (q, p)):
            assert np.maximum(a - np.exp(epsilon) * b, 0).sum() * width <= delta


def test_the_approximate_minimum_is_within_the_distance_its_noise_hides():
    X, y = coins(3000)
    settings = likelihood.plan_objective(
        2, row_norm=1.2, n_records=3000, epsilon=1.0, delta=1e-6, relation=Relation.ADD_REMOVE
    )
    rows = PrivateRows(X, Bounds([0, -5], [10, 5]).box(2), row_norm=1.2)
    theta = likelihood.fit_objective(rows, y.astype(float), settings, rng=generator(3))
    b = generator(3).normal(0.0, settings.noise_std, 3)
    exact = theta
    for _ in range(50):
        _, gradient, hessian = likelihood._objective(
            rows, y.astype(float), exact, b, settings.ridge
        )
        exact = exact - np.linalg.solve(hessian, gradient)
    # Output noise included: 3 coordinates at 6 sigma, false alarms below 1e-8.
    assert np.linalg.norm(theta - exact) <= 6 * np.sqrt(3) * settings.output.noise_std + (
        settings.tolerance / settings.ridge
    )


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
