"""Dominating pairs: masses against direct integration, inverses, and the rules of each event."""

import math

import numpy as np
import pytest
from scipy.integrate import quad

from tacit import accounting as acc
from tacit.accounting.pld.balls_and_bins import allocation_pair
from tacit.accounting.pld.loss_laws import Discrete, DoubleExponential, Normal, Sampled, Shifted
from tacit.accounting.pld.pairs import directions, pair
from tacit.errors import UnsupportedEvent
from tacit.events import (
    ApproximateDP,
    BestOf,
    Exponential,
    Gaussian,
    Laplace,
    PoissonSampled,
    PureDP,
    RandomAllocation,
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


def delta_of(law, epsilon):
    """delta(epsilon) of one release whose loss has this law."""
    losses, p = np.array(law.losses), np.array(law.p)
    return law.infinite + float(p @ np.maximum(-np.expm1(epsilon - losses), 0.0))


@pytest.mark.parametrize("noise", [1.1, 1.5, 10.0])
def test_two_steps_are_bounded_and_met_in_both_directions(noise):
    # delta = E[(A - e^eps)_+] for removal, E[(1 - e^eps A)_+] for addition, on a plane.
    z = np.linspace(-8, 8, 1601)
    weight = np.exp(-z * z / 2) * (z[1] - z[0]) / math.sqrt(2 * math.pi)
    x = np.exp(z / noise - 0.5 / noise**2)
    ratio, mass = (x[:, None] + x) / 2, weight[:, None] * weight
    removal, addition = allocation_pair(2, 1 / noise)
    for epsilon in np.array([0.0, 0.3, 1.0, 2.0]) / noise:
        cut = math.exp(epsilon)
        exact = float((mass * np.maximum(ratio - cut, 0)).sum())
        assert exact * (1 - 1e-5) <= delta_of(removal, epsilon) <= exact * (1 + 1e-3) + 1e-9
        exact = float((mass * np.maximum(1 - cut * ratio, 0)).sum())
        assert exact * (1 - 1e-5) <= delta_of(addition, epsilon) <= exact * (1 + 1e-3) + 1e-9


@pytest.mark.parametrize(("steps", "noise"), [(10, 0.9), (60, 1.0), (500, 2.0)])
def test_more_steps_are_not_below_what_sampling_shows(steps, noise):
    # Monte Carlo with a fixed seed; 5 standard errors, so a false alarm in 1 of 10^6 checks.
    rng = np.random.default_rng(20260729)
    z = rng.standard_normal((3_000_000 // steps, steps), dtype=np.float32)
    ratio = np.exp(z / noise - 0.5 / noise**2).astype(np.float64).mean(axis=1)
    removal, addition = allocation_pair(steps, 1 / noise)
    spread = ratio.std()
    for epsilon in (0.0, spread, 2 * spread):
        for law, draws in [
            (removal, np.maximum(ratio - math.exp(epsilon), 0)),
            (addition, np.maximum(1 - math.exp(epsilon) * ratio, 0)),
        ]:
            error = 5 * draws.std() / math.sqrt(len(draws))
            assert draws.mean() - error <= delta_of(law, epsilon)
            assert delta_of(law, epsilon) <= (draws.mean() + error) * 1.001


def test_laws_are_probabilities():
    for steps, noise in [(2, 1.0), (50, 0.8), (1000, 1.0), (100_000, 3.0), (7, 300.0)]:
        for law in allocation_pair(steps, 1 / noise):
            assert math.fsum(law.p) + law.infinite == pytest.approx(1.0, abs=1e-12)
            assert 0 <= law.infinite < 1e-8
            assert list(law.losses) == sorted(set(law.losses))
            q = np.array(law.p) * np.exp(-np.array(law.losses))
            assert np.array(law.q) == pytest.approx(q)


def test_known_interval():
    # PLD_accounting 2.0 gives (0.1687, 0.1757) for this setting, in 22 s.
    event = RandomAllocation(1000, Gaussian(1.0))
    assert acc.epsilon(event, delta=1e-6) == pytest.approx(0.17173, abs=3e-5)
    assert acc.delta(event, epsilon=0.17173) == pytest.approx(1e-6, rel=1e-2)


@pytest.mark.parametrize(
    ("steps", "noise", "epochs", "delta"),
    [(234, 1.1, 60, 1e-5), (100, 1.0, 3, 1e-6)],
)
def test_epochs_compose_below_rdp_and_below_poisson(steps, noise, epochs, delta):
    event = Repeated(RandomAllocation(steps, Gaussian(noise)), epochs)
    found = acc.epsilon(event, delta=delta)
    assert found < acc.RDP().epsilon(event, delta=delta)
    poisson = Repeated(PoissonSampled(1 / steps, Gaussian(noise)), steps * epochs)
    assert found < acc.epsilon(poisson, delta=delta)
    assert found > 0.7 * acc.epsilon(poisson, delta=delta)
    mixed = Sequence((event, Gaussian(5.0)))
    assert found < acc.epsilon(mixed, delta=delta) < acc.RDP().epsilon(mixed, delta=delta)


def test_more_noise_and_more_steps_cost_less():
    def cost(steps, noise):
        event = Repeated(RandomAllocation(steps, Gaussian(noise)), 4)
        return acc.epsilon(event, delta=1e-6)

    for costs in (
        [cost(100, noise) for noise in (0.5, 1.0, 3.0, 50.0)],
        [cost(steps, 1.0) for steps in (1, 2, 31, 100, 10_000)],
    ):
        assert costs == sorted(costs, reverse=True)


def test_what_the_pair_does_not_cover_falls_to_rdp():
    with pytest.raises(UnsupportedEvent, match="out of reach"):
        allocation_pair(100, 1 / 0.3)
    tiny = RandomAllocation(100, Gaussian(0.3))
    assert acc.epsilon(tiny, delta=1e-6) == acc.RDP().epsilon(tiny, delta=1e-6)
    event = RandomAllocation(100, Gaussian(1.0))
    for relation in (Relation.ADD_REMOVE, Relation.REPLACE_ONE):
        rdp = acc.RDP().epsilon(event, delta=1e-6, relation=relation)
        assert acc.epsilon(event, delta=1e-6, relation=relation) <= rdp
    found = acc.bracket(event, delta=1e-6)  # the pair proves the upper end only
    assert 0 < found.lower < 0.5 * found.upper
