"""Loops that somebody else owns: Lightning, Accelerate, Trainer, Keras, or a plain one.

Such a loop iterates over `private`, calls `private.backward()` for each lot in place of
`loss.backward()`, and steps its own optimizer. The losses are those of `loss_fn`, and the sum is
that of `Private.step`, compiled if the run compiles: the loop computes nothing from a record.

Each release belongs to one optimizer step. A loop that accumulates gradients would overwrite the
release in `p.grad` by the next one, and what was paid for it would be lost.
"""

import warnings
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tacit.errors import IncompatibleModel
from tacit.training.arithmetic import Arithmetic
from tacit.training.checkpoint_file import State
from tacit.training.ema import TailMean
from tacit.training.epochs import EpochLoops
from tacit.training.lots import Lot

if TYPE_CHECKING:
    from tacit.training.gpu.graph_replay import ReplayedStep  # noqa: F401  # `private` has it from here
    from tacit.training.isolation import Isolation

_WRAPPERS = ("accelerate", "lightning", "pytorch_lightning")


def own_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the torch optimizer inside a wrapper of Accelerate or Lightning, if there is one."""
    while type(optimizer).__module__.partition(".")[0] in _WRAPPERS:
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]  # both wrappers have it
    return optimizer


class ForeignLoops(EpochLoops):
    """The methods of a private run for training loops of other libraries. Base of `Private`.

    It keeps track of the loop that is running, the lot that the loop holds, and whether an
    optimizer step has used the last release.
    """

    _lot_sum: Any  # a callable: how lots are summed
    _parameters: dict[str, nn.Parameter]
    _replayed: Any  # `RecordedUpdate`, or None

    def __init__(
        self, isolation: "Isolation", arithmetic: Arithmetic, mean: TailMean | None = None
    ) -> None:
        super().__init__(mean)
        self.arithmetic = arithmetic
        self._isolation = isolation
        self._guard = isolation.guard
        self._loop = 0  # number of the newest loop
        self._lot: Lot | None = None  # which a loop over the run holds
        self._is_unused = False  # whether no optimizer step has followed the last release
        self._hook: RemovableHandle | None = None  # of the optimizer, while its step is awaited

    def backward(self, losses: object = None) -> None:
        """Set `p.grad` to the noisy gradient of the lot; call this in place of `loss.backward()`.

        The lot is the one that `for lot in private` yielded last, and the losses are those of the
        `loss_fn` given to `make_private`; the loop passes none. The lot is paid and used once, as
        by `Private.step`, and the loop's own optimizer does the rest.

        Each release belongs to one optimizer step. If none has followed, because the loop
        accumulates gradients, the next `backward` or `step` raises `RuntimeError` before anything
        is paid. The loop may discard a release by `optimizer.zero_grad()`: it goes on after a
        warning, because what was paid stays paid. What follows the last lot of a loop is not
        watched.
        """
        if losses is not None:
            raise TypeError(
                "private.backward() takes no losses: let the loss_fn of make_private compute them, "
                "one for each example, and call private.backward() for each lot of "
                "`for lot in private`."
            )
        if self._lot is None:
            raise RuntimeError(
                "private.backward() needs a lot of `for lot in private`, and uses each lot once."
            )
        self.step(self._lot, update=False)
        self._lot = None
        self._watch_optimizer()

    def state_dict(self) -> State:
        """Return position and payments of the run, for `load_state_dict`. It holds no key.

        Call this after the optimizer's step, and save it with the states of model and optimizer. A
        run in which examples were seen to influence each other cannot be continued.
        """
        if self._isolation.is_void:
            raise IncompatibleModel(f"{self._isolation.statement}. Begin a new run.")
        return super().state_dict()

    def _check_isolation(self) -> None:
        """Test the program on this step's lot, before it is paid for; see `isolation`."""
        lot = self._lots.lot(self.steps_taken)
        self._isolation.check_lot(lot, self._lots.key, self._ranks)

    @property
    def isolation(self) -> str:
        """How it was made sure that no example influences another one, as the certificate says.

        "by construction", "tested, n checks", "not tested", or, after a test has failed, that the
        run has no guarantee: then none of its releases has, the earlier ones included.
        """
        return self._isolation.statement

    def chance_of_missing(self, share: float) -> float:
        """Return a bound on the chance that mixing in a `share` of the lots was not found so far.

        It is the chance over the random tests, 0 if examples are kept apart by construction, and 1
        if nothing was tested; see docs/isolation.md.
        """
        return self._isolation.chance_of_missing(share)

    def _begin_loop(self) -> int:
        """Begin a new loop over the lots, end the one before it, and return the new one's number.

        Two loops at the same time could release parts of one lot twice.
        """
        self._lot = None
        self._stop_watching()
        self._loop += 1
        return self._loop

    def _check_loop(self, loop: int) -> None:
        if loop != self._loop:
            raise RuntimeError("another loop over this run has begun; continue with that one.")

    def _leave_loop(self, loop: int) -> None:
        if loop == self._loop:  # an older loop holds nothing
            self._lot = None
            self._stop_watching()
            self._end_run()  # the loop is over or was left, so the optimizer has taken its step

    def _watch_optimizer(self) -> None:
        """Wait for the optimizer step that uses a release; the one after the last ends the run.

        A loop of another library may stop then, and keep its iterator of lots. The parameters'
        version counters would not show the step: fused optimizers leave them as they are.
        """
        method = WeakMethod(self._note_step)  # the optimizer must not keep the run alive

        def after_step(*_: object) -> None:
            if (note_step := method()) is not None:
                note_step()

        self._is_unused = True
        self._hook = self._optimizer.register_step_post_hook(after_step)

    def _note_step(self) -> None:
        self._is_unused = False
        self._end_run()

    def _stop_watching(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook, self._is_unused = None, False

    def _check_last_release(self) -> None:
        """Raise if `p.grad` still holds a release that no optimizer step has used."""
        if self._is_unused:
            found = [p.grad for p in self._parameters.values() if p.grad is not None]
            if any(bool(gradient.any()) for gradient in found):
                raise RuntimeError(
                    "no optimizer step has used the last release, which p.grad still holds. Call "
                    "optimizer.step() after each private.backward(); instead of accumulating "
                    "gradients, make batch_size larger. optimizer.zero_grad() discards the release."
                )
            warnings.warn(
                f"the release of step {self.steps_taken} was discarded by zero_grad before an "
                "optimizer step used it. It stays paid.",
                RuntimeWarning,
                stacklevel=4,
            )
        self._stop_watching()

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

    def step(self, lot: Lot, *, update: bool = True) -> None:
        raise NotImplementedError  # `Private` has it
