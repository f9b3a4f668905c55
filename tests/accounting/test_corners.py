"""Settings at the edge of what is asked: extreme rates, counts, deltas and epsilons."""

import math

import numpy as np
import pytest

from tacit import accounting as acc
from tacit.accounting.brackets import Bracket
from tacit.accounting.one_event import ADD_REMOVE
from tacit.accounting.pld import PLD
from tacit.accounting.pld.direction import DirectionPrice
from tacit.accounting.pld.pairs import directions
from tacit.accounting.pld.sampled_gaussian_contour import _smooth_model
from tacit.events import (
    ApproximateDP,
    BestOf,
    Exponential,
    Gaussian,
    Laplace,
    PoissonSampled,
    PureDP,
    Relation,
    Repeated,
    Sequence,
    Trials,
)


def step(rate, noise, steps):
    return Repeated(PoissonSampled(rate, Gaussian(noise)), steps)


RARE = [
    (1.11222e-07, 0.646562, 6136, 3.6e-10),
    (5.86764e-07, 1.04103, 39_686, 2.0e-08),
    (4.15503e-07, 1.08038, 608_534, 9.2e-12),
    (2.31659e-07, 0.764384, 5, 1.6e-13),
    (1.45254e-07, 3.33011, 12_217_507, 1.1e-14),
    (1e-4, 0.4, 1000, 1e-9),
    (3e-5, 0.5, 100, 1e-11),
]


@pytest.mark.parametrize(("rate", "noise", "steps", "delta"), RARE)
def test_rare_sampling_has_a_sharp_bracket(rate, noise, steps, delta):
    found = acc.bracket(step(rate, noise, steps), delta=delta)
    assert 0 < found.lower <= found.upper
    assert found.width <= 2e-4 * found.upper


@pytest.mark.parametrize(("rate", "noise", "steps", "delta"), [(1e-3, 0.6, 1000, 1e-5), *RARE[-2:]])
def test_marked_losses_agree_with_other_methods(rate, noise, steps, delta):
    first = directions(step(rate, noise, steps), Relation.ADD_REMOVE)[0]
    marked = DirectionPrice(first, tolerance=1e-6)
    epsilon = marked.epsilon(delta).upper
    by_marks = marked._smoothed(epsilon, delta).delta(epsilon)
    assert by_marks.meets(marked._lattice_delta(epsilon, 0.0, Bracket(0.0, 1.0)))
    assert by_marks.width <= 1e-2 * by_marks.upper


def test_many_pure_releases_have_the_price_of_a_binomial_sum():
    found = acc.bracket(Repeated(PureDP(2.526), 299), delta=1e-5)
    assert 724.88 < found.lower <= found.upper < 724.89
    few = acc.bracket(Repeated(PureDP(0.3), 40), delta=1e-6)
    assert few.width <= 1e-8 * few.upper


def test_delta_of_nearly_certain_sampling_is_sharp():
    event = Repeated(PoissonSampled(1 - 1e-6, PureDP(1.0)), 10)
    found = PLD().delta_bracket(event, epsilon=9.99)
    assert found.width <= 1e-6 * found.upper


@pytest.mark.parametrize(
    "event",
    [
        PoissonSampled(1e-9, Gaussian(20.0)),
        PoissonSampled(1e-3, Gaussian(2.0)),
        PureDP(1e-9),
        PoissonSampled(1e-10, Laplace(1.0)),
        Gaussian(1e10),
    ],
    ids=str,
)
def test_a_quintillion_steps_have_a_price(event):
    found = acc.bracket(Repeated(event, 10**18), delta=1e-5)
    assert 0 <= found.lower <= found.upper


def test_the_ends_of_delta_and_epsilon_are_accepted():
    assert acc.epsilon(Repeated(PureDP(0.1), 3), delta=0) == pytest.approx(0.3)
    assert acc.bracket(Laplace(2.0), delta=0) == Bracket(0.5, 0.5)
    assert acc.epsilon(Gaussian(1.0), delta=0) == math.inf
    assert acc.epsilon(Gaussian(1.0), delta=1) == 0.0
    assert acc.delta(Gaussian(1.0), epsilon=math.inf) == 0.0
    both = Sequence((Gaussian(1.0), ApproximateDP(1.0, 1e-6)))
    assert acc.delta(both, epsilon=math.inf) == 1e-6
    for wrong in (-1.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="delta must be in"):
            acc.epsilon(Gaussian(1.0), delta=wrong)


def test_an_exponential_mechanism_keeps_the_lower_end_of_a_sequence():
    run = step(0.01, 4.0, 10_000)
    alone = acc.bracket(run, delta=1e-5)
    both = acc.bracket(Sequence((run, Exponential(0.1))), delta=1e-5)
    assert alone.lower < both.lower <= both.upper


