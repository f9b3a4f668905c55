"""The order-statistic test raises false alarms as rarely as stated, and is sharp."""

import numpy as np
import pytest

from tacit.auditing import noise_bound
from tacit.auditing.canaries import log_ratio
from tacit.auditing.event_test import billed_curve
from tacit.auditing.order_statistics import order_statistic_p, right_members, share_right
from tacit.events import Gaussian, PoissonSampled

RATE, SIGMA, N = 0.5, 1.0, 1000
EVENT = PoissonSampled(RATE, Gaussian(SIGMA))


def attack(seed, n=N):
    rng = np.random.default_rng(seed)
    inside = rng.integers(0, 2, n).astype(bool)
    seen = inside * (rng.random(n) < RATE) + rng.normal(0, SIGMA, n)
    return log_ratio(seen, rate=RATE, noise_multiplier=SIGMA), inside


def test_the_bill_is_refuted_as_rarely_as_stated():
    right = share_right(billed_curve(EVENT))
    refuted = sum(
        order_statistic_p(right, N, 100, right_members(*attack(seed), 100)) < 0.05
        for seed in range(1000)
    )
    assert refuted <= 72  # 50 expected at most; more than 72 with probability 0.001


def test_ties_never_help():
    scores, inside = np.zeros(10), np.arange(10) < 5
    assert right_members(scores, inside, 5) == 0


@pytest.mark.slow
def test_a_bound_is_below_the_price_and_not_idle():
    bounds = [noise_bound(*attack(seed), EVENT, delta=1e-5).epsilon_lower for seed in range(20)]
    assert 1.4 < np.median(bounds) < 3.53
