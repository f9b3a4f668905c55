"""Prices of events that contain others: `BestOf`, `OneOf`, `ChosenOf`, and pairs of profiles.

The profile delta(t) of an event in both directions of comparison is known where a dominating pair
is (`pld`). It extends to events made of others: a random choice among events has the mean of their
profiles, a choice that may depend on earlier releases at most their maximum, and the best of
several runs has a profile that follows from that of one run (`best_of`).
A profile at finitely many t is again that of a pair (`profile`). So such an event composes with
all others, may be sampled, and has both ends of a bracket.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from tacit import events as ev
from tacit._arrays import Floats
from tacit.accounting.best_of import BestProfile
from tacit.accounting.brackets import Bracket, invert
from tacit.accounting.compose import flatten, only_release
from tacit.accounting.pld.direction import DirectionPrice
from tacit.accounting.pld.loss_laws import Law
from tacit.accounting.pld.mixed_normals import has_mixtures, on_cells
from tacit.accounting.pld.pairs import (
    both_orders,
    neighbors,
    pair_from_above,
    pair_from_below,
    sampled_pair,
)
from tacit.accounting.profile import FARTHEST, Profile
from tacit.accounting.rdp import RDP
from tacit.accounting.rdp.curves import log_deltas
from tacit.accounting.trials import RunLaw, binomial_weights, run_law
from tacit.errors import UnsupportedEvent
from tacit.events import Event, Relation

_NODES = 512
"""Nodes of a profile that are equally spaced in t, and as many equally spaced in log t."""
_MANY_NODES = 4096  # of a profile that is made into a pair, and composed
_ORDERS: Floats = 1 + 2.0 ** (np.arange(-32, 97) / 4)
"""Orders at which Rényi curves are converted to a profile."""
_LEAST = 1e-17  # delta down to which the pair of a nested event is resolved
_LEAST_FLOAT = 1e-290  # below it, products of deltas leave the range of floats
_TOLERANCE = 1e-7

_Table: TypeAlias = tuple[Floats, Floats]  # lower and upper bounds of delta at nodes t >= 0


class Curves(Protocol):
    """Protocol of the two profiles of an event, P against Q and Q against P."""

    def reach(self, delta: float) -> float:
        """Return a t beyond which both deltas are about `delta` or less, or as low as they get."""
        ...

    def tables(self, t: Floats, least: float) -> tuple[_Table, _Table]:
        """Return bounds of delta at `t`, which increases from 0; below `least` they are loose."""
        ...


def curves_of(event: Event, relation: Relation) -> Curves:
    """Return the profiles of `event` in both directions of comparison."""
    only = only_release(event)
    if isinstance(only, ev.BestOf):
        return _BestOfCurves(curves_of(only.event, relation), run_law(only))
    if isinstance(only, ev.OneOf):
        total = math.fsum(only.weights)
        parts = zip(only.weights, only.parts, strict=True)
        return _OneOfCurves([(w / total, curves_of(part, relation)) for w, part in parts if w])
    if isinstance(only, ev.ChosenOf):
        return _LargestCurves([curves_of(part, relation) for part in only.parts])
    if all(has_pair(part, relation) for part in flatten(event)):
        kinds = [_PairCurves.of(one, relation) for one in neighbors(event, relation)]
        return kinds[0] if len(kinds) == 1 else _LargestCurves(kinds)
    return _RenyiCurves(event, relation)


def profiles(curves: Curves, delta: float, nodes: int = _NODES) -> tuple[Profile, ...]:
    """Return the profiles in both directions, one if they are equal, resolved down to `delta`."""
    far = min(max(curves.reach(delta), 1e-9), FARTHEST)
    even = np.linspace(0.0, far, nodes)
    t = np.unique(np.concatenate((even, np.geomspace(1e-4 * far, far, _NODES))))
    first, second = curves.tables(t, delta)
    if all(np.array_equal(a, b) for a, b in zip(first, second, strict=True)):
        return (Profile.two_sided(t, first, first),)
    return Profile.two_sided(t, first, second), Profile.two_sided(t, second, first)


def best_of_bracket(
    event: ev.BestOf, *, delta: float, relation: Relation, only_upper: bool = False
) -> Bracket:
    """Return proved bounds of the epsilon of `event` at `delta`, from the profile of one run.

    The lower end is for the worst score. With `only_upper` both ends are the upper bound.
    """
    law = run_law(event)
    worst = Bracket(0.0, 0.0)
    for profile in _run_profiles(event, relation, delta, law):
        best = BestProfile(profile, law, delta=delta)
        upper = best.upper_epsilon(delta)
        worst = worst.worse(Bracket(upper, upper) if only_upper else best.epsilon(delta))
    return worst


def best_of_delta(event: ev.BestOf, *, epsilon: float, relation: Relation) -> Bracket:
    """Return proved bounds of the delta of `event` at `epsilon`, like `best_of_bracket`."""
    law = run_law(event)
    worst = Bracket(0.0, 1.0)
    for level in (1e-6, 1e-11, _LEAST):  # resolve the profile only as far as the answer needs
        worst = Bracket(0.0, 0.0)
        for profile in _run_profiles(event, relation, level, law):
            best = BestProfile(profile, law, delta=level)
            worst = worst.worse(Bracket.of_delta(best.lower(epsilon), best.upper(epsilon)))
        if worst.upper >= level:
            break
    return worst


def one_of_upper(event: ev.OneOf, *, delta: float, relation: Relation) -> float | None:
    """Return an upper bound of the epsilon of `event` at `delta`; None if a part has no pair.

    The mean of the deltas of all parts is inverted directly, which needs few of its values.
    """
    weighted = zip(event.weights, event.parts, strict=True)
    parts = [(weight, curves_of(part, relation)) for weight, part in weighted if weight]
    total, worst = math.fsum(event.weights), 0.0
    for side in (0, -1):
        prices = [(w / total, one.above[side]) for w, one in parts if isinstance(one, _PairCurves)]
        if len(prices) < len(parts):
            return None
        if math.fsum(w * price.direction.infinite_upper for w, price in prices) > delta:
            return math.inf
        known = [price.epsilon(delta).upper for _, price in prices]
        most = max(known)
        if most > worst:  # the mean costs at most as much as the dearest part
            guess = max((one for one in known if one < math.inf), default=1.0)
            found = invert(_MeanDelta(prices), delta, guess=guess, ceiling=most)
            worst = max(worst, found.upper)
    return worst


def pair_of_nested(event: Event, relation: Relation) -> tuple[Law, Law]:
    """Return laws of the loss of ONE occurrence that bound its price from above.

    Events made of others get the pair of their profile, and so does what is sampled if it has no
    pair of its own; other events get that of `pair_from_above`.
    """
    if isinstance(event, ev.BestOf | ev.OneOf | ev.ChosenOf):
        found = _profiles_of(event, relation)
        return found[0].dominating(), found[-1].dominating()
    if _needs_profile(event, relation):
        rate, drawn = _drawn(event)
        found = _profiles_of(drawn, relation)
        laws = found[0].dominating(), found[-1].dominating()
        return sampled_pair(*laws, rate, relation)
    return pair_from_above(event, relation)


def pair_below_nested(event: Event, relation: Relation) -> tuple[Law, Law]:
    """Return laws of the loss of ONE occurrence that no smaller price can cover.

    `BestOf` and `OneOf` get a pair that their profile dominates; others that of `pair_from_below`.
    """
    if isinstance(event, ev.BestOf | ev.OneOf):
        found = _profiles_of(event, relation)
        return found[0].dominated().loss_law(), found[-1].dominated().loss_law()
    if isinstance(event, ev.SampledWithReplacement):
        return pair_from_below(event, Relation.ZERO_OUT)  # the new record may contribute nothing
    if _needs_profile(event, relation):
        assert isinstance(event, ev.PoissonSampled)
        found = _profiles_of(event.event, relation)
        laws = found[0].dominated().loss_law(), found[-1].dominated().loss_law()
        return sampled_pair(*laws, event.rate, relation)
    return pair_from_below(event, relation)


def has_pair(event: Event, relation: Relation) -> bool:
    """Return whether `pair_of_nested` knows a pair for one occurrence of `event`."""
    if isinstance(event, ev.BestOf):
        return _has_profile(event.event, relation)
    if isinstance(event, ev.OneOf | ev.ChosenOf):
        return all(_has_profile(part, relation) for part in event.parts)
    return _has_own_pair(event, relation) or _needs_profile(event, relation)


def _has_profile(event: Event, relation: Relation) -> bool:
    """Return whether `curves_of` knows the profiles of `event`, from pairs or a Rényi curve."""
    if all(has_pair(part, relation) for part in flatten(event)):
        return True
    try:
        RDP().charge(event, 2.0, relation)
    except UnsupportedEvent:
        return False
    return True


def _has_own_pair(event: Event, relation: Relation) -> bool:
    try:
        pair_from_above(event, relation)
    except UnsupportedEvent:
        return False
    return True


def _needs_profile(event: Event, relation: Relation) -> bool:
    """Return whether `event` is a sample of releases that only have a profile, not a pair."""
    if isinstance(event, ev.SampledWithReplacement):
        is_additive = isinstance(event.event, ev.Gaussian | ev.Laplace)
        return relation is Relation.REPLACE_ONE and is_additive
    if not isinstance(event, ev.PoissonSampled) or relation is Relation.REPLACE_ONE:
        return False
    if _has_own_pair(event, relation):
        return False
    return _has_profile(event.event, relation)


def _drawn(event: Event) -> tuple[float, Event]:
    """Return the probability that a sample holds a record, and what is released if it does.

    With replacement, a record is drawn a binomial number of times k, and k draws of it are replaced
    together with it. So given that it is drawn at all, its replacement, or that of its draws by
    draws of others, costs at most what the release of k and then of k times the contribution does.
    This is all that the proof for a Poisson sample needs (Balle, Barthe & Gaboardi 2018,
    arXiv:1807.01647, Theorem 10).
    """
    if isinstance(event, ev.PoissonSampled):
        return event.rate, event.event
    assert isinstance(event, ev.SampledWithReplacement)
    inner = event.event
    assert isinstance(inner, ev.Gaussian | ev.Laplace)
    counts, weights = binomial_weights(event.batch_size, 1 / event.n_records)
    if event.n_records == 1:
        some = 1.0
    else:
        some = -math.expm1(event.batch_size * math.log1p(-1 / event.n_records))
    noises = [math.nextafter(inner.noise_multiplier / k, 0.0) for k in counts[1:]]
    try:
        drawn = tuple(replace(inner, noise_multiplier=noise) for noise in noises)
    except ValueError as error:
        raise UnsupportedEvent(f"records drawn several times have no price: {error}") from error
    total = math.fsum(weights[1:])
    # Above the rounding of the weights.
    rate = min(some * (1 + 1e-12 * event.batch_size + 1e-9), 1.0)
    return rate, ev.OneOf(drawn, tuple(weight / total for weight in weights[1:]))


def with_lower_end(event: Event, relation: Relation) -> Event:
    """Return the parts of `event` that `pair_below_nested` bounds; the other parts may cost 0.

    A free choice is replaced by its first part, which may always be chosen.
    """
    parts: list[Event] = []
    for part, count in flatten(event).items():
        if isinstance(part, ev.ChosenOf):
            parts.append(ev.Repeated(with_lower_end(part.parts[0], relation), count))
            continue
        try:
            pair_below_nested(part, relation)
        except UnsupportedEvent:
            continue
        parts.append(ev.Repeated(part, count))
    return ev.Sequence(tuple(parts))


@lru_cache(maxsize=16)
def _profiles_of(event: Event, relation: Relation) -> tuple[Profile, ...]:
    return profiles(curves_of(event, relation), _LEAST, nodes=_MANY_NODES)


@lru_cache(maxsize=16)
def _run_profiles(
    event: ev.BestOf, relation: Relation, delta: float, law: RunLaw
) -> tuple[Profile, ...]:
    # The profile of one run must reach far below delta / E[K].
    return profiles(curves_of(event.event, relation), _resolution(delta, law))


def _resolution(delta: float, law: RunLaw) -> float:
    """Return the delta to which the profile of one run is resolved, for `delta` of the best."""
    return max(1e-6 * delta / max(law.mean, 1.0), _LEAST_FLOAT)


class _PairCurves(NamedTuple):
    """Profiles of an event that has a dominating pair, and perhaps a pair that it dominates."""

    above: list[DirectionPrice]
    below: list[DirectionPrice]

    @staticmethod
    def of(event: Event, relation: Relation) -> "_PairCurves":
        above = both_orders(event, relation, pair_of_nested)
        below = both_orders(with_lower_end(event, relation), relation, pair_below_nested)
        # Many deltas of mixtures of Gaussians are found much sooner on cells of their losses.
        is_mixed = any(map(has_mixtures, (*above, *below)))
        if is_mixed:
            above = [on_cells(one, _LEAST, is_above=True) for one in above]
            below = [on_cells(one, _LEAST, is_above=False) for one in below]
        prices = {
            one: DirectionPrice(one, tolerance=_TOLERANCE, is_smooth=is_mixed or None)
            for one in (*above, *below)
        }
        return _PairCurves([prices[one] for one in above], [prices[one] for one in below])

    def reach(self, delta: float) -> float:
        return max(_reach(side, delta) for side in self.above)

    def tables(self, t: Floats, least: float) -> tuple[_Table, _Table]:
        known = {side: side.deltas(t, least=least) for side in {*self.above, *self.below}}
        sides = [(known[low][0], known[up][1]) for low, up in self._matched()]
        return sides[0], sides[-1]

    def _matched(self) -> list[tuple[DirectionPrice, DirectionPrice]]:
        both = len(self.above) > 1 or len(self.below) > 1
        return [(self.below[i], self.above[i]) for i in ((0, -1) if both else (0,))]


class _RenyiCurves:
    """Upper bounds of the profile, the same in both directions, from a Rényi curve."""

    def __init__(self, event: Event, relation: Relation) -> None:
        self.values, self.mass = RDP().charge(event, _ORDERS, relation)

    def reach(self, delta: float) -> float:
        least = self.values + np.log1p(-1 / _ORDERS)
        found = least - (math.log(delta) + np.log(_ORDERS)) / (_ORDERS - 1)
        return max(float(found.min()), 0.0)

    def tables(self, t: Floats, least: float) -> tuple[_Table, _Table]:  # noqa: ARG002  # the form of the protocol
        logs = log_deltas(_ORDERS, self.values, t[:, None]).min(axis=1)
        upper = self.mass + (1 - self.mass) * np.exp(np.minimum(logs, 0.0)) * (1 + 1e-12)
        table = np.zeros(len(t)), np.minimum(upper, 1.0)
        return table, table


class _OneOfCurves(NamedTuple):
    """Profiles of a choice among events: the mean over the public weights."""

    parts: list[tuple[float, Curves]]

    def reach(self, delta: float) -> float:
        return max(curves.reach(delta) for _, curves in self.parts)

    def tables(self, t: Floats, least: float) -> tuple[_Table, _Table]:
        found = [(weight, curves.tables(t, least)) for weight, curves in self.parts]

        def mean(side: int) -> _Table:
            lower = sum((w * tables[side][0] for w, tables in found), np.zeros(len(t)))
            upper = sum((w * tables[side][1] for w, tables in found), np.zeros(len(t)))
            return lower * (1 - 1e-13), upper * (1 + 1e-13)

        return mean(0), mean(1)


class _MeanDelta(NamedTuple):
    """The mean of the curves delta(epsilon) of several events in one direction of comparison."""

    parts: list[tuple[float, DirectionPrice]]

    def delta(self, epsilon: float) -> Bracket:
        found = [(weight, price.delta(epsilon)) for weight, price in self.parts]
        upper = math.fsum(weight * one.upper for weight, one in found) * (1 + 1e-13)
        return Bracket.of_delta(0.0, upper)


class _LargestCurves(NamedTuple):
    """Profiles of a free choice among events, or kinds of neighbors: the largest delta at each t.

    Let l be the loss of what was released before, and c the choice that follows from it. Together
    they have delta(t) = E[delta_c(t - l)], which is at most E[max over c of delta_c(t - l)].
    """

    parts: Sequence[Curves]

    def reach(self, delta: float) -> float:
        return max(curves.reach(delta) for curves in self.parts)

    def tables(self, t: Floats, least: float) -> tuple[_Table, _Table]:
        found = [curves.tables(t, least) for curves in self.parts]

        def largest(side: int) -> _Table:
            lower, upper = zip(*(tables[side] for tables in found), strict=True)
            return np.max(lower, axis=0), np.max(upper, axis=0)

        return largest(0), largest(1)


class _BestOfCurves:
    """Profiles of the best of several runs, from those of one run."""

    def __init__(self, run: Curves, law: RunLaw) -> None:
        self.run = run
        self.law = law

    def reach(self, delta: float) -> float:
        return max(best.upper_epsilon(delta) for best in self._best(delta))

    def tables(self, t: Floats, least: float) -> tuple[_Table, _Table]:
        best = self._best(least)
        upper = [np.array([one.upper(x) for x in t]) for one in best]
        # If all scores are equal, one of the runs is released, whenever there is one.
        some = -math.expm1(float(self.law.log_probability(np.zeros(1))[0]))
        lower = [some * table[0] for table in self.run.tables(t, least)]
        return (lower[0], upper[0]), (lower[-1], upper[-1])

    def _best(self, delta: float) -> list[BestProfile]:
        found = profiles(self.run, _resolution(delta, self.law))
        return [BestProfile(profile, self.law, delta=delta) for profile in found]


def _reach(side: DirectionPrice, delta: float) -> float:
    infinite = side.direction.infinite_upper
    found = side.epsilon(min(infinite + delta, 0.5 + 0.5 * infinite)) if infinite < 1 else None
    return found.upper if found and found.upper < math.inf else FARTHEST
