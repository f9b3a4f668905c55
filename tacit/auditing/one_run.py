"""One-run audit: a lower bound on epsilon from a single training run with many canaries.

A bound states: with probability at least `confidence` over the coins of the audit, a mechanism that
*is* (epsilon, delta)-DP gets a lower bound of at most epsilon. A bound above the bill (the epsilon
that was charged) proves a bug. All bounds of this package, with the share of a tight bill that each
reaches*:

| bound | assumes | reaches* |
|---|---|---|
| `one_run` | fair coins | 49 to 65 % |
| `one_run_gaussian` | fair coins, a Gaussian trade-off curve | 71 to 77 % |
| `threshold_test` | independent scores | 45 to 54 % |
| `noise_bound` | independent scores, the billed event with some noise | see its benchmark |

(* 100,000 canaries, ideal attack on a Gaussian mechanism of noise multiplier 0.5 to 4, delta 1e-5,
confidence 95 %; see `benchmarks/audit_bounds.py`.)

Scores are higher for members. An attack guesses "in" for the highest scores and "out" for the
lowest, and abstains between. Trying every number of guesses and keeping the best is not a valid
test: with 100,000 canaries and noise multiplier 2 (epsilon 1.99) it reaches lower bounds above 2.2.
Three ways to choose the number of guesses are valid:

- a number fixed in advance; `plan_guesses` computes a good one from public facts, such as the bill;
- a split: choose the number on half of the canaries, and test on the other half;
- Bonferroni: a short fixed list, with each number tested at its share of the error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import optimize, special

from tacit._arrays import Flags, Floats
from tacit._bisection import bisected
from tacit._check import in_open_unit, one_of, positive, whole
from tacit.accounting import gaussian_delta

Scores = Sequence[float] | np.ndarray
Members = Sequence[bool] | np.ndarray
Inverse = Callable[[float], float]
"""Inverse of 1 - f for a trade-off curve f: the least wrong rate x at which 1 - f(x) >= y."""
FAIR_COINS = "each canary was in or out by an independent fair coin"


@dataclass(frozen=True)
class AuditBound:
    """Result of an audit: at `confidence`, the true epsilon at `delta` is >= `epsilon_lower`.

    `assumes` states in words what the bound assumes.
    """

    epsilon_lower: float
    delta: float
    confidence: float
    method: str
    assumes: str
    n_canaries: int
    n_guesses: int
    n_correct: int

    def passes(self, bill: float) -> bool:
        """Return whether the lower bound is at most the `bill`, as it must be."""
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
    """Return a lower bound on epsilon from ONE training run with many canaries.

    Assumes only that each canary was in or out of the training set by a fair coin (Steinke, Nasr &
    Jagielski 2023, arXiv:2305.08846, Theorem 5.2).

    Parameters
    ----------
    guesses
        Number of guesses fixed in advance, `"split"` (chosen on half of the canaries, tested on the
        other half), or `"bonferroni"` (a fixed short list, each tested at its share; the default).
    expected_epsilon
        The bill. If given, the attack makes the number of guesses that `plan_guesses` returns.

    >>> rng = np.random.default_rng(0)
    >>> inside = rng.integers(0, 2, 10_000).astype(bool)
    >>> noisy = inside + rng.normal(0, 1, 10_000)
    >>> 2.0 < one_run(noisy, inside, delta=1e-5, expected_epsilon=4.37).epsilon_lower < 4.37
    True
    """
    return _Audit("one run", delta, confidence).bound(scores, is_member, guesses, expected_epsilon)


def one_run_gaussian(
    scores: Scores,
    is_member: Members,
    *,
    delta: float,
    confidence: float = 0.95,
    guesses: int | str | None = None,
    expected_epsilon: float | None = None,
) -> AuditBound:
    """Return a lower bound on epsilon from one run, assuming a Gaussian trade-off curve.

    Finds the largest mu for which mu-GDP is refuted by the recursion of Mahloujifar, Melis &
    Chaudhuri 2024 (arXiv:2410.22235), and returns epsilon of this mu. The bound is tighter than
    that of `one_run`, because it uses the whole curve; it assumes that the curve is (dominated by)
    a Gaussian one. `refute_event` tests the curve of the bill itself instead. The parameters are
    those of `one_run`.

    The bound must allow for mechanisms that rarely leak, but then leak all canaries at once. No
    such bound can be much tighter (`ceiling` in `benchmarks/audit_bounds.py`). If scores are
    independent, as those of Dirac canaries are, use `noise_bound`, which is tighter.
    """
    return _Audit("f-DP", delta, confidence).bound(scores, is_member, guesses, expected_epsilon)


@lru_cache(maxsize=256)
def plan_guesses(
    n_canaries: int,
    *,
    epsilon: float,
    delta: float,
    method: str = "one run",
    confidence: float = 0.95,
) -> int:
    """Return how many guesses an audit should make if the bill (epsilon, delta) is exact.

    The number gives the best bound for an ideal attack on a Gaussian mechanism with this bill (a
    Laplace mechanism if delta is 0) that is right as often as expected. It depends on public facts
    alone, so a bound that uses it is valid for any scores. `method` is `"one run"` (for `one_run`)
    or `"f-DP"` (for `one_run_gaussian`).

    >>> plan_guesses(100_000, epsilon=4.37, delta=1e-5)
    1634
    """
    n = whole(n_canaries=n_canaries, least=2)
    positive(epsilon=epsilon)
    in_open_unit(confidence=confidence)
    one_of(("one run", "f-DP"), method=method)
    if delta == 0:
        # Beyond both centers every guess is as good as pure DP allows; between them it is worse.
        return max(1, round(n * (1 + np.exp(-epsilon)) / 2))
    mu = gaussian_mu(epsilon, in_open_unit(delta=delta))
    audit = _Audit(method, delta, confidence)
    best, chosen = 0.0, max(1, n // 8)  # best: an epsilon, or a mu for f-DP
    for r in _finer_and_finer(n):
        v = int(n * special.ndtr(mu / 2 - _cut(mu, r / n)))
        if audit.refutes(best, n, r, v, 1 - confidence):
            best = audit.largest_refuted(n, r, v, 1 - confidence, at_least=best)
            chosen = r
    return chosen


def list_of_guesses(n: int) -> list[int]:
    """Return the numbers of guesses to try on `n` canaries: n/256, ..., n/4, n/2 where >= 8."""
    return sorted({r for share in range(1, 9) if (r := n // 2**share) >= 8}) or [n]


def right_guesses(scores: Floats, is_member: Flags, r: int) -> int:
    """Return how many of `r` guesses are right, half "in" and half "out" of the training set.

    The canaries with the highest scores are guessed "in", those with the lowest scores "out".
    """
    order = np.argsort(scores, kind="stable")
    low, high = order[: r // 2], order[len(order) - (r - r // 2) :]
    return int(is_member[high].sum() + (~is_member[low]).sum())


def checked(
    scores: Scores, is_member: Members, delta: float, confidence: float
) -> tuple[Floats, Flags]:
    """Return scores and membership as arrays; raise if these, delta or confidence are invalid."""
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


def one_run_p_value(n: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """Return the largest chance that `v` or more of `r` guesses on `n` canaries are right.

    The mechanism is assumed to be (epsilon, delta)-DP. Steinke, Nasr & Jagielski 2023
    (arXiv:2305.08846), Theorem 5.2.
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
    """Return whether `v` right guesses out of `r`, on `n` canaries, refute a trade-off curve f.

    `inverse` is the inverse of 1 - f. Mahloujifar, Melis & Chaudhuri 2024 (arXiv:2410.22235),
    Algorithm 3. Proof: let C count the right guesses, fix canary j, and let C' count the right
    guesses on the other canaries. f-DP bounds P[j right, C' >= k-1] by
    1 - f(P[j wrong, C' >= k-1]), whatever the coin of j. Average over j and the coins (1 - f is
    concave): E[C; C >= k] / n <= 1 - f(E[r - C; C >= k-1] / n) for every k. If C >= v had
    probability `significance`, these inequalities, from k = v down, would force a total
    probability above one.
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


def gaussian_inverse(mu: float) -> Inverse:
    """Return, for mu-GDP, the least false positive rate at true positive rate y, as a function.

    It is Phi(Phi^-1(y) - mu), with Phi the standard normal distribution function.
    """
    return lambda y: float(special.ndtr(special.ndtri(min(y, 1.0)) - mu))


@lru_cache(maxsize=4096)
def gaussian_epsilon_below(mu: float, delta: float) -> float:
    """Return epsilon of mu-GDP at `delta`, rounded down as a lower bound on epsilon requires.

    `tacit.accounting.gaussian_epsilon` is the same number rounded up.
    """
    if mu <= 0:
        return 0.0
    # gaussian_delta is rounded up, by far less than 1e-9 of itself.
    return largest(lambda epsilon: gaussian_delta(mu, epsilon) * (1 - 1e-9) > delta)


@lru_cache(maxsize=256)
def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the mu whose epsilon at `delta` is `epsilon`: inverse of `gaussian_epsilon_below`."""
    return largest(lambda mu: gaussian_epsilon_below(mu, delta) < epsilon)


