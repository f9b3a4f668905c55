"""What every accountant owes for every event: a new member of either list joins the contract."""

import contextlib
import math
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import pytest

from tacit import accounting as acc
from tacit.errors import UnsupportedEvent
from tacit.events import (
    ApproximateDP,
    BandedGaussian,
    BestOf,
    ChosenOf,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    Exponential,
    FixedSizeSampled,
    Gaussian,
    GaussianMixture,
    Laplace,
    NonPrivate,
    OneOf,
    PoissonSampled,
    PureDP,
    RandomAllocation,
    RandomizedResponse,
    Relation,
    RenyiCurve,
    Repeated,
    Sequence,
    Shuffled,
    TreeAggregation,
    Trials,
    TruncatedPoissonSampled,
    ZeroConcentratedDP,
)

GUARANTEES = (
    acc.PLD(),
    acc.RDP(),
    acc.Moments(),
    acc.Moments(conversion="improved"),
    acc.GDP(),
    acc.BasicComposition(),
    acc.StrongComposition(),
    acc.StrongComposition(recipe="rigorous"),
)
ACCOUNTANTS = (*GUARANTEES, acc.CentralLimitGDP())

EVENTS: tuple[Event, ...] = (
    NonPrivate(),
    Gaussian(2.0),
    Gaussian(5.0, replace_factor=1.3),
    Laplace(3.0),
    PureDP(0.3),
    PureDP(0.0),
    ApproximateDP(0.2, 1e-9),
    Exponential(0.4),
    RandomizedResponse(0.6, 4),
    RandomizedResponse(1.0),
    RenyiCurve((1.5, 2.0, 4.0, 16.0), (0.01, 0.02, 0.05, 0.3)),
    RenyiCurve((2.0, 8.0), (0.02, 0.1), replace_factor=1.0),
    PoissonSampled(0.1, Gaussian(1.5)),
    PoissonSampled(0.001, Gaussian(0.8)),
    PoissonSampled(0.2, Laplace(2.0)),
    PoissonSampled(0.2, PureDP(0.5)),
    PoissonSampled(0.2, Exponential(0.5)),
    PoissonSampled(0.2, RandomizedResponse(0.5, 3)),
    PoissonSampled(0.2, ApproximateDP(0.5, 1e-9)),
    PoissonSampled(0.1, RenyiCurve((2.0,), (0.1,))),
    PoissonSampled(0.1, PoissonSampled(0.5, Gaussian(2.0))),
    TruncatedPoissonSampled(0.1, 160, 1000, Gaussian(2.0)),
    TruncatedPoissonSampled(1.0, 60, 100, Gaussian(2.0)),
    GaussianMixture(2.0, (0.0, 1.0, 2.0), (0.9, 0.09, 0.01)),
    DiscreteGaussian(6.0, 2),
    DiscreteLaplace(5.0),
    ZeroConcentratedDP(0.02, 1e-9),
    TreeAggregation(6.0, 20),
    BandedGaussian(2.0, (0.8, 0.6), 19, 2, rate=0.1),
    BandedGaussian(9.0, (0.7, 0.5, 0.4), 12, 2),
    OneOf((Gaussian(4.0), PureDP(0.3)), (0.5, 0.5)),
    ChosenOf((Gaussian(4.0), PureDP(0.3))),
    FixedSizeSampled(20, 400, Gaussian(2.0)),
    FixedSizeSampled(20, 400, Laplace(2.0)),
    RandomAllocation(50, Gaussian(1.5)),
    RandomAllocation(50, PureDP(0.4)),
    Shuffled(RandomizedResponse(0.5, 4), 500),
    Shuffled(PureDP(0.7), 30),
    BestOf(Repeated(PoissonSampled(0.05, Gaussian(3.0)), 20), 5.0),
    BestOf(PureDP(0.2), 4.0, Trials.GEOMETRIC),
    BestOf(Gaussian(6.0), 2.0, Trials.POISSON),
    BestOf(Gaussian(6.0), 0.5, Trials.POISSON),
    Sequence(()),
    Sequence((Gaussian(4.0), Laplace(5.0), PoissonSampled(0.1, Gaussian(2.0)))),
)

