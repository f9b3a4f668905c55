"""Events are values: checked, equal by content, readable, and JSON both ways."""

import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tacit import events as ev

EXAMPLES = (
    ev.NonPrivate(),
    ev.Gaussian(4.0),
    ev.Gaussian(0.5, replace_factor=1.25),
    ev.Laplace(2.0),
    ev.PureDP(0.0),
    ev.PureDP(0.7, replace_factor=1.0),
    ev.ApproximateDP(0.5, 1e-6),
    ev.ApproximateDP(0.5, 0.0, replace_factor=1.0),
    ev.Exponential(0.3),
    ev.RandomizedResponse(0.4, 6),
    ev.RenyiCurve((1.5, 2.0, 8.0), (0.0, 0.1, 0.4)),
    ev.PoissonSampled(0.01, ev.Gaussian(1.0)),
    ev.TruncatedPoissonSampled(0.01, 40, 1000, ev.Gaussian(1.0)),
    ev.FixedSizeSampled(10, 1000, ev.Laplace(1.0)),
    ev.RandomAllocation(100, ev.Gaussian(1.0)),
    ev.Repeated(ev.Gaussian(1.0), 10**12),
    ev.Sequence(()),
    ev.Sequence((ev.Gaussian(1.0), ev.Sequence((ev.Laplace(2.0),)))),
    ev.Shuffled(ev.RandomizedResponse(0.5, 4), 10_000),
    ev.BestOf(ev.Repeated(ev.Gaussian(9.0), 3), 12.5, ev.Trials.POISSON),
    ev.BestOf(ev.Gaussian(9.0), 4.0, ev.Trials.NEGATIVE_BINOMIAL, shape=-0.5, most=30),
    ev.GaussianMixture(2.0, (0.0, 1.0, 2.0), (0.9, 0.09, 0.01)),
    ev.DiscreteGaussian(4.0, 2),
    ev.DiscreteLaplace(4.0),
    ev.ZeroConcentratedDP(0.1, 1e-7),
    ev.TreeAggregation(4.0, 100),
    ev.BandedGaussian(2.0, (0.8, 0.6), 100, 2, rate=0.1),
    ev.BandedGaussian(4.0, (0.7, 0.5, 0.4), 100, 2, participations=3),
    ev.SampledWithReplacement(20, 400, ev.Gaussian(2.0)),
    ev.OneOf((ev.Gaussian(9.0), ev.Repeated(ev.PureDP(0.1), 3)), (0.25, 0.75)),
    ev.ChosenOf((ev.Gaussian(9.0), ev.Repeated(ev.PureDP(0.1), 3))),
)


def test_every_type_has_an_example():
    every = {
        kind
        for kind in vars(ev).values()
        if isinstance(kind, type) and issubclass(kind, ev.Event) and kind is not ev.Event
    }
    assert {type(event) for event in EXAMPLES} == every


@pytest.mark.parametrize("event", EXAMPLES, ids=repr)
def test_json_gives_an_equal_event_back(event):
    text = event.to_json()
    again = ev.from_json(text)
    assert again == event
    assert type(again) is type(event)
    assert hash(again) == hash(event)
    assert again.to_json() == text
    assert ev.from_dict(json.loads(text)) == event
    assert pickle.loads(pickle.dumps(event)) == event


@pytest.mark.parametrize("event", EXAMPLES, ids=repr)
def test_an_event_can_be_read_by_a_person_and_not_changed(event):
    assert str(event)
    assert "object at" not in str(event)
    assert event != object()
    for name in event.to_dict():
        if name != "type":
            with pytest.raises(AttributeError):
                setattr(event, name, 1)


def test_different_events_are_different_and_equal_ones_equal():
    assert len({*EXAMPLES}) == len(EXAMPLES)
    assert ev.Gaussian(4) == ev.Gaussian(4.0) == ev.Gaussian(np.float64(4.0))
    assert ev.Gaussian(4.0) != ev.Laplace(4.0)
    assert ev.Repeated(ev.Gaussian(1.0), np.int64(3)) == ev.Repeated(ev.Gaussian(1.0), 3)
    assert ev.Sequence([ev.Gaussian(1.0)]) == ev.Sequence((ev.Gaussian(1.0),))  # type: ignore[arg-type]  # lists are taken


