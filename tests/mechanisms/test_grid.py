"""Releases on a grid: exact multiples, charged rounding, any size of value, no mass outside."""

import math
from fractions import Fraction

import numpy as np
import pytest

from tacit.mechanisms import (
    GaussianMechanism,
    GaussianNoisyMax,
    GridGaussianMechanism,
    LaplaceMechanism,
    rounded_normal,
    tail_mass,
)
from tacit.mechanisms.grid import raised

REAL = [
    GaussianMechanism(0.7, l2_sensitivity=0.3),
    LaplaceMechanism(0.7, l1_sensitivity=0.3),
    GridGaussianMechanism(0.7, l2_sensitivity=0.3, dimension=1000),
]
every_real = pytest.mark.parametrize("mechanism", REAL, ids=lambda m: type(m).__name__)


def noise_on(mechanism, size: int) -> float:
    is_laplace = isinstance(mechanism, LaplaceMechanism)
    return mechanism.noise_scale_on(size) if is_laplace else mechanism.noise_std_on(size)


@every_real
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_releases_are_exact_multiples_of_a_power_of_two(mechanism, size):
    assert math.frexp(mechanism.grid)[0] == 0.5
    value = np.random.default_rng(0).normal(size=1000) * size
    steps = mechanism.release(value, 1) / mechanism.grid
    assert (steps == np.rint(steps)).all()


@every_real
def test_the_sum_of_value_and_noise_is_exact(mechanism):
    """Against fractions: the release is the float nearest to (rounded value) + noise."""
    value = (
        np.random.default_rng(2).normal(size=1000) * 10.0 ** np.arange(-12, 18).repeat(34)[:1000]
    )
    noise = mechanism.release(np.zeros(1000), 5)
    released = mechanism.release(value, 5)
    step = Fraction(mechanism.grid)
    for x, n, y in zip(value, noise, released, strict=True):
        exact = round(Fraction(float(x)) / step) * step + Fraction(float(n))
        assert float(exact) == y


@every_real
def test_rounding_is_charged_where_it_is_worst(mechanism):
    """Every coordinate moves across the boundary of a cell: the distance grows by a step each."""
    order = 1 if isinstance(mechanism, LaplaceMechanism) else 2
    bound = mechanism.l1_sensitivity if order == 1 else mechanism.l2_sensitivity
    size, grid = 1000, mechanism.grid
    cells = math.floor(bound / (size if order == 1 else math.sqrt(size)) / grid)
    low = np.full(size, grid * 0.499)
    high = np.full(size, grid * 0.499 + cells * grid + grid * 0.002)
    moved = mechanism.release(high, 3) - mechanism.release(low, 3)  # the same noise
    distance = np.linalg.norm(moved, order)
    assert distance > np.linalg.norm(high - low, order) * (1 + 1e-9)
    assert distance <= noise_on(mechanism, size) / mechanism.noise_multiplier


def test_random_neighbors_stay_within_the_charged_distance():
    mechanism = GaussianMechanism(1.0, l2_sensitivity=1.0)
    rng = np.random.default_rng(5)
    for _ in range(50):
        value, step = rng.normal(size=50), rng.normal(size=50)
        neighbor = value + step / np.linalg.norm(step)
        moved = mechanism.release(value, 9) - mechanism.release(neighbor, 9)
        assert np.linalg.norm(moved) <= mechanism.noise_std_on(50)


def test_the_noise_is_raised_by_the_share_that_the_docstring_states():
    for multiplier in (1e-3, 1.0, 300.0):
        for size in (1, 7, 10**6, 10**9):
            normal = GaussianMechanism(multiplier, l2_sensitivity=3.0)
            raised = normal.noise_std_on(size) / normal.noise_std - 1
            assert 0 < raised <= 4e-9 * multiplier * math.sqrt(size) + 1e-14
            laplace = LaplaceMechanism(multiplier, l1_sensitivity=3.0)
            raised = laplace.noise_scale_on(size) / laplace.noise_scale - 1
            assert 0 < raised <= 4e-9 * multiplier * size + 1e-14
    grid = GridGaussianMechanism(2.0, l2_sensitivity=3.0, dimension=10**8)
    assert grid.noise_std == GaussianMechanism(2.0, l2_sensitivity=3.0).noise_std_on(10**8)


@every_real
def test_huge_and_tiny_values_are_released_without_an_error(mechanism):
    value = np.zeros(1000)
    value[:6] = 1e300, -1e300, np.finfo(float).max, -np.finfo(float).max, 5e-324, -5e-324
    released = mechanism.release(value, 0)
    assert np.isfinite(released).all()
    assert released[0] > 1e290
    assert released[1] < -1e290
    assert abs(released[4:6]).max() < 100


