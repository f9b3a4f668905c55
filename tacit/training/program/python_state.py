"""Python values that a program reads or writes: found by following references, compared, put back.

A traced program holds the numbers that Python had when it was traced: attributes, closures,
globals, containers. `PythonState` finds them from `loss_fn` and the model. Comparing them takes
microseconds, so it is done before each lot. What a trace wrote can be put back.

Not seen: writes through `.data` and into arrays of more than 64 KiB, environment variables, clocks,
globals of installed libraries, iterators, and state in C++.
"""

import dis
import functools
import gc
import random
import sys
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tacit.training.program import torch_internals
from tacit.training.program.tensor_values import Placeholder
from tacit.training.program_state import LIBRARIES, is_own_module

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_NOT_READ = (torch.optim.Optimizer, torch.utils.data.DataLoader, torch.utils.data.Dataset)
_FOREIGN = (*LIBRARIES, str(Path(__file__).parents[2]))
_ALWAYS_RUN = {"forward", *(f"__{n}__" for n in ("call", "getattr", "getitem", "iter", "len"))}
_LARGE = 2**16  # bytes of an array that are compared: a few microseconds
_MISSING = object()


class _Place(NamedTuple):
    """Somewhere that a value stands: how to read it, and how to put another one there."""

    label: str
    read: Callable[[], Any]  # a copy, of a container
    write: Callable[[Any], object]


class Kept(NamedTuple):
    """What stood in each place of a `PythonState`."""

    boxes: list[Any]
    values: list[Any]
    trained: list[bool]
    generators: list[Any]
    caches: list[int]


class Leftover(NamedTuple):
    """A value of a trace that was put back: where it stood, and what it was."""

    place: _Place
    value: Any


