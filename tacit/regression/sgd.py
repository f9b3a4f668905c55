"""DP-SGD for logistic regression (Abadi et al. 2016).

A record is z = (1, x), scaled. A record longer than `row_norm` = R gets the weight R / |z|; weights
that depend on features only do not change the answer if the model is right.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Unpack

import numpy as np

from tacit._arrays import Floats
from tacit.accounting import calibrate
from tacit.events import Event, Gaussian, Repeated
from tacit.mechanisms import GaussianMechanism, Rng
from tacit.regression.estimator import BudgetTerms
from tacit.regression.irls import residual_bounds, residuals_of
from tacit.regression.rows import PrivateRows
from tacit.regression.whitening import draw
from tacit.sampling import Poisson

_SGD_EPOCHS = 10


@dataclass(frozen=True)
class SGDPlan:
    """Plan of DP-SGD: `steps` noisy gradients, each of a lot drawn with probability `rate`.

    One record adds its weighted row, of norm at most `row_norm`, times a residual of norm at most
    `residual_clip`: at most their product, and twice that if the record is replaced. Residuals
    (predicted probabilities minus the label as 0 or 1 for each class) need no clipping: their norm
    is below 1 for two classes and below sqrt(2) for more, which is `residual_clip`.
    """

    gradient: GaussianMechanism
    steps: int
    residual_clip: float
    row_norm: float
    rate: float
    method: ClassVar[str] = "sgd"

    @property
    def event(self) -> Event:
        """Event of one fit, for the accountant."""
        return Repeated(Poisson(self.rate).amplify(self.gradient.event), self.steps)


def plan_sgd(
    *, n_classes: int, row_norm: float, rate: float, **budget: Unpack[BudgetTerms]
) -> SGDPlan:
    """Return the plan of DP-SGD (Abadi et al. 2016): ten epochs of lots drawn at `rate`.

    Each lot contains each record independently with probability `rate`.
    """
    steps = math.ceil(_SGD_EPOCHS / rate)
    sampler = Poisson(rate)
    noise = calibrate(
        lambda multiplier: Repeated(sampler.amplify(Gaussian(multiplier)), steps), **budget
    )
    residual_clip = residual_bounds(n_classes)[1]
    gradient = GaussianMechanism(noise, l2_sensitivity=residual_clip * row_norm)
    return SGDPlan(gradient, steps, residual_clip, row_norm, rate)


def fit_sgd(
    rows: PrivateRows, labels: Floats, plan: SGDPlan, n_classes: int, n_records: int, rng: Rng
) -> Floats:
    """Return coefficients of the logit model by DP-SGD, averaged over the second half of the steps.

    If no row is longer than R = `plan.row_norm`, the curvature of the mean loss is at most R^2 / 4
    (two classes) or R^2 / 2 (more). With momentum 0.9, step sizes up to 3.8 divided by this bound
    are stable; the step size is 2 divided by it.
    """
    step_size = (8.0 if n_classes == 2 else 4.0) / plan.row_norm**2
    theta = np.zeros((rows.n_features + 1, 1 if n_classes == 2 else n_classes))
    velocity, average = np.zeros_like(theta), np.zeros_like(theta)
    first_kept = plan.steps // 2
    for step in range(plan.steps):
        lot = draw(plan.rate, rows.n_rows, rng)
        private = sgd_gradient(rows.take(lot), labels[lot], theta, plan.residual_clip)
        # One record adds a vector of norm at most residual_clip * row_norm.
        gradient = plan.gradient.release(private, rng) / (plan.rate * n_records)
        velocity = 0.9 * velocity + gradient
        theta = theta - step_size * velocity
        if step >= first_kept:
            average += theta / (plan.steps - first_kept)
    return average


def sgd_gradient(rows: PrivateRows, labels: Floats, theta: Floats, clip: float) -> Floats:
    """Return the private sum over records of the weighted gradient of the logistic loss.

    `labels` are class numbers. The weights are `rows.factors`, which limit the norm of a row.
    """

    def residuals(span: slice, margins: Floats) -> Floats:
        return residuals_of(margins, labels[span], clip) * rows.factors[span, None]

    return rows.weighted_sum(theta, residuals)
