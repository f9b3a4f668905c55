"""The clipped sum of losses that were computed outside, from their autograd graph alone.

Used by `Private.backward`, where the loop and the forward pass belong to somebody else. Example i's
gradient is the backward of losses[i]; a chunk of examples goes through one batched backward.
Nothing was installed on the model beforehand, so any model works whose backward torch can batch;
the price is that each example's backward runs over the whole batch. `Private.step` is faster.
"""

import torch
from torch import Tensor, nn

from tacit.training.clip_rules import Clip
from tacit.training.engines.vmap import _weigh
from tacit.training.sums import ClippedSum

_BUDGET = 2**28  # elements of per-example gradient held at once


def clipped_sum_of(
    losses: Tensor, parameters: dict[str, nn.Parameter], clip: Clip, weights: Tensor | None
) -> ClippedSum:
    """Sum of the clipped gradients of `losses`, one for each example. Private.

    Rows of weight 0 add exactly zero. Frees the graph.
    """
    rows = len(losses)
    keep = torch.ones(rows, dtype=torch.bool) if weights is None else weights > 0
    keep = keep.to(losses.device)
    size = max(1, sum(p.numel() for p in parameters.values()))
    step = max(1, min(rows, _BUDGET // size))
    total: ClippedSum | None = None
    for start in range(0, rows, step):
        part = slice(start, start + step)
        picks = torch.eye(rows, dtype=losses.dtype, device=losses.device)[part]
        gradients = torch.autograd.grad(
            losses,
            list(parameters.values()),
            grad_outputs=picks,
            is_grads_batched=True,
            materialize_grads=True,
            retain_graph=start + step < rows,
        )
        found = _weigh(dict(zip(parameters, gradients, strict=True)), clip, keep[part])
        total = found if total is None else total + found
    assert total is not None
    return total
