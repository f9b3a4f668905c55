"""Which rule computes an operator that takes shared values and examples.

`RULES` are for single operators (`layers`). `REWRITTEN` computes an operator by others.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tacit.training.rules import layers, products, recurrent
from tacit.training.rules.operands import Declined

aten = torch.ops.aten
EITHER = (0, 1)  # one of the first two arguments holds examples, the other is shared


class Rule(NamedTuple):
    """A layer rule and where its operator takes the examples."""

    run: Callable[..., Any]  # (tape, *arguments of the operator) -> result of all examples
    places: tuple[int, ...] = (0,)  # of the arguments that hold examples


RULES: dict[Any, Rule] = {
    aten.linear.default: Rule(layers.linear),
    aten.matmul.default: Rule(layers.matmul),
    aten.mm.default: Rule(layers.matmul),
    aten.addmm.default: Rule(layers.addmm, (1,)),
    aten.embedding.default: Rule(layers.embedding, (1,)),
    aten.layer_norm.default: Rule(layers.layer_norm),
    aten.rms_norm.default: Rule(layers.rms_norm),
    aten.group_norm.default: Rule(layers.group_norm),
    aten.instance_norm.default: Rule(layers.instance_norm),
    aten.add.Tensor: Rule(layers.add, EITHER),
    aten.mul.Tensor: Rule(layers.mul, EITHER),
    recurrent.LAYER: Rule(recurrent.recurrent_layer, (1, 2, 3)),
    **dict.fromkeys(
        (
            aten.conv1d.default, aten.conv1d.padding, aten.conv2d.default, aten.conv2d.padding,
            aten.conv3d.default, aten.conv3d.padding,
        ),
        Rule(layers.convolution),
    ),
    **dict.fromkeys(
        (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input),
        Rule(layers.transposed_convolution),
    ),
}  # fmt: skip


# Operators that are computed by others ------------------------------------------------------------


def _index_of_table(tape: Any, table: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Compute `table[ids]`: the rows of a table of any shape."""
    ids = indices[0]
    if len(indices) != 1 or ids is None or not tape.is_shared(table) or ids.dtype != torch.int64:
        raise Declined
    return _rows(tape, torch.where(ids < 0, ids + table.shape[0], ids), table)


def _index_select(tape: Any, table: Tensor, axis: int, ids: Tensor) -> Tensor:
    if axis != 0 or ids.dim() != 2:
        raise Declined
    return _index_of_table(tape, table, (ids.long(),))


def _rows(tape: Any, ids: Tensor, table: Tensor) -> Tensor:
    if table.dim() == 2:
        return layers.rows_of(tape, ids, table)
    flat = table.reshape(table.shape[0], -1)
    found = layers.rows_of(products.PartOf(tape, table, table, flat), ids, flat)
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
    padding_idx: int | None = None,
) -> tuple[Tensor, ...]:
    """Compute bags of table rows: sums (mode 0), means (1) or largest values (2)."""
    if scale_grad_by_freq:
        raise Declined
    weights = tape.copy(weights) if tape.is_shared(weights) else weights
    rows = _rows(tape, ids, table)  # (examples, entries, width)
    if weights is not None:
        rows = rows * weights.unsqueeze(-1)
    starts = offsets[:, :-1] if include_last_offset else offsets
    places = torch.arange(ids.shape[1], device=ids.device)
    of_bag = (starts.unsqueeze(1) <= places.unsqueeze(1)).sum(-1) - 1  # (examples, entries)
    bags = torch.arange(starts.shape[1], device=ids.device).unsqueeze(1)
    is_used = of_bag.unsqueeze(1) == bags
    if padding_idx is not None:
        is_used &= (ids != padding_idx).unsqueeze(1)
    count = is_used.sum(-1, keepdim=True)
    fill = -torch.inf if mode == 2 else 0.0
    values = torch.where(is_used.unsqueeze(-1), rows.unsqueeze(1), fill)  # (.., bags, entries, ..)
    if mode == 2:
        return (torch.where(count > 0, values.amax(2), 0.0), of_bag, count, of_bag)
    total = values.sum(2)
    return (total if mode == 0 else total / count.clamp_min(1), of_bag, count, of_bag)


# (tape, *arguments of the operator) -> its result. Tensors that are not shared are stacked.
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


def has_rule(node: fx.Node) -> bool:
    """Return whether an operator with shared values may be computed without copies of them."""
    if any(n.meta["val"].is_complex() for n in node.all_input_nodes):
        return False  # rules are for real numbers
    return node.target in RULES or node.target in REWRITTEN


def places_of(node: fx.Node, kinds: Mapping[fx.Node, str]) -> tuple[int, ...] | None:
    """Return the arguments that the rule of an operator takes stacked; None if it does not fit."""
    rule = RULES.get(node.target)
    if rule is None:
        return None
    nodes = {i: a for i, a in enumerate(node.args) if isinstance(a, fx.Node)}
    places = rule.places
    if places == EITHER:
        places = (1,) if kinds[nodes[0]] == "shared" else (0,)
    examples = {i for i, a in nodes.items() if kinds[a] == "example"}
    return places if examples <= {*places} else None
