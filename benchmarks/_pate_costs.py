"""Rényi cost of PATE's answers, computed from the votes themselves, for tables beside the papers.

A cost computed from votes is **private**: it reveals how far the teachers agreed, and nothing has
paid for that. Functions here that take votes return private arrays; `PrivateCurve` holds their sum
and shows no number in its `repr`. `_smooth_sensitivity` computes a cost that may be published. A
ledger is never charged with the numbers of this file: they bound the divergence of this data set's
outcome from its neighbors', not that of every data set from every neighbor.

Two kinds of cost are offered for GNMax. `gnmax_rdp` is the published bound, which uses only the
probability that noise changes the winner. `gnmax_rdp_exact` computes the divergence itself: a
neighbor's votes differ by one vote moved from one class to another, so there are at most m (m - 1)
neighbors, and the law of the noisy winner is a one-dimensional integral. Even for a tie of two
classes the exact cost is 2 / pi of the data-independent price, because only the winner is released.

The bound covers one direction, from this data set to its neighbors; in that direction the exact
cost is never above the bound. By default the exact cost is the larger of both directions, as
differential privacy requires. With near-unanimous votes and little noise it can exceed the bound.

In formulas, as in the papers: n_j votes for class j, m classes, q the chance that noise changes the
winner, lambda a Rényi order. Sources: Papernot et al. 2017 (arXiv:1610.05755, "2017") and
Papernot et al. 2018 (arXiv:1802.08908, "2018").
"""

from dataclasses import dataclass, field
from itertools import permutations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import log_ndtr, logsumexp

from tacit._arrays import Flags, Floats, Indices
from tacit._check import in_open_unit, positive
from tacit.accounting import RDP
from tacit.events import RenyiCurve
from tacit.pate import NO_ANSWER, Aggregator, ConfidentGNMax, GNMax, LaplaceMax
from tacit.pate.votes import as_votes

ORDERS: Floats = np.concatenate(
    [np.arange(1.25, 10, 0.25), np.arange(10, 64, 1.0), np.geomspace(64, 2048, 60)]
)
"""Rényi orders used when none are given; any set is valid, more can only lower epsilon."""
_STEP = 0.1  # trapezoid nodes; the integrand is entire, so the error falls like exp(-2 pi^2 / step)
_REACH = 9.0  # standard deviations beyond the farthest peak; P[|N| > 9] < 3e-19
_SLACK = 1e-13  # added to every divergence: ten times the rounding of logs, and below any price


@dataclass(frozen=True)
class PrivateCurve:
    """Rényi privacy cost computed from votes: **private**, never to be published or logged.

    `values` holds the cost at each of the Rényi `orders`. Adding two curves composes them. `repr`
    shows no number, and there is no conversion to JSON.
    """

    orders: Floats = field(repr=False)
    values: Floats = field(repr=False)

    def private_epsilon(self, *, delta: float) -> float:
        """Return the epsilon at `delta` that the curve implies: **private**, for the data's owner.

        It is the smallest by Canonne, Kamath & Steinke 2020, Prop. 12.
        """
        delta = in_open_unit(delta=delta)
        finite = np.isfinite(self.values)
        curve = RenyiCurve(tuple(self.orders[finite]), tuple(self.values[finite]))
        return RDP().epsilon(curve, delta=delta)

    def __add__(self, other: "PrivateCurve") -> "PrivateCurve":
        if not np.array_equal(self.orders, other.orders):
            raise ValueError("curves can be added only at the same orders.")
        return PrivateCurve(self.orders, self.values + other.values)

    def __reduce__(self):
        raise TypeError("PrivateCurve is private and cannot be pickled; publish a sanitized cost.")


