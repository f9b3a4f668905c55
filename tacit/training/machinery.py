"""From a lot to its clipped sum, by the settings that decide the speed."""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tacit.training.clip import Clip
from tacit.training.clipping import clipped_sum
from tacit.training.distributed import gathered, is_sharded
from tacit.training.gpu.compiled import CompiledSum
from tacit.training.lots import Lot, Part
from tacit.training.memory import in_pieces, is_out_of_memory
from tacit.training.records import Batch, Micro, map_tensors, seeded
from tacit.training.sums import ClippedSum


@dataclass(frozen=True, kw_only=True)
class Machinery:
    """Settings that change the speed, and the views that an example's gradient is averaged over."""

    engine: str = "auto"
    is_compiled: bool = False
    augmentations: int = 1
    augment: Callable[[Batch], Batch] | None = None

    def views(self, batch: Batch) -> Batch:
        """Each row `augmentations` times in a row, augmented."""
        times = self.augmentations
        if times > 1:
            batch = map_tensors(lambda t: t.repeat_interleave(times, 0) if t.dim() else t, batch)
        return batch if self.augment is None else self.augment(batch)


class Clipper:
    """The seam, called with this run's settings."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[nn.Module, Batch], Tensor] | None,
        clip: Clip,
        machinery: Machinery,
    ) -> None:
        self._model, self._loss_fn, self._machinery = model, loss_fn, machinery
        self._clip_norm, self._compiled = clip.clip_norms[0], None
        self._is_sharded = is_sharded(model)
        self._running: ClippedSum | None = None
        self._is_on_gpu = next(model.parameters()).is_cuda
        # Rows that lie on a GPU are fetched there, unless they are changed on the way.
        is_plain = machinery.augment is None and machinery.augmentations == 1
        self._takes_rows = self._is_on_gpu and is_plain
        if machinery.is_compiled and loss_fn is not None:
            views = machinery.augmentations
            self._compiled = CompiledSum(model, loss_fn, clip, augmentations=views)

    @property
    def draws(self) -> bool:
        """Whether model or augmentation may draw random numbers."""
        if self._compiled is None or self._machinery.augment is not None:
            return True
        return self._compiled.draws

    def sum_over(self, lot: Lot, clip: Clip) -> tuple[ClippedSum, int]:
        """Sum of the clipped gradients of a lot, and how many records it holds. Private.

        A lot that does not fit is run in parts; if an example spoils the sum, it is taken again.
        """
        if self._compiled is None:
            return self._sum_over(lot, clip)
        self._compiled.begin()
        found = self._sum_over(lot, clip)
        return found if self._compiled.all_finite() else self._sum_over(lot, clip, masked=True)

    def _sum_over(self, lot: Lot, clip: Clip, *, masked: bool = False) -> tuple[ClippedSum, int]:
        whole = gathered(self._model) if self._is_sharded else nullcontext()
        with whole, self._seeded(lot):
            parts = lot.parts()
            first, second = next(parts, None), next(parts, None)
            total, drawn = (None if first and second is None else self._zeros(clip)), 0
            for part in itertools.chain(filter(None, (first, second)), parts):
                for found in self._sums_of(part, clip, lot, masked=masked):
                    total = found if total is None else total.__iadd__(found)
                drawn += len(part.indices)
            assert total is not None  # there are zeros if there is no part
            return total, drawn

    def _zeros(self, clip: Clip) -> ClippedSum:
        """To add to. On a GPU always in the same place: what follows the sum is recorded there."""
        if self._running is None or not self._is_on_gpu:
            self._running = ClippedSum.zeros(self._model, clip)
        else:
            torch._foreach_zero_([*self._running.sums.values(), self._running.within])  # pyright: ignore[reportPrivateImportUsage]  # as torch.optim does
        return self._running

    def _sums_of(self, part: Part, clip: Clip, lot: Lot, *, masked: bool) -> list[ClippedSum]:
        """The sum of a part, which the next call may overwrite, or those of its pieces.

        It is taken in pieces where memory runs out.
        """
        data = lot.source.records.on_device
        if self._compiled is not None and data is not None and self._takes_rows and not masked:
            try:
                return [self._compiled.of_part(part, data, self._scale(clip), reuse=True)]
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
        micro = part.fetch()
        return in_pieces(
            lambda piece: self.clipped_sum(piece, clip, reuse=piece is micro, masked=masked),
            micro,
            on_halved=lot.source.lower_limit,
        )

    def clipped_sum(
        self, micro: Micro, clip: Clip, *, reuse: bool = False, masked: bool = False
    ) -> ClippedSum:
        """Sum of the clipped gradients of a physical batch. Private.

        With `reuse` it may lie in memory that the next call overwrites; with `masked` no example
        spoils it.
        """
        if self._loss_fn is None:
            raise ValueError("loss_fn must be given for private.step; without it use backward.")
        batch = self._machinery.views(micro.batch)
        if self._compiled is not None and not masked:
            assert micro.weights is not None  # compiled batches are padded
            return self._compiled(batch, micro.weights, self._scale(clip), reuse=reuse)
        return clipped_sum(
            self._model,
            self._loss_fn,
            batch,
            clip,
            engine=self._machinery.engine,
            weights=micro.weights,
            augmentations=self._machinery.augmentations,
        )

    def _scale(self, clip: Clip) -> float:
        return clip.clip_norms[0] / self._clip_norm

    def _seeded(self, lot: Lot) -> AbstractContextManager[None]:
        """The randomness of model and augmentation follows the run's key, where there is any."""
        if not self.draws:
            return nullcontext()
        return seeded(lot.source.seed(lot.step), lot.source.records.device)
