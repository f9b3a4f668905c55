"""Rényi curves against independent computations, and the conversion to (epsilon, delta)."""

import math
import time
from itertools import pairwise

import mpmath as mp
import numpy as np
import pytest
from scipy import integrate, stats

from tacit.accounting import RDP, Charge, delta_from_rdp, epsilon_from_rdp
from tacit.accounting.rdp.allocation import addition_divergence, removal_divergence
from tacit.accounting.rdp.curves import price
from tacit.errors import UnsupportedEvent
from tacit.events import (
    ApproximateDP,
    BestOf,
    Exponential,
    FixedSizeSampled,
    Gaussian,
    Laplace,
    NonPrivate,
    PoissonSampled,
    PureDP,
    RandomAllocation,
    RandomizedResponse,
    Relation,
    RenyiCurve,
    Repeated,
    Sequence,
    Trials,
    TruncatedPoissonSampled,
)

ORDERS = np.array([1.1, 1.5, 2.0, 3.0, 4.5, 8.0, 20.0])
TIGHT = 1e-8  # above the 1e-9 that RDP adds against rounding


def curve(event, orders=ORDERS, relation=Relation.ADD_REMOVE):
    return RDP().curve(event, orders, relation)


def density_divergence(p, q, order, span=30.0):
    """Rényi divergence of two densities on the line, by adaptive quadrature."""
    value, _ = integrate.quad(
        lambda x: p(x) * (p(x) / q(x)) ** (order - 1) if p(x) > 0 else 0.0,
        -span,
        span,
        points=[-8, -4, -2, -1, 0, 1, 2, 4, 8],
        limit=500,
        epsabs=0,
        epsrel=1e-12,
    )
    return math.log(value) / (order - 1)


@pytest.mark.parametrize("order", [2, 3, 8, 64, 400])
@pytest.mark.parametrize(
    ("rate", "noise"), [(0.01, 4.0), (1e-4, 0.7), (0.5, 0.3), (0.9, 10.0), (1e-9, 1.0), (0.3, 0.05)]
)
def test_sampled_gaussian_equals_the_sum_for_whole_orders(rate, noise, order):
    # Mironov, Talwar & Zhang 2019, Section 3.3, in 50 digits.
    with mp.workdps(50):
        q, s = mp.mpf(rate), 1 / mp.mpf(noise)
        terms = (
            mp.binomial(order, k) * (1 - q) ** (order - k) * q**k * mp.exp(k * (k - 1) * s**2 / 2)
            for k in range(order + 1)
        )
        exact = mp.log(mp.fsum(terms)) / (order - 1)
        found = curve(PoissonSampled(rate, Gaussian(noise)), [float(order)])[0]
        excess = float(found / exact - 1)
    assert 0 <= excess < 1e-5


@pytest.mark.parametrize(
    ("rate", "noise", "order"),
    [(0.01, 4.0, 1.1), (0.01, 1.0, 2.5), (1e-5, 0.5, 1.01), (0.3, 0.3, 1.7), (1e-9, 1.0, 5.5)],
)
def test_sampled_gaussian_equals_the_integral_for_fractional_orders(rate, noise, order):
    with mp.workdps(40):
        q, s, a = mp.mpf(rate), 1 / mp.mpf(noise), mp.mpf(order)

        def integrand(z):
            excess = q * mp.expm1(s * z - s * s / 2)
            return mp.npdf(z) * ((1 + excess) ** a - 1 - a * excess)

        knots = [-15, -8, -4, -2, 0, 2, 4, 6, 8, 12, 16, 24, 40]
        exact = mp.log1p(mp.quad(integrand, knots)) / (a - 1)
        found = curve(PoissonSampled(rate, Gaussian(noise)), [order])[0]
        excess = float(found / exact - 1)
    assert 0 <= excess < TIGHT


def test_sampled_gaussian_never_falls_with_the_order_whatever_the_method():
    for noise in (1.0, 10.0, 300.0):
        orders = 1 + np.geomspace(1e-2, 1e6, 800)
        values = curve(PoissonSampled(0.01, Gaussian(noise)), orders)
        assert np.all(np.diff(values) >= -1e-12 * values[1:])


