"""The cost of an entry: what one event adds to each measure that the filter keeps.

Every measure is additive over entries and stays valid when entries are chosen adaptively:

- `renyi`: the Rényi divergence at orders fixed in advance (Feldman & Zrnic 2021);
- `gaussian`: mu squared, where the event is mu-GDP (Smith & Thakurta 2022);
- `pure`: epsilon, where the event is epsilon-DP (basic composition; Rogers et al. 2016);
- `copies`: how many copies of one event, fixed in advance, dominate the entry. N copies of an event
  that were reserved cost what the event repeated N times costs, whatever each of them computes and
  wherever the run stops, so the count may be kept under a limit;
- `delta`: the deltas of `ApproximateDP` parts. Such a part is an epsilon-DP mechanism except with
  probability delta (Kairouz, Oh & Viswanath 2015, Thm. 3.2), so it enters the other measures as
  `PureDP` and its delta is paid for here.

A measure for which no bound is known is infinite. Floats are rounded up when they are added. Stated
numbers are added exactly, as the decimals they are written as, so 1,000 x 0.001 is 1 and rounding
can only over-charge.
"""

import json
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from tacit.accounting import RDP, epsilon_and_delta, exact, flatten, gdp_mu_squared, pure_epsilon
from tacit.errors import UnsupportedEvent
from tacit.events import (
    ApproximateDP,
    Event,
    Gaussian,
    PoissonSampled,
    PureDP,
    Relation,
    Repeated,
    Sequence,
)

_FINEST = 10**60  # largest denominator of a sum of stated numbers; beyond it the sum is rounded up


@dataclass(frozen=True)
class Cost:
    """An amount of each privacy measure: the cost of one or more ledger entries, or a limit."""

    renyi: tuple[float, ...]
    gaussian: float
    pure: Fraction | float  # a fraction, or infinity
    delta: Fraction
    copies: float = math.inf
    """Number of copies of the filter's event; whole, or infinity for what they do not dominate."""

    @property
    def measures(self) -> tuple[Fraction | float, ...]:
        """All measures but `delta`; a filter requires at least one to be within its limit."""
        return (*self.renyi, self.gaussian, self.copies, self.pure)

    def __add__(self, other: "Cost") -> "Cost":
        pairs = zip(self.renyi, other.renyi, strict=True)
        return Cost(
            tuple(_add_up(a, b) for a, b in pairs),
            _add_up(self.gaussian, other.gaussian),
            _add_exactly(self.pure, other.pure),
            Fraction(_add_exactly(self.delta, other.delta)),
            self.copies + other.copies,
        )

    def to_json(self) -> str:
        """Return the cost as one line of JSON; infinity is written as null."""
        *renyi, gaussian = (None if x == math.inf else x for x in (*self.renyi, self.gaussian))
        pure = None if self.pure == math.inf else str(self.pure)
        data: dict[str, object] = {
            "renyi": renyi,
            "gaussian": gaussian,
            "pure": pure,
            "delta": str(self.delta),
        }
        if self.copies < math.inf:
            data["copies"] = self.copies
        return json.dumps(data)

    @staticmethod
    @lru_cache(maxsize=1024)  # totals of other partitions are read again and again
    def from_json(text: str) -> "Cost":
        """Return the cost that `to_json` wrote."""
        data = json.loads(text)
        floats = (*data["renyi"], data["gaussian"])
        *renyi, gaussian = (math.inf if x is None else x for x in floats)
        pure = math.inf if data["pure"] is None else Fraction(data["pure"])
        copies = data.get("copies", math.inf)
        return Cost(tuple(renyi), gaussian, pure, Fraction(data["delta"]), copies)


def nothing(n_orders: int) -> Cost:
    """Return the cost of no entry at all, for a filter with `n_orders` Rényi orders."""
    return Cost((0.0,) * n_orders, 0.0, Fraction(0), Fraction(0), 0.0)


@lru_cache(maxsize=4096)
def price(
    event: Event,
    *,
    orders: tuple[float, ...],
    relation: Relation,
    copy: Event | None = None,
) -> Cost:
    """Return the cost of `event` in each measure, at the Rényi `orders`; results are cached.

    `copy` is the event whose copies are counted; None if the filter counts none.

    >>> price(PureDP(0.1), orders=(), relation=Relation.ADD_REMOVE).pure
    Fraction(1, 10)
    """
    delta, gaussian, copies = Fraction(0), 0.0, 0.0
    pure: Fraction | float = Fraction(0)
    stand_ins: list[Event] = []
    for part, count in flatten(event).items():
        if isinstance(part, ApproximateDP):
            part_epsilon, part_delta = epsilon_and_delta(part, relation)
            part = PureDP(part_epsilon, replace_factor=1.0)
            delta += count * exact(part_delta)
        stand_ins.append(Repeated(part, count))
        copies += count if copy is not None and _dominates(copy, part, relation) else math.inf
        pure = _add_exactly(pure, count * pure_epsilon(part, relation))
        gaussian = _add_up(gaussian, count * gdp_mu_squared(part, relation))
    renyi, more_delta = _renyi(Sequence(tuple(stand_ins)), orders, relation)
    return Cost(renyi, gaussian, pure, delta + more_delta, copies)


def _renyi(
    event: Event, orders: tuple[float, ...], relation: Relation
) -> tuple[tuple[float, ...], Fraction]:
    """Return the Rényi divergence at each order, and the deltas of `ApproximateDP` parts."""
    try:
        curve, delta = RDP().charge(event, orders or (2.0,), relation=relation)
    except UnsupportedEvent:
        return (math.inf,) * len(orders), Fraction(0)
    values = (math.inf if math.isnan(value) else max(float(value), 0.0) for value in curve)
    return tuple(values) if orders else (), exact(float(delta))


def _dominates(copy: Event, part: Event, relation: Relation) -> bool:
    """Return whether one copy of `copy` is at least as revealing as `part`, for every pair.

    An event dominates itself. When a record is added or removed, a Poisson-sampled Gaussian of rate
    q and noise s is dominated by one of rate q' >= q and noise s' <= s: from an output of the
    latter, keep it with probability q / q' and otherwise draw from N(0, s'^2); then add noise of
    variance s^2 - s'^2. This maps N(0, s'^2) to N(0, s^2), and the mixture of weight q' to the
    mixture of weight q, in both orders of the pair.
    """
    if copy == part:
        return True
    match copy, part:
        case PoissonSampled(rate, Gaussian() as base), PoissonSampled(other, Gaussian() as noise):
            is_weaker = other <= rate and noise.noise_multiplier >= base.noise_multiplier
            same = noise.replace_factor == base.replace_factor
            return relation is Relation.ADD_REMOVE and is_weaker and same
        case _:
            return False


def _add_up(a: float, b: float) -> float:
    """Return a + b, rounded up so that a sum of costs is never too small."""
    return math.nextafter(a + b, math.inf) if a and b else a + b


def _add_exactly(a: Fraction | float, b: Fraction | float) -> Fraction | float:
    """Return a + b exactly; rounded up to a multiple of 1 / `_FINEST` if it is finer."""
    total = a + b
    if isinstance(total, Fraction) and total.denominator > _FINEST:
        return Fraction(math.ceil(total * _FINEST), _FINEST)
    return total
