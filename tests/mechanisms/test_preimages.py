"""Preimage attacks: they name the data set from old float noise, and learn nothing from the grid.

Given a released y, the attacks list the outputs n of a noise generator with fl(value + n) = y, for
each of two neighboring values, and guess the value with the more likely list (Mironov 2012; Jin et
al. 2022, arXiv:2112.05307). Each attack is run against floats plus numpy's noise, which the
mechanisms released before, and against the mechanisms as they are.
"""

import math

import mpmath
import numpy as np
import pytest
from scipy import stats

from tacit.mechanisms import GaussianMechanism, LaplaceMechanism, secure_generator

TRIALS = 1_000
FALSE_ALARM = 1e-5  # per bound
SOURCES = {"numpy": lambda: np.random.default_rng(20121016), "secure": secure_generator}
SHIFTS = np.arange(-12, 13)


def at_most(hits: int, chance: float) -> bool:
    """Return whether so few hits in `TRIALS` are compatible with a probability of `chance`."""
    return bool(stats.binom.sf(hits - 1, TRIALS, chance) > FALSE_ALARM)


def at_least(hits: int, chance: float) -> bool:
    return bool(stats.binom.cdf(hits, TRIALS, chance) > FALSE_ALARM)


# --- counts 0 and 1, Laplace noise of scale 10 ---------------------------------------------------

SCALE = 10.0
BEST_FOR_COUNTS = 1 - math.exp(-0.05) / 2  # (1 + total variation) / 2 at distance 1 / 10


def laplace_preimages(released: float, value: float) -> int:
    """Count the uniforms U of numpy's Laplace generator that lead from `value` to `released`.

    U is a multiple of 2^-53. The noise is 10 log(U + U) below 1/2, else -10 log(2 - U - U).
    """
    noise = released - value
    half = math.exp(-abs(noise) / SCALE) / 2
    middle = int((half if noise < 0 else 1 - half) * 2.0**53)
    width = int(2 * np.spacing(max(abs(released), abs(noise))) / SCALE * half * 2.0**53) + 4
    u = np.arange(max(1, middle - width), min(2**53, middle + width)) * 2.0**-53
    size = np.log(u + u) if noise < 0 else -np.log(2.0 - u - u)
    return int(np.sum(value + SCALE * size == released))


def guess_by_uniforms(released: float) -> int:
    """Return the count with more preimages; ties go to the closer count."""
    preimages = [laplace_preimages(released, value) for value in (0.0, 1.0)]
    return int(preimages[1] > preimages[0] or (preimages[0] == preimages[1] and released > 0.5))


def guess_by_words(released: float, mechanism: LaplaceMechanism) -> int:
    """Return the count with more preimages among the 63-bit words that the mechanism draws."""
    steps = mechanism.noise_scale_on(1) / mechanism.grid
    counts = []
    for value in (0, 1):
        k = abs(int(released / mechanism.grid) - int(value / mechanism.grid))
        with mpmath.workdps(40):
            ends = [mpmath.exp(-max(mpmath.mpf(k + h), 0) / steps) for h in (-0.5, 0.5)]
            counts.append((2 if k == 0 else 1) * int((ends[0] - ends[1]) * 2**63))
    return int(counts[1] > counts[0])


def float_laplace(value: float, rng) -> float:
    return value + rng.laplace(0.0, SCALE)


def test_old_laplace_releases_name_the_count():
    rng = np.random.default_rng(1)
    truth = rng.integers(0, 2, TRIALS)
    released = [float_laplace(float(x), rng) for x in truth]
    hits = sum(guess_by_uniforms(y) == x for x, y in zip(truth, released, strict=True))
    impossible = sum(
        laplace_preimages(y, 1.0 - x) == 0 < laplace_preimages(y, float(x))
        for x, y in zip(truth, released, strict=True)
    )
    assert impossible > 0.7 * TRIALS
    assert hits > 0.9 * TRIALS


