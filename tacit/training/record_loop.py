"""The clipped sum by plain autograd, one record after the other: slow, but right for any model.

It serves programs that cannot be traced: packed sequences, control flow that depends on values,
operations that cannot be mapped. Each example is run alone, so examples cannot meet.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from tacit.errors import IncompatibleModel
from tacit.training.clip import Clip, ClippedSum
from tacit.training.examples import Examples, clip_and_sum
from tacit.training.noisy_loss import with_loss
from tacit.training.tree import map_rows


def run(examples: Examples, clip: Clip) -> ClippedSum:
    """Return the clipped sum of the examples whose mask is True, by one backward per example."""
    parameters = examples.parameters
    total = ClippedSum.zeros(examples.model, clip, dtype=torch.float64)
    for i in range(len(examples)):
        one = examples.part(i, i + 1)
        # A copy: by `as_strided`, a view of the lot would reach other examples.
        one = replace(one, batch=map_rows(torch.clone, one.batch))
        with torch.enable_grad():
            loss = one.losses().mean()
            found = gradients_of(loss, list(parameters.values()))
        gradients = {  # that of an embedding table may be sparse
            name: g.to_dense().unsqueeze(0) for name, g in zip(parameters, found, strict=True)
        }
        part = clip_and_sum(gradients, clip, one.mask)
        total += with_loss(part, examples.noisy_loss, loss, one.mask)
    return total


def gradients_of(loss: Tensor, parameters: list[nn.Parameter]) -> tuple[Tensor, ...]:
    """Return the gradient of `loss` for each parameter: zeros for those that it does not use."""
    try:
        return torch.autograd.grad(loss, parameters, materialize_grads=True)
    except RuntimeError as error:
        if "use_reentrant=True" in str(error):
            raise IncompatibleModel(
                "Reentrant checkpointing hides the backward from per-example clipping. "
                "Call torch.utils.checkpoint.checkpoint with use_reentrant=False."
            ) from error
        raise
