"""Which layer rule of `gradients` computes an operator of the graph, and how its arguments lie.

A rule takes all examples at once: the stacked input of a site, with the examples on the first axis.
`joined` says whether the first axis that one example has of its own (a batch of one, or an inner
batch such as windows) is merged with that axis, as torch's operators expect.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.training.gradients import (
    convolution,
    embedding,
    generic,
    linear,
    normalization,
    recurrent_steps,
)
from tacit.training.gradients.site import Declined, Layout, Site
from tacit.training.program.recurrence import LAYER

aten = torch.ops.aten


class Rule(NamedTuple):
    """A layer rule and where its operator takes the examples."""

    run: Callable[..., Any]  # (site, *arguments of the operator) -> result of all examples
    place: int | tuple[int, ...]  # of the arguments that hold examples
    joined: Callable[..., bool]  # of the operator's arguments, as one example has them


def _has_rows(x: Tensor, *_: Any) -> bool:
    return x.dim() > 1


def _any_axis(x: Tensor, *_: Any) -> bool:
    return x.dim() > 0


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


def _embedding_bag(
    site: Site,
    table: Tensor,
    ids: Tensor,
    starts: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,  # noqa: ARG001  # as above
    weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor]:
    """Compute the bags of all examples, of which each has the same number of entries."""
    if scale_grad_by_freq or weights is not None:
        raise Declined
    starts = starts[:-1] if include_last_offset else starts
    first = torch.arange(len(ids), device=ids.device).unsqueeze(1) * ids.shape[1]
    bags = replace(site, output=Layout(0, len(starts)))
    found = embedding.embedding_bag(
        bags,
        ids.flatten(),
        table,
        (first + starts).flatten(),
        mode=("sum", "mean", "max")[mode],
        padding_idx=None if padding_idx is None or padding_idx < 0 else padding_idx,
    )
    return (found.unflatten(0, (len(ids), len(starts))),)


def _index(site: Site, table: Tensor, indices: Any) -> Tensor:
    if len(indices) != 1:
        raise Declined
    return embedding.getitem(site, table, indices[0])


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


_CONVOLUTION = Rule(convolution.convolution, 0, _is_batched)
_TRANSPOSED = Rule(convolution.transposed_convolution, 0, _is_batched)

RULES: dict[Any, Rule] = {
    aten.linear.default: Rule(linear.linear, 0, _has_rows),
    aten.matmul.default: Rule(linear.matmul, 0, _has_rows),
    aten.mm.default: Rule(linear.matmul, 0, _has_rows),
    aten.addmm.default: Rule(_addmm, 1, _second_has_rows),
    aten.embedding.default: Rule(_embedding, 1, _second_has_axis),
    aten.embedding_bag.default: Rule(_embedding_bag, 1, _never),
    aten.embedding_bag.padding_idx: Rule(_embedding_bag, 1, _never),
    aten.layer_norm.default: Rule(_layer_norm, 0, _normalized),
    aten.rms_norm.default: Rule(normalization.rms_norm, 0, _normalized),
    aten.group_norm.default: Rule(_group_norm, 0, _always),
    aten.instance_norm.default: Rule(_instance_norm, 0, _always),
    aten.add.Tensor: Rule(_add, -1, _never),
    LAYER: Rule(recurrent_steps.recurrent_layer, (1, 2, 3), _never),
    **dict.fromkeys((aten.conv1d.default, aten.conv1d.padding), _CONVOLUTION),
    **dict.fromkeys((aten.conv2d.default, aten.conv2d.padding), _CONVOLUTION),
    **dict.fromkeys((aten.conv3d.default, aten.conv3d.padding), _CONVOLUTION),
    aten.conv_transpose1d.default: _TRANSPOSED,
    aten.conv_transpose2d.input: _TRANSPOSED,
    aten.conv_transpose3d.input: _TRANSPOSED,
}
