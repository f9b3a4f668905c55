"""Table lookups: `embedding`, and indexing a shared table by integers.

Row k of the table receives the sum of the output gradients at the positions that read it. Neither
one-hot vectors nor one table per example are formed.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.training.gradients.factored import TableRows
from tacit.training.gradients.site import Declined, Operation, Site, Unsupported


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

    The table's row `padding_idx` receives no gradient.
    """
    if max_norm is not None or scale_grad_by_freq:
        raise Unsupported("an embedding that depends on the whole batch")
    site.require(input, weight)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return _Lookup(site, weight, padding_idx).apply(input, weight)


def getitem(site: Site, table: Tensor, index: Any) -> Tensor:
    """Compute `table[index]` for an integer tensor; its backward collects per-example gradients."""
    if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32):
        raise Declined
    site.require(index, table)
    ids = torch.where(index < 0, index + table.shape[0], index)
    return _Lookup(site, table, None).apply(ids, table)


@dataclass
class _Lookup(Operation):
    """The lookup of table rows by row numbers that are not negative."""

    table: Tensor
    padding_idx: int | None

    def forward(self, ids: Tensor, table: Tensor) -> Any:
        return F.embedding(ids, table), (ids,)

    def backward(self, saved: Any, _needs: Any, g: Tensor) -> tuple[()]:
        (ids,) = saved
        site = self.site
        if self.padding_idx is not None:
            g = torch.where((ids == self.padding_idx).unsqueeze(-1), 0.0, g)
        g = g.flatten(ids.dim())  # (*ids.shape, width)
        values = site.output.sequences(g, site.examples)
        ids = site.output.sequences(ids.unsqueeze(-1), site.examples).squeeze(-1)
        site.collect(self.table, TableRows(ids, values, self.table.shape[0]))
        return ()
