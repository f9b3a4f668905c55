"""Prices for persons with several records."""

import math

import numpy as np
import pytest
from scipy import integrate
from scipy.stats import binom, norm

from tacit import accounting
from tacit import events as ev
from tacit.accounting import for_group, group_epsilon, group_price
from tacit.accounting.groups import _by_chain
from tacit.errors import UnsupportedEvent

RUN = ev.Repeated(ev.PoissonSampled(0.01, ev.Gaussian(1.0)), 1000)


@pytest.mark.parametrize(("records", "golden"), [(1, 1.83), (4, 8.9), (10, 27.9)])
def test_golden_prices_of_persons(records, golden):
    found = group_epsilon(RUN, records=records, delta=1e-5)
    assert found == pytest.approx(golden, abs=0.006 if records == 1 else 0.06)


@pytest.mark.parametrize("records", [2, 3, 7])
def test_one_sampled_release_is_the_mixture(records):
    rate, noise = 0.2, 1.3
    event = ev.PoissonSampled(rate, ev.Gaussian(noise))
    epsilon = group_epsilon(event, records=records, delta=1e-4)
    t = np.linspace(-12, 12 + records, 200_001)
    counts = np.arange(records + 1)
    with_person = binom.pmf(counts, records, rate) @ norm.pdf(t, counts[:, None], noise)
    without = norm.pdf(t, 0, noise)
    found = max(
        integrate.trapezoid(np.maximum(a - math.exp(epsilon) * b, 0), t)
        for a, b in ((with_person, without), (without, with_person))
    )
    assert found == pytest.approx(1e-4, rel=1e-3)


def test_several_releases_on_one_sample_are_one_gaussian():
    both = ev.PoissonSampled(0.1, ev.Sequence((ev.Gaussian(2.0), ev.Gaussian(3.0))))
    one = ev.PoissonSampled(0.1, ev.Gaussian(1 / math.sqrt(1 / 4 + 1 / 9)))
    for records in (2, 5):
        prices = [group_epsilon(e, records=records, delta=1e-6) for e in (both, one)]
        assert prices[0] == pytest.approx(prices[1], rel=1e-6)


@pytest.mark.parametrize(
    "event",
    [
        ev.Gaussian(3.0),
        ev.Laplace(5.0),
        ev.PureDP(0.2),
        ev.Exponential(0.3),
        ev.DiscreteGaussian(4.0),
        ev.DiscreteLaplace(6.0),
        ev.ZeroConcentratedDP(0.01),
        ev.TreeAggregation(5.0, 100),
        ev.BandedGaussian(5.0, (0.8, 0.6), 100, 50),
        ev.PoissonSampled(0.05, ev.Laplace(2.0)),
        ev.ApproximateDP(0.1, 1e-9),
        ev.RandomizedResponse(0.8, 3),
        ev.ChosenOf((ev.PureDP(0.1), ev.PureDP(0.2))),
        ev.Sequence((ev.Gaussian(4.0), ev.PoissonSampled(0.1, ev.Gaussian(2.0)))),
    ],
    ids=str,
)
def test_exact_prices_grow_with_the_records_and_are_below_the_chain(event):
    prices = [group_epsilon(event, records=k, delta=1e-5) for k in (1, 2, 4)]
    chain = [_by_chain(event, k, 1e-5, ev.Relation.ADD_REMOVE) for k in (2, 4)]
    assert prices[0] < prices[1] < prices[2]
    assert all(a <= b * (1 + 1e-9) for a, b in zip(prices[1:], chain, strict=True))


def test_other_events_are_priced_by_a_chain_of_neighbors():
    event = ev.BandedGaussian(9.0, (0.8, 0.6), 40, 4, None, 0.1)
    with pytest.raises(UnsupportedEvent, match="groups"):
        for_group(event, 3)
    one, three = (group_epsilon(event, records=k, delta=1e-6) for k in (1, 3))
    assert three > 3 * one
    step = three / 3
    delta = accounting.delta(event, epsilon=step)
    assert delta * math.expm1(three) / math.expm1(step) <= 1e-6


def test_some_of_a_group_are_in_a_sample_of_fixed_size():
    event = ev.FixedSizeSampled(10, 1000, ev.Gaussian(6.0))
    mixture = for_group(event, 2)
    assert mixture.weights == pytest.approx((990 * 989 / 999e3, 2 * 10 * 990 / 999e3, 90 / 999e3))
    assert mixture.noise_multiplier == pytest.approx(3.0)  # a record takes the place of another
    poisson = ev.PoissonSampled(0.01, ev.Gaussian(3.0))
    exact = group_epsilon(event, records=2, delta=1e-6)
    assert exact == pytest.approx(group_epsilon(poisson, records=2, delta=1e-6), rel=0.01)
    assert exact < _by_chain(event, 2, 1e-6, ev.Relation.ADD_REMOVE)


def test_a_group_chooses_among_releases_for_groups():
    one, three = ev.Gaussian(9.0), ev.Gaussian(3.0)
    for make in (lambda e: ev.BestOf(e, 3.0), lambda e: ev.OneOf((e, e), (0.5, 0.5))):
        assert for_group(make(one), 3) == make(three)


