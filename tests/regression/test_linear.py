"""Linear regression on data with a known or a real answer, by each of its methods."""

import math

import numpy as np
import pytest

from tacit.accounting import GDP
from tacit.events import Relation
from tacit.mechanisms import GaussianMechanism, generator
from tacit.regression import Bounds, LinearRegression, adassp, functional, linear, newton
from tacit.regression.rows import PrivateRows

BUDGET = {"epsilon": 1.0, "delta": 1e-6}
RELATIONS = [Relation.ADD_REMOVE, Relation.REPLACE_ONE]


def line(rows=50_000, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform([0, -5], [100, 5], (rows, 2))
    return X, 0.5 * X[:, 0] - 3 * X[:, 1] + 7 + rng.normal(0, 2, rows)


@pytest.mark.parametrize("method", ["functional", "adassp", "gradient", "auto"])
def test_coefficients_come_back_in_the_units_of_the_data(method):
    X, y = line()
    model = LinearRegression(
        epsilon=2.0,
        delta=1e-6,
        bounds=Bounds([0, -5], [100, 5]),
        target_bounds=Bounds(-20, 80),
        method=method,
        random_state=0,
    ).fit(X, y)
    np.testing.assert_allclose(model.coef_, [0.5, -3], rtol=0.05)
    assert model.intercept_ == pytest.approx(7, abs=1.5)
    assert model.score(X, y) > 0.98


def test_shrinking_long_rows_leaves_the_true_line_the_answer():
    X, y = line(200_000)
    bounds = Bounds([0, -5], [100, 5], norm=0.7)
    model = LinearRegression(
        epsilon=5.0, delta=1e-6, bounds=bounds, target_bounds=(-20, 80), random_state=0
    ).fit(X, y)
    np.testing.assert_allclose(model.coef_, [0.5, -3], rtol=0.05)


def test_less_noise_fits_better():
    X, y = line(5000)
    options = {"bounds": Bounds([0, -5], [100, 5]), "target_bounds": (-20, 80)}

    def loss(**budget):
        models = (
            LinearRegression(**options, **budget, random_state=seed).fit(X, y) for seed in range(9)
        )
        return np.median([np.mean((model.predict(X) - y) ** 2) for model in models])

    pure = {"method": "functional"}
    assert loss(epsilon=0.1, **pure) > loss(epsilon=1.0, **pure) > loss(epsilon=10.0, **pure)
    assert loss(epsilon=0.1, delta=1e-6) > loss(epsilon=1.0, delta=1e-6)
    assert loss(epsilon=1.0, analysis="published", **pure) > loss(epsilon=1.0, **pure)


def test_replacing_a_record_costs_more_noise_than_adding_one():
    X, y = line(500)
    events = [
        LinearRegression(
            bounds=(-100, 100), target_bounds=(-100, 100), relation=relation, method="functional"
        )
        .fit(X, y)
        .event_.parts[0]
        .noise_multiplier
        for relation in ("add_remove", "replace_one")
    ]
    assert events[0] < events[1] < 2 * events[0]


@pytest.mark.parametrize("relation", RELATIONS)
def test_gaussian_plans_cost_exactly_their_budget(relation):
    for plan in (
        adassp.plan_adassp(row_norm=2.0, **BUDGET, relation=relation),
        newton.plan_newton(4, row_norm=2.0, n_records=10_000, **BUDGET, relation=relation),
    ):
        cost = GDP().epsilon(plan.event, delta=1e-6, relation=relation)
        assert cost <= 1.0
        assert cost == pytest.approx(1.0, rel=1e-6)


def test_every_gaussian_coordinate_carries_noise_at_its_scale(monkeypatch):
    """Asymmetric bounds (0, 100), AdaSSP and descent; false alarms at 6 sigma, below 1e-6."""
    X = np.random.default_rng(0).uniform(0, 100, (60, 2))
    y = X[:, 0] / 50 - 1
    seen = []
    original = GaussianMechanism.release

    def spy(self, value, rng=None):
        released = original(self, value, rng)
        seen.append((self.noise_std, (released - value) / self.noise_std))
        return released

    monkeypatch.setattr(GaussianMechanism, "release", spy)
    box = Bounds(0, 100).box(2)
    moments = adassp.plan_adassp(row_norm=box.row_norm, **BUDGET, relation=Relation.ADD_REMOVE)
    descent = newton.plan_newton(
        2, row_norm=box.row_norm, n_records=60, **BUDGET, relation=Relation.ADD_REMOVE
    )
    rng = generator(0)
    draws = 80
    for plan, releases in ((moments, 3), (descent, 4 + descent.steps)):
        seen.clear()
        for _ in range(draws):
            rows = PrivateRows(X, box, row_norm=plan.row_norm)
            linear.fit(rows, y, plan, n_records=60, rng=rng)
        assert len(seen) == draws * releases
        for first in range(releases):
            noise = np.array([z for _, z in seen[first::releases]])
            assert (np.abs(noise.std(axis=0) - 1) < 6 / math.sqrt(2 * draws)).all()
    assert [m.noise_std for m in (moments.gram, moments.cross)] == pytest.approx(
        [moments.gram.noise_multiplier * 1.8, moments.cross.noise_multiplier * math.sqrt(1.8)]
    )


def test_plenty_of_records_give_the_least_squares_solution():
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (200_000, 3))
    y = np.clip(X @ [0.3, -0.2, 0.1] + 0.1 + rng.normal(0, 0.05, len(X)), -1, 1)
    box = Bounds(-1, 1).box(3)
    budget = BUDGET | {"relation": Relation.ADD_REMOVE}
    for plan in (
        functional.plan_functional(3, epsilon=1.0, relation=Relation.ADD_REMOVE),
        adassp.plan_adassp(row_norm=box.row_norm, **budget),
        newton.plan_newton(3, row_norm=box.row_norm, n_records=len(X), **budget),
    ):
        rows = PrivateRows(X, box, row_norm=plan.row_norm)
        fitted = linear.fit(rows, y, plan, n_records=len(X), rng=generator(1))
        np.testing.assert_allclose(fitted.theta, [0.1, 0.3, -0.2, 0.1], atol=0.01)


