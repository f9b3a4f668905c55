"""Python state that a training program keeps between calls: find it and restore it.

A loss function can carry a record from one call to the next in a closure, an attribute, a global, a
buffer or a generator. `ProgramState` follows references from the program's functions and objects
and remembers every mutable thing it reaches, so that a check can run the program twice from the
same state. State that Python cannot show (files, other processes, C extensions) is not found.
"""

import collections
import enum
import functools
import random
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_ATOMS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, types.ModuleType)
_NOT_STATE = (torch.optim.Optimizer, torch.utils.data.DataLoader)  # move by released values only
LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
"""Folders of Python's own modules and of installed packages: code that the user did not write."""
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, not in C
_PACKAGE = str(Path(__file__).parents[1])
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# Every step and every test seeds these, so they are not state of the program.
_GLOBAL_GENERATORS = (
    torch.default_generator,
    np.random.get_state.__self__,  # pyright: ignore[reportFunctionMemberAccess]  # a method
    random.random.__self__,  # pyright: ignore[reportFunctionMemberAccess]  # a method
)
_LARGE = 10**7
"""Elements above which an array or a container is taken to be data rather than state."""


Restores = list[Callable[[], None]]
"""Functions that put one mutable object back each."""


class ProgramState:
    """Mutable objects reachable from `roots`, as they were when this was made.

    >>> seen = []
    >>> def loss_fn(model, batch):
    ...     seen.append(batch)
    >>> state = ProgramState(loss_fn)
    >>> loss_fn(None, 1)
    >>> state.restore()
    >>> seen
    []
    """

    def __init__(self, *roots: Any) -> None:  # Any: functions, modules, data sets
        self._entries: Restores = []
        self._seen: dict[int, Any] = {}  # holds the objects, so that their ids stay theirs
        stack = list(roots)
        while stack:
            stack.extend(self._visit(stack.pop()))
        held = [v for v in self._seen.values() if isinstance(v, GENERATORS)]
        others = (*_GLOBAL_GENERATORS, *(v for v in held if isinstance(v, random.SystemRandom)))
        self._generators = [v for v in held if not any(v is g for g in others)]
        self._starts = [_generator_state(g) for g in self._generators]

    def restore(self) -> None:
        """Put every mutable object back to what it was."""
        for restore in self._entries:
            restore()
        self.restore_generators()

    def restore_generators(self) -> None:
        """Put the random generators alone back to what they were."""
        for generator, state in zip(self._generators, self._starts, strict=True):
            _set_generator(generator, state)

    def seed_generators(self, seed: int) -> None:
        """Start the random generators from `seed`, each in its own way."""
        for generator in self._generators:
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            elif isinstance(generator, np.random.Generator):
                bits = generator.bit_generator
                bits.state = type(bits)(seed).state
            else:
                generator.seed(seed)

    def generators(self) -> list[Any]:
        """Return the present states of the random generators, in a form that `==` compares."""
        states = map(_generator_state, self._generators)
        return [bytes(s.numpy()) if isinstance(s, Tensor) else repr(s) for s in states]

    def _visit(self, value: Any) -> Iterable[Any]:
        """Remember how to restore `value`, and return what it refers to."""
        if isinstance(value, _ATOMS) or id(value) in self._seen or len(self._seen) > _LARGE:
            return ()
        self._seen[id(value)] = value
        for kind, remember in _KINDS:
            if isinstance(value, kind):
                return remember(value, self._entries)
        return _object(value, self._entries)


def drawn_so_far(device: torch.device) -> list[object]:
    """Return the states of torch's, numpy's and Python's global generators, to compare by `==`.

    Two programs that started alike and drew equally many numbers end in the same states.
    """
    found: list[object] = [bytes(torch.get_rng_state().numpy()), random.getstate()]
    if device.type == "cuda":
        found.append(bytes(torch.cuda.get_rng_state(device).numpy()))
    shared: Any = np.random.get_state()  # noqa: NPY002  # Any: a tuple, untyped
    return [*found, *(part.tobytes() if isinstance(part, np.ndarray) else part for part in shared)]


def _tensor(value: Tensor, entries: Restores) -> Iterable[Any]:
    is_plain = type(value) is Tensor and value.layout == torch.strided
    try:
        if is_plain and value.numel() and not value.untyped_storage().nbytes():
            return ()  # FSDP2 has freed the memory of a gathered parameter
    except NotImplementedError:  # kept from inside a transform of torch.func, such as vmap
        return ()
    # Parameters are moved by the optimizer, from released gradients only.
    if not isinstance(value, nn.Parameter) and value.numel() <= _LARGE:
        kept = value.detach().clone()

        def put_back() -> None:
            with torch.no_grad():
                value.copy_(kept)

        if not value.is_leaf or not value.requires_grad:
            entries.append(put_back)
    return ()


def _array(value: np.ndarray, entries: Restores) -> Iterable[Any]:
    if value.flags.writeable and value.size <= _LARGE:
        kept = value.copy()
        entries.append(lambda: np.copyto(value, kept))
    return ()


def _dict(value: dict[Any, Any], entries: Restores) -> Iterable[Any]:
    # A subclass may compute something else in `value[key]`, as the table of activations of
    # transformers does, which makes a new object of the class that it holds.
    is_ordered = isinstance(value, collections.OrderedDict)
    kept = dict(collections.OrderedDict.items(value) if is_ordered else dict.items(value))

    def put_back() -> None:
        value.clear()
        value.update(kept)

    entries.append(put_back)
    return kept.values() if len(kept) <= _LARGE else ()


