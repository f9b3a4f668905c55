"""Discrete Gaussian and Laplace noise on whole numbers.

| mechanism | noise | event |
|---|---|---|
| `DiscreteGaussianMechanism` | discrete Gaussian, exact | `RenyiCurve` |
| `DiscreteLaplaceMechanism` | discrete Laplace, exact | `PureDP` |

`GaussianMechanism` and `LaplaceMechanism` are as safe for real vectors (`tacit.mechanisms.grid`).

The exact samplers follow Canonne, Kamath & Steinke 2020 (arXiv:2004.00010v5, section 5), whose
Algorithms 1-3 reduce everything to events of probability exp(-gamma) with rational gamma. Here such
an event is `U < exp(-gamma)` for a uniform U, of which only as many bits are drawn as the
comparison needs. Almost always 53 bits and a double decide it, with a margin far above every
rounding error; otherwise more bits and exact rational arithmetic do. So the law is exact, given
uniform bits, at the speed of numpy.
"""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike

from tacit._arrays import Flags, Floats, Indices
from tacit._check import positive, within
from tacit.events import PureDP, RenyiCurve
from tacit.mechanisms.rng import Rng, Seed, generator

_check_scale = partial(within, 2.0**-20, 2.0**45, advice="Rescale the value.")
# Relative error allowed for a double exp(-gamma): gamma below 746 has a relative error of at most a
# few ulps, so exp(-gamma) of 2^-40; the margin is a thousand times that.
_MARGIN = 2.0**-30
_UNDERFLOW = 1e-300

# Orders of the Rényi curve, dense where the smallest epsilon is usually found. Any subset is valid.
ORDERS = (
    *(1 + k / 10 for k in range(1, 100)),
    *(float(k) for k in range(11, 64)),
    *(2.0**k * m for k in range(6, 14) for m in (1.0, 1.25, 1.5, 1.75)),
)


@dataclass(frozen=True)
class DiscreteGaussianMechanism:
    """Release of whole numbers plus discrete Gaussian noise, P(x) ~ exp(-x^2 / (2 noise_std^2)).

    Guarantee: Rényi divergence of order a at most a / (2 noise_multiplier^2), as for the continuous
    Gaussian (Canonne, Kamath & Steinke 2020, arXiv:2004.00010v5, Theorem 14), provided one added or
    removed record moves the vector by at most `l2_sensitivity`. By default the curve does not cover
    replaced records. To cover them, pass the largest L2 change of a replacement as `l2_sensitivity`
    and `replace_factor=1`; the event is then valid for every relation.

    >>> DiscreteGaussianMechanism(3.0, l2_sensitivity=1.0).release([100, 0], rng=0).tolist()
    [104, -4]
    """

    noise_multiplier: float
    _: KW_ONLY
    l2_sensitivity: float
    replace_factor: float = 2.0

    def __post_init__(self) -> None:
        positive(noise_multiplier=self.noise_multiplier)
        positive(l2_sensitivity=self.l2_sensitivity)
        _ = self.event  # checks replace_factor
        _check_scale(noise_std=self.noise_std)

    @property
    def noise_std(self) -> float:
        """Parameter of the noise law; the true standard deviation is slightly smaller."""
        # One ulp up, so that rounding of the product cannot lower the multiplier.
        return math.nextafter(self.noise_multiplier * self.l2_sensitivity, math.inf)

    @property
    def event(self) -> RenyiCurve:
        """Event of one release, for the accountant."""
        rho = 1 / (2 * self.noise_multiplier**2) * (1 + 2.0**-50)  # rounding only over-charges
        return RenyiCurve(ORDERS, tuple(order * rho for order in ORDERS), self.replace_factor)

    def release(self, value: ArrayLike, rng: Seed = None) -> Indices:
        """Return `value` plus noise, in its shape; charge `event` to the privacy budget first."""
        exact = integer_array(value)
        noise = discrete_gaussian(Fraction(self.noise_std) ** 2, exact.size, generator(rng))
        return exact + noise.reshape(exact.shape)


