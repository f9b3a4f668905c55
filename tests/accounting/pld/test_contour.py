"""The contour engine: each proved bound against the thing it bounds."""

import math

import numpy as np
import pytest

from tacit.accounting.brackets import invert
from tacit.accounting.one_event import log_mixture
from tacit.accounting.pld.contour import Contours, Family, _Draft
from tacit.accounting.pld.direction import DirectionPrice
from tacit.accounting.pld.laplace_contour import LaplaceModel
from tacit.accounting.pld.loss_laws import DoubleExponential, Normal, Sampled
from tacit.accounting.pld.pairs import directions
from tacit.accounting.pld.sampled_gaussian_contour import SmoothModel
from tacit.accounting.pld.transforms import ORDERS, Tilt, useful_orders
from tacit.events import Gaussian, Laplace, PoissonSampled, Relation, Repeated

SIDES = [(1, 0), (0, 1), (1, 1)]


def smooth(rate, sigma, a, b, removed=1e-14):
    return SmoothModel.cut_lightly(Sampled(Normal(sigma), rate, a, b), math.log(removed))


def exact_moments(model, z):
    """E[exp(z loss)] of the cut law on a grid so fine that nothing is left to prove."""
    y, step = np.linspace(-14, model.cut + 11, 100_001, retstep=True)
    log_p, loss = model.log_density(y)
    return np.array([np.exp(log_p + value * loss).sum() * step for value in np.atleast_1d(z)])


@pytest.mark.parametrize(("a", "b"), SIDES)
@pytest.mark.parametrize(("rate", "sigma"), [(0.01, 4.0), (0.2, 0.8), (1e-3, 0.4), (0.7, 2.0)])
class TestBoundsOfSampledNormalNoise:
    def test_moments_lie_in_their_bounds(self, rate, sigma, a, b):
        model = smooth(rate, sigma, a, b)
        moments = model.moments(useful_orders(1.0))
        for index in range(8, 40, 4):
            if moments.upper[index] > 100:
                break
            exact = math.log(exact_moments(model, ORDERS[index])[0])
            assert exact <= moments.upper[index] + 1e-12
            assert exact >= moments.upper[index] - moments.error[index] - 1e-12

    def test_the_transform_decays_as_promised(self, rate, sigma, a, b):
        model = smooth(rate, sigma, a, b)
        moments = model.moments(useful_orders(1.0))
        for index in (20, 28, 34):
            log_m = float(moments.upper[index])
            if log_m > 50:
                continue
            tilted = model.tilt(Tilt(float(ORDERS[index]), log_m, 0.0))
            spread = math.sqrt(float(moments.variance[index]))
            t = np.geomspace(0.3, 300, 12) / spread
            found = np.abs(exact_moments(model, ORDERS[index] + 1j * t)) / math.exp(log_m)
            for count in (1, 100, 10_000):
                bounds = np.array([tilted.log_decay(value, count) for value in t])
                assert np.all(np.diff(bounds) <= 1e-12)  # one evaluation covers all larger t
                assert np.all(np.log(found + 1e-15) <= bounds + 1e-9)

    def test_few_nodes_give_the_transform(self, rate, sigma, a, b):
        model = smooth(rate, sigma, a, b)
        moments = model.moments(useful_orders(1.0))
        index, reach = 24, 40.0
        order, log_m = float(ORDERS[index]), float(moments.upper[index])
        tilted = model.tilt(Tilt(order, log_m, float(moments.error[index])))
        for t_max in (reach, 50 * reach):  # the second may need a lifted line
            size = 9
            tilted.lay_nodes(t_max, -30.0)
            factor = tilted.factor(t_max / (size - 1), size)
            t = t_max / (size - 1) * np.arange(size)
            exact = exact_moments(model, order + 1j * t) / math.exp(log_m)
            assert np.exp(factor.log) == pytest.approx(exact, abs=2e-12)
            error = np.abs(np.exp(factor.log) - exact)
            assert np.all(error <= factor.error * np.abs(exact) + 1e-12)

    def test_cell_masses_bracket_the_mass(self, rate, sigma, a, b):
        model = smooth(rate, sigma, a, b)
        log_m = float(model.moments(useful_orders(1.0)).upper[24])
        tilted = model.tilt(Tilt(float(ORDERS[24]), log_m, 0.0))
        assert (tilted.mass - tilted.mass_error).sum() <= 1.0 + 1e-9
        assert (tilted.mass + tilted.mass_error).sum() + tilted.outside >= 1.0 - 1e-9
        assert (tilted.mass + tilted.mass_error).sum() <= 1.2


