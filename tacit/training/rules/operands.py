"""What the rules have in common: how operands are cast and laid out, and how a rule declines."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tacit.errors import IncompatibleModel


class Unsupported(IncompatibleModel):
    """Raised if a program cannot be mapped over examples. Quotes no private value."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"The program of one example cannot be mapped: {reason}.")
        self.reason = reason


class Declined(Exception):
    """Raised by a rule that does not cover a call, which then takes copies of shared values."""


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
