"""Fused GPU kernels for per-example norms; everything here has a plain torch twin that CPUs use.

The norm of an example's weight gradient a'g, without forming it, is a sum over pairs of positions:
|a'g|^2 = sum_ts (a_t . a_s)(g_t . g_s). Unfused, the two T x T matrices are written to memory and
read again; the kernels keep one pair of tiles in registers, visit the lower triangle only, and
write one number for each tile.
"""

import importlib.util

import torch
from torch import Tensor


def usable(tensor: Tensor) -> bool:
    """Whether the fused kernels can take this tensor: on a CUDA device, with Triton installed."""
    return tensor.is_cuda and tensor.dtype in _DTYPES and has_triton()


def has_triton() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
