"""The statistics under the bounds: when do counts of right and wrong guesses refute a guarantee?

Everything here is a pure function of counts. Proofs are given where they are short.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from scipy import special

Inverse = Callable[[float], float]
"""Inverse blow-up of a trade-off curve f: the least wrong rate x with 1 - f(x) >= a right rate."""


def one_run_p_value(n: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """Chance of `v` or more right among `r` guesses on `n` canaries under (epsilon, delta)-DP.

    At most that: Steinke, Nasr & Jagielski 2023 (arXiv:2305.08846), Theorem 5.2.
    """
    right = special.expit(epsilon)  # the best accuracy that pure epsilon-DP allows a single guess
    if v == 0:
        return 1.0
    tail = float(special.betainc(v, r - v + 1, right))  # P[Bin(r, right) >= v]
    if delta == 0:
        return tail
    k = np.arange(v - 1, -1, -1)
    ways = special.gammaln(r + 1) - special.gammaln(k + 1) - special.gammaln(r - k + 1)
    log_pmf = ways + k * special.log_expit(epsilon) + (r - k) * special.log_expit(-epsilon)
    below = np.cumsum(np.exp(log_pmf))
    slack = float((below / np.arange(1, v + 1)).max())
    return min(tail + 2 * n * delta * slack, 1.0)


def rejects_tradeoff(inverse: Inverse, n: int, r: int, v: int, significance: float) -> bool:
    """Whether `v` right of `r` guesses on `n` canaries refute a trade-off curve f.

    Mahloujifar, Melis & Chaudhuri 2024 (arXiv:2410.22235), Algorithm 3. Why it holds: fix canary j,
    and let C' count the right guesses on the others. f-DP bounds P[j right, C' >= k-1] by
    1 - f(P[j wrong, C' >= k-1]), for either coin. Average over j and the coins (1 - f is concave):
    E[C; C >= k] / n <= 1 - f(E[r - C; C >= k-1] / n) for every k. If C >= v had probability
    `significance`, these would force, from k = v down, more total probability than one.
    """
    right, wrong = significance * v / n, significance * (r - v) / n
    for i in range(v - 1, -1, -1):
        grown = inverse(right)
        if grown <= wrong:  # a fixed point: every later step repeats it
            break
        right += i / (r - i) * (grown - wrong)
        wrong = grown
        if right + wrong > r / n:
            return True
    return right + wrong > r / n


def rejects_rates(inverse: Inverse, false_positive: float, false_negative: float) -> bool:
    """Whether a test with error rates at most these refutes a (symmetric) trade-off curve."""
    return inverse(1 - false_negative) > false_positive or (
        inverse(1 - false_positive) > false_negative
    )


def gaussian_inverse(mu: float) -> Inverse:
    """Inverse blow-up of mu-GDP: Phi(Phi^-1(y) - mu)."""
    return lambda y: float(special.ndtr(special.ndtri(min(y, 1.0)) - mu))


def profile_inverse(epsilons: np.ndarray, deltas: np.ndarray) -> Inverse:
    """Inverse blow-up from any points (epsilon, delta) that a mechanism satisfies.

    At each point 1 - f(x) <= e^epsilon x + delta, and, because f is symmetric, also
    1 - f(x) <= 1 - e^-epsilon (1 - delta - x): two lines, each to be solved for x. More points only
    sharpen the curve, and a larger delta is safe.
    """
    slopes = np.exp(np.concatenate([-epsilons, epsilons]))
    offsets = np.concatenate([-deltas * np.exp(-epsilons), 1 - deltas - np.exp(epsilons)])
    return lambda y: max(0.0, float((slopes * y + offsets).max()))


@lru_cache(maxsize=4096)
def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of mu-GDP at `delta` (Dong, Roth & Su 2022, Cor. 2.13), rounded down."""
    if mu <= 0:
        return 0.0

    def is_below(epsilon: float) -> bool:
        second = math.exp(epsilon + special.log_ndtr(-mu / 2 - epsilon / mu))
        return float(special.ndtr(mu / 2 - epsilon / mu)) - second > delta

    return largest(is_below)


@lru_cache(maxsize=256)
def gaussian_mu(epsilon: float, delta: float) -> float:
    """The mu whose epsilon at `delta` is `epsilon`: inverse of `gaussian_epsilon`."""
    return largest(lambda mu: gaussian_epsilon(mu, delta) < epsilon)


def upper_rate(errors: int, trials: int, share: float) -> float:
    """Clopper-Pearson upper limit on an error rate, wrong with probability at most `share`."""
    if trials == 0 or errors == trials:
        return 1.0
    return float(special.betaincinv(errors + 1, trials - errors, 1 - share))


def largest(is_below: Callable[[float], bool], *, at_least: float = 0.0) -> float:
    """Largest value that is still below, rounded down; `at_least` if none above it is."""
    low, step = at_least, max(1.0, at_least)
    if not is_below(low):
        return low
    while is_below(low + step):
        low, step = low + step, 2 * step
        if low > 1e4:
            return low
    high = low + step
    while high - low > 1e-6 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low
