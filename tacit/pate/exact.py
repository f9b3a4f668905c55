"""Exact Rényi cost of a GNMax answer for the votes at hand, by quadrature over all neighbors.

The bound of 2018 (Thm. 6) knows of the votes only how rarely the winner changes. But a neighbor's
votes differ by one vote moved from one class to another, so there are at most m (m - 1) of them,
and the law of the noisy winner is a one-dimensional integral: the divergence can be computed
instead of bounded. Even for a tie of two classes it is 2 / pi of the data-independent price,
because only the winner is released.

The bound speaks of one direction, from this data set to its neighbors, in which the exact value is
never above it. By default the larger of both directions is taken, as differential privacy asks;
with near-unanimous votes and little noise that can be the larger number of the two.

Like every bound that uses votes, the result is private.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_ndtr, logsumexp

from tacit._check import positive
from tacit.pate.vote_analysis import ORDERS, FloatArray, as_votes

_STEP = 0.1  # trapezoid nodes; the integrand is entire, so the error falls like exp(-2 pi^2 / step)
_REACH = 9.0  # standard deviations beyond the farthest peak; P[|N| > 9] < 3e-19
_SLACK = 1e-13  # added to every divergence: ten times the rounding of logs, and below any price


def gnmax_rdp_exact(
    votes: ArrayLike, *, sigma: float, orders: ArrayLike = ORDERS, both_ways: bool = True
) -> FloatArray:
    """Rényi cost of one GNMax answer for each query: (queries, orders), private.

    Largest divergence between the noisy winner of these votes and that of votes with one vote
    moved; never above lambda / sigma^2. Without `both_ways`, only from these votes to others.

    >>> cost = gnmax_rdp_exact([[125, 125]], sigma=40.0, orders=[2.0])
    >>> bool(cost[0, 0] < 2 / 40**2)
    True
    """
    sigma = positive(sigma=sigma)
    counts = as_votes(votes)
    orders = np.asarray(orders, dtype=float)
    # The winner's law does not depend on the classes' names, so equal sorted rows cost the same.
    rows, index = np.unique(np.sort(counts, axis=1), axis=0, return_inverse=True)
    costs = np.array([_one_query(row, sigma, orders, both_ways) for row in rows])
    costs = costs.reshape(len(rows), len(orders))
    return np.minimum(costs[index.reshape(-1)], orders / sigma**2)


def threshold_rdp_exact(
    highest: ArrayLike, *, threshold: float, sigma: float, orders: ArrayLike = ORDERS
) -> FloatArray:
    """Rényi cost of the check "highest count + N(0, sigma^2) >= threshold": (queries, orders).

    Private; `highest` is the highest count of each query. Two outcomes; the highest count of a
    neighbor is at most 1 away, and both divergences grow with the distance.
    """
    sigma = positive(sigma=sigma)
    orders = np.asarray(orders, dtype=float)
    values, index = np.unique(np.asarray(highest, dtype=float), return_inverse=True)
    here = _two_outcomes((values - threshold) / sigma)  # (values, 2)
    costs = [
        _divergence(first, second, orders)
        for shift in (-1, 1)
        for first, second in _both_ways(here, _two_outcomes((values + shift - threshold) / sigma))
    ]
    worst = np.max(costs, axis=0)[index.reshape(-1)]
    return np.minimum(worst, orders / (2 * sigma**2))


def winner_log_probabilities(row: ArrayLike, *, sigma: float) -> FloatArray:
    """ln P[class j wins] for one row of votes plus N(0, sigma^2) noise; private."""
    counts = np.asarray(row, dtype=float)
    tables = _tables(counts, sigma)
    return _normalized(tables[:, :, 2].sum(axis=1))


def _one_query(
    row: NDArray[np.int64], sigma: float, orders: FloatArray, both_ways: bool
) -> FloatArray:
    """Largest divergence over all single moved votes, at each order."""
    if row[-1] - row[0] > 1000 * sigma:  # too many nodes; lambda / sigma^2 stands
        return orders / sigma**2
    tables = _tables(row.astype(float), sigma)
    here = _normalized(tables[:, :, 2].sum(axis=1))
    moved = np.array([_moved(tables, a, b) for a, b in _moves(row)])  # (moves, m)
    pairs = _both_ways(np.broadcast_to(here, moved.shape), moved)
    directions = pairs if both_ways else pairs[:1]
    return np.max([_divergence(p, q, orders).max(axis=0) for p, q in directions], axis=0)


def _tables(row: FloatArray, sigma: float) -> FloatArray:
    """ln P[class k stays below class j | noise z of j]: (j, k, shift, z), shifts -2..2 votes.

    The row j == j holds the log density of z, so that a sum over k is the log integrand.
    """
    gaps = row[:, None] - row[None, :]
    # The integrand of a class that trails by g peaks between 0 and g / sigma.
    nodes = np.arange(-_REACH, gaps.max() / sigma + _REACH, _STEP)
    shifts = np.arange(-2, 3)
    above = (gaps[:, :, None, None] + shifts[:, None]) / sigma + nodes
    tables = log_ndtr(above)
    own = np.arange(len(row))
    tables[own, own] = -(nodes**2) / 2
    return tables


def _moves(row: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Which class may lose a vote to which, up to classes with equal counts."""
    seen: dict[tuple[int, int], tuple[int, int]] = {}
    for a in range(len(row)):
        for b in range(len(row)):
            if a != b and row[a] > 0:
                seen.setdefault((int(row[a]), int(row[b])), (a, b))
    return list(seen.values())


def _moved(tables: FloatArray, a: int, b: int) -> FloatArray:
    """ln P[class j wins] after one vote moved from class a to class b."""
    zero = 2
    total = tables[:, :, zero].sum(axis=1)  # (j, z)
    total += tables[:, a, zero + 1] - tables[:, a, zero]
    total += tables[:, b, zero - 1] - tables[:, b, zero]
    loses, gains = tables[a, :, zero - 1], tables[b, :, zero + 1]
    total[a] = loses.sum(axis=0) - loses[b] + tables[a, b, zero - 2]
    total[b] = gains.sum(axis=0) - gains[a] + tables[b, a, zero + 2]
    return _normalized(total)


def _normalized(log_integrand: FloatArray) -> FloatArray:
    log_p = np.asarray(logsumexp(log_integrand, axis=-1))
    return log_p - np.asarray(logsumexp(log_p))


def _two_outcomes(standardized: FloatArray) -> FloatArray:
    return np.stack([log_ndtr(standardized), log_ndtr(-standardized)], axis=-1)


def _both_ways(p: FloatArray, q: FloatArray) -> tuple[tuple[FloatArray, FloatArray], ...]:
    return (p, q), (q, p)


def _divergence(log_p: FloatArray, log_q: FloatArray, orders: FloatArray) -> FloatArray:
    """Rényi divergence of P from Q at each order, rounded up: (..., orders)."""
    # sum p (p/q)^(lambda - 1) - 1 = sum p expm1((lambda - 1) ln(p/q)) keeps tiny values; for large
    # ratios the logs are added first, since p may underflow where its ratio overflows.
    log_p = log_p[..., None]
    ratio = (log_p - log_q[..., None]) * (orders - 1)
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # an infinite divergence is capped by callers
        small = np.exp(log_p) * np.expm1(np.minimum(ratio, 1.0))
        large = np.exp(log_p + ratio) - np.exp(log_p)
    excess = np.where(ratio > 1, large, small).sum(axis=-2)
    return np.log1p(np.maximum(excess, 0.0)) / (orders - 1) + _SLACK
