"""Per-example gradients that need not be formed: their norms, their sums, their weighted sums.

A piece stands for a tensor of shape (examples, *shape). Pieces of one parameter that was used
several times add up before the norm is taken: |u + v|^2 has a cross term.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.training import gpu
from tacit.training.gradients.cost import cheapest_way
from tacit.training.gradients.rounding import room
from tacit.training.gradients.site import Piece
from tacit.training.sums import accumulator

# Largest temporary of one chunk of examples, in elements: on a CPU it should stay in the cache.
CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}

# Gradients of up to this many numbers are handled side by side on a GPU, each beginning at a
# multiple of ALIGNED numbers, as kernels that read several at a time want it.
SMALL, ALIGNED = 2**14, 16

# Rows up to this long are squared and summed faster by a matrix product on a CPU.
NARROW = 16

TINY = 2.0**-110  # squares below float32's range, and the sum of many of them, are lost


def chunk_elements(device: torch.device) -> int:
    """Largest temporary on this device."""
    return CHUNK_ELEMENTS.get(device.type, 2**24)


@dataclass(frozen=True)
class Dense:
    """Gradients that were formed, (examples, *shape)."""

    values: Tensor
    squared: Tensor | None = None  # squared norms, where the rule had them anyway
    axes: tuple[int, ...] | None = None  # order of the values' axes as the parameter has them

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def dense(self) -> Tensor:
        if self.axes is None:
            return self.values
        return self.values.permute(0, *(axis + 1 for axis in self.axes))

    def settle(self) -> tuple[Tensor, Piece]:
        return (squared_norm(self.values) if self.squared is None else self.squared), self

    def is_better_joined(self) -> bool:
        """Whether a GPU spends more time on launches for this piece than on its numbers."""
        is_plain = self.squared is None and self.axes is None and self.values.is_cuda
        return is_plain and self.values[0].numel() <= SMALL

    def weighted_sum(self, factors: Tensor, keep: Tensor | None) -> Tensor:
        flat = self.values.reshape(len(factors), -1)
        if gpu.usable(flat) and flat.element_size() == 2:
            total = gpu.weighted_sum(flat, kept(factors, keep)).view(self.values.shape[1:])
        else:
            flat = kept(wide(flat), keep)
            total = (factors.to(flat.dtype) @ flat).view(self.values.shape[1:])
        return total if self.axes is None else total.permute(self.axes)


def joined(pieces: Sequence[Dense]) -> Dense:
    """Gradients of several parameters side by side: one norm and one sum in place of many."""
    rows = [wide(piece.values).reshape(len(piece.values), -1) for piece in pieces]
    return Dense(torch.cat([F.pad(r, (0, -r.shape[1] % ALIGNED)) for r in rows], 1))


def apart(total: Tensor, shapes: Sequence[torch.Size]) -> Iterator[Tensor]:
    """The sums of `joined` pieces, or the only one, in these shapes."""
    if [total.numel()] == [shape.numel() for shape in shapes]:
        yield total.reshape(shapes[0])
        return
    start = 0
    for shape in shapes:
        yield total[start : start + shape.numel()].view(shape)
        start += shape.numel() + -shape.numel() % ALIGNED


@dataclass(frozen=True)
class Outer:
    """Gradients sum_t left_t right_t' of a matrix, shapes (examples, T, P) and (examples, T, D)."""

    left: Tensor
    right: Tensor
    left_squared: Tensor | None = None  # at T = 1: squared norms, where the rule had them
    right_squared: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    def dense(self) -> Tensor:
        return bmm_wide(self.left.transpose(1, 2), self.right)

    def settle(self) -> tuple[Tensor, Piece]:
        if self.left.shape[1] == 1:
            return self._rank_one(), self
        squared, lengths, share, piece = self.measure()
        if isinstance(piece, Dense):
            return squared, piece
        return squared + share * lengths.square(), piece

    def _rank_one(self) -> Tensor:
        left = squared_norm(self.left) if self.left_squared is None else self.left_squared
        right = squared_norm(self.right) if self.right_squared is None else self.right_squared
        return (left + TINY) * (right + TINY)

    def measure(self) -> tuple[Tensor, Tensor, float, Piece]:
        """Squared norms, sums of |left_t| |right_t|, the `room` to leave, and what to weigh.

        A gradient that was formed needs no room: its norm is taken of what will be weighed.
        """
        positions, outputs = self.left.shape[1:]
        inputs = self.right.shape[2]
        if positions == 1:
            squared = self._rank_one()
            return squared, squared.sqrt(), room(self.dtype), self
        way = cheapest_way(
            positions,
            inputs,
            outputs,
            examples=len(self.left),
            item=accumulator(self.left.dtype).itemsize,
            stored=positions * (inputs + outputs),
            device=self.left.device,
            fused=gpu.usable(self.left),
        )
        if way == "keep":
            squared, piece = Dense(self.dense()).settle()
            return squared, squared.sqrt(), 0.0, piece
        width, fused = max(inputs, outputs), gpu.usable(self.left)
        share = room(self.dtype, gram=width if way == "gram" else 0, fused=fused)
        if way == "gram" and fused:
            return *gpu.gram_norms(self.right, self.left), share, self
        size = positions**2 if way == "gram" else inputs * outputs
        parts = [
            gram(left, right)
            if way == "gram"
            else (squared_norm(Outer(left, right).dense()), lengths(left, right))
            for left, right in _chunks(size, self.left, self.right)
        ]
        squared, sizes = zip(*parts, strict=True)
        return _joined(squared), _joined(sizes), share, self

    def weighted_sum(self, factors: Tensor, keep: Tensor | None) -> Tensor:
        left, right = self.left, self.right
        if left.shape[2] <= right.shape[2]:
            left, right = scaled(left, factors, keep), kept(right, keep)
        else:
            left, right = kept(left, keep), scaled(right, factors, keep)
        return mm_wide(left.reshape(-1, left.shape[2]).t(), right.reshape(-1, right.shape[2]))


