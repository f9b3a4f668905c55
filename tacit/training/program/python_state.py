"""Python values that a program reads or writes: found by following references, compared, put back.

A traced program holds the numbers that Python had when it was traced: attributes, closures,
globals, containers. `PythonState` finds them from `loss_fn` and the model. Comparing them takes
microseconds, so it is done before each lot. What a trace wrote can be put back.

Not seen, so that a change of it is not noticed, and a write of a trace is not put back:

- writes through `.data`, and into numpy arrays of more than 64 KiB;
- environment variables and files;
- clocks, unless two traces at set-up already differ by them;
- globals and caches of installed libraries;
- the places of iterators and generators, again unless two traces differ;
- state in C++, `__slots__`, and attributes that are named only by text which is computed.
"""

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

from tacit.training import torch_internals
from tacit.training.program.tensor_values import is_placeholder
from tacit.training.withheld_errors import LIBRARIES

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_NOT_READ = (torch.optim.Optimizer, torch.utils.data.DataLoader, torch.utils.data.Dataset)
_FOREIGN = (*LIBRARIES, str(Path(__file__).parents[2]))
_ALWAYS_RUN = {"forward", *(f"__{n}__" for n in ("call", "getattr", "getitem", "iter", "len"))}
_LARGE = 2**16  # bytes of an array that are compared: a few microseconds
_MISSING = object()

Kept = list[Any]
"""What stood in each place of a `PythonState`."""


class _ValuePlace(NamedTuple):
    """Somewhere that a value stands: how to read it, and how to put another one there."""

    label: str  # ends with a dot before attributes
    read: Callable[[], Any]  # a copy, of a container
    write: Callable[[Any], object]
    is_object: bool = False  # whether it holds the attributes of an object that is no module


