"""Lower bounds on epsilon from an attack's scores, each with its confidence and its assumption.

A bound says: with probability at least `confidence` over the coins of the audit, a mechanism that
*is* (epsilon, delta)-DP gets a lower bound at most epsilon. One above the bill is proof of a bug.

Scores are higher for members. How many guesses an attack makes is fixed in advance, chosen on a
split, or charged for (Bonferroni): trying every number and keeping the best is not a valid test.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

from tacit._check import in_open_unit, whole

Test = Callable[[int, int, int, float], float]
"""(canaries, guesses, right guesses, significance) -> largest epsilon that is rejected."""


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
    scores: Sequence[float] | np.ndarray,
    is_member: Sequence[bool] | np.ndarray,
    *,
    delta: float,
    confidence: float = 0.95,
    guesses: int | str = "bonferroni",
) -> AuditBound:
    """Bound from ONE training run with many canaries, each in or out by its own fair coin.

    Guesses "in" for the highest scores and "out" for the lowest, abstains between. Steinke, Nasr &
    Jagielski 2023 (arXiv:2305.08846), Theorem 5.2. Assumes nothing but the coins.

    Parameters
    ----------
    guesses
        Number of guesses fixed in advance, `"split"` (chosen on half of the canaries, tested on the
        other half), or `"bonferroni"` (a fixed short list, each tested at its share).

    >>> rng = np.random.default_rng(0)
    >>> inside = rng.integers(0, 2, 10_000).astype(bool)
    >>> noisy = inside + rng.normal(0, 1, 10_000)
    >>> 1.5 < one_run(noisy, inside, delta=1e-5).epsilon_lower < 4.37
    True
    """

    def test(n: int, r: int, v: int, significance: float) -> float:
        return _largest_rejected(
            lambda epsilon: _one_run_p_value(n, r, v, epsilon, delta) < significance
        )

    assumes = "each canary was in or out by an independent fair coin"
    return _audit(test, scores, is_member, delta, confidence, guesses, "one run", assumes)


def one_run_gaussian(
    scores: Sequence[float] | np.ndarray,
    is_member: Sequence[bool] | np.ndarray,
    *,
    delta: float,
    confidence: float = 0.95,
    guesses: int | str = "bonferroni",
) -> AuditBound:
    """Bound from one run for mechanisms whose trade-off curve is a Gaussian one.

    Rejects mu-GDP by the recursion of Mahloujifar, Melis & Chaudhuri 2024 (arXiv:2410.22235,
    Algorithm 3), then states epsilon of the largest rejected mu. Tighter than `one_run`, because
    it uses the whole curve; it assumes that the curve is (dominated by) a Gaussian one.
    """

    def test(n: int, r: int, v: int, significance: float) -> float:
        mu = _largest_rejected(lambda mu: rejects_tradeoff(_gaussian(mu), n, r, v, significance))
        return gaussian_epsilon(mu, delta)

    assumes = "fair coins, and a Gaussian trade-off curve"
    return _audit(test, scores, is_member, delta, confidence, guesses, "one run, f-DP", assumes)


def threshold_test(
    scores: Sequence[float] | np.ndarray,
    is_member: Sequence[bool] | np.ndarray,
    *,
    delta: float,
    confidence: float = 0.95,
    threshold: float | None = None,
) -> AuditBound:
    """Bound from many independent runs of one attack, half with the record and half without.

    Clopper-Pearson limits on both error rates at a threshold that was fixed in advance or, if None,
    chosen on the first half of the runs and tested on the second. (epsilon, delta)-DP implies
    FPR e^epsilon + FNR >= 1 - delta and the same with the rates exchanged (Kairouz et al. 2015).
    """
    scores, is_member = _checked(scores, is_member, delta, confidence)
    if threshold is None:
        half = len(scores) // 2
        threshold = _best_threshold(scores[:half], is_member[:half], delta)
        scores, is_member = scores[half:], is_member[half:]
    says_in = scores >= threshold
    share = (1 - confidence) / 2  # two limits, so each may fail half as often
    false_positive = _upper_rate(int((says_in & ~is_member).sum()), int((~is_member).sum()), share)
    false_negative = _upper_rate(int((~says_in & is_member).sum()), int(is_member.sum()), share)
    lower = max(
        _epsilon_of_rates(false_positive, false_negative, delta),
        _epsilon_of_rates(false_negative, false_positive, delta),
    )
    return AuditBound(
        epsilon_lower=lower,
        delta=delta,
        confidence=confidence,
        method="threshold test",
        assumes="runs are independent",
        n_canaries=len(scores),
        n_guesses=len(scores),
        n_correct=int((says_in == is_member).sum()),
    )


def gaussian_fit(
    scores: Sequence[float] | np.ndarray,
    is_member: Sequence[bool] | np.ndarray,
    *,
    delta: float,
    confidence: float = 0.95,
) -> AuditBound:
    """Bound for white-box scores that are normal with one spread, shifted for members.

    The standardized shift has a noncentral t law, which gives an exact lower limit on mu; epsilon
    is that of mu-GDP. Assumes independent normal scores of equal variance: check a plot first.
    """
    scores, is_member = _checked(scores, is_member, delta, confidence)
    inside, outside = scores[is_member], scores[~is_member]
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
        mu = scale * _largest_rejected(
            lambda center: bool(stats.nct.sf(observed, freedom, center) < 1 - confidence)
        )
    return AuditBound(
        epsilon_lower=gaussian_epsilon(mu, delta),
        delta=delta,
        confidence=confidence,
        method="Gaussian fit",
        assumes="independent normal scores of one variance, and a Gaussian trade-off curve",
        n_canaries=len(scores),
        n_guesses=len(scores),
        n_correct=int(((scores > scores.mean()) == is_member).sum()),
    )


def rejects_tradeoff(
    tradeoff: Callable[[float], float], n: int, r: int, v: int, significance: float
) -> bool:
    """Whether `v` right of `r` guesses on `n` canaries refutes a trade-off curve.

    `tradeoff(x)` is the smallest power of a test against which the curve allows size x to grow:
    the inverse of its blow-up function, Phi(Phi^-1(x) - mu) for mu-GDP.
    """
    right, wrong = significance * v / n, significance * (r - v) / n
    for i in range(v - 1, -1, -1):
        grown = tradeoff(right)
        if grown <= wrong:  # a fixed point: every later step repeats it
            break
        right += i / (r - i) * (grown - wrong)
        wrong = grown
        if right + wrong > r / n:
            return True
    return right + wrong > r / n


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of mu-GDP at `delta` (Dong, Roth & Su 2022, Cor. 2.13), rounded down."""

    def excess(epsilon: float) -> float:
        first = special.ndtr(mu / 2 - epsilon / mu)
        return float(first - math.exp(epsilon) * special.ndtr(-mu / 2 - epsilon / mu)) - delta

    if mu <= 0 or excess(0.0) <= 0:
        return 0.0
    return _bisect(lambda epsilon: excess(epsilon) > 0)


