"""What an event adds to each measure."""

import math
from fractions import Fraction

import pytest
from scipy.special import ndtr

from tacit.accounting import round_up
from tacit.events import (
    ApproximateDP,
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
from tacit.ledger.entry_cost import Cost, nothing, price

ORDERS = (2.0, 8.0, 32.0)


def cost(event: Event, relation: Relation = Relation.ADD_REMOVE) -> Cost:
    return price(event, orders=ORDERS, relation=relation)


def test_decimals_add_as_they_are_written() -> None:
    assert cost(Repeated(PureDP(0.001), 1_000)).pure == 1
    assert cost(Repeated(Laplace(3.0), 3)).pure == 1
    assert cost(Repeated(ApproximateDP(0.1, 1e-6), 10)).delta == Fraction(1, 100_000)


def test_a_gaussian_has_its_closed_forms() -> None:
    found = cost(Repeated(Gaussian(4.0), 5))
    assert found.renyi == pytest.approx([5 * a / 32 for a in ORDERS], rel=1e-8)
    assert found.gaussian == pytest.approx(5 / 16)
    assert found.pure == math.inf
    assert found.delta == 0


def test_replacing_a_record_costs_twice_as_much_noise() -> None:
    found, plain = cost(Gaussian(4.0), Relation.REPLACE_ONE), cost(Gaussian(2.0))
    assert found.renyi == pytest.approx(plain.renyi)
    assert found.gaussian == pytest.approx(plain.gaussian)
    assert cost(PureDP(0.5), Relation.REPLACE_ONE).pure == 1
    assert cost(PureDP(0.5, replace_factor=1.0), Relation.REPLACE_ONE).pure == Fraction(1, 2)
    group = cost(ApproximateDP(0.5, 1e-6), Relation.REPLACE_ONE)
    assert group.pure == 1
    assert float(group.delta) == pytest.approx(1e-6 * (1 + math.exp(0.5)))


@pytest.mark.parametrize("epsilon", [1e-6, 9e-4, 1.1e-3, 0.5, 5.0])
def test_a_pure_mechanism_is_gaussian_dp_with_the_stated_mu(epsilon: float) -> None:
    mu = math.sqrt(cost(PureDP(epsilon)).gaussian)
    # At the corner of its trade-off function, both errors are 1 / (1 + e^epsilon).
    assert ndtr(-mu / 2) <= (1 + 1e-15) / (1 + math.exp(epsilon))
    assert ndtr(-mu / 2) == pytest.approx(1 / (1 + math.exp(epsilon)), rel=1e-5)


@pytest.mark.parametrize(
    ("event", "epsilon"),
    [
        (Exponential(0.3), 0.3),
        (RandomizedResponse(0.5, 2), math.log(3)),
        (PoissonSampled(0.1, PureDP(1.0)), math.log1p(0.1 * math.expm1(1.0))),
    ],
)
def test_pure_epsilons_are_the_known_ones(event: Event, epsilon: float) -> None:
    assert float(cost(event).pure) == pytest.approx(epsilon, rel=1e-9)
    assert cost(event).pure >= Fraction(epsilon) * (1 - Fraction(1, 10**12))


def test_a_release_without_noise_costs_infinitely_much() -> None:
    found = cost(NonPrivate())
    assert found.renyi == (math.inf,) * len(ORDERS)
    assert found.gaussian == math.inf
    assert found.pure == math.inf


@pytest.mark.parametrize("event", [PureDP(0.1), Gaussian(2.0), NonPrivate(), Laplace(7.0)], ids=str)
def test_costs_survive_json(event: Event) -> None:
    assert Cost.from_json(cost(event).to_json()) == cost(event)


def test_sums_never_round_down() -> None:
    parts = [cost(Gaussian(3.0 + k / 7)) for k in range(200)]
    total = nothing(len(ORDERS))
    for part in parts:
        total += part
    for k in range(len(ORDERS)):
        assert Fraction(total.renyi[k]) >= sum(Fraction(part.renyi[k]) for part in parts)
        assert total.renyi[k] == pytest.approx(math.fsum(part.renyi[k] for part in parts))


def test_exact_sums_stay_short_and_round_up() -> None:
    parts = [cost(Laplace(1.0 + k / 997)) for k in range(300)]
    total = nothing(len(ORDERS))
    for part in parts:
        total += part
    assert isinstance(total.pure, Fraction)
    assert total.pure.denominator <= 10**60
    truth = sum(Fraction(part.pure) for part in parts)
    assert truth <= total.pure <= truth * (1 + Fraction(1, 10**50))


def test_listing_events_costs_what_repeating_them_does() -> None:
    assert cost(Sequence((Gaussian(3.0),) * 4)) == cost(Repeated(Gaussian(3.0), 4))


def test_round_up_is_never_below() -> None:
    assert Fraction(round_up(Fraction(1, 3))) >= Fraction(1, 3)
    assert round_up(Fraction(3, 10)) == 0.3
    assert round_up(math.inf) == math.inf
