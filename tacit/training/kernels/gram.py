"""Per-example squared norms of linear and embedding gradients by fused Gram tiles (Triton)."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _lower_triangle(pair):
    """(row, column) of the `pair`-th tile with row >= column, counted row by row."""
    row = ((tl.sqrt(8.0 * pair.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where((row + 1) * (row + 2) // 2 <= pair, row + 1, row)
    row = tl.where(row * (row + 1) // 2 > pair, row - 1, row)
    return row, pair - row * (row + 1) // 2


@triton.jit
def _gram_tile(
    base, stride, rows, columns, T, start, stop,
    TILE: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x[rows] @ x[columns]' over features start..stop, in float32."""
    k = tl.arange(0, DEPTH)
    left = base + rows[:, None] * stride + k[None, :]
    right = base + columns[None, :] * stride + k[:, None]
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
def _gram_kernel(
    a, g, ids, out, T, D, P, part,
    stride_ab, stride_at, stride_gb, stride_gt, stride_ib,
    LOOKUP: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile's share of sum_ts (a_t . a_s)(g_t . g_s); LOOKUP: a_t is ids_t as a one-hot row."""
    pair, chunk = tl.program_id(0), tl.program_id(2)
    example = tl.program_id(1).to(tl.int64)
    i, j = _lower_triangle(pair)
    rows = i * TILE + tl.arange(0, TILE)
    columns = j * TILE + tl.arange(0, TILE)
    start = chunk * part
    stop = tl.minimum(start + part, P)
    of_g = _gram_tile(
        g + example * stride_gb, stride_gt, rows, columns, T, start, stop,
        TILE, DEPTH, EVEN_P, PRECISION,
    )  # fmt: skip
    if LOOKUP:
        here = tl.load(ids + example * stride_ib + rows, mask=rows < T, other=-1)
        there = tl.load(ids + example * stride_ib + columns, mask=columns < T, other=-2)
        of_a = tl.where(here[:, None] == there[None, :], 1.0, 0.0)
    else:
        of_a = _gram_tile(
            a + example * stride_ab, stride_at, rows, columns, T, 0, D,
            TILE, DEPTH, EVEN_D, PRECISION,
        )  # fmt: skip
    twice = tl.where(i == j, 1.0, 2.0)  # the upper triangle mirrors the lower one
    share = tl.sum(tl.sum(of_a * of_g, 1), 0) * twice
    at = (example * tl.num_programs(0) + pair) * tl.num_programs(2) + chunk
    tl.store(out + at, share)


@torch.library.custom_op("tacit::gram_norms", mutates_args=())
def gram_norms(a: Tensor, g: Tensor) -> Tensor:
    """Squared norm (batch,) in float32 of each example's a'g; a (batch, T, D), g (batch, T, P)."""
    a, g = _rows(a), _rows(g)
    common = torch.promote_types(a.dtype, g.dtype)
    return _launch(a.to(common), g.to(common), None)


@gram_norms.register_fake
def _(a: Tensor, g: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], dtype=torch.float32)


@torch.library.custom_op("tacit::embedding_norms", mutates_args=())
def embedding_norms(ids: Tensor, g: Tensor) -> Tensor:
    """Squared norm (batch,) in float32 of each example's embedding gradient.

    ids (batch, T); g (batch, T, P). Rows of `g` that must not count (padding) are zero.
    """
    return _launch(g, _rows(g), ids.contiguous())


@embedding_norms.register_fake
def _(ids: Tensor, g: Tensor) -> Tensor:
    return g.new_empty(g.shape[0], dtype=torch.float32)


def _launch(a: Tensor, g: Tensor, ids: Tensor | None) -> Tensor:
    batch, T, P = g.shape
    D = 0 if ids is not None else a.shape[2]
    if D > P:  # split the wider side: the product is linear in either Gram matrix
        a, g, D, P = g, a, P, D
    tile, depth, warps, stages = _shape(T, g.element_size())
    tiles = triton.cdiv(T, tile)
    pairs = tiles * (tiles + 1) // 2
    chunks = _chunks(batch * pairs, D, P)
    part = triton.cdiv(triton.cdiv(P, chunks), depth) * depth
    chunks = triton.cdiv(P, part)
    out = torch.empty(batch, pairs, chunks, device=g.device, dtype=torch.float32)
    _gram_kernel[(pairs, batch, chunks)](
        a, g, g if ids is None else ids, out, T, D, P, part,
        a.stride(0), a.stride(1), g.stride(0), g.stride(1), 0 if ids is None else ids.stride(0),
        LOOKUP=ids is not None, TILE=tile, DEPTH=depth,
        EVEN_D=D % depth == 0, EVEN_P=P % depth == 0, PRECISION=precision(g),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out.sum((1, 2))


def precision(tensor: Tensor) -> str:
    """Three tf32 products for float32: plain tf32 is off by 1e-3, enough to pass the clip norm."""
    return "tf32x3" if tensor.dtype == torch.float32 else "tf32"


def tile_for(T: int, most: int) -> int:
    """A power of two that covers T if it can, at least 16 (the matrix unit's smallest side)."""
    return min(most, max(16, triton.next_power_of_2(T)))


def _shape(T: int, item_size: int) -> tuple[int, int, int, int]:
    tile = tile_for(T, 128)
    if item_size == 4:
        return min(tile, 64), 32, 4, 3
    return tile, 64, 8 if tile == 128 else 4, 3


def _chunks(programs: int, D: int, P: int) -> int:
    """Cut the long side while there are too few programs to fill the device, at some extra work."""
    chunks = 1
    while programs * chunks < _FILL and P // (chunks + 1) >= 4 * D:
        chunks += 1
    return chunks


_FILL = 264  # two programs for each of the 132 multiprocessors of an H100 or H200


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
