"""Noisy gradient descent and DP-SGD for logistic regression.

Descent first releases a noisy Gram matrix of some of the records, once. The inverse of that matrix
sets the step length in every direction, so that a dozen steps do what plain descent needs hundreds
for. Then each step releases one noisy gradient. The schedule is fixed in advance from public facts.

A record is z = (1, x), scaled. A record longer than `row_norm` = R gets the weight R / |z|; weights
that depend on features only do not change the answer if the model is right.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Unpack

import numpy as np
from scipy.special import expit, softmax

from tacit._arrays import Floats, Indices
from tacit.accounting import calibrate
from tacit.events import Event, Gaussian, Repeated, Sequence
from tacit.mechanisms import GaussianMechanism, Rng, SecureGenerator
from tacit.regression.estimator import BudgetTerms, gaussian_shares
from tacit.regression.rows import PrivateRows, from_triangle, triangle, triangle_noise
from tacit.sampling import Poisson

# Tuned in benchmarks/regression_tuning.py, on data sets that no other benchmark reports.
_STEPS, _MOMENTUM = 12, 0.5
_AVERAGED = 8  # number of last steps whose models are averaged
_GRAM_SHARE = 0.15
_GRAM_NOISE = 0.03  # relative noise of the Gram matrix that is small enough to set step lengths
_LEAST_GRAM_RATE = 0.05
_CROWDED = 0.05  # relative noise of the Gram matrix above which logistic residuals are clipped
_SGD_EPOCHS = 10


@dataclass(frozen=True)
class GradientPlan:
    """Plan of one descent: it releases a noisy Gram matrix, then one noisy gradient per step.

    A record z has norm at most R = `row_norm` after weighting.

    * The Gram matrix uses each record independently with probability `gram_rate`. One record adds
      z z', of Frobenius norm at most R^2. If z is replaced by w, the change is at most sqrt(2) R^2,
      because the inner product of z z' and w w' is >= 0. The price ignores the sampling, which
      could only lower it.
    * In the gradient, one record adds its weighted row, of norm at most R, times a residual of norm
      at most `residual_clip`: at most their product, and twice that if the record is replaced.
    """

    gram: GaussianMechanism
    gram_rate: float
    gradient: GaussianMechanism
    steps: int
    residual_clip: float
    row_norm: float
    method: ClassVar[str] = "gradient"

    @property
    def event(self) -> Event:
        """Event of one fit, for the accountant."""
        return Sequence((self.gram.event, Repeated(self.gradient.event, self.steps)))


@dataclass(frozen=True)
class SGDPlan:
    """Plan of DP-SGD: `steps` noisy gradients, each of a lot drawn with probability `rate`.

    One record changes a gradient as in `GradientPlan`. Residuals (predicted probabilities minus the
    label as 0 or 1 for each class) need no clipping: their norm is below 1 for two classes and
    below sqrt(2) for more, which is `residual_clip`.
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


def plan_logistic(
    n_features: int,
    *,
    n_classes: int,
    row_norm: float,
    n_records: int,
    **budget: Unpack[BudgetTerms],
) -> GradientPlan:
    """Return the plan of a descent for the logit model (logistic regression).

    If noise is large, residuals (predicted probability minus label) are clipped at half their
    largest norm. That halves the noise and adds a small bias: confident mistakes count for less.
    """
    factors = (math.sqrt(2.0), 2.0)
    first, rest = gaussian_shares((_GRAM_SHARE, 1 - _GRAM_SHARE), factors, **budget)
    gram = GaussianMechanism(first, l2_sensitivity=row_norm**2, replace_factor=factors[0])
    gram_noise = triangle_noise(gram.noise_std, n_features + 1) / n_records
    bound = _residual_bound(n_classes)
    residual_clip = bound / 2 if gram_noise > _CROWDED else bound
    return GradientPlan(
        gram=gram,
        gram_rate=float(np.clip(gram_noise / _GRAM_NOISE, _LEAST_GRAM_RATE, 1.0)),
        gradient=GaussianMechanism(
            rest * math.sqrt(_STEPS), l2_sensitivity=residual_clip * row_norm
        ),
        steps=_STEPS,
        residual_clip=residual_clip,
        row_norm=row_norm,
    )


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
    residual_clip = _residual_bound(n_classes)
    gradient = GaussianMechanism(noise, l2_sensitivity=residual_clip * row_norm)
    return SGDPlan(gradient, steps, residual_clip, row_norm, rate)


def fit_logistic(
    rows: PrivateRows, labels: Floats, plan: GradientPlan, n_classes: int, n_records: int, rng: Rng
) -> Floats:
    """Return the coefficients of the logit model by noisy gradient descent, intercept first.

    They are (d + 1,) for d features and two classes, or (d + 1, k) for k > 2 classes. The Hessian
    of the loss is at most 1/4 (two classes) or 1/2 (more) of the Gram matrix.
    """
    return _descend(
        rows,
        plan,
        lambda theta: logistic_gradient(rows, labels, theta, plan.residual_clip, n_classes),
        start=_zero_model(rows.n_features, n_classes),
        curvature=0.25 if n_classes == 2 else 0.5,
        n_records=n_records,
        rng=rng,
    )