def test_removal_is_the_worse_direction_of_a_sampled_gaussian():
    # Mironov, Talwar & Zhang 2019, Theorem 5, on instances.
    for rate, noise in [(0.05, 0.8), (0.4, 2.0)]:
        plain, mixed = _mixture(0, noise), _mixture(rate, noise)
        values = curve(PoissonSampled(rate, Gaussian(noise)))
        for order, value in zip(ORDERS[:5], values, strict=False):
            assert density_divergence(plain, mixed, order) <= value * (1 + TIGHT)


@pytest.mark.parametrize(("rate", "noise"), [(0.05, 0.8), (0.4, 2.0), (0.9, 1.0)])
def test_replacing_in_a_poisson_sample_equals_the_integral(rate, noise):
    up, down = _mixture(rate, noise), _mixture(rate, noise, -1.0)
    event = PoissonSampled(rate, Gaussian(noise))
    values = curve(event, relation=Relation.REPLACE_ONE)
    for order, value in zip(ORDERS[:6], values, strict=False):
        exact = density_divergence(up, down, order)
        assert exact * (1 - 1e-9) <= value <= exact * (1 + 1e-7) + 1e-12


def test_replacing_costs_more_than_adding_unless_the_mechanism_says_otherwise():
    for event in (Gaussian(2.0), Laplace(2.0), PureDP(0.5), Exponential(0.5)):
        assert np.all(curve(event, relation=Relation.REPLACE_ONE) > curve(event))
        same = type(event)(2.0 if hasattr(event, "noise_multiplier") else 0.5, replace_factor=1.0)
        assert curve(same, relation=Relation.REPLACE_ONE) == pytest.approx(curve(event))
    assert curve(Gaussian(2.0), relation=Relation.REPLACE_ONE) == pytest.approx(
        4 * curve(Gaussian(2.0))
    )


@pytest.mark.parametrize("fraction", [0.02, 0.3])
def test_fixed_size_bounds_every_mixture_of_replaced_gaussians(fraction):
    noise = 1.5
    event = FixedSizeSampled(round(fraction * 1000), 1000, Gaussian(noise))
    values = curve(event, relation=Relation.REPLACE_ONE)
    for old, new in [(2.0, 0.0), (0.0, 2.0), (1.0, -1.0), (2.0, 1.0), (1.0, 2.0)]:
        p, q = _mixture(fraction, noise, old), _mixture(fraction, noise, new)
        for order, value in zip(ORDERS[:6], values, strict=False):
            assert density_divergence(p, q, order) <= value * (1 + 1e-9)


def test_fixed_size_is_tighter_than_the_bound_of_wang_balle_and_kasiviswanathan():
    # Wang, Balle & Kasiviswanathan 2019, Theorem 9, with no bound at order infinity.
    noise, fraction = 2.0, 0.05
    event = FixedSizeSampled(50, 1000, Gaussian(noise, replace_factor=1.0))
    for order in (2, 3, 6, 12):

        def rdp(j):
            return j / (2 * noise**2)

        total = 1 + fraction**2 * math.comb(order, 2) * min(
            4 * math.expm1(rdp(2)), 2 * math.exp(rdp(2))
        )
        total += sum(
            2 * fraction**j * math.comb(order, j) * math.exp((j - 1) * rdp(j))
            for j in range(3, order + 1)
        )
        bound = math.log(total) / (order - 1)
        found = curve(event, [float(order)], Relation.REPLACE_ONE)[0]
        assert found <= bound


def test_a_record_joins_a_sample_of_fixed_size_by_replacing_another():
    event = FixedSizeSampled(10, 100, Gaussian(2.0))
    added = RDP().epsilon(event, delta=1e-5)
    assert added == RDP().epsilon(PoissonSampled(0.1, Gaussian(1.0)), delta=1e-5)
    with pytest.raises(UnsupportedEvent, match="replace_one"):
        RDP().epsilon(FixedSizeSampled(10, 100, Laplace(2.0)), delta=1e-5)
    blanked = RDP().epsilon(event, delta=1e-5, relation=Relation.ZERO_OUT)
    assert blanked == RDP().epsilon(event, delta=1e-5, relation=Relation.REPLACE_ONE)


