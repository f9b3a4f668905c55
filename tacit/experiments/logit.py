"""A logit model of one attribute, seen whole: the likelihood surface and the paths up to its top.

With one attribute the model has two parameters, so everything about it fits into a picture: the
log-likelihood as a surface, the path of DP-SGD on it beside the path without privacy, the fitted
probabilities, and the loss that each budget leaves. The surface and the ordinary path look at all
records without noise, so this runs only on data that the recipe says are public.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import expit

from tacit.datasets import Dataset, Schema
from tacit.experiments import data, models
from tacit.experiments.recipe import Recipe
from tacit.experiments.training_loop import example_losses, noise_multiplier, steps_of, tensors
from tacit.training import make_private

Point = tuple[float, float]
"""Log-odds at the middle of the declared bounds, and their slope by unit of the attribute.

Both are nearly uncorrelated there, so that the surface is a hill rather than a ridge."""

_SIDE = 61  # points of the grid along each parameter
_NEWTON = 25  # more than Newton's method needs from zero on a concave function of two parameters


@dataclass(frozen=True, kw_only=True)
class Ascent:
    """One run of DP-SGD from zero: the parameters after each step, all covered by `epsilon`."""

    epsilon: float
    points: tuple[Point, ...]
    loss: float
    """Mean loss of the last point over the training records. Private, were the data not public."""


@dataclass(frozen=True, kw_only=True)
class LogitStudy:
    """The surface, the paths and the losses."""

    attribute: str
    target: str
    delta: float
    n_records: int
    middle: float
    """Of the attribute's declared bounds."""
    ordinary: tuple[Point, ...]
    """Newton's steps without privacy; the last is the maximum."""
    private: tuple[Ascent, ...]
    """Every repeat at every epsilon, in order."""
    loss: float
    """Least mean loss: that of the maximum."""
    log_odds: tuple[float, ...]
    slopes: tuple[float, ...]
    surface: tuple[tuple[float, ...], ...]
    """Mean log-likelihood, a row for each slope."""
    levels: tuple[tuple[float, float, int], ...]
    """Value of the attribute, share of the target's second class, records."""

    def to_dict(self) -> dict[str, Any]:  # Any: JSON values
        """Plain JSON values."""
        return asdict(self)


def study_logit(
    recipe: Recipe,
    *,
    epsilons: Sequence[float],
    repeats: int = 5,
    root: str | os.PathLike[str] | None = None,
) -> LogitStudy:
    """Train the recipe's logit model `repeats` times at each epsilon, and without privacy.

    The recipe's table must have one attribute with bounds and a target of two classes.
    """
    if not recipe.data.holds_public_records:
        raise ValueError("the surface shows all records: it needs data.is_public = true.")
    dataset = data.load(recipe.data, None if root is None else Path(root))
    schema = Schema.from_dict(recipe.data.schema) if recipe.data.schema else None
    if schema is None or len(dataset.feature_names) != 1 or dataset.n_classes != 2:
        raise ValueError("a surface needs a table with one attribute, and a target of two classes.")
    (column,) = (c for c in schema.columns if c.name != schema.target)
    assert column.lower is not None  # one feature, so bounds rather than categories
    assert column.upper is not None
    middle, half = (column.lower + column.upper) / 2, (column.upper - column.lower) / 2
    records = _Records(dataset.x_train[:, 0] * half, dataset.y_train)
    filled = recipe.filled(len(dataset.x_train))
    runs = []
    for epsilon in sorted(set(epsilons)):
        at = recipe.for_epsilon(epsilon).filled(len(dataset.x_train))
        noise = noise_multiplier(at, len(dataset.x_train))
        for k in range(repeats):
            seed = None if recipe.run.seed is None else recipe.run.seed + k
            path = _private_path(at, dataset, noise, seed)
            points = tuple((b, w / half) for b, w in path)
            runs.append(Ascent(epsilon=epsilon, points=points, loss=records.loss(points[-1])))
    ordinary = records.newton()
    grid = _grid([p for run in runs for p in run.points] + list(ordinary))
    assert filled.privacy.delta is not None
    return LogitStudy(
        attribute=column.name,
        target=schema.target,
        delta=filled.privacy.delta,
        n_records=len(dataset.x_train),
        middle=middle,
        ordinary=ordinary,
        private=tuple(runs),
        loss=records.loss(ordinary[-1]),
        log_odds=grid[0],
        slopes=grid[1],
        surface=tuple(tuple(-records.loss((b, w)) for b in grid[0]) for w in grid[1]),
        levels=records.levels(middle),
    )


class _Records:
    """An attribute less its middle, and two classes, counted by value: a loss then costs little."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, group = np.unique(np.round(x, 6), return_inverse=True)
        self.counts = np.bincount(group).astype(float)
        self.ones = np.bincount(group, weights=y)

    def loss(self, point: Point) -> float:
        """Mean of -log p(y | x)."""
        margins = point[0] + point[1] * self.x
        total = self.counts * np.logaddexp(0.0, margins) - self.ones * margins
        return float(total.sum() / self.counts.sum())

    def newton(self) -> tuple[Point, ...]:
        """Newton's method from zero."""
        design = np.stack([np.ones_like(self.x), self.x], axis=1)
        theta = np.zeros(2)
        path: list[Point] = [(0.0, 0.0)]
        for _ in range(_NEWTON):
            p = expit(design @ theta)
            gradient = design.T @ (self.ones - self.counts * p)
            curvature = (design * (self.counts * p * (1 - p))[:, None]).T @ design
            step = np.linalg.solve(curvature, gradient)
            theta = theta + step
            path.append((float(theta[0]), float(theta[1])))
            if np.abs(step).max() < 1e-9:
                break
        return tuple(path)

    def levels(self, middle: float) -> tuple[tuple[float, float, int], ...]:
        """Value, share of ones, and number of records."""
        shares = self.ones / self.counts
        rows = zip(self.x.tolist(), shares.tolist(), self.counts.tolist(), strict=True)
        return tuple((x + middle, share, int(count)) for x, share, count in rows)


def _private_path(recipe: Recipe, dataset: Dataset, noise: float, seed: int | None) -> list[Point]:
    """Return log-odds and slope after each step of DP-SGD, for the attribute scaled to [-1, 1]."""
    training, n_records = recipe.training, len(dataset.x_train)
    assert training.batch_size is not None  # filled
    model = models.build(recipe.model, (1,), 2, seed=0)

    def point() -> Point:
        weight, bias = (p.detach() for p in model.parameters())
        return float(bias[1] - bias[0]), float(weight[1, 0] - weight[0, 0])

    private = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=training.learning_rate, momentum=training.momentum),
        tensors(dataset.x_train, dataset.y_train),
        example_losses,
        batch_size=training.batch_size,
        steps=steps_of(recipe, n_records),
        clip_norm=training.clip_norm,
        noise_multiplier=noise,
        seed=seed,
    )
    path = [point()]
    for lot in private:
        private.step(lot)
        path.append(point())
    return path


def _grid(points: Sequence[Point]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Axes of the surface: around all points, with a margin."""
    axes = []
    for values in zip(*points, strict=True):
        low, high = min(values), max(values)
        room = 0.15 * (high - low) or math.ulp(1.0)
        axes.append(tuple(np.linspace(low - room, high + room, _SIDE).tolist()))
    return axes[0], axes[1]
