"""The moments accountant against direct integrals of E1 and E2, and its two conversions."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from tacit.accounting import RDP, Moments
from tacit.errors import UnsupportedEvent
from tacit.events import Gaussian, Laplace, PoissonSampled, Relation, Repeated, Sequence

STEP = PoissonSampled(0.01, Gaussian(4.0))


@pytest.mark.parametrize(("rate", "noise"), [(0.01, 4.0), (0.1, 1.0), (0.5, 2.0)])
def test_log_moments_equal_the_integrals_of_the_paper(rate, noise):
    # Abadi et al. 2016, equations (3) and (4): mu0 = N(0, s^2), mu = (1 - q) mu0 + q N(1, s^2).
    def mu0(z):
        return stats.norm.pdf(z, 0, noise)

    def mu(z):
        return (1 - rate) * mu0(z) + rate * stats.norm.pdf(z, 1, noise)

    found = Moments().log_moments(PoissonSampled(rate, Gaussian(noise)))
    for moment in (1, 2, 4):
        integrals = [
            integrate.quad(
                lambda z, p=p, q=q, moment=moment: p(z) * (p(z) / q(z)) ** moment, -30, 30
            )[0]
            for p, q in ((mu0, mu), (mu, mu0))
        ]
        exact = math.log(max(integrals))
        assert found[moment - 1] == pytest.approx(exact, rel=1e-6, abs=1e-12)


def test_log_moments_add_over_steps():
    other = PoissonSampled(0.02, Gaussian(3.0))
    both = Moments().log_moments(Sequence((Repeated(STEP, 3), other, Gaussian(5.0))))
    parts = [Moments().log_moments(event) for event in (STEP, other, Gaussian(5.0))]
    assert both == pytest.approx(3 * parts[0] + parts[1] + parts[2])


def test_improved_conversion_is_lower_and_matches_rdp_at_whole_orders():
    run = Repeated(STEP, 10_000)
    published = Moments().epsilon(run, delta=1e-5)
    improved = Moments(conversion="improved").epsilon(run, delta=1e-5)
    assert improved < published
    whole = RDP(orders=tuple(np.arange(2.0, 34.0)))
    assert improved == pytest.approx(whole.epsilon(run, delta=1e-5), rel=1e-8)
    assert Moments(conversion="improved").delta(run, epsilon=1.0) == pytest.approx(
        whole.delta(run, epsilon=1.0), rel=1e-6
    )


def test_published_conversion_is_the_tail_bound():
    run = Repeated(STEP, 10_000)
    alpha, moments = Moments().log_moments(run), np.arange(1, 33)
    epsilon = Moments().epsilon(run, delta=1e-5)
    assert epsilon == pytest.approx(((alpha + math.log(1e5)) / moments).min())
    assert Moments().delta(run, epsilon=epsilon) == pytest.approx(1e-5)


def test_other_events_and_replacement_are_refused():
    with pytest.raises(UnsupportedEvent, match="Laplace"):
        Moments().epsilon(Laplace(1.0), delta=1e-5)
    with pytest.raises(UnsupportedEvent, match="added or removed"):
        Moments().epsilon(STEP, delta=1e-5, relation=Relation.REPLACE_ONE)
    assert Moments().epsilon(STEP, delta=1e-5, relation=Relation.ZERO_OUT) > 0


def test_settings_are_checked():
    with pytest.raises(ValueError, match="conversion must be"):
        Moments(conversion="best")  # pyright: ignore[reportArgumentType]  # on purpose
    with pytest.raises(ValueError, match="max_moment must be"):
        Moments(max_moment=0)


@pytest.mark.parametrize("noise", [1e-3, 1.0, 1e6])
def test_extreme_noise_gets_a_sound_number(noise):
    event = PoissonSampled(0.01, Gaussian(noise))
    assert Moments().epsilon(event, delta=1e-5) >= RDP().epsilon(event, delta=1e-5)


def test_nothing_costs_nothing():
    assert Moments().epsilon(Sequence(()), delta=1e-5) == 0
    assert Moments().delta(Repeated(STEP, 0), epsilon=0.0) == 0
