"""Checks that training trains: every declared weight moves, counts in the loss, and is used.

Two silent mistakes waste a run. The optimizer holds other weights than those declared, so an
adapter stays as it was; or text and scores come from a model without the trained weights.
`TrainedWeights` finds both after the first steps. It looks at released weights and at public tokens
alone, so it costs nothing and reveals nothing.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tacit.errors import TacitError

if TYPE_CHECKING:
    from torch import Tensor, nn

_SHOWN = 3  # names in a message


class UntrainedWeights(TacitError):
    """Raised if weights that should be trained are not, or if the model is used without them."""


class TrainedWeights:
    """The weights of a model that are declared trainable, as they were before the first step.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> weights = TrainedWeights(model)
    >>> _ = model.weight.data.add_(1.0)
    >>> weights.require_moved()
    Traceback (most recent call last):
    tacit.text.trained_weights.UntrainedWeights: 1 of 2 trainable weights did not move in the first
    steps: bias. Give the optimizer the trainable weights of the model that is trained.
    """

    def __init__(self, model: "nn.Module") -> None:
        self._weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self._weights:
            raise UntrainedWeights(
                "the model has no trainable weight: set requires_grad for those to train."
            )
        self._before = {name: p.detach().clone() for name, p in self._weights.items()}

    def require_moved(self) -> None:
        """Raise unless every weight differs from its value before the first step."""
        import torch

        still = [n for n, p in self._weights.items() if torch.equal(p, self._before[n])]
        if still:
            raise UntrainedWeights(
                f"{len(still)} of {len(self._weights)} trainable weights did not move in the first "
                f"steps: {_some(still)}. Give the optimizer the trainable weights of the model "
                "that is trained."
            )

    def require_counted(self, loss: Callable[[], "Tensor"]) -> None:
        """Raise unless the gradient of `loss`, of public tokens, reaches every weight.

        A weight that no loss depends on is moved by noise alone.
        """
        import torch

        with torch.enable_grad():
            found = torch.autograd.grad(
                loss().sum(), list(self._weights.values()), allow_unused=True
            )
        unused = [
            name
            for name, gradient in zip(self._weights, found, strict=True)
            if gradient is None or not bool(gradient.abs().max() > 0)
        ]
        if unused:
            raise UntrainedWeights(
                f"the loss does not depend on {len(unused)} of {len(self._weights)} trainable "
                f"weights: {_some(unused)}. Freeze them, or use them in the forward pass."
            )

    def require_used(self, output: Callable[[], "Tensor"], *, of: str) -> None:
        """Raise unless `output` changes when the weights are set back to their first values.

        `output` is what the model writes or scores by, computed from public tokens; `of` names it.
        """
        import torch

        with torch.no_grad():
            trained = output()
            now = {name: p.detach().clone() for name, p in self._weights.items()}
            try:
                self._set(self._before)
                first = output()
            finally:
                self._set(now)
            again = output()
        if torch.equal(trained, first) or not torch.equal(trained, again):
            raise UntrainedWeights(
                f"{of} does not use the trained weights: its output on public tokens is the same "
                "with the weights from before training. Use the model that is trained."
                if torch.equal(trained, first)
                else f"{of} is random: it gives two outputs for one input. Switch dropout off."
            )

    def _set(self, values: "dict[str, Tensor]") -> None:
        for name, parameter in self._weights.items():
            parameter.data.copy_(values[name])


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
