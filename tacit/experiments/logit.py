"""A logit model of one attribute: its likelihood surface, and the paths of training on it.

With one attribute the model has two parameters, so figures can show all of it: the log-likelihood
as a surface, the paths of training with and without privacy, the fitted probabilities, and the loss
at each epsilon. The surface and the ordinary path use all records without noise, so a study needs
data that the recipe declares public.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit

from tacit.datasets import Dataset
from tacit.experiments import data
from tacit.experiments.recipe import Recipe

Point = tuple[float, float]
"""Log-odds at the middle of the declared bounds, and their slope per unit of the attribute.

With the attribute centered there, the two parameters are nearly uncorrelated, so the surface is a
round hill rather than a narrow ridge."""

_SIDE = 61  # points of the grid along each parameter
_NEWTON = 25  # Newton's method from zero needs fewer steps on a concave function of two parameters


@dataclass(frozen=True, kw_only=True)
class Ascent:
    """One run of DP-SGD from weights 0: the parameters after each step, covered by `epsilon`."""

    epsilon: float
    points: tuple[Point, ...]
    loss: float
    """Mean loss of the last point on the training records, computed without noise."""


@dataclass(frozen=True, kw_only=True)
class LogitStudy:
    """The result of a study: likelihood surface, training paths, and the losses that they reach."""

    attribute: str
    target: str
    delta: float
    n_records: int
    middle: float
    """Middle of the attribute's declared bounds."""
    ordinary: tuple[Point, ...]
    """Newton's steps without privacy; the last point is the maximum of the likelihood."""
    private: tuple[Ascent, ...]
    """Every repeat at every epsilon, in order."""
    loss: float
    """Smallest mean loss, at the maximum of the likelihood."""
    log_odds: tuple[float, ...]
    slopes: tuple[float, ...]
    surface: tuple[tuple[float, ...], ...]
    """Mean log-likelihood; one row for each slope, one column for each log-odds."""
    levels: tuple[tuple[float, float, int], ...]
    """For each value of the attribute: value, share of the second class, number of records."""

    def to_dict(self) -> dict[str, Any]:  # Any: JSON values
        """Return plain JSON values."""
        return asdict(self)


def study_logit(
    recipe: Recipe,
    *,
    epsilons: Sequence[float],
    repeats: int = 5,
    root: str | os.PathLike[str] | None = None,
    on_run: Callable[[int, int], None] = lambda _done, _total: None,
) -> LogitStudy:
    """Train the recipe's logit model `repeats` times at each epsilon, and once without privacy.

    The recipe's table must have one attribute with bounds and a target of two classes. `on_run` is
    called after each run with the number of runs done and their total.
    """
    from tacit.experiments.training_loop import noise_multiplier

    if not recipe.data.holds_public_records:
        raise ValueError(
            "the surface shows all records: it needs public records. Declare them with "
            "--public or data.is_public = true."
        )
    dataset = data.load(recipe.data, None if root is None else Path(root))
    schema = data.schema_of(recipe.data) if recipe.data.schema else None
    if schema is None or len(dataset.feature_names) != 1 or dataset.n_classes != 2:
        raise ValueError("a surface needs a table with one attribute, and a target of two classes.")
    (column,) = schema.features
    middle, half = column.middle_and_half
    records = _Records(dataset.x_train[:, 0] * half, dataset.y_train)
    runs = []
    for epsilon in sorted(set(epsilons)):
        at = recipe.for_epsilon(epsilon).filled(len(dataset.x_train))
        noise = noise_multiplier(at, len(dataset.x_train))
        for k in range(repeats):
            seed = None if recipe.run.seed is None else recipe.run.seed + k
            path = _private_path(at, dataset, noise, seed)
            points = tuple((b, w / half) for b, w in path)
            runs.append(Ascent(epsilon=epsilon, points=points, loss=records.loss(points[-1])))
            on_run(len(runs), len(set(epsilons)) * repeats)
    ordinary = records.newton()
    grid = _grid([p for run in runs for p in run.points] + list(ordinary))
    return LogitStudy(
        attribute=column.name,
        target=schema.target,
        delta=recipe.filled(len(dataset.x_train)).privacy.budget.delta,
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
    """Records with one centered attribute and two classes, counted by value for fast losses."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, group = np.unique(np.round(x, 6), return_inverse=True)
        self.counts = np.bincount(group).astype(float)
        self.ones = np.bincount(group, weights=y)

    def loss(self, point: Point) -> float:
        """Return the mean of -log p(y | x) over records of attribute x and class y, at `point`."""
        margins = point[0] + point[1] * self.x
        total = self.counts * np.logaddexp(0.0, margins) - self.ones * margins
        return float(total.sum() / self.counts.sum())

    def newton(self) -> tuple[Point, ...]:
        """Return the points that Newton's method visits from zero to the most likely point."""
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
        """Return (value, share of class 1, number of records) for each value of the attribute.

        The attribute is centered; adding `middle` gives its original value.
        """
        shares = self.ones / self.counts
        rows = zip(self.x.tolist(), shares.tolist(), self.counts.tolist(), strict=True)
        return tuple((x + middle, share, int(count)) for x, share, count in rows)


def _private_path(recipe: Recipe, dataset: Dataset, noise: float, seed: int | None) -> list[Point]:
    """Return the intercept (log-odds) and the slope after each step of one DP-SGD run.

    The attribute is scaled to [-1, 1]. `noise` is the noise multiplier.
    """
    from tacit.experiments import models
    from tacit.experiments.training_loop import TrainingLoop, tensors

    model = models.build(recipe.model, (1,), 2, seed=0)

    def point() -> Point:
        weight, bias = (p.detach() for p in model.parameters())
        return float(bias[1] - bias[0]), float(weight[1, 0] - weight[0, 0])

    loop = TrainingLoop(
        recipe,
        model,
        tensors(dataset.x_train, dataset.y_train),
        n_records=len(dataset.x_train),
        noise_multiplier=noise,
        seed=seed,
    )
    return [point(), *(point() for _ in loop.steps())]


def _grid(points: Sequence[Point]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the two axes of the surface's grid, which covers all `points` with a margin."""
    axes = []
    for values in zip(*points, strict=True):
        low, high = min(values), max(values)
        room = 0.15 * (high - low) or math.ulp(1.0)
        axes.append(tuple(np.linspace(low - room, high + room, _SIDE).tolist()))
    return axes[0], axes[1]
