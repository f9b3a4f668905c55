"""Loops that somebody else owns: Lightning, Accelerate, Trainer, Keras, or a plain one.

Such a loop iterates over `private`, calls `private.backward()` for each lot in place of
`loss.backward()`, and steps its own optimizer. The losses are those of `loss_fn`, and the sum is
that of `Private.step`: the loop computes nothing from a record.

Each release belongs to one optimizer step. A loop that accumulates gradients would overwrite the
release in `p.grad` by the next one, and what was paid for it would be lost. Between the release and
the next call of the run the optimizer moves the weights rightly, unless an ordinary backward has
added to `p.grad` meanwhile.
"""

import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tacit.training.loops.weight_changes import WeightChanges

_WRAPPERS = ("accelerate", "lightning", "pytorch_lightning")


def own_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the torch optimizer inside a wrapper of Accelerate or Lightning, if there is one."""
    while type(optimizer).__module__.partition(".")[0] in _WRAPPERS:
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]  # both wrappers have it
    return optimizer


class LastRelease:
    """The release that the run left in `p.grad`, for an optimizer step outside of the run.

    Attributes
    ----------
    is_unused
        Whether an optimizer step is to use it, and none has done so.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        changes: WeightChanges,
    ) -> None:
        self._optimizer, self._parameters, self._changes = optimizer, parameters, changes
        self.is_unused = self._is_early = False
        self._added = ""  # name of a parameter to whose gradient an ordinary backward has added
        known = weakref.ref(self)

        def note(*_: object) -> None:
            held = (p.grad for p in parameters.values())
            if (release := known()) is not None and any(g is not None for g in held):
                release._is_early = True

        self._at_start = optimizer.register_step_post_hook(note)
        self._hooks: list[RemovableHandle] = []

    def watch(self, before_step: Callable[[], None], after_step: Callable[[], None]) -> None:
        """Call a function before, and one after, each optimizer step that uses the release.

        A step on gradients to which an ordinary backward has added stops the run. A loop of another
        library may stop after the last step, and keep its iterator of lots. The hooks hold no
        reference to the run.
        """
        self.forget()
        known, before, after = weakref.ref(self), WeakMethod(before_step), WeakMethod(after_step)

        def add(name: str, _: Tensor) -> None:
            if (release := known()) is not None:
                release._added = name

        def begin(*_: object) -> None:
            if (release := known()) is not None and release._added:
                release._changes.stop(
                    f"an ordinary backward has added to the gradient of {release._added}, which "
                    "held a release. Remove it; or, if no private record has a part in it, say why "
                    'with private.declare_public_change("reason") before optimizer.step().'
                )
            if (run := before()) is not None:
                run()

        def end(*_: object) -> None:
            release, run = known(), after()
            if release is not None and run is not None:
                release.is_unused = False
                run()

        parameters = self._parameters.items()
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(add, name)) for name, p in parameters
        ]
        self._hooks.append(self._optimizer.register_step_pre_hook(begin))
        self._hooks.append(self._optimizer.register_step_post_hook(end))

    def require_used(self, step: int) -> None:
        """Raise if `p.grad` still holds a release that no optimizer step has used.

        Raises too if the optimizer has stepped before the first release.
        """
        self._at_start.remove()
        if self._is_early and self._changes.is_begun:  # perhaps by another run on the model
            self._changes.require_unchanged()
        elif self._is_early:
            self._changes.stop(
                "the optimizer has stepped between make_private and the first private step. Remove "
                "that step, or, if no private record has a part in it, say why with "
                'private.declare_public_change("reason") after it.'
            )
        if self.is_unused:
            found = [p.grad for p in self._parameters.values() if p.grad is not None]
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
        self.is_unused, self._added = False, ""
        while self._hooks:
            self._hooks.pop().remove()

    def allow(self) -> None:
        """Take what was added to the gradients, and steps before the first release, for public."""
        self._is_early, self._added = False, ""
