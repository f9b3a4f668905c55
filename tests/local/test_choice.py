"""The chosen oracle is near the best of all published ones, and its reports are short."""

import itertools
import math

import numpy as np
import pytest

from tacit.local import ORACLES, RandomizedResponse, choose_oracle

SETTINGS = list(itertools.product((2, 3, 10, 32, 100, 1000, 10_000), (0.1, 0.5, 1, 2, 4, 8)))


def best_known_variance(k: int, epsilon: float) -> float:
    """Least mean variance of randomized response, OUE, OLH and subset selection as published.

    Subset selection (Ye & Barg 2018) is taken over all subset sizes; at the best one it has the
    least squared error that is possible (Pan 2026, arXiv:2603.11523).
    """
    e = math.exp(epsilon)

    def mean_variance(p, q):
        return (p * (1 - p) / k + (1 - 1 / k) * q * (1 - q)) / (p - q) ** 2

    d = np.arange(1, k)
    p = d * e / (d * e + k - d)
    subset = mean_variance(p, (d - p) / (k - 1)).min()
    unary = mean_variance(0.5, 1 / (e + 1))
    hashing = min(mean_variance(e / (e + g - 1), 1 / g) for g in range(2, math.ceil(e) + 3))
    return min(subset, unary, hashing)


@pytest.mark.parametrize(("k", "epsilon"), SETTINGS)
def test_the_variance_is_near_the_best_known(k, epsilon):
    """Subset selection, which is not among the oracles, is up to 31 % better at 10 options."""
    least = 1.35 if k in (10, 32) else 1.16 if (k, epsilon) in ((100, 4), (10_000, 8)) else 1.06
    chosen = choose_oracle(k, epsilon)
    assert chosen.mean_variance <= least * best_known_variance(k, epsilon)


@pytest.mark.parametrize(("k", "epsilon"), SETTINGS)
def test_nothing_of_nearly_equal_variance_has_shorter_reports(k, epsilon):
    chosen = choose_oracle(k, epsilon)
    for kind in ORACLES:
        other = kind(epsilon=epsilon, n_options=k)
        if other.mean_variance <= chosen.mean_variance:
            assert other.report_bits >= chosen.report_bits


def test_few_options_are_sent_by_randomized_response():
    assert isinstance(choose_oracle(3, 1.0), RandomizedResponse)
    assert choose_oracle(10_000, 1.0).report_bits < 20


def test_no_tolerance_means_the_least_variance():
    chosen = choose_oracle(50, 2.0, tolerance=0.0)
    assert chosen.mean_variance == min(
        kind(epsilon=2.0, n_options=50).mean_variance for kind in ORACLES
    )
