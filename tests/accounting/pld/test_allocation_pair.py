"""The dominating pair of random allocation: never below the truth, and close to it."""

import math

import numpy as np
import pytest

from tacit import accounting as acc
from tacit.accounting.pld.pairs import allocation_pair
from tacit.errors import UnsupportedEvent
from tacit.events import Gaussian, PoissonSampled, RandomAllocation, Relation, Repeated, Sequence


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
    assert acc.bracket(event, delta=1e-6).lower == 0  # the pair proves the upper end only
