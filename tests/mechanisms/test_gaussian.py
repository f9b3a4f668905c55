"""Gaussian and Laplace mechanisms: every coordinate has the noise that the event states."""

import math

import numpy as np
import pytest
from scipy import stats

from tacit import events as ev
from tacit.mechanisms import (
    GaussianMechanism,
    GridGaussianMechanism,
    LaplaceMechanism,
    secure_generator,
)

FALSE_ALARM = 1e-6  # per test, split evenly among its coordinates
DIMENSION, DRAWS = 5, 20_000
CASES = {
    "gaussian": (GaussianMechanism(1.5, l2_sensitivity=2.0), stats.norm(scale=3.0)),
    "laplace": (LaplaceMechanism(1.5, l1_sensitivity=2.0), stats.laplace(scale=3.0)),
    "grid": (
        GridGaussianMechanism(1.5, l2_sensitivity=2.0, dimension=DIMENSION * DRAWS),
        stats.norm(scale=3.0),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rng", [12, secure_generator()], ids=["seeded", "secure"])
def test_noise_has_the_stated_law_on_every_coordinate(name, rng):
    mechanism, law = CASES[name]
    value = np.broadcast_to(np.array([0.0, 7.0, -2.5, 1e3, 1e-3]), (DRAWS, DIMENSION))
    noise = mechanism.release(value, rng) - value
    for coordinate in noise.T:
        assert stats.kstest(coordinate, law.cdf).pvalue > FALSE_ALARM / DIMENSION
    for i in range(DIMENSION):
        for j in range(i):
            test = stats.spearmanr(noise[:, i], noise[:, j])
            assert test.pvalue > FALSE_ALARM / DIMENSION**2


def test_the_event_carries_multiplier_and_replace_factor():
    settings = {"replace_factor": 1.25}
    assert GaussianMechanism(1.5, l2_sensitivity=2.0, **settings).event == ev.Gaussian(1.5, 1.25)
    assert LaplaceMechanism(1.5, l1_sensitivity=2.0, **settings).event == ev.Laplace(1.5, 1.25)
    grid = GridGaussianMechanism(1.5, l2_sensitivity=2.0, dimension=3, **settings)
    assert grid.event == ev.Gaussian(1.5, 1.25)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)], ids=str)
def test_the_release_keeps_the_shape(shape):
    assert GaussianMechanism(1.0, l2_sensitivity=1.0).release(np.zeros(shape)).shape == shape
    assert LaplaceMechanism(1.0, l1_sensitivity=1.0).release(np.zeros(shape)).shape == shape


def test_the_input_is_left_alone():
    value = np.ones(3)
    GaussianMechanism(1.0, l2_sensitivity=1.0).release(value)
    assert (value == 1).all()


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_impossible_noise_or_sensitivity_is_refused(bad):
    for make in (
        lambda: GaussianMechanism(bad, l2_sensitivity=1.0),
        lambda: GaussianMechanism(1.0, l2_sensitivity=bad),
        lambda: LaplaceMechanism(bad, l1_sensitivity=1.0),
        lambda: LaplaceMechanism(1.0, l1_sensitivity=bad),
        lambda: GridGaussianMechanism(bad, l2_sensitivity=1.0, dimension=2),
        lambda: GridGaussianMechanism(1.0, l2_sensitivity=bad, dimension=2),
    ):
        with pytest.raises(ValueError, match="must be"):
            make()


def test_noise_that_underflows_or_overflows_is_refused():
    for multiplier, sensitivity in ((1e-50, 1e-300), (1e50, 1e300)):
        with pytest.raises(ValueError, match="noise_std must be"):
            GaussianMechanism(multiplier, l2_sensitivity=sensitivity)
        with pytest.raises(ValueError, match="noise_scale must be"):
            LaplaceMechanism(multiplier, l1_sensitivity=sensitivity)


@pytest.mark.parametrize("mechanism", [CASES["gaussian"][0], CASES["laplace"][0]], ids=repr)
def test_errors_do_not_repeat_the_private_value(mechanism):
    with pytest.raises(ValueError, match="finite") as caught:
        mechanism.release([123.456, math.nan])
    assert "123" not in str(caught.value)
    with pytest.raises(TypeError, match="real numbers"):
        mechanism.release(["secret"])