def _audit(
    test: Test,
    scores: Sequence[float] | np.ndarray,
    is_member: Sequence[bool] | np.ndarray,
    delta: float,
    confidence: float,
    guesses: int | str,
    method: str,
    assumes: str,
) -> AuditBound:
    scores, is_member = _checked(scores, is_member, delta, confidence)
    significance = 1 - confidence
    if guesses == "split":
        half = len(scores) // 2
        trials = [(_try(test, scores[:half], is_member[:half], r, significance), r)
                  for r in _list_of_guesses(half)]  # fmt: skip
        best = max(trials)[1]
        scores, is_member = scores[half:], is_member[half:]
        candidates = [min(best, len(scores))]
    elif guesses == "bonferroni":
        candidates = _list_of_guesses(len(scores))
    elif isinstance(guesses, str):
        raise ValueError(f"guesses must be a number, 'split' or 'bonferroni', got {guesses!r}.")
    else:
        candidates = [whole(guesses=guesses, least=1)]
        if candidates[0] > len(scores):
            raise ValueError(f"guesses must be at most {len(scores)}, got {guesses}.")
    share = significance / len(candidates)
    lower, r = max((_try(test, scores, is_member, r, share), r) for r in candidates)
    return AuditBound(
        epsilon_lower=lower,
        delta=delta,
        confidence=confidence,
        method=method,
        assumes=assumes,
        n_canaries=len(scores),
        n_guesses=r,
        n_correct=_right_guesses(scores, is_member, r),
    )


