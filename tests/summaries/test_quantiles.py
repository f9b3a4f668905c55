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


@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_intervals_of_whole_numbers_end_at_whole_numbers_and_are_shorter(delta):
    ages = np.random.default_rng(0).integers(18, 91, 5000)
    terms = {"bounds": (18, 90), "epsilon": 0.2, "delta": delta, "rng": 1}
    wanted = [0.1, 0.5, 0.9]
    plain, grid = quantiles(ages, wanted, **terms), quantiles(ages, wanted, step=1, **terms)
    truth = np.quantile(np.arange(18, 91), wanted, method="inverted_cdf")
    for ends in (grid.lower, grid.values, grid.upper):
        assert (ends == ends.round()).all()
    assert ((grid.lower <= truth) & (truth <= grid.upper)).all()
    assert (grid.upper - grid.lower).sum() < (plain.upper - plain.lower).sum()


def test_a_large_budget_gives_exact_quantiles_of_a_grid():
    values = np.array([0.0, 2.5, 2.5, 5.0, 7.4, 10.0, 10.0, 99.0, None, "x"], object)  # 7.4 is 7.5
    found = quantiles(values, [0.2, 0.45, 0.55, 0.9], bounds=(0, 10), step=2.5, epsilon=1e4, rng=0,
                      about="records")  # fmt: skip
    assert found.values.tolist() == [2.5, 5.0, 7.5, 10.0]
    assert found.lower.tolist() == [2.5, 5.0, 7.5, 10.0]


@pytest.mark.parametrize("step", [0, -1, 7, 3.3, np.nan, 1e3])
def test_a_step_must_divide_the_range(step):
    with pytest.raises(ValueError, match="step must"):
        quantiles([1.0], bounds=(0, 10), step=step, epsilon=1.0)


def test_a_step_that_is_finer_than_the_cells_changes_nothing():
    one = quantiles(INCOMES, bounds=(0, 400), epsilon=1.0, rng=0)
    two = quantiles(INCOMES, bounds=(0, 400), epsilon=1.0, rng=0, step=0.01)
    assert one.to_dict() == two.to_dict()


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