def private_cost(
    aggregator: Aggregator,
    votes: ArrayLike,
    labels: ArrayLike | None = None,
    *,
    orders: ArrayLike = ORDERS,
    tight: bool = False,
) -> PrivateCurve:
    """Return the Rényi cost of releasing `labels` given the votes; **private**, never publish.

    Without `labels` every query counts as answered. If `tight`, the cost is the exact largest
    divergence from a neighbor (`gnmax_rdp_exact`) instead of the papers' bound on it.
    """
    counts, grid = as_votes(votes), np.asarray(orders, float)
    answered = counts if labels is None else counts[has_label(labels, len(counts))]
    if isinstance(aggregator, LaplaceMax):
        if tight:
            raise ValueError("tight must be False for LaplaceMax: it is known for Gaussian noise.")
        found = laplace_max_rdp(answered, scale=aggregator.scale, orders=grid)
        return PrivateCurve(grid, found.sum(axis=0))
    if not isinstance(aggregator, GNMax | ConfidentGNMax):
        raise TypeError(f"no cost is known for {type(aggregator).__name__}.")
    is_checked = isinstance(aggregator, ConfidentGNMax)
    sigma = aggregator.sigma_answer if is_checked else aggregator.sigma
    cost = (gnmax_rdp_exact if tight else gnmax_rdp)(answered, sigma=sigma, orders=grid).sum(axis=0)
    if is_checked:
        check = threshold_rdp_exact if tight else threshold_rdp
        terms = {"threshold": aggregator.threshold, "sigma": aggregator.sigma_threshold}
        cost += check(counts.max(axis=1), **terms, orders=grid).sum(axis=0)
    return PrivateCurve(grid, cost)


def has_label(labels: ArrayLike, n_queries: int) -> Flags:
    """Return for each of `n_queries` queries whether its label is other than `NO_ANSWER`."""
    given = np.asarray(labels)
    if given.shape != (n_queries,):
        raise ValueError(
            f"labels must hold one label for each of {n_queries} queries, got shape {given.shape}."
        )
    return given != NO_ANSWER


def log_wrong_winner(votes: ArrayLike, *, sigma: float) -> Floats:
    """Return ln q for each query: q bounds the chance that N(0, sigma^2) noise changes the winner.

    Private. q is the sum by `log_sum_of_upsets` (1802.08908, Prop. 7), and at most 1 - 1/m for m
    classes, since the true winner is the likeliest of m outcomes.

    >>> bool(np.exp(log_wrong_winner([[240, 5, 5]], sigma=40.0))[0] < 1e-4)
    True
    """
    counts = as_votes(votes)
    return np.minimum(log_sum_of_upsets(counts, sigma=sigma), np.log1p(-1 / counts.shape[1]))


def log_sum_of_upsets(counts: Indices, *, sigma: float) -> Floats:
    """Return ln of the sum over losing classes j of P[N(0, 2 sigma^2) > n_win - n_j], by query.

    n_j are the votes for class j and n_win those for the winner. The sum bounds the chance that
    Gaussian noise of standard deviation `sigma` on every count changes the winner.
    """
    return np.asarray(logsumexp(log_ndtr(-_losing_gaps(counts) / (np.sqrt(2) * sigma)), axis=1))


def gnmax_rdp(votes: ArrayLike, *, sigma: float, orders: ArrayLike = ORDERS) -> Floats:
    """Return a bound on the Rényi cost of answering each query by GNMax: (queries, orders).

    Private. This is the data-dependent bound of Papernot et al. 2018 (Thm. 6 with q of Prop. 7 and
    the orders of Prop. 10), never above the data-independent order / sigma^2 (Prop. 8).
    """
    sigma = positive(sigma=sigma)
    return rdp_from_log_q(log_wrong_winner(votes, sigma=sigma), sigma=sigma, orders=orders)


def threshold_rdp(
    highest: ArrayLike, *, threshold: float, sigma: float, orders: ArrayLike = ORDERS
) -> Floats:
    """Return a bound on the Rényi cost of the check "highest + N(0, sigma^2) >= threshold".

    Private; (queries, orders). `highest` is the highest vote count of each query. A check chooses
    between two outcomes by a Gaussian of sensitivity 1 instead of sqrt(2). So Thm. 6 of Papernot
    et al. 2018 applies with sqrt(2) * sigma, and with q the probability of the rarer outcome.
    """
    sigma = positive(sigma=sigma)
    log_pass = log_pass_probability(highest, threshold=threshold, sigma=sigma)
    log_fail = log_ndtr((threshold - np.asarray(highest, dtype=float)) / sigma)
    return rdp_from_log_q(np.minimum(log_pass, log_fail), sigma=np.sqrt(2) * sigma, orders=orders)


def log_pass_probability(highest: ArrayLike, *, threshold: float, sigma: float) -> Floats:
    """Return ln P[highest + N(0, sigma^2) >= threshold] for each query's highest count; private."""
    return log_ndtr((np.asarray(highest, dtype=float) - threshold) / sigma)


