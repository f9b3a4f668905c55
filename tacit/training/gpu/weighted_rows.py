"""Weighted sums of per-example gradients that are kept in 16 bits, added up in float32 (Triton).

Plain torch would first copy all gradients to float32.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with CUDA builds of torch
import triton.language as tl  # pyright: ignore[reportMissingImports]  # as above
from torch import Tensor


@triton.jit
def _weigh_kernel(
    values, factors, out, examples, size, part,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    chunk = tl.program_id(1)
    has_column = columns < size
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for at in range(chunk * part, tl.minimum((chunk + 1) * part, examples), ROWS):
        rows = at + tl.arange(0, ROWS)
        has_row = rows < tl.minimum((chunk + 1) * part, examples)
        factor = tl.load(factors + rows, mask=has_row, other=0.0)
        # A row of factor 0 is not read: if it is not finite, 0 times it would be nan.
        wanted = (factor != 0.0)[:, None] & has_column[None, :]
        place = values + rows.to(tl.int64)[:, None] * size + columns[None, :]
        total += tl.load(place, mask=wanted, other=0.0).to(tl.float32) * factor[:, None]
    tl.store(out + chunk * size + columns, tl.sum(total, 0), mask=has_column)


@torch.library.custom_op("tacit::weighted_sum", mutates_args=())
def weighted_sum(values: Tensor, factors: Tensor) -> Tensor:
    """Return sum_i factors_i values_i in float32, shape (size,), of values (examples, size).

    A row whose factor is 0 adds exactly zero, even if it is not finite.
    """
    values, factors = values.contiguous(), factors.contiguous()  # the kernel requires it
    examples, size = values.shape
    columns = triton.cdiv(size, _COLUMNS)
    # Cut the examples into chunks until there are enough programs to fill the device.
    chunks = max(1, min(triton.cdiv(examples, 4 * _ROWS), _FILL // columns))
    part = triton.cdiv(triton.cdiv(examples, chunks), _ROWS) * _ROWS
    chunks = triton.cdiv(examples, part)
    out = torch.empty(chunks, size, device=values.device, dtype=torch.float32)
    _weigh_kernel[(columns, chunks)](  # pyright: ignore[reportIndexIssue]  # a Triton kernel
        values, factors.float(), out, examples, size, part,
        ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out.sum(0)


@weighted_sum.register_fake
def _(values: Tensor, factors: Tensor) -> Tensor:
    return values.new_empty(values.shape[1], dtype=torch.float32)


_ROWS, _COLUMNS = 8, 512
_FILL = 1056  # programs: eight for each multiprocessor of an H200
