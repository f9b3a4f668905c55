"""Rényi divergences of random allocation: a record joins one of `steps` Gaussian releases.

Feldman & Shenfeld 2025 (arXiv:2502.08202) show that one epoch is dominated by the pair

    P = average over i of N(shift * e_i, I),    Q = N(0, I)    in `steps` dimensions,

so with X_i = exp(shift * z_i - shift^2 / 2), z_i independent normal, and A the mean of the X_i:
removal costs log E[A^order] / (order - 1), addition log E[A^(1 - order)] / (order - 1). Both are
computed here without loss of digits. The formulas are new; each is proved where it is used.
"""

import math
from functools import lru_cache

import numpy as np
from scipy import special

from tacit._arrays import Floats
from tacit.accounting.one_event import log_sum_exp
from tacit.accounting.rdp.divergence import TAIL, excess_exp, poisson_divergence

_REACH = 90.0  # end of the grid for additions; it serves orders up to about 4000
_LARGEST_SHIFT = 6.0  # larger shifts (noise multipliers below 1/6) get the closed bounds only
_TOP = 128
"""Largest order whose removal moment is computed exactly; above it, Poisson sampling bounds it."""


def removal_divergence(orders: Floats, *, steps: int, shift: float) -> Floats:
    """Return the Rényi divergence of one epoch if a record is removed.

    It is log E[A^order] / (order - 1), where A is the likelihood ratio in the module docstring. The
    result is exact at whole orders up to 128, and an upper bound elsewhere.
    """
    # Between whole orders, (order - 1) times the divergence is convex, so its chord bounds it.
    low = np.maximum(np.floor(orders), 1.0)
    share = orders - low
    at_low, at_high = (_log_removal_moments(n, steps, shift) for n in (low, np.ceil(orders)))
    chord = np.where(share == 0, at_low, (1 - share) * at_low + share * at_high) / (orders - 1)
    return np.minimum(chord, orders * shift**2 / 2)


def addition_divergence(orders: Floats, *, steps: int, shift: float) -> Floats:
    """Return the Rényi divergence of one epoch if a record is added, exact to orders of about 4000.

    It is log E[A^(1 - order)] / (order - 1), where A, the mean of the X_i, is the likelihood ratio.
    With s = order - 1 and U drawn from Gamma(s): E[A^-s] = E[exp(-U (A - 1))], since the integral
    of u^(s-1) exp(-u A) is Gamma(s) A^-s. The X_i are independent, so this is E[exp(steps *
    k(U / steps))] with k(w) = log E[exp(-w (X - 1))] >= 0: a one-dimensional integral. For
    larger orders, A >= (product of the X_i)^(1 / steps) gives (order + steps - 1) shift^2 /
    (2 steps), and the unsampled bound always holds.
    """
    bound = np.minimum((orders + steps - 1) / steps, orders) * shift**2 / 2
    if shift > _LARGEST_SHIFT:
        return bound
    for grid, serves in ((_root_grid, orders <= _REACH**2 / 2), (_log_grid, orders <= 64)):
        power = orders[serves] - 1
        log_u, log_weight = grid(steps, shift)
        logs = np.multiply.outer(power, log_u) + log_weight
        complete = logs[:, -1] < logs.max(axis=1, initial=-np.inf) - 50  # no weight lies beyond
        moment = log_sum_exp(logs) - special.gammaln(power)
        exact = np.where(complete, np.logaddexp(0.0, moment) / power, np.inf)
        bound[serves] = np.minimum(bound[serves], exact)
    return bound


def _log_removal_moments(whole: Floats, steps: int, shift: float) -> Floats:
    """Return log E[A^order] for whole orders >= 1, A being the likelihood ratio of one epoch."""
    table = _removal_table(steps, shift)
    outside = whole >= len(table)
    result = table[np.where(outside, 0, whole).astype(int)]
    if outside.any():
        some = whole[outside]
        poisson = poisson_divergence(some, rate=1 / steps, shift=shift)
        # E[A^n] <= E[prod_i (1 + (X_i - 1) / steps)^n]: expanding both in the moments of the
        # X_i - 1, which are >= 0 (see `_central_moments`), each coefficient n! / ((n - j)! prod
        # j_i!) on the left is at most prod n! / ((n - j_i)! j_i!) on the right, j = sum j_i.
        result[outside] = (some - 1) * steps * poisson
    return result


