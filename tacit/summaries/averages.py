"""Means, variances and covariances of bounded columns, with confidence intervals.

All come from Bernstein sums (see `tacit.summaries.bernstein`), released as one block of cells. The
number of values is not assumed to be public: it is estimated from the same cells.

*Mean.* The sample mean m satisfies sum_i (u_i - m) = 0. The noisy version of this sum has known
noise, so the interval holds every m for which it is within its half width (Fieller 1954). For the
mean of the records this is valid for every table, however small. For the population mean, the
variance of the records is estimated from the same release and its sampling error is taken as
normal.

*Variance, covariance.* The noise in a ratio of noisy sums is linearized at the estimates (delta
method). Where the noise is as large as the count itself, the interval is the whole possible range.
"""

from collections.abc import Iterator, Mapping
from typing import Unpack

import numpy as np
from numpy.typing import ArrayLike

from tacit._arrays import Flags, Floats
from tacit.summaries.bernstein import (
    MomentSums,
    bernstein_coefficients,
    cell_weights,
    centered_power,
    moment_block,
    moment_sums,
)
from tacit.summaries.column_values import CLIP, DROP, Range, as_range, in_unit, same_length
from tacit.summaries.error_law import Interval, Spread, accepted_range, half_width
from tacit.summaries.payment import NoisyBlock, ReleaseTerms, Terms
from tacit.summaries.statistic import POPULATION, Statistic, StatisticTable, check_about

DEGREE = 4
"""Degree whose cells give the count, mean and variance, each with its sampling error."""


def mean(
    values: ArrayLike,
    *,
    bounds: tuple[float, float],
    about: str = POPULATION,
    missing: str | float = DROP,
    outside: str = CLIP,
    **terms: Unpack[ReleaseTerms],
) -> Statistic:
    """Return a private mean of a column within declared bounds, with an interval.

    Guarantee: the call is (epsilon, delta)-DP; see `tacit.summaries.payment` for the sensitivity.
    One record contributes its Bernstein polynomials of degree 2 to one block; of degree 1 if the
    interval is about the records, which needs no variance.

    Parameters
    ----------
    bounds
        Public bounds (lower, upper). Values outside are clipped, or dropped with `outside="drop"`.
    missing
        "drop", or the number that stands for a missing value.
    about
        "population" or "records": what the interval is about; see `Statistic`.
    terms
        Price and payment: see `ReleaseTerms`.

    >>> mean([40.0, 50.0, 45.0, 61.0] * 250, bounds=(0, 100), epsilon=1.0, rng=0).about
    'population'
    """
    checked, range_ = Terms.check(terms), as_range(bounds)
    column = in_unit(values, range_, missing=missing, outside=outside)
    degree = 2 if check_about(about) == POPULATION else 1
    cells = moment_block(checked, degree, len(column))
    event, block = checked.release(cells, moment_sums(degree, column), "mean")
    found = mean_interval(MomentSums.of(block, degree), about, checked.confidence)
    return Statistic("mean", *found.through(range_.unscale), checked.confidence, about, event=event)


def variance(
    values: ArrayLike,
    *,
    bounds: tuple[float, float],
    about: str = POPULATION,
    missing: str | float = DROP,
    outside: str = CLIP,
    **terms: Unpack[ReleaseTerms],
) -> Statistic:
    """Return a private variance of a column within declared bounds; arguments as for `mean`.

    Guarantee: (epsilon, delta)-DP. One record contributes its Bernstein polynomials of degree 4 to
    one block: the fourth moment gives the sampling error.
    """
    checked, range_ = Terms.check(terms), as_range(bounds)
    column = in_unit(values, range_, missing=missing, outside=outside)
    check_about(about)
    cells = moment_block(checked, DEGREE, len(column))
    event, block = checked.release(cells, moment_sums(DEGREE, column), "variance")
    found = variance_interval(MomentSums.of(block, DEGREE), about, checked.confidence)
    found = found.through(lambda x: x * range_.width**2)
    return Statistic("variance", *found, checked.confidence, about, event=event)


def covariance(
    columns: Mapping[str, ArrayLike],
    *,
    bounds: Mapping[str, tuple[float, float]],
    about: str = POPULATION,
    outside: str = CLIP,
    variances: bool = True,
    **terms: Unpack[ReleaseTerms],
) -> StatisticTable:
    """Return the private covariance of every pair of two or more columns, and each variance.

    Guarantee: (epsilon, delta)-DP. For each pair, one record contributes the products of its
    Bernstein polynomials of degree 4 to one block of 25 cells (and a cell for records in which one
    of the two is missing). Rows are named "cov(x, y)" and "var(x)". The variance of a column is the
    average over its pairs, so records with a missing partner are left out there. Without
    `variances`, degree 2 is enough, and the covariances have less noise.
    """
    checked = Terms.check(terms)
    check_about(about)
    names = list(columns)
    if len(names) < 2:
        raise ValueError("columns must hold at least two columns. Use variance for one.")
    if absent := [name for name in names if name not in bounds]:
        raise ValueError(f"bounds must be declared for {absent[0]!r}.")
    ranges = {name: as_range(bounds[name], f"bounds of {name!r}") for name in names}
    units = {name: in_unit(columns[name], ranges[name], outside=outside) for name in names}
    n_records = same_length(**units)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    degree = DEGREE if variances else 2
    block = moment_block(checked, degree, n_records, n_columns=2)
    division = checked.divide([block] * len(pairs))
    event = division.pay("covariance")
    released = {
        pair: noise.release(moment_sums(degree, units[pair[0]], units[pair[1]]), checked.rng)
        for pair, noise in zip(pairs, division.noises, strict=True)
    }
    rows = [
        Statistic(name, *ends, checked.confidence, about)
        for name, ends in _covariance_rows(released, ranges, degree, about, checked.confidence)
    ]
    return StatisticTable(
        tuple(rows), event, checked.epsilon, checked.delta, checked.relation, "covariance"
    )


