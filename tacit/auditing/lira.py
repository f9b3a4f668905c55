"""LiRA and other membership inference: recognize training records by the model's output.

An attack gives each record a score that is higher the more likely it is a member. LiRA (Carlini
et al. 2022, arXiv:2112.03570) trains shadow models on random halves of a pool. For each record it
compares the score by the target model with the scores by shadow models that were trained without
the record and, in its online form, also with those trained with it. The measure that counts is how
many members are found while almost nobody is accused wrongly: the left end of the ROC curve, on a
log scale.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special, stats

from tacit._arrays import Flags, Floats, Indices
from tacit._check import in_closed_unit, non_negative, one_of, whole
from tacit.mechanisms import Seed, generator

Train = Callable[[Flags, int], ArrayLike]
"""train(members, seed) -> scores of all records of the pool by a model trained on the members."""
LOW_RATES = (0.001, 0.01)


@dataclass(frozen=True)
class Shadows:
    """Scores of all records by shadow models, which an attacker trains to imitate the target model.

    `is_member` is True where the model was trained on the record. Both arrays: (models, records).
    """

    scores: Floats
    is_member: Flags


@dataclass(frozen=True)
class ROC:
    """ROC curve: true positive rate against false positive rate, both rising from 0 to 1."""

    fpr: Floats
    tpr: Floats

    @property
    def auc(self) -> float:
        """Area under the curve: the chance that a member has a higher score than a non-member."""
        return float((np.diff(self.fpr) * (self.tpr[1:] + self.tpr[:-1])).sum() / 2)

    def tpr_at(self, fpr: float) -> float:
        """Return the largest true positive rate at a false positive rate of at most `fpr`."""
        return float(self.tpr[self.fpr <= in_closed_unit(fpr=fpr)].max())

    @property
    def summary(self) -> dict[str, float]:
        """Area under the curve, and the true positive rates at 0.1 % and 1 % false positives."""
        return {"auc": self.auc, **{f"tpr_at_{rate:g}": self.tpr_at(rate) for rate in LOW_RATES}}


def train_shadows(
    train: Train, n_records: int, *, n_models: int = 16, rng: Seed = None, n_jobs: int = 1
) -> Shadows:
    """Train shadow models, each on a random half of the records, and return their scores.

    `train(members, seed)` trains one model and returns its scores of all records. It runs in
    `n_jobs` processes (joblib). Each record is used by half of the models.
    """
    from joblib import Parallel, delayed

    members = halves(n_records, whole(n_models=n_models, least=2), rng)
    jobs = (delayed(train)(row, seed) for seed, row in enumerate(members))
    scores = Parallel(n_jobs=n_jobs)(jobs)
    return Shadows(np.array([np.asarray(row, np.float64) for row in scores]), members)


def halves(n_records: int, n_models: int, rng: Seed = None) -> Flags:
    """Return which records each model is trained on, a random choice: (models, records).

    Each record is used by exactly half of the models, rounded down.
    """
    random = generator(rng)
    order = random.random((n_models, whole(n_records=n_records, least=1))).argsort(axis=0)
    return order < n_models // 2


def lira(
    target: ArrayLike, shadows: Shadows, *, mode: str = "online", one_variance: bool | None = None
) -> Floats:
    """Return LiRA's membership score of each record, a likelihood ratio: higher for members.

    Parameters
    ----------
    target
        Scores of the records by the model under attack. Over models they should be nearly normal:
        use `logit_confidence`.
    mode
        `"online"`: log-ratio of the normal densities fitted to the shadow models trained with and
        without the record. `"offline"`: how far the score is above those of the models trained
        without the record, in their standard deviations; no shadow model needs the record itself.
    one_variance
        Use one variance for all records, which is better with few shadow models (default: if there
        are fewer than 64).
    """
    scores, members = shadows.scores, shadows.is_member
    values = np.asarray(target, np.float64)
    one_of(("online", "offline"), mode=mode)
    if scores.shape != members.shape or values.shape != scores.shape[1:]:
        raise ValueError(
            "target must have one score for each record of the shadow models, "
            f"got shapes {values.shape} and {scores.shape}."
        )
    pooled = len(scores) < 64 if one_variance is None else one_variance
    out_mean, out_std = _fit(scores, ~members, pooled)
    if mode == "offline":
        return (values - out_mean) / out_std
    log_in = stats.norm.logpdf(values, *_fit(scores, members, pooled))
    return log_in - stats.norm.logpdf(values, out_mean, out_std)


def roc(scores: ArrayLike, is_member: ArrayLike) -> ROC:
    """Return the ROC curve of an attack that guesses "member" for all scores above a threshold.

    Records with equal scores share one point of the curve.

    >>> roc([3, 2, 1, 0], [True, True, False, False]).auc
    1.0
    """
    values, members = np.asarray(scores, np.float64), np.asarray(is_member, bool)
    if values.shape != members.shape or values.ndim != 1:
        raise ValueError(
            "scores and is_member must be flat and of one length, "
            f"got shapes {values.shape} and {members.shape}."
        )
    n_in = int(members.sum())
    if not 0 < n_in < len(values):
        raise ValueError("is_member must hold members and others: a rate needs both.")
    order = np.argsort(-values, kind="stable")
    last = np.append(np.diff(values[order]) != 0, True)
    hits = np.cumsum(members[order])[last]
    false = np.cumsum(~members[order])[last]
    return ROC(
        np.concatenate([[0.0], false / (len(values) - n_in)]), np.concatenate([[0.0], hits / n_in])
    )


def minus_loss(logits: ArrayLike, labels: ArrayLike) -> Floats:
    """Return black-box scores: minus the cross-entropy of the true label (Yeom et al. 2018).

    >>> minus_loss([[0.0, 0.0]], [1]).round(3).tolist()
    [-0.693]
    """
    values, chosen = _checked(logits, labels)
    return values[chosen] - np.asarray(special.logsumexp(values, axis=1))


def logit_confidence(logits: ArrayLike, labels: ArrayLike) -> Floats:
    """Return black-box scores: log(p / (1 - p)) of the true label's probability p.

    Unlike p itself, this score is nearly normal over models, as LiRA needs (Carlini et al. 2022,
    arXiv:2112.03570, section VI). It is computed from logits, so that p near 1 loses no digits.

    >>> logit_confidence([[3.0, 0.0]], [0]).tolist()
    [3.0]
    """
    values, chosen = _checked(logits, labels)
    others = values.copy()
    others[chosen] = -np.inf
    return values[chosen] - np.asarray(special.logsumexp(others, axis=1))


def best_tpr(fpr: ArrayLike, *, epsilon: float, delta: float = 0.0) -> Floats:
    """Return the largest true positive rate of any attack on an (epsilon, delta)-DP mechanism.

    One result for each false positive rate `fpr`, by both inequalities of Kairouz, Oh & Viswanath
    2015 (arXiv:1311.0776), Theorem 2.1.

    >>> best_tpr([0.0, 0.01, 0.5], epsilon=1.0, delta=0.0).round(4).tolist()
    [0.0, 0.0272, 0.8161]
    """
    x = np.asarray(fpr, np.float64)
    grown = math.exp(non_negative(epsilon=epsilon))
    delta = in_closed_unit(delta=delta)
    return np.minimum(grown * x + delta, 1 - (1 - delta - x) / grown).clip(0.0, 1.0)


def roc_points(
    curves: Mapping[str, ROC], *, epsilon: float, delta: float
) -> list[tuple[str, float, float]]:
    """Return points (name, fpr, tpr) to plot: of `curves`, and of the limit for any attack.

    The limit is the best ROC curve that (epsilon, delta)-DP allows.
    """
    least = min(1e-3, *(float(curve.fpr[curve.fpr > 0].min()) for curve in curves.values()))
    grid = np.geomspace(least, 1.0, 200)
    limit = ROC(grid, best_tpr(grid, epsilon=epsilon, delta=delta))
    return [
        (name, float(x), float(y))
        for name, curve in {**curves, f"any attack, epsilon {epsilon:.3g}": limit}.items()
        for x, y in zip(curve.fpr, curve.tpr, strict=True)
    ]


def _fit(scores: Floats, use: Flags, pooled: bool) -> tuple[Floats, Floats | float]:
    """Return the mean and standard deviation of each record's scores over the models in `use`.

    If `pooled`, one standard deviation is estimated for all records.
    """
    counts = use.sum(axis=0)
    if (counts < (1 if pooled else 2)).any():
        raise ValueError("every record must be in and out of enough shadow models: train more.")
    mean = np.where(use, scores, 0.0).sum(axis=0) / counts
    squares = np.where(use, (scores - mean) ** 2, 0.0).sum(axis=0)
    if pooled:
        freedom = max(1, int(counts.sum()) - len(counts))
        return mean, max(math.sqrt(float(squares.sum()) / freedom), 1e-12)
    return mean, np.maximum(np.sqrt(squares / (counts - 1)), 1e-12)


def _checked(logits: ArrayLike, labels: ArrayLike) -> tuple[Floats, tuple[Indices, Indices]]:
    """Return the logits as an array, and the index that selects the true label's logit per row."""
    values, classes = np.asarray(logits, np.float64), np.asarray(labels, np.int64)
    if values.ndim != 2 or classes.shape != values.shape[:1]:
        raise ValueError(
            "logits must be (records, classes) and labels (records,), "
            f"got shapes {values.shape} and {classes.shape}."
        )
    return values, (np.arange(len(classes)), classes)