@pytest.mark.parametrize("relation", list(Relation))
def test_truncation_costs_more_than_plain_poisson_and_fades(relation):
    plain = curve(PoissonSampled(0.1, Gaussian(2.0)), relation=relation)
    costs = [
        curve(TruncatedPoissonSampled(0.1, most, 1000, Gaussian(2.0)), relation=relation)
        for most in (110, 150, 250)
    ]
    for more, less in pairwise(costs):
        assert np.all(more >= less)
    assert np.all(costs[-1] >= plain * (1 - 1e-14))  # equal up to rounding where it fades
    assert costs[-1][:6] == pytest.approx(plain[:6], rel=1e-3)


def test_truncation_bounds_a_tiny_case_computed_exactly():
    # Two records at rate q, at most one kept; the private one moves the mean by 1, the other by -1.
    rate, noise = 0.3, 1.3
    both = rate * rate / 2  # both drawn, one of them kept
    with_it = [
        (0.0, (1 - rate) ** 2),
        (1.0, rate * (1 - rate) + both),
        (-1.0, rate * (1 - rate) + both),
    ]
    without = [(0.0, 1 - rate), (-1.0, rate)]
    p, q = _normal_mixture(with_it, noise), _normal_mixture(without, noise)
    values = curve(TruncatedPoissonSampled(rate, 1, 2, Gaussian(noise)))
    for order, value in zip(ORDERS, values, strict=True):
        assert density_divergence(p, q, order) <= value
        assert density_divergence(q, p, order) <= value


def test_a_cap_reached_by_the_larger_neighbor_alone_is_priced():
    # One record at +1, the private one at -1 may take its place.
    rate, noise = 0.5, 1.0
    here = rate * (1 - rate) + rate * rate / 2
    p = _normal_mixture([(0.0, (1 - rate) ** 2), (1.0, here), (-1.0, here)], noise)
    q = _normal_mixture([(0.0, 1 - rate), (1.0, rate)], noise)
    values = curve(TruncatedPoissonSampled(rate, 1, 1, Gaussian(noise)))
    for order, value in zip(ORDERS, values, strict=True):
        assert density_divergence(p, q, order) <= value


def test_truncation_never_costs_less_than_poisson_when_replacing_is_cheap():
    # Almost every draw is cut, yet not all: an uncut one may not be forgotten.
    event = TruncatedPoissonSampled(0.5, 1, 31, Gaussian(0.5, replace_factor=1.0))
    plain = curve(PoissonSampled(0.5, Gaussian(0.5, 1.0)), relation=Relation.REPLACE_ONE)
    assert np.all(curve(event, relation=Relation.REPLACE_ONE) >= plain * (1 - TIGHT))


@pytest.mark.parametrize("noise", [1.1, 2.0, 6.0])
def test_allocation_to_two_steps_equals_the_integral_in_both_directions(noise):
    nodes, weights = np.polynomial.hermite_e.hermegauss(150)
    x = np.exp(nodes / noise - 0.5 / noise**2)
    mean = (x[:, None] + x) / 2
    weight = np.outer(weights, weights) / (2 * math.pi)
    orders = np.array([2.0, 3.0, 5.0])
    removal = [math.log((weight * mean**a).sum()) / (a - 1) for a in orders]
    addition = [math.log((weight * mean ** (1 - a)).sum()) / (a - 1) for a in orders]
    found = removal_divergence(orders, steps=2, shift=1 / noise)
    assert found == pytest.approx(removal, rel=1e-7)
    found = addition_divergence(orders, steps=2, shift=1 / noise)
    assert found == pytest.approx(addition, rel=1e-7)
    # Replacing: the old record moves one of the two steps by +1, the new one moves one by -1.
    y = np.exp(-nodes / noise - 0.5 / noise**2)
    other = (y[:, None] + y) / 2
    values = curve(RandomAllocation(2, Gaussian(noise)), orders, Relation.REPLACE_ONE)
    for order, value in zip(orders, values, strict=True):
        exact = math.log((weight * mean**order * other ** (1 - order)).sum()) / (order - 1)
        assert exact <= value