def largest(is_below: Callable[[float], bool], *, at_least: float = 0.0) -> float:
    """Return the largest number for which `is_below` is true, rounded down.

    `is_below` must be true up to some number and false from there on. The result is `at_least` if
    `is_below` is false for all larger numbers.
    """
    low, step = at_least, max(1.0, at_least)
    if not is_below(low):
        return low
    while is_below(low + step):
        low, step = low + step, 2 * step
        if low > 1e4:
            return low
    return bisected(lambda x: not is_below(x), low, low + step, absolute=1e-6, relative=1e-6)[0]


@dataclass(frozen=True)
class _Audit:
    """Audit by counting right guesses: it refutes values of epsilon, or of mu.

    `method` is "one run" to refute (epsilon, delta)-DP, or "f-DP" to refute mu-GDP.
    """

    method: str
    delta: float
    confidence: float

    def refutes(self, value: float, n: int, r: int, v: int, significance: float) -> bool:
        """Return whether `v` right guesses out of `r`, on `n` canaries, refute `value`.

        `value` is an epsilon, or a mu for method "f-DP".
        """
        if self.method == "one run":
            return one_run_p_value(n, r, v, value, self.delta) < significance
        return rejects_tradeoff(gaussian_inverse(value), n, r, v, significance)

    def largest_refuted(
        self, n: int, r: int, v: int, significance: float, *, at_least: float = 0.0
    ) -> float:
        """Return the largest refuted epsilon or mu, or `at_least` if no larger one is refuted.

        The observation is `v` right guesses out of `r`, on `n` canaries.
        """
        return largest(lambda x: self.refutes(x, n, r, v, significance), at_least=at_least)

    def bound(
        self,
        scores: Scores,
        is_member: Members,
        guesses: int | str | None,
        expected_epsilon: float | None,
    ) -> AuditBound:
        """Return the lower bound on epsilon; the parameters are those of the function `one_run`."""
        values, members = checked(scores, is_member, self.delta, self.confidence)
        if expected_epsilon is not None:
            if guesses is not None:
                raise ValueError(
                    "give guesses or expected_epsilon, not both: each fixes the guesses."
                )
            guesses = plan_guesses(
                len(values),
                epsilon=expected_epsilon,
                delta=self.delta,
                method=self.method,
                confidence=self.confidence,
            )
        if guesses == "split":
            half = len(values) // 2
            tried = list_of_guesses(half)
            _, r, _ = self._best(values[:half], members[:half], tried, 1 - self.confidence)
            values, members = values[half:], members[half:]
            candidates = [min(r, len(values))]
        else:
            candidates = _candidates(guesses, len(values))
        share = (1 - self.confidence) / len(candidates)
        lower, r, v = self._best(values, members, candidates, share)
        method, assumes = "one run", FAIR_COINS
        if self.method == "f-DP":
            method, assumes = "one run, f-DP", "fair coins, and a Gaussian trade-off curve"
        n = len(values)
        return AuditBound(lower, self.delta, self.confidence, method, assumes, n, r, v)

    def _best(
        self, scores: Floats, is_member: Flags, candidates: list[int], significance: float
    ) -> tuple[float, int, int]:
        """Return the largest refuted epsilon over `candidates`, which are numbers of guesses.

        The number of guesses that gave it and the number of right guesses follow it.
        """
        found = []
        for r in candidates:
            v = right_guesses(scores, is_member, r)
            value = self.largest_refuted(len(scores), r, v, significance)
            if self.method == "f-DP":
                value = gaussian_epsilon_below(value, self.delta)
            found.append((value, r, v))
        return max(found)


