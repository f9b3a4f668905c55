"""The lattice engine: exact laws, domination from both sides, agreement with the contour."""

import math

import numpy as np
import pytest
from scipy.special import gammaln

from tacit.accounting.brackets import Bracket, invert
from tacit.accounting.pld import PLD
from tacit.accounting.pld.lattice import Lattice, coarse_moments, dots, reports
from tacit.accounting.pld.loss_laws import Discrete, DoubleExponential, Normal, Sampled, Shifted
from tacit.accounting.pld.pairs import directions
from tacit.events import (
    Gaussian,
    Laplace,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    Relation,
    Repeated,
    Sequence,
)

LAWS = [
    Sampled(Normal(0.8), 0.1, 1, 0),
    Sampled(Normal(2.0), 0.3, 0, 1),
    Sampled(Normal(1.0), 0.2, 1, 1),
    Sampled(DoubleExponential(1.0), 0.4, 1, 0),
    Shifted(0.7),
    Discrete((-math.log(2), 0.0, math.log(3)), (0.3, 0.25, 0.45), (0.6, 0.25, 0.15)),
]


def lattice_epsilon(event, delta, points=1 << 14, relation=Relation.ADD_REMOVE):
    worst = Bracket(0.0, 0.0)
    for direction in directions(event, relation):
        log_target = math.log(delta) - 14
        moments = coarse_moments(direction, log_target - math.log(direction.steps))
        guess = moments.guess_epsilon(delta)
        for _ in range(2):
            lattice = Lattice(direction, moments, guess, log_target, points)
            found = invert(lattice, delta, guess=guess, ceiling=direction.largest_loss)
            guess = found.upper
        worst = Bracket(max(worst.lower, found.lower), max(worst.upper, found.upper))
    return worst


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("step", [0.3, 0.01])
def test_a_step_on_the_grid_dominates_and_is_attacked(law, step):
    low, high = law.span(-40.0)
    grid = dots(law, step, low, high)
    points = step * np.arange(grid.first, grid.first + len(grid.mass))
    assert grid.mass.sum() + grid.above == pytest.approx(1.0, abs=1e-12)
    p, q = reports(law, step, low, high)
    for epsilon in np.linspace(-1.0, 1.0, 9) * min(high, 2.0):
        true_p, true_q = law.cells(np.array([epsilon]))
        exact = float(true_p[1] - math.exp(epsilon) * true_q[1])
        upper = float(np.maximum(-np.expm1(epsilon - points), 0.0) @ grid.mass) + grid.above
        lower = float(np.maximum(p.mass - math.exp(epsilon) * q.mass, 0.0).sum())
        assert lower - 1e-12 <= exact <= upper + 1e-12


@pytest.mark.parametrize("count", [3, 100, 5000])
@pytest.mark.parametrize("price", [0.02, 0.3])
def test_pure_dp_composes_like_a_binomial(count, price):
    def exact(epsilon):
        k = np.arange(count + 1)
        logs = gammaln(count + 1) - gammaln(k + 1) - gammaln(count - k + 1)
        logs += -k * np.log1p(math.exp(-price)) - (count - k) * np.log1p(math.exp(price))
        loss = (2 * k - count) * price
        return float(np.exp(logs) @ -np.expm1(np.minimum(epsilon - loss, 0.0)))

    bracket = lattice_epsilon(Repeated(PureDP(price), count), 1e-6)
    assert exact(bracket.upper) <= 1e-6 * (1 + 1e-9)
    assert exact(bracket.lower) >= 1e-6 * (1 - 1e-9)
    assert bracket.width <= 1e-6 * bracket.upper


def test_masses_below_the_smallest_float_do_not_become_an_attack():
    epsilon = 197.26568627452008  # delta is 2.02e-246, and the attacker's Q-mass 1e-331
    bracket = PLD().delta_bracket(Repeated(PureDP(0.2), 1000), epsilon=epsilon)
    assert bracket.lower <= bracket.upper
    assert bracket.upper == pytest.approx(2.023108917e-246, rel=1e-9, abs=0.0)


def test_a_window_that_misses_epsilon_claims_nothing():
    (direction,) = directions(Repeated(PureDP(0.1), 1000), Relation.ADD_REMOVE)
    moments = coarse_moments(direction, -40.0)
    lattice = Lattice(direction, moments, 30.0, math.log(1e-9) - 14, 1 << 12)
    assert lattice.delta(0.0).upper == 1.0


@pytest.mark.parametrize(
    "event",
    [
        Repeated(PoissonSampled(0.01, Gaussian(4.0)), 10_000),
        Repeated(PoissonSampled(0.2, Gaussian(0.8)), 20),
        Repeated(PoissonSampled(0.05, Laplace(1.0)), 300),
        Repeated(Laplace(4.0), 300),
        Sequence((Repeated(PoissonSampled(0.1, Gaussian(1.0)), 30), Laplace(2.0), Gaussian(3.0))),
    ],
    ids=str,
)
@pytest.mark.parametrize("relation", [Relation.ADD_REMOVE, Relation.REPLACE_ONE])
def test_the_two_engines_agree(event, relation):
    contour = PLD().bracket(event, delta=1e-6, relation=relation)
    assert contour.width <= 1e-5 * contour.upper
    lattice = lattice_epsilon(event, 1e-6, relation=relation)
    assert lattice.meets(contour)
    assert lattice.width <= 2e-2 * lattice.upper


def test_refining_the_grid_narrows_the_bracket_to_second_order():
    event = Sequence((Repeated(RandomizedResponse(0.9, 4), 30), Repeated(PureDP(0.0371), 40)))
    widths = [lattice_epsilon(event, 1e-5, points=points).width for points in (1 << 10, 1 << 13)]
    assert widths[1] < widths[0] / 16
