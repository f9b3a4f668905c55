"""Banded strategies: errors, sensitivities, and the optimum against published and brute numbers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import toeplitz

from tacit.mechanisms import (
    banded,
    optimal_bands,
    participation_sensitivity,
    running_error,
    square_root,
)
from tacit.mechanisms.banded import _error_and_slope

# Root mean square errors for 1, 2, 4, ... bands, which agree with those of JAX Privacy 2.0.0 to
# five decimals.
GOLDEN = {
    256: [11.33578, 8.14630, 5.97801, 4.54766, 3.63757, 3.08681, 2.78307, 2.64752, 2.61645],
    512: [16.01562, 11.43930, 8.28312, 6.15107, 4.74678, 3.84971, 3.30413, 3.00221, 2.86726],
    2048: [32.00781, 22.72143, 16.22013, 11.71181, 8.62695, 6.54710, 5.17004, 4.28427, 3.74282],
    16384: [90.51243, 64.06287, 45.40673, 32.28250, 23.09245, 16.69789, 12.27842, 9.24771, 7.19325],
}


def strategy(column, steps):
    """Return C as a matrix."""
    first = np.zeros(steps)
    first[: len(column)] = column
    return np.tril(toeplitz(first))


def brute_sensitivity(column, steps, separation, participations):
    """Return the largest norm of a sum of columns that may occur together."""
    columns = strategy(column, steps).T
    best = 0.0
    stack = [(0, 0, np.zeros(steps))]
    while stack:
        start, used, total = stack.pop()
        best = max(best, float(np.linalg.norm(total)))
        if used < participations:
            stack += [
                (step + separation, used + 1, total + sign * columns[step])
                for step in range(start, steps)
                for sign in (1, -1)
            ]
    return best


@pytest.mark.parametrize("steps", GOLDEN)
def test_optimal_errors_are_the_published_ones(steps):
    for power, golden in enumerate(GOLDEN[steps]):
        if steps > 4096 and power > 6:
            continue
        column = optimal_bands(steps, 2**power)
        assert np.linalg.norm(column) == pytest.approx(1.0)
        assert running_error(column, steps) == pytest.approx(golden, abs=6e-6)


def test_the_error_is_that_of_the_matrices():
    rng = np.random.default_rng(0)
    for bands in (1, 2, 5, 40):
        column = np.concatenate([[1.0], rng.random(bands - 1) * 0.3])
        noise = np.tril(np.ones((40, 40))) @ np.linalg.inv(strategy(column, 40))
        assert running_error(column, 40) == pytest.approx(np.sqrt((noise**2).sum(1).mean()))


@pytest.mark.parametrize("bands", [2, 7, 50])
def test_the_slope_is_that_of_the_error(bands):
    rng = np.random.default_rng(bands)
    column = np.concatenate([[1.0], rng.random(bands - 1) / bands])
    _, slope = _error_and_slope(column, 60)
    for k in range(bands):
        moved = np.eye(bands)[k] * 1e-6
        up, down = (_error_and_slope(column + s * moved, 60)[0] for s in (1, -1))
        assert slope[k] == pytest.approx((up - down) / 2e-6, rel=1e-5, abs=1e-6)


def test_the_square_root_has_its_known_error():
    column = square_root(1024)
    assert running_error(column, 1024) == pytest.approx(3.10979, abs=6e-6)


@pytest.mark.parametrize(
    ("steps", "participations", "separation", "golden"),
    [(1024, 4, 256, 6.44414), (1024, 16, 64, 16.26365), (2048, 8, 256, 10.58629)],
)
def test_several_participations(steps, participations, separation, golden):
    column = optimal_bands(steps, separation)
    sensitivity = participation_sensitivity(
        column, steps, separation=separation, participations=participations
    )
    assert sensitivity == pytest.approx(np.sqrt(participations))
    assert running_error(column, steps) * sensitivity == pytest.approx(golden, abs=6e-6)


@settings(max_examples=60, deadline=None)
@given(
    column=st.lists(st.floats(-1, 1), min_size=1, max_size=6),
    steps=st.integers(6, 8),
    separation=st.integers(1, 5),
    participations=st.integers(1, 3),
)
def test_no_choice_of_steps_exceeds_the_sensitivity(column, steps, separation, participations):
    stated = participation_sensitivity(
        np.array(column), steps, separation=separation, participations=participations
    )
    found = brute_sensitivity(np.array(column), steps, separation, participations)
    assert found <= stated * (1 + 1e-9) + 1e-12
    if all(a >= b >= 0 for a, b in zip(column, [*column[1:], 0.0], strict=True)):
        assert stated == pytest.approx(found)


def test_more_bands_than_steps_are_refused():
    with pytest.raises(ValueError, match="bands must be <= steps"):
        optimal_bands(4, 5)


@pytest.mark.parametrize("separation", [1, 2, 3, 5, 9, 40])
@pytest.mark.parametrize("participations", [1, 2, 4, 50])
@pytest.mark.parametrize("bands", [1, 3, 7, 30])
def test_the_sensitivity_is_that_of_the_matrix(separation, participations, bands):
    steps, column = 30, np.sort(np.random.default_rng(bands).random(bands))[::-1]
    matrix = sum(np.diag(np.full(steps - k, c), -k) for k, c in enumerate(column))
    starts = np.arange(0, steps, separation)[:participations]
    found = participation_sensitivity(
        column, steps, separation=separation, participations=participations
    )
    assert found == pytest.approx(np.linalg.norm(matrix[:, starts].sum(1)))


def test_events_of_strangers_are_priced_or_refused_at_once():
    column = np.array([0.8, 0.6])
    options = {"separation": 2, "participations": 10**17}
    assert participation_sensitivity(column, 10**18, **options) == pytest.approx(10**8.5)
    with pytest.raises(ValueError, match="steps must be at most"):
        participation_sensitivity(column, 10**18, separation=1, participations=10**17)


def test_the_column_does_not_depend_on_the_order_of_additions(monkeypatch):
    """As with another machine's linear algebra, which differs in the last bits."""
    sizes = [(40, 8), (200, 30), (300, 50), (101, 100)]
    expected = [optimal_bands(*size).tobytes() for size in sizes]
    exact, rng = banded._error_and_slope, np.random.default_rng(0)

    def rough(column, steps):
        error, slope = exact(column, steps)
        return error * (1 + 1e-16 * rng.integers(-3, 4)), slope * (
            1 + 2e-16 * rng.integers(-2, 3, len(slope))
        )

    monkeypatch.setattr(banded, "_error_and_slope", rough)
    for _ in range(3):
        banded._optimal.cache_clear()
        assert [optimal_bands(*size).tobytes() for size in sizes] == expected
    banded._optimal.cache_clear()
