"""The rule for standardized weights: gradients pass through the standardization once per step.

Of one output channel with weights w (N numbers), let c = w - mean(w) and u = c / |c|. The layer
uses gain u. If h is the gradient of a loss with respect to gain u, its gradients are

    of w:     scale (h - mean(h) - u (u.h)),  with scale = gain / |c|,
    of gain:  u.h.

Both are linear in h, with factors that all examples share. So the weighted sum over the examples is
taken of their h, and passes through the formula once. Only the norms need the formula for each
example: two inner products and one difference. Where |c|^2 is below eps, |c| is the constant
sqrt(eps), and the term with u is absent.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tacit.training.clip import accumulator
from tacit.training.gradients import ghost_norm
from tacit.training.gradients.factored import Dense, FactoredGradient
from tacit.training.gradients.ghost_norm import room, squared_norm, wide
from tacit.training.weight_standardization import unit_rows


def pull_back(
    made: Any, _result: Tensor, gradient: FactoredGradient, _parameters: object
) -> Iterator[tuple[Tensor, FactoredGradient]]:
    """Yield (source, its per-example gradients) for the weight and the gain that were used.

    `made` is a call of `standardize_weight`, and `gradient` holds the gradients of its result.
    """
    weight, gain = made.args
    with torch.no_grad():
        unit, squared = unit_rows(weight.detach(), made.kwargs["eps"])
        values = wide(gradient.dense().flatten(2))  # (examples, channels, N)
        if gain is not None and gain.requires_grad:
            yield gain, Dense(_along(values, unit))
        if weight.requires_grad:
            eps = made.kwargs["eps"]
            scale = squared.clamp_min(eps).rsqrt()
            if gain is not None:
                scale = scale * gain.detach().unsqueeze(1)
            removed = torch.where(squared < eps, 0.0, unit)
            yield weight, Standardized(values, removed, scale, tuple(weight.shape))


def _along(values: Tensor, unit: Tensor) -> Tensor:
    """Return the inner products u.h, (examples, channels)."""
    return torch.einsum("bcn,cn->bc", values, unit.to(values.dtype))


@dataclass(frozen=True)
class Standardized:
    """Gradients of weights that are standardized, held as those of the standardized weights."""

    values: Tensor  # h: (examples, channels, N)
    unit: Tensor  # u: (channels, N)
    scale: Tensor  # (channels, 1)
    shape: tuple[int, ...]  # of the weight

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def dense(self) -> Tensor:
        return self._pulled(self.values).view(-1, *self.shape)

    def settle(self, *, bounded: bool) -> tuple[Tensor, FactoredGradient]:
        if bounded:  # then the norm must be that of the numbers that are added
            return Dense(self.dense()).settle(bounded=True)
        found = [self._norms(*part) for part in ghost_norm.chunks(self.unit.numel(), self.values)]
        return torch.cat(found).to(accumulator(self.dtype)), self

    def weighted_sum(
        self, factors: Tensor, keep: Tensor | None, *, bounded: bool = False
    ) -> Tensor:
        assert not bounded  # settled as `Dense`
        total = Dense(self.values).weighted_sum(factors, keep)
        return self._pulled(total.unsqueeze(0)).view(self.shape)

    def _norms(self, values: Tensor) -> Tensor:
        """Return the squared norms of examples, raised for what the weighted sum may round.

        The sum adds h, whose length is that of the result and of what the formula removes.
        """
        squared = squared_norm(self._pulled(values))
        size, scale = values.shape[2], self.scale.squeeze(1)
        removed = size * values.mean(2).square() + _along(values, self.unit).square()
        lengths = (squared + squared_norm(removed.sqrt() * scale)).sqrt()
        return room(self.dtype, 2).raised(squared, lengths)

    def _pulled(self, values: Tensor) -> Tensor:
        """Return the gradients of the weight, (examples, channels, N), by the formula."""
        along = _along(values, self.unit).unsqueeze(2)
        centered = values - values.mean(2, keepdim=True)
        return torch.addcmul(centered, along, self.unit.to(values.dtype), value=-1) * self.scale
