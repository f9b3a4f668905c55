"""Every mechanism: a frozen value that carries one event and draws fresh noise."""

import dataclasses
import inspect

import numpy as np
import pytest

from tacit import events as ev
from tacit import mechanisms
from tacit.mechanisms import secure_generator

VECTOR, WHOLE, SCORES = [3.0, 1.0, 2.0], [3, 1, 2], [30.0, 31.0, 29.0]
MEMBERS = [
    (mechanisms.GaussianMechanism(2.0, l2_sensitivity=3.0), VECTOR),
    (mechanisms.LaplaceMechanism(2.0, l1_sensitivity=3.0), VECTOR),
    (mechanisms.GridGaussianMechanism(2.0, l2_sensitivity=3.0, dimension=3), VECTOR),
    (mechanisms.DiscreteGaussianMechanism(2.0, l2_sensitivity=3.0), WHOLE),
    (mechanisms.DiscreteLaplaceMechanism(0.5, l1_sensitivity=3.0), WHOLE),
    (mechanisms.ExponentialMechanism(0.5, sensitivity=1.0), SCORES),
    (mechanisms.PermuteAndFlip(0.5, sensitivity=1.0), SCORES),
    (mechanisms.LaplaceNoisyMax(0.5, sensitivity=1.0), SCORES),
    (mechanisms.GaussianNoisyMax(2.0, l2_sensitivity=1.0), SCORES),
]
every_member = pytest.mark.parametrize(
    ("mechanism", "value"), MEMBERS, ids=lambda item: type(item).__name__
)


def test_the_list_is_complete():
    public = {
        value
        for name in mechanisms.__all__
        if inspect.isclass(value := getattr(mechanisms, name))
        and hasattr(value, "release")
        and value is not mechanisms.Mechanism
    }
    assert public == {type(mechanism) for mechanism, _ in MEMBERS}


@every_member
def test_it_is_a_frozen_value_with_an_event(mechanism, value):
    assert mechanism == dataclasses.replace(mechanism)
    assert hash(mechanism) == hash(dataclasses.replace(mechanism))
    with pytest.raises(dataclasses.FrozenInstanceError):
        mechanism.replace_factor = 1.0
    assert ev.from_json(mechanism.event.to_json()) == mechanism.event


@every_member
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_the_replace_factor_reaches_the_event(mechanism, value, factor):
    changed = dataclasses.replace(mechanism, replace_factor=factor)
    assert changed.event.replace_factor == factor


@every_member
@pytest.mark.parametrize("factor", [0.9, 2.1, float("nan")])
def test_an_impossible_replace_factor_is_refused(mechanism, value, factor):
    with pytest.raises(ValueError, match="replace_factor must be"):
        dataclasses.replace(mechanism, replace_factor=factor)


@every_member
def test_options_are_keyword_only(mechanism, value):
    with pytest.raises(TypeError):
        type(mechanism)(2.0, 1.0)


@every_member
def test_a_seed_repeats_and_fresh_entropy_does_not(mechanism, value):
    def draws(rng_of):
        return [np.asarray(mechanism.release(value, rng_of(i))).tolist() for i in range(40)]

    assert draws(lambda i: i) == draws(lambda i: i)
    assert draws(lambda i: None) != draws(lambda i: None)  # false alarm below 1e-9


@every_member
def test_one_generator_gives_different_noise_each_time(mechanism, value):
    rng = np.random.default_rng(0)
    assert len({str(mechanism.release(value, rng)) for _ in range(40)}) > 1


@every_member
def test_it_draws_from_the_secure_generator(mechanism, value):
    released = np.asarray(mechanism.release(value, secure_generator()))
    assert np.isfinite(released).all()


@every_member
def test_its_text_shows_settings_and_no_value(mechanism, value):
    mechanism.release(value, 0)
    assert repr(mechanism) == repr(dataclasses.replace(mechanism))
