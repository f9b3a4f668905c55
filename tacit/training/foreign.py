"""Loops that somebody else owns: Lightning, Accelerate, Trainer, or the user's own plain loop.

Such a loop iterates over `private` and calls `private.backward()` for each lot in place of
`loss.backward()`. The sum is that of `Private.step`, by `loss_fn`; the loop's optimizer does the
rest.
"""

from collections.abc import Callable
from weakref import WeakMethod

import torch
from torch.utils.hooks import RemovableHandle

_WRAPPERS = ("accelerate", "lightning", "pytorch_lightning")


def own_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the torch optimizer inside a wrapper of Accelerate or Lightning, if there is one."""
    while type(optimizer).__module__.partition(".")[0] in _WRAPPERS:
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]  # both wrappers have it
    return optimizer


def when_the_optimizer_has_stepped(
    optimizer: torch.optim.Optimizer, method: Callable[[], None]
) -> RemovableHandle:
    """Call a bound method after the optimizer's next steps, until the handle is removed.

    A loop of another library may stop after the last step, and keep its iterator of lots.
    """
    weak = WeakMethod(method)  # the optimizer must not keep the run alive

    def after_step(*_: object) -> None:
        if (call := weak()) is not None:
            call()

    return optimizer.register_step_post_hook(after_step)
