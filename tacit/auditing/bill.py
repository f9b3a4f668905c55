"""Test of a bill on its own terms: could this event, with its whole trade-off curve, be true?

A lower bound on epsilon translates an attack into one number, by way of a family of curves. Here
nothing is translated: the null hypothesis is the billed event itself, by as many points
(epsilon, delta) of its privacy profile as one likes. It holds for any event that can be priced,
subsampled and composed ones included.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tacit import accounting
from tacit._check import in_open_unit
from tacit.auditing import _refute
from tacit.auditing.bounds import Members, Scores, checked, error_limits, split_threshold
from tacit.auditing.guesses import list_of_guesses, right_guesses
from tacit.errors import UnsupportedEvent
from tacit.events import Event, Relation

_EPSILONS = (0.0, *np.geomspace(0.02, 40.0, 48).tolist())


@dataclass(frozen=True)
class BillTest:
    """How an attack's success sits with a bill: small `p_value`s speak against it."""

    p_value: float
    confidence: float
    assumes: str
    n_canaries: int

    @property
    def is_refuted(self) -> bool:
        """Whether the bill is wrong at the stated confidence."""
        return self.p_value < 1 - self.confidence


def refute_event(
    scores: Scores,
    is_member: Members,
    event: Event,
    *,
    confidence: float = 0.95,
    relation: Relation = Relation.ADD_REMOVE,
    guesses: Sequence[int] | None = None,
    independent: bool = False,
) -> BillTest:
    """Test of the hypothesis that what made these scores is `event`, as billed.

    Guarantee: if it is, the bill is refuted with probability at most 1 - `confidence`. With fair
    coins alone by the recursion of Mahloujifar et al. 2024, over a fixed list of numbers of guesses
    (Bonferroni). With `independent` scores (Dirac canaries, or runs) by Clopper-Pearson limits at a
    threshold chosen on a tenth of the scores, which is far more powerful.

    >>> from tacit.events import Gaussian
    >>> rng = np.random.default_rng(0)
    >>> inside = rng.integers(0, 2, 4_000).astype(bool)
    >>> scores = inside + rng.normal(0, 0.5, 4_000)              # noise multiplier 0.5
    >>> refute_event(scores, inside, Gaussian(0.5), independent=True).is_refuted
    False
    >>> refute_event(scores, inside, Gaussian(1.0), independent=True).is_refuted
    True
    """
    values, members = checked(scores, is_member, 0.0, in_open_unit(confidence=confidence))
    inverse = billed_curve(event, relation=relation)
    if independent:
        p_value = _by_rates(inverse, values, members)
        assumes = "independent scores"
    else:
        p_value = _by_guesses(inverse, values, members, guesses or list_of_guesses(len(values)))
        assumes = "each canary was in or out by an independent fair coin"
    return BillTest(p_value, confidence, assumes, len(values))


def billed_curve(
    event: Event, *, relation: Relation = Relation.ADD_REMOVE, epsilons: Sequence[float] = _EPSILONS
) -> _refute.Inverse:
    """Inverse blow-up of the trade-off curve of `event`, from certified points of its profile."""
    grid = tuple(float(epsilon) for epsilon in epsilons)
    return _refute.profile_inverse(np.array(grid), _deltas(event, grid, Relation(relation)))


@lru_cache(maxsize=64)
def _deltas(event: Event, epsilons: tuple[float, ...], relation: Relation) -> np.ndarray:
    try:
        return accounting.PLD().deltas(event, epsilons, relation=relation)
    except UnsupportedEvent:
        each = [accounting.delta(event, epsilon=e, relation=relation) for e in epsilons]
        return np.array(each)


def _by_rates(inverse: _refute.Inverse, scores: np.ndarray, is_member: np.ndarray) -> float:
    def excess(false_positive: float, false_negative: float) -> float:
        return max(
            inverse(1 - false_negative) - false_positive,
            inverse(1 - false_positive) - false_negative,
        )

    threshold, rest, known = split_threshold(excess, scores, is_member)
    return _smallest(
        lambda p: _refute.rejects_rates(inverse, *error_limits(rest, known, threshold, p / 2))
    )


def _by_guesses(
    inverse: _refute.Inverse, scores: np.ndarray, is_member: np.ndarray, guesses: Sequence[int]
) -> float:
    n = len(scores)
    each = [(r, right_guesses(scores, is_member, r)) for r in guesses]
    found = [
        _smallest(lambda p, r=r, v=v: _refute.rejects_tradeoff(inverse, n, r, v, p))
        for r, v in each
    ]
    return min(1.0, len(found) * min(found))


def _smallest(rejects: Callable[[float], bool]) -> float:
    """Smallest significance that rejects, to a thousandth of itself, rounded up; 1 if none does."""
    low, high = -12.0, 0.0  # decades
    if not rejects(1.0 - 1e-9):
        return 1.0
    if rejects(10**low):
        return 10**low
    while high - low > 4e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if rejects(10**middle) else (middle, high)
    return min(1.0, 10**high)