def test_auto_without_delta_suggests_one_and_pure_dp_is_asked_by_name():
    X, y = line(500)
    options = {"bounds": (-100, 100), "target_bounds": (-100, 100)}
    with pytest.raises(ValueError, match=r"got None\. Pass delta=1e-06, or method='functional'"):
        LinearRegression(**options).fit(X, y)
    assert LinearRegression(**options, method="functional").fit(X, y).method_ == "functional"
    assert LinearRegression(**options, delta=0.0).fit(X, y).method_ == "functional"
    with pytest.raises(ValueError, match="delta must be in"):
        LinearRegression(**options, method="adassp").fit(X, y)


def test_weights_give_the_weighted_answer():
    """A tenth of the records follows another line; weights of 0.02 against 1 remove it."""
    X, y = line(40_000)
    weights = np.full(len(y), 50.0)
    y[:4000], weights[:4000] = -10.0, 1.0
    options = {"bounds": Bounds([0, -5], [100, 5]), "target_bounds": (-20, 80), "epsilon": 2.0}
    model = LinearRegression(**options, delta=1e-6, max_weight=50, random_state=0)
    np.testing.assert_allclose(model.fit(X, y, weights).coef_, [0.5, -3], rtol=0.05)
    assert not np.allclose(model.fit(X, y).coef_, [0.5, -3], rtol=0.05)

    def errors(epsilon, weight):
        model.set_params(epsilon=epsilon)
        return model.fit(X[4000:], y[4000:], np.full(36_000, weight)).inference_.standard_errors

    assert (errors(0.1, 25.0) > 1.2 * errors(0.1, 50.0)).all()  # a bound twice too large costs
    # Equal weights change what noise adds, but not the sampling error.
    np.testing.assert_allclose(errors(50.0, 25.0), errors(50.0, 50.0), rtol=0.05)


def test_weights_need_a_declared_bound_and_a_method_that_takes_them():
    X, y = line(500)
    options = {"bounds": (-100, 100), "target_bounds": (-100, 100), "delta": 1e-6}
    with pytest.raises(ValueError, match="max_weight must be declared"):
        LinearRegression(**options).fit(X, y, np.ones(500))
    with pytest.raises(ValueError, match="has no weights"):
        LinearRegression(**options, method="adassp", max_weight=1).fit(X, y, np.ones(500))
    with pytest.raises(ValueError, match="sample_weight must be of shape"):
        LinearRegression(**options, max_weight=1).fit(X, y, np.ones(400))
    with pytest.raises(ValueError, match="sample_weight must be finite"):
        LinearRegression(**options, max_weight=1).fit(X, y, np.full(500, np.nan))
    with pytest.raises(ValueError, match=r"^sample_weight must hold numbers only\. Encode text"):
        LinearRegression(**options, max_weight=1).fit(X, y, ["secret"] * 500)
    wild = np.where(np.arange(500) % 2, 1e300, -5.0)  # clipped to [0, 1]
    model = LinearRegression(**options, max_weight=1, random_state=0).fit(X, y, wild)
    assert np.isfinite(model.coef_).all()
