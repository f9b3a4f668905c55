"""Quantiles and private bounds."""

import numpy as np
import pytest

from tacit.summaries import private_bounds, quantiles
from tacit.summaries.payment import Terms
from tacit.summaries.quantiles import choose_tree

INCOMES = np.exp(np.random.default_rng(0).normal(3, 0.8, 20_000))


@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_a_large_budget_gives_nearly_exact_quantiles(delta):
    wanted = [0.05, 0.25, 0.5, 0.9]
    found = quantiles(
        INCOMES, wanted, bounds=(0, 400), epsilon=1e3, delta=delta, rng=0, about="records"
    )
    assert found.values == pytest.approx(np.quantile(INCOMES, wanted), rel=0.01)
    assert found["median"].lower <= np.median(INCOMES) <= found["median"].upper


def test_ties_and_gaps_are_covered():
    # All values are 30: every interval must contain 30, however many edges are tried.
    for seed in range(50):
        found = quantiles([30.0] * 500, [0.1, 0.5, 0.9], bounds=(0, 100), epsilon=1.0, rng=seed)
        assert (found.lower <= 30).all()
        assert (found.upper >= 30).all()


def test_noise_alone_gives_the_whole_range():
    found = quantiles([1.0, 2.0], [0.5], bounds=(0, 10), epsilon=0.01, rng=0)
    assert (found.lower[0], found.upper[0]) == (0, 10)


def test_trees_are_chosen_from_public_numbers():
    pure = choose_tree(Terms.check({"epsilon": 1.0}), 1024)
    assert (pure.depth, pure.branching, pure.is_gaussian) == (2, 32, False)
    normal = choose_tree(Terms.check({"epsilon": 1.0, "delta": 1e-3}), 10**6)
    assert normal.is_gaussian
    assert normal.n_leaves >= 10**6


def test_the_spread_at_every_edge_is_that_of_the_released_noise():

    terms = Terms.check({"epsilon": 1.0, "rng": 3})
    tree = choose_tree(terms, 27)._replace(depth=3, branching=3)
    division = terms.divide(tree.blocks())
    draws = [tree.release(np.empty(0), division, terms) for _ in range(1500)]
    for p in (0.3, 0.9):
        balance = np.array([draw.balance(p)[1:-1] for draw in draws])
        expected = draws[0].spread(p).variance
        # The relative error of a variance from 1,500 draws is 3.7 %.
        assert balance.var(axis=0) == pytest.approx(expected, rel=0.2)


def test_private_bounds_hold_most_values():
    values = np.concatenate([np.random.default_rng(1).normal(0, 1000, 9990), [1e15] * 10])
    found = private_bounds(values, epsilon=0.5, rng=0)
    assert found.is_reliable
    assert found.upper < 1e5
    assert np.mean((values >= found.lower) & (values <= found.upper)) > 0.98


def test_private_bounds_of_too_few_values_say_so():
    assert not private_bounds([1.0], epsilon=0.1, rng=0).is_reliable


@pytest.mark.parametrize("wrong", [[], [0.0], [1.0], [0.5, 0.5], ["x"]], ids=str)
def test_wrong_probabilities_are_refused(wrong):
    with pytest.raises((ValueError, TypeError), match="probabilit"):
        quantiles(INCOMES, wrong, bounds=(0, 400), epsilon=1.0)
