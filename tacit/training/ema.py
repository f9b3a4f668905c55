"""Running mean of the weights, which costs no privacy: it only reads released values.

De et al. 2022 (arXiv:2204.13650), section 3: averaging the iterates removes much of the noise that
DP-SGD adds, at no cost in privacy (post-processing).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tacit._check import in_open_unit
from tacit.training.clip import trainable


class EMA:
    """Exponential moving average of a model's parameters, with a warm-up.

    At the t-th update the decay is min(decay, (1 + t) / (10 + t)), so that the random initial
    weights soon leave the mean. The model is changed only inside `applied`.

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
        self._means = {name: p.detach().clone() for name, p in trainable(model).items()}

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights to the mean; call it after each step."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        current = trainable(self._model)
        means = [self._means[name] for name in current]
        for mean, weight in zip(means, current.values(), strict=True):
            mean.lerp_(weight, 1 - decay)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Give the model its mean weights inside the block, and its own weights back after it."""
        current = trainable(self._model)
        kept = {name: p.detach().clone() for name, p in current.items()}
        try:
            _copy(self._means, current)
            yield self._model
        finally:
            _copy(kept, current)

    def state_dict(self) -> dict[str, object]:
        """Return everything that `load_state_dict` needs; tensors are copies."""
        means = {name: mean.clone() for name, mean in self._means.items()}
        return {"decay": self.decay, "updates": self.updates, "means": means}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue from a `state_dict()`."""
        means = state["means"]
        if not isinstance(means, dict) or set(means) != set(self._means):
            raise ValueError("state must come from the EMA of a model with the same parameters.")
        self.decay = in_open_unit(decay=state["decay"])
        self.updates = int(state["updates"])  # type: ignore[call-overload]  # written by state_dict
        _copy(means, self._means)


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])
