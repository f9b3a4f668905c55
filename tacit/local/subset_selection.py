"""Subset selection: send a random set of options that contains the true one more often than not.

Ye & Barg 2018 (arXiv:1702.00610), Wang et al. 2016 (arXiv:1607.08025). The set has d of the k
options, d near k / (e^epsilon + 1). A set with the true option is e^epsilon times as likely as one
without. With the best d no method has a smaller total squared error (Pan 2026, arXiv:2603.11523).
For d = 1 the method is randomized response.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit.local import packed_bits
from tacit.local.coins import flip, round_down, subset
from tacit.local.frequencies import FrequencyOracle, Reports, bits_of
from tacit.mechanisms import Rng

_CELLS = 2**24
"""Cells of the table of chosen options drawn at a time, so that memory stays bounded."""


@dataclass(frozen=True, kw_only=True)
class SubsetSelection(FrequencyOracle):
    """Subset selection, a frequency oracle; a report is a set of options, as packed bits.

    >>> SubsetSelection(epsilon=1.0, n_options=100).subset_size
    27
    """

    name = "subset selection"

    @cached_property
    def subset_size(self) -> int:
        """Number of options in a report, near n_options / (e^epsilon + 1), for least variance."""
        k = self.n_options
        best = k / (1 + math.exp(self.epsilon))
        near = {min(max(d, 1), k - 1) for d in (math.floor(best), math.ceil(best))}
        return min(near, key=self._mean_variance_of)

    @property
    def hit_probability(self) -> Fraction:
        """Probability that the true option is in the reported set of `subset_size` options."""
        return self._hit_probability_of(self.subset_size)

    @property
    def miss_probability(self) -> Fraction:
        """Probability that a given option other than the true one is in the reported set."""
        return (self.subset_size - self.hit_probability) / (self.n_options - 1)

    @property
    def report_bits(self) -> int:
        """Number of bits needed to number all sets of `subset_size` options."""
        k, d = self.n_options, self.subset_size
        log2 = (math.lgamma(k + 1) - math.lgamma(d + 1) - math.lgamma(k - d + 1)) / math.log(2)
        return bits_of(math.comb(k, d)) if k <= 64 else math.ceil(log2)

    def worst_case_ratio(self) -> Fraction:
        """Return P(a given set with the true option) / P(a given set without it)."""
        hit, d = self.hit_probability, self.subset_size
        return hit * (self.n_options - d) / ((1 - hit) * d)

    def support(self, reports: ArrayLike) -> NDArray[np.int64]:
        """Count for each option the reported sets that contain it."""
        return packed_bits.column_counts(
            packed_bits.checked(reports, self.n_options), self.n_options
        )

    def _hit_probability_of(self, d: int) -> Fraction:
        return round_down(self._most * d / (self._most * d + self.n_options - d))

    def _mean_variance_of(self, d: int) -> float:
        k = self.n_options
        p = float(self._hit_probability_of(d))
        q = (d - p) / (k - 1)
        return (p * (1 - p) + (k - 1) * q * (1 - q)) / (p - q) ** 2

    def _draw(self, options: NDArray[np.int64], rng: Rng) -> Reports:
        step = max(1, _CELLS // self.n_options)
        parts = [
            self._draw_some(options[start : start + step], rng)
            for start in range(0, max(len(options), 1), step)
        ]
        return np.concatenate(parts)

    def _draw_some(self, options: NDArray[np.int64], rng: Rng) -> NDArray[np.uint8]:
        n, k = len(options), self.n_options
        has_own = flip(self.hit_probability, rng, n)
        others = subset(rng, n, k - 1, self.subset_size - has_own.astype(np.int64))
        # The other options are numbered 0 to k - 2; those from the own one on move up by one.
        columns = np.arange(k)
        source = np.clip(columns - (columns > options[:, None]), 0, k - 2)
        bits = np.take_along_axis(others, source, axis=1)
        bits[np.arange(n), options] = has_own
        return packed_bits.pack(bits)
