"""Fused GPU kernels for per-example norms; everything here has a plain torch twin that CPUs use.

The norm of an example's weight gradient a'g, without forming it, is a sum over pairs of positions:
|a'g|^2 = sum_ts (a_t . a_s)(g_t . g_s). Unfused, the two T x T matrices are written to memory and
read again; the kernels keep one pair of tiles in registers, visit the lower triangle only, and
write one number for each tile.
"""

import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tacit.training.gpu import noise, update


def usable(tensor: Tensor) -> bool:
    """Whether the fused kernels can take this tensor: on a CUDA device, with Triton installed."""
    return tensor.is_cuda and tensor.dtype in _DTYPES and has_triton()


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def gram_norms(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms (examples,) of a'g, and sums of |a_t| |g_t|, the scale of their rounding.

    Shapes: a (examples, T, D), g (examples, T, P).
    """
    from tacit.training.gpu import gram

    squared, lengths = gram.gram_norms(a, g).unbind()
    return squared, lengths


def conv2d_norms(
    x: Tensor, g: Tensor, kernel: list[int], stride: int, padding: int
) -> tuple[Tensor, Tensor]:
    """Squared norms (examples,) of weight gradients, and the scale of their rounding.

    From channels-first input and output gradient, as `gram_norms` over output positions. Tensors
    that are channels last in memory are read as they are.
    """
    from tacit.training.gpu import conv

    found = conv.conv2d_norms(_channels_last(x), _channels_last(g), kernel, stride, padding)
    squared, lengths = found.unbind()
    return squared, lengths


def conv2d_instances(
    x: Tensor, g: Tensor, kernel: list[int], stride: int, padding: int
) -> tuple[Tensor, Tensor]:
    """Weight gradients (examples, outputs, *kernel, inputs) and their squared norms."""
    from tacit.training.gpu import conv

    return conv.conv2d_instances(_channels_last(x), _channels_last(g), kernel, stride, padding)


def weighted_sum(values: Tensor, factors: Tensor) -> Tensor:
    """sum_i factors_i values_i in float32; values (examples, size); a factor 0 leaves a row out."""
    from tacit.training.gpu import weighted_sum as weigh

    return weigh.weighted_sum(values, factors)


def noise_blocks(
    tensors: Sequence[Tensor], stds: Sequence[float], factor: float
) -> "noise.Blocks | None":
    """Blocks that add noise to all tensors in one launch; None if the kernel cannot take them."""
    if not all(usable(tensor) for tensor in tensors) or len({t.device for t in tensors}) != 1:
        return None
    from tacit.training.gpu import noise

    return noise.Blocks(tensors, stds, factor) if all(noise.takes(t) for t in tensors) else None


def fused_update(
    blocks: "noise.Blocks",
    sums: Sequence[Tensor],
    parameters: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
) -> "update.Update | None":
    """The noise of `blocks` on `sums` and the optimizer's step in one launch; None if unknown."""
    from tacit.training.gpu import update

    if not update.can_update(sums, parameters, optimizer):
        return None
    return update.Update(blocks, parameters, optimizer)


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.permute(0, 2, 3, 1).contiguous()


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
