"""One call of a torch operation on a shared tensor, as a layer rule sees it.

A tensor is *shared* if all examples of the batch use it: a parameter, or a tensor computed from
parameters. `Layout` gives the axis of a tensor that holds the examples.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from tacit.errors import IncompatibleModel
from tacit.training.tree import is_out_of_memory

if TYPE_CHECKING:
    from tacit.training.gradients.factored import FactoredGradient, Together


UNSEEN = "a weight is computed from parameters in a way that torch does not show"


class Unsupported(IncompatibleModel):
    """Raised if a program cannot be mapped over examples. Quotes no private value."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"The program of one example cannot be mapped: {reason}.")
        self.reason = reason


def refuse(error: BaseException, reason: str) -> NoReturn:
    """Raise `Unsupported`, but `error` itself if memory was exhausted: fewer rows may fit."""
    if is_out_of_memory(error):
        raise error
    raise Unsupported(reason) from error


class Stale(Exception):
    """Raised when a cached trace of the model's calls does not fit the calls of this batch.

    `rows` are the examples, by number, with which to trace the calls again; None for any.
    """

    def __init__(self, rows: Tensor | None = None) -> None:
        super().__init__()
        self.rows = rows


class Declined(Exception):
    """Raised by a layer rule that does not cover a call; the generic rule then handles it."""


class Layout(NamedTuple):
    """Position of the examples in a tensor: axis `dim`, with `inner` entries per row of the batch.

    `outermost` is True if all entries of a row are adjacent on that axis, as after `x.flatten(0,
    1)` of a tensor of shape (rows, inner).
    """

    dim: int
    inner: int = 1
    outermost: bool = True

    def split(self, tensor: Tensor, examples: int) -> Tensor:
        """Return the tensor with a new first axis for the examples.

        In the tensor of each example, axis `dim` holds the entries of that example only.
        """
        if self.outermost:
            return tensor.unflatten(self.dim, (examples, -1)).movedim(self.dim, 0)
        apart = tensor.unflatten(self.dim, (self.inner, examples, -1))
        return apart.movedim(self.dim + 1, 0).flatten(self.dim + 1, self.dim + 2)

    def join(self, tensor: Tensor) -> Tensor:
        """Undo `split`: merge the first axis, that of the examples, into axis `dim`."""
        if self.outermost:
            return tensor.movedim(0, self.dim).flatten(self.dim, self.dim + 1)
        apart = tensor.unflatten(self.dim + 1, (self.inner, -1))
        return apart.movedim(0, self.dim + 1).flatten(self.dim, self.dim + 2)

    def sequences(self, tensor: Tensor, examples: int) -> Tensor:
        """Reshape to (examples, positions, features); features are the tensor's last axis."""
        if self.dim == 0 and self.outermost:
            return tensor.reshape(examples, -1, tensor.shape[-1])
        return self.split(tensor, examples).reshape(examples, -1, tensor.shape[-1])


@dataclass(slots=True)
class Site:
    """One call of an operation that combines shared tensors with tensors that hold the examples.

    Attributes
    ----------
    examples
        Number of examples. Each example has the same number of rows in the batch.
    tensors, layouts
        The tensor arguments of the call, and the layout of each; None for one without examples.
        They are known during the call only, not in the backward.
    output
        Layout of the first result.
    is_shared
        Returns True for a tensor whose per-example gradients are wanted.
    collect
        `collect(tensor, gradient)` passes the per-example gradients of a shared tensor to the
        engine. Rules call it during the backward.
    anchor
        A scalar that requires grad. It is an argument of every `Operation`: the shared tensors are
        detached, so without it autograd might skip the backward.
    order
        Order of the examples in a packed sequence, None for that of the batch.
    collect_together
        Like `collect`, for several shared tensors; only where the engine has it.
    doubts
        Set if the trace has not seen gradients that confirm the layouts. Then a gradient other than
        zero raises `Stale` whenever this function returns True.
    """

    examples: int
    tensors: tuple[Tensor, ...]
    layouts: tuple[Layout | None, ...]
    output: Layout
    is_shared: Callable[[Tensor | None], bool]
    collect: "Callable[[Tensor, FactoredGradient], None]"
    anchor: Tensor
    order: Tensor | None = None
    doubts: Callable[[], bool] | None = None
    collect_together: "Callable[[Sequence[Tensor], Together], None] | None" = None

    def check_order(self, gradient: Tensor) -> None:
        """Raise `Stale` for a gradient of the output, unless it is zero or the order is known."""
        if not (self.doubts and self.doubts()) or not bool(gradient.any()):
            return
        places = [self.output.dim, *range(gradient.dim())]
        dim = next((d for d in places if gradient.shape[d] % self.examples == 0), None)
        if dim is None:
            raise Stale
        rows = gradient.unflatten(dim, (self.examples, -1)).movedim(dim, 0).flatten(1)
        used = (rows.isfinite().all(1) & (rows != 0).any(1)).nonzero().flatten()
        raise Stale(used if len(used) else None)

    def layout(self, tensor: Tensor) -> Layout | None:
        """Return the layout of an argument of the call, None if the argument holds no examples."""
        for known, layout in zip(self.tensors, self.layouts, strict=True):
            if known is tensor:
                return layout
        return None

    def forget_tensors(self) -> None:
        """Drop the arguments after the call, since the autograd graph holds the site.

        It would keep the inputs of layers that an activation checkpoint wants to free.
        """
        self.tensors = self.layouts = ()

    def detached(self, tensor: Tensor) -> Tensor:
        """Return `tensor` without its autograd history; its gradient must be collected instead.

        Raises `Unsupported` for a tensor whose gradient nobody would collect: one that needs a
        gradient but is neither a parameter nor seen to be computed from parameters, such as the
        result of a custom `autograd.Function`.
        """
        if tensor.requires_grad and not self.is_shared(tensor):
            raise Unsupported(UNSEEN)
        return tensor.detach()

    def require(self, batched: Tensor, *others: Tensor | None) -> Layout:
        """Return the layout of `batched`; raise `Declined` unless it alone holds examples."""
        layout = self.layout(batched)
        if layout is None or any(t is not None and self.layout(t) is not None for t in others):
            raise Declined
        return layout


