"""Names of a package that are imported when they are first used."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module-level `__getattr__` that imports each name from its home on first use.

    `homes` maps a public name to the module that defines it, relative to `package`. A package whose
    parts need torch or scikit-learn stays light to import that way.
    """

    def load(name: str) -> Any:  # Any: modules, classes and functions alike
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(import_module(package), name, value)
        return value

    return load
