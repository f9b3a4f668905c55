"""Linear and logistic models learned from gradients that each person makes noisy.

Wang et al. 2019 (arXiv:1907.00782); Duchi, Jordan & Wainwright 2018. Persons are divided
into groups at random. Each group receives the current weights, and every person of the group
sends one noisy gradient of their own loss. The server moves the weights along the average and
goes on with the next group. Everybody reports once, so the whole run costs each person `epsilon`.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit

from tacit._check import one_of, positive, whole
from tacit.events import Event, Shuffled
from tacit.local.coins import real_numbers
from tacit.local.frequencies import Floats
from tacit.local.means import SampledVector
from tacit.mechanisms import Seed, generator

Loss = Literal["squared", "logistic"]


@dataclass(frozen=True)
class LocalModel:
    """A linear or logistic model learned from noisy gradients, with the event of its training."""

    coef: Floats
    intercept: float
    loss: Loss
    event: Event

    def decision(self, X: ArrayLike) -> Floats:
        """Return the linear score of each row of `X`: intercept + X coef."""
        return np.asarray(X, dtype=np.float64) @ self.coef + self.intercept

    def predict(self, X: ArrayLike) -> Floats:
        """Return the prediction: a number, or for the logistic loss the probability of class 1."""
        scores = self.decision(X)
        return expit(scores) if self.loss == "logistic" else scores


@dataclass(frozen=True, kw_only=True)
class LocalSGD:
    """Stochastic gradient descent with one noisy gradient per person.

    Features are expected in [-1, 1], and the target in [-1, 1] (squared loss) or {0, 1} (logistic
    loss); values outside are clipped. The gradient of one person is (prediction - target) times the
    features and a constant 1. For the logistic loss its coordinates are then in [-1, 1]; for the
    squared loss they are clipped to [-1, 1].

    Parameters
    ----------
    epsilon
        Local privacy of the one report of each person.
    n_features
        Number of features; public.
    n_steps
        Number of groups. None takes about one per 500 / epsilon^2 persons, at least 20: fewer
        persons give an average that is mostly noise.
    learning_rate
        Step length at the first group; it falls with the square root of the group number.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (20_000, 1))
    >>> y = rng.random(20_000) < 1 / (1 + np.exp(-3 * X[:, 0]))
    >>> model = LocalSGD(epsilon=4.0, n_features=1, loss="logistic").fit(X, y, rng=1)
    >>> bool(model.coef[0] > 1.0)
    True
    """

    epsilon: float
    n_features: int
    loss: Loss = "logistic"
    n_steps: int | None = None
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        positive(epsilon=self.epsilon)
        whole(n_features=self.n_features, least=1)
        one_of(("squared", "logistic"), loss=self.loss)
        if self.n_steps is not None:
            whole(n_steps=self.n_steps, least=1)
        if self.learning_rate is not None:
            positive(learning_rate=self.learning_rate)

    @cached_property
    def randomizer(self) -> SampledVector:
        """The randomizer that adds noise to the gradient of one person."""
        return SampledVector(epsilon=self.epsilon, n_dimensions=self.n_features + 1)

    @property
    def event(self) -> Event:
        """Event of the one report of each person; no person reports twice."""
        return self.randomizer.event

    def shuffled(self, n_persons: int) -> Shuffled:
        """Return the event of a run whose order of persons is random and secret.

        Later groups receive weights that depend on earlier reports. The amplification theorem
        allows that (Feldman, McMillan & Talwar 2021, Theorem 3.1: adaptive randomizers).
        """
        return Shuffled(self.event, n_persons)

    def worst_case_ratio(self) -> Fraction:
        """Return the exact largest ratio of the probabilities of one noisy gradient."""
        return self.randomizer.worst_case_ratio()

    def gradients(self, weights: Floats, X: Floats, y: Floats) -> Floats:
        """Return the gradient of each person's loss, one per row, clipped to [-1, 1]. Private."""
        rows = np.column_stack([np.clip(np.nan_to_num(X), -1, 1), np.ones(len(X))])
        scores = rows @ weights
        if self.loss == "logistic":
            errors = expit(scores) - np.clip(np.nan_to_num(y), 0, 1)
        else:
            errors = np.clip(scores - np.clip(np.nan_to_num(y), -1, 1), -1, 1)
        return errors[:, None] * rows

    def randomize(self, weights: Floats, X: ArrayLike, y: ArrayLike, rng: Seed = None) -> Floats:
        """Return the noisy gradient that each person sends when the server has these `weights`."""
        rows = np.atleast_2d(real_numbers(X, "X"))
        targets = np.atleast_1d(real_numbers(y, "y"))
        return self.randomizer.randomize(self.gradients(weights, rows, targets), rng)

    def fit(self, X: ArrayLike, y: ArrayLike, rng: Seed = None) -> LocalModel:
        """Simulate all persons, one row of `X` and `y` each, and return the model.

        Persons are split into groups, and the reports of one group give one update of the weights.
        The model is the average of the weights after each update of the second half.
        """
        rows, targets = real_numbers(X, "X"), real_numbers(y, "y")
        if rows.ndim != 2 or rows.shape[1] != self.n_features or len(rows) != len(targets):
            raise ValueError(f"X must have {self.n_features} columns and one row per element of y.")
        source = generator(rng)
        order = np.argsort(source.random(len(rows)))
        n_steps = self._n_steps(len(rows))
        weights = np.zeros(self.n_features + 1)
        averaged = np.zeros_like(weights)
        for step, group in enumerate(np.array_split(order, n_steps)):
            reports = self.randomize(weights, rows[group], targets[group], source)
            rate = self._learning_rate / math.sqrt(step + 1)
            weights = weights - rate * reports.mean(axis=0)
            if step >= n_steps // 2:
                averaged += weights / (n_steps - n_steps // 2)
        return LocalModel(averaged[:-1], float(averaged[-1]), self.loss, self.event)

    def _n_steps(self, n_persons: int) -> int:
        if self.n_steps is not None:
            return min(self.n_steps, n_persons)
        return min(max(20, round(n_persons * self.epsilon**2 / 500)), 200, n_persons)

    @property
    def _learning_rate(self) -> float:
        if self.learning_rate is not None:
            return self.learning_rate
        return 4.0 if self.loss == "logistic" else 1.0
