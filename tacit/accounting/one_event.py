"""Facts about one occurrence of one event: a single body each, for all accountants and the ledger.

Numbers stated in an event are taken as the decimals they are written as (`exact`), and whatever
has to be rounded is rounded up, so rounding can only over-charge. The exception is `log_mixture`,
which is accurate but not rounded to one side: both ends of a bracket are computed from it.
"""

import math
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from tacit import events as ev
from tacit._arrays import Floats
from tacit.events import Event, Relation

ADD_REMOVE = Relation.ADD_REMOVE
"""The relation under which accountants price an event unless another one is given."""

BoundedLoss: TypeAlias = (
    ev.Laplace | ev.DiscreteLaplace | ev.PureDP | ev.Exponential | ev.RandomizedResponse
)
"""Releases whose privacy loss is bounded, so that they are pure DP."""

Complexes: TypeAlias = NDArray[np.complex128]
Numbers: TypeAlias = NDArray[Any]  # Any: real or complex, as the argument is

_SHAPES = {ev.Trials.LOGARITHMIC: 0.0, ev.Trials.GEOMETRIC: 1.0}
"""Shapes of the negative binomial laws of a number of runs that have names of their own."""
ROUND = 2.0**-53  # largest relative error of one rounding
_BLOCK, _PANEL, _LONGEST = 60_000, 4000, 8192
"""Multiplications that OpenBLAS does in one thread: of two matrices of complex numbers (its limit
is 2^16), of a matrix and a vector (2^12), and of two vectors (10^4)."""
_MARGIN = 1 + 1e-12  # above the rounding of the few operations it multiplies


class ResponseLaw(NamedTuple):
    """Probabilities of the answers in randomized response, given the true answer."""

    truth: float  # probability of the true answer
    other: float  # probability of each other answer
    loss: float  # log(truth / other)


def exact(value: float) -> Fraction:
    """Return the fraction that equals the shortest decimal form of `value`: 1/10 for 0.1."""
    return Fraction(repr(value))


def round_up(value: Fraction | float) -> float:
    """Return the smallest float whose shortest decimal form is at least `value`."""
    near = float(value)
    return near if near == math.inf or exact(near) >= value else math.nextafter(near, math.inf)


def pure_epsilon(event: Event, relation: Relation) -> Fraction | float:
    """Return the epsilon of one occurrence of `event` at delta 0; infinity if no bound is known.

    >>> pure_epsilon(ev.Laplace(3.0), Relation.ADD_REMOVE)
    Fraction(1, 3)
    """
    match event:
        case ev.PureDP() | ev.Exponential():
            return exact(event.epsilon) * exact(_replacement_factor(event, relation))
        case ev.Laplace():
            return exact(_replacement_factor(event, relation)) / exact(event.noise_multiplier)
        case ev.DiscreteLaplace():
            factor = exact(_replacement_factor(event, relation))
            return event.sensitivity * factor / exact(event.noise_scale)
        case ev.RandomizedResponse():
            return exact(response_law(event).loss * _MARGIN)
        case ev.Shuffled():  # no amplification at delta 0
            return pure_epsilon(event.event, Relation.REPLACE_ONE)
        case ev.PoissonSampled() if relation is not Relation.REPLACE_ONE:
            # Amplification by sampling: Balle, Barthe & Gaboardi 2018, Thm. 8 (arXiv:1807.01647).
            inner = float(pure_epsilon(event.event, relation))
            return math.inf if inner > 500 else exact(sampled_epsilon(inner, event.rate))
        case ev.BestOf(most=None) if (shape := _SHAPES.get(event.trials, event.shape)) is not None:
            # Papernot & Steinke 2022 (arXiv:2110.03620), Theorem 2, as both orders grow.
            inner = pure_epsilon(event.event, relation)
            return (
                inner if inner == math.inf else (2 + exact(shape)) * exact(float(inner) * _MARGIN)
            )
        case _:
            return math.inf


