"""What attacks show on public data: the released model beside a twin trained without privacy.

Membership inference by loss; and for images, inversion. For that, softmax regression on pixels gets
a few more classes of one record each, as if a person had sent a single picture to be recognized by.
Without privacy the weights give that picture back; at the run's price they do not. (The face of a
class of many records is no one's secret: privacy does not hide it, nor promise to.)

Demonstrations, not bounds; nothing here may run on private records.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tacit.auditing import inversion_figure, invert, likeness, minus_loss, roc, roc_figure
from tacit.datasets import Dataset
from tacit.experiments import baseline, models
from tacit.experiments.features import Prepared
from tacit.experiments.released import Released
from tacit.experiments.run import Facts, RunFolder
from tacit.experiments.settings import Model

if TYPE_CHECKING:
    from torch import nn

MEMBERSHIP, INVERSION = "figures/membership.png", "figures/inversion.png"
RELEASED, TWIN = "released model", "without privacy"
_MOST = 5000  # records of each split that are asked about
_TWIN_STEPS = 3000
_SMALL = 5000  # records, for inversion: whole batches on more would take long
_ALONE = 6  # records that are a class of their own


@dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """By model: AUC and true positive rates of the loss attack, and the mean likeness of what
    inversion finds to the one record of a class (empty if records are not images)."""

    membership: dict[str, dict[str, float]]
    inversion: dict[str, float] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)
    """File in the run folder to caption."""


def demonstrate(
    folder: RunFolder, facts: Facts, released: Released, dataset: Dataset, prepared: Prepared
) -> Demonstrations:
    """Attack both models, and draw what comes of it into the run folder."""
    both = {TWIN: _twin(released, dataset, prepared), RELEASED: released.model}
    (folder / "figures").mkdir(exist_ok=True)
    figures = {MEMBERSHIP: "Training records told from others by their loss, on log axes."}
    curves = {name: _curve(model, prepared) for name, model in both.items()}
    roc_figure(curves, folder / MEMBERSHIP, epsilon=facts.epsilon, delta=facts.delta)
    inversion: dict[str, float] = {}
    if dataset.x_train.ndim == 3 and len(dataset.x_train) <= _SMALL:
        inversion = _invert(folder, facts, dataset)
        figures[INVERSION] = "What the weights alone give back of a class with a single record."
    return Demonstrations(
        membership={name: curve.summary for name, curve in curves.items()},
        inversion=inversion,
        figures=figures,
    )


def _twin(released: Released, dataset: Dataset, prepared: Prepared) -> "nn.Module":
    import torch

    assert dataset.n_classes is not None  # data.load refuses others
    shape = tuple(prepared.x_train.shape[1:])
    model = models.build(released.recipe.model, shape, dataset.n_classes, seed=0)
    train = torch.from_numpy(prepared.x_train), torch.from_numpy(prepared.y_train)
    few = torch.from_numpy(prepared.x_test[:1]), torch.from_numpy(prepared.y_test[:1])
    rate = released.recipe.run.baseline_rate
    baseline.fit(model, train, few, steps=_TWIN_STEPS, rate=rate, seed=0)
    return model


def _curve(model: "nn.Module", prepared: Prepared) -> Any:  # Any: a ROC curve
    import torch

    x = np.concatenate([prepared.x_train[:_MOST], prepared.x_test[:_MOST]])
    y = np.concatenate([prepared.y_train[:_MOST], prepared.y_test[:_MOST]])
    with torch.no_grad():
        logits = model(torch.from_numpy(x)).numpy()
    n_in = len(prepared.x_train[:_MOST])
    return roc(minus_loss(logits, y), np.arange(len(y)) < n_in)


def _invert(folder: RunFolder, facts: Facts, dataset: Dataset) -> dict[str, float]:
    alone = dataset.x_test[:_ALONE]
    rows: list[tuple[str, Any]] = [("the record", alone)]
    found = {}
    for name, model in _pixel_models(facts, dataset, alone).items():
        first = dataset.n_classes or 0
        images = [invert(model, first + k, alone.shape[1:]) for k in range(len(alone))]
        rows.append((name, images))
        alike = [likeness(image, one[None]) for image, one in zip(images, alone, strict=True)]
        found[name] = float(np.mean(alike))
    inversion_figure(rows, folder / INVERSION)
    return found


def _pixel_models(facts: Facts, dataset: Dataset, alone: np.ndarray) -> "dict[str, nn.Module]":
    """Softmax regression with a class for each record in `alone`: without privacy, and with."""
    import torch
    from torch.nn.functional import cross_entropy

    from tacit.training import make_private

    def losses(model: Any, batch: Any) -> Any:  # Any: tensors
        return cross_entropy(model(batch[0]), batch[1], reduction="none")

    classes = (dataset.n_classes or 0) + len(alone)
    x = torch.from_numpy(np.concatenate([dataset.x_train, alone]))
    labels = np.arange(classes - len(alone), classes)
    y = torch.from_numpy(np.concatenate([dataset.y_train, labels]))
    ordinary, private = (models.build(Model(), alone.shape[1:], classes, seed=0) for _ in range(2))
    optimizer = torch.optim.Adam(ordinary.parameters(), lr=0.02)
    for _ in range(_TWIN_STEPS // 4):  # whole batches: a class of one is seen at every step
        optimizer.zero_grad()
        losses(ordinary, (x, y)).mean().backward()
        optimizer.step()
    run = make_private(
        private,
        torch.optim.SGD(private.parameters(), lr=4.0, momentum=0.9),
        (x, y),
        losses,
        batch_size=-(-len(x) // 8),
        steps=100,
        clip_norm=0.1,
        epsilon=facts.epsilon,
        delta=facts.delta,
    )
    for lot in run:
        run.step(lot)
    return {TWIN: ordinary, f"epsilon {facts.epsilon:.3g}": private}
