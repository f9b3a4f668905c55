"""Exposure ranks a planted secret among others, and is at chance for a model that knows none."""

import numpy as np
import pytest

from tacit.text import CHANCE, exposures, make_canaries


def test_a_model_that_knows_nothing_is_at_chance():
    canaries, rng = make_canaries(20, digits=6, references=300, seed=0), np.random.default_rng(1)
    found = [exposures(canaries, lambda texts: rng.random(len(texts))) for _ in range(200)]
    mean = np.mean([one.mean for one in found])
    # The mean of 4,000 exposures has a standard deviation of 0.023; 5 of them: false alarm 6e-7.
    assert abs(mean - CHANCE) < 0.115
    assert np.mean([one.p_value < 0.05 for one in found]) < 0.12  # false alarm below 1e-4


def test_a_model_that_knows_the_secrets_is_found_out():
    canaries = make_canaries(5, digits=6, references=200, seed=0)
    known = {canary.text for canary in canaries}
    found = exposures(canaries, lambda texts: [0.0 if text in known else 1.0 for text in texts])
    assert found.mean == pytest.approx(np.log2(201))
    assert found.p_value < 1e-6


def test_equal_losses_are_no_knowledge():
    canaries = make_canaries(4, digits=6, references=100, seed=0)
    assert exposures(canaries, lambda texts: [1.0] * len(texts)).mean < CHANCE


def test_secrets_differ_from_their_references():
    for canary in make_canaries(3, digits=2, references=99, seed=3):
        assert len({canary.text, *canary.references}) == 100
    with pytest.raises(ValueError, match="below 10"):
        make_canaries(1, digits=2, references=100, seed=0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_model_without_finite_losses_knows_nothing(value):
    canaries = make_canaries(3, digits=6, references=100, seed=0)
    assert exposures(canaries, lambda texts: [value] * len(texts)).mean < CHANCE
    own = exposures(canaries, lambda texts: [value] + [1.0] * (len(texts) - 1))
    assert own.bits == (0.0, 0.0, 0.0)
