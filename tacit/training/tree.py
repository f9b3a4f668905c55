"""Batches as nested tuples, lists and mappings of tensors, with one row for each example.

A batch is whatever the user's collate function makes. The functions here walk it, count and slice
its rows, check that there is one loss for each row, and answer whether fewer rows would have fitted
in memory. Tensors without any axis and values that are not tensors have no rows and are left as
they are.
"""

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import IncompatibleModel

Batch = Any  # whatever the user's collate function makes: nothing narrower is true of it
LossFn = Callable[[nn.Module, Batch], Tensor]
CALLED_AS = (
    "loss_fn is called as loss_fn(model, batch), where batch is what the data set and collate_fn "
    "give, and returns one loss per example; a module such as CrossEntropyLoss() takes other "
    "arguments."
)


def map_tensors(change: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Return `batch` with `change` applied to each tensor in it, however it is nested."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return _like(batch, {name: map_tensors(change, value) for name, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(change, value) for value in batch))
    if isinstance(batch, tuple | list | deque):
        return type(batch)(map_tensors(change, value) for value in batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        held = {f.name: getattr(batch, f.name) for f in fields(batch) if f.init}
        return replace(batch, **{name: map_tensors(change, v) for name, v in held.items()})
    return batch


def map_rows(change: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Return `batch` with `change` applied to each tensor that has at least one axis (rows)."""
    return map_tensors(lambda tensor: change(tensor) if tensor.dim() else tensor, batch)


def take_rows(batch: Batch, start: int, stop: int) -> Batch:
    """Return rows `start` to `stop` - 1 of every tensor in a batch."""
    return map_rows(lambda tensor: tensor[start:stop], batch)


def pad_rows(batch: Batch, rows: int) -> Batch:
    """Return `batch` with rows of zeros appended, so that it has `rows` rows."""

    def pad(tensor: Tensor) -> Tensor:
        missing = rows - tensor.shape[0]
        if missing == 0:
            return tensor
        return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])

    return map_rows(pad, batch)


def with_rows(batch: Batch) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Batch]]:
    """Return the tensors that have rows, and a function to rebuild the batch from new ones."""
    if isinstance(batch, tuple) and all(isinstance(t, Tensor) and t.dim() for t in batch):
        return list(batch), tuple  # the common case, without the cost of the general one
    return take_apart(batch, map_rows)


def take_apart(
    batch: Batch, map_over: Callable[..., Batch] = map_tensors
) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Batch]]:
    """Return the tensors of a batch, and a function to rebuild the batch from new tensors.

    The function holds no reference to the old tensors, so their memory can be freed.
    """
    found: list[Tensor] = []
    placeholder = torch.empty(0)

    def take(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return placeholder

    template = map_over(take, batch)

    def rebuild(tensors: Sequence[Tensor]) -> Batch:
        others = iter(tensors)
        return map_over(lambda _: next(others), template)

    return found, rebuild


def n_rows(batch: Batch) -> int:
    """Return the number of rows (examples) of a collated batch. Private when the batch is."""
    tensors, _ = with_rows(batch)
    if not tensors:
        raise TypeError(
            "a batch must hold at least one tensor whose first axis counts the examples, got "
            "none. Give collate_fn= if records are not tensors."
        )
    return tensors[0].shape[0]


def form_of(batch: Batch, place: str = "batch") -> Any:  # Any: nested tuples, to be compared
    """Return the form of a batch, in which no value is: its containers, names and tensors.

    Raises `IncompatibleModel` if it holds anything else, whose value would become a constant of a
    traced program: everything that a record tells the program must be a row of a tensor.
    """
    if batch is None or (isinstance(batch, Tensor) and batch.dim()):
        return None if batch is None else Tensor
    parts: list[tuple[Any, str, Any]]  # name, place, value
    if isinstance(batch, Mapping):
        parts = [(name, f"{place}[{_shown(name)}]", value) for name, value in batch.items()]
    elif isinstance(batch, tuple | list | deque):
        parts = [(i, f"{place}[{i}]", value) for i, value in enumerate(batch)]
    elif is_dataclass(batch) and not isinstance(batch, type):
        names = (f.name for f in fields(batch) if f.init)
        parts = [(name, f"{place}.{name}", getattr(batch, name)) for name in names]
    else:
        kind = name_of_kind(type(batch))
        what = "a tensor without an axis" if isinstance(batch, Tensor) else f"of type {kind}"
        raise IncompatibleModel(
            f"a batch must hold tensors with one row for each record and nothing else, but {place} "
            f"is {what}. Drop it in collate_fn or the data set, make it a tensor if records differ "
            "in it, or let loss_fn take a constant from outside of the batch."
        )
    return type(batch), *((name, form_of(value, inner)) for name, inner, value in parts)


def _shown(name: object) -> str:
    """Return the name of an entry as text, without running the code of its type."""
    return repr(name) if type(name) in (str, int) else name_of_kind(type(name))


def check_losses(losses: Tensor, rows: int) -> None:
    """Raise unless `losses` has one loss per row; errors state no size, which is private."""
    if not isinstance(losses, Tensor):
        raise TypeError(f"loss_fn must return a tensor, got {name_of_kind(type(losses))}.")
    if losses.dim() == 0:
        raise ValueError(
            "there must be one loss per example, shape (examples,), got a single number: a mean or "
            'sum over the batch cannot be clipped. Use reduction="none" in loss_fn.'
        )
    if losses.shape != (rows,):
        got = "another number of losses" if losses.dim() == 1 else "several axes"
        raise ValueError(
            f"there must be one loss per example, shape (examples,), got {got}. Average over every "
            "other axis, such as positions; the first axis of the batch must count the examples."
        )


def require_gradient(losses: Tensor) -> None:
    """Raise unless autograd can differentiate the losses, that is, they require a gradient."""
    if not losses.requires_grad:
        raise ValueError("the losses must depend on the trainable parameters of the model.")


def tensors_in(args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return the tensor arguments of a call in order, including those in lists and tuples."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, Tensor))
    return tuple(found)


def results_in(result: Any) -> tuple[Tensor, ...]:
    """Return the tensors in the result of a call, including those in lists and tuples."""
    return (result,) if isinstance(result, Tensor) else tensors_in((result,), {})


def name_of_kind(kind: type) -> str:
    """Return the name of the first base class of `kind` that its module holds under this name.

    A class that is made while the program runs may have a private value in its name.
    """
    for base in kind.__mro__:
        name = type.__dict__["__name__"].__get__(base)
        if getattr(sys.modules.get(str(base.__module__)), name, None) is base:
            return name
    return "object"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that a GPU's or the CPU's memory was exhausted."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return "can't allocate memory" in str(error) or "out of memory" in str(error)


def current_device(device: torch.device) -> AbstractContextManager[Any]:  # Any: its value is unused
    """Return a context in which `device`, if it is a GPU, is torch's current device.

    Kernels and CUDA graphs run on the current device.
    """
    if device.type != "cuda":
        return nullcontext()
    if torch.cuda.is_initialized() and device.index == torch.cuda.current_device():
        return nullcontext()  # in less time, which a small step notices
    return torch.cuda.device(device)


def _like(batch: Mapping[str, Any], changed: dict[str, Any]) -> Mapping[str, Any]:
    """Return a mapping of the same type as `batch`, with the values in `changed`."""
    if type(batch) is dict:
        return changed
    if isinstance(batch, defaultdict):
        return type(batch)(batch.default_factory, changed)
    # Not a copy: whatever else the object holds would reach the program.
    return type(batch)(changed)  # type: ignore[call-arg]  # as subclasses of Mapping do
