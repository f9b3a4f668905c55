"""Model inversion: what a model's weights alone say about the records of a class.

Gradient ascent on the input (Fredrikson, Jha & Ristenpart 2015, doi:10.1145/2810103.2813677): find
the image that the model is surest about. Where a class holds one person's few records, a model
trained without noise gives them back, and a private one does not. (The mean of a class of many
records is no one's secret; privacy does not hide it.) A demonstration, not a bound.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit._check import non_negative, positive, whole


def invert(
    model: Any,
    label: int,
    shape: tuple[int, ...],
    *,
    steps: int = 300,
    learning_rate: float = 0.1,
    weight: float = 0.05,
) -> NDArray[np.float64]:
    """The input in [0, 1] of `shape` for which the torch `model` is surest of `label`.

    Adam on the cross-entropy plus `weight` times the mean square, from a gray image: nothing of the
    training data is used but what the model holds.
    """
    import torch

    whole(steps=steps, least=1)
    device = next(model.parameters()).device
    image = torch.full((1, *shape), 0.5, device=device, requires_grad=True)
    target = torch.tensor([whole(label=label)], device=device)
    optimizer = torch.optim.Adam([image], lr=positive(learning_rate=learning_rate))
    penalty = non_negative(weight=weight)
    was_training = model.training
    model.eval()
    try:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(image), target)
            (loss + penalty * image.square().mean()).backward(inputs=[image])
            optimizer.step()
            with torch.no_grad():
                image.clamp_(0.0, 1.0)
    finally:
        model.train(was_training)
    return image.detach()[0].double().cpu().numpy()


def likeness(image: ArrayLike, records: ArrayLike) -> float:
    """Correlation of an image with the mean of `records` (images, *shape), in [-1, 1]; 0 if flat.

    `records` are private, and so is what this returns: for demonstrations on public data.
    """
    found = np.asarray(image, np.float64).ravel()
    mean = np.asarray(records, np.float64).mean(axis=0).ravel()
    found, mean = found - found.mean(), mean - mean.mean()
    size = float(np.linalg.norm(found) * np.linalg.norm(mean))
    return float(found @ mean) / size if size > 0 else 0.0


def inversion_figure(
    rows: Sequence[tuple[str, ArrayLike]], path: str | Path, *, title: str = "Model inversion"
) -> Path:
    """One row of images for each (name, images (classes, height, width)); PNG and CSV."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    path = Path(path)
    grids = [(name, np.asarray(images, np.float64)) for name, images in rows]
    n_columns = max(len(images) for _, images in grids)
    figure = Figure(figsize=(n_columns, 1.2 * len(grids) + 0.4), layout="constrained")
    figure.suptitle(title)
    places: Any = figure.subplots(len(grids), n_columns, squeeze=False)
    for line, (name, images) in zip(places, grids, strict=True):
        for axes in line:
            axes.set(xticks=[], yticks=[])
        for axes, image in zip(line, images, strict=False):
            axes.imshow(image, cmap="gray_r", vmin=0, vmax=1)
        line[0].set_ylabel(name, fontsize="small")
    figure.savefig(path, dpi=120)
    lines = ["row,image,pixel,value"]
    for name, images in grids:
        for k, image in enumerate(images):
            lines += [f"{name.replace(',', ';')},{k},{i},{v:.4f}" for i, v in
                      enumerate(image.ravel())]  # fmt: skip
    path.with_suffix(".csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
