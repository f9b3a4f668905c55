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


def float32_products() -> str:
    """How precisely torch multiplies matrices in float32: "highest", "high" or "medium".

    `torch.get_float32_matmul_precision` refuses to say once it was set by the newer names.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        places = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # pyright: ignore[reportAttributeAccessIssue]  # made when it is imported
        precisions = {place.fp32_precision for place in places}
        return "medium" if "bf16" in precisions else "high" if "tf32" in precisions else "highest"


def convolved_in(tensor: Tensor) -> torch.dtype:
    """What a convolution rounds this operand to.

    cuDNN takes 11 bits of a float32, as many as a float16 has, unless it is told not to.
    """
    if not tensor.is_cuda or tensor.dtype != torch.float32:
        return tensor.dtype
    conv = getattr(torch.backends.cudnn, "conv", None)  # since torch 2.9
    is_reduced = torch.backends.cudnn.allow_tf32 if conv is None else conv.fp32_precision == "tf32"
    return torch.float16 if is_reduced else torch.float32


def room(dtype: torch.dtype, *, gram: int = 0, fused: bool = False) -> float:
    """The share of B by which a squared norm is raised.

    `gram`: the norm comes from inner products of this many terms; `fused`: by our own kernels,
    which do not reduce their precision.
    """
    is_reduced = dtype == torch.float32 and float32_products() != "highest"
    share = ROOM[torch.float16 if is_reduced else dtype]
    if not gram or dtype == torch.float64:
        return share
    if is_reduced and not fused:
        return REDUCED_ROOM
    return max(share, GRAM_ROOM * math.sqrt(max(gram, 16)))
