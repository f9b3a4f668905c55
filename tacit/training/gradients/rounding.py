"""How much room a norm leaves for what rounding hides.

A gradient is a sum over positions, and positions may cancel: rounding then is small against
B = (sum_t |left_t| |right_t|)^2, not against the squared norm. Squared norms are raised by a share
of B, so that factor * sqrt(B), the largest number in the weighted sum, stays bounded too.
"""

import math

import torch
from torch import Tensor

ROOM = {
    torch.float64: 2.0**-44,
    torch.float32: 2.0**-28,
    torch.float16: 2.0**-14,  # the factors are rounded into the sum, by up to 2^-9 of a position
    torch.bfloat16: 2.0**-14,
}
GRAM_ROOM = 2.0**-24  # times sqrt(width): inner products in float32, terms rounded at random
REDUCED_ROOM = 2.0**-9  # of those by matrix units that round float32 to 11 bits or fewer


def multiplied_in(dtype: torch.dtype) -> torch.dtype:
    """What a matrix product rounds operands of this type to.

    All of a float32, or as many bits as a float16 or a bfloat16 has, as torch is set.
    """
    if dtype != torch.float32:
        return dtype
    try:
        settings = {torch.get_float32_matmul_precision()}
    except RuntimeError:  # set by the newer names, which it refuses to translate
        places = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # pyright: ignore[reportAttributeAccessIssue]  # made when it is imported
        settings = {place.fp32_precision for place in places}
    if settings & {"medium", "bf16"}:
        return torch.bfloat16
    return torch.float16 if settings & {"high", "tf32"} else torch.float32


def convolved_in(tensor: Tensor) -> torch.dtype:
    """What a convolution rounds this operand to."""
    if tensor.is_cuda and tensor.dtype == torch.float32 and cudnn_rounds():
        return torch.float16
    return tensor.dtype


def cudnn_rounds() -> bool:
    """Whether cuDNN takes 11 bits of a float32, as many as a float16 has: unless told not to."""
    conv = getattr(torch.backends.cudnn, "conv", None)  # since torch 2.9
    return torch.backends.cudnn.allow_tf32 if conv is None else conv.fp32_precision == "tf32"


def room(dtype: torch.dtype, *, gram: int = 0, fused: bool = False) -> float:
    """The share of B by which a squared norm is raised.

    `gram`: the norm comes from inner products of this many terms; `fused`: by our own kernels,
    which do not reduce their precision.
    """
    rounded = multiplied_in(dtype)
    share = ROOM[rounded]
    if not gram or dtype == torch.float64:
        return share
    if rounded != dtype and not fused:
        return REDUCED_ROOM
    return max(share, GRAM_ROOM * math.sqrt(max(gram, 16)))
