"""What every engine does with a batch and its losses."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tacit.training.clip import FLOAT32_ROUNDING, Clip
from tacit.training.gradients.rounding import multiplied_in

# Relative error of a norm and of the weighted contraction, by the dtype they were computed in.
ROUNDING = {
    torch.float64: 2.0**-40,
    torch.float32: FLOAT32_ROUNDING,
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-8,
}


def rounding_of(dtype: torch.dtype) -> float:
    """Relative error to leave room for, with the matrix units as they are set."""
    return ROUNDING[multiplied_in(dtype)]


def rows_of(batch: Any) -> tuple[int, torch.device]:
    """Length of the first axis, on which all tensors of the batch agree, and their device."""
    tensors, _ = split_rows(batch)
    lengths = {t.shape[0] for t in tensors}
    if not lengths:
        raise ValueError("batch must hold a tensor with the examples on its first axis, got none.")
    if len(lengths) > 1:
        raise ValueError(
            "batch must hold the examples on the first axis of every tensor, but its tensors "
            "differ in length there. Move the axis, or close over what is not per example."
        )
    return lengths.pop(), tensors[0].device


def map_rows(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with `change` applied to every tensor that has rows."""
    return pytree.tree_map(lambda leaf: change(leaf) if _has_rows(leaf) else leaf, batch)


def split_rows(batch: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """The tensors that have rows, and a function that puts others in their place."""
    if isinstance(batch, tuple) and all(_has_rows(leaf) for leaf in batch):
        return list(batch), tuple  # the common case, without the cost of the general one
    leaves, spec = pytree.tree_flatten(batch)
    places = [i for i, leaf in enumerate(leaves) if _has_rows(leaf)]

    def rebuild(tensors: Sequence[Tensor]) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        return pytree.tree_unflatten(filled, spec)

    return [leaves[i] for i in places], rebuild


def checked_losses(
    loss_fn: Callable[..., Tensor], model: nn.Module, batch: Any, rows: int
) -> Tensor:
    """`loss_fn(model, batch)`, which must be one loss for each row."""
    with as_written():
        losses = loss_fn(model, batch)
    if not isinstance(losses, Tensor):
        raise TypeError(f"loss_fn must return a tensor, got {type(losses).__name__}.")
    if losses.dim() == 0:
        raise ValueError(
            "loss_fn must return one loss for each example, shape (examples,), got a single number."
            ' Use reduction="none" and do not average over the batch: a mean cannot be clipped.'
        )
    if losses.shape != (rows,):
        # The drawn size is private: it is not printed.
        raise ValueError(
            "loss_fn must return one loss for each example, shape (examples,), got a tensor with "
            f"{losses.dim()} axes of another shape. Average over positions, not over examples."
        )
    return losses


def as_written() -> AbstractContextManager[None]:
    """Inside, what the user compiled runs eagerly: traced once, it could not be followed again."""
    return torch.compiler.set_stance("force_eager")


def group_index(clip: Clip, names: Sequence[str]) -> dict[str, int]:
    """The clip group of each parameter."""
    return {name: g for g, group in enumerate(clip.groups(names)) for name in group}


def factors_of(
    clip: Clip, squared_norms: Tensor, mask: Tensor, rounding: float, finite: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Factors (groups, examples), zero where masked or not finite, and the `within` counts.

    `finite` says which examples are (None: all): one that is not finite in one group gives nothing
    to any, since its gradient is not a vector.
    """
    usable = mask if finite is None else mask & finite  # (examples,)
    factors = clip.factors(squared_norms, rounding=rounding) * usable
    if len(clip.clip_norms) == 1:
        short = squared_norms <= clip.clip_norms[0] ** 2
    else:
        short = squared_norms <= squared_norms.new_tensor(clip.clip_norms).square().unsqueeze(1)
    return factors, (short & usable).sum(1, dtype=torch.float32)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0
