"""Means of numbers in declared bounds, from reports that protect each number.

Numbers are clipped to [lower, upper] and scaled to t in [-1, 1]. Each report is an unbiased, very
noisy version of the number, so their average estimates the mean.

- `DuchiMean`: two possible reports (Duchi, Jordan & Wainwright 2018, arXiv:1604.02390);
- `PiecewiseMean`: many possible reports, those near the value more likely (Wang et al. 2019,
  arXiv:1907.00782, Algorithm 2);
- `HybridMean`: one or the other by a coin, the least worst-case variance of the three (same
  paper);
- `SampledVector`: means of vectors (same paper).

Before any noise is added, t is rounded at random to one of finitely many levels without bias. The
noise is then drawn from coins and whole numbers, and a report is one of finitely many floats:
no low-order bit of a report depends on t.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from tacit._check import in_open_unit, whole
from tacit.local.coins import exp_below, flip, real_numbers, round_down, subset
from tacit.local.frequencies import Estimate, Floats, LocalRandomizer, check_bounds
from tacit.mechanisms import Rng, Seed, generator


@dataclass(frozen=True, kw_only=True)
class _Bounded(LocalRandomizer):
    """Base of the randomizers of numbers in declared bounds."""

    lower: float = -1.0
    upper: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self.lower, self.upper)

    def draw(self, t: Floats, rng: Rng) -> Floats:
        """Return one random report per element (of a vector: per row) of `t` in [-1, 1].

        Its mean is that element (or row).
        """
        raise NotImplementedError

    def noise_variance(self, t: ArrayLike) -> Floats:
        """Return the variance of each number in a report of `t`, scaled to [-1, 1]."""
        raise NotImplementedError

    def estimate(self, reports: ArrayLike, *, confidence: float = 0.95) -> Estimate:
        """Return the estimated mean of the values that were reported, with an interval for each."""
        return average(real_numbers(reports, "reports"), confidence)

    def _reports(self, values: Floats, rng: Seed) -> Floats:
        """Return reports in the units of `values`, which are clipped to the bounds."""
        t = to_unit(values, self.lower, self.upper)
        return (self.lower + self.upper) / 2 + self._half * self.draw(t, generator(rng))

    @property
    def _half(self) -> float:
        return (self.upper - self.lower) / 2


class _BoundedMean(_Bounded):
    """Base of the randomizers of one number in declared bounds."""

    def randomize(self, values: ArrayLike, rng: Seed = None) -> Floats:
        """Return one report of a number, or one per element of a vector, in the units of `values`.

        Values outside the bounds are clipped to them. NaN counts as the middle of the bounds.
        """
        found = real_numbers(values)
        reports = self._reports(np.atleast_1d(found), rng)
        return reports if found.ndim else reports[0]

    def variance(self, values: ArrayLike, n_reports: int) -> float:
        """Return the variance of the estimated mean, for persons who hold `values`."""
        t = to_unit(np.asarray(values, dtype=np.float64), self.lower, self.upper)
        return float(np.mean(self.noise_variance(t))) * self._half**2 / n_reports


@dataclass(frozen=True, kw_only=True)
class DuchiMean(_BoundedMean):
    """Mean from reports of +B or -B, where B = (e^epsilon + 1) / (e^epsilon - 1).

    The number t in [-1, 1] is rounded to +1 with probability (1 + t) / 2, else to -1, and the sign
    is sent by randomized response. This is the law of Duchi et al. 2018: P(+B) = 1/2 + t / (2 B).

    >>> DuchiMean(epsilon=1.0).noise_variance(0.0).round(4).item()
    4.6827
    """

    @property
    def true_sign_probability(self) -> Fraction:
        """Probability e^epsilon / (e^epsilon + 1) that the rounded sign is sent unchanged."""
        return round_down(self._most / (self._most + 1))

    def worst_case_ratio(self) -> Fraction:
        """Return the largest ratio of a report's probabilities under two numbers, 1 and -1.

        It is P(report is +B | 1) / P(report is +B | -1), and at most e^epsilon.
        """
        return self.true_sign_probability / (1 - self.true_sign_probability)

    def draw(self, t: Floats, rng: Rng) -> Floats:
        """Return the report +B or -B (see the class) for each element of `t`."""
        signs = np.where(rng.random(t.shape) < (1 + t) / 2, 1.0, -1.0)
        is_true = flip(self.true_sign_probability, rng, t.shape)
        return np.where(is_true, signs, -signs) * self._bound

    def noise_variance(self, t: ArrayLike) -> Floats:
        """Return B^2 - t^2, because every report is +B or -B and has mean t."""
        return self._bound**2 - np.asarray(t, dtype=np.float64) ** 2

    @property
    def _bound(self) -> float:
        return 1 / float(2 * self.true_sign_probability - 1)


@dataclass(frozen=True, kw_only=True)
class PiecewiseMean(_BoundedMean):
    """Mean from reports in a range [-C, C] that are likely to be close to the true number t.

    Wang et al. 2019, Algorithm 2, on a grid: a report is one of the multiples j = -N .. N of a
    fixed step. The number t is rounded at random to a center c. With probability P, j is uniform on
    the 2 w + 1 places around c (the window), else uniform on all other places. All places have one
    of two probabilities, whose ratio is at most e^epsilon. The finer the grid, the closer the law
    is to the published one; w / N follows the width of the published window.

    Parameters
    ----------
    n_levels
        N: number of positive multiples that can be reported.
    """

    n_levels: int = 2**15

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(n_levels=self.n_levels, least=1)

    @cached_property
    def half_window(self) -> int:
        """Number w of grid places on each side of the center that belong to the window.

        The window takes the share 1 / (e^(epsilon/2) + 1) of all places.
        """
        places = (2 * self.n_levels + 1) / (math.exp(self.epsilon / 2) + 1)
        return min(max(round((places - 1) / 2), 0), self.n_levels - 1)

    @property
    def window_probability(self) -> Fraction:
        """Probability that the report is in the window around the center (P in the class)."""
        inside, outside = self._sizes
        return round_down(self._most * inside / (self._most * inside + outside))

    def worst_case_ratio(self) -> Fraction:
        """Return P(a given place in the window) / P(a given place outside it)."""
        inside, outside = self._sizes
        p = self.window_probability
        return (p / inside) / ((1 - p) / outside)

    def draw(self, t: Floats, rng: Rng) -> Floats:
        """Return a random report, a multiple of the grid's step, for each element of `t`."""
        w = self.half_window
        inside, outside = self._sizes
        reach = self.n_levels - w
        exact = t * reach
        below = np.floor(exact)
        center = (below + (rng.random(t.shape) < exact - below)).astype(np.int64)
        is_near = flip(self.window_probability, rng, t.shape)
        near = center - w + rng.integers(0, inside, size=t.shape)
        # Places outside are numbered from -N up; those beyond the window move over it.
        far = rng.integers(0, outside, size=t.shape) - self.n_levels
        far = np.where(far >= center - w, far + inside, far)
        return np.where(is_near, near, far) * self._step

    def noise_variance(self, t: ArrayLike) -> Floats:
        """Return the variance of a report of `t`, by Wang et al. 2019, Lemma 1.

        It is t^2 / (e^(epsilon/2) - 1) + (e^(epsilon/2) + 3) / (3 (e^(epsilon/2) - 1)^2).
        """
        half = math.expm1(self.epsilon / 2)
        t = np.asarray(t, dtype=np.float64)
        return t**2 / half + (half + 4) / (3 * half**2)

    @property
    def _sizes(self) -> tuple[int, int]:
        inside = 2 * self.half_window + 1
        return inside, 2 * self.n_levels + 1 - inside

    @cached_property
    def _step(self) -> float:
        """Distance between neighboring reports of the grid, which makes reports unbiased.

        With `inside` places in the window and `outside` others, the others add up to -inside * c,
        so a report of center c has mean c (P - (1 - P) inside / outside).
        """
        inside, outside = self._sizes
        p = self.window_probability
        shrink = p - (1 - p) * inside / outside
        return 1 / ((self.n_levels - self.half_window) * float(shrink))