def fit_sgd(
    rows: PrivateRows, labels: Floats, plan: SGDPlan, n_classes: int, n_records: int, rng: Rng
) -> Floats:
    """Return coefficients of the logit model by DP-SGD, averaged over the second half of the steps.

    If no row is longer than R = `plan.row_norm`, the curvature of the mean loss is at most R^2 / 4
    (two classes) or R^2 / 2 (more). With momentum 0.9, step sizes up to 3.8 divided by this bound
    are stable; the step size is 2 divided by it.
    """
    step_size = (8.0 if n_classes == 2 else 4.0) / plan.row_norm**2
    theta = _zero_model(rows.n_features, n_classes)
    velocity, average = np.zeros_like(theta), np.zeros_like(theta)
    first_kept = plan.steps // 2
    for step in range(plan.steps):
        lot = draw(plan.rate, rows.n_rows, rng)
        private = logistic_gradient(
            rows.take(lot), labels[lot], theta, plan.residual_clip, n_classes
        )
        # One record adds a vector of norm at most residual_clip * row_norm.
        gradient = plan.gradient.release(private, rng) / (plan.rate * n_records)
        velocity = 0.9 * velocity + gradient
        theta = theta - step_size * velocity
        if step >= first_kept:
            average += theta / (plan.steps - first_kept)
    return average


def logistic_gradient(
    rows: PrivateRows, labels: Floats, theta: Floats, residual_clip: float, n_classes: int
) -> Floats:
    """Return the private sum over records of the clipped, weighted gradient of the logistic loss.

    `labels` are class numbers. The weights are `rows.factors`, which limit the norm of a row.
    """

    def residuals(span: slice, margins: Floats) -> Floats:
        if n_classes == 2:
            clipped = np.clip(expit(margins) - labels[span], -residual_clip, residual_clip)
            return clipped * rows.factors[span]
        many = softmax(margins, axis=1)
        many[np.arange(len(many)), labels[span].astype(np.intp)] -= 1.0
        norms = np.maximum(np.linalg.norm(many, axis=1), residual_clip)
        return many * (rows.factors[span] * residual_clip / norms)[:, None]

    return rows.weighted_sum(theta, residuals)


def draw(rate: float, n_rows: int, rng: Rng) -> Indices:
    """Return private indices of rows, each drawn independently with probability `rate`."""
    if isinstance(rng, SecureGenerator):
        return np.flatnonzero(rng.random(n_rows) < rate)
    return Poisson(rate).indices(n_rows, rng)


def _descend(
    rows: PrivateRows,
    plan: GradientPlan,
    private_gradient: Callable[[Floats], Floats],
    *,
    start: Floats,
    curvature: float,
    n_records: int,
    rng: Rng,
) -> Floats:
    """Run noisy gradient descent from `start` and return the mean of its last models.

    `private_gradient(theta)` is the sum over records of clipped, weighted gradients at theta.
    `curvature` times the Gram matrix must bound the Hessian of the loss. A step of the inverse of
    this bound times the gradient then cannot overshoot (Böhning & Lindsay 1988), and momentum is
    stable for steps up to twice as long.
    """
    chosen = draw(plan.gram_rate, rows.n_rows, rng) if plan.gram_rate < 1 else None
    # One record adds z z' with |z| <= row_norm, or nothing if it was not drawn.
    noisy = from_triangle(plan.gram.release(triangle(rows.gram(chosen)), rng), rows.n_features + 1)
    inverse = _inverse(noisy / (plan.gram_rate * n_records), plan, n_records) / curvature
    theta, velocity, average = start, np.zeros_like(start), np.zeros_like(start)
    for step in range(plan.steps):
        # One record adds a vector of norm at most residual_clip * row_norm.
        gradient = plan.gradient.release(private_gradient(theta), rng) / n_records
        velocity = _MOMENTUM * velocity - inverse @ gradient
        theta = theta + velocity
        if step >= plan.steps - _AVERAGED:
            average += theta / _AVERAGED
    return average


def _inverse(gram: Floats, plan: GradientPlan, n_records: int) -> Floats:
    """Return the inverse of an upper bound on the mean Gram matrix; it sets the step lengths.

    `gram` is the released noisy mean. The size of its noise is added to its eigenvalues.
    """
    values, vectors = np.linalg.eigh(gram)
    noise = triangle_noise(plan.gram.noise_std, len(gram)) / (plan.gram_rate * n_records)
    # No mean of z z' has an eigenvalue above row_norm^2, so more than half of it would not help.
    margin = min(noise, plan.row_norm**2 / 2)
    return (vectors / (np.maximum(values, 0.0) + margin)) @ vectors.T


def _residual_bound(n_classes: int) -> float:
    """Return a bound on the norm of a residual: predicted probabilities minus the one-hot label.

    For two classes the residual is one number, the probability of the second class minus the label.
    """
    return 1.0 if n_classes == 2 else math.sqrt(2.0)


def _zero_model(n_features: int, n_classes: int) -> Floats:
    return np.zeros(n_features + 1 if n_classes == 2 else (n_features + 1, n_classes))
