"""What every engine is given, and the sum of per-example gradients that were formed."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor, nn

from tacit._check import whole
from tacit.errors import IncompatibleModel
from tacit.training.clipping.clip import (
    ROUNDING,
    Clip,
    ClippedSum,
    accumulator,
    factors_of,
    group_of,
    trainable,
)
from tacit.training.lots.one_by_one import ByShape, stacked
from tacit.training.noise.noisy_loss import NoisyLoss
from tacit.training.rules.factored import weighted_rows
from tacit.training.rules.ghost_norm import squared_norm
from tacit.training.tree import Batch, LossFn, check_losses, map_rows, n_rows, take_rows


@dataclass(frozen=True, eq=False)
class Examples:
    """A model, its loss, and a batch whose examples are to be clipped. Private.

    Attributes
    ----------
    loss_fn
        `loss_fn(model, batch)` gives one loss per row of the batch.
    batch
        `views` consecutive rows for each example: its augmentations, or the example itself.
    mask
        Shape (examples,): True for the examples that count. The others, such as padding, add
        exactly zero to the sum whatever they hold.
    bounded
        Whether rounding must be bounded (`tacit.training.clipping.arithmetic`).
    noisy_loss
        How the losses are added, if the run releases them too.
    sparse
        Whether the sum of a large table may be a sparse tensor, of the rows that were used.
    """

    model: nn.Module
    loss_fn: LossFn
    batch: Batch
    mask: Tensor
    views: int = 1
    bounded: bool = False
    noisy_loss: NoisyLoss | None = None
    sparse: bool = False

    def __len__(self) -> int:
        return self.mask.shape[0]

    def __repr__(self) -> str:
        return "Examples(private)"

    @property
    def rows(self) -> int:
        """Number of rows of the batch: all views of all examples."""
        return self.mask.shape[0] * self.views

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters of the model by name."""
        return trainable(self.model)

    def part(self, start: int, stop: int) -> "Examples":
        """Return the examples `start` to `stop` - 1, with the same model and loss."""
        rows = take_rows(self.batch, start * self.views, stop * self.views)
        mask = self.mask[start:stop]
        return replace(self, batch=rows, mask=mask)

    def losses(self) -> Tensor:
        """Return the losses of the batch, one for each row; raise if their number is another."""
        return losses_of(self.loss_fn, self.model, self.batch, self.rows)


def losses_of(loss_fn: LossFn, model: nn.Module, batch: Batch, rows: int) -> Tensor:
    """Return `loss_fn(model, batch)`; raise unless it holds `rows` losses, one for each row."""
    with as_written():
        losses = loss_fn(model, batch)
    check_losses(losses, rows)
    return losses


def as_written() -> AbstractContextManager[None]:
    """Return a context in which functions compiled by `torch.compile` run uncompiled.

    Operations inside a compiled function cannot be intercepted one by one.
    """
    return torch.compiler.set_stance("force_eager")


@dataclass(frozen=True)
class Views:
    """Several views of each example, whose gradients are averaged before clipping.

    De et al. 2022 (arXiv:2204.13650), section 3. The average costs no more privacy than one view.

    Parameters
    ----------
    count
        Number of views.
    transform
        Turns a batch with each row repeated `count` times into its views, row by row. None if the
        model draws random numbers itself, such as dropout.
    """

    count: int
    transform: Callable[[Batch], Batch] | None = None

    def __post_init__(self) -> None:
        whole(count=self.count, least=1)


def as_views(batch: Batch, views: int, augment: Callable[[Batch], Batch] | None) -> Batch:
    """Return the batch with each row repeated `views` times and then augmented."""
    if views > 1:
        batch = map_rows(lambda tensor: tensor.repeat_interleave(views, 0), batch)
    return batch if augment is None else augment(batch)


def views_one_by_one(batch: Batch, views: int, augment: Callable[[Batch], Batch] | None) -> Batch:
    """Return the views of each example of a batch; `augment` is called on one example at a time."""
    if augment is None:
        return as_views(batch, views, None)
    parts = (take_rows(batch, i, i + 1) for i in range(n_rows(batch)))
    found = stacked([as_views(part, views, augment) for part in parts], views)
    if isinstance(found, ByShape):
        raise IncompatibleModel("augment must give views of one shape and type for all records.")
    return found


def clip_and_sum(gradients: dict[str, Tensor], clip: Clip, mask: Tensor) -> ClippedSum:
    """Return the clipped sum of per-example gradients: by name, shape (examples, *parameter).

    Sums are in float64, so that rounding moves them by next to nothing (`arithmetic`).
    """
    index = group_of(clip, list(gradients))
    norms: list[list[Tensor]] = [[] for _ in clip.clip_norms]
    for name, rows in gradients.items():
        norms[index[name]].append(squared_norm(rows))
    squared = total_squares(norms, mask)
    rounding = max(ROUNDING[accumulator(rows.dtype)] for rows in gradients.values())
    finite = torch.isfinite(squared).all(0)
    factors, within = factors_of(clip, squared, mask, rounding=rounding, finite=finite)
    keep = (factors > 0).any(0)  # 0 * inf would be nan
    sums = {
        name: weighted_rows(rows.reshape(rows.shape[0], -1), factors[index[name]], keep)
        for name, rows in gradients.items()
    }
    return ClippedSum({n: s.view(gradients[n].shape[1:]) for n, s in sums.items()}, within)


def total_squares(norms: Sequence[Sequence[Tensor]], mask: Tensor) -> Tensor:
    """Return the squared norms of each group, (groups, examples), from those of its parameters."""
    dtypes = {part.dtype for group in norms for part in group}
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    zero = torch.zeros(mask.shape[0], device=mask.device, dtype=dtype)
    return torch.stack(
        [
            torch.stack([part.to(dtype) for part in group]).sum(0, dtype=torch.float64).to(dtype)
            if group
            else zero
            for group in norms
        ]
    )


@lru_cache(maxsize=1)
def keep_freed_memory() -> None:
    """Let the C library keep memory that one step frees on the CPU for the next step.

    The GNU C library returns freed memory to the system beyond twice the largest block that was
    ever mapped and freed, up to 32 MiB (mallopt(3), M_MMAP_THRESHOLD). Every step would then fault
    the memory in again page by page. This function allocates and frees a block of that size, once
    in a process; the block is never written to, so it costs nothing.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)
