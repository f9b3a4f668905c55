"""What an event cost, by the tightest accountant that can price it.

`PLD` where it has a dominating pair for every part, else `RDP`, which prices more kinds of events.
Of two valid answers the better is given:

* random allocation is composed as `PLD` does, from a pair that bounds it (`_allocation_pair`);
* an exponential mechanism is priced by both, since only `RDP` uses its bounded range;
* of an event that `PLD` knows in part, the parts are also priced apart, each at a share of delta
  fixed beforehand, and epsilons and deltas added.
"""

import math
from typing import Protocol

from tacit._check import in_open_unit, non_negative
from tacit.accounting.brackets import Bracket
from tacit.accounting.compose import flatten
from tacit.accounting.pld import PLD
from tacit.accounting.pld.allocation_pair import allocation_pair
from tacit.accounting.pld.direction import Side
from tacit.accounting.pld.loss_laws import Law
from tacit.accounting.pld.pairs import directions, pair
from tacit.accounting.rdp import RDP
from tacit.errors import NotCertified, UnsupportedEvent
from tacit.events import (
    Event,
    Exponential,
    Gaussian,
    Laplace,
    NonPrivate,
    PoissonSampled,
    RandomAllocation,
    Relation,
    Repeated,
    Sequence,
)

_SHARES = (0.5, 0.9, 0.99)
"""Parts of delta tried for what `PLD` prices, when the rest goes to `RDP`."""


class Accountant(Protocol):
    """Anything that prices a whole event."""

    def epsilon(self, event: Event, *, delta: float, relation: Relation = ...) -> float:
        """Epsilon at `delta`."""
        ...

    def delta(self, event: Event, *, epsilon: float, relation: Relation = ...) -> float:
        """Delta at `epsilon`."""
        ...


def epsilon(
    event: Event,
    *,
    delta: float,
    accountant: Accountant | None = None,
    relation: Relation = Relation.ADD_REMOVE,
) -> float:
    """Epsilon that `event` cost at `delta`: a certified upper bound.

    Parameters
    ----------
    accountant
        None takes the tightest that can price the event.

    Examples
    --------
    >>> from tacit.events import Gaussian, PoissonSampled
    >>> run = Repeated(PoissonSampled(0.01, Gaussian(4.0)), 10_000)
    >>> round(epsilon(run, delta=1e-5), 4)
    0.9469
    """
    delta, relation = in_open_unit(delta=delta), Relation(relation)
    if accountant is not None:
        return accountant.epsilon(event, delta=delta, relation=relation)
    known, rest = _split(event, relation)
    if rest is None:
        return _tight_epsilon(event, delta, relation)
    found = RDP().epsilon(event, delta=delta, relation=relation)
    if known is None:
        return found
    for share in _SHARES:
        first = _tight_epsilon(known, share * delta, relation)
        second = RDP().epsilon(rest, delta=(1 - share) * delta, relation=relation)
        found = min(found, first + second)
    return found


def delta(
    event: Event,
    *,
    epsilon: float,
    accountant: Accountant | None = None,
    relation: Relation = Relation.ADD_REMOVE,
) -> float:
    """Delta that `event` cost at `epsilon`: a certified upper bound; see `epsilon`.

    >>> from tacit.events import Gaussian
    >>> round(delta(Gaussian(1.0), epsilon=1.0), 6)
    0.126937
    """
    epsilon, relation = non_negative(epsilon=epsilon), Relation(relation)
    if accountant is not None:
        return accountant.delta(event, epsilon=epsilon, relation=relation)
    known, rest = _split(event, relation)
    if rest is None:
        return _tight_delta(event, epsilon, relation)
    found = RDP().delta(event, epsilon=epsilon, relation=relation)
    if known is None:
        return found
    for share in (0.25, 0.5, 0.75):
        first = _tight_delta(known, share * epsilon, relation)
        second = RDP().delta(rest, epsilon=(1 - share) * epsilon, relation=relation)
        found = min(found, first + second)
    return found


