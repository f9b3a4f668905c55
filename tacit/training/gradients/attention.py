"""`nn.MultiheadAttention`: its projections are matrix products, its core has no parameters.

In the packed form, one matrix holds the projections of query, key and value above one another.
Their gradients do not overlap, so their squared norms add up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.training.gradients.factored import Concatenated, Dense, Outer, bias_gradient
from tacit.training.gradients.generic import spread_to
from tacit.training.gradients.linear import linear
from tacit.training.gradients.site import (
    Declined,
    Operation,
    Site,
    autocast,
    without_autocast,
)


def multi_head_attention(
    site: Site,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,  # noqa: ARG001  # torch has checked it
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute `F.multi_head_attention_forward`; its backward collects per-example gradients.

    Query, key and value have shape (positions, rows of the batch, features).
    """
    layout = site.layout(query)
    if layout is None or layout.dim != 1 or static_k is not None or static_v is not None:
        raise Declined
    if use_separate_proj_weight:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
        q, k, v = _projections(site, (query, key, value), weights, in_proj_bias)
    elif query is key and key is value and in_proj_weight is not None:
        q, k, v = linear(site, query, in_proj_weight, in_proj_bias).chunk(3, -1)
    else:
        q, k, v = _projections(site, (query, key, value), in_proj_weight, in_proj_bias)
    if bias_k is not None and bias_v is not None:
        k = torch.cat([k, spread_to(site, bias_k, k[:1].shape)])
        v = torch.cat([v, spread_to(site, bias_v, v[:1].shape)])
    if add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 0, 0, 1)), F.pad(v, (0, 0, 0, 0, 0, 1))
    q, k, v = (t.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for t in (q, k, v))
    if is_causal and key_padding_mask is None and not need_weights:
        mask = None
    else:
        mask, is_causal = _mask(attn_mask, key_padding_mask, q, k.shape[2]), False
    dropout_p = dropout_p if training else 0.0
    if need_weights:
        mixed, shown = _attend(q, k, v, mask, dropout_p)
        shown = shown.mean(1) if average_attn_weights else shown
    else:
        shown = None
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal)
    mixed = mixed.permute(2, 0, 1, 3).flatten(2)  # (positions, rows, features)
    return linear(site, mixed, out_proj_weight, out_proj_bias, layout=layout), shown


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float
) -> tuple[Tensor, Tensor]:
    scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
    shown = (scores if mask is None else scores + mask).softmax(-1)
    if dropout_p > 0.0:
        shown = F.dropout(shown, dropout_p)
    return shown @ v, shown


def _mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, length: int
) -> Tensor | None:
    """Return the sum of attention mask and padding mask, or None if both are None.

    The sum is added to the scores and broadcasts to (rows, heads, queries, `length` keys). Both
    masks are extended by zeros to keys that the layer itself appended, such as `bias_k`.
    """
    total = None
    if attn_mask is not None:
        total = _additive(attn_mask, q.dtype)
        heads = q.shape[1]
        total = total.unflatten(0, (-1, heads)) if total.dim() == 3 else total
        total = F.pad(total, (0, length - total.shape[-1]))
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, q.dtype)[:, None, None, :]
        padding = F.pad(padding, (0, length - padding.shape[-1]))
        total = padding if total is None else total + padding
    return total


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


def _projections(site: Site, inputs: Any, weights: Any, bias: Tensor | None) -> Any:
    """Multiply query, key and value by three matrices, or by the three parts of a packed one."""
    parts = site.detached(weights).chunk(3) if isinstance(weights, Tensor) else weights
    return _Projections(site, weights, bias).apply(*inputs, *parts, bias)


@dataclass
class _Projections(Operation):
    """The products of query, key and value with three matrices, perhaps packed in one tensor."""

    weights: Tensor | Sequence[Tensor]
    bias: Tensor | None

    def forward(self, *tensors: Any) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        *operands, bias = autocast(*tensors)
        shifts = [None] * 3 if bias is None else bias.chunk(3)
        with without_autocast(operands[0]):
            return tuple(map(F.linear, operands[:3], operands[3:], shifts)), operands

    def backward(self, saved: Any, needs: Sequence[bool], *grads: Tensor) -> list[Tensor | None]:
        inputs, matrices = saved[:3], saved[3:]
        site = self.site
        right = [site.output.sequences(x, site.examples) for x in inputs]
        left = [site.output.sequences(g, site.examples) for g in grads]
        outers = tuple(map(Outer, left, right))
        if isinstance(self.weights, Tensor):
            pairs = [(self.weights, Concatenated(outers))]
        else:
            pairs = zip(self.weights, outers, strict=True)
        for weight, gradient in pairs:
            if site.is_shared(weight):
                site.collect(weight, gradient)
        if self.bias is not None and site.is_shared(self.bias):
            sums = torch.cat([bias_gradient(g).values for g in left], 1)
            site.collect(self.bias, Dense(sums))
        return [g @ w if need else None for g, w, need in zip(grads, matrices, needs, strict=False)]
