"""Smooth sensitivity: a data-dependent cost of PATE that may be published, with Gaussian noise.

The Rényi cost of answered queries at one order, R(D), depends on the votes. Its change between
neighbors is bounded by a beta-smooth function S(D) of the votes, and R + S * noise_multiplier *
(Z + margin) with Z standard normal is itself private at a price that does not depend on the data
(2018, arXiv:1802.08908, App. B and Thm. 23; Nissim, Raskhodnikova & Smith 2007).

This file differs from the paper in three places, each for a shorter proof:

* **Monotone by construction.** Thm. 6 holds for every upper bound of q. The cost of a query is
  therefore taken as the smallest over all larger q on a fixed grid: a step function that can only
  fall as the votes agree more, whatever the formula does between. No condition needs to be checked
  at run time.
* **Exact price of the noise.** The Rényi divergence of the two Gaussians is evaluated at its worst
  case (`release_curve`). At orders below 1 / (4 beta) it is as little as half of Thm. 23's bound.
  Close to 1 / (2 beta) it is above that bound: there the theorem's constant is too small, and is
  not used.
* **Margin.** Shifting the release up by `margin` noise standard deviations makes it an upper bound
  of R except with probability Phi(-margin). The shift changes with S, so it is charged for: R +
  margin * noise_multiplier * S changes by at most (1 + margin * noise_multiplier *
  (e^beta - 1)) * S, which is beta-smooth again.

Why one record changes the cost so little. Let a query's *gap* be the number of votes that, if every
loser trailed the winner by it, would give the query's q: q = (m - 1) P[N(0, 2 sigma^2) > gap].
Moving one vote changes each loser's distance from the winner by at most 2, and
y -> P[N > P^-1(y) - c] is concave, so by Jensen q grows at most as if all distances shrank by 2.
In the other direction, q falls at most as if all grew by 2. (If the winner changes, q by the new
winner is below q by the old one.) So one teacher changes a query's gap by at most 2.
"""

import math
from dataclasses import dataclass

import numpy as np
from _pate_costs import ORDERS, has_label, log_sum_of_upsets, rdp_from_log_q
from numpy.typing import ArrayLike
from scipy.special import log_ndtr, ndtri_exp

from tacit._arrays import Floats, Indices
from tacit._check import non_negative, positive
from tacit.accounting import RDP
from tacit.events import RenyiCurve
from tacit.ledger import Ledger
from tacit.mechanisms import Seed, rounded_normal
from tacit.pate import Aggregator, ConfidentGNMax, GNMax
from tacit.pate.votes import as_votes

_CELLS = 40  # grid cells in a gap of 2 votes
_MOVE = _CELLS + 1  # most cells by which one moved vote shifts a query; one more than in exact
# arithmetic, because a gap on the edge of a cell may be rounded to either side


