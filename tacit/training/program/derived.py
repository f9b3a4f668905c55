"""From the per-example gradients of a derived value to those of what it is computed from.

A derived value is computed from parameters alone: a transposed or sliced weight, a low-rank
correction, position embeddings. Where the computation only moves, adds or scales numbers, looks
them up or multiplies two matrices, the gradients of its sources stay factored. Elsewhere autograd
forms them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tacit.training.rules.factored import (
    Dense,
    FactoredGradient,
    Outer,
    Parts,
    Region,
    TableRows,
)
from tacit.training.torch_internals import TO_COPY
from tacit.training.tree import is_out_of_memory

aten = torch.ops.aten
Step = Callable[..., FactoredGradient]  # of a value's gradient, and the values that are `needed`


class Pull(NamedTuple):
    """How a value's gradients become those of its sources."""

    sources: tuple[tuple[fx.Node, Step], ...]
    needed: tuple[fx.Node, ...] = ()


class DerivedValue(NamedTuple):
    """A `Pull` in terms of names; without sources, autograd pulls the gradients back."""

    name: str
    sources: tuple[tuple[str, Step], ...]
    needed: tuple[str, ...]


def pull_of(node: fx.Node, is_shared: Callable[[Any], bool]) -> Pull | None:
    """Return how the gradients of a derived value are pulled back; None if by autograd."""
    if isinstance(value := _value(node), Tensor) and value.is_complex():
        return None  # the rules are for real numbers
    rule = _PULLS.get(node.target)
    found = None if rule is None else rule(node, is_shared)
    return _region(node) if found is None else found


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


# Computations that move numbers -------------------------------------------------------------------

# The same numbers in the same order, whatever the shape; some copy, some return a view.
_ORDERED = {
    aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int,
    aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.contiguous.default, aten.clone.default, aten.alias.default,
}  # fmt: skip
_VIEWS = {
    aten.view.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.unflatten.int, aten.alias.default, aten.t.default, aten.numpy_T.default,
    aten.mT.default, aten.transpose.int, aten.permute.default, aten.slice.Tensor, aten.select.int,
    aten.narrow.default, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default,
    aten.unbind.int, aten.movedim.int, aten.movedim.intlist,
}  # fmt: skip


def _region(node: fx.Node) -> Pull | None:
    """Pull back a value that holds some of a source's numbers, each once: a slice, a view."""
    held: Any = node  # Any: of the many kinds of arguments, a node, as the operators demand
    while held.target in _ORDERED:
        held = held.args[0]
    root = held
    while root.target in _VIEWS or getattr(root.target, "__name__", "") == "getitem":
        root = root.args[0]
    values = [_value(n) for n in (node, held, root)]
    if root is node or not all(isinstance(value, Tensor) for value in values):
        return None
    value, part, whole = values
    shape, start = tuple(value.shape), whole.storage_offset()
    region = Region(tuple(part.shape), part.stride(), part.storage_offset() - start, shape)
    entire = Region(tuple(whole.shape), whole.stride(), 0, tuple(whole.shape))
    if entire.stop != whole.numel():
        return None  # its numbers are not adjacent
    if shape == tuple(whole.shape) and region[:3] == entire[:3]:
        return Pull(((root, _same),))
    return Pull(((root, partial(_part, region, entire)),))


def _part(region: Region, whole: Region, gradient: FactoredGradient) -> FactoredGradient:
    return Parts((region,), (gradient,), whole)


def _same(gradient: FactoredGradient) -> FactoredGradient:
    return gradient


def _cast(node: fx.Node, is_shared: Callable[[Any], bool]) -> Pull | None:
    """Pull back a cast; formed gradients are rounded to the source's type, as by autograd."""
    source: Any = node.args[0]
    step = partial(_rounded, _value(source).dtype)
    return Pull(((source, step),)) if is_shared(source) else None


def _rounded(dtype: torch.dtype, gradient: FactoredGradient) -> FactoredGradient:
    if isinstance(gradient, Parts):
        parts = tuple(_rounded(dtype, part) for part in gradient.gradients)
        return replace(gradient, gradients=parts)
    return Dense(gradient.dense().to(dtype)) if isinstance(gradient, Dense) else gradient


def _transpose(node: fx.Node, _: Any) -> Pull | None:
    """Pull back a transposed matrix; a product's gradients stay a product."""
    source: Any  # a node
    axes: Any  # whole numbers
    source, *axes = node.args
    if _value(node).dim() != 2 or {axis % 2 for axis in axes} not in (set(), {0, 1}):
        return None
    (plain,) = _region(node).sources  # type: ignore[union-attr]  # a matrix is such a view

    def step(gradient: FactoredGradient) -> FactoredGradient:
        return gradient.transposed() if isinstance(gradient, Outer) else plain[1](gradient)

    return Pull(((source, step),)) if plain[0] is source else None


def _expand(node: fx.Node, _: Any) -> Pull:
    source: Any = node.args[0]
    return Pull(((source, partial(_summed, 1, tuple(_value(source).shape))),))


def _summed(factor: float, shape: tuple[int, ...], gradient: FactoredGradient) -> FactoredGradient:
    """Return the factor times a gradient, summed to `shape` where the value was broadcast."""
    rows = gradient.dense()
    ones = (1,) * (rows.dim() - 1 - len(shape))
    rows = rows.sum_to_size(rows.shape[0], *ones, *shape).reshape(rows.shape[0], *shape)
    return Dense(rows * factor)


