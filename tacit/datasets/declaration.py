"""The declaration of a table as text: TOML to columns, with errors that name field and line.

target = "income"                        # the column to predict; leave it out for summaries

[columns]
age = [18, 93]                           # a number with its bounds
region = ["north", "south", "west"]      # categories
employed = "boolean"
patient = "person"                       # whose record it is: the unit of privacy
name = "ignored"

[columns.schooling]                      # the long form, with the rules of `Column`
type = "ordered"
categories = ["none", "primary", "secondary", "tertiary"]
missing = "none"

[file]                                   # how the file is written; see `Dialect`
separator = ";"
"""

import tomllib
from collections.abc import Mapping
from typing import Any

from tacit._check import did_you_mean, known_key
from tacit.datasets.columns import TYPES, Column

LARGEST_FILE = 1 << 20  # bytes of a schema file; one with more is no schema
_NUMBERS = ("lower", "upper", "at_least", "step")
_TEXTS = ("type", "outside", "reference")
_KEYS = ("type", "lower", "upper", "step", "categories", "at_least", "missing", "outside",
         "reference")  # fmt: skip
HOW = (
    "Write bounds as in [0, 120], categories as in ['a', 'b'], or one of the words 'boolean', "
    "'ignored', 'person'."
)


class SourceLines:
    """Line numbers of the keys of a TOML text, for error messages; empty without a text."""

    def __init__(self, text: str = "") -> None:
        self._found: dict[tuple[str, ...], int] = {}
        section: tuple[str, ...] = ()
        for number, line in enumerate(text.splitlines(), 1):
            stripped = line.strip()
            if stripped.startswith("["):
                section = _path_of(stripped + "\n") or section
                self._found.setdefault(section, number)
            elif "=" in stripped and (key := _path_of(_before_equals(stripped) + " = 0")):
                for k in range(1, len(key) + 1):
                    self._found.setdefault((*section, *key[:k]), number)

    def prefix(self, *path: str) -> str:
        """Return "line 7: ", the line of the longest known part of `path`; "" if none is known."""
        for k in range(len(path), 0, -1):
            if path[:k] in self._found:
                return f"line {self._found[path[:k]]}: "
        return ""


def parse_toml(text: str, what: str = "schema") -> dict[str, Any]:  # Any: TOML values
    """Return the values of a TOML text; an error says in which line the text is no TOML."""
    if len(text) > LARGEST_FILE:
        raise ValueError(f"the {what} must be smaller than {LARGEST_FILE >> 20} MB.")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as wrong:
        raise ValueError(f"the {what} is not TOML: {wrong}.") from None
    except (RecursionError, ValueError):
        raise ValueError(f"the {what} is not TOML that can be read.") from None


def column_of(name: str, given: object) -> Column:
    """Return the column that one entry of [columns] declares: a word, a list, or a table.

    >>> column_of("age", [18, 93])
    Column(name='age', type='number', lower=18.0, upper=93.0, ...)
    """
    if isinstance(given, Column):
        return given
    if not isinstance(name, str) or not name.strip():
        raise ValueError("a column must have a name.")
    if isinstance(given, str):
        return Column(name=name, type=_type_of(name, given))
    if isinstance(given, list | tuple):
        if len(given) == 2 and all(map(_is_number, given)):
            return Column(name=name, lower=_real(name, given[0]), upper=_real(name, given[1]))
        if given and all(isinstance(value, str) for value in given):
            return Column(name=name, categories=tuple(given))
        raise ValueError(
            f"column {name!r} must list two numbers (its bounds) or texts in quotes (its "
            "categories)."
        )
    if not isinstance(given, Mapping):
        raise ValueError(f"column {name!r} has no declaration that can be read. {HOW}")
    return Column(name=name, **{key: _value(name, key, v) for key, v in given.items()})


def _type_of(name: str, word: str) -> str:
    if not word.strip():
        raise ValueError(f"column {name!r} is not declared yet. {HOW}")
    if word in ("boolean", "ignored", "person"):
        return word
    if word in TYPES:
        needed = "categories" if word in ("category", "ordered") else "bounds"
        raise ValueError(f"column {name!r} of type {word!r} needs its {needed}. {HOW}")
    raise ValueError(
        f"column {name!r} has no type {_short(word)}.{did_you_mean(word, TYPES)} {HOW}"
    )


def _value(name: str, key: object, value: Any) -> Any:  # Any: TOML values
    """Return the value of one setting of a column with its right type."""
    known_key(f"column {name!r}", key, _KEYS)
    if key in _NUMBERS:
        if not _is_number(value):
            raise ValueError(f"column {name!r}: {key} must be a number, got {_kind(value)}.")
        return _real(name, value)
    if key == "categories":
        if not isinstance(value, list | tuple) or not value:
            raise ValueError(f"column {name!r}: categories must be a list such as ['a', 'b'].")
        if not all(isinstance(v, str) or _is_number(v) for v in value):
            raise ValueError(f"column {name!r}: categories must be texts in quotes.")
        return tuple(str(v) for v in value)
    if key in _TEXTS:
        if not isinstance(value, str):
            raise ValueError(f"column {name!r}: {key} must be text in quotes, got {_kind(value)}.")
        if key == "type" and value not in TYPES:
            raise ValueError(
                f"column {name!r} has no type {_short(value)}.{did_you_mean(value, TYPES)} "
                f"Types are {', '.join(TYPES)}."
            )
        return value
    if not isinstance(value, str | bool) and not _is_number(value):
        raise ValueError(f"column {name!r}: missing must be a number, a category or a truth value.")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _real(name: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"column {name!r}: a bound is too large for a number.") from None


def _kind(value: object) -> str:
    names = {str: "text", bool: "a truth value", list: "a list", dict: "a table"}
    return names.get(type(value), type(value).__name__)


def _short(value: object) -> str:
    text = repr(str(value))
    return text if len(text) <= 60 else text[:57] + "..."


def _before_equals(line: str) -> str:
    """Return the part of a line before the first = that is not in quotes."""
    quote = ""
    for k, sign in enumerate(line):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign == "=":
            return line[:k]
    return line


def _path_of(text: str) -> tuple[str, ...]:
    """Return the keys of a one-line TOML text from the outside in; empty if it is no TOML."""
    try:
        found: Any = tomllib.loads(text)
    except (ValueError, RecursionError):
        return ()
    path: list[str] = []
    while isinstance(found, dict) and len(found) == 1:
        ((key, found),) = found.items()
        path.append(key)
        if isinstance(found, list) and found:  # [[derived]]
            found = found[0]
    return tuple(path)
