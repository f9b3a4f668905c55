"""Lower bounds on epsilon for mechanisms that are Gaussian, to compare with those of any event.

`tacit.auditing.noise_bound` uses the curve of the bill itself. These two take a Gaussian one for
granted; `benchmarks/audit_bounds.py` shows how close they come.
"""

import math
from functools import lru_cache

import numpy as np
from scipy import special

from tacit.auditing import AuditBound
from tacit.auditing.one_run import Members, Scores, checked, gaussian_epsilon_below, largest
from tacit.auditing.threshold import bound_at_threshold

_legendre = lru_cache(np.polynomial.legendre.leggauss)  # its nodes are costly to compute


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
    return bound_at_threshold(
        bound, scores, is_member, delta, confidence, threshold, method, assumes
    )


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
