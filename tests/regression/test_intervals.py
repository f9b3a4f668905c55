"""Intervals of private coefficients: coverage, what widens them, and the summary."""

import numpy as np
import pandas as pd
import pytest

from tacit.regression import LinearRegression
from tacit.regression.intervals import Inference

OPTIONS = {"delta": 1e-6, "bounds": (0, 10), "target_bounds": (-20, 20)}


def sample(rows, seed):
    rng = np.random.default_rng(seed)
    X = rng.uniform(0, 10, (rows, 2))
    return X, X @ [1.0, -2.0] + 3 + rng.normal(0, 1.5, rows)


def coverage(epsilon, simulations, rows=4000):
    """Return the share of intervals that contain the truth, and that of prediction intervals."""
    hits, new = [], []
    for seed in range(simulations):
        X, y = sample(rows, seed)
        model = LinearRegression(epsilon=epsilon, **OPTIONS, random_state=seed).fit(X, y)
        interval = model.inference_.interval()
        hits.append((interval.lower <= [3, 1, -2]) & (interval.upper >= [3, 1, -2]))
        X, y = sample(200, seed + 10**6)
        ends = model.predict_interval(X)
        new.append((ends.lower <= y) & (y <= ends.upper))
    return np.mean(hits), np.mean(new)


def test_intervals_contain_the_truth_as_often_as_they_say():
    """40 fits of three coefficients: below 85 % with probability below 1e-4 if 95 % is right."""
    covered, predicted = coverage(epsilon=1.0, simulations=40)
    assert covered > 0.85
    assert 0.92 < predicted < 0.98


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_coverage_is_at_least_93_percent(epsilon):
    """400 fits, three coefficients each; a coverage of 95 % is below 93 % with probability 1e-3."""
    assert coverage(epsilon, simulations=400)[0] >= 0.93


def test_less_budget_and_fewer_records_widen_intervals():
    def width(epsilon, rows):
        X, y = sample(rows, 0)
        model = LinearRegression(epsilon=epsilon, **OPTIONS, random_state=0).fit(X, y)
        return model.inference_.standard_errors

    assert (width(0.3, 4000) > 1.3 * width(3.0, 4000)).all()
    assert (width(3.0, 1000) > 1.5 * width(3.0, 16_000)).all()
    assert np.isinf(width(0.001, 100)).all()


def test_p_values_separate_what_matters_from_what_does_not():
    X, y = sample(20_000, 0)
    X = np.column_stack([X, np.random.default_rng(1).uniform(0, 10, len(X))])
    model = LinearRegression(epsilon=2.0, **OPTIONS, random_state=0).fit(X, y)
    p_values = model.inference_.p_values
    assert (p_values[1:3] < 1e-6).all()
    assert p_values[3] > 1e-3


def test_the_summary_names_every_coefficient():
    X, y = sample(4000, 0)
    frame = pd.DataFrame(X, columns=["age", "years_of_education"])
    model = LinearRegression(epsilon=1.0, **OPTIONS, random_state=0).fit(frame, y)
    text = model.summary(confidence=0.9)
    assert "epsilon 1, delta 1e-06" in text
    for part in ("intercept", "age", "years_of_education", "std err", "P>|z|", "[0.05", "0.95]"):
        assert part in text
    lines = text.splitlines()
    assert len({len(line) for line in lines[-5:]}) == 1  # columns line up


@pytest.mark.parametrize("method", ["functional", "adassp"])
def test_methods_without_intervals_say_so(method):
    X, y = sample(500, 0)
    model = LinearRegression(**OPTIONS, method=method, random_state=0).fit(X, y)
    assert model.inference_ is None
    with pytest.raises(ValueError, match="has no intervals"):
        model.summary()
    with pytest.raises(ValueError, match="has no intervals"):
        model.predict_interval(X)


def test_a_direction_without_information_is_infinite():
    hidden = np.diag([0.0, 100.0])
    inference = Inference(
        ("intercept", "x"), np.array([1.0, 5.0]), np.eye(2) + hidden, hidden, 10.0
    )
    assert inference.standard_errors.tolist() == [1.0, np.inf]
    assert inference.p_values[1] == 1.0
    assert inference.interval().lower[1] == -np.inf
    rows = np.array([[1.0, 10.0], [1.0, 0.1]])
    assert np.isinf(inference.prediction_interval(rows).upper).tolist() == [True, False]
    with pytest.raises(ValueError, match="confidence must be in"):
        inference.interval(confidence=95)
