"""Noise has exactly its law: error bounds, exact decisions, body and far tails of every sampler."""

import math
from dataclasses import replace

import mpmath
import numpy as np
import pytest
from scipy import stats

from tacit.mechanisms import SecureGenerator, noise_laws, secure_generator
from tacit.mechanisms.noise_laws import (
    EXPONENTIAL,
    GUMBEL,
    LAPLACE,
    NORMAL,
    largest_noisy_score,
    rounded_noise,
)
from tacit.mechanisms.rng import generator, random_words

FALSE_ALARM = 1e-6
LAWS = {law.name: law for law in (NORMAL, LAPLACE, EXPONENTIAL, GUMBEL)}
CDFS = {"normal": stats.norm, "Laplace": stats.laplace, "exponential": stats.expon}
SAMPLERS = {
    "statistical": generator,
    "secure": secure_generator,
    "seeded": lambda: np.random.default_rng(7),
}


def exact_draws(name: str, words: list[int], n_bits: int, place: float = 0.5) -> list[mpmath.mpf]:
    """Return the draws for uniform numbers at `place` of their cell, written independently."""
    cell = [(mpmath.mpf(word) + place) / mpmath.mpf(2) ** n_bits for word in words]
    if name == "normal":
        turn = cell[1] if cell[1] < 0.5 else cell[1] - 1
        radius = mpmath.sqrt(-2 * mpmath.log(cell[0]))
        return [radius * mpmath.cospi(2 * turn), radius * mpmath.sinpi(2 * turn)]
    if name == "Laplace":
        is_negative = cell[0] >= 0.5
        size = -mpmath.log(2 * cell[0] - is_negative)
        return [-size if is_negative else size]
    if name == "exponential":
        return [-mpmath.log(cell[0])]
    return [-mpmath.log(-mpmath.log1p(-cell[0]))]


def hard_words(law: noise_laws.NoiseLaw, n: int) -> np.ndarray:
    """Return random words, with powers of two and their neighbors among the first of them."""
    words = random_words(np.random.default_rng(11), (law.n_words, n))
    powers = np.uint64(1) << np.arange(64, dtype=np.uint64)
    special = np.concatenate([powers, powers - np.uint64(1), ~powers, ~powers + np.uint64(1)])
    words[0, : special.size] = special
    words[-1, special.size : 2 * special.size] = special
    return words


