"""The tightest accountant: `PLD` where it can price every part of an event, else `RDP`.

`PLD` has a dominating pair for most events, `RDP` prices more kinds of events. Both answers are
valid, so the lower one is given where either could be:

* random allocation is priced by `PLD` from a pair that only bounds it (`pld.pairs`), and by `RDP`;
* one round of shuffled reports is priced directly (`shuffle`), several rounds by `PLD` from a pair
  that only bounds them;
* an exponential mechanism is priced by both, since only `RDP` uses its bounded range;
* if `PLD` can price only some parts of an event, these parts and the others are also priced
  separately, each with a share of delta fixed beforehand, and epsilons and deltas are added.
"""

import math
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from tacit import events as ev
from tacit.accounting.brackets import Bracket
from tacit.accounting.compose import flatten, only_release, releases
from tacit.accounting.nested import (
    best_of_bracket,
    best_of_delta,
    has_pair,
    one_of_upper,
    pair_below_nested,
    pair_of_nested,
    with_lower_end,
)
from tacit.accounting.one_event import ADD_REMOVE, pure_epsilon
from tacit.accounting.pld import PLD
from tacit.accounting.pld.pairs import PairRule, directions, pair, pair_from_below
from tacit.accounting.rdp import RDP
from tacit.accounting.shuffle import local_guarantee, shuffled_delta, shuffled_epsilon
from tacit.errors import NotCertified, UnsupportedEvent
from tacit.events import Event, Relation

_DELTA_SHARES = (0.5, 0.9, 0.99)
"""Shares of delta tried for what `PLD` prices, when the rest goes to `RDP`."""
_EPSILON_SHARES = (0.25, 0.5, 0.75)  # shares of epsilon tried in the same way
_BY_PAIRS, _FROM_BELOW = PLD(pair_of=pair_of_nested), PLD(pair_of=pair_below_nested)
_FARTHEST = 1e290  # products of larger epsilons leave the range of floats
_FAR = np.errstate(over="ignore")  # an infinite bound is a bound
_LOOSER = (
    ev.Exponential,
    ev.RandomAllocation,
    ev.Shuffled,
    ev.BestOf,
    ev.OneOf,
    ev.ChosenOf,
    ev.TruncatedPoissonSampled,
    ev.FixedSizeSampled,
)
"""Events whose dominating pair only bounds them, so that `RDP` may be lower."""


class Accountant(Protocol):
    """Protocol of the accountants: any object that computes epsilon and delta of a whole event."""

    def epsilon(self, event: Event, *, delta: float, relation: Relation = ...) -> float:
        """Return an epsilon such that `event` is (epsilon, `delta`)-DP under `relation`."""
        ...

    def delta(self, event: Event, *, epsilon: float, relation: Relation = ...) -> float:
        """Return a delta such that `event` is (`epsilon`, delta)-DP under `relation`."""
        ...


