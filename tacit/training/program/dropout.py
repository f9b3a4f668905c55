"""Operators with random numbers, rewritten in the graph so that what is drawn is a node of its own.

Dropout of every kind becomes a product with a mask. So the numbers of a lot can be drawn before it,
given to two passes, or recorded.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_SELU = 1.7580993408473766  # lambda * alpha of Klambauer et al. 2017 (arXiv:1706.02515)


def mask_of_dropout(like: Tensor, p: float) -> Tensor:
    """Return a mask that dropout multiplies its input with: 0, or else 1 / (1 - p)."""
    return torch.bernoulli(like.detach(), 1 - p).div_(1 - p) if p < 1 else torch.zeros_like(like)


def _channels(x: Tensor) -> Tensor:
    """Return one number for each channel, for dropout of whole channels."""
    return x[(slice(None), slice(None)) + (slice(1),) * (x.dim() - 2)]


def _alpha(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """Return alpha dropout, which keeps mean and variance: dropped numbers become -_SELU."""
    if p >= 1:
        return x * mask
    scale = (1 - p) / math.sqrt((_SELU**2 * p + 1) * (1 - p))
    return scale * (x * mask + _SELU * (mask - 1))


def _with_kept(dropped: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return dropped, mask != 0


def _leaky(x: Tensor, uniform: Tensor, lower: float, upper: float) -> Tensor:
    return torch.where(x >= 0, x, x * (lower + (upper - lower) * uniform))


def _attention_weights(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the weights of `F.scaled_dot_product_attention`."""
    key = _for_heads(key, query) if enable_gqa else key
    scores = query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.mT
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -math.inf)
    scores = scores if mask is None else scores + mask
    is_hidden = (scores == -math.inf).all(-1, keepdim=True)  # such a query attends to nothing
    return scores.masked_fill(is_hidden, 0.0).softmax(-1).masked_fill(is_hidden, 0.0)


def _attended(weights: Tensor, value: Tensor, enable_gqa: bool = False) -> Tensor:
    return weights @ (_for_heads(value, weights) if enable_gqa else value)


def _for_heads(shared: Tensor, query: Tensor) -> Tensor:
    """Return keys or values that groups of heads share, once for each head of the query."""
    return shared.repeat_interleave(query.shape[-3] // shared.shape[-3], -3)


def _dropout(*, channels: bool = False, alpha: bool = False, in_place: bool = False) -> Any:
    def change(graph: fx.Graph, x: fx.Node, p: float, train: bool) -> fx.Node:
        if not train or p == 0:
            return x
        like = graph.call_function(_channels, (x,)) if channels else x
        mask = graph.call_function(mask_of_dropout, (like, p))
        if alpha:
            found = graph.call_function(_alpha, (x, mask, p))
        else:
            found = graph.call_function(aten.mul.Tensor, (x, mask))
        return graph.call_function(aten.copy_.default, (x, found)) if in_place else found

    return change


def _native_dropout(graph: fx.Graph, x: fx.Node, p: float, train: bool | None) -> fx.Node:
    p = 0.0 if train is False else p
    mask = graph.call_function(mask_of_dropout, (x, p))
    product = graph.call_function(aten.mul.Tensor, (x, mask))
    return graph.call_function(_with_kept, (product, mask))


def _rrelu(*, in_place: bool = False) -> Any:
    def change(
        graph: fx.Graph, x: fx.Node, lower: float = 0.125, upper: float = 1 / 3, *args: Any
    ) -> fx.Node:
        if args and args[0]:
            uniform = graph.call_function(aten.rand_like.default, (x,))
            found = graph.call_function(_leaky, (x, uniform, lower, upper))
        else:
            found = graph.call_function(aten.leaky_relu.default, (x, (lower + upper) / 2))
        return graph.call_function(aten.copy_.default, (x, found)) if in_place else found

    return change


def _attention(
    graph: fx.Graph,
    query: fx.Node,
    key: fx.Node,
    value: fx.Node,
    mask: fx.Node | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> fx.Node | None:
    if dropout_p == 0:
        return None
    args = (query, key, mask, is_causal, scale, enable_gqa)
    weights = graph.call_function(_attention_weights, args)
    drops = graph.call_function(mask_of_dropout, (weights, dropout_p))
    weights = graph.call_function(aten.mul.Tensor, (weights, drops))
    return graph.call_function(_attended, (weights, value, enable_gqa))


# What replaces a node; None leaves it as it is.
SIMPLER: dict[Any, Callable[..., fx.Node | None]] = {
    aten.dropout.default: _dropout(),
    aten.dropout_.default: _dropout(in_place=True),
    aten.feature_dropout.default: _dropout(channels=True),
    aten.feature_dropout_.default: _dropout(channels=True, in_place=True),
    aten.alpha_dropout.default: _dropout(alpha=True),
    aten.alpha_dropout_.default: _dropout(alpha=True, in_place=True),
    aten.feature_alpha_dropout.default: _dropout(channels=True, alpha=True),
    aten.feature_alpha_dropout_.default: _dropout(channels=True, alpha=True, in_place=True),
    aten.native_dropout.default: _native_dropout,
    aten.rrelu.default: _rrelu(),
    aten.rrelu_.default: _rrelu(in_place=True),
    aten.scaled_dot_product_attention.default: _attention,
}

# The functions that replacements call, and their names in the code of a graph.
NAMED: dict[Any, Callable[..., Any]] = {
    f.__name__: f
    for f in (mask_of_dropout, _channels, _alpha, _with_kept, _leaky, _attention_weights, _attended)
}
FUNCTIONS = {function: name for name, function in NAMED.items()}
