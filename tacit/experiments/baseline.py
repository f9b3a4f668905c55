"""The non-private twin: the same model on the same records, without clipping or noise.

What comes of it is not private. It is trained only where the recipe says that the data are public,
and the facts of the run say so.
"""

import math
from typing import TYPE_CHECKING

from tacit.experiments.evaluate import evaluate

if TYPE_CHECKING:
    from torch import Tensor, nn

_BATCH, _RATE = 128, 1e-3  # Adam's usual; every model here ends within ten epochs of them


def fit_baseline(
    model: "nn.Module",
    train: tuple["Tensor", "Tensor"],
    test: tuple["Tensor", "Tensor"],
    *,
    epochs: float,
    seed: int,
) -> list[dict[str, float]]:
    """Metrics of ordinary training after each epoch: Adam, shuffled batches, rate decayed to 0."""
    import torch
    from torch.nn.functional import cross_entropy

    x, y = train
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=_RATE)
    an_epoch = math.ceil(len(x) / _BATCH)
    steps = max(1, round(epochs * an_epoch))
    rows: list[dict[str, float]] = []
    order = torch.empty(0, dtype=torch.int64)
    for step in range(steps):
        if not len(order):
            order = torch.randperm(len(x), generator=generator)
        batch, order = order[:_BATCH], order[_BATCH:]
        for group in optimizer.param_groups:
            group["lr"] = _RATE * (1 - step / steps)
        optimizer.zero_grad()
        cross_entropy(model(x.index_select(0, batch)), y.index_select(0, batch)).backward()
        optimizer.step()
        if (step + 1) % an_epoch == 0 or step + 1 == steps:
            rows.append(
                {"step": step + 1, "epoch": (step + 1) / an_epoch, **evaluate(model, *test)}
            )
    return rows