def test_a_group_may_be_cut_out_of_a_truncated_sample():
    whole = ev.PoissonSampled(0.1, ev.Gaussian(2.0))
    cut = ev.TruncatedPoissonSampled(0.1, 12, 100, ev.Gaussian(2.0))
    mixed = for_group(cut, 2)
    room, no_room = mixed.parts
    assert room == for_group(whole, 2)
    assert no_room.noise_multiplier == pytest.approx(1.0)  # a record takes the place of another
    assert mixed.weights[1] == pytest.approx(binom.sf(10, 100, 0.1))
    for k in (1, 2):  # between a sample that is not cut, and the dearest case always
        prices = [group_epsilon(e, records=k, delta=1e-5) for e in (whole, cut)]
        assert prices[0] < prices[1]
    assert group_price(cut, records=2, delta=1e-5).is_exact is False
    rarely = ev.TruncatedPoissonSampled(0.1, 60, 100, ev.Gaussian(2.0))
    found = group_price(rarely, records=2, delta=1e-5)
    assert found.is_exact
    assert found.epsilon == pytest.approx(group_epsilon(whole, records=2, delta=1e-5), rel=1e-3)
    assert for_group(ev.TruncatedPoissonSampled(0.1, 2, 100, ev.Gaussian(2.0)), 3).weights[1] == 1


def test_a_group_is_allocated_to_one_step_or_to_several():
    mixed = for_group(ev.RandomAllocation(10, ev.Gaussian(6.0)), 3)
    assert mixed.weights == pytest.approx((1 / 100, 27 / 100, 72 / 100))  # 3, 2 + 1, 1 + 1 + 1
    assert mixed.parts[0].parts[0].event == ev.RandomAllocation(10, ev.Gaussian(2.0 * (1 - 1e-12)))
    assert mixed.parts[1].parts[0].event.steps == 5
    assert for_group(ev.RandomAllocation(10, ev.Gaussian(1.0)), 1000).noise_multiplier < 1e-3


@pytest.mark.slow  # prices 42 kinds of allocation
def test_ten_records_that_are_allocated_have_a_finite_price():
    run = ev.Repeated(ev.RandomAllocation(100, ev.Gaussian(1.0)), 10)
    found = group_price(run, records=10, delta=1e-5)
    assert _by_chain(run, 10, 1e-5, ev.Relation.ADD_REMOVE) == math.inf
    poisson = ev.Repeated(ev.PoissonSampled(0.01, ev.Gaussian(1.0)), 1000)
    assert group_epsilon(poisson, records=10, delta=1e-5) < found.epsilon < 50
    assert not found.is_exact


def test_the_bound_of_an_allocated_group_holds():
    """One epoch of two steps with two records: P is known, and the bound is above its delta."""
    noise, epsilon = 2.0, 1.5
    x = np.linspace(-16, 20, 2001)
    density = [norm.pdf(x, shift, noise) for shift in (0, 1, 2)]
    q = np.multiply.outer(density[0], density[0])
    one_each = np.multiply.outer(density[1], density[1])
    together = np.multiply.outer(density[2], density[0])
    p = 0.5 * one_each + 0.25 * (together + together.T)
    cell = (x[1] - x[0]) ** 2
    truth = max(np.maximum(a - math.exp(epsilon) * b, 0).sum() * cell for a, b in ((p, q), (q, p)))
    of_group = for_group(ev.RandomAllocation(2, ev.Gaussian(noise)), 2)
    assert truth <= accounting.RDP().delta(of_group, epsilon=epsilon)


@pytest.mark.slow  # the profile of a mixture of Gaussians
def test_the_best_of_runs_costs_a_group_more_than_one_of_them():
    best = ev.BestOf(ev.Repeated(ev.PoissonSampled(0.05, ev.Gaussian(2.0)), 20), 3.0)
    one, two = (group_epsilon(best, records=k, delta=1e-5) for k in (1, 2))
    run = group_epsilon(best.event, records=2, delta=1e-5)
    assert max(2 * one, run) < two < 2 * run
    bracket = accounting.bracket(for_group(best, 2), delta=1e-5)
    assert bracket.lower <= bracket.upper == pytest.approx(two)


def test_groups_of_thousands_have_a_price():
    step = ev.PoissonSampled(0.5, ev.Gaussian(1e4))
    found = group_price(step, records=5000, delta=1e-5)
    assert 0 < found.epsilon < math.inf
    assert not found.is_exact


def test_a_curve_of_divergences_is_tripled_at_half_the_order():
    curve = ev.RenyiCurve((2.0, 8.0, 16.0), (0.1, 0.4, 0.8))
    assert for_group(curve, 2) == ev.RenyiCurve((4.0, 8.0), (0.4 * 3, 0.8 * 3))
    assert for_group(curve, 3).orders == (2.0, 4.0)
    with pytest.raises(UnsupportedEvent, match="9 records"):
        for_group(curve, 9)


def test_replacing_several_records_of_a_sum_is_priced_exactly():
    relation = ev.Relation.REPLACE_ONE
    found = group_epsilon(ev.Gaussian(30.0), records=3, delta=1e-5, relation=relation)
    assert found == accounting.epsilon(ev.Gaussian(10.0), delta=1e-5, relation=relation)
    sampled = ev.PoissonSampled(0.1, ev.Gaussian(30.0))  # by a chain
    step = group_epsilon(sampled, records=3, delta=1e-5, relation=relation) / 3
    assert accounting.delta(sampled, epsilon=step, relation=relation) < 1e-5


def test_what_cannot_be_bounded_is_infinite():
    assert group_epsilon(ev.NonPrivate(), records=3, delta=1e-5) == math.inf


@pytest.mark.parametrize(("records", "published"), [(1, 1.828), (4, 8.899), (10, 27.900)])
def test_the_price_of_a_user_is_that_of_dp_accounting(records, published):
    # Computed with dp_accounting 0.6.0, from_mixture_gaussian_mechanism: grid 1e-4 for one record,
    # 1e-3 for others, pessimistic.
    run = ev.Repeated(ev.PoissonSampled(0.01, ev.Gaussian(1.0)), 1000)
    assert group_epsilon(run, records=records, delta=1e-5) == pytest.approx(published, abs=1e-3)
