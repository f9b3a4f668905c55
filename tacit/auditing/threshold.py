"""Threshold tests: lower bounds on epsilon from independent scores.

Scores are independent if they come from many runs with and without one record, or from Dirac
canaries (`GradientCanaries`): each canary's score uses its own coordinate, with noise and sampling
of its own. `tacit.auditing.one_run` compares these bounds with those that need only fair coins.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from scipy import special

from tacit._arrays import Flags, Floats
from tacit.auditing.one_run import (
    AuditBound,
    Members,
    Scores,
    checked,
    gaussian_epsilon_below,
    largest,
)

_legendre = lru_cache(np.polynomial.legendre.leggauss)  # its nodes are costly to compute
Bound = Callable[[float, float], float]
"""(FPR at most, FNR at most) -> lower bound on epsilon."""
_SHARE_TO_CHOOSE = 0.1  # of the scores, used to choose a threshold
_CAUTION = 0.01  # prefers thresholds with well-known rates: a lucky rate does not repeat


def threshold_test(
    scores: Scores,
    is_member: Members,
    *,
    delta: float,
    confidence: float = 0.95,
    threshold: float | None = None,
) -> AuditBound:
    """Return a lower bound on epsilon from independent scores, for any trade-off curve.

    The attack guesses "member" for scores at or above `threshold`, which must be fixed in advance.
    If it is None, it is chosen on the first tenth of the scores, and the other scores are tested.
    The bound uses Clopper-Pearson limits on the false positive and false negative rates:
    (epsilon, delta)-DP implies FPR e^epsilon + FNR >= 1 - delta and the same with the rates
    exchanged (Kairouz et al. 2015).
    """

    def bound(false_positive: float, false_negative: float) -> float:
        return max(
            _epsilon_of_rates(false_positive, false_negative, delta),
            _epsilon_of_rates(false_negative, false_positive, delta),
        )

    method, assumes = "threshold test", "independent scores"
    return _at_threshold(bound, scores, is_member, delta, confidence, threshold, method, assumes)


def gaussian_threshold_test(
    scores: Scores,
    is_member: Members,
    *,
    delta: float,
    confidence: float = 0.95,
    threshold: float | None = None,
) -> AuditBound:
    """Return a lower bound on epsilon from independent scores, for a Gaussian trade-off curve.

    Clopper-Pearson limits on the false positive and false negative rates give
    mu >= Phi^-1(1 - FNR) - Phi^-1(FPR), and the bound is epsilon of mu-GDP (Nasr et al. 2023,
    arXiv:2302.07956). The scores need not be normal. `threshold` is as in `threshold_test`.

    If canaries differ, the rates are averages over canaries. Averages obey the trade-off curve f
    too, because 1 - f is concave. A sum of unequal coins varies less than a sum of equal coins
    (Hoeffding 1956), so the limits stay valid.
    """

    def bound(false_positive: float, false_negative: float) -> float:
        mu = float(special.ndtri(1 - false_negative) - special.ndtri(false_positive))
        return gaussian_epsilon_below(mu, delta)

    method = "Gaussian threshold test"
    assumes = "independent scores, and a Gaussian trade-off curve"
    return _at_threshold(bound, scores, is_member, delta, confidence, threshold, method, assumes)


def gaussian_fit(
    scores: Scores, is_member: Members, *, delta: float, confidence: float = 0.95
) -> AuditBound:
    """Return a lower bound on epsilon from normal scores whose mean is higher for members.

    Assumes independent normal scores with the same variance for members and others: check a plot
    first. The standardized difference of the means then has a noncentral t distribution, which
    gives an exact lower limit on mu. The bound is epsilon of mu-GDP.
    """
    values, members = checked(scores, is_member, delta, confidence)
    inside, outside = values[members], values[~members]
    n_in, n_out = len(inside), len(outside)
    if min(n_in, n_out) < 2:
        raise ValueError("gaussian_fit needs at least two canaries in and two out.")
    freedom = n_in + n_out - 2
    pooled = math.sqrt((inside.var() * n_in + outside.var() * n_out) / freedom)
    scale = math.sqrt(1 / n_in + 1 / n_out)
    shift = float(inside.mean() - outside.mean())
    observed = shift / (pooled * scale) if pooled > 0 else math.copysign(math.inf, shift)
    mu = 0.0
    if math.isfinite(observed) and observed > 0:
        mu = scale * largest(
            lambda center: noncentral_t_tail(observed, freedom, center) < 1 - confidence
        )
    lower, n = gaussian_epsilon_below(mu, delta), len(values)
    assumes = "independent normal scores of one variance, and a Gaussian trade-off curve"
    n_correct = int(((values > values.mean()) == members).sum())
    return AuditBound(lower, delta, confidence, "Gaussian fit", assumes, n, n, n_correct)


def error_limits(
    scores: Floats, is_member: Flags, threshold: float, share: float
) -> tuple[float, float]:
    """Return upper confidence limits on the false positive and the false negative rate.

    The attack guesses "member" if score >= threshold. Each limit is below the true rate with
    probability at most `share`.
    """
    says_in = scores >= threshold
    n_in = int(is_member.sum())
    return (
        upper_rate(int((says_in & ~is_member).sum()), len(scores) - n_in, share),
        upper_rate(int((~says_in & is_member).sum()), n_in, share),
    )


def split_threshold(bound: Bound, scores: Floats, is_member: Flags) -> tuple[float, Floats, Flags]:
    """Return a threshold chosen on the first tenth of the scores, for use on the others.

    The other scores and their membership follow it. The threshold gives the largest `bound`.
    """
    used = max(2, round(_SHARE_TO_CHOOSE * len(scores)))
    tried, known = scores[:used], is_member[:used]
    chosen = float(np.median(tried))
    best = bound(*error_limits(tried, known, chosen, _CAUTION))
    for threshold in np.unique(np.quantile(tried, np.linspace(0.01, 0.99, 99), method="lower")):
        gain = bound(*error_limits(tried, known, float(threshold), _CAUTION))
        if gain > best:
            best, chosen = gain, float(threshold)
    return chosen, scores[used:], is_member[used:]


def upper_rate(errors: int, trials: int, share: float) -> float:
    """Return the Clopper-Pearson upper limit on an error rate, given `errors` in `trials`.

    The limit is below the true rate with probability at most `share`.
    """
    if trials == 0 or errors == trials:
        return 1.0
    return float(special.betaincinv(errors + 1, trials - errors, 1 - share))


def noncentral_t_tail(t: float, freedom: int, center: float) -> float:
    """Return P[T >= t] for a noncentral t variable T = (Z + center) / S.

    Z is standard normal, and freedom * S^2 is chi-squared with `freedom` degrees. The probability
    is E[Phi(center - t S)], integrated by 400 Gauss-Legendre points over all but 1e-15 of the
    distribution of S. It is accurate for centers of several hundred, where series do not converge.

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


def _at_threshold(
    bound: Bound,
    scores: Scores,
    is_member: Members,
    delta: float,
    confidence: float,
    threshold: float | None,
    method: str,
    assumes: str,
) -> AuditBound:
    values, members = checked(scores, is_member, delta, confidence)
    if threshold is None:
        threshold, values, members = split_threshold(bound, values, members)
    share = (1 - confidence) / 2  # two limits, so each may fail half as often
    lower = bound(*error_limits(values, members, threshold, share))
    n_correct = int(((values >= threshold) == members).sum())
    n = len(values)
    return AuditBound(lower, delta, confidence, method, assumes, n, n, n_correct)


def _epsilon_of_rates(miss: float, other: float, delta: float) -> float:
    gain = 1 - delta - other
    return max(0.0, math.log(gain / miss)) if gain > 0 and miss > 0 else 0.0
