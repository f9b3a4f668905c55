"""Event test: does an attack prove that the mechanism is less private than the billed event?

A lower bound on epsilon summarizes an attack in one number, by way of a family of curves. Here the
null hypothesis is the billed event itself, represented by points (epsilon, delta) of its privacy
profile; more points test more sharply. This works for any event that can be priced, also for
subsampled and composed events.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from tacit import accounting
from tacit._arrays import Flags, Floats, Indices
from tacit._bisection import bisected
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
from tacit.auditing.order_statistics import OrderStatisticTest, Power
from tacit.errors import UnsupportedEvent
from tacit.events import Event, Gaussian, Relation, Repeated

_EPSILONS = (*np.arange(0.0, 8.0, 0.1), *np.arange(8.0, 24.1, 0.5))
_QUIETER = 0.1  # thresholds are planned to tell the event from one with e^0.1 times its noise
_NEAR = np.geomspace(1e-9, 1.0, 3000)  # rates between which one line of a curve is used
_SPARSE = 4  # where deltas are costly, one of so many points is priced
_TOLERANCE = 1e-4  # relative error of deltas that is aimed at; they are rounded up
_PRECISE = 1e-3  # of the logarithm of the noise


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
    reference: Scores = (),
    epsilons: Sequence[float] = _EPSILONS,
) -> BillTest:
    """Test the hypothesis that the audited mechanism is as private as the billed `event`.

    `scores` are the attack's scores of the canaries, and `is_member` their membership. Guarantee:
    if the hypothesis is true, it is refuted with probability at most 1 - `confidence`. By default
    the test assumes only fair coins. It uses the recursion of Mahloujifar et al. 2024 for each
    number of guesses in a fixed list (`guesses`), with Bonferroni's correction. With `independent`
    scores (from Dirac canaries, or one from each run) it counts the members above a score of the
    other canaries (`order_statistics`), which is far more powerful; `reference` holds scores of
    further canaries that were never in the training set. `epsilons` are the points of the event's
    privacy profile to use: any increasing list is valid, and more points test more sharply.

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
    n, curve = len(values), billed_curve(event, relation=relation, epsilons=epsilons)
    if independent:
        worse = billed_curve(Repeated(event, 2), relation=relation, epsilons=epsilons)
        test = _planned(worse.power, curve.power, values, members, reference)
        p_value = test.p_value(curve.power, level=1 - confidence)
        return BillTest(p_value, confidence, "independent scores", n)
    inverse = curve.symmetric().inverse
    p_value = _by_guesses(inverse, values, members, guesses or list_of_guesses(n))
    return BillTest(p_value, confidence, FAIR_COINS, n)


def noise_bound(
    scores: Scores,
    is_member: Members,
    event: Event,
    *,
    delta: float,
    confidence: float = 0.95,
    relation: Relation = Relation.ADD_REMOVE,
    reference: Scores = (),
) -> AuditBound:
    """Return a lower bound on epsilon, assuming that only the amount of Gaussian noise is unknown.

    The mechanism is assumed to be `event` with all its noise multiplied by an unknown factor s. The
    function finds the smallest s for which the scores refute the scaled event, and returns epsilon
    of that event. The exact trade-off curve of the event is used, so neither sampling nor
    composition is approximated. Scores must be independent (Dirac canaries); any increasing
    function of them gives the same bound. The test is that of `order_statistics`. `reference` holds
    scores of canaries that were never candidates for the training set, computed like the others
    (`GradientCanaries.reference`). They cost no training and sharpen the bound: with 10 references
    for each canary it reaches the same epsilon as without them from two to three times as many
    canaries.

    >>> import tacit
    >>> from tacit.events import Gaussian, PoissonSampled
    >>> event = PoissonSampled(0.5, Gaussian(0.5))
    >>> rng = np.random.default_rng(0)
    >>> inside = rng.integers(0, 2, 4_000).astype(bool)
    >>> scores = inside * rng.integers(0, 2, 4_000) + rng.normal(0, 0.5, 4_000)
    >>> never_in = rng.normal(0, 0.5, 40_000)
    >>> bound = noise_bound(scores, inside, event, delta=1e-5, reference=never_in)
    >>> 7.5 < bound.epsilon_lower < tacit.epsilon(event, delta=1e-5)
    True
    """
    values, members = checked(scores, is_member, delta, in_open_unit(confidence=confidence))
    relation = Relation(relation)

    def power(log_scale: float) -> Power:
        return billed_curve(_with_noise(event, math.exp(log_scale)), relation=relation).power

    test = _planned(power(0.0), power(_QUIETER), values, members, reference)

    def is_refuted(log_scale: float) -> bool:
        return test.p_value(power(log_scale), level=1 - confidence) < 1 - confidence

    lower, most = 0.0, _smallest_refuted(is_refuted)
    if most is not None:
        refuted = _with_noise(event, math.exp(most))
        lower = accounting.bracket(refuted, delta=delta, relation=relation).lower
    assumes = "independent scores, and the billed mechanism with some amount of noise"
    correct = int(test.above[test.main])
    guesses = correct + int(test.places[test.main]) - 1
    return AuditBound(
        lower, delta, confidence, "noise scale", assumes, len(values), guesses, correct
    )


