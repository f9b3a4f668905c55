"""The order-statistic test raises false alarms as rarely as stated, and is sharp."""

import numpy as np
import pytest

import tacit
from tacit.auditing import noise_bound
from tacit.auditing.canaries import log_ratio
from tacit.auditing.event_test import billed_curve
from tacit.auditing.order_statistics import OrderStatisticTest, members_above
from tacit.events import Gaussian, PoissonSampled

FEW = PoissonSampled(0.5, Gaussian(1.0))


def attack(event, n, seed, references=10):
    """Scores of an ideal attack on one release: canaries by fair coins, and references."""
    rng, sigma = np.random.default_rng(seed), event.event.noise_multiplier
    inside = rng.integers(0, 2, n).astype(bool)
    seen = np.concatenate(
        [
            inside * (rng.random(n) < event.rate) + rng.normal(0, sigma, n),
            rng.normal(0, sigma, references * n),
        ]
    )
    scores = log_ratio(seen, rate=event.rate, noise_multiplier=sigma)
    return scores[:n], inside, scores[n:]


def test_the_chance_that_all_members_are_on_top_is_that_of_one_order_among_all():
    """Without any leak, 3 of 3 members are above 3 others in 1 of 20 orders."""
    test = OrderStatisticTest(3, 3, np.array([1]), np.ones(1), np.array([3]))
    assert 1 / 20 < test.p_value(lambda rates: rates, level=0.05) < 0.06


@pytest.mark.slow
def test_the_bill_is_refuted_as_rarely_as_stated():
    power, rng = billed_curve(FEW).power, np.random.default_rng(3)
    louder = billed_curve(PoissonSampled(0.5, Gaussian(0.9))).power
    scores, inside, reference = attack(FEW, 400, 0, references=1)
    both = np.concatenate([scores, reference]), np.concatenate([inside, np.zeros(400, bool)])
    planned = OrderStatisticTest.plan(louder, power, *both)
    # The law of the weighted count, and the p-value at each count, are those of one plan.
    refuted = 0
    for _ in range(200):
        seen = inside * (rng.random(400) < 0.5) + rng.normal(0, 1.0, 400)
        pooled = np.concatenate([seen, rng.normal(0, 1.0, 400)])
        above = members_above(pooled, both[1], planned.places)
        refuted += planned._replace(above=above).p_value(power, level=0.05) < 0.05
    assert refuted <= 20  # 10 expected at most; more than 20 with probability 0.001


def test_equal_scores_say_nothing():
    scores, inside = np.zeros(2000), np.arange(2000) < 1000
    assert abs(int(members_above(scores, inside, np.array([500]))[0]) - 500) < 120


@pytest.mark.slow
def test_any_increasing_function_of_scores_gives_the_same_bound():
    scores, inside, reference = attack(FEW, 200, 5)
    same = [
        noise_bound(change(scores), inside, FEW, delta=1e-5, reference=change(reference))
        for change in (np.array, np.exp)
    ]
    assert same[0] == same[1]


def test_references_must_be_numbers():
    scores, inside, _ = attack(FEW, 100, 6)
    with pytest.raises(ValueError, match="reference must be a flat list"):
        noise_bound(scores, inside, FEW, delta=1e-5, reference=[np.nan])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "n", "least"),
    [(FEW, 1000, 2.5), (PoissonSampled(0.2, Gaussian(0.5)), 10_000, 7.0)],
    ids=["few canaries", "rare draws"],
)
def test_bounds_are_near_the_price_and_seldom_above(event, n, least):
    price, found = tacit.epsilon(event, delta=1e-5), []
    for seed in range(40):
        scores, inside, reference = attack(event, n, seed)
        bound = noise_bound(scores, inside, event, delta=1e-5, reference=reference)
        found.append(bound.epsilon_lower)
    assert np.median(found) >= least
    assert sum(value > price for value in found) <= 7  # 2 expected; 8 with probability 0.001