class Tightest:
    """Accountant that returns the lower of the prices that `PLD` and `RDP` prove for an event."""

    @_FAR
    def epsilon(self, event: Event, *, delta: float, relation: Relation = ADD_REMOVE) -> float:
        """Return a certified upper bound on the epsilon of `event` at `delta`."""
        if all(map(_is_gaussian, releases(event))):
            # Such noise is in none of the cases of the module docstring.
            found = _BY_PAIRS.bracket(event, delta=delta, relation=relation)
            if not _is_open(found):
                return found.upper
            return _or_renyi(found, lambda: RDP().epsilon(event, delta=delta, relation=relation))
        single = only_release(event)
        if isinstance(single, ev.Shuffled) and local_guarantee(single).epsilon > 0:
            local, clones = local_guarantee(single)
            return shuffled_epsilon(local, single.n_reports, delta=delta, clones=clones)

        def by_pairs(part: Event, share: float) -> Bracket:
            if share * delta == 0:
                return Bracket(0.0, math.inf)
            if isinstance(single := only_release(part), ev.BestOf):
                return best_of_bracket(
                    single, delta=share * delta, relation=relation, only_upper=True
                )
            if isinstance(single, ev.OneOf):
                upper = one_of_upper(single, delta=share * delta, relation=relation)
                if upper is not None:
                    return Bracket(upper, upper)
            return _BY_PAIRS.bracket(part, delta=share * delta, relation=relation)

        def by_renyi(part: Event, share: float) -> float:
            if share * delta == 0:  # below the smallest float
                return math.inf
            return RDP().epsilon(part, delta=share * delta, relation=relation)

        ways = [event] if (composed := _all_runs(event)) == event else [event, composed]
        found = _least(_lowest(way, relation, _DELTA_SHARES, by_pairs, by_renyi) for way in ways)
        return min(found, _sum_of_pure(event, relation))

    @_FAR
    def delta(self, event: Event, *, epsilon: float, relation: Relation = ADD_REMOVE) -> float:
        """Return a certified upper bound on the delta of `event` at `epsilon`."""
        epsilon = min(epsilon, _FARTHEST)  # delta never rises
        single = only_release(event)
        if isinstance(single, ev.Shuffled) and local_guarantee(single).epsilon > 0:
            local, clones = local_guarantee(single)
            return shuffled_delta(local, single.n_reports, epsilon=epsilon, clones=clones)

        def by_pairs(part: Event, share: float) -> Bracket:
            if isinstance(single := only_release(part), ev.BestOf):
                return best_of_delta(single, epsilon=share * epsilon, relation=relation)
            return _BY_PAIRS.delta_bracket(part, epsilon=share * epsilon, relation=relation)

        def by_renyi(part: Event, share: float) -> float:
            return RDP().delta(part, epsilon=share * epsilon, relation=relation)

        ways = [event] if (composed := _all_runs(event)) == event else [event, composed]
        found = _least(_lowest(way, relation, _EPSILON_SHARES, by_pairs, by_renyi) for way in ways)
        return min(found, 1.0)

    @_FAR
    def bracket(self, event: Event, *, delta: float, relation: Relation = ADD_REMOVE) -> Bracket:
        """Return certified bounds on the epsilon of `event` at `delta`; see `tacit.bracket`."""
        if delta == 1:
            return Bracket(0.0, 0.0)
        if delta == 0:
            return self._pure(event, relation)
        if isinstance(single := only_release(event), ev.BestOf):
            try:
                lower = best_of_bracket(single, delta=delta, relation=relation).lower
            except (UnsupportedEvent, NotCertified):
                lower = 0.0
        elif _is_exact(event, relation):
            found = PLD().bracket(event, delta=delta, relation=relation)
            if not _is_open(found):
                return found
            upper = _or_renyi(found, lambda: RDP().epsilon(event, delta=delta, relation=relation))
            return Bracket(min(found.lower, upper), upper)
        else:
            bounded = with_lower_end(event, relation)
            lower = _FROM_BELOW.bracket(bounded, delta=delta, relation=relation).lower
        upper = self.epsilon(event, delta=delta, relation=relation)
        return Bracket(min(lower, upper), upper)

    @_FAR
    def delta_at_infinity(self, event: Event, *, relation: Relation = ADD_REMOVE) -> float:
        """Return a bound on the probability that no epsilon holds for `event`."""
        known, rest = _split(event, relation)
        mass = max(one.infinite_upper for one in directions(known, relation, pair_of_nested))
        return min(mass + RDP().charge(rest, 2.0, relation).delta_mass, 1.0)

    def _pure(self, event: Event, relation: Relation) -> Bracket:
        """Return bounds on the epsilon of `event` at delta 0: its largest privacy loss."""
        if not all(has_pair(part, relation) for part in flatten(event)):
            return Bracket(0.0, math.inf)
        upper = _largest_loss(event, relation, pair_of_nested)
        upper = min(upper, _sum_of_pure(event, relation))
        try:
            lower = _largest_loss(event, relation, pair_from_below)
        except UnsupportedEvent:
            lower = 0.0
        return Bracket(min(lower, upper), upper)


