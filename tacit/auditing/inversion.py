"""Model inversion: what a model's weights alone reveal about the records of a class.

Gradient descent on the input (Fredrikson, Jha & Ristenpart 2015, doi:10.1145/2810103.2813677) finds
the image that the model is surest about. If a class holds the few records of one person, inversion
recovers them from a model trained without noise, and does not from a private model. (The mean of a
class of many records is nobody's secret; privacy does not hide it.)

`reconstruct` is the attack of an informed adversary, who knows all other records (Balle, Cherubin &
Hayes 2022, arXiv:2201.04845): at the minimum of the training loss the gradients of all records add
up to zero, so those of the known records give away that of the unknown one. These attacks are
demonstrations, not bounds.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, special

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


def fit_softmax(x: ArrayLike, y: ArrayLike, *, n_classes: int, penalty: float) -> Floats:
    """Return the weights of softmax regression without privacy, of shape (pixels + 1, classes).

    The last row is the bias. They minimize the sum of the cross-entropies plus `penalty` / 2 times
    the sum of squares of all weights.
    """
    rows, labels = _with_constant(x), np.asarray(y, np.int64)
    shape, positive_penalty = (rows.shape[1], n_classes), positive(penalty=penalty)

    def loss(flat: Floats) -> tuple[float, Floats]:
        theta = flat.reshape(shape)
        true = special.log_softmax(rows @ theta, axis=1)[np.arange(len(labels)), labels]
        gradient = _gradient(theta, rows, labels) + positive_penalty * theta
        return float(positive_penalty / 2 * (theta**2).sum() - true.sum()), gradient.ravel()

    options = {"maxiter": 1000, "gtol": 1e-4, "ftol": 1e-15}
    found = optimize.minimize(
        loss, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B", options=options
    )
    return found.x.reshape(shape)


def reconstruct(weights: ArrayLike, x: ArrayLike, y: ArrayLike, *, penalty: float = 0.0) -> Floats:
    """Return for each class the picture of its unknown record, of shape (classes, pixels).

    `weights` are those of softmax regression (`fit_softmax`) on the known records (`x`, `y`) and at
    most one unknown record in a class. The gradient of a record for its class is a number times the
    record, and for the bias it is that number: their quotient is the record.

    >>> rng = np.random.default_rng(0)
    >>> x, y = rng.random((60, 9)), rng.integers(0, 2, 60)
    >>> secret = rng.random(9)
    >>> weights = fit_softmax(np.vstack([x, secret]), np.append(y, 2), n_classes=3, penalty=0.1)
    >>> bool(np.abs(reconstruct(weights, x, y, penalty=0.1)[2] - secret).max() < 1e-3)
    True
    """
    theta = np.asarray(weights, np.float64)
    missing = -_gradient(theta, _with_constant(x), np.asarray(y, np.int64)) - penalty * theta
    size = np.where(np.abs(missing[-1]) > 1e-12, missing[-1], 1e-12)
    return (missing[:-1] / size).T


def _with_constant(x: ArrayLike) -> Floats:
    """Return records as flat rows that end with a 1."""
    rows = np.asarray(x, np.float64)
    return np.hstack([rows.reshape(len(rows), -1), np.ones((len(rows), 1))])


def _gradient(theta: Floats, rows: Floats, labels: np.ndarray) -> Floats:
    """Return the gradient of the sum of cross-entropies."""
    residuals = special.softmax(rows @ theta, axis=1)
    residuals[np.arange(len(labels)), labels] -= 1
    return rows.T @ residuals


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
