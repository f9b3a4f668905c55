"""Normalizations with a scale and a shift: layer, group, instance, RMS.

y = scale * xhat + shift, where xhat is computed within one example. The gradients are the sums of
g * xhat and of g over the positions of an example. They are small, so they are formed.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.training.clip import accumulator
from tacit.training.gradients.factored import Dense
from tacit.training.gradients.site import (
    Declined,
    Site,
    Unsupported,
    cast,
    first_order,
    hidden,
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
    call = (site, weight, bias, list(normalized_shape), eps)
    return _LayerNorm.apply(site.anchor, input, hidden(weight), hidden(bias), call)


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
    return _Scale.apply(site.anchor, normal, weight.detach(), (site, weight))


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
    call = (site, weight, bias, num_groups, eps)
    return _GroupNorm.apply(site.anchor, input, hidden(weight), hidden(bias), call)


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


def _compute_dtype(x: Tensor, weight: Tensor | None) -> torch.dtype:
    """Return the dtype in which a normalization runs; under autocast that is at least float32."""
    if torch.is_autocast_enabled(x.device.type):
        return accumulator(x.dtype)
    return x.dtype if weight is None else weight.dtype


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, call: Any
    ) -> Tensor:
        dtype = _compute_dtype(x, weight)
        weight, bias = cast(dtype, weight, bias)
        *_, shape, eps = call
        with without_autocast(x):
            y, mean, rstd = torch.native_layer_norm(x.to(dtype), shape, weight, bias, eps)
        ctx.call, ctx.dtype = call, dtype
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        site, shared_weight, shared_bias, shape, _ = ctx.call
        wide = x.to(ctx.dtype)
        if site.is_shared(shared_weight):
            _collect_sum(site, shared_weight, g * ((wide - mean) * rstd), len(shape))
        if site.is_shared(shared_bias):
            _collect_sum(site, shared_bias, g, len(shape))
        gx = None
        if ctx.needs_input_grad[1]:
            grads = aten.native_layer_norm_backward(
                g, wide, shape, mean, rstd, weight, None, [True, False, False]
            )
            gx = grads[0].to(x.dtype)
        return None, gx, None, None, None


class _Scale(torch.autograd.Function):
    """normal * weight over the last axes."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, normal: Tensor, weight: Tensor, call: Any) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(normal, weight)
        return normal * weight

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> Any:
        normal, weight = ctx.saved_tensors
        site, shared = ctx.call
        _collect_sum(site, shared, g * normal, weight.dim())
        gx = (g * weight).to(normal.dtype) if ctx.needs_input_grad[1] else None
        return None, gx, None, None


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, call: Any
    ) -> Tensor:
        dtype = _compute_dtype(x, weight)
        weight, bias = cast(dtype, weight, bias)
        *_, groups, eps = call
        with without_autocast(x):
            y, mean, rstd = torch.native_group_norm(
                _packed(x.to(dtype)), weight, bias, *_sizes(x), groups, eps
            )
        ctx.call, ctx.dtype = call, dtype
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        site, shared_weight, shared_bias, groups, _ = ctx.call
        rows, channels, size = _sizes(x)
        wide = _packed(x.to(ctx.dtype))
        shifts = g.flatten(2).sum(2, dtype=accumulator(g.dtype))  # (rows, channels)
        if site.is_shared(shared_weight):
            # sum g * (x - mean) * rstd, without forming the normalized input
            products = (g * wide).flatten(2).sum(2, dtype=accumulator(g.dtype))
            spread = (rows, groups, channels // groups)
            mean_of, rstd_of = (
                s.view(rows, groups, 1).expand(spread).reshape(rows, channels) for s in (mean, rstd)
            )
            _collect_sum(site, shared_weight, (products - mean_of * shifts) * rstd_of, 1)
        if site.is_shared(shared_bias):
            _collect_sum(site, shared_bias, shifts, 1)
        gx = None
        if ctx.needs_input_grad[1]:
            g = g.to(ctx.dtype).contiguous(memory_format=_memory_format(wide))
            grads = aten.native_group_norm_backward(
                g, wide, mean, rstd, weight, rows, channels, size, groups, [True, False, False]
            )
            gx = grads[0].to(x.dtype)
        return None, gx, None, None, None


def _collect_sum(site: Site, shared: Tensor, values: Tensor, features: int) -> None:
    """Collect the sums over positions; the last `features` axes are those of the parameter."""
    flat = values.flatten(values.dim() - features)
    rows = site.output.sequences(flat, site.examples)  # (examples, T, features)
    if rows.shape[1] > 1:
        rows = rows.sum(1, dtype=accumulator(rows.dtype))
    site.collect(shared, Dense(rows.reshape(site.examples, *shared.shape)))


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Return the numbers of rows, channels and positions."""
    return x.shape[0], x.shape[1], math.prod(x.shape[2:])


def _packed(x: Tensor) -> Tensor:
    """Return the tensor contiguous in a memory format that the kernel takes."""
    return x.contiguous(memory_format=_memory_format(x))


def _memory_format(x: Tensor) -> torch.memory_format:
    """Return the memory format in which the kernel takes its input and its gradient.

    Both must have the same format. A CPU's kernel takes channels last too, and so does the kernel
    that the compiler writes; torch's own kernel for GPUs takes contiguous tensors only.
    """
    is_channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    if is_channels_last and (x.device.type == "cpu" or _is_traced(x)):
        return torch.channels_last
    return torch.contiguous_format


def _is_traced(x: Tensor) -> bool:
    if not x.is_cuda:
        return False
    from tacit.training import gpu

    return gpu.is_traced(x)