def _list(value: Any, entries: Restores) -> Iterable[Any]:
    kept = list(value)

    def put_back() -> None:
        value.clear()
        value.extend(kept)

    entries.append(put_back)
    return kept


def _set(value: set[Any], entries: Restores) -> Iterable[Any]:
    kept = set(value)

    def put_back() -> None:
        value.clear()
        value.update(kept)

    entries.append(put_back)
    return kept


def _generator_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    return value.getstate()


def _set_generator(value: Any, state: Any) -> None:
    if isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif isinstance(value, random.Random):
        value.setstate(state)
    else:
        value.set_state(state)


def _leave(_: Any, __: Restores) -> Iterable[Any]:
    return ()


def _cache(value: Any, entries: Restores) -> Iterable[Any]:
    """Empty a `functools.lru_cache` when it was changed: a cache that mixes nothing fills again."""
    before = value.cache_info().misses

    def put_back() -> None:
        if value.cache_info().misses != before:
            value.cache_clear()

    entries.append(put_back)
    return (value.__wrapped__,)


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _ATOMS) and a == b)


def _function(value: types.FunctionType, entries: Restores) -> Iterable[Any]:
    if value.__code__.co_filename.startswith(LIBRARIES):
        return ()
    found: list[Any] = [value.__dict__, value.__defaults__, value.__kwdefaults__]
    found.extend(_cell(cell, entries) for cell in value.__closure__ or ())
    names = set(names_in(value.__code__))
    for name in names:
        if name in value.__globals__:
            content = value.__globals__[name]
            entries.append(_binding(value.__globals__, name, content))
            found.append(content)
    modules = {id(m): m for m in [*found, *map(sys.modules.get, names)] if is_own_module(m)}
    for module in modules.values():  # `statistics.total += 1`, of a module that the user wrote
        for name in names & vars(module).keys():
            entries.append(_binding(vars(module), name, vars(module)[name]))
            found.append(vars(module)[name])
    return found


def is_own_module(value: Any) -> bool:
    """Return whether `value` is a module that neither Python nor an installed package brought."""
    file = getattr(value, "__file__", None) if isinstance(value, types.ModuleType) else None
    return file is not None and not file.startswith((*LIBRARIES, _PACKAGE))


def _cell(cell: types.CellType, entries: Restores) -> Any:
    try:
        content = cell.cell_contents
    except ValueError:  # not filled yet
        return None
    entries.append(lambda: setattr(cell, "cell_contents", content))
    return content


def _binding(names: dict[str, Any], name: str, content: Any) -> Callable[[], None]:
    return functools.partial(names.__setitem__, name, content)


def _slot(owner: Any, name: str, content: Any) -> Callable[[], None]:
    """Remember an attribute of a class, or of an object that has no `__dict__`."""
    setter = type.__setattr__ if isinstance(owner, type) else object.__setattr__
    read = vars(owner).get if isinstance(owner, type) else functools.partial(getattr, owner)

    def put_back() -> None:
        if not _is_same(read(name, None), content):
            setter(owner, name, content)

    return put_back


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes that `code` mentions, and functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def _method(value: types.MethodType, _: Restores) -> Iterable[Any]:
    return value.__self__, value.__func__


def _partial(value: functools.partial, _: Restores) -> Iterable[Any]:
    return value.func, value.args, value.keywords


def _class(value: type, entries: Restores) -> Iterable[Any]:
    """Follow the attributes of a class that the user wrote: `Model.total += 1` changes them."""
    if _is_library(value):
        return ()
    plain = {k: v for k, v in vars(value).items() if not k.startswith("__")}
    for name, content in plain.items():
        entries.append(_slot(value, name, content))
    return [*plain.values(), *value.__bases__]


def _is_library(value: type) -> bool:
    """Return whether a class is of Python itself, of an installed package, or written in C."""
    module = sys.modules.get(value.__module__)
    return not value.__flags__ & _HEAP_TYPE or not (
        value.__module__ == "__main__" or is_own_module(module)
    )


def _tuple(value: tuple[Any, ...] | frozenset[Any], _: Restores) -> Iterable[Any]:
    return value


def _object(value: Any, entries: Restores) -> Iterable[Any]:
    if isinstance(value, _NOT_STATE) or type(value).__module__.startswith("tacit."):
        return ()
    found: list[Any] = [type(value)]
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict):
        found.append(held)
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()) if not _is_library(kind) else ():
            if name != "__dict__" and hasattr(value, name):
                content = getattr(value, name)
                entries.append(_slot(value, name, content))
                found.append(content)
    return found


# By kind, the first that fits.
_KINDS: list[tuple[Any, Callable[[Any, Restores], Iterable[Any]]]] = [
    (Tensor, _tensor),
    (np.ndarray, _array),
    (dict, _dict),
    ((list, collections.deque), _list),
    (set, _set),
    ((tuple, frozenset), _tuple),
    (GENERATORS, _leave),
    (type(functools.lru_cache(len)), _cache),
    (types.FunctionType, _function),
    (types.MethodType, _method),
    (functools.partial, _partial),
    (type, _class),
]