@dataclass(frozen=True)
class Rows:
    """Gradients of a table: row ids[i, t] of example i receives values[i, t]."""

    ids: Tensor  # (examples, T)
    values: Tensor  # (examples, T, D)
    table: int  # number of rows

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def dense(self) -> Tensor:
        examples, _, width = self.values.shape
        rows = torch.arange(examples, device=self.ids.device).unsqueeze(1) * self.table + self.ids
        out = wide(self.values).new_zeros(examples * self.table, width)
        out = out.index_add(0, rows.flatten(), wide(self.values).reshape(-1, width))
        return out.view(examples, self.table, width)

    def settle(self) -> tuple[Tensor, Piece]:
        if self.ids.shape[1] == 1:
            return squared_norm(self.values), self
        squared = squared_norm(self._compact())
        return squared + room(self.dtype) * self.length().square(), self

    def length(self) -> Tensor:
        """Sum of the norms of an example's values."""
        return norms_along(self.values, 2).sum(1)

    def _compact(self) -> Tensor:
        """Values added up by id within each example, in T rows: same norms, no table."""
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
class Stacked:
    """Gradients stacked along the first axis of the parameter, as in a packed projection."""

    parts: tuple[Piece, ...]

    @property
    def dtype(self) -> torch.dtype:
        return min((p.dtype for p in self.parts), key=lambda d: torch.finfo(d).bits)

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self.parts], dim=1)

    def settle(self) -> tuple[Tensor, Piece]:
        squared, parts = zip(*(part.settle() for part in self.parts), strict=True)
        return torch.stack(squared).sum(0), Stacked(parts)

    def weighted_sum(self, factors: Tensor, keep: Tensor | None) -> Tensor:
        return torch.cat([part.weighted_sum(factors, keep) for part in self.parts])


@dataclass(frozen=True)
class Tied:
    """A table read by rows and used as a matrix too, as a language model's tied head."""

    outer: Outer
    rows: Rows

    @property
    def dtype(self) -> torch.dtype:
        return self.outer.dtype

    def dense(self) -> Tensor:
        return self.outer.dense() + self.rows.dense()

    def settle(self) -> tuple[Tensor, Piece]:
        squared, lengths, share, outer = self.outer.measure()
        if isinstance(outer, Dense):
            return Dense(outer.values + self.rows.dense()).settle()
        squared = squared + self.rows.settle()[0] + 2 * self._cross()
        share = max(share, room(self.dtype, gram=self.rows.values.shape[2]))  # the cross term
        return squared + share * (lengths + self.rows.length()).square(), self

    def _cross(self) -> Tensor:
        """sum_ts left_s[id_t] (right_s . value_t): the inner product of the two gradients."""
        size = self.outer.left.shape[1] * self.rows.ids.shape[1]
        tensors = (self.outer.left, self.outer.right, self.rows.ids, self.rows.values)
        parts = []
        for left, right, ids, values in _chunks(size, *tensors):
            index = ids.unsqueeze(1).expand(-1, left.shape[1], -1)
            picked = wide(left.gather(2, index))  # (examples, S, T)
            products = bmm_wide(right, values.to(right.dtype).transpose(1, 2))
            parts.append((picked * products).sum((1, 2)))
        return torch.cat(parts)

    def weighted_sum(self, factors: Tensor, keep: Tensor | None) -> Tensor:
        return self.outer.weighted_sum(factors, keep) + self.rows.weighted_sum(factors, keep)


