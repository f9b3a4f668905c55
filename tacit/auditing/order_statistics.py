"""Order-statistic test: do members score above the highest scores of the others too often?

Canaries that are in the training set are members. Scores of all the others, `n_out` of them, are
independent and have one law; ties are broken at random. Some of these scores serve as thresholds:
those at given places in their order, the highest first. Let X_k be the chance that such a score is
above the threshold at place j_k. Whatever the law of the scores, (X_1, X_2, ...) has the law of
order statistics of `n_out` uniform numbers. Given the thresholds, each member is above the k-th
with a probability of at most 1 - f(X_k), for a mechanism with trade-off curve f, independently of
other members. So a member's score can be coupled with one that has these probabilities exactly and
is never lower, and a weighted count of members above thresholds, with weights >= 0, is at most that
of the coupled scores. The p-value is the chance that those reach the observed count. It is
estimated by simulation and rounded up by three standard errors.

Order statistics for audits in one run are from Xiang et al. 2025 (arXiv:2509.08704), who rank
members and others together. Thresholds from the others alone have two advantages: members need not
be alike, and scores of *references*, which were never candidates for the training set, make the
thresholds as precise as one likes. They cost no training: for Dirac canaries a reference is one
more coordinate of noise.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import linalg, optimize

from tacit._arrays import Flags, Floats, Indices

Power = Callable[[Floats], Floats]
"""1 - f for a trade-off curve f: the largest true positive rate at each false positive rate."""
_PLACES = 40  # thresholds
_BLOCK, _MOST_AUDITS = 1000, 10_000  # simulated audits, at a time and in all
_SEED = 20_000_003  # of the simulation, which uses no score


class OrderStatisticTest(NamedTuple):
    """A test of scores, with thresholds and weights that public facts fix."""

    n_in: int
    n_out: int
    places: Indices
    weights: Floats
    above: Indices  # members above each threshold

    @classmethod
    def plan(
        cls, expected: Power, other: Power, scores: Floats, is_member: Flags
    ) -> "OrderStatisticTest":
        """Return the test that is best at telling the curve `expected` from the curve `other`."""
        n_in = int(is_member.sum())
        n_out = len(is_member) - n_in
        if n_in == 0 or n_out == 0:
            raise ValueError("the test needs scores of canaries in and out of the training set.")
        places = np.unique(np.geomspace(1, n_out, _PLACES).astype(int))
        weights = best_weights(expected, other, places / (n_out + 1), n_in=n_in, n_out=n_out)
        kept = weights > 0
        above = members_above(scores, is_member, places[kept])
        return cls(n_in, n_out, places[kept], weights[kept], above)

    def p_value(self, power: Power, *, level: float) -> float:
        """Return the p-value of the hypothesis that an attack has at most this `power`.

        It is the share of simulated audits in which the weighted count reaches the observed one.
        The simulation ends as soon as the p-value is clearly above or below `level`.

        >>> test = OrderStatisticTest(3, 3, np.array([1]), np.ones(1), np.array([3]))
        >>> 0.05 < test.p_value(lambda rates: rates, level=0.05) < 0.06   # 1 / 20 without a leak
        True
        """
        random, reached, audits = np.random.default_rng(_SEED), 0, 0
        observed = float(self.weights @ self.above) * (1 - 1e-12)
        while audits < _MOST_AUDITS:
            reached += int((self._counts(power, random) >= observed).sum())
            audits += _BLOCK
            if abs(reached - level * audits) > 4 * math.sqrt(reached + 1):
                break
        return min(1.0, (1 + reached + 3 * math.sqrt(reached)) / (audits + 1))

    def _counts(self, power: Power, random: np.random.Generator) -> Floats:
        """Return the weighted counts of simulated audits."""
        gaps = np.diff(self.places, prepend=0, append=self.n_out + 1)
        spacings = random.gamma(gaps, size=(_BLOCK, len(gaps)))
        rates = np.cumsum(spacings[:, :-1], axis=1) / spacings.sum(axis=1, keepdims=True)
        total, above, last = np.zeros(_BLOCK), np.zeros(_BLOCK, np.int64), np.zeros(_BLOCK)
        for chance, weight in zip(power(rates).T, self.weights, strict=True):
            share = (chance - last) / np.maximum(1 - last, 1e-300)
            above += random.binomial(self.n_in - above, np.clip(share, 0.0, 1.0))
            total += weight * above
            last = chance
        return total

    @property
    def main(self) -> int:
        """Index of the threshold that contributes most to the weighted count."""
        return int(np.argmax(self.weights * self.above))


def members_above(scores: Floats, is_member: Flags, places: Indices) -> Indices:
    """Return how many members score above the scores at `places` among those of the others.

    Place 1 is the highest. Equal scores are ordered by one fixed shuffle, which knows nothing about
    membership.
    """
    shuffled = np.random.default_rng(0).permutation(len(scores))
    order = np.lexsort((shuffled, -scores))  # the highest score first
    thresholds = np.flatnonzero(~is_member[order])[places - 1]
    return thresholds - (places - 1)


def best_weights(expected: Power, other: Power, rates: Floats, *, n_in: int, n_out: int) -> Floats:
    """Return weights >= 0 of thresholds at false positive `rates` that tell two curves apart best.

    They maximize the difference of the expected counts, divided by the standard deviation that the
    weighted count has under the curve `other`: of members above fixed thresholds (binomial), and of
    the thresholds themselves, times the slope of the curve.
    """
    y, step = other(rates), 1e-3 * np.minimum(rates, 1 - rates)
    slopes = (other(rates + step) - other(rates - step)) / (2 * step)
    members, thresholds = (np.minimum.outer(p, p) - np.outer(p, p) for p in (y, rates))
    spread = n_in * members + (n_in**2 / n_out) * np.outer(slopes, slopes) * thresholds
    spread += np.diag(1e-6 * np.diag(spread) + 1e-9 * np.trace(spread))
    root = np.linalg.cholesky(spread)
    gain = linalg.solve_triangular(root, n_in * (expected(rates) - y), lower=True)
    weights = optimize.nnls(root.T, gain)[0]
    return weights / weights.max() if weights.max() > 0 else np.ones(len(rates))