HOSTILE = [
    "",
    "{",
    "null",
    "3",
    "[]",
    "{}",
    '{"type": 1}',
    '{"type": null}',
    '{"type": ["Gaussian"]}',
    '{"type": "object"}',
    '{"type": "Event"}',
    '{"type": "os.system", "command": "true"}',
    '{"type": "__class__"}',
    '{"type": "Gaussian"}',
    '{"type": "Gaussian", "noise_multiplier": 1.0, "extra": 2}',
    '{"type": "Gaussian", "noise_multiplier": "1.0"}',
    '{"type": "Gaussian", "noise_multiplier": true}',
    '{"type": "Gaussian", "noise_multiplier": NaN}',
    '{"type": "Gaussian", "noise_multiplier": Infinity}',
    '{"type": "Gaussian", "noise_multiplier": -1}',
    '{"type": "Gaussian", "noise_multiplier": 1e999}',
    '{"type": "Gaussian", "noise_multiplier": 1.0, "replace_factor": 3}',
    '{"type": "Gaussian", "noise_multiplier": {"type": "Gaussian", "noise_multiplier": 1}}',
    '{"type": "Repeated", "event": {"type": "NonPrivate"}, "count": 1.5}',
    '{"type": "Repeated", "event": {"type": "NonPrivate"}, "count": -1}',
    '{"type": "Repeated", "event": "NonPrivate", "count": 1}',
    '{"type": "Sequence", "parts": {"type": "NonPrivate"}}',
    '{"type": "Sequence", "parts": [1]}',
    '{"type": "Sequence", "parts": 1}',
    '{"type": "RenyiCurve", "orders": [2, 1.5], "values": [0, 0]}',
    '{"type": "RenyiCurve", "orders": [2], "values": [0, 0]}',
    '{"type": "RenyiCurve", "orders": [], "values": []}',
    '{"type": "RenyiCurve", "orders": ["a"], "values": [0]}',
    '{"type": "RenyiCurve", "orders": [[2]], "values": [0]}',
    '{"type": "BestOf", "event": {"type": "NonPrivate"}, "mean": 3, "trials": "uniform"}',
    '{"type": "BestOf", "event": {"type": "NonPrivate"}, "mean": 0.5}',
    '{"type": "FixedSizeSampled", "batch_size": 9, "n_records": 3}',
    '{"type": "Sequence", "parts": [' * 4000 + "]}" * 4000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:60])
def test_hostile_json_is_refused_with_a_value_error(text):
    with pytest.raises(ValueError):  # noqa: PT011  # any message will do, any other error will not
        ev.from_json(text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["type", "event", "parts", "count", "rate", "noise_multiplier"]),
                inner | st.sampled_from(["Gaussian", "Repeated", "Sequence", "PoissonSampled"]),
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_arbitrary_json_gives_an_event_or_a_value_error(data):
    try:
        event = ev.from_dict(data)
    except ValueError:
        return
    assert ev.from_json(event.to_json()) == event


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ev.Gaussian(0.0), "noise_multiplier must be a positive finite number"),
        (lambda: ev.Gaussian(math.nan), "noise_multiplier must be"),
        (lambda: ev.PoissonSampled(1.5, ev.Gaussian(1.0)), r"rate must be in \[0, 1\], got 1.5"),
        (lambda: ev.RandomizedResponse(0.0), "NonPrivate"),
        (lambda: ev.ApproximateDP(1.0, 2.0), r"delta must be in \[0, 1\]"),
        (lambda: ev.ApproximateDP(1.0, 0.1, replace_factor=1.5), "1 or 2"),
        (lambda: ev.RenyiCurve((2.0,), (math.inf,)), "values must be finite"),
        (lambda: ev.RenyiCurve((2.0, 2.0), (1.0, 1.0)), "orders must increase"),
        (lambda: ev.BestOf(ev.Gaussian(1.0), 1.0), "mean must be above 1"),
        (lambda: ev.BestOf(ev.Gaussian(1.0), 3.0, shape=-1.0), "shape must be above -1"),
        (lambda: ev.FixedSizeSampled(5, 3, ev.Gaussian(1.0)), "batch_size must be <= n_records"),
    ],
)
def test_wrong_values_say_what_is_wrong(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("wrong", ["1", None, True, [1.0]])
def test_wrong_types_are_type_errors(wrong):
    with pytest.raises(TypeError):
        ev.Gaussian(wrong)
    with pytest.raises(TypeError):
        ev.Repeated(ev.Gaussian(1.0), wrong)
    with pytest.raises(TypeError):
        ev.PoissonSampled(0.1, wrong)


@pytest.mark.parametrize("kind", [ev.Gaussian, ev.Laplace])
@pytest.mark.parametrize("noise", [1e-200, 1e200])
def test_noise_beyond_what_floats_can_square_is_refused(kind, noise):
    with pytest.raises(ValueError, match="noise_multiplier must be between"):
        kind(noise)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ev.PureDP(1e308),
        lambda: ev.PureDP(10**400),
        lambda: ev.ApproximateDP(1e300, 0.1),
        lambda: ev.Exponential(1e61),
        lambda: ev.RandomizedResponse(1e-320),
        lambda: ev.RandomizedResponse(0.5, 10**400),
        lambda: ev.Repeated(ev.Gaussian(1.0), 10**400),
        lambda: ev.FixedSizeSampled(1, 10**400, ev.Gaussian(1.0)),
    ],
)
def test_numbers_beyond_what_floats_can_price_are_refused(make):
    with pytest.raises(ValueError, match="must be"):
        make()
