"""Noisy evaluation of predictions on private labels: accuracy, AUC, R2, errors, with intervals.

The predictions come from a model that is public or was paid for; the labels, and which records are
there, are private. Every function pays for its own release. Intervals are about the population
unless `about="records"` is asked for, where it is offered.
"""

from dataclasses import replace
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import ArrayLike

from tacit._arrays import Flags, Floats
from tacit._check import positive, whole
from tacit.summaries.averages import mean
from tacit.summaries.bernstein import MomentSums, centered_power, moment_block, moment_sums
from tacit.summaries.column_values import (
    Range,
    as_range,
    category_text,
    in_unit,
    numbers,
    same_length,
)
from tacit.summaries.counts import bin_codes, release_cells, share_interval
from tacit.summaries.error_law import Interval, Spread, accepted_range, half_width
from tacit.summaries.payment import (
    Block,
    NoisyBlock,
    ReleaseTerms,
    Terms,
    fractional_sums,
)
from tacit.summaries.statistic import POPULATION, Statistic, check_about

_R2_SHARES = (0.22, 0.70, 0.08)
"""Shares of the budget for the targets, the squared errors, and the sampling error of R2."""


def accuracy(
    labels: ArrayLike,
    predictions: ArrayLike,
    *,
    about: str = POPULATION,
    **terms: Unpack[ReleaseTerms],
) -> Statistic:
    """Return the private share of records whose prediction equals the label, with an interval.

    Guarantee: (epsilon, delta)-DP. One record adds 1 to one of two cells, right and wrong, so it
    moves the block by 1 in L1 and L2 norm when it is added or removed. Labels and predictions are
    compared as texts; a whole number is the same with and without ".0", and True is 1.

    >>> accuracy([1, 0, 1, 1] * 250, [1, 0, 0, 1] * 250, epsilon=1.0, rng=0).name
    'accuracy'
    """
    checked = Terms.check(terms)
    check_about(about)
    cells = np.where(_agree(labels, predictions), 0, 1)
    event, block = release_cells(checked, cells, 2, "accuracy")
    found = share_interval(block, np.array([1.0, 0.0]), about, checked.confidence)
    return Statistic("accuracy", *found, checked.confidence, about, event=event)


class AUCAndCommonest(NamedTuple):
    """The AUC, and the share of the commonest class, from one release."""

    auc: Statistic
    commonest: Statistic


def commonest_share(
    labels: ArrayLike, *, n_classes: int, about: str = POPULATION, **terms: Unpack[ReleaseTerms]
) -> Statistic:
    """Return the private share of the commonest class: the accuracy of a constant answer.

    Guarantee: (epsilon, delta)-DP. One record adds 1 to the cell of its class, 0 to
    `n_classes` - 1; another label counts as class 0.

    >>> round(commonest_share([0, 1, 1, 2] * 999, n_classes=3, epsilon=9.0, rng=0).value, 1)
    0.5
    """
    checked, classes = Terms.check(terms), np.arange(whole(n_classes=n_classes, least=2))
    check_about(about)
    places = numbers(labels)
    places = np.where(np.isin(places, classes), places, 0).astype(np.int64)
    note = "share of the commonest class"
    event, block = release_cells(checked, places, len(classes), note)
    found = _commonest(block, np.eye(len(classes)), about, checked.confidence)
    return replace(found, event=event)


def auc(
    labels: ArrayLike,
    scores: ArrayLike,
    *,
    positive_label: Any = 1,
    bounds: tuple[float, float] = (0.0, 1.0),
    n_bins: int | None = None,
    about: str = POPULATION,
    **terms: Unpack[ReleaseTerms],
) -> Statistic:
    """Return the private area under the ROC curve, with an interval.

    Guarantee: (epsilon, delta)-DP. One record adds 1 to one of 2 `n_bins` cells: the bin of its
    score in the histogram of its class. So it moves the block by 1 when added or removed, and by at
    most 2 in L1 norm and sqrt(2) in L2 norm when replaced.

    The AUC is that of scores rounded to `n_bins` equal bins of the declared `bounds`, with ties
    counted half; the default is 12 to 32 bins, more at a larger epsilon. For smooth score
    distributions the rounding changes the AUC by O(1 / n_bins^2); choose bounds in which the scores
    are spread out (log odds rather than probabilities near 0). The error
    is linearized (delta method), with the sampling variance of DeLong et al. 1988. Where one class
    is hidden by the noise, the interval is [0, 1]. `positive_label` marks the positive class; every
    other label is negative. A score that is no number counts as the lowest.
    """
    return auc_and_commonest(
        labels, scores, positive_label=positive_label, bounds=bounds, n_bins=n_bins, about=about,
        **terms,
    ).auc  # fmt: skip


