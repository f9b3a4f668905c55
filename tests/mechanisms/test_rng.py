"""Generators: fresh by default, reproducible on request, and secure ones with the right laws."""

import copy
import os
import pickle
import warnings

import numpy as np
import pytest
from scipy import stats

from tacit.mechanisms import (
    GaussianMechanism,
    StatisticalGenerator,
    generator,
    secure_generator,
)

FALSE_ALARM = 1e-6  # per test, shared among its checks; secure bits cannot be seeded


def test_none_is_fresh_entropy_each_time():
    assert generator().normal() != generator().normal()


def test_the_default_is_philox_with_a_key_and_a_counter_of_full_length():
    keys = [generator().bit_generator.state["state"] for _ in range(200)]
    assert isinstance(generator().bit_generator, np.random.Philox)
    assert keys[0]["key"].dtype == keys[0]["counter"].dtype == np.uint64
    for part, words in (("key", 2), ("counter", 4)):
        bits = np.array([key[part] for key in keys])  # (200, words)
        assert bits.shape == (200, words)
        seen_one = np.bitwise_or.reduce(bits, axis=0)
        seen_zero = np.bitwise_or.reduce(~bits, axis=0)
        assert (seen_one == 2**64 - 1).all()  # false alarm below 1e-57
        assert (seen_zero == 2**64 - 1).all()


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda f: f.__name__
)
def test_a_generator_cannot_be_copied(copied):
    for own in (generator(), generator().bit_generator):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copied(own)
    copied(generator(3))  # the user's seed, the user's responsibility
    copied(secure_generator())  # it has no state to repeat


def in_a_forked_process(action) -> str:
    """Return what `action` returns or raises in a child process, as text."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of other tests may be alive
        child = os.fork()
    if child == 0:
        try:
            text = str(action())
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_generator_refuses_to_work_in_a_forked_process():
    rng, mechanism = generator(), GaussianMechanism(1.0, l2_sensitivity=1.0)
    for use in (
        lambda: rng.random(),
        lambda: rng.integers(0, 9),
        lambda: rng.bit_generator,
        lambda: mechanism.release(0.0, rng),
    ):
        assert "RuntimeError: a generator cannot be used in a forked process" in (
            in_a_forked_process(use)
        )
    here = float(mechanism.release(0.0, rng))  # the parent goes on
    assert float(in_a_forked_process(lambda: mechanism.release(0.0))) != here


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_the_secure_generator_does_not_repeat_in_a_forked_process():
    rng = secure_generator()
    assert in_a_forked_process(lambda: rng.words(2).tolist()) != str(rng.words(2).tolist())


def test_spawned_generators_have_keys_of_their_own():
    children = generator().spawn(3)
    assert all(isinstance(child, StatisticalGenerator) for child in children)
    assert len({child.random() for child in children}) == 3


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


def test_secure_draws_are_uniform():
    sample = secure_generator().random((20_000, 2))
    for coordinate in sample.T:
        assert stats.kstest(coordinate, stats.uniform().cdf).pvalue > FALSE_ALARM / 2
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