@dataclass(frozen=True)
class BilledCurve:
    """What a mechanism allows an attack that guesses whether a record is in the data set.

    `removed` and `added` are deltas at `epsilons`: for a data set compared with the same set
    without one record, and for the reverse. Let x be the false and y the true positive rate of the
    guess "in". At each point y <= e^epsilon x + removed, and, by the error rates of the guess
    "out", 1 - x <= e^epsilon (1 - y) + added. More points only sharpen the curve, and a larger
    delta is safe.
    """

    epsilons: Floats
    removed: Floats
    added: Floats

    def power(self, rates: Floats) -> Floats:
        """Return the largest true positive rate at each of the false positive `rates`.

        Every line is an upper bound. The one used is the lowest at a point near the rate.
        """
        slopes, offsets = self._lines
        chosen = self._lowest[np.searchsorted(_NEAR, rates)]
        return np.clip(slopes[chosen] * rates + offsets[chosen], 0.0, 1.0)

    def inverse(self, y: float) -> float:
        """Return the least false positive rate of an attack with true positive rate `y`."""
        slopes, offsets = self._lines
        return max(0.0, float(((y - offsets) / slopes).max()))

    def symmetric(self) -> "BilledCurve":
        """Return the curve for attacks whose guess may be "in" or "out": the worse of both."""
        worst = np.maximum(self.removed, self.added)
        return BilledCurve(self.epsilons, worst, worst)

    @cached_property
    def _lowest(self) -> Indices:
        """Number of the lowest line in each interval that `_NEAR` divides all rates into."""
        slopes, offsets = self._lines
        middles = np.concatenate([_NEAR[:1], (_NEAR[1:] + _NEAR[:-1]) / 2, _NEAR[-1:]])
        return np.argmin(np.multiply.outer(middles, slopes) + offsets, axis=1)

    @cached_property
    def _lines(self) -> tuple[Floats, Floats]:
        steep, flat = np.exp(self.epsilons), np.exp(-self.epsilons)
        offsets = np.concatenate([self.removed, 1 - flat * (1 - self.added)])
        return np.concatenate([steep, flat]), offsets


def billed_curve(
    event: Event, *, relation: Relation = Relation.ADD_REMOVE, epsilons: Sequence[float] = _EPSILONS
) -> BilledCurve:
    """Return the bound of `event` on attacks, computed from its deltas at `epsilons`."""
    return _billed_curve(event, Relation(relation), tuple(float(epsilon) for epsilon in epsilons))


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
def _billed_curve(event: Event, relation: Relation, epsilons: tuple[float, ...]) -> BilledCurve:
    points, accountant = np.array(epsilons), accounting.PLD(tolerance=_TOLERANCE)
    try:
        return BilledCurve(points, *accountant.profiles(event, points, relation=relation))
    except UnsupportedEvent:
        some = points[::_SPARSE]
        found = [accounting.delta(event, epsilon=epsilon, relation=relation) for epsilon in some]
        # Delta falls as epsilon grows, so the one of an earlier point is safe.
        deltas = np.repeat(found, _SPARSE)[: len(points)]
        return BilledCurve(points, deltas, deltas)


def _smallest_refuted(is_refuted: Callable[[float], bool]) -> float | None:
    """Return the smallest logarithm of a noise scale that is refuted, rounded up.

    None if noise e^3 times as large as billed is not refuted. Scales are not searched below e^-3.
    """
    most = next((scale for scale in (0.0, 0.3, 1.0, 3.0) if is_refuted(scale)), None)
    if most is None:
        return None
    for least in (most - 0.3, most - 1.0, -3.0):
        if not is_refuted(least):
            break
        most = least
    return bisected(is_refuted, least, most, absolute=_PRECISE)[1]


def _planned(
    expected: Power, other: Power, scores: Floats, is_member: Flags, reference: Scores
) -> OrderStatisticTest:
    """Return the order-statistic test of the scores, among which those of `reference` are out."""
    more = np.asarray(reference, np.float64)
    if more.ndim != 1 or np.isnan(more).any():
        raise ValueError("reference must be a flat list of scores without NaN.")
    members = np.concatenate([is_member, np.zeros(len(more), bool)])
    return OrderStatisticTest.plan(expected, other, np.concatenate([scores, more]), members)


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
    _, high = bisected(lambda decade: rejects(10**decade), low, high, absolute=4e-4)
    return min(1.0, 10**high)