def rounded_epsilon(event: Event, relation: Relation) -> float:
    """Return `pure_epsilon` as a float, rounded up."""
    return round_up(pure_epsilon(event, relation))


def gaussian_shift(event: ev.Gaussian, relation: Relation) -> float:
    """Return how far the mean moves, in standard deviations of the noise, if one record changes."""
    return _replacement_factor(event, relation) / event.noise_multiplier


def whole_shift(event: ev.DiscreteGaussian | ev.DiscreteLaplace, relation: Relation) -> int:
    """Return by how much a whole number changes if one record changes."""
    return event.sensitivity * round(_replacement_factor(event, relation))


def gdp_mu_squared(event: Event, relation: Relation) -> float:
    """Return the square of the smallest mu for which `event` is known to be mu-GDP, or infinity.

    An epsilon-DP release: its trade-off function is two chords that meet at (t, t) with
    t = 1 / (1 + e^epsilon) (Dong, Roth & Su 2022, arXiv:1905.02383). The trade-off function of
    mu-GDP is convex, so it lies below both chords if mu is such that it passes through (t, t).
    """
    if isinstance(event, ev.Gaussian):
        return gaussian_shift(event, relation) ** 2 * _MARGIN
    epsilon = float(pure_epsilon(event, relation))
    if epsilon < 1e-3:
        mu = math.sqrt(math.pi / 2) * epsilon * (1 + epsilon**2)  # its series, rounded up
    else:
        mu = -2 * float(ndtri(1 / (1 + math.exp(epsilon)))) if epsilon < 700 else math.inf
    return mu**2 * _MARGIN


def epsilon_and_delta(event: ev.ApproximateDP, relation: Relation) -> tuple[float, float]:
    """Return the (epsilon, delta) of `event` under `relation`, with delta rounded up.

    A replacement is a removal and an addition. If the guarantee of `event` is not stated for
    replacement, group privacy for two records gives (2 epsilon, delta (1 + e^epsilon)).
    """
    epsilon, delta = event.epsilon, event.delta
    if relation is not Relation.REPLACE_ONE or event.replace_factor == 1:
        return epsilon, delta
    return 2 * epsilon, min(1.0, delta * (1 + math.exp(min(epsilon, 700))) * _MARGIN)


def response_law(event: ev.RandomizedResponse) -> ResponseLaw:
    """Return the probabilities with which randomized response gives each answer."""
    p, n = event.random_probability, event.n_options
    return ResponseLaw(truth=1 - p + p / n, other=p / n, loss=math.log1p((1 - p) * n / p))


def sampled_epsilon(epsilon: float, rate: float) -> float:
    """Return the pure epsilon of an `epsilon`-DP release on a sample drawn at `rate`.

    It is log(1 - rate + rate e^epsilon), rounded away from 0.
    """
    return epsilon if rate == 1 else log_mixture_at(rate, epsilon) * _MARGIN


def log_mixture_at(rate: float, u: float) -> float:
    """Return log(1 - rate + rate e^u) of a single number u, like `log_mixture` of an array."""
    if math.isinf(u) and rate < 1.0:
        return u if u > 0 else math.log1p(-rate)
    growth = rate * math.expm1(min(u, 30.0))
    if rate == 1.0 or (u <= 30.0 and growth >= -0.5):
        return u if rate == 1.0 else math.log1p(growth)
    return float(log_mixture(rate, np.array(u))) if rate > 0.0 else 0.0


