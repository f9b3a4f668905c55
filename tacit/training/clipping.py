"""The seam of DP-SGD: the sum of clipped per-example gradients.

Everything that makes clipping fast (book-keeping, ghost norms, vmap, mixed precision) lives behind
`clipped_sum`; noise, accounting and the optimizer live in front of it and know none of it.

Guarantee. Let S(D) be the sum over the examples of a batch D. Each example adds a vector whose norm
is at most the clip rule's bound in every group, whatever the other examples are, and an example
with a non-finite gradient adds zero. So adding or removing one example moves S by at most
`clip.l2_sensitivity`, up to the rounding of the contraction, for which the factors leave room.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tacit import _check
from tacit.training.clip import Automatic, Clip, Flat, PerGroup, PerLayer
from tacit.training.engines import engine_named
from tacit.training.engines.batch import map_rows, rows_of
from tacit.training.records import current
from tacit.training.sums import ClippedSum, trainable

__all__ = [
    "Automatic",
    "Clip",
    "ClippedSum",
    "Flat",
    "LossFn",
    "PerGroup",
    "PerLayer",
    "clipped_sum",
    "trainable",
]

# Batches are any nesting of tuples, lists and dicts of tensors: nothing narrower is true of them.
LossFn = Callable[[nn.Module, Any], Tensor]


def clipped_sum(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    clip: Clip,
    *,
    engine: str = "auto",
    weights: Tensor | None = None,
    augmentations: int = 1,
    chunk: int | None = None,
) -> ClippedSum:
    """Sum over the batch of each example's gradient, clipped. Private.

    Parameters
    ----------
    model
        Left as it was found: no hooks, no attributes, no `p.grad`.
    loss_fn
        `loss_fn(model, batch)` gives one loss for each example, shape (examples,).
    batch
        Any nesting of tuples, lists and dicts; every tensor in it holds the examples on its first
        axis, except those without axes.
    clip
        `Flat`, `PerLayer`, `PerGroup` or `Automatic`.
    engine
        "auto", "bookkeeping", "vmap" or "loop". All give the same sum; they differ in cost and in
        which models they take. "auto" takes the first of these that can.
    weights
        0 or 1 for each example, shape (examples,). A row of weight 0 adds exactly zero whatever it
        holds, so that batches can be padded to one shape.
    augmentations
        K > 1: the batch holds K views of each example in consecutive rows (examples * K rows), and
        the gradient of an example is the mean over its views (De et al. 2022, arXiv:2204.13650).
    chunk
        Most examples handled at once; memory grows with it, the sum does not depend on it.

    Examples
    --------
    >>> from torch.nn.functional import mse_loss
    >>> model = nn.Linear(2, 1, bias=False)
    >>> def loss_fn(model, batch):
    ...     x, y = batch
    ...     return mse_loss(model(x).squeeze(-1), y, reduction="none")
    >>> batch = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([1e3, 0.0])
    >>> clipped_sum(model, loss_fn, batch, Flat(1.0)).sums["weight"].round(decimals=3)
    tensor([[-0.6000, -0.8000]])
    """
    run = engine_named(engine)
    views = _check.whole(augmentations=augmentations, least=1)
    examples, mask = _examples(batch, views, weights)
    step = examples if chunk is None else _check.whole(chunk=chunk, least=1)
    with current(mask.device):
        if 0 < examples <= step:
            return run(model, loss_fn, batch, clip, mask, views)
        total = ClippedSum.zeros(model, clip)
        for start in range(0, examples, step or 1):
            rows = slice(start * views, (start + step) * views)
            part = map_rows(batch, lambda t, rows=rows: t[rows])
            total += run(model, loss_fn, part, clip, mask[start : start + step], views)
        return total


def _examples(batch: Any, views: int, weights: Tensor | None) -> tuple[int, Tensor]:
    """Number of examples, and which of them count."""
    rows, device = rows_of(batch)
    if rows % views:
        raise ValueError(f"batch must hold {views} rows for each example, as augmentations says.")
    examples = rows // views
    if weights is None:
        return examples, torch.ones(examples, dtype=torch.bool, device=device)
    if weights.shape != (examples,):
        raise ValueError("weights must have one entry for each example, shape (examples,).")
    return examples, weights.to(device) > 0
