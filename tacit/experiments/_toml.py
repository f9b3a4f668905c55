"""TOML text from plain values: the standard library reads TOML but does not write it."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dumps(data: Mapping[str, Any]) -> str:  # Any: TOML values
    """`data` as TOML: numbers, text, truth values, lists, tables, and lists of tables.

    >>> print(dumps({"name": "x", "training": {"epochs": 3.0, "at": [{"epsilon": 1.0}]}}), end="")
    name = "x"
    <BLANKLINE>
    [training]
    epochs = 3.0
    <BLANKLINE>
    [[training.at]]
    epsilon = 1.0
    """
    lines: list[str] = []
    _table(data, "", lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _table(data: Mapping[str, Any], path: str, lines: list[str]) -> None:
    tables: list[tuple[str, Any]] = []
    for name, value in data.items():
        if isinstance(value, Mapping) or _is_tables(value):
            tables.append((name, value))
        else:
            lines.append(f"{_key(name)} = {_value(value)}")
    for name, value in tables:
        inner = f"{path}.{_key(name)}" if path else _key(name)
        for one in [value] if isinstance(value, Mapping) else value:
            lines.append("")
            lines.append(f"[{inner}]" if isinstance(value, Mapping) else f"[[{inner}]]")
            _table(one, inner, lines)


def _is_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    raise TypeError(f"a {type(value).__name__} has no TOML form.")
