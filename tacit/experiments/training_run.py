"""DP-SGD by recipe: one recipe becomes one run folder, also across interruptions.

Guarantee: what the folder holds, except `secret/`, is `facts.event` of the training records. Paid
features and the whole training plan are paid before they are released. A run that was killed
resumes from its last checkpoint. Nothing of the later steps had left the process, and they are
repeated with the same lots and the same noise, so the run costs no more than its plan.
"""

import hashlib
import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from tacit import accounting
from tacit.datasets import Dataset
from tacit.experiments import data, models
from tacit.experiments.facts import (
    BASELINE,
    METRICS,
    MODEL,
    RECIPE,
    SECRET,
    Facts,
    Metric,
    training_facts,
)
from tacit.experiments.features import PaidSummary, Prepared, cache_folder, prepare, summaries_of
from tacit.experiments.folder import RunFolder, write_whole
from tacit.experiments.recipe import Recipe
from tacit.experiments.released import model_bytes
from tacit.experiments.training_loop import (
    TrainingLoop,
    evaluate,
    features_events,
    noise_multiplier,
    tensors,
    train_baseline,
)
from tacit.ledger import Budget, Ledger
from tacit.training import Key

FEATURES_KEY = "features.key"
_CHECKPOINT = "checkpoint.pt"


class Progress(NamedTuple):
    """Public state of a run after a step; `metric` is new only if `is_measured`."""

    step: int
    steps: int
    metric: Metric
    is_measured: bool


OnProgress = Callable[[Progress], None]


def train(
    recipe: Recipe,
    path: str | os.PathLike[str],
    *,
    root: str | Path | None = None,
    baseline: Sequence[Metric] | None = None,
    on_progress: OnProgress | None = None,
    cache: Path | None = None,
) -> Facts:
    """Start or resume the run in folder `path`, and return its facts; a finished run is not rerun.

    Parameters
    ----------
    root
        Folder of the data, default `TACIT_DATA`.
    baseline
        Metrics of a non-private twin that was trained before. None trains one if the recipe asks
        for it.
    cache
        Folder for features that take long to compute; default the user's cache. It holds private
        values.

    Examples
    --------
    >>> import tempfile
    >>> quick = Recipe.parse("[training]\\nepochs = 1\\n[run]\\nbaseline_steps = 0")
    >>> facts = train(quick, tempfile.mkdtemp())
    >>> facts.epsilon <= 3.0
    True
    """
    folder = RunFolder(path)
    dataset = data.load(recipe.data, root)
    recipe = recipe.filled(len(dataset.x_train))
    _take(folder, recipe)
    if folder.is_finished:
        folder.close()  # in case the run was killed just after it wrote its facts
        return folder.facts()
    with folder.open_ledger(recipe, _budget(recipe)) as ledger:
        session = Session(recipe, folder, dataset, ledger, cache or cache_folder())
        session.go(on_progress or (lambda _: None))
        if baseline is None or not recipe.data.holds_public_records:
            baseline = session.baseline()  # empty if the records are private
        return session.finish(baseline)


