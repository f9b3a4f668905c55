"""Model inversion: what a model's weights alone reveal about the records of a class.

Gradient descent on the input (Fredrikson, Jha & Ristenpart 2015, doi:10.1145/2810103.2813677) finds
the image that the model is surest about. If a class holds the few records of one person, inversion
recovers them from a model trained without noise, and does not from a private model. (The mean of a
class of many records is nobody's secret; privacy does not hide it.) This is a demonstration, not a
bound.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tacit._arrays import Floats
from tacit._check import non_negative, positive, whole


def invert(
    model: Any,
    label: int,
    shape: tuple[int, ...],
    *,
    steps: int = 300,
    learning_rate: float = 0.1,
    weight: float = 0.05,
) -> Floats:
    """Return the input in [0, 1] of `shape` for which the torch `model` is surest of `label`.

    Starting from a gray image, Adam minimizes the cross-entropy plus `weight` times the mean square
    of the pixels. No training data is used, only the model.
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
    """Return the correlation, in [-1, 1], of an image with the mean of `records`; 0 if constant.

    `records` are (images, *shape). They are private, and so is the result: use this function for
    demonstrations on public data.
    """
    found = np.asarray(image, np.float64).ravel()
    mean = np.asarray(records, np.float64).mean(axis=0).ravel()
    found, mean = found - found.mean(), mean - mean.mean()
    size = float(np.linalg.norm(found) * np.linalg.norm(mean))
    return float(found @ mean) / size if size > 0 else 0.0
