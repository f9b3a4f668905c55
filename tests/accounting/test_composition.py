"""Basic and strong composition: the theorems by hand, and the guard on the published recipe."""

import math

import pytest

from tacit.accounting import (
    PLD,
    RDP,
    BasicComposition,
    StrongComposition,
    asymptotic_noise,
    gaussian_epsilon,
)
from tacit.errors import UnsupportedEvent
from tacit.events import (
    ApproximateDP,
    BestOf,
    FixedSizeSampled,
    Gaussian,
    Laplace,
    NonPrivate,
    PoissonSampled,
    PureDP,
    RandomAllocation,
    Relation,
    Repeated,
    Sequence,
)

RUN = Repeated(PoissonSampled(0.01, Gaussian(4.0)), 10_000)
RIGOROUS = StrongComposition(recipe="rigorous")


def test_basic_composition_adds_epsilons():
    event = Sequence((Repeated(PureDP(0.1), 5), Laplace(4.0), ApproximateDP(0.2, 1e-7)))
    assert BasicComposition().epsilon(event, delta=1e-6) == pytest.approx(0.5 + 0.25 + 0.2)
    assert BasicComposition().epsilon(event, delta=1e-8) == math.inf
    assert BasicComposition().delta(event, epsilon=0.96) == pytest.approx(1e-7, rel=1e-5)
    assert BasicComposition().delta(event, epsilon=0.9) == 1.0


def test_basic_composition_shares_delta_among_gaussians():
    four = Repeated(Gaussian(2.0), 4)
    expected = 4 * gaussian_epsilon(0.5, 0.25e-5)
    assert BasicComposition().epsilon(four, delta=1e-5) == pytest.approx(expected)
    sampled = PoissonSampled(0.1, Gaussian(2.0))
    inner = gaussian_epsilon(0.5, 1e-4)  # sampling at 0.1 leaves a tenth of its delta
    expected = math.log1p(0.1 * math.expm1(inner))
    assert BasicComposition().epsilon(sampled, delta=1e-5) == pytest.approx(expected)


def test_strong_composition_of_pure_dp_is_the_formula():
    epsilon, count, delta = 0.1, 100, 1e-5
    spread = epsilon * math.sqrt(2 * count * math.log(1 / delta))
    event = Repeated(PureDP(epsilon), count)
    published = StrongComposition().epsilon(event, delta=delta)
    assert published == pytest.approx(spread + count * epsilon**2)
    rigorous = RIGOROUS.epsilon(event, delta=delta)
    assert rigorous == pytest.approx(spread + count * epsilon * math.tanh(epsilon / 2))
    assert RIGOROUS.delta(event, epsilon=rigorous) == pytest.approx(delta, rel=1e-5)


def test_rigorous_strong_composition_is_never_worse_than_basic():
    for event in (PureDP(2.0), Repeated(Gaussian(1.0), 2), RUN):
        basic = BasicComposition().epsilon(event, delta=1e-5)
        assert RIGOROUS.epsilon(event, delta=1e-5) <= basic * (1 + 1e-9)


def test_rigorous_amplification_costs_far_more_than_the_published_figure():
    # log(1 + q (e^epsilon - 1)) instead of q epsilon, even with the exact Gaussian epsilon.
    assert 14 < RIGOROUS.epsilon(RUN, delta=1e-5) < 15


def test_the_published_recipe_is_refused_where_it_is_below_a_proved_bound():
    step = PoissonSampled(0.01, Gaussian(0.3))  # multiplying by the rate is far too favorable here
    assert RDP().epsilon(step, delta=1e-5) > 1
    with pytest.raises(UnsupportedEvent, match="rigorous"):
        StrongComposition().epsilon(step, delta=1e-5)
    with pytest.raises(UnsupportedEvent, match="rigorous"):
        StrongComposition().delta(step, epsilon=1.0)
    assert RIGOROUS.epsilon(step, delta=1e-5) >= PLD().bracket(step, delta=1e-5).lower


def test_relations_are_priced_as_what_they_are():
    basic = BasicComposition()
    for event in (PureDP(0.3), Laplace(3.0), Gaussian(3.0), PoissonSampled(0.1, Gaussian(3.0))):
        added = basic.epsilon(event, delta=1e-5)
        assert basic.epsilon(event, delta=1e-5, relation=Relation.REPLACE_ONE) > added
        assert basic.epsilon(event, delta=1e-5, relation=Relation.ZERO_OUT) == added
    fixed = FixedSizeSampled(1, 10, PureDP(0.3))
    with pytest.raises(UnsupportedEvent):
        basic.epsilon(fixed, delta=1e-5)
    replaced = basic.epsilon(fixed, delta=1e-5, relation=Relation.REPLACE_ONE)
    assert replaced == pytest.approx(math.log1p(0.1 * math.expm1(0.6)))
    one = basic.epsilon(RandomAllocation(9, PureDP(0.3)), delta=1e-5)
    assert one == pytest.approx(0.3)


def test_corners():
    for accountant in (BasicComposition(), RIGOROUS, StrongComposition()):
        assert accountant.epsilon(Sequence(()), delta=1e-5) == 0
        assert accountant.epsilon(NonPrivate(), delta=1e-5) == math.inf
        assert accountant.delta(NonPrivate(), epsilon=1.0) == 1
        with pytest.raises(UnsupportedEvent):
            accountant.epsilon(BestOf(PureDP(0.1), 3.0), delta=1e-5)
        with pytest.raises(ValueError, match="delta must be"):
            accountant.epsilon(RUN, delta=0.0)
    with pytest.raises(ValueError, match="recipe must be"):
        StrongComposition(recipe="mine")  # pyright: ignore[reportArgumentType]  # on purpose


def test_asymptotic_noise_scales_as_the_theorem_says():
    noise = asymptotic_noise(rate=0.01, steps=10_000, epsilon=1.0, delta=1e-5)
    assert noise == pytest.approx(math.sqrt(math.log(1e5)))
    for change, factor in [
        ({"rate": 0.02}, 2),
        ({"steps": 40_000}, 2),
        ({"epsilon": 0.5}, 2),
        ({"constant": 1.5}, 1.5),
    ]:
        setting = {"rate": 0.01, "steps": 10_000, "epsilon": 1.0, "delta": 1e-5} | change
        assert asymptotic_noise(**setting) == pytest.approx(factor * noise)
    assert "NOT a guarantee" in (asymptotic_noise.__doc__ or "")