def combine(pieces: Sequence[Piece]) -> Piece:
    """One piece for the sum of several of the same tensor, with all cross terms in its norm."""
    if len(pieces) == 1:
        return pieces[0]
    outers = [p for p in pieces if isinstance(p, Outer)]
    rows = [p for p in pieces if isinstance(p, Rows)]
    if len(outers) + len(rows) == len(pieces):
        # One long sequence holds the cross terms of its parts.
        outer = (
            Outer(_cat([p.left for p in outers]), _cat([p.right for p in outers]))
            if outers
            else None
        )
        row = (
            Rows(_cat([p.ids for p in rows]), _cat([p.values for p in rows]), rows[0].table)
            if rows
            else None
        )
        if outer and row:
            return Tied(outer, row)
        return outer or row  # type: ignore[return-value]  # one of them is there
    stacks = [p.parts for p in pieces if isinstance(p, Stacked)]
    if len(stacks) == len(pieces) and len({tuple(_heights(parts)) for parts in stacks}) == 1:
        return Stacked(tuple(combine(parts) for parts in zip(*stacks, strict=True)))
    total = pieces[0].dense()
    for piece in pieces[1:]:
        total = total + piece.dense()
    return Dense(total)


def _heights(parts: Sequence[Piece]) -> Iterator[int]:
    for part in parts:
        yield part.left.shape[2] if isinstance(part, Outer) else part.dense().shape[1]


def _cat(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)


def gram(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms of sum_t left_t right_t', by inner products of positions; the `lengths`."""
    left, right = bmm_wide(left, left.transpose(1, 2)), bmm_wide(right, right.transpose(1, 2))
    products = left * right
    return products.sum((1, 2)), products.diagonal(dim1=1, dim2=2).sqrt().sum(1)


def lengths(left: Tensor, right: Tensor) -> Tensor:
    """Sum over positions of |left_t| |right_t|, for each example."""
    return (norms_along(left, 2) * norms_along(right, 2)).sum(1)


def norms_along(tensor: Tensor, dim: int) -> Tensor:
    """Norms over one axis, at least in float32."""
    return torch.linalg.vector_norm(tensor, dim=dim, dtype=accumulator(tensor.dtype))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _chunks(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors cut along the examples so that `size` numbers for each stay within bounds."""
    examples = len(tensors[0])
    step = max(1, chunk_elements(tensors[0].device) // max(1, size))
    for start in range(0, examples, step):
        yield tuple(t[start : start + step] for t in tensors) if step < examples else tensors


def squared_norm(rows: Tensor) -> Tensor:
    """Squared norm of each row, at least in float32."""
    flat = rows.reshape(rows.shape[0], -1)
    if flat.shape[1] <= NARROW and not flat.is_cuda:
        flat = wide(flat)
        return (flat * flat).mv(flat.new_ones(flat.shape[1]))
    return torch.linalg.vector_norm(flat, dim=1, dtype=accumulator(flat.dtype)).square()


def wide(tensor: Tensor) -> Tensor:
    """At least float32."""
    return tensor.to(accumulator(tensor.dtype))


def bmm_wide(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Batched product whose sums are not rounded below float32."""
    if left.is_cuda and left.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(left, right, out_dtype=torch.float32, out=out)
    return torch.bmm(wide(left), wide(right), out=out)


def mm_wide(left: Tensor, right: Tensor) -> Tensor:
    """Product whose sums are not rounded below float32."""
    if left.is_cuda and left.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(wide(left), wide(right))


def scaled(rows: Tensor, factors: Tensor, keep: Tensor | None) -> Tensor:
    """Each row times its factor, multiplied before rounding; zero where not kept."""
    shape = (-1,) + (1,) * (rows.dim() - 1)
    product = (rows * factors.view(shape)).to(rows.dtype)
    return kept(product, keep)


def kept(rows: Tensor, keep: Tensor | None) -> Tensor:
    """The rows, with zeros where not kept: 0 * inf would poison the sum."""
    if keep is None:
        return rows
    return torch.where(keep.view((-1,) + (1,) * (rows.dim() - 1)), rows, 0.0)
