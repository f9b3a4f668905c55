"""Generators: fresh by default, reproducible on request, and secure ones with the right laws."""

import os

import numpy as np
import pytest
from scipy import stats

from tacit.mechanisms import SecureGenerator, generator, secure_generator

FALSE_ALARM = 1e-6  # per test, shared among its checks; secure bits cannot be seeded
LAWS = {
    "random": (lambda rng, n: rng.random(n), stats.uniform()),
    "normal": (lambda rng, n: rng.normal(1.0, 2.0, n), stats.norm(1.0, 2.0)),
    "laplace": (lambda rng, n: rng.laplace(1.0, 2.0, n), stats.laplace(1.0, 2.0)),
    "exponential": (lambda rng, n: rng.exponential(2.0, n), stats.expon(scale=2.0)),
    "gumbel": (lambda rng, n: rng.gumbel(1.0, 2.0, n), stats.gumbel_r(1.0, 2.0)),
}


def test_none_is_fresh_entropy_each_time():
    assert generator().normal() != generator().normal()


def test_a_seed_repeats_and_a_generator_passes_through():
    assert generator(3).normal() == generator(np.int64(3)).normal()
    for rng in (np.random.default_rng(1), secure_generator()):
        assert generator(rng) is rng


@pytest.mark.parametrize(
    "rng", [True, 1.5, "seed", np.random.RandomState(0)], ids=lambda value: type(value).__name__
)
def test_other_types_are_refused(rng):
    with pytest.raises(TypeError, match="rng must be"):
        generator(rng)


def test_a_negative_seed_is_refused():
    with pytest.raises(ValueError, match="rng must be >= 0"):
        generator(-1)


@pytest.mark.parametrize("law", LAWS)
def test_secure_draws_follow_their_law(law):
    draw, expected = LAWS[law]
    sample = draw(secure_generator(), (20_000, 2))
    for coordinate in sample.T:
        assert stats.kstest(coordinate, expected.cdf).pvalue > FALSE_ALARM / 2
    correlation = stats.spearmanr(sample[:, 0], sample[:, 1])
    assert correlation.pvalue > FALSE_ALARM


@pytest.mark.parametrize(("low", "high"), [(0, 2), (-3, 4), (0, 10)])
def test_secure_integers_are_uniform(low, high):
    counts = np.bincount(secure_generator().integers(low, high, 50_000) - low)
    assert len(counts) == high - low
    assert stats.chisquare(counts).pvalue > FALSE_ALARM


def test_secure_integers_over_an_odd_huge_range_stay_inside():
    sample = secure_generator().integers(0, 2**62 + 1, 1000)
    assert sample.min() >= 0
    assert sample.max() <= 2**62


def test_an_empty_range_is_refused():
    with pytest.raises(ValueError, match="high must be above low"):
        secure_generator().integers(3, 3)


@pytest.mark.parametrize("law", ["normal", "laplace", "exponential", "gumbel"])
@pytest.mark.parametrize("bits", [b"\x00", b"\xff", b"\xfe", b"\x01"], ids=repr)
def test_no_word_of_bits_gives_an_infinite_draw(law, bits, monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda n: bits * n)
    assert np.isfinite(getattr(SecureGenerator(), law)(size=3)).all()
