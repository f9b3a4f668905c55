"""Which layer rule of `gradients` computes an operator of the graph, and how its arguments lie.

A rule takes all examples at once: the stacked input of a site, with the examples on the first axis.
`joined` says whether the first axis that one example has of its own (a batch of one, or an inner
batch such as windows) is merged with that axis, as torch's operators expect.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.training.clip import accumulator
from tacit.training.gradients import (
    convolution,
    embedding,
    generic,
    linear,
    normalization,
    recurrent_steps,
)
from tacit.training.gradients.factored import Dense
from tacit.training.gradients.site import Declined, Operation, Site
from tacit.training.program import products
from tacit.training.program.recurrence import LAYER

aten = torch.ops.aten


class Rule(NamedTuple):
    """A layer rule and where its operator takes the examples."""

    run: Callable[..., Any]  # (site, *arguments of the operator) -> result of all examples
    place: int | tuple[int, ...]  # of the arguments that hold examples
    joined: Callable[..., bool]  # of the operator's arguments, as one example has them


def _has_rows(x: Tensor, *_: Any) -> bool:
    return x.dim() > 1


def _second_has_axis(_: Any, ids: Tensor, *__: Any) -> bool:
    return ids.dim() > 0


def _second_has_rows(_: Any, x: Tensor, *__: Any) -> bool:
    return x.dim() > 1


def _is_batched(x: Tensor, weight: Tensor, *_: Any) -> bool:
    return x.dim() == weight.dim()


def _normalized(x: Tensor, shape: Any, *_: Any) -> bool:
    return x.dim() > len(shape)


def _never(*_: Any) -> bool:
    return False


def _always(*_: Any) -> bool:
    return True


def _addmm(site: Site, bias: Tensor, x: Tensor, weight: Tensor, **factors: Any) -> Tensor:
    if any(factor != 1 for factor in factors.values()):
        raise Declined
    return linear.addmm(site, bias, x, weight)


def _embedding(
    site: Site,
    table: Tensor,
    ids: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,  # noqa: ARG001  # the sum is dense: every row receives noise
) -> Tensor:
    if scale_grad_by_freq:
        raise Declined
    return embedding.embedding(site, ids, table, None if padding_idx < 0 else padding_idx)


def _layer_norm(site: Site, x: Tensor, shape: Any, *rest: Any) -> Tensor:
    return normalization.layer_norm(site, x, shape, *rest[:3])


def _group_norm(site: Site, x: Tensor, groups: int, *rest: Any) -> Tensor:
    return normalization.group_norm(site, x, groups, *rest[:3])


def _instance_norm(site: Site, x: Tensor, weight: Any, bias: Any, *rest: Any) -> Tensor:
    mean, deviation, uses_input, _, eps, *_ = rest
    if mean is not None or deviation is not None or not uses_input:
        raise Declined
    return normalization.group_norm(site, x, x.shape[1], weight, bias, eps)


def _add(site: Site, x: Tensor, other: Any, *, alpha: float = 1) -> Tensor:
    return generic.add(site, x, other, alpha=alpha)


def _mul(site: Site, x: Tensor, other: Any) -> Tensor:
    """Compute `x * other`, one of them shared and broadcast to the other, such as a scale."""
    x, scale = (other, x) if site.is_shared(x) else (x, other)
    shape = torch.broadcast_shapes(x.shape[1:], scale.shape)
    if shape != x.shape[1:]:
        raise Declined
    return _ScaledBy(site, scale).apply(x, scale)


@dataclass
class _ScaledBy(Operation):
    """The product of examples x and a shared scale."""

    scale: Tensor

    def forward(self, x: Tensor, scale: Tensor) -> Any:
        return x * scale, (x, scale)

    def backward(self, saved: Any, needs: Any, g: Tensor) -> tuple[Tensor | None]:
        x, scale = saved
        rows = g * x  # (examples, *one example's shape)
        if scale.numel() < rows[0].numel():
            rows = rows.to(accumulator(rows.dtype))
        ones = (1,) * (g.dim() - 1 - scale.dim())
        n = g.shape[0]  # `len` would make it a number for the compiler
        rows = rows.sum_to_size(n, *ones, *scale.shape).reshape(n, *scale.shape)
        self.site.collect(self.scale, Dense(rows))
        return (g * scale if needs[0] else None,)


_CONVOLUTION = Rule(convolution.convolution, 0, _is_batched)
_TRANSPOSED = Rule(convolution.transposed_convolution, 0, _is_batched)

RULES: dict[Any, Rule] = {
    aten.linear.default: Rule(linear.linear, 0, _has_rows),
    aten.matmul.default: Rule(linear.matmul, 0, _has_rows),
    aten.mm.default: Rule(linear.matmul, 0, _has_rows),
    aten.addmm.default: Rule(_addmm, 1, _second_has_rows),
    aten.embedding.default: Rule(_embedding, 1, _second_has_axis),
    aten.layer_norm.default: Rule(_layer_norm, 0, _normalized),
    aten.rms_norm.default: Rule(normalization.rms_norm, 0, _normalized),
    aten.group_norm.default: Rule(_group_norm, 0, _always),
    aten.instance_norm.default: Rule(_instance_norm, 0, _always),
    aten.add.Tensor: Rule(_add, -1, _never),
    aten.mul.Tensor: Rule(_mul, -1, _never),
    LAYER: Rule(recurrent_steps.recurrent_layer, (1, 2, 3), _never),
    **dict.fromkeys((aten.conv1d.default, aten.conv1d.padding), _CONVOLUTION),
    **dict.fromkeys((aten.conv2d.default, aten.conv2d.padding), _CONVOLUTION),
    **dict.fromkeys((aten.conv3d.default, aten.conv3d.padding), _CONVOLUTION),
    aten.conv_transpose1d.default: _TRANSPOSED,
    aten.conv_transpose2d.input: _TRANSPOSED,
    aten.conv_transpose3d.input: _TRANSPOSED,
}


# Operators that are computed by others ------------------------------------------------------------


def _index_of_table(tape: Any, table: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Compute `table[ids]`: the rows of a table of any shape."""
    ids = indices[0]
    if len(indices) != 1 or ids is None or not tape.is_shared(table) or ids.dtype != torch.int64:
        raise Declined
    return tape.by_rule(_rows, torch.where(ids < 0, ids + table.shape[0], ids), table)