@pytest.mark.parametrize(("steps", "noise"), [(10, 1.0), (50, 2.0), (400, 0.9)])
def test_allocation_is_not_below_what_sampling_shows(steps, noise):
    # Monte Carlo with a fixed seed; 5 standard errors, so a false alarm in 1 of 10^6 checks.
    rng = np.random.default_rng(20260729)
    z = rng.standard_normal((4_000_000 // steps, steps), dtype=np.float32)
    mean = np.exp(z / noise - 0.5 / noise**2).astype(np.float64).mean(axis=1)
    orders = np.array([1.5, 2.0, 2.5])
    values = curve(RandomAllocation(steps, Gaussian(noise)), orders)
    for order, value in zip(orders, values, strict=True):
        for power in (order, 1 - order):
            draws = mean**power
            low = draws.mean() - 5 * draws.std() / math.sqrt(len(draws))
            assert math.log(low) / (order - 1) <= value


def test_allocation_costs_no_more_than_its_steps_sampled_at_that_rate():
    steps = 100
    event = RandomAllocation(steps, Gaussian(1.2))
    whole = np.arange(2.0, 300.0)
    poisson = steps * curve(PoissonSampled(1 / steps, Gaussian(1.2)), whole)
    assert np.all(curve(event, whole) <= poisson * (1 + TIGHT))
    assert np.all(curve(event, whole) <= curve(Gaussian(1.2), whole) * (1 + TIGHT))


def test_allocation_of_other_noise_costs_its_one_release():
    for inner in (PureDP(0.3), Laplace(2.0), ApproximateDP(0.2, 1e-8)):
        found = RDP().charge(RandomAllocation(7, inner), ORDERS)
        one = RDP().charge(inner, ORDERS)
        assert found.values == pytest.approx(one.values)
        assert found.delta_mass == one.delta_mass


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 3.0])
def test_exponential_mechanism_is_the_worst_loss_of_bounded_range(epsilon):
    s = np.linspace(0, epsilon, 20_001)
    weight = (np.exp(-s) - math.exp(-epsilon)) / -math.expm1(-epsilon)
    values = curve(Exponential(epsilon))
    for order, value in zip(ORDERS, values, strict=True):
        moments = weight * np.exp(order * s) + (1 - weight) * np.exp(order * (s - epsilon))
        worst = math.log(moments.max()) / (order - 1)
        assert worst * (1 - 1e-6) <= value
        assert value <= worst * (1 + 1e-3) + 1e-12
        assert value <= order * epsilon**2 / 8 * (1 + TIGHT)


def test_laplace_equals_its_integral_and_its_sampled_pair_bounds_it():
    scale, rate = 1.7, 0.2
    law = stats.laplace(scale=scale)

    def moment(order, mixed, reverse):
        def term(x):
            p, q = law.pdf(x - 1), law.pdf(x)
            if mixed:
                p = (1 - rate) * q + rate * p
            p, q = (q, p) if reverse else (p, q)
            return p**order * q ** (1 - order)

        pieces = [(-60, 0), (0, 1), (1, 60)]
        return math.fsum(integrate.quad(term, *piece, epsrel=1e-11)[0] for piece in pieces)

    plain, sampled = curve(Laplace(scale)), curve(PoissonSampled(rate, Laplace(scale)))
    for order, one, other in zip(ORDERS[:6], plain, sampled, strict=False):
        assert one == pytest.approx(math.log(moment(order, False, False)) / (order - 1), rel=1e-7)
        worse = max(math.log(moment(order, True, reverse)) for reverse in (False, True))
        assert worse / (order - 1) <= other <= worse / (order - 1) * (1 + 1e-4)


def test_randomized_response_equals_its_sum():
    p, k = 0.3, 5
    truth, other = 1 - p + p / k, p / k
    values = curve(RandomizedResponse(p, k))
    for order, value in zip(ORDERS, values, strict=True):
        moment = truth**order * other ** (1 - order) + other**order * truth ** (1 - order)
        assert value == pytest.approx(math.log(moment + (k - 2) * other) / (order - 1), rel=1e-8)


def test_sampling_pure_dp_is_at_most_its_diluted_epsilon():
    for relation, most in [
        (Relation.ADD_REMOVE, math.log1p(0.1 * math.expm1(0.8))),
        (
            Relation.REPLACE_ONE,
            math.log1p(0.1 * math.expm1(0.8)) - math.log1p(0.1 * math.expm1(-0.8)),
        ),
    ]:
        values = curve(PoissonSampled(0.1, PureDP(0.8)), relation=relation)
        assert np.all(values <= most * (1 + TIGHT))
        far = curve(PoissonSampled(0.1, PureDP(0.8)), [1e7], relation)[0]
        assert far == pytest.approx(most, rel=1e-5)


