"""Histograms and quantiles of numbers in declared bounds, from reports that protect each number.

A number becomes one of equal bins between the declared bounds and is sent by a frequency oracle.
Quantiles use a tree of bins: each person is assigned at random to one level of the tree and
reports the node of that level that holds the number (Cormode, Kulkarni & Srivastava 2019,
arXiv:1812.10942, "hierarchical histograms" with sampled levels). The fraction of numbers below an
edge is then the sum of at most one node per level. Levels have different persons, so their
errors are independent and the variances add up.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit._check import in_open_unit, whole
from tacit.events import Event
from tacit.local.choice import choose_oracle
from tacit.local.coins import real_numbers
from tacit.local.frequencies import (
    Estimate,
    Floats,
    FrequencyOracle,
    LocalRandomizer,
    Reports,
    check_bounds,
)
from tacit.mechanisms import Seed, generator


@dataclass(frozen=True, kw_only=True)
class _Binned(LocalRandomizer):
    """Base of histograms and quantiles: divides the declared bounds into equal bins."""

    lower: float
    upper: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self.lower, self.upper)

    def _bin(self, values: ArrayLike, n_bins: int) -> NDArray[np.int64]:
        """Return the number of the bin of each value; values outside the bounds go to the end bins.

        A value that is not a number goes to the first bin.
        """
        inside = np.clip(
            np.nan_to_num(real_numbers(values), nan=self.lower), self.lower, self.upper
        )
        scaled = (inside - self.lower) / (self.upper - self.lower)
        return np.minimum(scaled * n_bins, n_bins - 1).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class LocalHistogram(_Binned):
    """Frequencies of equal bins between `lower` and `upper`, from one report per person.

    >>> histogram = LocalHistogram(epsilon=2.0, lower=0.0, upper=100.0, n_bins=4)
    >>> reports = histogram.randomize(np.linspace(0, 99.9, 40_000), rng=3)
    >>> bool(abs(histogram.estimate(reports).values - 0.25).max() < 0.05)
    True
    """

    n_bins: int

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(n_bins=self.n_bins, least=2)

    @cached_property
    def oracle(self) -> FrequencyOracle:
        """The frequency oracle with which a person reports the bin of their number."""
        return choose_oracle(self.n_bins, self.epsilon)

    @property
    def event(self) -> Event:
        """Event of one report, which is that of the frequency oracle."""
        return self.oracle.event

    @property
    def edges(self) -> Floats:
        """Edges of the bins, from `lower` to `upper`."""
        return np.linspace(self.lower, self.upper, self.n_bins + 1)

    def worst_case_ratio(self) -> Fraction:
        """Return the exact largest ratio of the probabilities of one report under two values."""
        return self.oracle.worst_case_ratio()

    def randomize(self, values: ArrayLike, rng: Seed = None) -> Reports:
        """Return one report for a number, or one per element of a vector; NaN counts as `lower`."""
        return self.oracle.randomize(self._bin(values, self.n_bins), rng)

    def estimate(self, reports: ArrayLike, *, confidence: float = 0.95) -> Estimate:
        """Return unbiased estimates of the frequencies of the bins, with intervals."""
        return self.oracle.estimate(reports, confidence=confidence)


class LevelReports(NamedTuple):
    """Reports for quantiles: the tree level of each person (public), and the reports by level."""

    levels: NDArray[np.int64]
    by_level: tuple[Reports, ...]


class QuantileEstimate(NamedTuple):
    """Estimated quantiles, each with a confidence interval whose ends are edges of bins."""

    values: Floats
    lower: Floats
    upper: Floats


@dataclass(frozen=True, kw_only=True)
class LocalQuantiles(_Binned):
    """Quantiles from a binary tree over 2^`depth` equal bins between `lower` and `upper`.

    >>> quantiles = LocalQuantiles(epsilon=3.0, lower=0.0, upper=1.0, depth=6)
    >>> reports = quantiles.randomize(np.linspace(0, 1, 60_000), rng=5)
    >>> found = quantiles.estimate(reports, [0.25, 0.5])
    >>> bool(abs(found.values - [0.25, 0.5]).max() < 0.06)
    True
    """

    depth: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if whole(depth=self.depth, least=1) > 20:
            raise ValueError(f"depth must be at most 20, got {self.depth}.")

    @cached_property
    def oracles(self) -> tuple[FrequencyOracle, ...]:
        """The frequency oracle of each tree level; level l, counted from 1, has 2^l nodes."""
        return tuple(choose_oracle(2**level, self.epsilon) for level in range(1, self.depth + 1))

    @property
    def edges(self) -> Floats:
        """Edges of the finest bins, from `lower` to `upper`."""
        return np.linspace(self.lower, self.upper, 2**self.depth + 1)

    def worst_case_ratio(self) -> Fraction:
        """Return the largest ratio over all levels; each person reports at one level only."""
        return max(oracle.worst_case_ratio() for oracle in self.oracles)

    def randomize(self, values: ArrayLike, rng: Seed = None) -> LevelReports:
        """Return the reports of all persons; `values` is a vector with the number of each."""
        leaves = np.atleast_1d(self._bin(values, 2**self.depth))
        source = generator(rng)
        levels = source.integers(0, self.depth, size=len(leaves))
        by_level = tuple(
            oracle.randomize(leaves[levels == level] >> (self.depth - 1 - level), source)
            for level, oracle in enumerate(self.oracles)
        )
        return LevelReports(levels, by_level)

    def cumulative(self, reports: LevelReports) -> Estimate:
        """Estimate the fraction of numbers below each edge but the outermost, with errors."""
        inner = np.arange(1, 2**self.depth)
        if min(map(len, reports.by_level)) == 0:
            raise ValueError(
                "each level needs at least one report: use more persons or less depth."
            )
        values, variances = np.zeros(len(inner)), np.zeros(len(inner))
        for level, (oracle, some) in enumerate(zip(self.oracles, reports.by_level, strict=True)):
            found = oracle.estimate(some)
            # An edge at bin e is the end of a left child at this level where this bit of e is 1.
            shift = self.depth - 1 - level
            is_used = (inner >> shift & 1).astype(bool)
            node = (inner[is_used] >> shift) - 1
            values[is_used] += found.values[node]
            share = np.clip(found.values[node], 0.0, 1.0)
            # Noise of the reports, and chance which persons were assigned to this level.
            chance = share * (1 - share) / found.n_reports
            variances[is_used] += found.standard_errors[node] ** 2 + chance
        return Estimate(values, np.sqrt(variances), len(reports.levels))

    def estimate(
        self, reports: LevelReports, probabilities: ArrayLike, *, confidence: float = 0.95
    ) -> QuantileEstimate:
        """Return the quantile at each of the given probabilities, with a confidence interval.

        The estimated fractions below the edges are first made monotone. An interval contains the
        edges for which the probability is within the confidence interval of the estimated fraction.
        """
        wanted = np.atleast_1d(np.asarray(probabilities, dtype=np.float64))
        if not ((wanted > 0) & (wanted < 1)).all():
            raise ValueError("probabilities must be in (0, 1).")
        below = self.cumulative(reports)
        band = Estimate(
            _monotone(below.values),
            below.standard_errors,
            below.n_reports,
            in_open_unit(confidence=confidence),
        )
        edges = self.edges
        high_band, low_band = _monotone(band.upper), _monotone(band.lower)
        return QuantileEstimate(
            np.interp(wanted, np.r_[0.0, band.values, 1.0], edges),
            edges[np.searchsorted(high_band, wanted)],
            edges[np.searchsorted(low_band, wanted, side="right") + 1],
        )


def _monotone(values: Floats) -> Floats:
    """Return a rising curve near `values`, limited to [0, 1].

    It is the mean of the largest rising curve below `values` and the smallest rising curve above.
    """
    above = np.maximum.accumulate(values)
    below = np.minimum.accumulate(values[::-1])[::-1]
    return np.clip((above + below) / 2, 0.0, 1.0)