def log_mixture(rate: float, u: Numbers) -> Numbers:
    """Return log(1 - rate + rate e^u): the log of a mixture's ratio if its part has log ratio u.

    The result has full relative accuracy and does not overflow. For complex u with |Im u| < pi the
    branch is the one that is continuous from the real line; a rate above 1/2 then gives absolute
    accuracy only.
    """
    if rate == 1.0:
        return u
    log_rate, log_rest = math.log(rate), math.log1p(-rate)
    if np.iscomplexobj(u):
        near = log1p(rate * expm1(np.minimum(np.real(u), 30.0) + 1j * np.imag(u)))
        rises = np.real(u) + log_rate > log_rest
        gap = np.where(rises, log_rest - log_rate - u, u + log_rate - log_rest)
        added = np.where(rises, u + log_rate, log_rest) + log1p(np.exp(gap))
        return added if rate > 0.5 else np.where(np.real(u) > 30.0, added, near)
    growth = rate * np.expm1(np.minimum(u, 30.0))
    near = np.log1p(growth)
    if rate <= 0.5 and np.max(u, initial=-math.inf) <= 30.0:
        return near
    # Growth below -1/2 has lost digits, but there the logarithm is not small: adding logs is safe.
    return np.where((u > 30.0) | (growth < -0.5), np.logaddexp(log_rest, log_rate + u), near)


def log_sum_exp(logs: Floats) -> Floats:
    """Return the log of the sum of exp(logs) over the last axis; infinite if a summand is."""
    peak: Floats = logs.max(axis=-1)
    with np.errstate(invalid="ignore"):
        total: Floats = peak + np.log(np.exp(logs - peak[..., None]).sum(axis=-1))
    return np.where(np.isfinite(peak), total, peak)


def product(left: Numbers, right: Numbers) -> Numbers:
    """Return the matrix product left @ right, in blocks that a BLAS library does in one thread.

    A price takes a millisecond. Threads that a BLAS library starts for it wait for more work
    afterwards, which takes many milliseconds of processor time.
    """
    inner, width = right.shape
    is_matrix = min(len(left), width) > 1
    if len(left) * inner * width <= (_BLOCK if is_matrix else _PANEL):
        return left @ right
    depth = max(min(inner, _PANEL // width), 1)
    rows = max(_BLOCK // (depth * max(width, _BLOCK // _PANEL)), 1)
    out = np.zeros((len(left), width), np.result_type(left, right))
    for first in range(0, inner, depth):
        some, block = left[:, first : first + depth], right[first : first + depth]
        for row in range(0, len(left), rows):
            out[row : row + rows] += some[row : row + rows] @ block
    return out


def dot(left: Floats, right: Floats) -> float:
    """Return the scalar product of two vectors, in one thread like `product`."""
    if len(left) <= _LONGEST:
        return float(left @ right)
    starts = range(0, len(left), _LONGEST)
    return math.fsum(float(left[i : i + _LONGEST] @ right[i : i + _LONGEST]) for i in starts)


def log1p(z: Complexes) -> Complexes:
    """Return log(1 + z) of complex z with full relative accuracy for small z, unlike numpy's."""
    out = np.empty_like(z)
    x, y = z.real, z.imag
    out.real = 0.5 * np.log1p(np.maximum(x * (2 + x) + y * y, -0.9))
    out.imag = np.arctan2(y, 1 + x)
    is_far = np.abs(z) >= 0.5
    if is_far.any():
        out.real = np.where(is_far, np.log(np.maximum(np.hypot(1 + x, y), 1e-300)), out.real)
    return out


def expm1(z: Complexes) -> Complexes:
    """Return e^z - 1 of complex z with full relative accuracy for small z."""
    out = np.empty_like(z)
    growth, half = np.expm1(z.real), np.sin(0.5 * z.imag)
    out.imag = (1 + growth) * np.sin(z.imag)
    out.real = growth - (1 + growth) * (2 * half * half)
    return out


def _replacement_factor(
    event: ev.Gaussian
    | ev.Laplace
    | ev.PureDP
    | ev.Exponential
    | ev.DiscreteGaussian
    | ev.DiscreteLaplace,
    relation: Relation,
) -> float:
    """Return how many times one record's contribution neighbors under `relation` may differ by."""
    return event.replace_factor if relation is Relation.REPLACE_ONE else 1.0
