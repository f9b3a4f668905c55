"""Series of moments: exact coefficients, and bounds that hold against a fine quadrature."""

import math
from fractions import Fraction

import numpy as np
import pytest

from tacit.accounting.pld import contour
from tacit.accounting.pld.direction import DirectionPrice
from tacit.accounting.pld.loss_laws import Normal, Sampled
from tacit.accounting.pld.pairs import directions
from tacit.accounting.pld.sampled_gaussian_series import SeriesModel, _central_moments
from tacit.accounting.pld.transforms import ORDERS, Tilt, useful_orders
from tacit.events import Gaussian, PoissonSampled, Relation, Repeated

SIDES = [(1, 0), (0, 1)]  # the record is removed, or added
SETTINGS = [(1e-3, 2.0, 10**6), (0.2, 6.0, 4000), (3e-4, 1.3, 10**7), (0.4, 20.0, 900)]


def model_of(rate: float, sigma: float, steps: int, side: tuple[int, int]) -> SeriesModel:
    law = Sampled(Normal(sigma), rate, *side)
    spread = math.sqrt(steps * rate**2 * math.expm1(1 / sigma**2))
    found = SeriesModel.fitting(law, spread=spread, steps=steps, log_removed=-60.0)
    assert found is not None
    found.moments(useful_orders(spread))
    return found


def moment(model: SeriesModel, z: complex) -> complex:
    """Return E[exp(z loss)] up to the cut, by a trapezoid sum that is exact in floating point."""
    y = np.arange(-16.0, model.expansion.cut, 1 / 64)
    rate, sigma = model.expansion.rate, model.expansion.sigma
    log_g = np.log1p(rate * np.expm1((y - 0.5 / sigma) / sigma))
    w = 1 + z if model.law.a else -z
    return complex(np.sum(np.exp(w * log_g - 0.5 * y * y)) / 64 / math.sqrt(2 * math.pi))


def test_moments_of_a_lognormal_number_are_exact():
    h = Fraction(1, 3)
    found = _central_moments(float(h))
    for k in range(2, len(found)):
        terms = [
            math.comb(k, i) * (-1) ** (k - i) * (1 + h) ** (i * (i - 1) // 2) for i in range(k + 1)
        ]
        assert found[k] == pytest.approx(float(sum(terms)), rel=1e-13)
    assert found[0] == 1
    assert found[1] == 0


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_bounds_hold_the_transform(setting, side):
    model = model_of(*setting, side)
    spread = math.sqrt(setting[2] * model.variance)
    moments = model.moments(useful_orders(spread))
    for index in np.searchsorted(ORDERS, np.array([0.3, 2.0, 6.0]) / spread):
        order = float(ORDERS[index])
        truth = math.log(moment(model, order).real)
        slack = 1e-15  # of the sum above
        assert moments.upper[index] - moments.error[index] - slack <= truth
        assert truth <= moments.upper[index] + slack
        tilt = Tilt(order, float(moments.upper[index]), float(moments.error[index]))
        tilted = model.tilt(tilt)
        step = 1.5 / spread
        factor = tilted.factor(step, 6)
        for k in range(6):
            ratio = moment(model, order + 1j * k * step) / moment(model, order)
            wrong = abs(ratio / np.exp(factor.log[k]) - 1)
            assert wrong <= factor.error[k] + 4e-15
            # The decay at a frequency bounds that at all higher ones.
            assert math.log(abs(ratio)) <= tilted.log_decay(k * step, setting[2]) + 4e-15
            assert math.log(abs(ratio)) <= tilted.log_decay(k * step / 2, setting[2]) + 4e-15


@pytest.mark.parametrize("side", SIDES)
def test_a_decay_is_of_use(side):
    model = model_of(1e-3, 2.0, 10**6, side)
    spread = math.sqrt(1e6 * model.variance)
    index = int(np.searchsorted(ORDERS, 4 / spread))
    moments = model.moments(useful_orders(spread))
    tilted = model.tilt(
        Tilt(float(ORDERS[index]), float(moments.upper[index]), float(moments.error[index]))
    )
    t = 6 / spread
    exact = 1e6 * math.log(abs(moment(model, ORDERS[index] + 1j * t) / moments_of(model, index)))
    assert 1e6 * tilted.log_decay(t, 10**6) < 0.7 * exact < 0


def moments_of(model: SeriesModel, index: int) -> float:
    return moment(model, float(ORDERS[index])).real


def test_a_series_that_is_not_precise_is_refused():
    model = model_of(1e-3, 2.0, 10**6, (1, 0))
    index = int(np.searchsorted(ORDERS, 4.0))
    moments = model.moments(slice(index, index + 1))
    tilt = Tilt(float(ORDERS[index]), float(moments.upper[index]), float(moments.error[index]))
    tilted = model.tilt(tilt)
    assert tilted.lay_nodes(1.0, -20.0) == 0
    assert tilted.lay_nodes(1e5, -20.0) > 10**5


@pytest.mark.parametrize("law", [Sampled(Normal(0.4), 0.01, 1, 0), Sampled(Normal(2.0), 0.1, 1, 1)])
def test_other_laws_have_no_series(law):
    assert SeriesModel.fitting(law, spread=1.0, steps=10**6, log_removed=-60.0) is None


def test_both_ways_to_integrate_agree(monkeypatch):
    rng = np.random.default_rng(0)
    n_series = 0
    for _ in range(40):
        rate, sigma = 10 ** rng.uniform(-6, -0.5), 10 ** rng.uniform(-0.1, 1.2)
        steps, delta = int(10 ** rng.uniform(3, 8)), 10 ** rng.uniform(-12, -1)
        event = Repeated(PoissonSampled(rate, Gaussian(sigma)), steps)
        for one in directions(event, Relation.ADD_REMOVE):
            price = DirectionPrice(one, tolerance=1e-7)
            found = price.epsilon(delta)
            if found.upper > 20 or price.family is None or not price.family.has_series:
                continue
            n_series += 1
            with monkeypatch.context() as patch:
                patch.setattr(contour.SeriesModel, "fitting", lambda *_, **__: None)
                other = DirectionPrice(one, tolerance=1e-7).epsilon(delta)
            assert found.meets(other)
            assert found.width <= max(1e-6 * found.upper, 2 * other.width)
    assert n_series > 10


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_remainder_is_below_its_bound(setting, side):
    """Against a fine sum of |x|^K max(1, (1 + x)^(Re w - K)), at low and high orders."""
    model = model_of(*setting, side)
    y = np.arange(-16.0, model.expansion.cut, 1 / 64)
    x = model.expansion.rate * np.expm1((y - 0.5 / model.expansion.sigma) / model.expansion.sigma)
    density = np.exp(-0.5 * y * y) / 64 / math.sqrt(2 * math.pi)
    for order in (0.01, 1.0, 20.0, 200.0):
        power = model.power(order) - model.expansion.n_terms
        worst = np.abs(x) ** model.expansion.n_terms * np.maximum(1.0, (1 + x) ** power)
        bound = float(model._log_weights(np.array([order]))[0])
        assert math.log(worst @ density) <= bound
