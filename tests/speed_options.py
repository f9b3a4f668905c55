"""Options of a run as tests name them: those of `Speed` beside those of `make_private`."""

from dataclasses import fields
from typing import Any


def with_speed(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `make_private`, with those of `Speed` among them put into one."""
    from tacit.training import Speed

    own = {field.name: options[field.name] for field in fields(Speed) if field.name in options}
    rest = {name: value for name, value in options.items() if name not in own}
    return rest | {"speed": Speed(**own)} if own else rest
