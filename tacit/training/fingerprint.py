"""What a run's noise is bound to: digests of its data, its program and its machine.

A resumed run repeats the noise of the steps that were lost, which is sound only if the sums are the
same. The sums themselves are not compared, because the comparison would be a release of its own:
with one record edited, the first step whose sum differs is the first one that drew this record, and
"same noise" or "other noise" would show which step that was. Whether the data set as a whole was
edited depends on no draw; it is treated as public. So everything that decides the sums is compared
before the first lot is drawn, and whatever differs gets a new key, for lots and noise alike.

Digests leave the process only under a random secret (`Key.bind`): without it, nobody can test
guesses about a record.
"""

import hashlib
import types
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from tacit.training.distributed import is_sharded
from tacit.training.key import randomness
from tacit.training.program_state import ProgramState
from tacit.training.tree import Batch, LossFn, map_tensors

if TYPE_CHECKING:
    from tacit.training.records import Records

_ROWS = 256  # records of a data set that is not in tensors, read at a time
_BYTES = 1 << 26  # of a tensor, hashed at a time
_SMALL = 10**6  # elements of a tensor or container in the program; larger ones count by shape
_LIBRARIES = ("builtins", "torch", "numpy", "tacit", "typing", "collections", "abc")
_PLACES = ("__doc__", "__module__", "__firstlineno__", "__static_attributes__")
_ATOMS = (type(None), bool, int, float, complex, str, bytes)


def data_digest(records: "Records") -> bytes:
    """Return a hash of every record, in order, as the run fetches it. Private.

    Tensors are hashed as they are stored. Other data sets are read once, record by record, with
    fixed seeds for random augmentation; one that gives other records at every pass never has the
    same digest twice.
    """
    found = hashlib.sha256()
    if records.is_stored:
        for tensor in records.dataset.tensors:
            _add_tensor(found, tensor)
        return found.digest()
    for start in range(0, len(records), _ROWS):
        rows = np.arange(start, min(start + _ROWS, len(records)))
        with randomness(start, torch.device("cpu")):
            _add_value(found, records.fetch_on_host(rows), set())
    return found.digest()


def program_digest(
    model: nn.Module,
    loss_fn: LossFn | None,
    records: "Records",
    others: Iterable[Any] = (),  # Any: functions and objects
) -> bytes:
    """Return a hash of the program: its code, what the code refers to, and one public loss.

    The code is that of `loss_fn`, of the model's classes and of `others`, with closures, defaults
    and the global functions and constants that it names. Attributes of objects are not followed;
    the loss of a fixed batch of made-up records, at the present weights, stands for them.
    """
    found = hashlib.sha256()
    seen: set[int] = set()
    for value in (loss_fn, *others, *dict.fromkeys(type(m) for m in model.modules())):
        _add_value(found, value, seen)
    found.update(repr([(n, type(m).__qualname__) for n, m in model.named_modules()]).encode())
    if loss_fn is not None:
        found.update(_public_loss(model, loss_fn, records))
    return found.digest()


def _public_loss(model: nn.Module, loss_fn: LossFn, records: "Records") -> bytes:
    """Return the bytes of the loss of a made-up record, or the name of the error it raises."""
    if is_sharded(model):  # a forward pass would wait for ranks that take no part
        return b""
    state = ProgramState(model, loss_fn)
    try:
        with randomness(0, records.device), torch.enable_grad():
            batch = _made_up(records.blank())
            return _bytes(loss_fn(model, batch))
    except Exception as error:  # a made-up record need not make sense to the program
        return type(error).__qualname__.encode()
    finally:
        state.restore()


def _made_up(blank: Batch) -> Batch:
    """Return a batch like `blank` with random floats; its integers stay 0, a valid index."""
    return map_tensors(lambda t: torch.randn_like(t) if t.is_floating_point() else t, blank)


def _add_value(found: Any, value: Any, seen: set[int]) -> None:  # Any: a hash; any object
    """Add a value to the hash `found`: code, constants, tensors, and containers of these."""
    found.update(type(value).__qualname__.encode())
    if isinstance(value, _ATOMS):
        found.update(repr(value).encode())
        return
    if id(value) in seen:
        return
    if isinstance(value, Tensor | np.ndarray | np.generic):
        _add_tensor(found, torch.as_tensor(value))
        return
    seen.add(id(value))
    for part in _parts(value):
        _add_value(found, part, seen)


def _parts(value: Any) -> Iterable[Any]:  # Any: as above
    """Return what counts of a value that is neither constant nor tensor."""
    if isinstance(value, types.CodeType):
        return (value.co_code, value.co_names, value.co_consts)
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value)
    if isinstance(value, types.MethodType):
        return (value.__func__, type(value.__self__))
    if isinstance(value, type):
        return _parts_of_class(value)
    if isinstance(value, staticmethod | classmethod):
        return (value.__func__,)
    if isinstance(value, property):
        return (value.fget,)
    if hasattr(value, "func") and hasattr(value, "keywords"):  # functools.partial
        return (value.func, value.args, value.keywords)
    if isinstance(value, frozenset | set):
        return sorted(map(repr, value))
    if isinstance(value, dict) and len(value) <= _SMALL:
        return [part for pair in value.items() for part in pair]
    if isinstance(value, list | tuple) and len(value) <= _SMALL:
        return value
    return (type(value),)  # an object counts by the code of its class


def _parts_of_class(value: type) -> list[Any]:
    if value.__module__.partition(".")[0] in _LIBRARIES:
        return [value.__module__, value.__qualname__]
    held = [content for name, content in vars(value).items() if name not in _PLACES]
    return [value.__qualname__, *value.__bases__, *held]


def _parts_of_function(value: types.FunctionType) -> list[Any]:
    if (value.__module__ or "").partition(".")[0] in _LIBRARIES:
        return [value.__module__, value.__qualname__]
    found: list[Any] = [value.__code__, value.__defaults__, value.__kwdefaults__]
    for cell in value.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    names = [name for name in value.__code__.co_names if name in value.__globals__]
    contents = [value.__globals__[name] for name in names]
    return found + [c for c in contents if not isinstance(c, types.ModuleType)]


def _add_tensor(found: Any, tensor: Tensor) -> None:  # Any: a hash
    found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    flat = tensor.detach().reshape(-1)
    size = max(1, _BYTES // max(1, flat.element_size()))
    for part in flat.split(size):
        found.update(_bytes(part))


def _bytes(tensor: Tensor) -> bytes:
    whole = tensor.detach().cpu().contiguous().flatten()
    return whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b""
