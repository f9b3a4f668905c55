"""Lower bounds on epsilon from an attack's scores, each with its confidence and its assumption.

A bound says: with probability at least `confidence` over the coins of the audit, a mechanism that
*is* (epsilon, delta)-DP gets a lower bound at most epsilon. One above the bill is proof of a bug.

| bound | assumes | of a tight bill it shows* |
|---|---|---|
| `one_run` | fair coins | 49 to 65 % |
| `one_run_gaussian` | fair coins, a Gaussian trade-off curve | 71 to 77 % |
| `threshold_test` | independent scores | 45 to 54 % |
| `gaussian_threshold_test` | independent scores, a Gaussian curve | 89 to 98 % |
| `gaussian_fit` | independent normal scores | 95 to 99 % |

(* 100,000 canaries, ideal attack on a Gaussian mechanism of noise multiplier 0.5 to 4, delta 1e-5,
confidence 95 %; see `benchmarks/audit_bounds.py`.)

Scores are higher for members. How many guesses an attack makes is fixed in advance, chosen on a
split, or charged for (`tacit.auditing.guesses`); `expected_epsilon=` the bill fixes a good number.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from tacit._check import in_open_unit
from tacit.auditing import _refute
from tacit.auditing._refute import gaussian_epsilon, noncentral_t_tail, upper_rate
from tacit.auditing.guesses import Test, plan_guesses, tested

Scores = Sequence[float] | np.ndarray
Members = Sequence[bool] | np.ndarray
Bound = Callable[[float, float], float]
"""(FPR at most, FNR at most) -> lower bound on epsilon."""
_SHARE_TO_CHOOSE = 0.1  # of the scores, spent on choosing a threshold
_CAUTION = 0.01  # prefers thresholds whose rates are well known: luck does not repeat on the rest


@dataclass(frozen=True)
class AuditBound:
    """What an attack proves: the true epsilon at `delta` is at least `epsilon_lower`."""

    epsilon_lower: float
    delta: float
    confidence: float
    method: str
    assumes: str
    n_canaries: int
    n_guesses: int
    n_correct: int

    def passes(self, bill: float) -> bool:
        """Whether the lower bound stays at or below the `bill`, as it must."""
        return self.epsilon_lower <= bill


def one_run(
    scores: Scores,
    is_member: Members,
    *,
    delta: float,
    confidence: float = 0.95,
    guesses: int | str | None = None,
    expected_epsilon: float | None = None,
) -> AuditBound:
    """Bound from ONE training run with many canaries, each in or out by its own fair coin.

    Guesses "in" for the highest scores and "out" for the lowest, abstains between. Steinke, Nasr &
    Jagielski 2023 (arXiv:2305.08846), Theorem 5.2. Assumes nothing but the coins.

    Parameters
    ----------
    guesses
        Number of guesses fixed in advance, `"split"` (chosen on half of the canaries, tested on the
        other half), or `"bonferroni"` (a fixed short list, each tested at its share; the default).
    expected_epsilon
        The bill: makes the number of guesses that `plan_guesses` finds for it.

    >>> rng = np.random.default_rng(0)
    >>> inside = rng.integers(0, 2, 10_000).astype(bool)
    >>> noisy = inside + rng.normal(0, 1, 10_000)
    >>> 2.0 < one_run(noisy, inside, delta=1e-5, expected_epsilon=4.37).epsilon_lower < 4.37
    True
    """

    def test(n: int, r: int, v: int, significance: float) -> float:
        return _refute.largest(
            lambda epsilon: _refute.one_run_p_value(n, r, v, epsilon, delta) < significance
        )

    values, members = checked(scores, is_member, delta, confidence)
    rule = _rule(guesses, expected_epsilon, len(values), delta, "one run", confidence)
    assumes = "each canary was in or out by an independent fair coin"
    return _guessed(test, values, members, delta, confidence, rule, "one run", assumes)


def one_run_gaussian(
    scores: Scores,
    is_member: Members,
    *,
    delta: float,
    confidence: float = 0.95,
    guesses: int | str | None = None,
    expected_epsilon: float | None = None,
) -> AuditBound:
    """Bound from one run for mechanisms whose trade-off curve is a Gaussian one.

    Refutes mu-GDP by the recursion of Mahloujifar, Melis & Chaudhuri 2024 (arXiv:2410.22235), then
    states epsilon of the largest refuted mu. Tighter than `one_run`, because it uses the whole
    curve; it assumes that the curve is (dominated by) a Gaussian one. `refute_event` tests the
    very curve of a bill instead.

    Coins alone leave room for a mechanism that is loud about all canaries at once, but seldom; no
    bound that allows for it gets much further (`ceiling` in `benchmarks/audit_bounds.py`). Where
    scores are independent, as those of Dirac canaries are, `gaussian_threshold_test` does.
    """

    def test(n: int, r: int, v: int, significance: float) -> float:
        mu = _refute.largest(
            lambda mu: _refute.rejects_tradeoff(_refute.gaussian_inverse(mu), n, r, v, significance)
        )
        return gaussian_epsilon(mu, delta)

    values, members = checked(scores, is_member, delta, confidence)
    rule = _rule(guesses, expected_epsilon, len(values), delta, "f-DP", confidence)
    assumes = "fair coins, and a Gaussian trade-off curve"
    return _guessed(test, values, members, delta, confidence, rule, "one run, f-DP", assumes)


def threshold_test(
    scores: Scores,
    is_member: Members,
    *,
    delta: float,
    confidence: float = 0.95,
    threshold: float | None = None,
) -> AuditBound:
    """Bound from independent scores: many runs with and without one record, or Dirac canaries.

    Clopper-Pearson limits on both error rates at a threshold that was fixed in advance or, if None,
    chosen on the first tenth of the scores and tested on the rest. (epsilon, delta)-DP implies
    FPR e^epsilon + FNR >= 1 - delta and the same with the rates exchanged (Kairouz et al. 2015).
    """
    values, members = checked(scores, is_member, delta, confidence)

    def bound(false_positive: float, false_negative: float) -> float:
        return max(
            _epsilon_of_rates(false_positive, false_negative, delta),
            _epsilon_of_rates(false_negative, false_positive, delta),
        )

    return _at_threshold(
        bound, values, members, delta, confidence, threshold, "threshold test", "independent scores"
    )


def gaussian_threshold_test(
    scores: Scores,
    is_member: Members,
    *,
    delta: float,
    confidence: float = 0.95,
    threshold: float | None = None,
) -> AuditBound:
    """Bound from independent scores of a mechanism whose trade-off curve is a Gaussian one.

    Clopper-Pearson limits on both error rates give mu >= Phi^-1(1 - FNR) - Phi^-1(FPR), and epsilon
    is that of mu-GDP (Nasr et al. 2023, arXiv:2302.07956). Any scores will do, normal or not.

    Scores of Dirac canaries are independent given the coins: each reads its own coordinate, whose
    noise and sampling are its own. If canaries differ, rates are averages: 1 - f is concave, so
    averages obey the curve too, and a sum of unequal coins strays less than one of equal coins
    (Hoeffding 1956), so the limits stay valid.
    """
    values, members = checked(scores, is_member, delta, confidence)

    def bound(false_positive: float, false_negative: float) -> float:
        mu = float(special.ndtri(1 - false_negative) - special.ndtri(false_positive))
        return gaussian_epsilon(mu, delta)

    assumes = "independent scores, and a Gaussian trade-off curve"
    return _at_threshold(
        bound, values, members, delta, confidence, threshold, "Gaussian threshold test", assumes
    )


def gaussian_fit(
    scores: Scores, is_member: Members, *, delta: float, confidence: float = 0.95
) -> AuditBound:
    """Bound for white-box scores that are normal with one spread, shifted for members.

    The standardized shift has a noncentral t law, which gives an exact lower limit on mu; epsilon
    is that of mu-GDP. Assumes independent normal scores of equal variance: check a plot first.
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
        mu = scale * _refute.largest(
            lambda center: noncentral_t_tail(observed, freedom, center) < 1 - confidence
        )
    return AuditBound(
        epsilon_lower=gaussian_epsilon(mu, delta),
        delta=delta,
        confidence=confidence,
        method="Gaussian fit",
        assumes="independent normal scores of one variance, and a Gaussian trade-off curve",
        n_canaries=len(values),
        n_guesses=len(values),
        n_correct=int(((values > values.mean()) == members).sum()),
    )


