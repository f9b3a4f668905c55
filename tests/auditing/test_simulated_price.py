"""Simulated privacy losses agree with exact prices, and refute prices that are too low."""

import pytest

import tacit
from tacit.auditing.simulated_price import SIMULATED_DELTA, price_p
from tacit.events import (
    Gaussian,
    Laplace,
    NonPrivate,
    PoissonSampled,
    PureDP,
    Repeated,
    Sequence,
    ZeroConcentratedDP,
)
from tacit.mechanisms import generator

EVENTS = [
    Gaussian(1.0),
    Laplace(1.0),
    PureDP(1.0),
    Repeated(Gaussian(8.0), 40),
    Sequence((Laplace(2.0), PureDP(0.4), Gaussian(3.0))),
    Repeated(PoissonSampled(0.2, Gaussian(1.0)), 30),
    PoissonSampled(0.5, Sequence((Gaussian(1.0), Gaussian(2.0)))),
    PoissonSampled(1.0, Laplace(0.7)),
]


@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_the_price_is_not_refuted_and_six_sevenths_of_it_are(event):
    price = tacit.epsilon(event, delta=SIMULATED_DELTA)
    assert price_p(event, price, generator(0)) > 0.01  # a false alarm in 1 of 100 seeds at most
    assert price_p(event, 6 / 7 * price, generator(0)) < 1e-3


@pytest.mark.parametrize(
    "event", [NonPrivate(), ZeroConcentratedDP(0.1), Repeated(Gaussian(9.0), 10**6)], ids=str
)
def test_what_cannot_be_simulated_is_said(event):
    assert price_p(event, 1.0, generator(0)) is None
