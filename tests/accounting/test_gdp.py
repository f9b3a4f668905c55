"""Closed forms of Gaussian noise, to 1e-12 and into the far tail."""

import math

import mpmath as mp
import pytest

from tacit.accounting import GDP, CentralLimitGDP, gaussian_delta, gaussian_epsilon
from tacit.errors import UnsupportedEvent
from tacit.events import Gaussian, Laplace, PoissonSampled, Relation, Repeated, Sequence


def exact_delta(mu, epsilon):
    """Balle & Wang 2018, Theorem 8, in 60 digits."""
    mu, epsilon = mp.mpf(mu), mp.mpf(epsilon)
    return mp.ncdf(mu / 2 - epsilon / mu) - mp.exp(epsilon) * mp.ncdf(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize("mu", [1e-4, 0.01, 0.3, 1.0, 5.0, 30.0])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 2.0, 8.0, 30.0])
def test_delta_is_exact_and_rounded_up(mu, ratio):
    epsilon = mu * (mu / 2 + ratio)
    with mp.workdps(60):
        exact = exact_delta(mu, epsilon)
        excess = float(gaussian_delta(mu, epsilon) / exact - 1)
    assert 0 <= excess < 1e-9


@pytest.mark.parametrize("mu", [0.01, 0.6212, 4.0])
@pytest.mark.parametrize("delta", [0.1, 1e-5, 1e-12, 1e-100, 1e-300])
def test_epsilon_is_the_least_that_meets_delta(mu, delta):
    epsilon = gaussian_epsilon(mu, delta)
    with mp.workdps(60):
        assert exact_delta(mu, epsilon) <= delta
        if epsilon > 0:
            assert exact_delta(mu, epsilon * (1 - 1e-9)) > delta


def test_corners_of_the_closed_form():
    assert gaussian_delta(0.0, 0.0) == 0
    assert gaussian_epsilon(0.0, 1e-5) == 0
    assert gaussian_epsilon(1e-9, 1e-5) == 0  # the total variation is below delta
    assert gaussian_delta(1e-310, 0.0) <= 1e-300
    assert gaussian_delta(1e3, 1.0) == 1
    assert gaussian_delta(1e-3, 1e6) == 0
    assert gaussian_epsilon(1e4, 1e-5) >= 1e8 / 2
    for bad in (math.nan, -1.0, math.inf):
        with pytest.raises(ValueError, match="mu must be"):
            gaussian_delta(bad, 1.0)


def test_gaussians_compose_as_one_gaussian():
    parts = Sequence((Gaussian(3.0), Repeated(Gaussian(4.0), 10)))
    mu = math.sqrt(1 / 9 + 10 / 16)
    assert GDP().mu(parts) == pytest.approx(mu)
    assert GDP().epsilon(parts, delta=1e-6) == pytest.approx(gaussian_epsilon(mu, 1e-6))
    assert GDP().delta(parts, epsilon=1.0) == pytest.approx(gaussian_delta(mu, 1.0))


def test_replacing_stretches_by_the_declared_factor():
    assert GDP().mu(Gaussian(2.0), relation=Relation.REPLACE_ONE) == pytest.approx(1.0)
    narrow = Gaussian(2.0, replace_factor=1.5)
    assert GDP().mu(narrow, relation=Relation.REPLACE_ONE) == pytest.approx(0.75)
    assert GDP().mu(narrow, relation=Relation.ZERO_OUT) == pytest.approx(0.5)


def test_other_events_are_refused():
    with pytest.raises(UnsupportedEvent, match="PoissonSampled"):
        GDP().epsilon(PoissonSampled(0.1, Gaussian(1.0)), delta=1e-5)
    with pytest.raises(UnsupportedEvent):
        CentralLimitGDP().epsilon(Laplace(1.0), delta=1e-5)
    with pytest.raises(UnsupportedEvent):
        CentralLimitGDP().epsilon(Gaussian(1.0), delta=1e-5, relation=Relation.REPLACE_ONE)


def test_central_limit_is_no_guarantee_and_says_so():
    run = Repeated(PoissonSampled(0.01, Gaussian(4.0)), 10_000)
    assert CentralLimitGDP().epsilon(run, delta=1e-5) < 0.94686  # below the certified bracket
    assert "NOT a guarantee" in (CentralLimitGDP.__doc__ or "")
    assert CentralLimitGDP().epsilon(PoissonSampled(0.1, Gaussian(0.01)), delta=1e-5) == math.inf
    assert CentralLimitGDP().delta(PoissonSampled(0.1, Gaussian(0.01)), epsilon=1.0) == 1
