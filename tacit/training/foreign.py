"""Loops that somebody else owns: Lightning, Accelerate, Trainer, Keras, or a plain one.

Such a loop iterates over `private`, calls `private.backward()` for each lot in place of
`loss.backward()`, and steps its own optimizer. The losses are those of `loss_fn`, and the sum is
that of `Private.step`: the loop computes nothing from a record.

Each release belongs to one optimizer step. A loop that accumulates gradients would overwrite the
release in `p.grad` by the next one, and what was paid for it would be lost.
"""

import warnings
from collections.abc import Callable, Iterable
from weakref import WeakMethod

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_WRAPPERS = ("accelerate", "lightning", "pytorch_lightning")


def own_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the torch optimizer inside a wrapper of Accelerate or Lightning, if there is one."""
    while type(optimizer).__module__.partition(".")[0] in _WRAPPERS:
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]  # both wrappers have it
    return optimizer


class LastRelease:
    """The release that `private.backward()` left in `p.grad`, and whether a step has used it."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]
    ) -> None:
        self._optimizer, self._parameters = optimizer, list(parameters)
        self._is_unused = False
        self._hook: RemovableHandle | None = None

    def watch(self, after_step: Callable[[], None]) -> None:
        """Wait for the optimizer step that uses the release, and call `after_step` after it.

        A loop of another library may stop then, and keep its iterator of lots. The parameters'
        version counters would not show the step: fused optimizers leave them as they are.
        """
        call = WeakMethod(after_step)  # the optimizer must not keep the run alive

        def note(*_: object) -> None:
            self._is_unused = False
            if (found := call()) is not None:
                found()

        self._is_unused = True
        self._hook = self._optimizer.register_step_post_hook(note)

    def require_used(self, step: int) -> None:
        """Raise if `p.grad` still holds a release that no optimizer step has used."""
        if self._is_unused:
            found = [p.grad for p in self._parameters if p.grad is not None]
            if any(bool(gradient.any()) for gradient in found):
                raise RuntimeError(
                    "no optimizer step has used the last release, which p.grad still holds. Call "
                    "optimizer.step() after each private.backward(); instead of accumulating "
                    "gradients, make batch_size larger. optimizer.zero_grad() discards the release."
                )
            warnings.warn(
                f"the release of step {step} was discarded by zero_grad before an optimizer step "
                "used it. It stays paid.",
                RuntimeWarning,
                stacklevel=4,
            )
        self.forget()

    def forget(self) -> None:
        """Stop waiting for an optimizer step."""
        self._is_unused = False
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