@pytest.mark.parametrize(("a", "b"), SIDES)
@pytest.mark.parametrize(("rate", "epsilon"), [(1.0, 0.5), (0.05, 1.0), (0.6, 3.0), (0.01, 8.0)])
def test_laplace_moments_and_decay(rate, epsilon, a, b):
    if rate == 1.0 and (a, b) != (1, 0):
        pytest.skip("a plain release has one pair")
    law = Sampled(DoubleExponential(epsilon), rate, a, b)
    model = LaplaceModel(law)
    moments = model.moments(useful_orders(1.0))
    for index in (10, 24, 30):
        order = float(ORDERS[index])
        exact = laplace_moment(law, order).real
        assert math.exp(moments.upper[index]) == pytest.approx(exact, rel=1e-9)
        assert math.log(exact) <= moments.upper[index] + 1e-12
        tilt = Tilt(order, float(moments.upper[index]), float(moments.error[index]))
        tilted = model.tilt(tilt)
        size, step = 33, 2.0 / (law.loss(2.0) - law.loss(-2.0))
        tilted.lay_nodes(size * step, -30.0)
        factor = tilted.factor(step, size)
        for j in range(1, size):
            found = laplace_moment(law, order + 1j * step * j) / exact
            assert np.exp(factor.log[j]) == pytest.approx(found, abs=1e-9)
            assert math.log(abs(found)) <= tilted.log_decay(step * j, 1) + 1e-9


@pytest.mark.parametrize(("rate", "epsilon"), [(1.0, 1e-3), (1.0, 2.27), (0.1, 100.0)])
def test_the_decay_of_laplace_noise_is_a_number_at_every_order(rate, epsilon):
    model = LaplaceModel(Sampled(DoubleExponential(epsilon), rate, 1, 0))
    moments = model.moments(useful_orders(1.0))
    with np.errstate(over="ignore"):
        for order, upper, error in zip(ORDERS, moments.upper, moments.error, strict=True):
            tilted = model.tilt(Tilt(float(order), float(upper), float(error)))
            assert all(tilted.log_decay(t, 1) < 1e-9 for t in (1e-6, 1.0, 1e6))


def laplace_moment(law, z):
    """E_P[exp(z loss)]: the loss rests beyond 1, and Simpson's rule does what is between."""
    x, step = np.linspace(0.0, 1.0, 20_001, retstep=True)
    weight = np.full(len(x), 2.0)
    weight[1::2], weight[0], weight[-1] = 4.0, 1.0, 1.0
    noise, rate = law.noise, law.a * law.rate

    def density(at):
        return 0.5 * noise.epsilon * np.exp(-noise.epsilon * np.abs(at))

    total = 0.0
    for start in (-1.0, 0.0):
        at = start + x
        up = log_mixture(law.rate, noise.log_ratio(at)) if law.a else 0.0
        down = log_mixture(law.rate, noise.log_ratio(-at)) if law.b else 0.0
        p = (1 - rate) * density(at) + rate * density(at - 1)
        total += (p * np.exp(z * (up - down))) @ weight * (step / 3)
    for at, low, high in ((-1.0, -np.inf, -1.0), (1.0, 1.0, np.inf)):
        ends = np.array(low), np.array(high)
        mass = (1 - rate) * noise.between(*ends) + rate * noise.between(ends[0] - 1, ends[1] - 1)
        total += mass * np.exp(z * law.loss(at))
    return complex(total)


@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta"),
    [(1e-3, 0.4, 1000, 1e-5), (0.01, 0.5, 10, 1e-6), (1e-4, 1.0, 100_000, 1e-9)],
)
@pytest.mark.parametrize("side", [0, 1])
def test_a_smoothed_and_a_plain_contour_agree(rate, sigma, steps, delta, side):
    event = Repeated(PoissonSampled(rate, Gaussian(sigma)), steps)
    direction = directions(event, Relation.ADD_REMOVE)[side]
    family = Family.of(direction, log_removed=math.log(delta) - 18)
    price = DirectionPrice(direction, tolerance=1e-7)
    guess = price.epsilon(delta).upper
    plain = Contours(_Draft(family, guess, math.log(delta) - 14), family)
    smoothed = price._smoothed(guess, delta)
    brackets = [
        invert(curve, delta, guess=guess, ceiling=2 * guess + 1) for curve in (plain, smoothed)
    ]
    assert brackets[0].meets(brackets[1])
    assert max(bracket.width for bracket in brackets) < 1e-2 * guess


@pytest.mark.parametrize("noise", [Gaussian(1.0), Laplace(1.0)], ids=str)
def test_the_work_does_not_grow_with_the_number_of_steps(noise):
    def work(steps):
        event = Repeated(PoissonSampled(0.02, noise), steps)
        direction = directions(event, Relation.ADD_REMOVE)[0]
        family = Family.of(direction, log_removed=math.log(1e-6) - 18)
        guess = family.moments.guess_epsilon(1e-6)
        return _Draft(family, guess, math.log(1e-6) - 16).work

    costs = [work(10**k) for k in (2, 3, 4, 5, 6)]
    assert max(costs) <= 3 * costs[0]
    assert max(costs[2:]) <= 1.5 * min(costs[2:])
