"""How many guesses to make: decided before the scores are seen, or paid for.

Trying every number and keeping the best is not a valid test: with 100,000 canaries and noise
multiplier 2 (epsilon 1.99) it reaches lower bounds above 2.2. Three ways are valid:

- a number fixed in advance; `plan_guesses` finds a good one from public facts, the bill above all;
- a split: choose on half of the canaries, test on the other half;
- Bonferroni: a short fixed list, each number tested at its share of the error.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from scipy import optimize, special

from tacit._check import in_open_unit, positive, whole
from tacit.auditing import _refute

Test = Callable[[int, int, int, float], float]
"""(canaries, guesses, right guesses, significance) -> largest epsilon that is refuted."""


@lru_cache(maxsize=256)
def plan_guesses(
    n_canaries: int,
    *,
    epsilon: float,
    delta: float,
    method: str = "one run",
    confidence: float = 0.95,
) -> int:
    """Number of guesses that serves an ideal attack best if the bill (epsilon, delta) is tight.

    Computed from public facts alone, so a bound with it is valid whatever the scores turn out to
    be. The ideal attack sees a Gaussian mechanism of that bill (a Laplace one if delta is 0), and
    is right as often as expected. `method` is `"one run"` or `"f-DP"`.

    >>> plan_guesses(100_000, epsilon=4.37, delta=1e-5)
    1634
    """
    n = whole(n_canaries=n_canaries, least=2)
    positive(epsilon=epsilon)
    in_open_unit(confidence=confidence)
    if method not in ("one run", "f-DP"):
        raise ValueError(f"method must be 'one run' or 'f-DP', got {method!r}.")
    if delta == 0:
        # Beyond both centers every guess is as good as pure DP allows; between them it is worse.
        return max(1, round(n * (1 + np.exp(-epsilon)) / 2))
    mu = _refute.gaussian_mu(epsilon, in_open_unit(delta=delta))
    refutes = _refuting(n, delta, 1 - confidence, method)
    best, chosen = 0.0, max(1, n // 8)  # best: an epsilon, or a mu for f-DP
    for r in _finer_and_finer(n):
        v = int(n * special.ndtr(mu / 2 - _cut(mu, r / n)))
        if refutes(best, r, v):
            best = _refute.largest(lambda x, r=r, v=v: refutes(x, r, v), at_least=best)
            chosen = r
    return chosen


def list_of_guesses(n: int) -> list[int]:
    """A fixed list, from a few sure guesses to half of the canaries: depends on `n` alone."""
    return sorted({r for share in range(1, 9) if (r := n // 2**share) >= 8}) or [n]


def right_guesses(scores: np.ndarray, is_member: np.ndarray, r: int) -> int:
    """How many are right when the highest scores are guessed in and the lowest out."""
    order = np.argsort(scores, kind="stable")
    low, high = order[: r // 2], order[len(order) - (r - r // 2) :]
    return int(is_member[high].sum() + (~is_member[low]).sum())


def tested(
    test: Test,
    scores: np.ndarray,
    is_member: np.ndarray,
    guesses: int | str,
    significance: float,
) -> tuple[float, int, int, int]:
    """Best (bound, guesses, right guesses, canaries) that the rule `guesses` allows."""
    if guesses == "split":
        half = len(scores) // 2
        r = _best(test, scores[:half], is_member[:half], list_of_guesses(half), significance)[1]
        scores, is_member = scores[half:], is_member[half:]
        candidates = [min(r, len(scores))]
    elif guesses == "bonferroni":
        candidates = list_of_guesses(len(scores))
    elif isinstance(guesses, str):
        raise ValueError(f"guesses must be a number, 'split' or 'bonferroni', got {guesses!r}.")
    else:
        candidates = [whole(guesses=guesses, least=1)]
        if candidates[0] > len(scores):
            raise ValueError(f"guesses must be at most {len(scores)}, got {guesses}.")
    bound, r, v = _best(test, scores, is_member, candidates, significance / len(candidates))
    return bound, r, v, len(scores)


def _best(
    test: Test, scores: np.ndarray, is_member: np.ndarray, candidates: Sequence[int], share: float
) -> tuple[float, int, int]:
    counts = [(r, right_guesses(scores, is_member, r)) for r in candidates]
    return max((test(len(scores), r, v, share), r, v) for r, v in counts)


def _refuting(
    n: int, delta: float, significance: float, method: str
) -> Callable[[float, int, int], bool]:
    if method == "one run":
        return lambda epsilon, r, v: _refute.one_run_p_value(n, r, v, epsilon, delta) < significance
    return lambda mu, r, v: _refute.rejects_tradeoff(
        _refute.gaussian_inverse(mu), n, r, v, significance
    )


def _finer_and_finer(n: int) -> list[int]:
    """Numbers of guesses from 4 to n, a few far apart first: a good start saves work later."""
    found: dict[int, None] = {}
    for size in (5, 9, 17, 33, 65):
        found.update(dict.fromkeys(np.geomspace(min(4, n), n, size).astype(int).tolist()))
    return list(found)


def _cut(mu: float, share: float) -> float:
    """Distance from the middle beyond which an ideal Gaussian attack guesses this share."""
    if share >= 1:
        return 0.0

    def excess(t: float) -> float:
        return float(special.ndtr(mu / 2 - t) + special.ndtr(-mu / 2 - t)) - share

    return float(optimize.brentq(excess, 0.0, mu + 40))  # type: ignore[arg-type]  # a float
