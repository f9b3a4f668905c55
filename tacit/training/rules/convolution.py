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
from itertools import product as product_of
from math import gcd, prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.training.clip import accumulator
from tacit.training.rules import ghost_norm
from tacit.training.rules.factored import (
    Dense,
    FactoredGradient,
    contract,
    kept,
    scaled,
)
from tacit.training.rules.ghost_norm import (
    convolved_in,
    in_double,
    product,
    room,
    squared_factor,
    squared_norm,
    wide,
)

Size = int | Sequence[int]
aten = torch.ops.aten

# Channels that oneDNN's convolutions keep together in one vector of a CPU (the layout nChw16c). The
# gradients of examples as groups of one convolution take 0.5 ms instead of 1.2 for 16 examples with
# 16 channels and 32 x 32 positions, but 1.5 instead of 0.9 with 25 positions.
BLOCK, POSITIONS = 16, 64

CELLS = 128  # most cells of a patch whose inner products are added one by one, see `_gram_by_cells`


class Geometry(NamedTuple):
    """Settings that determine which input cells each output position of a convolution reads.

    After the kernel's shape, the fields are the last arguments of `torch.convolution`, in its
    order.
    """

    kernel: tuple[int, ...]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    def of_weight(self, g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the weight, from the gradient g of the convolution's output."""
        grads = aten.convolution_backward(g, x, weight, None, *self[1:], [False, True, False])
        return grads[1]


def geometry_of(
    x: Tensor,
    weight: Tensor,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    output_padding: Size = 0,
    *,
    transposed: bool,
) -> tuple[Tensor, Geometry]:
    """Return the input, padded if the geometry cannot express its padding, and the geometry."""
    if isinstance(padding, str):
        x, padding = _padding_by_name(x, weight, dilation, padding)
    spans = [_per_axis(size, weight) for size in (stride, padding, dilation, output_padding)]
    kernel = tuple(weight.shape[2:])
    return x, Geometry(kernel, spans[0], spans[1], spans[2], transposed, spans[3], groups)


def _per_axis(value: Size, weight: Tensor) -> list[int]:
    sizes = [value] if isinstance(value, int) else list(value)
    return sizes * (weight.dim() - 2) if len(sizes) == 1 else sizes


def _padding_by_name(x: Tensor, weight: Tensor, dilation: Size, mode: str) -> tuple[Tensor, Size]:
    """Return the input, padded if need be, and the padding to pass on for mode "valid" or "same".

    If "same" adds an odd number of cells, one more is on the right. A convolution pads both sides
    equally, so the input itself is padded in that case.
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


@dataclass(frozen=True)
class Convolved:
    """Per-example gradients of a convolution's weight, held as its input x and output gradient g.

    In the formulas of this class "seen" is the tensor that is read in patches, and "moved" the
    tensor with one entry per position. In a plain convolution seen is x and moved is g; in a
    transposed convolution it is the reverse.
    """

    x: Tensor
    g: Tensor
    weight: Tensor  # only its shape and dtype are used
    geometry: Geometry
    examples: int

    @property
    def dtype(self) -> torch.dtype:
        return convolved_in(self.g)

    @property
    def _each(self) -> int:
        """Rows of one example."""
        return self.x.shape[0] // self.examples

    def dense(self) -> Tensor:
        return self.formed().dense().reshape(self.examples, *self.weight.shape)

    def settle(self, *, bounded: bool) -> tuple[Tensor, FactoredGradient]:
        groups = self.geometry.groups
        outputs = self.weight.shape[0] // groups
        inputs = prod(self.weight.shape[1:])
        positions = self._patch_size() // (inputs * groups)
        is_fusible, is_blocked = self._is_fusible(), self._is_blocked() and not bounded
        way = ghost_norm.cheapest_way(
            positions,
            inputs,
            outputs,
            examples=self.examples * groups,
            item=self.g.element_size(),
            stored=(self.x.numel() + self.g.numel()) / self.examples / groups,
            device=self.g.device,
            fused=is_fusible and self._each == 1 and not bounded,
            copied=positions * inputs if is_blocked or bounded else 0,
            bounded=bounded,
        )
        if way == "keep":
            return self.formed(bounded=bounded).settle(bounded=bounded)
        if way == "gram" and is_fusible and self._each == 1 and not bounded:
            return self._fused_norms(), self
        formed = groups * (positions**2 if way == "gram" else inputs * outputs)
        copied = self._patch_size() if way == "gram" or not is_blocked else 0
        spans = ghost_norm.spans(self.examples, max(formed, copied), self.g.device)
        norms_of = self._gram_norms if way == "gram" else self._formed_norms
        return torch.cat([norms_of(*span, bounded=bounded) for span in spans]), self

    def weighted_sum(
        self, factors: Tensor, keep: Tensor | None, *, bounded: bool = False
    ) -> Tensor:
        if bounded:
            return self._contracted(factors, keep)
        if self._each > 1:
            factors = factors.repeat_interleave(self._each)
            keep = None if keep is None else keep.repeat_interleave(self._each)
        g, x = scaled(self.g, factors, keep), kept(self.x, keep)
        if not g.is_cuda:
            g, x = wide(g), wide(x)
        weight = self.weight.to(x.dtype)
        return wide(self.geometry.of_weight(g, x, weight))

    def _contracted(self, factors: Tensor, keep: Tensor | None) -> Tensor:
        """Return the weighted sum in float64, as matrix products over copied patches."""
        groups = self.geometry.groups
        total: Tensor | None = None
        for start, stop in ghost_norm.spans(self.examples, self._patch_size(), self.g.device):
            one = None if keep is None else keep[start:stop]
            left, right = (
                operand.unflatten(0, (stop - start, groups))
                for operand in self._operands(start, stop)
            )  # (examples, groups, T, P or K)
            part = torch.stack(
                [
                    contract(left[:, group], right[:, group], factors[start:stop], one)
                    for group in range(groups)
                ]
            )  # (groups, P, K)
            total = part if total is None else total.add_(part)
        assert total is not None  # a batch has at least one row
        return (
            total.unflatten(2, (*self.geometry.kernel, -1))
            .movedim(-1, 2)
            .reshape(self.weight.shape)
        )

    def _gram_norms(self, start: int, stop: int, *, bounded: bool) -> Tensor:
        moved, seen = in_double(bounded, *self._sides(start, stop))
        of_moved = ghost_norm.gram(moved.flatten(1, -2))
        cells, positions = seen.shape[1:-1].numel(), of_moved.shape[1]
        if 2 * cells**2 <= positions**2 * self._taps() <= positions**2 * CELLS:
            of_seen = self._gram_by_cells(seen, moved.shape[2:-1])
        else:
            of_seen = ghost_norm.gram(_patches(seen, self.geometry, moved.shape[2:-1]))
        widths = moved.shape[-1] + seen.shape[-1] * self._taps()
        found = ghost_norm.norms_of_grams(of_moved, of_seen, widths)
        squared, lengths = (part.view(stop - start, -1).sum(1) for part in found)
        return self._raised(squared, lengths, bounded=bounded)

    def _gram_by_cells(self, seen: Tensor, positions: Sequence[int]) -> Tensor:
        """Return the inner products of patches, each the sum of those of its cells.

        One product of two cells serves all pairs of patches that hold them at the same place. The
        roundings are no more than in a sum over blocks of the whole patch: with d(C) of
        `arithmetic.depth_in_blocks` and k cells in a patch, d(C) + k - 1 <= d(C k) for k <= CELLS.
        """
        size = seen.shape[1:-1]
        cells = ghost_norm.gram(seen.flatten(1, -2)).unflatten(2, size).unflatten(1, size)
        total: Tensor | None = None
        for tap in product_of(*map(range, self.geometry.kernel)):
            steps = zip(tap, positions, self.geometry.stride, self.geometry.dilation, strict=True)
            one = (slice(None), *(slice(a * d, a * d + s * (o - 1) + 1, s) for a, o, s, d in steps))
            part = cells[(slice(None), *one, *one)]
            total = part.clone() if total is None else total.add_(part)
        assert total is not None  # a kernel has at least one cell
        return total.flatten(2 + len(positions)).flatten(1, -2)

    def _formed_norms(self, start: int, stop: int, *, bounded: bool) -> Tensor:
        if bounded:
            left, right = in_double(bounded, *self._operands(start, stop))
            formed = product(left.transpose(1, 2), right)
        else:
            form = self._by_groups if self._is_blocked() else self._by_patches
            formed = form(start, stop)
        squared = squared_norm(formed.unflatten(0, (stop - start, -1)))
        lengths = self._lengths(start, stop)
        return self._raised(squared, lengths, gram=False, bounded=bounded)

    def _fused_norms(self) -> Tensor:
        from tacit.training.gpu.conv_norms import conv2d_norms

        g = self.g.to(self.x.dtype)
        return self._raised(*conv2d_norms(self.x, g, *self._span()))

    def _span(self) -> tuple[list[int], int, int]:
        geometry = self.geometry
        return list(geometry.kernel), geometry.stride[0], geometry.padding[0]

    def _is_fusible(self) -> bool:
        """Return True if the fused GPU kernels support this convolution.

        It must be plain, 2-d, without groups or dilation, with equal strides and paddings on both
        axes. The kernel for norms alone also needs examples of one row each.
        """
        geometry = self.geometry
        return (
            ghost_norm.has_kernels(self.x)
            and len(geometry.kernel) == 2
            and not geometry.transposed
            and geometry.groups == 1
            and geometry.dilation == [1, 1]
            and len(set(geometry.stride)) == len(set(geometry.padding)) == 1
        )

    def _raised(
        self, squared: Tensor, lengths: Tensor, *, gram: bool = True, bounded: bool = False
    ) -> Tensor:
        """Return the squared norms, raised by a bound on their rounding error.

        `lengths` are the sums of |left_t| |right_t| over positions t. The error is relative to
        their squares if the terms of different positions cancel. `gram` is False for formed
        gradients.
        """
        widths = (self.weight.shape[0], prod(self.weight.shape[1:])) if gram else ()
        positions = self._patch_size() // prod(self.weight.shape[1:])
        is_fused = self._is_fusible() and self._each == 1 and not bounded
        share = room(self.g.dtype, positions, widths=widths, fused=is_fused, bounded=bounded)
        if self.dtype != self.g.dtype and not bounded:  # the convolution rounds its operands
            share = share.or_more(room(self.dtype, positions))
        return share.raised(squared, lengths).to(accumulator(self.g.dtype))

    def _lengths(self, start: int, stop: int) -> Tensor:
        """Return an upper bound on sum_t |left_t| |right_t| for examples start to stop.

        left_t is the entry of "moved" at position t, and right_t the patch of "seen" there. No cell
        is in more than `overlap` patches, so the bound follows by Cauchy-Schwarz from |right|^2 <=
        overlap |seen|^2.
        """
        steps = zip(self.geometry.kernel, self.geometry.stride, self.geometry.dilation, strict=True)
        overlap = prod(-(-kernel * gcd(by, apart) // by) for kernel, by, apart in steps)
        seen, moved = (t.unflatten(0, (stop - start, -1)) for t in self._roles(start, stop))
        return (overlap * squared_factor(seen) * squared_factor(moved)).sqrt()

    def formed(self, *, bounded: bool = False) -> Dense:
        """Return the formed gradients of all examples, with norms if they come with them."""
        if self._is_fusible():
            from tacit.training.gpu.conv_norms import conv2d_instances

            given = self.x, self.g.to(self.x.dtype), *self._span()
            instances, squared = conv2d_instances(*given, examples=self.examples)
            # The kernel adds squares in float32; the bounded mode takes the norms again.
            return Dense(instances, None if bounded else squared, axes=(0, 3, 1, 2))
        if self._is_blocked():
            return Dense(self._by_groups(0, self.examples))
        groups, axes = self.geometry.groups, len(self.geometry.kernel)
        outputs, patch = (
            self.weight.shape[0] // groups,
            (*self.geometry.kernel, self.weight.shape[1]),
        )
        sizes = sorted((outputs, prod(patch)))
        values = self.g.new_empty((self.examples, groups, *sizes), dtype=accumulator(self.g.dtype))
        for start, stop in ghost_norm.spans(self.examples, self._patch_size(), self.g.device):
            self._by_patches(start, stop, values[start:stop].flatten(0, 1))
        if outputs == sizes[0]:
            return Dense(values.unflatten(3, patch), axes=(0, 1, 2 + axes, *range(2, 2 + axes)))
        return Dense(values.unflatten(2, patch), axes=(0, 2 + axes, 1 + axes, *range(1, 1 + axes)))

    def _by_patches(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Return the gradients of examples start to stop, as matrix products over copied patches.

        Shape: (examples * groups, P output channels / groups, K values of a patch), or K before P
        if it is less: libraries are faster at long rows.
        """
        left, right = self._operands(start, stop)
        if left.shape[2] > right.shape[2]:
            left, right = right, left
        return product(left.transpose(1, 2), right, out=out)

    def _by_groups(self, start: int, stop: int) -> Tensor:
        """Return gradients (examples, *weight.shape), each from one group of a convolution."""
        examples, geometry, shape = stop - start, self.geometry, self.weight.shape
        seen, moved = (_as_groups(t, examples) for t in self._roles(start, stop))
        weight = self.weight.new_empty(examples * shape[0], *shape[1:])  # only its shape is used
        geometry = geometry._replace(
            transposed=False,
            output_padding=[0] * len(geometry.kernel),
            groups=examples * geometry.groups,
        )
        return geometry.of_weight(moved, seen, weight).view(examples, *shape)

    def _is_blocked(self) -> bool:
        """Return True if `_by_groups` is fast here: on a CPU, with channels in multiples of BLOCK.

        Patches of one cell are not even copied, so products of them are faster.

        The CPU library must also accept the grouped convolution. It refuses a transposed
        convolution whose output padding reaches its stride: rewritten as a plain one, its output
        would have more positions than its input.
        """
        geometry = self.geometry
        channels = (self.weight.shape[0] // geometry.groups, self.weight.shape[1])
        ends = zip(geometry.output_padding, geometry.stride, strict=True)
        return (
            torch.backends.mkldnn.is_available()
            and self.x.device.type == "cpu"
            and self.x.dtype == self.g.dtype == torch.float32
            and all(count % BLOCK == 0 for count in channels)
            and self._taps() > 1
            and self.g.shape[2:].numel() >= POSITIONS
            and all(extra < step for extra, step in ends)
        )

    def _operands(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the factors left and right of the gradients of examples start to stop.

        left (examples * groups, T, P) holds the P channels of "moved" at T positions. right
        (examples * groups, T, K) holds the patches of K values of "seen", channels last.
        """
        moved, seen = self._sides(start, stop)
        return moved.flatten(1, -2), _patches(seen, self.geometry, moved.shape[2:-1])

    def _sides(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return "moved", and "seen" with its padding, of examples start to stop.

        Shape: (examples * groups, rows of an example, *size, channels / groups). If an example has
        several rows, such as frames, the positions of all of them are its positions.
        """
        seen, moved = self._roles(start, stop)
        if any(self.geometry.padding):
            seen = F.pad(seen, [p for p in reversed(self.geometry.padding) for _ in range(2)])
        return self._split(moved), self._split(seen)

    def _split(self, rows: Tensor) -> Tensor:
        rows = rows.unflatten(1, (self.geometry.groups, -1)).unflatten(0, (-1, self._each))
        return rows.movedim(2, 1).movedim(3, -1).flatten(0, 1)

    def _roles(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the tensors "seen" (read in patches) and "moved" of examples start to stop."""
        rows = slice(start * self._each, stop * self._each)
        seen, moved = self.x[rows], self.g[rows]
        return (moved, seen) if self.geometry.transposed else (seen, moved)

    def _taps(self) -> int:
        return prod(self.geometry.kernel)

    def _patch_size(self) -> int:
        """Return how many numbers the patches at all positions of one example hold."""
        moved = self.x if self.geometry.transposed else self.g
        kernels = prod(self.weight.shape[1:]) * self.geometry.groups
        return kernels * prod(moved.shape[2:]) * self._each


def _patches(x: Tensor, geometry: Geometry, positions: Sequence[int]) -> Tensor:
    """Return the patch at each position of the padded x (examples, rows, *size, channels).

    Shape: (examples, rows * positions, kernel * channels). In memory the cells of a patch are next
    to each other, or else the positions: whichever copies longer runs of x.
    """
    run = x.shape[-1] * (geometry.kernel[-1] if geometry.dilation[-1] == 1 else 1)
    is_one_cell, axes = prod(geometry.kernel) == 1, 1 + len(positions)
    is_by_patch = is_one_cell or run > positions[-1]
    if not is_one_cell:
        x = x.contiguous() if is_by_patch else x.movedim(-1, 1).contiguous().movedim(1, -1)
    steps = zip(positions, geometry.kernel, geometry.stride, geometry.dilation, strict=True)
    for axis, (size, kernel, step, apart) in enumerate(steps, 2):
        x = x.unfold(axis, apart * (kernel - 1) + 1, step).narrow(axis, 0, size)[..., ::apart]
    x = x.movedim(axes + 1, -1)  # (examples, rows, *positions, *kernel, channels)
    if is_by_patch:
        return x.flatten(1 + axes).flatten(1, -2)
    x = x.movedim(tuple(range(1, 1 + axes)), tuple(range(-axes, 0)))
    return x.flatten(-axes).flatten(1, -2).transpose(1, 2)


def _as_groups(rows: Tensor, examples: int) -> Tensor:
    """Reshape (examples * rows, channels, ...) to (rows, examples * channels, ...).

    In the new shape every example is a group of channels of one grouped convolution.
    """
    return rows.unflatten(0, (examples, -1)).transpose(0, 1).flatten(1, 2)
