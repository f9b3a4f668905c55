"""Checks that training trains: every declared weight moves, counts in the loss, and is used.

Silent mistakes waste a run. The optimizer holds other weights than those declared, so an adapter
stays as it was; or text and scores come from a model without the trained weights, or with a part of
them; or the files that are left behind hold others. `TrainedWeights` finds them after the first
steps, and again whenever it is asked: each time it compares with the weights of the time before. It
looks at released weights and at public tokens alone, so it costs nothing and reveals nothing.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tacit.errors import TacitError

if TYPE_CHECKING:
    from torch import Tensor, nn

_SHOWN = 3  # names in a message
_PARTS = 4  # into which adapters, and the other weights, are divided
_CLOSE = 1e-5  # what outputs may differ by if weights are equal, as a share of the largest


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
    steps: bias. Give the optimizer the trainable weights of the model that is trained, and a
    learning rate that changes them.
    """

    def __init__(self, model: "nn.Module") -> None:
        self._weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self._weights:
            raise UntrainedWeights(
                "the model has no trainable weight: set requires_grad for those to train."
            )
        if any(_is_adapter(name) for name, _ in model.named_parameters()):
            frozen = [
                name
                for name, p in model.named_parameters()
                if _is_adapter(name) and not p.requires_grad
            ]
            if frozen:
                raise UntrainedWeights(
                    f"{len(frozen)} weights of adapters are frozen: {_some(frozen)}. Make the "
                    "adapter that is to be trained the only one, and the active one."
                )
        self.renew()

    def renew(self) -> None:
        """Compare with the present weights from now on."""
        self._before = {name: p.detach().clone() for name, p in self._weights.items()}

    def require_moved(self) -> None:
        """Raise unless every weight differs from its value at the start or the last `renew`."""
        import torch

        still = [n for n, p in self._weights.items() if torch.equal(p, self._before[n])]
        if still:
            raise UntrainedWeights(
                f"{len(still)} of {len(self._weights)} trainable weights did not move in the first "
                f"steps: {_some(still)}. Give the optimizer the trainable weights of the model "
                "that is trained, and a learning rate that changes them."
            )

    def require_counted(self, loss: Callable[[], "Tensor"]) -> None:
        """Raise unless the gradient of `loss`, of public tokens, reaches every weight.

        A weight that no loss depends on is moved by noise alone.
        """
        import torch

        with torch.enable_grad():
            value = loss()
            if not bool(value.isfinite().all()):
                raise _diverged("the loss")
            found = torch.autograd.grad(
                value.sum(), list(self._weights.values()), allow_unused=True
            )
        unused = [
            name
            for name, gradient in zip(self._weights, found, strict=True)
            if gradient is None or not bool(gradient.abs().max() > 0)
        ]
        if any(g is not None and not bool(g.isfinite().all()) for g in found):
            raise _diverged("the gradient of the loss")
        if unused:
            advice = "Freeze them, or use them in the forward pass."
            if len(unused) == len(self._weights):
                advice = "Use the model that is trained, or lower a learning rate that is too high."
            raise UntrainedWeights(
                f"the loss does not depend on {len(unused)} of {len(self._weights)} trainable "
                f"weights: {_some(unused)}. {advice}"
            )

    def require_used(self, output: Callable[[], "Tensor"], *, of: str) -> None:
        """Raise unless `output` changes when weights are set back to their earlier values.

        That is tried for all weights, and then for parts of them: output that uses a trained head
        on the model without its adapter differs, too, from what it was. `output` is what the model
        writes or scores by, computed from public tokens; `of` names it.
        """
        import torch

        with torch.no_grad():
            trained = output()
            if not bool(trained.isfinite().any()):
                raise _diverged(of)
            trained = trained.nan_to_num()
            unused = [
                part
                for part in self._parts()
                if torch.equal(trained, self._without(part, output).nan_to_num())
            ]
            again = output().nan_to_num()
        if not torch.equal(trained, again):
            raise UntrainedWeights(
                f"{of} is random: it gives two outputs for one input. Switch dropout off."
            )
        if not unused:
            return
        if unused[0] == list(self._weights):
            raise UntrainedWeights(
                f"{of} does not use the trained weights: its output on public tokens is the same "
                "with the weights from before training. Use the model that is trained."
            )
        names = [name for part in unused for name in part]
        raise UntrainedWeights(
            f"{of} does not use {len(names)} of {len(self._weights)} trained weights: "
            f"{_some(names)}. Use the model that is trained, with its adapter."
        )

    def _parts(self) -> list[list[str]]:
        """Return the names of all weights, then those of adapters and others in parts of each."""
        parts = [list(self._weights)]
        for is_adapter in (True, False):
            names = [name for name in self._weights if _is_adapter(name) == is_adapter]
            size = max(2, -(-len(names) // _PARTS))
            parts += [names[start : start + size] for start in range(0, len(names), size)]
        return parts

    def _without(self, names: list[str], output: Callable[[], "Tensor"]) -> "Tensor":
        """Return the output with the earlier values of some weights."""
        now = {name: self._weights[name].detach().clone() for name in names}
        try:
            self._set({name: self._before[name] for name in names})
            return output()
        finally:
            self._set(now)

    def _set(self, values: "dict[str, Tensor]") -> None:
        for name, value in values.items():
            self._weights[name].data.copy_(value)


def require_saved(trained: "Tensor", loaded: "Tensor") -> None:
    """Raise unless a model that was loaded from the files gives the outputs of the trained one."""
    if trained.shape != loaded.shape or not bool(
        (trained - loaded).abs().max() <= _CLOSE * trained.abs().max()
    ):
        raise UntrainedWeights(
            "the saved files give a model with other outputs than the trained one: they do not "
            "hold all trained weights."
        )


def _diverged(of: str) -> UntrainedWeights:
    return UntrainedWeights(
        f"{of} gives no finite number on public tokens: training has diverged. Start anew with a "
        "lower learning rate."
    )


def _is_adapter(name: str) -> bool:
    return "lora_" in name


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
