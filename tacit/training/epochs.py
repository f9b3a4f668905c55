"""Epochs: a run epoch by epoch, what its steps so far cost, and what it reports on the way.

An epoch is one expected pass over the records: n_records / batch_size steps, rounded up so that
epoch e ends with step ceil(e n_records / batch_size). Samplers that draw an epoch at once, and
fixed orders, have epochs of their own length. A record may be in a Poisson epoch several times or
never: an epoch is a way to count steps, and nothing else.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tacit.training.callbacks import Callback, ReleasedStep
from tacit.training.lots import Lot
from tacit.training.noise import NoisyMean
from tacit.training.plan import TrainingPlan

if TYPE_CHECKING:
    from tacit.training.private import Private


@dataclass(frozen=True)
class Epoch:
    """The lots of one epoch that remain: iterate over it and pass each lot to `private.step`.

    Attributes
    ----------
    number, total
        Number of the epoch, from 1 on, and of all epochs of the run.
    end
        Number of steps that are taken when the epoch is over.
    """

    number: int
    total: int
    end: int
    _run: "Private"

    def __iter__(self) -> Iterator[Lot]:
        """Yield the lots of the epoch, starting after the last step taken."""
        return self._run._turns.lots(self._run, self.end)

    def __len__(self) -> int:
        """Return the number of steps that remain in the epoch."""
        return max(0, self.end - self._run.steps_taken)

    def __repr__(self) -> str:
        return f"Epoch({self.number} of {self.total}, until step {self.end})"


def epochs_of(run: "Private") -> Iterator[Epoch]:
    """Yield the epochs of a run that remain, each until all of its steps are taken."""
    note_end(run, run.steps)
    while (taken := run.steps_taken) < run.steps:
        yield epoch_at(run, taken)
        if run.steps_taken == taken:
            raise RuntimeError(
                "no step was taken in this epoch. Loop over it, `for batch in epoch`, and call "
                "private.step(batch) for each."
            )


def note_end(run: "Private", end: int) -> None:
    """Warn if all steps before step `end` were taken, so that a loop over them has no lots."""
    end = min(end, run.steps)
    if run.steps_taken < end or run._position.first_step >= end:  # it was over when it was loaded
        return
    what = "this run" if end == run.steps else "this epoch"
    warnings.warn(
        f"{what} is over: all of its steps were taken, so this loop gets no lots. One loop "
        "over private is the whole run; private.epochs() yields it epoch by epoch.",
        RuntimeWarning,
        stacklevel=3,
    )


class StepReports:
    """Releases the noisy loss of each step, and makes the records that callbacks get.

    It holds the plan and released numbers, and nothing private.
    """

    def __init__(
        self, plan: TrainingPlan, callbacks: Sequence[Callback], *, delta: float | None
    ) -> None:
        self.plan = plan
        self.callbacks = tuple(callbacks)
        self.delta = delta
        self.losses: list[float] = []
        self._of_epoch = _EpochLoss(0, 0, 0.0, 0.0)

    def release_loss(self, total: int, *, noise: NoisyMean, step: int) -> None:
        """Release the noisy mean loss of `step`, which is paid together with its gradient."""
        plan = self.plan
        if plan.noisy_loss is None:
            return
        setting = {
            "noise_multiplier": plan.noise_at(step),
            "expected_batch": plan.expected_batch,
            "correlation": plan.loss_correlation,
        }
        loss = plan.noisy_loss.release(total, noise=noise, step=step, **setting)
        self.losses.append(loss)
        is_new = step == epoch_bounds(plan, step)[0] or step != self._of_epoch.next_step
        before = _EpochLoss(step, 0, 0.0, 0.0) if is_new else self._of_epoch
        self._of_epoch = before.with_loss(loss, plan.noisy_loss.noise_std(**setting))

    def report(self, run: "Private", step: int) -> None:
        """Call the callbacks with what the run has released up to and including `step`."""
        if not self.callbacks:
            return
        is_end, delta = epoch_bounds(self.plan, step)[1] == step + 1, self.delta
        epsilon = run.epsilon_at(step + 1, delta=delta) if is_end and delta is not None else None
        released = self.released(step, run._clip().clip_norms, epsilon)
        for callback in self.callbacks:
            callback(released)

    def released(
        self, step: int, clip_norms: tuple[float, ...], epsilon: float | None
    ) -> ReleasedStep:
        """Return the record of `step`, made of the plan and of released numbers."""
        plan, number = self.plan, int(step // self.plan.steps_per_epoch)
        so_far, has_loss = self._of_epoch, plan.noisy_loss is not None
        return ReleasedStep(
            step=step + 1,
            steps=plan.steps,
            epoch=number + 1,
            epochs=n_epochs(plan),
            is_epoch_end=epoch_bounds(plan, step)[1] == step + 1,
            noise_multiplier=plan.noise_at(step),
            clip_norms=clip_norms,
            delta=self.delta,
            epsilon=epsilon,
            loss=self.losses[-1] if has_loss else None,
            loss_std=so_far.last_std if has_loss else None,
            epoch_loss=so_far.total / so_far.n if has_loss else None,
            epoch_loss_std=math.sqrt(so_far.variance) / so_far.n if has_loss else None,
        )


class _EpochLoss(NamedTuple):
    """The noisy losses of consecutive steps of one epoch, added up."""

    next_step: int
    n: int
    total: float
    variance: float
    last_std: float = 0.0

    def with_loss(self, loss: float, std: float) -> "_EpochLoss":
        """Return the sums with one more loss, whose noise has the standard deviation `std`."""
        added = self.total + loss, self.variance + std**2
        return _EpochLoss(self.next_step + 1, self.n + 1, *added, std)


def epoch_at(run: "Private", step: int) -> Epoch:
    """Return the epoch to which `step` belongs, counted from 0."""
    plan = run._plan
    number = int(step // plan.steps_per_epoch)
    return Epoch(number + 1, n_epochs(plan), epoch_bounds(plan, step)[1], run)


def epoch_bounds(plan: TrainingPlan, step: int) -> tuple[int, int]:
    """Return the first step of the epoch of `step`, and the first step after that epoch."""
    length = plan.steps_per_epoch
    number = step // length  # step >= ceil(number * length) if and only if step >= number * length
    first, end = math.ceil(number * length), math.ceil((number + 1) * length)
    return first, min(plan.steps, end)


def n_epochs(plan: TrainingPlan) -> int:
    """Return the number of epochs of a plan; the last one may be shorter than the others."""
    return int((plan.steps - 1) // plan.steps_per_epoch) + 1
