"""Histograms and quantiles from local reports."""

import numpy as np
import pytest

from tacit import local


def test_a_histogram_is_private_and_unbiased(enumeration):
    histogram = local.LocalHistogram(epsilon=1.0, lower=0.0, upper=3.0, n_bins=3)
    enumeration.check_private(histogram, (-1.0, 1.5, 9.0))
    values = np.random.default_rng(0).normal(1.5, 0.7, 50_000)
    found = histogram.estimate(histogram.randomize(values, rng=1))
    truth = np.histogram(np.clip(values, 0, 3), histogram.edges)[0] / len(values)
    assert (abs(found.values - truth) < 5 * found.standard_errors).all()


def test_quantiles_are_near_the_truth_and_in_their_intervals():
    quantiles = local.LocalQuantiles(epsilon=2.0, lower=0.0, upper=100.0, depth=7)
    values = np.random.default_rng(1).gamma(4.0, 6.0, 80_000)
    wanted = np.array([0.1, 0.25, 0.5, 0.75, 0.9])
    truth = np.quantile(np.clip(values, 0, 100), wanted)
    covered = []
    for seed in range(10):
        found = quantiles.estimate(quantiles.randomize(values, rng=seed), wanted, confidence=0.95)
        assert (found.lower <= found.values).all()
        assert (found.values <= found.upper).all()
        assert abs(found.values - truth).max() < 6
        covered.append((found.lower <= truth) & (truth <= found.upper))
    assert np.mean(covered) > 0.85  # 50 dependent intervals of 0.95


def test_the_cumulative_fractions_are_unbiased_with_the_stated_error():
    quantiles = local.LocalQuantiles(epsilon=3.0, lower=0.0, upper=1.0, depth=3)
    values = np.random.default_rng(2).beta(2, 5, 20_000)
    truth = np.mean(values[:, None] < quantiles.edges[1:-1], axis=0)
    errors = []
    for seed in range(60):
        found = quantiles.cumulative(quantiles.randomize(values, rng=seed))
        errors.append((found.values - truth) / found.standard_errors)
    # 60 errors of 7 edges: each bound fails with probability below 1e-5.
    assert abs(np.mean(errors, axis=0)).max() < 5 / np.sqrt(60)
    assert 0.75 < np.std(errors) < 1.3


def test_the_ratio_of_quantiles_is_that_of_the_worst_level(enumeration):
    quantiles = local.LocalQuantiles(epsilon=1.5, lower=0.0, upper=1.0, depth=5)
    assert quantiles.worst_case_ratio() <= enumeration.exponential(1.5)
    assert quantiles.event.epsilon == 1.5


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="lower must be below"):
        local.LocalHistogram(epsilon=1.0, lower=1.0, upper=0.0, n_bins=3)
    with pytest.raises(ValueError, match="depth must be at most"):
        local.LocalQuantiles(epsilon=1.0, lower=0.0, upper=1.0, depth=30)
    quantiles = local.LocalQuantiles(epsilon=1.0, lower=0.0, upper=1.0, depth=2)
    with pytest.raises(ValueError, match="probabilities must be"):
        quantiles.estimate(quantiles.randomize(np.zeros(50), rng=0), [1.5])
