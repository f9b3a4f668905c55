"""The sampler of integer noise: its law in the body and in the tail, its grid, its threads."""

import math

import numpy as np
import pytest
from scipy.stats import binom, chi2, norm, poisson

from tacit.training.noise.grid_noise import (
    TILE,
    NoiseGrid,
    SparseSum,
    SumOnGrid,
    _exponential,
    _tail,
    add_noise,
    make_grids,
    ziggurat,
)
from tacit.training.noise.key import AESWords, Key, PhiloxWords, ShakeWords

FALSE_ALARM = 1e-6  # probability that a statistical test fails on sound code
START = 4.038849846109504


def noise(count, *, seed=1, kind=None, multiplier=1.0):
    """Standard normal numbers as the release draws them, from a sum of zeros."""
    source = Key.from_seed(seed).noise("noise", 0) if kind is None else kind(bytes(range(32)))
    (grid,) = make_grids(multiplier, [1.0], count)
    found = np.empty(count)
    add_noise(
        [SumOnGrid(np.zeros(count), grid, found)], 1 / (grid.step * grid.noise_steps), source=source
    )
    return found


def check_body(z, cells=200):
    """Chi-square over cells of equal probability."""
    edges = norm.ppf(np.arange(1, cells) / cells)
    counts = np.bincount(np.searchsorted(edges, z), minlength=cells)
    statistic = ((counts - z.size / cells) ** 2).sum() / (z.size / cells)
    assert chi2.ppf(FALSE_ALARM / 2, cells - 1) < statistic < chi2.isf(FALSE_ALARM / 2, cells - 1)


def check_beyond(count, draws, probability):
    assert poisson.ppf(FALSE_ALARM / 2, draws * probability) <= count
    assert count <= poisson.isf(FALSE_ALARM / 2, draws * probability)


@pytest.mark.parametrize("kind", [AESWords, PhiloxWords, ShakeWords])
def test_the_body_is_normal(kind):
    if not kind.is_available():
        pytest.skip("the generator is not installed")
    check_body(noise(300_000, kind=kind))


def test_wedges_and_layers_have_their_share():
    """Cells as fine as the layers: a wrong width, height or wedge shows here."""
    z = np.abs(noise(2_000_000))
    edges = np.sort(ziggurat().unit[1:] * 2.0**63)
    counts = np.bincount(np.searchsorted(edges, z), minlength=len(edges) + 1)
    expected = z.size * np.diff(2 * norm.cdf([0.0, *edges, math.inf]) - 1)
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert chi2.ppf(5e-7, len(edges)) < statistic < chi2.isf(5e-7, len(edges))


def test_all_layers_have_one_area():
    layers = ziggurat()
    areas = layers.unit[1:] * 2.0**63 * layers.height[1:]
    tail = math.sqrt(math.pi / 2) * math.erfc(START / math.sqrt(2))
    base = START * math.exp(-START * START / 2) + tail
    assert np.abs(areas / base - 1).max() < 2.0**-36
    assert layers.unit[0] * 2.0**63 * math.exp(-START * START / 2) == pytest.approx(base, rel=1e-14)
    assert len(areas) == 1023
    top = layers.floor + layers.height  # what is accepted at once lies below the curve
    assert (np.exp(-(layers.inside**2) / 2) >= top * (1 - 2.0**-35)).all()


@pytest.mark.parametrize("count", [10**6, pytest.param(2 * 10**7, marks=pytest.mark.slow)])
def test_the_tail_is_normal_beyond_5_6_and_7_deviations(count):
    z = _tail(count, Key.from_seed(2).noise("noise", 0).sequence(0))
    assert z.min() >= START
    for beyond in (4.2, 4.5, 5.0, 5.5, 6.0, 7.0):
        check_beyond((z > beyond).sum(), count, norm.sf(beyond) / norm.sf(START))


