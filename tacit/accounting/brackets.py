"""Brackets of delta(epsilon), and `invert`, which turns them into brackets of epsilon(delta)."""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

_FINE, _FAIR = 1e-13, 1e-10
"""Relative widths to which `invert` closes in: of closed forms, and of curves with a known slope,
which are not so precise."""


class Bracket(NamedTuple):
    """A certified statement `lower <= truth <= upper`; both ends are proved, neither is a guess.

    >>> Bracket(0.25, 0.75).width
    0.5
    """

    lower: float
    upper: float

    @property
    def width(self) -> float:
        """Distance upper - lower between the ends; 0 if both ends are infinite."""
        return 0.0 if self.lower == self.upper else self.upper - self.lower

    @staticmethod
    def of_delta(lower: float, upper: float) -> "Bracket":
        """Return the bracket of a delta, with both ends moved into [0, 1].

        A lower end that is NaN becomes 0, an upper end that is NaN becomes 1: the trivial bounds.

        >>> Bracket.of_delta(float("nan"), float("nan"))
        Bracket(lower=0.0, upper=1.0)
        """
        return Bracket(min(lower, 1.0) if lower > 0 else 0.0, max(upper, 0.0) if upper < 1 else 1.0)

    def meets(self, other: "Bracket") -> bool:
        """Return whether this bracket and `other` overlap, as brackets of the same number must."""
        return self.lower <= other.upper and other.lower <= self.upper

    def intersection(self, other: "Bracket") -> "Bracket":
        """Return the overlap of this bracket and `other`, both proved for the same number."""
        return Bracket(max(self.lower, other.lower), min(self.upper, other.upper))

    def worse(self, other: "Bracket") -> "Bracket":
        """Return a bracket of max(x, y), where this bracket holds x and `other` holds y."""
        return Bracket(max(self.lower, other.lower), max(self.upper, other.upper))


class Curve(Protocol):
    """A curve delta(epsilon) with certified bounds at every epsilon."""

    def delta(self, epsilon: float) -> Bracket:
        """Return bounds on delta(epsilon)."""
        ...


def invert(
    curve: Curve, delta: float, *, guess: float, ceiling: float, slope: float = math.nan
) -> Bracket:
    """Return bounds on the smallest epsilon with delta(epsilon) <= `delta`.

    `guess` is where the search starts. `ceiling` is an epsilon that is known to be large enough.
    `slope` is about how fast log delta falls with epsilon near `guess`; NaN if unknown.

    Both ends of the result are proved. At `upper`, the upper bound of the curve is at most `delta`.
    At `lower`, its lower bound is above `delta`, so the answer is larger: the curve never rises.
    """
    log_delta = math.log(delta)
    known: dict[float, Bracket] = {}

    def bounds(epsilon: float) -> Bracket:
        if epsilon not in known:
            known[epsilon] = curve.delta(epsilon)
        return known[epsilon]

    def excess(epsilon: float) -> float:
        upper = bounds(epsilon).upper
        return math.inf if math.isnan(upper) else _log(upper) - log_delta

    def surplus(epsilon: float) -> float:
        return _log(bounds(epsilon).lower) - log_delta

    fine = _FINE if math.isnan(slope) else _FAIR
    upper, slope = _descend(excess, ceiling, min(max(guess, 0.0), ceiling), slope, fine)
    return Bracket(_walk_down(surplus, upper, slope) if upper > 0 else 0.0, upper)


def _descend(
    f: Callable[[float], float], high: float, x: float, slope: float, fine: float
) -> tuple[float, float]:
    """Return a point just above the zero of a falling function f, and how fast f falls there.

    The zero is searched between 0 and `high`, from `x`; f <= 0 at the point, unless it is `high`.
    If f(0) <= 0, the point is 0. Each secant step goes slightly past the zero, so that both ends
    close in on it.
    """
    low, last_x, last_f = -math.inf, math.nan, math.nan
    for attempt in range(100):
        value = f(x)
        low, high = (x, high) if value > 0 else (low, x)
        hair = fine * max(high if high < math.inf else x, 1e-6)
        if high - low <= 2 * hair or high <= 0:
            break
        if math.isfinite(last_f) and math.isfinite(value) and x != last_x:
            slope = (last_f - value) / (x - last_x)
            if value <= 0 and -value <= 2 * hair * slope:
                break
        last_x, last_f = x, value
        step = value / slope if slope > 0 else math.copysign(0.05 * max(x, 0.1), value)
        x = x + step + math.copysign(hair, value)
        if x <= 0 and low < 0:
            x = 0.0
        elif not low < x < high or attempt > 30:
            x = 0.5 * (max(low, 0.0) + high) if high < math.inf else 2 * max(low, 0.0) + 1.0
    return high, slope


def _walk_down(f: Callable[[float], float], upper: float, slope: float) -> float:
    """Return an epsilon at or below `upper` with f(epsilon) > 0, or 0 if none was found."""
    width, x = 0.0, upper
    for _ in range(80):
        value = f(x)
        if value > 0:
            return x
        ahead = -1.05 * value / slope if slope > 0 and math.isfinite(value) else 0.0
        width = max(2 * width, upper - x + ahead, 4 * _FINE * max(upper, 1e-6))
        x = upper - width
        if x <= 0:
            return 0.0
    return 0.0


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf
