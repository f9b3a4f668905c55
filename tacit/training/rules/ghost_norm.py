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
small relative to the length L = sum_t |g_t| |a_t| of its terms, not relative to the norm. So norms
are raised by a share of L, and squared norms by a share of L^2, called the `Room`. That also bounds
factor * L, the largest number in the weighted sum.

In float32 and float64 the room is proved, by the error bounds of `tacit.training.arithmetic`. With
u the unit roundoff, gamma(k) about k u, T positions and widths D and P:

- "drop": a formed gradient has an error of at most gamma(T + 1) L in the Frobenius norm;
- "gram": an inner product has an error of at most gamma(d) |a_t| |a_s|, where d is the depth of a
  sum of D terms in blocks; with the sum over pairs of positions, itself in blocks, the squared norm
  has an error of at most gamma(d_D + d_P + min(T^2, BLOCK) + 4) L^2;
- numbers below the range of the dtype are lost; `arithmetic.lost_below_range` bounds the loss;
- the contribution of one example to the weighted sum has, besides its clipped gradient, an error of
  at most gamma(T + 2) factor * L.

Where matrix units round the operands to fewer bits (TF32, bfloat16, float16), or our own kernels
take the Gram matrices, the room is an estimate. The bounded mode computes the norms in float64.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tacit.training.arithmetic import (
    BLOCK,
    CANCELLATION,
    UNIT,
    block_squares,
    block_sums,
    depth_in_blocks,
    raised_for_range,
)
from tacit.training.clip import accumulator
from tacit.training.torch_internals import linear, products

Way = Literal["gram", "keep", "drop"]


class Room(NamedTuple):
    """Bounds on rounding errors, relative to the length L of an example's terms."""

    of_square: float  # share of L^2 by which a squared norm may be too small
    of_norm: float  # share of L by which the norm of the contribution may be larger than the norm

    def raised(self, squared: Tensor, lengths: Tensor) -> Tensor:
        """Return the squared norms of gradients, raised so that none is too small."""
        if self.of_square:
            squared = squared + self.of_square * lengths.square()
        if not self.of_norm:
            return squared
        return (squared.clamp_min(0).sqrt() + self.of_norm * lengths).square()

    def or_more(self, other: "Room") -> "Room":
        """Return room for both: the larger of the two numbers each."""
        return Room(max(self.of_square, other.of_square), max(self.of_norm, other.of_norm))


class GhostNorm(NamedTuple):
    """Norms of the per-example gradients sum_t left_t right_t', with a bound on rounding errors.

    left_t is the output gradient and right_t the input at position t.
    """

    squared: Tensor  # (examples,) squared norms, without room for rounding
    lengths: Tensor  # (examples,) sums of |left_t| |right_t|
    room: Room
    gradient: Tensor | None = None  # (examples, P, D) if it was formed and kept

    def raised(self) -> Tensor:
        """Return the squared norms, raised by the room so that none is too small."""
        return self.room.raised(self.squared, self.lengths)


class Rates(NamedTuple):
    """Speeds of a device and the memory that gradients may take, to choose the cheapest way."""

    products: float  # multiply-adds
    doubles: float  # multiply-adds in float64
    bytes: float  # read or written in main memory
    cached: float  # read or written in the cache
    cache: float  # size of the cache in bytes
    memory: float  # largest kept gradient, as a multiple of the layer's activations T (D + P)
    bounded_memory: float  # the same in the bounded mode


# Only ratios between the ways matter, so orders of magnitude are enough. GPU: one H200 as measured
# for this project, 4 TB/s and about 2e14 multiply-adds. CPU: two cores with AVX-512 on batches of
# small products; the operating system maps the memory of large tensors page by page. On a GPU,
# gradients that are kept are several times faster in the bounded mode than products in float64. A
# microbatch for which memory runs out is halved.
RATES = {
    "cpu": Rates(3e10, 1.5e10, 8e9, 2e10, 2.0**24, 8.0, 4.0),
    "cuda": Rates(2e14, 2e13, 4e12, 4e12, 0.0, 1.0, 20.0),
}

