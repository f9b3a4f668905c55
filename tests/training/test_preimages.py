"""Attacks that count the noise values leading to a released number, on the old noise and the new.

Two neighboring data sets give sums x and x + d. The attacker sees one release of 1,000 weights at
noise multiplier 10 and knows both sums and the generator. For each weight it counts the outputs of
the generator that lead to the released number from either sum, and adds the logarithms of the
ratios. The best possible accuracy is Phi(1 / 20) = 0.520 (one example moves the sum by 1).
"""

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm

from tacit.training.grid_noise import make_grids, ziggurat
from tacit.training.key import Key
from tacit.training.noise import NoisyMean

WEIGHTS, SIGMA, BATCH = 1000, 10.0, 16.0
BEST = norm.cdf(1 / (2 * SIGMA))


def neighbors(rng):
    """Two float32 sums at distance 1, spread over all weights."""
    first = rng.normal(0, 1, WEIGHTS).astype(np.float32)
    step = rng.normal(0, 1, WEIGHTS)
    second = (first + 0.999 * step / np.linalg.norm(step)).astype(np.float32)
    return first, second


def accuracy(release, evidence, trials):
    """Share of trials in which the evidence names the right one of two neighboring sums."""
    rng, right = np.random.default_rng(3), 0
    for trial in range(trials):
        sums = neighbors(rng)
        truth = int(rng.integers(2))
        released = release(sums[truth], trial)
        guess = evidence(released, sums[1]) > evidence(released, sums[0])
        right += int(guess) == truth
    return right / trials


# The release before the grid: numpy's float32 ziggurat, scaled and added in float32.

STD, FACTOR = np.float32(SIGMA / BATCH), np.float32(1 / BATCH)


def old_release(total, trial):
    noise = np.random.default_rng(trial).standard_normal(WEIGHTS, np.float32)
    return noise * STD + total * FACTOR


def old_layers():
    """Widths of numpy's 256 layers, over 2^23, and the largest integer accepted at once."""
    x, area, unit = 3.6541528853610088, 0.00492867323399, 2.0**23
    widths, limits = np.empty(256), np.zeros(256)
    widths[0], widths[255] = area / math.exp(-x * x / 2) / unit, x / unit
    limits[0] = x / widths[0]
    for i in range(254, 0, -1):
        below = math.sqrt(-2 * math.log(area / x + math.exp(-x * x / 2)))
        limits[i + 1], x = below / x * unit, below
        widths[i] = x / unit
    return widths.astype(np.float32), limits


def old_evidence(released, total):
    """Log of the number of 32-bit words of numpy's generator that lead to the release."""
    widths, limits = old_layers()
    shift = total * FACTOR
    ideal = (released.astype(np.float64) - shift) / STD  # the noise, up to rounding
    found = np.zeros(WEIGHTS)
    for near in (-2, -1, 0, 1, 2):
        whole = np.rint(np.abs(ideal)[:, None] / widths) + near
        noise = whole.astype(np.float32) * widths * np.sign(ideal).astype(np.float32)[:, None]
        leads = noise * STD + shift[:, None] == released[:, None]
        found += (leads & (whole >= 0) & (whole < limits)).sum(1)
    return np.log(np.maximum(found, 1e-3)).sum()  # a number with no word: wedge or tail


# The release on the grid.


def new_release(total, trial):
    mean = NoisyMean(Key.from_seed(trial), expected_batch=BATCH)
    (released,) = mean.release([torch.from_numpy(total)], [1.0], step=0, noise_multiplier=SIGMA)
    return released.numpy().copy()


def new_evidence(released, total):
    """Log of the number of 64-bit words of every eighth layer that lead to the release."""
    (grid,) = make_grids(SIGMA, [1.0], WEIGHTS)
    unit = grid.step / BATCH
    wide = released.astype(np.float64)
    gap = np.spacing(released).astype(np.float64) / 2
    whole = np.rint(total.astype(np.float64) / grid.step)
    low = np.ceil((wide - gap) / unit) - whole - 0.5  # noise in steps that rounds to the release
    high = np.floor((wide + gap) / unit) - whole + 0.5
    scaled, inside = (field[1::8] * grid.noise_steps for field in ziggurat()[:2])
    low, high = (np.clip(end[:, None], -inside, inside) for end in (low, high))
    words = np.floor(high / scaled / 1024) - np.floor(low / scaled / 1024)
    return np.log(np.maximum(words.sum(1), 1e-3)).sum()


def test_the_old_release_names_the_data_set():
    assert accuracy(old_release, old_evidence, 10) == 1.0


@pytest.mark.parametrize("trials", [12, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_release_on_a_grid_is_as_uncertain_as_it_can_be(trials):
    """False-alarm probability 1e-5 for a release without leak."""
    found = accuracy(new_release, new_evidence, trials)
    assert abs(found - BEST) < 4.5 * math.sqrt(BEST * (1 - BEST) / trials)


@pytest.mark.slow
def test_the_attack_on_the_grid_sees_what_there_is_to_see():
    """With less noise the same counts reach the best accuracy, Phi(1 / 2) for multiplier 1."""
    global SIGMA  # the attack's one parameter
    kept, SIGMA = SIGMA, 1.0
    try:
        found = accuracy(new_release, new_evidence, 150)
    finally:
        SIGMA = kept
    assert abs(found - norm.cdf(0.5)) < 4.5 * math.sqrt(0.25 / 150)
