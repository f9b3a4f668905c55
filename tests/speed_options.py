"""Options of a run as tests name them: those of `Speed`, `Noise` and `Reports` one by one."""

from dataclasses import fields, replace
from typing import Any


def with_speed(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `make_private`, with those that go together put into one object."""
    from tacit.training import Noise, Reports, Speed

    found = dict(options)
    for name, kind in {"speed": Speed, "noise": Noise, "reports": Reports}.items():
        own = {f.name: found.pop(f.name) for f in fields(kind) if f.name in found}
        if own:
            given = Noise.of(found.get(name)) if kind is Noise else found.get(name)
            found[name] = replace(given or kind(), **own)
    return found
