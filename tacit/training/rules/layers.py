"""Layer rules: how an operator with parameters is computed, and its per-example gradients.

A rule takes the arguments of its operator: stacked examples, and shared values (parameters, or
computed from them). It computes the result by torch's own operators from shared values without
their history, so that autograd passes gradients to the examples alone. And it says what the
gradients of the shared values are for each example, once the gradient g of the result is known
(`MappedTape.site`). Each is a sum over the positions of that example, which are axes behind the
first one; no rule adds along the first.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.training.clip import accumulator
from tacit.training.rules.convolution import Convolved, geometry_of
from tacit.training.rules.factored import Dense, Outer, TableRows, bias_gradient
from tacit.training.rules.ghost_norm import squared_norm
from tacit.training.rules.operands import (
    Declined,
    autocast,
    cast,
    channels_last,
    without_autocast,
)

# Products -----------------------------------------------------------------------------------------


def linear(
    tape: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False
) -> Tensor:
    """Compute x W' + b for W (P, D), or x W + b for W (D, P) if `transposed`.

    The gradients are the sums of g x' for W (P, D), and of g for b.
    """
    if weight.dim() != 2 or x.dim() < 2:
        raise Declined
    x, w, b = autocast(x, *tape.plain(weight, bias))
    matrix = w.t() if transposed else w

    def collect(g: Tensor) -> None:
        left = g.reshape(len(x), -1, g.shape[-1])  # (examples, T, P)
        is_row = left.shape[1] == 1 and not tape.is_small(weight)
        squared = squared_norm(left) if is_row else None  # for weight and bias
        if tape.is_shared(weight):
            outer = Outer(left, x.reshape(len(x), -1, x.shape[-1]), left_squared=squared)
            tape.add(weight, outer.transposed() if transposed else outer)
        if tape.is_shared(bias):
            tape.add(bias, bias_gradient(left, squared))

    with without_autocast(x):
        return tape.site(lambda: F.linear(x, matrix, b), x, collect)


def matmul(tape: Any, x: Tensor, weight: Tensor) -> Tensor:
    return linear(tape, x, weight, transposed=True)


def addmm(tape: Any, bias: Tensor, x: Tensor, weight: Tensor, **factors: Any) -> Tensor:
    is_row = bias.dim() == 1 and bias.shape[0] == weight.shape[1]
    if not is_row or any(factor != 1 for factor in factors.values()):
        raise Declined
    return linear(tape, x, weight, bias, transposed=True)


# Tables -------------------------------------------------------------------------------------------


def embedding(
    tape: Any,
    table: Tensor,
    ids: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,  # noqa: ARG001  # the sum is dense: every row receives noise
) -> Tensor:
    if scale_grad_by_freq:
        raise Declined
    return rows_of(tape, ids, table, padding_idx)


def rows_of(tape: Any, ids: Tensor, table: Tensor, padding_idx: int = -1) -> Tensor:
    """Return the rows `ids` of a table; row `padding_idx` receives no gradient."""
    (plain,) = tape.plain(table)

    def collect(g: Tensor) -> None:
        if padding_idx >= 0:
            g = torch.where((ids == padding_idx).unsqueeze(-1), 0.0, g)
        values = g.reshape(len(ids), -1, table.shape[1])
        tape.add(table, TableRows(ids.long().reshape(len(ids), -1), values, table.shape[0]))

    return tape.site(lambda: F.embedding(ids, plain), None, collect)


# Normalizations -----------------------------------------------------------------------------------


def _norm_operands(
    x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return what torch would compute a norm with, in the dtype that it would take."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = accumulator(x.dtype)
    else:
        dtype = x.dtype if weight is None else weight.dtype
    x, weight, bias = cast(dtype, x, weight, bias)
    return x, weight, bias


def layer_norm(
    tape: Any,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    """Compute a layer norm; its gradients are the sums of g (x - mean) / deviation, and of g."""
    x, w, b = _norm_operands(x, *tape.plain(weight, bias))
    with without_autocast(x):
        y, mean, inverse = torch.native_layer_norm(x, shape, w, b, eps)
    mean, inverse = mean.detach(), inverse.detach()

    def collect(g: Tensor) -> None:
        if tape.is_shared(weight):
            _add_sum(tape, weight, torch.sub(x, mean).mul_(inverse).mul_(g))
        if tape.is_shared(bias):
            _add_sum(tape, bias, g)

    return tape.site(lambda: y, x, collect)


def rms_norm(tape: Any, x: Tensor, shape: Sequence[int], weight: Any, eps: Any = None) -> Tensor:
    return mul(tape, F.rms_norm(x, shape, None, eps), weight)


def group_norm(
    tape: Any,
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    """Compute a group norm; its gradients are sums as those of a layer norm, for each channel."""
    whole = x.shape[:2]
    x, w, b = _norm_operands(x.flatten(0, 1), *tape.plain(weight, bias))
    x = _laid_out(x)
    rows, channels, size = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    with without_autocast(x):
        y, mean, inverse = torch.native_group_norm(x, w, b, rows, channels, size, groups, eps)
    mean, inverse = (
        t.detach()
        .view(rows, -1, 1)
        .expand(rows, groups, channels // groups)
        .reshape(rows, channels)
        for t in (mean, inverse)
    )

    def collect(g: Tensor) -> None:
        shifts = g.reshape(rows, channels, -1).sum(2, dtype=accumulator(g.dtype))
        if tape.is_shared(weight):
            # sum g * (x - mean) * inverse, without forming the normalized input
            products = (g * x).reshape(rows, channels, -1).sum(2, dtype=accumulator(g.dtype))
            scales = (products - mean * shifts) * inverse
            _add_sum(tape, weight, scales.view(*whole, channels))
        if tape.is_shared(bias):
            _add_sum(tape, bias, shifts.view(*whole, channels))

    return tape.site(lambda: y, x, collect).unflatten(0, whole)


def instance_norm(tape: Any, x: Tensor, weight: Any, bias: Any, *rest: Any) -> Tensor:
    mean, deviation, uses_input, _, eps, *_ = rest
    if mean is not None or deviation is not None or not uses_input:
        raise Declined
    return group_norm(tape, x, x.shape[2], weight, bias, eps)


def _laid_out(x: Tensor) -> Tensor:
    """Return x in a memory format that the kernel of a group norm takes.

    A CPU's kernel takes channels last too, and so does the kernel that the compiler writes; torch's
    own kernel for GPUs takes contiguous tensors only.
    """
    takes_both = x.device.type == "cpu"
    if x.is_cuda:
        from tacit.training.gpu.available import is_traced

        takes_both = is_traced(x)
    if takes_both and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return channels_last(x)
    return x.contiguous()


def _add_sum(tape: Any, shared: Any, values: Tensor) -> None:
    """Add, as the gradients of a shared value, the sums of `values` over what it is repeated on."""
    examples, axes = len(values), values.dim() - shared.dim()
    if values.shape[1:] == shared.shape:
        tape.add(shared, Dense(values))
    elif values.shape[axes:] == shared.shape:
        sums = values.reshape(examples, -1, shared.numel()).sum(1, dtype=accumulator(values.dtype))
        tape.add(shared, Dense(sums.view(examples, *shared.shape)))
    else:
        if shared.numel() < values[0].numel():
            values = values.to(accumulator(values.dtype))
        sums = values.sum_to_size(examples, *[1] * (axes - 1), *shared.shape)
        tape.add(shared, Dense(sums.reshape(examples, *shared.shape)))


# Sums and scales ----------------------------------------------------------------------------------


def _ordered(tape: Any, x: Tensor, other: Any) -> tuple[Tensor, Tensor]:
    """Return examples and a shared value that is repeated on them; raise `Declined` otherwise."""
    x, shared = (other, x) if tape.is_shared(x) else (x, other)
    if torch.broadcast_shapes(x.shape[1:], shared.shape) != x.shape[1:]:
        raise Declined
    return x, shared


def add(tape: Any, x: Tensor, other: Any, *, alpha: float = 1) -> Tensor:
    """Compute `x + other`, one of them shared."""
    if alpha != 1:
        raise Declined
    x, shared = _ordered(tape, x, other)
    (plain,) = tape.plain(shared)
    collect = partial(_add_sum, tape, shared)
    return tape.site(lambda: x + plain, x, collect, reads=False)


def mul(tape: Any, x: Tensor, other: Any) -> Tensor:
    """Compute `x * other`, one of them shared, such as a scale."""
    x, shared = _ordered(tape, x, other)
    (plain,) = tape.plain(shared)
    kept = x.detach()
    return tape.site(lambda: x * plain, x, lambda g: _add_sum(tape, shared, g * kept))


def copies(tape: Any, shared: Tensor) -> Tensor:
    """Return a copy of a shared value for each example."""
    (plain,) = tape.plain(shared)
    compute = lambda: plain.expand(tape.examples, *shared.shape).clone()  # noqa: E731
    return tape.site(compute, None, lambda g: tape.add(shared, Dense(g)))


# Convolutions -------------------------------------------------------------------------------------


def convolution(tape: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    return _convolved(tape, x, weight, bias, *options, transposed=False)


def transposed_convolution(
    tape: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any
) -> Tensor:
    stride, padding, output_padding, groups, dilation = options
    options = stride, padding, dilation, groups, output_padding
    return _convolved(tape, x, weight, bias, *options, transposed=True)


def _convolved(
    tape: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *options: Any,
    transposed: bool,
) -> Tensor:
    """Compute a convolution; an example may have a batch of its own, such as frames, or not."""
    whole = x.shape[:2] if x.dim() > weight.dim() else None
    x, w, b = autocast(x if whole is None else x.flatten(0, 1), *tape.plain(weight, bias))
    x, geometry = geometry_of(x, weight, *options, transposed=transposed)
    if x.dim() == 4 and x.shape[1] == 1 and x.device.type == "cpu":
        x = channels_last(x)  # it lies in both orders; pooling is several times as fast in this

    def collect(g: Tensor) -> None:
        if x.dim() == 4 and not x.is_contiguous():
            g = g.contiguous(memory_format=torch.channels_last)
        if tape.is_shared(weight):
            tape.add(weight, Convolved(x.detach(), g, w, geometry, tape.examples))
        if tape.is_shared(bias):
            rows = g.flatten(2).sum(2, dtype=accumulator(g.dtype))  # (rows, channels)
            tape.add(bias, bias_gradient(rows.view(tape.examples, -1, rows.shape[1])))

    with without_autocast(x):
        y = tape.site(lambda: torch.convolution(x, w, b, *geometry[1:]), x, collect)
    return y if whole is None else y.unflatten(0, whole)
