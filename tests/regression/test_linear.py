"""Linear regression on data with a known or a real answer."""

import numpy as np
import pytest

from tacit.regression import Bounds, LinearRegression


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

    assert loss(epsilon=0.1) > loss(epsilon=1.0) > loss(epsilon=10.0)
    assert loss(epsilon=0.1, delta=1e-6) > loss(epsilon=1.0, delta=1e-6)
    assert loss(epsilon=1.0, analysis="published") > loss(epsilon=1.0)


def test_replacing_a_record_costs_more_noise_than_adding_one():
    X, y = line(500)
    events = [
        LinearRegression(
            bounds=(-100, 100), target_bounds=(-100, 100), relation=relation, epsilon=1.0
        )
        .fit(X, y)
        .event_.parts[0]
        .noise_multiplier
        for relation in ("add_remove", "replace_one")
    ]
    assert events[0] < events[1] < 2 * events[0]
