"""The rule for standardized weights: gradients pass through the standardization once per step.

Of one output channel with weights w (N numbers), let c = w - mean(w) and u = c / |c|. The layer
uses gain u. If h is the gradient of a loss with respect to gain u, its gradients are

    of w:     scale (h - mean(h) - u (u.h)),  with scale = gain / |c|,
    of gain:  u.h.

Both are linear in h, with factors that all examples share. So the weighted sum over the examples is
taken of their h, and passes through the formula once. What the formula removes from h is orthogonal
to the rest, because u has mean 0 and norm 1. So the squared norm of the gradient of w is

    scale^2 (|h|^2 - N mean(h)^2 - (u.h)^2),

and no example's gradient of w is formed. Where |c|^2 is below eps, |c| is the constant sqrt(eps),
and the terms with u are absent.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tacit.training.clip import accumulator
from tacit.training.gradients.factored import Dense, FactoredGradient, Formable
from tacit.training.gradients.ghost_norm import room, squared_norm, wide
from tacit.training.weight_standardization import unit_rows


def pull_back(
    made: Any, _result: Tensor, gradient: FactoredGradient, _parameters: object
) -> Iterator[tuple[Tensor, FactoredGradient]]:
    """Yield (source, its per-example gradients) for the weight and the gain that were used.

    `made` is a call of `standardize_weight`, and `gradient` holds the gradients of its result.
    """
    weight, gain = made.args
    eps = made.kwargs["eps"]
    with torch.no_grad():
        formed = gradient.formed() if isinstance(gradient, Formable) else Dense(gradient.dense())
        if (formed.axes or (0,))[0] != 0 or formed.dense().shape[1:] != weight.shape:
            formed = Dense(formed.dense().reshape(-1, *weight.shape))  # with the channels first
        axes = formed.axes or tuple(range(weight.dim()))
        unit, squared = unit_rows(weight.detach().permute(_inverse(axes)), eps)
        values = formed.values.flatten(2)  # (examples, channels, N), N in the order they have
        along = (wide(values) * unit).sum(2)
        if gain is not None and gain.requires_grad:
            yield gain, Dense(along)
        if weight.requires_grad:
            is_constant = squared < eps
            scale = squared.clamp_min(eps).rsqrt()
            if gain is not None:
                scale = scale * gain.detach().unsqueeze(1)
            unit = torch.where(is_constant, 0.0, unit)
            along = torch.where(is_constant.squeeze(1), 0.0, along)
            shape = tuple(formed.values.shape[1:])
            yield weight, Standardized(values, along, unit, scale, shape, axes)


def _inverse(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axes.index(axis) for axis in range(len(axes)))


@dataclass(frozen=True)
class Standardized:
    """Gradients of weights that are standardized, held as those of the standardized weights."""

    values: Tensor  # h: (examples, channels, N)
    along: Tensor  # u.h: (examples, channels)
    unit: Tensor  # u: (channels, N), zero for channels without variance
    scale: Tensor  # (channels, 1)
    shape: tuple[int, ...]  # of one example's values
    axes: tuple[int, ...]  # the permutation of `shape` that gives the weight's axis order

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def dense(self) -> Tensor:
        pulled = self._pulled(wide(self.values), self.along).view(-1, *self.shape)
        return pulled.permute(0, *(axis + 1 for axis in self.axes))

    def settle(self, *, bounded: bool) -> tuple[Tensor, FactoredGradient]:
        if bounded:  # then the norm must be that of the numbers that are added
            return Dense(self.dense()).settle(bounded=True)
        examples, channels, size = self.values.shape
        kept = squared_norm(self.values.flatten(0, 1)).view(examples, channels)
        removed = size * wide(self.values).mean(2).square() + self.along.square()
        weights = self.scale.square()  # (channels, 1)
        whole, lost = (kept @ weights).squeeze(1), (removed @ weights).squeeze(1)
        # The weighted sum adds h. The room is for three inner products and for that sum, relative
        # to |h|: an example of which almost everything is removed is clipped by more than its norm.
        share = room(accumulator(self.dtype), 2, widths=(size,) * 3)
        return share.raised(whole - lost, whole.sqrt()).to(accumulator(self.dtype)), self

    def weighted_sum(
        self, factors: Tensor, keep: Tensor | None, *, bounded: bool = False
    ) -> Tensor:
        assert not bounded  # settled as `Dense`
        total = Dense(self.values).weighted_sum(factors, keep)
        pulled = self._pulled(total, (total * self.unit).sum(1))
        return pulled.view(self.shape).permute(self.axes)

    def _pulled(self, values: Tensor, along: Tensor) -> Tensor:
        """Return the gradients of the weight by the formula, in the shape of `values`."""
        centered = values - values.mean(-1, keepdim=True)
        return (centered - along.unsqueeze(-1) * self.unit) * self.scale