@lru_cache(maxsize=64)
def _removal_table(steps: int, shift: float) -> Floats:
    """Return log E[A^n] for n = 0, 1, ..., at most 128, A being the likelihood ratio of one epoch.

    All terms of the sums are positive, so no digits are lost.
    """
    # E[A^n] = sum_j C(n, j) j! [z^j] F(z)^steps, F(z) = sum_k E[((X - 1) / steps)^k] z^k / k!.
    top = int(np.clip(300 / shift, 2, _TOP))
    k = np.arange(top + 1)
    log_factorial = special.gammaln(k + 1)
    series = _central_moments(top, shift) - k * math.log(steps) - log_factorial
    total = np.where(k == 0, 0.0, -np.inf)  # the series 1
    count = steps
    while count:
        if count % 2:
            total = _multiply(total, series)
        series = _multiply(series, series)
        count //= 2
    moments = total + log_factorial  # log E[(A - 1)^j]
    table = np.zeros(top + 1)
    for n in range(2, top + 1):
        choose = log_factorial[n] - log_factorial[: n + 1] - log_factorial[: n + 1][::-1]
        table[n] = np.logaddexp(0.0, log_sum_exp((choose + moments[: n + 1])[2:]))
    table *= 1 + 1e-11  # more than rounding took away, so that rounding can only over-charge
    table.flags.writeable = False
    return table


def _central_moments(top: int, shift: float) -> Floats:
    """Return the log central moments log E[(X - 1)^k] for k = 0, ..., `top`.

    X = exp(shift * z - shift^2 / 2), z standard normal, has mean 1. E[X g(X)] = E[g(c X)] with
    c = exp(shift^2) for any g, and c X - 1 = c (X - 1) + (c - 1). So the moments M[k] follow from
    M[k+1] = (c^k - 1) M[k] + sum_{j<k} C(k, j) c^j (c - 1)^(k-j) M[j], C(k, j) being binomial
    coefficients. Nothing is subtracted, and by induction no moment is negative.
    """
    square = shift**2
    log_gain = square + math.log(-math.expm1(-square))  # log(c - 1)
    logs = np.full(top + 1, -np.inf)
    logs[0] = 0.0
    for k in range(1, top):
        j = np.arange(k)
        choose = special.gammaln(k + 1) - special.gammaln(j + 1) - special.gammaln(k - j + 1)
        rest = log_sum_exp(choose + j * square + (k - j) * log_gain + logs[:k])
        grow = k * square + math.log(-math.expm1(-k * square)) + logs[k]
        logs[k + 1] = np.logaddexp(rest, grow)
    return logs


def _multiply(first: Floats, second: Floats) -> Floats:
    """Return the product of two power series, all as logs of the same number of coefficients."""
    index = np.subtract.outer(np.arange(len(first)), np.arange(len(first)))
    return log_sum_exp(np.where(index >= 0, second[index] + first, -np.inf))


@lru_cache(maxsize=64)
def _root_grid(steps: int, shift: float) -> tuple[Floats, Floats]:
    """Return nodes for the integral over u in `addition_divergence`: log u and log weights.

    The weights are all factors of the integrand that do not depend on s = order - 1. With
    u = softplus(v)^2 the integrand is smooth and of unit width in v for every s, so the trapezoid
    rule in v with step 0.2 is exact to rounding.
    """
    v = np.arange(-12.0, _REACH, 0.2)
    root = np.logaddexp(0.0, v)
    log_step = math.log(0.4) - np.log(root) - np.logaddexp(0.0, -v)  # of log u
    return _weighted(2 * np.log(root), log_step, steps, shift)


@lru_cache(maxsize=64)
def _log_grid(steps: int, shift: float) -> tuple[Floats, Floats]:
    """Return nodes as `_root_grid` does, equally spaced in log u, for few steps of little noise."""
    v = np.arange(-18.0, 14.0, 0.03)
    return _weighted(v, np.full(len(v), math.log(0.03)), steps, shift)


def _weighted(log_u: Floats, log_step: Floats, steps: int, shift: float) -> tuple[Floats, Floats]:
    u = np.exp(log_u)
    growth = _log_laplace(u / steps, shift) * steps
    far = growth > 30
    log_excess = np.where(far, growth, np.log(np.expm1(np.where(far, 1.0, growth))))
    return log_u, log_step - u + log_excess


def _log_laplace(w: Floats, shift: float) -> Floats:
    """Return log E[exp(-w (X - 1))] at each w >= 0, where X is lognormal of mean 1.

    X = exp(shift * z - shift^2 / 2), z standard normal. Terms of first order in X - 1 have mean 0
    and are left out, so a small result keeps its digits.
    """
    step = min(0.45, 2 * math.pi * 1.4 / shift / 80)
    z = np.arange(-TAIL, TAIL + shift + step, step)
    weight = step * np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    x = np.expm1(shift * z - shift**2 / 2)  # X - 1
    exponent = np.multiply.outer(-w, x)
    mean = np.empty(len(w))
    near = exponent.max(axis=1) <= 600  # above, sum in logs against overflow
    mean[near] = np.log1p(excess_exp(exponent[near]) @ weight)
    if not near.all():
        mean[~near] = log_sum_exp(exponent[~near] + np.log(weight))
    return mean
