"""Randomized response: send the true option, or with a fixed probability any option at random.

Warner 1965 for two options; Kairouz, Bonawitz & Ramage 2016 (arXiv:1602.07387) for k of them. It
has the least variance of all methods when e^epsilon is about the number of options or more.
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit import events
from tacit.local.coins import flip, round_up, whole_numbers
from tacit.local.frequencies import FrequencyOracle, Reports, bits_of
from tacit.mechanisms import Rng


@dataclass(frozen=True, kw_only=True)
class RandomizedResponse(FrequencyOracle):
    """Randomized response among k = `n_options` options, a frequency oracle.

    With probability r = k / (e^epsilon + k - 1) the report is uniform over all k options, else it
    is the true one. The true option is then e^epsilon times as likely as each other option.

    Examples
    --------
    >>> oracle = RandomizedResponse(epsilon=1.0, n_options=4)
    >>> reports = oracle.randomize([0, 1, 2, 3] * 5_000, rng=7)
    >>> found = oracle.estimate(reports)
    >>> bool(abs(found.values - 0.25).max() < 0.03)
    True
    """

    name = "randomized response"

    @property
    def random_probability(self) -> Fraction:
        """Probability with which a report is drawn uniformly from all options."""
        k = self.n_options
        return round_up(k / (self._most + k - 1))

    @property
    def hit_probability(self) -> Fraction:
        """Probability that the report is the true option."""
        return 1 - self.random_probability + self.miss_probability

    @property
    def miss_probability(self) -> Fraction:
        """Probability that the report is a given option other than the true one."""
        return self.random_probability / self.n_options

    @property
    def report_bits(self) -> int:
        """Number of bits needed to number the options."""
        return bits_of(self.n_options)

    @property
    def event(self) -> events.RandomizedResponse:
        """Event of one report, with the exact probability that the code draws with."""
        return events.RandomizedResponse(float(self.random_probability), self.n_options)

    def worst_case_ratio(self) -> Fraction:
        """Return P(the true option is reported) / P(a given other option is reported)."""
        return self.hit_probability / self.miss_probability

    def support(self, reports: ArrayLike) -> NDArray[np.int64]:
        """Count for each option the reports that name it."""
        found = whole_numbers(reports, self.n_options, "reports", row=0)
        return np.bincount(found, minlength=self.n_options)

    def _draw(self, options: NDArray[np.int64], rng: Rng) -> Reports:
        is_random = flip(self.random_probability, rng, len(options))
        anything = rng.integers(0, self.n_options, size=len(options))
        return np.where(is_random, anything, options)
