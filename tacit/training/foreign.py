"""Loops that somebody else owns: Lightning, Accelerate, Trainer, or the user's own plain loop.

Such a loop iterates over `private` and calls `private.backward()` for each lot in place of
`loss.backward()`. The sum is that of `Private.step`, by `loss_fn`; the loop's optimizer does the
rest.
"""

from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tacit.training.arithmetic import Arithmetic
from tacit.training.clip import Clip, ClippedSum
from tacit.training.ema import TailMean
from tacit.training.epochs import EpochLoops
from tacit.training.lots import Lot
from tacit.training.tree import LossFn
from tacit.training.withheld_errors import ErrorGuard

if TYPE_CHECKING:
    from tacit.training.gpu.graph_replay import ReplayedStep  # noqa: F401  # `private` has it from here

_WRAPPERS = ("accelerate", "lightning", "pytorch_lightning")


def own_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the torch optimizer inside a wrapper of Accelerate or Lightning, if there is one."""
    while type(optimizer).__module__.partition(".")[0] in _WRAPPERS:
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]  # both wrappers have it
    return optimizer


class ForeignLoops(EpochLoops):
    """The methods of a private run for training loops of other libraries. Base of `Private`.

    It keeps track of the loop that is running and the lot that the loop holds.
    """

    _loss_fn: LossFn
    _lot_sum: Any  # a callable: how lots are summed
    _parameters: dict[str, nn.Parameter]
    _replayed: Any  # `RecordedUpdate`, or None

    def __init__(
        self,
        guard: ErrorGuard,
        arithmetic: Arithmetic,
        mean: TailMean | None = None,
    ) -> None:
        super().__init__(mean)
        self.arithmetic = arithmetic
        self._guard = guard
        self._loop = 0  # number of the newest loop
        self._lot: Lot | None = None  # which a loop over the run holds
        self._at_end: RemovableHandle | None = None

    def backward(self) -> None:
        """Set `p.grad` to the noisy gradient of the lot; call this in place of `loss.backward()`.

        The losses are those of `loss_fn` on the lot that was yielded last. The loop iterates over
        `private`, need not unpack the lot, and steps its own optimizer.
        """
        if self._lot is None:
            raise RuntimeError(
                "private.backward() needs a lot of `for lot in private`, and uses each lot once."
            )
        self.step(self._lot, update=False)
        self._lot = None
        self._end_with_the_optimizer()

    def _begin_loop(self) -> int:
        """Begin a new loop over the lots, end the one before it, and return the new one's number.

        Two loops at the same time could release parts of one lot twice.
        """
        self._lot = None
        self._loop += 1
        return self._loop

    def _check_loop(self, loop: int) -> None:
        if loop != self._loop:
            raise RuntimeError("another loop over this run has begun; continue with that one.")

    def _end_turn(self, loop: int) -> None:
        if loop == self._loop:  # an older loop holds nothing
            self._lot = None
            self._end_run()  # the loop goes on or is left, so the optimizer has taken its step
            if self._at_end is not None:
                self._at_end.remove()

    def _end_with_the_optimizer(self) -> None:
        """After the last release, end the run when the optimizer has taken its step.

        A loop of another library may stop then, and keep its iterator of batches.
        """
        if self._mean is None or self.steps_taken < self._end:
            return
        end = WeakMethod(self._end_run)  # the optimizer must not keep the run alive

        def after_step(*_: object) -> None:
            if (end_run := end()) is not None:
                end_run()

        self._at_end = self._optimizer.register_step_post_hook(after_step)

    def _may_defer(self) -> bool:
        """Whether nothing but the noise reads a lot's sum, so that both may be one launch on a GPU.

        The sum is then computed after the payment, with the release.
        """
        is_read = self._ranks.size > 1 or self._plan.adaptive is not None
        is_read = is_read or self._reports is not None or self.arithmetic.mode != "fast"
        if is_read:
            return False
        # Sums of other dtypes are copied before their release.
        is_float = all(p.dtype == torch.float32 for p in self._parameters.values())
        return is_float and getattr(self._lot_sum, "compiles", False)

    def _pay_and_release(self, total: ClippedSum, drawn: float, clip: Clip) -> None:
        raise NotImplementedError  # `Private` has it

    def step(self, lot: Lot, *, update: bool = True) -> None:
        raise NotImplementedError  # `Private` has it