def mean_interval(sums: MomentSums, about: str, confidence: float) -> Interval:
    """Return the mean, in [0, 1], of a column whose sums were released.

    With degree 1 and about the population, the values are taken as 0 and 1, so that their variance
    follows from the mean (for a share this is the score interval of Wilson 1927, plus noise).
    """
    count, total = float(sums.total([1.0])), float(sums.total([0.0, 1.0]))
    center = float(np.clip(total / count, 0.0, 1.0)) if count > 0 else 0.5
    squares = 0.0
    if sums.degree > 1 and count > 0:
        squares = min(sums.cautious_total(centered_power(center, 2)), count / 4)

    def accepts(m: Floats) -> Flags:
        spread = sums.spread(np.stack([-m, np.ones_like(m)], axis=-1))  # of u - m
        if about == POPULATION:
            own = max(count, 0.0) * m * (1 - m) if sums.degree == 1 else squares
            spread = spread + Spread(own)
        return np.abs(total - m * count) <= half_width(spread, confidence)

    return Interval(center, *accepted_range(accepts, center))


def variance_interval(sums: MomentSums, about: str, confidence: float) -> Interval:
    """Return the variance, in [0, 1/4], of a column whose sums of degree 4 were released."""
    if sums.is_lost:
        return Interval(0.125, 0.0, 0.25)
    count = float(sums.total([1.0]))
    center = float(np.clip(sums.total([0.0, 1.0]) / count, 0.0, 1.0))
    raw = float(sums.total(centered_power(center, 2))) / count
    # The noise of the estimated center makes the sum of squares around it too large on average.
    bias = float(sums.spread([-center, 1.0]).variance) / count**2
    value = float(np.clip(raw - bias, 0.0, center * (1 - center)))
    polynomial = centered_power(center, 2) - [value, 0.0, 0.0]
    spread = sums.spread(polynomial)
    if about == POPULATION:
        # (u - center)^2 - value has mean 0; its square has this sum.
        own = sums.cautious_total(np.convolve(polynomial, polynomial))
        spread = spread + Spread(min(own, count / 16))
        value = min(value * count / (count - 1), 0.25)
    half = float(half_width(spread, confidence)) / count
    return Interval(value, max(value - half, 0.0), min(value + half, 0.25))


def _pair_interval(block: NoisyBlock, degree: int, about: str, confidence: float) -> Interval:
    """Return the covariance of the two columns of a released block, scaled to [0, 1] each."""
    first, second = (MomentSums((block,), (side,), degree) for side in (0, 1))
    if first.is_lost:
        return Interval(0.0, -0.25, 0.25)
    count = float(first.total([1.0]))
    centers = [float(np.clip(s.total([0.0, 1.0]) / count, 0.0, 1.0)) for s in (first, second)]

    def product(power: int) -> Floats:
        factors = (bernstein_coefficients(centered_power(c, power), degree) for c in centers)
        return cell_weights(*factors)

    value = float(np.clip(block.total(product(1)) / count, -0.25, 0.25))
    spread = block.spread(product(1) - value * product(0))
    if about == POPULATION:
        squares = product(2) - 2 * value * product(1) + value**2 * product(0)
        own = float(block.total(squares)) + float(np.sqrt(block.spread(squares).variance))
        spread = spread + Spread(float(np.clip(own, 0.0, count / 16)))
    half = float(half_width(spread, confidence)) / count
    return Interval(value, max(value - half, -0.25), min(value + half, 0.25))


def _covariance_rows(
    released: Mapping[tuple[str, str], NoisyBlock],
    ranges: Mapping[str, Range],
    degree: int,
    about: str,
    confidence: float,
) -> Iterator[tuple[str, Interval]]:
    """Yield name and interval of every covariance and variance, in the units of the columns."""
    for (a, b), block in released.items():
        scale = ranges[a].width * ranges[b].width
        found = _pair_interval(block, degree, about, confidence)
        yield f"cov({a}, {b})", found.through(lambda x, scale=scale: x * scale)
    for name, range_ in ranges.items() if degree == DEGREE else ():
        pairs = [pair for pair in released if name in pair]
        blocks = tuple(released[pair] for pair in pairs)
        sums = MomentSums(blocks, tuple(pair.index(name) for pair in pairs), DEGREE)
        found = variance_interval(sums, about, confidence)
        yield f"var({name})", found.through(lambda x, scale=range_.width**2: x * scale)
