"""The tight accountant as its users see it: known values, relations, corners, curves."""

import itertools
import math
import time

import numpy as np
import pytest
from scipy.special import ndtr

from tacit.accounting import bracket
from tacit.accounting.brackets import Bracket, invert
from tacit.accounting.pld import PLD
from tacit.accounting.pld.loss_laws import Normal, OneRelease, Sampled
from tacit.accounting.rdp import RDP
from tacit.errors import UnsupportedEvent
from tacit.events import (
    ApproximateDP,
    BestOf,
    Event,
    Exponential,
    Gaussian,
    Laplace,
    NonPrivate,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    Relation,
    Repeated,
    Sequence,
)

STEP = PoissonSampled(0.01, Gaussian(4.0))
RUN = Repeated(STEP, 10_000)
EVENTS: list[Event] = [
    RUN,
    Repeated(PoissonSampled(0.3, Gaussian(1.0)), 5),
    Repeated(PoissonSampled(0.05, Laplace(1.0)), 40),
    Repeated(PoissonSampled(0.05, PureDP(1.0)), 40),
    Repeated(Laplace(2.0), 10),
    Repeated(PureDP(0.3), 25),
    Repeated(RandomizedResponse(0.5, 3), 4),
    Repeated(ApproximateDP(0.2, 1e-7), 10),
    Gaussian(1.0),
    PoissonSampled(0.1, Gaussian(1.0)),
    Sequence((Repeated(PoissonSampled(0.02, Gaussian(1.0)), 500), Laplace(3.0), Gaussian(5.0))),
    Sequence((RandomizedResponse(0.2), Repeated(Exponential(0.2), 8), Laplace(1.0))),
]


def gaussian_delta(mu, epsilon):
    """Balle & Wang 2018, Theorem 8."""
    return ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)


def test_the_run_of_the_first_paper_costs_what_is_known():
    bracket = PLD().bracket(RUN, delta=1e-5)
    assert bracket.lower <= 0.946866801 <= bracket.upper
    assert bracket.width < 1e-7


@pytest.mark.parametrize("count", [1, 7, 10**9])
def test_gaussians_are_one_gaussian(count):
    event = Repeated(Gaussian(20.0), count)
    mu = math.sqrt(count) / 20
    epsilon = PLD().epsilon(event, delta=1e-6)
    if epsilon < 100:
        assert gaussian_delta(mu, epsilon) == pytest.approx(1e-6, rel=1e-9)
    assert PLD().bracket(event, delta=1e-6).width <= 1e-9 * epsilon


def test_one_laplace_release_has_its_textbook_profile():
    for epsilon in (0.0, 0.3, 0.9):
        bracket = PLD().delta_bracket(Laplace(1.0), epsilon=epsilon)
        assert bracket.lower <= -math.expm1((epsilon - 1) / 2) <= bracket.upper
        assert bracket.width < 1e-13
    assert PLD().delta(Laplace(1.0), epsilon=1.0) == 0.0


def test_published_compositions_of_pure_dp():
    # Exact composition of 100 and 1000 answers at 0.1, the setting of Papernot et al. 2017.
    assert PLD().epsilon(Repeated(PureDP(0.1), 100), delta=1e-5) == pytest.approx(4.3068, abs=1e-4)
    assert PLD().epsilon(Repeated(PureDP(0.1), 1000), delta=1e-6) == pytest.approx(
        19.3447, abs=1e-4
    )


def test_approximate_dp_keeps_its_own_pair_of_numbers():
    assert PLD().bracket(ApproximateDP(1.5, 1e-5), delta=1e-5) == (1.5, 1.5)
    assert PLD().epsilon(ApproximateDP(1.5, 1e-5), delta=0.9e-5) == math.inf
    assert PLD().epsilon(ApproximateDP(1.5, 1e-5), delta=1.1e-5) < 1.5


def test_nothing_costs_nothing_and_everything_costs_all():
    assert PLD().bracket(Sequence(()), delta=1e-9) == (0.0, 0.0)
    assert PLD().bracket(RandomizedResponse(1.0), delta=1e-9) == (0.0, 0.0)
    assert PLD().bracket(NonPrivate(), delta=1e-9) == (math.inf, math.inf)
    assert PLD().delta(NonPrivate(), epsilon=10.0) == 1.0
    assert PLD().epsilon(Sequence((RUN, NonPrivate())), delta=1e-5) == math.inf


