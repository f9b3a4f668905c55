"""Matrix products with a shared matrix: `linear`, `matmul`, `mm`, `addmm`.

y_t = W x_t + b over the positions t of an example, with output gradient g_t, has the gradients
sum_t g_t x_t' for W and sum_t g_t for b.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from tacit.training.gradients.factored import Outer, bias_gradient
from tacit.training.gradients.ghost_norm import squared_norm
from tacit.training.gradients.site import (
    Declined,
    Layout,
    Operation,
    Site,
    autocast,
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

    `layout` is the layout of `input` if `input` is not an argument of the site's call but an
    intermediate tensor of another rule.
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

    The bias `input` (P,) and the matrix `mat2` (D, P) are shared; `mat1` holds the examples. Some
    GPT-2 models compute layers this way.
    """
    if input.dim() != 1 or input.shape[0] != mat2.shape[1]:
        raise Declined
    return _apply(site, mat1, mat2, input, transposed=True)


@dataclass
class _Product(Operation):
    """The product x W' + b with a weight W (P, D), or x W + b with W (D, P) if `transposed`."""

    layout: Layout
    weight: Tensor
    bias: Tensor | None
    transposed: bool

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        x, weight, bias = autocast(x, weight, bias)
        with without_autocast(x):
            matrix = weight.t() if self.transposed else weight
            if bias is None or x.dim() <= 2:
                return F.linear(x, matrix, bias), (x, weight)
            # With a bias and three axes, F.linear returns a view. Autograd lets nobody write into a
            # view that a custom Function returns, as ReLU in place does.
            return F.linear(x, matrix).add_(bias), (x, weight)

    def backward(self, saved: Any, needs: Any, g: Tensor) -> tuple[Tensor, ...]:
        x, weight = saved
        site = self.site
        left = self.layout.sequences(g, site.examples)  # (examples, T, P)
        squared = squared_norm(left) if left.shape[1] == 1 else None
        if site.is_shared(self.weight):
            right = self.layout.sequences(x, site.examples)  # (examples, T, D)
            outer = Outer(left, right, left_squared=squared)
            site.collect(self.weight, outer.transposed() if self.transposed else outer)
        if self.bias is not None and site.is_shared(self.bias):
            site.collect(self.bias, bias_gradient(left, squared))
        if not needs[0]:
            return ()
        flat = g.reshape(-1, g.shape[-1]) @ (weight.t() if self.transposed else weight)
        return (flat.view(x.shape),)


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
    return _Product(site, layout, weight, bias, transposed).apply(x, weight, bias)