@dataclass(slots=True)
class Operation:
    """One call of an operation, computed by a layer rule.

    Each rule is a subclass. `forward` returns the result and the tensors that the backward needs.
    `backward(saved, needs, *grads)` collects the per-example gradients of the shared tensors and
    returns the gradients of the other arguments, which come first. `needs` says for each argument
    whether autograd needs its gradient.
    """

    site: Site

    def forward(self, *tensors: Any, **_: Any) -> tuple[Any, Sequence[Tensor | None]]:
        raise NotImplementedError

    def backward(self, *args: Any, **_: Any) -> Sequence[Tensor | None]:
        raise NotImplementedError

    def apply(self, *tensors: Tensor | None) -> Any:
        """Return the result of `forward`. During the backward pass autograd calls `backward`.

        Shared tensors are detached first, so that autograd computes no ordinary gradient for them.
        """
        shown = [t.detach() if t is not None and self.site.is_shared(t) else t for t in tensors]
        return _OperationFunction.apply(self.site.anchor, self, *shown)


class _OperationFunction(torch.autograd.Function):
    """The autograd function that calls the forward and backward of an `Operation`."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, operation: Operation, *tensors: Tensor | None) -> Any:
        result, saved = operation.forward(*tensors)
        ctx.operation = operation
        ctx.dtypes = [None if t is None else t.dtype for t in tensors]
        ctx.save_for_backward(*saved)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # To autograd, the gradients do not depend on the shared tensors. So a loss with second
        # derivatives (`create_graph=True`) would silently lose that part of its gradient.
        if torch.is_grad_enabled():
            raise Unsupported("the loss differentiates the model itself")
        if ctx.operation.site.doubts is not None:
            for g in grads:
                ctx.operation.site.check_order(g)
        needs = ctx.needs_input_grad[2:]
        found = ctx.operation.backward(ctx.saved_tensors, needs, *grads)
        # The shared tensors were detached, so whatever autograd still needs a gradient for must
        # get one here: without it, the parameters behind that argument would silently get zero.
        if any(need and g is None for need, g in zip_longest(needs, found)):
            raise Unsupported(UNSEEN)
        pairs = zip_longest(found, ctx.dtypes)
        return None, None, *(None if g is None else g.to(dtype) for g, dtype in pairs)


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context that disables autocast, for a rule that has cast its tensors itself."""
    if torch.is_autocast_enabled(tensor.device.type):
        return torch.autocast(tensor.device.type, enabled=False)
    return nullcontext()


def autocast(*tensors: Any) -> list[Any]:  # Any: tensors, and None for one that is absent
    """Return the operands of a matrix product, cast to the dtype in which autocast computes it."""
    kind, dtype = tensors[0].device.type, tensors[0].dtype
    if dtype != torch.float64 and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return cast(dtype, *tensors)


def cast(dtype: torch.dtype, *tensors: Any) -> list[Any]:  # Any: as above
    """Return the tensors cast to this dtype; None stays None."""
    return [t if t is None or t.dtype == dtype else t.to(dtype) for t in tensors]


def channels_last(x: Tensor) -> Tensor:
    """Return x (rows, channels, *size) with channels last in memory.

    The strides say so even if some axes have one entry, so that torch's kernels agree about it.
    """
    if 1 not in x.shape and x.is_contiguous(memory_format=torch.channels_last):
        return x
    rows, channels, *size = x.shape
    return x.movedim(1, -1).reshape(rows, -1).view(rows, *size, channels).movedim(-1, 1)
