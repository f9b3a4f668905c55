"""Profiles at nodes: what is drawn above and below them holds between them too."""

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from tacit.accounting.profile import Profile, lower_hull
from tacit.accounting.trials import halting_probability


def gaussian(mu, t):
    return ndtr(mu / 2 - t / mu) - np.exp(t) * ndtr(-mu / 2 - t / mu)


def profile(mu, far=6.0, size=60, blur=0.0):
    t = np.linspace(0.0, far, size)
    delta = gaussian(mu, t)
    table = (delta * (1 - blur), np.minimum(delta * (1 + blur), 1.0))
    return Profile.two_sided(t, table, table)


CASES = [(1.0, 6.0, 60, 0.0), (1.0, 6.0, 400, 1e-4), (0.3, 2.0, 50, 0.0), (3.0, 20.0, 300, 1e-6)]


@pytest.mark.parametrize(("mu", "far", "size", "blur"), CASES)
def test_chords_are_above_and_minorants_below_the_curve(mu, far, size, blur):
    found = profile(mu, far, size, blur)
    t = np.linspace(-far - 1, far + 1, 1000)
    true = gaussian(mu, t)
    above = found.hull().above(t)
    assert np.all(above >= true * (1 - 1e-13))
    assert np.max(above - true) < 0.01
    law = found.dominating()
    loss, p = np.array(law.losses), np.array(law.p)
    by_law = law.infinite + (p * np.maximum(-np.expm1(t[:, None] - loss), 0.0)).sum(axis=1)
    assert by_law[t >= -far] == pytest.approx(above[t >= -far], rel=1e-9, abs=1e-12)
    assert sum(law.p) + law.infinite == pytest.approx(1.0)
    assert sum(law.q) + law.vanishing == pytest.approx(1.0)
    pair = found.dominated()
    assert pair.p.sum() == pytest.approx(1.0)
    assert pair.q.sum() == pytest.approx(1.0)
    below = np.maximum(pair.p - np.exp(t)[:, None] * pair.q, 0.0).sum(axis=1)
    assert np.all(below <= true + 1e-12)
    assert np.max(true - below) < 0.02


@pytest.mark.parametrize(("mu", "far", "size", "blur"), CASES)
def test_no_test_has_more_power(mu, far, size, blur):
    size_, power = profile(mu, far, size, blur).power()
    a = np.geomspace(1e-12, 0.999, 500)
    true = ndtr(mu + ndtri(a))
    found = np.interp(a, size_, power)
    assert np.all(found >= true * (1 - 1e-12))
    assert np.max(found - true) < 0.02


def test_the_lower_hull_of_points_is_convex_and_below_them():
    rng = np.random.default_rng(0)
    x, y = np.sort(rng.random(300)), rng.random(300)
    keep = lower_hull(x, y)
    assert np.all(np.diff(np.diff(y[keep]) / np.diff(x[keep])) > 0)
    assert np.all(np.interp(x, x[keep], y[keep]) <= y + 1e-15)


@pytest.mark.parametrize("shape", [-0.9, -0.5, 0.0, 1e-12, 0.3, 1.0, 7.0])
@pytest.mark.parametrize("mean", [1.001, 3.0, 1e6])
def test_the_halting_probability_gives_the_mean(mean, shape):
    g = halting_probability(mean, shape)
    y = -np.log(g)
    found = np.expm1(y) / y if abs(shape) < 1e-9 else shape * np.expm1(y) / -np.expm1(-shape * y)
    assert found == pytest.approx(mean, rel=1e-8)
