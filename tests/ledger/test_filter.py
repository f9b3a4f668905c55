"""The filter: valid against adaptive choices, and not much worse than knowing all in advance."""

import math
import random
from dataclasses import replace
from fractions import Fraction

import pytest

from tacit.accounting.rdp import RDP
from tacit.events import (
    ApproximateDP,
    Event,
    Gaussian,
    Laplace,
    NonPrivate,
    PoissonSampled,
    PureDP,
    Relation,
    Repeated,
    Sequence,
)
from tacit.ledger import Budget
from tacit.ledger.entry_cost import Cost, nothing, price
from tacit.ledger.filter import Filter, fit, gaussian_limit, limits_of

BUDGETS = [Budget(0.1, 1e-6), Budget(1.0, 1e-5), Budget(3.0, 1e-5), Budget(10.0, 1e-9)]
ADD = Relation.ADD_REMOVE


def repeats(event: Event, budget: Budget, first: Event | None = None) -> int:
    """How many times a filter fitted to `first` admits `event`."""
    chosen = fit(budget, first or event, ADD)

    def cost(n: int) -> Cost:
        of = {"orders": chosen.orders, "relation": ADD, "copy": chosen.copied_event}
        return price(Repeated(event, n), **of)

    low, high = 0, 1
    while chosen.admits(cost(high), budget):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if chosen.admits(cost(middle), budget) else (low, middle)
    return low


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_shares_of_delta_sum_to_at_most_one(budget: Budget) -> None:
    for event in (Gaussian(5.0), Laplace(5.0), PoissonSampled(0.01, Gaussian(1.0))):
        chosen = fit(budget, event, ADD)
        shares = [chosen.gaussian_share, *chosen.shares]
        shares += [chosen.copies_share] if chosen.copied_event else []
        assert sum(map(Fraction, shares)) <= 1 + Fraction(1, 10**14)
        assert min(shares) > 0
        assert Filter.from_json(chosen.to_json()) == chosen


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_each_limit_alone_converts_to_the_budget(budget: Budget) -> None:
    chosen = fit(budget, Laplace(5.0), ADD)
    limits = limits_of(chosen, budget)
    for order, share, limit in zip(chosen.orders, chosen.shares, limits.renyi, strict=True):
        if limit > 0:
            delta = share * budget.delta * (1 - chosen.set_aside)
            log_delta = (order - 1) * (limit - budget.epsilon + math.log1p(-1 / order))
            assert log_delta - math.log(order) <= math.log(delta)
            assert log_delta - math.log(order) == pytest.approx(math.log(delta), rel=1e-6)


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_adaptive_gaussians_lose_little_against_knowing_all_in_advance(budget: Budget) -> None:
    exact = gaussian_limit(budget.epsilon, budget.delta)  # the sum of 1 / multiplier^2 that fits
    event = Gaussian(math.sqrt(1_000 / exact))
    assert 940 <= repeats(event, budget) < 1_000


@pytest.mark.parametrize("budget", [Budget(1.0, 1e-5), Budget(3.0, 1e-5)], ids=str)
@pytest.mark.parametrize(
    "event", [PoissonSampled(0.01, Gaussian(2.0)), Laplace(50.0), PureDP(0.02)], ids=str
)
def test_other_releases_lose_little_against_the_best_order(event: Event, budget: Budget) -> None:
    found = repeats(event, budget)
    more = Repeated(event, math.ceil(found / 0.93))
    assert RDP().epsilon(more, delta=budget.delta) > budget.epsilon


def test_a_filter_fitted_to_another_kind_still_admits_most() -> None:
    budget = Budget(1.0, 1e-5)
    for event in (Gaussian(30.0), PoissonSampled(0.01, Gaussian(2.0)), Laplace(50.0)):
        for first in (Gaussian(30.0), PoissonSampled(0.01, Gaussian(2.0)), Laplace(50.0)):
            assert repeats(event, budget, first) >= 0.55 * repeats(
                event, budget
            )  # which counts copies