# Largest temporary tensor for one chunk of examples, in elements. On a CPU it should fit the cache.
CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}

# Seconds that the operators of the Gram matrices take to be called, more than those of other ways.
GRAM_CALLS = 5e-5

# On a CPU, rows up to this long are squared and summed faster by a matrix product.
NARROW = 16

ROOM = {
    torch.float32: 2.0**-28,
    torch.float16: 2.0**-14,  # factors are rounded into the sum, by up to 2^-9 of a position
    torch.bfloat16: 2.0**-14,
}
DOUBLE_ROOM = 2.0**-40  # of squared norms in float64, by far enough for sums of 2^10 terms
GRAM_ROOM = 2.0**-24  # times sqrt(width): inner products in float32, terms rounded at random
REDUCED_ROOM = 2.0**-9  # for inner products by matrix units that round float32 to 11 bits or fewer

# Products of 16-bit matrices with a float32 result came with torch 2.8. The compiler of 2.9 refuses
# them (pytorch issue 165892).
_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
_HAS_OUT_DTYPE = _VERSION >= (2, 8) and _VERSION != (2, 9)


def ghost_norm(left: Tensor, right: Tensor, *, bounded: bool = False) -> GhostNorm:
    """Return the norms of sum_t left_t right_t' by the cheapest way for this shape and device.

    left (examples, T, P) holds output gradients at T positions, right (examples, T, D) inputs. If
    gradients are formed and kept, their norms need no room for rounding, since the weighted sum
    uses the very same numbers. Norms of gradients that are not kept are computed in float64 if
    `bounded`.
    """
    positions, outputs = left.shape[1:]
    inputs = right.shape[2]
    is_fused = has_kernels(left) and not bounded
    way = cheapest_way(
        positions,
        inputs,
        outputs,
        examples=left.shape[0],
        item=accumulator(left.dtype).itemsize,
        stored=positions * (inputs + outputs),
        device=left.device,
        fused=is_fused,
        bounded=bounded,
    )
    if way == "keep":
        gradient = product(left.transpose(1, 2), right)
        squared = squared_norm(gradient)
        return GhostNorm(squared, squared.sqrt(), Room(0.0, 0.0), gradient)
    widths = (inputs, outputs) if way == "gram" else ()
    share = room(left.dtype, positions, widths=widths, fused=is_fused, bounded=bounded)
    if way == "gram" and is_fused:
        from tacit.training.gpu import gram

        return GhostNorm(*gram.gram_norms(right, left), share)
    size = positions**2 if way == "gram" else inputs * outputs
    norms_of = gram_norms if way == "gram" else _formed_norms
    found = [norms_of(*in_double(bounded, *chunk)) for chunk in chunks(size, left, right)]
    squared, lengths = (
        torch.cat(part).to(accumulator(left.dtype)) for part in zip(*found, strict=True)
    )
    return GhostNorm(squared, lengths, share)