def _index_select(tape: Any, table: Tensor, axis: int, ids: Tensor) -> Tensor:
    if axis != 0 or ids.dim() != 1:
        raise Declined
    return _index_of_table(tape, table, (ids.long(),))


def _rows(site: Site, ids: Tensor, table: Tensor) -> Tensor:
    if table.dim() == 2:
        return embedding.embedding(site, ids, table)
    flat = table.reshape(table.shape[0], -1)
    found = embedding.embedding(products.site_of_part(site, table, table, flat), ids, flat)
    return found.reshape(*ids.shape, *table.shape[1:])


def _embedding_bag(
    tape: Any,
    table: Tensor,
    ids: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,  # noqa: ARG001  # the sum is dense: every row receives noise
    weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, ...]:
    """Compute bags of table rows: sums (mode 0), means (1) or largest values (2)."""
    if scale_grad_by_freq:
        raise Declined
    weights = tape.copy(weights) if tape.is_shared(weights) else weights
    rows = tape.meet(aten.embedding.default, (table, ids), {})  # (entries, width)
    if weights is not None:
        rows = tape.meet(aten.mul.Tensor, (rows, weights.unsqueeze(1)), {})
    starts = offsets[:-1] if include_last_offset else offsets
    places = torch.arange(ids.shape[0], device=ids.device)
    of_bag = (starts <= places.unsqueeze(1)).sum(1) - 1  # (entries,)
    is_in = (of_bag == torch.arange(starts.shape[0], device=ids.device).unsqueeze(1)) & (
        ids != padding_idx
    )  # (bags, entries)
    count = is_in.sum(1, keepdim=True)
    fill = -torch.inf if mode == 2 else 0.0
    values = torch.where(is_in.unsqueeze(2), rows, fill)  # (bags, entries, width)
    if mode == 2:
        return (torch.where(count > 0, values.amax(1), 0.0), of_bag, count, of_bag)
    total = values.sum(1)
    return (total if mode == 0 else total / count.clamp_min(1), of_bag, count, of_bag)


# (tape, *arguments of the operator) -> its result for one example, inside of the map.
REWRITTEN: dict[Any, Callable[..., Any]] = {
    aten.einsum.default: products.einsum,
    aten.matmul.default: products.matmul,
    aten.bmm.default: products.matmul,
    aten.mm.default: products.matmul,
    aten.tensordot.default: products.tensordot,
    aten.inner.default: products.inner,
    aten.bilinear.default: products.bilinear,
    aten.index.Tensor: _index_of_table,
    aten.index_select.default: _index_select,
    aten.embedding_bag.default: _embedding_bag,
    aten.embedding_bag.padding_idx: _embedding_bag,
}
