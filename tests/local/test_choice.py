"""The chosen oracle is within a few percent of the best, and its reports are short."""

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
def test_the_variance_is_within_five_percent_of_the_best_known(k, epsilon):
    chosen = choose_oracle(k, epsilon)
    assert chosen.mean_variance <= 1.05 * best_known_variance(k, epsilon)


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
