"""Normalizations with a scale and a shift: layer, group, instance, RMS.

y = scale * xhat + shift, where xhat is computed within one example. The gradients are the sums of
g * xhat and of g over the positions of an example. They are small, so they are formed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.training.clip import accumulator
from tacit.training.gradients.factored import Dense, bias_gradient
from tacit.training.gradients.site import (
    Declined,
    Operation,
    Site,
    Unsupported,
    cast,
    channels_last,
    without_autocast,
)

aten = torch.ops.aten


def layer_norm(
    site: Site,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Compute `F.layer_norm`; its backward collects per-example gradients."""
    layout = site.require(input, weight, bias)
    if layout.dim >= input.dim() - len(normalized_shape):
        raise Declined  # the mean is taken over examples
    operation = _LayerNorm(site, weight, bias, eps, list(normalized_shape))
    return operation.apply(input, weight, bias)


def rms_norm(
    site: Site,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor,
    eps: float | None = None,
) -> Tensor:
    """Compute `F.rms_norm`; its backward collects per-example gradients."""
    layout = site.require(input, weight)
    if layout.dim >= input.dim() - len(normalized_shape):
        raise Declined
    normal = F.rms_norm(input, normalized_shape, None, eps)
    return _Scale(site, weight).apply(normal, weight)


def group_norm(
    site: Site,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Compute `F.group_norm`, channels on axis 1; its backward collects per-example gradients."""
    if site.require(input, weight, bias).dim != 0:
        raise Declined
    return _GroupNorm(site, weight, bias, eps, num_groups).apply(input, weight, bias)


def instance_norm(
    site: Site,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,  # noqa: ARG001  # of running statistics
    eps: float = 1e-5,
) -> Tensor:
    """Compute `F.instance_norm` as a group norm in which every channel is a group."""
    if running_mean is not None or running_var is not None or not use_input_stats:
        raise Unsupported("an instance norm with running statistics")
    return group_norm(site, input, input.shape[1], weight, bias, eps)


@dataclass
class _Norm(Operation):
    """Base of layer and group norm, whose torch functions also return mean and 1 / deviation."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def normalized(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any:
        if torch.is_autocast_enabled(x.device.type):
            self.dtype = accumulator(x.dtype)
        else:
            self.dtype = x.dtype if weight is None else weight.dtype
        weight, bias = cast(self.dtype, weight, bias)
        with without_autocast(x):
            y, mean, rstd = self.normalized(x.to(self.dtype), weight, bias)
        return y, (x, weight, mean, rstd)


@dataclass
class _LayerNorm(_Norm):
    shape: list[int]

    def normalized(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any:
        return torch.native_layer_norm(x, self.shape, weight, bias, self.eps)

    def backward(self, saved: Any, needs: Any, g: Tensor) -> tuple[Tensor, ...]:
        x, weight, mean, rstd = saved
        x = x.to(self.dtype)
        if self.site.is_shared(self.weight):
            products = torch.sub(x, mean).mul_(rstd).mul_(g)
            _collect_sum(self.site, self.weight, products, len(self.shape))
        _collect_sum(self.site, self.bias, g, len(self.shape))
        if not needs[0]:
            return ()
        mask = [True, False, False]
        grads = aten.native_layer_norm_backward(g, x, self.shape, mean, rstd, weight, None, mask)
        return grads[:1]


@dataclass
class _Scale(Operation):
    """The product of a normalized input with the weight of the norm, along the last axes."""

    weight: Tensor

    def forward(self, normal: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return normal * weight, (normal, weight)

    def backward(self, saved: Any, needs: Any, g: Tensor) -> tuple[Tensor, ...]:
        normal, weight = saved
        _collect_sum(self.site, self.weight, g * normal, weight.dim())
        return (g * weight,) if needs[0] else ()


@dataclass
class _GroupNorm(_Norm):
    groups: int

    def normalized(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any:
        x = _laid_out(x, like=x)
        return torch.native_group_norm(x, weight, bias, *_sizes(x), self.groups, self.eps)

    def backward(self, saved: Any, needs: Any, g: Tensor) -> tuple[Tensor, ...]:
        x, weight, mean, rstd = saved
        x = _laid_out(x.to(self.dtype), like=x)
        rows, channels, size = _sizes(x)
        shifts = g.reshape(rows, channels, -1).sum(2, dtype=accumulator(g.dtype))
        if self.site.is_shared(self.weight):
            # sum g * (x - mean) * rstd, without forming the normalized input
            products = (g * x).reshape(rows, channels, -1).sum(2, dtype=accumulator(g.dtype))
            spread = (rows, self.groups, channels // self.groups)
            mean_of, rstd_of = (
                s.view(rows, -1, 1).expand(spread).reshape(rows, channels) for s in (mean, rstd)
            )
            _collect_sum(self.site, self.weight, (products - mean_of * shifts) * rstd_of, 1)
        _collect_sum(self.site, self.bias, shifts, 1)
        if not needs[0]:
            return ()
        g = _laid_out(g.to(self.dtype), like=x)
        sizes = (rows, channels, size, self.groups, [True, False, False])
        return aten.native_group_norm_backward(g, x, mean, rstd, weight, *sizes)[:1]


def _collect_sum(site: Site, shared: Tensor | None, values: Tensor, features: int) -> None:
    """Sum `values` over each example's positions and collect the sums as gradients of `shared`.

    The last `features` axes of `values` are the axes of the parameter.
    """
    if shared is None or not site.is_shared(shared):
        return
    flat = values.flatten(values.dim() - features)
    rows = site.output.sequences(flat, site.examples)  # (examples, T, features)
    sums = bias_gradient(rows).values
    site.collect(shared, Dense(sums.reshape(site.examples, *shared.shape)))


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Return the numbers of rows, channels and positions of x, as torch's group norm takes them."""
    return x.shape[0], x.shape[1], math.prod(x.shape[2:])


def _laid_out(x: Tensor, *, like: Tensor) -> Tensor:
    """Return x in the memory format in which the group-norm kernel takes `like`.

    Input and output gradient must have the same format. A CPU's kernel takes channels last too, and
    so does the kernel that the compiler writes; torch's own kernel for GPUs takes contiguous
    tensors only.
    """
    takes_both = like.device.type == "cpu"
    if like.is_cuda:
        from tacit.training.gpu.available import is_traced

        takes_both = is_traced(like)
    if takes_both and like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last):
        return channels_last(x)
    return x.contiguous()
