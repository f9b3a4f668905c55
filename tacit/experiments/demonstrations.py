"""Demonstrations on public records: what attacks get from a released model, and from a twin.

The twin has the same model and the same records, and is trained without privacy. Demonstrations are
not bounds. They depend on records, so they are made only if the recipe declares the records public.

Membership: LiRA (Carlini et al. 2022) guesses whether a record was trained on, from the released
weights and shadow models; for large data sets the loss alone decides, since shadows take long.

Inversion, for images: softmax regression on pixels gets a few more classes with one record each, as
if a person had contributed a single picture. An attacker who knows all the other records computes
that picture from the weights (`reconstruct`): exactly, if the model was trained without privacy. At
the run's epsilon all attacked classes give the same gray average. (The average picture of a class
with many records depends on no single one of them, and privacy does not hide it.)
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tacit._arrays import Flags, Floats
from tacit.auditing import (
    ROC,
    Shadows,
    fit_softmax,
    halves,
    likeness,
    lira,
    logit_confidence,
    minus_loss,
    reconstruct,
    roc,
    roc_points,
)
from tacit.datasets import Dataset
from tacit.experiments.facts import Facts
from tacit.experiments.features import Prepared
from tacit.experiments.folder import RunFolder
from tacit.experiments.recipe import ModelSettings, Recipe

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tacit.experiments.released import Released

MEMBERSHIP, INVERSION = "figures/membership.csv", "figures/inversion.csv"
RELEASED, TWIN = "released model", "without privacy"
_MOST = 5000  # records of each split for membership inference
_SMALL = 5000  # most records for shadow models and for inversion
_SHADOWS, _SHADOW_STEPS, _SHADOW_BATCH = 32, 600, 128
_TWIN_STEPS = 3000
_ALONE = 6  # records that form a class of their own
_PENALTY = 0.3  # of the squared weights of the model that is inverted


@dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """Results of membership inference and inversion, by name of the attacked model.

    `membership` holds AUC and true positive rates. `inversion` holds the mean likeness between the
    reconstruction of a one-record class and that record, as differences from the mean record; it is
    empty if the records are not images.
    """

    membership: dict[str, dict[str, float]]
    inversion: dict[str, float] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)
    """Caption of each figure, by the file of its data in the run folder."""


def demonstrate(
    folder: RunFolder, facts: Facts, released: "Released", dataset: Dataset, prepared: Prepared
) -> Demonstrations:
    """Attack the released model and its non-private twin; write data for figures to `folder`."""
    is_small = len(prepared.x_train) + len(prepared.x_test) <= _SMALL
    find = _by_shadows if is_small else _by_loss
    curves = find(released, dataset, prepared)
    how = "by shadow models" if is_small else "by their loss"
    figures = {MEMBERSHIP: f"Training records distinguished from others {how}, on log axes."}
    points = roc_points(curves, epsilon=facts.epsilon, delta=facts.delta)
    rows = [(name, f"{fpr:.6g}", f"{tpr:.6g}") for name, fpr, tpr in points]
    folder.write_table(MEMBERSHIP, ("curve", "fpr", "tpr"), rows)
    inversion: dict[str, float] = {}
    if dataset.x_train.ndim == 3 and len(dataset.x_train) <= _SMALL:
        inversion = _invert(folder, facts, dataset)
        figures[INVERSION] = "What the weights give back of a class with a single record."
    return Demonstrations(
        membership={name: curve.summary for name, curve in curves.items()},
        inversion=inversion,
        figures=figures,
    )


def _by_shadows(released: "Released", dataset: Dataset, prepared: Prepared) -> dict[str, ROC]:
    """Attack both models with LiRA: shadow models are trained on random halves of all records."""
    import torch

    x = torch.from_numpy(np.concatenate([prepared.x_train, prepared.x_test]))
    y = np.concatenate([prepared.y_train, prepared.y_test])
    is_member = np.arange(len(y)) < len(prepared.x_train)
    members = halves(len(y), _SHADOWS, rng=0)
    trained = _train_stacked(
        _build(released.recipe, dataset, prepared), x, y, np.vstack([members, is_member])
    )
    with torch.no_grad():
        attacked = {TWIN: trained[-1], RELEASED: released.model(x)}
    shadows = Shadows(np.array([logit_confidence(one.numpy(), y) for one in trained[:-1]]), members)
    return {
        name: roc(lira(logit_confidence(logits.numpy(), y), shadows), is_member)
        for name, logits in attacked.items()
    }


def _train_stacked(model: "nn.Module", x: "Tensor", y: np.ndarray, members: Flags) -> "Tensor":
    """Train one copy of `model` on each row of `members`, all at once; return all their logits.

    The parameters of the copies are stacked, so that one step of Adam moves every copy.
    """
    import torch
    from torch.func import functional_call, vmap
    from torch.nn.functional import cross_entropy

    stacked = {
        name: torch.stack([p.detach()] * len(members)).requires_grad_()
        for name, p in model.named_parameters()
    }
    optimizer = torch.optim.Adam(list(stacked.values()), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, _SHADOW_STEPS)
    generator, labels = torch.Generator().manual_seed(0), torch.from_numpy(y)
    weights = torch.from_numpy(members.astype(np.float32))
    predict = vmap(lambda p, rows: functional_call(model, p, (rows,)), randomness="different")
    for _ in range(_SHADOW_STEPS):
        rows = torch.multinomial(weights, _SHADOW_BATCH, generator=generator)
        optimizer.zero_grad()
        logits = predict(stacked, x[rows]).flatten(0, 1)
        loss = cross_entropy(logits, labels[rows].flatten(), reduction="sum") / _SHADOW_BATCH
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return torch.stack(
            [functional_call(model, _row(stacked, k), (x,)) for k in range(len(members))]
        )


def _row(stacked: "dict[str, Tensor]", k: int) -> "dict[str, Tensor]":
    return {name: values[k] for name, values in stacked.items()}


def _by_loss(released: "Released", dataset: Dataset, prepared: Prepared) -> dict[str, ROC]:
    """Attack both models by the loss of each record (Yeom et al. 2018)."""
    import torch

    from tacit.experiments.training_loop import fit, tensors

    recipe, twin = released.recipe, _build(released.recipe, dataset, prepared)
    records = tensors(prepared.x_train, prepared.y_train)
    few = tensors(prepared.x_test[:1], prepared.y_test[:1])
    fit(twin, records, few, steps=_TWIN_STEPS, rate=recipe.run.baseline_rate, seed=0)
    x = torch.from_numpy(np.concatenate([prepared.x_train[:_MOST], prepared.x_test[:_MOST]]))
    y = np.concatenate([prepared.y_train[:_MOST], prepared.y_test[:_MOST]])
    is_member = np.arange(len(y)) < len(prepared.x_train[:_MOST])
    with torch.no_grad():
        logits = {TWIN: twin(x).numpy(), RELEASED: released.model(x).numpy()}
    return {name: roc(minus_loss(found, y), is_member) for name, found in logits.items()}


def _build(recipe: Recipe, dataset: Dataset, prepared: Prepared) -> "nn.Module":
    from tacit.experiments import models

    return models.build(recipe.model, prepared.shape, dataset.n_classes, seed=0)


def _invert(folder: RunFolder, facts: Facts, dataset: Dataset) -> dict[str, float]:
    """Reconstruct records from model weights, and return how similar the pictures are, by model."""
    alone, known, first = dataset.x_test[:_ALONE], dataset.x_train, dataset.n_classes or 0
    x = np.concatenate([known, alone])
    y = np.concatenate([dataset.y_train, first + np.arange(len(alone))])
    private = f"epsilon {facts.epsilon:.3g}"
    attacked = {
        TWIN: (fit_softmax(x, y, n_classes=first + len(alone), penalty=_PENALTY), _PENALTY),
        private: (_private_softmax(facts, x, y, first + len(alone)), 0.0),
    }
    shown: dict[str, Any] = {"the record": alone}
    found, mean = {}, known.mean(axis=0)
    for name, (weights, penalty) in attacked.items():
        pictures = reconstruct(weights, known, dataset.y_train, penalty=penalty)[first:]
        shown[name] = np.clip(pictures, 0.0, 1.0).reshape(alone.shape)
        pairs = zip(shown[name], alone, strict=True)
        found[name] = float(np.mean([likeness(one - mean, [true - mean]) for one, true in pairs]))
    rows = (
        (name, k, pixel, f"{value:.4f}")
        for name, images in shown.items()
        for k, image in enumerate(images)
        for pixel, value in enumerate(np.ravel(image))
    )
    folder.write_table(INVERSION, ("row", "image", "pixel", "value"), rows)
    return found


def _private_softmax(facts: Facts, x: np.ndarray, y: np.ndarray, n_classes: int) -> Floats:
    """Return the weights of softmax regression trained by DP-SGD at the epsilon of the run."""
    import torch

    from tacit.experiments import models
    from tacit.experiments.training_loop import example_losses, tensors
    from tacit.training import make_private

    model = models.build(ModelSettings(), x.shape[1:], n_classes, seed=0)
    run = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=4.0, momentum=0.9),
        tensors(x, y),
        example_losses,
        batch_size=-(-len(x) // 8),
        steps=100,
        clip_norm=0.1,
        epsilon=facts.epsilon,
        delta=facts.delta,
    )
    for lot in run:
        run.step(lot)
    matrix, bias = (p.detach().double().numpy() for p in model.parameters())
    return np.vstack([matrix.T, bias])
