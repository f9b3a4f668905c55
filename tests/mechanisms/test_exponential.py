"""Selections: the stated law on every option, and the privacy loss that the event claims."""

import math
from itertools import product

import numpy as np
import pytest
from scipy import stats

from tacit import events as ev
from tacit.mechanisms import (
    ExponentialMechanism,
    GaussianNoisyMax,
    LaplaceNoisyMax,
    PermuteAndFlip,
)

FALSE_ALARM = 1e-6
PURE = [ExponentialMechanism, PermuteAndFlip, LaplaceNoisyMax]
NOISE = {
    ExponentialMechanism: stats.gumbel_r,
    PermuteAndFlip: stats.expon,
    LaplaceNoisyMax: stats.laplace,
    GaussianNoisyMax: stats.norm,
}


def probabilities(kind, scale: float, scores) -> np.ndarray:
    """Return the probability of each option, integrated over the largest noisy score."""
    law = NOISE[kind](scale=scale)
    kinks = np.sort(np.asarray(scores, dtype=float))
    below, above = kinks[0] - np.arange(45, 0, -1) * scale, kinks[-1] + np.arange(1, 46) * scale
    edges = np.concatenate([below, kinks, above])
    nodes, weights = np.polynomial.legendre.leggauss(20)
    half = np.diff(edges)[:, None] / 2
    x = (edges[:-1, None] + half * (1 + nodes)).ravel()
    w = (half * weights).ravel()
    noisy_below = np.array([law.cdf(x - score) for score in scores])  # (options, nodes)
    chances = []
    for i, own in enumerate(scores):
        others = np.delete(noisy_below, i, axis=0).prod(axis=0)
        chances.append(float(np.sum(w * law.pdf(x - own) * others)))
    return np.array(chances)


def make(kind, epsilon=1.0, **settings):
    if kind is GaussianNoisyMax:
        return GaussianNoisyMax(2.0, l2_sensitivity=1.0)
    return kind(epsilon, sensitivity=1.0, **settings)


@pytest.mark.parametrize("kind", NOISE)
def test_every_option_comes_up_as_often_as_it_should(kind):
    scores = [3.0, 2.0, 2.0, -1.0]
    mechanism = make(kind)
    scale = 2.0
    rng = np.random.default_rng(17)
    counts = np.bincount([mechanism.release(scores, rng) for _ in range(20_000)], minlength=4)
    expected = probabilities(kind, scale, scores)
    assert expected.sum() == pytest.approx(1, abs=1e-9)
    assert stats.chisquare(counts, 20_000 * expected / expected.sum()).pvalue > FALSE_ALARM


def test_the_exponential_mechanism_has_exponential_weights():
    scores = np.array([3.0, 2.0, 0.0])
    weights = np.exp(scores / 2)
    chances = probabilities(ExponentialMechanism, 2.0, scores)
    assert chances == pytest.approx(weights / weights.sum(), abs=1e-7)


@pytest.mark.parametrize("kind", PURE)
@pytest.mark.parametrize("monotonic", [False, True])
def test_no_neighbor_loses_more_than_epsilon(kind, monotonic):
    epsilon = 0.8
    mechanism = make(kind, epsilon, monotonic=monotonic)
    scores = np.array([1.0, 0.5, -0.3])
    moves = (0.0, 1.0) if monotonic else (-1.0, 0.0, 1.0)
    here = probabilities(kind, mechanism.noise_scale, scores)
    worst = 0.0
    for move in product(moves, repeat=3):
        there = probabilities(kind, mechanism.noise_scale, scores + np.array(move))
        loss = np.log(here / there)
        worst = max(worst, np.abs(loss).max())
        if kind is ExponentialMechanism:
            assert np.ptp(loss) <= epsilon + 1e-6  # bounded range
    assert worst <= epsilon + 1e-6
    assert worst > epsilon / 2  # so noise that is far too large would be noticed


def test_the_events_are_those_of_the_proofs():
    assert ExponentialMechanism(0.5, sensitivity=2.0).event == ev.Exponential(0.5)
    assert PermuteAndFlip(0.5, sensitivity=2.0, replace_factor=1.0).event == ev.PureDP(0.5, 1.0)
    assert LaplaceNoisyMax(0.5, sensitivity=2.0).event == ev.PureDP(0.5)
    votes = GaussianNoisyMax(3.0, l2_sensitivity=2.0, replace_factor=1.5)
    assert votes.event == ev.Gaussian(3.0, 1.5)


@pytest.mark.parametrize("kind", NOISE)
def test_choices_ignore_a_common_shift_and_survive_huge_scores(kind):
    mechanism = make(kind)
    assert mechanism.release([5.0]) == 0
    assert mechanism.release([-1e308, 1e308, 0.0], 0) == 1
    chosen = {mechanism.release(np.full(3, 2.0**60), seed) for seed in range(60)}
    assert chosen == {0, 1, 2}


@pytest.mark.parametrize("kind", NOISE)
@pytest.mark.parametrize("scores", [[], [[1.0]], [math.nan, 1.0]], ids=str)
def test_scores_that_are_no_finite_vector_are_refused(kind, scores):
    with pytest.raises(ValueError, match="must"):
        make(kind).release(scores)


@pytest.mark.parametrize("kind", PURE)
@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_impossible_settings_are_refused(kind, bad):
    with pytest.raises(ValueError, match="epsilon must be"):
        kind(bad, sensitivity=1.0)
    with pytest.raises(ValueError, match="sensitivity must be"):
        kind(1.0, sensitivity=bad)
    with pytest.raises(TypeError, match="monotonic must be"):
        kind(1.0, sensitivity=1.0, monotonic=1)
