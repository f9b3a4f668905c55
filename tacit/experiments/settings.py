"""Sections of a recipe as dataclasses: declared settings, their rules, and reading from TOML.

A section is a frozen dataclass with the base `RecipeSection`. `setting` and `choice` declare a
field with its default and the rule of its values. `from_table` makes a section from TOML values; an
unknown key raises an error that names the closest known one.
"""

import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields
from functools import partial
from typing import Any, ClassVar, TypeVar

from tacit._check import known_key, one_of, whole
from tacit.mechanisms import MOST_BANDS

T = TypeVar("T")
Value = Any  # Any: TOML values


def below_one(**named: float) -> None:
    """Raise unless the value of the named setting is in [0, 1)."""
    ((name, value),) = named.items()
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value}.")


at_least_one: Callable[..., object] = partial(whole, least=1)


def number_of_bands(**named: int | str) -> None:
    """Raise unless the value of the named setting is "auto" or an allowed number of bands."""
    if list(named.values()) != ["auto"]:
        whole(**named, least=1, at_most=MOST_BANDS)  # type: ignore[arg-type]  # it raises for text


def setting(default: T, rule: Callable[..., object]) -> T:
    """Declare a dataclass field with its default and the rule that checks its value."""
    return field(default=default, metadata={"rule": rule})


def choice(default: str, *others: str) -> str:
    """Declare a setting that accepts only the given values; the first is the default."""
    return setting(default, partial(one_of, (default, *others)))


class RecipeSection:
    """Base of the sections of a recipe. It checks every setting against the rule of its field."""

    _section: ClassVar[str]

    def __init_subclass__(cls, section: str) -> None:
        cls._section = section

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, f.name)
            if "rule" in f.metadata and value is not None:
                try:
                    f.metadata["rule"](**{f"{self._section}.{f.name}": value})
                except TypeError as wrong:
                    raise ValueError(str(wrong)) from None


def from_table(kind: type, data: Mapping[str, Value], where: str) -> Any:
    """Return an instance of the dataclass `kind` from TOML values; `where` names it in errors."""
    if not isinstance(data, Mapping):
        raise ValueError(f"[{where}] must be a table, got {type(data).__name__}.")
    hints = typing.get_type_hints(kind)
    known = [f.name for f in fields(kind)]
    for name in data:
        known_key(f"[{where or 'recipe'}]", name, known)
    for f in fields(kind):
        if f.default is MISSING and f.default_factory is MISSING and f.name not in data:
            raise ValueError(f"[{where}] needs {f.name!r}.")
    dotted = f"{where}." if where else ""
    return kind(**{name: cast(hints[name], value, dotted + name) for name, value in data.items()})


def cast(hint: Any, value: Value, name: str) -> Value:
    """Return `value` converted to the type `hint`, or raise an error that names the setting `name`.

    A whole number is accepted where a float is expected.
    """
    if hasattr(hint, "__dataclass_fields__"):
        return from_table(hint, value, name)
    if isinstance(hint, types.UnionType):
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        hint = str if str in parts and isinstance(value, str) else parts[0]
    origin = typing.get_origin(hint) or hint
    if origin is tuple and isinstance(value, list | tuple):
        inner = typing.get_args(hint)[0]
        return tuple(cast(inner, item, name) for item in value)
    if origin is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{name} is too large for a number.") from None
    if not isinstance(value, origin) or (isinstance(value, bool) and origin is not bool):
        wanted = {float: "a number", int: "a whole number", str: "text in quotes"}
        wanted |= {bool: "true or false", tuple: "a list", dict: "a table"}
        raise ValueError(f"{name} must be {wanted[origin]}, got {reprlib.repr(value)}.")
    return value
