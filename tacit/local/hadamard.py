"""Hadamard response: each option owns half of a block of reports, given by a row of +1 and -1.

Acharya, Sun & Zhang 2019 (arXiv:1802.04705). Reports are numbered 0 to K - 1
and divided into blocks of b (a power of two). Option x belongs to one block and to one row of the
b x b Hadamard matrix other than the first. Its own reports are the s = b / 2 places where that
row is +1. A report is e^epsilon times as likely among the own reports as elsewhere.

With counts N of the reports in a block and H the Hadamard matrix, row i of H N has mean
n f_x s (u - w), where u and w are the two probabilities of a report. All other options cancel: two
rows of H are orthogonal, and each row sums to zero. All rows come from one fast transform.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit.local.coins import flip, round_down, whole_numbers
from tacit.local.frequencies import Floats, FrequencyOracle, Reports, bits_of
from tacit.mechanisms import Rng


@dataclass(frozen=True, kw_only=True)
class HadamardResponse(FrequencyOracle):
    """Hadamard response, a frequency oracle; a report is one whole number below `n_cells`.

    The number of blocks is the power of two with the least variance; the paper takes about
    e^epsilon / 2 of them.

    >>> oracle = HadamardResponse(epsilon=1.0, n_options=100)
    >>> oracle.n_blocks, oracle.block_size, oracle.report_bits
    (1, 128, 7)
    """

    name = "Hadamard response"

    @cached_property
    def n_blocks(self) -> int:
        """Number of blocks that the possible reports are divided into: a power of two."""
        k = self.n_options
        # At most as many blocks as options, each with at least two reports and one usable row.
        powers = [2**i for i in range(math.ceil(math.log2(k)) + 1)]
        return min(powers, key=lambda blocks: self._mean_variance_of(blocks))

    @cached_property
    def block_size(self) -> int:
        """Number of reports in a block: a power of two above the block's number of options."""
        return _block_size(self.n_options, self.n_blocks)

    @property
    def n_cells(self) -> int:
        """Number of different possible reports."""
        return self.n_blocks * self.block_size

    @property
    def own_probability(self) -> Fraction:
        """Probability that the report is one of those assigned to the true option."""
        return self._own_probability_of(self.n_blocks, self.block_size)

    @property
    def hit_probability(self) -> Fraction:
        """Probability that a report supports the true option: that it is assigned to it."""
        return self.own_probability

    @property
    def report_bits(self) -> int:
        """Number of bits needed to number all possible reports."""
        return bits_of(self.n_cells)

    def worst_case_ratio(self) -> Fraction:
        """Return P(a report assigned to the true option) / P(any other report)."""
        own, s = self.own_probability, self.block_size // 2
        return (own / s) / ((1 - own) / (self.n_cells - s))

    def support(self, reports: ArrayLike) -> NDArray[np.int64]:
        """Count for each option the reports that are assigned to it."""
        balance, in_block = self._balances(np.asarray(reports))
        return (balance + in_block) // 2

    def variance(self, frequencies: ArrayLike, n_reports: int) -> Floats:
        """Return the variance of the estimated frequency of each option.

        It depends on the frequency of the whole block. One report adds +-1 / g to the estimate if
        it is in the block of the option, else nothing; g is `_gap`. So its second moment is P(in
        the block) / g^2. Its mean is 1 for persons who hold the option and 0 for all others.
        """
        frequency = np.asarray(frequencies, dtype=np.float64)
        block, _ = self._places(np.arange(self.n_options))
        of_block = np.bincount(block, weights=frequency, minlength=self.n_blocks)
        gap = self._gap
        s = self.block_size // 2
        elsewhere = float((1 - self.own_probability) / (self.n_cells - s))
        in_block = 2 * s * elsewhere + of_block[block] * gap
        return (in_block / gap**2 - frequency) / n_reports

    def _debias(self, reports: Reports, n_reports: int) -> Floats:
        balance, _ = self._balances(reports)
        return balance / (n_reports * self._gap)

    @property
    def _gap(self) -> float:
        """P(report is assigned to the true option) - P(it is one of as many other reports).

        Dividing by this difference, s (u - w) in the module's letters, makes estimates unbiased.
        """
        own, s = self.own_probability, self.block_size // 2
        return float(own - s * (1 - own) / (self.n_cells - s))

    def _own_probability_of(self, n_blocks: int, size: int) -> Fraction:
        s = size // 2
        return round_down(self._most * s / (self._most * s + n_blocks * size - s))

    def _mean_variance_of(self, n_blocks: int) -> float:
        """Return the mean variance over options, all equally frequent, with `n_blocks` blocks."""
        size = _block_size(self.n_options, n_blocks)
        s = size // 2
        own = float(self._own_probability_of(n_blocks, size))
        elsewhere = (1 - own) / (n_blocks * size - s)
        gap = own - s * elsewhere
        share = min(1.0, (size - 1) / self.n_options)
        return (2 * s * elsewhere + share * gap) / gap**2

    def _places(self, options: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the block of each option, and its row (at least 1) of the Hadamard matrix."""
        rows = self.block_size - 1
        return options // rows, options % rows + 1

    def _draw(self, options: NDArray[np.int64], rng: Rng) -> Reports:
        size, n = self.block_size, len(options)
        block, row = self._places(options)
        is_own = flip(self.own_probability, rng, n)
        inside = rng.integers(0, size, size=n)
        # The reports that are not own: all of the other blocks, then half of this block.
        outside = rng.integers(0, self.n_cells - size // 2, size=n)
        is_elsewhere = ~is_own & (outside < self.n_cells - size)
        elsewhere = outside + np.where(outside >= block * size, size, 0)
        # Flipping the lowest bit of `row` maps the places of sign +1 one to one to those of -1.
        is_positive = _parity(inside & row) == 0
        here = np.where(is_positive == is_own, inside, inside ^ (row & -row))
        return np.where(is_elsewhere, elsewhere, block * size + here)

    def _balances(self, reports: Reports) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for each option two counts of the reports in its block.

        The first is the reports assigned to the option minus all others of the block, the second
        all reports of the block.
        """
        found = whole_numbers(reports, self.n_cells, "reports", row=0)
        counts = np.bincount(found, minlength=self.n_cells).reshape(self.n_blocks, self.block_size)
        transformed = _walsh_hadamard(counts)
        block, row = self._places(np.arange(self.n_options))
        return transformed[block, row], transformed[block, 0]


def _block_size(n_options: int, n_blocks: int) -> int:
    """Return the smallest power of two above the number of options in one of `n_blocks` blocks."""
    return 2 ** math.ceil(math.log2(-(-n_options // n_blocks) + 1))


def _walsh_hadamard(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Multiply each row of `counts` by the Hadamard matrix, in O(n log n) for n columns.

    Its entries are H[i, j] = (-1)^(number of 1 bits of i & j).
    """
    result, width = counts, 1
    while width < counts.shape[1]:
        pairs = result.reshape(len(counts), -1, 2, width)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        result = np.stack([first + second, first - second], axis=2).reshape(counts.shape)
        width *= 2
    return result


def _parity(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each number whether its count of 1 bits is even (0) or odd (1)."""
    for shift in (32, 16, 8, 4, 2, 1):
        numbers = numbers ^ (numbers >> shift)
    return numbers & 1
