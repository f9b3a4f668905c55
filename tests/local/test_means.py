"""Means: exact ratios, no bias, and the variances of the papers."""

import math

import numpy as np
import pytest
from scipy.integrate import quad

from tacit import local

EPSILONS = (0.3, 1.0, 2.0, 5.0)
SCALARS = (local.DuchiMean, local.PiecewiseMean, local.HybridMean)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_duchi_is_exactly_private_and_unbiased(epsilon, enumeration):
    mean = local.DuchiMean(epsilon=epsilon)
    enumeration.check_private(mean, (-1.0, -0.5, 0.25, 1.0))
    for t in (-1.0, -0.5, 0.25, 1.0):
        found, variance = enumeration.moments(mean, t, float)
        assert found == pytest.approx(t, abs=1e-12)
        assert variance == pytest.approx(mean.noise_variance(t), rel=1e-9)


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("n_levels", [2, 4])
def test_piecewise_on_a_coarse_grid_is_exactly_private_and_unbiased(epsilon, n_levels, enumeration):
    mean = local.PiecewiseMean(epsilon=epsilon, n_levels=n_levels)
    enumeration.check_private(mean, (-1.0, -0.5, 0.25, 1.0))
    for t in (-1.0, -0.5, 0.25, 1.0):
        assert enumeration.moments(mean, t, float)[0] == pytest.approx(t, abs=1e-12)


def piecewise_density(epsilon, t):
    """Window and the two densities of Wang et al. 2019, Algorithm 2."""
    half = math.exp(epsilon / 2)
    c = (half + 1) / (half - 1)
    low = (c + 1) / 2 * t - (c - 1) / 2
    p = (math.exp(epsilon) - half) / (2 * half + 2)
    return c, low, low + c - 1, p, p / math.exp(epsilon)


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("t", [-1.0, 0.0, 0.6])
def test_the_published_piecewise_density_has_the_stated_variance_by_integration(epsilon, t):
    c, low, high, p, q = piecewise_density(epsilon, t)

    def moment(power):
        inside = p * quad(lambda x: x**power, low, high)[0]
        return inside + q * (
            quad(lambda x: x**power, -c, low)[0] + quad(lambda x: x**power, high, c)[0]
        )

    assert moment(0) == pytest.approx(1)
    assert moment(1) == pytest.approx(t, abs=1e-9)
    stated = local.PiecewiseMean(epsilon=epsilon).noise_variance(t)
    assert moment(2) - t**2 == pytest.approx(stated)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_the_grid_of_the_piecewise_mean_has_the_published_variance(epsilon):
    mean = local.PiecewiseMean(epsilon=epsilon)
    w, n, step = mean.half_window, mean.n_levels, mean._step
    p, (inside, outside) = float(mean.window_probability), mean._sizes
    places = np.arange(-n, n + 1)
    for t in (0.0, 0.5, 1.0):
        center = round(t * (n - w))
        is_near = abs(places - center) <= w
        law = np.where(is_near, p / inside, (1 - p) / outside)
        second = law @ (places * step) ** 2
        assert second - (law @ (places * step)) ** 2 == pytest.approx(
            mean.noise_variance(t), rel=2e-3
        )


@pytest.mark.parametrize("kind", SCALARS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_the_ratio_is_e_to_epsilon_and_never_above(kind, epsilon, enumeration):
    ratio = kind(epsilon=epsilon).worst_case_ratio()
    assert ratio <= enumeration.exponential(epsilon)
    assert float(1 - ratio / enumeration.exponential(epsilon)) < 1e-8


@pytest.mark.parametrize("kind", SCALARS, ids=lambda kind: kind.__name__)
def test_variances_of_means_are_within_two_percent_of_theory_at_a_million_users(kind):
    values = np.random.default_rng(2).uniform(20, 60, 10**6)
    mean = kind(epsilon=1.0, lower=0.0, upper=100.0)
    reports = mean.randomize(values, rng=3)
    # Relative standard error of the sample variance is below 0.2 %.
    noise = np.var(reports) - np.var(values)
    assert noise / 10**6 == pytest.approx(mean.variance(values, 10**6), rel=0.02)
    found = mean.estimate(reports)
    assert abs(found.values - values.mean()) < 5 * found.standard_errors


@pytest.mark.parametrize("epsilon", [0.5, 0.62, 1.0, 2.0, 4.0])
def test_the_hybrid_has_the_worst_case_variance_of_the_paper(epsilon):
    # Wang et al. 2019: worst-case variance of the hybrid mechanism.
    e, half = math.exp(epsilon), math.exp(epsilon / 2)
    duchi = ((e + 1) / (e - 1)) ** 2
    mixed = (half + 3) / (3 * half * (half - 1)) + (e + 1) ** 2 / (half * (e - 1) ** 2)
    found = local.HybridMean(epsilon=epsilon).noise_variance(np.linspace(-1, 1, 101)).max()
    assert found == pytest.approx(mixed if epsilon > 0.61 else duchi)
    others = [k(epsilon=epsilon).noise_variance([0, 1]).max() for k in SCALARS[:2]]
    assert found <= min(others) * (1 + 1e-12)


@pytest.mark.parametrize("epsilon", [1.0, 6.0])
def test_sampled_vectors_are_unbiased_with_the_stated_variance(epsilon):
    vector = local.SampledVector(epsilon=epsilon, n_dimensions=4, lower=0.0, upper=10.0)
    value = np.array([1.0, 4.0, 5.0, 9.0])
    reports = vector.randomize(np.tile(value, (400_000, 1)), rng=4)
    found = vector.estimate(reports)
    assert (abs(found.values - value) < 5 * found.standard_errors).all()
    stated = 25 * vector.noise_variance(value / 5 - 1)
    np.testing.assert_allclose(reports.var(axis=0), stated, rtol=0.02)


def test_sampled_vectors_divide_epsilon_among_coordinates(enumeration):
    vector = local.SampledVector(epsilon=6.0, n_dimensions=5)
    assert vector.n_sampled == 2
    assert vector.worst_case_ratio() <= enumeration.exponential(6.0)
    assert (vector.randomize(np.zeros((100, 5)), rng=0) != 0).sum(axis=1).max() <= 2


def test_values_outside_are_clipped_and_missing_ones_are_the_middle():
    mean = local.DuchiMean(epsilon=20.0, lower=0.0, upper=1.0)
    assert mean.randomize(7.0, rng=1) == pytest.approx(1.0)
    middle = mean.randomize(np.full(10_000, np.nan), rng=1).mean()
    assert middle == pytest.approx(0.5, abs=0.03)


def test_bounds_must_be_in_order():
    with pytest.raises(ValueError, match="lower must be below upper"):
        local.HybridMean(epsilon=1.0, lower=2.0, upper=1.0)
    with pytest.raises(ValueError, match="columns"):
        local.SampledVector(epsilon=1.0, n_dimensions=2).randomize([1.0, 2.0, 3.0])
