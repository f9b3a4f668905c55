"""Table lookups: `embedding`, `embedding_bag`, and indexing a shared table by integers.

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


def embedding_bag(
    site: Site,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,  # noqa: ARG001  # used with max_norm only
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,  # noqa: ARG001  # the sum is dense: every row receives noise
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Compute `F.embedding_bag`; its backward collects per-example gradients.

    Bags of different lengths are padded to the longest one. Bag i belongs to the example of row i
    of the result, wherever its row numbers are in `input`.
    """
    if max_norm is not None or scale_grad_by_freq:
        raise Unsupported("an embedding that depends on the whole batch")
    if any(t is not None and site.is_shared(t) for t in (input, offsets, per_sample_weights)):
        raise Declined
    if input.dim() == 2:
        ids, weights, is_used = input, per_sample_weights, None  # that is, all entries are
    else:
        assert offsets is not None  # torch requires it
        starts = offsets[:-1] if include_last_offset else offsets
        bag, place, length = _places(starts, len(input))
        shape = len(starts), length
        ids = input.new_zeros(shape).index_put((bag, place), input)
        is_used = torch.zeros(shape, dtype=torch.bool, device=ids.device)
        is_used[bag, place] = True
        weights = per_sample_weights
        if weights is not None:
            weights = weights.new_zeros(shape).index_put((bag, place), weights)
    if padding_idx is not None:
        is_wanted = ids != padding_idx % weight.shape[0]
        is_used = is_wanted if is_used is None else is_used & is_wanted
    rows = _Lookup(site, weight, None).apply(ids, weight)  # (bags, length, width)
    if weights is not None:
        rows = rows * weights.unsqueeze(-1)
    if is_used is None and ids.shape[1]:
        return {"max": rows.amax, "mean": rows.mean, "sum": rows.sum}[mode](1)
    if is_used is None:
        is_used = torch.ones_like(ids, dtype=torch.bool)
    is_used = is_used.unsqueeze(-1)
    if mode == "max":
        largest = rows.masked_fill(~is_used, -torch.inf).amax(1)
        return torch.where(is_used.any(1), largest, 0.0)
    total = rows.masked_fill(~is_used, 0.0).sum(1)
    return total if mode == "sum" else total / is_used.sum(1).clamp_min(1)


def _places(starts: Tensor, size: int) -> tuple[Tensor, Tensor, int]:
    """Return the bag and the place in it of each of `size` entries, and the longest length."""
    ends = torch.cat([starts[1:], starts.new_tensor([size])])
    lengths = ends - starts
    bag = torch.arange(len(starts), device=starts.device).repeat_interleave(lengths)
    place = torch.arange(size, device=starts.device) - starts[bag]
    return bag, place, max(1, int(lengths.max())) if len(starts) else 1


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
        ids = site.output.sequences(ids.long().unsqueeze(-1), site.examples).squeeze(-1)
        site.collect(self.table, TableRows(ids, values, self.table.shape[0]))
        return ()
