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


def noncentral_t_tail(t: float, freedom: int, center: float) -> float:
    """P[T >= t] for T = (Z + center) / S, Z standard normal, freedom S^2 chi-squared.

    That is E[Phi(center - t S)], by 400 Gauss-Legendre points over all but 1e-15 of the law of S:
    accurate at the large centers (hundreds) where series for this law do not converge.

    >>> round(noncentral_t_tail(2.0, 10, 1.0), 6)
    0.192388
    """
    half = freedom / 2
    low, high = (math.sqrt(special.gammaincinv(half, p) / half) for p in (5e-16, 1 - 5e-16))
    nodes, weights = _legendre(400)
    s = low + (high - low) * (nodes + 1) / 2
    # Density of S: 2 half^half s^(freedom - 1) e^(-half s^2) / Gamma(half).
    log_density = math.log(2) + half * math.log(half) - special.gammaln(half)
    log_density = log_density + (freedom - 1) * np.log(s) - half * s**2
    mass = weights * np.exp(log_density - log_density.max())
    return float((mass * special.ndtr(center - t * s)).sum() / mass.sum())


@lru_cache(maxsize=1)
def _legendre(n: int) -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(n)


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
