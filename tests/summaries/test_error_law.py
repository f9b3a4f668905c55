"""Half widths are right for Laplace, normal and mixed errors."""

import numpy as np
import pytest
from scipy.special import ndtri

from tacit.summaries.error_law import Spread, accepted_range, half_width


@pytest.mark.parametrize("confidence", [0.8, 0.9, 0.95, 0.99])
def test_pure_laws_are_exact(confidence):
    assert half_width(Spread(4.0), confidence) == pytest.approx(-2 * ndtri((1 - confidence) / 2))
    laplace = Spread.of_noise([3.0], variance=2.0, is_laplace=True)
    assert half_width(laplace, confidence) == pytest.approx(-3 * np.log(1 - confidence))


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
@pytest.mark.parametrize("n_terms", [2, 3, 8])
def test_sums_of_laplace_errors_keep_their_confidence(n_terms, confidence):
    # The standard error of a tail of 10 % is 0.1 points, and the law is within 0.3 of it.
    rng = np.random.default_rng(n_terms)
    coefficients = rng.uniform(0.2, 1.0, n_terms)
    draws = rng.laplace(0, 1, (100_000, n_terms)) @ coefficients
    spread = Spread.of_noise(coefficients, variance=2.0, is_laplace=True)
    beyond = np.mean(np.abs(draws) > half_width(spread, confidence))
    assert beyond == pytest.approx(1 - confidence, abs=0.007)


def test_a_sampling_error_is_added():
    rng = np.random.default_rng(0)
    draws = rng.laplace(0, 1, 400_000) + rng.normal(0, 1.5, 400_000)
    spread = Spread.of_noise([1.0], variance=2.0, is_laplace=True) + Spread(1.5**2)
    assert np.mean(np.abs(draws) > half_width(spread, 0.95)) == pytest.approx(0.05, abs=0.002)


def test_no_error_has_no_width():
    assert half_width(Spread(0.0), 0.95) == 0


def test_accepted_ranges_are_refined_and_may_reach_the_ends():
    lower, upper = accepted_range(lambda m: np.abs(m - 0.30001) < 1e-5, 0.30001)
    assert (lower, upper) == pytest.approx((0.3, 0.30002), abs=1e-9)
    assert accepted_range(lambda m: m >= 0, 0.5) == (0.0, 1.0)
