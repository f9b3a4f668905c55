"""Marked losses and smoothed integrals, against two steps integrated by brute force."""

import math

import numpy as np
import pytest
from scipy.special import ndtr

from tacit import accounting
from tacit.accounting.pld.direction import DirectionPrice
from tacit.accounting.pld.large_losses import chernoff_if_added, log_moments_if_added, mark_losses
from tacit.accounting.pld.pairs import directions
from tacit.accounting.pld.transforms import ORDERS
from tacit.errors import NotCertified
from tacit.events import Gaussian, PoissonSampled, Relation, Repeated


def random_setting(rng):
    """A rate, a noise multiplier and a delta below the total variation of two steps."""
    rate, sigma = 10 ** rng.uniform(-7, -0.5), 10 ** rng.uniform(-0.5, 1.2)
    variation = rate * (2 * ndtr(0.5 / sigma) - 1)
    return rate, sigma, variation * 10 ** rng.uniform(-7, -0.3)


def loss_of(y, rate, sigma):
    return np.log1p(rate * np.expm1((y - 0.5 / sigma) / sigma))


def one_step_delta(epsilon, rate, sigma):
    """delta of one step at any real epsilon, of the record's removal."""
    with np.errstate(divide="ignore", invalid="ignore"):
        u = np.log1p(np.expm1(epsilon) / rate)
    y = np.where(np.isnan(u) | (u == -np.inf), -np.inf, sigma * u + 0.5 / sigma)
    p = (1 - rate) * ndtr(-y) + rate * ndtr(1 / sigma - y)
    return np.where(np.isinf(y), -np.expm1(epsilon), p - np.exp(epsilon) * ndtr(-y))


def two_steps_delta(epsilon, rate, sigma, points=40_001):
    """delta of two steps: the mean of the second one's over the loss of the first."""
    y, step = np.linspace(-12, 12 + 1 / sigma, points, retstep=True)
    p = ((1 - rate) * np.exp(-0.5 * y**2) + rate * np.exp(-0.5 * (y - 1 / sigma) ** 2)) * step
    value = one_step_delta(epsilon - loss_of(y, rate, sigma), rate, sigma)
    return float(p @ value) / math.sqrt(2 * math.pi)


@pytest.mark.parametrize("settings", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_smoothed_brackets_hold_the_delta_of_two_steps(settings):
    rng = np.random.default_rng(settings)
    tried = 0
    for _ in range(settings):
        rate, sigma, delta = random_setting(rng)
        event = Repeated(PoissonSampled(rate, Gaussian(sigma)), 2)
        price = DirectionPrice(directions(event, Relation.ADD_REMOVE)[0], tolerance=1e-7)
        low, high = 0.0, 60.0
        for _ in range(60):  # an epsilon at which brute force finds about this delta
            middle = 0.5 * (low + high)
            is_above = two_steps_delta(middle, rate, sigma, 801) > delta
            low, high = (middle, high) if is_above else (low, middle)
        if low < 1e-3 * rate:
            continue
        exact = two_steps_delta(low, rate, sigma)
        try:
            found = price._smoothed(low, exact).delta(low)
        except NotCertified:
            continue
        tried += 1
        blur = 1e-6 * exact + 1e-14 * rate  # of the brute force
        assert found.lower <= exact + blur, (rate, sigma, low)
        assert found.upper >= exact - blur, (rate, sigma, low)
        assert found.width <= 2e-3 * found.upper, (rate, sigma, low)
    assert tried >= 0.8 * settings


def test_moments_of_low_losses_are_bounded():
    rng = np.random.default_rng(6)
    y, step = np.linspace(-12, 12, 8_001, retstep=True)
    q = np.exp(-0.5 * y * y) * step / math.sqrt(2 * math.pi)
    for _ in range(300):
        rate, sigma = 10 ** rng.uniform(-8, -0.05), 10 ** rng.uniform(-1.2, 1.5)
        with np.errstate(over="ignore"):
            bound = log_moments_if_added(rate, sigma)
        loss = loss_of(y, rate, sigma)
        for index in rng.integers(0, len(ORDERS), 6):
            exact = float(np.logaddexp.reduce(np.log(q) - ORDERS[index] * loss))
            if abs(exact) < 0.1:  # without cancellation
                exact = math.log1p(float(q @ np.expm1(-ORDERS[index] * loss)))
            assert exact <= bound[index] * (1 + 1e-9) + 1e-13, (rate, sigma, index)


@pytest.mark.parametrize("steps", [3, 100, 10_000])
def test_marks_bound_what_they_leave_out(steps):
    rng = np.random.default_rng(steps)
    for _ in range(4):
        rate, sigma = 10 ** rng.uniform(-6, -2), 10 ** rng.uniform(-0.5, 0.7)
        event = Repeated(PoissonSampled(rate, Gaussian(sigma)), steps)
        direction = directions(event, Relation.ADD_REMOVE)[0]
        epsilon = rate * 10 ** rng.uniform(0, 3)
        try:
            found = mark_losses(direction, epsilon, 1e-6)
        except NotCertified:
            continue
        added = found.delta(epsilon)
        assert found.level > epsilon
        assert added.width <= 1.1e-6 + 1e-9 * abs(added.upper)
        # Marked runs alone cannot cost more than all runs.
        whole = DirectionPrice(direction, tolerance=1e-7).delta(epsilon)
        assert added.lower <= whole.upper * (1 + 1e-9)


@pytest.mark.parametrize(("rate", "sigma", "steps"), [(1e-4, 0.8, 1000), (0.01, 2.5, 50)])
def test_the_closed_form_for_an_added_record_is_an_upper_bound(rate, sigma, steps):
    event = Repeated(PoissonSampled(rate, Gaussian(sigma)), steps)
    removed, added = directions(event, Relation.ADD_REMOVE)
    for delta in (1e-4, 1e-9):
        exact = DirectionPrice(added, tolerance=1e-6).epsilon(delta)
        assert exact.lower <= chernoff_if_added(added, delta) <= 3 * exact.upper
        assert chernoff_if_added(removed, delta) == math.inf


@pytest.mark.slow
def test_smoothing_over_a_wide_range_leaves_a_bracket():
    """A group of two at a noise of a thousandth: the smoothed law is wider than exp can say."""
    noise = 0.0010023738899348528
    group = accounting.for_group(Repeated(PoissonSampled(0.5, Gaussian(noise)), 2), 2)
    found = accounting.PLD().bracket(group, delta=1e-4)
    whole = accounting.epsilon(Repeated(Gaussian(noise / 2), 2), delta=1e-4)
    assert 0 < found.lower <= found.upper <= whole * (1 + 1e-8)
