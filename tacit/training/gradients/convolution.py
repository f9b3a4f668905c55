"""Convolutions in 1, 2 and 3 dimensions, plain and transposed, with groups and dilation.

At output position t a convolution is the matrix product W u_t, where u_t is the patch of the input
at t. So the gradient of W is sum_t g_t u_t'. A transposed convolution is the adjoint: its input and
its output gradient change places. Padding modes other than zeros pad the input before the call and
need no rule.

There are two ways to form each example's gradient. One is a matrix product per example over patches
that are copied out first. The other is one convolution in which every example is its own group of
channels; the gradient of that convolution's weight holds the gradients of all examples (Rochette et
al. 2019, arXiv:1912.06015). It copies nothing, but libraries are slow at groups of a few channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.training.clip import accumulator
from tacit.training.gradients import ghost_norm
from tacit.training.gradients.factored import Dense, FactoredGradient, kept, scaled
from tacit.training.gradients.ghost_norm import convolved_in, product, room, squared_norm, wide
from tacit.training.gradients.linear import bias_gradient
from tacit.training.gradients.site import (
    Declined,
    Operation,
    Site,
    autocast,
    without_autocast,
)

Size = int | Sequence[int]
aten = torch.ops.aten

# Channels that oneDNN's convolutions keep together in one vector of a CPU (the layout nChw16c).
BLOCK = 16


class Geometry(NamedTuple):
    """How a convolution moves over its input.

    After the kernel, the fields are the last arguments of `torch.convolution`, in its order.
    """

    kernel: tuple[int, ...]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    def backward(self, g: Tensor, x: Tensor, weight: Tensor, *, of_input: bool) -> Tensor:
        """Return the gradient of the input, or that of the weight, from the output gradient g."""
        mask = [of_input, not of_input, False]
        grads = aten.convolution_backward(g, x, weight, None, *self[1:], mask)
        return grads[0] if of_input else grads[1]


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
    """Compute `conv1d`, `conv2d` or `conv3d`; its backward collects per-example gradients."""
    return _apply(site, input, weight, bias, stride, padding, dilation, False, 0, groups)


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
    """Compute `conv_transpose1d`, `2d` or `3d`; its backward collects per-example gradients."""
    spans = (stride, padding, dilation)
    return _apply(site, input, weight, bias, *spans, True, output_padding, groups)


def _apply(
    site: Site,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Size,
    padding: Size | str,
    dilation: Size,
    transposed: bool,
    output_padding: Size,
    groups: int,
) -> Tensor:
    layout = site.require(x, weight, bias)
    if layout.dim != 0 or not layout.outermost or x.dim() != weight.dim():
        raise Declined
    if isinstance(padding, str):
        x, padding = _padding_by_name(x, weight, dilation, padding)
    spans = [_per_axis(size, weight) for size in (stride, padding, dilation, output_padding)]
    kernel = tuple(weight.shape[2:])
    geometry = Geometry(kernel, spans[0], spans[1], spans[2], transposed, spans[3], groups)
    return _Convolution(site, weight, bias, geometry).apply(x, weight, bias)


def _per_axis(value: Size, weight: Tensor) -> list[int]:
    sizes = [value] if isinstance(value, int) else list(value)
    return sizes * (weight.dim() - 2) if len(sizes) == 1 else sizes


def _padding_by_name(x: Tensor, weight: Tensor, dilation: Size, mode: str) -> tuple[Tensor, Size]:
    """Return the input and the number of cells to pad for padding "valid" or "same".

    "same" puts an odd cell on the right. Only explicit padding of the input can do that.
    """
    if mode == "valid":
        return x, 0
    cells: list[int] = []
    steps = _per_axis(dilation, weight)
    for kernel, step in zip(reversed(weight.shape[2:]), reversed(steps), strict=True):
        total = step * (kernel - 1)
        cells += [total // 2, total - total // 2]
    if cells[::2] == cells[1::2]:
        return x, cells[::-2]
    return F.pad(x, cells), 0


@dataclass
class _Convolution(Operation):
    weight: Tensor
    bias: Tensor | None
    geometry: Geometry

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        x, weight, bias = autocast(x, weight, bias)
        with without_autocast(x):
            return torch.convolution(x, weight, bias, *self.geometry[1:]), (x, weight)

    def backward(self, saved: Any, needs: Any, g: Tensor) -> tuple[Tensor, ...]:
        x, weight = saved
        site = self.site
        if site.is_shared(self.weight):
            site.collect(self.weight, Convolved(x, g, weight, self.geometry, site.examples))
        if self.bias is not None and site.is_shared(self.bias):
            rows = g.flatten(2).sum(2, dtype=accumulator(g.dtype))  # (rows, channels)
            site.collect(self.bias, bias_gradient(rows.view(site.examples, -1, rows.shape[1])))
        return (self.geometry.backward(g, x, weight, of_input=True),) if needs[0] else ()


@dataclass(frozen=True)
class Convolved:
    """Gradients of a convolution's weight in factored form: its input and its output gradient.

    In the formulas of this class "seen" is the tensor that is read in patches and "moved" the one
    with one entry per position: input and output gradient, or the reverse if transposed.
    """

    x: Tensor
    g: Tensor
    weight: Tensor  # only its shape and dtype are used
    geometry: Geometry
    examples: int

    @property
    def dtype(self) -> torch.dtype:
        return convolved_in(self.g)

    def dense(self) -> Tensor:
        return self._formed().dense().reshape(self.examples, *self.weight.shape)

    def settle(self) -> tuple[Tensor, FactoredGradient]:
        groups = self.geometry.groups
        outputs = self.weight.shape[0] // groups
        inputs = prod(self.weight.shape[1:])
        positions = self._patch_size() // (inputs * groups)
        is_fusible, is_blocked = self._is_fusible(), self._is_blocked()
        way = ghost_norm.cheapest_way(
            positions,
            inputs,
            outputs,
            examples=self.examples * groups,
            item=self.g.element_size(),
            stored=(self.x.numel() + self.g.numel()) / self.examples / groups,
            device=self.g.device,
            fused=is_fusible,
            copied=positions * inputs if is_blocked else 0,
        )
        if is_fusible and way != "drop":
            return self._fused(way)
        if way == "keep":
            return self._formed().settle()
        formed = groups * (positions**2 if way == "gram" else inputs * outputs)
        copied = self._patch_size() if way == "gram" or not is_blocked else 0
        spans = ghost_norm.spans(self.examples, max(formed, copied), self.g.device)
        norms_of = self._gram_norms if way == "gram" else self._formed_norms
        return torch.cat([norms_of(*span) for span in spans]), self

    def weighted_sum(self, factors: Tensor, keep: Tensor | None) -> Tensor:
        each = len(self.x) // self.examples  # rows of one example
        if each > 1:
            factors = factors.repeat_interleave(each)
            keep = None if keep is None else keep.repeat_interleave(each)
        g, x = scaled(self.g, factors, keep), kept(self.x, keep)
        if not g.is_cuda:
            g, x = wide(g), wide(x)
        weight = self.weight.to(x.dtype)
        return wide(self.geometry.backward(g, x, weight, of_input=False))

    def _gram_norms(self, start: int, stop: int) -> Tensor:
        left, right = self._operands(start, stop)
        found = ghost_norm.gram_norms(left.transpose(1, 2), right.transpose(1, 2))
        return self._raised(*(part.view(stop - start, -1).sum(1) for part in found))

    def _formed_norms(self, start: int, stop: int) -> Tensor:
        form = self._by_groups if self._is_blocked() else self._by_patches
        squared = squared_norm(form(start, stop).unflatten(0, (stop - start, -1)))
        return self._raised(squared, self._lengths(start, stop), gram=False)

    def _fused(self, way: ghost_norm.Way) -> tuple[Tensor, FactoredGradient]:
        from tacit.training import gpu

        geometry = self.geometry
        span = (list(geometry.kernel), geometry.stride[0], geometry.padding[0])
        g = self.g.to(self.x.dtype)
        if way == "gram":
            return self._raised(*gpu.conv2d_norms(self.x, g, *span)), self
        instances, squared = gpu.conv2d_instances(self.x, g, *span)
        return squared, Dense(instances, squared, axes=(0, 3, 1, 2))

    def _is_fusible(self) -> bool:
        """Return True if the GPU kernels support it: plain, 2-d, equal steps along both axes."""
        geometry = self.geometry
        return (
            ghost_norm.has_kernels(self.x)
            and len(geometry.kernel) == 2
            and not geometry.transposed
            and geometry.groups == 1
            and geometry.dilation == [1, 1]
            and len(set(geometry.stride)) == len(set(geometry.padding)) == 1
            and len(self.x) == self.examples
        )

    def _raised(self, squared: Tensor, lengths: Tensor, *, gram: bool = True) -> Tensor:
        """Return squared norms with room for the rounding of positions that cancel."""
        width = max(self.weight.shape[0], prod(self.weight.shape[1:]))
        of_norm = room(self.g.dtype, gram=width * gram, fused=self._is_fusible())
        return squared + max(of_norm, room(self.dtype)) * lengths.square()

    def _lengths(self, start: int, stop: int) -> Tensor:
        """Return an upper bound on the sum of |left_t| |right_t|, by Cauchy-Schwarz.

        No cell is in more than `overlap` patches, so |right|^2 <= overlap |seen|^2.
        """
        steps = zip(self.geometry.kernel, self.geometry.stride, self.geometry.dilation, strict=True)
        overlap = prod(-(-kernel * gcd(by, apart) // by) for kernel, by, apart in steps)
        seen, moved = (t.unflatten(0, (stop - start, -1)) for t in self._roles(start, stop))
        return (overlap * (squared_norm(seen) * squared_norm(moved))).sqrt()

    def _formed(self) -> Dense:
        """Return the gradients of all examples formed, by groups or by patches."""
        if self._is_blocked():
            return Dense(self._by_groups(0, self.examples))
        spans = ghost_norm.spans(self.examples, self._patch_size(), self.g.device)
        groups = self.geometry.groups
        shape = (self.examples, groups, prod(self.weight.shape[1:]), len(self.weight) // groups)
        if len(spans) == 1:
            values = self._by_patches(*spans[0]).view(shape)
        else:
            values = self.g.new_empty(shape, dtype=accumulator(self.g.dtype))
            for start, stop in spans:
                self._by_patches(start, stop, values[start:stop].flatten(0, 1))
        if not self._is_channels_last():
            return Dense(values, axes=(0, 2, 1))  # (groups, P / groups, K)
        last = len(self.geometry.kernel) + 1
        values = values.view(self.examples, *self.geometry.kernel, *self.weight.shape[1::-1])
        return Dense(values, axes=(last, last - 1, *range(last - 1)))

    def _by_patches(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Return gradients (examples * groups, K, P / groups), K in the order of the patches."""
        left, right = self._operands(start, stop)
        return product(right, left.transpose(1, 2), out=out)

    def _by_groups(self, start: int, stop: int) -> Tensor:
        """Return gradients (examples, *shape of the weight), by one convolution."""
        examples, geometry, shape = stop - start, self.geometry, self.weight.shape
        seen, moved = (_as_groups(t, examples) for t in self._roles(start, stop))
        weight = self.weight.new_empty(examples * shape[0], *shape[1:])  # only its shape is used
        geometry = geometry._replace(
            transposed=False,
            output_padding=[0] * len(geometry.kernel),
            groups=examples * geometry.groups,
        )
        return geometry.backward(moved, seen, weight, of_input=False).view(examples, *shape)

    def _is_blocked(self) -> bool:
        """Return True if a CPU runs groups of this many channels as fast as a whole layer.

        The library must also accept them: as a plain convolution, a transposed one whose output
        padding reaches its stride would have more positions than its input.
        """
        geometry = self.geometry
        channels = (self.weight.shape[0] // geometry.groups, self.weight.shape[1])
        ends = zip(geometry.output_padding, geometry.stride, strict=True)
        return (
            torch.backends.mkldnn.is_available()
            and self.x.device.type == "cpu"
            and self.x.dtype == self.g.dtype == torch.float32
            and all(count % BLOCK == 0 for count in channels)
            and all(extra < step for extra, step in ends)
        )

    def _operands(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return left (n * groups, P, T) and right (n * groups, K, T) of examples start to stop."""
        seen, moved = self._roles(start, stop)
        examples, groups = stop - start, self.geometry.groups
        if any(self.geometry.padding):
            seen = F.pad(seen, [p for p in reversed(self.geometry.padding) for _ in range(2)])
        copy = _patches_channels_last if self._is_channels_last() else _patches
        right = copy(seen, self.geometry, moved.shape[2:])
        return _fold(moved.flatten(2), examples, groups), _fold(right, examples, groups)

    def _is_channels_last(self) -> bool:
        """Return True if patches are copied in longer runs when their channels come last."""
        geometry = self.geometry
        seen, moved = (self.g, self.x) if geometry.transposed else (self.x, self.g)
        run = seen.shape[1] * (geometry.kernel[-1] if geometry.dilation[-1] == 1 else 1)
        return geometry.groups == 1 and prod(geometry.kernel) > 1 and run > moved.shape[-1]

    def _roles(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the tensors "seen" and "moved" of examples start to stop."""
        each = len(self.x) // self.examples
        rows = slice(start * each, stop * each)
        seen, moved = self.x[rows], self.g[rows]
        return (moved, seen) if self.geometry.transposed else (seen, moved)

    def _patch_size(self) -> int:
        """Return how many numbers the patches of one example hold."""
        moved = self.x if self.geometry.transposed else self.g
        kernels = prod(self.weight.shape[1:]) * self.geometry.groups
        return kernels * prod(moved.shape[2:]) * (len(self.x) // self.examples)


def _patches(x: Tensor, geometry: Geometry, positions: Sequence[int]) -> Tensor:
    """Return the patch of the padded x at each position: (rows, channels * kernel, positions)."""
    if prod(geometry.kernel) == 1 and set(geometry.stride) == {1} and not any(geometry.padding):
        return x.flatten(2)
    x = _windows(x, 2, geometry, positions)
    x = x.movedim(tuple(range(2, 2 + len(positions))), tuple(range(-len(positions), 0)))
    return x.reshape(len(x), -1, prod(positions))


def _patches_channels_last(x: Tensor, geometry: Geometry, positions: Sequence[int]) -> Tensor:
    """Return the patches as (rows, kernel * channels, positions), each contiguous in memory."""
    x = _windows(x.movedim(1, -1).contiguous(), 1, geometry, positions)
    x = x.movedim(1 + len(positions), -1)
    return x.reshape(len(x), prod(positions), -1).transpose(1, 2)


def _windows(x: Tensor, first: int, geometry: Geometry, positions: Sequence[int]) -> Tensor:
    """Return a view with positions in place of the axes from `first` on, kernel axes at the end."""
    for axis, size in enumerate(positions, first):
        kernel, step, apart = (
            part[axis - first] for part in (geometry.kernel, geometry.stride, geometry.dilation)
        )
        x = x.unfold(axis, apart * (kernel - 1) + 1, step).narrow(axis, 0, size)
        x = x[..., ::apart]
    return x


def _fold(rows: Tensor, examples: int, groups: int) -> Tensor:
    """Reshape (examples * rows, channels, T) to (examples * groups, channels / groups, rows * T).

    If an example has several rows, such as frames, all of them become positions of that example.
    """
    each = rows.shape[0] // examples
    if each == 1 and groups == 1:
        return rows
    rows = rows.view(examples, each, groups, -1, rows.shape[2])
    return rows.permute(0, 2, 3, 1, 4).reshape(examples * groups, rows.shape[3], -1)


def _as_groups(rows: Tensor, examples: int) -> Tensor:
    """Reshape (examples * rows, channels, ...) to (rows, examples * channels, ...)."""
    return rows.unflatten(0, (examples, -1)).transpose(0, 1).flatten(1, 2)
