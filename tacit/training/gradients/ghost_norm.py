"""Ghost norms: the norm of each example's gradient, if possible without forming the gradient.

A layer with T positions, D inputs a_t and P output gradients g_t has the per-example gradient
sum_t g_t a_t', a matrix of D P numbers. There are three exact ways to its norm (at T = 1 the norm
is simply |a| |g|):

- "gram": sum_ts (a_t . a_s)(g_t . g_s), from the Gram matrices of the positions. It takes
  T^2 (D + P) products and forms no gradient (Goodfellow 2015, arXiv:1510.01799; Li et al. 2022,
  arXiv:2110.05679, section 4);
- "keep": form the gradient and keep it for the weighted sum over the examples;
- "drop": form the gradient, take its norm and free it; the weighted sum reads a_t and g_t again.

Rounding. The gradient is a sum over positions, and positions may cancel. The rounding error is then
small relative to B = (sum_t |g_t| |a_t|)^2, not relative to the squared norm. So squared norms are
raised by a share of B, called the room. That also bounds factor * sqrt(B), the largest number in
the weighted sum.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tacit.training.clip import accumulator

Way = Literal["gram", "keep", "drop"]


class GhostNorm(NamedTuple):
    """Norms of the gradients sum_t left_t right_t', and what bounds their rounding error."""

    squared: Tensor  # (examples,) squared norms, without room for rounding
    lengths: Tensor  # (examples,) sums of |left_t| |right_t|
    room: float  # the share of lengths^2 to add to the squared norms
    gradient: Tensor | None = None  # (examples, P, D) if it was formed and kept

    def raised(self) -> Tensor:
        """Return the squared norms, raised by the room for rounding."""
        return self.squared + self.room * self.lengths.square()


class Rates(NamedTuple):
    """Speed of a device on these operations, per second, and the memory that may be kept."""

    products: float  # multiply-adds
    bytes: float  # read or written in main memory
    cached: float  # read or written in the cache
    cache: float  # size of the cache in bytes
    memory: float  # largest kept gradient, as a multiple of the layer's activations T (D + P)


# Only ratios between the ways matter, so orders of magnitude are enough. GPU: one H200 as measured
# for this project, 4 TB/s and about 2e14 multiply-adds. CPU: two cores with AVX-512 on batches of
# small products; the operating system maps the memory of large tensors page by page.
RATES = {
    "cpu": Rates(5e10, 8e9, 2e10, 2.0**24, 4.0),
    "cuda": Rates(2e14, 4e12, 4e12, 0.0, 1.0),
}

# Largest temporary tensor for one chunk of examples, in elements. On a CPU it should fit the cache.
CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}

# On a CPU, rows up to this long are squared and summed faster by a matrix product.
NARROW = 16

ROOM = {
    torch.float64: 2.0**-44,
    torch.float32: 2.0**-28,
    torch.float16: 2.0**-14,  # factors are rounded into the sum, by up to 2^-9 of a position
    torch.bfloat16: 2.0**-14,
}
GRAM_ROOM = 2.0**-24  # times sqrt(width): inner products in float32, terms rounded at random
REDUCED_ROOM = 2.0**-9  # for inner products by matrix units that round float32 to 11 bits or fewer

# Products of 16-bit matrices with a float32 result came with torch 2.8. The compiler of 2.9 refuses
# them (pytorch issue 165892).
_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
_HAS_OUT_DTYPE = _VERSION >= (2, 8) and _VERSION != (2, 9)


def ghost_norm(left: Tensor, right: Tensor) -> GhostNorm:
    """Return the norms of sum_t left_t right_t' by the cheapest way for this shape and device.

    Shapes: left (examples, T, P), right (examples, T, D). A gradient that is formed and kept needs
    no room: its norm is that of the numbers that are weighted later.
    """
    positions, outputs = left.shape[1:]
    inputs = right.shape[2]
    is_fused = has_kernels(left)
    way = cheapest_way(
        positions,
        inputs,
        outputs,
        examples=len(left),
        item=accumulator(left.dtype).itemsize,
        stored=positions * (inputs + outputs),
        device=left.device,
        fused=is_fused,
    )
    if way == "keep":
        gradient = product(left.transpose(1, 2), right)
        squared = squared_norm(gradient)
        return GhostNorm(squared, squared.sqrt(), 0.0, gradient)
    share = room(left.dtype, gram=max(inputs, outputs) if way == "gram" else 0, fused=is_fused)
    if way == "gram" and is_fused:
        from tacit.training import gpu

        return GhostNorm(*gpu.gram_norms(right, left), share)
    size = positions**2 if way == "gram" else inputs * outputs
    norms_of = gram_norms if way == "gram" else _formed_norms
    found = [norms_of(*chunk) for chunk in chunks(size, left, right)]
    squared, lengths = map(torch.cat, zip(*found, strict=True))
    return GhostNorm(squared, lengths, share)


