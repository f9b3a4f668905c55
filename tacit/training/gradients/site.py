"""Where a tensor holds the examples, and what a layer rule is told about one call."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tacit.errors import IncompatibleModel


class Unsupported(IncompatibleModel):
    """One engine cannot take this model; another may. Carries no private value."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"This engine cannot take the model: {reason}. engine='auto' finds one that can."
        )
        self.reason = reason


class Declined(Exception):
    """A layer rule leaves this call to the generic one."""


class Piece(Protocol):
    """One call's share of the per-example gradients of one tensor, not necessarily formed."""

    @property
    def dtype(self) -> torch.dtype:
        """What the operands of the weighted sum are rounded to."""
        ...

    def dense(self) -> Tensor:
        """The per-example gradients, shape (examples, *shape of the tensor)."""
        ...

    def settle(self) -> "tuple[Tensor, Piece]":
        """Squared norm of each example's gradient, at least float32, and what to weigh later."""
        ...

    def weighted_sum(self, factors: Tensor, keep: Tensor | None) -> Tensor:
        """Sum over examples of factor times gradient, at least float32.

        Examples where `keep` is False add exactly zero, whatever they hold; None keeps all.
        """
        ...


class Layout(NamedTuple):
    """Axis `dim` holds the examples, `inner` entries for each row of the batch.

    `outermost`: the rows vary slowest along the axis, as after `x.flatten(0, 1)` of (rows, inner).
    """

    dim: int
    inner: int = 1
    outermost: bool = True

    def split(self, tensor: Tensor, examples: int) -> Tensor:
        """The examples first; the axis keeps the entries of one example."""
        if self.outermost:
            return tensor.unflatten(self.dim, (examples, -1)).movedim(self.dim, 0)
        apart = tensor.unflatten(self.dim, (self.inner, examples, -1))
        return apart.movedim(self.dim + 1, 0).flatten(self.dim + 1, self.dim + 2)

    def join(self, tensor: Tensor) -> Tensor:
        """Inverse of `split`."""
        if self.outermost:
            return tensor.movedim(0, self.dim).flatten(self.dim, self.dim + 1)
        apart = tensor.unflatten(self.dim + 1, (self.inner, -1))
        return apart.movedim(0, self.dim + 1).flatten(self.dim, self.dim + 2)

    def sequences(self, tensor: Tensor, examples: int) -> Tensor:
        """(examples, positions, features): every axis but the last becomes positions."""
        if self.dim == 0 and self.outermost:
            return tensor.reshape(examples, -1, tensor.shape[-1])
        return self.split(tensor, examples).reshape(examples, -1, tensor.shape[-1])


@dataclass(slots=True)
class Site:
    """One call of an operation where tensors that all examples share meet the examples.

    Attributes
    ----------
    examples
        Number of examples, each with the same number of rows.
    tensors, layouts
        The call's tensor arguments; where each holds the examples, None where it holds none.
    output
        Layout of the (first) result.
    is_shared
        Whether per-example gradients of this argument are wanted.
    record
        `record(tensor, piece)` hands over a piece for a shared tensor. Called in the backward.
    anchor
        A scalar that requires grad. A rule's autograd function takes it as an input, so that its
        backward runs although the shared tensors are hidden from autograd.
    """

    examples: int
    tensors: tuple[Tensor, ...]
    layouts: tuple[Layout | None, ...]
    output: Layout
    is_shared: Callable[[Tensor | None], bool]
    record: Callable[[Tensor, Piece], None]
    anchor: Tensor

    def layout(self, tensor: Tensor) -> Layout | None:
        """Where an argument holds the examples."""
        for known, layout in zip(self.tensors, self.layouts, strict=True):
            if known is tensor:
                return layout
        return None

    def require(self, batched: Tensor, *others: Tensor | None) -> Layout:
        """Layout of `batched`; declines unless it is the only argument that holds examples."""
        layout = self.layout(batched)
        if layout is None or any(t is not None and self.layout(t) is not None for t in others):
            raise Declined
        return layout


def outside_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """For a rule that has cast its tensors itself."""
    if torch.is_autocast_enabled(tensor.device.type):
        return torch.autocast(tensor.device.type, enabled=False)
    return nullcontext()


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype a matrix product of this tensor is computed in."""
    kind = tensor.device.type
    if tensor.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a rule's backward, which hides how its result depends on the shared tensors.

    A loss that differentiates the model and then the result once more (`create_graph=True`) would
    silently lose that part of its gradient.
    """

    @wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise Unsupported("the loss differentiates the model itself")
        return backward(ctx, *grads)

    return checked
