"""The fast path of noise as a loop: the bits of numpy, its words and noise, and ways without it."""

import itertools
import math
import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest

from tacit.training.noise import grid_noise
from tacit.training.noise.banded_noise import MixedSum, _Mixing
from tacit.training.noise.compiled_loop import compiled_loop
from tacit.training.noise.grid_noise import (
    TILE,
    NoiseGrid,
    SparseSum,
    SumOnGrid,
    add_noise,
    make_grids,
)
from tacit.training.noise.key import Key, ShakeWords

STRIP = grid_noise._STRIP
FLOATS = (np.float32, np.float64)
STEP = 2.0**-29


def python_loop(words, unit, inside, stretch, total, per_step, factor, out, late, steps):
    """The loop again, to be read beside the one for the compiler."""
    found = 0
    for i, word in enumerate(words.view(np.int64)):
        layer = word & 1023
        point = np.float64(word) * unit[layer]
        noise = np.rint(point * stretch)
        x = np.clip(np.rint(np.float64(total[i]) * per_step), -(2.0**1000), 2.0**1000)
        if abs(point) >= inside[layer]:
            late[found], steps[found] = i, x
            found, noise = found + 1, np.nan
        out[i] = (noise + x) * factor
    return found


@pytest.fixture(params=["python", "compiled"])
def most(request, monkeypatch):
    """Puts a loop in place, of Python or compiled; gives how many numbers it does quickly."""
    if request.param == "compiled":
        pytest.importorskip("llvmlite")
        return math.inf
    loops = dict.fromkeys(itertools.product(["float32", "float64"], repeat=2), python_loop)
    monkeypatch.setattr(grid_noise, "compiled_loop", lambda *kinds: loops.get(kinds))
    monkeypatch.setattr(grid_noise, "_compiled", lru_cache(grid_noise._compiled.__wrapped__))
    return 5000


def release(make_parts, *, is_loop, threads=1, source=None, factor=0.1, keep=lambda part: part.out):
    """Return what a release of `make_parts()` writes, by the loop or by numpy."""
    parts = make_parts()
    source = source or Key.from_seed(5).noise("noise", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid_noise, "_PATIENCE", 0 if is_loop else math.inf)
        assert bool(grid_noise._loops_of(parts)) == is_loop
        add_noise(parts, factor, source=source, threads=threads)
    return [keep(part).copy() for part in parts]


def check_same_bits(make_parts, **options):
    ways = [release(make_parts, is_loop=is_loop, **options) for is_loop in (False, True)]
    for numpy, loop in zip(*ways, strict=True):
        assert np.array_equal(np.isnan(numpy), np.isnan(loop))  # a NaN has no sign of its own
        assert np.abs(numpy).tobytes() == np.abs(loop).tobytes()
        assert np.array_equal(
            np.signbit(numpy) & ~np.isnan(numpy), np.signbit(loop) & ~np.isnan(loop)
        )
    return ways[0]


def dense(rng, size, kind, out, grid, *, in_place=False):
    """A sum with numbers of all sizes, infinities, NaN, and zeros of both signs."""
    with np.errstate(over="ignore"):
        total = rng.standard_normal(size) * 2.0 ** rng.integers(-60, 60, size)
        rare = rng.random(size) < 0.01
        special = [math.inf, -math.inf, math.nan, 0.0, -0.0, 5e-324, 1e308, -1e308, 1e-40]
        total = np.where(rare, rng.choice(special, size), total).astype(kind)
    return SumOnGrid(total, grid, total if in_place and kind is out else np.empty(size, out))


