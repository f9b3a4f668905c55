"""Normalizations with a scale and a shift: layer, group, instance, RMS.

y = scale * xhat + shift, where xhat is computed within one example. The gradients are the sums of
g * xhat and of g over the positions of an example: one number per scale, so they are formed.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import functional as F

from tacit.training.gradients.factored import Dense
from tacit.training.gradients.site import (
    Declined,
    Site,
    Unsupported,
    first_order,
    outside_autocast,
)
from tacit.training.sums import accumulator

aten = torch.ops.aten


def layer_norm(
    site: Site,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.layer_norm`."""
    layout = site.require(input, weight, bias)
    if layout.dim >= input.dim() - len(normalized_shape):
        raise Declined  # the examples are normalized over
    call = (site, weight, bias, list(normalized_shape), eps)
    return _LayerNorm.apply(site.anchor, input, _hidden(weight), _hidden(bias), call)


def rms_norm(
    site: Site,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor,
    eps: float | None = None,
) -> Tensor:
    """`torch.nn.functional.rms_norm`."""
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
    """`torch.nn.functional.group_norm`; channels on axis 1."""
    if site.require(input, weight, bias).dim != 0:
        raise Declined
    call = (site, weight, bias, num_groups, eps)
    return _GroupNorm.apply(site.anchor, input, _hidden(weight), _hidden(bias), call)


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
    """`torch.nn.functional.instance_norm`: a group norm with one channel in each group."""
    if running_mean is not None or running_var is not None or not use_input_stats:
        raise Unsupported("an instance norm with running statistics")
    return group_norm(site, input, input.shape[1], weight, bias, eps)


def _hidden(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def _compute_dtype(x: Tensor, weight: Tensor | None) -> torch.dtype:
    """Autocast runs normalizations in float32."""
    if torch.is_autocast_enabled(x.device.type):
        return accumulator(x.dtype)
    return x.dtype if weight is None else weight.dtype


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, call: Any
    ) -> Tensor:
        dtype = _compute_dtype(x, weight)
        weight = None if weight is None else weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        with outside_autocast(x):
            y, mean, rstd = torch.native_layer_norm(x.to(dtype), call[3], weight, bias, call[4])
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
            _record_sum(site, shared_weight, g * ((wide - mean) * rstd), len(shape))
        if site.is_shared(shared_bias):
            _record_sum(site, shared_bias, g, len(shape))
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
        _record_sum(site, shared, g * normal, weight.dim())
        gx = (g * weight).to(normal.dtype) if ctx.needs_input_grad[1] else None
        return None, gx, None, None


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, call: Any
    ) -> Tensor:
        dtype = _compute_dtype(x, weight)
        weight = None if weight is None else weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        rows, channels, size = _sizes(x)
        with outside_autocast(x):
            y, mean, rstd = torch.native_group_norm(
                _dense(x.to(dtype)), weight, bias, rows, channels, size, call[3], call[4]
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
        wide = _dense(x.to(ctx.dtype))
        shifts = g.flatten(2).sum(2, dtype=accumulator(g.dtype))  # (rows, channels)
        if site.is_shared(shared_weight):
            # sum g * (x - mean) * rstd, without forming the normalized input
            products = (g * wide).flatten(2).sum(2, dtype=accumulator(g.dtype))
            spread = (rows, groups, channels // groups)
            mean_of, rstd_of = (
                s.view(rows, groups, 1).expand(spread).reshape(rows, channels) for s in (mean, rstd)
            )
            _record_sum(site, shared_weight, (products - mean_of * shifts) * rstd_of, 1)
        if site.is_shared(shared_bias):
            _record_sum(site, shared_bias, shifts, 1)
        gx = None
        if ctx.needs_input_grad[1]:
            g = g.to(ctx.dtype).contiguous(memory_format=_memory_format(wide))
            grads = aten.native_group_norm_backward(
                g, wide, mean, rstd, weight, rows, channels, size, groups, [True, False, False]
            )
            gx = grads[0].to(x.dtype)
        return None, gx, None, None, None


def _record_sum(site: Site, shared: Tensor, values: Tensor, features: int) -> None:
    """Records the sums over positions; the last `features` axes are those of the parameter."""
    flat = values.flatten(values.dim() - features)
    rows = site.output.sequences(flat, site.examples)  # (examples, T, features)
    if rows.shape[1] > 1:
        rows = rows.sum(1, dtype=accumulator(rows.dtype))
    site.record(shared, Dense(rows.reshape(site.examples, *shared.shape)))


def _sizes(x: Tensor) -> tuple[int, int, int]:
    return x.shape[0], x.shape[1], math.prod(x.shape[2:])


def _memory_format(x: Tensor) -> torch.memory_format:
    """The kernel wants the gradient in the memory format its forward saw.

    A GPU's takes contiguous tensors only; the compiler writes its own, for any format.
    """
    takes_any = x.device.type == "cpu" or isinstance(x, FakeTensor)
    if takes_any and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def _dense(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=_memory_format(x))
