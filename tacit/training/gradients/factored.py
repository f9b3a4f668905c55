"""Per-example gradients in factored form, which need not be formed to be clipped and summed.

A factored gradient stands for a tensor of shape (examples, *shape of the parameter). If several
calls use one parameter, their gradients are combined before the norm is taken, because
|u + v|^2 has a cross term.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.training.gradients import ghost_norm
from tacit.training.gradients.ghost_norm import (
    GhostNorm,
    has_kernels,
    norms_along,
    product,
    room,
    squared_norm,
    wide,
)

# On a GPU, gradients of up to SMALL numbers are handled side by side in one tensor. Each begins at
# a multiple of ALIGNED numbers, because kernels read several numbers at a time.
SMALL, ALIGNED = 2**14, 16

TINY = 2.0**-110  # added to squares, since those below float32's range are lost, and their sums too


class FactoredGradient(Protocol):
    """Per-example gradients of one tensor from one call, held as factors or formed."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to which the operands of the weighted sum are rounded."""
        ...

    def dense(self) -> Tensor:
        """Return the gradients formed, shape (examples, *shape of the tensor)."""
        ...

    def settle(self) -> "tuple[Tensor, FactoredGradient]":
        """Return the squared norm of each example's gradient, and gradients for the weighted sum.

        The norms are at least float32. The gradients are these, perhaps in another form.
        """
        ...

    def weighted_sum(self, factors: Tensor, keep: Tensor | None) -> Tensor:
        """Return the sum over examples of factor times gradient, in at least float32.

        Examples where `keep` is False add exactly zero, even if their gradient is not finite. None
        keeps all examples.
        """
        ...


@dataclass(frozen=True)
class Dense:
    """Gradients that are formed, shape (examples, *shape)."""

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

    def settle(self) -> tuple[Tensor, FactoredGradient]:
        return (squared_norm(self.values) if self.squared is None else self.squared), self

    def is_better_joined(self) -> bool:
        """Return True if a GPU takes longer to launch kernels for this gradient than to run them.

        Such gradients are handled together, see `joined`.
        """
        is_plain = self.squared is None and self.axes is None and self.values.is_cuda
        return is_plain and self.values[0].numel() <= SMALL

    def weighted_sum(self, factors: Tensor, keep: Tensor | None) -> Tensor:
        flat = self.values.reshape(len(factors), -1)
        if has_kernels(flat) and flat.element_size() == 2:
            from tacit.training import gpu

            total = gpu.weighted_sum(flat, kept(factors, keep)).view(self.values.shape[1:])
        else:
            flat = kept(wide(flat), keep)
            total = (factors.to(flat.dtype) @ flat).view(self.values.shape[1:])
        return total if self.axes is None else total.permute(self.axes)


@dataclass(frozen=True)
class Outer:
    """Gradients sum_t left_t right_t' of a matrix, from the output gradients and the inputs.

    Shapes: left (examples, T, P), right (examples, T, D). The squared norms of the factors may be
    given at T = 1, if the rule has computed them already.
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

    def settle(self) -> tuple[Tensor, FactoredGradient]:
        if self.left.shape[1] == 1:
            return self._rank_one(), self
        found = self.measure()
        if found.gradient is not None:
            return found.squared, Dense(found.gradient)
        return found.raised(), self

    def transposed(self) -> "Outer":
        """Return the gradients of the transposed matrix."""
        return Outer(self.right, self.left, self.right_squared, self.left_squared)

    def measure(self) -> GhostNorm:
        """Return the norm of each example's gradient, computed in the cheapest way."""
        if self.left.shape[1] > 1:
            return ghost_norm.ghost_norm(self.left, self.right)
        squared = self._rank_one()
        return GhostNorm(squared, squared.sqrt(), room(self.dtype))

    def _rank_one(self) -> Tensor:
        left = squared_norm(self.left) if self.left_squared is None else self.left_squared
        right = squared_norm(self.right) if self.right_squared is None else self.right_squared
        return (left + TINY) * (right + TINY)

    def weighted_sum(self, factors: Tensor, keep: Tensor | None) -> Tensor:
        left, right = self.left, self.right
        if left.shape[2] <= right.shape[2]:
            left, right = scaled(left, factors, keep), kept(right, keep)
        else:
            left, right = kept(left, keep), scaled(right, factors, keep)
        return product(left.reshape(-1, left.shape[2]).t(), right.reshape(-1, right.shape[2]))


