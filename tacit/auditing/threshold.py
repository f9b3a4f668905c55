"""Threshold tests: lower bounds on epsilon from independent scores.

Scores are independent if they come from many runs with and without one record, or from Dirac
canaries (`GradientCanaries`): each canary's score uses its own coordinate, with noise and sampling
of its own. `tacit.auditing.one_run` compares these bounds with those that need only fair coins.
"""

import math
from collections.abc import Callable

import numpy as np
from scipy import special

from tacit._arrays import Flags, Floats
from tacit.auditing.one_run import (
    AuditBound,
    Members,
    Scores,
    checked,
)

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
    return bound_at_threshold(
        bound, scores, is_member, delta, confidence, threshold, method, assumes
    )


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


def bound_at_threshold(
    bound: Bound,
    scores: Scores,
    is_member: Members,
    delta: float,
    confidence: float,
    threshold: float | None,
    method: str,
    assumes: str,
) -> AuditBound:
    """Return the lower bound that `bound` gives at the attack's error rates at a threshold.

    If `threshold` is None, it is chosen on the first tenth of the scores.
    """
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
