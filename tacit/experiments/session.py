"""One session of a run: prepare, pay, train, measure, write down; and go on after a crash."""

import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tacit import accounting
from tacit.datasets import Dataset
from tacit.errors import LedgerError
from tacit.events import Event
from tacit.experiments import models, plan
from tacit.experiments._describe import describe_run
from tacit.experiments.baseline import train_baseline
from tacit.experiments.evaluate import evaluate
from tacit.experiments.features import Prepared, Summary, prepare
from tacit.experiments.recipe import Recipe
from tacit.experiments.released import model_bytes
from tacit.experiments.run import (
    BASELINE,
    FACTS,
    METRICS,
    MODEL,
    SECRET,
    Facts,
    Metric,
    RunFolder,
    write_whole,
)
from tacit.ledger import Ledger

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from tacit.training import Private


class Progress(NamedTuple):
    """Where a run stands; public. `metric` is new only when `is_measured`."""

    step: int
    steps: int
    metric: Metric
    is_measured: bool


FEATURES_KEY = "features.key"
OnProgress = Callable[[Progress], None]


@dataclass
class Session:
    """Everything of a run in memory; all of it is rebuilt from the folder on a restart."""

    recipe: Recipe
    folder: RunFolder
    dataset: Dataset
    ledger: Ledger
    cache: Path
    metrics: list[Metric] = field(default_factory=list)
    resumed: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        from tacit.training import EMA

        self.digest = _digest(self.dataset)
        state = self._read_checkpoint()
        self._refuse_lost_key(state)
        n = len(self.dataset.x_train)
        self.noise = state["noise"] if state else plan.noise_multiplier(self.recipe, n)
        self.prepared = self._prepare(state)
        self.train_set = _tensors(self.prepared.x_train, self.prepared.y_train)
        self.test_set = _tensors(self.prepared.x_test, self.prepared.y_test)
        init = state["init"] if state else self._init_seed()
        self.model, self.init = self._build(init), init
        self.optimizer = _optimizer(self.recipe, self.model)
        self.private = self._make_private()
        average = self.recipe.training.average
        self.ema = EMA(self.model, decay=average) if average else None
        if state:
            self._load(state)
        else:
            self._save()  # before the first payment, so that a restart knows the key

    # The loop -----------------------------------------------------------------------------------

    def go(self, on_progress: OnProgress) -> None:
        """All steps that remain, measured at the end of each epoch."""
        private, started = self.private, time.monotonic()
        saved = started
        latest = self.metrics[-1] if self.metrics else {}
        on_progress(self._progress(latest, is_measured=False))
        for lot in private:
            _set_rate(self.optimizer, self.rate(private.steps_taken))
            private.step(lot)
            if self.ema is not None:
                self.ema.update()
            is_measured = self._ends_epoch(private.steps_taken)
            now = time.monotonic()
            if is_measured or now - saved > self.recipe.run.checkpoint_seconds:
                if is_measured:
                    self.metrics.append(self._measure())
                    latest = self.metrics[-1]
                now = time.monotonic()
                self.seconds += now - started
                started = saved = now
                self._save()  # what was released so far survives before anyone sees it
                self.folder.write_lines(METRICS, self.metrics)
            on_progress(self._progress(latest, is_measured=is_measured))

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        return plan.learning_rate(self.recipe, len(self.dataset.x_train), step)

    @property
    def expected_batch(self) -> int:
        """Lot size of the recipe, by which epochs are counted."""
        assert self.recipe.training.batch_size is not None  # filled
        return self.recipe.training.batch_size

    def _ends_epoch(self, step: int) -> bool:
        per_epoch = len(self.dataset.x_train) / self.expected_batch
        return step == self.private.steps or int(step / per_epoch) > int((step - 1) / per_epoch)

    def _measure(self) -> Metric:
        step = self.private.steps_taken
        epoch = step * self.expected_batch / len(self.dataset.x_train)
        found = self._evaluated()
        return {"step": step, "epoch": round(epoch, 4), "epsilon": self.epsilon_at(step), **found}

    def _evaluated(self) -> Metric:
        if self.ema is None:
            return evaluate(self.model, *self.test_set)
        with self.ema.applied() as model:
            return evaluate(model, *self.test_set)

    def epsilon_at(self, step: int) -> float:
        """What the run would cost had it been planned to end after `step` steps."""
        event = self.claim if step == self.private.steps else self._claim_until(step)
        delta = self.recipe.privacy.delta
        assert delta is not None
        return accounting.epsilon(event, delta=delta, relation=self.ledger.relation)

    @property
    def claim(self) -> Event:
        """Everything done to the private records."""
        return plan.claim(self.recipe, len(self.dataset.x_train), self.noise)

    def _claim_until(self, step: int) -> Event:
        n = len(self.dataset.x_train)
        return plan.claim(self.recipe, n, self.noise, steps=step)

    def _progress(self, metric: Metric, *, is_measured: bool) -> Progress:
        return Progress(self.private.steps_taken, self.private.steps, metric, is_measured)

    # Making and ending --------------------------------------------------------------------------

    def _prepare(self, state: Mapping | None) -> Prepared:
        kept = {} if state is None else state["summaries"]

        def release(name: str, summary: Summary, x: np.ndarray) -> np.ndarray:
            return kept[name].numpy() if name in kept else self._pay_and_release(name, summary, x)

        return prepare(self.dataset, self.recipe.features, release=release, cache=self.cache)

    def _pay_and_release(self, name: str, summary: Summary, x: np.ndarray) -> np.ndarray:
        """A summary, paid once; after a crash it is released again with the same noise."""
        from tacit.training import Key

        secret, run = _secret_key(self.folder, self.recipe.run.seed)
        key, note = Key(secret), f"{name} for run {run.hex()}"
        if not any(entry.note == note for entry in self.ledger.history()):
            self.ledger.spend(summary.event, note=note)
        return summary.release(x, key.numpy(name, 0))

    def _init_seed(self) -> int:
        seed = self.recipe.run.seed
        return int.from_bytes(os.urandom(4)) if seed is None else seed

    def _build(self, seed: int) -> "nn.Module":
        classes = self.dataset.n_classes
        assert classes is not None  # data.load refuses others
        shape = tuple(self.prepared.x_train.shape[1:])
        return models.build(self.recipe.model, shape, classes, seed=seed)

    def _make_private(self) -> "Private":
        from torch.nn.functional import cross_entropy

        from tacit.training import make_private

        training = self.recipe.training

        def losses(model: "nn.Module", batch: tuple["Tensor", "Tensor"]) -> "Tensor":
            x, y = batch
            return cross_entropy(model(x), y, reduction="none")

        return make_private(
            self.model,
            self.optimizer,
            self.train_set,
            losses,
            batch_size=plan.lot_of(self.recipe),
            steps=plan.steps_of(self.recipe, len(self.dataset.x_train)),
            clip_norm=training.clip_norm,
            noise_multiplier=self.noise,
            ledger=self.ledger,
            seed=self.recipe.run.seed,
            max_microbatch=training.max_microbatch,
        )

    def baseline(self) -> list[Metric]:
        """Metrics of the non-private twin; none where the recipe does not allow one."""
        return train_baseline(self.recipe, self.dataset, self.cache, seed=self.init)

    def finish(self, baseline: Sequence[Metric]) -> Facts:
        """The released model and the facts, which are written last."""
        classes = self.dataset.n_classes
        assert classes is not None
        if self.ema is not None:
            with self.ema.applied() as model:
                content = model_bytes(self.recipe, model, self.prepared, classes)
        else:
            content = model_bytes(self.recipe, self.model, self.prepared, classes)
        if not self.recipe.privacy.ledger and self.ledger.event != self.claim:
            raise LedgerError(f"{self.ledger.path} records another event than the run's claim.")
        self.folder.write_lines(METRICS, self.metrics)
        self.folder.write(MODEL, content)
        if baseline:
            self.folder.write_lines(BASELINE, baseline)
        shape = tuple(self.prepared.x_train.shape[1:])
        facts = describe_run(
            self.recipe,
            self.folder,
            self.dataset,
            self.ledger,
            claim=self.claim,
            noise_multiplier=self.noise,
            steps=self.private.steps,
            model=models.describe(self.recipe.model, self.model, shape),
            metrics=self.metrics,
            baseline=baseline,
            resumed=self.resumed,
            seconds=self.seconds,
        )
        self.folder.write(FACTS, json.dumps(facts.to_dict(), indent=2) + "\n")
        self.folder.close()
        return facts

    # Restarts -----------------------------------------------------------------------------------

    def _save(self) -> None:
        import torch

        state = {
            "private": self.private.state_dict(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
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
        import torch

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
        """What was paid can only be repeated with its key; without it, it may be out already."""
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
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        self.metrics, self.seconds = list(state["metrics"]), state["seconds"]
        self.resumed = state["resumed"] + 1

    @property
    def _checkpoint(self) -> Path:
        return self.folder / SECRET / "checkpoint.pt"


def _tensors(x: np.ndarray, y: np.ndarray) -> tuple["Tensor", "Tensor"]:
    import torch

    return torch.from_numpy(x), torch.from_numpy(y)


def _digest(dataset: Dataset) -> str:
    """Hash of the training records; private, kept in the checkpoint alone."""
    found = hashlib.sha256()
    for part in (dataset.x_train, dataset.y_train):
        found.update(np.ascontiguousarray(part).data)
    return found.hexdigest()


def _optimizer(recipe: Recipe, model: "nn.Module") -> "torch.optim.Optimizer":
    import torch

    from tacit.training import AdamBC

    training = recipe.training
    parameters = [p for p in model.parameters() if p.requires_grad]
    if training.optimizer == "adam":
        return AdamBC(parameters, lr=training.learning_rate)
    return torch.optim.SGD(parameters, lr=training.learning_rate, momentum=training.momentum)


def _set_rate(optimizer: "torch.optim.Optimizer", rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _secret_key(folder: RunFolder, seed: int | None) -> tuple[bytes, bytes]:
    """The key of the features' noise and the run's name, kept before they are first used.

    The name is drawn, so that two runs of one seed in one ledger pay twice.
    """
    from tacit.training import Key

    path = folder / SECRET / FEATURES_KEY
    if not path.is_file():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_whole(path, Key.from_seed(seed).secret + os.urandom(16), mode=0o600)
    content = path.read_bytes()
    return content[:32], content[32:]