def rdp_from_log_q(log_q: ArrayLike, *, sigma: float, orders: ArrayLike = ORDERS) -> Floats:
    """Return the Rényi cost of a GNMax answer whose wrong-winner probability is at most q.

    Shape (queries, orders). Papernot et al. 2018, Thm. 6, with its parameters
    mu_2 = sigma sqrt(ln 1/q) and mu_1 = mu_2 + 1 (Prop. 10). Where the conditions of the theorem
    fail, or its bound is larger, the result is the data-independent cost order / sigma^2.
    """
    log_q = np.atleast_1d(np.asarray(log_q, dtype=float))[:, None]
    orders = np.asarray(orders, dtype=float)[None, :]
    independent = orders / sigma**2
    with np.errstate(all="ignore"):  # corners where the conditions fail are overwritten below
        q = np.exp(log_q)
        mu_2 = sigma * np.sqrt(-log_q)
        mu_1 = mu_2 + 1
        epsilon_1, epsilon_2 = mu_1 / sigma**2, mu_2 / sigma**2
        allowed = (mu_2 - 1) * epsilon_2 - mu_2 * (np.log(mu_1 / mu_2) - np.log1p(-1 / mu_2))
        holds = (orders <= mu_1) & (mu_2 > 1) & (log_q <= allowed) & (log_q + epsilon_2 < 0)
        log_a = np.log1p(-q) - np.log(-np.expm1((log_q + epsilon_2) * (1 - 1 / mu_2)))
        log_b = epsilon_1 - log_q / (mu_1 - 1)
        moment = np.logaddexp(np.log1p(-q) + (orders - 1) * log_a, log_q + (orders - 1) * log_b)
    return _smaller_cost(holds, moment, orders, independent)


def laplace_max_rdp(votes: ArrayLike, *, scale: float, orders: ArrayLike = ORDERS) -> Floats:
    """Return a bound on the Rényi cost of one noisy max with Laplace noise of `scale`.

    Private; (queries, orders). The moments bound of Papernot et al. 2017 (Thm. 3, with q of
    Lemma 4) divided by its order. It is never above order * e^2 / 2 (Thm. 2) nor e, where
    e = 2 / scale is the pure epsilon of one answer.
    """
    scale = positive(scale=scale)
    counts = as_votes(votes)
    orders = np.asarray(orders, dtype=float)[None, :]
    e = 2 / scale
    gaps = _losing_gaps(counts) / scale
    log_q = np.asarray(logsumexp(np.log(2 + gaps) - np.log(4) - gaps, axis=1))[:, None]
    independent = np.minimum(orders * e**2 / 2, e)
    holds = log_q < -np.logaddexp(0, e)  # q < 1 / (1 + exp(e))
    with np.errstate(all="ignore"):  # values where the condition fails are not used
        log_stay = np.log1p(-np.exp(log_q))
        log_ratio = log_stay - np.log1p(-np.exp(log_q + e))
        moment = np.logaddexp(log_stay + (orders - 1) * log_ratio, log_q + (orders - 1) * e)
    return _smaller_cost(holds, moment, orders, independent)


