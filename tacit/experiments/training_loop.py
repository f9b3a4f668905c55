"""The training loops of a recipe: private steps, used by runs and audits, and the ordinary twin.

`TrainingLoop` is the one place where a recipe becomes an optimizer, a learning rate schedule, a
running mean of the weights and a call of `make_private`. `fit` trains the same model on the same
records without clipping or noise; its result is not private.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam

from tacit import accounting
from tacit.auditing import GradientCanaries, roc
from tacit.datasets import Dataset, PersonRows
from tacit.events import Event, Gaussian, Relation, Repeated, Sequence
from tacit.experiments import models
from tacit.experiments.facts import Metric
from tacit.experiments.features import prepare, summaries_of
from tacit.experiments.recipe import Recipe, TrainingSettings
from tacit.experiments.views import shift_and_mirror
from tacit.ledger import Ledger, restart_reserve
from tacit.mechanisms import optimal_bands
from tacit.sampling import CyclicPoisson, Poisson
from tacit.training import (
    EMA,
    AdamBC,
    Banded,
    Checkpoint,
    NoisyLoss,
    ReleasedStep,
    Reports,
    Speed,
    Users,
    Views,
    count_steps,
    make_private,
    price_bands,
)

Records = tuple[Tensor, Tensor]
"""Inputs and classes, one row per record."""

_BATCH = 128  # records in a step of the twin
_MOST_ROWS = 30  # rows of metrics of the twin
_CHUNK = 4096  # records evaluated at a time


class TrainingLoop:
    """A model in private training, with optimizer, learning rate schedule and averaged weights.

    If `canaries` are given, they are added to the records and scored at each step. The declared
    number of records then grows by the expected number of canaries while the sampling rate stays
    the same, so the divisor of each noisy sum grows. The learning rate of SGD grows in the same
    ratio, so that real records train as they would without canaries. (The steps of Adam do not
    depend on the scale of the gradient.)

    Parameters
    ----------
    recipe
        A recipe whose defaults are filled in (`Recipe.filled`).
    n_records
        Number of real records, without canaries. An epoch is n_records / batch_size steps.
    persons
        Whose record each one is, if persons may have several. A canary is a person of its own.
    also
        Events of other releases in the same run, such as paid features; see `make_private`.
    checkpoint
        Where the state is kept, if it is; the noise multiplier is then for a run with a reserve.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        records: Records,
        *,
        n_records: int,
        noise_multiplier: float,
        ledger: Ledger | None = None,
        also: tuple[Event, ...] = (),
        seed: int | None = None,
        canaries: GradientCanaries | None = None,
        persons: PersonRows | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        training = recipe.training
        device = require_device(recipe)
        model.to(device)
        records = (records[0].to(device), records[1].to(device))
        self.recipe = recipe
        self.n_records = n_records
        self.also = also
        self.model = model
        self.ema = average_of(recipe, model)
        if checkpoint is not None and self.ema is not None:
            checkpoint = replace(checkpoint, also={**checkpoint.also, "ema": self.ema})
        losses = gpu_losses if device.type == "cuda" else example_losses
        trained, rows, declared = model, records, n_records
        if canaries is not None:
            trained, rows, losses = canaries.plant(model, records, losses)
            declared += canaries.n_canaries // 2
        self.optimizer = optimizer_of(recipe, [p for p in trained.parameters() if p.requires_grad])
        self._rate_factor = 1.0 if training.optimizer == "adam" else declared / n_records
        self.private = make_private(
            trained,
            self.optimizer,
            rows,
            losses,
            batch_size=round(training.lot * declared / n_records),
            steps=steps_of(recipe, n_records),
            noise_multiplier=noise_multiplier,
            delta=recipe.privacy.delta,
            n_records=declared,
            users=users_of(persons, n_rows=len(rows[0])),
            ledger=ledger,
            checkpoint=checkpoint,
            also=also,
            seed=seed,
            speed=Speed(
                max_microbatch=training.max_microbatch,
                compile="auto" if device.type == "cuda" else False,
            ),
            **release_options(recipe, self._note),
        )
        self.latest: ReleasedStep | None = None  # of a run that releases its loss
        self._lots = self.private if canaries is None else canaries.watch(self.private)

    def steps(self) -> Iterator[int]:
        """Take all remaining steps; after each, yield the number of steps taken so far."""
        private = self.private
        if private.steps_taken == private.steps:  # resumed after its last step
            return
        for lot in self._lots:
            rate = learning_rate(self.recipe, self.n_records, private.steps_taken)
            for group in self.optimizer.param_groups:
                group["lr"] = self._rate_factor * rate
            private.step(lot)
            if self.ema is not None:
                self.ema.update()
            yield private.steps_taken

    def _note(self, released: ReleasedStep) -> None:
        self.latest = released

    def released(self) -> AbstractContextManager[nn.Module]:
        """Return a context in which the model holds the weights to release (averaged, if asked)."""
        if self.recipe.training.correlated > 1:
            return self._averaged()
        return nullcontext(self.model) if self.ema is None else self.ema.applied()

    @contextmanager
    def _averaged(self) -> Iterator[nn.Module]:
        with self.private.averaged():
            yield self.model  # without the canaries' table, if there is one


