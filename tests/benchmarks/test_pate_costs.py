"""Golden numbers of the published analysis, and the properties it rests on."""

import json
import math
import pickle
from itertools import pairwise

import numpy as np
import pytest
from _pate_costs import (
    ORDERS,
    PrivateCurve,
    gnmax_rdp,
    gnmax_rdp_exact,
    laplace_max_rdp,
    log_pass_probability,
    log_wrong_winner,
    private_cost,
    rdp_from_log_q,
    threshold_rdp,
    threshold_rdp_exact,
    winner_log_probabilities,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from tacit.pate import ConfidentGNMax, GNMax, LaplaceMax
from tacit.pate.votes import as_votes


def spread_votes(top, n_teachers=250, n_classes=10):
    """One row: `top` votes for the last class, the rest spread evenly."""
    rest = n_teachers - top
    row = np.full(n_classes, rest // (n_classes - 1))
    row[: rest % (n_classes - 1)] += 1
    row[-1] = top
    return row[None, :]


def epsilon_2018(curve, delta):
    """The conversion of Mironov 2017, Prop. 3, that the papers used."""
    return float(np.min(curve + math.log(1 / delta) / (ORDERS - 1)))


# 640 queries, threshold 200, sigma_1 150, sigma_2 40, delta 1e-5: share answered, epsilon by
# today's conversion and by that of 2018, worked out independently of this code.
CONFIDENT = [(250, 0.63, 0.69, 0.87), (200, 0.50, 1.15, 1.39), (180, 0.447, 1.82, 2.10)]


@pytest.mark.parametrize(("top", "share", "epsilon", "old"), CONFIDENT)
def test_confident_gnmax_costs_what_was_worked_out_elsewhere(top, share, epsilon, old):
    votes = spread_votes(top)
    highest = votes.max(axis=1)
    passed = math.exp(log_pass_probability(highest, threshold=200, sigma=150)[0])
    check = threshold_rdp(highest, threshold=200, sigma=150)[0]
    curve = 640 * (check + passed * gnmax_rdp(votes, sigma=40)[0])
    assert passed == pytest.approx(share, abs=0.005)
    assert PrivateCurve(ORDERS, curve).private_epsilon(delta=1e-5) == pytest.approx(
        epsilon, abs=0.006
    )
    assert epsilon_2018(curve, 1e-5) == pytest.approx(old, abs=0.006)


def test_data_independent_laplace_max_costs_what_was_worked_out_elsewhere():
    # A tie: the data-dependent bound has nothing to add. 100 answers at scale 20, delta 1e-5.
    curve = 100 * laplace_max_rdp([[125, 125]], scale=20.0)[0]
    assert PrivateCurve(ORDERS, curve).private_epsilon(delta=1e-5) == pytest.approx(4.73, abs=0.006)
    assert epsilon_2018(curve, 1e-5) == pytest.approx(5.30, abs=0.006)


def test_q_bounds_the_chance_of_a_wrong_winner():
    # 200,000 draws each; an estimate passes q + 5 standard errors by chance with p < 3e-7.
    rng = np.random.default_rng(0)
    for row in ([120, 80, 50], [100, 90, 60, 0], [230, 10, 5, 5], [63, 62, 62, 63]):
        q = math.exp(log_wrong_winner([row], sigma=40.0)[0])
        noisy = np.array(row) + rng.normal(0, 40.0, (200_000, len(row)))
        wrong = np.mean(noisy.argmax(axis=1) != np.argmax(row))
        assert wrong <= q + 5 * math.sqrt(q * (1 - q) / 200_000)


def test_q_of_the_laplace_bound_holds_too():
    # The bound is used inside laplace_max_rdp; 2017, Lemma 4: sum of (2 + g) / (4 exp(g)).
    rng = np.random.default_rng(1)
    for row in ([120, 60, 20], [150, 50], [90, 80, 30]):
        gaps = (max(row) - np.sort(row)[:-1]) / 20
        q = float(np.sum((2 + gaps) / (4 * np.exp(gaps))))
        noisy = np.array(row) + rng.laplace(0, 20.0, (200_000, len(row)))
        wrong = np.mean(noisy.argmax(axis=1) != np.argmax(row))
        assert wrong <= q + 5 * math.sqrt(max(q * (1 - q), 0.01) / 200_000)


@st.composite
def vote_rows(draw):
    n_classes = draw(st.integers(2, 6))
    return [draw(st.lists(st.integers(0, 200), min_size=n_classes, max_size=n_classes))]


@settings(max_examples=60, deadline=None)
@given(vote_rows(), st.floats(0.5, 200))
def test_the_data_dependent_cost_is_never_above_the_data_independent_one(row, sigma):
    if sum(row[0]) == 0:
        return
    cost = gnmax_rdp(row, sigma=sigma)
    assert np.all(cost >= 0)
    assert np.all(cost <= ORDERS / sigma**2 + 1e-15)
    laplace = laplace_max_rdp(row, scale=sigma)
    assert np.all((laplace >= 0) & (laplace <= 2 / sigma + 1e-15))


def test_agreement_lowers_the_cost():
    costs = [gnmax_rdp(spread_votes(top), sigma=40.0)[0] for top in (180, 200, 220, 250)]
    assert all(np.all(b <= a) for a, b in pairwise(costs))
    assert costs[-1][20] < 0.1 * costs[0][20]


def test_the_bound_is_a_divergence_bound_for_two_outcomes():
    # Two classes: the winner is a coin, whose divergence from every neighbor's coin is elementary.
    sigma, orders = 20.0, np.array([1.5, 2.0, 5.0, 20.0])
    for lead in (0, 10, 40, 80, 120):
        n = 120
        votes = [[(n + lead) // 2, (n - lead) // 2]]
        bound = gnmax_rdp(votes, sigma=sigma, orders=orders)[0]
        here = norm.cdf(lead / (math.sqrt(2) * sigma))
        for other in (lead - 2, lead + 2):
            there = norm.cdf(other / (math.sqrt(2) * sigma))
            moment = here**orders * there ** (1 - orders)
            moment += (1 - here) ** orders * (1 - there) ** (1 - orders)
            assert np.all(np.log(moment) / (orders - 1) <= bound + 1e-12)


def test_corners_of_q_give_a_finite_cost():
    cost = rdp_from_log_q([-1e6, -1e-9, math.log(0.9), -700.0], sigma=40.0)
    assert np.all(np.isfinite(cost))
    assert np.all(cost >= 0)


@pytest.mark.parametrize(
    "votes",
    [
        [1, 2, 3],
        [[5]],
        [[1, 2], [2, 2]],
        [[-1, 4]],
        [[0.5, 2.5]],
        [[math.nan, 1]],
        [[0, 0]],
        np.zeros((2, 3, 4)),
    ],
    ids=["1-d", "1 class", "unequal", "negative", "fraction", "nan", "nobody", "3-d"],
)
def test_wrong_votes_are_refused_without_showing_a_count(votes):
    with pytest.raises(ValueError, match="votes"):
        as_votes(votes)


def test_votes_must_add_up_to_the_number_of_teachers():
    with pytest.raises(ValueError, match="add up"):
        as_votes([[3, 4], [4, 4]])
    assert as_votes([[3, 4], [4, 3]]).tolist() == [[3, 4], [4, 3]]


def test_a_private_curve_shows_nothing_and_cannot_leave():
    curve = private_cost(GNMax(40.0), spread_votes(200))
    assert repr(curve) == "PrivateCurve()"
    with pytest.raises(TypeError, match="private"):
        pickle.dumps(curve)
    with pytest.raises(TypeError):
        json.dumps(curve)


def test_private_curves_compose_by_addition():
    one = private_cost(LaplaceMax(20.0), spread_votes(200))
    two = private_cost(LaplaceMax(20.0), np.repeat(spread_votes(200), 2, axis=0))
    assert np.allclose((one + one).values, two.values)
    with pytest.raises(ValueError, match="same orders"):
        one + private_cost(LaplaceMax(20.0), spread_votes(200), orders=[2.0, 3.0])


# The exact cost against independent computations ----------------------------------------------

FEW_ORDERS = np.array([1.5, 2.0, 4.0, 10.0, 32.0])
ROWS = [[50, 30, 20], [90, 10, 0], [34, 33, 33], [100, 0, 0], [60, 40, 0]]


def win_probability(row, j, sigma):
    """P[class j wins] by scipy's adaptive quadrature."""
    gaps = [(row[j] - count) / sigma for k, count in enumerate(row) if k != j]
    value, _ = quad(
        lambda z: norm.pdf(z) * np.prod([norm.cdf(gap + z) for gap in gaps]),
        -12,
        12,
        epsabs=1e-12,
        limit=100,
    )
    return value


def brute_force(row, sigma, orders):
    """Largest divergence over all single moved votes, both ways."""
    here = np.array([win_probability(row, j, sigma) for j in range(len(row))])
    worst = np.zeros(len(orders))
    for a in range(len(row)):
        for b in range(len(row)):
            if a != b and row[a] > 0:
                moved = list(row)
                moved[a] -= 1
                moved[b] += 1
                there = np.array([win_probability(moved, j, sigma) for j in range(len(row))])
                for p, q in ((here, there), (there, here)):
                    moment = (p[:, None] ** orders * q[:, None] ** (1 - orders)).sum(axis=0)
                    worst = np.maximum(worst, np.log(moment) / (orders - 1))
    return worst


@pytest.mark.parametrize(
    "row", [ROWS[1], *(pytest.param(row, marks=pytest.mark.slow) for row in ROWS[:3:2])], ids=str
)
def test_the_exact_cost_is_the_largest_divergence_from_a_neighbor(row):
    exact = gnmax_rdp_exact([row], sigma=20.0, orders=FEW_ORDERS)[0]
    assert exact == pytest.approx(brute_force(row, 20.0, FEW_ORDERS), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("sigma", [4.0, 8.0, 20.0, 60.0])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_in_its_direction_the_exact_cost_is_below_the_published_bound(row, sigma):
    exact = gnmax_rdp_exact([row], sigma=sigma, orders=FEW_ORDERS, both_ways=False)
    assert np.all(exact <= gnmax_rdp([row], sigma=sigma, orders=FEW_ORDERS) + 1e-9)


def test_the_other_direction_can_cost_more_than_the_published_bound():
    # A neighbor that agrees less picks other winners more often than here, so its divergence from
    # here is the larger one; 2018's Thm. 6 bounds the divergence from here to neighbors.
    votes, orders = [[93, 71, 25, 9, 0]], [5.0]
    bound = gnmax_rdp(votes, sigma=3.16, orders=orders)
    assert gnmax_rdp_exact(votes, sigma=3.16, orders=orders, both_ways=False) <= bound
    assert gnmax_rdp_exact(votes, sigma=3.16, orders=orders) > 2 * bound


def test_the_exact_check_is_below_the_published_bound():
    highest = np.arange(60, 260, 10)
    exact = threshold_rdp_exact(highest, threshold=200, sigma=30.0, orders=FEW_ORDERS)
    assert np.all(
        exact <= threshold_rdp(highest, threshold=200, sigma=30.0, orders=FEW_ORDERS) + 1e-9
    )


def test_winner_probabilities_add_up_and_match_simulation():
    row = np.array([60, 50, 40, 100])
    p = np.exp(winner_log_probabilities(row, sigma=40.0))
    assert p.sum() == pytest.approx(1.0)
    rng = np.random.default_rng(3)
    drawn = (row + rng.normal(0, 40.0, (100_000, 4))).argmax(axis=1)
    seen = np.bincount(drawn, minlength=4) / 100_000
    # 5 standard errors on each of 4 classes: false alarm below 3e-6.
    assert np.all(np.abs(seen - p) < 5 * np.sqrt(p * (1 - p) / 100_000))


def test_classes_without_votes_and_huge_gaps_have_finite_costs():
    votes = [[5000, 0, 0], [2500, 2500, 0], [0, 0, 5000]]
    cost = gnmax_rdp_exact(votes, sigma=5.0, orders=FEW_ORDERS)
    assert np.all(np.isfinite(cost))
    assert np.all(cost[0] == cost[2])


def test_no_query_costs_nothing():
    assert gnmax_rdp_exact(np.empty((0, 3), int), sigma=5.0, orders=FEW_ORDERS).shape == (0, 5)


def test_labels_and_votes_must_match():
    with pytest.raises(ValueError, match="labels"):
        private_cost(GNMax(4.0), spread_votes(200), [0, 1])
    with pytest.raises(ValueError, match="tight"):
        private_cost(LaplaceMax(4.0), spread_votes(200), tight=True)


@pytest.mark.parametrize("tight", [False, True])
def test_a_check_adds_its_own_cost(tight):
    votes, orders = np.repeat(spread_votes(200), 3, axis=0), [2.0, 8.0]
    confident = ConfidentGNMax(threshold=200, sigma_threshold=150, sigma_answer=40)
    found = private_cost(confident, votes, [9, -1, 9], orders=orders, tight=tight).values
    answers = private_cost(GNMax(40.0), votes[:2], orders=orders, tight=tight).values
    check = (threshold_rdp_exact if tight else threshold_rdp)(
        [200], threshold=200, sigma=150, orders=orders
    )
    np.testing.assert_allclose(found, answers + 3 * check[0])
