"""A billed event is refuted where it is wrong, and as seldom as stated where it is right."""

import math

import numpy as np
import pytest
from scipy import stats

from tacit.auditing import refute_event
from tacit.auditing.event_test import billed_curve
from tacit.auditing.one_run import gaussian_inverse
from tacit.events import Gaussian, Laplace, PoissonSampled, Repeated


def noisy_counts(rate, steps, noise_multiplier, n, rng):
    """Sum of the released coordinates of Dirac canaries over a Poisson-sampled run."""
    inside = rng.integers(0, 2, n).astype(bool)
    times = rng.binomial(steps, rate, n) * inside
    return times + rng.normal(0, noise_multiplier * math.sqrt(steps), n), inside


@pytest.mark.parametrize("independent", [True, False])
def test_a_true_bill_is_refuted_as_seldom_as_stated(independent):
    rng, repetitions = np.random.default_rng(7), 60
    event = Repeated(PoissonSampled(0.2, Gaussian(1.0)), 20)
    refuted = sum(
        refute_event(
            *noisy_counts(0.2, 20, 1.0, 1000, rng), event, independent=independent
        ).is_refuted
        for _ in range(repetitions)
    )
    assert refuted <= stats.binom.ppf(0.999, repetitions, 0.05)


@pytest.mark.parametrize(("independent", "noise"), [(True, 0.5), (False, 0.1)])
def test_less_noise_than_billed_is_refuted(independent, noise):
    event = Repeated(PoissonSampled(0.2, Gaussian(1.0)), 20)
    scores, inside = noisy_counts(0.2, 20, noise, 5000, np.random.default_rng(8))
    found = refute_event(scores, inside, event, independent=independent)
    assert found.is_refuted
    assert found.n_canaries == 5000


def test_a_bill_of_laplace_noise_is_tested_on_its_own_curve():
    rng = np.random.default_rng(9)
    inside = rng.integers(0, 2, 4000).astype(bool)
    scores = inside + rng.laplace(0, 1.0, 4000)
    assert not refute_event(scores, inside, Laplace(1.0), independent=True).is_refuted
    assert refute_event(scores, inside, Laplace(2.0), independent=True).is_refuted


def test_points_of_the_gaussian_profile_give_nearly_its_curve():
    by_points, exact = billed_curve(Gaussian(1.0)).inverse, gaussian_inverse(1.0)
    for y in (1e-3, 0.01, 0.3, 0.9):
        assert by_points(y) <= exact(y) + 1e-12
        assert by_points(y) == pytest.approx(exact(y), rel=0.01)