class PythonState:
    """The Python values that `loss_fn` and the model refer to, with the generators of numbers.

    Of objects other than modules only those attributes are followed and compared that code of the
    program names, so that a training loop's own counters beside `loss_fn` are no part of it.

    Attributes
    ----------
    tensors
        Names of the tensors that were found, by their id.

    Examples
    --------
    >>> rate = [0.1]
    >>> def loss_fn(model, batch):
    ...     return model(batch) * rate[0]
    >>> state = PythonState(loss_fn, nn.Linear(1, 1))
    >>> before = state.now()
    >>> rate[0] = 0.2
    >>> state.changed(before)
    ['global rate']
    >>> state.put_back(before)
    >>> rate
    [0.1]
    """

    def __init__(self, loss_fn: Any, model: nn.Module) -> None:  # Any: whatever can be called
        self.tensors: dict[int, str] = {}
        self._live: list[Any] = []  # containers, and dicts of attributes
        self._boxes: list[_ValuePlace] = []  # of these
        self._values: list[_ValuePlace] = []
        self._generators: list[_ValuePlace] = []
        self._caches: list[Any] = []  # functions with a cache
        self._names: set[str] = set()
        self._waiting: defaultdict[str, list[Callable[[], object]]] = defaultdict(list)
        self._seen: dict[int, Any] = {}  # holds the objects, so that their ids stay theirs
        self._queue = deque([("loss_fn", loss_fn), ("model", model), *_global_generators()])
        parameters = dict(model.named_parameters())
        self._values += [
            _ValuePlace(
                "requires_grad of ",
                lambda: {name: p.requires_grad for name, p in parameters.items()},
                lambda old: [p.requires_grad_(old[name]) for name, p in parameters.items()],
            ),
            _ValuePlace(
                "type or hooks of ",
                lambda: {
                    name: (p.dtype, torch_internals.is_hooked(p)) for name, p in parameters.items()
                },
                lambda _: None,
            ),
        ]
        while self._queue:
            self._visit(*self._queue.popleft())
        self._places = [*self._boxes, *self._values, *self._generators]

    def now(self) -> Kept:
        """Return what stands in each place."""
        return [place.read() for place in self._places]

    def is_same(self, kept: Kept) -> bool:
        """Return whether nothing has changed that the program may read. Fast."""
        boxes = len(self._boxes)
        values = kept[boxes : boxes + len(self._values)]
        try:
            return self._live == kept[:boxes] and [p.read() for p in self._values] == values
        except Exception:  # such as two tensors, which `==` compares by elements
            return False

    def changed(self, kept: Kept) -> list[str]:
        """Return the names of values that have changed, of those that the program reads."""
        found = [
            _item(place.label, key)
            for place, key, _, _ in self._differing(kept)
            if not place.is_object or key in self._names
        ]
        return list(dict.fromkeys(found))

    def held(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that were found, with their names."""
        return [(label, self._seen[place]) for place, label in self.tensors.items()]

    def only_appended(self, kept: Kept) -> set[str]:
        """Return the names of lists that still begin with what they held."""
        return {
            place.label
            for place, live, old in zip(self._boxes, self._live, kept, strict=False)
            if isinstance(live, list)
            and len(live) >= len(old)
            and all(a is b for a, b in zip(live, old, strict=False))
        }

    def drawn(self, kept: Kept) -> list[str]:
        """Return the names of the generators of random numbers that have moved."""
        pairs = zip(self._generators, kept[-len(self._generators) :], strict=True)
        return [g.label for g, old in pairs if _comparable(g.read()) != _comparable(old)]

    def put_back(self, kept: Kept) -> None:
        """Put everything back."""
        for place, old in zip(self._places, kept, strict=True):
            if not _is_same(place.read(), old):
                place.write(old)

    def clean(self, kept: Kept) -> None:
        """Put back what now holds a tensor or a number of a trace, and empty caches."""
        for place, key, now, old in list(self._differing(kept)):
            if not self._is_traced(now):
                continue
            if isinstance(before := place.read(), dict):
                others = {k: v for k, v in before.items() if k is not key}
                old = others if old is _MISSING else others | {key: old}
            place.write(old)
        for function in self._caches:
            function.cache_clear()

    def _differing(self, kept: Kept) -> Iterator[tuple[_ValuePlace, Any, Any, Any]]:
        """Yield each place that differs, with its key in a dict, what is there and what was."""
        for place, old in zip([*self._boxes, *self._values], kept, strict=False):
            now = place.read()
            if not isinstance(now, dict) and not _is_same(now, old):
                yield place, None, now, old
            for key in now | old if isinstance(now, dict) and not _is_same(now, old) else ():
                pair = now.get(key, _MISSING), old.get(key, _MISSING)
                if not _is_same(*pair):
                    yield place, key, *pair

    def _is_traced(self, value: Any) -> bool:
        """Return whether a new value holds a tensor without values, or a number of one."""
        pending, seen = [value], set(self._seen)
        while pending:
            value = pending.pop()
            if torch_internals.is_fake(value) or is_placeholder(value):
                return True
            if id(value) not in seen and not isinstance(value, type | types.ModuleType):
                seen.add(id(value))
                is_function = isinstance(value, types.FunctionType)  # which refers to its globals
                pending += gc.get_referents(value.__closure__ if is_function else value)
        return False

    # Finding --------------------------------------------------------------------------------------

    def _visit(self, label: str, value: Any) -> None:
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        visit = next((v for kind, v in _KINDS if isinstance(value, kind)), PythonState._object)
        visit(self, label, value)

    def _later(self, label: str, value: Any) -> None:
        self._queue.append((label, value))

    def _when_named(self, name: Any, action: Callable[..., object], *args: Any) -> None:
        """Run `action` if code of the program names `name`: now, or when such code is found."""
        if name in self._names:
            action(*args)
        else:
            self._waiting[name].append(functools.partial(action, *args))

    def _box(self, label: str, live: Any, *, is_object: bool = False) -> None:
        """Compare a container, or the attributes of an object."""
        kind = next(kind for kind in (dict, list, set, deque) if isinstance(live, kind))
        fill = getattr(live, "extend" if kind in (list, deque) else "update")

        def write(old: Any) -> None:
            live.clear()
            fill(old)

        self._live.append(live)
        self._boxes.append(_ValuePlace(label, functools.partial(kind, live), write, is_object))

    def _slot(self, label: str, names: Any, name: str, write: Callable[..., object]) -> None:
        """Compare a global or an attribute of a class, and follow what stands there."""
        read = functools.partial(names.get, name, _MISSING)
        self._values.append(_ValuePlace(label, read, functools.partial(write, name)))
        self._later(label, read())

    def _dict(self, label: str, value: dict[Any, Any]) -> None:
        self._box(label, value)
        for key, content in dict.items(value):  # `value[key]` may compute something else
            self._later(_item(label, key), content)

    def _list(self, label: str, value: Any) -> None:
        self._box(label, value)
        self._tuple(label, value)

    def _tuple(self, label: str, value: Iterable[Any]) -> None:
        self._queue += ((label, content) for content in value)

    def _array(self, label: str, value: np.ndarray[Any, Any]) -> None:
        def write(old: bytes) -> None:
            value[...] = np.frombuffer(old, value.dtype).reshape(value.shape)

        if value.nbytes <= _LARGE and value.flags.writeable and not value.dtype.hasobject:
            self._values.append(_ValuePlace(label, value.tobytes, write))

    def _generator(self, label: str, value: Any) -> None:
        if isinstance(value, np.random.Generator):
            bits = value.bit_generator
            place = _ValuePlace(
                label, lambda: bits.state, functools.partial(setattr, bits, "state")
            )
        elif isinstance(value, random.Random):
            place = _ValuePlace(label, value.getstate, value.setstate)
        else:
            place = _ValuePlace(label, value.get_state, value.set_state)
        self._generators.append(place)

    def _cache(self, label: str, value: Any) -> None:
        self._caches.append(value)
        self._later(label, value.__wrapped__)

    def _module(self, label: str, value: nn.Module) -> None:
        self._box(f"{label}.", vars(value))
        for name, content in vars(value).items():
            own = "" if name in ("_parameters", "_buffers", "_modules") else name
            self._later(f"{label}.{own}", content)
        self._later(label, type(value))

    def _object(self, label: str, value: Any) -> None:
        held = getattr(value, "__dict__", None)
        if isinstance(value, _NOT_READ) or not isinstance(held, dict):
            return
        self._box(f"{label}.", held, is_object=True)
        for name, content in held.items():
            self._when_named(name, self._later, f"{label}.{name}", content)
        self._later(label, type(value))

    def _class(self, _: str, value: type) -> None:
        label, module = value.__name__, sys.modules.get(value.__module__)
        is_own = value.__module__ == "__main__" or _is_own_module(module)
        if not (is_own or issubclass(value, nn.Module)) or value is nn.Module:
            return
        write = functools.partial(type.__setattr__, value)
        for name, content in list(vars(value).items()):
            function = getattr(content, "fget", None) or getattr(content, "__func__", content)
            if isinstance(function, types.FunctionType):
                self._names |= {name} & _ALWAYS_RUN
                self._when_named(name, self._later, f"{label}.{name}", function)
            elif is_own and not name.startswith("__"):
                held = vars(value)
                self._when_named(name, self._slot, f"{label}.{name}", held, name, write)
        self._tuple(label, value.__bases__)

    def _python_module(self, label: str, value: types.ModuleType) -> None:
        held = vars(value)
        for name in held if _is_own_module(value) else ():
            write = held.__setitem__
            self._when_named(name, self._slot, f"{label}.{name}", held, name, write)

    def _function(self, label: str, value: types.FunctionType) -> None:
        code, held = value.__code__, value.__globals__
        names = set(_names_in(code))
        for action in [a for new in names - self._names for a in self._waiting.pop(new, ())]:
            action()
        self._names |= names
        for free, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # not filled yet
                self._cell(f"{free} of {value.__name__}", cell, cell.cell_contents)
        if not code.co_filename.startswith(_FOREIGN):
            for name in names & held.keys():
                self._slot(f"global {name}", held, name, held.__setitem__)
            self._later(label, vars(value))
        self._tuple(label, (value.__defaults__, value.__kwdefaults__))

    def _cell(self, label: str, cell: types.CellType, content: Any) -> None:
        read = functools.partial(getattr, cell, "cell_contents")
        write = functools.partial(setattr, cell, "cell_contents")
        self._values.append(_ValuePlace(label, read, write))
        self._later(label, content)


# By kind, the first that fits.
_KINDS: list[tuple[Any, Callable[..., None]]] = [
    (nn.Module, PythonState._module),
    (Tensor, lambda s, name, v: s.tensors.update({id(v): name})),
    (np.ndarray, PythonState._array),
    (dict, PythonState._dict),
    ((list, deque, set), PythonState._list),
    ((tuple, frozenset), PythonState._tuple),
    (random.SystemRandom, lambda *_: None),
    (_GENERATORS, PythonState._generator),
    (type(functools.lru_cache(len)), PythonState._cache),
    (types.FunctionType, PythonState._function),
    (types.MethodType, lambda s, name, v: s._tuple(name, (v.__self__, v.__func__))),
    (functools.partial, lambda s, name, v: s._tuple(name, (v.func, v.args, v.keywords))),
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
    """Yield the names of globals and attributes in `code`, and strings that may be such."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _item(label: str, key: Any) -> str:
    if key is None:  # no dict
        return label
    if label.endswith((".", " ")):
        return f"{label}{key}"
    return f"{label}[{key!r}]" if isinstance(key, int | str) else f"{label}[...]"


def _is_same(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except Exception:  # tensors, or a number of a trace, which may not be compared
        return False


def _comparable(state: Any) -> Any:
    return bytes(state.numpy()) if isinstance(state, Tensor) else repr(state)


def _is_own_module(value: Any) -> bool:
    """Return whether `value` is a module that neither Python nor an installed package brought."""
    file = getattr(value, "__file__", None) if isinstance(value, types.ModuleType) else None
    return file is not None and not file.startswith(_FOREIGN)
