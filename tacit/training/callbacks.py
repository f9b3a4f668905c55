"""Callbacks: what a run has released, after each step, for progress bars and experiment trackers.

A callback is any function of one `ReleasedStep`. That record is frozen and holds numbers that are
public: the plan, what it costs, and the training loss if the run pays for it (`NoisyLoss`). Lots,
losses and gradients of examples, norms and drawn sizes are in none of its fields.

`TensorBoard`, `MLflow`, `WandB` and `RichProgress` are callbacks that pass the numbers on to the
libraries of these names. A library is imported when its callback is made, if at all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from os import PathLike
from typing import Any

from tacit._check import whole


@dataclass(frozen=True, kw_only=True)
class ReleasedStep:
    """What a run has released when a step is over. Every field is public.

    Attributes
    ----------
    step, steps
        Number of steps taken so far, and of planned steps.
    epoch, epochs
        Number of the epoch that the step belongs to, from 1 on, and of planned epochs.
    is_epoch_end
        Whether the step is the last one of its epoch or of the run.
    noise_multiplier, clip_norms
        The noise multiplier of the step, and the clip norms of the next step.
    delta, epsilon
        The delta given to `make_private`, and the price at that delta of the steps so far, as
        `private.epsilon_at` computes it; only at the end of an epoch, None otherwise. The run as a
        whole was paid in advance.
    loss, loss_std
        The noisy mean training loss of the step's lot, and the standard deviation of its noise;
        None without `noisy_loss`.
    epoch_loss, epoch_loss_std
        The same for the mean over the steps of this epoch so far. Steps before a restart in the
        middle of an epoch are left out.
    """

    step: int
    steps: int
    epoch: int
    epochs: int
    is_epoch_end: bool
    noise_multiplier: float
    clip_norms: tuple[float, ...]
    delta: float | None = None
    epsilon: float | None = None
    loss: float | None = None
    loss_std: float | None = None
    epoch_loss: float | None = None
    epoch_loss_std: float | None = None

    def metrics(self) -> dict[str, float]:
        """Return the numbers to plot by name, without those that are None.

        >>> ReleasedStep(step=3, steps=9, epoch=1, epochs=2, is_epoch_end=False,
        ...              noise_multiplier=1.1, clip_norms=(0.5,), loss=0.7, loss_std=0.1).metrics()
        {'epoch': 1.0, 'noise_multiplier': 1.1, 'loss': 0.7, 'loss_std': 0.1, 'clip_norm': 0.5}
        """
        names = ("epoch", "noise_multiplier", "epsilon", "loss", "loss_std", "epoch_loss")
        found = {name: float(v) for name in names if (v := getattr(self, name)) is not None}
        if len(self.clip_norms) == 1:
            return found | {"clip_norm": self.clip_norms[0]}
        return found | {f"clip_norm_{i}": norm for i, norm in enumerate(self.clip_norms)}


Callback = Callable[[ReleasedStep], None]
"""A function that is called with a `ReleasedStep` after each step."""


class _Tracker:
    """Base of the callbacks that pass numbers on to a tracker, every few steps.

    The numbers at the ends of epochs are always passed on.
    """

    def __init__(self, log: Callable[[Mapping[str, float], int], None], every: int) -> None:
        self._log = log
        self._every = whole(every=every, least=1)

    def __call__(self, released: ReleasedStep, /) -> None:
        if released.is_epoch_end or released.step % self._every == 0:
            self._log(released.metrics(), released.step)


class TensorBoard(_Tracker):
    """Writes the numbers of every step for TensorBoard, under names such as "tacit/loss".

    Parameters
    ----------
    folder
        Where the event file is written. `torch.utils.tensorboard` needs the package `tensorboard`.
    writer
        A `SummaryWriter` to use instead of a new one in `folder`.
    every
        Number of steps between two entries.
    """

    def __init__(
        self,
        folder: str | PathLike[str] | None = None,
        *,
        writer: Any = None,  # Any: a SummaryWriter
        every: int = 1,
    ) -> None:
        if (folder is None) == (writer is None):
            raise ValueError("give folder or writer, one of them.")
        if writer is None:
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(folder))
        self._writer = writer
        super().__init__(self._add, every)

    def _add(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"tacit/{name}", value, step)

    def __call__(self, released: ReleasedStep, /) -> None:
        super().__call__(released)
        if released.is_epoch_end:
            self._writer.flush()


class MLflow(_Tracker):
    """Logs the numbers of every step to MLflow's active run, or to the run with `run_id`."""

    def __init__(self, *, run_id: str | None = None, every: int = 1) -> None:
        mlflow = import_module("mlflow")  # not a dependency of tacit
        options = {} if run_id is None else {"run_id": run_id}
        super().__init__(
            lambda metrics, step: mlflow.log_metrics(dict(metrics), step=step, **options), every
        )


class WandB(_Tracker):
    """Logs the numbers of every step to the W&B run that `wandb.init()` returned."""

    def __init__(self, run: Any, *, every: int = 1) -> None:  # Any: a wandb.Run
        super().__init__(lambda metrics, step: run.log(dict(metrics), step=step), every)


class RichProgress:
    """Shows the run on a `rich.progress.Progress`: epoch, epsilon so far, and the paid loss.

    with rich.progress.Progress() as progress:
        reports = Reports(callbacks=[RichProgress(progress)])
        private = tacit.make_private(..., reports=reports)
    """

    def __init__(self, progress: Any) -> None:  # Any: a rich.progress.Progress
        self._progress = progress
        self._task: Any = None  # Any: a rich TaskID
        self._epsilon = ""

    def __call__(self, released: ReleasedStep, /) -> None:
        if self._task is None:
            self._task = self._progress.add_task("private steps", total=released.steps)
        if released.epsilon is not None:
            self._epsilon = f", epsilon so far {released.epsilon:.3g}"
        words = f"epoch {released.epoch}/{released.epochs}{self._epsilon}"
        if released.epoch_loss is not None:
            words += f", noisy loss {released.epoch_loss:.3f} ± {released.epoch_loss_std:.3f}"
        self._progress.update(self._task, completed=released.step, description=words)