def test_epsilons_and_deltas_add_when_the_first_entry_is_approximate() -> None:
    budget = Budget(1.0, 1e-5)
    assert repeats(ApproximateDP(0.1, 1e-6), budget) == 10
    assert repeats(ApproximateDP(0.001, 1e-6), budget) == 10
    assert repeats(ApproximateDP(0.02, 1e-8), budget) > 100  # twice what adding epsilons admits


def test_deltas_beyond_what_is_set_aside_are_refused() -> None:
    budget = Budget(1.0, 1e-5)
    chosen = fit(budget, Gaussian(30.0), ADD)
    assert chosen.set_aside == 0.1
    fits = price(ApproximateDP(0.01, 1e-6), orders=chosen.orders, relation=ADD)
    assert chosen.admits(fits, budget)
    assert not chosen.admits(fits + fits, budget)
    mixed = Sequence((Gaussian(30.0), ApproximateDP(0.01, 2e-6)))
    assert fit(budget, mixed, ADD).set_aside == 0.5


def test_pure_budgets_admit_pure_entries_up_to_the_last_digit() -> None:
    assert repeats(PureDP(0.001), Budget(1.0)) == 1_000
    assert repeats(Laplace(3.0), Budget(1.0)) == 3
    assert repeats(Gaussian(1e9), Budget(1.0)) == 0
    assert repeats(PureDP(0.1), Budget(0.0, 1e-5)) == 0


def test_nothing_is_admitted_at_infinite_cost() -> None:
    for budget in BUDGETS:
        chosen = fit(budget, NonPrivate(), ADD)
        assert not chosen.admits(price(NonPrivate(), orders=chosen.orders, relation=ADD), budget)


@pytest.mark.parametrize("event", [Gaussian(20.0), Laplace(20.0), PureDP(0.05)], ids=str)
def test_what_remains_is_admitted_and_little_more_is(event: Event) -> None:
    budget = Budget(1.0, 1e-5)
    chosen = fit(budget, event, ADD)

    def cost(one: Event) -> Cost:
        return price(one, orders=chosen.orders, relation=ADD)

    spent = cost(Repeated(event, 10))
    left = chosen.remaining(spent, budget)
    assert chosen.admits(spent + cost(PureDP(left.epsilon)), budget)
    assert chosen.admits(spent + cost(Gaussian(left.noise_multiplier)), budget)
    assert not chosen.admits(spent + cost(PureDP(1.3 * left.epsilon)), budget)
    assert not chosen.admits(spent + cost(Gaussian(left.noise_multiplier / 1.01)), budget)
    assert 0 < left.fraction < 1


@pytest.mark.parametrize("mu", [0.1, 1.0, 3.0])
def test_the_largest_pure_release_that_mu_gdp_leaves_is_its_inverse(mu: float) -> None:
    """Of two normal laws `mu` apart, the likelihood ratio of the events x > mu / 2."""
    chosen, budget = Filter((), (), 1.0, 0.0), Budget(4.0, 1e-5)
    limit = limits_of(chosen, budget).gaussian
    assert limit is not None
    spent = price(Gaussian(1.0), orders=(), relation=ADD)  # used up the pure part: infinite
    left = chosen.remaining(replace(spent, gaussian=limit - mu**2), budget)
    above, below = (math.erfc(sign * mu / math.sqrt(8)) / 2 for sign in (-1, 1))
    assert left.epsilon == pytest.approx(math.log(above / below), rel=2e-5)
    assert left.noise_multiplier == pytest.approx(1 / mu, rel=1e-6)