@pytest.mark.parametrize("name", LAWS)
def test_doubles_are_within_their_error_bound(name):
    law = LAWS[name]
    words = hard_words(law, 700)
    draws, error = law.approximate(words)
    worst = 0.0
    with mpmath.workdps(50):
        for i in np.flatnonzero(np.isfinite(error)):
            for place in (1e-9, 1 - 1e-9):
                exact = exact_draws(name, [int(word) for word in words[:, i]], 64, place)
                for d, number in enumerate(exact):
                    off = abs(mpmath.mpf(float(draws[d, i])) - number)
                    worst = max(worst, float(off) / error[i])
    assert worst <= 1
    assert np.mean(np.isfinite(error[512:])) > 0.99  # random words have a bound


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("n_bits", [128, 192])
def test_enclosures_contain_the_draw_and_are_narrow(name, n_bits):
    law = LAWS[name]
    words, more = hard_words(law, 600), random_words(np.random.default_rng(3), (3, 600))
    with mpmath.workdps(120):
        for i in range(0, 600, 5):
            long = [int(word) for word in words[:, i]]
            for extra in more[: n_bits // 64 - 1, i]:
                long = [(word << 64) | int(extra) for word in long]
            bounds = law.enclose(long, n_bits)
            assert bounds is not None
            for place in (1e-9, 1 - 1e-9):
                exact = exact_draws(name, long, n_bits, place)
                for (low, high), number in zip(bounds, exact, strict=True):
                    assert low <= number * mpmath.mpf(2) ** n_bits <= high
                    if i > 512:  # the words before are extreme
                        assert high - low < 2**36


def test_words_without_information_need_more_bits():
    for law in (NORMAL, LAPLACE, EXPONENTIAL):
        assert law.enclose([0] * law.n_words, 64) is None
    assert GUMBEL.enclose([0], 64) is None
    assert GUMBEL.enclose([2**64 - 1], 64) is None


class Replay(SecureGenerator):
    """A generator that hands out given words first, and random ones afterwards."""

    def __init__(self, words: np.ndarray, seed: int = 0) -> None:
        self.first, self.rest, self.calls = words, np.random.default_rng(seed), 0

    def words(self, size=None):
        self.calls += 1
        return self.first.copy() if self.calls == 1 else random_words(self.rest, tuple(size))


@pytest.mark.parametrize("name", ["normal", "Laplace", "exponential"])
@pytest.mark.parametrize("scale", [2.0**-3, 1e3, 2.0**28, 3e12])
def test_rounding_is_exact_at_every_scale(name, scale):
    """At scale 3e12 a part of the draws is decided by further bits, and no draw is off."""
    law = LAWS[name]
    words = hard_words(law, 600)
    source = Replay(words)
    rounded = rounded_noise(law, scale, words.shape[1] * law.n_draws, source, offset=0.25)
    rounded = rounded.reshape(law.n_draws, -1)
    with mpmath.workdps(50):
        for i in range(words.shape[1]):
            k = int(words[0, i])
            if not 2**50 < k % (2**63 if name == "Laplace" else 2**64) < 2**64 - 2**50:
                continue
            for d, number in enumerate(exact_draws(name, [int(w) for w in words[:, i]], 64)):
                off = abs(mpmath.mpf(float(rounded[d, i])) - scale * number - 0.25)
                assert off <= 0.5 + scale * 2.0**-45  # what the bits not drawn can move
    assert (source.calls > 1) or scale < 2.0**20


def test_a_draw_on_the_edge_of_a_cell_is_decided_by_further_bits():
    word = np.full((1, 1), int(math.exp(-1.0) * 2.0**64), np.uint64)  # -ln U is 1 up to 2^-53
    found = {float(rounded_noise(EXPONENTIAL, 0.5, 1, Replay(word, seed))[0]) for seed in range(8)}
    with mpmath.workdps(50):
        edge = mpmath.exp(-1) * mpmath.mpf(2) ** 64 - int(word[0, 0])
    assert found == ({0.0, 1.0} if 0 <= edge <= 1 else {float(edge > 1)})


@pytest.mark.parametrize("name", CDFS)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("scale", [0.15, 0.4, 3.0, 2.0**28])
def test_the_body_has_its_law_in_every_cell(name, sampler, scale):
    n, law, cdf = 40_000, LAWS[name], CDFS[name].cdf
    draws = rounded_noise(law, scale, n, SAMPLERS[sampler]())
    if scale > 100:  # cells are finer than any sample: 200 groups of cells instead
        edges = np.floor(CDFS[name].ppf(np.linspace(0, 1, 201)[1:-1]) * scale) + 0.5
    else:
        edges = np.arange(math.floor(-6 * scale), math.ceil(6 * scale) + 1) + 0.5
    masses = np.diff(cdf(np.concatenate([[-np.inf], edges, [np.inf]]) / scale))
    counts = np.bincount(np.searchsorted(edges, draws), minlength=masses.size)
    common = n * masses >= 5
    pooled = (
        np.append(counts[common], counts[~common].sum()),
        n * np.append(masses[common], masses[~common].sum()),
    )
    assert counts[masses < 1e-12].sum() == 0
    keep = pooled[1] > 1e-6
    assert stats.chisquare(pooled[0][keep], pooled[1][keep]).pvalue > FALSE_ALARM


class Tail(SecureGenerator):
    """Words of a sampler, with the first uniform number of each draw below exp(-depth)."""

    def __init__(self, source, depth: float) -> None:
        self._source, self._most = source, math.ceil(math.exp(-depth) * 2.0**64)

    def words(self, size=None):
        words = random_words(self._source, tuple(size))
        if len(size) == 2:  # the first words of a chunk; further bits stay as they are
            words[0] = self._source.integers(0, self._most, size=size[1])
        return words


@pytest.mark.parametrize("sampler", ["statistical", "secure"])
@pytest.mark.parametrize("sigmas", [5, 6, 7, 8, 9.5])
def test_the_tails_have_their_law_beyond(sampler, sigmas):
    """Given a radius beyond so many sigma, the coordinates beyond them are counted.

    P(|z| > t given radius > t) = 2 Q(t) / exp(-t^2 / 2), about 0.1. So a few hundred draws replace
    the 10^13 that as many counts beyond 7 sigma would need. Beyond 9.5, all of the first 64 bits
    are zero.
    """
    source = Tail(SAMPLERS[sampler](), sigmas**2 / 2)
    draws = rounded_noise(NORMAL, 2.0**28, 600, source) / 2.0**28
    beyond = int(np.sum(np.abs(draws) > sigmas))
    given = stats.norm.sf(sigmas) * 2 / (source._most * 2.0**-64)
    assert beyond > 0
    assert stats.binomtest(beyond, draws.size, given).pvalue > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("sampler", "millions"), [("statistical", 400), ("secure", 100)])
