"""Intervals of private coefficients: coverage, what widens them, and the summary."""

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit

from tacit.regression import Bounds, LinearRegression, LogisticRegression
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
    """25 fits of three coefficients: below 85 % with probability below 1e-3 if 95 % is right."""
    covered, predicted = coverage(epsilon=1.0, simulations=25)
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


def test_the_summary_says_that_no_finite_interval_is_valid():
    X, y = sample(200, 0)
    linear = LinearRegression(epsilon=0.05, **OPTIONS, random_state=0).fit(X, y)
    logit = LogisticRegression(
        epsilon=0.05, delta=1e-6, bounds=(0, 10), method="gradient", random_state=0
    )
    for model in (linear, logit.fit(X, y > -7)):
        assert np.isinf(model.inference_.standard_errors).all()
        assert (model.inference_.p_values == 1).all()
        assert "no\nfinite interval is valid" in model.summary()


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


def categories(rows=20_000):
    rng = np.random.default_rng(0)
    level = rng.integers(0, 3, rows)
    X = np.column_stack([rng.uniform(0, 10, rows), level[:, None] == np.arange(3)]).astype(float)
    return X, X @ [0.5, 0.0, 1.0, 2.0] + 3 + rng.normal(0, 1, rows)


def test_collinear_indicators_hide_their_levels_and_nothing_else():
    """All levels and an intercept: differences of levels and other coefficients stay known."""
    X, y = categories()
    labels = ("age", "none", "school", "college")
    bounds = Bounds([0, 0, 0, 0], [10, 1, 1, 1], labels=labels, groups=[(1, 2, 3)])
    model = LinearRegression(
        epsilon=2.0, delta=1e-6, bounds=bounds, target_bounds=(-5, 20), random_state=0
    ).fit(X, y)
    inference = model.inference_
    assert np.isinf(inference.standard_errors).tolist() == [True, False, True, True, True]
    ends = inference.contrast([0, 0, -1, 0, 1])
    assert ends.lower < 2 < ends.upper < ends.lower + 0.5
    compared = inference.compared()
    assert compared.names == ("intercept", "age", "school", "college")
    off = np.abs(compared.estimates - [3, 0.5, 1, 2])
    assert (off < 4 * compared.standard_errors).all()
    assert (compared.standard_errors < 0.2).all()
    text = model.summary()
    assert "Compared with: none" in text
    assert "inf" not in text.replace("inference", "")
    with pytest.raises(ValueError, match="weights must have 5 columns"):
        inference.contrast([1, 0])


def test_groups_must_be_features_of_the_table():
    X, y = categories(100)
    options = {"delta": 1e-6, "target_bounds": (-5, 20)}
    with pytest.raises(ValueError, match="none of them twice"):
        Bounds(0, 10, groups=[(1, 2), (2, 3)])
    with pytest.raises(ValueError, match="must be those of 4 features"):
        LinearRegression(bounds=Bounds(0, 10, groups=[(3, 4)]), **options).fit(X, y)


@pytest.mark.parametrize("epsilon", [0.1, 1.0])
@pytest.mark.parametrize("kind", ["heteroscedastic", "skewed", "lognormal"])
def test_errors_of_other_shapes_are_covered(kind, epsilon):
    """25 fits: at most 72 % with probability below 1e-3 if 95 % is right."""
    hits = []
    for seed in range(25):
        rng = np.random.default_rng(seed)
        X = rng.uniform(-1, 1, (4000, 2))
        e = {
            "heteroscedastic": rng.normal(0, np.exp(X[:, 0])),
            "skewed": rng.exponential(1, 4000) - 1,
            "lognormal": rng.lognormal(0, 0.5, 4000) - np.exp(0.125),
        }[kind]
        model = LinearRegression(
            epsilon=epsilon, delta=1e-6, bounds=(-1, 1), target_bounds=(-20, 20), random_state=seed
        ).fit(X, X @ [1.0, -2.0] + e)
        interval = model.inference_.interval()
        hits.append((interval.lower <= [0, 1, -2]) & (interval.upper >= [0, 1, -2]))
    assert np.mean(hits, axis=0).min() > 0.72


@pytest.mark.parametrize("epsilon", [0.1, 1.0])
@pytest.mark.parametrize("truth", [(-0.5, -2.0, 2.0), (0.0, -4.0, 4.0), (-3.0, -1.0, 1.0)])
def test_logistic_intervals_cover_steep_models_and_rare_classes(truth, epsilon):
    """25 fits: at most 72 % with probability below 1e-3 if 95 % is right."""
    hits, widths = [], []
    for seed in range(25):
        rng = np.random.default_rng(seed)
        X = rng.uniform(-1, 1, (5000, 2))
        y = rng.random(5000) < expit(truth[0] + X @ truth[1:])
        model = LogisticRegression(
            epsilon=epsilon, delta=1e-6, bounds=(-1, 1), classes=[False, True], random_state=seed
        ).fit(X, y)
        interval = model.inference_.interval()
        hits.append((interval.lower <= truth) & (interval.upper >= truth))
        widths.append(interval.upper - interval.lower)
    assert np.mean(hits, axis=0).min() > 0.72
    assert np.isfinite(widths).mean() > 0.6  # not by being infinite


def test_equal_weights_change_what_noise_adds_and_not_the_sampling_error():
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (5000, 2))
    y = rng.random(5000) < expit(X @ [1.0, -1.0])

    def errors(epsilon, weight):
        model = LogisticRegression(
            epsilon=epsilon, delta=1e-6, bounds=(-1, 1), max_weight=1.0, random_state=0
        )
        return model.fit(X, y, np.full(5000, weight)).inference_.standard_errors

    np.testing.assert_allclose(errors(50.0, 0.5), errors(50.0, 1.0), rtol=0.05)
    assert (errors(0.3, 0.5) > 1.2 * errors(0.3, 1.0)).all()
