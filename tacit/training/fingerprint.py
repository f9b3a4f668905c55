"""What a run's noise is bound to: digests of its data, its program and its machine.

A resumed run repeats the noise of the steps that were lost, which is sound only if the sums are the
same. The sums are compared too (`released_sums`), but only after everything that decides them: with
one record edited, the first step whose sum differs is the first one that drew this record, and the
comparison would show which step that was. Whether the data set as a whole was edited depends on no
draw; it is treated as public. So data, program and machine are compared before the first lot is
drawn, and whatever differs gets a new key, for lots and noise alike.

Digests leave the process only under a random secret (`Key.bind`): without it, nobody can test
guesses about a record.

The records are read at every checkpoint, all of them, since nothing else shows that one was edited
in place. So their hash has to be fast. It is an authenticator under a secret of the run
(`Key.tag`): a polynomial in a random point, seven times as fast as SHA-256. Nobody finds two data
sets of the same digest who does not know the secret, which is as secret as the key of the noise:
for any two, the probability is below 2^-66 up to a tebibyte. The same secret serves every
checkpoint of a run, because the digests themselves stay in the process.
"""

import copyreg
import hashlib
import inspect
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tacit.training.distributed import is_sharded
from tacit.training.key import Key, randomness
from tacit.training.program_state import GENERATORS, ProgramState, is_own_module, names_in
from tacit.training.tree import Batch, LossFn, map_tensors

if TYPE_CHECKING:
    from tacit.training.records import Records

_ROWS = 256  # records of a data set that is not in tensors, read at a time
_BYTES = 1 << 26  # of a tensor, hashed at a time
_LIBRARIES = ("builtins", "torch", "numpy", "tacit", "typing", "collections", "abc")
_PLACES = ("__doc__", "__module__", "__firstlineno__", "__static_attributes__")
_ATOMS = (type(None), bool, int, float, complex, str, bytes)


def data_digest(records: "Records", salt: Key) -> bytes:
    """Return a hash of every record, in order, as the run fetches it. Private.

    Tensors are hashed as they are stored, under `salt`. Other data sets are read once, record by
    record, with fixed seeds for random augmentation; one that gives other records at every pass
    never has the same digest twice.
    """
    if records.is_stored:
        parts = (part for tensor in records.dataset.tensors for part in _parts_of_tensor(tensor))
        return bytes.fromhex(salt.tag("data set", 0, parts))
    whole = hashlib.sha256()
    for start in range(0, len(records), _ROWS):
        rows = np.arange(start, min(start + _ROWS, len(records)))
        with randomness(start, torch.device("cpu")):
            batch = records.fetch_on_host(rows)
        part = _ProgramHash(every_attribute=True)
        part.add(batch)
        whole.update(part.digest())
    return whole.digest()


def program_digest(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn | None,
    records: "Records",
    others: Iterable[Any] = (),  # Any: functions and objects
) -> bytes:
    """Return a hash of the program: its code, what the code refers to, and one public loss.

    The code is that of `loss_fn`, the model, the optimizer with its hooks, `collate_fn` and
    `others`, with closures, defaults and the functions and constants that it names, in the user's
    own modules too. Attributes of objects count if the code names them, such as the class weights
    of a criterion. Constants of any type count by what pickling would keep of them. Of an object
    that cannot be pickled, such as a lock, only the type counts; what it does to the sums is
    compared step by step (`released_sums`). Of the data set, whose records have a hash of their
    own, only code and plain attributes count. The states of the program's own random generators
    are part of the hash: they decide the steps that follow.
    """
    found = _ProgramHash()
    for value in (loss_fn, model, *others):
        found.add(value)
    found.add(_parts_of_optimizer(optimizer, model))
    for value in records.program:
        found.add(_plain_attributes(value) if value is records.dataset else value)
    found.add([type(records.dataset), type(model)])
    found.add([(name, p.requires_grad) for name, p in model.named_parameters()])
    found.add(ProgramState(model, loss_fn, *others, *records.program).generators())
    if loss_fn is not None:
        found.add(_public_loss(model, loss_fn, records))
    return found.digest()