def _candidates(guesses: int | str | None, n: int) -> list[int]:
    if guesses is None or guesses == "bonferroni":
        return list_of_guesses(n)
    if isinstance(guesses, str):
        raise ValueError(f"guesses must be a number, 'split' or 'bonferroni', got {guesses!r}.")
    return [whole(guesses=guesses, least=1, at_most=n)]


def _finer_and_finer(n: int) -> list[int]:
    """Return candidate numbers of guesses from 4 to n, first far apart, then closer together.

    A good candidate found early saves time on those that follow.
    """
    found: dict[int, None] = {}
    for size in (5, 9, 17, 33, 65):
        found.update(dict.fromkeys(np.geomspace(min(4, n), n, size).astype(int).tolist()))
    return list(found)


def _cut(mu: float, share: float) -> float:
    """Return the cut t such that an ideal attack makes guesses on a given `share` of canaries.

    Scores have standard deviation 1 and means mu/2 (members) and -mu/2 (others). The attack guesses
    where |score| > t.
    """
    if share >= 1:
        return 0.0

    def excess(t: float) -> float:
        return float(special.ndtr(mu / 2 - t) + special.ndtr(-mu / 2 - t)) - share

    return float(optimize.brentq(excess, 0.0, mu + 40))  # type: ignore[arg-type]  # a float
