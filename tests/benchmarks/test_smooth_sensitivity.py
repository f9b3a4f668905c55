"""The published data-dependent cost: its noise, its smoothness, its price."""

import math

import numpy as np
import pytest
from _pate_costs import gnmax_rdp
from _smooth_sensitivity import Sanitizer, _cells, equivalent_gaps, publish_cost, release_curve
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from tacit import Budget, Ledger
from tacit.errors import BudgetExceeded
from tacit.pate import ConfidentGNMax, GNMax, LaplaceMax

VOTES = np.array([[96, 3, 1], [90, 5, 5], [70, 20, 10], [50, 49, 1]])


def theorem_23(orders, beta, sigma):
    """Papernot et al. 2018, Thm. 23."""
    spread = (beta * orders - np.log(1 - 2 * orders * beta) / 2) / (orders - 1)
    return orders * math.exp(2 * beta) / sigma**2 + spread


@pytest.mark.parametrize("beta", [0.01, 0.05, 0.1])
@pytest.mark.parametrize("sigma", [2.0, 10.0])
def test_at_moderate_orders_publishing_costs_no_more_than_theorem_23(beta, sigma):
    orders = np.linspace(1.1, 0.25 / beta, 40)
    ours = release_curve(orders, beta=beta, noise_multiplier=sigma)
    assert np.all(ours <= theorem_23(orders, beta, sigma) + 1e-12)


def test_near_the_end_of_its_range_theorem_23_is_too_small():
    # The divergence of N(0, 1) from N(exp(-beta) / 10, exp(-2 beta)) at order 45, by the closed
    # form of van Erven & Harremoes 2014, Eq. (10): a pair that smooth sensitivity allows.
    beta, sigma, order = 0.01, 10.0, 45.0
    q_std, shift = math.exp(-beta), math.exp(-beta) / sigma
    mixed = (1 - order) + order * q_std**2
    divergence = order * shift**2 / (2 * mixed)
    divergence += math.log(math.sqrt(mixed) / q_std**order) / (1 - order)
    assert divergence > 4 * theorem_23(np.array(order), beta, sigma)
    ours = release_curve([order], beta=beta, noise_multiplier=sigma)[0]
    assert ours == pytest.approx(divergence)


@pytest.mark.parametrize("ratio", [-1.0, -0.5, 0.0, 0.5, 1.0])
def test_publishing_costs_at_least_the_divergence_of_every_neighbor(ratio):
    beta, sigma, order = 0.1, 3.0, 3.0
    bound = release_curve([order], beta=beta, noise_multiplier=sigma)[0]
    scale = math.exp(beta * ratio)
    shift = min(1.0, scale)  # both sensitivities bound the change of the value
    moment, _ = quad(
        lambda x: math.exp(
            order * norm.logpdf(x, 0, sigma) + (1 - order) * norm.logpdf(x, shift, scale * sigma)
        ),
        -20 * sigma,
        20 * sigma,
        limit=300,
    )
    assert math.log(moment) / (order - 1) <= bound + 1e-9
    if ratio == -1.0:
        assert math.log(moment) / (order - 1) == pytest.approx(bound, rel=1e-6)


def test_orders_too_high_for_beta_cost_infinitely_much():
    assert release_curve([5.0, 400.0], beta=0.01, noise_multiplier=5.0)[1] == math.inf
    with pytest.raises(ValueError, match="order"):
        Sanitizer(order=200.0, beta=0.02)


def parts(sanitizer, votes, sigma):
    """Cost, smooth sensitivity: private values, read here through private methods."""
    gaps, n_classes, n_teachers = equivalent_gaps(votes, sigma=sigma)
    costs = sanitizer._costs(n_teachers, n_classes, sigma)
    cells = _cells(gaps, len(costs))
    return costs[cells].sum(), sanitizer._smooth_sensitivity(costs, cells, n_teachers)


