"""Batches as nested tuples, lists and mappings of tensors, with one row for each example.

A batch is whatever the user's collate function makes. The functions here walk it, count and slice
its rows, check that there is one loss for each row, and answer whether fewer rows would have fitted
in memory. Tensors without any axis and values that are not tensors have no rows and are left as
they are.
"""

import copy
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

Batch = Any  # whatever the user's collate function makes: nothing narrower is true of it
LossFn = Callable[[nn.Module, Batch], Tensor]


def map_tensors(change: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Return `batch` with `change` applied to each tensor in its tuples, lists and mappings."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return _like(batch, {name: map_tensors(change, value) for name, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(change, value) for value in batch))
    if isinstance(batch, tuple | list | deque):
        return type(batch)(map_tensors(change, value) for value in batch)
    return batch


def map_rows(change: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Return `batch` with `change` applied to each tensor that has rows."""
    return map_tensors(lambda tensor: change(tensor) if tensor.dim() else tensor, batch)


def take_rows(batch: Batch, start: int, stop: int) -> Batch:
    """Return rows `start` .. `stop` - 1 of a batch."""
    return map_rows(lambda tensor: tensor[start:stop], batch)


def pad_rows(batch: Batch, rows: int) -> Batch:
    """Return `batch` with rows of zeros appended up to `rows`."""

    def pad(tensor: Tensor) -> Tensor:
        missing = rows - tensor.shape[0]
        if missing == 0:
            return tensor
        return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])

    return map_rows(pad, batch)


def with_rows(batch: Batch) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Batch]]:
    """Return the tensors that have rows, and a function that rebuilds the batch from others."""
    if isinstance(batch, tuple) and all(isinstance(t, Tensor) and t.dim() for t in batch):
        return list(batch), tuple  # the common case, without the cost of the general one
    return take_apart(batch, map_rows)


def take_apart(
    batch: Batch, map_over: Callable[..., Batch] = map_tensors
) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Batch]]:
    """Return the tensors of a batch, and a function that rebuilds the batch from others.

    That function does not keep the tensors alive.
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


def check_losses(losses: Tensor, rows: int, *, is_private: bool = True) -> None:
    """Raise unless `losses` holds one loss for each of `rows` rows, which may be private."""
    if not isinstance(losses, Tensor):
        raise TypeError(f"loss_fn must return a tensor, got {type(losses).__name__}.")
    if losses.dim() == 0:
        raise ValueError(
            "there must be one loss per example, shape (examples,), got a single number: a mean or "
            'sum over the batch cannot be clipped. Use reduction="none" in loss_fn.'
        )
    if losses.shape != (rows,):
        wanted = "(examples,)" if is_private else f"({rows},) for {rows} examples"
        got = f"{losses.dim()} axes" if is_private else f"shape {tuple(losses.shape)}"
        raise ValueError(
            f"there must be one loss per example, shape {wanted}, got {got}. Average over every "
            "other axis, such as positions; the first axis of the batch must count the examples."
        )


def require_gradient(losses: Tensor) -> None:
    """Raise unless the losses can be differentiated by the trainable parameters."""
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
    """Return the tensors that a call returned."""
    return (result,) if isinstance(result, Tensor) else tensors_in((result,), {})


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether fewer rows at once would have avoided the error, on a GPU or a CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return "can't allocate memory" in str(error) or "out of memory" in str(error)


def current_device(device: torch.device) -> AbstractContextManager[Any]:  # Any: its value is unused
    """Return a context in which `device` is torch's current one if it is a GPU.

    Kernels and CUDA graphs run on the current device.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _like(batch: Mapping[str, Any], changed: dict[str, Any]) -> Mapping[str, Any]:
    """Return a mapping of the type of `batch` with other values under the same names."""
    if type(batch) is dict:
        return changed
    if isinstance(batch, MutableMapping):
        same = copy.copy(batch)  # keeps what else it holds, such as a default factory
        same.update(changed)
        return same
    return type(batch)(changed)  # type: ignore[call-arg]  # as collections.abc.Mapping subclasses do