@dataclass(frozen=True)
class DiscreteLaplaceMechanism:
    """Release of whole numbers plus discrete Laplace noise, P(x) ~ exp(-|x| / noise_scale).

    Guarantee: `epsilon`-DP, provided one added or removed record moves the vector by at most
    `l1_sensitivity` in L1 norm: the log probability of the noise changes by at most 1 / noise_scale
    per unit of each coordinate, and noise_scale >= l1_sensitivity / epsilon. The event is `PureDP`,
    not `Laplace`: on a grid the two extreme privacy losses are more likely (with sensitivity 1 no
    others occur), so the continuous price would be too low. Also called the geometric mechanism
    (Ghosh, Roughgarden & Sundararajan 2009).

    >>> DiscreteLaplaceMechanism(0.5, l1_sensitivity=1.0).release([100, 0], rng=0).tolist()
    [97, -2]
    """

    epsilon: float
    _: KW_ONLY
    l1_sensitivity: float
    replace_factor: float = 2.0

    def __post_init__(self) -> None:
        positive(epsilon=self.epsilon)
        positive(l1_sensitivity=self.l1_sensitivity)
        _ = self.event  # checks replace_factor
        _check_scale(noise_scale=self.noise_scale)

    @property
    def noise_scale(self) -> float:
        """Scale l1_sensitivity / epsilon, rounded up to 20 bits to keep the exact sampler fast."""
        needed = Fraction(self.l1_sensitivity) / Fraction(self.epsilon)
        unit = Fraction(2) ** (math.frexp(needed)[1] - 20)
        return float(math.ceil(needed / unit) * unit)

    @property
    def event(self) -> PureDP:
        """Event of one release, for the accountant."""
        return PureDP(self.epsilon, self.replace_factor)

    def release(self, value: ArrayLike, rng: Seed = None) -> Indices:
        """Return `value` plus noise, in its shape; charge `event` to the privacy budget first."""
        exact = integer_array(value)
        noise = discrete_laplace(Fraction(self.noise_scale), exact.size, generator(rng))
        return exact + noise.reshape(exact.shape)


def discrete_laplace(scale: Fraction, size: int, rng: Rng) -> Indices:
    """Return `size` exact draws, P(x) ~ exp(-|x| / scale) (Canonne et al. 2020, Algorithm 2)."""
    return _draw_until_full(size, lambda n: _propose_laplace(scale, n, rng))


