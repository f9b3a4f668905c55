"""The value that crosses the seam: a sum of clipped per-example gradients, which adds up."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tacit.training.clip import Clip


@dataclass(frozen=True, repr=False)
class ClippedSum:
    """Sum of clipped per-example gradients. Private: add noise before anything leaves.

    Attributes
    ----------
    sums
        By parameter name, for each trainable parameter; float32, or float64 for float64 parameters.
    within
        How many examples had norm <= the clip norm, in each group, shape (groups,). Private; one
        example changes it by at most 1 in each group. Adaptive clipping releases it with noise.
    """

    sums: dict[str, Tensor]
    within: Tensor

    @classmethod
    def zeros(cls, model: nn.Module, clip: Clip | None = None) -> "ClippedSum":
        """The sum over no examples: the result of an empty draw."""
        parameters = trainable(model)
        sums = {
            name: torch.zeros_like(p, dtype=accumulator(p.dtype), requires_grad=False)
            for name, p in parameters.items()
        }
        device = next(iter(parameters.values())).device
        groups = 1 if clip is None else len(clip.clip_norms)
        return cls(sums, torch.zeros(groups, device=device))

    def __add__(self, other: "ClippedSum") -> "ClippedSum":
        sums = {name: value + other.sums[name] for name, value in self.sums.items()}
        return ClippedSum(sums, self.within + other.within)

    def __iadd__(self, other: "ClippedSum") -> "ClippedSum":
        """Adds in place, so that microbatches of a large model need no third accumulator."""
        mine, others = zip(*((v, other.sums[name]) for name, v in self.sums.items()), strict=True)
        torch._foreach_add_(mine, others)  # pyright: ignore[reportPrivateImportUsage]  # as torch.optim does
        self.within.add_(other.within)
        return self

    def __repr__(self) -> str:
        return f"ClippedSum({len(self.sums)} parameters, private)"


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name; a tied parameter once, under its first name."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise ValueError("model must have a trainable parameter (requires_grad=True), got none.")
    return found


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums and norms are kept in: never below float32."""
    return torch.promote_types(dtype, torch.float32)


def is_dense(tensor: Tensor) -> bool:
    """Whether its numbers lie side by side, in any order of the axes.

    >>> table = torch.zeros(4, 6)
    >>> is_dense(table.t()), is_dense(table[:, :5])
    (True, False)
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
