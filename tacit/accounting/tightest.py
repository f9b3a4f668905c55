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
from collections.abc import Callable
from typing import Protocol

from tacit import events as ev
from tacit.accounting.brackets import Bracket
from tacit.accounting.compose import flatten
from tacit.accounting.one_event import ADD_REMOVE
from tacit.accounting.pld import PLD
from tacit.accounting.pld.pairs import pair_from_above
from tacit.accounting.rdp import RDP
from tacit.accounting.shuffle import local_guarantee, shuffled_delta, shuffled_epsilon
from tacit.errors import NotCertified, UnsupportedEvent
from tacit.events import Event, Relation

_DELTA_SHARES = (0.5, 0.9, 0.99)
"""Shares of delta tried for what `PLD` prices, when the rest goes to `RDP`."""
_EPSILON_SHARES = (0.25, 0.5, 0.75)  # shares of epsilon tried in the same way
_BY_PAIRS = PLD(pair_of=pair_from_above)
_LOOSER = (ev.Exponential, ev.RandomAllocation, ev.Shuffled)
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

    def epsilon(self, event: Event, *, delta: float, relation: Relation = ADD_REMOVE) -> float:
        """Return a certified upper bound on the epsilon of `event` at `delta`."""
        if (single := _single_round(event)) is not None:
            local, clones = local_guarantee(single)
            return shuffled_epsilon(local, single.n_reports, delta=delta, clones=clones)
        return _lowest(
            event,
            relation,
            _DELTA_SHARES,
            lambda part, share: _BY_PAIRS.bracket(part, delta=share * delta, relation=relation),
            lambda part, share: RDP().epsilon(part, delta=share * delta, relation=relation),
        )

    def delta(self, event: Event, *, epsilon: float, relation: Relation = ADD_REMOVE) -> float:
        """Return a certified upper bound on the delta of `event` at `epsilon`."""
        if (single := _single_round(event)) is not None:
            local, clones = local_guarantee(single)
            return shuffled_delta(local, single.n_reports, epsilon=epsilon, clones=clones)
        by_pairs = _BY_PAIRS.delta_bracket
        return _lowest(
            event,
            relation,
            _EPSILON_SHARES,
            lambda part, share: by_pairs(part, epsilon=share * epsilon, relation=relation),
            lambda part, share: RDP().delta(part, epsilon=share * epsilon, relation=relation),
        )

    def bracket(self, event: Event, *, delta: float, relation: Relation = ADD_REMOVE) -> Bracket:
        """Return certified bounds on the epsilon of `event` at `delta`; see `tacit.bracket`."""
        only_bounded = any(_is_only_bounded(part, relation) for part in flatten(event))
        if only_bounded or _split(event, relation)[1].parts:
            return Bracket(0.0, self.epsilon(event, delta=delta, relation=relation))
        found = PLD().bracket(event, delta=delta, relation=relation)
        if not _is_open(found):
            return found
        return Bracket(found.lower, self.epsilon(event, delta=delta, relation=relation))


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
            return min(found.upper, by_renyi(part, share))
        return found.upper

    known, rest = _split(event, relation)
    if not rest.parts:
        return tight(event, 1.0)
    split = [tight(known, share) + by_renyi(rest, 1 - share) for share in shares if known.parts]
    return min([by_renyi(event, 1.0), *split])


def _single_round(event: Event) -> ev.Shuffled | None:
    """Return the `Shuffled` event if `event` is just one such round, with a cost above 0."""
    counts = flatten(event)
    only = next(iter(counts), None)
    if len(counts) != 1 or not isinstance(only, ev.Shuffled) or counts[only] != 1:
        return None
    return only if local_guarantee(only).epsilon > 0 else None


def _is_open(found: Bracket) -> bool:
    """Return whether the bracket from `PLD` is so wide that `RDP` may give a lower price."""
    return found.upper == math.inf or found.width > 1e-3 * found.upper


def _split(event: Event, relation: Relation) -> tuple[ev.Sequence, ev.Sequence]:
    """Return two events: all parts of `event` that `PLD` can price, and all that it cannot."""
    known: list[Event] = []
    rest: list[Event] = []
    for part, count in flatten(event).items():
        try:
            pair_from_above(part, relation)
        except UnsupportedEvent:
            rest.append(ev.Repeated(part, count))
        else:
            known.append(ev.Repeated(part, count))
    return ev.Sequence(tuple(known)), ev.Sequence(tuple(rest))


def _is_only_bounded(part: Event, relation: Relation) -> bool:
    """Return whether `PLD` gives only an upper bound for `part`, so that no lower end is proved."""
    if not isinstance(part, ev.PoissonSampled):
        return isinstance(part, _LOOSER)
    inner = part.event
    if isinstance(inner, ev.NonPrivate) or getattr(inner, "epsilon", 1.0) == 0:
        return True  # losses below 0 are raised to 0, see `pld.pairs`
    if relation is not Relation.REPLACE_ONE:
        return isinstance(inner, ev.Exponential)
    return not (isinstance(inner, ev.Gaussian | ev.Laplace) and inner.replace_factor == 2)