def test_rényi_curve_is_bounded_between_its_orders_and_infinite_beyond():
    true = Gaussian(2.0)
    known = (2.0, 4.0, 8.0)
    event = RenyiCurve(known, tuple(curve(true, known)))
    asked = np.array([1.2, 2.0, 3.0, 4.0, 6.0, 8.0])
    assert np.all(curve(event, asked) >= curve(true, asked))
    assert curve(event, known) == pytest.approx(curve(true, known), rel=1e-8)
    assert curve(event, [8.5])[0] == math.inf
    with pytest.raises(UnsupportedEvent, match="replaced"):
        curve(event, relation=Relation.REPLACE_ONE)
    best = min(
        curve(true, [order])[0] + math.log1p(-1 / order) - math.log(1e-5 * order) / (order - 1)
        for order in known
    )
    assert RDP().epsilon(event, delta=1e-5) <= best * (1 + TIGHT)


def test_approximate_dp_keeps_its_delta_apart():
    event = Repeated(ApproximateDP(0.1, 1e-7), 20)
    charge = RDP().charge(event, ORDERS)
    assert isinstance(charge, Charge)
    assert charge.delta_mass == pytest.approx(-math.expm1(20 * math.log1p(-1e-7)))
    with pytest.raises(UnsupportedEvent, match="charge"):
        curve(event)
    assert RDP().epsilon(event, delta=1e-6) == math.inf
    assert 0 < RDP().epsilon(event, delta=1e-5) <= 2.0 * (1 + TIGHT)
    assert RDP().delta(event, epsilon=5.0) == pytest.approx(charge.delta_mass, rel=1e-6)


def test_selection_costs_at_most_the_known_multiple_of_pure_dp():
    # Liu & Talwar 2019; Papernot & Steinke 2022: (2 + shape) epsilon in the limit of large orders.
    for trials, factor in [(Trials.LOGARITHMIC, 2), (Trials.GEOMETRIC, 3)]:
        event = BestOf(PureDP(0.1), 20.0, trials)
        assert RDP().curve(event, [1e6])[0] == pytest.approx(factor * 0.1, rel=1e-2)
    base = Repeated(PoissonSampled(0.01, Gaussian(2.0)), 500)
    one = RDP().epsilon(base, delta=1e-5)
    for trials in (Trials.GEOMETRIC, Trials.LOGARITHMIC, Trials.POISSON):
        costs = [
            RDP().epsilon(BestOf(base, mean, trials), delta=1e-5) for mean in (2.0, 10.0, 50.0)
        ]
        assert one < costs[0] < costs[1] < costs[2]
    with pytest.raises(UnsupportedEvent):
        RDP().epsilon(BestOf(ApproximateDP(0.1, 1e-9), 5.0), delta=1e-5)


def test_selection_among_few_runs_is_not_below_a_simulated_attack():
    # Best of K runs, K geometric: for pure DP the true divergence is known to exceed one run's.
    event = BestOf(PureDP(0.5), 3.0, Trials.GEOMETRIC)
    high, low = 1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(0.5))

    def law(p):
        # P(best is 0) when a run is 1 with probability p and 1 is better: all runs are 0.
        halt = 1 / 3
        none = halt * (1 - p) / (1 - (1 - halt) * (1 - p))
        return np.array([none, 1 - none])

    p, q = law(high), law(low)
    for order, value in zip(ORDERS, RDP().curve(event, ORDERS), strict=True):
        for a, b in ((p, q), (q, p)):
            assert math.log((a**order * b ** (1 - order)).sum()) / (order - 1) <= value


def test_conversion_is_that_of_canonne_kamath_and_steinke():
    orders, values = np.array([2.0, 8.0, 32.0]), np.array([0.1, 0.4, 1.6])
    by_hand = min(
        v + math.log1p(-1 / a) - (math.log(1e-5) + math.log(a)) / (a - 1)
        for a, v in zip(orders, values, strict=True)
    )
    assert epsilon_from_rdp(values, orders, delta=1e-5) == pytest.approx(by_hand)
    assert delta_from_rdp(values, orders, epsilon=by_hand) == pytest.approx(1e-5)
    assert epsilon_from_rdp([1e-12], [2.0], delta=1e-5) == 0.0  # the total variation is below delta