@dataclass(frozen=True, kw_only=True)
class HybridMean(_BoundedMean):
    """Mean from the piecewise report with probability 1 - e^(-epsilon/2), else that of `DuchiMean`.

    Wang et al. 2019 ("hybrid mechanism"): the mixture has the least worst-case variance. For
    epsilon at most 0.61 only the report of Duchi et al. is used.

    >>> worst = [m(epsilon=1.0).noise_variance([0, 1]).max() for m in (DuchiMean, PiecewiseMean)]
    >>> bool(HybridMean(epsilon=1.0).noise_variance([0, 1]).max() < min(worst))
    True
    """

    @property
    def piecewise_probability(self) -> Fraction:
        """Probability that the report is drawn by `PiecewiseMean`; public."""
        if self.epsilon <= _HYBRID_FROM:
            return Fraction(0)
        return round_down(1 - 1 / exp_below(self.epsilon / 2))

    def worst_case_ratio(self) -> Fraction:
        """Return the larger ratio of the two mixed randomizers, which share no possible report."""
        duchi = self._parts[1].worst_case_ratio()
        return max(self._parts[0].worst_case_ratio(), duchi) if self._is_mixed else duchi

    def draw(self, t: Floats, rng: Rng) -> Floats:
        """Return for each element of `t` a report by one of the two mixed randomizers."""
        piecewise, duchi = self._parts
        if not self._is_mixed:
            return duchi.draw(t, rng)
        is_piecewise = flip(self.piecewise_probability, rng, t.shape)
        return np.where(is_piecewise, piecewise.draw(t, rng), duchi.draw(t, rng))

    def noise_variance(self, t: ArrayLike) -> Floats:
        """Return the mean of both randomizers' variances, weighted by how often each is used."""
        share = float(self.piecewise_probability)
        piecewise, duchi = self._parts
        return share * piecewise.noise_variance(t) + (1 - share) * duchi.noise_variance(t)

    @property
    def _is_mixed(self) -> bool:
        return self.piecewise_probability > 0

    @cached_property
    def _parts(self) -> tuple[PiecewiseMean, DuchiMean]:
        return PiecewiseMean(epsilon=self.epsilon), DuchiMean(epsilon=self.epsilon)