class PythonState:
    """The Python values that can be reached from `loss_fn` and the model, with the global generators.

    Of objects other than modules only those attributes are followed and compared that code of the
    program names, so that a training loop's own counters beside `loss_fn` are no part of it.

    Examples
    --------
    >>> rate = [0.1]
    >>> def loss_fn(model, batch):
    ...     return model(batch) * rate[0]
    >>> state = PythonState(loss_fn, nn.Linear(1, 1))
    >>> before = state.now()
    >>> rate[0] = 0.2
    >>> state.changed(before)
    ['rate of loss_fn']
    >>> state.put_back(before)
    >>> rate
    [0.1]
    """

    def __init__(self, loss_fn: Any, model: nn.Module) -> None:  # Any: whatever can be called
        self.tensors: dict[int, str] = {}
        self._boxes: list[_Place] = []  # containers, and the attributes of objects
        self._live: list[Any] = []  # the containers themselves
        self._attributes: set[int] = set()  # numbers of those boxes that are objects' attributes
        self._values: list[_Place] = []
        self._trained: list[tuple[str, Tensor]] = []
        self._generators: list[_Place] = []
        self._caches: list[_Place] = []
        self._names: set[str] = set()
        self._waiting: defaultdict[str, list[Callable[[], object]]] = defaultdict(list)
        self._seen: dict[int, Any] = {}  # holds the objects, so that their ids stay theirs
        self._queue = deque[tuple[str, Any]]([("loss_fn", loss_fn), ("model", model)])
        self._queue.extend(_global_generators())
        while self._queue:
            self._visit(*self._queue.popleft())

    # Comparing -------------------------------------------------------------------------------------

    def now(self) -> Kept:
        """Return what stands in each place."""
        places = self._boxes, self._values, self._generators, self._caches
        boxes, values, generators, caches = ([p.read() for p in some] for some in places)
        return Kept(boxes, values, [p.requires_grad for _, p in self._trained], generators, caches)

    def is_same(self, kept: Kept) -> bool:
        """Return whether nothing that the program reads has changed. Fast."""
        try:
            return (
                self._live == kept.boxes
                and [place.read() for place in self._values] == kept.values
                and [p.requires_grad for _, p in self._trained] == kept.trained
            )
        except Exception:  # such as two tensors, which `==` compares by elements
            return False

    def changed(self, kept: Kept) -> list[str]:
        """Return the names of values that have changed, of those that the program reads."""
        found = []
        for number, (place, live, old) in enumerate(
            zip(self._boxes, self._live, kept.boxes, strict=True)
        ):
            if _is_same(live, old):
                continue
            if not isinstance(live, dict):
                found.append(place.label)
                continue
            keys = [k for k in (old | live) if not _is_same_item(live, old, k)]
            if number in self._attributes:
                keys = [k for k in keys if k in self._names]
            found += [_item(place.label, key) for key in keys]
        for place, old in zip(self._values, kept.values, strict=True):
            if not _is_same(place.read(), old):
                found.append(place.label)
        for (label, p), was_trained in zip(self._trained, kept.trained, strict=True):
            if p.requires_grad != was_trained:
                found.append(f"{label}.requires_grad")
        return list(dict.fromkeys(found))

    def drawn(self, kept: Kept) -> list[str]:
        """Return the names of the generators of random numbers that have moved."""
        pairs = zip(self._generators, kept.generators, strict=True)
        return [g.label for g, old in pairs if _comparable(g.read()) != _comparable(old)]

    def draws(self) -> list[Any]:
        """Return the states of all generators, to be compared with `==`."""
        return [_comparable(g.read()) for g in self._generators]

    # Putting back ----------------------------------------------------------------------------------

    def put_back(self, kept: Kept) -> None:
        """Put back everything but whether parameters are trained."""
        for place, live, old in zip(self._boxes, self._live, kept.boxes, strict=True):
            if not _is_same(live, old):
                place.write(old)
        for place, old in zip(self._values, kept.values, strict=True):
            if place.read() is not old:
                place.write(old)
        for place, old in zip(self._generators, kept.generators, strict=True):
            place.write(old)
        self._empty_caches(kept)

    def clean(self, kept: Kept) -> list[Leftover]:
        """Put back what now holds a tensor or a number of a trace; return where it stood."""
        found: list[Leftover] = []
        for place, live, old in zip(self._boxes, self._live, kept.boxes, strict=True):
            if _is_same(live, old):
                continue
            if isinstance(live, dict):
                for key in [k for k in live if not _is_same_item(live, old, k)]:
                    if self._is_traced(live[key]):
                        item = _item_place(_item(place.label, key), live, key)
                        found.append(Leftover(item, live[key]))
                        item.write(old.get(key, _MISSING))
            elif self._is_traced([v for v in live if not any(v is o for o in old)]):
                found.append(Leftover(place, place.read()))
                kept_items = [v for v in live if any(v is o for o in old) or not self._is_traced(v)]
                has_old = sum(any(v is o for o in old) for v in kept_items) >= len(old)
                place.write(kept_items if has_old else old)
        for place, old in zip(self._values, kept.values, strict=True):
            value = place.read()
            if value is not old and self._is_traced(value):
                found.append(Leftover(place, value))
                place.write(old)
        self._empty_caches(kept)
        return found

    def _empty_caches(self, kept: Kept) -> None:
        for place, misses in zip(self._caches, kept.caches, strict=True):
            if place.read() != misses:
                place.write(misses)

    def _is_traced(self, value: Any) -> bool:
        """Return whether a new value holds a tensor without values, or a number of one."""
        pending, seen = [value], set[int]()
        while pending:
            value = pending.pop()
            if torch_internals.is_fake(value) or isinstance(value, Placeholder) or _is_nan(value):
                return True
            if id(value) in seen or id(value) in self._seen:
                continue
            seen.add(id(value))
            if isinstance(value, types.FunctionType):
                pending += [value.__closure__, value.__defaults__, value.__dict__]
            elif not isinstance(value, type | types.ModuleType):
                pending += gc.get_referents(value)
        return False

    # Finding ---------------------------------------------------------------------------------------

    def _visit(self, label: str, value: Any) -> None:
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        for kind, visit in _KINDS:
            if isinstance(value, kind):
                visit(self, label, value)
                return
        self._object(label, value)

    def _later(self, label: str, value: Any) -> None:
        self._queue.append((label, value))

    def _when_named(self, name: Any, action: Callable[[], object]) -> None:
        """Run `action` if code of the program names `name`: now, or when such code is found."""
        if name in self._names:
            action()
        else:
            self._waiting[name].append(action)

    def _box(self, label: str, live: Any, write: Callable[[Any], object]) -> None:
        copy = next(kind for kind in (dict, list, set, deque) if isinstance(live, kind))
        self._boxes.append(_Place(label, functools.partial(copy, live), write))
        self._live.append(live)

    def _slot(self, label: str, owner: Any, name: str) -> None:
        """Compare an entry of a dict, or an attribute, and follow what stands there."""
        place = _slot_of(label, owner, name)
        self._values.append(place)
        self._later(label, place.read())

    def _dict(self, label: str, value: dict[Any, Any]) -> None:
        # A subclass may compute something else in `value[key]`.
        self._box(label, value, functools.partial(_refill, value))
        for key, content in dict.items(value):
            self._later(_item(label, key), content)

    def _list(self, label: str, value: Any) -> None:
        def write(old: Any) -> None:
            value.clear()
            (value.update if isinstance(value, set) else value.extend)(old)

        self._box(label, value, write)
        for content in value:
            self._later(label, content)

    def _frozen(self, label: str, value: Iterable[Any]) -> None:
        for content in value:
            self._later(label, content)

    def _array(self, label: str, value: np.ndarray[Any, Any]) -> None:
        if value.nbytes <= _LARGE and value.flags.writeable and not value.dtype.hasobject:
            flat = np.frombuffer
            self._values.append(
                _Place(
                    label,
                    value.tobytes,
                    lambda old: np.copyto(value, flat(old, value.dtype).reshape(value.shape)),
                )
            )

    def _tensor(self, label: str, value: Tensor) -> None:
        self.tensors[id(value)] = label
        if isinstance(value, nn.Parameter):
            self._trained.append((label, value))

    def _generator(self, label: str, value: Any) -> None:
        if isinstance(value, np.random.Generator):
            bits = value.bit_generator
            read: Any = lambda: bits.state
            write: Any = functools.partial(setattr, bits, "state")
        elif isinstance(value, random.Random):
            read, write = value.getstate, value.setstate
        else:
            read, write = value.get_state, value.set_state
        if not isinstance(value, random.SystemRandom):
            self._generators.append(_Place(label, read, write))

    def _cache(self, label: str, value: Any) -> None:
        def misses() -> int:
            return value.cache_info().misses

        self._caches.append(_Place(label, misses, lambda _: value.cache_clear()))
        self._later(label, value.__wrapped__)

    def _module(self, label: str, value: nn.Module) -> None:
        held = vars(value)
        self._box(f"{label}.", held, functools.partial(_refill, held))
        for name, content in held.items():
            if name in ("_parameters", "_buffers", "_modules"):
                self._visit(f"{label}.", content)
            else:
                self._later(f"{label}.{name}", content)
        self._later(type(value).__name__, type(value))

    def _object(self, label: str, value: Any) -> None:
        if isinstance(value, _NOT_READ) or type(value).__module__.startswith("tacit."):
            return
        self._later(type(value).__name__, type(value))
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            self._attributes.add(len(self._boxes))
            self._box(f"{label}.", held, functools.partial(_refill, held))
            for name, content in held.items():
                later = functools.partial(self._later, f"{label}.{name}", content)
                self._when_named(name, later)
        for kind in type(value).__mro__:
            for name, member in vars(kind).items():
                if isinstance(member, types.MemberDescriptorType) and hasattr(value, name):
                    slot = functools.partial(self._slot, f"{label}.{name}", value, name)
                    self._when_named(name, slot)

    def _class(self, label: str, value: type) -> None:
        is_own = value.__module__ == "__main__" or is_own_module(sys.modules.get(value.__module__))
        if not (is_own or issubclass(value, nn.Module)) or value is nn.Module:
            return
        for name, content in list(vars(value).items()):
            function = getattr(content, "fget", None) or getattr(content, "__func__", content)
            if isinstance(function, types.FunctionType):
                later = functools.partial(self._later, f"{label}.{name}", function)
                later() if name in _ALWAYS_RUN else self._when_named(name, later)
            elif is_own and not name.startswith("__"):
                slot = functools.partial(self._slot, f"{label}.{name}", value, name)
                self._when_named(name, slot)
        for base in value.__bases__:
            self._later(base.__name__, base)

    def _python_module(self, label: str, value: types.ModuleType) -> None:
        if is_own_module(value) and not getattr(value, "__file__", "").startswith(_FOREIGN):
            for name in vars(value):
                slot = functools.partial(self._slot, f"{label}.{name}", vars(value), name)
                self._when_named(name, slot)

    def _function(self, label: str, value: types.FunctionType) -> None:
        code, name = value.__code__, value.__name__
        names = set(_names_in(code))
        for new in names - self._names:
            self._names.add(new)
            for action in self._waiting.pop(new, ()):
                action()
        for free, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # not filled yet
                cell.cell_contents  # noqa: B018  # raises
                self._slot(f"{free} of {name}", cell, "cell_contents")
        if not code.co_filename.startswith(_FOREIGN):
            for word in names & (value.__globals__.keys() | _stored(code)):
                self._slot(f"global {word}", value.__globals__, word)
        for held in (value.__defaults__, value.__kwdefaults__, value.__dict__):
            self._later(label, held)

    def _method(self, label: str, value: types.MethodType) -> None:
        self._later(label.removesuffix(f".{value.__name__}"), value.__self__)
        self._later(label, value.__func__)

    def _partial(self, label: str, value: functools.partial[Any]) -> None:
        self._queue += ((label, part) for part in (value.func, value.args, value.keywords))


