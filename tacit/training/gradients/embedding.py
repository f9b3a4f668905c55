"""Table lookups: `embedding`, and indexing a shared table by integers.

Row k of the table receives the sum of the output gradients at the positions that read it. Neither
one-hot vectors nor one table per example are formed.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.training.gradients.factored import TableRows
from tacit.training.gradients.site import Declined, Site, Unsupported, first_order


def embedding(
    site: Site,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,  # noqa: ARG001  # used with max_norm only
    scale_grad_by_freq: bool = False,
    sparse: bool = False,  # noqa: ARG001  # the sum is dense: every row receives noise
) -> Tensor:
    """Compute `F.embedding`; its backward collects per-example gradients.

    The row `padding_idx` receives none.
    """
    if max_norm is not None or scale_grad_by_freq:
        raise Unsupported("an embedding that depends on the whole batch")
    site.require(input, weight)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return _Embedding.apply(site.anchor, input, weight.detach(), (site, weight, padding_idx))


def getitem(site: Site, table: Tensor, index: Any) -> Tensor:
    """Compute `table[index]` for an integer tensor; its backward collects per-example gradients."""
    if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32):
        raise Declined
    site.require(index, table)
    ids = torch.where(index < 0, index + table.shape[0], index)
    return _Embedding.apply(site.anchor, ids, table.detach(), (site, table, None))


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, ids: Tensor, weight: Tensor, call: Any) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        site, weight, padding_idx = ctx.call
        if padding_idx is not None:
            g = torch.where((ids == padding_idx).unsqueeze(-1), 0.0, g)
        g = g.flatten(ids.dim())  # (*ids.shape, width)
        values = site.output.sequences(g, site.examples)
        ids = site.output.sequences(ids.unsqueeze(-1), site.examples).squeeze(-1)
        site.collect(weight, TableRows(ids, values, weight.shape[0]))
        return None, None, None, None
