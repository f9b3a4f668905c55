"""Discrete noise: exact laws, checked on every outcome and against exact rational arithmetic."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import stats

from tacit import events as ev
from tacit.mechanisms import DiscreteGaussianMechanism, DiscreteLaplaceMechanism
from tacit.mechanisms import discrete as exact

FALSE_ALARM = 1e-6  # per test, split evenly among its coordinates
DRAWS = 60_000


def expected_counts(log_weight, reach: int) -> np.ndarray:
    weights = np.exp([log_weight(x) for x in range(-reach, reach + 1)])
    return DRAWS * weights / weights.sum()


def fits(sample: np.ndarray, log_weight, *, false_alarm: float) -> bool:
    """Return True if a chi-square test accepts the law; rare outcomes are taken as one."""
    reach = int(np.abs(sample).max()) + 200
    expected = expected_counts(log_weight, reach)
    observed = np.bincount(sample + reach, minlength=2 * reach + 1)
    common = expected >= 10
    pooled = np.append(observed[common], observed[~common].sum())
    return stats.chisquare(
        pooled, np.append(expected[common], DRAWS - expected[common].sum())
    ).pvalue > (false_alarm)


@pytest.mark.parametrize("std", [0.4, 1.0, 2.5, 30.0])
def test_the_discrete_gaussian_has_its_law_on_every_coordinate(std):
    value = np.broadcast_to(np.array([0, 5, -(10**12)]), (DRAWS, 3))
    noise = DiscreteGaussianMechanism(std, l2_sensitivity=1.0).release(value, 3) - value
    for coordinate in noise.T:
        assert fits(coordinate, lambda x: -x * x / (2 * std**2), false_alarm=FALSE_ALARM / 3)


@pytest.mark.parametrize("epsilon", [0.1, 0.7, 1.0, 3.0])
def test_the_discrete_laplace_has_its_law_on_every_coordinate(epsilon):
    value = np.broadcast_to(np.array([0, 5, -(10**12)]), (DRAWS, 3))
    noise = DiscreteLaplaceMechanism(epsilon, l1_sensitivity=1.0).release(value, 4) - value
    for coordinate in noise.T:
        assert fits(coordinate, lambda x: -abs(x) * epsilon, false_alarm=FALSE_ALARM / 3)


def test_a_wrong_law_would_be_noticed():
    noise = DiscreteGaussianMechanism(2.5, l2_sensitivity=1.0).release(np.zeros(DRAWS, int), 5)
    assert not fits(noise, lambda x: -x * x / (2 * 2.55**2), false_alarm=FALSE_ALARM)


class FewBits:
    """A generator whose first uniform lies on the threshold, so that more bits must decide."""

    def __init__(self, first: int, rest: int):
        self.first, self.rest = first, rest

    def integers(self, low, high, size=None):
        return np.full(size, self.first) if size is not None else self.rest % high


@pytest.mark.parametrize("gamma", [Fraction(1, 3), Fraction(1), Fraction(7, 2), Fraction(40)])
def test_a_uniform_on_the_threshold_is_decided_by_further_bits(gamma):
    with mpmath.workdps(60):
        threshold = int(mpmath.floor(mpmath.exp(-mpmath.mpf(str(float(gamma)))) * 2**53))
        if gamma == Fraction(1, 3):
            threshold = int(mpmath.floor(mpmath.exp(-mpmath.mpf(1) / 3) * 2**53))
    for rest, is_below in ((0, True), (2**32 - 1, False)):
        decided = exact.bernoulli_exp(
            np.array([float(gamma)]), lambda _: gamma, FewBits(threshold, rest)
        )
        assert decided.tolist() == [is_below]


@pytest.mark.parametrize("gamma", [0.0, 1e-9, 0.5, 30.0, 700.0, 1e4, 1e12])
def test_bernoulli_exp_agrees_with_exact_arithmetic_near_the_margin(gamma):
    threshold = math.exp(-gamma) * 2**53
    for offset in (-(2**24), -(2**22), -1, 0, 1, 2**22, 2**24):
        u = min(max(int(threshold) + offset, 0), 2**53 - 1)
        fast = exact.bernoulli_exp(np.array([gamma]), lambda _: Fraction(gamma), FewBits(u, 12345))
        slow = exact._is_below_exp(u, 53, Fraction(gamma), FewBits(u, 12345))
        assert fast.tolist() == [slow]


def test_the_events_are_those_of_the_proofs():
    curve = DiscreteGaussianMechanism(2.0, l2_sensitivity=3.0).event
    assert curve.replace_factor == 2.0
    for order, value in zip(curve.orders, curve.values, strict=True):
        assert order / 8 <= value <= order / 8 * (1 + 1e-12)
    assert DiscreteLaplaceMechanism(0.5, l1_sensitivity=3.0).event == ev.PureDP(0.5)


def test_the_renyi_curve_bounds_the_true_divergence():
    std = 0.6
    with mpmath.workdps(40):
        grid = range(-60, 62)
        p = [mpmath.exp(-(mpmath.mpf(x) ** 2) / (2 * mpmath.mpf(std) ** 2)) for x in grid]
        q = [mpmath.exp(-(mpmath.mpf(x - 1) ** 2) / (2 * mpmath.mpf(std) ** 2)) for x in grid]
        norm = sum(p)
        event = DiscreteGaussianMechanism(std, l2_sensitivity=1.0).event
        for order, value in list(zip(event.orders, event.values, strict=True))[:60:7]:
            moment = sum(a**order * b ** (1 - order) for a, b in zip(p, q, strict=True)) / norm
            assert mpmath.log(moment) / (order - 1) <= value


def test_the_continuous_laplace_price_would_be_too_low_on_a_grid():
    epsilon, smaller = 1.0, 0.5
    at_most_zero = 1 / (1 + math.exp(-epsilon))  # mass of noise <= 0, where the loss is +epsilon
    delta_discrete = at_most_zero * (1 - math.exp(smaller - epsilon))
    delta_continuous = 1 - math.exp((smaller - epsilon) / 2)
    assert delta_discrete > delta_continuous


@pytest.mark.parametrize(("epsilon", "l1"), [(0.5, 1.0), (0.3, 1.0), (1e-9, 5.0), (0.7, 3.3)])
def test_the_laplace_scale_is_rounded_up_by_less_than_two_millionths(epsilon, l1):
    scale = Fraction(DiscreteLaplaceMechanism(epsilon, l1_sensitivity=l1).noise_scale)
    needed = Fraction(l1) / Fraction(epsilon)
    assert needed <= scale <= needed * (1 + Fraction(2, 10**6))


def test_shapes_types_and_huge_values():
    mechanism = DiscreteGaussianMechanism(1.0, l2_sensitivity=1.0)
    assert mechanism.release(np.zeros((2, 0), int)).shape == (2, 0)
    assert mechanism.release(7).shape == ()
    assert mechanism.release(np.array([2**64 - 1], np.uint64))[0] > 2**60
    assert mechanism.release(np.array([-(2**63)]))[0] < -(2**60)
    for value in ([0.5], [True], ["a"]):
        with pytest.raises(TypeError, match="whole numbers"):
            mechanism.release(value)


def test_noise_out_of_reach_is_refused():
    for std in (1e-9, 1e15):
        with pytest.raises(ValueError, match="noise_std must be between"):
            DiscreteGaussianMechanism(std, l2_sensitivity=1.0)
    with pytest.raises(ValueError, match="noise_scale must be between"):
        DiscreteLaplaceMechanism(1e-15, l1_sensitivity=1.0)