_ROOT = 405 * math.sqrt(241)
_HYBRID_FROM = math.log(
    (-5 + 2 * math.cbrt(6353 - _ROOT) + 2 * math.cbrt(6353 + _ROOT)) / 27
)  # Wang et al. 2019: about 0.61


@dataclass(frozen=True, kw_only=True)
class SampledVector(_Bounded):
    """Mean vector from reports of a few coordinates, chosen at random, each by `HybridMean`.

    All coordinates are in [lower, upper].

    Wang et al. 2019, Algorithm 4: k = max(1, min(d, floor(epsilon / 2.5))) of the d coordinates
    are sent at epsilon / k each, multiplied by d / k; the others are reported as 0. The chosen
    coordinates do not depend on the data, so the report costs epsilon in all.

    >>> SampledVector(epsilon=6.0, n_dimensions=10).n_sampled
    2
    """

    n_dimensions: int

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(n_dimensions=self.n_dimensions, least=1)

    @property
    def n_sampled(self) -> int:
        """Number of coordinates that each person sends (k in the class description)."""
        return max(1, min(self.n_dimensions, math.floor(self.epsilon / 2.5)))

    def worst_case_ratio(self) -> Fraction:
        """Return the product of the largest ratios of the coordinates that are sent."""
        return self._part.worst_case_ratio() ** self.n_sampled

    def randomize(self, values: ArrayLike, rng: Seed = None) -> Floats:
        """Return one report of a vector, or one per row, with coordinates clipped to the bounds."""
        found = real_numbers(values)
        if found.ndim not in (1, 2) or found.shape[-1] != self.n_dimensions:
            raise ValueError(f"values must have {self.n_dimensions} columns, got {found.shape}.")
        reports = self._reports(np.atleast_2d(found), rng)
        return reports if found.ndim == 2 else reports[0]

    def draw(self, t: Floats, rng: Rng) -> Floats:
        """Return a report for each row of `t`; coordinates that are not chosen are 0."""
        k, d = self.n_sampled, self.n_dimensions
        chosen = subset(rng, len(t), d, np.full(len(t), k, dtype=np.int64))
        reports = np.zeros(t.shape)
        reports[chosen] = self._part.draw(t[chosen], rng) * (d / k)
        return reports

    def noise_variance(self, t: ArrayLike) -> Floats:
        """Return the variance of each coordinate, from its noise and from the random choice."""
        t = np.asarray(t, dtype=np.float64)
        times = self.n_dimensions / self.n_sampled
        return times * (self._part.noise_variance(t) + t**2) - t**2

    @cached_property
    def _part(self) -> HybridMean:
        # Rounded towards 0, so that k parts never exceed epsilon.
        each = self.epsilon / self.n_sampled
        return HybridMean(epsilon=each if self.n_sampled == 1 else math.nextafter(each, 0))


def to_unit(values: Floats, lower: float, upper: float) -> Floats:
    """Clip `values` to [lower, upper] and scale them to [-1, 1]; NaN becomes 0."""
    scaled = (np.clip(values, lower, upper) - lower) / (upper - lower) * 2 - 1
    return np.nan_to_num(scaled, nan=0.0)


def average(reports: Floats, confidence: float) -> Estimate:
    """Return the mean of the rows of `reports`, with standard errors from the rows' deviations."""
    if reports.ndim == 0 or len(reports) < 2:
        raise ValueError("reports must hold at least two reports.")
    errors = np.asarray(reports.std(axis=0, ddof=1)) / math.sqrt(len(reports))
    values = np.asarray(reports.mean(axis=0))
    return Estimate(values, errors, len(reports), in_open_unit(confidence=confidence))