every_accountant = pytest.mark.parametrize("accountant", ACCOUNTANTS, ids=repr)
every_guarantee = pytest.mark.parametrize("accountant", GUARANTEES, ids=repr)
every_event = pytest.mark.parametrize("event", EVENTS, ids=str)

DELTA = 1e-6
ROUNDING = 1 + 1e-6  # ends of brackets move by this much from one computation to the next


@cache
def cost(accountant, event, delta=DELTA, relation=Relation.ADD_REMOVE):
    """Epsilon, or None where the accountant has no price."""
    try:
        if accountant == acc.PLD():
            return pld_bracket(event, delta, relation).upper
        return accountant.epsilon(event, delta=delta, relation=relation)
    except UnsupportedEvent:
        return None


@cache
def pld_bracket(event, delta, relation):
    """Both ends from PLD, whose upper end is its price; most tests need one or the other."""
    return acc.PLD().bracket(event, delta=delta, relation=relation)


def lower_end(event, relation):
    """Certified lower end of the pair that PLD uses, or None."""
    try:
        return pld_bracket(event, DELTA, relation).lower
    except UnsupportedEvent:
        return None


def assert_rising(costs, of):
    known = [c for c in costs if c is not None]
    assert all(a <= b * ROUNDING for a, b in pairwise(known)), (known, of)


@every_accountant
def test_prices_or_says_that_it_cannot(accountant):
    for event, relation in product(EVENTS, Relation):
        found = cost(accountant, event, relation=relation)
        if found is None:
            continue
        assert found >= 0, event
        try:
            assert 0 <= accountant.delta(event, epsilon=0.7, relation=relation) <= 1, event
        except UnsupportedEvent:
            # Only the published recipe may hold at one budget and be refused at another.
            if accountant != acc.StrongComposition():
                pytest.fail(f"a price for epsilon but none for delta: {event}")


@every_accountant
def test_repeating_equals_listing(accountant):
    for event in EVENTS:
        for whole, listed in [
            (Repeated(event, 30), Sequence((event, *(Repeated(event, 2),) * 14, event))),
            (Repeated(event, 30), Repeated(Sequence((event, Repeated(event, 2))), 10)),
        ]:
            first, second = cost(accountant, whole), cost(accountant, listed)
            assert (first is None) == (second is None), event
            assert first is None or first == pytest.approx(second, rel=1e-9), event


@every_accountant
def test_more_releases_cost_no_less(accountant):
    for event in EVENTS:
        several = [Repeated(event, n) for n in (0, 1, 3, 30)]
        costs = [cost(accountant, whole) for whole in several]
        assert costs[0] == 0 or costs[0] is None, event
        if accountant != acc.PLD():
            assert_rising(costs, event)
        elif costs[-1] is not None:
            # Brackets may differ in width, so what is proved of fewer is held against more.
            for fewer, more in pairwise(several):
                proved = lower_end(fewer, Relation.ADD_REMOVE)
                assert proved <= cost(accountant, more) * ROUNDING, event


@every_accountant
def test_a_smaller_delta_costs_no_less(accountant):
    for event in EVENTS:
        assert_rising([cost(accountant, event, d) for d in (0.1, 1e-3, DELTA, 1e-9)], event)


@every_guarantee
@pytest.mark.parametrize("relation", list(Relation))
def test_more_noise_costs_less(accountant, relation):
    for family in (
        Gaussian,
        Laplace,
        lambda s: PoissonSampled(0.05, Gaussian(s)),
        lambda s: PoissonSampled(0.05, Laplace(s)),
        lambda s: RandomAllocation(20, Gaussian(s)),
        lambda s: FixedSizeSampled(20, 400, Gaussian(s)),
        lambda s: TruncatedPoissonSampled(0.05, 90, 1000, Gaussian(s)),
        lambda s: BestOf(Gaussian(s), 3.0),
    ):
        events = [Repeated(family(s), 5) for s in (20.0, 4.0, 1.5, 0.7)]
        assert_rising([cost(accountant, event, relation=relation) for event in events], events)