def release_options(
    recipe: Recipe, *callbacks: Callable[[ReleasedStep], None]
) -> dict[str, Any]:  # Any: options of several types
    """Return the options of `make_private` that state what a step of the recipe releases.

    `callbacks` are called if the steps release their loss.
    """
    training, upper = recipe.training, recipe.training.loss_upper
    reports = None
    if upper is not None:
        reports = Reports(noisy_loss=NoisyLoss(upper=upper), callbacks=callbacks)
    return {
        "clip_norm": training.clip_norm,
        "augment": Views(training.views or 1, augmentation(recipe)),
        "noise": banded(training),
        "reports": reports,
    }


def optimizer_of(recipe: Recipe, weights: list[nn.Parameter]) -> AdamBC | SGD:
    """Return the optimizer of the recipe, at its first learning rate."""
    training = recipe.training
    if training.optimizer == "adam":
        return AdamBC(weights, lr=training.learning_rate)
    return SGD(weights, lr=training.learning_rate, momentum=training.momentum)


def average_of(recipe: Recipe, model: nn.Module) -> EMA | None:
    """Return the average of weights that is released; None if the run itself averages, or none."""
    training = recipe.training
    is_own = training.average and training.correlated == 1
    return EMA(model, decay=training.average) if is_own else None


def users_of(persons: PersonRows | None, *, n_rows: int) -> Users | None:
    """Return the option `users` of `make_private` for `n_rows` rows; those at the end are canaries.

    None if the unit of privacy has one row.
    """
    if persons is None:
        return None
    sampled = "users" if persons.sampled == "persons" else "records"
    canaries = (f"\0canary {number}" for number in range(n_rows - len(persons.ids)))
    ids = [*persons.ids, *canaries]
    return Users(ids=ids, records_per_user=persons.most, sampled=sampled)


def example_losses(model: nn.Module, batch: Records) -> Tensor:
    """Return the cross-entropy loss of each example of `batch`, without averaging."""
    x, y = batch
    return cross_entropy(model(x), y, reduction="none")


def gpu_losses(model: nn.Module, batch: Records) -> Tensor:
    """Return `example_losses`, of a model that computes in bfloat16 on a GPU."""
    x, y = batch
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(x)
    return cross_entropy(logits.float(), y, reduction="none")


def require_device(recipe: Recipe) -> torch.device:
    """Return the device of the recipe; raise `ValueError` if this machine does not have it."""
    if recipe.run.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            'run.device = "cuda" needs a GPU that torch can use, and there is none here. Use cpu.'
        )
    return torch.device(recipe.run.device)


def augmentation(recipe: Recipe) -> Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] | None:
    """Return what makes views of images; None if each example has one view, the image itself."""
    if (recipe.training.views or 1) == 1:
        return None
    if recipe.features.kind != "none" or recipe.data.name == "table":
        raise ValueError(
            "training.views moves and mirrors images, so it needs data that are images and "
            'features.kind = "none".'
        )
    return shift_and_mirror


def tensors(x: np.ndarray, y: np.ndarray) -> Records:
    """Return two NumPy arrays as PyTorch tensors that share memory with them."""
    return torch.from_numpy(x), torch.from_numpy(y)