# By kind, the first that fits.
_KINDS: list[tuple[Any, Callable[..., None]]] = [
    (nn.Module, PythonState._module),
    (Tensor, PythonState._tensor),
    (np.ndarray, PythonState._array),
    (dict, PythonState._dict),
    ((list, deque, set), PythonState._list),
    ((tuple, frozenset), PythonState._frozen),
    (
        (torch.Generator, np.random.Generator, np.random.RandomState, random.Random),
        PythonState._generator,
    ),
    (type(functools.lru_cache(len)), PythonState._cache),
    (types.FunctionType, PythonState._function),
    (types.MethodType, PythonState._method),
    (functools.partial, PythonState._partial),
    (type, PythonState._class),
    (types.ModuleType, PythonState._python_module),
]


def _global_generators() -> Iterator[tuple[str, Any]]:
    yield "random", random.random.__self__  # pyright: ignore[reportFunctionMemberAccess]  # a method
    yield "numpy.random", np.random.get_state.__self__  # pyright: ignore[reportFunctionMemberAccess]  # a method
    yield "torch", torch.default_generator
    if torch.cuda.is_initialized():
        yield from (("torch.cuda", generator) for generator in torch.cuda.default_generators)


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in `code`, strings that may be such among them."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _stored(code: types.CodeType) -> set[str]:
    return {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL"}


def _item(label: str, key: Any) -> str:
    if label.endswith("."):  # attributes
        return f"{label}{key}"
    return f"{label}[{key!r}]" if isinstance(key, int | str) else f"{label}[...]"


def _slot_of(label: str, owner: Any, name: Any) -> _Place:
    if isinstance(owner, dict):
        return _item_place(label, owner, name)
    setter = type.__setattr__ if isinstance(owner, type) else object.__setattr__
    read = functools.partial(getattr, owner, name, _MISSING)
    if isinstance(owner, type):  # not what `getattr` binds
        read = functools.partial(vars(owner).get, name, _MISSING)
    return _Place(label, read, functools.partial(setter, owner, name))


def _item_place(label: str, owner: dict[Any, Any], key: Any) -> _Place:
    def write(value: Any) -> None:
        if value is _MISSING:
            owner.pop(key, None)
        else:
            owner[key] = value

    return _Place(label, functools.partial(owner.get, key, _MISSING), write)


def _refill(live: dict[Any, Any], old: dict[Any, Any]) -> None:
    live.clear()
    live.update(old)


def _is_same(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except Exception:  # tensors, or a number of a trace, which may not be compared
        return False


def _is_same_item(a: dict[Any, Any], b: dict[Any, Any], key: Any) -> bool:
    return key in a and key in b and _is_same(dict.get(a, key), dict.get(b, key))


def _is_nan(value: Any) -> bool:
    return type(value) is float and value != value  # what C functions make of a number of a trace


def _comparable(state: Any) -> Any:
    return bytes(state.numpy()) if isinstance(state, Tensor) else repr(state)
