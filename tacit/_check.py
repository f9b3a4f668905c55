"""Argument checks whose messages all state the rule, the value received and what to do next.

Each function takes one argument under its public name, as in `positive(epsilon=epsilon)`, and
returns the checked value. A wrong type raises `TypeError`, a wrong value `ValueError`.
"""

import difflib
import math
import reprlib
from collections.abc import Callable, Collection, Iterable
from numbers import Integral, Real

MOST = 10**18  # largest whole number accepted: beyond any use, and within 64 bits


def positive(*, advice: str = "", **named: object) -> float:
    """Return the one keyword argument as a float; raise unless it is finite and above zero."""
    return _real(named, "a positive finite number", lambda x: 0 < x < math.inf, advice)


def non_negative(*, advice: str = "", **named: object) -> float:
    """Return the one keyword argument as a float; raise unless it is finite and at least zero."""
    return _real(named, "a finite number >= 0", lambda x: 0 <= x < math.inf, advice)


def in_open_unit(*, advice: str = "", **named: object) -> float:
    """Return the one keyword argument as a float; raise unless it is strictly between 0 and 1."""
    return _real(named, "in (0, 1)", lambda x: 0 < x < 1, advice)


def in_closed_unit(*, advice: str = "", **named: object) -> float:
    """Return the one keyword argument as a float; raise unless it is between 0 and 1 inclusive."""
    return _real(named, "in [0, 1]", lambda x: 0 <= x <= 1, advice)


def within(least: float, most: float, *, advice: str = "", **named: object) -> float:
    """Return the one keyword argument as a float; raise unless it is `least` to `most`."""
    return _real(named, f"between {least:g} and {most:g}", lambda x: least <= x <= most, advice)


def whole(*, least: int = 0, at_most: int = MOST, advice: str = "", **named: object) -> int:
    """Return the one keyword argument as an int; raise unless it is whole, `least` to `at_most`."""
    ((name, value),) = named.items()
    if type(value) is int and least <= value <= at_most:
        return value  # in less time, for calls in every step
    rule = f"a whole number >= {least}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(_message(name, rule, type(value).__name__, advice))
    if int(value) < least:
        raise ValueError(_message(name, rule, value, advice))
    if int(value) > at_most:
        received = "more" if int(value) > MOST else value
        raise ValueError(_message(name, f"at most {at_most:,}", received, advice))
    return int(value)


def boolean(**named: object) -> bool:
    """Return the one keyword argument; raise unless it is True or False (1 or "yes" is neither)."""
    ((name, value),) = named.items()
    if not isinstance(value, bool):
        raise TypeError(_message(name, "a bool", type(value).__name__, ""))
    return value


def one_of(options: Collection[object], **named: object) -> None:
    """Raise unless the one keyword argument is one of `options`; name the closest one."""
    ((name, value),) = named.items()
    if value not in options:
        known = [str(option) for option in options]
        rule, advice = f"one of {', '.join(known)}", did_you_mean(str(value), known)
        raise ValueError(_message(name, rule, reprlib.repr(value), advice.strip()))


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the known word that is closest to `given`, or ""."""
    close = difflib.get_close_matches(given, list(known), 1)
    return f" Did you mean {close[0]!r}?" if close else ""


def known_key(where: str, key: object, known: Collection[str]) -> str:
    """Return `key`, or raise an error that lists the known keys and names the closest one."""
    if key not in known:
        advice = did_you_mean(str(key), known) or f" It has {', '.join(known)}."
        raise ValueError(f"{where} has no {reprlib.repr(str(key))}.{advice}")
    return str(key)


def _real(
    named: dict[str, object], rule: str, is_valid: Callable[[float], bool], advice: str
) -> float:
    ((name, value),) = named.items()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(_message(name, rule, type(value).__name__, advice))
    try:
        number = float(value)
    except OverflowError:  # a whole number or fraction beyond all floats
        number = math.inf if value == abs(value) else -math.inf
    if not is_valid(number):
        raise ValueError(_message(name, rule, value, advice))
    return number


def _message(name: str, rule: str, received: object, advice: str) -> str:
    return f"{name} must be {rule}, got {received}." + (f" {advice}" if advice else "")
