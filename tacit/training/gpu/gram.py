"""Per-example norms of linear gradients from fused tiles of Gram matrices (Triton).

The norm of an example's weight gradient a'g is a sum over pairs of positions:
|a'g|^2 = sum_ts (a_t . a_s)(g_t . g_s). Plain torch writes the two T x T matrices to memory and
reads them again. These kernels keep one pair of tiles in registers, visit the lower triangle only,
and write one number for each tile.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with CUDA builds of torch
import triton.language as tl  # pyright: ignore[reportMissingImports]  # as above
from torch import Tensor

from tacit.training.clipping.arithmetic import raised_for_range

try:
    from triton.tools.tensor_descriptor import (  # pyright: ignore[reportMissingImports]  # as above
        TensorDescriptor,
    )
except ImportError:  # before Triton 3.4
    TensorDescriptor = None


@triton.jit
def _lower_triangle(pair):
    """Return (row, column) of tile number `pair` among those with row >= column, row by row."""
    row = ((tl.sqrt(8.0 * pair.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where((row + 1) * (row + 2) // 2 <= pair, row + 1, row)
    row = tl.where(row * (row + 1) // 2 > pair, row - 1, row)
    return row, pair - row * (row + 1) // 2


@triton.jit
def _gram_tile(
    base, stride, rows, columns, T, start, stop,
    TILE: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one tile of a Gram matrix in float32: inner products of the vectors of x at `base`.

    The tile has the vectors at positions `rows` by those at `columns`. Inner products are taken
    over the features from `start` to `stop`.
    """
    k = tl.arange(0, DEPTH)
    left = base + rows.to(tl.int64)[:, None] * stride + k[None, :]
    right = base + columns.to(tl.int64)[None, :] * stride + k[:, None]
    has_row, has_column = rows[:, None] < T, columns[None, :] < T
    total = tl.zeros([TILE, TILE], dtype=tl.float32)
    for at in range(start, stop, DEPTH):
        if EVEN:
            x = tl.load(left + at, mask=has_row, other=0.0)
            y = tl.load(right + at, mask=has_column, other=0.0)
        else:
            inside = at + k < stop
            x = tl.load(left + at, mask=has_row & inside[None, :], other=0.0)
            y = tl.load(right + at, mask=has_column & inside[:, None], other=0.0)
        total = tl.dot(x, y, total, input_precision=PRECISION)
    return total


@triton.jit
def _store_share(out, apart, at, of_a, of_g, i, j, TILE: tl.constexpr):
    """Store one tile's part of an example's squared norm, sum_t |a_t| |g_t|, and traces.

    `of_a` and `of_g` hold a_t . a_s and g_t . g_s for the tile in row i and column j. Tiles on the
    diagonal give all but the first number, from the terms t = s. The four numbers are stored
    `apart` from each other.
    """
    products = of_a * of_g
    twice = tl.where(i == j, 1.0, 2.0)  # the upper triangle mirrors the lower one
    tl.store(out + at, tl.sum(tl.sum(products, 1), 0) * twice)
    t = tl.arange(0, TILE)
    is_diagonal = (t[:, None] == t[None, :]) & (i == j)
    squares = tl.where(is_diagonal, products, 0.0)
    tl.store(out + apart + at, tl.sum(tl.sum(tl.sqrt(squares), 1), 0))
    tl.store(out + 2 * apart + at, tl.sum(tl.sum(tl.where(is_diagonal, of_a, 0.0), 1), 0))
    tl.store(out + 3 * apart + at, tl.sum(tl.sum(tl.where(is_diagonal, of_g, 0.0), 1), 0))