def auc_and_commonest(
    labels: ArrayLike,
    scores: ArrayLike,
    *,
    positive_label: Any = 1,
    bounds: tuple[float, float] = (0.0, 1.0),
    n_bins: int | None = None,
    about: str = POPULATION,
    **terms: Unpack[ReleaseTerms],
) -> AUCAndCommonest:
    """Return the AUC as `auc` does, with the share of the commoner class at no further cost.

    The histograms that the AUC is computed from also count the classes.
    """
    checked, range_ = Terms.check(terms), as_range(bounds)
    bins = _bins_for(checked.epsilon) if n_bins is None else whole(n_bins=n_bins, least=2)
    check_about(about)
    is_positive = _is_label(labels, positive_label)
    unit = np.nan_to_num(in_unit(scores, range_))
    same_length(labels=is_positive, scores=unit)
    cells = bin_codes(unit, bins) + np.where(is_positive, bins, 0)
    event, block = release_cells(checked, cells, 2 * bins, "AUC")
    found = _auc_interval(block, bins, about, checked.confidence)
    return AUCAndCommonest(
        Statistic("AUC", *found, checked.confidence, about, event=event),
        _commonest(block, np.repeat(np.eye(2), bins, axis=1), about, checked.confidence),
    )


def r2(
    targets: ArrayLike,
    predictions: ArrayLike,
    *,
    bounds: tuple[float, float],
    about: str = POPULATION,
    **terms: Unpack[ReleaseTerms],
) -> Statistic:
    """Return the private coefficient of determination, 1 - SSE / SST, with an interval.

    Guarantee: (epsilon, delta)-DP. Targets are clipped to the declared `bounds`, and errors to the
    distance of the bounds, so that y = (target - lower) / width is in [0, 1] and z = (error /
    width)^2 is in [0, 1]. One record contributes to three blocks: its Bernstein polynomials of y,
    which sum to 1 (hence SST, for the noisy mean); z (hence SSE); and, for the sampling error, the
    square of psi = (1 - R2) (y - mean)^2 - z at the released estimates, clipped to a limit that
    follows from them and divided by it, hence in [0, 1] too.

    The interval holds every R2 for which the noisy sum of psi, which is 0 at the true R2, is within
    its half width (Fieller 1954). Its lower end is minus infinity if the targets may be constant.
    A record with a missing target or prediction contributes nothing.
    """
    checked, range_ = Terms.check(terms), as_range(bounds)
    check_about(about)
    y, z = _targets_and_errors(targets, predictions, range_)
    blocks = [
        moment_block(checked, 2, len(y), share=_R2_SHARES[0]),
        Block(1, _R2_SHARES[1], is_fractional=True),
        Block(1, _R2_SHARES[2], is_fractional=True),
    ]
    division = checked.divide(blocks)
    event = division.pay("R2")
    moments, errors, psi = division.noises
    sums = MomentSums.of(moments.release(moment_sums(2, y), checked.rng), 2)
    total = errors.release(_sum_of(z), checked.rng)
    guess = _r2_guess(sums, total, noise_std=psi.variance**0.5)
    squares = psi.release(_sum_of(guess.psi_squared(y, z)), checked.rng)
    own = max(float(squares.cells[0]) + psi.variance**0.5, 0.0) * guess.limit**2
    sampling = Spread(own if about == POPULATION else 0.0)
    found = _r2_interval(sums, total, guess, sampling, checked.confidence)
    return Statistic("R2", *found, checked.confidence, about, event=event)


def mean_squared_error(
    targets: ArrayLike,
    predictions: ArrayLike,
    *,
    largest_error: float,
    about: str = POPULATION,
    **terms: Unpack[ReleaseTerms],
) -> Statistic:
    """Return the private mean of squared errors, with an interval.

    Guarantee: that of `mean` of squared errors within [0, `largest_error`^2]. Larger errors are
    clipped. A missing target or prediction is left out.
    """
    most = positive(largest_error=largest_error)
    y, predicted = numbers(targets), numbers(predictions)
    same_length(targets=y, predictions=predicted)
    with np.errstate(invalid="ignore", over="ignore"):  # a warning would reveal an infinite value
        squares = np.minimum(np.abs(y - predicted), most) ** 2
    found = mean(squares, bounds=(0.0, most**2), about=about, **terms)
    return _renamed(found, "mean squared error")


