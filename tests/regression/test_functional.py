"""The functional mechanism: sensitivities that are reached, and noise on every coefficient."""

import itertools
import math

import numpy as np
import pytest

from tacit.events import Relation
from tacit.mechanisms import generator
from tacit.regression import Bounds, functional
from tacit.regression.rows import PrivateRows

RELATIONS = [Relation.ADD_REMOVE, Relation.REPLACE_ONE]


def corners(d):
    """Yield records at the corners and edges of the scaled box, with targets at both ends."""
    for x in itertools.product([-1.0, 0.0, 1.0], repeat=d):
        for y in (-1.0, 1.0):
            yield np.array([1.0, *x]), y


def quadratic(z):
    """Return what one record adds to the quadratic coefficients in the tight analysis."""
    size = len(z)
    rows, columns = np.triu_indices(size)
    return (np.outer(z, z)[rows, columns] - np.where(rows == columns, 0.5, 0.0))[1:]


@pytest.mark.parametrize("d", [1, 2, 3])
def test_tight_sensitivities_are_reached_and_never_passed(d):
    plan = functional.plan_functional(d, epsilon=1.0, relation=Relation.ADD_REMOVE)
    records = list(corners(d))
    adds = [quadratic(z) for z, _ in records]
    assert max(np.abs(q).sum() for q in adds) == plan.quadratic.l1_sensitivity
    moves = max(np.abs(p - q).sum() for p in adds for q in adds)
    most = plan.quadratic.replace_factor * plan.quadratic.l1_sensitivity
    assert 0.85 * most <= moves <= most
    linear = [-2 * y * z for z, y in records]
    assert max(np.abs(b).sum() for b in linear) == plan.linear.l1_sensitivity
    moves = max(np.abs(b - c).sum() for b in linear for c in linear)
    assert moves == plan.linear.replace_factor * plan.linear.l1_sensitivity


@pytest.mark.parametrize("d", [1, 2, 5, 12])
def test_no_replaced_record_moves_the_quadratic_coefficients_further_than_claimed(d):
    """Coordinate ascent from random pairs of records finds no change above the proved bound."""
    plan = functional.plan_functional(d, epsilon=1.0, relation=Relation.REPLACE_ONE)
    most = plan.quadratic.replace_factor * plan.quadratic.l1_sensitivity
    rng = np.random.default_rng(d)

    def moved(pair):
        x, w = (np.append(1.0, half) for half in pair)
        return float(np.abs(quadratic(x) - quadratic(w)).sum())

    worst = 0.0
    for _ in range(8):
        pair = rng.uniform(-1, 1, (2, d))
        for place in np.tile(np.arange(2 * d), 3):
            trials = np.repeat(pair.reshape(1, -1), 21, axis=0)
            trials[:, place] = np.linspace(-1, 1, 21)
            pair = max(trials.reshape(-1, 2, d), key=moved)
        worst = max(worst, moved(pair))
    assert 0.9 * most <= worst <= most


def test_published_sensitivities_are_the_classical_ones():
    plan = functional.plan_functional(
        13, epsilon=1.0, relation=Relation.REPLACE_ONE, analysis="published", split=0.5
    )
    assert plan.quadratic.noise_scale == pytest.approx(2 * 14**2 / 0.5)
    assert plan.linear.noise_scale == pytest.approx(4 * 14 / 0.5)


@pytest.mark.parametrize("relation", RELATIONS)
def test_the_functional_mechanism_costs_its_epsilon(relation):
    plan = functional.plan_functional(5, epsilon=0.7, relation=relation)
    parts = (plan.quadratic, plan.linear)
    moves = [p.replace_factor if relation is Relation.REPLACE_ONE else 1.0 for p in parts]
    spent = sum(m / part.noise_multiplier for m, part in zip(moves, parts, strict=True))
    assert spent == pytest.approx(0.7)
    assert spent <= 0.7


def test_the_default_split_has_the_least_noise():
    def noise(split):
        plan = functional.plan_functional(6, epsilon=1.0, relation=Relation.ADD_REMOVE, split=split)
        sizes = 6 + 6 * 7 // 2, 7
        scales = plan.quadratic.noise_scale, plan.linear.noise_scale
        return sum(size * scale**2 for size, scale in zip(sizes, scales, strict=True))

    least = noise(None)
    assert all(least <= noise(split) for split in np.linspace(0.05, 0.95, 91))


@pytest.mark.parametrize("analysis", ["tight", "published"])
@pytest.mark.parametrize("relation", RELATIONS)
def test_every_functional_coefficient_carries_noise_at_its_scale(analysis, relation):
    """Asymmetric bounds (0, 100); false alarms: 39 coordinates at 6 sigma, below 1e-7."""
    draws = 1000
    rng = generator(5)
    X = np.random.default_rng(0).uniform(0, 100, (50, 3))
    rows = PrivateRows(X, Bounds(0, 100).box(3))
    exact = rows.moments(X[:, 0] / 100)
    plan = functional.plan_functional(3, epsilon=1.0, relation=relation, analysis=analysis)
    upper = np.triu_indices(4)
    noise = np.empty((draws, len(upper[0])))
    linear = np.empty((draws, 4))
    for i in range(draws):
        released = functional.release_functional(exact, plan, n_records=50, rng=rng)
        noise[i] = (released.gram - exact.gram)[upper]
        linear[i] = -2 * (released.cross - exact.cross)
    if analysis == "tight":
        assert (noise[:, 0] == 0).all()  # the constant: the declared number of records
        noise = noise[:, 1:]
    check_laplace(noise, plan.quadratic.noise_scale)
    check_laplace(linear, plan.linear.noise_scale)


def check_laplace(noise, scale):
    # The mean of |Laplace(scale)| is scale with standard deviation scale / sqrt(draws).
    size = np.abs(noise).mean(axis=0)
    assert (np.abs(size / scale - 1) < 6 / math.sqrt(len(noise))).all()
    assert (np.abs(noise.mean(axis=0)) < 6 * math.sqrt(2 / len(noise)) * scale).all()
