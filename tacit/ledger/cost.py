"""What one event adds to each measure that the budget guard keeps.

Every measure is additive over entries and stays valid when entries are chosen adaptively:

- `renyi`: the Rényi divergence at orders fixed in advance (Feldman & Zrnic 2021);
- `gaussian`: mu squared, where the event is mu-GDP (Smith & Thakurta 2022);
- `pure`: epsilon, where the event is epsilon-DP (basic composition; Rogers et al. 2016);
- `delta`: the deltas of `ApproximateDP` parts. Such a part is an epsilon-DP mechanism except with
  probability delta (Kairouz, Oh & Viswanath 2015, Thm. 3.2), so it enters the other measures as
  `PureDP` and its delta is paid for here.

A measure that knows no bound says infinity. Floats are added upward and stated numbers exactly, as
the decimals they are written as, so 1,000 x 0.001 is 1 and rounding can only over-charge.
"""

import json
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, singledispatch

from scipy.special import ndtri

from tacit.accounting import RDP, flatten
from tacit.errors import UnsupportedEvent
from tacit.events import (
    ApproximateDP,
    Event,
    Exponential,
    Gaussian,
    Laplace,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    Relation,
    Repeated,
    Sequence,
)

_FINEST = 10**60
_MARGIN = 1 + 1e-12  # above the rounding of the few operations it multiplies


@dataclass(frozen=True)
class Cost:
    """What an entry, or a sum of entries, takes from each measure."""

    renyi: tuple[float, ...]
    gaussian: float
    pure: Fraction | float
    """A fraction, or infinity."""
    delta: Fraction

    def __add__(self, other: "Cost") -> "Cost":
        pairs = zip(self.renyi, other.renyi, strict=True)
        return Cost(
            tuple(_add_up(a, b) for a, b in pairs),
            _add_up(self.gaussian, other.gaussian),
            _add_exactly(self.pure, other.pure),
            Fraction(_add_exactly(self.delta, other.delta)),
        )

    def to_json(self) -> str:
        """One line of JSON; infinity is null."""
        return json.dumps(
            {
                "renyi": [_finite(value) for value in self.renyi],
                "gaussian": _finite(self.gaussian),
                "pure": None if self.pure == math.inf else str(self.pure),
                "delta": str(self.delta),
            }
        )

    @staticmethod
    @lru_cache(maxsize=1024)  # totals of other partitions are read again and again
    def from_json(text: str) -> "Cost":
        """The cost that `to_json` wrote."""
        data = json.loads(text)
        return Cost(
            tuple(_infinite(value) for value in data["renyi"]),
            _infinite(data["gaussian"]),
            math.inf if data["pure"] is None else Fraction(data["pure"]),
            Fraction(data["delta"]),
        )


def nothing(n_orders: int) -> Cost:
    """The cost of no entry at all."""
    return Cost((0.0,) * n_orders, 0.0, Fraction(0), Fraction(0))


@lru_cache(maxsize=4096)
def price(event: Event, *, orders: tuple[float, ...], relation: Relation) -> Cost:
    """What `event` adds to each measure; equal events are priced once per process.

    >>> price(PureDP(0.1), orders=(), relation=Relation.ADD_REMOVE).pure
    Fraction(1, 10)
    """
    pure, delta, gaussian = Fraction(0), Fraction(0), 0.0
    stand_ins: list[Event] = []
    for part, count in flatten(event).items():
        if isinstance(part, ApproximateDP):
            part, part_delta = _split(part, relation)
            delta += count * part_delta
        stand_ins.append(Repeated(part, count))
        pure = _add_exactly(pure, count * pure_epsilon(part, relation))
        gaussian = _add_up(gaussian, count * _squared_mu(part, relation))
    renyi, more_delta = _renyi(Sequence(tuple(stand_ins)), orders, relation)
    return Cost(renyi, gaussian, pure, delta + more_delta)


def exact(value: float) -> Fraction:
    """`value` as the decimal it is written as."""
    return Fraction(repr(value))


def round_up(value: Fraction | float) -> float:
    """The smallest float that, as the decimal it is written as, is not below `value`."""
    near = float(value)
    return near if near == math.inf or exact(near) >= value else math.nextafter(near, math.inf)