def gram_norms(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return each example's squared norm of sum_t left_t right_t', and sum_t |left_t| |right_t|.

    left is (examples, T, P) and right (examples, T, D).
    """
    return norms_of_grams(gram(left), gram(right), left.shape[2] + right.shape[2])


def norms_of_grams(of_left: Tensor, of_right: Tensor, widths: int) -> tuple[Tensor, Tensor]:
    """Return what `gram_norms` returns, from the Gram matrices of vectors of these widths in sum.

    The second result, from their diagonals, is the scale of the rounding error. Both are raised by
    what numbers too small for their dtype may have lost.
    """
    products = of_left * of_right
    lengths = products.diagonal(dim1=1, dim2=2).sqrt().sum(1)
    traces = [matrix.diagonal(dim1=1, dim2=2).sum(1) for matrix in (of_left, of_right)]
    squared, positions = block_sums(products.flatten(1)), of_left.shape[1]
    return raised_for_range(squared, lengths, traces, positions=positions, widths=widths)


def gram(vectors: Tensor) -> Tensor:
    """Return the inner products of vectors (examples, T, width), in at least float32.

    The features are taken in blocks of `arithmetic.BLOCK`, so that no sum is long.
    """
    total: Tensor | None = None
    for block in vectors.split(BLOCK, dim=2):
        part = product(block, block.transpose(1, 2))
        total = part if total is None else total.add_(part)
    assert total is not None  # a layer has at least one feature
    return total


def _formed_norms(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `gram_norms` returns, by forming each example's gradient."""
    lengths = (norms_of_vectors(left) * norms_of_vectors(right)).sum(1)
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
    bounded: bool = False,
) -> Way:
    """Return the way to a layer's norms that takes the least time: "gram", "keep" or "drop".

    The module's docstring explains the three ways.

    Parameters
    ----------
    positions, inputs, outputs
        The sizes T, D and P of an example's inputs (T, D) and output gradients (T, P).
    item
        Bytes of one number.
    stored
        Number of activations that the layer holds for one example.
    fused
        Whether a GPU kernel forms the Gram matrices on the chip, and only one half of each.
    copied
        How many numbers of one example must be copied for the Gram matrices only.
    bounded
        Whether everything but a kept gradient, the weighted sum too, is computed in float64.
    """
    rates = RATES.get(device.type, RATES["cpu"])
    size = inputs * outputs
    memory = rates.bounded_memory if bounded else rates.memory
    slower = rates.products / rates.doubles if bounded else 1.0
    more = (slower - 1) * positions * size / rates.products  # of the weighted sum in float64
    gram = positions**2 * (inputs + outputs) / rates.products
    gram += 4 * positions**2 * 4 / rates.cached + copied * item / rates.bytes
    gram += GRAM_CALLS / usual(examples)
    if fused:
        gram = positions**2 * (inputs + outputs) / 2 / rates.products
    gram = slower * gram + more
    passes = 3 * size * item  # written, squared, weighted
    is_cached = usual(examples) * size * item <= rates.cache
    kept = passes / (rates.cached if is_cached else rates.bytes)
    if kept <= gram and size <= memory * stored:
        return "keep"
    dropped = slower * (positions * size / rates.products + passes / rates.cached) + more
    return "drop" if dropped < gram else "gram"


def usual(number: int) -> int:
    """Return a number of rows; if it is a symbol of the compiler, that of the batch being traced.

    A choice by this number holds for other numbers too, though it may not be the fastest there.
    """
    node = getattr(number, "node", None)
    return number if node is None else node.hint


def has_kernels(tensor: Tensor) -> bool:
    """Return True if the fused GPU kernels support this tensor.

    The GPU package is imported for CUDA tensors only, so that a step on a CPU never loads it.
    """
    if not tensor.is_cuda:
        return False
    from tacit.training.gpu.available import usable

    return usable(tensor)


def room(
    dtype: torch.dtype,
    positions: int,
    *,
    widths: tuple[int, ...] = (),
    fused: bool = False,
    bounded: bool = False,
) -> Room:
    """Return the room for rounding of a layer's norms; the module's docstring has the proof.

    `widths` are the sizes of the vectors in the Gram matrices, empty if gradients are formed.
    `fused` means that our own kernels compute the Gram matrices. `bounded` means that norms and
    weighted sum are computed in float64; then the room limits how far positions may cancel.
    """
    if bounded:
        return Room(DOUBLE_ROOM, CANCELLATION)
    rounded = multiplied_in(dtype)
    if rounded != dtype and widths and not fused:
        return Room(REDUCED_ROOM, 0.0)
    if rounded not in UNIT or (fused and widths):
        share = ROOM[rounded]
        return Room(max(share, GRAM_ROOM * math.sqrt(max(*widths, 16))) if widths else share, 0.0)
    if not widths:
        return Room(0.0, _gamma(2 * positions + 3, rounded))
    depth = sum(map(depth_in_blocks, widths)) + min(positions**2, BLOCK) + 4
    return Room(_gamma(depth, rounded), _gamma(positions + 2, rounded))


