"""Exact coins and subsets."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from tacit.local.coins import exp_below, flip, round_down, round_up, subset
from tacit.mechanisms import secure_generator


@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 1.0, 3.3, 29.0])
def test_the_bound_is_just_below_the_exponential(epsilon, enumeration):
    exact = enumeration.exponential(epsilon)
    assert exact * (1 - Fraction(1, 10**14)) < exp_below(epsilon) < exact


def test_rounding_goes_the_stated_way():
    third = Fraction(1, 3)
    assert round_down(third) < third < round_up(third)
    assert round_up(third) - round_down(third) == Fraction(1, 2**53)
    assert round_up(Fraction(1, 4)) == Fraction(1, 4)


def test_a_coin_shows_heads_with_exactly_its_probability(enumeration):
    heads = round_up(Fraction(1, 3))
    law, _ = enumeration.law(lambda rng: flip(heads, rng, 1))
    assert law[np.array([True]).tobytes()] == heads


@pytest.mark.parametrize("size", [0, 1, 2, 3])
def test_subsets_are_uniform(size, enumeration):
    law, outcomes = enumeration.law(lambda rng: subset(rng, 1, 4, np.array([size])))
    assert len(law) == len(list(itertools.combinations(range(4), size)))
    assert len(set(law.values())) == 1
    assert all(outcome.sum() == size for outcome in outcomes.values())


def test_rows_may_have_subsets_of_different_size():
    sizes = np.array([0, 3, 5, 1])
    found = subset(secure_generator(), 4, 5, sizes)
    assert found.sum(axis=1).tolist() == sizes.tolist()