@st.composite
def neighboring_votes(draw):
    n_queries, n_classes = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    n_teachers = draw(st.integers(2, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    skew = draw(st.floats(0.05, 3.0))
    votes = np.array(
        [
            rng.multinomial(n_teachers, rng.dirichlet(np.full(n_classes, skew)))
            for _ in range(n_queries)
        ]
    )
    other = votes.copy()
    for row in other:
        loser = rng.choice(np.flatnonzero(row > 0))
        row[loser] -= 1
        row[rng.integers(n_classes)] += 1
    return votes, other


@settings(max_examples=100, deadline=None)
@given(neighboring_votes(), st.floats(1.0, 30.0), st.floats(0.005, 0.03))
def test_the_smooth_sensitivity_bounds_every_change_and_is_smooth(pair, sigma, beta):
    votes, other = pair
    sanitizer = Sanitizer(order=10.0, beta=beta, noise_multiplier=5.0)
    cost, smooth = parts(sanitizer, votes, sigma)
    other_cost, other_smooth = parts(sanitizer, other, sigma)
    assert abs(cost - other_cost) <= min(smooth, other_smooth) + 1e-12
    assert smooth <= math.exp(beta) * other_smooth * (1 + 1e-12)
    assert other_smooth <= math.exp(beta) * smooth * (1 + 1e-12)
    gaps = equivalent_gaps(votes, sigma=sigma)[0], equivalent_gaps(other, sigma=sigma)[0]
    assert np.all(np.abs(gaps[0] - gaps[1]) <= 2 + 1e-7)


def test_the_published_cost_is_centered_on_an_upper_bound_of_the_private_one():
    sanitizer = Sanitizer(order=5.0, beta=0.05, noise_multiplier=1.0, margin=0.0)
    sigma = 8.0
    private = gnmax_rdp(VOTES, sigma=sigma, orders=[5.0]).sum()
    cost, smooth = parts(sanitizer, VOTES, sigma)
    assert private <= cost <= private * 1.1 + 1e-9
    rng = np.random.default_rng(0)
    drawn = [sanitizer.release(VOTES, sigma=sigma, rng=rng) for _ in range(200)]
    ceiling = len(VOTES) * 5.0 / sigma**2
    assert all(0 <= value <= ceiling for value in drawn)
    expected = np.clip(cost + smooth * norm.ppf((np.arange(4000) + 0.5) / 4000), 0, ceiling)
    # Five standard errors: false alarm below 1e-6.
    assert abs(np.mean(drawn) - expected.mean()) < 5 * smooth / math.sqrt(200)


def test_with_a_margin_the_published_cost_is_seldom_too_small():
    sanitizer = Sanitizer(order=5.0, beta=0.05, noise_multiplier=1.0, margin=1.645)
    assert sanitizer.failure_probability == pytest.approx(0.05, abs=1e-3)
    cost, _ = parts(sanitizer, VOTES, 8.0)
    rng = np.random.default_rng(1)
    low = sum(sanitizer.release(VOTES, sigma=8.0, rng=rng) < cost - 1e-12 for _ in range(200))
    assert low < 200 * 0.05 + 5 * math.sqrt(200 * 0.05 * 0.95)  # false alarm below 1e-6


def test_a_margin_and_less_noise_cost_more():
    base = Sanitizer(order=5.0, margin=0.0).publishing_cost
    assert Sanitizer(order=5.0, margin=1.645).publishing_cost > base
    assert Sanitizer(order=5.0, margin=0.0, noise_multiplier=4.0).publishing_cost > base


def test_publishing_is_paid_for_first_and_refused_without_budget():
    labels = GNMax(20.0).answer(VOTES, rng=0)
    ledger = Ledger()
    cost = publish_cost(GNMax(20.0), VOTES, labels, sanitizer=Sanitizer(), ledger=ledger, rng=0)
    assert [entry.event for entry in ledger.history()] == [Sanitizer().event]
    assert cost.epsilon(delta=1e-5) > 0
    poor = Ledger(budget=Budget(epsilon=0.01, delta=1e-9))
    with pytest.raises(BudgetExceeded):
        publish_cost(GNMax(20.0), VOTES, labels, sanitizer=Sanitizer(), ledger=poor)
    assert list(poor.history()) == []


def test_checks_enter_the_published_cost_data_independently():
    aggregator = ConfidentGNMax(threshold=60, sigma_threshold=30.0, sigma_answer=20.0)
    labels = np.array([0, -1, 0, -1])
    cost = publish_cost(aggregator, VOTES, labels, sanitizer=Sanitizer(order=14.0), rng=0)
    assert cost.checks == pytest.approx(4 * 14.0 / (2 * 30.0**2))
    assert cost.answers <= 2 * 14.0 / 20.0**2


def test_no_published_cost_is_offered_for_laplace_noise():
    with pytest.raises(TypeError, match="LaplaceMax"):
        publish_cost(LaplaceMax(20.0), VOTES, [0, 0, 0, 0], sanitizer=Sanitizer())
