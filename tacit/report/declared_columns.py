"""The columns of a table in words: bounds and categories as the schema of a run declares them."""

from collections.abc import Mapping
from typing import Any

from tacit.datasets import Column, Schema
from tacit.report.page import Section


def columns_section(recipe: Mapping[str, Any]) -> tuple[Section, ...]:  # Any: TOML values
    """Return a section that lists the declared columns of a recipe's table; empty without one."""
    declared = recipe.get("data", {}).get("schema")
    if not isinstance(declared, Mapping):
        return ()
    schema = Schema.from_dict(declared)
    rows = [(_name(column, schema.target), column_in_words(column)) for column in schema.declared]
    rows += [
        (f"{one['name']} (derived)", _derived(one)) for one in schema.to_dict().get("derived", ())
    ]
    text = (
        "Bounds and categories come from the schema and were declared without looking at the "
        "records. They are public."
    )
    return (Section(name="columns", title="Declared columns", text=text, rows=tuple(rows)),)


def column_in_words(column: Column) -> str:
    """Return what a cell of the column may hold, and what becomes of other cells.

    >>> column_in_words(Column(name="age", lower=17, upper=90, step=1, outside="clip"))
    'number from 17 to 90 in steps of 1; clipped outside'
    """
    words = {
        "number": f"number from {_plain(column.lower)} to {_plain(column.upper)}",
        "weight": f"weight of the record, from {_plain(column.lower)} to {_plain(column.upper)}",
        "category": f"one of {', '.join(column.categories)}",
        "ordered": f"one of, in this order, {', '.join(column.categories)}",
        "boolean": "true or false",
        "person": "names the person whose record it is",
        "ignored": "not used",
    }[column.type]
    if column.at_least is not None:
        words = f"whether the number is at least {column.at_least:g}"
    if column.step is not None:
        words += f" in steps of {column.step:g}"
    if column.missing is not None:
        words += f"; a missing value becomes {_plain(column.missing)}"
    if column.outside and column.type not in ("person", "ignored"):
        ways = {"clip": "clipped outside", "missing": "other values count as missing"}
        words += f"; {ways.get(column.outside, f'other values become {column.outside}')}"
    return words


def _name(column: Column, target: str) -> str:
    return f"{column.name} (target)" if column.name == target else column.name


def _derived(one: Mapping[str, Any]) -> str:
    if one.get("product"):
        return " times ".join(one["product"])
    return f"whether {one['column']} is at least {one['at_least']:g}"


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)
