"""Per-example gradients of a convolution's weight.

At output position t a convolution is the matrix product W u_t, with u_t the patch of the input that
t sees; so its gradient is sum_t g_t u_t'. A transposed convolution is the adjoint: input and output
gradient change places.

Where gradients are formed, that takes a product of matrices for each example, over patches that are
copied out first. Or one convolution in which every example is a group of channels of its own, whose
weight gradient is all of theirs (Rochette et al. 2019, arXiv:1912.06015): nothing is copied, but
libraries are slow at groups of a few channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.training import gpu
from tacit.training.gradients import factored
from tacit.training.gradients.cost import Way, cheapest_way
from tacit.training.gradients.rounding import convolved_in, room
from tacit.training.gradients.site import Piece

aten = torch.ops.aten

# Channels that oneDNN's convolutions keep together in a vector of a CPU (the layout nChw16c).
BLOCK = 16


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
        seen, moved = self._roles(start, stop)
        examples, groups = stop - start, self.geometry.groups
        copy = patches_channels_last if self._is_channels_last() else patches
        right = copy(seen, self.geometry, moved.shape[2:])
        return _fold(moved.flatten(2), examples, groups), _fold(right, examples, groups)

    def _is_channels_last(self) -> bool:
        """Whether patches are copied in longer runs if their channels are put last."""
        geometry = self.geometry
        seen, moved = (self.g, self.x) if geometry.transposed else (self.x, self.g)
        run = seen.shape[1] * (geometry.kernel[-1] if geometry.dilation[-1] == 1 else 1)
        return geometry.groups == 1 and prod(geometry.kernel) > 1 and run > moved.shape[-1]

    def _roles(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """What is seen in patches, and what moves with the positions."""
        views = len(self.x) // self.examples
        rows = slice(start * views, stop * views)
        seen, moved = self.x[rows], self.g[rows]
        return (moved, seen) if self.geometry.transposed else (seen, moved)

    @property
    def dtype(self) -> torch.dtype:
        return convolved_in(self.g)

    def dense(self) -> Tensor:
        return self._kept().dense().reshape(self.examples, *self.weight.shape)

    def _kept(self) -> factored.Dense:
        """All gradients, formed."""
        if self._is_blocked():
            return factored.Dense(self._by_groups(0, self.examples))
        spans, groups = self._spans(self._patch_size()), self.geometry.groups
        shape = (self.examples, groups, prod(self.weight.shape[1:]), len(self.weight) // groups)
        if len(spans) == 1:
            values = self._by_patches(*spans[0]).view(shape)
        else:
            values = self.g.new_empty(shape, dtype=factored.accumulator(self.g.dtype))
            for start, stop in spans:
                self._by_patches(start, stop, values[start:stop].flatten(0, 1))
        if not self._is_channels_last():
            return factored.Dense(values, axes=(0, 2, 1))  # (groups, P / groups, K)
        last = len(self.geometry.kernel) + 1
        values = values.view(self.examples, *self.geometry.kernel, *self.weight.shape[1::-1])
        return factored.Dense(values, axes=(last, last - 1, *range(last - 1)))

    def _by_patches(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """(examples * groups, K, P / groups), K in the order of the patches."""
        left, right = self._operands(start, stop)
        return factored.bmm_wide(right, left.transpose(1, 2), out=out)

    def _by_groups(self, start: int, stop: int) -> Tensor:
        """(examples, *shape of the weight), by one convolution."""
        examples, geometry, shape = stop - start, self.geometry, self.weight.shape
        seen, moved = (_as_groups(t, examples) for t in self._roles(start, stop))
        weight = self.weight.new_empty(examples * shape[0], *shape[1:])  # for its shape only
        geometry = geometry._replace(
            transposed=False,
            output_padding=[0] * len(geometry.kernel),
            groups=examples * geometry.groups,
        )
        mask = [False, True, False]
        grads = aten.convolution_backward(moved, seen, weight, None, *geometry.arguments, mask)
        return grads[1].view(examples, *shape)

    def _is_blocked(self) -> bool:
        """Whether a CPU's library runs groups of this many channels as fast as a whole layer.

        And takes them: turned round, a transposed convolution whose output padding reaches its
        stride would have more positions than its input.
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

    def _patch_size(self) -> int:
        """Elements of the patches of one example."""
        moved = self.x if self.geometry.transposed else self.g
        kernels = prod(self.weight.shape[1:]) * self.geometry.groups
        return kernels * prod(moved.shape[2:]) * (len(self.x) // self.examples)

    def _spans(self, size: int) -> list[tuple[int, int]]:
        step = max(1, factored.chunk_elements(self.g.device) // size)
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
            examples=self.examples * groups,
            item=self.g.element_size(),
            stored=(self.x.numel() + self.g.numel()) / self.examples / groups,
            device=self.g.device,
            fused=self._is_fusible(),
            copied=positions * inputs if self._is_blocked() else 0,
        )
        if self._is_fusible() and way != "drop":
            return self._fused(way)
        if way == "keep":
            return self._kept().settle()
        formed = groups * (positions**2 if way == "gram" else inputs * outputs)
        is_copied = way == "gram" or not self._is_blocked()
        spans = self._spans(max(formed, self._patch_size() if is_copied else 0))
        norms = [self._gram(*s) if way == "gram" else self._drop(*s) for s in spans]
        return (norms[0] if len(norms) == 1 else torch.cat(norms)), self

    def _raised(self, squared: Tensor, lengths: Tensor, *, gram: bool = True) -> Tensor:
        """Squared norms with room for what rounding may hide where positions cancel."""
        width = max(self.weight.shape[0], prod(self.weight.shape[1:]))
        of_norm = room(self.g.dtype, gram=width * gram, fused=self._is_fusible())
        return squared + max(of_norm, room(self.dtype)) * lengths.square()

    def _is_fusible(self) -> bool:
        """Whether the GPU kernels take this convolution: plain, in two dimensions, square steps."""
        geometry = self.geometry
        return (
            gpu.usable(self.x)
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
            return self._raised(*gpu.conv2d_norms(self.x, g, *span)), self
        instances, squared = gpu.conv2d_instances(self.x, g, *span)
        return squared, factored.Dense(instances, squared, axes=(0, 3, 1, 2))

    def _gram(self, start: int, stop: int) -> Tensor:
        left, right = self._operands(start, stop)
        found = factored.gram(left.transpose(1, 2), right.transpose(1, 2))
        return self._raised(*(part.view(stop - start, -1).sum(1) for part in found))

    def _drop(self, start: int, stop: int) -> Tensor:
        form = self._by_groups if self._is_blocked() else self._by_patches
        squared = factored.squared_norm(form(start, stop).unflatten(0, (stop - start, -1)))
        return self._raised(squared, self._lengths(start, stop), gram=False)

    def _lengths(self, start: int, stop: int) -> Tensor:
        """At least the sum of |left_t| |right_t| over positions, by Cauchy and Schwarz.

        No cell is in more than `overlap` patches, so |right|^2 <= overlap |seen|^2.
        """
        steps = zip(self.geometry.kernel, self.geometry.stride, self.geometry.dilation, strict=True)
        overlap = prod(-(-kernel * gcd(by, apart) // by) for kernel, by, apart in steps)
        seen, moved = (t.unflatten(0, (stop - start, -1)) for t in self._roles(start, stop))
        squared = factored.squared_norm(seen) * factored.squared_norm(moved)
        return (overlap * squared).sqrt()

    def weighted_sum(self, factors: Tensor, keep: Tensor | None) -> Tensor:
        views = len(self.x) // self.examples
        if views > 1:
            factors = factors.repeat_interleave(views)
            keep = None if keep is None else keep.repeat_interleave(views)
        g, x = factored.scaled(self.g, factors, keep), factored.kept(self.x, keep)
        if not g.is_cuda:
            g, x = factored.wide(g), factored.wide(x)
        mask = [False, True, False]
        weight = self.weight.to(x.dtype)
        grads = aten.convolution_backward(g, x, weight, None, *self.geometry.arguments, mask)
        return factored.wide(grads[1])


def patches(x: Tensor, geometry: Geometry, positions: Sequence[int]) -> Tensor:
    """The patch each position sees: (rows, channels * kernel, positions)."""
    if prod(geometry.kernel) == 1 and set(geometry.stride) == {1} and not any(geometry.padding):
        return x.flatten(2)
    x = _windows(_padded(x, geometry), 2, geometry, positions)
    x = x.movedim(tuple(range(2, 2 + len(positions))), tuple(range(-len(positions), 0)))
    return x.reshape(len(x), -1, prod(positions))


def patches_channels_last(x: Tensor, geometry: Geometry, positions: Sequence[int]) -> Tensor:
    """The same as (rows, kernel * channels, positions), where a position is contiguous."""
    x = _padded(x, geometry).movedim(1, -1).contiguous()
    x = _windows(x, 1, geometry, positions).movedim(1 + len(positions), -1)
    return x.reshape(len(x), prod(positions), -1).transpose(1, 2)


def _padded(x: Tensor, geometry: Geometry) -> Tensor:
    if not any(geometry.padding):
        return x
    return F.pad(x, [p for p in reversed(geometry.padding) for _ in range(2)])


def _windows(x: Tensor, first: int, geometry: Geometry, positions: Sequence[int]) -> Tensor:
    """A view: positions in place of the axes from `first` on, the kernel's axes at the end."""
    for axis, size in enumerate(positions, first):
        kernel, step, apart = (
            part[axis - first] for part in (geometry.kernel, geometry.stride, geometry.dilation)
        )
        x = x.unfold(axis, apart * (kernel - 1) + 1, step).narrow(axis, 0, size)
        x = x[..., ::apart]
    return x


def _fold(rows: Tensor, examples: int, groups: int) -> Tensor:
    """(examples * views, channels, T) as (examples * groups, channels / groups, views * T)."""
    views = rows.shape[0] // examples
    if views == 1 and groups == 1:
        return rows
    rows = rows.view(examples, views, groups, -1, rows.shape[2])
    return rows.permute(0, 2, 3, 1, 4).reshape(examples * groups, rows.shape[3], -1)


def _as_groups(rows: Tensor, examples: int) -> Tensor:
    """(examples * views, channels, ...) as (views, examples * channels, ...)."""
    return rows.unflatten(0, (examples, -1)).transpose(0, 1).flatten(1, 2)
