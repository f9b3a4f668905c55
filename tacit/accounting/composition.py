"""Basic and strong composition, as used before the moments accountant, and the asymptotic bound.

Both price each release as (epsilon, delta)-DP, which takes a share of delta for every Gaussian
release, and compose those pairs. They serve to reproduce published figures; `RDP` is far tighter.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from scipy import special

from tacit import events as ev
from tacit._arrays import Floats
from tacit._bisection import bisected
from tacit._check import in_closed_unit, in_open_unit, non_negative, one_of, positive, whole
from tacit.accounting.compose import flatten
from tacit.accounting.gdp import gaussian_epsilon
from tacit.accounting.one_event import (
    ADD_REMOVE,
    BoundedLoss,
    epsilon_and_delta,
    gaussian_shift,
    rounded_epsilon,
    sampled_epsilon,
)
from tacit.accounting.rdp import RDP
from tacit.errors import UnsupportedEvent
from tacit.events import Event, Relation

_SHARES: Floats = special.expit(np.linspace(-6, 6, 241))
"""Shares of delta tried for the Gaussian releases; the rest pays for strong composition itself."""
_LEAST_DELTA = 1e-300


@dataclass(frozen=True)
class BasicComposition:
    """Basic composition: epsilons and deltas add. Dwork & Roth 2014, Thm. 3.16.

    Delta first pays for releases that state a delta. The Gaussian releases get equal shares of the
    remainder, and each costs its exact epsilon at its share. Sampling at rate q turns
    (epsilon, delta) into (log(1 + q (e^epsilon - 1)), q delta).

    >>> round(BasicComposition().epsilon(ev.Repeated(ev.PureDP(0.1), 100), delta=1e-5), 6)
    10.0
    """

    def epsilon(self, event: Event, *, delta: float, relation: Relation = ADD_REMOVE) -> float:
        """Return the sum of all epsilons; infinity if the stated deltas alone exceed `delta`."""
        return _basic(_releases(event, relation), in_open_unit(delta=delta))

    def delta(self, event: Event, *, epsilon: float, relation: Relation = ADD_REMOVE) -> float:
        """Return the smallest delta at which the event costs at most `epsilon`; 1 if none does."""
        releases = _releases(event, relation)
        return _invert(lambda d: _basic(releases, d), non_negative(epsilon=epsilon))


@dataclass(frozen=True, kw_only=True)
class StrongComposition:
    """Strong (also called advanced) composition: Dwork, Rothblum & Vadhan 2010, Thm. III.3.

    The recipe `"published"` is what Abadi et al. 2016 compare with (9.34 in their Section 5.1). A
    Gaussian release with delta d costs sqrt(2 log(1.25 / d)) / noise, sampling multiplies this by
    the rate, and k releases cost epsilon sqrt(2 k log(1 / d')) + k epsilon^2, d' being the delta
    of the theorem. Multiplying by the rate is not proved and may give too low a value, so
    `UnsupportedEvent` is raised if `RDP` gives more. The recipe `"rigorous"` uses the exact
    Gaussian epsilon, log(1 + rate (e^epsilon - 1)) on a sample, and epsilon tanh(epsilon / 2)
    instead of epsilon^2 (Kairouz, Oh & Viswanath 2015, Thm. 3.5); it is proved.

    >>> run = ev.Repeated(ev.PoissonSampled(0.01, ev.Gaussian(4.0)), 10_000)
    >>> round(StrongComposition().epsilon(run, delta=1e-5), 2)
    9.34
    """

    recipe: Literal["published", "rigorous"] = "published"

    def __post_init__(self) -> None:
        one_of(("published", "rigorous"), recipe=self.recipe)

    def epsilon(self, event: Event, *, delta: float, relation: Relation = ADD_REMOVE) -> float:
        """Return the least epsilon over splits of `delta` into two parts.

        One part is for the Gaussian releases, the other is the d' of the composition theorem.
        """
        delta = in_open_unit(delta=delta)
        found = self._composed(_releases(event, relation), delta)
        if self.recipe == "published":
            _require_at_least(found, RDP().epsilon(event, delta=delta, relation=relation))
        return found

    def delta(self, event: Event, *, epsilon: float, relation: Relation = ADD_REMOVE) -> float:
        """Return the smallest delta at which the event costs at most `epsilon`; 1 if none does."""
        epsilon = non_negative(epsilon=epsilon)
        releases = _releases(event, relation)
        found = _invert(lambda d: self._composed(releases, d), epsilon)
        if self.recipe == "published":
            _require_at_least(found, RDP().delta(event, epsilon=epsilon, relation=relation))
        return found

    def _composed(self, releases: "list[_Release]", delta: float) -> float:
        published = self.recipe == "published"
        best = math.inf if published else _basic(releases, delta)
        left = _left_of(delta, releases)
        counts = np.array([release.times for release in releases])
        shares = _SHARES if published else _SHARES[::20]  # the exact epsilon takes longer
        for share in shares if any(release.shift for release in releases) else [0.0]:
            composing = left * (1 - share)
            if composing <= 0:
                break
            epsilons = _epsilons(releases, left * share, published=published)
            squares = float(counts @ epsilons**2)
            drift = squares if published else float(counts @ (epsilons * np.tanh(epsilons / 2)))
            spread = math.sqrt(-2 * math.log(composing) * squares) if squares else 0.0
            best = min(best, spread + drift)
        return best * (1 + 1e-12) if releases else 0.0


def asymptotic_noise(
    *, rate: float, steps: int, epsilon: float, delta: float, constant: float = 1.0
) -> float:
    """Return the noise multiplier of Abadi et al. 2016, Theorem 1, up to its unstated constant.

    The theorem states that constants c1 and c2 exist such that, for epsilon < c1 rate^2 steps,
    noise c2 rate sqrt(steps log(1 / delta)) / epsilon makes DP-SGD (epsilon, delta)-DP. It shows
    how noise scales and nothing else: as c2 is not given, this is NOT a guarantee. Use `calibrate`.

    >>> round(asymptotic_noise(rate=0.01, steps=10_000, epsilon=1.0, delta=1e-5), 3)
    3.393
    """
    rate, steps = in_closed_unit(rate=rate), whole(steps=steps)
    epsilon, delta = positive(epsilon=epsilon), in_open_unit(delta=delta)
    constant = positive(constant=constant)
    return constant * rate * math.sqrt(-steps * math.log(delta)) / epsilon


class _Release(NamedTuple):
    """One kind of release: its count, and its (epsilon, delta) or Gaussian shift unsampled."""

    times: int
    rate: float
    epsilon: float = 0.0
    delta: float = 0.0
    shift: float = 0.0


def _releases(event: Event, relation: Relation) -> list[_Release]:
    return [_release(part, count, Relation(relation)) for part, count in flatten(event).items()]


def _release(event: Event, count: int, relation: Relation) -> _Release:
    """Return the parameters that price one occurrence of `event`; raise for nested samples."""
    rate, inner = 1.0, event
    if isinstance(event, ev.PoissonSampled):
        rate, inner = event.rate, event.event
    elif isinstance(event, ev.RandomAllocation):
        inner = event.event  # one of the releases sees the record and costs its full price
    elif isinstance(event, ev.FixedSizeSampled) and relation is not Relation.ADD_REMOVE:
        # A blanked record is a replaced one; see the Rényi rule of this event.
        rate, inner = event.batch_size / event.n_records, event.event
        relation = Relation.REPLACE_ONE
    if isinstance(inner, ev.Gaussian):
        return _Release(count, rate, shift=gaussian_shift(inner, relation))
    if isinstance(inner, ev.ApproximateDP):
        epsilon, delta = epsilon_and_delta(inner, relation)
        return _Release(count, rate, epsilon=epsilon, delta=delta)
    if isinstance(inner, BoundedLoss):
        return _Release(count, rate, epsilon=rounded_epsilon(inner, relation))
    if isinstance(inner, ev.NonPrivate):
        return _Release(count, 1.0, epsilon=math.inf)
    raise UnsupportedEvent(
        f"composition has no price for {type(event).__name__} under {relation}. Use RDP."
    )


def _left_of(delta: float, releases: list[_Release]) -> float:
    """Return `delta` minus all deltas that the releases state; Gaussian releases may use it."""
    spent = math.fsum(r.times * r.rate * r.delta for r in releases)
    return delta if spent == 0 else delta - spent * (1 + 1e-12)


def _epsilons(releases: list[_Release], delta: float, *, published: bool) -> Floats:
    """Return the epsilon of each release; the Gaussian releases share `delta` equally."""
    weight = math.fsum(r.times * r.rate for r in releases if r.shift)
    share = min(delta / weight, 0.5) if weight else 0.0

    def epsilon(release: _Release) -> float:
        if not release.shift:
            return sampled_epsilon(release.epsilon, release.rate)
        if share <= 0:
            return math.inf
        if published:
            return release.rate * math.sqrt(2 * math.log(1.25 / share)) * release.shift
        return sampled_epsilon(gaussian_epsilon(release.shift, share), release.rate)

    return np.array([epsilon(release) for release in releases])


def _basic(releases: list[_Release], delta: float) -> float:
    left = _left_of(delta, releases)
    if left < 0:
        return math.inf
    epsilons = _epsilons(releases, left, published=False)
    total = math.fsum(r.times * e for r, e in zip(releases, epsilons, strict=True))
    return total * (1 + 1e-12)


def _require_at_least(found: float, proved: float) -> None:
    if found < proved:
        raise UnsupportedEvent(
            "the published recipe of strong composition gives less here than RDP proves, so it is "
            "no guarantee. Use StrongComposition(recipe='rigorous'), RDP or PLD."
        )


def _invert(epsilon_at: Callable[[float], float], epsilon: float) -> float:
    """Return the smallest delta with epsilon_at(delta) <= `epsilon`, up to 1e-6 relative error."""
    low, high = math.log(_LEAST_DELTA), math.log1p(-1e-12)
    if epsilon_at(_LEAST_DELTA) <= epsilon:
        return _LEAST_DELTA
    if epsilon_at(math.exp(high)) > epsilon:
        return 1.0
    found = bisected(lambda log: epsilon_at(math.exp(log)) <= epsilon, low, high, absolute=1e-6)
    return math.exp(found[1])