def _try(test: Test, scores: np.ndarray, is_member: np.ndarray, r: int, share: float) -> float:
    return test(len(scores), r, _right_guesses(scores, is_member, r), share)


def _list_of_guesses(n: int) -> list[int]:
    """A fixed list, from a few sure guesses to half of the canaries: depends on `n` alone."""
    return sorted({r for share in range(1, 9) if (r := n // 2**share) >= 8}) or [n]


def _right_guesses(scores: np.ndarray, is_member: np.ndarray, r: int) -> int:
    order = np.argsort(scores, kind="stable")
    low, high = order[: r // 2], order[len(order) - (r - r // 2) :]
    return int(is_member[high].sum() + (~is_member[low]).sum())


def _one_run_p_value(n: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """Chance of `v` or more right guesses under (epsilon, delta)-DP, at most."""
    right = special.expit(epsilon)  # the best accuracy that pure epsilon-DP allows a single guess
    tail = float(stats.binom.sf(v - 1, r, right))
    if delta == 0 or v == 0:
        return min(tail, 1.0)
    below = np.cumsum(stats.binom.pmf(np.arange(v - 1, -1, -1), r, right))
    slack = float((below / np.arange(1, v + 1)).max())
    return min(tail + 2 * n * delta * slack, 1.0)


def _gaussian(mu: float) -> Callable[[float], float]:
    return lambda x: float(special.ndtr(special.ndtri(x) - mu))


def _epsilon_of_rates(miss: float, other: float, delta: float) -> float:
    gain = 1 - delta - other
    return max(0.0, math.log(gain / miss)) if gain > 0 and miss > 0 else 0.0


def _upper_rate(errors: int, trials: int, share: float) -> float:
    """Clopper-Pearson upper limit on an error rate."""
    if trials == 0 or errors == trials:
        return 1.0
    return float(stats.beta.ppf(1 - share, errors + 1, trials - errors))


def _best_threshold(scores: np.ndarray, is_member: np.ndarray, delta: float) -> float:
    """The threshold with the largest smoothed epsilon on these runs."""
    n_in, n_out = max(int(is_member.sum()), 1), max(int((~is_member).sum()), 1)
    best, chosen = -1.0, float(np.median(scores))
    for threshold in np.quantile(scores, np.linspace(0.01, 0.99, 99)):
        says_in = scores >= threshold
        miss = (int((says_in & ~is_member).sum()) + 1) / (n_out + 1)
        lost = (int((~says_in & is_member).sum()) + 1) / (n_in + 1)
        gain = max(_epsilon_of_rates(miss, lost, delta), _epsilon_of_rates(lost, miss, delta))
        if gain > best:
            best, chosen = gain, float(threshold)
    return chosen


def _largest_rejected(rejects: Callable[[float], bool]) -> float:
    """Largest value that is still rejected, rounded down; 0 if none is."""
    return _bisect(rejects) if rejects(0.0) else 0.0


def _bisect(is_below: Callable[[float], bool]) -> float:
    low, high = 0.0, 1.0
    while is_below(high):
        if high > 1e4:
            return high
        low, high = high, 2 * high
    while high - low > 1e-6 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low


def _checked(
    scores: Sequence[float] | np.ndarray,
    is_member: Sequence[bool] | np.ndarray,
    delta: float,
    confidence: float,
) -> tuple[np.ndarray, np.ndarray]:
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