@pytest.mark.parametrize("event", EVENTS, ids=str)
@pytest.mark.parametrize("relation", list(Relation))
def test_delta_undoes_epsilon(event, relation):
    bracket = PLD().bracket(event, delta=1e-5, relation=relation)
    assert 0 < bracket.lower <= bracket.upper < math.inf
    assert bracket.width <= 1e-4 * bracket.upper
    at_upper = PLD().delta_bracket(event, epsilon=bracket.upper, relation=relation)
    at_lower = PLD().delta_bracket(event, epsilon=bracket.lower, relation=relation)
    assert at_upper.lower <= 1e-5
    assert at_lower.upper >= 1e-5
    assert at_upper.upper == pytest.approx(1e-5, rel=0.2)


@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_a_replaced_record_is_dearer_than_a_removed_one(event):
    removed = PLD().bracket(event, delta=1e-5)
    replaced = PLD().bracket(event, delta=1e-5, relation=Relation.REPLACE_ONE)
    assert replaced.upper >= removed.lower
    assert PLD().bracket(event, delta=1e-5, relation=Relation.ZERO_OUT) == removed


@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_repeating_equals_listing(event):
    repeated = PLD().bracket(Repeated(event, 3), delta=1e-6)
    assert repeated == PLD().bracket(Sequence((event,) * 3), delta=1e-6)


def test_phases_cost_more_than_each_alone_and_less_than_their_sum():
    first, second = Repeated(STEP, 3000), Repeated(PoissonSampled(0.02, Gaussian(1.5)), 400)
    both = PLD().bracket(Sequence((first, second)), delta=1e-6)
    one, two = (PLD().bracket(part, delta=1e-6) for part in (first, second))
    halves = (PLD().bracket(part, delta=5e-7).upper for part in (first, second))
    assert max(one.lower, two.lower) <= both.upper
    assert both.lower <= sum(halves)


@pytest.mark.parametrize("accountant", [PLD(), PLD(tolerance=1e-4)], ids=str)
def test_curves_equal_their_points(accountant):
    deltas = [1e-3, 1e-9, 1e-6]
    curve = accountant.epsilons(RUN, deltas)
    for delta, upper in zip(deltas, curve, strict=True):
        bracket = PLD().bracket(RUN, delta=delta)
        assert bracket.lower <= upper <= bracket.upper * (1 + 1e-4)
    epsilons = [0.5, 0.0, 1.5]
    for epsilon, upper in zip(epsilons, accountant.deltas(RUN, epsilons), strict=True):
        bracket = PLD().delta_bracket(RUN, epsilon=epsilon)
        assert bracket.lower <= upper <= bracket.upper * (1 + 1e-2)


corners = pytest.mark.parametrize(
    "event",
    [
        PoissonSampled(0.999, Gaussian(1.0)),
        Repeated(STEP, 2),
        Repeated(STEP, 10**9),
        Repeated(PoissonSampled(0.01, Gaussian(1e-3)), 3),
        Repeated(PoissonSampled(0.01, Gaussian(1e6)), 1000),
        Repeated(PoissonSampled(1e-9, Gaussian(1.0)), 10),
        Repeated(PoissonSampled(0.01, Laplace(1e-3)), 3),
        Repeated(PureDP(800.0), 2),
        Repeated(PureDP(1e-9), 10**9),
        Repeated(Laplace(1e6), 50),
        Sequence((NonPrivate(), Gaussian(1.0))),
        Gaussian(1e-3),
        Gaussian(1e6),
    ],
    ids=str,
)


@corners
@pytest.mark.parametrize("delta", [1e-300, 1e-12, 0.3, 1 - 1e-12])
def test_corners_give_an_ordered_bracket(event, delta):
    bracket = PLD().bracket(event, delta=delta)
    assert 0 <= bracket.lower <= bracket.upper
    if bracket.upper < math.inf:
        check = PLD().delta_bracket(event, epsilon=bracket.upper)
        assert 0 <= check.lower <= check.upper <= 1
        assert check.lower <= delta


@corners
def test_corners_give_an_ordered_delta(event):
    start = PLD().delta_bracket(event, epsilon=0.0)
    assert 0 <= start.lower <= start.upper <= 1


@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_more_delta_never_costs_more(event):
    brackets = [PLD().bracket(event, delta=delta) for delta in (1e-10, 1e-6, 1e-3, 0.1)]
    for less, more in itertools.pairwise(brackets):
        assert more.lower <= less.upper


def test_more_noise_fewer_samples_and_fewer_steps_cost_less():
    def upper(rate, noise, steps):
        event = Repeated(PoissonSampled(rate, Gaussian(noise)), steps)
        return PLD().bracket(event, delta=1e-6)

    base = upper(0.01, 1.0, 1000)
    assert upper(0.01, 1.001, 1000).upper < base.lower
    assert upper(0.00999, 1.0, 1000).upper < base.lower
    assert upper(0.01, 1.0, 999).upper < base.lower


