"""Order-statistic test: how often are the surest guesses right, if the bill is correct?

The attack guesses "member" for the r canaries with the highest scores. Let the canaries be
independent and alike, and let u be the share of canaries whose score is above the (r + 1)-th
highest one. Given that score, the r guesses are independent, and each is right with probability at
most p(u): a test with false positive rate x and true positive rate y = 1 - f(x) guesses a share
u = (x + y) / 2 of the canaries, and y / (x + y) of these guesses are right. The share u has the law
Beta(r + 1, n - r). So the number of right guesses is at least v with probability at most

    E[ P(Binomial(r, p(U)) >= v) ],    U ~ Beta(r + 1, n - r),

for a mechanism with trade-off curve f. This is the tail of order statistics that Xiang et al. 2025
(arXiv:2509.08704) use for audits in one run. It needs neither a threshold chosen on other scores
nor limits on two error rates, which is why few canaries suffice.
"""

from collections.abc import Callable

import numpy as np
from scipy import special

from tacit._arrays import Flags, Floats

Inverse = Callable[[float], float]
"""Inverse of 1 - f for a trade-off curve f, as in `one_run`."""
_CELLS = 400  # parts of the law of U, each replaced by its end that is worse for the test
_POINTS = np.concatenate([np.geomspace(1e-7, 0.05, 400), np.linspace(0.05, 1.0, 400)[1:]])


def share_right(inverse: Inverse) -> Callable[[Floats], Floats]:
    """Return p(u), rounded up: the largest share of right guesses on a share u of the canaries."""
    wrong = np.array([inverse(float(y)) for y in _POINTS])
    shares, right = (wrong + _POINTS) / 2, _POINTS / np.maximum(wrong + _POINTS, 1e-300)
    # A smaller share can only be surer, so the point below u bounds p(u).
    right = np.minimum.accumulate(right)

    def of(u: Floats) -> Floats:
        places = np.searchsorted(shares, u, side="right") - 1
        return np.where(places < 0, 1.0, right[np.maximum(places, 0)])

    return of


def order_statistic_p(right_of: Callable[[Floats], Floats], n: int, r: int, v: int) -> float:
    """Return a bound on the chance that `v` or more of the `r` surest guesses are right.

    `right_of` is the result of `share_right` for the billed curve; `n` is the number of canaries.
    """
    if v <= 0:
        return 1.0
    low = np.concatenate([[0.0], special.betaincinv(r + 1, n - r, np.arange(1, _CELLS) / _CELLS)])
    p = right_of(low)
    # P[Binomial(r, p) >= v] = I_p(v, r - v + 1)
    return float(np.minimum(1.0, special.betainc(v, r - v + 1, p)).mean())


def right_members(scores: Floats, is_member: Flags, r: int) -> int:
    """Return how many of the `r` highest scores belong to members; ties count against them.

    Among equal scores, non-members are taken first, so that the order of canaries has no effect.
    """
    order = np.lexsort((is_member, -scores))  # by score, then non-members first
    return int(is_member[order[:r]].sum())


def plan_members(
    billed: Callable[[Floats], Floats], quieter: Callable[[Floats], Floats], n: int
) -> int:
    """Return the number of guesses that is best at telling the billed curve from a quieter one.

    Both are results of `share_right`. The number depends on public facts alone, so any scores may
    be tested with it.
    """
    candidates = np.unique(np.geomspace(min(8, n // 2), max(n // 2, 2), 40).astype(int))
    values = []
    for r in candidates.tolist():
        expected = int(r * float(billed(np.array([r / n]))[0]))
        values.append(order_statistic_p(quieter, n, r, expected))
    return int(candidates[int(np.argmin(values))])
