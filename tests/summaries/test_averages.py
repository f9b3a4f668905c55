"""Means, variances and covariances are near the truth, and their intervals contain it."""

import numpy as np
import pytest

from tacit.summaries import covariance, mean, variance
from tacit.summaries.bernstein import bernstein_basis, bernstein_coefficients, moment_sums

AGES = np.random.default_rng(0).integers(18, 91, 20_000).astype(float)


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_a_large_budget_gives_nearly_exact_values(delta, relation):
    terms = {"epsilon": 1e4, "delta": delta, "relation": relation, "rng": 1, "about": "records"}
    assert mean(AGES, bounds=(0, 100), **terms).value == pytest.approx(AGES.mean(), rel=1e-4)
    assert variance(AGES, bounds=(0, 100), **terms).value == pytest.approx(AGES.var(), rel=1e-3)


def test_covariances_agree_with_numpy():
    rng = np.random.default_rng(2)
    x = rng.uniform(0, 1, 5000)
    columns = {"x": x, "y": 3 * x + rng.uniform(0, 1, 5000), "z": rng.uniform(-1, 1, 5000)}
    bounds = {"x": (0, 1), "y": (0, 4), "z": (-1, 1)}
    found = covariance(columns, bounds=bounds, epsilon=1e5, rng=0, about="records")
    exact = np.cov(list(columns.values()), bias=True)
    names = list(columns)
    for i, a in enumerate(names):
        assert found[f"var({a})"].value == pytest.approx(exact[i, i], abs=2e-3)
        for j, b in enumerate(names[i + 1 :], start=i + 1):
            assert found[f"cov({a}, {b})"].value == pytest.approx(exact[i, j], abs=2e-3)
    alone = covariance(columns, bounds=bounds, epsilon=1e5, rng=0, variances=False)
    assert [row.name for row in alone] == ["cov(x, y)", "cov(x, z)", "cov(y, z)"]


@pytest.mark.parametrize("about", ["records", "population"])
def test_a_mean_hidden_by_noise_is_still_covered(about):
    # At 95 % coverage, 40 intervals have fewer than 31 hits with probability below 1e-4.
    found = [
        mean([30.0] * 3, bounds=(0, 100), epsilon=0.01, rng=seed, about=about) for seed in range(40)
    ]
    assert sum(row.lower <= 30 <= row.upper for row in found) >= 31


def test_missing_and_outside_values_follow_their_rules():
    values = [10.0, None, "x", 1000.0, 30.0] * 2000
    terms = {"bounds": (0, 100), "epsilon": 1e4, "rng": 0, "about": "records"}
    assert mean(values, **terms).value == pytest.approx((10 + 100 + 30) / 3, rel=1e-3)
    assert mean(values, outside="drop", **terms).value == pytest.approx(20, rel=1e-3)
    assert mean(values, missing=0.0, **terms).value == pytest.approx(140 / 5, rel=1e-3)


def test_more_budget_gives_shorter_intervals():
    widths = [
        (found := mean(AGES, bounds=(0, 100), epsilon=e, rng=0)).upper - found.lower
        for e in (0.01, 0.1, 1.0)
    ]
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize(
    "bounds", [None, (1, 1), (5, 1), (0, np.inf), (0, np.nan), 7, ("a", "b"), (0, 1, 2)], ids=str
)
def test_wrong_bounds_are_refused(bounds):
    with pytest.raises((ValueError, TypeError), match="bounds"):
        mean(AGES, bounds=bounds, epsilon=1.0)


def test_bernstein_cells_are_a_partition_of_one_and_hold_polynomials():
    u = np.linspace(0, 1, 101)
    for degree in (1, 2, 4):
        basis = bernstein_basis(u, degree)
        assert basis.min() >= 0
        assert basis.sum(axis=1) == pytest.approx(1)
    polynomial = np.array([0.3, -1.0, 0.5, 2.0])
    values = np.polynomial.polynomial.polyval(u, polynomial)
    assert bernstein_basis(u, 4) @ bernstein_coefficients(polynomial, 4) == pytest.approx(values)


def test_moment_sums_count_missing_values_apart():
    found = moment_sums(2, np.array([0.0, 1.0, np.nan, 0.5]))
    assert found == pytest.approx([1.0, 1.25, 0.5, 1.25])
