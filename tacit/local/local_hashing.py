"""Optimal local hashing: hash the option to few values, then randomized response among those.

Wang et al. 2017 (arXiv:1705.04421). Each person draws a public hash function with
g values, g close to e^epsilon + 1, and sends the function with a randomized hash value. The
report supports every option that the function maps to the reported value: the true one with
probability e^epsilon / (e^epsilon + g - 1), each other one with probability 1 / g.

The hash functions are linear over the field of g elements, g prime: option x is written as a
vector of m digits in base g, and function a maps it to <a, x> mod g. For two different options
<a, x - x'> is uniform, so they collide with probability exactly 1 / g, as the estimate assumes.
Counting the support of all options is then a Fourier transform over the g^m functions (as in the
"projective geometry response" of Feldman, Nelson, Nguyen & Talwar 2022, arXiv:2203.00194) in place
of one hash per report and option.
"""

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit.local.coins import whole_numbers
from tacit.local.frequencies import FrequencyOracle, Reports, bits_of
from tacit.local.randomized_response import RandomizedResponse
from tacit.mechanisms import Rng

_TABLE = 2**25
"""Largest table of (function, value) that is transformed; beyond, options are hashed one by one."""


@dataclass(frozen=True, kw_only=True)
class LocalHashing(FrequencyOracle):
    """Optimal local hashing with linear hash functions, a frequency oracle.

    A report is two whole numbers: the hash function and the randomized hash value.

    >>> LocalHashing(epsilon=1.0, n_options=1000).n_values
    3
    """

    name = "optimal local hashing"

    @cached_property
    def n_values(self) -> int:
        """Number g of hash values: the prime with the least variance, near e^epsilon + 1.

        The variance is proportional to (e^epsilon - 1 + g)^2 / (g - 1).
        """
        growth = math.expm1(self.epsilon)
        middle = int(growth) + 2
        # The variance falls up to e^epsilon + 1 and then rises: the primes next to it suffice.
        below = next(g for g in range(middle, 1, -1) if _is_prime(g))
        above = next(g for g in itertools.count(middle + 1) if _is_prime(g))
        return min((below, above), key=lambda g: (growth + g) ** 2 / (g - 1))

    @cached_property
    def n_digits(self) -> int:
        """Number of digits with which an option is written in base g (`n_values`)."""
        digits = 1
        while self.n_values**digits < self.n_options:
            digits += 1
        return digits

    @property
    def hit_probability(self) -> Fraction:
        """Probability that the reported value is the hash of the true option."""
        return self._response.hit_probability

    @property
    def miss_probability(self) -> Fraction:
        """Probability that the reported value is the hash of a given option not held."""
        return Fraction(1, self.n_values)

    @property
    def report_bits(self) -> int:
        """Number of bits of a report: the hash function and the reported value."""
        return bits_of(self.n_values ** (self.n_digits + 1))

    def worst_case_ratio(self) -> Fraction:
        """Return the largest ratio of the randomized response among the hash values."""
        return self._response.worst_case_ratio()

    def support(self, reports: ArrayLike) -> NDArray[np.int64]:
        """Count for each option the reports whose hash function maps it to the reported value."""
        g, n_functions = self.n_values, self.n_values**self.n_digits
        functions, values = whole_numbers(reports, n_functions, "reports", row=2).T
        whole_numbers(values, g, "reports")
        if n_functions * g > _TABLE:
            return self._support_one_by_one(functions, values)
        table = np.bincount(functions * g + values, minlength=n_functions * g)
        return self._support_of_table(table.reshape(n_functions, g))

    @property
    def _response(self) -> RandomizedResponse:
        return RandomizedResponse(epsilon=self.epsilon, n_options=self.n_values)

    def _draw(self, options: NDArray[np.int64], rng: Rng) -> Reports:
        functions = rng.integers(0, self.n_values**self.n_digits, size=len(options))
        hashed = self._hash(functions, options)
        return np.column_stack([functions, self._response._draw(hashed, rng)])

    def _hash(self, functions: NDArray[np.int64], options: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the hash of each option by the function at the same index.

        It is the inner product of the digits of function and option, modulo g (`n_values`).
        """
        g, result = self.n_values, np.zeros(np.broadcast(functions, options).shape, np.int64)
        for place in range(self.n_digits):
            result += (functions // g**place % g) * (options // g**place % g)
        return result % g

    def _support_of_table(self, table: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count for each option x the reports that support it, by Fourier transforms.

        `table[a, y]` counts the reports of function a with value y. Then support[x] is the sum over
        a of table[a, <a, x>], where <a, x> is the hash of x. The indicator of <a, x> = y is the
        mean over s of w^(s (<a, x> - y)), w = exp(2 pi i / g). Hence support[x] is the mean over s
        of F_s(s x) with F_s the transform over a of sum_y table[a, y] w^(-s y). The terms of s and
        g - s are conjugate.
        """
        g, digits = self.n_values, self.n_digits
        inner = np.fft.rfft(table, axis=1)
        options = np.arange(self.n_options)
        places = np.stack([options // g**place % g for place in range(digits)])
        total = np.full(self.n_options, float(table.sum()))
        for s in range(1, inner.shape[1]):
            # The first axis of the reshaped array is the highest digit, hence the reversal.
            outer = np.fft.fftn(inner[:, s].reshape((g,) * digits))
            at = tuple((-s * place) % g for place in reversed(places))
            is_own_conjugate = 2 * s == g
            total += outer[at].real * (1 if is_own_conjugate else 2)
        return np.rint(total / g).astype(np.int64)

    def _support_one_by_one(
        self, functions: NDArray[np.int64], values: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        return np.array(
            [
                np.count_nonzero(self._hash(functions, np.array([option])) == values)
                for option in range(self.n_options)
            ]
        )


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, math.isqrt(number) + 1))