@every_guarantee
@pytest.mark.parametrize("relation", list(Relation))
def test_a_larger_sample_costs_no_less(accountant, relation):
    for inner in (Gaussian(1.5), Laplace(2.0), PureDP(0.4)):
        events = [Repeated(PoissonSampled(q, inner), 4) for q in (0.0, 1e-3, 0.1, 0.6, 1.0)]
        assert_rising([cost(accountant, event, relation=relation) for event in events], events)


@every_guarantee
def test_replacing_a_record_costs_no_less_than_blanking_it(accountant):
    relations = (Relation.ZERO_OUT, Relation.REPLACE_ONE)
    for event in EVENTS:
        assert_rising([cost(accountant, event, relation=relation) for relation in relations], event)


def uses_a_finer_pair_than_pld(event, relation):
    """RDP knows the bounded range of an exponential mechanism, and a replaced sample of pure DP."""
    parts = acc.flatten(event)
    replaced = relation is Relation.REPLACE_ONE and any(
        isinstance(part, PoissonSampled) and not isinstance(part.event, Gaussian) for part in parts
    )
    return replaced or any(isinstance(part, Exponential) for part in parts)


@every_guarantee
@pytest.mark.parametrize("relation", list(Relation))
def test_no_guarantee_is_below_the_certified_lower_end(accountant, relation):
    for event, count in product(EVENTS, (1, 30)):
        whole = Repeated(event, count)
        found, lower = cost(accountant, whole, relation=relation), lower_end(whole, relation)
        if None in (found, lower) or uses_a_finer_pair_than_pld(whole, relation):
            continue
        assert found >= lower * (1 - 1e-9), whole


@pytest.mark.parametrize("relation", [Relation.ADD_REMOVE, Relation.ZERO_OUT])
def test_the_tight_accountant_is_no_looser_than_rdp(relation):
    for event, count in product(EVENTS, (1, 30)):
        whole = Repeated(event, count)
        if not uses_a_finer_pair_than_pld(whole, relation):
            prices = [cost(by, whole, relation=relation) for by in (acc.PLD(), acc.RDP())]
            if None not in prices:
                assert_rising(prices, whole)


@every_guarantee
@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("noise", [0.3, 1.0, 10.0, 1e3])
def test_never_below_the_closed_form_of_gaussian_noise(accountant, relation, noise):
    factor = 2.0 if relation is Relation.REPLACE_ONE else 1.0
    for count, delta in [(1, 0.3), (1, 1e-12), (17, 1e-5)]:
        exact = acc.gaussian_epsilon(math.sqrt(count) * factor / noise, delta)
        found = cost(accountant, Repeated(Gaussian(noise), count), delta, relation)
        assert found is None or found >= exact * (1 - 1e-9)


@every_guarantee
@pytest.mark.parametrize("relation", list(Relation))
def test_never_below_the_closed_form_of_pure_dp(accountant, relation):
    # Kairouz, Oh & Viswanath 2015, Thm. 3.3: delta(epsilon) of n randomized responses is a sum.
    epsilon, n = (0.6, 5) if relation is Relation.REPLACE_ONE else (0.3, 5)
    at = n * epsilon - 1.1 * epsilon
    terms = [
        math.comb(n, k) * max(0.0, math.exp((n - k) * epsilon) - math.exp(at + k * epsilon))
        for k in range(n + 1)
    ]
    delta = math.fsum(terms) / (1 + math.exp(epsilon)) ** n
    found = cost(accountant, Repeated(PureDP(0.3), n), delta, relation)
    assert found is None or found >= at * (1 - 1e-9)


