"""Noisy gradient descent for logistic regression on wide or sparse tables (text, clicks).

Second moments of many columns would take more budget than they are worth. So a fit releases only
a histogram of the norms of rows and some gradients, and works with the non-zeros of the table.

* The histogram gives the median norm. Longer rows get the weight median / norm in the loss.
  Weights that depend on features only do not change the answer if the model is right.
* Residuals are bounded by 1/2 for two classes without bias, see `irls`: half of the usual noise.
* The length of the path (steps times step size) follows from the noise, which is public: the more
  noise, the earlier descent stops. Momentum reaches that length in few steps.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Unpack

import numpy as np
from scipy.sparse import csr_array, issparse

from tacit._arrays import Floats
from tacit.events import Event, Repeated, Sequence
from tacit.mechanisms import GaussianMechanism, Rng
from tacit.regression.bounds import Box
from tacit.regression.estimator import BudgetTerms, gaussian_shares
from tacit.regression.irls import residual_bounds, residuals_of
from tacit.regression.rows import PrivateRows

# Chosen on the texts of benchmarks/regression_text.py.
_NORMS_SHARE = 0.02
_MOMENTUM, _LARGEST_STEP = 0.9, 6.0
"""With momentum 0.9, step sizes below 3.8 over the curvature, at most about 1/4, are stable."""
_FEWEST_STEPS, _MOST_STEPS = 20, 150
_MARGIN_NOISE = 1.3  # what noise may add to the margin of a row of median norm
_CONSTANT = 0.25  # the constant of a row, for the intercept, relative to the median norm
_LEVELS = 2.0 ** (-np.arange(48) / 2)  # of the histogram, relative to the largest norm
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class DescentPlan:
    """Plan of one descent: a histogram of norms, then `steps` noisy gradients.

    Each mechanism has sensitivity 1. One record changes the histogram by 1 in one entry, and by 1
    in two entries if it is replaced. It adds r u' to a gradient with |r| <= `residual_clip` and
    |u| <= sqrt(1 + _CONSTANT^2) in units of the median norm, and changes it by twice that if it is
    replaced.
    """

    norms: GaussianMechanism
    gradient: GaussianMechanism
    steps: int
    step_size: float
    residual_clip: float
    n_classes: int
    method: ClassVar[str] = "descent"

    @property
    def event(self) -> Event:
        """Event of one fit, for the accountant."""
        return Sequence((self.norms.event, Repeated(self.gradient.event, self.steps)))


class DescentRows(Protocol):
    """What a descent needs of private rows (1, x) with labels, wherever they are."""

    n_features: int

    def norm_counts(self, levels: Floats) -> Floats:
        """Return how many norms |x| are at most each of the descending `levels`. Private."""
        ...

    def gradient(self, theta: Floats, limit: float, clip: float) -> Floats:
        """Return the private sum over records of factor * residual * (1, x), (d + 1, k).

        The factor, limit / max(|x|, limit), makes |x| at most `limit`; residuals are at most
        `clip`.
        """
        ...


class WideRows:
    """Private rows of a sparse table, or of a wide dense table, clipped to the bounds and scaled.

    Sparse rows are copied once; zero stays zero. See `DescentRows`.
    """

    def __init__(self, X: Any, box: Box, labels: Floats) -> None:  # Any: array or sparse rows
        self.n_rows, self.n_features = X.shape
        self._labels = labels
        if issparse(X):
            self._sparse: Any = box.clip(X)
            self._sparse.data /= box.half[self._sparse.indices]
            self._transposed: Any = csr_array(self._sparse.T)
        else:
            self._dense = PrivateRows(X, box)
            self._sparse = None
        self._norms = self.norms()

    def norm_counts(self, levels: Floats) -> Floats:
        """Return how many norms are at most each of the descending `levels`. Private."""
        return np.searchsorted(np.sort(self._norms), levels, side="right").astype(np.float64)

    def norms(self) -> Floats:
        """Return the private norm of each row."""
        if self._sparse is not None:
            return np.sqrt(np.asarray(self._sparse.multiply(self._sparse).sum(axis=1)).ravel())
        norms = np.empty(self.n_rows)
        for span, rows in self._dense.scaled():
            norms[span] = np.linalg.norm(rows, axis=1)
        return norms

    def gradient(self, theta: Floats, limit: float, clip: float) -> Floats:
        """Return the private sum over records (1, x) of factor * residual * (1, x), (d + 1, k)."""
        factors = limit / np.maximum(self._norms, limit)

        def residuals(span: slice, margins: Floats) -> Floats:
            return residuals_of(margins, self._labels[span], clip) * factors[span, None]

        if self._sparse is None:
            return self._dense.weighted_sum(theta, residuals)
        weights = residuals(slice(None), self._sparse @ theta[1:] + theta[0])
        return np.concatenate([weights.sum(axis=0)[None], self._transposed @ weights])


def plan_descent(*, n_classes: int, n_records: int, **budget: Unpack[BudgetTerms]) -> DescentPlan:
    """Return a plan that costs the budget.

    After a path of length L, noise moves the margin of a row of norm 1 by about L times the noise
    of a single mean gradient. L makes this _MARGIN_NOISE.
    """
    factors = (math.sqrt(2.0), 2.0)
    first, rest = gaussian_shares((_NORMS_SHARE, 1 - _NORMS_SHARE), factors, **budget)
    clip, _ = residual_bounds(n_classes)
    path = _MARGIN_NOISE * n_records / (clip * rest)
    per_step = _LARGEST_STEP / (1 - _MOMENTUM)
    steps = int(np.clip(math.ceil(path / per_step), _FEWEST_STEPS, _MOST_STEPS))
    return DescentPlan(
        norms=GaussianMechanism(first, l2_sensitivity=1.0, replace_factor=factors[0]),
        gradient=GaussianMechanism(
            rest * math.sqrt(steps), l2_sensitivity=1.0, replace_factor=factors[1]
        ),
        steps=steps,
        step_size=min(path / steps * (1 - _MOMENTUM), _LARGEST_STEP),
        residual_clip=clip,
        n_classes=n_classes,
    )


def fit_descent(
    rows: DescentRows,
    plan: DescentPlan,
    *,
    largest_norm: float,
    n_records: int,
    rng: Rng,
    fit_intercept: bool = True,
) -> Floats:
    """Release what `plan` says and return the model, (d + 1, 1) or (d + 1, k).

    `largest_norm` is the public bound on the norm of a scaled row. The model is the mean over the
    second half of the steps.
    """
    inside = rows.norm_counts(_LEVELS * largest_norm)
    median = _release_median(inside, plan.norms, rng) * largest_norm
    # In units of the median norm, a record is (constant, x / median), times its factor.
    units = np.append(_CONSTANT if fit_intercept else 0.0, np.full(rows.n_features, 1 / median))
    bound = _ROUNDING * plan.residual_clip * math.hypot(1.0, units[0])
    theta = np.zeros((len(units), 1 if plan.n_classes == 2 else plan.n_classes))
    velocity, average = np.zeros_like(theta), np.zeros_like(theta)
    first_kept = plan.steps // 2
    for step in range(plan.steps):
        exact = rows.gradient(units[:, None] * theta, median, plan.residual_clip)
        # One record adds a vector of norm at most bound.
        released = plan.gradient.release(units[:, None] * exact / bound, rng)
        velocity = _MOMENTUM * velocity - plan.step_size * bound * released / n_records
        theta = theta + velocity
        if step >= first_kept:
            average += theta / (plan.steps - first_kept)
    return units[:, None] * average


def _release_median(inside: Floats, mechanism: GaussianMechanism, rng: Rng) -> float:
    """Return about the median of private norms, relative to the largest, as one of the levels.

    `inside` says how many norms are at most each level. The first level is the public bound, so
    that only a norm which rounding puts above it is not counted.
    """
    counts = np.append(0.0, inside - np.append(inside[1:], 0.0))  # per number of levels >= the norm
    noisy = mechanism.release(counts, rng)  # one record is counted once
    above = noisy.cumsum()  # number of rows longer than each level
    reached = np.flatnonzero(above >= noisy.sum() / 2)
    return float(_LEVELS[max(int(reached[0]) - 1, 0)] if len(reached) else _LEVELS[0])
