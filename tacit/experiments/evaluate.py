"""Metrics on the split that is assumed public."""

from typing import TYPE_CHECKING

import numpy as np
from scipy.stats import rankdata

if TYPE_CHECKING:
    from torch import Tensor, nn

_CHUNK = 4096


def evaluate(model: "nn.Module", x: "Tensor", y: "Tensor") -> dict[str, float]:
    """Mean loss and accuracy; for two classes also the area under the ROC curve."""
    import torch
    from torch.nn.functional import cross_entropy

    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(part) for part in x.split(_CHUNK)]).double()
    model.train(was_training)
    found = {
        "loss": float(cross_entropy(logits, y)),
        "accuracy": float((logits.argmax(1) == y).double().mean()),
    }
    if logits.shape[1] == 2:
        found["auc"] = auc((logits[:, 1] - logits[:, 0]).numpy(), y.numpy())
    return {name: value for name, value in found.items() if np.isfinite(value)}


def auc(scores: np.ndarray, is_positive: np.ndarray) -> float:
    """Probability that a positive scores above a negative, ties counted half (Mann-Whitney).

    >>> auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0, 0, 1, 1]))
    0.875
    """
    positives = int(is_positive.sum())
    negatives = len(is_positive) - positives
    if not positives or not negatives:
        return float("nan")
    ranks = rankdata(scores)[is_positive.astype(bool)].sum()
    return float((ranks - positives * (positives + 1) / 2) / (positives * negatives))


def majority_accuracy(y: np.ndarray) -> float:
    """Accuracy of always answering the commonest class."""
    return float(np.bincount(y).max() / len(y))
