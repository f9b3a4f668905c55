"""Convolutions in 1, 2 and 3 dimensions, plain and transposed, with groups and dilation.

At output position t a convolution is the matrix product W u_t, with u_t the patch of the input that
t sees; so its gradient is sum_t g_t u_t'. A transposed convolution is the adjoint: input and output
gradient change places. Padding modes other than zeros pad before the call and need no rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.training import kernels
from tacit.training.layer_rules import pieces
from tacit.training.layer_rules.cost import Way, cheapest_way
from tacit.training.layer_rules.linear import bias_piece
from tacit.training.layer_rules.site import (
    Declined,
    Piece,
    Site,
    autocast_dtype,
    first_order,
    outside_autocast,
)

Size = int | Sequence[int]
aten = torch.ops.aten


class Geometry(NamedTuple):
    """How a convolution moves over its input."""

    kernel: tuple[int, ...]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    @property
    def arguments(self) -> tuple[Any, ...]:
        """In the order of `aten.convolution`."""
        return tuple(self[1:])


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
            rows = g.flatten(2).sum(2, dtype=pieces.accumulator(g.dtype))  # (rows, channels)
            site.record(shared_bias, bias_piece(rows.view(site.examples, -1, rows.shape[1])))
        gx = None
        if ctx.needs_input_grad[1]:
            mask = [True, False, False]
            grads = aten.convolution_backward(g, x, weight, None, *geometry.arguments, mask)
            gx = grads[0].to(ctx.dtype)
        return None, gx, None, None, None


@dataclass(frozen=True)
class Convolved:
    """Gradients of a convolution's weight, from its input and output gradient."""

    x: Tensor
    g: Tensor
    weight: Tensor  # read for its shape and dtype only
    geometry: Geometry
    examples: int

    def _operands(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """left (n * groups, P, T) and right (n * groups, K, T) of the examples in [start, stop)."""
        views = len(self.x) // self.examples
        rows = slice(start * views, stop * views)
        seen, moved = self.x[rows], self.g[rows]
        if self.geometry.transposed:
            seen, moved = moved, seen
        examples, groups = stop - start, self.geometry.groups
        right = patches(seen, self.geometry, moved.shape[2:])
        return _fold(moved.flatten(2), examples, groups), _fold(right, examples, groups)

    @property
    def dtype(self) -> torch.dtype:
        return self.g.dtype

    def dense(self) -> Tensor:
        spans = self._spans(self._patch_size())
        if len(spans) == 1:
            return self._dense(*spans[0])
        dtype = pieces.accumulator(self.g.dtype)
        out = self.g.new_empty((self.examples, *self.weight.shape), dtype=dtype)
        for start, stop in spans:
            self._dense(start, stop, out[start:stop])
        return out

    def _dense(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        left, right = self._operands(start, stop)
        outer = (len(left), left.shape[1], right.shape[1])  # (n * groups, P / groups, K)
        out = None if out is None else out.view(outer)
        product = pieces.bmm_wide(left, right.transpose(1, 2), out=out)
        return product.view(stop - start, *self.weight.shape)

    def _patch_size(self) -> int:
        """Elements of the patches of one example."""
        moved = self.x if self.geometry.transposed else self.g
        kernels = prod(self.weight.shape[1:]) * self.geometry.groups
        return kernels * prod(moved.shape[2:]) * (len(self.x) // self.examples)

    def _spans(self, size: int) -> list[tuple[int, int]]:
        step = max(1, pieces.chunk_elements(self.g.device) // size)
        return [(i, min(i + step, self.examples)) for i in range(0, self.examples, step)]

    def settle(self) -> tuple[Tensor, Piece]:
        groups = self.geometry.groups
        outputs = self.weight.shape[0] // groups
        inputs = prod(self.weight.shape[1:])
        positions = self._patch_size() // (inputs * groups)
        way = cheapest_way(
            positions,
            inputs,
            outputs,
            item=self.g.element_size(),
            stored=(self.x.numel() + self.g.numel()) / self.examples / groups,
            device=self.g.device,
            fused=self._is_fusible(),
        )
        if self._is_fusible() and way != "drop":
            return self._fused(way)
        if way == "keep":
            return pieces.Dense(self.dense()).settle()
        formed = groups * (positions**2 if way == "gram" else inputs * outputs)
        spans = self._spans(max(formed, self._patch_size()))
        norms = [self._gram(*s) if way == "gram" else self._drop(*s) for s in spans]
        return (norms[0] if len(norms) == 1 else torch.cat(norms)), self

    def _raised(self, squared: Tensor, lengths: Tensor, *, gram: bool = True) -> Tensor:
        """Squared norms with room for what rounding may hide where positions cancel."""
        width = max(self.weight.shape[0], prod(self.weight.shape[1:]))
        room = pieces.room(self.dtype, gram=width * gram, fused=self._is_fusible())
        return squared + room * lengths.square()

    def _is_fusible(self) -> bool:
        """Whether the GPU kernels take this convolution: plain, in two dimensions, square steps."""
        geometry = self.geometry
        return (
            kernels.usable(self.x)
            and len(geometry.kernel) == 2
            and not geometry.transposed
            and geometry.groups == 1
            and geometry.dilation == [1, 1]
            and len(set(geometry.stride)) == len(set(geometry.padding)) == 1
            and len(self.x) == self.examples
        )

    def _fused(self, way: Way) -> tuple[Tensor, Piece]:
        geometry = self.geometry
        span = (list(geometry.kernel), geometry.stride[0], geometry.padding[0])
        g = self.g.to(self.x.dtype)
        if way == "gram":
            return self._raised(*kernels.conv2d_norms(self.x, g, *span)), self
        instances, squared = kernels.conv2d_instances(self.x, g, *span)
        return squared, pieces.Dense(instances, squared, axes=(0, 3, 1, 2))

    def _gram(self, start: int, stop: int) -> Tensor:
        left, right = self._operands(start, stop)
        found = pieces.gram(left.transpose(1, 2), right.transpose(1, 2))
        return self._raised(*(part.view(stop - start, -1).sum(1) for part in found))

    def _drop(self, start: int, stop: int) -> Tensor:
        left, right = self._operands(start, stop)
        sizes = (pieces.norms_along(left, 1) * pieces.norms_along(right, 1)).sum(1)
        squared = pieces.squared_norm(self._dense(start, stop))
        return self._raised(squared, sizes.view(stop - start, -1).sum(1), gram=False)

    def weighted_sum(self, factors: Tensor, keep: Tensor | None) -> Tensor:
        views = len(self.x) // self.examples
        if views > 1:
            factors = factors.repeat_interleave(views)
            keep = None if keep is None else keep.repeat_interleave(views)
        g, x = pieces.scaled(self.g, factors, keep), pieces.kept(self.x, keep)
        if not g.is_cuda:
            g, x = pieces.wide(g), pieces.wide(x)
        mask = [False, True, False]
        weight = self.weight.to(x.dtype)
        grads = aten.convolution_backward(g, x, weight, None, *self.geometry.arguments, mask)
        return pieces.wide(grads[1])


def patches(x: Tensor, geometry: Geometry, positions: Sequence[int]) -> Tensor:
    """The patch each position sees: (rows, channels * kernel, positions)."""
    rows, channels = x.shape[:2]
    count = len(positions)
    if prod(geometry.kernel) == 1 and set(geometry.stride) == {1} and not any(geometry.padding):
        return x.flatten(2)
    if any(geometry.padding):
        x = F.pad(x, [p for p in reversed(geometry.padding) for _ in range(2)])
    for axis in range(count):
        span = geometry.dilation[axis] * (geometry.kernel[axis] - 1) + 1
        x = x.unfold(2 + axis, span, geometry.stride[axis]).narrow(2 + axis, 0, positions[axis])
        x = x[..., :: geometry.dilation[axis]]
    x = x.movedim(tuple(range(2, 2 + count)), tuple(range(-count, 0)))
    return x.reshape(rows, channels * prod(geometry.kernel), prod(positions))


def _fold(rows: Tensor, examples: int, groups: int) -> Tensor:
    """(examples * views, channels, T) as (examples * groups, channels / groups, views * T)."""
    views = rows.shape[0] // examples
    if views == 1 and groups == 1:
        return rows
    rows = rows.view(examples, views, groups, -1, rows.shape[2])
    return rows.permute(0, 2, 3, 1, 4).reshape(examples * groups, rows.shape[3], -1)