def sparse(rng, size, kind, out, grid, *, width=7, share=0.2):
    rows = np.flatnonzero(rng.random(-(-size // width)) < share)
    values = rng.standard_normal((len(rows), width)).astype(kind)
    values[:1] = math.inf
    return SumOnGrid(SparseSum(rows, values, 0, size), grid, np.empty(size, out))


def banded(rng, size, kind, out, grid):
    older, recent = rng.standard_normal((2, size)) * 2.0**28
    residual = np.zeros(size)
    total = (rng.standard_normal(size) * 3).astype(kind)
    options = _Mixing(0.8, grid.step, 10.0, 2.0**35)
    mixed = MixedSum(total, older, [(recent, -0.3)], residual, options)
    mixed.residual = residual  # for the comparison
    return SumOnGrid(mixed, grid, np.empty(size, out))


SIZES = [[1], [7], [0, 3, 0], [1200, 1, 900], [STRIP], [STRIP + 3, 40], [TILE + 40_000, 5, STRIP]]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("one_grid", [True, False])
@pytest.mark.parametrize("make", [dense, sparse, banded])
def test_the_loop_gives_the_bits_of_numpy(most, make, sizes, one_grid):
    if sum(sizes) > most:
        pytest.skip("a loop of Python takes too long")
    grids = make_grids(
        1.5, [1.0] * len(sizes) if one_grid else range(1, len(sizes) + 1), sum(sizes)
    )

    for kinds in (
        itertools.product(FLOATS, FLOATS) if sum(sizes) < 3 * STRIP else [(FLOATS[0],) * 2]
    ):

        def parts(kinds=kinds):
            rng = np.random.default_rng(3)
            zipped = zip(sizes, grids, strict=True)
            return [make(rng, size, *kinds, grid) for size, grid in zipped]

        check_same_bits(parts)
        if make is banded:
            check_same_bits(parts, keep=lambda part: part.total.residual)


@pytest.mark.parametrize("seed", range(8))
def test_any_mixture_of_sums_gets_the_bits_of_numpy(most, seed):
    largest = min(most / 5, 3 * STRIP)

    def parts():
        rng = np.random.default_rng(seed)
        found = []
        for _ in range(int(rng.integers(1, 6))):
            size = int(rng.integers(0, largest))
            noise_steps = float(rng.choice([1.0, 1.7])) * 2.0**28
            grid = NoiseGrid(float(rng.choice([2.0**-700, STEP, 1.0, 2.0**200])), noise_steps)
            kinds = rng.choice(FLOATS, 2)
            make = [dense, sparse, banded][int(rng.integers(3))]
            options = {"in_place": bool(rng.integers(2))} if make is dense else {}
            found.append(make(rng, size, *kinds, grid, **options))
        return found

    check_same_bits(parts, factor=0.037)
    check_same_bits(parts, threads=3)


def test_threads_do_not_matter_to_the_loop(most):
    if most < math.inf:
        pytest.skip("a loop of Python takes too long")
    grid = NoiseGrid(STEP, 2.0**28)

    def parts():
        rng = np.random.default_rng(1)
        return [make(rng, TILE + 77, *FLOATS, grid) for make in (dense, sparse)]

    alone = release(parts, is_loop=True)
    for threads in (2, 5):
        for a, b in zip(alone, release(parts, is_loop=True, threads=threads), strict=True):
            assert np.array_equal(a, b, equal_nan=True)
    with ThreadPoolExecutor(4) as pool:  # releases of several runs at the same time
        whole = list(pool.map(lambda _: add(parts()), range(4)))
    assert all(np.array_equal(found, whole[0], equal_nan=True) for found in whole)


def add(parts):
    add_noise(parts, 0.1, source=Key.from_seed(5).noise("noise", 0))
    return np.concatenate([part.out for part in parts])


class Counted:
    """A source that notes every word that it gives, and gives each number a word of its own."""

    def __init__(self, *, is_readonly=False):
        self.given, self._source = [], Key.from_seed(8).noise("noise", 0)
        self._is_readonly = is_readonly

    def sequence(self, number):
        draw, place = self._source.sequence(number), itertools.count()

        def noted(count):
            words = draw(count).copy()
            self.given.append((number, next(place), count, words.tobytes()))
            words.flags.writeable = not self._is_readonly
            return words

        return noted


def test_both_ways_take_the_same_words_and_each_once(most):
    size = int(min(2 * STRIP + 9, most))
    grid = NoiseGrid(STEP, 2.0**28)
    sources = Counted(), Counted()
    for source, is_loop in zip(sources, (False, True), strict=True):
        release(
            lambda: [SumOnGrid(np.zeros(size), grid, np.empty(size))],
            is_loop=is_loop,
            source=source,
        )
    assert sources[0].given == sources[1].given
    words = np.frombuffer(b"".join(given[3] for given in sources[1].given), np.uint64)
    assert len(words) >= size
    assert len(np.unique(words)) == len(words)


def test_each_number_has_the_noise_of_its_own_word(most):
    """Exact arithmetic on the words, beside both ways: no noise is missing, moved or used twice."""
    size, source, grid = int(min(STRIP, most)), Counted(), NoiseGrid(STEP, 2.0**28)
    total = np.random.default_rng(0).normal(0, 5, size)
    (found,) = release(
        lambda: [SumOnGrid(total, grid, np.empty(size))],
        is_loop=True,
        source=source,
        factor=1 / grid.step,
    )
    words = np.frombuffer(source.given[0][3], np.int64)[:size]
    layers = grid_noise.ziggurat()
    wrong = undecided = 0
    for word, x, value in zip(words.tolist(), total.tolist(), found.tolist(), strict=True):
        layer = word & 1023
        width = float(layers.unit[layer]) * 2.0**63
        point = word / 2**63 * width
        noise = value - round(x / grid.step)
        if abs(point) < float(layers.inside[layer]) * (1 - 1e-12):
            wrong += abs(noise - point * grid.noise_steps) > 0.51
        else:
            undecided += 1
    assert wrong == 0
    assert 0 < undecided < 0.02 * size


@pytest.mark.parametrize("make", [dense, sparse, banded])
@pytest.mark.parametrize("is_loop", [False, True])
def test_a_release_that_fails_midway_leaves_no_sum_without_noise(most, make, is_loop, monkeypatch):
    """Numbers whose noise is not drawn yet are NaN, not the sum."""
    size = 5000

    def parts():
        part = make(np.random.default_rng(2), size, *FLOATS, NoiseGrid(STEP, 2.0**28))
        part.out[:] = 0.0
        return [part]

    (whole,) = release(parts, is_loop=is_loop)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid_noise, "_finish", lambda words, draw: seen.append(len(words)) or fail())
        patch.setattr(grid_noise, "_PATIENCE", 0 if is_loop else math.inf)
        begun = parts()
        with pytest.raises(RuntimeError, match="midway"):
            add_noise(begun, 0.1, source=Key.from_seed(5).noise("noise", 0))
    missing = np.isnan(begun[0].out) & ~np.isnan(whole)
    assert seen[0] - 60 <= missing.sum() <= seen[0]  # but where the sum is NaN itself
    assert missing.any()
    same = np.isnan(begun[0].out) | (begun[0].out == whole)
    assert same.all()


def fail():
    raise RuntimeError("midway")


def wrong_loops():
    """Loops that are wrong in one way each: name and change of arguments or of results."""

    def altered(change_arguments=None, change_results=None):
        def loop(*arguments):
            arguments = list(arguments)
            if change_arguments:
                change_arguments(arguments)
            found = python_loop(*arguments)
            return found if change_results is None else change_results(found, arguments)

        return loop

    def on(place, change):
        return lambda arguments: arguments.__setitem__(place, change(arguments[place]))

    def last_bit(found, arguments):
        out = arguments[7]
        out[1000] = np.nextafter(out[1000], out.dtype.type(0))
        return found

    def one_not_written(found, arguments):
        arguments[7][17] = 0.0
        return found

    return {
        "no noise": altered(on(1, np.zeros_like)),
        "noise of one word": altered(on(0, lambda words: np.full_like(words, words[5]))),
        "the noise of the next number": altered(on(0, lambda words: np.roll(words, 1))),
        "another scale": altered(on(3, lambda stretch: stretch * (1 + 2.0**-50))),
        "no sum": altered(on(4, np.zeros_like)),
        "another step": altered(on(5, lambda per_step: per_step * 2)),
        "another factor": altered(on(6, lambda factor: np.nextafter(factor, 1))),
        "one bit": altered(None, last_bit),
        "one number not written": altered(None, one_not_written),
        "all decided": altered(on(2, lambda inside: np.full_like(inside, np.inf))),
        "none of the late": altered(None, lambda found, _: 0),
        "one late too few": altered(None, lambda found, _: found - 1),
        "infinite sums as they are": unlimited,
    }


def unlimited(words, unit, inside, stretch, total, per_step, factor, out, late, steps):
    room = words, unit, inside, stretch, total, per_step, factor, out, late, steps
    found = python_loop(*room)
    limited = np.isinf(total) & ~np.isnan(out)
    out[limited] = total[limited]
    return found


@pytest.mark.parametrize("name", [*wrong_loops()])
def test_a_wrong_loop_is_not_used(name, monkeypatch):
    monkeypatch.setattr(grid_noise, "compiled_loop", lambda *_: wrong_loops()[name])
    assert grid_noise._compiled.__wrapped__(np.dtype("f4"), np.dtype("f8")) is None


@pytest.mark.parametrize("kinds", [*itertools.product(FLOATS, FLOATS)], ids=str)
def test_the_right_loop_is_used(kinds, monkeypatch):
    monkeypatch.setattr(grid_noise, "compiled_loop", lambda *_: python_loop)
    assert grid_noise._compiled.__wrapped__(*map(np.dtype, kinds)) is python_loop


def missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)


def changed(monkeypatch, **attributes):
    """Another llvmlite, whose functions are gone or do something else."""
    binding = SimpleNamespace(**attributes)
    monkeypatch.setitem(sys.modules, "llvmlite", SimpleNamespace(binding=binding))
    monkeypatch.setitem(sys.modules, "llvmlite.binding", binding)


def of_another_version(monkeypatch):
    changed(monkeypatch)


def broken(monkeypatch):
    def fail():
        raise OSError("no LLVM for this processor")

    changed(monkeypatch, initialize_native_target=fail)


def deprecated(monkeypatch):
    def warn():
        warnings.warn("use something else", DeprecationWarning, stacklevel=1)
        raise RuntimeError

    changed(monkeypatch, initialize_native_target=warn)


@pytest.mark.parametrize("state", [missing, of_another_version, broken, deprecated])
def test_without_an_llvm_that_works_numpy_releases_the_same(state, monkeypatch):
    def parts():
        return [dense(np.random.default_rng(0), 3000, *FLOATS, NoiseGrid(STEP, 2.0**28))]

    (expected,) = release(parts, is_loop=False)
    state(monkeypatch)
    monkeypatch.setattr(grid_noise, "_compiled", grid_noise._compiled.__wrapped__)
    monkeypatch.setattr(grid_noise, "_PATIENCE", 0)
    assert compiled_loop("float32", "float32") is None
    assert np.array_equal(add(parts()), expected, equal_nan=True)


def test_other_types_have_no_loop():
    assert compiled_loop("float32", "float16") is None
    assert compiled_loop(">f4", "float32") is None


@pytest.mark.parametrize("kinds", [*itertools.product(["float32", "float64"], repeat=2)], ids=str)
def test_the_loop_is_there_and_fuses_nothing(kinds):
    """Where llvmlite is installed. A loop that is missing without a reason would only be slow."""
    pytest.importorskip("llvmlite")
    loop = compiled_loop(*kinds)
    assert loop is not None
    assert grid_noise._compiled(*map(np.dtype, kinds)) is not None
    assert "mul" in loop.assembly
    fused = ("fmadd", "fnmadd", "fmsub", "fmla", "fmls")
    assert not any(word in loop.assembly for word in fused)


def test_the_loop_does_not_read_or_write_beyond_its_arrays():
    pytest.importorskip("llvmlite")
    loop, layers = compiled_loop("float32", "float32"), grid_noise.ziggurat()
    late, steps = np.empty(8, np.int64), np.empty(8)
    for n, m, k in ((9, 9, 9), (8, 7, 8), (8, 8, 7), (8, 9, 8)):
        arrays = np.zeros(n, np.uint64), np.zeros(m, np.float32), np.full(k, 7, np.float32)
        with pytest.raises(AssertionError):
            loop(arrays[0], *layers[:2], 1.0, arrays[1], 1.0, 1.0, arrays[2], late, steps)
        assert (arrays[2] == 7).all()
    whole = np.full(24, 7, np.float32)
    words = np.full(8, 2**63 - 1, np.uint64)
    n = loop(words, *layers[:2], 1.0, np.ones(8, np.float32), 1.0, 1.0, whole[8:16], late, steps)
    assert n == 8  # all beyond the edge of their layer
    assert np.isnan(whole[8:16]).all()
    assert (np.delete(whole, np.s_[8:16]) == 7).all()
    with pytest.raises(AssertionError):
        loop(words, layers[0][:5], layers[1], 1.0, whole[:8], 1.0, 1.0, whole[:8], late, steps)
    empty = np.empty(0, np.float32)
    assert loop(words[:0], *layers[:2], 1.0, empty, 1.0, 1.0, empty, late, steps) == 0


def test_arrays_that_the_loop_does_not_take_are_left_to_numpy(most, monkeypatch):
    size, grid = 3000, NoiseGrid(STEP, 2.0**28)
    wide = np.random.default_rng(0).standard_normal(2 * size).astype(np.float32)
    shifted = np.empty(4 * size + 1, np.uint8)[1:].view(np.float32)
    readonly = wide[:size].copy()
    readonly.flags.writeable = False
    swapped = wide[:size].astype(">f4")
    expected = add([SumOnGrid(wide[::2].copy(), grid, np.empty(size, np.float32))])
    monkeypatch.setattr(grid_noise, "_PATIENCE", 0)
    for total, out in (
        (wide[::2], np.empty(size, np.float32)),
        (wide[::2].copy(), np.empty(2 * size, np.float32)[::2]),
        (wide[::2].copy(), shifted),
        (readonly, np.empty(size, np.float32)),
        (swapped, np.empty(size, np.float32)),
    ):
        part = SumOnGrid(total, grid, out)
        assert not grid_noise._loops_of([part])
        found = add([part])
        if total is not readonly and total is not swapped:
            assert np.array_equal(found, expected)


@pytest.mark.parametrize("is_readonly", [True, False])
def test_words_may_be_readonly(most, is_readonly):
    grid = NoiseGrid(STEP, 2.0**28)
    check_same_bits(
        lambda: [dense(np.random.default_rng(0), 2000, *FLOATS, grid)],
        source=Counted(is_readonly=is_readonly),
    )
    check_same_bits(
        lambda: [dense(np.random.default_rng(0), 2000, *FLOATS, grid)],
        source=ShakeWords(bytes(32)),
    )


def test_numpy_releases_until_compiling_pays(monkeypatch):
    asked = []
    monkeypatch.setattr(grid_noise, "_compiled", lambda *kinds: asked.append(kinds))
    monkeypatch.setattr(grid_noise, "_released", 0)
    monkeypatch.setattr(grid_noise, "_PATIENCE", 1000)
    for _ in range(3):
        add([SumOnGrid(np.zeros(400), NoiseGrid(STEP, 2.0**28), np.empty(400))])
    assert asked == [(np.dtype("f8"),) * 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_loop_works_after_a_fork(most, monkeypatch):
    def parts():
        return [dense(np.random.default_rng(0), 2000, *FLOATS, NoiseGrid(STEP, 2.0**28))]

    (expected,) = release(parts, is_loop=True)
    monkeypatch.setattr(grid_noise, "_PATIENCE", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the test process has threads
        child = os.fork()
    if not child:
        os._exit(0 if np.array_equal(add(parts()), expected, equal_nan=True) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_sum_is_limited_whatever_the_others_are():
    """One number beyond 2^1000 steps, alone or among others that add up to infinity or cancel."""
    big = 2.0**1010
    for others in ([], [-big], [math.inf], [-math.inf, 1e308, 1e308], [math.nan]):
        found = grid_noise.rounded(np.array([big, 2.5, *others]))
        assert found[0] == 2.0**1000
        assert found[1] == 2.0
    assert grid_noise.rounded(np.empty(0)).size == 0