def steps_of(recipe: Recipe, n_records: int) -> int:
    """Return the number of training steps that the recipe's epochs amount to."""
    epochs, batch = recipe.training.epochs, recipe.training.batch
    return count_steps(epochs=epochs, steps=None, batch_size=batch, n_records=n_records)


def banded(training: TrainingSettings) -> Banded | None:
    """Return the correlated noise that filled settings ask for; None for independent noise."""
    if training.correlated == 1:
        return None
    return Banded(bands=training.correlated, average=Banded().average if training.average else 0.0)


def best_bands(
    recipe: Recipe, n_records: int, also: tuple[Event, ...] = (), *, parameters: int | None = None
) -> int:
    """Return the number of bands with the least noise of running sums at the recipe's price.

    `also` are releases, besides paid features, that the price has to cover. With the number of
    trained `parameters`, the residuals fit in the memory that `Banded` allows.
    """
    if _samples_records_of_persons(recipe):
        return 1
    limits = Banded() if parameters is None else Banded().limited_by_memory(parameters)
    paid = (*features_events(recipe, n_records), *also)
    setting = _priced(recipe, n_records, paid)
    return price_bands("auto", **setting, most=limits.most_bands).bands


def noise_saving(recipe: Recipe, n_records: int, also: tuple[Event, ...]) -> float:
    """Return how many times less noise running sums carry than with independent noise.

    `also` are the events of other releases that the run's budget pays for.
    """
    setting = _priced(recipe, n_records, also)
    bands = min(recipe.training.correlated, setting["steps"])
    independent, chosen = (price_bands(b, **setting).noise for b in (1, bands))
    return independent / chosen


def _priced(
    recipe: Recipe, n_records: int, also: tuple[Event, ...]
) -> dict[str, Any]:  # Any: the options of `price_bands`
    budget, batch = recipe.privacy.budget, recipe.training.batch
    return {
        "batch_size": batch,
        "n_records": n_records,
        "steps": steps_of(recipe, n_records),
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "relation": Relation(recipe.privacy.relation),
        "also": also,
    }


def sampling_in_words(batch: int, n_records: int, *, bands: int, of: str) -> str:
    """Return how lots of `batch` units are drawn; `of` names the units if they are no records."""
    rate = min(1.0, bands * batch / n_records)
    words = f"Poisson{of and f' of {of}'}, rate {rate:.6g}, drawn anew for each step"
    return words if bands == 1 else f"{words}, from one of {bands} groups of records in turn"


def training_event(
    recipe: Recipe, n_records: int, noise: float, *, lot: int, is_kept: bool = False
) -> Event:
    """Return the event of all training steps, at a noise multiplier and an expected lot size.

    If the state of the run is kept in a checkpoint, it has the steps reserved for a restart.
    """
    bands, steps = recipe.training.correlated, steps_of(recipe, n_records)
    column = optimal_bands(steps, bands := min(bands, steps)).tolist()
    steps += restart_reserve(steps, bands) if is_kept else 0
    if bands == 1:
        step = Poisson(lot / n_records).amplify(Gaussian(noise))
        if _samples_records_of_persons(recipe):
            step = accounting.for_group(step, recipe.data.records_per_person)
        return Repeated(step, steps)
    if _samples_records_of_persons(recipe):
        raise ValueError(
            f"training.bands must be 1 with data.sampled records, got {bands}: correlated noise is "
            "priced for persons who are drawn as a whole. Use data.sampled persons, or leave "
            "bands out."
        )
    sampler = CyclicPoisson(min(1.0, bands * lot / n_records), bands)
    return sampler.event(noise, steps, column)


def _samples_records_of_persons(recipe: Recipe) -> bool:
    """Return whether a person may be in a lot several times."""
    return recipe.data.sampled == "records" and recipe.data.records_per_person > 1


def learning_rate(recipe: Recipe, n_records: int, step: int) -> float:
    """Return the learning rate of a step: linear in time over `decay_epochs`, then constant."""
    training = recipe.training
    assert training.decay_epochs is not None  # set by Recipe.filled, like the next one
    assert training.learning_rate_end is not None
    epoch = step * training.batch / n_records
    share = min(1.0, epoch / training.decay_epochs)
    start, end = training.learning_rate, training.learning_rate_end
    return start + share * (end - start)


