"""All time steps of an LSTM layer in one launch, forward and backward (Triton).

Step by step, each product and each cell is a launch of its own that waits for the one before it,
and a graph of hundreds of short launches takes longer than their work. Here a program takes a few
rows through all time steps: rows do not depend on each other. Products are rounded to TF32, as in
cuDNN's own layers; `gradients.recurrent` has the formulas.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with CUDA builds of torch
import triton.language as tl  # pyright: ignore[reportMissingImports]  # as above
from torch import Tensor

_ROWS = 16  # of a program: the fewest that a matrix product can have
_MANY = 2048  # rows from which on a program takes twice as many, since weights are read for each
_WIDEST = 128  # state: each program reads all weights at each step, which large ones do not repay
_WARPS = 8


def supports(zx: Tensor, w_hh: Tensor) -> bool:
    """Return True if `lstm_forward` takes such tensors: float32, narrow, on a GPU with TF32."""
    is_float = zx.dtype == w_hh.dtype == torch.float32
    is_small = 0 < w_hh.shape[1] <= _WIDEST and min(zx.shape) > 0
    return is_float and is_small and torch.cuda.get_device_capability(zx.device) >= (8, 0)


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _forward_kernel(
    zx, w, b, hs, cs, gates, steps, rows, of_step, of_row,
    HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Take some rows through all steps; `of_step` and `of_row` are the strides of `zx`."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    for number in range(steps):
        t = number + tl.zeros_like(row)  # in 64 bits, as all places are
        before, after = t * rows + row, (t + 1) * rows + row
        for start in tl.static_range(0, WIDTH, COLUMNS):
            n = (start + tl.arange(0, COLUMNS))[None, :]
            inside = (row < rows) & (n < WIDTH)
            z = zx + t * of_step + row * of_row + n
            zi, zf = tl.load(z, inside, 0.0), tl.load(z + WIDTH, inside, 0.0)
            zg, zo = tl.load(z + 2 * WIDTH, inside, 0.0), tl.load(z + 3 * WIDTH, inside, 0.0)
            if HAS_BIAS:
                known = n < WIDTH
                zi, zf = zi + tl.load(b + n, known, 0.0), zf + tl.load(b + WIDTH + n, known, 0.0)
                zg += tl.load(b + 2 * WIDTH + n, known, 0.0)
                zo += tl.load(b + 3 * WIDTH + n, known, 0.0)
            for deep in range(0, WIDTH, DEPTH):
                k = deep + tl.arange(0, DEPTH)
                h = tl.load(
                    hs + before * WIDTH + k[None, :], (row < rows) & (k < WIDTH)[None, :], 0.0
                )
                place = w + n * WIDTH + k[:, None]
                has = (k < WIDTH)[:, None] & (n < WIDTH)
                zi = tl.dot(h, tl.load(place, has, 0.0), zi)
                zf = tl.dot(h, tl.load(place + WIDTH * WIDTH, has, 0.0), zf)
                zg = tl.dot(h, tl.load(place + 2 * WIDTH * WIDTH, has, 0.0), zg)
                zo = tl.dot(h, tl.load(place + 3 * WIDTH * WIDTH, has, 0.0), zo)
            i, f, g, o = tl.sigmoid(zi), tl.sigmoid(zf), _tanh(zg), tl.sigmoid(zo)
            c = f * tl.load(cs + before * WIDTH + n, inside, 0.0) + i * g
            kept = gates + before * 4 * WIDTH + n
            tl.store(kept, i, inside)
            tl.store(kept + WIDTH, f, inside)
            tl.store(kept + 2 * WIDTH, g, inside)
            tl.store(kept + 3 * WIDTH, o, inside)
            tl.store(cs + after * WIDTH + n, c, inside)
            tl.store(hs + after * WIDTH + n, o * _tanh(c), inside)
        tl.debug_barrier()  # the next step reads what other threads of this program have written


@triton.jit
def _backward_kernel(
    grad, dh, dc, cs, gates, w, dz, steps, rows, of_step, of_row,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Take some rows back through all steps; `of_step` and `of_row` are the strides of `grad`.

    `dh` and `dc` are the gradients of the last state, and those of the first one in the end.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    for number in range(steps):
        t = steps - 1 - number + tl.zeros_like(row)
        before, after = t * rows + row, (t + 1) * rows + row
        for start in tl.static_range(0, WIDTH, COLUMNS):
            n = (start + tl.arange(0, COLUMNS))[None, :]
            inside = (row < rows) & (n < WIDTH)
            kept = gates + before * 4 * WIDTH + n
            i, f = tl.load(kept, inside, 0.0), tl.load(kept + WIDTH, inside, 0.0)
            g, o = tl.load(kept + 2 * WIDTH, inside, 0.0), tl.load(kept + 3 * WIDTH, inside, 0.0)
            of_h = tl.load(grad + t * of_step + row * of_row + n, inside, 0.0)
            of_h += tl.load(dh + row * WIDTH + n, inside, 0.0)
            c = _tanh(tl.load(cs + after * WIDTH + n, inside, 0.0))
            of_c = tl.load(dc + row * WIDTH + n, inside, 0.0) + of_h * o * (1.0 - c * c)
            first = tl.load(cs + before * WIDTH + n, inside, 0.0)
            found = dz + before * 4 * WIDTH + n
            tl.store(found, of_c * g * i * (1.0 - i), inside)
            tl.store(found + WIDTH, of_c * first * f * (1.0 - f), inside)
            tl.store(found + 2 * WIDTH, of_c * i * (1.0 - g * g), inside)
            tl.store(found + 3 * WIDTH, of_h * c * o * (1.0 - o), inside)
            tl.store(dc + row * WIDTH + n, of_c * f, inside)
        tl.debug_barrier()  # the product reads the gradients of all gates
        for start in tl.static_range(0, WIDTH, COLUMNS):
            n = (start + tl.arange(0, COLUMNS))[None, :]
            total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
            for deep in range(0, 4 * WIDTH, DEPTH):
                k = deep + tl.arange(0, DEPTH)
                has = (row < rows) & (k < 4 * WIDTH)[None, :]
                left = tl.load(dz + before * 4 * WIDTH + k[None, :], has, 0.0)
                has = (k < 4 * WIDTH)[:, None] & (n < WIDTH)
                total = tl.dot(left, tl.load(w + k[:, None] * WIDTH + n, has, 0.0), total)
            tl.store(dh + row * WIDTH + n, total, (row < rows) & (n < WIDTH))
        tl.debug_barrier()  # and the step before reads the gradient of its state


def lstm_forward(
    zx: Tensor, state: list[Tensor], w_hh: Tensor, b_hh: Tensor | None
) -> list[Tensor]:
    """Return the states h and c before each step and after the last, and the gates of each step.

    `zx`, of shape (time, rows, 4 * width), holds the terms of the gates from the input.
    """
    steps, rows, width = zx.shape[0], zx.shape[1], w_hh.shape[1]
    zx, w_hh = _with_whole_rows(zx), w_hh.contiguous()
    hs, cs = (zx.new_empty(steps + 1, rows, width) for _ in range(2))
    for states, first in zip((hs, cs), state, strict=True):
        states[0].copy_(first)
    gates = zx.new_empty(steps, rows, 4 * width)
    block = _rows(rows)
    _forward_kernel[(triton.cdiv(rows, block),)](  # pyright: ignore[reportIndexIssue]  # a Triton kernel
        zx, w_hh, w_hh if b_hh is None else b_hh.contiguous(), hs, cs, gates, steps, rows,
        zx.stride(0), zx.stride(1), HAS_BIAS=b_hh is not None, WIDTH=width, ROWS=block,
        COLUMNS=_columns(width), DEPTH=32, num_warps=_WARPS, num_stages=2,
    )  # fmt: skip
    return [hs, cs, gates]


def lstm_backward(
    grad: Tensor, state: list[Tensor], cs: Tensor, gates: Tensor, w_hh: Tensor
) -> list[Tensor]:
    """Return the gradients of the gates' arguments and of the first state h and c.

    `grad` is the gradient of the outputs and `state` that of the last state; the others are those
    of `lstm_forward`.
    """
    steps, rows, width = grad.shape
    grad, w_hh, gates = _with_whole_rows(grad), w_hh.contiguous(), gates.contiguous()
    dh, dc = (torch.clone(s, memory_format=torch.contiguous_format) for s in state)
    dz = torch.empty_like(gates)
    block = _rows(rows)
    _backward_kernel[(triton.cdiv(rows, block),)](  # pyright: ignore[reportIndexIssue]  # a Triton kernel
        grad, dh, dc, cs.contiguous(), gates, w_hh, dz, steps, rows, grad.stride(0),
        grad.stride(1), WIDTH=width, ROWS=block, COLUMNS=_columns(width), DEPTH=64,
        num_warps=_WARPS, num_stages=3,
    )  # fmt: skip
    return [dz, dh, dc]


def _with_whole_rows(tensor: Tensor) -> Tensor:
    """Return the tensor with the numbers of a row next to each other."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _rows(rows: int) -> int:
    return _ROWS if rows <= _MANY else 2 * _ROWS


def _columns(width: int) -> int:
    """Return how many entries of the state are computed at once: a power of two."""
    return min(_WIDEST, max(16, triton.next_power_of_2(width)))
