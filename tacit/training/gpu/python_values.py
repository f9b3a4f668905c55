"""The Python values that a program reads, which a compiled program has fixed.

A coefficient that a loop changes, such as the weight of a penalty, is a number in the traced graph.
These values are compared at every step, so that a changed one is noticed. Found are numbers,
strings, flags and small arrays that can be reached from the model's modules and from `loss_fn`:
attributes (of classes too), closures, defaults, entries of containers, and what their functions
name in modules. A tensor that the graph reads is found again if another one takes its place.

A number that the program reads out of a tensor is fixed too. `ReadValues` notes these.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tacit.errors import IncompatibleModel
from tacit.training import gpu
from tacit.training.engines.trace import READS

_SCALARS = (int, float, complex, str, bytes, type(None))
_DEPTH = 6  # containers within containers
_ENTRIES = 256  # longer containers are data rather than settings
_MOST = 2**16  # places; more cannot be compared at every step
_LIBRARIES = ("torch", "builtins", "numpy")  # whose classes and modules hold no settings

_INTERNAL = frozenset(vars(nn.Module()))  # attributes of every layer; `training` is among them

Getter = Callable[[], Any]


class PythonValues:
    """Reads the present Python values of a model and its loss when called, always in one order.

    The flag `training` of modules is left out.
    """

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        self._roots = [*model.modules(), loss_fn]
        self._used: set[int] = set()  # addresses of the tensors that a graph reads
        self._find()

    def __call__(self) -> tuple[Any, ...]:
        """Return the values, each with the name of its place."""
        if any(get() is not held for get, held in self._holders) or any(
            len(names) != count for names, count in self._sizes
        ):
            self._find()
        found = [(name, _value(get())) for name, get in self._places]
        used = [(name, at) for name, get in self._tensors if (at := self._address(get()))]
        return (*found, *used)

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Notice from now on if one of these, which a graph reads, is replaced by another one."""
        self._used.update(tensor.data_ptr() for tensor in tensors)

    def name_of_change(self, before: tuple[Any, ...], after: tuple[Any, ...]) -> str:
        """Return the name of the first value that differs."""
        if len(before) == len(after):
            pairs = zip(before, after, strict=True)
            return next((b[0] for a, b in pairs if a is not b and a != b), "a value")
        return next((new[0] for new in after if new not in before), "a value")

    def _address(self, tensor: Any) -> int:
        """Return the address of a tensor that a graph reads, 1 for another tensor, 0 for none."""
        if not isinstance(tensor, Tensor):
            return 0
        at = 1 if gpu.is_traced(tensor) else tensor.data_ptr()
        return at if at in self._used else 1

    def _find(self) -> None:
        self._places: list[tuple[str, Getter]] = []
        self._tensors: list[tuple[str, Getter]] = []
        self._holders: list[tuple[Getter, Any]] = []  # of other values, which are looked into
        self._sizes: list[tuple[Any, int]] = []
        self._seen: set[int] = set()
        for root in self._roots:
            self._visit(root, 0)
        self._seen.clear()

    def _visit(self, value: Any, depth: int) -> None:
        is_data = isinstance(value, (Tensor, np.ndarray, *_SCALARS))
        is_far = depth > _DEPTH or len(self._places) > _MOST
        if is_far or is_data or id(value) in self._seen or isinstance(value, ModuleType):
            return
        self._seen.add(id(value))
        if isinstance(value, type):
            self._look_at_class(value, depth)
            return
        if isinstance(value, FunctionType):
            self._look_at_function(value, depth)
        self._look_at_class(type(value), depth)
        if isinstance(value, list | tuple | set | frozenset | dict):
            self._look_into(value, depth)
        for held in _held_by(value):
            self._look_into(held, depth)

    def _look_at_function(self, function: FunctionType, depth: int) -> None:
        for cell, name in zip(
            function.__closure__ or (), function.__code__.co_freevars, strict=True
        ):
            self._add(name, partial(_content, cell), depth)
        named = function.__code__.co_names
        self._look_into(function.__globals__, depth, named)
        for name in named:
            module = function.__globals__.get(name)
            if isinstance(module, ModuleType) and not _is_of_a_library(module.__name__):
                self._look_into(vars(module), depth, named)

    def _look_at_class(self, kind: type, depth: int) -> None:
        """Look at the attributes of a class and at what its methods name."""
        for base in kind.__mro__:
            if _is_of_a_library(base.__module__) or id(vars(base)) in self._seen:
                continue
            self._seen.add(id(vars(base)))
            names = [name for name in vars(base) if not name.startswith("__")]
            self._look_into(vars(base), depth, names)

    def _look_into(self, held: Any, depth: int, names: Iterable[Any] | None = None) -> None:
        """Look at the entries of a container, or at those called `names`."""
        if names is None:
            self._sizes.append((held, len(held)))
        if isinstance(held, set | frozenset):
            held = list(held)
        if isinstance(held, list | tuple):
            for index in range(min(len(held), _ENTRIES)):
                self._add(str(index), partial(_entry, held, index), depth)
            return
        keys = [k for k in names or list(held) if k in held and k not in _INTERNAL]
        for key in keys[:_ENTRIES]:
            self._add(str(key), partial(held.get, key), depth)

    def _add(self, name: str, get: Getter, depth: int) -> None:
        value = get()
        if isinstance(value, _SCALARS) or (
            isinstance(value, np.ndarray) and value.size <= _ENTRIES
        ):
            self._places.append((name, get))
        elif isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter):
                self._tensors.append((name, get))
        else:
            self._holders.append((get, value))
            self._visit(value, depth + 1)