def test_an_exponential_mechanism_has_a_lower_end_at_delta_0():
    found = acc.bracket(Repeated(Exponential(0.5), 3), delta=0)
    assert 0.749 < found.lower <= 0.75
    assert found.upper == pytest.approx(1.5)


def test_total_variation_settles_an_epsilon_of_0():
    run = step(1e-3, 2.0, 100)
    noise = math.sqrt(0.5 * 100 * math.log1p(1e-6 * math.expm1(0.25)))  # Pinsker's inequality
    assert acc.bracket(run, delta=1.001 * noise) == Bracket(0.0, 0.0)
    delta = PLD().delta_bracket(run, epsilon=0.0)
    assert 0.5 * noise < delta.lower <= delta.upper <= noise


@pytest.mark.parametrize(
    ("rate", "noise", "steps"), [(0.2, 0.5, 3), (0.01, 1.0, 2), (0.3, 2.0, 16)]
)
def test_few_steps_are_priced_to_six_digits(rate, noise, steps):
    found = acc.bracket(step(rate, noise, steps), delta=1e-5)
    assert 0 < found.width <= 1e-5 * found.upper


def test_epsilon_after_every_step_reuses_the_model_of_a_step():
    _smooth_model.cache_clear()
    found = [acc.epsilon(step(0.01, 1.1, steps), delta=1e-5) for steps in range(500, 520)]
    assert found == sorted(found)
    assert _smooth_model.cache_info().misses <= 4 < _smooth_model.cache_info().hits


def test_the_best_of_pure_releases_costs_at_most_its_pure_price():
    best = BestOf(Laplace(1.0), 1000.0, Trials.LOGARITHMIC)
    assert acc.bracket(best, delta=1e-10).upper <= 2 + 1e-9
    shaped = BestOf(PureDP(0.1), 10.0, Trials.NEGATIVE_BINOMIAL, -0.5)
    assert acc.bracket(shaped, delta=0).upper <= 0.15 + 1e-9
    assert acc.pure_epsilon(BestOf(PureDP(0.1), 10.0, Trials.POISSON), ADD_REMOVE) == math.inf


def test_permute_and_flip_costs_almost_what_its_pure_event_costs():
    # Two options whose scores differ by one sensitivity, in either direction: the worse one is
    # released with probability exp(-epsilon / 2) / 2 (McKenna & Sheldon 2020, Algorithm 1).
    worse = 0.5 * math.exp(-0.1)
    below = acc.bracket(Repeated(PureDP(math.log((1 - worse) / worse)), 50), delta=1e-6)
    above = acc.bracket(Repeated(PureDP(0.2), 50), delta=1e-6)
    assert 0.9 * above.upper < below.lower <= above.upper


@pytest.mark.slow
def test_five_thousand_different_parts_are_priced():
    rng = np.random.default_rng(0)
    rates, noises = 10 ** rng.uniform(-6, -1, 5000), rng.uniform(0.4, 10, 5000)
    parts = [
        PoissonSampled(float(q), Gaussian(float(s))) for q, s in zip(rates, noises, strict=True)
    ]
    found = acc.bracket(Sequence(tuple(parts)), delta=1e-8)
    assert 0 < found.lower <= found.upper <= found.lower * (1 + 1e-6)


@pytest.mark.slow
def test_many_unsampled_steps_beside_sampled_ones_have_a_price():
    """All losses of the unsampled steps are far above 0."""
    sampled = Repeated(PoissonSampled(0.0093907, Gaussian(27.37)), 663)
    plain = Repeated(Gaussian(1.2), 946_701_395_047)
    found = acc.bracket(Sequence((sampled, plain)), delta=7e-16)
    alone = acc.bracket(plain, delta=7e-16)
    assert alone.lower <= found.upper < 1.001 * alone.upper
    assert found.lower >= 0.9 * alone.lower


@pytest.mark.parametrize(
    ("rate", "noise", "steps", "delta"),
    [(6e-4, 1.47, 766, 4e-12), (1e-4, 0.8, 300, 1e-11), (3e-3, 2.0, 500, 1e-12)],
)
def test_the_delta_at_a_price_is_the_delta_of_the_price(rate, noise, steps, delta):
    for relation in (Relation.ADD_REMOVE, Relation.REPLACE_ONE):
        price = acc.epsilon(step(rate, noise, steps), delta=delta, relation=relation)
        back = acc.delta(step(rate, noise, steps), epsilon=price, relation=relation)
        assert back <= 1.02 * delta
