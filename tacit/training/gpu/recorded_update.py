"""What follows the clipped sum: noise into `p.grad`, then the optimizer's step.

On a GPU both are launches that repeat from step to step. A small model's step is over before Python
has made them, so once nothing but numbers changes they are recorded as a CUDA graph and replayed.
What differs between replays lies on the device: the sums, and the key of the noise, which is set
for each step before its replay. Payment stays on the host, above. Optimizers that our own kernel
knows are updated in the same pass that draws the noise.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from tacit.training import gpu
from tacit.training.distributed import like_parameter
from tacit.training.noise import NoisyMean

if TYPE_CHECKING:
    from tacit.training.gpu.noise import Blocks
    from tacit.training.gpu.update import Update

_SETTLED = 8  # steps that look the same before they are recorded, which takes as long as dozens


class Tail:
    """Releases sums into `p.grad` of some parameters, and lets their optimizer move them."""

    def __init__(
        self,
        noise: NoisyMean,
        parameters: Iterable[nn.Parameter],
        optimizer: Optimizer,
        *,
        is_alone: bool = True,
    ) -> None:
        self._noise, self._parameters, self._optimizer = noise, list(parameters), optimizer
        self._is_alone = is_alone  # no other rank takes the same steps
        self._launches: WeakKeyDictionary[Blocks, _Launches] = WeakKeyDictionary()

    def release(
        self, sums: Sequence[Tensor], scales: Sequence[float], *, step: int, noise_multiplier: float
    ) -> None:
        """Noise once, the declared divisor, the result into `p.grad`; pay first.

        Guarantee: that of `NoisyMean.release`.
        """
        means = self._noise.release(sums, scales, step=step, noise_multiplier=noise_multiplier)
        _show(map(like_parameter, means, self._parameters), self._parameters)

    def release_and_move(
        self, sums: Sequence[Tensor], scales: Sequence[float], *, step: int, noise_multiplier: float
    ) -> None:
        """`release`, then the optimizer's own step; both in one launch where they repeat."""
        noise = None
        if can_be_recorded(self._optimizer, self._parameters):
            noise = self._noise.in_place(sums, scales, step=step, noise_multiplier=noise_multiplier)
        if noise is None:
            self.release(sums, scales, step=step, noise_multiplier=noise_multiplier)
            self._optimizer.step()
            return
        if noise not in self._launches:
            self._launches[noise] = _Launches(self._parameters, self._optimizer)
        # Our own update rounds in another way than the optimizer, which takes the first steps in
        # each place. Other ranks, and a run that is repeated, must get the very same bits.
        may_fuse = self._is_alone and not torch.are_deterministic_algorithms_enabled()
        self._launches[noise].run(noise, sums, may_fuse=may_fuse)
        self._optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]  # schedulers ask


class _Launches:
    """Noise and update for sums in one place: launched, then recorded if they repeat."""

    def __init__(self, parameters: list[nn.Parameter], optimizer: Optimizer) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        self._update: Update | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self._last: list[Any] = []  # what the launches of the last step depended on
        self._rates: list[Any] = []
        self._repeated, self._patience = 0, _SETTLED  # steps with the same, and to be recorded

    def run(self, noise: "Blocks", sums: Sequence[Tensor], *, may_fuse: bool) -> None:
        self._follow(noise, sums, may_fuse=may_fuse)
        if self._repeated < self._patience:
            self._launch(noise, sums)
            return
        try:
            if self.graph is None:
                self.graph = self._recorded(noise, sums)
            self.graph.replay()
        except BaseException:
            for parameter in self._parameters:
                parameter.grad = None  # recording shows the sums, and adds no noise to them
            self._forget()
            raise
        _show(sums, self._parameters)

    def _recorded(self, noise: "Blocks", sums: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._launch(noise, sums)  # recorded, not run
        return graph

    def _launch(self, noise: "Blocks", sums: Sequence[Tensor]) -> None:
        if self._update is not None:
            self._update.launch(noise)
            _show(sums, self._parameters)
            return
        noise.launch()
        _show(sums, self._parameters)
        self._optimizer.step()

    def _follow(self, noise: "Blocks", sums: Sequence[Tensor], *, may_fuse: bool) -> None:
        """Count how many steps in a row had the very launches that this one will have."""
        now = [may_fuse, *launched_with(self._optimizer)]
        rates = [group["lr"] for group in self._optimizer.param_groups]
        if now != self._last:
            self._last, self._update = now, None
            self._forget()
        elif self._repeated == 1 and may_fuse:  # the state is there, and stays where it is
            self._update = gpu.fused_update(noise, sums, self._parameters, self._optimizer)
        if self._update is not None:
            self._update.set_rates()
        elif rates != self._rates:
            self._rates = rates
            self._forget()
        self._repeated += 1

    def _forget(self) -> None:
        """Wait longer before the next recording where one was in vain."""
        self._patience = min(64, self._patience * (1 if self.graph is None else 2))
        self._repeated, self.graph = 0, None


def _show(gradients: Iterable[Tensor], parameters: Sequence[nn.Parameter]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def can_be_recorded(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether the optimizer's step is launches that depend on `launched_with` and rates alone.

    Known of torch's own: SGD, and those that say `capturable=True`, unless somebody looks on. An
    unknown one could count its steps on the host. Gradients in float32 are the sums themselves.
    """
    kind = type(optimizer)
    if not parameters[0].is_cuda or not kind.__module__.startswith("torch.optim."):
        return False
    if _is_watched(optimizer) or not all(p.dtype == torch.float32 for p in parameters):
        return False
    if any(isinstance(p, DTensor) for p in parameters):
        return False
    if kind is SGD:
        return not any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups)
    # A rate held in a tensor is read where it lies: on the host, only when it is recorded.
    return all(
        group.get("capturable") and getattr(group["lr"], "is_cuda", True)
        for group in optimizer.param_groups
    )


def launched_with(optimizer: Optimizer) -> list[Any]:
    """Settings except rates, and where parameters and state lie."""
    left_out = ("params", "lr", "initial_lr")
    settings = [[v for k, v in g.items() if k not in left_out] for g in optimizer.param_groups]
    held = [[p.data_ptr() for p in group["params"]] for group in optimizer.param_groups]
    states = (value for state in optimizer.state.values() for value in state.values())
    return [settings, held, [t.data_ptr() for t in states if isinstance(t, Tensor)]]


def _is_watched(optimizer: Optimizer) -> bool:
    """Whether a call of `step` would be heard by somebody but a scheduler's reminder."""
    own = optimizer.__dict__.get("step")
    # The mark alone does not do: functools.wraps hands it on to wrappers around the scheduler's.
    inner = getattr(own, "__wrapped__", None)
    is_reminder = hasattr(own, "_wrapped_by_lr_sched") and inner is type(optimizer).step
    if own is not None and not is_reminder:
        return True
    return any(
        (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            _global_optimizer_pre_hooks,
            _global_optimizer_post_hooks,
        )
    )