@pytest.mark.parametrize("source", SOURCES)
def test_grid_laplace_releases_tell_no_more_than_the_best_test(source):
    rng = SOURCES[source]()
    truth = np.random.default_rng(2).integers(0, 2, TRIALS)
    mechanism = LaplaceMechanism(SCALE, l1_sensitivity=1.0)
    released = [float(mechanism.release(float(x), rng)) for x in truth]
    by_uniforms = sum(guess_by_uniforms(y) == x for x, y in zip(truth, released, strict=True))
    by_words = sum(guess_by_words(y, mechanism) == x for x, y in zip(truth, released, strict=True))
    assert at_most(by_uniforms, BEST_FOR_COUNTS)
    assert at_most(by_words, BEST_FOR_COUNTS)
    assert at_least(by_words, BEST_FOR_COUNTS)  # the attack is the best test, no weaker


# --- 200 coordinates, Gaussian noise of standard deviation 10 -------------------------------------

DIMENSION = 200
NEIGHBORS = np.zeros(DIMENSION), np.full(DIMENSION, DIMENSION**-0.5)  # L2 distance 1
BEST_FOR_VECTORS = stats.norm.cdf(0.05)


def normal_log_preimages(released: np.ndarray, value: np.ndarray) -> float:
    """Return the log of the share of doubles z with fl(value + fl(10 z)) = released, all in all."""
    middle = (released - value) / 10
    z = middle[:, None] + SHIFTS * np.spacing(middle)[:, None]
    hit = value[:, None] + 10 * z == released[:, None]
    share = (hit * np.spacing(np.abs(z))).sum(axis=1)
    with np.errstate(divide="ignore"):
        return float((np.log(share) - np.log(np.spacing(np.abs(released))) - middle**2 / 2).sum())


def guess_by_doubles(released: np.ndarray) -> int:
    likelihood = [normal_log_preimages(released, value) for value in NEIGHBORS]
    return int(likelihood[1] > likelihood[0] or (likelihood[0] == likelihood[1] == -math.inf))


def guess_by_projection(released: np.ndarray) -> int:
    """Return the guess of the best test of two normal laws."""
    return int(released @ NEIGHBORS[1] > 0.5)


def test_old_normal_releases_name_the_vector():
    rng = np.random.default_rng(3)
    truth = rng.integers(0, 2, TRIALS)
    hits = sum(guess_by_doubles(NEIGHBORS[x] + rng.normal(0, 10, DIMENSION)) == x for x in truth)
    assert hits > 0.95 * TRIALS


@pytest.mark.parametrize("source", SOURCES)
def test_grid_normal_releases_tell_no_more_than_the_best_test(source):
    rng = SOURCES[source]()
    truth = np.random.default_rng(4).integers(0, 2, TRIALS)
    mechanism = GaussianMechanism(10.0, l2_sensitivity=1.0)
    released = [mechanism.release(NEIGHBORS[x], rng) for x in truth]
    by_doubles = sum(guess_by_doubles(y) == x for x, y in zip(truth, released, strict=True))
    by_projection = sum(guess_by_projection(y) == x for x, y in zip(truth, released, strict=True))
    assert at_most(by_doubles, BEST_FOR_VECTORS)
    assert at_most(by_projection, BEST_FOR_VECTORS)
    assert at_least(by_projection, BEST_FOR_VECTORS)


@pytest.mark.parametrize("source", SOURCES)
def test_no_low_bit_of_the_integer_noise_depends_on_the_value(source):
    """The last 12 bits of released / grid are uniform for values on and off the grid."""
    rng = SOURCES[source]()
    mechanism = GaussianMechanism(10.0, l2_sensitivity=1.0)
    for value in (0.0, 1 / 3, 1e6 / 7, 2.0**-30):
        steps = mechanism.release(np.full(2**18, value), rng) / mechanism.grid
        counts = np.bincount((steps % 4096).astype(int), minlength=4096)
        assert stats.chisquare(counts).pvalue > FALSE_ALARM
