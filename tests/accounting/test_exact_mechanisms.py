"""Both ends of brackets against the exact deltas of enumerated mechanisms.

Each event comes with the output laws of the mechanism that is easiest to distinguish among those it
describes. So its bracket must hold the exact epsilon of that mechanism.
"""

import math

import numpy as np
import pytest

from tacit import accounting as acc
from tacit import events as ev
from tacit.accounting.pld.pairs import directions


def pure(rng):
    epsilon = float(np.exp(rng.uniform(math.log(0.02), math.log(3))))
    rare = 1 / (1 + math.exp(epsilon))
    return ev.PureDP(epsilon), np.array([1 - rare, rare]), np.array([rare, 1 - rare])


def response(rng):
    options, random = int(rng.integers(2, 4)), float(rng.uniform(0.1, 1))
    p, q = np.full(options, random / options), np.full(options, random / options)
    p[0] += 1 - random
    q[1] += 1 - random
    return ev.RandomizedResponse(random, options), p, q


def approximate(rng):
    event, p, q = pure(rng)
    delta = float(10 ** rng.uniform(-6, -1))
    p, q = np.append((1 - delta) * p, [delta, 0.0]), np.append((1 - delta) * q, [0.0, delta])
    return ev.ApproximateDP(event.epsilon, delta), p, q


def build(rng, depth):
    """Return an event, and the two output laws of its worst mechanism."""
    if depth == 0:
        return (pure, response, approximate)[int(rng.integers(3))](rng)
    event, p, q = build(rng, depth - 1)
    kind = int(rng.integers(4))
    if kind == 0:
        rate = float(rng.choice([rng.uniform(0.001, 1), 0.5, 1.0, 1e-4]))
        return ev.PoissonSampled(rate, event), (1 - rate) * q + rate * p, q
    if kind == 1:
        return ev.Repeated(event, 2), np.outer(p, p).ravel(), np.outer(q, q).ravel()
    other, r, s = build(rng, depth - 1)
    if kind == 2:
        return ev.Sequence((event, other)), np.outer(p, r).ravel(), np.outer(q, s).ravel()
    w = float(rng.choice([rng.uniform(), 0.0, 1e-6]))
    mixed = np.append(w * p, (1 - w) * r), np.append(w * q, (1 - w) * s)
    return ev.OneOf((event, other), (w, 1 - w)), *mixed


def exact_delta(p, q, epsilon):
    ratio = math.exp(epsilon)
    return float(max(np.maximum(p - ratio * q, 0).sum(), np.maximum(q - ratio * p, 0).sum()))


def brackets_hold(seed):
    rng = np.random.default_rng(seed)
    event, p, q = build(rng, int(rng.integers(1, 3)))
    for delta in (1e-3, float(10 ** rng.uniform(-8, -0.5))):
        found = acc.bracket(event, delta=delta)
        if found.upper < 300:
            assert exact_delta(p, q, found.upper) <= delta * (1 + 1e-7) + 1e-13
        if 0 < found.lower < 300:
            below = found.lower * (1 - 1e-9) - 1e-12
            assert exact_delta(p, q, max(below, 0.0)) >= delta * (1 - 1e-6) - 1e-13


@pytest.mark.parametrize("seed", range(25))
def test_brackets_hold_the_epsilon_of_an_enumerated_mechanism(seed):
    brackets_hold(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25, 500))
def test_brackets_hold_the_epsilon_of_many_enumerated_mechanisms(seed):
    brackets_hold(seed)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "run",
    [
        ev.ZeroConcentratedDP(0.01, 1e-9),
        ev.RenyiCurve((2.0, 4.0, 16.0), (0.1, 0.3, 1.2)),
    ],
    ids=str,
)
def test_a_bound_without_a_known_mechanism_has_no_lower_end(run, count):
    event = ev.Repeated(ev.BestOf(run, 10, ev.Trials.POISSON), count)
    assert acc.bracket(event, delta=1e-5).lower == 0


def test_laws_on_few_losses_are_composed_by_listing_their_sums():
    parts = ev.RandomizedResponse(0.3, 3), ev.PureDP(0.4), ev.ApproximateDP(0.2, 1e-3)
    event = ev.Sequence((ev.Repeated(parts[0], 2), *parts[1:]))
    (direction,) = directions(event, ev.Relation.ADD_REMOVE)
    assert direction.steps == 1
    found = acc.bracket(event, delta=0.01)
    assert found.width <= 1e-9 * found.upper
    many = directions(ev.Repeated(parts[0], 100), ev.Relation.ADD_REMOVE)[0]
    assert many.steps == 100
