"""Composition before the moments accountant: basic, strong, and the asymptotic bound.

Basic and strong composition first price each release as (epsilon, delta)-DP, which takes a share of
delta for every Gaussian release, and then compose those pairs. Kept for comparison with published
figures: `PLD` and `RDP` are far tighter.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from scipy import special

from tacit._check import in_closed_unit, in_open_unit, non_negative, positive, whole
from tacit.accounting.compose import flatten
from tacit.accounting.gdp import gaussian_epsilon
from tacit.accounting.rdp import RDP
from tacit.accounting.rdp.curves import (
    BoundedLoss,
    approximate_pair,
    bounded_epsilon,
    diluted_epsilon,
    gaussian_shift,
)
from tacit.errors import UnsupportedEvent
from tacit.events import (
    ApproximateDP,
    Event,
    FixedSizeSampled,
    Gaussian,
    NonPrivate,
    PoissonSampled,
    RandomAllocation,
    Relation,
)

_SHARES = special.expit(np.linspace(-6, 6, 241))
"""Parts of delta tried for the Gaussian releases; the rest pays for strong composition itself."""

_LEAST_DELTA = 1e-300


@dataclass(frozen=True)
class BasicComposition:
    """Epsilons and deltas add: Dwork & Roth 2014, Thm. 3.16.

    Gaussian releases share what is left of delta evenly and get their exact epsilon for it;
    sampling at rate q turns (epsilon, delta) into (log(1 + q (e^epsilon - 1)), q delta).

    >>> from tacit.events import PureDP, Repeated
    >>> round(BasicComposition().epsilon(Repeated(PureDP(0.1), 100), delta=1e-5), 6)
    10.0
    """

    def epsilon(
        self, event: Event, *, delta: float, relation: Relation = Relation.ADD_REMOVE
    ) -> float:
        """Sum of the epsilons, with deltas that sum to `delta`; infinite if they cannot."""
        return _basic(_releases(event, relation), in_open_unit(delta=delta))

    def delta(
        self, event: Event, *, epsilon: float, relation: Relation = Relation.ADD_REMOVE
    ) -> float:
        """Smallest delta at which `epsilon` is enough; 1 if none is."""
        releases = _releases(event, relation)
        return _invert(lambda d: _basic(releases, d), non_negative(epsilon=epsilon))


@dataclass(frozen=True, kw_only=True)
class StrongComposition:
    """Strong composition: Dwork, Rothblum & Vadhan 2010, Thm. III.3.

    Parameters
    ----------
    recipe
        `"published"` is what Abadi et al. 2016 compare with (9.34 in their Section 5.1): the
        classical sqrt(2 log(1.25 / d)) / noise for each Gaussian release, sampling taken as
        multiplication by the rate, and epsilon sqrt(2 k log(1 / d')) + k epsilon^2. Multiplying
        by the rate is favorable, not proved, so the value is checked against `RDP` and
        `UnsupportedEvent` raised where it is less. `"rigorous"` uses the exact Gaussian epsilon,
        log(1 + q (e^epsilon - 1)), and epsilon tanh(epsilon / 2) for epsilon^2 (Kairouz, Oh &
        Viswanath 2015, Thm. 3.5); it needs no check.

    Examples
    --------
    >>> from tacit.events import Repeated
    >>> run = Repeated(PoissonSampled(0.01, Gaussian(4.0)), 10_000)
    >>> round(StrongComposition().epsilon(run, delta=1e-5), 2)
    9.34
    """

    recipe: Literal["published", "rigorous"] = "published"

    def __post_init__(self) -> None:
        if self.recipe not in ("published", "rigorous"):
            raise ValueError(f"recipe must be 'published' or 'rigorous', got {self.recipe!r}.")

    def epsilon(
        self, event: Event, *, delta: float, relation: Relation = Relation.ADD_REMOVE
    ) -> float:
        """Epsilon at `delta`, with the best split of delta between releases and composition."""
        delta = in_open_unit(delta=delta)
        found = self._composed(_releases(event, relation), delta)
        if self.recipe == "published":
            _not_below(found, RDP().epsilon(event, delta=delta, relation=relation))
        return found

    def delta(
        self, event: Event, *, epsilon: float, relation: Relation = Relation.ADD_REMOVE
    ) -> float:
        """Smallest delta at which `epsilon` is enough; 1 if none is."""
        epsilon = non_negative(epsilon=epsilon)
        releases = _releases(event, relation)
        found = _invert(lambda d: self._composed(releases, d), epsilon)
        if self.recipe == "published":
            _not_below(found, RDP().delta(event, epsilon=epsilon, relation=relation))
        return found

    def _composed(self, releases: "list[_Release]", delta: float) -> float:
        published = self.recipe == "published"
        best = math.inf if published else _basic(releases, delta)
        has_gaussian = any(release.shift for release in releases)
        left = _left_of(delta, releases)
        shares = _SHARES if published else _SHARES[::20]  # the exact epsilon takes longer
        for share in shares if has_gaussian and left > 0 else [0.0]:
            composing = left * (1 - share)
            if composing <= 0:
                continue
            epsilons = _epsilons(releases, left * share, published=published)
            counts = np.array([release.times for release in releases])
            squares = float(counts @ epsilons**2)
            drift = squares if published else float(counts @ (epsilons * np.tanh(epsilons / 2)))
            spread = math.sqrt(-2 * math.log(composing) * squares) if squares else 0.0
            best = min(best, spread + drift)
        return best * (1 + 1e-12) if releases else 0.0


def asymptotic_noise(
    *, rate: float, steps: int, epsilon: float, delta: float, constant: float = 1.0
) -> float:
    """Noise multiplier of Abadi et al. 2016, Theorem 1, up to its unstated constant.

    The theorem says that constants c1 and c2 exist such that, for epsilon < c1 rate^2 steps,
    noise c2 rate sqrt(steps log(1 / delta)) / epsilon makes DP-SGD (epsilon, delta)-DP. It tells
    how noise scales and nothing else: as c2 is not given, this is NOT a guarantee. Use `calibrate`.

    >>> round(asymptotic_noise(rate=0.01, steps=10_000, epsilon=1.0, delta=1e-5), 3)
    3.393
    """
    rate, steps = in_closed_unit(rate=rate), whole(steps=steps)
    epsilon, delta = positive(epsilon=epsilon), in_open_unit(delta=delta)
    constant = positive(constant=constant)
    return constant * rate * math.sqrt(-steps * math.log(delta)) / epsilon


class _Release(NamedTuple):
    """(epsilon, delta) of a release before sampling, or the shift of a Gaussian one."""

    times: int
    rate: float
    epsilon: float = 0.0
    delta: float = 0.0
    shift: float = 0.0


def _releases(event: Event, relation: Relation) -> list[_Release]:
    relation = Relation(relation)
    return [_release(part, count, relation) for part, count in flatten(event).items()]


def _release(event: Event, count: int, relation: Relation) -> _Release:
    """How one occurrence is priced; a sample of a sample is not."""
    rate, inner = 1.0, event
    if isinstance(event, PoissonSampled):
        rate, inner = event.rate, event.event
    elif isinstance(event, RandomAllocation):
        inner = event.event  # one of the releases sees the record: its full price
    elif isinstance(event, FixedSizeSampled) and relation is not Relation.ADD_REMOVE:
        # A blanked record is a replaced one; see the Rényi rule of this event.
        rate, inner = event.batch_size / event.n_records, event.event
        relation = Relation.REPLACE_ONE
    if isinstance(inner, Gaussian):
        return _Release(count, rate, shift=gaussian_shift(inner, relation))
    if isinstance(inner, ApproximateDP):
        epsilon, delta = approximate_pair(inner, relation)
        return _Release(count, rate, epsilon=epsilon, delta=delta)
    if isinstance(inner, BoundedLoss):
        return _Release(count, rate, epsilon=bounded_epsilon(inner, relation))
    if isinstance(inner, NonPrivate):
        return _Release(count, 1.0, epsilon=math.inf)
    raise UnsupportedEvent(
        f"classic composition has no price for {type(event).__name__} under {relation}. Use RDP."
    )


def _left_of(delta: float, releases: list[_Release]) -> float:
    """What remains of delta after the deltas that the releases bring with them."""
    spent = math.fsum(r.times * r.rate * r.delta for r in releases)
    return delta if spent == 0 else delta - spent * (1 + 1e-12)


def _epsilons(releases: list[_Release], delta: float, *, published: bool) -> np.ndarray:
    """Epsilon of each release; the Gaussian ones get equal shares of `delta` before sampling."""
    weight = math.fsum(r.times * r.rate for r in releases if r.shift)
    share = min(delta / weight, 0.5) if weight else 0.0
    found = []
    for release in releases:
        if not release.shift:
            found.append(diluted_epsilon(release.epsilon, release.rate))
        elif share <= 0:
            found.append(math.inf)
        elif published:
            found.append(release.rate * math.sqrt(2 * math.log(1.25 / share)) * release.shift)
        else:
            exact = gaussian_epsilon(release.shift, share)
            found.append(diluted_epsilon(exact, release.rate))
    return np.array(found)


def _basic(releases: list[_Release], delta: float) -> float:
    left = _left_of(delta, releases)
    if left < 0:
        return math.inf
    epsilons = _epsilons(releases, left, published=False)
    total = math.fsum(r.times * e for r, e in zip(releases, epsilons, strict=True))
    return total * (1 + 1e-12)


def _not_below(found: float, proved: float) -> None:
    if found < proved:
        raise UnsupportedEvent(
            "the published recipe of strong composition falls below a proved bound here, so it is "
            "no guarantee. Use StrongComposition(recipe='rigorous'), RDP or PLD."
        )


def _invert(epsilon_at: Callable[[float], float], epsilon: float) -> float:
    """Smallest delta, up to a millionth above it, whose epsilon is at most the one given."""
    low, high = math.log(_LEAST_DELTA), math.log1p(-1e-12)
    if epsilon_at(_LEAST_DELTA) <= epsilon:
        return _LEAST_DELTA
    if epsilon_at(math.exp(high)) > epsilon:
        return 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        if epsilon_at(math.exp(middle)) <= epsilon:
            high = middle
        else:
            low = middle
    return math.exp(high)
