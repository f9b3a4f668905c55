"""Every private name of torch that the traced program uses, in one place.

Checked with torch 2.13; `require` says at once whether this version of torch has what is needed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from tacit.errors import IncompatibleModel

try:
    from torch._C import _functorch
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
    from torch.fx.experimental.proxy_tensor import make_fx

    _MISSING = ""
    _NAMES = ("_add_batch_dim", "get_unwrapped", "maybe_get_bdim", "maybe_get_level")
    _MISSING = ", ".join(name for name in _NAMES if not hasattr(_functorch, name))
except ImportError as error:  # pragma: no cover  # other versions of torch
    _MISSING = str(error)

# Nodes that switch a mode on or off: they have no tensors, and their order counts.
MODES = () if _MISSING else (_enter_autocast, _exit_autocast, torch._C._set_grad_enabled)


def require() -> None:
    """Raise `IncompatibleModel` if this version of torch lacks a private name used here."""
    if _MISSING:
        raise IncompatibleModel(
            f"torch {torch.__version__} cannot trace the program of one example ({_MISSING} is "
            "missing). Use a version that docs/install.md lists."
        )


def traced(program: Callable[..., Tensor], rows: Sequence[Tensor]) -> fx.GraphModule:
    """Return the graph of `program` on tensors like `rows`, of which only the shapes are used.

    Composite operators (linear, attention, a whole LSTM) stay whole. Tensors that the program finds
    elsewhere, such as parameters, are attributes of the graph, the very objects themselves.
    Gradients are enabled, else the graph would switch them off for all that follows.
    """
    with torch.enable_grad():
        return make_fx(
            program, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True
        )(*rows)


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor was made while a program was traced, and has no values."""
    return isinstance(tensor, FakeTensor)


@contextmanager
def modes_put_back(kind: str) -> Iterator[None]:
    """Return a context after which autocast and gradients are as before, also after an error.

    A graph has nodes that switch them on and off, and an error may come in between. `kind` is that
    of the device.
    """
    before = (
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.is_grad_enabled(),
    )
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])
        torch.set_grad_enabled(before[2])


def without_map(tensor: Tensor, examples: int) -> Tensor:
    """Return all examples of a tensor inside of `torch.func.vmap`, stacked on the first axis."""
    level = _functorch.maybe_get_level(tensor)
    if level is None or level < 0:
        return tensor.expand(examples, *tensor.shape)
    whole = _functorch.get_unwrapped(tensor)
    axis = _functorch.maybe_get_bdim(tensor)
    return whole if axis == 0 else whole.movedim(axis, 0)


def is_mapped(tensor: Tensor) -> bool:
    """Return whether a tensor inside of `torch.func.vmap` differs from example to example."""
    return _functorch.is_batchedtensor(tensor)


def outside_of_map() -> AbstractContextManager[Any]:  # Any: its value is unused
    """Return a context that leaves the innermost `torch.func.vmap`."""
    return retrieve_current_functorch_interpreter().lower()


def with_map(stacked: Tensor) -> Tensor:
    """Return the tensor of one example, of which `stacked` holds all; use it inside of vmap."""
    return _functorch._add_batch_dim(stacked, 0, level())


def level() -> int:
    """Return the level of the innermost `torch.func.vmap`."""
    return retrieve_current_functorch_interpreter().level()