def test_events_without_a_rule_are_refused():
    with pytest.raises(UnsupportedEvent, match="RDP"):
        PLD().epsilon(BestOf(STEP, mean=3.0), delta=1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, math.nan, math.inf])
def test_delta_must_be_inside_the_unit_interval(delta):
    with pytest.raises(ValueError, match="delta must be in"):
        PLD().bracket(STEP, delta=delta)


@pytest.mark.parametrize("epsilon", [-1.0, math.nan, math.inf])
def test_epsilon_must_be_finite_and_not_negative(epsilon):
    with pytest.raises(ValueError, match="epsilon must be"):
        PLD().delta_bracket(STEP, epsilon=epsilon)


def test_two_hundred_phases_take_well_under_a_second():
    rng = np.random.default_rng(0)
    phases = tuple(
        Repeated(PoissonSampled(float(q), Gaussian(float(s))), 25)
        for q, s in zip(rng.uniform(0.005, 0.02, 200), rng.uniform(0.8, 1.5, 200), strict=True)
    )
    start = time.process_time()
    bracket = PLD().bracket(Sequence(phases), delta=1e-5)
    assert time.process_time() - start < 2.0  # 0.3 s on an idle machine
    assert bracket.width <= 1e-5 * bracket.upper


def test_a_bound_that_is_not_a_number_proves_nothing():
    class Broken:
        def delta(self, _epsilon: float) -> Bracket:
            return Bracket(math.nan, math.nan)

    assert invert(Broken(), 1e-5, guess=1.0, ceiling=7.0) == Bracket(0.0, 7.0)


def test_noise_whose_square_underflows_is_not_free():
    law = Sampled(Normal(1e-200), 0.1, 1, 0)
    assert OneRelease(law).delta(1.0).upper >= 0.1


@pytest.mark.parametrize("noise", [1e-11, 1e-60])
def test_tiny_noise_needs_no_memory_and_costs_dearly(noise):
    run = Repeated(PoissonSampled(1e-3, Gaussian(noise)), 100)
    assert PLD().epsilon(run, delta=1e-5) > 0.4 / noise**2


@pytest.mark.parametrize(
    ("event", "relation"),
    [
        (PoissonSampled(0.3, Gaussian(1.0, replace_factor=1.0)), Relation.REPLACE_ONE),
        (PoissonSampled(0.3, PureDP(1.0)), Relation.REPLACE_ONE),
        (PoissonSampled(0.3, Exponential(1.0)), Relation.ADD_REMOVE),
        (Sequence((Repeated(Exponential(0.3), 20), RUN)), Relation.ADD_REMOVE),
    ],
)
def test_an_event_that_is_only_bounded_has_the_lower_end_of_a_mechanism_it_describes(
    event, relation
):
    found = bracket(event, delta=1e-3, relation=relation)
    assert 0.0 < found.lower < found.upper <= PLD().epsilon(event, delta=1e-3, relation=relation)


@pytest.mark.parametrize("rare", [NonPrivate(), ApproximateDP(0.0, 0.5)])
@pytest.mark.parametrize("common", [Gaussian(1.0), Laplace(1.0), PureDP(0.5)])
def test_a_rare_disaster_composes_with_what_has_a_loss(rare, common):
    run = Repeated(PoissonSampled(0.1, common), 50)
    both = Sequence((PoissonSampled(1e-6, rare), run))
    found = bracket(both, delta=1e-3)
    assert 0.99 * found.upper < found.lower <= found.upper
    assert PLD().epsilon(both, delta=1e-7) == math.inf
    price = PLD().epsilon(both, delta=1e-3)
    assert PLD().epsilon(run, delta=1e-3) <= price
    assert price == pytest.approx(PLD().epsilon(run, delta=1e-3 - 1e-6), rel=1e-4)


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1])
@pytest.mark.parametrize("steps", [2, 20, 2000])
def test_noise_far_below_the_contribution_is_priced_and_not_refused(noise, steps):
    event = Repeated(PoissonSampled(0.05, Gaussian(noise)), steps)
    bracket = PLD().bracket(event, delta=1e-6)
    assert 0 < bracket.lower <= bracket.upper <= RDP().epsilon(event, delta=1e-6) * (1 + 1e-9)


@pytest.mark.slow
def test_laplace_noise_composes_with_a_much_smaller_loss():
    small, large = PoissonSampled(0.134, Exponential(0.00466)), Laplace(0.441)
    found = PLD().bracket(Sequence((small, large)), delta=1.5e-7)
    assert PLD().bracket(large, delta=1.5e-7).lower <= found.lower <= found.upper
    assert found.upper <= 1 / 0.441 + 0.00466