@dataclass(frozen=True)
class TableRows:
    """Gradients of a table: row ids[i, t] receives values[i, t] from example i."""

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

    def settle(self) -> tuple[Tensor, FactoredGradient]:
        if self.ids.shape[1] == 1:
            return squared_norm(self.values), self
        squared = squared_norm(self._compact())
        return squared + room(self.dtype) * self.length().square(), self

    def length(self) -> Tensor:
        """Return the sum of the norms of each example's values."""
        return norms_along(self.values, 2).sum(1)

    def _compact(self) -> Tensor:
        """Return the values added up by id within each example, in T rows.

        The norms are those of the whole table, which is not formed.
        """
        examples, positions, width = self.values.shape
        ordered, order = self.ids.sort(dim=1)
        ranks = torch.zeros_like(ordered)
        ranks[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(1)  # (examples, T)
        first = torch.arange(examples, device=ranks.device).unsqueeze(1) * positions
        slots = torch.empty_like(ranks).scatter_(1, order, ranks + first)
        values = wide(self.values).reshape(-1, width)
        out = torch.zeros_like(values).index_add(0, slots.flatten(), values)
        return out.view(examples, positions, width)

    def weighted_sum(self, factors: Tensor, keep: Tensor | None) -> Tensor:
        values = wide(scaled(self.values, factors, keep))
        return torch.ops.aten.embedding_dense_backward(values, self.ids, self.table, -1, False)


@dataclass(frozen=True)
class Concatenated:
    """Gradients concatenated along the first axis of the parameter, as in a packed projection."""

    blocks: tuple[FactoredGradient, ...]

    @property
    def dtype(self) -> torch.dtype:
        return min((block.dtype for block in self.blocks), key=lambda d: torch.finfo(d).bits)

    def dense(self) -> Tensor:
        return torch.cat([block.dense() for block in self.blocks], dim=1)

    def settle(self) -> tuple[Tensor, FactoredGradient]:
        squared, blocks = zip(*(block.settle() for block in self.blocks), strict=True)
        return torch.stack(squared).sum(0), Concatenated(blocks)

    def weighted_sum(self, factors: Tensor, keep: Tensor | None) -> Tensor:
        return torch.cat([block.weighted_sum(factors, keep) for block in self.blocks])

    def heights(self) -> tuple[int, ...]:
        """Return how many rows of the parameter each block covers."""
        return tuple(
            block.left.shape[2] if isinstance(block, Outer) else block.dense().shape[1]
            for block in self.blocks
        )


@dataclass(frozen=True)
class Tied:
    """Gradients of a table that is both looked up and used as a matrix, as a tied output head."""

    outer: Outer
    rows: TableRows

    @property
    def dtype(self) -> torch.dtype:
        return self.outer.dtype

    def dense(self) -> Tensor:
        return self.outer.dense() + self.rows.dense()

    def settle(self) -> tuple[Tensor, FactoredGradient]:
        found = self.outer.measure()
        if found.gradient is not None:
            return Dense(found.gradient + self.rows.dense()).settle()
        squared = found.squared + self.rows.settle()[0] + 2 * self._cross()
        share = max(found.room, room(self.dtype, gram=self.rows.values.shape[2]))  # the cross term
        return squared + share * (found.lengths + self.rows.length()).square(), self

    def _cross(self) -> Tensor:
        """Return sum_ts left_s[id_t] (right_s . value_t), the inner product of the two parts."""
        size = self.outer.left.shape[1] * self.rows.ids.shape[1]
        tensors = (self.outer.left, self.outer.right, self.rows.ids, self.rows.values)
        found = []
        for left, right, ids, values in ghost_norm.chunks(size, *tensors):
            index = ids.unsqueeze(1).expand(-1, left.shape[1], -1)
            picked = wide(left.gather(2, index))  # (examples, S, T)
            products = product(right, values.to(right.dtype).transpose(1, 2))
            found.append((picked * products).sum((1, 2)))
        return torch.cat(found)

    def weighted_sum(self, factors: Tensor, keep: Tensor | None) -> Tensor:
        return self.outer.weighted_sum(factors, keep) + self.rows.weighted_sum(factors, keep)


def combine(gradients: Sequence[FactoredGradient]) -> FactoredGradient:
    """Return the sum of several gradients of one tensor, whose norm includes all cross terms."""
    if len(gradients) == 1:
        return gradients[0]
    outers = [g for g in gradients if isinstance(g, Outer)]
    rows = [g for g in gradients if isinstance(g, TableRows)]
    if len(outers) + len(rows) == len(gradients):
        # One long sequence of positions has all the cross terms of its parts.
        if not rows:
            return _one_product(outers)
        return Tied(_one_product(outers), _one_lookup(rows)) if outers else _one_lookup(rows)
    stacks = [g for g in gradients if isinstance(g, Concatenated)]
    if len(stacks) == len(gradients) and len({stack.heights() for stack in stacks}) == 1:
        aligned = zip(*(stack.blocks for stack in stacks), strict=True)
        return Concatenated(tuple(combine(blocks) for blocks in aligned))
    return Dense(sum((g.dense() for g in gradients[1:]), gradients[0].dense()))


def _one_product(outers: Sequence[Outer]) -> Outer:
    return Outer(_concatenate([g.left for g in outers]), _concatenate([g.right for g in outers]))


def _one_lookup(rows: Sequence[TableRows]) -> TableRows:
    ids, values = _concatenate([g.ids for g in rows]), _concatenate([g.values for g in rows])
    return TableRows(ids, values, rows[0].table)


def _concatenate(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)


def joined(gradients: Sequence[Dense]) -> Dense:
    """Return the gradients of several parameters side by side: one norm and one sum for all."""
    rows = [wide(gradient.values).reshape(len(gradient.values), -1) for gradient in gradients]
    return Dense(torch.cat([F.pad(r, (0, -r.shape[1] % ALIGNED)) for r in rows], 1))


def apart(total: Tensor, shapes: Sequence[torch.Size]) -> Iterator[Tensor]:
    """Yield the sum for each parameter from the sum of `joined` gradients, in these shapes."""
    if [total.numel()] == [shape.numel() for shape in shapes]:
        yield total.reshape(shapes[0])
        return
    start = 0
    for shape in shapes:
        yield total[start : start + shape.numel()].view(shape)
        start += shape.numel() + -shape.numel() % ALIGNED


def scaled(rows: Tensor, factors: Tensor, keep: Tensor | None) -> Tensor:
    """Return each row times its factor, multiplied before rounding; zero if not kept."""
    shape = (-1,) + (1,) * (rows.dim() - 1)
    return kept((rows * factors.view(shape)).to(rows.dtype), keep)


def kept(rows: Tensor, keep: Tensor | None) -> Tensor:
    """Return the rows with zeros where `keep` is False; a factor of 0 would leave 0 * inf = nan."""
    if keep is None:
        return rows
    return torch.where(keep.view((-1,) + (1,) * (rows.dim() - 1)), rows, 0.0)
