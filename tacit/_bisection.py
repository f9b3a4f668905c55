"""Bisection: where a condition begins to hold."""

from collections.abc import Callable


def bisected(
    is_above: Callable[[float], bool],
    low: float,
    high: float,
    *,
    absolute: float = 0.0,
    relative: float = 0.0,
) -> tuple[float, float]:
    """Return a narrow (low, high) around the number from which on `is_above` is true.

    It is `absolute` wide, or `relative` times as wide as `high` is large, whichever is more.
    """
    while high - low > max(absolute, relative * high):
        middle = (low + high) / 2
        low, high = (low, middle) if is_above(middle) else (middle, high)
    return low, high
