"""Exact samplers of discrete noise (Canonne, Kamath & Steinke 2020, arXiv:2004.00010v5, section 5).

Their Algorithms 1-3 reduce everything to events of probability exp(-gamma) with rational gamma.
Here such an event is `U < exp(-gamma)` for a uniform U of which only as many bits are drawn as the
comparison needs: 53 bits and a double almost always decide it, with a margin far above every
rounding error; where they do not, more bits and exact rational arithmetic do. So the law is exact
(given uniform bits) at the speed of numpy.
"""

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from tacit.mechanisms.rng import Rng

Integers = NDArray[np.int64]
LARGEST_SCALE = 2.0**45
SMALLEST_SCALE = 2.0**-20

# Relative error granted to a double exp(-gamma): gamma below 746 carries at most a few ulps of
# relative error, so 2^-40 in all; the margin is a thousand times that.
_MARGIN = 2.0**-30
_UNDERFLOW = 1e-300


def discrete_laplace(scale: Fraction, size: int, rng: Rng) -> Integers:
    """`size` draws with P(x) proportional to exp(-|x| / scale). Algorithm 2."""
    return _draw_until_full(size, lambda n: _propose_laplace(scale, n, rng))


def discrete_gaussian(variance: Fraction, size: int, rng: Rng) -> Integers:
    """`size` draws with P(x) proportional to exp(-x^2 / (2 variance)). Algorithm 3."""
    floor_std = math.isqrt(variance.numerator // variance.denominator)
    t = floor_std + 1
    center, double = float(variance / t), float(2 * variance)

    def propose(n: int) -> Integers:
        noise = _propose_laplace(Fraction(t), n, rng)
        gamma = (np.abs(noise) - center) ** 2 / double

        def exact_gamma(i: int) -> Fraction:
            return (abs(int(noise[i])) - variance / t) ** 2 / (2 * variance)

        return noise[bernoulli_exp(gamma, exact_gamma, rng)]

    return _draw_until_full(size, propose)


def bernoulli_exp(
    gamma: NDArray[np.float64], exact_gamma: Callable[[int], Fraction], rng: Rng
) -> NDArray[np.bool_]:
    """Independent events of probability exp(-gamma), exactly; `exact_gamma(i)` backs `gamma[i]`.

    U lies in [u, u + 1) / 2^53; it is compared with an interval that contains exp(-gamma).
    """
    u = rng.integers(0, 2**53, size=gamma.size)
    probability = np.exp(-gamma)
    below = (u + 1) * 2.0**-53 <= probability * (1 - _MARGIN)
    below &= probability > _UNDERFLOW
    above = u * 2.0**-53 >= np.maximum(probability * (1 + _MARGIN), _UNDERFLOW)
    for i in np.flatnonzero(~(below | above)):
        below[i] = _is_below_exp(int(u[i]), 53, exact_gamma(int(i)), rng)
    return below


def _is_below_exp(u: int, bits: int, gamma: Fraction, rng: Rng) -> bool:
    """Whether a uniform with leading `bits` bits `u` is below exp(-gamma); draws more as needed."""
    while True:
        low, high = _exp_bounds(gamma, bits)
        if Fraction(u + 1, 2**bits) <= low:
            return True
        if Fraction(u, 2**bits) >= high:
            return False
        u = (u << 32) | int(rng.integers(0, 2**32))
        bits += 32


def _exp_bounds(gamma: Fraction, bits: int) -> tuple[Fraction, Fraction]:
    """Rational numbers around exp(-gamma), apart by less than 2^-bits."""
    if gamma > 2**17:  # below 2^-180000: zero for every practical number of bits
        return Fraction(0), Fraction(1, 2**180_000)
    digits = bits // 3 + 30
    with localcontext() as context:
        context.prec = digits
        # The quotient and `exp` are correctly rounded: relative error below (1 + gamma) 10^-digits,
        # for which 10^(8 - digits) is ample as gamma <= 2^17.
        value = Fraction((-Decimal(gamma.numerator) / Decimal(gamma.denominator)).exp())
    slack = Fraction(1, 10 ** (digits - 8))
    return value * (1 - slack), value * (1 + slack)


def _propose_laplace(scale: Fraction, n: int, rng: Rng) -> Integers:
    """Some of `n` attempts at a discrete Laplace draw: those that Algorithm 2 does not reject."""
    t, s = scale.numerator, scale.denominator
    remainder = rng.integers(0, t, size=n)
    kept = bernoulli_exp(remainder / t, lambda i: Fraction(int(remainder[i]), t), rng)
    remainder = remainder[kept]
    magnitude = (remainder + t * _geometric(remainder.size, rng)) // s
    negative = rng.integers(0, 2, size=magnitude.size).astype(bool)
    twice_zero = negative & (magnitude == 0)  # zero would otherwise count with both signs
    return np.where(negative, -magnitude, magnitude)[~twice_zero]


def _geometric(size: int, rng: Rng) -> Integers:
    """Number of events of probability 1/e in a row, `size` times."""
    runs = np.zeros(size, np.int64)
    alive = np.arange(size)
    while alive.size:
        alive = alive[bernoulli_exp(np.ones(alive.size), lambda _: Fraction(1), rng)]
        runs[alive] += 1
    return runs


def _draw_until_full(size: int, propose: Callable[[int], Integers]) -> Integers:
    parts: list[Integers] = []
    missing = size
    while missing > 0:
        part = propose(2 * missing + 8)[:missing]
        parts.append(part)
        missing -= part.size
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
