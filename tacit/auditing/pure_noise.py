"""Tests of noise: values that should be independent standard normal numbers.

A run whose losses are all multiplied by zero releases nothing but noise. Divided by the standard
deviation that was billed, its releases form a table with one row for each step and one column for
each coordinate of the model. If the noise is as billed, all entries are independent standard
normal. Every test here has a known law under that hypothesis.
"""

from collections.abc import Sequence
from itertools import combinations, pairwise
from math import comb, sqrt

import numpy as np
from scipy import special, stats

from tacit._arrays import Floats
from tacit.auditing.p_values import Finding, normal_p, smallest, two_sided

_RESOLUTION = 2.0**-20  # noise is at least so fine, in standard deviations; float32 is finer
_SURPLUS = 1.01  # a variance so much above the billed one is not a fault: rounding is paid in noise
_PREFIX = 4096  # coordinates of a tensor that are compared with those of another tensor
_PAIRS = 300  # most pairs of tensors that are compared
_LEAST_FOR_LAW = 50


def noise_findings(
    values: Floats, sizes: Sequence[int], *, part: str = "noise"
) -> tuple[Finding, ...]:
    """Test that `values`, of shape (steps, coordinates), are independent standard normal.

    `sizes` are the numbers of coordinates of each tensor, in the order of the columns. Infinite
    values and NaN are never noise, so they are flagged with certainty.

    >>> rng = np.random.default_rng(0)
    >>> good = rng.standard_normal((64, 30))
    >>> min(finding.p_value for finding in noise_findings(good, [20, 10])) > 0.001
    True
    >>> good[:, 25] *= 0.5
    >>> min(finding.p_value for finding in noise_findings(good, [20, 10])) < 0.001
    True
    """
    if not np.isfinite(values).all():
        return (Finding(part, "every release is a finite number", 0.0),)
    tests = {
        "variance in all": _shortfall(values),
        "variance of every tensor": smallest(map(_shortfall, _by_tensor(values, sizes))),
        "variance of every coordinate": smallest(
            stats.chi2.cdf((values**2).sum(axis=0), len(values))
        ),
        "variance of every step": smallest(map(_step_variance, values)),
        "mean": normal_p(float(values.sum()) / sqrt(values.size)),
        "normal law": _law(values),
        "tails": _tails(values),
        "no value occurs twice": _repeated(values),
        "independence of steps": _rows(values),
        "independence of coordinates": _columns(values),
        "independence of tensors": _tensors(values, sizes),
    }
    return tuple(Finding(part, name, p_value) for name, p_value in tests.items())


def shared_noise(one: Floats, other: Floats) -> float:
    """Return the p-value of the hypothesis that two runs have no noise in common.

    Rows of both tables are compared pairwise, whatever their step: equal, negated or correlated.
    """
    width = one.shape[1]
    products = one @ other.T  # (steps, steps)
    lengths = np.linalg.norm(one, axis=1)[:, None] * np.linalg.norm(other, axis=1)[None]
    found = smallest(_correlation_p((products / np.maximum(lengths, 1e-300)).ravel(), width))
    equal = _repeated(np.concatenate([one, other])) if width < 3 else 1.0
    return smallest([found, equal])


def _by_tensor(values: Floats, sizes: Sequence[int]) -> list[Floats]:
    return np.split(values, np.cumsum(sizes)[:-1], axis=1)


def _shortfall(values: Floats) -> float:
    """Return the chance that noise as billed has a sum of squares as small as that of `values`."""
    return float(stats.chi2.cdf(float((values**2).sum()), values.size))


def _step_variance(row: Floats) -> float:
    total = float((row**2).sum())
    upper = float(stats.chi2.sf(total / _SURPLUS, row.size))
    return two_sided(float(stats.chi2.cdf(total, row.size)), upper)


def _law(values: Floats) -> float:
    """Compare with a normal law of the same variance, so that a small surplus is not flagged."""
    flat = values.ravel() / max(float(np.sqrt((values**2).mean())), 1e-300)
    if flat.size < _LEAST_FOR_LAW:
        return 1.0
    # With a fitted variance the distance is smaller than the law of Kolmogorov says: still valid.
    distance = float(stats.kstest(flat, "norm").pvalue)
    return smallest([distance, float(stats.kurtosistest(flat).pvalue)])