def test_ordinary_counts_beyond_five_six_and_seven_sigma(sampler, millions):
    counts, rng = np.zeros(3, int), SAMPLERS[sampler]()
    for _ in range(millions // 4):
        draws = np.abs(rounded_noise(NORMAL, 2.0**28, 4_000_000, rng)) / 2.0**28
        counts += [int(np.sum(draws > sigmas)) for sigmas in (5, 6, 7)]
    for count, sigmas in zip(counts, (5, 6, 7), strict=True):
        mean = 2 * stats.norm.sf(sigmas) * millions * 1e6
        assert stats.poisson.cdf(count, mean) > FALSE_ALARM
        assert stats.poisson.sf(count - 1, mean) > FALSE_ALARM


@pytest.mark.parametrize("law", [GUMBEL, EXPONENTIAL, LAPLACE], ids=lambda law: law.name)
def test_equal_first_bits_are_decided_by_further_bits(law):
    words = np.full((1, 3), 2**62 + 12345, np.uint64)
    chosen = [
        largest_noisy_score(law, 1.0, np.array([0.0, 0.0, -5.0]), Replay(words, seed))
        for seed in range(100)
    ]
    counts = np.bincount(chosen, minlength=3)
    assert counts[2] == 0
    assert stats.binomtest(int(counts[0]), 100, 0.5).pvalue > FALSE_ALARM


@pytest.mark.parametrize("law", [GUMBEL, EXPONENTIAL, LAPLACE], ids=lambda law: law.name)
def test_a_difference_below_double_precision_still_decides(law):
    """Scores 1 and 1 + 2^-52 with equal noise up to 2^-62: the higher score wins always."""
    scores = np.array([1.0, 1.0 + 2.0**-52])
    words = np.full((1, 2), 2**62 + 12345, np.uint64)
    picks = {largest_noisy_score(law, 1.0, scores, Replay(words, seed)) for seed in range(20)}
    assert picks == {1}


def test_odd_and_empty_sizes():
    for size in (0, 1, 2, 3, 2**14 + 1):
        assert rounded_noise(NORMAL, 5.0, size, np.random.default_rng(0)).shape == (size,)


def test_pi_is_right_to_the_last_bit():
    with mpmath.workdps(400):
        for shift in (256, 1024):
            assert abs(noise_laws._pi(shift) - mpmath.pi * mpmath.mpf(2) ** shift) <= 1


def test_a_law_with_coarse_doubles_chooses_the_same_scores():
    """Whatever the bound on the error of doubles is, further bits decide exactly."""

    def approximate(words):
        draws, error = GUMBEL.approximate(words)
        return np.rint(draws), error + 0.5

    coarse, rng = replace(GUMBEL, approximate=approximate), np.random.default_rng(0)
    for seed in range(50):
        words, scores = rng.integers(0, 2**64, (1, 8), np.uint64), rng.random(8)
        found = [largest_noisy_score(law, 1.0, scores, Replay(words, seed))
                 for law in (GUMBEL, coarse)]  # fmt: skip
        assert found[0] == found[1]