@pytest.mark.slow
def test_all_draws_are_normal_beyond_5_6_and_7_deviations():
    """4e8 numbers: 229 are expected beyond 5 deviations, 0.8 beyond 6."""
    counts, block = dict.fromkeys((4.0, 5.0, 6.0, 7.0), 0), 4_000_000
    for seed in range(100):
        z = np.abs(noise(block, seed=seed))
        for beyond in counts:
            counts[beyond] += int((z > beyond).sum())
    for beyond, found in counts.items():
        check_beyond(found, 100 * block, 2 * norm.sf(beyond))


def test_a_uniform_number_of_zeros_gets_further_bits():
    words = iter([0, 0, 5, 2**63, 2**64 - 1])
    found = _exponential(1, lambda n: np.array([next(words) for _ in range(n)], np.uint64))
    value = (5 << 64) + 2**63
    assert found[0] == pytest.approx(256 * math.log(2) - math.log(value))
    assert found[0] > 80  # a number beyond 20 deviations: the tail does not end


def test_neighboring_cells_are_equally_likely():
    """The lowest bits of the integer noise are even: no holes that would tell sums apart."""
    (grid,) = make_grids(1.0, [1.0], 10**6)
    found = np.empty(10**6)
    add_noise(
        [SumOnGrid(np.zeros(10**6), grid, found)],
        1 / grid.step,
        source=Key.from_seed(4).noise("n", 0),
    )
    whole = found.astype(np.int64)
    assert np.array_equal(whole, found)
    for bits in (1, 4, 8):
        counts = np.bincount(whole & (2**bits - 1), minlength=2**bits)
        expected = whole.size / 2**bits
        statistic = ((counts - expected) ** 2).sum() / expected
        assert chi2.ppf(5e-7, 2**bits - 1) < statistic < chi2.isf(5e-7, 2**bits - 1)
    for bit in range(20):
        ones = int((whole >> bit & 1).sum())
        assert binom.ppf(2.5e-8, 10**6, 0.5) < ones < binom.isf(2.5e-8, 10**6, 0.5)


def test_noise_is_the_same_integer_whatever_the_sum():
    rng = np.random.default_rng(0)
    count = TILE + 1000
    (grid,) = make_grids(2.0, [1.0], count)
    zero, found = np.empty(count), np.empty(count)
    source = Key.from_seed(4).noise("noise", 0)
    add_noise([SumOnGrid(np.zeros(count), grid, zero)], 1 / grid.step, source=source)
    for total in (rng.normal(0, 1e-3, count), rng.normal(0, 1e3, count).astype(np.float32)):
        add_noise([SumOnGrid(total, grid, found)], 1 / grid.step, source=source)
        assert np.array_equal(found - np.rint(total.astype(float) / grid.step), zero)


def test_parts_with_their_own_grids_are_released_as_if_alone():
    sizes, scales = [5, 40_000, 3], [0.25, 3.0, 1e-5]
    grids = make_grids(1.5, scales, sum(sizes))
    source = Key.from_seed(4).noise("noise", 0)
    together = [np.zeros(size) for size in sizes]
    parts = [SumOnGrid(part, grid, part) for part, grid in zip(together, grids, strict=True)]
    add_noise(parts, 1.0, source=source)
    start = 0
    for part, size, own in zip(together, sizes, grids, strict=True):
        alone = np.empty(sum(sizes))
        add_noise([SumOnGrid(np.zeros(sum(sizes)), own, alone)], 1.0, source=source)
        here = slice(start, start + size)
        # Scaling layers in place of the noise may move a number across the edge of a cell.
        assert np.abs(part - alone[here]).max() <= own.step
        start += size


@pytest.mark.parametrize("sizes", [[TILE + 40_000], [7, 32_000, TILE, 0, 9_000]])
def test_parts_may_be_released_in_their_own_memory(sizes):
    rng, (grid,) = np.random.default_rng(0), make_grids(1.0, [1.0], sum(sizes))
    source = Key.from_seed(4).noise("noise", 0)
    total = rng.normal(0, 10, sum(sizes)).astype(np.float32)
    apart = np.empty_like(total)
    add_noise([SumOnGrid(total, grid, apart)], 0.1, source=source)
    pieces = np.split(total, np.cumsum(sizes)[:-1])
    add_noise([SumOnGrid(piece, grid, piece) for piece in pieces], 0.1, source=source, threads=2)
    assert np.array_equal(total, apart)