def _plain_attributes(value: Any) -> dict[str, Any]:  # Any: a data set
    held = getattr(value, "__dict__", {})
    return {name: held[name] for name in sorted(held) if isinstance(held[name], _ATOMS)}


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


class _ProgramHash:
    """A hash of values: code, constants, tensors, containers of these, and objects.

    An object counts by the code of its class and by those attributes that the code reached so far
    names, or by `every_attribute`. `digest` follows the attributes, whose code may name others.
    """

    def __init__(self, *, every_attribute: bool = False) -> None:
        self._every_attribute = every_attribute
        self._hash = hashlib.sha256()
        self._numbers: dict[int, int] = {}  # the order in which objects were met, by their id
        self._held: list[Any] = []  # keeps them alive, so that their ids stay theirs
        self._objects: list[Any] = []
        self._names: set[str] = set()

    def add(self, value: Any) -> None:  # Any: any object
        """Add a value; one that was added before counts by its number."""
        self._hash.update(type(value).__qualname__.encode())
        if isinstance(value, _ATOMS):
            self._hash.update(repr(value).encode() + b";")
        elif isinstance(value, Tensor | np.ndarray | np.generic) and not _is_text(value):
            for part in _parts_of_tensor(torch.as_tensor(value)):
                self._hash.update(part)
        elif id(value) in self._numbers:
            self._hash.update(b"#%d;" % self._numbers[id(value)])
        else:
            self._numbers[id(value)] = len(self._numbers)
            self._held.append(value)
            parts = self._parts(value)
            self._hash.update(b"(%d;" % len(parts))
            for part in parts:
                self.add(part)

    def digest(self) -> bytes:
        """Return the hash, after adding the attributes that the code names."""
        followed: set[tuple[int, str]] = set()
        is_done = False
        while not is_done:
            is_done = True
            for value in list(self._objects):
                held = getattr(value, "__dict__", {})
                names = {*self._names, *held} if self._every_attribute else self._names
                for name, content in _attributes(value, names):
                    if (id(value), name) not in followed:
                        followed.add((id(value), name))
                        is_done = False
                        self.add([self._numbers[id(value)], name])
                        self._follow(content)
        return self._hash.digest()

    def _follow(self, content: Any) -> None:
        """Add an attribute. Of a method only the names count: its code is part of its class."""
        if isinstance(content, types.FunctionType):
            self._names.update(names_in(content.__code__))
        else:
            self.add(content)

    def _parts(self, value: Any) -> Sequence[Any]:
        """Return what counts of a value that is neither constant nor tensor."""
        if isinstance(value, types.CodeType):
            return (value.co_code, value.co_names, value.co_consts)
        if isinstance(value, types.FunctionType):
            self._names.update(names_in(value.__code__))
            return _parts_of_function(value)
        if isinstance(value, types.MethodType):
            return (value.__func__, value.__self__)
        if isinstance(value, type):
            return _parts_of_class(value)
        if isinstance(value, staticmethod | classmethod):
            return (value.__func__,)
        if isinstance(value, property):
            return (value.fget,)
        if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            owner = None if isinstance(value.__self__, GENERATORS) else value.__self__
            return (value.__qualname__, owner)
        if isinstance(value, frozenset | set):
            ordered = sorted(value, key=without_addresses)
            return [*ordered, *self._parts_of_subclass(value, set, frozenset)]
        if isinstance(value, Mapping):
            pairs = [part for pair in _stored_items(value) for part in pair]
            return pairs + self._parts_of_subclass(value, dict, OrderedDict)
        if isinstance(value, list | tuple):
            return [*value, *self._parts_of_subclass(value, list, tuple)]
        if isinstance(value, np.ndarray | np.generic):  # of text or of objects
            return (value.dtype.str, value.tolist())
        if isinstance(value, torch.jit.ScriptFunction):
            return (value.code,)
        if hasattr(value, "func") and hasattr(value, "keywords"):  # functools.partial
            return (value.func, value.args, value.keywords)
        if hasattr(value, "__wrapped__"):  # functools.lru_cache and the like
            return (value.__wrapped__,)
        if not hasattr(value, "__dict__") and not isinstance(value, GENERATORS):
            return [*_pickled(value), *self._parts_of_object(value)]
        if _is_made_anew(value):
            return [type(value).__module__, type(value).__qualname__, _pickled(value)[1]]
        return self._parts_of_object(value)

    def _parts_of_subclass(self, value: Any, *kinds: type) -> list[Any]:
        """Return what a container holds beside its items, if it is of a kind of its own."""
        if type(value) in kinds:
            return []
        return [getattr(value, "default_factory", None), *self._parts_of_object(value)]

    def _parts_of_object(self, value: Any) -> Sequence[Any]:
        if isinstance(value, types.ModuleType):
            return (value.__name__,)
        self._objects.append(value)
        for entry in (type(value).__call__, getattr(type(value), "forward", None)):
            if isinstance(entry, types.FunctionType):
                self._names.update(names_in(entry.__code__))
        if isinstance(value, nn.Module):  # containers name none of their layers
            own = (value.named_parameters(recurse=False), value.named_buffers(recurse=False))
            return (type(value), value.training, dict(value.named_children()), *map(dict, own))
        return (type(value),)