def gnmax_rdp_exact(
    votes: ArrayLike, *, sigma: float, orders: ArrayLike = ORDERS, both_ways: bool = True
) -> Floats:
    """Return the exact Rényi cost of answering each query by GNMax: (queries, orders), private.

    It is the largest divergence between the distributions of the noisy winner for these votes and
    for votes with one vote moved to another class, and at most order / sigma^2. If `both_ways` is
    False, only the divergence from these votes to the moved votes counts, not the reverse.

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
) -> Floats:
    """Return the exact Rényi cost of the check "highest + N(0, sigma^2) >= threshold".

    Private; (queries, orders). `highest` is the highest vote count of each query. There are two
    outcomes, pass and fail. The highest count of a neighboring data set differs by at most 1, and
    the divergences in both directions grow with the difference.
    """
    sigma = positive(sigma=sigma)
    orders = np.asarray(orders, dtype=float)
    values, index = np.unique(np.asarray(highest, dtype=float), return_inverse=True)
    here = _two_outcomes((values - threshold) / sigma)  # (values, 2)
    costs = []
    for shift in (-1, 1):
        there = _two_outcomes((values + shift - threshold) / sigma)
        costs += [_divergence(here, there, orders), _divergence(there, here, orders)]
    worst = np.max(costs, axis=0)[index.reshape(-1)]
    return np.minimum(worst, orders / (2 * sigma**2))


def winner_log_probabilities(row: ArrayLike, *, sigma: float) -> Floats:
    """Return ln P[class j wins] for each j after N(0, sigma^2) noise on a row of votes; private."""
    return _normalized(_tables(np.asarray(row, dtype=float), sigma)[:, :, 2].sum(axis=1))


def _smaller_cost(holds: Flags, moment: Floats, orders: Floats, independent: Floats) -> Floats:
    """Return the smaller of a data-dependent cost and the cost `independent` of the data.

    `moment` is the log moment of the privacy loss at each Rényi order; divided by order - 1 it is
    the data-dependent cost, which is valid only where `holds` is True.
    """
    with np.errstate(all="ignore"):  # moments whose conditions fail may be NaN
        dependent = np.maximum(moment / (orders - 1), 0.0)
        return np.where(holds & (dependent < independent), dependent, independent)


def _losing_gaps(counts: Indices) -> Floats:
    """Return by how many votes each losing class trails the winner: (queries, classes - 1)."""
    ordered = np.sort(counts, axis=1)
    return (ordered[:, -1:] - ordered[:, :-1]).astype(float)


def _one_query(row: Indices, sigma: float, orders: Floats, both_ways: bool) -> Floats:
    """Return the exact Rényi cost of one query at each order: the largest over all moved votes.

    `row` holds its vote counts, sorted. `both_ways` takes the larger of both divergences.
    """
    if row[-1] - row[0] > 1000 * sigma:  # would need too many nodes; lambda / sigma^2 is valid
        return orders / sigma**2
    tables = _tables(row.astype(float), sigma)
    here = _normalized(tables[:, :, 2].sum(axis=1))
    moved = np.array([_moved(tables, a, b) for a, b in _moves(row)])  # (moves, m)
    here = np.broadcast_to(here, moved.shape)
    cost = _divergence(here, moved, orders).max(axis=0)
    return np.maximum(cost, _divergence(moved, here, orders).max(axis=0)) if both_ways else cost


def _tables(row: Floats, sigma: float) -> Floats:
    """Return ln P[class k stays below class j | noise z of j], in an array (j, k, shift, z).

    `row` holds the votes of one query. At index s of the shift axis, j leads k by s - 2 more votes
    than counted. The entries with k = j hold the log density of z up to a constant. So the sum over
    k is the log of the integrand that gives P[class j wins] when summed over the grid of z.
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


def _moves(row: Indices) -> list[tuple[int, int]]:
    """Return the pairs (a, b) such that one vote may move from class a to class b.

    Of pairs with the same counts only one is returned, because their costs are equal.
    """
    pairs = [(a, b) for a, b in permutations(range(len(row)), 2) if row[a] > 0]
    return list({(int(row[a]), int(row[b])): (a, b) for a, b in pairs}.values())


def _moved(tables: Floats, a: int, b: int) -> Floats:
    """Return ln P[class j wins] for each j after a vote moved from class a to b, from `_tables`."""
    zero = 2
    total = tables[:, :, zero].sum(axis=1)  # (j, z)
    total += tables[:, a, zero + 1] - tables[:, a, zero]
    total += tables[:, b, zero - 1] - tables[:, b, zero]
    loses, gains = tables[a, :, zero - 1], tables[b, :, zero + 1]
    total[a] = loses.sum(axis=0) - loses[b] + tables[a, b, zero - 2]
    total[b] = gains.sum(axis=0) - gains[a] + tables[b, a, zero + 2]
    return _normalized(total)


def _normalized(log_integrand: Floats) -> Floats:
    log_p = np.asarray(logsumexp(log_integrand, axis=-1))
    return log_p - np.asarray(logsumexp(log_p))


def _two_outcomes(standardized: Floats) -> Floats:
    return np.stack([log_ndtr(standardized), log_ndtr(-standardized)], axis=-1)


def _divergence(log_p: Floats, log_q: Floats, orders: Floats) -> Floats:
    """Return the Rényi divergence of P from Q at each order, rounded up: (..., orders).

    `log_p` and `log_q` hold the log probabilities of the outcomes along their last axis.
    """
    # sum p (p/q)^(lambda - 1) - 1 = sum p expm1((lambda - 1) ln(p/q)) keeps tiny values; for large
    # ratios the logs are added first, since p may underflow where its ratio overflows.
    log_p = log_p[..., None]
    ratio = (log_p - log_q[..., None]) * (orders - 1)
    with np.errstate(over="ignore", invalid="ignore"):  # callers cap an infinite divergence
        small = np.exp(log_p) * np.expm1(np.minimum(ratio, 1.0))
        large = np.exp(log_p + ratio) - np.exp(log_p)
    excess = np.where(ratio > 1, large, small).sum(axis=-2)
    return np.log1p(np.maximum(excess, 0.0)) / (orders - 1) + _SLACK
