"""Options that several verbs share, as dataclasses: one field for each option of the command line.

A verb takes such a dataclass as one parameter, and `expanded` makes an option of each field:

    @expanded
    def regress(table: tables.Table, *, given: tables.FitOptions, delta: float = 1e-6) -> None:
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def expanded(verb: Callable[..., None]) -> Callable[..., None]:
    """Return the verb with one parameter for each field of those parameters that are dataclasses.

    Options keep the order of the parameters, and fields that of the dataclass. Every field needs a
    default.
    """
    hints = get_type_hints(verb, include_extras=True)
    blocks = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    signature = inspect.signature(verb)

    @wraps(verb)
    def call(**values: Any) -> None:  # Any: options of many types
        for name, block in blocks.items():
            own = {field.name: values.pop(field.name) for field in fields(block)}
            values[name] = block(**own)  # type: ignore[operator]  # a class, as is_dataclass says
        verb(**values)

    parameters = [
        expansion
        for parameter in signature.parameters.values()
        for expansion in _expansions(parameter, hints, blocks)
    ]
    call.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # of inspect
    return call


def _expansions(
    parameter: inspect.Parameter, hints: dict[str, Any], blocks: dict[str, Any]
) -> Iterator[inspect.Parameter]:
    """Yield the parameters of the command line that stand for one parameter of the verb."""
    if parameter.name not in blocks:
        yield parameter.replace(annotation=hints[parameter.name])
        return
    block = blocks[parameter.name]
    block_hints = get_type_hints(block, include_extras=True)
    for field in fields(block):
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(field),
            annotation=block_hints[field.name],
        )


def _default(field: Field[Any]) -> Any:  # Any: the value of an option
    if field.default is MISSING:
        raise TypeError(f"option {field.name!r} needs a default.")
    return field.default
