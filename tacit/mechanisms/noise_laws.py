"""Laws of noise: normal, Laplace, exponential, Gumbel; draws are exact to every digit needed.

A draw is a real number, a function of uniform bits of which there are infinitely many. Mechanisms
never need the number itself. They need a decision about it: to which whole number it is rounded
(`rounded_noise`), or which of several scores plus noise is the largest (`largest_noisy_score`).

1. 64 bits of each uniform are drawn, and the number is computed in double precision together with a
   proved bound on its error. The bound covers rounding and the bits that were not drawn.
2. If every number within the bound leads to the same decision, that is the decision. This is so for
   all but a few of 100,000 draws.
3. Otherwise more bits are drawn and the number is enclosed between two fractions, closer and
   closer, until the decision is certain.

So decisions have exactly the law of real noise, given uniform bits: no tail is cut off, no outcome
is impossible, and no rounding error is left that could tell two neighboring data sets apart
(Mironov 2012, doi:10.1145/2382196.2382264; Haney et al. 2022, arXiv:2207.10635; Jin et al. 2022,
arXiv:2112.05307). How often step 3 occurs depends on the noise alone for `rounded_noise` without an
offset, so the time taken does not depend on the data there.

The bounds allow log and log1p an error of 4 units in the last place (tests compare the draws with
50-digit arithmetic); sqrt and the basic operations are correctly rounded (IEEE 754).
In the proofs, u = 2^-53 is the largest relative error of one rounded operation.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tacit._arrays import Floats
from tacit.mechanisms.rng import Rng, random_words

Words: TypeAlias = NDArray[np.uint64]
Enclosure: TypeAlias = tuple[int, int]
"""A lower and an upper bound of one draw, in units of 2^-n_bits for n_bits bits drawn."""

_CHUNK = 1 << 14  # groups of draws computed at once, small enough for the processor's cache
_EDGE = np.uint64(1 << 44)  # words closer than this to 0 (or to 2^64) are always refined
_HALF_WORD = np.uint64(2**63)


@dataclass(frozen=True)
class NoiseLaw:
    """A law of real random numbers, as a function of independent uniform numbers.

    `n_words` uniform numbers determine a group of `n_draws` independent draws. `approximate` maps
    the first 64 bits of the uniform numbers, an array of shape (n_words, n), to draws of shape
    (n_draws, n) and a bound on their error, of shape (n,). `enclose` maps more bits of the uniform
    numbers of one group, and the number of these bits, to bounds of each draw; it returns None if
    more bits are needed first.
    """

    name: str
    n_words: int
    n_draws: int
    approximate: Callable[[Words], tuple[Floats, Floats]]
    enclose: Callable[[Sequence[int], int], list[Enclosure] | None]


def rounded_noise(
    law: NoiseLaw, scale: float, size: int, rng: Rng, *, offset: float = 0.0
) -> Floats:
    """Return `size` independent draws of offset + scale * noise, each rounded to a whole number.

    The law of the results is exact. The caller keeps |scale| below 2^45, so that results are whole
    numbers below 2^53 in magnitude, except with probability below 1e-100.
    """
    whole = np.empty((law.n_draws, -(-size // law.n_draws)))
    for start in range(0, whole.shape[1], _CHUNK):
        part = whole[:, start : start + _CHUNK]
        words = random_words(rng, (law.n_words, part.shape[1]))
        draws, error = law.approximate(words)
        draws *= scale
        error *= scale
        if offset:
            draws += offset
            error += abs(offset) * 2.0**-51  # this addition is rounded
        np.rint(draws, out=part)
        draws -= part
        np.abs(draws, out=draws)
        draws += error
        for group in np.flatnonzero((draws >= 0.5).any(axis=0)):
            bits = _Bits(law, words[:, group], rng)
            part[:, group] = _round_exactly(bits, scale, offset)
    return whole.reshape(-1)[:size]


def largest_noisy_score(law: NoiseLaw, scale: float, scores: Floats, rng: Rng) -> int:
    """Return the index of the largest of the exact `scores` + scale * noise, noise independent.

    The law of the index is exact: sums are real numbers, and no two of them are equal.
    """
    assert law.n_draws == 1
    words = random_words(rng, (law.n_words, scores.size))
    draws, error = law.approximate(words)
    with np.errstate(over="ignore"):
        # Only differences of scores matter. Their rounding error is covered by `error`. A
        # difference beyond all floats is rounded up, and so stays an upper bound.
        centered = np.maximum(scores - scores.max(), -np.finfo(np.float64).max)
        noise = scale * draws[0]
        noisy = centered + noise
        error = scale * error + 2.0**-50 * (np.abs(centered) + np.abs(noise))
        contenders = np.flatnonzero(noisy + error >= np.max(noisy - error))
    if len(contenders) == 1:
        return int(contenders[0])
    rivals = {int(i): _Bits(law, words[:, i], rng) for i in contenders}
    exact_scale = Fraction(scale)
    while True:
        bounds: dict[int, tuple[Fraction, ...]] = {}
        for i, bits in rivals.items():
            ((low, high),), unit = bits.refine()
            score = Fraction(float(scores[i]))
            bounds[i] = tuple(score + exact_scale * x / unit for x in (low, high))
        surest = max(bounds, key=lambda i: bounds[i][0])
        rivals = {i: rivals[i] for i in bounds if bounds[i][1] >= bounds[surest][0]}
        if len(rivals) == 1:
            return surest


class _Bits:
    """The uniform bits of one group of draws, extended as far as a decision needs."""

    def __init__(self, law: NoiseLaw, words: Words, rng: Rng) -> None:
        self._law, self._rng = law, rng
        self._words, self._n_bits = [int(word) for word in words], 64

    def refine(self) -> tuple[list[Enclosure], int]:
        """Draw 64 more bits of each number; return closer bounds of the draws, and 1 / unit."""
        while True:
            more = random_words(self._rng, (len(self._words),))
            self._words = [(w << 64) | int(m) for w, m in zip(self._words, more, strict=True)]
            self._n_bits += 64
            enclosures = self._law.enclose(self._words, self._n_bits)
            if enclosures is not None:
                return enclosures, 1 << self._n_bits


def _round_exactly(bits: _Bits, scale: float, offset: float) -> list[int]:
    """Return the whole numbers nearest to offset + scale * draw, for each draw of a group."""
    a, b = scale.as_integer_ratio()
    c, d = offset.as_integer_ratio()
    while True:
        enclosures, unit = bits.refine()
        whole = b * d * unit  # offset + scale * x / unit = (a d x + b c unit) / whole
        cells = [
            [(2 * (a * d * x + b * c * unit) + whole) // (2 * whole) for x in bounds]
            for bounds in enclosures
        ]
        if all(low == high for low, high in cells):
            return [low for low, _ in cells]


def _minus_log(number: int, n_bits: int) -> int:
    """Return -ln(number / 2^n_bits) in units of 2^-n_bits, off by at most 2^10 units."""
    with localcontext() as context:
        # The operations of `decimal` are correctly rounded, here to more than n_bits + 9 bits.
        context.prec = n_bits // 3 + 4
        unit = Decimal(1 << n_bits)
        return int(-(number / unit).ln() * unit)


def _exponential_bounds(k: int, n_bits: int) -> Enclosure | None:
    """Return bounds of -ln U for U between k and k + 1 units of 2^-n_bits; None for k = 0."""
    if k == 0:
        return None
    value = _minus_log(k, n_bits)
    width = (1 << n_bits) // k + 1  # ln(k + 1) <= ln(k) + 1 / k
    return max(value - width - 2**11, 0), value + 2**11


# --- normal -------------------------------------------------------------------------------------

_SINE = [(-1) ** i * (math.pi / 4) ** (2 * i + 1) / math.factorial(2 * i + 1) for i in range(9)]
"""Coefficients of sin(pi t / 4) / t in t^2; terms left out are below (pi/4)^19 / 19! = 9e-20."""


def _approximate_normal(words: Words) -> tuple[Floats, Floats]:
    """Return R cos(A) and R sin(A), R = sqrt(-2 ln U), A uniform in [-pi, pi) (Box & Muller 1958).

    Error. U = (k + 1/2) / 2^64 differs from the uniform number by at most u U from rounding and by
    at most 2^-65 from the bits not drawn, so ln U by u + 1 / (2 k), and R by (u + 1 / (2 k)) / R.
    For k >= 2^44 this is below 10 u (R + 1 / R): at k = 2^44, 1 / (2 k) is 256 u and R^2 is 27.7,
    and 1 / k falls faster than R^2 as k grows. The logarithm (8 u, halved by the root), the root
    (u) and two products add 7 u R. s = sin(A / 4), |s| <= 0.71, is a polynomial in t = A / pi with
    a relative error below 5 u: u from t, 3 u from the polynomial, u from their product. As
    cos(A / 4) = sqrt(1 - s^2), the errors of sin(A / 2) = 2 s sqrt(1 - s^2) and of cos(A / 2) =
    1 - 2 s^2 are below 2 (1 - 2 s^2) / sqrt(1 - s^2) * 5 u s + 4 u < 7 u and 4 s * 5 u s + 2 u =
    12 u. Doubling the angle once more gives less than 2 sqrt(7^2 + 12^2) u + 2 u < 30 u for sin(A)
    and 4 * 7 u + 2 u = 30 u for cos(A). The sum is below 47 u (R + 1 / R), and 48 u is used. Words
    k < 2^44 have no bound.
    """
    first, second = words
    radius = first.astype(np.float64)
    radius += 0.5
    radius *= 2.0**-64
    np.log(radius, out=radius)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    draws = np.empty((2, first.size))
    cosine, sine = draws
    t = second.view(np.int64).astype(np.float64)
    t *= 2.0**-63
    square = t * t
    sine.fill(_SINE[-1])
    for coefficient in reversed(_SINE[:-1]):
        sine *= square
        sine += coefficient
    sine *= t
    np.multiply(sine, sine, out=cosine)
    np.subtract(1.0, cosine, out=cosine)
    np.sqrt(cosine, out=cosine)
    for _ in range(2):  # cos 2a = 1 - 2 sin^2 a and sin 2a = 2 sin a cos a
        cosine *= sine
        np.multiply(sine, sine, out=sine)
        sine *= -2.0
        sine += 1.0
        cosine *= 2.0
        cosine, sine = sine, cosine
    draws *= radius
    with np.errstate(divide="ignore"):
        error = 1.0 / radius
    error += radius
    error *= 48 * 2.0**-53
    error[first < _EDGE] = np.inf
    return draws, error


def _enclose_normal(words: Sequence[int], n_bits: int) -> list[Enclosure] | None:
    """Return bounds of R cos(A) and R sin(A) as in `_approximate_normal`."""
    bounds = _exponential_bounds(words[0], n_bits)
    if bounds is None:
        return None
    low = math.isqrt(2 * bounds[0] << n_bits)
    high = math.isqrt(2 * bounds[1] << n_bits) + 1
    signed = words[1] - (words[1] >> (n_bits - 1) << n_bits)  # A / pi in units of 2^(1 - n_bits)
    # |R cos A - low cos M| <= (R - low) + low |A - M|, and the same for the sine. The middle M of
    # the cell of A is at most pi units away; its cosine is off by 2^16 units; R is below 2^7.
    slack = (high - low) + 2**24
    centers = [low * x >> n_bits for x in _cosine_and_sine(2 * signed + 1, n_bits)]
    return [(x - slack, x + slack) for x in centers]


def _cosine_and_sine(middle: int, n_bits: int) -> tuple[int, int]:
    """Return cos and sin of pi * middle / 2^n_bits, in [-pi, pi], in units of 2^-n_bits.

    They are sums of power series in whole numbers. Each of fewer than 500 terms is rounded down
    twice, and errors grow by less than e^pi: below 2^16 units in all.
    """
    angle = _pi(n_bits) * middle >> n_bits
    cosine, sine, term, n = 0, 0, 1 << n_bits, 0
    while term not in (0, -1):  # rounding down keeps negative terms at -1
        if n % 2:
            sine += -term if n % 4 == 3 else term
        else:
            cosine += -term if n % 4 == 2 else term
        n += 1
        term = (term * angle >> n_bits) // n
    return cosine, sine


@lru_cache(maxsize=8)
def _pi(shift: int) -> int:
    """Return pi in units of 2^-shift, by Machin's formula 16 arctan(1/5) - 4 arctan(1/239)."""
    unit = 1 << (shift + 20)  # the terms are rounded 2^20 times finer than the result

    def arctan_of_inverse(x: int) -> int:
        power, total, n = unit // x, 0, 1
        while power:
            total += power // n if n % 4 == 1 else -(power // n)
            power, n = power // (x * x), n + 2
        return total

    return (16 * arctan_of_inverse(5) - 4 * arctan_of_inverse(239)) >> 20


