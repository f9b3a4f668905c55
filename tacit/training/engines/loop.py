"""The clipped sum by plain autograd, one backward per example: slow, but right for any model.

It is the last resort, for models that vmap cannot run: packed sequences, control flow that depends
on values, operations without a batching rule.
"""

import torch
from torch import Tensor, nn

from tacit.errors import IncompatibleModel
from tacit.training.clip import Clip, ClippedSum
from tacit.training.engines.examples import Examples, clip_and_sum
from tacit.training.noisy_loss import with_loss


def run(examples: Examples, clip: Clip) -> ClippedSum:
    """Return the clipped sum of the examples whose mask is True, by one backward per example."""
    parameters = examples.parameters
    total = ClippedSum.zeros(examples.model, clip, dtype=torch.float64)
    for i in range(len(examples)):
        one = examples.part(i, i + 1)
        with torch.enable_grad():
            loss = one.losses().mean()
            found = _gradient(loss, list(parameters.values()))
        gradients = {  # that of an embedding table may be sparse
            name: (torch.zeros_like(p) if g is None else g.to_dense()).unsqueeze(0)
            for (name, p), g in zip(parameters.items(), found, strict=True)
        }
        part = clip_and_sum(gradients, clip, one.mask)
        total += with_loss(part, examples.noisy_loss, loss, one.mask)
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