def _gamma(roundings: int, dtype: torch.dtype) -> float:
    error = roundings * UNIT[dtype]
    return error / (1 - error) if error < 0.5 else 1.0  # L itself bounds the norm


def in_double(bounded: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in float64 if `bounded`, else as they are."""
    return tuple(t.double() for t in tensors) if bounded else tensors


def multiplied_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to whose precision a matrix product rounds operands of this dtype.

    Only float32 may be rounded: torch's precision settings let a product keep all its bits, or as
    many as float16 or bfloat16 has.
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
    """Return True if cuDNN rounds float32 to float16's 11 bits, which is torch's default."""
    conv = getattr(torch.backends.cudnn, "conv", None)  # since torch 2.9
    return torch.backends.cudnn.allow_tf32 if conv is None else conv.fp32_precision == "tf32"


def squared_norm(rows: Tensor) -> Tensor:
    """Return the squared norm of each row (entry of the first axis), in at least float32.

    Its relative error is that of `arithmetic.BLOCK` + 6 roundings, however long the row is.
    """
    flat = rows.reshape(rows.shape[0], -1)
    if flat.shape[1] <= NARROW and not flat.is_cuda:
        flat = wide(flat)
        return (flat * flat).mv(flat.new_ones(flat.shape[1]))
    return block_squares(flat)


def squared_factor(rows: Tensor, squared: Tensor | None = None) -> Tensor:
    """Return `squared_norm(rows)`, or `squared` if given, so that products with it are bounds.

    Each square below 2^-126, the end of float32's range, may be lost, and so may the sum of a
    block. A large other factor would make that visible, so twice as much is added for every entry.
    """
    squared = squared_norm(rows) if squared is None else squared
    return squared + rows.shape[1:].numel() * 2.0**-125


def norms_of_vectors(tensor: Tensor) -> Tensor:
    """Return the norms over the last axis, in at least float32, none too small by underflow."""
    return squared_factor(tensor.flatten(0, -2)).sqrt().view(tensor.shape[:-1])


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or in its own dtype if that is wider."""
    dtype = accumulator(tensor.dtype)
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the product of two matrices, or of two batches of them, summed in at least float32."""
    if _HAS_OUT_DTYPE and left.is_cuda and left.dtype in (torch.float16, torch.bfloat16):
        multiply = torch.mm if left.dim() == 2 else torch.bmm
        return multiply(left, right, out_dtype=torch.float32, out=out)
    if left.dim() == 2 and out is None:
        return linear(wide(left), wide(right).t())
    multiply = torch.mm if left.dim() == 2 else products
    return multiply(wide(left), wide(right), out=out)


def spans(examples: int, size: int, device: torch.device) -> list[tuple[int, int]]:
    """Return (start, stop) of chunks of examples; an example needs `size` temporary numbers.

    If the number of examples is a symbol of the compiler, the number of chunks is fixed, such that
    batches half as large again as the traced one have chunks of the same bound.
    """
    step = max(1, CHUNK_ELEMENTS.get(device.type, 2**24) // max(1, size))
    known = usual(examples)
    if known is examples:
        return [(i, min(i + step, examples)) for i in range(0, examples, step)]
    count = -(-3 * known // (2 * step))
    if examples > count * step:  # the compiler notes that this was not so
        raise AssertionError("the traced batch is larger than itself")
    part = -(-examples // count)
    return [(i * part, (i + 1) * part if i + 1 < count else examples) for i in range(count)]


def chunks(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors in chunks of examples; an example needs `size` temporary numbers."""
    for start, stop in spans(tensors[0].shape[0], size, tensors[0].device):
        yield tuple(t[start:stop] for t in tensors)
