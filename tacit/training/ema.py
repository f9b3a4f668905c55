"""Running means of the weights, which cost no privacy: they only read released values.

De et al. 2022 (arXiv:2204.13650), section 3: averaging the iterates removes much of the noise that
DP-SGD adds, at no cost in privacy (post-processing).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tacit._check import in_open_unit
from tacit.training.clipping.clip import trainable
from tacit.training.distributed import like_parameter
from tacit.training.loops.weight_changes import mark


class EMA:
    """Exponential moving average of a model's parameters, with a warm-up.

    At the t-th update the decay is min(decay, (1 + t) / (10 + t)), so that the random initial
    weights soon lose their influence. The model is changed only inside `applied`.

    >>> model = nn.Linear(1, 1)
    >>> ema = EMA(model, decay=0.9)
    >>> ema.update()
    >>> with ema.applied():
    ...     _ = model(torch.ones(1))  # with the mean weights
    """

    def __init__(self, model: nn.Module, *, decay: float = 0.999) -> None:
        self.decay = in_open_unit(decay=decay)
        self.updates = 0
        self._model = model
        # In float32 or better: in a shorter type a mean of many weights would stop moving.
        self._means = {
            name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for name, p in trainable(model).items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Update the mean with the model's current weights; call this after each training step."""
        decay = self._next_decay()
        current = trainable(self._model)
        means = [self._means[name] for name in current]
        for mean, weight in zip(means, current.values(), strict=True):
            mean.lerp_(weight.to(mean.dtype), 1 - decay)
        self.updates += 1

    def _next_decay(self) -> float:
        return min(self.decay, (1 + self.updates) / (10 + self.updates))

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Replace the model's weights by their mean inside the block, and restore them after it."""
        current = trainable(self._model)
        kept = {name: p.detach().clone() for name, p in current.items()}
        try:
            _copy(self._means, current)
            mark(self._model)
            yield self._model
        finally:
            _copy(kept, current)
            mark(self._model)

    def state_dict(self) -> dict[str, object]:
        """Return copies of the mean weights and the update count, for `load_state_dict`."""
        means = {name: mean.clone() for name, mean in self._means.items()}
        return {"decay": self.decay, "updates": self.updates, "means": means}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore the mean weights and the update count from a `state_dict()`."""
        means = state["means"]
        if not isinstance(means, dict) or set(means) != set(self._means):
            raise ValueError("state must come from the EMA of a model with the same parameters.")
        self.decay = in_open_unit(decay=state["decay"])
        self.updates = int(state["updates"])  # type: ignore[call-overload]  # written by state_dict
        _copy(means, self._means)


class TailMean(EMA):
    """Mean of a model's parameters over the last `share` of the steps of a run of `steps` steps.

    Correlated noise (`banded_noise`) gains by it: noise that cancels over time is small in sums of
    steps, and so in the mean of many weights, and large in a single step.
    """

    def __init__(self, model: nn.Module, *, steps: int, share: float) -> None:
        super().__init__(model)
        self.first = steps - int(share * steps) + 1  # steps after which weights are added first
        self._next = self.first  # and next

    def observe(self, steps_taken: int) -> None:
        """Add the weights that the model has after `steps_taken` steps, once, if they count."""
        if steps_taken >= self._next:
            self.update()
            self._next = steps_taken + 1

    @contextmanager
    def applied(self, steps_taken: int | None = None) -> Iterator[nn.Module]:
        """Replace the model's weights by their mean inside the block, and restore them after it.

        The weights of the model after `steps_taken` steps count, too, if they belong to the mean:
        `observe` adds them only when the next step begins.
        """
        is_new = steps_taken is not None and steps_taken >= self._next
        newest = {n: p.detach().clone() for n, p in trainable(self._model).items() if is_new}
        with super().applied() as model:
            with torch.no_grad():
                for name, weight in newest.items():
                    mean = self._means[name]
                    share = 1 / (self.updates + 1)
                    trainable(model)[name].copy_(mean.lerp(weight.to(mean.dtype), share))
            yield model

    def apply_at_end(self, steps_taken: int) -> None:
        """Set the model to the mean, for good, once its run is over; weights count once."""
        if steps_taken >= self._next:
            self.observe(steps_taken)
            _copy(self._means, trainable(self._model))

    def state(self) -> dict[str, object]:
        """Return a copy of the mean; of a sharded model the whole of it, on every rank."""
        known = self._means if self.updates else {}
        means = {
            name: m.full_tensor() if isinstance(m, DTensor) else m.clone()
            for name, m in known.items()
        }
        return {"first": self.first, "updates": self.updates, "next": self._next, "means": means}

    def load_state(self, state: dict[str, Any]) -> None:  # Any: numbers and tensors
        """Continue from a `state()`."""
        self.updates, self._next = state["updates"], state["next"]
        for name, saved in state["means"].items():
            mean = self._means[name]
            mean.copy_(like_parameter(saved.to(mean.device), mean))

    def _next_decay(self) -> float:
        return self.updates / (self.updates + 1)


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])
