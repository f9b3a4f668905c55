"""Streamed sums equal direct ones, and noisy sums have a finite solution."""

import numpy as np
import pytest

from tacit.regression import Bounds, LinearRegression, LogisticRegression
from tacit.regression.rows import (
    PrivateRows,
    SecondMoments,
    from_triangle,
    shrink,
    solve_moments,
    triangle,
)


def table(rows=5000, features=7, seed=0):
    rng = np.random.default_rng(seed)
    return rng.uniform(-20, 120, (rows, features)), rng.uniform(-1, 1, rows)


def direct(X, bounds, row_norm):
    box = bounds.box(X.shape[1])
    scaled = (np.clip(X, box.lower, box.upper) - box.center) / box.half
    rows = np.column_stack([np.ones(len(X)), scaled])
    factors = np.minimum(1.0, row_norm / np.linalg.norm(rows, axis=1))
    return rows, factors


@pytest.mark.parametrize("row_norm", [np.inf, 1.5])
@pytest.mark.parametrize("bounds", [Bounds(0, 100), Bounds(0, 100, norm=1.2)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_moments_are_those_of_clipped_scaled_shrunk_rows(bounds, row_norm, dtype):
    X, y = table()
    X = X.astype(dtype)
    rows, factors = direct(X.astype(np.float64), bounds, row_norm)
    shrunk = rows * factors[:, None]
    found = PrivateRows(X, bounds.box(X.shape[1]), row_norm=row_norm).moments(y)
    np.testing.assert_allclose(found.gram, shrunk.T @ shrunk, rtol=1e-9, atol=1e-6)
    np.testing.assert_allclose(found.cross, shrunk.T @ (factors * y), rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("outputs", [(), (3,)])
def test_a_weighted_sum_is_that_of_scaled_rows(outputs):
    X, _ = table()
    bounds = Bounds(np.arange(7.0), 90 + np.arange(7.0))
    rows, factors = direct(X, bounds, 2.0)
    weights = np.random.default_rng(1).normal(size=(8, *outputs))
    private = PrivateRows(X, bounds.box(7), row_norm=2.0)
    np.testing.assert_allclose(private.factors, factors)
    found = private.weighted_sum(weights, lambda span, margins: np.tanh(margins))
    np.testing.assert_allclose(found, rows.T @ np.tanh(rows @ weights), rtol=1e-9, atol=1e-9)


def test_rows_inside_their_bounds_are_read_in_place():
    X, _ = table()
    X = X.clip(0, 100)
    private = PrivateRows(X, Bounds(0, 100).box(7))
    blocks = [rows for _, rows in private._clipped()]
    assert all(np.shares_memory(rows, X) for rows in blocks)


def test_a_triangle_keeps_the_frobenius_norm_and_comes_back():
    matrix = np.random.default_rng(0).normal(size=(5, 5))
    matrix = matrix + matrix.T
    vector = triangle(matrix)
    assert np.linalg.norm(vector) == pytest.approx(np.linalg.norm(matrix))
    np.testing.assert_allclose(from_triangle(vector, 5), matrix)


def test_a_memory_map_is_streamed(tmp_path):
    X, y = table(rows=3000)
    on_disk = np.memmap(tmp_path / "x", np.float64, "w+", shape=X.shape)
    on_disk[:] = X
    box = Bounds(0, 100).box(7)
    np.testing.assert_array_equal(
        PrivateRows(on_disk, box).moments(y).gram, PrivateRows(X, box).moments(y).gram
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_minimum_is_finite_however_indefinite_the_noisy_matrix(seed):
    rng = np.random.default_rng(seed)
    noise = 1e6 * rng.laplace(size=(6, 6))
    moments = SecondMoments(noise + noise.T, 1e6 * rng.laplace(size=6))
    assert np.isfinite(solve_moments(moments, noise=1e5)).all()
    assert np.isfinite(solve_moments(SecondMoments(np.zeros((6, 6)), np.ones(6)), noise=0)).all()


@pytest.mark.parametrize("method", ["auto", "adassp", "functional"])
def test_a_table_that_needs_no_scaling_is_read_in_place_and_not_changed(method):
    rng = np.random.default_rng(0)
    X, y = rng.uniform(-1, 1, (3000, 3)), rng.uniform(-1, 1, 3000)
    before = X.copy()
    delta = 0 if method == "functional" else 1e-6
    LinearRegression(
        epsilon=1.0, delta=delta, bounds=(-1, 1), target_bounds=(-1, 1), method=method
    ).fit(X, y)
    for other in ("auto", "objective", "descent"):
        LogisticRegression(epsilon=1.0, bounds=(-1, 1), method=other).fit(X, y > 0)
    assert (before == X).all()
    _, first = next(PrivateRows(X, Bounds(-1, 1).box(3)).scaled())
    assert np.shares_memory(first, X)


def test_shrinking_without_an_expectation_changes_nothing():
    matrix = np.array([[0.2, 0.7], [0.7, -0.1]])
    shrunk, std = shrink(matrix, 0.8, np.zeros((2, 2)))
    assert (shrunk == matrix).all()
    assert std == 0.8
