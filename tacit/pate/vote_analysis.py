"""What PATE's answers cost: bounds that hold for all votes, and bounds that use the votes at hand.

A bound that uses the votes is **private**: it says how far the teachers agreed, which nothing has
paid for. Functions here that take votes return private arrays; `PrivateCurve` carries their sum and
shows nothing of it unless asked by name. What may be published instead is in `tacit.pate.smooth_sensitivity`.
A ledger is never charged with these numbers: they bound the divergence of this data set's outcome
from its neighbors', not that of every data set from every neighbor.

In formulas, as in the papers: n_j votes for class j, m classes, q the chance that noise changes the
winner, lambda a Rényi order. Sources: Papernot et al. 2017 (arXiv:1610.05755, "2017") and
Papernot et al. 2018 (arXiv:1802.08908, "2018").
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_ndtr, logsumexp

from tacit._check import in_open_unit, positive
from tacit.accounting import RDP
from tacit.events import RenyiCurve

FloatArray = NDArray[np.float64]

ORDERS: FloatArray = np.concatenate(
    [np.arange(1.25, 10, 0.25), np.arange(10, 64, 1.0), np.geomspace(64, 2048, 60)]
)
"""Rényi orders used when none are given; any set is valid, more can only lower epsilon."""


@dataclass(frozen=True)
class PrivateCurve:
    """A Rényi curve worked out from votes: **private**, never to be published or logged.

    Adding two curves composes them. `repr` shows no number, and there is no way to JSON.
    """

    orders: FloatArray = field(repr=False)
    values: FloatArray = field(repr=False)

    def private_epsilon(self, *, delta: float) -> float:
        """Epsilon of this data set at `delta`: a **private** number, for its keeper's eyes only.

        The smallest that the curve implies by Canonne, Kamath & Steinke 2020, Prop. 12.
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


def as_votes(votes: ArrayLike, *, n_teachers: int | None = None) -> NDArray[np.int64]:
    """`votes` checked as (queries, classes) whole counts whose rows add up to one number.

    Messages name the rule and never a count, since counts are private.
    """
    array = np.asarray(votes)
    if array.ndim != 2 or array.shape[1] < 2:
        raise ValueError(
            f"votes must have shape (queries, classes) with >= 2 classes, got {array.shape}."
        )
    if array.dtype.kind not in "iuf":
        raise TypeError(f"votes must be whole numbers, got dtype {array.dtype}.")
    if not np.all(np.isfinite(array)) or np.any(array < 0) or np.any(array != np.round(array)):
        raise ValueError("votes must be whole numbers >= 0: how many teachers chose each class.")
    counts = array.astype(np.int64)
    totals = counts.sum(axis=1)
    expected = n_teachers if n_teachers is not None else (totals[0] if len(totals) else 0)
    if np.any(totals != expected) or (len(totals) and expected < 1):
        raise ValueError(
            "votes of every query must add up to the number of teachers: each teacher votes once."
        )
    return counts


def log_wrong_winner(votes: ArrayLike, *, sigma: float) -> FloatArray:
    """ln q for each query: q bounds the chance that N(0, sigma^2) noise changes the winner.

    Private. q = sum over losers of P[N(0, 2 sigma^2) > n_win - n_j] (2018, Prop. 7), and never
    above 1 - 1/m, since the true winner is the likeliest of m outcomes.

    >>> bool(np.exp(log_wrong_winner([[240, 5, 5]], sigma=40.0))[0] < 1e-4)
    True
    """
    counts = as_votes(votes)
    gaps = _losing_gaps(counts)  # (queries, m - 1)
    log_q = np.asarray(logsumexp(log_ndtr(-gaps / (np.sqrt(2) * sigma)), axis=1))
    return np.minimum(log_q, np.log1p(-1 / counts.shape[1]))


def gnmax_rdp(votes: ArrayLike, *, sigma: float, orders: ArrayLike = ORDERS) -> FloatArray:
    """Rényi cost of one GNMax answer for each query: (queries, orders), private.

    Data-dependent bound of 2018 (Thm. 6 with q of Prop. 7 and the orders of Prop. 10), never above
    the data-independent lambda / sigma^2 (Prop. 8).
    """
    sigma = positive(sigma=sigma)
    return rdp_from_log_q(log_wrong_winner(votes, sigma=sigma), sigma=sigma, orders=orders)


def threshold_rdp(
    highest: ArrayLike, *, threshold: float, sigma: float, orders: ArrayLike = ORDERS
) -> FloatArray:
    """Rényi cost of the check "highest count + N(0, sigma^2) >= threshold": (queries, orders).

    Private; `highest` is the highest count of each query. A check is a choice between two outcomes
    by a Gaussian of sensitivity 1 instead of sqrt(2), so 2018's Thm. 6 applies with
    sqrt(2) * sigma and q the probability of the rarer outcome.
    """
    sigma = positive(sigma=sigma)
    log_pass = log_pass_probability(highest, threshold=threshold, sigma=sigma)
    log_fail = log_ndtr((threshold - np.asarray(highest, dtype=float)) / sigma)
    return rdp_from_log_q(np.minimum(log_pass, log_fail), sigma=np.sqrt(2) * sigma, orders=orders)


def log_pass_probability(highest: ArrayLike, *, threshold: float, sigma: float) -> FloatArray:
    """ln of the chance that each query passes the threshold check; private."""
    return log_ndtr((np.asarray(highest, dtype=float) - threshold) / sigma)


def rdp_from_log_q(log_q: ArrayLike, *, sigma: float, orders: ArrayLike = ORDERS) -> FloatArray:
    """Rényi cost of a GNMax answer whose wrong-winner probability is at most q: (queries, orders).

    2018, Thm. 6, with mu_2 = sigma sqrt(ln 1/q) and mu_1 = mu_2 + 1 (Prop. 10); where its
    conditions fail, and wherever it is smaller, lambda / sigma^2 stands.
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
        dependent = np.maximum(moment / (orders - 1), 0.0)
    return np.where(holds & (dependent < independent), dependent, independent)


def laplace_max_rdp(votes: ArrayLike, *, scale: float, orders: ArrayLike = ORDERS) -> FloatArray:
    """Rényi cost of one noisy max with Laplace noise of `scale`: (queries, orders), private.

    The moments bound of 2017 (Thm. 3, with q of Lemma 4) divided by its order, never above
    lambda e^2 / 2 (Thm. 2) nor e, where e = 2 / scale is the pure epsilon of one answer.
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
        dependent = np.maximum(moment / (orders - 1), 0.0)
    return np.where(holds & (dependent < independent), dependent, independent)


def _losing_gaps(counts: NDArray[np.int64]) -> FloatArray:
    """Votes by which each loser trails the winner: (queries, m - 1)."""
    ordered = np.sort(counts, axis=1)
    return (ordered[:, -1:] - ordered[:, :-1]).astype(float)
