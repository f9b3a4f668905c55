"""Event test: does an attack prove that the mechanism is less private than the billed event?

A lower bound on epsilon summarizes an attack in one number, by way of a family of curves. Here the
null hypothesis is the billed event itself, represented by points (epsilon, delta) of its privacy
profile; more points test more sharply. This works for any event that can be priced, also for
subsampled and composed events.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from tacit import accounting
from tacit._arrays import Flags, Floats
from tacit._check import in_open_unit
from tacit.auditing.one_run import (
    FAIR_COINS,
    AuditBound,
    Inverse,
    Members,
    Scores,
    checked,
    list_of_guesses,
    rejects_tradeoff,
    right_guesses,
)
from tacit.auditing.order_statistics import (
    order_statistic_p,
    plan_members,
    right_members,
    share_right,
)
from tacit.auditing.threshold import error_limits, split_threshold
from tacit.errors import UnsupportedEvent
from tacit.events import Event, Gaussian, Relation

_EPSILONS = (
    *(0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5),
    *(5.0, 5.5, 6.0, 7.0, 8.0, 10.0, 13.0, 18.0, 24.0),
)
_AT_ONCE = 2  # epsilons that are priced in one call
_QUIETER = 0.15  # guesses are planned to tell the event from one with e^0.15 times its noise
_NEGLIGIBLE = 1e-8  # a delta below which larger epsilons are not priced


@dataclass(frozen=True)
class BillTest:
    """Result of testing the event that was billed: a small `p_value` is evidence of a wrong bill.

    `assumes` states in words what the test assumes about the scores.
    """

    p_value: float
    confidence: float
    assumes: str
    n_canaries: int

    @property
    def is_refuted(self) -> bool:
        """Whether the test shows, at the stated confidence, that the bill is wrong."""
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
    epsilons: Sequence[float] = _EPSILONS,
) -> BillTest:
    """Test the hypothesis that the audited mechanism is as private as the billed `event`.

    `scores` are the attack's scores of the canaries, and `is_member` their membership. Guarantee:
    if the hypothesis is true, it is refuted with probability at most 1 - `confidence`. By default
    the test assumes only fair coins. It uses the recursion of Mahloujifar et al. 2024 for each
    number of guesses in a fixed list (`guesses`), with Bonferroni's correction. With `independent`
    scores (from Dirac canaries, or one from each run) it uses Clopper-Pearson limits at a threshold
    chosen on a tenth of the scores, which is far more powerful. `epsilons` are the points of the
    event's privacy profile to use: any increasing list is valid, and more points test more sharply.

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
    inverse = billed_curve(event, relation=relation, epsilons=epsilons)
    if independent:
        p_value = _by_rates(inverse, values, members)
        assumes = "independent scores"
    else:
        p_value = _by_guesses(inverse, values, members, guesses or list_of_guesses(len(values)))
        assumes = FAIR_COINS
    return BillTest(p_value, confidence, assumes, len(values))


def noise_bound(
    scores: Scores,
    is_member: Members,
    event: Event,
    *,
    delta: float,
    confidence: float = 0.95,
    relation: Relation = Relation.ADD_REMOVE,
) -> AuditBound:
    """Return a lower bound on epsilon, assuming that only the amount of Gaussian noise is unknown.

    The mechanism is assumed to be `event` with all its noise multiplied by an unknown factor s. The
    function finds the smallest s for which the scores refute the scaled event, and returns epsilon
    of that event. The exact trade-off curve of the event is used, so neither sampling nor
    composition is approximated. Scores must be independent (Dirac canaries). The test is that of
    `order_statistics`: the canaries with the highest scores are guessed to be members.

    >>> import tacit
    >>> from tacit.events import Gaussian, PoissonSampled
    >>> event = PoissonSampled(0.5, Gaussian(0.5))
    >>> rng = np.random.default_rng(0)
    >>> inside = rng.integers(0, 2, 4_000).astype(bool)
    >>> scores = inside * rng.integers(0, 2, 4_000) + rng.normal(0, 0.5, 4_000)
    >>> bound = noise_bound(scores, inside, event, delta=1e-5)
    >>> 6.5 < bound.epsilon_lower < tacit.epsilon(event, delta=1e-5)
    True
    """
    values, members = checked(scores, is_member, delta, in_open_unit(confidence=confidence))
    relation, n = Relation(relation), len(values)

    def right_of(log_scale: float) -> Callable[[Floats], Floats]:
        scaled = _with_noise(event, math.exp(-log_scale))
        return share_right(billed_curve(scaled, relation=relation))

    guesses = plan_members(right_of(0.0), right_of(-_QUIETER), n)  # from public facts alone
    correct = right_members(values, members, guesses)

    def is_refuted(log_scale: float) -> bool:
        return order_statistic_p(right_of(log_scale), n, guesses, correct) < 1 - confidence

    lower, least, most = 0.0, -3.0, 3.0  # minus the logarithm of the noise scale
    if is_refuted(least):
        while most - least > 0.01:
            middle = (least + most) / 2
            least, most = (middle, most) if is_refuted(middle) else (least, middle)
        refuted = _with_noise(event, math.exp(-least))
        lower = accounting.bracket(refuted, delta=delta, relation=relation).lower
    assumes = "independent scores, and the billed mechanism with some amount of noise"
    return AuditBound(lower, delta, confidence, "noise scale", assumes, n, guesses, correct)