def test_the_odometer_is_never_below_the_price_of_events_fixed_in_advance() -> None:
    for event in (Gaussian(20.0), Laplace(20.0), PoissonSampled(0.02, Gaussian(2.0))):
        for budget in (Budget(1.0, 1e-5), None):
            chosen = fit(budget, event, ADD)
            for count in (2, 10, 100):
                many = Repeated(event, count)
                total = price(many, orders=chosen.orders, relation=ADD)
                assert chosen.epsilon(total, delta=1e-5) >= RDP().epsilon(many, delta=1e-5)


def test_the_odometer_of_nothing_approximate_at_delta_zero_is_the_pure_sum() -> None:
    chosen = fit(Budget(1.0), PureDP(0.1), ADD)
    total = price(Repeated(PureDP(0.1), 3), orders=chosen.orders, relation=ADD)
    assert chosen.epsilon(total, delta=0.0) == 0.3
    assert chosen.epsilon(nothing(0), delta=0.0) == 0


@pytest.mark.parametrize("seed", range(6))
def test_no_adaptive_analyst_passes_the_budget(seed: int) -> None:
    """Exact check: an analyst picks randomized responses by what came out so far.

    The pair of answer laws is (1, e^epsilon) / (1 + e^epsilon) and its mirror, the worst for its
    epsilon, so the transcript's laws are exact products over the tree of choices. Delta is large
    so that the filter matters.
    """
    chance = random.Random(seed)
    budget = Budget(chance.choice([0.5, 1.0, 2.0]), chance.choice([0.02, 0.1, 0.3]))
    menu = [PureDP(budget.epsilon * share) for share in (0.08, 0.15, 0.3, 0.6)]
    chosen = fit(budget, menu[0], ADD)
    prices = {event: price(event, orders=chosen.orders, relation=ADD) for event in menu}
    greedy = chance.random() < 0.5

    def excess(p: float, q: float, total: Cost, depth: int) -> float:
        """Sum over transcripts from here on of max(0, P - e^epsilon Q)."""
        offered = [event for event in menu if chosen.admits(total + prices[event], budget)]
        if not offered or depth == 11:
            return max(0.0, p - math.exp(budget.epsilon) * q)
        # Greedy: bold while the loss is high, timid while it is low, as an attacker would.
        event = (offered[-1] if p > q else offered[0]) if greedy else chance.choice(offered)
        high = 1 / (1 + math.exp(-event.epsilon))
        after = total + prices[event]
        return excess(p * high, q * (1 - high), after, depth + 1) + excess(
            p * (1 - high), q * high, after, depth + 1
        )

    assert excess(1.0, 1.0, nothing(len(chosen.orders)), 0) <= budget.delta


@pytest.mark.parametrize("seed", range(4))
def test_the_odometer_holds_at_all_times_against_an_adaptive_analyst(seed: int) -> None:
    """Exact check: the chance that the loss ever passes what the odometer says is at most delta."""
    chance = random.Random(seed)
    delta = chance.choice([0.05, 0.2])
    menu = [PureDP(epsilon) for epsilon in (0.05, 0.2, 0.5)]
    chosen = Filter((2.0, 5.0, 12.0), (0.3, 0.4, 0.3), 0.0, 0.1)
    prices = {event: price(event, orders=chosen.orders, relation=ADD) for event in menu}
    says: dict[Cost, float] = {}
    seen_below_pure = False

    def failing(p: float, loss: float, total: Cost, depth: int) -> float:
        nonlocal seen_below_pure
        bound = says.setdefault(total, chosen.epsilon(total, delta=delta))
        seen_below_pure |= bound < total.pure
        if loss > bound + 1e-12:
            return p
        if depth == 12:
            return 0.0
        event = menu[2] if loss > 0 else chance.choice(menu)
        high = 1 / (1 + math.exp(-event.epsilon))
        after = total + prices[event]
        return failing(p * high, loss + event.epsilon, after, depth + 1) + failing(
            p * (1 - high), loss - event.epsilon, after, depth + 1
        )

    assert failing(1.0, 0.0, nothing(3), 0) <= delta
    assert seen_below_pure  # else the check would be empty
