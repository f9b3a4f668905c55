"""Convolutions in 1, 2 and 3 dimensions, plain and transposed, with groups and dilation.

Padding modes other than zeros pad before the call and need no rule.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.training.gradients.convolved import Convolved, Geometry
from tacit.training.gradients.linear import bias_piece
from tacit.training.gradients.site import (
    Declined,
    Site,
    autocast_dtype,
    first_order,
    outside_autocast,
)
from tacit.training.sums import accumulator

Size = int | Sequence[int]
aten = torch.ops.aten


def convolution(
    site: Site,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Tensor:
    """`conv1d`, `conv2d`, `conv3d`."""
    _require_batch(site, input, weight, bias)
    count = weight.dim() - 2
    dilation = _tuple(dilation, count)
    padded = input
    if isinstance(padding, str):
        padded, padding = _same(input, weight, dilation, padding)
    zeros = [0] * count
    spans = (_tuple(stride, count), _tuple(padding, count), dilation)
    geometry = Geometry(tuple(weight.shape[2:]), *spans, False, zeros, groups)
    return _apply(site, padded, weight, bias, geometry)


def transposed_convolution(
    site: Site,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
) -> Tensor:
    """`conv_transpose1d`, `conv_transpose2d`, `conv_transpose3d`."""
    _require_batch(site, input, weight, bias)
    count = weight.dim() - 2
    spans = (_tuple(stride, count), _tuple(padding, count), _tuple(dilation, count))
    extra = _tuple(output_padding, count)
    geometry = Geometry(tuple(weight.shape[2:]), *spans, True, extra, groups)
    return _apply(site, input, weight, bias, geometry)


def _require_batch(site: Site, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    layout = site.require(x, weight, bias)
    if layout.dim != 0 or not layout.outermost or x.dim() != weight.dim():
        raise Declined


def _tuple(value: Size, count: int) -> list[int]:
    sizes = [value] if isinstance(value, int) else list(value)
    return sizes * count if len(sizes) == 1 else sizes


def _same(x: Tensor, weight: Tensor, dilation: list[int], mode: str) -> tuple[Tensor, Size]:
    """Padding "same" puts the odd cell on the right, which only explicit padding can do."""
    if mode == "valid":
        return x, 0
    cells: list[int] = []
    for kernel, step in zip(reversed(weight.shape[2:]), reversed(dilation), strict=True):
        total = step * (kernel - 1)
        cells += [total // 2, total - total // 2]
    if cells[::2] == cells[1::2]:
        return x, cells[::-2]
    return F.pad(x, cells), 0


def _apply(
    site: Site, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    hidden = None if bias is None else bias.detach()
    return _Convolution.apply(
        site.anchor, x, weight.detach(), hidden, (site, weight, bias, geometry)
    )


class _Convolution(torch.autograd.Function):
    """Convolution whose backward gives the input gradient only and records the rest."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, call: Any
    ) -> Tensor:
        dtype = autocast_dtype(x)
        ctx.call, ctx.dtype = call, x.dtype
        x, weight = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(x, weight)
        bias = None if bias is None else bias.to(dtype)
        with outside_autocast(x):
            return torch.convolution(x, weight, bias, *call[3].arguments)

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        site, shared_weight, shared_bias, geometry = ctx.call
        if site.is_shared(shared_weight):
            site.record(shared_weight, Convolved(x, g, weight, geometry, site.examples))
        if site.is_shared(shared_bias):
            rows = g.flatten(2).sum(2, dtype=accumulator(g.dtype))  # (rows, channels)
            site.record(shared_bias, bias_piece(rows.view(site.examples, -1, rows.shape[1])))
        gx = None
        if ctx.needs_input_grad[1]:
            mask = [True, False, False]
            grads = aten.convolution_backward(g, x, weight, None, *geometry.arguments, mask)
            gx = grads[0].to(ctx.dtype)
        return None, gx, None, None, None
