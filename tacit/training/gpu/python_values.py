"""The Python values that a program reads, which a compiled program has fixed.

A coefficient that a loop changes, such as the weight of a penalty, is a number in the traced graph.
These values are compared at every step, so that a changed one is noticed. Found are numbers,
strings and flags that can be reached from the model's modules and from `loss_fn`: attributes,
closures, global variables, defaults, and entries of their containers.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

_SCALARS = (int, float, complex, str, bytes, type(None))
_DEPTH = 4  # containers within containers
_ENTRIES = 256  # longer containers are data rather than settings


class PythonValues:
    """Reads the present Python values of a model and its loss when called, always in one order.

    The flag `training` of modules is left out. Places that come into being later are not read.
    """

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        self._places: list[tuple[dict[Any, Any], Any]] = []
        self._cells: list[tuple[CellType, str]] = []
        self._seen: set[int] = set()
        for module in model.modules():
            self._visit(module, 0)
        self._visit(loss_fn, 0)
        self._seen.clear()

    def __call__(self) -> tuple[Any, ...]:
        """Return the values."""
        found = [held.get(name) for held, name in self._places]
        return (*found, *(_content(cell) for cell, _ in self._cells))

    def name_of_change(self, before: tuple[Any, ...], after: tuple[Any, ...]) -> str:
        """Return the name of the first value that differs."""
        names = [*(str(name) for _, name in self._places), *(name for _, name in self._cells)]
        changed = (n for n, a, b in zip(names, before, after, strict=True) if a is not b and a != b)
        return next(changed, "a value")

    def _visit(self, value: Any, depth: int) -> None:
        is_data = isinstance(value, Tensor | type | ModuleType)
        if depth > _DEPTH or id(value) in self._seen or is_data:
            return
        self._seen.add(id(value))
        if isinstance(value, FunctionType):
            for cell, name in zip(value.__closure__ or (), value.__code__.co_freevars, strict=True):
                if isinstance(_content(cell), _SCALARS):
                    self._cells.append((cell, name))
                else:
                    self._visit(_content(cell), depth + 1)
            self._look_into(value.__globals__, value.__code__.co_names, depth)
        for held in _held_by(value):
            if isinstance(held, dict):
                self._look_into(held, held, depth)
            else:
                self._visit(held, depth + 1)

    def _look_into(self, held: dict[Any, Any], names: Iterable[Any], depth: int) -> None:
        for name in [name for name in names if name in held and name != "training"][:_ENTRIES]:
            if isinstance(held[name], _SCALARS):
                self._places.append((held, name))
            else:
                self._visit(held[name], depth + 1)


def _held_by(value: Any) -> Iterator[Any]:
    """Yield what a value holds; a dictionary stands for the values in it."""
    if isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, partial):
        yield from (value.func, value.keywords, dict(enumerate(value.args)))
    elif isinstance(value, dict):
        yield value
    elif isinstance(value, list | tuple | set | frozenset):
        yield from list(value)[:_ENTRIES]
    else:
        yield getattr(value, "__dict__", None) or {}
        yield getattr(value, "__kwdefaults__", None) or {}
        yield getattr(value, "__defaults__", None) or ()


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
