"""Rényi differential privacy (RDP): a curve of divergences that adds up over releases.

One rule per type of event gives the curve of ONE occurrence (`curves`), `compose` counts how often
it occurs, and the sum becomes (epsilon, delta) by Canonne, Kamath & Steinke 2020. Every number is
an upper bound: some rules give a bound instead of the exact curve, and an order that was not tried
cannot make the answer too small. RDP prices every kind of event that has a sound price here; what
`PLD` can price as well, `PLD` prices more tightly.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from tacit._arrays import Floats
from tacit._check import in_open_unit, non_negative
from tacit.accounting.compose import flatten
from tacit.accounting.one_event import ADD_REMOVE
from tacit.accounting.rdp.curves import Charge, log_deltas, price
from tacit.errors import UnsupportedEvent
from tacit.events import BestOf, ChosenOf, Event, OneOf, RandomAllocation, Relation, RenyiCurve

_NEAR_ONE = 1 + 2.0**-10
_HIGHEST, _LOWEST = 28.0, -16.0  # the search stops at orders 1 + 2^28 and 1 + 2^-16
_ROUNDING = 1 + 1e-9
"""Each curve is multiplied by this: a hundred times the loss to rounding that was observed."""


@dataclass(frozen=True, kw_only=True)
class RDP:
    """Rényi accountant that searches all orders above 1 for the best one, or only `orders`.

    >>> from tacit.events import Gaussian, PoissonSampled, Repeated
    >>> run = Repeated(PoissonSampled(0.01, Gaussian(4.0)), 10_000)
    >>> round(RDP().epsilon(run, delta=1e-5), 4)
    1.0354
    """

    orders: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.orders is not None:
            object.__setattr__(self, "orders", tuple(_checked_orders(self.orders).tolist()))

    def charge(self, event: Event, orders: ArrayLike, relation: Relation = ADD_REMOVE) -> Charge:
        """Return the Rényi curve of all of `event` at `orders`, and the chance that it fails."""
        return _charge(flatten(event), _checked_orders(orders), Relation(relation))

    def curve(self, event: Event, orders: ArrayLike, relation: Relation = ADD_REMOVE) -> Floats:
        """Return a bound on the Rényi divergence of the whole event at each of `orders`."""
        charge = self.charge(event, orders, relation)
        if charge.delta_mass > 0:
            raise UnsupportedEvent(
                "approximate DP has no Rényi curve: with probability delta no bound holds. "
                "Use RDP().charge, which returns a curve and the probability that it fails."
            )
        return charge.values

    def epsilon(self, event: Event, *, delta: float, relation: Relation = ADD_REMOVE) -> float:
        """Return the smallest epsilon at `delta` that the Rényi curve implies, or infinity."""
        delta = in_open_unit(delta=delta)
        if self._at_zero(event, relation) <= delta:
            return 0.0
        return max(self._least(event, relation, partial(_epsilons, delta=delta)), 0.0)

    def delta(self, event: Event, *, epsilon: float, relation: Relation = ADD_REMOVE) -> float:
        """Return the smallest delta at `epsilon` that the Rényi curve of `event` implies."""
        epsilon = non_negative(epsilon=epsilon)
        least = self._least(event, relation, partial(_log_deltas, epsilon=epsilon))
        return min(math.exp(min(least, 0.0)), self._at_zero(event, relation))

    def _at_zero(self, event: Event, relation: Relation) -> float:
        """Bound delta at epsilon 0 from the Rényi divergence at the smallest order, its least."""
        return _total_variation(self.charge(event, min(self.orders or (_NEAR_ONE,)), relation))

    def _least(
        self, event: Event, relation: Relation, convert: Callable[[Floats, Charge], Floats]
    ) -> float:
        parts, relation = flatten(event), Relation(relation)

        def objective(orders: Floats) -> Floats:
            return convert(orders, _charge(parts, orders, relation))

        if self.orders is not None:
            return float(objective(np.array(self.orders)).min())
        return _least_over_orders(objective, _knots(parts))


def _charge(parts: dict[Event, int], orders: Floats, relation: Relation) -> Charge:
    total, log_kept = np.zeros(len(orders)), 0.0
    for part, count in parts.items():
        values, mass = price(part, orders, relation)
        total += count * values
        # Mechanisms fail independently of each other, so the chances that they hold multiply.
        log_kept += count * math.log1p(-mass) if mass < 1 else -math.inf
    return Charge(total * _ROUNDING, min(-math.expm1(log_kept) * _ROUNDING, 1.0))


def epsilon_from_rdp(values: ArrayLike, orders: ArrayLike, *, delta: float) -> float:
    """Return the smallest epsilon at `delta` that Rényi divergences `values` at `orders` imply.

    It is the smallest bound of Canonne, Kamath & Steinke 2020, Prop. 12 (arXiv:2004.00010v4) over
    `orders`. Any subset of orders gives a valid bound; more orders can only lower it.

    >>> round(epsilon_from_rdp([0.1, 0.4], [2.0, 8.0], delta=1e-5), 3)
    1.614
    """
    delta = in_open_unit(delta=delta)
    charge = Charge(np.asarray(values, dtype=float), 0.0)
    if _total_variation(charge) <= delta:
        return 0.0
    return max(float(_epsilons(_checked_orders(orders), charge, delta=delta).min()), 0.0)


def delta_from_rdp(values: ArrayLike, orders: ArrayLike, *, epsilon: float) -> float:
    """Return the smallest delta at `epsilon` that Rényi divergences `values` at `orders` imply."""
    epsilon = non_negative(epsilon=epsilon)
    charge = Charge(np.asarray(values, dtype=float), 0.0)
    logs = _log_deltas(_checked_orders(orders), charge, epsilon=epsilon)
    return min(math.exp(min(float(logs.min()), 0.0)), _total_variation(charge))


def _epsilons(orders: Floats, charge: Charge, *, delta: float) -> Floats:
    values, mass = charge
    if mass >= delta:
        return np.full(len(orders), np.inf)
    # With probability `mass` nothing is guaranteed; else the curve holds, for the rest of delta.
    rest = (delta - mass) / (1 - mass)
    return values + np.log1p(-1 / orders) - (math.log(rest) + np.log(orders)) / (orders - 1)


def _log_deltas(orders: Floats, charge: Charge, *, epsilon: float) -> Floats:
    values, mass = charge
    found = log_deltas(orders, values, epsilon)
    return found if mass == 0 else np.log(mass + (1 - mass) * np.exp(np.minimum(found, 0.0)))


def _total_variation(charge: Charge) -> float:
    """Bound delta at epsilon 0, the total variation distance, by the Rényi divergences."""
    # By Pinsker and by Bretagnolle & Huber; the value at any order bounds the KL divergence.
    least = float(charge.values.min())
    return charge.delta_mass + math.sqrt(min(least / 2, -math.expm1(-least)))


def _least_over_orders(objective: Callable[[Floats], Floats], knots: Floats) -> float:
    """Return the smallest value found of `objective`, a function of the order, over orders above 1.

    Powers of two locate the minimum, then finer steps approach it. All `knots` are tried as well.
    """
    exponents = np.arange(-4.0, 9.0)
    found = objective(np.append(1 + 2.0**exponents, knots))
    values, at_knots = found[: len(exponents)], found[len(exponents) :]
    while np.argmin(values) == len(values) - 1 and exponents[-1] < _HIGHEST:
        more = exponents[-1] + np.arange(1.0, 5.0)
        exponents = np.append(exponents, more)
        values = np.append(values, objective(1 + 2.0**more))
    while np.argmin(values) == 0 and exponents[0] > _LOWEST:
        more = exponents[0] - np.arange(4.0, 0.0, -1.0)
        exponents = np.append(more, exponents)
        values = np.append(objective(1 + 2.0**more), values)
    best, center, width = values.min(), exponents[np.argmin(values)], 1.0
    for _ in range(5):
        tried = center + width * np.array([-0.75, -0.5, -0.25, 0.25, 0.5, 0.75])
        values = objective(1 + 2.0**tried)
        if values.min() < best:
            best, center = values.min(), tried[np.argmin(values)]
        width /= 3  # the best of points a quarter apart is within a quarter of the minimum
    return float(min(best, at_knots.min(initial=np.inf)))


def _knots(parts: dict[Event, int]) -> Floats:
    """Return orders worth trying because some curve is tight there and loose between them."""
    knots = np.zeros(0)
    for part in parts:
        if isinstance(part, RenyiCurve):
            knots = np.append(knots, part.orders)
        elif isinstance(part, BestOf):
            knots = np.append(knots, _knots(flatten(part.event)))
        elif isinstance(part, OneOf | ChosenOf):
            knots = np.append(knots, [k for one in part.parts for k in _knots(flatten(one))])
        elif isinstance(part, RandomAllocation):
            knots = np.append(knots, np.arange(2.0, 40.0))
    return np.unique(knots)


def _checked_orders(orders: ArrayLike) -> Floats:
    checked = np.atleast_1d(np.asarray(orders, dtype=float))
    if checked.ndim != 1 or not np.all(np.isfinite(checked) & (checked > 1)):
        raise ValueError(f"orders must be finite numbers above 1, got {orders}.")
    return checked
