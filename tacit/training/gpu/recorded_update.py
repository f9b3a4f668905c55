"""What follows the clipped sum on a GPU: noise into `p.grad`, then the optimizer's step.

Both are launches that repeat from step to step. A small model's step is over before Python has made
these launches, so once only numbers change they are recorded as a CUDA graph and replayed. What
differs between replays is in device memory: the sums, and the key of the noise, which is set before
each replay. The caller pays before it releases. Optimizers that the fused kernel covers are updated
in the same pass that draws the noise.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as _HOOKS  # pyright: ignore[reportAttributeAccessIssue]  # a module

from tacit.training.gpu.graph_replay import captured
from tacit.training.noise.noisy_mean import NoisyMean

if TYPE_CHECKING:
    from tacit.training.gpu.graph_replay import ReplayedStep
    from tacit.training.gpu.noise import Blocks
    from tacit.training.gpu.update import Update

# Equal steps before the launches are recorded. Recording takes as long as dozens of steps.
_SETTLED = 8


class RecordedUpdate:
    """Noise on the clipped sums and the optimizer's step, replayed as one CUDA graph if possible.

    A replay needs launches that are the same at every step. `is_alone` is False if other ranks take
    the same steps, which must then agree in every bit.
    """

    def __init__(
        self,
        noise: NoisyMean,
        parameters: Iterable[nn.Parameter],
        optimizer: Optimizer,
        *,
        is_alone: bool = True,
    ) -> None:
        self._noise = noise
        self._parameters = list(parameters)
        self._optimizer = optimizer
        self._is_alone = is_alone
        self._launches: WeakKeyDictionary[Blocks, _Launches] = WeakKeyDictionary()

    def release_and_move(
        self,
        sums: Sequence[Tensor],
        scales: Sequence[float],
        *,
        step: int,
        noise_multiplier: float,
        deferred: "ReplayedStep | None" = None,
    ) -> None:
        """Add noise to the clipped sums, store them in `p.grad`, and take the optimizer's step.

        All of it is one CUDA graph if the launches have been the same for several steps. So is the
        computation of the sums if it was `deferred`.
        """
        noise = None
        if can_be_recorded(self._optimizer, self._parameters):
            noise = self._noise.in_place(sums, scales, step=step, noise_multiplier=noise_multiplier)
        if noise is None:
            if deferred is not None:
                deferred.replay()
            self._noise.release_into(
                self._parameters, sums, scales, step=step, noise_multiplier=noise_multiplier
            )
            self._optimizer.step()
            return
        if noise not in self._launches:
            self._launches[noise] = _Launches(self._parameters, self._optimizer)
        # The fused update rounds differently from the optimizer, which takes the first steps at
        # each address. Other ranks, and runs with torch's deterministic algorithms, need the same
        # bits every time.
        may_fuse = self._is_alone and not torch.are_deterministic_algorithms_enabled()
        self._launches[noise].run(noise, sums, may_fuse=may_fuse, deferred=deferred)
        self._noise.launched(step)
        self._optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]  # schedulers read it


class _Launches:
    """Launches of noise and optimizer step for sums at fixed addresses, recorded if they repeat."""

    def __init__(self, parameters: list[nn.Parameter], optimizer: Optimizer) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._update: Update | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self._last: list[Any] = []  # what the launches of the last step depended on
        self._rates: list[Any] = []  # its learning rates
        self._repeated = 0  # equal steps so far
        self._patience = _SETTLED  # equal steps before the next recording

    def run(
        self,
        noise: "Blocks",
        sums: Sequence[Tensor],
        *,
        may_fuse: bool,
        deferred: "ReplayedStep | None" = None,
    ) -> None:
        """Add the noise and take the optimizer's step, by launches or by replaying the graph.

        Before that compute the sums if they were `deferred`.
        """
        self._follow(noise, sums, may_fuse=may_fuse)
        if self._repeated < self._patience:
            if deferred is not None:
                deferred.replay()
            self._launch(noise, sums)
            return
        try:
            if self.graph is None:
                self.graph, _ = captured(lambda: self._launch(noise, sums))
            if deferred is None:
                self.graph.replay()
            else:
                deferred.replay_with(self.graph, lambda: self._launch(noise, sums))
        except BaseException:
            for parameter in self._parameters:
                parameter.grad = None  # recording puts the sums there without any noise
            self._forget()
            raise
        self._set_gradients(sums)

    def _launch(self, noise: "Blocks", sums: Sequence[Tensor]) -> None:
        if self._update is not None:
            self._update.launch(noise)
            self._set_gradients(sums)
            return
        noise.launch()
        self._set_gradients(sums)
        self._optimizer.step()

    def _set_gradients(self, sums: Sequence[Tensor]) -> None:
        for parameter, total in zip(self._parameters, sums, strict=True):
            parameter.grad = total

    def _follow(self, noise: "Blocks", sums: Sequence[Tensor], *, may_fuse: bool) -> None:
        """Count in how many steps in a row the launches were the same, up to the present step.

        `may_fuse` allows the kernel that adds noise and updates parameters in one pass.
        """
        now = [may_fuse, *launched_with(self._optimizer)]
        rates = [group["lr"] for group in self._optimizer.param_groups]
        if now != self._last:
            self._last = now
            self._update = None
            self._forget()
        elif self._repeated == 1 and may_fuse:  # the optimizer's state exists and stays in place
            self._update = fused_update(noise, sums, self._parameters, self._optimizer)
        if self._update is not None:
            self._update.set_rates()
        elif rates != self._rates:
            self._rates = rates
            self._forget()
        self._repeated += 1

    def _forget(self) -> None:
        """Drop the graph. If there was one, require more equal steps before recording again."""
        self._patience = min(64, self._patience * (1 if self.graph is None else 2))
        self._repeated = 0
        self.graph = None


def can_be_recorded(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> bool:
    """Return True if the optimizer's step can be recorded as a CUDA graph.

    The kernel launches of the step must depend only on what `launched_with` returns and on learning
    rates. That holds for torch's SGD and for torch's optimizers with `capturable=True`, unless
    something hooks into `step`. Another optimizer might count its steps on the host. Parameters
    must be float32, so that the sums themselves can be the gradients.
    """
    kind = type(optimizer)
    if not parameters[0].is_cuda or not kind.__module__.startswith("torch.optim."):
        return False
    if _is_watched(optimizer):
        return False
    if any(p.dtype != torch.float32 or isinstance(p, DTensor) for p in parameters):
        return False
    if kind is SGD:
        return not any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups)
    # A learning rate in a host tensor would be read while recording, and never again.
    return all(
        group.get("capturable") and getattr(group["lr"], "is_cuda", True)
        for group in optimizer.param_groups
    )


def launched_with(optimizer: Optimizer) -> list[Any]:
    """Return what an optimizer step's kernel launches depend on, besides the learning rates.

    These are the optimizer's settings, and the addresses of parameters and optimizer state. A
    recorded graph is valid as long as they do not change.
    """
    left_out = ("params", "lr", "initial_lr")
    settings = [[v for k, v in g.items() if k not in left_out] for g in optimizer.param_groups]
    held = [[p.data_ptr() for p in group["params"]] for group in optimizer.param_groups]
    states = (value for state in optimizer.state.values() for value in state.values())
    return [settings, held, [t.data_ptr() for t in states if isinstance(t, Tensor)]]


def fused_update(
    blocks: "Blocks",
    sums: Sequence[Tensor],
    parameters: Sequence[Tensor],
    optimizer: Optimizer,
) -> "Update | None":
    """Return the `Update` that adds noise and takes the step in one launch, None if unsupported."""
    from tacit.training.gpu import update

    if not update.can_update(sums, parameters, optimizer):
        return None
    return update.Update(blocks, parameters, optimizer)


def _is_watched(optimizer: Optimizer) -> bool:
    """Return True if anything except an LR scheduler hooks or wraps `optimizer.step`.

    A replayed graph would bypass such a hook. Also return True if torch lacks one of the private
    names read here: the optimizer's own step is then called.
    """
    own = optimizer.__dict__.get("step")
    # A scheduler marks its wrapper, but the mark alone is not enough: functools.wraps copies it to
    # any wrapper around the scheduler's.
    inner = getattr(own, "__wrapped__", None)
    is_scheduler = hasattr(own, "_wrapped_by_lr_sched") and inner is type(optimizer).step
    if own is not None and not is_scheduler:
        return True
    try:
        before_all, after_all = (
            _HOOKS._global_optimizer_pre_hooks,
            _HOOKS._global_optimizer_post_hooks,
        )
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    except AttributeError:
        return True
    return bool(before or after or before_all or after_all)