def bracket(event: Event, *, delta: float, relation: Relation = Relation.ADD_REMOVE) -> Bracket:
    """Certified lower and upper end of the epsilon of `event` at `delta`.

    An event that `PLD` cannot price exactly has a proved upper end only; its lower end is 0.

    >>> from tacit.events import Gaussian
    >>> found = bracket(Gaussian(1.0), delta=1e-5)
    >>> round(found.lower, 4), round(found.upper, 4)
    (4.3772, 4.3772)
    """
    delta, relation = in_open_unit(delta=delta), Relation(relation)
    only_bounded = any(_is_only_bounded(part, relation) for part in flatten(event))
    if only_bounded or _split(event, relation)[1] is not None:
        return Bracket(0.0, epsilon(event, delta=delta, relation=relation))
    found = PLD().bracket(event, delta=delta, relation=relation)
    if not _is_open(found):
        return found
    return Bracket(found.lower, epsilon(event, delta=delta, relation=relation))


def _tight_epsilon(event: Event, delta: float, relation: Relation) -> float:
    """Price by dominating pairs, or that of `RDP` where it may be the lower."""
    try:
        found = _worst([side.epsilon(delta) for side in _sides(event, relation)])
    except NotCertified:
        found = Bracket(0.0, math.inf)
    if _is_open(found) or _has_looser_pair(event):
        return min(found.upper, RDP().epsilon(event, delta=delta, relation=relation))
    return found.upper


def _tight_delta(event: Event, epsilon: float, relation: Relation) -> float:
    try:
        found = _worst([side.delta(epsilon) for side in _sides(event, relation)])
    except NotCertified:
        found = Bracket(0.0, 1.0)
    if _is_open(found) or _has_looser_pair(event):
        return min(found.upper, RDP().delta(event, epsilon=epsilon, relation=relation))
    return found.upper


def _worst(found: list[Bracket]) -> Bracket:
    return Bracket(max(one.lower for one in found), max(one.upper for one in found))


def _is_open(found: Bracket) -> bool:
    """Whether the bracket leaves room for `RDP` to be tighter."""
    return found.upper == math.inf or found.width > 1e-3 * found.upper


def _sides(event: Event, relation: Relation) -> list[Side]:
    """As `PLD` has them, but with pairs that need only bound an event from above."""
    found = directions(event, relation, _pair_from_above)
    return [Side(direction, tolerance=PLD().tolerance) for direction in found]


def _pair_from_above(event: Event, relation: Relation) -> tuple[Law, Law]:
    replaced = relation is Relation.REPLACE_ONE
    if isinstance(event, RandomAllocation) and isinstance(event.event, Gaussian) and not replaced:
        return allocation_pair(event.steps, 1 / event.event.noise_multiplier)
    return pair(event, relation)


def _split(event: Event, relation: Relation) -> tuple[Event | None, Event | None]:
    """What `PLD` can price and what it cannot, each None if empty (`known` then too)."""
    known, rest = [], []
    for part, count in flatten(event).items():
        try:
            _pair_from_above(part, relation)
        except UnsupportedEvent:
            rest.append(Repeated(part, count))
        else:
            known.append(Repeated(part, count))
    return _all(known), _all(rest)


def _all(parts: list[Event]) -> Event | None:
    return Sequence(tuple(parts)) if parts else None


def _is_only_bounded(part: Event, relation: Relation) -> bool:
    """Whether the pair of `part` is harder than any mechanism it may stand for: no lower end."""
    if not isinstance(part, PoissonSampled):
        return isinstance(part, Exponential | RandomAllocation)
    inner = part.event
    if isinstance(inner, NonPrivate) or getattr(inner, "epsilon", 1.0) == 0:
        return True  # losses below 0 are raised to 0, see `_pairs`
    if relation is not Relation.REPLACE_ONE:
        return isinstance(inner, Exponential)
    return not (isinstance(inner, Gaussian | Laplace) and inner.replace_factor == 2)


def _has_looser_pair(event: Event) -> bool:
    """Whether some part has a pair that only bounds it, so that `RDP` may be lower."""
    return any(isinstance(part, Exponential | RandomAllocation) for part in flatten(event))
