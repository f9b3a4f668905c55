"""Per-example gradients in factored form, which need not be formed to be clipped and summed.

A factored gradient stands for a tensor of shape (examples, *shape of the parameter). If several
calls use one parameter, their gradients are combined before the norm is taken, because
|u + v|^2 has a cross term.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.training.arithmetic import ROWS, block_sums, lost_below_range
from tacit.training.clip import accumulator
from tacit.training.rules import ghost_norm
from tacit.training.rules.ghost_norm import (
    GhostNorm,
    has_kernels,
    in_double,
    norms_of_vectors,
    product,
    room,
    squared_factor,
    squared_norm,
    usual,
    wide,
)
from tacit.training.rules.operands import Unsupported

# Gradients of up to SMALL numbers are formed, and handled side by side in one tensor. On a GPU each
# begins at a multiple of ALIGNED numbers, because kernels read several numbers at a time.
SMALL, ALIGNED = 2**14, 16


class FactoredGradient(Protocol):
    """Per-example gradients of one tensor from one call, held as factors or as a formed tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to which the operands of the weighted sum are rounded."""
        ...

    def dense(self) -> Tensor:
        """Return the formed gradients as one tensor, shape (examples, *shape of the parameter)."""
        ...

    def settle(self, *, bounded: bool) -> "tuple[Tensor, FactoredGradient]":
        """Return each example's squared gradient norm, and gradients for the weighted sum.

        The norms are at least float32, and raised by a bound on rounding errors (`ghost_norm`). The
        returned gradients have the same values as this object, but may be in another form: for
        example formed, if the norms required that. `bounded` says that the weighted sum will be in
        float64.
        """
        ...

    def weighted_sum(
        self, factors: Tensor, keep: Tensor | None, *, bounded: bool = False
    ) -> Tensor:
        """Return the sum over examples of factor times gradient, in at least float32.

        Examples where `keep` is False add exactly zero, even if their gradient is not finite. None
        keeps all examples. `bounded` adds in float64, in the order that `arithmetic` bounds.
        """
        ...


@dataclass(frozen=True)
class Dense:
    """Per-example gradients held as one tensor, shape (examples, *shape of the parameter)."""

    values: Tensor
    squared: Tensor | None = None  # squared norms, if the rule has computed them already
    axes: tuple[int, ...] | None = None  # the permutation that gives the parameter's axis order

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def dense(self) -> Tensor:
        if self.axes is None:
            return self.values
        return self.values.permute(0, *(axis + 1 for axis in self.axes))

    def settle(self, *, bounded: bool) -> tuple[Tensor, FactoredGradient]:  # noqa: ARG002  # exact
        return (squared_norm(self.values) if self.squared is None else self.squared), self

    def weighted_sum(
        self, factors: Tensor, keep: Tensor | None, *, bounded: bool = False
    ) -> Tensor:
        flat = self.values.reshape(factors.shape[0], -1)
        if bounded:
            total = weighted_rows(flat, factors, keep).view(self.values.shape[1:])
        elif has_kernels(flat) and flat.element_size() == 2:
            from tacit.training.gpu.weighted_rows import weighted_sum

            total = weighted_sum(flat, kept(factors, keep)).view(self.values.shape[1:])
        else:
            flat = kept(wide(flat), keep)
            total = (factors.to(flat.dtype) @ flat).view(self.values.shape[1:])
        return total if self.axes is None else total.permute(self.axes)


@dataclass(frozen=True)
class Outer:
    """Gradients sum_t left_t right_t' of a matrix, where t runs over an example's positions.

    left (examples, T, P) holds output gradients and right (examples, T, D) inputs. At T = 1 their
    squared norms may be given, if the rule has computed them already.
    """

    left: Tensor
    right: Tensor
    left_squared: Tensor | None = None
    right_squared: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    def dense(self) -> Tensor:
        return product(self.left.transpose(1, 2), self.right)

    def settle(self, *, bounded: bool) -> tuple[Tensor, FactoredGradient]:
        if self.left.shape[1] == 1:
            return self._rank_one(), self
        found = self.measure(bounded=bounded)
        if found.gradient is not None:
            return found.squared, Dense(found.gradient)
        return found.raised(), self

    def transposed(self) -> "Outer":
        """Return the gradients of the transposed matrix, without forming them."""
        return Outer(self.right, self.left, self.right_squared, self.left_squared)

    def measure(self, *, bounded: bool) -> GhostNorm:
        """Return the norm of each example's gradient, computed in the cheapest way."""
        if self.left.shape[1] > 1:
            return ghost_norm.ghost_norm(self.left, self.right, bounded=bounded)
        squared = self._rank_one()
        return GhostNorm(squared, squared.sqrt(), room(self.dtype, 1, bounded=bounded))

    def _rank_one(self) -> Tensor:
        left = squared_factor(self.left, self.left_squared)
        return left * squared_factor(self.right, self.right_squared)

    def weighted_sum(
        self, factors: Tensor, keep: Tensor | None, *, bounded: bool = False
    ) -> Tensor:
        if bounded:
            return contract(self.left, self.right, factors, keep)
        left, right = self._scaled(factors, keep)
        if is_by_time(left) and is_by_time(right):  # then this order of the rows takes no copy
            left, right = left.transpose(0, 1), right.transpose(0, 1)
        return product(left.flatten(0, 1).t(), right.flatten(0, 1))

    def _scaled(self, factors: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return left and right, the narrower one times the factors."""
        if self.left.shape[2] <= self.right.shape[2]:
            return scaled(self.left, factors, keep), kept(self.right, keep)
        return kept(self.left, keep), scaled(self.right, factors, keep)


@dataclass(frozen=True)
class TableRows:
    """Gradients of a looked-up table: values[i, t] of example i is added to table row ids[i, t]."""

    ids: Tensor  # (examples, T)
    values: Tensor  # (examples, T, D)
    table: int  # number of rows of the table

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def dense(self) -> Tensor:
        examples, _, width = self.values.shape
        rows = torch.arange(examples, device=self.ids.device).unsqueeze(1) * self.table + self.ids
        out = wide(self.values).new_zeros(examples * self.table, width)
        out = out.index_add(0, rows.flatten(), wide(self.values).reshape(-1, width))
        return out.view(examples, self.table, width)

    def settle(self, *, bounded: bool) -> tuple[Tensor, FactoredGradient]:
        if self.ids.shape[1] == 1:
            return squared_norm(self.values), self
        squared = squared_norm(self._compact(bounded=bounded)).to(accumulator(self.dtype))
        share = room(self.dtype, self.ids.shape[1], bounded=bounded)
        return share.raised(squared, self.length()), self

    def length(self) -> Tensor:
        """Return each example's sum of the norms of its values: the scale of rounding errors."""
        return norms_of_vectors(self.values).sum(1)

    def _compact(self, *, bounded: bool) -> Tensor:
        """Return for each example the sums of the values that have the same id, in T rows.

        Unused rows are zero. The norm over these rows is that of the gradient of the whole table,
        which is not formed.
        """
        examples, positions, width = self.values.shape
        ordered, order = self.ids.sort(dim=1)
        steps = (ordered[:, 1:] != ordered[:, :-1]).cumsum(1)
        ranks = torch.cat([torch.zeros_like(ordered[:, :1]), steps], 1)  # (examples, T)
        first = torch.arange(examples, device=ranks.device).unsqueeze(1) * positions
        slots = torch.empty_like(ranks).scatter_(1, order, ranks + first)
        (values,) = in_double(bounded, wide(self.values).reshape(-1, width))
        out = torch.zeros_like(values).index_add(0, slots.flatten(), values)
        return out.view(examples, positions, width)

    def weighted_sum(
        self, factors: Tensor, keep: Tensor | None, *, bounded: bool = False
    ) -> Tensor:
        values = self._weighted(factors, keep, bounded=bounded)
        return torch.ops.aten.embedding_dense_backward(values, self.ids, self.table, -1, False)

    def sum_of_rows(self, factors: Tensor, keep: Tensor | None, *, bounded: bool) -> Tensor | None:
        """Return the weighted sum as a sparse tensor; None if a dense one takes as little memory.

        The numbers are those of `weighted_sum`.
        """
        width = self.values.shape[2]
        if 2 * self.ids.numel() > self.table or width == 0:
            return None
        rows, places = self.ids.flatten().unique(return_inverse=True)
        values = self._weighted(factors, keep, bounded=bounded).reshape(-1, width)
        total = values.new_zeros(len(rows), width).index_add_(0, places, values)
        size = self.table, width
        return torch.sparse_coo_tensor(  # sorted, and each row once
            rows.unsqueeze(0), total, size, check_invariants=False, is_coalesced=True
        )

    def _weighted(self, factors: Tensor, keep: Tensor | None, *, bounded: bool) -> Tensor:
        if bounded:
            return kept(self.values.double() * factors.double().view(-1, 1, 1), keep)
        return wide(scaled(self.values, factors, keep))


class Region(NamedTuple):
    """Where the numbers of a value lie in the memory of a parameter, and the value's shape."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    shape: tuple[int, ...]  # of the value: the numbers of `size` in the same order

    @property
    def stop(self) -> int:
        """One past its last number in memory."""
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return self.offset + last + 1 if 0 not in self.size else self.offset


@dataclass(frozen=True)
class Parts:
    """Gradients of a parameter of which only parts were used, each with a factored gradient.

    The parts are slices or other views: no number is in two of them.
    """

    regions: tuple[Region, ...]
    gradients: tuple[FactoredGradient, ...]
    whole: Region

    @property
    def dtype(self) -> torch.dtype:
        return min((g.dtype for g in self.gradients), key=lambda d: torch.finfo(d).bits)

    def dense(self) -> Tensor:
        rows = [gradient.dense() for gradient in self.gradients]
        return self._placed(rows, (rows[0].shape[0],))

    def settle(self, *, bounded: bool) -> tuple[Tensor, FactoredGradient]:
        found = [gradient.settle(bounded=bounded) for gradient in self.gradients]
        squared, gradients = zip(*found, strict=True)
        return torch.stack(squared).sum(0), replace(self, gradients=gradients)

    def weighted_sum(
        self, factors: Tensor, keep: Tensor | None, *, bounded: bool = False
    ) -> Tensor:
        found = [g.weighted_sum(factors, keep, bounded=bounded) for g in self.gradients]
        return self._placed(found, ())

    def _placed(self, values: list[Tensor], examples: tuple[int, ...]) -> Tensor:
        """Return the values in their places, zero elsewhere; `examples` come first, if any."""
        steps = (self.whole.stop,) * len(examples)
        out = values[0].new_zeros(*examples, self.whole.stop)
        for region, value in zip(self.regions, values, strict=True):
            size, stride = examples + region.size, steps + region.stride
            out.as_strided(size, stride, region.offset).copy_(value.reshape(size))
        return out.as_strided(examples + self.whole.size, steps + self.whole.stride)

    @staticmethod
    def together(parts: "Sequence[Parts]") -> "Parts | None":
        """Return the sum of gradients of several parts; None if different parts overlap."""
        found: dict[Region, list[FactoredGradient]] = {}
        for part in parts:
            for region, gradient in zip(part.regions, part.gradients, strict=True):
                found.setdefault(region, []).append(gradient)
        regions = sorted(found, key=lambda region: region.offset)
        if any(one.stop > next.offset for one, next in pairwise(regions)):
            return None
        return Parts(tuple(regions), tuple(combine(found[r]) for r in regions), parts[0].whole)


@dataclass(frozen=True)
class Tied:
    """Gradients of a table that is both looked up (`rows`) and used as a matrix (`outer`)."""

    outer: Outer
    rows: TableRows

    @property
    def dtype(self) -> torch.dtype:
        return self.outer.dtype

    def dense(self) -> Tensor:
        return self.outer.dense() + self.rows.dense()

    def settle(self, *, bounded: bool) -> tuple[Tensor, FactoredGradient]:
        found = self.outer.measure(bounded=bounded)
        if found.gradient is not None:
            return Dense(found.gradient + self.rows.dense()).settle(bounded=bounded)
        positions = self.outer.left.shape[1] + self.rows.ids.shape[1]
        widths = (self.rows.values.shape[2],) * 2  # of the inner products in the cross term
        share = found.room.or_more(room(self.dtype, positions, widths=widths, bounded=bounded))
        of_rows = self.rows.settle(bounded=bounded)[0]
        squared = found.squared + of_rows + 2 * self._cross(bounded=bounded)
        return share.raised(squared, found.lengths + self.rows.length()), self

    def _cross(self, *, bounded: bool) -> Tensor:
        """Return each example's inner product of its `Outer` and its `TableRows` gradient.

        It is sum_ts left_s[id_t] (right_s . value_t) over positions s of the product and t of the
        lookup, raised by what numbers too small for their dtype may have lost.
        """
        size = self.outer.left.shape[1] * self.rows.ids.shape[1]
        tensors = (self.outer.left, self.outer.right, self.rows.values, self.rows.ids)
        found = []
        for *factors, ids in ghost_norm.chunks(size, *tensors):
            left, right, values = in_double(bounded, *factors)
            index = ids.unsqueeze(1).expand(-1, left.shape[1], -1)
            picked = wide(left.gather(2, index))  # (examples, S, T)
            products = product(right, values.to(right.dtype).transpose(1, 2))
            squares = (squared_norm(wide(factor)) for factor in (left, right, values))
            lost = lost_below_range(float(size) * right.shape[2], *squares)
            found.append(block_sums((picked * products).flatten(1)) + lost)
        return torch.cat(found)

    def weighted_sum(
        self, factors: Tensor, keep: Tensor | None, *, bounded: bool = False
    ) -> Tensor:
        of_outer = self.outer.weighted_sum(factors, keep, bounded=bounded)
        return of_outer + self.rows.weighted_sum(factors, keep, bounded=bounded)


@dataclass(frozen=True)
class Together:
    """Gradients sum_t left_t right_t' of several parameters that have one and the same left.

    `rights` holds the inputs of each parameter; None for a bias, whose inputs are all ones.
    """

    left: Tensor
    rights: tuple[Tensor | None, ...]

    def side_by_side(self) -> Outer:
        """Return the gradients as those of one matrix, whose rows are the parameters' columns.

        Its norm is that of all parameters and takes one Gram matrix of `left` for all of them.
        """
        ones = self.left.new_ones(()).expand(*self.left.shape[:2], 1)
        columns = [ones if right is None else right for right in self.rights]
        if not is_by_time(self.left):
            return Outer(torch.cat(columns, 2), self.left)
        by_time = torch.cat([column.transpose(0, 1) for column in columns], 2)
        return Outer(by_time.transpose(0, 1), self.left)

    def apart(self) -> list[FactoredGradient]:
        """Return the gradients of each parameter."""
        return [
            bias_gradient(self.left) if right is None else Outer(self.left, right)
            for right in self.rights
        ]


def bias_gradient(g: Tensor, squared: Tensor | None = None) -> Dense:
    """Return each example's bias gradient: the sum of g (examples, T, P) over the T positions.

    `squared` may give the squared norm of each example's g at T = 1, if it is known.
    """
    if g.shape[1] == 1:
        return Dense(g.squeeze(1), squared)
    return Dense(g.sum(1, dtype=accumulator(g.dtype)))


def weighted_rows(rows: Tensor, factors: Tensor, keep: Tensor | None) -> Tensor:
    """Return the sum over examples i of factors[i] * rows[i] in float64, where `keep` is True.

    Products of float32 numbers are exact in float64, so only the sum is rounded.
    """
    factors = kept(factors.double(), keep)
    if has_kernels(rows):
        from tacit.training.gpu.weighted_rows import weighted_sum

        return weighted_sum(rows, factors, double=True)
    total: Tensor | None = None
    for start, stop in ghost_norm.spans(rows.shape[0], rows.shape[1], rows.device):
        one = None if keep is None else keep[start:stop]
        part = factors[start:stop] @ kept(rows[start:stop].double(), one)
        total = part if total is None else total.add_(part)
    assert total is not None  # a batch has at least one row
    return total


def contract(left: Tensor, right: Tensor, factors: Tensor, keep: Tensor | None) -> Tensor:
    """Return the sum of factors[i] * left[i, t] right[i, t]' over i and t, in float64.

    left (examples, T, P) and right (examples, T, D) are contracted at most `arithmetic.ROWS`
    rows (i, t) at a time, and at most as many parts are added: the depth that `arithmetic` bounds.
    """
    examples, positions, _ = left.shape
    weights = kept(factors.double(), keep).view(-1, 1, 1)
    if examples * positions > ROWS**2:
        raise Unsupported("a microbatch of more positions than bounded arithmetic takes at once")
    width = left.shape[2] + right.shape[2]
    total: Tensor | None = None
    for start, stop in ghost_norm.spans(examples, positions * width, left.device):
        one = None if keep is None else keep[start:stop]
        a = kept(left[start:stop] * weights[start:stop], one).flatten(0, 1)  # in float64
        b = kept(right[start:stop].double(), one).flatten(0, 1)
        for at in range(0, len(a), ROWS):
            sides = a[at : at + ROWS].t(), b[at : at + ROWS]
            total = torch.mm(*sides) if total is None else total.addmm_(*sides)
    assert total is not None  # a batch has at least one row
    return total


def combine(gradients: Sequence[FactoredGradient]) -> FactoredGradient:
    """Return the sum of one tensor's gradients from several calls; its norm has the cross terms."""
    if len(gradients) == 1:
        return gradients[0]
    outers = [g for g in gradients if isinstance(g, Outer)]
    rows = [g for g in gradients if isinstance(g, TableRows)]
    if len(outers) + len(rows) == len(gradients):
        # One long sequence of positions has all the cross terms of its parts.
        if not rows:
            return _one_product(outers)
        return Tied(_one_product(outers), _one_lookup(rows)) if outers else _one_lookup(rows)
    parts = [g for g in gradients if isinstance(g, Parts)]
    together = Parts.together(parts) if len(parts) == len(gradients) else None
    if together is not None:
        return together
    return Dense(sum((g.dense() for g in gradients[1:]), gradients[0].dense()))


def in_sequence(gradients: Sequence[Together]) -> Together:
    """Return the sum of the gradients from several calls, as from one sequence of positions."""
    rights = [
        None if parts[0] is None else _concatenate(list(parts))
        for parts in zip(*(g.rights for g in gradients), strict=True)
    ]
    return Together(_concatenate([g.left for g in gradients]), tuple(rights))


def _one_product(outers: Sequence[Outer]) -> Outer:
    return Outer(_concatenate([g.left for g in outers]), _concatenate([g.right for g in outers]))


def _one_lookup(rows: Sequence[TableRows]) -> TableRows:
    ids, values = _concatenate([g.ids for g in rows]), _concatenate([g.values for g in rows])
    return TableRows(ids, values, rows[0].table)


def _concatenate(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)


def is_small(parameter: Tensor, examples: int) -> bool:
    """Return whether to form the gradients of a parameter without asking what is cheapest."""
    return not parameter.is_cuda and usual(examples) * parameter.numel() <= SMALL


def is_better_joined(gradient: FactoredGradient, parameter: Tensor, examples: int) -> bool:
    """Return whether calls of operators for this gradient alone take longer than their work.

    `joined` puts such gradients of several parameters into one tensor.
    """
    is_plain = isinstance(gradient, Dense) and gradient.squared is None and gradient.axes is None
    fits_gpu = parameter.is_cuda and is_plain and parameter.numel() <= SMALL
    return fits_gpu or is_small(parameter, examples)


def joined(gradients: Sequence[FactoredGradient]) -> Dense:
    """Return the gradients of several parameters side by side in one tensor, to save calls."""
    rows = [wide(gradient.dense()).unsqueeze(1).flatten(1) for gradient in gradients]
    if rows[0].is_cuda:
        rows = [F.pad(r, (0, -r.shape[1] % ALIGNED)) for r in rows]
    return Dense(torch.cat(rows, 1))


def apart(total: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return each parameter's sum, in its shape, from the weighted sum of `joined` gradients.

    Or from that of gradients that stand `Together`, side by side.
    """
    if len(shapes) > 1 and total.dim() == 2:
        rows = total.split([shape[1:].numel() for shape in shapes])
        return [p.t().contiguous().view(shape) for p, shape in zip(rows, shapes, strict=True)]
    if len(shapes) == 1:
        if total.shape == shapes[0]:
            return [total]
        return [total.to_dense().flatten()[: shapes[0].numel()].view(shapes[0])]
    step = ALIGNED if total.is_cuda else 1
    parts = total.split([shape.numel() + -shape.numel() % step for shape in shapes])
    return [p[: s.numel()].view(s) for p, s in zip(parts, shapes, strict=True)]


def is_by_time(rows: Tensor) -> bool:
    """Return whether the positions (second axis) are outside of the examples in memory."""
    return rows.stride(1) > rows.stride(0)


def held_bytes(held: Any) -> int:  # Any: a gradient, or what one holds
    """Return the bytes of the tensors in a factored gradient."""
    if isinstance(held, Tensor):
        return usual(held.numel()) * held.itemsize
    if isinstance(held, tuple):
        return sum(map(held_bytes, held))
    return sum(map(held_bytes, vars(held).values())) if hasattr(held, "weighted_sum") else 0


def scaled(rows: Tensor, factors: Tensor, keep: Tensor | None) -> Tensor:
    """Return each example's row times its factor, then rounded; zero where `keep` is False."""
    shape = (-1,) + (1,) * (rows.dim() - 1)
    found = rows * factors.view(shape)
    return kept(found if found.dtype == rows.dtype else found.to(rows.dtype), keep)


def kept(rows: Tensor, keep: Tensor | None) -> Tensor:
    """Return the rows with zeros where `keep` is False; a factor of 0 would leave 0 * inf = nan."""
    if keep is None:
        return rows
    return torch.where(keep.view((-1,) + (1,) * (rows.dim() - 1)), rows, 0.0)
