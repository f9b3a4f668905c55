"""Argument checks with one message form: the rule, the value received, what to do next.

Each takes one keyword, the argument under its public name, and returns the value it checked.
"""

import math
from numbers import Integral, Real

MOST = 10**18
"""Largest whole number taken: beyond any use, and within 64 bits."""


def _single(named: dict[str, object]) -> tuple[str, object]:
    ((name, value),) = named.items()
    return name, value


def _real(name: str, value: object, rule: str, advice: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be {rule}, got {type(value).__name__}.{_space(advice)}")
    try:
        return float(value)
    except OverflowError:  # a whole number or fraction beyond all floats
        return math.inf if value == abs(value) else -math.inf


def _space(advice: str) -> str:
    return f" {advice}" if advice else ""


def _require(ok: bool, name: str, rule: str, value: object, advice: str) -> None:
    if not ok:
        raise ValueError(f"{name} must be {rule}, got {value}.{_space(advice)}")


def positive(*, advice: str = "", **named: object) -> float:
    """The named value as a float; it must be finite and above zero."""
    name, value = _single(named)
    rule = "a positive finite number"
    number = _real(name, value, rule, advice)
    _require(math.isfinite(number) and number > 0, name, rule, value, advice)
    return number


def non_negative(*, advice: str = "", **named: object) -> float:
    """The named value as a float; it must be finite and at least zero."""
    name, value = _single(named)
    rule = "a finite number >= 0"
    number = _real(name, value, rule, advice)
    _require(math.isfinite(number) and number >= 0, name, rule, value, advice)
    return number


def in_open_unit(*, advice: str = "", **named: object) -> float:
    """The named value as a float; it must be strictly between 0 and 1."""
    name, value = _single(named)
    rule = "in (0, 1)"
    number = _real(name, value, rule, advice)
    _require(0 < number < 1, name, rule, value, advice)
    return number


def in_closed_unit(*, advice: str = "", **named: object) -> float:
    """The named value as a float; it must be between 0 and 1, ends included."""
    name, value = _single(named)
    rule = "in [0, 1]"
    number = _real(name, value, rule, advice)
    _require(0 <= number <= 1, name, rule, value, advice)
    return number


def whole(*, least: int = 0, advice: str = "", **named: object) -> int:
    """The named value as an int; it must be a whole number, from `least` to 10^18."""
    name, value = _single(named)
    rule = f"a whole number >= {least}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be {rule}, got {type(value).__name__}.{_space(advice)}")
    _require(int(value) >= least, name, rule, value, advice)
    _require(int(value) <= MOST, name, "at most 10**18", "more", advice)
    return int(value)