@dataclass(frozen=True, kw_only=True)
class Sanitizer:
    """Mechanism that releases the votes-dependent Rényi cost of GNMax answers, with noise.

    Choose its settings before seeing votes.

    Parameters
    ----------
    order
        Rényi order of the released cost; must be below 1 / (1 - exp(-2 beta)).
    beta
        Smoothness: the log of the noise scale changes by at most this between neighbors.
    noise_multiplier
        Noise in units of the smooth sensitivity.
    margin
        Standard deviations by which the release is shifted up. At 1.645 the release is below the
        true cost with probability 5 %; at 0 it is centered on the true cost, as in the paper.
    """

    order: float = 14.0
    beta: float = 0.02
    noise_multiplier: float = 8.0
    margin: float = 1.645

    def __post_init__(self) -> None:
        positive(beta=self.beta)
        positive(noise_multiplier=self.noise_multiplier)
        non_negative(margin=self.margin)
        highest = 1 / -math.expm1(-2 * self.beta)
        if not 1 < self.order < highest:
            raise ValueError(
                f"order must be above 1 and below {highest:.4g} at beta {self.beta}, "
                f"got {self.order}. A smaller beta allows higher orders."
            )

    @property
    def event(self) -> RenyiCurve:
        """Event of publishing the sanitized cost; it does not depend on the votes."""
        curve = self._curve(ORDERS)
        known = np.isfinite(curve)
        # One record changes one teacher under every relation, so replacing costs no more.
        return RenyiCurve(tuple(ORDERS[known]), tuple(curve[known]), replace_factor=1.0)

    @property
    def publishing_cost(self) -> float:
        """Rényi cost at `order` of publishing the sanitized cost."""
        return float(self._curve(np.array([self.order]))[0])

    def _curve(self, orders: Floats) -> Floats:
        # The margin changes with the smooth sensitivity, so less of the noise hides the cost.
        moved = 1 + self.margin * self.noise_multiplier * math.expm1(self.beta)
        return release_curve(orders, beta=self.beta, noise_multiplier=self.noise_multiplier / moved)

    @property
    def failure_probability(self) -> float:
        """Probability that the release is below the true cost."""
        return math.exp(log_ndtr(-self.margin))

    def release(self, votes: ArrayLike, *, sigma: float, rng: Seed = None) -> float:
        """Return the noisy Rényi cost, at `order`, of answering all queries in `votes` by GNMax.

        `sigma` is the noise of GNMax. Pay for `event` first. The result is clipped to the public
        range from 0 to the data-independent cost. Before that, the real number cost + noise is
        rounded to a multiple of a public step, about 2^-40 of that range; the noise scale is
        private, so no step can be derived from it.
        """
        gaps, n_classes, n_teachers = equivalent_gaps(votes, sigma=sigma)
        if not len(gaps):
            return 0.0
        costs = self._costs(n_teachers, n_classes, sigma)
        cells = _cells(gaps, len(costs))
        scale = self.noise_multiplier * self._smooth_sensitivity(costs, cells, n_teachers)
        highest = len(gaps) * self.order / sigma**2
        step = math.ldexp(1.0, math.frexp(highest)[1] - 40)
        center = float(costs[cells].sum() + scale * self.margin)
        noisy = rounded_normal(scale, step=step, center=center, rng=rng)[0]
        return float(np.clip(noisy, 0.0, highest))

    def _costs(self, n_teachers: int, n_classes: int, sigma: float) -> Floats:
        """Return the Rényi cost at `order` of a query, for each cell of a grid of gaps.

        The gap is how clearly the winner leads, in votes (see `equivalent_gaps`). A cell has the
        cost of its smallest gap. Costs never rise from one cell to the next.
        """
        gaps = np.arange(n_teachers * _CELLS // 2 + 1) * (2 / _CELLS)
        log_q = math.log(n_classes - 1) + log_ndtr(-gaps / (math.sqrt(2) * sigma))
        log_q = np.minimum(log_q, math.log1p(-1 / n_classes))
        bound = rdp_from_log_q(log_q, sigma=sigma, orders=[self.order])[:, 0]
        return np.minimum.accumulate(bound)

    def _smooth_sensitivity(self, costs: Floats, cells: Indices, n_teachers: int) -> float:
        """Return the smooth sensitivity of the total cost of queries whose gaps are in `cells`.

        It is the maximum over d of exp(-beta d) times the largest change that one teacher can cause
        after the votes of d teachers were changed. `costs` holds the cost of each cell.
        """
        # A moved vote shifts a query's cell by at most _MOVE, so the cost changes by at most
        # costs[k - _MOVE] - costs[k], where k is the higher of the two cells.
        drop = costs[np.maximum(np.arange(len(costs)) - _MOVE, 0)] - costs
        worst = _window_max(drop)  # 0 teachers away: cells k to k + _MOVE
        best = 0.0
        for distance in range(n_teachers + 1):
            best = max(best, math.exp(-self.beta * distance) * float(worst[cells].sum()))
            worst = _widened(worst)
        return best


@dataclass(frozen=True)
class SanitizedCost:
    """Data-dependent Rényi cost of a PATE run, at one order, that may be published.

    `checks` is the data-independent cost of the threshold checks, and `carried` that of answers
    whose votes are no longer available. `answers` is the noisy cost of all other answers, and
    `publishing` the price of publishing `answers`. With probability `confidence`, the sum of these
    four is at least the papers' data-dependent cost. The papers' cost holds for this data set and
    its neighbors only, so it is no guarantee of differential privacy, and no budget is charged with
    it. The ledger is charged with the data-independent events.
    """

    order: float
    checks: float
    answers: float
    publishing: float
    confidence: float
    carried: float = 0.0

    def epsilon(self, *, delta: float) -> float:
        """Return epsilon at `delta` of the whole run: checks, answers and publishing the cost."""
        total = self.checks + self.carried + self.answers + self.publishing
        return RDP().epsilon(RenyiCurve((self.order,), (total,)), delta=delta)


def publish_cost(
    aggregator: Aggregator,
    votes: ArrayLike,
    labels: ArrayLike,
    *,
    sanitizer: Sanitizer,
    ledger: Ledger | None = None,
    rng: Seed = None,
    carried: ArrayLike = (),
    by_user: bool = False,
) -> SanitizedCost:
    """Pay for publishing the privacy cost of `labels` given the votes, and return it with noise.

    The threshold checks of Confident-GNMax are counted at their data-independent cost, from which
    the data-dependent cost hardly differs. The queries numbered in `carried` are also counted so:
    other teachers answered them in an earlier, killed run, so `votes` do not determine their cost.
    """
    counts = as_votes(votes)
    answered = has_label(labels, len(counts))
    own = answered.copy()
    own[np.asarray(carried, dtype=np.int64)] = False
    if isinstance(aggregator, ConfidentGNMax):
        sigma = aggregator.sigma_answer
        checks = len(counts) * sanitizer.order / (2 * aggregator.sigma_threshold**2)
    elif isinstance(aggregator, GNMax):
        sigma, checks = aggregator.sigma, 0.0
    else:
        raise TypeError(f"no sanitized cost is known for {type(aggregator).__name__}. Use GNMax.")
    if ledger is not None:
        ledger.require_unit(is_user=by_user)  # as for the answers
        ledger.spend(sanitizer.event, note="PATE: publish the data-dependent cost")
    answers = sanitizer.release(counts[own], sigma=sigma, rng=rng)
    return SanitizedCost(
        order=sanitizer.order,
        checks=checks,
        answers=answers,
        publishing=sanitizer.publishing_cost,
        confidence=1 - sanitizer.failure_probability,
        carried=int(np.sum(answered & ~own)) * sanitizer.order / sigma**2,
    )


def release_curve(orders: ArrayLike, *, beta: float, noise_multiplier: float) -> Floats:
    """Return the Rényi cost, at each order, of releasing f + S * noise_multiplier * N(0, 1).

    f is a private number, and S a beta-smooth bound on its change between neighboring data sets.
    Let s = S * noise_multiplier, and r the ratio of a neighbor's s to it. The cost is the largest
    divergence of N(f, s^2) from N(f', (r s)^2) over |f - f'| <= min(1, r) s / noise_multiplier and
    |ln r| <= beta. As r falls below 1, both the term in f and the term in ln r grow; above 1 both
    are smaller than at 1 / r. So r = exp(-beta) is the worst. The cost is infinite at orders >=
    1 / (1 - exp(-2 beta)).
    """
    orders = np.asarray(orders, dtype=float)
    remaining = 1 + orders * math.expm1(-2 * beta)
    with np.errstate(all="ignore"):  # orders out of range are overwritten
        shift = orders * math.exp(-2 * beta) / (2 * noise_multiplier**2 * remaining)
        spread = (-beta * orders - np.log(remaining) / 2) / (orders - 1)
    return np.where(remaining > 0, shift + spread, np.inf)


def equivalent_gaps(votes: ArrayLike, *, sigma: float) -> tuple[Floats, int, int]:
    """Return the private gap of each query, the number of classes and the number of teachers.

    Let q bound the chance that noise of GNMax changes the winner of a query. The gap of the query
    is the number of votes which, if every loser trailed the winner by it, would give the same q.
    """
    counts = as_votes(votes)
    if not len(counts):
        return np.empty(0), counts.shape[1], 0
    log_q = log_sum_of_upsets(counts, sigma=sigma)
    shared = -math.sqrt(2) * sigma * ndtri_exp(log_q - math.log(counts.shape[1] - 1))
    return np.maximum(shared, 0.0), counts.shape[1], int(counts[0].sum())


def _cells(gaps: Floats, size: int) -> Indices:
    """Return the index of the cell that contains each gap, on a grid of `size` cells."""
    return np.minimum((gaps * (_CELLS / 2)).astype(np.int64), size - 1)


def _window_max(values: Floats) -> Floats:
    """Return, for each cell k, the largest value in cells k to k + _MOVE, one vote away."""
    padded = np.concatenate([values, np.zeros(_MOVE)])
    return np.lib.stride_tricks.sliding_window_view(padded, _MOVE + 1).max(axis=1)


def _widened(worst: Floats) -> Floats:
    """Return the maxima `worst` over windows of cells that are wider by one more moved vote.

    The new value of a cell is the largest of `worst` at the cell and at _MOVE cells below and above
    it. Each value is already the maximum over a window of _MOVE + 1 cells or more, so the three
    windows join without a gap.
    """
    index = np.arange(len(worst))
    below = worst[np.maximum(index - _MOVE, 0)]
    above = worst[np.minimum(index + _MOVE, len(worst) - 1)]
    return np.maximum(worst, np.maximum(below, above))