def _sum_of_pure(event: Event, relation: Relation) -> float:
    """Return the sum of the pure epsilons of all parts, a bound on epsilon at every delta."""
    parts = flatten(event).items()
    return math.fsum(n * float(pure_epsilon(part, relation)) for part, n in parts) * (1 + 1e-14)


def _largest_loss(event: Event, relation: Relation, pair_of: PairRule) -> float:
    """Return the largest loss of `event`, whose parts have the laws that `pair_of` gives."""
    found = directions(event, relation, pair_of)
    return max(math.inf if one.infinite_upper else one.largest_loss for one in found)


def _all_runs(event: Event) -> Event:
    """Return `event` with all runs released where their number is fixed: that may cost less."""
    counts = flatten(event)
    fixed = [e for e in counts if isinstance(e, ev.BestOf) and e.trials is ev.Trials.FIXED]
    if not fixed:
        return event
    runs: dict[Event, Event] = {e: ev.Repeated(e.event, round(e.mean)) for e in fixed}
    return ev.Sequence(tuple(ev.Repeated(runs.get(e, e), n) for e, n in counts.items()))


def _lowest(
    event: Event,
    relation: Relation,
    shares: tuple[float, ...],
    by_pairs: Callable[[Event, float], Bracket],
    by_renyi: Callable[[Event, float], float],
) -> float:
    """Return the lowest proved price of `event`, an epsilon or a delta.

    `by_pairs` (PLD) and `by_renyi` (RDP) price a part of the event, given the share of the target
    delta or epsilon that the part may use. Each of `shares` is tried as the share for `by_pairs`.
    """

    def tight(part: Event, share: float) -> float:
        try:
            found = by_pairs(part, share)
        except NotCertified:
            return by_renyi(part, share)
        has_looser_pair = any(isinstance(one, _LOOSER) for one in flatten(part))
        if _is_open(found) or has_looser_pair:
            return _or_renyi(found, lambda: by_renyi(part, share))
        return found.upper

    known, rest = _split(event, relation)
    if not rest.parts:
        return tight(event, 1.0)
    split = [tight(known, share) + by_renyi(rest, 1 - share) for share in shares if known.parts]
    return _least((by_renyi(event, 1.0), *split))


def _least(prices: Iterable[float]) -> float:
    """Return the smallest of `prices`; one that is NaN proves nothing."""
    return min((price for price in prices if not math.isnan(price)), default=math.inf)


def _or_renyi(found: Bracket, by_renyi: Callable[[], float]) -> float:
    """Return the lower of two upper bounds, if `RDP` has one."""
    try:
        return _least((found.upper, by_renyi()))
    except UnsupportedEvent:
        return found.upper


def _is_gaussian(event: Event) -> bool:
    inner = event.event if isinstance(event, ev.PoissonSampled) else event
    return isinstance(inner, ev.Gaussian)


def _is_open(found: Bracket) -> bool:
    """Return whether the bracket from `PLD` is so wide that `RDP` may give a lower price."""
    return found.upper == math.inf or found.width > 1e-3 * found.upper


def _split(event: Event, relation: Relation) -> tuple[ev.Sequence, ev.Sequence]:
    """Return two events: all parts of `event` that `PLD` can price, and all that it cannot."""
    known: list[Event] = []
    rest: list[Event] = []
    for part, count in flatten(event).items():
        (known if has_pair(part, relation) else rest).append(ev.Repeated(part, count))
    return ev.Sequence(tuple(known)), ev.Sequence(tuple(rest))


def _is_exact(event: Event, relation: Relation) -> bool:
    """Return whether the pairs of `PLD` are attained, so that both ends of its brackets hold."""
    try:
        parts = list(flatten(event))
        return all(pair(one, relation) == pair_from_below(one, relation) for one in parts)
    except UnsupportedEvent:
        return False