def log_loss(
    labels: ArrayLike,
    probabilities: ArrayLike,
    *,
    largest_loss: float = 5.0,
    about: str = POPULATION,
    **terms: Unpack[ReleaseTerms],
) -> Statistic:
    """Return the private mean of -log(probability of the label), with an interval.

    Guarantee: that of `mean` of losses within [0, `largest_loss`]; larger losses are clipped.
    `probabilities` holds the probability of label 1, (records,), with labels 0 and 1; or of every
    class, (records, classes), with labels 0, 1, .... A label that is no class has the largest loss.
    """
    most = positive(largest_loss=largest_loss)
    table = np.asarray(probabilities, np.float64)
    if table.ndim == 1:
        table = np.column_stack([1 - table, table])
    if table.ndim != 2:
        raise ValueError(f"probabilities must have 1 or 2 dimensions, got {table.ndim}.")
    classes = numbers(labels)
    n_records = same_length(labels=classes, probabilities=table)
    is_class = (classes >= 0) & (classes < table.shape[1]) & (classes == np.floor(classes))
    chosen = table[np.arange(n_records), np.where(is_class, classes, 0).astype(np.int64)]
    likely = np.clip(np.nan_to_num(np.where(is_class, chosen, 0.0)), np.exp(-most), 1.0)
    found = mean(-np.log(likely), bounds=(0.0, most), about=about, **terms)
    return _renamed(found, "log loss")


class _Guess(NamedTuple):
    """Released estimates at which the sampling error of R2 is evaluated."""

    center: float
    ratio: float
    """SSE / SST, kept within [0, 2]."""
    limit: float
    """Size at which psi is clipped."""

    def psi_squared(self, y: Floats, z: Floats) -> Floats:
        """Return psi^2 of each record, divided by its limit; NaN if a value is missing."""
        psi = self.ratio * (y - self.center) ** 2 - z
        return np.minimum(np.abs(psi) / self.limit, 1.0) ** 2


def _r2_guess(sums: MomentSums, errors: NoisyBlock, *, noise_std: float) -> _Guess:
    """Return the estimates, and a limit that few errors pass and that keeps the noise small.

    psi is of the size of the mean squared error, which may be far below 1. The limit is at least 12
    times that size; it is larger if the noise on the clipped sum of psi^2, `noise_std` * limit^2,
    is then still below a fifth of the sum to be expected for normal errors.
    """
    count = max(float(sums.total([1.0])), 1.0)
    center = float(np.clip(sums.total([0.0, 1.0]) / count, 0.0, 1.0))
    squares = float(sums.total(centered_power(center, 2)))
    total = max(float(errors.cells[0]), 0.0)
    ratio = float(np.clip(total / squares, 0.0, 2.0)) if squares > 0 else 1.0
    size = (total + float(np.sqrt(errors.spread(np.ones(1)).variance))) / count
    limit = size * max(12.0, float(np.sqrt(0.4 * count / noise_std)))
    return _Guess(center, ratio, float(np.clip(limit, 1e-6, 2.0)))


def _r2_interval(
    sums: MomentSums, errors: NoisyBlock, guess: _Guess, sampling: Spread, confidence: float
) -> Interval:
    """Return the values of 1 - ratio for which the noisy sum of psi may be 0."""
    square = centered_power(guess.center, 2)
    count, squares, total = float(sums.total([1.0])), float(sums.total(square)), errors.cells[0]
    # A sum of squares around a noisy mean is too large by count (noisy mean - mean)^2.
    if count > 1:
        squares -= float(sums.spread([-guess.center, 1.0]).variance) / count
    noise = errors.spread(np.ones(1))

    def ratio_of(t: Floats | float) -> Any:  # Any: as t
        return t / (1 - np.minimum(t, 1 - 1e-9))

    def accepts(t: Floats) -> Flags:
        ratio = ratio_of(t)
        spread = sums.spread(ratio[:, None] * square) + noise + sampling
        return np.abs(ratio * squares - total) <= half_width(spread, confidence)

    ratio = max(float(total) / squares, 0.0) if squares > 0 else 1.0
    lower, upper = accepted_range(accepts, ratio / (1 + ratio))
    worst = np.inf if upper >= 1 or sums.is_lost else float(ratio_of(upper))
    best = 0.0 if sums.is_lost else float(ratio_of(lower))
    return Interval(1 - ratio, 1 - worst, 1 - best)


