"""Dominating pairs: masses against direct integration, inverses, and the rules of each event."""

import math

import numpy as np
import pytest
from scipy.integrate import quad

from tacit.accounting.pld.loss_laws import Discrete, DoubleExponential, Normal, Sampled, Shifted
from tacit.accounting.pld.pairs import directions, pair
from tacit.errors import UnsupportedEvent
from tacit.events import (
    ApproximateDP,
    BestOf,
    Exponential,
    FixedSizeSampled,
    Gaussian,
    Laplace,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    Relation,
    RenyiCurve,
    Repeated,
    Sequence,
)

LAWS = [
    Sampled(noise, rate, a, b)
    for noise in (Normal(0.7), Normal(4.0), DoubleExponential(1.3))
    for rate in (0.02, 0.6)
    for a, b in ((1, 0), (0, 1), (1, 1))
]


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_masses_of_loss_ranges_are_those_of_the_densities(law):
    edges = np.linspace(-0.4, 0.4, 9) * min(law.largest_loss, 2.0)
    p, q = law.cells(edges)
    assert p.sum() == pytest.approx(1.0, abs=1e-14)
    assert q.sum() == pytest.approx(1.0, abs=1e-14)
    for k in range(8):
        low, high = float(law.where_loss(edges[k])), float(law.where_loss(edges[k + 1]))
        low, high = max(low, -60.0), min(high, 60.0)
        breaks = [x for x in (-1.0, 0.0, 1.0) if low < x < high]
        found = quad(lambda x: _density(law, x, 1), low, high, points=breaks or None)[0]
        assert p[k + 1] == pytest.approx(found, rel=1e-7, abs=1e-12)
        found = quad(lambda x: _density(law, x, -1), low, high, points=breaks or None)[0]
        assert q[k + 1] == pytest.approx(found, rel=1e-7, abs=1e-12)


def _density(law, x, side):
    def noise(at):
        if isinstance(law.noise, Normal):
            return math.exp(-0.5 * (at / law.noise.sigma) ** 2) / (
                law.noise.sigma * math.sqrt(2 * math.pi)
            )
        return 0.5 * law.noise.epsilon * math.exp(-law.noise.epsilon * abs(at))

    rate = law.rate * (law.a if side == 1 else law.b)
    return (1 - rate) * noise(x) + rate * noise(x - side)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_loss_at_the_found_output_is_the_loss_asked_for(law):
    losses = np.linspace(-0.9, 0.9, 41) * min(law.largest_loss, 5.0)
    lowest = law.loss(-1e3)
    for loss in losses[losses > lowest]:
        x = float(law.where_loss(np.array(loss)))
        assert law.loss(x) == pytest.approx(loss, rel=1e-9, abs=1e-12)


def test_gaussians_merge_and_equal_laws_are_counted():
    event = Sequence((Gaussian(2.0), Repeated(Gaussian(1.0), 3), PureDP(0.1), PureDP(0.1)))
    (only,) = directions(event, Relation.ADD_REMOVE)
    assert len(only.parts) == 2
    assert only.parts[0][0] == Shifted(pytest.approx(math.sqrt(0.25 + 3.0)))
    assert only.parts[1][1] == 2


def test_infinite_losses_compose_like_chances():
    (only,) = directions(Repeated(ApproximateDP(0.5, 0.1), 2), Relation.ADD_REMOVE)
    assert only.infinite_lower <= 0.19 <= only.infinite_upper
    assert only.infinite_upper == pytest.approx(0.19)


@pytest.mark.parametrize(
    "event",
    [
        PureDP(0.7),
        ApproximateDP(0.7, 1e-3),
        Exponential(0.3),
        RandomizedResponse(0.4),
        RandomizedResponse(0.4, n_options=5),
    ],
    ids=str,
)
@pytest.mark.parametrize("rate", [1e-4, 0.3])
@pytest.mark.parametrize("relation", list(Relation))
def test_sampled_discrete_pairs_are_pairs_of_probabilities(event, rate, relation):
    for law in pair(PoissonSampled(rate, event), relation):
        assert isinstance(law, Discrete)
        assert sum(law.p) + law.infinite == pytest.approx(1.0, abs=1e-12)
        assert sum(law.q) + law.vanishing == pytest.approx(1.0, abs=1e-12)
        for loss, p, q in zip(law.losses, law.p, law.q, strict=True):
            assert math.log(p / q) == pytest.approx(loss, abs=1e-9)


def test_replacing_a_sampled_answer_costs_no_more_than_without_sampling():
    sampled, _ = pair(PoissonSampled(0.1, PureDP(1.0)), Relation.REPLACE_ONE)
    plain, _ = pair(PureDP(1.0), Relation.REPLACE_ONE)
    assert sampled.largest_loss < plain.largest_loss == 2.0


@pytest.mark.parametrize(
    "event",
    [
        RenyiCurve((2.0,), (0.1,)),
        BestOf(Gaussian(1.0), mean=5.0),
        FixedSizeSampled(10, 100, Gaussian(1.0)),
        PoissonSampled(0.1, RenyiCurve((2.0,), (0.1,))),
    ],
    ids=str,
)
def test_events_without_a_pair_are_refused(event):
    with pytest.raises(UnsupportedEvent, match="dominating pair"):
        pair(event, Relation.ADD_REMOVE)


def test_noise_is_priced_by_the_change_of_a_replacement():
    assert pair(Gaussian(2.0, replace_factor=1.5), Relation.REPLACE_ONE)[0] == Shifted(0.75)
    law = pair(Laplace(2.0), Relation.REPLACE_ONE)[0]
    assert law == Sampled(DoubleExponential(1.0), 1.0, 1, 0)
    assert pair(Laplace(2.0), Relation.ZERO_OUT) == pair(Laplace(2.0), Relation.ADD_REMOVE)
