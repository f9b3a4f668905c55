"""Weighted sums and squared norms of formed per-example gradients, of any float dtype (Triton).

Plain torch would first copy all gradients to the dtype of the sum.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with CUDA builds of torch
import triton.language as tl  # pyright: ignore[reportMissingImports]  # as above
from torch import Tensor

from tacit.training.clipping.arithmetic import BLOCK


@triton.jit
def _weigh_kernel(
    values, factors, out, examples, size, part,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    chunk = tl.program_id(1)
    has_column = columns < size
    total = tl.zeros([ROWS, COLUMNS], dtype=out.dtype.element_ty)
    for at in range(chunk * part, tl.minimum((chunk + 1) * part, examples), ROWS):
        rows = at + tl.arange(0, ROWS)
        has_row = rows < tl.minimum((chunk + 1) * part, examples)
        factor = tl.load(factors + rows, mask=has_row, other=0.0)
        # A row of factor 0 is not read: if it is not finite, 0 times it would be nan.
        wanted = (factor != 0.0)[:, None] & has_column[None, :]
        place = values + rows.to(tl.int64)[:, None] * size + columns[None, :]
        total += tl.load(place, mask=wanted, other=0.0).to(out.dtype.element_ty) * factor[:, None]
    tl.store(out + chunk * size + columns, tl.sum(total, 0), mask=has_column)


@triton.jit
def _square_kernel(values, out, size, part, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the sum of squares of one part of a row."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    total = tl.zeros([BLOCKS], dtype=tl.float64)
    end = tl.minimum((chunk + 1) * part, size)
    inside = tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    for at in range(chunk * part, end, BLOCKS * BLOCK):
        columns = at + inside
        found = tl.load(values + row * size + columns, mask=columns < end, other=0.0)
        found = found.to(tl.float32)
        total += tl.sum(found * found, 1).to(tl.float64)
    tl.store(out + row * tl.num_programs(1) + chunk, tl.sum(total, 0))


@torch.library.custom_op("tacit::weighted_sum", mutates_args=())
def weighted_sum(values: Tensor, factors: Tensor, double: bool = False) -> Tensor:
    """Return the sum over examples i of factors[i] * values[i], shape (size,).

    It is added up in float64 if `double`, else in float32. `values` has shape (examples, size). A
    row of `values` whose factor is 0 adds exactly zero, even if it is not finite.
    """
    dtype = torch.float64 if double else torch.float32
    values, factors = values.contiguous(), factors.contiguous()  # the kernel requires it
    examples, size = values.shape
    columns = triton.cdiv(size, _COLUMNS)
    # Cut the examples into chunks until there are enough programs to fill the device.
    chunks = max(1, min(triton.cdiv(examples, 4 * _ROWS), _FILL // columns))
    part = triton.cdiv(triton.cdiv(examples, chunks), _ROWS) * _ROWS
    chunks = triton.cdiv(examples, part)
    out = torch.empty(chunks, size, device=values.device, dtype=dtype)
    _weigh_kernel[(columns, chunks)](  # pyright: ignore[reportIndexIssue]  # a Triton kernel
        values, factors.to(dtype), out, examples, size, part,
        ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out.sum(0)


@weighted_sum.register_fake
def _(values: Tensor, factors: Tensor, double: bool = False) -> Tensor:
    return values.new_empty(values.shape[1], dtype=torch.float64 if double else torch.float32)


@torch.library.custom_op("tacit::row_squares", mutates_args=())
def row_squares(values: Tensor) -> Tensor:
    """Return the sum of squares of each row of `values`, in float64.

    `arithmetic.BLOCK` squares at a time are added in float32, and their sums in float64.
    """
    values = values.contiguous()
    rows, size = values.shape
    tile = _BLOCKS * BLOCK
    part = triton.cdiv(triton.cdiv(size, max(1, _FILL // rows)), tile) * tile
    chunks = triton.cdiv(size, part)
    out = torch.empty(rows, chunks, device=values.device, dtype=torch.float64)
    _square_kernel[(rows, chunks)](  # pyright: ignore[reportIndexIssue]  # a Triton kernel
        values, out, size, part, BLOCKS=_BLOCKS, BLOCK=BLOCK, num_warps=4
    )
    return out.sum(1)


@row_squares.register_fake
def _(values: Tensor) -> Tensor:
    return values.new_empty(values.shape[0], dtype=torch.float64)


_ROWS, _COLUMNS = 8, 512
_BLOCKS = 16
_FILL = 1056  # programs: eight for each multiprocessor of an H200