def _commonest(block: NoisyBlock, classes: Floats, about: str, confidence: float) -> Statistic:
    """Return the share of the class with most records; `classes` (k, cells) marks the cells."""
    largest = max(classes, key=lambda cells: float(block.total(cells)))
    value, lower, upper = share_interval(block, largest, about, confidence)
    value = max(value, 1 / len(classes))  # the share of the commonest class is never less
    return Statistic("commonest class", value, lower, upper, confidence, about)


def r2_half_width(n_records: int, *, epsilon: float, relative_std: float = 1 / 6) -> float:
    """Return about how far the noise alone moves `r2` of `n_records` records, at 95 % confidence.

    `relative_std` is the standard deviation of the targets as a share of the width of their bounds;
    1/6 are bounds of three standard deviations to both sides. This is the noise of the squared
    errors (Laplace noise exceeds its scale times log(20) with probability 5 %) over SST.

    >>> round(r2_half_width(4000, epsilon=0.1), 2)
    0.39
    """
    scale = 1 / (_R2_SHARES[1] * positive(epsilon=epsilon))
    return float(np.log(20) * scale / (whole(n_records=n_records, least=1) * relative_std**2))


def _bins_for(epsilon: float) -> int:
    """Return a number of bins that balances the noise, which grows with it, against rounding."""
    return int(np.clip(np.rint(32 * np.sqrt(epsilon)), 12, 32))


def _auc_interval(block: NoisyBlock, bins: int, about: str, confidence: float) -> Interval:
    """Return the AUC from the noisy histograms of both classes, negative class first."""
    negative = np.arange(2 * bins) < bins
    sizes = [float(block.total(side)) for side in (negative, ~negative)]
    spreads = [float(np.sqrt(block.spread(side).variance)) for side in (negative, ~negative)]
    if any(n < max(2.0, 4 * s) for n, s in zip(sizes, spreads, strict=True)):
        return Interval(0.5, 0.0, 1.0)
    low, high = block.cells[:bins] / sizes[0], block.cells[bins:] / sizes[1]
    below = np.cumsum(low) - low / 2  # share of negatives below the middle of each bin
    above = 1 - (np.cumsum(high) - high / 2)  # share of positives above it
    area = float(high @ below)
    influence = np.concatenate([(above - area) / sizes[0], (below - area) / sizes[1]])
    spread = block.spread(influence)
    value = float(np.clip(area, 0.0, 1.0))
    if about == POPULATION:
        sides = ((low, above, sizes[0]), (high, below, sizes[1]))
        own = [float(np.clip(p @ (x - area) ** 2, 0, 0.25)) / n for p, x, n in sides]
        spread = spread + Spread(sum(own))
    half = float(half_width(spread, confidence))
    return Interval(value, max(area - half, 0.0), min(area + half, 1.0))


def _targets_and_errors(
    targets: ArrayLike, predictions: ArrayLike, range_: Range
) -> tuple[Floats, Floats]:
    """Return targets in [0, 1] and squared errors in [0, 1]; NaN where either is missing."""
    y, found = numbers(targets), numbers(predictions)
    same_length(targets=y, predictions=found)
    is_missing = np.isnan(y) | np.isnan(found)
    unit = in_unit(np.where(is_missing, np.nan, y), range_)
    predicted = (np.clip(found, -1e300, 1e300) - range_.lower) / range_.width
    error = np.clip(unit - predicted, -1.0, 1.0)
    return unit, np.where(is_missing, np.nan, error**2)


def _sum_of(values: Floats) -> Floats:
    """Return the private sum of numbers in [0, 1] as one cell; NaN contributes nothing."""
    filled = np.nan_to_num(values)
    return fractional_sums(lambda rows: filled[rows][:, None], len(filled), 1)


def _agree(labels: ArrayLike, predictions: ArrayLike) -> Flags:
    """Return which records have equal label and prediction. Private."""
    first, second = _texts(labels), _texts(predictions)
    same_length(labels=first, predictions=second)
    return np.fromiter((a == b for a, b in zip(first, second, strict=True)), np.bool_, len(first))


def _is_label(labels: ArrayLike, wanted: object) -> Flags:
    (text,) = _texts([_plain(wanted)])
    found = _texts(labels)
    return np.fromiter((label == text for label in found), np.bool_, len(found))


def _texts(values: Any) -> list[str]:  # Any: arrays, lists and columns of data frames
    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    return [category_text(int(value) if isinstance(value, bool) else value) for value in listed]


def _plain(value: Any) -> Any:  # Any: numpy scalars become Python numbers
    return value.item() if isinstance(value, np.generic) else value


def _renamed(found: Statistic, name: str) -> Statistic:
    return replace(found, name=name)
