"""The traced programs of a run: one for each shape that an example can have."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from tacit.training.program.one_example import OneExample, Untraceable, traced
from tacit.training.program.one_by_one import OTHER_SHAPE
from tacit.training.tree import Batch, LossFn, map_rows, with_rows

# By model, then by loss and views: what `clipped_sum` has traced.
_traced: WeakKeyDictionary[nn.Module, dict[Any, "Programs"]] = WeakKeyDictionary()


class Programs:
    """The program of one example for every shape that was prepared."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, views: int = 1) -> None:
        self.model, self.loss_fn, self.views = model, loss_fn, views
        self._programs: dict[Any, OneExample] = {}

    @classmethod
    def of(cls, model: nn.Module, loss_fn: LossFn, views: int) -> "Programs":
        """Return the programs of this model and loss, which are kept with the model."""
        known = _traced.setdefault(model, {})
        if (loss_fn, views) not in known:
            known[loss_fn, views] = cls(model, loss_fn, views)
        return known[loss_fn, views]

    def prepare(self, batch: Batch) -> None:
        """Trace the program of one example of the shapes in `batch`, unless it is known."""
        key = self._key(batch)
        if key not in self._programs:
            one = map_rows(lambda t: torch.zeros_like(t[: self.views]), batch)
            self._programs[key] = traced(self.model, self.loss_fn, one, self.views)

    def begin_lot(self) -> None:
        """Prepare for the examples of the next lot."""

    def program_of(self, batch: Batch) -> OneExample:
        """Return the program of examples with the shapes in `batch`."""
        try:
            return self._programs[self._key(batch)]
        except KeyError:
            raise Untraceable(OTHER_SHAPE) from None

    def _key(self, batch: Batch) -> Any:
        tensors, _ = with_rows(batch)
        shapes = tuple((t.shape[1:], t.dtype, t.device) for t in tensors)
        modes = tuple(module.training for module in self.model.modules())
        trained = tuple(p.requires_grad for p in self.model.parameters())
        return shapes, modes, trained, torch.is_autocast_enabled("cpu")
