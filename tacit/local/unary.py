"""Optimized unary encoding: one bit per option, each sent truthfully or flipped.

The true option is a vector with a single 1. Each of its bits is reported as 1 with probability p
if it is 1 and q if it is 0. Two options differ in two bits, so the worst ratio is
p (1 - q) / ((1 - p) q), which p = 1/2 and q = 1 / (e^epsilon + 1) make e^epsilon, with the least
variance for rare options (Wang et al. 2017, arXiv:1705.04421).
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit.local import packed_bits
from tacit.local.coins import flip, round_down, round_up
from tacit.local.frequencies import FrequencyOracle, Reports
from tacit.mechanisms import Rng

_CELLS = 2**24
"""Bits drawn at a time, so that memory stays bounded."""


@dataclass(frozen=True, kw_only=True)
class OptimizedUnary(FrequencyOracle):
    """Sends a 1 as 1 with probability 1/2, and a 0 with 1 / (e^epsilon + 1), as packed bits.

    >>> float(OptimizedUnary(epsilon=1.0, n_options=5).hit_probability)
    0.5
    """

    name = "optimized unary encoding"

    @property
    def hit_probability(self) -> Fraction:
        """Probability that the bit of the true option is sent as 1."""
        return round_down(Fraction(1, 2))

    @property
    def miss_probability(self) -> Fraction:
        """Probability that the bit of another option is sent as 1."""
        return round_up(1 / (1 + self._most))

    @property
    def report_bits(self) -> int:
        """Number of bits of a report: one per option."""
        return self.n_options

    def worst_case_ratio(self) -> Fraction:
        """Return the exact largest ratio of the probabilities of one report under two options.

        It is reached by reports with a 1 at the first option and a 0 at the second.
        """
        p, q = self.hit_probability, self.miss_probability
        return p * (1 - q) / ((1 - p) * q)

    def support(self, reports: ArrayLike) -> NDArray[np.int64]:
        """Count for each option the reports in which its bit is set."""
        return packed_bits.column_counts(
            packed_bits.checked(reports, self.n_options), self.n_options
        )

    def _draw(self, options: NDArray[np.int64], rng: Rng) -> Reports:
        step = max(1, _CELLS // self.n_options)
        parts = [
            self._draw_some(options[start : start + step], rng)
            for start in range(0, max(len(options), 1), step)
        ]
        return np.concatenate(parts)

    def _draw_some(self, options: NDArray[np.int64], rng: Rng) -> NDArray[np.uint8]:
        bits = flip(self.miss_probability, rng, (len(options), self.n_options))
        bits[np.arange(len(options)), options] = flip(self.hit_probability, rng, len(options))
        return packed_bits.pack(bits)
