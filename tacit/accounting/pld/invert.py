"""From a certified curve delta(epsilon) back to epsilon."""

import math
from collections.abc import Callable
from typing import Protocol

from tacit.accounting.brackets import Bracket

_FINE = 1e-13


class Curve(Protocol):
    """delta(epsilon), with certified bounds wherever it is asked."""

    def delta(self, epsilon: float) -> Bracket:
        """Bounds on delta(epsilon)."""
        ...


def invert(
    curve: Curve, delta: float, *, guess: float, ceiling: float, slope: float = math.nan
) -> Bracket:
    """Bounds on the smallest epsilon with delta(epsilon) <= delta, which is at most `ceiling`.

    An end is only moved to a point at which the curve proves it: `upper` where its upper bound is
    at most delta, `lower` where its lower bound is above delta (the true curve never rises).
    `slope` is about how fast log delta falls near `guess`.
    """
    log_delta = math.log(delta)

    def excess(epsilon: float) -> float:
        upper = curve.delta(epsilon).upper
        return math.inf if math.isnan(upper) else _log(upper) - log_delta

    if excess(0.0) <= 0:
        return Bracket(0.0, 0.0)
    upper, slope = _descend(excess, 0.0, ceiling, min(max(guess, 0.0), ceiling), slope)
    return Bracket(_walk_down(curve, log_delta, upper, slope), upper)


def _descend(
    f: Callable[[float], float], low: float, high: float, x: float, slope: float
) -> tuple[float, float]:
    """A point of f <= 0, close above where f crosses zero, and how fast f falls there.

    Secant steps, kept inside the interval and pushed a hair too far so that it closes; `high` if
    no point is found.
    """
    last_x, last_f = math.nan, math.nan
    for attempt in range(100):
        value = f(x)
        if value > 0:
            low = x
        else:
            high = x
        hair = _FINE * max(high if high < math.inf else x, 1e-6)
        if high - low <= 2 * hair:
            break
        if math.isfinite(last_f) and math.isfinite(value) and x != last_x:
            slope = (last_f - value) / (x - last_x)
        last_x, last_f = x, value
        step = value / slope if slope > 0 else math.copysign(0.05 * max(x, 0.1), value)
        x = x + step + math.copysign(hair, value)
        if not low < x < high or attempt > 30:
            x = 0.5 * (low + high) if high < math.inf else 2 * low + 1.0
    return high, slope


def _walk_down(curve: Curve, log_delta: float, upper: float, slope: float) -> float:
    """A point below `upper` at which delta is proved to be larger; 0 if none is found."""
    width, x = 0.0, upper
    for _ in range(80):
        value = _log(curve.delta(x).lower) - log_delta
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