def test_threads_do_not_matter():
    count = 3 * TILE + 17
    (grid,) = make_grids(1.0, [1.0], count)
    found = [np.empty(count, np.float32) for _ in range(2)]
    for threads, out in zip((1, 3), found, strict=True):
        source = Key.from_seed(4).noise("noise", 0)
        total = np.ones(count, np.float32)
        add_noise([SumOnGrid(total, grid, out)], 0.1, source=source, threads=threads)
    assert np.array_equal(*found)


@pytest.mark.parametrize("multiplier", [1e-9, 0.3, 1.0, 100.0, 1e6])
@pytest.mark.parametrize("dimension", [1, 1000, 10**9])
def test_rounding_is_charged(multiplier, dimension):
    scales = [1.0, 1e-3, 3e4]
    if multiplier * math.sqrt(dimension) > 2.0**39:
        with pytest.raises(ValueError, match="noise_multiplier must be below"):
            make_grids(multiplier, scales, dimension)
        return
    for grid, scale in zip(make_grids(multiplier, scales, dimension), scales, strict=True):
        assert isinstance(grid, NoiseGrid)
        assert math.frexp(grid.step)[0] == 0.5  # a power of two
        assert grid.noise_steps >= 2.0**28
        rounded_sensitivity = scale + grid.step * math.sqrt(dimension)
        assert grid.step * grid.noise_steps >= multiplier * rounded_sensitivity
        assert grid.step * grid.noise_steps <= multiplier * scale * (
            1.002 if multiplier * math.sqrt(dimension) < 2.0**29 else 2.0
        )


@pytest.mark.parametrize(("multiplier", "dimension"), [(100.0, 10**9), (1.0, 10**9), (0.3, 1000)])
def test_the_rounding_of_what_correlated_noise_keeps_is_charged_too(multiplier, dimension):
    """The share of the docstring: 2^-k sqrt(bands) of the grid, and 2^-23 of what is kept."""
    (alone,) = make_grids(multiplier, [1.0], dimension)
    (grid,) = make_grids(multiplier, [1.0], dimension, bands=4)
    k = math.frexp(grid.noise_steps)[1] - 1
    moved = (2 * 2.0**-k + 2.0**-23) * multiplier * math.sqrt(dimension)
    least = multiplier * (1 + moved / (1 - moved))
    assert least <= grid.step * grid.noise_steps <= least * (1 + 1e-9)
    assert grid.step * grid.noise_steps > alone.step * alone.noise_steps


@pytest.mark.parametrize("share", [0.0, 1e-3, 0.2, 1.0])
@pytest.mark.parametrize("width", [1, 3, 64, 50_000])  # the last is wider than a strip
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_a_sparse_sum_is_released_as_a_dense_one(share, width, kind):
    rng, size = np.random.default_rng(1), 100_000 // width * width
    rows = np.flatnonzero(rng.random(size // width) < share)
    values = rng.standard_normal((len(rows), width)).astype(kind)
    dense = np.zeros((size // width, width))
    dense[rows], dense = values, dense.reshape(-1)
    grid, source = NoiseGrid(2.0**-29, 2.0**28), Key.from_seed(2).noise("noise", 0)
    for here in (slice(None), slice(7, 12), slice(40_001, 90_000), slice(14, 80_000), slice(5, 5)):
        found, expected = (np.empty(len(dense[here]), np.float32) for _ in range(2))
        sparse = SparseSum(rows, values, 0, size)[here]
        for total, out in ((sparse, found), (dense[here], expected)):
            parts = [SumOnGrid(np.ones(11), grid, np.empty(11)), SumOnGrid(total, grid, out)]
            add_noise(parts, 0.5, source=source)
        assert np.array_equal(found, expected)