def gram_norms(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return squared norms of sum_t left_t right_t' from Gram matrices, and sums of lengths.

    The lengths sum_t |left_t| |right_t| are read off the diagonals.
    """
    left, right = product(left, left.transpose(1, 2)), product(right, right.transpose(1, 2))
    products = left * right
    return products.sum((1, 2)), products.diagonal(dim1=1, dim2=2).sqrt().sum(1)


def _formed_norms(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `gram_norms` returns, by forming each example's gradient."""
    lengths = (norms_along(left, 2) * norms_along(right, 2)).sum(1)
    return squared_norm(product(left.transpose(1, 2), right)), lengths


def cheapest_way(
    positions: int,
    inputs: int,
    outputs: int,
    *,
    examples: int,
    item: int,
    stored: float,
    device: torch.device,
    fused: bool = False,
    copied: int = 0,
) -> Way:
    """Return the way to the norm that takes the least time for one layer.

    Parameters
    ----------
    item
        Bytes of one number.
    stored
        Number of activations that the layer holds for one example.
    fused
        Whether a GPU kernel forms the Gram matrices on the chip, and only one half of each.
    copied
        How many numbers of one example must be copied for the Gram matrices only.
    """
    rates = RATES.get(device.type, RATES["cpu"])
    size = inputs * outputs
    gram = positions**2 * (inputs + outputs) / rates.products
    gram += 4 * positions**2 * 4 / rates.cached + copied * item / rates.bytes
    if fused:
        gram = positions**2 * (inputs + outputs) / 2 / rates.products
    passes = 3 * size * item  # written, squared, weighted
    is_cached = examples * size * item <= rates.cache
    kept = passes / (rates.cached if is_cached else rates.bytes)
    if kept <= gram and size <= rates.memory * stored:
        return "keep"
    dropped = positions * size / rates.products + passes / rates.cached
    return "drop" if dropped < gram else "gram"


def has_kernels(tensor: Tensor) -> bool:
    """Return True if the fused GPU kernels support this tensor.

    The GPU package is imported for CUDA tensors only, so that a step on a CPU never loads it.
    """
    if not tensor.is_cuda:
        return False
    from tacit.training import gpu

    return gpu.usable(tensor)


def room(dtype: torch.dtype, *, gram: int = 0, fused: bool = False) -> float:
    """Return the share of B by which a squared norm is raised (see the module's docstring).

    `gram` is the number of terms of the inner products that the norm comes from, 0 if it comes from
    a formed gradient. `fused` means that our own kernels compute them, in full precision.
    """
    rounded = multiplied_in(dtype)
    share = ROOM[rounded]
    if not gram or dtype == torch.float64:
        return share
    if rounded != dtype and not fused:
        return REDUCED_ROOM
    return max(share, GRAM_ROOM * math.sqrt(max(gram, 16)))


def multiplied_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to whose precision a matrix product rounds operands of this dtype.

    By torch's precision settings, float32 keeps all its bits or as many as float16 or bfloat16 has.
    """
    if dtype != torch.float32:
        return dtype
    try:
        settings = {torch.get_float32_matmul_precision()}
    except RuntimeError:  # set by newer names, for which torch refuses to answer
        backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # pyright: ignore[reportAttributeAccessIssue]  # created on import
        settings = {backend.fp32_precision for backend in backends}
    if settings & {"medium", "bf16"}:
        return torch.bfloat16
    return torch.float16 if settings & {"high", "tf32"} else torch.float32


def convolved_in(tensor: Tensor) -> torch.dtype:
    """Return the dtype to whose precision a convolution rounds this operand."""
    if tensor.is_cuda and tensor.dtype == torch.float32 and cudnn_rounds():
        return torch.float16
    return tensor.dtype


def cudnn_rounds() -> bool:
    """Return True if cuDNN rounds float32 to 11 bits, as many as float16 has: torch's default."""
    conv = getattr(torch.backends.cudnn, "conv", None)  # since torch 2.9
    return torch.backends.cudnn.allow_tf32 if conv is None else conv.fp32_precision == "tf32"


def squared_norm(rows: Tensor) -> Tensor:
    """Return the squared norm of each row, at least in float32."""
    flat = rows.reshape(rows.shape[0], -1)
    if flat.shape[1] <= NARROW and not flat.is_cuda:
        flat = wide(flat)
        return (flat * flat).mv(flat.new_ones(flat.shape[1]))
    return torch.linalg.vector_norm(flat, dim=1, dtype=accumulator(flat.dtype)).square()


def norms_along(tensor: Tensor, dim: int) -> Tensor:
    """Return the norms over one axis, at least in float32."""
    return torch.linalg.vector_norm(tensor, dim=dim, dtype=accumulator(tensor.dtype))


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor in at least float32."""
    return tensor.to(accumulator(tensor.dtype))


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the matrix product of matrices or of batches, summed in at least float32."""
    multiply = torch.mm if left.dim() == 2 else torch.bmm
    if _HAS_OUT_DTYPE and left.is_cuda and left.dtype in (torch.float16, torch.bfloat16):
        return multiply(left, right, out_dtype=torch.float32, out=out)
    return multiply(wide(left), wide(right), out=out)


def spans(examples: int, size: int, device: torch.device) -> list[tuple[int, int]]:
    """Return (start, stop) of chunks of examples, each of which needs `size` temporary numbers."""
    step = max(1, CHUNK_ELEMENTS.get(device.type, 2**24) // max(1, size))
    return [(i, min(i + step, examples)) for i in range(0, examples, step)]


def chunks(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors cut along the examples into the `spans`."""
    for start, stop in spans(len(tensors[0]), size, tensors[0].device):
        yield tuple(t[start:stop] for t in tensors)