def _stored_items(value: Mapping[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """Return the items that a mapping holds.

    A dictionary with an `items` of its own may compute them, as transformers does to import all of
    its models. Then what it stores counts, and the code that computes the rest.
    """
    if isinstance(value, OrderedDict):
        return OrderedDict.items(value)
    return dict.items(value) if isinstance(value, dict) else value.items()


def _attributes(value: Any, names: set[str]) -> list[tuple[str, Any]]:
    """Return the attributes of an object, and of its class, that are among `names`."""
    held = getattr(value, "__dict__", {})
    found = []
    for name in sorted(names):
        if name in held:
            found.append((name, held[name]))
        elif inspect.ismemberdescriptor(content := getattr(type(value), name, None)):  # a slot
            found.append((name, getattr(value, name, None)))
        elif isinstance(content, types.FunctionType):
            found.append((name, content))
        elif isinstance(content, property) and isinstance(content.fget, types.FunctionType):
            found.append((name, content.fget))
    return found


def without_addresses(value: Any) -> str:  # Any: any object
    """Return the text of a value without addresses in memory, which differ by process."""
    return re.sub(r"\b0x[0-9a-fA-F]+", "", repr(value))


def _is_made_anew(value: Any) -> bool:
    """Return whether an object of a library is pickled as a call that makes it, such as a logger.

    Its attributes, such as a logger's cache, are then not what it consists of.
    """
    kind = type(value)
    if kind.__reduce__ is object.__reduce__ or is_own_module(sys.modules.get(kind.__module__)):
        return False
    return kind.__module__ != "__main__" and len(_pickled(value)) == 2


def _pickled(value: Any) -> list[Any]:
    """Return what pickling keeps of a value without attributes: a slice, an array, a decimal."""
    if isinstance(value, memoryview):
        return [value.format, value.shape, value.tobytes()]
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        found = value.__reduce_ex__(4) if reduce is None else reduce(value)
    except Exception:  # any error of any type's own code: it cannot be pickled
        return []
    if isinstance(found, str):
        return [found]
    made, arguments, *more = found
    return [made, arguments, *(list(m) if isinstance(m, Iterator) else m for m in more)]


def _parts_of_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Any]:
    """Return class, hooks and attributes of an optimizer, and the parameters of each group.

    Its state and the settings of its groups are no part of the program, unless they are functions:
    `checkpoint` compares them.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    places = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    hooks = [list(getattr(optimizer, place, {}).values()) for place in places]
    own = {
        name: content
        for name, content in sorted(vars(optimizer).items())
        if not name.startswith("_") and name not in ("state", "param_groups", "defaults", "step")
    }
    groups = [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
    options = [value for group in optimizer.param_groups for value in group.values()]
    return [type(optimizer), hooks, own, groups, [value for value in options if callable(value)]]


def _is_text(value: Any) -> bool:
    """Return whether an array holds other things than numbers, which torch cannot hold."""
    return isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "biufc"


def _library(module: str) -> str | None:
    """Return the version of the installed package that a module is part of; None for own code.

    The code of a package does not change while its version stays. To follow it instead would lead
    through all of a large one, such as transformers.
    """
    top = module.partition(".")[0]
    if top in _LIBRARIES:
        return ""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or is_own_module(sys.modules[module]):
        return None
    return str(getattr(sys.modules.get(top), "__version__", ""))


def _parts_of_class(value: type) -> list[Any]:
    if (library := _library(value.__module__)) is not None:
        return [library, value.__module__, value.__qualname__]
    held = [content for name, content in vars(value).items() if name not in _PLACES]
    return [value.__qualname__, *value.__bases__, *held]


def _parts_of_function(value: types.FunctionType) -> list[Any]:
    if (library := _library(value.__module__ or "")) is not None:
        return [library, value.__module__, value.__qualname__]
    found: list[Any] = [value.__code__, value.__defaults__, value.__kwdefaults__]
    for cell in value.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    names = sorted(set(names_in(value.__code__)))
    contents = [value.__globals__[name] for name in names if name in value.__globals__]
    for module in filter(is_own_module, [*found, *contents]):
        contents += [vars(module)[name] for name in names if name in vars(module)]
    return found + [c for c in contents if not isinstance(c, types.ModuleType)]


def _parts_of_tensor(tensor: Tensor) -> Iterator[Any]:  # Any: bytes
    """Yield what counts of a tensor: type and shape, which tell where it ends, and the numbers."""
    yield f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    if isinstance(tensor, DTensor):
        return  # its shards are on other ranks; every step's noise depends on them all
    if tensor.layout == torch.strided and _is_freed(tensor):
        yield b"no numbers"
        return
    flat = tensor.detach().reshape(-1)
    size = max(1, _BYTES // max(1, flat.element_size()))
    try:
        for part in flat.split(size):
            yield content_of(part)  # without a copy: large data are hashed at every save
    except NotImplementedError:  # kept from inside a transform of torch.func that has ended
        yield b"no numbers"


def _is_freed(tensor: Tensor) -> bool:
    """Return True if the memory of a tensor is given back, as FSDP does between uses of a weight.

    torch 2.11 refuses any view of such a tensor.
    """
    try:
        return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
    except NotImplementedError:  # a tensor without memory of its own
        return False


def _bytes(tensor: Tensor) -> bytes:
    whole = tensor.detach().cpu().contiguous().flatten()
    return whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b""


def state_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of weights, buffers and optimizer state; of a sharded model, of this shard."""
    found = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found.update(name.encode() + bytes_of(tensor))
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        states = [optimizer.state.get(p, {}) for p in group["params"]]
        for values in (options, *states):
            for name in sorted(values):
                found.update(name.encode() + bytes_of(values[name]))
    return found.hexdigest()


def bytes_of(value: Any) -> bytes:  # Any: options and state of any optimizer
    """Return the bytes of a tensor or of a setting."""
    if isinstance(value, Tensor) and value.dim():
        return content_of(value).tobytes()
    if isinstance(value, Tensor):
        value = value.item()
    return without_addresses(list(value) if isinstance(value, tuple) else value).encode()


def content_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a tensor or of this rank's shard, without a copy where possible."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().cpu().to_dense().contiguous().flatten().view(torch.uint8).numpy()