def discrete_gaussian(variance: Fraction, size: int, rng: Rng) -> Indices:
    """Return `size` exact draws, P(x) ~ exp(-x^2 / (2 variance)) (same paper, Algorithm 3)."""
    floor_std = math.isqrt(variance.numerator // variance.denominator)
    t = floor_std + 1
    center, double = float(variance / t), float(2 * variance)

    def propose(n: int) -> Indices:
        noise = _propose_laplace(Fraction(t), n, rng)
        gamma = (np.abs(noise) - center) ** 2 / double

        def exact_gamma(i: int) -> Fraction:
            return (abs(int(noise[i])) - variance / t) ** 2 / (2 * variance)

        return noise[bernoulli_exp(gamma, exact_gamma, rng)]

    return _draw_until_full(size, propose)


def bernoulli_exp(gamma: Floats, exact_gamma: Callable[[int], Fraction], rng: Rng) -> Flags:
    """Return independent flags, each True with probability exactly exp(-gamma).

    `gamma[i]` is `exact_gamma(i)` rounded to a double. A flag is True if a uniform number U is
    below exp(-gamma). The first 53 bits u of U place it in [u, u + 1) / 2^53, and this interval is
    compared with one that contains exp(-gamma). More bits are drawn only if the two overlap.
    """
    u = rng.integers(0, 2**53, size=gamma.size)
    probability = np.exp(-gamma)
    below = (u + 1) * 2.0**-53 <= probability * (1 - _MARGIN)
    below &= probability > _UNDERFLOW
    above = u * 2.0**-53 >= np.maximum(probability * (1 + _MARGIN), _UNDERFLOW)
    for i in np.flatnonzero(~(below | above)):
        below[i] = _is_below_exp(int(u[i]), 53, exact_gamma(int(i)), rng)
    return below


def integer_array(value: ArrayLike) -> Indices:
    """Return the private `value` as int64, clipped to +-2^61 so that added noise cannot overflow.

    Clipping never increases a distance, so it raises no sensitivity. It raises no error either,
    because whether it happened is private.
    """
    array = np.asarray(value)
    if array.dtype.kind not in "iu":
        raise TypeError(f"value must be whole numbers, got dtype {array.dtype}.")
    if array.dtype.kind == "u":
        array = np.minimum(array, array.dtype.type(min(2**61, np.iinfo(array.dtype).max)))
    return np.clip(array.astype(np.int64), -(2**61), 2**61)


def _is_below_exp(u: int, bits: int, gamma: Fraction, rng: Rng) -> bool:
    """Return whether a uniform number in [0, 1) whose first `bits` bits are `u` is < exp(-gamma).

    More bits of the number are drawn until the comparison is decided.
    """
    while True:
        low, high = _exp_bounds(gamma, bits)
        if Fraction(u + 1, 2**bits) <= low:
            return True
        if Fraction(u, 2**bits) >= high:
            return False
        u = (u << 32) | int(cast("Any", rng.integers(0, 2**32)))  # Any: a scalar, annotated badly
        bits += 32


def _exp_bounds(gamma: Fraction, bits: int) -> tuple[Fraction, Fraction]:
    """Return rational bounds below and above exp(-gamma), less than 2^-bits apart."""
    if gamma > 2**17:  # below 2^-180000: zero for every practical number of bits
        return Fraction(0), Fraction(1, 2**180_000)
    digits = bits // 3 + 30
    with localcontext() as context:
        context.prec = digits
        # The quotient and `exp` are correctly rounded: relative error below (1 + gamma) 10^-digits,
        # which is far below 10^(8 - digits) because gamma <= 2^17.
        value = Fraction((-Decimal(gamma.numerator) / Decimal(gamma.denominator)).exp())
    slack = Fraction(1, 10 ** (digits - 8))
    return value * (1 - slack), value * (1 + slack)


def _propose_laplace(scale: Fraction, n: int, rng: Rng) -> Indices:
    """Propose `n` discrete Laplace draws; return those that rejection sampling accepts."""
    t, s = scale.numerator, scale.denominator
    remainder: Indices = rng.integers(0, t, size=n)
    kept = bernoulli_exp(remainder / t, lambda i: Fraction(int(remainder[i]), t), rng)
    remainder = remainder[kept]
    magnitude = (remainder + t * _geometric(remainder.size, rng)) // s
    negative = rng.integers(0, 2, size=magnitude.size).astype(bool)
    twice_zero = negative & (magnitude == 0)  # zero would otherwise count with both signs
    return np.where(negative, -magnitude, magnitude)[~twice_zero]


def _geometric(size: int, rng: Rng) -> Indices:
    """Return `size` geometric numbers: successes of probability 1/e before the first failure."""
    runs = np.zeros(size, np.int64)
    alive = np.arange(size)
    while alive.size:
        alive = alive[bernoulli_exp(np.ones(alive.size), lambda _: Fraction(1), rng)]
        runs[alive] += 1
    return runs


def _draw_until_full(size: int, propose: Callable[[int], Indices]) -> Indices:
    parts: list[Indices] = []
    missing = size
    while missing > 0:
        part = propose(2 * missing + 8)[:missing]
        parts.append(part)
        missing -= part.size
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