# --- Laplace, exponential, Gumbel ---------------------------------------------------------------


def _approximate_laplace(words: Words) -> tuple[Floats, Floats]:
    """Return -ln U with a random sign, the first bit; U is made of the other 63 bits.

    Error. U = (k + 1/2) / 2^63 is off by at most u U from rounding and by U / (2 k) from the bits
    not drawn, so ln U is off by u + 1 / (2 k). The logarithm and one product add 10 u |ln U|. This
    is below 16 u (1 + |ln U|) + 1 / (2^63 U) for k >= 1. There is no bound for k = 0.
    """
    (word,) = words
    uniform = (word & ~_HALF_WORD).astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-63
    draws, error = _approximate_minus_log(uniform, unit=2.0**-63)
    np.copysign(draws, word.view(np.int64), out=draws)
    return draws[None], error


def _approximate_minus_log(uniform: Floats, *, unit: float) -> tuple[Floats, Floats]:
    """Return -ln U and the bound on its error that `_approximate_laplace` proves."""
    draws = np.log(uniform)
    error = 1.0 - draws
    error *= 2.0**-49
    error += unit / uniform
    error[uniform < unit] = np.inf  # U is the middle of the lowest cell
    np.negative(draws, out=draws)
    return draws, error


def _enclose_laplace(words: Sequence[int], n_bits: int) -> list[Enclosure] | None:
    sign, rest = words[0] >> (n_bits - 1), words[0] & ((1 << (n_bits - 1)) - 1)
    bounds = _exponential_bounds(rest, n_bits - 1)
    if bounds is None:
        return None
    low, high = (2 * bound for bound in bounds)  # from units of 2^(1 - n_bits)
    return [(-high, -low)] if sign else [(low, high)]