def test_epsilon_and_delta_invert_each_other():
    for event in (
        Repeated(PoissonSampled(0.02, Gaussian(1.5)), 700),
        RandomAllocation(10, Gaussian(1000.0)),  # the best order is in the tens of thousands
        Gaussian(0.05),  # and here close to 1
    ):
        for delta in (1e-6, 1e-12):
            epsilon = RDP().epsilon(event, delta=delta)
            assert RDP().delta(event, epsilon=epsilon) == pytest.approx(delta, rel=1e-2)


def test_given_orders_are_used_alone_and_cannot_beat_the_search():
    event = Repeated(PoissonSampled(0.01, Gaussian(4.0)), 10_000)
    few = RDP(orders=(2.0, 16.0)).epsilon(event, delta=1e-5)
    many = RDP(orders=tuple(np.arange(2.0, 64.0))).epsilon(event, delta=1e-5)
    free = RDP().epsilon(event, delta=1e-5)
    assert free <= many < few
    assert free == pytest.approx(many, rel=2e-4)


def test_the_search_finds_the_best_order_near_one_and_far_above():
    for noise, count in [(0.02, 1), (0.3, 50), (1.0, 1), (300.0, 3), (1e5, 10)]:
        event = Repeated(Gaussian(noise), count)
        orders = 1 + np.geomspace(1e-4, 1e8, 200_000)
        best = epsilon_from_rdp(count * orders / (2 * noise**2), orders, delta=1e-7)
        assert RDP().epsilon(event, delta=1e-7) == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("noise", [1e-3, 0.1, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("rate", [1e-9, 0.01, 0.999])
def test_extreme_noise_and_rates_get_a_sound_number(rate, noise):
    for relation in Relation:
        event = PoissonSampled(rate, Gaussian(noise))
        sampled = RDP().epsilon(event, delta=1e-6, relation=relation)
        plain = RDP().epsilon(Gaussian(noise), delta=1e-6, relation=relation)
        assert 0 <= sampled <= plain * (1 + 1e-6)
        assert RDP().epsilon(Repeated(event, 10**9), delta=1e-6, relation=relation) >= sampled


def test_counts_of_zero_and_a_billion():
    step = PoissonSampled(1e-3, Gaussian(2.0))
    assert RDP().epsilon(Repeated(step, 0), delta=1e-5) == 0
    assert RDP().delta(Repeated(step, 0), epsilon=0.0) == 0
    assert RDP().epsilon(Sequence(()), delta=1e-5) == 0
    assert math.isfinite(RDP().epsilon(Repeated(step, 10**9), delta=1e-5))
    assert RDP().epsilon(NonPrivate(), delta=1e-5) == math.inf
    assert RDP().delta(NonPrivate(), epsilon=10.0) == 1.0


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan, math.inf])
def test_delta_outside_the_unit_interval_is_refused(delta):
    with pytest.raises(ValueError, match="delta must be in"):
        RDP().epsilon(Gaussian(1.0), delta=delta)


@pytest.mark.parametrize("orders", [[1.0], [0.5, 2.0], [math.nan], [math.inf], [[2.0, 3.0]]])
def test_orders_must_be_finite_and_above_one(orders):
    with pytest.raises(ValueError, match="orders must be"):
        RDP().curve(Gaussian(1.0), orders)


def test_a_rule_prices_one_occurrence_only():
    one = price(Gaussian(3.0), ORDERS, Relation.ADD_REMOVE).values
    assert curve(Repeated(Gaussian(3.0), 7)) == pytest.approx(7 * one)


def test_pricing_a_training_run_takes_a_few_milliseconds():
    event = Repeated(PoissonSampled(0.01, Gaussian(4.0)), 10_000)
    RDP().epsilon(event, delta=1e-5)
    times = []
    for _ in range(5):
        start = time.process_time()
        RDP().epsilon(event, delta=1e-5)
        times.append(time.process_time() - start)
    assert min(times) < 0.005  # 0.7 ms when measured alone; Opacus 1.6 takes 22 ms


def _mixture(rate, noise, shift=1.0):
    return _normal_mixture([(0.0, 1 - rate), (shift, rate)], noise)


def _normal_mixture(parts, noise):
    unit = 1 / (noise * math.sqrt(2 * math.pi))

    def density(x):
        return unit * math.fsum(
            w * math.exp(-((x - m) ** 2) / (2 * noise**2)) for m, w in parts if w
        )

    return density
