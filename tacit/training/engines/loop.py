"""The clipped sum by plain autograd, one backward per example: slow, but right for any model.

`run` is the last resort, for models that vmap cannot run: packed sequences, control flow that
depends on values, operations without a batching rule. `clipped_sum_of` starts from losses that
somebody else's loop has computed; there, each example's backward runs over the whole batch.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from tacit.errors import IncompatibleModel
from tacit.training.clip import Clip, ClippedSum
from tacit.training.engines.examples import Examples, clip_and_sum
from tacit.training.noisy_loss import with_loss
from tacit.training.tree import is_out_of_memory

Gradients = tuple[Tensor, ...]  # by parameter, with one row for each example
_grad = partial(torch.autograd.grad, materialize_grads=True, allow_unused=True)
_BUDGET = 2**28  # elements of per-example gradient held at once


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


def clipped_sum_of(
    losses: Tensor, parameters: dict[str, nn.Parameter], clip: Clip, mask: Tensor
) -> ClippedSum:
    """Return the clipped sum of the gradients of `losses`; only where `mask` is True.

    The losses come from one forward pass over all examples. If a gradient is not finite, it cannot
    be said which example is the cause, so `FloatingPointError` is raised.
    """
    rows, size = len(losses), max(1, sum(p.numel() for p in parameters.values()))
    step = max(1, min(rows, _BUDGET // size))
    seeds = torch.eye(rows, dtype=losses.dtype, device=losses.device)
    targets = list(parameters.values())
    total: ClippedSum | None = None
    gradients_of = _batched
    for start, stop in pairwise([0, *range(1, rows, step), rows]):
        # The first row alone shows whether rows can go together: dropout in a checkpointed block,
        # for example, cannot be drawn again for many at a time.
        is_first, is_last = start == 0, stop == rows
        try:
            keep_graph = is_first or not is_last
            gradients = gradients_of(losses, targets, seeds[start:stop], keep_graph=keep_graph)
        except RuntimeError as error:
            if not is_first or is_out_of_memory(error):
                raise
            gradients_of = _one_by_one
            gradients = gradients_of(losses, targets, seeds[start:stop], keep_graph=not is_last)
        rows_of = dict(zip(parameters, gradients, strict=True))
        _require_finite(rows_of.values(), mask[start:stop])
        part = clip_and_sum(rows_of, clip, mask[start:stop])
        total = part if total is None else total + part
    assert total is not None  # a batch has at least one row
    return total


def _require_finite(gradients: Iterable[Tensor], mask: Tensor) -> None:
    """Raise `FloatingPointError` if the gradient of an example in `mask` is not finite."""
    for rows in gradients:
        if not bool((rows.isfinite().flatten(1).all(1) | ~mask).all()):
            raise FloatingPointError(
                "the gradient of an example is not finite, which in a batch that shares one "
                "forward pass may come from any of them, so nothing is released. Use private.step, "
                "where such an example contributes zero."
            )


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


def _batched(
    losses: Tensor, targets: Sequence[Tensor], seeds: Tensor, *, keep_graph: bool
) -> Gradients:
    """Return the gradient of sum(seed * losses) for each row `seed`, in one batched backward."""
    return _grad(losses, targets, seeds, is_grads_batched=True, retain_graph=keep_graph)


def _one_by_one(
    losses: Tensor, targets: Sequence[Tensor], seeds: Tensor, *, keep_graph: bool
) -> Gradients:
    """Return the gradient of sum(seed * losses) for each row `seed`, by a backward per row."""
    rows = [
        _grad(losses, targets, seed, retain_graph=keep_graph or number < len(seeds))
        for number, seed in enumerate(seeds, 1)
    ]
    return tuple(map(torch.stack, zip(*rows, strict=True)))
