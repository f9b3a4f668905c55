"""Privacy amplification by shuffling: n persons report, and only the mixed reports are seen.

Each person sends one report of an epsilon_0-local randomizer R. A shuffler removes who sent what.
The guarantee compares two data sets in which one person holds x0 or x1.

**Reduction** (Feldman, McMillan & Talwar 2021, arXiv:2012.12803, and 2023, arXiv:2208.04591).
Write e = e^epsilon_0. There are laws Q0, Q1 with

    R(x0) = (e Q0 + Q1) / (e + 1),   R(x1) = (Q0 + e Q1) / (e + 1),   Q0 + Q1 = R(x0) + R(x1).

Let gamma be such that R(x) >= gamma (Q0 + Q1) / 2 for every value x. Each of the other n - 1
persons is then a "clone" with probability gamma: the report is drawn from Q0 or Q1 by a fair coin.
With C ~ Bin(n - 1, gamma) clones, A ~ Bin(C, 1/2) and D ~ Bernoulli(e / (e + 1)) the mixed reports
are a function of the pair

    P: (A + D, C - A + 1 - D)   against   Q: (A + 1 - D, C - A + D).

**Which gamma.** R(x) >= max(R(x0), R(x1)) / e gives gamma = 1/e for every randomizer (2021). If a
report is likely under at most one value, as in randomized response, R(x) (e + 1) >= R(x0) + R(x1)
and gamma = 2 / (e + 1) (2023). The 2023 paper first stated the latter for all randomizers; its
errata restrict it. Subset selection, unary encoding, hashing and Hadamard response have reports
that are likely under two values and unlikely under a third, so they get gamma = 1/e here.

**Numbers.** With a + b = c + 1 the loss of (a, b) is log((e a + b) / (a + e b)), which depends on
a / (c + 1) alone. More clones never help the observer, so clones are counted in groups at the
smallest number of the group: this errs on the safe side.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.special import betainc, gammaln

from tacit._arrays import Floats
from tacit._bisection import bisected
from tacit._check import in_closed_unit, in_open_unit, non_negative, positive, whole
from tacit.accounting.one_event import pure_epsilon, round_up
from tacit.errors import UnsupportedEvent
from tacit.events import RandomizedResponse, Relation, Shuffled

_GROUPS = 256
"""Groups of numbers of clones; fewer different numbers than that are all kept."""
_SPREAD = 12.0
"""Standard deviations of the number of clones that are finely resolved."""
_MARGIN = 1 + 1e-8
"""Factor on delta, far above the rounding of the incomplete beta function."""


class LocalGuarantee(NamedTuple):
    """Guarantee of one local report, and how well it hides another person's report.

    A "clone" is a report drawn as if its sender held the attacked person's value (Feldman,
    McMillan & Talwar 2021, Hiding Among the Clones).
    """

    epsilon: float
    """Local privacy of one report."""
    clones: float
    """Probability gamma that another person acts as a clone."""


class LossAtoms(NamedTuple):
    """A pair of laws P, Q with finitely many privacy losses log(P / Q), and their masses."""

    losses: Floats
    p: Floats
    q: Floats


def local_guarantee(event: Shuffled) -> LocalGuarantee:
    """Return the guarantee of one report of `event`; raise if a report is not pure epsilon-DP.

    A report protects a person's value, so under every relation its guarantee is the one that holds
    when that value is replaced.
    """
    epsilon = round_up(pure_epsilon(event.event, Relation.REPLACE_ONE))
    if epsilon > 500:
        raise UnsupportedEvent(
            f"shuffled reports of {type(event.event).__name__} have no known price: "
            "each report must be pure DP, with an epsilon of at most 500."
        )
    is_response = isinstance(event.event, RandomizedResponse)
    return LocalGuarantee(epsilon, clone_probability(epsilon, is_response=is_response))


def clone_probability(local_epsilon: float, *, is_response: bool = False) -> float:
    """Return gamma, the probability that a report is a clone: alike for both compared values.

    Parameters
    ----------
    is_response
        True for randomized response and other randomizers with no report that is likely under two
        values (see the module docstring); their gamma is larger.
    """
    if is_response:
        return 2 / (math.exp(local_epsilon) + 1)
    return math.exp(-local_epsilon)


def shuffled_delta(
    local_epsilon: float, n_reports: int, *, epsilon: float, clones: float | None = None
) -> float:
    """Return an upper bound on delta at `epsilon` of `n_reports` shuffled reports.

    Parameters
    ----------
    clones
        Probability gamma that a person's report acts as a clone (see `clone_probability`). None
        takes the gamma that is valid for every local randomizer.

    Examples
    --------
    >>> shuffled_delta(1.0, 10_000, epsilon=0.1) < 1e-5
    True
    """
    local_epsilon = positive(local_epsilon=local_epsilon)
    gamma = _checked_clones(local_epsilon, clones)
    groups = _clone_groups(whole(n_reports=n_reports, least=1), gamma)
    return _delta(local_epsilon, non_negative(epsilon=epsilon), *groups)


def shuffled_epsilon(
    local_epsilon: float, n_reports: int, *, delta: float, clones: float | None = None
) -> float:
    """Return an upper bound on epsilon at `delta` of `n_reports` shuffled reports.

    The result is at most 1e-10 (relative) above the smallest epsilon at which `shuffled_delta` is
    at most `delta`. `clones` is as for `shuffled_delta`.

    >>> round(shuffled_epsilon(1.0, 10_000, delta=1e-6), 3)
    0.053
    """
    local_epsilon, delta = positive(local_epsilon=local_epsilon), in_open_unit(delta=delta)
    gamma = _checked_clones(local_epsilon, clones)
    groups = _clone_groups(whole(n_reports=n_reports, least=1), gamma)
    if _delta(local_epsilon, 0.0, *groups) <= delta:
        return 0.0

    def is_enough(epsilon: float) -> bool:
        return _delta(local_epsilon, epsilon, *groups) <= delta

    # delta is 0 at the local epsilon
    return bisected(is_enough, 0.0, local_epsilon, relative=1e-10)[1]


@lru_cache(maxsize=128)
def shuffled_atoms(local_epsilon: float, n_reports: int, clones: float) -> LossAtoms:
    """Return a pair of laws on a grid of losses that dominates the shuffled reports.

    Each outcome whose loss is between two grid points is moved to these two points, such that its
    masses under both laws are kept. The original outcome is then a random function of the point,
    so the moved pair dominates. The error is of second order in the distance of grid points.
    """
    counts, weights = _clone_groups(n_reports, clones, groups=200)
    grid = _loss_grid(local_epsilon, counts, weights)
    # Cells by group: outcomes of loss in (grid[i], grid[i + 1]] have a above edges[i] (c + 1).
    edges = _fraction_at(local_epsilon, grid)
    edges[0] = 0.5  # exactly
    first = _first_above(edges[None, :], counts[:, None])  # (groups, grid)
    first[:, -1] = counts + 2  # no outcome is beyond the last grid point
    tail, mass = _binomial_tail(first, counts[:, None])
    share = 1 / (1 + math.exp(-local_epsilon))
    p = _cells(weights, tail + share * mass)
    q = _cells(weights, tail + (1 - share) * mass)
    up, down = np.exp(-grid[:-1]), np.exp(-grid[1:])
    to_upper = np.clip((p * up - q) / (up - down), 0.0, p)
    masses = np.zeros(len(grid))
    masses[:-1] += p - to_upper
    masses[1:] += to_upper
    middle = max(1.0 - float(p.sum() + q.sum()), 0.0)  # what is left has a = b and loss 0
    mirrored = masses * np.exp(-grid)
    losses = np.concatenate([-grid[:0:-1], grid])
    p_all = np.concatenate([mirrored[:0:-1], masses])
    q_all = np.concatenate([masses[:0:-1], mirrored])
    center = len(grid) - 1
    p_all[center] += mirrored[0] + middle
    q_all[center] += masses[0] + middle
    kept = (p_all > 0) | (q_all > 0)
    return LossAtoms(losses[kept], p_all[kept], q_all[kept])


def _checked_clones(local_epsilon: float, clones: float | None) -> float:
    if clones is None:
        return clone_probability(local_epsilon)
    return in_closed_unit(clones=clones)


def _clone_groups(n_reports: int, gamma: float, groups: int = _GROUPS) -> tuple[Floats, Floats]:
    """Return representative numbers of clones and their probabilities.

    Each stands for all numbers from itself up to the next one. Fewer clones protect less, so
    counting the smallest number of each group over-charges.
    """
    others = n_reports - 1
    mean = others * gamma
    spread = _SPREAD * math.sqrt(mean) + 50
    low = max(0, math.floor(mean - spread))
    high = min(others, math.ceil(mean + spread))
    counts = np.unique(np.round(np.linspace(low, high, min(groups, high - low + 1))))
    if low > 0:
        # Ever rarer, ever smaller numbers of clones: they matter for Rényi divergences only.
        rare = np.floor(low * (1 - 0.5 ** np.arange(10)))
        counts = np.unique(np.append(rare, counts))
    below = _binomial_cdf(counts - 1, others, gamma)  # probability of fewer clones
    return counts, np.maximum(np.diff(np.append(below, 1.0)), 0.0)


def _binomial_cdf(counts: Floats, trials: int, probability: float) -> Floats:
    """Return the probability that a binomial number Bin(trials, probability) is <= `counts`."""
    inside = (counts >= 0) & (counts < trials)
    safe = np.where(inside, counts, 0)
    with np.errstate(all="ignore"):
        found = betainc(np.maximum(trials - safe, 1), safe + 1, 1 - probability)
    return np.where(inside, found, np.where(counts < 0, 0.0, 1.0))


def _delta(local_epsilon: float, epsilon: float, counts: Floats, weights: Floats) -> float:
    """Return the delta of the shuffled reports at `epsilon`, averaged over the numbers of clones.

    `counts` are numbers of clones, `weights` their probabilities. Given c clones, let a be the
    first count of the pair in the module docstring, k the first a whose loss exceeds `epsilon`, and
    e = exp(local_epsilon). Then delta is P(a >= k) - e^epsilon Q(a >= k), that is
    (1 - e^epsilon) P(A >= k) + (e - e^epsilon) / (e + 1) P(A = k - 1) for A ~ Bin(c, 1/2). Both
    terms are computed with full relative precision.
    """
    if epsilon >= local_epsilon:
        return 0.0
    edge = float(_fraction_at(local_epsilon, np.array(epsilon)))
    tail, mass = _binomial_tail(_first_above(np.array(edge), counts), counts)
    gap = math.exp(epsilon - local_epsilon)
    share = (1 - gap) / (1 + math.exp(-local_epsilon))  # (e - e^epsilon) / (e + 1)
    given = share * mass - math.expm1(epsilon) * tail
    return min(1.0, float(weights @ np.maximum(given, 0.0)) * _MARGIN)


def _fraction_at(local_epsilon: float, loss: Floats) -> Floats:
    """Return the fraction f = a / (a + b) at which an outcome (a, b) has the privacy loss `loss`.

    The loss is log((e f + 1 - f) / (f + e (1 - f))) with e = exp(local_epsilon), so
    f = (1 - e^-(loss + local_epsilon)) / ((1 - 1/e) (1 + e^-loss)), which cannot overflow.
    """
    return np.expm1(-loss - local_epsilon) / (math.expm1(-local_epsilon) * (1 + np.exp(-loss)))


def _first_above(edges: Floats, counts: Floats) -> Floats:
    """Return the smallest whole a with a / (c + 1) above the edge, for c clones (`counts`).

    Edges are fractions below 1. An edge within 2^-53 of 1 is rounded to 1, but a = c + 1 still
    counts as above it.
    """
    return np.minimum(np.floor(edges * (counts + 1)) + 1, counts + 1)


def _binomial_tail(first: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """Return P(A >= first) and P(A = first - 1), A being the heads among `counts` fair coins."""
    first, counts = np.broadcast_arrays(first, counts)
    inside = first <= counts
    k, c = np.where(inside, first, 1.0), np.where(inside, counts, 1.0)
    tail = np.where(inside, betainc(k, c - k + 1, 0.5), 0.0)
    return tail, np.where(first <= counts + 1, _fair_binomial(first - 1, counts), 0.0)


def _fair_binomial(k: Floats, c: Floats) -> Floats:
    """Return the probability of k heads among c fair coins, with full relative precision.

    The method of Loader 2000 is precise even for c = 10^8: Stirling's formula with its error terms,
    and the exponent computed without cancellation.
    """
    k = np.minimum(k, c)
    rest = c - k
    inside = (k > 0) & (rest > 0)
    safe_k, safe_rest = np.where(inside, k, 1.0), np.where(inside, rest, 1.0)
    safe_c = safe_k + safe_rest
    u = (safe_k - safe_rest) / safe_c
    deviance = safe_c / 2 * ((1 + u) * np.log1p(u) + (1 - u) * np.log1p(-u))
    errors = _stirling_error(safe_c) - _stirling_error(safe_k) - _stirling_error(safe_rest)
    scale = np.sqrt(safe_c / (2 * math.pi * safe_k * safe_rest))
    return np.where(inside, scale * np.exp(errors - deviance), np.exp(-c * math.log(2)))


def _stirling_error(n: Floats) -> Floats:
    """Return log(n!) minus Stirling's approximation of it, log(sqrt(2 pi n) (n / e)^n)."""
    small = np.minimum(n, 32.0)
    direct = gammaln(small + 1) - (small + 0.5) * np.log(small) + small - math.log(2 * math.pi) / 2
    inverse = 1 / n
    series = inverse * (1 / 12 - inverse**2 * (1 / 360 - inverse**2 / 1260))
    return np.where(n < 32, direct, series)


def _loss_grid(local_epsilon: float, counts: Floats, weights: Floats, points: int = 800) -> Floats:
    """Return grid points for the loss, from 0 to `local_epsilon`, dense where losses are likely."""
    # The smallest number of clones that matters has the widest losses.
    matters = counts[np.nonzero(np.cumsum(weights) > 1e-12)[0][0]]
    fraction = min(0.5 + _SPREAD / 2 / math.sqrt(matters + 1), 1.0)
    e = math.exp(local_epsilon)
    widest = math.log((e * fraction + 1 - fraction) / (fraction + e * (1 - fraction)))
    if widest >= local_epsilon * (1 - 1e-9):
        return np.linspace(0.0, local_epsilon, points)
    dense = np.linspace(0.0, widest, points)
    rest: Floats = np.geomspace(widest, local_epsilon, points // 4)[1:]
    return np.concatenate([dense, rest])


def _cells(weights: Floats, tails: Floats) -> Floats:
    """Return the mass between grid points; group g has the mass tails[g, i] above point i."""
    return np.maximum(weights @ (tails[:, :-1] - tails[:, 1:]), 0.0)