def _lookup(node: fx.Node, is_shared: Callable[[Any], bool]) -> Pull | None:
    table: Any = node.args[0]
    ids: Any = node.args[1]
    ids = ids[0] if isinstance(ids, list | tuple) and len(ids) == 1 else ids
    rest = node.args[2:]
    if not isinstance(ids, fx.Node) or is_shared(ids) or any(rest[1:]):
        return None
    if _value(table).dim() != 2 or _value(ids).dtype not in (torch.int64, torch.int32):
        return None
    rows, width = _value(table).shape
    padding: Any = rest[0] if rest else -1  # Any: a whole number

    def step(gradient: FactoredGradient, ids: Tensor) -> FactoredGradient:
        values = gradient.dense()
        values = values.reshape(values.shape[0], -1, width)  # (examples, T, width)
        ids = ids.long().reshape(1, -1).expand(values.shape[0], -1) % rows
        if padding >= 0:
            values = torch.where((ids == padding).unsqueeze(-1), 0.0, values)
        return TableRows(ids, values, rows)

    return Pull(((table, step),), (ids,))


# Sums and products --------------------------------------------------------------------------------


def _sum(node: fx.Node, is_shared: Callable[[Any], bool], sign: float = 1) -> Pull:
    args: Any = node.args[:2]  # Any: nodes and numbers
    factors = 1, sign * node.kwargs.get("alpha", 1)  # type: ignore[operator]  # a number
    return Pull(
        tuple(
            (arg, _scaling(factor, node, arg))
            for arg, factor in zip(args, factors, strict=True)
            if is_shared(arg)
        )
    )


def _scaling(factor: Any, node: fx.Node, source: Any) -> Step:
    if _value(node).shape != _value(source).shape:
        return partial(_summed, factor, tuple(_value(source).shape))
    return _same if factor == 1 else partial(_scaled, factor)


def _scaled(factor: float, gradient: FactoredGradient) -> FactoredGradient:
    if isinstance(gradient, Outer):
        return replace(gradient, left=gradient.left * factor, left_squared=None)
    if isinstance(gradient, TableRows):
        return replace(gradient, values=gradient.values * factor)
    return Dense(gradient.dense() * factor)


def _times(node: fx.Node, is_shared: Callable[[Any], bool], power: int = 1) -> Pull | None:
    value: Any = node.args[0]  # Any: a node
    factor = node.args[1]
    if not isinstance(factor, int | float) or len(node.args) > 2 or node.kwargs:
        return None
    return Pull(((value, partial(_scaled, factor**power)),)) if is_shared(value) else None


def _matrix_product(node: fx.Node, is_shared: Callable[[Any], bool]) -> Pull | None:
    left: Any = node.args[0]
    right: Any = node.args[1]
    if _value(left).dim() != 2 or _value(right).dim() != 2:
        return None

    def of_left(gradient: FactoredGradient, _: Tensor, b: Tensor) -> FactoredGradient:
        if isinstance(gradient, Outer):
            return Outer(gradient.left, gradient.right @ b.t().to(gradient.right.dtype))
        return Dense(gradient.dense() @ b.t())

    def of_right(gradient: FactoredGradient, a: Tensor, _: Tensor) -> FactoredGradient:
        if isinstance(gradient, Outer):
            return Outer(gradient.left @ a.to(gradient.left.dtype), gradient.right)
        return Dense(a.t() @ gradient.dense())

    pairs = (left, of_left), (right, of_right)
    return Pull(tuple(pair for pair in pairs if is_shared(pair[0])), (left, right))


_PULLS: dict[Any, Callable[..., Pull | None]] = {
    **dict.fromkeys((aten.to.dtype, aten.to.device, aten.to.dtype_layout), _cast),
    TO_COPY: _cast,
    **dict.fromkeys((aten.t.default, aten.numpy_T.default, aten.mT.default), _transpose),
    **dict.fromkeys((aten.transpose.int,), _transpose),
    aten.expand.default: _expand,
    **dict.fromkeys((aten.embedding.default, aten.index.Tensor), _lookup),
    aten.add.Tensor: _sum,
    aten.sub.Tensor: partial(_sum, sign=-1),
    aten.mul.Tensor: _times,
    aten.div.Tensor: partial(_times, power=-1),
    **dict.fromkeys((aten.mm.default, aten.matmul.default), _matrix_product),
}


# Everything else ----------------------------------------------------------------------------------


def pulled_by_autograd(
    value: Tensor, gradient: FactoredGradient, parameters: Mapping[str, Tensor]
) -> Iterator[tuple[str, FactoredGradient]]:
    """Yield (name, its per-example gradients) for each parameter that a value is computed from."""
    leaves = tuple(parameters.values())
    with torch.no_grad():
        seeds = gradient.dense().to(value.dtype)
    pull = partial(torch.autograd.grad, value, leaves, retain_graph=True, allow_unused=True)
    with torch.enable_grad():
        try:
            found = pull(seeds, is_grads_batched=True)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            rows = zip(*map(pull, seeds), strict=True)  # a backward that vmap cannot map
            found = [None if own[0] is None else torch.stack(own) for own in rows]
    for name, of_leaf in zip(parameters, found, strict=True):
        if of_leaf is not None:
            yield name, Dense(of_leaf)
