"""Matrix products with a shared matrix: `linear`, `matmul`, `mm`, `addmm`.

y_t = W x_t + b over the positions t of an example, with output gradient g_t, has the gradients
sum_t g_t x_t' for W and sum_t g_t for b.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.training.clip import accumulator
from tacit.training.gradients.factored import Dense, Outer
from tacit.training.gradients.ghost_norm import squared_norm
from tacit.training.gradients.site import (
    Declined,
    Layout,
    Site,
    autocast,
    first_order,
    hidden,
    without_autocast,
)


def linear(
    site: Site,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    layout: Layout | None = None,
) -> Tensor:
    """Compute `F.linear`, weight (P, D); its backward collects per-example gradients.

    Other rules that call this one on an intermediate tensor give its `layout`.
    """
    if weight.dim() != 2:
        raise Declined
    return _apply(site, input, weight, bias, layout)


def matmul(site: Site, input: Tensor, other: Tensor) -> Tensor:
    """Compute `input @ other`, other (D, P); its backward collects per-example gradients."""
    if other.dim() != 2:
        raise Declined
    return _apply(site, input, other, None, transposed=True)


def addmm(site: Site, input: Tensor, mat1: Tensor, mat2: Tensor) -> Tensor:
    """Compute `input + mat1 @ mat2`; its backward collects per-example gradients.

    The bias (P,) and the matrix (D, P) are shared. Some GPT-2 models compute layers this way.
    """
    if input.dim() != 1 or input.shape[0] != mat2.shape[1]:
        raise Declined
    return _apply(site, mat1, mat2, input, transposed=True)


def bias_gradient(g: Tensor, squared: Tensor | None = None) -> Dense:
    """Return the gradients sum_t g_t of a bias, from g of shape (examples, T, P).

    `squared` is the squared norm of each g at T = 1, if it is known.
    """
    if g.shape[1] == 1:
        return Dense(g.squeeze(1), squared)
    return Dense(g.sum(1, dtype=accumulator(g.dtype)))


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
        raise Declined  # the examples are on the axis of the features
    call = _Call(site, layout, weight, bias, transposed)
    return _Linear.apply(site.anchor, x, weight.detach(), hidden(bias), call)


class _Call(NamedTuple):
    site: Site
    layout: Layout
    weight: Tensor
    bias: Tensor | None
    transposed: bool


class _Linear(torch.autograd.Function):
    """Matrix product whose backward returns the input gradient and collects the other two."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, call: Any
    ) -> Tensor:
        ctx.call, ctx.dtype = call, x.dtype
        x, weight, bias = autocast(x, weight, bias)
        ctx.save_for_backward(x, weight)
        with without_autocast(x):
            return F.linear(x, weight.t() if call.transposed else weight, bias)

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        site, layout, shared_weight, shared_bias, transposed = ctx.call
        left = layout.sequences(g, site.examples)  # (examples, T, P)
        squared = squared_norm(left) if left.shape[1] == 1 else None
        if site.is_shared(shared_weight):
            right = layout.sequences(x, site.examples)  # (examples, T, D)
            outer = Outer(left, right, left_squared=squared)
            site.collect(shared_weight, outer.transposed() if transposed else outer)
        if site.is_shared(shared_bias):
            site.collect(shared_bias, bias_gradient(left, squared))
        gx = None
        if ctx.needs_input_grad[1]:
            flat = g.reshape(-1, g.shape[-1]) @ (weight.t() if transposed else weight)
            gx = flat.view(x.shape).to(ctx.dtype)
        return None, gx, None, None, None
