"""The tightest accountant: `PLD` where it can price every part of an event, else `RDP`.

`PLD` has a dominating pair for most events, `RDP` prices more kinds of events. Both answers are
valid, so the lower one is given where either could be:

* random allocation is priced by `PLD` from a pair that only bounds it (`pld.pairs`), and by `RDP`;
* an exponential mechanism is priced by both, since only `RDP` uses its bounded range;
* if `PLD` can price only some parts of an event, these parts and the others are also priced
  separately, each with a share of delta fixed beforehand, and epsilons and deltas are added.
"""

import math
from typing import Protocol

from tacit import events as ev
from tacit.accounting.brackets import Bracket
from tacit.accounting.compose import flatten
from tacit.accounting.one_event import ADD_REMOVE
from tacit.accounting.pld import PLD
from tacit.accounting.pld.pairs import pair_from_above
from tacit.accounting.rdp import RDP
from tacit.errors import NotCertified, UnsupportedEvent
from tacit.events import Event, Relation

_DELTA_SHARES = (0.5, 0.9, 0.99)
"""Shares of delta tried for what `PLD` prices, when the rest goes to `RDP`."""

_EPSILON_SHARES = (0.25, 0.5, 0.75)
"""Shares of epsilon tried in the same way."""


class Accountant(Protocol):
    """Anything that prices a whole event."""

    def epsilon(self, event: Event, *, delta: float, relation: Relation = ...) -> float:
        """Return epsilon at `delta`."""
        ...

    def delta(self, event: Event, *, epsilon: float, relation: Relation = ...) -> float:
        """Return delta at `epsilon`."""
        ...


class Tightest:
    """Accountant that takes the lowest of the proved prices; see the module for how."""

    def epsilon(self, event: Event, *, delta: float, relation: Relation = ADD_REMOVE) -> float:
        """Return a certified upper bound on the epsilon of `event` at `delta`."""
        known, rest = _split(event, relation)
        if rest is None:
            return _tight_epsilon(event, delta, relation)
        found = RDP().epsilon(event, delta=delta, relation=relation)
        if known is not None:
            for share in _DELTA_SHARES:
                first = _tight_epsilon(known, share * delta, relation)
                second = RDP().epsilon(rest, delta=(1 - share) * delta, relation=relation)
                found = min(found, first + second)
        return found

    def delta(self, event: Event, *, epsilon: float, relation: Relation = ADD_REMOVE) -> float:
        """Return a certified upper bound on the delta of `event` at `epsilon`."""
        known, rest = _split(event, relation)
        if rest is None:
            return _tight_delta(event, epsilon, relation)
        found = RDP().delta(event, epsilon=epsilon, relation=relation)
        if known is not None:
            for share in _EPSILON_SHARES:
                first = _tight_delta(known, share * epsilon, relation)
                second = RDP().delta(rest, epsilon=(1 - share) * epsilon, relation=relation)
                found = min(found, first + second)
        return found

    def bracket(self, event: Event, *, delta: float, relation: Relation = ADD_REMOVE) -> Bracket:
        """Return certified bounds on the epsilon of `event` at `delta`; see `tacit.bracket`."""
        only_bounded = any(_is_only_bounded(part, relation) for part in flatten(event))
        if only_bounded or _split(event, relation)[1] is not None:
            return Bracket(0.0, self.epsilon(event, delta=delta, relation=relation))
        found = PLD().bracket(event, delta=delta, relation=relation)
        if not _is_open(found):
            return found
        return Bracket(found.lower, self.epsilon(event, delta=delta, relation=relation))


def _tight_epsilon(event: Event, delta: float, relation: Relation) -> float:
    """Return the price by dominating pairs, or that of `RDP` if it may be the lower one."""
    try:
        found = PLD(pair_of=pair_from_above).bracket(event, delta=delta, relation=relation)
    except NotCertified:
        found = Bracket(0.0, math.inf)
    if _is_open(found) or _has_looser_pair(event):
        return min(found.upper, RDP().epsilon(event, delta=delta, relation=relation))
    return found.upper


def _tight_delta(event: Event, epsilon: float, relation: Relation) -> float:
    """Return the price by dominating pairs, or that of `RDP` if it may be the lower one."""
    try:
        found = PLD(pair_of=pair_from_above).delta_bracket(
            event, epsilon=epsilon, relation=relation
        )
    except NotCertified:
        found = Bracket(0.0, 1.0)
    if _is_open(found) or _has_looser_pair(event):
        return min(found.upper, RDP().delta(event, epsilon=epsilon, relation=relation))
    return found.upper


def _is_open(found: Bracket) -> bool:
    """Return whether the bracket is so wide that `RDP` may be tighter."""
    return found.upper == math.inf or found.width > 1e-3 * found.upper


def _split(event: Event, relation: Relation) -> tuple[Event | None, Event | None]:
    """Return what `PLD` can price and what it cannot, each as one event or None."""
    known: list[Event] = []
    rest: list[Event] = []
    for part, count in flatten(event).items():
        try:
            pair_from_above(part, relation)
        except UnsupportedEvent:
            rest.append(ev.Repeated(part, count))
        else:
            known.append(ev.Repeated(part, count))
    return _all(known), _all(rest)


def _all(parts: list[Event]) -> Event | None:
    return ev.Sequence(tuple(parts)) if parts else None


def _is_only_bounded(part: Event, relation: Relation) -> bool:
    """Return whether the dominating pair of `part` only bounds its price from above."""
    if not isinstance(part, ev.PoissonSampled):
        return isinstance(part, ev.Exponential | ev.RandomAllocation)
    inner = part.event
    if isinstance(inner, ev.NonPrivate) or getattr(inner, "epsilon", 1.0) == 0:
        return True  # losses below 0 are raised to 0, see `pld.pairs`
    if relation is not Relation.REPLACE_ONE:
        return isinstance(inner, ev.Exponential)
    return not (isinstance(inner, ev.Gaussian | ev.Laplace) and inner.replace_factor == 2)


def _has_looser_pair(event: Event) -> bool:
    """Return whether the pair of some part only bounds it, so that `RDP` may be lower."""
    return any(isinstance(part, ev.Exponential | ev.RandomAllocation) for part in flatten(event))