def _tails(values: Floats) -> float:
    """Return the p-value of the largest absolute value: too small if noise is cut off."""
    largest = float(np.abs(values).max())
    with np.errstate(divide="ignore"):  # a largest value of 0 has the logarithm -inf
        log_inside = values.size * np.log1p(-2 * special.ndtr(-largest))
        upper = -np.expm1(values.size * np.log1p(-2 * special.ndtr(-largest / _SURPLUS)))
    return two_sided(float(np.exp(log_inside)), float(upper))


def _repeated(values: Floats) -> float:
    """Return the p-value of the number of pairs of equal absolute values."""
    ordered = np.sort(np.abs(values).ravel())
    ordered = ordered[ordered > 0]
    is_new = np.diff(ordered, prepend=-1.0) > 2.0**-40 * ordered
    equal = np.bincount(np.cumsum(is_new))  # how often each value occurs
    # Two absolute normal values are within h of each other with probability 2 h / sqrt(pi).
    expected = comb(values.size, 2) * _RESOLUTION * 2 / sqrt(np.pi)
    zeros = comb(values.size - ordered.size, 2)
    same = int((equal * (equal - 1) // 2).sum())
    return float(stats.poisson.sf(same + zeros - 1, expected))


def _rows(values: Floats) -> float:
    """Compare every two steps, by the correlation of their coordinates."""
    steps, width = values.shape
    if width < 3 or steps < 2:
        return _autocorrelation(values.T)
    with np.errstate(invalid="ignore"):
        table = np.atleast_2d(np.corrcoef(values))
    found = np.nan_to_num(table[np.triu_indices(steps, 1)], nan=1.0)  # a constant row is no noise
    return smallest([smallest(_correlation_p(found, width)), _autocorrelation(values.T)])


def _columns(values: Floats) -> float:
    """Test for a component that coordinates share, and for neighbors that are alike."""
    steps, width = values.shape
    if width < 2:
        return 1.0
    signs = np.where(np.arange(width) % 2, -1.0, 1.0)
    found = [_autocorrelation(values)]
    for direction in (np.ones(width), signs):
        total = float((values @ direction) @ (values @ direction)) / width
        lower = float(stats.chi2.cdf(total, steps))
        found.append(two_sided(lower, float(stats.chi2.sf(total / _SURPLUS, steps))))
    some = np.linspace(0, width - 1, min(width, 64)).astype(int)
    if steps > 3 and len(set(some)) > 1:
        with np.errstate(invalid="ignore"):
            table = np.atleast_2d(np.corrcoef(values[:, np.unique(some)].T))
        pairs = np.nan_to_num(table[np.triu_indices(len(table), 1)], nan=1.0)
        found.append(smallest(_correlation_p(pairs, steps)))
    return smallest(found)


def _tensors(values: Floats, sizes: Sequence[int]) -> float:
    """Compare the first coordinates of every two tensors, over all steps."""
    parts = [part[:, :_PREFIX] for part in _by_tensor(values, sizes) if part.size]
    pairs = list(combinations(range(len(parts)), 2))
    if len(pairs) > _PAIRS:
        pairs = list(pairwise(range(len(parts))))
    found = []
    for i, j in pairs:
        width = min(parts[i].shape[1], parts[j].shape[1])
        found.append(_same_p(parts[i][:, :width], parts[j][:, :width]))
    return smallest(found)


def _autocorrelation(values: Floats) -> float:
    """Test whether each column resembles the next one, over all rows together."""
    if values.shape[1] < 2:
        return 1.0
    return _same_p(values[:, :-1], values[:, 1:])


def _same_p(one: Floats, other: Floats) -> float:
    """Return the p-value of the sum of products, given `other`, of entries as billed."""
    length = float(np.sqrt((other**2).sum())) * max(1.0, float(np.sqrt((one**2).mean())))
    return normal_p(float((one * other).sum()) / length) if length > 0 else 0.0


def _correlation_p(correlations: Floats, n: int) -> Floats:
    """Return two-sided p-values of correlations of `n` pairs of independent normal values each."""
    if n < 3:
        return np.ones_like(correlations)
    # r^2 has the law Beta(1/2, (n - 2) / 2); an uncentered r has (n - 1) / 2, which is smaller.
    return special.betaincc(0.5, (n - 2) / 2, np.minimum(1.0, correlations**2))