class ReadValues(TorchFunctionMode):
    """Notes which values a program reads out of tensors while it is traced.

    A read of what it has computed, or of a parameter, cannot be compiled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Getter, Any]] = []  # how to read again, and what was read

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in READS:
            _refuse_lengths(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))
        if any(t.requires_grad or gpu.is_traced(t) for t in args if isinstance(t, Tensor)):
            raise IncompatibleModel(
                "the program turns a value that it computes, or a parameter, into a Python "
                "number or a branch. Use the tensor itself"
            )
        again = partial(func, *args, **(kwargs or {}))
        result = again()
        self.found.append((again, _read(result)))
        return result

    @staticmethod
    def are_equal(found: Iterable[tuple[Getter, Any]]) -> bool:
        """Return whether all of these reads give what they gave."""
        return all(_read(again()) == before for again, before in found)


def _refuse_lengths(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise for a call whose result has a size that only the numbers in a batch tell."""
    is_bag = func is F.embedding_bag and (len(args) > 2 or kwargs.get("offsets") is not None)
    if is_bag or getattr(func, "__name__", "") == "_pack_padded_sequence":
        raise IncompatibleModel(
            "packed sequences, and bags given by offsets, have lengths that only the batch tells"
        )


def _read(result: Any) -> Any:
    return result.tobytes() if isinstance(result, np.ndarray) else repr(result)


def _held_by(value: Any) -> Iterator[Any]:
    """Yield containers with what a value holds."""
    if isinstance(value, MethodType):
        yield [value.__self__, value.__func__]
    elif isinstance(value, partial):
        yield from ([value.func], value.keywords, dict(enumerate(value.args)))
    else:
        for name in ("__dict__", "__kwdefaults__", "__defaults__"):
            held = getattr(value, name, None)
            if isinstance(held, dict | tuple) and held:
                yield held
        slots: list[str] = []
        for kind in type(value).__mro__:
            own = vars(kind).get("__slots__", ())
            slots += [own] if isinstance(own, str) else own
        if slots:
            yield _Slots(value, slots)


class _Slots:
    """The attributes that an object has without a `__dict__`, as a mapping."""

    def __init__(self, holder: Any, names: list[str]) -> None:
        self._holder, self._names = holder, names

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: str) -> bool:
        return hasattr(self._holder, name)

    def get(self, name: str) -> Any:
        return getattr(self._holder, name, None)


def _value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return value if isinstance(value, _SCALARS) else id(value)


def _entry(held: Any, index: int) -> Any:
    return held[index] if index < len(held) else None


def _is_of_a_library(name: str) -> bool:
    return name.partition(".")[0] in _LIBRARIES


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