@dataclass
class Session:
    """The state of a run in memory; a restart rebuilds all of it from the folder."""

    recipe: Recipe
    folder: RunFolder
    dataset: Dataset
    ledger: Ledger
    cache: Path
    metrics: list[Metric] = field(default_factory=list)
    resumed: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.n_records = len(self.dataset.x_train)
        self.digest = _digest(self.dataset)
        state = self._read_checkpoint()
        self._refuse_lost_key(state)
        self.noise = state["noise"] if state else noise_multiplier(self.recipe, self.n_records)
        self.prepared = self._prepare(state)
        self.init = state["init"] if state else self._init_seed()
        self.loop = TrainingLoop(
            self.recipe,
            models.build(
                self.recipe.model, self.prepared.shape, self.dataset.n_classes, seed=self.init
            ),
            tensors(self.prepared.x_train, self.prepared.y_train),
            n_records=self.n_records,
            noise_multiplier=self.noise,
            ledger=self.ledger,
            also=features_events(self.recipe, self.n_records),
            seed=self.recipe.run.seed,
        )
        self.private = self.loop.private
        if state:
            self._load(state)
        else:
            self._save()  # before the first payment, so that a restart has the key

    def go(self, on_progress: OnProgress) -> None:
        """Take all remaining steps, and measure at the end of each epoch."""
        started = saved = time.monotonic()
        latest = self.metrics[-1] if self.metrics else {}
        on_progress(self._progress(latest, is_measured=False))
        for step in self.loop.steps():
            is_measured = self._ends_epoch(step)
            now = time.monotonic()
            if is_measured or now - saved > self.recipe.run.checkpoint_seconds:
                if is_measured:
                    latest = self._measure()
                    self.metrics.append(latest)
                now = time.monotonic()
                self.seconds += now - started
                started = saved = now
                self._save()  # before anyone sees what was released since the last checkpoint
                self.folder.write_lines(METRICS, self.metrics)
            on_progress(self._progress(latest, is_measured=is_measured))

    def baseline(self) -> list[Metric]:
        """Train the non-private twin and return its metrics; empty if the recipe forbids it."""
        return train_baseline(self.recipe, self.dataset, self.cache, seed=self.init)

    def finish(self, baseline: Sequence[Metric]) -> Facts:
        """Write the released model and, as the last file, the facts."""
        with self.loop.released() as model:
            content = model_bytes(self.recipe, model, self.prepared, self.dataset.n_classes)
        self.folder.write_lines(METRICS, self.metrics)
        self.folder.write(MODEL, content)
        if baseline:
            self.folder.write_lines(BASELINE, baseline)
        facts = training_facts(
            self.recipe,
            self.dataset,
            self.ledger,
            event=self.private.event,
            steps=self.private.steps,
            noise_multiplier=self.noise,
            model=models.describe(self.recipe.model, self.loop.model, self.prepared.shape),
            metrics=self.metrics,
            baseline=baseline,
            resumed=self.resumed,
            seconds=self.seconds,
        )
        return self.folder.finish(facts, self.ledger)

    # Measuring ----------------------------------------------------------------------------------

    def _ends_epoch(self, step: int) -> bool:
        per_epoch = self.n_records / self._batch
        return step == self.private.steps or int(step / per_epoch) > int((step - 1) / per_epoch)

    def _measure(self) -> Metric:
        step = self.private.steps_taken
        with self.loop.released() as model:
            found = evaluate(model, *tensors(self.prepared.x_test, self.prepared.y_test))
        epoch = round(step * self._batch / self.n_records, 4)
        return {"step": step, "epoch": epoch, "epsilon": self._epsilon_at(step), **found}

    @property
    def _batch(self) -> int:
        """Batch size of the recipe, by which epochs are counted."""
        assert self.recipe.training.batch_size is not None  # set by Recipe.filled
        return self.recipe.training.batch_size

    def _epsilon_at(self, step: int) -> float:
        """Return the cost of a run that is planned to end after `step` steps."""
        return accounting.epsilon(
            self.loop.event_until(step),
            delta=self.recipe.privacy.budget.delta,
            relation=self.ledger.relation,
        )

    def _progress(self, metric: Metric, *, is_measured: bool) -> Progress:
        return Progress(self.private.steps_taken, self.private.steps, metric, is_measured)

    # Preparing ----------------------------------------------------------------------------------

    def _prepare(self, state: Mapping | None) -> Prepared:
        kept = {} if state is None else state["summaries"]

        def release(name: str, summary: PaidSummary, x: np.ndarray) -> np.ndarray:
            return kept[name].numpy() if name in kept else self._pay_and_release(name, summary, x)

        return prepare(self.dataset, self.recipe.features, release=release, cache=self.cache)

    def _pay_and_release(self, name: str, summary: PaidSummary, x: np.ndarray) -> np.ndarray:
        """Pay for a summary unless it is paid already, and release it.

        After a crash the summary is released again with the same noise, so one payment suffices.
        """
        secret, run = _secret_key(self.folder, self.recipe.run.seed)
        note = f"{name} for run {run.hex()}"
        if not any(entry.note == note for entry in self.ledger.history()):
            self.ledger.spend(summary.event, note=note)
        return summary.release(x, Key(secret).numpy(name, 0))

    def _init_seed(self) -> int:
        seed = self.recipe.run.seed
        return int.from_bytes(os.urandom(4)) if seed is None else seed

    # Restarts -----------------------------------------------------------------------------------

    @property
    def _checkpoint(self) -> Path:
        return self.folder / SECRET / _CHECKPOINT

    def _save(self) -> None:
        ema = self.loop.ema
        state = {
            "private": self.private.state_dict(),
            "model": self.loop.model.state_dict(),
            "optimizer": self.loop.optimizer.state_dict(),
            "ema": None if ema is None else ema.state_dict(),
            "metrics": self.metrics,
            "noise": self.noise,
            "digest": self.digest,
            "init": self.init,
            "summaries": {n: torch.from_numpy(s) for n, s in self.prepared.summaries.items()},
            "resumed": self.resumed,
            "seconds": self.seconds,
        }
        stream = io.BytesIO()
        torch.save(state, stream)
        (self.folder / SECRET).mkdir(mode=0o700, exist_ok=True)
        write_whole(self._checkpoint, stream.getvalue(), mode=0o600)

    def _read_checkpoint(self) -> Mapping | None:
        if not self._checkpoint.is_file():
            return None
        state = torch.load(self._checkpoint, weights_only=True)
        if state["digest"] != self.digest:
            raise ValueError(
                f"{self.folder.path} was started on other training records. "
                "Restore them, or start anew with --out."
            )
        return state

    def _refuse_lost_key(self, state: Mapping | None) -> None:
        """Raise if the folder's ledger has payments whose noise cannot be repeated.

        Without the key, a repeated release would have fresh noise, and the earlier release may have
        left the process already.
        """
        if state is not None or self.recipe.privacy.ledger:
            return
        paid = {entry.kind for entry in self.ledger.history()}
        if "plan" in paid or (paid and not (self.folder / SECRET / FEATURES_KEY).is_file()):
            raise ValueError(
                f"{self.folder.path} holds payments of a run but no checkpoint to resume it from. "
                "Choose another folder with --out."
            )

    def _load(self, state: Mapping) -> None:
        self.private.load_state_dict(state["private"])
        self.loop.model.load_state_dict(state["model"])
        self.loop.optimizer.load_state_dict(state["optimizer"])
        if self.loop.ema is not None:
            self.loop.ema.load_state_dict(state["ema"])
        self.metrics = list(state["metrics"])
        self.seconds = state["seconds"]
        self.resumed = state["resumed"] + 1