def features_events(recipe: Recipe, n_records: int) -> tuple[Event, ...]:
    """Return the events of paid features; none if the features transform each record alone."""
    return tuple(s.event for s in summaries_of(recipe.features, n_records).values())


def noise_multiplier(
    recipe: Recipe, n_records: int, also: tuple[Event, ...] = (), *, is_kept: bool = False
) -> float:
    """Return the least noise multiplier with which the whole run costs at most its epsilon.

    The cost includes paid features and the events `also` of other releases. With
    `training.shrink`, the noise is divided by `shrink`, and the run then exceeds its epsilon on
    purpose. The noise must be found before the features are paid for, so that a budget that is too
    small is refused first. `make_private` cannot be called yet, because it needs the features'
    result.
    """
    training, budget = recipe.training, recipe.privacy.budget
    paid = (*features_events(recipe, n_records), *also)
    terms: dict[str, Any] = {"lot": replace(training, shrink=1).lot, "is_kept": is_kept}
    try:
        noise = accounting.calibrate(
            lambda noise: Sequence((*paid, training_event(recipe, n_records, noise, **terms))),
            epsilon=budget.epsilon,
            delta=budget.delta,
            relation=Relation(recipe.privacy.relation),
        )
    except ValueError as refusal:
        if not paid:
            raise
        listed = "; ".join(str(event) for event in paid)
        raise ValueError(
            f"{refusal} The features alone are {listed}: raise their noise_multiplier."
        ) from None
    return noise / training.shrink


def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> Metric:
    """Return the mean loss and accuracy of `model`, and for two classes the area under the ROC."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        device = next(model.parameters()).device
        parts = [model(part.to(device)).cpu() for part in x.split(_CHUNK)]
    logits = torch.cat(parts).double()
    model.train(was_training)
    found = {
        "loss": float(cross_entropy(logits, y)),
        "accuracy": float((logits.argmax(1) == y).double().mean()),
    }
    if logits.shape[1] == 2 and 0 < y.sum() < len(y):
        found["auc"] = roc((logits[:, 1] - logits[:, 0]).numpy(), y.numpy()).auc
    return {name: value for name, value in found.items() if np.isfinite(value)}


def train_baseline(recipe: Recipe, dataset: Dataset, cache: Path, *, seed: int) -> list[Metric]:
    """Train the non-private twin (the same model without clipping or noise); return its metrics.

    The list is empty unless the recipe declares the records public and asks for a twin.
    """
    if not (recipe.data.holds_public_records and recipe.run.baseline_steps):
        return []
    prepared = prepare(
        dataset, recipe.features, release=lambda _, summary, x: summary.exact(x), cache=cache
    )
    return fit(
        models.build(recipe.model, prepared.shape, dataset.n_classes, seed=seed),
        tensors(prepared.x_train, prepared.y_train),
        tensors(prepared.x_test, prepared.y_test),
        steps=recipe.run.baseline_steps,
        rate=recipe.run.baseline_rate,
        seed=seed,
    )


def fit(
    model: nn.Module, train: Records, test: Records, *, steps: int, rate: float, seed: int
) -> list[Metric]:
    """Train `model` without privacy, and return at most 30 rows of metrics.

    The optimizer is Adam on shuffled batches, with a learning rate that falls linearly to 0.
    """
    x, y = train
    generator = torch.Generator().manual_seed(seed)
    optimizer = Adam(model.parameters(), lr=rate)
    steps_per_epoch = math.ceil(len(x) / _BATCH)
    measured = max(steps_per_epoch, -(-steps // _MOST_ROWS))
    rows: list[Metric] = []
    order = torch.empty(0, dtype=torch.int64)
    for step in range(1, steps + 1):
        if not len(order):
            order = torch.randperm(len(x), generator=generator)
        batch, order = order[:_BATCH], order[_BATCH:]
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - (step - 1) / steps)
        optimizer.zero_grad()
        cross_entropy(model(x.index_select(0, batch)), y.index_select(0, batch)).backward()
        optimizer.step()
        if step % measured == 0 or step == steps:
            epoch = round(step / steps_per_epoch, 4)
            rows.append({"step": step, "epoch": epoch, **evaluate(model, *test)})
    return rows
