"""Estimating how often each option was chosen, from reports that protect each answer.

Every frequency oracle follows one scheme ("pure LDP protocols", Wang et al. 2017,
arXiv:1705.04421). A report *supports* some of the options: the true option with probability p
(`hit_probability`), every other option with probability q < p (`miss_probability`). From n
reports of which `support` contain an option, its frequency is estimated without bias by

    (support / n - q) / (p - q),

with variance [f p (1 - p) + (1 - f) q (1 - q)] / (n (p - q)^2) at true frequency f (Theorems 1
and 2 there). The tests check both by enumeration.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from tacit._check import in_open_unit, positive, whole
from tacit.events import Event, PureDP, Shuffled
from tacit.local.coins import exp_below, whole_numbers
from tacit.mechanisms import Rng, Seed, generator

Floats = NDArray[np.float64]
Reports = NDArray[Any]  # Any: whole numbers, bytes or floats, as the randomizer needs


@dataclass(frozen=True)
class Estimate:
    """Unbiased estimates, each with its standard error and a confidence interval.

    Intervals are normal approximations and hold for each value on its own, not for all at once.
    """

    values: Floats
    standard_errors: Floats
    n_reports: int
    confidence: float = 0.95

    @property
    def lower(self) -> Floats:
        """Lower ends of the confidence intervals."""
        return self.values - self._half_widths

    @property
    def upper(self) -> Floats:
        """Upper ends of the confidence intervals."""
        return self.values + self._half_widths

    @property
    def _half_widths(self) -> Floats:
        return -float(ndtri((1 - self.confidence) / 2)) * self.standard_errors

    def as_probabilities(self) -> Floats:
        """Return the nearest probabilities (at least 0, sum 1), which are slightly biased.

        Euclidean projection on the simplex. It is post-processing, so it costs no privacy.

        >>> Estimate(np.array([0.7, 0.5, -0.2]), np.zeros(3), 10).as_probabilities().tolist()
        [0.6, 0.4, 0.0]
        """
        return nearest_probabilities(self.values)


@dataclass(frozen=True, kw_only=True)
class LocalRandomizer:
    """Base class of all randomizers: noise that a person adds to one value before sending it.

    `randomize` runs on the device of the person. It satisfies `epsilon`-local differential privacy:
    for any two values, no report is more than e^epsilon times as likely under one value as under
    the other. `worst_case_ratio` returns the exact largest ratio, computed from the probabilities
    that the code draws with.
    """

    epsilon: float

    def __post_init__(self) -> None:
        epsilon = positive(epsilon=self.epsilon)
        if epsilon > 30:
            raise ValueError(f"epsilon must be at most 30, got {epsilon}. Send the value itself.")
        if epsilon < 1e-9:  # probabilities are multiples of 2^-53, about 1e-16
            raise ValueError(f"epsilon must be at least 1e-9, got {epsilon}. Nothing is learned.")
        object.__setattr__(self, "epsilon", epsilon)

    @property
    def event(self) -> Event:
        """Event of one report, for accountants; it protects the value of its sender."""
        return PureDP(self.epsilon, replace_factor=1.0)

    def shuffled(self, n_reports: int) -> Event:
        """Return the event of reports of `n_reports` persons that arrive in random order.

        >>> from tacit import local
        >>> local.RandomizedResponse(epsilon=1.0, n_options=4).shuffled(10_000).n_reports
        10000
        """
        return Shuffled(self.event, n_reports)

    def worst_case_ratio(self) -> Fraction:
        """Return the exact largest ratio of the probabilities of one report under two values."""
        raise NotImplementedError

    @cached_property
    def _most(self) -> Fraction:
        """Fraction just below e^epsilon, the largest ratio allowed between two probabilities."""
        return exp_below(self.epsilon)


@dataclass(frozen=True, kw_only=True)
class FrequencyOracle(LocalRandomizer):
    """Base of the randomizers that report which of `n_options` options a person chose.

    Parameters
    ----------
    epsilon
        Local privacy of one report.
    n_options
        Number of possible answers, numbered from 0; declared, never taken from the data.
    """

    n_options: int
    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "n_options", whole(n_options=self.n_options, least=2))

    @property
    def hit_probability(self) -> Fraction:
        """Probability that a report supports (counts for) the option that the person holds."""
        raise NotImplementedError

    @property
    def miss_probability(self) -> Fraction:
        """Probability that a report supports (counts for) a given option not held."""
        raise NotImplementedError

    @property
    def report_bits(self) -> int:
        """Number of bits needed to send one report."""
        raise NotImplementedError

    def _draw(self, options: NDArray[np.int64], rng: Rng) -> Reports:
        """Draw one random report for each person; `options` holds their true options."""
        raise NotImplementedError

    def support(self, reports: ArrayLike) -> NDArray[np.int64]:
        """Count for each option the reports that support it, in the sense of the module."""
        raise NotImplementedError

    def randomize(self, values: ArrayLike, rng: Seed = None) -> Reports:
        """Return the report of one person, or one report per element of a vector of values.

        Parameters
        ----------
        values
            A whole number below `n_options`, or a vector of them. Private.
        rng
            None draws fresh entropy; a seed makes the noise reproducible and so removable.
        """
        options = whole_numbers(values, self.n_options)
        if options.ndim > 1:
            raise ValueError(f"values must be a number or a vector, got {options.ndim} dimensions.")
        reports = self._draw(np.atleast_1d(options), generator(rng))
        return reports if options.ndim else reports[0]

    def estimate(self, reports: ArrayLike, *, confidence: float = 0.95) -> Estimate:
        """Return unbiased estimates of the frequencies of all options, with intervals.

        Estimates can be negative or exceed 1; `Estimate.as_probabilities` repairs that at the
        price of a small bias.
        """
        found = np.asarray(reports)
        n_reports = len(found) if found.ndim else 0
        if n_reports == 0:
            raise ValueError("reports must hold at least one report.")
        values = self._debias(found, n_reports)
        # Clipping each value instead would add up the noise of all rare options.
        likely = nearest_probabilities(values)
        errors = np.sqrt(self.variance(likely, n_reports))
        return Estimate(values, errors, n_reports, in_open_unit(confidence=confidence))

    def variance(self, frequencies: ArrayLike, n_reports: int) -> Floats:
        """Return the variance of each option's estimated frequency from `n_reports` reports.

        `frequencies` lists the true frequencies of all options. Wang et al. 2017, Theorem 2.
        """
        p, q = float(self.hit_probability), float(self.miss_probability)
        frequency = np.asarray(frequencies, dtype=np.float64)
        noise = frequency * p * (1 - p) + (1 - frequency) * q * (1 - q)
        return noise / (n_reports * self._gap**2)

    @cached_property
    def mean_variance(self) -> float:
        """Variance of an estimate from one report, averaged over options; compares oracles.

        It is computed at equal frequencies. The average hardly depends on the frequencies, because
        `variance` is linear in them and they sum to 1.
        """
        return float(np.mean(self.variance(np.full(self.n_options, 1 / self.n_options), 1)))

    @property
    def _gap(self) -> float:
        return float(self.hit_probability - self.miss_probability)

    def _debias(self, reports: Reports, n_reports: int) -> Floats:
        support = self.support(reports)
        return (support / n_reports - float(self.miss_probability)) / self._gap


def check_bounds(lower: float, upper: float) -> None:
    """Raise unless `lower` is below `upper` and their distance is finite."""
    if not (lower < upper and math.isfinite(upper - lower)):
        raise ValueError(f"lower must be below upper, both finite, got {lower} and {upper}.")


def nearest_probabilities(values: Floats) -> Floats:
    """Return the vector of probabilities (at least 0, sum 1) that is nearest to `values`."""
    ordered = np.sort(values)[::-1]
    excess = (np.cumsum(ordered) - 1) / np.arange(1, len(ordered) + 1)
    last = int(np.nonzero(ordered > excess)[0][-1])
    return np.maximum(values - excess[last], 0.0)


def bits_of(count: int) -> int:
    """Return the number of bits needed to number `count` different reports.

    >>> bits_of(1000)
    10
    """
    return max(1, math.ceil(math.log2(count)))