@pytest.mark.parametrize("scale", [2.0**-899, 1e-200, 1e200, 2.0**899])
def test_any_scale_of_noise_is_on_its_grid(scale):
    for mechanism in (
        GaussianMechanism(1.0, l2_sensitivity=scale),
        LaplaceMechanism(1.0, l1_sensitivity=scale),
    ):
        released = mechanism.release(np.full(2000, scale / 3), 0)
        assert 0.9 < np.std(released / scale) < 1.6
        steps = released / mechanism.grid
        assert (steps == np.rint(steps)).all()


def test_scales_at_the_ends_of_the_floats_are_refused():
    for scale in (1e-290, 1e290):
        with pytest.raises(ValueError, match="must be between"):
            GaussianMechanism(1.0, l2_sensitivity=scale)
        with pytest.raises(ValueError, match="must be between"):
            LaplaceMechanism(1.0, l1_sensitivity=scale)


def test_noise_that_double_precision_cannot_add_is_refused():
    GaussianMechanism(1e12, l2_sensitivity=1.0).release(np.zeros(4), 0)
    with pytest.raises(ValueError, match="noise_multiplier must be smaller"):
        GaussianMechanism(1e14, l2_sensitivity=1.0).release(0.0)
    with pytest.raises(ValueError, match="noise_multiplier must be smaller"):
        LaplaceMechanism(1e14, l1_sensitivity=1.0).release(0.0)


def test_whole_numbers_beyond_doubles_are_not_moved_apart():
    mechanism = GaussianMechanism(1.0, l2_sensitivity=1.0)
    base = 2**53
    for dtype in (np.int64, np.uint64):
        pair = [np.array([base + k], dtype) for k in (2, 3)]  # as floats they are 2 apart
        apart = mechanism.release(pair[1], 1) - mechanism.release(pair[0], 1)
        assert abs(apart[0]) <= 1
    assert mechanism.release(np.array([-(2**62)]), 0)[0] < -(2**52)
    if np.finfo(np.longdouble).bits > 64:
        with pytest.raises(TypeError, match="64 bits"):
            mechanism.release(np.ones(2, np.longdouble))


def test_the_noisy_max_of_huge_scores_still_has_noise():
    pick = GaussianNoisyMax(2.0, l2_sensitivity=1.0)
    assert {pick.release(np.full(3, 2.0**60), seed) for seed in range(60)} == {0, 1, 2}
    assert pick.release([-1e308, 1e308, 0.0], 0) == 1


def test_rounded_normal_rounds_center_plus_noise():
    step = 2.0**-10
    draws = rounded_normal(0.5, step=step, center=3.3, size=4000, rng=0)
    assert (draws / step == np.rint(draws / step)).all()
    assert draws.mean() == pytest.approx(3.3, abs=6 * 0.5 / math.sqrt(4000))
    assert rounded_normal(0.0, step=0.5, center=0.76).tolist() == [1.0]
    with pytest.raises(ValueError, match="power of two"):
        rounded_normal(1.0, step=0.3)


def test_the_dimension_is_checked():
    with pytest.raises(ValueError, match="2 coordinates, got 3"):
        GridGaussianMechanism(1.0, l2_sensitivity=1.0, dimension=2).release([1.0, 2.0, 3.0])


@pytest.mark.parametrize("multiplier", [0.01, 1.0, 100.0, 1e6])
@pytest.mark.parametrize("size", [1, 10**3, 10**6, 10**9])
def test_the_mass_outside_the_price_is_negligible(multiplier, size):
    assert tail_mass(GaussianMechanism(multiplier, l2_sensitivity=2.0), size=size) < 1e-100
    if multiplier * size <= 2**43:  # beyond, the release is refused
        assert tail_mass(LaplaceMechanism(multiplier, l1_sensitivity=2.0), size=size) < 1e-100


def test_the_tail_mass_is_that_of_the_law():
    """Where the noise is so large that 2^53 steps are few scales, against the known tails."""
    normal = GaussianMechanism(1e15, l2_sensitivity=1.0)
    reach = 2.0**53 * normal.grid / normal.noise_std_on(4)
    assert 3 < reach < 10
    assert tail_mass(normal, size=4) == pytest.approx(4 * math.erfc(reach / math.sqrt(2)))
    laplace = LaplaceMechanism(1e15, l1_sensitivity=1.0)
    reach = 2.0**53 * laplace.grid / laplace.noise_scale_on(4)
    assert tail_mass(laplace, size=4) == pytest.approx(min(1.0, 4 * math.exp(-reach)))


def test_a_noise_scale_is_never_rounded_below_its_charge():
    for multiplier, sensitivity, rounding in np.random.default_rng(0).random((1000, 3)):
        exact = Fraction(multiplier) * (Fraction(sensitivity) + Fraction(rounding))
        assert (
            exact
            <= Fraction(raised(multiplier, sensitivity, rounding))
            <= exact * Fraction(1 + 2.0**-40)
        )
