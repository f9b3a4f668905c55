"""Events made of other events: prices hold for every way of choosing, found by enumeration."""

from itertools import product

import numpy as np
import pytest

import tacit
from tacit.events import ChosenOf, Gaussian, OneOf, RandomizedResponse, Repeated, Sequence


def response(event):
    """Return the laws of a binary randomized response on two different inputs."""
    lie = event.random_probability / 2
    return np.array([1 - lie, lie]), np.array([lie, 1 - lie])


@pytest.mark.parametrize("epsilon", [0.0, 0.2, 0.5, 1.0])
def test_no_choice_that_follows_an_earlier_release_costs_more(epsilon):
    """All 4 ways to choose by the first answer, in both directions, enumerated."""
    first = RandomizedResponse(0.7, 2)
    parts = RandomizedResponse(0.5, 2), RandomizedResponse(0.9, 2)
    event = Sequence((first, ChosenOf(parts)))
    price = tacit.delta(event, epsilon=epsilon, relation="replace_one")
    worst = 0.0
    for choice in product((0, 1), repeat=2):
        laws = [
            np.concatenate([response(first)[side][y] * response(parts[choice[y]])[side]
                            for y in (0, 1)])
            for side in (0, 1)
        ]  # fmt: skip
        for p, q in (laws, laws[::-1]):
            worst = max(worst, float(np.maximum(p - np.exp(epsilon) * q, 0).sum()))
    assert worst <= price * (1 + 1e-9)
    assert price <= worst + 0.02  # and not much more than the worst choice


def test_a_choice_among_equals_costs_what_one_costs():
    one = Gaussian(5.0)
    alone = tacit.epsilon(one, delta=1e-6)
    assert alone <= tacit.epsilon(ChosenOf((one, one)), delta=1e-6) <= alone * (1 + 1e-5)


def test_the_mean_of_two_profiles_is_inverted_directly_and_agrees_with_its_pair():
    """A choice made twice is priced from pairs of profiles, a choice alone from the mean."""
    parts = Repeated(Gaussian(9.0), 3), Gaussian(7.0)
    event = OneOf(parts, (0.7, 0.3))
    found = tacit.epsilon(event, delta=1e-6)
    prices = [tacit.epsilon(part, delta=1e-6) for part in parts]
    assert min(prices) < found < max(prices)
    bracket = tacit.bracket(event, delta=1e-6)
    assert bracket.lower <= found <= bracket.lower * (1 + 1e-4)


def test_the_best_of_rarely_sampled_runs_has_a_sharp_price_that_rises_with_the_rate():
    found = []
    for rate in (3.6e-6, 3.96e-6):
        run = tacit.events.Repeated(
            tacit.events.PoissonSampled(rate, tacit.events.Gaussian(0.42)), 601_298
        )
        best = tacit.events.BestOf(run, 2.1, tacit.events.Trials.POISSON)
        found.append(tacit.bracket(best, delta=2.8e-11, relation=tacit.events.Relation.REPLACE_ONE))
    assert all(one.width <= 0.01 * one.upper for one in found)
    assert found[0].upper < found[1].lower