def billed_curve(
    event: Event, *, relation: Relation = Relation.ADD_REMOVE, epsilons: Sequence[float] = _EPSILONS
) -> Inverse:
    """Return a bound on attacks against `event`: the least false positive rate at each power.

    The result maps a true positive rate to the least false positive rate that the event allows. It
    is computed from the deltas of the event at `epsilons`, points of its privacy profile.
    """
    grid = tuple(float(epsilon) for epsilon in epsilons)
    return profile_inverse(np.array(grid), _deltas(event, grid, Relation(relation)))


def profile_inverse(epsilons: Floats, deltas: Floats) -> Inverse:
    """Return the least false positive rate of an attack as a function of its true positive rate.

    The mechanism under attack is (epsilon, delta)-DP at each of the given points. Let x be the
    false positive rate, and f its trade-off curve, so that the true positive rate is at most
    1 - f(x). At each point 1 - f(x) <= e^epsilon x + delta, and, because f is symmetric, also
    1 - f(x) <= 1 - e^-epsilon (1 - delta - x): two lines, each solved for x. More points only
    sharpen the result, and a larger delta is safe.
    """
    slopes = np.exp(np.concatenate([-epsilons, epsilons]))
    offsets = np.concatenate([-deltas * np.exp(-epsilons), 1 - deltas - np.exp(epsilons)])
    return lambda y: max(0.0, float((slopes * y + offsets).max()))


def _with_noise(event: Any, scale: float) -> Any:  # Any: events, and the tuples inside them
    """Return `event` with the multiplier of all Gaussian noise inside it multiplied by `scale`."""
    if isinstance(event, tuple):
        return tuple(_with_noise(part, scale) for part in event)
    if isinstance(event, Gaussian):
        return replace(event, noise_multiplier=event.noise_multiplier * scale)
    if not isinstance(event, Event):
        return event
    names = [f.name for f in fields(event)]  # type: ignore[arg-type]  # every event is a dataclass
    inner = {name: _with_noise(getattr(event, name), scale) for name in names}
    return replace(event, **inner)  # type: ignore[type-var]  # as above


@lru_cache(maxsize=256)
def _deltas(event: Event, epsilons: tuple[float, ...], relation: Relation) -> Floats:
    """Return the delta of `event` at each of the increasing `epsilons`, or an upper bound on it.

    Once delta is negligible it is repeated for all larger epsilons, which saves time.
    """
    found: list[float] = []
    for start in range(0, len(epsilons), _AT_ONCE):
        if found and found[-1] < _NEGLIGIBLE:
            break
        some = epsilons[start : start + _AT_ONCE]
        try:
            found += accounting.PLD().deltas(event, some, relation=relation).tolist()
        except UnsupportedEvent:
            found += [accounting.delta(event, epsilon=e, relation=relation) for e in some]
    # Delta falls as epsilon grows, so an earlier one is safe.
    return np.array(found + found[-1:] * (len(epsilons) - len(found)))


def _excess(inverse: Inverse, false_positive: float, false_negative: float) -> float:
    """Return how far an attack's error rates are below what the trade-off curve allows.

    `inverse` maps a true positive rate to the least false positive rate. A positive result refutes
    the curve.
    """
    return max(
        inverse(1 - false_negative) - false_positive,
        inverse(1 - false_positive) - false_negative,
    )


def _by_rates(inverse: Inverse, scores: Floats, is_member: Flags) -> float:
    threshold, rest, known = split_threshold(
        lambda fpr, fnr: _excess(inverse, fpr, fnr), scores, is_member
    )
    return _smallest(lambda p: _excess(inverse, *error_limits(rest, known, threshold, p / 2)) > 0)


def _by_guesses(
    inverse: Inverse, scores: Floats, is_member: Flags, guesses: Sequence[int]
) -> float:
    n = len(scores)
    each = [(r, right_guesses(scores, is_member, r)) for r in guesses]
    found = [_smallest(lambda p, r=r, v=v: rejects_tradeoff(inverse, n, r, v, p)) for r, v in each]
    return min(1.0, len(found) * min(found))


def _smallest(rejects: Callable[[float], bool]) -> float:
    """Return the p-value: the smallest significance level at which `rejects` is true, else 1.

    It is rounded up by at most 0.1 %, and is at least 1e-12.
    """
    low, high = -12.0, 0.0  # decades
    if not rejects(1.0 - 1e-9):
        return 1.0
    if rejects(10**low):
        return 10**low
    while high - low > 4e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if rejects(10**middle) else (middle, high)
    return min(1.0, 10**high)
