"""Matrix products with a shared matrix: `linear`, `matmul`, `mm`, `addmm`.

y_t = W x_t + b over the positions t of an example, with output gradient g_t, has the gradients
sum_t g_t x_t' for W and sum_t g_t for b.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.training.gradients.factored import Dense, Outer, squared_norm
from tacit.training.gradients.site import (
    Declined,
    Layout,
    Site,
    autocast_dtype,
    first_order,
    outside_autocast,
)
from tacit.training.sums import accumulator


def linear(
    site: Site,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    layout: Layout | None = None,
) -> Tensor:
    """`torch.nn.functional.linear`: weight (P, D).

    `layout` is for rules that call this one on a tensor of their own.
    """
    if weight.dim() != 2:
        raise Declined
    return _apply(site, input, weight, bias, layout)


def matmul(site: Site, input: Tensor, other: Tensor) -> Tensor:
    """`input @ other` with a shared matrix (D, P) on the right."""
    if other.dim() != 2:
        raise Declined
    return _apply(site, input, other, None, transposed=True)


def addmm(site: Site, input: Tensor, mat1: Tensor, mat2: Tensor) -> Tensor:
    """`input + mat1 @ mat2` with a shared bias (P,) and matrix (D, P), as some GPT-2 layers do."""
    if input.dim() != 1 or input.shape[0] != mat2.shape[1]:
        raise Declined
    return _apply(site, mat1, mat2, input, transposed=True)


def _apply(
    site: Site,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layout: Layout | None = None,
    *,
    transposed: bool = False,
) -> Tensor:
    layout = site.require(x, weight, bias) if layout is None else layout
    if layout.dim == x.dim() - 1:
        raise Declined  # the examples are the features
    hidden = None if bias is None else bias.detach()
    call = (site, layout, weight, bias, transposed)
    return _Linear.apply(site.anchor, x, weight.detach(), hidden, call)


class _Linear(torch.autograd.Function):
    """Product whose backward gives the input gradient only and records the rest."""

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
            return F.linear(x, weight.t() if call[4] else weight, bias)

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        site, layout, shared_weight, shared_bias, transposed = ctx.call
        _record(site, layout, x, g, shared_weight, shared_bias, transposed)
        gx = None
        if ctx.needs_input_grad[1]:
            flat = g.reshape(-1, g.shape[-1]) @ (weight.t() if transposed else weight)
            gx = flat.view(x.shape).to(ctx.dtype)
        return None, gx, None, None, None


def _record(
    site: Site,
    layout: Layout,
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transposed: bool,
) -> None:
    g = layout.sequences(g, site.examples)  # (examples, T, P)
    squared = squared_norm(g) if g.shape[1] == 1 else None
    if site.is_shared(weight):
        x = layout.sequences(x, site.examples)
        if transposed:
            site.record(weight, Outer(x, g, right_squared=squared))
        else:
            site.record(weight, Outer(g, x, left_squared=squared))
    if bias is not None and site.is_shared(bias):
        site.record(bias, bias_piece(g, squared))


def bias_piece(g: Tensor, squared: Tensor | None = None) -> Dense:
    """Gradients sum_t g_t of a bias, from (examples, T, P)."""
    if g.shape[1] == 1:
        return Dense(g.squeeze(1), squared)
    return Dense(g.sum(1, dtype=accumulator(g.dtype)))