@every_accountant
@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_delta_must_be_a_probability_strictly_inside(accountant, delta):
    with pytest.raises(ValueError, match="delta must be in"):
        accountant.epsilon(Gaussian(1.0), delta=delta)


@every_accountant
@pytest.mark.parametrize("epsilon", [-1.0, math.nan, math.inf])
def test_epsilon_must_be_a_finite_number_at_least_zero(accountant, epsilon):
    with pytest.raises(ValueError, match="epsilon must be"):
        accountant.delta(Gaussian(1.0), epsilon=epsilon)


@every_accountant
@pytest.mark.parametrize("wrong", ["1e-5", None, True])
def test_numbers_must_be_numbers(accountant, wrong):
    with pytest.raises(TypeError):
        accountant.epsilon(Gaussian(1.0), delta=wrong)


@every_accountant
def test_relations_may_be_given_by_name_and_unknown_ones_are_refused(accountant):
    event = Gaussian(3.0)
    by_name = accountant.epsilon(event, delta=1e-5, relation="zero_out")
    assert by_name == accountant.epsilon(event, delta=1e-5, relation=Relation.ZERO_OUT)
    with pytest.raises(ValueError, match="neighbors"):
        accountant.epsilon(event, delta=1e-5, relation="neighbors")


@every_accountant
@pytest.mark.parametrize("noise", [1e-3, 1e6])
@pytest.mark.parametrize("rate", [1e-6, 0.5])
def test_extreme_settings_get_a_number_or_a_reason(accountant, noise, rate):
    events = (Gaussian(noise), PoissonSampled(rate, Gaussian(noise)))
    for event, count in product(events, (0, 1, 10**9)):
        found = cost(accountant, Repeated(event, count), 1e-8)
        assert found is None or found >= 0


@every_event
@pytest.mark.parametrize("relation", list(Relation))
def test_the_default_answer_is_the_best_of_the_tight_ones(event, relation):
    priced = [cost(by, event, 1e-6, relation) for by in (acc.PLD(), acc.RDP())]
    known = [c for c in priced if c is not None]
    if not known:  # priced by neither alone: refused, or priced by a profile
        with contextlib.suppress(UnsupportedEvent):
            assert acc.epsilon(event, delta=1e-6, relation=relation) > 0
        return
    found = acc.epsilon(event, delta=1e-6, relation=relation)
    assert found <= (known[0] if priced[0] is not None else known[-1]) * (1 + 1e-9)
    bracket = acc.bracket(event, delta=1e-6, relation=relation)
    assert bracket.lower <= bracket.upper
    assert bracket.upper == pytest.approx(found, rel=1e-9)
    delta = acc.delta(event, epsilon=0.5, relation=relation)
    assert 0 <= delta <= 1


def test_parts_with_and_without_a_tight_price_are_added_where_that_is_better():
    known = Repeated(PoissonSampled(1e-3, Gaussian(0.8)), 300)  # RDP is very loose here
    rest = BestOf(PureDP(1e-3), 3.0)
    mixed = Sequence((known, rest))
    found = acc.epsilon(mixed, delta=1e-6)
    assert found < acc.RDP().epsilon(mixed, delta=1e-6)
    assert found >= acc.PLD().bracket(known, delta=1e-6).lower
    assert acc.delta(mixed, epsilon=found) <= 1e-6 * 100


def test_a_given_accountant_is_used():
    run = Repeated(PoissonSampled(0.01, Gaussian(4.0)), 10_000)
    for accountant in (acc.RDP(), acc.Moments(), acc.StrongComposition()):
        assert acc.epsilon(run, delta=1e-5, accountant=accountant) == accountant.epsilon(
            run, delta=1e-5
        )
        assert acc.delta(run, epsilon=2.0, accountant=accountant) == accountant.delta(
            run, epsilon=2.0
        )


def test_settings_of_accountants_are_frozen():
    for accountant in ACCOUNTANTS:
        assert replace(accountant) == accountant
        assert hash(accountant) == hash(replace(accountant))
