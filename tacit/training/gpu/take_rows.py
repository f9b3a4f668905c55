"""Rows of a tensor copied into a batch of fixed size, with zeros after the last one (Triton).

Plain torch takes five launches for the rows, the mask and the zeros, which a small model's step
notices.
"""

import triton  # pyright: ignore[reportMissingImports]  # comes with CUDA builds of torch
import triton.language as tl  # pyright: ignore[reportMissingImports]  # as above
from torch import Tensor, int16, int32, int64, uint8

_BLOCK = 1024
_WORDS = {1: uint8, 2: int16, 4: int32, 8: int64}  # by bytes


@triton.jit
def _take_kernel(
    data, wanted, target, mask, rows, width, size, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr
):
    """Fill one block of the target. `wanted` holds numbers of rows, then how many there are."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = at // width
    count = tl.load(wanted + rows)
    is_drawn = (at < size) & (row < count)
    source = tl.load(wanted + row, mask=is_drawn, other=0) * width + at % width
    tl.store(target + at, tl.load(data + source, mask=is_drawn, other=0), mask=at < size)
    if HAS_MASK:
        tl.store(mask + at, (at < count).to(tl.uint8), mask=at < rows)


def takes(data: Tensor) -> bool:
    """Return True if `take_rows` supports this tensor: contiguous, of at most 8 bytes a number."""
    return data.is_contiguous() and data.itemsize in _WORDS and data[:1].numel() > 0


def take_rows(data: Tensor, wanted: Tensor, target: Tensor, mask: Tensor | None) -> None:
    """Copy rows of `data` into `target`, which has room for a fixed number of rows.

    `wanted` holds as many numbers of rows as there is room for, and then how many of them count:
    the others become rows of zeros. `mask`, if it is given, becomes True for the rows that count.
    """
    words, rows = _WORDS[data.itemsize], target.shape[0]
    size = target.numel()
    marks = target.view(words) if mask is None else mask.view(uint8)
    _take_kernel[(triton.cdiv(size, _BLOCK),)](  # pyright: ignore[reportIndexIssue]  # a Triton kernel
        data.view(words), wanted, target.view(words), marks, rows, size // rows, size,
        HAS_MASK=mask is not None, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
