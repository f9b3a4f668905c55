"""Clipped sum example by example, with plain autograd: the last resort, for models vmap cannot run.

Packed sequences, control flow by values, operations without a batching rule. As slow as it sounds.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import IncompatibleModel
from tacit.training.clip import Clip
from tacit.training.engines import batch as b
from tacit.training.engines.vmap import weigh
from tacit.training.sums import ClippedSum, trainable


def run(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: Any,
    clip: Clip,
    mask: Tensor,
    augmentations: int = 1,
) -> ClippedSum:
    """Clipped sum of the rows where `mask` is True."""
    parameters = trainable(model)
    total = ClippedSum.zeros(model, clip)
    for i in range(len(mask)):
        rows = slice(i * augmentations, (i + 1) * augmentations)
        one = b.map_rows(batch, lambda t, rows=rows: t[rows])
        with torch.enable_grad():
            loss = b.checked_losses(loss_fn, model, one, augmentations).mean()
            found = _gradient(loss, list(parameters.values()))
        gradients = {
            name: (torch.zeros_like(p) if g is None else g).unsqueeze(0)
            for (name, p), g in zip(parameters.items(), found, strict=True)
        }
        total += weigh(gradients, clip, mask[i : i + 1])
    return total


def _gradient(loss: Tensor, parameters: list[nn.Parameter]) -> tuple[Tensor | None, ...]:
    try:
        return torch.autograd.grad(loss, parameters, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant=True" in str(error):
            raise IncompatibleModel(
                "Reentrant checkpointing hides the backward from per-example clipping. "
                "Call torch.utils.checkpoint.checkpoint with use_reentrant=False."
            ) from error
        raise
