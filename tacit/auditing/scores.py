"""Scores of an attack: one number for each record, higher for those it takes to be members."""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Floats = NDArray[np.float64]


def inner_products(updates: ArrayLike, directions: ArrayLike) -> Floats:
    """White box: sum over all released updates of their product with each canary's gradient.

    `updates` is (releases, parameters) and `directions` is (canaries, parameters). An update is
    what a member pushes along its own gradient; give the released sums, not the steps downhill.

    >>> inner_products([[1.0, 0.0], [2.0, 1.0]], np.eye(2)).tolist()
    [3.0, 1.0]
    """
    total = np.atleast_2d(np.asarray(updates, np.float64)).sum(axis=0)
    return np.asarray(directions, np.float64) @ total


def minus_loss(logits: ArrayLike, labels: ArrayLike) -> Floats:
    """Black box: minus the cross-entropy of the true label (Yeom et al. 2018).

    >>> minus_loss([[0.0, 0.0]], [1]).round(3).tolist()
    [-0.693]
    """
    values, chosen = _checked(logits, labels)
    return values[chosen] - special.logsumexp(values, axis=1)


def logit_confidence(logits: ArrayLike, labels: ArrayLike) -> Floats:
    """Black box: log(p / (1 - p)) of the true label's probability p.

    Unlike p itself it is near normal over models, as LiRA needs (Carlini et al. 2022,
    arXiv:2112.03570, section VI). Computed from logits, so that p near 1 loses no digits.

    >>> logit_confidence([[3.0, 0.0]], [0]).tolist()
    [3.0]
    """
    values, chosen = _checked(logits, labels)
    rows, labels = chosen
    others = values.copy()
    others[rows, labels] = -np.inf
    return values[chosen] - special.logsumexp(others, axis=1)


def calibrated(target: ArrayLike, references: ArrayLike) -> Floats:
    """Scores less what reference models, trained without the records, give them on average.

    Takes out how easy a record is by itself (Watson et al. 2021, arXiv:2111.08440). `target` is
    (records,), `references` is (models, records).

    >>> calibrated([2.0, 2.0], [[2.0, 0.0], [1.0, 0.0]]).tolist()
    [0.5, 2.0]
    """
    reference = np.atleast_2d(np.asarray(references, np.float64))
    return np.asarray(target, np.float64) - reference.mean(axis=0)


def _checked(logits: ArrayLike, labels: ArrayLike) -> tuple[Floats, tuple[NDArray, NDArray]]:
    values, classes = np.asarray(logits, np.float64), np.asarray(labels, np.int64)
    if values.ndim != 2 or classes.shape != values.shape[:1]:
        raise ValueError(
            "logits must be (records, classes) and labels (records,), "
            f"got shapes {values.shape} and {classes.shape}."
        )
    return values, (np.arange(len(classes)), classes)
