"""The non-private twin: the same model on the same records, without clipping or noise.

What comes of it is not private. It is trained only where the recipe says that the data are public,
and the facts of the run say so.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from tacit.datasets import Dataset
from tacit.experiments import models
from tacit.experiments.evaluate import evaluate
from tacit.experiments.features import prepare
from tacit.experiments.recipe import Recipe
from tacit.experiments.run import Metric

if TYPE_CHECKING:
    from torch import Tensor, nn

_BATCH, _ROWS = 128, 30  # Adam's usual batch; rows of metrics at most


def train_baseline(recipe: Recipe, dataset: Dataset, cache: Path, *, seed: int) -> list[Metric]:
    """Metrics of the twin by step; none where the recipe does not allow one."""
    if not (recipe.data.holds_public_records and recipe.run.baseline_steps):
        return []
    import torch

    prepared = prepare(
        dataset, recipe.features, release=lambda _, summary, x: summary.exact(x), cache=cache
    )
    assert dataset.n_classes is not None  # data.load refuses others
    shape = tuple(prepared.x_train.shape[1:])
    return fit(
        models.build(recipe.model, shape, dataset.n_classes, seed=seed),
        (torch.from_numpy(prepared.x_train), torch.from_numpy(prepared.y_train)),
        (torch.from_numpy(prepared.x_test), torch.from_numpy(prepared.y_test)),
        steps=recipe.run.baseline_steps,
        rate=recipe.run.baseline_rate,
        seed=seed,
    )


def fit(
    model: "nn.Module",
    train: tuple["Tensor", "Tensor"],
    test: tuple["Tensor", "Tensor"],
    *,
    steps: int,
    rate: float,
    seed: int,
) -> list[Metric]:
    """Metrics of ordinary training: Adam, shuffled batches, rate decayed to 0; at most 30 rows."""
    import torch
    from torch.nn.functional import cross_entropy

    x, y = train
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    an_epoch = math.ceil(len(x) / _BATCH)
    measured = max(an_epoch, -(-steps // _ROWS))
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
            epoch = round(step / an_epoch, 4)
            rows.append({"step": step, "epoch": epoch, **evaluate(model, *test)})
    return rows
