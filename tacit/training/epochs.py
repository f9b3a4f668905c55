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
from typing import TYPE_CHECKING, Any, NamedTuple

from tacit import accounting
from tacit.events import Event
from tacit.training.callbacks import Callback, ReleasedStep
from tacit.training.checkpoint import RunState
from tacit.training.lots import Lot
from tacit.training.noise import NoisyMean
from tacit.training.plan import TrainingPlan

if TYPE_CHECKING:
    from tacit.training.isolation import Isolation
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
        return self._run.lots_until(self.end)

    def __len__(self) -> int:
        """Return the number of steps that remain in the epoch."""
        return max(0, self.end - self._run.steps_taken)

    def __repr__(self) -> str:
        return f"Epoch({self.number} of {self.total}, until step {self.end})"


class EpochLoops(RunState):
    """The methods of a private run that follow its epochs and its price. Base of `Private`."""

    _reports: "StepReports | None"
    _priced: dict[tuple[Event, float], float]
    _isolation: "Isolation"

    def epochs(self) -> Iterator[Epoch]:
        """Yield the epochs of the run, each of which yields its lots.

        A resumed run begins with what remains of its epoch. An epoch that is left early, by a
        `break`, is yielded again with its remaining lots: every planned step is paid.

            for epoch in private.epochs():
                for batch in epoch:
                    private.step(batch)
        """
        self._note_end(self._end)
        while (taken := self.steps_taken) < self._end:
            yield epoch_at(self, taken)  # type: ignore[arg-type]  # `Private` is the only subclass
            if self.steps_taken == taken:
                raise RuntimeError(
                    "no step was taken in this epoch. Loop over it, `for batch in epoch`, and call "
                    "private.step(batch) for each."
                )

    def epsilon_at(self, step: int, *, delta: float) -> float:
        """Return the epsilon at `delta` of a run planned to end after `step` steps.

        It is the exact price of the first `step` steps of the plan, of the steps reserved for a
        restart, of the releases in `also`, and of lost steps that were paid beyond the reserve; for
        samplers that are priced by the epoch, of the epochs begun.
        At `private.steps` it equals `private.epsilon`. The run itself costs `private.epsilon` from
        its first step on, also if it is stopped early because of its results. Results are kept, so
        that asking again is free.
        """
        plan = self._plan
        if not isinstance(step, int) or not 0 <= step <= plan.steps:
            raise ValueError(f"step must be a whole number from 0 to {plan.steps}, got {step!r}.")
        if self._isolation.is_void:
            return math.inf
        event = plan.together(self._with_repaid(plan.event_until(step)))
        if (event, delta) not in self._priced:
            self._priced[event, delta] = accounting.epsilon(
                event, delta=delta, relation=self.ledger.relation
            )
        return self._priced[event, delta]

    def epsilon(self, *, delta: float) -> float:
        """Return the epsilon of `event` at `delta`: the cost of the whole run, paid in advance.

        It includes lost steps that were paid beyond the reserve, so it can exceed the epsilon that
        the run was planned for. Stopping early because of the results does not make the run
        cheaper. It is infinite if examples were seen to influence each other: the releases of such
        a run have no guarantee.
        """
        return self.epsilon_at(self._plan.steps, delta=delta)

    @property
    def info(self) -> dict[str, Any]:  # Any: numbers and lists of them
        """Public facts on the run, by name. Losses, norms and lot sizes are private: left out.

        If `noisy_loss` is released, `gradient_factor` times the noise multiplier and the clip norm
        is the noise of the gradient's sum. `reserve` counts steps that are paid for a restart,
        `repaid` describes lost steps that were paid beyond them.
        """
        bands = len(self._plan.column)
        return {
            **({"bands": bands} if bands > 1 else {}),
            **({"gradient_factor": factor} if (factor := self._plan.gradient_factor) > 1 else {}),
            **({"reserve": self._plan.reserve} if self._plan.reserve else {}),
            **({"repaid": [str(event) for event in self._repaid.values()]} if self._repaid else {}),
            "step": self.steps_taken,
            "steps": self._end,
            "clip_norms": list(self._clip().clip_norms),
            "noise_multiplier": self._plan.noise_at(self.steps_taken),
            "expected_batch": self._plan.expected_batch,
            "n_records": self._plan.n_records,
            "is_reproducible": self.is_reproducible,
        }

    @property
    def noisy_losses(self) -> list[float]:
        """The noisy training losses of the steps that this process has taken, oldest first."""
        return [] if self._reports is None else list(self._reports.losses)

    def _note_end(self, end: int) -> None:
        """Warn if all steps before step `end` were taken, so that a loop over them has no lots."""
        end = min(end, self._end)
        if self.steps_taken < end or self._first_step >= end:  # it was over when it was loaded
            return
        what = "this run" if end == self._end else "this epoch"
        warnings.warn(
            f"{what} is over: all of its steps were taken, so this loop gets no lots. One loop "
            "over private is the whole run; private.epochs() yields it epoch by epoch.",
            RuntimeWarning,
            stacklevel=4,
        )

    def _report(self, step: int) -> None:
        """Call the callbacks with what the run has released up to and including `step`."""
        reports = self._reports
        if reports is None or not (reports.callbacks and self._ranks.rank == 0):
            return
        taken, delta = step + 1, reports.delta
        is_end = epoch_bounds(self._plan, step)[1] == taken
        epsilon = self.epsilon_at(taken, delta=delta) if is_end and delta is not None else None
        released = reports.released(step, self._clip().clip_norms, epsilon)
        for callback in reports.callbacks:
            callback(released)


class StepReports:
    """Releases the noisy loss of each step, and makes the records that callbacks get.

    It holds the plan and released numbers, and nothing private.
    """

    def __init__(
        self, plan: TrainingPlan, callbacks: Sequence[Callback], *, delta: float | None
    ) -> None:
        if callable(callbacks) or not all(map(callable, callbacks)):
            raise TypeError(
                "callbacks must be a list of functions of one tacit.training.ReleasedStep."
            )
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