def _take(folder: RunFolder, recipe: Recipe) -> None:
    """Write the recipe into an empty folder; raise if the folder holds anything but its run."""
    if folder.holds_other_recipe(recipe):
        raise ValueError(
            f"{folder.path} holds a run of another recipe. Choose another folder with --out, "
            f"or resume it as it was planned: tacit train {folder / RECIPE}"
        )
    if (folder / RECIPE).is_file():
        return
    if not folder.is_empty:
        raise ValueError(f"{folder.path} is not empty and holds no run. Choose another with --out.")
    folder.write(RECIPE, recipe.to_toml())


def _budget(recipe: Recipe) -> Budget | None:
    """Return the budget of the run's own ledger.

    With paid features the run has several ledger entries, all fixed in advance: the noise is
    calibrated to their sum before the first payment. A budget would price the later entries as if
    they were chosen adaptively, so the ledger then has none. A run with `shrink` is above its
    budget on purpose.
    """
    if recipe.privacy.ledger or recipe.training.shrink > 1 or summaries_of(recipe.features, 1):
        return None
    return recipe.privacy.budget


def _digest(dataset: Dataset) -> str:
    """Return a hash of the training records; private, stored only in the checkpoint."""
    found = hashlib.sha256()
    for part in (dataset.x_train, dataset.y_train):
        found.update(np.ascontiguousarray(part).data)
    return found.hexdigest()


def _secret_key(folder: RunFolder, seed: int | None) -> tuple[bytes, bytes]:
    """Return the key of the features' noise and the run's name, stored before their first use.

    The name is random, so that two runs of one seed in one ledger both pay.
    """
    path = folder / SECRET / FEATURES_KEY
    if not path.is_file():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_whole(path, Key.from_seed(seed).secret + os.urandom(16), mode=0o600)
    content = path.read_bytes()
    return content[:32], content[32:]