@triton.jit
def _gram_kernel(
    a, g, out, apart, T, D, P, part, stride_ab, stride_at, stride_gb, stride_gt,
    TILE: tl.constexpr, DEPTH: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one tile's part of the squared norm sum_ts (a_t . a_s)(g_t . g_s) of an example.

    a_t is the layer's input and g_t its output gradient at position t, or the reverse. The inner
    products of g are taken over one chunk of `part` features.
    """
    pair, chunk = tl.program_id(0), tl.program_id(2)
    example = tl.program_id(1).to(tl.int64)
    i, j = _lower_triangle(pair)
    rows = i * TILE + tl.arange(0, TILE)
    columns = j * TILE + tl.arange(0, TILE)
    start = chunk * part
    of_g = _gram_tile(
        g + example * stride_gb, stride_gt, rows, columns, T, start, tl.minimum(start + part, P),
        TILE, DEPTH, EVEN_P, PRECISION,
    )  # fmt: skip
    of_a = _gram_tile(
        a + example * stride_ab, stride_at, rows, columns, T, 0, D, TILE, DEPTH, EVEN_D, PRECISION
    )
    at = (example * tl.num_programs(0) + pair) * tl.num_programs(2) + chunk
    _store_share(out, apart, at, of_a, of_g, i, j, TILE)


@triton.jit
def _bulk_gram_kernel(
    a, g, out, apart, D, P, part, TILE: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """Compute the same as `_gram_kernel`, with tiles that the GPU's copy engine loads."""
    pair, example, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, j = _lower_triangle(pair)
    start = chunk * part
    of_g = tl.zeros([TILE, TILE], dtype=tl.float32)
    for at in range(start, tl.minimum(start + part, P), DEPTH):
        x = g.load([example, i * TILE, at]).reshape(TILE, DEPTH)
        y = g.load([example, j * TILE, at]).reshape(TILE, DEPTH)
        of_g = tl.dot(x, y.T, of_g)
    of_a = tl.zeros([TILE, TILE], dtype=tl.float32)
    for at in range(0, D, DEPTH):
        x = a.load([example, i * TILE, at]).reshape(TILE, DEPTH)
        y = a.load([example, j * TILE, at]).reshape(TILE, DEPTH)
        of_a = tl.dot(x, y.T, of_a)
    at = (example.to(tl.int64) * tl.num_programs(0) + pair) * tl.num_programs(2) + chunk
    _store_share(out, apart, at, of_a, of_g, i, j, TILE)


def gram_norms(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared norm of each example's a'g, and the sum of |a_t| |g_t|, in float32.

    a is a layer's input (examples, T positions, D features), g its output gradient (examples, T,
    P), and a'g the weight gradient. Results have shape (examples,). The second result is the scale
    of the rounding error, and may be somewhat larger than that sum. Both are raised by what numbers
    too small for float32 may have lost.
    """
    squared, lengths, *traces = _gram_norms(a, g).unbind()
    widths = a.shape[2] + g.shape[2]
    return raised_for_range(squared, lengths, traces, positions=a.shape[1], widths=widths)


@torch.library.custom_op("tacit::gram_norms", mutates_args=())
def _gram_norms(a: Tensor, g: Tensor) -> Tensor:
    """Compute squared norms, lengths and both traces as one tensor of shape (4, examples)."""
    common = torch.promote_types(a.dtype, g.dtype)
    # The kernels require contiguous features.
    a, g = (x if x.stride(-1) == 1 else x.contiguous() for x in (a.to(common), g.to(common)))
    if a.shape[2] > g.shape[2]:  # the wider side is cut: the product is linear in either matrix
        a, g = g, a
    batch, T, D = a.shape
    P = g.shape[2]
    bulk = _takes_bulk_copies(a) and _takes_bulk_copies(g)
    tile, depth, warps, stages = (
        _BULK if bulk else _shape(T, D + P, g.element_size(), is_even=_are_even(a, g))
    )
    tiles = triton.cdiv(T, tile)
    pairs = tiles * (tiles + 1) // 2
    chunks = _chunks(batch * pairs, D, P)
    part = triton.cdiv(triton.cdiv(P, chunks), depth) * depth
    chunks = triton.cdiv(P, part)
    out = torch.empty(4, batch, pairs, chunks, device=g.device, dtype=torch.float32)
    grid = (pairs, batch, chunks)
    if bulk:
        assert TensorDescriptor is not None
        tiled = [TensorDescriptor.from_tensor(x, [1, tile, depth]) for x in (a, g)]
        _bulk_gram_kernel[grid](  # pyright: ignore[reportIndexIssue]  # a Triton kernel
            *tiled, out, out[0].numel(), D, P, part,
            TILE=tile, DEPTH=depth, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    else:
        _gram_kernel[grid](  # pyright: ignore[reportIndexIssue]  # a Triton kernel
            a, g, out, out[0].numel(), T, D, P, part,
            a.stride(0), a.stride(1), g.stride(0), g.stride(1),
            TILE=tile, DEPTH=depth, EVEN_D=D % depth == 0, EVEN_P=P % depth == 0,
            PRECISION=precision(g), num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out.sum((2, 3))


@_gram_norms.register_fake
def _(a: Tensor, g: Tensor) -> Tensor:
    return a.new_empty(4, a.shape[0], dtype=torch.float32)


def precision(tensor: Tensor) -> str:
    """Return the `input_precision` of Triton's `tl.dot` for this tensor: "tf32x3" for float32.

    "tf32x3" computes three tf32 products. One tf32 product alone has a relative error of 1e-3, so a
    clipped gradient could exceed the clip norm.
    """
    return "tf32x3" if tensor.dtype == torch.float32 else "tf32"


def tile_for(T: int, most: int) -> int:
    """Return the side of a tile for T positions: the least power of two >= T, within limits.

    The limits are 16, the smallest side of a GPU's matrix unit, and `most`.
    """
    return min(most, max(16, triton.next_power_of_2(T)))


def _shape(T: int, features: int, item_size: int, *, is_even: bool) -> tuple[int, int, int, int]:
    """Return the launch settings (tile, depth, warps, stages) that were fastest on an H200.

    T is the number of positions, `features` the width of both factors together, and `item_size` the
    bytes of a number. If numbers cannot be read in whole vectors, tiles are smaller, so that their
    addresses fit in a thread's registers; those settings were chosen without a GPU.
    """
    if item_size == 4:
        return tile_for(T, 64), 32, 4, 3
    if T < 128 or features <= 1536:
        return tile_for(T, 64), 128, 8, 2
    return 128, 64 if is_even else 32, 8, 3


def _are_even(*tensors: Tensor) -> bool:
    """Return True if the kernel can read features of the tensors in whole vectors."""
    return all(s % 16 == 0 for x in tensors for s in x.stride()[:2])


_BULK = (128, 64, 8, 5)  # tile, depth, warps, stages: fastest on an H200 with bulk copies


def _takes_bulk_copies(x: Tensor) -> bool:
    """Return True if the copy engine of Hopper and Blackwell GPUs can load tiles of x."""
    if x.element_size() != 2 or x.shape[1] < 128 or x.shape[2] < 64 or TensorDescriptor is None:
        return False
    aligned = x.data_ptr() % 16 == 0 and all(s > 0 and s % 8 == 0 for s in x.stride()[:2])
    return aligned and torch.cuda.get_device_capability(x.device)[0] in (9, 10)


def _chunks(programs: int, D: int, P: int) -> int:
    """Return into how many chunks to cut the P features of the wider factor.

    More chunks give more programs, so that they fill the GPU. But each chunk computes the inner
    products over the D features of the narrower factor again, so P is cut only if it is much larger
    than D.
    """
    chunks = 1
    while programs * chunks < _FILL and P // (chunks + 1) >= 4 * D:
        chunks += 1
    return chunks


_FILL = 600  # programs; an H200 has 132 multiprocessors, and the last wave should be small
