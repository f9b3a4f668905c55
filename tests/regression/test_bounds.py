"""Bounds that cannot scale the data are refused."""

import numpy as np
import pytest

from tacit.regression import Bounds
from tacit.regression.bounds import as_bounds


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        ([0.0, 1.0], [1.0, 1.0]), (0.0, np.inf), (np.nan, 1.0), (1e12, 1e12 + 1),
        (1e5, 1e5 + 1), (1e308, 1.7e308), (-1.7e308, 1.7e308), (0.0, 1e-310),
    ],
)  # fmt: skip
def test_bounds_that_cannot_scale_are_refused(lower, upper):
    with pytest.raises(ValueError, match="bounds must"):
        Bounds(lower, upper)


def test_bounds_for_another_number_of_features_are_refused():
    with pytest.raises(ValueError, match=r"bounds\.lower .* got 2 for 3 features"):
        Bounds([0, 0], 1).box(3)


def test_a_list_of_pairs_is_refused_if_it_could_be_read_in_two_ways():
    for pairs in ([(0, 1), (18, 93)], ((0, 1), (18, 93)), [(0, 1)] * 3, np.array([(0, 1)] * 4)):
        with pytest.raises((ValueError, TypeError), match="Bounds"):
            as_bounds(pairs, name="bounds")
    same = as_bounds(([0, -1], [100, 1]), name="bounds")
    assert same == Bounds([0, -1], [100, 1])
    assert as_bounds(([-1, -1], [1, 1]), name="bounds") == Bounds([-1, -1], [1, 1])