def _approximate_exponential(words: Words) -> tuple[Floats, Floats]:
    """Return -ln U; its error has the bound of `_approximate_laplace`."""
    draws, error = _approximate_minus_log(_uniform(words[0]), unit=2.0**-64)
    return draws[None], error


def _enclose_exponential(words: Sequence[int], n_bits: int) -> list[Enclosure] | None:
    bounds = _exponential_bounds(words[0], n_bits)
    return None if bounds is None else [bounds]


def _approximate_gumbel(words: Words) -> tuple[Floats, Floats]:
    """Return -ln E, E = -ln(1 - U) exponential: small U, the heavy tail, keep all their digits.

    Error. For 2^44 <= k <= 2^64 - 2^44, U is off by u U + 2^-65 and 1 - U is at least 2^-20. So
    E is off by at most 2^-44 E for U below 1/2 and by 2^-32 above, where E > 1/2. The logarithms
    add less than 2^-40, hence -ln E is off by less than 2^-30. Other words have no bound here.
    """
    (word,) = words
    exponential = -np.log1p(-np.minimum(_uniform(word), 1 - 2.0**-53))
    error = np.where((word < _EDGE) | (~word < _EDGE), np.inf, 2.0**-30)
    return -np.log(exponential)[None], error


def _enclose_gumbel(words: Sequence[int], n_bits: int) -> list[Enclosure] | None:
    # -ln(1 - U) is -ln of the mirrored number, which has 2^n_bits - 1 - k in place of k.
    bounds = _exponential_bounds((1 << n_bits) - 1 - words[0], n_bits)
    if bounds is None or bounds[0] == 0:
        return None
    low, high = (_minus_log(bound, n_bits) for bound in reversed(bounds))
    return [(low - 2**11, high + 2**11)]


def _uniform(word: Words) -> Floats:
    return (word.astype(np.float64) + 0.5) * 2.0**-64


NORMAL = NoiseLaw("normal", 2, 2, _approximate_normal, _enclose_normal)
LAPLACE = NoiseLaw("Laplace", 1, 1, _approximate_laplace, _enclose_laplace)
EXPONENTIAL = NoiseLaw("exponential", 1, 1, _approximate_exponential, _enclose_exponential)
GUMBEL = NoiseLaw("Gumbel", 1, 1, _approximate_gumbel, _enclose_gumbel)