def error_limits(
    scores: np.ndarray, is_member: np.ndarray, threshold: float, share: float
) -> tuple[float, float]:
    """Upper limits on FPR and FNR of "in if score >= threshold", each wrong at most `share`."""
    says_in = scores >= threshold
    n_in = int(is_member.sum())
    return (
        upper_rate(int((says_in & ~is_member).sum()), len(scores) - n_in, share),
        upper_rate(int((~says_in & is_member).sum()), n_in, share),
    )


def split_threshold(
    bound: Bound, scores: np.ndarray, is_member: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """A threshold chosen on the first tenth, with the scores and coins that are left to test it."""
    used = max(2, round(_SHARE_TO_CHOOSE * len(scores)))
    tried, known = scores[:used], is_member[:used]
    chosen = float(np.median(tried))
    best = bound(*error_limits(tried, known, chosen, _CAUTION))
    for threshold in np.unique(np.quantile(tried, np.linspace(0.01, 0.99, 99), method="lower")):
        gain = bound(*error_limits(tried, known, float(threshold), _CAUTION))
        if gain > best:
            best, chosen = gain, float(threshold)
    return chosen, scores[used:], is_member[used:]


def checked(
    scores: Scores, is_member: Members, delta: float, confidence: float
) -> tuple[np.ndarray, np.ndarray]:
    """Both as flat arrays of one length, or an error that names what is wrong."""
    in_open_unit(confidence=confidence)
    if delta != 0:
        in_open_unit(delta=delta)
    values = np.asarray(scores, dtype=np.float64)
    members = np.asarray(is_member)
    if members.dtype != bool:
        if not np.isin(members, (0, 1)).all():
            raise ValueError("is_member must hold booleans, or 0 and 1.")
        members = members.astype(bool)
    if values.ndim != 1 or values.shape != members.shape:
        raise ValueError(
            "scores and is_member must be flat and of one length, "
            f"got shapes {values.shape} and {members.shape}."
        )
    if len(values) < 2:
        raise ValueError(f"an audit needs at least 2 canaries, got {len(values)}.")
    if np.isnan(values).any():
        raise ValueError("scores must not be NaN. Give a canary without a score the lowest one.")
    return values, members


def _rule(
    guesses: int | str | None,
    expected_epsilon: float | None,
    n: int,
    delta: float,
    method: str,
    confidence: float,
) -> int | str:
    if expected_epsilon is None:
        return "bonferroni" if guesses is None else guesses
    if guesses is not None:
        raise ValueError("give guesses or expected_epsilon, not both: each fixes the guesses.")
    return plan_guesses(
        n, epsilon=expected_epsilon, delta=delta, method=method, confidence=confidence
    )


def _guessed(
    test: Test,
    scores: np.ndarray,
    is_member: np.ndarray,
    delta: float,
    confidence: float,
    rule: int | str,
    method: str,
    assumes: str,
) -> AuditBound:
    lower, n_guesses, n_correct, n = tested(test, scores, is_member, rule, 1 - confidence)
    return AuditBound(lower, delta, confidence, method, assumes, n, n_guesses, n_correct)


def _at_threshold(
    bound: Bound,
    scores: np.ndarray,
    is_member: np.ndarray,
    delta: float,
    confidence: float,
    threshold: float | None,
    method: str,
    assumes: str,
) -> AuditBound:
    if threshold is None:
        threshold, scores, is_member = split_threshold(bound, scores, is_member)
    share = (1 - confidence) / 2  # two limits, so each may fail half as often
    lower = bound(*error_limits(scores, is_member, threshold, share))
    n_correct = int(((scores >= threshold) == is_member).sum())
    n = len(scores)
    return AuditBound(lower, delta, confidence, method, assumes, n, n, n_correct)


def _epsilon_of_rates(miss: float, other: float, delta: float) -> float:
    gain = 1 - delta - other
    return max(0.0, math.log(gain / miss)) if gain > 0 and miss > 0 else 0.0