@singledispatch
def pure_epsilon(event: Event, relation: Relation) -> Fraction | float:  # noqa: ARG001  # dispatch
    """Epsilon of one occurrence of `event` at delta 0; infinity where no bound is known."""
    return math.inf


@pure_epsilon.register
def _(event: PureDP, relation: Relation) -> Fraction:
    return exact(event.epsilon) * _factor(event.replace_factor, relation)


@pure_epsilon.register
def _(event: Exponential, relation: Relation) -> Fraction:
    return exact(event.epsilon) * _factor(event.replace_factor, relation)


@pure_epsilon.register
def _(event: Laplace, relation: Relation) -> Fraction:
    return _factor(event.replace_factor, relation) / exact(event.noise_multiplier)


@pure_epsilon.register
def _(event: RandomizedResponse, relation: Relation) -> Fraction:  # noqa: ARG001  # holds for all
    p, n = event.random_probability, event.n_options
    return exact(math.log1p((1 - p) * n / p) * _MARGIN)


@pure_epsilon.register
def _(event: PoissonSampled, relation: Relation) -> Fraction | float:
    inner = float(pure_epsilon(event.event, relation))
    if relation is Relation.REPLACE_ONE or inner > 500:
        return math.inf
    # Amplification by sampling: Balle, Barthe & Gaboardi 2018, Thm. 8 (arXiv:1807.01647).
    return exact(math.log1p(event.rate * math.expm1(inner)) * _MARGIN)


def _squared_mu(event: Event, relation: Relation) -> float:
    """The square of the smallest mu we can prove `event` mu-GDP for (Dong et al. 2022)."""
    if isinstance(event, Gaussian):
        factor = float(_factor(event.replace_factor, relation))
        return (factor / event.noise_multiplier) ** 2 * _MARGIN
    epsilon = float(pure_epsilon(event, relation))
    # The trade-off function of epsilon-DP is two chords meeting at (t, t), t = 1 / (1 + e^epsilon).
    # A Gaussian one is convex, so it lies below both chords once it passes through (t, t).
    if epsilon < 1e-3:
        mu = math.sqrt(math.pi / 2) * epsilon * (1 + epsilon**2)  # its series, rounded up
    else:
        mu = -2 * float(ndtri(1 / (1 + math.exp(min(epsilon, 700))))) if epsilon < 700 else math.inf
    return mu**2 * _MARGIN


def _renyi(
    event: Event, orders: tuple[float, ...], relation: Relation
) -> tuple[tuple[float, ...], Fraction]:
    """The Rényi curve and the deltas of approximate DP inside sampling."""
    try:
        curve, delta = RDP().charge(event, orders or (2.0,), relation=relation)
    except UnsupportedEvent:
        return (math.inf,) * len(orders), Fraction(0)
    values = (math.inf if math.isnan(value) else max(float(value), 0.0) for value in curve)
    return tuple(values) if orders else (), exact(float(delta))


def _split(event: ApproximateDP, relation: Relation) -> tuple[PureDP, Fraction]:
    """The pure part and the delta of an (epsilon, delta)-DP mechanism, under `relation`."""
    if relation is not Relation.REPLACE_ONE or event.replace_factor == 1:
        return PureDP(event.epsilon, replace_factor=1.0), exact(event.delta)
    # A replacement is a removal and an addition: group privacy for two.
    delta = min(1.0, event.delta * (1 + math.exp(min(event.epsilon, 700))) * _MARGIN)
    return PureDP(2 * event.epsilon, replace_factor=1.0), exact(delta)


def _factor(replace_factor: float, relation: Relation) -> Fraction:
    return exact(replace_factor) if relation is Relation.REPLACE_ONE else Fraction(1)


def _add_up(a: float, b: float) -> float:
    if a == 0 or b == 0:
        return a + b
    return math.nextafter(a + b, math.inf)


def _add_exactly(a: Fraction | float, b: Fraction | float) -> Fraction | float:
    total = a + b
    if isinstance(total, Fraction) and total.denominator > _FINEST:
        return Fraction(math.ceil(total * _FINEST), _FINEST)  # upward, so digits cannot pile up
    return total


def _finite(value: float) -> float | None:
    return None if value == math.inf else value


def _infinite(value: float | None) -> float:
    return math.inf if value is None else value
